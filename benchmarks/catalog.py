"""The list of benchmarks, and which of their cases a command line asks for (`end-to-end/short` is one case).

To add a benchmark, write a module with `cases(setting)` and add an entry here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.measure import BenchmarkCase, BenchSettings
from rlvr.core.registry import did_you_mean


@dataclass(frozen=True)
class Benchmark:
    """`module` is a module of `benchmarks`; `model`, `dtype` and `data` say which options it supports."""

    name: str
    module: str
    about: str
    model: bool = False
    dtype: bool = False
    data: bool = False


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("end-to-end", "end_to_end", "whole steps of training beside TRL's GRPOTrainer", True, True),
        Benchmark("accuracy", "accuracy", "held-out accuracy over time beside TRL's GRPOTrainer"),
        Benchmark("learning", "learning", "what steps teach a pretrained model beside TRL's GRPOTrainer"),
        Benchmark("sampler", "sampler", "sampling beside transformers' generate", True, True),
        Benchmark("vllm", "vllm_sampler", "sampling beside vLLM for CPUs, which has an environment of its own"),
        Benchmark("learner", "learner", "forward, backward and optimizer beside a padded plain step", True, True),
        Benchmark("savings", "savings", "each saving switched on and off", False, True),
        Benchmark("overlap", "overlap", "verification beside sampling; threads beside a busy process"),
        Benchmark("sandbox", "sandbox", "programs judged beside other ways to run them", data=True),
        Benchmark("mathematics", "mathematics", "answers compared beside math-verify", data=True),
        Benchmark("growth", "growth", "1, 4 and 16 times the work: time a unit and memory"),
    )
}


def select_cases(names: Iterable[str], setting: BenchSettings) -> list[tuple[str, list[BenchmarkCase]]]:
    """The cases of the named benchmarks; without names, of all that support the given options.

    Raise ValueError for an unknown name and for an option that a benchmark would ignore.
    """
    selected = list(dict.fromkeys(names)) or [
        b.name for b in BENCHMARKS.values() if _ignored_option(b, setting) is None
    ]
    cases_of: dict[str, list[BenchmarkCase]] = {}
    for text in selected:
        name, slash, part = text.partition("/")
        if name not in BENCHMARKS:
            raise ValueError(
                f"no benchmark {name!r}{did_you_mean(name, BENCHMARKS)}; there are {', '.join(BENCHMARKS)}"
            )
        benchmark = BENCHMARKS[name]
        if option := _ignored_option(benchmark, setting):
            raise ValueError(f"{option} has no effect on {name}: leave one of them out")
        cases = importlib.import_module(f"benchmarks.{benchmark.module}").cases(setting)
        if slash and part not in (names_of := [case.name for case in cases]):
            raise ValueError(f"{name} has no case {part!r}{did_you_mean(part, names_of)}; it has {', '.join(names_of)}")
        # A single case is written to a file of its own, so that it does not replace the whole benchmark's.
        cases_of[text.replace("/", "-").replace(" ", "-")] = [case for case in cases if part in ("", case.name)]
    return list(cases_of.items())


def _ignored_option(benchmark: Benchmark, setting: BenchSettings) -> str | None:
    """The option that this benchmark would ignore; None if there is none."""
    if setting.model is not None and not benchmark.model:
        return "--model"
    if setting.data is not None and not benchmark.data:
        return "--data"
    return "--dtype" if setting.dtype != "float32" and not benchmark.dtype else None
