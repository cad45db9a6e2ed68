"""The bodies of the open endpoints. A field that would change the result and is not supported is refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from rlvr.core.messages import SamplingParams
from rlvr.core.registry import did_you_mean
from rlvr.tinker_server.protocol.errors import UserError
from rlvr.tinker_server.protocol.schemas import Name, Whole, check_stops

# Fields that clients send and that change nothing here.
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt", "priority"),
    "request_id",
    "routed_experts_prompt_start",  # verifiers sends it from the second turn on; routed experts are not returned
}
_NEAR = 0.82  # max_new_tokens is near to max_tokens, min_tokens is not
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # the first mistake is enough: a list may have a million


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, _TOKENS, *({"type": "array", "items": one, "minItems": 1} for one in (_TEXT, _TOKENS))]
}

# What this server always does, so `false` would change the result.
_OFF: list[Any] = [None, False, 0, "", [], {}, "auto", "text", {"type": "text"}]
_ALWAYS_ON = ("add_generation_prompt", "parallel_tool_calls", "spaces_between_special_tokens")


def _is_tokens(given: Any) -> bool:
    return isinstance(given, list) and all(type(token) is int and token >= 0 for token in given)


def _is_off(name: str, value: Any, always_on: Sequence[str]) -> bool:
    """Whether a field has the value that changes nothing."""
    if name in always_on:
        return value is None or value is True
    if name == "repetition_penalty" and value == 1:
        return value is not True
    return value in _OFF


def _describe_unknown_fields(schema: dict[str, Any], kind: type[OpenRequest]) -> None:
    """Add to a schema what `_refuse_unknown_fields` accepts."""
    fields: dict[str, Any] = {name: {} for name in sorted(_WITHOUT_EFFECT)}
    fields |= {name: {"enum": [None, True]} for name in kind.always_on}
    fields["repetition_penalty"] = {"enum": [*_OFF, 1]}
    schema["properties"] = {**fields, **schema["properties"]}
    schema["additionalProperties"] = {"enum": _OFF}


class OpenRequest(BaseModel):
    """A field that is not known is refused, unless it says off or belongs to `_WITHOUT_EFFECT`."""

    model_config = ConfigDict(
        protected_namespaces=(), extra="ignore", strict=True, json_schema_extra=_describe_unknown_fields
    )
    always_on: ClassVar[Sequence[str]] = _ALWAYS_ON

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = {*cls.model_fields, *_WITHOUT_EFFECT}
            for name, value in given.items():
                if name not in known and not _is_off(name, value, cls.always_on):
                    near = did_you_mean(str(name)[:100], cls.model_fields, _NEAR)
                    raise ValueError(f"{name!r:.100} is not supported by this server{near}; leave it out")
        return given


# null is the default of the field.
NullableFloat = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]})]
NullableInt = Annotated[int, WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "null"}]})]


class OpenSamplingFields(OpenRequest):
    """What the endpoints share. `stop` strings and `stop_token_ids` end a completion beside the model's end tokens."""

    temperature: NullableFloat = 1.0
    top_p: NullableFloat = 1.0
    top_k: Whole = -1
    min_p: NullableFloat = 0.0
    seed: Whole | None = None
    n: NullableInt = 1
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @field_validator("temperature", "top_p", "min_p", mode="before")
    @classmethod
    def _take_null(cls, given: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if given is None else given

    @field_validator("n", mode="before")
    @classmethod
    def _take_null_n(cls, given: Any) -> Any:
        return 1 if given is None else given

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, given: Any) -> Any:
        return check_stops(given)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def params(self, max_tokens: int | None, end_tokens: Collection[int]) -> SamplingParams:
        ends = [] if self.ignore_eos else sorted(end_tokens)
        stops: Sequence[Any] = [*self.stop_strings, *ends, *(self.stop_token_ids or [])]
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                seed=self.seed,
                stop=stops,
                temperature=self.temperature,
                top_k=-1 if self.top_k == 0 else self.top_k,  # 0 is off in vLLM
                top_p=self.top_p,
                min_p=self.min_p,
            )
        except ValueError as error:
            raise UserError(str(error).removeprefix("SamplingParams: ")) from error


class StreamOptions(OpenRequest):
    include_usage: bool = False


class CompletionRequest(OpenSamplingFields):
    """The body of `POST /v1/completions`."""

    always_on: ClassVar[Sequence[str]] = (*_ALWAYS_ON, "add_special_tokens")  # of a prompt of text
    model: Name
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    best_of: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _say_what_a_prompt_is(cls, given: Any) -> Any:
        """Checked by hand: pydantic would name each fault of each form, and a list may have a million tokens."""
        parts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        is_text = all(isinstance(part, str) for part in parts)
        if not is_text and not all(map(_is_tokens, parts)):
            shown = given[:20] if isinstance(given, (list, str)) else given
            raise ValueError(
                f"{shown!r:.100} is neither text nor token ids (whole numbers, at least 0), nor a list of one of these"
            )
        return given

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of={self.best_of} is not supported; leave it out, and give n")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError(f"max_tokens={self.max_tokens}, expected at least 0")
        if self.stream and self.max_tokens == 0:
            raise ValueError("stream with max_tokens=0 has nothing to stream; leave one of them out")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("stream with echo and logprobs is not supported; leave one of them out")
        parts = self.prompt if isinstance(self.prompt, list) else ()
        if not self.prompt or any(not isinstance(one, int) and not one for one in parts):
            raise ValueError("prompt: a prompt is empty; give at least one token")
        return self

    @property
    def explicit_limit(self) -> tuple[str, int] | None:
        """The limit that the client set, with its field. The default of 16 ends with the context."""
        is_given = "max_tokens" in self.model_fields_set and self.max_tokens is not None
        return ("max_tokens", self.max_tokens or 0) if is_given else None

    @property
    def limit(self) -> int | None:
        """The most tokens that are sampled: one for `max_tokens=0`, which asks for the prompt's log-probs only."""
        return None if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def prompts(self) -> list[str | list[int]]:
        return [self.prompt] if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else list(self.prompt)


class ChatMessage(OpenRequest):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None


class OpenChatRequest(OpenSamplingFields):
    """The body of `POST /v1/chat/completions`."""

    model: Name
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=10_000)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1_000)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"enum": [None, "auto", "none"]})] = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _check(self) -> OpenChatRequest:
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError("tool_choice: this server cannot force a call; use auto or none")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def explicit_limit(self) -> tuple[str, int] | None:
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return None if self.limit is None else (name, self.limit)

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class DialectRequest(BaseModel):
    """`POST /v1/responses` and `/v1/messages`: the other fields are the dialect's (`rlvr.chat.dialects`)."""

    model_config = ConfigDict(protected_namespaces=(), extra="allow", strict=True)
    model: Name


class GenerateParams(OpenSamplingFields):
    max_tokens: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = False

    @property
    def explicit_limit(self) -> tuple[str, int] | None:
        return None if self.max_tokens is None else ("sampling_params.max_tokens", self.max_tokens)


class GenerateRequest(OpenRequest):
    """`POST /inference/v1/generate`: token ids in, token ids out."""

    model: Name | None = None
    token_ids: Annotated[Tokens, Field(min_length=1)]
    sampling_params: GenerateParams = GenerateParams()
    stream: Annotated[Literal[False], WithJsonSchema({"enum": [False, 0]})] = False
    return_token_ids: bool = False


_FIELDS = {
    name for kind in (CompletionRequest, OpenChatRequest, GenerateRequest, GenerateParams) for name in kind.model_fields
}


def find_param(message: str) -> str | None:
    """The field that a message begins with: `n=0, ...`, `prompt: ...`, `'suffix' is not supported ...`."""
    match = re.match(r"(?P<quote>'?)(?P<field>[\w.]+)", message)
    is_field = match is not None and (match["quote"] or match["field"].partition(".")[0] in _FIELDS)
    return match["field"] if match is not None and is_field else None
