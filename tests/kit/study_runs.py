"""A study whose runs take a second each: a table of logits in place of a model."""

from __future__ import annotations

from pathlib import Path

from rlvr.cli.main import run
from rlvr.studies.study_folder import open_study
from rlvr.studies.study_plan import StudyPlan, build_plan, read_variants
from rlvr.studies.study_report import write_report
from rlvr.studies.study_summary import is_finished, summarize

MOCK = """
client: mock
env: {name: toy}
rollout: {max_tokens: 8}
reward: {type: keyword_contains, kwargs: {keywords: [answer, solution]}}
training: {steps: 5, prompts_per_step: 2, group_size: 4, optimizer: {learning_rate: 0.01}}
evaluation: {tasks: 4, samples: 4}
"""


def planned(*overrides: str, environment: tuple[str, ...] = (), name: str | None = None) -> StudyPlan:
    """The plan of `rlvr study --config=mock.yaml ...`."""
    return build_plan(*read_variants(overrides, environment), name, config="mock.yaml")


def studied(*words: str) -> list[str]:
    """The command."""
    return ["study", "--config=mock.yaml", *words]


def read_study(words: list[str]) -> StudyPlan:
    """The plan of the words after `rlvr study`, with options by `--name value` or `--name=value`."""
    options: dict[str, list[str]] = {"--config-name": [], "--config": [], "--name": [], "--environment": []}
    overrides, left = list[str](), iter(words)
    for word in left:
        name, _, value = word.partition("=")
        if name in options:
            options[name].append(value or next(left))
        else:
            overrides.append(word)
    config_name, config, name = (next(iter(options[key]), None) for key in ("--config-name", "--config", "--name"))
    variants = read_variants(overrides, tuple(options["--environment"]))
    return build_plan(*variants, name, config_name=config_name, config=config)


def make_study(root: Path, name: str, *overrides: str) -> Path:
    """The folder of a study with its runs, table and summary, made in this process."""
    (root.parent / "mock.yaml").write_text(MOCK)
    plan = build_plan(*read_variants([*overrides, f"run.root={root}"]), name, config=str(root.parent / "mock.yaml"))
    make_runs(plan)
    write_report(plan.folder, summarize(plan))
    return plan.folder


def make_runs(plan: StudyPlan, *without: str) -> None:
    """Make the runs of a plan, except those named, in this process: as the study would, and faster."""
    with open_study(plan):
        for planned_run in plan.runs:
            if planned_run.name not in without and not is_finished(plan, planned_run):
                assert run(plan.command(planned_run)) == 0
