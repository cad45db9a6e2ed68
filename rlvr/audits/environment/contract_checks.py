"""Checks of the contract: tasks and splits, determinism and isolation of episodes, time, memory, rewards."""

from __future__ import annotations

import gc
import math
import os
import random
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rlvr.audits.environment.answer_texts import MALFORMED, list_scripts, list_words
from rlvr.audits.environment.check_report import CheckResult, CheckState, not_tried, report_share, sound
from rlvr.audits.environment.scripted_play import CheckedEnvironment, EndlessEpisode, PlayedEpisode, Turns
from rlvr.core.types import Outcome, Task
from rlvr.core.verdict_reasons import EPISODE_FAILED
from rlvr.envs.gym.gym_session import OUT_OF_RANGE
from rlvr.reward.environment import NAME as ENVIRONMENT

SLOW_S = 5.0  # an episode that takes longer stops a run from using its time
GROWTH_BYTES = 1024  # an episode may keep
ROUNDS, EPISODES = 4, 24  # of memory
DESCRIPTORS = "/proc/self/fd"  # of Linux
NOT_FINITE = ("not_finite", "no_reward", "wrong_type", "wrong_length")
SMALL = 1e-9


def task_key(task: Task) -> tuple[Any, ...]:
    """A text of the whole task without its number, to find equal tasks by."""
    return task.prompt_text, task.level, repr(sorted(task.meta.items(), key=lambda item: str(item[0])))


def check_tasks(environment: CheckedEnvironment) -> list[CheckResult]:
    """Ids, splits, and draws that are repeated."""
    train, heldout = environment.scanned, environment.scanned_heldout
    splits = _check_splits(train, heldout)
    if environment.source.writes_tasks:
        splits = [_check_proposals(environment)]
    return [_check_ids(train, heldout), *splits, _check_seeds(environment, train, heldout)]


def _check_ids(train: Sequence[Task], heldout: Sequence[Task]) -> CheckResult:
    first: dict[str, Task] = {}
    hits = list[str]()
    for task in (*train, *heldout):
        known = first.setdefault(task.id, task)
        if task_key(known) != task_key(task):
            hits.append(f"{task.id!r}: {known.prompt_text[-60:]!r} and {task.prompt_text[-60:]!r}")
    return report_share("task_ids", hits, len(train) + len(heldout), "tasks have the id of another one")


def _check_splits(train: Sequence[Task], heldout: Sequence[Task]) -> list[CheckResult]:
    if not train or not heldout:
        return [not_tried("splits_disjoint", f"{len(train)} training tasks and {len(heldout)} held out")]
    ids, keys = {task.id for task in train}, {task_key(task) for task in train}
    prompts = Counter(task.prompt_text.strip().lower() for task in train)
    # Where many tasks have one prompt, as seeds of a game do, the prompt does not tell them apart.
    is_telling = prompts.most_common(1)[0][1] <= max(2, len(train) // 10)
    hits = [
        f"{task.id!r}: {task.prompt_text[-80:]!r}"
        for task in heldout
        if task.id in ids or task_key(task) in keys or (is_telling and task.prompt_text.strip().lower() in prompts)
    ]
    compared = f"held-out tasks are among {len(train)} training tasks"
    return [report_share("splits_disjoint", hits, len(heldout), compared)]


def _check_proposals(environment: CheckedEnvironment) -> CheckResult:
    """That the policy cannot write held-out tasks: an episode in which it does ends with that turn."""
    asked = [(environment.train[0], (task.prompt_text, "x")) for task in environment.heldout if environment.train]
    hits = [
        one.turns[0][-80:] for one in environment.play_alone(asked) if len(one.observations) > 2
    ]  # the solver had a turn
    return report_share("splits_disjoint", hits, len(asked), "held-out tasks can be written by the policy and trained")


def _check_seeds(environment: CheckedEnvironment, train: Sequence[Task], heldout: Sequence[Task]) -> CheckResult:
    hits = list[str]()
    few = list(enumerate(train))[:60]
    again = [(task, environment.draw(number)) for number, task in reversed(few)]
    pairs = [*again, *zip(heldout, environment.source.heldout(environment.heldout_count), strict=False)]
    for one, two in pairs:
        if (one.id, task_key(one)) != (two.id, task_key(two)):
            hits.append(f"{one.id!r}: {one.prompt_text[-60:]!r}, then {two.id!r}: {two.prompt_text[-60:]!r}")
    if len(given := environment.source.heldout(1)) > 1:
        hits.append(f"heldout(1) gave {len(given)} tasks")
    return report_share("seed_control", hits, len(few) + len(heldout), "tasks changed when they were drawn again")


def check_episodes(environment: CheckedEnvironment) -> list[CheckResult]:
    """Play the same turns twice, in another order, and beside others."""
    scripts = list_scripts(environment, environment.tasks[:6])
    twice = environment.play_alone([script for script in scripts for _ in range(2)])
    moved = _check_folder(environment.folder)
    first, again = twice[::2], twice[1::2]
    unstable = [_differ(one, two) for one, two in zip(first, again, strict=True)]
    results = [
        report_share(
            "episode_determinism", list(filter(None, unstable)), len(scripts), "episodes differed when repeated"
        ),
        *moved,
        *_check_draws(environment, scripts[:1]),
    ]
    stable = [place for place, said in enumerate(unstable) if not said]
    if len(stable) < 2:
        return [*results, not_tried("episode_isolation", "episodes differ already when they are played alone")]
    chosen = [scripts[place] for place in stable]
    backwards = environment.play_alone(chosen[::-1])[::-1]
    beside = environment.play(chosen)
    shuffled = environment.play(chosen[::-1])[::-1]
    ways = (("in another order", backwards), ("beside others", beside), ("beside others", shuffled))
    hits = [
        f"{way}: {said}"
        for way, played in ways
        for place, one in zip(stable, played, strict=True)
        if (said := _differ(first[place], one))
    ]
    return [*results, report_share("episode_isolation", hits, 3 * len(chosen), "episodes differed beside others")]


def _check_folder(folder: str) -> list[CheckResult]:
    """That episodes left the working directory as it was; a relative path of others leads elsewhere after that."""
    if (now := os.getcwd()) == folder:
        return []
    os.chdir(folder)
    text = "an episode changes the working directory of the process"
    return [CheckResult("episode_isolation", CheckState.FAULT, text, 1, (now,))]


def _check_draws(environment: CheckedEnvironment, scripts: Sequence[tuple[Task, Turns]]) -> list[CheckResult]:
    """That episodes do not seed Python's own `random`, by which other parts of the process may draw."""
    state, after = random.getstate(), list[float]()
    try:
        for seed in range(2):
            random.seed(seed)
            environment.play(scripts)
            after.append(random.random())
    finally:
        random.setstate(state)
    if after[0] != after[1]:
        return []
    text = "an episode seeds Python's `random`, which other parts of the process share"
    return [CheckResult("episode_isolation", CheckState.WARNING, text, 2)]


def _differ(one: PlayedEpisode, two: PlayedEpisode) -> str:
    """How two plays of the same turns differ; "" where they do not. A verdict that ran out of time may differ."""
    if one.trace == two.trace or Outcome.TIMEOUT in (one.score.outcome, two.score.outcome):
        return ""
    names = ("observations", "rewards", "reward", "outcome", "error")
    name, a, b = next(t for t in zip(names, one.trace, two.trace, strict=True) if t[1] != t[2])
    if name == "observations":
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -1)
        a, b = a[place][-60:], b[place][-60:]
    return f"{name} {a!r}, then {b!r} for {one.text[:40]!r}"


def check_malformed(environment: CheckedEnvironment) -> list[CheckResult]:
    """Turns of a policy that has not learned their form."""
    asked = [(task, (text,)) for task in environment.tasks[:2] for text in MALFORMED]
    hits = [
        f"{one.text[:20]!r}: {one.raised or one.score.detail.strip()[-100:]}"
        for one in environment.play(asked)
        if one.raised or (one.value is None and one.score.reason == EPISODE_FAILED)
    ]
    return [report_share("malformed_turns", hits, len(asked), "malformed turns made the episode fail")]


def check_time(environment: CheckedEnvironment) -> list[CheckResult]:
    """Seconds of the episodes that were played, and whether they end."""
    endless = [one.raised for one in environment.played_episodes if one.raised.startswith(EndlessEpisode.__name__)]
    if endless:
        return [CheckResult("resource_bounds", CheckState.FAULT, endless[0], len(endless), tuple(endless[:1]))]
    took = sorted(one.seconds for one in environment.played_episodes if one.seconds)
    if not took:
        return [not_tried("resource_bounds", "no episode was played")]
    middle, last = took[len(took) // 2], took[int(0.95 * (len(took) - 1))]
    text = f"an episode takes {1000 * middle:.1f} ms, 95% of them at most {1000 * last:.1f} ms"
    state = CheckState.FAULT if last > SLOW_S else CheckState.SOUND
    return [CheckResult("resource_bounds", state, text, len(took))]


def check_memory(environment: CheckedEnvironment) -> list[CheckResult]:
    """Play the same episodes in rounds: what is allocated must not grow with each."""
    scripts = list_scripts(environment, environment.tasks[:4])
    answers = [scripts[place % len(scripts)] for place in range(EPISODES)]
    start = time.monotonic()
    environment.play(answers)
    if time.monotonic() - start > 2.0:
        return [not_tried("memory_growth", "the episodes take too long to play many")]
    sizes: list[int] = []
    opened: list[int] = []
    tracemalloc.start()
    try:
        for _ in range(ROUNDS):
            environment.play(answers)
            del environment.played_episodes[-len(answers) :]
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
            opened.append(_count_open())
    finally:
        tracemalloc.stop()
    steps = [(b - a) / EPISODES for a, b in pairwise(sizes[1:])]
    growth, tried = sorted(steps)[len(steps) // 2], EPISODES * ROUNDS
    text = f"{growth:,.0f} bytes stay allocated for each episode (at most {GROWTH_BYTES:,})"
    is_growing = growth > GROWTH_BYTES and min(steps) > GROWTH_BYTES / 2
    results = [CheckResult("memory_growth", CheckState.FAULT if is_growing else CheckState.SOUND, text, tried)]
    if (left := min(b - a for a, b in pairwise(opened))) >= EPISODES // 2:
        text = f"{left / EPISODES:.1f} files, connections or threads stay open for each episode"
        results.append(CheckResult("memory_growth", CheckState.FAULT, text, tried))
    return results


def _count_open() -> int:
    """Descriptors and threads of this process."""
    return threading.active_count() + (len(os.listdir(DESCRIPTORS)) if os.path.isdir(DESCRIPTORS) else 0)


def check_rewards(environment: CheckedEnvironment, bounds: tuple[float, float] | None) -> list[CheckResult]:
    """Of all that was played: rewards that are no number, out of range, or given twice."""
    seen = environment.played_episodes
    low, high = bounds or _find_range(environment) or (-math.inf, math.inf)
    is_of_turns = bounds is None and environment.reward.name == ENVIRONMENT  # as in Gym: not of their sum
    hits = [f"{one.score.detail.strip()[-110:]} for {one.text[-30:]!r}" for one in seen if _is_no_number(one)]
    values = [(value, one) for one in seen for value in _list_values(one, is_of_turns) if value is not None]
    hits += [
        f"{value:g} for {one.text[-60:]!r}, expected {low:g} to {high:g}"
        for value, one in values
        if not math.isfinite(value) or not low - SMALL <= value <= high + SMALL
    ]
    references = {id(one) for one in environment.accepted}
    if environment.accepted and environment.top is not None:
        most = environment.top * 1.001 + SMALL
        hits += [
            f"{one.value:g} for {one.text[-60:]!r}, a reference gets {environment.top:g}"
            for one in seen
            if one.value is not None and one.value > most and id(one) not in references
        ]
    lowest = min((value for value, _ in values), default=0.0)
    highest = max((value for value, _ in values), default=0.0)
    text = f"rewards are no number or out of range; they go from {lowest:g} to {highest:g}"
    return [report_share("reward_well_formed", hits, len(seen), text), _check_attribution(environment)]


def _list_values(one: PlayedEpisode, is_of_turns: bool) -> Sequence[float | None]:
    """The rewards that must be in range: each turn's, and unless it is one of turns the whole one's."""
    return one.rewards if is_of_turns and one.rewards else (one.value, *one.rewards)


def _is_no_number(one: PlayedEpisode) -> bool:
    said = f"{one.score.detail} {one.raised}"
    return one.score.reason in NOT_FINITE or any(
        words in said for words in ("finite number", "expected a number", "is not finite", OUT_OF_RANGE)
    )


def _find_range(environment: CheckedEnvironment) -> tuple[float, float] | None:
    """The `reward_range` that an environment declares, as Gym's did, or else its verifier."""
    given = getattr(environment.source, "reward_range", None)
    if isinstance(given, (tuple, list)) and len(given) == 2:  # pyright: ignore
        return tuple(given)  # pyright: ignore
    return None if environment.reward.environment_weight else environment.reward.reward_range


def _check_attribution(environment: CheckedEnvironment) -> CheckResult:
    undeclared = [one.raised for one in environment.played_episodes if "environment_weight" in one.raised]
    if undeclared:
        text = "the environment and the verifier both give a reward, and nothing says what counts"
        return CheckResult("reward_attribution", CheckState.FAULT, text, len(undeclared), tuple(undeclared[:1]))
    twice = _find_repeated(one for one in environment.played_episodes if len(one.rewards) > 1)
    both = [one for one in environment.played_episodes if one.verified is not None and one.rewards]
    again = [one for one in both if sum(one.rewards) > SMALL and (one.verified or 0) > SMALL]
    alone = [one for one in both if (sum(one.rewards) > SMALL) != ((one.verified or 0) > SMALL)]
    if len(again) >= 3 and not alone:
        hits = [f"{sum(one.rewards):g} of the environment and {one.verified:g} of the verifier" for one in again]
        return report_share("reward_attribution", hits, len(both), "episodes are paid by both for the same")
    return report_share(
        "reward_attribution", twice, len(environment.played_episodes), "episodes get the sum again at their end"
    )


def _find_repeated(episodes: Iterable[PlayedEpisode]) -> list[str]:
    """Episodes whose last reward is the sum of those before, if that is so of all, and of one with two before."""
    hits, is_certain = list[str](), False
    for one in episodes:
        before = [reward for reward in one.rewards[:-1] if abs(reward) > SMALL]
        if not before or abs(one.rewards[-1]) <= SMALL:
            continue
        if abs(one.rewards[-1] - sum(before)) > SMALL:
            return []
        is_certain |= len(before) > 1
        hits.append(f"rewards {list(one.rewards)} for {one.text[-40:]!r}")
    return hits if is_certain else []


def report_startup(environment: CheckedEnvironment) -> CheckResult:
    """The result of starting: whether there are tasks and one can be played."""
    if not environment.tasks:
        return CheckResult("startup", CheckState.FAULT, "it has no task, neither for training nor held out")
    task = environment.tasks[0]
    texts = (
        "x",
        *list_words(environment)[:7],
        *("".join(turns[:1]) for turns in environment.list_references(task)[:1]),
    )
    played = environment.play_alone([(task, (text,)) for text in texts])
    failed = [one for one in played if one.raised or one.score.reason == EPISODE_FAILED]
    if len(failed) == len(played):
        why = failed[0].raised or failed[0].score.detail.strip()[-150:]
        name = "reward_well_formed" if _is_no_number(failed[0]) else "startup"
        name = "resource_bounds" if why.startswith(EndlessEpisode.__name__) else name
        return CheckResult(name, CheckState.FAULT, f"no episode can be played: {why}", len(played), (why,))
    if environment.source.levels and not environment.heldout:
        return CheckResult("startup", CheckState.WARNING, "it has no held-out task, so a run evaluates nothing", 1)
    return sound("startup", f"{len(environment.train)} training tasks, {len(environment.heldout)} held out", 1)
