"""A shared policy whose weights are tables of logits in a folder, in place of an engine server; and a replica of it.

python -m tests.kit.table_replicas DATABASE FOLDER NAME      # writes groups until it is killed, and says their sessions
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rlvr.clients.mock.mock_client import MockSamplingClient, MockTrainingClient, TablePolicy
from rlvr.core.futures import Future
from rlvr.core.messages import SaveWeightsResponse
from rlvr.core.types import Trajectory
from rlvr.service.learning import shared_learner
from rlvr.service.learning.session_learner import LearnerOptions
from rlvr.service.learning.shared_learner import SharedLearner
from rlvr.store import ExperienceStore, Session, Status, open_store
from rlvr.store.tables import groups

NAME = "tinker:table"
WORDS = ["yes", "no", "perhaps", "never"]
OPTIONS = LearnerOptions(batch_size=4, learning_rate=0.01)
QUICK = {"LEASE_S": 1.5, "BEAT_S": 0.05, "POLL_S": 0.02, "RETRY_S": 3.0}  # of `shared_learner`
SAVE_S = 0.03  # of a killed replica: long enough to be killed between a step and its publication


def table(folder: Path) -> MockTrainingClient:
    return MockTrainingClient(TablePolicy(WORDS, seed=1, rate=300.0), folder)


class FolderTrainer(MockTrainingClient):
    """Saves slowly, and not at all while its server has a failure."""

    def __init__(self, server: FolderServer, folder: Path) -> None:
        super().__init__(table(folder).policy, folder)
        self.server = server

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        if self.server.failure:
            raise RuntimeError(self.server.failure)
        self.server.saves += 1
        time.sleep(self.server.save_s)
        return super().save_state(name)


class FolderServer:
    """Weights in a folder; a folder of its own for each trainer, as a Tinker server has a run for each."""

    def __init__(self, folder: Path, save_s: float = 0.0) -> None:
        self.folder, self.save_s, self.failure = folder, save_s, ""
        self.trainers, self.retired = list[MockTrainingClient](), list[str]()
        self.saves = 0

    def open_trainer(self, path: str | None) -> MockTrainingClient:
        client = FolderTrainer(self, self.folder / f"run-{os.getpid()}-{time.monotonic_ns()}")
        if path:
            client.load_state_with_optimizer(path).result()
        self.trainers.append(client)
        return client

    def retire(self, paths: Sequence[str]) -> None:
        self.retired += paths

    def describe(self, trainer: Any) -> dict[str, Any]:
        return {"base_model": "table", "rank": 16}

    def check(self, state: dict[str, Any]) -> None:
        pass

    def open_sampler(self, path: str) -> MockSamplingClient:
        return table(self.folder).create_sampling_client(path)

    def close(self) -> None:
        pass


def episodes(id: str, rewards: Sequence[float | None], version: int = 0) -> list[Trajectory]:
    """The answers yes and no, in turns, with the log-probs of the untrained table."""
    policy = table(Path()).policy
    tokens = [policy.tokenizer.ids[WORDS[i % 2]] for i in range(len(rewards))]
    return [
        Trajectory(
            "p", [3], WORDS[i % 2], [token], [float(policy.logprobs()[token])], reward=reward,
            group_id=id, rollout_id=f"{id}/{i}", policy_version=version,
        )
        for i, (token, reward) in enumerate(zip(tokens, rewards, strict=True))
    ]  # fmt: skip


def write_session(store: ExperienceStore, learner: SharedLearner, id: str, rewards: Sequence[float] = (1, 0)) -> None:
    """A session that ended, and its group."""
    store.add_session(Session(id, "t", "p", status=Status.DONE))
    learner.learn(episodes(id, rewards, version=learner.version))


def replica(store: ExperienceStore, name: str, server: FolderServer, said: list[str] | None = None) -> SharedLearner:
    learner = SharedLearner(store, NAME, name, server, OPTIONS, warn=(said if said is not None else []).append)
    learner.restore(lambda text: None)
    return learner


def steps(store: ExperienceStore) -> dict[str, int | None]:
    with store.read() as connection:
        return {row.session_id: row.step for row in connection.execute(sa.select(groups))}


def state_of(store: ExperienceStore) -> dict[str, Any]:
    policy = store.policy(NAME)
    assert policy is not None and policy.state is not None
    return policy.state


def wait_until(what: Callable[[], Any], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)


def draw_rewards(id: str) -> tuple[float, float]:
    """The rewards of a session, which follow from its id; those of some are equal."""
    number = zlib.crc32(id.encode()) % 7
    return number / 7, (5 - number) / 7 if number < 5 else number / 7


def main(url: str, folder: str, name: str) -> None:
    vars(shared_learner).update(QUICK)
    store = open_store(url)
    learner = SharedLearner(store, NAME, name, FolderServer(Path(folder), SAVE_S), OPTIONS)
    learner.restore(lambda text: None)
    number = 0
    while True:
        number += 1
        _ = learner.sampler  # the newest weights, as for a batch of sessions
        id = f"{name}-{number}"
        write_session(store, learner, id, draw_rewards(id))
        print(id, flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
