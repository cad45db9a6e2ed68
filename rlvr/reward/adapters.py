"""Our rewards as other trainers call them: `Reward.__call__` comes here where it meets TRL's or verl's arguments.

    GRPOTrainer(..., reward_funcs=[resolve_reward("gsm8k")])   # TRL: a list of values, None where nobody can judge
    compute_score = resolve_reward("gsm8k")                    # verl: {"score": 1.0, "acc": 1.0, ...} for one answer

Both ways build trajectories and go through `Reward.score`, so an answer is judged as in our own loop. What differs is
what becomes of an answer that nobody can judge (`error`, `invalid`): TRL takes None, gives it no advantage and leaves
it out of the group's mean; verl has no such value (nan would spread to the whole group, 0 says wrong), so `NotJudged`
is raised there. Exercised by `python -m pytest tests/test_reward_in_trainers.py`, inside the real GRPOTrainer.

Left out on purpose: images, and verl's older manager that hands over lists.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr.types import Outcome, Score, Task, Trajectory

Judge = Callable[[Sequence[Trajectory]], list[Score]]

_TRL_OWN = ("trainer_state", "log_extra", "log_metric", "environments")  # what TRL adds beside the data's columns
_VERL_OWN = ("reward_router_address", "reward_model_tokenizer")  # what verl adds where it serves a reward model


class NotJudged(RuntimeError):
    """The verifier broke or the task is invalid, and the trainer that asks has no value for that. `score` says more."""

    def __init__(self, name: str, score: Score) -> None:
        said = score.detail.strip().rpartition("\n")[2]
        super().__init__(
            f"reward {name!r} cannot judge this answer: {score.outcome.value} ({score.reason}): {said}. verl knows no "
            "value for that; to go on regardless, catch rlvr.reward.NotJudged in a compute_score of your own and "
            "return the score you choose"
        )
        self.score = score


def trl(name: str, judge: Judge, given: Mapping[str, Any]) -> list[float | None]:
    """TRL's reward function: keyword arguments are `prompts`, `completions`, `completion_ids` and the data's columns.

    A row's columns are the task's meta. A chat's answer is the last message of the assistant, whatever tools wrote.
    Rates of passed, error and invalid are logged beside TRL's own `rewards/<name>/mean`, reasons with the completions.
    """
    completions = given["completions"]
    count = len(completions)
    columns = {k: v for k, v in given.items() if k not in ("prompts", "completions", "completion_ids", *_TRL_OWN)}
    for column, values in columns.items():
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or len(values) != count:
            raise ValueError(
                f"reward {name!r}, called as TRL does: {column}={str(values)[:80]!r}, expected a list with one entry "
                f"for each of the {count} completions; options of a reward go to resolve_reward({name!r}, ...)"
            )
    prompts, ids = given.get("prompts") or [""] * count, given.get("completion_ids") or [[]] * count
    trajectories = [
        _trajectory(prompt, _last_answer(completion), {k: v[i] for k, v in columns.items()}, tokens)
        for i, (prompt, completion, tokens) in enumerate(zip(prompts, completions, ids, strict=True))
    ]
    scores = judge(trajectories)
    _report(name, scores, given)
    return [score.value for score in scores]


def verl(name: str, judge: Judge, given: Mapping[str, Any]) -> dict[str, Any]:
    """verl's compute_score: `data_source`, `solution_str`, `ground_truth` and `extra_info` of one answer.

    The task's meta is `extra_info` with `data_source`, `ground_truth` and the latter as `answer`; the keys of a ground
    truth that is a dictionary are in it, too, and one with inputs and outputs (verl's code data, as JSON) is there as
    `input_output`. `extra_info["question"]` is the prompt, as verl gives none.

    The keys that come back are always the same, as verl takes those of a batch's first answer for all.
    """
    unknown = sorted(set(given) - {"data_source", "solution_str", "ground_truth", "extra_info", *_VERL_OWN})
    if unknown:
        raise ValueError(
            f"reward {name!r}, called as verl does, does not take {unknown[0]!r}; options of a reward go to "
            f"resolve_reward({name!r}, ...) in the file that verl loads, not to reward_kwargs"
        )
    truth, extra = given.get("ground_truth"), given.get("extra_info") or {}
    meta = {
        "answer": truth,
        **extra,
        "data_source": given.get("data_source", ""),
        "ground_truth": truth,
        **_tests(truth),
    }
    prompt = str(extra.get("question", ""))
    (score,) = judge([_trajectory(prompt, given["solution_str"], meta)])
    if score.value is None:
        raise NotJudged(name, score)
    passed = float(score.outcome is Outcome.PASSED)
    return {"score": score.value, "acc": passed, "outcome": score.outcome.value, "reason": score.reason}


def _tests(truth: Any) -> Mapping[str, Any]:
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


def _trajectory(prompt: Any, response: str, meta: dict[str, Any], tokens: Sequence[int] = ()) -> Trajectory:
    task = Task("", prompt, meta)
    return Trajectory(task.prompt_text, [], response, [int(t) for t in tokens], metadata=meta, task=task)


def _last_answer(completion: Any) -> str:
    """The text of a completion; of messages, that of the last one which the assistant wrote."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") == "assistant"]
    content = said[-1] if said else None
    if isinstance(content, str) or content is None:  # None: nothing but a call of a tool
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def _report(name: str, scores: Sequence[Score], given: Mapping[str, Any]) -> None:
    broken = [score for score in scores if score.outcome is Outcome.ERROR]
    if broken:
        said = broken[0].detail.strip().rpartition("\n")[2]
        warnings.warn(
            f"reward {name!r} could not judge {len(broken)} of {len(scores)} answers, which get None instead of a "
            f"value: {broken[0].reason}: {said}",
            RuntimeWarning,
            stacklevel=4,
        )
    log_metric, log_extra = given.get("log_metric"), given.get("log_extra")
    if log_metric is not None and scores:
        for rate, outcome in (("pass", Outcome.PASSED), ("error", Outcome.ERROR), ("invalid", Outcome.INVALID)):
            share = sum(score.outcome is outcome for score in scores) / len(scores)
            log_metric(f"rewards/{name}/{rate}_rate", share)
    if log_extra is not None:
        log_extra(f"{name}/reason", [score.reason or score.outcome.value for score in scores])
