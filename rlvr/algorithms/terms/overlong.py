"""A penalty for completions that come near the end of their budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlvr.algorithms.part import SpecView
from rlvr.algorithms.terms.term import Logprobs, Term, group_rollouts
from rlvr.core.types import Trajectory
from rlvr.core.variants import setting


@dataclass(frozen=True)
class Overlong(Term):
    """The last `buffer` tokens of the budget cost up to `penalty`, linearly. DAPO, arXiv:2503.14476, eq. 13."""

    name = "overlong"
    switch = "buffer"
    changes_gradient = False
    is_known_when_judged = True
    needs_budget = True
    why_not_given = "lowers the reward of long completions, which can make a preferred one count as not preferred"

    buffer: int = setting(low=1, expected="at least 1 token, or null", flat="overlong_buffer")
    penalty: float = setting(1.0, low=0, expected="at least 0", flat="overlong_penalty")

    @property
    def is_penalty(self) -> bool:
        return True

    def check(self, algorithm: SpecView) -> None:
        if algorithm.advantage.reads_no_reward:
            raise ValueError(
                f"algorithm.overlong_buffer={self.buffer} has no effect with the advantage "
                f"{algorithm.advantage.name!r}, which reads no reward; leave it out"
            )

    def check_budget(self, max_tokens: int) -> None:
        if self.buffer > max_tokens:
            raise ValueError(
                f"{self.key(self.switch)}={self.buffer} is longer than the budget rollout.max_tokens={max_tokens}: "
                "every completion would be penalised; use a fifth of the budget, for example"
            )

    def penalize(
        self, batch: Sequence[Trajectory], algorithm: SpecView, max_tokens: int, old_logprobs: Logprobs
    ) -> None:
        for parts in group_rollouts(batch):
            if parts[0].reward is None:
                continue
            penalty = self.penalty * overlong_share(max(map(longest_turn, parts)), max_tokens, self.buffer)
            for t in parts:
                t.penalty += penalty
                t.length_penalty += penalty


def overlong_share(tokens: int, budget: int, buffer: int) -> float:
    """0 up to `budget - buffer` tokens, then linearly up to 1 at the budget. DAPO, arXiv:2503.14476, eq. 13."""
    return min(1.0, max(0.0, (tokens - (budget - buffer)) / buffer))


def longest_turn(trajectory: Trajectory) -> int:
    """The number of tokens in the longest turn of the policy, which is what the budget `max_tokens` bounds."""
    longest = run = 0
    for acted in trajectory.action_mask:
        run = run + 1 if acted else 0
        longest = max(longest, run)
    return longest
