"""Whether `rlvr serve` loses or halves anything when it is killed under load, and how soon it is there again.

    python benchmarks/service_kills.py                 # 50 kills, SQLite
    python benchmarks/service_kills.py --kills 10 --postgres

Clients train in the foreground and in the background, read the sessions as they run, and rate answers. The service is
killed by SIGKILL at a random moment and started again by the same command, in a new interpreter. Before the clients go
on, the database is compared with every response that they had: sessions, answers, iterations and ratings; and each
session's row with its own answers. Exits with 1 if anything differs. Needs the extra [serve] and the repository's
tests, with --postgres a PostgreSQL that is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit")]  # the servers that the tests start
ITERATIONS = 3  # of a session: no answer is right
DELAY = 0.02  # seconds that the model takes for an answer


@dataclass
class Acknowledged:
    """What the service said that it has, by session; `text` is the final solution."""

    accepted: set[str] = field(default_factory=set[str])
    done: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    seen: dict[str, int] = field(default_factory=dict[str, int])  # the most answers that were read
    rated: dict[str, float] = field(default_factory=dict[str, float])  # of the first answer
    lost: Counter[str] = field(default_factory=Counter[str])  # requests that a kill cut off
    refused: list[str] = field(default_factory=list[str])  # responses that no kill explains


def work(service: Any, number: int, go: threading.Event, over: threading.Event, known: Acknowledged) -> None:
    """One client, until `over`. A request that a kill cuts off is not repeated."""
    import httpx2

    body = {"prompt": "What is 2 + 2?", "answer": "4", "max_iterations": ITERATIONS}
    task = 0
    client = service.client()
    while not over.is_set():
        go.wait()
        task, path = task + 1, "/train"
        try:
            given = {**body, "task_id": f"client-{number}-{task}"}
            if (number + task) % 2:
                path = "/train?background=true"
                session = _read(client.post("/train?background=true", json=given), 202)["session_id"]
                known.accepted.add(session)
                path = "/sessions"
                while (state := _read(client.get(f"/sessions/{session}"), 200))["status"] in ("queued", "running"):
                    known.seen[session] = max(state["iterations"], known.seen.get(session, 0))
                known.done[session] = state["iterations"], state["answer"]["final_solution"]
            else:
                told = _read(client.post("/train", json=given), 200)
                known.done[told["session_id"]] = told["iterations"], told["final_solution"]
                path, rating = "/feedback", random.random()
                given = {"session_id": told["session_id"], "iteration": 1, "rating": rating}
                _read(client.post("/feedback", json=given), 200)
                known.rated[told["session_id"]] = rating
        except UnexpectedResponseError as error:
            known.refused.append(f"{path}: {error}")
        except (httpx2.HTTPError, OSError):
            known.lost[path] += 1
            client.close()
            time.sleep(0.01)
            go.wait()
            client = service.client()
    client.close()


class UnexpectedResponseError(Exception):
    """A status that an undisturbed service would not have sent."""


def _read(response: Any, expected: int) -> Any:
    if response.status_code != expected:
        raise UnexpectedResponseError(f"status {response.status_code}, expected {expected}: {response.text[:300]}")
    return response.json()


def find_differences(url: str, known: Acknowledged) -> tuple[list[str], Counter[str]]:
    """Where the database differs from what was acknowledged or from itself; how many sessions have each status."""
    from rlvr.store.tables import experiences as answers
    from rlvr.store.tables import sessions

    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = {row.id: row for row in connection.execute(sa.select(sessions))}
        columns = (answers.c.session_id, answers.c.sample, answers.c.iteration, answers.c.generated_output)
        stored: dict[str, list[Any]] = defaultdict(list)
        for row in connection.execute(sa.select(*columns, answers.c.rating).order_by(answers.c.iteration)):
            stored[row.session_id].append(row)
        found: list[str] = []
        if connection.dialect.name == "sqlite":
            health = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
            found += [] if health == "ok" else [f"integrity_check: {health}"]
    engine.dispose()
    found += [f"{id}: answers without a session" for id in stored.keys() - rows.keys()]
    for id, row in rows.items():
        iterations = [answer.iteration for answer in stored[id]]
        if iterations != list(range(1, row.iterations + 1)):
            found.append(f"{id}: {row.iterations} iterations, stored answers {iterations}")
        if not row.status.final:
            found.append(f"{id}: still {row.status.value}")
        if row.final_solution not in [answer.generated_output for answer in stored[id]] + [None] * (not stored[id]):
            found.append(f"{id}: its solution is none of its answers")
    for id in known.accepted | known.done.keys() | known.seen.keys():
        if id not in rows:
            found.append(f"{id}: acknowledged and lost")
        elif len(stored[id]) < known.seen.get(id, 0):
            found.append(f"{id}: {known.seen[id]} answers were read, {len(stored[id])} are stored")
    for id, (iterations, text) in known.done.items():
        if id in rows and (rows[id].iterations, rows[id].final_solution) != (iterations, text):
            found.append(f"{id}: {iterations} iterations and {text!r} told, {rows[id].iterations} stored")
    for id, rating in known.rated.items():
        if not stored[id] or stored[id][0].rating is None or abs(stored[id][0].rating - rating) > 1e-9:
            found.append(f"{id}: its rating {rating} is not stored")
    return found, Counter(row.status.value for row in rows.values())


@contextlib.contextmanager
def database(folder: Path, on_postgres: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of an empty database, and the service's environment for it."""
    if not on_postgres:
        yield f"sqlite:///{folder / 'service.sqlite'}", {}
        return
    from tests.kit.postgres import cluster, missing

    if why := missing():
        raise SystemExit(why)
    with cluster() as server:
        url = server.database()
        yield url.replace("postgresql://", "postgresql+psycopg://"), {"DATABASE_URL": url}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of load before a kill, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--postgres", action="store_true")
    asked = parser.parse_args()
    from tests.kit.rlvr_service import RlvrService
    from tests.kit.server_process import FRESH
    from tests.kit.text_endpoint import EndpointReply, serving

    dice, known, waits, differ = random.Random(asked.seed), Acknowledged(), list[float](), list[str]()
    go, over = threading.Event(), threading.Event()
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(lambda request: EndpointReply(f"It is {request.number + 5}.", delay=DELAY)) as endpoint,
        database(Path(scratch), asked.postgres) as (url, environment),
    ):
        options: dict[str, Any] = {
            "RLVR_REQUESTS_PER_MINUTE": "0", "RLVR_READS_PER_MINUTE": "0", "RLVR_LOG": "warning", **environment,
        }  # fmt: skip
        service = RlvrService(Path(scratch), LLM_ENDPOINT=endpoint.plain_url, **options)
        service.command = FRESH
        with service:
            clients = [
                threading.Thread(target=work, args=(service, number, go, over, known), daemon=True)
                for number in range(asked.clients)
            ]
            for client in clients:
                client.start()
            for kill in range(1, asked.kills + 1):
                go.set()
                time.sleep(asked.longest * dice.random())
                go.clear()
                service.kill()
                service.start()
                waits.append(service.started_after)
                found, statuses = find_differences(url, known)
                differ += found
                print(f"kill {kill}: {dict(statuses)}, {len(found)} differences", *found[:5], sep="\n  ", flush=True)
            over.set()
            go.set()
            for client in clients:
                client.join(60)
            stats = service.get("/stats").json()["global_stats"]["total_experiences"]
            found, statuses = find_differences(url, known)
            differ += [*found, *known.refused]
    print(f"{asked.kills} kills with {asked.clients} clients on {'PostgreSQL' if asked.postgres else 'SQLite'}")
    print(f"sessions: {dict(statuses)}; answers: {stats:,}")
    print(f"acknowledged: {len(known.done):,} ends, {len(known.accepted):,} background sessions", end=", ")
    print(f"{len(known.rated):,} ratings")
    print(f"requests that kills cut off: {dict(known.lost)}")
    print(f"start to ready: median {statistics.median(waits):.2f} s ({min(waits):.2f} to {max(waits):.2f})")
    print(f"differences: {len(differ)}", *differ[:20], sep="\n  ")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
