"""Calls of tools that templates write between tags: read as they were written, and explained where malformed."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.chat.call_parts import MOST_MALFORMED, ToolCall, adapt_messages, read_value
from rlvr.chat.tagged_calls import TaggedCallFormat
from rlvr.chat.tool_calls import ToolCallFormat
from tests.kit.call_templates import HARMONY, KIMI, QWEN_CODER, TAGGED
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE
from tests.kit.slow_cases import mark_slow_but

TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
PROPERTIES: dict[str, Any] = {f"{name}_value": {"type": name} for name in TYPES}
PROPERTIES["maybe"] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
PROPERTIES["color"] = {"enum": ["red", "1"]}
NAMES = ("add", "get-weather", "files.read_2", "x")
TOOLS = [
    {"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for n in NAMES
]
ALL = {**TAGGED, "harmony": HARMONY, "json": TOOLS_TEMPLATE}


@cache
def tokenizer_of(name: str) -> Any:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = ALL[name]
    return tokenizer


@cache
def form_of(name: str) -> Any:
    return ToolCallFormat.of_template(tokenizer_of(name))


def write(name: str, calls: list[ToolCall], said: str = "") -> str:
    """What the template writes for a turn of these calls, up to where it ends."""
    form, tokenizer = form_of(name), tokenizer_of(name)
    made = [
        {
            "id": form.write_id(call.name, place),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(calls)
    ]
    user = {"role": "user", "content": "?"}
    whole = adapt_messages([user, {"role": "assistant", "content": said, "tool_calls": made}], form)
    prompt = tokenizer.apply_chat_template([user], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    text = tokenizer.apply_chat_template(whole, tools=TOOLS, tokenize=False)
    return text.removeprefix(prompt).removesuffix("\n").removesuffix("<|im_end|>")


letters = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>[]\u2063"), max_size=20)
leaves = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(leaves | letters, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(letters, inner))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string_value": letters | st.sampled_from(["1", "true", "None", "{}", " x ", "\n", "a\nb\n", '"q"']),
    "integer_value": st.integers(),
    "number_value": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean_value": st.booleans(),
    "object_value": st.dictionaries(letters, values, max_size=3),
    "array_value": st.lists(values, max_size=3),
    "null_value": st.none(),
    "maybe": st.none() | st.integers(),
    "color": st.sampled_from(["red", "1"]),
}
calls_of = st.builds(ToolCall, st.sampled_from(NAMES), st.fixed_dictionaries({}, optional=VALUES))


@pytest.mark.parametrize("name", mark_slow_but(4, sorted(ALL)))
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(calls_of, min_size=1, max_size=3))
def test_what_a_template_writes_is_read_as_the_equal_call(name: str, calls: list[ToolCall]) -> None:
    calls = calls[:1] if name == "harmony" else calls
    rest, found = form_of(name).split(write(name, calls), TOOLS)
    assert found == calls and [json.dumps(c.arguments) for c in found] == [json.dumps(c.arguments) for c in calls]
    assert not rest and not form_of(name).find_malformed(rest, NAMES)


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_what_is_said_before_a_call_is_kept(name: str) -> None:
    call = ToolCall("add", {"integer_value": 5})
    assert form_of(name).split(write(name, [call, call], "I add."), TOOLS) == ("I add.", [call, call])
    assert form_of(name).split("I add.") == ("I add.", []) and not form_of(name).find_malformed("I add.", NAMES)


_WORDS = """
<tool_call> </tool_call> <function= add > <parameter= </parameter> </function> <arg_key> </arg_key>
<arg_value> </arg_value> <minimax:tool_call> </invoke> <|tool_calls_section_begin|>
<|tool_call_begin|>functions. <|tool_call_argument_begin|> :0 {} <|tool_call_end|> [ [TOOL_CALLS]
[ARGS] <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> function <｜tool▁sep｜> ```json 1e999
<｜tool▁call▁end｜> to=functions. <|channel|>commentary <|message|> <|call|> é
"""
PIECES = st.sampled_from(
    [*_WORDS.split(), '<invoke name="', '<parameter name="', '">', '{"a":', "\u2063", "\n", " "],
)


@pytest.mark.parametrize("name", sorted(ALL))
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=30))
def test_any_text_is_read_without_an_error(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    rest, calls = form_of(name).split(text, TOOLS)
    assert isinstance(form_of(name).find_malformed(rest, NAMES), str)
    assert calls or rest == text
    for call in calls:
        assert call.name and isinstance(call.arguments, dict)
        json.dumps(call.arguments)


@pytest.mark.parametrize("name", mark_slow_but(3, sorted(TAGGED)))
def test_long_hostile_texts_cost_little(name: str) -> None:
    """Each would take hours in quadratic time."""
    form = form_of(name)
    whole = write(name, [ToolCall("add", {"string_value": "5"})])
    opening = whole[: whole.index("add")]
    for text in (
        opening * 200_000,
        whole[:-1] * 50_000,
        (opening + "add" + whole.partition("add")[2].partition("5")[0]) * 50_000,
        whole.replace("5", "[" * 500_000),
        whole.replace("add", "a" * 2_000_000),
        opening + "add" + " " * 2_000_000,
        opening.rstrip() + "\n" * 2_000_000,
    ):
        rest, _ = form.split(text, TOOLS)
        assert isinstance(form.find_malformed(rest, NAMES), str)
    many = form.split(opening * (MOST_MALFORMED + 5) + whole, TOOLS)[1]
    assert len(many) <= 1


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("qwen-coder", "<tool_call>\n{'name': 'add'}\n</tool_call>", "begins in another way; expected <tool_call>"),
        ("qwen-coder", "<tool_call>\n<function=>\n</function>\n</tool_call>", "the name of a tool is missing"),
        ("qwen-coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n", "the value of 'a' has no </parameter>"),
        ("qwen-coder", "<tool_call>\n<function=add>\n<parameter=a>1</parameter></tool_call>", "its end is missing"),
        ("qwen-coder", "<tool_call>\n<function=add>\n<parameter=>1", "the key of an argument is missing"),
        ("glm", "<tool_call>add two numbers</tool_call>", "text outside its arguments"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n2\n</tool_call>", "the key of an argument is missing"),
        ("minimax", "<minimax:tool_call>add(2)</minimax:tool_call>", "begins in another way"),
        ("kimi", "<|tool_call_begin|>functions.add<|tool_call_argument_begin|>{}", "after the name 'add'"),
        ("kimi", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{'a'", "Expecting property name"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "no object"),
        ("mistral-named", "[TOOL_CALLS]add{}", "after the name 'add'"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{", "Expecting property name"),
    ],
)
def test_a_malformed_call_is_explained(name: str, said: str, words: str) -> None:
    rest, calls = form_of(name).split(said, TOOLS)
    explained = form_of(name).find_malformed(rest, NAMES)
    assert not calls and explained.startswith("your call could not be read: ") and words in explained
    assert "expected <" in explained or "expected [" in explained


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5), ("5", {"type": "string"}, "5"), ("5", None, 5), ("five", None, "five"),
        ("5", {"type": "boolean"}, "5"), ("True", {"type": "boolean"}, True), ("true", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None), ("true", {"type": "integer"}, "true"), ("[1]", {}, [1]),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"), ("1e9", {"type": "number"}, 1e9), ("null", {"type": "null"}, None),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000), (" 5 ", {}, 5),
        ("9" * 5_000, {"type": "integer"}, "9" * 5_000), ("1", {"enum": ["1", "2"]}, "1"), ("1", {"enum": [1, 2]}, 1),
        ('{"a": 1}', {"$ref": "#/$defs/Row"}, {"a": 1}), ("5", "nonsense", 5), ("5", {"type": 7}, 5),
        ("5", {"anyOf": [{"type": "string"}, {}]}, 5), ("5", {"anyOf": 3}, 5), ("x", {"anyOf": []}, "x"),
    ],
)  # fmt: skip
def test_a_value_is_read_by_its_schema(text: str, schema: Any, value: Any) -> None:
    found = read_value(text, schema)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "tools", [[{}], [{"function": 5}], [{"function": {"name": [], "parameters": {"properties": 3}}}]]
)
def test_tools_without_a_schema_do_no_harm(tools: Any) -> None:
    call = ToolCall("add", {"integer_value": 5})
    assert form_of("qwen-coder").split(write("qwen-coder", [call]), tools) == ("", [call])


def test_a_call_has_an_id_in_place_of_its_name_where_the_template_writes_that() -> None:
    assert form_of("kimi").write_id("add", 2) == "functions.add:2" and KIMI
    assert form_of("glm").write_id("add", 2) == "call00002"


def test_harmony_is_read_as_models_write_it() -> None:
    call = ToolCall("add", {"a": 1})
    for said in (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>',
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
    ):
        rest, calls = form_of("harmony").split(said, TOOLS)
        assert calls == [call] and "functions" not in rest


@pytest.mark.parametrize(
    "calls",
    [
        "{{ call.function.name }}({% for k, v in call.function.arguments.items() %}{{ k }}='{{ v }}', {% endfor %})",
        "{{ call.function.name }}",
        "<call>{{ call.function.name }} {{ call.function.arguments.values() | join(' ') }}</call>",
    ],
)
def test_a_form_that_nobody_knows_is_refused(calls: str) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
        + calls
        + "{% endfor %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match="other than JSON or a name and arguments between tags"):
        ToolCallFormat.of_template(tokenizer)


def test_a_form_is_found_whatever_the_names_of_the_tags_are() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = QWEN_CODER.replace("<function=", "<use:").replace("parameter", "given")
    form = ToolCallFormat.of_template(tokenizer)
    assert isinstance(form, TaggedCallFormat)
    said = "<tool_call><use:add><given=a>5</given></function></tool_call>"
    assert form.split(said) == ("", [ToolCall("add", {"a": 5})])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-coder", "glm", "kimi", "deepseek-fenced", "minimax", "harmony"])
def test_the_library_renderers_reads_the_same_calls(name: str) -> None:
    """`pip install renderers` to run it. Blanks around a value are left out: it drops them, and templates do not."""
    parsing = pytest.importorskip("renderers.parsing", reason="the library renderers is not installed")
    tokenizer = chat_tokenizer()
    tags = {
        "qwen-coder": ("parse_qwen35", {"think": "<think>", "tool_call": "<tool_call>"}),
        "glm": (
            "parse_glm",
            {"think": "<think>", "tool_call": "<tool_call>", "arg_key": "<arg_key>", "arg_value": "<arg_value>"},
        ),
        "minimax": ("parse_minimax", {"think": "<think>", "tool_call": "<minimax:tool_call>"}),
        "kimi": ("parse_kimi_k2", {}),
        "deepseek-fenced": ("parse_deepseek_v3", {}),
        "harmony": ("parse_gpt_oss", {}),
    }
    parse, pairs = tags[name]
    words = {f"{key}_id": tag for key, tag in pairs.items()}
    words |= {f"{key}_end_id": tag.replace("<", "</") for key, tag in pairs.items()}
    if name == "kimi":
        parts = ("tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_argument_begin")
        words = {f"{part}_id": f"<|{part}|>" for part in (*parts, "tool_call_end")}
    if name == "deepseek-fenced":
        parts = ("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end", "tool_sep")
        words = {f"{part}_id": f"<｜{part.replace('_', '▁')}｜>" for part in parts}
    if name == "harmony":
        words = {f"{p}_id": f"<|{p}|>" for p in ("return", "call", "start", "end", "channel", "message", "constrain")}
    tokenizer.add_tokens(sorted(words.values()), special_tokens=True)
    more: dict[str, Any] = {key: tokenizer.convert_tokens_to_ids(word) for key, word in words.items()}
    if name != "harmony":
        more["stop_ids"] = {tokenizer.eos_token_id}
    if name in ("qwen-coder", "glm", "minimax"):
        more["tools"] = TOOLS
    calls = [
        ToolCall("add", {"integer_value": 5, "string_value": "5", "object_value": {"a": [1, None]}}),
        ToolCall("x", {}),
        ToolCall("get-weather", {"string_value": "two\nlines", "number_value": 0.5, "array_value": ["é", True]}),
    ]
    calls = calls[:1] if name == "harmony" else calls
    text = ("<|start|>assistant" if name == "harmony" else "") + write(name, calls)
    parsed = getattr(parsing, parse)(tokenizer, tokenizer.encode(text, add_special_tokens=False), **more)
    assert [ToolCall(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert {call.status.name for call in parsed.tool_calls} == {"OK"}
    assert form_of(name).split(text, TOOLS)[1] == calls
