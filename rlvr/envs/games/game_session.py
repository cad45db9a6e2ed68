"""The contract of a game of several roles, and classes of one's own that follow it.

    class Duel:
        roles = ("first", "second")
        def reset(self, seed): ...     # begins; may take fields of the task's row too
        def turn(self): ...            # whose turn it is and what that role reads, (role, text); None once it is over
        def step(self, action): ...    # takes the text of that role's turn
        def rewards(self): ...         # once it is over: {role: number}

An opponent of its own is a name in `opponents`; `moves(name)` lists the texts among which that one draws. `metrics()`
may give numbers once the game is over. The game says what an illegal move does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr.core.registry import check_kwargs, load_path
from rlvr.core.types import Task
from rlvr.envs.limited_calls import EpisodeError, wait_for_result
from rlvr.envs.tools.environment_class import call_user_code, choose_arguments


@dataclass(frozen=True)
class GameTurn:
    """Whose turn it is, and what that role reads: all that is new to it. "" is the end: then `rewards` are by role."""

    role: str
    text: str = ""
    rewards: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class GameSession(ABC):
    """One play of a game. Its methods raise EpisodeError where it cannot go on."""

    @abstractmethod
    async def begin(self, task: Task) -> GameTurn:
        """The first turn."""
        ...

    @abstractmethod
    async def step(self, action: str) -> GameTurn:
        """Play `action` for the role whose turn it is; returns the next turn."""
        ...

    async def list_moves(self, opponent: str) -> Sequence[str]:
        """The texts among which an opponent of the game's own draws its turn."""
        raise EpisodeError(f"the game has no opponent {opponent!r}")

    async def close(self) -> None:
        """Called once, also after a failure."""
        return


class MultiplayerGame(ABC):
    """Makes sessions. `roles` are those of every play, in the order in which they are reported: the first is judged.

    `opponents` are the names of the opponents that it has, `vocabulary` the words of its texts.
    """

    name: str
    roles: tuple[str, ...]
    opponents: tuple[str, ...] = ()
    vocabulary: Sequence[str] | None = None

    @abstractmethod
    def open(self) -> GameSession:
        """A new session, for one episode."""
        ...


class ClassGame(MultiplayerGame):
    """A class made with `options` for each play. A call may take `seconds`; None: it is trusted, and not limited."""

    def __init__(self, made_of: Any, name: str, options: Mapping[str, Any], seconds: float | None) -> None:
        self._made_of, self.name, self.seconds, self._options = made_of, name, seconds, dict(options)
        check_kwargs(f"environment {name}: options", made_of, self._options)
        instance = self.make_instance()
        for field_name in ("roles", "opponents"):
            given = getattr(instance, field_name, ())
            if isinstance(given, str) or not all(isinstance(one, str) and one for one in given):
                raise ValueError(f"environment {name}: {field_name}={given!r:.80}, expected names, such as (first,)")
            setattr(self, field_name, tuple(given))
        if len(set(self.roles)) != len(self.roles) or not self.roles:
            raise ValueError(f"environment {name}: roles={self.roles}, expected different names, such as first, second")
        self.vocabulary = getattr(instance, "vocabulary", None)

    @classmethod
    def at(cls, path: str, options: Mapping[str, Any] | None, seconds: float) -> ClassGame:
        """The class at `package.module:name`."""
        return cls(load_path("environment", path), path, options or {}, seconds)

    def open(self) -> GameSession:
        return _InstanceGame(self)

    def make_instance(self) -> Any:
        return self._made_of(**self._options)


class _InstanceGame(GameSession):
    def __init__(self, game: ClassGame) -> None:
        self._game, self._task_id = game, ""
        self._instance: Any = None

    async def _call(self, method: str, call: Callable[[], Any]) -> Any:
        if self._game.seconds is None:
            return call()
        what = f"environment {self._game.name}: {method} of task {self._task_id!r}"
        return await call_user_code(what, self._game.seconds, call)

    async def begin(self, task: Task) -> GameTurn:
        self._task_id = task.id

        def begin() -> Any:
            self._instance = self._game.make_instance()
            wait_for_result(self._instance.reset(**choose_arguments(self._instance.reset, task)))
            return self._instance.turn()

        return await self._read(await self._call("reset", begin))

    async def step(self, action: str) -> GameTurn:
        def step() -> Any:
            wait_for_result(self._instance.step(action))
            return self._instance.turn()

        return await self._read(await self._call("step", step))

    async def _read(self, given: Any) -> GameTurn:
        what = f"environment {self._game.name}: turn of task {self._task_id!r}"
        if given is None:
            rewards = await self._call("rewards", self._instance.rewards)
            metrics = getattr(self._instance, "metrics", None)
            if not isinstance(rewards, Mapping):
                raise EpisodeError(f"{what}: rewards gave {rewards!r:.80}, expected a mapping from roles to numbers")
            return GameTurn("", rewards=rewards, metrics=await self._call("metrics", metrics) if metrics else {})
        if not (isinstance(given, tuple) and len(given) == 2 and given[0] in self._game.roles):
            raise EpisodeError(
                f"{what} gave {given!r:.80}, expected (role, text) with one of {', '.join(self._game.roles)}, or None"
            )
        return GameTurn(given[0], str(given[1]))

    async def list_moves(self, opponent: str) -> Sequence[str]:
        return await self._call("moves", lambda: self._instance.moves(opponent))
