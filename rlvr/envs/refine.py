"""Refinement: the policy answers, a reviewer says what is wrong, the policy tries again until the reviewer is content.

    env = RefineEnv(task, tokenizer, BlendReviewer(BlendJudge(blend)), max_turns=3)

    env:                                  # in a config: the tasks of another environment, refined
      name: refine
      kwargs: {inner: gsm8k, verifiers: [gsm8k], max_turns: 3}
    reward: {watch: [first_attempt]}      # whether first attempts were right, beside the last ones

`RefineEnv` is the episode; its reviewer is one of `rlvr.envs.reviewers` or your own. Feedback is added after the
policy's tokens and carries no loss, and the reward judges the last attempt (`Trajectory.answer`). With `compose` every
prompt is written anew: the episode is then several trajectories of one rollout, each a prompt and one completion.
Special tokens never pass from an answer or a review into the next prompt: an answer could have written them.

A verifier that knows the right answer reveals with each further attempt that the last one was wrong. So a pass rate of
last attempts is no pass@1; read it beside that of the first attempts. What depends on chance inside a reviewer (a
judge, the clock of a program under test) may differ from run to run, so a resumed run may differ there too.

Left out on purpose: refining environments whose episodes have turns of their own (`mbpp` and `code` refine by their own
`max_turns`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from rlvr.chat.special_tokens import special_token_texts, strip_special
from rlvr.chat.turns import decode_turn, encode_between, has_room, render_between
from rlvr.core import rng
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import StepResult
from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.envs.prompt import encode_prompt
from rlvr.envs.registry import register_environment
from rlvr.envs.reviewers import Attempt, BlendJudge, BlendReviewer, Reviewer, feedback_text
from rlvr.envs.wrapped_source import NestedSource
from rlvr.reward import register_reward
from rlvr.reward.blend import Blend
from rlvr.reward.reward_options import check_choice
from rlvr.reward.signatures import Case

Prompt = str | list[dict[str, str]]
Compose = Callable[[Task, Sequence[str], str], Prompt]
"""(task, answers so far, feedback on the last) -> the next prompt. The first prompt gets no answers and feedback ""."""


def plain_feedback(attempt: Attempt, feedback: str) -> str:
    """The text between two attempts: a user's turn of a chat, or lines of their own in a text prompt."""
    return f"\n\n{feedback}\n\n" if isinstance(attempt.task.model_prompt, str) else feedback


class RefineEnv:
    """One episode. `stop` ends an answer (None: the end-of-sequence token).

    `format_feedback` writes the text between two attempts; `compose`, if given, writes every prompt anew instead, the
    first one included. `ended` says why the episode is over: `max_turns`, `no_room` (the context has no room for
    another attempt as long as the last), or the reviewer's word.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        reviewer: Reviewer,
        *,
        stop: list[Any] | None = None,
        max_turns: int = 1,
        format_feedback: Callable[[Attempt, str], str] = plain_feedback,
        compose: Compose | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"task {task.id!r}: max_turns={max_turns}, expected at least 1 attempt")
        self.task, self._tokenizer, self._reviewer, self._stop = task, tokenizer, reviewer, stop
        self._max_turns, self._format_feedback, self._compose = max_turns, format_feedback, compose
        self._prompt: list[int] = []
        self._answers: list[str] = []
        self.turns = 0
        self.ended = ""

    async def initial_observation(self) -> tuple[ModelInput, list[Any] | None]:
        """The prompt, and what ends an answer."""
        self._prompt = encode_prompt(self.task, self._tokenizer) if self._compose is None else self._compose_prompt("")
        return ModelInput(self._prompt), self._stop

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        assert not self.ended, f"the episode of task {self.task.id!r} is over; open a new one"
        self.turns += 1
        stop_reason = (extra or {}).get("stop_reason")
        attempt = Attempt(
            self.task,
            self.turns,
            decode_turn(action, self._tokenizer),
            action,
            self._prompt,
            self.turns == self._max_turns,
            None if stop_reason is None else StopReason(stop_reason),
            self._tokenizer,
        )
        review = await self._reviewer.review(attempt)
        metrics = dict(review.metrics)
        passed = {} if review.passed is None else {"attempt": float(review.passed)}
        if self.turns == 1:
            metrics |= {f"first_{name}": value for name, value in passed.items()}
        if review.feedback is None:
            self.ended = review.ended or "content"
        elif attempt.last:
            self.ended = "max_turns"
        else:
            feedback = strip_special(review.feedback, special_token_texts(self._tokenizer))
            self._prompt = self._next_prompt(attempt, feedback)
            if self._prompt:
                return StepResult(review.reward, False, ModelInput(self._prompt), self._stop, metrics=metrics)
            self.ended = "no_room"
        metrics |= {f"last_{name}": value for name, value in passed.items()}
        return StepResult(review.reward, True, metrics={**metrics, "turns": float(self.turns)})

    def _next_prompt(self, attempt: Attempt, feedback: str) -> list[int]:
        """All tokens before the next attempt; none if the context has no room for it."""
        if self._compose is None:
            between = self._text_between(attempt, self._format_feedback(attempt, feedback))
            added = encode_between(self.task, self._tokenizer, between)
            prompt = [*attempt.prompt_tokens, *attempt.tokens, *added]
        else:
            self._answers.append(strip_special(attempt.answer, special_token_texts(self._tokenizer)))
            prompt = self._compose_prompt(feedback)
        return prompt if has_room(self._tokenizer, prompt, attempt.tokens) else []

    def _compose_prompt(self, feedback: str) -> list[int]:
        assert self._compose is not None
        prompt = self._compose(self.task, tuple(self._answers), feedback)
        return encode_prompt(replace(self.task, prompt=prompt, shown_prompt=None), self._tokenizer)

    def _text_between(self, attempt: Attempt, feedback: str) -> str:
        """The text between the attempt and the next one."""
        if isinstance(self.task.model_prompt, str):
            return feedback
        return render_between(self.task, self._tokenizer, attempt.tokens, [{"role": "user", "content": feedback}])


HISTORIES = ("append", "rewrite")
FEEDBACK = {
    "append": "{feedback}\nPlease try again.",
    "rewrite": "{prompt}\n\nA previous answer:\n{answer}\n\nWhat is wrong with it:\n{feedback}\n\nGive a better one.",
}
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


@register_environment("refine")
class RefineSource(NestedSource):
    """The tasks of the environment `inner`, made with `inner_kwargs`, in episodes of up to `max_turns` attempts.

    `verifiers` are names, or {name, weight, kwargs} as in the reward `composite`; by default the inner environment's
    reward, which also judges the last attempt. `min_confidence`, `convergence_threshold` and `attempt_cost` are those
    of `BlendReviewer`. `feedback` is the text after an attempt, with {feedback} for the verifiers' words, {prompt} and
    {answer}: with `history: append` it follows the attempt, with `rewrite` it is the whole next prompt.
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
        check_choice("refine: history", history, HISTORIES)
        self._template = FEEDBACK[history] if feedback is None else feedback
        for name in _PLACEHOLDER.findall(self._template):
            check_choice("refine: feedback: a place", name, ("feedback", "prompt", "answer"))
        super().__init__("refine", inner, inner_kwargs)
        self._judge = BlendJudge(Blend.of([self.inner.reward] if verifiers is None else verifiers))
        self._rewrite, self.max_turns = history == "rewrite", max_turns
        self._reviewer_options = {
            "min_confidence": min_confidence,
            "convergence_threshold": convergence_threshold,
            "attempt_cost": attempt_cost,
        }
        BlendReviewer(self._judge, **self._reviewer_options)  # refuses wrong options now
        self.environment_weight = 1.0 if attempt_cost else None  # a cost is what such an episode gives

    def env(self, task: Task, tokenizer: Any) -> RefineEnv:
        super().env(task, tokenizer)
        return RefineEnv(
            task,
            tokenizer,
            BlendReviewer(self._judge, **self._reviewer_options),
            max_turns=self.max_turns,
            format_feedback=self._format_feedback,
            compose=self._compose if self._rewrite else None,
        )

    def demonstration(self, task: Task, key: int) -> str | list[str] | None:
        """The inner one; if it is wrong and history is kept in a vocabulary of words, a second one follows it."""
        first = self.inner.demonstration(task, key)
        if not isinstance(first, str) or self.end_word is None or self._rewrite:
            return first
        verdict = self._judge.blend.judge_many([Case(task.prompt_text, f"{first} {self.end_word}", task.meta)])[0]
        if verdict.confidence is None or verdict.confidence >= self._reviewer_options["min_confidence"]:
            return first
        second = self.inner.demonstration(task, rng.key("second-attempt", key))
        assert isinstance(second, str)
        return [first, self._fill_template(task, first, feedback_text(verdict)), second]

    @cached_property
    def vocabulary(self) -> list[str] | None:
        """The inner environment's words and those of the feedback."""
        words = self.inner.vocabulary
        own = _PLACEHOLDER.sub(" ", self._template).split()
        return None if words is None else list(dict.fromkeys([*words, *own]))

    def _format_feedback(self, attempt: Attempt, feedback: str) -> str:
        text = self._fill_template(attempt.task, attempt.answer, feedback)
        return f"\n{text}\n" if isinstance(attempt.task.model_prompt, str) else text

    def _compose(self, task: Task, answers: Sequence[str], feedback: str) -> Prompt:
        prompt = task.model_prompt
        if not answers:
            return prompt
        text = self._fill_template(task, answers[-1], feedback)
        if isinstance(prompt, str):
            return prompt.removesuffix(task.prompt_text) + text  # the examples stay before it
        return [*prompt[:-1], {**prompt[-1], "content": text}]

    def _fill_template(self, task: Task, answer: str, feedback: str) -> str:
        prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].get("content", "")
        values = {"prompt": prompt, "answer": answer, "feedback": feedback}
        return _PLACEHOLDER.sub(
            lambda match: values[match[1]], self._template
        )  # one pass: values may hold placeholders


@register_reward("first_attempt")
def first_attempt(prompt: str, response: str, meta: Any = None, trajectory: Trajectory | None = None) -> Score:
    """1.0 if the first attempt of a refined episode was right, else 0.0. For `reward.watch`."""
    passed = None if trajectory is None else trajectory.metadata.get("first_attempt")
    if passed is None:
        return Score(None, Outcome.INVALID, "no_attempts", detail="no environment with attempts made this answer")
    return Score(float(passed), Outcome.PASSED if passed else Outcome.FAILED, "" if passed else "wrong_value")
