"""The configuration of a run: composed from files and the command line, resolved, and checked against a schema.

    loaded = load("arithmetic", None, ["seed=1"])
    config = build_config(loaded)                    # of rlvr.config.build_config

`compose` reads the part of Hydra's language that we use, `interpolate` resolves `${...}`, `alias_translation` replaces
the words of other systems (`aliases` has the table), `validate` builds the dataclasses of `schema` and reports what
does not fit, `unused_keys` what has no effect. Lower layers get plain keyword arguments and know of no config.
"""

from rlvr.config.alias_translation import load
from rlvr.config.compose import CLI, LoadedConfig, difference, dump, read
from rlvr.config.validate import validate

__all__ = ["CLI", "LoadedConfig", "difference", "dump", "load", "read", "validate"]
