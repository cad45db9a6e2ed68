"""The solver runs an answer and returns data: programs on real descriptors, loading, and what an answer does to it."""

from __future__ import annotations

import pytest

from tests.kit.sandbox_pair import judge, rows

FORGES = r"""
import os, stat
for fd in range(3, 60):
    try:
        stat.S_ISSOCK(os.fstat(fd).st_mode) and os.write(fd, b"\0\0\0\x02[]")
    except OSError:
        pass
"""


FLOODS = FORGES.replace(r"\0\0\0\x02[]", r"\0\x50\0\0")  # the head of a frame of 5 MiB
MEASURED = "def f(n): return [number * number for number in range(n)]"


def test_a_long_list_that_is_only_measured_travels() -> None:
    tests = ["assert len(f(200000)) == 200000", "for n in [200000]: assert sum(f(n)) == 2666646666700000"]
    for test in tests:
        assert rows(MEASURED, [test]) == [(True, "")]
    assert rows("def f(x): x.sort()", ["x = list(range(200000))\nf(x)\nassert x[-1] == 199999"]) == [(True, "")]


def test_a_value_beyond_the_limit_says_what_to_do_and_costs_its_own_test_only() -> None:
    tests = ["assert len(f(1000000)) == 1000000", "assert len(f(1500000)) == 1500000", "assert f(3) == [0, 1, 4]"]
    large, larger, small = judge(MEASURED, tests)["tests"]
    assert large[1] == larger[1] == "output" and "limits.output=4,194,304; raise it" in large[2]
    assert "test a smaller case" in larger[2] and small[0]
    assert rows(MEASURED, ["assert f(3) == [0, 1, 4]"], output=20) == [(False, "output")]


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("def f(:", "syntax_error"), ("def g(x): return x", "wrong_name"), ("import sys; sys.exit(0)", "exited"),
        ("1/0", "exception"), ("import os\nos._exit(0)", "lost"), ("def f(x):\n import os\n os._exit(0)", "lost"),
        ("def f(x): return object()", "opaque"), ("def f(x): raise ValueError('no')", "exception"),
        ("def f(x): raise SystemExit", "exited"), ("def f(x): return 3", "assertion"),
        ("class A:\n __eq__ = lambda s, o: True\ndef f(x): return A()", "opaque"),
        ("def f(x): return 'a' * (5 << 20)", "output"),
        (FORGES, "opaque"), (FLOODS, "output"),
        ("def f(x):\n while True: pass", "timeout"),
    ],
)  # fmt: skip
def test_an_answer_that_fails_gets_its_own_reason(solution: str, reason: str) -> None:
    assert rows(solution, ["assert f(1) == 2"], seconds=1.0) == [(False, reason)]


def test_an_answer_that_never_reads_costs_no_more_than_its_time() -> None:
    """The arguments are more than a socket holds: the writer must not wait for room for ever."""
    tests = [f"assert f({'x' * 2_000_000!r}) == 1", "for n in [1]: assert f(n) == 1"]
    for test in tests:
        assert rows("import time\ntime.sleep(1e6)", [test], seconds=0.5) == [(False, "timeout")]


def test_a_crash_costs_the_tests_from_there_on() -> None:
    solution = "import os\ndef f(x):\n if x == 2: os._exit(0)\n return x"
    assert rows(solution, [f"assert f({n}) == {n}" for n in (1, 2, 3)]) == [
        (True, ""),
        (False, "lost"),
        (False, "lost"),
    ]


def test_the_main_block_runs_only_in_a_program() -> None:
    source = "def f(): return 1\nif __name__ == '__main__': print(int(input()) + 1)"
    assert rows(source, ["assert f() == 1"]) == [(True, "")]
    assert rows(source, [{"input": "4\n", "output": "5"}], stdin="4\n") == [(True, "")]


def test_a_program_reads_much_and_writes_to_its_descriptor() -> None:
    source = "import os, sys\nos.write(1, b'%d \\n' % len(sys.stdin.read()))"
    assert rows(source, [{"input": "", "output": "300000"}], stdin="x" * 300_000) == [(True, "")]


def test_a_float_tolerance_holds_only_where_the_test_asks() -> None:
    test = {"input": "", "output": "0.3333"}
    assert judge("print(1/3)", [test], stdin="")["tests"][0][1] == "wrong_output"
    assert judge("print(1/3)", [{**test, "tolerance": 1e-3}], stdin="")["tests"][0][0]
