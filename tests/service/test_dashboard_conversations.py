"""Conversations in the dashboard: messages, calls of tools and branches, of a run and of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.service.dashboard.conversation_view import list_branches, read_conversation
from rlvr.service.dashboard.dashboard_data import Query
from rlvr.service.dashboard.pages.rollout_page import rollout_page
from rlvr.service.dashboard.pages.rollouts_page import rollouts_page
from rlvr.service.dashboard.pages.work_pages import overview, work_page
from rlvr.service.dashboard.recording_source import RecordingSource
from rlvr.service.dashboard.run_source import RunSource
from tests.kit.dashboard_fixtures import add_conversations, make_run
from tests.kit.dashboard_html import links, read_main, texts
from tests.kit.recorder import chat, post, read_message, recorder

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def run(tmp_path: Path) -> RunSource:
    folder = make_run(tmp_path / "run")
    add_conversations(folder, 3)
    return RunSource(folder)


def test_an_answer_of_a_run_is_shown_as_messages(run: RunSource) -> None:
    detail = run.detail("run:3:6")
    assert detail is not None
    shown = [(one.role, one.mark, one.credit) for one in detail.conversation.messages]
    assert shown == [
        ("system", "", None), ("user", "", None), ("assistant", "shared", None), ("tool", "", None),
        ("note", "", None), ("user", "", None), ("assistant", "trained", 0.0),
    ]  # fmt: skip
    (name, arguments) = detail.conversation.messages[2].calls[0]
    assert name == "weather" and arguments.startswith("city: Bern\ndays: [1, 2]\nnote: <script>")
    assert "\\u202e" in arguments, "what turns the writing direction is escaped"
    assert detail.conversation.messages[3].name == "weather"


def test_branches_are_a_tree(run: RunSource) -> None:
    detail = run.detail("run:3:6")
    assert detail is not None
    rows = [(b.key, b.text, b.turns, b.depth, b.shared, b.reward, b.is_shown) for b in detail.conversation.branches]
    assert rows == [
        ("run:3:4", "Yes, it rains.", 2, 0, 0, 1.0, False),
        ("run:3:6", "No rain.", 2, 1, 1, 0.0, True),
        ("run:3:5", "Wet.", 1, 0, 0, 0.25, False),
    ]
    first = run.detail("run:3:4")
    assert first is not None and [(m.mark, m.credit) for m in first.conversation.messages if m.mark] == [
        ("trained", 0.5), ("trained", 1.0),
    ]  # fmt: skip
    plain = run.detail("run:3:0")
    assert plain is not None and not plain.conversation.messages and not plain.conversation.branches


def test_a_branch_stands_behind_the_one_that_it_left() -> None:
    def row(*turns: int) -> dict[str, Any]:
        return {"messages": [{"role": "assistant", "content": str(turn), "turn": turn} for turn in turns]}

    episode = {"a": row(0, 1, 2), "b": row(9), "c": row(0, 1, 3), "d": row(0, 1, 3, 4), "e": row(0, 5)}
    found = [(b.key, b.depth, b.shared) for b in list_branches("a", episode)]
    assert found == [("a", 0, 0), ("c", 1, 2), ("d", 2, 3), ("e", 1, 1), ("b", 0, 0)]


def test_rows_that_no_run_writes_break_no_page() -> None:
    odd: list[Any] = [
        {"messages": 3}, {"messages": [1, None, {"role": 5, "content": {"a": 1}, "tool_calls": [3, {"function": 1}]}]},
        {"messages": [{"role": "tool", "content": [{"text": "t"}, 1], "turn": "x"}], "turns": -1, "turn_credits": "x"},
    ]  # fmt: skip
    for row in odd:
        read_conversation("a", {"a": row, "b": odd[1]})
    long = {"messages": [{"role": "user", "content": str(n)} for n in range(1_000)]}
    assert len(read_conversation("a", {"a": long}).messages) == 401


def test_the_pages_of_a_run_link_its_branches(run: RunSource) -> None:
    page = rollout_page(run, {"key": "run:3:6"})
    said = texts(read_main(page))
    assert "Branches: 3" in said and "trained in another branch" in said and "weather" in said
    assert {"/ui/trajectory/run%3A3%3A4", "/ui/trajectory/run%3A3%3A5"} <= {*links(page)}


def test_a_recording_is_shown_and_read_again_when_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    with recorder(path, CALL, "It rains.", "No rain.") as server:
        opened = server.open("task-1")
        base, asked = opened["openai_base_url"], {"role": "user", "content": "Rain?"}
        said = read_message(chat(base, asked, tools=[WEATHER]))
        told = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "12 degrees"}
        read_message(chat(base, asked, said, told, tools=[WEATHER]))
        source = RecordingSource(path)
        before = source.revision()
        (status, last) = chat(base, asked, said, told, {"role": "user", "content": "Sure?"}, tools=[WEATHER])
        assert status == 200
        assert post(f"{opened['url']}/reward", {"reward": 1, "call": last["id"]})[0] == 200
        assert post(f"{opened['url']}/reward", {"reward": 0})[0] == 200
        assert post(f"{opened['url']}/reward", {"reward": 0, "call": "none"})[0] == 404
    assert source.revision() != before
    ([work], count) = source.works()
    assert (count, work.about, work.figures["reward"]) == (1, "3 calls of task-1", "0")
    rows = source.answers(Query()).rows
    assert [row.task for row in rows] == ["task-1"] * 2 and source.answers(Query(task="other")).total == 0
    detail = source.detail(rows[1].key)
    assert detail is not None
    assert detail.conversation.messages[2].name == "weather", "by the id of the call"
    shown = [(m.role, m.text, m.calls, m.mark) for m in detail.conversation.messages if m.role != "note"]
    assert shown == [
        ("user", "Rain?", [], ""),
        ("assistant", "", [("weather", "city: Bern")], "shared"),
        ("tool", "12 degrees", [], ""),
        ("user", "Sure?", [], ""),
        ("assistant", "No rain.", [], "trained"),
    ]
    assert [(b.text, b.depth, b.shared, b.reward) for b in detail.conversation.branches] == [
        ("It rains.", 0, 0, 0.0), ("No rain.", 1, 1, 1.0),
    ]  # fmt: skip
    for view in (overview, rollouts_page, work_page, rollout_page):
        assert view(source, {"work": work.id, "key": rows[0].key}).status == 200
    assert rollout_page(source, {"key": "no_rollout:1"}).status == 404


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(ValueError, match=r"notes\.txt is neither"):
        RecordingSource(tmp_path / "notes.txt")
