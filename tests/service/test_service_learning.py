"""The service makes a model better: a small transformer, a checkable family of tasks, the same held-out tasks before
and after a few hundred sessions, by a paired test. Everything here is a real process of `rlvr serve`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Task
from rlvr.envs.rpn_arithmetic import RPNArithmetic
from tests.kit.forked_process import run_forked
from tests.kit.rlvr_service import RlvrService

FAMILY: dict[str, Any] = {"p": 5, "operators": ["+", "-", "*"], "complexity": [1, 2], "flaw": 0.28}
# A teacher whose every reduction is wrong with this chance: the model then knows the way and errs on it.
WARM_UP = (
    "training.mode=sft", f"env.kwargs={FAMILY}", "sft.steps=300", "sft.batch_size=96", "sft.until=0",
    'sft.curriculum={by: schedule, schedule: [[0, {"1": 2, "2": 1}], [120, {"1": 1, "2": 3}]]}',
    "sft.optimizer.learning_rate=0.004", "evaluation.tasks=20", "evaluation.samples=1", "evaluation.every=0",
)  # fmt: skip
HELD_OUT, AT_ONCE, ROUNDS, SAMPLES, TRIES = 100, 64, 12, 16, 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `rlvr train` that imitates a teacher with errors."""
    root = tmp_path_factory.mktemp("runs")
    words = ["train", "--config-name=arithmetic", f"run.root={root}", "run.name=taught", *WARM_UP]
    done = run_forked(["-m", "rlvr.cli.main", *words], timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return root / "taught"


def body(task: Task, **more: Any) -> dict[str, Any]:
    """The prompt of a user: the expression only. The run's environment makes a task with its value."""
    name = task.meta["expression"].translate(str.maketrans(" *", "_x"))
    return {"task_id": f"rpn:{name}", "prompt": task.meta["expression"], "max_iterations": 1, **more}


def ready(service: RlvrService) -> dict[str, Any]:
    while (health := service.get("/health").json())["generator"]["state"] == "loading":
        pass
    assert health["status"] == "ok", health
    return health


def held_out(service: RlvrService, pool: ThreadPoolExecutor, tasks: list[Task]) -> list[bool]:
    """Whether the current policy solves each task in most of a few first answers, always with the same draws."""

    def is_solved(asked: tuple[Task, int]) -> bool:
        reply = service.post("/evaluate", body(asked[0], samples=1, seed=asked[1], min_confidence=1.0)).json()
        return reply["detailed_metrics"]["final_confidence"] == 1.0

    tries = list(pool.map(is_solved, [(task, seed) for task in tasks for seed in range(TRIES)]))
    return [2 * sum(tries[i : i + TRIES]) > TRIES for i in range(0, len(tries), TRIES)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sessions_improve_the_policy_on_unseen_tasks(run: Path, tmp_path: Path):
    from scipy.stats import binomtest

    source = RPNArithmetic(**FAMILY)
    tasks = source.heldout(HELD_OUT)
    service = RlvrService(
        tmp_path / "state",
        RLVR_MODEL=str(run),
        RLVR_LEARNING_RATE="0.004",
        RLVR_BATCH_SIZE="512",
        RLVR_SESSIONS="64",
        RLVR_QUEUE="500",
        RLVR_REQUESTS_PER_MINUTE="0",
    )
    with service, ThreadPoolExecutor(AT_ONCE) as pool:
        assert ready(service)["generator"]["learns"] == "weights"
        before = held_out(service, pool, tasks)
        assert held_out(service, pool, tasks[:20]) == before[:20]  # evaluations teach nothing, and repeat
        for number in range(ROUNDS):
            sent = [source.train(1, number * AT_ONCE + i, "122"[i % 3]) for i in range(AT_ONCE)]
            answers = list(pool.map(lambda t: service.post("/train", body(t, samples=SAMPLES)), sent))
            assert {answer.status_code for answer in answers} == {200}, answers[0].text
        after = held_out(service, pool, tasks)
        stats = service.get("/stats").json()["training_stats"]
        service.stop()
        service.start()  # another life has what this one learned
        ready(service)
        again = held_out(service, pool, tasks[:40])
        later = service.get("/stats").json()["training_stats"]
    lost = sum(b and not a for b, a in zip(before, after, strict=True))
    won = sum(a and not b for b, a in zip(before, after, strict=True))
    # McNemar's exact test, one-sided: were nothing learned, a task that changed would be won or lost by a coin.
    p = binomtest(won, won + lost, alternative="greater").pvalue
    print(f"\nsolved {sum(before)} of {HELD_OUT}, then {sum(after)}: {won} won, {lost} lost, one-sided p = {p:.2g}")
    assert p < 0.01, (won, lost)
    assert stats["updates"] >= 10 and stats["training_loss"] is not None
    # What was gathered and made no step yet is learned from as the service stops: one step more at most.
    assert later["updates"] - stats["updates"] in (0, 1)
    assert sum(a == b for a, b in zip(again, after[:40], strict=True)) > 20
    if later["updates"] == stats["updates"]:
        assert again == after[:40]
