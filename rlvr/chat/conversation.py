"""Conversations token for token: what a program sends as messages becomes the ids that the policy read and sampled.

A `Conversation` is what one program (an agent in one episode) says to the policy and gets from it. It keeps the ids of
two things: each prompt as the policy read it, and each turn as the policy sampled it.

    template = ChatTemplate(tokenizer)
    conversation = Conversation(template)
    prompt = conversation.encode(call)                  # the ids that the policy reads
    answer = conversation.read(call, prompt, sequence)  # what it sampled, as the program gets it
    conversation.record(call, answer)                   # its ids are known from here on

A program keeps its history as messages and sends all of it with each call. Encoded again, that text would often be
other tokens than those that were sampled. So messages that equal what was recorded keep their ids, and only what is new
is rendered and encoded, once:

    call 1   [user "2+3?"]                              ->  ids P of the whole; the policy samples the ids T, "5."
    call 2   [user "2+3?", assistant "5.", user "ok?"]  ->  P + T + the new ids of 'user "ok?"'
    call 3   [user "2+3?", assistant "five"]...         ->  changed: encoded as a whole, a new branch
"""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlvr.chat.call_parts import TemplateCallFormat, ToolCall, adapt_messages
from rlvr.chat.chat_template import has_template, list_variables, render_chat
from rlvr.chat.dialects.forms import ChatAnswer, ChatRequest, Json
from rlvr.chat.special_tokens import blank_special, special_token_texts
from rlvr.chat.tool_calls import ToolCallFormat
from rlvr.chat.turns import LostTurn, decode_turn, render_after
from rlvr.core.messages import SampledSequence, SamplingParams
from rlvr.core.types import StopReason

# The contents one after the other, for tokenizers without a template of their own.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_RECENT = 8  # calls of a program whose histories are kept as they were read
_SCHEMA = "Answer with JSON that follows this schema, and with nothing else: "


class TemplateError(ValueError):
    """Messages that the chat template or the tokenizer refuses."""


class ChatTemplate:
    """The one place that knows how a tokenizer's chat template writes a conversation, and reads an answer.

    `arguments` go to the template with every conversation. A tokenizer without a template writes the contents of the
    messages one after the other (`PLAIN`).
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.has_own = has_template(tokenizer)
        self.arguments: dict[str, Any] = dict(arguments or {}) if self.has_own else {"chat_template": PLAIN}
        self._added = special_token_texts(tokenizer)
        self._special = [text for text in getattr(tokenizer, "all_special_tokens", []) if text.strip()]

    @cached_property
    def _variables(self) -> set[str]:
        return list_variables(self.tokenizer)

    @cached_property
    def tool_calls(self) -> TemplateCallFormat:
        """How the template writes calls of tools; TemplateError if it has no tools, or a form that is not known."""
        if not self.has_own or "tools" not in self._variables:
            raise TemplateError("tools: this model's chat template has no tools; leave them out, or use another model")
        try:
            return ToolCallFormat.of_template(self.tokenizer)
        except ValueError as error:
            raise TemplateError(f"tools: {error}") from error

    def prepare(self, call: ChatRequest) -> list[Json]:
        """The messages of a call as the template reads them. A schema for the answer is a request in the system
        message, since nothing enforces it."""
        messages = [self.clean(message) for message in call.messages]
        if call.schema is None:
            return messages
        wanted = _SCHEMA + json.dumps(_blank_json(call.schema, self._added), ensure_ascii=False, sort_keys=True)
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        if first is None:
            return [{"role": "system", "content": wanted}, *messages]
        return [{**first, "content": f"{first['content']}\n\n{wanted}"}, *messages[1:]]

    def clean(self, message: Json) -> Json:
        """The message without the texts of special tokens: what a program says is data. An assistant's may hold words
        that the policy has tokens for, such as `<think>`."""
        special = self._special if message["role"] == "assistant" else self._added
        cleaned = {**message, "content": _blank_json(message.get("content") or "", special)}
        if message.get("tool_calls"):
            cleaned["tool_calls"] = _blank_json(message["tool_calls"], special)
        return cleaned

    def clean_tools(self, tools: Sequence[Json]) -> list[Json]:
        """The tools without the texts of special tokens: their descriptions may be of others."""
        return _blank_json(list(tools), self._added)

    def encode(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
        """The ids of a whole conversation, up to where the policy speaks; TemplateError for one that is refused."""
        return self.encode_text(self.render(messages, tools))

    def render(self, messages: Sequence[Json], tools: Sequence[Json]) -> str:
        """The text of a whole conversation, up to where the policy speaks."""
        given = self._adapt(messages)
        return self._render(lambda more: render_chat(given, self.tokenizer, more), tools)

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """This template with more arguments; TemplateError for one that it does not read."""
        known = self._variables - {"tools"}
        if unknown := sorted(set(arguments) - known):
            raise TemplateError(
                f"chat_template_kwargs: {', '.join(unknown)[:200]} is not read by this model's chat template, which "
                f"takes {', '.join(sorted(known)) or 'none'}"
            )
        made = copy.copy(self)
        made.arguments = {**self.arguments, **arguments}
        return made

    def encode_new_messages(
        self, before: Sequence[Json], messages: Sequence[Json], tools: Sequence[Json], turn: Sequence[int]
    ) -> list[int]:
        """The ids between the policy's `turn`, which was the last of the messages `before`, and where it speaks again
        after `messages`."""
        given = self._adapt([*before, *messages])
        earlier, later = given[: len(before) - 1], given[len(before) :]
        calls = before[-1].get("tool_calls") or ()
        called = calls[0]["function"]["name"] if calls else ""
        return self.encode_text(
            self._render(lambda more: render_after(earlier, later, self.tokenizer, more, turn, called), tools)
        )

    def _adapt(self, messages: Sequence[Json]) -> list[Json]:
        """The messages with their calls as the template takes them."""
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        try:
            return adapt_messages(messages, self.tool_calls)
        except TemplateError:  # a template without calls shows none
            return list(messages)

    def _render(self, render: Any, tools: Sequence[Json]) -> str:
        if tools:
            _ = self.tool_calls  # a template without tools would leave them out in silence
        more = {**self.arguments, "tools": list(tools)} if tools else self.arguments
        try:
            return str(render(more))
        except Exception as error:  # a template may raise any error of its own
            raise TemplateError(f"messages: the chat template refuses them ({error!s:.300})") from error

    def encode_text(self, text: str) -> list[int]:
        """The ids of a rendered conversation, or a part of one."""
        try:
            return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]
        except Exception as error:  # a word-level vocabulary without a word; each library has its own error
            raise TemplateError(f"messages: this model's tokenizer cannot encode them ({error!s:.200})") from error

    def list_stops(self, call: ChatRequest) -> list[Any] | None:
        """Where an answer ends: at the stop strings of a call and the end token; None for the end token alone."""
        if not call.stop:
            return None
        end = self.tokenizer.eos_token_id
        return [*call.stop, *([] if end is None else [end])]

    def sampling_params(self, call: ChatRequest) -> SamplingParams:
        """The sampling settings that a call asks for; ValueError for one that cannot be."""
        return SamplingParams(
            max_tokens=call.max_tokens,
            # Samplers count from 0 where none is given: a server that is started again would sample the same again.
            seed=secrets.randbits(62) if call.seed is None else call.seed,
            stop=self.list_stops(call),
            temperature=1.0 if call.temperature is None else call.temperature,
            top_p=1.0 if call.top_p is None else call.top_p,
            top_k=call.top_k or -1,
            min_p=call.min_p or 0.0,
        )

    def read_answer(
        self, tokens: Sequence[int], call: ChatRequest, write_id: Callable[[int], str]
    ) -> tuple[Json, str | None]:
        """The assistant's message that tokens are, and the stop string at which they end, if at one."""
        text = decode_turn(tokens, self.tokenizer)
        stop = next((stop for stop in call.stop if text.endswith(stop)), None)
        if stop is not None:
            text = text.removesuffix(stop)
        return self.read_text(text, call, write_id), stop

    def read_text(
        self, text: str, call: ChatRequest, write_id: Callable[[int], str], keeps_special: bool = False
    ) -> Json:
        """The assistant's message that a text is, special tokens included.

        `write_id` gives the ids of its calls of tools, numbered from 0: nine letters and digits, as all templates take.
        """
        calls: list[ToolCall] = []
        if call.tools:
            text, calls = self.tool_calls.split(text, call.tools)
        for special in () if keeps_special else self._special:
            text = text.replace(special, "")
        message: Json = {"role": "assistant", "content": text.strip() if calls else text}
        if calls:
            named = enumerate(calls[:1] if call.one_call else calls)
            message["tool_calls"] = [
                {
                    "id": write_id(number),
                    "type": "function",
                    "function": {"name": one.name, "arguments": one.arguments},
                }
                for number, one in named
            ]
        return message


@dataclass(frozen=True, eq=False)
class _History:
    """The messages of a call as the program sent them and, with its tools, as the template reads them. `keys` has one
    for each beginning of those: for no message, the first, the first two, ..."""

    sent: list[Json]
    options: str  # tools and schema, as they were sent
    messages: list[Json]
    tools: list[Json]
    keys: list[str]


class Conversation:
    """The tokens of one program's messages, so that a later request continues with the tokens that were sampled.

    Tool calls get their ids in the order in which they come. With `is_parallel` an id is a hash of the tokens before
    the call: some templates show ids to the policy, and requests that come at the same time have no order.
    """

    def __init__(self, template: ChatTemplate, is_parallel: bool = False) -> None:
        self.template, self._is_parallel = template, is_parallel
        self._next_id = 1  # of the next call of a tool
        self._prompts: dict[str, Sequence[int]] = {}  # of all messages up to there
        self._turns: dict[str, tuple[Sequence[int], Sequence[int]]] = {}  # prompt and turn, with the turn's message
        self._recent: list[_History] = []  # of the last calls: most go on from one of them

    def encode(self, call: ChatRequest) -> list[int]:
        """The prompt of a call. TemplateError for one that the template refuses."""
        history = self._read_history(call)
        messages, tools, keys = history.messages, history.tools, history.keys
        if keys[-1] in self._prompts:  # asked again
            return list(self._prompts[keys[-1]])
        for place in range(len(messages) - 1, 0, -1):
            if (known := self._turns.get(keys[place])) is None:
                continue
            prompt, turn = known
            try:
                added = self.template.encode_new_messages(messages[:place], messages[place:], tools, turn)
            except TemplateError as error:
                if isinstance(error.__cause__, LostTurn):  # such a template shows the policy one turn only
                    break
                raise
            return [*prompt, *turn, *added]
        return self.template.encode(messages, tools)

    def read(self, call: ChatRequest, prompt: Sequence[int], sequence: SampledSequence) -> ChatAnswer:
        """The answer to a call that a sampled completion is, as the program gets it."""

        def write_id(number: int) -> str:
            if not self._is_parallel:
                return f"call{self._next_id + number:05d}"
            place = repr(([*prompt], sequence.tokens, number)).encode()
            return f"c{hashlib.blake2b(place, digest_size=4).hexdigest()}"

        message, stop = self.template.read_answer(sequence.tokens, call, write_id)
        calls = message.get("tool_calls") or ()
        self._next_id += len(calls)
        ended = "length" if sequence.stop_reason is StopReason.LENGTH else "stop"
        decode = self.template.tokenizer.decode
        texts = [decode([token]) for token in sequence.tokens] if call.with_logprobs else ()
        finish = "tool_calls" if calls else ended
        return ChatAnswer(message, finish, prompt, sequence.tokens, sequence.logprobs or (), texts, stop)

    def record(self, call: ChatRequest, answer: ChatAnswer) -> None:
        """Keep the tokens of an answer, which a later call continues. Of two equal messages the first counts."""
        key = self._read_history(call).keys[-1]
        self._prompts.setdefault(key, answer.prompt_tokens)
        self._turns.setdefault(
            _next_key(key, self.template.clean(answer.message)), (answer.prompt_tokens, answer.tokens)
        )

    def _read_history(self, call: ChatRequest) -> _History:
        """The history of a call. What one of the last calls began with too is taken from there: of a thousand messages
        only the new ones are cleaned and hashed."""
        options, template = repr((call.tools, call.schema)), self.template
        known, shared = None, 0
        for one in self._recent:
            if one.options == options and (count := _count_equal(one.sent, call.messages)) > shared:
                known, shared = one, count
        if known is None:
            messages, tools = template.prepare(call), template.clean_tools(call.tools)
            keys = [hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest()]
        else:
            if shared == len(call.messages) == len(known.sent):
                return known
            place = shared + len(known.messages) - len(known.sent)  # behind the message that asks for a schema
            messages = [*known.messages[:place], *map(template.clean, call.messages[shared:])]
            tools, keys = known.tools, known.keys[: place + 1]
            if shared == len(known.sent):  # all of it is in this one
                self._recent.remove(known)
        for message in messages[len(keys) - 1 :]:
            keys.append(_next_key(keys[-1], message))
        history = _History(call.messages, options, messages, tools, keys)
        self._recent = [*self._recent[1 - MAX_RECENT :], history]
        return history


def _count_equal(one: Sequence[Json], other: Sequence[Json]) -> int:
    """The messages at the beginning of both that are the same. Python takes 1, 1.0 and True for equal, and arguments
    of calls may hold them."""
    pairs = enumerate(zip(one, other, strict=False))
    is_other = (number for number, (a, b) in pairs if a != b or repr(a.get("tool_calls")) != repr(b.get("tool_calls")))
    return next(is_other, min(len(one), len(other)))


def _next_key(key: str, message: Json) -> str:
    """The key of a conversation whose messages before this one have `key`."""
    return hashlib.sha256(key.encode() + _identity(message)).hexdigest()


def _identity(message: Json) -> bytes:
    """What two messages have in common that a policy reads as the same: not the ids of calls, not the blanks around
    what an assistant says, which programs strip, not whether a number is 1 or 1.0, which JavaScript does not tell."""
    content = message.get("content") or ""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    is_said = message["role"] == "assistant"
    parts = [message["role"], content.strip() if is_said else content, _plain_numbers(calls)]
    return json.dumps(parts, sort_keys=True).encode() + b"\n"


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _blank_json(value: Any, special: Sequence[str]) -> Any:
    """A JSON value whose texts, the names of its fields too, hold no text of a special token, and no lone surrogate,
    which has no token. Dialects bound how deep it is."""
    if isinstance(value, str):
        return blank_special(value.encode("utf-8", "replace").decode(), special)
    if isinstance(value, dict):
        return {_blank_json(name, special): _blank_json(inner, special) for name, inner in value.items()}
    if isinstance(value, list):
        return [_blank_json(inner, special) for inner in value]
    return value
