"""/analysis says which strategies help where, and says nothing that its counts cannot support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlvr.core import rng
from rlvr.service.http.pattern_report import compare_strategies, describe_patterns
from rlvr.store import Experience, ExperienceStore, Session, open_store
from rlvr.store.patterns import StrategyCounts
from tests.kit.rlvr_service import RlvrService


def add_answers(store: ExperienceStore, task: str, strategy: str, passes: Sequence[bool], by: str = "math") -> None:
    session = f"{task}-{strategy}"
    store.add_session(Session(session, task, "p"))
    store.add_experiences([
        Experience(
            session, task, 1, "p", "o", sample=i, action=strategy, outcome="passed" if passed else "failed",
            verified_by=by, feedback={} if passed else {"error_types": ["wrong_value"]},
            scores={} if passed else {"math": {"outcome": "failed", "reason": "wrong_value"}},
        )
        for i, passed in enumerate(passes)
    ])  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExperienceStore]:
    store = open_store(tmp_path / "store.sqlite")
    yield store
    store.close()


def test_a_strategy_that_helps_is_found_with_its_rate_interval_and_difference(store: ExperienceStore):
    """By hand: 15 of 20 beside 5 of 20. E = 10, V = 20^4 / (40^2 39), z = 4.5 / 1.601, p = .00495, twice by Holm."""
    add_answers(store, "t", "stepwise", [True] * 15 + [False] * 5)
    add_answers(store, "t", "direct", [True] * 5 + [False] * 15)
    found = describe_patterns(store)
    direct, stepwise = sorted(found["strategies"], key=lambda row: row["strategy"])
    assert stepwise == {
        "verified_by": "math", "after": None, "strategy": "stepwise", "tasks": 1, "answers": 20, "passed": 15,
        "pass_rate": 0.75, "low": pytest.approx(0.5313, abs=1e-4), "high": pytest.approx(0.8881, abs=1e-4),
        "difference": pytest.approx(0.5), "p_value": pytest.approx(0.0099, abs=1e-4), "finding": "better",
    }  # fmt: skip
    assert (direct["difference"], direct["finding"]) == (pytest.approx(-0.5), "worse")
    [group], [error] = found["groups"], found["errors"]
    assert (group["judged"], group["passed"], group["pass_rate"]) == (40, 20, 0.5)
    assert (error["verifier"], error["reason"], error["answers"], error["share"]) == ("math", "wrong_value", 20, 0.5)


def test_a_strategy_gains_nothing_by_being_drawn_for_easy_tasks(store: ExperienceStore):
    """Over both tasks 'lucky' has 75 % and 'other' 39 %; on each task they are alike."""
    for task, rate, (lucky, other) in (("easy", 9, (90, 40)), ("hard", 1, (20, 70))):
        add_answers(store, task, "lucky", [i % 10 < rate for i in range(lucky)])
        add_answers(store, task, "other", [i % 10 < rate for i in range(other)])
    rows = {row["strategy"]: row for row in describe_patterns(store)["strategies"]}
    assert [rows[name]["pass_rate"] for name in ("lucky", "other")] == pytest.approx([83 / 110, 43 / 110])
    assert rows["lucky"]["difference"] == pytest.approx(0.0) and rows["lucky"]["p_value"] == 1.0
    assert {row["finding"] for row in rows.values()} == {"undecided"}


def test_a_few_answers_decide_nothing(store: ExperienceStore):
    """Four of four beside none of four: the approximation does not hold, so there is no p-value."""
    add_answers(store, "t", "stepwise", [True] * 4)
    add_answers(store, "t", "direct", [False] * 4)
    assert {(row["p_value"], row["finding"]) for row in describe_patterns(store)["strategies"]} == {(None, "undecided")}


def test_a_strategy_alone_on_its_tasks_is_not_compared(store: ExperienceStore):
    add_answers(store, "t", "stepwise", [True] * 50)
    add_answers(store, "u", "direct", [False] * 50)
    rows = describe_patterns(store)["strategies"]
    assert {(row["difference"], row["finding"]) for row in rows} == {(None, "undecided")}


def test_strategies_that_are_alike_are_seldom_called_different():
    """300 times six strategies on five tasks of other difficulties: Holm keeps a false finding below 1 in 20."""
    false = 0
    for trial in range(300):
        uniform = iter(rng.uniform(rng.key("patterns", trial), i) for i in range(10_000))
        passes = [[sum(next(uniform) < 0.1 + 0.2 * task for _ in range(12)) for _ in range(6)] for task in range(5)]
        counts: list[StrategyCounts] = []
        for s in range(6):
            K = [sum(of_task) for of_task in passes]
            counts.append(StrategyCounts(
                "math", None, f"s{s}", 5, 60, sum(of_task[s] for of_task in passes),
                expected=sum(K) / 6, variance=sum(12 * 60 * k * (72 - k) / (72 * 72 * 71) for k in K),
                least=sum(max(0, 12 + k - 72) for k in K), most=sum(min(12, k) for k in K), weight=5 * 12 * 60 / 72,
            ))  # fmt: skip
        false += any(row["finding"] != "undecided" for row in compare_strategies(counts))
    assert 0 < false <= 15 + 8, "5 % of 300, and twice its standard deviation"


def test_an_empty_store_has_no_patterns(store: ExperienceStore):
    assert describe_patterns(store) == {"groups": [], "errors": [], "strategies": []}


def test_the_service_answers_with_the_patterns_of_its_store(store: ExperienceStore, tmp_path: Path):
    add_answers(store, "t", "stepwise", [True] * 15 + [False] * 5)
    add_answers(store, "u", "direct", [True] * 5 + [False] * 15, "code")
    store.close()
    with RlvrService(tmp_path / "state", DATABASE_URL=f"sqlite:///{tmp_path / 'store.sqlite'}") as service:
        body = service.get("/analysis").json()
        assert service.get("/analysis/t").json()["analysis"]["total_experiences"] == 20
    assert body.keys() == {"groups", "errors", "strategies", "timestamp"}
    assert {group["verified_by"]: group["pass_rate"] for group in body["groups"]} == {"math": 0.75, "code": 0.25}
    assert {row["strategy"]: row["finding"] for row in body["strategies"]} == {
        "stepwise": "undecided", "direct": "undecided",
    }  # fmt: skip
