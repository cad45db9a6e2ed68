"""Games of TextArena for tests. Run by its own interpreter."""

from __future__ import annotations

import math
import os
import random
import time
from typing import Any

import textarena

random.random()  # the first import draws: no episode must see that


class Dice(textarena.Env):
    """Three throws. The first words that are no guess do as they say."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        if fault == "words":
            raise LookupError("Resource 'words' not found.\n  >>> nltk.download('words')\n")

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Guess!")
        self.right, self.names = 0, list({f"name{n}" for n in range(9)})

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        if action == "raise":
            raise KeyError("lost")
        if action == "hang":
            time.sleep(1000)
        if action == "exit":
            os._exit(3)
        thrown = random.randint(1, 6)
        self.right += action == str(thrown)
        self.state.add_observation(
            from_id=0, message=f"I say {action}", observation_type=textarena.ObservationType.PLAYER_ACTION
        )
        self.state.add_observation(
            message=f"{thrown} {random.choice(self.names)}", observation_type=textarena.ObservationType.GAME_MESSAGE
        )
        if self.state.turn == 2:
            rewards = {"nan": math.nan, "nothing": None}
            self.state.set_outcome(reward=rewards.get(action, self.right / 3))
        return self.state.step()


textarena.register(id="Dice-v0", entry_point=Dice)
