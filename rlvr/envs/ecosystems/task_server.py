"""Serves the tasks and the reward of an environment of ours to programs of other projects (`rlvr env serve`).

    GET  /tasks?side=heldout&start=0&count=100       {"tasks": [{"ref", "id", "messages", "level"}]}, fewer at the end
    GET  /tasks?side=train&seed=1&level=2&start=0    training tasks have no end
    POST /score {"ref": ..., "answer": ...}          {"value", "outcome", "reason", "parts", "detail"}

`guests/rlvr_tasks.py` is a taskset of verifiers on top of it. Left out on purpose: environments of several turns, whose
episodes other projects would have to play our way, and keys: it listens on the loopback interface alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.reward import Reward
from rlvr.reward.environment import NAME as ENVIRONMENT
from rlvr.reward.signatures import Case
from rlvr.web.json_bodies import read_json

MOST_TASKS = 1_000  # in an answer
MOST_BYTES = 4 << 20  # of a body


class TaskServer:
    """The application over a source and its reward."""

    def __init__(self, name: str, source: TaskSource, reward: Reward) -> None:
        if source.max_turns > 1 or source.group_builder or reward.name == ENVIRONMENT:
            raise ValueError(
                f"environment {name!r}: its episodes have several turns or give the reward themselves; only tasks of "
                "one turn with a verifier can be served"
            )
        self._source, self._reward = source, reward
        self._heldout = source.heldout(None)
        reward.start()
        routes = [Route("/tasks", self._list_tasks), Route("/score", self._score, methods=["POST"])]
        self.app = Starlette(routes=routes, exception_handlers={ValueError: self._refuse})

    @staticmethod
    async def _refuse(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)

    async def _list_tasks(self, request: Request) -> JSONResponse:
        query = request.query_params
        side, level = query.get("side", "heldout"), query.get("level", self._source.levels[0])
        start, count, seed = (
            _read_number(query, name, default) for name, default in (("start", 0), ("count", 100), ("seed", 0))
        )
        most = len(self._heldout) if side == "heldout" else start + MOST_TASKS
        places = range(start, min(most, start + min(count, MOST_TASKS)))
        refs = [f"heldout/{place}" if side == "heldout" else f"{side}/{seed}/{place}/{level}" for place in places]
        tasks = await asyncio.to_thread(lambda: [self._describe(ref) for ref in refs])
        return JSONResponse({"tasks": tasks})

    def _describe(self, ref: str) -> dict[str, Any]:
        task = self._find(ref)
        prompt = task.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"ref": ref, "id": task.id, "messages": messages, "level": task.level}

    def _find(self, ref: str) -> Task:
        side, *parts = ref.split("/", 3)
        try:
            if side == "heldout":
                return self._heldout[int(*parts)]
            seed, place, level = parts
            if side == "train" and level in self._source.levels:
                return self._source.train(int(seed), int(place), level)
        except (TypeError, ValueError, IndexError):
            pass
        levels = ", ".join(map(repr, self._source.levels))
        raise ValueError(f"there is no task {ref!r:.200}; expected heldout/PLACE or train/SEED/PLACE/LEVEL of {levels}")

    async def _score(self, request: Request) -> JSONResponse:
        raw = await request.body()
        if len(raw) > MOST_BYTES:
            raise ValueError(f"the body has {len(raw):,} bytes, expected at most {MOST_BYTES:,}")
        body = read_json(raw)
        ref, answer = (body.get(name) if isinstance(body, dict) else None for name in ("ref", "answer"))
        if not isinstance(ref, str) or not isinstance(answer, str):
            raise ValueError(f"ref={ref!r:.80}, answer={answer!r:.80}; expected an object with two texts")

        def judge() -> Any:
            task = self._find(ref)
            messages = None if isinstance(task.prompt, str) else task.prompt
            return self._reward.judge_all([Case(task.prompt_text, answer, task.meta, messages=messages)])[0]

        verdict = await asyncio.to_thread(judge)
        return JSONResponse(
            {
                "value": verdict.value, "outcome": verdict.outcome.value, "reason": verdict.reason,
                "parts": verdict.parts, "detail": verdict.detail[-2_000:],
            }
        )  # fmt: skip


def _read_number(query: Mapping[str, str], name: str, default: int) -> int:
    given = query.get(name, str(default))
    if not given.isdecimal():
        raise ValueError(f"{name}={given!r:.40}, expected a whole number from 0 on")
    return int(given)
