"""An episode of a solver and a verifier: one answer to a task, then several verdicts on it, each written anew.

The answer is a branch of the episode with the role `solver`, each verdict one with the role `verifier`. The verifier is
the policy too, or a sampler that is not trained (`player`). Code says whether the answer is right; where the truth is
said to be unknown, that is a metric and pays no role.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.chat.special_tokens import special_token_texts, strip_special
from rlvr.chat.turns import has_room
from rlvr.core.messages import ModelInput, SampledSequence
from rlvr.core.protocols import ExternalEnv, InitialObservationOverflow, SamplingClient, StepResult
from rlvr.core.types import Outcome, StopReason, Task, mean
from rlvr.envs.prompt import build_messages, encode_prompt
from rlvr.reward.registry import Reward
from rlvr.reward.signatures import Case

SOLVER, VERIFIER = ROLES = ("solver", "verifier")
RIGHT, WRONG = VERDICTS = ("right", "wrong")
PLACES = ("prompt", "answer")
_MARKS = ".,:;!*'\"`()"
_PLACE = re.compile(r"\{(prompt|answer)\}")


def read_verdict(text: str) -> bool | None:
    """Whether a verdict accepts an answer, by its last word: `right` or `wrong`. None if that is another word, or if it
    is negated ("not right"), which readers would take in two ways."""
    before, word = ["", "", *(word.strip(_MARKS).lower().replace("’", "'") for word in text.split()[-2:])][-2:]
    is_negated = before in ("not", "never") or before.endswith("n't")
    return word == RIGHT if word in VERDICTS and not is_negated else None


def judge_answer(reward: Reward, task: Task, text: str, stop_reason: StopReason) -> tuple[bool | None, str]:
    """Whether an answer is right, by code, or None and the reason."""
    [score] = reward.judge_all([Case.of_task(task, text, stop_reason=stop_reason)])
    if score.value is None:
        return None, f"{score.reason} {score.detail}".strip()
    return score.outcome is Outcome.PASSED, ""


@dataclass(frozen=True)
class VerdictRules:
    """What the verifier reads, how often it is asked, and who is paid by what."""

    instruction: str
    verdicts: int
    is_paid_by_truth: bool
    """Whether the solver is paid by the truth where it is known; else by the verdicts everywhere."""
    pays: tuple[float, float]
    """What a verdict earns that refuses a wrong answer, and one that accepts a right one."""
    has_player: bool
    """Whether the verifier is a sampler that is not trained."""

    def write_prompt(self, task: Task, answer: str, tokenizer: Any) -> Task:
        """What the verifier reads of an answer. Special tokens in it are blanks: they would end the verifier's turn."""
        texts = {"prompt": task.prompt_text, "answer": strip_special(answer, special_token_texts(tokenizer)).strip()}
        written = _PLACE.sub(lambda match: texts[match[1]], self.instruction)  # one pass: an answer may hold a place
        return Task(f"verdict on {task.id}", written if isinstance(task.prompt, str) else build_messages(written))


class VerdictEnv(ExternalEnv):
    """An answer and the verdicts on it; with `is_known` None the answer alone, judged by code, as on held-out tasks.

    The answer is judged. One that was cut off, or that the verifier's context has no room for, is refused unasked.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        reward: Reward,
        rules: VerdictRules,
        is_known: bool | None = None,
        player: SamplingClient | None = None,
    ) -> None:
        self.task, self._tokenizer, self._reward, self._rules = task, tokenizer, reward, rules
        self._is_known, self._verifier = is_known, player
        self._prompt: list[int] = []
        self._is_right: bool | None = None
        self._verdicts: list[bool | None] = []
        self._answers, self._solver_reward = 0, 0.0
        self.role = SOLVER

    async def initial_observation(self) -> tuple[ModelInput, None] | InitialObservationOverflow:
        return ModelInput(encode_prompt(self.task, self._tokenizer)), None

    async def take(self, answer: SampledSequence) -> StepResult:
        shown = answer.tokens[: len(answer.tokens) - (answer.end_tokens or 0)]
        text = self._tokenizer.decode(shown, skip_special_tokens=False)
        if self.role == SOLVER:
            return self._take_answer(text, answer)
        self._verdicts.append(read_verdict(text))
        return self._pay() if len(self._verdicts) == self._rules.verdicts else self._ask()

    def _take_answer(self, text: str, answer: SampledSequence) -> StepResult:
        self._answers = 1
        self._is_right, why = judge_answer(self._reward, self.task, text, answer.stop_reason)
        if self._is_right is None and self._is_known is not False:
            return StepResult(
                0.0, True, error=f"the reward {self._reward.name!r} has no verdict on an answer to the task "
                f"{self.task.id!r:.80}: {why}"
            )  # fmt: skip
        if self._is_known is None:
            self._solver_reward = float(self._is_right or 0)
            return StepResult(self._solver_reward, True, metrics={"correct": self._solver_reward})
        if answer.stop_reason is StopReason.LENGTH:
            return self._pay()
        self._prompt = encode_prompt(self._rules.write_prompt(self.task, text, self._tokenizer), self._tokenizer)
        is_short = self.prompt_limit is None or len(self._prompt) <= self.prompt_limit
        return self._ask() if is_short and has_room(self._tokenizer, self._prompt, [0]) else self._pay()

    def _ask(self) -> StepResult:
        if self._rules.has_player and self._verifier is None:
            return StepResult(0.0, True, error=f"task {self.task.id!r}: no weights are loaded for env.kwargs.opponent")
        self.role, self.player = VERIFIER, self._verifier
        return StepResult(0.0, False, ModelInput(self._prompt))

    def _pay(self) -> StepResult:
        """End the episode: what the solver earns, and what is measured."""
        accepted = mean([float(verdict is True) for verdict in self._verdicts]) if self._verdicts else 0.0
        by_truth = self._is_known and self._rules.is_paid_by_truth
        self._solver_reward = float(self._is_right or 0) if by_truth else accepted
        return StepResult(
            self._solver_reward, True, metrics={"correct": self._solver_reward, **self._measure(accepted)}
        )

    def _measure(self, accepted: float) -> dict[str, float]:
        """Rates over answers: a false acceptance is measured where an answer is wrong, a false refusal where right."""
        asked = len(self._verdicts)
        measured = {f"reward/{SOLVER}": self._solver_reward, f"turns/{SOLVER}": 1.0}
        measured |= {"verdicts/accepted": accepted, "verdicts/unasked": float(not asked)}
        if asked:
            measured["verdicts/unreadable"] = self._verdicts.count(None) / asked
        if not self._rules.has_player:
            measured[f"turns/{VERIFIER}"] = float(asked)
            if paid := self._verifier_rewards():
                measured[f"reward/{VERIFIER}"] = mean(paid)
        measured["truth/known"] = float(self._is_known or 0)
        if self._is_right is not None:
            measured["truth/correct"] = float(self._is_right)
            name, rate = ("false_refusal", 1 - accepted) if self._is_right else ("false_accept", accepted)
            measured[f"verdicts/{name}"] = rate
            if not self._is_known:
                measured[f"verdicts/{name}/unknown"] = rate
        return measured

    def _verifier_rewards(self) -> list[float]:
        """What each verdict earns: it agrees with the truth or not. Nothing where the truth is unknown."""
        pay = self._rules.pays[bool(self._is_right)]
        return [pay * float(verdict is self._is_right) for verdict in self._verdicts] if self._is_known else []

    def dropped_turns(self) -> Collection[int]:
        """The verdicts on a task whose truth is unknown: nothing says what they are worth."""
        return () if self._is_known else range(1, 1 + len(self._verdicts))

    def final_turn(self) -> int | None:
        return 0 if self._answers else None

    def branch_rewards(self) -> Mapping[int, float]:
        verdicts = [] if self._rules.has_player else self._verifier_rewards()
        return dict(enumerate([self._solver_reward, *verdicts])) if self._answers else {}
