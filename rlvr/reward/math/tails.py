"""What a sentence says after the formula or number that is its answer: words that belong to it, then a closing phrase.

`join_tail("5", " cm.")` is `5 cm`, `join_tail("5", " by symmetry")` is `5`. The phrases that may close the sentence are
listed here; whatever else stands there is read with the formula (`5 mod 3`), so it is an answer only as a unit, a
percent sign, a base or a factor of it.
"""

from __future__ import annotations

import re

from rlvr.reward.math.spelling import normalize
from rlvr.reward.math.units import NUMBER_WORDS, PERCENT_SIGN, unit_of
from rlvr.reward.math.values import read_value

_COUNTED = rf"(?:{'|'.join(sorted(NUMBER_WORDS))})s?\b"
# Words that say another value than the formula, or take it back; no clause of plain words has one.
_CHANGE = (
    rf"(?:{_COUNTED}|not?|never|nor|or|but|if|unless|except|instead|however|actually|wrong|incorrect|false|mistake[ns]?"
    r"|plus|minus|less|more|times|twice|thrice|doubled?|tripled?|add(?:ed|ing)?|subtract(?:ed|ing)?|multipl[a-z]+"
    r"|divi[a-z]+|powers?|squared?|cubed?|roots?|reciprocal|inverse|negative|opposite|complement|factorial|mod(?:ulo)?"
    r"|remainder|binary|octal|hexadecimal|base|percent(?:age)?|even|odd)\b"
)
_PLAIN_WORDS = rf"(?:(?!{_CHANGE})[a-z'\u2019-]+(?:[\s,]+|(?=[.*)])|$))+"
_NO_NUMBER = (  # `5 by 3`, `5 by a` and `5 from 20` say another value
    rf"(?!\s*(?:[-+0-9$\\]|(?!a\s)[a-z]\b|an?\s*[^\w\s]*$|a\s+factor|{_COUNTED}))"
)
_ASSIGNED = r"(?:\$\s*|\\\(\s*)?[a-z]\s*=\s*-?[0-9.]+(?:\s*\$|\s*\\\))?"
_PLACES = r"(?:\S{1,12}\s+(?:decimals?(?:\s+places?)?|significant\s+(?:figures|digits)|places)|the\s+nearest\s+[a-z ]+)"
_PHRASES = "|".join((
    r"because\b.*",
    r"since\b.*",
    r"as(?!\s+(?:well|many|much|few|long|a\s+(?:percentage|power|multiple))\b)\s.*",
    rf"(?:by|from){_NO_NUMBER}\s.*",
    r"(?:using|via|due\s+to)\s.*",
    rf"(?:which\s+(?:is|are|was)|where|after)\s+{_PLAIN_WORDS}",
    rf"for\s+(?=(?:the|this|that|these|those|each|every|all|a|an)\b){_PLAIN_WORDS}",
    rf"(?:for|at|when|where|if)\s+{_ASSIGNED}",
    r"in\s+(?:all|total|sum|the\s+end|(?:simplest|lowest|reduced|simplified)\s+(?:form|terms)|this\s+case)",
    r"is\s+(?:(?:the|our)\s+)?(?:correct|right|final|desired|required)?(?:\s*(?:answer|value|result))?",
    rf"(?:(?:when\s+)?(?:rounded|correct)\s+)?to\s+{_PLACES}",
    r"altogether|overall|exactly|only|total|left|remaining|left\s+over",
))  # fmt: skip
_CLOSING = re.compile(rf"(?:^|,? )(?:\((?:see\b[^()]*|{_PHRASES})\)|{_PHRASES})[ .,*]*$", re.IGNORECASE)
_IN_BASE = re.compile(r"\(?(?:in )?base[- ]\S+")


def join_tail(formula: str, tail: str) -> str | None:
    """The formula with the unit, percent sign, base or "million" after it, without the phrase that closes the sentence.

    None where other words follow: `$5$ mod 3` and `$5$ at most` are no answer 5.
    """
    tail = " ".join(tail.split())
    closing = _CLOSING.search(tail)
    said = normalize(tail[: closing.start()] if closing else tail).strip(" ,*")
    if not said:
        return formula
    unit = unit_of(said)
    if unit is None and not PERCENT_SIGN.fullmatch(said) and not _IN_BASE.fullmatch(said):
        return None
    joined = f"{normalize(formula)} {said}"
    if read_value(joined) is not None:
        return joined
    return formula if unit is not None and unit[0] and unit[1] else None
