"""An episode of text: the policy acts, the environment answers, and its answer is appended to what the policy reads."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import InitialObservationOverflow, StepResult
from rlvr.core.types import Task
from rlvr.envs.gym.gym_session import GymSession, Observation
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.text_conversation import TextConversation

ENDS = ("done", "max_turns", "no_room")


class GymEnv:
    """One episode, of at most `max_turns` turns of the policy. `stop/REASON` says why it is over: `done`, `max_turns`
    or `no_room` (in the context). Of the latter two the reward is what the steps gave so far."""

    def __init__(
        self, task: Task, tokenizer: Any, session: GymSession, max_turns: int, slots: EpisodeSlots | None = None
    ) -> None:
        self.slots, self._is_closed = slots, False
        self._session, self._max_turns = session, max_turns
        self._conversation = TextConversation(task, tokenizer)
        self._counts = Counter[str]()

    async def initial_observation(self) -> tuple[ModelInput, None] | InitialObservationOverflow:
        task = self._conversation.task
        try:
            first = await self._session.reset(task)
        except EpisodeError as failure:
            await self.close()
            return InitialObservationOverflow(0.0, error=str(failure))
        if not (prompt := self._conversation.begin(first.text)):
            return InitialObservationOverflow(0.0, error=f"task {task.id!r}: reset said nothing, and it has no prompt")
        return ModelInput(prompt), None

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        self._counts["turns"] += 1
        try:
            said = await self._session.step(self._conversation.say(action))
        except EpisodeError as failure:
            await self.close()
            return StepResult(0.0, True, error=str(failure))
        if said.done:
            return await self._end(said, "done")
        if self._counts["turns"] >= self._max_turns:
            return await self._end(said, "max_turns")
        if (prompt := self._conversation.answer(said.text)) is None:
            return await self._end(said, "no_room")
        return StepResult(said.reward, False, ModelInput(prompt), metrics=dict(said.metrics))

    async def _end(self, said: Observation, why: str) -> StepResult:
        await self.close()
        ends = {f"stop/{name}": float(name == why) for name in ENDS}
        return StepResult(said.reward, True, metrics={**said.metrics, "turns": float(self._counts["turns"]), **ends})

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with suppress(EpisodeError):  # the episode is over, and its reward stands
                await self._session.close()
