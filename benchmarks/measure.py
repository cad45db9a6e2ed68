"""The harness: runs this package and its peers in turns, each in a process of its own.

A benchmark module has `cases(setting) -> list[BenchmarkCase]`. A case names two or more sides. A side is a function
without arguments, called once in its own process with a fixed number of threads: it sets up and returns its turn, a
function without arguments that does the work once and returns a `TurnResult`. Sides are pickled: a module's function,
or a `functools.partial` of one. Modules import torch and peers inside their sides only; a peer's side first calls
`rlvr.core.cpu_budget.restore_spinning`, so that torch's threads wait as they do without this package.

    def ours(setting: BenchSettings) -> Turn:
        model = build()
        def turn() -> TurnResult:
            return TurnResult(units=model.work())
        return turn

A turn may time itself if only a part of it counts (`TurnResult.seconds`). The first turn of every side is a warm-up;
then each round takes one turn of every side, in alternating order, so that other load on the machine affects all of
them. A side whose package is missing is skipped by name; one that fails is reported, and the others go on.
`benchmarks.report` writes the results.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXTRA = "pip install 'rlvr[bench]'"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class SideUnavailable(Exception):
    """Raised by a side that cannot run on this machine, with the reason: it is skipped without an error."""


@dataclass(frozen=True)
class BenchSettings:
    """The options of `rlvr bench`. `model` is a folder used instead of the random models, `data` a file of rows."""

    quick: bool = False
    rounds: int = 3
    threads: int = 1
    model: Path | None = None
    dtype: str = "float32"
    data: Path | None = None
    scratch: Path = Path()  # a folder of this run, which its sides share


@dataclass(frozen=True)
class TurnResult:
    """What one turn did: `units` of the case's unit, in `seconds` (None: the whole turn).

    `cost` is the arithmetic that this took, in a unit that all sides of the case share (token passes): the ratio of the
    costs bounds the speedup. `facts` are figures to report, by name; `points` are (seconds since the turn began, value)
    pairs of a curve.
    """

    units: float
    seconds: float | None = None
    cost: float = 0.0
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    points: tuple[tuple[float, float], ...] = ()


Turn = Callable[[], TurnResult]
Side = Callable[[], Turn]


@dataclass(frozen=True)
class BenchmarkCase:
    """`ours` and `peers` do the same `work`, counted in `unit`.

    `aim` is the target for the ratio of rates (ours over a peer's); with `of_bound`, for its share of the bound (the
    ratio of the sides' costs). With `growth` the sides are ours at growing sizes, and the ratio is how much longer a
    unit takes than at the first size; the target is at most 1. `curve` names what `TurnResult.points` show; the report
    says when each side first reaches each of the `targets` on it.
    `most_rounds` limits the rounds of a case whose turns take minutes (0: no limit).
    """

    name: str
    unit: str
    work: str
    ours: Side
    peers: Mapping[str, Side]
    ours_name: str = "rlvr"
    aim: float | None = None
    of_bound: bool = False
    growth: bool = False
    curve: str = ""
    targets: tuple[float, ...] = ()
    most_rounds: int = 0

    @property
    def sides(self) -> dict[str, Side]:
        return {self.ours_name: self.ours, **self.peers}


@dataclass
class SideResult:
    """One side's turns; `absent` is the reason why there are none, or why they end early."""

    turns: list[TurnResult] = field(default_factory=list[TurnResult])
    warm: TurnResult | None = None
    peak_bytes: int = 0
    ready_bytes: int = 0  # the process before its first turn: libraries and weights
    absent: str = ""
    failed: bool = False

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The points of all turns, from the warm-up on, over the seconds of this side's own turns."""
        points, gone = list[tuple[float, float]](), 0.0
        for done in (*([self.warm] if self.warm else []), *self.turns):
            points += ((gone + at, value) for at, value in done.points)
            gone += done.seconds or 0.0
        return points

    @property
    def rates(self) -> list[float]:
        return [done.units / done.seconds for done in self.turns if done.seconds]


@dataclass
class CaseResult:
    """A case and its measurements; `interrupted` if the user stopped before the last round."""

    case: BenchmarkCase
    sides: dict[str, SideResult]
    interrupted: bool = False

    def ratios(self, peer: str) -> list[float]:
        """Ours over the peer's rate, round by round."""
        pairs = zip(self.sides[self.case.ours_name].rates, self.sides[peer].rates, strict=False)
        return [ours / theirs for ours, theirs in pairs]

    def bound(self, peer: str) -> float | None:
        """The peer's arithmetic for a unit over ours; None if the sides do not count it."""
        ours, theirs = ([d.cost / d.units for d in self.sides[n].turns] for n in (self.case.ours_name, peer))
        if not all((*ours, *theirs)) or not ours or not theirs:
            return None
        return statistics.median(theirs) / statistics.median(ours)


def measure(case: BenchmarkCase, rounds: int, threads: int, say: Callable[[str], None]) -> CaseResult:
    """Run all rounds of a case. Ctrl-C stops it and keeps what was measured."""
    result = CaseResult(case, {name: SideResult() for name in case.sides})
    rounds = min(rounds, case.most_rounds or rounds)
    runners: dict[str, SideProcess] = {}
    try:
        for name, side in case.sides.items():
            if result.sides[case.ours_name].failed:
                result.sides[name].absent = f"not tried: {case.ours_name} failed"
                continue
            runners[name] = SideProcess(side, threads)
            _warm_up(name, runners[name], result.sides[name], say)
        for number in range(rounds):
            order = list(case.sides) if number % 2 == 0 else list(case.sides)[::-1]
            for name in order:
                if not result.sides[name].absent:
                    _run_turn(runners[name], result.sides[name])
            rates = ", ".join(f"{n} {m.rates[-1]:.4g}" for n, m in result.sides.items() if m.rates and not m.absent)
            say(f"{case.name}: round {number + 1}/{rounds}: {rates} {case.unit}/s")
    except KeyboardInterrupt:
        result.interrupted = True
        say(f"{case.name}: stopped; what was measured is kept")
    finally:
        for runner in runners.values():
            runner.close(at_once=result.interrupted)
    return result


def _warm_up(name: str, runner: SideProcess, measured: SideResult, say: Callable[[str], None]) -> None:
    """Wait for the side's setup and run its warm-up turn, so that one-time work is not measured."""
    kind, *rest = runner.read()
    if kind == "ready":
        measured.ready_bytes = rest[0]
        _run_turn(runner, measured, warm=True)
    else:
        measured.absent, measured.failed = rest[0], kind == "failed"
    if measured.absent:
        say(f"{name} is left out: {measured.absent}")


def _run_turn(runner: SideProcess, measured: SideResult, warm: bool = False) -> None:
    kind, *rest = runner.run_turn()
    if kind != "did":
        measured.absent, measured.failed = rest[0], kind == "failed"
        return
    done, measured.peak_bytes = rest
    if warm:
        measured.warm = done
    else:
        measured.turns.append(done)


class SideProcess:
    """A side in its own process. Between its turns it waits and uses no core."""

    def __init__(self, side: Side, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._log = tempfile.NamedTemporaryFile(prefix="rlvr-bench-", suffix=".log")  # noqa: SIM115 - closed with it
        self._process = context.Process(target=_serve, args=(theirs, side, self._log.name), daemon=False)
        with _child_environment(threads):
            self._process.start()
        theirs.close()

    def read(self) -> tuple[Any, ...]:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            lines = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = f"; its last words: {lines[-1]}" if lines else ""
            return "failed", f"its process ended with exit code {self._process.exitcode}{last}"

    def run_turn(self) -> tuple[Any, ...]:
        with suppress(BrokenPipeError):  # the process has ended: read() reports how
            self._pipe.send("turn")
        return self.read()

    def close(self, at_once: bool = False) -> None:
        """Close the pipe, which ends an idle side; terminate one that is busy, or with `at_once` any."""
        self._pipe.close()
        self._process.join(timeout=0 if at_once else 5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._log.close()


@contextmanager
def _child_environment(threads: int) -> Iterator[None]:
    """Set what a new process inherits: the number of threads, and an ignored SIGINT (the parent handles Ctrl-C)."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, str(threads)))
    main = threading.current_thread() is threading.main_thread()  # only there may handlers be set
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Any, side: Side, log: str) -> None:
    """The process of one side: set up, then run a turn for each message. Its output goes to `log`."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    # A spawned process would spawn its own children too, which slows peers that start processes.
    multiprocessing.set_start_method(None, force=True)  # pyright: ignore[reportArgumentType] - None is its default
    try:
        turn = side()
        pipe.send(("ready", peak_bytes()))
        while True:
            try:
                pipe.recv()
            except EOFError:
                break
            began = time.perf_counter()
            done = turn()
            seconds = time.perf_counter() - began
            if done.seconds is None:
                done = TurnResult(done.units, seconds, done.cost, done.facts, done.points)
            pipe.send(("did", done, peak_bytes()))
    except ModuleNotFoundError as error:
        pipe.send(("absent", f"{error.name}: not installed; {EXTRA}"))
    except SideUnavailable as reason:
        pipe.send(("absent", str(reason)))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


def peak_bytes() -> int:
    """The peak resident memory of this process."""
    with suppress(OSError):  # not `ru_maxrss`, which a new process inherits from its parent
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
