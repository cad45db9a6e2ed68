"""The checker holds the tests: verdicts are those of Python, and no answer can make a test invalid."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from rlvr.sandbox import Sandbox, checker
from rlvr.sandbox.remote import Link, Names, Remote
from rlvr.sandbox.setup_parts import walk
from tests.kit.code_rows import REAL
from tests.kit.sandbox_pair import judge, rows
from tests.kit.slow_cases import mark_slow_but

MBPP = REAL / "mbpp.jsonl"
NODE = "class Node:\n def __init__(s, v): s.v = v; s.left = None\ndef depth(n): return 1 + depth(n.left) if n else 0"


@pytest.mark.parametrize(
    ("solution", "test", "path"),
    [
        ("def f(x): return {x}", "assert f(1) == {1}", "split"),
        ("import math\ndef f(x): return x / 3", "assert math.isclose(f(1), 0.33333, abs_tol=1e-3)", "split"),
        ("def sum(a, b): return a - b", "assert sum(5, 2) == 3", "split"),
        ("import re\ndef f(x): return re.match('a', x)", "assert f('a')", "rpc"),
        ("def f(x): x.append([2])", "x = [1]\nf(x)\nassert x == [1, [2]]", "rpc"),
        ("def f(x): raise KeyError(x)", "try:\n f(1)\n assert False\nexcept KeyError: pass", "rpc"),
        ("class E(Exception): pass\ndef f(): raise E", "try:\n f()\n assert False\nexcept E: pass", "rpc"),
        ("def f(g, x): return g(x) + 1", "assert f(lambda v: v * 2, 4) == 9", "rpc"),
        ("def f(x): return x + 1", "for n in range(5):\n  assert f(f(n)) == n + 2", "rpc"),
        ("class P:\n def __init__(s): s.n = 0\n def up(s): s.n += 1", "p = P()\np.up()\nassert p.n == 1", "rpc"),
    ],
)
def test_an_honest_answer_passes_on_the_expected_path(solution: str, test: str, path: str) -> None:
    got = judge(solution, [test])
    assert (got["tests"], got["path"], got["invalid"]) == ([[True, "", ""]], path, "")


@pytest.mark.parametrize(
    ("test", "fork"),
    [
        ("assert f(1) == 2 * [3]", False), ("assert f(2) ** 9 == 512", True), ("assert sum(range(f(3))) == 3", True),
        ("for n in [1, 2]: assert f(n) == n", False), ("def check(c):\n x = [1]\n c(x)\n assert x == []", False),
        ("while True: assert f(1)", True), ("import random\nassert f(1)", True),
        ("class A: x = f(1)\nassert A.x", True),
        ("import math\nmath.pi = f(1)\nassert math.pi", True), ("x = f(1)\nassert x << 3", True),
        ("eval(f('1'))", True),
        ("assert f(1).__class__ is int", True), ("assert '{}'.format(f(1))", True),
    ],
)  # fmt: skip
def test_programs_that_could_harm_a_shared_process_get_their_own(test: str, fork: bool) -> None:
    assert checker.needs_fork({"tests": [test]}) is fork


def test_two_halves_of_a_surrogate_pair_are_not_the_character() -> None:
    halves = "def f(): return chr(0xd83d) + chr(0xde42)"
    for test, passed in (("f() == '🙂'", False), ("len(f()) == 2", True), ("[f()] == ['\\ud83d' + '\\ude42']", True)):
        assert rows(halves, ["assert " + test])[0][0] is passed, test
        assert rows(halves, [f"for _ in [1]: assert {test}"])[0][0] is passed, test
    assert rows("def f(): return '🙂\\0é'", ["assert f() == '🙂\\0é'"]) == [(True, "")]


def test_setup_may_build_from_the_answers_classes() -> None:
    setup = "root = Node(1)\nroot.left = Node(2)"
    assert rows(NODE, ["assert depth(root) == 2", "assert depth(root) == 3"], setup=setup) == [
        (True, ""),
        (False, "assertion"),
    ]


def test_check_functions_get_the_candidate() -> None:
    text = "def check(candidate):\n  for n in range(3):\n    assert candidate(n) == n * n, 'square'\n"
    assert rows("def f(x): return x * x", [text], entry_point="f") == [(True, "")]
    assert judge("def f(x): return x", [text], entry_point="f")["tests"] == [[False, "assertion", "square"]]
    assert rows("def g(x): return x", [text], entry_point="f") == [(False, "wrong_name")]


@pytest.mark.parametrize(
    "test", mark_slow_but(1, ["assert f(1) ==", "assert f(1 / 0) == 1", "assert f(1) == y", "assert False"])
)
def test_a_broken_test_is_invalid_whatever_the_answer(test: str) -> None:
    for solution in ("def f(x): return 1", "y = 1", "def f(:"):
        assert judge(solution, [test])["invalid"] == "bad_test"
    for idle in ("", "x = 1", "def check(c): assert c(1) == 2", "assert 1 + 1 == 2", "def test_f(): assert f(1) == 2",
                 "class D(f):\n def go(s): assert f(1) == 2\nD().go()"):  # fmt: skip
        assert judge("def f(x): return x", [idle])["invalid"] == "bad_test"
    assert judge("y = 1", ["raise ValueError"])["invalid"] == "bad_test"
    assert judge("", [test, "assert f(2) == 2"])["invalid"] == "bad_test"


@pytest.mark.parametrize("method", mark_slow_but(1, ["__eq__", "__sub__", "__contains__", "__lt__", "__rsub__"]))
def test_an_object_that_agrees_with_everything_passes_nothing(method: str) -> None:
    solution = f"class A:\n {method} = lambda s, o: 0.0 if 'sub' in '{method}' else True\ndef f(x): return A()"
    for test in ("assert f(1) == 2", "assert abs(f(1) - 3) < 1e-6", "assert 3 in f(1)", "assert f(1) < 2"):
        assert rows(solution, [test, "r = " + test[7:] + "\nassert r"])[1][0] is False
        assert rows(solution, [test])[0][0] is False


@pytest.mark.parametrize(
    ("solution", "test", "row"),
    mark_slow_but(7, [
        ("LIMIT = 2\ndef f(x): return x", "assert f(LIMIT) == 2", (True, "")),
        ("def f(x): return x", "assert f(LIMIT) == 2", (False, "wrong_name")),
        ("def g(x): return -x\ndef f(h, x): return h(x)", "assert f(g, 3) == -3", (True, "")),
        ("import math\ndef f(x): return x / 3", "assert math.isclose(f(1), 1 / 3)", (True, "")),
        ("def f(x): return x / 3", "assert math.isclose(f(1), 1 / 3)", (False, "wrong_name")),
        ("import cmath as math\ndef f(x): return x / 3", "assert math.isclose(f(1), 1 / 3)", (False, "wrong_name")),
        ("class math: isclose = print\ndef f(x): return x", "assert math.isclose(f(1), 9)", (False, "wrong_name")),
        ("class math: isclose = print\ndef f(x): return x", "for x in [1]: assert not math.isclose(f(1), 9)",
         (False, "wrong_name")),
        ("def isclose(*a): return True\ndef f(x): return x", "assert isclose(f(1), 9)", (False, "assertion")),
        ("from math import isclose\ndef f(x): return x / 3", "assert isclose(f(1), 1 / 3)", (True, "")),
        ("import math as m\ndef f(x): return x", "for y in [1]: assert m.isclose(f(y), 1.0)", (True, "")),
        ("def f(x): return int", "assert f(1) is int", (True, "")),
        ("def f(x): return x\nclass P:\n def v(s): return 2", "assert f(2) == P().v()", (True, "")),
        ("RESULT = [1, 2]", "assert len(RESULT) == 2", (True, "")),
    ]),
)  # fmt: skip
def test_a_name_that_the_test_does_not_bind_is_asked_for(solution: str, test: str, row: tuple[bool, str]) -> None:
    assert rows(solution, [test]) == [row]


def test_an_answer_cannot_make_a_test_invalid() -> None:
    """What fails in a later test on a value from an earlier one is the answer's doing."""
    for solution in ("def f(x): return None", "def f(x): raise ValueError", "def f(x): return 3"):
        for test in ("assert x + 1 == 2", "assert x == 1"):
            got = judge(solution, ["x = f(1)", test])
            assert got["invalid"] == "" and not got["tests"][1][0]
    assert judge("def f(x): return x", ["y = 1", "x = f(y)", "assert 1 / 0"])["invalid"] == "bad_test"


SENDS = """
import json, os, stat
def send(m):
    b = json.dumps(m).encode()
    for fd in range(3, 60):
        try: stat.S_ISSOCK(os.fstat(fd).st_mode) and os.write(fd, len(b).to_bytes(4, 'big') + b)
        except OSError: pass
def f(*a): send(%s); os._exit(0)
"""


FRAMES: list[list[Any]] = [
    ["v", ["builtin", "eval"]], ["v", ["builtin", "exit"]], ["v", ["m", "os"]], ["v", ["cb", -1]],
    ["v", ["h", "a"]], ["cb", 0, ["t"], ["d", 1, 2]], ["x", ["SystemExit"], "", None, None],
    ["x", [["a"]], 1, 2, 3], ["x", [], "", [], []], ["x", ["ValueError"], "", ["l"], ["d", "_of_answer", 2]],
    ["v", 1, [1, 2, 3]], ["v", ["G", 1, 2]], ["v", ["G", ["h", 0, "x"]]], ["v", ["s", ["h", 0, "x"]]],
    ["n"], ["v"], ["u"], [None],
]  # fmt: skip


# Each takes a second of waiting, so every fourth is quick.
@pytest.mark.parametrize(
    "frame",
    [pytest.param(frame, id=repr(frame), marks=[pytest.mark.slow] * (i % 4 != 0)) for i, frame in enumerate(FRAMES)],
)
def test_a_frame_that_no_solver_sends_costs_the_answer_its_test(frame: list[Any]) -> None:
    for test in ("assert f(1) == 2", "g = lambda: 1\nr = f(g)\nassert r == 2 or r(1) == 2"):
        got = judge(SENDS % repr(frame), [test])
        assert got["invalid"] == "" and not got["tests"][0][0], got


def test_an_answer_has_nothing_imported_by_the_name_of_an_exception() -> None:
    """`venv.__main__` ends the process that imports it."""
    frame = ["x", [[["lib", "venv.__main__", "E"], ["builtin", "ValueError"]], "m", ["t"], None, [], None]]
    for test in ("assert f(1) == 2", "try: f(1)\nexcept ValueError: pass\nassert f(2) == 2"):
        got = judge(SENDS % frame, [test])
        assert not got["tests"][0][0] and "venv.__main__" not in sys.modules


def test_an_object_is_its_own_judge_in_no_comparison() -> None:
    liar = "class P:\n def __init__(s, *a): s.a = a\n __eq__ = lambda s, o: True\n __mul__ = lambda s, k: P(7)\n"
    honest = "class P:\n def __init__(s, *a): s.a = a\n def __mul__(s, k): return P(*[x * k for x in s.a])\n"
    honest += " def __eq__(s, o): return s.a == o.a\n"
    for test in ("assert P(1, 2) * 2 == P(2, 4)", "v = P(1, 2) * 2\nassert v == P(2, 4)"):
        assert rows(honest, [test]) == [(True, "")]
        assert rows(liar, [test]) == [(False, "opaque")]
    for test in ("assert P(1) - 1 == 0", "assert P(1) in [2]", "assert P(1) * 2 == 2", "assert {P(1)} == {1}"):
        assert rows(liar, [test])[0][0] is False, test
    assert rows(liar, ["assert P(1) is not None and P(1)"]) == [(True, "")]


def test_setup_with_classes_lives_with_the_answer() -> None:
    setup = "class Node:\n def __init__(s, v, n=None): s.v, s.n = v, n"
    answer = "def total(n): return n.v + total(n.n) if n else 0"
    assert rows(answer, ["assert total(Node(1, Node(2))) == 3"], setup=setup) == [(True, "")]
    assert rows(answer, ["class N:\n v, n = 1, None\nassert total(N()) == 1"]) == [(True, "")]


CASES = "EXPECTED = [1, 4, 9]\ndef want(): return EXPECTED\ndef same(a, b): return a == b"


@pytest.mark.parametrize("classes", ["", "\nclass P: pass"])
def test_an_answer_sees_no_value_and_no_function_of_the_setup(classes: str) -> None:
    """It could return what is expected, or say itself what is equal."""
    tests = ["assert f(3) == EXPECTED", "assert f(3) == want()", "assert same(f(3), [1, 4, 9])"]
    right = "def f(n): return [k * k for k in range(1, n + 1)]"
    assert rows(right, tests, setup=CASES + classes) == [(True, "")] * 3
    for thief in ("EXPECTED", "want()", "same.__code__", "globals()['EXPECTED']", "[]"):
        got = rows(f"def f(n): return {thief}", tests, setup=CASES + classes)
        assert not any(passed for passed, _ in got), thief


def test_a_setup_value_built_with_the_answer_is_not_an_expected_value() -> None:
    answer = "class Node:\n def __init__(s, v): s.v = v\ndef f(n): return 0"
    cases = "class Case:\n want = 3\n def same(a, b): return a == b"
    for setup, test in (
        ("want = Node(3).v", "assert f(1) == want"), ("want = []\nwant.append(Node(3).v)", "assert f(1) == want[0]"),
        ("root = Node(3)", "assert f(root) == root.v"), (cases, "assert f(1) == Case.want"),
        (cases, "assert Case.same(f(1), 3)"), (cases, "assert not Case.same(f(1), 3)"),
        ("M = 7\nclass P:\n def v(s): return M", "assert f(P()) == 7"),
    ):  # fmt: skip
        got = judge(answer, [test], setup=setup)
        assert got["invalid"] == "bad_test", (setup, test)
    setup = "root = Node(3)\nroot.w = 4\ndef total(n): return n.v + n.w"
    assert rows(answer, ["assert root.v == 3", "assert total(root) == 7"], setup=setup) == [
        (True, ""),
        (True, ""),
    ]
    assert rows("def f(n): return 0", ["assert f(root) == 0"], setup=setup) == [(False, "wrong_name")]
    assert judge(answer, ["assert f(root) == 0"], setup="1 / 0\n" + setup)["invalid"] == "bad_test"
    assert rows(answer, ["assert f(root) == 0"], setup=setup + "\nroot.x") == [(False, "exception")]


def test_an_import_that_no_answer_can_have_is_the_tests_fault() -> None:
    given: dict[str, Any]
    for given in ({"imports": ["import no_such_module.part"]}, {"setup": "from no_such_module import part"}):
        got = judge("def f(x): return x", ["assert f(1) == 1"], **given)
        assert got["invalid"] == "bad_test" and "'no_such_module'" in got["detail"]
    with Sandbox(workers=1) as sandbox:
        got = sandbox.verify("def f(x): return x", ["assert f(1) == 1"], imports=["import numpy"])
        assert got.reason == "bad_test" and "numpy" in got.detail


@pytest.mark.parametrize("kind", ["StopIteration", "StopAsyncIteration"])
def test_an_answer_cannot_end_the_loop_that_tests_it(kind: str) -> None:
    solution = f"def f(x): raise {kind}\nclass G:\n def __init__(s, n): pass\n __getattr__ = f"
    for body in ("all(map(lambda x: c(x) == 3 * x, [1, 2]))", "not list(map(c, [1]))", "all(map(c, [1]))"):
        assert rows(solution, [f"def check(c):\n assert {body}"], entry_point="f") == [(False, "exception")]
    assert rows(solution, ["g = G(1)\nassert all(map(lambda k: g.x == k, [1]))"]) == [(False, "exception")]
    own = "class I:\n n = 0\n def __next__(s):\n  s.n += 1\n  if s.n > 2: raise StopIteration\n  return s.n"
    test = "i = I()\nassert next(i) == 1 and next(i) == 2\ntry:\n next(i)\n assert False\nexcept StopIteration: pass"
    assert rows(own, [test]) == [(True, "")]


def test_an_answer_hands_out_no_module_that_the_test_does_not_name() -> None:
    for solution, test in (
        ("import random as r\ndef f(x): return r", "m = f(1)\nassert m.Random(1)"),
        ("import sys\ndef f(x): return [sys]", "assert f(1)[0].maxsize > 1"),
    ):
        assert not rows(solution, [test])[0][0], test
    assert rows("def f(m, x): return m, x", ["import math\nassert f(math, 1)[0].pi > 3"]) == [(True, "")]


MANY = SENDS.replace("send(%s)", "send(['v', ['l', *(['h', n] for n in range(%d))]])")


def test_a_checker_keeps_nothing_of_an_answer() -> None:
    text = "def check(c):\n x = c(1)\n assert x == 2"
    gc.collect()
    gc.disable()
    try:
        for count, reason in ((20, "lost"), (20_000, "opaque")):
            assert rows(MANY % count, [text], entry_point="f") == [(False, reason)]
            assert not [1 for one in gc.get_objects() if type(one) in (Remote, Link, Names)]
    finally:
        gc.enable()


def test_a_checker_out_of_memory_is_an_error_not_a_failure() -> None:
    for test in ("raise MemoryError", "f(1)\nraise MemoryError"):
        with pytest.raises(MemoryError):
            judge("def f(x): return x", [test + "\nassert f(1) == 1"])
    with pytest.raises(MemoryError):
        judge("def f(x): return x", ["assert f(1) == 1\nx = 1"], setup="raise MemoryError")


def test_a_checker_that_has_grown_asks_to_be_replaced() -> None:
    code = (
        "from rlvr.sandbox import checker\n"
        "checker.warm()\n"
        "job = {'tests': ['assert f(1) == 1']}\n"
        "before = checker.judge(job, None)\n"
        "held = b'x' * (checker.peak_memory() + 2 * checker.ROOM)\n"
        "after = checker.judge(job, None)\n"
        "assert 'needs_restart' not in before and after['needs_restart'] and held\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_new_checker_decides_whether_the_test_is_to_blame() -> None:
    with Sandbox(workers=1) as sandbox:
        before = sandbox.pids
        assert (
            sandbox.verify("def f(x): return x", ["while True: pass\nassert f(1)"], timeout_s=0.5).reason
            == "test_timeout"
        )
        assert not set(before) & set(sandbox.pids)


def test_without_a_channel_the_tests_own_part_runs() -> None:
    assert checker.judge({"tests": ["x = 1\nassert f(x) == 1"]}, None)["invalid"] == ""
    assert checker.judge({"tests": ["1 / 0\nassert f(1) == 1"]}, None)["invalid"] == "bad_test"


def test_weak_runs_the_tests_with_the_answer_and_says_so() -> None:
    got = judge("def f(x): return x", ["assert f(1) == 1", "assert f(1) == 2"], path="weak")
    assert got["path"] == "weak" and [row[:2] for row in got["tests"]] == [[True, ""], [False, "assertion"]]


@pytest.mark.skipif(not MBPP.exists(), reason="MBPP is not on this machine")
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_mbpps_own_solutions_pass_and_nearly_all_asserts_are_split(every: int) -> None:
    lines = MBPP.read_text(encoding="utf-8").splitlines()[::every]
    problems: list[dict[str, Any]] = [json.loads(line) for line in lines]
    split = [checker.plan_job({"tests": p["test_list"], "setup": p["test_setup_code"]}).is_split for p in problems]
    assert split.count(False) <= 4  # of all 974
    for problem in problems[::8]:
        got = rows(problem["code"], problem["test_list"], setup=problem["test_setup_code"])
        assert got == [(True, "")] * len(got), problem["task_id"]


def test_walk_finds_what_ast_walk_finds_but_for_operators_and_contexts() -> None:
    silent = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
    tree = ast.parse("\n".join(inspect.getsource(module) for module in (ast, inspect, json)))
    wanted = [node for node in ast.walk(tree) if node is not tree and not isinstance(node, silent)]
    assert len(wanted) > 10_000
    assert [id(node) for node in walk(tree)] == [id(node) for node in wanted]


def test_an_unchanged_setup_value_is_the_answers_failure() -> None:
    tests = ["order(xs)", "assert xs == [1, 2, 3]"]
    assert rows("def order(xs): xs.sort()", tests, setup="xs = [3, 1, 2]") == [(True, "")] * 2
    assert rows("def order(xs): pass", tests, setup="xs = [3, 1, 2]") == [(True, ""), (False, "assertion")]


def test_an_answer_has_no_builtin_of_its_own_where_a_setup_asks_for_its_objects() -> None:
    stack = "class Stack:\n def __init__(s): s.a = []\n def push(s, x): %s\n def __len__(s): return len(s.a)\n%s"
    setup = "s = Stack()\ns.push(1)"
    assert rows(stack % ("s.a.append(x)", ""), ["assert len(s) == 1"], setup=setup) == [(True, "")]
    liar = stack % ("pass", "def len(x): return 1")
    assert rows(liar, ["assert len(s.a) == 1"], setup=setup) == [(False, "assertion")]


def test_an_object_gives_as_many_items_as_its_length() -> None:
    bag = "class Bag:\n def __len__(s): return 2\n def __iter__(s): return iter(%s)\ndef f(x): return Bag()"
    test = "r = f(3)\nassert len(r) == 2\nfor a, b in zip(r, [1, 2]): assert a == b"
    assert rows(bag % "[1, 2]", [test]) == [(True, "")]
    assert rows(bag % "()", [test]) == [(False, "opaque")]
    grows = (
        "class Bag:\n def __init__(s): s.a = [1]\n def __len__(s): return len(s.a)\n def __iter__(s): return iter(s.a)"
    )
    grows += "\n def add(s, x): s.a.append(x)"
    assert rows(grows, ["b = Bag()\nassert len(b) == 1\nb.add(2)\nassert list(b) == [1, 2]"]) == [(True, "")]
