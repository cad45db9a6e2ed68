"""Whether math-verify would drop a part of an answer and judge the rest: `\\ne 5` and `5 \\\\ 6` are 5 to it.

Only an answer of which all is computed with is handed over, so the list is one of what may stand in it, and whatever is
not in it is refused. `python -m pytest tests/test_math_peer.py` exercises it.
"""

from __future__ import annotations

import re

from rlvr.reward.math.spelling import spelled

_COMPUTED = frozenset(
    (
        "frac sqrt cdot times div pm mp pi infty binom choose over int sum prod lim to circ pmod bmod mod "
        "log ln exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh max min gcd lfloor rfloor lceil rceil "
        "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi "
        "psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega "
        "lbrace rbrace langle rangle cup cap emptyset mathbb begin end newline le ge ne in"
    ).split()
)
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_MATRIX = re.compile(r"\\begin\{([a-zA-Z]?matrix|array)\}.*?\\end\{\1\}")
_FUNCTION = r"\\(?:log|ln|exp|sin|cos|tan|cot|sec|csc|arc(?:sin|cos|tan)|sinh|cosh|tanh|max|min|gcd|int|sum|prod|lim)"
_ENDS = re.compile(
    r"[*/^_,;:&|!'%]|\\(?:cdot|times|div|to|circ|pmod|bmod|mod|cup|cap|newline|over|choose|mp)(?![A-Za-z])"
    r"|.*(?:[-+*/^_,;:&]|\\(?:cdot|times|div|pm|mp|to|cup|cap|newline|over|choose)\s*|" + _FUNCTION + r"\s*)$"
)
_RELATION = re.compile(r"[<>=~]|\\(?:le|ge|ne|in)(?![A-Za-z])")
_NAMED = re.compile(r"[A-Za-z](?:\([a-z]\))?\s*=")
_OPERATIONS = (  # signs that stand for what math-verify does not do
    re.compile("[%#&?]"),
    re.compile(r"'|\.\.\."),
    re.compile(r"\^\s*\{?\s*[cC](?![A-Za-z])"),  # a complement
    re.compile(r"\\(?:sum|prod|lim|max|min|gcd)(?!\s*[_(]|[A-Za-z])"),  # of nothing
    re.compile(r"(?<![\\A-Za-z])(?:and|or|not|no|is|but|if|[A-Za-z]{5,})(?![A-Za-z])"),
    re.compile(r"\\infty\s*[0-9A-Za-z({]|[0-9)}]\s*\\infty"),  # infinitely many times
)


def loses(gold: str, answer: str) -> bool:
    """Whether a part of this answer has no meaning to math-verify, where the gold does not hold the same sign."""
    if "\\phantom" in answer or "\\hspace" in answer:
        return True
    wanted, text = spelled(gold), spelled(answer)
    outside, gold_outside = (_MATRIX.sub("M", side) for side in (text, wanted))
    if set(_COMMAND.findall(text)) - _COMPUTED or "\\newline" in outside or _ENDS.match(text):
        return True
    if any(text.count("\\l" + name) != text.count("\\r" + name) for name in ("floor", "ceil")):
        return True
    if any(sign.search(outside) and not sign.search(gold_outside) for sign in _OPERATIONS):
        return True
    related = set(_RELATION.findall(_NAMED.sub("", text, count=1) if _NAMED.match(text) else text))
    is_set = wanted.startswith(("(", "[", "]", "\\lbrace", "\\mathbb")) or "\\cup" in wanted
    if is_set:  # which an inequality may describe as well
        return False
    return bool(related - set(_RELATION.findall(wanted))) or "\\cup" in text or "\\cap" in text
