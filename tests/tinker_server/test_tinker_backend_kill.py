"""A server killed at any moment goes on to the same bits: no optimizer step is lost, none is made twice."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit.forked_process import run_forked

pytest.importorskip("google.protobuf")

SCRIPT = Path(__file__).parents[1] / "kit" / "tinker_backend.py"
STEPS = 12


def run_lives(state: Path, *lives: str) -> tuple[dict[str, Any], list[str]]:
    """(final hash and steps, the client's replies), with the ids of the run taken out."""
    done = run_forked([str(SCRIPT), str(state), str(STEPS), *lives], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [re.sub(r"[0-9a-f]{32}:", "RUN:", line) for line in (state / "answers.txt").read_text().splitlines()]
    return json.loads(done.stdout.splitlines()[-1]), told


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    found = run_lives(tmp_path_factory.mktemp("whole"), "whole")
    assert found[0]["steps"] == STEPS and len(found[1]) == 3 * STEPS + STEPS // 3 * 2 + 1
    return found


@pytest.mark.slow
def test_killed_between_an_optimizer_step_and_its_record(tmp_path: Path, undisturbed_run: Any) -> None:
    """The step was made in memory but not reported: after the restart it is made again from the same weights."""
    assert run_lives(tmp_path, "step1", "step4", "step2", "whole") == undisturbed_run


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, undisturbed_run: Any) -> None:
    dice = random.Random(5)
    lives = [f"{0.15 + dice.random() * 1.2:.3f}" for _ in range(6)]
    assert run_lives(tmp_path, *lives, "whole") == undisturbed_run
    [run] = (tmp_path / "runs").iterdir()
    assert len(list((run / "live").iterdir())) == 1, "snapshots that were replaced are gone"
    assert not list(run.rglob(".*")), "and what was half written"
