"""The config of a run that takes a second: one layer, two prompts a step, on the processor; and runs that are killed.

`attempt` is one attempt at a run, by the same steps as `rlvr train`, which may end in the middle of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlvr.build import build, open_run
from rlvr.build_client import circumstances, release
from rlvr.config import load
from rlvr.config.schema import configured
from rlvr.tracking import Console
from rlvr.training.journal import Journal
from rlvr.training.loops import Loop

TINY = """
seed: 3
env: {name: rpn_arithmetic, kwargs: {complexity: [1, 1], flaw: 0.0}}
model:
  tokenizer: words
  device: cpu
  config: {model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 24}
rollout: {max_tokens: 6}
sft: {steps: 2, batch_size: 8}
training: {steps: 3, prompts_per_step: 2, group_size: 4}
evaluation: {tasks: 8, samples: 2}
run: {checkpoint_every: 1}
engine: {threads: 1}
"""


class Killed(KeyboardInterrupt):
    pass


class KillingConsole(Console):
    """Ends the attempt in the middle of the RL phase, after `step` steps of it: nothing is saved at that moment."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._last, self._name = step, ""

    def phase(self, name: str, *arguments: Any, **named: Any) -> None:
        self._name = name
        super().phase(name, *arguments, **named)

    def step(self, metrics: dict[str, float], done: int) -> None:
        super().step(metrics, done)
        if self._name == "rl" and done == self._last:
            raise Killed


def attempt(file: str, *words: str, killed_at: int = 0) -> dict[str, Any]:
    """The summary; raises `Killed` after step `killed_at` of RL, unless that is 0."""
    composed = load(None, file, words)
    config = configured(composed)
    folder, _ = open_run(composed, config)
    with KillingConsole(killed_at) as console, Journal(folder) as journal:
        job = build(config, folder, console.note, console.warn)
        journal.attempt(circumstances(job.client), console.warn)
        try:
            return Loop(job, journal, console).run()
        finally:
            release(job.client)


def stored_steps(folder: Path) -> list[dict[str, Any]]:
    """A run's rows of metrics, without what a clock gave them."""
    stored = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens_per_second"} for r in stored]
