"""Weights and optimizer state on disk: safetensors and JSON.

A full policy is saved as an ordinary `transformers` folder (weights, config, tokenizer), an adapter in peft's format;
both load there. With the optimizer, `optimizer.safetensors` holds AdamW's moments, the momenta of another optimizer
and fp32 masters (where the weights are narrower), and `policy.json` the counters. A critic's folder has its value head
beside these. The caller makes a folder atomic (`rlvr.core.files.new_folder`).

`write_tensors` writes a safetensors file one tensor at a time, so that not all of them are in memory at once. The
format is a length, a header in JSON, and the bytes: https://huggingface.co/docs/safetensors.

Where the weights are sharded, every rank calls these functions. They write the same files, rank 0 alone, and of the
optimizer's state hold one whole tensor at a time.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlvr.core.files import find_damage, read_json
from rlvr.engine.adapter_files import PEFT_PREFIX, REMEDY, write_adapter
from rlvr.engine.model import LanguageModel
from rlvr.engine.model_loading import without_output
from rlvr.engine.policy import VALUE_HEAD, VALUE_HEAD_FILE, Policy, Snapshot, name_weights, tensors_sha256
from rlvr.engine.sharding import gather_whole, is_sharded, local_part, take_part

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to be written; `load` gives its values when its turn has come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def write_tensors(path: Path | None, tensors: Mapping[str, StoredTensor]) -> None:
    """Write the tensors in the order of their names. Without a path they are only loaded: `load` may be a collective.

    OSError if the disk is full.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        stored = tensors[name]
        begin, end = end, end + math.prod(stored.shape) * stored.dtype.itemsize
        header[name] = {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the bytes of the tensors begin at a multiple of 8
    file = None if path is None else open(path, "wb")  # noqa: SIM115
    try:
        if file is not None:
            file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            values = tensors[name].load()
            if file is not None:
                file.write(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    finally:
        if file is not None:
            file.close()


def save_policy(
    folder: Path,
    policy: Policy,
    model: LanguageModel,
    *,
    optimizer: bool,
    gradients: bool = False,
    tokenizer: bool = True,
    writes: bool = True,
) -> None:
    """Write a policy into `folder`, which exists and is empty.

    `gradients` adds those accumulated since the last optimizer step. Without `tokenizer` a reader must have the model.
    OSError if the disk is full or not writable. Of several ranks one `writes`; the others only give their parts.
    """
    with name_failed_write(folder):
        _save(folder, policy, model, optimizer=optimizer, gradients=gradients, writes=writes)
        if tokenizer and writes:
            model.tokenizer.save_pretrained(folder)


@contextmanager
def name_failed_write(folder: Path) -> Iterator[None]:
    """Raise an OSError with the system's error number and the folder where a write into the folder fails.

    safetensors and tokenizers give the number only in their text; a full disk gives no file name.
    """
    try:
        yield
    except Exception as error:
        hidden = re.search(r"\(os error (\d+)\)", str(error))
        number = int(hidden[1]) if hidden else getattr(error, "errno", None)
        if number and not getattr(error, "filename", None):
            raise OSError(number, os.strerror(number), str(folder)) from error
        raise


def _save(
    folder: Path, policy: Policy, model: LanguageModel, *, optimizer: bool, gradients: bool, writes: bool
) -> None:
    if policy.lora is None:
        weights = _gather_weights(model, keep=writes) if policy.is_sharded else None
        if writes:
            with without_output():
                model.module.save_pretrained(folder, state_dict=weights)
    elif writes:
        write_adapter(folder, policy, model)
    if policy.is_critic:
        head = {VALUE_HEAD: _make_stored(policy, VALUE_HEAD, policy.parameters[VALUE_HEAD])}
        write_tensors(folder / VALUE_HEAD_FILE if writes else None, head)
    policy.notice_changes()
    counters: dict[str, Any] = {
        "name": policy.name,
        "version": policy.version,
        **({"edits": policy.edits} if policy.edits else {}),
        "weights_sha256": policy.sha256(),
        "lora": _lora(policy),
    }
    if optimizer:
        tensors, steps = _optimizer_state(policy)
        write_tensors(folder / "optimizer.safetensors" if writes else None, tensors)
        counters["optimizer_steps"] = steps
    if gradients:
        sums = {k: _make_stored(policy, k, m.grad) for k, m in policy.masters.items() if m.grad is not None}
        write_tensors(folder / "gradients.safetensors" if writes else None, sums)
    if writes:
        (folder / "policy.json").write_text(json.dumps(counters, indent=2))


def _gather_weights(model: LanguageModel, *, keep: bool) -> dict[str, torch.Tensor]:
    """The whole weights as `state_dict` names them, tied ones as one tensor; without `keep` only this rank's part."""
    whole: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    for name, weight in model.module.state_dict(keep_vars=True).items():
        if id(weight) not in whole:
            gathered = gather_whole(local_part(weight.detach()), weight)
            whole[id(weight)] = gathered.cpu() if keep else torch.empty(0)
        named[name] = whole[id(weight)]
    return named


def _make_stored(policy: Policy, key: str, part: torch.Tensor) -> StoredTensor:
    """A tensor of the shape of a weight, of which this process may hold a part only."""
    like = policy.parameters[key]
    shape = like.shape if is_sharded(like) else part.shape
    return StoredTensor(part.dtype, tuple(shape), lambda: gather_whole(part.detach(), like))


def load_policy(
    folder: Path, policy: Policy, model: LanguageModel, *, optimizer: bool, gradients: bool = False
) -> None:
    """Replace the weights (and optimizer state) of `policy`; ValueError naming the file if they do not fit.

    Accumulated gradients are dropped, or with `gradients` replaced by the saved ones.
    """
    weights, counters = _read(folder, policy, model)
    try:
        state = load_file(folder / "optimizer.safetensors") if optimizer else {}
        gradient_sums = load_file(folder / "gradients.safetensors") if gradients else {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint {folder} cannot be read ({error}); {REMEDY}") from error
    steps = counters.get("optimizer_steps") if optimizer else {}
    if problem := _find_mismatch(policy, state, steps) if optimizer else "":
        raise ValueError(f"checkpoint {folder}: {problem}; load another one, or the weights alone (load_state)")
    for key, gradient in gradient_sums.items():
        if key not in policy.masters or policy.parameters[key].shape != gradient.shape:
            raise ValueError(f"checkpoint {folder}: gradients.safetensors has {key}, which does not fit this policy")
    for key, p in policy.parameters.items():
        if weights[key].dtype != p.dtype:
            raise ValueError(
                f"checkpoint {folder} is in {weights[key].dtype}, this policy in {p.dtype}; use one dtype for both"
            )
    policy.preserve_snapshots()
    with torch.no_grad():
        for key, p in policy.parameters.items():
            local_part(p).copy_(take_part(weights[key], p))
            if policy.masters[key].dtype != p.dtype:
                policy.masters[key].copy_(take_part(state.get(f"master.{key}", weights[key]), p))
    policy.clear_gradients()
    for key, gradient in gradient_sums.items():
        policy.masters[key].grad = _take_own(policy, key, gradient)
    policy.version = counters["version"]
    policy.note_change()
    policy.edits = edits if type(edits := counters.get("edits")) is int else 0
    policy._optimizer = None  # pyright: ignore[reportPrivateUsage]
    policy.momenta = {
        key: _take_own(policy, key, state[f"momentum.{key}"]) for key in policy.masters if f"momentum.{key}" in state
    }
    if steps:
        _load_optimizer(policy, state, steps)


def interpolate_policy(folder: Path, policy: Policy, model: LanguageModel, share: float) -> None:
    """Set the weights W of `policy` to S + `share` x (W - S), with S those saved in `folder`, and a fresh optimizer.

    Computed in fp32; accumulated gradients are dropped. It counts as a step, since the weights need a new fingerprint.
    """
    saved, _ = _read(folder, policy, model)
    policy.preserve_snapshots()
    with torch.no_grad():
        for key, p in policy.parameters.items():
            master, start = policy.masters[key], take_part(saved[key], p).to(p.device, torch.float32)
            master.copy_(start + share * (master - start))
            local_part(p).copy_(master)
    policy.clear_gradients()
    policy.version += 1
    policy.note_change()
    policy._optimizer = None  # pyright: ignore[reportPrivateUsage]
    policy.momenta = {}


def load_adapter(folder: Path, policy: Policy) -> None:
    """Start a policy's adapter from one in peft's format; ValueError if their configs or layers differ."""
    if policy.lora is None:
        raise ValueError(f"{folder} is an adapter, but this run trains all weights: set model.lora, or merge it first")
    config = read_json(folder / "adapter_config.json", "the config of an adapter", REMEDY)
    saved, own = (config.get("r"), config.get("lora_alpha")), (policy.lora.rank, policy.lora.alpha)
    if saved != own or config.get("use_dora") or config.get("use_rslora"):
        raise ValueError(
            f"adapter {folder} has rank {saved[0]}, alpha {saved[1]}, but model.lora has rank {own[0]}, alpha "
            f"{own[1]:g}; set model.lora to match (variants such as DoRA and rsLoRA are not supported)"
        )
    try:
        stored = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"adapter {folder} cannot be read ({error}); {REMEDY}") from error
    stored = {key.removeprefix(PEFT_PREFIX): value for key, value in stored.items()}
    for key in (stored.keys() ^ policy.parameters.keys()) or ():
        owner = "only the adapter" if key in stored else "only the policy"
        raise ValueError(f"adapter {folder} does not fit this model: {owner} has {key}; see model.lora.targets")
    for key, p in policy.parameters.items():
        if stored[key].shape != p.shape:
            raise ValueError(
                f"adapter {folder} does not fit this model: {key} has shape {list(stored[key].shape)}, expected "
                f"{list(p.shape)}"
            )
    policy.preserve_snapshots()
    with torch.no_grad():
        for key, p in policy.parameters.items():
            p.copy_(stored[key])
            policy.masters[key].copy_(stored[key])


def read_snapshot(folder: Path, policy: Policy, model: LanguageModel) -> Snapshot:
    """Read saved weights as a snapshot: to sample from them, or as the reference of a KL."""
    weights, counters = _read(folder, policy, model)
    copy = {key: weights[key].to(p.device, p.dtype) for key, p in policy.parameters.items()}
    fingerprint = name_weights(policy.name, counters["version"], counters.get("edits"))
    return Snapshot(fingerprint, policy=policy, copy=copy, scale=policy.scale)


def _read(folder: Path, policy: Policy, model: LanguageModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the weights, by name and as they were saved, and counters; ValueError naming what does not fit."""
    if wrong := find_damage(folder):
        raise ValueError(f"checkpoint {folder} is damaged: {wrong}; give another one")
    if policy.is_critic != (folder / VALUE_HEAD_FILE).exists():
        given, own = ("a policy's", "a critic's") if policy.is_critic else ("a critic's", "a policy's")
        has = "no" if policy.is_critic else "a"
        raise ValueError(f"checkpoint {folder} holds {has} value head ({VALUE_HEAD_FILE}): it is {given}; load {own}")
    try:
        counters = _counters(folder / "policy.json")
        name = "model.safetensors" if policy.lora is None else "adapter_model.safetensors"
        files = sorted(folder.glob("model*.safetensors")) if policy.lora is None else [folder / name]
        if not files:
            raise FileNotFoundError(f"{folder / name} is missing")
        files += [folder / VALUE_HEAD_FILE] if policy.is_critic else []
        stored = {k.removeprefix(PEFT_PREFIX): v for file in files for k, v in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint {folder} cannot be read ({error}); {REMEDY}") from error
    if policy.lora is None and not stored.keys() >= policy.parameters.keys():
        # transformers stores some models under other names than in memory (fused experts) and can convert them back.
        with without_output():
            stored |= dict(model.architecture.from_pretrained(folder, dtype=model.dtype).named_parameters())
    for key, p in policy.parameters.items():
        if key not in stored or stored[key].shape != p.shape:
            problem = "is missing" if key not in stored else f"has shape {list(stored[key].shape)}"
            raise ValueError(f"checkpoint {folder} does not fit this model: {key} {problem}, expected {list(p.shape)}")
    if policy.lora is not None and (more := sorted(stored.keys() - policy.parameters.keys())):
        raise ValueError(
            f"checkpoint {folder} does not fit this policy: it adapts {more[0]} too; see LoraConfig.targets"
        )
    if (saved := counters["lora"]) != _lora(policy):
        raise ValueError(
            f"checkpoint {folder} has lora {saved}, this policy has {_lora(policy)}; use the same LoRA options for both"
        )
    weights = {key: stored[key].detach() for key in policy.parameters}
    if tensors_sha256(weights) != counters["weights_sha256"]:
        raise ValueError(
            f"checkpoint {folder}: the weights do not have the hash recorded in policy.json; give another one"
        )
    return weights, counters


def _counters(path: Path) -> dict[str, Any]:
    """Read `policy.json` and check the type of each entry."""
    counters = read_json(path, "the counters of a policy", REMEDY)
    types = {"version": int, "weights_sha256": str, "lora": (dict, type(None))}
    wrong = [name for name, kind in types.items() if name not in counters or not isinstance(counters[name], kind)]
    if wrong or isinstance(counters["version"], bool) or not 0 <= counters["version"] < 2**63:
        raise ValueError(f"{path}: no usable {', '.join(wrong) or 'version'} in it; {REMEDY}")
    return counters


def _find_mismatch(policy: Policy, tensors: dict[str, torch.Tensor], steps: Any) -> str:
    """Why a stored optimizer state does not fit this policy; empty if it fits."""
    if not isinstance(steps, dict):
        return "policy.json holds no optimizer_steps"
    for key, count in cast(dict[str, Any], steps).items():
        if key not in policy.masters or type(count) is not int or not 0 <= count < 2**53:
            return f"policy.json: optimizer_steps of {key[:80]} are {count!r:.40}, expected a whole number of a weight"
    expected = [(f"{m}.{key}", policy.parameters[key]) for key in steps for m in ("exp_avg", "exp_avg_sq")]
    expected += [(f"master.{key}", p) for key, p in policy.parameters.items() if p.dtype != policy.masters[key].dtype]
    expected += [(f"momentum.{key}", p) for key, p in policy.parameters.items() if f"momentum.{key}" in tensors]
    for name, p in expected:
        if name not in tensors or tensors[name].shape != p.shape:
            return f"optimizer.safetensors has no {name} of shape {list(p.shape)}"
    return ""


def _lora(policy: Policy) -> dict[str, Any] | None:
    return None if policy.lora is None else {"rank": policy.lora.rank, "alpha": policy.lora.alpha}


def _optimizer_state(policy: Policy) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    tensors: dict[str, StoredTensor] = {}
    steps: dict[str, int] = {}
    for key, master in policy.masters.items():
        if master.dtype != policy.parameters[key].dtype:
            tensors[f"master.{key}"] = _make_stored(policy, key, master)
        if state := policy.optimizer.state.get(master):
            steps[key] = int(state["step"])
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{key}"] = _make_stored(policy, key, state[moment])
    tensors |= {f"momentum.{key}": _make_stored(policy, key, momentum) for key, momentum in policy.momenta.items()}
    return tensors, steps


def _take_own(policy: Policy, key: str, whole: torch.Tensor) -> torch.Tensor:
    """A copy of this process's part of a stored tensor, beside the weight's."""
    return take_part(whole, policy.parameters[key]).to(policy.masters[key].device, copy=True)


def _load_optimizer(policy: Policy, tensors: dict[str, torch.Tensor], steps: dict[str, int]) -> None:
    for key, count in steps.items():
        master = policy.masters[key]
        policy.optimizer.state[master] = {
            "step": torch.tensor(float(count), device=master.device),  # fused AdamW reads it on the device
            **{m: _take_own(policy, key, tensors[f"{m}.{key}"]) for m in ("exp_avg", "exp_avg_sq")},
        }
