"""An episode of text: the policy acts, the environment answers, and its answer is appended to what the policy reads."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from rlvr.chat.special_tokens import special_token_texts, strip_special
from rlvr.chat.turns import decode_turn, encode_between, has_room, render_between
from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import InitialObservationOverflow, StepResult
from rlvr.core.types import Task
from rlvr.envs.gym.gym_session import GymSession, Observation
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.prompt import append_text, encode_prompt

ENDS = ("done", "max_turns", "no_room")


class GymEnv:
    """One episode, of at most `max_turns` turns of the policy. `stop/REASON` says why it is over: `done`, `max_turns`
    or `no_room` (in the context). Of the latter two the reward is what the steps gave so far."""

    def __init__(
        self, task: Task, tokenizer: Any, session: GymSession, max_turns: int, slots: EpisodeSlots | None = None
    ) -> None:
        self.slots, self._is_closed = slots, False
        self.task, self._tokenizer, self._session, self._max_turns = task, tokenizer, session, max_turns
        self._special = special_token_texts(tokenizer)
        self._seen: list[int] = []
        self._counts = Counter[str]()

    async def initial_observation(self) -> tuple[ModelInput, None] | InitialObservationOverflow:
        try:
            first = await self._session.reset(self.task)
        except EpisodeError as failure:
            await self.close()
            return InitialObservationOverflow(0.0, error=str(failure))
        self.task = append_text(self.task, strip_special(first.text, self._special))
        self._seen = encode_prompt(self.task, self._tokenizer)
        if not self._seen:
            return InitialObservationOverflow(
                0.0, error=f"task {self.task.id!r}: reset said nothing, and it has no prompt"
            )
        return ModelInput(self._seen), None

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        self._counts["turns"] += 1
        try:
            said = await self._session.step(decode_turn(action, self._tokenizer))
        except EpisodeError as failure:
            await self.close()
            return StepResult(0.0, True, error=str(failure))
        if said.done:
            return await self._end(said, "done")
        if self._counts["turns"] >= self._max_turns:
            return await self._end(said, "max_turns")
        self._seen += [*action, *self._encode(said.text, action)]
        if not has_room(self._tokenizer, self._seen, action):
            return await self._end(said, "no_room")
        return StepResult(said.reward, False, ModelInput(self._seen), metrics=dict(said.metrics))

    def _encode(self, text: str, action: list[int]) -> list[int]:
        """What is appended. An environment's text is data: none of it becomes a special token."""
        text = strip_special(text, self._special).encode("utf-8", "replace").decode()
        if not isinstance(self.task.model_prompt, str):
            message = {"role": "user", "content": text}
            text = render_between(self.task, self._tokenizer, action, [message])
        return encode_between(self.task, self._tokenizer, text)

    async def _end(self, said: Observation, why: str) -> StepResult:
        await self.close()
        ends = {f"stop/{name}": float(name == why) for name in ENDS}
        return StepResult(said.reward, True, metrics={**said.metrics, "turns": float(self._counts["turns"]), **ends})

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with suppress(EpisodeError):  # the episode is over, and its reward stands
                await self._session.close()
