"""`rlvr env`: begin an environment and check it, install those of other projects, and give ours to them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlvr.cli.grading_commands import RewardOptions
from rlvr.runs.user_messages import mask_secrets, print_message

env_app = typer.Typer(
    help="Begin an environment and check it, install those of other projects, and give ours to them.",
    no_args_is_help=True,
)


@env_app.command("list")
def list_installs() -> None:
    """Show the kinds of environments that have an interpreter of their own, and which are installed.

    rlvr env list
    """
    from rlvr.envs.ecosystems.installs import INSTALLS, is_complete, locate

    for kind, install in INSTALLS.items():
        state = f"installed in {locate(kind)}" if is_complete(kind) else f"not installed (about {install.megabytes} MB)"
        print(f"{kind:<10} {install.packages[0]:<22} {state}")


@env_app.command("install")
def install_kind(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="verifiers, openenv, inspect, textarena, gem or nemo_gym.")
    ],
    packages: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PACKAGE ...]", help="Environments to install beside it: OWNER/NAME, a name, a folder."
        ),
    ] = None,
    *,
    index: Annotated[str | None, typer.Option("--index", help="A further package index.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")] = False,
) -> None:
    """Install a kind of environments with an interpreter of its own.

    rlvr env install verifiers

    rlvr env install verifiers primeintellect/wordle ./my-taskset
    """
    from rlvr.envs.ecosystems.installs import find_install, install, list_commands, locate

    known, commands = find_install(kind), list_commands(kind, packages or [], index)
    print(f"{kind} {known.version} goes to {locate(kind)} (about {known.megabytes} MB):")
    for command in commands:
        print(f"  {shlex.join(command)}")
    if not dry_run:
        install(kind, packages or [], index)
        print(f"installed: {locate(kind)}")


@env_app.command("init")
def init_package(
    folder: Annotated[str, typer.Argument(metavar="NAME", help="A new folder; its name is that of the environment.")],
    *,
    contract: Annotated[
        str, typer.Option("--contract", help="game (reset, step), tools (reset, methods) or rows (tasks, a reward).")
    ] = "game",
) -> None:
    """Write a package with an environment of your own, its test and its README.

    rlvr env init my-game
    """
    from rlvr.envs.environment_package import write_package

    for path in write_package(folder, contract):
        print(path)
    print(f"next: pip install -e {shlex.quote(folder)} && pytest {shlex.quote(folder)}")


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

    from rlvr.audits.commands import parse_options, parse_range, reward_options
    from rlvr.audits.environment.environment_check import CheckOptions, check_environment
    from rlvr.core.files import write_atomic
    from rlvr.tracking import readable_lines

    options = CheckOptions(
        reward, reward_options(reward_option or []), tasks, samples, attack, model,
        parse_range("env check", reward_range), hang_seconds, allow=tuple(allow or ()),
    )  # fmt: skip
    report = check_environment(environment, parse_options("env check", words or []), options, print_message)
    if json_file is not None:
        write_atomic(json_file, json.dumps(report.as_json(), indent=2))
    typer.echo(readable_lines(mask_secrets(report.table(show))))
    if report.faults:
        raise typer.Exit(1)


@env_app.command("export")
def export_env(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An environment, as env.name in a config.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTION=VALUE ...]", help="Its options, as env.kwargs in a config.")
    ] = None,
    *,
    target: Annotated[str, typer.Option("--to", help="verifiers, openenv or harbor.")],
    out: Annotated[str | None, typer.Option("--out", help="A new folder; by default NAME_TARGET here.")] = None,
    tasks: Annotated[int, typer.Option("--tasks", help="The most tasks to train on, and held out.")] = 1_000,
    reward: Annotated[str | None, typer.Option("--reward", help="By default that of the environment.")] = None,
    reward_option: RewardOptions = None,
    reward_range: Annotated[
        str | None,
        typer.Option("--reward-range", help="LOW,HIGH of a turn; default: what the environment or its reward says."),
    ] = None,
) -> None:
    """Write an environment as a package or folder of another project.

    rlvr env export rpn_arithmetic complexity=[1,2] --to verifiers

    rlvr env export my_game:Game --to openenv --out my_game_server
    """
    from rlvr.audits.commands import parse_options, parse_range, reward_options
    from rlvr.envs.ecosystems.export.environment_export import export_environment
    from rlvr.envs.ecosystems.export.exportable import ExportRequest

    request = ExportRequest(
        name, parse_options("env export", options or []), reward, reward_options(reward_option or []), tasks,
        parse_range("env export", reward_range),
    )  # fmt: skip
    folder = export_environment(request, target, out)
    print_message(f"written: {folder} (its README.md says how to use it)")


@env_app.command("serve")
def serve_tasks(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An environment, as env.name in a config.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTION=VALUE ...]", help="Its options, as env.kwargs in a config.")
    ] = None,
    *,
    reward: Annotated[str | None, typer.Option("--reward", help="By default that of the environment.")] = None,
    reward_option: RewardOptions = None,
    host: Annotated[str, typer.Option("--host", help="A loopback address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes any free port.")] = 5005,
) -> None:
    """Serve the tasks and the reward of an environment, for `vf-eval` and trainers on verifiers.

    rlvr env serve rpn_arithmetic complexity=[1,2]
    """
    from rlvr.audits.commands import parse_options, reward_options
    from rlvr.envs import resolve_environment
    from rlvr.envs.ecosystems.guest_process import GUESTS
    from rlvr.reward import resolve_reward
    from rlvr.runs.user_messages import name_missing_extra

    with name_missing_extra("serving tasks", "serve"):
        from rlvr.envs.ecosystems.task_server import TaskServer
        from rlvr.web.server import bind_socket, is_loopback, run_server, server_url
    if not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines, and this server has no keys; give 127.0.0.1"
        )
    source = resolve_environment(name, **parse_options("env serve", options or []))
    judge = resolve_reward(reward or source.reward, **reward_options(reward_option or []))
    server = TaskServer(name, source, judge)
    with bind_socket(host, port) as listening:
        url = server_url(listening)

        def tell() -> None:
            print_message(f"the tasks of {name} are at {url}, judged by {judge.name}; for verifiers:")
            print_message(f"  PYTHONPATH={GUESTS} vf-eval rlvr-tasks --env.taskset.url {url} \\")
            print_message("    --env.agent.harness.id rlvr_chat --env.agent.runtime.type subprocess")

        run_server(server.app, listening, on_ready=tell)
