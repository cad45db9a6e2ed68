"""Objects in orders, differences, contexts and operators of a test: a right answer passes, a lying one does not."""

from __future__ import annotations

import pytest

from tests.kit.sandbox_pair import judge
from tests.kit.slow_cases import mark_slow_but

NUMBER = """
class Num:
    def __init__(self, v): self.v = v
    def of(self, o): return o.v if isinstance(o, Num) else o
    def __sub__(self, o): return Num(self.v - self.of(o))
    def __rsub__(self, o): return Num(o - self.v)
    def __xor__(self, o): return Num(self.v ^ self.of(o))
    def __pow__(self, o): return Num(self.v ** o)
    def __abs__(self): return Num(abs(self.v))
    def __round__(self, n=None): return Num(round(self.v, n))
    def __bool__(self): return self.v != 0
    def __eq__(self, o): return self.v == self.of(o)
    def __hash__(self): return hash(self.v)
    def __lt__(self, o): return self.v < self.of(o)
    def __gt__(self, o): return self.v > self.of(o)
    def __le__(self, o): return self.v <= self.of(o)
    def __mul__(self, o): return o * self.v if hasattr(o, "twice") else NotImplemented
    def __str__(self): return f"<{self.v}>"
class Wrong(ValueError): pass
def int_of(s): return int(s)
def fail(): raise Wrong("no")
def call(f, x): return f(Num(x)).v
def numbers(*values): return [Num(v) for v in values]
"""
ITSELF = """
class Num:
    def __init__(self, *a): pass
    def itself(self, *a): return self
    def yes(self, *a): return True
    __sub__ = __rsub__ = __xor__ = __pow__ = __abs__ = __round__ = itself
    __eq__ = __lt__ = __gt__ = __le__ = yes
    __hash__ = None
    def __bool__(self): return False
def numbers(*values): return [Num() for v in values]
"""
ZERO = ITSELF.replace("return self\n", "return 0\n")
# Tests of which only one value of the answer makes the difference small.
DIFFERENCES = [
    "assert not (Num(9) - 9)",
    "assert not Num(4) - Num(4)",
    "x = Num(9)\nassert not x ^ 9",
    "x = Num(9)\nassert not x - Num(9)",
    "x = Num(9)\nassert not abs(x - 9)",
    "x = Num(9)\nassert bool(x - 9) is False",
    "x = Num(9)\nd = x - 9\nassert not d",
    "x = Num(9)\nd = abs(x - 9.001)\nassert d < 0.01",
    "x = Num(9)\nassert (x - 9.001) ** 2 < 0.01",
    "x = Num(9)\nassert -0.01 < x - 9.001 < 0.01",
    "x = Num(9)\nassert 0.01 > abs(9.001 - x)",
    "x = Num(9)\nassert round(x - 9.001, 1) == 0",
    "for k in range(3):\n  d = Num(k) - k\n  assert not d, d",
    "def near(a, b):\n  d = abs(a - b)\n  return d < 0.01\nassert near(Num(3), 3.001)\nassert not near(Num(3), 4)",
    "import unittest\nclass T(unittest.TestCase):\n  def test_x(self):\n    x = Num(9)\n    self.assertFalse(x - 9)\n"
    "    self.assertLess(abs(x - 9.001), 0.01)\n    self.assertAlmostEqual(x, 9.00000001)\nT('test_x').debug()",
    "import unittest\nclass T(unittest.TestCase):\n  def test_x(self):\n"
    "    self.assertCountEqual(numbers(1, 2), [Num(2), Num(1)])\nT('test_x').debug()",
]
OTHERS = [
    "def key(s):\n  return Num(int(s))\nassert sorted(['10', '9', '11'], key=key) == ['9', '10', '11']\n"
    "assert max('10', '9', key=key) == '10'",
    "import heapq\ndef key(s):\n  x = Num(int(s))\n  return x\n"
    "assert heapq.nlargest(1, ['9', '10'], key=key) == ['10']",
    "xs = numbers(3, 1, 2)\nxs.sort()\nassert [x.v for x in xs] == [1, 2, 3]\n"
    "xs.sort(key=lambda x: x - 2, reverse=True)\nassert [x.v for x in xs] == [3, 2, 1]",
    "from operator import attrgetter\nxs = numbers(3, 1)\nxs.sort(key=attrgetter('v'))\nassert xs[0].v == 1",
    "from functools import cmp_to_key\ndef order(a, b):\n  return -1 if a < b else 1 if b < a else 0\n"
    "assert [x.v for x in sorted(numbers(3, 1), key=cmp_to_key(order))] == [1, 3]",
    "try:\n  fail()\nexcept (KeyError, Wrong) as e:\n  assert e.args == ('no',)",
    "class raising:\n  def __init__(self, kind): self.kind = kind\n  def __enter__(self): return self\n"
    "  def __exit__(self, kind, value, trace):\n    self.text = str(value)\n    return issubclass(kind, self.kind)\n"
    "with raising(Wrong) as r: fail()\nassert r.text == 'no'",
    "class raising:\n  def __init__(self, kind): self.kind = kind\n  def __enter__(self): return self\n"
    "  def __exit__(self, kind, value, trace):\n    assert kind is not None\n    return issubclass(kind, self.kind)\n"
    "with raising(Wrong): fail()\nassert call(lambda x: x - 1, 3) == 2",
    "assert call(lambda x: x - 1, 3) == 2",
    "def less(x):\n  y = x - 1\n  return y - 1\ndef twice(x): return less(less(x)) - 0\nassert call(twice, 9) == 5",
    "class Own:\n  twice = True\n  def __init__(self, v): self.v = v\n  def __mul__(self, k): return self.v * k\n"
    "  def __rsub__(self, o): return o.v - self.v * 2\nassert Num(3) * Own(5) == 15",
    "class Near:\n  def __init__(self, v): self.v = v\n  def __eq__(self, o): return abs(o - self.v) < 0.1\n"
    "x = Num(3)\nassert x.v == Near(3.01)",
    "def test_one(): assert Num(3).v == 3\ndef test_two(): assert Num(4).v == 4\n"
    "for name, test in list(globals().items()):\n  if name.startswith('test_'): test()",
    "import random\nr, xs = random.Random(0), numbers(1, 2, 3)\nassert r.choice(xs).v in (1, 2, 3)\nys = list(xs)\n"
    "r.shuffle(ys)\nassert [y.v for y in ys] == [3, 1, 2] and [x.v for x in xs] == [1, 2, 3]",
    "import random\nr, xs, want = random.Random(0), numbers(1, 2, 3), [1, 2, 3]\nassert r.choice(xs).v == 2\n"
    "r.shuffle(want)\nassert want == [3, 1, 2] == [Num(v).v for v in want]",
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', type=int_of)\n"
    "assert p.parse_args(['--n', '12']).n == 12",
    "import csv, io\nb = io.StringIO()\ncsv.writer(b).writerow(['x', *numbers(3)])\n"
    "assert b.getvalue() == 'x,<3>\\r\\n'",
    "assert '%s-%s' % tuple(numbers(1, 2)) == '<1>-<2>'",
    "class Is:\n  def __init__(self, v): self.v = v\n  def __call__(self, x): return x.v == self.v\n"
    "assert Is(3)(Num(3)) and not Is(4)(Num(3))",
    "class Is:\n  def __init__(self, v): self.v = v\n  def ok(self, x): return x.v == self.v\n"
    "assert Is(3).ok(Num(3)) and not Is(4).ok(Num(3))",
    "from functools import partial\ndef at(k, x):\n  assert x.v == k\n  return k\nassert partial(at, 3)(Num(3)) == 3",
    "import unittest\nclass T(unittest.TestCase):\n  def setUp(self):\n    self.xs = numbers(1)\n"
    "    self.addCleanup(self.xs.clear)\n  def test_x(self): self.assertEqual(self.xs[0].v, 1)\n"
    "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
]


@pytest.mark.parametrize("test", mark_slow_but(8, [*DIFFERENCES, *OTHERS]))
def test_a_right_answer_passes(test: str) -> None:
    assert judge(NUMBER, [test])["tests"] == [[True, "", ""]]


@pytest.mark.parametrize("answer", [ITSELF, ZERO], ids=["itself", "zero"])
@pytest.mark.parametrize("test", mark_slow_but(4, DIFFERENCES))
def test_an_object_cannot_say_that_a_difference_is_nothing(test: str, answer: str) -> None:
    got = judge(answer, [test])
    assert got["invalid"] == "" and got["tests"][0][0] is False


@pytest.mark.parametrize(
    "test",
    [
        "def key(s): return Num(int(s))\nassert sorted(['10', '9', '11'], key=key) == ['9', '11', '10']",
        "xs = numbers(3, 1)\nxs.sort()\nassert [x.v for x in xs] == [3, 1]",
        "try:\n  fail()\nexcept (KeyError, IndexError):\n  pass\nassert call(abs, 1) == 1",
        "assert call(lambda x: x - 1, 3) == 1",
        "def test_one(): assert Num(3).v == 4\nfor name in list(globals()):\n"
        "  if name.startswith('test_'): globals()[name]()",
    ],
)
def test_what_plain_python_refuses_fails(test: str) -> None:
    got = judge(NUMBER, [test])
    assert got["invalid"] == "" and got["tests"][0][0] is False


def test_an_object_is_not_compared_with_one_of_a_class_of_the_test() -> None:
    own = "class Own:\n  def __init__(self, v): self.v = v\n  def __eq__(self, o): return self.v == o.v\n"
    for answer in (NUMBER, ITSELF):
        assert judge(answer, [own + "assert Num(3) == Own(3)"])["invalid"] == "bad_test"


def test_the_text_of_a_function_that_judges_stays_with_the_checker() -> None:
    thief = """
def call(f, x):
    constants = getattr(getattr(f, "__code__", None), "co_consts", ()) or ()
    return next((one for one in constants if one == 9913), 0)
"""
    tests = [
        "def judge(x):\n  y = x + 1\n  return y == 9913\nassert call(judge, 9912) == 9913",
        "def want(x): return x + 9913\nassert call(want, 0) == want(0)",
    ]
    for test in tests:
        assert judge(thief, [test])["tests"][0][0] is False


def test_a_test_whose_keywords_take_time_is_judged() -> None:
    test = "xs = numbers(3, 1)\nassert sorted(f(xs), key=len, reverse=bool(sum(range(9)))) == []"
    assert judge("def f(x): return 1\ndef numbers(*a): return 1", [test])["tests"][0][1] == "exception"


AS_FUNCTIONS = [
    "import operator\nassert operator.eq(Num(3), Num(3)) and not operator.eq(Num(3), Num(4))",
    "import operator as op\nassert op.lt(Num(3), Num(4)) and op.ne(Num(3), Num(4)) and not op.gt(Num(3), Num(4))",
    "from operator import eq as same, le\nassert same(Num(3), 3) and le(Num(3), Num(3)) and not same(Num(3), 4)",
]


UNDER_OTHER_NAMES = [
    "import operator\nsame = operator.eq\nassert same(Num(3), Num(3)) and not same(Num(3), Num(4))",
    "import operator\nfrom functools import partial\nassert partial(operator.eq, Num(3))(Num(3))",
    "import operator\nfrom functools import partial\nis_3 = partial(operator.eq, Num(3))\nassert is_3(numbers(3)[0])",
    "import operator\nassert all(map(operator.eq, numbers(1, 2), [Num(1), Num(2)]))",
    "import operator\nassert list(map(operator.eq, numbers(1, 2), [Num(1), Num(3)])) == [True, False]",
    "import operator\nxs = numbers(1, 2)\nassert all(map(operator.eq, xs, [Num(1), Num(2)])) and xs[0].v == 1",
    "import operator\nchecks = {'==': operator.eq, '<': operator.lt}\n"
    "assert checks['=='](Num(3), Num(3)) and checks['<'](Num(3), Num(4))",
    "import operator\nfrom functools import partial\n"
    "assert [x.v for x in filter(partial(operator.ne, Num(1)), numbers(1, 2, 3))] == [2, 3]",
    "import operator\nfrom functools import partial\nfrom itertools import takewhile\n"
    "assert [x.v for x in takewhile(partial(operator.gt, Num(3)), numbers(1, 2, 3))] == [1, 2]",
    "import operator\nfrom itertools import pairwise, starmap\n"
    "assert list(starmap(operator.lt, pairwise(numbers(1, 3, 2)))) == [True, False]",
    "import operator\nassert operator.countOf(numbers(3, 1, 3), Num(3)) == 2",
    "import operator\nassert operator.indexOf(numbers(3, 1), Num(1)) == 1",
    "import operator, unittest\nt = unittest.TestCase()\nt.assertRaises(AttributeError, operator.lt, Num(3), Bad())\n"
    "assert Num(3).v == 3",
    "from operator import methodcaller\n"
    "assert [x.v for x in sorted(numbers(3, 1), key=methodcaller('plus', by=2))] == [1, 3]",
]


@pytest.mark.parametrize("test", mark_slow_but(4, UNDER_OTHER_NAMES))
def test_comparisons_of_operator_are_judged_under_any_name(test: str) -> None:
    more = "class Bad:\n    def __getattr__(self, name): raise AttributeError(name)\n"
    right = NUMBER.replace("def __str__", "def plus(self, by): return self.v + by\n    def __str__") + more
    right = right.replace("isinstance(o, Num) else o", "isinstance(o, Num) else o.v if isinstance(o, Bad) else o")
    assert judge(right, [test])["tests"] == [[True, "", ""]]
    assert judge(ITSELF + more, [test])["tests"][0][0] is False


def test_an_order_of_two_objects_is_false_the_other_way_round() -> None:
    for test in ("assert Num(1) < Num(2)", "a, b = numbers(1, 2)\nassert a < b", "assert Num(2) > Num(1)"):
        assert judge(NUMBER, [test])["tests"] == [[True, "", ""]]
        assert judge(ITSELF, [test])["tests"][0][0] is False


def test_a_test_that_may_count_comparisons_is_not_asked_for_more() -> None:
    counting = (
        "class N:\n    asked = 0\n    def __init__(self, v): self.v = v\n"
        "    def __lt__(self, o): N.asked += 1; return self.v < o.v\n"
    )
    assert judge(counting, ["a, b = N(1), N(2)\nassert a < b and N.asked == 1"])["tests"] == [[True, "", ""]]


def test_a_formatter_of_the_library_formats_objects() -> None:
    formats = "class N:\n    def __format__(self, spec): return f'<{spec}>'\n"
    test = "import string\nassert string.Formatter().format('{0:x}', N()) == '<x>'"
    assert judge(formats, [test])["tests"] == [[True, "", ""]]
    assert judge(formats.replace("<", "("), [test])["tests"][0][0] is False


@pytest.mark.parametrize("test", AS_FUNCTIONS)
def test_comparisons_as_functions_of_operator_are_comparisons(test: str) -> None:
    assert judge(NUMBER, [test])["tests"] == [[True, "", ""]]
    assert judge(ITSELF, [test])["tests"][0][0] is False


def test_a_name_that_the_test_binds_itself_is_no_comparison_of_operator() -> None:
    own = (
        "import operator\ndef eq(a, b):\n  return a.v != b.v - 1\nassert eq(Num(1), Num(1)) and not eq(Num(1), Num(2))"
    )
    assert judge(NUMBER, [own])["tests"] == [[True, "", ""]]
    bound = "from operator import eq\neq = lambda a, b: False\nassert not eq(Num(3), Num(3))"
    assert judge(NUMBER, [bound])["tests"] == [[True, "", ""]]


def test_identity_as_a_function_is_refused_as_identity_is() -> None:
    """`x is x` is what an answer's object says of itself, in either form."""
    for test in ("x = Num(3)\nassert x is x", "import operator\nx = Num(3)\nassert operator.is_(x, x)"):
        assert judge(NUMBER, [test])["invalid"], test


FLOATING = "class Num:\n    def __init__(self, v): self.v = v\n    def __float__(self): return float(self.v)\n"


def test_isclose_takes_the_float_of_an_object() -> None:
    near = "import math\nassert math.isclose(Num(0.1 + 0.2), 0.3) and not math.isclose(Num(0.3), 0.4)"
    assert judge(FLOATING, [near])["tests"] == [[True, "", ""]]
    for wrong in ("0.4", "object()", "'0.3'"):
        assert judge(FLOATING.replace("float(self.v)", wrong), [near])["tests"][0][0] is False
    assert judge(FLOATING, ["import math\nassert math.isclose(Num, 1.0)"])["tests"][0][0] is False
