"""Reviewers of refinement: what a reviewer is, and the two that come with the package.

    judge = BlendJudge(Blend.of(["math"]))             # one for all episodes
    reviewer = BlendReviewer(judge, min_confidence=0.8)    # one per episode

`BlendReviewer` asks verifiers by weight; `TestsReviewer` runs the visible tests of a programming problem. The episode
that they review is in `rlvr.envs.refine`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rlvr.core.fair_queue import become_owner
from rlvr.core.types import Outcome, Score, StopReason, Task
from rlvr.reward.blend import Blend, session_reward
from rlvr.reward.code import CodeProblem, extract
from rlvr.reward.code.code_reward import get_sandbox, sandbox_job
from rlvr.reward.code.program_extraction import BEGIN, DONE
from rlvr.reward.feedback import Feedback, sanitize
from rlvr.reward.signatures import Case
from rlvr.sandbox import Sandbox, Verdict


@dataclass(frozen=True)
class Attempt:
    """One completion, as a reviewer gets it. `number` counts from 1; after the `last` one no other can follow.

    `answer` is the text without its end token, `tokens` all sampled tokens, `prompt_tokens` all tokens before them.
    """

    task: Task
    number: int
    answer: str
    tokens: list[int]
    prompt_tokens: list[int]
    last: bool
    stop_reason: StopReason | None
    _tokenizer: Any = field(repr=False)

    @property
    def prompt(self) -> str:
        """What the policy saw, as text."""
        return self._tokenizer.decode(self.prompt_tokens, skip_special_tokens=False)


@dataclass(frozen=True)
class Review:
    """A reviewer's verdict on an attempt. `feedback` None ends the episode; `ended` is then a word for the reason.

    `reward` adds to the episode's own. `passed` is whether the attempt is right, None if the reviewer does not know.
    """

    feedback: str | None
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    ended: str = ""
    passed: bool | None = None


class Reviewer(Protocol):
    """Reviews the attempts of one episode in order; the next one is sampled after `review` returned."""

    async def review(self, attempt: Attempt) -> Review: ...


@dataclass(frozen=True)
class JudgedAttempt:
    """An attempt with its feedback. `sample` is the number that its reviewer was given."""

    attempt: Attempt
    feedback: Feedback
    sample: int = 0


RecordAttempts = Callable[[Sequence[JudgedAttempt]], None]
_Waiting = tuple[Attempt, int, asyncio.Future[Feedback]]


class BlendJudge:
    """Judges attempts by a blend of verifiers. Attempts of one pass of the event loop (one turn) share one call.

    Judges are awaited. The other verifiers may block (a sandbox), so they run in a thread beside the loop (of
    `threads`, or the loop's own), for `owner`: programs of different owners take turns in the sandbox. The same thread
    then passes the attempts to `record`, which may block too, before any of them gets its feedback; what it raises,
    each of them gets.
    """

    def __init__(
        self, blend: Blend, owner: str = "", *, record: RecordAttempts | None = None, threads: Executor | None = None
    ) -> None:
        self.blend, self._owner, self._record, self._threads = blend, owner, record, threads
        self._queues: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # an event loop keeps only weak references to its tasks

    async def judge(self, attempt: Attempt, sample: int = 0) -> Feedback:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Feedback] = loop.create_future()
        if loop not in self._queues:
            self._queues[loop] = []
            loop.call_soon(lambda: self._start(loop))  # after the episodes that step in this pass
        self._queues[loop].append((attempt, sample, future))
        return await future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        task = loop.create_task(self._judge(loop, self._queues.pop(loop)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _judge(self, loop: asyncio.AbstractEventLoop, batch: list[_Waiting]) -> None:
        become_owner(self._owner)  # of this task and of its call
        batch = [one for one in batch if not one[2].done()]
        results: list[tuple[asyncio.Future[Feedback], Feedback | Exception]]
        try:
            awaited = await self.blend.await_judges([_case(attempt) for attempt, _, _ in batch])
            context, work = contextvars.copy_context(), partial(self._judge_and_record, batch, awaited)
            results = await loop.run_in_executor(self._threads, lambda: context.run(work))
        except Exception as error:  # of `record` or `observe`: verifiers raise nothing
            results = [(future, error) for _, _, future in batch]
        for future, result in results:
            if future.done():  # the episode was cancelled meanwhile
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _judge_and_record(
        self, batch: list[_Waiting], awaited: Mapping[str, Sequence[Score]]
    ) -> list[tuple[asyncio.Future[Feedback], Feedback | Exception]]:
        """Judge and record the attempts whose episodes were not cancelled, before this call had a thread or after."""
        kept = [place for place, (_, _, future) in enumerate(batch) if not future.done()]
        batch = [batch[place] for place in kept]
        scores = {label: [column[place] for place in kept] for label, column in awaited.items()}
        feedbacks = self.blend.judge_many([_case(attempt) for attempt, _, _ in batch], scores)
        judged = list(zip(batch, feedbacks, strict=True))
        if self._record is not None:
            to_record = [
                JudgedAttempt(attempt, feedback, sample)
                for (attempt, sample, future), feedback in judged
                if not future.done()
            ]
            if to_record:
                self._record(to_record)
        return [(future, feedback) for (_, _, future), feedback in judged]


def _case(attempt: Attempt) -> Case:
    """The case of an episode that ends with this attempt."""
    return Case.of_task(attempt.task, attempt.answer, tokens=attempt.tokens, stop_reason=attempt.stop_reason)


class BlendReviewer:
    """The reviewer of one episode that is judged by a blend of verifiers.

    The episode ends when the blend's confidence reaches `min_confidence` (`confident`; a confidence of 0 never does),
    when no verifier could judge (`unjudged`; if advisory ones did, once they have no new objection), when the caller is
    not interested any more (`cancelled`), or when the `session_reward` changes by less than `convergence_threshold`
    from one attempt to the next (`converged`; 0 turns this off, as a verifier that says only right or wrong needs).
    Every attempt after the first costs `attempt_cost` of the episode's reward. `sample` is the episode's number, for
    the judge's `record`.
    """

    def __init__(
        self,
        judge: BlendJudge,
        *,
        min_confidence: float = 0.8,
        convergence_threshold: float = 0.0,
        attempt_cost: float = 0.0,
        sample: int = 0,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence={min_confidence}, expected from 0 to 1")
        if not 0 <= convergence_threshold <= 2:
            raise ValueError(f"convergence_threshold={convergence_threshold}, expected from 0 (off) to 2")
        self._judge, self._sample, self._cancelled = judge, sample, cancelled
        self._min_confidence, self._threshold, self._cost = min_confidence, convergence_threshold, attempt_cost
        self._last_reward: float | None = None
        self._last_errors: tuple[str, ...] = ()

    async def review(self, attempt: Attempt) -> Review:
        feedback = await self._judge.judge(attempt, self._sample)
        reward, before = session_reward(feedback, 1), self._last_reward
        self._last_reward = reward
        cost = -self._cost if attempt.number > 1 else 0.0
        errors, self._last_errors = self._last_errors, feedback.error_types
        if feedback.confidence is None or reward is None:
            if feedback.error_types in ((), errors):
                return Review(None, cost, ended="unjudged")
            is_over = self._cancelled()
            return Review(None if is_over else feedback_text(feedback), cost, ended="cancelled" if is_over else "")
        passed = is_accepted(feedback, self._min_confidence)
        ended = ""
        if passed:
            ended = "confident"
        elif before is not None and abs(reward - before) < self._threshold:
            ended = "converged"
        elif self._cancelled():
            ended = "cancelled"
        metrics = {"confidence": feedback.confidence, "converged": float(ended == "converged")}
        correct = passed if feedback.truth is None else feedback.truth
        return Review(None if ended else feedback_text(feedback), cost, metrics, ended, correct)


def is_accepted(feedback: Feedback, min_confidence: float) -> bool:
    """Whether the confidence in an answer is enough; none at all never is, nor is any against a decisive verifier."""
    confidence = feedback.confidence or 0.0
    return not feedback.is_refused and confidence > 0 and confidence >= min_confidence


def feedback_text(feedback: Feedback) -> str:
    """The feedback as a policy reads it: a line for each verifier, then suggestions."""
    return "\n".join([*feedback.detailed_feedback.split("\n"), *feedback.suggestions])


class TestsReviewer:
    """Runs an attempt against the first `visible` tests of its programming problem (None: all).

        Previous attempt failed: assertion: assert add(1, 2) == 3
        Please fix the code.

    Hidden tests give no feedback, so they stay hidden. The feedback is one sanitized line of an error, cut short.
    """

    __test__ = False  # pytest must not collect it by its name
    FEEDBACK = "Previous attempt failed: {error}\nPlease fix the code."

    def __init__(self, visible: int | None = 1, sandbox: Sandbox | None = None, special: Sequence[str] = ()) -> None:
        self._visible, self._sandbox, self._special = visible, sandbox, (*special, BEGIN, DONE)

    async def review(self, attempt: Attempt) -> Review:
        error = None if attempt.last else await self._error(attempt)
        return Review(None if error is None else self.FEEDBACK.format(error=error))

    async def _error(self, attempt: Attempt) -> str | None:
        """Why the attempt fails the visible tests; None if it passes them or could not be judged."""
        problem = CodeProblem.of(attempt.task.meta)
        program = extract(attempt.answer, problem.names, problem.prefix)
        if program.reason:
            return sanitize(program.reason.replace("_", " "), self._special)
        job = sandbox_job(program.code, problem, problem.visible_tests(self._visible))
        try:
            verdict = await get_sandbox(self._sandbox).averify(**job)
        except (OSError, RuntimeError, ValueError):  # no sandbox here: the reward reports that
            return None
        if verdict.outcome not in (Outcome.FAILED, Outcome.TIMEOUT):
            return None
        return sanitize(_describe_failure(verdict, job["tests"]), self._special)


def _describe_failure(verdict: Verdict, tests: list[Any]) -> str:
    """The reason and the visible test, or the answer's own exception."""
    failed = next((i for i, test in enumerate(verdict.tests) if not test.passed), 0)
    detail = verdict.tests[failed].detail if failed < len(verdict.tests) else verdict.detail
    reason = verdict.reason.replace("_", " ")
    if verdict.reason in ("assertion", "wrong_output", "timeout") and failed < len(tests):
        test = tests[failed]
        shown = test if isinstance(test, str) else f"input {test['input']!r}, expected output {test['output']!r}"
        return f"{reason}: {shown}{f' ({detail})' if detail else ''}"
    return f"{reason}: {detail}" if detail else reason
