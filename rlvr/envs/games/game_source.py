"""Environment `game`: the policy plays all roles of a game of several, or one of them against an opponent.

env: {name: "my_game:Duel", kwargs: {opponent: self}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.chat.special_tokens import special_token_texts, strip_special
from rlvr.core import rng
from rlvr.core.futures import run_to_end
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Task
from rlvr.envs.games.game_env import GameEnv, Seats
from rlvr.envs.games.game_session import ClassGame, MultiplayerGame
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.prompt import append_text
from rlvr.envs.registry import register_environment
from rlvr.envs.wrapped_source import NestedSource
from rlvr.reward.reward_options import check_integer, check_number

SELF = "self"


class GameSource(NestedSource):
    """The tasks of the environment `inner` as plays of a game; the episodes give the rewards.

    In training the policy plays against `opponent`, on held-out tasks against `heldout_opponent`: by default the last
    that the game has, else the same. Each is `self`, a name that the game has, or for training the path of a run or a
    checkpoint. Against an opponent the policy plays one role, the task's `role` or one that is drawn for it. All
    episodes of a group begin alike.
    """

    reward = "environment"

    def __init__(
        self,
        game: MultiplayerGame,
        inner: str | TaskSource,
        inner_kwargs: Any = None,
        opponent: str = SELF,
        heldout_opponent: str | None = None,
        max_turns: int = 100,
    ) -> None:
        super().__init__(game.name, inner, inner_kwargs)
        check_integer(f"{game.name}: max_turns", max_turns, 1)
        self._game, self._is_tried, self.max_turns = game, False, max_turns
        self.roles, self.vocabulary = game.roles, game.vocabulary
        self._player: SamplingClient | None = None
        known = (SELF, *game.opponents)
        self._opponent, self.opponent = opponent, ""
        if opponent not in known:
            if not (isinstance(opponent, str) and Path(opponent).expanduser().exists()):
                raise ValueError(
                    f"{game.name}: opponent={opponent!r:.80} is unknown{did_you_mean(str(opponent), known)}; known: "
                    f"{', '.join(known)}, and the path of a run or checkpoint that exists"
                )
            self.opponent = opponent
        default = game.opponents[-1] if game.opponents else SELF
        self._heldout_opponent = default if heldout_opponent is None else heldout_opponent
        if self._heldout_opponent not in known:
            raise ValueError(
                f"{game.name}: heldout_opponent={heldout_opponent!r:.80} is unknown"
                f"{did_you_mean(str(heldout_opponent), known)}; known: {', '.join(known)}"
            )

    def train(self, seed: int, index: int, level: str) -> Task:
        return self._assign(self.inner.train(seed, index, level), self._opponent, rng.key("game", seed, index))

    def heldout(self, count: int | None) -> list[Task]:
        return self._assign_heldout(count, self._heldout_opponent)

    def extra_heldout(self, count: int) -> dict[str, list[Task]]:
        others = [name for name in self._game.opponents if name != self._heldout_opponent]
        return {f"against {name}": self._assign_heldout(count, name) for name in others}

    def _assign_heldout(self, count: int | None, opponent: str) -> list[Task]:
        tasks = enumerate(self.inner.heldout(count))
        return [self._assign(task, opponent, rng.key("heldout game", number)) for number, task in tasks]

    def _assign(self, task: Task, opponent: str, draw: int) -> Task:
        """The task with who plays it."""
        meta = {"game": self._game.name, **task.meta, "opponent": opponent, "draw": draw}
        if opponent == SELF:
            meta.pop("role", None)
        else:
            meta.setdefault("role", self.roles[rng.integer(len(self.roles), draw)])
        return replace(task, meta=meta)

    def env(self, task: Task, tokenizer: Any) -> GameEnv:  # type: ignore[override]
        super().env(task, tokenizer)
        if not self._is_tried:  # its faults are found before a model is loaded
            self._try_begin(task)
            self._is_tried = True
        opponent, roles = task.meta["opponent"], self.roles
        if opponent != SELF:
            if task.meta["role"] not in self.roles:
                raise ValueError(
                    f"{self._game.name}: task {task.id!r} has the role {task.meta['role']!r}, which is unknown"
                    f"{did_you_mean(str(task.meta['role']), self.roles)}; known: {', '.join(self.roles)}"
                )
            roles = (task.meta["role"],)
        seats = Seats(roles, self._find_player(opponent), task.meta["draw"])
        return GameEnv(task, tokenizer, self._game.open(), seats, self.max_turns)

    def _find_player(self, opponent: str) -> str | SamplingClient:
        if opponent in self._game.opponents:
            return opponent
        return self._player or ""

    def seat(self, player: SamplingClient) -> None:
        self._player = player

    def _try_begin(self, task: Task) -> None:
        session = self._game.open()

        async def begin() -> None:
            try:
                await session.begin(task)
            finally:
                await session.close()

        try:
            run_to_end(begin())
        except EpisodeError as failure:
            raise ValueError(str(failure)) from failure

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        read, _ = self._demonstrate(task)
        return append_text(task, strip_special(read[0], special_token_texts(tokenizer))) if read else task

    def demonstration(self, task: Task, key: int) -> list[str] | None:
        """The turns of one role in a play of the first opponent that the game has against itself: what to imitate."""
        read, said = self._demonstrate(task)
        return [text for pair in zip(read, said, strict=True) for text in pair][1:] or None

    def _demonstrate(self, task: Task) -> tuple[list[str], list[str]]:
        """What the role of a task reads and says where the game's first opponent plays all; of a task of all roles, one
        that is drawn for it among those that have a turn."""
        session, draw = self._game.open(), task.meta["draw"]
        read: dict[str, list[str]] = {}
        said: dict[str, list[str]] = {}

        async def play() -> None:
            try:
                turn = await session.begin(task)
                while turn.role and self._game.opponents:
                    moves = list(await session.list_moves(self._game.opponents[0]))
                    number = sum(map(len, said.values()))
                    move = moves[rng.integer(len(moves), rng.key("demonstrated", draw, number))]
                    read.setdefault(turn.role, []).append(turn.text)
                    said.setdefault(turn.role, []).append(move)
                    turn = await session.step(move)
            except EpisodeError:  # others play in another process
                read.clear()
            finally:
                await session.close()

        run_to_end(play())
        if not read:
            return [], []
        role = task.meta.get("role") or list(read)[rng.integer(len(read), rng.key("demonstrated role", draw))]
        return read.get(role, []), said.get(role, [])


@register_environment("game")
class ClassGameSource(GameSource):
    """Episodes of a game of several roles, `environment: package.module:Class`: the policy plays against `opponent`.

    `opponent` is `self` (the policy plays all roles), a name that the game has (`opponents`), or the path of a run or
    one of its checkpoints. On held-out tasks it plays against `heldout_opponent`, by default the last that the game
    has. The class is made with `options`, for each episode anew. The tasks are those of the environment `inner`, made
    with `inner_kwargs`: by default seeds; `reset` gets the row. An episode has at most `max_turns` turns of all roles,
    and a call may take `seconds`.
    """

    def __init__(
        self,
        environment: str,
        options: Mapping[str, Any] | None = None,
        opponent: str = SELF,
        heldout_opponent: str | None = None,
        max_turns: int = 100,
        seconds: float = 30.0,
        inner: str = "seeds",
        inner_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_number("game: seconds", seconds, 0, above=True)
        game = ClassGame.at(environment, options, seconds)
        super().__init__(game, inner, inner_kwargs, opponent, heldout_opponent, max_turns)
