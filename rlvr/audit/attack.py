"""Try the hack suite on a verifier of code: does anything pass that solves nothing, and does anything get out?

    results = run_suite(resolve_reward("code"), HOSTILE + HONEST)

A *false pass* is a program that is accepted and does not solve its task. An *escape* is seen from outside, whatever the
verdict says: every attack has canaries of its own: a folder, a file with a secret, a secret in our environment, a
listener, a process to kill, and a name by which a process that stays alive is found; `Survivors` sees those of any
name, when the verifier is closed and should have left none. *Unjudged* is a hostile program that made the verifier say
`error` or `invalid`, which carry no reward: a way to dodge a bad one.

What does not try to be isolated (a verifier that runs code in this process, say) can be hurt by the suite: run it on a
machine that can be lost. `python -m pytest tests/test_audit_attack.py` exercises it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.audit.attacks import Attack
from rlvr.reward.registry import Reward
from rlvr.types import Outcome, Score, Task, Trajectory

REPEATS = 2  # what is planted, is planted on several workers
Judge = Callable[[str, dict[str, Any]], Score]


@dataclass(frozen=True)
class Result:
    """One program's verdict. `escaped` says what it reached, "" for nothing."""

    attack: Attack
    score: Score
    seconds: float
    escaped: str = ""

    @property
    def fault(self) -> str:
        """What the verifier did wrong: false_pass, escape, rejected (an honest program), unjudged; "" for nothing."""
        if self.escaped:
            return "escape"
        if self.attack.kind == "honest":
            return "" if self.score.outcome is Outcome.PASSED else "rejected"
        if self.score.outcome is Outcome.PASSED:
            return "false_pass"
        return "unjudged" if self.score.value is None else ""


SETTLING = 0.5  # seconds after an escape's verdict: what it started or killed may take a moment


class Canaries:
    """What an attack may not touch, and what came of it. Every attack has its own."""

    def __init__(self) -> None:
        self.mark = f"rl{secrets.token_hex(5)}"  # 15 characters are all that a process's name may have
        self.secret = f"secret-{secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="rlvr-canary-"))
        self.folder.chmod(0o777)  # so that only the sandbox keeps anybody out
        self.file = self.folder / "secret.txt"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        os.environ[self.mark] = self.secret
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        # Without our environment: the canaries of another thread may change it between fork and exec.
        self.neighbour = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], env={})
        self._limits = self._neighbours_state()

    def filled(self, text: str) -> str:
        port = self.listener.getsockname()[1]
        places = {"FOLDER": self.folder, "FILE": self.file, "PORT": port, "PID": self.neighbour.pid, "MARK": self.mark}
        for name, value in (places | {"SECRET": self.secret}).items():
            text = text.replace(f"@{name}@", str(value))
        return text

    def task(self, task: dict[str, Any]) -> dict[str, Any]:
        tests = [self.filled(test) if isinstance(test, str) else test for test in task["tests"]]
        return {**task, "tests": tests}

    def _neighbours_state(self) -> str:
        """What another process could change of it: limits and priority, as the kernel tells."""
        try:
            limits = Path(f"/proc/{self.neighbour.pid}/limits").read_text()
            return f"{limits}{os.getpriority(os.PRIO_PROCESS, self.neighbour.pid)}"
        except OSError:
            return ""

    def touched(self, score: Score | None = None) -> str:
        """What was reached so far, as words for a person; "" for nothing."""
        found: list[str] = []
        names = sorted(path.name for path in self.folder.iterdir())
        if names != [self.file.name] or self.file.read_text() != self.secret:
            found.append("changed files outside")
        try:
            self.listener.accept()[0].close()
            found.append("connected to a listener outside")
        except BlockingIOError:
            pass
        if self.neighbour.poll() is not None:
            found.append("killed another process")
        elif self._neighbours_state() != self._limits:
            found.append("changed another process")
        if self._marked():
            found.append("left a process alive")
        if score is not None and self.secret in score.detail:
            found.append("told a secret")
        return ", ".join(found)

    def _marked(self) -> list[int]:
        """The processes that go by our mark."""
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*/comm"):
            try:
                if path.read_text().strip() == self.mark:
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        for pid in self._marked():
            try:
                os.kill(pid, 9)
            except OSError:
                continue
        self.neighbour.kill()
        self.neighbour.wait()
        self.listener.close()
        os.environ.pop(self.mark, None)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def canaries() -> Iterator[Canaries]:
    made = Canaries()
    try:
        yield made
    finally:
        made.close()


class Survivors:
    """Finds the processes that began below ours and still run. Orphans come to us meanwhile, not to the machine's init.

    Exact when all that was started on purpose has been closed: without that a verifier's own workers are told too.
    """

    def __enter__(self) -> Survivors:
        self._adopt(1)
        self._before = _descendants()
        return self

    def __exit__(self, *_: object) -> None:
        self._adopt(0)

    def _adopt(self, on: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(36, on, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    def found(self, grace: float = 2.0) -> dict[int, str]:
        """Process id and name of whatever is alive after `grace` seconds at most."""
        end = time.monotonic() + grace
        while True:
            left = {pid: name for pid, name in _descendants().items() if pid not in self._before}
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.05)


def _descendants() -> dict[int, str]:
    """Process id and name of everything alive below this process. Zombies are dead: whoever waits for them is late."""
    parents: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if state not in "ZX":
            parents[int(path.parent.name)] = (int(parent), name)
    ours = {os.getpid()}
    while more := {pid for pid, (parent, _) in parents.items() if parent in ours} - ours:
        ours |= more
    return {pid: parents[pid][1] for pid in ours if pid != os.getpid() and pid in parents}


def judge_of(reward: Reward) -> Judge:
    """The reward as a verifier of one program; the tests are in the task's meta, as `code` takes them."""

    def judge(program: str, task: dict[str, Any]) -> Score:
        (score,) = reward.score([Trajectory("", [], program, [], task=Task("", "", task))])
        return score

    return judge


def try_attack(attack: Attack, judge: Judge) -> Result:
    """Judge one program, what it wants run before included."""
    if attack.kind != "escape":
        for program in attack.before * REPEATS:
            judge(program, attack.task)
        start = time.perf_counter()
        scores = [judge(attack.program, attack.task) for _ in range(REPEATS if attack.before else 1)]
        worst = next((score for score in scores if score.outcome is Outcome.PASSED), scores[0])
        return Result(attack, worst, time.perf_counter() - start)
    with canaries() as outside:
        start = time.perf_counter()
        score = judge(outside.filled(attack.program), outside.task(attack.task))
        seconds = time.perf_counter() - start
        leaked = "told a secret" if "@SECRET@" in str(attack.task) and score.outcome is Outcome.PASSED else ""
        touched = outside.touched(score)
        while not touched and attack.kind == "escape" and time.perf_counter() < start + seconds + SETTLING:
            time.sleep(0.05)
            touched = outside.touched(score)
        return Result(attack, score, seconds, touched or leaked)


def run_suite(
    reward: Reward,
    attacks: Sequence[Attack],
    workers: int | None = None,
    progress: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Try every attack, several at a time (`workers` None: one per core), in the given order."""
    judge = judge_of(reward)
    results: list[Result] = []
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        try:
            for result in pool.map(lambda attack: try_attack(attack, judge), attacks):
                results.append(result)
                progress(result)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


FAULTS = ("false_pass", "escape", "unjudged", "rejected")


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row per category and one for all: programs tried, how many of each fault, the slowest one's seconds."""
    rows: list[dict[str, Any]] = []
    for category in [*dict.fromkeys(result.attack.category for result in results), "all"]:
        own = [result for result in results if category in (result.attack.category, "all")]
        row: dict[str, Any] = {"category": category, "programs": len(own)}
        row |= {fault: sum(result.fault == fault for result in own) for fault in FAULTS}
        rows.append(row | {"worst_seconds": round(max(result.seconds for result in own), 2)})
    return rows


def table(results: Sequence[Result], tier: str = "") -> str:
    """The summary for a person, and the programs that got away with something."""
    head = ("category", "programs", "false passes", "escapes", "unjudged", "honest rejected", "worst s")
    rows = [tuple(str(value) for value in row.values()) for row in summary(results)]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [f"tier: {tier}"] if tier else []
    for row in [head, *rows]:
        lines.append(
            "  ".join(f"{v:<{w}}" if i == 0 else f"{v:>{w}}" for i, (v, w) in enumerate(zip(row, widths, strict=True)))
        )
    for result in results:
        if result.fault:
            said = result.escaped or f"{result.score.outcome.value} {result.score.reason} {result.score.detail[:100]}"
            lines.append(f"{result.fault}: {result.attack.category}/{result.attack.name} ({said.strip()})")
    return "\n".join(lines)


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Every program's result as JSON."""
    return [
        {
            "name": r.attack.name, "category": r.attack.category, "kind": r.attack.kind, "fault": r.fault,
            "escaped": r.escaped, "outcome": r.score.outcome.value, "reason": r.score.reason,
            "seconds": round(r.seconds, 3),
        }
        for r in results
    ]  # fmt: skip
