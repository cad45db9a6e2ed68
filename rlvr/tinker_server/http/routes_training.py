"""Routes of training runs: create, load, forward_backward, custom losses, and one for each operation that has a `route`
(`backend/runs/run_operations.py`): optim_step, save. Each response is the id of a future.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from rlvr.tinker_server.backend.runs.run_operations import OPERATIONS, ForwardBackward, RejectedOperation, RunOperation
from rlvr.tinker_server.http.dependencies import CallerDep, JsonRoute
from rlvr.tinker_server.protocol import schemas
from rlvr.tinker_server.protocol.errors import StatusError, UserError
from rlvr.tinker_server.protocol.wire import PROTOBUF, BadRequest, parse_forward_backward

router = APIRouter(route_class=JsonRoute)


@router.post("/create_model")
async def create_model(body: schemas.CreateModelRequest, caller: CallerDep) -> dict[str, Any]:
    lora = None if body.lora_config is None else body.lora_config.model_dump()
    request_id = await caller.call(
        caller.backend.runs.create_model,
        body.session_id,
        body.model_seq_id,
        body.base_model,
        lora,
        body.user_metadata,
        body.model_role,
    )
    return {"request_id": request_id, "model_id": f"{body.session_id}:train:{body.model_seq_id}"}


@router.post("/load_weights")
async def load_weights(body: schemas.LoadWeightsRequest, caller: CallerDep) -> dict[str, Any]:
    fields = body.model_dump(exclude={"optimizer_config", "weights_access_token"})
    request_id = await caller.call(caller.backend.runs.load_weights, **fields)
    return {"request_id": request_id, "model_id": body.model_id or f"{body.session_id}:train:{body.model_seq_id}"}


@router.post("/get_info")
async def get_info(body: schemas.GetInfoRequest, caller: CallerDep) -> dict[str, Any]:
    return await caller.call(caller.backend.queries.model_info, body.model_id)


@router.post("/forward_backward")
async def forward_backward(caller: CallerDep) -> dict[str, Any]:
    headers = caller.request.headers
    if PROTOBUF not in headers.get("content-type", ""):
        raise StatusError(
            415, f"forward_backward takes {PROTOBUF} (tinker SDK {schemas.SDK_VERSION}); update the client's SDK"
        )
    raw, encoding = await caller.request.body(), headers.get("content-encoding", "")

    def read_and_submit(owner: str) -> dict[str, Any]:
        try:
            parsed = parse_forward_backward(raw, encoding, caller.wire)
        except BadRequest as error:
            if error.model_id is None or error.seq_id is None:
                raise
            # It uses up its seq_id, or every later request would wait for it.
            model_id, seq_id, operation = error.model_id, error.seq_id, RejectedOperation(str(error))
        else:
            model_id, seq_id = parsed.model_id, parsed.seq_id
            operation = ForwardBackward(parsed.data, parsed.loss_fn, parsed.config, parsed.forward_only, raw, encoding)
        return {"request_id": caller.backend.runs.submit(owner, model_id, seq_id, operation), "model_id": model_id}

    return await caller.call(read_and_submit)


@router.post("/create_custom_loss")
async def create_custom_loss(body: schemas.CreateCustomLossRequest, caller: CallerDep) -> dict[str, Any]:
    request_id = await caller.call(
        caller.backend.losses.create,
        body.session_id,
        body.custom_loss_seq_id,
        body.name,
        body.inputs,
        body.graph,
    )
    return {"request_id": request_id}


def _add_route(operation: type[RunOperation]) -> None:
    """Add the route of an operation."""

    async def submit(body: Any, caller: CallerDep) -> dict[str, Any]:
        try:
            asked = operation.from_body(body)
        except UserError as error:  # it uses up its seq_id, or every later request would wait for it
            asked = RejectedOperation(str(error))
        request_id = await caller.call(caller.backend.runs.submit, body.model_id, body.seq_id, asked)
        return {"request_id": request_id, "model_id": body.model_id}

    submit.__annotations__ = {"body": operation.body, "caller": CallerDep, "return": dict[str, Any]}
    router.add_api_route(f"/{operation.route}", submit, methods=["POST"], name=operation.route)


for _operation in OPERATIONS.values():
    if _operation.route:
        _add_route(_operation)
