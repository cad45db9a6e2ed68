"""Environments resolve by name or path, and say what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.envs import known_environments, register_environment, resolve_environment


def test_the_built_in_environments_are_registered():
    assert {"gsm8k", "jsonl", "rpn_arithmetic"} <= set(known_environments())
    assert resolve_environment("rpn_arithmetic", p=7).levels == ("1", "2", "3")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "rpn_aritmetic",
            {},
            r"unknown environment 'rpn_aritmetic' \(did you mean 'rpn_arithmetic'\?\); known: adversarial_tests, agent",
        ),
        ("rpn_arithmetic", {"modulus": 7}, "does not take 'modulus'; it takes: p, operators"),
        ("rpn_arithmetic", {"p": 1}, "p=1, expected an integer from 2"),
        ("rpn_arithmetic", {"operators": ["/"]}, r"operators=\['/'\], expected a list of different ones of"),
        ("rpn_arithmetic", {"operators": "+-"}, "operators='[+]-', expected a list"),
        ("rpn_arithmetic", {"operators": []}, "operators="),
        ("rpn_arithmetic", {"complexity": [3, 1]}, "the lowest first"),
        ("rpn_arithmetic", {"complexity": 3}, "complexity=3, expected"),
        ("rpn_arithmetic", {"complexity": [1, 11]}, "from 1 to 10"),
        ("rpn_arithmetic", {"heldout_fraction": 1.0}, "heldout_fraction=1.0, expected"),
        ("rpn_arithmetic", {"flaw": "no"}, "flaw='no', expected"),
        ("jsonl", {}, "path=None and name=None; give one of them"),
        ("json:loads", {"s": "{}"}, "made a dict without levels, reward"),
        ("nowhere_at_all:f", {}, "importing 'nowhere_at_all' failed"),
        ("mine.py:f", {}, "not a file name; give mine:f$"),
        ("sub/mine.py:f", {}, "give sub.mine:f$"),
        ("../mine.py:f", {}, r"give mine:f, and run from \.\.$"),
        ("mine.py", {}, "not a file name; give mine:NAME"),
    ],
)
def test_a_mistake_is_one_message(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        resolve_environment(name, **kwargs)


def test_a_custom_environment_by_name_and_by_path(tmp_path, monkeypatch):
    """A user's task source: a class with six members, by decorator or by path."""
    (tmp_path / "own_env_here.py").write_text(
        "from rlvr.envs import PromptEnv\n"
        "from rlvr.core.types import Task\n"
        "class Echo:\n"
        "    levels, reward = ('',), 'exact_match'\n"
        "    def __init__(self, word='hi'): self.word = word\n"
        "    def train(self, seed, index, level): return Task(str(index), self.word, {'answer': self.word})\n"
        "    def heldout(self, count): return []\n"
        "    def env(self, task, tokenizer): return PromptEnv(task, tokenizer)\n"
        "    def demonstration(self, task, key): return None\n"
    )
    monkeypatch.chdir(tmp_path)
    source = resolve_environment("own_env_here:Echo", word="ho")
    assert source.train(0, 3, "").prompt == "ho"
    assert (source.vocabulary, source.end_word, source.max_turns, source.size) == (None, None, 1, None)
    assert source.group_builder is None and source.extra_heldout(4) == {} and source.parse_task("ho") is None
    assert source.describe_task(source.train(0, 3, "")) == {}
    register_environment("echo")(type(source))
    assert resolve_environment("echo").train(0, 3, "").prompt == "hi"


SUMS = {"batch_size": 2, "group_size": 2, "renderer_name": "role_colon", "model_name_for_tokenizer": "x"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**SUMS, "n_batch": 3}, r"ArithmeticDatasetBuilder .*does not take 'n_batch' \(did you mean 'n_batches'"),
        ({"batch_size": 2}, "needs 'group_size'"),
        ([2], "expected a mapping"),
        ({**SUMS, "n_batches": "many"}, "n_batches='many', expected a whole number of at least 1"),
        ({**SUMS, "batch_size": 0}, "batch_size=0, expected"),
    ],
)
def test_a_wrong_option_of_a_dataset_is_named(options: Any, message: str) -> None:
    path = "rlvr.compat.problem_envs:ArithmeticDatasetBuilder"
    with pytest.raises(ValueError, match=message):
        resolve_environment("groups", dataset=path, options=options)


def test_a_source_that_inherits_needs_every_required_member(tmp_path, monkeypatch):
    (tmp_path / "half_a_source.py").write_text(
        "from rlvr.core.protocols import TaskSource\n"
        "class Half(TaskSource):\n"
        "    levels, reward = ('',), 'exact_match'\n"
        "    def train(self, seed, index, level): ...\n"
        "    def heldout(self, count): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="made a Half without env, demonstration"):
        resolve_environment("half_a_source:Half")
