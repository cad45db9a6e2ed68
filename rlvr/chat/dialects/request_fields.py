"""Reading requests of unknown content: whatever is wrong is a DialectError that names its field.

A field that would change what is sampled and is not supported is refused by name; one that says off, or that changes
nothing here, is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from rlvr.chat.dialects.forms import DialectError, Json
from rlvr.core.registry import did_you_mean

MAX_DEPTH = 64  # of lists and objects in each other: a chat template that writes a schema recurses into it
MAX_VALUES = 1_000_000
MAX_BITS = 10_000  # of a whole number: Python writes none of more than 4,300 digits
MAX_ARGUMENTS = 1 << 20  # characters of the JSON of one call's arguments
MAX_MESSAGES, MAX_TOOLS, MAX_CHOICES = 10_000, 1_000, 128
MAX_STOPS, MAX_STOP_CHARS = 64, 1_000  # every sampled token is compared with each

_OFF = (None, False, 0, "", [], {}, "auto", "text", {"type": "text"})
# Fields whose value without effect is another one.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), 1),
    **dict.fromkeys(("add_generation_prompt", "spaces_between_special_tokens", "skip_special_tokens"), True),
    "modalities": ["text"],
}
_LARGEST = (1 << 63) - 1
_NEAR = 0.82  # max_new_tokens is near to max_tokens, min_tokens is not


def show(given: Any) -> str:
    return f"{given!r:.100}"


def check_json(given: Any, param: str | None = None) -> None:
    """DialectError for values that are not JSON's, that hold one another too deep, or that are too many."""
    what = param or "the body"
    level, left = [given], MAX_VALUES
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if not all(isinstance(name, str) for name in one):
                    raise DialectError(
                        f"{what} has an object with a field name that is not a string; JSON field names are strings",
                        param,
                    )
                below.extend(one.values())
            elif isinstance(one, list):
                below.extend(one)
            elif isinstance(one, float):
                if not math.isfinite(one):
                    raise DialectError(f"{what} holds the number {one}, expected JSON, whose numbers are finite", param)
            elif isinstance(one, int):
                if one.bit_length() > MAX_BITS:
                    raise DialectError(f"{what} holds a whole number of more than {MAX_BITS:,} bits", param)
            elif one is not None and not isinstance(one, str):
                raise DialectError(f"{what} holds a {type(one).__name__}, expected JSON", param)
        left -= len(below)
        if left < 0:
            raise DialectError(f"{what} has more than {MAX_VALUES:,} values; send fewer", param)
        if not below:
            return
        level = below
    raise DialectError(
        f"{what} has lists and objects in each other, more than {MAX_DEPTH} deep; send flatter ones", param
    )


class Fields:
    """The fields of an object in a request, each of which is taken once. `place` is where the object is."""

    def __init__(self, given: Any, place: str = "") -> None:
        if not isinstance(given, Mapping):
            raise DialectError(f"{place or 'the body'}: {show(given)}, expected an object", place or None)
        self.place = place
        self._given: Json = dict(given)
        self._taken: set[str] = set()

    def join_path(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def refuse(self, name: str, given: Any, expected: str) -> NoReturn:
        raise DialectError(f"{self.join_path(name)}: {show(given)}, expected {expected}", self.join_path(name))

    def take(self, name: str) -> Any:
        """The value of a field; None if it was not given."""
        self._taken.add(name)
        return self._given.get(name)

    def take_text(self, name: str) -> str | None:
        given = self.take(name)
        return given if given is None or isinstance(given, str) else self.refuse(name, given, "a text")

    def take_word(self, name: str, can_be_empty: bool = False) -> str:
        """A text that has to be given."""
        given = self.take_text(name)
        if given is None or not (given or can_be_empty):
            self.refuse(name, given, "a text" if can_be_empty else "a text that is not empty")
        return given

    def take_one_of(self, name: str, words: Collection[str]) -> str:
        given = self.take(name)
        known = isinstance(given, str) and given in words
        return given if known else self.refuse(name, given, f"one of {', '.join(map(repr, words))}")

    def take_flag(self, name: str, default: bool = False) -> bool:
        given = self.take(name)
        return default if given is None else given if isinstance(given, bool) else self.refuse(name, given, "a boolean")

    def take_number(self, name: str, is_fine: Callable[[float], bool], expected: str) -> float | None:
        given = self.take(name)
        if given is None:
            return None
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not is_number or abs(given) > _LARGEST or not is_fine(given):
            self.refuse(name, given, expected)
        return float(given)

    def take_whole(self, name: str, least: int, most: int = _LARGEST) -> int | None:
        given = self.take(name)
        if given is None:
            return None
        if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= most:
            upper = f" to {most}" if most < _LARGEST else ""
            self.refuse(name, given, f"a whole number from {least}{upper}")
        return given

    def take_child(self, name: str) -> Fields | None:
        """The object in a field."""
        given = self.take(name)
        return None if given is None else Fields(given, self.join_path(name))

    def take_children(self, name: str, most: int) -> list[Fields]:
        """The objects of the list in a field."""
        given = self.take(name)
        if given is None:
            return []
        if not isinstance(given, list):
            self.refuse(name, given, "a list of objects")
        if len(given) > most:
            raise DialectError(
                f"{self.join_path(name)} has {len(given):,} entries, expected at most {most:,}", self.join_path(name)
            )
        return [Fields(one, f"{self.join_path(name)}[{number}]") for number, one in enumerate(given)]

    def refuse_others(self, without_effect: Collection[str]) -> None:
        """DialectError for a field that was not taken, unless it says off or belongs to `without_effect`."""
        for name, given in self._given.items():
            if name in self._taken or name in without_effect or _is_off(name, given):
                continue
            near = did_you_mean(name[:100], self._taken, _NEAR)
            path = self.join_path(name)[:200]
            raise DialectError(f"{path}={show(given)} is not supported here{near}; leave it out", path)


def _is_off(name: str, given: Any) -> bool:
    if name in _NEUTRAL:
        neutral = _NEUTRAL[name]
        return given is None or (given == neutral and isinstance(given, bool) == isinstance(neutral, bool))
    return given in _OFF


def read_body(body: Any) -> Fields:
    """The fields of a request's body, all of which is JSON within limits."""
    fields = Fields(body)
    check_json(dict(body))
    return fields


def read_text(given: Any, param: str, kinds: Collection[str] = ("text",)) -> str:
    """A content as one text: a string, or the texts of its parts one after the other; "" for None."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise DialectError(f"{param}: {show(given)}, expected a text or a list of parts", param)
    texts: list[str] = []
    for number, one in enumerate(given):
        part = Fields(one, f"{param}[{number}]")
        kind = part.take("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise DialectError(
                f"{part.place} is of type {show(kind)}, which is not supported: this model reads text only; "
                f"give parts of type {' or '.join(map(repr, kinds))}",
                part.place,
            )
        name = "refusal" if kind == "refusal" else "text"
        text = part.take_text(name)
        texts.append(part.refuse(name, None, "a text") if text is None else text)
    return "".join(texts)


def read_arguments(given: Any, param: str) -> Json:
    """The arguments of a call of a tool: an object, or JSON text of one; none for an empty text or None."""
    if isinstance(given, str):
        if len(given) > MAX_ARGUMENTS:
            raise DialectError(f"{param} has {len(given):,} characters, expected at most {MAX_ARGUMENTS:,}", param)
        try:
            given = json.loads(given or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:  # RecursionError: lists in lists
            raise DialectError(
                f"{param} is not JSON ({error!s:.100}); give the arguments as a JSON object", param
            ) from error
        check_json(given, param)
    if given is not None and not isinstance(given, dict):
        raise DialectError(f"{param}: {show(given)}, expected a JSON object of the arguments by name", param)
    return given or {}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def clean_arguments(arguments: Mapping[str, Any]) -> Json:
    """The arguments as JSON can hold them: null for a number that is not finite, which a policy may have said."""
    try:
        json.dumps(arguments, allow_nan=False)
        return dict(arguments)
    except ValueError:
        text = json.dumps(arguments)
        return json.loads(text, parse_constant=lambda name: None)


def read_call(fields: Fields, id: str, arguments: str, named: Fields | None = None) -> Json:
    """A call of a tool. `id` and `arguments` are fields of it; name and arguments may be in an object of their own.

    The name may be empty: a policy may have said so.
    """
    named = named or fields
    given = read_arguments(named.take(arguments), named.join_path(arguments))
    function = {"name": named.take_word("name", can_be_empty=True), "arguments": given}
    return {"id": fields.take_word(id), "type": "function", "function": function}


def read_tool(fields: Fields, parameters: str = "parameters") -> Json:
    """The definition of a tool, from the object that has its name; `parameters` is the field of its JSON schema."""
    schema = fields.take(parameters)
    if schema is not None and not isinstance(schema, dict):
        fields.refuse(parameters, schema, "a JSON schema, which is an object")
    function = {
        "name": fields.take_word("name"),
        "description": fields.take_text("description") or "",
        "parameters": schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def refuse_tool(fields: Fields, kind: Any, expected: str) -> NoReturn:
    raise DialectError(
        f"{fields.place} is of type {show(kind)}, which its provider runs or defines, expected {expected}: this model "
        "has functions only, each with a name and a JSON schema",
        fields.place,
    )


def choose_tools(
    tools: list[Json], required_tool: str | bool | None, param: str, allowed: Collection[str] | None = None
) -> tuple[list[Json], str | bool]:
    """The tools that are shown and `ChatRequest.required_tool`, which is None here if no tool may be called."""
    if required_tool is None:
        return [], False
    names = {tool["function"]["name"] for tool in tools}
    for name in [*(allowed or ()), *([required_tool] if isinstance(required_tool, str) else ())]:
        if name not in names:
            raise DialectError(f"{param}: no tool has the name {show(name)}; give one of the tools' names", param)
    if required_tool and not tools:
        raise DialectError(f"{param} asks for a call, and there are no tools; give tools", param)
    if allowed is not None:
        shown = set(allowed)
        tools = [tool for tool in tools if tool["function"]["name"] in shown]
    return tools, required_tool


def read_sampling(fields: Fields, stop: str) -> dict[str, Any]:
    """The options of `ChatRequest` that all dialects name alike, and the stop strings of the field `stop`."""
    top_k = fields.take_whole("top_k", -1)
    return {
        "temperature": fields.take_number(
            "temperature", lambda given: 0 <= given < math.inf, "a finite number, 0 or more"
        ),
        "top_p": fields.take_number("top_p", lambda given: 0 < given <= 1, "a number in (0, 1]"),
        "top_k": -1 if top_k == 0 else top_k,  # 0 is off in vLLM
        "min_p": fields.take_number("min_p", lambda given: 0 <= given < 1, "a number in [0, 1)"),
        "seed": fields.take_whole("seed", -_LARGEST),
        "stop": _read_stop(fields, stop),
        "stream": fields.take_flag("stream"),
    }


def _read_stop(fields: Fields, name: str) -> tuple[str, ...]:
    given = fields.take(name)
    stops = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops) or len(stops) > MAX_STOPS:
        fields.refuse(name, given, f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS:,} characters")
    return tuple(stops)
