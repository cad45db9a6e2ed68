"""Refinement: the policy answers, a critic says what is wrong, the policy tries again, until the critic is content.

    env = RefineEnv(task, tokenizer, BlendCritic(Bench(blend)), max_turns=3)

`RefineEnv` is the episode, whoever criticises: visible tests (`rlvr.envs.code`), verifiers by weight
(`rlvr.envs.critics`), or a critic of your own. What is said to the policy is added after its own tokens and carries no
loss, and the reward judges the last attempt (`Trajectory.answer`). With `compose` the next prompt is written anew
instead: the episode is then several trajectories of one rollout, each of them a prompt and one answer.

Whoever wrote an answer may have a hand in what is said of it, so nothing that has a meaning of its own in a prompt
(special tokens) passes from an answer or a critique into the next prompt.

What depends on chance inside a critic (a judge, the clock in a program under test) may differ from run to run: with
`max_turns` above 1 this changes what is said, and a resumed run may differ from an unbroken one there.
`python -m pytest tests/test_env_refine.py tests/test_env_refine_blend.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from rlvr.envs.prompt import encode_prompt
from rlvr.messages import ModelInput
from rlvr.protocols import StepResult
from rlvr.reward.feedback import without
from rlvr.types import StopReason, Task

_HERE = "\u2063attempt\u2063"  # stands for an answer while a chat template is rendered; no template holds it

Prompt = str | list[dict[str, str]]
Compose = Callable[[Task, Sequence[str], str], Prompt]
"""(task, the answers so far, what was said of the last) -> the next prompt; the first is that of no answers and ""."""


@dataclass(frozen=True)
class Attempt:
    """One answer, as a critic gets it. `number` counts from 1; `last` says that no other can follow.

    `answer` is the text without its end token, `tokens` all that was sampled, `prompt_tokens` all that stood before.
    """

    task: Task
    number: int
    answer: str
    tokens: list[int]
    prompt_tokens: list[int]
    last: bool
    stop_reason: StopReason | None
    _tokenizer: Any = field(repr=False)

    @property
    def prompt(self) -> str:
        """What the policy saw, as text."""
        return self._tokenizer.decode(self.prompt_tokens, skip_special_tokens=False)


@dataclass(frozen=True)
class Critique:
    """What is said of an attempt. `feedback` None ends the episode, and `ended` is then a word that says why.

    `reward` adds to the episode's own, `passed` is whether the attempt is right, where the critic knows.
    """

    feedback: str | None
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    ended: str = ""
    passed: bool | None = None


class Critic(Protocol):
    """Criticises the attempts of one episode, in turn; the next one is asked for when `criticise` returns."""

    async def criticise(self, attempt: Attempt) -> Critique: ...


def told_as_is(attempt: Attempt, feedback: str) -> str:
    """The words between two attempts: a turn of the user, or, where the prompt is a text, lines of their own."""
    return f"\n\n{feedback}\n\n" if isinstance(attempt.task.prompt, str) else feedback


class RefineEnv:
    """One episode. `stop` ends an answer (None: the end-of-sequence token); `say` writes what stands between attempts.

    `compose` writes every prompt anew instead, the first one too. `ended` says why the episode is over: `max_turns`,
    `no_room` (the context has none for another attempt as long as the last), or the critic's word.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        critic: Critic,
        *,
        stop: list[Any] | None = None,
        max_turns: int = 1,
        say: Callable[[Attempt, str], str] = told_as_is,
        compose: Compose | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"task {task.id!r}: max_turns={max_turns}, expected at least 1 attempt")
        self.task, self._tokenizer, self._critic, self._stop = task, tokenizer, critic, stop
        self._max_turns, self._say, self._compose = max_turns, say, compose
        self._seen: list[int] = []
        self._answers: list[str] = []
        self.turns = 0
        self.ended = ""

    async def initial_observation(self) -> tuple[ModelInput, list[Any] | None]:
        """The prompt and what ends an answer."""
        self._seen = encode_prompt(self.task, self._tokenizer) if self._compose is None else self._composed("")
        return ModelInput(self._seen), self._stop

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        assert not self.ended, f"the episode of task {self.task.id!r} is over; open a new one"
        self.turns += 1
        stopped = (extra or {}).get("stop_reason")
        attempt = Attempt(
            self.task,
            self.turns,
            self._text(action),
            action,
            self._seen,
            self.turns == self._max_turns,
            None if stopped is None else StopReason(stopped),
            self._tokenizer,
        )
        critique = await self._critic.criticise(attempt)
        metrics = dict(critique.metrics)
        passed = {} if critique.passed is None else {"attempt": float(critique.passed)}
        if self.turns == 1:
            metrics |= {f"first_{name}": value for name, value in passed.items()}
        if critique.feedback is None:
            self.ended = critique.ended or "content"
        elif attempt.last:
            self.ended = "max_turns"
        else:
            self._seen = self._next(attempt, without(critique.feedback, special_texts(self._tokenizer)))
            if self._seen:
                return StepResult(critique.reward, False, ModelInput(self._seen), self._stop, metrics=metrics)
            self.ended = "no_room"
        metrics |= {f"last_{name}": value for name, value in passed.items()}
        return StepResult(critique.reward, True, metrics={**metrics, "turns": float(self.turns)})

    def _next(self, attempt: Attempt, feedback: str) -> list[int]:
        """All the tokens that the next attempt goes on from; none where there is no room for it."""
        if self._compose is None:
            between = self._between(attempt, self._say(attempt, feedback))
            seen = [*attempt.prompt_tokens, *attempt.tokens, *self._encoded(between)]
        else:
            self._answers.append(without(attempt.answer, special_texts(self._tokenizer)))
            seen = self._composed(feedback)
        needed = len(seen) + len(attempt.tokens)
        longest = getattr(self._tokenizer, "model_max_length", None) or needed
        return seen if needed <= longest else []

    def _composed(self, feedback: str) -> list[int]:
        assert self._compose is not None
        prompt = self._compose(self.task, tuple(self._answers), feedback)
        return encode_prompt(replace(self.task, prompt=prompt), self._tokenizer)

    def _encoded(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # a word-level vocabulary without such a word; each library has its own error
            raise ValueError(
                f"task {self.task.id!r}: the tokenizer cannot say the feedback {text[:80]!r} ({error}); give the "
                "feedback in words of its vocabulary"
            ) from error

    def _text(self, action: list[int]) -> str:
        end = self._tokenizer.eos_token_id
        return self._tokenizer.decode(action[:-1] if action[-1:] == [end] else action, skip_special_tokens=False)

    def _between(self, attempt: Attempt, told: str) -> str:
        """The text between the attempt and the next one."""
        if isinstance(self.task.prompt, str):
            return told
        messages = [*self.task.prompt, {"role": "assistant", "content": _HERE}, {"role": "user", "content": told}]
        shown = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        _, found, after = shown.rpartition(_HERE)
        if not found:
            raise ValueError(
                f"task {self.task.id!r}: the tokenizer's chat template leaves out what the assistant said before, so "
                "no attempt can be refined; use max_turns=1, or another template"
            )
        end = getattr(self._tokenizer, "eos_token", None) or ""
        if end and attempt.tokens[-1:] == [self._tokenizer.eos_token_id]:  # the policy ended its turn itself
            after = after.removeprefix(end)
        return after


@lru_cache(maxsize=16)
def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """What has a meaning of its own for a tokenizer."""
    added = getattr(tokenizer, "get_added_vocab", None)
    return tuple(dict.fromkeys([*getattr(tokenizer, "all_special_tokens", []), *(added() if added else [])]))
