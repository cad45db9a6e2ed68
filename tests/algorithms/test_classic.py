"""`REINFORCE` and `PPO` for hand-written loops: what an update reports and remembers, and how a checkpoint goes on."""

from __future__ import annotations

import json
import math
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvr import PPO, REINFORCE, PPOConfig, REINFORCEConfig, load_checkpoint, save_checkpoint
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.types import Trajectory, TrajectoryBatch
from rlvr.training.toy_sampler import MockRolloutSampler

WORDS = ["a", "b", "c"]
KEYS = [
    "policy_loss", "entropy_loss", "kl_loss", "total_loss", "grad_norm", "clipped", "mean_advantage", "mean_logprob",
    "entropy", "kl_div", "step", "trajectories_used",
]  # fmt: skip


def table(folder: Path | None = None) -> MockTrainingClient:
    return MockTrainingClient(TablePolicy(WORDS, seed=4, spread=1.0), folder)


def batch(client: MockTrainingClient, rewards: list[float | None], at: float = 1.0) -> list[Trajectory]:
    """Answers `a`, `b c`, `c a b`, ... at the policy's own log-probs."""
    logprobs = client.policy.logprobs(at)
    items: list[Trajectory] = []
    for i, reward in enumerate(rewards):
        tokens = [2 + (i + j) % 3 for j in range(1 + i % 3)]
        items.append(
            Trajectory("p", [2], "r", tokens, logprobs[tokens].tolist(), reward=reward, temperature=at)
        )  # fmt: skip
    return items


def plainly(**more: Any) -> REINFORCE:
    return REINFORCE(REINFORCEConfig(**{"normalize_advantages": False, "entropy_coef": 0.0, **more}))


def test_the_result_has_the_twelve_fields() -> None:
    client = table()
    result = REINFORCE(REINFORCEConfig()).update(TrajectoryBatch(batch(client, [1.0, 0.0])), client)
    assert list(result.to_dict()) == KEYS
    assert all(getattr(result, key) == value for key, value in result.to_dict().items())
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()


def test_reinforce_by_hand() -> None:
    """Rewards 1, 0: advantages 1/2, -1/2 in the first batch. Loss -1/T sum over tokens of ratio A, the ratio being 1.

    Answer 0 has one token, answer 1 two: -(1/3)(1 x 1/2 - 2 x 1/2) = 1/6. Its gradient in the logits is
    -1/3 [A_0 (e_a - p) + A_1 (e_b + e_c - 2 p)].
    """
    client = table()
    items = batch(client, [1.0, 0.0])
    p = np.exp(client.policy.logprobs())
    one = np.eye(5)
    gradient = -1 / 3 * (0.5 * (one[2] - p) - 0.5 * (one[3] + one[4] - 2 * p))
    sampled = [x for t in items for x in t.logprobs]
    result = plainly().update(items, client)
    assert (result.policy_loss, result.entropy_loss, result.kl_loss) == pytest.approx((1 / 6, 0.0, 0.0))
    assert result.total_loss == pytest.approx(1 / 6)
    assert result.grad_norm == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-6)
    assert (result.step, result.trajectories_used, result.clipped) == (1, 2, 0.0)
    assert (result.mean_advantage, result.mean_logprob) == pytest.approx((0.0, float(np.mean(sampled))))
    assert result.entropy == pytest.approx(-result.mean_logprob)


@pytest.mark.parametrize("algo", [REINFORCE(REINFORCEConfig(entropy_coef=0.2)), PPO(PPOConfig(entropy_coef=0.2))])
def test_the_losses_add_up(algo: Any) -> None:
    """total = policy + entropy + kl; entropy_loss = -coefficient x the entropy in the weights of the reduction."""
    client = table()
    items = batch(client, [1.0, 0.0, 0.5, 0.0])
    result = algo.update(items, client)
    assert result.total_loss == pytest.approx(result.policy_loss + result.entropy_loss + result.kl_loss)
    expected = 0.2 * sum(sum(t.logprobs) for t in items) / sum(t.num_action_tokens for t in items)
    if algo.name == "REINFORCE":
        assert result.entropy_loss == pytest.approx(expected, rel=1e-6)
    assert result.entropy_loss == pytest.approx(expected, rel=0.05) and expected < 0


def test_the_moving_baseline_by_hand_over_three_batches() -> None:
    """Decay 0.9, means 1/2, 1, 0: baselines 1/2 (its own), 1/2, 0.55; 0.495 after. No filter of equal rewards."""
    client, algo = table(), plainly(baseline_decay=0.9)
    found: list[tuple[float, float, int]] = []
    assert algo.baseline == 0.0
    for rewards in ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]):
        items = batch(client, list(rewards))
        result = algo.update(items, client)
        found.append((items[0].advantage, items[1].advantage, result.trajectories_used))
    assert found == [(0.5, -0.5, 2), (0.5, 0.5, 2), (pytest.approx(-0.55), pytest.approx(-0.55), 2)]
    assert algo.baseline == pytest.approx(0.495)


def test_without_a_baseline_the_reward_is_the_advantage() -> None:
    client = table()
    items = batch(client, [1.0, 0.25, None])
    result = plainly(use_baseline=False).update(items, client)
    assert [t.advantage for t in items] == [1.0, 0.25, 0.0]
    assert result.mean_advantage == 0.625 and result.trajectories_used == 2


def test_normalisation_of_a_constant_batch_gives_no_advantage_and_no_step() -> None:
    """Not 0 / 1e-6 of a rounding error: exactly nothing. The step is counted, and the rest of the result is zeros."""
    client = table()
    before = client.policy.logits.copy()
    algo = REINFORCE(REINFORCEConfig(entropy_coef=0.0))
    items = batch(client, [0.1, 0.1, 0.1])
    result = algo.update(items, client)
    assert [t.advantage for t in items] == [0.0] * 3
    assert (client.policy.logits == before).all() and client.policy.version == 0
    assert (result.step, result.trajectories_used, result.grad_norm, result.total_loss) == (1, 0, 0.0, 0.0)
    assert result.mean_logprob < 0


def test_normalised_advantages_by_hand() -> None:
    """Rewards 1, 0, 1/2: mean 1/2, population std sqrt(1/6); the baseline (decay 0.9) is kept and has no part in it."""
    client, algo = table(), REINFORCE(REINFORCEConfig(entropy_coef=0.0, baseline_decay=0.9))
    algo.update(batch(client, [9.0, 8.0]), client)
    items = batch(client, [1.0, 0.0, 0.5])
    algo.update(items, client)
    scale = math.sqrt(1 / 6) + 1e-6
    assert [t.advantage for t in items] == pytest.approx([0.5 / scale, -0.5 / scale, 0.0])
    assert algo.baseline == pytest.approx(0.9 * 8.5 + 0.1 * 0.5)


def test_ppo_makes_its_epochs_and_stops_at_the_divergence() -> None:
    """Four epochs are four optimizer steps; a rate that leaps past target_kl makes one, and says how far it went."""
    client = table()
    PPO(PPOConfig(ppo_epochs=4, target_kl=0.0, learning_rate=0.01)).update(batch(client, [1.0, 0.0]), client)
    assert client.policy.version == 4
    client = table()
    items = batch(client, [1.0, 0.0])
    result = PPO(PPOConfig(ppo_epochs=4, target_kl=0.01, learning_rate=2.0)).update(items, client)
    assert client.policy.version == 1
    assert result.kl_div > 0.01, "the number that ended the update is the one to report"


def test_a_large_policy_change_is_seen_by_reinforce_too() -> None:
    """One leap of two nats in every logit: a divergence taken before the step would always be 0."""
    client = table()
    items = batch(client, [1.0, 0.0])
    result = plainly(learning_rate=2.0).update(items, client)
    now = client.policy.logprobs()
    d = np.array([now[k] - x for t in items for k, x in zip(t.response_tokens, t.logprobs, strict=True)])
    assert result.kl_div == pytest.approx(float((np.exp(d) - 1 - d).mean()), rel=1e-5)
    assert result.kl_div > 0.1


def test_it_learns_at_the_temperature_it_sampled_at() -> None:
    """At 0.5 the first ratio is 1: no divergence, and no clip, before the first step."""
    client = table()
    result = PPO(PPOConfig(ppo_epochs=1, target_kl=0.0)).update(batch(client, [1.0, 0.0], at=0.5), client)
    assert result.clipped == 0.0 and result.kl_div < 0.01


@pytest.mark.parametrize("make", [lambda: REINFORCE(REINFORCEConfig(learning_rate=1e-3)), lambda: PPO()])
def test_the_toy_learns_its_word(make: Any) -> None:
    """The share of answers with a word that begins with t rises in 30 updates."""
    algo, sampler = make(), MockRolloutSampler(max_new_tokens=4, seed=1)
    client, shares = sampler.training_client(), []
    for _ in range(30):
        fresh = sampler.generate_trajectories(["Say something"] * 16)
        for t in fresh:
            t.reward = float(any(word.startswith("t") for word in t.response.split()))
        shares.append(fresh.mean_reward)
        algo.update(fresh, client)
    assert sum(shares[-5:]) > sum(shares[:5])


@pytest.mark.parametrize("algo", ["REINFORCE", "PPO"])
def test_going_on_from_a_checkpoint_equals_an_unbroken_run_bit_for_bit(algo: str, tmp_path: Path) -> None:
    """Six updates at once, or three, everything on disk, everything made anew, and three more."""

    def make() -> Any:
        if algo == "PPO":
            return PPO(PPOConfig(learning_rate=1e-3, target_kl=0.5))
        return REINFORCE(REINFORCEConfig(learning_rate=1e-3, normalize_advantages=False, baseline_decay=0.7))

    def run(algo: Any, sampler: MockRolloutSampler, client: Any, count: int) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        for _ in range(count):
            fresh = sampler.generate_trajectories(["Say something"] * 6)
            for t in fresh:
                t.reward = sum(t.response_tokens) % 7 / 7
            results.append(algo.update(fresh, client).to_dict())
        return results

    whole, sampler = make(), MockRolloutSampler(max_new_tokens=5, seed=3)
    unbroken = run(whole, sampler, sampler.training_client(), 6)

    first, begun = make(), MockRolloutSampler(max_new_tokens=5, seed=3)
    client = begun.training_client(tmp_path)
    found = run(first, begun, client, 3)
    save_checkpoint(first.get_state(), tmp_path / "checkpoint.json")
    saved = client.save_state("half").result().path
    second, again = make(), MockRolloutSampler(max_new_tokens=5, seed=3)
    again.calls = 3
    client = again.training_client(tmp_path)
    client.load_state_with_optimizer(saved).result()
    second.load_state(load_checkpoint(tmp_path / "checkpoint.json"))
    found += run(second, again, client, 3)
    assert found == unbroken
    assert (again.policy.logits == sampler.policy.logits).all()
    assert (again.policy.moments == sampler.policy.moments).all()
    assert second.get_state() == whole.get_state()


def test_the_state_holds_step_baseline_and_optimizer() -> None:
    client, algo = table(), plainly(learning_rate=0.5)
    algo.update(batch(client, [1.0, 0.0]), client)
    state = algo.get_state()
    assert (state["algorithm"], state["step"], state["baseline"]) == ("REINFORCE", 1, 0.5)
    assert state["optimizer"]["name"] == "AdamW" and state["optimizer"]["updates"] == 1
    assert state["optimizer"]["learning_rate"] == 0.5
    assert json.loads(json.dumps(state, allow_nan=False)) == state


GOOD = REINFORCE().get_state()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (PPO().get_state(), "this is a state of 'PPO'; load it into that algorithm, or start REINFORCE anew"),
        ({}, "the state lacks algorithm, step, baseline, optimizer; give what get_state"),
        ({k: v for k, v in GOOD.items() if k != "step"}, "the state lacks step"),
        ({**GOOD, "step": -1}, "step=-1, expected an integer of at least 0"),
        ({**GOOD, "step": 1.5}, "step=1.5"),
        ({**GOOD, "step": True}, "step=True"),
        ({**GOOD, "baseline": math.nan}, "baseline=nan, expected a finite number or null"),
        ({**GOOD, "baseline": "0.5"}, "baseline='0.5'"),
        ({**GOOD, "baseline": 10**400}, "baseline=an integer beyond 64 bits, expected a finite number"),
        ({**GOOD, "step": 10**5000}, "step=an integer beyond 64 bits, expected an integer of at least 0"),
        ({**GOOD, "optimizer": {}}, "optimizer.updates=None"),
        ({**GOOD, "optimizer": None}, "optimizer"),
        (None, "get_state"),
        ([], "get_state"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    client, algo = table(), plainly()
    algo.update(batch(client, [1.0, 0.0]), client)
    before = algo.get_state()
    with pytest.raises(ValueError, match=message):
        algo.load_state(state)
    assert algo.get_state() == before


def test_a_checkpoint_is_json_and_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {**GOOD, "baseline": 0.1 + 0.2}
    save_checkpoint(state, str(tmp_path / "checkpoint.json"))
    assert (
        json.loads((tmp_path / "checkpoint.json").read_text()) == state == load_checkpoint(tmp_path / "checkpoint.json")
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"algorithm": "REINFORCE", "st', "is not JSON .*; the file is damaged"),
        (b"", "is not JSON"),
        (b"[1, 2]", "holds a list, expected a state"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (pickle.dumps(GOOD), "is not JSON"),
        (json.dumps({**GOOD, "baseline": math.nan}).encode(), "nan|NaN"),
        (json.dumps({**GOOD, "baseline": math.inf}).encode(), "inf|Infinity"),
        (json.dumps({**GOOD, "baseline": 7}).replace(": 7", ": 1e999").encode(), "1e999 is beyond every finite number"),
        (json.dumps({**GOOD, "baseline": 7}).replace(": 7", ": -1e999").encode(), "1e999"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    """Half a file, nothing, another thing, a pickle (which is never opened as one), numbers that are none."""
    path = tmp_path / "checkpoint.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_missing_checkpoint_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint .*none.json does not exist"):
        load_checkpoint(tmp_path / "none.json")
    with pytest.raises(ValueError, match="folder"):
        load_checkpoint(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("n" * 5000, "not allowed by the system .5"),
        ("n" * 250, "at most 241 bytes"),
        ("d/" * 3000 + "c", "not allowed by the system"),
        ("d" * 256 + "/c", "not allowed by the system"),
        ("a\0b", "without zero bytes"),
        ("none/c.json", "none"),
    ],
)
def test_a_path_that_cannot_be_is_refused_by_both(path: str, message: str, tmp_path: Path) -> None:
    for act in (load_checkpoint, lambda place: save_checkpoint(GOOD, place)):
        with pytest.raises(ValueError, match=message) as caught:
            act(tmp_path / path)
        assert len(str(caught.value)) < 500
    with pytest.raises(ValueError, match=r"there is no folder .*none; make it first"):
        save_checkpoint(GOOD, tmp_path / "none" / "c.json")
    with pytest.raises(ValueError, match="is a folder; give the name of a file"):
        save_checkpoint(GOOD, tmp_path)
    with pytest.raises(ValueError, match="not an ordinary file"):
        load_checkpoint("/dev/zero")
    save_checkpoint(GOOD, tmp_path / ("n" * 241))
    assert load_checkpoint(tmp_path / ("n" * 241)) == GOOD


@pytest.mark.parametrize("wrong", [{"x": math.nan}, {"x": math.inf}, {"x": object()}, {"x": np.float32(1)}])
def test_a_state_that_is_not_json_is_refused_and_nothing_is_written(wrong: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    save_checkpoint(GOOD, path)
    with pytest.raises(ValueError, match=r"the state is not JSON .*; give what get_state"):
        save_checkpoint({**GOOD, **wrong}, path)
    assert load_checkpoint(path) == GOOD and [f.name for f in tmp_path.iterdir()] == ["checkpoint.json"]


def test_a_disk_that_takes_no_more_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    """The system refuses to write more than 64 bytes of a file: an OSError, the old file, and nothing beside it."""
    path = tmp_path / "checkpoint.json"
    save_checkpoint(GOOD, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError):
            save_checkpoint({**GOOD, "step": 7}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_checkpoint(path) == GOOD and [f.name for f in tmp_path.iterdir()] == ["checkpoint.json"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "the batch is empty; generate some trajectories first"),
        ([Trajectory("p", [], "r", [], reward=1.0)], "no token ids"),
        ([Trajectory("p", [2], "r", [2], reward=1.0)], "no sampling log-probs"),
        (
            [Trajectory("p", [2], "r", [2], [-1.0], temperature=x) for x in (1.0, 0.5)],
            r"temperatures \[0.5, 1.0\]; expected one, above 0",
        ),
        ([Trajectory("p", [2], "r", [2], [-1.0], temperature=0.0)], "expected one, above 0"),
    ],
)
@pytest.mark.parametrize("make", [plainly, PPO])
def test_a_batch_that_cannot_train_is_refused(items: list[Trajectory], message: str, make: Any) -> None:
    client = table()
    good = batch(client, [1.0, 0.0]) if items and items[0].temperature == 1.0 and len(items) == 1 else []
    with pytest.raises(ValueError, match=message):
        make().update([*good, *items], client)
    assert client.policy.version == 0


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (REINFORCEConfig, {"learning_rate": 0.0}, "learning_rate=0 changes nothing"),
        (REINFORCEConfig, {"learning_rate": math.nan}, "learning_rate=nan"),
        (REINFORCEConfig, {"learning_rate": "1e-5"}, "learning_rate='1e-5'"),
        (REINFORCEConfig, {"learning_rate": None}, "learning_rate=None"),
        (REINFORCEConfig, {"baseline_decay": 1.0}, "baseline_decay=1.0, expected from 0 to below 1"),
        (REINFORCEConfig, {"entropy_coef": -0.1}, "entropy_coef=-0.1"),
        (REINFORCEConfig, {"use_baseline": "no"}, "use_baseline='no', expected true or false"),
        (PPOConfig, {"clip_range": 1.5}, "clip_range=1.5"),
        (PPOConfig, {"ppo_epochs": 0}, "ppo_epochs=0, expected an integer of at least 1"),
        (PPOConfig, {"ppo_epochs": 2.5}, "ppo_epochs=2.5"),
        (PPOConfig, {"ppo_epochs": 4.0}, "ppo_epochs=4.0"),
        (PPOConfig, {"target_kl": -1.0}, "target_kl=-1.0"),
    ],
)
def test_a_setting_out_of_range_is_named(make: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make(**wrong)
    assert make.__name__ in str(caught.value)


def test_the_seeds_defaults() -> None:
    assert vars(REINFORCEConfig()) == {
        "learning_rate": 1e-5, "use_baseline": True, "baseline_decay": 0.99, "normalize_advantages": True,
        "entropy_coef": 0.01,
    }  # fmt: skip
    assert vars(PPOConfig()) == {
        "learning_rate": 1e-5, "clip_range": 0.2, "ppo_epochs": 4, "entropy_coef": 0.01, "target_kl": 0.01
    }  # fmt: skip


@pytest.mark.parametrize("algo", [REINFORCE, PPO])
def test_an_episode_that_ended_before_its_first_token_counts_in_the_mean_alone(algo: Any) -> None:
    """Its reward is one of those that advantages are compared with; it has no token to learn from or to measure."""
    client = table()
    items = [*batch(client, [1.0, 0.0]), Trajectory("", [], "", [], [], reward=0.5)]
    config = algo.settings(learning_rate=0.1, entropy_coef=0.0)
    done = algo(config).update(items, client)
    spread = math.sqrt(1 / 6) + 1e-6  # of 1, 0 and 0.5 around 0.5
    assert [t.advantage for t in items] == pytest.approx([0.5 / spread, -0.5 / spread, 0.0])
    assert client.policy.version >= 1 and done.kl_div > 0


@pytest.mark.parametrize("algo", [REINFORCE, PPO])
def test_a_trajectory_that_cannot_train_is_refused_before_any_step(algo: Any) -> None:
    client = table()
    items = batch(client, [1.0, 0.0])
    items.append(Trajectory("p", [], "text alone", [], [], reward=0.0))
    before = client.policy.logprobs(1.0).tolist()
    with pytest.raises(ValueError, match="has no token ids"):
        algo().update(items, client)
    assert client.policy.version == 0 and client.policy.logprobs(1.0).tolist() == before
