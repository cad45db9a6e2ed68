"""The toy task and its sampler: what is drawn, what is grouped, that it learns, and what is refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvr import PPO, REINFORCE, MockRolloutSampler, PPOConfig, REINFORCEConfig, resolve_environment, resolve_reward
from rlvr.core.types import StopReason, TrajectoryBatch
from rlvr.envs.toy import HELDOUT, PROMPTS, WORDS
from tests.kit.forked_process import run_forked

ROOT = Path(__file__).parents[2]
KEYWORDS = ["answer", "solution"]


def assert_refused(mistake: str, run: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(ValueError) as caught:
        run(*arguments, **named)
    assert mistake in str(caught.value)


def sample_with_rewards(sampler: MockRolloutSampler, prompts: list[str]) -> TrajectoryBatch:
    reward = resolve_reward("keyword_contains", keywords=KEYWORDS)
    batch = sampler.generate_trajectories(prompts)
    for trajectory in batch:
        trajectory.reward = reward(trajectory.prompt, trajectory.response)
    return batch


def keyword_rate(sampler: MockRolloutSampler) -> float:
    return float(
        np.mean([t.reward == 1.0 for t in sample_with_rewards(sampler, [p for p in PROMPTS for _ in range(40)])])
    )


def test_an_answer_is_what_the_policy_said() -> None:
    """Token ids, log-probs and stop reason agree with each other and with the table."""
    sampler = MockRolloutSampler(seed=3, temperature=0.8)
    table, tokenizer = sampler.policy.logprobs(0.8), sampler.policy.tokenizer
    batch = sampler.generate_trajectories(["Explain quantum computing"] * 200)
    for t in batch:
        assert t.prompt_tokens == tokenizer.encode("Explain quantum computing") and len(t.prompt_tokens) == 3
        assert t.logprobs == pytest.approx(table[t.response_tokens].tolist())
        ended = t.response_tokens[-1] == tokenizer.eos_token_id
        assert t.stop_reason is (StopReason.STOP if ended else StopReason.LENGTH)
        assert ended or t.num_response_tokens == 64
        assert t.response == tokenizer.decode(t.response_tokens[:-1] if ended else t.response_tokens)
        assert (t.temperature, t.policy_version, t.policy_fingerprint, t.reward) == (0.8, 0, "table@0", 0.0)
    lengths = {t.num_response_tokens for t in batch}
    assert len(lengths) > 20 and 0.1 < np.mean([t.truncated for t in batch]) < 0.5


def test_adjacent_equal_prompts_are_a_group() -> None:
    sampler = MockRolloutSampler()
    batch = sampler.generate_trajectories(["a", "a", "b", "a"])
    ids = [t.group_id for t in batch]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    assert [t.prompt for t in batch] == ["a", "a", "b", "a"]
    assert batch[0].response != batch[1].response
    assert not set(ids) & {t.group_id for t in sampler.generate_trajectories(["a", "a", "b", "a"])}
    assert len({t.rollout_id for t in batch}) == 4


def test_draws_are_a_function_of_seed_and_call() -> None:
    """Each call draws anew; another sampler of the same seed repeats them; `calls` moves it to any of them."""

    def responses_of(sampler: MockRolloutSampler) -> list[str]:
        return [t.response for t in sampler.generate_trajectories(["a", "b"])]

    one, two = MockRolloutSampler(seed=1), MockRolloutSampler(seed=1)
    first, second = responses_of(one), responses_of(one)
    assert first != second and [responses_of(two), responses_of(two)] == [first, second]
    late = MockRolloutSampler(seed=1)
    late.calls = 1
    assert responses_of(late) == second
    assert responses_of(MockRolloutSampler(seed=2)) != first


def test_the_task_is_neither_solved_nor_hopeless_at_the_start() -> None:
    """One answer in five to two in five has a keyword, for any seed."""
    for seed in range(8):
        assert 0.2 < keyword_rate(MockRolloutSampler(seed=seed)) < 0.45


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda: REINFORCE(REINFORCEConfig(learning_rate=5e-5)),
        lambda: REINFORCE(REINFORCEConfig(learning_rate=5e-5, normalize_advantages=False)),
        lambda: PPO(PPOConfig(learning_rate=2e-5)),
    ],
    ids=["reinforce", "reinforce with a baseline", "ppo"],
)
def test_sampler_and_client_share_a_policy_that_learns(algorithm: Any) -> None:
    sampler = MockRolloutSampler(seed=1)
    client, learner = sampler.training_client(), algorithm()
    before = keyword_rate(sampler)
    for _ in range(50):
        batch = sample_with_rewards(sampler, [p for p in PROMPTS[:4] for _ in range(4)])
        assert batch[0].policy_version == sampler.policy.version
        learner.update(batch, client)
    assert before < 0.4 and keyword_rate(sampler) > 0.85


def test_the_default_rate_moves_it_too() -> None:
    """1e-5, as meant for networks, lifts the rate well beyond chance in 50 steps of 16 answers."""
    sampler = MockRolloutSampler(seed=1)
    client, learner = sampler.training_client(), REINFORCE()
    before = keyword_rate(sampler)
    for _ in range(50):
        learner.update(sample_with_rewards(sampler, [p for p in PROMPTS[:4] for _ in range(4)]), client)
    assert keyword_rate(sampler) > before + 0.08


def test_it_works_where_an_event_loop_is_running() -> None:
    """As in a notebook, with the same answers."""

    async def inside() -> list[str]:
        return [t.response for t in MockRolloutSampler().generate_trajectories(["a", "b"])]

    outside = [t.response for t in MockRolloutSampler().generate_trajectories(["a", "b"])]
    assert asyncio.run(inside()) == outside


def test_bad_requests_are_refused() -> None:
    assert_refused("max_new_tokens=0, expected an integer, at least 1", MockRolloutSampler, max_new_tokens=0)
    assert_refused("temperature=0, expected a number above 0", MockRolloutSampler, temperature=0)
    assert_refused("temperature=nan", MockRolloutSampler, temperature=float("nan"))
    assert_refused("'two words' is not one word", MockRolloutSampler, words=["two words"])
    assert_refused("expected a list of words", MockRolloutSampler, words="cat dog")
    generate = MockRolloutSampler().generate_trajectories
    assert_refused("the list of prompts is empty", generate, [])
    assert_refused("is one text, expected a list", generate, "Explain quantum computing")
    assert_refused("prompt 1 is ' '", generate, ["a", " "])
    assert_refused("prompt 0 is 7", generate, [7])


def test_words_can_be_added() -> None:
    sampler = MockRolloutSampler(words=["zebra", "answer"])
    assert sampler.policy.tokenizer.words == ["<end>", "<unk>", *WORDS, "zebra"]


def test_the_environment_has_prompts_to_train_on_and_others_to_hold_out() -> None:
    toy: Any = resolve_environment("toy")
    assert (len(PROMPTS), len(HELDOUT), toy.reward) == (24, 16, "keyword_contains")
    trained = {toy.train(1, i, "").prompt for i in range(24)}
    held = {task.prompt for task in toy.heldout(None)}
    assert trained == set(PROMPTS) and held == set(HELDOUT) and not trained & held
    assert {"Explain quantum computing", "What is machine learning?"} <= trained
    assert {"answer", "solution", "important", "key"} <= set(toy.vocabulary)
    assert all(word.split() == [word] for word in toy.vocabulary) and len(set(toy.vocabulary)) == len(toy.vocabulary)


def test_its_arguments_replace_prompts_and_add_words() -> None:
    toy: Any = resolve_environment("toy", prompts=["x", "What is inflation?"], words=["zebra"])
    assert {toy.train(1, i, "").prompt for i in range(2)} == {"x", "What is inflation?"}
    assert "What is inflation?" not in {task.prompt for task in toy.heldout(None)} and len(toy.heldout(None)) == 15
    assert toy.vocabulary == [*WORDS, "zebra"]
    assert [task.prompt for task in resolve_environment("toy", heldout_prompts=["y"]).heldout(None)] == ["y"]
    assert_refused(
        "'x' is in prompts and in heldout_prompts", resolve_environment, "toy", prompts=["x"], heldout_prompts=["x"]
    )
    assert_refused("prompts=[], expected a list", resolve_environment, "toy", prompts=[])
    assert_refused("prompts holds ''", resolve_environment, "toy", prompts=[""])
    assert_refused("heldout_prompts='y', expected a list", resolve_environment, "toy", heldout_prompts="y")


def example(*words: str, folder: Path) -> tuple[str, int]:
    """What the example printed, and its exit code."""
    done = run_forked([str(ROOT / "examples" / "rlvr_toy_task" / "run_toy_rlvr.py"), *words], cwd=folder, timeout=120)
    return done.stdout + done.stderr, done.returncode


@pytest.mark.slow
def test_the_example_shows_what_its_readme_says(tmp_path: Path) -> None:
    """The first row of the README's table, to the digit, and a reward that rises."""
    readme = (ROOT / "examples" / "rlvr_toy_task" / "README.md").read_text(encoding="utf-8")
    row = re.search(r"\| 1 \| ([\d.]+) % .*?\| ([\d.]+) % .*?\| ([\d.]+) % ", readme)
    assert row
    for algorithm, after in (("reinforce", row[2]), ("ppo", row[3])):
        told, code = example("--steps", "50", "--seed", "1", "--algorithm", algorithm, folder=tmp_path)
        assert code == 0, told
        assert re.findall(r"keyword \w+ *: +([\d.]+)%", told) == [row[1], after]
        rewards = [float(x) for x in re.findall(r"reward +(-?[\d.]+)", told)]
        assert rewards[0] < 0.2 and rewards[-1] > 0.6


@pytest.mark.slow
def test_the_example_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole, _ = example("--steps", "30", folder=tmp_path)
    example("--steps", "13", "--checkpoint", "toy.json", folder=tmp_path)
    resumed, _ = example("--steps", "30", "--checkpoint", "toy.json", folder=tmp_path)
    assert "going on from toy.json after 13 steps" in resumed
    assert resumed.splitlines()[-4:] == whole.splitlines()[-4:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy-000030", "toy.json"]
    assert example("--seed", "1", "--checkpoint", "toy.json", folder=tmp_path)[1] == 2
    told, code = example("--algorithm", "ppo", "--checkpoint", "toy.json", folder=tmp_path)
    assert code == 1 and "this is a state of 'REINFORCE'" in told
