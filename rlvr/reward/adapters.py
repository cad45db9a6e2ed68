"""Rewards as other trainers call them: `reward.as_trl()` and `reward.as_verl()`.

    GRPOTrainer(..., reward_funcs=[resolve_reward("gsm8k").as_trl()])   # a list of values, None where it cannot judge
    compute_score = resolve_reward("gsm8k").as_verl()                   # {"score": 1.0, "acc": 1.0, ...} for one answer

The reward itself can be given in both places: `Reward.__call__` recognises the arguments. An answer is judged as in our
own loops; only what cannot be judged (`error`, `invalid`) differs: TRL takes None, gives it no advantage and leaves it
out of the group's mean. verl has no such value (nan would spread to the whole group, 0 says wrong), so `NoRewardError`
is raised there.

Left out on purpose: images, and verl's older manager that hands over lists.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.core.types import Outcome, Score, Task
from rlvr.reward.signatures import Case, check_argument_types

_TRL_OWN = ("trainer_state", "log_extra", "log_metric", "environments")  # what TRL adds beside the data's columns
_VERL_OWN = ("reward_router_address", "reward_model_tokenizer")  # what verl adds where it serves a reward model


class NoRewardError(RuntimeError):
    """The verifier broke or the task is invalid, and the trainer has no value for that. `score` says more."""

    def __init__(self, name: str, score: Score) -> None:
        super().__init__(
            f"reward {name!r} cannot judge this answer: {score.outcome.value} ({score.reason}): {_last_line(score)}. "
            "verl has no value for that; to go on regardless, catch rlvr.reward.NoRewardError in a compute_score of "
            "your own and return the score you choose"
        )
        self.score = score


@dataclass(frozen=True)
class TrlReward:
    """A reward function of TRL's trainers. A row's columns are the task's meta.

    A chat's answer is the last message of the assistant, whatever tools wrote after it. The rates of passed, error and
    invalid are logged beside TRL's own `rewards/<name>/mean`, and the reasons with the completions.
    """

    name: str
    judge_all: Callable[[Sequence[Case]], list[Score]]

    @property
    def __name__(self) -> str:
        """What TRL calls this reward in its metrics."""
        return self.name

    def __call__(
        self, *, completions: Sequence[Any], prompts: Any = None, completion_ids: Any = None, **given: Any
    ) -> list[float | None]:
        answers = self._answers(completions)
        count = len(answers)
        columns = {k: v for k, v in given.items() if k not in _TRL_OWN}
        per_answer = {"prompts": prompts or [""] * count, "completion_ids": completion_ids or [()] * count}
        for column, values in {**per_answer, **columns}.items():
            if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or len(values) != count:
                raise ValueError(
                    f"reward {self.name!r}, called as TRL does: {column}={str(values)[:80]!r}, expected a list with "
                    f"one entry for each of the {count} completions; options of a reward go to "
                    f"resolve_reward({self.name!r}, ...)"
                )
        rows = zip(per_answer["prompts"], answers, per_answer["completion_ids"], strict=True)
        scores = self.judge_all(
            [
                Case.of_task(Task("", prompt, {k: v[i] for k, v in columns.items()}), answer, tokens=list(ids))
                for i, (prompt, answer, ids) in enumerate(rows)
            ]
        )
        self._report(scores, given.get("log_metric"), given.get("log_extra"))
        return [score.value for score in scores]

    def _answers(self, completions: Sequence[Any]) -> list[str]:
        """The text of each completion; ValueError for one that is neither text nor messages."""
        if isinstance(completions, str) or not hasattr(completions, "__len__"):
            raise ValueError(
                f"reward {self.name!r}, called as TRL does: completions={completions!r:.80}, expected a list"
            )
        for i, completion in enumerate(completions):
            if not (
                isinstance(completion, (list, tuple)) and all(isinstance(message, Mapping) for message in completion)
            ):
                check_argument_types(self.name, f"completions[{i}]", completion)
        return [_last_answer(completion) for completion in completions]

    def _report(self, scores: Sequence[Score], log_metric: Any, log_extra: Any) -> None:
        errors = [score for score in scores if score.outcome is Outcome.ERROR]
        if errors:
            warnings.warn(
                f"reward {self.name!r} could not judge {len(errors)} of {len(scores)} answers, which get None instead "
                f"of a value: {errors[0].reason}: {_last_line(errors[0])}",
                RuntimeWarning,
                stacklevel=4,
            )
        if log_metric is not None and scores:
            for rate, outcome in (("pass", Outcome.PASSED), ("error", Outcome.ERROR), ("invalid", Outcome.INVALID)):
                share = sum(score.outcome is outcome for score in scores) / len(scores)
                log_metric(f"rewards/{self.name}/{rate}_rate", share)
        if log_extra is not None:
            log_extra(f"{self.name}/reason", [score.reason or score.outcome.value for score in scores])


@dataclass(frozen=True)
class VerlReward:
    """verl's `compute_score`, for one answer.

    The task's meta is `extra_info` with `data_source`, `ground_truth` and the latter as `answer`; the keys of a ground
    truth that is a dictionary are in it, too, and one with inputs and outputs (verl's code data, as JSON) is there as
    `input_output`. `extra_info["question"]` is the prompt, as verl gives none.

    The result always has the same keys, because verl takes those of a batch's first answer for all.
    """

    name: str
    judge_all: Callable[[Sequence[Case]], list[Score]]

    def __call__(
        self,
        data_source: Any = "",
        solution_str: str = "",
        ground_truth: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> dict[str, Any]:
        if unknown := sorted(set(given) - set(_VERL_OWN)):
            raise ValueError(
                f"reward {self.name!r}, called as verl does, does not take {unknown[0]!r}; options of a reward go to "
                f"resolve_reward({self.name!r}, ...) in the file that verl loads, not to reward_kwargs"
            )
        check_argument_types(self.name, "solution_str", solution_str, extra_info, "extra_info")
        extra = extra_info or {}
        own = {"data_source": data_source, "ground_truth": ground_truth}
        meta = {"answer": ground_truth, **extra, **own, **_tests_in(ground_truth)}
        (score,) = self.judge_all([Case(str(extra.get("question", "")), solution_str, meta)])
        if score.value is None:
            raise NoRewardError(self.name, score)
        passed = float(score.outcome is Outcome.PASSED)
        return {"score": score.value, "acc": passed, "outcome": score.outcome.value, "reason": score.reason}


def _tests_in(truth: Any) -> Mapping[str, Any]:
    """What a ground truth adds to the meta."""
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        try:
            parsed = json.loads(truth)
        except (ValueError, RecursionError):
            return {}
        return {"input_output": parsed} if {"inputs", "outputs"} <= set(parsed) else {}
    if isinstance(truth, Mapping):
        return {"input_output": truth} if {"inputs", "outputs"} <= set(truth) else truth
    return {}


def _last_answer(completion: Any) -> str:
    """The text of a completion; if it is a list of messages, the text of the last one by the assistant."""
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") for message in completion if message.get("role") == "assistant"]
    content = contents[-1] if contents else None
    if isinstance(content, str) or content is None:  # None: nothing but a call of a tool
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def _last_line(score: Score) -> str:
    return score.detail.strip().rpartition("\n")[2]
