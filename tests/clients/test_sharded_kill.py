"""A sharded run whose ranks and driver are killed ends with the same bits; `benchmarks/sharded_kills.py` kills more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.sharded_kills import run_killed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_and_drivers_leave_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    found = run_killed(tmp_path, int(os.environ.get("RLVR_TEST_SHARDED_KILLS", "3")), seed=4)
    print(found)
    assert found["equal"] and sum(found["kills"].values()) >= 2
