"""Thousands of connections, runs and sessions of one owner on a running server, and what others notice.

    python benchmarks/hostile_numbers.py engine          # every scenario, on one server after the other
    python benchmarks/hostile_numbers.py service --only half-sent --count 3000

Each scenario prints how long the probe of `benchmarks/hostile_load.py` and an honest client waited
meanwhile, and the server's memory and descriptors before it, at the peak, and `--settle` seconds after its end.
Connections are of a process of their own. Needs what that benchmark needs.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from hostile_load import PROBES, Receiver, be_honest, print_waits, probe, resources, running_server, spawn, tenant

CREATE, BATCH = "/api/v1/create_session", "/api/v1/forward_backward"
COMPLETIONS, TRAIN, GRADE = "/v1/completions", "/train", "/grade"
KEYS = [f"tml-mallory-{number:04d}" for number in range(8)]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Statuses = collections.Counter[str]


def head(method: str, path: str, length: int = 0, key: str = KEYS[0]) -> bytes:
    keyed = f"X-API-Key: {key}\r\n" if key else ""
    form = "application/x-protobuf" if path == BATCH else "application/json"
    lines = f"Host: 127.0.0.1\r\n{keyed}Content-Type: {form}\r\nContent-Length: {length}"
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n\r\n".encode()


async def on_each(port: int, count: int, act: Callable[[int, Connection], Awaitable[str]]) -> Statuses:
    """Call `act` for as many connections at once; counts what it returns, or how it failed."""

    async def one(number: int) -> str:
        writer = None
        try:
            connection = await asyncio.open_connection("127.0.0.1", port)
            writer = connection[1]
            return await act(number, connection)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            return type(error).__name__
        finally:
            if writer is not None:
                writer.transport.abort()

    return collections.Counter(await asyncio.gather(*(one(number) for number in range(count))))


async def status_of(reader: asyncio.StreamReader, seconds: float) -> str:
    """The status of an answer, or `none` if there is none so soon."""
    try:
        async with asyncio.timeout(seconds):
            line = await reader.readline()
    except TimeoutError:
        return "none"
    return line.split()[1].decode() if line else "closed"


async def half_sent(port: int, count: int, path: str, announced: int, sent: int, keys: list[str]) -> Statuses:
    part = b" " * sent

    async def act(number: int, connection: Connection) -> str:
        reader, writer = connection
        writer.write(head("POST", path, announced, keys[number % len(keys)]) + part)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await writer.drain()
        return await status_of(reader, 75)

    return await on_each(port, count, act)


async def idle(port: int, count: int) -> Statuses:
    async def act(number: int, connection: Connection) -> str:
        return await status_of(connection[0], 20)

    return await on_each(port, count, act)


async def slow_readers(port: int, count: int, request: bytes) -> Statuses:

    async def act(number: int, connection: Connection) -> str:
        reader, writer = connection
        writer.transport.get_extra_info("socket").setsockopt(1, 8, 4_096)  # SO_RCVBUF
        writer.write(request)
        status = await status_of(reader, 120)
        for _ in range(30):
            await asyncio.sleep(1)
            if not await reader.read(1_024):
                break
        return status

    return await on_each(port, count, act)


async def cancelled(port: int, count: int, whole: bytes) -> Statuses:
    """Requests whose client leaves: within the head or the body, at once, a little later, within the answer."""

    async def act(number: int, connection: Connection) -> str:
        reader, writer = connection
        kind = number % 5
        writer.write(whole[: (60, len(whole) - 50, len(whole), len(whole), len(whole))[kind]])
        await writer.drain()
        if kind >= 3:
            await asyncio.sleep(0.5)
        if kind == 4:
            await status_of(reader, 30)
        return f"left at {kind}"

    total = Statuses()
    for _ in range(max(1, count // 250)):
        total += await on_each(port, min(count, 250), act)
    return total


async def many_runs(port: int, count: int, rank: int) -> Statuses:
    return await asyncio.to_thread(_make, port, count, lambda sender, number: make_run(sender, number, rank))


async def many_sessions(port: int, count: int) -> Statuses:
    def make(sender: Any, number: int) -> str:
        given = {"task_id": f"task-{number % 10}", "prompt": "Say something.", "max_iterations": 1}
        return str(sender.send("POST", f"{TRAIN}?background=true", json.dumps(given).encode(), JSON)[0])

    return await asyncio.to_thread(_make, port, count, make, "service")


async def many_samplers(port: int, count: int) -> Statuses:
    def make(sender: Any, number: int) -> str:
        given = {"session_id": sender.session, "sampling_session_seq_id": number, "base_model": "model"}
        return str(sender.send("POST", "/api/v1/create_sampling_session", json.dumps(given).encode(), JSON)[0])

    return await asyncio.to_thread(_make, port, count, make)


JSON = "application/json"


def make_run(sender: Any, number: int, rank: int) -> str:
    given = {
        "session_id": sender.session, "model_seq_id": number, "base_model": "model",
        "lora_config": {"rank": rank, "seed": 1},
    }  # fmt: skip
    status, answer = sender.send("POST", "/api/v1/create_model", json.dumps(given).encode(), JSON)
    if status != 200:
        return f"{status} {answer[:160].decode(errors='replace')}"
    status, answer = sender.wait(json.loads(answer)["request_id"])
    return str(status) if b'"error"' not in answer[:20] else answer[:160].decode()


def _make(port: int, count: int, make: Callable[[Any, int], str], kind: str = "engine") -> Statuses:
    """From eight connections at once."""
    found, lock, numbers = Statuses(), threading.Lock(), iter(range(1, count + 1))
    first = tenant(port, KEYS[0], kind)

    def work() -> None:
        sender = tenant(port, KEYS[0], "service")
        sender.session = first.session
        while True:
            with lock:
                if (number := next(numbers, None)) is None:
                    return
            result = make(sender, number)
            with lock:
                found[result] += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def post(path: str, body: dict[str, Any]) -> bytes:
    given = json.dumps(body).encode()
    return head("POST", path, len(given)) + given


Scenario = Callable[[int], Coroutine[Any, Any, Statuses]]


def scenarios(kind: str, count: int) -> dict[str, Scenario]:
    one, several, mib = KEYS[:1], KEYS, 1 << 20
    small, large, largest = (CREATE, BATCH, 60 * mib) if kind == "engine" else (TRAIN, GRADE, 3 * mib)

    def half(path: str, announced: int, sent: int, keys: list[str]) -> Scenario:
        return partial(half_sent, count=count, path=path, announced=announced, sent=sent, keys=keys)

    return {
        "half-sent, no key": half(small, mib, mib // 2, [""]),
        "half-sent, one owner": half(small, mib, mib // 2, one),
        "half-sent, one owner, little": half(small, mib, 1_000, one),
        "half-sent, one owner, the largest": half(large, largest, mib, one),
        "half-sent, eight owners": half(small, mib, mib // 2, several),
        "idle connections": partial(idle, count=count),
        **(engine_scenarios(count) if kind == "engine" else service_scenarios(count)),
    }


def engine_scenarios(count: int) -> dict[str, Scenario]:
    large = {"model": "model", "prompt": list(range(4_000)), "echo": True, "logprobs": 60, "max_tokens": 1}
    stream = {"model": "model", "prompt": [1, 2, 3], "n": 16, "logprobs": 20, "max_tokens": 400, "stream": True}
    left = {"model": "model", "prompt": list(range(200)), "max_tokens": 200, "n": 4, "stream": True}
    return {
        "slow readers of large answers": partial(
            slow_readers, count=max(1, count // 75), request=post(COMPLETIONS, large)
        ),
        "slow readers of streams": partial(slow_readers, count=max(1, count // 30), request=post(COMPLETIONS, stream)),
        "cancelled": partial(cancelled, count=count, whole=post(COMPLETIONS, left)),
        "sampling sessions": partial(many_samplers, count=count),
        "runs of rank 1": partial(many_runs, count=count, rank=1),
        "runs of rank 256": partial(many_runs, count=max(1, count // 12), rank=256),
    }


def service_scenarios(count: int) -> dict[str, Scenario]:
    graded = {"answer": "144", "answers": ["\\boxed{144} " + "x" * 4_000] * 64}
    left = {"task_id": "left", "prompt": "Say something.", "max_iterations": 2}
    return {
        "slow readers of large answers": partial(
            slow_readers, count=max(1, count // 10), request=head("GET", "/openapi.json")
        ),
        "cancelled, of /train": partial(cancelled, count=count, whole=post(TRAIN, left)),
        "cancelled, of /grade": partial(cancelled, count=count, whole=post(GRADE, graded)),
        "sessions": partial(many_sessions, count=count),
    }


def attack(port: int, kind: str, name: str, count: int, results: Any) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    results.send(asyncio.run(scenarios(kind, count)[name](port)))


def run_scenario(server: Any, kind: str, name: str, count: int, settle: float) -> None:
    prober, honest = Receiver(probe, server.port, PROBES[kind]), Receiver(be_honest, server.port, kind, 0)
    time.sleep(5)
    before = peak = resources(server)
    receiving, sending = spawn.Pipe(duplex=False)
    first, began = (len(prober.waits), len(honest.waits)), time.monotonic()
    process = spawn.Process(target=attack, args=(server.port, kind, name, count, sending), daemon=True)
    process.start()
    while process.is_alive() and not receiving.poll(0.2):
        peak = tuple(map(max, peak, resources(server)))
    found: Statuses = receiving.recv() if receiving.poll(0) else Statuses({"it failed": 1})
    took = time.monotonic() - began
    process.kill()
    print(f"{name}: {took:.1f} s, {dict(found)}")
    time.sleep(1)
    print_waits("  probe", prober.waits[first[0] :])
    print_waits("  honest client", honest.waits[first[1] :])
    print(f"  its statuses: {dict(honest.statuses)}")
    time.sleep(settle)
    prober.end()
    honest.end()
    for label, (memory, files) in (("before", before), ("peak", peak), (f"{settle:.0f} s after", resources(server))):
        print(f"  {label:<12} {memory:7.0f} MB {files:6.0f} descriptors", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(PROBES))
    parser.add_argument("--only", default="", help="scenarios whose name has this in it")
    parser.add_argument("--count", type=int, default=3_000)
    parser.add_argument("--settle", type=float, default=60.0)
    given = parser.parse_args()
    from hostile_load import HONEST

    for name in scenarios(given.kind, given.count):
        if given.only in name:
            with running_server(given.kind, [*HONEST, *KEYS]) as server:
                run_scenario(server, given.kind, name, given.count, given.settle)
    return 0


if __name__ == "__main__":
    sys.exit(main())
