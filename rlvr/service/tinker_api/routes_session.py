"""Sessions and what a client asks before it has one: flags, capabilities, health, who am I.

Exercised by tests/test_tinker_sdk.py and tests/test_tinker_http.py.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from rlvr.service.tinker_api import bodies
from rlvr.service.tinker_api.boundary import Refused
from rlvr.service.tinker_api.caller import Asks

router = APIRouter()

# Flags of the SDK; those that are not named keep the SDK's defaults.
CLIENT_CONFIG: dict[str, Any] = {
    "sample_use_retrieve_futures": False,  # one poll per sampling session: offered, and a round trip slower
    "parallel_fwdbwd_chunks": True,
    "custom_loss_server_side": False,  # a client's code is not run here
}
DYNAMIC_CONFIG: dict[str, Any] = {"sample_cancel_enabled": True}


@router.get("/healthz")
async def health(caller: Asks) -> dict[str, str]:
    if not caller.core.alive:
        raise Refused(503, "an engine's thread has ended; the log says why")
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(caller: Asks) -> dict[str, Any]:
    return {"supported_models": caller.core.capabilities()}


@router.post("/client/config")
async def client_config(body: bodies.Anything) -> dict[str, Any]:
    return CLIENT_CONFIG


@router.post("/client/dynamic_config")
async def dynamic_config(body: bodies.Anything) -> dict[str, Any]:
    return DYNAMIC_CONFIG


@router.post("/auth/token")
async def token() -> None:
    raise Refused(403, "this server takes API keys (X-API-Key), and gives out no tokens")


@router.post("/create_session")
async def create_session(body: bodies.CreateSession, caller: Asks) -> dict[str, Any]:
    session = await caller.ask(caller.core.create_session, **body.model_dump())
    return {"type": "create_session", "session_id": session}


@router.post("/session_heartbeat")
async def heartbeat(body: bodies.Heartbeat, caller: Asks) -> dict[str, str]:
    await caller.ask(caller.core.heartbeat, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, body: bodies.FinishSession, caller: Asks) -> Response:
    await caller.ask(caller.core.finish_session, session_id, body.reason.type)
    return Response(status_code=204)


@router.get("/sessions")
async def sessions(caller: Asks, limit: int = 20, offset: int = 0) -> dict[str, Any]:
    return {"sessions": await caller.ask(caller.core.sessions, limit, offset)}


@router.get("/sessions/{session_id}")
async def session(session_id: str, caller: Asks) -> dict[str, Any]:
    return await caller.ask(caller.core.session, session_id)


@router.post("/telemetry")
async def telemetry(body: bodies.Anything) -> dict[str, str]:
    """Accepted, and neither kept nor sent on."""
    return {"status": "accepted"}


@router.get("/whoami")
async def whoami(caller: Asks) -> dict[str, str]:
    return {"user_urn": f"urn:rlvr:owner:{caller.owner}", "org_urn": "urn:rlvr:server"}
