"""The trusted side of a verification: holds the tests, calls the answer over the channel, compares what came back.

    judge({"tests": ["assert f(1) == 2"], "seconds": 3.0}, channel)

Standard library only. The result is `{"path", "tests": [[passed, reason, detail], ...], "invalid", "detail"}`; reason
`lost` means that no value came, and why is for whoever watched the process. With no channel the tests' own part runs up
to the first call: what is wrong or hangs then is the test's doing. A frame from the answer can cost a test, never an
`invalid`. `python -m pytest tests/test_sandbox_checker.py` exercises it.
"""

from __future__ import annotations

import datetime  # noqa: F401 - for the codec, which must not import while it judges
import decimal  # noqa: F401
import fractions  # noqa: F401
import gc
import reprlib
import resource
import sys
import warnings
from typing import Any

from rlvr.sandbox.codec import MODULES, Encoder
from rlvr.sandbox.line import NO_FRAME, Ended, Line
from rlvr.sandbox.plan import LIGHT_MODULES, SAFE_BUILTINS, SUPPLIED, Plan, Split, Statements, plan
from rlvr.sandbox.remote import OF_ANSWER, TEST, BadTest, Link, Names, Remote

OUTPUT = 1 << 20
NOTHING = "the tests ask nothing of the answer"
TIDY, TIDY_BYTES = 500, 4 << 20  # verifications, and bytes from answers, until garbage is collected
ROOM = 32 << 20  # bytes that judging may need at its peak, beside what the process began with
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 80
SHORT.maxlist = SHORT.maxtuple = SHORT.maxset = SHORT.maxdict = 20
Row = list[Any]


def warm() -> None:
    warnings.simplefilter("ignore")
    job = {"tests": ["assert f([1, 2]) == {'a': (1.5, 'b')}, 'no'"]}
    test = made(job).tests[0]
    assert isinstance(test, Split)
    compare(test, [Encoder().encode({"a": (1.5, "b")})], Link(Line(None, 1.0, OUTPUT), {}))
    judge(job, None)
    global _base
    _base = peak()


def kind(job: dict[str, Any]) -> str:
    if job.get("path") == "weak":
        return "weak"
    return "stdio" if any(isinstance(test, dict) for test in job["tests"]) else "asserts"


def made(job: dict[str, Any]) -> Plan:
    tests = (job["tests"],) if isinstance(job["tests"], str) else tuple(job["tests"])
    return plan(tests, tuple(job.get("imports") or ()), job.get("setup") or "", job.get("entry_point"))


def needs_fork(job: dict[str, Any]) -> bool:
    """Whether the tests run statements that had better have a process of their own."""
    if kind(job) != "asserts":
        return False
    try:
        return made(job).fork
    except BadTest:
        return False


def judge(job: dict[str, Any], channel: int | None) -> dict[str, Any]:
    line = Line(channel, job.get("seconds", 3.0), job.get("output", OUTPUT))
    way = kind(job)
    if way == "stdio":
        return {"path": way, "tests": [stdio(job, line)], "invalid": "", "detail": ""}
    run = Run(job, line)
    forked = True
    try:
        made_plan = None if way == "weak" else made(job)
        forked = made_plan is not None and made_plan.fork
        if made_plan is None:
            return run.result("weak", run.weak())
        ended = run.split(made_plan) if made_plan.split else run.rpc(made_plan)
        result = run.result("split" if made_plan.split else "rpc", ended)
        return result if forked or not worn() else {**result, "worn": True}
    except BadTest as error:
        return {"path": "", "tests": [], "invalid": "bad_test", "detail": clean(str(error))}
    finally:
        run.forget()
        if not forked:
            tidy(line.came)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def worn() -> bool:
    """Whether this process has once held so much that it had better be replaced."""
    bound = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _base > 0 and peak() > max(bound // 2, _base + ROOM)


def tidy(came: int) -> None:
    """A process that lives on without a collector collects now and then; what is alive stays out of later rounds."""
    global _judged, _came
    _judged, _came = _judged + 1, _came + came
    if (_judged >= TIDY or _came >= TIDY_BYTES) and not gc.isenabled():
        _judged = _came = 0
        gc.collect()
        gc.freeze()


_judged = _came = _base = 0


def clean(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:200])


def said(error: BaseException) -> str:
    return clean(f"{getattr(error, OF_ANSWER, None) or type(error).__name__}: {error}")


class Run:
    """One verification: the rows so far, in the order of the tests."""

    def __init__(self, job: dict[str, Any], line: Line) -> None:
        self.job, self.line = job, line
        tests = job["tests"]
        self.texts: list[str] = [tests] if isinstance(tests, str) else list(tests)
        self.rows: list[Row] = []
        self.link: Link | None = None
        self.names: dict[str, Any] = {}

    def forget(self) -> None:
        """Break the cycles: stand-ins know their link, and functions of a test the names that they live among."""
        self.names.clear()
        self.line.buffer.clear()
        if self.link is not None:
            self.link.forget()

    def result(self, path: str, ended: Ended | None) -> dict[str, Any]:
        """Tests that were not reached share the end of the channel."""
        if ended and ended.reason == "reached":
            self.rows, ended = [], None
        rest = [[False, ended.reason, clean(ended.detail)] for _ in self.texts[len(self.rows) :]] if ended else []
        return {"path": path, "tests": self.rows + rest, "invalid": "", "detail": ""}

    def begin(self) -> Ended | None:
        """The first frame: did the answer load?"""
        if self.line.channel is None:
            return self.line.end("reached")
        first = self.line.read()
        if first[0] == "ready":
            return None
        parts = [str(part) for part in first[1:3]]
        known = parts and parts[0] in ("syntax_error", "exception", "exited", "memory", "wrong_name")
        return Ended(parts[0], parts[-1]) if known else Ended("opaque", NO_FRAME)

    def weak(self) -> Ended | None:
        try:
            if ended := self.begin():
                return ended
            for text in self.texts:
                self.line.write(["weak", text, self.job.get("entry_point")])
                row = self.line.read()
                ok = row[0] is True and len(row) == 3
                self.rows.append([ok, "" if ok else str(row[1:2] and row[1])[:20], clean(str(row[-1]))])
        except Ended as ended:
            return ended
        return None

    def split(self, made_plan: Plan) -> Ended | None:
        tests = [test for test in made_plan.tests if isinstance(test, Split)]
        for test in tests:
            static(test)
        if not any(test.calls for test in tests):
            raise BadTest(NOTHING)
        if self.line.channel is None:
            return self.line.end("reached")
        replies: list[list[Any]] = []
        ended = None
        try:
            self.line.write(["batch", [call for test in tests for call in test.calls]])
            if ended := self.begin():
                return ended
            for test in tests:
                replies.append([self.line.read() for _ in test.calls])
        except Ended as error:
            ended = error
        link = self.link = Link(self.line, {})
        for test, values in zip(tests, replies, strict=False):
            self.rows.append(compare(test, values, link))
        return ended

    def rpc(self, made_plan: Plan) -> Ended | None:
        """Here test text executes, in a fork of the checker unless all of it is light."""
        caught = {name: type(name, (Exception,), {}) for name in made_plan.caught}
        link = Link(self.line, caught, MODULES if made_plan.fork else LIGHT_MODULES)
        names: dict[str, Any] = {"__builtins__": Names(link), "__name__": TEST, **SUPPLIED, **caught}
        names.update({name: Remote(link, ["n", name], name) for name in made_plan.called})
        self.link, self.names = link, names
        try:
            for text in self.job.get("imports") or ():
                exec(compile(text, "<imports>", "exec", dont_inherit=True), names)
            if made_plan.setup and not made_plan.needs:
                exec(made_plan.setup, names)
        except MemoryError:
            raise
        except BaseException as error:
            raise BadTest(f"imports or setup raise: {said(error)}") from None
        if self.line.channel is not None:
            try:
                if ended := self.begin():
                    return ended
            except Ended as ended:
                return ended
        prepared = asked = False
        if made_plan.setup and made_plan.needs:
            row = self.run_test(Statements(made_plan.setup, False, False, True), names, link)
            if isinstance(row, Ended):
                return row
            if not row[0]:
                return Ended(row[1], row[2])
            prepared = True
        for test in made_plan.tests:
            self.line.asked = isinstance(test, Statements) and test.follows and (prepared or asked)
            row = self.run_test(test, names, link)
            if isinstance(row, Ended):
                return row
            asked = asked or self.line.asked
            self.rows.append(row)
        if not asked:
            raise BadTest(NOTHING)
        return None

    def run_test(self, test: Split | Statements, names: dict[str, Any], link: Link) -> Row | Ended:
        link.failed = None
        try:
            if isinstance(test, Split):
                static(test)
                if test.calls:
                    self.line.write(["batch", test.calls])
                return compare(test, [self.line.read() for _ in test.calls], link)
            exec(test.code, names)
            entry = self.job.get("entry_point")
            if entry and test.check and callable(names.get("check")):
                names["check"](Remote(link, ["n", entry], entry))
            row = [True, "", ""]
        except Ended:
            row = []
        except (BadTest, MemoryError):  # the memory of a process that lives on: what it held before counts, too
            raise
        except BaseException as error:
            of_answer = getattr(error, OF_ANSWER, None)
            if not self.line.asked:
                raise BadTest(f"the test raises before it asks for anything: {said(error)}") from None
            reason = "assertion" if isinstance(error, AssertionError) and not of_answer else "exception"
            row = [False, reason, said(error) if reason == "exception" else clean(str(error))]
        if self.line.ended:
            return self.line.ended
        failed = link.failed
        return [False, failed.reason, clean(failed.detail)] if failed else row


def static(test: Split) -> None:
    """An assert that calls nothing must hold by itself."""
    if test.calls:
        return
    try:
        held = bool(eval(test.code, {"__builtins__": SAFE_BUILTINS, **test.modules}))
    except MemoryError:
        raise
    except Exception as error:
        raise BadTest(f"the test raises: {said(error)}") from None
    if not held:
        raise BadTest("the test is false and calls nothing")


def compare(test: Split, replies: list[Any], link: Link) -> Row:
    """Put the values in the places of their calls and evaluate what is left of the assert."""
    values: dict[str, Any] = {"__builtins__": SAFE_BUILTINS, **test.modules}
    link.failed = None
    calls = len(replies) - len(test.asked)
    try:
        for number, reply in enumerate(replies[:calls]):
            values[f"_{number}"] = link.value(reply)
        for name, reply in zip(test.asked, replies[calls:], strict=True):
            values[name] = link.module(reply, {name})
            if values[name] is not sys.modules[name]:
                raise link.fail("wrong_name", f"{name} is not the module of that name")
        if eval(test.code, values):
            return [True, "", ""]
    except Ended as ended:
        return [False, ended.reason, clean(ended.detail)]
    except MemoryError:
        raise
    except Exception as error:
        return [False, "exception", said(error)]
    try:
        message = str(eval(test.message, values)) if test.message else ""
        message = message or "returned " + ", ".join(SHORT.repr(values[f"_{number}"])[:80] for number in range(calls))
    except MemoryError:
        raise
    except (Exception, Ended):
        message = ""
    return [False, "assertion", clean(message)]


def stdio(job: dict[str, Any], line: Line) -> Row:
    """What the program printed against what the test expects, line by line, white space at their ends aside."""
    test = job["tests"][job.get("index", 0)]
    if line.channel is None:
        return [False, "lost", ""]
    chunks: list[bytes] = []
    try:
        while data := line.some():
            chunks.append(data)
    except Ended as ended:
        return [False, ended.reason, clean(ended.detail)]
    printed = b"".join(chunks).decode("utf-8", "replace")
    if same_output(printed, test["output"], test.get("tolerance")):
        return [True, "", ""]
    return [False, "wrong_output", clean(f"printed {printed[:80]!r}")]


def same_output(printed: str, expected: str, tolerance: float | None) -> bool:
    ours, theirs = ([part.rstrip() for part in text.rstrip().split("\n")] for text in (printed, expected))
    if len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(one == other or (tolerance is not None and near(one, other, tolerance)) for one, other in pairs)


def near(one: str, other: str, tolerance: float) -> bool:
    left, right = one.split(), other.split()
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        try:
            if a != b and not abs(float(a) - float(b)) <= tolerance:
                return False
        except ValueError:
            return False
    return True
