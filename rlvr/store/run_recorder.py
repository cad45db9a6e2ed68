"""A training run in the store: its session, and the answers of its steps as experiences, beside those of the service.

    recorder = RunRecorder("sqlite:///rlvr.db", folder, "my-run", settings, warn)
    recorder.keep(12, trajectories)      # what `Trackers.keep` calls after each step
    recorder.write(rows)                 # what a tracker does: everything kept so far goes to the database

A run has one session, whose id is in the run's folder: a resumed run goes on in it, and a step that is done again
after a kill meets its answers there already (session, answer's place in the batch, step) and writes nothing twice.
While the database is away answers wait in memory, `MOST_WAITING` of them at most.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlvr.core.files import write_atomic
from rlvr.core.types import Outcome, Score, Trajectory
from rlvr.store.connections import StoreDown
from rlvr.store.experience_store import ExperienceStore, open_store
from rlvr.store.records import Experience, Session, Status

MOST_WAITING = 20_000
BATCH = 200  # experiences a transaction
DETAIL = 500  # characters of a verdict's detail that are kept, from both ends
TASK_ID = 300  # characters of a task's id
ENDS = {"FINISHED": Status.DONE, "KILLED": Status.INTERRUPTED, "FAILED": Status.FAILED}


class RunRecorder:
    """A tracker (`rlvr.tracking.trackers.Tracker`) that also keeps answers."""

    name = "the store"
    interval = 0.0

    def __init__(
        self,
        url: str,
        folder: Path,
        run_name: str,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """ValueError for a place that cannot hold a store; one that is merely away is asked again at every write."""
        self._url, self._warn, self._most = url, warn, most_waiting
        # Where the store is may hold its password, and is nothing that the run computes by.
        config = {key: value for key, value in config.items() if key != "tracking"}
        self._session = Session(run_id(folder), "", "", dict(config), kind="run", name=run_name)
        self._session.instance = self._session.id
        self._store: ExperienceStore | None = None
        self._is_running = False
        self._waiting: list[Experience] = []
        self._lost = 0
        with suppress(StoreDown):  # `begin` tries again, and its caller reports it
            self._open()

    def begin(self, kept: Sequence[Any]) -> None:
        """Add the run's session, or mark it as running again after an earlier attempt."""
        store, session = self._open(), self._session
        now = time.time()
        if not store.add_session(Session(**{**vars(session), "status": Status.RUNNING, "started": now})):
            again = {"request": session.request, "status": Status.RUNNING, "finished": None, "error": None}
            store.update_session(session.id, **again)
            store.heartbeat(session.id)
            found = store.session(session.id)
            session.metrics = found.metrics if found else {}
        self._is_running = True

    def keep(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Take the answers of a step, to be written with its metrics."""
        self._waiting += [_experience(self._session.id, step, place, t) for place, t in enumerate(trajectories)]
        over = max(0, len(self._waiting) - self._most)
        self._lost += over
        del self._waiting[:over]

    def write(self, rows: Sequence[Any]) -> None:
        store, session = self._open(), self._session
        while self._waiting:
            store.add_experiences(self._waiting[:BATCH])
            del self._waiting[:BATCH]
        for row in rows:
            session.metrics |= {f"{row.phase}/{name}": value for name, value in row.metrics.items()}
        steps = [row.step + 1 for row in rows if row.phase != "summary"]
        session.iterations = steps[-1] if steps else session.iterations
        store.update_session(session.id, metrics=session.metrics, iterations=session.iterations)
        store.heartbeat(session.id)

    def close(self, status: str) -> None:
        if lost := self._lost + len(self._waiting):
            self._warn(f"the store was away for long and did not get {lost} answers; the run's folder is whole")
        if self._store is None:
            return
        try:
            if self._is_running:
                error = None if status != "FAILED" else {"code": "run_failed", "message": "the run stopped by an error"}
                self._store.update_session(self._session.id, status=ENDS[status], finished=time.time(), error=error)
        finally:
            self._store.close()

    def _open(self) -> ExperienceStore:
        if self._store is None:
            self._store = open_store(self._url)
        return self._store


def run_id(folder: Path) -> str:
    """The run's id in every store: made once, kept in its folder."""
    place = folder / "store.json"
    try:
        return str(json.loads(place.read_text(encoding="utf-8"))["session"])
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or not what was written there
        made = uuid.uuid4().hex
        write_atomic(place, json.dumps({"session": made}))
        return made


def _experience(session: str, step: int, place: int, t: Trajectory) -> Experience:
    """`outcome` is what the first verifier says, the one that rewards; passed is a confidence of 1."""
    verdict = next(iter(t.scores.values()), None)
    sure = None if verdict is None or verdict.value is None else float(verdict.outcome is Outcome.PASSED)
    wrong = [verdict.reason] if verdict and verdict.reason and verdict.outcome is not Outcome.PASSED else []
    return Experience(
        session_id=session,
        task_id=_short(t.task.id) if t.task else "",
        iteration=step + 1,
        sample=place,
        prompt=t.read_prompt,
        generated_output=t.response,
        feedback={"confidence": sure, "correctness_score": sure, "quality_score": None, "error_types": wrong},
        scores={name: _score_row(score) for name, score in t.scores.items()},
        outcome=verdict.outcome.value if verdict else "",
        confidence=sure,
        correctness=sure,
        reward=t.reward,
        advantage=t.advantage,
        stop_reason=t.stop_reason.value if t.stop_reason else "",
        tokens=list(t.response_tokens),
        logprobs=[round(x, 6) for x in t.logprobs],
        num_tokens=t.num_action_tokens,
        policy_version=t.policy_version,
        policy_fingerprint=t.policy_fingerprint,
        step=step,
        kind="run",
        verified_by=next(iter(t.scores), ""),
    )


def _short(task_id: str) -> str:
    """An id as an index takes it; of a long one the beginning, and a hash that tells it from others."""
    if len(task_id) <= TASK_ID:
        return task_id
    return f"{task_id[:TASK_ID]}~{hashlib.sha256(task_id.encode('utf-8', 'replace')).hexdigest()[:16]}"


def _score_row(score: Score) -> dict[str, Any]:
    detail = score.detail
    if len(detail) > 2 * DETAIL:
        detail = f"{detail[:DETAIL]} ... {detail[-DETAIL:]}"  # a traceback says last what went wrong
    return {**vars(score), "outcome": score.outcome.value, "detail": detail}
