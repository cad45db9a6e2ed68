"""Saved states: continue to the same bits, load elsewhere, notice damage, and never half replace what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.core.files import new_folder
from rlvr.core.messages import AdamParams, ModelInput
from rlvr.engine.checkpoint import load_policy, save_policy
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.model_loading import build_model, load_model
from rlvr.engine.tokenizer import load_tokenizer
from tests.kit.rounding import close_logprobs
from tests.kit.tiny import CONFIGS, data, gradients, plain_logprobs

LORA = LoraConfig(rank=4, alpha=8.0)
ADAM = AdamParams(1e-2, weight_decay=0.01, grad_clip_norm=1.0)


def step(trainer: Any, number: int) -> None:
    trainer.forward_backward(data(seed=number), "ppo")
    trainer.optim_step(ADAM)


@pytest.mark.parametrize(
    ("kind", "lora", "dtype"),
    [
        ("qwen3", None, None),
        ("gpt2", None, None),
        ("qwen3", None, torch.bfloat16),
        ("llama", LORA, None),
        ("gpt2", LORA, None),
        ("llama", LORA, torch.bfloat16),
    ],
)
def test_a_reloaded_run_goes_on_to_the_same_bits(kind: str, lora: Any, dtype: Any, client: Callable[..., Any]) -> None:
    """Two steps, save, two more steps; a new engine that loads and does the last two ends with the same hash."""
    unbroken = client(kind, name="unbroken", lora=lora, dtype=dtype)
    step(unbroken, 0)
    step(unbroken, 1)
    path = unbroken.save_state("two").result().path
    step(unbroken, 2)
    step(unbroken, 3)
    resumed = client(kind, name="resumed", lora=lora, dtype=dtype, seed=99)
    step(resumed, 7)  # something to be replaced
    resumed.load_state_with_optimizer(path).result()
    assert resumed.policy.version == 2
    step(resumed, 2)
    step(resumed, 3)
    assert resumed.policy.sha256() == unbroken.policy.sha256()
    weights_only = client(kind, name="weights", lora=lora, dtype=dtype)
    weights_only.load_state(path).result()
    step(weights_only, 2)
    step(weights_only, 3)
    assert weights_only.policy.sha256() != unbroken.policy.sha256(), "the optimizer's state must matter here"


def test_loading_drops_gradients(client: Callable[..., Any]) -> None:
    """What was accumulated on other weights is not stepped."""
    trainer = client("qwen3")
    path = trainer.save_state("a").result().path
    trainer.forward_backward(data(), "ppo")
    trainer.load_state_with_optimizer(path).result()
    assert not gradients(trainer)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_accumulated_gradients_are_saved_and_come_back_to_the_bit(
    lora: Any, dtype: Any, client: Callable[..., Any], tmp_path: Path
) -> None:
    """Saved in the middle of an accumulation, loaded elsewhere: the same gradients, and the same weights later."""
    one, other = client(lora=lora, dtype=dtype), client(lora=lora, dtype=dtype, name="other", seed=3)
    model = one._engine.model
    step(one, 0)
    for name, accumulated in (("nothing", False), ("something", True)):
        if accumulated:
            one.forward_backward(data(seed=1), "ppo")
        with new_folder(tmp_path / name) as folder:
            save_policy(folder, one.policy, model, optimizer=True, gradients=True)
        other.forward_backward(data(seed=7), "ppo")  # something to be replaced
        load_policy(tmp_path / name, other.policy, other._engine.model, optimizer=True, gradients=True)
        assert bool(gradients(one)) == accumulated
        assert gradients(other).keys() == gradients(one).keys()
        assert all(torch.equal(g, gradients(one)[k]) for k, g in gradients(other).items())
    step(one, 2)
    step(other, 2)
    assert other.policy.sha256() == one.policy.sha256()
    with pytest.raises(ValueError, match=r"gradients\.safetensors"):
        path = Path(one.save_state("without").result().path)
        load_policy(path, other.policy, other._engine.model, optimizer=True, gradients=True)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_a_full_checkpoint_loads_in_transformers(kind: str, client: Callable[..., Any], tokenizer: Any) -> None:
    """AutoModelForCausalLM and AutoTokenizer read the folder: same log-probs, same tokens; nothing is pickled."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = client(kind)
    step(trainer, 0)
    path = trainer.save_state("a").result().path
    ours = trainer.create_sampling_client().compute_logprobs(ModelInput([1, 2, 3, 4])).result()
    theirs = AutoModelForCausalLM.from_pretrained(path).eval()
    assert ours[1:] == close_logprobs(plain_logprobs(theirs, [1], [2, 3, 4]))
    text = "<boe> 3 5 + <eoe>"
    assert AutoTokenizer.from_pretrained(path).encode(text) == tokenizer.encode(text)
    assert {p.suffix for p in Path(path).iterdir()} <= {".json", ".safetensors", ".jinja"}
    again = load_model(path, load_tokenizer(path), device="cpu", dtype="float32")
    assert (again.has_plain_head, again.can_cache) == (True, True)


def test_a_model_that_is_stored_under_other_names_comes_back(
    client: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    """Mixture of experts: transformers fuses the experts in memory and splits them on disk."""
    from rlvr.clients.local import LocalTrainingClient
    from rlvr.engine.engine import Engine

    config = {
        **{k: v for k, v in CONFIGS["qwen3"].items() if k != "head_dim"}, "model_type": "qwen3_moe", "num_experts": 4,
        "moe_intermediate_size": 16, "num_experts_per_tok": 2,
    }  # fmt: skip

    def make(seed: int) -> LocalTrainingClient:
        engine = Engine(build_model(config, tokenizer, seed=seed, device="cpu", dtype="float32"))
        return LocalTrainingClient(engine, engine.create_policy("p"), tmp_path)

    one, other = make(1), make(2)
    step(one, 0)
    other.load_state_with_optimizer(one.save_state("a").result().path).result()
    assert other.policy.sha256() == one.policy.sha256()
    step(one, 1)
    step(other, 1)
    assert other.policy.sha256() == one.policy.sha256()


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("damage", ["weights", "optimizer", "policy.json", "lost file"])
def test_a_damaged_checkpoint_is_named_and_changes_nothing(lora: Any, damage: str, client: Callable[..., Any]) -> None:
    """One flipped bit in any file, or one file gone: a ValueError that names it; the policy is as before."""
    trainer = client("qwen3", lora=lora)
    step(trainer, 0)
    folder = Path(trainer.save_state("a").result().path)
    step(trainer, 1)
    names = {"weights": "model" if lora is None else "adapter_model", "optimizer": "optimizer"}
    file = folder / (damage if damage == "policy.json" else f"{names.get(damage, 'optimizer')}.safetensors")
    if damage == "lost file":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    before = trainer.policy.sha256(), trainer.policy.fingerprint, trainer.policy.optimizer
    with pytest.raises(ValueError, match=file.name):
        trainer.load_state_with_optimizer(str(folder))
    assert (trainer.policy.sha256(), trainer.policy.fingerprint, trainer.policy.optimizer) == before
    step(trainer, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lora": ...}, "policy.json: no usable lora"),
        ({"lora": 3}, "policy.json: no usable lora"),
        ({"weights_sha256": ...}, "policy.json: no usable weights_sha256"),
        ({"weights_sha256": None}, "policy.json: no usable weights_sha256"),
        ({"version": ...}, "policy.json: no usable version"),
        ({"version": "x"}, "policy.json: no usable version"),
        ({"version": -1}, "policy.json: no usable version"),
        ({"optimizer_steps": ...}, "policy.json holds no optimizer_steps"),
        ({"optimizer_steps": {"nowhere": 1}}, "optimizer_steps of nowhere"),
        ({"optimizer_steps": {"model.norm.weight": "x"}}, "optimizer_steps of model.norm.weight are 'x'"),
        ([1], "policy.json holds a list"),
        ("[" * 20_000, "policy.json is damaged: not JSON"),
    ],
)
def test_incomplete_counters_are_refused_by_name_and_change_nothing(
    change: Any, says: str, client: Callable[..., Any]
) -> None:
    """The checksums agree: the file was written so."""
    trainer = client("qwen3")
    step(trainer, 0)
    folder = Path(trainer.save_state("a").result().path)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "checksums.json"}
    if isinstance(change, dict):
        changed = {**json.loads(files["policy.json"]), **change}
        change = {name: value for name, value in changed.items() if value is not ...}
    files["policy.json"] = (change if isinstance(change, str) else json.dumps(change)).encode()
    with new_folder(folder) as written:
        for name, content in files.items():
            (written / name).write_bytes(content)
    step(trainer, 1)
    before = trainer.policy.sha256(), trainer.policy.fingerprint, trainer.policy.optimizer
    with pytest.raises(ValueError, match=says):
        trainer.load_state_with_optimizer(str(folder))
    assert (trainer.policy.sha256(), trainer.policy.fingerprint, trainer.policy.optimizer) == before


def test_a_checkpoint_of_another_model_is_refused(client: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> None:
    """Another width, rank or scale, an adapter for a full model: what does not fit is named, nothing changes."""
    from rlvr.clients.local import LocalTrainingClient
    from rlvr.engine.engine import Engine

    wide = build_model({**CONFIGS["qwen3"], "intermediate_size": 64}, tokenizer, seed=1, device="cpu", dtype="float32")
    engine = Engine(wide)
    other = LocalTrainingClient(engine, engine.create_policy("wide"), tmp_path)
    full, adapter = client("qwen3", name="full"), client("qwen3", name="adapter", lora=LORA)
    before = full.policy.sha256()
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight has shape \[64, 32\], expected \[48, 32\]"):
        full.load_state(other.save_state("a").result().path)
    with pytest.raises(ValueError, match=r"cannot be read|does not fit"):
        full.load_state(adapter.save_state("a").result().path)
    with pytest.raises(ValueError, match=r"cannot be read|does not fit"):
        adapter.load_state(full.save_state("a").result().path)
    assert full.policy.sha256() == before
    saved = adapter.save_state("b").result().path
    for name, lora, message in (("r", LoraConfig(8, 8.0), "does not fit"), ("s", LoraConfig(4, 16.0), "has lora")):
        with pytest.raises(ValueError, match=message):
            client("qwen3", name=name, lora=lora).load_state(saved)


def test_a_missing_checkpoint_or_optimizer_is_refused(client: Callable[..., Any]) -> None:
    """No such folder; and a sampler's checkpoint has no optimizer to load, but loads without."""
    trainer = client("qwen3")
    with pytest.raises(ValueError, match="nowhere"):
        trainer.load_state("nowhere")
    path = trainer.save_weights_for_sampler("a").result().path
    with pytest.raises(ValueError, match=r"optimizer.safetensors"):
        trainer.load_state_with_optimizer(path)
    trainer.load_state(path).result()


def test_saving_again_replaces_and_failing_keeps_the_old(
    client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same name twice holds the newer; a full disk in the middle leaves the older, whole, and nothing beside it."""
    trainer = client("qwen3")
    first = Path(trainer.save_state("a").result().path)
    step(trainer, 0)
    assert Path(trainer.save_state("a").result().path) == first
    assert json.loads((first / "policy.json").read_text())["weights_sha256"] == trainer.policy.sha256()
    saved = trainer.policy.sha256()
    step(trainer, 1)
    from rlvr.engine import checkpoint

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.\w+\.tmp'"):  # on which disk
        trainer.save_state("a")
    assert [p.name for p in first.parent.iterdir()] == ["a"]
    trainer.load_state_with_optimizer(str(first)).result()
    assert trainer.policy.sha256() == saved


def test_names_cannot_leave_the_folder(client: Callable[..., Any]) -> None:
    """A checkpoint name is one folder's name."""
    with pytest.raises(ValueError, match="checkpoint name"):
        client("qwen3").save_state("../a")


def test_saving_is_silent(client: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bar in the middle of a live display; and transformers' own setting is as it was."""
    from transformers.utils import logging

    trainer = client("qwen3")
    trainer.load_state(trainer.save_state("a").result().path).result()
    load_model(trainer.save_state("b").result().path, trainer.get_tokenizer(), device="cpu", dtype="float32")
    out = capfd.readouterr()
    assert (out.out, out.err) == ("", "")
    assert logging.is_progress_bar_enabled()
