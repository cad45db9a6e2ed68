"""Grade a file of completions with a reward: one verdict per row, in the file's order. A second call resumes the first.

    grade_file(Path("completions.jsonl"), RewardPool("code"), Path("verdicts.jsonl"))      # what `rlvr verify` does

`verdicts.jsonl.origin.json` records the input and the reward; an output of another pair is refused. Rows are flushed as
they come, so a kill costs at most the rows in flight; a torn last row is dropped.

Batched rewards (such as `code`, whose sandbox uses all cores) are called from threads, the others in worker processes,
since Python threads share one core. Rewards that take microseconds a row get larger chunks: chunks of 8 cost 40 % more
processor time than chunks of 256 for rows like GSM8K's.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

from rlvr.audits.commands import list_rates_above
from rlvr.audits.completion_rows import BadRow, read_rows, response_field, row_case, row_names
from rlvr.audits.pass_rate import PassRate
from rlvr.audits.process_tree import end_with_parent, without_main
from rlvr.core.cpu_budget import available_cores
from rlvr.core.files import read_json, sha256, write_atomic
from rlvr.core.types import Outcome
from rlvr.core.verdict_reasons import ReasonNames
from rlvr.reward import Reward, resolve_reward
from rlvr.reward.signatures import Case
from rlvr.training import rollout_rows

IN_FLIGHT = 8  # chunks per worker that wait or run: this bounds the memory
CHUNK, MAX_CHUNK = 8, 256  # rows that go to a worker at once: at first, and at most
CHUNK_S = 0.02  # chunks grow until one takes this many seconds


@dataclass(frozen=True)
class RewardPool:
    """A reward by name or `package.module:function`, with its options, and its workers (None: one per core).

    With 0 workers a reward is called in this process, by threads if it waits for others.
    """

    reward: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers={self.workers}, expected at least 1")

    @contextmanager
    def start(self) -> Iterator[Callable[[list[Case | BadRow]], Future[list[dict[str, Any]]]]]:
        """Yield a function that takes some rows and returns a future of their verdicts."""
        reward = resolve_reward(self.reward, **self.options)
        reward.start()
        workers = self.workers or available_cores()
        if self.workers == 0 and not reward.waits_for:
            yield partial(_judge_now, reward)
            return
        pool: Executor
        if self.workers == 0 or reward.spec.batched:
            pool, judge = ThreadPoolExecutor(workers, thread_name_prefix="verify"), partial(score_rows, reward)
        else:
            pool = ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent, (os.getpid(),))
            judge = partial(_score_in_worker, self.reward, dict(self.options))

        def submit(rows: list[Case | BadRow]) -> Future[list[dict[str, Any]]]:
            with without_main():
                return pool.submit(judge, rows)

        try:
            yield submit
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def score_rows(reward: Reward, answers: list[Case | BadRow]) -> list[dict[str, Any]]:
    """One verdict per row, each with its own time."""
    verdicts: list[dict[str, Any]] = []
    for answer in answers:
        start = time.perf_counter()
        if isinstance(answer, BadRow):
            found: dict[str, Any] = {"value": None, "outcome": "invalid", "reason": "bad_row", "detail": answer.reason}
        else:
            (score,) = reward.judge_all([answer])
            found = rollout_rows.score_to_json(score)
        found["seconds"] = round(time.perf_counter() - start, 6)
        verdicts.append({key: value for key, value in found.items() if value not in ("", {}) or key == "reason"})
    return verdicts


def _judge_now(reward: Reward, rows: list[Case | BadRow]) -> Future[list[dict[str, Any]]]:
    future = Future[list[dict[str, Any]]]()
    future.set_result(score_rows(reward, rows))
    return future


_worker_reward: list[Reward] = []  # in a worker process: its one reward


def _score_in_worker(
    name: str | Callable[..., Any], options: dict[str, Any], answers: list[Case | BadRow]
) -> list[dict[str, Any]]:
    if not _worker_reward:
        _worker_reward.append(resolve_reward(name, **options))
    return score_rows(_worker_reward[0], answers)


def _count_rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


@dataclass
class VerdictCounts:
    """Counts over all rows of the output; `earlier_rows` of them come from earlier calls."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    names: ReasonNames = field(default_factory=ReasonNames)
    rate: PassRate = field(default_factory=PassRate)
    earlier_rows: int = 0
    seconds: float = 0.0

    def add(self, verdict: Mapping[str, Any]) -> None:
        """Count a row of the output; rows of one `task` are completions of the same prompt."""
        self.outcomes[verdict["outcome"]] += 1
        reason = self.names.name_of(verdict["outcome"], verdict.get("reason", ""))
        self.reasons[verdict["outcome"], reason] += 1
        if verdict["outcome"] not in (Outcome.ERROR.value, Outcome.INVALID.value):
            self.rate.add(verdict["outcome"] == Outcome.PASSED.value, verdict.get("task"))

    @property
    def rows(self) -> int:
        return sum(self.outcomes.values())

    @property
    def unjudged(self) -> int:
        return self.outcomes[Outcome.ERROR.value] + self.outcomes[Outcome.INVALID.value]

    def table(self) -> str:
        """The pass rate of the judged rows, and each outcome with its reasons, as text."""
        judged, passed = self.rows - self.unjudged, self.outcomes[Outcome.PASSED.value]
        lines = [
            _count_rows(self.rows) + (f", {self.earlier_rows:,} of them graded before" if self.earlier_rows else "")
        ]
        if judged:
            rate = self.rate.interval()
            several = f"; answers to {self.rate.num_tasks:,} tasks" if self.rate.num_tasks < judged else ""
            lines.append(
                f"passed {passed:,}/{judged:,} = {100 * rate.value:.2f}% [{100 * rate.low:.2f}, {100 * rate.high:.2f}]"
                f"{several}"
            )
        if self.unjudged:
            lines.append(f"{_count_rows(self.unjudged)} could not be judged (error, invalid): no rate counts them")
        for outcome in Outcome:
            reasons = {reason: n for (kind, reason), n in self.reasons.most_common() if kind == outcome.value}
            if reasons:
                detail = ", ".join(f"{reason} {n:,}" for reason, n in reasons.items() if reason)
                lines.append(f"  {outcome.value:<8} {sum(reasons.values()):>9,}  {detail}".rstrip())
        if late := self.outcomes[Outcome.TIMEOUT.value]:
            lines.append(
                f"{late:,} ran out of time: on a busy machine more may help (reward code: --reward-option timeout_s=10)"
            )
        if self.seconds > 0 and self.rows > self.earlier_rows:
            lines.append(f"{(self.rows - self.earlier_rows) / self.seconds:,.0f} rows/s")
        return "\n".join(lines)

    def list_broken_thresholds(self, max_errors: float, min_pass_rate: float) -> list[str]:
        """A sentence for each threshold, shares of the rows and of the judged rows, that these counts break."""
        judged, passed = self.rows - self.unjudged, self.outcomes[Outcome.PASSED.value]
        lines = list_rates_above({"--max-errors": (self.unjudged / max(1, self.rows), max_errors)})
        share = passed / judged if judged else 0.0
        if share < min_pass_rate:
            needed = f"{100 * min_pass_rate:g}% are needed"
            lines.append(f"below --min-pass-rate: {100 * share:.2f}% of the judged rows passed, {needed}")
        return lines


class ProgressLine:
    """A line on standard error twice a second, if that is a terminal."""

    def __init__(self) -> None:
        self._shown = 0.0

    def __call__(self, tally: VerdictCounts) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            passed = tally.outcomes[Outcome.PASSED.value]
            print(f"\r{tally.rows:,} rows, {passed:,} passed\x1b[K", end="\r", file=sys.stderr, flush=True)


def grade_file(
    source: Path,
    grader: RewardPool,
    out: Path | None = None,
    *,
    field: str | None = None,
    limit: int | None = None,
    log: Callable[[str], None] = lambda text: None,
    progress: Callable[[VerdictCounts], None] = lambda tally: None,
) -> VerdictCounts:
    """Grade the first `limit` rows of `source` (None: all) into `out` (None: standard output)."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}, expected at least 1")
    rows = read_rows(source)
    head: list[tuple[str, Any]] = []  # the rows that were read to find the field
    if field is None:
        for where, row in rows:
            head.append((where, row))
            if not isinstance(row, BadRow):
                field = response_field(row, source)
                log(f"the completions are read from the field {field!r}")
                break
    assert field is not None  # `read_rows` refuses a file without a usable row
    reward = resolve_reward(grader.reward, **grader.options)
    check_gold(reward, field)
    reward.start()  # before the output is made: what the reward depends on may be missing
    tally = VerdictCounts()
    with _open_output(out, source, grader, field, limit, tally) as file:
        for verdicts in grade_rows(islice(chain(head, rows), limit), grader, field, tally, progress):
            file.writelines(json.dumps(verdict) + "\n" for verdict in verdicts)
            file.flush()
    return tally


def grade_rows(
    rows: Iterable[tuple[str, Any]],
    grader: RewardPool,
    field: str,
    tally: VerdictCounts,
    progress: Callable[[VerdictCounts], None] = lambda tally: None,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the verdicts of rows in their order, some at a time, without those of the first `tally.kept`; count them.

    `rows` are pairs as those of `read_rows`. A KeyboardInterrupt comes after the verdicts that there are already, up
    to the first gap.
    """
    start = time.perf_counter()
    todo = (
        ({"index": index, **row_names(row, index)}, row_case(where, row, field))
        for index, (where, row) in enumerate(rows)
        if index >= tally.earlier_rows
    )
    most = IN_FLIGHT * (available_cores() if grader.workers is None else grader.workers)
    waiting: deque[tuple[list[Any], Future[list[dict[str, Any]]]]] = deque()
    size = least = CHUNK if grader.workers != 0 else 1  # here, where Ctrl-C loses the chunk that it ends

    def take() -> list[dict[str, Any]]:
        nonlocal size
        chunk, future = waiting[0]
        judged = future.result()
        verdicts = [names | verdict for (names, _), verdict in zip(chunk, judged, strict=True)]
        waiting.popleft()
        for verdict in verdicts:
            tally.add(verdict)
        seconds = sum(verdict["seconds"] for verdict in judged) + 1e-9
        size = min(MAX_CHUNK, max(least, int(CHUNK_S * len(chunk) / seconds)))
        tally.seconds = time.perf_counter() - start
        progress(tally)
        return verdicts

    with grader.start() as submit:
        try:
            while chunk := list(islice(todo, size)):
                waiting.append((chunk, submit([answer for _, answer in chunk])))
                if len(waiting) >= most:
                    yield take()
            while waiting:
                yield take()
        except KeyboardInterrupt:
            while waiting and waiting[0][1].done() and not waiting[0][1].cancelled():
                yield take()
            raise


def check_gold(reward: Reward, field: str) -> None:
    """ValueError if the completions would be taken from the field of the reference answers."""
    parts = reward.kwargs.get("rewards", ()) if reward.name == "composite" else ()
    for part in (reward, *(resolve_reward(given["name"], **(given.get("kwargs") or {})) for given in parts)):
        if part.spec.gold == field:
            raise ValueError(
                f"--response-field {field}: the reward {part.name!r} takes the reference answer from that field. Name "
                f"the field with the model's completions; if the file keeps them in {field!r}, rename it, and give the "
                "reference answers that name"
            )


@contextmanager
def _open_output(
    out: Path | None, source: Path, grader: RewardPool, field: str, limit: int | None, tally: VerdictCounts
) -> Iterator[IO[str]]:
    """Open the output after its whole rows of earlier calls, which are counted in `tally`."""
    if out is None:
        yield sys.stdout
        return
    if out.exists() and out.samefile(source):
        raise ValueError(f"--out {out} is the file of completions itself; give another name")
    origin = out.with_name(f"{out.name}.origin.json")
    wanted = {"input": sha256(source), "field": field, "reward": grader.reward, "options": _fingerprint(grader.options)}
    if out.exists() and out.stat().st_size:
        if not origin.is_file():
            raise ValueError(f"{out} exists and is no output of this command (no {origin.name}); give another --out")
        stored = read_json(origin, "what the verdicts belong to", f"delete it and {out}, or give another --out")
        if different := [name for name in wanted if stored.get(name) != wanted[name]]:
            raise ValueError(
                f"{out} was written with a different value of: {', '.join(different)}; give another --out, or delete "
                f"it and {origin.name}"
            )
        _keep_whole_rows(out, tally)
        if limit is not None and tally.earlier_rows > limit:
            raise ValueError(
                f"{out} has {tally.earlier_rows:,} verdicts already, more than --limit {limit}: the summary would "
                "count more rows than the limit. Give another --out, or a limit of at least that many"
            )
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(origin, json.dumps(wanted, indent=2))
    with open(out, "a", encoding="utf-8") as file:
        yield file


def _fingerprint(options: Mapping[str, Any]) -> str:
    """A hash of the options, since they may hold an endpoint's API key."""
    return hashlib.sha256(json.dumps(dict(options), sort_keys=True, default=repr).encode()).hexdigest()


def _keep_whole_rows(out: Path, tally: VerdictCounts) -> None:
    """Cut the file after its last row that is whole and in order."""
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
    tally.earlier_rows = tally.rows
