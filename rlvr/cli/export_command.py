"""`rlvr export`: a run's weights as a merged model, an adapter or a GGUF file, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_USE = {
    "merged": "load it with transformers or vLLM, or serve it: rlvr serve engine --model {place}",
    "adapter": "load it with peft on its base model",
    "gguf": "load it with llama.cpp or Ollama: llama-cli -m {place}",
}


def export(
    run: Annotated[str, typer.Argument(metavar="RUNDIR", help="A run folder, a checkpoint of one, or an adapter.")],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="A new folder; by default RUNDIR/exports/...")
    ] = None,
    is_merged: Annotated[bool, typer.Option("--merge", help="A whole model folder (the default).")] = False,
    is_adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, for peft.")] = False,
    is_gguf: Annotated[bool, typer.Option("--gguf", help="A whole model folder with a GGUF file in it.")] = False,
    is_best: Annotated[bool, typer.Option("--best", help="The best weights that the run kept, not the last.")] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; by default that of the base model.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="An adapter's base model, if it has moved.")
    ] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option("--llama-cpp", metavar="DIR", help="The folder of llama.cpp's converter.")
    ] = None,
) -> None:
    """Write a run's weights for other programs: a merged model, an adapter or a GGUF file.

    rlvr export runs/arithmetic --to ./my-trained-model

    rlvr export runs/mine --adapter --to ./my-adapter       (a run with model.lora)

    rlvr export runs/mine --gguf --llama-cpp ~/llama.cpp
    """
    from rlvr.runs.export_weights import ExportForm, export_weights
    from rlvr.runs.user_messages import print_message

    chosen = {"--merge": is_merged, "--adapter": is_adapter, "--gguf": is_gguf}
    given = [name for name, is_given in chosen.items() if is_given]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; choose one of {', '.join(chosen)}")
    form = ExportForm.ADAPTER if is_adapter else ExportForm.GGUF if is_gguf else ExportForm.MERGED
    place = export_weights(
        run, to, form=form, is_best=is_best, dtype=dtype, base=base, llama_cpp=llama_cpp,
        warn=lambda text: print_message(f"warning: {text}"),
    )  # fmt: skip
    typer.echo(f"wrote {place}; {_USE[form.value].format(place=place)}")
