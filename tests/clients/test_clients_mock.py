"""The table policy: its losses against the engine's, its gradients against differences, sampling, custom losses, files.

Legend: p log-prob of a target, q = `logprobs`, A = `advantages`, d = reference - p.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.algorithms.loss_specs import LOSS_SPECS
from rlvr.clients.mock.mock_client import (
    FORMULAS,
    MockSamplingClient,
    MockTrainingClient,
    ScriptedSamplingClient,
    TablePolicy,
    WordTokenizer,
    kl_terms,
)
from rlvr.core import rng
from rlvr.core.messages import AdamParams, Datum, ModelInput, NonFiniteError, SamplingParams, TensorData
from rlvr.core.types import StopReason
from rlvr.engine.losses import TERMS, kl_penalty
from rlvr.engine.sampling import draw_next_tokens, filter_logprobs

WORDS = ["a", "b", "c", "d", "e"]
SIZE = len(WORDS) + 2


def train_client(folder: Path | None = None, seed: int = 1) -> MockTrainingClient:
    return MockTrainingClient(TablePolicy(WORDS, seed, spread=3.0), folder)


def rows(seed: int = 0, lengths: tuple[int, ...] = (4, 1, 7), **more: Any) -> list[Datum]:
    """Random rows with everything any loss needs; `more` adds inputs as functions of a row's length."""
    rng = np.random.default_rng(seed)
    made: list[Datum] = []
    for n in lengths:
        tokens = rng.integers(2, SIZE, n + 1)
        mask = (np.arange(n) >= n // 3).astype(float)
        arrays: dict[str, Any] = {
            "target_tokens": tokens[1:],
            "logprobs": (-1.5 - rng.random(n)) * mask,
            "advantages": rng.normal(size=n) * mask,
            "weights": rng.random(n) * mask,
            "sequence_ratio_mask": mask,
            **{name: values(n) for name, values in more.items()},
        }
        made.append(Datum(ModelInput(tokens[:-1].tolist()), {k: TensorData.of(v) for k, v in arrays.items()}))
    return made


def assert_refused(mistake: str, run: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(ValueError) as caught:
        run(*arguments, **named)
    assert mistake in str(caught.value)


def test_every_spec_has_a_formula_in_torch_and_in_numpy() -> None:
    assert list(LOSS_SPECS) == list(TERMS) == list(FORMULAS)
    assert MockTrainingClient.capabilities.losses == set(LOSS_SPECS)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(LOSS_SPECS)), st.integers(0, 10**6), st.booleans())
def test_terms_and_slopes_are_those_of_the_engine_by_automatic_differentiation(
    name: str, seed: int, weighted: bool
) -> None:
    """To 1e-12, far off the policy that sampled too, and with dro's own weights."""
    rng = np.random.default_rng(seed)
    n = 12
    row = np.repeat([0, 1, 2], [3, 1, 8])
    inputs = {
        "logprobs": rng.normal(-2, 1, n),
        "advantages": rng.normal(0, 2, n) * rng.integers(0, 2, n),
        "weights": rng.normal(0, 1, n),
        "sequence_ratio_mask": rng.integers(0, 2, n).astype(float),
    }
    if weighted and name == "dro":
        inputs["beta_weights"] = rng.random(n)
    p = inputs["logprobs"] + rng.normal(0, 0.4, n)
    inputs["logprobs"] *= rng.integers(0, 2, n)  # 0 as on a prompt
    config = dict(LOSS_SPECS[name].config)
    if weighted and "dual_clip_threshold" in config:
        config["dual_clip_threshold"] = 1.3
    terms, slopes = FORMULAS[name](p, inputs, config, row)
    p_N = torch.tensor(p, requires_grad=True)
    tensors = {k: torch.tensor(v) for k, v in inputs.items()}
    expected = TERMS[name](p_N, tensors, config, torch.tensor(row))
    (slope,) = torch.autograd.grad(expected.sum(), p_N)
    np.testing.assert_allclose(terms, expected.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(slopes, slope.numpy(), rtol=1e-12, atol=1e-12)


def test_the_divergences_by_hand() -> None:
    """d = ln 2: k1 = -ln 2 (slope 1), k2 = ln(2)^2 / 2 (slope -ln 2), k3 = 2 - 1 - ln 2 (slope 1 - 2)."""
    ln2 = math.log(2.0)
    values = [kl_terms(np.array([-3.0]), np.array([-3.0 + ln2]), k) for k in (1, 2, 3)]
    assert [(v[0][0], v[1][0]) for v in values] == [
        pytest.approx((-ln2, 1.0)),
        pytest.approx((ln2**2 / 2, -ln2)),
        pytest.approx((1.0 - ln2, -1.0)),
    ]


@pytest.mark.parametrize("estimator", [1, 2, 3])
def test_the_divergences_are_the_engines(estimator: int) -> None:
    rng = np.random.default_rng(5)
    p, reference, weights = rng.normal(-2, 1, 9), rng.normal(-2, 1, 9), rng.random(9)
    p_N = torch.tensor(p, requires_grad=True)
    given_ = {"reference_logprobs": torch.tensor(reference), "kl_weights": torch.tensor(weights)}
    expected = kl_penalty(p_N, given_, float(estimator))
    (slope,) = torch.autograd.grad(expected.sum(), p_N)
    k, rise = kl_terms(p, reference, estimator)
    np.testing.assert_allclose(weights * k, expected.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(weights * rise, slope.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kl", [False, True])
def test_the_gradient_is_that_of_the_reported_loss(name: str, temperature: float, kl: bool) -> None:
    """Central differences of `loss:sum` in every logit. (cispo and gspo stop gradients: their value says nothing.)"""
    more: dict[str, Any] = {"kl_weights": np.ones, "reference_logprobs": lambda n: np.full(n, -1.0)} if kl else {}
    config = {"temperature": temperature, **({"kl_estimator": 3.0} if kl else {})}
    client, data = train_client(), rows(**more)
    client.forward_backward(data, name, config)
    gradient = client.policy.gradient
    assert gradient is not None
    logits = client.policy.logits.copy()
    for i in range(SIZE):
        around: list[float] = []
        for step in (1e-5, -1e-5):
            client.policy.logits = logits.copy()
            client.policy.logits[i] += step
            around.append(client.forward(data, name, config).result().metrics["loss:sum"])
        assert (around[0] - around[1]) / 2e-5 == pytest.approx(gradient[i], abs=2e-4)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_splitting_a_batch_changes_no_gradient(name: str) -> None:
    together, apart = train_client(), train_client()
    data = rows()
    together.forward_backward(data, name)
    for datum in data:
        apart.forward_backward([datum], name)
    np.testing.assert_allclose(together.policy.gradient, apart.policy.gradient, rtol=1e-12, atol=1e-12)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_an_optimizer_step_is_torchs_adamw() -> None:
    """Three steps with clipping and weight decay; the unknown word's logit included. `rate` multiplies the rate."""
    client = train_client()
    client.policy.rate = 10.0
    weights = torch.tensor(client.policy.logits.copy(), requires_grad=True)
    optimizer = torch.optim.AdamW([weights], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(3):
        client.forward_backward(rows(seed), "importance_sampling")
        assert client.policy.gradient is not None
        weights.grad = torch.tensor(client.policy.gradient)
        norm = torch.nn.utils.clip_grad_norm_([weights], 0.5)
        optimizer.step()
        stepped = client.optim_step(AdamParams(0.005, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)).result()
        assert stepped.metrics["grad_norm"] == pytest.approx(float(norm))
    np.testing.assert_allclose(client.policy.logits, weights.detach().numpy(), rtol=1e-9)


def test_a_custom_loss_has_the_gradient_of_the_named_one() -> None:
    """importance_sampling written by hand, at another temperature; the metrics tell both losses."""
    fused, custom, data = train_client(), train_client(), rows()
    expected = fused.forward_backward(data, "importance_sampling", {"temperature": 0.6}).result()

    def by_hand(rows_: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        terms = [
            -(torch.exp(p - d.loss_fn_inputs["logprobs"].to_torch()) * d.loss_fn_inputs["advantages"].to_torch()).sum()
            for d, p in zip(rows_, logprobs, strict=True)
        ]
        return torch.stack(terms).sum(), {"mine": 7.0}

    done = custom.forward_backward_custom(data, by_hand, {"temperature": 0.6}).result()
    np.testing.assert_allclose(custom.policy.gradient, fused.policy.gradient, rtol=1e-5, atol=1e-6)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert done.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert set(done.metrics) == {"mine", "loss:sum", "surrogate_loss:sum"}
    np.testing.assert_allclose(done.loss_fn_outputs[2]["logprobs"].data, expected.loss_fn_outputs[2]["logprobs"].data)


def test_a_custom_loss_that_cannot_be_differentiated_is_refused_and_leaves_no_gradient() -> None:
    client, data = train_client(), rows()
    run = client.forward_backward_custom
    assert_refused("does not depend on the log-probs", run, data, lambda d, p: (p[0].detach().sum(), {}))
    assert_refused("returned (a float, a dict), expected (loss, metrics)", run, data, lambda d, p: (1.0, {}))
    assert_refused("returned a Tensor of shape []", run, data, lambda d, p: p[0].sum())
    assert_refused("a Tensor of shape [4]", run, data, lambda d, p: (p[0], {}))
    assert_refused("clip has no effect", run, data, lambda d, p: (p[0].sum(), {}), {"clip": 1.0})
    with pytest.raises(NonFiniteError) as caught:
        run(data, lambda d, p: ((p[1] - p[1]).sqrt().sum() + p[0].sum(), {}))
    assert caught.value.rows == [1]
    assert client.policy.gradient is None


def test_a_loss_that_overflows_names_its_rows_and_keeps_the_gradient() -> None:
    client = train_client()
    client.forward_backward(rows(), "cross_entropy")
    before = client.policy.gradient
    assert before is not None
    bad = rows()
    bad[1].loss_fn_inputs["logprobs"].data[:] = -1e4
    bad[1].loss_fn_inputs["advantages"].data[:] = 1.0
    with pytest.raises(NonFiniteError) as caught:
        client.forward_backward(bad, "dro", {"beta": 1e301})  # beta (p - q)^2 / 2
    assert caught.value.rows == [1]
    assert client.policy.gradient is before


def test_the_mock_refuses_requests_that_the_engine_refuses() -> None:
    run = train_client().forward_backward
    assert_refused("'pppo' is unknown; known: cross_entropy", run, rows(), "pppo")
    assert_refused("data is empty", run, [], "ppo")
    assert_refused(
        "clip has no effect on ppo; known: temperature, clip_low_threshold", run, rows(), "ppo", {"clip": 0.2}
    )
    assert_refused("kl_estimator has no effect on ppo", run, rows(), "ppo", {"kl_estimator": 1.0})
    assert_refused("temperature 0", run, rows(), "ppo", {"temperature": 0.0})
    assert_refused("no exact entropy", run, rows(entropy_weights=np.ones), "ppo")
    assert_refused("lacks 'reference_logprobs'", run, rows(kl_weights=np.ones), "ppo")
    kl: dict[str, Any] = {"kl_weights": np.ones, "reference_logprobs": np.zeros}
    assert_refused("kl_estimator 4", run, rows(**kl), "ppo", {"kl_estimator": 4.0})
    assert_refused(
        "datum 0: advantages has shape [5], expected [4]", run, rows(advantages=lambda n: np.ones(n + 1)), "ppo"
    )
    assert_refused("datum 0: advantages holds nan", run, rows(advantages=lambda n: np.full(n, np.nan)), "ppo")
    assert_refused("holds token 99, outside 0..6", run, rows(target_tokens=lambda n: np.full(n, 99)), "ppo")
    assert_refused("no gradients", train_client().optim_step, AdamParams())


def sample_prompt(n: int = 4, policy: TablePolicy | None = None, **asked: Any):
    client = MockSamplingClient(policy or train_client().policy)
    return client.sample(ModelInput([2, 3]), n, SamplingParams(**{"max_tokens": 20, "seed": 9, **asked})).result()


def test_sampling_draws_what_the_scalar_definition_draws() -> None:
    """Token by token: the first whose running probability exceeds uniform(key, position), until the end token."""
    policy = train_client().policy
    cumulative = np.cumsum(np.exp(policy.logprobs(0.8)))
    for i, sequence in enumerate(sample_prompt(30, policy, temperature=0.8).sequences):
        key, tokens = rng.key("sample", 9, i), list[int]()
        while len(tokens) < 20 and 0 not in tokens:
            target = rng.uniform(key, len(tokens)) * cumulative[-1]
            tokens.append(int(np.searchsorted(cumulative, target, side="right")))
        assert sequence.tokens == tokens
        assert sequence.logprobs == pytest.approx(policy.logprobs(0.8)[tokens].tolist())
        assert sequence.stop_reason is (StopReason.STOP if tokens[-1] == 0 else StopReason.LENGTH)
        assert sequence.end_tokens == int(tokens[-1] == 0)


def test_a_sample_depends_on_its_index_and_not_on_its_company() -> None:
    assert [s.tokens for s in sample_prompt(3).sequences] == [s.tokens for s in sample_prompt(8).sequences][:3]
    assert len({tuple(s.tokens) for s in sample_prompt(8).sequences}) == 8


@pytest.mark.parametrize("asked", [{"top_p": 0.6}, {"top_k": 2}, {"min_p": 0.5}, {"top_p": 0.7, "top_k": 3}])
def test_filters_draw_what_the_engine_draws_and_leave_logprobs_alone(asked: dict[str, Any]) -> None:
    policy = train_client().policy
    table = torch.tensor(policy.logprobs())[None]
    limits = [torch.tensor([asked.get(k, d)]) for k, d in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0))]
    allowed = filter_logprobs(table, *limits)
    assert 1 <= int(torch.isfinite(allowed).sum()) < SIZE - 1
    for i, sequence in enumerate(sample_prompt(6, policy, stop=[], **asked).sequences):
        keys = torch.full((20,), rng.key("sample", 9, i))
        assert sequence.tokens == draw_next_tokens(allowed.expand(20, -1), keys, torch.arange(20)).tolist()
        assert sequence.logprobs == pytest.approx(table[0][sequence.tokens].tolist())


def test_stops_end_an_answer_where_they_are_met() -> None:
    """Ids take the place of the end token, [] means none, strings stay in the text."""
    free = sample_prompt(6, stop=[]).sequences
    assert all(len(s.tokens) == 20 and s.stop_reason is StopReason.LENGTH for s in free)
    tokenizer = train_client().get_tokenizer()
    by_id, by_text = (sample_prompt(6, stop=stop).sequences for stop in ([tokenizer.ids["c"]], ["b c", "d"]))
    for whole, at_id, at_text in zip(free, by_id, by_text, strict=True):
        cut = whole.tokens.index(tokenizer.ids["c"]) + 1 if tokenizer.ids["c"] in whole.tokens else 20
        assert at_id.tokens == whole.tokens[:cut]
        text = tokenizer.decode(at_text.tokens)
        if at_text.stop_reason is StopReason.STOP:
            assert ("b c" in text or "d" in text) and at_text.end_tokens == 0
            assert not any(s in tokenizer.decode(at_text.tokens[:-1]) for s in ("b c", "d"))
        else:
            assert len(at_text.tokens) == 20
    assert any(s.stop_reason is StopReason.STOP for s in by_text)


def test_greedy_takes_the_likeliest_with_its_logprob_at_temperature_one() -> None:
    policy = train_client().policy
    best = int(policy.logits.argmax())
    (sequence,) = sample_prompt(1, policy, temperature=0.0, stop=[]).sequences
    assert sequence.tokens == [best] * 20
    assert sequence.logprobs == pytest.approx([float(policy.logprobs()[best])] * 20)


def test_logprobs_of_a_prompt_at_a_temperature() -> None:
    client = train_client()
    sampler, table = client.create_sampling_client(), client.policy.logprobs(0.5)
    expected = [None, pytest.approx(table[3]), pytest.approx(table[2])]
    assert sampler.compute_logprobs(ModelInput([2, 3, 2]), temperature=0.5).result() == expected
    response = sampler.sample(ModelInput([2, 3, 2]), 1, SamplingParams(max_tokens=1, temperature=0.5), True).result()
    assert response.prompt_logprobs == expected
    assert_refused("holds token 77", sampler.compute_logprobs, ModelInput([2, 77]))


def test_bad_requests_are_refused() -> None:
    sampler = train_client().create_sampling_client()
    assert_refused("the prompt is empty", sampler.sample, ModelInput([]), 1, SamplingParams())
    assert_refused("num_samples=0", sampler.sample, ModelInput([2]), 0, SamplingParams())
    assert_refused("an empty stop string", sampler.sample, ModelInput([2]), 1, SamplingParams(stop=[""]))


def step(client: MockTrainingClient, seed: int) -> None:
    client.forward_backward(rows(seed), "ppo").result()
    client.optim_step(AdamParams(0.1)).result()


def test_a_sampler_keeps_the_weights_it_was_made_with(tmp_path: Path) -> None:
    """Also those of a saved state, while the policy moves on."""
    client = train_client(tmp_path)
    first, saved = client.create_sampling_client(), client.save_state("first").result().path
    told = first.compute_logprobs(ModelInput([2, 3])).result()
    step(client, 1)
    again = client.create_sampling_client(saved)
    assert first.compute_logprobs(ModelInput([2, 3])).result() == told
    assert again.compute_logprobs(ModelInput([2, 3])).result() == told
    assert client.create_sampling_client().compute_logprobs(ModelInput([2, 3])).result() != told
    assert (first.fingerprint, again.fingerprint) == ("table@0", "table@0")
    assert client.policy.version == 1


def test_a_saved_state_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """With the optimizer as if nothing had happened; without it from the same weights, with fresh moments."""
    client = train_client(tmp_path)
    step(client, 1)
    path = client.save_state("one").result().path
    stored = client.policy.sha256()
    step(client, 2)
    other, bare = train_client(seed=5), train_client(seed=5)
    other.load_state_with_optimizer(path).result()
    bare.load_state(path).result()
    assert other.policy.sha256() == bare.policy.sha256() == stored != client.policy.sha256()
    step(other, 2)
    step(bare, 2)
    assert other.policy.sha256() == client.policy.sha256() != bare.policy.sha256()
    assert other.policy.version == bare.policy.version == 2


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    client = train_client(tmp_path)
    assert_refused("without a folder", train_client().save_state, "x")
    assert_refused("checkpoint name", client.save_state, "../x")
    light = client.save_weights_for_sampler("light").result().path
    assert_refused("no optimizer state", client.load_state_with_optimizer, light)
    assert_refused("another vocabulary", MockTrainingClient(TablePolicy(["z"])).load_state, light)
    assert_refused("damaged or missing", client.load_state, str(tmp_path / "nowhere"))
    table = Path(light) / "table.json"
    table.write_text(json.dumps({**json.loads(table.read_text()), "version": 8}))
    assert_refused("checksum", client.load_state, light)
    assert client.policy.version == 0


def test_a_script_is_followed() -> None:
    script = ScriptedSamplingClient(WordTokenizer(WORDS), lambda i: [2] * (i + 1))
    response = script.sample(ModelInput([2]), 3, SamplingParams(max_tokens=2)).result()
    assert [s.tokens for s in response.sequences] == [[2], [2, 2], [2, 2]]
    assert [s.stop_reason for s in response.sequences] == [StopReason.STOP, StopReason.STOP, StopReason.LENGTH]


def test_a_token_that_does_not_count_has_no_divergence_however_unlikely_it_is() -> None:
    """Weight 0 x exp(95) is 0, not nan."""
    client = MockTrainingClient(TablePolicy(["a", "b"]))
    inputs = {
        "target_tokens": [1, 2], "logprobs": [0.0, -1.0], "advantages": [0.0, 1.0], "kl_weights": [0.0, 1.0],
        "reference_logprobs": [900.0, -1.0],
    }  # fmt: skip
    datum = Datum(ModelInput([2, 2]), {name: TensorData.of(np.asarray(v)) for name, v in inputs.items()})
    client.forward_backward([datum], "ppo", {"kl_estimator": 3.0})
    assert client.policy.gradient is not None and np.isfinite(client.policy.gradient).all()
