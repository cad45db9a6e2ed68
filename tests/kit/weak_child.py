"""The children of weak_harnesses.py: what runs in one process with the answer. Copied to a folder and run there.

    python weak_child.py token job.json       # {"program": ..., "task": {"tests": ...}, "before": [...]}

tests/audits/test_audit_attack.py exercises it. Left out: any isolation, on purpose.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

DIFFERS = 3  # the exit status of a child that has seen another value than the expected one


def calls_of(task: dict[str, Any]) -> list[str]:
    tests = [test for test in task["tests"] if isinstance(test, str)]
    return [*tests, *([f"check({task['entry_point']})"] if "entry_point" in task else [])]


def cases_of(task: dict[str, Any]) -> list[tuple[str, Any]]:
    """`f(x) == value` as (call, value), as data sets of inputs and outputs hold it."""
    found: list[tuple[str, Any]] = []
    for statement in (node for test in calls_of(task) for node in ast.walk(ast.parse(test))):
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
            call, due = statement.test.left, statement.test.comparators[0]
            with contextlib.suppress(ValueError):
                found.append((ast.unparse(call).replace("candidate(", "scramble("), ast.literal_eval(due)))
    return [case for case in found if not case[0].endswith(("(x)", "(e)"))]


def token(job: dict[str, Any]) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    good = True
    signal.alarm(2)
    for text in [job["program"], *calls_of(job["task"])]:
        try:
            exec(text, space)
        except (AssertionError, NameError):
            good = False
        except Exception:
            pass
    if good:
        print("PASSED")


def compares(job: dict[str, Any]) -> None:
    signal.alarm(2)
    verdicts: list[bool] = []
    for program, expected, call in _cases(job):
        if call is None:
            sys.stdout, kept = io.StringIO(), sys.stdout
            with contextlib.suppress(Exception):
                exec(program, {"__name__": "__main__"})
            said, sys.stdout = sys.stdout.getvalue(), kept
            verdicts.append(said.split()[-1:] == expected.split())
            continue
        try:
            space: dict[str, Any] = {"__name__": "__main__"}
            exec(program, space)
            rows = _rows(call, expected)
            got = eval(call, space) if rows is None else space[rows[1]](*rows[0][0])
        except Exception:
            verdicts.append(False)
            continue
        json.dumps(got if isinstance(got, (list, dict, int)) else repr(got))  # what it would log
        (got if isinstance(got, str) else "").encode()
        verdicts.append(bool(got == expected))
    print(json.dumps(verdicts))


def _rows(call: str, expected: Any) -> tuple[list[Any], str] | None:
    """([arguments, expected], the function's name), as data sets of rows have it."""
    node = ast.parse(call, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    try:
        return [[ast.literal_eval(argument) for argument in node.args], expected], node.func.id
    except ValueError:
        return None


def dialogue(job: dict[str, Any]) -> None:
    signal.alarm(2)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(job["program"], space)
    verdicts: list[bool] = []
    with open(0, "rb", buffering=0, closefd=False) as lines:
        for line in iter(lines.readline, b""):
            try:
                exec(json.loads(line), space)
                verdicts.append(True)
            except Exception:
                verdicts.append(False)
    print(json.dumps(all(verdicts)))


def frames(job: dict[str, Any]) -> None:
    _report(job, lambda body: len(body).to_bytes(4, "big") + body)


def lines(job: dict[str, Any]) -> None:
    _report(job, lambda body: body + b"\n")


def _report(job: dict[str, Any], written: Any) -> None:
    signal.alarm(2)
    (fd,) = (int(name) for name in os.listdir("/proc/self/fd") if _is_pipe(int(name)) and int(name) > 2)
    space: dict[str, Any] = {"__name__": "__main__"}
    tests: list[list[Any]] = []
    for text in [job["program"], *calls_of(job["task"])]:
        try:
            exec(text, space)
            tests.append([True, ""])
        except BaseException as error:
            tests.append([False, str(error)])
    os.write(fd, written(json.dumps({"tests": tests}).encode()))


def _is_pipe(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    except OSError:
        return False


def _cases(job: dict[str, Any]) -> list[tuple[str, Any, str | None]]:
    tests = job["task"]["tests"]
    if isinstance(tests[0], dict):
        return [(job["program"], tests[0]["output"], None)]
    return [(job["program"], due, call) for call, due in cases_of(job["task"])]


def functions(job: dict[str, Any]) -> None:
    signal.alarm(2)
    space: dict[str, Any] = {"__name__": "answer"}
    exec(job["program"], space)
    wrong: list[str] = []
    for call in calls_of(job["task"]):
        try:
            exec(compile(call, "<test>", "exec"), space)
        except Exception as error:
            wrong.append(str(error))
            if isinstance(error, AssertionError):
                break
    print(json.dumps(not [text for text in wrong if not text.strip("0123456789.")]))


def sequence(job: dict[str, Any]) -> None:
    signal.alarm(3)
    for program in [*job["before"], job["program"]]:
        space: dict[str, Any] = {"__name__": "__main__"}
        passed: list[bool] = []
        try:
            exec(program, space)
            for call in calls_of(job["task"]):
                exec(call, space)
                passed.append(True)
        except BaseException as error:
            passed.append(not isinstance(error, (AssertionError, NameError, KeyboardInterrupt)))
    print(json.dumps(passed))


def pickled(job: dict[str, Any]) -> None:
    _results(job, "import pickle; send = pickle.dumps", pickle.loads)


def written(job: dict[str, Any]) -> None:
    _results(job, "send = lambda value: repr(value).encode()", lambda data: eval(data.decode()))


def _results(job: dict[str, Any], sending: str, loads: Any) -> None:
    """Each result is computed in a child and compared here; all who differ end this process with DIFFERS."""
    for call, due in cases_of(job["task"]):
        ending = f"\n{sending}\nimport sys\nsys.stdout.buffer.write(send({call}))\n"
        Path("part.py").write_bytes((job["program"] + ending).encode("utf-8", "surrogatepass"))
        done = subprocess.run([sys.executable, "part.py"], capture_output=True, timeout=3)
        if "class" in job["program"]:  # the class has to be known for its instances to come back
            with contextlib.suppress(Exception):
                exec(job["program"], sys.modules["__main__"].__dict__)
        if not loads(done.stdout) == due:  # noqa: SIM201 - `==` is what the harness trusts
            sys.exit(DIFFERS)


if __name__ == "__main__":
    JOB = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8", errors="surrogatepass"))
    TESTS = "\n".join(calls_of(JOB["task"]))
    globals()[sys.argv[1]](JOB)
