"""Environments by name: `@register_environment("mine")` on a factory, `resolve_environment("mine", **options)`.

A name with a colon is a path or a reference (`rlvr.envs.environment_references`). A factory takes the options and
returns a task source (`rlvr.core.protocols.TaskSource`): a class of sources is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

from rlvr.core.protocols import TaskSource
from rlvr.core.registry import Registry, check_kwargs, name_object, named_parameters, takes_any
from rlvr.envs.environment_references import adapt_class, find_reference

F = TypeVar("F", bound=Callable[..., Any])
_environments: Registry[Callable[..., TaskSource]] = Registry("environment")
_REQUIRED = ("levels", "reward", "train", "heldout", "env", "demonstration")
_OPTIONAL = (
    *("vocabulary", "end_word", "pad_word", "max_turns", "size", "leave_out", "prompt_limit", "group_builder"),
    *("extra_heldout", "parse_task", "describe_task", "describe_data", "advice", "chat_messages", "example_prompt"),
    "environment_weight",
    *("complete_prompt", "owns_prompts", "roles", "opponent", "seat"),
)


def register_environment(name: str) -> Callable[[F], F]:
    """Register a factory of task sources under `name`; the factory itself is returned unchanged."""

    def register(factory: F) -> F:
        _environments.add(name, factory, factory)
        return factory

    return register


def resolve_environment(name: str, /, **kwargs: Any) -> TaskSource:
    """Make the task source of that name or path `package.module:factory` with the options given.

    ValueError for an unknown name, an option that the factory does not take, a task source with a member missing, and
    whatever the factory itself refuses.
    """
    factory = _find_factory(name)
    check_kwargs(f"environment {name!r}", factory, kwargs)
    abstract = getattr(factory, "__abstractmethods__", ())
    _refuse_missing(name, factory, [member for member in _REQUIRED if member in abstract])
    source = factory(**kwargs)
    _refuse_missing(name, type(source), [member for member in _REQUIRED if not hasattr(source, member)])
    return source if TaskSource in type(source).__mro__ else _add_defaults(source)


def _find_factory(name: str) -> Callable[..., TaskSource]:
    if ":" in name:
        return find_reference(name)
    factory = _environments.get(name)
    return adapt_class(factory, name_object(factory)) if inspect.isclass(factory) else factory


def options_of(name: str) -> set[str] | None:
    """The names of a registered environment's options; None where it takes any."""
    factory = _find_factory(name)
    return None if takes_any(factory) else set(named_parameters(factory))


def takes_option(name: str, option: str) -> bool:
    """Whether the environment of that name or path has the option by name."""
    factory = _find_factory(name)
    return option in named_parameters(factory)


def _refuse_missing(name: str, kind: Any, missing: Sequence[str]) -> None:
    if missing:
        raise ValueError(
            f"environment {name!r} made a {kind.__name__} without {', '.join(missing)}; "
            f"a task source has {', '.join(_REQUIRED)}"
        )


def _add_defaults(source: Any) -> TaskSource:
    """Give a source that does not inherit from `TaskSource` the optional members that it lacks."""
    for member in _OPTIONAL:
        if not hasattr(source, member):
            default = getattr(TaskSource, member)
            object.__setattr__(source, member, MethodType(default, source) if callable(default) else default)
    return source


def known_environments() -> list[str]:
    return _environments.names()
