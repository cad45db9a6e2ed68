"""GET /openapi.json from a thread: FastAPI builds the document on the event loop, where it takes a good part of a
second and everybody waits.

    app = FastAPI(openapi_url=None)
    add_openapi_route(app)

The document is built and encoded once, at the first request: most servers are never asked for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response

KEY_FORMS: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def add_openapi_route(app: FastAPI) -> None:
    """Answer with what `app.openapi` returns at the first request."""
    turn, document = asyncio.Lock(), b""

    async def read(request: Request) -> Response:
        nonlocal document
        async with turn:
            document = document or await asyncio.to_thread(lambda: json.dumps(app.openapi()).encode())
        return Response(document, media_type="application/json")

    app.add_route("/openapi.json", read, include_in_schema=False)


def declare_keys(document: dict[str, Any], is_open: Callable[[str], bool]) -> None:
    """Say in a document that requests need an API key, in one of two headers, but for those to open paths."""
    document.setdefault("components", {})["securitySchemes"] = KEY_FORMS
    for path, methods in document["paths"].items():
        if not is_open(path):
            for operation in methods.values():
                operation["security"] = [{name: []} for name in KEY_FORMS]
