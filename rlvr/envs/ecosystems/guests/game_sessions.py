"""Sessions of games that draw from the random numbers of their process: each session has a state of its own.

It is in place while the session is called. So an episode follows from its seed, whatever else is played. Standard
library only, and numpy's state where numpy is installed.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pipe_server import Refusal, serve

try:  # now, so that a session finds it as others did
    import numpy
except ImportError:
    numpy = None

Step = tuple[str, float, bool, dict[str, Any]]  # what the policy reads, the reward, is it over?, info


class Game(Protocol):
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]: ...

    def step(self, action: str) -> Step: ...

    def close(self) -> None: ...


def get_random() -> tuple[Any, Any]:
    """The state of this process's random numbers."""
    return random.getstate(), numpy and numpy.random.get_state()


def set_random(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if numpy:
        numpy.random.set_state(state[1])


class _Session:
    """One episode, with the state of the random numbers as its last call left it."""

    def __init__(self, game: Game | None, state: tuple[Any, Any]) -> None:
        self.game, self._state = game, state

    @classmethod
    def of_seed(cls, seed: int) -> _Session:
        outside = get_random()
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        state = get_random()
        set_random(outside)
        return cls(None, state)

    @contextmanager
    def own_random(self) -> Iterator[None]:
        outside = get_random()
        set_random(self._state)
        try:
            yield
        finally:
            self._state = get_random()
            set_random(outside)


def serve_games(make: Callable[[dict[str, Any]], Game]) -> None:
    """Answer calls that play games: `begin` a session by its config and seed, `step` it, `end` it."""
    sessions: dict[int, _Session] = {}
    tried: set[str] = set()  # configs

    async def ready() -> None:
        return

    async def begin(session: int, config: dict[str, Any], seed: int) -> dict[str, Any]:
        key = json.dumps(config, sort_keys=True)
        try:
            if key not in tried:  # the first of its kind loads modules and data, which may draw random numbers too
                with _Session.of_seed(seed).own_random():
                    trial = make(config)
                    trial.reset(seed)
                    trial.close()
                tried.add(key)
            opened = sessions[session] = _Session.of_seed(seed)
            with opened.own_random():
                opened.game = make(config)
                text, info = opened.game.reset(seed)
        except LookupError as error:
            if missing := re.search(r"nltk\.download\('([^']+)'\)", str(error)):
                command = f"`{sys.executable} -m nltk.downloader {missing[1]}`"
                raise Refusal(f"the game needs a word list that is not installed; run {command}") from error
            raise
        return describe_step(text, 0.0, False, info)

    async def step(session: int, action: str) -> dict[str, Any]:
        opened = sessions.get(session)
        if opened is None or opened.game is None:
            raise Refusal("the process of this episode was ended, with all its episodes")
        with opened.own_random():
            return describe_step(*opened.game.step(action))

    async def end(session: int) -> None:
        opened = sessions.pop(session, None)
        if opened is not None and opened.game is not None:
            with opened.own_random():
                opened.game.close()

    async def close() -> None:
        return

    serve({"ready": ready, "begin": begin, "step": step, "end": end}, close)


def describe_step(text: Any, reward: Any, done: Any, info: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(text, str):
        raise Refusal(f"the game says a {type(text).__name__}, expected text")
    numbers = {str(name): float(value) for name, value in info.items() if isinstance(value, (bool, int, float))}
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return {"observation": text, "reward": float(reward), "done": bool(done), "info": finite}
