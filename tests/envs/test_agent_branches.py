"""Rewards of the branches of an agent's episode: from a reward function, and from the agent itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Score, Trajectory
from rlvr.envs.agent.agent_source import AgentSource
from rlvr.reward import resolve_reward
from rlvr.reward.registry import Reward
from rlvr.reward.signatures import Case
from rlvr.rollout import open_groups, rollout, score
from rlvr.training.group_files import StoredGroup, read, write
from rlvr.training.rollout_rows import trajectory_row
from tests.kit import agents_of_tests as agents
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE

TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
TEXT.model_max_length = 2_000


def play(tmp_path: Path, agent: Any, reward: Any) -> list[Trajectory]:
    """The episode of an agent whose policy says a, b and c, judged by `reward`."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + 5?", "answer": str(n + 5)}) + "\n" for n in range(20)))
    said = iter("abc")
    sampler = ScriptedSamplingClient(
        TEXT, lambda _: [*TEXT.encode(next(said), add_special_tokens=False), TEXT.eos_token_id]
    )
    source = AgentSource("dataset", {"path": str(path), "reward": "exact_match"}, function=agent)
    groups = open_groups(source, [source.train(0, 0, "")], 1, TEXT, "g")
    trajectories = rollout(groups, sampler, SamplingParams(8), seed=1)
    score(trajectories, reward if isinstance(reward, Reward) else resolve_reward(reward))
    return trajectories


def by_answer(case: Case) -> Score:
    """0.5 for the whole; 1 for a branch that ends with b, 0 for another."""
    return Score(0.5, Outcome.PASSED, branches=tuple(float(branch.answer == "b") for branch in case.branches))


def test_a_reward_function_sees_the_branches_and_gives_each_its_reward(tmp_path: Path) -> None:
    seen: list[Any] = []

    def judge(case: Case) -> Score:
        seen.extend(case.branches)
        return by_answer(case)

    left, right = play(tmp_path, agents.forks, judge)
    assert [(branch.turns, branch.answer) for branch in seen] == [([0, 1], "b"), ([0, 2], "c")]
    assert "left" in seen[0].prompt and "right" in seen[1].prompt and len({branch.id for branch in seen}) == 2
    # The first call, which both have, is trained once, with (1 + 0) / 2.
    assert (left.turn_credits, right.turn_credits) == ([0.5, 1.0], [0.0])
    assert (left.reward, right.reward) == (0.5, 0.5), "the reward is the rollout's"


def test_an_agent_names_a_branch_by_an_answer_of_it(tmp_path: Path) -> None:
    left, right = play(tmp_path, agents.rewards_branches, "environment")
    assert (left.turn_credits, right.turn_credits) == ([0.75, 1.0], [0.5]), "the other has the reward of the whole"
    assert right.reward == 0.5


def test_a_posted_reward_of_a_call_is_that_of_all_that_goes_on_from_it(tmp_path: Path) -> None:
    left, right = play(tmp_path, agents.posts_rewards, "environment")
    assert (left.turn_credits, right.turn_credits) == ([0.5, 1.0], [0.0]), "of two in a branch the latest counts"
    assert right.reward == 0.5


def test_a_verifier_and_the_agent_are_added_as_declared(tmp_path: Path) -> None:
    reward = resolve_reward(by_answer).plus_environment(0.5)
    left, right = play(tmp_path, agents.rewards_branches, reward)
    assert (left.turn_credits, right.turn_credits) == ([0.875, 1.5], [0.25])  # 1 + 0.5 x 1, and 0 + 0.5 x 0.5
    assert right.reward == 0.75


def test_branches_without_rewards_of_their_own_have_that_of_the_whole(tmp_path: Path) -> None:
    assert [t.turn_credits for t in play(tmp_path, agents.forks, "exact_match")] == [[], []]


def test_what_the_agent_gives_must_be_declared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reward\.environment_weight"):
        play(tmp_path, agents.rewards_branches, "exact_match")


def test_a_reward_for_other_branches_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scored 1 branches of an episode of 2 \(Score\.branches\)"):
        play(tmp_path, agents.forks, lambda case: Score(1.0, Outcome.PASSED, branches=(1.0,)))


def test_an_answer_that_was_never_given_names_no_branch(tmp_path: Path) -> None:
    (*_, judged) = play(tmp_path, agents.rewards_a_stranger, "exact_match")
    assert judged.reward is None and "the id of no answer" in judged.scores["exact_match"].detail
    (posted,) = play(tmp_path, agents.posts_a_strangers_reward, "exact_match")
    assert posted.answer is not None and posted.answer.startswith("404 ") and "'no-such'" in posted.answer


def test_each_branch_has_its_conversation(tmp_path: Path) -> None:
    left, right = play(tmp_path, agents.forks, by_answer)
    turns = [[(one["content"], one["turn"]) for one in t.messages if "turn" in one] for t in (left, right)]
    assert turns == [[("a", 0), ("b", 1)], [("a", 0), ("c", 2)]]
    assert [one["content"] for one in right.messages if one["role"] == "user"][-1] == "right"
    row = json.loads(trajectory_row(right))
    assert (row["messages"], row["turns"], row["turn_credits"]) == (right.messages, 1, [0.0])


def test_branches_are_stored_with_their_group(tmp_path: Path) -> None:
    trajectories = play(tmp_path, agents.forks, by_answer)
    group = StoredGroup("g", "", 0, 0, trajectories)
    (again,) = read(tmp_path / "g", write(tmp_path / "g", [group]), lambda level, index: trajectories[0].task)
    assert again.trajectories == trajectories
