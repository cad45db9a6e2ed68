"""A whole run on reasoning_gym: it trains, evaluates, and resumes with the same tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.packages import need_package
from tests.kit.tiny_run import RunKilled, attempt, stored_steps

need_package("reasoning_gym", "needs the extra reasoning-gym")

CONFIG = """
seed: 3
env:
  name: reasoning_gym
  kwargs: {families: {chain_sum: 2, countdown: 1}, levels: [0, 1], instruction: Answer in <answer> and </answer>.}
model:
  tokenizer: characters
  device: cpu
  config: {model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 1024}
rollout: {max_tokens: 8}
sft: {steps: 2, batch_size: 4}
training: {steps: 2, prompts_per_step: 2, group_size: 4}
evaluation: {tasks: 4, samples: 2}
run: {checkpoint_every: 1}
engine: {threads: 1}
"""


@pytest.mark.slow
def test_a_run_trains_evaluates_and_goes_on_with_the_same_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gym.yaml").write_text(CONFIG)
    summary = attempt("gym.yaml", "run.name=whole")
    assert summary
    with pytest.raises(RunKilled):
        attempt("gym.yaml", "run.name=killed", killed_at=1)
    attempt("gym.yaml", "run.name=killed")
    whole, killed = (stored_steps(next(tmp_path.rglob(name))) for name in ("whole", "killed"))
    assert whole == killed
