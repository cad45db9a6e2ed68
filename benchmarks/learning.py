"""What steps teach a pretrained model, here and in TRL's `GRPOTrainer`: the mean reward of each step's completions.

Both sides start from SmolLM2-135M-Instruct under an adapter of rank 32, and make the same steps with the same tasks in
the same order, reward, batch, loss and constant learning rate; their draws differ, as two seeds' do. Run by `rlvr bench
learning`. TRL's trainer makes a step's gradient of four passes over 16 completions: over all 64 at once its logits take
15 GiB. Left out on purpose: evaluation on held-out tasks, which takes longer than these steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.end_to_end import ours
from benchmarks.measure import BenchmarkCase, BenchSettings
from benchmarks.step_shape import PRETRAINED
from benchmarks.trl_peer import peer

SEEDS = (1, 2, 3, 4, 5)
STEPS_A_TURN = 10  # the warm-up's turn learns too: 20 steps in all


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """One case per seed of the draws."""
    seeds, steps = (SEEDS[:1], 2) if setting.quick else (SEEDS, STEPS_A_TURN)
    return [case(setting, seed, steps) for seed in seeds]


def case(setting: BenchSettings, seed: int, steps: int) -> BenchmarkCase:
    shape = replace(PRETRAINED, name=f"learning-{seed}", steps=steps, rows_a_pass=16, seed=seed)
    return BenchmarkCase(
        name=f"seed {seed}",
        unit="samples",
        work=f"{shape.model} under an adapter of rank {shape.lora}, {shape.groups} sums in a chat x "
        f"{shape.size} answers of at most {shape.answer} tokens a step",
        ours=partial(ours, setting, shape),
        peers={"trl": partial(peer, setting, shape)},
        curve="mean reward",
        targets=(0.2, 0.4, 0.6),
        most_rounds=1,
    )
