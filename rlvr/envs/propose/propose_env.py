"""An episode of a proposer and a solver: one policy writes a task, then answers it several times, each time anew.

The proposal is a branch of the episode with the role `proposer`, each answer one with the role `solver`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.chat.turns import has_room
from rlvr.core import rng
from rlvr.core.messages import ModelInput, SampledSequence
from rlvr.core.protocols import Env, ExternalEnv, InitialObservationOverflow, StepResult
from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.envs.prompt import encode_prompt
from rlvr.envs.propose.proposals import ProposalRefusal, Proposals
from rlvr.reward.registry import Reward
from rlvr.reward.signatures import Case

PROPOSER, SOLVER = ROLES = ("proposer", "solver")


@dataclass(frozen=True)
class ProposeRules:
    """How proposals are paid. `pay` gets the share of right answers and a key for random draws."""

    answers: int
    pay: Callable[[float, int], float]
    proposer_weight: float
    refused_reward: float
    levels: Sequence[str]


class ProposeEnv(ExternalEnv):
    """One proposal and the answers to it; without `proposals` one answer to the task, as on held-out tasks.

    `number` is that of the episode in its group. The last answer is judged; of a refused proposal the proposal is.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        reward: Reward,
        rules: ProposeRules,
        proposals: Proposals | None = None,
        number: int = 0,
    ) -> None:
        self.task, self._tokenizer, self._reward, self._rules = task, tokenizer, reward, rules
        self._proposals, self._number = proposals, number
        self._asked = task
        self._answers = rules.answers if proposals else 1
        self._prompt: list[int] = []
        self._passed: list[float] = []
        self._proposer_reward = 0.0
        self.role = PROPOSER if proposals else SOLVER

    async def initial_observation(self) -> tuple[ModelInput, None] | InitialObservationOverflow:
        self._prompt = encode_prompt(self.task, self._tokenizer)
        return ModelInput(self._prompt), None

    async def take(self, answer: SampledSequence) -> StepResult:
        shown = answer.tokens[: len(answer.tokens) - (answer.end_tokens or 0)]
        text = self._tokenizer.decode(shown, skip_special_tokens=False)
        return self._take_proposal(text) if self.role == PROPOSER else self._take_answer(text, answer)

    def _take_proposal(self, text: str) -> StepResult:
        assert self._proposals is not None
        checked = self._proposals.check(text)
        if isinstance(checked, Task):
            prompt = encode_prompt(checked, self._tokenizer)
            is_short = self.prompt_limit is None or len(prompt) <= self.prompt_limit
            if is_short and has_room(self._tokenizer, prompt, [0]):
                self._asked, self._prompt, self.role = checked, prompt, SOLVER
                return StepResult(0.0, False, ModelInput(prompt))
            checked = ProposalRefusal.SIZE
        self._proposer_reward = self._rules.proposer_weight * self._rules.refused_reward
        return StepResult(self._proposer_reward, True, metrics={"correct": 0.0, **self._measure(checked)})

    def _take_answer(self, text: str, answer: SampledSequence) -> StepResult:
        case = Case.of_task(self._asked, text, stop_reason=answer.stop_reason)
        [verdict] = self._reward.judge_all([case])
        if verdict.value is None:
            return StepResult(
                0.0, True, error=f"the reward {self._reward.name!r} has no verdict on an answer to the task "
                f"{self._asked.id!r:.80}: {verdict.reason} {verdict.detail}".strip()
            )  # fmt: skip
        self._passed.append(float(verdict.outcome is Outcome.PASSED))
        if len(self._passed) < self._answers:
            return StepResult(0.0, False, ModelInput(self._prompt))
        metrics = {"correct": self._passed[-1]}
        if self._proposals is not None:
            rate = sum(self._passed) / self._answers
            pay = self._rules.pay(rate, rng.key("pay", self.task.id, self._number))
            self._proposer_reward = self._rules.proposer_weight * pay
            metrics |= {"solve_rate": rate, f"reward/{SOLVER}": rate, **self._measure(None)}
        return StepResult(self._passed[-1], True, metrics=metrics)

    def _measure(self, refusal: ProposalRefusal | None) -> dict[str, float]:
        """What is counted of a proposal that was refused for a reason, or accepted."""
        measured = {f"turns/{PROPOSER}": 1.0, f"turns/{SOLVER}": float(len(self._passed))}
        measured |= {f"reward/{PROPOSER}": self._proposer_reward, "proposals/refused": float(refusal is not None)}
        measured |= {f"proposals/refused/{reason.value}": float(reason is refusal) for reason in ProposalRefusal}
        if refusal is None:
            measured |= {f"proposals/level/{level}": float(level == self._asked.level) for level in self._rules.levels}
        return measured

    def final_turn(self) -> int | None:
        """The last answer, or the refused proposal; None before the first turn."""
        turns = len(self._passed) + (self._proposals is not None)
        return turns - 1 if turns else None

    def branch_rewards(self) -> Mapping[int, float]:
        first = [] if self._proposals is None else [self._proposer_reward]
        return dict(enumerate([*first, *self._passed]))


class ProposeGroup:
    """The episodes of one proposer's prompt, which may not propose the same task twice."""

    def __init__(self, make: Callable[[int, Proposals | None], ProposeEnv], size: int, proposals: Proposals | None):
        self._make, self._size, self._proposals = make, size, proposals

    async def make_envs(self) -> Sequence[Env]:
        return [self._make(number, self._proposals) for number in range(self._size)]  # type: ignore[misc]

    async def compute_group_rewards(
        self, trajectories: list[Trajectory], envs: Sequence[Env]
    ) -> list[tuple[float, dict[str, float]]]:
        """Nothing: each episode gave its own rewards."""
        return [(0.0, {}) for _ in trajectories]

    async def cleanup(self) -> None:
        return
