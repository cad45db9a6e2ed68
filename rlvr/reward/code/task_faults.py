"""What is wrong with the tests of a programming problem, found before a model is asked to solve it.

    find_test_fault(CodeProblem(["assert f(1) =="]))     # "the test does not parse: invalid syntax (<test>, line 1)"

The tests may come from anywhere, so they are read in a guarded worker. Exercised by tests/test_code_task_faults.py.
"""

from __future__ import annotations

from functools import cache

from rlvr.reward.code.formats import CodeProblem
from rlvr.sandbox import Worker

SECONDS = 5.0


def find_test_fault(problem: CodeProblem) -> str:
    """Why no answer could be judged by these tests; "" as far as that shows without one. Blocks for milliseconds."""
    if problem.is_program:
        return ""
    item = {key: getattr(problem, key) for key in ("tests", "imports", "setup", "entry_point")}
    item["answer_names"] = sorted(problem.defined_names)
    (reply,) = _reader().map(None, [item], SECONDS)
    if reply.failure == "not_started":  # the machine's fault: the sandbox will say it of the first answer
        return ""
    return f"the tests cannot be read ({reply.failure}): {reply.detail}" if reply.failure else str(reply.value)


@cache
def _reader() -> Worker:
    return Worker("rlvr.sandbox.plan_check")
