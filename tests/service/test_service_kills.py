"""benchmarks/service_kills.py: kills under load lose nothing, and what was lost or halved would be found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from benchmarks.service_kills import Acknowledged, find_differences
from rlvr.store import Experience, Session, Status, open_store

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "service_kills.py"


def answer(session: str, iteration: int) -> Experience:
    return Experience(session, "t", iteration, "p", f"answer {iteration}", reward=0.5)


def test_what_is_lost_or_halved_is_found(tmp_path: Path) -> None:
    """One session is whole; of each other one something is missing, and it is named."""
    url = f"sqlite:///{tmp_path / 'service.sqlite'}"
    store = open_store(url)
    for name, iterations, stored, status in (
        ("whole", 2, 2, Status.DONE), ("short", 2, 1, Status.DONE), ("empty-row", 0, 1, Status.INTERRUPTED),
        ("open", 1, 1, Status.RUNNING), ("unrated", 1, 1, Status.DONE), ("behind", 1, 1, Status.INTERRUPTED),
    ):  # fmt: skip
        solution = f"answer {stored}"
        store.add_session(
            Session(name, "t", "p", status=status, iterations=iterations, final_solution=solution, kind="train")
        )
        store.add_experiences([answer(name, i) for i in range(1, stored + 1)])
    store.rate(store.experiences(session_id="whole")[-1].id or 0, "me", 0.25)
    store.close()
    known = Acknowledged(
        accepted={"whole", "gone"}, done={"whole": (2, "answer 2"), "short": (2, "answer 2")},
        seen={"behind": 2, "whole": 2}, rated={"unrated": 0.5},
    )  # fmt: skip
    found, statuses = find_differences(url, known)
    assert sorted({text.partition(":")[0] for text in found}) == [
        "behind",
        "empty-row",
        "gone",
        "open",
        "short",
        "unrated",
    ]
    assert statuses == {"done": 3, "interrupted": 2, "running": 1}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_kills_under_load_lose_nothing() -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "3", "--clients", "4", "--longest", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differences: 0" in done.stdout
