"""A training run in the store: every answer of every step once, through kills, and training goes on without it."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.store import ExperienceStore, Status, StoreDown, open_store
from rlvr.store.run_recorder import RunRecorder
from rlvr.tracking.tracker import MetricRow
from rlvr.tracking.trackers import Trackers, TrackingOptions
from tests.kit.forked_process import run_forked

# Kills the process in the middle of the second step, once: the place of the mark says whether it did.
KILLER = """
import os, signal
from pathlib import Path
CALLS, MARK = [], Path(__file__).with_name("killed")
def reward(prompt, response, meta):
    CALLS.append(1)
    if len(CALLS) == 13 and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(response) % 2)
"""
RUN = """
client: mock
env: {name: toy}
reward: {type: "killer:reward"}
rollout: {max_tokens: 6}
training: {steps: 4, prompts_per_step: 2, group_size: 4}
evaluation: {tasks: 2, samples: 1}
run: {name: mine}
"""


def trajectory(**how: Any) -> Trajectory:
    score = Score(1.0, Outcome.PASSED, "", {"boxed": 1.0})
    given = {"task": Task("sum-3", "1+2?"), "scores": {"math": score}, "reward": 1.0, "logprobs": [-0.25, -0.5]}
    return Trajectory("1+2?", [1], "3", [5, 6], **{"advantage": 0.5, **given, **how})


class Place:
    """A run's folder, a store, and what was warned of."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder / "runs" / "mine", url
        self.folder.mkdir(parents=True)
        self.warnings: list[str] = []

    def recorder(self, url: str = "") -> RunRecorder:
        settings = {"seed": 3, "tracking": {"store": "postgresql://me:secret@x/y"}}
        return RunRecorder(url or self.url, self.folder, "mine", settings, self.warnings.append)

    def trackers(self, url: str = "") -> Trackers:
        options = TrackingOptions(store=url or self.url)
        settings = {"seed": 3, "tracking": {"store": "postgresql://me:secret@x/y"}}
        return Trackers(options, self.folder, "mine", settings, self.warnings.append)


@pytest.fixture
def place(store_url: str, tmp_path: Path) -> Place:
    return Place(tmp_path, store_url)


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    with closing(open_store(store_url)) as store:
        yield store


def test_a_trajectory_is_an_experience(place: Place, store: ExperienceStore):
    wrong = Score(0.0, Outcome.FAILED, "wrong_value", detail="x" * 2000)
    broken = Score(None, Outcome.ERROR, "crashed")
    batch = [
        trajectory(stop_reason=StopReason.STOP, policy_version=4, policy_fingerprint="f"),
        trajectory(scores={"math": wrong, "boxed": Score(1.0, Outcome.PASSED)}, reward=0.0, stop_reason=None),
        trajectory(scores={"math": broken}, reward=None, advantage=0.0),
    ]
    with place.trackers().running([]) as trackers:
        trackers.keep(7, batch)
        trackers.log("rl", 7, {"reward": 0.5, "time/step": math.nan})
    [session] = store.sessions()
    assert (session.kind, session.name, session.status, session.iterations) == ("run", "mine", Status.DONE, 8)
    assert session.request == {"seed": 3}, "where the store is, and its password, is not told"
    assert session.metrics == {"rl/reward": 0.5, "rl/time/step": None}
    first, second, third = store.experiences(session_id=session.id)
    assert (first.step, first.iteration, first.sample, second.sample) == (7, 8, 0, 1)
    assert (first.task_id, first.prompt, first.generated_output) == ("sum-3", "1+2?", "3")
    assert (first.tokens, first.logprobs, first.num_tokens) == ([5, 6], [-0.25, -0.5], 2)
    assert (first.outcome, first.confidence, first.reward, first.advantage) == ("passed", 1.0, 1.0, 0.5)
    assert (first.stop_reason, first.policy_version, first.policy_fingerprint) == ("stop", 4, "f")
    assert (second.outcome, second.confidence, second.feedback["error_types"]) == ("failed", 0.0, ["wrong_value"])
    assert list(second.scores) == ["math", "boxed"] and len(second.scores["math"]["detail"]) < 1100
    assert (third.outcome, third.confidence, third.reward) == ("error", None, None)
    analysis = store.task_analysis("sum-3")
    assert analysis is not None and analysis["success_rate"] == 0.5 and analysis["average_reward"] == 0.5


def test_a_task_with_a_very_long_id_is_stored_and_stays_distinct(place: Place, store: ExperienceStore):
    """PostgreSQL's indexes take no text of any length."""
    ids = [os.urandom(40_000).hex()] * 2
    ids[1] += "x"
    long = {"math": Score(0.0, Outcome.FAILED, os.urandom(40_000).hex())}
    recorder = place.recorder()
    recorder.begin([])
    recorder.keep(0, [trajectory(task=Task(id, "p"), scores=long) for id in [*ids, ids[0]]])
    recorder.write([])
    recorder.close("FINISHED")
    first, second, third = (e.task_id for e in store.experiences())
    assert first == third != second and len(first) < 400
    analysis = store.task_analysis(second)
    assert analysis is not None and list(analysis["common_errors"].values()) == [1]


def test_a_step_that_is_done_again_is_there_once_and_the_session_is_the_same(place: Place, store: ExperienceStore):
    with pytest.raises(KeyboardInterrupt), place.trackers().running([]) as trackers:
        for step in range(3):
            trackers.keep(step, [trajectory(), trajectory()])
            trackers.log("rl", step, {"reward": float(step)})
        raise KeyboardInterrupt
    [session] = store.sessions()
    assert session.status is Status.INTERRUPTED
    with place.trackers().running([]) as trackers:
        assert [s.status for s in store.sessions()] == [Status.RUNNING]
        for step in range(1, 5):
            trackers.keep(step, [trajectory(), trajectory()])
            trackers.log("rl", step, {"reward": float(step)})
    [again] = store.sessions()
    assert (again.id, again.status, again.iterations) == (session.id, Status.DONE, 5)
    assert [(e.step, e.sample) for e in store.experiences()] == [(step, k) for step in range(5) for k in range(2)]


def test_a_run_that_fails_says_so(place: Place, store: ExperienceStore):
    with pytest.raises(RuntimeError), place.trackers().running([]):
        raise RuntimeError("no")
    [session] = store.sessions()
    assert session.status is Status.FAILED and session.error and session.error["code"] == "run_failed"


def test_a_run_of_the_same_name_in_another_folder_is_another_session(place: Place, store: ExperienceStore):
    with place.trackers().running([]):
        pass
    place.folder.rename(place.folder.with_name("mine.old-1"))
    place.folder.mkdir()
    with place.trackers().running([]):
        pass
    assert len(store.sessions()) == 2


@pytest.mark.slow
def test_answers_wait_while_the_database_is_away_and_are_written_when_it_is_back(tmp_path: Path, postgres: Any):
    place = Place(tmp_path, postgres.database())
    recorder = place.recorder()
    recorder.begin([])
    postgres.stop()
    try:
        recorder.keep(0, [trajectory()] * 3)
        with pytest.raises(StoreDown):
            recorder.write([MetricRow("rl", 0, 0.0, {"reward": 1.0})])
    finally:
        postgres.start()
    recorder.keep(1, [trajectory()] * 3)
    recorder.write([MetricRow("rl", 0, 0.0, {"reward": 1.0}), MetricRow("rl", 1, 0.0, {"reward": 2.0})])
    recorder.close("FINISHED")
    with closing(open_store(place.url)) as store:
        assert [e.step for e in store.experiences()] == [0, 0, 0, 1, 1, 1] and place.warnings == []
        assert store.sessions()[0].metrics == {"rl/reward": 2.0}


def test_a_database_that_stays_away_costs_warnings_and_not_the_run(tmp_path: Path):
    place = Place(tmp_path, f"postgresql://me:secret@/x?host={tmp_path}")
    with place.trackers().running([]) as trackers:
        for step in range(3):
            trackers.keep(step, [trajectory()])
            trackers.log("rl", step, {"reward": 1.0})
    first, lost, last = place.warnings
    assert "the store failed (StoreDown: " in first and "secret" not in first
    assert lost == "the store was away for long and did not get 3 answers; the run's folder is whole"
    assert last == "the store did not get the last 3 steps; metrics.jsonl has them"


def test_the_write_queue_is_bounded(place: Place):
    recorder = RunRecorder(place.url, place.folder, "mine", {}, place.warnings.append, most_waiting=5)
    recorder.begin([])
    for step in range(4):
        recorder.keep(step, [trajectory()] * 2)
    recorder.write([])
    recorder.close("FINISHED")
    with closing(open_store(place.url)) as store:
        assert [e.step for e in store.experiences()] == [1, 2, 2, 3, 3]
    assert "did not get 3 answers" in place.warnings[0]


# --- `rlvr train` ------------------------------------------------------------------------------------------------


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "killer.py").write_text(KILLER)
    (folder / "run.yaml").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    start = ["-c", "from rlvr.cli.main import main; main()", "train", f"--config={folder / 'run.yaml'}"]
    command = [*start, f"run.root={folder / 'runs'}", *words]
    return run_forked(command, cwd=folder, env=environment, timeout=100)


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on_has_every_answer_once(tmp_path: Path):
    """No checkpoint yet: the step that is in the store already is made again."""
    words = [f"tracking.store=sqlite:///{tmp_path}/store.db"]
    killed = train(tmp_path, *words)
    assert killed.returncode == -9, killed.stderr
    with closing(open_store(tmp_path / "store.db")) as store:
        [session] = store.sessions()
        assert session.status is Status.RUNNING and store.count() == 8, "the step before the kill is there"
        done = train(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        [session] = store.sessions()
        assert session.status is Status.DONE and session.name == "mine" and session.iterations == 4
        assert [(e.step, e.sample) for e in store.experiences()] == [(s, k) for s in range(4) for k in range(8)]
        rows = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
        for row in (row for row in rows if row["phase"] == "rl"):
            rewards = [e.reward for e in store.experiences(session_id=session.id, step=row["step"])]
            assert sum(rewards) / 8 == pytest.approx(row["reward"])  # type: ignore[arg-type]
        assert session.metrics["rl/reward"] == rows[-1]["reward"]


def test_a_place_that_is_no_database_stops_the_run_before_it_begins(tmp_path: Path):
    done = train(tmp_path, "tracking.store=mysql://x/y")
    assert done.returncode != 0 and "tracking.store: database: mysql:// is not known" in done.stdout + done.stderr
