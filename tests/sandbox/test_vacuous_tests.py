"""Tests that check nothing are refused whatever the answer is; tests that can fail are not: `rlvr.sandbox`."""

from __future__ import annotations

import pytest

from rlvr.core.types import Outcome
from rlvr.reward.code import CodeProblem
from rlvr.reward.code.task_faults import find_test_fault
from rlvr.sandbox import Sandbox
from rlvr.sandbox.checker import is_same_output
from rlvr.sandbox.plan import make_plan
from rlvr.sandbox.remote import BadTest

CASE = "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(2), 3)\n"
VACUOUS = [
    'assert (f(2) == 99, "x")',
    "try:\n  assert f(2)==3\nexcept Exception:\n  pass",
    "assert f(2) or True",
    "assert f",
    "assert f(2) == f(2)",
    "assert True or f(2)",
    "assert not False",
    "if False:\n  assert f(2)==3",
    "f(2)",
    "x = f(2)",
    "assert isinstance(f(1), object)",
    "f(2) == 3",
    "import contextlib\nwith contextlib.suppress(AssertionError):\n  assert f(2)==3",
    "try:\n assert f(2)==3\nexcept: pass",
    "assert lambda: f(2)==3",
    "assert f(1) != object()",
    "def test_f():\n  assert f(2)==3\nf(1)",
    "def test_f():\n  assert f(2)==3\nprint(globals())\nf(1)",
    "def g():\n  return\n  assert f(2)==3\ng()",
    "async def t():\n  assert f(2)==3\nt()",
    "for x in []:\n  assert f(x)==3",
    "cases=[]\nfor x in cases:\n  assert f(x)==3\nf(1)",
    'if __name__ == "main":\n  assert f(2)==3',
    "assert f(2)==3 or f(2)!=3",
    "assert not f(2)==3 or f(2)==3",
    'assert f"{f(2)}=="',
    "assert [f(2)==3]",
    "assert {f(2): 1}",
    "assert all(f(x) == 2 for x in [])",
    "assert f is not None",
    "assert callable(f) and isinstance(f(1), (int, object))",
    "assert len(f(2)) >= 0",
    "assert (f(2)==3) is not None",
    CASE + "unittest.main(exit=False)",
    CASE + "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    'try:\n  assert f(2)==3\nexcept AssertionError as e:\n  print("failed", e)',
    "ok = True\nf(2)\nassert ok",
    "f(2)\nassert 1 + 1 == 2",
    "assert not print(f(2))",
    "assert print(f(2)) is None",
    "assert type(f(2))",
    "assert f(2) in [f(2)]",
    "assert bool([f(2)])",
    "assert True if f(2) else True",
    "with open('x') as h:\n  f(2)",
    "assert (r := True)",
    "assert f(2) == 3 or 'wrong'",
    "import threading\ndef t():\n  assert f(2)==3\nthreading.Thread(target=t).start()",
    "def g():\n  yield\n  assert f(2)==3\ng()",
    "while False:\n  assert f(2)==3",
    "assert set([f(2)]) or True",
    "assert ...",
    "assert f(2) == f(2) == f(2)",
    "assert not f(2) != f(2)",
    "assert not (f(2) == 3 and f(2) != 3)",
    "assert str(f(2)) == str(f(2))",
    "assert f(2) == 4 if False else True",
]
CHECKING = [
    CASE + 'T("test").debug()',
    "def t():\n try:\n  assert f(2)==3\n  return True\n except AssertionError:\n  return False\nassert t()",
    "bad=[]\ntry:\n  assert f(2)==3\nexcept AssertionError as e:\n  bad.append(e)\nassert not bad",
    "for i in range(3):\n  if f(i) != i: raise AssertionError",
    "try:\n  f(-1)\n  assert False\nexcept ValueError:\n  pass",
    "assert is_sorted(f([2,1])) and is_sorted([1,2])",
    "assert f(2) == 3 if True else True",
    "x = f(2)\nassert x == x",
    "import math\nassert math.isclose(f(2), 1.5)",
    "assert P(1) == P(1)",
    "assert f(2)",
    "assert not f(2)",
    "assert f(2) is True",
    "assert f(2) is None",
    "c = Counter()\nc.inc()\nassert c.value == 1",
    "s = Stack()\ns.push(1)\nassert s.pop() == 1",
    "assert is_prime(7)",
    "assert not is_prime(8)",
    "assert fib(10) == fib_memo(10) == 55",
    "for x, y in [(1,2)]:\n  assert f(x) == y",
    "cases = []\ncases.append((1,2))\nfor x,y in cases:\n  assert f(x)==y",
    "def check(candidate):\n  assert True, 'ok'\n  assert candidate(1) == 2\ncheck(f)",
    "try:\n  f(-1)\nexcept ValueError:\n  pass\nelse:\n  raise AssertionError('no error')",
    "raised = False\ntry:\n  f(-1)\nexcept ValueError:\n  raised = True\nassert raised",
    "try:\n  assert f(2)==3\nexcept AssertionError:\n  raise\nexcept Exception:\n  pass",
    "def t(x):\n  assert f(x)==3\nlist(map(t, [1,2]))",
    "assert sum(10,15) == 6",
    "assert f(2) == 3, 'no'",
    "assert all(f(x) == x for x in range(3))",
    "import sys\nif f(2) != 3:\n  sys.exit(1)",
    "assert len(f(2)) == 0",
    "assert len(f(2)) >= 1",
    "assert (f(2) == 3) is True",
    "assert decode(encode('x')) == 'x'",
    "assert f(2) != f(3)",
    "assert f([1]) == sorted([1])",
    "assert A().b().c == 3",
    "assert abs(f(2) - 3) < 1e-6",
    "assert f(2) in (1, 2)",
    "assert set(f(2)) == {1}",
    "try:\n  assert f(2)==3\nexcept (ValueError, TypeError):\n  pass",
    CASE + "unittest.main()",
    "def near(a, b):\n  return abs(a-b) < 1e-6\nassert near(f(2), 3)",
    "assert f(2)*0 == 0",
    "assert f(2), f(2) == 3",
    "assert f.__name__ == 'f'",
    "try:\n  assert f(2)==3\nfinally:\n  for x in [1]:\n    break",
]
JUDGES = [
    "assert np.allclose(f(2),4)",
    "assert is_ok(f(2))",
    "with pytest.raises(ValueError):\n  f(2)",
    'assert Counter(f(2)) == Counter("ab")',
    "assert f(3) == approx(3)",
    "check_equal(f(2), 3)",
    "class T(unittest.TestCase):\n  pass\nassert f(2)==3",
    "r = f(2)\nassert is_close(r, 3)",
    "t=unittest.TestCase()\nt.assertEqual(f(3),4217)",
]


def plan(*tests: str, **given: object) -> None:
    names: tuple[str, ...] = given.get("answer_names", ())  # type: ignore[assignment]
    make_plan(tests, (), "", None, names)


@pytest.mark.parametrize("test", VACUOUS)
def test_a_test_that_checks_nothing_is_refused(test: str) -> None:
    with pytest.raises(BadTest, match=r"passes for every answer|check nothing|compare no result"):
        plan(test)


@pytest.mark.parametrize("test", CHECKING)
def test_a_test_that_can_fail_is_accepted(test: str) -> None:
    plan(test)


@pytest.mark.parametrize("test", JUDGES)
def test_a_judge_or_a_library_that_the_test_does_not_define_is_its_own_fault(test: str) -> None:
    with pytest.raises(BadTest, match="neither it nor its setup"):
        plan(test)


def test_the_task_may_say_which_names_answers_define() -> None:
    plan("assert is_empty(new())", answer_names=("new", "is_empty"))
    with pytest.raises(BadTest, match="is_empty"):
        plan("assert is_empty(new())", answer_names=("new",))
    test = "assert area(square(3)) == 9"
    assert find_test_fault(CodeProblem([test])) == ""
    assert "area" in find_test_fault(CodeProblem([test], solution="def square(x): return x"))
    assert find_test_fault(CodeProblem([test], solution="def square(x): return x", answer_names=["area"])) == ""
    assert find_test_fault(CodeProblem.of({"tests": ["assert ok(f(1))"], "answer_names": ["ok", "f"]})) == ""


def test_one_vacuous_test_among_others_is_refused_and_a_vacuous_assert_beside_others_is_not() -> None:
    with pytest.raises(BadTest, match=r"tests\[1\]"):
        plan("assert f(1) == 2", "assert True")
    plan("def check(c):\n  assert True\n  assert c(1) == 2\ncheck(f)")
    plan("s = Stack()", "s.push(1)", "assert s.pop() == 1")


@pytest.mark.parametrize(
    "answer", ["def f(x): return 4", "class np:\n  allclose = staticmethod(lambda *a: True)\ndef f(x): 0"]
)
@pytest.mark.parametrize("test", ["assert (f(2) == 4, 'x')", "assert np.allclose(f(2), 4)", "assert f"])
def test_the_verdict_is_invalid_whatever_the_answer_is(answer: str, test: str) -> None:
    with Sandbox(workers=1) as sandbox:
        verdict = sandbox.verify(answer, [test])
    assert (verdict.outcome, verdict.reason) == (Outcome.INVALID, "bad_test")


def test_with_a_tolerance_integers_are_exact_and_only_plain_digits_are_numbers() -> None:
    """2**53 + 1 is no float: as floats both are 9007199254740992."""
    assert not is_same_output("9007199254740993", "9007199254740992", 0.5)
    assert is_same_output("9007199254740993", "9007199254740992", 1)
    assert is_same_output("1.0000001 -3", "1 -3.0", 1e-6) and is_same_output("1e2", "100", 0)
    for text in ("1_00", "\uff11\uff10\uff10", "\u0661\u0660\u0660", "nan", "inf", "1e999"):
        assert not is_same_output(text, "100", 1e300)
