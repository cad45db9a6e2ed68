"""Chooses the difficulty of each prompt. Its state is two small dictionaries, saved with every checkpoint.

The ways to choose a level are variants; a new one is a class of `LevelChoice` and its entry in `CURRICULA`. Beside any
of them `replay` brings tasks back that were not solved, with `hint_step` behind a hint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlvr.core import rng
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.core.variants import Section, Variant, Variants, make_section, setting
from rlvr.training.hints import HintWriter


@dataclass(frozen=True)
class LevelChoice(Variant):
    """How the level of each task is chosen.

    With `replay` every place of a batch has that chance to be given to a task of which no completion has passed, the
    one that waits longest, if there is one. With `hint_step` it then reads the beginning of its demonstration: that
    share, and one more each time no completion passes, one less each time one does, until one passes without
    (`rlvr.training.hints`).
    """

    kind = "curriculum"
    section = "curriculum"

    learns_from_verdicts: ClassVar[bool] = False
    """The verdicts of a run decide what is drawn."""

    replay: float = setting(0.0, low=0, high=math.nextafter(1.0, 0.0), expected="a chance from 0 to below 1")
    hint_step: float = setting(0.0, low=0, high=1, expected="a share of a demonstration, 0 to 1")

    @classmethod
    def place(cls) -> str:
        """Several sections hold one: its keys begin with theirs."""
        return ""

    def check(self, curriculum: Curriculum) -> None:
        """ValueError for an environment that it cannot choose from."""

    def advice(self, curriculum: Curriculum) -> list[str]:
        """Warnings about options that have no effect in this environment."""
        return []

    def weigh(self, curriculum: Curriculum, step: int) -> list[float]:
        """One weight per level of the source."""
        return [1.0] * len(curriculum.drawn)

    def observe(self, curriculum: Curriculum, level: str, rate: float) -> None:
        """Keep in `curriculum.memory` what it needs of a step in which this share of a level's completions passed."""


@dataclass(frozen=True)
class Uniform(LevelChoice):
    """Every level alike."""

    name = "uniform"


@dataclass(frozen=True)
class ByTasks(LevelChoice):
    """Every task alike, so that a level of many is drawn more often."""

    name = "tasks"

    def check(self, curriculum: Curriculum) -> None:
        if curriculum.source.size is None:
            raise ValueError(
                "curriculum.by=tasks: this environment generates its tasks without a fixed number; use by=uniform"
            )

    def weigh(self, curriculum: Curriculum, step: int) -> list[float]:
        return [curriculum.count_tasks(level) for level in curriculum.drawn]


@dataclass(frozen=True)
class ByPassRate(LevelChoice):
    """Prefer levels whose completions are mixed: weight p (1 - p) + `floor`, the variance of a pass and so the expected
    size of a group-mean gradient, with p a running mean of the level's pass rate, whose decay is `decay`.
    """

    name = "pass_rate"
    learns_from_verdicts = True

    floor: float = setting(0.05, low=math.ulp(0.0), expected="above 0", may_be_infinite=True)
    decay: float = setting(0.9, low=0, high=math.nextafter(1.0, 0.0), expected="0 to below 1")

    def advice(self, curriculum: Curriculum) -> list[str]:
        return _name_single_level(self, curriculum)

    def weigh(self, curriculum: Curriculum, step: int) -> list[float]:
        return [p * (1 - p) + self.floor for p in curriculum.pass_rate.values()]


@dataclass(frozen=True)
class ByProgress(LevelChoice):
    """Prefer levels whose pass rate moves, up or down: those that are learned or forgotten now. A level that is solved,
    or out of reach, does not move, however mixed its completions are.

    Progress is |fast - slow|, of two running means of the level's pass rate with the decays `decay` and `slow_decay`,
    which begin at its first rate (the bidirectional learning progress of Kanitscheider et al. 2021, arXiv:2106.14876,
    without their reweighting of rates). Levels are drawn by their share of all progress, and in `explore` of
    the draws alike. A level that was never drawn is taken as one of the largest possible progress, 1.
    """

    name = "progress"
    learns_from_verdicts = True

    decay: float = setting(0.9, low=0, high=math.nextafter(1.0, 0.0), expected="0 to below 1")
    slow_decay: float = setting(0.97, low=0, high=math.nextafter(1.0, 0.0), expected="0 to below 1, above `decay`")
    explore: float = setting(0.2, low=math.ulp(0.0), high=1, expected="a share of the draws, above 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slow_decay <= self.decay:
            raise ValueError(
                f"curriculum: slow_decay={self.slow_decay:g}, decay={self.decay:g}; expected slow_decay > decay: "
                "progress is how far the fast mean has moved from the slow one"
            )

    def advice(self, curriculum: Curriculum) -> list[str]:
        return _name_single_level(self, curriculum)

    def observe(self, curriculum: Curriculum, level: str, rate: float) -> None:
        fast, slow = curriculum.memory.get(level, (rate, rate))
        fast, slow = fast + (1 - self.decay) * (rate - fast), slow + (1 - self.slow_decay) * (rate - slow)
        curriculum.memory[level] = [fast, slow]

    def weigh(self, curriculum: Curriculum, step: int) -> list[float]:
        means = [curriculum.memory.get(level, (1.0, 0.0)) for level in curriculum.drawn]
        progress = [abs(fast - slow) for fast, slow in means]
        total, count = math.fsum(progress), len(progress)
        if not total:
            return [1.0] * count
        return [(1 - self.explore) * one / total + self.explore / count for one in progress]


def _name_single_level(choice: LevelChoice, curriculum: Curriculum) -> list[str]:
    if len(curriculum.drawn) > 1:
        return []
    return [
        f"curriculum.by={choice.name} changes nothing here: it chooses between levels, and every task is of the level "
        f"{next(iter(curriculum.drawn))}"
    ]


@dataclass(frozen=True)
class BySchedule(LevelChoice):
    """Weights from a step on: `[[0, {"1": 2, "2": 1}], [50, {"1": 1, "2": 1, "3": 1}]]`; a level that is not named is
    not drawn.
    """

    name = "schedule"

    schedule: list[tuple[int, dict[str, float]]] = field(default_factory=list[tuple[int, dict[str, float]]])

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = [start for start, _ in self.schedule]
        if starts and (starts[0] != 0 or starts != sorted(set(starts))):
            raise ValueError(f"curriculum.schedule: steps {starts} must start at 0 and rise")
        for start, weights in self.schedule:
            if not weights or min(weights.values()) < 0 or not 0 < sum(weights.values()) < float("inf"):
                raise ValueError(f"curriculum.schedule: weights {weights} at step {start} must be >= 0 and not all 0")

    def check(self, curriculum: Curriculum) -> None:
        for _, weights in self.schedule:
            if unknown := [level for level in weights if level not in curriculum.drawn]:
                levels = list(curriculum.source.levels)
                raise ValueError(f"curriculum.schedule: no level {unknown}; this environment has {levels}")

    def weigh(self, curriculum: Curriculum, step: int) -> list[float]:
        active = [weights for start, weights in self.schedule if start <= step][-1]
        return [active.get(level, 0.0) for level in curriculum.drawn]


@dataclass(frozen=True)
class ByThreshold(LevelChoice):
    """Open levels up to min(`highest`, `first` + step // `every`), for levels that are numbers (of tests, of
    operators), and draw every task of the open ones alike.
    """

    name = "threshold"

    first: int = 3
    every: int = setting(5, low=1, expected="at least 1")
    highest: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.highest < self.first:
            raise ValueError(f"curriculum: first={self.first}, highest={self.highest}; expected highest >= first")

    def check(self, curriculum: Curriculum) -> None:
        if min(_measure_levels(curriculum).values()) > self.first:
            raise ValueError(
                f"curriculum.by=threshold: no level is at most first={self.first}, so no task is "
                f"open at step 0; this environment has {list(curriculum.source.levels)}; raise curriculum.first"
            )

    def advice(self, curriculum: Curriculum) -> list[str]:
        heights, warnings = _measure_levels(curriculum), list[str]()
        if max(heights.values()) <= self.first:
            warnings.append(
                f"curriculum.by=threshold changes nothing here: every task is of a level up to {self.first} "
                f"(levels {', '.join(heights)}), so all are open at step 0"
                + ("; curriculum.by=pass_rate may help" if len(heights) > 1 else "")
            )
        if shut := [level for level, height in heights.items() if height > self.highest]:
            warnings.append(
                f"curriculum.by=threshold never opens the levels {', '.join(shut)}: raise curriculum.highest"
            )
        return warnings

    def weigh(self, curriculum: Curriculum, step: int) -> list[float]:
        highest = min(self.highest, self.first + step // self.every)
        heights = _measure_levels(curriculum)
        return [curriculum.count_tasks(level) * (height <= highest) for level, height in heights.items()]


def _measure_levels(curriculum: Curriculum) -> dict[str, float]:
    """The number that each level is; ValueError for one that is none."""
    heights: dict[str, float] = {}
    for level in curriculum.source.levels:
        try:
            heights[level] = float(level)
        except ValueError:
            raise ValueError(
                f"curriculum.by=threshold: the level {level!r} is not a number; this curriculum compares levels such "
                "as '3', the number of a problem's tests"
            ) from None
    return heights


CURRICULA = Variants("curriculum.by", LevelChoice, Uniform, ByTasks, ByPassRate, ByProgress, BySchedule, ByThreshold)


class CurriculumChoice(Section):
    """The way that levels are chosen in, and its options."""

    def __post_init__(self) -> None:
        if (self.choose_name() == BySchedule.name) != bool(self.schedule):
            raise ValueError("curriculum.schedule and by=schedule belong together: give both or neither")
        super().__post_init__()
        if self.hint_step and not self.replay:
            raise ValueError(
                f"curriculum.hint_step={self.hint_step:g} has no effect without curriculum.replay: a task has its hint "
                "when it comes back; give curriculum.replay=0.5"
            )


if TYPE_CHECKING:  # it is made of the ways that there are
    CurriculumOptions = CurriculumChoice
else:
    CurriculumOptions = make_section("CurriculumOptions", CURRICULA, ("by", str, Uniform.name), base=CurriculumChoice)


class Curriculum:
    """Chooses tasks. Counts those drawn of each level, so the position in the data is part of its state.

    `hint_writer` is needed with `hint_step` only.
    """

    def __init__(
        self, source: TaskSource, options: CurriculumOptions, seed: int, hint_writer: HintWriter | None = None
    ) -> None:
        self.source, self.options, self.seed = source, options, seed
        self.drawn = dict.fromkeys(source.levels, 0)
        self.pass_rate = dict.fromkeys(source.levels, 0.5)
        self.level: str | None = None  # that every task is drawn from; None: as the weights say
        self.memory: dict[str, list[float]] = {}  # what the way of choosing keeps of each level
        self.unsolved: dict[str, tuple[str, int]] = {}  # task id: (level, index), the one that waits longest first
        self.hints = Counter[tuple[str, int]]()  # (level, index): how many steps long its hint is; one for each id
        self.under_way: dict[str, list[tuple[str, int]]] = {}  # task id: (level, index) of each draw without a verdict
        self._hint_writer = hint_writer
        options.variant.check(self)

    def advice(self) -> list[str]:
        """Warnings about settings of this curriculum that have no effect."""
        return self.options.variant.advice(self)

    def weights(self, step: int) -> list[float]:
        """One weight per level of the source."""
        return self.options.variant.weigh(self, step)

    def count_tasks(self, level: str) -> float:
        """The number of tasks of a level if the source knows it, else 1."""
        return float(self.source.size(level)) if self.source.size else 1.0

    def tasks(self, count: int, step: int, wave: int = 0) -> list[Task]:
        """Draw the next `count` tasks of the run."""
        return [self.task(level, index) for level, index in self.draw(count, step, wave)]

    def task(self, level: str, index: int) -> Task:
        task = self.source.train(self.seed, index, level)
        if self.options.replay:
            self.under_way.setdefault(task.id, []).append((level, index))
        if not (steps := self.hints[level, index]):
            return task
        assert self._hint_writer is not None
        return self._hint_writer.write(task, min(1.0, steps * self.options.hint_step))

    def draw(self, count: int, step: int, wave: int = 0) -> list[tuple[str, int]]:
        """Draw the next `count` tasks; returns their (level, index)."""
        weights, levels = self.weights(step), list(self.drawn)
        key = rng.key("curriculum", self.seed, step, wave)
        replays = rng.key("replay", self.seed, step, wave)
        chosen: list[tuple[str, int]] = []
        for position in range(count):
            if self.unsolved and rng.uniform(replays, position) < self.options.replay:
                waiting = (id for id in self.unsolved if id not in self.under_way)
                if (id := next(waiting, None)) is not None:
                    chosen.append(self.unsolved.pop(id))
                    continue
            level = self.level
            if level is None:
                level = levels[rng.choice(weights, key, position)] if len(levels) > 1 else levels[0]
            chosen.append((level, self.drawn[level]))
            self.drawn[level] += 1
        return chosen

    def skip(self, level: str, index: int) -> None:
        """Do not draw that task again: an attempt that was killed drew it."""
        self.drawn[level] = max(self.drawn[level], index + 1)

    def observe(self, passes: Mapping[str, Sequence[bool]]) -> None:
        """Fold a step's verdicts, by level, into the running pass rates."""
        for level, verdicts in passes.items():
            if verdicts and level in self.pass_rate:
                now = sum(verdicts) / len(verdicts)
                self.pass_rate[level] += (1 - self.options.decay) * (now - self.pass_rate[level])
                self.options.variant.observe(self, level, now)

    def observe_tasks(self, passes: Mapping[str, Sequence[Sequence[bool]]]) -> None:
        """Fold a step's verdicts into the tasks that wait to come back, and their hints.

        `passes` has the verdicts of each group, by the id of their task, in the order in which they were drawn. With a
        data set an id is drawn every epoch, so several groups may have it. A task waits once; a fresh draw of one that
        waits has no hint: it ends the wait if a completion passes, and changes nothing if none does.
        """
        for id, groups in passes.items():
            places = self.under_way.pop(id, [])
            if later := places[len(groups) :]:
                self.under_way[id] = later
            judged = list(zip(places, groups, strict=False))
            judged.sort(key=lambda group: not self.hints[group[0]])  # those with a hint first
            for place, verdicts in judged:
                self._observe_group(id, place, verdicts)

    def _observe_group(self, id: str, place: tuple[str, int], verdicts: Sequence[bool]) -> None:
        steps, passed = self.hints.pop(place, 0), any(verdicts)
        if passed and not steps:  # solved behind a hint is not solved
            self.hints.pop(self.unsolved.pop(id, place), None)
        elif steps or id not in self.unsolved:
            self.unsolved[id] = place
            if self.options.hint_step and verdicts:
                steps = min(math.ceil(1 / self.options.hint_step), steps + (-1 if passed else 1))
            if steps:
                self.hints[place] = steps

    def state(self) -> dict[str, Any]:
        waiting = {"unsolved": [list(place) for place in self.unsolved.values()]} if self.options.replay else {}
        if self.options.hint_step:  # each place as often as its hint has steps
            waiting["hints"] = [list(place) for place in self.hints.elements()]
        kept = {"memory": dict(self.memory)} if self.memory else {}
        return {"drawn": dict(self.drawn), "pass_rate": dict(self.pass_rate), **kept, **waiting}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn.update(state["drawn"])
        self.pass_rate.update(state["pass_rate"])
        self.memory = {level: list(kept) for level, kept in state.get("memory", {}).items() if level in self.drawn}
        waiting = [(level, index) for level, index in state.get("unsolved", [])]
        hints = Counter((level, index) for level, index in state.get("hints", []))
        # Sorted: epoch after epoch, since a source may have to make the order of each.
        ids = {place: self.source.train(self.seed, place[1], place[0]).id for place in sorted({*waiting, *hints})}
        self.unsolved = {}
        for place in waiting:  # an id more than once: of a version that counted places
            self.unsolved.setdefault(ids[place], place)
        self.hints = Counter({p: steps for p, steps in hints.items() if self.unsolved.get(ids[p], p) == p})
        self.under_way = {}
