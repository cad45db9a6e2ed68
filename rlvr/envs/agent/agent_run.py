"""One run of an agent: a command, a function of the user's, or an address that is told to begin.

Each begins with a `Assignment`, and ends with a `Result`. A command runs in a folder and a session of its own; at its
end, or when it is stopped, every process that came from it is ended. A function runs on a thread, which cannot be
stopped: its calls are refused once the rollout is over.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlvr.core.types import Task

MAX_RESULT = 1 << 20  # bytes of an agent's output, or of the file with its result, that are read
MAX_FILE = 256 << 20  # bytes of any file that a command may write
MAX_VARIABLE = 100_000  # characters: the system takes no longer variable
_SECRET = re.compile(r"(_|^)(API_?KEY|KEYS?|TOKENS?|SECRETS?|PASSWORDS?|CREDENTIALS?)$", re.IGNORECASE)
_MARK = "RLVR_ROLLOUT"
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

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that point the usual clients at the policy."""
        openai, key = f"{self.base_url}/v1", "rlvr"
        named = {
            "OPENAI_BASE_URL": openai, "OPENAI_API_BASE": openai, "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.base_url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_AUTH_TOKEN": key,
            "RLVR_BASE_URL": openai, "RLVR_MODEL": self.model, "RLVR_TASK_ID": self.task_id,
        }  # fmt: skip
        return named | ({"RLVR_PROMPT": self.prompt} if len(self.prompt) <= MAX_VARIABLE else {})


@dataclass(frozen=True)
class Result:
    """How an agent ended: what it says its answer is, a reward of its own, numbers that it measured, or an error."""

    answer: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    error: str = ""

    @classmethod
    def of(cls, value: Any) -> Result:
        """What a function returned, or a file with JSON holds: nothing, a text, a number, or a mapping with `answer`,
        `reward` and `metrics`. Anything else is an error."""
        if value is None or isinstance(value, str):
            return cls(value)
        if isinstance(value, bool | int | float):
            return cls(reward=float(value)) if math.isfinite(value) else cls(error=f"the agent's reward is {value}")
        if not isinstance(value, Mapping) or (unknown := set(value) - {"answer", "reward", "metrics"}):
            shown = sorted(unknown) if isinstance(value, Mapping) else type(value).__name__
            return cls(
                error=f"the agent's result has {shown!s:.200}; expected text, a number, or a mapping with answer, "
                "reward and metrics"
            )
        answer, reward, metrics = value.get("answer"), value.get("reward"), value.get("metrics") or {}
        is_number = reward is None or (isinstance(reward, bool | int | float) and math.isfinite(reward))
        if not is_number or not isinstance(metrics, Mapping):
            return cls(error=f"the agent's result has reward={reward!r:.80} and metrics={metrics!r:.80}")
        if wrong := [n for n, v in metrics.items() if not isinstance(v, bool | int | float) or not math.isfinite(v)]:
            return cls(error=f"the agent's metric {wrong[0]!r:.80} is no finite number")
        measured = {str(name): float(number) for name, number in metrics.items()}
        return cls(None if answer is None else str(answer), None if reward is None else float(reward), measured)


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
        self._is_stopped = False

    def start(self, assignment: Assignment, on_end: OnEnd) -> None:
        self._folder = folder = Path(tempfile.mkdtemp(prefix="rlvr-agent-"))
        self._token = f"{os.getpid()}-{folder.name}"
        task, result = folder / "task.json", folder / "result.json"
        task.write_text(json.dumps(asdict(assignment), ensure_ascii=False))
        (folder / "prompt.txt").write_text(assignment.prompt)
        kept = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        files = {"RLVR_TASK": str(task), "RLVR_RESULT": str(result), _MARK: self._token}
        with (folder / "prompt.txt").open("rb") as given, (folder / "output.txt").open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self._command, cwd=folder, env=kept | assignment.variables | files, stdin=given, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise ValueError(f"agent: the command {self._command} cannot be started: {error}") from error
        _limit_files(self._process.pid)
        threading.Thread(target=self._wait, args=(on_end,), name="agent", daemon=True).start()

    def _wait(self, on_end: OnEnd) -> None:
        assert self._process is not None and self._folder is not None
        code = self._process.wait()
        result = self._read_result(code)
        self._end_processes()
        shutil.rmtree(self._folder, ignore_errors=True)
        on_end(result)

    def _read_result(self, code: int) -> Result:
        assert self._folder is not None
        output = _read_end(self._folder / "output.txt")
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return Result(error=f"the agent {how}; the end of its output: {output[-1_000:].strip()!r}")
        written = self._folder / "result.json"
        if written.is_file() and not written.is_symlink():
            if written.stat().st_size > MAX_RESULT:
                return Result(error=f"the agent's result file is larger than {MAX_RESULT >> 20} MiB")
            try:
                return Result.of(json.loads(written.read_bytes()))
            except (ValueError, RecursionError) as error:
                return Result(error=f"the agent's result file is not JSON ({error!s:.200})")
        if self._result == "output":
            return Result(answer=output.strip())
        if self._result == "reward":
            lines = output.split()
            try:
                return Result.of(float(lines[-1]))
            except (IndexError, ValueError):
                return Result(error=f"the agent's output ends with no number: {output[-200:].strip()!r}")
        return Result()

    def stop(self) -> None:
        self._is_stopped = True
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


def _limit_files(pid: int) -> None:
    if sys.platform == "linux":
        import resource

        with suppress(OSError, ValueError):  # it may have ended
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))


def _find_marked(token: str) -> list[int]:
    """The processes whose environment began with the mark of a run, without those that have ended (Linux only)."""
    mark, found = f"{_MARK}={token}".encode(), list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
            if is_marked and b") Z " not in (entry / "stat").read_bytes():
                found.append(int(entry.name))
    return found


def _read_end(file: Path) -> str:
    """The last `MAX_RESULT` bytes of a file as text."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - MAX_RESULT))
        return opened.read(MAX_RESULT).decode("utf-8", "replace")


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
        except (Exception, SystemExit) as error:
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

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds

    def start(self, assignment: Assignment, on_end: OnEnd) -> None:
        threading.Thread(target=self._run, args=(assignment, on_end), name="agent", daemon=True).start()

    def _run(self, assignment: Assignment, on_end: OnEnd) -> None:
        body = json.dumps(asdict(assignment), ensure_ascii=False).encode()
        request = urllib.request.Request(self._url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:
                raw = response.read(MAX_RESULT + 1)
            if len(raw) > MAX_RESULT:
                raise ValueError(f"its answer is larger than {MAX_RESULT >> 20} MiB")
            result = Result.of(json.loads(raw) if raw.strip() else None)
        except (OSError, ValueError, RecursionError) as error:
            result = Result(error=f"the agent at {self._url} failed: {type(error).__name__}: {error!s:.500}")
        on_end(result)
