"""Which benchmarks there are, and their cases for what the user asked; `end-to-end/short` is one case of one.

Adding a benchmark is a module with `cases(setting)` and a row here. Exercised by `tests/test_bench.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

from rlvr.bench.measure import Case, Setting
from rlvr.registry import nearest


@dataclass(frozen=True)
class Benchmark:
    """`module` is in `rlvr.bench`; `model` and `dtype` say which options have an effect on it."""

    name: str
    module: str
    about: str
    model: bool = False
    dtype: bool = False


BENCHMARKS = {
    row.name: row
    for row in (
        Benchmark("end-to-end", "end_to_end", "whole steps of training beside TRL's GRPOTrainer", True, True),
        Benchmark("sampler", "sampler", "sampling beside transformers' generate", True, True),
        Benchmark("learner", "learner", "forward, backward and optimizer beside a padded plain step", True, True),
        Benchmark("savings", "savings", "each saving switched on and off", False, True),
        Benchmark("overlap", "overlap", "verification beside sampling; threads beside a busy process"),
        Benchmark("sandbox", "sandbox", "programs judged beside other ways to run them"),
        Benchmark("mathematics", "mathematics", "answers compared beside math-verify"),
        Benchmark("growth", "growth", "1, 4 and 16 times the work: time a unit and memory"),
    )
}


def chosen(names: Iterable[str], setting: Setting) -> list[tuple[str, list[Case]]]:
    """The cases of the named benchmarks, none named: of all that the setting fits. ValueError for what is not there."""
    asked = list(dict.fromkeys(names)) or [b.name for b in BENCHMARKS.values() if _unfit(b, setting) is None]
    found: dict[str, list[Case]] = {}
    for text in asked:
        name, slash, part = text.partition("/")
        if name not in BENCHMARKS:
            raise ValueError(f"no benchmark {name!r}{nearest(name, BENCHMARKS)}; there are {', '.join(BENCHMARKS)}")
        benchmark = BENCHMARKS[name]
        if option := _unfit(benchmark, setting):
            raise ValueError(f"{option} has no effect on {name}: leave one of them out")
        cases = importlib.import_module(f"rlvr.bench.{benchmark.module}").cases(setting)
        if slash and part not in (names_of := [case.name for case in cases]):
            raise ValueError(f"{name} has no case {part!r}{nearest(part, names_of)}; it has {', '.join(names_of)}")
        # A part is written beside the whole, never over it.
        found[text.replace("/", "-").replace(" ", "-")] = [case for case in cases if part in ("", case.name)]
    return list(found.items())


def _unfit(benchmark: Benchmark, setting: Setting) -> str | None:
    """The option that this benchmark would ignore."""
    if setting.model is not None and not benchmark.model:
        return "--model"
    return "--dtype" if setting.dtype != "float32" and not benchmark.dtype else None
