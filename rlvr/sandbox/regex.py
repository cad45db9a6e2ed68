"""A job of `Worker`: whether a text matches a regular expression. Runs in the child; standard library only."""

from __future__ import annotations

import re
from typing import Any


def run(setup: dict[str, str], item: str | None) -> dict[str, Any]:
    """`{"fits": bool}` for a text, `{}` for None (the pattern compiles), or what is wrong with the pattern and where.

    `setup` is `{"pattern": ..., "match": "full" or "search"}`.
    """
    try:
        pattern = re.compile(setup["pattern"])  # cached by the module
    except re.error as error:
        return {"error": error.msg, "position": error.pos}
    except (OverflowError, RecursionError) as error:
        return {"error": str(error), "position": None}
    if item is None:
        return {}
    match = pattern.fullmatch(item) if setup["match"] == "full" else pattern.search(item)
    return {"fits": match is not None}
