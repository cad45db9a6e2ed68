"""What the exact comparison takes for equal, and what not, without math-verify."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.reward.math.algebra import TooLarge
from rlvr.reward.math.compare import Conventions, compare_answers

SAME = [
    ("\\frac{1}{2}", "0.5"),
    ("\\frac12", "1/2"),
    ("3\\frac{1}{2}", "7/2"),
    ("3 1/2", "3.5"),
    ("0.\\overline{3}", "1/3"),
    ("0.(3)", "\\frac13"),
    ("0.333...", "1/3"),
    ("1.2\\times10^{-3}", "0.0012"),
    ("1e-3", "0.001"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    ("10,\\!080", "10080"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
    ("−5", "-5"),
    ("½", "0.5"),
    ("3½", "3.5"),
    ("x²", "x^2"),
    ("√2", "\\sqrt{2}"),
    ("\\sqrt{8}", "2\\sqrt2"),
    ("\\frac{1}{\\sqrt2}", "\\frac{\\sqrt2}{2}"),
    ("\\frac{1}{1+\\sqrt2}", "\\sqrt2-1"),
    ("\\$36", "36"),
    ("\\$18.90", "18.9 dollars"),
    ("90^\\circ", "90"),
    ("90^\\circ", "90°"),
    ("90^\\circ", "90 degrees"),
    ("864 \\mbox{ inches}^2", "864 square inches"),
    ("864 \\mbox{ inches}^2", "864"),
    ("15\\mbox{ cm}^2", "15 cm^2"),
    ("5.4 \\text{ cents}", "5.4"),
    ("\\text{(C)}", "C"),
    ("\\text{(C)}", "(C)"),
    ("C", "(C)"),
    ("\\text{(C)}", "\\textbf{(C)} 42"),
    ("\\text{Evelyn}", "evelyn."),
    ("\\text{even}", "even"),
    ("\\{1\\pm\\sqrt{5},-2\\}", "\\{-2, 1+\\sqrt5, 1-\\sqrt5\\}"),
    ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}, 1-\\sqrt{19}"),
    ("1,-2", "-2, 1"),
    ("1,-2", "x=1 or x=-2"),
    ("1,-2", "-2 and 1"),
    ("(1,2)", "( 1 , 2 )"),
    ("(3,4]", "\\left(3,4\\right]"),
    ("x \\in [-2,7]", "-2 \\le x \\le 7"),
    ("(2,\\infty)", "x>2"),
    ("x>3", "3<x"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "x<2 or x>3"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "(3,\\infty)\\cup(-\\infty,2)"),
    ("52_8", "52_{8}"),
    ("42", "52_8"),
    ("52_8", "52"),
    ("2A_{16}", "2a_{16}"),
    ("\\frac{1}{2}", "\\sin 30^\\circ"),
    ("-\\frac{\\sqrt2}{2}", "\\cos(135°)"),
    ("\\sqrt3", "\\tan\\frac{\\pi}{3}"),
    ("(4, 7)", "(x, y) = (4, 7)"),
    ("(0,1)", "]0,1["),
    ("(0,1)\\cup(2,3)", "]2;3[ \\cup ]0;1["),
    ("-2", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}"),
    ("No", "no"),
    ("Maria", "\\textbf{Maria}"),
    ("72\\text{ km/h}", "72 \\frac{\\text{km}}{\\text{h}}"),
    ("5 \\text{ m}", "5 m"),
    ("5", "5 m"),
    ("5", "5 dollars per person"),
    ("5 \\text{ sheep}", "5 sheep"),
    ("P(A)=1/4", "1/4"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("6-5i", "-5i+6"),
    ("y = 2x + 3", "2x+3"),
    ("5x - 7y + 11z + 4 = 0", "-5x+7y-11z=4"),
    ("y=2x+3", "2x-y+3=0"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
    ("\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}", "\\begin{pmatrix}0.2\\\\-3.6\\end{pmatrix}"),
    ("50\\%", "50"),
    ("50\\%", "0.5"),
    ("50\\%", "\\frac12"),
    ("0.5", "50%"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\frac{x^2-1}{x-1}", "x+1"),
    ("\\pi", "π"),
    ("288 \\pi", "288π"),
    ("p - q", "-q+p"),
    ("\\frac{11+9a}{20}", "\\frac{9a}{20}+\\frac{11}{20}"),
    ("5!", "120"),
    ("2^{10}", "1024"),
    ("2^10", "1024"),
    ("\\cot x", "cot(x)"),
    ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}"),
    ("18.", "18"),
    ("$18$", "18"),
    ("\\boxed{18}", "18"),
    ("10 000", "10000"),
    ("\\sqrt[3]{-8}", "-2"),
    ("\\log_2 8", "3"),
    ("e^{2}", "e^2"),
    ("|-3|", "3"),
    ("(a+5)(b+2)", "ab+2a+5b+10"),
    ("137 \\frac{1}{2}", "137.5"),
    (".0000672", "6.72\\times 10^{-5}"),
    ("k=2", "2"),
    ("\\text{Navin}", "Navin"),
    ("12", "12 apples"),
    ("\\frac{\\pi}{4}", "0.25\\pi"),
    ("\\sin 30^\\circ", "\\sin 30^\\circ"),
    ("\\emptyset", "{}"),
    ("1 + 2i", "1+2\\mathrm{i}"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("-1\\frac{4}{5}", "-1.8"),
    ("x\\ne 3", "(-\\infty,3)\\cup(3,\\infty)"),
    ("1/3", "0.\\dot{3}"),
    ("3:4", "3:4"),
    ("12\\text{ m/s}", "12 meters per second"),
    ("1010_2", "1010_{two}"),
    ("(1,2),(3,4)", "(3,4), (1,2)"),
    ("2^{-1}", "0.5"),
    ("sin(x)", "\\sin x"),
    ("\\text{no solution}", "No solution"),
    ("100 cm", "100\\text{ cm}"),
    ("-1", "e^{i\\pi}"),
    ("0", "e^{i\\pi}+1"),
    ("-1", "e^{\\pi i}"),
    ("e^{i\\pi}", "-1"),
    ("\\frac{1}{2}+\\frac{\\sqrt3}{2}i", "e^{i\\pi/3}"),
    ("\\frac{1}{2}+\\frac{\\sqrt3}{2}i", "e^{\\frac{\\pi i}{3}}"),
    ("i", "e^{i\\pi/2}"),
    ("1", "e^{2\\pi i}"),
    ("i", "\\exp(i\\pi/2)"),
    ("-1", "e^{3i\\pi}"),
    ("2i", "2e^{i\\pi/2}"),
    ("1+i", "\\sqrt2 e^{i\\pi/4}"),
    ("-1", "e^{-i\\pi}"),
    ("(3,-1)", "x=3, y=-1"),
    ("(3,-1)", "y=-1, x=3"),
    ("(3,-1)", "x=3 and y=-1"),
    ("(1,2,3)", "x=1,y=2,z=3"),
    ("x=3, y=-1", "(3,-1)"),
    ("(x,y)=(3,-1)", "x = 3, y = -1"),
    ("12", "12 sheep"),
    ("3", "3 fish"),
    ("7", "7 mice"),
    ("12 \\text{ sheep}", "12"),
    ("4", "4 geese"),
    ("[1,3]", "[1,2] \\cup [2,3]"),
    ("[1,3]", "[1,2)\\cup[2,3]"),
    ("(-\\infty,\\infty)", "(-\\infty,1]\\cup(1,\\infty)"),
    ("[1,2]\\cup[2,3]", "[1,3]"),
    ("(0,3)", "(0,2)\\cup(1,3)"),
    ("\\mathbb{R}", "x<1 or x\\ge 1"),
    ("(1,2]", "(1,2)\\cup\\{2\\}"),
    ("[0,\\pi]", "[0,\\sqrt2]\\cup[\\sqrt{2},\\pi]"),
    ("(0,1)\\cup\\{2\\}", "\\{2\\}\\cup(0,1)"),
    ("(-\\infty,1)\\cup[1,\\infty)", "x<1 or x>=1"),
    ("[0,2)", "x \\in [0,1]\\cup[1,2)"),
]
DIFFERENT = [
    ("1/3", "0.333333"),
    ("1/3", "0.3333333333"),
    ("52_8", "42"),
    ("1010", "1010_2"),
    ("1010_2", "1010_3"),
    ("\\sin 1", "0.8414709848"),
    ("0.8414709848", "\\sin 1"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}"),
    ("P(A)=1/4", "P(B)=1/4"),
    ("[0,1]", "]0,1["),
    ("72\\text{ km/h}", "72 \\frac{\\text{m}}{\\text{s}}"),
    ("5m", "5"),
    ("x>3", "y>3"),
    ("\\{1,2\\}", "\\{1,2\\} or 1"),
    ("x^2+y^2=25", "x^2+y^2-25=0 is wrong"),
    ("5", "not x=5"),
    ("\\{0\\}", "not \\left\\{0\\right\\}"),
    ("(4, 7)", "(y, x) = (4, 7)"),
    ("5", "5x"),
    *(
        ("5", f"5{words}")
        for words in (
            " is wrong",
            " or so",
            " maybe seven",
            " million",
            " halves",
            " squared",
            " plus ten",
            " or 6",
            " no wait",
            "\\text{ is wrong}",
            "\\text{ or six}",
            "\\text{ million}",
            "\\text{ less than zero}",
            " of twelve",
        )
    ),
    *(("5", f"{words}5") for words in ("not ", "\\text{not }", "minus ", "\\text{anything but }", "6 or ")),
    *(("(A)", answer) for answer in ("A) is wrong", "(A) \\text{is wrong, so B}", "A. or B.", "(A) and (B)", "A, B")),
    ("1,2", "12"),
    ("(1,2)", "(2,1)"),
    ("[0,1)", "[0,1]"),
    ("(0,1)", "[0,1]"),
    ("5", "6"),
    ("5 \\text{ cm}", "5 m"),
    ("5 \\text{ cm}", "5 inches"),
    ("\\text{(C)}", "(D)"),
    ("C", "D"),
    ("even", "odd"),
    ("\\text{Evelyn}", "Evan"),
    ("1,-2", "1"),
    ("1", "1,-2"),
    ("1,-2", "1,2"),
    ("x>3", "x\\ge3"),
    ("x>3", "x<3"),
    ("x=5", "y=5"),
    ("\\sqrt2", "1.41421356"),
    ("3\\frac12", "3/2"),
    ("0.3", "0.\\overline3"),
    ("0.\\overline{3}", "0.3"),
    ("10^{-6}", "0"),
    ("0.0000001", "0.0000002"),
    ("x+1", "x+2"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
    ("1+2i", "1-2i"),
    ("\\pi", "3.14159265"),
    ("90", "0.9"),
    ("5", "5 or 6"),
    ("\\{1,2\\}", "\\{1,2,3\\}"),
    ("(1,2,3)", "(1,2)"),
    ("12", "1 2"),
    ("3.0000001", "3"),
    ("y=2x", "y=3x"),
    ("2^{1/2}", "2"),
    ("\\$5", "€5"),
    ("30^\\circ", "\\frac{\\pi}{6}"),
    ("\\sin x", "\\cos x"),
    ("(1,2)", "1,2"),
    ("x^2", "x^3"),
    ("12", "12/0"),
    ("100", "1e"),
    ("1000000", "1000001"),
    ("5", "-5"),
    ("\\text{yes}", "no"),
    ("16", "2^{2^{2^{2^{9}}}}"),
    ("16", "9^9^9^9"),
    ("120", "100000!"),
    ("\\frac{3}{4}", "3 : 4"),
    ("16", "1/0"),
    ("1", "e^{i\\pi}"),
    ("-1", "e^{i}"),
    ("-1", "e^{\\pi}"),
    ("-1", "e^{2i\\pi}"),
    ("1+i", "e^{i\\pi/4}"),
    ("i", "e^{-i\\pi/2}"),
    ("-1", "e^{i\\pi x}"),
    ("(3,-1)", "x=-1, y=3"),
    ("(3,-1)", "x=3"),
    ("(3,-1)", "x=3, z=-1"),
    ("(3,-1)", "a=3, b=-1"),
    ("(3,-1)", "x=3, y=-1, z=0"),
    ("(3,-1)", "3, -1"),
    ("[3,-1]", "x=3, y=-1"),
    ("(3,-1)", "x=3, x=-1"),
    ("x=3,y=-1", "(-1,3)"),
    ("(3,-1)", "x=3, y=-1 cm, z"),
    ("(3,3)", "x=3"),
    ("12", "12 wrong"),
    ("12", "12 sock"),
    ("12", "12 million"),
    ("12", "12 maybe"),
    ("12", "13 sheep"),
    ("12 sheep", "12 fish"),
    ("12", "12 sheepish"),
    ("(0,2)", "(0,1)\\cup(1,2)"),
    ("[1,3]", "[1,2], [2,3]"),
    ("(-\\infty,\\infty)", "(-\\infty,1], [1,\\infty)"),
    ("[1,3]", "[1,2]\\cup[3,3]"),
    ("[1,3)", "[1,2]\\cup[2,3]"),
    ("(1,3]", "[1,2]\\cup[2,3]"),
    ("(-\\infty,1],[1,\\infty)", "(-\\infty,0],[0,\\infty)"),
    ("(-\\infty,1],[1,\\infty)", "(-\\infty,\\infty)"),
    ("[1,3]", "[1,2]\\cup[2.0000001,3]"),
    ("(1,3]", "(1,2)\\cup\\{3\\}"),
    ("[a,c]", "[a,b]\\cup[b,c]"),
    ("(0,1)\\cup(2,3)", "(0,1)\\cup\\{2\\}\\cup(2,3)"),
    ("[0,2]", "[0,\\sqrt2]\\cup[1.41421356237309505,2]"),
]


def verdict(gold: str, answer: str, **conventions: str) -> bool | None:
    try:
        return compare_answers(gold, answer, Conventions(**conventions))
    except TooLarge:
        return False


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_the_same_value_in_another_form(gold, answer):
    assert verdict(gold, answer) is True


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_another_value(gold, answer):
    assert verdict(gold, answer) is False


@pytest.mark.parametrize(
    ("gold", "answer", "conventions", "expected"),
    [
        ("50\\%", "50", {"percent": "exact"}, False),
        ("50\\%", "0.5", {"percent": "exact"}, True),
        ("50\\%", "0.5", {"percent": "ignore"}, False),
        ("50\\%", "50", {"percent": "ignore"}, True),
        ("1/3", "0.33", {"decimals": "rounded"}, True),
        ("1/3", "0.34", {"decimals": "rounded"}, False),
        ("1/3", "0.3", {"decimals": "rounded"}, False),  # one decimal is too few
        ("\\sqrt2", "1.4142", {"decimals": "rounded"}, True),
        ("5 cm", "5", {"units": "required"}, False),
        ("5 cm", "5 inches", {"units": "ignored"}, True),
    ],
)
def test_conventions_can_be_chosen(gold, answer, conventions, expected):
    assert verdict(gold, answer, **conventions) is expected


def test_inequalities_joined_by_and_are_not_a_list_of_solutions():
    """`x<2 and x>3` holds nowhere; `x<2 or x>3` is the union."""
    gold = "(-\\infty,2)\\cup(3,\\infty)"
    assert verdict(gold, "x<2 \\text{ or } x>3") is True
    assert verdict(gold, "x<2 \\text{ and } x>3") is not True


@pytest.mark.parametrize(
    "answer", ["10_\u0662", "\u0661\u0660_2", "1_0_2", "2^\u0661", "\\sqrt\u0664", "\\frac\u06641"]
)
def test_digits_of_other_scripts_are_no_numbers(answer):
    """`int` reads them. Full-width digits are: NFKC makes them the digits of ASCII, in the reference too."""
    assert verdict("2", answer) in (False, None)


@pytest.mark.parametrize("pair", [("\\sin 2x", "2\\sin x\\cos x"), ("\\sin^2 x+\\cos^2 x", "1")])
def test_a_pair_without_a_normal_form_is_undecided(pair):
    assert verdict(*pair) is None


PARTS = ["12", "0.5", "\\frac{3}{4}", "\\sqrt{7}", "x", "\\pi", "2^{5}", "(x+3)", "5!", "x^2", "1.25", "\\log_2 9"]
FORMULAS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).flatmap(
    lambda parts: st.lists(
        st.sampled_from(["+", "-", "\\cdot "]), min_size=len(parts) - 1, max_size=len(parts) - 1
    ).map(lambda signs: parts[0] + "".join(sign + part for sign, part in zip(signs, parts[1:], strict=True)))
)


@given(FORMULAS, FORMULAS)
def test_equality_is_reflexive_and_symmetric(a, b):
    assert verdict(a, f"{{{a}}}+0") in (True, None)
    assert verdict(a, b) == verdict(b, a)


@given(FORMULAS, st.integers(1, 9))
def test_a_value_changed_by_a_whole_number_is_never_equal(formula, change):
    assert verdict(formula, f"{formula}+{change}") is not True


ENDS = st.integers(0, 6)
PIECES = st.lists(
    st.tuples(ENDS, ENDS, st.booleans(), st.booleans()).filter(lambda p: p[0] < p[1]), min_size=1, max_size=4
)


def holds(pieces, x):
    return any(
        low < x < high or (x == low and closed_low) or (x == high and closed_high)
        for low, high, closed_low, closed_high in pieces
    )


@given(PIECES, PIECES)
def test_unions_are_equal_exactly_where_they_hold_the_same_points(a, b):
    """Ends are whole numbers, so the ends and the middles between them tell all unions apart."""
    written = ["\\cup".join(f"{'(['[c]}{low},{high}{')]'[d]}" for low, high, c, d in pieces) for pieces in (a, b)]
    points = [x / 2 for x in range(-1, 14)]
    assert compare_answers(*written, Conventions()) is all(holds(a, x) == holds(b, x) for x in points)


@given(PIECES, st.data())
def test_a_union_does_not_depend_on_how_it_is_cut(pieces, data):
    cut = []
    for low, high, closed_low, closed_high in pieces:
        at = data.draw(st.sampled_from([low + (high - low) / 4, (low + high) / 2]))
        left = data.draw(st.booleans())  # the point itself is in one of the two, or in both
        cut += [(low, at, closed_low, left), (at, high, not left or data.draw(st.booleans()), closed_high)]
    order = data.draw(st.permutations(cut))
    gold, answer = (
        "\\cup".join(f"{'(['[c]}{low},{high}{')]'[d]}" for low, high, c, d in some) for some in (pieces, order)
    )
    assert compare_answers(gold, answer, Conventions()) is True
