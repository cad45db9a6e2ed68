"""Sessions: a generator works on a task, and everything it does is stored before it continues.

    sessions = Sessions(settings, store, generator, "this-instance")
    await sessions.open()
    session = await sessions.start(SessionRequest("code_fibonacci", "Write ..."), owner="")
    session = await sessions.wait(session.id)
    await sessions.answer(session)                     # the response of /train

The session's row is written before the work begins, and each answer, with the best one so far in the session's row,
before the next one is sampled. After `kill -9` only the current iteration is lost; the next process marks the session
interrupted. `rlvr.service.sessions.session_writer` says how writes survive a store that is down.
Left out on purpose: continuing a session of another instance; it is marked, and the client may send the task again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rlvr.core.fair_queue import become_owner, current_owner
from rlvr.core.fair_slots import FairSlots, FairThreads, share_of
from rlvr.reward.feedback import Feedback
from rlvr.service.service_metrics import ServiceMetrics
from rlvr.service.service_options import SessionRequest
from rlvr.service.session_problems import not_found, stopping, verifier_unavailable
from rlvr.service.sessions import session_results
from rlvr.service.sessions.jobs import CONVERGED, Generator, SessionFailure, SessionJob, SessionOutcome
from rlvr.service.sessions.live_session import (
    CANCELLED_ERROR,
    Ending,
    Event,
    LiveSession,
    Phase,
    decide_ending,
    decide_ending_of_stop,
    end_event,
    iteration_event,
    opening_events,
    status_event,
)
from rlvr.service.sessions.session_writer import OPEN, PATIENCE_S, SessionWriter
from rlvr.service.sessions.verification import (
    FieldError,
    Judge,
    VerifiableTask,
    build_verifiable_task,
    measure_accuracy,
)
from rlvr.service.settings import Settings
from rlvr.store import ExperienceStore, StoreDown
from rlvr.store.records import Experience, Session, Status
from rlvr.web.errors import HttpProblem
from rlvr.web.logs import get_logger

CANCEL_S = 2.0  # for the current iteration of a cancelled session to finish
POLL_S = 0.5  # between two reads of a session that another process works on
MOST_ANSWERS = 5_000  # experiences read for one response
WATCH_PAGE = 5  # answers read at a time for a watcher: a slow one holds no more than these in memory
UNOWNED = 48  # threads for what is not a session's work: the heartbeat, host names, reads and /grade, which have slots
MEASURED = 500  # newest sessions that `verifier_accuracy` covers

log = get_logger("rlvr.service.sessions.sessions")


class Sessions:
    """The sessions of this process. All public methods but `verifier_accuracy` belong to its event loop. `threads` run
    what blocks, of the whole service: a verifier may hold one for as long as programs run."""

    def __init__(
        self,
        settings: Settings,
        store: ExperienceStore,
        generator: Generator,
        instance: str,
        *,
        judge: Judge | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.settings, self.store, self.generator, self.instance = settings, store, generator, instance
        self.judge = judge or settings.judge
        self.metrics = ServiceMetrics()
        self._live: dict[str, LiveSession] = {}
        self._writer = SessionWriter(store, instance, patience_s)
        self.wait_out = self._writer.wait_out
        most = settings.limits.sessions
        self.threads = FairThreads(max(32, 4 * most), "work", UNOWNED + most)
        self._slots = FairSlots(most)
        self._ending_slots = FairSlots(most)  # the end of a session waits for no verifier of its owner
        self._building = Counter[str]()  # sessions whose task is being built, by `turn_of`
        self._heartbeat: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self) -> None:
        """Mark the sessions that an earlier process lost, start the generator and the heartbeat."""
        asyncio.get_running_loop().set_default_executor(self.threads)
        await asyncio.to_thread(self._writer.interrupt_lost)
        self.generator.start()
        self._heartbeat = asyncio.create_task(self._writer.run_heartbeat())

    async def start(self, request: SessionRequest, owner: str, *, is_background: bool = False) -> Session:
        """Write a new session's row and queue it; HttpProblem 422, 429 or 503 if that is not possible."""
        turn = turn_of(owner, is_background)
        become_owner(turn)
        self._require_room(turn)
        self._building[turn] += 1
        try:
            verifiable = await asyncio.to_thread(self._build_verifiable_task, request)
        finally:
            self._building[turn] -= 1
            self._building += Counter()  # drops those at zero
        if self._closing:
            raise stopping()
        session = Session(
            id=str(uuid.uuid4()),
            task_id=request.task_id,
            prompt=request.prompt,
            request=asdict(request),
            kind=request.kind,
            owner=owner,
            instance=self.instance,
            created=time.time(),
            metrics=verifiable.describe(),
        )
        live = LiveSession(session, verifiable, turn, is_background, loop=asyncio.get_running_loop())
        self._live[session.id] = live
        add = partial(self._writer.write_once, partial(self.store.add_session, session))
        try:
            await self.wait_out(lambda: asyncio.to_thread(add))
            live.publish(status_event(session.id, Status.QUEUED))
            live.task = asyncio.create_task(self._work(live, request))
            await asyncio.sleep(0)  # let the task begin: cancelling it before would skip its ending
        except BaseException:
            if live.task is None:
                del self._live[session.id]
            raise
        finally:
            live.advance(Phase.QUEUED if live.task is not None else Phase.OVER)
        return replace(session)

    def _require_room(self, turn: str) -> None:
        """HttpProblem if too many sessions run, wait or are being built: of all, or of those that take this turn."""
        if self._closing:
            raise stopping()
        most = self.settings.limits.sessions + self.settings.limits.queue
        by_turn = self._building + Counter(live.turn for live in self._live.values())
        if by_turn.total() >= most or by_turn[turn] >= share_of(most):
            many = f"{most} sessions" if by_turn.total() >= most else f"{by_turn[turn]} of your sessions"
            raise HttpProblem(429, "busy", f"{many} run or wait already; try again later", retry_after=5)

    def _build_verifiable_task(self, request: SessionRequest) -> VerifiableTask:
        """Blocks: patterns and schemas are checked in another process."""
        text = f"{request.prompt}\n\n{request.context}" if request.context.strip() else request.prompt
        try:
            verifiable = build_verifiable_task(
                replace(request, prompt=text),
                judge=self.judge,
                generator=self.settings.generator,
                environment_task=self.generator.task_from_prompt(request.prompt),
            )
        except FieldError as error:
            raise HttpProblem(422, "invalid", str(error), field=error.field) from error
        try:
            verifiable.blend.start()
        except ValueError as error:
            raise verifier_unavailable(error) from error
        verifiable.blend.observe = self.metrics.observe_verifier
        return verifiable

    async def wait(self, session_id: str) -> Session:
        """The session once it is over, whichever process works on it."""
        if (live := self._live.get(session_id)) is not None:
            await live.wait_for(Phase.OVER)
            return replace(live.session)
        while not (session := await self._load_session(session_id)).status.final:
            await asyncio.sleep(POLL_S)
        return session

    async def watch(self, session_id: str) -> AsyncIterator[Event]:
        """All events of a session from the first one on, waiting for those to come."""
        if (live := self._live.get(session_id)) is not None:
            async for event in live.events():
                yield event
            return
        num_opening, last = 0, None
        while True:
            session = await self._load_session(session_id)
            for event in opening_events(session)[num_opening:]:
                num_opening += 1
                yield event
            page = partial(self.store.experiences, session_id=session_id, limit=WATCH_PAGE, tokens=False)
            while experiences := await self._writer.read(partial(page, after=last)):
                last = experiences[-1].id
                for e in experiences:
                    yield iteration_event(e)
            if session.status.final:
                yield end_event(session)
                return
            await asyncio.sleep(POLL_S)

    async def cancel(self, session_id: str) -> None:
        """End a session after its current iteration, or during it if that takes longer than `CANCEL_S`."""
        live = self._live.get(session_id)
        if live is None:  # another instance reads the row between two iterations
            await self._ending_slots.run(current_owner(), partial(self._writer.write, lambda: self.store.update_session(
                session_id, expect=OPEN, status=Status.CANCELLED, finished=time.time(), error=dict(CANCELLED_ERROR),
            )))  # fmt: skip
            return
        live.request_stop(Status.CANCELLED)
        await live.wait_for(Phase.QUEUED)
        if live.task is None:  # its row could not be written
            return
        if live.phase is Phase.RUNNING:
            await asyncio.wait({live.task}, timeout=CANCEL_S)
        if live.phase < Phase.ENDING:
            live.task.cancel()
        await live.wait_for(Phase.OVER)

    async def answer(self, session: Session) -> dict[str, Any]:
        return session_results.train_response(session, await self._experiences(session.id))

    async def evaluation(self, session: Session) -> dict[str, Any]:
        return session_results.evaluate_response(session, await self._experiences(session.id))

    def verifier_accuracy(self) -> float | None:
        """The mean over the newest sessions with a known truth, weighted by checks; None if there are none."""
        measured = [m for m in self.store.newest_metrics(MEASURED) if m.get("verifier_accuracy") is not None]
        checks = sum(m.get("verifier_checks", 1) for m in measured)
        return sum(m["verifier_accuracy"] * m.get("verifier_checks", 1) for m in measured) / checks if checks else None

    async def close(self, grace_s: float) -> None:
        """Let current iterations finish within `grace_s`, and mark unfinished sessions interrupted."""
        self._closing = True
        self._writer.closing.set()
        await asyncio.gather(*(live.wait_for(Phase.QUEUED) for live in self._live.values()))
        tasks: set[asyncio.Task[None]] = set()
        for live in self._live.values():
            live.request_stop(Status.INTERRUPTED)
            assert live.task is not None
            tasks.add(live.task)
            if live.phase is Phase.QUEUED:
                live.task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
        await asyncio.to_thread(self._writer.write_pending)

    # One session

    async def _work(self, live: LiveSession, request: SessionRequest) -> None:
        """Take a session from the queue to its end. Never raises: the session's row says how it ended."""
        session, outcome = live.session, SessionOutcome()
        try:
            async with self._slots.hold(live.turn, live.is_background):
                if self._closing:
                    live.request_stop(Status.INTERRUPTED)
                    raise asyncio.CancelledError
                if not await asyncio.to_thread(self._claim, session):
                    raise SessionFailure("cancelled", "the session was cancelled while it was queued")
                session.status, session.started = Status.RUNNING, time.time()
                live.advance(Phase.RUNNING)
                live.publish(status_event(session.id, Status.RUNNING))
                outcome = await self.generator.run(self._job(live, request))
                ending = decide_ending(live, outcome)
        except asyncio.CancelledError:
            ending = decide_ending_of_stop(live)
        except SessionFailure as failure:
            if failure.code != "cancelled":
                self.metrics.count_generator_error(failure.code)
            ending = Ending(Status.CANCELLED if failure.code == "cancelled" else Status.FAILED, failure.as_dict())
        except StoreDown as failure:
            log.warning("a session failed by the database", session_id=session.id, reason=str(failure))
            ending = Ending(Status.FAILED, {"code": "store_down", "message": f"the database is {failure.reason}"})
        except Exception as failure:
            ending = _report_internal_failure(live, failure)
        live.advance(Phase.ENDING)
        close = partial(self._close, live, request, ending, outcome)
        closing = asyncio.create_task(self._ending_slots.run(live.turn, close))
        while not closing.done():
            with contextlib.suppress(asyncio.CancelledError):  # the service stops: the row is written all the same
                await asyncio.shield(closing)
        live.advance(Phase.OVER)
        log.info(
            "session over",
            session_id=session.id,
            task_id=session.task_id,
            status=session.status.value,
            iterations=session.iterations,
            confidence=session.final_confidence,
            reason=(session.error or {}).get("code"),
        )
        live.publish(end_event(session))
        self._live.pop(session.id, None)
        self.metrics.count_session(session, request.kind)

    def _claim(self, session: Session) -> bool:
        """Mark a session as running, False if it was ended meanwhile; and load what other instances have learned."""
        if not self._writer.write(lambda: self.store.claim(session.id, self.instance)):
            return False
        with contextlib.suppress(StoreDown):  # useful, not necessary
            self.generator.refresh()
        return True

    def _job(self, live: LiveSession, request: SessionRequest) -> SessionJob:
        config = self.settings.training
        return SessionJob(
            session_id=live.session.id,
            target=live.target,
            max_iterations=request.max_iterations or config.max_iterations,
            min_confidence=config.min_confidence if request.min_confidence is None else request.min_confidence,
            convergence_threshold=self._convergence_threshold(live),
            record=lambda answers: self._record(live, answers),
            is_cancelled=lambda: live.stop_status is not None,
            samples=request.samples,
            seed=request.seed,
            learn=request.learn,
            metrics=self.metrics,
            owner=live.turn,
            threads=self.threads,
        )

    def _convergence_threshold(self, live: LiveSession) -> float:
        """The change of reward below which a session ends; 0 (off) if a verifier knows the truth, because an answer
        that is still wrong has not converged."""
        return 0.0 if live.target.blend.verifiable else self.settings.training.convergence_threshold

    def _record(self, live: LiveSession, answers: Sequence[tuple[Experience, Feedback]]) -> None:
        """Store answers that were judged together, in one transaction, and publish them. Blocks. An answer that is
        played again after another session's failure is ignored."""
        with live.saving:
            known = {(e.sample, e.iteration) for e in live.experiences}
            answers = [(e, feedback) for e, feedback in answers if (e.sample, e.iteration) not in known]
            for e, feedback in answers:
                live.experiences.append(e)
                live.feedbacks.append(feedback)
                live.unsaved.append(e)
                self._count(e, feedback)
            if live.phase < Phase.ENDING:
                vars(live.session).update(session_results.session_progress(live.experiences))
            if live.store_error is not None:
                raise live.store_error
            if not answers:
                return
            try:
                self._writer.save(live)
            except StoreDown as error:
                if live.phase < Phase.ENDING:  # else its end is written, with as much patience as any
                    live.store_error = error
                raise
            for e, _ in answers:
                live.publish(iteration_event(e))

    def _count(self, e: Experience, feedback: Feedback) -> None:
        self.metrics.count_completion(e)
        for name, score in feedback.scores.items():
            if score.value is None:  # the client gets the reason alone: the detail may quote the judge's address
                detail = score.detail[:1000]
                log.warning("no verdict", session_id=e.session_id, verifier=name, reason=score.reason, detail=detail)

    def _close(self, live: LiveSession, request: SessionRequest, ending: Ending, outcome: SessionOutcome) -> None:
        """Learn from a session and write how it ended. Blocks, and never raises."""
        try:
            if request.learn:
                self._learn(live, outcome)
        except Exception as failure:
            ending = _report_internal_failure(live, failure)
        with live.saving:
            self._describe_end(live, ending, outcome)
            self._writer.finish(live)

    def _learn(self, live: LiveSession, outcome: SessionOutcome) -> None:
        """Store the gains and advantages, and let the generator learn. A failure here does not fail the session."""
        ids, store = live.ids, self.store
        gains = {key: gain for key, gain in outcome.gains.items() if key in ids}
        try:
            for write, values in ((store.set_gains, outcome.gains), (store.set_advantages, outcome.advantages)):
                if by_id := {ids[key]: value for key, value in values.items() if key in ids}:
                    self._writer.write(partial(write, by_id))
            if gains:
                answers = [(e, gains.get((e.sample, e.iteration))) for e in live.experiences]
                self.generator.learn([replace(e, gain=gain) for e, gain in answers if gain is not None])
                learning = self.generator.learning()
                outcome.loss, outcome.entropy = learning["training_loss"], learning["policy_entropy"]
        except (StoreDown, SessionFailure, RuntimeError) as error:
            log.warning("nothing was learned from a session", session_id=live.session.id, reason=str(error))

    def _describe_end(self, live: LiveSession, ending: Ending, outcome: SessionOutcome) -> None:
        """Set what a session's row says of its end."""
        session, target = live.session, live.target
        episode, best = (
            session_results.best_episode(live.experiences),
            session_results.best_experience(live.experiences),
        )
        session.converged = best is not None and outcome.end_reasons.get(best.sample) in CONVERGED
        session.convergence_iteration = episode[-1].iteration if session.converged else None
        accuracy = measure_accuracy(live.feedbacks, target.blend.opinions)
        metrics = session_results.train_metrics(
            live.experiences,
            convergence_iteration=session.convergence_iteration,
            verifier_accuracy=accuracy and accuracy.share,
            training_loss=outcome.loss,
            policy_entropy=outcome.entropy,
        ) | {
            "verifier_checks": accuracy.count if accuracy else 0,
            "convergence_threshold": self._convergence_threshold(live),
        }
        session.metrics = target.describe(live.feedbacks) | metrics
        session.status, session.error, session.finished = ending.status, ending.error, time.time()

    async def _load_session(self, session_id: str) -> Session:
        session = await self.wait_out(lambda: self._writer.read(partial(self.store.session, session_id)))
        if session is None:
            raise not_found("session", session_id)
        return session

    async def _experiences(self, session_id: str) -> list[Experience]:
        if (live := self._live.get(session_id)) is not None:
            return list(live.experiences)
        page = partial(self.store.experiences, session_id=session_id, limit=MOST_ANSWERS, tokens=False)
        return await self.wait_out(lambda: self._writer.read(page))


def turn_of(owner: str, is_background: bool) -> str:
    """The owner by which sessions take turns: the key; without keys, whether a client waits for the session."""
    return owner or ("background" if is_background else "waited for")


def _report_internal_failure(live: LiveSession, failure: Exception) -> Ending:
    log.error("a session failed by an internal error", session_id=live.session.id, exc_info=failure)
    message = f"{type(failure).__name__}: {failure}"[:500]
    return Ending(Status.FAILED, {"code": "internal", "message": message})
