"""Self-distillation: the policy that reads more than the task teaches the policy that reads the task alone.

    L = sum over t of KL(p(. | x, y_<t) || sg p(. | x, f, y_<t))        x the prompt, f what else the teacher reads

SDPO, Hübotter et al. 2026, arXiv:2601.20802. The completion y is the policy's own. f is a completion of the same group
that passed, what the verifier said of y, or the reference answer. The divergence is estimated on the sampled tokens, so
its gradient is that of the token advantages

    A_t <- A_t + coefficient x (log p(y_t | x, f, y_<t) - log p(y_t | x, y_<t))

Both log-probs are those before the step. The prompts that hold f are written by `Preparation.prompts`
(`rlvr.training.informed_prompts`). Left out on purpose: divergences over the whole vocabulary, for which a client would
have to take the teacher's distribution, and a teacher whose weights are a moving average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rlvr.algorithms.part import SpecView
from rlvr.algorithms.sampler_logprobs import compute_sampler_logprobs
from rlvr.algorithms.terms.distillation import measure_teacher_kl, teach
from rlvr.algorithms.terms.term import Preparation, Term
from rlvr.core.protocols import Feature
from rlvr.core.types import Task, Trajectory, group_by, mean
from rlvr.core.variants import setting

KINDS = ("sibling", "feedback", "answer")
INFORMATION = tuple("+".join(some) for size in (1, 2, 3) for some in combinations(KINDS, size))


@dataclass(frozen=True)
class SelfDistillation(Term):
    """`coef` weighs self-distillation: every token's advantage gains coefficient x (log teacher - log policy), where
    the teacher is the policy itself and also reads `information` (SDPO, arXiv:2601.20802).

    `sibling` is another completion of the group, the first whose reward is above `accept_above`; `feedback` is what the
    verifier said of the completion, if its reward is not; `answer` is the task's reference answer. A completion without
    any of these has no teacher and learns nothing from this term; `teacher/share` is the share of the
    others. `weights=initial` teaches by the weights as RL began. `template` is the teacher's prompt, with {prompt} and
    {information} (null: the information after the last message of a chat, and before a prompt of text);
    `sibling_template`, `feedback_template` and `answer_template` say how each kind is introduced, with {text}.
    """

    name = "self_distillation"
    switch = "coef"
    has_gradient = True
    teaches = True
    compares_with_start = True
    needs_prompts = True

    coef: float = setting(low=0, expected="at least 0 (1 is usual)", flat="self_distillation_coef")
    information: str = setting("sibling", choices=INFORMATION)
    accept_above: float = setting(0.5, expected="a finite threshold (0.5 is usual)")
    weights: str = setting("current", choices=("current", "initial"))
    template: str | None = None
    sibling_template: str = "A correct answer to this problem:\n\n{text}"
    feedback_template: str = "What a check said of an earlier, wrong answer:\n\n{text}"
    answer_template: str = "The correct result: {text}"

    def __post_init__(self) -> None:
        super().__post_init__()
        places = {"template": ("{prompt}", "{information}")} if self.template is not None else {}
        places |= {f"{kind}_template": ("{text}",) for kind in KINDS}
        for name, needed in places.items():
            if missing := [place for place in needed if place not in getattr(self, name)]:
                raise ValueError(f"{self.key(name)}={getattr(self, name)!r} lacks {' and '.join(missing)}; add it")

    @property
    def kinds(self) -> list[str]:
        """The kinds of information that the teacher may read."""
        return self.information.split("+")

    @property
    def needs(self) -> tuple[Feature, ...]:
        return (Feature.REFERENCE,) if self.needs_reference else ()

    def used_key(self) -> tuple[str, str]:
        return self.key_of_switch, f"use {self.key('weights')}=current"

    @property
    def needs_reference(self) -> bool:
        return self.weights == "initial"

    @property
    def reads_reward(self) -> bool:
        return self.information != "answer"

    @property
    def shows_verdict(self) -> bool:
        return "feedback" in self.kinds

    @property
    def least_group(self) -> int:
        return 2 if self.information == "sibling" else 1

    def check(self, algorithm: SpecView) -> None:
        if others := [term for term in algorithm.terms if term.teaches and term is not self]:
            raise ValueError(
                f"{self.key(self.switch)}={self.coef:g} with {others[0].key(others[0].switch)}="
                f"{others[0].strength:g}: a completion has one teacher; leave one out"
            )

    def check_turns(self, max_turns: int) -> None:
        if max_turns > 1:
            raise ValueError(
                f"{self.key(self.switch)}={self.coef:g}: episodes of this environment have up to {max_turns} turns, "
                "and the teacher reads one prompt and one completion; leave it out, or choose an environment of one "
                "turn"
            )

    def prepare(self, batch: Sequence[Trajectory], prepared: Preparation) -> None:
        for t in batch:
            t.teacher_logprobs = []

    def adjust(self, selected: Sequence[Trajectory], prepared: Preparation) -> None:
        if prepared.prompts is None:
            raise ValueError(
                f"{self.key(self.switch)}={self.coef:g} without prompts for the teacher: give UpdateInputs(prompts="
                "InformedPrompts(tokenizer)), of rlvr.training.informed_prompts"
            )
        groups = group_by(selected, lambda t: t.group_id).values()
        rows = [(t, row) for group in groups for t in group if (row := self._inform(t, group, prepared)) is not None]
        informed = [row for _, row in rows]
        if self.needs_reference:
            taught = compute_sampler_logprobs(informed, prepared.reference, prepared.temperature)
        else:
            taught = prepared.compute_logprobs(informed)
        # Where other weights sampled, the sampler's log-probs are not those of the policy that is to learn.
        stale = [t for t, _ in rows if prepared.old_logprobs(t) is None and not prepared.is_current(t)]
        own = {id(t): values for t, values in zip(stale, prepared.compute_logprobs(stale), strict=True)}
        for (t, _), logprobs in zip(rows, taught, strict=True):
            teach(t, logprobs, self.coef, own.get(id(t), prepared.old_logprobs(t)))

    def measure_batch(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        judged = [t for t in batch if t.reward is not None]
        groups = group_by(judged, lambda t: t.group_id).values()
        return {
            "teacher/kl": measure_teacher_kl(batch),
            "teacher/share": mean([float(bool(t.teacher_logprobs)) for t in judged]),
            "teacher/groups": mean([float(any(t.teacher_logprobs for t in group)) for group in groups]),
        }

    def describe(self) -> str:
        return f"self-distillation {self.coef:g} from {self.information.replace('+', ' and ')}"

    def _accepts(self, t: Trajectory) -> bool:
        return t.reward is not None and t.reward > self.accept_above

    def _inform(self, t: Trajectory, group: Sequence[Trajectory], prepared: Preparation) -> Trajectory | None:
        """The completion behind the teacher's prompt; None if there is nothing to tell the teacher, or no room."""
        if t.is_empty or t.task is None:
            return None
        if t.num_observation_tokens or len(t.turn_starts) > 1:
            raise ValueError(
                f"{self.key(self.switch)}={self.coef:g}: episode {t.rollout_id!r} has several turns, and the teacher "
                "reads one prompt and one completion; leave it out"
            )
        prompts, texts = prepared.prompts, dict[str, str]()
        if sibling := next((other for other in group if other is not t and self._accepts(other)), None):
            texts["sibling"] = prompts.read_completion(sibling)
        if not self._accepts(t):
            texts["feedback"] = prompts.read_feedback(t)
        texts["answer"] = prompts.read_answer(t.task)
        parts = [self._introduce(kind, texts[kind]) for kind in self.kinds if texts.get(kind)]
        if not parts:
            return None
        tokens = prompts.encode(t.task, self.template, "\n\n".join(parts), len(t.response_tokens))
        return None if tokens is None else replace(t, prompt_tokens=tokens, attention_mask=[])

    def _introduce(self, kind: str, text: str) -> str:
        return getattr(self, f"{kind}_template").replace("{text}", text)

    def check_prompts(self, prompts: Any, task: Task) -> None:
        """ValueError if the tokenizer cannot write the templates."""
        try:
            for kind in self.kinds:
                prompts.encode(task, self.template, self._introduce(kind, ""), 0)
        except ValueError as error:
            raise ValueError(
                f"{self.key('template')} and {', '.join(self.key(f'{kind}_template') for kind in self.kinds)}: {error}"
            ) from error
