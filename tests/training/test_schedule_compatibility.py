"""What sampling ahead, streaming and substeps may not be combined with, each with its cure; what a batch reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms.advantages import ADVANTAGES
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig
from rlvr.core.types import Trajectory, TrajectoryBatch
from rlvr.reward import resolve_reward
from rlvr.training.journal import Checkpoint, Journal, Position, newest_checkpoint, store_remote_path, weights_path
from rlvr.training.metrics import answer_statistics
from rlvr.training.schedules import ScheduleSection
from rlvr.training.schedules.schedule_options import CompletionOrderOptions, FixedLagOptions, SyncOptions
from rlvr.training.training_options import TrainingOptions, scaled_learning_rate
from tests.kit.table_trainer import make_trainer

STREAMED: dict[str, Any] = {"num_minibatches": 2, "cells": {"reduction": "constant"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_substeps": 5}, "num_substeps=5 does not divide the batch of 24 completions.*1, 2, 3, 4, 6, 8, 12, 24"),
        ({"num_substeps": 4, **STREAMED}, "num_substeps=4 does not divide the batch of 6 groups.*1, 2, 3, 6"),
        ({"num_substeps": 2, **STREAMED}, "num_minibatches=2 does not divide the 3 groups.*1, 3"),
        ({"num_minibatches": 2}, "reduction=token_mean divides by the tokens of the whole batch.*use constant"),
        ({**STREAMED, "algorithm": "reinforce"}, "advantage=.* is computed over the whole batch.*group_mean"),
        ({**STREAMED, "ppo_epochs": 2}, "ppo_epochs=2 goes through a whole batch again.*num_substeps"),
        ({**STREAMED, "num_substeps": 3, "num_minibatches": 2, "target_kl": 0.1}, "target_kl is checked"),
        (
            {"num_minibatches": 2, "num_substeps": 3, "cells": {"reduction": "constant", "importance_cap": 2.0}},
            "importance_cap compares with the policy before the first",
        ),
        ({**STREAMED, "dynamic_sampling": 1}, "dynamic_sampling=1 replaces groups once a whole batch is sampled"),
        (
            {"max_steps_off_policy": 1, "dynamic_sampling": 1},
            "dynamic_sampling=1.*schedule=fixed_lag.*leave dynamic_sampling out",
        ),
        ({"schedule": "completion", "dynamic_sampling": 1}, "dynamic_sampling=1.*schedule=completion"),
        ({"max_steps_off_policy": 1, "algorithm": "importance_sampling"}, "no bound.*ppo or cispo.*importance_cap"),
        ({"max_steps_off_policy": 1, "schedule": "sync"}, "the schedule 'sync' has no max_steps_off_policy.*fixed_lag"),
        (
            {**STREAMED, "schedule": "sync"},
            "num_minibatches=2 has no effect: the schedule 'sync'.*completion, fixed_lag",
        ),
        ({"max_steps_off_policy": -1}, "max_steps_off_policy=-1, expected at least 0"),
        ({"schedule": "fixed"}, r"schedule='fixed' is unknown.*known: sync, fixed_lag, completion, reptile; or null"),
        ({"num_minibatches": 0}, "num_minibatches=0, expected at least 1"),
        ({"stale": "keep"}, "stale='keep' is unknown; known: pace, discard"),
    ],
)
def test_contradictory_options_are_refused_with_the_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**{"group_size": 4, "prompts_per_step": 6, **change})


# The critic of gae learns from the whole batch; a baseline of a role needs an environment with roles.
@pytest.mark.parametrize("name", sorted(n for n in set(ADVANTAGES) - {"gae"} if not ADVANTAGES.find(n).needs_roles))
def test_an_advantage_may_be_streamed_exactly_if_the_rest_of_the_batch_does_not_change_it(name: str) -> None:
    """Held against the estimators themselves: the first group alone, and with a second one of other rewards."""
    from rlvr.algorithms.advantages import RunningBaseline

    def advantages(groups: int) -> list[float]:
        rewards = [(g, r * (1 + 4 * g)) for g in range(groups) for r in (0.0, 1.0, 3.0, 9.0)]
        items = [Trajectory("p", [1], "r", [2], [-1.0], reward=r, group_id=str(g)) for g, r in rewards]
        ADVANTAGES.find(name)().estimate(items, RunningBaseline())
        return [t.advantage for t in items[:4]]

    alone = advantages(1) == advantages(2)
    cells: dict[str, Any] = {"reduction": "constant", "advantage": name, "drop_equal_groups": False}
    if name == "zero":
        cells["teacher_coef"] = 1.0  # without it there would be nothing to learn from
    change: dict[str, Any] = {"num_minibatches": 2, "cells": cells}
    if alone:
        make_trainer(**change)
    else:
        with pytest.raises(ValueError, match="computed over the whole batch"):
            make_trainer(**change)


def test_an_importance_weight_with_a_cap_may_be_stale() -> None:
    make_trainer(algorithm="importance_sampling", max_steps_off_policy=2, cells={"importance_cap": 2.0})


def config(*words: str) -> RunConfig:
    return build_config(load("arithmetic", None, ["training.dynamic_sampling=0", *words]))


def test_streamed_batches_have_a_constant_denominator_by_default() -> None:
    assert config().algorithm.resolve().reduction == "token_mean"
    assert config("training.num_minibatches=2").algorithm.resolve().reduction == "constant"
    words = ("training.num_minibatches=2", "algorithm.reduction=sequence_mean")
    assert config(*words).algorithm.resolve().reduction == "sequence_mean"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.stale=discard"], "stale.*schedule=sync has no stale, an option of completion"),
        (["training.stale=discard", "training.schedule=completion"], "stale.*max_steps_off_policy is 0"),
        (
            ["training.dynamic_sampling=2", "training.max_steps_off_policy=1"],
            "dynamic_sampling.*before a batch is sampled",
        ),
    ],
)
def test_a_typed_option_that_does_nothing_is_an_error(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"no effect in this run: .*{message}"):
        config(*words)


def test_the_order_follows_from_the_numbers() -> None:
    assert TrainingOptions().order == SyncOptions()
    assert TrainingOptions(schedule=ScheduleSection(lag=1)).order == FixedLagOptions(1)
    assert TrainingOptions(schedule=ScheduleSection(num_minibatches=2)).order == FixedLagOptions(0, 2)
    assert TrainingOptions(schedule=ScheduleSection.of("completion")).order == CompletionOrderOptions()
    assert TrainingOptions(prompts_per_step=4, schedule=ScheduleSection.of(FixedLagOptions(2))).slots == 12


def test_the_rate_grows_with_the_root_of_the_batch() -> None:
    assert scaled_learning_rate(4e-5, 128, 512) == pytest.approx(8e-5)
    assert scaled_learning_rate(4e-5, 128, 32) == pytest.approx(2e-5)
    for wrong in ((0.0, 1, 1), (1e-5, 0, 1), (1e-5, 1, 0)):
        with pytest.raises(ValueError, match="expected a rate above 0"):
            scaled_learning_rate(*wrong)


# What a batch is like


def answer(group: int, reward: float | None, turns: list[int], tokens: int, **more: Any) -> Trajectory:
    return Trajectory(
        "p", [1, 2, 3], "r", [5] * tokens, [-1.0] * tokens, reward=reward, group_id=str(group),
        rollout_id=f"{group}/{len(turns)}/{tokens}", turn_starts=turns, **more,
    )  # fmt: skip


def test_turns_count_the_whole_observation_each_time() -> None:
    """One turn of 4 tokens after a prompt of 3; and turns at 0 and 6 of 10 tokens, of which the policy wrote 6."""
    batch = TrajectoryBatch(
        [answer(0, 1.0, [0], 4), answer(0, 0.0, [0, 6], 10, action_mask=[1, 1, 1, 0, 0, 0, 1, 1, 1, 0])]
    )
    found = answer_statistics(batch, "r")
    assert found["env/all/total_turns"] == 3 and found["env/all/total_episodes"] == 2
    assert found["env/all/turns_per_episode"] == 1.5
    assert found["env/all/total_ac_tokens"] == 10 and found["env/all/ac_tokens_per_turn"] == pytest.approx(10 / 3)
    assert found["env/all/total_ob_tokens"] == 3 + 3 + 9 and found["env/all/ob_tokens_per_turn"] == 5.0


def test_groups_are_mixed_or_all_good_or_all_bad() -> None:
    """Five groups: differing, all 0.5, all 1, all 0.4, and one without any verdict, which is not one of them."""
    rewards = [(0.0, 1.0), (0.5, 0.5), (1.0, None), (0.4, 0.4), (None, None)]
    batch = TrajectoryBatch([answer(g, r, [0], 1 + i) for g, pair in enumerate(rewards) for i, r in enumerate(pair)])
    found = answer_statistics(batch, "r")
    shares = [found[f"env/all/by_group/frac_{name}"] for name in ("mixed", "all_good", "all_bad")]
    assert shares == [0.25, 0.5, 0.25]
    assert found["reward/total"] == found["env/all/reward/total"] == found["reward"]


def test_environment_metrics_are_averaged_over_the_environments_that_report_them() -> None:
    batch = TrajectoryBatch(
        [
            answer(0, 1.0, [0], 4, reports=[{"format": 1.0, "correct": 0.25}]),
            answer(0, 0.0, [0, 2], 5, reports=[{"format": 0.0}, {}]),
        ]
    )
    found = answer_statistics(batch, resolve_reward("exact_match").name)
    assert found["env/all/format"] == 0.5
    assert found["env/all/correct"] == 0.0, "verdicts come first"


# Weights that a server keeps


def test_a_checkpoint_of_a_server_is_a_folder_that_says_where(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        store_remote_path(tmp_path / "checkpoints" / "rl-000004", "tinker://run/weights/rl-000004")
        journal.checkpoint(Checkpoint(Position(2, 4), "checkpoints/rl-000004", {}), 2)
    place = newest_checkpoint(tmp_path)
    assert place is not None and weights_path(place) == "tinker://run/weights/rl-000004"
    assert weights_path(tmp_path) == str(tmp_path), "other folders hold their weights themselves"
    (place / "remote.json").write_text(json.dumps({"path": "elsewhere"}))
    with pytest.raises(ValueError, match="expected weights at a server"):
        weights_path(place)
    assert newest_checkpoint(tmp_path) is None, "it has not its checksum any more"


def test_a_checkpoint_event_with_an_odd_hash_is_named(tmp_path: Path) -> None:
    line = {"event": "checkpoint", "phase": 2, "step": 1, "path": "checkpoints/a", "state": {}, "inflight": 7}
    (tmp_path / "journal.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"line 1: checkpoint whose groups in flight have the hash 7"):
        Journal(tmp_path)
