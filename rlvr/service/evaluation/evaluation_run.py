"""A run of the evaluation suite: several sessions at a time at a service, and a report however it ends.

    code = run(SuiteOptions(url="http://127.0.0.1:3035", quick=True), say, show, key="")

Exit codes: 0 the thresholds hold, 1 they do not, 2 a mistake in the options, 3 no service that can run sessions,
130 Ctrl-C. The report file is rewritten after every session, so a run that is killed leaves what it measured.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlvr.core.files import write_atomic
from rlvr.service.evaluation.evaluation_client import (
    EvaluationClient,
    RefusedRequest,
    SessionOptions,
    Unreachable,
)
from rlvr.service.evaluation.evaluation_report import SessionResult, Thresholds, report, session_result
from rlvr.service.evaluation.evaluation_tasks import EvalTask, select_tasks

HELD, NOT_HELD, UNREACHABLE, STOPPED = 0, 1, 3, 130


@dataclass(frozen=True)
class SuiteOptions:
    """The options of `rlvr evaluate-service`. `max_iterations` None is the service's setting."""

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
            raise ValueError(f"--url {self.url!r}: expected a URL such as http://127.0.0.1:3035")
        if self.max_iterations is not None and self.max_iterations < 1:
            raise ValueError(f"--max-iterations {self.max_iterations}: expected at least 1")
        if self.quick and self.tasks:
            raise ValueError("--quick has no effect with --tasks; give one of them")


def run(
    options: SuiteOptions, say: Callable[[str], None], show: Callable[[dict[str, Any]], None], key: str = ""
) -> int:
    """Run the suite and return its exit code. `say` gets progress, `show` the report."""
    tasks = select_tasks(options.tasks, options.quick)
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
    result = suite.report()
    show(result)
    if options.out is not None:
        say(f"the report is in {options.out}")
    return HELD if result["held"] else code


class _Suite:
    def __init__(self, options: SuiteOptions, tasks: Sequence[EvalTask], say: Callable[[str], None]) -> None:
        self.options, self.tasks, self.say = options, tasks, say
        self.planned = len(tasks) * options.repeats
        self.results: list[SessionResult] = []
        self.health: dict[str, Any] = {}
        if options.out is not None:  # fail before hours are spent
            if options.out.is_dir():
                raise ValueError(f"--out {options.out} is a folder, expected a file")
            options.out.parent.mkdir(parents=True, exist_ok=True)

    async def run(self, key: str) -> None:
        options = self.options
        session_options = SessionOptions(options.target, options.max_iterations, options.timeout_s, options.judge)
        slots = asyncio.Semaphore(options.concurrency)
        async with EvaluationClient(options.url, key) as client:
            self.health = await client.reach()

            async def run_one(task: EvalTask, repeat: int) -> None:
                async with slots:
                    self._add(await _run_session(client, task, repeat, session_options))

            pairs = [(task, repeat) for repeat in range(options.repeats) for task in self.tasks]
            sessions = [asyncio.ensure_future(run_one(*pair)) for pair in pairs]
            try:
                await asyncio.gather(*sessions)
            except BaseException:
                for session in sessions:
                    session.cancel()
                await asyncio.gather(*sessions, return_exceptions=True)
                await client.abandon()
                raise
        if client.no_judge:
            self.say(f"designs were checked by rules only; the judge was refused: {client.no_judge}")

    def _add(self, result: SessionResult) -> None:
        self.results.append(result)
        error = result.error or {}
        outcome = f"error: {error.get('code')}: {error.get('message', '')[:200]}"
        if result.confidence is not None:
            outcome = f"confidence {result.confidence:.2f}"
        self.say(
            f"[{len(self.results)}/{self.planned}] {result.task_id}: {outcome}, {result.iterations} "
            f"iteration{'s' * (result.iterations != 1)}"
        )
        if self.options.out is not None:
            write_atomic(self.options.out, json.dumps(self.report(), indent=2) + "\n")

    def report(self) -> dict[str, Any]:
        o = self.options
        order = {task.id: place for place, task in enumerate(self.tasks)}
        results = sorted(self.results, key=lambda r: (order[r.task_id], r.repeat))
        return report(
            results, url=o.url, target=o.target, thresholds=o.thresholds, planned=self.planned, health=self.health
        )


async def _run_session(client: EvaluationClient, task: EvalTask, repeat: int, options: SessionOptions) -> SessionResult:
    try:
        session = await client.work(task, options)
    except RefusedRequest as refusal:  # this task only; the service may accept the others
        error = {"code": "refused", "message": str(refusal)}
        return SessionResult(task.id, task.category, repeat, error=error)
    return session_result(
        task.id,
        task.category,
        repeat,
        session.session_id,
        session.status,
        session.metrics,
        session.error,
        session.judged,
    )
