"""What an environment gives counts beside a verifier as it is declared, and never silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paid_letters import PaidEpisode

from rlvr.cli.main import run
from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.reward import resolve_reward
from rlvr.rollout import Group, rollout, score
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from rlvr.service.dashboard.dashboard_data import verdicts_of
from rlvr.service.dashboard.run_files import answer_row
from rlvr.training.collector import flip_coins
from rlvr.training.rollout_rows import format_scores, trajectory_row
from tests.kit.table_trainer import table

WORDS = table().tokenizer
PAID = """
client: mock
env: {name: "paid_letters:PaidLetters"}
rollout: {max_tokens: 1}
training: {steps: 2, prompts_per_step: 4, group_size: 4, optimizer: {learning_rate: 0.1}}
evaluation: {tasks: 1, samples: 8}
"""


def play(first: str, last: str) -> Trajectory:
    """An episode with these two answers; the right one is a."""
    task = Task("t", "say", {"answer": "a"})
    said = iter([first, last])
    sampler = ScriptedSamplingClient(WORDS, lambda i: [WORDS.ids[next(said)]])
    [trajectory] = rollout(
        [Group("g", task, [PaidEpisode(task, WORDS)])], sampler, SamplingParams(max_tokens=1), seed=1
    )
    return trajectory


@pytest.mark.parametrize(
    ("weight", "total"),
    [(1.0, 1.5), (0.5, 1.25), (0.0, 1.0), (-2.0, 0.0)],
    ids=["sum", "half", "left out", "taken off"],
)
def test_a_declared_weight_decides_the_sum_and_both_parts_are_kept(weight: float, total: float) -> None:
    """b earns 0.5 from the episode, a 1 from the verifier: in the trajectory, its row, and what the viewer reads."""
    t = play("b", "a")
    score([t], resolve_reward("exact_match").plus_environment(weight))
    assert t.reward == total
    parts = {"exact_match": [1.0, 1.0], "environment": [weight, 0.5]} if weight else {}
    assert t.reward_parts == parts, "what an advantage that takes each reward by itself sees"
    row = json.loads(trajectory_row(t))
    parts = {v.verifier: v.value for v in verdicts_of(row["scores"])}
    assert parts == {"exact_match": 1.0, "environment": 0.5} and row["reward"] == total
    assert answer_row("run", 0, 0, row).outcome == "passed"  # the verifier's, which comes first
    assert format_scores(t) == f"reward {total:.3g}, passed, passed"


@pytest.mark.parametrize(
    ("reward", "turns"),
    [
        (resolve_reward("exact_match").plus_environment(0.5), [0.25, 0.0]),
        (resolve_reward("exact_match").plus_environment(0.0), []),
        (resolve_reward("environment"), [0.5, 0.0]),
    ],
    ids=["half", "left out", "alone"],
)
def test_the_part_of_the_reward_that_each_turn_earned_is_kept(reward: Any, turns: list[float]) -> None:
    """b earns 0.5 after the first turn; a control run, whose reward is a coin, keeps nothing of it."""
    t = play("b", "a")
    assert t.turn_rewards == [0.5, 0.0]
    score([t], reward)
    assert t.turn_rewards == turns
    flip_coins([t], seed=1)
    assert t.turn_rewards == [] and t.reward in (0.0, 1.0)


def test_two_rewards_without_a_declaration_are_an_error_that_says_how_to_declare() -> None:
    with pytest.raises(ValueError) as refused:
        score([play("b", "a")], resolve_reward("exact_match"))
    for said in ("'t'", "0.5", "exact_match", "environment_weight=1", "environment_weight=0", "type=environment"):
        assert said in str(refused.value)


def test_an_environment_that_gives_nothing_needs_no_declaration() -> None:
    t = play("a", "a")
    score([t], resolve_reward("exact_match"))
    assert t.reward == 1.0 and list(t.scores) == ["exact_match"]


@pytest.mark.parametrize(("first", "reward", "outcome"), [("b", 0.5, Outcome.PASSED), ("a", 0.0, Outcome.FAILED)])
def test_the_reward_environment_takes_the_episodes_alone(first: str, reward: float, outcome: Outcome) -> None:
    t = play(first, "a")
    score([t], resolve_reward("environment"))
    assert t.reward == reward == t.scores["environment"].value and t.scores["environment"].outcome is outcome
    with pytest.raises(ValueError, match="environment_weight=2 has no effect"):
        resolve_reward("environment").plus_environment(2.0)


def test_a_reward_that_is_no_number_is_no_zero() -> None:
    for weight, reward in ((1.0, None), (0.0, 1.0)):
        t = play("a", "a")
        t.reward = float("nan")
        score([t], resolve_reward("exact_match").plus_environment(weight))
        assert t.reward == reward and t.scores["environment"].outcome is Outcome.ERROR


def test_options_of_a_reward_keep_its_declaration() -> None:
    weighted = resolve_reward(resolve_reward("length_penalty").plus_environment(0.5))
    assert weighted.environment_weight == 0.5


@pytest.mark.parametrize(
    ("words", "weight", "formula"),
    [
        ([], None, "exact_match"),
        (["reward.environment_weight=0.5"], 0.5, "exact_match (verifier) + 0.5 x environment"),
        (["reward.environment_weight=0"], 0.0, "exact_match (verifier); the environment's own does not count"),
        (["env.kwargs.declared=0.1"], 0.1, "exact_match (verifier) + 0.1 x environment"),
        (["env.kwargs.declared=0.1", "reward.type=exact_match"], 0.1, "exact_match (verifier) + 0.1 x environment"),
        (["env.kwargs.declared=0.1", "reward.type=keyword_contains", "reward.kwargs.keywords=[a]"], None,
         "keyword_contains"),
        (["env.kwargs.declared=0.1", "reward.environment_weight=2"], 2.0, "exact_match (verifier) + 2 x environment"),
        (["reward.type=environment"], None, "environment"),
    ],
)  # fmt: skip
def test_the_plan_says_what_counts(words: list[str], weight: float | None, formula: str, tmp_path: Path) -> None:
    """The config decides; without it a source decides for its own verifier, and for no other."""
    (tmp_path / "paid.yaml").write_text(PAID)
    config = build_config(load(None, str(tmp_path / "paid.yaml"), words))
    assembly = assemble(config)
    assert assembly.reward.environment_weight == weight
    assert plan(assembly)["reward"] == formula


def test_an_attempt_cost_is_declared_by_being_set() -> None:
    for cost, weight in ((0.1, 1.0), (0.0, None)):
        words = [f"env.kwargs.attempt_cost={cost}"]
        config = build_config(load("refine", None, words))
        assert assemble(config).reward.environment_weight == weight


def test_a_run_stops_before_its_first_step_until_the_rewards_are_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("paid.yaml").write_text(PAID)
    assert run(["train", "--config=paid.yaml"]) == 2
    assert "reward.environment_weight=1" in capsys.readouterr().err
    assert not Path("runs/paid/metrics.jsonl").exists()
    assert run(["train", "--config=paid.yaml", "reward.environment_weight=0.5"]) == 0
    metrics: Any = json.loads(Path("runs/paid/metrics.jsonl").read_text().splitlines()[0])
    both = metrics["rewards/exact_match/mean"] + 0.5 * metrics["rewards/environment/mean"]
    assert metrics["reward"] == pytest.approx(both) and metrics["rewards/environment/mean"] > 0
    assert run(["train", "--config=paid.yaml", "run.name=x", "reward.environment_weight=.inf"]) == 2
