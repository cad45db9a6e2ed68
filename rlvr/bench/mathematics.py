"""Final answers compared a second: the reward `math` beside math-verify, each on one core.

Every turn reads answers that nobody has read before, so no cache of either side helps. What both must agree on is held
by `tests/test_math_peer.py`; here each says how many it called right. Exercised by `rlvr bench mathematics` and
`tests/test_bench_cases.py`. Left out on purpose: data sets (`python benchmarks/mathematics.py --math500 FILE`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count as numbers

from rlvr import draws
from rlvr.bench.measure import Case, Done, Setting, Turn

# A kind's answer, as a model might write it, and the gold; {a}, {b}, {n} are whole numbers.
KINDS = {
    "numbers": [
        ("So 3 + {a} = {n} and the total is \\boxed{{{n}}}.", "{n}"),
        ("Each costs \\${a}, so we pay\n\\boxed{{{n},000}}", "{n}000"),
        ("The answer is \\boxed{{{a}.50}}", "{a}.5"),
    ],
    "expressions": [
        ("Hence $x = \\frac{{{a}}}{{{b}}}$, so \\boxed{{\\dfrac{{{a}}}{{{b}}}}}", "\\frac{{{a}}}{{{b}}}"),
        ("We get \\boxed{{{a}x^2 + {b}x + {n}}}", "{n} + {b}x + {a}x^2"),
        ("The solutions are \\boxed{{\\left({a}, \\sqrt{{{b}}}\\right)}}", "({a},\\sqrt{{{b}}})"),
        ("in the interval \\boxed{{[{a}, {n})}}", "[{a},{n})"),
    ],
}


def cases(setting: Setting) -> list[Case]:
    count = 60 if setting.quick else 400
    return [
        Case(
            name,
            "answers",
            f"{count} right answers of {len(KINDS[name])} forms, {name}",
            partial(ours, name, count),
            {"math-verify": partial(peer, name, count)},
        )
        for name in KINDS
    ]


def pairs(kind: str, count: int, turn: int) -> list[tuple[str, str]]:
    """(response, gold), others in every turn."""
    made: list[tuple[str, str]] = []
    for index in range(count):
        forms = KINDS[kind]
        a, b, n = (2 + draws.integer(900, draws.key("bench-math", turn, index, i)) for i in range(3))
        if kind == "expressions":
            b, n = 2 * a + 1, a + n  # a / b has no shorter form; an interval's end lies beyond its begin
        response, gold = (text.format(a=a, b=b, n=n) for text in forms[index % len(forms)])
        made.append((response, gold))
    return made


def ours(kind: str, count: int) -> Turn:
    from rlvr.reward import resolve_reward

    reward = resolve_reward("math")
    return _turn(kind, count, lambda response, gold: reward("", response, {"answer": gold}) == 1.0)


def peer(kind: str, count: int) -> Turn:
    from math_verify import parse, verify

    return _turn(kind, count, lambda response, gold: verify(parse(f"${gold}$"), parse(response)))


def _turn(kind: str, count: int, grade: Callable[[str, str], bool]) -> Turn:
    turns = numbers()

    def turn() -> Done:
        given = pairs(kind, count, next(turns))
        right = sum(grade(response, gold) for response, gold in given)
        return Done(count, facts={"share called right": right / count})

    return turn
