"""Tests that are more than a comparison: a right answer passes and a nearly right one fails, over the channel."""

from __future__ import annotations

import pytest

from tests.kit.sandbox_pair import judge
from tests.kit.slow_cases import mark_slow_but

# what it is about, a right answer, (old, new) that makes it wrong, the test
CHECKS = [
    ("a loop", "def f(n): return n * n", ("n * n", "n + n"),
     "for n in range(9):\n  assert c(n) == n ** 2"),
    ("a table of cases", "def f(a, b): return max(a, b)", ("max", "min"),
     "for given, want in [((1, 2), 2), ((5, 3), 5), (('a', 'b'), 'b')]:\n  assert c(*given) == want, given"),
    ("a tolerance", "def f(r): return 3.14159265 * r * r", ("3.14159265", "3.2"),
     "import math\nfor r in (0.5, 1, 10):\n  assert math.isclose(c(r), math.pi * r ** 2, rel_tol=1e-6)"),
    ("a method of a builtin type as an argument", "def f(g, words): return [g(w) for w in words]", ("g(w)", "w"),
     "assert c(str.strip, [' a ', 'b']) == ['a', 'b']"),
    ("another tolerance", "def f(x): return x / 3", ("/ 3", "/ 4"), "assert abs(c(1.0) - 0.333333) < 1e-5"),
    ("an exception", "def f(x):\n  if x < 0: raise ValueError('negative')\n  return x", ("ValueError", "KeyError"),
     "try:\n  c(-1)\n  assert False\nexcept ValueError as e:\n  assert str(e) == 'negative'\nassert c(1) == 1"),
    ("an exception's own fields", "class E(Exception):\n  def __init__(s, code): s.code = code\ndef f(x): raise E(x)",
     ("code = code", "code = 0"), "try:\n  c(7)\n  assert False\nexcept E as e:\n  assert e.code == 7"),
    ("an exception of many arguments", "def f(b): return b.decode()", ("b.decode()", "b.decode('latin-1')"),
     "try:\n  c(b'\\xff')\n  assert False\nexcept UnicodeDecodeError as e:\n  assert e.start == 0"),
    ("a base class of it", "class E(LookupError): pass\ndef f(): raise E('x')", ("LookupError", "TypeError"),
     "try:\n  c()\n  assert False\nexcept LookupError:\n  pass"),
    ("strings", "def f(s): return s[::-1].upper()", ("upper", "lower"),
     "s = 'Grüße 🙂'\nassert c(s) == ''.join(reversed(s)).upper()\nassert c('ab').startswith('B') and len(c('')) == 0"),
    ("mutation in place", "def f(x): x.sort(); x.append({'n': len(x)})", ("x.append({'n': len(x)})", "return x"),
     "x = [3, 1, 2]\nassert c(x) is None\nassert x == [1, 2, 3, {'n': 3}]"),
    ("mutation of parts", "def f(g): g['a'][0].add(2)", ("add(2)", "add(3)"),
     "inner = {1}\ng = {'a': [inner]}\nc(g)\nassert inner == {1, 2} and g['a'][0] is inner"),
    ("a generator", "def f(n):\n  for i in range(n): yield i * i", ("i * i", "i"),
     "g = c(3)\nassert next(g) == 0 and next(g) == 1 and list(g) == [4]"),
    ("an endless generator", "def f():\n  n = 0\n  while True:\n    yield n\n    n += 2", ("+= 2", "+= 1"),
     "from itertools import islice\nassert list(islice(c(), 2000))[-1] == 3998"),
    ("a class", "class f:\n  def __init__(s): s.d = []\n  def push(s, x): s.d.append(x); return s\n"
     "  def __len__(s): return len(s.d)\n  def __getitem__(s, i): return s.d[i]", ("len(s.d)", "9"),
     "s = c()\ns.push(1).push(2)\nassert len(s) == 2 and s[1] == 2 and [v for v in s] == [1, 2] and s.d == [1, 2]"),
    ("a context", "class f:\n  def __init__(s): s.n = 0\n  def __iter__(s):\n    yield from range(s.n)", ("s.n)", "9)"),
     "x = c()\nx.n = 3\nassert list(x) == [0, 1, 2] and 2 in x"),
    ("nested functions", "def f(n):\n  def g(x): return x + n\n  return g", ("x + n", "n"),
     "add = c(2)\nassert add(3) == 5 and [add(i) for i in range(3)] == [2, 3, 4]"),
    ("a key for sorting", "def f(w): return (len(w), w)", ("(len(w), w)", "w"),
     "assert sorted(['bb', 'ab', 'c'], key=c) == ['c', 'ab', 'bb']"),
    ("a callback", "def f(g, xs): return [g(x) for x in xs if g(x)]", ("if g(x)", ""),
     "seen = []\ndef g(x):\n  seen.append(x)\n  return x % 2\nassert c(g, [1, 2]) == [1] and len(seen) == 3"),
    ("a callback that raises", "def f(g):\n  try: return g()\n  except KeyError: return 'caught'",
     ("KeyError", "OSError"),
     "def g(): raise KeyError('x')\nassert c(g) == 'caught'"),
    ("builtins as arguments", "def f(g, xs): return list(map(g, xs))", ("map", "filter"),
     "assert c(str, [1, 2]) == ['1', '2'] and c(len, ['', 'ab']) == [0, 2] and c(lambda v: -v, [1]) == [-1]"),
    ("types as values", "def f(x): return type(x)", ("type(x)", "x"), "assert c(3) == int and c('') is str"),
    ("state between calls", "n = 0\ndef f():\n  global n\n  n += 1\n  return n", ("n += 1", "n = 1"),
     "assert c() == 1\nassert c() == 2"),
    ("keyword arguments", "def f(a, *, b=2, **k): return a, b, k", ("a, b, k", "b, a, k"),
     "assert c(1, b=3, z=[1]) == (1, 3, {'z': [1]})"),
    ("a helper of the test", "def f(xs): return sorted(xs)", ("sorted(xs)", "xs"),
     "import random\ndef ok(xs): return all(a <= b for a, b in zip(xs, xs[1:]))\nr = random.Random(0)\n"
     "for _ in range(5):\n  xs = [r.randrange(9) for _ in range(6)]\n  assert ok(c(xs))"),
    ("a context manager", "class f:\n  def __enter__(s): return 5\n  def __exit__(s, *a): return True", ("5", "6"),
     "with c() as x:\n  assert x == 5"),
    ("an assertion in a callback", "def f(g):\n  try: g(3)\n  except BaseException: pass", ("g(3)", "g(4)"),
     "def g(x): assert x == 3\nc(g)"),
    ("two objects of one class", "class P:\n  def __init__(s, n): s.n = n\n  def __eq__(s, o): return s.n == o.n\n"
     "  def __mul__(s, k): return P(s.n * k)\ndef f(n): return P(n)", ("s.n * k", "k"), "assert c(2) * 3 == c(6)"),
    ("a match of classes", "class P:\n  __match_args__ = ('x', 'y')\n  def __init__(s, x, y): s.x, s.y = x, y\nf = P",
     ("s.x, s.y = x, y", "s.x, s.y = y, x"),
     "match c(3, 4):\n  case P(0, _): assert False\n  case P(x, y=4) if x == 3: got = x\n  case _: got = 0\n"
     "assert got == 3"),
    ("a match of data", "def f(s): return [*s.split(), {'n': len(s), 'k': 1}]", ("'n'", "'m'"),
     "match c('a b c'):\n  case ['x', *_] | []: got = 0\n  case ['a', *rest, {'n': 5, **more}]: got = (rest, more)\n"
     "  case _: got = 1\nassert got == (['b', 'c'], {'k': 1})"),
    ("a warning", "import warnings\ndef f(x):\n  warnings.warn('is old', DeprecationWarning)\n  return x",
     ("is old", "is new"), "import warnings\nwith warnings.catch_warnings(record=True) as w:\n"
     "  warnings.simplefilter('always')\n  assert c(4) == 4\n"
     "assert [(one.category.__name__, str(one.message)) for one in w] == [('DeprecationWarning', 'is old')]"),
    ("objects in a container of the test", "def f(d): d['g'] = lambda x: x + 1", ("x + 1", "x"),
     "d = {}\nc(d)\nassert d['g'](2) == 3"),
    ("text that is run", "def f(): return 'def g(x): return x + 1'", ("x + 1", "x"),
     "space = {}\nexec(c(), space)\nassert space['g'](2) == 3"),
    ("text that is evaluated", "class P:\n  def __init__(s, n): s.n = n\n  def __repr__(s): return f'P({s.n})'\nf = P",
     ("({s.n})", "(0)"), "assert eval(repr(c(3))).n == 3"),
    ("a generator of numbers", "def f(r): return r.random()", ("r.random()", "0.5"),
     "import random\na, b = random.Random(1), random.Random(1)\nassert c(a) == b.random() and c(a) == b.random()\n"
     "assert a.random() == b.random()"),
    ("threads of the test", "import queue\nclass f:\n  def __init__(s): s.q = queue.Queue(1)\n"
     "  def put(s, x): s.q.put(x)\n  def get(s): return s.q.get()", ("put(x)", "put(-x)"),
     "import threading\nq, out = c(), []\ndef give():\n  for i in range(4): q.put(i)\ndef take():\n"
     "  for i in range(4): out.append(q.get())\nts = [threading.Thread(target=g) for g in (give, take)]\n"
     "for t in ts: t.start()\nfor t in ts: t.join()\nassert out == [0, 1, 2, 3]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("solution", "change", "body"), mark_slow_but(8, [row[1:] for row in CHECKS]), ids=[row[0] for row in CHECKS]
)
def test_a_right_answer_passes_and_a_nearly_right_one_fails(solution: str, change: tuple[str, str], body: str) -> None:
    text = "def check(c):\n  " + body.replace("\n", "\n  ")
    wrong = solution.replace(*change)
    assert wrong != solution
    assert judge(solution, [text], entry_point="f")["tests"] == [[True, "", ""]]
    got = judge(wrong, text, entry_point="f")
    assert not got["tests"][0][0] and got["invalid"] == "" and got["path"] == "rpc"


@pytest.mark.parametrize(
    "given, body, returned",
    mark_slow_but(
        4,
        [
            ("['bb', 'a']", "w.sort(key=len); return w", "['a', 'bb']"),
            ("{'a': 1}", "w['b'] = 2; return w", "{'a': 1, 'b': 2}"),
            ("{1}", "w.add(2); return w", "{1, 2}"),
            ("bytearray(b'a')", "w.extend(b'b'); return w", "bytearray(b'ab')"),
            ("[[1]]", "w[0].append(2); return w[0]", "[1, 2]"),
            ("([1],)", "w[0].append(2); return w", "([1, 2],)"),
            ("([1],)", "w[0].append(2); return 1", "1"),
            ("{'k': ([1],)}", "w['k'][0].append(2); return w", "{'k': ([1, 2],)}"),
            ("array('i', [1])", "w.append(2); return w", "array('i', [1, 2])"),
            ("deque([1])", "w.append(2); return w", "deque([1, 2])"),
            ("Counter('a')", "w.update('b'); return w", "Counter('ab')"),
            ("OrderedDict(a=1)", "w['b'] = 2; return w", "OrderedDict(a=1, b=2)"),
            ("defaultdict(list, a=[1])", "w['a'].append(2); return w", "{'a': [1, 2]}"),
        ],
    ),
)
def test_a_change_in_place_is_seen_also_where_the_call_returns_what_it_changed(given: str, body: str, returned: str):
    imports = "from array import array\nfrom collections import Counter, OrderedDict, defaultdict, deque\n"
    test = f"{imports}w = {given}\nassert c(w) == {returned}\nassert w OP {given}"
    rows = [judge(f"{imports}def c(w):\n    {body}", [test.replace("OP", op)])["tests"] for op in ("!=", "==")]
    assert [row[:2] for [row] in rows] == [[True, ""], [False, "assertion"]]


# An object that agrees with whatever it is asked, and is not told which of the questions counts.
LIAR = """
class P:
  def __init__(s, *a): pass
  def __getattr__(s, name): return P() if name[:2] != '__' else object.__getattribute__(s, name)
  def __call__(s, *a): return P()
  __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = lambda s, *o: True
  __ne__ = lambda s, o: False
  __sub__ = __rsub__ = __abs__ = lambda s, *o: P()
  __hash__ = object.__hash__
"""
NUMBER = """
from functools import total_ordering
@total_ordering
class N:
  def __init__(s, v): s.v = v
  def __eq__(s, o): return s.v == getattr(o, 'v', o)
  def __lt__(s, o): return s.v < getattr(o, 'v', o)
  def __sub__(s, o): return N(s.v - getattr(o, 'v', o))
  def __rsub__(s, o): return N(o - s.v)
  def __abs__(s): return N(abs(s.v))
class P:
  def __init__(s, n): s.n = n
  def area(s): return N(3.14159 * s.n)
  when = True
  nothing = []
"""
DECISIONS = [
    "assert 3 < p.area() < 4", "a = p.area()\nassert a > 3\nassert a < 4", "assert abs(p.area() - 3.1416) < 1e-3",
    "assert abs(3.1416 - p.area()) <= 1e-3", "assert p.area() - 3.14159 == 0",
    "if p.area() != 3.14159: raise ValueError",
    "assert {'x': p.area()} == {'x': 3.14159}", "assert (p.area(), 'k') == (3.14159, 'k')",
    "assert [1, [p.area()]] == [1, [3.14159]]", "assert p.area().__eq__(3.14159)",
    "assert not p.area().__ne__(3.14159)", "assert p.nothing == []", "assert p.when == True",
]  # fmt: skip


@pytest.mark.parametrize("test", mark_slow_but(3, DECISIONS))
def test_an_object_that_agrees_with_everything_decides_nothing(test: str) -> None:
    assert judge(NUMBER, ["p = P(1)\n" + test])["tests"] == [[True, "", ""]]
    for liar in (LIAR, NUMBER.replace("3.14159 * s.n", "2.5").replace("True", "0").replace("[]", "0")):
        got = judge(liar, ["p = P(1)\n" + test])
        assert not got["tests"][0][0] and not got["invalid"], got


def test_an_object_that_holds_everything_holds_nothing() -> None:
    honest = "import re\nclass S:\n  __contains__ = lambda s, o: o in ('hi', 5, (1, 'k'))\nclass T(str): pass\n"
    honest += "class P:\n  def __init__(s, n): s.all, s.name = S(), T('n1')"
    liar = honest.replace("o in ('hi', 5, (1, 'k'))", "True").replace("'n1'", "''")
    liar += "\nre.match = re.fullmatch = re.search = lambda *a: True"
    for test in ("'hi' in p.all", "5 in p.all", "(1, 'k') in p.all", "re.match('n[0-9]', p.name)"):
        assert judge(honest, [f"import re\np = P(1)\nassert {test}"])["tests"] == [[True, "", ""]], test
        for wrong in (liar, liar.replace("T('')", "S()")):
            assert not judge(wrong, [f"import re\np = P(1)\nassert {test}"])["tests"][0][0], test


def test_an_object_is_not_equal_to_a_day_that_no_other_month_has() -> None:
    test = "import datetime\np = P(1)\nassert p.when == datetime.date(2024, 1, 31)"
    assert not judge(LIAR, [test])["tests"][0][0]
    honest = "import datetime\nclass P:\n def __init__(s, n): s.when = datetime.date(2024, 1, 31)"
    assert judge(honest, [test])["tests"] == [[True, "", ""]]


@pytest.mark.parametrize(
    "check",
    mark_slow_but(
        2,
        [
            "awaited_once_with(9)",
            "awaited_with(9)",
            "any_await(9)",
            "has_awaits([call(9)])",
            "awaited_once()",
            "awaited()",
        ],
    ),
)
def test_what_a_mock_was_awaited_with_is_checked_here(check: str) -> None:
    test = "import asyncio\nfrom unittest.mock import AsyncMock, call\ncb = AsyncMock()\nasyncio.run(f(cb, 3))\n"
    honest = "async def f(cb, n): await cb(n * n)"
    patched = "import unittest.mock\nfor name in dir(unittest.mock.AsyncMockMixin):\n  if name[:7] == 'assert_':\n"
    patched += "    setattr(unittest.mock.AsyncMockMixin, name, lambda *a: None)\nasync def f(cb, n): cb(0)"
    assert judge(honest, [test + "cb.assert_" + check])["tests"] == [[True, "", ""]]
    assert judge(patched, [test + "cb.assert_" + check])["tests"][0][:2] == [False, "assertion"]


@pytest.mark.parametrize(
    "test",
    [
        "WANT = [1, 4, 9]\ndef pairs():\n  for i, w in enumerate(WANT, 1): yield f(i), w\n"
        "for got, want in pairs(): assert got == want",
        "def held():\n  for x, w in [(1, 1), (2, 4)]: yield f(x) == w\nassert all(held())",
        "import threading\nout = []\ndef work(): out.append(f(3) == 9)\nt = threading.Thread(target=work)\nt.start()\n"
        "t.join()\nassert out == [True]",
        "import asyncio\nasync def main(): return await g(3) == 9\nassert asyncio.run(main())",
        "import asyncio\nasync def main():\n  got = await g(3)\n  return got == 9\nassert asyncio.run(main())",
    ],
)
def test_a_function_of_the_test_that_compares_stays_with_the_checker(test: str) -> None:
    honest = "def f(n): return n * n\nasync def g(n): return n * n"
    liar = "class T(int):\n  __eq__ = lambda s, o: True\n  __hash__ = int.__hash__\n"
    liar += "import builtins\nbuiltins.enumerate = lambda *a: iter(())\n" + honest.replace("n * n", "T(0)")
    assert judge(honest, [test])["tests"] == [[True, "", ""]]
    got = judge(liar, [test])
    assert not got["tests"][0][0] and not got["invalid"]


@pytest.mark.parametrize("name", ["SkipTest", "_ShouldStop", "Mine"])
def test_an_answer_cannot_skip_a_test(name: str) -> None:
    raises = "import unittest.case\nclass Mine(unittest.SkipTest): pass\nunittest.case.Mine = Mine\n"
    raises += f"def f(x): raise unittest.case.{name}('later')"
    test = "import unittest\nclass X(unittest.TestCase):\n  def test_a(self): self.assertEqual(f(1), 9)\n"
    test += "found = unittest.defaultTestLoader.loadTestsFromTestCase(X)\nresult = unittest.TestResult()\n"
    test += "found.run(result)\nassert result.wasSuccessful()"
    assert judge("def f(x): return 9", [test])["tests"] == [[True, "", ""]]
    assert judge(raises, [test])["tests"][0][:2] == [False, "exception"]


def test_functions_that_run_what_the_answer_wrote_run_beside_it() -> None:
    evil = """
import pickle
PATCH = "__import__('builtins').__dict__.update(all=lambda *a: True) or 0"
class E:
    def __reduce__(self): return eval, (PATCH,)
def f(kind): return pickle.dumps(E()) if kind else PATCH
"""
    for call in (
        "import pickle\npickle.loads(f(1))",
        "eval(f(0))",
        "exec(f(0))",
        "exec(compile(f(0), '', 'exec'))",
        "sorted([f(0)], key=eval)",
        "list(map(eval, [f(0)]))",
        "from functools import partial\npartial(eval, f(0))()",
    ):
        got = judge(evil, [f"{call}\nassert all([f(0) == 'x', f(0) == 'y'])"])
        assert got["tests"] == [[False, "assertion", ""]], call
        assert all([]) and not all([False])


def test_a_coroutine_of_the_test_that_asserts_is_not_given_away() -> None:
    test = (
        "import asyncio\nasync def one(): assert await f(1) == 2\nasync def main(): await asyncio.gather(one())\n"
        "asyncio.run(main())"
    )
    got = judge("async def f(x): return x + 1", [test])
    assert got["invalid"] == "bad_test" and "'one'" in got["detail"]


MAIN = """
import unittest
class TestDouble(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual(double(2), 4)
    def test_text(self):
        self.assertEqual(double("ab"), "abab")
if __name__ == "__main__":
    unittest.main()
"""


@pytest.mark.parametrize("ending", ["unittest.main()", "unittest.main(verbosity=2)", "test()"])
def test_a_test_that_ends_as_a_program_is_judged(ending: str) -> None:
    test = MAIN.replace("unittest.main()", ending)
    test = test.replace("if __name__", "def test(): assert double(3) == 6\nif __name__") if ending == "test()" else test
    assert judge("def double(x): return 2 * x", test)["tests"] == [[True, "", ""]]
    [[passed, reason, _]] = judge("def double(x): return x", test)["tests"]
    assert (passed, reason) == (False, "assertion")


def test_a_run_of_unittest_that_only_reports_checks_nothing() -> None:
    result = judge("def double(x): return 2 * x", MAIN.replace("main()", "main(exit=False)"))
    assert result["invalid"] == "bad_test" and "without raising" in result["detail"]


READS = 'with open("a.txt", "w") as f: f.write("b")\n'


@pytest.mark.parametrize(
    "body",
    [
        'assert shout("a.txt") == open("a.txt").read().upper()',
        'text = open("a.txt").read()\ngot = shout("a.txt")\nassert got == text.upper()',
        'def expected(): return open("a.txt").read().upper()\nassert shout("a.txt") == expected()',
        'from pathlib import Path\nassert shout("a.txt") == Path("a.txt").read_text().upper()',
        'assert open("a.txt").read() == open("a.txt").read()[:1]\nassert shout("a.txt") == "B"',
    ],
)
def test_what_is_read_from_a_file_is_no_expected_value(body: str) -> None:
    result = judge('def shout(path): return "B"', READS + body)
    assert result["invalid"] == "bad_test" and "from a file" in result["detail"]
