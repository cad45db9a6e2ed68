"""A run that is killed again and again ends with the same bits as one that was left alone.

Real processes and real SIGKILL at random instants (`tests/kit/killed_runs.py`).
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.kit.killed_runs import run_until_done

ADAPTER = "lora: {rank: 4}"
CRITIC = ("algorithm.name=ppo_critic", "training.critic.warmup_steps=2", "training.critic.optimizer.learning_rate=0.01")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lora", "words"),
    [("", ()), (ADAPTER, CRITIC)],
    ids=["all weights", "adapter and critic"],
)
def test_killed_at_random_instants_ends_with_the_same_bits(tmp_path: Path, lora: str, words: tuple[str, ...]) -> None:
    """SIGKILL during sampling, update, evaluation or checkpoint: same weights hash, same metric rows, same summary (of
    the best policy, whose weights are kept beside the last), same critic."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"kill seed {seed}")
    wanted = int(os.environ.get("RLVR_TEST_KILLS", "6"))
    _, undisturbed, rows = run_until_done(tmp_path / "calm", 0, 0, lora, *words)
    kills, summary, killed_rows = run_until_done(tmp_path / "killed", seed, wanted, lora, *words)
    print(f"killed {kills} times")
    assert kills >= wanted // 2, "the run ended before it was killed often enough: the test tested too little"
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary == undisturbed
    assert killed_rows == rows
    calm, killed = (tmp_path / name / "runs" / "tiny" / "checkpoints" for name in ("calm", "killed"))
    assert (killed / "best.json").read_bytes() == (calm / "best.json").read_bytes()
    best = json.loads((calm / "best.json").read_text())["checkpoint"]
    assert sum(place.name.startswith("best-") for place in killed.iterdir()) == best.startswith("best-")
    critics = [place.name for place in calm.glob("*-critic")]
    assert len(critics) == (2 if words else 0)
    for place in (best, *critics):
        names = {file.name for file in (calm / place).glob("*.safetensors")}
        assert names and all((killed / place / n).read_bytes() == (calm / place / n).read_bytes() for n in names)
