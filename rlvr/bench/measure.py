"""Ours and its peers in turns, each in a process of its own: what a benchmark is made of, and how it is measured.

A benchmark module has `cases(setting) -> list[Case]`. A `Case` names two or more sides. A side is a function without
arguments that is called once, in its own process with the pinned threads: it sets up and returns its turn, a function
without arguments that does the work once and returns what it did (`Done`). Sides cross into their process by pickle: a
module's function, or `functools.partial` of one. The modules import torch and peers inside their sides only, and a
peer's side first lets torch's threads wait as they do without us (`rlvr.cores.loud_threads`).

    def ours(setting: Setting) -> Turn:
        model = build()
        def turn() -> Done:
            return Done(units=model.work())
        return turn

A turn may time itself where not all of it counts (`Done.seconds`). One turn of every side is warm-up; then each round
takes a turn of every side, in alternating order, so that a busy machine is busy for all. A side whose peer package is
missing is skipped by name; one that fails is reported and the others go on. Exercised by `tests/test_bench.py`; what
becomes of the figures is in `rlvr.bench.report`.
"""

from __future__ import annotations

import functools
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


class Absent(Exception):
    """What a side raises that cannot be on this machine, and why: it is left out, and nothing has failed."""


@dataclass(frozen=True)
class Setting:
    """What the user asked for. `model` is a folder that replaces the built models where a benchmark can use it."""

    quick: bool = False
    rounds: int = 3
    threads: int = 1
    model: Path | None = None
    dtype: str = "float32"
    scratch: Path = Path()  # a folder of this run, where the sides find what one of them made


@dataclass(frozen=True)
class Done:
    """What one turn did: `units` of the case's unit, in `seconds` (None: the whole turn).

    `cost` is the arithmetic this side asked of the machine for it, in any unit that all sides of the case share
    (token-FLOPs): the ratio of costs bounds what can be won. `facts` are figures to report, by name; `points` are
    (seconds since the turn began, value) pairs of a curve.
    """

    units: float
    seconds: float | None = None
    cost: float = 0.0
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    points: tuple[tuple[float, float], ...] = ()


Turn = Callable[[], Done]
Side = Callable[[], Turn]


@dataclass(frozen=True)
class Case:
    """`ours` and `peers` do the same `work`, counted in `unit`.

    `aim` is the ratio of rates (ours over a peer's) that is aimed at; with `of_bound` it is that share of the bound,
    the ratio of the sides' costs. With `growth` the sides are ours at growing sizes, and the ratio is how much longer
    a unit takes than at the first size: at most 1 is aimed at. `curve` names what `Done.points` show. `most_rounds`
    are enough where a turn takes minutes; 0 for as many as the user asks for.
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
    most_rounds: int = 0

    @property
    def sides(self) -> dict[str, Side]:
        return {self.ours_name: self.ours, **self.peers}


@dataclass
class Measured:
    """One side's turns; `absent` says why there are none, or why they end early."""

    turns: list[Done] = field(default_factory=list[Done])
    warm: Done | None = None
    peak_bytes: int = 0
    ready_bytes: int = 0  # the process before its first turn: libraries and weights
    absent: str = ""
    failed: bool = False

    @property
    def rates(self) -> list[float]:
        return [done.units / done.seconds for done in self.turns if done.seconds]


@dataclass
class Result:
    """A case and what was measured of it; `interrupted` where the user stopped before the last round."""

    case: Case
    sides: dict[str, Measured]
    interrupted: bool = False

    def ratios(self, peer: str) -> list[float]:
        """Ours over the peer's rate, round by round."""
        pairs = zip(self.sides[self.case.ours_name].rates, self.sides[peer].rates, strict=False)
        return [ours / theirs for ours, theirs in pairs]

    def bound(self, peer: str) -> float | None:
        """How many times the peer's arithmetic a unit costs ours; None where the sides do not count it."""
        ours, theirs = ([d.cost / d.units for d in self.sides[n].turns] for n in (self.case.ours_name, peer))
        if not all((*ours, *theirs)) or not ours or not theirs:
            return None
        return statistics.median(theirs) / statistics.median(ours)


def measure(case: Case, rounds: int, threads: int, say: Callable[[str], None]) -> Result:
    """All rounds of a case. Ctrl-C ends it and keeps what was measured."""
    result = Result(case, {name: Measured() for name in case.sides})
    rounds = min(rounds, case.most_rounds or rounds)
    runners: dict[str, Runner] = {}
    try:
        for name, side in case.sides.items():
            if result.sides[case.ours_name].failed:
                result.sides[name].absent = f"not tried: {case.ours_name} failed"
                continue
            runners[name] = Runner(side, threads)
            _start(name, runners[name], result.sides[name], say)
        for number in range(rounds):
            order = list(case.sides) if number % 2 == 0 else list(case.sides)[::-1]
            for name in order:
                if not result.sides[name].absent:
                    _turn(runners[name], result.sides[name])
            told = ", ".join(f"{n} {m.rates[-1]:.4g}" for n, m in result.sides.items() if m.rates and not m.absent)
            say(f"{case.name}: round {number + 1}/{rounds}: {told} {case.unit}/s")
    except KeyboardInterrupt:
        result.interrupted = True
        say(f"{case.name}: stopped; what was measured is kept")
    finally:
        for runner in runners.values():
            runner.close(at_once=result.interrupted)
    return result


def _start(name: str, runner: Runner, measured: Measured, say: Callable[[str], None]) -> None:
    """Wait until the side is set up, then its warm-up turn: what is built, compiled or cached once is not measured."""
    kind, *rest = runner.read()
    if kind == "ready":
        measured.ready_bytes = rest[0]
        _turn(runner, measured, warm=True)
    else:
        measured.absent, measured.failed = rest[0], kind == "failed"
    if measured.absent:
        say(f"{name} is left out: {measured.absent}")


def _turn(runner: Runner, measured: Measured, warm: bool = False) -> None:
    kind, *rest = runner.ask()
    if kind != "did":
        measured.absent, measured.failed = rest[0], kind == "failed"
        return
    done, measured.peak_bytes = rest
    if warm:
        measured.warm = done
    else:
        measured.turns.append(done)


class Runner:
    """A side in its own process, which waits between its turns and takes no core meanwhile."""

    def __init__(self, side: Side, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._log = tempfile.NamedTemporaryFile(prefix="rlvr-bench-", suffix=".log")  # noqa: SIM115 - closed with it
        self._process = context.Process(target=_serve, args=(theirs, side, self._log.name), daemon=False)
        with _inherited(threads):
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

    def ask(self) -> tuple[Any, ...]:
        with suppress(BrokenPipeError):  # it is dead: reading says how
            self._pipe.send("turn")
        return self.read()

    def close(self, at_once: bool = False) -> None:
        """An idle side ends by itself when the pipe closes; one that is busy, or `at_once` any, is ended."""
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
def _inherited(threads: int) -> Iterator[None]:
    """What a new process takes over: the number of threads, and that Ctrl-C is for its parent alone."""
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
    """The process of one side: sets up, then a turn for every word. Its prints go to `log`."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    # A spawned process spawns by default too: peers that start processes would be slower than they are in a program.
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
                done = Done(done.units, seconds, done.cost, done.facts, done.points)
            pipe.send(("did", done, peak_bytes()))
    except ModuleNotFoundError as error:
        pipe.send(("absent", f"{error.name}: not installed; {EXTRA}"))
    except Absent as reason:
        pipe.send(("absent", str(reason)))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


def peak_bytes() -> int:
    """The most memory that this process has held at once."""
    with suppress(OSError):  # not `ru_maxrss`: a new process inherits that of the one that started it
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def repeated(work: Callable[[], Any], units: float, times: int = 1, cost: float = 0.0) -> Turn:
    """The turn that does `work` so many times, `units` each."""
    return functools.partial(_repeat, work, units, times, cost)


def _repeat(work: Callable[[], Any], units: float, times: int, cost: float) -> Done:
    for _ in range(times):
        work()
    return Done(units * times, cost=cost * times)
