"""Calls of tools in a completion, in the form in which the model's own chat template writes them.

A template is asked once, with a call whose parts are known, and what it writes around the call's JSON tells the form:
`<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Qwen, Hermes), bare JSON with `parameters` (Llama 3),
`[TOOL_CALLS][{...}]` (Mistral). Templates that write the name or the arguments between tags have a form of
`tagged_calls`; any other form is refused before sampling. Models without a template write calls as words
(`WordCallFormat`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.chat.call_parts import (
    MOST_MALFORMED,
    UNREADABLE,
    TemplateCallFormat,
    ToolCall,
    common_end,
    find_json_error,
    skip_blanks,
)
from rlvr.chat.tagged_calls import find_tagged_format

_NAME, _KEY, _VALUE = "name_of_the_probe", "key_of_the_probe", "value_of_the_probe"
_PROBE = {
    "id": "call00001",  # nine letters and digits: Mistral's templates take no other
    "type": "function",
    "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_NAME_KEYS = ("name", "function", "tool")  # under which models name a tool, whatever their template says
_BARE_OPENING = re.compile(r"\s*(?:<\|python_tag\|>|```(?:json)?)?\s*(?=[{\[])")  # what Llama 3 writes before JSON, too
_USER, _SAID = {"role": "user", "content": "What is it?"}, "Wait."


@dataclass(frozen=True)
class WordCallFormat:
    """Calls as words, for models without a chat template: `<call> add 3 5 </call>`, and `<result> 8 </result>`.

    The name of the tool comes first, then its arguments in order, without blanks of their own. `failure` stands for the
    result of a call that failed, whose reason a small vocabulary cannot say; None shows the reason.
    """

    begin: str = "<call>"
    end: str = "</call>"
    result_begin: str = "<result>"
    result_end: str = "</result>"
    failure: str | None = None

    def __post_init__(self) -> None:
        for name in ("begin", "end", "result_begin", "result_end"):
            if not (isinstance(word := getattr(self, name), str) and word.strip()):
                raise ValueError(f"tools: calls.{name}={word!r}, expected text that is not blank")
        if self.begin == self.end:
            raise ValueError(f"tools: calls.begin and calls.end are both {self.begin!r}; give two different words")

    @property
    def words(self) -> list[str]:
        return [self.begin, self.end, self.result_begin, self.result_end, *([self.failure] if self.failure else [])]

    def split(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
        """What is opened and not closed, or has no name, stays in the text."""
        kept, calls, position = "", list[ToolCall](), 0
        while (at := text.find(self.begin, position)) >= 0:
            ended = text.find(self.end, at)
            words = text[at + len(self.begin) : ended].split() if ended >= 0 else []
            if not words:
                break
            kept, position = kept + text[position:at], ended + len(self.end)
            calls.append(ToolCall(words[0], words[1:]))
        return (kept + text[position:]).strip() if calls else text, calls

    def find_malformed(self, text: str, tools: Collection[str]) -> str:
        """Describe the malformed call in a text from which the valid calls were taken; "" if there is none."""
        return f"{UNREADABLE}: write {self.begin} name arguments {self.end}" if self.begin in text else ""

    def write_results(self, results: Sequence[str]) -> str:
        return "".join(f" {self.result_begin} {result} {self.result_end} " for result in results)


@dataclass(frozen=True)
class ToolCallFormat:
    """Calls as JSON between two words. `begin` stands before the JSON of a call and `end` after it; both may be empty,
    then a call is the whole text."""

    begin: str
    end: str
    name_key: str
    arguments_key: str

    @classmethod
    def of_template(cls, tokenizer: Any) -> TemplateCallFormat:
        """The form of a tokenizer's chat template; ValueError if it writes no calls, or in a form that is not known.

        The call is written after nothing and after a word: what stands before its JSON in both is how it begins. What
        depends on the text, as Qwen 3's empty block of thinking does, is no part of it.
        """

        def render(*messages: Any, ask: bool = False) -> str:
            return str(
                tokenizer.apply_chat_template(list(messages), tools=[_TOOL], add_generation_prompt=ask, tokenize=False)
            )

        def write_turn(said: str, calls: Sequence[Mapping[str, Any]]) -> str:
            """The text that the template writes for the assistant's turn, without what the prompt of the turn has."""
            prompt = render(_USER, ask=True)
            whole = render(_USER, {"role": "assistant", "content": said, "tool_calls": list(calls)})
            shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
            return whole[min(shared, len(prompt)) :]

        refusal: Exception | None = None
        try:
            if found := cls._of_turns(write_turn("", [_PROBE]), write_turn(_SAID, [_PROBE])):
                return found
        except Exception as error:  # a template may raise any error of its own
            refusal = error
        if tagged := find_tagged_format(write_turn):
            return tagged
        if refusal:
            raise ValueError(f"the chat template cannot write a call of a tool ({refusal!s:.200})") from refusal
        raise ValueError(
            "the chat template writes no calls of tools, or writes them in a form other than JSON or a name and "
            "arguments between tags, which is not supported"
        )

    @classmethod
    def _of_turns(cls, *turns: str) -> ToolCallFormat | None:
        """The form of a turn and of the same turn after a word; None if the call is not JSON."""
        (start, size, value), (later, _, _) = (next(_json_values(turn, _NAME), (0, 0, None)) for turn in turns)
        call = value[0] if isinstance(value, list) and value else value
        call = call.get("function", call) if isinstance(call, dict) else None
        names = [key for key, held in call.items() if held == _NAME] if isinstance(call, dict) else []
        arguments = [key for key, held in call.items() if held == {_KEY: _VALUE}] if isinstance(call, dict) else []
        if len(names) != 1 or len(arguments) != 1:
            return None
        begin = common_end(turns[0][:start], turns[1][:later]).strip()
        after = turns[0][start + size :].lstrip()
        closing = after.split("\n")[0].split("<|")[0].strip()
        return cls(begin, closing if begin else "", names[0], arguments[0])

    @property
    def takes_json_string(self) -> bool:
        return False

    @property
    def is_numbered(self) -> bool:
        return False

    def write_id(self, name: str, number: int) -> str:
        return f"call{number:05d}"

    def split(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls. What looks like one and is not well formed stays in the text."""
        calls: list[ToolCall] = []
        if not self.begin:
            found = self._read(text, skip_blanks(text, 0))
            return ("", found[1]) if found and skip_blanks(text, found[0]) == len(text) else (text, [])
        kept, position, malformed = list[str](), 0, 0
        while malformed < MOST_MALFORMED and (at := text.find(self.begin, position)) >= 0:
            body = at + len(self.begin)
            found = self._read(text, skip_blanks(text, body))
            kept.append(text[position : body if found is None else at])
            position = body
            if found is None:
                malformed += 1
                continue
            position, more = found
            calls += more
            ending = skip_blanks(text, position)
            if self.end and text.startswith(self.end, ending):
                position = ending + len(self.end)
        return ("".join(kept) + text[position:]).strip() if calls else text, calls

    def find_malformed(self, text: str, tools: Collection[str]) -> str:
        """Describe the malformed call in a text from which the valid calls were taken; "" if there is none.

        Without a `begin` JSON alone is no sign of a call, since an answer may be JSON too. It is one if it names one of
        the `tools`, or if it cannot be read and has the keys of a call.
        """
        if self.begin:
            return self._explain(text.partition(self.begin)[2]) if self.begin in text else ""
        if (opening := _BARE_OPENING.match(text)) is None:
            return ""
        body, called = text[opening.end() :], "|".join(map(re.escape, tools))
        keys = "|".join(map(re.escape, (self.name_key, *_NAME_KEYS)))
        if re.search(rf"""["'](?:{keys})["']\s*:\s*["'](?:{called})["']""", body):
            return self._explain(body)
        has_keys = all(re.search(rf"""["']{re.escape(k)}["']\s*:""", body) for k in (self.name_key, self.arguments_key))
        return self._explain(body) if has_keys and find_json_error(body) else ""

    def _explain(self, body: str) -> str:
        """Why there is no call at the beginning of a text."""
        reason = find_json_error(body) or "it is JSON, but not such an object alone"
        return f'{UNREADABLE}: {reason}; expected {{"{self.name_key}": ..., "{self.arguments_key}": {{...}}}}'

    def _read(self, text: str, start: int) -> tuple[int, list[ToolCall]] | None:
        """(where it ends, calls) of the JSON at a place of a text; None if there is no call."""
        if not text.startswith(("{", "["), start):
            return None
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            return None
        calls = [self._call(one) for one in (value if isinstance(value, list) else [value])]
        return (end, [call for call in calls if call]) if calls and all(calls) else None

    def _call(self, value: Any) -> ToolCall | None:
        value = value.get("function", value) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            return None
        name, arguments = value.get(self.name_key), value.get(self.arguments_key)
        return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _json_values(text: str, holding: str) -> Iterator[tuple[int, int, Any]]:
    """(position, length, value) of the objects and lists in a text that hold a word, the outermost first."""
    for position, letter in enumerate(text):
        if letter in "{[":
            try:
                value, size = json.JSONDecoder().raw_decode(text[position:])
            except ValueError:
                continue
            if holding in text[position : position + size]:
                yield position, size, value
