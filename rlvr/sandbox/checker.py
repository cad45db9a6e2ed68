"""The trusted side of a verification: holds the tests, calls the answer over the channel, compares what came back.

    judge({"tests": ["assert f(1) == 2"], "seconds": 3.0}, descriptor)

The result is `{"path", "tests": [[passed, reason, detail], ...], "invalid", "detail"}`. Reason `lost` means that no
value came; the supervisor knows why from the solver. Without a descriptor the tests run up to their first call: what
is wrong or hangs then is the test's fault, and with `own_part` only what of them does not depend on an answer
(`rlvr.sandbox.own_part`). A frame from the answer can cost a test, never cause an `invalid`. Standard
library only.
"""

from __future__ import annotations

import contextlib
import datetime  # noqa: F401 - for the codec, which must not import during a verification
import decimal  # noqa: F401
import fractions  # noqa: F401
import gc
import os
import re
import reprlib
import resource
import sys
import time
import warnings
from types import CodeType
from typing import Any

from rlvr.sandbox.channel import NO_FRAME, Channel, ExchangeEnd
from rlvr.sandbox.codec import MODULES, Encoder
from rlvr.sandbox.operations import Operations
from rlvr.sandbox.plan import LIGHT_MODULES, SAFE_BUILTINS, SUPPLIED, Plan, SplitTest, StatementTest, make_plan
from rlvr.sandbox.protocol import OUTPUT
from rlvr.sandbox.remote import NOT_SENT, OF_ANSWER, TEST, BadTest, Link, Names, NeedsObjects
from rlvr.sandbox.test_program import OPERATIONS

NO_CALL = "the tests never call the answer"
COLLECT_JOBS, COLLECT_BYTES = 500, 4 << 20  # verifications, and bytes from answers, until garbage is collected
DIGITS = 1_000  # of integers that are compared exactly; Python reads no longer ones than 4,300
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
ROOM = 32 << 20  # bytes that judging may need at its peak, above what the process started with
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 80
SHORT.maxlist = SHORT.maxtuple = SHORT.maxset = SHORT.maxdict = 20
Row = list[Any]


def warm() -> None:
    warnings.simplefilter("ignore")
    job = {"tests": ["assert f([1, 2]) == {'a': (1.5, 'b')}, 'no'"]}
    test = plan_job(job).tests[0]
    assert isinstance(test, SplitTest)
    compare(test, [Encoder().encode({"a": (1.5, "b")})], Link(Channel(None, 1.0, OUTPUT), plain=True))
    judge(job, None)
    global _base
    _base = peak_memory()


def test_kind(job: dict[str, Any]) -> str:
    if job.get("path") == "weak":
        return "weak"
    return "stdio" if any(isinstance(test, dict) for test in job["tests"]) else "asserts"


def plan_job(job: dict[str, Any]) -> Plan:
    tests = (job["tests"],) if isinstance(job["tests"], str) else tuple(job["tests"])
    names, accepts = tuple(job.get("answer_names") or ()), bool(job.get("self_reports"))
    imports = tuple(job.get("imports") or ())
    return make_plan(tests, imports, job.get("setup") or "", job.get("entry_point"), names, accepts)


def needs_fork(job: dict[str, Any]) -> bool:
    """Whether the tests run statements that must not run in a process that judges others."""
    if test_kind(job) != "asserts":
        return False
    try:
        return job.get("objects", False) or plan_job(job).needs_fork
    except BadTest:
        return False


def judge(job: dict[str, Any], descriptor: int | None) -> dict[str, Any]:
    start = time.monotonic()
    channel = Channel(descriptor, job.get("seconds", 3.0), job.get("output", OUTPUT))
    kind = test_kind(job)
    if kind == "stdio":
        return {"path": kind, "tests": [check_output(job, channel)], "invalid": "", "detail": ""}
    run = CheckerRun(job, channel)
    forked = True
    try:
        plan = None if kind == "weak" else plan_job(job)
        forked = plan is not None and (plan.needs_fork or job.get("objects", False))
        if plan is None:
            return run.result("weak", run.run_weak())
        if job.get("own_part"):
            run.run_own_part(plan.make_own_part())
            return run.result("", None)
        split = plan.is_split and not job.get("objects")
        ended = run.run_split(plan) if split else run.run_rpc(plan)
        used = time.monotonic() - start - (channel.seconds - channel.seconds_left)
        if used > channel.seconds:
            return {"failed": "timeout"}
        result = run.result("split" if split else "rpc", ended) | {"self_report": plan.self_report}
        if not all(row[0] for row in result["tests"]) and plan.make_own_part():
            result["own_part"] = True
        return result if forked or not needs_restart() else {**result, "needs_restart": True}
    except NeedsObjects:
        return {"path": "split", "tests": [], "needs_objects": True}
    except BadTest as error:
        return {"path": "", "tests": [], "invalid": "bad_test", "detail": clean(str(error))}
    finally:
        run.clear()
        if not forked:
            collect_garbage(channel.received)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def needs_restart() -> bool:
    """Whether this process has once used so much memory that it should be replaced."""
    bound = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _base > 0 and peak_memory() > max(bound // 2, _base + ROOM)


def collect_garbage(received: int) -> None:
    """Collect now and then, since the collector is off here; what is alive then is left out of later collections."""
    global _judged, _received
    _judged, _received = _judged + 1, _received + received
    if (_judged >= COLLECT_JOBS or _received >= COLLECT_BYTES) and not gc.isenabled():
        _judged = _received = 0
        gc.collect()
        gc.freeze()


_judged = _received = _base = 0


def clean(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:200])


def describe_error(error: BaseException) -> str:
    return clean(f"{getattr(error, OF_ANSWER, None) or type(error).__name__}: {error}")


class CheckerRun:
    """One verification, with the results so far in the order of the tests."""

    def __init__(self, job: dict[str, Any], channel: Channel) -> None:
        self.job, self.channel = job, channel
        tests = job["tests"]
        self.texts: list[str] = [tests] if isinstance(tests, str) else list(tests)
        self.rows: list[Row] = []
        self.link: Link | None = None
        self.names: dict[str, Any] = {}

    def clear(self) -> None:
        """Break the reference cycles: stand-ins refer to their link, and functions of a test to their globals."""
        self.names.clear()
        self.channel.buffer.clear()
        if self.link is not None:
            self.link.clear()

    def result(self, path: str, ended: ExchangeEnd | None) -> dict[str, Any]:
        """The report. Tests that were not reached get the reason why the exchange ended."""
        if ended and ended.reason == "reached":
            self.rows, ended = [], None
        rest = [[False, ended.reason, clean(ended.detail)] for _ in self.texts[len(self.rows) :]] if ended else []
        return {"path": path, "tests": self.rows + rest, "invalid": "", "detail": ""}

    def begin(self) -> ExchangeEnd | None:
        """Read the first frame, which says whether the answer loaded."""
        if self.channel.descriptor is None:
            return self.channel.end("reached")
        first = self.channel.read()
        if first[0] == "ready":
            return None
        parts = [str(part) for part in first[1:3]]
        is_valid = parts and parts[0] in ("syntax_error", "exception", "exited", "memory", "wrong_name")
        return ExchangeEnd(parts[0], parts[-1]) if is_valid else ExchangeEnd("opaque", NO_FRAME)

    def run_weak(self) -> ExchangeEnd | None:
        try:
            if ended := self.begin():
                return ended
            for text in self.texts:
                self.channel.write(["weak", text, self.job.get("entry_point")])
                row = self.channel.read()
                ok = row[0] is True and len(row) == 3
                self.rows.append([ok, "" if ok else str(row[1:2] and row[1])[:20], clean(str(row[-1]))])
        except ExchangeEnd as ended:
            return ended
        return None

    def run_split(self, plan: Plan) -> ExchangeEnd | None:
        tests = [test for test in plan.tests if isinstance(test, SplitTest)]
        for test in tests:
            check_constant(test)
        if not any(test.calls for test in tests):
            raise BadTest(NO_CALL)
        if self.channel.descriptor is None:
            return self.channel.end("reached")
        link = self.link = Link(self.channel, plain=True)
        try:
            self.channel.write(["batch", tests[0].calls])  # with the answer still loading: one wait less
            if ended := self.begin():
                return ended
            for place, test in enumerate(tests):
                if place:  # one test's values at a time
                    self.channel.write(["batch", test.calls])
                self.rows.append(compare(test, [self.channel.read() for _ in test.calls], link))
                self.channel.require_silence()
        except ExchangeEnd as ended:
            return ended
        return None

    def run_rpc(self, plan: Plan) -> ExchangeEnd | None:
        """Run the tests' own statements, in a fork of the checker unless all of them are light."""
        forked = plan.needs_fork or self.job.get("objects", False)
        if plan.makes_files and not has_folder():
            raise BadTest("the tests make files, and this tier has no folder for them; use the tier namespaces")
        link = Link(self.channel, MODULES if forked else LIGHT_MODULES)
        operations = Operations(link, plan.uses_objects, plan.captures_output, not plan.reads_attributes)
        names: dict[str, Any] = {"__builtins__": Names(link), "__name__": TEST, **SUPPLIED, OPERATIONS: operations}
        self.link, self.names = link, names
        try:
            for text in self.job.get("imports") or ():
                exec(compile(text, "<imports>", "exec", dont_inherit=True), names)
            if plan.setup and not plan.setup_asks:
                exec(plan.setup, names)
        except MemoryError:
            raise
        except BaseException as error:
            raise BadTest(f"imports or setup raise: {describe_error(error)}") from None
        if self.channel.descriptor is not None:
            try:
                if ended := self.begin():
                    return ended
            except ExchangeEnd as ended:
                return ended
        setup_ran = has_asked = False
        if plan.setup and plan.setup_asks:
            row = self.run_test(StatementTest(plan.setup, False, False, True), names, link)
            if isinstance(row, ExchangeEnd):
                return row
            if not row[0]:
                return ExchangeEnd(row[1], row[2])
            setup_ran = True
        for test in plan.make_statements() if self.job.get("objects") else plan.tests:
            self.channel.has_sent = isinstance(test, StatementTest) and test.follows and (setup_ran or has_asked)
            row = self.run_test(test, names, link)
            if isinstance(row, ExchangeEnd):
                return row
            has_asked = has_asked or self.channel.has_sent
            self.rows.append(row)
        if not has_asked:
            raise BadTest(next((detail for *_, detail in self.rows if detail.startswith(NOT_SENT)), NO_CALL))
        return None

    def run_own_part(self, parts: list[CodeType]) -> None:
        """Run what of the tests does not depend on an answer, for its time alone."""
        names = self.names = {"__name__": TEST, **SUPPLIED}
        imports = [compile(text, "<imports>", "exec", dont_inherit=True) for text in self.job.get("imports") or ()]
        for code in [*imports, *parts]:
            with contextlib.suppress(BaseException):
                exec(code, names)
        if callable(check := names.get("check")) and self.job.get("entry_point"):
            with contextlib.suppress(BaseException):
                check(None)

    def run_test(self, test: SplitTest | StatementTest, names: dict[str, Any], link: Link) -> Row | ExchangeEnd:
        link.failed = None
        try:
            if isinstance(test, SplitTest):
                check_constant(test)
                if test.calls:
                    self.channel.write(["batch", test.calls])
                link.plain = True
                return compare(test, [self.channel.read() for _ in test.calls], link)
            link.plain = False
            exec(test.code, names)
            entry = self.job.get("entry_point")
            if entry and test.defines_check and callable(names.get("check")):
                names["check"](link.refer(entry))
            row = [True, "", ""]
        except ExchangeEnd:
            row = []
        except (BadTest, NeedsObjects):
            raise
        except MemoryError as error:  # earlier verifications of this process count too
            if getattr(error, OF_ANSWER, None) is None:
                raise
            row = [False, "memory", ""]
        except BaseException as error:
            of_answer = getattr(error, OF_ANSWER, None)
            if not self.channel.has_sent:
                why = describe_error(error)
                if isinstance(error, ModuleNotFoundError):
                    why += "; the sandbox has Python's standard library and nothing else"
                raise BadTest(f"the test raises before it calls the answer: {why}") from None
            reason = "assertion" if isinstance(error, AssertionError) and not of_answer else "exception"
            if of_answer and not isinstance(error, Exception):
                reason = "exited"
            row = [False, reason, describe_error(error) if reason != "assertion" else clean(str(error))]
        if self.channel.ended:
            return self.channel.ended
        failed = link.failed
        return [False, failed.reason, clean(failed.detail)] if failed else row


def has_folder() -> bool:
    """Whether files can be made here, and so in the answer's process, which is isolated in the same way."""
    path = f"/tmp/folder-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.unlink(path)
    except OSError:
        return False
    return True


def check_constant(test: SplitTest) -> None:
    """Raise `BadTest` if an assert without calls does not hold."""
    if test.calls:
        return
    try:
        holds = bool(eval(test.code, {"__builtins__": SAFE_BUILTINS, **test.modules}))
    except MemoryError:
        raise
    except Exception as error:
        raise BadTest(f"the test raises: {describe_error(error)}") from None
    if not holds:
        raise BadTest("the test is false and calls nothing")


def compare(test: SplitTest, replies: list[Any], link: Link) -> Row:
    """Put the values in the places of their calls and evaluate the rest of the assert."""
    values: dict[str, Any] = {"__builtins__": SAFE_BUILTINS, **test.modules}
    link.failed = None
    calls = len(replies) - len(test.module_names)
    try:
        for number, reply in enumerate(replies[:calls]):
            if reply[0] == "v" and len(reply) > 2 and test.looks_at_type:
                raise NeedsObjects
            values[f"_{number}"] = link.value(reply)
        for name, reply in zip(test.module_names, replies[calls:], strict=True):
            values[name] = link.module(reply, {name})
            if values[name] is not sys.modules[name]:
                raise link.fail("wrong_name", f"{name} is not the module of that name")
        if eval(test.code, values):
            return [True, "", ""]
    except ExchangeEnd as ended:
        return [False, ended.reason, clean(ended.detail)]
    except (NeedsObjects, MemoryError):
        raise
    except Exception as error:
        return [False, "exception", describe_error(error)]
    try:
        message = str(eval(test.message, values)) if test.message else ""
        message = message or "returned " + ", ".join(SHORT.repr(values[f"_{number}"])[:80] for number in range(calls))
    except MemoryError:
        raise
    except (Exception, ExchangeEnd):
        message = ""
    return [False, "assertion", clean(message)]


def check_output(job: dict[str, Any], channel: Channel) -> Row:
    """Compare what the program printed with what the test expects, line by line, without trailing white space.

    A test that expects None passes, and its detail is what was printed.
    """
    test = job["tests"][job.get("index", 0)]
    if channel.descriptor is None:
        return [False, "lost", ""]
    chunks: list[bytes] = []
    try:
        while data := channel.read_some():
            chunks.append(data)
    except ExchangeEnd as ended:
        return [False, ended.reason, clean(ended.detail)]
    printed = b"".join(chunks).decode("utf-8", "replace")
    if test["output"] is None:
        return [True, "", printed]
    if is_same_output(printed, test["output"], test.get("tolerance")):
        return [True, "", ""]
    return [False, "wrong_output", clean(f"printed {printed[:80]!r}")]


def is_same_output(printed: str, expected: str, tolerance: float | None) -> bool:
    ours, theirs = ([part.rstrip() for part in text.rstrip().split("\n")] for text in (printed, expected))
    if len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(one == other or (tolerance is not None and is_near(one, other, tolerance)) for one, other in pairs)


def is_near(one: str, other: str, tolerance: float) -> bool:
    left, right = one.split(), other.split()
    if len(left) != len(right):
        return False
    return all(a == b or is_near_number(a, b, tolerance) for a, b in zip(left, right, strict=True))


def is_near_number(one: str, other: str, tolerance: float) -> bool:
    """Whether two words are numbers that differ by at most `tolerance`.

    Integers are compared exactly: floats of two that are above 2**53 and differ may be equal. A word with an underscore
    or with digits that are not ASCII is text, though Python would read it as a number.
    """
    if not (NUMBER.fullmatch(one) and NUMBER.fullmatch(other)):
        return False
    if INTEGER.fullmatch(one) and INTEGER.fullmatch(other) and max(len(one), len(other)) <= DIGITS:
        return abs(int(one) - int(other)) <= tolerance
    return abs(float(one) - float(other)) <= tolerance
