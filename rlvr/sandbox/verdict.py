"""The sandbox's verdict on an answer: `Verdict`, one `TestResult` per test, and the `Limits` it ran under."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.core.types import Outcome
from rlvr.sandbox.protocol import OUTPUT

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one verification may use, in seconds and bytes. `timeout_s` is wall time of the whole verification.

    `cpu_s` None allows a second or two more than the call's wall time. `source` and `output` bound the answer's text
    and everything that comes back from it; `scratch` (bytes) and `files` (number) bound its temporary folder.
    """

    timeout_s: float = 5.0
    cpu_s: float | None = None
    memory: int = 512 * MIB
    source: int = MIB
    output: int = OUTPUT
    scratch: int = 16 * MIB
    files: int = 64
    threads: int = 64


@dataclass(frozen=True)
class TestResult:
    """One test. `reason` is empty if it passed, else a code to group by; `detail` is for a person."""

    passed: bool
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """`outcome` and `reason` are those of the first test that did not pass (`passed` and "" if all did).

    `detail` is that test's; it also says so if what the answer says of itself decided (`self_reports`).

    `path` tells how the tests were run (`split`, `rpc`, `stdio` or `weak`; empty if nothing ran), `tier` what isolated
    the answer (`namespaces`, `landlock` or `unsafe`).
    """

    outcome: Outcome
    reason: str
    tests: tuple[TestResult, ...]
    path: str
    tier: str
    seconds: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome is Outcome.PASSED

    @property
    def num_passed(self) -> int:
        return sum(test.passed for test in self.tests)
