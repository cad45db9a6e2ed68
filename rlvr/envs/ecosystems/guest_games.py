"""Games of TextArena (`textarena:GAME`) and environments of GEM (`gem:ID`), unmodified, as episodes of text.

    env: {name: "textarena:TicTacToe-v0", kwargs: {opponent: ["[0]", "[1]", "[2]"]}}
    env: {name: "textarena:TicTacToe-v0", kwargs: {opponent: self}}
    env: {name: "gem:game:GuessTheNumber-v0-easy"}

They run in an interpreter of their own (`rlvr.envs.ecosystems.installs`). A few processes play all episodes, each with
its own state of the random numbers, so an episode follows from its seed. A call that is late ends its process: the
episodes there are errors, never zeros, and the next ones are played by a new process.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.core.types import Task
from rlvr.envs.ecosystems.guest_process import GuestError, GuestProcess, find_guest
from rlvr.envs.ecosystems.installs import find_python
from rlvr.envs.games.game_session import GameSession, GameTurn, MultiplayerGame
from rlvr.envs.games.game_source import SELF, GameSource
from rlvr.envs.gym.gym_session import PRINTABLE, Gym, GymSession, Observation
from rlvr.envs.gym.gym_source import GymSource
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.tools.environment_class import call_user_code
from rlvr.reward.reward_options import check_integer, check_mapping, check_number

START_SECONDS = 300.0  # for a process to begin, with its imports
_MARGIN = 30.0  # what is added where a process may have to be ended
_numbers = itertools.count(1)  # of sessions: no two processes have the same


class GuestGym(Gym):
    """Sessions in the process with the fewest of them. `config` is what a session of the guest is made from; a call may
    take `seconds`."""

    vocabulary = PRINTABLE  # a game may write other characters too

    def __init__(self, name: str, guests: Sequence[GuestProcess], config: Mapping[str, Any], seconds: float) -> None:
        self.name, self.config, self.seconds = name, dict(config), seconds
        self._counts = dict.fromkeys(guests, 0)
        self._lock = threading.Lock()

    def open(self, seats: Sequence[int] = (0,)) -> GymSession:
        """A session in which the policy is the players `seats`, of a game that has several."""
        return _GuestSession(self, {**self.config, "seats": list(seats)})

    def take(self) -> GuestProcess:
        with self._lock:
            guest = min(self._counts, key=lambda one: self._counts[one])
            self._counts[guest] += 1
        return guest

    def give_back(self, guest: GuestProcess) -> None:
        with self._lock:
            self._counts[guest] -= 1


class _GuestSession(GymSession):
    def __init__(self, gym: GuestGym, config: Mapping[str, Any]) -> None:
        self._gym, self._number, self._what, self._config = gym, next(_numbers), gym.name, config
        self._guest: GuestProcess | None = None

    async def _call(self, method: str, limit: float, **params: Any) -> Any:
        guest = self._guest
        assert guest is not None

        def call() -> Any:
            try:
                return guest.call(method, params, limit)
            except GuestError as error:
                raise EpisodeError(f"{self._what}: {error}") from error

        return await call_user_code(self._what, limit + _MARGIN, call)

    async def reset(self, task: Task) -> Observation:
        self._what, self._guest = f"{self._gym.name}: task {task.id!r}", self._gym.take()
        await self._call("ready", START_SECONDS)
        given = await self._call(
            "begin", self._gym.seconds, session=self._number, config=self._config, seed=task.meta["seed"]
        )
        return Observation.of_reset((given["observation"], given["info"]), self._what)

    async def step(self, action: str) -> Observation:
        text = action.encode("utf-8", "replace").decode()
        return Observation.of_step(
            await self._call("step", self._gym.seconds, session=self._number, action=text), self._what
        )

    async def close(self) -> None:
        if self._guest is not None:
            try:
                await self._call("end", self._gym.seconds, session=self._number)
            finally:
                self._gym.give_back(self._guest)
                self._guest = None


RANDOM = "random"


class GuestGame(MultiplayerGame):
    """A game of `players`, with the opponent `random` if it has texts to choose from."""

    vocabulary = GuestGym.vocabulary

    def __init__(self, gym: GuestGym, players: int) -> None:
        self.gym, self.name = gym, gym.name
        self.roles = tuple(f"player_{number}" for number in range(players))
        self.opponents = (RANDOM,) if gym.config["opponent"] else ()

    def open(self) -> GameSession:
        return _GuestPlay(self)


class _GuestPlay(GameSession):
    def __init__(self, game: GuestGame) -> None:
        self._game = game
        self._session: GymSession | None = None

    async def begin(self, task: Task) -> GameTurn:
        roles = self._game.roles
        own = [task.meta["role"]] if task.meta["opponent"] == RANDOM else roles  # the guest plays at random
        self._session = self._game.gym.open([roles.index(role) for role in own])
        return self._read(await self._session.reset(task))

    async def step(self, action: str) -> GameTurn:
        assert self._session is not None
        return self._read(await self._session.step(action))

    def _read(self, said: Observation) -> GameTurn:
        metrics, roles = dict(said.metrics), self._game.roles
        if not said.done:
            return GameTurn(roles[int(metrics["player"])], said.text)
        numbers = {role: f"reward/{number}" for number, role in enumerate(roles)}
        rewards = {role: metrics.pop(name) for role, name in numbers.items() if name in metrics}
        return GameTurn("", rewards=rewards, metrics=metrics)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def textarena_source(
    name: str,
    options: Mapping[str, Any] | None = None,
    opponent: Sequence[str] | str | None = None,
    seeds: Mapping[str, Any] | None = None,
    max_turns: int = 100,
    seconds: float = 60.0,
    processes: int = 2,
    python: str | None = None,
    players: int = 2,
    moves: Sequence[str] | None = None,
) -> GymSource | GameSource:
    """The game of TextArena `name`, made with `options`; `NAME@MODULE` is one that a module in the current folder
    registers.

    The policy is player 0, and its reward is that of the end. Other players choose at random among the legal moves in
    `opponent`, a list of texts. With `opponent: self` the policy is every one of `players`, each with its own reward
    (the roles `player_0`, `player_1`, ...); with the path of a run or checkpoint that one plays the others, and with
    `random` they choose among the legal ones of `moves`. With `moves` held-out games are played against `random`. The
    tasks are those of the environment `seeds`, with these options. An episode has at most `max_turns` turns; a game
    that is not over by then gives 0. A call may take `seconds`; `processes` play the episodes, of the interpreter
    `python`.
    """
    texts = moves if isinstance(opponent, str) else opponent
    if isinstance(texts, str) or (texts is not None and not (texts and all(isinstance(text, str) for text in texts))):
        key = "moves" if isinstance(opponent, str) else "opponent"
        raise ValueError(f'textarena: {key}={texts!r:.80}, expected a list of texts, such as ["[0]", "[1]"]')
    config = {"name": name, "options": options, "opponent": list(texts or []), "players": 0}
    if isinstance(opponent, str):
        check_integer("textarena: players", players, 2, 15)
        config["players"] = players
        game = GuestGame(_make_gym("textarena", config, processes, seconds, python), players)
        return GameSource(game, "seeds", seeds, opponent, max_turns=max_turns)
    if moves is not None or players != 2:
        raise ValueError(
            f"textarena: {'moves' if moves is not None else 'players'} has no effect with opponent={opponent!r:.80}; "
            f"give it with opponent={SELF}, opponent={RANDOM} or the path of a run"
        )
    return _make_source("textarena", config, seeds, (max_turns, processes, seconds), python)


def gem_source(
    name: str,
    options: Mapping[str, Any] | None = None,
    seeds: Mapping[str, Any] | None = None,
    max_turns: int = 100,
    seconds: float = 60.0,
    processes: int = 2,
    python: str | None = None,
) -> GymSource:
    """The environment of GEM `name`, made with `options`; `NAME@MODULE` is one that a module in the current folder
    registers.

    The reward is what its steps give, added up. The tasks are those of the environment `seeds`, with these options. An
    episode has at most `max_turns` turns. A call may take `seconds`; `processes` play the episodes, of the interpreter
    `python`.
    """
    return _make_source("gem", {"name": name, "options": options}, seeds, (max_turns, processes, seconds), python)


def _make_source(
    kind: str, config: dict[str, Any], seeds: Any, limits: tuple[int, int, float], python: str | None
) -> GymSource:
    max_turns, processes, seconds = limits
    return GymSource(kind, _make_gym(kind, config, processes, seconds, python), max_turns, "seeds", seeds)


def _make_gym(kind: str, config: dict[str, Any], processes: int, seconds: float, python: str | None) -> GuestGym:
    check_integer(f"{kind}: processes", processes, 1)
    check_number(f"{kind}: seconds", seconds, 0, above=True)
    check_mapping(f"{kind}: options", config["options"], "the game's options")
    config["options"] = dict(config["options"] or {})
    path = find_python(kind, python)
    guests = [find_guest(path, f"{kind}_guest.py", number) for number in range(processes)]
    return GuestGym(f"{kind}:{config['name']}", guests, config, seconds)
