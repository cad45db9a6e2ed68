"""A taskset for verifiers whose tasks and reward are those of an environment of rlvr, behind `rlvr env serve`.

    vf-eval rlvr-tasks --env.taskset.url http://127.0.0.1:5005 ...

Needs verifiers, and this folder in PYTHONPATH; imports nothing of rlvr. An answer that could not be judged is an error
of the episode, and no zero.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf

__all__ = ["RlvrTaskset"]
PAGE = 100  # tasks in a request


class RlvrTaskConfig(vf.TaskConfig):
    url: str = ""


class RlvrTaskData(vf.TaskData):
    ref: str
    level: str


class RlvrTask(vf.Task[RlvrTaskData, vf.State, RlvrTaskConfig]):
    @vf.reward
    async def reward(self, task: RlvrTaskData, trace: vf.Trace) -> float:
        body = {"ref": task.ref, "answer": trace.last_reply}
        verdict = await asyncio.to_thread(call, f"{self.config.url}/score", json.dumps(body).encode())
        trace.info["judgement"] = verdict
        if verdict["value"] is None:
            raise RuntimeError(f"the verifier could not judge: {verdict['reason']} {verdict['detail']}")
        for name, value in verdict["parts"].items():
            trace.record_metric(name, value)
        return verdict["value"]


def call(url: str, body: bytes | None = None) -> dict[str, Any]:
    """The server's answer. RuntimeError, with what it says, if it refuses."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=600) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} answered {error.code}: {error.read()[:2_000]!r}") from error


class RlvrTasksetConfig(vf.TasksetConfig):
    url: str = "http://127.0.0.1:5005"
    """The address that `rlvr env serve` prints."""
    side: Literal["heldout", "train"] = "heldout"
    """Held-out tasks, or training tasks, which have no end."""
    seed: int = 0
    """Of training tasks."""
    level: str | None = None
    """Of training tasks: one of the environment's levels, by default the first."""


class RlvrTaskset(vf.Taskset[RlvrTask, RlvrTasksetConfig]):
    def __init__(self, config: RlvrTasksetConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.side == "train"

    def load(self) -> Iterator[RlvrTask]:
        config = RlvrTaskConfig(**{**self.config.task.model_dump(), "url": self.config.url})
        for start in itertools.count(0, PAGE):
            page = self._read(start)
            for row in page:
                first = row["messages"]
                prompt = first[0]["content"] if [one["role"] for one in first] == ["user"] else first
                yield RlvrTask(RlvrTaskData(id=row["id"], prompt=prompt, ref=row["ref"], level=row["level"]), config)
            if len(page) < PAGE:
                return

    def _read(self, start: int) -> list[dict[str, Any]]:
        query: dict[str, Any] = {"side": self.config.side, "seed": self.config.seed, "start": start, "count": PAGE}
        if self.config.level is not None:
            query["level"] = self.config.level
        url = f"{self.config.url}/tasks?{urllib.parse.urlencode(query)}"
        return call(url)["tasks"]
