"""A job of `Worker`: what is wrong with the tests of a verification, as far as that shows without an answer.

Runs in the child; standard library only. `python -m pytest tests/test_code_task_faults.py` exercises it.
"""

from __future__ import annotations

from typing import Any

from rlvr.sandbox.plan import make_plan
from rlvr.sandbox.remote import BadTest


def run(setup: None, item: dict[str, Any]) -> str:
    """The fault of the tests {tests, imports, setup, entry_point, answer_names}; "" if there is none."""
    try:
        names = tuple(item["answer_names"])
        make_plan(tuple(item["tests"]), tuple(item["imports"]), item["setup"], item["entry_point"], names)
    except BadTest as error:
        return str(error)
    return ""
