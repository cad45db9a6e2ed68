"""Hostile requests on a running `rlvr serve engine` or `rlvr serve`: how long everybody else waits meanwhile.

    python benchmarks/hostile_load.py engine --each                  # each request of the list alone
    python benchmarks/hostile_load.py service --each --only grade    # those whose name has this word
    python benchmarks/hostile_load.py engine --seconds 3600 --seed 1 # at random, beside two honest clients

A process of its own asks for the server's health every 50 ms on a kept connection. `--each` prints for every request of
`benchmarks/hostile_requests.py` its status, its seconds (with the result that it asks for), and the median and the
maximum of the probe meanwhile; the first line is an idle server's, of which the others are to be read. `--seconds` lets
`--clients` hostile clients, each with a key of its own, send requests of the list at random beside two honest clients:
on the engine server one samples and one trains, on the service one trains and one grades. It prints the waits of the
probe and of the honest clients, their errors, and the server's memory and descriptors. Exits with 1 if the maximum of
the probe is above `--most` seconds. Needs the extras [train,serve] and the repository's tests, and a machine without
other work.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit")]  # the servers that the tests start
from benchmarks.hostile_requests import (  # noqa: E402
    BATCH,
    JSON,
    PROTOBUF,
    Hostile,
    Tenant,
    engine_requests,
    row,
    service_requests,
)

PROBES = {"engine": "/api/v1/healthz", "service": "/health/live"}
EVERY = 0.05  # seconds between two probes
SETTLED = 0.3  # seconds before and after a request that count as its own
LATE = 0.1  # seconds: the aim for a probe
PATIENCE = 300.0  # seconds for an answer
PAUSE = 0.2  # seconds between two requests of an honest client
CONTEXT = 8_192
HONEST = ("tml-honest-one-01", "tml-honest-two-02")
Waits = list[tuple[float, float]]  # (when it was sent, seconds)
spawn = multiprocessing.get_context("spawn")


class Client:
    """One connection that is kept; a request that fails has status 0 and the error's name."""

    def __init__(self, port: int, key: str = "") -> None:
        self._port, self._headers = port, {"X-API-Key": key} if key else {}
        self._connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)

    def send(self, method: str, path: str, body: bytes = b"", content_type: str = "") -> tuple[int, bytes]:
        headers = {**self._headers, **({"Content-Type": content_type} if content_type else {})}
        try:
            self._connection.request(method, path, body or None, headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            self._connection = self._connect()
            return 0, type(error).__name__.encode()


def probe(port: int, path: str, results: Any) -> None:
    """Ask every `EVERY` seconds, for as long as there is a parent."""
    client = Client(port)
    while True:
        began = time.monotonic()
        status, _ = client.send("GET", path)
        took = time.monotonic() - began
        results.send((began, took, status))
        time.sleep(max(0.0, EVERY - took))


class Receiver:
    """What a process sends, as it comes: (when it was sent, seconds, status)."""

    def __init__(self, run: Callable[..., None], *args: Any) -> None:
        receiving, sending = spawn.Pipe(duplex=False)
        self._process = spawn.Process(target=run, args=(*args, sending), daemon=True)
        self._process.start()
        sending.close()
        self.waits: Waits = []
        self.statuses: collections.Counter[int] = collections.Counter()
        self._thread = threading.Thread(target=self._receive, args=(receiving,), daemon=True)
        self._thread.start()

    def _receive(self, receiving: Any) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                began, took, status = receiving.recv()
                self.waits.append((began, took))
                self.statuses[status] += 1

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._thread.join()


def tenant(port: int, key: str, kind: str) -> Tenant:
    made = Tenant(key, Client(port, key).send)
    if kind == "engine":
        made.open_session()
    return made


def send_hostile(hostile: Hostile, sender: Tenant, body: bytes) -> int:
    """The status of its answer, or of its result if it waits for one."""
    status, answer = sender.send(hostile.method, hostile.path, body, hostile.content_type)
    if hostile.waits and status == 200:
        status, _ = sender.wait(json.loads(answer)["request_id"])
    return status


def attack(port: int, kind: str, key: str, seed: int, only: str, results: Any) -> None:
    chosen, draw, sender = requests(kind, only), random.Random(seed), tenant(port, key, kind)
    while True:
        hostile = draw.choice(chosen)
        body = hostile.make(sender)
        began = time.monotonic()
        status = send_hostile(hostile, sender, body)
        results.send((began, time.monotonic() - began, status))


def be_honest(port: int, kind: str, number: int, results: Any) -> None:
    """A client that sends one request after the other, and waits for each."""
    ask = honest_request(port, kind, number)
    while True:
        began = time.monotonic()
        status = ask()
        results.send((began, time.monotonic() - began, status))
        time.sleep(PAUSE)


def honest_request(port: int, kind: str, number: int) -> Callable[[], int]:
    client = tenant(port, HONEST[number], kind)
    if kind == "service":
        trains = {"task_id": "honest", "prompt": "Say something.", "max_iterations": 2}
        grades = {"prompt": "12 * 12?", "answer": "144", "answers": ["\\boxed{144}", "\\boxed{146}"]}
        path, body = ("/grade", grades) if number else ("/train", trains)
        return lambda: client.send("POST", path, json.dumps(body).encode(), JSON)[0]
    if not number:
        body = {"model": "model", "prompt": list(range(16)), "max_tokens": 8}
        return lambda: client.send("POST", "/v1/completions", json.dumps(body).encode(), JSON)[0]
    run, steps = client.open_run(), iter(range(1, sys.maxsize, 2))

    def train() -> int:
        from rlvr.tinker_server.protocol import proto

        seq = next(steps)
        rows = proto.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy", data=[row(32)] * 4)
        step = {"model_id": run, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-4}}
        for path, body, form in (
            (BATCH, rows.SerializeToString(), PROTOBUF),
            ("/api/v1/optim_step", json.dumps(step).encode(), JSON),
        ):
            status, answer = client.send("POST", path, body, form)
            if status != 200:
                return status
            status, answer = client.wait(json.loads(answer)["request_id"])
            if status != 200 or answer.startswith(b'{"error"'):
                return status if status != 200 else 500
        return 200

    return train


def requests(kind: str, only: str) -> list[Hostile]:
    found = [one for one in (engine_requests() if kind == "engine" else service_requests()) if only in one.name]
    if not found:
        raise SystemExit(f"--only {only!r}: no request has this in its name")
    return found


@contextlib.contextmanager
def running_server(kind: str, keys: Sequence[str], words: Sequence[str] = ()) -> Iterator[Any]:
    """A server in a new interpreter, with a random model or a scripted endpoint."""
    from benchmarks.service_load import endpoint
    from benchmarks.tinker_server import write_random
    from tests.kit.rlvr_service import RlvrService
    from tests.kit.server_process import FRESH
    from tests.kit.tinker_server import TinkerServer

    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        state = Path(scratch) / "state"
        if kind == "engine":
            write_random(Path(scratch) / "model", "3m", CONTEXT)
            server: Any = TinkerServer({"model": Path(scratch) / "model"}, state, *words, keys=",".join(keys))
        else:
            unlimited: Any = {"RLVR_REQUESTS_PER_MINUTE": "0", "RLVR_READS_PER_MINUTE": "0", "RLVR_LOG": "warning"}
            url = stack.enter_context(endpoint(0.05))
            server = RlvrService(state, keys=",".join(keys), LLM_ENDPOINT=url, **unlimited)
        server.command = FRESH  # a fork of a process of the tests would have other figures
        with server:
            yield server


def report_each(kind: str, server: Any, prober: Receiver, only: str) -> float:
    sender, largest = tenant(server.port, "tml-mallory-0001", kind), 0.0
    print(f"{'request':<52} {'status':>6} {'seconds':>8} {'probe median':>13} {'maximum':>9}")
    print_row("an idle server", *measure_probe(prober, partial(time.sleep, 5.0)))
    for hostile in requests(kind, only):
        body = hostile.make(sender)
        status, *found = measure_probe(prober, partial(send_hostile, hostile, sender, body))
        print_row(hostile.name, status, *found)
        largest = max(largest, found[-1])
    return largest


def measure_probe(prober: Receiver, act: Callable[[], Any]) -> tuple[Any, float, float, float]:
    """What an act returns, its seconds, and the median and maximum of the probes meanwhile."""
    time.sleep(SETTLED)
    first, began = len(prober.waits), time.monotonic()
    result = act()
    ended = time.monotonic()
    while not prober.waits or prober.waits[-1][0] < ended + SETTLED:  # also the one that is on its way
        time.sleep(EVERY)
    seconds = [took for at, took in prober.waits[max(0, first - 1) :] if at + took >= began]
    return result, ended - began, statistics.median(seconds), max(seconds)


def print_row(name: str, status: int | None, seconds: float, median: float, largest: float) -> None:
    shown = "-" if status is None else status
    print(f"{name:<52} {shown:>6} {seconds:8.2f} {1e3 * median:10.1f} ms {1e3 * largest:6.0f} ms", flush=True)


def report_mixed(kind: str, server: Any, prober: Receiver, seconds: float, clients: int, seed: int, only: str) -> float:
    honest = {
        name: Receiver(be_honest, server.port, kind, number)
        for number, name in enumerate(("samples", "trains") if kind == "engine" else ("trains", "grades"))
    }
    time.sleep(min(10.0, seconds / 4))
    alone, started, size = time.monotonic(), resources(server), len(prober.waits)
    for name, receiver in honest.items():
        print_waits(f"honest client that {name}, alone", receiver.waits)
    print_waits("probe beside the honest clients", prober.waits)
    hostile = [
        Receiver(attack, server.port, kind, f"tml-mallory-{number:04d}", seed + number, only)
        for number in range(1, clients + 1)
    ]
    peak, until = started, time.monotonic() + seconds
    ended = started
    while time.monotonic() < until:
        time.sleep(min(1.0, seconds / 10))
        try:
            ended = resources(server)
        except (OSError, StopIteration):
            print(f"THE SERVER ENDED after {time.monotonic() - alone:.0f} s; its last memory: {ended[0]:.0f} MB")
            return math.inf
        peak = tuple(map(max, peak, ended))
    for receiver in hostile:
        receiver.end()
    time.sleep(min(60.0, seconds / 4))
    largest = print_waits("probe", prober.waits[size:])
    for name, receiver in honest.items():
        print_waits(f"honest client that {name}", [wait for wait in receiver.waits if wait[0] > alone])
        receiver.end()
        print(f"  its statuses: {dict(receiver.statuses)}")
    for number, receiver in enumerate(hostile, 1):
        print(f"hostile client {number}: {dict(sorted(receiver.statuses.items()))}")
    for name, found in (("start", started), ("peak", peak), ("end", ended), ("later", resources(server))):
        print(f"{name:<6} {found[0]:7.0f} MB {found[1]:6.0f} descriptors")
    return largest


def print_waits(name: str, waits: Waits) -> float:
    """Print the waits; returns the longest."""
    seconds = [took for _, took in waits]
    if len(seconds) < 2:
        print(f"{name:<40} {len(seconds)} answers")
        return math.inf
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    largest = max(seconds)
    print(
        f"{name:<40} {len(seconds):7,} answers   median {1e3 * p50:7.1f} ms   99 % {1e3 * p99:7.1f} ms   "
        f"maximum {1e3 * largest:7.0f} ms   {sum(one > LATE for one in seconds):,} above {1e3 * LATE:.0f} ms",
        flush=True,
    )
    return largest


def resources(server: Any) -> tuple[float, float]:
    """Memory in MB, and open descriptors."""
    return server.memory_mb(), float(len(os.listdir(f"/proc/{server.pid}/fd")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(PROBES))
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="requests whose name has this in it")
    parser.add_argument("--most", type=float, default=LATE, help="seconds that the probe may wait")
    parser.add_argument("words", nargs="*", help="settings of the engine server, such as limits.cache_share=0.2")
    given = parser.parse_intermixed_args()
    if given.each == (given.seconds > 0):
        parser.error("give --each, or --seconds N")
    if given.words and given.kind != "engine":
        parser.error(f"{given.words[0]}: settings are taken for the engine server alone; leave them out")
    keys = [*HONEST, *(f"tml-mallory-{number:04d}" for number in range(1, given.clients + 1))]
    with running_server(given.kind, keys, given.words) as server:
        prober = Receiver(probe, server.port, PROBES[given.kind])
        if given.each:
            largest = report_each(given.kind, server, prober, given.only)
        else:
            largest = report_mixed(given.kind, server, prober, given.seconds, given.clients, given.seed, given.only)
        prober.end()
    print(f"statuses of the probe: {dict(prober.statuses)}")
    print(f"the longest probe beside hostile requests: {1e3 * largest:.0f} ms")
    return int(largest > given.most)


if __name__ == "__main__":
    sys.exit(main())
