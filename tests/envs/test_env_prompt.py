"""The single-turn episode: what the model is shown, and that one answer ends it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlvr.core.types import Task
from rlvr.envs import PromptEnv
from rlvr.envs.prompt import encode_prompt, encode_texts

CHAT = [{"role": "user", "content": "2+2?"}]


class Characters:
    """A tokenizer of one token a character, with a chat template whose result has the shape under test."""

    eos_token_id = 0

    def __init__(self, template: str | None = None, shape=lambda ids: ids) -> None:
        self.chat_template, self.shape = template, shape

    def encode(self, text, *, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        assert add_generation_prompt and tokenize
        return self.shape([ord(c) for m in messages for c in m["content"]] + [9])


def observe(prompt, tokenizer) -> list[int]:
    observation, stop = asyncio.run(PromptEnv(Task("t", prompt), tokenizer).initial_observation())
    assert stop is None
    return observation.to_ints()


def test_a_text_prompt_is_taken_literally():
    assert observe("ab", Characters()) == [97, 98]


@pytest.mark.parametrize(
    "shape",
    [
        lambda ids: ids,
        lambda ids: [ids],
        lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids)},
        lambda ids: {"input_ids": [ids]},
        lambda ids: {"input_ids": np.array([ids])},
    ],
)
def test_chat_messages_go_through_the_template_whatever_it_returns(shape):
    assert observe(CHAT, Characters("x", shape)) == [50, 43, 50, 63, 9]


def test_a_real_tokenizer_with_a_template():
    """transformers 5 returns a BatchEncoding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<end>": 0, "user": 1, "2+2?": 2, "assistant": 3}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    with pytest.raises(ValueError, match="has no chat template; use an instruction-tuned"):
        observe(CHAT, tokenizer)
    messages = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    tokenizer.chat_template = messages + "{% if add_generation_prompt %}assistant{% endif %}"
    assert observe(CHAT, tokenizer) == [1, 2, 3]
    assert observe("user 2+2?", tokenizer) == [1, 2]


def test_messages_without_a_template_and_empty_prompts_are_refused():
    with pytest.raises(ValueError, match="task 't' has chat messages, but the tokenizer has no chat template"):
        observe(CHAT, Characters())
    with pytest.raises(ValueError, match="task 't' has an empty prompt"):
        observe("", Characters())


def test_one_answer_ends_the_episode_without_a_reward():
    env = PromptEnv(Task("t", "ab"), Characters())
    result = asyncio.run(env.step([1, 2], extra={"stop_reason": "stop"}))
    assert (result.reward, result.episode_done, result.next_observation) == (0.0, True, None)
    with pytest.raises(AssertionError, match="the episode of task 't' is over"):
        asyncio.run(env.step([1]))


def test_a_text_that_a_built_vocabulary_cannot_write_is_named():
    from rlvr.engine.tokenizer import build_tokenizer

    words = build_tokenizer("words", ["a", "b", "<end>", "<pad>"], end="<end>", pad="<pad>")
    assert encode_texts(["a b", "b"], words) == [words.encode("a b"), words.encode("b")]
    for encode in (lambda: encode_texts(["a", "a c"], words), lambda: encode_prompt(Task("t", "a c"), words)):
        with pytest.raises(ValueError, match=r"cannot write the text 'a c' .*model.tokenizer"):
            encode()
