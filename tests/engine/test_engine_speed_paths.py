"""The sampler's shortcuts: prompts that rows share, weights packed for the processor. Each gives what it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, ModelInput
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.prepacked_linear import JOINED_ROWS, PrepackedLinears
from rlvr.engine.shared_prompts import fused_attention, product_attention
from tests.kit.devices import ON_DEVICES
from tests.kit.rounding import close_logprobs
from tests.kit.tiny import data, params, plain_logprobs, texts

LONG, LONGER = [t % 15 for t in range(40)], [(7 * t + 3) % 15 for t in range(61)]
SHORT = [4, 5]


def drain(engine: Any, requests: list[Any]) -> list[Any]:
    while not engine.idle:
        engine.advance()
    return [request.response() for request in requests]


def rows_of(engine: Any) -> list[Any]:
    return engine._sampler.scheduler.rows


def holds(engine: Any, requests: list[Any]) -> None:
    """Each answer's log-probs are those of a plain pass over prompt and answer."""
    for request, response in zip(requests, drain(engine, requests), strict=True):
        for sequence in response.sequences:
            expected = plain_logprobs(engine.model.module, request.prompt, sequence.tokens)
            assert sequence.logprobs == close_logprobs(expected)


@ON_DEVICES
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_rows_that_share_a_prompt_have_the_log_probs_of_plain_rows(
    kind: str, fresh: Callable[..., Any], device: str
) -> None:
    """Beside rows with prompts of their own, of other lengths, leaving at different times, and newcomers later."""
    engine = fresh(kind, max_rows=13, device=device)
    snapshot = engine.create_policy("p").snapshot()
    asked = [(LONG, 5, 30), (SHORT, 1, 5), (LONGER, 4, 9), (LONG[1:], 3, 20), (LONGER[2:], 6, 12), (SHORT, 2, 30)]
    requests = [
        engine.enqueue(snapshot, ModelInput(prompt), count, params(i, tokens, stop=[3] if i % 2 else []))
        for i, (prompt, count, tokens) in enumerate(asked)
    ]
    engine.advance()
    cache = engine._sampler.cache
    shared = {(len(r.request.prompt), b.shared_tokens) for r, b in zip(rows_of(engine), cache.slots, strict=True)}
    assert shared == {(40, 40), (2, 0), (61, 61), (39, 0)}, "what pays is shared"
    assert cache.shape[1] < len(LONGER) + 64 + 61
    holds(engine, requests)
    assert not cache.shared, "a prompt without rows is given up"


def test_shared_prompts_are_not_copied_to_rows(fresh: Callable[..., Any]) -> None:
    """Sixteen completions of one prompt hold their own tokens only; those left by a cancelled request go on."""
    engine = fresh("qwen3")
    snapshot = engine.create_policy("p").snapshot()
    doomed = engine.enqueue(snapshot, ModelInput(LONGER), 4, params(1, 30))
    kept = engine.enqueue(snapshot, ModelInput(LONG), 16, params(2, 9))
    engine.advance()
    cache = engine._sampler.cache
    assert cache.shape[1] < len(LONG)
    engine.advance()
    engine.cancel(doomed)
    engine.release()
    rows = len(rows_of(engine))
    assert 4 < rows <= 16
    assert cache.shape == (16, 2), "after two tokens, of which one was fed"
    assert len(cache.slots) == rows
    holds(engine, [kept])


def test_a_model_that_shares_no_prompts_gets_them_copied(fresh: Callable[..., Any]) -> None:
    """The exchange of its attention is what the probe found it not to take; the answers stay."""
    plain, shared = fresh("qwen3"), fresh("qwen3")
    plain.model.can_share_prompts = False
    answers = []
    for engine in (plain, shared):
        request = engine.enqueue(engine.create_policy("p").snapshot(), ModelInput(LONG), 6, params(4, 20))
        engine.advance()
        assert bool(engine._sampler.cache.shared) == (engine is shared)
        answers += drain(engine, [request])
    assert texts(answers[0]) == texts(answers[1])


def test_the_same_requests_give_the_same_bits(fresh: Callable[..., Any]) -> None:
    """In a new engine and in the same one again: nothing is left of the first time."""
    first, other = fresh("qwen3"), fresh("qwen3")
    found = []
    for engine, snapshot in ((first, (s := first.create_policy("p").snapshot())), (first, s), (other, None)):
        snapshot = snapshot or other.create_policy("p").snapshot()
        asked = [(LONG, 5, 25), (SHORT, 3, 12), (LONGER, 8, 2)]
        requests = [engine.enqueue(snapshot, ModelInput(p), n, params(n, t)) for p, n, t in asked]
        found.append([response.sequences for response in drain(engine, requests)])
        assert not engine._sampler.prepacked.is_packed, "a copy of the weights is not kept while nothing runs"
    assert found[0] == found[1] == found[2]


def test_adapters_share_a_batch_of_shared_prompts_with_packed_weights(
    fresh: Callable[..., Any], tmp_path: Path
) -> None:
    """Each row has its own adapter's log-probs: those the adapter's trainer computes."""
    engine = fresh("qwen3")
    asked = []
    for i in range(2):
        policy = engine.create_policy(f"p{i}", lora=LoraConfig(4, 8.0), seed=i)
        trainer = LocalTrainingClient(engine, policy, tmp_path / f"p{i}")
        trainer.forward_backward(data(seed=i), "cross_entropy")
        trainer.optim_step(AdamParams(5e-2))
        snapshot = engine.snapshot(policy)
        asked.append((snapshot, engine.enqueue(snapshot, ModelInput(LONG), 4, params(i, 12))))
    engine.advance()
    engine.advance()
    assert engine._sampler.prepacked.is_packed
    drain(engine, [])
    for snapshot, request in asked:
        for sequence in request.response().sequences:
            scored = engine.logprobs(snapshot, ModelInput(LONG + sequence.tokens)).result()[len(LONG) :]
            assert sequence.logprobs == close_logprobs(scored)


def test_weights_that_change_while_rows_run_are_packed_anew(fresh: Callable[..., Any], tmp_path: Path) -> None:
    """An optimizer step between two passes, twice: old rows keep the old weights, new ones get the new, at once."""
    engine = fresh("qwen3")
    policy = engine.create_policy("p")
    trainer = LocalTrainingClient(engine, policy, tmp_path)
    asked = []
    for i in range(3):
        snapshot = engine.snapshot(policy)
        asked.append((snapshot, engine.enqueue(snapshot, ModelInput(LONG), 4, params(i, 16))))
        engine.advance()
        engine.advance()
        assert engine._sampler.prepacked.is_packed
        assert not any("forward" in vars(m) for m in engine.model.module.modules()), "as they were after each pass"
        trainer.forward_backward(data(seed=i), "cross_entropy")
        trainer.optim_step(AdamParams(5e-2))
        if i == 1:
            engine.cancel(asked[0][1])  # then the next to run is of the live weights, as the last was before the step
    drain(engine, [])
    for snapshot, request in asked[1:]:
        for sequence in request.response().sequences:
            scored = engine.logprobs(snapshot, ModelInput(LONG + sequence.tokens)).result()[len(LONG) :]
            assert sequence.logprobs == close_logprobs(scored)


def test_weights_are_packed_only_where_enough_is_ahead(fresh: Callable[..., Any]) -> None:
    """Not for a few tokens; for many steps or many rows, where the processor's kernels are there to be used."""
    engine = fresh("qwen3")
    snapshot = engine.create_policy("p").snapshot()
    packed = engine._sampler.prepacked
    assert packed.layers == PrepackedLinears(engine.model).layers
    for count, tokens, expected in ((3, 2, False), (1, 30, True)):
        engine.enqueue(snapshot, ModelInput(SHORT), count, params(1, tokens))
        engine.advance()
        assert packed.is_packed == (expected and bool(packed.layers))
        drain(engine, [])


@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_are_given_the_same_are_one_product(bias: bool, fresh: Callable[..., Any]) -> None:
    """Queries, keys and values, gate and up: together, in any order and alone they give what each gives by itself."""
    model = fresh("qwen3").model
    layer = model.module.base_model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    for one in (attention.q_proj, attention.k_proj, attention.v_proj) if bias else ():
        one.bias = torch.nn.Parameter(torch.randn(one.out_features))
    packed = PrepackedLinears(model)
    if not packed.layers:
        pytest.skip("this build of torch has no packed products")
    together = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    assert all(group in packed.groups for group in together)
    assert sorted(map(id, packed.layers)) == sorted(id(m) for m in model.module.modules() if type(m) is torch.nn.Linear)
    tokens = torch.tensor([LONG])
    with torch.inference_mode():
        plain = model.hidden_states(tokens)
        one, other = torch.randn(3, 1, 32), torch.randn(5, 1, 32)
        asked = [
            (layer, given) for group in together for given in (one, other, one) for layer in (*group, *group[::-1])
        ]
        expected = [layer(given) for layer, given in asked]
        with packed.use("now", steps=100, tokens=0):
            assert packed.is_packed
            torch.testing.assert_close(model.hidden_states(tokens), plain)
            assert not any(product.parts for product in packed._products), "nothing is kept of a pass"
            torch.testing.assert_close([layer(given) for layer, given in asked], expected)
            mlp.gate_proj(one)
            assert any(product.parts for product in packed._products)
        assert not any(product.parts for product in packed._products), "nor of one that did not come to its end"
        many = torch.randn(JOINED_ROWS + 1, 32)
        with packed.use("now", steps=100, tokens=0):
            torch.testing.assert_close(mlp.gate_proj(many), torch.nn.functional.linear(many, mlp.gate_proj.weight))
            assert not any(product.parts for product in packed._products), "many rows gain nothing from one product"
    if bias:
        with torch.no_grad():
            attention.v_proj.bias.add_(1.0)
        with torch.inference_mode(), packed.use("now", steps=100, tokens=0):
            torch.testing.assert_close(attention.v_proj(one), expected[2] + 1)


def test_layers_between_which_their_input_changes_are_no_one_product(fresh: Callable[..., Any]) -> None:
    """Found out by the pass that finds who is given the same."""
    model = fresh("qwen3").model
    mlp = model.module.base_model.layers[0].mlp

    def changes(_module: Any, given: Any, _output: Any) -> None:
        given[0].mul_(2)

    mlp.gate_proj.register_forward_hook(changes)
    assert [mlp.gate_proj] in (groups := PrepackedLinears(model).groups) or not groups


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_rows_beyond_the_batched_product_limit_keep_their_logprobs(
    kind: str, fresh: Callable[..., Any], monkeypatch: Any
) -> None:
    """Attention is by batched products up to a length, by the model's own beyond it, with the same log-probs."""
    used: list[int] = []
    fused: list[int] = []

    def kernel(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Any:
        fused.append(key.shape[2])
        return fused_attention(query, key, *rest)

    def recording_product(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> Any:
        used.append(key.shape[2])
        return product_attention(query, key, *rest, **more)

    monkeypatch.setattr("rlvr.engine.shared_prompts.MAX_KEYS", 12)
    monkeypatch.setattr("rlvr.engine.shared_prompts.product_attention", recording_product)
    monkeypatch.setattr("rlvr.engine.shared_prompts.fused_attention", kernel)
    engine = fresh(kind)
    snapshot = engine.create_policy("p").snapshot()
    used.clear()  # of the probe
    fused.clear()
    asked = [(SHORT, 2, 20), (LONG, 4, 15), (SHORT, 1, 3)]
    holds(engine, [engine.enqueue(snapshot, ModelInput(p), n, params(n, t)) for p, n, t in asked[:1]])
    assert used and max(used) <= 12 and not fused, "rows that share no prompt go on by the model's own attention"
    used.clear()
    holds(engine, [engine.enqueue(snapshot, ModelInput(p), n, params(n, t)) for p, n, t in asked])
    assert used and max(used) <= 12


@ON_DEVICES
@pytest.mark.parametrize("fused_attention", [fused_attention, product_attention])
def test_attention_in_two_parts_is_attention(fused_attention: Callable[..., Any], device: str) -> None:
    """Outputs and logs of sums as written down, with a mask; two parts put together are the whole."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 16).to(device) for length in (4, 9, 9))
    mask = torch.zeros(2, 1, 1, 9, device=device)
    mask[0, ..., 7:] = -torch.inf
    scores = query @ key.transpose(-1, -2) * 0.3 + mask
    out, log_sum = fused_attention(query, key, value, mask, 0.3)
    torch.testing.assert_close(out, scores.softmax(-1) @ value)
    torch.testing.assert_close(log_sum, scores.logsumexp(-1))
    parts = [
        fused_attention(query, key[:, :, s], value[:, :, s], mask[..., s], 0.3) for s in (slice(0, 4), slice(4, 9))
    ]
    share = torch.sigmoid(parts[1][1] - parts[0][1])[..., None]
    torch.testing.assert_close(torch.lerp(parts[0][0], parts[1][0], share), out)
