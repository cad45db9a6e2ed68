"""An algorithm for the tasks of each source: each part by its own spec, weighed over the whole optimizer step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.penalties import penalize_length
from rlvr.algorithms.reductions import REDUCTIONS
from rlvr.algorithms.update import Passes, StreamPlan, UpdateInputs, loss_config, make_datum, update, update_streamed
from rlvr.algorithms.update_statistics import UpdateStatistics
from rlvr.cli.main import run
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.messages import AdamParams
from rlvr.core.types import Task, Trajectory
from rlvr.envs.registry import register_environment
from rlvr.envs.toy import Toy

INPUTS = UpdateInputs(RunningBaseline(), 4)


def table() -> MockTrainingClient:
    return MockTrainingClient(TablePolicy(["a", "b", "c", "d"], seed=2, spread=2.0))


def answers(client: MockTrainingClient, count: int = 16) -> list[Trajectory]:
    """Groups of four of one to three tokens; those of even number are of the source `code`. Group 1 is all right."""
    table_V, items = client.policy.logprobs(), list[Trajectory]()
    for i in range(count):
        tokens = [2 + (i * 3 + j * j) % 4 for j in range(1 + i % 3)]
        task = Task(str(i // 4), "p", {"source": "chat" if i // 4 % 2 else "code"}, level=str(i // 8))
        items.append(
            Trajectory(
                "p", [2], "r", tokens, (table_V[tokens] + 0.1 * (i % 5)).tolist(), task=task, group_id=str(i // 4),
                reward=1.0 if i // 4 == 1 else float(tokens[0] == 2), rollout_id=str(i),
            )
        )  # fmt: skip
    return items


def gradient(client: MockTrainingClient, row: Algorithm, batch: list[Trajectory]) -> np.ndarray:
    """What `update` hands to the optimizer in its only step."""
    taken: list[np.ndarray] = []

    def keep(statistics: UpdateStatistics) -> None:
        assert client.policy.gradient is not None
        taken.append(client.policy.gradient.copy())

    update(client, row, batch, lambda n: AdamParams(0.1), Passes(), INPUTS, keep)
    return taken[0]


def routed(base: Algorithm, **others: Algorithm) -> Algorithm:
    return replace(base, for_tasks=tuple(others.items()))


@pytest.mark.parametrize("reduction", sorted(REDUCTIONS))
def test_specs_that_are_all_the_same_are_as_one(reduction: str) -> None:
    row = resolve_algorithm("dr_grpo", reduction=reduction)
    one, many = table(), table()
    expected = gradient(one, row, answers(one))
    assert gradient(many, routed(row, code=replace(row, name="x")), answers(many)) == pytest.approx(expected)
    assert np.abs(expected).max() > 0.01


def test_each_source_is_judged_by_its_spec_and_weighed_over_the_step() -> None:
    """By hand: GSPO's loss on code, CISPO's on chat, in two calls whose gradients add up; 16 answers in all.

    CISPO's spec drops group 1, whose rewards are equal: so 12 answers count, in the weights of the code too.
    """
    code = resolve_algorithm("gspo", clip_low=0.1, clip_high=0.1, entropy_coef=0.01)
    chat = resolve_algorithm("cispo", advantage="group_mean", reduction="token_mean", drop_equal_groups=True)
    client, again = table(), table()
    found = gradient(client, routed(chat, code=code), answers(client))
    batch = answers(again)
    kept = [t for t in batch if t.group_id != "1"]
    tokens = sum(t.num_action_tokens for t in kept)
    for row, groups in ((code, "02"), (chat, "3")):
        part = [t for t in kept if t.group_id in groups]
        row.select(part)
        weights = [1 / (12 * t.num_action_tokens) if row is code else 1 / tokens for t in part]
        data = [make_datum(row, t, w) for t, w in zip(part, weights, strict=True)]
        again.forward_backward(data, row.loss.name, loss_config(row, again, 1.0)).result()
    assert again.policy.gradient is not None
    assert found == pytest.approx(again.policy.gradient)


def test_statistics_count_the_tokens_of_all_specs_and_clip_by_each() -> None:
    """Ratios are exp(-0.1 (i % 5)) at the first pass: PPO's bound of 0.5 clips none, GSPO's at 1 all below it."""
    wide = resolve_algorithm("dr_grpo", clip_low=0.5, clip_high=0.5)
    tight = resolve_algorithm("dr_grpo", loss="gspo", clip_low=1e-9, clip_high=1e-9)
    shares: list[float] = []
    for other in (wide, tight):
        client = table()
        statistics = update(
            client, routed(wide, code=other), answers(client), lambda n: AdamParams(0.1), Passes(2, 2), INPUTS
        )
        assert statistics.updates == 4
        shares.append(statistics.clipped_share)
    assert shares[0] < shares[1]


def test_signal_and_penalties_follow_the_task() -> None:
    client = table()
    keeps, drops = resolve_algorithm("reinforce", overlong_buffer=4), resolve_algorithm("grpo")
    row = routed(drops, chat=keeps)
    batch = answers(client)
    penalize_length(batch, row, 4)
    assert all((t.penalty > 0) == (t.task is not None and t.task.meta["source"] == "chat") for t in batch)
    penalize_length(batch, drops, 4)  # none
    keeps.select([t for t in batch if t.group_id in "13"])
    assert row.has_signal(batch[4:8]), "with a batch's baseline, equal rewards have an advantage"
    assert not drops.has_signal(batch[4:8])
    by_level = replace(row, task_key="level", for_tasks=(("1", keeps),))
    assert [one.name for one, _ in by_level.split(batch)] == ["grpo", "reinforce"]
    assert [len(part) for _, part in by_level.split(batch)] == [8, 8]


@pytest.mark.parametrize("name", ["dpo", "ppo_critic", "reinforce_ema"])
def test_what_needs_a_whole_step_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm.for_tasks: '{name}' has the .* one algorithm for all tasks"):
        routed(resolve_algorithm("grpo"), code=resolve_algorithm(name))


def test_a_stream_is_refused() -> None:
    row = routed(resolve_algorithm("dr_grpo"), code=resolve_algorithm("gspo"))
    with pytest.raises(ValueError, match=r"algorithm.for_tasks needs the whole batch at once"):
        update_streamed(table(), row, [], lambda n: AdamParams(0.1), StreamPlan(1, 2, 16), INPUTS)


class TwoSources(Toy):
    """Toy tasks, every other one of the source `code`."""

    def train(self, seed: int, index: int, level: str) -> Task:
        task = super().train(seed, index, level)
        return replace(task, meta={**task.meta, "source": "code" if index % 2 else "chat"})


CONFIG = """
client: mock
env: {name: two_sources}
reward: {type: keyword_contains, kwargs: {keywords: [answer, solution]}}
rollout: {max_tokens: 4}
training: {steps: 2, prompts_per_step: 4, group_size: 4, num_substeps: 2, optimizer: {learning_rate: 0.1}}
evaluation: {tasks: 4, samples: 1}
algorithm:
  name: grpo
  drop_equal_groups: false
"""


def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str) -> list[str]:
    monkeypatch.chdir(tmp_path)
    register_environment("two_sources")(TwoSources)
    (tmp_path / "run.yaml").write_text(CONFIG + more)
    return ["--config=run.yaml", "run.name=mixed"]


def test_a_run_trains_each_source_by_its_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = config(tmp_path, monkeypatch, "  for_tasks: {code: {name: sapo}, chat: {entropy_coef: 0.01}}\n")
    assert run(["train", *words]) == 0
    said = capsys.readouterr().out
    assert "source=code" in said and "sapo: group_normalized" in said and "of 256 tasks" in said
    assert "entropy bonus 0.01" in said
    lines = (tmp_path / "runs" / "mixed" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "updates" in row]
    assert [row["updates"] for row in rows] == [2, 2]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("  for_tasks: {code: grppo}\n", "algorithm.for_tasks.code: algorithm 'grppo' is unknown"),
        ("  for_tasks: {code: {beta: 3}}\n", "algorithm.for_tasks.code: "),
        ("  for_tasks: {code: 3}\n", "algorithm.for_tasks.code=3: expected the name of an algorithm"),
        ("  task_key: topic\n  for_tasks: {code: sapo}\n", "task_key=topic: none of 256 tasks has that key"),
        ("  for_tasks: {code: dpo}\n", "algorithm.for_tasks: 'dpo' has the loss 'dpo'"),
        ("  task_key: level\n  for_tasks: {code: sapo}\n", "algorithm.for_tasks.code: no task has that level"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run(
    more: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", *config(tmp_path, monkeypatch, more)]) == 2
    assert said in capsys.readouterr().err


def test_a_task_key_without_other_specs_is_named_as_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", *config(tmp_path, monkeypatch, ""), "algorithm.task_key=topic"]) == 2
    assert "algorithm.task_key (algorithm.for_tasks is empty)" in capsys.readouterr().err


def test_an_entry_changes_the_spec_it_names_or_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[Any] = config(
        tmp_path, monkeypatch, "  kl_coef: 0.1\n  for_tasks: {code: {name: dapo, clip_high: 0.5}, chat: {kl_coef: 0}}\n"
    )
    got = build_config(load(None, "run.yaml", words[1:])).algorithm.resolve()
    code, chat = dict(got.for_tasks)["code"], dict(got.for_tasks)["chat"]
    assert (got.flat["kl_coef"], code.name, code.flat["clip_high"], code.terms) == (0.1, "dapo", 0.5, ())
    assert (chat.name, chat.terms, chat.drop_equal_groups) == ("grpo", (), False)
