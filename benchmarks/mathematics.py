"""Final answers compared a second: the reward `math` beside math-verify, each on one core.

Without `--data` every turn reads new answers of a few forms, so that no cache of either side helps. `--data FILE` takes
rows of MATH-500 (`solution`, `answer`) or of GSM8K (`answer` with `####`), and compares each solution with its own gold
answer and with that of the next row; our caches are cleared before each turn. `test_math_verify.py` checks that
both agree; here each side reports the share that it called right. Run by `rlvr bench mathematics`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count as numbers

from benchmarks.measure import BenchmarkCase, BenchSettings, Turn, TurnResult
from benchmarks.workloads import read_rows
from rlvr.core import rng

Grader = Callable[[str, str], bool]  # of a response and the gold answer
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


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    if setting.data is not None:
        work = f"{setting.data.name}: solutions compared with"
        return [
            BenchmarkCase(
                name,
                "answers",
                f"{work} {gold}",
                partial(ours_on_rows, setting, shift),
                {"math-verify": partial(peer_on_rows, setting, shift)},
            )
            for shift, (name, gold) in enumerate((("own gold", "their gold"), ("next gold", "the next row's gold")))
        ]
    count = 60 if setting.quick else 400
    return [
        BenchmarkCase(
            name,
            "answers",
            f"{count} right answers of {len(KINDS[name])} forms, {name}",
            partial(ours, name, count),
            {"math-verify": partial(peer, name, count)},
        )
        for name in KINDS
    ]


def pairs(kind: str, count: int, turn: int) -> list[tuple[str, str]]:
    """(response, gold) pairs, new ones in every turn."""
    answers: list[tuple[str, str]] = []
    for index in range(count):
        forms = KINDS[kind]
        a, b, n = (2 + rng.integer(900, rng.key("bench-math", turn, index, i)) for i in range(3))
        if kind == "expressions":
            b, n = 2 * a + 1, a + n  # a / b has no shorter form; an interval's end lies beyond its begin
        response, gold = (text.format(a=a, b=b, n=n) for text in forms[index % len(forms)])
        answers.append((response, gold))
    return answers


def read_pairs(setting: BenchSettings, shift: int) -> list[tuple[str, str]]:
    """(response, gold) pairs of the file, each response with the gold answer of the row `shift` below it."""
    assert setting.data is not None
    rows = read_rows(setting.data, {"answer"}, "rows of MATH-500 (solution, answer) or GSM8K (answer)")
    rows = rows[: 60 if setting.quick else 500]
    golds = [row["answer"].rpartition("####")[2].strip() for row in rows]
    responses = [
        row.get("solution") or f"{row['answer']}\n\\boxed{{{gold}}}" for row, gold in zip(rows, golds, strict=True)
    ]
    return list(zip(responses, golds[shift:] + golds[:shift], strict=True))


def ours(kind: str, count: int) -> Turn:
    turns = numbers()
    return partial(_grade, _our_grader(), lambda: pairs(kind, count, next(turns)))


def peer(kind: str, count: int) -> Turn:
    turns = numbers()
    return partial(_grade, _peer_grader(), lambda: pairs(kind, count, next(turns)))


def ours_on_rows(setting: BenchSettings, shift: int) -> Turn:
    from rlvr.reward.math.spelling import normalize
    from rlvr.reward.math.values import read_value

    rows = read_pairs(setting, shift)

    def clear_caches() -> list[tuple[str, str]]:
        normalize.cache_clear()
        read_value.cache_clear()
        return rows

    return partial(_grade, _our_grader(), clear_caches)


def peer_on_rows(setting: BenchSettings, shift: int) -> Turn:
    rows = read_pairs(setting, shift)
    return partial(_grade, _peer_grader(), lambda: rows)


def _our_grader() -> Grader:
    from rlvr.reward import resolve_reward

    reward = resolve_reward("math")
    return lambda response, gold: reward("", response, {"answer": gold}) == 1.0


def _peer_grader() -> Grader:
    from math_verify import parse, verify

    return lambda response, gold: verify(parse(f"${gold}$"), parse(response))


def _grade(grader: Grader, given: Callable[[], list[tuple[str, str]]]) -> TurnResult:
    rows = given()
    right = sum(grader(response, gold) for response, gold in rows)
    return TurnResult(len(rows), facts={"share called right": right / len(rows)})
