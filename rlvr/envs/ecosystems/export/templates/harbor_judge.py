"""Judges the answer of a task folder by the verifier that lies in this archive, and writes the reward.

    python3 judge.pyz [TASK.json ANSWER REWARD]

An answer that could not be judged leaves no reward. An answer that is no plain file of its own counts as empty: a link
could lead to what the tests know.
"""

from __future__ import annotations

import importlib
import json
import os
import stat
import sys

MOST_BYTES = 1 << 20


def read_answer(path: str) -> str:
    """The text of the answer, without the line end behind it; "" where there is none that may be read."""
    try:
        if os.path.realpath(path) != path:
            return ""
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size > MOST_BYTES:
                return ""
            with open(number, "rb", closefd=False) as file:
                raw = file.read(MOST_BYTES)
        finally:
            os.close(number)
    except OSError:
        return ""
    return raw.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")


def judge(task: dict, answer: str) -> float:
    from rlvr.core.types import Task
    from rlvr.reward.registry import resolve_reward
    from rlvr.reward.signatures import Case

    for name in task["modules"]:
        importlib.import_module(name)
    row, given = task["row"], task["reward"]
    reward = resolve_reward(given["name"], **given["options"])
    (score,) = reward.judge_all([Case.of_task(Task(row["id"], row["prompt"], row["meta"], row["level"]), answer)])
    if score.value is None:
        sys.exit(f"the verifier could not judge: {score.reason} {score.detail[-1000:]}")
    print(f"{score.outcome.value} {score.reason}")
    return score.value


def main() -> None:
    task, answer, reward = sys.argv[1:] or ("/tests/task.json", "/app/answer.txt", "/logs/verifier/reward.txt")
    with open(task, encoding="utf-8") as file:
        given = json.load(file)
    value = judge(given, read_answer(answer))
    with open(reward, "w", encoding="utf-8") as file:
        file.write(f"{value!r}\n")


if __name__ == "__main__":
    main()
