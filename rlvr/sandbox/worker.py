"""A guarded worker: a child process that runs one job on hostile texts, under limits, and is killed when it is late.

    worker = Worker("rlvr.sandbox.regex")
    worker.map({"pattern": "a+", "match": "full"}, ["aaa", "b"], seconds=1.0)   # -> [WorkerReply, WorkerReply]

A job is a module with `run(setup, item)` that imports only the standard library; its arguments and results are JSON.
The child (`rlvr.sandbox.child`) has an empty environment, its own session, and limits on memory, processor time, files
and, unless its job forks for every item (`may_fork`, see `rlvr.sandbox.item_forks`), processes. The first call starts
it, later ones reuse it. Calls may come from any thread or event loop; they take turns. A forked copy of this process
starts its own child. The child ends with this process, for whatever reason: its input closes, and if it is busy a limit
on its processor time ends it.

Left out on purpose: code that a model wrote (it would need namespaces, not limits), more than one child per worker, and
Windows.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import select
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.sandbox.protocol import OUT_OF_MEMORY, FrameTooLarge, pack, take_frame, unpack

MIB = 1 << 20
START_SECONDS = 30.0  # a machine may be very busy; the child itself needs about 0.03
LATE_IN_A_ROW = 20  # items; after so many the setup itself must be slow


@dataclass(frozen=True)
class WorkerReply:
    """What a job returned for an item, or why it did not.

    `failure` is empty, `timeout`, `died` (out of memory, killed), `raised` (an exception in the job), `too_large` (the
    reply) or `not_started` (no child could run it, which is not the item's fault); `detail` is for a person.
    """

    value: Any = None
    failure: str = ""
    detail: str = ""


class _ChildLost(Exception):
    """The child cannot be used any more; `failure` and `detail` as in `WorkerReply`."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(failure, detail)
        self.failure, self.detail = failure, detail


class Worker:
    """Runs `run(setup, item)` of the module `job` in a child. `memory` and `reply` are limits in bytes.

    `may_fork` is for a job that runs its items in forks, `hash_seed` for one whose results follow the order of sets: it
    is Python's `PYTHONHASHSEED`.
    """

    def __init__(
        self,
        job: str,
        *,
        memory: int = 256 * MIB,
        reply: int = MIB,
        start_seconds: float = START_SECONDS,
        may_fork: bool = False,
        hash_seed: int | None = None,
    ) -> None:
        self.job, self.memory, self.reply, self.start_seconds = job, memory, reply, start_seconds
        self.may_fork, self.hash_seed = may_fork, hash_seed
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._served = False  # whether the current child has answered anything yet
        _workers.add(self)

    def map(self, setup: Any, items: Sequence[Any], seconds: float) -> list[WorkerReply]:
        """One reply per item, in order. Each item has `seconds`; one that fails costs the others nothing.

        But after 20 late items in a row (`LATE_IN_A_ROW`), or if no child can be started, the rest of the call gets
        the same failure without being run.
        """
        if os.getpid() != self._owner:  # forked without Python's knowledge
            self._forget()
        replies: list[WorkerReply] = []
        with self._lock:
            while len(replies) < len(items):
                hopeless = _hopeless(replies, seconds)
                if hopeless is not None:
                    return replies + [hopeless] * (len(items) - len(replies))
                try:
                    process = self._ensure_child()
                    sent = pack({"setup": setup, "seconds": seconds})
                    sent += b"".join(pack({"item": item}) for item in items[len(replies) :])
                    for message in self._exchange(process, sent, len(items) - len(replies), seconds):
                        self._served = True
                        raised = message.get("raised")
                        replies.append(
                            WorkerReply(message.get("value")) if raised is None else WorkerReply(None, "raised", raised)
                        )
                except _ChildLost as lost:
                    self._stop()
                    # If it died between two calls or of earlier items, a new child decides about this item.
                    if lost.failure != "died" or not self._served:
                        replies.append(WorkerReply(None, lost.failure, lost.detail))
                except BaseException:  # Ctrl-C: replies that come later must not reach the next call
                    self._stop()
                    raise
        return replies

    def close(self) -> None:
        """End the child. The next call starts another."""
        with self._lock:
            self._stop()

    def _end(self) -> None:
        """Like `close`, without waiting for the replies of a call that another thread makes."""
        while not self._lock.acquire(timeout=0.05):
            process = self._process  # read again each time: that call may be starting one
            if process is not None:
                process.kill()
        try:
            self._stop()
        finally:
            self._lock.release()

    @property
    def pid(self) -> int | None:
        """The process id of the child; None if there is none."""
        return self._process.pid if self._process else None

    def _ensure_child(self) -> subprocess.Popen[bytes]:
        """The running child; starts one if necessary."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._served = False
        spec = importlib.util.find_spec(self.job)
        assert spec is not None and spec.origin is not None, self.job
        if not sys.executable:
            raise _ChildLost("not_started", "Python does not know where its own program is (sys.executable is empty)")
        child = str(Path(__file__).with_name("child.py"))
        flags = ("-s", "-P", "-S", "-B", "-W", "ignore")  # without -E, which `-I` adds: the environment is ours
        environment = {} if self.hash_seed is None else {"PYTHONHASHSEED": str(self.hash_seed)}
        arguments = (child, spec.origin, str(self.memory), *(["may_fork"] if self.may_fork else []))
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, *flags, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0, env=environment, cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise _ChildLost("not_started", f"{sys.executable} could not be started: {error}") from error
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        try:
            (ready,) = self._exchange(process, b"", 1, self.start_seconds)
        except _ChildLost as lost:
            late = f"it was not ready within {self.start_seconds:g} s"
            raise _ChildLost("not_started", late if lost.failure == "timeout" else lost.detail) from lost
        if "ready" not in ready:
            raise _ChildLost("not_started", str(ready.get("raised")))
        if ready["ready"]:
            warnings.warn(
                f"this system refuses {', '.join(ready['ready'])}: hostile texts are checked without that limit",
                RuntimeWarning,
                stacklevel=2,
            )
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], sent: bytes, count: int, seconds: float
    ) -> Iterator[dict[str, Any]]:
        """Send and receive at the same time, so that no pipe fills up; yields `count` messages, `seconds` for each."""
        assert process.stdin is not None and process.stdout is not None
        to_child, from_child = process.stdin.fileno(), process.stdout.fileno()
        left, received = memoryview(sent), bytearray()
        poll = select.poll()
        poll.register(from_child, select.POLLIN)
        if left:
            poll.register(to_child, select.POLLOUT)
        deadline = time.monotonic() + seconds
        while count:
            events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                raise _ChildLost("timeout", f"no reply within {seconds:g} s")
            for descriptor, _ in events:
                if descriptor == to_child:
                    left = left[_write(to_child, left) :]
                    if not left:
                        poll.unregister(to_child)
                    continue
                chunk = os.read(from_child, 1 << 16)
                if not chunk:
                    raise _ChildLost("died", self._describe_exit(process))
                received += chunk
            try:
                while count and (body := take_frame(received, self.reply)) is not None:
                    count -= 1
                    yield unpack(body)
                    deadline = time.monotonic() + seconds
            except FrameTooLarge as error:
                problem = f"a reply of {error.args[0]} bytes, at most {self.reply} are allowed"
                raise _ChildLost("too_large", problem) from None

    def _describe_exit(self, process: subprocess.Popen[bytes]) -> str:
        """How the child ended, in words; call it after its pipes closed."""
        try:
            status = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "the child closed its output"
        if status == OUT_OF_MEMORY:
            return f"it needed more than the {self.memory // MIB} MiB of memory it may use"
        return f"the child was killed by signal {-status}" if status < 0 else f"the child ended with status {status}"

    def _stop(self) -> None:
        """Kill and reap the child, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.wait()

    def _forget(self) -> None:
        """In a forked copy of this process: close our ends of the pipes. The child belongs to the original."""
        process, self._process = self._process, None
        self._lock = threading.Lock()  # the thread that held the old one is not in this copy
        self._owner = os.getpid()
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.returncode = 0  # nothing to wait for


def _hopeless(replies: list[WorkerReply], seconds: float) -> WorkerReply | None:
    """The failure of all further items, if the replies so far prove it; else None."""
    if _exiting:
        return WorkerReply(None, "not_started", "this process is ending")
    if replies and replies[-1].failure == "not_started":
        return replies[-1]
    last = replies[-LATE_IN_A_ROW:]
    if len(last) == LATE_IN_A_ROW and all(reply.failure == "timeout" for reply in last):
        late = f"not run: none of the {LATE_IN_A_ROW} before it had a reply within {seconds:g} s"
        return WorkerReply(None, "timeout", late)
    return None


def _write(to_child: int, left: memoryview) -> int:
    try:
        return os.write(to_child, left)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(left)  # it is gone; earlier replies may still be in the other pipe


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_exiting = False


def _close_all() -> None:
    """At exit: end the children, whose replies a thread may still wait for."""
    global _exiting
    _exiting = True
    for worker in list(_workers):
        worker._end()


def _forget_all() -> None:
    for worker in list(_workers):
        worker._forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_all)
