"""One verification: its checked arguments, what each process gets of it, and how results become a `Verdict`."""

from __future__ import annotations

import marshal
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.core.types import Outcome
from rlvr.sandbox.setup_parts import for_answer
from rlvr.sandbox.verdict import Limits, TestResult, Verdict

PATHS = ("auto", "weak")
TEST_KEYS = ("input", "output", "tolerance")
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TestFault:
    """What is wrong with the tests, whatever the answer is."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Judgement:
    """The results of tests in their order and the path they took; none if the tests have a `fault`.

    `self_report` says that they only ask the answer about itself, if so.
    """

    results: list[TestResult]
    path: str = ""
    fault: TestFault | None = None
    self_report: str = ""


class VerificationJob:
    """The checked arguments of one verification. Raises ValueError for a mistake that is not the answer's."""

    def __init__(
        self,
        limits: Limits,
        solution: Any,
        tests: Any,
        timeout_s: float | None = None,
        setup: str = "",
        imports: Sequence[str] = (),
        entry_point: str | None = None,
        path: str = "auto",
        answer_names: Sequence[str] = (),
        self_reports: bool = False,
    ) -> None:
        self.tests: list[Any] = [tests] if isinstance(tests, (str, dict)) else list(tests)
        self.stdio = bool(self.tests) and all(isinstance(test, dict) for test in self.tests)
        if not self.tests or not (self.stdio or all(isinstance(test, str) for test in self.tests)):
            raise ValueError(
                f"tests={tests!r:.200}: give a list of assert statements, a text that defines check(candidate), or a "
                'list of {"input": ..., "output": ...}; the last kind does not mix with the others'
            )
        for test in self.tests if self.stdio else ():
            expected = test.get("output", 0)
            if not isinstance(test.get("input"), str) or not isinstance(expected, (str, type(None))):
                raise ValueError(
                    f'the test {test!r:.200} needs a text under "input" and one under "output" (or null there, to '
                    "compare with nothing)"
                )
            tolerance = test.get("tolerance")
            if tolerance is not None and (type(tolerance) not in (int, float) or not 0 <= tolerance < math.inf):
                raise ValueError(f"tolerance={tolerance!r:.80}: expected a finite number of at least 0, or none")
            if SURROGATE.search(test["input"] + (expected or "")):
                raise ValueError(f"the test {test!r:.200} holds a lone surrogate, which UTF-8 cannot encode; remove it")
        if self.stdio:  # what else a row of a dataset has may be of any type, and has no effect
            self.tests = [{key: test[key] for key in TEST_KEYS if key in test} for test in self.tests]
        if isinstance(imports, str) or not all(isinstance(line, str) for line in imports) or not isinstance(setup, str):
            raise ValueError(f"imports={imports!r:.200}, setup={setup!r:.200}; expected a list of texts and a text")
        if not isinstance(entry_point, (str, type(None))):
            raise ValueError(f"entry_point={entry_point!r:.200}; expected the name of a function, or none")
        if isinstance(answer_names, str) or not all(isinstance(name, str) for name in answer_names):
            raise ValueError(f"answer_names={answer_names!r:.200}; expected a list of names that answers define")
        if not isinstance(self_reports, bool):
            raise ValueError(f"self_reports={self_reports!r:.80}; expected true or false")
        if path not in PATHS:
            raise ValueError(f"path={path!r}; expected one of {', '.join(PATHS)}")
        self.seconds = limits.timeout_s if timeout_s is None else float(timeout_s)
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"timeout_s={timeout_s!r}: a number of seconds above 0 is expected")
        self.limits, self.solution, self.setup, self.imports = limits, solution, setup, list(imports)
        self.entry_point, self.path, self.answer_names = entry_point, path, list(answer_names)
        self.self_reports = self_reports

    def arguments(self) -> dict[str, Any]:
        """What makes the same job elsewhere, as plain data, if `refusal` has none against it."""
        return {
            "solution": self.solution, "tests": self.tests, "timeout_s": self.seconds, "setup": self.setup,
            "imports": self.imports, "entry_point": self.entry_point, "path": self.path,
            "answer_names": self.answer_names, "self_reports": self.self_reports,
        }  # fmt: skip

    def refusal(self) -> tuple[str, str] | None:
        """The reason and detail for an answer that need not be run; None if it must be."""
        source = self.solution
        if not isinstance(source, str):
            return "no_answer", f"the answer is {type(source).__name__}, not a text"
        if not source.strip():
            return "no_answer", "the answer is empty"
        if len(source) > self.limits.source:
            return "too_large", f"{len(source)} characters of source, at most {self.limits.source} bytes are taken"
        try:
            size = len(source.encode())
        except UnicodeEncodeError:
            return "syntax_error", "the source holds a lone surrogate, which UTF-8 cannot encode"
        if size > self.limits.source:
            return "too_large", f"{size} bytes of source, at most {self.limits.source} are taken"
        return ("syntax_error", "the source holds a null character") if "\0" in source else None

    def frames(self, indices: list[int], objects: bool = False, own_part: bool = False) -> tuple[bytes, bytes]:
        """The frames for the solver and for the checker. Only the second holds what is expected.

        `objects`: the tests run as statements, since the answer's values are no plain data. `own_part`: only what of
        them does not depend on an answer.
        """
        common = {"imports": self.imports, "setup": self.setup, "path": "stdio" if self.stdio else self.path}
        common |= {"entry_point": self.entry_point, "output": self.limits.output}
        tests = [self.tests[index] for index in indices]
        answer: dict[str, Any] = {**common, "solution": self.solution, "quiet": True}
        if self.path != "weak":
            answer["setup"] = for_answer(self.setup)
        if self.stdio:
            answer["stdin"] = tests[0]["input"]
        elif self.path == "weak":
            answer["tests"] = tests
        judged = {**common, "tests": tests, "answer_names": self.answer_names, "objects": objects}
        judged |= {"self_reports": self.self_reports, "own_part": own_part}
        return marshal.dumps(answer), marshal.dumps(judged)

    def all_failed(self, reason: str, detail: str) -> list[TestResult]:
        return [TestResult(False, reason, detail) for _ in self.tests]

    def verdict(self, judgement: Judgement, tier: str, start: float) -> Verdict:
        seconds = time.perf_counter() - start
        results, path = tuple(judgement.results), judgement.path
        if (fault := judgement.fault) is not None:
            results = tuple(self.all_failed(fault.reason, fault.detail))
            return Verdict(Outcome.INVALID, fault.reason, results, path, tier, seconds, fault.detail)
        assert len(results) == len(self.tests), (len(results), len(self.tests))
        bad = next((result for result in results if not result.passed), None)
        decided = judgement.self_report and f"{judgement.self_report}, which was accepted"
        if bad is None:
            return Verdict(Outcome.PASSED, "", results, path, tier, seconds, decided)
        outcome = Outcome.TIMEOUT if bad.reason == "timeout" else Outcome.FAILED
        detail = "; ".join(filter(None, [bad.detail, decided]))
        return Verdict(outcome, bad.reason, results, path, tier, seconds, detail)

    def error(self, reason: str, detail: str, tier: str, start: float) -> Verdict:
        results = tuple(self.all_failed(reason, detail))
        return Verdict(Outcome.ERROR, reason, results, "", tier, time.perf_counter() - start, detail)
