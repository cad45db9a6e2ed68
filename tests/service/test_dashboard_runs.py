"""A run folder as a dashboard source: the run's own numbers, live, with damaged files too."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Task
from rlvr.service.dashboard.dashboard_data import Query, finite_number, one_line, thin_points, visible_text
from rlvr.service.dashboard.pages.run_page import run_page
from rlvr.service.dashboard.run_charts import failing_groups, run_summary
from rlvr.service.dashboard.run_reader import RunReader
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.token_pieces import load_decode, token_pieces
from rlvr.training.rollout_rows import trajectory_row
from tests.kit.dashboard_fixtures import EVIL, WORDS, add_step, answer, make_run
from tests.kit.tiny_run import TINY


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "first")


def test_a_run_of_rlvr_train_is_shown_with_the_numbers_it_wrote(tmp_path: Path):
    """A tiny real run: the dashboard shows the numbers of its files."""
    from rlvr.cli.main import run as command

    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    assert command(["train", f"--config={config}", f"run.root={tmp_path / 'runs'}", "run.name=tiny"]) == 0
    folder = tmp_path / "runs" / "tiny"
    source = RunSource(tmp_path / "runs")
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = {float(row["step"]): row["reward"] for row in rows if row["phase"] == "rl"}
    charts = {chart.title: chart for chart in source.charts("tiny")}
    assert dict(charts["Reward"].lines[0].points) == rewards
    reader = source.run("tiny")
    assert reader is not None
    work = reader.work()
    assert (work.status, work.about, work.done) == ("finished", "training step 3 of 3", 1.0)
    summary = json.loads((folder / "summary.json").read_text())
    shown = {row[0]: row[1] for row in run_summary(reader.summary())[0].rows}
    assert shown["pass@1"].startswith(f"{100 * summary['baseline']['pass@1']['value']:.1f} %")
    stored = [json.loads(text) for text in (folder / "rollouts" / "rl-000001.jsonl").read_text().splitlines()]
    entries = source.answers(Query(work="tiny", step=1)).rows
    assert [entry.reward for entry in entries] == [row["reward"] for row in stored]
    detail = source.detail(entries[0].key)
    assert detail is not None
    assert [piece.logprob for piece in detail.tokens.pieces] == stored[0]["logprobs"]
    assert (
        "".join(piece.text for piece in detail.tokens.pieces).replace("<eoe>", "").strip()
        == stored[0]["response"].strip()
    )
    assert {entry.group for entry in detail.siblings} == {stored[0]["group_id"]}


def test_the_findings_and_the_failing_groups_are_those_of_doctor(run: Path):
    """Read again when a file has changed, and only then."""
    rows = [{"id": str(i), "level": "12"[i % 2], "passed": 4 * (i % 2), "judged": 4, "reward": 0.0} for i in range(60)]
    reader = RunReader("first", run)
    assert "never solved" not in str(reader.notes()) and failing_groups(reader.diagnosis()) == []
    (run / "evaluations").mkdir()
    (run / "evaluations" / "final.json").write_text(json.dumps({"results": rows, "k": 4}))
    assert reader.notes()[0].text.startswith("one kind of task is never solved: level 1 passes 0% where")
    [table] = failing_groups(reader.diagnosis())
    assert "the 60 held-out tasks" in table.label
    assert table.rows == [("level 1", "30", "0.0 %", "100.0 %")]
    assert reader.notes() == reader.notes() and reader.diagnosis() is reader.diagnosis()


def test_answers_are_filtered_and_paged_newest_first(run: Path):
    source = RunSource(run)
    found = source.answers(Query(outcome="failed", limit=3))
    assert found.total == 8 and [entry.step for entry in found.rows] == [3, 3, 2]
    assert [entry.outcome for entry in found.rows] == ["failed"] * 3
    assert source.answers(Query(outcome="failed", offset=3, limit=100)).rows[0].key == "first:2:2"
    assert {entry.step for entry in source.answers(Query(step=2)).rows} == {2}
    assert source.answers(Query(task="sum-1", step=0)).total == 2
    assert source.answers(Query(status="length")).total == 4
    assert source.answers(Query(task="nothing")).total == 0
    choices = source.choices("")
    assert (choices.tasks, choices.outcomes, choices.steps) == (["sum-0", "sum-1"], ["failed", "passed"], (0, 3))


def test_an_answer_is_shown_with_what_its_task_says_is_right(run: Path):
    """The answer, and the tests in whichever format the task has them; a very long reference is not stored."""
    metas: list[dict[str, Any]] = [
        {"answer": "\u202e42"},
        {"test_list": ["assert f(1) == 2"], "text": "Write f."},
        {"tests": [{"input": "1", "output": "2"}], "answer": 7},
        {"answer": "x" * 5_000},
        {"level": 3},
    ]
    made = [replace(answer(9, place), task=Task(f"t{place}", "", meta)) for place, meta in enumerate(metas)]
    (run / "rollouts" / "rl-000009.jsonl").write_text("".join(map(trajectory_row, made)))
    details = [RunSource(run).detail(f"first:9:{place}") for place in range(len(metas))]
    assert [detail and detail.reference for detail in details] == [
        [("Expected answer", "\\u202e42")],
        [("Tests", "assert f(1) == 2")],
        [("Expected answer", "7"), ("Tests", "input:\n1\noutput:\n2")],
        [],
        [],
    ]


def test_a_page_continues_from_one_run_to_the_next(run: Path):
    make_run(run.parent / "second", steps=1)
    source = RunSource(run.parent)
    everything = source.answers(Query(limit=100))
    assert everything.total == 20 == len(everything.rows)
    pages = [source.answers(Query(offset=offset, limit=3)).rows for offset in range(0, 20, 3)]
    assert [entry.key for page in pages for entry in page] == [entry.key for entry in everything.rows]


def test_new_rows_of_a_running_run_appear(run: Path):
    source = RunSource(run)
    before, revision = source.answers(Query()).total, source.revision()
    assert revision == source.revision()
    add_step(run, 4)
    assert source.revision() != revision
    assert source.answers(Query()).total == before + 4
    charts = {chart.title: chart for chart in source.charts("first")}
    assert charts["Reward"].lines[0].points[-1] == (4.0, 0.7)


def test_a_sharded_run_shows_how_its_ranks_wait_and_what_their_exchange_takes(run: Path):
    source = RunSource(run)
    assert not any("anks" in chart.title for chart in source.charts("first"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranks = {"ranks/idle/0": 0.0, "ranks/idle/1": 0.25, "ranks/transfer_s": 1.5, "ranks/publish_s": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps({**row, **ranks}) + "\n" for row in rows))
    charts = {chart.title: {line.name: line.points[-1][1] for line in chart.lines} for chart in source.charts("first")}
    assert charts["Ranks that wait for others"] == {"rank 0": 0.0, "rank 1": 0.25}
    assert charts["Exchange of the ranks"] == {"among the ranks": 1.5, "weights to the sampler": 0.5}


def test_rewritten_metrics_are_read_again(run: Path):
    source = RunSource(run)
    assert len(source.charts("first")[0].lines[0].points) == 4
    rows = (run / "metrics.jsonl").read_text().splitlines()
    for rewritten in ([*rows[:2], rows[3].replace('"reward": 0.6', '"reward": 0.9')], rows[:1]):
        (run / "metrics.jsonl").write_text("\n".join(rewritten) + "\n")
        points = source.charts("first")[0].lines[0].points
        assert len(points) == len(rewritten)


def test_what_a_page_has_no_time_to_read_is_read_in_a_thread(run: Path):
    """An open page asks again as long as the revision changes, so it shows all in the end."""
    source = RunSource(run, budget=1)
    before = source.revision()
    page = source.answers(Query())
    assert page.complete == (page.share == 1) and page.total <= 16
    source._reader._thread.join()  # type: ignore[reportPrivateUsage]
    after = source.revision()
    assert before != after
    page = source.answers(Query())
    assert (page.total, page.complete, page.share) == (16, True, 1.0) and source.revision() == after


def test_a_run_is_running_while_it_is_locked(run: Path):
    source = RunSource(run)
    assert (source.works()[0][0].status, source.works()[0][0].live) == (
        "writing",
        True,
    )  # by an unseen process
    os.utime(run / "metrics.jsonl", (100, 100))
    assert source.works()[0][0].status == "stopped"
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        work = source.works()[0][0]
        assert (work.status, work.live, work.done) == ("running", True, 0.4)
    assert not source.works()[0][0].live


def test_reading_changes_no_file(run: Path):
    def state() -> dict[str, tuple[int, bytes]]:
        files = sorted(place for place in run.rglob("*") if place.is_file())
        return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}

    before = state()
    source = RunSource(run)
    assert source.works()[0] and source.charts("first") and source.detail("first:1:1")
    assert state() == before
    with pytest.raises(ValueError, match="read-only"):
        source.rate("first:1:1", "", 1.0)


@pytest.mark.parametrize(
    "row",
    [
        "not json", "[1, 2]", "[" * 5000, '{"scores": 5, "response": 7, "logprobs": "x", "response_tokens": [1]}',
        '{"scores": {"a": {"value": 1e999, "outcome": [], "parts": {"x": "y"}}}, "response_tokens": [1e400]}',
        '{"response": [1], "prompt": {}, "reference": {"answer": [[]]}, "level": {}, "scores": '
        '{"a": {"outcome": "passed"}}}',
        '{"response_tokens": [99999999999], "logprobs": [-1], "response": "a"}', '{"reward": ' + "9" * 400 + "}",
    ],
)  # fmt: skip
def test_a_damaged_row_breaks_no_page(run: Path, row: str):
    (run / "rollouts" / "rl-000009.jsonl").write_text(row + "\n")
    (run / "metrics.jsonl").write_text(row + "\n")
    (run / "summary.json").write_text(row)
    (run / "resolved.yaml").write_text(row)
    source = RunSource(run)
    for entry in source.answers(Query(step=9)).rows:
        assert source.detail(entry.key) is not None
    assert source.groups(Query()).total >= 8 and isinstance(source.suspicions(""), list)
    assert source.works()[1] == 1
    assert isinstance(source.charts("first"), list) and run_page(source, {"work": "first"}).status == 200
    assert isinstance(source.at_step("first", 0), dict)


@pytest.mark.parametrize(
    "key", ["", "first", "first:1", "first:1:x", "first:1:-1", "nope:1:1", "../first:1:1", "a" * 9999]
)
def test_an_unknown_answer_is_none(run: Path, key: str):
    assert RunSource(run).detail(key) is None


def test_a_folder_without_a_run_is_refused_with_the_remedy(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no run.*give the folder that `rlvr train` named"):
        RunSource(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        RunSource(tmp_path / "missing")


def test_invisible_and_direction_characters_are_escaped():
    assert visible_text("a\u202eb\x07\u200b\n\tc\ud800") == "a\\u202eb\\x07\\u200b\n\tc\\ud800"
    assert "\u202e" not in one_line(EVIL) and "<script>" in one_line(EVIL)
    long = visible_text("x" * 100_000, 300)
    assert len(long) < 400 and "99,700 characters are not shown" in long
    assert one_line("a\nb\tc") == "a ⏎ b c" and visible_text(None) == one_line(17) == ""


def test_only_finite_numbers_are_accepted():
    assert [finite_number(v) for v in (1, 2.5, True, "3", None, float("nan"), float("inf"), 10**400)] == [1.0, 2.5] + [
        None
    ] * 6


def test_a_thinned_curve_keeps_its_spikes_and_its_end():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[1234] = (1234.0, 50.0)
    points[7777] = (7777.0, -50.0)
    kept = thin_points(points)
    assert len(kept) <= 401 and {points[1234], points[7777], points[-1]} <= set(kept)
    assert kept == sorted(kept) and thin_points(points[:400]) == points[:400]


def test_tokens_of_one_letter_are_joined_and_keep_their_log_probs():
    """An id may be a part of a letter only: its neighbours join it, and their log-probs add up."""
    letters = {0: b"a", 1: b"\xc3", 2: b"\xa9", 3: b"\xff"}

    def decode(ids: Any) -> str:
        return b"".join(letters[i] for i in ids).decode(errors="replace")

    found = token_pieces([0, 1, 2, 0, 3], [-1.0, -2.0, -3.0, -4.0, -5.0], decode)
    assert [(p.text, p.logprob, p.token) for p in found] == [
        ("a", -1.0, "0"), ("é", -5.0, "1 2"), ("a", -4.0, "0"), ("�", -5.0, "3"),
    ]  # fmt: skip
    assert token_pieces([0, 9], [-1.0, -2.0], decode)[1].text == "[9]"  # an id that the tokenizer does not have


def test_a_run_without_tokenizer_explains_missing_tokens(run: Path):
    file = run / "checkpoints" / "rl-000002" / "tokenizer.json"
    decode = load_decode(file)
    assert decode is not None and decode([0, 1]) == WORDS[0] + WORDS[1]
    file.write_text("{}")
    detail = RunSource(run).detail("first:1:1")
    assert detail is not None and not detail.tokens.pieces and "no tokenizer.json" in detail.tokens.note
    assert detail.answer == "= 1\n2"
