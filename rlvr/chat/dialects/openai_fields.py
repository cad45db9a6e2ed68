"""What OpenAI's two dialects share: fields without effect, the choice of tools, formats of answers, errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlvr.chat.dialects.forms import ChatAnswer, Json
from rlvr.chat.dialects.request_fields import MAX_TOOLS, Fields, choose_tools, clean_arguments, refuse_tool

# How much a policy thinks is the run's to say (`prompt.thinking`), so hints to a provider's model change nothing.
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "cache_salt", "priority", "request_id"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning", "reasoning_effort", "include_reasoning", "verbosity", "prediction"),
}
LEAST_LOGPROB = -9999.0  # of a token that a model excludes: JSON has no infinity, and vLLM sends this number


def choose_openai_tools(fields: Fields, tools: list[Json]) -> tuple[list[Json], str | bool]:
    """The tools that are shown, and `ChatRequest.required_tool`.

    Chat completions have the names in an object, Responses flat.
    """
    given, param = fields.take("tool_choice"), fields.join_path("tool_choice")
    if given is None or isinstance(given, str):
        modes = {"auto": False, "required": True, "any": True, "none": None}
        if given is not None and given not in modes:
            fields.refuse("tool_choice", given, f"one of {', '.join(map(repr, modes))} or a function")
        return choose_tools(tools, modes[given or "auto"], param)
    choice = Fields(given, param)
    if choice.take_one_of("type", ("function", "allowed_tools")) == "function":
        return choose_tools(tools, (choice.take_child("function") or choice).take_word("name"), param)
    choice = choice.take_child("allowed_tools") or choice
    is_must = choice.take_one_of("mode", ("auto", "required")) == "required"
    allowed = [
        (one.take_child("function") or one).take_word("name") for one in choice.take_children("tools", MAX_TOOLS)
    ]
    return choose_tools(tools, is_must, param, allowed)


def take_function(fields: Fields) -> Fields:
    """A tool's object, which has to be a function's."""
    kind = fields.take("type")
    return fields if kind == "function" else refuse_tool(fields, kind, '{"type": "function", ...}')


def read_format(fields: Fields | None) -> Json | None:
    """The JSON schema that a format of answers asks for; None for text."""
    if fields is None or (kind := fields.take_one_of("type", ("text", "json_object", "json_schema"))) == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    holder = fields.take_child("json_schema") or fields
    schema = holder.take("schema")
    return schema if isinstance(schema, dict) else holder.refuse("schema", schema, "a JSON schema, which is an object")


def write_arguments(call: Mapping[str, Any]) -> str:
    """The arguments of a call as JSON text, in ASCII."""
    return json.dumps(clean_arguments(call["function"]["arguments"]))


def write_logprobs(answer: ChatAnswer) -> list[Json]:
    """The log-prob of each sampled token, and of the likeliest ones as far as they are known."""
    texts = answer.token_texts or [f"token_id:{token}" for token in answer.tokens]
    tops = answer.likeliest or [()] * len(answer.tokens)
    return [
        {**_write_logprob(*one), "top_logprobs": [_write_logprob(*each) for each in top]}
        for one, top in zip(zip(texts, answer.logprobs, strict=True), tops, strict=True)
    ]


def _write_logprob(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode(errors="replace"))}


def check_top_logprobs(fields: Fields) -> None:
    top = fields.take_whole("top_logprobs", 0)
    if top is not None and top > 1:
        fields.refuse("top_logprobs", top, "0 or 1: only the log-prob of the sampled token is known")


def write_openai_error(message: str, status: int, param: str | None) -> Json:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
