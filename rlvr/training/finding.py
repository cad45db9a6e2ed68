"""A finding of `rlvr.training.diagnosis`, and the words that findings share."""

from __future__ import annotations

from dataclasses import dataclass

REPLACE = (
    "training.dynamic_sampling=2 replaces such groups (under training.schedule=sync and "
    "algorithm.drop_equal_groups=true)"
)


@dataclass(frozen=True)
class Finding:
    """A finding of the diagnosis of a run. `severity` is problem (this alone can stop learning), hint (worth a look)
    or note. `code` groups findings."""

    severity: str
    code: str
    fact: str
    remedy: str


def format_percent(share: float) -> str:
    return f"{100 * share:.1f}%" if 0 < share < 0.1 else f"{100 * share:.0f}%"
