"""Routes whose JSON bodies give no key twice: of two values one would be dropped without a word.

Exercised by tests/test_service_mistakes.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from rlvr.web.errors import HttpProblem


class StrictRequest(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=refuse_repeated_keys)


class StrictJsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in values if keys.count(key) > 1)[:100]
        raise HttpProblem(422, "invalid", f"{key}: given more than once; give each key once", field=key)
    return values
