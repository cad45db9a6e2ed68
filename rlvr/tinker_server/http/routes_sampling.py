"""Routes of sampling sessions, samples, and results."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from rlvr.tinker_server.backend.request_futures import (
    FinishedSamples,
    JsonResult,
    LiveOutcome,
    Pending,
    ProtoResult,
    RequestFailure,
    SampleResult,
    lost_error,
)
from rlvr.tinker_server.http.dependencies import Caller, CallerDep, JsonRoute, json_response
from rlvr.tinker_server.protocol import schemas
from rlvr.tinker_server.protocol.errors import StatusError, UserError
from rlvr.tinker_server.protocol.wire import PROTOBUF
from rlvr.web.logs import get_logger

router = APIRouter(route_class=JsonRoute)
log = get_logger("rlvr.tinker_server.http")


@router.post("/create_sampling_session")
async def create_sampling_session(body: schemas.CreateSamplerRequest, caller: CallerDep) -> dict[str, str]:
    sampler = await caller.call(
        caller.backend.sampling.create_sampler,
        body.session_id,
        body.sampling_session_seq_id,
        body.base_model,
        body.model_path,
    )
    return {"type": "create_sampling_session", "sampling_session_id": sampler}


@router.get("/samplers/{sampler_id}")
async def sampler(sampler_id: str, caller: CallerDep) -> dict[str, Any]:
    return await caller.call(caller.backend.sampling.describe, sampler_id)


@router.post("/asample")
async def sample(body: schemas.SampleRequest, caller: CallerDep) -> dict[str, Any]:
    session, seq = body.session()
    options = {
        "prompt_logprobs": bool(body.prompt_logprobs),
        "topk_prompt": body.topk_prompt_logprobs,
        "topk_sample": body.topk_sample_logprobs,
        "prompt_last": body.prompt_logprobs_last_n,
        "prompt_alternatives": body.prompt_alt_tokens_k,
    }
    request_id, sequences = await caller.call(
        caller.backend.sampling.sample,
        session,
        seq,
        body.prompt,
        body.num_samples,
        body.sampling_params.params(),
        options,
        body.target_prompt_logprobs,
    )
    return {"request_id": request_id, "sample_sequence_ids": sequences}


@router.post("/retrieve_future")
async def retrieve_future(body: schemas.RetrieveFutureRequest, caller: CallerDep) -> Response:
    answer = caller.backend.result(caller.owner, body.request_id, caller.polls.poll_seconds)
    result = await caller.polls.hold(caller.owner, answer)
    return result_response(caller, body, result or Pending())


def result_response(caller: Caller, body: schemas.RetrieveFutureRequest, outcome: LiveOutcome | Pending) -> Response:
    match outcome:
        case Pending(state, reason):
            again = {"type": "try_again", "request_id": body.request_id, "queue_state": state}
            # 408 with this body makes the SDK ask again quietly: at a 200 it prints a warning each time.
            return JSONResponse(again | ({"queue_state_reason": reason} if reason else {}), 408)
        case RequestFailure(error, category):
            log.warning("an operation failed", owner=caller.owner, future=body.request_id, reason=error[:2_000])
            return JSONResponse({"error": error, "category": category})
        case JsonResult(value):
            return JSONResponse(value)
        case SampleResult():
            raise lost_error(body.request_id)  # of an open endpoint, which returns it itself
        case ProtoResult(encoded):
            accepted = caller.request.headers.get("accept", "*/*")
            if PROTOBUF not in accepted and "*/*" not in accepted:
                raise StatusError(
                    406, f"this result is {PROTOBUF} (tinker SDK {schemas.SDK_VERSION}); update the client's SDK"
                )
            if body.allow_metadata_only and len(encoded) > caller.limits.inline_bytes:
                return JSONResponse({"status": "complete_metadata", "response_payload_size": len(encoded)})
            return Response(encoded, media_type=PROTOBUF)


@router.post("/retrieve_futures")
async def retrieve_futures(body: schemas.RetrieveFuturesRequest, caller: CallerDep) -> Response:
    """The samples of one sampling session that finished since a cursor, for clients that wait for many."""
    target = body.target
    longest = caller.polls.poll_seconds
    timeout = longest if body.timeout is None else min(max(body.timeout, 0.0), longest)
    result = await caller.polls.hold(
        caller.owner,
        caller.backend.sampling.wait_for_any(
            caller.owner, target.sampling_session_id, target.cloned_sampler_id, body.prev_cursor,
            body.retrieved_request_ids, timeout,
        ),
    )  # fmt: skip
    finished = result or FinishedSamples(body.prev_cursor, [])
    return await caller.call(lambda owner: json_response(_describe_finished(finished)))


def _describe_finished(finished: FinishedSamples) -> dict[str, Any]:
    return {
        "cursor": finished.cursor,
        "completions": [
            {"state": "failed", "request_id": sample.request_id}
            if sample.is_failed
            else {
                "state": "finished", "request_id": sample.request_id,
                "response_payload_uncompressed_size": sample.size,
            }
            for sample in finished.samples
        ],
    }  # fmt: skip


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: schemas.CancelFutureRequest, caller: CallerDep) -> Response:
    await caller.call(caller.backend.sampling.cancel, body.request_id)
    return Response(status_code=204)


@router.post("/join_sampling_session", include_in_schema=False)
async def join_sampling_session(body: schemas.JoinSamplerRequest) -> None:
    raise UserError("join_sampling_session is not supported; a copied client chooses its own number (the default)")
