"""Routes of sessions, and of what a client asks before it has one: flags, capabilities, health, identity."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from rlvr.tinker_server.backend.quotas import ANY_KEY, KEY_PREFIX
from rlvr.tinker_server.http.dependencies import CallerDep, JsonRoute, json_response, without_non_finite
from rlvr.tinker_server.protocol import schemas
from rlvr.tinker_server.protocol.errors import Forbidden, StatusError, UserError
from rlvr.web.auth import LOCAL_OWNER

router = APIRouter(route_class=JsonRoute)

# Flags of the SDK; others keep the SDK's defaults.
CLIENT_CONFIG: dict[str, Any] = {
    "sample_use_retrieve_futures": False,  # one poll per sampling session: supported, but a round trip slower
    "parallel_fwdbwd_chunks": True,
    "custom_loss_server_side": True,  # a graph of known operations, never a client's code
}
DYNAMIC_CONFIG: dict[str, Any] = {"sample_cancel_enabled": True}


@router.get("/healthz")
async def health(caller: CallerDep) -> dict[str, str]:
    if not caller.backend.is_alive:
        raise StatusError(503, "an engine's thread has ended; the log says why")
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(caller: CallerDep) -> dict[str, Any]:
    return {"supported_models": caller.backend.queries.capabilities()}


@router.post("/client/config")
async def client_config(body: schemas.IgnoredBody) -> dict[str, Any]:
    return CLIENT_CONFIG


@router.post("/client/dynamic_config")
async def dynamic_config(body: schemas.IgnoredBody) -> dict[str, Any]:
    return DYNAMIC_CONFIG


@router.post("/auth/token")
async def token() -> None:
    raise StatusError(403, "this server takes API keys (X-API-Key), and gives out no tokens")


@router.get("/auth/apikey/me")
async def describe_key(caller: CallerDep) -> dict[str, Any]:
    """What `tinker auth login` asks about a key before it stores it."""
    if not caller.request.headers.get("x-api-key", "").startswith(KEY_PREFIX):
        raise UserError(
            f"the tinker SDK accepts only keys that begin with {KEY_PREFIX!r}; this server needs none, so any will do: "
            f"{ANY_KEY}"
        )
    number = int(caller.owner.removeprefix("key-"), 16) if caller.owner != LOCAL_OWNER else 0
    return {
        "key_id": number, "name": caller.owner, "note": "a key of this server is a line of its key file",
        "details": {"org_details": {"name": "rlvr serve engine"}, "user_details": {"email": caller.owner}},
    }  # fmt: skip


@router.delete("/auth/apikey/me")
async def delete_key() -> None:
    raise Forbidden(
        "this server cannot delete an API key: take its line out of the key file and start the server again"
    )


@router.post("/create_session")
async def create_session(body: schemas.CreateSessionRequest, caller: CallerDep) -> dict[str, Any]:
    session = await caller.call(caller.backend.sessions.create, **body.model_dump())
    return {"type": "create_session", "session_id": session}


@router.post("/session_heartbeat")
async def heartbeat(body: schemas.HeartbeatRequest, caller: CallerDep) -> dict[str, str]:
    await caller.call(caller.backend.sessions.heartbeat, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, body: schemas.FinishSessionRequest, caller: CallerDep) -> Response:
    await caller.call(caller.backend.finish_session, session_id, body.reason.type)
    return Response(status_code=204)


@router.get("/sessions")
async def list_sessions(caller: CallerDep, limit: int = 20, offset: int = 0) -> dict[str, Any]:
    return {"sessions": await caller.call(caller.backend.queries.sessions, limit, offset)}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, caller: CallerDep) -> Response:
    # Written on a thread too: a session may have a hundred thousand runs and sampling sessions.
    query = caller.backend.queries.session
    return await caller.call(lambda owner: json_response(without_non_finite(query(owner, session_id))))


@router.post("/telemetry")
async def telemetry(body: schemas.IgnoredBody) -> dict[str, str]:
    """Accepted, neither stored nor forwarded."""
    return {"status": "accepted"}


@router.get("/whoami")
async def whoami(caller: CallerDep) -> dict[str, str]:
    return {"user_urn": f"urn:rlvr:owner:{caller.owner}", "org_urn": "urn:rlvr:server"}
