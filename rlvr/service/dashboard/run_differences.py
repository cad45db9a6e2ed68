"""In what two runs differ: their settings, their data, and the code and machine that computed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.service.dashboard.dashboard_data import one_line
from rlvr.service.dashboard.run_reader import RunReader
from rlvr.tracking.tracker import mask_settings

NAMES = ("run.name", "run.root", "run.resume")  # every run has its own
DATA = ("env.", "prompt.", "reward.")
UNSET = "not set"


@dataclass(frozen=True)
class RunDifference:
    """A key with its value in both runs. `group` is settings, data, or code and machine."""

    group: str
    key: str
    first: str
    second: str


def list_differences(first: RunReader, second: RunReader) -> list[RunDifference]:
    """Data first, then settings, then code and machine."""
    found: list[RunDifference] = []
    for group, sides in (("settings", (first.config(), second.config())),
                         ("code and machine", (first.machine(), second.machine()))):  # fmt: skip
        whole = [dict(flatten(side)) for side in sides]
        shown = [dict(flatten(mask_settings(side))) for side in sides]
        for key in dict.fromkeys([*whole[0], *whole[1]]):
            if key in NAMES or repr(whole[0].get(key)) == repr(whole[1].get(key)):
                continue
            texts = [describe(side[key]) if key in side else UNSET for side in shown]
            if texts[0] == texts[1]:
                texts = [f"{text} (differs in what is not shown)" for text in texts]
            kind = "data" if group == "settings" and key.startswith(DATA) else group
            found.append(RunDifference(kind, one_line(key, 120), *texts))
    return sorted(found, key=lambda one: ("data", "settings", "code and machine").index(one.group))


def flatten(settings: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no mapping; a list is one value."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and depth < 12:
            yield from flatten(value, f"{name}.", depth + 1)
        else:
            yield name, value


def describe(value: Any) -> str:
    return "null" if value is None else one_line(value if isinstance(value, str) else repr(value), 200)
