"""Grade a file of answers with a reward, one verdict per row, in the file's order; after a stop the rest is graded.

    grade(Path("answers.jsonl"), Grader("code"), Path("verdicts.jsonl"))      # what `rlvr verify` does

The output belongs to its input and reward: `verdicts.jsonl.origin.json` beside it says to which, and another pair is
refused. Rows are flushed as they come, so a kill costs at most the rows in flight; a torn last row is dropped.

Rewards registered as batched (`code` among them, whose sandbox runs on all cores by itself) are called from threads,
the others in processes of their own, for Python code in threads shares one core. What takes microseconds a row is sent
in larger chunks: sending eight at a time costs 40 % more processor time than 256 for rows like GSM8K's.
`python -m pytest tests/test_verify_command.py` exercises it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

from rlvr.audit.rates import PassRate
from rlvr.audit.rows import Bad, names_of, read_rows, response_field, trajectory
from rlvr.files import read_json, sha256, write_atomic
from rlvr.reward import Reward, resolve_reward
from rlvr.training import samples
from rlvr.types import Outcome, Trajectory

IN_FLIGHT = 8  # chunks per worker that wait or run: this bounds the memory
CHUNK, MOST, WORK = 8, 256, 0.02  # rows that go to a worker at once: at first, at most, and as many as take so long


@dataclass(frozen=True)
class Grader:
    """A reward by name or `package.module:function`, with its options; `workers` None is one per core."""

    reward: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: at least 1 is needed")

    @contextmanager
    def start(self) -> Iterator[Callable[[list[Trajectory | Bad]], Future[list[dict[str, Any]]]]]:
        """What takes some answers and gives a future of their verdicts."""
        reward = resolve_reward(self.reward, **self.options)
        reward.start()
        workers = self.workers or len(os.sched_getaffinity(0))
        pool: Executor
        if reward.entry.batched:
            pool, judge = ThreadPoolExecutor(workers, thread_name_prefix="verify"), partial(graded, reward)
        else:
            pool = ProcessPoolExecutor(workers, get_context("spawn"), _end_with_parent, (os.getpid(),))
            judge = partial(_graded_there, self.reward, dict(self.options))
        try:
            yield lambda answers: pool.submit(judge, answers)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def graded(reward: Reward, answers: list[Trajectory | Bad]) -> list[dict[str, Any]]:
    """One verdict per answer, each timed by itself."""
    verdicts: list[dict[str, Any]] = []
    for answer in answers:
        start = time.perf_counter()
        if isinstance(answer, Bad):
            found: dict[str, Any] = {"value": None, "outcome": "invalid", "reason": "bad_row", "detail": answer.why}
        else:
            (score,) = reward.score([answer])
            found = samples.verdict(score)
        found["seconds"] = round(time.perf_counter() - start, 6)
        verdicts.append({key: value for key, value in found.items() if value not in ("", {}) or key == "reason"})
    return verdicts


_here: list[Reward] = []  # of a worker process: the one reward that it is for


def _graded_there(name: str, options: dict[str, Any], answers: list[Trajectory | Bad]) -> list[dict[str, Any]]:
    if not _here:
        _here.append(resolve_reward(name, **options))
    return graded(_here[0], answers)


def _end_with_parent(parent: int) -> None:
    """In a worker process: Ctrl-C is the parent's business, and its end is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before that took effect
        os._exit(1)


@dataclass
class Tally:
    """Counts over all rows of the output, those of earlier runs included."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    rate: PassRate = field(default_factory=PassRate)
    kept: int = 0
    seconds: float = 0.0

    def add(self, verdict: Mapping[str, Any]) -> None:
        """Count a row of the output; rows of one `task` are answers to the same."""
        self.outcomes[verdict["outcome"]] += 1
        self.reasons[verdict["outcome"], verdict.get("reason", "")] += 1
        if verdict["outcome"] not in (Outcome.ERROR.value, Outcome.INVALID.value):
            self.rate.add(verdict["outcome"] == Outcome.PASSED.value, verdict.get("task"))

    @property
    def rows(self) -> int:
        return sum(self.outcomes.values())

    @property
    def unjudged(self) -> int:
        return self.outcomes[Outcome.ERROR.value] + self.outcomes[Outcome.INVALID.value]

    def table(self) -> str:
        """For a person: the pass rate of what could be judged, and each outcome with its reasons."""
        judged, passed = self.rows - self.unjudged, self.outcomes[Outcome.PASSED.value]
        lines = [f"{self.rows:,} rows" + (f", {self.kept:,} of them graded before" if self.kept else "")]
        if judged:
            rate = self.rate.interval()
            several = f"; answers to {self.rate.num_tasks:,} tasks" if self.rate.num_tasks < judged else ""
            lines.append(
                f"passed {passed:,}/{judged:,} = {100 * rate.value:.2f}% [{100 * rate.low:.2f}, {100 * rate.high:.2f}]"
                f"{several}"
            )
        if self.unjudged:
            lines.append(f"{self.unjudged:,} rows could not be judged (error, invalid): no rate counts them")
        for outcome in Outcome:
            reasons = {reason: n for (kind, reason), n in self.reasons.most_common() if kind == outcome.value}
            if reasons:
                told = ", ".join(f"{reason} {n:,}" for reason, n in reasons.items() if reason)
                lines.append(f"  {outcome.value:<8} {sum(reasons.values()):>9,}  {told}".rstrip())
        if late := self.outcomes[Outcome.TIMEOUT.value]:
            lines.append(
                f"{late:,} ran out of time: on a busy machine more may help (reward code: --reward-option timeout_s=10)"
            )
        if self.seconds > 0 and self.rows > self.kept:
            lines.append(f"{(self.rows - self.kept) / self.seconds:,.0f} rows/s")
        return "\n".join(lines)


class Progress:
    """A line on standard error twice a second, where somebody looks at it."""

    def __init__(self) -> None:
        self._shown = 0.0

    def __call__(self, tally: Tally) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            passed = tally.outcomes[Outcome.PASSED.value]
            print(f"\r{tally.rows:,} rows, {passed:,} passed\x1b[K", end="\r", file=sys.stderr, flush=True)


def grade(
    source: Path,
    grader: Grader,
    out: Path | None = None,
    *,
    field: str | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Grade the first `limit` rows of `source` (None: all) into `out` (None: standard output)."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: at least 1 is needed")
    rows = read_rows(source)
    begun: list[tuple[str, Any]] = []
    if field is None:
        for where, row in rows:
            begun.append((where, row))
            if not isinstance(row, Bad):
                field = response_field(row, source)
                say(f"the answers are taken from the field {field!r}")
                break
    assert field is not None  # a file without any good row was refused
    _check_gold(resolve_reward(grader.reward, **grader.options), field)
    tally = Tally()
    start = time.perf_counter()
    with grader.start() as submit, _opened(out, source, grader, field, limit, tally) as file:
        numbered = enumerate(islice(chain(begun, rows), limit))
        todo = (
            ({"index": index, **names_of(row, index)}, trajectory(where, row, field))
            for index, (where, row) in numbered
            if index >= tally.kept
        )
        workers = grader.workers or len(os.sched_getaffinity(0))
        waiting: deque[tuple[list[Any], Future[list[dict[str, Any]]]]] = deque()

        size = CHUNK

        def write(chunk: list[Any], future: Future[list[dict[str, Any]]]) -> None:
            nonlocal size
            for (names, _), told in zip(chunk, future.result(), strict=True):
                tally.add(names | told)
                file.write(json.dumps(names | told) + "\n")
            file.flush()
            size = min(MOST, max(CHUNK, int(WORK * len(chunk) / (sum(v["seconds"] for v in future.result()) + 1e-9))))
            tally.seconds = time.perf_counter() - start
            progress(tally)

        try:
            while chunk := list(islice(todo, size)):
                waiting.append((chunk, submit([answer for _, answer in chunk])))
                if len(waiting) >= IN_FLIGHT * workers:
                    write(*waiting.popleft())
            while waiting:
                write(*waiting.popleft())
        except KeyboardInterrupt:
            for chunk, future in waiting:  # what is done and in order is kept
                if not future.done() or future.cancelled():
                    break
                write(chunk, future)
            raise
    return tally


def _check_gold(reward: Reward, field: str) -> None:
    """ValueError where the answers would be taken from the field that holds what they are compared with."""
    parts = reward.kwargs.get("rewards", ()) if reward.name == "composite" else ()
    for part in (reward, *(resolve_reward(given["name"], **(given.get("kwargs") or {})) for given in parts)):
        if part.entry.gold == field:
            raise ValueError(
                f"--response-field {field}: there the reward {part.name!r} looks for the right answer, so nothing "
                "would be left to compare with. Name the field with the model's answers; if the file keeps them in "
                f"{field!r}, rename it, and give the right ones that name"
            )


@contextmanager
def _opened(
    out: Path | None, source: Path, grader: Grader, field: str, limit: int | None, tally: Tally
) -> Iterator[IO[str]]:
    """The output, behind its whole rows of before; those are counted in `tally`."""
    if out is None:
        yield sys.stdout
        return
    if out.exists() and out.samefile(source):
        raise ValueError(f"--out {out} is the file of answers itself; give another name")
    origin = out.with_name(f"{out.name}.origin.json")
    asked = {"input": sha256(source), "field": field, "reward": grader.reward, "options": _fingerprint(grader.options)}
    if out.exists() and out.stat().st_size:
        if not origin.is_file():
            raise ValueError(f"{out} exists and is no output of this command (no {origin.name}); give another --out")
        stored = read_json(origin, "what the verdicts belong to", f"delete it and {out}, or give another --out")
        if different := [name for name in asked if stored.get(name) != asked[name]]:
            raise ValueError(
                f"{out} holds verdicts of another {' and '.join(different)}; give another --out, or delete it and "
                f"{origin.name}"
            )
        _keep_whole_rows(out, tally)
        if limit is not None and tally.kept > limit:
            raise ValueError(
                f"{out} has {tally.kept:,} verdicts already, more than --limit {limit}: a summary would be of another "
                "number of rows than asked for. Give another --out, or a limit of at least that many"
            )
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(origin, json.dumps(asked, indent=2))
    with open(out, "a", encoding="utf-8") as file:
        yield file


def _fingerprint(options: Mapping[str, Any]) -> str:
    """Tells options apart without showing them: among them may be a key of an endpoint."""
    return hashlib.sha256(json.dumps(dict(options), sort_keys=True, default=repr).encode()).hexdigest()


def _keep_whole_rows(out: Path, tally: Tally) -> None:
    """Cut the file behind its last row that is whole and in its place."""
    end = 0
    with open(out, "r+b") as file:
        for line in file:
            try:
                row = json.loads(line)
                if not line.endswith(b"\n") or row["index"] != tally.rows or "outcome" not in row:
                    break
            except (ValueError, TypeError, KeyError):
                break
            tally.add(row)
            end += len(line)
        file.truncate(end)
    tally.kept = tally.rows
