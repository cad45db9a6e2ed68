"""The command line: `rlvr train`, `evaluate`, `verify`, `audit`, `serve`, `view`, `doctor`, `bench`, `config`.

    rlvr train --config-name=arithmetic seed=1
    rlvr train --config=mine.yaml training.steps=50
    rlvr evaluate runs/arithmetic
    rlvr verify answers.jsonl --reward code --out verdicts.jsonl
    rlvr audit --reward code --attack
    rlvr serve engine --model ./my-model --port 8000
    rlvr view runs/arithmetic
    rlvr doctor runs/arithmetic
    rlvr bench end-to-end --quick
    rlvr config --config-name=gsm8k model.name=./my-model

A user's mistake is one message without a traceback and exit code 2; a run that had to stop is 1; Ctrl-C is 130.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlvr import __version__
from rlvr.bench.command import bench
from rlvr.cores import quiet_threads
from rlvr.service.commands import serve_app
from rlvr.service.evaluation.command import evaluate_service

app = typer.Typer(
    help="Train language models on anything that can be verified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# What typer raises for an unknown command or option; it exports no name for it.
UsageError: type[Exception] = typer.BadParameter.mro()[1]

ConfigName = Annotated[
    str | None, typer.Option("--config-name", help="A config by name: ./configs, then the packaged ones.")
]
ConfigFile = Annotated[str | None, typer.Option("--config", help="A config file.")]
ConfigPath = Annotated[str | None, typer.Option("--config-path", help="A folder of configs, searched first.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Settings, e.g. seed=1.")]


def _configured(name: str | None, file: str | None, path: str | None, overrides: list[str] | None):
    from rlvr.config import load
    from rlvr.config.schema import configured

    if name is None and file is None:
        raise ValueError("which config? give --config-name=NAME (arithmetic, say) or --config=FILE")
    loaded = load(name, file or path, overrides or [])
    return loaded, configured(loaded, lambda text: _print(f"warning: {text}"))


@app.command()
def train(
    overrides: Overrides = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
) -> None:
    """Train a model; the same command goes on where a stopped run was."""
    from rlvr.build import build, build_source, open_run, plan, start_rewards
    from rlvr.build_client import circumstances, release
    from rlvr.tracking import Console
    from rlvr.tracking.report import stored_summary
    from rlvr.training.journal import Journal, stored_checkpoint, weights_at
    from rlvr.training.loops import Interrupted, Loop

    loaded, settings = _configured(config_name, config, config_path, overrides)
    source = build_source(settings)
    start_rewards(settings, source)
    folder, finished = open_run(loaded, settings)
    with Console() as console:

        def warn(text: str) -> None:
            console.warn(_masked(text))

        if finished:
            console.note(f"this run is finished ({folder}); run.resume=false starts it anew")
            console.table(stored_summary(folder))
            return
        console.plan({"run": str(folder), **_shown(plan(settings, source))})
        with Journal(folder) as journal:
            job = build(settings, folder, console.note, warn)
            journal.attempt(circumstances(job.client), warn)
            try:
                summary = Loop(job, journal, console).run()
            except (Interrupted, KeyboardInterrupt):
                console.note(f"stopped; the same command goes on from here ({folder})")
                raise typer.Exit(130) from None
            finally:
                release(job.client)
            console.table(summary)
            kept = str(folder) if (newest := stored_checkpoint(folder)) is None else weights_at(newest)
            at_server = f"curve and metrics are in {folder}, the weights at the server: {kept}"
            console.note(at_server if "://" in kept else f"curve, metrics and weights are in {folder}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    overrides: Overrides = None,
) -> None:
    """Evaluate a saved policy on the held-out tasks of its run: pass@1, pass@k and mean reward with intervals.

    What the run's resolved.yaml names is built for that, functions given as module:function included: evaluate a run
    folder that somebody else made only if you would run their code.
    """
    from rlvr.build import evaluate_saved
    from rlvr.tracking import Console, evaluation_table

    with Console(stream=sys.stderr) as console:
        result = evaluate_saved(run, overrides or [], console)
        console.close()
        console.note(evaluation_table(result))
    typer.echo(json.dumps(result, indent=2))


RewardName = Annotated[str, typer.Option("--reward", help="A reward by name, or package.module:function.")]
RewardOptions = Annotated[list[str] | None, typer.Option("--reward-option", help="One of its options: key=value.")]


@app.command()
def verify(
    answers: Annotated[Path, typer.Argument(help="JSON lines or one JSON list, gzipped or not.")],
    reward: RewardName,
    out: Annotated[Path | None, typer.Option("--out", help="Verdicts; without it they go to standard output.")] = None,
    response_field: Annotated[str | None, typer.Option("--response-field", help="Where a row has its answer.")] = None,
    reward_option: RewardOptions = None,
    workers: Annotated[int | None, typer.Option("--workers", help="At a time; one per core by default.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first N rows.")] = None,
) -> None:
    """Grade a file of answers, one verdict per row; the same command goes on where a stopped one was.

    rlvr verify answers.jsonl --reward code --reward-option timeout_s=10 --out verdicts.jsonl

    The exit code is 1 where no row at all could be judged.
    """
    from rlvr.audit.answers import Grader, Progress, grade
    from rlvr.audit.options import reward_options

    grader = Grader(reward, reward_options(reward_option or []), workers)
    tally = grade(answers, grader, out, field=response_field, limit=limit, say=_print, progress=Progress())
    _print(tally.table())
    if tally.rows and tally.unjudged == tally.rows:
        raise typer.Exit(1)


@app.command()
def audit(
    reward: RewardName,
    attack: Annotated[bool, typer.Option("--attack", help="Try the hack suite on a verifier of code.")] = False,
    labelled: Annotated[str | None, typer.Option("--labelled", help="Rows with labels, or builtin.")] = None,
    tier: Annotated[list[str] | None, typer.Option("--tier", help="Of the sandbox; all that work by default.")] = None,
    category: Annotated[list[str] | None, typer.Option("--category", help="Of attacks; all by default.")] = None,
    against: Annotated[list[str] | None, typer.Option("--against", help="A second verifier on the same rows.")] = None,
    reward_option: RewardOptions = None,
    show: Annotated[int, typer.Option("--show", help="How many wrong rows are shown.")] = 10,
    workers: Annotated[int | None, typer.Option("--workers", help="Attacks at a time.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="All of it as JSON.")] = None,
) -> None:
    """Measure a verifier: on labelled rows its error rates, by the hack suite what it accepts and lets out.

    rlvr audit --reward math --labelled builtin --against rlvr.audit.peers:math_verify

    rlvr audit --reward code --attack --json audit.json      (exit code 1 where anything got away)
    """
    from rlvr.audit.options import Audit, reward_options
    from rlvr.tracking import readable_lines

    options = reward_options(reward_option or [])
    asked = Audit(reward, options, tier or [], against or [], workers, show, category or [])
    text, failed = asked.run(attack, labelled, json_file, _print)
    typer.echo(readable_lines(_masked(text)))
    if failed:
        raise typer.Exit(1)


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(help="A run folder. Without one the installation is checked.")] = None,
) -> None:
    """Say why a run learns nothing, or, without a run, what of this installation works."""
    from rlvr.doctor import installation, report, written_checks
    from rlvr.tracking import Console

    with Console(live=False) as console:
        if run is not None:
            console.note(report(run))
            return
        checks = installation()
        console.note(written_checks(checks))
    if any(check.state == "fails" for check in checks):
        raise typer.Exit(1)


@app.command()
def view(
    run: Annotated[Path, typer.Argument(metavar="RUNDIR", help="A run folder, or a folder of runs.")],
    port: Annotated[int, typer.Option("--port", help="0 takes any free one.")] = 3036,
    host: Annotated[str, typer.Option("--host", help="One of this machine's own addresses.")] = "127.0.0.1",
) -> None:
    """Show a run in the browser: curves, every kept answer with its verdicts, steps side by side. Live, read-only."""
    from rlvr.service.dashboard.view import view

    view(run, host, port, _print)


@app.command("config")
def show_config(
    overrides: Overrides = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
) -> None:
    """Print what would run: every setting, and the plan that follows from them."""
    from rlvr.build import build_source, plan
    from rlvr.config import dump
    from rlvr.config.schema import written
    from rlvr.tracking import Console

    loaded, settings = _configured(config_name, config, config_path, overrides)
    source = build_source(settings)
    typer.echo(dump(written(settings, loaded)))
    with Console() as console:
        console.plan(_shown(plan(settings, source)))


app.add_typer(serve_app, name="serve")
app.command("evaluate-service")(evaluate_service)
app.command("bench")(bench)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The `rlvr` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; its exit code. Mistakes and stops become messages here, and only here."""
    quiet_threads()
    try:
        code = app(arguments, standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except UsageError as mistake:
        told = mistake.format_message()  # pyright: ignore[reportAttributeAccessIssue] - with the option meant
        return _say(told, 2) if told else 2  # without a word when all there is to say is the help
    except ValueError as mistake:
        return _say(mistake, 2)
    except RuntimeError as stop:
        from rlvr.messages import NonFiniteError
        from rlvr.training.step import TrainingStopped

        if isinstance(stop, NonFiniteError):
            remedy = "The last checkpoint stands; a lower learning rate is the usual cure (see the optimizer options)"
            return _say(f"{stop}. {remedy}", 1)
        if not isinstance(stop, TrainingStopped):
            raise
        return _say(stop, 1)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = os.fspath(error.filename or "a name")
            shown = repr(f"{name[:60]}..." if len(name) > 60 else name)
            return _say(f"{shown} ({len(name)} characters) is longer than names of files may be; give a shorter one", 2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS):
            raise
        where = f" ({error.filename})" if error.filename else ""
        remedy = "Nothing saved before is lost: make room, then run the same command"
        return _say(f"cannot write{where}: {error.strerror}. {remedy}", 1)
    except KeyboardInterrupt:
        return _say("stopped", 130)
    return code or 0


def _say(what: object, code: int) -> int:
    _print(str(what))
    return code


def _print(text: str) -> None:
    """A message to the user. It may quote what a model or a user's function wrote, so nothing in it acts."""
    from rlvr.tracking import readable_lines

    print(f"rlvr: {readable_lines(_masked(text))}", file=sys.stderr)


def _masked(text: str) -> str:
    """The text without what the environment gave to the config: it may be a secret, and messages end up in logs."""
    from rlvr.config.interpolate import masked

    return masked(text)


def _shown(plan: dict[str, str]) -> dict[str, str]:
    return {name: _masked(text) for name, text in plan.items()}


if __name__ == "__main__":
    main()
