"""`rlvr env`: begin an environment of your own, environments of other projects here, and ours there."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

env_app = typer.Typer(help="Begin an environment, install those of other projects beside ours, and serve ours to them.")


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
    kind: Annotated[str, typer.Argument(metavar="KIND", help="verifiers, openenv, inspect, textarena or gem.")],
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


@env_app.command("serve")
def serve_tasks(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An environment, as env.name in a config.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTION=VALUE ...]", help="Its options, as env.kwargs in a config.")
    ] = None,
    *,
    reward: Annotated[str | None, typer.Option("--reward", help="By default that of the environment.")] = None,
    reward_option: Annotated[
        list[str] | None, typer.Option("--reward-option", help="An option of the reward: key=value; may be repeated.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="A loopback address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes any free port.")] = 5005,
) -> None:
    """Serve the tasks and the reward of an environment, for `vf-eval` and trainers on verifiers.

    rlvr env serve rpn_arithmetic complexity=[1,2]
    """
    from rlvr.envs import resolve_environment
    from rlvr.envs.ecosystems.guest_process import GUESTS
    from rlvr.reward import resolve_reward
    from rlvr.runs.user_messages import name_missing_extra, print_message

    with name_missing_extra("serving tasks", "serve"):
        from rlvr.envs.ecosystems.task_server import TaskServer
        from rlvr.web.server import bind_socket, is_loopback, run_server, server_url
    if not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines, and this server has no keys; give 127.0.0.1"
        )
    source = resolve_environment(name, **_read_options(options or []))
    judge = resolve_reward(reward or source.reward, **_read_options(reward_option or []))
    server = TaskServer(name, source, judge)
    with bind_socket(host, port) as listening:
        url = server_url(listening)

        def tell() -> None:
            print_message(f"the tasks of {name} are at {url}, judged by {judge.name}; for verifiers:")
            print_message(f"  PYTHONPATH={GUESTS} vf-eval rlvr-tasks --env.taskset.url {url} \\")
            print_message("    --env.agent.harness.id rlvr_chat --env.agent.runtime.type subprocess")

        run_server(server.app, listening, on_ready=tell)


def _read_options(given: list[str]) -> dict[str, Any]:
    """Options `key=value`, whose values are YAML, as in a config."""
    import yaml

    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{text!r} is no option; expected key=value, such as heldout=100")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{key}={value}: the value is no YAML ({error})") from error
    return options
