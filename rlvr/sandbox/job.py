"""One verification: its arguments checked, what each process gets to know of it, and how rows become a `Verdict`.

`python -m pytest tests/test_sandbox_pool.py` exercises it.
"""

from __future__ import annotations

import marshal
import math
import re
import time
from collections.abc import Sequence
from typing import Any

from rlvr.sandbox.setup_parts import for_answer
from rlvr.sandbox.verdict import Limits, TestResult, Verdict
from rlvr.types import Outcome

PATHS = ("auto", "weak")
SURROGATE = re.compile("[\ud800-\udfff]")
Rows = list[list[Any]]  # per test [passed, reason, detail]


class Job:
    """One verification's arguments, checked. Raises ValueError for what no answer can be blamed for."""

    def __init__(
        self,
        limits: Limits,
        solution: Any,
        tests: Any,
        timeout_s: float | None,
        setup: str,
        imports: Sequence[str],
        entry_point: str | None,
        path: str,
    ) -> None:
        self.tests: list[Any] = [tests] if isinstance(tests, (str, dict)) else list(tests)
        self.stdio = bool(self.tests) and all(isinstance(test, dict) for test in self.tests)
        if not self.tests or not (self.stdio or all(isinstance(test, str) for test in self.tests)):
            raise ValueError(
                f"tests={tests!r:.200}: give a list of assert statements, a text that defines check(candidate), or a "
                'list of {"input": ..., "output": ...}; the last kind does not mix with the others'
            )
        for test in self.tests if self.stdio else ():
            if not isinstance(test.get("input"), str) or not isinstance(test.get("output"), str):
                raise ValueError(f'the test {test!r:.200} needs a text under "input" and one under "output"')
            tolerance = test.get("tolerance")
            if tolerance is not None and (type(tolerance) not in (int, float) or not 0 <= tolerance < math.inf):
                raise ValueError(f"tolerance={tolerance!r:.80}: a finite number, at least 0, or none, is expected")
            if SURROGATE.search(test["input"] + test["output"]):
                raise ValueError(f"the test {test!r:.200} holds half of a surrogate pair, which no program reads")
        if isinstance(imports, str) or not all(isinstance(line, str) for line in imports) or not isinstance(setup, str):
            raise ValueError(f"imports={imports!r:.200}, setup={setup!r:.200}: a list of texts and a text are expected")
        if path not in PATHS:
            raise ValueError(f"path={path!r}: one of {', '.join(PATHS)} is expected")
        self.seconds = limits.timeout_s if timeout_s is None else float(timeout_s)
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"timeout_s={timeout_s!r}: a number of seconds above 0 is expected")
        self.limits, self.solution, self.setup, self.imports = limits, solution, setup, list(imports)
        self.entry_point, self.path = entry_point, path

    def refusal(self) -> tuple[str, str] | None:
        """(reason, detail) of an answer that need not be run."""
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
            return "syntax_error", "the source holds half of a surrogate pair"
        if size > self.limits.source:
            return "too_large", f"{size} bytes of source, at most {self.limits.source} are taken"
        return ("syntax_error", "the source holds a null character") if "\0" in source else None

    def frames(self, indices: list[int]) -> tuple[bytes, bytes]:
        """(what the solver gets, what the checker gets). Only the second knows what is expected."""
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
        return marshal.dumps(answer), marshal.dumps({**common, "tests": tests})

    def verdict(self, rows: Rows, path: str, tier: str, start: float, blame: tuple[str, str] = ("", "")) -> Verdict:
        seconds = time.perf_counter() - start
        if blame[0]:
            results = tuple(TestResult(False, *blame) for _ in self.tests)
            return Verdict(Outcome.INVALID, blame[0], results, path, tier, seconds, blame[1])
        results = tuple(TestResult(bool(row[0]), row[1], row[2]) for row in rows)
        assert len(results) == len(self.tests), (len(results), len(self.tests))
        bad = next((result for result in results if not result.passed), None)
        if bad is None:
            return Verdict(Outcome.PASSED, "", results, path, tier, seconds)
        outcome = Outcome.TIMEOUT if bad.reason == "timeout" else Outcome.FAILED
        return Verdict(outcome, bad.reason, results, path, tier, seconds, bad.detail)

    def broken(self, reason: str, detail: str, tier: str, start: float) -> Verdict:
        results = tuple(TestResult(False, reason, detail) for _ in self.tests)
        return Verdict(Outcome.ERROR, reason, results, "", tier, time.perf_counter() - start, detail)
