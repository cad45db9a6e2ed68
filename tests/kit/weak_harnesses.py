"""Verifiers of code as careless people write them, for test_audit_attack.py to show that the hack suite is real.

    accepts("token", attack, folder)      # would this harness take the program for a solution?

Every one runs the program in a child (tests/kit/weak_child.py) that is killed with all it started, in a scratch folder
that is its home. `HARNESSES` says what each of them believes.
Left out: any isolation, on purpose.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.kit import weak_child
from tests.kit.weak_child import DIFFERS, calls_of

SECONDS = 3.0
HARNESSES = {
    "exit_status": "answer and tests in one file: exit status 0",
    "token": "tests executed one by one in the answer's process: a word on its standard output",
    "compares": "expected values given to the child, which compares and prints its verdicts as JSON",
    "functions": "the same with the helpers of the library (sorted, isclose, json) that the answer shares",
    "visible": "the test that the prompt shows, and no other: exit status 0",
    "dialogue": "tests come line by line on standard input, and all that were seen must hold",
    "frames": "the child reports by frames on a pipe: four bytes of length, then JSON",
    "lines": "the child reports by JSON lines on a pipe",
    "sequence": "one process for answers that come one after the other, assertions counted",
    "pickled": "results come back pickled and are compared with ==",
    "written": "results come back as text and are evaluated",
    "shell": "the file comes by a here-document of the shell",
    "unittest": "a unittest file: exit status 0",
    "pytest": "the answer is imported once to see that it loads, then pytest: nothing failed",
    "imported_first": "the answer is run once by itself, then with its tests in the same folder: exit status 0",
}


def accepts(name: str, program: str, task: dict[str, Any], before: tuple[str, ...] = ()) -> bool:
    """What this harness says of the program."""
    with tempfile.TemporaryDirectory(prefix="weak-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        stdio = isinstance(task["tests"][0], dict)
        calls = calls_of(task)
        source = "\n".join([program, *calls])
        _write(folder / "script.py", source)
        _write(folder / "answer.py", program)
        _write(folder / "harness.py", Path(weak_child.__file__).read_text())
        _write(folder / "job.json", json.dumps({"program": program, "task": task, "before": before}))
        given = b""
        if stdio:
            given = task["tests"][0]["input"].encode()
            _write(folder / "output.txt", task["tests"][0]["output"])
        if stdio and name in ("exit_status", "imported_first"):
            code, said = _run(["script.py"], folder, given)
            return code == 0 and (name == "imported_first" or task["tests"][0]["output"].split()[0] in said)
        if name == "imported_first":
            _run(["answer.py"], folder)
            return _run(["script.py"], folder)[0] == 0
        if name == "exit_status":
            return _run(["script.py"], folder)[0] == 0
        if name == "visible":
            _write(folder / "script.py", f"{program}\n{calls[0] if calls else ''}")
            return task_output(task) in (said := _run(["script.py"], folder, given))[1] and said[0] == 0
        if name == "shell":
            command = f"python() {{ {sys.executable} \"$@\"; }}\npython - <<'EOF'\n{source}\nEOF\n"
            return _run(["-c", command], folder, shell=True)[0] == 0
        if name == "unittest":
            body = "".join(f"    def test_{i}(self):\n{_indent(call)}\n" for i, call in enumerate(calls))
            _write(folder / "test_it.py", f"import unittest\nfrom answer import *\nclass T(unittest.TestCase):\n{body}")
            return _run(["-m", "unittest", "test_it"], folder)[0] == 0
        if name == "pytest":
            body = "".join(f"def test_{i}():\n{_indent(call)}\n" for i, call in enumerate(calls))
            _write(folder / "test_it.py", f"from answer import *\n{body}")
            _run(["answer.py"], folder)
            return _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"], folder)[0] in (0, 5)
        if name == "dialogue":
            given = "".join(json.dumps(call) + "\n" for call in calls).encode()
        if name in ("frames", "lines"):
            return bool(_read_pipe(name, folder))
        code, said = _run(["harness.py", name, "job.json"], folder, given)
        last = said.strip().splitlines()[-1:] or [""]
        if name in ("pickled", "written"):
            return code == 0
        if name == "token":
            return "PASSED" in said
        with contextlib.suppress(ValueError):
            found = json.loads(last[0])
            return bool(found) if not isinstance(found, list) else bool(found) and all(found)
        return False


def is_undecided(name: str, program: str, task: dict[str, Any]) -> bool:
    """Whether this harness (compares, pickled, written or frames) comes to no verdict: it hangs, dies or chokes."""
    with tempfile.TemporaryDirectory(prefix="weak-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        _write(folder / "harness.py", Path(weak_child.__file__).read_text())
        _write(folder / "job.json", json.dumps({"program": program, "task": task, "before": ()}))
        if name == "frames":
            return _read_pipe(name, folder) is None
        code, said = _run(["harness.py", name, "job.json"], folder)
        return code not in ((0, DIFFERS) if name in ("pickled", "written") else (0,)) or (
            name == "compares" and not said.strip().endswith("]")
        )


def _read_pipe(name: str, folder: Path) -> bool | None:
    """What the first report on the pipe says, None when there is none that can be read."""
    out = folder / "reports"
    _run(["harness.py", name, "job.json"], folder, report=out)
    data = out.read_bytes()
    try:
        size = int.from_bytes(data[:4], "big")
        body = data[4 : 4 + size] if name == "frames" else data.splitlines()[0]
        told = json.loads(body)
        return bool(told["passed"] if "passed" in told else told["tests"] and all(test[0] for test in told["tests"]))
    except (ValueError, LookupError, TypeError):
        return None


def task_output(task: dict[str, Any]) -> str:
    first = task["tests"][0]
    return first["output"].strip() if isinstance(first, dict) else ""


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    path.chmod(0o666)


def _indent(text: str) -> str:
    return "".join(f"        {line}\n" for line in text.splitlines())


def _run(
    words: list[str], folder: Path, given: bytes = b"", *, shell: bool = False, report: Path | None = None
) -> tuple[int | None, str]:
    """(exit status, None when it was late; standard output). Whatever it started is gone afterwards."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(folder)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # ours take a second to load and are none of a careless harness
    ends = list(os.pipe()) if report else []
    child = subprocess.Popen(
        ["/bin/sh" if shell else sys.executable, *words], cwd=folder, env=env, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        pass_fds=ends[1:], preexec_fn=_bounded if "pytest" in words else _soon_ended,
    )  # fmt: skip
    if ends:
        os.close(ends[1])
    try:
        said = child.communicate(given, timeout=SECONDS if "pytest" not in words else 30)[0]
        return child.returncode, said.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        return None, (late.output or b"").decode(errors="replace")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if report is not None:
            os.set_blocking(ends[0], False)
            with contextlib.suppress(BlockingIOError), open(ends[0], "rb", buffering=0) as pipe:
                report.write_bytes(b"".join(iter(lambda: pipe.read(1 << 16) or b"", b"")))


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _soon_ended() -> None:
    """No loop is waited for, and none takes the time of the others: a second of a core ends it as the deadline does."""
    _bounded()
    resource.setrlimit(resource.RLIMIT_CPU, (1, 2))


# What `rlvr audit` is given as a user's own verifier.


def trusting(prompt: str, response: str, meta: dict[str, Any]) -> float:
    """Accepts what defines the function."""
    return float("def scramble" in response)


def plain(prompt: str, response: str, meta: dict[str, Any]) -> Any:
    """A subprocess without isolation, as our user and in our environment: exit status 0 passes, stderr is shown."""
    from rlvr.core.types import Outcome, Score

    with (
        tempfile.TemporaryDirectory(prefix="weak-", ignore_cleanup_errors=True) as folder,
        open(f"{folder}/e", "w+") as said,
    ):
        # A copy of the environment: another thread's canary may change ours between fork and exec.
        ours = {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
        done = subprocess.run(
            [sys.executable, "-c", "\n".join([response, *calls_of(meta)])], cwd=folder, timeout=20, env=ours,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
        )  # fmt: skip
        said.seek(0)
        passed = done.returncode == 0
        return Score(float(passed), Outcome.PASSED if passed else Outcome.FAILED, detail=said.read())
