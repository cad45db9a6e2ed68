"""Rewards by name: `@register_reward("mine")` puts one in, `resolve_reward("mine", **options)` takes one out.

    reward = resolve_reward("keyword_contains", keywords=["answer"])
    reward("2+2?", "The answer is 4")         # -> 1.0: on text, as in a hand-written loop
    reward.score(trajectories)                # -> [Score]: in the training loop; never raises for the function
    GRPOTrainer(..., reward_funcs=[reward])   # TRL; and `compute_score = reward` for verl: `rlvr.reward.adapters`

`score` turns whatever goes wrong in the function into an `error` outcome, so that a broken verifier is never a wrong
answer; counting these against an error budget is the loop's business. A direct call lets the function's own exception
through. `python -m pytest tests/test_reward_registry.py` exercises it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

from rlvr.halt import look
from rlvr.registry import Registry, check_kwargs, load_path, named_parameters, takes_any
from rlvr.reward import adapters
from rlvr.reward.signatures import ACCEPTED, BadReturn, Case, Signature, Style, lift
from rlvr.types import Outcome, Score, Trajectory

F = TypeVar("F", bound=Callable[..., Any])
Prepare = Callable[..., dict[str, Any]]
Caution = str | Callable[..., str]
Waits = Literal["", "processes", "network"]


@dataclass(frozen=True)
class Entry:
    """What is registered under a name. `prepare` checks the options when the reward is resolved (see there)."""

    function: Callable[..., Any]
    description: str = ""
    batched: bool = False
    passed_at: float = 1.0
    prepare: Prepare | None = None
    caution: Caution = ""
    gold: str = ""
    start: Callable[..., object] | None = None
    computes: bool = False
    waits: Waits | Callable[..., Waits] = ""


_rewards: Registry[Entry] = Registry("reward")


def register_reward(
    name: str,
    description: str = "",
    *,
    batched: bool = False,
    passed_at: float = 1.0,
    prepare: Prepare | None = None,
    caution: Caution = "",
    gold: str = "",
    start: Callable[..., object] | None = None,
    computes: bool = False,
    waits: Waits | Callable[..., Waits] = "",
) -> Callable[[F], F]:
    """Register a reward function under `name`; the function itself is returned unchanged.

    `batched` functions take lists and return a list. An answer counts as passed where the value is at least
    `passed_at`. `prepare(**options) -> options` may check and convert the options once, when the reward is resolved.
    `caution` says how it is earned without being right: a run that trains on it is warned, unless it watches others; it
    may be a function of the options. `start(**options)` starts what the reward depends on (a sandbox, say), when a run
    is built; it raises a ValueError where that is not to be had.
    `gold` is the key of a task's meta where it looks for the right answer: no command takes that for the model's.
    `computes` says that its verdict follows from what the task itself says is right (tests, an answer): where it can
    judge, an answer is right exactly where it passed.
    `waits` says what its time is spent on where it does not compute here: `processes` that it runs on this machine, or
    the `network`; it may be a function of the options. The loops ask such a reward about one group at a time, from
    several threads at once, while other groups are still sampled: a verdict must depend on its own answer alone.
    """

    def register(function: F) -> F:
        Signature.of(f"reward {name!r}", function, batched)
        text = description or (function.__doc__ or "").strip().partition("\n")[0]
        entry = Entry(function, text, batched, passed_at, prepare, caution, gold, start, computes, waits)
        _rewards.add(name, entry, function)
        return function

    return register


def resolve_reward(name: str | Callable[..., Any], /, **kwargs: Any) -> Reward:
    """The reward of that name, path `package.module:function`, or function, with its options bound.

    ValueError for an unknown name, an option that the function does not take, or one that it needs and has not.
    """
    if isinstance(name, Reward):
        return Reward(name.name, name.entry, {**name.kwargs, **kwargs})
    if isinstance(name, str) and ":" not in name:
        return Reward(name, _rewards.get(name), kwargs)
    function: Any = load_path("reward", name) if isinstance(name, str) else name
    if not callable(function):
        raise ValueError(
            f"reward {function!r} is of type {type(function).__name__}; expected a function, a path "
            f"'package.module:function' or a name: {', '.join(_rewards.known())}"
        )
    label = name if isinstance(name, str) else getattr(function, "__name__", type(function).__name__)
    return Reward(label, _rewards.entry_of(function) or Entry(function), kwargs)


def known_rewards() -> dict[str, str]:
    """Every registered name with its description."""
    return {name: _rewards.get(name).description for name in _rewards.known()}


def options_of(name: str) -> set[str] | None:
    """The names of a reward's parameters, those that are filled for it among them; None where it takes any."""
    function = load_path("reward", name) if ":" in name else _rewards.get(name).function
    return None if takes_any(function) else set(named_parameters(function))


@dataclass(frozen=True)
class Reward:
    """A reward with its options bound. Made by `resolve_reward`."""

    name: str
    entry: Entry
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    _signature: Signature = field(init=False, repr=False, compare=False)
    _options: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        what = f"reward {self.name!r}"
        signature = Signature.of(what, self.entry.function, self.entry.batched)
        complete = signature.style is not Style.TRL  # there a column of the data may fill a parameter
        # Who wrote the function is told what it may take; who uses one of ours, which options it has.
        if complete and not self.entry.prepare and (missing := signature.needs - set(self.kwargs)):
            raise ValueError(
                f"{what} needs {', '.join(map(repr, sorted(missing)))}: give it among the reward's options (kwargs), "
                f"or read what belongs to the task from meta. Accepted signatures: {ACCEPTED}"
            )
        check_kwargs(what, self.entry.function, self.kwargs, signature.supplied, complete)
        options = self.entry.prepare(**self.kwargs) if self.entry.prepare else self.kwargs
        object.__setattr__(self, "_signature", signature)
        object.__setattr__(self, "_options", options)

    @property
    def __name__(self) -> str:
        """What TRL calls this reward in its metrics."""
        return self.name

    @overload
    def __call__(self, prompt: str, response: str, meta: dict[str, Any] | None = None, **kw: Any) -> float | None: ...
    @overload
    def __call__(self, *, prompts: Any, completions: Sequence[Any], **columns: Any) -> list[float | None]: ...
    @overload
    def __call__(self, *, data_source: Any, solution_str: str, ground_truth: Any, **more: Any) -> dict[str, Any]: ...
    def __call__(self, *args: Any, **kw: Any) -> Any:
        """The value for one answer given as text; None where the verifier has no say (not applicable, bad task).

        TRL's and verl's arguments, told by the names `completions` and `solution_str`, get what these take.
        """
        if "completions" in kw and not args:
            return adapters.trl(self.name, self.score, kw)
        if "solution_str" in kw and not args:
            return adapters.verl(self.name, self.score, kw)
        return self._value(*args, **kw)

    def _value(self, prompt: str, response: str, meta: dict[str, Any] | None = None, **kw: Any) -> float | None:
        if kw:
            return resolve_reward(self, **kw)._value(prompt, response, meta)
        return self.judge(Case(prompt, response, meta)).value

    @property
    def caution(self) -> str:
        """How it is earned, with these options, without being right; empty where nothing is known of that."""
        known = self.entry.caution
        return known if isinstance(known, str) else known(**self._options)

    @property
    def waits(self) -> Waits:
        """What its time is spent on with these options, where it is not computed here (see `register_reward`)."""
        known = self.entry.waits
        return known(**self._options) if callable(known) else known

    def start(self) -> None:
        """Start what it depends on, before a run does; ValueError where that is not to be had here."""
        if self.entry.start:
            self.entry.start(**self._options)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One `Score` per trajectory, in order; whatever the function does wrong becomes an `error` outcome."""
        return self.judge_all([Case.of(t) for t in trajectories])

    def judge_all(self, cases: Sequence[Case]) -> list[Score]:
        """The verdicts on all cases, at once where the function takes many; never raises for the function."""
        if not (cases and self._signature.batched):
            verdicts: list[Score] = []
            for case in cases:
                look()  # outside the guard: who stops the step stops here
                verdicts.append(self._guarded(lambda case=case: self.judge(case)))
            return verdicts
        values: list[Any] = []
        failure = self._guarded(lambda: values.extend(self._signature.many(cases, self._options)))
        if failure.outcome is Outcome.ERROR:
            return [failure] * len(cases)
        return [self._guarded(lambda value=value: value) for value in values]

    def judge(self, case: Case) -> Score:
        """The verdict on one case; raises what the function raises. Like `judge_all` for rewards made of others."""
        if self._signature.batched:
            return lift(self._signature.many([case], self._options)[0], self.entry.passed_at)
        return lift(self._signature.one(case, self._options), self.entry.passed_at)

    def _guarded(self, work: Callable[[], Any]) -> Score:
        try:
            return lift(work(), self.entry.passed_at)
        except BadReturn as error:
            return Score(None, Outcome.ERROR, error.reason, detail=f"reward {self.name!r} {error}")
        except (Exception, SystemExit):
            return Score(None, Outcome.ERROR, "exception", detail=traceback.format_exc()[-8000:])
