"""Findings about updates: steps without one, a critic that is blind, entropy, how far a step moves the policy.

A part of `rlvr.training.diagnosis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlvr.core.types import mean
from rlvr.training.finding import REPLACE, Finding, format_percent
from rlvr.training.metric_values import (
    STALL_STEPS,
    WINDOW,
    Rows,
    get_mean,
    get_pass_rate,
    get_reward_range,
    get_values,
    has_no_update,
    is_given,
)
from rlvr.training.stall import CEILING

START = 5  # first steps of reinforcement learning, against which the last ones are compared
LOW_ENTROPY = 0.05  # nats a token
BLIND, MISLEADING = 0.05, -0.2  # explained variance of a critic that says hardly anything, or worse than nothing


def find_update_faults(rows: Rows) -> Iterator[Finding]:
    """What the last of these steps of reinforcement learning say about updates."""
    recent = rows[-WINDOW:]
    yield from _updates(recent)
    yield from _critic(rows)
    yield from _entropy(recent, rows)
    yield from _policy(recent)


def _updates(recent: Rows) -> Iterator[Finding]:
    idle = [row for row in recent if has_no_update(row)]
    share = len(idle) / len(recent)
    if share >= 0.1 and not get_mean(recent, "env/all/correct") >= CEILING:
        yield Finding(
            "problem" if share >= 0.5 else "hint",
            "no_update",
            f"{len(idle)} of the last {len(recent)} steps made no update: no group had signal",
            "leave out the rows whose two completions are the same, or raise training.prompts_per_step"
            if is_given(recent)
            else f"the other findings, if there are any, say why; {REPLACE}",
        )


def _critic(rows: Rows) -> Iterator[Finding]:
    """A critic whose values say hardly anything, in a run that has tasks left to learn."""
    known = get_values(rows, "critic/explained_variance")
    explained = mean(known[-STALL_STEPS:]) if len(known) >= WINDOW else math.nan
    if explained <= BLIND and not get_pass_rate(rows) >= CEILING:
        (low, high), spread = get_reward_range(rows), get_mean(rows[-STALL_STEPS:], "reward_std")
        worse = " (less than a constant would)" if explained < 0 else ""
        yield Finding(
            "problem" if explained <= MISLEADING and spread >= 0.1 * (high - low) else "hint",
            "critic_blind",
            f"the critic's values explain hardly anything of the returns{worse}: critic/explained_variance is "
            f"{explained:.2f}, the rewards of a step deviate by {spread:.2g}",
            "more training.critic.warmup_steps, a higher training.critic.optimizer.learning_rate, or a group baseline "
            "(algorithm.name=grpo); if the rewards hardly differ, there is little to explain: first make them differ",
        )


def _entropy(recent: Rows, rows: Rows) -> Iterator[Finding]:
    """The sampled entropy a token, against the first steps. Where nearly everything passes it is low of itself.

    With a schedule of temperatures the first steps had another one, so there is nothing to compare with.
    """
    start, now = get_mean(rows[:START], "entropy"), get_mean(recent[-START:], "entropy")
    passes = get_pass_rate(rows)
    is_comparable = not get_values(rows, "rollout/temperature")
    if is_comparable and now > start + 0.5 and now > 2 * start:
        yield Finding(
            "problem",
            "entropy_up",
            f"entropy rose from {start:.3f} to {now:.3f} nats a token: the policy turns into noise",
            "lower training.optimizer.learning_rate, or the entropy bonus (algorithm.entropy_coef)",
        )
    elif is_comparable and passes < CEILING and now < LOW_ENTROPY and now < 0.2 * start:
        yield Finding(
            "problem",
            "entropy_gone",
            f"entropy fell from {start:.3f} to {now:.3f} nats a token while only {format_percent(passes)} pass: the "
            "policy hardly explores",
            "an entropy bonus (algorithm.entropy_coef), a wider upper clip (algorithm.clip_high), or a lower "
            "training.optimizer.learning_rate, from an earlier checkpoint",
        )
    elif passes < CEILING and now < 0.001:
        yield Finding(
            "problem",
            "entropy_gone",
            f"entropy is {now:.4f} nats a token while only {format_percent(passes)} pass: every completion is the same",
            "a higher rollout.temperature, or less fine-tuning (sft.steps)",
        )


def _policy(recent: Rows) -> Iterator[Finding]:
    """How far an update moves the policy, and whether sampler and trainer agree."""
    gap = get_mean(recent, "sampling/sampling_logp_difference/mean")
    if gap > 0.01:
        yield Finding(
            "problem" if gap > 0.1 else "hint",
            "gap",
            f"sampler and trainer differ by {gap:.3g} nats a token where they should agree: the gradient is wrong",
            "model.dtype=float32, and rollout.temperature=1 where the client cannot score at another",
        )
    kl = max(get_values(recent, "optim/kl_after") + get_values(recent, "optim/approx_kl"), default=0.0)
    if kl > 0.1:
        yield Finding(
            "problem" if kl > 1 else "hint",
            "large_update",
            f"a step moved the policy by {kl:.3g} nats a token (optim/kl_after)",
            "lower training.optimizer.learning_rate or training.ppo_epochs, or set training.target_kl=0.05",
        )
    clipped = get_mean(recent, "clip_ratio/region_mean")
    if clipped >= 0.2:
        yield Finding(
            "hint",
            "clipped",
            f"the clip removed the gradient of {format_percent(clipped)} of the trained tokens",
            "fewer updates a batch (training.ppo_epochs, training.num_substeps), or a lower "
            "training.optimizer.learning_rate",
        )
