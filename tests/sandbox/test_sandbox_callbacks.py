"""Functions and objects of the answer that a test gives to functions of the standard library."""

from __future__ import annotations

import pytest

from tests.kit.sandbox_pair import judge
from tests.kit.slow_cases import mark_slow_but

ANSWER = """
class Num:
    def __init__(self, v): self.v = v
    def __sub__(self, o): return Num(self.v - o.v)
    def __abs__(self): return Num(abs(self.v))
    def __round__(self, n=None): return round(self.v, n)
    def __eq__(self, o): return self.v == (o.v if isinstance(o, Num) else o)
    def __hash__(self): return hash(self.v)
    def __len__(self): return self.v
    def __getitem__(self, key): return f"{key}{self.v}"
def size(word): return len(word)
def double(match): return str(int(match.group()) * 2)
def place(match): return match.start(), match.end()
def encode(value): return sorted(value)
def is_small(n): return n < 10
"""
ITSELF = """
class Num:
    def __init__(self, *args): pass
    def itself(self, *args): return self
    def yes(self, *args): return True
    __sub__ = __abs__ = __round__ = __getitem__ = __call__ = itself
    __eq__ = __bool__ = yes
    def __hash__(self): return 1
    def __len__(self): return 3
size = double = place = encode = is_small = Num()
"""
TESTS = [
    "from functools import lru_cache\ncalls = []\n@lru_cache\ndef value(x):\n  calls.append(x)\n  return x.v\n"
    "assert [value(Num(3)), value(Num(3)), value(Num(4))] == [3, 3, 4] and len(calls) == 2",
    "import unittest\nclass T(unittest.TestCase):\n  def test_x(self):\n"
    "    self.assertAlmostEqual(Num(1), Num(1.00000001))\n"
    "    self.assertNotAlmostEqual(Num(1), Num(1.5))\nT('test_x').debug()",
    "import re\nassert re.sub('[0-9]+', double, 'a1 b22') == 'a2 b44'",
    "import re\nassert re.compile('[0-9]+').sub(double, 'x5 6', count=1) == 'x10 6'",
    "import re\nassert [place(m) for m in re.finditer('(?<=a)b|ab$', 'cabab')] == [(2, 3), (3, 5)]",
    "import heapq\nassert list(heapq.merge(['a', 'ccc'], ['bb'], key=size)) == ['a', 'bb', 'ccc']",
    "import bisect\nwords = ['a', 'bb', 'dddd']\nassert bisect.bisect(words, 2, key=size) == 2\n"
    "bisect.insort(words, 'ccc', key=size)\nassert words == ['a', 'bb', 'ccc', 'dddd']",
    "from itertools import filterfalse\nassert list(filterfalse(is_small, [1, 12])) == [12]",
    "import json\nassert json.dumps({'a': {3, 1}}, default=encode) == '{\"a\": [1, 3]}'",
    "from string import Template\nassert Template('$a-$b').substitute(Num(7)) == 'a7-b7'",
    "import random\nx = Num(4)\nassert random.Random(0).choice(x) in ('04', '14', '24', '34')",
    "from functools import singledispatch\n@singledispatch\ndef kind(x): return 'other'\n@kind.register\n"
    "def _(x: Num): return x.v\nassert kind(Num(3)) == 3 and kind('a') == 'other'",
]


@pytest.mark.parametrize("test", mark_slow_but(4, TESTS))
def test_a_right_answer_passes_and_one_without_work_does_not(test: str) -> None:
    assert judge(ANSWER, [test])["tests"] == [[True, "", ""]]
    got = judge(ITSELF, [test])
    assert got["invalid"] == "" and got["tests"][0][0] is False


@pytest.mark.parametrize("args", ["junk, text(), 'expected'", "None, TEXT, 'expected'"])
def test_a_function_that_judges_does_not_run_beside_the_answer(args: str) -> None:
    patch = "import difflib\ndifflib.SequenceMatcher.ratio = lambda self: 1.0\ndef text(): return 'wrong'\n"
    liar = patch + "class Junk:\n  def __call__(self, c): return False\njunk = TEXT = Junk()\n"
    right = "def junk(c): return False\ndef text(): return 'expected'\nTEXT = 'expected'\n"
    test = f"import difflib\nassert difflib.SequenceMatcher({args}).ratio() == 1.0"
    assert judge(right, [test])["tests"] == [[True, "", ""]]
    assert judge(liar, [test])["tests"][0][0] is False
