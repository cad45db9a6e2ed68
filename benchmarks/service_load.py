"""Many clients on a running `rlvr serve`: requests per second, latencies, errors, and whether its memory grows.

    python benchmarks/service_load.py                 # 200 readers and 20 trainers for a minute
    python benchmarks/service_load.py --seconds 15 --readers 0 --trainers 1 8 32
    PYTHONPATH=OTHER python CLONE/benchmarks/service_load.py    # from a third folder: the service of the clone OTHER

Readers request /health, /stats and /experiences in turn; trainers POST /train and wait. Each client sends its next
request as soon as it has a response. The generator is a scripted endpoint in its own process, so the figures cover the
service, the clients and the endpoint on the same cores. Exits with 1 if a request failed or if the service's memory at
the end is above 1.1 times that after 10 seconds. Needs the extra [serve] and the repository's tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit")]  # the servers that the tests start
ANSWER = "An answer of some length, which the rules accept, after two or three sentences of it."
READS = ("/health", "/stats", "/experiences/load?limit=20")
MOST_GROWTH = 1.1
SETTLED = 10.0  # seconds until memory is first measured


class LoadClient:
    """One connection that is used again; minimal HTTP, since the clients share the service's cores."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> int:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        assert self._reader is not None
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = next(int(line.split(":")[1]) for line in answer.split("\r\n") if line.startswith("content-length:"))
        await self._reader.readexactly(length)
        return int(answer.split()[1])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Tally:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.errors: dict[str, int] = defaultdict(int)

    async def loop(self, port: int, until: float, requests: list[tuple[str, str, bytes]]) -> None:
        client, number = LoadClient(port), 0
        try:
            while time.perf_counter() < until:
                method, path, body = requests[number % len(requests)]
                name, number, began = f"{method} {path.partition('?')[0]}", number + 1, time.perf_counter()
                try:
                    status = await client.ask(method, path, body)
                except (OSError, asyncio.IncompleteReadError) as error:
                    self.errors[f"{name}: {type(error).__name__}"] += 1
                    client.close()
                    client = LoadClient(port)
                    continue
                self.seconds[name].append(time.perf_counter() - began)
                if status != 200:
                    self.errors[f"{name}: {status}"] += 1
        finally:
            client.close()


@contextlib.contextmanager
def endpoint(delay: float) -> Iterator[str]:
    """Run a scripted text endpoint in its own process; yields its URL."""
    code = (
        f"import sys, time; sys.path[:0] = {sys.path[:2]!r}\n"
        "from tests.kit.text_endpoint import EndpointReply, serving\n"
        f"with serving(lambda asked: EndpointReply({ANSWER!r}, delay={delay})) as server:\n"
        "    print(server.plain_url, flush=True)\n    time.sleep(1e6)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def cpu_per_session(service: Any, sessions: int = 100) -> float:
    """The CPU seconds of the service for a session of three iterations with a known answer, one after the other."""
    wrong = {"task_id": "cpu", "prompt": "What is 2 + 2?", "answer": "4", "max_iterations": 3}
    with service.client() as client:
        for number in range(2 * sessions):  # the first half is needed before the strategies learn
            if number == sessions:
                began = service.cpu_seconds()
            assert client.post("/train", json=wrong).json()["iterations"] == 3
    return (service.cpu_seconds() - began) / sessions


async def load(service: Any, readers: int, trainers: int, seconds: float) -> tuple[Tally, list[float]]:
    tally, until = Tally(), time.perf_counter() + seconds
    task = json.dumps({"task_id": "load", "prompt": "Say something.", "max_iterations": 3}).encode()
    asks = [[("GET", path, b"") for path in (*READS[i % 3 :], *READS[: i % 3])] for i in range(readers)]
    asks += [[("POST", "/train", task)]] * trainers
    running = asyncio.gather(*(tally.loop(service.port, until, one) for one in asks))
    memory: list[float] = []
    for moment in (min(SETTLED, seconds / 2), seconds):
        await asyncio.sleep(max(0.0, moment - (seconds - (until - time.perf_counter()))))
        memory.append(service.memory_mb())
    await running
    return tally, memory


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--readers", type=int, default=200)
    options.add_argument("--trainers", type=int, default=[20], nargs="+", help="one load after the other")
    options.add_argument("--delay", type=float, default=0.05, help="seconds that the endpoint takes for an answer")
    given = options.parse_args()
    from tests.kit.rlvr_service import RlvrService
    from tests.kit.server_process import FRESH

    unlimited: dict[str, Any] = {"RLVR_REQUESTS_PER_MINUTE": "0", "RLVR_READS_PER_MINUTE": "0", "RLVR_LOG": "warning"}
    with tempfile.TemporaryDirectory() as folder, endpoint(given.delay) as url, contextlib.ExitStack() as stack:
        service = RlvrService(Path(folder), LLM_ENDPOINT=url, **unlimited)
        service.command = FRESH  # a fork of a process of the tests would have other figures
        stack.enter_context(service)
        print(f"ready after {service.started_after:.2f} s, {service.memory_mb():.0f} MB at rest")
        assert service.post("/train", {"task_id": "load", "prompt": "Say something."}).status_code == 200
        print(f"a session of three iterations: {1e3 * cpu_per_session(service):.1f} ms of CPU")
        failed = [report(service, given.readers, trainers, given.seconds) for trainers in given.trainers]
        print(f"answers in the store: {service.get('/experiences/load?limit=1').json()['count']:,}")
    return int(any(failed))


def report(service: Any, readers: int, trainers: int, seconds: float) -> bool:
    """Print what a load gives; whether a request failed or the memory grew."""
    began = service.cpu_seconds()
    tally, memory = asyncio.run(load(service, readers, trainers, seconds))
    cpu, done = service.cpu_seconds() - began, sum(map(len, tally.seconds.values()))
    print(
        f"{readers} readers, {trainers} trainers for {seconds:g} s: {done / seconds:,.1f} /s, {cpu / seconds:.0%} CPU"
    )
    for name, times in sorted(tally.seconds.items()):
        cuts = statistics.quantiles(times, n=100) if len(times) > 1 else [times[0]] * 99
        p50, p95, p99 = (1e3 * cuts[at] for at in (49, 94, 98))
        print(f"  {name:<22} {len(times) / seconds:7.1f}/s   p50 {p50:6.0f} ms   p95 {p95:6.0f} ms   p99 {p99:6.0f} ms")
    growth, early = memory[1] / memory[0], min(SETTLED, seconds / 2)
    print(f"memory {memory[0]:.0f} MB after {early:g} s, {memory[1]:.0f} MB at the end: x {growth:.3f}")
    print(f"errors: {dict(tally.errors) or 'none'}")
    return bool(tally.errors) or growth > MOST_GROWTH


if __name__ == "__main__":
    sys.exit(main())
