"""The first hour on a GPU: ten measurements that say what works there, how fast it is and how much memory it takes.

    python -m benchmarks.gpu_first_hour --out gpu-hour                    # 46 minutes at most; random weights of 0.5 B
    python -m benchmarks.gpu_first_hour --out gpu-hour --model ./Qwen2.5-0.5B
    python -m benchmarks.gpu_first_hour --out tried --dry-run             # tiny models on the processor, two minutes

Each measurement (`benchmarks.gpu_measurements`) runs in a process of its own, which is ended at its time limit. Its row
is printed and written to `OUT/NAME.json`, its output to `OUT/NAME.log`. The same command goes on where it was stopped:
what is done with the same settings is kept, what failed or was late is done again (`--again NAME` for one that is
done). Two measurements need vLLM: RLVR_VLLM names the python of its environment, or `--vllm-url` a server that serves
the folder `OUT/models/main`; without either they are skipped. Random weights tell time and memory; for the gap between
sampler and trainer give `--model`, since a random model's log-probs are all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_measurements import MEASUREMENTS, HourSettings, Measurement, NotHere
from rlvr.core.files import write_atomic
from rlvr.core.machine import describe_machine

DONE, FAILED, LATE, SKIPPED = "done", "failed", "late", "skipped"
GRACE_SECONDS = 10.0  # between the end that a measurement is asked for and the one that it gets


@dataclass(frozen=True)
class HourRow:
    """What one measurement gave: its state, how long it took, its figures, and why there are none."""

    name: str
    state: str
    seconds: float
    limit_s: float
    settings: dict[str, Any]
    machine: dict[str, Any]
    facts: dict[str, Any]
    why: str = ""

    def format(self) -> str:
        said = self.why or ", ".join(f"{name} {_short(value)}" for name, value in self.facts.items())
        return f"{self.name:12} {self.state:8} {self.seconds:6.1f} s  {said}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_short(part)}" for name, part in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(words: list[str] | None = None) -> int:
    """0 if no measurement failed or was late, else 1."""
    about = (__doc__ or "").splitlines()[0]
    some: dict[str, Any] = {"nargs": "*", "choices": list(MEASUREMENTS), "default": [], "metavar": "NAME"}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour", description=about)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", default="", help="a model's folder or hub name; default: random weights of 0.5 B")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the processor")
    parser.add_argument("--vllm-url", default="", help="a vLLM server that runs already")
    parser.add_argument("--only", **some, help="some of the measurements")
    parser.add_argument("--again", **some, help="measurements to do even if they are done")
    parser.add_argument("--limit", type=float, default=1.0, help="factor of all time limits")
    parser.add_argument("--in-process", choices=list(MEASUREMENTS), help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    setting = HourSettings(str(given.out.resolve()), given.model, given.dry_run, given.vllm_url)
    if given.in_process:
        return _measure_here(setting, MEASUREMENTS[given.in_process], given.limit)
    if not given.dry_run and not _has_gpu():
        parser.error("torch sees no CUDA device here; --dry-run tries everything on the processor")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a measurement ends with this process
    try:
        chosen = [one for one in MEASUREMENTS.values() if not given.only or one.name in given.only]
        rows = [_measure(given, setting, one) for one in chosen]
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(any(row.state in (FAILED, LATE) for row in rows))


def _measure(given: argparse.Namespace, setting: HourSettings, one: Measurement) -> HourRow:
    """The row of one measurement, which is kept if it was done before, and printed."""
    row = None if one.name in given.again else _read_row(given.out, one.name, setting)
    if row is None:
        command = [sys.executable, "-m", "benchmarks.gpu_first_hour", *_words_of(given), "--in-process", one.name]
        row = _run_limited(command, setting, one, one.limit_s * given.limit)
    print(row.format(), flush=True)
    return row


def _words_of(given: argparse.Namespace) -> list[str]:
    words = ["--out", str(given.out), "--model", given.model, "--vllm-url", given.vllm_url, "--limit", str(given.limit)]
    return [*words, "--dry-run"] if given.dry_run else words


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _read_row(out: Path, name: str, setting: HourSettings) -> HourRow | None:
    """The row of a measurement that was done before with these settings."""
    with suppress(OSError, ValueError, TypeError):
        row = HourRow(**json.loads((out / f"{name}.json").read_text(encoding="utf-8")))
        if row.state == DONE and row.settings == asdict(setting):
            return row
    return None


def _write_row(setting: HourSettings, row: HourRow) -> HourRow:
    write_atomic(setting.folder / f"{row.name}.json", json.dumps(asdict(row), indent=1) + "\n")
    return row


def _run_limited(command: list[str], setting: HourSettings, one: Measurement, limit_s: float) -> HourRow:
    """Run a measurement in a process group of its own, which ends with it or at its limit."""
    (setting.folder / f"{one.name}.json").unlink(missing_ok=True)
    began = time.monotonic()
    log = setting.folder / f"{one.name}.log"
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=variables
        )
        try:
            process.wait(limit_s)
            why = f"its process ended with {process.returncode}: {log}"
            state = FAILED
        except subprocess.TimeoutExpired:
            state, why = LATE, f"ended at its limit of {limit_s:.0f} s: {log}"
        finally:
            _end_group(process)
    seconds = time.monotonic() - began
    with suppress(OSError, ValueError, TypeError):
        return HourRow(**json.loads((setting.folder / f"{one.name}.json").read_text(encoding="utf-8")))
    return _write_row(setting, HourRow(one.name, state, seconds, limit_s, asdict(setting), {}, {}, why))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started, a vLLM server say."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return


def _measure_here(setting: HourSettings, one: Measurement, factor: float) -> int:
    """Measure in this process and write the row; 0 whatever became of it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # at the limit: what it started ends too
    began, facts, why, state = time.monotonic(), dict[str, Any](), "", DONE
    try:
        facts = one.measure(setting)
    except NotHere as error:
        state, why = SKIPPED, str(error)
    except Exception as error:
        traceback.print_exc()
        state, why = FAILED, f"{type(error).__name__}: {error}"[:300]
    seconds = time.monotonic() - began
    machine = {**describe_machine(("torch", "transformers", "triton")), **_describe_gpu()}
    row = HourRow(one.name, state, seconds, one.limit_s * factor, asdict(setting), machine, facts, why)
    _write_row(setting, row)
    return 0


def _describe_gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    one = torch.cuda.get_device_properties(0)
    return {"gpu": one.name, "gpu_gib": round(one.total_memory / 2**30, 1), "cuda": torch.version.cuda}


if __name__ == "__main__":
    sys.exit(main())
