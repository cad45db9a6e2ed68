"""What each saving is worth by itself: our own step with it, and without it.

The gradient is the same either way (`tests/test_same_gradient.py`), so only time and memory differ. Exercised by
`tests/test_bench.py` and `rlvr bench savings`. Left out on purpose: savings that have no switch because there is no
other way here, such as keeping the sampler's log-probs instead of computing them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rlvr import draws
from rlvr.bench.learner import GROUP, MIXED, WIDE, Shape, learning, loaded, rows
from rlvr.bench.measure import Case, Done, Setting, Turn
from rlvr.messages import Datum, ModelInput, SamplingParams, TensorData

PROMPT, ANSWERS, ANSWER = 256, 16, 32
BUDGETS = tuple(range(4, 129, 4))  # tokens of each answer
FEW_LOGITS, ALL_LOGITS = 1 << 22, 1 << 40


def cases(setting: Setting) -> list[Case]:
    """One case a saving; the peer is the same work without it."""
    group, mixed, wide = GROUP, MIXED, WIDE
    if setting.quick:
        mixed, wide = replace(MIXED, groups=8), replace(WIDE, groups=2)
    train, sample = partial(partial, trained, setting), partial(partial, sampled, setting)
    return [
        _case("prompt once, training", "rows of one prompt share it", train(group), train(group, tree=False)),
        _case("no padding", "rows of mixed lengths end to end", train(mixed), train(mixed, pack=False)),
        _case("only rows that teach", "every second group has equal rewards",
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


def _case(name: str, work: str, on: Any, off: Any) -> Case:
    return Case(name, "tokens", work, ours=on, peers={"without": off}, ours_name="with")


def trained(setting: Setting, shape: Shape, *, equal: bool = False, skip: bool = True, **limits: Any) -> Turn:
    """A learner's step on the rows of `shape`; with `equal` every second group teaches nothing, and may be skipped."""
    model = loaded(setting, shape)
    data = rows(shape, model.vocabulary)
    units = sum(datum.model_input.length for datum in data)
    if equal:
        still = [i // shape.size % 2 == 1 for i in range(len(data))]
        data = [_without_advantage(d) if s else d for d, s in zip(data, still, strict=True) if not (s and skip)]
    return learning(setting, model, data, units, **limits)


def _without_advantage(datum: Datum) -> Datum:
    none = TensorData(np.zeros_like(datum.loss_fn_inputs["advantages"].data))
    return replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "advantages": none})


def sampled(setting: Setting, budgets: Sequence[int], *, together: bool = True, wait: bool = False) -> Turn:
    """One answer of each budget to one prompt: as one request, or one each; with `wait` all run as long as the last."""
    from rlvr.engine.engine import Engine
    from rlvr.engine.options import EngineLimits

    model = loaded(setting, GROUP)
    engine = Engine(model, EngineLimits(threads=setting.threads))
    snapshot = engine.snapshot(engine.create_policy("policy"))
    prompt = ModelInput([draws.integer(model.vocabulary, draws.key("bench-savings"), i) for i in range(PROMPT)])
    longest = max(budgets)

    def ask(count: int, budget: int, seed: int) -> Any:
        params = SamplingParams(max_tokens=longest if wait else budget, seed=seed, stop=[])
        return engine.sample(snapshot, prompt, count, params)

    def turn() -> Done:
        asked = [ask(len(budgets), longest, 0)] if together else [ask(1, b, i) for i, b in enumerate(budgets)]
        for future in asked:
            future.result()
        return Done(sum(budgets))

    return turn
