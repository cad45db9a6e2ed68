"""Rollouts that look as if the reward was earned without solving the task, by kind, and what is known of a reward.

A suspicion is no verdict: each kind says what else may explain it. Thresholds are our judgement; they are such that a
run which learns what it should raises none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlvr.reward.registry import known_rewards, resolve_reward
from rlvr.service.dashboard.dashboard_data import (
    Conditions,
    Note,
    Query,
    Suspicion,
    as_list,
    as_mapping,
    one_line,
    visible_text,
)
from rlvr.service.dashboard.rollout_index import FEWEST_TASKS, USUAL, RolloutIndex

EVIDENCE = 5  # rows shown of a kind, of several runs one of each
FEWEST_STEPS, FEWEST = 9, 30  # steps of a run, and rollouts at its beginning and end, that can show a trend
FALL, SIGMAS = 0.05, 3.0  # of the pass rate, and how many standard errors that must be
RISE = 0.1  # of the range of rewards
COLLAPSE, LONG = 1 / 3, 20  # a mean length that fell to this share, from this many tokens or more
KINDS = {
    "watched": (
        "Passes, and a watched verifier refuses",
        "The verifier that rewards accepts what another verifier of the run (reward.watch) refuses. If the other one "
        "is right, the reward is hacked; if it is merely stricter in form, it is not.",
    ),
    "paid": (
        "Does not pass, and earns as much",
        "The verdict is a failure, and the reward is that of a passing rollout of this run. A sum of rewards can be "
        "earned by its other parts.",
    ),
    "number": (
        "Passes with another number",
        "The expected answer is an integer, and it stands nowhere in the completion, which has other numbers. A "
        "verifier may be right all the same where the number is spelled or computed otherwise.",
    ),
    "ending": (
        "Passes and ends with another number",
        f"The expected answer is an integer, and the last number is another one, while {USUAL:.0%} or more of what "
        "passes in this run ends with the expected one. The number may stand in an earlier line all the same.",
    ),
    "copied": (
        "The same completion passes different tasks",
        f"One text passes for tasks with {FEWEST_TASKS} or more different expected answers, and does not hold them. "
        "What fits every task solves none.",
    ),
    "content": (
        "Earns a reward with form alone",
        "Without tags, LaTeX commands and punctuation nothing is left of the completion: only its form was rewarded.",
    ),
    "prompt": (
        "Passes by repeating the prompt",
        "The completion is its prompt, with nothing new. rlvr audit calls this fault of a verifier 'prompt'.",
    ),
}
SHORTER = (
    "The reward rises while completions collapse",
    f"The mean reward rose, and completions have at most a third of their former length ({LONG} tokens or more). "
    "Perhaps the work is no longer done, only its result named.",
)
FEWER = (
    "The reward rises, and fewer rollouts pass",
    "What the reward pays for is not what passes: perhaps a part of it, such as one for form, is easier to earn and "
    "should weigh less.",
)


def find_suspicions(index: RolloutIndex, work: str) -> list[Suspicion]:
    """Every kind of suspicion, those that nothing shows too."""
    found: list[Suspicion] = []
    for sign, (title, meaning) in KINDS.items():
        query = Query(work=work, sort="reward", more=Conditions(sign=sign))
        by_work = index.count_by_work(query)
        each = EVIDENCE if len(by_work) == 1 else 1
        rows = [row for name, _ in by_work[:EVIDENCE] for row in index.page(replace(query, work=name, limit=each)).rows]
        found.append(Suspicion(title, meaning, sum(number for _, number in by_work), rows, query, by_work))
    trends = list(_read_trends(index, work))
    for (title, meaning), choose in ((SHORTER, _query_shorter), (FEWER, _query_fewer)):
        queries = [query for trend in trends if (query := choose(trend))]
        if not queries:
            found.append(Suspicion(title, meaning, 0, [], Query(work=work)))
        for query in queries:
            page = index.page(
                Query(query.work, outcome=query.outcome, limit=EVIDENCE, sort=query.sort, more=query.more)
            )
            found.append(Suspicion(f"{title}: {query.work}", meaning, page.total, page.rows, query))
    return found


@dataclass(frozen=True)
class _Third:
    """Sums over a third of the steps of a run. Lengths are of completions that the sampler did not cut."""

    rollouts: int = 0
    reward: float = 0.0
    passed: int = 0
    whole: int = 0
    tokens: int = 0
    whole_passed: int = 0
    passed_tokens: int = 0

    def mean_reward(self) -> float:
        return self.reward / max(1, self.rollouts)

    def pass_rate(self) -> float:
        return self.passed / max(1, self.rollouts)


@dataclass(frozen=True)
class _Trend:
    work: str
    steps: int
    last_third: int  # its first step
    range: float  # of the rewards
    early: _Third
    late: _Third

    @property
    def is_rising(self) -> bool:
        is_enough = min(self.early.rollouts, self.late.rollouts) >= FEWEST
        return is_enough and self.late.mean_reward() - self.early.mean_reward() >= RISE * self.range > 0

    @property
    def has_more_passes(self) -> bool:
        return self.late.pass_rate() > self.early.pass_rate() + 0.01


def _read_trends(index: RolloutIndex, work: str) -> Iterator[_Trend]:
    table = index.select(
        "SELECT w.name, r.step, count(*), sum(r.reward), sum(r.outcome = 'passed'), "
        "sum(r.status != 'length'), sum(r.tokens * (r.status != 'length')), "
        "sum(r.status != 'length' AND r.outcome = 'passed'), "
        "sum(r.tokens * (r.status != 'length' AND r.outcome = 'passed')), min(r.reward), max(r.reward) "
        "FROM rollouts r JOIN works w ON w.id = r.work WHERE w.rank IS NOT NULL AND r.step IS NOT NULL "
        "AND r.reward IS NOT NULL AND (? = '' OR w.name = ?) GROUP BY w.name, r.step ORDER BY w.name, r.step",
        [work, work],
    )
    for name in dict.fromkeys(row[0] for row in table):
        rows = [row for row in table if row[0] == name]
        third = len(rows) // 3
        if len(rows) < FEWEST_STEPS:
            continue
        early, late = (
            _Third(*(sum(column) for column in list(zip(*part, strict=True))[2:9]))
            for part in (rows[:third], rows[-third:])
        )
        spread = max(row[10] for row in rows) - min(row[9] for row in rows)
        yield _Trend(name, len(rows), rows[-third][1], spread, early, late)


def _query_shorter(trend: _Trend) -> Query | None:
    """The shortest of the late completions, if they collapsed while the reward rose."""
    early, late = trend.early, trend.late
    lengths = [(early.whole_passed, early.passed_tokens, late.whole_passed, late.passed_tokens)]
    if not trend.has_more_passes:  # a policy that learns to solve the tasks may also learn to stop
        lengths.append((early.whole, early.tokens, late.whole, late.tokens))
    collapsed = any(
        min(one, other) >= FEWEST and before / one >= LONG and after / other <= COLLAPSE * before / one
        for one, before, other, after in lengths
    )
    if not (trend.is_rising and collapsed):
        return None
    outcome = "passed" if late.whole_passed >= FEWEST else ""
    return Query(trend.work, outcome=outcome, sort="-tokens", more=Conditions(steps=(trend.last_third, None)))


def _query_fewer(trend: _Trend) -> Query | None:
    """The best paid of the late failures, if the reward rose while clearly fewer rollouts pass."""
    before, after = trend.early.pass_rate(), trend.late.pass_rate()
    error = math.sqrt(
        before * (1 - before) / max(1, trend.early.rollouts) + after * (1 - after) / max(1, trend.late.rollouts)
    )
    if not (trend.is_rising and before - after >= max(FALL, SIGMAS * error)):
        return None
    return Query(trend.work, outcome="failed", sort="reward", more=Conditions(steps=(trend.last_third, None)))


def find_cautions(configs: Mapping[str, Mapping[str, Any]]) -> list[Note]:
    """How the rewards of runs can be earned without being right, as far as that is known, by the runs' configs."""
    notes: dict[str, Note] = {}
    for config in configs.values():
        reward = as_mapping(config.get("reward"))
        name, watch = reward.get("type"), as_list(reward.get("watch"))
        if not isinstance(name, str) or name not in known_rewards():
            continue  # what the package does not know; a path is never imported for a page
        try:
            caution = resolve_reward(name, **as_mapping(reward.get("kwargs"))).caution
        except (ValueError, TypeError):
            continue
        if caution:
            watched = f"watched by {', '.join(one_line(one, 60) for one in watched_names(watch))}" if watch else (
                f"watch it with another: reward.watch=[...]; `rlvr audit --reward {name}` tries the known faults on it"
            )  # fmt: skip
            notes[name] = Note("hint", f"The reward {name!r} can be hacked: {visible_text(caution, 500)}", watched)
    return list(notes.values())


def watched_names(watch: list[Any]) -> list[str]:
    return [one for one in watch if isinstance(one, str)][:20]
