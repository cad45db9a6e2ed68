"""How similar two texts are, from 0 to 1: the metrics of a `text_similarity` grader.

    similarity("rouge_l", "the cat sat", "the cat slept")     # 0.67

| metric | what it is |
|---|---|
| `fuzzy_match` | 2 x longest common subsequence of characters / characters of both: rapidfuzz's `fuzz.ratio` / 100 |
| `bleu` | BLEU of one sentence, up to 4-grams, exponential smoothing: sacrebleu's `sentence_bleu` / 100 |
| `gleu` | Google's BLEU: the smaller of precision and recall of all 1- to 4-grams: nltk's `sentence_gleu` |
| `rouge_1` ... `rouge_5` | F1 of n-grams, without stemming: rouge-score |
| `rouge_l` | F1 of the longest common subsequence of words: rouge-score |

Words of BLEU and GLEU are runs of letters and digits, and single other characters, case kept; of ROUGE runs of letters
and digits, case folded. Common subsequences take one step on a long integer per character: texts of `MAX_CHARS` take a
tenth of a second, whatever is in them. Left out on purpose: `meteor` and `cosine`, which need WordNet and an embedding
model; an approximation under their name would mislead.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

MAX_CHARS = 20_000
UNSUPPORTED_METRICS = {
    "meteor": "it needs WordNet's synonyms, which are not installed; use 'rouge_l' or 'gleu'",
    "cosine": "it needs an embedding model, which no setting names; use 'fuzzy_match' or a score_model grader",
}
MAX_ORDER = 4  # of BLEU and GLEU
_MARKS = re.compile(r"[^\W_]+|[^\s]")
_WORDS = re.compile(r"[^\W_]+")


def similarity(metric: str, text: str, reference: str) -> float:
    """How similar the text is to the reference. Neither may be longer than `MAX_CHARS`."""
    assert max(len(text), len(reference)) <= MAX_CHARS, (len(text), len(reference))
    return METRICS[metric](text, reference)


def count_needed_words(metric: str) -> int:
    """How many words a reference needs for the metric to be defined: n for `rouge_n`, 1 for `rouge_l`, else 0."""
    kind, _, order = metric.rpartition("_")
    return (int(order) if order.isdigit() else 1) if kind == "rouge" else 0


def count_words(text: str) -> int:
    """The number of words as ROUGE counts them."""
    return len(_words(text))


def fuzzy_match(text: str, reference: str) -> float:
    total = len(text) + len(reference)
    return 2 * common_subsequence(text, reference) / total if total else 1.0


def bleu(text: str, reference: str) -> float:
    """Papineni et al. 2002 (https://aclanthology.org/P02-1040) for one sentence, as far as it has n-grams.

    An order without a match counts 1/2, 1/4, ... of one n-gram (smoothing 3 of https://aclanthology.org/W14-3346).
    """
    ours, theirs = _MARKS.findall(text), _MARKS.findall(reference)
    logs: list[float] = []
    smooth = 1.0
    for order in range(1, MAX_ORDER + 1):
        matches, total, _ = _overlap(ours, theirs, order)
        if not total:
            break
        if not matches:
            smooth *= 2
        logs.append(math.log((matches or 1 / smooth) / total))
    if not logs or not _overlap(ours, theirs, 1)[0]:  # no word in common
        return 0.0
    brevity = min(0.0, 1 - len(theirs) / len(ours))
    return math.exp(brevity + math.fsum(logs) / len(logs))


def gleu(text: str, reference: str) -> float:
    """Wu et al. 2016, section 6 (https://arxiv.org/abs/1609.08144)."""
    ours, theirs = _MARKS.findall(text), _MARKS.findall(reference)
    counts = [_overlap(ours, theirs, order) for order in range(1, MAX_ORDER + 1)]
    most = max(sum(total for _, total, _ in counts), sum(total for _, _, total in counts))
    return sum(matches for matches, _, _ in counts) / most if most else 0.0


def rouge_n(order: int) -> Callable[[str, str], float]:
    """Lin 2004 (https://aclanthology.org/W04-1013)."""

    def rouge(text: str, reference: str) -> float:
        return _f1(*_overlap(_words(text), _words(reference), order))

    return rouge


def rouge_l(text: str, reference: str) -> float:
    ours, theirs = _words(text), _words(reference)
    return _f1(common_subsequence(ours, theirs), len(ours), len(theirs))


METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    **{f"rouge_{order}": rouge_n(order) for order in range(1, 6)},
    "rouge_l": rouge_l,
}


def common_subsequence(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """The length of the longest common subsequence, a bit per place of `one` (Hyyrö 2004).

    Bit i of `row` is 0 where the subsequence grows by taking in `one[i]`.
    """
    places: dict[Hashable, int] = {}
    for name, own in _positions(one).items():
        bits = bytearray((len(one) + 7) // 8)
        for place in own:
            bits[place >> 3] |= 1 << (place & 7)
        places[name] = int.from_bytes(bits, "little")
    full = (1 << len(one)) - 1
    row = full
    for item in other:
        found = row & places.get(item, 0)
        row = ((row + found) | (row - found)) & full
    return len(one) - row.bit_count()


def _positions(items: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        found.setdefault(item, []).append(place)
    return found


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.casefold())


def _overlap(ours: Sequence[str], theirs: Sequence[str], order: int) -> tuple[int, int, int]:
    """The number of n-grams in common (each as often as both texts have it), in the answer, and in the reference."""
    one, other = _grams(ours, order), _grams(theirs, order)
    return (one & other).total(), one.total(), other.total()


def _grams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def _f1(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0
