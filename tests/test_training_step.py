"""One step of RL over the table policy: what is collected, what is learned, and when it stops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.clients.mock import MockTrainingClient, TablePolicy
from rlvr.envs import PromptEnv
from rlvr.protocols import AdamParams, Datum, ForwardBackwardOutput, Future, LazyFuture, SamplingParams
from rlvr.reward import resolve_reward
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.step import Schedule, Trainer, TrainingOptions, TrainingStopped
from rlvr.types import Task


class Letters:
    """Tasks that want the letter `a`; every 3rd wants `z`, which the policy cannot say."""

    levels, reward = ("",), "exact_match"

    def __init__(self, impossible: bool = False) -> None:
        self.impossible = impossible

    def train(self, seed: int, index: int, level: str) -> Task:
        wanted = "z" if self.impossible and index % 3 == 2 else "a"
        return Task(f"{index}", "say", {"answer": wanted})

    def heldout(self, count: int | None) -> list[Task]:
        return [Task("held", "say", {"answer": "a"})]

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str | None:
        return "a"


def trainer(
    client: Any = None,
    algorithm: str = "ppo",
    reward: Any = None,
    source: Letters | None = None,
    temperature: float = 1.0,
    warnings: list[str] | None = None,
    **options: Any,
) -> Trainer:
    source = source or Letters()
    asked = TrainingOptions(
        **{"prompts_per_step": 6, "group_size": 4, "optimizer": Schedule(learning_rate=0.1), **options}
    )
    return Trainer(
        client or MockTrainingClient(TablePolicy(["say", "a", "b"])),
        source,
        reward or resolve_reward("exact_match"),
        resolve_algorithm(algorithm),
        SamplingParams(max_tokens=1, temperature=temperature),
        asked,
        Curriculum(source, CurriculumOptions(), seed=1),
        seed=1,
        warn=(warnings if warnings is not None else []).append,
    )


def test_the_policy_learns_to_say_what_is_rewarded() -> None:
    """From about one in four to nearly always in 40 steps, for every row of the table."""
    for name in ("reinforce", "grpo", "dr_grpo", "ppo", "importance_sampling"):
        t = trainer(algorithm=name)
        first = t.collect(0).all.mean_reward
        for step in range(40):
            metrics = t.update(step, t.collect(step))
        assert first < 0.6 and metrics["reward"] > 0.9, (name, first, metrics["reward"])
        assert metrics.get("sampling/sampling_logp_difference/max", 0.0) < 1e-9


def test_a_constant_batch_makes_no_step() -> None:
    """All rewards equal: nothing to learn, so the weights stay and the metrics say why."""
    policy = TablePolicy(["say", "a", "b"])
    policy.logits[policy.tokenizer.ids["a"]] = 40.0
    t = trainer(MockTrainingClient(policy))
    before = policy.logits.copy()
    metrics = t.update(0, t.collect(0))
    assert metrics["updates"] == 0 and metrics["frac_reward_zero_std"] == 1.0
    unmeasured = {"sampling/sampling_logp_difference/mean", "grad_norm", "loss", "optim/approx_kl"}
    assert not unmeasured & set(metrics), "a number nobody measured must not look like a good one"
    assert (policy.logits == before).all()


def test_refill_samples_further_waves_until_enough_groups_teach() -> None:
    """Every third prompt is unsolvable: one wave leaves gaps, refill closes them, and statistics count all waves."""
    source = Letters(impossible=True)
    alone = trainer(source=source).collect(0)
    refilled = trainer(source=source, refill=5).collect(0)
    assert alone.waves == 1 and refilled.waves > 1
    assert len(refilled.all) == refilled.waves * 6 * 4
    selected = resolve_algorithm("ppo").select(refilled.batch)
    assert len({t.group_id for t in selected}) == 6
    assert len(resolve_algorithm("ppo").select(alone.batch)) < len(selected)


def test_minibatches_and_epochs_use_every_trajectory_and_count_their_updates() -> None:
    t = trainer(num_minibatches=3, ppo_epochs=2)
    collected = t.collect(0)
    metrics = t.update(0, collected)
    assert metrics["updates"] == 6
    assert metrics["tokens_trained"] == 2 * len(resolve_algorithm("ppo").select(collected.batch))


def test_target_kl_ends_the_step_before_the_next_forward_backward() -> None:
    """A huge rate moves the policy past the limit in the first update; the remaining updates are skipped."""
    far = {"optimizer": Schedule(learning_rate=5.0), "ppo_epochs": 8}
    unlimited, limited = trainer(**far), trainer(**far, target_kl=0.05)
    assert unlimited.update(0, unlimited.collect(0))["updates"] == 8
    assert limited.update(0, limited.collect(0))["updates"] == 1
    two = trainer(optimizer=Schedule(learning_rate=5.0), ppo_epochs=2, target_kl=0.05)
    assert two.update(0, two.collect(0))["updates"] == 1, "the limit must hold with two updates a step, too"


def test_a_failing_verifier_stops_the_run_with_its_tracebacks_past_the_budget() -> None:
    """1 failure in 3 against a budget of 5 %: the message names the reward and the cause."""
    calls: list[int] = []

    def flaky(prompt: str, response: str, meta: Any = None) -> float:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise RuntimeError("sandbox is gone")
        return float(response == "a")

    with pytest.raises(TrainingStopped, match="error_budget") as stopped:
        trainer(reward=resolve_reward(flaky)).collect(0)
    assert "sandbox is gone" in str(stopped.value)


def test_within_the_budget_errors_are_counted_and_left_out_of_every_mean() -> None:
    calls: list[int] = []

    def flaky(prompt: str, response: str, meta: Any = None) -> float:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("once")
        return 1.0

    t = trainer(reward=resolve_reward(flaky))
    metrics = t.update(0, t.collect(0))
    assert metrics["verifier/error_rate"] == pytest.approx(1 / 24)
    assert metrics["reward"] == 1.0 and metrics["env/all/correct"] == 1.0
    assert metrics["frac_reward_zero_std"] == 1.0, "an error must not look like a mixed group"


class Stale(MockTrainingClient):
    """A client whose sampler answers with other weights than it says."""

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
        sampler = super().save_weights_and_get_sampling_client(name)
        stated = sampler.fingerprint
        calls: list[int] = []

        class Swapped:
            fingerprint = stated

            def sample(self, *args: Any) -> Any:
                calls.append(1)
                sampler.fingerprint = "other weights" if len(calls) == 2 else stated
                return sampler.sample(*args)

            def get_tokenizer(self) -> Any:
                return sampler.get_tokenizer()

        return Swapped()


def test_one_answer_by_other_weights_stops_the_run() -> None:
    """The second of six groups was sampled elsewhere: its fingerprint gives it away."""
    with pytest.raises(TrainingStopped, match="other weights"):
        trainer(Stale(TablePolicy(["say", "a", "b"]))).collect(0)


def test_a_truncated_rollout_is_masked_whole_when_asked() -> None:
    """With `mask_truncated` an answer that ran out of tokens is in no gradient and no denominator."""
    t = trainer(mask_truncated=True)
    collected = t.collect(0)
    cut = [x for x in collected.batch if x.truncated]
    metrics = t.update(0, collected)
    assert cut and metrics["tokens_trained"] <= len(collected.batch) - len(cut)


class Drifting(MockTrainingClient):
    """A trainer whose log-probs differ from its sampler's by `drift`."""

    drift = 0.0

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        output = super().forward_backward(data, loss_fn, loss_fn_config).result()
        for row in output.loss_fn_outputs:
            row["logprobs"].data[:] += self.drift
        return LazyFuture.done(output)


def test_a_gap_between_sampler_and_trainer_warns_and_then_stops() -> None:
    client = Drifting(TablePolicy(["say", "a", "b"]))
    warnings: list[str] = []
    t = trainer(client, warnings=warnings)
    client.drift = 0.005
    metrics = t.update(0, t.collect(0))
    assert not warnings and metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.005, rel=1e-3)
    assert metrics["optim/kl_sample_train_v1"] == pytest.approx(-0.005, rel=1e-3)
    assert metrics["optim/kl_sample_train_v2"] == pytest.approx(0.5 * 0.005**2, rel=1e-2)
    client.drift = 0.05
    t.update(1, t.collect(1))
    assert len(warnings) == 1
    client.drift = 0.2
    version = client.policy.version
    with pytest.raises(TrainingStopped, match="gap_stop"):
        t.update(2, t.collect(2))
    assert client.policy.version == version, "the wrong gradient must not be stepped"


def test_the_trainer_scores_at_the_sampling_temperature() -> None:
    """At T = 0.5 the log-probs of sampler and trainer still agree."""
    t = trainer(temperature=0.5)
    assert t.update(0, t.collect(0))["sampling/sampling_logp_difference/max"] < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 1}, "group_size >= 2"),
        ({"target_kl": -1.0, "ppo_epochs": 4}, "expected 0"),
        ({"algorithm": "importance_sampling", "ppo_epochs": 4}, "does not clip"),
        ({"algorithm": "reinforce", "refill": 3}, "has no effect"),
        ({"temperature": 0.0}, "nothing is learned"),
        ({"target_kl": 0.1}, "no effect"),
        ({"gap_warn": 0.5}, "0 < warn <= stop"),
        ({"prompts_per_step": 0}, "at least 1"),
        ({"mode": "dpo"}, "rlvr or sft"),
    ],
)
def test_settings_that_cannot_teach_are_refused_with_the_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(**change)


def test_schedules_by_hand() -> None:
    """Warm-up over 3 steps, then down: literals."""
    linear = Schedule(learning_rate=1.0, warmup_steps=3, decay="linear", final_rate=0.1)
    rates = [linear.at(step, 13).learning_rate for step in (0, 1, 2, 3, 8, 13)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.55, 0.1])
    cosine = Schedule(learning_rate=1.0, decay="cosine")
    assert [cosine.at(s, 10).learning_rate for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0], abs=1e-12)


def test_the_mock_trainer_is_the_real_mathematics() -> None:
    """Gradients of the table policy against finite differences, for each of its losses, at temperature 0.7."""
    policy = TablePolicy(["say", "a", "b", "c"], seed=3, spread=2.0)
    client = MockTrainingClient(policy)
    rng = np.random.default_rng(0)
    tokens = list(rng.integers(2, 6, size=6))
    arrays = {
        "logprobs": rng.normal(-1.5, 0.3, size=5), "advantages": rng.normal(size=5), "weights": rng.normal(size=5)
    }  # fmt: skip
    from rlvr.protocols import ModelInput, TensorData

    inputs = {"target_tokens": TensorData.of(tokens[1:]), **{k: TensorData.of(v) for k, v in arrays.items()}}
    datum = Datum(ModelInput([int(t) for t in tokens[:-1]]), inputs)
    for loss in ("cross_entropy", "importance_sampling", "ppo"):
        policy.gradient = None
        client.forward_backward([datum], loss, {"temperature": 0.7})
        exact = policy.gradient
        assert exact is not None
        for i in range(2, 6):
            values = []
            for sign in (1, -1):
                policy.logits[i] += sign * 1e-6
                values.append(client.forward([datum], loss, {"temperature": 0.7}).result().metrics["loss:sum"])
                policy.logits[i] -= sign * 1e-6
            assert exact[i] == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-5), loss


def test_the_mock_optimizer_is_torchs_adamw() -> None:
    torch = pytest.importorskip("torch")
    policy = TablePolicy(["a", "b"], spread=1.0)
    weights = torch.nn.Parameter(torch.tensor(policy.logits.copy()))
    peer = torch.optim.AdamW([weights], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for i in range(5):
        gradient = np.cos(np.arange(len(policy.logits)) + i)
        policy.gradient = gradient.copy()
        weights.grad = torch.tensor(gradient)
        MockTrainingClient(policy).optim_step(AdamParams(0.05, eps=1e-8, weight_decay=0.1))
        peer.step()
    assert np.allclose(policy.logits, weights.detach().numpy(), atol=1e-12)
    assert math.isfinite(policy.logits.sum())
