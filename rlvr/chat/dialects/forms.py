"""The form that all dialects are read into and written from: a call of a model, and what the policy answered.

A conversation is a list of messages as chat templates read them: `role`, `content` (text), and where they apply
`tool_calls` (each `{"id", "type": "function", "function": {"name", "arguments": {...}}}`, with the arguments as an
object) and `tool_call_id`. Tools are OpenAI's: `{"type": "function", "function": {"name", "description",
"parameters"}}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

Json = dict[str, Any]
Finish = Literal["stop", "length", "tool_calls"]


class DialectError(ValueError):
    """A request that cannot be answered. `param` is the field at fault, if it is one field; `status` is HTTP's."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class ChatRequest:
    """What a program asks of a model. An option that is None was not given.

    `one_call` asks for at most one call of a tool in an answer (`parallel_tool_calls=false`). `previous` names an
    earlier answer, by its id, whose conversation `messages` go on from, if the answer `is_kept` (Responses only); with
    `has_instructions` the first of them holds for this call alone. `schema` is a JSON schema that the answer should
    follow; `required_tool` is the name of the tool that has to be called, True for any of them, False for none.
    Nothing forces a policy to either: the schema is written into the conversation as a request, and the call is left
    to the policy.
    """

    model: str
    messages: list[Json]
    tools: list[Json] = field(default_factory=list[Json])
    count: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    one_call: bool = False
    required_tool: str | bool = False
    schema: Json | None = None
    previous: str | None = None
    is_kept: bool = field(default=False, compare=False)
    has_instructions: bool = False
    with_token_ids: bool = False
    with_logprobs: bool = False

    def continue_from(self, earlier: ChatRequest, message: Json) -> ChatRequest:
        """This call behind the conversation of the one that it names as `previous`, which `message` answered."""
        own = int(self.has_instructions)
        before = earlier.messages[int(earlier.has_instructions) :]
        return replace(self, messages=[*self.messages[:own], *before, message, *self.messages[own:]])


@dataclass(frozen=True)
class ChatAnswer:
    """One answer of the policy: an assistant's `message` in the form above, and how it ended.

    `stop` is the stop string at which it ended, if it was one. `tokens` are the sampled ids with their `logprobs`;
    `likeliest` has the texts and log-probs of the likeliest tokens at each place, if they are known.
    """

    message: Json
    finish: Finish
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    token_texts: Sequence[str] = ()
    stop: str | None = None
    likeliest: Sequence[Sequence[tuple[str, float]]] = ()


@dataclass(frozen=True)
class Event:
    """A server-sent event. `data` is an object, or a text such as `[DONE]`; `name` is None where a dialect has none."""

    data: Json | str
    name: str | None = None

    def encode(self) -> bytes:
        """The event as it is sent. JSON in ASCII: clients may split lines at Unicode's line separators."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data, separators=(",", ":"))
        head = f"event: {self.name}\n" if self.name else ""
        return f"{head}data: {text}\n\n".encode()


class ApiDialect(Protocol):
    """One way of talking to a model. Every method computes and does no input or output."""

    name: str
    path: str
    """Below the base URL: `/v1/chat/completions`."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """The call that a request's body asks for. DialectError for what is wrong or not supported, by its field."""
        ...

    def write(self, call: ChatRequest, answers: Sequence[ChatAnswer], id: str, created: int) -> Json:
        """The whole answer. `id` names it and is given back as `ChatRequest.previous`; `created` is in Unix seconds."""
        ...

    def write_events(self, call: ChatRequest, answers: Sequence[ChatAnswer], id: str, created: int) -> Iterator[Event]:
        """The whole answer as a stream of events. What has to be kept is kept before the last event is sent."""
        ...

    def write_error(self, message: str, status: int, param: str | None = None) -> Json:
        """The body of an error."""
        ...
