"""Rewards by name: `@register_reward("mine")` registers one, `resolve_reward("mine", **options)` binds its options.

    reward = resolve_reward("keyword_contains", keywords=["answer"])
    reward("2+2?", "The answer is 4")         # -> 1.0: on text, as in a hand-written loop
    reward.score(trajectories)                # -> [Score]: in the training loop; never raises for the function
    GRPOTrainer(..., reward_funcs=[reward])   # TRL; `compute_score = reward` for verl: `rlvr.reward.adapters`

`score` turns everything that goes wrong in the function into an `error` outcome, so a broken verifier is never a wrong
answer; the loop counts errors against its error budget. A direct call raises the function's own exception.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, Literal, TypeVar, overload

from rlvr.core.cancellation import raise_if_cancelled
from rlvr.core.registry import Registry, check_kwargs, load_path, named_parameters, show_names, takes_any
from rlvr.core.types import Outcome, Score, Trajectory
from rlvr.reward.adapters import TrlReward, VerlReward
from rlvr.reward.signatures import ACCEPTED, CallStyle, Case, InvalidReturn, Signature, check_argument_types, to_score

F = TypeVar("F", bound=Callable[..., Any])
WaitsFor = Literal["", "processes", "network"]


@dataclass(frozen=True)
class RewardSpec:
    """A reward function and what the loops must know of it; the fields are the arguments of `register_reward`.

    - `batched`: the function takes lists and returns a list (not needed where its parameters say so).
    - `passed_at`: an answer passed where its value is at least this.
    - `options`: a class or function that is called with the reward's options by name when the reward is resolved. It
      checks them (ValueError; the reward's name is put in front) and returns one object: the second argument of a
      function of cases, and what `caution`, `start` and `waits_for` are called with.
    - `caution`: how the reward can be earned without being right. A run that trains on it warns, unless it watches
      other rewards too.
    - `gold`: the `meta` key of the reference answer. Commands never read it as the model's answer.
    - `start`: starts what the reward depends on (a sandbox, say) when a run is built; ValueError where that is
      impossible.
    - `verifiable`: the verdict follows from what the task itself says is right (tests, an answer), so an answer is
      right exactly where it passed.
    - `waits_for`: what it spends its time on outside this process: `processes` that it runs, or the `network`. The
      loops call such a reward from several threads at once, a group a call, while other groups are still sampled, so
      a verdict must depend on its own answer alone.
    - `is_awaited`: a coroutine of cases that never blocks and returns scores: services await it on their event loop.
    - `weights`: with which weights its value is the sum of the `parts` of a score, by the part's name.
    - `reward_range`: the least and the most that it gives, where that is known.
    """

    function: Callable[..., Any]
    description: str = ""
    batched: bool = False
    passed_at: float = 1.0
    options: Callable[..., Any] | None = None
    caution: str | Callable[[Any], str] = ""
    gold: str = ""
    start: Callable[[Any], object] | None = None
    verifiable: bool = False
    waits_for: WaitsFor | Callable[[Any], WaitsFor] = ""
    is_awaited: bool = False
    weights: Callable[[Any], dict[str, float]] | None = None
    reward_range: tuple[float, float] | Callable[[Any], tuple[float, float]] | None = None


_rewards: Registry[RewardSpec] = Registry("reward")


def register_reward(name: str, description: str = "", **fields: Any) -> Callable[[F], F]:
    """Register a reward function under `name`; the function itself is returned unchanged.

    `fields` are those of `RewardSpec`, such as `batched=True`, `passed_at=0.5` or `caution="..."`.
    """

    def register(function: F) -> F:
        text = description or (function.__doc__ or "").strip().partition("\n")[0]
        spec = RewardSpec(function, text, **fields)
        Signature.of(f"reward {name!r}", function, spec.batched, spec.options is not None)
        _rewards.add(name, spec, function)
        return function

    return register


def resolve_reward(name: str | Callable[..., Any], /, **kwargs: Any) -> Reward:
    """The reward of that name, path `package.module:function`, or function, with its options bound.

    ValueError for an unknown name, an option that the function does not take, or a missing one that it needs.
    """
    if isinstance(name, Reward):
        return replace(name, kwargs={**name.kwargs, **kwargs})
    if isinstance(name, str) and ":" not in name:
        return Reward(name, _rewards.get(name), kwargs)
    function: Any = load_path("reward", name) if isinstance(name, str) else name
    if not callable(function):
        raise ValueError(
            f"reward {function!r} is of type {type(function).__name__}; expected a function, a path "
            f"'package.module:function' or a name: {', '.join(_rewards.names())}"
        )
    label = show_names(name) if isinstance(name, str) else getattr(function, "__name__", type(function).__name__)
    return Reward(label, _rewards.entry_of(function) or RewardSpec(function), kwargs)


def number_name(name: str, taken: Collection[str]) -> str:
    """The name of a program's own function, or `name_2`, `name_3`, ... where another one has it."""
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(free for free in names if free not in taken)


def reward_spec(name: str) -> RewardSpec:
    """The spec of a registered reward."""
    return _rewards.get(name)


def known_rewards() -> dict[str, str]:
    """Every registered name with its description."""
    return {name: _rewards.get(name).description for name in _rewards.names()}


def options_of(name: str) -> set[str] | None:
    """The names of a reward's options; None where it takes any."""
    spec = RewardSpec(load_path("reward", name)) if ":" in name else _rewards.get(name)
    if spec.options is not None:
        return None if takes_any(spec.options) else set(named_parameters(spec.options))
    signature = Signature.of(f"reward {name!r}", spec.function, spec.batched)
    return None if signature.takes_any else set(signature.names - signature.supplied)


@dataclass(frozen=True)
class Reward:
    """A reward with its options bound. Made by `resolve_reward`.

    `environment_weight` times what an environment gives for an episode is added to the value in a training loop; None:
    not declared, and an environment that gives a reward too is an error (`rlvr.reward.environment`).
    """

    name: str
    spec: RewardSpec
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    environment_weight: float | None = None
    _signature: Signature = field(init=False, repr=False, compare=False)
    _options: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        what, spec = f"reward {self.name!r}", self.spec
        signature = Signature.of(what, spec.function, spec.batched, spec.options is not None)
        options: Any = self.kwargs
        if spec.options is not None:
            check_kwargs(what, spec.options, self.kwargs)
            try:
                options = spec.options(**self.kwargs)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error
        else:
            complete = signature.style is not CallStyle.TRL  # there a column of the data may fill a parameter
            if complete and (missing := signature.required - set(self.kwargs)):
                raise ValueError(
                    f"{what} needs {', '.join(map(repr, sorted(missing)))}: give it among the reward's options "
                    f"(kwargs), or read what belongs to the task from meta. Accepted signatures: {ACCEPTED}"
                )
            check_kwargs(what, spec.function, self.kwargs, signature.supplied, complete)
        object.__setattr__(self, "_signature", signature)
        object.__setattr__(self, "_options", options)

    def plus_environment(self, weight: float | None) -> Reward:
        """This reward plus `weight` x the environment's own."""
        if weight is not None and self.name == "environment":
            raise ValueError(
                f"reward.environment_weight={weight:g} has no effect: the reward 'environment' is what the environment "
                "gave, and nothing else; leave it out"
            )
        return self if weight == self.environment_weight else replace(self, environment_weight=weight)

    @property
    def formula(self) -> str:
        """The rewards that count and their weights, for people: `exact_match (verifier) + 0.5 x environment`."""
        if self.environment_weight is None:
            return self.name
        if self.environment_weight == 0:
            return f"{self.name} (verifier); the environment's own does not count"
        return f"{self.name} (verifier) + {self.environment_weight:g} x environment"

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The least and the most that it gives with its options; None: not known."""
        given = self.spec.reward_range
        return given(self._options) if callable(given) else given

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
        """The value for one answer given as text; None where the reward cannot judge (not applicable, invalid task).

        A call with `completions` goes to `as_trl()`, one with `solution_str` to `as_verl()`.
        """
        if "completions" in kw and not args:
            return self.as_trl()(**kw)
        if "solution_str" in kw and not args:
            return self.as_verl()(**kw)
        return self._value(*args, **kw)

    def _value(self, prompt: str, response: str, meta: dict[str, Any] | None = None, **kw: Any) -> float | None:
        if kw:
            return resolve_reward(self, **kw)._value(prompt, response, meta)
        check_argument_types(self.name, "response", response, meta)
        return self.judge(Case(prompt, response, meta)).value

    def as_trl(self) -> TrlReward:
        """This reward as a reward function of TRL's trainers."""
        return TrlReward(self.name, self.judge_all)

    def as_verl(self) -> VerlReward:
        """This reward as verl's `compute_score`."""
        return VerlReward(self.name, self.judge_all)

    @property
    def caution(self) -> str:
        """How the reward can be earned without a right answer, with its options; "" if no such way is known."""
        caution = self.spec.caution
        return caution(self._options) if callable(caution) else caution

    @property
    def waits_for(self) -> WaitsFor:
        """What the reward waits for outside this process, with its options (see `RewardSpec.waits_for`)."""
        waits_for = self.spec.waits_for
        return waits_for(self._options) if callable(waits_for) else waits_for

    @property
    def weights(self) -> dict[str, float]:
        """With which weights its value is the sum of other rewards, by the name of a score's part; empty if not."""
        return self.spec.weights(self._options) if self.spec.weights else {}

    def start(self) -> None:
        """Start what the reward depends on, before a run starts; ValueError if that is impossible on this machine."""
        if self.spec.start:
            self.spec.start(self._options)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One `Score` per trajectory, in order; everything that the function does wrong becomes an `error` outcome."""
        for i, trajectory in enumerate(trajectories):
            if not isinstance(trajectory, Trajectory):
                raise ValueError(
                    f"reward {self.name!r}: trajectories[{i}]={trajectory!r:.80} is of type "
                    f"{type(trajectory).__name__}; expected a Trajectory. To judge a text, call "
                    "reward(prompt, response, meta)"
                )
        return self.judge_all([Case.of(t) for t in trajectories])

    def judge_all(self, cases: Sequence[Case]) -> list[Score]:
        """One `Score` per case, all in one call where the function takes lists; never raises for the function."""
        if not (cases and self._signature.batched):
            scores: list[Score] = []
            for case in cases:
                raise_if_cancelled()  # outside the guard: a cancelled step stops here
                scores.append(self._try_score(lambda case=case: self.judge(case)))
            return scores
        cases = [self._with_copied_meta(case) for case in cases]
        values: list[Any] = []
        failure = self._try_score(lambda: values.extend(self._signature.call_many(cases, self._options)))
        if failure.outcome is Outcome.ERROR:
            return [failure] * len(cases)
        return [self._try_score(lambda value=value: value) for value in values]

    async def await_all(self, cases: Sequence[Case]) -> list[Score]:
        """`judge_all` of a reward that `is_awaited`, on the event loop of the caller."""
        try:
            return await self.spec.function(cases, self._options)
        except Exception:
            return [Score(None, Outcome.ERROR, "exception", detail=traceback.format_exc()[-8000:])] * len(cases)

    def _with_copied_meta(self, case: Case) -> Case:
        """The case for a function of the user's with a copy of its task's meta: it may change it."""
        if not case.meta or str(getattr(self.spec.function, "__module__", "")).startswith("rlvr."):
            return case
        try:
            return replace(case, meta=copy.deepcopy(case.meta))
        except (TypeError, copy.Error):  # an environment's own object that has no copies
            return replace(case, meta=dict(case.meta))

    def judge(self, case: Case) -> Score:
        """The `Score` of one case; raises what the function raises."""
        case = self._with_copied_meta(case)
        if self._signature.batched:
            return to_score(self._signature.call_many([case], self._options)[0], self.spec.passed_at)
        return to_score(self._signature.call_one(case, self._options), self.spec.passed_at)

    def _try_score(self, work: Callable[[], Any]) -> Score:
        try:
            return to_score(work(), self.spec.passed_at)
        except InvalidReturn as error:
            return Score(None, Outcome.ERROR, error.reason, detail=f"reward {self.name!r} {error}")
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit and asyncio.CancelledError too: a reward must not end a run
            return Score(None, Outcome.ERROR, "exception", detail=traceback.format_exc()[-8000:])
