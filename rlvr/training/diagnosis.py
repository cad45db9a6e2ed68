"""Diagnoses what keeps a run from learning: findings from its metric rows and failing groups, each with a remedy.

    for finding in findings(rows):
        print(finding.severity, finding.fact, finding.remedy)

Everything is a pure function of the rows of `metrics.jsonl` (names in docs/run/metrics.md) and of the groups that
`failure_groups` finds, so a resumed run reports what an uninterrupted one reports. The thresholds are our judgement:
runs that learn must raise no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlvr.core.types import mean
from rlvr.core.verdict_reasons import EPISODE_FAILED
from rlvr.training.answer_form import AnswerForm
from rlvr.training.failure_groups import FailureGroup
from rlvr.training.finding import REPLACE, Finding, format_percent
from rlvr.training.metric_values import (
    STALL_STEPS,
    WINDOW,
    Rows,
    get_mean,
    get_pass_rate,
    get_reward_range,
    get_values,
    select_rl_rows,
)
from rlvr.training.role_findings import find_role_faults
from rlvr.training.stall import CEILING, TREND, has_no_signal, is_flat, is_near_best
from rlvr.training.update_findings import START, find_update_faults

SOLVED = 0.95  # pass rate from which little is left to learn
HARD = 0.1  # pass rate up to which groups without signal mean that tasks are too hard
IMITATED = 1.0  # nats that fine-tuning may lose on a whole demonstration and still reproduce it often
TURNS = "env/all/turns/"  # before the name of a role
NEVER = 0.15  # pass rate that guessing may reach

# What follows from another finding is left out: where all but one kind is solved, groups are equal and the policy sure.
EXPLAINED = {
    "unsolved_kind": ("too_easy", "solved", "equal_groups", "no_update", "entropy_gone", "flat", "ceiling"),
    "answer_form": ("nothing_passes", "too_hard", "one_reward", "no_answer", "no_update", "entropy_gone", "flat"),
    "reference_refused": ("too_hard", "no_answer", "no_update", "entropy_gone", "flat"),
    "demonstrations_refused": ("nothing_passes", "too_hard", "no_update", "entropy_gone", "flat"),
    "nothing_passes": ("too_hard", "no_update", "flat"),
    "proposals_refused": ("idle_role", "too_hard", "one_reward", "equal_groups", "no_update", "entropy_gone", "flat"),
    "verdicts_unreadable": ("verifier_collapsed", "too_hard", "one_reward", "equal_groups", "no_update", "flat"),
    "verifier_collapsed": ("too_easy", "too_hard", "one_reward", "equal_groups", "no_update", "entropy_gone", "flat"),
    "no_calls": ("no_answer", "one_reward", "no_update", "entropy_gone", "flat"),
    "one_reward": ("no_update", "entropy_gone", "flat"),
    "solved": ("large_update",),
    "too_easy": ("no_update", "large_update"),
    "too_hard": ("no_update", "flat"),
    "equal_groups": ("no_update",),
}


def diagnose_steps(rows: Rows, groups: Sequence[FailureGroup] = (), form: AnswerForm | None = None) -> list[Finding]:
    """What in the last steps of RL, or in one kind of task, can keep a policy from learning; problems first.

    `form` is that of the baseline's failed completions.
    """
    kinds = list(_kinds(groups))
    sft, rows = [row for row in rows if row.get("phase") == "sft"], select_rl_rows(rows)
    other_form = [found] if form and (found := form.describe()) else []
    if not rows:
        return [
            *other_form,
            *kinds,
            Finding("note", "no_steps", "no step of reinforcement learning yet", "let it make some steps"),
        ]
    recent = rows[-WINDOW:]
    results = [
        *_verdicts(recent),
        *(other_form if get_mean(recent, "env/all/correct") <= HARD else []),  # else the policy learned the form
        *kinds,
        *_demonstrations(sft, rows),
        *_in_causal_order(list(_answers(recent)), list(_groups(recent, rows)), recent),
        *find_role_faults(rows),
        *find_update_faults(rows),
        *_trend(rows),
    ]
    explained = {code for finding in results for code in EXPLAINED.get(finding.code, ())}
    if (
        kinds and groups[0].rate_of_others < CEILING
    ):  # then the others are not solved either, and that has a cause of its own
        explained -= {"no_update", "entropy_gone", "flat"}
    order = ("problem", "hint", "note")
    left = sorted([f for f in results if f.code not in explained], key=lambda finding: order.index(finding.severity))
    return name_rates(left, rows)


def name_rates(results: Sequence[Finding], rows: Rows) -> list[Finding]:
    """Let the remedies name the rate of Muon too, if the rows are of a run with it: it moves most of the weights."""
    if not get_values(rows, "matrix_learning_rate"):
        return list(results)
    both = "training.optimizer.matrix_learning_rate (and learning_rate)"
    return [replace(f, remedy=f.remedy.replace("training.optimizer.learning_rate", both)) for f in results]


def format_findings(results: Sequence[Finding]) -> str:
    """The findings as lines of text; with nothing but notes, first that nothing stands in the way."""
    lines = [f"  {f.severity}: {f.fact}\n    -> {f.remedy}" for f in results]
    is_green = all(f.severity == "note" and f.code != "no_steps" for f in results)
    return "\n".join(["  nothing stands in the way"] * is_green + lines)


def _kinds(groups: Sequence[FailureGroup]) -> Iterator[Finding]:
    """Kinds of task that are never solved while the others are."""
    kinds = [group for group in groups if group.is_unsolved]
    if kinds:
        count = "one kind of task is" if len(kinds) == 1 else f"{len(kinds)} kinds of task are"
        how = "never" if all(kind.rate <= NEVER for kind in kinds) else "rarely"
        rates = ", ".join(f"{kind.name} passes {format_percent(kind.rate)}" for kind in kinds)
        by_level = all(kind.shared_property == "level" for kind in kinds)
        more = "draw that level more often (curriculum.by=schedule; by=pass_rate gives it the least weight)"
        yield Finding(
            "problem",
            "unsolved_kind",
            f"{count} {how} solved: {rates} where the others pass {format_percent(kinds[0].rate_of_others)}",
            f"{more if by_level else 'give more such tasks'}, fine-tune on demonstrations until they pass (sft.steps, "
            "sft.until, sft.until_each), or reward a part of their solution (reward.type)",
        )


def _answers(recent: Rows) -> Iterator[Finding]:
    """Completions that could not be judged by their content."""
    if get_mean(recent, "env/all/calls") == 0:
        yield Finding(
            "problem",
            "no_calls",
            "no agent called the policy: its episodes have no tokens, and nothing is trained",
            "let the agent's client read OPENAI_BASE_URL or ANTHROPIC_BASE_URL (a function: assignment.base_url); a "
            "base URL or a model of its own goes elsewhere",
        )
    for role in sorted({name.removeprefix(TURNS) for row in recent for name in row if name.startswith(TURNS)}):
        if get_mean(recent, f"{TURNS}{role}") == 0:
            yield Finding(
                "problem",
                "idle_role",
                f"the role {role!r} took no turn: nothing of it is trained",
                "let the game give it a turn; if it is to be played by others, name an opponent (env.kwargs.opponent)",
            )
    cut, length = (get_mean(recent, f"completions/{name}") for name in ("clipped_ratio", "mean_length"))
    if cut >= 0.1 and length != 1:  # completions of one token, by rollout.max_tokens=1, have no end
        yield Finding(
            "problem" if cut >= 0.5 else "hint",
            "truncated",
            f"{format_percent(cut)} of completions ran out of tokens (mean length {length:.0f})",
            "raise rollout.max_tokens; if completions never end, teach the end token by fine-tuning first (sft.steps)",
        )
    silent = get_mean(recent, "verifier/no_answer_rate")
    if silent >= 0.2:
        yield Finding(
            "problem" if silent >= 0.5 else "hint",
            "no_answer",
            f"{format_percent(silent)} of judged completions have no answer in the expected form",
            "show the form in the prompt, reward it (reward.type=combined does), or fine-tune first (sft.steps)",
        )


def _in_causal_order(answers: list[Finding], groups: list[Finding], recent: Rows) -> list[Finding]:
    """Completions that are cut off explain that none earns anything, and not that all earn the same."""
    low, high = get_reward_range(recent)
    return [*answers, *groups] if low == high == 0 else [*groups, *answers]


def _verdicts(recent: Rows) -> Iterator[Finding]:
    """Completions without a verdict."""
    error = get_mean(recent, "verifier/error_rate")
    if error > 0:
        of_episodes = get_mean(recent, f"verifier/error/{EPISODE_FAILED}") > 0
        what = "the episodes of" if of_episodes else "the verifier failed on"
        yield Finding(
            "problem" if error >= 0.02 else "hint",
            "errors",
            f"{what} {format_percent(error)} of completions{' failed' if of_episodes else ''}: nothing is learned from "
            "them",
            "see what the agent's or environment's error says: `rlvr doctor` shows the newest"
            if of_episodes
            else "fix the reward (reward.type, reward.kwargs); rollouts/ has the completions and reasons",
        )
    invalid = get_mean(recent, "verifier/invalid_rate")
    if invalid > 0:
        yield Finding(
            "problem" if invalid >= 0.1 else "hint",
            "invalid_tasks",
            f"{format_percent(invalid)} of completions belong to tasks that cannot be judged",
            "fix or leave out these tasks (env.kwargs); rollouts/ names them",
        )


def _demonstrations(sft: Rows, rows: Rows) -> Iterator[Finding]:
    """Demonstrations that the policy reproduces and the verifier refuses."""
    length, passed = get_mean(sft[-START:], "completions/mean_length"), get_mean(rows[:START], "env/all/correct")
    loss = get_mean(sft[-START:], "loss") * length
    if len(sft) >= STALL_STEPS and loss <= IMITATED and passed <= 0.1 * math.exp(-loss):
        yield Finding(
            "problem",
            "demonstrations_refused",
            f"fine-tuning reproduces whole demonstrations (with chance {format_percent(math.exp(-loss))}), but only "
            f"{format_percent(passed)} of the completions after it passed: the verifier may refuse right answers",
            "judge a demonstration by `rlvr verify`; then fix the reward (reward.type, reward.kwargs) or the data "
            "(env.kwargs)",
        )


def _groups(recent: Rows, rows: Rows) -> Iterator[Finding]:
    """Groups without signal for the run's algorithm."""
    correct, silent = get_mean(recent, "env/all/correct"), 1 - get_mean(recent, "frac_groups_with_signal")
    low, high = get_reward_range(recent)
    passes = format_percent(correct)
    if high > low and get_mean(rows, "env/all/correct") == 0 and len(rows) >= STALL_STEPS:
        yield Finding(
            "hint",
            "nothing_passes",
            f"rewards differ ({low:.3g} to {high:.3g}) but no completion ever passed: {high:.3g} may be less than a "
            "pass takes (passed_at, 1 unless the reward says), or the verifier refuses right answers",
            "judge a right answer by `rlvr verify`; say what passes by @register_reward(NAME, passed_at=...), or "
            "return a Score",
        )
    if correct >= SOLVED and silent >= 0.5:
        start = get_mean(rows[:START], "env/all/correct")
        if start >= SOLVED:
            yield Finding(
                "problem" if silent >= 0.8 else "hint",
                "too_easy",
                f"the tasks are too easy: {format_percent(start)} of completions passed from the first steps on, "
                f"{format_percent(silent)} of groups have no signal",
                "harder tasks (env.kwargs); check by `rlvr verify` that a wrong answer does not pass",
            )
        else:
            yield Finding(
                "note",
                "solved",
                f"{passes} of completions pass: {format_percent(silent)} of groups have no signal any more",
                "stop here (training.until), or take harder tasks (env.kwargs, curriculum.by=pass_rate)",
            )
    elif low == high and not get_values(recent, "teacher/kl"):  # a teacher teaches at any reward
        yield Finding(
            "problem",
            "one_reward",
            f"every completion got the same reward, {low:.3g}; {passes} pass (last steps: {len(recent)})",
            "the reward ignores whether a completion passes: fix it (reward.type, reward.kwargs)"
            if correct > 0
            else "easier tasks (env.kwargs), fine-tuning (sft.steps), or a reward with intermediate values "
            "(reward.type); check by `rlvr verify` that a right answer gets more",
        )
    elif correct < CEILING and silent >= 0.5:
        yield _silent_groups(recent, correct, silent)


def _silent_groups(recent: Rows, correct: float, silent: float) -> Finding:
    """Why most groups have no signal, of a run that has not solved its tasks."""
    fact = f"{format_percent(silent)} of groups have no signal"
    passes = f"{format_percent(correct)} of completions pass"
    severity = "problem" if silent >= 0.8 else "hint"
    if correct <= HARD:
        return Finding(
            severity,
            "too_hard",
            f"the tasks are too hard: {passes}, {fact}",
            "easier ones (env.kwargs, curriculum.by=pass_rate), fine-tuning (sft.steps), more completions "
            "(training.group_size), or a reward with intermediate values",
        )
    levels = _levels(recent)
    if correct >= 0.8:
        severity = "hint"
        remedy = f"{REPLACE}, curriculum.by=pass_rate draws mixed levels"
    elif levels and (max(levels.values()) >= 0.9 or min(levels.values()) <= 0.1):
        rates = ", ".join(f"{level}: {format_percent(rate)}" for level, rate in levels.items())
        remedy = (
            f"solved or out of reach, level by level ({rates}): curriculum.by=pass_rate takes those in between, "
            f"{REPLACE}"
        )
    else:
        remedy = (
            "the completions of a group are too similar: rollout.temperature=1, an entropy bonus "
            f"(algorithm.entropy_coef), or a lower training.optimizer.learning_rate; {REPLACE}"
        )
    return Finding(severity, "equal_groups", f"{fact}; {passes}", remedy)


def _trend(rows: Rows) -> Iterator[Finding]:
    """The reward over the run, and whether held-out tasks agree with it."""
    reward, heldout = get_values(rows, "reward"), get_values(rows, "test/env/all/correct")
    low, high = get_reward_range(rows)
    third = len(reward) // 3
    rise = mean(reward[-third:]) - mean(reward[:third]) if third else 0.0
    if (
        len(heldout) >= 3
        and third >= 3
        and rise >= 0.1 * (high - low)
        and heldout[-1] <= min(heldout[0] + 0.01, CEILING)
    ):
        yield Finding(
            "hint",
            "reward_only",
            f"reward rose by {rise:.3g} while the held-out pass rate went from {format_percent(heldout[0])} to "
            f"{format_percent(heldout[-1])}: the policy may please the reward without solving tasks",
            "read completions of rollouts/ with a high reward that fail; give correctness more weight (reward.kwargs)",
        )
    if not is_flat(rows) or has_no_signal(rows):
        return
    if get_pass_rate(rows) >= CEILING:
        yield Finding(
            "note",
            "ceiling",
            f"levelled off at its ceiling: {format_percent(get_pass_rate(rows))} pass, and no more than before "
            f"{TREND} steps",
            "accept it as the limit of this model, or stop there (training.until)",
        )
    elif not is_near_best(rows):
        before, after = mean(reward[-TREND : -TREND // 2]), mean(reward[-TREND // 2 :])
        yield Finding(
            "hint",
            "flat",
            f"reward did not rise over the last {TREND} steps ({before:.3f}, then {after:.3f})",
            "if there is no other finding: a higher or lower training.optimizer.learning_rate, more completions a step "
            "(training.prompts_per_step, training.group_size), or accept it as the limit of this model",
        )


def _levels(rows: Rows) -> dict[str, float]:
    """Pass rate by level of the tasks."""
    names = {name for row in rows for name in row if name.startswith("env/level_") and name.endswith("/correct")}
    return {name.split("/")[1].removeprefix("level_"): get_mean(rows, name) for name in sorted(names)}
