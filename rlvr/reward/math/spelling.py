"""Normalize the spelling of answers: unicode signs, TeX spacing and wrappers, thousands separators.

Nothing here knows what an answer means.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2010": "-", "\u2011": "-", "\ufe63": "-", "\uff0d": "-",
    "\u00d7": "\\times ", "\u22c5": "\\cdot ", "\u00b7": "\\cdot ", "\u2217": "*", "\u00f7": "/", "\u2215": "/",
    "\u2044": "/", "\u00b1": "\\pm ", "\u2213": "\\mp ", "\u221e": "\\infty ", "\u03c0": "\\pi ", "\u2264": "\\le ",
    "\u2265": "\\ge ", "\u2260": "\\ne ", "\u2248": "\\approx ", "\u2208": "\\in ", "\u222a": "\\cup ",
    "\u2205": "\\emptyset ", "\u00b0": "^\\circ ", "\u2218": "^\\circ ", "\u221a": "\\sqrt ", "\u221b": "\\sqrt[3]",
    "\u27e8": "\\langle ", "\u27e9": "\\rangle ", "\u2026": "\\ldots ", "\u2009": "\\,", "\u202f": "\\,",
    "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2032": "'", "\u03b8": "\\theta ", "\u211d": "\\mathbb{R}",
    "\u03b1": "\\alpha ", "\u03b2": "\\beta ", "\u03bb": "\\lambda ", "\u2227": " and ", "\u2228": " or ",
    "\u2192": "\\to ", "\u0305": "", "\u200b": "", "\u2060": "", "\ufeff": "",
}  # fmt: skip
_SIGN = re.compile("[" + "".join(map(re.escape, _SIGNS)) + "]")
_SUPER = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f", "0123456789+-n"
)
_SUPERS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_SUB = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789")
_SUBS = re.compile("[\u2080-\u2089]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_NOTHING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|small|normalsize|[lL]arge|LARGE|[hH]uge|limits|!|;|:|>|quad|qquad|hspace\{[^{}]*\}|phantom\{[^{}]*\})"
    r"(?![A-Za-z])|\\,"
)
_UNIT_FRACTION = r"\\frac\s*\{\s*\\text\{([^{}\\]{1,40})\}\s*\}\s*\{\s*\\text\{([^{}\\]{1,40})\}\s*\}"
_FUNCTION_NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|cis|log|ln|exp"
_RENAMED = (
    (re.compile(r"\\math(?:rm|bf|it)\s*\{([eix])\}"), r"\1"),
    (re.compile(r"(?<![0-9}])\\(?:math|text)(?:rm|bf|it)\s*\{([0-9.]+)\}(?![\s]*[0-9\\{])"), r"\1"),
    (re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)\s+(\w|[^{}\\\w]*)\s*\}"), r"\1"),
    (re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)\s+([^{}\\]*)\}"), r"\\text{\1}"),
    (re.compile(rf"\\(?:operatorname|text|mathrm)\s*\{{\s*({_FUNCTION_NAMES})\s*\}}"), r"\\\1 "),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log "),
    (re.compile(r"\\(?:mathbf|Bbb)\s*\{\s*R\s*\}|\\(?:R|Reals)(?![A-Za-z])"), r"\\mathbb{R}"),
    (re.compile(r"\\text\s*\{\s*infinity\s*\}"), r"\\infty "),
    (re.compile(r"\\text\s*\{\s*base\s*\}"), " base "),
    (re.compile(r"\\(?:[dtc]|nice|s)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\backslash(?![A-Za-z])"), r"\\setminus "),
    (re.compile(r"\\(?:[mh]box|text(?:rm|bf|it|sf|tt|normal)|math(?:rm|bf|it|sf)|operatorname)\s*\{"), r"\\text{"),
    (re.compile(_UNIT_FRACTION), r"\\text{\1/\2}"),
    (re.compile(r"\\leqs?lant(?![A-Za-z])|\\leqq?(?![A-Za-z])|<=|\u2a7d"), r"\\le "),
    (re.compile(r"\\geqs?lant(?![A-Za-z])|\\geqq?(?![A-Za-z])|>=|\u2a7e"), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:degrees?|textdegree)(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}"), r"^\\circ "),
    (re.compile(r"\\(?:lbrace(?![A-Za-z])|\{)"), r"\\lbrace "),
    (re.compile(r"\\(?:rbrace(?![A-Za-z])|\})"), r"\\rbrace "),
    (re.compile(r"\\in(?![A-Za-z])\s*"), r"\\in "),
    (re.compile(r"\\(?:lbrack)(?![A-Za-z])"), "["),
    (re.compile(r"\\(?:rbrack)(?![A-Za-z])"), "]"),
    (re.compile(r"\\[lr]vert(?![A-Za-z])|\\(?:mid|vert)(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), " or "),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), " and "),
    (re.compile(r"\\text\{\s*(and|or)\s*\}"), r" \1 "),
    (re.compile(r"\\dots(?![A-Za-z])|\\cdots(?![A-Za-z])"), r"\\ldots "),
    (re.compile(r"\\(?:varnothing)(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{:\}"), ":"),
    (re.compile(r"\\text\{\s*([\u00a2\u00a3\u00a5\u20ac])\s*\}"), r"\1"),
    (re.compile(r"\\(?:euro|texteuro)(?![A-Za-z])"), "\u20ac"),
    (re.compile(r"\\(?:pounds|textsterling)(?![A-Za-z])"), "\u00a3"),
    (re.compile(r"\*\*(?=\s*[-+({]?\s*[0-9A-Za-z])"), "^"),
)  # fmt: skip
_ROWS = re.compile(r"\\\\(?:\[[^\]\\]{0,20}\])?")
_THIN = re.compile(r"(?<=[0-9])(?:\{,\}|,\s*\\!\s*|\\,|\\ |'|\u00a0|_)(?=[0-9]{3}(?![0-9]))")
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_SPACED = re.compile(r"[-+]?\$?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'))
_MARK = re.compile(
    r"\\(?:boxed|fbox|underline|emph|ensuremath|boldsymbol|bm|pmb|mathbf|mathrm|mathit|mathsf|textbf|textit)\s*\{"
    r"|\\(?:text)?color\s*\{[A-Za-z!0-9]{1,30}\}\s*\{?|\{(?=\s*\\color\s*\{)"
)
_PARENS = re.compile(r"(?<!\\)\\\(\s*|\s*(?<!\\)\\\)")
# `$125$ miles`, `$x = 1$, $y = 2$`. Beside a number or another formula the signs stay: "$1$ $234$" is not 1 234. They
# are dollars where a space stands within: "$5 and $6".
_INLINE = re.compile(
    r"(?<![0-9$\\])(?<![0-9$] )(?<!\\[,!;:])\$(?!\s)((?:[^$\\]|\\.)+)(?<!\s)\$"
    r"(?=\s*(?:$|[,;:%)=~A-Za-z]|\.(?![0-9])|\^\\circ|\\(?:%|text|mbox|math)))"
)
_COMMA = re.compile(r"(?<=\$),(?=[\s\\!]*[$0-9])|,(?=\$)")  # it separates formulas: `$1$,$234$` is no 1,234
_OUTER_MARKS = ' .,;:!?"*()'
_TEXT_MARK = re.compile(r"\\text\s*\{|[{}$\\]")


@lru_cache(maxsize=8192)
def normalize(text: str) -> str:
    """The text in one spelling, still readable as TeX. Linear in its length."""
    text = _SUPERS.sub(lambda run: "^{" + run[0].translate(_SUPER) + "}", text)
    text = _SUBS.sub(lambda run: "_{" + run[0].translate(_SUB) + "}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], text)
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], unicodedata.normalize("NFKC", text))
    text = _unwrap(text)
    if "$" in text or "\\(" in text:
        text = _INLINE.sub(r"\1", _COMMA.sub("; ", _PARENS.sub("$", " ".join(text.split()))))
    text = _ROWS.sub(r"\\newline ", _THIN.sub("", text))
    text = _NOTHING.sub(" ", text).replace("\\ ", " ").replace("~", " ")
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    text = text.replace("\\$", "$")
    text = _without_groups(" ".join(text.split()))
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _unwrap(text: str) -> str:
    """Remove a final period and marks of mathematics or emphasis around the whole."""
    for _ in range(4):
        before = text
        text = text.strip()
        if text.endswith((".", ",", ";", "!")) and not text.endswith(("...", "\\,", "\\;", "\\!")):
            text = _without_last(text)
        for start, end in _WRAPPERS:
            inner = text[len(start) : len(text) - len(end)]
            wrapped = len(text) > len(start + end) and text.startswith(start) and text.endswith(end)
            if wrapped and start not in inner and end not in inner.replace("\\" + end, ""):
                text = inner
        text = _without_mark(text)
        if text == before:
            break
    return text


def _without_mark(text: str) -> str:
    """The text without a box, underline, colour or bold print around all of it."""
    mark = _MARK.match(text)
    if mark is None:
        return text
    start = mark.end()
    if mark[0].endswith("{") and _closes(text, start) < len(text) - 1:
        return text
    inner = text[start:-1] if mark[0].endswith("{") else text[start:]
    font = mark[0].startswith(("\\math", "\\text{", "\\textb", "\\texti"))
    return (
        text if font and not re.search(r"[0-9\\]", inner) else inner
    )  # `\textbf{(C)}` is a choice, `\text{no}` a word


def _without_last(text: str) -> str:
    """The text without its last sign, unless that is a factorial."""
    return text if text.endswith("!") else text[:-1]


def _closes(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return at
    return -1


def _without_groups(text: str) -> str:
    """1,234 becomes 1234 outside brackets: inside, a comma separates."""
    if "," not in text:
        return text
    depth = 0
    depths: list[int] = []
    for at, sign in enumerate(text):
        opens = sign in "([{" or text.startswith("\\lbrace", at) or text.startswith("\\langle", at)
        closes = sign in ")]}" or text.startswith("\\rbrace", at) or text.startswith("\\rangle", at)
        depth += opens - closes
        depths.append(depth)
    return _GROUPED.sub(lambda match: match[0] if depths[match.start()] > 0 else match[0].replace(",", ""), text)


def words(text: str) -> str:
    """The words of a text, without marks, capitals and extra spaces. A prime stays: A' is another point than A."""
    text = " ".join(_TEXT_MARK.sub(" ", text).split()).casefold().strip(_OUTER_MARKS)
    return text.strip(_OUTER_MARKS + "'") if text.startswith("'") else text


def split(text: str, separators: tuple[str, ...]) -> list[str]:
    """The parts between separators that stand outside all brackets."""
    parts: list[str] = []
    depth = start = at = 0
    while at < len(text):
        if text.startswith(("\\lbrace", "\\langle", "\\begin"), at):
            depth += 1
        elif text.startswith(("\\rbrace", "\\rangle", "\\end"), at):
            depth -= 1
        elif text[at] in "([{":
            depth += 1
        elif text[at] in ")]}":
            depth -= 1
        elif depth == 0:
            match = next((s for s in separators if text.startswith(s, at)), None)
            if match:
                parts.append(text[start:at])
                at += len(match)
                start = at
                continue
        at += 1
    parts.append(text[start:])
    return parts
