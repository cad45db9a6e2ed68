"""More honest programs, in the form of `honest`: errors, functions, the standard library, whole programs."""

PROGRAMS = r"""
#: exceptions_expected
def checked(n):
    if n < 0:
        raise ValueError("negative")
    return n
#: tests
try: checked(-1); assert False, "no error"\nexcept ValueError as e: assert str(e) == "negative"
assert checked(1) == 1
#: own_exception
class TooBig(Exception):
    pass
def small(n):
    if n > 9:
        raise TooBig(n)
    return n
#: tests
try: small(10); assert False\nexcept TooBig: pass
#: caught_everything
def safe(a, b):
    try:
        return a / b
    except:
        return None
    finally:
        pass
#: tests
assert safe(1, 0) is None
assert safe(4, 2) == 2
#: main_guard
def f(x):
    return x + 1
if __name__ == "__main__":
    print(f(1))
#: tests
assert f(1) == 2
#: keyword_arguments
def line(a, *rest, scale=1, **more):
    return (a + sum(rest)) * scale + len(more)
#: tests
assert line(1, 2, 3, scale=2, x=0) == 13
#: functions_as_arguments
def twice(f, x):
    return f(f(x))
#: tests
assert twice(lambda n: n + 3, 1) == 7
assert twice(str.strip, " a ") == "a"
#: decorator
import functools
def logged(f):
    @functools.wraps(f)
    def inner(*a, **k):
        return f(*a, **k)
    return inner
@logged
def add(a, b):
    "Sum."
    return a + b
#: tests
assert add(1, 2) == 3
#: context_manager
from contextlib import contextmanager
log = []
@contextmanager
def opened(name):
    log.append("in")
    yield name.upper()
    log.append("out")
def run(name):
    with opened(name) as value:
        return value
#: tests
assert run("x") == "X"
#: enums_and_named_tuples
from collections import namedtuple
from enum import Enum
class Colour(Enum):
    RED = 1
Pair = namedtuple("Pair", "a b")
def name(c):
    return c.name, Pair(1, 2).b
#: tests
assert name(Colour.RED) == ("RED", 2)
#: scratch_file
def kept(text):
    with open("note.txt", "w") as file:
        file.write(text)
    with open("note.txt") as file:
        return file.read()
#: tests
assert kept("hello") == "hello"
#: random_with_seed
import random
def shuffled(seed):
    rng = random.Random(seed)
    items = list(range(5))
    rng.shuffle(items)
    return sorted(items)
#: tests
assert shuffled(1) == [0, 1, 2, 3, 4]
#: dates_and_json
import datetime, json
def later(day):
    return json.dumps({"day": (datetime.date.fromisoformat(day) + datetime.timedelta(1)).isoformat()})
#: tests
assert later("2024-02-28") == '{"day": "2024-02-29"}'
#: match_statement
def kind(x):
    match x:
        case [a, *_]:
            return "list"
        case {"k": v}:
            return v
        case _:
            return "other"
#: tests
assert [kind([1]), kind({"k": 2}), kind(3)] == ["list", 2, "other"]
#: async_function
import asyncio
async def work(n):
    await asyncio.sleep(0)
    return n * 2
def run(n):
    async def main():
        return sum(await asyncio.gather(*(work(i) for i in range(n))))
    return asyncio.run(main())
#: tests
assert run(4) == 12
#: strings_that_look_dangerous
BANNED = ["import os", "eval(", "__import__", "subprocess", "os._exit(0)"]
def risky(text):
    return any(word in text for word in BANNED)
#: tests
assert risky("eval(1)") and not risky("evil")
#: harmless_eval
def value(text):
    return eval(text, {"__builtins__": {}})
#: tests
assert value("1 + 2 * 3") == 7
#: large_result
def numbers(n):
    return list(range(n))
#: tests
assert len(numbers(20000)) == 20000 and numbers(20000)[-1] == 19999
#: tens_of_megabytes
def sieve(n):
    flags = bytearray([1]) * (n + 1)
    for i in range(2, int(n ** 0.5) + 1):
        if flags[i]:
            flags[i * i :: i] = bytes(len(range(i * i, n + 1, i)))
    return sum(flags) - 2
#: tests
assert sieve(3000000) == 216816
#: echo_program
n = int(input())
print(n * 2)
#: tests
'4\n' -> '8\n'
'-3\n' -> '-6\n'
#: reads_all_input
import sys
print(sum(map(int, sys.stdin.read().split())))
#: tests
'1 2\n3' -> '6\n'
#: no_input_needed
for i in range(3):
    print(i, end=" ")
print()
#: tests
'' -> '0 1 2 \n'
#: guarded_program
def main():
    print("Hello, " + input().strip() + "!")
if __name__ == "__main__":
    main()
#: tests
'Zoë\n' -> 'Hello, Zoë!\n'
"""
