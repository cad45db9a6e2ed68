"""`rlvr bench`: runs the benchmarks of a clone. They are no part of the installed package.

Imports nothing heavy: `rlvr --help` loads this module.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME ...]", help="All without; see --list.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, fewer rounds: minutes, rougher.")] = False,
    rounds: Annotated[int | None, typer.Option("--rounds", help="3, or 2 with --quick.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Of each side; one per core by default.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="A folder to measure on your own model.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16, on both sides.")] = "float32",
    data: Annotated[Path | None, typer.Option("--data", help="Rows of MBPP, MATH-500 or GSM8K to measure on.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Where tables, JSON and curves go.")] = Path("bench-results"),
    list_them: Annotated[bool, typer.Option("--list", help="List benchmarks and cases; run nothing.")] = False,
) -> None:
    """Benchmark rlvr and its peers on this machine, in turns, with the same weights, work, dtype and threads.

    rlvr bench end-to-end/short --quick

    Needs a clone of the repository. A peer that is not installed is skipped by name. Ctrl-C and SIGTERM keep what was
    measured.
    """
    run = import_benchmarks(Path(__file__).parents[2], Path.cwd())
    setting = run.parse_settings(quick, rounds, threads, model, dtype, data)
    if list_them:
        run.list_benchmarks(names or [], setting)
    elif code := run.run_benchmarks(names or [], setting, out):
        raise typer.Exit(code)


def import_benchmarks(*folders: Path) -> Any:
    """Import `benchmarks.run` from the first of the folders that is a clone of the repository."""
    for folder in folders:
        if (folder / "benchmarks" / "run.py").exists() and (folder / "rlvr").is_dir():
            if str(folder) not in sys.path:
                sys.path.append(str(folder))  # the sides' processes get this path too
            return importlib.import_module("benchmarks.run")
    looked = " or ".join(str(folder / "benchmarks") for folder in dict.fromkeys(folders))
    raise ValueError(
        f"`rlvr bench` needs a clone of the repository: there is no {looked}. Get one (git clone REPOSITORY rlvr), run "
        "`make setup` in it and then `.venv/bin/rlvr bench`"
    )
