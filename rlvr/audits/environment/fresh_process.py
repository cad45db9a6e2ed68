"""Tasks and episodes in another process: what depends on a hash seed, or on what this process did before, differs.

python -m rlvr.audits.environment.fresh_process      # reads what to open as JSON, prints what it found
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rlvr.audits.environment.answer_texts import list_scripts
from rlvr.audits.environment.check_report import CheckResult, not_tried, report_share
from rlvr.audits.environment.contract_checks import task_key
from rlvr.audits.environment.scripted_play import CheckedEnvironment, EpisodeHangs
from rlvr.core.types import Outcome

TASKS, PLAYED = 12, 3
STARTS_S = 120.0  # that the process may take, imports included
HASH_SEED = "4242"  # this process has another one, but for one chance in four billion


def describe_tasks(
    environment: CheckedEnvironment, scripts: Sequence[tuple[int, Sequence[str]]]
) -> dict[str, list[str]]:
    """A digest and the beginning of each task, and of the episodes of `scripts`: places of tasks, and their turns."""
    drawn = [(f"train(0, {n})", environment.draw(n)) for n in range(TASKS if environment.source.levels else 0)]
    tasks = [*drawn, *((f"heldout {n}", task) for n, task in enumerate(environment.heldout[:TASKS]))]
    found = {f"task/{place}": _digest((task.id, task_key(task))) for place, task in tasks}
    asked = [(environment.tasks[place], tuple(turns)) for place, turns in scripts]
    for place, one in enumerate(environment.play_alone(asked)):
        if one.score.outcome is not Outcome.TIMEOUT:
            found[f"episode/{place}"] = _digest(one.trace)
    return found


def _digest(value: Any) -> list[str]:
    return [hashlib.sha256(repr(value).encode("utf-8", "replace")).hexdigest(), f"{value!r:.70}"]


def check_fresh_process(environment: CheckedEnvironment) -> list[CheckResult]:
    """Compare with the same in a new process that has another hash seed."""
    tasks = environment.tasks[:PLAYED]
    places = {task.id: place for place, task in enumerate(tasks)}
    scripts = [(places[task.id], turns) for task, turns in list_scripts(environment, tasks)]
    own = describe_tasks(environment, scripts)
    asked = {
        "name": environment.name,
        "kwargs": environment.kwargs,
        "reward": environment.reward.name,
        "reward_kwargs": environment.reward.kwargs,
        "tasks": environment.requested_tasks,
        "scripts": scripts,
    }
    command = [sys.executable, "-m", "rlvr.audits.environment.fresh_process"]
    paths = {"PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        said = subprocess.run(
            command, input=json.dumps(asked, default=str), capture_output=True, text=True, timeout=STARTS_S,
            env={**os.environ, **paths},
        )  # fmt: skip
        other = json.loads(said.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return [not_tried("seed_control", "it cannot be opened in another process")]
    results: list[CheckResult] = []
    for name, kind in (("seed_control", "task/"), ("episode_determinism", "episode/")):
        both = [place for place in own if place.startswith(kind) and place in other]
        hits = [f"{own[place][1]}, then {other[place][1]}" for place in both if own[place][0] != other[place][0]]
        results.append(report_share(name, hits, len(both), f"{kind[:-1]}s differ in another process"))
        if hits:  # episodes of other tasks differ anyway
            break
    return results


def main() -> None:
    asked = json.loads(sys.stdin.read())
    try:
        environment = CheckedEnvironment.open(
            asked["name"], asked["kwargs"], asked["reward"], asked["tasks"], reward_kwargs=asked["reward_kwargs"]
        )
        found = describe_tasks(environment, asked["scripts"])
    except (ValueError, EpisodeHangs):
        return
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of calls that hang are not waited for
