"""The reward `code`: run the program in an answer against its problem's tests, in a sandbox.

    reward = resolve_reward("code")
    reward("", "def add(a, b): return a + b", {"tests": ["assert add(1, 2) == 3"]})     # 1.0

All answers of a batch run at once, on all cores. `program_extraction` finds the program in an answer, `formats` reads
the problem, and `rlvr.sandbox` runs it.
"""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from rlvr.core.ray_cluster import check_address
from rlvr.core.types import Outcome, Score
from rlvr.reward.code.formats import CodeProblem
from rlvr.reward.code.program_extraction import ExtractedProgram, extract, extract_requested
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_choice, check_flag, check_integer, check_number, is_number
from rlvr.reward.signatures import Case
from rlvr.sandbox import Limits, Sandbox, Verdict, shared_sandbox
from rlvr.sandbox.supervisor import TIERS

FAILURE = -0.5
DEFAULT_MAX_CHARS = 100  # of a program that earns the efficiency bonus
_SETTINGS = ("tiers", "workers", "limits", "allow_unsafe", "ray", "wait_s")


@dataclass(frozen=True)
class CodeOptions:
    partial: bool = True
    syntax_error_reward: float = FAILURE
    efficiency_bonus: float = 0.0
    efficiency_max_chars: int | None = None
    timeout_s: float | None = None
    sandbox: Sandbox | Mapping[str, Any] | None = None
    self_reports: bool = False

    def __post_init__(self) -> None:
        for name in ("partial", "self_reports"):
            check_flag(name, getattr(self, name))
        penalty = self.syntax_error_reward
        if not is_number(penalty) or not -math.inf < penalty <= 0:
            raise ValueError(f"syntax_error_reward={penalty!r}, expected a finite number, at most 0")
        check_number("efficiency_bonus", self.efficiency_bonus, 0)
        if self.efficiency_max_chars is not None:
            check_integer("efficiency_max_chars", self.efficiency_max_chars, 1)
            if not self.efficiency_bonus:
                raise ValueError(
                    "efficiency_max_chars has no effect without efficiency_bonus; leave it out, or set both"
                )
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, 0, 600, above=True)
        if isinstance(self.sandbox, Mapping):
            _check_settings(self.sandbox)
        elif self.sandbox is not None and not isinstance(self.sandbox, Sandbox):
            settings = ", ".join(_SETTINGS)
            raise ValueError(f"sandbox={self.sandbox!r}, expected a rlvr.sandbox.Sandbox or a mapping of {settings}")


def _caution(options: CodeOptions) -> str:
    golf = "efficiency_bonus pays for short programs, not for fast ones: a policy learns to golf; watch the pass rate"
    lies = "self_reports accepts tests that only ask the answer about itself: an answer that lies passes them"
    return "; ".join([golf] * bool(options.efficiency_bonus) + [lies] * options.self_reports)


def _start(options: CodeOptions) -> None:
    try:
        get_sandbox(options.sandbox)
    except (OSError, RuntimeError, ValueError) as refusal:
        raise ValueError(f"reward 'code': {refusal} (reward.kwargs.sandbox; `rlvr doctor` says what works)") from None


@register_reward(
    "code", batched=True, options=CodeOptions, caution=_caution, start=_start, verifiable=True, waits_for="processes"
)
def code(cases: Sequence[Case], options: CodeOptions) -> list[Score]:
    """1.0 where every test passes, else 0.5 x the share that passed, and -0.5 where none did.

    The problem is the task's meta: a row of MBPP, HumanEval or APPS as it was published, or our own (`tests`, and where
    needed `imports`, `setup`, `entry_point`). The program is looked for in `[BEGIN]...[DONE]`, then in a code fence,
    then it is the whole response. `partial=false` gives -0.5 unless all tests pass; `syntax_error_reward` is what a
    program that does not compile gets. `efficiency_bonus` is added to passed programs of fewer than
    `efficiency_max_chars` (100) characters: it pays for golfing. `timeout_s` is wall time for all tests of an answer.
    `sandbox` is a mapping of what `Sandbox` takes (`tiers`, `workers`, `limits`, `allow_unsafe`), with `ray` (and
    `wait_s`) of what `RaySandbox` takes; without it the process's shared one is used.
    `self_reports` accepts problems whose tests only ask the answer about itself (`callable`, `isinstance`, `hasattr`,
    `is`, its own `==`), which are invalid otherwise since an answer can say what it likes; the detail names it.

    A sandbox that breaks is an error and a broken test an invalid task: neither has a value. Parts: `tests_passed` (the
    share), `num_tests`, `compiles`, and `short` (whether the bonus was earned).
    """
    return _judge(cases, options, lambda case, problem: extract(case.response, problem.names, problem.prefix))


@register_reward("code_strict", batched=True, options=CodeOptions, start=_start, verifiable=True, waits_for="processes")
def code_strict(cases: Sequence[Case], options: CodeOptions) -> list[Score]:
    """As `code`, with the program in the form that our prompts ask for, as it stands there.

    In a chat that is the one Python code block. After text it is the completion up to `[DONE]`, or, where it goes on
    from a function's head, up to HumanEval's stop words. Reason: `many_answers` (several blocks).
    """
    return _judge(
        cases, options, lambda case, problem: extract_requested(case.response, problem.prefix, is_chat=_is_chat(case))
    )


def _is_chat(case: Case) -> bool:
    """Whether the model read a chat."""
    task = case.trajectory.task if case.trajectory else None
    return case.messages is not None or (task is not None and not isinstance(task.model_prompt, str))


def _judge(
    cases: Sequence[Case], options: CodeOptions, find: Callable[[Case, CodeProblem], ExtractedProgram]
) -> list[Score]:
    """The scores of the programs that `find` finds in the responses."""
    scores: dict[int, Score] = {}
    waiting: dict[int, tuple[ExtractedProgram, CodeProblem]] = {}
    for i, case in enumerate(cases):
        try:
            problem = CodeProblem.of({**(case.meta or {}), **_humaneval_prompt(case)})
        except ValueError as wrong:
            scores[i] = Score(None, Outcome.INVALID, "bad_problem", detail=str(wrong))
            continue
        program = find(case, problem)
        if program.reason:
            scores[i] = _score(options, program, problem, None)
        else:
            waiting[i] = program, problem
    if waiting:
        try:
            sandbox = get_sandbox(options.sandbox)
        except (OSError, RuntimeError, ValueError) as refusal:  # the machine has no tier that was asked for, say
            no_tier = Score(None, Outcome.ERROR, "no_tier", detail=f"{type(refusal).__name__}: {refusal}")
            return [scores.get(i, no_tier) for i in range(len(cases))]
        jobs = [
            sandbox_job(program.code, problem, problem.tests)
            | {"timeout_s": options.timeout_s, "self_reports": options.self_reports}
            for program, problem in waiting.values()
        ]
        for (i, (program, problem)), verdict in zip(waiting.items(), sandbox.verify_many(jobs), strict=True):
            scores[i] = _score(options, program, problem, verdict)
    return [scores[i] for i in range(len(cases))]


def _score(options: CodeOptions, program: ExtractedProgram, problem: CodeProblem, verdict: Verdict | None) -> Score:
    """The score of a program from its verdict; without a verdict, of a completion in which no program was found."""
    outcome, reason = (verdict.outcome, verdict.reason) if verdict else (Outcome.FAILED, program.reason)
    detail = _detail(verdict) if verdict else ""
    if outcome in (Outcome.ERROR, Outcome.INVALID):
        return Score(None, outcome, reason, detail=detail)
    total = max(len(problem.tests), len(verdict.tests) if verdict else 0)
    passed = verdict.num_passed if verdict else 0
    parts = {"tests_passed": passed / total, "num_tests": total, "compiles": reason not in _NO_PROGRAM}
    value = FAILURE
    if outcome is Outcome.PASSED:
        own = program.code.removeprefix(problem.prefix)  # of HumanEval's answers what the policy wrote
        short = len(own) < (options.efficiency_max_chars or DEFAULT_MAX_CHARS)
        value = 1.0 + options.efficiency_bonus * short
        parts |= {"short": short} if options.efficiency_bonus else {}
    elif reason == "syntax_error":
        value = float(options.syntax_error_reward)
    elif passed and options.partial:
        value = 0.5 * (passed / total)
    return Score(value, outcome, reason, parts, detail)


_NO_PROGRAM = ("syntax_error", "no_answer", "many_answers", "too_large")


def sandbox_job(program: str, problem: CodeProblem, tests: Sequence[Any]) -> dict[str, Any]:
    """What `Sandbox.verify` takes, for some of a problem's tests."""
    return {
        "solution": program,
        "tests": list(tests),
        "setup": problem.setup,
        "imports": problem.imports,
        "entry_point": problem.entry_point,
        "answer_names": sorted(problem.defined_names),
    }


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that `Sandbox` would refuse: at the start, not at the first verification."""
    for key in settings:
        check_choice("sandbox", key, _SETTINGS)
    tiers, workers, limits = settings.get("tiers", TIERS), settings.get("workers"), settings.get("limits", {})
    if not isinstance(tiers, (list, tuple)) or not (tiers or settings.get("allow_unsafe")):
        raise ValueError(f"sandbox.tiers={tiers!r}, expected a list with some of {', '.join(TIERS)}")
    for tier in tiers:
        check_choice("sandbox.tiers", tier, TIERS)
    if workers is not None:
        check_integer("sandbox.workers", workers, 1)
    address = settings.get("ray")
    if address is not None:
        check_address(str(address), "sandbox.ray")
    if "wait_s" in settings:
        check_number("sandbox.wait_s", settings["wait_s"], 0, above=True)
        if address is None:
            raise ValueError("sandbox.wait_s has no effect without sandbox.ray; leave it out, or set both")
    known = [field.name for field in fields(Limits)]
    if not isinstance(limits, Mapping):
        raise ValueError(f"sandbox.limits={limits!r}, expected a mapping with some of {', '.join(known)}")
    for key, value in limits.items():
        check_choice("sandbox.limits", key, known)
        if key == "cpu_s" and value is None:
            continue
        if key in ("timeout_s", "cpu_s"):
            check_number(f"sandbox.limits.{key}", value, 0, above=True)
        else:
            check_integer(f"sandbox.limits.{key}", value, 0)


def get_sandbox(given: Sandbox | Mapping[str, Any] | None = None) -> Sandbox:
    """The given sandbox, the one with the given settings (made once), or the process's shared one."""
    if isinstance(given, Sandbox):
        return given
    return _sandbox_from_settings(json.dumps(dict(given), sort_keys=True)) if given else shared_sandbox()


@cache
def _sandbox_from_settings(settings: str) -> Sandbox:
    arguments = json.loads(settings)
    if "limits" in arguments:
        arguments["limits"] = Limits(**arguments["limits"])
    if arguments.get("ray") is None:
        arguments.pop("ray", None)
        sandbox = Sandbox(**arguments)
    else:
        from rlvr.sandbox.ray_sandbox import RaySandbox

        sandbox = RaySandbox(**arguments)
    atexit.register(sandbox.close)
    return sandbox


def _humaneval_prompt(case: Case) -> dict[str, str]:
    """`{"prompt": ...}` for a HumanEval row without its prompt column: completions continue that text."""
    meta = case.meta or {}
    is_humaneval = "test" in meta and "entry_point" in meta and "tests" not in meta and "prompt" not in meta
    return {"prompt": case.prompt} if is_humaneval else {}


def _detail(verdict: Verdict) -> str:
    """The detail of the verdict, or else of the first test that did not pass."""
    detail = verdict.detail or next((test.detail for test in verdict.tests if not test.passed), "")
    return detail[:1000]
