"""Routes of training runs, checkpoints and downloads, and calls that are refused by name."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool

from rlvr.tinker_server.backend.storage.session_search import SessionFilter, read_cursor
from rlvr.tinker_server.http.dependencies import Caller, CallerDep, JsonRoute, json_response, without_non_finite
from rlvr.tinker_server.http.tinker_middleware import SIGNED_PREFIX
from rlvr.tinker_server.protocol import schemas
from rlvr.tinker_server.protocol.errors import Forbidden, NotFound, StatusError, UserError

router = APIRouter(route_class=JsonRoute)
SECRET = secrets.token_bytes(32)  # new at every start, which ends earlier addresses
UNSUPPORTED_CALLS = {
    "audit": ("GET", "an audit log"),
    "billing/usage/events": ("GET", "billing (nothing is charged; GET /metrics counts tokens)"),
    "sessions/{session_id}/trace_export": ("GET", "traces of sessions"),
}


@router.get("/training_runs")
async def training_runs(
    caller: CallerDep, limit: int = 20, offset: int = 0, access_scope: str = "owned", project_id: str | None = None
) -> Response:
    return await _list(caller, caller.backend.queries.training_runs, limit, offset, project_id)


@router.get("/training_runs/{run}")
async def training_run(run: str, caller: CallerDep, access_scope: str = "owned") -> dict[str, Any]:
    return await caller.call(caller.backend.queries.training_run, run)


@router.delete("/training_runs/{run}", status_code=204)
async def delete_training_run(run: str, caller: CallerDep) -> Response:
    """Delete a run but its named checkpoints, to make room. (The SDK has no call for it.)"""
    await caller.call(caller.backend.runs.delete, run)
    return Response(status_code=204)


@router.get("/training_runs/{run}/checkpoints")
async def run_checkpoints(run: str, caller: CallerDep) -> Response:
    return await _list(caller, caller.backend.queries.checkpoints, run, 1_000)


@router.get("/checkpoints")
async def checkpoints(
    caller: CallerDep, limit: int = 100, offset: int = 0, access_scope: str = "owned", project_id: str | None = None
) -> Response:
    return await _list(caller, caller.backend.queries.checkpoints, None, limit, offset, project_id)


@router.delete("/training_runs/{run}/checkpoints/{kind}/{name}", status_code=204)
async def delete(run: str, kind: str, name: str, caller: CallerDep) -> Response:
    await caller.call(caller.backend.checkpoints.delete, f"tinker://{run}/{kind}/{name}")
    return Response(status_code=204)


@router.post("/training_runs/{run}/checkpoints/{kind}/{name}/publish", status_code=204)
async def publish(run: str, kind: str, name: str, caller: CallerDep) -> Response:
    await caller.call(caller.backend.checkpoints.publish, f"tinker://{run}/{kind}/{name}", True)
    return Response(status_code=204)


@router.delete("/training_runs/{run}/checkpoints/{kind}/{name}/publish", status_code=204)
async def unpublish(run: str, kind: str, name: str, caller: CallerDep) -> Response:
    await caller.call(caller.backend.checkpoints.publish, f"tinker://{run}/{kind}/{name}", False)
    return Response(status_code=204)


@router.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(run: str, kind: str, name: str, body: schemas.SetTtlRequest, caller: CallerDep) -> Response:
    await caller.call(caller.backend.checkpoints.set_ttl, f"tinker://{run}/{kind}/{name}", body.ttl_seconds)
    return Response(status_code=204)


@router.post("/copy_weights")
async def copy_weights(body: schemas.CopyWeightsRequest, caller: CallerDep) -> dict[str, str]:
    headers = caller.request.headers
    if headers.get("x-tinker-weights-access-token") is not None:
        raise UserError(f"weights_access_token: {schemas.NO_ACCESS_TOKENS}")
    fields = body.model_dump(exclude={"source_path", "weights_access_token"})
    key = headers.get("x-idempotency-key")
    path = await caller.call(caller.backend.copies.copy, body.source_path, **fields, request_key=key)
    return {"tinker_path": path}


@router.post("/sessions/search")
async def search_sessions(body: schemas.SearchSessionsRequest, caller: CallerDep) -> Response:
    cursor, wanted = body.cursor, body.model_dump(exclude={"owner", "statuses", "cursor"})
    filters = SessionFilter(
        **wanted,
        owner_urns=body.owner.owner_urns,
        statuses=[(one.type, one.reasons) for one in body.statuses] if body.statuses else None,
        after=read_cursor(cursor.last_created_at, cursor.last_session_id) if cursor else None,
    )
    return await _list(caller, caller.backend.searches.search, filters)


@router.put("/sessions/{session_id}/project", status_code=204)
async def set_project(session_id: str, body: schemas.SetProjectRequest, caller: CallerDep) -> Response:
    await caller.call(caller.backend.sessions.set_project, session_id, body.project_id)
    return Response(status_code=204)


@router.get("/billing/usage/checkpoints/current")
async def checkpoint_storage(caller: CallerDep, project_id: str | None = None) -> Response:
    """The bytes that checkpoints take, without prices."""
    return await _list(caller, caller.backend.searches.storage, project_id)


@router.post("/weights_info")
async def weights_info(body: schemas.WeightsInfoRequest, caller: CallerDep) -> dict[str, Any]:
    return await caller.call(caller.backend.queries.weights_info, body.tinker_path)


@router.get("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(run: str, kind: str, name: str, caller: CallerDep) -> dict[str, Any]:
    """An address per file, valid for `url_seconds` without a key: it alone permits the download."""
    if kind != "external_weights":
        raise NotFound(f"tinker://{run}/{kind}/{name} has no files to download; save_weights_external makes some")
    files = await caller.call(caller.backend.queries.external_files, run, name)
    until, base = int(time.time() + caller.limits.url_seconds), str(caller.request.base_url).rstrip("/")
    urls: dict[str, str] = {}
    for file in files:
        signed = sign_download(caller.owner, run, name, file, until)
        place = f"{until}/{caller.owner}/{quote(run)}/{quote(name)}/{quote(file)}"
        urls[file] = f"{base}{SIGNED_PREFIX}{signed}/{place}"
    return {"urls": urls, "expires": datetime.fromtimestamp(until, UTC).isoformat()}


@router.get("/external/{signed}/{until}/{owner}/{run}/{name}/{file:path}")
async def external_file(
    signed: str, until: int, owner: str, run: str, name: str, file: str, caller: CallerDep
) -> FileResponse:
    expected = sign_download(owner, run, name, file, until)
    if not hmac.compare_digest(signed.encode(), expected.encode()) or until < time.time():
        raise Forbidden("this address has expired; ask for external_weights_urls again")
    files: dict[str, Path] = await run_in_threadpool(caller.backend.queries.external_files, owner, run, name)
    found = files.get(file)
    if found is None:
        raise NotFound(f"there is no file {file[:200]!r}")
    return FileResponse(found)


async def _list(caller: Caller, query: Callable[..., Any], *args: Any) -> Response:
    """A page of a list, read and written on a thread: it may have a thousand rows with metadata."""
    return await caller.call(lambda owner: json_response(without_non_finite(query(owner, *args))))


def sign_download(owner: str, run: str, name: str, file: str, until: int) -> str:
    message = "\n".join((owner, run, name, file, str(until))).encode()
    return hmac.new(SECRET, message, hashlib.sha256).hexdigest()


def _refuse(path: str, method: str, what: str) -> None:
    async def refuse() -> None:
        raise StatusError(400, f"this server does not support {what}")

    router.add_api_route(f"/{path}", refuse, methods=[method], name=f"refused {path}", include_in_schema=False)


for _path, (_method, _what) in UNSUPPORTED_CALLS.items():
    _refuse(_path, _method, _what)
