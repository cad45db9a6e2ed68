"""Text of the open endpoints: pieces of a stream, stop strings, calls of tools in three forms of templates."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.chat.dialects.forms import ChatRequest
from rlvr.chat.tool_calls import ToolCall, ToolCallFormat
from rlvr.tinker_server.http.open_api.open_replies import name_likeliest
from rlvr.tinker_server.http.open_api.served_text import ServedText, TextStream, cut_stops
from rlvr.tinker_server.protocol.errors import UserError
from tests.kit.call_templates import TAGGED
from tests.kit.open_server import LLAMA_TEMPLATE, MISTRAL_TEMPLATE, TOOLS_TEMPLATE, text_tokenizer


def served(template: str | None = TOOLS_TEMPLATE) -> ServedText:
    return ServedText(text_tokenizer(template))


def stream(text: ServedText, tokens: list[int], stops: list[str]) -> list[str]:
    pieces = TextStream(text, stops)
    return [*(pieces.add(token) for token in tokens), pieces.finish()]


@pytest.mark.parametrize("said", ["2 + 5 = 7", "grüße, 世界! 🙂🙃 ok", "a\n\nb", "", "é" * 7])
@pytest.mark.parametrize("stops", [[], ["= 7"], ["🙃", "b"], ["\n\n", "zzz"]])
def test_pieces_of_a_stream_are_the_whole_text(said: str, stops: list[str]) -> None:
    text = served()
    pieces = stream(text, text.encode(said), stops)
    assert "".join(pieces) == cut_stops(said, stops)
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_pieces_of_random_tokens_are_the_whole_text() -> None:
    """Random bytes are often no characters: what is not one at the end is there in the end."""
    text, draw = served(), random.Random(5)
    for _ in range(200):
        tokens = [draw.randrange(300) for _ in range(draw.randrange(12))]
        stops = [text.decode([draw.randrange(40, 120)]), "qz"]
        assert "".join(stream(text, tokens, stops)) == cut_stops(text.decode(tokens), stops), tokens


def test_text_that_may_begin_a_stop_waits() -> None:
    text = served()
    pieces = TextStream(text, ["<end>"])
    assert [pieces.add(token) for token in text.encode("a<en")] == ["a", "", "", ""]
    assert "".join(pieces.add(token) for token in text.encode("d!")) + pieces.finish() == "<end!"
    stopped = TextStream(text, ["<end>"])
    assert "".join(stopped.add(token) for token in text.encode("a<end>b")) == "a" and stopped.is_stopped


CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
ARGUMENTS: dict[str, Any] = {"a": 1, "b": [2, {"c": "}"}]}


@pytest.mark.parametrize(
    ("template", "said", "rest", "count"),
    [
        (TOOLS_TEMPLATE, f"I add.\n<tool_call>\n{CALL}\n</tool_call>", "I add.", 1),
        (TOOLS_TEMPLATE, f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call> ok", "ok", 2),
        (TOOLS_TEMPLATE, f"<tool_call>\n{CALL}", "", 1),  # the end token instead of the closing tag
        (TOOLS_TEMPLATE, CALL, CALL, 0),
        (TOOLS_TEMPLATE, "<tool_call>\n{'name': 'add'}\n</tool_call>", "<tool_call>\n{'name': 'add'}\n</tool_call>", 0),
        (TOOLS_TEMPLATE, '<tool_call>{"name": "add"}</tool_call>', '<tool_call>{"name": "add"}</tool_call>', 0),
        (TOOLS_TEMPLATE, "<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, 0),
        (LLAMA_TEMPLATE, CALL.replace("arguments", "parameters"), "", 1),
        (LLAMA_TEMPLATE, "It is " + CALL.replace("arguments", "parameters"), None, 0),
        (MISTRAL_TEMPLATE, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", 2),
        (MISTRAL_TEMPLATE, f"[TOOL_CALLS] [{CALL}, 3]", None, 0),
    ],
)
def test_calls_of_tools_are_read_in_the_form_of_the_template(
    template: str, said: str, rest: str | None, count: int
) -> None:
    left, calls = served(template).tool_calls.split(said)
    assert left == (said if rest is None else rest)
    assert calls == [ToolCall("add", ARGUMENTS)] * count


@pytest.mark.parametrize("name", sorted({*TAGGED} - {"kimi"}))
def test_calls_between_tags_are_read_where_the_tags_are_special_tokens(name: str) -> None:
    tokenizer = text_tokenizer(TAGGED[name])
    tags = "<tool_call> </tool_call> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> [TOOL_CALLS] [ARGS]"
    tokenizer.add_special_tokens({"additional_special_tokens": tags.split()})
    text = ServedText(tokenizer)
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 5, "b": "5"}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "I add.", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"b": {"type": "string"}}}}}]
    written = text.decode(text.render(messages, [], {}), skip_special=False).partition("I add.")[2]
    said = "I add." + written.partition("<|im_end|>")[0] + "<tool_call>"
    message = text.read_message(said, ChatRequest("m", [], tools), skip_special=True)
    assert message["content"] == "I add."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 5, "b": "5"}}


def test_the_form_of_a_template_is_found_by_one_call() -> None:
    assert served(TOOLS_TEMPLATE).tool_calls == ToolCallFormat("<tool_call>", "</tool_call>", "name", "arguments")
    assert served(LLAMA_TEMPLATE).tool_calls == ToolCallFormat("", "", "name", "parameters")
    assert served(MISTRAL_TEMPLATE).tool_calls == ToolCallFormat("[TOOL_CALLS]", "", "name", "arguments")


def test_a_template_without_tools_or_with_another_form_is_refused() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(UserError, match=r"has no tools; leave them out"):
        _ = served(plain).tool_calls
    with pytest.raises(UserError, match="has no tools"):
        _ = served(None).tool_calls
    other = "{{ tools }}" + plain + "{% for m in messages %}{% for c in m.tool_calls or [] %}<f={{ c.function.name }}>"
    with pytest.raises(UserError, match="a form other than JSON"):
        _ = served(other + "{% endfor %}{% endfor %}").tool_calls
    raising = "{{ tools }}{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"cannot write a call of a tool.*roles must alternate"):
        _ = served(raising).tool_calls


def test_a_conversation_is_rendered_as_the_template_does() -> None:
    text, plain = served(), text_tokenizer()
    said = [{"role": "user", "content": "2 + 5?"}]
    assert text.render(said, [], {}) == plain.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    with pytest.raises(UserError, match="chat_template_kwargs: thinking is not read by this model's chat template"):
        text.render(said, [], {"thinking": True})
    with pytest.raises(UserError, match=r"no chat template; send a prompt to /v1/completions"):
        served(None).render(said, [], {})


def test_the_likeliest_tokens_of_one_name_stay_apart() -> None:
    """lm-eval takes the entry of the highest log-prob for the greedy token: two parts of a character have one name."""
    texts = {1: "a", 2: "\ufffd", 3: "\ufffd"}
    named = name_likeliest(2, -5.5, [(3, -0.1), (1, -3.0)], texts.__getitem__)
    assert named == {"token_id:3": -0.1, "a": -3.0, "\ufffd": -5.5}
    assert name_likeliest(3, -0.1, [(3, -0.1), (2, -2.0)], texts.__getitem__) == {"\ufffd": -0.1, "token_id:2": -2.0}
