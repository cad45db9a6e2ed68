"""Sampling sessions, samples, and the answers to everything that takes time.

Exercised by tests/test_tinker_sdk.py and tests/test_tinker_http.py.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from rlvr.service.tinker_api import bodies
from rlvr.service.tinker_api.boundary import Refused
from rlvr.service.tinker_api.caller import Asks, Caller
from rlvr.service.tinker_api.errors import UserError
from rlvr.service.tinker_api.logs import LOGGER
from rlvr.service.tinker_api.promises import Failed, Json, Outcome, Pending, Proto
from rlvr.service.tinker_api.routes_training import PROTOBUF

router = APIRouter()
INLINE = 1 << 20  # bytes; a client may ask for the size of a larger answer first


@router.post("/create_sampling_session")
async def create_sampling_session(body: bodies.CreateSampler, caller: Asks) -> dict[str, str]:
    sampler = await caller.ask(
        caller.core.create_sampler, body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
    )
    return {"type": "create_sampling_session", "sampling_session_id": sampler}


@router.get("/samplers/{sampler_id}")
async def sampler(sampler_id: str, caller: Asks) -> dict[str, Any]:
    return await caller.ask(caller.core.sampler, sampler_id)


@router.post("/asample")
async def sample(body: bodies.Sample, caller: Asks) -> dict[str, Any]:
    session, seq = body.session()
    wants = {
        "prompt_logprobs": bool(body.prompt_logprobs),
        "topk_prompt": body.topk_prompt_logprobs,
        "topk_sample": body.topk_sample_logprobs,
    }
    request_id, sequences = await caller.ask(
        caller.core.sample, session, seq, body.prompt, body.num_samples, body.sampling_params.params(), wants
    )
    return {"request_id": request_id, "sample_sequence_ids": sequences}


@router.post("/retrieve_future")
async def retrieve_future(body: bodies.Retrieve, caller: Asks) -> Response:
    found = await caller.waiting.hold(caller.core.result(caller.owner, body.request_id, caller.waiting.poll_seconds))
    return answer(caller, body, found or Pending())


def answer(caller: Caller, body: bodies.Retrieve, outcome: Outcome | Pending) -> Response:
    match outcome:
        case Pending(state, reason):
            again = {"type": "try_again", "request_id": body.request_id, "queue_state": state}
            # 408 with this body is the quiet way to say "ask again": at a 200 the SDK prints a warning each time.
            return JSONResponse(again | ({"queue_state_reason": reason} if reason else {}), 408)
        case Failed(error, category):
            fields = {"request_id": caller.request.state.request_id, "owner": caller.owner}
            LOGGER.warning("an operation failed", extra={**fields, "future": body.request_id, "reason": error[:2_000]})
            return JSONResponse({"error": error, "category": category})
        case Json(value):
            return JSONResponse(value)
        case Proto(encoded):
            accepted = caller.request.headers.get("accept", "*/*")
            if PROTOBUF not in accepted and "*/*" not in accepted:
                raise Refused(406, f"this result is {PROTOBUF} (tinker SDK {bodies.SPOKEN}); update the client's SDK")
            if body.allow_metadata_only and len(encoded) > INLINE:
                return JSONResponse({"status": "complete_metadata", "response_payload_size": len(encoded)})
            return Response(encoded, media_type=PROTOBUF)


@router.post("/retrieve_futures")
async def retrieve_futures(body: bodies.RetrieveMany, caller: Asks) -> dict[str, Any]:
    """What of one sampling session is finished since a cursor, for clients that wait for many requests at once."""
    target = body.target
    longest = caller.waiting.poll_seconds
    timeout = longest if body.timeout is None else min(max(body.timeout, 0.0), longest)
    found = await caller.waiting.hold(
        caller.core.completions(
            caller.owner, target.sampling_session_id, target.cloned_sampler_id, body.prev_cursor,
            body.retrieved_request_ids, timeout,
        )
    )  # fmt: skip
    cursor, finished = found or (body.prev_cursor, [])
    return {
        "cursor": cursor,
        "completions": [
            {"state": "failed", "request_id": request_id}
            if failed
            else {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}
            for request_id, failed, size in finished
        ],
    }


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: bodies.RequestId, caller: Asks) -> Response:
    await caller.ask(caller.core.cancel, body.request_id)
    return Response(status_code=204)


@router.post("/join_sampling_session")
async def join_sampling_session(body: bodies.JoinSampler) -> None:
    raise UserError("join_sampling_session is not offered here; a copied client chooses its own place (the default)")
