"""Sessions: a task comes in, a generator works on it, and everything it does is in the store before it goes on.

    sessions = Sessions(settings, store, generator, "this-instance")
    await sessions.open()
    session = await sessions.start(Request("code_fibonacci", "Write ..."), owner="")
    session = await sessions.wait(session.id)
    await sessions.answer(session)                     # what /train answers

The row is written before the work begins, an answer before the next one is asked for, and with it the best answer so
far into the session's row: after `kill -9` nothing is lost but the iteration under way, and the next process marks the
session interrupted. How writes survive a store that is away is in `rlvr.service.loop.ledger`.

`python -m pytest tests/test_sessions.py tests/test_sessions_failures.py` exercises it. Left out on purpose: taking over
another instance's session; it is marked, and whoever asked may ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rlvr.reward.feedback import Feedback
from rlvr.service.logs import logger
from rlvr.service.loop import answers
from rlvr.service.loop.credit import worth_of
from rlvr.service.loop.jobs import CONVERGED, Generator, Job, Outcome, SessionFailure
from rlvr.service.loop.ledger import PATIENCE_S, Ledger
from rlvr.service.loop.live import Live, end_event, iteration_event, opening_events, status_event
from rlvr.service.loop.verification import Judge, accuracy, case_of
from rlvr.service.options import Request
from rlvr.service.problems import Problem, not_found
from rlvr.service.settings import Settings
from rlvr.store import Store, StoreDown
from rlvr.store.records import Experience, Session, Status

CANCEL_S = 2.0  # how long a cancelled session may finish the iteration it is at
POLL_S = 0.5  # between two looks at a session that another process works on
MOST_ANSWERS = 5_000  # experiences of one session that an answer is made of
WATCHED = 5  # answers that a watcher of a stored session is given at a time: one that does not read keeps them
MEASURED = 500  # sessions that `verifier_accuracy` is measured on

log = logger("rlvr.service.loop.sessions")


class Sessions:
    """Those that this process works on; all methods but `verifier_accuracy` are for its event loop."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        generator: Generator,
        instance: str,
        *,
        judge: Judge | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.settings, self.store, self.generator, self.instance = settings, store, generator, instance
        self.judge = judge or settings.judge
        self._live: dict[str, Live] = {}
        self._ledger = Ledger(store, instance, patience_s)
        self._slots = asyncio.Semaphore(settings.limits.sessions)
        self._beating: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self) -> None:
        """Mark what an earlier life left, and begin to be alive."""
        await self._ledger.interrupt_lost()
        self.generator.start()
        self._beating = asyncio.create_task(self._ledger.beat())

    async def start(self, request: Request, owner: str) -> Session:
        """Write the session down and begin. Problem (422, 429, 503) where it cannot be."""
        self._require_room()
        case = await self._case(request)
        self._require_room()  # now: those that came at the same moment have taken theirs
        session = Session(
            id=str(uuid.uuid4()),
            task_id=request.task_id,
            prompt=request.prompt,
            request=asdict(request),
            owner=owner,
            instance=self.instance,
            created=time.time(),
        )
        live = self._live[session.id] = Live(session, case)
        try:
            await self._ledger.ask(partial(self.store.add_session, session))
            await live.tell(status_event(session.id, Status.QUEUED))
            live.task = asyncio.create_task(self._work(live, request))
            await asyncio.sleep(0)  # a task that was cancelled before it began would end nothing
        except BaseException:
            if live.task is None:
                del self._live[session.id]
            raise
        finally:
            live.begun.set()
        return replace(session)

    def _require_room(self) -> None:
        if self._closing:
            raise Problem(503, "stopping", "the service is stopping; try again when it is back", retry_after=10)
        limits = self.settings.limits
        if len(self._live) >= limits.sessions + limits.queue:
            told = f"{len(self._live)} sessions run or wait already; try again later"
            raise Problem(429, "busy", told, retry_after=5)

    async def _case(self, request: Request) -> Any:
        text = f"{request.prompt}\n\n{request.context}" if request.context.strip() else request.prompt
        posed, known = self.generator.posed(request.prompt) or (None, "")
        asked = replace(request, prompt=text)
        try:  # in a thread: a pattern is compiled and a schema checked in another process, and both may take their time
            case = await asyncio.to_thread(
                case_of, asked, judge=self.judge, generator=self.settings.generator, posed=posed, known=known
            )
        except ValueError as error:
            raise Problem(422, "invalid", str(error), field="verifiers") from error
        try:
            await asyncio.to_thread(case.blend.start)
        except ValueError as error:
            raise Problem(503, "verifier_unavailable", str(error)) from error
        return case

    async def wait(self, session_id: str) -> Session:
        """The session once it is over, whoever works on it."""
        if (live := self._live.get(session_id)) is not None:
            await live.over.wait()
            return replace(live.session)
        while True:
            found = await self._stored(session_id)
            if found.status.final:
                return found
            await asyncio.sleep(POLL_S)

    async def watch(self, session_id: str) -> AsyncIterator[dict[str, Any]]:
        """Its events from the first one on, those to come too."""
        if (live := self._live.get(session_id)) is not None:
            async for event in live.events():
                yield event
            return
        told, last = 0, None
        while True:
            session = await self._stored(session_id)
            for event in opening_events(session)[told:]:
                told += 1
                yield event
            page = partial(self.store.experiences, session_id=session_id, limit=WATCHED, tokens=False)
            while found := await self._ledger.ask(partial(page, after=last)):
                last = found[-1].id
                for e in found:
                    yield iteration_event(e)
            if session.status.final:
                yield end_event(session)
                return
            await asyncio.sleep(POLL_S)

    async def cancel(self, session_id: str) -> None:
        """End it after the iteration it is at, or in the middle of that where it takes long."""
        live = self._live.get(session_id)
        if live is None:  # another instance's: its row says so, and it looks there between iterations
            await self._ledger.write(lambda: self.store.update_session(
                session_id, expect=(Status.QUEUED, Status.RUNNING), status=Status.CANCELLED, finished=time.time(),
                error={"code": "cancelled", "message": "cancelled on request"},
            ))  # fmt: skip
            return
        live.stop = live.stop or "cancelled"
        await live.begun.wait()
        assert live.task is not None
        if live.session.status is Status.RUNNING:
            await asyncio.wait({live.task}, timeout=CANCEL_S)
        if not live.session.status.final:
            live.task.cancel()
        await live.over.wait()

    async def answer(self, session: Session) -> dict[str, Any]:
        return answers.train_answer(session, await self._experiences(session.id))

    async def evaluation(self, session: Session) -> dict[str, Any]:
        return answers.evaluate_answer(session, await self._experiences(session.id))

    def verifier_accuracy(self) -> float | None:
        """Over the newest sessions whose tasks say what is right, by number of checks; None where there are none."""
        known = [m for m in self.store.session_metrics(MEASURED) if m.get("verifier_accuracy") is not None]
        checks = sum(m.get("verifier_checks", 1) for m in known)
        return sum(m["verifier_accuracy"] * m.get("verifier_checks", 1) for m in known) / checks if checks else None

    async def close(self, grace_s: float) -> None:
        """Begin no iteration any more, let those under way end, and mark what was not finished."""
        self._closing = self._ledger.closing = True
        tasks: set[asyncio.Task[None]] = set()
        await asyncio.gather(*(live.begun.wait() for live in self._live.values()))
        for live in self._live.values():
            live.stop = live.stop or "interrupted"
            assert live.task is not None
            tasks.add(live.task)
            if live.session.status is Status.QUEUED:
                live.task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        await self._ledger.pay()

    # One session

    async def _work(self, live: Live, request: Request) -> None:
        """From the queue to the end. Never raises: how it ended is in the session."""
        session, outcome = live.session, Outcome()
        status, error = Status.DONE, None
        try:
            async with self._slots:
                if self._closing:
                    live.stop = live.stop or "interrupted"
                    raise asyncio.CancelledError
                if not await self._ledger.write(lambda: self.store.claim(session.id, self.instance)):
                    raise SessionFailure("cancelled", "it was ended before its turn came")
                session.status, session.started = Status.RUNNING, time.time()
                await live.tell(status_event(session.id, Status.RUNNING))
                outcome = await self.generator.run(self._job(live, request))
                status, error = self._ending(live, outcome)
                await self._learn(live, request, outcome)
        except asyncio.CancelledError:
            status, error = self._stopped(live)
        except SessionFailure as failure:
            status = Status.CANCELLED if failure.code == "cancelled" else Status.FAILED
            error = failure.as_dict()
        except StoreDown as failure:
            status, error = Status.FAILED, {"code": "store_down", "message": f"the database is away: {failure}"}
        except Exception as failure:
            log.error("a session failed by our fault", session_id=session.id, exc_info=failure)
            status, error = Status.FAILED, {"code": "internal", "message": f"{type(failure).__name__}: {failure}"[:500]}
        await self._end(live, status, error, outcome)

    def _job(self, live: Live, request: Request) -> Job:
        config = self.settings.training
        return Job(
            session_id=live.session.id,
            case=live.case,
            max_iterations=request.max_iterations or config.max_iterations,
            min_confidence=config.min_confidence if request.min_confidence is None else request.min_confidence,
            convergence_threshold=self._threshold(live),
            record=lambda e, feedback: self._record(live, e, feedback),
            cancelled=lambda: bool(live.stop),
            samples=request.samples,
            seed=request.seed,
            learn=request.learn,
        )

    def _threshold(self, live: Live) -> float:
        """The change of reward that ends a session; 0 (off) where a verifier knows what is right: an answer that is
        still wrong has not converged to anything."""
        return 0.0 if live.case.blend.computes else self.settings.training.convergence_threshold

    async def _record(self, live: Live, e: Experience, feedback: Feedback) -> None:
        """A verified answer: into the store with the best so far, and to whoever watches. Answers that come while the
        ones before are written go together; one that is played again after another's failure is there already."""
        if any((e.sample, e.iteration) == (other.sample, other.iteration) for other in live.experiences):
            return
        live.experiences.append(e)
        live.feedbacks.append(feedback)
        live.unsaved.append(e)
        if not live.session.status.final:
            vars(live.session).update(answers.standing(live.experiences))
        async with live.saving:
            if e.id is not None:
                return
            if live.away is not None:
                raise live.away
            new = list(live.unsaved)
            try:
                await self._ledger.save(live)
            except StoreDown as error:
                live.away = error
                raise
            for one in new:
                await live.tell(iteration_event(one))

    async def _learn(self, live: Live, request: Request, outcome: Outcome) -> None:
        """What came of each answer goes to the store, and the generator learns. No session fails of that."""
        if not request.learn:
            return
        ids, store = live.ids, self.store
        chosen = answers.best(live.experiences)
        result = worth_of(chosen) if chosen else None  # what a reward adds for being late is no progress
        try:
            for write, values in ((store.set_gains, outcome.gains), (store.set_advantages, outcome.advantages)):
                if known := {ids[key]: value for key, value in values.items() if key in ids}:
                    await self._ledger.write(partial(write, known))
            if outcome.gains:
                await self.generator.learn(result)
                told = self.generator.learning()
                outcome.loss, outcome.entropy = told["training_loss"], told["policy_entropy"]
        except (StoreDown, SessionFailure, RuntimeError) as error:
            log.warning("nothing was learned from a session", session_id=live.session.id, reason=str(error))

    def _ending(self, live: Live, outcome: Outcome) -> tuple[Status, dict[str, Any] | None]:
        """How a job that its generator has played to the end stands."""
        if "cancelled" in outcome.ended.values() and live.stop:
            return self._stopped(live)
        if live.experiences and not any(e.confidence is not None for e in live.experiences):
            said = [f"{label}: {s.reason} {s.detail}" for label, s in live.feedbacks[-1].scores.items()]
            told = "no verifier could judge an answer: " + "; ".join(said)[:600]
            return Status.FAILED, {"code": "judge_failed", "message": told}
        return Status.DONE, None

    def _stopped(self, live: Live) -> tuple[Status, dict[str, Any]]:
        if live.stop == "cancelled":
            return Status.CANCELLED, {"code": "cancelled", "message": "cancelled on request"}
        return Status.INTERRUPTED, {"code": "interrupted", "message": "the service stopped; what was done is kept"}

    async def _end(self, live: Live, status: Status, error: dict[str, Any] | None, outcome: Outcome) -> None:
        session = live.session
        rows, best = answers.episode(live.experiences), answers.best(live.experiences)
        session.converged = best is not None and outcome.ended.get(best.sample) in CONVERGED
        session.convergence_iteration = rows[-1].iteration if session.converged else None
        checks = accuracy(live.feedbacks, live.case.opinions)
        session.metrics = answers.train_metrics(
            live.experiences,
            convergence_iteration=session.convergence_iteration,
            verifier_accuracy=checks and checks.share,
            training_loss=outcome.loss,
            policy_entropy=outcome.entropy,
        ) | {
            "verifier_checks": checks.count if checks else 0,
            "self_judging": live.case.self_judging,
            "verified_by": live.case.blend.judges,
            "convergence_threshold": self._threshold(live),
        }
        session.status, session.error, session.finished = status, error, time.time()
        await self._ledger.finish(live)
        live.over.set()
        log.info(
            "session over",
            session_id=session.id,
            task_id=session.task_id,
            status=status.value,
            iterations=session.iterations,
            confidence=session.final_confidence,
            reason=(error or {}).get("code"),
        )
        await live.tell(end_event(session))
        self._live.pop(session.id, None)

    async def _stored(self, session_id: str) -> Session:
        found = await self._ledger.ask(partial(self.store.session, session_id))
        if found is None:
            raise not_found("session", session_id)
        return found

    async def _experiences(self, session_id: str) -> list[Experience]:
        if (live := self._live.get(session_id)) is not None:
            return list(live.experiences)
        return await self._ledger.ask(
            lambda: self.store.experiences(session_id=session_id, limit=MOST_ANSWERS, tokens=False)
        )
