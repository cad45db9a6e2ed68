"""The configuration of a run: composed from files and the command line, resolved, and checked against a schema.

    loaded = load("arithmetic", None, ["seed=1"])
    config = configured(loaded)                    # of rlvr.config.schema

`compose` reads the part of Hydra's language that we use, `interpolate` resolves `${...}`, `translate` puts our keys
where other systems' words stand (`spellings` lists them), `validate` builds the dataclasses of the lower floors and
says what does not fit, `idle` what does nothing. Config stops at this floor: below it there are only plain keyword
arguments.
"""

from rlvr.config.compose import CLI, Loaded, difference, dump, read
from rlvr.config.translate import load
from rlvr.config.validate import validate

__all__ = ["CLI", "Loaded", "difference", "dump", "load", "read", "validate"]
