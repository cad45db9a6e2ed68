"""An episode of a game: each role reads a conversation of its own, and what others said is there as observation alone.

The policy plays one role or all of them. A role's turns are one branch of the episode, trained with the role's reward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlvr.core import rng
from rlvr.core.messages import ModelInput, SampledSequence
from rlvr.core.protocols import ExternalEnv, InitialObservationOverflow, SamplingClient, StepResult
from rlvr.core.types import Task
from rlvr.envs.games.game_session import GameSession, GameTurn
from rlvr.envs.gym.gym_env import ENDS
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.text_conversation import TextConversation


@dataclass(frozen=True)
class Seats:
    """Who plays what: the policy the `roles`, and the others an `opponent` of the game's own or a sampler. `key` is
    that of the opponent's draws, which follow from it and from the turns so far."""

    roles: Sequence[str]
    opponent: str | SamplingClient = ""
    key: int = 0


class GameEnv(ExternalEnv):
    """One episode, of at most `max_turns` turns of all roles together.

    `stop/REASON` says why it is over: `done`, `max_turns` or `no_room` (in the context of the role whose turn it is). A
    game that is not over by then gives every role 0. `reward/ROLE` and `turns/ROLE` are each role's.
    """

    def __init__(self, task: Task, tokenizer: Any, session: GameSession, seats: Seats, max_turns: int) -> None:
        self.task, self._tokenizer, self._session, self._seats = task, tokenizer, session, seats
        self._max_turns, self._is_closed = max_turns, False
        self._conversations: dict[str, TextConversation] = {}
        self._said: list[str] = []  # by all roles
        self._turns: list[str] = []  # the role of each turn of the policy
        self._rewards: dict[str, float] = {}

    async def initial_observation(self) -> tuple[ModelInput, None] | InitialObservationOverflow:
        result = await self._go_on(None)
        if result.next_observation is None:
            return InitialObservationOverflow(result.reward, result.metrics, error=result.error)
        return result.next_observation, None

    async def take(self, answer: SampledSequence) -> StepResult:
        if self.player is None:
            self._turns.append(self.role)
        return await self._go_on(answer.tokens)

    async def _go_on(self, action: list[int] | None) -> StepResult:
        """Give the game a turn, or begin it; play those of its own opponent, and show the next role what it reads."""
        chat = None
        try:
            if action is None:
                turn = await self._session.begin(self.task)
            else:
                conversation = self._conversations[self.role]
                turn = await self._step(conversation.say(action))
                chat = conversation.last_turn
            while turn.role and turn.role not in self._seats.roles and isinstance(self._seats.opponent, str):
                turn = await self._step(await self._draw_move(turn.role, self._seats.opponent))
            if not turn.role:
                return await self._end("done", chat, self._read_rewards(turn.rewards), turn.metrics)
            if len(self._said) >= self._max_turns:
                return await self._end("max_turns", chat)
            prompt = self._show(turn)
        except EpisodeError as failure:
            await self.close()
            return StepResult(0.0, True, error=str(failure), chat=chat)
        return await self._end("no_room", chat) if prompt is None else StepResult(0.0, False, prompt, chat=chat)

    async def _step(self, text: str) -> GameTurn:
        self._said.append(text)
        return await self._session.step(text)

    async def _draw_move(self, role: str, opponent: str) -> str:
        if not opponent:
            raise EpisodeError(
                f"task {self.task.id!r}: the role {role!r} has the turn, and neither the policy nor an opponent plays "
                "it"
            )
        moves = list(await self._session.list_moves(opponent))
        if not moves:
            raise EpisodeError(
                f"task {self.task.id!r}: the game lists no move of the opponent {opponent!r} as {role!r}; list_moves "
                "must give at least one"
            )
        return moves[rng.integer(len(moves), rng.key("opponent", self._seats.key, *self._said))]

    def _show(self, turn: GameTurn) -> ModelInput | None:
        """What the role reads before its turn; None if the context has no room for it."""
        self.role = turn.role
        self.player = (
            None if turn.role in self._seats.roles or isinstance(self._seats.opponent, str) else self._seats.opponent
        )
        if (conversation := self._conversations.get(turn.role)) is None:
            conversation = self._conversations[turn.role] = TextConversation(self.task, self._tokenizer)
            prompt = conversation.begin(turn.text)
        else:
            prompt = conversation.answer(turn.text)
        if prompt == []:
            raise EpisodeError(
                f"task {self.task.id!r}: the game gave no text to {turn.role!r}, and that role has no prompt either"
            )
        if prompt is None or (self.prompt_limit is not None and len(prompt) > self.prompt_limit):
            return None
        return ModelInput(prompt)

    def _read_rewards(self, given: Mapping[str, Any]) -> dict[str, float]:
        """The reward of each role that the policy plays; EpisodeError, never 0, if one has none."""
        rewards: dict[str, float] = {}
        for role in self._seats.roles:
            value = given.get(role)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise EpisodeError(
                    f"task {self.task.id!r}: the game is over and gave the role {role!r} the reward {value!r:.80}; "
                    f"expected a finite number for each of {', '.join(self._seats.roles)}"
                )
            rewards[role] = float(value)
        return rewards

    async def _end(
        self, why: str, chat: Any, rewards: Mapping[str, float] = {}, metrics: Mapping[str, float] = {}
    ) -> StepResult:
        await self.close()
        self._rewards = {role: rewards.get(role, 0.0) for role in self._seats.roles}
        counts = Counter(self._turns)
        measured = {**metrics, "turns": float(len(self._said))}
        measured |= {f"stop/{name}": float(name == why) for name in ENDS}
        for role, reward in self._rewards.items():
            measured |= {f"reward/{role}": reward, f"turns/{role}": float(counts[role])}
        return StepResult(self._rewards[self._judged_role], True, metrics=measured, chat=chat)

    @property
    def _judged_role(self) -> str:
        """The first role of the policy that took a turn: its reward is the episode's."""
        return next((role for role in self._seats.roles if role in self._turns), self._seats.roles[0])

    def final_turn(self) -> int | None:
        return self._last_turn(self._judged_role) if self._turns else None

    def _last_turn(self, role: str) -> int:
        return max(number for number, played in enumerate(self._turns) if played == role)

    def branch_rewards(self) -> Mapping[int, float]:
        return {self._last_turn(role): reward for role, reward in self._rewards.items() if role in self._turns}

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with suppress(EpisodeError):  # the episode is over, and its rewards stand
                await self._session.close()
