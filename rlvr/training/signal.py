"""Why nothing is learned: what the metric rows of a run say, as findings with a remedy each.

    for finding in findings(rows):
        print(finding.severity, finding.fact, finding.remedy)

Everything is a pure function of the rows of `metrics.jsonl` (names in docs/metrics.md), so that a resumed run says what
an undisturbed one says. The thresholds are our judgement, set so that runs that learn draw no alarm; each stands where
it is used. Exercised by `python -m pytest tests/test_signal.py` and `rlvr doctor RUN`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.types import mean, std

WINDOW = 20  # steps that a finding is about
IDLE = 10  # steps without an update after which learning stalls
TREND = 60  # steps over which a reward that does not rise is a stall; two halves are compared
SOLVED = 0.95  # share of passed answers from which little is left to learn

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Finding:
    """`severity` is problem (this alone can stop learning), hint (worth a look) or note. `code` groups findings."""

    severity: str
    code: str
    fact: str
    remedy: str


class StallWatch:
    """Says once in a run that learning stalls. `rows` are those of earlier attempts that still stand."""

    def __init__(self, rows: Rows = ()) -> None:
        self._rows: list[Mapping[str, Any]] = []
        self._told = False
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> list[Finding]:
        """The report when this row is the first with which learning stalls, else nothing."""
        self._rows += rl_rows([row])
        if self._told or not _stalled(self._rows):
            return []
        self._told = True
        return findings(self._rows)


def rl_rows(rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("phase", "rl") == "rl"]


def stalled(rows: Rows) -> bool:
    """Whether learning stands still: hardly an update lately, or a reward that does not rise and is not near its top.

    Meant to be believed: few steps, noise, answers that nearly all pass and a rising held-out pass rate are no stall.
    """
    return _stalled(rl_rows(rows))


def _stalled(rows: Rows) -> bool:
    """`stalled` of rows of one phase. It runs every step: what looks at the whole run comes last."""
    if len(rows) < IDLE:
        return False
    if _idle(rows):
        return not _solved(rows)
    reward = _values(rows[-TREND:], "reward")
    if len(reward) < TREND:
        return False
    before, after = reward[: TREND // 2], reward[TREND // 2 :]
    rise = mean(after) - mean(before)
    noise = math.hypot(std(before), std(after)) / math.sqrt(TREND // 2)
    looks = _values(rows[-TREND:], "test/env/all/correct")
    if rise >= noise or (len(looks) > 1 and max(looks[1:]) > looks[0] + 0.01):
        return False
    low, high = _range(rows)
    measured = noise <= 0.03 * (high - low)  # with few answers a step the noise hides a rise, and nothing is said
    return measured and rise < 0.01 * (high - low) and not _solved(rows)


def _idle(rows: Rows) -> bool:
    """Nearly no update lately, or only from batches of equal rewards (an entropy bonus makes updates of those)."""
    recent = rows[-IDLE:]
    still = [_value(row, "updates") == 0 or _value(row, "reward_std") == 0 for row in recent]
    return sum(still) >= 0.9 * len(recent)


def findings(rows: Rows) -> list[Finding]:
    """What the last steps of reinforcement learning show that can keep a policy from learning; problems first."""
    rows = rl_rows(rows)
    if not rows:
        return [Finding("note", "no_steps", "no step of reinforcement learning yet", "let it take some")]
    recent = rows[-WINDOW:]
    found = [
        *_answers(recent),
        *_groups(recent, rows),
        *_updates(recent),
        *_entropy(recent, rows),
        *_policy(recent),
        *_trend(rows),
    ]
    order = ("problem", "hint", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def told(found: Sequence[Finding]) -> str:
    """The findings as lines for a person."""
    return "\n".join(f"  {f.severity}: {f.fact}\n    -> {f.remedy}" for f in found) or "  nothing stands out"


def _answers(recent: Rows) -> Iterator[Finding]:
    """Answers that could not be judged for what they say."""
    cut = _mean(recent, "completions/clipped_ratio")
    if cut >= 0.1:
        yield Finding(
            "problem" if cut >= 0.5 else "hint",
            "truncated",
            f"{_percent(cut)} of answers ran out of tokens (mean length "
            f"{_mean(recent, 'completions/mean_length'):.0f})",
            "raise rollout.max_tokens; if answers never end, teach the end token first (sft.steps)",
        )
    silent = _mean(recent, "verifier/no_answer_rate")
    if silent >= 0.2:
        yield Finding(
            "problem" if silent >= 0.5 else "hint",
            "no_answer",
            f"{_percent(silent)} of judged answers hold no answer in the expected form",
            "show the form in the prompt, reward it a little (as reward.type=combined does), or warm up (sft.steps)",
        )
    error = _mean(recent, "verifier/error_rate")
    if error > 0:
        yield Finding(
            "problem" if error >= 0.02 else "hint",
            "errors",
            f"the verifier broke on {_percent(error)} of answers: they teach nothing",
            "mend the reward (reward.type, reward.kwargs); rollouts/ holds the answers and reasons",
        )
    invalid = _mean(recent, "verifier/invalid_rate")
    if invalid > 0:
        yield Finding(
            "problem" if invalid >= 0.1 else "hint",
            "invalid_tasks",
            f"{_percent(invalid)} of answers belong to tasks that nobody can judge",
            "mend or drop these tasks (env.kwargs); rollouts/ names them",
        )


def _groups(recent: Rows, rows: Rows) -> Iterator[Finding]:
    """Rewards that do not differ: there is no better and worse to learn from."""
    correct, equal = _mean(recent, "env/all/correct"), _mean(recent, "frac_reward_zero_std")
    low, high = _range(recent)
    if high > low and _mean(rows, "env/all/correct") == 0 and len(rows) >= IDLE:
        yield Finding(
            "hint",
            "nothing_passes",
            f"rewards differ ({low:.3g} to {high:.3g}) but no answer ever passed: pass rates say nothing here",
            "lower the reward's passed_at (or return a Score) if such rewards mean success",
        )
    if correct >= SOLVED:
        if equal >= 0.5:
            yield Finding(
                "note",
                "solved",
                f"{_percent(correct)} of answers pass: {_percent(equal)} of groups teach nothing any more",
                "stop here (training.until), or take harder tasks (env.kwargs, curriculum.by=pass_rate)",
            )
    elif low == high:
        yield Finding(
            "problem",
            "one_reward",
            f"every answer got the same reward, {low:.3g} (last steps: {len(recent)})",
            "easier tasks (env.kwargs), a warm-up (sft.steps), or a reward with steps in between (reward.type); "
            "check by hand that a right answer gets more",
        )
    elif equal >= 0.5 and _group_size(recent) > 1.5:
        severity = "problem" if equal >= 0.8 and not correct >= 0.8 else "hint"
        fact = f"{_percent(equal)} of groups have equal rewards and teach nothing; {_percent(correct)} of answers pass"
        if correct <= 0.1:
            remedy = (
                "the tasks are too hard: easier ones (env.kwargs, curriculum.by=pass_rate), a warm-up (sft.steps), "
                "more tries (training.group_size), or a reward with steps in between"
            )
        elif correct >= 0.8:
            remedy = "the tasks are too easy: harder ones (env.kwargs, curriculum.by=pass_rate), or training.refill=2"
        elif (levels := _levels(recent)) and (max(levels.values()) >= 0.9 or min(levels.values()) <= 0.1):
            rates = ", ".join(f"{level}: {_percent(rate)}" for level, rate in levels.items())
            remedy = (
                f"solved or out of reach, level by level ({rates}): "
                "curriculum.by=pass_rate takes those in between, training.refill=2 replaces such groups"
            )
        else:
            remedy = (
                "answers of a group are too much alike: rollout.temperature=1, an entropy bonus "
                "(algorithm.entropy_coef), training.refill=2, or a lower training.optimizer.learning_rate"
            )
        yield Finding(severity, "equal_groups", fact, remedy)


def _updates(recent: Rows) -> Iterator[Finding]:
    idle = [row for row in recent if _value(row, "updates") == 0]
    share = len(idle) / len(recent)
    if share >= 0.1 and _mean(recent, "env/all/correct") < SOLVED:
        yield Finding(
            "problem" if share >= 0.5 else "hint",
            "no_update",
            f"{len(idle)} of the last {len(recent)} steps made no update: no answer in them taught anything",
            "the other findings say why; training.refill=2 samples more prompts until enough groups teach",
        )


def _entropy(recent: Rows, rows: Rows) -> Iterator[Finding]:
    """The sampled entropy a token, against the first steps."""
    start, now = _mean(rows[:5], "entropy"), _mean(recent[-5:], "entropy")
    if math.isnan(start) or math.isnan(now):
        return
    if now < 0.05 and now < 0.2 * start and _mean(recent, "env/all/correct") < 0.9:
        yield Finding(
            "problem",
            "entropy_gone",
            f"entropy fell from {start:.3f} to {now:.3f} nats a token: the policy hardly tries anything new",
            "an entropy bonus (algorithm.entropy_coef), a wider upper clip (algorithm.clip_high), or a lower "
            "training.optimizer.learning_rate, from an earlier checkpoint",
        )
    elif now < 0.001:
        if _mean(recent, "env/all/correct") < 0.9:
            yield Finding(
                "problem",
                "entropy_gone",
                f"entropy is {now:.4f} nats a token: every try is the same answer",
                "a higher rollout.temperature, or a shorter warm-up (sft.steps)",
            )
    elif now > start + 0.5 and now > 2 * start:
        yield Finding(
            "problem",
            "entropy_up",
            f"entropy rose from {start:.3f} to {now:.3f} nats a token: the policy dissolves into noise",
            "lower training.optimizer.learning_rate, or the entropy bonus (algorithm.entropy_coef)",
        )


def _policy(recent: Rows) -> Iterator[Finding]:
    """How far an update goes, and whether sampler and trainer agree."""
    gap = _mean(recent, "sampling/sampling_logp_difference/mean")
    if gap > 0.01:
        yield Finding(
            "problem" if gap > 0.1 else "hint",
            "gap",
            f"sampler and trainer differ by {gap:.3g} nats a token where they should agree: the gradient is off",
            "model.dtype=float32, and rollout.temperature=1 where the client cannot score at another",
        )
    kl = max(_values(recent, "optim/kl_after") + _values(recent, "optim/approx_kl"), default=0.0)
    if kl > 0.1:
        yield Finding(
            "problem" if kl > 1 else "hint",
            "large_update",
            f"a step moved the policy by {kl:.3g} nats a token (optim/kl_after)",
            "lower training.optimizer.learning_rate or training.ppo_epochs, or set training.target_kl=0.05",
        )
    clipped = _mean(recent, "clip_ratio/region_mean")
    if clipped >= 0.2:
        yield Finding(
            "hint",
            "clipped",
            f"the clip removed the gradient of {_percent(clipped)} of the trained tokens",
            "fewer updates a batch (training.ppo_epochs, training.num_substeps), or a lower "
            "training.optimizer.learning_rate",
        )


def _trend(rows: Rows) -> Iterator[Finding]:
    """The reward over the run, and whether held-out tasks agree with it."""
    reward, looks, (low, high) = _values(rows, "reward"), _values(rows, "test/env/all/correct"), _range(rows)
    third = len(reward) // 3
    rise = mean(reward[-third:]) - mean(reward[:third]) if third else 0.0
    if len(looks) >= 3 and third >= 3 and rise >= 0.1 * (high - low) and looks[-1] <= looks[0] + 0.01:
        yield Finding(
            "hint",
            "reward_only",
            f"reward rose by {rise:.3g} while the held-out pass rate went from {_percent(looks[0])} to "
            f"{_percent(looks[-1])}: the policy may please the reward without solving tasks",
            "read answers of rollouts/ that score high and fail; weigh correctness more (reward.kwargs)",
        )
    if _stalled(rows) and not _idle(rows):
        before, after = mean(reward[-TREND : -TREND // 2]), mean(reward[-TREND // 2 :])
        yield Finding(
            "hint",
            "flat",
            f"reward did not rise over the last {TREND} steps ({before:.3f}, then {after:.3f})",
            "if nothing else is found: another training.optimizer.learning_rate (both ways), more answers a step "
            "(training.prompts_per_step, training.group_size), or accept that this is what the model can do",
        )


def _solved(rows: Rows) -> bool:
    """Near the top: nearly all answers pass, or rewards are within 5 % of the best that any answer ever got."""
    recent = rows[-IDLE:]
    low, high = _range(rows)
    return _mean(recent, "env/all/correct") >= SOLVED or (
        high > low and _mean(recent, "reward") >= high - 0.05 * (high - low)
    )


def _range(rows: Rows) -> tuple[float, float]:
    """The smallest and the largest reward of any answer; (nan, nan) where rows do not say."""
    return (
        min(_values(rows, "reward/min"), default=math.nan),
        max(_values(rows, "reward/max"), default=math.nan),
    )


def _levels(rows: Rows) -> dict[str, float]:
    """Pass rate by level of the tasks."""
    names = {name for row in rows for name in row if name.startswith("env/level_") and name.endswith("/correct")}
    return {name.split("/")[1].removeprefix("level_"): _mean(rows, name) for name in sorted(names)}


def _group_size(rows: Rows) -> float:
    """Answers a group, from what rows say. Groups of one have equal rewards always and need no other (reinforce)."""
    answers = _mean(rows, "rollout/tokens") / max(_mean(rows, "completions/mean_length"), 1e-9)
    return answers / max(_mean(rows, "rollout/groups"), 1e-9)


def _value(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # hundreds of digits
        return math.nan


def _values(rows: Rows, name: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := _value(row, name))]


def _mean(rows: Rows, name: str) -> float:
    values = _values(rows, name)
    return mean(values) if values else math.nan


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"
