"""Classes of a setup run where the answer does: it gets what they make, and is held to nothing that they say."""

from __future__ import annotations

import ast
import gc

import pytest

from rlvr.sandbox.setup_parts import parse_beside_threads
from tests.kit.sandbox_pair import judge, rows
from tests.kit.slow_cases import mark_slow_but

REF = "class Ref:\n x = 5\n def ok(s, a, b=5): return a == b\n def want(s, n): return n + 4"
FAKE = "import builtins\nclass R:\n x = 0\n def ok(s, *a): return True\n def want(s, n): return 0\n"
FAKE += "builtins.__build_class__ = lambda *a, **k: R\ndef f(n): return 0\ndef g(xs): return [0]"


@pytest.mark.parametrize(
    "test",
    mark_slow_but(5, [
        "r = Ref()\nwanted = r.want(1)\nassert f(1) == wanted", "for n in [1]: assert f(n) == Ref().want(n)",
        "assert Ref().ok(f(1))", "c = Ref()\nassert c.ok(f(1)) and True", "assert f(1) in [Ref.x]",
        "assert abs(f(1) - Ref.x) < 1e-6", "if not Ref().ok(f(1)): raise ValueError", "Ref().ok(f(1))",
        "assert g([1]).count(Ref.x) == 1", "v = g([1])\nassert v.index(Ref.x) == 0", "assert getattr(Ref, 'x') == f(1)",
        "xs = [3]\ng(xs)\nassert Ref().ok(xs)", "def same(a): return a == Ref.x\nassert same(f(1))",
        "assert all(a == b.x for a, b in zip(g([1]), [Ref()]))", "with Ref() as r: assert f(1) == r.x",
        "def check(c):\n r = Ref()\n assert c(1) == r.x", "assert (lambda r: f(1) == r.x)(Ref())",
    ]),
)  # fmt: skip
def test_a_class_of_the_setup_which_runs_with_the_answer_judges_nothing(test: str) -> None:
    entry_point = "f" if "check" in test else None
    assert judge(FAKE, [test], setup=REF, entry_point=entry_point)["invalid"] == "bad_test"


LINKED = (
    "class Node:\n def __init__(s, v, n=None): s.v, s.n = v, n\n"
    "def build(xs):\n head = None\n for x in reversed(xs): head = Node(x, head)\n return head\n"
    "def listed(n):\n out = []\n while n: out.append(n.v); n = n.n\n return out\n"
)
FLIP = "def flip(h):\n p = None\n while h: h.n, p, h = p, h, h.n\n return p\n"
FLIP += "class Solution:\n def flip(s, h): return flip(h)\n def reverse(s, h): return flip(h)\n"


@pytest.mark.parametrize(
    "test",
    [
        "assert listed(flip(build([1, 2]))) == [2, 1]", "a = build([1, 2])\nb = flip(a)\nassert listed(b) == [2, 1]",
        "for xs in ([1], [1, 2]): assert listed(flip(build(xs))) == xs[::-1]",
        "r = flip(Node(1, Node(2)))\nassert r.v == 2 and r.n.v == 1 and r.n.n is None",
        "for head, want in [(build([1, 2]), [2, 1])]: assert listed(flip(head)) == want",
        "for head, want in CASES: assert listed(flip(head)) == want",
        "s = Solution()\nassert listed(s.flip(build([1]))) == [1]",
        "assert listed(Solution().reverse(build([4]))) == [4]",
        "def make(*xs): return build(xs)\nassert listed(flip(make(1, 2))) == [2, 1]",
        "root = Node(5)\nflip(root)\nassert root.v == 5", "r = flip(Node(1))\nassert isinstance(r, Node) and r.v == 1",
    ],
)  # fmt: skip
def test_objects_of_setup_classes_can_be_passed_to_the_answer(test: str) -> None:
    assert rows(FLIP, [test], setup=LINKED + "CASES = [(build([1, 2]), [2, 1])]") == [(True, "")]


@pytest.mark.parametrize(
    "test", ["assert twice(lift, 3) == 5", "assert twice(abs, -3) == 3", "for n in [3]: assert twice(abs, n) == n"]
)
def test_a_function_of_the_setup_that_only_calculates_may_be_passed_to_the_answer_or_left_alone(test: str) -> None:
    assert rows("def twice(f, x):\n return f(f(x))", [test], setup="def lift(x):\n return x + 1") == [(True, "")]


def test_python_is_parsed_although_another_parse_comes_between() -> None:
    """Some versions of CPython then raise SystemError. The other parse is in a callback of the garbage collector."""
    text = "\n".join(f"def f{i}(x):\n return [((x + {i}) * 2 - 3) ** 2]" for i in range(400))
    left = [3]

    def parse_another(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and left[0]:
            left[0] -= 1
            ast.parse("x + 1")

    gc.callbacks.append(parse_another)
    try:
        tree = parse_beside_threads(text)
    finally:
        gc.callbacks.remove(parse_another)
    assert left == [0] and len(tree.body) == 400
