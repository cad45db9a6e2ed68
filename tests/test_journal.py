"""The run folder's memory: torn lines, damaged checkpoints, one process at a time, nothing deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlvr.files import new_folder
from rlvr.training.journal import Checkpoint, Journal, Position, RunLocked, set_aside


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
    with Journal(tmp_path), pytest.raises(RunLocked, match="in use by another process"):
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
        set_aside(run)
    kept = sorted((p.name, (p / "summary.json").read_text()) for p in tmp_path.iterdir())
    assert kept == [("run.old-1", "first"), ("run.old-2", "second")]
