"""Finds what failing tasks have in common: groups of tasks that fail where the others pass.

    for group in find_failure_groups(outcomes):
        print(group.name, group.rate, group.others)  # shape n n o n n o o  0.11  1.0

A candidate is the tasks with one value of a property (`task_features`), or with one word in their prompt. The unit is
the task, since completions of one task are not independent; it fails if fewer than half of its completions pass. The
test is Fisher's exact one, one-sided: does a candidate hold more failing tasks than chance would put there? Its p-value
is multiplied by the number of candidates (Bonferroni). The strongest candidate is taken, its tasks are set aside, and
the rest is searched again: what was nested in it, or held it, no longer differs. The thresholds are our judgement.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task, mean

FEWEST = 5  # tasks in a group, and outside it
FEWEST_MEASURED = 10  # tasks whose mean pass rate says something by itself
MAX_GROUPS = 3  # groups that are reported
ALPHA = 0.01  # chance that noise alone yields a group
MIN_RATE_GAP = 0.25  # pass rate of the others minus that of the group, at least
RISING = 0.1  # gain over training of a kind that is being learned
# A kind is never or rarely solved up to the first pass rate, if the others have the second.
UNSOLVED, SOLVED_ELSEWHERE = 0.25, 0.75

LENGTH = "prompt words"
LONGEST = 80  # characters of a group's name
Members = frozenset[int]


@dataclass(frozen=True)
class TaskOutcome:
    """A task's properties, the words of its prompt where those are known, and its pass rate."""

    features: Mapping[str, str]
    rate: float
    words: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FailureGroup:
    """Tasks that fail: what they have in common, how many, their pass rate, and that of the tasks in no group.

    `p_value` is corrected for all candidates. `members` are indices into the outcomes, `rate_before` their pass rate
    before training, where it is known.
    """

    name: str
    tasks: int
    rate: float
    rate_of_others: float
    p_value: float
    members: Members = frozenset()
    rate_before: float | None = None

    @property
    def is_unsolved(self) -> bool:
        """Whether this is a kind of task that is hardly ever solved, and not being learned, while the others are."""
        is_rising = self.rate_before is not None and self.rate - self.rate_before >= RISING
        return self.rate <= UNSOLVED and self.rate_of_others >= SOLVED_ELSEWHERE and not is_rising

    @property
    def shared_property(self) -> str:
        """What the tasks have in common: "level", "length", "word", or else a property that their source names."""
        if self.name.endswith(" in the prompt"):
            return "word"
        return "length" if self.name.startswith("prompt of ") else self.name.partition(" ")[0]


def task_features(source: TaskSource, task: Task) -> dict[str, str]:
    """What is known of a task without a completion: its level, what its source says, the length of its prompt."""
    described = {str(name): str(value) for name, value in source.describe_task(task).items()}
    level = {"level": task.level} if task.level else {}
    return {**level, **described, LENGTH: str(len(task.prompt_text.split()))}


def lowest_kind_rate(results: Iterable[tuple[Mapping[str, str], float]]) -> float:
    """The lowest mean pass rate of a kind: the tasks, `FEWEST_MEASURED` or more, with one value of a property.

    `results` are properties and pass rates of tasks; the length is left out. Without any such kind: the mean rate.
    """
    kinds: dict[tuple[str, str], list[float]] = {}
    for features, rate in results:
        for kind in (("", ""), *features.items()):
            kinds.setdefault(kind, []).append(rate)
    known = [mean(rates) for kind, rates in kinds.items() if kind[0] != LENGTH and len(rates) >= FEWEST_MEASURED]
    return min(known, default=mean(kinds.get(("", ""), [])))


def split_words(prompt: str) -> frozenset[str]:
    """The different words of a prompt, in lower case and without punctuation around them."""
    return frozenset(word.strip(".,;:!?()[]{}\"'`") or word for word in prompt.lower().split())


def find_failure_groups(outcomes: Sequence[TaskOutcome]) -> list[FailureGroup]:
    """At most `MAX_GROUPS` groups, the strongest first."""
    names: dict[Members, str] = {}
    for name, members in _candidates(outcomes):
        if FEWEST <= len(members) <= len(outcomes) - FEWEST:
            names.setdefault(frozenset(members), name)  # of equal groups the first, simplest name
    left, found = frozenset(range(len(outcomes))), list[FailureGroup]()
    while len(found) < MAX_GROUPS and (strongest := _find_strongest(outcomes, left, names)):
        members, log_p = strongest
        rate = _mean_rate(outcomes, members & left)
        found.append(FailureGroup(names[members], len(members & left), rate, 0.0, math.exp(log_p), members & left))
        left -= members
    return [replace(group, rate_of_others=_mean_rate(outcomes, left)) for group in found]


def _find_strongest(
    outcomes: Sequence[TaskOutcome], left: Members, names: Iterable[Members]
) -> tuple[Members, float] | None:
    """The candidate with the smallest corrected p-value among the tasks that are left, and its logarithm."""
    failing = frozenset(i for i in left if outcomes[i].rate < 0.5)
    best, log_best = None, math.log(ALPHA)
    candidates = list(names)
    for members in candidates:
        inside, outside = members & left, left - members
        failures = len(inside & failing)
        expected = len(failing) * len(inside) / max(1, len(left))
        if min(len(inside), len(outside)) < FEWEST or failures <= expected:
            continue
        log_p = math.log(len(candidates)) + log_fisher(failures, len(inside), len(failing), len(left))
        if log_p < log_best and _mean_rate(outcomes, outside) - _mean_rate(outcomes, inside) >= MIN_RATE_GAP:
            best, log_best = members, log_p
    return None if best is None else (best, log_best)


def log_fisher(failures: int, drawn: int, failing: int, total: int) -> float:
    """Logarithm of the chance that `drawn` of `total` tasks hold at least `failures` of the `failing` ones.

    Fisher's exact test, one-sided: the upper tail of the hypergeometric distribution.
    """

    def log_choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    terms = [
        log_choose(failing, k) + log_choose(total - failing, drawn - k)
        for k in range(max(failures, drawn - (total - failing)), min(drawn, failing) + 1)
    ]
    largest = max(terms)
    log_sum = largest + math.log(math.fsum(math.exp(term - largest) for term in terms))
    return min(0.0, log_sum - log_choose(total, drawn))


def _candidates(outcomes: Sequence[TaskOutcome]) -> Iterator[tuple[str, set[int]]]:
    """Names of groups with their members: properties in the order they are given, prompt lengths, then words."""
    members: dict[str, set[int]] = {}
    for i, outcome in enumerate(outcomes):
        for feature, value in outcome.features.items():
            if feature != LENGTH:
                members.setdefault(" ".join(f"{feature} {value}".split())[:LONGEST], set()).add(i)
    yield from members.items()
    yield from _length_quarters(outcomes)
    by_word: dict[str, set[int]] = {}
    for i, outcome in enumerate(outcomes):
        for word in outcome.words:
            by_word.setdefault(word, set()).add(i)
    yield from ((f'"{word[:LONGEST]}" in the prompt', by_word[word]) for word in sorted(by_word))


def _length_quarters(outcomes: Sequence[TaskOutcome]) -> Iterator[tuple[str, set[int]]]:
    """The tasks by quarters of the prompts' lengths; equal lengths are in the same quarter."""
    known = {i: int(n) for i, o in enumerate(outcomes) if (n := o.features.get(LENGTH, "")).isdecimal() and len(n) < 10}
    ordered = sorted(known.values())
    cuts = [ordered[len(ordered) * quarter // 4] for quarter in (1, 2, 3)] if ordered else []
    for quarter in range(4):
        lengths = {i: n for i, n in known.items() if bisect_right(cuts, n) == quarter}
        if lengths:
            low, high = min(lengths.values()), max(lengths.values())
            yield f"prompt of {low if low == high else f'{low} to {high}'} words", set(lengths)


def _mean_rate(outcomes: Sequence[TaskOutcome], members: Iterable[int]) -> float:
    return mean([outcomes[i].rate for i in members])
