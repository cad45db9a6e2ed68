"""The commands that serve: `rlvr serve` is the service of sessions, `rlvr serve engine` the Tinker protocol.

A part of `rlvr.cli`, which turns mistakes into messages. Exercised by tests/test_service_starts.py and
tests/test_tinker_serve.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

serve_app = typer.Typer()


def say(text: str) -> None:
    """A message to the user; what it may quote does not act. (`rlvr.tracking` can do it too, and takes 10 MB.)"""
    from rlvr.service.logs import plain

    print(f"rlvr: {plain(text)}", file=sys.stderr, flush=True)


@serve_app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="A file of settings; RLVR_CONFIG names one too.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="3035, or PORT; 0 takes any free one.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Another than this machine's own needs API keys.")] = None,
    state: Annotated[Path | None, typer.Option("--state", help="Where all that survives a restart is.")] = None,
    database: Annotated[str | None, typer.Option("--database", help="postgresql://..., or a SQLite file.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Generates and learns: a folder, a hub name, a run.")
    ] = None,
    demo: Annotated[bool | None, typer.Option("--demo", help="A small model, trained on first start.")] = None,
    dashboard: Annotated[bool | None, typer.Option("--dashboard/--no-dashboard", help="At /.")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="API keys, one a line; RLVR_API_KEYS adds to it.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of everything drawn.")] = None,
    log: Annotated[str | None, typer.Option("--log", help="A level, or a filter such as info,rlvr=debug.")] = None,
    log_format: Annotated[str | None, typer.Option("--log-format", help="auto, console or json.")] = None,
) -> None:
    """Work on tasks over REST: generate, verify, reward, update.

    LLM_ENDPOINT=http://localhost:3031/generate rlvr serve

    rlvr serve --demo
    """
    if context.invoked_subcommand is not None:
        given = [name for name, value in context.params.items() if value is not None]
        if given:
            option = given[0].replace("_", "-")
            raise ValueError(
                f"--{option} before {context.invoked_subcommand!r} has no effect; write it behind the command"
            )
        return
    from rlvr.service.serve import serve
    from rlvr.service.settings import load_settings

    flags = {
        "port": port, "host": host, "state": state, "database": database, "model": model, "demo": demo,
        "dashboard": dashboard, "keys_file": keys, "seed": seed, "log": log, "log_format": log_format,
    }  # fmt: skip
    serve(load_settings(config, os.environ, flags, lambda text: say(f"warning: {text}")), say)


@serve_app.command("engine")
def serve_engine(
    model: Annotated[list[str], typer.Option("--model", help="A folder, a hub name, or name=folder; more than one.")],
    port: Annotated[int, typer.Option("--port", help="0 takes any free one.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="Another than this machine's own needs API keys.")] = "127.0.0.1",
    state: Annotated[Path, typer.Option("--state", help="Where all that survives a restart is.")] = Path("runs/server"),
    alias: Annotated[list[str] | None, typer.Option("--alias", help="stable_reinforce=LOSS")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="API keys, one a line; RLVR_API_KEYS adds to it.")] = None,
    device: Annotated[str, typer.Option("--device")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype")] = "auto",
    threads: Annotated[int, typer.Option("--threads", help="Torch's; 0 leaves them as they are.")] = 0,
    max_rows: Annotated[int, typer.Option("--max-rows", help="Completions sampled at once.")] = 512,
    cache_tokens: Annotated[
        int | None, typer.Option("--cache-tokens", help="Tokens they hold together; by default as memory allows.")
    ] = None,
    log: Annotated[Path | None, typer.Option("--log", help="Default: server.log in the state folder.")] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve models to the tinker SDK: train adapters and sample, several clients at once.

    rlvr serve engine --model Qwen/Qwen3-8B=./my-model --port 8000
    """
    from rlvr.service.tinker_api.serve import ServeOptions, aliases, serve

    where = {"device": device, "dtype": dtype, "threads": threads, "max_rows": max_rows, "cache_tokens": cache_tokens}
    named = {"aliases": aliases(alias or []), "keys": keys, "log": log, "log_level": log_level}
    serve(ServeOptions(model, host, port, state, **named, **where), say)
