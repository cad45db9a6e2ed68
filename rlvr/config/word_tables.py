"""How the tables of other systems' words are written: a translated word, a refused one, a choice among values.

`rlvr.config.trl_words` and `rlvr.config.verl_words` are the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlvr.config.alias import Alias, NotSupportedError, keep_value, to_number

OFF = (None, False, 0, "", "no", "none", "off", "never")


def words(names: str, targets: str, meaning: str, convert: Callable[[Any], Any] = keep_value) -> list[Alias]:
    """An alias, at the top of a config only, for each of the names."""
    return [Alias(name, tuple(targets.split()), meaning, convert, only_at_top=True) for name in names.split()]


def refuse(names: str, why: str, *harmless: Any) -> list[Alias]:
    """Words without a counterpart: `why` says what to do instead. `harmless` values, and those that say off, pass."""

    def check(value: Any) -> None:
        if not any(value == other and type(value) is type(other) for other in (*OFF, *harmless)):
            raise NotSupportedError(why)

    return words(names, "", why, check)


def replace_by(names: str, describe: Callable[[Any], str]) -> list[Alias]:
    """Words without a counterpart, of whose value `describe` says what to write instead. Values that say off pass."""

    def check(value: Any) -> None:
        if not any(value == off and type(value) is type(off) for off in OFF):
            raise NotSupportedError(describe(value))

    return words(names, "", describe("VALUE"), check)


def to_share_of_steps(value: Any) -> float:
    """A share of the steps."""
    try:
        part = to_number(value)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise ValueError("a share of the steps, from 0 to below 1")
    return part


def choose(*unknown: str, **values: Any) -> Callable[[Any], Any]:
    """A function that maps theirs to ours; the text `unknown` is the error for any other value."""

    def convert(value: Any) -> Any:
        key = str(value).lower()
        if key not in values:
            raise NotSupportedError("".join(unknown) or f"expected {', '.join(values)}")
        return values[key]

    return convert


ADAMW = "training.optimizer"
ONE_PROCESS = "one process trains on one device: leave it out, or give client=sharded (docs/scale/many-processes.md)"
NO_LOADER = "an environment (env) makes the tasks, and there is no data loader: leave it out"
BUILT_IN = "sampling is built in: leave it out, or give sampler.name=vllm with sampler.urls (docs/scale/vllm.md)"
MEMORY = "a micro-batch is cut to tokens: give engine.micro_tokens"
