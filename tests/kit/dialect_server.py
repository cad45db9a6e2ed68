"""A model behind all dialects on a port of this machine, which says what a test scripts, for tests with real SDKs.

    with serving_dialects([say("Hello."), use_tool("add", {"a": 1})]) as model:
        client = openai.OpenAI(base_url=model.openai_url, api_key="any")

Every call is read, and every answer written, by the dialects themselves. `model.calls` are the calls in order, each
behind the conversation of the answer that it names as `previous`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlvr.chat.dialects.forms import ApiDialect, ChatAnswer, ChatRequest, DialectError, Finish, Json
from rlvr.chat.dialects.registry import DIALECTS
from tests.kit.tinker_server import serving

CREATED = 1_700_000_000
_numbers = itertools.count(1)


def make_tool_call(name: str, arguments: Json) -> Json:
    return {
        "id": f"call{next(_numbers):05d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def make_answer(message: Json, finish: Finish | None = None, stop: str | None = None) -> ChatAnswer:
    """An answer of three tokens to a prompt of four."""
    ended: Finish = finish or ("tool_calls" if message.get("tool_calls") else "stop")
    return ChatAnswer(message, ended, [1, 2, 3, 4], [5, 6, 7], [-0.5, -1.0, 0.0], ["a", "é", ""], stop)


def say(text: str, finish: Finish | None = None, stop: str | None = None) -> ChatAnswer:
    return make_answer({"role": "assistant", "content": text}, finish, stop)


def use_tools(*calls: tuple[str, Json], text: str = "") -> ChatAnswer:
    made = [make_tool_call(name, arguments) for name, arguments in calls]
    return make_answer({"role": "assistant", "content": text, "tool_calls": made})


@dataclass
class ScriptedModel:
    """`answers` are given in order, as many to a call as it asks for."""

    answers: list[ChatAnswer]
    port: int = 0
    calls: list[ChatRequest] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    _answered: dict[str, tuple[ChatRequest, Json]] = field(default_factory=dict)

    @property
    def openai_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def anthropic_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, dialect: ApiDialect, body: Any) -> tuple[str, ChatRequest, Sequence[ChatAnswer]]:
        call = dialect.read(body)
        if call.previous is not None:
            if call.previous not in self._answered:
                raise DialectError(f"no answer has the id {call.previous!r}", "previous_response_id", 404)
            call = call.continue_from(*self._answered[call.previous])
        if len(self.answers) < call.count:
            raise DialectError("the script has ended", status=500)
        given, self.answers = self.answers[: call.count], self.answers[call.count :]
        id = f"resp_{len(self.calls)}"
        self.calls.append(call)
        self._answered[id] = (call, given[0].message)
        return id, call, given


def _make_endpoint(model: ScriptedModel, dialect: ApiDialect) -> Any:
    async def answer(request: Request) -> Response:
        model.headers.append(request.headers)
        try:
            id, call, given = model.answer(dialect, json.loads(await request.body()))
        except DialectError as error:
            return JSONResponse(dialect.write_error(str(error), error.status, error.param), error.status)
        if call.stream:
            events = [event.encode() for event in dialect.write_events(call, given, id, CREATED)]
            return StreamingResponse(iter(events), media_type="text/event-stream")
        return JSONResponse(dialect.write(call, given, id, CREATED))

    return answer


@contextmanager
def serving_dialects(answers: Iterable[ChatAnswer]) -> Iterator[ScriptedModel]:
    model = ScriptedModel(list(answers))
    routes = [Route(path, _make_endpoint(model, dialect), methods=["POST"]) for path, dialect in DIALECTS.items()]
    with serving(Starlette(routes=routes)) as model.port:
        yield model
