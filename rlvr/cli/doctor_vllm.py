"""`rlvr doctor --vllm URL` checks a vLLM server before a run; with a config, also what the run needs of it.

Without a config it only reads: a few tokens are sampled, nothing is loaded. With one it builds the run's model,
publishes trial weights from a folder in `run.root`, samples from them, and removes them: the adapter is unloaded, or
the model's own weights are loaded again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.cli.doctor import Check
from rlvr.clients.vllm import VllmOptions
from rlvr.clients.vllm.vllm_options import SamplerError
from rlvr.clients.vllm.vllm_server import GENERATE, MODE_FLAG, WHOLE_PROMPTS, VllmServer
from rlvr.config.schema import RunConfig
from rlvr.core.messages import AdamParams, Datum, ModelInput, SamplingParams
from rlvr.core.protocols import TaskSource, TrainingClient
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.runs.assembly import assemble

PATIENCE = 120.0  # seconds: the first request of a fresh server compiles
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on CPUs
TRIAL_RATE = 0.01  # a step that changes log-probs by much more than rounding
TRIAL_TASKS = 64  # whose prompts are measured


def check_vllm(url: str, config: RunConfig | None = None) -> list[Check]:
    """The checks of the server at `url`, as lines of the report. ValueError if `url` is not an address."""
    return asyncio.run(_check(url, config))


async def _check(url: str, config: RunConfig | None) -> list[Check]:
    server = VllmServer(url, VllmOptions([url], timeout_s=PATIENCE))
    try:
        try:
            await server.check()
        except (SamplerError, ValueError) as error:
            return [Check("fails", "server", str(error))]
        paths = await _read(server, "/openapi.json", "paths")
        settings = await _read(server, "/server_info?config_format=json", "vllm_config")
        return [
            Check("ok", "server", f"{url} serves {server.base!r}, max_model_len {server.max_model_len}"),
            Check("ok", "tokens", f"{GENERATE} takes and gives token ids, and says which weights sampled"),
            Check("ok", "log-probs", f"at the sampling temperature ({MODE_FLAG})"),
            *_check_prompts(settings),
            _check_adapters(paths, settings.get("lora_config"), config),
            _check_all_weights(paths, config),
        ]
    finally:
        await server.aclose()


async def _read(server: VllmServer, path: str, key: str) -> dict[str, Any]:
    """An object in the answer to a GET; empty where the server does not say."""
    try:
        answer = await server.call("GET", path)
    except SamplerError:
        return {}
    value = answer.get(key) if isinstance(answer, dict) else None
    return value if isinstance(value, dict) else {}


def _check_prompts(settings: dict[str, Any]) -> list[Check]:
    """A failure for a server on CPUs that may split prompts: its engine crashes at the first one with a seed."""
    device = (settings.get("device_config") or {}).get("device")
    if device != "cpu" or not (settings.get("scheduler_config") or {}).get("enable_chunked_prefill"):
        return []
    return [Check("fails", "prompts", f"vLLM for CPUs crashes when it splits a prompt; start it with {WHOLE_PROMPTS}")]


def _check_adapters(paths: dict[str, Any], lora: Any, config: RunConfig | None) -> Check:
    asked = config.model.lora if config else None
    if "/v1/load_lora_adapter" not in paths:
        remedy = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
        return Check("fails" if asked and paths else "note", "adapters", f"cannot be loaded; {remedy}")
    if not isinstance(lora, dict):
        return Check("note", "adapters", "not said whether they can be loaded; --enable-lora is needed")
    rank, count = lora.get("max_lora_rank") or 0, lora.get("max_loras") or 0
    said = f"rank up to {rank} (model.lora.rank), {count} at once (training.max_steps_off_policy + 2)"
    if config and asked:
        versions = config.training.order.max_lag + 2
        if asked.rank > rank:
            return Check("fails", "adapters", f"{said}: the run has rank {asked.rank}; --max-lora-rank {asked.rank}")
        if versions > count:
            return Check("note", "adapters", f"{said}: the run holds {versions}; --max-loras {versions}")
    return Check("ok", "adapters", said)


def _check_all_weights(paths: dict[str, Any], config: RunConfig | None) -> Check:
    if {"/pause", "/resume", "/collective_rpc", "/update_weight_version"} <= paths.keys():
        return Check("ok", "all weights", "can be replaced (VLLM_SERVER_DEV_MODE=1): keep the port private")
    is_needed = config is not None and config.model.lora is None and bool(paths)
    return Check("fails" if is_needed else "note", "all weights", "cannot be replaced; VLLM_SERVER_DEV_MODE=1")


def check_run(config: RunConfig, urls: Sequence[str]) -> list[Check]:
    """The checks of a run's servers, or of those at `urls` if any are given, and of a trial publish to them."""
    if urls:
        config = replace(config, sampler=replace(config.sampler, name=VllmOptions.name, urls=list(urls)))
    if config.sampler.name != VllmOptions.name:
        raise ValueError("doctor: this run does not sample with vLLM; add sampler.name=vllm, or give --vllm URL")
    checks = [*_check_head_size(config), *(check for url in config.sampler.urls for check in check_vllm(url, config))]
    if any(check.state == "fails" for check in checks):
        return checks
    assembly, said = assemble(config), list[str]()
    folder = Path(config.run.root).expanduser().absolute() / f"doctor-{os.getpid()}"
    folder.mkdir(parents=True)
    client: TrainingClient | None = None
    try:
        client = assembly.build_client(folder, said.append, said.append)
        checks.append(Check("ok", "tokenizer", "reads a sample of tokens as the run's does"))
        checks += [_check_lengths(config, assembly.source, client), _try_publishing(client)]
    except (SamplerError, ValueError, OSError) as error:
        checks.append(Check("fails", "publish" if client else "run", str(error)))
    finally:
        if client is not None:
            client.close()
        shutil.rmtree(folder, ignore_errors=True)
    return checks


def _check_head_size(config: RunConfig) -> list[Check]:
    """A note if vLLM for CPUs does not support the model's head size; the server itself says so only when it fails."""
    values: dict[str, Any] = dict(config.model.config)
    if config.model.name and (file := Path(config.model.name).expanduser() / "config.json").is_file():
        values = json.loads(file.read_text(encoding="utf-8"))
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    size = values.get("head_dim") or (width // heads if heads and width else None)
    if not isinstance(size, int) or size in CPU_HEAD_SIZES:
        return []
    known = ", ".join(map(str, CPU_HEAD_SIZES))
    return [Check("note", "head size", f"{size}: vLLM for CPUs supports {known} only; choose another model there")]


def _check_lengths(config: RunConfig, source: TaskSource, client: TrainingClient) -> Check:
    tokenizer: Any = client.get_tokenizer()
    prompted = apply_prompt_options(source, tokenizer, config.prompt)
    levels = source.levels
    tasks = [prompted.train(config.seed, i, levels[i % len(levels)]) for i in range(TRIAL_TASKS)] if levels else []
    longest = max((len(tokenizer.encode(task.prompt, add_special_tokens=False)) for task in tasks), default=1)
    room = min(server.max_model_len for server in client.servers)  # pyright: ignore[reportAttributeAccessIssue]
    needed = longest + (config.rollout.max_tokens or 1)
    said = f"prompts of up to {longest} tokens ({len(tasks)} tasks) and rollout.max_tokens need {needed} of {room}"
    if needed > room:
        return Check("fails", "lengths", f"{said}; start the server with --max-model-len {needed} or more")
    return Check("ok", "lengths", said)


def _try_publishing(client: TrainingClient) -> Check:
    """Publish the weights as they are, changed by a step, and as they were; sample each time."""
    start = client.save_state("doctor-start").result().path
    names: list[str] = []
    for trial in range(3):
        if trial == 1:
            row = Datum.from_completion([1, 2, 3], [4, 5, 6], weight=1.0)
            client.forward_backward([row], "cross_entropy").result()
            client.optim_step(AdamParams(learning_rate=TRIAL_RATE)).result()
        elif trial == 2:
            client.load_state(start).result()
        sampler = client.create_sampling_client()
        response = sampler.sample(ModelInput([1, 2, 3]), 1, SamplingParams(max_tokens=4, seed=trial)).result()
        names.append(response.fingerprint)
    said = f"{names[1]} was sampled after {names[0]}, with the trainer's log-probs; {names[2]} is there again"
    return Check("ok", "publish", said)
