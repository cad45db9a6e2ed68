"""Completions of a prompt are one row until their tokens differ: how many rows are computed, and that nothing else is
different from completions that are sampled one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlvr.core.messages import ModelInput
from tests.kit.rounding import close_logprobs, count_equal_tokens
from tests.kit.slow_cases import mark_slow_but
from tests.kit.tiny import END_ID, params, texts

LONG = [t % 15 for t in range(40)]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.3},
    "filtered": {"top_p": 0.7, "top_k": 5},
    "ending": {"stop": [END_ID, 3]},
    "ending in words": {"stop": ["1", "+="]},
}


@pytest.mark.parametrize("prompt", [[1, 2, 3], LONG], ids=["copied", "kept"])
def test_as_many_rows_are_computed_as_there_are_different_beginnings(
    prompt: list[int], fresh: Callable[..., Any]
) -> None:
    """At every step, counted from the answers."""
    engine = fresh("qwen3")
    request = engine.enqueue(
        engine.create_policy("p").snapshot(), ModelInput(prompt), 12, params(5, 15, temperature=0.5, stop=[END_ID])
    )
    computed: list[tuple[int, int]] = []
    while not engine.idle:
        engine.advance()
        computed.append((len(engine._sampler.scheduler.rows), engine._sampler.scheduler.running_completions))
    answers = texts(request.response())
    for step, found in enumerate(computed, start=1):
        going_on = [a for a in answers if len(a) > step]
        assert found == (len({tuple(a[:step]) for a in going_on}), len(going_on)), step
    assert any(1 < rows < seats for rows, seats in computed), "some have parted, some have not"


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("way", mark_slow_but(3, WAYS))
def test_completions_are_those_that_are_sampled_one_by_one(kind: str, way: str, fresh: Callable[..., Any]) -> None:
    """Tokens, why they end, log-probs and the likeliest tokens; of a model without our cache too (gemma2).

    A draw may fall so close to the boundary of two tokens that rounding decides: such a pair is compared up to there.
    """
    together, alone = fresh(kind), fresh(kind, max_rows=1)
    found: list[list[Any]] = []
    for engine in (together, alone):
        snapshot = engine.create_policy("p").snapshot()
        requests = [
            engine.enqueue(snapshot, ModelInput(prompt), 8, params(i, 10, **WAYS[way]), topk_sample=17)
            for i, prompt in enumerate(([1, 2, 3], LONG, [4]))
        ]
        while not engine.idle:
            engine.advance()
        found.append([sequence for request in requests for sequence in request.response().sequences])
    draws_all = not WAYS[way].keys() & {"temperature", "top_p"}
    split = 0
    for n, (one, other) in enumerate(zip(*found, strict=True)):
        alike = count_equal_tokens(one, other, *divmod(n, 8)) if draws_all else len(one.tokens)
        split += alike < len(one.tokens)
        if alike == len(one.tokens):
            assert (one.tokens, one.stop_reason) == (other.tokens, other.stop_reason)
        close = close_logprobs(other.logprobs[:alike], WAYS[way].get("temperature") or 1.0)
        assert one.logprobs[:alike] == close
        assert len(one.topk_logprobs) == len(one.tokens)
        for mine, theirs in zip(one.topk_logprobs[:alike], other.topk_logprobs[:alike], strict=True):
            assert [v for _, v in sorted(mine)] == close_logprobs(
                [v for _, v in sorted(theirs)], WAYS[way].get("temperature") or 1.0
            )
    assert split <= 1, "such a draw is rare"
    lists = [id(values) for s in found[0] for values in (s.tokens, s.logprobs, s.topk_logprobs)]
    assert len(set(lists)) == len(lists), "who changes an answer changes no other"
