"""Routes that drop nothing of a request without a word: no unknown query parameter, no JSON key twice. Long bodies are
read off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from rlvr.core.fair_queue import current_owner
from rlvr.core.fair_slots import FairSlots
from rlvr.core.registry import did_you_mean
from rlvr.service.http.requests import MOST
from rlvr.service.http.service_middleware import OPEN_PATHS
from rlvr.web.errors import HttpProblem
from rlvr.web.json_bodies import has_more_parts

SMALL_BODY = 16 << 10  # bytes that are read in about a millisecond: not worth a thread
READERS = 2  # bodies that are read at once: every thread that computes slows the event loop


class StrictRequest(Request):
    """A request whose long JSON body is parsed and checked on a thread; `kind` is the model of the route's body."""

    def __init__(self, request: Request, kind: type[BaseModel] | None, readers: FairSlots) -> None:
        super().__init__(request.scope, request.receive)
        self._kind, self._readers = kind, readers

    async def json(self) -> Any:
        raw, kind = await self.body(), self._kind
        if len(raw) <= SMALL_BODY or kind is None:
            return parse_body(raw)
        return await self._readers.run(current_owner(), lambda: check_body(kind, parse_body(raw)))


def parse_body(raw: bytes) -> Any:
    if has_more_parts(raw, MOST, MOST):
        raise HttpProblem(422, "invalid", f"body: the body has more than {MOST:,} values", field="body")
    return json.loads(raw, object_pairs_hook=refuse_repeated_keys)


def check_body(kind: type[BaseModel], value: Any) -> BaseModel:
    """The model of a body, which FastAPI takes as it is; RequestValidationError as FastAPI raises it."""
    try:
        return kind.model_validate(value, from_attributes=True)  # as FastAPI does
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from error


def json_response(kind: type[BaseModel], value: Any) -> Response:
    """The response of a route whose response model is `kind`. Call it on a thread for a page of hundreds of rows:
    FastAPI checks and writes what a route returns on the event loop, and many may end in the same moment."""
    return Response(kind.model_validate(value).model_dump_json(by_alias=True), media_type="application/json")


def find_body_model(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """The model of a route's body."""
    kinds = [kind for name, kind in get_type_hints(endpoint).items() if name != "return"]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = [field.alias for field in get_flat_params(self.dependant) if isinstance(field.field_info, params.Query)]
        kind = find_body_model(self.endpoint)

        async def handle_strictly(request: Request) -> Response:
            refuse_unknown_parameters(request, known)
            try:
                return await handle(StrictRequest(request, kind, request.app.state.readers))
            except HTTPException as error:
                if isinstance(error.__cause__, RequestValidationError):  # raised while the body was read
                    raise error.__cause__ from None
                raise

        return handle_strictly


def refuse_unknown_parameters(request: Request, known: list[str]) -> None:
    """HttpProblem for a query parameter that the path does not take; a probe of the health may add what it likes."""
    if request.url.path in OPEN_PATHS:
        return
    if unknown := next((name[:100] for name in request.query_params if name not in known), None):
        nearest, taken = did_you_mean(unknown, known), ", ".join(known) or "none"
        detail = f"{unknown}: unknown query parameter{nearest}; this path takes {taken}"
        raise HttpProblem(422, "invalid", detail, field=unknown)


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen = set[str]()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))[:100]
        raise HttpProblem(422, "invalid", f"{key}: given more than once; give each key once", field=key)
    return values
