"""Finds out whether failed completions hold the right answer in a form that their reward does not accept.

    form = examine_form(judged_tasks, reward)
    form.describe()    # a Finding that names a reward which reads the answers, or None

The rewards tried are the registered ones that compare with `meta["answer"]`. A reward is named only if it tells right
from wrong: what it accepts must be refused with another reference, be it of another task or anything else that stands
in the same prompt and completion. A reward that only looks whether the reference occurs fails that, as a policy could
earn it by listing answers. And it must accept far more than by chance, which shuffled references tell.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from rlvr.core.types import Outcome
from rlvr.reward import Reward, known_rewards, resolve_reward
from rlvr.reward.registry import reward_spec
from rlvr.reward.signatures import Case
from rlvr.reward.text.final_answer import MAX_TEXT, parse_number
from rlvr.training.expected_signal import expect_signal
from rlvr.training.finding import Finding, format_percent
from rlvr.training.judged_tasks import JudgedTask

MOST_TASKS = 64  # whose completions are examined
MOST_CONTROLS = 8  # other references that each accepted completion is judged with
MOST_WRONG = 0.05  # share of controls that a reward may accept
FEWEST = 3  # completions that another reward must accept
MANY = 0.2  # share of the failed ones that is no chance: of two possible answers another task's is as often the own
CHANCE = 0.01  # the largest p-value that is no chance: text at random holds the answer "7" now and then
LEAST_SIGNAL = 0.1  # expected share of groups with signal below which a policy hardly learns
EXACT = "reward.type=exact_match"
SHORT = 2  # characters of a reference that counts in its own case only
_TOKEN = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|[^\W\d_]+")


@dataclass(frozen=True)
class Acceptance:
    """What a reward accepts of the failed completions, and its expected signal.

    `accepted` of them, and `by_chance` with the reference of another task; `wrong` of the `controls` (other references
    for the accepted ones); `signal` is the expected share of groups with signal under this reward.
    """

    setting: str
    accepted: int
    by_chance: int
    wrong: int
    controls: int
    signal: float

    @property
    def tells_right_from_wrong(self) -> bool:
        return self.controls > 0 and self.wrong <= MOST_WRONG * self.controls


@dataclass(frozen=True)
class AnswerForm:
    """Failed completions of an evaluation, and where their reference occurs.

    Of `judged` completions `failed` failed; `signal` is the expected share of groups with signal. Of the failed ones
    `open` belong to tasks whose prompt lacks the reference; it occurs in `mentioned` of them, and that of another task
    in `by_chance`. `rewards` are those that were tried.
    """

    judged: int
    failed: int
    signal: float
    open: int
    mentioned: int
    by_chance: int
    rewards: list[Acceptance] = field(default_factory=list[Acceptance])

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AnswerForm:
        """Read what `dataclasses.asdict` made; TypeError or KeyError for anything else."""
        return cls(**{**data, "rewards": [Acceptance(**reward) for reward in data["rewards"]]})

    @property
    def is_mentioned(self) -> bool:
        """Whether most failed completions hold their reference, and far fewer that of another task."""
        return self.mentioned > self.open / 2 and self.mentioned >= max(FEWEST, 2 * self.by_chance)

    @property
    def best(self) -> Acceptance | None:
        """The reward that accepts most, of those that tell right from wrong and accept more than random text earns."""
        fits = [r for r in self.rewards if r.tells_right_from_wrong and r.accepted >= FEWEST and self._is_no_chance(r)]
        return max(fits, key=lambda r: r.accepted, default=None)

    def _is_no_chance(self, reward: Acceptance) -> bool:
        """Whether it accepts a good part of all, or twice as many as with other references, by an exact sign test."""
        both = reward.accepted + reward.by_chance
        tail = sum(math.comb(both, hits) for hits in range(reward.accepted, both + 1)) / 2**both
        return reward.accepted >= MANY * self.failed or (reward.accepted >= 2 * reward.by_chance and tail <= CHANCE)

    def describe(self) -> Finding | None:
        """The answers stand in another form than the reward reads; None if they do not."""
        best, has_little = self.best, self.signal < LEAST_SIGNAL
        severity = "problem" if has_little else "hint"
        equal = next((r.accepted for r in self.rewards if r.setting == EXACT), 0)
        if 2 * equal > self.failed:
            return Finding(
                severity,
                "reference_refused",
                f"{equal} of {self.failed} failed completions of the baseline equal their reference, and the reward "
                "refuses them",
                "judge one by `rlvr verify` and fix the reward (reward.type, reward.kwargs); if it asks for a form on "
                "purpose, show that form in the prompts",
            )
        if not self.is_mentioned and not (has_little and best and best.signal >= LEAST_SIGNAL):
            return None
        share = format_percent(self.mentioned / max(1, self.open))
        if self.is_mentioned:
            fact = f"the answer is there but the form is not: the reference occurs in {share} of failed completions"
        else:
            fact = "some failed completions hold the right answer in a form that the reward does not read"
        if best is None:
            return Finding(
                severity,
                "answer_form",
                f"{fact}, and no registered reward reads it there",
                "ask in the prompts for the form that the reward reads, fine-tune on it (sft.steps), or write a reward "
                "that finds the answer (reward.type=module:function)",
            )
        return Finding(
            severity,
            "answer_form",
            f"{fact}; {best.setting} accepts {best.accepted} of {self.failed}, and with the reference of another "
            f"task {best.by_chance}",
            f"{best.setting} under another run.name: about {format_percent(best.signal)} of groups would have signal",
        )


def examine_form(tasks: Sequence[JudgedTask], reward: Reward, group_size: int = 8) -> AnswerForm | None:
    """Examine the completions of the first `MOST_TASKS` tasks that have a reference; None if most of them pass.

    `group_size` is that of the training groups whose signal is estimated.
    """
    known = [task for task in tasks if _reference(task.task.meta)][:MOST_TASKS]
    cases, passed = list[list[Case]](), list[list[bool]]()
    for task in known:
        judged = [t for t in task.completions if t.reward is not None]
        cases.append([Case.of(t) for t in judged])
        passed.append([t.scores[reward.name].outcome is Outcome.PASSED for t in judged])
    judged, failed = sum(map(len, cases)), sum(not p for row in passed for p in row)
    if 2 * failed <= judged:
        return None
    references = [_reference(task.task.meta) for task in known]
    others = [_other_reference(references, i) for i in range(len(known))]
    lost = [(i, case) for i, row in enumerate(cases) for case, ok in zip(row, passed[i], strict=True) if not ok]
    hidden = [(i, case) for i, case in lost if not _occurs(references[i], case.prompt)]
    return AnswerForm(
        judged,
        len(lost),
        expect_signal([(sum(row), len(row)) for row in passed], group_size),
        len(hidden),
        sum(_occurs(references[i], case.response) for i, case in hidden),
        sum(
            bool(others[i]) and not _occurs(others[i], case.prompt) and _occurs(others[i], case.response)
            for i, case in hidden
        ),
        [
            acceptance
            for candidate in _candidates(reward)
            if (acceptance := _try_reward(candidate, cases, passed, references, others, group_size)).accepted
        ],
    )


def _candidates(reward: Reward) -> Iterator[Reward]:
    """Rewards that judge by `meta["answer"]` within this process, each with its defaults."""
    for name in known_rewards():
        spec = reward_spec(name)
        if spec.verifiable and spec.gold == "answer" and not spec.waits_for and name != reward.name:
            with suppress(ValueError):  # a library is missing, or an option has no default
                yield resolve_reward(name)
    if (reward.name, reward.kwargs.get("ignore_case")) != ("exact_match", True):
        yield resolve_reward("exact_match", ignore_case=True)


def _try_reward(
    reward: Reward,
    cases: Sequence[Sequence[Case]],
    passed: Sequence[Sequence[bool]],
    references: Sequence[str],
    others: Sequence[str],
    group_size: int,
) -> Acceptance:
    accepted, counts, controls, shuffled = 0, list[tuple[int, int]](), list[Case](), list[Case]()
    for i, row in enumerate(cases):
        verdicts = [_passes(score) for score in reward.judge_all(row)]
        counts.append((sum(verdicts), len(verdicts)))
        for case, verdict, before in zip(row, verdicts, passed[i], strict=True):
            shuffled += [_with_answer(case, others[i])] if others[i] and not before else []
            if verdict and not before:
                accepted += 1
                controls += _controls(case, references[i], others[i])
    wrong, by_chance = (sum(map(_passes, reward.judge_all(wrongly))) for wrongly in (controls, shuffled))
    options = "".join(f" reward.kwargs.{key}={json.dumps(value)}" for key, value in reward.kwargs.items())
    signal = expect_signal(counts, group_size) if accepted else 0.0
    return Acceptance(f"reward.type={reward.name}{options}", accepted, by_chance, wrong, len(controls), signal)


def _passes(score: Any) -> bool:
    return score.outcome is Outcome.PASSED


def _controls(case: Case, reference: str, other: str) -> Iterator[Case]:
    """The case with wrong references: that of another task, and others that its prompt and its response hold."""
    own = _value(reference)
    tokens = [other, *_TOKEN.findall(case.response), *_TOKEN.findall(case.prompt)]
    if parse_number(reference) is not None:  # a word is no rival of a number
        tokens = [token for token in tokens if parse_number(token) is not None]
    rivals = {value: token for token in tokens if token and (value := _value(token)) != own}
    for token in list(rivals.values())[:MOST_CONTROLS]:
        yield _with_answer(case, token)


def _with_answer(case: Case, answer: str) -> Case:
    return replace(case, meta={**(case.meta or {}), "answer": answer})


def _reference(meta: Mapping[str, Any]) -> str:
    """The answer of a task as text; of a worked solution what follows `####`. "" if there is none, or a structure."""
    answer = meta.get("answer")
    if answer is None or isinstance(answer, (list, tuple, dict, set, bool)):
        return ""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer).rpartition("####")[2].strip()


def _other_reference(references: Sequence[str], index: int) -> str:
    """The reference of the next task that has another one, "" if all are the same."""
    own = _value(references[index])
    order = (*references[index + 1 :], *references[:index])
    return next((reference for reference in order if _value(reference) != own), "")


def _value(text: str) -> Fraction | str:
    """What makes two references the same: their number, else their words."""
    number = parse_number(text)
    return " ".join(text.casefold().split()) if number is None else number


def _occurs(reference: str, text: str) -> bool:
    """Whether the reference occurs as a whole: as a number of any spelling, or as whole words in any case.

    A short one (`A`) counts in its own case only: it may be a word of the language.
    """
    text, value = text[-MAX_TEXT:], _value(reference)
    if isinstance(value, str):
        words = r"\s+".join(map(re.escape, reference.split()))
        flags = re.IGNORECASE if len(value) > SHORT else re.NOFLAG
        return bool(words) and re.search(rf"(?<!\w){words}(?!\w)", text, flags) is not None
    return any(parse_number(token.rstrip(",")) == value for token in _TOKEN.findall(text))
