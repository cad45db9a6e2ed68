"""Whether math-verify would drop a part of a text and judge the rest: `\\ne 5` and `5 \\\\ 6` are 5 to it.

Only text that math-verify computes with from end to end is handed over. So this lists the commands that may stand in
it; any other command is refused. `python -m pytest tests/test_math_verify.py` exercises it.
"""

from __future__ import annotations

import re

from rlvr.reward.math.spelling import normalize

_FUNCTIONS = "log ln exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh int sum prod lim max min gcd"
_BETWEEN = "cdot times div pm mp to cup cap newline over choose"  # something has to stand on their right
_COMPUTED = frozenset(
    f"{_FUNCTIONS} {_BETWEEN} frac sqrt pi infty binom circ lfloor rfloor lceil rceil "
    "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi "
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega "
    "lbrace rbrace langle rangle emptyset mathbb begin end le ge ne in".split()
)
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_MATRIX = re.compile(r"\\begin\{([a-zA-Z]?matrix|array)\}.*?\\end\{\1\}")
_STARTS = re.compile(
    rf"[*/^_,;:&|!'%]|\\(?:{'|'.join(_BETWEEN.replace(' pm', '').split())}|circ|pmod|bmod|mod)(?![A-Za-z])"
)
_STOPS = re.compile(rf"(?:[-+*/^_,;:&]|\\(?:{'|'.join((_BETWEEN + ' frac sqrt binom ' + _FUNCTIONS).split())}))\s*$")
_BARE = re.compile(r"\\(?:sum|prod|lim|max|min|gcd)(?!\s*[_(]|[A-Za-z])")  # of nothing
_RELATION = re.compile(r"[<>=~]|\\(?:le|ge|ne|in)(?![A-Za-z])")
_BELOW = re.compile(r"_\s*\{[^{}]*\}")  # `k = 1` under a sum
_NAMED = re.compile(r"^[A-Za-z](?:\([a-z]\))?\s*=")
_BUT = re.compile(r"^\\mathbb\s*\{R\}\s*\\(?:setminus|backslash)(?=\s*\\lbrace)")  # the one difference that is computed
# Infinity as a number, of which it says that its power of 0 is 1; not the end of a sum, an integral or a limit.
_INFINITE = re.compile(r"(?<![_^])(?<![_^]\{)(?<![_^]\{[-+])(?<!\\to)(?<!\\to )(?<!\\to[-+])(?<!\\to [-+])\\infty")
_BOUND = re.compile(r"(\\(?:sum|prod|int)\s*_\s*(?:\{[^{}]*\}|\w)\s*\^\s*)\\infty")  # what follows is under the sum
# `120^5\circ`, `145\pm^\circ`: a sign of degrees stands behind a number, alone in its exponent.
_NO_DEGREES = re.compile(
    r"\^\s*\{?[^\s{}\\]+\s*\\circ|(?<![\^{0-9\s])\s*\\circ|\\circ\s*\^"
    rf"|\\(?:{'|'.join((_BETWEEN + ' ' + _FUNCTIONS).split())})\s*\^?\s*\\circ"
)
_DROPPED = (  # unless the other side has it, too
    re.compile("[%#&?]"),
    re.compile(r"'|\.\.\."),
    re.compile(r"\^\s*\{?\s*[cC](?![A-Za-z])"),  # a complement
    _NO_DEGREES,
    re.compile(r"\\infty\s*[0-9A-Za-z({]|[0-9)}]\s*\\infty"),
    re.compile(r"(?<![\\A-Za-z])(?:and|or|not|no|is|but|if|[A-Za-z]{5,})(?![A-Za-z])"),
)


def drops_part(text: str, other: str) -> bool:
    """Whether math-verify, comparing `text` with `other`, would ignore a part of it."""
    if "\\phantom" in text or "\\hspace" in text:
        return True
    text, other = (_BOUND.sub(r"\1{\\infty}", normalize(one)) for one in (text, other))
    if text.count("$") > 1:
        return True  # formulas in prose: it would take one of them
    outside, others = _MATRIX.sub("M", text), _MATRIX.sub("M", other)
    if set(_COMMAND.findall(_BUT.sub("", text))) - _COMPUTED or "\\newline" in outside:
        return True
    if re.search(r"%[\s{}]*%", text) or _STARTS.match(text) or _STOPS.search(text) or _BARE.search(text):
        return True
    if any(text.count("\\l" + name) != text.count("\\r" + name) for name in ("floor", "ceil")):
        return True
    if any(sign.search(outside) and not sign.search(others) for sign in _DROPPED):
        return True
    if other.startswith(("(", "[", "]", "\\lbrace", "\\mathbb")) or "\\cup" in other:
        return False  # a set, which relations may describe as well
    if _INFINITE.search(text) and "\\infty" not in other and not _RELATION.search(other):
        return True
    related = set(_RELATION.findall(_NAMED.sub("", _BELOW.sub("", text))))
    return bool(related - set(_RELATION.findall(other))) or "\\cup" in text or "\\cap" in text
