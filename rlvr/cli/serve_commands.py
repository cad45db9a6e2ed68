"""`rlvr serve`, the service of sessions, and `rlvr serve engine`, the Tinker protocol."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlvr.runs.user_messages import name_missing_extra

serve_app = typer.Typer()


def log_line(text: str) -> None:
    """Print a message without control characters. (`rlvr.runs.user_messages` would load libraries of 10 MB.)"""
    from rlvr.web.logs import printable

    print(f"rlvr: {printable(text)}", file=sys.stderr, flush=True)


@serve_app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="A settings file; default: the one that RLVR_CONFIG names.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="Default: PORT, else 3035; 0 takes any free port.")] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="The address to listen on; other than local ones need API keys.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="The folder for everything that survives a restart.")
    ] = None,
    database: Annotated[str | None, typer.Option("--database", help="postgresql://..., or a SQLite file.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model that generates and learns: a folder, hub name or run.")
    ] = None,
    demo: Annotated[
        bool | None, typer.Option("--demo", help="Use a small model that is trained at the first start.")
    ] = None,
    dashboard: Annotated[
        bool | None, typer.Option("--dashboard/--no-dashboard", help="Serve the dashboard at /.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option("--keys", help="A file of API keys, one a line; RLVR_API_KEYS adds more.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The seed of all random draws.")] = None,
    log: Annotated[str | None, typer.Option("--log", help="A log level, or a filter such as info,rlvr=debug.")] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", help="The format of the log: auto, console or json.")
    ] = None,
) -> None:
    """Serve generation, verification and training over REST.

    LLM_ENDPOINT=http://localhost:3031/generate rlvr serve

    rlvr serve --demo
    """
    if context.invoked_subcommand is not None:
        given = [name for name, value in context.params.items() if value is not None]
        if given:
            option = given[0].replace("_", "-")
            raise ValueError(
                f"--{option} before {context.invoked_subcommand!r} has no effect; write it after the command"
            )
        return
    with name_missing_extra("the service", "serve"):
        import uvicorn  # noqa: F401 - the server imports it after it has taken the port

        from rlvr.service.serve_service import serve
        from rlvr.service.settings import load_settings

    flags = {
        "port": port, "host": host, "state": state, "database": database, "model": model, "demo": demo,
        "dashboard": dashboard, "keys_file": keys, "seed": seed, "log": log, "log_format": log_format,
    }  # fmt: skip
    serve(load_settings(config, os.environ, flags, lambda text: log_line(f"warning: {text}")), log_line)


@serve_app.command("engine")
def serve_engine(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings of the engine and limits, e.g. engine.threads=4."),
    ] = None,
    *,
    model: Annotated[list[str], typer.Option("--model", help="A folder, a hub name, or name=folder; may be repeated.")],
    port: Annotated[int, typer.Option("--port", help="The port; 0 takes any free one.")] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; other than local ones need API keys.")
    ] = "127.0.0.1",
    state: Annotated[Path, typer.Option("--state", help="The folder for everything that survives a restart.")] = Path(
        "runs/server"
    ),
    alias: Annotated[
        list[str] | None, typer.Option("--alias", help="Serve a loss under another name: stable_reinforce=LOSS.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option("--keys", help="A file of API keys, one a line; RLVR_API_KEYS adds more.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")] = "auto",
    trainers: Annotated[
        int, typer.Option("--trainers", help="Ranks that share the base for training; 0: train in this process.")
    ] = 0,
    log: Annotated[
        Path | None, typer.Option("--log", help="The log file; default: server.log in the state folder.")
    ] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    samplers: Annotated[
        list[str] | None, typer.Option("--samplers", help="A vLLM server that samples; may be repeated.")
    ] = None,
    samplers_folder: Annotated[
        Path | None,
        typer.Option("--samplers-folder", help="Where the vLLM servers find adapters; default: in the state folder."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A YAML file with the sections engine, limits, wire, sampler and sharding."),
    ] = None,
) -> None:
    """Serve models to the tinker SDK: train adapters and sample, several clients at once.

    rlvr serve engine --model Qwen/Qwen3-8B=./my-model --port 8000

    rlvr serve engine --model ./my-model engine.micro_tokens=8192 limits.owner_disk_bytes=50_000_000_000

    docs/tinker/operations.md lists the settings of `engine`, `limits`, `wire`, `sampler` and `sharding`, with defaults.
    """
    from rlvr.tinker_server.serve_engine import ServeOptions, parse_aliases, serve
    from rlvr.tinker_server.server_settings import load_settings

    words = [*(words or []), *([f"sampler.urls={json.dumps(samplers)}"] if samplers else [])]
    words += [f"sampler.folder={json.dumps(str(samplers_folder))}"] if samplers_folder else []
    settings = load_settings(words, config)
    options = {"aliases": parse_aliases(alias or []), "keys": keys, "log": log, "log_level": log_level}
    options["trainers"] = trainers
    serve(ServeOptions(model, host, port, state, device=device, dtype=dtype, settings=settings, **options), log_line)
