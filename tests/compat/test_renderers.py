"""Renderers: conversations become the tokens a model is asked with, and answers come back as messages."""

from __future__ import annotations

import pickle
import string
from typing import Any

import pytest

from rlvr.compat.model_info import get_recommended_renderer_name, get_tokenizer
from rlvr.compat.renderers import Termination, get_renderer, get_text_content
from rlvr.engine.tokenizer import build_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "2+2?"}]


def tokenizer_with(template: str | None) -> Any:
    made = build_tokenizer("pieces", string.printable, end="<eos>", pad="<pad>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def plain() -> Any:
    return tokenizer_with(None)


@pytest.fixture(scope="module")
def chat() -> Any:
    return tokenizer_with(TEMPLATE)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_role_colon_asks_and_reads_back(plain: Any) -> None:
    renderer = get_renderer("role_colon", plain)
    prompt = renderer.build_generation_prompt([*QUESTION, {"role": "assistant", "content": "4"}, *QUESTION])
    assert plain.decode(prompt.to_ints()) == "User: 2+2?\n\nAssistant: 4\n\nUser: 2+2?\n\nAssistant:"
    assert renderer.get_stop_sequences() == ["\n\nUser:", "<eos>"]
    prefilled = renderer.build_generation_prompt(QUESTION, prefill=" It is").to_ints()
    assert plain.decode(prefilled) == "User: 2+2?\n\nAssistant: It is"


@pytest.mark.parametrize(
    ("text", "content", "ended"),
    [
        (" 4\n\nUser:", "4", Termination.STOP_SEQUENCE),
        (" 4<eos>", "4", Termination.EOS),
        (" 4", "4", Termination.MALFORMED),
        (" 4\n\nUser: 5\n\nUser:", "4", Termination.MALFORMED),
        (" 4\n\nUser:<eos>", "4", Termination.MALFORMED),
        ("", "", Termination.MALFORMED),
    ],
)
def test_role_colon_says_how_an_answer_ended(plain: Any, text: str, content: str, ended: Termination) -> None:
    """A stop sequence, the end of the text, or neither; only the first two are true."""
    message, found = get_renderer("role_colon", plain).parse_response(ids(plain, text))
    assert (message, found) == ({"role": "assistant", "content": content}, ended)
    assert bool(found) == found.is_clean == (ended is not Termination.MALFORMED)
    assert found.is_stop_sequence == (ended is Termination.STOP_SEQUENCE)


def test_role_colon_is_the_cookbooks(plain: Any) -> None:
    """The same tokens for the same conversation, the same reading of every answer."""
    pytest.importorskip("tinker_cookbook", reason="the cookbook is the other side of this comparison")
    ours, theirs = get_renderer("role_colon", plain), get_renderer("cookbook:role_colon", plain)
    convo = [*QUESTION, {"role": "assistant", "content": "4"}, *QUESTION]
    assert ours.build_generation_prompt(convo).to_ints() == theirs.build_generation_prompt(convo).to_ints()
    answered = [*QUESTION, {"role": "assistant", "content": "it is 4"}]
    tokens, weights = ours.build_supervised_example(answered)
    expected, expected_weights = theirs.build_supervised_example(answered)
    assert tokens.to_ints() == expected.to_ints()
    assert weights.tolist() == expected_weights.tolist()
    for text in (" 4\n\nUser:", " 4<eos>", "4", "4\n\nUser:x\n\nUser:", "4\n\nUser:<eos>"):
        message, ended = ours.parse_response(ids(plain, text))
        their_message, their_end = theirs.parse_response(ids(plain, text))
        assert (message["content"], ended.value) == (their_message["content"], their_end.value), text


def test_a_chat_template_asks_and_ends_by_its_own_token(chat: Any) -> None:
    renderer = get_renderer("chat_template", chat)
    prompt = renderer.build_generation_prompt(QUESTION).to_ints()
    assert chat.decode(prompt) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    end, eos = chat.convert_tokens_to_ids("<|im_end|>"), chat.eos_token_id
    assert renderer.get_stop_sequences() == [end, eos]
    assert renderer.parse_response([*ids(chat, "4"), end]) == (
        {"role": "assistant", "content": "4"},
        Termination.STOP_SEQUENCE,
    )
    assert renderer.parse_response([*ids(chat, "4"), eos])[1] is Termination.EOS
    assert renderer.parse_response(ids(chat, "4"))[1] is Termination.MALFORMED
    message, ended = renderer.parse_response([*ids(chat, "4"), end, *ids(chat, "junk"), end])
    assert (message["content"], ended) == ("4", Termination.MALFORMED)


def test_a_template_without_a_token_of_its_own_ends_with_the_text(plain: Any) -> None:
    made = tokenizer_with("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    renderer = get_renderer("chat_template", made)
    assert renderer.get_stop_sequences() == [made.eos_token_id]
    assert renderer.parse_response([*ids(made, "4"), made.eos_token_id])[1] is Termination.STOP_SEQUENCE


@pytest.mark.parametrize("name", ["chat_template", "role_colon"])
def test_a_fine_tuning_example_is_the_prompt_and_the_completion(chat: Any, name: str) -> None:
    """Weights are on the answer and its end alone; what they weigh parses back to the message."""
    renderer = get_renderer(name, chat)
    tokens, weights = renderer.build_supervised_example([*QUESTION, {"role": "assistant", "content": "4"}])
    prompt = renderer.build_generation_prompt(QUESTION).to_ints()
    assert tokens.to_ints()[: len(prompt)] == prompt
    assert weights.tolist() == [0.0] * len(prompt) + [1.0] * (tokens.length - len(prompt))
    message, ended = renderer.parse_response(tokens.to_ints()[len(prompt) :])
    assert (message["content"], ended) == ("4", Termination.STOP_SEQUENCE)
    with pytest.raises(ValueError, match="the last message must be the assistant's"):
        renderer.build_supervised_example(QUESTION)


def test_a_renderer_travels_to_another_process(chat: Any) -> None:
    renderer = pickle.loads(pickle.dumps(get_renderer("chat_template", chat)))
    assert renderer.get_stop_sequences() == get_renderer("chat_template", chat).get_stop_sequences()


def test_the_recommended_renderer_fits_the_tokenizer(plain: Any, chat: Any, tmp_path: Any) -> None:
    for tokenizer, expected in ((plain, "role_colon"), (chat, "chat_template")):
        tokenizer.save_pretrained(tmp_path / expected)
        assert get_recommended_renderer_name(str(tmp_path / expected)) == expected
        assert get_tokenizer(str(tmp_path / expected)).eos_token == "<eos>"


def test_text_of_a_message_leaves_thoughts_out() -> None:
    assert get_text_content({"content": "4"}) == "4"
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}]
    assert get_text_content({"content": parts}) == "4"


def test_mistakes_are_named(plain: Any, chat: Any) -> None:
    with pytest.raises(ValueError, match="'qwen3': expected chat_template or role_colon, or cookbook:<name>"):
        get_renderer("qwen3", plain)
    with pytest.raises(ValueError, match="has no chat template; use role_colon"):
        get_renderer("chat_template", plain)
    with pytest.raises(ValueError, match="asks for an assistant's turn"):
        get_renderer("chat_template", chat).build_generation_prompt(QUESTION, role="user")
