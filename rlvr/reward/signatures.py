"""How a reward function is called, and what it may return: six signatures in, one `Score` out.

    cases    f(case, **options) -> value;  f(cases, **options) -> [value]         by the parameter's name
    plain    f(prompt, response, meta=None, **options) -> value                   `trajectory` too, where it is named
    batched  f(prompts, responses, metas=None, **options) -> [value]              `batched=True`; `trajectories` too
    TRL      f(prompts, completions, completion_ids, **columns) -> [value]        by `completions`
    verl     f(data_source, solution_str, ground_truth, extra_info=None) -> value by `solution_str`

The keys of a task's meta are TRL's columns. A value is a number (also a numpy or torch scalar), a bool, None (not
applicable), a dictionary with "score" or a `Score`, at most 1e30 in size: sums of larger ones overflow. Functions that
take lists may be async, and then await all answers of a batch at once.
"""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Real
from typing import Any

from rlvr.core.registry import named_parameters, parameters, takes_any
from rlvr.core.types import Branch, Outcome, Score, StopReason, Task, Trajectory
from rlvr.reward.coroutines import run_coroutine

ACCEPTED = (
    "(prompt, response, meta=None, **kw), the same on lists (prompts, responses, metas=None, **kw) if registered with "
    "batched=True, (case, **kw), (cases, **kw), TRL's (prompts, completions, **columns) or verl's (data_source, "
    "solution_str, ground_truth, extra_info=None)"
)

LARGEST = 1e30  # the largest size of a reward


class InvalidReturn(ValueError):
    """A reward function returned something that is not a reward; `reason` is the code for the `Score`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class CallStyle(Enum):
    CASE = "case"
    CASES = "cases"
    PLAIN = "plain"
    BATCHED = "batched"
    TRL = "trl"
    VERL = "verl"


@dataclass(frozen=True)
class Case:
    """One answer to judge: what every reward is called with.

    `response` is the policy's last turn; text that an environment wrote between its turns is not part of it. `messages`
    is the prompt where it is a chat, `prompt` the same as text. `tokens` are the ids of the response, empty where only
    text is known. `trajectory` is the rollout that the answer comes from, None outside our own loops.
    """

    prompt: str
    response: str
    meta: dict[str, Any] | None = None
    trajectory: Trajectory | None = None
    messages: list[dict[str, str]] | None = None
    tokens: Sequence[int] = ()
    stop_reason: StopReason | None = None

    @classmethod
    def of(cls, t: Trajectory) -> Case:
        response = t.response if t.answer is None else t.answer
        prompt, meta = (t.task.prompt, t.task.meta) if t.task else (t.prompt, t.metadata)
        messages = None if isinstance(prompt, str) else prompt
        return cls(t.prompt, response, meta, t, messages, t.response_tokens, t.stop_reason)

    @classmethod
    def of_task(cls, task: Task, response: str, **more: Any) -> Case:
        """An answer to a task; `more` are further fields."""
        messages = None if isinstance(task.prompt, str) else task.prompt
        return cls(task.prompt_text, response, task.meta, messages=messages, **more)

    @property
    def truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH

    @property
    def branches(self) -> Sequence[Branch]:
        """The branches of an agent's episode, for `Score.branches`; empty where no agent plays."""
        return self.trajectory.branches if self.trajectory else ()

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled, in all its turns."""
        return self.trajectory.num_action_tokens if self.trajectory else len(self.tokens)


def check_argument_types(reward: str, name: str, response: Any, meta: Any = None, meta_name: str = "meta") -> None:
    """ValueError for an answer that is not text, or what is known of the task that is not a mapping."""
    if not isinstance(response, str):
        given, expected = response, "the answer as text"
    elif meta is not None and not isinstance(meta, Mapping):
        name, given, expected = meta_name, meta, "a dictionary, such as {'answer': '7'}, or None"
    else:
        return
    raise ValueError(f"reward {reward!r}: {name}={given!r:.80} is of type {type(given).__name__}; expected {expected}")


@dataclass(frozen=True)
class Signature:
    """How to call a function. `names` are its parameters, `supplied` those that are filled for it.
    `meta_name` is that of the parameter for meta: the third one where all have one letter (`lambda p, r, m: ...`).

    With `options` the bound options arrive as one object, the second argument, instead of as keywords.
    """

    function: Callable[..., Any]
    style: CallStyle
    names: frozenset[str]
    supplied: frozenset[str]
    takes_any: bool
    has_options: bool = False
    meta_name: str = "meta"

    @classmethod
    def of(cls, what: str, function: Callable[..., Any], batched: bool, has_options: bool = False) -> Signature:
        names, meta_name = frozenset(named_parameters(function)), "meta"
        first = next(iter(parameters(function)), "")
        if first in ("case", "cases"):
            style, supplied = CallStyle(first), {first}
        elif "completions" in names:
            style, supplied = CallStyle.TRL, {"prompts", "completions", "completion_ids", *_TRL_EXTRAS}
        elif "solution_str" in names:
            style, supplied = CallStyle.VERL, {"data_source", "solution_str", "ground_truth", "extra_info"}
        else:
            style = CallStyle.BATCHED if batched else CallStyle.PLAIN
            leading = _leading_names(what, function, batched)
            if len(names) == 3 and all(len(name) == 1 for name in names) and not batched:
                meta_name = list(named_parameters(function))[2]
            supplied = {*leading, meta_name, "meta", "metas", "trajectory", "trajectories"}
        signature = cls(function, style, names, frozenset(supplied), takes_any(function), has_options, meta_name)
        if _is_async(function) and not signature.batched:
            raise ValueError(
                f"{what} is async and judges one answer at a time, so each would wait for the one before; make it a "
                "plain function, or judge a list: (cases), TRL's (prompts, completions, **columns), or (prompts, "
                "responses, metas=None) registered with batched=True"
            )
        return signature

    @property
    def batched(self) -> bool:
        return self.style in (CallStyle.CASES, CallStyle.BATCHED, CallStyle.TRL)

    @property
    def required(self) -> set[str]:
        """The options that must be given: parameters without a default that are not filled."""
        named = named_parameters(self.function)
        return {n for n, p in named.items() if p.default is p.empty and n not in self.supplied}

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def call_one(self, case: Case, options: Any) -> Any:
        """Judge one answer with a function that takes one."""
        if self.style is CallStyle.CASE:
            return self._call_on_cases(case, options)
        if self.style is CallStyle.VERL:
            meta = case.meta or {}
            columns = {
                "data_source": meta.get("data_source", ""),
                "solution_str": case.response,
                "ground_truth": _ground_truth(meta),
                "extra_info": meta.get("extra_info", meta),
            }
            return self.function(**{k: v for k, v in columns.items() if self.takes(k)}, **options)
        extras: dict[str, Any] = {self.meta_name: case.meta} if self.takes(self.meta_name) else {}
        if "trajectory" in self.names:
            extras["trajectory"] = case.trajectory
        return self.function(case.prompt, case.response, **extras, **options)

    def call_many(self, cases: Sequence[Case], options: Any) -> list[Any]:
        """Judge all answers with a function that takes many; as many values as cases, or InvalidReturn."""
        call = {CallStyle.CASES: self._call_on_cases, CallStyle.TRL: self._call_trl}.get(self.style, self._call_batched)
        values = call(cases, options)
        if inspect.iscoroutine(values):
            values = run_coroutine(values)
        if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
            raise InvalidReturn(
                "wrong_length",
                f"returned a {type(values).__name__}, expected {len(cases)} values in the order of the answers",
            )
        if len(values) != len(cases):
            raise InvalidReturn("wrong_length", f"returned {len(values)} values for {len(cases)} answers")
        return list(values)

    def _call_on_cases(self, cases: Case | Sequence[Case], options: Any) -> Any:
        return self.function(cases, options) if self.has_options else self.function(cases, **options)

    def _call_batched(self, cases: Sequence[Case], options: Mapping[str, Any]) -> Any:
        metas = [c.meta for c in cases]
        columns = {"meta": metas, "metas": metas, "trajectories": [c.trajectory for c in cases]}
        extras = {k: v for k, v in columns.items() if k in self.names}
        return self.function([c.prompt for c in cases], [c.response for c in cases], **extras, **options)

    def _call_trl(self, cases: Sequence[Case], options: Mapping[str, Any]) -> Any:
        metas = [c.meta or {} for c in cases]
        keys = dict.fromkeys(k for meta in metas for k in meta if k not in self.supplied)
        columns: dict[str, Any] = {k: [meta.get(k) for meta in metas] for k in keys if self.takes(k)}
        columns |= {k: v for k, v in _TRL_EXTRAS.items() if k in self.names}
        own = {
            "prompts": [c.prompt if c.messages is None else c.messages for c in cases],
            "completions": [
                c.response if c.messages is None else [{"role": "assistant", "content": c.response}] for c in cases
            ],
            "completion_ids": [c.tokens for c in cases],
        }
        return self.function(**{k: v for k, v in own.items() if self.takes(k)}, **{**columns, **options})


def to_score(value: Any, passed_at: float) -> Score:
    """A returned value as a `Score`, passed from `passed_at` on; InvalidReturn where it is not a reward."""
    if isinstance(value, Score):
        for number in (value.value or 0.0, *value.turns, *value.branches):
            _check_size(number)
        return replace(value, parts={k: v for k, v in value.parts.items() if _is_bounded(v)})
    if value is None:
        return Score(None, Outcome.INVALID, "not_applicable", detail="the reward returned None")
    parts: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = ", ".join(map(str, value))
            raise InvalidReturn("wrong_type", f"returned a dictionary without 'score' (keys: {keys})")
        rest = {str(k): _number(v) for k, v in value.items() if k != "score"}
        parts = {k: v for k, v in rest.items() if v is not None and _is_bounded(v)}
        value = value["score"]
        if value is None:
            return Score(None, Outcome.INVALID, "not_applicable", parts, "the reward returned a score of None")
    number = _number(value)
    if number is None:
        raise InvalidReturn(
            "wrong_type",
            f"returned a {type(value).__name__} ({reprlib.repr(value)}), expected a number, None, a dict or a Score; "
            "of a text or an array of one number return float(...)",
        )
    _check_size(number)
    return Score(number, Outcome.PASSED if number >= passed_at else Outcome.FAILED, parts=parts)


def _is_bounded(number: float) -> bool:
    return abs(number) <= LARGEST  # false for NaN


def _check_size(number: float) -> None:
    if not _is_bounded(number):
        raise InvalidReturn("not_finite", f"returned {number:g}, expected a number up to {LARGEST:g}, plus or minus")


def _number(value: Any) -> float | None:
    """A Python, numpy or torch scalar as a float; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine: of a function, a bound method, a partial, or an object with an async call."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _leading_names(what: str, function: Callable[..., Any], batched: bool) -> list[str]:
    """The names of the two positional parameters that take the prompt and the response."""
    every = parameters(function).values()
    first = [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    starred = any(p.kind is p.VAR_POSITIONAL for p in every)
    misplaced = [n for n in ("prompt", "response") if n in parameters(function) and n not in first]
    if (len(first) < 2 and not starred) or misplaced or "meta" in first or first[:1] == ["response"]:
        raise ValueError(f"{what} has the signature {inspect.signature(function)}; accepted: {ACCEPTED}")
    if not batched and first == ["prompts", "responses"]:
        raise ValueError(
            f"{what} has the signature {inspect.signature(function)}, which takes lists; register it with "
            "@register_reward(name, batched=True), or take (prompt, response, meta=None)"
        )
    return first


def _ground_truth(meta: Mapping[str, Any]) -> Any:
    """verl's `reward_model.ground_truth`, else a plain `ground_truth` or `answer`."""
    nested = meta.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return meta.get("ground_truth", meta.get("answer"))


def _ignore(*_: Any, **__: Any) -> None: ...


_TRL_EXTRAS: dict[str, Any] = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
