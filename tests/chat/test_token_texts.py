"""The text of each token: characters of several tokens, blanks, and ids without a text."""

from __future__ import annotations

from rlvr.chat.token_texts import split_tokens

PARTS = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" b", 5: "é".encode()[:1]}


def decode(tokens: list[int]) -> str:
    return b"".join(PARTS[token] for token in tokens).decode(errors="replace")


def test_a_token_that_is_a_part_of_a_character_is_joined_with_the_rest() -> None:
    assert split_tokens([1, 2, 3, 4], decode) == [("a", 1), ("é", 2), (" b", 1)]
    assert split_tokens([1, 5], decode) == [("a", 1), ("\ufffd", 1)]
    assert split_tokens([], decode) == []


def test_what_never_becomes_a_character_is_cut_off() -> None:
    assert [count for _, count in split_tokens([5] * 11 + [1], decode)] == [8, 4]


def test_blanks_between_words_belong_to_the_word_behind_them() -> None:
    """A tokenizer of words joins what it decodes, and gives no blank for a word alone."""
    words = ["one", "two", "three"]
    pieces = split_tokens([0, 1, 2], lambda tokens: " ".join(words[t] for t in tokens))
    assert pieces == [("one", 1), (" two", 1), (" three", 1)]


def test_an_id_that_the_tokenizer_does_not_have_is_shown_as_such() -> None:
    assert split_tokens([1, 9, 1], decode) == [("a", 1), ("[9]", 1), ("a", 1)]
