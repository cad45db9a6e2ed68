"""How many planted bugs tests break: those of runs of `adversarial_tests`, the rows' own, and random inputs.

    python -m benchmarks.planted_bugs --tasks 150 --out kills.json before=runs/start after=runs/trained

The bugs are all one-change copies of a held-out task's reference that return another value than it on some of many
random inputs, which no compared test is drawn from. Each source has several tests a task; the share of bugs that k of
them break is the mean over all choices of k. A test that fails the reference breaks nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

from rlvr.core import rng
from rlvr.core.futures import run_to_end
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Task
from rlvr.envs.adversarial_tests.adversarial_env import TESTER
from rlvr.envs.adversarial_tests.planted_bugs import plant_bugs
from rlvr.envs.adversarial_tests.trial import Judge, write_statement
from rlvr.envs.adversarial_tests.written_tests import WrittenTest, read_tests
from rlvr.envs.mini_mbpp.programs import LETTERS, Step, result_of
from rlvr.envs.mini_mbpp.source import draw_input
from rlvr.reward.code import CodeProblem
from rlvr.rollout import open_groups, rollout
from rlvr.runs.assembly import assemble
from rlvr.runs.weights import open_weights, read_run

KS = (1, 3)
FILTER, RANDOM = 40, 8  # random inputs that say which copies are bugs, and those that are compared


def draw_tests(task: Task, count: int, purpose: str) -> list[str]:
    """Tests of random inputs, with the reference's results; inputs without a result are drawn again."""
    steps = tuple(Step(name, tuple(parameters)) for name, *parameters in task.meta["steps"])
    letters = [p for step in steps for p in step.parameters if p in LETTERS]
    found: list[str] = []
    for attempt in range(50 * count):
        value = draw_input(steps[0].operation.takes, letters, rng.key(purpose, task.id, attempt))
        result = result_of(steps, value)
        if result is not None and len(found) < count:
            found.append(f"assert {task.meta['name']}({value!r}) == {result!r}")
    return found


def sample_tests(run: str, tasks: list[Task], samples: int) -> list[list[list[str]]]:
    """Of each task the statements of each answer of a run's tester; refused lines are none."""
    config = read_run(Path(run))
    assembly = assemble(config)
    source: Any = assembly.source
    sampler = open_weights(run, assembly, "run")
    tokenizer = sampler.get_tokenizer()
    asked = [replace(task, meta={**task.meta, "plays": (TESTER,), "planted": []}) for task in tasks]
    params = SamplingParams(max_tokens=config.rollout.max_tokens)
    played = rollout(open_groups(source, asked, samples, tokenizer, "kills"), sampler, params, seed=7)
    found: list[list[list[str]]] = [[] for _ in tasks]
    for trajectory in played:
        place = int(trajectory.group_id.split("/")[1])
        read = read_tests(trajectory.response, source.describe_tests(tasks[place]))
        found[place].append([write_statement(test) for test in read if isinstance(test, WrittenTest)])
    return found


async def measure(source: Any, task: Task, written: dict[str, list[list[str]]]) -> dict[str, Any] | None:
    """Of each source of tests the share of the task's bugs that k tests break, and the share of sound tests."""
    reference = CodeProblem.of(task.meta).solution
    chosen, compared = draw_tests(task, FILTER, "bug filter"), draw_tests(task, RANDOM, "random inputs")
    copies = plant_bugs(reference, 100, rng.key("kills", task.id))
    row = [str(test) for test in task.meta["tests"]]
    sources = {**written, "shown": [row[:1]], "row": [[test] for test in row], "random": [[test] for test in compared]}
    every = {test for answers in sources.values() for answer in answers for test in answer} | set(chosen)
    judge: Judge = source.make_judge(task, computes_results=True)
    result = await judge.judge(copies, sorted(every))
    bugs = [one.passed for one in result.programs.values() if one.runs and not one.passed.issuperset(chosen)]
    if not bugs:
        return None
    measured: dict[str, Any] = {"bugs": len(bugs)}
    for name, answers in sources.items():
        sound = [[test for test in answer if test in result.reference.passed] for answer in answers]
        n = len(answers)
        measured[name] = {"sound": sum(bool(answer) for answer in sound) / n}
        for k in (k for k in KS if k <= n):
            breaking = [sum(any(test not in passed for test in answer) for answer in sound) for passed in bugs]
            measured[name][str(k)] = sum(1 - comb(n - m, k) / comb(n, k) for m in breaking) / len(bugs)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", help="name=folder of a run of adversarial_tests on mini_mbpp")
    parser.add_argument("--tasks", type=int, default=150)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    runs = dict(run.split("=", 1) for run in given.runs)
    source: Any = assemble(read_run(Path(next(iter(runs.values()))))).source
    tasks = source.heldout(given.tasks)
    written = {name: sample_tests(run, tasks, given.samples) for name, run in runs.items()}

    async def measure_all() -> list[Any]:
        found: list[Any] = []
        for first in range(0, len(tasks), 10):
            some = range(first, min(first + 10, len(tasks)))
            found += await asyncio.gather(
                *(measure(source, tasks[i], {name: written[name][i] for name in runs}) for i in some)
            )
        return found

    measured = [one for one in run_to_end(measure_all()) if one]
    Path(given.out).write_text(json.dumps(measured))
    print(f"{len(measured)} tasks, {sum(one['bugs'] for one in measured)} bugs")
    for name in [key for key in measured[0] if key != "bugs"]:
        means = {key: sum(one[name][key] for one in measured) / len(measured) for key in measured[0][name]}
        print(f"{name:12s}", *(f"{key}: {value:.3f}" for key, value in means.items()))


if __name__ == "__main__":
    main()
