"""The configuration of a run: composed from files and the command line, resolved, and checked against a schema.

    loaded = load("arithmetic", None, ["seed=1"])
    run = validate(loaded.values, Schema, loaded.origin)

`compose` reads the part of Hydra's language that we use, `interpolate` resolves `${...}`, `validate` builds the
dataclasses of the lower floors and says what does not fit. Config stops at this floor: below it there are only plain
keyword arguments.
"""

from rlvr.config.compose import CLI, Loaded, difference, dump, load, read
from rlvr.config.validate import validate

__all__ = ["CLI", "Loaded", "difference", "dump", "load", "read", "validate"]
