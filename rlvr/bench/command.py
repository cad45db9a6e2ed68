"""`rlvr bench`: checks what was asked, runs benchmark after benchmark, writes each as soon as it is there.

Exercised by `tests/test_bench.py`. Only light modules are imported here: everything heavy happens in the sides' own
processes.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rlvr.bench import report
from rlvr.bench.catalogue import BENCHMARKS, chosen
from rlvr.bench.measure import Result, Setting, measure
from rlvr.cores import cores

DTYPES = ("float32", "bfloat16")


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME ...]", help="All without; see --list.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, fewer rounds: minutes, rougher.")] = False,
    rounds: Annotated[int | None, typer.Option("--rounds", help="3, or 2 with --quick.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Of each side; one per core by default.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="A folder to measure on your own model.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16, on both sides.")] = "float32",
    out: Annotated[Path, typer.Option("--out", help="Where tables, JSON and curves go.")] = Path("bench-results"),
    list_them: Annotated[bool, typer.Option("--list", help="Say what there is; nothing is run.")] = False,
) -> None:
    """Measure this machine: ours and others' in turns, in one run, with the same weights, work, dtype and threads.

    rlvr bench end-to-end/short --quick

    A peer that is not installed is skipped by name. Ctrl-C and SIGTERM keep what was measured.
    """
    setting = checked(quick, rounds, threads, model, dtype)
    if list_them:
        chosen(names or [], setting)  # what is wrong with them is told here too
        wanted = {name.partition("/")[0] for name in names or BENCHMARKS}
        for benchmark in (b for b in BENCHMARKS.values() if b.name in wanted):
            typer.echo(f"{benchmark.name:14}{benchmark.about}")
            for _, cases in chosen([benchmark.name], replace(setting, model=None, dtype="float32")):
                for case in cases:
                    typer.echo(f"    {case.name:24}{'; '.join(case.sides)}")
        return
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a folder")
    try:  # before hours of measuring, not after
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made ({error.strerror}); give a folder that can be written") from error
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out} cannot be written to; give another folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # keeps what was measured, as Ctrl-C does
    interrupted, failed = run(names or [], setting, out)
    if interrupted:
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def checked(quick: bool, rounds: int | None, threads: int | None, model: Path | None, dtype: str) -> Setting:
    """What was asked, or a ValueError that says what is wrong with it."""
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds {rounds}: expected at least 1")
    if threads is not None and not 1 <= threads <= cores():
        raise ValueError(f"--threads {threads}: expected 1 to {cores()}, the cores that this process may use")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: expected {' or '.join(DTYPES)}")
    if model is not None:
        model = model.expanduser()
        if not (model / "config.json").exists() or not any(model.glob("tokenizer*")):
            raise ValueError(
                f"--model {model}: expected a folder with a model and its tokenizer (config.json is there)"
            )
    return Setting(quick, rounds or (2 if quick else 3), threads or cores(), model, dtype)


def run(names: list[str], setting: Setting, out: Path) -> tuple[bool, bool]:
    """Every benchmark that was named; whether the user stopped it, and whether a side failed."""
    interrupted = failed = False
    with tempfile.TemporaryDirectory(prefix="rlvr-bench-") as scratch:
        setting = replace(setting, scratch=Path(scratch))
        if report.load() > 0.5 * cores():  # before the first: what follows is our own load too
            report.told(f"this machine is busy (load average {report.load()}): figures are rough")
        for name, cases in chosen(names, setting):
            before, results = report.machine(), list[Result]()
            for case in cases:
                results.append(measure(case, setting.rounds, setting.threads, report.told))
                interrupted = results[-1].interrupted
                failed |= any(m.failed for m in results[-1].sides.values())
                if interrupted:
                    break
            written = report.write(name, results, setting, before, out)
            typer.echo(f"\n{report.table(results)}")
            report.told(f"{name}: {', '.join(map(str, written))}")
            if interrupted:
                break
    return interrupted, failed
