"""The critic of a programming problem: an attempt that fails on the tests that were shown is told where.

    Previous attempt failed: assertion: assert add(1, 2) == 3
    Please fix the code.

Feedback comes from visible tests alone, so that the hidden ones stay hidden; it is one cleaned line of an error, cut
short. `python -m pytest tests/test_env_refine.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlvr.envs.refine import Attempt, Critique, RefineEnv, special_texts
from rlvr.reward.code import Problem, extract
from rlvr.reward.code.extract import BEGIN, DONE
from rlvr.reward.code.reward import job, opened
from rlvr.reward.feedback import cleaned
from rlvr.sandbox import Sandbox, Verdict
from rlvr.types import Outcome, Task

FEEDBACK = "Previous attempt failed: {error}\nPlease fix the code."


class TestsCritic:
    """Runs an attempt against the first `visible` tests of its problem (None: all)."""

    __test__ = False  # no class of tests, whatever pytest makes of its name

    def __init__(self, visible: int | None = 1, sandbox: Sandbox | None = None, special: Sequence[str] = ()) -> None:
        self._visible, self._sandbox, self._special = visible, sandbox, (*special, BEGIN, DONE)

    async def criticise(self, attempt: Attempt) -> Critique:
        error = None if attempt.last else await self._error(attempt)
        return Critique(None if error is None else FEEDBACK.format(error=error))

    async def _error(self, attempt: Attempt) -> str | None:
        """Why the attempt fails on the visible tests; None where it passes them, or where nobody can say."""
        problem = Problem.of(attempt.task.meta)
        found = extract(attempt.answer, problem.names, problem.prefix)
        if found.reason:
            return cleaned(found.reason.replace("_", " "), self._special)
        asked = job(found.code, problem, problem.shown(self._visible))
        try:
            verdict = await opened(self._sandbox).averify(**asked)
        except (OSError, RuntimeError, ValueError):  # no sandbox here: the reward says so, in its own words
            return None
        if verdict.outcome not in (Outcome.FAILED, Outcome.TIMEOUT):
            return None
        return cleaned(_said(verdict, asked["tests"]), self._special)


def code_env(
    task: Task,
    tokenizer: Any,
    *,
    stop: list[Any] | None = None,
    visible: int | None = 1,
    max_turns: int = 1,
    sandbox: Sandbox | None = None,
) -> RefineEnv:
    """An episode of a programming problem. `stop` ends an answer; `visible` tests give the feedback."""
    critic = TestsCritic(visible, sandbox, special_texts(tokenizer))
    return RefineEnv(task, tokenizer, critic, stop=stop, max_turns=max_turns, say=_say)


def _say(attempt: Attempt, feedback: str) -> str:
    if not isinstance(attempt.task.prompt, str):
        return feedback
    closed = "" if DONE in attempt.answer else f"\n{DONE}"
    return f"{closed}\n{feedback}\n{BEGIN}\n"


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
