"""The examples run as printed and learn what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.forked_process import run_forked

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_grpo_from_scratch_learns_from_verdicts_alone() -> None:
    """50 steps lift the reward of a random model well above guessing (1 in 5)."""
    done = run_forked(["examples/grpo_from_scratch.py", "--steps", "70", "--seed", "1"], cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"first step ([\d.]+), last ten ([\d.]+)", done.stdout)
    assert found, done.stdout
    first, last = map(float, found.groups())
    assert first < 0.15 and last > 0.45, done.stdout
