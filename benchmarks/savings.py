"""What each saving is worth: our own step with it and without it.

The gradient is the same either way (`tests/engine/test_same_gradient.py`); only time and memory differ. Run by `rlvr
bench savings`. Left out on purpose: savings that have no switch, such as keeping the sampler's log-probs instead of
computing them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.learner import GROUP, MIXED, WIDE, BatchShape, learner_turn, load_shape_model, rows
from benchmarks.measure import BenchmarkCase, BenchSettings, Turn, TurnResult
from rlvr.core import rng
from rlvr.core.messages import Datum, ModelInput, SamplingParams, TensorData

PROMPT, ANSWERS, ANSWER = 256, 16, 32
BUDGETS = tuple(range(4, 129, 4))  # tokens of each answer
FEW_LOGITS, ALL_LOGITS = 1 << 22, 1 << 40


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """One case for each saving; the peer is the same work without it."""
    group, mixed, wide = GROUP, MIXED, WIDE
    if setting.quick:
        mixed, wide = replace(MIXED, groups=8), replace(WIDE, groups=2)
    train, sample = partial(partial, train_turn, setting), partial(partial, sample_turn, setting)
    return [
        _case("prompt once, training", "rows of one prompt share it", train(group), train(group, tree=False)),
        _case("no padding", "rows of mixed lengths end to end", train(mixed), train(mixed, pack=False)),
        _case("only rows with signal", "every second group has equal rewards",
              train(group, equal=True), train(group, equal=True, skip=False)),
        _case("log-probs in chunks", f"vocabulary {wide.vocabulary:,}, {FEW_LOGITS:,} logits at once; it saves memory",
              train(wide, logit_elements=FEW_LOGITS), train(wide, logit_elements=ALL_LOGITS)),
        _case("gradient checkpointing", "layers keep their input only; it saves memory",
              train(group, gradient_checkpointing=True), train(group)),
        _case("prompt once, sampling", f"{ANSWERS} answers of {ANSWER} tokens to one prompt of {PROMPT}",
              sample([ANSWER] * ANSWERS), sample([ANSWER] * ANSWERS, together=False)),
        _case("finished rows leave", f"{len(BUDGETS)} answers of {BUDGETS[0]} to {BUDGETS[-1]} tokens",
              sample(BUDGETS, together=False), sample(BUDGETS, together=False, wait=True)),
    ]  # fmt: skip


def _case(name: str, work: str, on: Any, off: Any) -> BenchmarkCase:
    return BenchmarkCase(name, "tokens", work, ours=on, peers={"without": off}, ours_name="with")


def train_turn(
    setting: BenchSettings, shape: BatchShape, *, equal: bool = False, skip: bool = True, **limits: Any
) -> Turn:
    """A learner's step on the rows of `shape`; with `equal` every second group has no signal; `skip` leaves it out."""
    model = load_shape_model(setting, shape)
    data = rows(shape, model.vocabulary)
    units = sum(datum.model_input.length for datum in data)
    if equal:
        still = [i // shape.size % 2 == 1 for i in range(len(data))]
        data = [_without_advantage(d) if s else d for d, s in zip(data, still, strict=True) if not (s and skip)]
    return learner_turn(setting, model, data, units, **limits)


def _without_advantage(datum: Datum) -> Datum:
    none = TensorData(np.zeros_like(datum.loss_fn_inputs["advantages"].data))
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "advantages": none})


def sample_turn(setting: BenchSettings, budgets: Sequence[int], *, together: bool = True, wait: bool = False) -> Turn:
    """Sample a completion of each budget to one prompt, `together` or each alone; `wait` runs all to the longest."""
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits

    model = load_shape_model(setting, GROUP)
    engine = Engine(model, EngineLimits(threads=setting.threads))
    snapshot = engine.snapshot(engine.create_policy("policy"))
    prompt = ModelInput([rng.integer(model.vocabulary, rng.key("bench-savings"), i) for i in range(PROMPT)])
    longest = max(budgets)

    def ask(count: int, budget: int, seed: int) -> Any:
        params = SamplingParams(max_tokens=longest if wait else budget, seed=seed, stop=[])
        return engine.sample(snapshot, prompt, count, params)

    def turn() -> TurnResult:
        asked = [ask(len(budgets), longest, 0)] if together else [ask(1, b, i) for i, b in enumerate(budgets)]
        for future in asked:
            future.result()
        return TurnResult(sum(budgets))

    return turn
