"""Sampling ahead of training: who answers what, in which order it is learned from, and that nothing else changes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.update import Passes, StreamPlan, UpdateInputs, update, update_streamed
from rlvr.cli.main import run
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import AdamParams
from rlvr.core.types import Trajectory
from rlvr.training.journal import Checkpoint, Journal, Position
from rlvr.training.schedules.fixed_lag import FixedLag
from tests.kit.table_trainer import (
    Letters,
    Remote,
    fixed_lag_trainer,
    make_trainer,
    run_fixed_lag,
    table,
    without_times,
)
from tests.kit.tiny_run import TINY


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", "lora: {rank: 2}"], ids=["all weights", "adapter"])
def test_without_a_lag_and_in_one_piece_it_is_the_synchronous_run_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str
) -> None:
    """The same weights hash, evaluations and metric rows, on a real model, over two optimizer steps a batch."""
    monkeypatch.chdir(tmp_path)
    text = TINY.replace("  config:", f"  {lora}\n  config:") if lora else TINY
    Path("tiny.yaml").write_text(text)
    found: list[Any] = []
    for name, words in (("sync", []), ("pipelined", ["training.schedule=fixed_lag"])):
        sizes = ["training.prompts_per_step=8", "training.num_substeps=2", "sft.steps=4", "training.steps=4"]
        assert run(["train", "--config=tiny.yaml", f"run.name={name}", *sizes, *words]) == 0
        rows = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(f"runs/{name}/summary.json").read_text())
        assert any(row.get("updates") == 2 for row in rows), "nothing was learned, so nothing was compared"
        ages = [row["async/staleness_max"] for row in rows if "async/staleness_max" in row]
        assert ages == ([0.0] * 4 if name == "pipelined" else [])
        found.append((without_times(rows), {k: v for k, v in summary.items() if k != "seconds"}))
    assert found[0] == found[1]


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("client", [MockTrainingClient, Remote])
def test_batch_b_is_answered_by_version_b_less_the_lag_in_the_order_of_its_groups(
    tmp_path: Path, client: Any, lag: int
) -> None:
    t = fixed_lag_trainer(client(table()), max_steps_off_policy=lag)
    with Journal(tmp_path) as journal:
        schedule = FixedLag(t, journal)
        for step in range(8):
            metrics, collected = schedule.learn(step)
            version = max(0, step - lag)
            assert {x.policy_version for x in collected.all} == {version}
            assert list(dict.fromkeys(x.group_id for x in collected.all)) == [f"{step}/0/{i}" for i in range(4)]
            assert {x.policy_fingerprint for x in collected.all} == {f"table@{version}"}
            ages = [metrics[f"async/staleness_{name}"] for name in ("min", "mean", "max")]
            assert ages == [step - version] * 3
        schedule.close()


@pytest.mark.parametrize(
    "options", [{}, {"max_steps_off_policy": 2}, {"num_minibatches": 2, "max_steps_off_policy": 1}]
)
def test_groups_played_during_training_train_the_same_as_groups_played_in_line(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Two producers, one result: the table's weights and every number of the rows."""
    inline, beside = fixed_lag_trainer(**options), fixed_lag_trainer(Remote(table()), **options)
    rows = run_fixed_lag(inline, tmp_path / "inline"), run_fixed_lag(beside, tmp_path / "beside")
    assert without_times(rows[0]) == without_times(rows[1])
    assert (inline.parts.client.policy.logits == beside.parts.client.policy.logits).all()  # type: ignore[attr-defined]
    assert rows[0][-1]["updates"] > 0


class Waits(Remote):
    """Answers of later groups come only after something has been learned: without overlap this would wait forever."""

    def __init__(self, policy: TablePolicy, free: int) -> None:
        super().__init__(policy)
        self.learned, self.free, self.asked = threading.Event(), free, 0

    def forward_backward(self, *args: Any, **how: Any) -> Any:
        self.learned.set()
        return super().forward_backward(*args, **how)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
        outer, sampler = self, super().save_weights_and_get_sampling_client(name)

        class Sampler:
            fingerprint = sampler.fingerprint

            def sample(self, *args: Any, **how: Any) -> Any:
                outer.asked += 1
                late = outer.asked > outer.free
                future = sampler.sample(*args, **how)

                def work() -> Any:
                    assert not late or outer.learned.wait(20), "nothing was learned while answers were missing"
                    return future.result()

                return LazyFuture(work)

            def get_tokenizer(self) -> Any:
                return sampler.get_tokenizer()

        return Sampler()


@pytest.mark.parametrize("client", [MockTrainingClient, Remote])
def test_nothing_is_sampled_beyond_the_last_step(tmp_path: Path, client: Any) -> None:
    t, opened = fixed_lag_trainer(client(table()), max_steps_off_policy=3, steps=5), list[str]()
    open_groups = t.collector.open_groups
    t.collector.open_groups = lambda tasks, prefix: opened.append(prefix) or open_groups(tasks, prefix)
    run_fixed_lag(t, tmp_path)
    assert opened == [f"{number}/0" for number in range(5)]


def test_the_next_batch_is_sampled_while_this_one_is_learned_from(tmp_path: Path) -> None:
    """Of 8 groups in flight the last 4 are answered only once the first 4 have been learned from."""
    rows = run_fixed_lag(fixed_lag_trainer(Waits(table(), 4), max_steps_off_policy=1, steps=3), tmp_path)
    assert [row["updates"] for row in rows] == [1, 1, 1]


def test_a_minibatch_is_learned_from_before_the_rest_of_its_batch_is_there(tmp_path: Path) -> None:
    """On-policy: the first 2 of 4 groups are learned from while the others are still being sampled."""
    rows = run_fixed_lag(fixed_lag_trainer(Waits(table(), 2), num_minibatches=2, steps=3), tmp_path)
    assert [row["updates"] for row in rows] == [1, 1, 1] and rows[0]["async/staleness_max"] == 0


def batch(count: int = 8) -> list[Trajectory]:
    """Groups of four of one token or two; the second group has no signal."""
    return [
        Trajectory(
            "p", [2], "r", [2 + (i * 3 + j) % 3 for j in range(1 + i % 2)], [-1.0] * (1 + i % 2),
            reward=float(i % 3 == 0 and i // 4 != 1), group_id=str(i // 4), rollout_id=str(i),
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("reduction", ["constant", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_the_gradient_does_not_depend_on_the_number_of_minibatches(reduction: str, minibatches: int) -> None:
    """One optimizer step from 16 answers, in one call or in parts: the same weights, loss and metrics to rounding.

    Denominators count the group that teaches nothing: what is streamed cannot know how many of them come.
    """
    row = resolve_algorithm("ppo", reduction=reduction, drop_equal_groups=False)
    shared = UpdateInputs(RunningBaseline(), 4)
    whole, parts = MockTrainingClient(table(3)), MockTrainingClient(table(3))
    once = update(whole, row, batch(16), lambda n: AdamParams(0.1), Passes(), shared)
    size = 16 // minibatches
    arriving = [batch(16)[i : i + size] for i in range(0, 16, size)]
    streamed = update_streamed(parts, row, arriving, lambda n: AdamParams(0.1), StreamPlan(1, minibatches, 16), shared)
    assert streamed.updates == once.updates == 1
    assert parts.policy.logits == pytest.approx(whole.policy.logits, abs=1e-12)
    assert streamed.metrics() == pytest.approx(once.metrics(), rel=1e-9)
    dropping = resolve_algorithm("ppo", reduction=reduction)
    alone = MockTrainingClient(table(3))
    kept = update_streamed(alone, dropping, arriving, lambda n: AdamParams(0.1), StreamPlan(1, minibatches, 16), shared)
    assert (alone.policy.logits == parts.policy.logits).all(), "dropping equal groups must not change a denominator"
    dropped = update(MockTrainingClient(table(3)), dropping, batch(16), lambda n: AdamParams(0.1), Passes(), shared)
    assert kept.grad_norm == pytest.approx(dropped.grad_norm * 12 / 16), "a whole batch drops a group from N"


@pytest.mark.parametrize("reduction", ["constant", "sequence_mean", "sequence_sum"])
def test_substeps_of_a_stream_step_after_their_own_groups(reduction: str) -> None:
    """2 substeps x 2 minibatches: forward-backward twice, step, and again. The first substep by hand."""
    calls: list[str] = []

    class RecordingClient(MockTrainingClient):
        def forward_backward(self, data: Any, *args: Any, **how: Any) -> Any:
            calls.append(f"{len(data)} rows")
            return super().forward_backward(data, *args, **how)

        def optim_step(self, adam_params: AdamParams) -> Any:
            calls.append("step")
            return super().optim_step(adam_params)

    row = resolve_algorithm("ppo", reduction=reduction)
    groups = [batch(16)[i : i + 4] for i in range(0, 16, 4)]
    client = RecordingClient(table())
    update_streamed(
        client, row, groups, lambda n: AdamParams(0.1), StreamPlan(2, 2, 8), UpdateInputs(RunningBaseline(), 4)
    )
    assert calls == ["4 rows", "step", "4 rows", "4 rows", "step"], "the group that teaches nothing is not sent"


def test_a_batch_without_signal_makes_no_step_and_the_run_continues(tmp_path: Path) -> None:
    """All answers right in every group: updates 0, weights as they were, three steps."""
    for number, options in enumerate(({"max_steps_off_policy": 1}, {"num_minibatches": 2})):
        policy = table()
        policy.logits[policy.tokenizer.ids["a"]] = 40.0
        before = policy.logits.copy()
        rows = run_fixed_lag(fixed_lag_trainer(MockTrainingClient(policy), steps=3, **options), tmp_path / str(number))
        assert [(row["updates"], row["env/all/by_group/frac_all_good"]) for row in rows] == [(0.0, 1.0)] * 3
        assert (policy.logits == before).all()


@pytest.mark.parametrize("options", [{"max_steps_off_policy": 3}, {"max_steps_off_policy": 1, "num_minibatches": 2}])
@pytest.mark.parametrize("client", [MockTrainingClient, Remote])
def test_a_checkpoint_holds_the_answers_in_flight(tmp_path: Path, client: Any, options: dict[str, Any]) -> None:
    """8 steps, and 3 steps, a checkpoint, everything new, 5 steps: the same weights, rows and tally."""
    whole = fixed_lag_trainer(client(table()), **options)
    rows = run_fixed_lag(whole, tmp_path / "whole")
    first = fixed_lag_trainer(client(table()), **options)
    with Journal(tmp_path / "halves") as journal:
        schedule = FixedLag(first, journal)
        got = [schedule.learn(step)[0] for step in range(3)]
        policy: TablePolicy = first.parts.client.policy  # type: ignore[attr-defined]
        saved = client(policy, tmp_path / "halves" / "checkpoints").save_state("rl-000003").result()
        sha256 = schedule.store_inflight("rl-000003")
        state = {"rl": first.state(), "pipeline": schedule.state()}
        path = str(Path(saved.path).relative_to(tmp_path / "halves"))
        journal.checkpoint(Checkpoint(Position(2, 3), path, state, sha256), 2)
        schedule.learn(3)  # what came after the checkpoint is lost
        schedule.close()
    again = fixed_lag_trainer(client(table(seed=9)), **options)
    with Journal(tmp_path / "halves") as journal:
        checkpoint = journal.last_good(pytest.fail)
        assert checkpoint is not None and checkpoint.inflight == sha256
        again.parts.client.load_state_with_optimizer(str(journal.resolve(checkpoint.path))).result()
        again.restore(checkpoint.state["rl"])
        schedule = FixedLag(again, journal)
        schedule.restore(checkpoint, 3)
        got += [schedule.learn(step)[0] for step in range(3, 8)]
        schedule.close()
    assert (again.parts.client.policy.logits == whole.parts.client.policy.logits).all()  # type: ignore[attr-defined]
    assert without_times(got) == without_times(rows)
    assert [row["async/trained_length"] for row in got] == [row["async/trained_length"] for row in rows]


def test_a_checkpoint_whose_answers_are_damaged_does_not_count(tmp_path: Path) -> None:
    """It falls back to the one before, says which file, and deletes it with its checkpoint later."""
    t = fixed_lag_trainer(MockTrainingClient(table(), tmp_path / "checkpoints"), max_steps_off_policy=1)
    said: list[str] = []
    with Journal(tmp_path) as journal:
        schedule = FixedLag(t, journal)
        for step in range(4):
            schedule.learn(step)
            name = f"rl-{step + 1:06d}"
            sha256 = schedule.store_inflight(name)
            t.parts.client.save_state(name).result()
            journal.checkpoint(Checkpoint(Position(2, step + 1), f"checkpoints/{name}", {}, sha256), 2)
        assert sorted(p.name for p in (tmp_path / "inflight").iterdir()) == ["rl-000003.json", "rl-000004.json"]
        (tmp_path / "inflight" / "rl-000004.json").write_text("[]")
        checkpoint = journal.last_good(said.append)
    assert checkpoint is not None and checkpoint.position == Position(2, 3)
    assert "rl-000004 is damaged" in said[0] and "recorded checksum" in said[0]


def test_stale_answers_do_not_pass_for_a_gap_between_sampler_and_trainer(tmp_path: Path) -> None:
    """A rate that moves the policy far in a step: the drift is warned of once, and no run is stopped for it."""
    from rlvr.algorithms.optimizers import OptimizerSection

    warnings: list[str] = []
    t = make_trainer(
        MockTrainingClient(table()), warnings=warnings, steps=6, prompts_per_step=4, max_steps_off_policy=2,
        optimizer=OptimizerSection(learning_rate=0.8), kl_warn=99.0,
    )  # fmt: skip
    rows = run_fixed_lag(t, tmp_path)
    assert max(row.get("sampling/sampling_logp_difference/mean", 0.0) for row in rows) > t.options.gap_stop
    assert len(warnings) == 1 and "smaller max_steps_off_policy" in warnings[0]


def test_prompts_of_a_batch_are_drawn_once_in_order(tmp_path: Path) -> None:
    """8 batches of 4 with a lag of 3 are the first 32 tasks, each once."""
    t, seen = fixed_lag_trainer(max_steps_off_policy=3), list[str]()
    with Journal(tmp_path) as journal:
        schedule = FixedLag(t, journal)
        for step in range(8):
            seen += dict.fromkeys(x.task.id for x in schedule.learn(step)[1].all if x.task)
    assert seen == [str(i) for i in range(32)]
    assert isinstance(t.parts.source, Letters)
