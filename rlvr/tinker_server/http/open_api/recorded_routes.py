"""Rollouts that agents play at addresses of their own, whose calls are recorded in the server's state folder.

    POST   /rollouts                {"model"?, "group"?}  ->  {"id", "url", "openai_base_url", "anthropic_base_url"}
    GET    /rollouts/ID             the recording, JSON lines, to its owner alone
    DELETE /rollouts/ID             close it, and delete the recording
    POST   /r/TOKEN/v1/...          a call of the model, in one of three dialects
    POST   /r/TOKEN/reward, /close

`/rollouts` needs the caller's key. An address needs none: it is the permission, until its rollout is closed, expires
(`limits.rollout_seconds`) or the server stops, and what is sampled there counts as its owner's.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from rlvr.chat.conversation import Conversation
from rlvr.chat.dialects.forms import ApiDialect, ChatAnswer, DialectError
from rlvr.chat.dialects.registry import DIALECTS
from rlvr.recorder.app import parse_body, read_reward, write_answer, write_error
from rlvr.recorder.open_rollouts import OpenRollout, OpenRollouts, PendingCall
from rlvr.recorder.recording import append_line, make_call, make_head, make_reward
from rlvr.tinker_server.http.dependencies import Caller, CallerDep, JsonRoute
from rlvr.tinker_server.http.open_api.chat_routes import sample_call
from rlvr.tinker_server.http.open_api.open_routes import served_text
from rlvr.tinker_server.http.open_api.served_text import ServedText
from rlvr.tinker_server.protocol.errors import Busy, StatusError, TinkerServerError
from rlvr.tinker_server.protocol.server_limits import ServerLimits

if TYPE_CHECKING:
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend

Json = dict[str, Any]
_ID = re.compile(r"[0-9a-f-]{10,40}")


class RolloutRequest(BaseModel):
    model: str = ""
    group: str = Field("", max_length=500)


@dataclass(eq=False)
class ServedRollout:
    """A rollout of `owner` that is open: of `model`, recorded at `path`."""

    id: str
    owner: str
    model: str
    group: str
    path: Path
    expires: float
    text: ServedText
    conversation: Conversation
    rollout: OpenRollout
    lock: threading.Lock = field(default_factory=threading.Lock)


class ServedRollouts:
    """The open rollouts of all owners, and the folder of their recordings."""

    def __init__(self, backend: TinkerBackend) -> None:
        self._backend = backend
        self._rollouts = OpenRollouts()
        self._open: dict[str, ServedRollout] = {}  # by token
        self._bytes: dict[str, int] = {}  # of the recordings of an owner
        self._lock = threading.Lock()

    @property
    def _folder(self) -> Path:
        return self._backend.state / "rollouts"

    @property
    def _limits(self) -> ServerLimits:
        return self._backend.limits

    def open(self, owner: str, model: str, group: str, text: ServedText) -> ServedRollout:
        with self._lock:
            self._close_expired()
            count = sum(one.owner == owner for one in self._open.values())
            if count >= self._limits.owner_rollouts:
                raise Busy(f"{count:,} of your rollouts are open (limits.owner_rollouts); close some")
            folder = self._folder / owner
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._bytes[owner] = sum(file.stat().st_size for file in folder.glob("*.jsonl"))
            self.check_bytes(owner)
            name = f"{time.time_ns():016x}-{secrets.token_hex(4)}"
            path, expires = folder / f"{name}.jsonl", time.time() + self._limits.rollout_seconds
            rollout = self._rollouts.open(lambda call: None)
            made = ServedRollout(name, owner, model, group, path, expires, text, Conversation(text.template), rollout)
            self._bytes[owner] += append_line(path, make_head(model))
            self._open[rollout.token] = made
            return made

    def check_bytes(self, owner: str) -> None:
        used, most = self._bytes[owner], self._limits.owner_recorded_bytes
        if used >= most:
            raise StatusError(
                413, f"your recordings have {used:,} bytes, at most {most:,} (limits.owner_recorded_bytes); delete some"
            )

    def write(self, one: ServedRollout, line: Json) -> None:
        """On disk when this returns. Nothing is written of a rollout whose recording was deleted."""
        with one.lock:
            size = append_line(one.path, line) if one.path.exists() else 0
        with self._lock:
            self._bytes[one.owner] += size

    def _close_expired(self) -> None:
        for one in [one for one in self._open.values() if one.expires <= time.time()]:
            self._drop(one)

    def _drop(self, one: ServedRollout) -> None:
        self._open.pop(one.rollout.token, None)
        one.rollout.close()

    def close(self, one: ServedRollout) -> None:
        with self._lock:
            self._drop(one)

    def find(self, token: str) -> ServedRollout | None:
        with self._lock:
            found = self._open.get(token)
            if found is not None and found.expires <= time.time():
                self._drop(found)
                return None
            return found

    def owner_of(self, path: str) -> str:
        """As whose a request to an address of a rollout counts; '' for an address that is none."""
        found = self.find(path.removeprefix("/r/").partition("/")[0])
        return "" if found is None else found.owner

    def recording(self, owner: str, name: str) -> Path:
        path = self._folder / owner / f"{name}.jsonl"
        if not _ID.fullmatch(name) or not path.exists():
            raise StatusError(404, f"you have no rollout {name[:60]!r}")
        return path

    def read(self, owner: str, name: str) -> bytes:
        return self.recording(owner, name).read_bytes()

    def delete(self, owner: str, name: str) -> None:
        path = self.recording(owner, name)
        with self._lock:
            found = [one for one in self._open.values() if one.path == path]
            for one in found:
                self._drop(one)
        with found[0].lock if found else nullcontext():
            size = path.stat().st_size
            path.unlink()
        with self._lock:
            self._bytes[owner] = self._bytes.get(owner, size) - size


router = APIRouter(route_class=JsonRoute)


def _rollouts(request: Request) -> ServedRollouts:
    return request.app.state.rollouts


@router.post("/rollouts")
async def open_rollout(body: RolloutRequest, caller: CallerDep) -> Json:
    served = _rollouts(caller.request)
    name = body.model or next(iter(caller.backend.engines))
    row = await caller.call(caller.backend.sampling.find_model, name)
    text = await caller.compute(served_text, caller, row)
    made = await caller.call(served.open, name, body.group, text)
    url = f"{str(caller.request.base_url).rstrip('/')}/r/{made.rollout.token}"
    addresses = {"url": url, "openai_base_url": f"{url}/v1", "anthropic_base_url": url}
    return {"id": made.id, "model": name, "expires": made.expires, **addresses}


@router.get("/rollouts/{name}")
async def read_rollout(name: str, caller: CallerDep) -> Response:
    raw = await caller.call(_rollouts(caller.request).read, name)
    return Response(raw, media_type="application/x-ndjson")


@router.delete("/rollouts/{name}")
async def delete_rollout(name: str, caller: CallerDep) -> Json:
    await caller.call(_rollouts(caller.request).delete, name)
    return {"id": name}


def _find(request: Request) -> ServedRollout:
    if (found := _rollouts(request).find(request.path_params["token"])) is None:
        raise StatusError(410, "no open rollout has this address; open one first (POST /rollouts)")
    return found


@router.post("/r/{token}/reward")
async def reward(request: Request, caller: CallerDep) -> Response:
    try:
        one, body = _find(request), parse_body(await request.body())
        given = read_reward(body)
        one.rollout.report(given)
        line = make_reward(one.id, given.reward, given.source, given.call)
        await caller.call(lambda owner: _rollouts(request).write(one, line))
    except DialectError as error:
        return JSONResponse({"error": {"message": str(error)}}, error.status)
    return JSONResponse({"id": one.id, "reward": given.reward, **({"call": given.call} if given.call else {})})


@router.post("/r/{token}/close")
async def close(request: Request) -> Json:
    one = _find(request)
    _rollouts(request).close(one)
    return {"id": one.id}


@router.get("/r/{token}/v1/models")
async def rollout_models(request: Request) -> Json:
    card = {"id": _find(request).model, "object": "model", "created": 0, "owned_by": "rlvr"}
    return {"object": "list", "data": [card]}


async def _answer(request: Request, caller: Caller, dialect: ApiDialect) -> Response:
    try:
        one = _find(request)
        body = await caller.compute(parse_body, await request.body())
        pending = one.rollout.offer(await caller.compute(dialect.read, body), dialect.name, body)
        try:
            pending.answer(await _sample(one, pending, caller))
        finally:
            pending.refuse(DialectError("the call was not answered"))
        answers = pending.answers.result()  # DialectError if the rollout was closed meanwhile
    except (DialectError, TinkerServerError, ValueError) as error:
        return write_error(dialect, error)
    return await caller.compute(write_answer, dialect, pending.call, answers, pending.id)


async def _sample(one: ServedRollout, pending: PendingCall, caller: Caller) -> list[ChatAnswer]:
    """Sample a call, and write it down."""
    served, call, began = _rollouts(caller.request), pending.call, time.time()

    def encode() -> list[int]:
        with one.text.lock, one.lock:
            return one.conversation.encode(call)

    served.check_bytes(one.owner)
    row = await caller.call(caller.backend.sampling.find_model, one.model)
    prompt = await caller.compute(encode)
    response = await sample_call(caller, row, call, prompt, one.text.template)

    def read_answers() -> list[ChatAnswer]:
        with one.text.lock, one.lock:
            read = [one.conversation.read(call, prompt, sequence) for sequence in response.sequences]
            for answer in read:
                one.conversation.record(call, answer)
            return read

    answers = await caller.compute(read_answers)
    line = make_call(pending, one.id, one.group, response.fingerprint, answers, began)
    if not pending.answers.done():
        await caller.call(lambda owner: served.write(one, line.to_json()))
    return answers


def _add_dialect(dialect: ApiDialect) -> None:
    @router.post(f"/r/{{token}}{dialect.path}", name=dialect.name)
    async def handle(request: Request, caller: CallerDep) -> Response:
        return await _answer(request, caller, dialect)


for _dialect in DIALECTS.values():
    _add_dialect(_dialect)
