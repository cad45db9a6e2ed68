"""Checks of what can be learned: solved never, sometimes or always; near duplicates; what length alone earns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlvr.audits.environment.answer_texts import list_words, write_random
from rlvr.audits.environment.check_report import CheckResult, CheckState, not_tried, report_share, sound
from rlvr.audits.environment.scripted_play import CheckedEnvironment, PlayedEpisode
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import SamplingClient
from rlvr.core.task_statistics import share_interval
from rlvr.core.types import Outcome, Task, Trajectory, group_by, mean, std
from rlvr.envs.near_duplicates import NearDuplicate, choose_heldout_to_compare, find_near_duplicates
from rlvr.rollout.episodes import open_groups, rollout
from rlvr.rollout.scoring import score

TASKS = 12
LENGTHS = (1, 3, 8, 20, 60, 150)  # words
INSIDE = 100  # training prompts that are looked for among the others
MANY_NEAR = 0.2  # share of near duplicates from which the evaluation measures memory
EXPLAINED, EFFECT = 0.3, 0.2  # R^2 of the length, and its effect in shares of the full reward
ALWAYS = 0.9  # share of tasks that words at random may not always solve
SMALL = 1e-9


def check_reach(environment: CheckedEnvironment) -> list[CheckResult]:
    """Whether any answer earns more than others."""
    if environment.references:
        best = max(((one.value or 0.0), one.text) for one in environment.references.values())
        how = "a reference"
    elif environment.search:
        best = max(((one.value or 0.0), one.text) for one in environment.search.values())
        how = "a search, word by word,"
    else:
        return [not_tried("reward_reachability", "no demonstrations, no answers, and no words to search with")]
    tried = len(environment.references or environment.search)
    text = f"{how} earns up to {best[0]:g}"
    if best[0] > SMALL:
        return [sound("reward_reachability", text, tried)]
    state = CheckState.FAULT if environment.references else CheckState.WARNING
    return [CheckResult("reward_reachability", state, text, tried, (best[1],))]


class SampledEnvironment(NamedTuple):
    """The environment as a model reads it, by its own tokenizer, and the model."""

    environment: CheckedEnvironment
    sampler: SamplingClient


def check_signal(environment: CheckedEnvironment, samples: int, policy: SampledEnvironment | None) -> list[CheckResult]:
    """How many tasks a policy solves never, sometimes and always; without a model, words at random are the policy."""
    tasks = environment.tasks[:TASKS]
    if policy is None:
        words, turns = list_words(environment), max(1, environment.source.max_turns)
        asked = [
            (task, tuple(write_random(words, 1 + turn % 4, task.id, k, turn) for turn in range(min(turns, 8))))
            for task in tasks
            for k in range(samples)
        ]
        played = group_by(environment.judge(asked), lambda one: one.task.id)
        groups = [[(one.value, one.passed) for one in own] for own in played.values()]
    else:
        groups = _sample(policy, samples)
    solved = [sum(passed for _, passed in own) for own in groups]
    never, always = sum(not n for n in solved), sum(n == len(own) for n, own in zip(solved, groups, strict=True))
    spreads = [std([value for value, _ in own if value is not None]) > SMALL for own in groups]
    sometimes, who = len(groups) - never - always, "the model solves" if policy else "words at random solve"
    text = (
        f"{who} {never} tasks never, {sometimes} sometimes, {always} always ({samples} samples each); "
        f"{sum(spreads)} of {len(groups)} groups have rewards that differ"
    )
    interval = share_interval([float(one) for one in spreads])
    state, tried = CheckState.SOUND, len(groups) * samples
    values = {round(one.value, 9) for one in environment.played_episodes if one.value is not None}
    if len(values) == 1 and len(environment.played_episodes) > 20:
        (value,) = values
        text = f"all of {len(environment.played_episodes)} answers got the reward {value:g}"
        state = CheckState.FAULT
        if not (environment.references or policy or value > SMALL):
            text += "; without references only a policy that knows the moves can tell: give --model"
            state = CheckState.WARNING
    elif policy is None and always >= ALWAYS * len(groups):
        state = CheckState.FAULT
    elif policy is not None and not any(spreads):
        state = CheckState.WARNING
    return [CheckResult("training_signal", state, text, tried, (), interval)]


def _sample(policy: SampledEnvironment, samples: int) -> list[list[tuple[float | None, bool]]]:
    environment, sampler = policy
    tasks = environment.tasks[:TASKS]
    groups = open_groups(environment.source, tasks, samples, environment.tokenizer, "check")
    trajectories = rollout(groups, sampler, SamplingParams(max_tokens=512), seed=1)
    score(trajectories, environment.reward)
    last: dict[str, Trajectory] = {one.rollout_id: one for one in trajectories}
    by_group = group_by(list(last.values()), lambda one: one.group_id)
    name = environment.reward.name
    return [[(one.reward, one.scores[name].outcome is Outcome.PASSED) for one in own] for own in by_group.values()]


def has_same_answer(environment: CheckedEnvironment, one: Task, other: Task) -> bool:
    """Whether what is known of one task answers the other, as far as answers are known."""
    answers = [environment.find_answer(task) for task in (one, other)]
    return None in answers or answers[0] == answers[1]


def _show_near(one: NearDuplicate) -> str:
    return f"{100 * one.share:.0f}% of {one.heldout.prompt_text[:70]!r} is in {one.train.id!r}"


def check_duplicates(environment: CheckedEnvironment) -> list[CheckResult]:
    """Held-out prompts that nearly repeat a training prompt, and training prompts that stand there more than once."""
    source, train = environment.source, environment.scanned
    heldout = choose_heldout_to_compare(environment.scanned_heldout)
    if not train:
        return [not_tried("near_duplicates", "there is no training task")]
    if source.writes_tasks:
        return [not_tried("near_duplicates", "the policy writes the training tasks")]
    prompts = Counter(task.prompt_text for task in train)
    is_telling = bool(source.size) or prompts.most_common(1)[0][1] <= max(2, len(train) // 10)
    if not heldout or not is_telling:
        return [not_tried("near_duplicates", "no held-out task, or prompts that do not tell tasks apart")]
    near = find_near_duplicates(heldout, train)
    alike = [one for one in near if has_same_answer(environment, one.heldout, one.train)]
    text = "held-out prompts nearly repeat one with the same answer"
    results = [report_share("near_duplicates", list(map(_show_near, alike)), len(heldout), text, MANY_NEAR)]
    if others := [_show_near(one) for one in near if one not in alike]:
        text = "held-out prompts nearly repeat one with another answer"
        results.append(report_share("near_duplicates", others, len(heldout), text, state=CheckState.WARNING))
    if source.size:  # an epoch has each row once
        twice = [f"{text[-80:]!r} {n} times" for text, n in prompts.items() if n > 1 and text.strip()]
        results.append(report_share("near_duplicates", twice, len(prompts), "training prompts repeat", MANY_NEAR))
    inside = [one for one in find_near_duplicates(train[:INSIDE], train[INSIDE:]) if one.heldout.id != one.train.id]
    hits = list(map(_show_near, inside))
    text = "training prompts nearly repeat another one"
    results.append(report_share("near_duplicates", hits, len(train[:INSIDE]), text, state=CheckState.WARNING))
    return results


def check_length(environment: CheckedEnvironment) -> list[CheckResult]:
    """How much of the reward of answers that solve nothing their length explains."""
    words = list_words(environment)
    tasks = environment.tasks[:8]
    asked = [(task, (write_random(words, n, task.id, n, "length"),)) for task in tasks for n in LENGTHS]
    played = [one for one in environment.judge(asked) if one.value is not None]
    most = environment.top or max((abs(one.value or 0.0) for one in played), default=0.0)
    if len(played) < 12 or not most:
        return [not_tried("length_bias", "no answer earned a reward to compare with")]
    explained, rise = _fit(played)
    by_length = [mean([one.value or 0.0 for one in played if _count_words(one) == n]) for n in LENGTHS]
    effect = max(by_length) - by_length[0] if rise > 0 else max(by_length) - by_length[-1]
    text = (
        f"length explains {100 * explained:.0f}% of the rewards of random words; "
        f"{', '.join(f'{n}: {value:.2g}' for n, value in zip(LENGTHS, by_length, strict=True))}"
    )
    is_fault = explained > EXPLAINED and effect > EFFECT * most
    return [CheckResult("length_bias", CheckState.FAULT if is_fault else CheckState.SOUND, text, len(played))]


def _count_words(one: PlayedEpisode) -> int:
    return len(one.turns[0].split())


def _fit(played: Sequence[PlayedEpisode]) -> tuple[float, float]:
    """R^2 and slope of the reward over the logarithm of the number of words."""
    xs = [math.log(_count_words(one) + 1) for one in played]
    ys = [one.value or 0.0 for one in played]
    if std(ys) < SMALL or std(xs) < SMALL:
        return 0.0, 0.0
    covariance = mean([(x - mean(xs)) * (y - mean(ys)) for x, y in zip(xs, ys, strict=True)])
    return (covariance / (std(xs) * std(ys))) ** 2, covariance / std(xs) ** 2
