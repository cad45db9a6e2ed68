"""Runs in which the policy plays all roles of a game: what is trained, resuming to the bit, opponents of other runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import rlvr
from tests.kit.ecosystems import find_interpreter
from tests.kit.killed_runs import run_until_done
from tests.kit.tiny_run import TINY, attempt

CONFIGS = Path(rlvr.__file__).parent / "configs"
GAMES = "tests.kit.games_of_tests"
ENVIRONMENT = f'{{name: "{GAMES}:Higher", kwargs: {{inner_kwargs: {{tasks: 20, heldout: 8}}}}}}'
GAME = ["algorithm.name=spiral", "rollout.max_tokens=2", "sft.steps=0", "model.config.max_position_embeddings=64"]


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    Path("game.yaml").write_text(re.sub("env: .*", f"env: {ENVIRONMENT}", TINY))


def read_steps(name: str) -> list[dict[str, Any]]:
    """The metric rows without what depends on the clock."""
    rows = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"} for row in rows]


def read_states(name: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in Path(f"runs/{name}/journal.jsonl").read_text().splitlines()]
    return [event["state"]["rl"] for event in events if event["event"] == "checkpoint"]


def test_a_run_trains_both_roles_and_resumes_to_the_bit_with_their_baselines() -> None:
    """The baselines are in the checkpoint: without them the first step after the kill would subtract 0."""
    words = [*GAME, "training.steps=4", "training.prompts_per_step=4", "training.optimizer.learning_rate=0.02"]
    whole = attempt("game.yaml", *words, "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("game.yaml", *words, "run.name=killed", killed_at=3)
    resumed = attempt("game.yaml", *words, "run.name=killed")
    assert resumed["weights_sha256"] == whole["weights_sha256"] and read_steps("killed") == read_steps("whole")
    states = read_states("killed")
    assert states[-1] == read_states("whole")[-1]
    assert set(states[-1]["role_baselines"]) == {f"{GAMES}:Higher/left", f"{GAMES}:Higher/right"}
    rows = [json.loads(line) for line in Path("runs/whole/rollouts/rl-000003.jsonl").read_text().splitlines()]
    assert {row["role"] for row in rows} == {"left", "right"} and any(row["advantage"] for row in rows)
    assert all(row["reward"] == row["turn_credits"][-1] for row in rows)


def test_a_damaged_baseline_of_a_checkpoint_is_refused() -> None:
    attempt("game.yaml", *GAME, "training.steps=1", "run.name=a")
    journal = Path("runs/a/journal.jsonl")
    journal.write_text(journal.read_text().replace('"role_baselines": {"', '"role_baselines": {"x": "y", "'))
    with pytest.raises(ValueError, match=r"role_baselines.x is 'y', expected a number"):
        attempt("game.yaml", *GAME, "training.steps=1", "run.name=a")


def test_a_policy_plays_against_the_checkpoint_of_another_run() -> None:
    """Each episode has one row, of the role that its group plays."""
    attempt("game.yaml", *GAME, "run.name=older")
    against = [*GAME, "env.kwargs.opponent=runs/older", "training.prompts_per_step=8", "run.name=newer"]
    attempt("game.yaml", *against)
    lines = [line for file in Path("runs/newer/rollouts").iterdir() for line in file.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    assert {row["role"] for row in rows} == {"left", "right"}
    by_group: dict[str, set[str]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], set()).add(row["role"])
    assert all(len(roles) == 1 for roles in by_group.values())
    assert len({row["rollout_id"] + str(row["policy_version"]) for row in rows}) == len(rows)
    other = ["env.kwargs.opponent=runs/older", "env.kwargs.options.letters=dcba", "run.name=other"]
    with pytest.raises(ValueError, match=r"env.kwargs.opponent=runs/older has another tokenizer than the policy"):
        attempt("game.yaml", *GAME, *other)


def test_roles_are_asked_for_before_a_model_is_trained() -> None:
    with pytest.raises(ValueError, match=r"advantage=role_baseline has a baseline for each role"):
        attempt("tiny.yaml", "algorithm.name=spiral", "sft.steps=0")
    with pytest.raises(ValueError, match=r"advantage=acceptance takes one reward of an episode"):
        attempt("game.yaml", *GAME, "algorithm.name=raft")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_self_play_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    words = [*GAME, "sft.until=0", "training.dynamic_sampling=0", "training.num_substeps=1"]
    _, calm, rows = run_until_done(tmp_path / "calm", 0, 0, "", *words, environment=ENVIRONMENT)
    kills, summary, again = run_until_done(tmp_path / "killed", 1, 4, "", *words, environment=ENVIRONMENT)
    assert kills and summary == calm and again == rows


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_game_of_textarena_is_learned_from_by_both_players() -> None:
    """Whatever is said: each row is one player's, and its mask covers as many tokens as were sampled for it."""
    find_interpreter("textarena")
    environment = '{name: "textarena:Nim-v0", kwargs: {opponent: self, seeds: {heldout: 2}}}'
    Path("arena.yaml").write_text(re.sub("env: .*", f"env: {environment}", TINY))
    words = ["sft.steps=0", "algorithm.name=spiral", "model.tokenizer=characters", "training.steps=2"]
    attempt("arena.yaml", *words, "model.config.max_position_embeddings=4096", "rollout.max_tokens=8")
    rows = [json.loads(line) for line in Path("runs/arena/rollouts/rl-000001.jsonl").read_text().splitlines()]
    assert rows and {row["role"] for row in rows} <= {"player_0", "player_1"} and any(row["advantage"] for row in rows)
    for row in rows:
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert len(said) == row["turns"] and sum(x != 0.0 for x in row["logprobs"]) >= row["turns"]
        assert f"Welcome to Nim, Player {row['role'][-1]}!" in row["rendered_prompt"]


@pytest.mark.slow
def test_self_play_wins_more_held_out_starts_against_perfect_play_than_random_play_does() -> None:
    """The packaged config."""
    summary = attempt(str(CONFIGS / "self_play.yaml"), "run.name=learned")
    assert summary["change"]["low"] > 0
