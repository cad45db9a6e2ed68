"""One run of an agent: a command, a function of the user's, or an address that is told to begin.

Each begins with a `Assignment`, and ends with a `Result`. A command runs in a folder and a session of its own; at its
end, or when it is stopped, every process that came from it is ended. A function runs on a thread, which cannot be
stopped: its calls are refused once the rollout is over.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from rlvr.core.types import Task
from rlvr.envs.agent.agent_sandbox import SandboxLauncher, read_report
from rlvr.recorder.local_server import LocalRecorder
from rlvr.sandbox.byte_relay import MAX_RESULT

MAX_FILE = 256 << 20  # bytes of any file that a command may write
MAX_METRICS = 64
_FIELDS = ("answer", "reward", "metrics", "branches")  # of a result
MAX_VARIABLE = 100_000  # bytes: the system takes no longer variable
# Names of variables that a command does not get, but for `PWD` and `OLDPWD`, which are folders.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|_PAT$|_DSN$|DATABASE_URL|(?<!^)(?<!^OLD)PWD$", re.IGNORECASE)
_METRIC = re.compile(r"[A-Za-z0-9_./-]{1,64}")
_JSON = 'JSON such as {"answer": "5"} or {"reward": 0.5}'
_MARK, _PREFIX = "RLVR_ROLLOUT", "rlvr-agent-"
_POLL = 0.05  # seconds between two looks for processes that are ending
_KILL_SECONDS = 5.0


@dataclass(frozen=True)
class Assignment:
    """What an agent is given: the task, and where its model is.

    `prompt` is text; `messages` is the same as a chat, and `row` the fields of the task's row that were asked for.
    `base_url` ends without `/v1`: OpenAI's clients take `{base_url}/v1`, Anthropic's `base_url` itself.
    """

    prompt: str
    messages: list[dict[str, str]]
    base_url: str
    model: str
    task_id: str
    row: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, task: Task, base_url: str, model: str, fields: Sequence[str]) -> Assignment:
        messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else list(task.prompt)
        return cls(task.prompt_text, messages, base_url, model, task.id, {name: task.meta[name] for name in fields})

    def encode(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode("utf-8", "replace")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that point the usual clients at the policy."""
        openai, key = f"{self.base_url}/v1", "rlvr"
        named = {
            "OPENAI_BASE_URL": openai, "OPENAI_API_BASE": openai, "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.base_url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_AUTH_TOKEN": key,
            "RLVR_BASE_URL": openai, "RLVR_MODEL": self.model, "RLVR_TASK_ID": self.task_id,
        }  # fmt: skip
        for name in ("NO_PROXY", "no_proxy"):  # a proxy does not know the policy
            named[name] = ",".join(filter(None, [os.environ.get(name, ""), "127.0.0.1", "localhost"]))
        prompt = _clean(self.prompt)
        fits = len(prompt.encode()) <= MAX_VARIABLE and "\0" not in prompt
        return named | ({"RLVR_PROMPT": prompt} if fits else {})


@dataclass(frozen=True)
class Result:
    """How an agent ended: what it says its answer is, a reward of its own, numbers that it measured, or an error.
    `branches` are rewards of branches, by the id of an answer in each."""

    answer: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    branches: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, value: Any) -> Result:
        """What a function returned, or a file with JSON holds: nothing, a text, a number, or a mapping with `answer`,
        `reward`, `metrics` and `branches`. Anything else is an error."""
        if value is None or isinstance(value, str):
            return cls(None if value is None else _clean(value))
        if isinstance(value, bool | int | float):
            value = {"reward": value}
        if not isinstance(value, Mapping):
            return cls(
                error=f"the agent's result is of type {type(value).__name__}; expected nothing, a text (the answer), a "
                f"number (the reward), or a mapping with any of {', '.join(_FIELDS)}"
            )
        if unknown := [name for name in value if name not in _FIELDS]:
            return cls(
                error=f"the agent's result has the field {_show(unknown[0])}; expected only {', '.join(_FIELDS)} "
                "(numbers to plot go into metrics)"
            )
        answer, reward, metrics = value.get("answer"), value.get("reward"), value.get("metrics") or {}
        if not (reward is None or _is_finite(reward)):
            return cls(error=f"the agent's result has reward={_show(reward)}; expected a finite number")
        if not isinstance(metrics, Mapping):
            return cls(error=f"the agent's result has metrics={_show(metrics)}; expected a mapping of names to numbers")
        if len(metrics) > MAX_METRICS or (odd := [n for n in metrics if not _METRIC.fullmatch(str(n))]):
            shown = f"{len(metrics)} metrics" if len(metrics) > MAX_METRICS else f"a metric named {_show(odd[0])}"
            return cls(
                error=f"the agent's result has {shown}; expected at most {MAX_METRICS}, with names of up to 64 "
                "letters, digits and _ . / -"
            )
        if wrong := [name for name, number in metrics.items() if not _is_finite(number)]:
            shown = _show(metrics[wrong[0]])
            return cls(error=f"the agent's result has metrics[{wrong[0]!r:.80}]={shown}; expected a finite number")
        branches = value.get("branches") or {}
        if not isinstance(branches, Mapping) or not all(map(_is_finite, branches.values())):
            return cls(
                error=f"the agent's result has branches={_show(branches)}; expected a mapping from the id of an answer "
                "to a finite reward"
            )
        measured = {str(name): float(number) for name, number in metrics.items()}
        said = None if answer is None else _clean(str(answer))
        of_branches = {str(id): float(number) for id, number in branches.items()}
        return cls(said, None if reward is None else float(reward), measured, branches=of_branches)


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _show(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # an integer of thousands of digits
        return f"of type {type(value).__name__}"


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may hold and no encoding can write."""
    return text.encode("utf-8", "replace").decode()


OnEnd = Callable[[Result], None]


class AgentRun(ABC):
    """One run of an agent. `on_end` is called once, on some thread, with its result."""

    @abstractmethod
    def start(self, assignment: Assignment, on_end: OnEnd) -> None: ...

    def stop(self) -> None:
        """End it, and all that it started, if it still runs."""
        return


class CommandRun(AgentRun):
    """A command. The task is in variables (`RLVR_PROMPT`, ...), in the file `RLVR_TASK` and on its standard input."""

    def __init__(self, command: Sequence[str], result: str) -> None:
        self._command, self._result = list(command), result
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._token = ""

    def start(self, assignment: Assignment, on_end: OnEnd) -> None:
        _sweep_once()
        self._folder = folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self._token = folder.name
        task, result, work = folder / "task.json", folder / "result.json", folder / "work"
        work.mkdir()  # the agent may remove all that is in its own folder
        task.write_bytes(assignment.encode())
        (folder / "prompt.txt").write_bytes(_encode(assignment.prompt))
        kept = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        files = {"RLVR_TASK": str(task), "RLVR_RESULT": str(result), _MARK: self._token}
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX)
        os.unlink(name)  # without a name: the agent cannot put something else in its place
        output = os.fdopen(descriptor, "w+b")
        with (folder / "prompt.txt").open("rb") as given:
            try:
                self._process = subprocess.Popen(
                    self._command, cwd=work, env=kept | assignment.variables | files, stdin=given, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except (OSError, ValueError) as error:
                output.close()
                shutil.rmtree(folder, ignore_errors=True)
                raise ValueError(f"agent: the command {self._command} cannot be started: {error}") from error
        _limit_files(self._process.pid)
        threading.Thread(target=self._wait, args=(output, on_end), name="agent", daemon=True).start()

    def _wait(self, output: IO[bytes], on_end: OnEnd) -> None:
        assert self._process is not None and self._folder is not None
        from rlvr.sandbox.sandboxed_command import read_result  # of POSIX systems alone

        try:
            code = self._process.wait()
            self._end_processes()  # before its files are read: none of them may still change
            state, written = read_result(str(self._folder / "result.json"))
            with output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_RESULT))
                said = output.read(MAX_RESULT)
            result = judge_end(code, state, written, said, self._result)
        except Exception as error:
            result = Result(error=f"the agent's result cannot be read: {type(error).__name__}: {error}")
        finally:
            _remove(self._folder)
        on_end(result)

    def stop(self) -> None:
        self._end_processes()

    def _end_processes(self) -> None:
        """End all processes that came from the command: its session, and those that left it but carry the mark."""
        if self._process is None:
            return
        give_up = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < give_up:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            marked = _find_marked(self._token)
            for pid in marked:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not marked:
                return
            time.sleep(_POLL)


class SandboxedRun(AgentRun):
    """A command in a sandbox (`rlvr.envs.agent.agent_sandbox`). It gets its task as without one."""

    def __init__(self, launcher: SandboxLauncher, recorder: LocalRecorder, result: str) -> None:
        self._launcher, self._recorder, self._result = launcher, recorder, result
        self._channel: socket.socket | None = None
        self._ended = threading.Event()

    def start(self, assignment: Assignment, on_end: OnEnd) -> None:
        from rlvr.sandbox import sandboxed_command  # of Linux alone

        files = {"RLVR_TASK": sandboxed_command.TASK, "RLVR_RESULT": sandboxed_command.RESULT}
        self._channel = self._launcher.launch(
            self._recorder.socket_path, assignment.variables | files, assignment.encode(), _encode(assignment.prompt)
        )
        threading.Thread(target=self._wait, args=(self._channel, on_end), name="agent", daemon=True).start()

    def _wait(self, channel: socket.socket, on_end: OnEnd) -> None:
        try:
            report, written, said = read_report(channel)
        except Exception as error:
            report = dict[str, Any](refused=f"its report cannot be read: {error}")
            written = said = b""
        self._ended.set()
        if "refused" in report:
            result = Result(error=f"the agent was not started: {report['refused']!r:.500}")
        elif not report:
            result = Result(error="the agent was ended, with all that it started")
        elif report["used"]:
            result = Result(error=f"the agent used more than sandbox.memory={self._launcher.sandbox.memory} bytes")
        else:
            result = judge_end(report["code"], report["result"], written, said, self._result)
        on_end(result)

    def stop(self) -> None:
        if self._channel is not None:
            with suppress(OSError):  # it has ended already
                self._channel.shutdown(socket.SHUT_WR)
            self._ended.wait(_KILL_SECONDS)


def judge_end(code: int, state: str, written: bytes, said: bytes, kind: str) -> Result:
    """What a command's end means: its exit code, its result file (`written`, or in `state` why there is none), and the
    end of its output. `kind` is what the output is, unless the file says it."""
    output = said.decode("utf-8", "replace")
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Result(error=f"the agent {how}; the end of its output: {output[-1_000:].strip()!r}")
    if state == "large":
        return Result(error=f"the agent's result file is larger than {MAX_RESULT >> 20} MiB")
    if state == "irregular":
        return Result(error="the agent's result file is a link, folder or device; expected a regular file with JSON")
    result = Result()
    if not state:
        try:
            result = Result.of(json.loads(written))
        except (ValueError, RecursionError) as error:
            return Result(error=f"the agent's result file is not JSON ({error!s:.200}); expected {_JSON}")
    if result.error:
        return result
    if kind == "output" and result.answer is None:
        return replace(result, answer=_clean(output.strip()))
    if kind == "reward" and result.reward is None:
        words = output.split()
        try:
            printed = Result.of(float(words[-1]))
        except (IndexError, ValueError):
            return Result(
                error="result=reward expects a number as the last word that the agent prints; the end of its output: "
                f"{output[-200:].strip()!r}"
            )
        return printed if printed.error else replace(result, reward=printed.reward)
    return result


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _remove(folder: Path) -> None:
    """Remove a folder, however deep it is."""
    with suppress(OSError):
        from rlvr.sandbox import mounts

        mounts.wipe(str(folder))
        folder.rmdir()


def _limit_files(pid: int) -> None:
    if sys.platform == "linux":
        import resource

        with suppress(OSError, ValueError):  # it may have ended
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))


@functools.cache
def _sweep_once() -> None:
    """Once in a process: end the agents of runs that were killed, and remove their folders."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with suppress(OSError, ValueError):
            pid = int(folder.name.removeprefix(_PREFIX).partition("-")[0])
            if folder.is_dir() and folder.stat().st_uid == os.getuid() and not _is_running(pid):
                for left in _find_marked(folder.name):
                    os.kill(left, signal.SIGKILL)
                _remove(folder)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _find_marked(token: str) -> list[int]:
    """The processes whose environment began with the mark of a run, without those that have ended (Linux only)."""
    mark, found = f"{_MARK}={token}".encode(), list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
            if is_marked and b") Z " not in (entry / "stat").read_bytes():
                found.append(int(entry.name))
    return found


class FunctionRun(AgentRun):
    """A function of the user's, sync or async: `agent(assignment)` returns nothing, a text, a number or a mapping."""

    def __init__(self, function: Callable[[Assignment], Any]) -> None:
        self._function = function

    def start(self, assignment: Assignment, on_end: OnEnd) -> None:
        threading.Thread(target=self._run, args=(assignment, on_end), name="agent", daemon=True).start()

    def _run(self, assignment: Assignment, on_end: OnEnd) -> None:
        try:
            value = self._function(assignment)
            result = Result.of(asyncio.run(_await(value)) if inspect.isawaitable(value) else value)
        except BaseException as error:  # on a thread of its own, which nothing else ends
            result = Result(error=f"the agent failed: {_last_frame(error)}{type(error).__name__}: {error!s:.1000}")
        on_end(result)


async def _await(value: Any) -> Any:
    return await value


def _last_frame(error: BaseException) -> str:
    """Where an error came from: `my_agent.py:12: `."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}: "


class AddressRun(AgentRun):
    """An agent behind an address: `POST` with the assignment as JSON, answered at its end with the result as JSON."""

    def __init__(self, url: str) -> None:
        self._url = url

    def start(self, assignment: Assignment, on_end: OnEnd) -> None:
        threading.Thread(target=self._run, args=(assignment, on_end), name="agent", daemon=True).start()

    def _run(self, assignment: Assignment, on_end: OnEnd) -> None:
        request = urllib.request.Request(self._url, assignment.encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request) as response:  # the episode's budget ends it, not a time limit
                raw = response.read(MAX_RESULT + 1)
            result = self._read(raw)
        except Exception as error:
            result = Result(
                error=f"POST {self._url} failed ({type(error).__name__}: {error!s:.500}); does its service run?"
            )
        on_end(result)

    def _read(self, raw: bytes) -> Result:
        if len(raw) > MAX_RESULT:
            return Result(error=f"the agent at {self._url} answered with more than {MAX_RESULT >> 20} MiB")
        try:
            return Result.of(json.loads(raw) if raw.strip() else None)
        except (ValueError, RecursionError):
            return Result(error=f"the agent at {self._url} answered {raw[:200]!r}; expected {_JSON}, or an empty body")
