"""Run the attack suite on a verifier of code: does a program pass that solves nothing, does one escape?

    results = run_suite(resolve_reward("code"), HOSTILE + HONEST)

A *false pass* is an accepted program that does not solve its task. An *escape* is detected from outside, whatever the
verdict is. Every attack has its own canaries: a folder, a file with a secret, a secret in our environment, a listener,
a process to kill, and a process name to find one that stays alive. `Survivors` finds processes of any name after the
verifier was closed. *Unjudged* is a hostile program that made the verifier answer `error` or `invalid`: these carry no
reward, so they avoid a bad one.

The suite can damage a machine whose verifier does not isolate programs (one that runs them in this process, say): run
it on a machine that can be lost.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.audits.attacks import Attack
from rlvr.audits.process_tree import read_descendants, read_processes
from rlvr.core.cpu_budget import available_cores
from rlvr.core.types import Outcome, Score
from rlvr.reward.registry import Reward
from rlvr.reward.signatures import Case

REPEATS = 2  # a planting program runs this often, to reach several workers
SETTLE_S = 0.5  # how long to wait after an escape attempt: what it started or killed may take a moment
Judge = Callable[[str, dict[str, Any]], Score]


@dataclass(frozen=True)
class AttackResult:
    """One program's verdict. `escaped` describes the damage outside, "" for none."""

    attack: Attack
    score: Score
    seconds: float
    escaped: str = ""

    @property
    def fault(self) -> str:
        """The verifier's fault: false_pass, escape, rejected (an honest program), unjudged; "" for none."""
        if self.escaped:
            return "escape"
        if self.attack.kind == "honest":
            return "" if self.score.outcome is Outcome.PASSED else "rejected"
        if self.score.outcome is Outcome.PASSED:
            return "false_pass"
        return "unjudged" if self.score.value is None else ""


class Canaries:
    """Things outside the sandbox that an attack must not reach, and checks whether it did."""

    def __init__(self) -> None:
        self.mark = f"rl{secrets.token_hex(5)}"  # a process name has at most 15 characters
        self.secret = f"secret-{secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="rlvr-canary-"))
        self.folder.chmod(0o777)  # so that only the sandbox denies access
        self.file = self.folder / "secret.txt"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        os.environ[self.mark] = self.secret
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        # An empty environment: another thread's canaries may change ours between fork and exec.
        self.neighbour = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], env={})
        self._limits = self._neighbours_state()

    def __enter__(self) -> Canaries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(self, text: str) -> str:
        """Put the canaries into a program's places, such as @FOLDER@."""
        port = self.listener.getsockname()[1]
        places = {"FOLDER": self.folder, "FILE": self.file, "PORT": port, "PID": self.neighbour.pid, "MARK": self.mark}
        for name, value in (places | {"SECRET": self.secret}).items():
            text = text.replace(f"@{name}@", str(value))
        return text

    def task(self, task: dict[str, Any]) -> dict[str, Any]:
        tests = [self.fill(test) if isinstance(test, str) else test for test in task["tests"]]
        return {**task, "tests": tests}

    def _neighbours_state(self) -> str:
        """What another process could change of the neighbour: limits and priority, from the kernel."""
        try:
            limits = Path(f"/proc/{self.neighbour.pid}/limits").read_text()
            return f"{limits}{os.getpriority(os.PRIO_PROCESS, self.neighbour.pid)}"
        except OSError:
            return ""

    def describe_damage(self, score: Score | None = None) -> str:
        """What was reached so far, in words; "" for nothing."""
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
        if self._marked_processes():
            found.append("left a process alive")
        if score is not None and self.secret in score.detail:
            found.append("told a secret")
        return ", ".join(found)

    def _marked_processes(self) -> list[int]:
        """The ids of processes that carry our mark as name."""
        return [pid for pid, process in read_processes().items() if process.name == self.mark]

    def close(self) -> None:
        for pid in self._marked_processes():
            try:
                os.kill(pid, 9)
            except OSError:
                continue
        self.neighbour.kill()
        self.neighbour.wait()
        self.listener.close()
        os.environ.pop(self.mark, None)
        shutil.rmtree(self.folder, ignore_errors=True)


class Survivors:
    """Finds processes that were started below ours and still run. Meanwhile orphans become our children, not init's.

    Exact only after everything that was started on purpose was closed: a verifier's own workers are listed too.
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

    def list_alive(self, grace: float = 2.0) -> dict[int, str]:
        """The processes that are still alive after at most `grace` seconds: their names by process id."""
        end = time.monotonic() + grace
        was_empty = False
        while True:
            left = {pid: name for pid, name in _descendants().items() if pid not in self._before}
            # A process that forks and ends while /proc is read can be in neither list: one empty scan proves nothing.
            if (not left and was_empty) or (left and time.monotonic() > end):
                return left
            was_empty = not left
            time.sleep(0.05)


def _descendants() -> dict[int, str]:
    """The name by process id of everything alive below this process."""
    return {pid: process.name for pid, process in read_descendants().items() if pid != os.getpid()}


def as_judge(reward: Reward) -> Judge:
    """The reward as a function of one program and a task with tests, in the form of the reward `code`."""

    def judge(program: str, task: dict[str, Any]) -> Score:
        (score,) = reward.judge_all([Case("", program, task)])
        return score

    return judge


def try_attack(attack: Attack, judge: Judge) -> AttackResult:
    """Judge one program, after the programs that it needs judged before."""
    if attack.kind != "escape":
        for program in attack.before * REPEATS:
            judge(program, attack.task)
        start = time.perf_counter()
        scores = [judge(attack.program, attack.task) for _ in range(REPEATS if attack.before else 1)]
        worst = next((score for score in scores if score.outcome is Outcome.PASSED), scores[0])
        return AttackResult(attack, worst, time.perf_counter() - start)
    with Canaries() as outside:
        start = time.perf_counter()
        score = judge(outside.fill(attack.program), outside.task(attack.task))
        seconds = time.perf_counter() - start
        leaked = "told a secret" if "@SECRET@" in str(attack.task) and score.outcome is Outcome.PASSED else ""
        touched = outside.describe_damage(score)
        while not touched and attack.kind == "escape" and time.perf_counter() < start + seconds + SETTLE_S:
            time.sleep(0.05)
            touched = outside.describe_damage(score)
        return AttackResult(attack, score, seconds, touched or leaked)


def run_suite(
    reward: Reward,
    attacks: Sequence[Attack],
    workers: int | None = None,
    progress: Callable[[AttackResult], None] = lambda result: None,
) -> list[AttackResult]:
    """Try every attack, `workers` at a time (None: one per core); results in the given order."""
    judge = as_judge(reward)
    results: list[AttackResult] = []
    with ThreadPoolExecutor(workers or available_cores()) as pool:
        try:
            for result in pool.map(lambda attack: try_attack(attack, judge), attacks):
                results.append(result)
                progress(result)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


FAULTS = ("false_pass", "escape", "unjudged", "rejected")


def summarize_categories(results: Sequence[AttackResult]) -> list[dict[str, Any]]:
    """One row per category and one for all: the number of programs and of each fault, and the slowest program."""
    rows: list[dict[str, Any]] = []
    for category in [*dict.fromkeys(result.attack.category for result in results), "all"]:
        own = [result for result in results if category in (result.attack.category, "all")]
        row: dict[str, Any] = {"category": category, "programs": len(own)}
        row |= {fault: sum(result.fault == fault for result in own) for fault in FAULTS}
        rows.append(row | {"worst_seconds": round(max(result.seconds for result in own), 2)})
    return rows


def format_table(results: Sequence[AttackResult], tier: str = "") -> str:
    """The summary as text, and the programs at which the verifier was at fault."""
    head = ("category", "programs", "false passes", "escapes", "unjudged", "honest rejected", "worst s")
    rows = [tuple(str(value) for value in row.values()) for row in summarize_categories(results)]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [f"tier: {tier}"] if tier else []
    for row in [head, *rows]:
        lines.append(
            "  ".join(f"{v:<{w}}" if i == 0 else f"{v:>{w}}" for i, (v, w) in enumerate(zip(row, widths, strict=True)))
        )
    for result in results:
        if result.fault:
            what = result.escaped or f"{result.score.outcome.value} {result.score.reason} {result.score.detail[:100]}"
            lines.append(f"{result.fault}: {result.attack.category}/{result.attack.name} ({what.strip()})")
    return "\n".join(lines)


def list_rows(results: Sequence[AttackResult]) -> list[dict[str, Any]]:
    """Every program's result as JSON."""
    return [
        {
            "name": r.attack.name, "category": r.attack.category, "kind": r.attack.kind, "fault": r.fault,
            "escaped": r.escaped, "outcome": r.score.outcome.value, "reason": r.score.reason,
            "seconds": round(r.seconds, 3),
        }
        for r in results
    ]  # fmt: skip
