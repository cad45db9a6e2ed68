"""What is wrong with the tests of a programming problem, found before a model is asked to solve it.

    find_test_fault(CodeProblem(["assert f(1) =="]))     # "tests[0] does not parse: invalid syntax (<test>, line 1)"

The tests may come from anywhere, so they are read in a guarded worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from rlvr.reward.code.formats import CodeProblem
from rlvr.sandbox import Worker, WorkerReply

SECONDS = 5.0


def find_test_fault(problem: CodeProblem, self_reports: bool = False) -> str:
    """Why no answer could be judged by these tests; "" as far as that shows without one. Blocks for milliseconds."""
    return find_test_faults([problem], self_reports)[0]


def find_test_faults(problems: Sequence[CodeProblem], self_reports: bool = False) -> list[str]:
    """`find_test_fault` of each, in 2 ms of processor time a problem.

    `self_reports`: whether tests that only ask the answer about itself are accepted, as by the reward's option.
    """
    items = [
        {key: getattr(problem, key) for key in ("tests", "imports", "setup", "entry_point")}
        | {"answer_names": sorted(problem.defined_names), "self_reports": self_reports}
        for problem in problems
        if not problem.is_program
    ]
    replies = iter(_reader().map(None, items, SECONDS) if items else ())
    return ["" if problem.is_program else _explain(next(replies)) for problem in problems]


def refuse_test_faults(problems: Sequence[tuple[str, CodeProblem]], source: str) -> None:
    """Raise ValueError for problems (where it stands, problem) whose tests can judge no answer.

    Tests that only ask the answer about itself pass: whether they are accepted is an option of the reward.
    """
    faults = find_test_faults([problem for _, problem in problems], self_reports=True)
    bad = [(where, fault) for (where, _), fault in zip(problems, faults, strict=True) if fault]
    if bad:
        others = [where for where, _ in bad[1:]]
        rest = (
            f" (and {', '.join(others[:10])}{f' and {len(others) - 10} more' if others[10:] else ''})" if others else ""
        )
        raise ValueError(f"{source}: {bad[0][0]}{rest}: {bad[0][1]}; correct the tests, or leave these rows out")


def _explain(reply: WorkerReply) -> str:
    if reply.failure == "not_started":  # the machine's fault: the sandbox will say it of the first answer
        return ""
    return f"the tests cannot be read ({reply.failure}): {reply.detail}" if reply.failure else str(reply.value)


@cache
def _reader() -> Worker:
    return Worker("rlvr.sandbox.plan_check")
