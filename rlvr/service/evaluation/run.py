"""A run of the suite: sessions at a service, some at once, and the report that is there whenever it ends.

    code = run(Options(url="http://127.0.0.1:3035", quick=True), say, key="")

Exit codes: 0 the thresholds held, 1 they did not, 2 a mistake in what was asked, 3 no service that can run sessions,
130 Ctrl-C. The file is written anew after every session, so that a run which is killed leaves what it had measured.
`python -m pytest tests/test_service_evaluation.py` exercises it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlvr.files import write_atomic
from rlvr.service.evaluation.client import Ask, NoKey, Refused, ServiceClient, Unreachable
from rlvr.service.evaluation.report import Result, Thresholds, report, result
from rlvr.service.evaluation.tasks import EvalTask, chosen

HELD, NOT_HELD, UNREACHABLE, STOPPED = 0, 1, 3, 130


@dataclass(frozen=True)
class Options:
    """What `rlvr evaluate-service` takes. `max_iterations` None is the service's own setting."""

    url: str = "http://127.0.0.1:3035"
    quick: bool = False
    tasks: Sequence[str] = ()
    repeats: int = 1
    target: float = 0.85
    max_iterations: int | None = None
    timeout_s: float = 600.0
    concurrency: int = 4
    judge: bool = True
    out: Path | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("repeats", 1, 1000), ("target", 0, 1), ("timeout_s", 1, 86_400), ("concurrency", 1, 64),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                shown = name.removesuffix("_s")
                raise ValueError(f"--{shown} {getattr(self, name)}: expected a number from {low} to {high:,}")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {self.url!r}: expected one like http://127.0.0.1:3035")
        if self.max_iterations is not None and self.max_iterations < 1:
            raise ValueError(f"--max-iterations {self.max_iterations}: expected at least 1")
        if self.quick and self.tasks:
            raise ValueError("--quick has no effect beside --tasks; give one of them")


def run(options: Options, say: Callable[[str], None], show: Callable[[dict[str, Any]], None], key: str = "") -> int:
    """Run the suite and report; its exit code. `say` gets progress, `show` the report."""
    tasks = chosen(options.tasks, options.quick)
    suite = _Suite(options, tasks, say)
    code = NOT_HELD
    try:
        asyncio.run(suite.run(key))
    except Unreachable as error:
        say(str(error))
        code = UNREACHABLE
    except KeyboardInterrupt:
        say(f"stopped after {len(suite.results)} of {suite.planned} sessions")
        code = STOPPED
    if not suite.results and code != NOT_HELD:
        return code
    told = suite.report()
    show(told)
    if options.out is not None:
        say(f"the report is in {options.out}")
    return HELD if told["held"] else code


class _Suite:
    def __init__(self, options: Options, tasks: Sequence[EvalTask], say: Callable[[str], None]) -> None:
        self.options, self.tasks, self.say = options, tasks, say
        self.planned = len(tasks) * options.repeats
        self.results: list[Result] = []
        self.health: dict[str, Any] = {}
        if options.out is not None:  # before hours are spent: can it be written?
            if options.out.is_dir():
                raise ValueError(f"--out {options.out}: is a folder, expected a file")
            options.out.parent.mkdir(parents=True, exist_ok=True)

    async def run(self, key: str) -> None:
        options = self.options
        ask = Ask(options.target, options.max_iterations, options.timeout_s, options.judge)
        gate = asyncio.Semaphore(options.concurrency)
        async with ServiceClient(options.url, key) as client:
            self.health = await client.reach()

            async def one(task: EvalTask, repeat: int) -> None:
                async with gate:
                    self._add(await _session(client, task, repeat, ask))

            pairs = [(task, repeat) for repeat in range(options.repeats) for task in self.tasks]
            sessions = [asyncio.ensure_future(one(*pair)) for pair in pairs]
            try:
                await asyncio.gather(*sessions)
            except BaseException:
                for session in sessions:
                    session.cancel()
                await asyncio.gather(*sessions, return_exceptions=True)
                await client.abandon()
                raise
        if client.no_judge:
            self.say(f"designs were checked by rules alone, for the judge was refused: {client.no_judge}")

    def _add(self, found: Result) -> None:
        self.results.append(found)
        told = f"confidence {found.confidence:.2f}" if found.confidence is not None else f"error: {_words(found)}"
        self.say(
            f"[{len(self.results)}/{self.planned}] {found.task_id}: {told}, {found.iterations} "
            f"iteration{'s' * (found.iterations != 1)}"
        )
        if self.options.out is not None:
            self._write()

    def _write(self) -> None:
        assert self.options.out is not None
        write_atomic(self.options.out, json.dumps(self.report(), indent=2) + "\n")

    def report(self) -> dict[str, Any]:
        o = self.options
        order = {task.id: place for place, task in enumerate(self.tasks)}
        results = sorted(self.results, key=lambda r: (order[r.task_id], r.repeat))
        return report(
            results, url=o.url, target=o.target, thresholds=o.thresholds, planned=self.planned, health=self.health
        )


async def _session(client: ServiceClient, task: EvalTask, repeat: int, ask: Ask) -> Result:
    try:
        worked = await client.work(task, ask)
    except NoKey:
        raise
    except Refused as refusal:  # this task, by this service; the others may be taken
        error = {"code": "refused", "message": str(refusal)}
        return Result(task.id, task.category, repeat, error=error)
    return result(
        task.id, task.category, repeat, worked.session_id, worked.status, worked.metrics, worked.error, worked.judged
    )


def _words(found: Result) -> str:
    error = found.error or {}
    return f"{error.get('code')}: {error.get('message', '')[:200]}"
