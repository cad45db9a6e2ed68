"""Environment `learned_verifier`: the policy answers tasks of another environment, and a verifier that learns judges.

env: {name: learned_verifier, kwargs: {inner: rpn_arithmetic, truth_share: 0.5}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.core.types import StopReason, Task
from rlvr.envs.games.game_source import SELF
from rlvr.envs.learned_verifier.verdict_env import (
    PLACES,
    RIGHT,
    ROLES,
    VERDICTS,
    VERIFIER,
    WRONG,
    VerdictEnv,
    VerdictRules,
    judge_answer,
)
from rlvr.envs.registry import register_environment
from rlvr.envs.wrapped_source import NestedSource
from rlvr.reward.registry import resolve_reward
from rlvr.reward.reward_options import check_choice, check_integer, check_number

KNOWN, _DRAW, _VERDICT = "truth_known", "draw", "true_verdict"  # keys of a training task's meta
TRUTH = "truth"
_TRIES = 1000  # tasks drawn in a row whose truth is unknown: there is none that the verifier may be shown
_SWAPPED = 0.25  # the share of demonstrated verdicts on the answer to another task, so that some answers are wrong


@register_environment("learned_verifier")
class VerdictSource(NestedSource):
    """A solver answers a task of the environment `inner`, and a verifier says `verdicts` times whether that is right.

    The truth, as code judges by the reward of `inner`, is known of the share `truth_share` of the training tasks, by a
    hash of their ids. There a verdict that agrees with the truth earns w / (2 s) on a right answer and w / (2 (1 - s))
    on a wrong one, else 0, with w `verifier_weight` and s `right_share`; the solver earns 1 for a right answer
    (`known_reward: truth`), or what it earns elsewhere (`verifier`): the share of verdicts that accept its answer.
    Where the truth is unknown it pays no role. `instruction` is what the verifier reads, with {prompt} and {answer};
    the last word of its turn is the verdict, `right` or `wrong`. With `opponent: self` the verifier is the policy too;
    the path of a run or one of its checkpoints is a verifier that is not trained. Held-out tasks are those of `inner`,
    each answered once and judged by code. Of the demonstrations the share `verdict_share` are verdicts, on tasks whose
    truth is known.
    """

    reward = "environment"
    roles = ROLES
    owns_prompts = True

    def __init__(
        self,
        inner: str | TaskSource = "rpn_arithmetic",
        inner_kwargs: Mapping[str, Any] | None = None,
        truth_share: float = 0.5,
        verdicts: int = 4,
        known_reward: str = TRUTH,
        verifier_weight: float = 1.0,
        right_share: float = 0.5,
        opponent: str = SELF,
        instruction: str = "<verify> {prompt} {answer} <verdict>",
        verdict_share: float = 0.5,
    ) -> None:
        check_number("learned_verifier: truth_share", truth_share, 0, 1)
        check_integer("learned_verifier: verdicts", verdicts, 1, 1000)
        check_choice("learned_verifier: known_reward", known_reward, (TRUTH, VERIFIER))
        check_number("learned_verifier: verifier_weight", verifier_weight, 0, above=True)
        check_number("learned_verifier: verdict_share", verdict_share, 0, 1)
        check_number("learned_verifier: right_share", right_share, 0.01, 0.99)
        missing = [place for place in PLACES if not isinstance(instruction, str) or f"{{{place}}}" not in instruction]
        if missing:
            raise ValueError(
                f"learned_verifier: instruction={instruction!r:.80} lacks {{{missing[0]}}}; expected a text "
                "with {prompt} and {answer}, where the task and the answer stand"
            )
        has_player = opponent != SELF
        if has_player and not (isinstance(opponent, str) and Path(opponent).expanduser().exists()):
            raise ValueError(
                f"learned_verifier: opponent={opponent!r:.80}, expected {SELF}, or the path of a run or "
                "checkpoint that exists"
            )
        if not (truth_share or has_player):
            raise ValueError(
                "learned_verifier: truth_share=0 with opponent=self, so nothing would train the verifier, which pays "
                "everything; give a truth_share above 0, or the path of a run as opponent"
            )
        if known_reward != TRUTH and not truth_share:
            raise ValueError(
                f"learned_verifier: known_reward={known_reward!r} has no effect with truth_share=0, where the truth of "
                "no task is known; leave known_reward out"
            )
        for name, value, default in (("verifier_weight", verifier_weight, 1.0), ("right_share", right_share, 0.5)):
            if has_player and value != default:
                raise ValueError(
                    f"learned_verifier: {name}={value:g} has no effect with opponent={opponent!r:.80}: that verifier "
                    f"is not trained, so its verdicts earn nothing; leave {name} out"
                )
        super().__init__("learned_verifier", inner, inner_kwargs)
        self._judge = resolve_reward(self.inner.reward)
        if self._judge.waits_for:
            raise ValueError(
                f"learned_verifier: the reward {self.inner.reward!r} of {inner!r:.80} waits for "
                f"{self._judge.waits_for}; use an environment whose answers are judged in this process"
            )
        self._truth_share, self._verdict_share = truth_share, verdict_share
        pays = (verifier_weight * 0.5 / (1 - right_share), verifier_weight * 0.5 / right_share)
        self._rules = VerdictRules(instruction, verdicts, known_reward == TRUTH, pays, has_player)
        self.max_turns, self.opponent = 1 + verdicts, opponent if has_player else ""
        self._player: SamplingClient | None = None

    @cached_property
    def vocabulary(self) -> list[str] | None:
        """The words of the inner environment, those of the instruction, and the verdicts."""
        words = self.inner.vocabulary
        own = [word for word in self._rules.instruction.split() if word.strip("{}") not in PLACES]
        return None if words is None else list(dict.fromkeys([*words, *own, *VERDICTS]))

    def is_truth_known(self, id: str) -> bool:
        """Whether the truth of a training task is known: the same whenever it is drawn."""
        return rng.uniform(rng.key("truth is known", id)) < self._truth_share

    def train(self, seed: int, index: int, level: str) -> Task:
        task = self.inner.train(seed, index, level)
        own = {KNOWN: self.is_truth_known(task.id), _DRAW: rng.key("learned verifier", seed, index)}
        return replace(task, meta={**task.meta, **own})

    def env(self, task: Task, tokenizer: Any) -> VerdictEnv:  # type: ignore[override]
        super().env(task, tokenizer)
        is_known = task.meta.get(KNOWN)
        return VerdictEnv(task, tokenizer, self._judge, self._rules, is_known, self._player)

    def seat(self, player: SamplingClient) -> None:
        self._player = player

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        """A task to imitate: of those to answer, the share `verdict_share` become answers to judge."""
        if KNOWN in task.meta and rng.uniform(rng.key("demonstrated role", task.meta[_DRAW])) < self._verdict_share:
            return self._demonstrate_verdict(task.meta[_DRAW], task.level, tokenizer) or task
        return self.inner.complete_prompt(task, tokenizer)

    def _demonstrate_verdict(self, draw: int, level: str, tokenizer: Any) -> Task | None:
        """An answer to judge with the true verdict, to a task whose truth is known; None if no such task is found."""
        for attempt in range(_TRIES):
            task = self.inner.train(rng.key("to judge", draw, attempt), 0, level)
            if self.is_truth_known(task.id):
                break
        else:
            return None
        answered = self.inner.train(rng.key("swapped", draw), 0, level) if rng.uniform(draw) < _SWAPPED else task
        answer = self.inner.demonstration(answered, rng.key("answer to judge", draw))
        if not isinstance(answer, str):
            return None
        is_right, _ = judge_answer(self._judge, task, answer, StopReason.STOP)
        verdict = {_VERDICT: RIGHT if is_right else WRONG}
        return None if is_right is None else replace(self._rules.write_prompt(task, answer, tokenizer), meta=verdict)

    def demonstration(self, task: Task, key: int) -> str | list[str] | None:
        return task.meta[_VERDICT] if _VERDICT in task.meta else self.inner.demonstration(task, key)

    def describe_task(self, task: Task) -> Mapping[str, str]:
        return {} if _VERDICT in task.meta else self.inner.describe_task(task)
