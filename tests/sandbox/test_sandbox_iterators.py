"""Iterators of a test that an answer gets: it draws from them as in plain Python, and the test goes on from there."""

from __future__ import annotations

import pytest

from tests.kit.sandbox_pair import rows
from tests.kit.slow_cases import mark_slow_but

RIGHT = """
def f(x): return x + 1
def total(xs): return sum(xs)
def take(xs, n): return [next(xs) for _ in range(n)]
class Stream:
    def __init__(self, it): self.it = it
    def get(self, d=None): return next(self.it, d)
    def __iter__(self): return self.it
def lazy(it):
    for x in it: yield x * 2
def feed(g):
    next(g)
    return [g.send(i) for i in range(3)]
"""
WRONG = RIGHT
for old, new in (
    ("x * 2", "x * 3"), ("x + 1", "x"), ("next(xs)", "(next(xs), next(xs))[1]"), ("sum(xs)", "sum(xs) + 1"),
    ("next(self.it, d)", "str(next(self.it, d)) * 2"), ("send(i)", "send(0)"),
):  # fmt: skip
    assert old in RIGHT
    WRONG = WRONG.replace(old, new)
TESTS = {
    "genexp rest": "g1 = (x * x for x in range(4))\nassert take(g1, 2) == [0, 1]\nassert list(g1) == [4, 9]",
    "iter next": "it = iter([1, 2, 3])\nassert take(it, 2) == [1, 2]\nassert next(it) == 3",
    "count": "import itertools\nc = itertools.count(5)\nassert take(c, 2) == [5, 6]\nassert next(c) == 7",
    "infinite both": "def nat():\n"
    "    n = 0\n"
    "    while True:\n"
    "        yield n\n"
    "        n += 1\n"
    "for i, n in zip(range(3), nat()):\n"
    "    assert f(n) == i + 1\n"
    "assert take(nat(), 3) == [0, 1, 2]",
    "both partial": "def gen():\n"
    "    yield from [1, 2, 3]\n"
    "for x in gen():\n"
    "    assert f(x) == x + 1\n"
    "g1 = gen()\n"
    "assert take(g1, 1) == [1]\n"
    "assert [y for y in g1] == [2, 3]",
    "side effects": "log = []\n"
    "def gen():\n"
    "    for i in range(3):\n"
    "        log.append(i)\n"
    "        yield i\n"
    "g1 = gen()\n"
    "assert log == []\n"
    "assert take(g1, 1) == [0] and log == [0]\n"
    "assert total(g1) == 3 and log == [0, 1, 2]",
    "lazy": "drawn = []\n"
    "def src():\n"
    "    for i in range(5):\n"
    "        drawn.append(i)\n"
    "        yield i\n"
    "out = lazy(src())\n"
    "assert drawn == []\n"
    "assert next(out) == 0\n"
    "assert drawn == [0]\n"
    "assert next(out) == 2",
    "lazy map": "drawn = []\n"
    "out = lazy(map(lambda v: drawn.append(v) or v, [1, 2, 3]))\n"
    "assert next(out) == 2 and drawn == [1]",
    "stream": "s = Stream(iter('abc'))\nassert s.get() == 'a'\nassert list(s) == ['b', 'c']",
    "tee": "import itertools\n"
    "a, b = itertools.tee([1, 2, 3])\n"
    "assert take(a, 1) == [1]\n"
    "assert list(a) == [2, 3] and total(b) == 6",
    "send": "def acc():\n"
    "    total = 0\n"
    "    while True:\n"
    "        total += (yield total) or 0\n"
    "assert feed(acc()) == [0, 1, 3]",
    "send looped": "def acc():\n"
    "    t = 0\n"
    "    while True:\n"
    "        v = yield t\n"
    "        t += v or 0\n"
    "for v, _ in zip(acc(), range(1)): pass\n"
    "assert feed(acc()) == [0, 1, 3]",
    "file lines": "import io\nassert total(int(x) for x in io.StringIO('1\\n2\\n')) == 3",
    "reversed": "r = reversed([1, 2, 3])\nassert take(r, 1) == [3] and next(r) == 2",
    "enumerate": "e = enumerate('ab')\nassert take(e, 1) == [(0, 'a')] and list(e) == [(1, 'b')]",
    "dictiter": "d = {'a': 1}\nassert take(iter(d.items()), 1) == [('a', 1)]",
    "in list": "its = [iter([1, 2]), iter([3, 4])]\nassert take(its[1], 1) == [3] and next(its[1]) == 4",
}


@pytest.mark.parametrize("name", mark_slow_but(5, TESTS))
def test_answer_draws_from_an_iterator_of_the_test(name: str) -> None:
    assert rows(RIGHT, [TESTS[name]]) == [(True, "")]
    assert rows(WRONG, [TESTS[name]])[0][0] is False


def test_exception_of_a_generator_passes_through_the_answer() -> None:
    test = "def gen():\n  yield 1\n  raise KeyError('x')\ntry: total(gen())\n"
    test += "except KeyError as e: assert e.args == ('x',)\nelse: assert False"
    assert rows(RIGHT, [test]) == [(True, "")]
    assert rows("def total(xs): return next(xs)", [test]) == [(False, "assertion")]


def test_iterator_that_comes_back_is_the_same_one() -> None:
    test = "it = iter([1, 2])\nassert f(it) is it and next(it) == 1"
    assert rows("def f(it): return it", [test]) == [(True, "")]
    assert rows("def f(it): return iter([1, 2])", [test]) == [(False, "assertion")]


def test_two_places_share_one_iterator() -> None:
    test = "it = iter(range(4))\nassert f(it, it) == [(0, 1), (2, 3)]"
    assert rows("def f(a, b): return list(zip(a, b))", [test]) == [(True, "")]
    assert rows("def f(a, b): return list(zip(list(a), list(b)))", [test]) == [(False, "assertion")]
