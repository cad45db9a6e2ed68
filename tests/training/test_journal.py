"""The run folder's memory: torn lines, damaged checkpoints, one process at a time, nothing deleted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlvr.core.files import new_folder
from rlvr.training.journal import (
    Checkpoint,
    Journal,
    Position,
    RunLockedError,
    changed_environment,
    describe_mismatch,
    move_aside,
    newest_checkpoint,
    store_environment,
)


def save(journal: Journal, step: int) -> Path:
    path = journal.folder / "checkpoints" / f"rl-{step:06d}"
    with new_folder(path) as folder:
        (folder / "weights.bin").write_bytes(bytes([step]) * 100)
    journal.checkpoint(Checkpoint(Position(2, step), f"checkpoints/{path.name}", {"at": step}), keep=2)
    return path


def test_the_newest_checkpoint_is_found_again(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for step in (10, 20, 30):
            save(journal, step)
    with Journal(tmp_path) as journal:
        assert journal.last_good(pytest.fail) == Checkpoint(Position(2, 30), "checkpoints/rl-000030", {"at": 30})
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["rl-000020", "rl-000030"]


@pytest.mark.parametrize("damage", ["flipped byte", "missing file", "missing folder"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path, damage: str) -> None:
    with Journal(tmp_path) as journal:
        save(journal, 10)
        last = save(journal, 20)
    match damage:
        case "flipped byte":
            (last / "weights.bin").write_bytes(b"\x00" + bytes([20]) * 99)
        case "missing file":
            (last / "weights.bin").unlink()
        case _:
            shutil.rmtree(last)
    said: list[str] = []
    with Journal(tmp_path) as journal:
        found = journal.last_good(said.append)
    assert found is not None and found.position == Position(2, 10)
    assert len(said) == 1 and "rl-000020" in said[0] and "falling back" in said[0]


def test_without_a_good_checkpoint_the_run_starts_over_and_says_so(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        shutil.rmtree(save(journal, 10))
    said: list[str] = []
    with Journal(tmp_path) as journal:
        assert journal.last_good(said.append) is None
    assert "from its beginning" in said[-1]


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    """What a crash left of an unfinished line neither counts nor spoils the next one."""
    with Journal(tmp_path) as journal:
        save(journal, 10)
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"event": "checkpoint", "phase": 2, "st')
    with Journal(tmp_path) as journal:
        assert len(journal.events) == 1
        journal.write("finished")
    with Journal(tmp_path) as journal:
        assert [e["event"] for e in journal.events] == ["checkpoint", "finished"]


def test_two_processes_cannot_work_in_one_run_folder(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(RunLockedError, match="in use by another process"):
        Journal(tmp_path)
    with Journal(tmp_path):
        pass


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".rl-000010.abc.tmp").mkdir(parents=True)
    (tmp_path / ".summary.json.abc.tmp").write_text("{")
    with Journal(tmp_path):
        pass
    assert not list(tmp_path.rglob("*.tmp"))


def test_starting_anew_renames_and_deletes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for content in ("first", "second"):
        run.mkdir()
        (run / "summary.json").write_text(content)
        move_aside(run)
    kept = sorted((p.name, (p / "summary.json").read_text()) for p in tmp_path.iterdir())
    assert kept == [("run.old-1", "first"), ("run.old-2", "second")]


def test_a_run_that_could_not_be_built_leaves_no_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved.yaml").write_text("seed: 1")
    with Journal(run) as journal:
        journal.delete_unstarted()
    assert not run.exists()


@pytest.mark.parametrize("more", ["notes.txt", "rollouts/rl-000001.jsonl", ""])
def test_a_folder_with_an_attempt_or_other_files_is_not_deleted(tmp_path: Path, more: str) -> None:
    with Journal(tmp_path) as journal:
        if more:
            (tmp_path / more).touch()
        else:
            journal.attempt({}, print)
        journal.delete_unstarted()
    assert (tmp_path / "journal.jsonl").exists()


def event_names(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_damaged_checkpoint_is_discarded_and_takes_no_place_among_those_kept(tmp_path: Path) -> None:
    """20, 40 and a damaged 60: after falling back to 40, saving 45 keeps 40 and 45 and removes the damaged one."""
    with Journal(tmp_path) as journal:
        for step in (20, 40, 60):
            path = save(journal, step)
    (path / "weights.bin").write_bytes(b"damage")
    said: list[str] = []
    with Journal(tmp_path) as journal:
        assert journal.last_good(said.append) == Checkpoint(Position(2, 40), "checkpoints/rl-000040", {"at": 40})
        assert len(said) == 1 and event_names(tmp_path)[-1] == "discarded"
    with Journal(tmp_path) as journal:
        found = journal.last_good(pytest.fail)  # said once, not again
        assert found is not None and found.position == Position(2, 40)
        save(journal, 45)
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["rl-000040", "rl-000045"]
        save(journal, 60)
        found = journal.last_good(pytest.fail)  # saved again, it counts again
        assert found is not None and found.position == Position(2, 60)


@pytest.mark.parametrize(
    "path", ["../victim", "checkpoints/../../victim", "checkpoints", "", "/tmp", 7, None, "checkpoints/a\0b", "\ud800"]
)
@pytest.mark.parametrize("event", ["checkpoint", "discarded"])
def test_a_journal_names_no_folder_outside_the_runs_checkpoints(tmp_path: Path, path: object, event: str) -> None:
    """Such a line is named; nothing is loaded or deleted."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    with Journal(run) as journal:
        save(journal, 10)
    with open(run / "journal.jsonl", "a") as file:
        file.write(json.dumps({"event": event, "phase": 2, "step": 11, "path": path, "state": {}}) + "\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: checkpoint path .* does not lie inside"):
        Journal(run)
    with pytest.raises(ValueError, match="line 2"):
        newest_checkpoint(run)
    assert victim.exists()


def test_only_a_journals_last_line_may_be_broken(tmp_path: Path) -> None:
    """A line spoiled in the middle is named, and the checkpoints after it are not forgotten."""
    with Journal(tmp_path) as journal:
        for step in (10, 20, 30):
            save(journal, step)
    path = tmp_path / "journal.jsonl"
    lines = path.read_bytes().split(b"\n")
    spoiled = b"\n".join([lines[0], lines[1][:30], *lines[2:]])
    path.write_bytes(spoiled)
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: not JSON"):
        Journal(tmp_path)
    assert path.read_bytes() == spoiled
    path.write_bytes(b"\n".join([lines[0], b"[]", *lines[2:]]))
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: not an event"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"phase": value} for value in (-1, None, "a", 1.0, True, 10**400)),
        *({"step": value} for value in (-3, None, "a", 2.5, False, [], 2**63)),
        *({"state": value} for value in (None, [], 3, "x")),
    ],
)
def test_a_checkpoint_without_a_position_or_a_state_is_named(tmp_path: Path, wrong: dict[str, object]) -> None:
    """Also where the entry is missing altogether; nothing is resumed from it and nothing changes."""
    with Journal(tmp_path) as journal:
        save(journal, 10)
    path = tmp_path / "journal.jsonl"
    before, good = path.read_bytes(), json.loads(path.read_text())
    [name] = wrong
    for line in ({**good, **wrong}, {key: value for key, value in good.items() if key != name}):
        path.write_bytes(before + json.dumps(line).encode() + b"\n")
        for read in (Journal, newest_checkpoint):
            with pytest.raises(ValueError, match=rf"journal\.jsonl, line 2: checkpoint without a {name}.*; delete the"):
                read(tmp_path)


@pytest.mark.parametrize("middle", [True, False])
def test_a_line_of_endless_depth_is_a_broken_line(tmp_path: Path, middle: bool) -> None:
    with Journal(tmp_path) as journal:
        place = save(journal, 10)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes() + b"[" * 20_000 + (b"\n" + path.read_bytes() if middle else b"\n"))
    if not middle:
        assert newest_checkpoint(tmp_path) == place
        return
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: not JSON"):
        Journal(tmp_path)


FRESH = {"drawn": {"1": 0}, "rate": {"1": 0.5}, "baseline": None}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"drawn": {"1": 7}, "rate": {"1": 1}, "baseline": -0.5}, ""),
        ({"drawn": {"1": 7}, "rate": {"1": 0.1}, "baseline": None}, ""),
        ({**FRESH, "drawn": {"1": 1.5}}, "state.drawn.1 is 1.5"),
        ({**FRESH, "drawn": {"1": -1}}, "state.drawn.1 is -1"),
        ({**FRESH, "drawn": {"1": True}}, "state.drawn.1 is True"),
        ({**FRESH, "drawn": {"1": 1, "2": 1}}, "state.drawn does not hold 1"),
        ({**FRESH, "drawn": [1]}, "state.drawn does not hold 1"),
        ({**FRESH, "rate": {"1": float("nan")}}, "state.rate.1 is nan"),
        ({**FRESH, "rate": {"1": None}}, "state.rate.1 is None"),
        ({**FRESH, "baseline": "x"}, "state.baseline is 'x'"),
        ({**FRESH, "baseline": 10**400}, "state.baseline is 1000"),
        ({"drawn": {"1": 0}}, "state does not hold drawn, rate, baseline"),
        (None, "state does not hold"),
    ],
)
def test_a_stored_state_is_held_against_a_fresh_one(found: object, says: str) -> None:
    told = describe_mismatch(found, FRESH)
    assert told.startswith(says) and bool(told) == bool(says)


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{}", "null", '{"salt": 1, "hashes": {}}', '{"salt": "a", "hashes": [["a", "b"]]}', "[" * 20_000],
)
def test_a_damaged_environment_file_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    store_environment(tmp_path, {"a": 1})
    assert changed_environment(tmp_path, {"a": 2}) == ["a"] and changed_environment(tmp_path, {"a": 1}) == []
    (tmp_path / "environment.json").write_text(text)
    with pytest.raises(ValueError, match=r"environment\.json.*delete it to go on unchecked"):
        changed_environment(tmp_path, {"a": 1})


@pytest.mark.parametrize("torn", [b'{"event": "checkpoint", "path": {}', b"\0" * 40, b"\0" * 40 + b"\n", b"\xff}"])
def test_a_torn_line_hides_no_stored_checkpoint(tmp_path: Path, torn: bytes) -> None:
    """Reading a run that may be at work sees what is whole, and leaves the file alone."""
    with Journal(tmp_path) as journal:
        place = save(journal, 10)
    with open(tmp_path / "journal.jsonl", "ab") as file:
        file.write(torn)
    content = (tmp_path / "journal.jsonl").read_bytes()
    assert newest_checkpoint(tmp_path) == place
    assert (tmp_path / "journal.jsonl").read_bytes() == content
    with Journal(tmp_path) as journal:
        journal.write("finished")
    assert event_names(tmp_path) == ["checkpoint", "finished"]


def test_a_folder_in_use_is_not_set_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Journal(run), pytest.raises(RunLockedError, match="in use by another process"):
        move_aside(run)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    move_aside(run)
    assert [p.name for p in tmp_path.iterdir()] == ["run.old-1"]


def test_an_attempt_that_computes_with_something_else_says_so(tmp_path: Path) -> None:
    """Compared with the first attempt that left a checkpoint to go on from."""
    first = {"torch": "2.9", "threads": 1, "device": "cpu"}
    with Journal(tmp_path) as journal:
        journal.attempt(first, pytest.fail)
    with Journal(tmp_path) as journal:
        journal.attempt({**first, "threads": 4}, pytest.fail)  # nothing is saved yet: it all starts over
        save(journal, 10)
    said: list[str] = []
    with Journal(tmp_path) as journal:
        journal.attempt(first, said.append)
    assert len(said) == 1 and "this run began with threads 4 (now 1)" in said[0]
