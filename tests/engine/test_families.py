"""Every family of models in `docs/start/models.md`: the engine's numbers are those of a plain `transformers` pass.

Two groups of four answers, one behind a prompt that is longer than any window and one behind a short one. A number of
ours and of a plain pass over one unpadded row may be `NEAR` apart (nats, or relative for a gradient): they add in other
orders, and kernels differ between processors. A wrong mask, a missing scale or a row that sees another one is off by
more than a thousand times that. `RLVR_GOLDEN=write python -m pytest tests/engine/test_families.py` writes the table.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, Datum, ModelInput, TensorData
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from tests.kit.doc_pages import load_gen
from tests.kit.families import FAMILIES, GOLDEN, build, describe, read_golden
from tests.kit.tiny import END_ID, params, plain_logprobs
from tests.kit.trl_losses import difference, gradients_of

NEAR = 1e-4
LORA = LoraConfig(4, 8.0)
PLAIN = EngineLimits(tree=False, pack=False)
PROMPTS = [[(7 * i + i // 5) % 15 for i in range(40)], [4, 9, 2]]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}

families = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (not f.quick)) for n, f in FAMILIES.items()]
)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Callable[[str], Any]:
    """A copy of a family's model, which is built and probed once."""
    built: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in built:
            built[name] = build(name, tokenizer)
        return copy.deepcopy(built[name])

    return get


def answers() -> list[tuple[list[int], list[int]]]:
    """Two groups of (prompt, answer), without a sampler: answers that are equal, that begin alike, and short ones."""
    rng = np.random.default_rng(3)
    tails = [rng.integers(0, END_ID, n).tolist() for n in (12, 7, 12, 1)]
    tails.append([*tails[0][:5], *tails[1]])
    return [(prompt, tail) for prompt in PROMPTS for tail in tails]


def rows(old: list[list[float]]) -> list[Datum]:
    """The answers as rows of a clipped policy gradient, with the log-probs of the policy that sampled them."""
    advantages = np.random.default_rng(4).normal(size=len(old))
    made: list[Datum] = []
    for (prompt, answer), logprobs, advantage in zip(answers(), old, advantages, strict=True):
        before = np.zeros(len(prompt) - 1)
        inputs = {
            "target_tokens": TensorData.of([*prompt[1:], *answer]),
            "logprobs": TensorData.of(np.concatenate([before, logprobs])),
            "advantages": TensorData.of(np.concatenate([before, np.full(len(answer), advantage)])),
        }
        made.append(Datum(ModelInput([*prompt, *answer][:-1]), inputs))
    return made


def padded_loss(module: Any, data: list[Datum]) -> torch.Tensor:
    """The clipped loss of `rows`, by one pass of the model over a batch padded on the right, with its mask."""
    longest = max(d.model_input.length for d in data)

    def stack(values: Callable[[Datum], Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*values(d), *[0] * (longest - d.model_input.length)] for d in data], dtype=dtype)

    def read(key: str) -> Callable[[Datum], Any]:
        return lambda d: d.loss_fn_inputs[key].data

    tokens_BT = stack(lambda d: d.model_input.tokens, torch.long)
    mask_BT = stack(lambda d: [1] * d.model_input.length, torch.long)
    logits_BTV = module(input_ids=tokens_BT, attention_mask=mask_BT, use_cache=False).logits
    now_BT = logits_BTV.log_softmax(-1).gather(-1, stack(read("target_tokens"), torch.long)[..., None])[..., 0]
    old_BT, advantages_BT = (stack(read(k), torch.float32) for k in ("logprobs", "advantages"))
    ratio_BT = torch.exp(now_BT - old_BT)
    terms_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(0.8, 1.28) * advantages_BT)
    return -torch.where(advantages_BT != 0, terms_BT, 0).sum()


def old_logprobs(module: Any) -> list[list[float]]:
    """Log-probs of a policy near the model: some ratios lie beyond the bounds."""
    rng = np.random.default_rng(5)
    return [(np.array(plain_logprobs(module, p, a)) + rng.normal(size=len(a)) * 0.3).tolist() for p, a in answers()]


def make_client(model: Any, folder: Path, limits: EngineLimits = EngineLimits(), lora: Any = None) -> Any:
    engine = Engine(model, limits)
    return LocalTrainingClient(engine, engine.create_policy("policy", lora=lora), folder)


def move_adapter(client: Any, seed: int = 2) -> None:
    """B starts at zero, where A has no gradient and the adapter no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in client.policy.parameters.values():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)


def gradient(client: Any, data: list[Datum]) -> dict[str, torch.Tensor]:
    client.forward_backward(data, "ppo", CLIP).result()
    return {k: p.grad.clone() for k, p in client.policy.masters.items() if p.grad is not None}


def assert_same_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights that no row uses have no gradient in one and zeros in the other."""
    used = {name: g for name, g in expected.items() if float(g.abs().max()) > 0}
    unused = [name for name in found.keys() - used.keys() if float(found[name].abs().max()) > 0]
    assert not unused and len(used) > 3
    whole, _ = difference({name: found[name] for name in used}, used)
    largest = max(float(g.norm()) for g in used.values())
    assert whole <= NEAR
    for name, expected_g in used.items():
        apart = float((found[name] - expected_g).norm())
        assert apart <= NEAR * max(float(expected_g.norm()), 1e-3 * largest), name


@families
def test_sampler_and_learner_give_the_log_probs_of_a_plain_pass(name: str, model: Callable[[str], Any]) -> None:
    """Groups that share a prompt, sampled beside each other; then the same tokens as rows of training, both ways."""
    engine = Engine(model(name))
    policy = engine.create_policy("policy")
    snapshot = policy.snapshot()
    futures = [engine.sample(snapshot, ModelInput(prompt), 4, params(i, 20)) for i, prompt in enumerate(PROMPTS)]
    sampled = [
        (prompt, answer)
        for prompt, future in zip(PROMPTS, futures, strict=True)
        for answer in future.result().sequences
    ]
    assert len({tuple(answer.tokens) for _, answer in sampled}) == 8
    data = [Datum.from_completion(prompt, answer.tokens) for prompt, answer in sampled]
    plain_rows = Engine(engine.model, PLAIN)
    learned = [
        e.forward_backward(p, data, "cross_entropy", None, backward=False).loss_fn_outputs
        for e, p in ((engine, policy), (plain_rows, plain_rows.create_policy("policy")))
    ]
    for i, (prompt, answer) in enumerate(sampled):
        expected = plain_logprobs(engine.model.module, prompt, answer.tokens)
        assert answer.logprobs == pytest.approx(expected, rel=0, abs=NEAR)
        for outputs in learned:
            assert outputs[i]["logprobs"].data[-len(expected) :] == pytest.approx(expected, rel=0, abs=NEAR)


@families
def test_the_gradient_is_that_of_a_plain_padded_pass(name: str, model: Callable[[str], Any], tmp_path: Path) -> None:
    """Of a clipped loss, over all weights: by tree rows where the model can, and by padded rows."""
    module = model(name).module
    data = rows(old_logprobs(module))
    padded_loss(module, data).backward()
    expected = gradients_of(module)
    tree = make_client(model(name), tmp_path)
    batches = tree._engine._learner._batches(data)
    assert any(b.tree is not None for b in batches) == tree._engine.model.can_pack
    for client in (tree, make_client(model(name), tmp_path, PLAIN)):
        assert_same_gradient(gradient(client, data), expected)


@families
def test_an_adapter_starts_as_the_base_and_has_pefts_gradient(
    name: str, model: Callable[[str], Any], tmp_path: Path
) -> None:
    """Tree rows and padded rows; peft on the plain pass, from the adapter's file, which gives the same log-probs."""
    from peft import PeftModel

    client = make_client(model(name), tmp_path, lora=LORA)
    base = model(name).module
    for prompt, answer in answers()[:2]:
        scores = client.create_sampling_client().compute_logprobs(ModelInput([*prompt, *answer])).result()
        assert scores[len(prompt) :] == pytest.approx(plain_logprobs(base, prompt, answer), rel=0, abs=NEAR)
    move_adapter(client)
    path = client.save_weights_for_sampler("adapter").result().path
    theirs = PeftModel.from_pretrained(base, path, is_trainable=True).eval()
    for prompt, answer in answers()[:2]:
        scores = client.create_sampling_client().compute_logprobs(ModelInput([*prompt, *answer])).result()
        assert scores[len(prompt) :] == pytest.approx(plain_logprobs(theirs, prompt, answer), rel=0, abs=NEAR)
    data = rows(old_logprobs(model(name).module))
    padded_loss(theirs, data).backward()
    expected = gradients_of(theirs)
    trained = {name.replace(".default", "") for name, p in theirs.named_parameters() if p.requires_grad}
    assert trained == {f"base_model.model.{name}" for name in client.policy.parameters}
    plain = make_client(model(name), tmp_path, PLAIN, LORA)
    plain.load_state(path).result()
    for one in (client, plain):
        assert_same_gradient(gradient(one, data), expected)


@families
def test_adapters_and_the_base_share_a_batch(name: str, model: Callable[[str], Any], tmp_path: Path) -> None:
    """Prompts of two adapters and of none in one pass: each row has the log-probs that it has alone."""
    engine = Engine(model(name))
    clients = [LocalTrainingClient(engine, engine.create_policy(n, lora=LORA), tmp_path / n) for n in "ab"]
    for i, client in enumerate(clients):
        move_adapter(client, i)
    snapshots = [clients[0].policy.snapshot(), engine.base_snapshot(), clients[1].policy.snapshot()]
    prompts = [PROMPTS[0], PROMPTS[1], [*PROMPTS[1], 5, 6]]
    futures = [
        engine.sample(s, ModelInput(p), 2, params(i, 6))
        for i, (s, p) in enumerate(zip(snapshots, prompts, strict=True))
    ]
    results = [f.result() for f in futures]
    for snapshot, prompt, result in zip(snapshots, prompts, results, strict=True):
        for answer in result.sequences:
            scores = engine.logprobs(snapshot, ModelInput([*prompt, *answer.tokens])).result()
            assert answer.logprobs == pytest.approx(scores[len(prompt) :], rel=0, abs=NEAR)


@families
def test_a_saved_model_loads_in_transformers_and_here(name: str, model: Callable[[str], Any], tmp_path: Path) -> None:
    """After a step of training: the log-probs of `AutoModelForCausalLM` on the folder are those of the policy."""
    from transformers import AutoModelForCausalLM

    from rlvr.engine.model_loading import load_model

    client = make_client(model(name), tmp_path)
    data = rows(old_logprobs(client._engine.model.module))
    client.forward_backward(data, "ppo", CLIP).result()
    client.optim_step(AdamParams(1e-2)).result()
    path = client.save_weights_for_sampler("model").result().path
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    again = load_model(path, client.get_tokenizer(), device="cpu", dtype="float32")
    for prompt, answer in answers()[::4]:
        scores = client.create_sampling_client().compute_logprobs(ModelInput([*prompt, *answer])).result()
        for module in (theirs, again.module):
            assert scores[len(prompt) :] == pytest.approx(plain_logprobs(module, prompt, answer), rel=0, abs=NEAR)
    loaded = make_client(model(name), tmp_path / "b")
    loaded.load_state(path).result()
    assert loaded.policy.sha256() == client.policy.sha256()


@families
def test_the_table_says_what_the_engine_does(name: str, model: Callable[[str], Any]) -> None:
    found = describe(name, model(name))
    if os.environ.get("RLVR_GOLDEN") == "write":
        known = read_golden() if GOLDEN.exists() else {}
        table = {n: {**known, name: found}[n] for n in FAMILIES if n in {**known, name: found}}
        GOLDEN.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    assert read_golden().get(name) == found, "write the table anew with RLVR_GOLDEN=write, and read the difference"


def test_the_page_shows_every_family_as_it_is() -> None:
    """`python docs/gen.py` writes the table."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "start" / "models.md").read_text(encoding="utf-8")
    assert load_gen().fill(page) == page and page.count("<!-- filled: ") == 1
    assert list(read_golden()) == list(FAMILIES)
    assert not [name for name in FAMILIES if f"`{name}`" not in page]
