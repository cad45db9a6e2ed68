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
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_OF_TRL = {"on_train_begin": "on_start", "on_step_end": "on_step", "on_log": "on_step", "on_train_end": "on_stop"}
_OF_THE_RUN = ("phase", "step", "stopped")  # names of a row of metrics that are the run's own
_BEGINNINGS = ("test/", "time/")  # and beginnings of such names


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
        """The state of this callback that a checkpoint keeps, as JSON."""
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
        near = f" (did you mean {_OF_TRL[unknown[0]]!r}?)" if unknown[0] in _OF_TRL else did_you_mean(unknown[0], known)
        raise ValueError(
            f"callback {name!r} has a method {unknown[0]}, which nothing calls{near}; expected {', '.join(known)}"
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
        self._all: list[tuple[str, Any]] = []  # each with a name for messages and its state: class and number
        for one in given:
            callback = resolve_callback(one)
            name = type(callback).__qualname__
            number = sum(known.partition("#")[0] == name for known, _ in self._all)
            self._all.append((f"{name}#{number + 1}" if number else name, callback))
        self.failure: TrainingStoppedError | None = None
        self.end_reason = ""

    def start(self, folder: Path) -> None:
        self._call("on_start", folder)

    def add_rollouts(
        self, step: int, trajectories: Sequence[Trajectory], metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        return self._call("on_rollouts", step, trajectories, copied=1, taken=metrics)

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
        """Raise the error of a callback that failed, if one did."""
        if self.failure:
            raise self.failure

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: the state of each by its class, and why one ended training."""
        states: dict[str, Any] = {}
        for name, callback in self._all:
            try:
                if held := getattr(callback, "state", dict)():
                    if not isinstance(held, dict) or json.loads(json.dumps(held)) != held:
                        raise ValueError(f"`state` returned {held!r:.80}, expected a dictionary of text keys for JSON")
                    states[name] = held
            except Exception as error:
                self._fail(name, "state", error)
        return {**({"states": states} if states else {}), **({"ended": self.end_reason} if self.end_reason else {})}

    def restore(self, state: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        """Give each its state of a checkpoint; TrainingStoppedError for one that cannot take it."""
        self.end_reason = state.get("ended", "")
        states = dict(state.get("states", {}))
        for name, callback in self._all:
            if name in states:
                try:
                    callback.restore(states.pop(name))
                except Exception as error:
                    self._fail(name, "restore", error)
                    self.raise_failure()
        for name in states:
            warn(f"the checkpoint has a state of the callback {name}, which this attempt does not have; it is dropped")

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
                with _kept_torch():
                    added |= check_metrics(getattr(callback, hook)(*own), {**(taken or {}), **added})
            except StopRun as reason:
                self.end_reason = self.end_reason or f"{str(reason) or 'no reason given'} (callback {name})"
            except (Exception, SystemExit) as error:
                self._fail(name, hook, error)
        return added

    def _fail(self, name: str, hook: str, error: BaseException) -> None:
        after = {"on_start": "Correct", "restore": "Correct", "on_stop": ""}.get(hook, "The step is saved; correct")
        remedy = f". {after} the callback, and the same command goes on" if after else ""
        text = f"callback {name}: {hook} raised {type(error).__name__}: {error}{_place(error)}{remedy}"
        self.failure = self.failure or TrainingStoppedError(text)


@contextmanager
def _kept_torch() -> Iterator[None]:
    """Put back what a callback changes of torch for the whole process, on which the bits of a run depend."""
    torch: Any = sys.modules.get("torch")  # a run may need no torch
    if torch is None:
        yield
        return
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_default_device()
    try:
        yield
    finally:
        after = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_default_device()
        if after[0] != before[0]:
            torch.set_default_dtype(before[0])
        if after[1] != before[1]:
            torch.set_float32_matmul_precision(before[1])
        if after[2] != before[2]:
            torch.set_default_device(None if before[2].type == "cpu" else before[2])


def check_metrics(returned: Any, taken: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that a user's code returned, as floats; ValueError for other values and for reserved names."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise ValueError(f"the method returned a {type(returned).__name__}, expected None or metrics: numbers by name")
    checked: dict[str, float] = {}
    for name, value in returned.items():
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # of numpy or torch
            value = value.item()
        if not (isinstance(name, str) and name) or not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"given {name!r}: {value!r:.80}, expected a number under a name")
        if name in taken:
            raise ValueError(f"given {name!r}, which the step has already; use a name of its own")
        if name in _OF_THE_RUN or name.startswith(_BEGINNINGS):
            reserved = ", ".join((*_OF_THE_RUN, *(f"{beginning}..." for beginning in _BEGINNINGS)))
            raise ValueError(f"given {name!r}, a name of the run's own ({reserved}); use another one")
        checked[name] = float(value)
    return checked


def _place(error: BaseException) -> str:
    """Where the callback's own code raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(__file__) not in f.filename]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
