"""The service's store as a dashboard source, and ratings on their way into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from rlvr.service.dashboard import dashboard_routes
from rlvr.service.dashboard.dashboard_data import Query
from rlvr.service.dashboard.dashboard_routes import PageMaker, store_rating
from rlvr.service.dashboard.page_changes import PageChanges
from rlvr.service.dashboard.pages.compare_page import compare_page
from rlvr.service.dashboard.pages.work_pages import overview
from rlvr.service.dashboard.session_source import StoreSource
from rlvr.store import ExperienceStore, Session, Status
from tests.kit.dashboard_fixtures import experience, fill_store
from tests.kit.dashboard_html import read_main, texts


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    filled = fill_store(store_url)
    yield filled
    filled.close()


def test_sessions_come_newest_first_with_their_state(store: ExperienceStore):
    works, total = StoreSource(store).works()
    assert total == 3
    assert [(work.id, work.status, work.live) for work in works] == [
        ("c", "running", True), ("b", "failed", False), ("a", "done", False),
    ]  # fmt: skip
    assert works[2].figures == {"iterations": "2", "confidence": "0.80"}
    assert StoreSource(store).work("nothing") is None


def test_answers_are_filtered_by_the_database(store: ExperienceStore):
    source = StoreSource(store)

    def keys(**asked: object) -> list[str]:
        found = source.answers(Query(**asked))  # type: ignore[arg-type]
        assert found.total == len(found.rows)
        return [entry.key for entry in found.rows]

    assert keys() == ["4", "3", "2", "1"]
    assert keys(work="a") == ["2", "1"]
    assert keys(task="task_b") == ["3"]
    assert keys(outcome="passed") == ["2"]
    assert keys(step=1, status="done") == ["1"]
    assert keys(status="running") == ["4"]
    assert keys(status="no such status") == []
    page = source.answers(Query(offset=1, limit=2))
    assert (page.total, [entry.key for entry in page.rows]) == (4, ["3", "2"])
    choices = source.choices("")
    assert (choices.tasks, choices.steps) == (["task_a", "task_b", "task_c"], (1, 2))
    assert source.choices("b").steps == (1, 1)


def test_a_long_answer_is_cut_in_tables_and_complete_on_its_page(store: ExperienceStore):
    store.add_experiences([experience("c", 2, text="x" * 30_000)])
    source = StoreSource(store)
    entry = source.answers(Query(limit=1)).rows[0]
    assert entry.answer.endswith("x …") and len(entry.answer) < 200
    detail = source.detail(entry.key)
    assert detail is not None and len(detail.answer) == 30_000


def test_one_answer_has_all_verdicts_and_the_feedback(store: ExperienceStore):
    detail = StoreSource(store).detail("1")
    assert detail is not None
    assert [(v.verifier, v.outcome, v.value, v.reason) for v in detail.verdicts] == [
        ("code", "failed", 0.0, "assertion"), ("draft", "passed", 0.9, ""),
    ]  # fmt: skip
    assert (detail.feedback, detail.suggestions) == ("test 2 failed", ["Handle zero."])
    assert detail.facts["strategy"] == "direct" and "log-probs" in detail.tokens.note
    assert [entry.key for entry in detail.siblings] == ["2"]


def test_an_answer_is_shown_with_what_it_was_compared_with(store: ExperienceStore):
    """The expected answer, the tests and the named verifiers of its session; of a training run nothing is stored."""
    request = {
        "answer": "\u202e144",
        "tests": ["assert f(1) == 2", {"input": "1", "output": "2"}],
        "verifiers": [["length", 2.0, {"at_most": 3}], ["draft", 1.0, {}]],
    }
    store.add_session(Session("d", "task_d", "Write.", request, status=Status.DONE, created=400))
    environment = {"expected_answer": "7", "derived_tests": ["assert f(3) == 4"]}
    store.add_session(Session("e", "task_e", "3 4 +", {"answer": None}, metrics=environment, created=401))
    store.add_session(Session("r", "", "", {"answer": "no request"}, kind="run", name="mine", created=402))
    keys = store.add_experiences([experience("d", 1), experience("e", 1), experience("r", 1, step=0)])
    details = [StoreSource(store).detail(str(key)) for key in keys]
    assert [detail and detail.reference for detail in details] == [
        [
            ("Expected answer", "\\u202e144"),
            ("Tests", "assert f(1) == 2\ninput:\n1\noutput:\n2"),
            ("Verifiers", "length (weight 2.0): at_most=3\ndraft (weight 1.0)"),
        ],
        [("Expected answer", "7"), ("Tests from examples in the prompt", "assert f(3) == 4")],
        [],
    ]
    assert ("Expected answer", "7") in StoreSource(store).texts("e")


def test_tokens_of_an_engine_are_shown_as_text(store: ExperienceStore):
    store.add_experiences([experience("c", 2, text="Hi", tokens=[72, 105], logprobs=[-0.5, -1.0])])
    source = StoreSource(store, decode=lambda ids: "".join(map(chr, ids)))
    detail = source.detail("5")
    assert detail is not None and [(p.text, p.logprob) for p in detail.tokens.pieces] == [("H", -0.5), ("i", -1.0)]
    without = StoreSource(store).detail("5")
    assert without is not None and not without.tokens.pieces and "no model is loaded" in without.tokens.note
    other = StoreSource(store, decode=lambda ids: "".join(chr(one + 1) for one in ids)).detail("5")
    assert other is not None and not other.tokens.pieces and "another model" in other.tokens.note


@pytest.mark.parametrize("key", ["", "0", "99", "-1", "1:1:1", "x", "9" * 40])
def test_an_unknown_answer_is_none(store: ExperienceStore, key: str):
    assert StoreSource(store).detail(key) is None


def test_a_rating_is_stored_and_a_second_one_of_the_same_owner_replaces_it(store: ExperienceStore):
    source = StoreSource(store)
    assert store_rating(source, {"key": "1"}, "ann", "0.5") == "Saved: 0.5"
    assert store_rating(source, {"key": "1"}, "ann", "1") == "Saved: 1"
    assert store_rating(source, {"key": "1"}, "bob", 0.0) == "Saved: 0"
    found = store.experience(1)
    assert found is not None and (found.rating, found.ratings) == (0.5, 2)
    detail = source.detail("1")
    assert detail is not None and (detail.row.rating, detail.ratings) == (0.5, 2)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("1", "1.5", "from 0 to 1"),
        ("1", "nan", "from 0 to 1"),
        ("1", None, "could not convert"),
        ("99", 1, "deleted"),
    ],
)
def test_a_rating_that_cannot_be_stored_says_why(store: ExperienceStore, key: str, value: object, said: str):
    assert said in store_rating(StoreSource(store), {"key": key}, "", value)
    assert store.experience(1).ratings == 0  # type: ignore[union-attr]


def test_a_sessions_curves_are_by_iteration(store: ExperienceStore):
    mine = {chart.title: chart.lines[0].points for chart in StoreSource(store).charts("a")}
    assert mine["Reward"] == [(1.0, 0.5), (2.0, 1.0)]


def test_the_overview_says_when_its_curves_begin(store: ExperienceStore):
    """Four answers are too few for a point."""
    assert StoreSource(store).charts() == []
    assert "Curves begin at 20 judged answers." in texts(read_main(overview(StoreSource(store), {})))


def test_a_training_run_in_the_store_is_shown_by_its_steps(store: ExperienceStore):
    """Two tasks a step, two answers each: of task x the rewards differ, of task y they do not."""
    metrics = {"rl/env/all/correct": 0.75, "rl/loss": 1.0}
    store.add_session(Session("r", "", "", kind="run", name="mine", status=Status.DONE, iterations=1, metrics=metrics))
    answers = [("x", 0.0, 0.0), ("x", 1.0, 1.0), ("y", 1.0, 1.0), ("y", 1.0, None)]
    store.add_experiences(
        [
            experience("r", 1, sample=place, task_id=task, reward=reward, confidence=sure, step=0)
            for place, (task, reward, sure) in enumerate(answers)
        ]
    )
    source = StoreSource(store)
    work = source.work("r")
    assert work is not None and work.name == "mine"
    assert work.figures["steps"] == "1" and work.figures["pass rate"] == "75.0%"
    charts = {chart.title: chart.lines[0].points for chart in source.charts("r")}
    assert charts == {
        "Reward": [(1.0, 0.75)], "Pass rate": [(1.0, pytest.approx(2 / 3))], "Groups with signal": [(1.0, 0.5)],
    }  # fmt: skip
    first = source.answers(Query(work="r", task="x")).rows[-1]
    detail = source.detail(first.key)
    assert detail is not None and [(e.task, e.reward) for e in detail.siblings] == [("x", 1.0)]


def test_iterations_are_compared_by_the_means_over_their_samples(store: ExperienceStore):
    store.add_experiences([experience("a", 1, sample=1, reward=1.5)])
    assert StoreSource(store).at_step("a", 1)["reward"] == 1.0
    assert StoreSource(store).at_step("a", 9) == {}


def test_new_answers_and_statuses_change_the_revision(store: ExperienceStore):
    source = StoreSource(store)
    seen = [source.revision()]
    assert source.revision() == seen[0]
    store.add_experiences([experience("c", 2)])
    seen.append(source.revision())
    store.update_session("c", status=Status.DONE)
    seen.append(source.revision())
    assert len({repr(revision) for revision in seen}) == 3


def make_pages(store: ExperienceStore) -> PageMaker:
    source = StoreSource(store)
    return PageMaker(source, PageChanges(source))


def test_a_database_that_is_down_is_shown_on_the_page_and_logged_once(postgres: Any, caplog: pytest.LogCaptureFixture):
    """An open page hears of it, asks again and again, and hears of the end."""
    store = fill_store(postgres.database())
    maker = make_pages(store)
    before = maker.changes.read()
    assert maker.make(overview, {})[1] == 200 and maker.changes.read() == before
    postgres.stop()
    try:
        states = {maker.changes.read() for _ in range(3)}
        for _ in range(3):
            text, status = maker.make(overview, {})
            assert status == 503 and "cannot be shown now (StoreDown)" in text
    finally:
        postgres.start()
    assert len(states - {before}) == 3 and len(caplog.records) == 1
    assert maker.make(overview, {})[1] == 200 and maker.changes.read() == before
    store.close()


def test_a_page_whose_table_is_locked_says_so_before_the_server_gives_up(
    postgres: Any, monkeypatch: pytest.MonkeyPatch
):
    psycopg = pytest.importorskip("psycopg")
    url = postgres.database()
    with closing(fill_store(url)) as store:
        maker = make_pages(store)

        async def look() -> list[tuple[str, int]]:
            with psycopg.connect(url) as other:
                other.execute("LOCK TABLE rlvr_sessions IN ACCESS EXCLUSIVE MODE")
                with monkeypatch.context() as soon:
                    soon.setattr(dashboard_routes, "DATA_S", 0.3)
                    locked = await maker.wait(overview, {})
            return [locked, await maker.wait(overview, {})]

        (locked, status), (_, later) = asyncio.run(look())
    assert status == 503 and "the database or the disk does not answer" in locked
    assert later == 200


def test_a_failed_session_shows_the_reason(store: ExperienceStore):
    note = StoreSource(store).notes("b")[0]
    assert (note.kind, note.text, note.remedy) == ("problem", "endpoint_unreachable", "no answer after 5 tries")


def test_the_health_of_the_generator_is_shown_with_its_training_figures(store: ExperienceStore):
    health = {
        "kind": "endpoint",
        "name": "http://llm",
        "state": "ready",
        "detail": "\u202efine",
        "learns": "strategies",
    }
    learned = {"policy_entropy": 1.25, "training_loss": None, "updates": 3, "strategies": {"first": [1.0]}}
    told = StoreSource(store, health=lambda: health, learning=lambda: learned).health()
    assert told == {
        "state": "ready", "name": "http://llm", "detail": "\\u202efine",
        "figures": {"learns": "strategies", "policy entropy": "1.25", "updates": "3"},
    }  # fmt: skip
    assert StoreSource(store).health() is None


def test_compare_opens_with_the_newest_session_of_several_iterations(store: ExperienceStore):
    assert "Iteration 1 and iteration 2" in texts(read_main(compare_page(StoreSource(store), {})))
