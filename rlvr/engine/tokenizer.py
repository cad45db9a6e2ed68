"""Tokenizers: those of `transformers` for a model folder or hub name, or a small one built from a vocabulary.

A built one is an ordinary `PreTrainedTokenizerFast` (saved with the weights, loadable by `AutoTokenizer`): one token a
word, one a character, or pieces of source code. Its vocabulary is what the environment can say; a word outside it is an
error, not `<unk>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvr.core.error_text import one_line
from rlvr.core.hub_status import describe_hub, reads_cache_only
from rlvr.core.model_files import find_broken_tokenizer
from rlvr.engine.gguf_files import open_gguf

KINDS = ("words", "characters", "pieces")
# A line break with its indentation; else a word, a quoted letter, a digit or a run of symbols, each with the blank
# before it. What a program copies from its problem is then mostly one token, distinct from the tokens of data.
PIECE = r"\n *| ?[A-Za-z_]+|'\w'|,? ?\d| ?[^\w\s']+|\s|."
CHARACTER = r"[\s\S]"  # `.` leaves out line breaks, and `(?s)` is no option of the Oniguruma that tokenizers build in


def build_tokenizer(kind: str, vocabulary: Sequence[str], *, end: str, pad: str) -> Any:
    """A tokenizer with ids in the order of `vocabulary`; `kind` is words, characters or pieces (of source code).

    `end` and `pad` are appended if missing. Decoding gives the text back: words joined by one blank, characters and
    pieces by nothing. A piece outside the vocabulary is split into the longest known ones, from the left, so a
    vocabulary with every single character can encode anything.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = list(dict.fromkeys([*vocabulary, *(w for w in (end, pad) if w not in vocabulary)]))
    ids = {word: i for i, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(ids, unk_token=None))
    if kind == "words":
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "characters":
        core.pre_tokenizer = pre_tokenizers.Split(Regex(CHARACTER), behavior="isolated")
        core.decoder = decoders.Fuse()
    elif kind == "pieces":
        core = Tokenizer(models.WordPiece(ids, continuing_subword_prefix="", max_input_chars_per_word=1000))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
        core.decoder = decoders.Fuse()
    else:
        raise ValueError(f"model.tokenizer: {kind!r} is not a kind of built tokenizer; expected {', '.join(KINDS)}")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False
    )


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a local folder, hub name or GGUF file; ValueError with the remedy for a folder without one."""
    from transformers import AutoTokenizer

    name = open_gguf(name)
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"cannot load a tokenizer from {name!r}: there is no such folder; give model.tokenizer=<folder or hub name>"
        )
    if Path(name).is_dir() and not any(
        (Path(name) / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        raise ValueError(
            f"model folder {name!r} holds no tokenizer (no tokenizer.json, tokenizer_config.json or tokenizer.model); "
            "save one there with tokenizer.save_pretrained, or name one with model.tokenizer=<folder or hub name>"
        )
    if wrong := find_broken_tokenizer(Path(name).expanduser()):
        raise ValueError(f"cannot load a tokenizer from {name!r}: {wrong}")
    cache_only = reads_cache_only(name)
    try:
        return AutoTokenizer.from_pretrained(
            name,
            trust_remote_code=False,  # left open, it may ask on the terminal whether to run code of the folder
            local_files_only=cache_only,
        )
    except Exception as error:  # the library that reads a tokenizer.json raises no narrower class
        why = describe_hub() if cache_only else one_line(error)
        if "/" not in name:
            why += f"; nor is a package {name!r} installed that ships a GGUF file (if one is meant, install it)"
        raise ValueError(f"cannot load a tokenizer from {name!r}: {why}") from error


def silence_transformers() -> None:
    """Keep `transformers` from printing advice and progress."""
    from transformers.utils import logging

    logging.set_verbosity_error()
