"""Many adapters on one model: base and saved ones beside live ones, none changes another's numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, Datum, ModelInput
from rlvr.engine.engine_options import LoraConfig
from tests.kit.rounding import close_logprobs
from tests.kit.stepped_engine import drain, train_adapter
from tests.kit.tiny import PROMPTS, data, params, plain_logprobs, texts


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mistral"])
def test_base_saved_and_live_adapters_share_batches_with_the_numbers_of_each_alone(
    kind: str, fresh: Callable[..., Any], tmp_path: Path
) -> None:
    """One pass for all of them; tokens as alone, every log-prob within 1e-5, prompts' too. Ranks differ."""
    engine = fresh(kind)
    one, two = train_adapter(engine, "one", tmp_path), train_adapter(engine, "two", tmp_path, seed=1, rank=2)
    path = two.save_weights_for_sampler("saved").result().path
    snapshots = [engine.base_snapshot(), engine.snapshot(one.policy), engine.load_snapshot(Path(path))]
    one.forward_backward(data(), "ppo")
    one.optim_step(AdamParams(5e-2))
    snapshots.append(engine.snapshot(one.policy))
    engine.drop_policy("two")

    def ask(i: int) -> Any:
        return engine.enqueue(snapshots[i], ModelInput(PROMPTS[i]), 2, params(i, 8), prompt_logprobs=True)

    alone = [(ask(i), drain(engine)[0].response())[1] for i in range(4)]
    passes: list[int] = []
    hook = engine.model.module.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    together = [ask(i) for i in range(4)]
    drain(engine)
    hook.remove()
    assert len(passes) == 8 if kind != "mistral" else len(passes) >= 8
    for a, b in zip(alone, [r.response() for r in together], strict=True):
        assert texts(a) == texts(b)
        assert a.prompt_logprobs[1:] == close_logprobs(b.prompt_logprobs[1:])
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert x.logprobs == close_logprobs(y.logprobs)
    same = [engine.logprobs(s, ModelInput([1, 2, 3, 4])).result()[1:] for s in snapshots]
    assert len({tuple(found) for found in same}) == 4


def test_the_base_is_the_model_without_adapters(fresh: Callable[..., Any], tmp_path: Path) -> None:
    """To the bit, before and after adapters were made and trained beside it."""
    engine, bare = fresh("qwen3"), fresh("qwen3")
    plain = plain_logprobs(bare.model.module, [1], [2, 3, 4])
    before = engine.logprobs(engine.base_snapshot(), ModelInput([1, 2, 3, 4])).result()
    train_adapter(engine, "one", tmp_path)
    after = engine.logprobs(engine.base_snapshot(), ModelInput([1, 2, 3, 4])).result()
    assert before == after
    assert before[1:] == close_logprobs(plain)


def test_a_full_policy_and_the_base_exclude_each_other(fresh: Callable[..., Any], tmp_path: Path) -> None:
    """Training all weights would change the weights of a base snapshot; it may start once no snapshot is held."""
    engine = fresh("qwen3")
    held = engine.base_snapshot()
    with pytest.raises(ValueError, match="cannot share an engine"):
        engine.create_policy("full")
    del held
    engine.create_policy("full")
    with pytest.raises(ValueError, match="the base model alone cannot be sampled from"):
        engine.base_snapshot()
    with pytest.raises(ValueError, match=r"cannot be sampled from: .* all weights"):
        engine.load_snapshot(tmp_path)
    with pytest.raises(ValueError, match="cannot be dropped"):
        engine.drop_policy("full")


def test_a_dropped_policy_is_trained_no_more_and_its_name_is_free(fresh: Callable[..., Any], tmp_path: Path) -> None:
    """Its samplers go on with the weights they have."""
    engine = fresh("qwen3")
    trainer = train_adapter(engine, "a", tmp_path)
    sampler = trainer.create_sampling_client()
    expected = sampler.compute_logprobs(ModelInput([1, 2, 3])).result()
    engine.drop_policy("a")
    for call in (lambda: trainer.forward_backward(data(), "ppo"), lambda: trainer.optim_step(AdamParams(1e-2))):
        with pytest.raises(ValueError, match="policy 'a' was dropped"):
            call()
    with pytest.raises(ValueError, match="no policy named 'a' to drop"):
        engine.drop_policy("a")
    train_adapter(engine, "a", tmp_path, seed=5)
    assert sampler.compute_logprobs(ModelInput([1, 2, 3])).result() == expected


def test_training_is_the_same_to_the_bit_whatever_else_the_engine_does(
    fresh: Callable[..., Any], tmp_path: Path
) -> None:
    """Alone, and with other policies trained, sampled, failing and dropped between its calls: weights and log-probs."""

    def run(engine: Any, interrupt: Callable[[int], None]) -> tuple[Any, ...]:
        trainer = LocalTrainingClient(engine, engine.create_policy("p", lora=LoraConfig(4, 8.0)), tmp_path)
        found: list[Any] = []
        for step in range(3):
            interrupt(step)
            output = trainer.forward_backward(data(seed=step), "ppo").result()
            found += [output.metrics, [o["logprobs"].tolist() for o in output.loss_fn_outputs]]
            interrupt(10 + step)
            found.append(trainer.optim_step(AdamParams(1e-2)).result().metrics)
        return (*found, trainer.policy.sha256())

    crowded = fresh("qwen3")

    def busy(step: int) -> None:
        other = train_adapter(crowded, f"other {step}", tmp_path, seed=step)
        sampling = crowded.enqueue(crowded.snapshot(other.policy), ModelInput([1, 2]), 3, params(step, 6))
        crowded.enqueue(crowded.base_snapshot(), ModelInput([1]), 2, params(step, 6))
        crowded.advance()
        with pytest.raises(ValueError, match="lacks"):
            other.forward_backward([Datum(ModelInput([1]), {})], "ppo")
        if step % 2:
            drain(crowded)
            assert sampling.is_done
            crowded.drop_policy(f"other {step}")

    assert run(crowded, busy) == run(fresh("qwen3"), lambda _: None)


# Saved adapters


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_an_adapter_that_peft_wrote_is_sampled_from(
    kind: str, fresh: Callable[..., Any], pristine: Callable[..., Any], tmp_path: Path
) -> None:
    """Random weights by peft, in bf16 on disk, without any file of ours: log-probs of peft's own pass within 1e-5."""
    import copy

    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    target = "q_proj" if kind == "qwen3" else "c_fc"
    config = PeftConfig(r=3, lora_alpha=7, target_modules=[target], fan_in_fan_out=kind == "gpt2")
    theirs = get_peft_model(copy.deepcopy(pristine(kind).module), config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))).bfloat16())
    theirs.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file)
    engine = fresh(kind)
    ours = engine.logprobs(engine.load_snapshot(tmp_path), ModelInput([1, 2, 3, 4])).result()[1:]
    assert ours == close_logprobs(plain_logprobs(theirs, [1], [2, 3, 4]))
    base = engine.logprobs(engine.base_snapshot(), ModelInput([1, 2, 3, 4])).result()[1:]
    assert max(abs(a - b) for a, b in zip(ours, base, strict=True)) > 0.05


def test_a_saved_adapter_that_does_not_fit_is_named(
    client: Callable[..., Any], fresh: Callable[..., Any], tmp_path: Path
) -> None:
    """Another model's, a variant of LoRA, a weight missing or of another shape, a flipped bit, no adapter at all."""
    engine = fresh("qwen3")
    saved = Path(client("qwen3", lora=LoraConfig(4, 8.0)).save_weights_for_sampler("a").result().path)
    weights = load_file(saved / "adapter_model.safetensors")
    config = json.loads((saved / "adapter_config.json").read_text())
    first = next(iter(weights))

    def assert_refused(changed: Any, told: Any, says: str) -> None:
        save_file(changed, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps(told))
        with pytest.raises(ValueError, match=says):
            engine.load_snapshot(tmp_path)

    assert_refused(weights, {**config, "use_dora": True}, "use_dora is not supported")
    assert_refused(weights, {**config, "init_lora_weights": "pissa"}, "changes the weights of its base model")
    assert_refused(weights, {**config, "alpha_pattern": {"q_proj": 3}}, "alpha_pattern is not supported")
    assert_refused(weights, {**config, "bias": "all"}, "bias='all'")
    assert_refused(weights, {**config, "r": "4"}, "rank '4'")
    assert_refused(weights, {**config, "r": 8}, r"has shape \[4, 48\], expected \[8, 48\]")
    assert_refused({k: v for k, v in weights.items() if k != first}, config, "is missing")
    embedding = {"base_model.model.model.embed_tokens.weight": torch.zeros(1)}
    assert_refused({**weights, **embedding}, config, "is not a weight of a low-rank")
    renamed = {key.replace("q_proj", "q_projection"): value for key, value in weights.items()}
    assert_refused(renamed, config, "no linear layer model.layers.0.self_attn.q_projection")
    with pytest.raises(ValueError, match=r"adapter_config\.json is missing"):
        engine.load_snapshot(tmp_path / "nowhere")
    content = bytearray((saved / "adapter_model.safetensors").read_bytes())
    content[-3] ^= 1
    (saved / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="does not have its recorded checksum"):
        engine.load_snapshot(saved)
    (saved / "checksums.json").unlink()
    with pytest.raises(ValueError, match="do not have the hash recorded"):
        engine.load_snapshot(saved)
