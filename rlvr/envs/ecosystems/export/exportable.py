"""Reads an environment for an export: its tasks, how its answers are judged, and the code that both need.

What cannot be exported is refused here, with the reason, before anything is written.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlvr.core.protocols import TaskSource
from rlvr.core.registry import name_object
from rlvr.core.types import Task
from rlvr.envs.ecosystems.export.task_package import ExportRecipe, Json, TaskPackage, write_row
from rlvr.envs.gym.gym_session import ClassGym, check_range
from rlvr.envs.gym.gym_source import GymSource
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import resolve_environment
from rlvr.reward import Reward, resolve_reward
from rlvr.reward.environment import NAME as ENVIRONMENT
from rlvr.reward.reward_options import check_integer

MOST_TASKS = 100_000
_REPEATS = 200  # draws in a row that repeat tasks: a level has no more
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class ExportRequest:
    """What to export: an environment as `env.name` with its options, by its own reward or another, and at most `tasks`
    of each side. `reward_range` is the least and the most that a turn gives; None: what the environment says."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reward: str | Callable[..., Any] | None = None
    reward_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tasks: int = 1_000
    reward_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Exportable:
    """An environment that can be exported. `local` are modules that are not installed, by name, and have to come along;
    `distributions` are installed packages that the others come from. `modules` are those of reward and episodes."""

    name: str
    source: TaskSource
    reward: Reward | None
    package: TaskPackage
    modules: list[str]
    local: Mapping[str, Path]
    distributions: list[str]

    def demonstrate(self, task: Task) -> str | None:
        """A right answer to a task of one turn; None if the environment demonstrates none."""
        given = self.source.demonstration(task, 0)
        return given if isinstance(given, str) else None


def read_environment(request: ExportRequest) -> Exportable:
    """Read the environment to export; ValueError if it cannot be exported."""
    check_integer("env export: tasks", request.tasks, 1, MOST_TASKS)
    source = resolve_environment(request.name, **request.options)
    gym = _find_class(source, request)
    reward = None if gym else _find_reward(source, request)
    objects = [gym.make] if gym else [reward.spec.function] if reward else []
    modules = [one.__module__ for one in objects]
    imports = [] if gym else [name for name in modules if not _is_own(name)]
    if gym:
        episodes: Json | None = {"path": gym.path, "options": gym.options, "seconds": gym.seconds}
        _check_json(f"the options of {gym.path}", gym.options)
    else:
        episodes = None
    given = {"name": reward.name, "options": dict(reward.kwargs)} if reward else None
    recipe = ExportRecipe(given, episodes, imports, source.max_turns, _find_range(request, source, reward))
    package = TaskPackage(recipe, collect_tasks(request.name, source, request.tasks))
    local, distributions = _find_code(modules)
    return Exportable(request.name, source, reward, package, modules, local, distributions)


def _find_range(request: ExportRequest, source: TaskSource, reward: Reward | None) -> list[float] | None:
    """The least and the most that a turn gives: as asked for, or what the environment or the verifier says."""
    if request.reward_range is not None:
        given: tuple[float, float] | None = check_range("env export: reward_range", request.reward_range)
    else:
        given = getattr(source, "reward_range", None) or (reward.reward_range if reward else None)
    return list(given) if given and all(map(math.isfinite, given)) else None


def _refuse(name: str, why: str) -> ValueError:
    return ValueError(f"environment {name!r} cannot be exported: {why}")


def _find_class(source: TaskSource, request: ExportRequest) -> ClassGym | None:
    """The class by Gym's contract whose episodes the environment plays, if it does."""
    if isinstance(source, GymSource):
        if not isinstance(source.gym, ClassGym):
            raise _refuse(
                request.name, "its episodes are played by another project; use the environment of that project directly"
            )
        if request.reward is not None or request.reward_options:
            raise _refuse(request.name, "its episodes give the reward themselves; leave --reward out")
        if source.gym.path.startswith("given:"):
            raise _refuse(request.name, "its class was given as an object; put it into a module")
        return source.gym
    return None


def _find_reward(source: TaskSource, request: ExportRequest) -> Reward:
    name = request.name
    given = request.reward if request.reward is not None else source.reward
    if source.group_builder:
        raise _refuse(name, "its episodes are played and judged as groups")
    if not _is_plain(source):
        raise _refuse(name, "its episodes have several turns or tools; only tasks of one turn and classes with `reset` "
                            "and `step` can be exported")  # fmt: skip
    if given == ENVIRONMENT or source.environment_weight:
        raise _refuse(name, "its episodes give the reward themselves; name a verifier by --reward")
    if callable(given) and not isinstance(given, Reward):
        path = name_object(given)
        if path.startswith("given:"):
            called = getattr(given, "__qualname__", type(given).__name__)
            raise _refuse(
                name,
                f"its reward cannot be imported ({called}, as a lambda or a function inside another); put it into a "
                "module and name it by package.module:function",
            )
        given = path
    reward = resolve_reward(given, **request.reward_options)
    if reward.name == ENVIRONMENT:
        raise _refuse(name, "its episodes give the reward themselves; name a verifier by --reward")
    _check_json(f"the options of the reward {reward.name}", reward.kwargs)
    return reward


def _is_plain(source: TaskSource) -> bool:
    """Whether its episodes show a prompt and take one answer."""
    task = next(_draw(source), None) or next(iter(source.heldout(1)), None)
    if task is None or source.max_turns > 1:
        return source.max_turns == 1
    try:
        return isinstance(source.env(task, None), PromptEnv)
    except ValueError:
        raise
    except Exception:  # one of several turns looks at the tokenizer, which is not there
        return False


def _check_json(what: str, given: Any) -> None:
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} cannot be written as JSON ({error}); give texts, numbers, lists and mappings"
        ) from error


def _draw(source: TaskSource) -> Iterator[Task]:
    """Training tasks, the levels in turn, without end where the source has none."""
    sizes = {level: source.size(level) if source.size else None for level in source.levels}
    index = 0
    while open_levels := [level for level, size in sizes.items() if size is None or index < size]:
        for level in open_levels:
            yield source.train(0, index, level)
        index += 1


def collect_tasks(name: str, source: TaskSource, most: int) -> dict[str, list[Task]]:
    """At most `most` different tasks of each side, train and heldout; no held-out task is a training task."""
    every = source.heldout(None)
    held = {_key(task) for task in every}
    found: dict[str, Task] = {}
    repeated = 0
    for task in _draw(source):
        key = _key(task)
        if key in found or key in held:
            repeated += 1
            if repeated >= _REPEATS:
                break
            continue
        repeated, found[key] = 0, task
        if len(found) >= most:
            break
    if not found and not every:
        raise _refuse(name, "the environment has no tasks")
    tasks = {"train": list(found.values()), "heldout": every[:most]}
    for task in (*tasks["train"], *tasks["heldout"]):
        write_row(task)
    return tasks


def _key(task: Task) -> str:
    """What a task is, without its id."""
    return json.dumps([task.prompt, task.meta, task.level], sort_keys=True, default=repr)


def _is_own(module: str) -> bool:
    return module.split(".")[0] in ("rlvr", "builtins")


def _find_code(modules: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """The places of modules that are not installed, by their first names, and the distributions of the others."""
    local, distributions = dict[str, Path](), list[str]()
    known = packages_distributions()
    for name in dict.fromkeys(module.split(".")[0] for module in modules if not _is_own(module)):
        if name in sys.stdlib_module_names:
            continue
        place = find_module(name)
        if name in known and (place is None or is_installed(place)):
            distributions += known[name][:1]
        elif place is None or name == "__main__":
            raise ValueError(f"env export: the module {name!r} has no file; put its code into a module of its own")
        else:
            local[name] = place
    return local, sorted(set(distributions))


def find_module(name: str) -> Path | None:
    """The file of a module, or the folder of a package; None for a module without a file."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        places = list(spec.submodule_search_locations or []) if spec else []
        return Path(places[0]) if places else None
    path = Path(str(spec.origin))
    return path.parent if path.name == "__init__.py" else path


def is_installed(path: Path) -> bool:
    return any(part in _INSTALLED for part in path.parts)
