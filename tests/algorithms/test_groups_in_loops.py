"""Environments in groups inside the loops: what only a group can reward, and episodes that are over at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import MockTrainingClient
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import InitialObservationOverflow, StepResult
from rlvr.envs.groups import EnvGroupBuilder, GroupSource, RLDataset
from rlvr.reward import resolve_reward
from rlvr.training.journal import Journal
from rlvr.training.schedules.completion_order import CompletionOrder
from rlvr.training.schedules.fixed_lag import FixedLag
from rlvr.training.schedules.sync import Synchronous
from rlvr.training.trainer import Trainer
from tests.kit.table_trainer import Remote, make_trainer, table, without_times

WORDS = table().tokenizer
A, END = WORDS.ids["a"], WORDS.eos_token_id


class RecordingEnv:
    """Keeps what was said, gives nothing for it; or a prompt that fits no budget."""

    def __init__(self, over: bool) -> None:
        self.over, self.tokens = over, list[int]()

    async def initial_observation(self) -> Any:
        if self.over:
            return InitialObservationOverflow(-1.0, {"stop/max_tokens": 1.0})
        return ModelInput([WORDS.ids["say"]]), None

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        self.tokens = action
        return StepResult(0.0, True)


class Contest(EnvGroupBuilder):
    """1 for the episodes with the most a's in the group, -1 for the others: no episode alone can compute it."""

    def __init__(self, over: int) -> None:
        self.over = over

    async def make_envs(self) -> Sequence[RecordingEnv]:
        return [RecordingEnv(i < self.over) for i in range(4)]

    async def compute_group_rewards(self, trajectory_group: list[Any], env_group: Sequence[Any]) -> list[Any]:
        counts = [env.tokens.count(A) for env in env_group]
        return [
            (0.0 if e.over else 1.0 if n == max(counts) else -1.0, {"as": n})
            for e, n in zip(env_group, counts, strict=True)
        ]


class Contests(RLDataset):
    def __init__(self, over: int) -> None:
        self.over = over

    def get_batch(self, index: int) -> Sequence[Contest]:
        return [Contest(self.over)] * 6

    def __len__(self) -> int:
        return 3


def contest(client: Any = None, over: int = 0, **options: Any) -> Trainer:
    source: Any = GroupSource(Contests(over))
    cells = {"reduction": "constant"} if options.get("num_minibatches", 1) > 1 else None
    return make_trainer(
        client or MockTrainingClient(table()), reward=resolve_reward("environment"), cells=cells,
        source=source, steps=12, **options,
    )  # fmt: skip


def ahead(t: Trainer, folder: Path, make: Callable[..., Any]) -> list[dict[str, float]]:
    with Journal(folder) as journal:
        schedule = make(t, journal)
        rows = [schedule.learn(step)[0] for step in range(t.options.steps)]
        schedule.close()
    return rows


ORDERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "one step behind": (FixedLag, MockTrainingClient, {"max_steps_off_policy": 1}),
    "beside": (FixedLag, Remote, {"max_steps_off_policy": 1}),
    "minibatches": (FixedLag, Remote, {"num_minibatches": 2}),
    "completion": (CompletionOrder, Remote, {"schedule": "completion", "max_steps_off_policy": 1}),
}


@pytest.mark.parametrize("over", [0, 1], ids=["all play", "one is over at once"])
@pytest.mark.parametrize("order", ORDERS)
def test_group_rewards_are_learned_in_every_order(tmp_path: Path, order: str, over: int) -> None:
    """More a's are said; an episode that is over at once counts in its group and is no obstacle."""
    make, client, options = ORDERS[order]
    t = contest(client(table()), over=over, **options)
    rows = ahead(t, tmp_path, make)
    assert rows[0]["env/all/total_episodes"] == 24 and rows[0]["env/all/total_turns"] == 24
    assert sum(row["env/all/as"] for row in rows[-3:]) > 1.3 * sum(row["env/all/as"] for row in rows[:3])
    assert rows[0].get("env/all/stop/max_tokens") == (1.0 if over else None)


def test_groups_without_a_lag_train_like_the_synchronous_loop(tmp_path: Path) -> None:
    """To the bit: rows and the table, one episode of each group being over at once."""
    sync, fixed = contest(over=1), contest(Remote(table()), over=1, schedule="fixed_lag")
    rows = [Synchronous(sync).learn(step)[0] for step in range(12)]
    assert without_times(ahead(fixed, tmp_path, FixedLag)) == without_times(rows)
    assert (fixed.parts.client.policy.logits == sync.parts.client.policy.logits).all()  # type: ignore[attr-defined]
    assert rows[-1]["updates"] > 0


def test_a_group_whose_episodes_are_all_over_makes_no_step() -> None:
    t = contest(over=4)
    before = t.parts.client.policy.logits.copy()  # type: ignore[attr-defined]
    metrics, collected = Synchronous(t).learn(0)
    assert metrics["updates"] == 0 and metrics["reward/total"] == -1.0
    assert (t.parts.client.policy.logits == before).all()  # type: ignore[attr-defined]
    assert all(x.is_empty for x in collected.all)


def test_a_builders_answer_keeps_its_prompt() -> None:
    """Not the place of the builder in its dataset, which is all that a task of it knows."""
    _, collected = Synchronous(contest()).learn(0)
    assert {x.prompt for x in collected.all} == {"say"}
