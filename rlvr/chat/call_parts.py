"""What the forms of calls of tools share: a call, the protocol of a form, and what reads values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

MOST_MALFORMED = 100  # openings without a call; each costs a look at all the text before it
UNREADABLE = "your call could not be read"
_BLANKS = re.compile(r"\s*")
_WORDS = {"True": True, "False": False, "None": None}  # as a template writes them that uses no JSON
_JSON_TYPES = {"string": str, "boolean": bool, "object": dict, "array": list, "null": type(None)}


class ToolCall(NamedTuple):
    """A call of a tool that the policy wrote: `arguments` by name; a list of words in their order, where a call is
    written as words."""

    name: str
    arguments: dict[str, Any] | list[str]


class CallFormat(Protocol):
    """A form in which a policy writes calls of tools."""

    def split(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls. What looks like one and is not well formed stays in the text.

        `tools` as a chat template takes them: their schemas tell text from numbers where a form writes both alike.
        """
        ...

    def find_malformed(self, text: str, tools: Collection[str]) -> str:
        """Describe the malformed call in a text from which the valid calls were taken; "" if there is none."""
        ...


class TemplateCallFormat(CallFormat, Protocol):
    """A form that a chat template writes."""

    @property
    def takes_json_string(self) -> bool:
        """Whether the template takes the arguments of a call as JSON text, and not as an object."""
        ...

    @property
    def is_numbered(self) -> bool:
        """Whether the template writes the id of a call, `functions.NAME:NUMBER`, in place of its name."""
        ...

    def write_id(self, name: str, number: int) -> str:
        """The id of a call of a conversation, numbered from 0. Otherwise nine letters and digits, as all templates take
        them."""
        ...


def adapt_messages(messages: Sequence[Mapping[str, Any]], form: TemplateCallFormat) -> list[dict[str, Any]]:
    """The messages of a conversation with the arguments and the ids of their calls as the template takes them."""
    if not (form.takes_json_string or form.is_numbered):
        return [dict(message) for message in messages]
    ids, count, found = dict[str, str](), 0, list[dict[str, Any]]()
    for message in messages:
        made = list[dict[str, Any]]()
        for call in message.get("tool_calls") or ():
            function, one = dict(call["function"]), dict(call)
            if form.takes_json_string and not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            if form.is_numbered:
                one["id"] = ids[str(call.get("id"))] = form.write_id(function["name"], count)
            made.append({**one, "function": function})
            count += 1
        adapted = {**message, "tool_calls": made} if made else dict(message)
        if (given := message.get("tool_call_id")) is not None:
            adapted["tool_call_id"] = ids.get(str(given), given)
        found.append(adapted)
    return found


def list_properties(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The schema of each argument, by the names of the tool and of the argument. What has none is left out."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(function, Mapping) and isinstance(properties, Mapping):
            found[str(function.get("name"))] = dict(properties)
    return found


def read_value(text: str, schema: Any) -> Any:
    """The value that a text is by a JSON schema; the text itself where the schema says so, or nothing else fits."""
    types = _list_types(schema)
    if types == {"string"}:
        return text
    word = text.strip()
    try:
        value = _WORDS[word] if word in _WORDS else json.loads(word, parse_constant=_refuse, parse_float=_read_float)
    except (ValueError, RecursionError):
        return text
    return value if not types or any(_has_type(value, one) for one in types) else text


def _list_types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it says nothing about them."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    if given is not None:
        return {str(one) for one in (given if isinstance(given, list) else [given])}
    if isinstance(values := schema.get("enum"), list) and values:
        return {"string"} if all(isinstance(value, str) for value in values) else set()
    parts = schema.get("anyOf") or schema.get("oneOf")
    found = [_list_types(part) for part in parts] if isinstance(parts, list) else []
    return set().union(*found) if all(found) else set()


def _has_type(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return not isinstance(value, bool) and isinstance(value, int if name == "integer" else (int, float))
    return isinstance(value, _JSON_TYPES.get(name, object))


def _read_float(word: str) -> float:
    return float(word) if math.isfinite(float(word)) else _refuse(word)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def find_json_error(text: str) -> str:
    """Why a text does not begin with JSON; "" if it does."""
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:  # a number of many digits; lists in lists
        return f"{error!s:.100}"
    return ""


def common_end(one: str, other: str) -> str:
    pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
    size = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[len(one) - size :]


def skip_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    assert blanks is not None
    return blanks.end()
