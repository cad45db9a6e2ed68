"""What grows when the work does: the same at 1, 4 and 16 times the size, each in a process of its own.

The ratio is the time of a unit over that at the first size: at most 1 where cost grows no faster than the work. Memory
is each process's own peak. Exercised by `rlvr bench growth` and `tests/test_bench_cases.py`. The learner and the
sampler have their own growth beside their other cases. Left out on purpose: peers, and sizes that need minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlvr.bench import end_to_end, mathematics, sandbox
from rlvr.bench.measure import Case, Setting, Side

SIZES = (1, 4, 16)


def cases(setting: Setting) -> list[Case]:
    sizes = SIZES[:2] if setting.quick else SIZES
    # At the first size a step is long enough that what a step costs once does not matter.
    shape = replace(end_to_end.SHORT, groups=16, steps=1, warm_steps=10)

    def steps(size: int) -> Side:
        return partial(end_to_end.ours, setting, replace(shape, groups=shape.groups * size))

    def programs(size: int) -> Side:
        return partial(sandbox.ours, "namespaces", "split", setting.threads, 40 * size)

    def answers(size: int) -> Side:
        return partial(mathematics.ours, "expressions", 40 * size)

    return [
        growing(
            "end-to-end",
            "samples",
            f"a step of {shape.groups} prompts x {shape.size} answers, 3 M parameters",
            steps,
            sizes,
        ),
        growing("sandbox", "answers", "40 programs judged", programs, sizes),
        growing("mathematics", "answers", "40 answers compared", answers, sizes),
    ]


def growing(name: str, unit: str, work: str, side: Callable[[int], Side], sizes: tuple[int, ...] = SIZES) -> Case:
    """A case whose sides are ours at the sizes."""
    sides = {f"{size}x": side(size) for size in sizes}
    first, *others = sides
    return Case(name, unit, work, sides[first], {n: sides[n] for n in others}, ours_name=first, growth=True)
