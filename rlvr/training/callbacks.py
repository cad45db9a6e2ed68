"""Callbacks: code of the user's own at points of a run. It sees copies, may add metrics and end the run, and changes
nothing that is computed: a run with callbacks has the bits of the run without.

    class Watch(Callback):
        def on_step(self, phase, step, metrics):
            if metrics.get("optim/entropy", 1.0) < 0.1:
                raise StopRun("the entropy is below 0.1")
            return {"watch/seconds_a_token": metrics["time/step"] / metrics["rollout/tokens"]}

A callback is an object with some of these methods. A config names it under `callbacks`, by a path
`package.module:Class` or a registered name, with its options as `kwargs`.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from rlvr.core.registry import Registry, check_kwargs, did_you_mean, load_object
from rlvr.core.types import Trajectory
from rlvr.training.errors import TrainingStoppedError

C = TypeVar("C", bound=Callable[..., Any])
_callbacks: Registry[Callable[..., Any]] = Registry("callback")
HOOKS = ("on_start", "on_rollouts", "on_step", "on_evaluate", "on_stop")


class StopRun(Exception):
    """Raised by a callback, it ends training after this step; the run is evaluated and finished as usual."""


class Callback:
    """The methods that a callback may have; those that it has not are not called.

    `on_rollouts`, `on_step` and `on_evaluate` may return metrics, numbers by name, which are added to those of the
    step; a name that the step has already is an error. Each may raise `StopRun`.
    """

    def on_start(self, folder: Path) -> None:
        """Called before the first step of every attempt, of a resumed one too, with the run's folder."""

    def on_rollouts(self, step: int, trajectories: Sequence[Trajectory]) -> Mapping[str, float] | None:
        """Called with copies of all completions that a step of reinforcement learning sampled, after its update."""

    def on_step(self, phase: str, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float] | None:
        """Called after every step with its metrics; `phase` is "sft" or "rl"."""

    def on_evaluate(self, phase: str, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float] | None:
        """Called after every evaluation. `phase` is "baseline", "interim" or "final", `step` the steps that were made.

        What it returns is added to the metrics of the step for "interim" alone.
        """

    def on_stop(self, reason: str) -> None:
        """Called at the end of an attempt: "finished", "interrupted", or the error that ended it."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state` of the checkpoint that a run resumes from; called before `on_start`."""


@dataclass(frozen=True)
class CallbackOptions:
    """A registered callback or `package.module:Class`, and its arguments."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


def register_callback(name: str) -> Callable[[C], C]:
    """Register a class of callbacks, or a function that makes one, under `name`."""

    def register(make: C) -> C:
        _callbacks.add(name, make, make)
        return make

    return register


def resolve_callback(given: CallbackOptions | str) -> Any:
    """The callback of a name or path, made with its options. ValueError if it is unknown, or has no known method."""
    options = CallbackOptions(given) if isinstance(given, str) else given
    name = options.name
    found: Any = load_object("callback", name) if ":" in name else _callbacks.get(name)
    if isinstance(found, type) or (callable(found) and not _list_hooks(found)):
        check_kwargs(f"callback {name!r}", found, options.kwargs)
        found = found(**options.kwargs)
    elif options.kwargs:
        raise ValueError(f"callback {name!r} is an object, which takes no kwargs; name its class to give it options")
    known = [*HOOKS, "state", "restore"]
    if unknown := [hook for hook in _list_hooks(found) if hook not in HOOKS]:
        raise ValueError(
            f"callback {name!r} has a method {unknown[0]}, which nothing calls{did_you_mean(unknown[0], known)}; "
            f"expected {', '.join(known)}"
        )
    if not _list_hooks(found):
        raise ValueError(f"callback {name!r} is of type {type(found).__name__} without any of {', '.join(HOOKS)}")
    return found


def _list_hooks(found: Any) -> list[str]:
    """The methods of a callback that are its own, and those that begin as such."""
    return [
        name
        for name in dir(found)
        if name.startswith("on_") and getattr(type(found), name, None) is not getattr(Callback, name, found)
    ]


class Callbacks:
    """The callbacks of a run. One that raises ends the run once its step is saved: `failure` is the error then.

    `end_reason` is what a callback said that ended training, "" while none did.
    """

    def __init__(self, given: Sequence[CallbackOptions | str] = ()) -> None:
        names = [one if isinstance(one, str) else one.name for one in given]
        self._all = list(zip(names, map(resolve_callback, given), strict=True))
        self.failure: TrainingStoppedError | None = None
        self.end_reason = ""

    def start(self, folder: Path) -> None:
        self._call("on_start", folder)

    def add_rollouts(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        if not any("on_rollouts" in _list_hooks(callback) for _, callback in self._all):
            return {}
        return self._call("on_rollouts", step, trajectories, copied=1)

    def add_step(self, phase: str, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        return self._call("on_step", phase, step, metrics, copied=2, taken=metrics)

    def add_evaluation(self, phase: str, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        return self._call("on_evaluate", phase, step, metrics, copied=2, taken=metrics)

    def stop(self, reason: str, warn: Callable[[str], None]) -> None:
        """Tell all that the attempt is over; one that raises is warned of."""
        before, self.failure = self.failure, None
        self._call("on_stop", reason)
        if self.failure:
            warn(str(self.failure))
        self.failure = before

    def raise_failure(self) -> None:
        """Raise what a callback did wrong, if one did."""
        if self.failure:
            raise self.failure

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of each, by its place in the list and its name."""
        kept: dict[str, Any] = {}
        for number, (name, callback) in enumerate(self._all):
            if held := getattr(callback, "state", dict)():
                kept[f"{number} {name}"] = held
        return kept

    def restore(self, state: Mapping[str, Any]) -> None:
        for number, (name, callback) in enumerate(self._all):
            if held := state.get(f"{number} {name}"):
                callback.restore(held)

    def _call(
        self, hook: str, *arguments: Any, copied: int | None = None, taken: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Call a method of all; the metrics that they return. Each gets its own copy of the argument `copied`."""
        added: dict[str, float] = {}
        for name, callback in self._all:
            if hook not in _list_hooks(callback):
                continue
            own = [copy.deepcopy(one) if i == copied else one for i, one in enumerate(arguments)]
            try:
                added |= _check_metrics(getattr(callback, hook)(*own), {**(taken or {}), **added})
            except StopRun as reason:
                self.end_reason = self.end_reason or f"{reason or 'no reason given'} (callback {name})"
            except Exception as error:
                self.failure = self.failure or TrainingStoppedError(
                    f"callback {name!r}: {hook} raised {type(error).__name__}: {error}{_place(error)}. The step is "
                    "saved; correct the callback, and the same command goes on"
                )
        return added


def _check_metrics(returned: Any, taken: Mapping[str, Any]) -> dict[str, float]:
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise ValueError(f"it returned a {type(returned).__name__}, expected None or metrics: numbers by name")
    for name, value in returned.items():
        if not (isinstance(name, str) and name) or not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"it returned {name!r}: {value!r:.80}, expected a number under a name")
        if name in (*taken, "phase", "step", "stopped"):
            raise ValueError(f"it returned {name!r}, which the step has already; use a name of its own")
    return {name: float(value) for name, value in returned.items()}


def _place(error: BaseException) -> str:
    """Where the callback's own code raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(__file__) not in f.filename]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
