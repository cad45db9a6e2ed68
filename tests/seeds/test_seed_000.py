"""Every snippet of the quickstart, as a user types it: only what it leaves undefined is defined here, by real objects.

Snippets run one after the other in one namespace, as on the page: `algo`, `batch` and `config` of one are used by the
next. (Its config file is in test_seed_000_config.py.)
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

MINIMAL = """
from rlvr import (
    MockRolloutSampler,
    REINFORCE,
    REINFORCEConfig,
    TrajectoryBatch,
    resolve_reward,
)

# 1. Create rollout sampler
sampler = MockRolloutSampler(max_new_tokens=64, seed=42)

# 2. Create reward function
reward_fn = resolve_reward("keyword_contains", keywords=["solution", "answer"])

# 3. Create RL algorithm
reinforce = REINFORCE(REINFORCEConfig(
    use_baseline=True,
    normalize_advantages=True,
    entropy_coef=0.01,
))

# 4. Training loop
prompts = ["Explain quantum computing", "What is machine learning?"]

for epoch in range(10):
    # Generate trajectories
    batch = sampler.generate_trajectories(prompts)

    # Compute rewards
    for traj in batch:
        traj.reward = reward_fn(traj.prompt, traj.response)

    # Update policy
    result = reinforce.update(batch, training_client)

    print(f"Epoch {epoch}: loss={result.policy_loss:.4f}, reward={batch.mean_reward:.4f}")
"""

BUILT_IN = """
from rlvr.reward import resolve_reward

# Keyword-based reward
reward_fn = resolve_reward("keyword_contains", keywords=["important", "key"])

# Length-based reward
reward_fn = resolve_reward("length_penalty", target_length=50)

# Format compliance
reward_fn = resolve_reward("format_compliance", required_format="json")
"""

CUSTOM = '''
from rlvr.reward import register_reward

@register_reward("my_reward")
def my_custom_reward(prompt, response, meta=None, **kwargs):
    """Custom reward based on response quality."""
    score = 0.0

    # Check for specific content
    if "the answer is" in response.lower():
        score += 0.5

    # Penalize very short responses
    if len(response) < 20:
        score -= 0.3

    return score

# Use the registered reward
reward_fn = resolve_reward("my_reward")
'''

COMPOSITE = """
reward_fn = resolve_reward(
    "composite",
    rewards=[
        {"name": "keyword_contains", "weight": 0.5, "kwargs": {"keywords": ["solution"]}},
        {"name": "length_penalty", "weight": 0.3, "kwargs": {"target_length": 100}},
        {"name": "format_compliance", "weight": 0.2, "kwargs": {"required_format": "json"}},
    ],
)
"""

WITH_REINFORCE = """
from rlvr.algorithms import REINFORCE, REINFORCEConfig

config = REINFORCEConfig(
    learning_rate=1e-5,
    use_baseline=True,
    baseline_decay=0.99,
    normalize_advantages=True,
    entropy_coef=0.01,
)

algo = REINFORCE(config)
result = algo.update(batch, client)
"""

WITH_PPO = """
from rlvr.algorithms import PPO, PPOConfig

config = PPOConfig(
    learning_rate=1e-5,
    clip_range=0.2,
    ppo_epochs=4,
    entropy_coef=0.01,
    target_kl=0.01,
)

algo = PPO(config)
result = algo.update(batch, client)
"""

TRAJECTORY = """
from rlvr.rollout import Trajectory, TrajectoryBatch

# Create a trajectory
traj = Trajectory(
    prompt="What is 2+2?",
    prompt_tokens=[1, 2, 3, 4],
    response="The answer is 4",
    response_tokens=[5, 6, 7, 8, 9],
    logprobs=[-0.5, -0.3, -0.2, -0.4, -0.3],
    attention_mask=[1, 1, 1, 1, 1, 1, 1, 1, 1],
    reward=1.0,
)

# Access properties
print(f"Full tokens: {traj.full_tokens}")
print(f"Response length: {traj.num_response_tokens}")
print(f"Mean logprob: {traj.mean_logprob}")
"""

BATCH = """
# Create batch
batch = TrajectoryBatch(trajectories=[traj1, traj2, traj3])

# Batch statistics
print(f"Mean reward: {batch.mean_reward}")
print(f"Std reward: {batch.std_reward}")

# Compute advantages
batch.compute_advantages(baseline=0.5, normalize=True)

# Iterate
for traj in batch:
    print(f"Prompt: {traj.prompt}, Advantage: {traj.advantage}")
"""

CHECKPOINT = """
# Save checkpoint
state = algo.get_state()
save_checkpoint(state, "checkpoint.json")

# Resume training
new_algo = REINFORCE(config)
new_algo.load_state(load_checkpoint("checkpoint.json"))
# Training continues from saved step
"""

PRACTICES = """
config = REINFORCEConfig(normalize_advantages=True)
config = REINFORCEConfig(entropy_coef=0.01)
result = algo.update(batch, client)
if result.kl_div > 0.1:
    print("Warning: Large policy change")
# Generate 4 responses per prompt
prompts = ["Prompt 1"] * 4 + ["Prompt 2"] * 4
batch = sampler.generate_trajectories(prompts)
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> dict[str, Any]:
    """The namespace of the page after its first snippet, and what that printed; `client` is the sampler's own."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    before, after = MINIMAL.split("# 4. Training loop")
    exec(before, names)
    names["training_client"] = names["client"] = names["sampler"].training_client()
    exec(after, names)
    names["printed"] = capsys.readouterr().out
    return names


def test_the_minimal_example_learns_from_what_it_sampled(page: dict[str, Any]) -> None:
    """Ten epochs print ten lines, and the table that the sampler samples from has moved."""
    assert page["result"].step == 10 and len(page["batch"]) == 2
    assert all(math.isfinite(v) for v in page["result"].to_dict().values())
    assert page["sampler"].policy.version > 0
    told = [line for line in page["printed"].splitlines() if line.startswith("Epoch ")]
    assert len(told) == 10 and told[9].startswith("Epoch 9: loss=")


def test_built_in_rewards(page: dict[str, Any]) -> None:
    exec(BUILT_IN, page)
    assert page["reward_fn"]("p", '{"a": 1}') == 1.0 and page["reward_fn"]("p", "no") == 0.0


def test_a_custom_reward(page: dict[str, Any]) -> None:
    exec(CUSTOM, page)
    reward = page["reward_fn"]
    assert reward("p", "I believe the answer is four") == 0.5
    assert reward("p", "the answer is 4") == pytest.approx(0.2) and reward("p", "4") == -0.3


def test_a_composite_reward(page: dict[str, Any]) -> None:
    """By hand: 0.5 x 1.0 + 0.3 x (1 - 0.01 x 98) + 0.2 x 0 = 0.506."""
    exec(COMPOSITE, page)
    assert page["reward_fn"]("p", "a solution") == pytest.approx(0.506)


@pytest.mark.parametrize("snippet", [WITH_REINFORCE, WITH_PPO], ids=["REINFORCE", "PPO"])
def test_an_algorithm_updates_a_batch(page: dict[str, Any], snippet: str) -> None:
    for traj, reward in zip(page["batch"], (1.0, -0.5), strict=True):
        traj.reward = reward
    before = page["sampler"].policy.logits.copy()
    exec(snippet, page)
    assert page["result"].trajectories_used == 2 and page["result"].step == 1
    assert (page["sampler"].policy.logits != before).any()


def test_trajectories_and_batches(page: dict[str, Any], capsys: Any) -> None:
    """By hand: rewards 1, 0, 0.5 about a baseline of 0.5, divided by their deviation of sqrt(1/6)."""
    exec(TRAJECTORY, page)
    shown = capsys.readouterr().out
    assert shown.startswith("Full tokens: [1, 2, 3, 4, 5, 6, 7, 8, 9]\nResponse length: 5\nMean logprob: ")
    assert float(shown.split()[-1]) == pytest.approx(-1.7 / 5)
    for name, reward in (("traj1", 1.0), ("traj2", 0.0), ("traj3", 0.5)):
        page[name] = page["Trajectory"]("p", [1], "r", [2], [-0.1], reward=reward)
    exec(BATCH, page)
    assert "Mean reward: 0.5\n" in capsys.readouterr().out
    scale = math.sqrt(6) / 2
    assert [t.advantage for t in page["batch"]] == pytest.approx([scale, -scale, 0.0], abs=1e-6)


def test_a_checkpoint_goes_on_from_the_saved_step(page: dict[str, Any], tmp_path: Path) -> None:
    exec(WITH_REINFORCE, page)
    exec("from rlvr import load_checkpoint, save_checkpoint", page)  # which the page does not import
    exec(CHECKPOINT, page)
    assert page["new_algo"].step == page["algo"].step == 1
    assert page["new_algo"].get_state() == json.loads((tmp_path / "checkpoint.json").read_text())


def test_best_practices(page: dict[str, Any]) -> None:
    """Four answers to each of two prompts are two groups."""
    exec(WITH_REINFORCE, page)
    exec(PRACTICES, page)
    assert [len(group) for group in page["batch"].groups().values()] == [4, 4]


def test_the_toy_example_visibly_learns(tmp_path: Path) -> None:
    """`python examples/rlvr_toy_task/run_toy_rlvr.py --steps 50`, as a script of its own."""
    script = str(ROOT / "examples" / "rlvr_toy_task" / "run_toy_rlvr.py")
    done = subprocess.run(
        [sys.executable, script, "--steps", "50"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"keyword (before|after) *: +([0-9.]+)%", done.stdout)
    assert [when for when, _ in told] == ["before", "after"]
    assert float(told[0][1]) < 45 and float(told[1][1]) > 90, done.stdout


def test_the_files_it_points_to_are_there() -> None:
    for name in ("custom_loss_quickstart.md", "dev/baseline.md", "api/rlvr.md"):
        assert (ROOT / "docs" / name).is_file(), name
