"""The patterns over all tasks that the database counts are what plain Python counts of the same rows."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlvr.store import Experience, ExperienceStore, Session, open_store
from rlvr.store.patterns import NO_ERROR

ALL = 10_000
fresh = itertools.count()
answer = st.fixed_dictionaries({
    "outcome": st.sampled_from(["passed", "failed", "failed", "error"]),
    "action": st.sampled_from(["fresh", "revise", ""]),
    "codes": st.lists(st.sampled_from(["wrong_value", "timeout"]), unique=True, max_size=2),
})  # fmt: skip
episode = st.tuples(
    st.sampled_from(["t1", "t2"]), st.sampled_from(["train", "evaluate", "run"]), st.lists(answer, max_size=3)
)


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    store = open_store(store_url)
    yield store
    store.close()


def experience(session: str, task: str, number: int, row: dict[str, Any], kind: str, by: str) -> Experience:
    score = {"outcome": "failed" if row["codes"] else "passed", "reason": "+".join(row["codes"])}
    return Experience(
        session, task, number, "p", "o", outcome=row["outcome"], action=row["action"], kind=kind, verified_by=by,
        step=1 if kind == "run" else None, feedback={"error_types": row["codes"]}, scores={"code": score},
    )  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(episode, max_size=8))
def test_patterns_are_counted_as_plain_python_does(store: ExperienceStore, episodes: list[Any]):
    by = f"by{next(fresh)}"  # the store is shared: these rows have a group of their own
    rows: list[Experience] = []
    for task, kind, answers in episodes:
        session = f"{by}-{len(rows)}-{next(fresh)}"
        store.add_session(Session(session, task, "p"))
        rows += [experience(session, task, i, row, kind, by) for i, row in enumerate(answers, 1)]
    store.add_experiences(rows)
    served = [e for e in rows if e.kind != "run"]

    found = [one for one in store.count_groups(ALL) if one.verified_by == by]
    assert [asdict(one) for one in found] == ([{
        "verified_by": by, "tasks": len({e.task_id for e in served}), "answers": len(served),
        "judged": sum(e.outcome != "error" for e in served), "passed": sum(e.outcome == "passed" for e in served),
    }] if served else [])  # fmt: skip

    errors = Counter(code for e in served for code in e.feedback["error_types"])
    tasks = {code: len({e.task_id for e in served if code in e.feedback["error_types"]}) for code in errors}
    named = [one for one in store.count_errors(ALL) if one.verified_by == by]
    assert {one.reason: (one.verifier, one.answers, one.tasks) for one in named} == {
        code: ("code", n, tasks[code]) for code, n in errors.items()
    }

    cells: defaultdict[tuple[str | None, str, str], list[bool]] = defaultdict(list)
    before = {(e.session_id, e.iteration): e.feedback["error_types"] for e in rows}
    for e in served:
        if e.action and e.outcome != "error":
            codes = [None] if e.iteration == 1 else before[e.session_id, e.iteration - 1] or [NO_ERROR]
            for code in codes:
                cells[code, e.task_id, e.action].append(e.outcome == "passed")
    counted = {(one.after, one.strategy): one for one in store.count_strategies(ALL) if one.verified_by == by}
    assert counted.keys() == {(after, action) for after, _, action in cells}
    for (after, action), one in counted.items():
        expected = variance = weight = Fraction(0)
        least = most = 0
        mine = {task: passes for (a, task, s), passes in cells.items() if (a, s) == (after, action)}
        for task, passes in mine.items():
            every = [passed for (a, t, _), all in cells.items() if (a, t) == (after, task) for passed in all]
            n, N, K = len(passes), len(every), sum(every)
            expected += Fraction(n * K, N)
            weight += Fraction(n * (N - n), N)
            variance += Fraction(n * (N - n) * K * (N - K), N * N * (N - 1)) if N > 1 else 0
            least, most = least + max(0, n + K - N), most + min(n, K)
        assert (one.tasks, one.answers) == (len(mine), sum(map(len, mine.values())))
        assert (one.passed, one.least, one.most) == (sum(map(sum, mine.values())), least, most)
        assert (one.expected, one.variance, one.weight) == pytest.approx(
            (float(expected), float(variance), float(weight))
        )
        assert {type(v) for v in asdict(one).values()} <= {str, int, float, type(None)}, "decimals are no JSON"


def test_the_lists_begin_with_the_most_frequent_and_end_at_the_limit(store: ExperienceStore):
    store.add_session(Session("s", "t", "p"))
    rows = [("code", ["a"]), ("code", ["b"]), ("code", ["b"]), ("math", ["b"])]
    store.add_experiences([
        experience("s", "t", i, {"outcome": "failed", "action": "fresh", "codes": codes}, "train", by)
        for i, (by, codes) in enumerate(rows, 1)
    ])  # fmt: skip
    assert [one.verified_by for one in store.count_groups(1)] == ["code"]
    assert [(one.verified_by, one.reason) for one in store.count_errors(2)] == [("code", "b"), ("code", "a")]
    assert len(store.count_strategies(1)) == 1


def test_an_error_is_attributed_to_the_first_verifier_that_names_it(store: ExperienceStore):
    store.add_session(Session("s", "t", "p"))
    failed = {"outcome": "failed", "reason": "too_short+empty"}
    scores = {"math": {"outcome": "passed", "reason": ""}, "draft": failed, "length": failed}
    given = Experience("s", "t", 1, "p", "o", scores=scores, feedback={"error_types": ["empty", "unnamed"]})
    store.add_experiences([given])
    assert {one.reason: one.verifier for one in store.count_errors(9)} == {"empty": "draft", "unnamed": ""}
