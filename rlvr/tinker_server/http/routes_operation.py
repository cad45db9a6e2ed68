"""Routes for the operator: metrics for Prometheus, and the disk space that an owner uses.

The SDK calls none of them. Exercised by tests/test_tinker_metrics.py and tests/test_tinker_disk_quota.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from rlvr.tinker_server.http.dependencies import CallerDep
from rlvr.tinker_server.http.json_routes import JsonRoute
from rlvr.tinker_server.http.server_metrics import collect_metrics
from rlvr.tinker_server.http.tinker_middleware import METRICS_PATH

router = APIRouter(route_class=JsonRoute)


@router.get(METRICS_PATH)
async def metrics(caller: CallerDep) -> Response:
    def read(owner: str) -> tuple[bytes, str]:
        collect = partial(collect_metrics, caller.backend)
        return caller.request.app.state.middleware.prometheus.text(collect, caller.request.headers.get("accept", ""))

    text, kind = await caller.call(read)
    return Response(text, media_type=kind)


@router.get("/api/v1/disk_usage")
async def disk_usage(caller: CallerDep) -> dict[str, Any]:
    """The bytes that the caller's checkpoints and runs take, the limit, and the largest checkpoints."""
    return await caller.call(caller.backend.disk.describe)
