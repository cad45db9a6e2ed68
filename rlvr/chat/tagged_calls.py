"""Calls of tools that a chat template writes between tags, with a name that stands outside the JSON.

The arguments are one JSON object (Kimi K2, DeepSeek V3, gpt-oss, newer Mistral):

    <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|>

or text, each between tags of its own (Qwen3-Coder, Qwen3.5, GLM-4.5, MiniMax M2):

    <tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>

Which tags they are is read off the template: it writes two calls of two arguments, whose parts are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlvr.chat.call_parts import (
    MOST_MALFORMED,
    UNREADABLE,
    ToolCall,
    common_end,
    find_json_error,
    list_properties,
    read_value,
    skip_blanks,
)

WriteTurn = Callable[[str, Sequence[Mapping[str, Any]]], str]  # what is said and the calls, as the template writes both

_CALLS = [
    ToolCall(f"{place}_tool_of_the_probe", {f"{place}_{key}_key": f"{place}_{key}_value" for key in ("red", "blue")})
    for place in ("first", "second")
]
_SAID = "Wait."
_NAME = re.compile(r"\s*([\w./-]{1,128})")
_TAG = re.compile(r"<[^<>\s]*>?|\[[^\[\]\s]*\]?")
# gpt-oss: the recipient stands before the channel or after it, and the type of the content may be left out.
_HARMONY_BEGIN = re.compile(
    r"(?:<\|start\|>assistant\s{0,9})?(?:<\|channel\|>[a-z]{1,20}\s{0,9})?(?<![\w.])to=functions\."
)
_HARMONY_AFTER = re.compile(r"(?:\s|<\|channel\|>[a-z]{1,20}|<\|constrain\|>|json){0,20}<\|message\|>")


class _Argument(NamedTuple):
    """The tags around an argument written as text. What is a line break at a value's edges is part of the tags."""

    begin: str
    key: re.Pattern[str]  # of a key and what stands between it and its value
    end: str
    has_line_after_key: bool
    has_line_before_end: bool


@dataclass(frozen=True)
class TaggedCallFormat:
    """Calls between tags. `argument` is None where the arguments are a JSON object. `section` are the words around all
    calls of a turn.

    `signs` are texts that only a call has, and `call_example` is what the policy is told. In a form that `is_numbered`
    a call has an id, `functions.NAME:NUMBER`, in place of a name.
    """

    begin: re.Pattern[str]
    after_name: re.Pattern[str]
    argument: _Argument | None
    end: re.Pattern[str]
    section: tuple[str, ...]
    signs: tuple[str, ...]
    call_example: str
    is_numbered: bool = False
    takes_json_string: bool = False

    def split(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls. What looks like one and is not well formed stays in the text."""
        schemas = list_properties(tools)
        calls, kept, position, malformed = list[ToolCall](), list[str](), 0, 0
        while malformed < MOST_MALFORMED and (opening := self.begin.search(text, position)):
            found = self._read(text, opening.end(), schemas)
            kept.append(text[position : opening.end() if isinstance(found, str) else opening.start()])
            position = opening.end()
            if isinstance(found, str):
                malformed += 1
            else:
                position, call = found
                calls.append(call)
        if not calls:
            return text, []
        rest = "".join(kept) + text[position:]
        for word in self.section:
            rest = rest.replace(word, "")
        return rest.strip(), calls

    def find_malformed(self, text: str, tools: Collection[str]) -> str:
        """Describe the malformed call in a text from which the valid calls were taken; "" if there is none."""
        if not any(sign in text for sign in self.signs):
            return ""
        opening = self.begin.search(text)
        found = self._read(text, opening.end(), {}) if opening else "it begins in another way"
        reason = found if isinstance(found, str) else "there are too many malformed ones before it"
        return f"{UNREADABLE}: {reason}; expected {self.call_example}"

    def write_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}" if self.is_numbered else f"call{number:05d}"

    def _read(self, text: str, at: int, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[int, ToolCall] | str:
        """(where it ends, call) of what follows an opening, or why there is no call."""
        if (named := _NAME.match(text, at)) is None:
            return "the name of a tool is missing"
        name = named[1]
        if (after := self.after_name.match(text, named.end())) is None:
            return f"after the name {name!r} something else was expected"
        at = skip_blanks(text, after.end())
        arguments: dict[str, Any] = {}
        if self.argument is None:
            try:
                given, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                return find_json_error(text[at:])
            if not isinstance(given, dict):
                return "the arguments are JSON, but no object"
            ending = self.end.match(text, at)  # the JSON is whole without it
            return ending.end() if ending else at, ToolCall(name, given)
        tags, schema = self.argument, schemas.get(name, {})
        while text.startswith(tags.begin, at):
            if (keyed := tags.key.match(text, at + len(tags.begin))) is None:
                return f"after {tags.begin} the key of an argument is missing"
            if (stop := text.find(tags.end, keyed.end())) < 0:
                return f"the value of {keyed[1]!r} has no {tags.end}"
            value = text[keyed.end() : stop]
            value = value.removeprefix("\n") if tags.has_line_after_key else value
            value = value.removesuffix("\n") if tags.has_line_before_end else value
            arguments[keyed[1]] = read_value(value, schema.get(keyed[1]))
            at = skip_blanks(text, stop + len(tags.end))
        if (ending := self.end.match(text, at)) is None:
            return "its end is missing, or it has text outside its arguments"
        return ending.end(), ToolCall(name, arguments)


def find_tagged_format(write_turn: WriteTurn) -> TaggedCallFormat | None:
    """The form in which a template writes calls between tags; None if it does not. Templates differ in what they take:
    arguments as an object or as text, and ids of their own in place of names."""
    for is_text in (False, True):
        for has_ids in (False, True):
            given = [
                {
                    "id": f"functions.{call.name}:{number}" if has_ids else f"call{number:05d}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments) if is_text else call.arguments,
                    },
                }
                for number, call in enumerate(_CALLS)
            ]
            try:
                turn, later = (write_turn(said, given) for said in ("", _SAID))
            except Exception:  # a template may raise any error of its own
                continue
            found = _learn(turn, later, is_text)
            if found and found.split(turn)[1] == _CALLS == found.split(later)[1]:
                return found
    return _find_harmony(write_turn)


def _find_harmony(write_turn: WriteTurn) -> TaggedCallFormat | None:
    """gpt-oss: one call in a turn, whose form the template and the model write in two ways."""
    call = _CALLS[0]
    given = {"id": "call00000", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    form = TaggedCallFormat(
        begin=_HARMONY_BEGIN,
        after_name=_HARMONY_AFTER,
        argument=None,
        end=re.compile(r"\s*<\|call\|>"),
        section=(),
        signs=("to=functions.",),
        call_example="<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>",
    )
    try:
        turn = write_turn(_SAID, [given])
    except Exception:  # a template may raise any error of its own
        return None
    return form if form.split(turn)[1] == [call] else None


def _learn(turn: str, later: str, takes_json_string: bool) -> TaggedCallFormat | None:
    """The form of a turn of the two calls; `later` is the same turn after a word."""
    first, second = _CALLS
    before, _, rest = turn.partition(first.name)
    head, _, tail = rest.partition("{")
    body, argument, call_example = "{" + tail, None, "{...}"
    try:
        given, size = json.JSONDecoder().raw_decode(body)
    except ValueError:
        given, size = None, 0
    if given == first.arguments:
        after_name, body = head, body[size:]
    elif parts := _learn_argument(rest):
        after_name, argument, body, call_example = parts
    else:
        return None
    between, found, _ = body.partition(second.name)
    begin = _cut_to_tag(common_end(before, between))
    if not found or not begin:
        return None
    end = between[: len(between) - len(begin)].strip()
    common = common_end(before, later.partition(first.name)[0])
    opening = common[: len(common) - len(begin)].strip()
    closing = _TAG.match(_loose(end).split(turn)[-1].lstrip()) if opening and end else None
    tag = _TAG.match(begin)
    number = re.match(r":\d+", after_name)
    after = ("", after_name[number.end() :]) if number else ("", after_name)
    pattern = rf"{':[0-9]{1,9}' if number else ''}{_loose(after[1]).pattern}"
    return TaggedCallFormat(
        begin=re.compile(_loose(begin).pattern.removeprefix(r"\s*")),
        after_name=re.compile(pattern),
        argument=argument,
        end=_loose(end),
        section=tuple(word for word in (opening, closing[0] if closing else "") if word),
        signs=tuple(word for word in (opening, tag[0] if tag else begin) if word),
        call_example=f"{opening}{begin}name{after_name}{call_example}{end}{closing[0] if closing else ''}",
        is_numbered=number is not None,
        takes_json_string=takes_json_string,
    )


def _learn_argument(rest: str) -> tuple[str, _Argument, str, str] | None:
    """(what stands after the name, tags, the text after the last value, an example) of the text after a name."""
    parts, names = list[str](), [word for pair in _pairs(_CALLS[0]) for word in pair]
    for word in names:
        part, found, rest = rest.partition(word)
        if not found:
            return None
        parts.append(part)
    head, key_end, gap, _ = parts
    begin = _cut_to_tag(common_end(head, gap))
    value_end = gap[: len(gap) - len(begin)]
    if not begin or not value_end.strip() or not rest.startswith(value_end.rstrip()):
        return None
    tags = _Argument(
        begin=begin,
        key=re.compile(rf'\s*([^<>"\n]{{1,200}}?){_loose(key_end).pattern}'),
        end=value_end.strip(),
        has_line_after_key=key_end.endswith("\n"),
        has_line_before_end=value_end.startswith("\n"),
    )
    call_example = f"{begin}key{key_end}value{value_end}"
    return head[: len(head) - len(begin)], tags, rest[len(value_end.rstrip()) :], call_example


def _pairs(call: ToolCall) -> Iterable[tuple[str, Any]]:
    return call.arguments.items() if isinstance(call.arguments, dict) else ()


def _cut_to_tag(text: str) -> str:
    """From the first tag of a text on; "" if it has none."""
    place = min((at for at in (text.find("<"), text.find("[")) if at >= 0), default=len(text))
    return text[place:]


def _loose(text: str) -> re.Pattern[str]:
    """A text with any blanks before it and where it has some."""
    return re.compile("".join(rf"\s*{re.escape(word)}" for word in text.split()))
