"""A trial: the programs and the tests that the episodes of a group wrote for one task, run against each other.

A program is right if it passes all tests of the row, and so is the reference. A test breaks a program that fails it. It
is accepted if it breaks no right program; a wrong program counts as broken only by an accepted test, and only if it
returned a value for some test of the row: every test breaks a program that does not run.

Everything runs in the sandbox. A sandbox that breaks raises `TrialError`, which is an error of the episodes and never a
zero.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rlvr.core.types import Outcome
from rlvr.envs.adversarial_tests.written_tests import WrittenTest
from rlvr.reward.code import CodeProblem
from rlvr.reward.code.code_reward import sandbox_job
from rlvr.sandbox import Sandbox, TestResult
from rlvr.sandbox.setup_parts import parse_beside_threads

_RETURNED = ("", "assertion")  # reasons of a test whose call returned plain data


class TrialError(RuntimeError):
    """The sandbox or the row's own tests broke, so nothing is known of programs and tests."""


@dataclass(frozen=True)
class ProgramResult:
    """How a program did in a trial. `is_right`: passes every test of the row; `runs`: returned a value for one of
    them. `passed` are the tests that it passes, of the row and written ones; `late` those that it did not end in
    time."""

    is_right: bool
    runs: bool
    passed: frozenset[str]
    late: frozenset[str]


@dataclass(frozen=True)
class TrialResult:
    """The programs and the planted ones by their text, the reference, and the tests that are accepted."""

    programs: dict[str, ProgramResult]
    planted: dict[str, ProgramResult]
    reference: ProgramResult
    accepted: frozenset[str]

    @property
    def right(self) -> list[ProgramResult]:
        """The right programs, the reference first."""
        return [self.reference, *(result for result in self.programs.values() if result.is_right)]

    @property
    def wrong(self) -> list[ProgramResult]:
        """Wrong programs that run: those to break. A planted one that passes the row counts as neither."""
        found = {**self.planted, **self.programs}
        return [result for result in found.values() if result.runs and not result.is_right]

    def count_wrong_broken(self, tests: Sequence[str]) -> int:
        """How many wrong programs that run fail an accepted one of these tests."""
        return sum(not result.passed.issuperset(self.accepted.intersection(tests)) for result in self.wrong)

    def count_right_broken(self, tests: Sequence[str]) -> int:
        """How many right programs fail one of these tests."""
        return sum(not result.passed.issuperset(tests) for result in self.right)


class Judge:
    """Runs programs against the tests of a problem's row and against written ones, for `timeout_s` at most.

    With `computes_results` the reference computes what a test expects that has no result of its own. It then runs in
    the checker, which no program can read.
    """

    def __init__(self, problem: CodeProblem, sandbox: Sandbox, timeout_s: float, computes_results: bool) -> None:
        self.problem, self._sandbox, self._timeout_s = problem, sandbox, timeout_s
        setup = [problem.setup, rename_functions(problem.solution, problem.names)] if computes_results else []
        self._with_reference = replace(problem, setup="\n".join(setup).strip()) if setup else problem

    async def judge(self, programs: Sequence[str], tests: Sequence[str], planted: Sequence[str] = ()) -> TrialResult:
        """Run all against all: the reference first, then the programs, on the tests that it ends in time."""
        tests = list(dict.fromkeys(tests))
        reference = await self._run(self.problem.solution, tests)
        if not reference.is_right:
            raise TrialError(f"the task's own solution fails a test of its row ({self.problem.solution[:80]!r})")
        ended = [test for test in tests if test not in reference.late]
        every = list(dict.fromkeys([*programs, *planted]))
        results = dict(zip(every, await asyncio.gather(*(self._run(program, ended) for program in every)), strict=True))
        written = {program: results[program] for program in programs}
        right = [reference, *(result for result in written.values() if result.is_right)]
        accepted = frozenset(test for test in tests if all(test in result.passed for result in right))
        return TrialResult(written, {program: results[program] for program in planted}, reference, accepted)

    async def _run(self, program: str, tests: Sequence[str]) -> ProgramResult:
        row = [str(test) for test in self.problem.tests]
        results = await self._verify(program, [*row, *tests], len(row))
        returned = any(result.reason in _RETURNED for result in results[: len(row)])
        late = [place for place, result in enumerate(results) if result.reason == "timeout"]
        if returned and len(late) > 1:  # one test that never ends says nothing of those after it
            again = [place for place in late if place >= len(row)]
            alone = await asyncio.gather(*(self._verify(program, [tests[place - len(row)]], 0) for place in again))
            for place, [result] in zip(again, alone, strict=True):
                results[place] = result
        named = list(zip([*row, *tests], results, strict=True))
        passed = frozenset(test for test, result in named if result.passed)
        never_ended = frozenset(test for test, result in named if result.reason == "timeout")
        return ProgramResult(passed.issuperset(row), returned, passed, never_ended)

    async def _verify(self, program: str, tests: list[str], own: int) -> list[TestResult]:
        """The result of each test, of which the first `own` are the row's."""
        # A function that no test calls could run beside the answer, which would read it there.
        problem = self.problem if own == len(tests) else self._with_reference
        job = sandbox_job(program, problem, tests)
        verdict = await self._sandbox.averify(**job, timeout_s=self._timeout_s)
        if verdict.outcome is Outcome.ERROR:
            raise TrialError(f"the sandbox failed: {verdict.reason} {verdict.detail}".strip())
        if verdict.outcome is not Outcome.INVALID:
            return list(verdict.tests)
        if own == len(tests):
            raise TrialError(f"a test of the row is broken: {verdict.reason} {verdict.detail}"[:300])
        if len(tests) == 1:
            return [TestResult(False, verdict.reason, verdict.detail)]
        parts = [tests[:own], *([test] for test in tests[own:])]  # find the one that is to blame
        found = await asyncio.gather(
            *(self._verify(program, part, own if part is parts[0] else 0) for part in parts if part)
        )
        return [result for part in found for result in part]


REFERENCE = "reference_"  # before the name of a function: the reference, in the checker


def write_statement(test: WrittenTest) -> str:
    """The statement that runs for a written test."""
    return test.statement if test.expected else f"assert {test.call} == {REFERENCE}{test.call}"


def rename_functions(program: str, names: Collection[str]) -> str:
    """The program with its functions of these names called `reference_NAME`.

    ValueError for one with classes: their code would run beside the answer, which could read it.
    """
    tree = parse_beside_threads(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            raise ValueError(
                f"the solution {program[:60]!r} defines the class {node.name!r}, which a program could read where the "
                "reference computes results; leave such tasks out, or let the tester write them (expected: tester)"
            )
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in names:
            node.name = f"{REFERENCE}{node.name}"
        elif isinstance(node, ast.Name) and node.id in names:
            node.id = f"{REFERENCE}{node.id}"
    return ast.unparse(tree)
