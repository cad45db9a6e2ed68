"""Tokenizers built on the spot: every kind says any text of its vocabulary, token by token, and takes it back."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from rlvr.engine.model_loading import load_model
from rlvr.engine.tokenizer import KINDS, build_tokenizer, load_tokenizer

# kind -> (vocabulary, text, its tokens)
TEXTS: dict[str, tuple[list[str], str, list[str]]] = {
    "words": (["one", "plus", "two"], "two plus one", ["two", "plus", "one"]),
    "characters": (list(string.printable), "a b\n\tc\n", ["a", " ", "b", "\n", "\t", "c", "\n"]),
    "pieces": (
        [*string.printable, "def", " f", "():", "\n    ", "return"],
        "def f():\n    return x\n",
        ["def", " f", "():", "\n    ", "return", " ", "x", "\n"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_becomes_its_tokens_and_comes_back_also_from_a_folder(kind: str, tmp_path: Path) -> None:
    vocabulary, text, tokens = TEXTS[kind]
    built = build_tokenizer(kind, vocabulary, end="<eos>", pad="<pad>")
    built.save_pretrained(tmp_path)
    for tokenizer in (built, load_tokenizer(str(tmp_path))):
        ids = tokenizer.encode(text)
        assert tokenizer.convert_ids_to_tokens(ids) == tokens
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text + ("<eos>" if kind != "words" else " <eos>"))[-1] == tokenizer.eos_token_id
    assert len(built) == len(dict.fromkeys(vocabulary)) + 2


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'letters' is not a kind of built tokenizer; expected words, characters"):
        build_tokenizer("letters", ["a"], end="<eos>", pad="<pad>")


def test_a_hub_that_does_not_answer_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No retries: the library alone would try for a minute."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for load in (load_tokenizer, lambda name: load_model(name, None, device="cpu", dtype="float32")):
        with pytest.raises(
            ValueError, match=r"'own/model'.*not in the cache, and the hub at http://127\.0\.0\.1:9 does not"
        ):
            load("own/model")
    with pytest.raises(ValueError, match="nor is a package 'own_model' installed that ships a GGUF file"):
        load_tokenizer("own_model")
