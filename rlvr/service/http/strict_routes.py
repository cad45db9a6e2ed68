"""Routes that drop nothing of a request without a word: no unknown query parameter, no JSON key twice.

Exercised by tests/test_service_mistakes.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute

from rlvr.core.registry import did_you_mean
from rlvr.service.http.requests import MOST
from rlvr.service.http.service_middleware import OPEN_PATHS
from rlvr.web.errors import HttpProblem
from rlvr.web.json_bodies import has_more_parts


class StrictRequest(Request):
    async def json(self) -> Any:
        raw = await self.body()
        if has_more_parts(raw, MOST, MOST):
            raise HttpProblem(422, "invalid", f"body: the body has more than {MOST:,} values", field="body")
        return json.loads(raw, object_pairs_hook=refuse_repeated_keys)


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = [field.alias for field in get_flat_params(self.dependant) if isinstance(field.field_info, params.Query)]

        async def handle_strictly(request: Request) -> Response:
            refuse_unknown_parameters(request, known)
            return await handle(StrictRequest(request.scope, request.receive))

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
