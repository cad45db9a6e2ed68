"""Which layers an adapter has: by role, by name, and the head too, in training, sampling and peft's files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, ModelInput
from rlvr.engine.adapter_files import read_lora_config, short_names
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.lora import lora_targets
from tests.kit.rounding import close_logprobs
from tests.kit.stepped_engine import drain
from tests.kit.tiny import PROMPTS, assert_gradients_of_peft, data, params, plain_logprobs, texts

PROMPT = ModelInput([1, 2, 3, 4])
KINDS = ["qwen3", "llama", "gpt2", "gemma2"]  # tied, untied, Conv1D, a head inside the model's own pass


def leaves(targets: tuple[str, ...]) -> set[str]:
    return {".".join(name.split(".")[-2:]) for name in targets}


def with_head(engine: Any, folder: Path, name: str = "p", seed: int = 0, unembed: bool = True) -> LocalTrainingClient:
    """A trained adapter on every layer, the head among them."""
    targets = lora_targets(engine.model, attn=True, mlp=True, unembed=unembed)
    trainer = LocalTrainingClient(
        engine, engine.create_policy(name, lora=LoraConfig(4, 8.0, targets), seed=seed), folder
    )
    for step in range(2):
        trainer.forward_backward(data(seed=seed + step), "cross_entropy")
        trainer.optim_step(AdamParams(5e-2))
    return trainer


@pytest.mark.parametrize(
    ("kind", "attention", "mlp"),
    [
        ("qwen3", {f"self_attn.{x}_proj" for x in "qkvo"}, {f"mlp.{x}_proj" for x in ("gate", "up", "down")}),
        ("gpt2", {"attn.c_attn", "attn.c_proj"}, {"mlp.c_fc", "mlp.c_proj"}),
    ],
)
def test_layers_are_chosen_by_their_role(
    kind: str, attention: set[str], mlp: set[str], pristine: Callable[..., Any]
) -> None:
    """Attention, the rest of a block, the head; GPT-2 calls layers of both blocks c_proj. Nothing at all is refused."""
    model = pristine(kind)
    assert leaves(lora_targets(model, attn=True, mlp=False, unembed=False)) == attention
    assert leaves(lora_targets(model, attn=False, mlp=True, unembed=False)) == mlp
    assert lora_targets(model, attn=False, mlp=False, unembed=True) == ("lm_head",)
    assert leaves(lora_targets(model, attn=True, mlp=True, unembed=True)) == attention | mlp | {"lm_head"}
    with pytest.raises(ValueError, match="adapts no linear layer"):
        lora_targets(model, attn=False, mlp=False, unembed=False)


def test_all_layers_by_name_are_the_default_ones(fresh: Callable[..., Any]) -> None:
    """The same weights to the bit: what a layer starts from depends on its name alone."""
    engine = fresh("gpt2")
    named = LoraConfig(4, 8.0, lora_targets(engine.model, attn=True, mlp=True, unembed=False))
    one, other = engine.create_policy("named", lora=named), engine.create_policy("all", lora=LoraConfig(4, 8.0))
    assert one.sha256() == other.sha256()


def test_names_in_a_file_mean_the_chosen_layers_and_no_other() -> None:
    known = ["h.0.attn.c_proj", "h.0.mlp.c_proj", "h.0.mlp.c_fc", "h.1.attn.c_proj", "h.1.mlp.c_proj", "h.1.mlp.c_fc"]
    assert short_names(known, known) == ["c_fc", "c_proj"]
    assert short_names([n for n in known if "mlp" in n], known) == ["c_fc", "mlp.c_proj"]
    assert short_names(["h.1.attn.c_proj"], known) == ["1.attn.c_proj"]
    assert short_names(["lm_head"], [*known, "lm_head"]) == ["lm_head"]
    # ctrl: a layer inside a Sequential, whose own name is a block's too, which peft would take.
    assert short_names(["h.0.ffn.0"], ["h.0", "h.0.ffn", "h.0.ffn.0"]) == ["ffn.0"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "roles", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True but the target module:UserWarning")
def test_any_choice_of_layers_loads_in_peft_and_comes_back(
    kind: str, roles: tuple[bool, bool, bool], client: Callable[..., Any], pristine: Callable[..., Any]
) -> None:
    """Same log-probs there within 1e-5, no weight missing or left over; `read_lora_config` recreates the policy."""
    from peft import PeftModel

    attn, mlp, unembed = roles
    targets = lora_targets(pristine(kind), attn=attn, mlp=mlp, unembed=unembed)
    trainer = client(kind, lora=LoraConfig(4, 8.0, targets))
    for step in range(2):
        trainer.forward_backward(data(seed=step), "cross_entropy")
        trainer.optim_step(AdamParams(5e-2))
    path = Path(trainer.save_state("a").result().path)
    ours = trainer.create_sampling_client().compute_logprobs(PROMPT).result()[1:]
    theirs = PeftModel.from_pretrained(copy.deepcopy(pristine(kind).module), path).eval()
    adapted = {name.split(".lora_A")[0] for name, _ in theirs.named_parameters() if "lora_A" in name}
    assert adapted == {f"base_model.model.{name}" for name in targets}
    assert ours == close_logprobs(plain_logprobs(theirs, [1], [2, 3, 4]))
    again = client(kind, name="again", lora=read_lora_config(path), seed=7)
    again.load_state_with_optimizer(str(path)).result()
    assert again.policy.sha256() == trainer.policy.sha256()
    more = client(kind, name="more", lora=LoraConfig(4, 8.0, ("down_proj",) if kind != "gpt2" else ("mlp.c_fc",)))
    with pytest.raises(ValueError, match="does not fit"):
        more.load_state(str(path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [17 * 3, 1 << 20], ids=["in chunks", "at once"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True but the target module:UserWarning")
def test_an_adapted_head_has_pefts_gradient(
    kind: str, chunk: int, fresh: Callable[..., Any], pristine: Callable[..., Any], tmp_path: Path
) -> None:
    """Also where the backward pass runs the head again, chunk by chunk, when the batch is long over."""
    trainer = with_head(fresh(kind, logit_elements=chunk), tmp_path)
    path = trainer.save_weights_for_sampler("a").result().path
    found = assert_gradients_of_peft(trainer, copy.deepcopy(pristine(kind).module), path)
    assert float(found["lm_head.lora_A.weight"].abs().max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_adapted_heads_share_batches_with_plain_ones(kind: str, fresh: Callable[..., Any], tmp_path: Path) -> None:
    """Two adapted heads, an adapter without one and the base, several rows each, in one batch: as each alone."""
    engine = fresh(kind)
    trainers = [with_head(engine, tmp_path, str(i), seed=10 * i, unembed=i < 2) for i in range(3)]
    snapshots = [*(engine.snapshot(t.policy) for t in trainers), engine.base_snapshot()]

    def ask(i: int) -> Any:
        prompt = ModelInput(PROMPTS[-1 - i])
        return engine.enqueue(snapshots[i], prompt, 3, params(i, 6), prompt_logprobs=True, topk_sample=2)

    alone = [(ask(i), drain(engine)[0].response())[1] for i in range(4)]
    together = [ask(i) for i in range(4)]
    drain(engine)
    for i, (a, b) in enumerate(zip(alone, [r.response() for r in together], strict=True)):
        assert texts(a) == texts(b)
        assert a.prompt_logprobs[1:] == close_logprobs(b.prompt_logprobs[1:])
        prompt = PROMPTS[-1 - i]
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert x.logprobs == close_logprobs(y.logprobs)
            assert [[t for t, _ in z] for z in x.topk_logprobs] == [[t for t, _ in z] for z in y.topk_logprobs]
        asked = engine.logprobs(snapshots[i], ModelInput([*prompt, *a.sequences[0].tokens])).result()
        assert asked[len(prompt) :] == close_logprobs(a.sequences[0].logprobs)
    again = with_head(fresh(kind), tmp_path, seed=0, unembed=False).create_sampling_client()
    other = snapshots[0]
    assert again.compute_logprobs(PROMPT).result() != engine.logprobs(other, PROMPT).result(), "the head must matter"
