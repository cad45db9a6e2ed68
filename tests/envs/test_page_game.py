"""The game of the page about environments of one's own, as a chat model plays it."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from tests.kit.doc_pages import blocks
from tests.kit.prompt_cases import CHAT, PLAIN, first, play, read_text


@pytest.fixture
def game() -> Any:
    """The task source that the page writes to guessing.py."""
    (code,) = [block.text for block in blocks("docs/train/your-own-environment.md") if "class Guess:" in block.text]
    namespace: dict[str, Any] = {"__name__": "guessing_of_the_page"}
    exec(code.replace('@register_environment("guessing")\n', ""), namespace)
    return namespace["Guessing"]()


def test_a_chat_model_reads_prompt_and_hint_by_its_template(game: Any) -> None:
    source = apply_prompt_options(game, CHAT, PromptOptions(), pytest.fail)
    task = first(source)
    asked = f"<|im_start|>user\n{task.prompt}<|im_end|>\n<|im_start|>assistant\n"
    assert read_text(source, CHAT, task) == asked
    hidden = int(task.meta["answer"])
    wrong = "3" if hidden < 3 else "1"
    hint = "lower" if hidden < int(wrong) else "higher"
    played = play(source, CHAT, wrong, str(hidden))
    between = f"<|im_end|>\n<|im_start|>user\n{hint}<|im_end|>\n<|im_start|>assistant\n"
    assert played.rendered_prompt == asked and played.response == f"{wrong}{between}{hidden}"


def test_a_model_without_a_template_reads_text(game: Any) -> None:
    source = apply_prompt_options(game, PLAIN, PromptOptions(), pytest.fail)
    assert source is game and read_text(source, PLAIN) == first(source).prompt
