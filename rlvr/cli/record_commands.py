"""`rlvr record` and `rlvr rows`: what agents ask of a model, written down, and what would be trained of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def record(
    model: Annotated[str, typer.Option("--model", help="A model's folder or hub name, a run, or a checkpoint of one.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The recording; an older one is continued.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings.")] = None,
    host: Annotated[str, typer.Option("--host", help="A loopback address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes any free port.")] = 8000,
) -> None:
    """Put a model behind a recorder: agents call it, and every call is written down, token for token.

    rlvr record --model ./my-model --out traffic.jsonl
    """
    from rlvr.runs.record_traffic import record_traffic
    from rlvr.runs.user_messages import print_message

    record_traffic(model, out, overrides or [], host=host, port=port, say=print_message)


def rows(
    recording: Annotated[
        Path, typer.Argument(metavar="FILE", help="A recording, OpenEnv's traces or Agent Lightning's events.")
    ],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="MODEL", help="By default that of the recorded model.")
    ] = None,
    keep_retried: Annotated[
        bool, typer.Option("--keep-retried", help="Also answers that the agent asked for again.")
    ] = False,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORM", help="Write it as openenv or triplets instead, to --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file that --to writes.")] = None,
) -> None:
    """Show what would be trained of a recording: each branch, what the policy read and what it sampled.

    rlvr rows traffic.jsonl
    rlvr rows traffic.jsonl --to openenv --out traces.jsonl
    """
    from rlvr.recorder.traces import load_recording, write_recording
    from rlvr.runs.record_traffic import show_rows

    if (to is None) != (out is None):
        raise ValueError("--to and --out belong together: give both, such as --to openenv --out traces.jsonl")
    if to is not None and out is not None:
        write_recording(load_recording(recording), to, out, keep_retried=keep_retried)
        typer.echo(f"{out} is written")
        return
    for line in show_rows(recording, tokenizer, keep_retried=keep_retried):
        typer.echo(line)
