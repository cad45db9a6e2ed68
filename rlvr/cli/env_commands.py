"""`rlvr env`: commands about environments. `check` tries whether one is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlvr.cli.grading_commands import RewardOptions
from rlvr.runs.user_messages import mask_secrets, print_message

env_app = typer.Typer(help="Commands about environments.", no_args_is_help=True)


@env_app.command("check")
def check_env(
    environment: Annotated[str, typer.Argument(metavar="REF", help="A name, package.module:Class or a reference.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value ...]", help="Options of the environment (env.kwargs).")
    ] = None,
    reward: Annotated[
        str | None, typer.Option("--reward", help="The verifier; default: the environment's own.")
    ] = None,
    reward_option: RewardOptions = None,
    attack: Annotated[
        bool, typer.Option("--attack", help="Also search for rewards without answers, and try texts that may hang.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="Who samples for the signal; default: words at random.")
    ] = None,
    tasks: Annotated[int, typer.Option("--tasks", help="Tasks that are answered.")] = 24,
    samples: Annotated[int, typer.Option("--samples", help="Completions of each task for the signal.")] = 8,
    reward_range: Annotated[
        str | None, typer.Option("--reward-range", help="LOW,HIGH that rewards must keep; default: not checked.")
    ] = None,
    hang_seconds: Annotated[float, typer.Option("--hang-seconds", help="When an episode counts as hanging.")] = 20.0,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="A fault that is intended, such as floor_gap; repeatable.")
    ] = None,
    show: Annotated[int, typer.Option("--show", help="Examples of each fault.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole report to this JSON file.")] = None,
) -> None:
    """Check an environment: its contract, its verifier, leaks, its signal, and with --attack how it is gamed.

    rlvr env check sorting digits=4

    rlvr env check my_game:Game --attack --json report.json

    The exit code is 1 if a fault was found that is not allowed.
    """
    import json

    from rlvr.audit.commands import parse_options, reward_options
    from rlvr.audit.environment.environment_check import CheckOptions, check_environment, parse_range
    from rlvr.core.files import write_atomic
    from rlvr.tracking import readable_lines

    options = CheckOptions(
        reward, reward_options(reward_option or []), tasks, samples, attack, model, parse_range(reward_range),
        hang_seconds, allow=tuple(allow or ()),
    )  # fmt: skip
    report = check_environment(environment, parse_options("env check", words or []), options, print_message)
    if json_file is not None:
        write_atomic(json_file, json.dumps(report.as_json(), indent=2))
    typer.echo(readable_lines(mask_secrets(report.table(show))))
    if report.faults:
        raise typer.Exit(1)
