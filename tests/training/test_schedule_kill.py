"""Runs that sample ahead, killed again and again: the same bits under a fixed lag, no group lost under completion.

Real processes and real SIGKILL, as in `tests/training/test_kill.py`.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.kit.killed_runs import run_until_done
from tests.kit.tiny_run import count_fates

SHORT = ["training.dynamic_sampling=0", "training.steps=10", "sft.steps=4", "sft.until=0", "evaluation.every=0"]
LAGS = {
    "two steps behind": ["training.max_steps_off_policy=2"],
    "in minibatches": ["training.max_steps_off_policy=1", "training.num_minibatches=3", "training.num_substeps=1"],
}
KILLS = int(os.environ.get("RLVR_TEST_KILLS", "5"))


def drawn_seed() -> int:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"kill seed {seed}")
    return seed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", LAGS.values(), ids=LAGS)
def test_a_fixed_lag_ends_with_the_same_bits(tmp_path: Path, words: list[str]) -> None:
    """Batches in flight come back from the checkpoint: same weights hash, same metric rows, same summary."""
    words = [*SHORT, *words]
    _, undisturbed, rows = run_until_done(tmp_path / "calm", 0, 0, "", *words)
    kills, summary, killed_rows = run_until_done(tmp_path / "killed", drawn_seed(), KILLS, "", *words)
    print(f"killed {kills} times")
    assert kills >= KILLS // 2, "the run ended before it was killed often enough: the test tested too little"
    assert summary == undisturbed
    assert killed_rows == rows
    assert max(float(str(row.get("async/staleness_max", 0))) for row in rows) == float(words[len(SHORT)][-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_completion_every_group_has_one_fate(tmp_path: Path) -> None:
    """10 steps of 6 groups: each step chosen once, each group learned from or thrown away once, none left out."""
    words = [
        "training.schedule=completion", "training.max_steps_off_policy=2",
        *SHORT, "training.num_substeps=1", "training.num_minibatches=2",
    ]  # fmt: skip
    kills, _, rows = run_until_done(tmp_path / "killed", drawn_seed(), KILLS, "", *words)
    print(f"killed {kills} times")
    assert kills >= KILLS // 2, "the run ended before it was killed often enough: the test tested too little"
    run = tmp_path / "killed" / "runs" / "tiny"
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    counted = count_fates(events, 2)
    begun = {n for e in events if e["event"] == "started" for n, _, _ in e["groups"]}
    assert set(counted.values()) == {1} and set(counted) == begun == set(range(len(begun)))
    learned = [n for e in events if e["event"] == "batch" for n in e["groups"]]
    assert len(learned) == 10 * 6
    rl = [row for row in rows if row["phase"] == "rl"]
    assert [row["step"] for row in rl] == list(range(10))
    assert all(0 <= row["async/staleness_min"] <= row["async/staleness_max"] <= 2 for row in rl)  # type: ignore[operator]
    assert not list((run / "inflight").iterdir()), "answers that nothing can need any more are still there"
