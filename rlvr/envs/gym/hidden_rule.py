"""A rule that must be found within the episode: learning to learn, for a small transformer with random weights.

    a 3 <end> a 2 c 1 <end> c 5 ...        asked for a, the policy says 3, reads that a is 2, and is asked for c

Every episode has a rule of its own, which gives each letter a number, no two the same. In the first round every letter
is asked once and the rule is unknown; in later rounds the letters are asked again, in other orders, and their answers
stand in the context. Only later rounds are rewarded, so a policy learns to adapt, without a gradient, to rules that it
never saw. Held-out rules are never trained on.
"""

from __future__ import annotations

import math
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.gym.gym_env import GymEnv
from rlvr.envs.gym.gym_session import GymSession, Observation
from rlvr.envs.registry import register_environment
from rlvr.reward.reward_options import check_integer, check_number

LETTERS = "abcdefgh"
HELDOUT_FRACTION = 0.2


@register_environment("hidden_rule")
class HiddenRule(TaskSource):
    """Say which number belongs to a letter: each episode gives `letters` letters the numbers 1 to `letters` anew, and
    asks for every letter once in each of `rounds` rounds. The reward is the share of right answers after the first.

    An episode passes if all of them are right. With `same_rule` every training episode has one and the same rule; those
    held out have others all the same. A demonstration guesses in the first round, and later with probability `flaw`.
    """

    reward = "environment"
    levels = ("",)
    end_word: str = "<end>"
    pad_word: str = "<pad>"

    def __init__(self, letters: int = 5, rounds: int = 2, same_rule: bool = False, flaw: float = 0.3) -> None:
        check_integer("hidden_rule: letters", letters, 3, len(LETTERS))
        check_integer("hidden_rule: rounds", rounds, 2)
        check_number("hidden_rule: flaw", flaw, 0, 1)
        if not isinstance(same_rule, bool):
            raise ValueError(f"hidden_rule: same_rule={same_rule!r:.80}, expected true or false")
        self.letters, self.rounds, self.same_rule, self.flaw = letters, rounds, same_rule, flaw
        self.max_turns = letters * rounds
        self.vocabulary = [*LETTERS[:letters], *self._numbers(), self.end_word, self.pad_word]
        self._common = next(rule for key in range(10_000) if not _is_heldout(rule := self._draw_rule(key)))

    def train(self, seed: int, index: int, level: str) -> Task:
        key, attempt = rng.key("hidden-rule-train", seed, index), 0
        while _is_heldout(rule := self._draw_rule(rng.key(key, attempt))):
            attempt += 1
        return self._task(self._common if self.same_rule else rule, key)

    def heldout(self, count: int | None) -> list[Task]:
        """`count` episodes (None: 200), each of another held-out rule as long as there are more."""
        wanted, seen, tasks = 200 if count is None else count, set[str](), list[Task]()
        most = math.factorial(self.letters)
        for number in range(100 * most):
            if len(tasks) >= wanted:
                break
            rule = self._draw_rule(rng.key("hidden-rule-heldout", number))
            if _is_heldout(rule) and (rule not in seen or number > 20 * most):
                seen.add(rule)
                tasks.append(self._task(rule, rng.key("hidden-rule-order", number)))
        return tasks

    def env(self, task: Task, tokenizer: Any) -> Env:
        return GymEnv(task, tokenizer, _RuleSession(self.letters), self.max_turns)

    def demonstration(self, task: Task, key: int) -> list[str]:
        """Turns of a teacher that guesses, and from the second round on answers from what it was told, or guesses."""
        asked, rule, parts = task.meta["asked"], task.meta["rule"], list[str]()
        for place, letter in enumerate(asked):
            draw = rng.key("hidden-rule-flaw", key, task.id, place)
            guesses = place < self.letters or rng.uniform(draw) < self.flaw
            right = rule[LETTERS.index(letter)]
            parts.append(self._numbers()[rng.integer(self.letters, draw, 1)] if guesses else right)
            if place + 1 < len(asked):
                parts.append(f"{letter} {right} {asked[place + 1]}")
        return parts

    def _numbers(self) -> list[str]:
        return [str(number + 1) for number in range(self.letters)]

    def _draw_rule(self, key: int) -> str:
        return "".join(str(number + 1) for number in rng.permutation(self.letters, key))

    def _task(self, rule: str, key: int) -> Task:
        orders = [rng.permutation(self.letters, rng.key(key, "round", number)) for number in range(self.rounds)]
        asked = "".join(LETTERS[place] for order in orders for place in order)
        return Task(f"{rule}-{asked}", asked[0], {"rule": rule, "asked": asked})


def _is_heldout(rule: str) -> bool:
    return rng.uniform(rng.key("hidden-rule-side", rule)) < HELDOUT_FRACTION


class _RuleSession(GymSession):
    """`first_round` and `later_rounds` are the shares of right answers; the chance of a guess is 1 in `letters`."""

    def __init__(self, letters: int) -> None:
        self._letters = letters
        self._right: list[bool] = []
        self._rule = self._asked = ""

    async def reset(self, task: Task) -> Observation:
        self._rule, self._asked = task.meta["rule"], task.meta["asked"]
        return Observation("")

    async def step(self, action: str) -> Observation:
        place = len(self._right)
        number = self._rule[LETTERS.index(self._asked[place])]
        self._right.append(action.strip() == number)
        later = len(self._asked) - self._letters
        reward = self._right[-1] / later if place >= self._letters else 0.0
        if place + 1 < len(self._asked):
            return Observation(f" {self._asked[place]} {number} {self._asked[place + 1]}", reward)
        counts = sum(self._right[: self._letters]) / self._letters, sum(self._right[self._letters :]) / later
        metrics = {"first_round": counts[0], "later_rounds": counts[1], "correct": float(counts[1] == 1.0)}
        return Observation("", reward, True, metrics)
