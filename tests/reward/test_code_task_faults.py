"""Faults of tests that show without an answer: `rlvr.reward.code.task_faults`."""

from __future__ import annotations

import pytest

from rlvr.reward.code import CodeProblem
from rlvr.reward.code.task_faults import find_test_fault, refuse_test_faults


@pytest.mark.parametrize(
    "problem",
    [
        CodeProblem(["assert f(1) == 2", "assert f(2) == 3"]),
        CodeProblem([{"input": "1", "output": "2"}]),
        CodeProblem(["assert isclose(f(1), 2)"], setup="def g(x):\n    return x"),
        CodeProblem(["def check(candidate):\n    assert candidate(1) == 2"], entry_point="f"),
    ],
)
def test_a_good_test_has_no_fault(problem: CodeProblem):
    assert find_test_fault(problem) == ""


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (CodeProblem(["assert f(1) == 2", "assert f(1) =="]), "tests[1] does not parse"),
        (CodeProblem(["assert f(1) == 2", "assert f(3) or True"]), "tests[1] passes for every answer"),
        (CodeProblem(["assert f(1) == 2", "assert np.allclose(f(1), 2)"]), "tests[1]: the test uses 'np'"),
        (CodeProblem(["assert f(1) == 2"], setup="def g(:"), "does not parse"),
        (CodeProblem(["assert f(1) == 2"], imports=["import no_such"]), "standard library only"),
        (CodeProblem(["def check(candidate):\n    assert candidate(1) == 2"]), "entry_point"),
        (CodeProblem(["assert " + "(" * 50_000]), "does not parse"),
        (CodeProblem(["assert f(1) == " + "-" * 300_000 + "1"]), ""),  # whatever the parser says, it ends
    ],
)
def test_a_fault_is_named(problem: CodeProblem, words: str):
    fault = find_test_fault(problem)
    assert fault and words in fault
    assert find_test_fault(CodeProblem(["assert f(1) == 2"])) == ""  # the next one is read as ever


def test_tests_that_only_ask_the_answer_about_itself_are_the_rewards_to_accept():
    problem = CodeProblem(["assert callable(f(1))", "assert isinstance(f(2), A)"])
    assert "only ask the answer about itself (callable(f(1))): add" in find_test_fault(problem)
    assert find_test_fault(problem, self_reports=True) == ""
    refuse_test_faults([("a:1", problem)], "code")
    assert "always true" in find_test_fault(CodeProblem(["assert callable(f(1))", "assert f(1) or True"]), True)


def test_problems_are_refused_together_and_by_place():
    good, stdio = CodeProblem(["assert f(1) == 2"]), CodeProblem([{"input": "1", "output": "2"}])
    refuse_test_faults([("a:1", good), ("a:2", stdio)], "code")
    bad = [(f"a:{line}", CodeProblem(["assert f(1) == 2", "assert f or True"])) for line in range(3, 16)]
    with pytest.raises(
        ValueError, match=r"code: a:3 \(and a:4, .* and 2 more\): tests\[1\] passes .* leave these rows out"
    ):
        refuse_test_faults([("a:1", good), ("a:2", stdio), *bad], "code")
