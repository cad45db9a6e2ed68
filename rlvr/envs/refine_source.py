"""`refine`: the tasks of another environment, with further attempts after feedback from verifiers.

    env:
      name: refine
      kwargs: {inner: gsm8k, verifiers: [gsm8k], max_turns: 3}
    reward: {watch: [first_attempt]}      # what the first attempts were worth, beside the last ones

The final reward is the inner environment's own, on the last attempt. Where the verifiers know the right answer, being
asked again says "that was wrong", which nobody says where no verifier is: a pass rate of last attempts is no pass@1,
and is to be read beside that of the first ones.

Left out on purpose: environments whose episodes have turns of their own (`mbpp` and `code` refine by `max_turns`).
`python -m pytest tests/test_env_refine_source.py` exercises it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr import draws
from rlvr.envs.critics import Bench, BlendCritic, told
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.refine import Attempt, Compose, Prompt, RefineEnv
from rlvr.envs.registry import register_environment, resolve_environment
from rlvr.reward import register_reward
from rlvr.reward.blend import Blend
from rlvr.reward.options import one_of
from rlvr.reward.signatures import Case
from rlvr.types import Outcome, Score, Task, Trajectory

HISTORIES = ("append", "rewrite")
FEEDBACK = {
    "append": "{feedback}\nPlease try again.",
    "rewrite": "{prompt}\n\nA previous answer:\n{answer}\n\nWhat is wrong with it:\n{feedback}\n\nGive a better one.",
}
_PLACES = re.compile(r"\{(\w*)\}")


@register_environment("refine")
class RefineSource:
    """The tasks of the environment `inner`, made with `inner_kwargs`, in episodes of up to `max_turns` attempts.

    `verifiers` are names, or {name, weight, kwargs} as in the reward `composite`; by default the inner environment's
    reward. An episode is over when their blend is at least `min_confidence`, or changes by less than
    `convergence_threshold` from one attempt to the next. Each attempt after the first costs `attempt_cost` of the
    reward. `feedback` is what is said after an attempt, with {feedback} for the verifiers' words, {prompt} and
    {answer}; with `history: append` it goes behind the attempt, with `rewrite` it is the whole next prompt.
    """

    def __init__(
        self,
        inner: str,
        inner_kwargs: Mapping[str, Any] | None = None,
        verifiers: Sequence[str | Mapping[str, Any]] | None = None,
        max_turns: int = 2,
        min_confidence: float = 0.8,
        convergence_threshold: float = 0.0,
        attempt_cost: float = 0.0,
        history: str = "append",
        feedback: str | None = None,
    ) -> None:
        if type(max_turns) is not int or max_turns < 2:
            raise ValueError(
                f"refine: max_turns={max_turns!r}, expected at least 2 attempts; for one use env.name={inner}"
            )
        if not (isinstance(attempt_cost, (int, float)) and 0 <= attempt_cost <= 1):
            raise ValueError(f"refine: attempt_cost={attempt_cost!r}, expected from 0 to 1")
        one_of("refine: history", history, HISTORIES)
        self._template = FEEDBACK[history] if feedback is None else feedback
        for place in _PLACES.findall(self._template):
            one_of("refine: feedback: a place", place, ("feedback", "prompt", "answer"))
        self.inner = resolve_environment(inner, **(inner_kwargs or {}))
        if hasattr(self.inner, "group_builder"):
            raise ValueError(f"refine: the environment {inner!r} has episodes of its own; its tasks cannot be refined")
        blend = Blend.of([self.inner.reward] if verifiers is None else verifiers)
        self._bench, self._rewrite, self._name, self.max_turns = Bench(blend), history == "rewrite", inner, max_turns
        self._rule = {
            "min_confidence": min_confidence,
            "convergence_threshold": convergence_threshold,
            "attempt_cost": attempt_cost,
        }
        BlendCritic(self._bench, **self._rule)  # mistakes are said now
        self.levels, self.reward = self.inner.levels, self.inner.reward

    def train(self, seed: int, index: int, level: str) -> Task:
        return self.inner.train(seed, index, level)

    def heldout(self, count: int | None) -> list[Task]:
        return self.inner.heldout(count)

    def env(self, task: Task, tokenizer: Any) -> RefineEnv:
        if not isinstance(self.inner.env(task, tokenizer), PromptEnv):
            raise ValueError(
                f"refine: the environment {self._name!r} has episodes of its own; its tasks cannot be refined (mbpp "
                "and code do it themselves, by max_turns)"
            )
        critic = BlendCritic(self._bench, **self._rule)
        compose: Compose | None = self._compose if self._rewrite else None
        return RefineEnv(task, tokenizer, critic, max_turns=self.max_turns, say=self._say, compose=compose)

    def demonstration(self, task: Task, key: int) -> str | None:
        """The inner one; where it is wrong and history is kept in a vocabulary of words, a second one after it."""
        first, end = self.inner.demonstration(task, key), getattr(self.inner, "end_word", None)
        if first is None or end is None or self._rewrite:
            return first
        said = self._bench.blend.judge_many([Case(task.prompt_text, f"{first} {end}", task.meta)])[0]
        if said.confidence is None or said.confidence >= self._rule["min_confidence"]:
            return first
        second = self.inner.demonstration(task, draws.key("second-attempt", key))
        return f"{first} {end} {self._filled(task, first, told(said))} {second}"

    @property
    def vocabulary(self) -> list[str]:
        """The inner one and the words of the feedback; an AttributeError where that environment has none."""
        own = _PLACES.sub(" ", self._template).split()
        return list(dict.fromkeys([*self.inner.vocabulary, *own]))  # pyright: ignore[reportAttributeAccessIssue]

    def __getattr__(self, name: str) -> Any:
        """What task sources may have beside the protocol (`end_word`, `beside`, ...) is the inner environment's."""
        if name == "inner":  # not made yet: a mistake in the options is being said
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _say(self, attempt: Attempt, feedback: str) -> str:
        words = self._filled(attempt.task, attempt.answer, feedback)
        return f"\n{words}\n" if isinstance(attempt.task.prompt, str) else words

    def _compose(self, task: Task, answers: Sequence[str], feedback: str) -> Prompt:
        if not answers:
            return task.prompt
        words = self._filled(task, answers[-1], feedback)
        return words if isinstance(task.prompt, str) else [*task.prompt[:-1], {**task.prompt[-1], "content": words}]

    def _filled(self, task: Task, answer: str, feedback: str) -> str:
        asked = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].get("content", "")
        known = {"prompt": asked, "answer": answer, "feedback": feedback}
        return _PLACES.sub(lambda place: known[place[1]], self._template)  # in one pass: texts may hold places


@register_reward("first_attempt")
def first_attempt(prompt: str, response: str, meta: Any = None, trajectory: Trajectory | None = None) -> Score:
    """1.0 where the first attempt of a refined episode was right, else 0.0: for `reward.watch`, beside the last one."""
    passed = None if trajectory is None else trajectory.metadata.get("first_attempt")
    if passed is None:
        return Score(None, Outcome.INVALID, "no_attempts", detail="no environment with attempts made this answer")
    return Score(float(passed), Outcome.PASSED if passed else Outcome.FAILED, "" if passed else "wrong_value")
