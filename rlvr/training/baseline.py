"""What the evaluation before training says of training: groups with signal, and what leaves them without."""

from __future__ import annotations

import math

from rlvr.algorithms import Algorithm
from rlvr.core.types import mean
from rlvr.training.answer_form import LEAST_SIGNAL
from rlvr.training.evaluate import Evaluation
from rlvr.training.expected_signal import expect_signal
from rlvr.training.finding import Finding, format_percent
from rlvr.training.training_options import TrainingOptions

FEWEST = 8  # completions that must all earn the same


def estimate_signal(baseline: Evaluation, algorithm: Algorithm, options: TrainingOptions) -> float:
    """The share of groups that will have signal, from the baseline's pass rates.

    nan where pass rates do not tell: the reward has intermediate values, or the algorithm, a teacher, or given
    completions do not need groups of unequal rewards.
    """
    is_binary = all(math.isclose(r.reward, r.passed / r.judged, abs_tol=1e-9) for r in baseline.results)
    is_needed = (
        all(one.has_group_baseline for one in algorithm.every)
        and not algorithm.has_teacher
        and options.completions == "sampled"
    )
    if not (baseline.results and is_binary and is_needed) or options.is_control:
        return math.nan
    return expect_signal([(r.passed, r.judged) for r in baseline.results], options.group_size)


def describe_signal(share: float, baseline: Evaluation, group_size: int) -> str:
    """One line for the view of a run."""
    judged = sum(r.judged for r in baseline.results)
    return (
        f"{_about(share)} of groups will have signal at first (groups of {group_size}; a Beta "
        f"distribution fitted to the pass rates of {len(baseline.results):,} held-out tasks, {judged:,} completions)"
    )


def find_obstacles(baseline: Evaluation, signal: float) -> list[Finding]:
    """What will keep the policy from learning, before it is trained; `signal` is that of `estimate_signal`."""
    results = baseline.results
    judged, passed = sum(r.judged for r in results), sum(r.passed for r in results)
    if not judged:
        return []
    completions = judged + baseline.unjudged
    cut = 0.0 if baseline.tokens == completions else baseline.truncated / completions  # one token each has no end
    form = baseline.form.describe() if baseline.form else None
    found = [form] if form else []
    rewards = [r.reward for r in results]
    is_varied = max(rewards) - min(rewards) >= 1e-9
    has_signal = is_varied if math.isnan(signal) else signal >= LEAST_SIGNAL
    if cut >= 0.5 and 2 * passed < judged and not has_signal:
        found.append(
            Finding(
                "problem",
                "truncated",
                f"{format_percent(cut)} of completions of the baseline ran out of tokens",
                "raise rollout.max_tokens, or ask for a shorter answer in the prompts",
            )
        )
    is_constant = judged >= FEWEST and len(results) > 1 and not is_varied and passed in (0, judged)
    passes = f"{format_percent(passed / judged)} of {judged:,} completions of the baseline pass"
    if is_constant:
        passes = f"every completion of the baseline got the same reward, {mean(rewards):.3g}; {passes}"
    fact = passes if math.isnan(signal) else f"{passes}: {_about(signal)} of groups will have signal"
    if is_constant and rewards[0]:
        remedy = (
            "the reward may ignore what a completion says: check by `rlvr verify` that a wrong answer earns less than "
            "a right one (reward.type, reward.kwargs); if it does, take harder tasks (env.kwargs)"
        )
        return [Finding("problem", "one_reward", fact, remedy), *found]
    if form or not (is_constant or signal < LEAST_SIGNAL):
        return found
    if 2 * passed >= judged:
        remedy = "harder tasks (env.kwargs); check by `rlvr verify` that a wrong answer does not pass"
        return [*found, Finding("problem", "too_easy", fact, remedy)]
    remedy = (
        "a reward that accepts the model's form or has intermediate values (reward.type; check by `rlvr verify` that a "
        "right answer passes), easier tasks (env.kwargs), more completions (training.group_size), or fine-tuning "
        "(sft.steps)"
    )
    return [*found, Finding("problem", "one_reward" if is_constant else "too_hard", fact, remedy)]


def _about(share: float) -> str:
    return "fewer than 1%" if share < 0.01 else f"about {format_percent(share)}"
