"""Sessions as a table, strategies with their evidence, and what is busy: the pages of a service, and of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from rlvr.core.types import Outcome, Score
from rlvr.service.dashboard.dashboard_data import Query
from rlvr.service.dashboard.pages.machines_page import machines_page
from rlvr.service.dashboard.pages.page_parts import Page
from rlvr.service.dashboard.pages.sessions_page import COLUMNS, DEFAULT, sessions_page
from rlvr.service.dashboard.pages.strategies_page import strategies_page
from rlvr.service.dashboard.run_machines import run_machines
from rlvr.service.dashboard.run_reader import RunReader
from rlvr.service.dashboard.session_rows import RESULTS
from rlvr.service.dashboard.session_source import StoreSource, as_work
from rlvr.service.learning.strategy_policy import StrategyLearner
from rlvr.service.service_metrics import ServiceMetrics
from rlvr.service.service_options import TrainingConfig
from rlvr.store import ExperienceStore, Session, Status
from tests.kit.dashboard_fixtures import experience, fill_store, make_run, metric_row
from tests.kit.dashboard_html import find, links, read_main, read_words, texts


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    filled = fill_store(store_url)
    yield filled
    filled.close()


def rows_of(page: Page, label: str) -> list[list[str]]:
    """The texts of a table's rows, a list for each cell joined."""
    table = next(node for node in find(read_main(page), "table") if node[1]["aria-label"] == label)
    return [[" ".join(texts(cell)) for cell in row[2:]] for row in find(table, "tr")]


def test_the_database_chooses_the_sessions_of_a_result_as_their_badges_say(store: ExperienceStore):
    for number, (status, outcome, confidence) in enumerate(
        product(Status, ("", "passed", "failed", "invalid"), (None, 0.0, 0.5, 0.7, 0.9))
    ):
        store.add_session(
            Session(f"s{number}", "t", "p", status=status, outcome=outcome, final_confidence=confidence, created=1)
        )
    source = StoreSource(store)
    every, total = source.sessions("", "", "", 0, 1000)
    assert total == len(every) == 123
    for result in RESULTS:
        chosen = {session.id for session in source.sessions(result, "", "", 0, 1000)[0]}
        named = {s.id for s in every if result in (s.status.value, as_work(s).result)}
        assert chosen == named and named, result
    assert source.sessions("no such result", "", "", 0)[1] == 0


def test_what_could_not_be_judged_is_never_green(store: ExperienceStore):
    store.add_session(Session("u", "unknown", "p", status=Status.DONE, created=400))
    main = read_main(sessions_page(StoreSource(store), {}))
    shown = {texts(node)[0]: node[1]["class"] for node in find(main, "span") if "badge" in node[1].get("class", "")}
    assert shown == {
        "unverified": "badge warn", "running": "badge live", "failed": "badge bad", "solved": "badge good",
    }  # fmt: skip


def test_the_address_has_the_columns_the_filters_and_the_order(store: ExperienceStore):
    source = StoreSource(store)
    heads, *rows = rows_of(sessions_page(source, {}), "Sessions")
    assert heads == ["Task", *(COLUMNS[name].label for name in DEFAULT)]
    assert [row[0] for row in rows] == ["task_c", "task_b", "task_a"]
    page = sessions_page(source, {"c-tokens": "on", "c-strategies": "on", "task": "task_a", "sort": "-iterations"})
    assert rows_of(page, "Sessions") == [["Task", "Strategies", "Tokens"], ["task_a", "direct → direct", "14"]]
    order = [row[0] for row in rows_of(sessions_page(source, {"sort": "iterations"}), "Sessions")[1:]]
    assert order == ["task_a", "task_c", "task_b"]
    assert "No session matches." in texts(read_main(sessions_page(source, {"result": "cancelled"})))
    assert "/ui/sessions?sort=-iterations" in links(sessions_page(source, {"sort": "iterations"}))


@pytest.mark.parametrize(
    "asked", [{}, {"sort": "reward"}, {"sort": "-tokens"}, {"outcome": "failed"}, {"status": "done"}]
)
def test_keys_lead_through_the_answers_in_the_order_of_the_table(store: ExperienceStore, asked: dict[str, str]):
    source = StoreSource(store)
    keys = [row.key for row in source.answers(Query(**asked)).rows]  # type: ignore[arg-type]
    for place, key in enumerate(keys):
        near = source.neighbours(Query(**asked), False, key)  # type: ignore[arg-type]
        assert near is not None and (near.place, near.total) == (place + 1, len(keys))
        assert (near.before, near.after) == (["", *keys][place], [*keys, ""][place + 1])
    assert source.neighbours(Query(outcome="timeout"), False, keys[0]) is None


def test_strategies_have_their_probabilities_and_the_answers_that_taught_them(store: ExperienceStore):
    assert "No session has taught a strategy yet." in read_words(strategies_page(StoreSource(store), {}))
    learner = StrategyLearner(store, TrainingConfig(min_experiences_for_training=1))
    made = [
        experience("a", number, sample=1, action=("stepwise", "direct")[number % 2], gain=float(number % 2 == 0))
        for number in range(1, 41)
    ]
    store.add_experiences(made)
    learner.learn(made)
    source = StoreSource(store, learning=learner.learning)
    page = strategies_page(source, {})
    rows = {row[0]: row[2:] for row in rows_of(page, "First prompts")[1:]}
    assert rows.keys() == {"direct", "direct_warm", "stepwise", "thorough"}
    assert rows["stepwise"][0] == f"{100 * learner.policy.probabilities['first']['stepwise']:.1f} %"
    assert (rows["stepwise"][1], rows["direct"][1], rows["thorough"][1:4]) == ("20", "20", ["0", "–", "–"])
    assert rows["stepwise"][2].startswith("100.0 % (") and rows["direct"][2].startswith("83.3 % (")  # 20 of 24
    assert float(rows["stepwise"][3].split()[0]) > 0.2 > float(rows["direct"][3].split()[0])
    assert "/ui/trajectories?strategy=stepwise" in links(page)
    [_, taught] = rows_of(page, "Sessions")
    assert taught[0] == "task_a" and "stepwise +" in taught[3] and "direct -" in taught[3]


def test_a_run_is_busy_with_the_parts_of_its_steps(tmp_path: Path):
    run = RunReader("first", make_run(tmp_path / "first", steps=0))
    assert run_machines(run) is None
    rows = [
        {**metric_row(step), "time/step": 4.0, "time/sampling": 3.0, "time/scoring": 0.5, "time/update": 0.5,
         "tokens_per_second": 100.0, "ranks/busy/0": 0.875, "ranks/busy/1": 0.5, "ranks/idle/1": 0.25,
         "ranks/idle/0": 0.0, "ranks/transfer_s": 0.25, "ranks/publish_s": 0.5, "async/staleness_mean": 1.5}
        for step in range(12)
    ]  # fmt: skip
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_machines(run)
    assert found is not None and "4.00 s (mean of the last 10), most of it the sampler's" in found.about
    busy = {part.name: part.busy for part in found.parts}
    assert busy == {
        "Sampler": 0.75, "Verifiers": 0.125, "Learner": 0.125, "Rank 0": 0.875, "Rank 1": 0.5, "Exchange": None,
        "Queue of completions": None,
    }  # fmt: skip
    waits = {part.name: part.waits for part in found.parts}
    assert waits["Rank 1"] == "slower ranks, 25.0% of the time" and waits["Rank 0"] == ""


def test_a_service_shows_who_works_and_who_waits(store: ExperienceStore):
    counters = ServiceMetrics()
    counters.observe_generation(2.0, 10, 20)
    counters.observe_generation(1.0, 10, 20)
    counters.observe_verifier("code", 1.0, [Score(1.0, Outcome.PASSED), Score(None, Outcome.ERROR, "sandbox")])
    counters.count_generator_error("endpoint_timeout")
    for number in range(3):
        store.add_session(Session(f"q{number}", "t", "p", instance="one", status=Status.QUEUED))
    store.add_session(Session("r", "t", "p", instance="one", status=Status.RUNNING))
    source = StoreSource(store, health=lambda: {"state": "ready"}, collect=counters.collect, limit=4)
    [group] = source.machines()
    parts = {part.name: part for part in group.parts}
    assert "2 sessions run, 3 wait for a place" in group.about  # one of them is in the store from the beginning
    one = parts["Sessions of one"]
    assert one.busy == 0.25 and "3 sessions wait, the first for" in one.waits and "at most 3 of 4" in one.waits
    assert (parts["Generator"].busy, parts["Verifier code"].busy) == pytest.approx((0.75, 0.25))
    assert "1 failed" in parts["Verifier code"].did and "2 calls" in parts["Generator"].did
    assert "1 failed" in parts["Generator"].did
    shown = read_words(machines_page(source, {}))
    assert "This service ready" in shown and "75 %" in shown
    assert StoreSource(store).machines()[0].parts  # without counters the database's part remains
