"""The engine in steps, as a server drives it: enqueue, advance, cancel, release; who fails, fails alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.core.messages import ModelInput, NonFiniteError, PromptTargets
from rlvr.engine.engine_options import LoraConfig
from tests.kit.rounding import close_logprobs
from tests.kit.slow_cases import mark_slow_but
from tests.kit.stepped_engine import drain, train_adapter
from tests.kit.tiny import PROMPTS, params, plain_logprobs, texts

LORA = LoraConfig(rank=4, alpha=8.0)
PROMPT = ModelInput([1, 2, 3])


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_steps_give_the_results_of_futures_and_name_the_finished_requests(kind: str, fresh: Callable[..., Any]) -> None:
    """Every request comes back exactly once, from the step it ended with; the answers are the futures', to the bit."""
    engine, other = fresh(kind, max_rows=3), fresh(kind, max_rows=3)
    snapshot, same = engine.create_policy("p").snapshot(), other.create_policy("p").snapshot()
    asked = [(ModelInput(p), 2, params(i, 3 + 2 * i)) for i, p in enumerate(PROMPTS)]
    requests = [engine.enqueue(snapshot, *a) for a in asked]
    assert not engine.idle
    assert not any(r.is_done for r in requests), "enqueue computes nothing"
    ended = drain(engine)
    assert len(ended) == len(requests)
    assert set(map(id, ended)) == set(map(id, requests))
    assert engine.advance() == []
    futures = [other.sample(same, *a) for a in asked]
    assert [r.response() for r in requests] == [f.result() for f in futures]


@pytest.mark.parametrize("kind", mark_slow_but(1, ["qwen3", "gemma2", "llama"]))
@pytest.mark.parametrize("limits", [{}, {"max_rows": 7}, {"cache_tokens": 260}])
def test_requests_that_take_turns_get_the_answers_of_those_that_share_steps(
    kind: str, limits: dict[str, int], fresh: Callable[..., Any]
) -> None:
    """Two callers whose rows fork, end and wait for room at different steps, with a prompt that is kept once."""
    engine, other = fresh(kind, **limits), fresh(kind)
    snapshot, same = engine.create_policy("p").snapshot(), other.create_policy("p").snapshot()
    long = ModelInput([t % 15 for t in range(40)])
    asked = [(ModelInput(PROMPTS[i % 5]), 1 + i % 3, params(i, 3 + 4 * (i % 5))) for i in range(8)]
    asked += [(long, 5, params(20 + i, 8 + i)) for i in range(2)]
    rng, requests = random.Random(1), [engine.enqueue(snapshot, *a) for a in asked]
    callers = {request: i % 3 for i, request in enumerate(requests)}
    alone = 0
    while not engine.idle:
        turn = rng.choice([0, 0, 1, 2])
        before = {row: len(row.tokens) for row in engine._sampler.scheduler.rows}
        engine.advance(lambda request, turn=turn: callers[request] == turn)
        went_on = {callers[row.request] for row, length in before.items() if len(row.tokens) > length}
        alone += went_on == {turn} and len({callers[row.request] for row in before}) > 1
    assert alone > 5, "one caller's rows went on beside those of others, which waited"
    assert [texts(r.response()) for r in requests] == [texts(other.sample(same, *a).result()) for a in asked]


@pytest.mark.slow
def test_a_cancelled_request_leaves_the_others_untouched(fresh: Callable[..., Any]) -> None:
    """Waiting, running, split between both, or just seated beside shorter rows: the others' tokens stay."""
    for steps in (0, 1, 2, 6):
        engine, other = fresh("qwen3", max_rows=4), fresh("qwen3")
        snapshot, same = engine.create_policy("p").snapshot(), other.create_policy("p").snapshot()
        kept = [engine.enqueue(snapshot, ModelInput(PROMPTS[i]), 1, params(i, 20)) for i in (0, 1)]
        doomed = engine.enqueue(snapshot, ModelInput(PROMPTS[2]), 5, params(9, 30))
        kept.append(engine.enqueue(snapshot, ModelInput(PROMPTS[3]), 2, params(3, 20)))
        for _ in range(steps):
            engine.advance()
        engine.cancel(doomed)
        assert all(row.request is not doomed for row in engine._sampler.scheduler.rows)
        assert len(drain(engine)) == 3
        with pytest.raises(CancelledError):
            doomed.response()
        alone = [
            other.sample(same, ModelInput(PROMPTS[i]), n, params(i, 20)).result() for i, n in ((0, 1), (1, 1), (3, 2))
        ]
        assert [texts(r.response()) for r in kept] == [texts(a) for a in alone]
        engine.cancel(kept[0])
        assert kept[0].response(), "what is done stays as it is"


def test_a_long_prompt_just_seated_survives_the_cancelling_of_a_shorter_row(fresh: Callable[..., Any]) -> None:
    """It takes the freed place before its first step, with all its keys and values."""
    engine, other = fresh("qwen3"), fresh("qwen3")
    snapshot, same = engine.create_policy("p").snapshot(), other.create_policy("p").snapshot()
    doomed = engine.enqueue(snapshot, ModelInput([1]), 1, params(1, 20))
    engine.advance()
    engine.advance()
    long = ModelInput([t % 15 for t in range(90)])
    kept = engine.enqueue(snapshot, long, 1, params(2, 20))
    engine.advance()
    engine.cancel(doomed)
    drain(engine)
    expected = other.sample(same, long, 1, params(2, 20)).result().sequences[0]
    assert kept.response().sequences[0].tokens == expected.tokens
    assert kept.response().sequences[0].logprobs == close_logprobs(expected.logprobs)


def test_a_request_that_fails_in_its_second_part_leaves_no_row_and_no_place_in_line(fresh: Callable[..., Any]) -> None:
    """Five completions through three seats: the fourth's first token fails while two others run; all three go."""
    engine = fresh("qwen3", max_rows=3)
    snapshot = engine.create_policy("p").snapshot()
    short = engine.enqueue(snapshot, PROMPT, 1, params(1, 3))
    doomed = engine.enqueue(snapshot, PROMPT, 5, params(2, 30))
    while not short.is_done:
        engine.advance()
    assert {row.request for row in engine._sampler.scheduler.rows} == {doomed}
    assert engine._sampler.scheduler.running_completions == 2
    doomed.stop_strings = (None,)  # pyright: ignore[reportAttributeAccessIssue]
    assert engine.advance() == [doomed]
    assert engine.idle
    assert isinstance(doomed.error, AttributeError)


def test_an_error_in_one_request_fails_it_alone(fresh: Callable[..., Any], tmp_path: Path) -> None:
    """A stop string that cannot be looked for, weights whose logits are nan: the neighbours get their own answers."""
    engine = fresh("qwen3", max_rows=6)
    good, bad = train_adapter(engine, "good", tmp_path), train_adapter(engine, "bad", tmp_path, seed=1)
    with torch.no_grad():
        next(iter(bad.policy.parameters.values())).fill_(torch.nan)
    ask = (engine.snapshot(good.policy), PROMPT, 2, params(1, 20))
    expected = engine.sample(*ask).result()
    for doomed_first in (True, False):
        kept = None if doomed_first else engine.enqueue(*ask)
        nan = engine.enqueue(engine.snapshot(bad.policy), PROMPT, 3, params(2, 20))
        scored = engine.enqueue(engine.snapshot(bad.policy), PROMPT, 3, params(2, 20), prompt_logprobs=True)
        deaf = engine.enqueue(ask[0], PROMPT, 3, params(4, 20, stop=["x"]))
        deaf.stop_strings = (None,)  # pyright: ignore[reportAttributeAccessIssue]
        kept = kept or engine.enqueue(*ask)
        assert {id(r) for r in drain(engine)} == {id(r) for r in (kept, nan, scored, deaf)}
        assert isinstance(nan.error, NonFiniteError)
        assert isinstance(scored.error, NonFiniteError)
        assert isinstance(deaf.error, AttributeError)
        assert texts(kept.response()) == texts(expected)


def test_a_failed_pass_fails_the_running_requests_and_the_engine_goes_on(fresh: Callable[..., Any]) -> None:
    """Out of memory, say: those that ran are named with the error, one that still waited is answered."""
    engine = fresh("qwen3", max_rows=2)
    snapshot = engine.create_policy("p").snapshot()
    expected = texts(engine.sample(snapshot, PROMPT, 1, params(2)).result())
    ran = engine.enqueue(snapshot, PROMPT, 2, params(1))
    waited = engine.enqueue(snapshot, PROMPT, 1, params(2))
    engine.advance()

    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = engine.model.module.base_model.register_forward_pre_hook(failing)
    assert engine.advance() == [ran]
    hook.remove()
    with pytest.raises(RuntimeError, match="out of memory"):
        ran.response()
    assert engine._sampler.cache.shape == (0, 0)
    assert drain(engine) == [waited]
    assert texts(waited.response()) == expected


def test_release_gives_the_cache_back_and_changes_no_answer(fresh: Callable[..., Any]) -> None:
    """All of it when nothing runs; in the middle of answers what they do not fill."""
    engine, other = fresh("qwen3"), fresh("qwen3")
    snapshot, same = engine.create_policy("p").snapshot(), other.create_policy("p").snapshot()
    engine.sample(snapshot, ModelInput([1] * 100), 8, params(0, 20)).result()
    assert engine._sampler.cache.shape[0] == 8
    asked = [engine.enqueue(snapshot, ModelInput(PROMPTS[i]), 2, params(i, 30)) for i in range(2)]
    for _ in range(4):
        engine.advance()
    engine.release()
    assert engine._sampler.cache.shape == (4, len(PROMPTS[0]) + 4)
    drain(engine)
    alone = [other.sample(same, ModelInput(PROMPTS[i]), 2, params(i, 30)) for i in range(2)]
    assert [texts(r.response()) for r in asked] == [texts(f.result()) for f in alone]
    engine.release()
    assert engine._sampler.cache.shape == (0, 0)


@pytest.mark.parametrize("most", [1, 40, 100, 300])
def test_the_cache_holds_no_more_than_it_may(most: int, fresh: Callable[..., Any]) -> None:
    """Rows wait for a place, one may always run; after long rows and many short ones, and no answer changes."""
    engine, other = fresh("qwen3", cache_tokens=most), fresh("qwen3")
    snapshot, same = engine.create_policy("p").snapshot(), other.create_policy("p").snapshot()
    asked = [(ModelInput(PROMPTS[i % 5]), 1 + i % 4, params(i, 2 + 7 * (i % 5))) for i in range(12)]
    requests = [engine.enqueue(snapshot, *a) for a in asked]
    rows_at_once: set[int] = set()
    while not engine.idle:
        engine.advance()
        rows, length = engine._sampler.cache.shape
        running = engine._sampler.scheduler.rows
        rows_at_once.add(seats := engine._sampler.scheduler.running_completions)
        assert rows * length <= most or seats <= 1
        assert seats * max((r.length for r in running), default=0) <= most or seats <= 1
    # 40: four rows of 10 at the end; 100: 100 // 24 once the first of 24 is there; 300: 12 of 25 would, 33 stops at 9.
    assert max(rows_at_once) == {1: 1, 40: 4, 100: 4, 300: 10}[most]
    futures = [other.sample(same, *a) for a in asked]
    assert [texts(r.response()) for r in requests] == [texts(f.result()) for f in futures]


def test_prompts_kept_for_several_rows_count_as_places_of_the_cache(fresh: Callable[..., Any]) -> None:
    """Beside rows that share nothing, after most of their rows are gone, and where there is just enough room."""
    most = 8 * (48 + 12)
    engine, other = fresh("qwen3", cache_tokens=most), fresh("qwen3")
    snapshot, same = engine.create_policy("p").snapshot(), other.create_policy("p").snapshot()
    prompts = [[(7 * i + j) % 16 for j in range(48 - 3 * i)] for i in range(4)]
    asked = [(ModelInput(prompts[i]), n, params(i, 12 - 4 * (i % 3))) for i, n in enumerate((8, 1, 9, 6))]
    requests = [engine.enqueue(snapshot, *a) for a in asked]
    shared = set[int]()
    while not engine.idle:
        engine.advance()
        cache = engine._sampler.cache
        rows, length = cache.shape
        shared.add(len(cache.shared))
        assert rows * length + cache.shared_tokens <= most or len(cache.slots) <= 1
        assert rows >= engine._sampler.scheduler.running_completions, "who parts finds room"
    assert 1 in shared, "where there is room, prompts are kept for their rows"
    futures = [other.sample(same, *a) for a in asked]
    assert [texts(r.response()) for r in requests] == [texts(f.result()) for f in futures]


@pytest.mark.parametrize("most", [400, 450, 500, 800])
def test_earlier_requests_do_not_change_a_bit(most: int, fresh: Callable[..., Any]) -> None:
    """Buffers that grew by other requests, or were given back, decide nothing."""
    found: list[Any] = []
    for before in ("nothing", "long rows", "long rows, given back"):
        engine = fresh("qwen3", cache_tokens=most)
        snapshot = engine.create_policy("p").snapshot()
        if before != "nothing":
            engine.enqueue(snapshot, PROMPT, 4, params(1, 97))
            drain(engine)
        if "given back" in before:
            engine.release()
        request = engine.enqueue(snapshot, ModelInput([t % 15 for t in range(40)]), 5, params(2, 20, temperature=0.7))
        while not engine.idle:
            engine.advance()
            cache = engine._sampler.cache
            assert cache.shape[0] * cache.shape[1] + cache.shared_tokens <= most
        found.append(request.response().sequences)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("limits", [{}, {"logit_elements": 40, "max_rows": 2}])
def test_prompt_log_probs_and_likeliest_tokens_are_those_of_a_plain_pass(
    kind: str, limits: dict[str, int], fresh: Callable[..., Any]
) -> None:
    """At temperature 1 whatever the request's; beside requests that want none; in chunks of the vocabulary too."""
    engine = fresh(kind, **limits)
    snapshot = engine.create_policy("p").snapshot()
    prompt = PROMPTS[2]
    wanting = engine.enqueue(
        snapshot, ModelInput(prompt), 3, params(1, 4, temperature=0.5), prompt_logprobs=True, topk_prompt=3
    )
    only_top = engine.enqueue(snapshot, ModelInput([5]), 1, params(2, 4), topk_prompt=17)
    plain = engine.enqueue(snapshot, ModelInput([4, 5]), 1, params(3, 4))
    drain(engine)
    with torch.no_grad():
        table = engine.model.module(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
    response = wanting.response()
    assert response.prompt_logprobs[0] is None
    assert response.topk_prompt_logprobs[0] is None
    assert response.prompt_logprobs[1:] == close_logprobs(plain_logprobs(engine.model.module, prompt[:1], prompt[1:]))
    for at, found in enumerate(response.topk_prompt_logprobs[1:]):
        values, ids = table[at].topk(3)
        assert [token for token, _ in found] == ids.tolist()
        assert [logprob for _, logprob in found] == close_logprobs(values.tolist())
    assert len(response.topk_prompt_logprobs) == len(prompt)
    assert (only_top.response().prompt_logprobs, only_top.response().topk_prompt_logprobs) == (None, [None])
    assert (plain.response().prompt_logprobs, plain.response().topk_prompt_logprobs) == (None, None)


@pytest.mark.parametrize("limits", [{}, {"logit_elements": 40}])
def test_chosen_tokens_are_scored_in_places_of_a_prompt(limits: dict[str, int], fresh: Callable[..., Any]) -> None:
    """At temperature 1; several in one place, in any order; the token that the prompt has there is not read."""
    engine = fresh("qwen3", **limits)
    snapshot = engine.create_policy("p").snapshot()
    prompt = PROMPTS[2]
    places, tokens = np.array([7, 3, 7, 1]), np.array([16, 0, 2, 6])
    request = engine.enqueue(
        snapshot, ModelInput(prompt), 2, params(1, 4, temperature=0.5), prompt_targets=PromptTargets(places, tokens)
    )
    beside = engine.enqueue(snapshot, ModelInput([4, 5]), 1, params(3, 4))
    drain(engine)
    expected = [
        plain_logprobs(engine.model.module, prompt[:p], [t])[0] for p, t in zip(places, tokens.tolist(), strict=True)
    ]
    assert request.response().prompt_target_logprobs == close_logprobs(expected)
    assert request.response().prompt_logprobs is None and beside.response().prompt_target_logprobs is None
    for place, token, said in (
        (0, 1, "position 0, outside 1..7"),
        (8, 1, "position 8"),
        (1, 17, "token 17"),
        (1, -2, "-2"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong = PromptTargets(np.array([place]), np.array([token]))
            engine.enqueue(snapshot, ModelInput(prompt), 1, params(), prompt_targets=wrong)
    assert engine.idle


@pytest.mark.parametrize("limits", [{}, {"logit_elements": 40}])
def test_the_last_tokens_of_a_prompt_are_scored_alone(limits: dict[str, int], fresh: Callable[..., Any]) -> None:
    """With the likeliest ones there; those before have none."""
    engine = fresh("qwen3", **limits)
    snapshot = engine.create_policy("p").snapshot()
    prompt = PROMPTS[2]
    whole = engine.enqueue(snapshot, ModelInput(prompt), 1, params(), prompt_logprobs=True, topk_prompt=3)
    for last in (1, 3, len(prompt) - 1):
        part = engine.enqueue(
            snapshot, ModelInput(prompt), 1, params(), prompt_logprobs=True, topk_prompt=3, prompt_last=last
        )
        drain(engine)
        found, expected, first = part.response(), whole.response(), len(prompt) - last
        assert found.prompt_logprobs[:first] == found.topk_prompt_logprobs[:first] == [None] * first
        assert found.prompt_logprobs[first:] == close_logprobs(expected.prompt_logprobs[first:])
        assert [[token for token, _ in row] for row in found.topk_prompt_logprobs[first:]] == [
            [token for token, _ in row] for row in expected.topk_prompt_logprobs[first:]
        ]
    for wrong in (0, -1, len(prompt)):
        with pytest.raises(ValueError, match=f"last_n={wrong}, expected 1 to {len(prompt) - 1}"):
            engine.enqueue(snapshot, ModelInput(prompt), 1, params(), prompt_logprobs=True, prompt_last=wrong)


@pytest.mark.parametrize("limits", [{}, {"logit_elements": 40}])
def test_alternatives_are_drawn_from_the_distribution_of_each_place(
    limits: dict[str, int], fresh: Callable[..., Any]
) -> None:
    """At the temperature, by the seed, with replacement; their log-probs at temperature 1."""
    engine = fresh("qwen3", **limits)
    snapshot = engine.create_policy("p").snapshot()
    prompt, count = PROMPTS[2][:4], 20_000

    def draw(count: int, temperature: float, seed: int = 1) -> Any:
        how = params(seed, 4, temperature=temperature)
        request = engine.enqueue(snapshot, ModelInput(prompt), 1, how, prompt_alternatives=count)
        drain(engine)
        return request.response().prompt_alternatives

    found = draw(count, temperature=0.5)
    assert found.tokens_PK.shape == found.logprobs_PK.shape == (len(prompt) - 1, count)
    for place in range(1, len(prompt)):
        every = [plain_logprobs(engine.model.module, prompt[:place], [t])[0] for t in range(engine.model.vocabulary)]
        chances = np.exp(np.array(every) / 0.5)
        chances /= chances.sum()
        counts = np.bincount(found.tokens_PK[place - 1], minlength=len(chances))
        # Each count is within five standard deviations of a binomial one.
        assert (np.abs(counts - count * chances) < 5 * np.sqrt(count * chances * (1 - chances)) + 1).all()
        assert found.logprobs_PK[place - 1, :9] == pytest.approx(
            np.array(every)[found.tokens_PK[place - 1, :9]], abs=1e-5
        )
    fewer = draw(7, temperature=0.5)
    assert (fewer.tokens_PK == found.tokens_PK[:, :7]).all()
    assert not (draw(50, temperature=0.5, seed=5).tokens_PK == found.tokens_PK[:, :50]).all()
    greedy = draw(3, temperature=0.0)
    assert (greedy.tokens_PK == greedy.tokens_PK[:, :1]).all()
    request = engine.enqueue(snapshot, ModelInput(prompt[:1]), 1, params(), prompt_alternatives=2)
    drain(engine)
    assert request.response().prompt_alternatives.tokens_PK.shape == (0, 2)
    with pytest.raises(ValueError, match="prompt_alt_tokens_k=-1, expected at least 0"):
        engine.enqueue(snapshot, ModelInput(prompt), 1, params(), prompt_alternatives=-1)


@pytest.mark.parametrize("temperature", [0.5, 0.0])
def test_likeliest_tokens_of_sampled_positions_hold_the_sampled_one(
    temperature: float, fresh: Callable[..., Any]
) -> None:
    """At the request's temperature, before its filters; all 17 sum to one and agree with the token's own log-prob."""
    engine = fresh("qwen3")
    snapshot = engine.create_policy("p").snapshot()
    every = engine.enqueue(snapshot, PROMPT, 2, params(1, 6, temperature=temperature, top_k=2), topk_sample=17)
    two = engine.enqueue(snapshot, PROMPT, 2, params(1, 6, temperature=temperature, top_k=2), topk_sample=2)
    drain(engine)
    for whole, first in zip(every.response().sequences, two.response().sequences, strict=True):
        assert whole.tokens == first.tokens
        assert len(whole.topk_logprobs) == len(whole.tokens) == 6
        for token, logprob, likeliest in zip(whole.tokens, whole.logprobs, whole.topk_logprobs, strict=True):
            assert dict(likeliest)[token] == logprob
            assert torch.tensor([p for _, p in likeliest]).exp().sum() == pytest.approx(1, abs=1e-5)
        assert [likeliest[:2] for likeliest in whole.topk_logprobs] == [
            [(token, pytest.approx(logprob)) for token, logprob in likeliest] for likeliest in first.topk_logprobs
        ]
    assert engine.sample(snapshot, PROMPT, 1, params(1)).result().sequences[0].topk_logprobs is None


def test_more_likeliest_tokens_than_there_are_is_refused(fresh: Callable[..., Any]) -> None:
    engine = fresh("qwen3")
    snapshot = engine.base_snapshot()
    for wrong in ({"topk_sample": 18}, {"topk_prompt": -1}):
        with pytest.raises(ValueError, match=r"topk_(sample|prompt)_logprobs=(18|-1), expected 0 \(off\) to 17"):
            engine.enqueue(snapshot, PROMPT, 1, params(), **wrong)
    assert engine.idle
