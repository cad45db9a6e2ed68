"""How a reward function is called and what it may return: four signatures in, one `Score` out.

    plain    f(prompt, response, meta=None, **kw) -> value            `trajectory` too, where a parameter has that name
    batched  f(prompts, responses, metas=None, **kw) -> [value]       (`batched=True`; `trajectories` likewise)
    TRL      f(prompts, completions, completion_ids, **columns) -> [value]       told by the name `completions`
    verl     f(data_source, solution_str, ground_truth, extra_info=None) -> value     told by the name `solution_str`

The keys of a task's meta are TRL's columns. A value is a number, a bool, None (not applicable), a dictionary with
"score" or a `Score`, at most 1e30 in size: sums of larger ones overflow. Batched and TRL functions may be async: they
can await all their answers at once, where one after the other would wait for each.
`python -m pytest tests/test_reward_registry.py` exercises it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Real
from typing import Any

from rlvr.registry import named_parameters, parameters, takes_any
from rlvr.reward.coroutines import run_to_end
from rlvr.types import Outcome, Score, Trajectory

ACCEPTED = (
    "(prompt, response, meta=None, **kw), the same on lists (prompts, responses, metas=None, **kw) if registered with "
    "batched=True, TRL's (prompts, completions, **columns) or verl's (data_source, solution_str, ground_truth, "
    "extra_info=None)"
)

LARGEST = 1e30  # a reward's size


class BadReturn(ValueError):
    """A reward function returned something that is no reward; `reason` is the code for the `Score`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Style(Enum):
    PLAIN = "plain"
    BATCHED = "batched"
    TRL = "trl"
    VERL = "verl"


@dataclass(frozen=True)
class Case:
    """One answer to judge. `trajectory` is None where a reward is called on text alone.

    `response` is what the policy said last: text that an environment put between its turns is never judged as its own.
    """

    prompt: str
    response: str
    meta: dict[str, Any] | None = None
    trajectory: Trajectory | None = None

    @classmethod
    def of(cls, t: Trajectory) -> Case:
        said = t.response if t.answer is None else t.answer
        return cls(t.prompt, said, t.metadata if t.task is None else t.task.meta, t)


@dataclass(frozen=True)
class Signature:
    """A function with what is known of its parameters: `names` it takes by keyword, `supplied` those we fill."""

    function: Callable[..., Any]
    style: Style
    names: frozenset[str]
    supplied: frozenset[str]
    takes_any: bool

    @classmethod
    def of(cls, what: str, function: Callable[..., Any], batched: bool) -> Signature:
        names = frozenset(named_parameters(function))
        if "completions" in names:
            style, supplied = Style.TRL, {"prompts", "completions", "completion_ids", *_TRL_EXTRAS}
        elif "solution_str" in names:
            style, supplied = Style.VERL, {"data_source", "solution_str", "ground_truth", "extra_info"}
        else:
            style = Style.BATCHED if batched else Style.PLAIN
            supplied = {*_leading(what, function, batched), "meta", "metas", "trajectory", "trajectories"}
        signature = cls(function, style, names, frozenset(supplied), takes_any(function))
        if _is_async(function) and not signature.batched:
            raise ValueError(
                f"{what} is async and judges one answer at a time, so each would wait for the one before; make it a "
                "plain function, or judge a list: TRL's (prompts, completions, **columns), or (prompts, responses, "
                "metas=None) registered with batched=True"
            )
        return signature

    @property
    def batched(self) -> bool:
        return self.style in (Style.BATCHED, Style.TRL)

    @property
    def needs(self) -> set[str]:
        """What must be given as an option: parameters without a default that we do not fill."""
        named = named_parameters(self.function)
        return {n for n, p in named.items() if p.default is p.empty and n not in self.supplied}

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def one(self, case: Case, kwargs: Mapping[str, Any]) -> Any:
        """Judge one answer with a function that takes one."""
        if self.style is Style.VERL:
            meta = case.meta or {}
            given = {
                "data_source": meta.get("data_source", ""),
                "solution_str": case.response,
                "ground_truth": _ground_truth(meta),
                "extra_info": meta.get("extra_info", meta),
            }
            return self.function(**{k: v for k, v in given.items() if self.takes(k)}, **kwargs)
        given: dict[str, Any] = {"meta": case.meta} if self.takes("meta") else {}
        if "trajectory" in self.names:
            given["trajectory"] = case.trajectory
        return self.function(case.prompt, case.response, **given, **kwargs)

    def many(self, cases: Sequence[Case], kwargs: Mapping[str, Any]) -> list[Any]:
        """Judge all answers with a function that takes many; as many values as cases, or BadReturn."""
        values = self._trl(cases, kwargs) if self.style is Style.TRL else self._batch(cases, kwargs)
        if inspect.iscoroutine(values):
            values = run_to_end(values)
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
            raise BadReturn("wrong_length", f"returned a {type(values).__name__}, expected {len(cases)} values")
        if len(values) != len(cases):
            raise BadReturn("wrong_length", f"returned {len(values)} values for {len(cases)} answers")
        return list(values)

    def _batch(self, cases: Sequence[Case], kwargs: Mapping[str, Any]) -> Any:
        metas = [c.meta for c in cases]
        columns = {"meta": metas, "metas": metas, "trajectories": [c.trajectory for c in cases]}
        given = {k: v for k, v in columns.items() if k in self.names}
        return self.function([c.prompt for c in cases], [c.response for c in cases], **given, **kwargs)

    def _trl(self, cases: Sequence[Case], kwargs: Mapping[str, Any]) -> Any:
        chats = [c.trajectory.task.prompt if c.trajectory and c.trajectory.task else c.prompt for c in cases]
        metas = [c.meta or {} for c in cases]
        keys = dict.fromkeys(k for meta in metas for k in meta if k not in self.supplied)
        given: dict[str, Any] = {k: [meta.get(k) for meta in metas] for k in keys if self.takes(k)}
        given |= {k: v for k, v in _TRL_EXTRAS.items() if k in self.names}
        own = {
            "prompts": [c.prompt if isinstance(chat, str) else chat for c, chat in zip(cases, chats, strict=True)],
            "completions": [
                c.response if isinstance(chat, str) else [{"role": "assistant", "content": c.response}]
                for c, chat in zip(cases, chats, strict=True)
            ],
            "completion_ids": [c.trajectory.response_tokens if c.trajectory else [] for c in cases],
        }
        return self.function(**{k: v for k, v in own.items() if self.takes(k)}, **{**given, **kwargs})


def lift(value: Any, passed_at: float) -> Score:
    """A returned value as a `Score`: passed where it is at least `passed_at`. BadReturn where it is no reward."""
    if isinstance(value, Score):
        if value.value is not None:
            _bounded(value.value)
        return replace(value, parts={k: v for k, v in value.parts.items() if _is_bounded(v)})
    if value is None:
        return Score(None, Outcome.INVALID, "not_applicable")
    parts: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise BadReturn("wrong_type", f"returned a dictionary without 'score' (keys: {', '.join(map(str, value))})")
        rest = {str(k): _number(v) for k, v in value.items() if k != "score"}
        parts = {k: v for k, v in rest.items() if v is not None and _is_bounded(v)}
        value = value["score"]
    number = _number(value)
    if number is None:
        raise BadReturn("wrong_type", f"returned a {type(value).__name__}, expected a number, None, a dict or a Score")
    _bounded(number)
    return Score(number, Outcome.PASSED if number >= passed_at else Outcome.FAILED, parts=parts)


def _is_bounded(number: float) -> bool:
    return abs(number) <= LARGEST  # false for NaN


def _bounded(number: float) -> None:
    if not _is_bounded(number):
        raise BadReturn("not_finite", f"returned {number:g}, expected a number up to {LARGEST:g}, plus or minus")


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


def _leading(what: str, function: Callable[..., Any], batched: bool) -> list[str]:
    """The names of the two positional parameters that take the prompt and the response."""
    found = parameters(function).values()
    first = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    starred = any(p.kind is p.VAR_POSITIONAL for p in found)
    misplaced = [n for n in ("prompt", "response") if n in parameters(function) and n not in first]
    if (len(first) < 2 and not starred) or misplaced or "meta" in first or first[:1] == ["response"]:
        raise ValueError(f"{what} has the signature {inspect.signature(function)}; accepted: {ACCEPTED}")
    if not batched and first == ["prompts", "responses"]:
        raise ValueError(
            f"{what} has the signature {inspect.signature(function)}, which is that of lists; register it with "
            "@register_reward(name, batched=True), or take (prompt, response, meta=None)"
        )
    return first


def _ground_truth(meta: Mapping[str, Any]) -> Any:
    """verl keeps it in `reward_model.ground_truth`; a plain `ground_truth` or `answer` will do."""
    nested = meta.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return meta.get("ground_truth", meta.get("answer"))


def _ignore(*_: Any, **__: Any) -> None: ...


_TRL_EXTRAS: dict[str, Any] = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
