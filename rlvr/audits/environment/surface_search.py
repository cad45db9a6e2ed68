"""A search for rewards without answers: which surface earns most, over forms and contents, and by a tiny policy.

Forms and contents are arms of a bandit, halved in rounds on training tasks (successive halving, Karnin et al. 2013,
https://proceedings.mlr.press/v28/karnin13.html) and measured on others. The policy is a table of words that reads no
prompt: what it learns to earn is earned without solving anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlvr.audits.environment.answer_texts import CONSTANTS, list_words, write_random
from rlvr.audits.environment.check_report import CheckResult, CheckState, format_share, not_tried
from rlvr.audits.environment.scripted_play import FORMS, CheckedEnvironment
from rlvr.audits.environment.verifier_checks import NARROW, WIDE, list_constants
from rlvr.clients.mock.mock_client import MockTrainingClient
from rlvr.clients.mock.tabular_policy import toy_policy
from rlvr.core import rng
from rlvr.core.messages import AdamParams, Datum, ModelInput, SamplingParams, TensorData
from rlvr.core.task_statistics import mean_interval
from rlvr.core.types import mean, std

ARMS, FIRST = 240, 2  # arms of the first round, and tasks for each
STEPS, SAMPLES, MOST_TOKENS = 60, 32, 12  # of the policy
SECONDS = 20.0  # for each search


def list_arms(environment: CheckedEnvironment) -> list[str]:
    """Answers that read no task: constants, contents in the forms of answers, repetitions, words at random."""
    words = list_words(environment)
    contents = [*CONSTANTS[:12], *words[:12]]
    arms = list_constants(environment)
    arms += [" ".join([word] * 30) for word in words[:6]] + [" ".join(words), "\n".join(words)]
    arms += [write_random(words, length, "arm", length, k) for length in (2, 5, 12, 40) for k in range(6)]
    arms += [form.format(content) for form in FORMS for content in contents]
    return list(dict.fromkeys(arms))[:ARMS]


def search_surface(environment: CheckedEnvironment) -> tuple[str, list[float], int]:
    """(the best arm, its rewards on tasks that did not choose it, the number of trials)."""
    arms = list_arms(environment)
    chosen_on = environment.tasks[: len(environment.tasks) * 2 // 3] or environment.tasks
    fresh = environment.tasks[len(chosen_on) :] + environment.heldout
    rewards: dict[str, list[float]] = {arm: [] for arm in arms}
    end, trials, pulls = time.monotonic() + SECONDS, 0, FIRST
    while len(arms) > 1 and time.monotonic() < end:
        start = len(rewards[arms[0]])
        tasks = [chosen_on[(start + n) % len(chosen_on)] for n in range(pulls)]
        for one in environment.judge([(task, (arm,)) for arm in arms for task in tasks]):
            rewards[one.turns[0]].append(one.value or 0.0)
        trials += len(arms) * len(tasks)
        arms = sorted(arms, key=lambda arm: -mean(rewards[arm]))[: max(1, len(arms) // 2)]
        pulls = min(2 * pulls, len(chosen_on))
    measured = environment.judge([(task, (arms[0],)) for task in fresh or chosen_on])
    return arms[0], [one.value or 0.0 for one in measured], trials + len(measured)


def train_policy(environment: CheckedEnvironment) -> tuple[list[str], list[float], int]:
    """(what the policy says in the end, the rewards of its last steps, the number of trials).

    REINFORCE with the mean of a step as baseline, over a table of words that reads no prompt.
    """
    policy = toy_policy(list_words(environment), seed=0)
    client = MockTrainingClient(policy)
    tasks, end, trials = environment.tasks, time.monotonic() + SECONDS, 0
    earned: list[list[float]] = []
    said: list[str] = []
    for step in range(STEPS):
        params = SamplingParams(max_tokens=MOST_TOKENS, seed=rng.key("surface", step))
        sampler = client.save_weights_and_get_sampling_client()
        drawn = sampler.sample(ModelInput([2]), SAMPLES, params).result().sequences
        said = [policy.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in drawn]
        asked = [(tasks[(step * SAMPLES + k) % len(tasks)], (text,)) for k, text in enumerate(said)]
        rewards = [one.value or 0.0 for one in environment.judge(asked)]
        earned.append(rewards)
        trials += len(rewards)
        if time.monotonic() > end:
            break
        centre, scale = mean(rewards), std(rewards)
        if scale < 1e-9:
            continue
        data = [_make_datum(one.tokens, (r - centre) / scale) for one, r in zip(drawn, rewards, strict=True)]
        client.forward_backward(data, "cross_entropy").result()  # weighted by the advantages: the policy gradient
        client.optim_step(AdamParams(learning_rate=2e-4)).result()
    return said, [value for rewards in earned[-5:] for value in rewards], trials


def _make_datum(tokens: Sequence[int], advantage: float) -> Datum:
    inputs = {"target_tokens": TensorData.of(list(tokens)), "weights": TensorData.of([advantage] * len(tokens))}
    return Datum(ModelInput([2, *tokens[:-1]]), inputs)


def check_surface(environment: CheckedEnvironment) -> list[CheckResult]:
    """What both searches earn, in shares of the most that a reference earns, or else of what a search found."""
    top = environment.top
    if top is None:
        return [not_tried("gameability_gap", "no reference or search earned a reward to compare with")]
    arm, rewards, trials = search_surface(environment)
    results = [_report(environment, "the best surface", rewards, top, trials, (repr(arm),))]
    said, last, tried = train_policy(environment)
    return [
        *results,
        _report(
            environment, "a policy that reads no prompt", last, top, tried, tuple(map(repr, dict.fromkeys(said)))[:3]
        ),
    ]


def _report(
    environment: CheckedEnvironment,
    what: str,
    rewards: Sequence[float],
    top: float,
    trials: int,
    examples: tuple[str, ...],
) -> CheckResult:
    interval = mean_interval([reward / top for reward in rewards])
    state = CheckState.SOUND
    if interval.value > NARROW:
        state = CheckState.FAULT if interval.low > WIDE and environment.accepted else CheckState.WARNING
    text = f"{what} earns {format_share(interval)} of {environment.top_name}"
    return CheckResult("gameability_gap", state, text, trials, examples, interval)
