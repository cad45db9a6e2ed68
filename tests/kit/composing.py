"""What the tests of configs share: a base config, and what comes of words added to its file or typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlvr.config import LoadedConfig, load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig

BASE = """
env: {name: rpn_arithmetic}
model: {tokenizer: words, config: {model_type: gpt2}}
rollout: {}
"""


def compose_base(text: str = "", *words: str) -> LoadedConfig:
    """The base config with `text` added to its file and `words` typed."""
    Path("mine.yaml").write_text(BASE + text)
    return load(None, "mine.yaml", words)


def config(text: str = "", *words: str) -> RunConfig:
    return build_config(compose_base(text, *words), warn=pytest.fail)


def refusal_of(text: str = "", *words: str) -> str:
    with pytest.raises(ValueError) as caught:
        build_config(compose_base(text, *words))
    return str(caught.value)


def warnings_of(text: str = "", *words: str) -> list[str]:
    told: list[str] = []
    build_config(compose_base(text, *words), told.append)
    return told
