"""A job of `Worker`: what is wrong with the tests of a verification, as far as that shows without an answer.

Runs in the child; standard library only.
"""

from __future__ import annotations

from typing import Any

from rlvr.sandbox.plan import make_plan
from rlvr.sandbox.remote import BadTest


def run(setup: None, item: dict[str, Any]) -> str:
    """The fault of the tests, and which test; "" if there is none.

    The item is {tests, imports, setup, entry_point, answer_names, self_reports}. The test named is the last one of the
    fewest first ones that have the fault.
    """
    tests = tuple(item["tests"])
    fault = find_fault(tests, item)
    if not fault or fault.startswith("tests[") or find_fault((), item) == fault:
        return fault
    first = next(count for count in range(1, len(tests) + 1) if find_fault(tests[:count], item) == fault)
    return f"tests[{first - 1}]: {fault}"


def find_fault(tests: tuple[str, ...], item: dict[str, Any]) -> str:
    try:
        names = tuple(item["answer_names"])
        accepts = item["self_reports"]
        make_plan(tests, tuple(item["imports"]), item["setup"], item["entry_point"], names, accepts)
    except BadTest as error:
        return str(error)
    return ""
