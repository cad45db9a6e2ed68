"""Environments by name: `@register_environment("mine")` on a factory, `resolve_environment("mine", **options)`.

A factory takes the options and returns a `TaskSource` (see `rlvr.protocols`); a class whose instances are task sources
is one. `python -m pytest tests/test_env_registry.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlvr.protocols import TaskSource
from rlvr.registry import Registry, check_kwargs, load_path

F = TypeVar("F", bound=Callable[..., Any])
_environments: Registry[Callable[..., TaskSource]] = Registry("environment")
_MEMBERS = ("levels", "reward", "train", "heldout", "env", "demonstration")


def register_environment(name: str) -> Callable[[F], F]:
    """Register a factory of task sources under `name`; the factory itself is returned unchanged."""

    def register(factory: F) -> F:
        _environments.add(name, factory, factory)
        return factory

    return register


def resolve_environment(name: str, /, **kwargs: Any) -> TaskSource:
    """The task source of that name or path `package.module:factory`, made with the options given.

    ValueError for an unknown name, an option that the factory does not take, and whatever it finds wrong itself.
    """
    factory = load_path("environment", name) if ":" in name else _environments.get(name)
    check_kwargs(f"environment {name!r}", factory, kwargs)
    source = factory(**kwargs)
    missing = [member for member in _MEMBERS if not hasattr(source, member)]
    if missing:
        raise ValueError(
            f"environment {name!r} made a {type(source).__name__} without {', '.join(missing)}; "
            f"a task source has {', '.join(_MEMBERS)}"
        )
    return source


def known_environments() -> list[str]:
    return _environments.known()
