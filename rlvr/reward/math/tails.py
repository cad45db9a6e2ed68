"""What a sentence says after the formula that is its answer: a unit, a reason, or words that change the value.

`join_tail("5", " cm.")` is `5 cm`, `join_tail("5", " by symmetry")` is `5`, `join_tail("5", " over 6")` is None.
`python -m pytest tests/test_math_tails.py` exercises it.
"""

from __future__ import annotations

import re

from rlvr.reward.math.spelling import normalize
from rlvr.reward.math.units import PERCENT_SIGN, SCALES, unit_of
from rlvr.reward.math.values import read_value

_SCALED = rf"(?:{'|'.join(sorted(SCALES))})"
_COUNTED = (
    r"(?:zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen"
    rf"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|{_SCALED})"
)
_PARTS = r"(?:halves|thirds|quarters|(?:four|fif|six|seven|eigh|nin|ten|twelf|hundred|thousand|[bmtr]+illion)ths)"
# Words of arithmetic, of parts, and that take the number back.
_CHANGE = (
    rf"(?:plus|minus|divided|multiplied|raised|subtracted|added|squared|cubed|factorial|negative|{_PARTS}|{_COUNTED}"
    r"|reciprocal|inverse|repeating|over(?!\s+(?:the|all|a|an|that|this)\b)|times\s+[a-z]\b|to\s+the\s+power"
    rf"|and\s+(?:a|one)\b|a\s+half|in\s+(?:{_SCALED}s|{_PARTS})|(?:is\s+)?(?:wrong|incorrect|false)|is\s+not|isn't)\b"
)
_CHANGED = re.compile(rf"\b{_CHANGE}|[0-9$]|\\\(", re.IGNORECASE)
_CHANGED_IN_BRACKETS = re.compile(rf"\s*\(\s*{_CHANGE}", re.IGNORECASE)
# From here on the sentence speaks of something else: a reason, a place, a rounding.
_ELSEWHERE = re.compile(
    rf"[,(:=]|\b(?:by(?!\s+(?:[0-9$]|{_COUNTED}\b))|in(?!\s+(?:{_SCALED}s|{_PARTS})\b)|is(?!\s+(?:not|wrong|incorrect"
    r"|false)\b)|using|from|via|with|for|at|on|if|mod|modulo|given|assuming|between|during|within|before|until|while"
    r"|of\s+(?:the|all|these|those)|to\s+the\s+nearest|to\s+\S+\s+(?:decimal|significant|places)|rounded|correct)\b",
    re.IGNORECASE,
)
_IN_BASE = re.compile(r"\(?(?:in )?base[- ]\S+")


def join_tail(formula: str, tail: str) -> str | None:
    """The formula with the percent sign, unit, base or "million" after it; None where other words change its value.

    So `$5$ inches` is no answer 5 cm, `$5$ squared` none at all, and `$5$ by symmetry` is 5.
    """
    head = _ELSEWHERE.split(tail, 1)[0]
    for said in (normalize(tail), normalize(head)):
        unit = unit_of(said) if said else None
        known = unit is not None and unit[0] and (unit[1] or said.split()[0] in SCALES)
        if known or PERCENT_SIGN.fullmatch(said) or _IN_BASE.fullmatch(said):
            joined = f"{normalize(formula)} {said}"
            if read_value(joined) is not None:
                return joined
    return None if _CHANGED.search(head) or _CHANGED_IN_BRACKETS.match(tail) else formula
