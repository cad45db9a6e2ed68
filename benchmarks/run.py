"""What `rlvr bench` does: check the options, run benchmark after benchmark, write each result as soon as it is there.
Imports light modules only: everything heavy happens in the sides' own processes.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import report
from benchmarks.catalog import BENCHMARKS, select_cases
from benchmarks.measure import BenchSettings, CaseResult, measure
from rlvr.core.cpu_budget import available_cores

DTYPES = ("float32", "bfloat16")


def parse_settings(
    quick: bool, rounds: int | None, threads: int | None, model: Path | None, dtype: str, data: Path | None
) -> BenchSettings:
    """Check the options; raise ValueError that says which one is wrong."""
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds {rounds}: expected at least 1")
    if threads is not None and not 1 <= threads <= available_cores():
        raise ValueError(f"--threads {threads}: expected 1 to {available_cores()}, the cores that this process may use")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: expected {' or '.join(DTYPES)}")
    if model is not None:
        model = model.expanduser()
        if not (model / "config.json").exists() or not any(model.glob("tokenizer*")):
            raise ValueError(
                f"--model {model}: expected a folder with a model and its tokenizer (config.json is there)"
            )
    if data is not None and not data.is_file():
        raise ValueError(f"--data {data}: expected a file with a JSON object per line")
    return BenchSettings(quick, rounds or (2 if quick else 3), threads or available_cores(), model, dtype, data)


def list_benchmarks(names: list[str], setting: BenchSettings) -> None:
    """Print the named benchmarks (or all) and their cases."""
    select_cases(names, setting)  # raises for what is wrong with the names
    selected = {name.partition("/")[0] for name in names or BENCHMARKS}
    for benchmark in (b for b in BENCHMARKS.values() if b.name in selected):
        print(f"{benchmark.name:14}{benchmark.about}")
        for _, cases in select_cases([benchmark.name], replace(setting, model=None, dtype="float32", data=None)):
            for case in cases:
                print(f"    {case.name:24}{'; '.join(case.sides)}")


def run_benchmarks(names: list[str], setting: BenchSettings, out: Path) -> int:
    """Run the named benchmarks (or all) into the folder `out`: 0, 1 if a side failed, 130 if the user stopped it."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a folder")
    try:  # before hours of measuring, not after
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made ({error.strerror}); give a folder that can be written") from error
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out} cannot be written to; give another folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # keeps what was measured, as Ctrl-C does
    failed = False
    with tempfile.TemporaryDirectory(prefix="rlvr-bench-") as scratch:
        setting = replace(setting, scratch=Path(scratch))
        if report.load() > 0.5 * available_cores():  # before the first: what follows is our own load too
            report.print_progress(f"this machine is busy (load average {report.load()}): figures are rough")
        for name, cases in select_cases(names, setting):
            before, results = report.machine(), list[CaseResult]()
            for case in cases:
                results.append(measure(case, setting.rounds, setting.threads, report.print_progress))
                failed |= any(side.failed for side in results[-1].sides.values())
                if results[-1].interrupted:
                    break
            files = report.write(name, results, setting, before, out)
            print(f"\n{report.table(results)}", flush=True)
            report.print_progress(f"{name}: {', '.join(map(str, files))}")
            if results[-1].interrupted:
                return 130
    return int(failed)
