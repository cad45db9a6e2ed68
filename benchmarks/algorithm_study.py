"""Does every algorithm learn, measured on small tasks from the same start?

    python -m benchmarks.algorithm_study seeds=1..5                             # all tasks, all variants
    python -m benchmarks.algorithm_study arithmetic seeds=1 variants=grpo,dapo  # some of them

A task is a complete config in `rlvr/configs/algorithms_study/`: fine-tuning, then `grpo`. The study fine-tunes once for
each seed (`<task>-start`); all variants of the seed start from these weights and learn from equally many samples. A
variant is a name and its overrides: add an entry to a table here, and the same command makes its runs and keeps others.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.algorithm_report import format_results, write_results
from benchmarks.algorithm_results import describe_task, make_results
from rlvr.algorithms.registry import ALGORITHMS
from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.files import check_name
from rlvr.core.registry import did_you_mean
from rlvr.runs.assembly import assemble
from rlvr.runs.user_messages import mask_secrets
from rlvr.studies.study_folder import open_study
from rlvr.studies.study_plan import StudyPlan, StudyVariant, build_plan, read_overrides, read_variables, split_values
from rlvr.studies.study_report import write_report
from rlvr.studies.study_runner import StudyRunner
from rlvr.studies.study_summary import is_finished, summarize
from rlvr.tracking import RunConsole
from rlvr.training.training_job import RunOptions
from rlvr.training.training_options import TrainingOptions

NAME = "algorithms"
CONFIGS = "algorithms_study"
TASKS = ("arithmetic", "programs", "tools")
REFERENCE = "grpo"  # what the others are compared with
LEFT_OUT = {
    "distillation": "it learns from a teacher, not from the verifier, so its result would be the teacher's",
    "sdpo": "its teacher reads other answers in its prompt, which the policies of this study never learned to use",
}
OF_TURNS = ("grpo_process", "echo")  # algorithms for episodes of several turns

# Variants of `grpo` for exploration. `pass_at_k` is an algorithm of its own.
EXPLORATION: dict[str, tuple[str, ...]] = {
    "entropy_bonus": ("algorithm.entropy_coef=0.01",),
    "clip_symmetric": ("algorithm.clip_high=0.2",),  # grpo has 0.28 above and 0.2 below
    "clip_higher": ("algorithm.clip_high=0.5",),
    "clip_cov": ("algorithm.clip_cov_ratio=0.002",),
    "temperature_end": ("training.temperature_end=0.7",),
}
# A verifier that errs about a share of the completions. The correction is a control: it scales all rewards alike, which
# AdamW divides out again, so both `noise_20` are to learn alike but for rounding.
_ERRORS = ("algorithm.name=dr_grpo", "training.false_positives=0.2", "training.false_negatives=0.2")
NOISE: dict[str, tuple[str, ...]] = {
    "false_positives": ("training.false_positives=0.1",),
    "false_positives_30": ("training.false_positives=0.3",),
    "false_negatives": ("training.false_negatives=0.1",),
    "false_negatives_30": ("training.false_negatives=0.3",),
    "noise_20": _ERRORS,
    "noise_20_corrected": (*_ERRORS, "training.noise_correction=true"),
}
# `grpo` with rewards without information.
CONTROLS: dict[str, tuple[str, ...]] = {
    "random_reward": ("training.control=random_reward",),
    "equal_rewards": ("training.control=equal_rewards",),
}
# What an algorithm needs beside its name.
NEEDED: dict[str, tuple[str, ...]] = {"ppo_critic": ("training.critic.optimizer.learning_rate=0.001",)}


@dataclass(frozen=True)
class TaskPlan:
    """The two studies of a task: `start` makes the weights that the runs of `variants` start from."""

    task: str
    start: StudyPlan
    variants: StudyPlan


def list_variants() -> dict[str, tuple[str, ...]]:
    """Every variant with its overrides, the reference first."""
    names = [REFERENCE, *(name for name in ALGORITHMS if name != REFERENCE and name not in LEFT_OUT)]
    algorithms = {name: (f"algorithm.name={name}", *NEEDED.get(name, ())) for name in names}
    return {**algorithms, **EXPLORATION, **NOISE, **CONTROLS}


def read_algorithm_plans(words: Sequence[str], environment: Sequence[str], name: str | None) -> list[TaskPlan]:
    """The plans of `[TASK ...] seeds=... [variants=...] [key=value ...]`; ValueError for what a run would refuse."""
    tasks = _choose([word for word in words if "=" not in word], TASKS, "task") or list(TASKS)
    listed = [word.partition("=")[2] for word in words if word.startswith("variants=")]
    known = list_variants()
    given = [name for text in listed for name in split_values(text)]
    if "" in given:
        raise ValueError(
            f"variants={','.join(given)}: a name is empty; leave variants= out for all, or give of {', '.join(known)}"
        )
    if left_out := [name for name in given if name in LEFT_OUT]:
        raise ValueError(f"variants={left_out[0]} is not compared: {LEFT_OUT[left_out[0]]}; leave it out")
    chosen = _choose([REFERENCE, *given], known, "variant") if given else list(known)
    rest = [word for word in words if "=" in word and not word.startswith("variants=")]
    (seeds, shared, axes), variables = read_overrides(rest), read_variables(environment)
    if axes or any(len(values) > 1 for _, values in variables):
        raise ValueError(
            f"{axes[0][0] if axes else '--environment'} has several values, and the variants of this study are given "
            "by variants=; give one value"
        )
    if named := [word for word in shared if word.startswith("algorithm.name=")]:
        raise ValueError(f"{named[0]}: the algorithms are the variants; give variants={REFERENCE},... instead")
    root = next((word.partition("=")[2] for word in shared if word.startswith("run.root=")), RunOptions.root)
    shared = [word for word in shared if not word.startswith("run.root=")]
    shared.append(f"run.root={Path(root) / check_name(name or f'{NAME}-study', 'study name')}")
    common = {key: values[0] for key, values in variables}
    plans = [_plan_task(task, seeds, shared, common, chosen) for task in tasks]
    made = {variant.name for plan in plans for variant in plan.variants.variants}
    if lost := [name for name in given if name not in made]:
        raise ValueError(
            f"variants={lost[0]} is for episodes of several turns, and those of {', '.join(tasks)} have one; add the "
            "task tools, or leave it out"
        )
    return plans


def _choose(given: Sequence[str], known: Collection[str], what: str) -> list[str]:
    """The given names, in the order of `known`; ValueError for one that is not in it."""
    for name in given:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}{did_you_mean(name, list(known))}; there are: {', '.join(known)}")
    return [name for name in known if name in given]


def _plan_task(
    task: str,
    seeds: tuple[int, ...],
    shared: Sequence[str],
    environment: dict[str, str],
    chosen: Sequence[str],
) -> TaskPlan:
    """Settings of fine-tuning go to the start only, those of reinforcement learning to the variants only."""
    config_name = f"{CONFIGS}/{task}"
    of_start = [w for w in shared if not w.startswith(("training.", "algorithm.", "curriculum.", "teacher."))]
    of_variants = [w for w in shared if not w.startswith("sft.")]
    settings = build_config(load(config_name, None, of_variants))
    sizes, turns = settings.training, assemble(settings).source.max_turns
    if sizes.steps == 0:
        raise ValueError("training.steps=0: nothing would be learned that could be compared; give at least 1")
    drafts: list[StudyVariant] = []
    for name, overrides in list_variants().items():
        if name not in chosen or (name in OF_TURNS and turns == 1):
            continue
        if name in ALGORITHMS and ALGORITHMS[name].advantage.needs_roles:  # none of the tasks is a game of several
            continue
        drafts.append(StudyVariant(name, f"{name}_", (*overrides, *list_sizes(name, sizes)), environment, {}))
    start = plan_start(task, seeds, of_start, environment)
    variants = build_plan(seeds, [*of_variants, "sft.steps=0"], drafts, task, config_name=config_name)
    return TaskPlan(task, start, replace(variants, start=start.folder))


def list_sizes(name: str, sizes: TrainingOptions) -> tuple[str, ...]:
    """The overrides that give a variant as many completions and updates as the others have.

    A loss with an unbounded ratio allows one update a batch, so it gets as many updates in more, smaller steps.
    """
    if sizes.num_substeps == 1 or name not in ALGORITHMS or not ALGORITHMS[name].loss.has_unbounded_ratio:
        return ()
    return (
        "training.num_substeps=1",
        f"training.prompts_per_step={sizes.prompts_per_step // sizes.num_substeps}",
        f"training.steps={sizes.steps * sizes.num_substeps}",
    )


def plan_start(task: str, seeds: tuple[int, ...], shared: Sequence[str], environment: dict[str, str]) -> StudyPlan:
    """The study of the fine-tuning alone, one run for each seed."""
    alone = [StudyVariant("", "", (), environment, {})]
    return build_plan(seeds, [*shared, "training.mode=sft"], alone, f"{task}-start", config_name=f"{CONFIGS}/{task}")


@contextmanager
def open_studies(plans: Sequence[TaskPlan]) -> Iterator[None]:
    """Lock the folders of all studies and write their plans."""
    with ExitStack() as stack:
        for plan in plans:
            stack.enter_context(open_study(plan.start))
            stack.enter_context(open_study(plan.variants))
        yield


def run_studies(plans: Sequence[TaskPlan], jobs: int, console: RunConsole) -> bool:
    """Make all missing runs, seed by seed; False if the user stopped the study.

    A report follows each task that lacked some: to read all runs takes minutes where there are hundreds.
    """
    for seed in plans[0].variants.seeds:
        for plan in plans:
            start, variants = (replace(study, seeds=(seed,)) for study in (plan.start, plan.variants))
            if all(is_finished(study, run) for study in (start, variants) for run in study.runs):
                continue
            console.note(f"seed {seed}, {plan.task}")
            for study in (start, variants):
                if study is variants and not is_finished(start, start.runs[0]):
                    break
                runner = StudyRunner(study, jobs, console, lambda: None)
                runner.run()
                if runner.stop_requests:
                    return False
            write_report(plan.variants.folder, summarize(plan.variants))
            write_results(plan.variants.folder.parent, collect_results(plans))
    return True


def collect_results(plans: Sequence[TaskPlan]) -> dict[str, Any]:
    """The content of `results.json`."""
    tasks = {plan.task: describe_task(plan.start, plan.variants) for plan in plans}
    return make_results(plans[0].variants.folder.parent.name, plans[0].variants.seeds, tasks)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def study_algorithms(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK ...] seeds=1..5 [variants=NAME,...] [key=value ...]",
            help="The tasks (all by default), the seeds, the variants (all by default), and settings of all runs.",
        ),
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option("--environment", metavar="NAME=VALUE", help="An environment variable of the runs."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help=f"Name of the folder in run.root; default {NAME}-study.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time; by default as many as the cores have room for.")
    ] = None,
) -> None:
    """Compare all algorithms, exploration options and controls on small tasks (docs/run/studies.md).

    The same command continues a stopped study and tries failed runs again; more seeds extend it.
    """
    plans = read_algorithm_plans(words or [], environment or [], name)
    jobs = jobs or min(plan.variants.jobs for plan in plans)
    folder, seeds = plans[0].variants.folder.parent, plans[0].variants.seeds
    with open_studies(plans), RunConsole(interval=30) as console:
        variants = sum(len(plan.variants.variants) for plan in plans)
        console.plan(
            {
                "study": str(folder),
                "tasks": ", ".join(plan.task for plan in plans),
                "runs": f"{len(seeds)} seeds x {variants} variants of the tasks, {jobs} at a time",
            }
        )
        is_done = run_studies(plans, jobs, console)
        results = collect_results(plans)
        write_results(folder, results)
        console.close()
        console.note(mask_secrets(format_results(results)))
        console.note(f"table.md, results.json, study.png, and a folder for each task are in {folder}")
        if not is_done:
            console.note("stopped; the same command goes on from here")
            raise typer.Exit(130)
    finished = sum(run["state"] == "finished" for task in results["tasks"].values() for run in task["runs"])
    if finished < sum(len(plan.variants.runs) for plan in plans):
        raise typer.Exit(1)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code; a user's mistake is one message and exit code 2."""
    return run(arguments, app, "python -m benchmarks.algorithm_study")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
