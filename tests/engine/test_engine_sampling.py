"""Sampling on tiny real models: the cache against plain passes, independence from company, stops, limits, errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlvr.core import rng
from rlvr.core.messages import Datum, ModelInput, SampledSequence, TensorData
from rlvr.core.types import StopReason
from tests.kit.devices import ON_DEVICES, WITH_A_GPU
from tests.kit.rounding import close_logprobs
from tests.kit.tiny import END_ID, PROMPTS, params, plain_logprobs, texts

KINDS = ["qwen3", "llama", "gpt2", "mistral", "gemma2"]


@ON_DEVICES
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_log_probs_are_those_of_a_plain_pass_and_of_the_trainer(kind: str, client: Callable[..., Any]) -> None:
    """Cached decoding of five prompts of different lengths, at T = 0.7, within 1e-4 in fp32: sampler = trainer."""
    trainer = client(kind)
    sampler = trainer.create_sampling_client()
    futures = [sampler.sample(ModelInput(p), 3, params(i, temperature=0.7)) for i, p in enumerate(PROMPTS)]
    for prompt, future in zip(PROMPTS, futures, strict=True):
        for sequence in future.result().sequences:
            assert len(sequence.tokens) == 12
            plain = plain_logprobs(trainer._engine.model.module, prompt, sequence.tokens, 0.7)
            assert sequence.logprobs == close_logprobs(plain)
            datum = Datum.from_completion(prompt, sequence.tokens)
            scored = trainer.forward([datum], "cross_entropy", {"temperature": 0.7}).result()
            learned = scored.loss_fn_outputs[0]["logprobs"].tolist()[len(prompt) - 1 :]
            assert sequence.logprobs == close_logprobs(learned)


@WITH_A_GPU
def test_long_answers_outgrow_the_first_cache(client: Callable[..., Any]) -> None:
    """200 tokens after a prompt of two: the cache grows on the way and stays right to the end."""
    trainer = client("qwen3")
    response = trainer.create_sampling_client().sample(ModelInput([1, 2]), 2, params(tokens=200)).result()
    for sequence in response.sequences:
        assert (len(sequence.tokens), sequence.stop_reason) == (200, StopReason.LENGTH)
        plain = plain_logprobs(trainer._engine.model.module, [1, 2], sequence.tokens)
        assert sequence.logprobs == close_logprobs(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_order_company_or_room(kind: str, fresh: Callable[..., Any]) -> None:
    """The same draws whether requests run alone, in another order, or one, three or all rows at a time."""

    def sample_in_order(order: list[int], **limits: int) -> dict[int, list[list[int]]]:
        engine = fresh(kind, **limits)
        snapshot = engine.create_policy("p").snapshot()
        futures = {i: engine.sample(snapshot, ModelInput(PROMPTS[i]), 2, params(i, stop=None)) for i in order}
        return {i: texts(f.result()) for i, f in futures.items()}

    together = sample_in_order([0, 1, 2, 3, 4])
    assert len({len(t) for ts in together.values() for t in ts}) > 2, "rows must end at different times to test this"
    assert sample_in_order([4, 2, 0, 3, 1]) == together
    assert sample_in_order([0, 1, 2, 3, 4], max_rows=1) == together
    assert sample_in_order([3, 1, 4, 0, 2], max_rows=3) == together
    assert sample_in_order([0, 1, 2, 3, 4], max_rows=512, micro_tokens=1) == together
    assert {i: sample_in_order([i])[i] for i in range(5)} == together


@pytest.mark.parametrize("neighbours", [1, 7, 31])
def test_company_changes_log_probs_by_rounding_alone(neighbours: int, fresh: Callable[..., Any]) -> None:
    """Within the bound that docs/tinker/server.md states. The same company again is equal to the bit."""
    engine = fresh("qwen3")
    snapshot = engine.create_policy("p").snapshot()

    def sample(company: int) -> SampledSequence:
        asked = engine.sample(snapshot, ModelInput(PROMPTS[2]), 1, params(5, tokens=24))
        others = [
            engine.sample(snapshot, ModelInput(PROMPTS[i % 5]), 1 + i % 2, params(i, tokens=4 + i % 9))
            for i in range(company)
        ]
        [found] = asked.result().sequences
        assert all(other.result() for other in others)
        return found

    alone, beside = sample(0), sample(neighbours)
    assert beside.tokens == alone.tokens and beside.logprobs == close_logprobs(alone.logprobs or [])
    assert sample(neighbours) == beside and sample(0) == alone


def test_a_late_request_joins_the_running_ones(fresh: Callable[..., Any]) -> None:
    """Continuous batching: running and new rows share steps, and no row's tokens change."""
    engine = fresh("qwen3")
    snapshot = engine.create_policy("p").snapshot()
    long = engine.sample(snapshot, ModelInput(PROMPTS[0]), 2, params(0, tokens=30))
    for _ in range(5):
        assert engine.advance() == []
    short = engine.sample(snapshot, ModelInput(PROMPTS[2]), 2, params(1, tokens=4))
    assert not engine._sampler.scheduler.rows[0].request.is_done
    joined = texts(short.result())
    assert 5 < len(engine._sampler.scheduler.rows[0].tokens) < 30  # the long one went on beside it
    other = fresh("qwen3")
    alone = other.create_policy("p").snapshot()
    assert texts(long.result()) == texts(other.sample(alone, ModelInput(PROMPTS[0]), 2, params(0, tokens=30)).result())
    assert joined == texts(other.sample(alone, ModelInput(PROMPTS[2]), 2, params(1, tokens=4)).result())


def test_completions_of_one_prompt_are_distinct_draws_numbered_from_zero(client: Callable[..., Any]) -> None:
    """Eight answers differ; the first three are the same when only three are asked for; another seed, other answers."""
    sampler = client("qwen3").create_sampling_client()
    eight = texts(sampler.sample(ModelInput([1, 2]), 8, params(7)).result())
    assert len({tuple(t) for t in eight}) == 8
    assert texts(sampler.sample(ModelInput([1, 2]), 3, params(7)).result()) == eight[:3]
    assert texts(sampler.sample(ModelInput([1, 2]), 3, params(8)).result()) != eight[:3]


@WITH_A_GPU
def test_a_token_is_the_counted_draw_of_its_position(client: Callable[..., Any]) -> None:
    """Token t of sample i is where uniform(key("sample", seed, i), t) falls in the model's own distribution."""
    trainer = client("llama")
    module = trainer._engine.model.module
    sequence = trainer.create_sampling_client().sample(ModelInput([1, 2]), 2, params(9)).result().sequences[1]
    row = [1, 2]
    for t, token in enumerate(sequence.tokens):
        with torch.no_grad():
            probs = module(input_ids=torch.tensor([row], device=module.device)).logits[0, -1].double().softmax(-1)
        target = rng.uniform(rng.key("sample", 9, 1), t)
        assert token == int((probs.cumsum(-1) > target).nonzero()[0])
        row.append(token)


def test_without_a_seed_every_call_draws_anew(client: Callable[..., Any]) -> None:
    """Two calls, and two clients of the same weights, give different answers; the params themselves stay seedless."""
    trainer = client("qwen3")
    unseeded = replace(params(), seed=None)
    one, other = trainer.create_sampling_client(), trainer.create_sampling_client()
    answers = [texts(c.sample(ModelInput([1, 2]), 1, unseeded).result())[0] for c in (one, one, other)]
    assert len({tuple(a) for a in answers}) == 3
    assert unseeded.seed is None


def test_more_samples_than_rows(client: Callable[..., Any]) -> None:
    """Ten completions through three seats: all arrive, in order, equal to those of a wide engine."""
    narrow, wide = client("gpt2", max_rows=3), client("gpt2", name="wide")
    asked = (ModelInput([1, 2, 3]), 10, params(1, stop=None))
    got = narrow.create_sampling_client().sample(*asked).result()
    assert len(got.sequences) == 10
    assert texts(got) == texts(wide.create_sampling_client().sample(*asked).result())
    assert narrow._engine._sampler.cache.shape[0] <= 3


@ON_DEVICES
def test_greedy_and_filtered_rows_share_a_batch_with_plain_ones(client: Callable[..., Any]) -> None:
    """Each row obeys its own params: temperature 0 takes the best token; top_k 1 equals it; the third is untouched."""
    trainer = client("qwen3")
    sampler = trainer.create_sampling_client()
    alone = texts(sampler.sample(ModelInput([1, 2]), 1, params(5)).result())
    futures = [
        sampler.sample(ModelInput([1, 2]), 1, params(5, **how)) for how in ({"temperature": 0.0}, {"top_k": 1}, {})
    ]
    greedy, best, plain = (texts(f.result()) for f in futures)
    assert greedy == best != plain == alone
    module, row = trainer._engine.model.module, [1, 2]
    for token in greedy[0]:
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([row], device=module.device)).logits
        assert token == int(logits[0, -1].argmax())
        row.append(token)


# Stops


def reference(sampler: Any, seed: int, tokens: int = 40) -> list[int]:
    return texts(sampler.sample(ModelInput([1, 2]), 1, params(seed, tokens)).result())[0]


def test_the_end_token_stops_by_default_and_an_empty_list_never(client: Callable[..., Any]) -> None:
    """stop None ends with the end token, kept with its log-prob; stop [] runs on through it to the budget."""
    sampler = client("qwen3").create_sampling_client()
    seed = next(s for s in range(50) if END_ID in reference(sampler, s)[:-1])
    whole = reference(sampler, seed)
    sequence = sampler.sample(ModelInput([1, 2]), 1, params(seed, 40, stop=None)).result().sequences[0]
    assert sequence.tokens == whole[: whole.index(END_ID) + 1]
    assert len(sequence.logprobs) == len(sequence.tokens)
    assert sequence.stop_reason is StopReason.STOP
    assert len(whole) == 40


def test_stop_tokens_and_stop_strings_end_an_answer(client: Callable[..., Any], tokenizer: Any) -> None:
    """A token id, a string, and a string that spans tokens; the end token then does not stop."""
    sampler = client("qwen3").create_sampling_client()
    whole = reference(sampler, 1)
    third = whole[2]
    by_id = sampler.sample(ModelInput([1, 2]), 1, params(1, 40, stop=[third])).result().sequences[0]
    assert by_id.tokens == whole[: whole.index(third) + 1]
    assert by_id.stop_reason is StopReason.STOP
    spanning = tokenizer.decode(whole[3:6])
    assert len(spanning.split()) == 3
    for stop in (spanning, [spanning], ["never said", spanning]):
        by_text = sampler.sample(ModelInput([1, 2]), 1, params(1, 40, stop=stop)).result().sequences[0]
        text = tokenizer.decode(by_text.tokens)
        assert spanning in text
        assert spanning not in tokenizer.decode(by_text.tokens[:-1])
        assert by_text.tokens == whole[: len(by_text.tokens)]
        assert by_text.stop_reason is StopReason.STOP


def test_budget_and_context_end_an_answer_with_length(client: Callable[..., Any]) -> None:
    """max_tokens, or the context (256) minus the prompt where that is less or nothing was said."""
    sampler = client("gpt2").create_sampling_client()

    def length(prompt: int, tokens: int | None) -> int:
        asked = replace(params(1), max_tokens=tokens)
        sequence = sampler.sample(ModelInput([1] * prompt), 1, asked).result().sequences[0]
        assert sequence.stop_reason is StopReason.LENGTH
        return len(sequence.tokens)

    assert length(3, 1) == 1
    assert length(3, 5) == 5
    assert length(250, 100) == 6
    assert length(250, None) == 6
    assert length(255, None) == 1


@pytest.mark.parametrize(
    ("prompt", "count", "stop", "message"),
    [
        ([], 1, [], "prompt is empty"),
        ([1] * 256, 1, [], "256 tokens and the model's context is 256"),
        ([1, 17], 1, [], "token 17, outside 0..16"),
        ([-1, 3], 1, [], "token -1, outside 0..16"),
        ([1], 0, [], "num_samples=0"),
        ([1], 1, "", "empty stop string"),
        ([1], 1, [3, None], "stop holds None, expected strings or token ids"),
    ],
)
def test_bad_requests_are_refused_at_once(
    prompt: list[int], count: int, stop: Any, message: str, client: Callable[..., Any]
) -> None:
    """When asked, not when the result is read; and nothing stays in the queue."""
    trainer = client("qwen3")
    with pytest.raises(ValueError, match=message):
        trainer.create_sampling_client().sample(ModelInput(prompt), count, params(stop=stop))
    assert not trainer._engine._sampler.scheduler.waiting


@ON_DEVICES
def test_prompt_log_probs_start_with_none_and_are_those_of_a_plain_pass(client: Callable[..., Any]) -> None:
    """compute_logprobs and include_prompt_logprobs agree; one token has none."""
    trainer = client("llama")
    sampler = trainer.create_sampling_client()
    prompt = [1, 2, 3, 4, 5]
    got = sampler.compute_logprobs(ModelInput(prompt)).result()
    assert got[0] is None
    assert got[1:] == close_logprobs(plain_logprobs(trainer._engine.model.module, [1], prompt[1:]))
    response = sampler.sample(ModelInput(prompt), 1, params(), include_prompt_logprobs=True).result()
    assert response.prompt_logprobs[0] is None
    assert response.prompt_logprobs[1:] == close_logprobs(got[1:])
    assert sampler.sample(ModelInput(prompt), 1, params()).result().prompt_logprobs is None
    assert sampler.compute_logprobs(ModelInput([3])).result() == [None]


# Futures, threads, failures


def test_results_can_be_read_twice_and_awaited(client: Callable[..., Any]) -> None:
    """result(), result() again, and await give the same object."""
    future = client("qwen3").create_sampling_client().sample(ModelInput([1]), 1, params())

    async def await_result() -> Any:
        return await future

    assert future.result() is future.result() is asyncio.run(await_result())


def test_many_threads_and_coroutines_get_their_own_answers(client: Callable[..., Any]) -> None:
    """Eight callers at once, each with its seed: what each gets is what it gets alone."""
    sampler = client("qwen3", max_rows=4).create_sampling_client()
    alone = [texts(sampler.sample(ModelInput([1, 2]), 2, params(i, stop=None)).result()) for i in range(8)]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = texts(sampler.sample(ModelInput([1, 2]), 2, params(i, stop=None)).result())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(8)] == alone

    async def all_at_once() -> list[Any]:
        futures = [sampler.sample(ModelInput([1, 2]), 2, params(i, stop=None)) for i in range(8)]
        return [texts(r) for r in await asyncio.gather(*futures)]

    assert asyncio.run(all_at_once()) == alone


def test_two_threads_may_read_one_future(client: Callable[..., Any]) -> None:
    """Both get the same response; it is computed once."""
    future = client("qwen3").create_sampling_client().sample(ModelInput([1]), 2, params())
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(future.result())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert found[0] is found[1]


@pytest.mark.parametrize("calls", [0, 1, 4], ids=["in the prompt pass", "in the first step", "later"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failed_batch_fails_its_requests_and_no_others(
    calls: int, error: BaseException, client: Callable[..., Any]
) -> None:
    """An error (or Ctrl-C) in the model ends what ran with it, at once and each time it is read; then all is well."""
    trainer = client("qwen3")
    sampler = trainer.create_sampling_client()
    expected = texts(sampler.sample(ModelInput([1, 2]), 2, params(1)).result())
    passes = iter(range(100))

    def failing(*_: Any) -> None:
        if next(passes) == calls:
            raise error

    hook = trainer._engine.model.module.register_forward_pre_hook(failing)
    base = trainer._engine.model.module.base_model.register_forward_pre_hook(failing)
    doomed = [sampler.sample(ModelInput([1, 2]), 2, params(i)) for i in range(2)]
    try:
        with pytest.raises(type(error)):
            doomed[0].result()
    finally:
        hook.remove()
        base.remove()
    for future in doomed:
        with pytest.raises(RuntimeError, match=r"out of memory|interrupted by KeyboardInterrupt"):
            future.result()
    assert not trainer._engine._sampler.scheduler.rows
    assert texts(sampler.sample(ModelInput([1, 2]), 2, params(1)).result()) == expected


def test_an_unread_request_does_not_disturb_others(client: Callable[..., Any]) -> None:
    """A future that was dropped runs along; the others get what they get without it."""
    sampler = client("qwen3").create_sampling_client()
    alone = texts(sampler.sample(ModelInput([1, 2]), 1, params(1)).result())
    sampler.sample(ModelInput([3]), 5, params(2))
    assert texts(sampler.sample(ModelInput([1, 2]), 1, params(1)).result()) == alone


@ON_DEVICES
def test_bf16_samples_with_log_probs_of_the_bf16_model(fresh: Callable[..., Any], device: str) -> None:
    """In bf16 the cache gives what a plain bf16 pass gives, to bf16's rounding; the log-probs are fp32 numbers."""
    engine = fresh("qwen3", dtype=torch.bfloat16, device=device)
    snapshot = engine.create_policy("p").snapshot()
    sequence = engine.sample(snapshot, ModelInput([1, 2, 3]), 1, params(2)).result().sequences[0]
    plain = plain_logprobs(engine.model.module, [1, 2, 3], sequence.tokens)
    assert sequence.logprobs == pytest.approx(plain, abs=0.1)


def test_scheduler_fills_free_rows_within_its_limits(fresh: Callable[..., Any]) -> None:
    """Admission stops at max_rows and at the padded prompt budget, and splits a request that is too wide."""
    engine = fresh("qwen3", max_rows=4, micro_tokens=6)
    snapshot = engine.create_policy("p").snapshot()
    for prompt, count in (([1, 2], 1), ([3, 4, 5], 2), ([6], 3)):
        engine.sample(snapshot, ModelInput(prompt), count, params())
    first = engine._sampler.scheduler.admit()
    assert [len(row.completions) for row in first] == [1, 2]  # a third prompt would make 3 x 3 padded tokens
    engine._sampler.scheduler.rows.extend(first)
    (last,) = engine._sampler.scheduler.admit()
    assert [completion.index for completion in last.completions] == [0]  # one seat is left
    assert engine._sampler.scheduler.waiting[0].started == 1


def test_tensor_inputs_may_mix_widths_between_rows(client: Callable[..., Any]) -> None:
    """Whole-number advantages in one datum and fractions in another: the same loss as all in float32."""
    trainer = client("qwen3")

    def loss(first: Any) -> float:
        data = [
            Datum(
                ModelInput([1, 2]),
                {"target_tokens": TensorData.of([2, 3]), "logprobs": TensorData.of([0.0, -1.0]), "advantages": a},
            )
            for a in (first, TensorData.of([0.0, 0.5]))
        ]
        return trainer.forward(data, "importance_sampling").result().metrics["loss:sum"]

    assert loss(TensorData.of([0, 1])) == loss(TensorData.of([0.0, 1.0]))
