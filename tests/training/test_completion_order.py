"""What is finished first is learned from first: ages stay bounded, every group has one fate, and a kill changes none.

Answers take times that are drawn anew in every run, so each run of these tests sees another order.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.futures import LazyFuture
from rlvr.core.types import StopReason
from rlvr.training.journal import Checkpoint, Journal, Position
from rlvr.training.schedules.completion_order import CompletionOrder
from rlvr.training.trainer import Trainer
from tests.kit.table_trainer import collect, make_trainer
from tests.kit.tiny_run import count_fates


class Uneven(MockTrainingClient):
    """One answer in five takes far longer than the others."""

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
        sampler = super().save_weights_and_get_sampling_client(name)

        class Sampler:
            fingerprint = sampler.fingerprint

            def sample(self, *args: Any, **how: Any) -> Any:
                future = sampler.sample(*args, **how)
                seconds = random.choice([0.0, 0.001, 0.002, 0.004, 0.06])

                def work() -> Any:
                    time.sleep(seconds)
                    return future.result()

                return LazyFuture(work)

            def get_tokenizer(self) -> Any:
                return sampler.get_tokenizer()

        return Sampler()


def new_trainer(folder: Path, seed: int = 0, client: Any = None, **options: Any) -> Trainer:
    cells = {"reduction": "constant"} if options.get("num_minibatches", 1) > 1 else None
    asked = {"steps": 10, "prompts_per_step": 4, "schedule": "completion", **options}
    client = client or Uneven(TablePolicy(["say", "a", "b"], seed=seed), folder / "checkpoints")
    return make_trainer(client, cells=cells, **asked)


OPTIONS: list[dict[str, Any]] = [
    {"max_steps_off_policy": 0},
    {"max_steps_off_policy": 2},
    {"max_steps_off_policy": 1, "num_minibatches": 2},
    {"max_steps_off_policy": 1, "num_substeps": 2, "num_minibatches": 2},
    {"max_steps_off_policy": 1, "stale": "discard"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()))
def test_no_answer_is_too_old_and_every_group_has_one_fate(tmp_path: Path, options: dict[str, Any]) -> None:
    """10 steps of 4 groups: 40 are learned from, each once, never more than the limit after they were begun."""
    t, limit = new_trainer(tmp_path, **options), options["max_steps_off_policy"]
    learned: list[str] = []
    with Journal(tmp_path) as journal:
        schedule = CompletionOrder(t, journal)
        for step in range(10):
            metrics, collected = schedule.learn(step)
            ages = {step - x.policy_version for x in collected.all}
            assert min(ages) >= 0 and max(ages) <= limit
            assert metrics["async/staleness_max"] == max(ages)
            assert len(schedule._outstanding) <= limit * 4
            learned += dict.fromkeys(x.group_id for x in collected.all)
        schedule.close()
        counted = count_fates(journal.events, schedule.num_parts)
        begun = {n for e in journal.events if e["event"] == "started" for n, _, _ in e["groups"]}
    assert len(learned) == len(set(learned)) == 40
    assert set(counted.values()) == {1}
    assert set(counted) == begun, "a group that was begun was neither learned from nor thrown away"
    assert sorted(begun) == list(range(len(begun))), "a number was left out"
    if options.get("stale") != "discard":
        assert len(begun) == 40
    assert metrics["async/discarded_groups"] == len(begun) - 40


class HeldFirstGroup(Uneven):
    """The first group asked for is answered only once `release` is set."""

    def __init__(self, policy: TablePolicy, folder: Path | None = None) -> None:
        super().__init__(policy, folder)
        self.release, self.asked = threading.Event(), 0

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
        outer, sampler = self, super().save_weights_and_get_sampling_client(name)
        plain = sampler.sample

        def sample(*args: Any, **how: Any) -> Any:
            outer.asked += 1
            future, late = plain(*args, **how), outer.asked == 1

            def work() -> Any:
                assert not late or outer.release.wait(20)
                return future.result()

            return LazyFuture(work)

        sampler.sample = sample
        return sampler


def test_discarding_drops_late_groups_and_starts_replacements(tmp_path: Path) -> None:
    """Group 0 is not answered until five steps are made: it may be learned from in step 1 at the latest."""
    client = HeldFirstGroup(TablePolicy(["say", "a", "b"]))
    t = new_trainer(tmp_path, client=client, max_steps_off_policy=1, stale="discard")
    with Journal(tmp_path) as journal:
        schedule = CompletionOrder(t, journal)
        rows = [schedule.learn(step)[0] for step in range(5)]
        client.release.set()
        rows += [schedule.learn(step)[0] for step in range(5, 10)]
        schedule.close()
        [first] = [e["step"] for e in journal.events if e["event"] == "batch" and 0 in e["discarded"]]
        assert set(count_fates(journal.events).values()) == {1}
    assert first == 1 and rows[1]["async/discarded_groups"] >= 1
    assert all(row["rollout/groups"] == 4 for row in rows)


def test_pacing_waits_for_late_groups(tmp_path: Path) -> None:
    """Group 0 is answered after half a second: it is in the batch of step 1, or of step 0."""
    client = HeldFirstGroup(TablePolicy(["say", "a", "b"]))
    t = new_trainer(tmp_path, client=client, max_steps_off_policy=1)
    with Journal(tmp_path) as journal:
        schedule = CompletionOrder(t, journal)
        timer = threading.Timer(0.5, client.release.set)
        timer.start()
        learned = [{x.group_id for x in schedule.learn(step)[1].all} for step in range(2)]
        schedule.close()
    assert client.release.is_set() and "0/0" in learned[0] | learned[1]


def test_a_batch_takes_the_oldest_arrived_groups(tmp_path: Path) -> None:
    t = new_trainer(tmp_path, max_steps_off_policy=3)
    with Journal(tmp_path) as journal:
        schedule = CompletionOrder(t, journal)
        for step in range(10):
            answered = {n: g.version for n, g in schedule._outstanding.items() if n in schedule._on_disk}
            _, collected = schedule.learn(step)
            taken = {int(x.group_id.split("/")[0]) for x in collected.all}
            left = [version for n, version in answered.items() if n not in taken]
            assert not left or max(x.policy_version for x in collected.all) <= min(left)
        schedule.close()


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()))
def test_a_resumed_run_replays_its_notes_and_continues(tmp_path: Path, options: dict[str, Any]) -> None:
    """Checkpoint after 3 steps, stopped after 6: steps 3 to 5 take the same groups and give the same weights again."""
    first = new_trainer(tmp_path, **options)
    with Journal(tmp_path) as journal:
        schedule = CompletionOrder(first, journal)
        for step in range(3):
            schedule.learn(step)
        first.parts.client.save_state("rl-000003").result()
        state = {"rl": first.state(), "pipeline": schedule.state()}
        journal.checkpoint(
            Checkpoint(Position(2, 3), "checkpoints/rl-000003", state, schedule.store_inflight("rl-000003")), 2
        )
        schedule.delete_before(3)
        noted = [[x.rollout_id for x in schedule.learn(step)[1].all] for step in range(3, 6)]
        schedule.close()
    weights = first.parts.client.policy.logits.copy()  # type: ignore[attr-defined]
    second = new_trainer(tmp_path, seed=5, **options)
    with Journal(tmp_path) as journal:
        before = len(journal.events)
        checkpoint = journal.last_good(pytest.fail)
        assert checkpoint is not None
        second.parts.client.load_state_with_optimizer(str(journal.resolve(checkpoint.path))).result()
        second.restore(checkpoint.state["rl"])
        schedule = CompletionOrder(second, journal)
        schedule.restore(checkpoint, 3)
        again = [[x.rollout_id for x in schedule.learn(step)[1].all] for step in range(3, 6)]
        assert again == noted
        assert [e for e in journal.events[before:] if e["event"] == "batch"] == []
        assert (second.parts.client.policy.logits == weights).all()  # type: ignore[attr-defined]
        rows = [schedule.learn(step)[0] for step in range(6, 10)]
        schedule.close()
        counted = count_fates(journal.events, schedule.num_parts)
        begun = {n for e in journal.events if e["event"] == "started" for n, _, _ in e["groups"]}
        answered = {e["group"]: e for e in journal.events if e["event"] == "answered"}
    assert set(counted.values()) == {1} and set(counted) == begun == set(range(len(begun)))
    tally = sum(e["tokens"] for e in answered.values()) / sum(e["answers"] for e in answered.values())
    assert rows[-1]["async/sampled_length"] == pytest.approx(tally)


def test_answers_are_on_disk_before_they_are_used_and_gone_when_no_resume_can_need_them(tmp_path: Path) -> None:
    t = new_trainer(tmp_path, max_steps_off_policy=1)
    with Journal(tmp_path) as journal:
        schedule = CompletionOrder(t, journal)
        for step in range(4):
            schedule.learn(step)
            for event in (e for e in journal.events if e["event"] == "batch"):
                places = [
                    journal.events.index(next(a for a in journal.events if a.get("group") == n))
                    for n in event["groups"]
                ]
                assert max(places) < journal.events.index(event)
        files = {p.name for p in (tmp_path / "inflight").iterdir()}
        used = {n for e in journal.events if e["event"] == "batch" for n in e["groups"]}
        assert {f"group-{n:06d}.json" for n in used} <= files
        schedule.delete_before(4)
        assert not {f"group-{n:06d}.json" for n in used} & {p.name for p in (tmp_path / "inflight").iterdir()}
        schedule.close()


def test_damaged_answers_undo_the_decisions_that_need_them_and_nothing_is_lost(tmp_path: Path) -> None:
    """Of what was noted one file is damaged: those steps are made anew, every group still has one fate."""
    options = {"max_steps_off_policy": 2}
    first = new_trainer(tmp_path, **options)
    with Journal(tmp_path) as journal:
        schedule = CompletionOrder(first, journal)
        for step in range(4):
            schedule.learn(step)
        schedule.close()
        spoiled = next(e for e in journal.events if e["event"] == "batch" and e["step"] == 2)["groups"][0]
    (tmp_path / "inflight" / f"group-{spoiled:06d}.json").write_text("[]")
    second = new_trainer(tmp_path, **options)
    with Journal(tmp_path) as journal:
        schedule = CompletionOrder(second, journal)
        schedule.restore(None, 0)
        assert journal.events[-1]["event"] == "undone" and spoiled in journal.events[-1]["groups"]
        learned: list[str] = []
        for step in range(10):
            _, collected = schedule.learn(step)
            assert max(step - x.policy_version for x in collected.all) <= 2
            assert min(step - x.policy_version for x in collected.all) >= 0
            learned += dict.fromkeys(x.group_id for x in collected.all)
        schedule.close()
    assert sorted(int(group.split("/")[0]) for group in learned) == list(range(40))


def test_a_journal_whose_groups_do_not_fit_together_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text(json.dumps({"event": "started", "version": 0, "groups": [[1]]}) + "\n")
    with Journal(tmp_path) as journal, pytest.raises(ValueError, match=r"journal\.jsonl: its lines about groups"):
        CompletionOrder(new_trainer(tmp_path), journal).restore(None, 0)


def test_a_stored_group_reads_back_the_same(tmp_path: Path) -> None:
    from rlvr.training import group_files

    t = new_trainer(tmp_path)
    collected = collect(t, 0)
    members = [x for x in collected.all if x.group_id == "0/0/0"]
    members[0].stop_reason, members[1].reward, members[2].reports = StopReason.LENGTH, None, [{"format": 1.0}]
    task = members[0].task
    path = tmp_path / "group.json"
    sha256 = group_files.write(path, [group_files.StoredGroup("0/0/0", "", 0, 0, members)])
    [back] = group_files.read(path, sha256, t.parts.curriculum.task)
    assert back.trajectories == members and back.trajectories[0].task == task
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="recorded checksum"):
        group_files.read(path, sha256, t.parts.curriculum.task)
