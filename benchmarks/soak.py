"""Verify a million answers and check that the memory of all our processes does not grow.

    python benchmarks/soak.py [--count 1000000] [--workers N]

Right, wrong, crashing and, rarely, hanging answers in turn, with new tests each time, so that caches are full most of
the time. Prints the resident memory of this process and its descendants at twenty points. Fails if the last point is
more than 10 % and 16 MiB above the fourth, when caches are full.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from rlvr.sandbox import Sandbox

POINTS = 20


def resident(pid: int) -> int:
    """Resident bytes of a process and its descendants; one that has just ended counts as 0."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(child)) for child in children)


def job(index: int) -> dict[str, object]:
    solution = f"def f(x):\n    return x + {index % 97}\n"
    if index % 50 == 1:
        solution = "import os\nos._exit(0)\n"
    timeout = 3.0
    if index % 5000 == 2:
        solution, timeout = "while True: pass", 0.1
    wrong = index % 3 == 0
    return {"solution": solution, "tests": [f"assert f({index}) == {index + index % 97 + wrong}"], "timeout_s": timeout}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    memory: list[int] = []
    with Sandbox(workers=options.workers) as sandbox:
        start = time.perf_counter()
        for point in range(POINTS):
            first, last = (options.count * at // POINTS for at in (point, point + 1))
            for low in range(first, last, 1000):
                sandbox.verify_many([job(index) for index in range(low, min(low + 1000, last))])
            memory.append(resident(os.getpid()))
            rate = last / (time.perf_counter() - start)
            print(f"{last:9d} verified, {rate:6.0f}/s, {memory[-1] / 2**20:7.1f} MiB resident", flush=True)
    if memory[-1] > max(memory[3] * 1.1, memory[3] + (16 << 20)):
        raise SystemExit("memory grew")


if __name__ == "__main__":
    main()
