"""Metrics of text_similarity graders: literals worked out by hand, and the field's own libraries where installed."""

from __future__ import annotations

import importlib
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.reward.graders.similarity import MAX_CHARS, METRICS, common_subsequence, similarity

CAT = ("the cat sat on the mat", "the cat is on the mat")


@pytest.mark.parametrize(
    ("metric", "text", "reference", "expected"),
    [
        ("fuzzy_match", "kitten", "sitting", 2 * 4 / 13),  # ittn
        ("fuzzy_match", "", "", 1.0),
        ("fuzzy_match", "", "x", 0.0),
        # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples; no four words in a row: half of one of 3
        ("bleu", *CAT, (5 / 6 * 3 / 5 * 1 / 4 * (1 / 2) / 3) ** (1 / 4)),
        ("bleu", "the cat", "the cat sat on", math.exp(1 - 4 / 2)),  # all it says is right, and half is missing
        ("bleu", "a b", "c d", 0.0),
        ("gleu", *CAT, (5 + 3 + 1 + 0) / (6 + 5 + 4 + 3)),
        ("gleu", "the", "the cat", 1 / 3),  # 1 of the 3 n-grams that the reference has
        ("rouge_1", *CAT, 5 / 6),
        ("rouge_2", *CAT, 3 / 5),
        ("rouge_3", *CAT, 1 / 4),
        ("rouge_4", *CAT, 0.0),
        ("rouge_5", CAT[0], CAT[0], 1.0),
        ("rouge_l", *CAT, 5 / 6),
        ("rouge_l", "The CAT, sat.", "the cat sat", 1.0),
        ("rouge_1", "the the the the", "the cat", 2 * 1 / 6),  # a word counts as often as the reference has it
    ],
)
def test_values_worked_out_by_hand(metric: str, text: str, reference: str, expected: float) -> None:
    assert similarity(metric, text, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", METRICS)
@given(text=st.text(max_size=40), reference=st.text(max_size=40))
def test_every_metric_stays_between_zero_and_one(metric: str, text: str, reference: str) -> None:
    assert 0 <= similarity(metric, text, reference) <= 1 + 1e-12


@given(st.text("abc", max_size=30), st.text("abc", max_size=30))
def test_the_bit_parallel_subsequence_equals_the_table(one: str, other: str) -> None:
    """The textbook's table of the longest common subsequence, derived anew."""
    row = [0] * (len(other) + 1)
    for a in one:
        last = 0
        for j, b in enumerate(other):
            last, row[j + 1] = row[j + 1], last + 1 if a == b else max(row[j + 1], row[j])
    assert common_subsequence(one, other) == row[-1]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "text", ["a" * MAX_CHARS, "ab " * (MAX_CHARS // 3), "".join(chr(0x4E00 + i) for i in range(MAX_CHARS))]
)
def test_texts_of_the_longest_kind_are_compared(metric: str, text: str) -> None:
    """A table of all pairs of characters would take 400 million steps here, and the test its time limit."""
    assert 0 <= similarity(metric, text, text[::-1]) <= 1 + 1e-12


def pairs() -> list[tuple[str, str]]:
    words = ["the", "cat", "sat", "on", "a", "mat", "dog,", "ran", ".", "42", "Big", "big", "it's", "x-y"]
    draw = random.Random(0)
    return [(" ".join(draw.choices(words, k=draw.randrange(15))), " ".join(draw.choices(words, k=draw.randrange(15))))
            for _ in range(200)]  # fmt: skip


def peer(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"{name} is not installed: pip install rapidfuzz sacrebleu rouge-score nltk")


def test_fuzzy_match_is_what_rapidfuzz_says() -> None:
    fuzz = peer("rapidfuzz.fuzz")
    for one, other in pairs():
        assert similarity("fuzzy_match", one, other) == pytest.approx(fuzz.ratio(one, other) / 100, abs=1e-9)


def test_bleu_is_what_sacrebleu_says_of_the_same_words() -> None:
    sacrebleu = peer("sacrebleu")
    split = importlib.import_module("rlvr.reward.graders.similarity")._MARKS.findall
    for one, other in pairs():
        if other:
            texts = " ".join(split(one)), [" ".join(split(other))]
            said = sacrebleu.sentence_bleu(*texts, tokenize="none").score / 100
            assert similarity("bleu", one, other) == pytest.approx(said, abs=1e-9)


def test_gleu_is_what_nltk_says_of_the_same_words() -> None:
    nltk = peer("nltk.translate.gleu_score")
    split = importlib.import_module("rlvr.reward.graders.similarity")._MARKS.findall
    for one, other in pairs():
        if one or other:
            said = nltk.sentence_gleu([split(other)], split(one))
            assert similarity("gleu", one, other) == pytest.approx(said, abs=1e-9)


def test_rouge_is_what_rouge_score_says() -> None:
    kinds = {**{f"rouge_{n}": f"rouge{n}" for n in range(1, 6)}, "rouge_l": "rougeL"}
    scorer = peer("rouge_score.rouge_scorer").RougeScorer(list(kinds.values()))
    for one, other in pairs():
        said = scorer.score(other, one)
        for ours, theirs in kinds.items():
            assert similarity(ours, one, other) == pytest.approx(said[theirs].fmeasure, abs=1e-9)
