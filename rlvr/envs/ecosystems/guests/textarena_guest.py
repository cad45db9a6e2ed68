"""Games of TextArena 0.7, in its own interpreter. Needs textarena; imports nothing of rlvr.

The policy is player 0, or several of the players. Each of them reads every message once, where TextArena's wrappers for
models repeat the whole game. The other players choose at random among given texts, those that are legal moves.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import random
import sys
from typing import Any

from game_sessions import Step, get_random, serve_games, set_random
from pipe_server import Refusal

try:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    MISSING = ""
except ImportError as error:
    MISSING = f"{sys.executable} cannot load textarena ({error})"

MOST_PLAYERS = 6


class TextArenaGame:
    """The game of {name, options, opponent, players, seats}.

    `opponent` are the texts of the other players, if there are others; `players` is their number with the policy's (0:
    as few as the game takes), `seats` the policy's players. `info` has the `player` whose turn it is, and at the end
    `reward/PLAYER`, as far as the game gave one.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.name, self._texts = config["name"], list(config["opponent"])
        self._options, self._rng = config["options"], random.Random()
        self._players, self._seats = config["players"], list(config["seats"])
        self._env = self._make()

    def _make(self) -> Any:
        if MISSING:
            raise Refusal(MISSING)
        name, _, module = self.name.partition("@")
        if module:
            importlib.import_module(module)
        if name not in ENV_REGISTRY:
            near = difflib.get_close_matches(name, ENV_REGISTRY, 1, 0.5)
            raise Refusal(f"there is no game {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}")
        try:
            return textarena.make(name, **self._options)
        except (SyntaxError, ImportError) as error:
            version = ".".join(map(str, sys.version_info[:2]))
            raise Refusal(f"{name} cannot be loaded by Python {version}: {type(error).__name__}: {error}") from error

    @property
    def _innermost(self) -> Any:
        env = self._env
        while isinstance(env, textarena.Wrapper):
            env = env.env
        return env

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._rng = random.Random(seed)
        tried = [self._players] if self._players else range(2, MOST_PLAYERS + 1) if self._texts else [1]
        for players in tried:
            try:
                self._env.reset(num_players=players, seed=seed)
                break
            except AssertionError as error:
                refused = error
        else:
            raise Refusal(f"{self.name} is no game for {players} ({refused}); {self._say_opponent()}")
        text, player = self._observe()
        if player is None:
            raise Refusal(f"{self.name} is over before the first turn of the policy")
        return text, {"player": player}

    def _say_opponent(self) -> str:
        if self._players:
            return "give another number of `players`"
        if self._texts:
            return "leave `opponent` out"
        return "give `opponent`, a list of texts that the other players choose from"

    def step(self, action: str) -> Step:
        over, _ = self._env.step(action)
        text, player = ("", None) if over else self._observe()
        if player is not None:
            return text, 0.0, False, {"player": player}
        rewards, info = self._env.close()
        own = {seat: (rewards or {}).get(seat) for seat in self._seats}
        known = {seat: reward for seat, reward in own.items() if isinstance(reward, (bool, int, float))}
        if not known:  # some games swap it with the text of an invalid move
            raise Refusal(f"{self.name} is over, and gave the reward {own[self._seats[0]]!r:.80}, expected a number")
        by_player = {f"reward/{seat}": float(reward) for seat, reward in known.items()} if self._players else {}
        return text, next(iter(known.values())), True, {**by_player, **(info.get(self._seats[0]) or {})}

    def _observe(self) -> tuple[str, int | None]:
        """What the policy reads, and as which player; None if the game is over. The others play until then."""
        while True:
            player, messages = self._innermost.get_observation()
            if player in self._seats:
                return self._write(messages, player), player
            if not self._texts:
                raise Refusal(f"it is the turn of player {player} of {self.name}; {self._say_opponent()}")
            if self._play(player):
                return "", None

    def _write(self, messages: Any, reader: int) -> str:
        if isinstance(messages, str):
            return messages
        names = self._innermost.state.role_mapping
        lines = [
            f"[{'GAME' if sender == textarena.GAME_ID else names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, _ in messages
            if sender != reader  # it has its own words
        ]
        return "\n".join(lines)

    def _play(self, player: int) -> bool:
        """The move of another player; is the game over?"""
        for text in self._rng.sample(self._texts, len(self._texts)):
            env, before = copy.deepcopy(self._env), get_random()
            over, _ = env.step(text)
            state = env.state
            if not (getattr(state, "error_count", 0) or state.game_info.get(player, {}).get("invalid_move")):
                self._env = env
                return bool(over)
            set_random(before)
        raise Refusal(f"none of the texts of `opponent` is a legal move of player {player} of {self.name}")

    def close(self) -> None:
        return


if __name__ == "__main__":
    sys.path.append("")  # modules in the current folder that register games
    serve_games(TextArenaGame)
