"""`rlvr env`: interpreters for environments of other projects."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

env_app = typer.Typer(help="Install the packages of other projects' environments, each beside ours.")


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
