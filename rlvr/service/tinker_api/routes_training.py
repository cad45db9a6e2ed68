"""Training runs: made, loaded, sent gradients and steps, saved. Each answer is the id of a promise.

Exercised by tests/test_tinker_sdk.py and tests/test_tinker_http.py.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from rlvr.service.tinker_api import bodies, operations
from rlvr.service.tinker_api.boundary import Refused
from rlvr.service.tinker_api.caller import Asks, Caller
from rlvr.service.tinker_api.errors import UserError
from rlvr.service.tinker_api.operations import Operation
from rlvr.service.tinker_api.wire import BadRequest, parse_forward_backward

router = APIRouter()
PROTOBUF = "application/x-protobuf"


async def submit(caller: Caller, model_id: str, seq_id: int, operation: Operation) -> dict[str, Any]:
    request_id = await caller.ask(caller.core.submit, model_id, seq_id, operation)
    return {"request_id": request_id, "model_id": model_id}


@router.post("/create_model")
async def create_model(body: bodies.CreateModel, caller: Asks) -> dict[str, Any]:
    lora = None if body.lora_config is None else body.lora_config.model_dump()
    request_id = await caller.ask(
        caller.core.create_model, body.session_id, body.model_seq_id, body.base_model, lora, body.user_metadata
    )
    return {"request_id": request_id, "model_id": f"{body.session_id}:train:{body.model_seq_id}"}


@router.post("/load_weights")
async def load_weights(body: bodies.LoadWeights, caller: Asks) -> dict[str, Any]:
    request_id = await caller.ask(caller.core.load_weights, **body.model_dump(exclude={"optimizer_config"}))
    return {"request_id": request_id, "model_id": body.model_id or f"{body.session_id}:train:{body.model_seq_id}"}


@router.post("/get_info")
async def get_info(body: bodies.ModelId, caller: Asks) -> dict[str, Any]:
    return await caller.ask(caller.core.model_info, body.model_id)


@router.post("/forward_backward")
async def forward_backward(caller: Asks) -> dict[str, Any]:
    headers = caller.request.headers
    if PROTOBUF not in headers.get("content-type", ""):
        raise Refused(415, f"forward_backward takes {PROTOBUF} (tinker SDK {bodies.SPOKEN}); update the client's SDK")
    raw, encoding = await caller.request.body(), headers.get("content-encoding", "")

    def read_and_submit(owner: str) -> dict[str, Any]:
        try:
            asked = parse_forward_backward(raw, encoding)
        except BadRequest as error:
            if error.model_id is None or error.seq_id is None:
                raise
            # Its place in the order is used up, or everything after it would wait for it.
            model_id, seq_id, operation = error.model_id, error.seq_id, operations.Broken(str(error))
        else:
            model_id, seq_id = asked.model_id, asked.seq_id
            operation = operations.ForwardBackward(
                asked.data, asked.loss_fn, asked.config, asked.forward_only, raw, encoding
            )
        return {"request_id": caller.core.submit(owner, model_id, seq_id, operation), "model_id": model_id}

    return await caller.ask(read_and_submit)


@router.post("/optim_step")
async def optim_step(body: bodies.OptimStep, caller: Asks) -> dict[str, Any]:
    try:
        step: Operation = operations.OptimStep(body.adam())
    except UserError as error:
        step = operations.Broken(str(error))
    return await submit(caller, body.model_id, body.seq_id, step)


@router.post("/save_weights")
async def save_weights(body: bodies.SaveWeights, caller: Asks) -> dict[str, Any]:
    save = operations.SaveWeights(body.path, body.ttl_seconds, body.overwrite, body.user_metadata)
    return await submit(caller, body.model_id, body.seq_id, save)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: bodies.SaveForSampler, caller: Asks) -> dict[str, Any]:
    save = operations.SaveForSampler(
        body.path, body.sampling_session_seq_id, body.kind, body.ttl_seconds, body.user_metadata
    )
    return await submit(caller, body.model_id, body.seq_id, save)


@router.post("/save_weights_external")
async def save_weights_external(body: bodies.SaveExternal, caller: Asks) -> dict[str, Any]:
    save = operations.SaveExternal(body.path, body.ttl_seconds, body.age_encryption_recipients or [])
    return await submit(caller, body.model_id, body.seq_id, save)


@router.post("/create_custom_loss")
async def create_custom_loss() -> None:
    raise Refused(
        400,
        "this server runs no loss that a client sends: TrainingClient.forward_backward_custom runs it in the client",
    )
