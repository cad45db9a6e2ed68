"""Critics of refinement that know no programming: verifiers by weight (`BlendCritic`), all episodes of a turn at once.

    bench = Bench(Blend.of(["math"]))                  # one for all episodes
    critic = BlendCritic(bench, min_confidence=0.8)    # one an episode

An episode ends when the verifiers are sure enough (`confident`), when their reward hardly changes from one attempt to
the next (`converged`), when nobody could judge (`unjudged`), or when whoever asked has lost interest (`cancelled`).
The critic whose feedback comes from tests is in `rlvr.envs.code_critic`. `python -m pytest
tests/test_env_refine_blend.py` exercises it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlvr.envs.refine import Attempt, Critique
from rlvr.reward.blend import Blend, session_reward
from rlvr.reward.feedback import Feedback
from rlvr.reward.signatures import Case
from rlvr.types import Trajectory

Record = Callable[[Attempt, Feedback], Awaitable[None]]


class Bench:
    """Judges attempts by a blend. Those that come in one pass of the event loop, a turn's, are judged in one call.

    Verifiers may block (a sandbox, a judge's endpoint): they run in a thread beside the loop.
    """

    def __init__(self, blend: Blend) -> None:
        self.blend = blend
        self._waiting: dict[asyncio.AbstractEventLoop, list[tuple[Case, asyncio.Future[Feedback]]]] = {}
        self._working: set[asyncio.Task[None]] = set()  # a loop keeps no hold of its tasks

    async def judge(self, attempt: Attempt) -> Feedback:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Feedback] = loop.create_future()
        if loop not in self._waiting:
            self._waiting[loop] = []
            loop.call_soon(lambda: self._start(loop))  # behind the episodes that step in this pass
        self._waiting[loop].append((_case(attempt), future))
        return await future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        task = loop.create_task(self._judge(self._waiting.pop(loop)))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _judge(self, taken: list[tuple[Case, asyncio.Future[Feedback]]]) -> None:
        def give(future: asyncio.Future[Feedback], found: Feedback | Exception) -> None:
            if future.done():  # an episode may have been cancelled meanwhile
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        try:
            found = await asyncio.to_thread(self.blend.judge_many, [case for case, _ in taken])
            assert len(found) == len(taken)
        except Exception as error:  # verifiers raise nothing: a mistake of ours, for whoever waits
            found = [error] * len(taken)
        for (_, future), one in zip(taken, found, strict=True):
            give(future, one)


def _case(attempt: Attempt) -> Case:
    """What a reward would be given at the end of the episode, were this attempt the last."""
    task = attempt.task
    return Case.of(
        Trajectory(
            task.prompt_text,
            attempt.prompt_tokens,
            attempt.answer,
            attempt.tokens,
            task=task,
            stop_reason=attempt.stop_reason,
        )
    )


class BlendCritic:
    """The critic of one episode whose verifiers are a blend.

    An attempt is good enough at `min_confidence`. Two attempts have converged where the rewards of what was said of
    them (`session_reward`, without what it adds for being later) differ by less than `convergence_threshold`; 0 turns
    this off, as it has to be where the only verifier says right or wrong. Every attempt after the first costs
    `attempt_cost` of the episode's reward, so that a late right answer is worth less than an early one.

    `record` is awaited with every attempt and what was said of it, before the next one is asked for.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        min_confidence: float = 0.8,
        convergence_threshold: float = 0.0,
        attempt_cost: float = 0.0,
        record: Record | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence={min_confidence}, expected from 0 to 1")
        if not 0 <= convergence_threshold <= 2:
            raise ValueError(f"convergence_threshold={convergence_threshold}, expected from 0 (off) to 2")
        self._bench, self._record, self._cancelled = bench, record, cancelled
        self._enough, self._threshold, self._cost = min_confidence, convergence_threshold, attempt_cost
        self._before: float | None = None

    async def criticise(self, attempt: Attempt) -> Critique:
        feedback = await self._bench.judge(attempt)
        if self._record is not None:
            await self._record(attempt, feedback)
        worth, before = session_reward(feedback, 1), self._before
        self._before = worth
        cost = -self._cost if attempt.number > 1 else 0.0
        if feedback.confidence is None or worth is None:
            return Critique(None, cost, ended="unjudged")
        passed = feedback.confidence >= self._enough
        ended = ""
        if passed:
            ended = "confident"
        elif before is not None and abs(worth - before) < self._threshold:
            ended = "converged"
        elif self._cancelled():
            ended = "cancelled"
        metrics = {"confidence": feedback.confidence, "converged": float(ended == "converged")}
        right = passed if feedback.truth is None else feedback.truth
        return Critique(None if ended else told(feedback), cost, metrics, ended, right)


def told(feedback: Feedback) -> str:
    """What a policy is told: a line for each verifier, then what to do about it."""
    return "\n".join([*feedback.detailed_feedback.split("\n"), *feedback.suggestions])
