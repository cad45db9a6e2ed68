"""A reward, an environment and an algorithm of one's own: each a file of under 20 lines, run for real.

Each file below is what a user would write. Run as it stands it registers a name and trains with it; rewards and
environments are named by `package.module:function` in a config of `rlvr train` as well, and then nothing is registered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.forked_process import run_forked

REWARD = '''
from rlvr import register_reward
from rlvr.cli.main import run


@register_reward("says_early")
def says_early(prompt, response, meta=None, *, word="answer", within=4, **kwargs):
    """1.0 for a response that says the word among its first few, else 0.0."""
    return float(word in response.split()[:within])


if __name__ == "__main__":
    run(["train", "--config=run.yaml", "reward.type=says_early", "reward.kwargs.word=solution"])
'''

ENVIRONMENT = """
from rlvr import Task, register_environment
from rlvr.cli.main import run
from rlvr.envs import PromptEnv

@register_environment("colours")
class Colours:
    levels, reward, vocabulary = ("",), "exact_match", ["red", "green", "blue", "grey"]
    def __init__(self, favourite="red"):
        self.favourite = favourite
    def train(self, seed, index, level):
        return Task(str(index), f"Name a colour for house {index}.", {"answer": self.favourite})
    def heldout(self, count):
        return [Task(f"held-out {i}", f"Name a colour for boat {i}.", {"answer": self.favourite}) for i in range(count)]
    def env(self, task, tokenizer):
        return PromptEnv(task, tokenizer)
    def demonstration(self, task, key):
        return self.favourite
if __name__ == "__main__":
    run(["train", "--config=run.yaml", "env.name=colours", "env.kwargs.favourite=blue", "rollout.max_tokens=1"])
"""

ALGORITHM = """
from statistics import median
from rlvr import Algorithm, register_advantage, register_algorithm
from rlvr.algorithms.losses.clipped import Ppo
from rlvr.cli.main import run

@register_advantage("group_median")
def group_median(earned):
    return [r - median(earned) for r in earned]

register_algorithm(Algorithm("mine", "group_median", Ppo(0.2, 0.28), "sequence_mean"))
words = ["reward.type=keyword_contains", "reward.kwargs.keywords=[answer, solution]"]
run(["train", "--config=run.yaml", "algorithm.name=mine", *words])
"""

RUN = """
client: mock
env: {name: toy}
rollout: {max_tokens: 4}
training: {steps: 25, prompts_per_step: 8, group_size: 8, optimizer: {learning_rate: 1.0e-3}}
evaluation: {tasks: 4, samples: 16}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user works: the run's config, and files of their own."""
    for name, text in {"run.yaml": RUN, "my_reward.py": REWARD, "my_env.py": ENVIRONMENT, "mine.py": ALGORITHM}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_training(folder: Path, *command: str) -> tuple[dict[str, Any], str]:
    """The summary of the run that `python *command` made, and what it printed."""
    done = run_forked(command, cwd=folder, timeout=120)
    summary = folder / "runs" / "run" / "summary.json"
    assert summary.exists(), done.stdout + done.stderr
    return json.loads(summary.read_text()), done.stdout


def rate(summary: dict[str, Any], side: str) -> float:
    return summary[side]["pass@1"]["value"]


@pytest.mark.parametrize("source", [REWARD, ENVIRONMENT, ALGORITHM], ids=["reward", "environment", "algorithm"])
def test_each_takes_under_20_lines(source: str) -> None:
    assert len([line for line in source.splitlines() if line.strip()]) < 20


BY_PATH = ("-m", "rlvr.cli.main", "train", "--config=run.yaml")
OWN_REWARD = ("reward.type=my_reward:says_early", "reward.kwargs.word=solution")


@pytest.mark.slow
@pytest.mark.parametrize("command", [("my_reward.py",), (*BY_PATH, *OWN_REWARD)], ids=["by name", "by path"])
def test_a_custom_reward_is_learned(folder: Path, command: tuple[str, ...]) -> None:
    """Its option reaches it (the word is not the default one), and its word is what the policy learns to say."""
    summary, printed = run_training(folder, *command)
    assert rate(summary, "baseline") < 0.2 and rate(summary, "final") > 0.8
    assert "says_early" in printed


OWN_ENV = ("env.name=my_env:Colours", "env.kwargs.favourite=blue", "rollout.max_tokens=1")


@pytest.mark.slow
@pytest.mark.parametrize("command", [("my_env.py",), (*BY_PATH, *OWN_ENV)], ids=["by name", "by path"])
def test_a_custom_environment_is_learned(folder: Path, command: tuple[str, ...]) -> None:
    """Its tasks, vocabulary and reward are those of the run, and its option is what the answers turn to."""
    summary, printed = run_training(folder, *command)
    assert rate(summary, "baseline") < 0.5 and rate(summary, "final") > 0.9
    assert "exact_match" in printed and "Name a colour for house" in printed


@pytest.mark.slow
def test_a_custom_algorithm_learns(folder: Path) -> None:
    """A row with an advantage estimator that is not in the package."""
    summary, printed = run_training(folder, "mine.py")
    assert rate(summary, "final") > rate(summary, "baseline") + 0.3
    assert "mine: group_median, loss ppo (PPO clip without a critic), sequence_mean" in printed
