"""A value that a test only compares with never reaches the answer's process, however the test is written."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.kit.sandbox_pair import judge
from tests.kit.slow_cases import mark_slow_but

THIEF = """
import gc
def find():
    for one in gc.get_objects():
        if type(one) is list and 9913 in one and len(one) < 5:
            return list(one)
        if type(one) is tuple and len(one) < 5:
            for part in one:
                if type(part) is list and 9913 in part:
                    return list(part)
    return [0]
def f(n): return find()
def g(n): return find()
"""
HONEST = "def f(n): return [n, 9913]\ndef g(n): return [n, 9913]\n"
FORMS = [
    "def same(a, b):\n  assert a == b\nwant = [7, 9913]\nsame(f(7), want)",
    "import unittest\n"
    "class T(unittest.TestCase):\n"
    "  def test_a(self):\n"
    "    want = [7, 9913]\n"
    "    self.assertEqual(f(7), want)\n"
    "    self.assertCountEqual(f(7), want)\n"
    "T('test_a').debug()",
    "for got, want in [(f(7), [7, 9913]), (g(7), [7, 9913])]: assert got == want",
    "want = [7, 9913]\nr = f(7)\nassert r == want",
    "cases = [(7, [7, 9913])]\nfor a, want in cases:\n  r = f(a)\n  assert r == want",
    "results = []\nfor want in [[7, 9913]]:\n  results.append((f(7), want))\nassert all(a == b for a, b in results)",
    "table = {'x': [7, 9913]}\nfor k, want in table.items():\n  assert f(7) == want",
    "want = [7, 9913]\nassert [f(7), g(7)] == [want, want]",
    "want = [7, 9913]\nassert sorted(f(7)) == sorted(want) and len(f(7)) == len(want)",
    "want = [7, 9913]\nassert all(x == y for x, y in zip(f(7), want))\nassert len(f(7)) == 2",
    "want = [7, 9913]\ngot = f(7)\ngot.sort()\nassert got == want",
    "def check(c):\n  want = [7, 9913]\n  got = c(7)\n  assert got == want",
    "got, want = f(7), [7, 9913]\nassert got == want",
    "want = [7, 9913]\nassert (f(7), want)[0] == want",
    "pairs = {7: [7, 9913]}\nassert {k: f(k) for k in pairs} == pairs",
    "want = [[7, 9913]]\nassert list(map(f, [7])) == want",
    "from collections import Counter\nwant = [7, 9913]\nassert Counter(f(7)) == Counter(want)",
    "want = [7, 9913]\nassert set(f(7)) ^ set(want) == set()\nassert set(f(7)) - set(want) == set()",
    "class Case:\n"
    "  def __init__(self, a, want): self.a, self.want = a, want\n"
    "for case in [Case(7, [7, 9913])]: assert f(case.a) == case.want",
    "want = [7, 9913]\nwith open('/dev/null') as s: assert f(7) == want",
    "import json\nwant = json.loads('[7, 9913]')\nassert f(7) == want",
    "from collections import namedtuple\n"
    "Case = namedtuple('Case', 'a want')\n"
    "for case in [Case(7, [7, 9913])]: assert f(case.a) == case.want",
    "from dataclasses import dataclass\n"
    "@dataclass\n"
    "class Case:\n"
    "  a: int\n"
    "  want: list\n"
    "for case in [Case(7, [7, 9913])]: assert f(case.a) == case.want",
    "import threading\n"
    "results, cases = [], [(7, [7, 9913])]\n"
    "def run(n, want): results.append((f(n), want))\n"
    "threads = [threading.Thread(target=run, args=case) for case in cases]\n"
    "for one in threads: one.start()\n"
    "for one in threads: one.join()\n"
    "assert results[0][0] == results[0][1]",
    "from concurrent.futures import ThreadPoolExecutor\n"
    "cases = [(7, [7, 9913])]\n"
    "def run(case):\n"
    "  assert f(case[0]) == case[1]\n"
    "  return True\n"
    "with ThreadPoolExecutor(2) as pool:\n"
    "  assert list(pool.map(run, cases)) == [True]\n"
    "  assert pool.submit(run, cases[0]).result() is True",
    "want = [7, 9913]\nmatch f(7):\n  case got if got == want: pass\n  case _: assert False",
    "want = [7, 9913]\nmatch f(7):\n  case [7, n]: assert [7, n] == want\n  case _: assert False",
    "import asyncio\n"
    "want = [7, 9913]\n"
    "async def call(n): return f(n)\n"
    "async def main(): assert await call(7) == want\n"
    "asyncio.run(main())",
    "import asyncio\n"
    "want = [7, 9913]\n"
    "async def main(): assert await asyncio.gather(asyncio.to_thread(f, 7)) == [want]\n"
    "asyncio.run(main())",
    "import random\nwant = [7, 9913]\nrandom.Random(3).shuffle(want)\nassert sorted(f(7)) == sorted(want)",
    "import random\nwant = [7, 9913]\nrandom.seed(1)\nrandom.shuffle(want)\nassert sorted(f(7)) == sorted(want)",
    "data, want = [1], [7, 9913]\nf(data)\ndata.extend(want)\nassert f(7) == want",
    "from unittest.mock import Mock\nm, want = Mock(), [7, 9913]\nm(f(7))\nm.assert_called_with(want)",
    "import warnings\nwant = [7, 9913]\nwith warnings.catch_warnings(): assert f(7) == want",
    "import pickle\nwant = pickle.loads(pickle.dumps([7, 9913]))\nassert f(7) == want",
    "want = eval('[7, 9913]')\nassert f(7) == want",
]


@pytest.mark.parametrize("test", mark_slow_but(6, FORMS))
def test_an_answer_that_searches_its_process_finds_no_expected_value(test: str) -> None:
    given: dict[str, Any] = {"entry_point": "f"} if "def check" in test else {}
    assert judge(HONEST, [test], **given)["tests"][0] == [True, "", ""]
    gc.collect()  # the answer runs in a fork of this process, which has just judged the same test
    assert judge(THIEF, [test], **given)["tests"][0][:2] == [False, "assertion"]


# Coroutines that return what they got beside what is expected, which must not be beside the answer.
COROUTINES = [
    "import asyncio\nasync def case(x, want): return await g(x), want\n"
    "for got, want in [asyncio.run(case(2, 4)), asyncio.run(case(3, 6))]: assert got == want",
    "import asyncio\nasync def main():\n  got = await g(2)\n  return got, 4\n"
    "got, want = asyncio.run(main())\nassert got == want",
    "import asyncio\nasync def main(): return (await g(2), 4)\nr = asyncio.run(main())\nassert r[0] == r[1]",
    "import asyncio\nasync def main(): return [(await g(i), i * 2) for i in range(3)]\n"
    "assert all(a == b for a, b in asyncio.run(main()))",
    "import asyncio\nasync def main():\n  got = await asyncio.gather(g(1), g(2))\n  return got, [2, 4]\n"
    "got, want = asyncio.run(main())\nassert got == want",
    "import asyncio\nasync def main():\n  want = 4\n  return {'got': await g(2), 'want': want}\n"
    "r = asyncio.run(main())\nassert r['got'] == r['want']",
]
READERS = [
    "class L:\n  __eq__ = lambda s, o: True\n  __hash__ = lambda s: 1\nasync def g(x): return L()",
    "import sys\nasync def g(x):\n  f = sys._getframe(1)\n  while f:\n    if 'want' in f.f_locals:\n"
    "      return f.f_locals['want']\n    f = f.f_back",
    "import sys\nasync def g(x):\n  consts = sys._getframe(1).f_code.co_consts\n"
    "  return next((c for c in consts if isinstance(c, int) and c != x), None)",
]  # fmt: skip


@pytest.mark.parametrize("test", mark_slow_but(2, COROUTINES))
def test_a_coroutine_of_the_test_keeps_what_it_expects(test: str) -> None:
    assert judge("async def g(x): return x * 2", [test])["tests"] == [[True, "", ""]]
    for reader in READERS:
        assert judge(reader, [test])["tests"][0][0] is False
