"""The episode of a programming problem: an attempt, and where it fails on the tests that were shown, another.

    Previous attempt failed: assertion: assert add(1, 2) == 3
    Please fix the code.

Feedback comes from visible tests alone, so that the hidden ones stay hidden; it is one cleaned line of an error, cut
short. History is never rewritten: the policy's own tokens stay, what is said to it is added after them and carries no
loss, and the reward judges the last attempt (`Trajectory.answer`). `python -m pytest tests/test_env_refine.py`
exercises it.

What depends on chance inside an answer (the clock, random numbers, the order of a set of strings, a time limit that is
nearly met) may differ from run to run: with `max_turns` above 1 this changes what is said, and a resumed run may differ
from an unbroken one there. Addresses in memory are left out of what is said.
"""

from __future__ import annotations

import re
from typing import Any

from rlvr.envs.prompt import encode_prompt
from rlvr.messages import ModelInput
from rlvr.protocols import StepResult
from rlvr.reward.code import Problem, extract
from rlvr.reward.code.extract import BEGIN, DONE
from rlvr.reward.code.reward import job, opened
from rlvr.sandbox import Sandbox, Verdict
from rlvr.types import Outcome, Task

FEEDBACK = "Previous attempt failed: {error}\nPlease fix the code."
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
MAX_ERROR = 300  # characters of an error that the policy is told
_HERE = "\u2063attempt\u2063"  # stands for an answer while a chat template is rendered; no template holds it


class CodeEnv:
    """One episode. `stop` ends an answer (None: the end-of-sequence token); `visible` tests give the feedback."""

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        *,
        stop: list[Any] | None = None,
        visible: int | None = 1,
        max_turns: int = 1,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.task, self._tokenizer, self._stop = task, tokenizer, stop
        self._visible, self._left, self._sandbox = visible, max_turns, sandbox
        self._seen: list[int] = []
        self.turns = 0

    async def initial_observation(self) -> tuple[ModelInput, list[Any] | None]:
        """The prompt and what ends an answer."""
        self._seen = encode_prompt(self.task, self._tokenizer)
        return ModelInput(self._seen), self._stop

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        assert self._left > 0, f"the episode of task {self.task.id!r} is over; open a new one"
        self._left, self.turns = self._left - 1, self.turns + 1
        self._seen = [*self._seen, *action]
        error = await self._error(action) if self._left else None
        if error is None:
            self._left = 0
            return StepResult(0.0, True, metrics={"turns": float(self.turns)})
        told = self._tokenizer.encode(self._reply(action, error), add_special_tokens=False)
        needed = len(self._seen) + len(told) + len(action)
        longest = getattr(self._tokenizer, "model_max_length", None) or needed
        if needed > longest:  # no room for another attempt as long as this one: it is the last
            self._left = 0
            return StepResult(0.0, True, metrics={"turns": float(self.turns)})
        self._seen = [*self._seen, *told]
        return StepResult(0.0, False, ModelInput(self._seen), self._stop)

    async def _error(self, action: list[int]) -> str | None:
        """Why the attempt fails on the visible tests; None where it passes them, or where nobody can say."""
        problem = Problem.of(self.task.meta)
        found = extract(self._text(action), problem.names, problem.prefix)
        if found.reason:
            return self._cleaned(found.reason.replace("_", " "))
        asked = job(found.code, problem, problem.shown(self._visible))
        try:
            verdict = await opened(self._sandbox).averify(**asked)
        except (OSError, RuntimeError, ValueError):  # no sandbox here: the reward says so, in its own words
            return None
        if verdict.outcome not in (Outcome.FAILED, Outcome.TIMEOUT):
            return None
        return self._cleaned(_said(verdict, asked["tests"]))

    def _text(self, action: list[int]) -> str:
        end = self._tokenizer.eos_token_id
        return self._tokenizer.decode(action[:-1] if action[-1:] == [end] else action, skip_special_tokens=False)

    def _cleaned(self, error: str) -> str:
        """One printable line, without what has a meaning of its own in a prompt: an answer writes its own errors."""
        special = [*getattr(self._tokenizer, "all_special_tokens", []), *_added(self._tokenizer), BEGIN, DONE]
        error = _ADDRESS.sub("", error[: 4 * MAX_ERROR])
        special = [text for text in special if text.strip()]
        while held := [text for text in special if text in error]:
            for text in held:
                error = error.replace(text, " ")
        line = " ".join("".join(c if c.isprintable() else " " for c in error).split())
        return line if len(line) <= MAX_ERROR else f"{line[: MAX_ERROR - 3]}..."

    def _reply(self, action: list[int], error: str) -> str:
        """The text between the attempt and the next one."""
        feedback = FEEDBACK.format(error=error)
        if isinstance(self.task.prompt, str):
            closed = "" if DONE in self._text(action) else f"\n{DONE}"
            return f"{closed}\n{feedback}\n{BEGIN}\n"
        messages = [*self.task.prompt, {"role": "assistant", "content": _HERE}, {"role": "user", "content": feedback}]
        shown = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        _, found, after = shown.rpartition(_HERE)
        if not found:
            raise ValueError(
                f"task {self.task.id!r}: the tokenizer's chat template leaves out what the assistant said before, so "
                "no attempt can be refined; use max_turns=1, or another template"
            )
        end = self._tokenizer.eos_token or ""
        if end and action[-1:] == [self._tokenizer.eos_token_id]:  # the policy ended its turn itself
            after = after.removeprefix(end)
        return after


def _added(tokenizer: Any) -> list[str]:
    known = getattr(tokenizer, "get_added_vocab", None)
    return list(known()) if known else []


def _said(verdict: Verdict, tests: list[Any]) -> str:
    """The reason and the visible test, or the answer's own exception."""
    at = next((i for i, test in enumerate(verdict.tests) if not test.passed), 0)
    detail = verdict.tests[at].detail if at < len(verdict.tests) else verdict.detail
    reason = verdict.reason.replace("_", " ")
    if verdict.reason in ("assertion", "wrong_output", "timeout") and at < len(tests):
        test = tests[at]
        asked = test if isinstance(test, str) else f"input {test['input']!r}, expected output {test['output']!r}"
        return f"{reason}: {asked}{f' ({detail})' if detail else ''}"
    return f"{reason}: {detail}" if detail else reason
