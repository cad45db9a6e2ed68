"""One step of RL over the table policy: what is collected, what is learned, and when it stops."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from rlvr.algorithms import ALGORITHMS, Algorithm, resolve_algorithm
from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.futures import Future, LazyFuture
from rlvr.core.messages import Datum, ForwardBackwardOutput
from rlvr.reward import resolve_reward
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.training_job import freeze_collector
from tests.kit.table_trainer import Letters, collect, make_trainer


def learns_from_a_table(algorithm: Algorithm) -> bool:
    """Without a critic, roles or a teacher that reads more than the task: a table reads no prompt."""
    return not (
        algorithm.advantage.takes_critic
        or algorithm.advantage.needs_roles
        or any(term.needs_prompts for term in algorithm.terms)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name, one in ALGORITHMS.items() if learns_from_a_table(one)))
def test_the_policy_learns_to_say_what_is_rewarded(name: str) -> None:
    """From one in four to nearly always in 40 steps. The teacher says it already, the reference is the first policy."""
    policies = [TablePolicy(["say", "a", "b"]) for _ in range(2)]
    policies[0].logits[policies[0].tokenizer.ids["a"]] += 5.0
    teacher, reference = (MockTrainingClient(policy).create_sampling_client() for policy in policies)
    t = make_trainer(algorithm=name)
    object.__setattr__(t.parts, "teacher", teacher)
    t.reference = reference
    first = collect(t, 0).all.mean_reward
    for step in range(40):
        metrics = t.update(step, collect(t, step))
    assert first < 0.6 and metrics["reward"] > 0.9, (first, metrics["reward"])
    assert metrics.get("sampling/sampling_logp_difference/max", 0.0) < 1e-9


def test_a_constant_batch_makes_no_step() -> None:
    """All rewards equal: nothing to learn, so the weights stay and the metrics say why."""
    policy = TablePolicy(["say", "a", "b"])
    policy.logits[policy.tokenizer.ids["a"]] = 40.0
    t = make_trainer(MockTrainingClient(policy))
    before = policy.logits.copy()
    metrics = t.update(0, collect(t, 0))
    assert metrics["updates"] == 0 and metrics["frac_reward_zero_std"] == 1.0
    unmeasured = {"sampling/sampling_logp_difference/mean", "grad_norm", "loss", "optim/approx_kl"}
    assert not unmeasured & set(metrics), "a number that was not measured must not look like a good one"
    assert (policy.logits == before).all()


def test_dynamic_sampling_draws_further_waves_until_enough_groups_teach() -> None:
    """Every third prompt is unsolvable: one wave leaves gaps, further ones close them, statistics count all of them."""
    source = Letters(impossible=True)
    alone = collect(make_trainer(source=source), 0)
    refilled = collect(make_trainer(source=source, dynamic_sampling=5), 0)
    assert alone.waves == 1 and refilled.waves > 1
    assert len(refilled.all) == refilled.waves * 6 * 4
    selected = resolve_algorithm("ppo").select(refilled.batch)
    assert len({t.group_id for t in selected}) == 6
    assert len(resolve_algorithm("ppo").select(alone.batch)) < len(selected)


def test_minibatches_and_epochs_use_every_trajectory_and_count_their_updates() -> None:
    t = make_trainer(num_substeps=3, ppo_epochs=2)
    collected = collect(t, 0)
    metrics = t.update(0, collected)
    assert metrics["updates"] == 6
    assert metrics["tokens_trained"] == 2 * len(resolve_algorithm("ppo").select(collected.batch))


def test_target_kl_ends_the_step_before_the_next_forward_backward() -> None:
    """A huge rate moves the policy past the limit in the first update; the remaining updates are skipped."""
    far = {"optimizer": OptimizerSection(learning_rate=5.0), "ppo_epochs": 8}
    unlimited, limited = make_trainer(**far), make_trainer(**far, target_kl=0.05)
    assert unlimited.update(0, collect(unlimited, 0))["updates"] == 8
    assert limited.update(0, collect(limited, 0))["updates"] == 1
    two = make_trainer(optimizer=OptimizerSection(learning_rate=5.0), ppo_epochs=2, target_kl=0.05)
    assert two.update(0, collect(two, 0))["updates"] == 1, "the limit must hold with two updates a step, too"


def test_a_failing_verifier_stops_the_run_with_its_tracebacks_past_the_budget() -> None:
    """1 failure in 3 against a budget of 5 %: the message names the reward and the cause."""
    calls: list[int] = []

    def flaky(prompt: str, response: str, meta: Any = None) -> float:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise RuntimeError("sandbox is gone")
        return float(response == "a")

    with pytest.raises(TrainingStoppedError, match="error_budget") as stopped:
        collect(make_trainer(reward=resolve_reward(flaky)), 0)
    assert "sandbox is gone" in str(stopped.value)


def test_within_the_budget_errors_are_counted_and_left_out_of_every_mean() -> None:
    calls: list[int] = []

    def flaky(prompt: str, response: str, meta: Any = None) -> float:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("once")
        return 1.0

    t = make_trainer(reward=resolve_reward(flaky))
    metrics = t.update(0, collect(t, 0))
    assert metrics["verifier/error_rate"] == pytest.approx(1 / 24)
    assert metrics["reward"] == 1.0 and metrics["env/all/correct"] == 1.0
    assert metrics["frac_reward_zero_std"] == 1.0, "an error must not look like a mixed group"


class Stale(MockTrainingClient):
    """A client whose sampler answers with other weights than it says."""

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
        sampler = super().save_weights_and_get_sampling_client(name)
        stated = sampler.fingerprint
        calls: list[int] = []

        class SwappingSampler:
            fingerprint = stated

            def sample(self, *args: Any) -> Any:
                calls.append(1)
                sampler.fingerprint = "other weights" if len(calls) == 2 else stated
                return sampler.sample(*args)

            def get_tokenizer(self) -> Any:
                return sampler.get_tokenizer()

        return SwappingSampler()


def test_one_answer_by_other_weights_stops_the_run() -> None:
    """The second of six groups was sampled elsewhere: its fingerprint gives it away."""
    with pytest.raises(TrainingStoppedError, match="other weights"):
        collect(make_trainer(Stale(TablePolicy(["say", "a", "b"]))), 0)


def test_a_truncated_rollout_is_masked_whole_when_asked() -> None:
    """With `mask_truncated` an answer that ran out of tokens is in no gradient and no denominator."""
    t = make_trainer(cells={"mask_truncated": True})
    collected = collect(t, 0)
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
        return LazyFuture.from_value(output)


def test_a_gap_between_sampler_and_trainer_warns_and_then_stops() -> None:
    client = Drifting(TablePolicy(["say", "a", "b"]))
    warnings: list[str] = []
    t = make_trainer(client, warnings=warnings)
    client.drift = 0.005
    metrics = t.update(0, collect(t, 0))
    assert not warnings and metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.005, rel=1e-3)
    assert metrics["optim/kl_sample_train_v1"] == pytest.approx(-0.005, rel=1e-3)
    assert metrics["optim/kl_sample_train_v2"] == pytest.approx(0.5 * 0.005**2, rel=1e-2)
    client.drift = 0.05
    for step in (1, 2):  # said once
        metrics = t.update(step, collect(t, step))
        assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.05, rel=1e-3)
    assert len(warnings) == 1
    client.drift = 0.2
    version = client.policy.version
    with pytest.raises(TrainingStoppedError, match="gap_stop"):
        t.update(3, collect(t, 3))
    assert client.policy.version == version, "the wrong gradient must not be stepped"


def test_the_trainer_scores_at_the_sampling_temperature() -> None:
    """At T = 0.5 the log-probs of sampler and trainer still agree."""
    t = make_trainer(temperature=0.5)
    assert t.update(0, collect(t, 0))["sampling/sampling_logp_difference/max"] < 1e-6


# What a step reports and keeps


def test_a_large_policy_change_is_warned_of() -> None:
    """A step that ends further than kl_warn is a warning with its remedies, after one update or several, and once."""
    for options in ({}, {"ppo_epochs": 3}, {"ppo_epochs": 3, "target_kl": 0.05}):
        warnings: list[str] = []
        t = make_trainer(optimizer=OptimizerSection(learning_rate=5.0), warnings=warnings, **options)
        t.update(0, collect(t, 0))
        assert len(warnings) == 1 and "large policy change" in warnings[0], options
        assert "training.kl_warn=0.1" in warnings[0]


def test_a_penalty_is_reported_and_the_reward_is_not_changed() -> None:
    """A budget of one token with a buffer of one: every answer pays the whole penalty."""
    t = make_trainer(cells={"overlong_buffer": 1, "overlong_penalty": 0.5})
    collected = collect(t, 0)
    before = collected.all.mean_reward
    metrics = t.update(0, collected)
    assert (metrics["penalty"], metrics["reward"]) == (0.5, before)
    assert "penalty" not in make_trainer().update(0, collect(make_trainer(), 0))


def test_a_kl_is_reported_against_the_reference_it_was_given() -> None:
    """Nothing at first, when the policy is the reference; more after it has moved."""
    t = make_trainer(cells={"kl_coef": 0.01})
    t.reference = t.parts.client.save_weights_and_get_sampling_client()
    first = t.update(0, collect(t, 0))["kl"]
    for step in range(1, 6):
        last = t.update(step, collect(t, step))["kl"]
    assert first == pytest.approx(0.0, abs=1e-6) and last > 0.05


def test_the_moving_baseline_outlives_a_restart() -> None:
    """Two steps, state, a new trainer over the same client and state: the third step is that of an unbroken run."""
    whole, parted = make_trainer(algorithm="reinforce_ema"), make_trainer(algorithm="reinforce_ema")
    for step in range(2):
        whole.update(step, collect(whole, step))
        parted.update(step, collect(parted, step))
    state = json.loads(json.dumps(parted.state()))
    assert isinstance(state["baseline"], float)
    again = make_trainer(parted.parts.client, algorithm="reinforce_ema")
    again.restore(state)
    assert again.update(2, collect(again, 2)) == whole.update(2, collect(whole, 2))
    assert (again.parts.client.policy.logits == whole.parts.client.policy.logits).all()


def test_the_rate_falls_over_the_optimizer_steps_of_the_whole_run() -> None:
    """2 steps of 2 optimizer steps: 4, 3, 2 and 1 quarters of the rate, of which each step reports its last."""
    t = make_trainer(steps=2, num_substeps=2, optimizer=OptimizerSection(learning_rate=0.1, decay="linear"))
    assert [t.update(step, collect(t, step))["optim/lr"] for step in range(2)] == pytest.approx([0.075, 0.025])


def test_schedules_by_hand() -> None:
    """Warm-up over 3 steps, then down: literals."""
    linear = OptimizerSection(learning_rate=1.0, warmup_steps=3, decay="linear", final_rate=0.1)
    rates = [linear.variant.at(step, 13).learning_rate for step in (0, 1, 2, 3, 8, 13)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.55, 0.1])
    cosine = OptimizerSection(learning_rate=1.0, decay="cosine")
    assert [cosine.variant.at(s, 10).learning_rate for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0], abs=1e-12)


def test_a_run_leaves_frozen_what_its_program_froze() -> None:
    gc.freeze()
    with freeze_collector():
        pass
    assert gc.get_freeze_count() > 0
