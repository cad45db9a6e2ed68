"""Reward `own_words`: copies of the prompt fail, words of one's own pass."""

from __future__ import annotations

import pytest

from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case

PROMPT = 'Write one sentence that contains the words "river" and "hammer".'


@pytest.mark.parametrize(
    ("response", "copied"),
    [
        (PROMPT, 1.0),
        ("WRITE one   sentence, that contains the words river and hammer!!", 1.0),
        ("The words river and hammer, as you asked.", 5 / 8),
        ("The river is near the hammer.", 0.0),
        ("River and hammer are words.", 0.0),  # a run of three words
        ("I contain the words river and hammer, and some more words beside them.", 5 / 13),
        ("", 0.0),
    ],
)
def test_the_share_of_copied_words_decides(response: str, copied: float) -> None:
    (score,) = resolve_reward("own_words").judge_all([Case(PROMPT, response)])
    assert score.parts["copied"] == pytest.approx(copied)
    assert (score.value, score.reason) == ((0.0, "copied") if copied > 0.5 else (1.0, ""))


def test_options() -> None:
    strict = resolve_reward("own_words", words=2, at_most=0)
    assert strict(PROMPT, "a river and a hammer") == 0.0 and strict(PROMPT, "a hammer, a river") == 1.0
    for options in ({"words": 0}, {"words": 21}, {"at_most": 1}, {"at_most": -0.1}, {"at_most": True}):
        with pytest.raises(ValueError, match="own_words"):
            resolve_reward("own_words", **options)
    (score,) = resolve_reward("own_words").judge_all([Case(PROMPT, "x " * 60_000)])
    assert (score.value, score.reason) == (0.0, "too_large")
