"""The reward `code`: run the program in an answer against its problem's tests, in a sandbox.

    reward = resolve_reward("code")
    reward("", "def add(a, b): return a + b", {"tests": ["assert add(1, 2) == 3"]})     # 1.0

All answers of a batch run at once, on all cores. What counts as the answer is in `extract`, how a problem is written in
`formats`, and what runs it in `rlvr.sandbox`. `python -m pytest tests/test_reward_code.py` exercises it.
"""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from rlvr.reward.code.extract import Extracted, extract
from rlvr.reward.code.formats import Problem
from rlvr.reward.options import is_number, one_of
from rlvr.reward.registry import register_reward
from rlvr.sandbox import Limits, Sandbox, Verdict, shared
from rlvr.sandbox.supervisor import TIERS
from rlvr.types import Outcome, Score

FAILURE = -0.5
_SETTINGS = ("tiers", "workers", "limits", "allow_unsafe")


def _options(
    partial: bool = True,
    syntax_error_reward: float = FAILURE,
    efficiency_bonus: float = 0.0,
    efficiency_max_chars: int | None = None,
    timeout_s: float | None = None,
    sandbox: Sandbox | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    def refuse(name: str, given: Any, expected: str) -> None:
        raise ValueError(f"reward 'code': {name}={given!r}, expected {expected}")

    if not isinstance(partial, bool):
        refuse("partial", partial, "true or false")
    if not is_number(syntax_error_reward) or not -math.inf < syntax_error_reward <= 0:
        refuse("syntax_error_reward", syntax_error_reward, "a finite number, at most 0")
    if not is_number(efficiency_bonus) or not 0 <= efficiency_bonus < math.inf:
        refuse("efficiency_bonus", efficiency_bonus, "a finite number, at least 0")
    if efficiency_max_chars is not None:
        if (
            isinstance(efficiency_max_chars, bool)
            or not isinstance(efficiency_max_chars, int)
            or efficiency_max_chars < 1
        ):
            refuse("efficiency_max_chars", efficiency_max_chars, "a whole number of characters, at least 1")
        if not efficiency_bonus:
            raise ValueError(
                "reward 'code': efficiency_max_chars has no effect without efficiency_bonus; leave it out, or set both"
            )
    if timeout_s is not None and not (is_number(timeout_s) and 0 < timeout_s <= 600):
        refuse("timeout_s", timeout_s, "seconds above 0, at most 600")
    if isinstance(sandbox, Mapping):
        _check_settings(sandbox)
    elif sandbox is not None and not isinstance(sandbox, Sandbox):
        refuse("sandbox", sandbox, f"a rlvr.sandbox.Sandbox, or a mapping with some of {', '.join(_SETTINGS)}")
    return {
        "partial": partial,
        "syntax_error_reward": float(syntax_error_reward),
        "efficiency_bonus": float(efficiency_bonus),
        "efficiency_max_chars": efficiency_max_chars or 100,
        "timeout_s": timeout_s,
        "sandbox": sandbox,
    }


def _caution(efficiency_bonus: float, **_: Any) -> str:
    golf = "efficiency_bonus pays for short programs, not for fast ones: a policy learns to golf; watch the pass rate"
    return golf if efficiency_bonus else ""


def _start(sandbox: Sandbox | Mapping[str, Any] | None, **_: Any) -> None:
    try:
        opened(sandbox)
    except (OSError, RuntimeError, ValueError) as refusal:
        raise ValueError(f"reward 'code': {refusal} (reward.kwargs.sandbox; `rlvr doctor` says what works)") from None


@register_reward(
    "code", batched=True, prepare=_options, caution=_caution, start=_start, computes=True, waits="processes"
)
def code(
    prompts: Sequence[str],
    responses: Sequence[str],
    metas: Sequence[Mapping[str, Any] | None],
    *,
    partial: bool = True,
    syntax_error_reward: float = FAILURE,
    efficiency_bonus: float = 0.0,
    efficiency_max_chars: int = 100,
    timeout_s: float | None = None,
    sandbox: Sandbox | Mapping[str, Any] | None = None,
) -> list[Score]:
    """1.0 where every test passes, else 0.5 x the share that passed, and -0.5 where none did.

    The problem is the task's meta: a row of MBPP, HumanEval or APPS as it was published, or our own (`tests`, and where
    needed `imports`, `setup`, `entry_point`). The program is looked for in `[BEGIN]...[DONE]`, then in a code fence,
    then it is the whole response. `partial=false` gives -0.5 unless all tests pass; `syntax_error_reward` is what a
    program that does not compile gets. `efficiency_bonus` is added to passed programs of fewer than
    `efficiency_max_chars` characters: it pays for golfing. `timeout_s` is wall time for all tests of an answer.
    `sandbox` is a mapping of what `Sandbox` takes (`tiers`, `workers`, `limits`, `allow_unsafe`); without it the
    process's shared one is used.

    A sandbox that breaks is an error and a broken test an invalid task: neither has a value. Parts: `tests_passed` (the
    share), `num_tests`, `compiles`, and `short` (whether the bonus was earned).
    """
    scores: list[Score | None] = [None] * len(responses)
    jobs: list[dict[str, Any]] = []
    waiting: list[tuple[int, Extracted, Problem]] = []

    def scored(found: Extracted, problem: Problem, verdict: Verdict | None) -> Score:
        outcome, reason = (verdict.outcome, verdict.reason) if verdict else (Outcome.FAILED, found.reason)
        detail = _detail(verdict) if verdict else ""
        if outcome in (Outcome.ERROR, Outcome.INVALID):
            return Score(None, outcome, reason, detail=detail)
        total = max(len(problem.tests), len(verdict.tests) if verdict else 0)
        passed = verdict.num_passed if verdict else 0
        parts = {"tests_passed": passed / total, "num_tests": total, "compiles": reason not in _NO_PROGRAM}
        value = FAILURE
        if outcome is Outcome.PASSED:
            written = found.code.removeprefix(problem.prefix)  # of HumanEval's answers what the policy wrote
            short = len(written) < efficiency_max_chars
            value = 1.0 + efficiency_bonus * short
            parts |= {"short": short} if efficiency_bonus else {}
        elif reason == "syntax_error":
            value = syntax_error_reward
        elif passed and partial:
            value = 0.5 * (passed / total)
        return Score(value, outcome, reason, parts, detail)

    for i, (prompt, response, meta) in enumerate(zip(prompts, responses, metas, strict=True)):
        try:
            problem = Problem.of({**(meta or {}), **_told_by_prompt(prompt, meta)})
        except ValueError as wrong:
            scores[i] = Score(None, Outcome.INVALID, "bad_problem", detail=str(wrong))
            continue
        found = extract(response, problem.names, problem.prefix)
        if found.reason:
            scores[i] = scored(found, problem, None)
            continue
        waiting.append((i, found, problem))
        jobs.append(job(found.code, problem, problem.tests) | {"timeout_s": timeout_s})
    if jobs:
        try:
            chosen = opened(sandbox)
        except (OSError, RuntimeError, ValueError) as refusal:  # the machine has no tier that was asked for, say
            broken = Score(None, Outcome.ERROR, "no_tier", detail=f"{type(refusal).__name__}: {refusal}")
            return [score or broken for score in scores]
        for (i, found, problem), verdict in zip(waiting, chosen.verify_many(jobs), strict=True):
            scores[i] = scored(found, problem, verdict)
    return [score for score in scores if score is not None]


_NO_PROGRAM = ("syntax_error", "no_answer", "too_large")


def job(program: str, problem: Problem, tests: Sequence[Any]) -> dict[str, Any]:
    """What `Sandbox.verify` takes, for some of a problem's tests."""
    return {
        "solution": program,
        "tests": list(tests),
        "setup": problem.setup,
        "imports": problem.imports,
        "entry_point": problem.entry_point,
    }


def _check_settings(given: Mapping[str, Any]) -> None:
    """ValueError for what `Sandbox` would refuse, before it starts processes in the middle of a run."""
    what = "reward 'code': sandbox"
    for key in given:
        one_of(what, key, _SETTINGS)
    tiers, workers, limits = given.get("tiers", TIERS), given.get("workers"), given.get("limits", {})
    if not isinstance(tiers, (list, tuple)) or not (tiers or given.get("allow_unsafe")):
        raise ValueError(f"{what}.tiers={tiers!r}, expected a list with some of {', '.join(TIERS)}")
    for tier in tiers:
        one_of(f"{what}.tiers", tier, TIERS)
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ValueError(f"{what}.workers={workers!r}, expected at least 1, or none for the cores that are left")
    known = [field.name for field in fields(Limits)]
    if not isinstance(limits, Mapping):
        raise ValueError(f"{what}.limits={limits!r}, expected a mapping with some of {', '.join(known)}")
    for key, value in limits.items():
        one_of(f"{what}.limits", key, known)
        seconds = key in ("timeout_s", "cpu_s")
        fits = is_number(value) and 0 < value < math.inf if seconds else type(value) is int and value >= 0
        if not fits and not (key == "cpu_s" and value is None):
            expected = "seconds above 0" if seconds else "a whole number, at least 0"
            raise ValueError(f"{what}.limits.{key}={value!r}, expected {expected}")


def opened(given: Sandbox | Mapping[str, Any] | None = None) -> Sandbox:
    """The sandbox itself, the one of such settings (made once), or the process's shared one."""
    if isinstance(given, Sandbox):
        return given
    return _made(json.dumps(dict(given), sort_keys=True)) if given else shared()


@cache
def _made(settings: str) -> Sandbox:
    asked = json.loads(settings)
    if "limits" in asked:
        asked["limits"] = Limits(**asked["limits"])
    made = Sandbox(**asked)
    atexit.register(made.close)
    return made


def _told_by_prompt(prompt: str, meta: Mapping[str, Any] | None) -> dict[str, str]:
    """HumanEval's prompt is what its answers go on from; other trainers take that column out of the row."""
    is_humaneval = meta and "test" in meta and "entry_point" in meta and "tests" not in meta and "prompt" not in meta
    return {"prompt": prompt} if is_humaneval else {}


def _detail(verdict: Verdict) -> str:
    """What went wrong, for a person: the verdict's own words, else those of the first test that did not pass."""
    said = verdict.detail or next((test.detail for test in verdict.tests if not test.passed), "")
    return said[:1000]
