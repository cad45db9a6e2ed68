"""The config of a run that takes a second: one layer, two prompts a step, on the processor; and runs that are killed.

`attempt` is one attempt at a run, by the same steps as `rlvr train`, which may end in the middle of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.clients.registry import close_client
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.runs.assembly import assemble
from rlvr.runs.build_job import build_job
from rlvr.runs.run_folder import open_run
from rlvr.runs.run_tasks import resolve_epochs
from rlvr.tracking import RunConsole
from rlvr.training.journal import Journal
from rlvr.training.loop import TrainingLoop

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


class RunKilled(KeyboardInterrupt):
    pass


class KillingConsole(RunConsole):
    """Ends the attempt in the middle of a phase, after `step` steps of it: nothing is saved at that moment."""

    def __init__(self, step: int, phase: str = "rl") -> None:
        super().__init__()
        self._last, self._killed_in, self._name = step, phase, ""

    def phase(self, name: str, *arguments: Any, **named: Any) -> None:
        self._name = name
        super().phase(name, *arguments, **named)

    def step(self, metrics: dict[str, float], done: int) -> None:
        super().step(metrics, done)
        if self._name == self._killed_in and done == self._last:
            raise RunKilled


def attempt(file: str, *words: str, killed_at: int = 0, phase: str = "rl") -> dict[str, Any]:
    """The summary; raises `RunKilled` after step `killed_at` of `phase`, unless that is 0."""
    composed = load(None, file, words)
    config = build_config(composed)
    assembly = assemble(config)
    composed, config = resolve_epochs(composed, config, assembly.source)
    assembly = replace(assembly, config=config)
    assembly.start_rewards()
    folder, _ = open_run(composed, config)
    with KillingConsole(killed_at, phase) as console, Journal(folder) as journal:
        job = build_job(assembly, folder, console.note, console.warn)
        journal.attempt(job.describe_environment(), console.warn)
        try:
            return TrainingLoop(job, journal, console).run()
        finally:
            close_client(job.parts.client)


def stored_steps(folder: Path) -> list[dict[str, Any]]:
    """A run's rows of metrics, without what a clock gave them."""
    stored = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens_per_second"} for r in stored]


def count_fates(events: Iterable[dict[str, Any]], parts: int = 1) -> Counter[int]:
    """How often each group was learned from or thrown away; that every part of every batch was chosen once."""
    chosen = [event for event in events if event["event"] == "batch"]
    places = [(event["step"], event["part"]) for event in chosen]
    assert places == sorted(set(places)), "a decision was made twice or out of order"
    assert {part for _, part in places} == set(range(parts))
    return Counter(n for event in chosen for n in (*event["groups"], *event["discarded"]))
