"""A guarded worker: a child process that runs one job on hostile texts, under limits, and is killed when it is late.

    worker = Worker("rlvr.sandbox.regex")
    worker.map({"pattern": "a+", "match": "full"}, ["aaa", "b"], seconds=1.0)   # -> [Reply, Reply]

A job is a module with `run(setup, item)` that imports only the standard library; what goes in and comes out is JSON.
The child (`rlvr.sandbox.child`) has an empty environment, a session of its own and limits on memory, processor time,
files and processes. It is started by the first call and kept for the next ones. Calls may come from any thread or event
loop; they take turns. A forked copy of this process starts a child of its own. The child ends with this process,
however that ends: its input closes, and a limit on its processor time ends it should it be busy then.

Left out on purpose: code that a model wrote (it would need namespaces, not limits), more than one child per worker, and
Windows. `python -m pytest tests/test_sandbox_regex.py` exercises it.
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

from rlvr.sandbox.child import OUT_OF_MEMORY, pack, unpack

MIB = 1 << 20
START_SECONDS = 30.0  # a machine may be very busy; the child itself needs about 0.03
LATE_IN_A_ROW = 20  # items; so many have shown that it is the setup which is slow


@dataclass(frozen=True)
class Reply:
    """What a job returned for an item, or why it did not.

    `failure` is empty, `timeout`, `died` (out of memory, killed), `raised` (an exception in the job), `too_large` (the
    reply) or `not_started` (there is no child to run it: no fault of the item's); `detail` says more for a person.
    """

    value: Any = None
    failure: str = ""
    detail: str = ""


class _Lost(Exception):
    """The child cannot be used any more. `args` are failure and detail of a `Reply`."""


class Worker:
    """Runs `run(setup, item)` of the module `job` in a child. `memory` and `reply` are limits in bytes."""

    def __init__(
        self, job: str, *, memory: int = 256 * MIB, reply: int = MIB, start_seconds: float = START_SECONDS
    ) -> None:
        self.job, self.memory, self.reply, self.start_seconds = job, memory, reply, start_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._served = False  # whether the child at hand has answered anything yet
        _workers.add(self)

    def map(self, setup: Any, items: Sequence[Any], seconds: float) -> list[Reply]:
        """One reply per item, in order. Each item has `seconds`; one that fails costs the others nothing.

        Unless it is hopeless: after 20 items in a row that were late (`LATE_IN_A_ROW`), or where no child can be
        started, the rest of the call gets the same failure without being run.
        """
        if os.getpid() != self._owner:  # forked by something that Python does not know of
            self._forget()
        replies: list[Reply] = []
        with self._lock:
            while len(replies) < len(items):
                hopeless = _hopeless(replies, seconds)
                if hopeless is not None:
                    return replies + [hopeless] * (len(items) - len(replies))
                try:
                    process = self._running()
                    sent = pack({"setup": setup, "seconds": seconds})
                    sent += b"".join(pack({"item": item}) for item in items[len(replies) :])
                    for message in self._exchange(process, sent, len(items) - len(replies), seconds):
                        self._served = True
                        raised = message.get("raised")
                        replies.append(Reply(message.get("value")) if raised is None else Reply(None, "raised", raised))
                except _Lost as lost:
                    self._stop()
                    # Killed between two calls, or worn out by earlier items: a fresh child decides about this one.
                    if lost.args[0] != "died" or not self._served:
                        replies.append(Reply(None, *lost.args))
                except BaseException:  # Ctrl-C: replies that nobody waits for must not meet the next call
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
            process = self._process  # once more each time: that call may be starting one
            if process is not None:
                process.kill()
        try:
            self._stop()
        finally:
            self._lock.release()

    @property
    def pid(self) -> int | None:
        """The process id of the child, None where there is none."""
        return self._process.pid if self._process else None

    def _running(self) -> subprocess.Popen[bytes]:
        """The child, started if it must be."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._served = False
        spec = importlib.util.find_spec(self.job)
        assert spec is not None and spec.origin is not None, self.job
        if not sys.executable:
            raise _Lost("not_started", "Python does not know where its own program is (sys.executable is empty)")
        child = str(Path(__file__).with_name("child.py"))
        flags = ("-I", "-S", "-B", "-W", "ignore")
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, *flags, child, spec.origin, str(self.memory)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0, env={}, cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise _Lost("not_started", f"{sys.executable} could not be started: {error}") from error
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        try:
            (ready,) = self._exchange(process, b"", 1, self.start_seconds)
        except _Lost as lost:
            late = f"it was not ready within {self.start_seconds:g} s"
            raise _Lost("not_started", late if lost.args[0] == "timeout" else lost.args[1]) from lost
        if "ready" not in ready:
            raise _Lost("not_started", str(ready.get("raised")))
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
        """Send and receive at once, so that no pipe fills up; yield `count` messages, `seconds` for each."""
        assert process.stdin is not None and process.stdout is not None
        to_child, from_child = process.stdin.fileno(), process.stdout.fileno()
        left, got = memoryview(sent), bytearray()
        poll = select.poll()
        poll.register(from_child, select.POLLIN)
        if left:
            poll.register(to_child, select.POLLOUT)
        deadline = time.monotonic() + seconds
        while count:
            events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                raise _Lost("timeout", f"no reply within {seconds:g} s")
            for descriptor, _ in events:
                if descriptor == to_child:
                    left = left[_write(to_child, left) :]
                    if not left:
                        poll.unregister(to_child)
                    continue
                chunk = os.read(from_child, 1 << 16)
                if not chunk:
                    raise _Lost("died", self._ending(process))
                got += chunk
            while count and len(got) >= 4:
                size = int.from_bytes(got[:4], "big")
                if size > self.reply:
                    raise _Lost("too_large", f"a reply of {size} bytes, at most {self.reply} are taken")
                if len(got) < 4 + size:
                    break
                body = bytes(got[4 : 4 + size])
                del got[: 4 + size]
                count -= 1
                yield unpack(body)
                deadline = time.monotonic() + seconds

    def _ending(self, process: subprocess.Popen[bytes]) -> str:
        """How a child whose pipes have closed came to its end."""
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
        """In a forked copy: the child belongs to the original. Only our ends of its pipes are closed."""
        process, self._process = self._process, None
        self._lock = threading.Lock()  # whoever held the old one is not here
        self._owner = os.getpid()
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.returncode = 0  # nothing of ours to wait for


def _hopeless(replies: list[Reply], seconds: float) -> Reply | None:
    """The failure of all items to come, where those before leave no doubt of it."""
    if _exiting:
        return Reply(None, "not_started", "this process is ending")
    if replies and replies[-1].failure == "not_started":
        return replies[-1]
    last = replies[-LATE_IN_A_ROW:]
    if len(last) == LATE_IN_A_ROW and all(reply.failure == "timeout" for reply in last):
        late = f"not run, as none of the {LATE_IN_A_ROW} before it had a reply within {seconds:g} s"
        return Reply(None, "timeout", late)
    return None


def _write(to_child: int, left: memoryview) -> int:
    try:
        return os.write(to_child, left)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(left)  # it is gone; what it answered before may still stand in the other pipe


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_exiting = False


def _close_all() -> None:
    """The process ends: nobody reads the replies that a thread may still wait for."""
    global _exiting
    _exiting = True
    for worker in list(_workers):
        worker._end()


def _forget_all() -> None:
    for worker in list(_workers):
        worker._forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
