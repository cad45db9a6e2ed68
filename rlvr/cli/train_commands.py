"""`rlvr train`, `rlvr evaluate`, `rlvr config`, `rlvr study` and `rlvr plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from rlvr.runs.user_messages import announce_if_slow, be_quiet, mask_secrets, print_message

if TYPE_CHECKING:
    from rlvr.config import LoadedConfig
    from rlvr.config.schema import RunConfig
    from rlvr.runs.assembly import Assembly
    from rlvr.tracking import RunConsole

ConfigName = Annotated[
    str | None, typer.Option("--config-name", help="A config by name, looked up in ./configs, then in the package.")
]
ConfigFile = Annotated[str | None, typer.Option("--config", help="The path of a config file.")]
ConfigPath = Annotated[str | None, typer.Option("--config-path", help="A folder of configs to search first.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="Settings that override the config, e.g. seed=1.")
]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only: no progress and no table.")]


def load_run_config(
    name: str | None, file: str | None, path: str | None, overrides: list[str] | None
) -> tuple[LoadedConfig, RunConfig]:
    from rlvr.config import load
    from rlvr.config.build_config import build_config

    if name is None and file is None:
        raise ValueError("no config given; give --config-name=NAME (arithmetic, for example) or --config=FILE")
    loaded = load(name, file or path, overrides or [])
    return loaded, build_config(loaded, lambda text: print_message(f"warning: {text}"))


def train(
    overrides: Overrides = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
    quiet: Quiet = False,
) -> None:
    """Train a model. The same command resumes a stopped run.

    rlvr train --config-name=arithmetic seed=1

    rlvr train --config-name=dataset model.name=./my-model env.kwargs.path=tasks.jsonl
    """
    from rlvr.runs.train import RunInterruptedError, train_config

    loaded, settings = load_run_config(config_name, config, config_path, overrides)
    try:
        with be_quiet(quiet):
            train_config(loaded, settings, _open_console(quiet))
    except RunInterruptedError:
        raise typer.Exit(130) from None


def _open_console(quiet: bool, stream: IO[str] | None = None, interval: float = 5.0) -> RunConsole:
    """The view of a run on `stream` (default: standard output), or one of warnings alone."""
    from rlvr.runs.library import QuietConsole
    from rlvr.tracking import RunConsole

    return QuietConsole() if quiet else RunConsole(stream, interval=interval)


def evaluate(
    weights: Annotated[
        str,
        typer.Argument(
            help="A run, a checkpoint such as RUN/checkpoints/best, or the folder or hub name of a model or adapter."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BENCHMARK[=DATA] ...] [key=value ...]",
            help="Benchmarks, each perhaps with its local data, and settings that override the config.",
        ),
    ] = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
    like: Annotated[
        Path | None,
        typer.Option("--like", metavar="RUN", help="Evaluate a model on the tasks and the reward of this run."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The file for the JSON report (default: standard output); of benchmarks the folder for everything "
            "(default: evaluations/NAME).",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Evaluate weights on benchmarks or held-out tasks: pass@1, pass@k and mean reward with intervals.

    rlvr evaluate ./my-model gsm8k math500=./math500.jsonl humaneval mbpp

    rlvr evaluate runs/arithmetic evaluation.samples=16

    rlvr evaluate ./my-model --config-name=gsm8k env.kwargs.path=./gsm8k --out report.json

    rlvr evaluate ./my-model --like runs/arithmetic

    The report goes to standard output or --out, with --quiet too. A run has tasks of its own; a model takes those of
    benchmarks, of a config or of a run. This builds what the run's resolved.yaml names, and imports functions given as
    module:function: evaluate a run folder of another person only if you would run their code.
    """
    from rlvr.benchmarks.benchmark_plan import has_benchmarks
    from rlvr.core.files import write_atomic
    from rlvr.runs.evaluate_weights import evaluate_weights
    from rlvr.tracking import evaluation_table

    words = words or []
    if has_benchmarks(words):
        if config_name or config or config_path or like:
            raise ValueError(
                "benchmarks are configs of their own; leave --config-name, --config, --config-path and --like out"
            )
        _evaluate_benchmarks(weights, words, out, quiet)
        return
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist; make it first")
    with be_quiet(quiet), _open_console(quiet, sys.stderr) as console:
        result = evaluate_weights(
            weights, words, console, config_name=config_name, config_path=config or config_path, like=like
        )
        console.close()
        console.note(evaluation_table(result))
    if out is None:
        typer.echo(json.dumps(result, indent=2))
    else:
        write_atomic(out, json.dumps(result, indent=2) + "\n")


def _evaluate_benchmarks(place: str, words: list[str], out: Path | None, quiet: bool) -> None:
    """Run benchmarks and print their table; the same command continues them."""
    from rlvr.benchmarks.benchmark_runner import default_folder, run_benchmarks, write_table

    folder = out or default_folder(place)
    with be_quiet(quiet), _open_console(quiet, sys.stderr) as console:
        try:
            summary = run_benchmarks(place, words, folder, console)
        except KeyboardInterrupt:
            console.close()
            console.note(f"stopped; the same command goes on from here ({folder})")
            raise typer.Exit(130) from None
        console.close()
        console.note(f"table.md, summary.json, and every completion with its verdicts are in {folder}")
    typer.echo(write_table(summary["benchmarks"]))


def show_config(
    overrides: Overrides = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
) -> None:
    """Print every setting of a run, and the plan that follows from them.

    rlvr config --config-name=arithmetic seed=1
    """
    from rlvr.config import dump
    from rlvr.config.build_config import resolved_values
    from rlvr.config.trl_defaults import list_differences
    from rlvr.runs.assembly import assemble
    from rlvr.runs.run_tasks import resolve_epochs
    from rlvr.runs.train import masked_plan
    from rlvr.runs.weights import check_model_folder
    from rlvr.tracking import RunConsole

    loaded, settings = load_run_config(config_name, config, config_path, overrides)
    assembly: Assembly | None = None
    if settings.training.epochs is not None:  # the tasks say how many steps there are
        assembly = assemble(settings)
        loaded, settings = resolve_epochs(loaded, settings, assembly.source)
        assembly = replace(assembly, config=settings)
    # The settings first: they are there whatever the data, which may have to come from a hub, turn out to be.
    typer.echo(dump(resolved_values(settings, loaded)))
    check_model_folder(settings)
    with announce_if_slow(f"reading the tasks of {settings.env.name}"):
        assembly = assembly or assemble(settings)
    with RunConsole() as console:
        console.plan({**masked_plan(assembly), **list_differences(loaded, settings)})
        for text in assembly.source.advice():
            console.warn(mask_secrets(text))


def study(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="seeds=1..5 [key=value ...]",
            help="The seeds, and settings as for `rlvr train`; key=one,other makes a variant of each value.",
        ),
    ] = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
    environment: Annotated[
        list[str] | None,
        typer.Option("--environment", metavar="NAME=VALUE[,VALUE...]", help="An environment variable of the runs."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the folder in run.root; default CONFIG-study.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time; by default as many as the cores have room for.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train one config with several seeds and in variants, and compare them over the seeds.

    rlvr study --config-name=arithmetic seeds=1..5

    The same command continues a stopped study and tries failed runs again; more seeds extend it.
    """
    if overrides and overrides[0] == "algorithms":
        raise ValueError(
            "`rlvr study algorithms` is no part of the package any more; in a clone of the repository, run "
            "`python -m benchmarks.algorithm_study` with the same words"
        )
    from rlvr.studies.study_plan import build_plan, read_variants
    from rlvr.studies.study_runner import StudyInterruptedError, run_study

    warnings = dict[str, None]()  # each variant gives the same ones
    plan = build_plan(
        *read_variants(overrides or [], environment or []),
        name,
        config_name=config_name,
        config=config,
        config_path=config_path,
        warn=lambda text: warnings.update({text: None}),
    )
    for text in warnings:
        print_message(f"warning: {text}")
    try:
        with be_quiet(quiet):
            summary = run_study(plan, jobs, _open_console(quiet, interval=30))
    except StudyInterruptedError:
        raise typer.Exit(130) from None
    if any(run["state"] != "finished" for run in summary["runs"]):
        raise typer.Exit(1)


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]", help="Settings as for `rlvr train`, and of the cluster, e.g. cluster.trainers=8."
        ),
    ] = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
) -> None:
    """Compute memory, time and bottleneck of a run on a cluster, with the formulas. Nothing is run.

    rlvr plan model.name=Qwen2.5-7B rollout.max_tokens=2048 cluster.trainers=8 cluster.samplers=8
    """
    from rlvr.runs.run_plan import describe_capacity, read_words

    run, cluster = read_words(
        words or [], config_name, config or config_path, lambda text: print_message(f"warning: {text}")
    )
    typer.echo(describe_capacity(run, cluster))
