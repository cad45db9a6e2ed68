"""Programs that solve their task, in ways that a careless sandbox or filter would refuse. Each must pass."""

import ast
import re

from rlvr.audit.attacks import honest_programs
from rlvr.audit.attacks.suite import Attack

# Behind `#: tests` each line is a test, or `input -> output` (as Python writes text) for a program that reads input.
PROGRAMS = r"""
#: recursion
def fact(n):
    return 1 if n < 2 else n * fact(n - 1)
#: tests
assert fact(5) == 120
assert fact(200) % 199 == 0
#: deep_recursion
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)
#: tests
assert depth(900) == 900
#: big_integers
def power(a, b):
    return a ** b
#: tests
assert power(3, 2000) % 10 ** 9 == pow(3, 2000, 10 ** 9)
assert power(2, 4096) == 1 << 4096
#: generator
def squares(n):
    for i in range(n):
        yield i * i
#: tests
assert list(squares(4)) == [0, 1, 4, 9]
assert sum(squares(10)) == 285
#: dataclass
from dataclasses import dataclass
@dataclass(order=True)
class Point:
    x: int
    y: int = 0
def far(p):
    return Point(p.x * 2, p.y + 1)
#: tests
assert far(Point(1, 2)) == Point(2, 3)
assert Point(1) < Point(2)
#: threads
import threading
def total(numbers):
    parts = []
    workers = [threading.Thread(target=lambda n=n: parts.append(n * n)) for n in numbers]
    [w.start() for w in workers]
    [w.join() for w in workers]
    return sum(parts)
#: tests
assert total([1, 2, 3]) == 14
#: thread_pool
from concurrent.futures import ThreadPoolExecutor
def doubled(numbers):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda n: 2 * n, numbers))
#: tests
assert doubled([1, 2]) == [2, 4]
#: printing
import sys
def loud(x):
    print("working on", x)
    print("PASSED?", file=sys.stderr)
    return x + 1
print("ready")
#: tests
assert loud(1) == 2
#: in_place
def reverse(items):
    items.reverse()
#: tests
a = [1, 2, 3]; reverse(a); assert a == [3, 2, 1]
#: in_place_dictionary
def count(words, into):
    for word in words:
        into[word] = into.get(word, 0) + 1
    return into
#: tests
d = {}; r = count(['a', 'b', 'a'], d); assert d == {'a': 2, 'b': 1} and r == d
#: half_a_second_of_work
import time
def busy(n):
    end, x = time.process_time() + 0.5, 0
    while time.process_time() < end:
        x += 1
    return n
#: tests
assert busy(3) == 3
#: short_sleep
import time
def nap():
    time.sleep(0.2)
    return "awake"
#: tests
assert nap() == "awake"
#: unicode_strings
def shout(text):
    return text.upper() + "‽ 🎉 漢字 é"
#: tests
assert shout("straße") == "STRASSE‽ 🎉 漢字 é"
#: unicode_names
def größe(änderung):
    π = 3
    return π * änderung
#: tests
assert größe(2) == 6
#: closures
def counter():
    n = 0
    def step():
        nonlocal n
        n += 1
        return n
    return step
#: tests
c = counter(); c(); assert c() == 2
assert counter()() == 1
#: classes
class Stack:
    def __init__(self):
        self._items = []
    def push(self, item):
        self._items.append(item)
        return self
    def pop(self):
        return self._items.pop()
    def __len__(self):
        return len(self._items)
#: tests
s = Stack(); s.push(1).push(2); assert s.pop() == 2 and len(s) == 1
#: own_equality
class Fraction2:
    def __init__(self, a, b):
        self.a, self.b = a, b
    def __eq__(self, other):
        return self.a * other.b == other.a * self.b
def half():
    return Fraction2(1, 2)
#: tests
assert half() == Fraction2(1, 2)
assert not (half() == Fraction2(1, 3))
#: lru_cache
from functools import lru_cache
@lru_cache(maxsize=None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
#: tests
assert fib(90) == 2880067194370816120
#: regex
import re
def words(text):
    return re.findall(r"\b[a-z]+\b", text)
#: tests
assert words("one two, 3 four!") == ["one", "two", "four"]
#: heapq
import heapq
def smallest(items, k):
    return heapq.nsmallest(k, items)
#: tests
assert smallest([5, 1, 4, 2], 2) == [1, 2]
#: itertools
from itertools import combinations, groupby
def pairs(items):
    return list(combinations(items, 2))
def runs(text):
    return [(k, len(list(g))) for k, g in groupby(text)]
#: tests
assert pairs([1, 2, 3]) == [(1, 2), (1, 3), (2, 3)]
assert runs("aab") == [('a', 2), ('b', 1)]
#: decimal
from decimal import Decimal
def price(text):
    return Decimal(text) * 2
#: tests
assert str(price("0.10")) == "0.20"
#: fractions
from fractions import Fraction
def third():
    return float(Fraction(1, 3) * 3)
#: tests
assert third() == 1.0
#: collections
from collections import Counter, OrderedDict, defaultdict, deque
def common(text):
    return Counter(text).most_common(1)[0]
def grouped(words):
    by = defaultdict(list)
    for word in words:
        by[len(word)].append(word)
    return dict(by)
#: tests
assert common("abca") == ('a', 2)
assert grouped(["a", "bb", "c"]) == {1: ["a", "c"], 2: ["bb"]}
#: sets_and_tuples
def unique(items):
    return set(items), tuple(sorted(set(items))), frozenset(items)
#: tests
assert unique([2, 1, 2]) == ({1, 2}, (1, 2), frozenset({1, 2}))
#: none_and_booleans
def nothing():
    pass
def both():
    return True, False, None
#: tests
assert nothing() is None
assert both() == (True, False, None)
#: floats
import math
def root(x):
    return math.sqrt(x)
#: tests
assert math.isclose(root(2), 1.4142135623730951)
assert abs(root(9) - 3) < 1e-9
#: special_floats
def extremes():
    return [float("inf"), -float("inf"), float("nan")]
#: tests
assert extremes()[0] == float("inf") and extremes()[2] != extremes()[2]
#: complex_numbers
def turn(z):
    return z * 1j
#: tests
assert turn(1 + 2j) == -2 + 1j
#: bytes_result
def coded(text):
    return text.encode()
#: tests
assert coded("ab") == b"ab"
"""

_PLAIN = "def f(x):\n    if x:\n        return 1\n    return 0\n"
_ASSERTS = {"tests": ["assert f(3) == 1", "assert f(0) == 0"]}


def _read() -> list[Attack]:
    found = [
        Attack("windows_line_ends", "honest", _PLAIN.replace("\n", "\r\n"), _ASSERTS, "honest"),
        Attack("tabs", "honest", _PLAIN.replace("    ", "\t"), _ASSERTS, "honest"),
        Attack("no_last_line_end", "honest", _PLAIN.rstrip(), _ASSERTS, "honest"),
        Attack("candidate_function", "honest", _PLAIN, {
            "tests": ["def check(candidate):\n    for x in range(1, 9):\n        assert candidate(x) == 1\n"],
            "entry_point": "f",
        }, "honest"),
    ]  # fmt: skip
    for name, program, tests in re.findall(
        r"^#: (\w+)\n(.*?)^#: tests\n(.*?)(?=^#: |\Z)", PROGRAMS + honest_programs.PROGRAMS, re.S | re.M
    ):
        lines = tests.strip("\n").splitlines()
        if " -> " in lines[0]:
            pairs = [line.split(" -> ") for line in lines]
            task = [{"input": ast.literal_eval(given), "output": ast.literal_eval(due)} for given, due in pairs]
        else:
            task = [line.replace("\\nexcept", "\nexcept") for line in lines]
        found.append(
            Attack(name, "honest", program, {"tests": task}, "honest", needs="scratch" if "open(" in program else "")
        )
    return found


ATTACKS = _read()
