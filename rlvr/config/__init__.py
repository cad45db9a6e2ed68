"""The configuration of a run: composed from files and the command line, resolved, and checked against a schema.

    loaded = load("arithmetic", None, ["seed=1"])
    config = build_config(loaded)                    # of rlvr.config.build_config

`compose` reads the part of Hydra's language that we use, `interpolate` resolves `${...}`, `alias_translation` replaces
the words of other systems (`aliases` has the table), `validate` builds the dataclasses of `schema` and reports what
does not fit, `unused_keys` what has no effect. Lower layers get plain keyword arguments and know of no config.
"""

from typing import TYPE_CHECKING, Any

from rlvr.config.compose import CLI, LoadedConfig, difference, dump, read
from rlvr.config.validate import validate

if TYPE_CHECKING:
    from rlvr.config.alias_translation import load

__all__ = ["CLI", "LoadedConfig", "difference", "dump", "load", "read", "validate"]


def __getattr__(name: str) -> Any:
    """Import `load` when it is first asked for: it needs the schema of a run, and a server's settings do not."""
    if name == "load":
        from rlvr.config.alias_translation import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
