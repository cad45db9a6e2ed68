"""The reward `math` beside math-verify, in one run on one core: answers per second and agreement with the gold.

    python benchmarks/mathematics.py --gsm8k FOLDER --math500 FILE [--rows 500] [--repeats 3]

Each run reads answers that nobody has read before (no cache of either side helps). math-verify runs in this process,
as its own documentation has it. `tests/test_math_reward.py` holds what must be equal; left out: hostile answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rlvr.reward import resolve_reward
from rlvr.reward.math.spelling import spelled
from rlvr.reward.math.values import read


def theirs(response: str, gold: str) -> bool:
    from math_verify import parse, verify

    return verify(parse(f"${gold}$"), parse(response))


def ours() -> Callable[[str, str], bool]:
    reward = resolve_reward("math")
    return lambda response, gold: reward("", response, {"answer": gold}) == 1.0


def timed(grade: Callable[[str, str], bool], pairs: list[tuple[str, str]]) -> tuple[float, int]:
    spelled.cache_clear()
    read.cache_clear()
    start = time.perf_counter()
    right = sum(grade(response, gold) for response, gold in pairs)
    return len(pairs) / (time.perf_counter() - start), right


def report(name: str, pairs: list[tuple[str, str]], repeats: int) -> None:
    graders = {"rlvr": ours(), "math-verify": theirs}
    for grade in graders.values():
        grade(*pairs[0])  # what is loaded once
    rates: dict[str, list[float]] = {who: [] for who in graders}
    right: dict[str, int] = {}
    for _ in range(repeats):
        for who, grade in graders.items():
            rate, right[who] = timed(grade, pairs)
            rates[who].append(rate)
    for who, values in rates.items():
        print(f"{name:22} {who:12} {statistics.median(values):10.0f} answers/s   right {right[who]}/{len(pairs)}")
    ratios = [a / b for a, b in zip(rates["rlvr"], rates["math-verify"], strict=True)]
    print(f"{name:22} ratio        {statistics.median(ratios):10.1f}")


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl")
    options.add_argument("--math500", type=Path, help="file with `solution` and `answer` per line")
    options.add_argument("--rows", type=int, default=500)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    if given.gsm8k:
        rows = [row for name in ("train", "test") for row in rows_of(given.gsm8k / f"{name}.jsonl")][: given.rows]
        golds = [row["answer"].rpartition("####")[2].strip() for row in rows]
        boxed = [(f"{row['answer']}\n\\boxed{{{gold}}}", gold) for row, gold in zip(rows, golds, strict=True)]
        report("gsm8k", boxed, given.repeats)
    if given.math500:
        rows = rows_of(given.math500)[: given.rows]
        report("math-500", [(row["solution"], row["answer"]) for row in rows], given.repeats)
        shifted = [(row["solution"], other["answer"]) for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]
        report("math-500, next gold", shifted, given.repeats)


if __name__ == "__main__":
    main()
