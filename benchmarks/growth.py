"""How time and memory grow with the work: the same job at 1, 4 and 16 times the size, each in its own process.

The ratio is the time of a unit over that at the first size; it is at most 1 if cost grows no faster than the work. The
learner and the sampler have growth cases of their own. Run by `rlvr bench growth`. Left out on purpose: peers, and
sizes that take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks import end_to_end, mathematics, sandbox
from benchmarks.measure import BenchmarkCase, BenchSettings, Side
from benchmarks.step_shape import SHORT

SIZES = (1, 4, 16)


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    sizes = SIZES[:2] if setting.quick else SIZES
    # At the first size a step is long enough that what a step costs once does not matter.
    shape = replace(SHORT, groups=16, steps=1, fine_tuning_steps=10)

    def steps(size: int) -> Side:
        return partial(end_to_end.ours, setting, replace(shape, groups=shape.groups * size))

    def programs(size: int) -> Side:
        return partial(sandbox.ours, sandbox.PROGRAMS, setting.threads, 40 * size, "namespaces", "split")

    def answers(size: int) -> Side:
        return partial(mathematics.ours, "expressions", 40 * size)

    return [
        growth_case(
            "end-to-end",
            "samples",
            f"a step of {shape.groups} prompts x {shape.size} answers, 3 M parameters",
            steps,
            sizes,
        ),
        growth_case("sandbox", "answers", "40 programs judged", programs, sizes),
        growth_case("mathematics", "answers", "40 answers compared", answers, sizes),
    ]


def growth_case(
    name: str, unit: str, work: str, side: Callable[[int], Side], sizes: tuple[int, ...] = SIZES
) -> BenchmarkCase:
    """A case whose sides are ours at the sizes."""
    sides = {f"{size}x": side(size) for size in sizes}
    first, *others = sides
    return BenchmarkCase(name, unit, work, sides[first], {n: sides[n] for n in others}, ours_name=first, growth=True)
