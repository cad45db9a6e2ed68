"""What the tests of configs share: a base config, and what comes of words added to its file or typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlvr.config import Loaded, load
from rlvr.config.schema import Config, configured

BASE = """
env: {name: rpn_arithmetic}
model: {tokenizer: words, config: {model_type: gpt2}}
rollout: {}
"""


def composed(text: str = "", *words: str) -> Loaded:
    """The base config with `text` added to its file and `words` typed."""
    Path("mine.yaml").write_text(BASE + text)
    return load(None, "mine.yaml", words)


def config(text: str = "", *words: str) -> Config:
    return configured(composed(text, *words), warn=pytest.fail)


def refused(text: str = "", *words: str) -> str:
    with pytest.raises(ValueError) as caught:
        configured(composed(text, *words))
    return str(caught.value)


def warned(text: str = "", *words: str) -> list[str]:
    told: list[str] = []
    configured(composed(text, *words), told.append)
    return told
