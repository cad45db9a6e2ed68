"""`rlvr doctor --vllm URL` checks a vLLM server before a run: what it serves, its log-probs, adapters and new weights.

Only reads: a few tokens are sampled, nothing is loaded. Whether model and tokenizer are the run's own is checked when a
run starts, with the run's weights. Exercised by `python -m pytest tests/test_vllm_sampler.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rlvr.cli.doctor import Check
from rlvr.clients.vllm import SamplerOptions
from rlvr.clients.vllm.vllm_options import SamplerError
from rlvr.clients.vllm.vllm_server import GENERATE, MODE_FLAG, VllmServer

PATIENCE = 120.0  # seconds: the first request of a fresh server compiles


def check_vllm(url: str) -> list[Check]:
    """The checks of the server at `url`, as lines of the report. ValueError for what is no address."""
    return asyncio.run(_check(url))


async def _check(url: str) -> list[Check]:
    server = VllmServer(url, SamplerOptions("vllm", [url], timeout_s=PATIENCE))
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
            _adapters(paths, settings.get("lora_config")),
            _all_weights(paths),
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


def _adapters(paths: dict[str, Any], lora: Any) -> Check:
    if "/v1/load_lora_adapter" not in paths:
        return Check("note", "adapters", "cannot be loaded; VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora")
    if not isinstance(lora, dict):
        return Check("note", "adapters", "not said whether they can be loaded; --enable-lora is needed")
    said = f"rank up to {lora.get('max_lora_rank')} (model.lora.rank), {lora.get('max_loras')} at once"
    return Check("ok", "adapters", f"{said} (training.max_steps_off_policy + 2)")


def _all_weights(paths: dict[str, Any]) -> Check:
    needed = {"/pause", "/resume", "/collective_rpc", "/update_weight_version"}
    if needed <= paths.keys():
        return Check("ok", "all weights", "can be replaced (VLLM_SERVER_DEV_MODE=1): keep the port private")
    return Check("note", "all weights", "cannot be replaced; VLLM_SERVER_DEV_MODE=1")
