"""The routes of conversations, `/v1/chat/completions`, `/v1/responses` and `/v1/messages`.

The dialect of each API reads its requests and writes its responses. Chat completions have more: the likeliest tokens,
stops by token id, arguments of the chat template, and text that is streamed as it is sampled. What the server would
ignore is refused: a schema for the answer, a forced tool call, a reference to an earlier response.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from fastapi import APIRouter, Response

from rlvr.chat.conversation import ChatTemplate
from rlvr.chat.dialects.anthropic_messages import AnthropicMessages
from rlvr.chat.dialects.chat_completions import ChatCompletions
from rlvr.chat.dialects.forms import ApiDialect, ChatRequest, DialectError
from rlvr.chat.dialects.openai_responses import OpenaiResponses
from rlvr.core.messages import SampleResponse
from rlvr.recorder.app import write_answer, write_error
from rlvr.tinker_server.backend.storage.server_store import Row
from rlvr.tinker_server.http.dependencies import Caller, CallerDep, json_response
from rlvr.tinker_server.http.open_api.open_replies import ChatStream, make_chat_answer
from rlvr.tinker_server.http.open_api.open_routes import (
    OpenRoute,
    check_logprobs,
    find_fingerprint,
    make_head,
    respond,
    served_text,
)
from rlvr.tinker_server.http.open_api.open_sampling import OpenSampling
from rlvr.tinker_server.protocol.errors import TinkerServerError, UserError
from rlvr.tinker_server.protocol.open_requests import DialectRequest, OpenChatRequest

_CHAT = ChatCompletions()
router = APIRouter(route_class=OpenRoute)


@router.post(_CHAT.path)
async def chat(body: OpenChatRequest, caller: CallerDep) -> Response:
    row = await caller.call(caller.backend.sampling.find_model, body.model)
    text = await caller.compute(served_text, caller, row)
    call = await caller.compute(_read_chat, body)
    prompt = await caller.compute(text.render, call.messages, call.tools, body.chat_template_kwargs)
    options = {"topk_sample": check_logprobs(caller, "top_logprobs", body.top_logprobs)}
    sampling = OpenSampling(caller, row, [prompt])
    sampling.check_room(body.explicit_limit)
    await sampling.start(body.n, body.params(body.limit, sampling.end_tokens), options, is_streamed=body.stream)
    head = make_head("chatcmpl", "chat.completion.chunk", body.model, row)
    if body.stream:
        return respond(caller, sampling, lambda: ChatStream(body, call, sampling, text, head))
    [response] = await sampling.results()

    def answer() -> Response:
        skip = body.skip_special_tokens
        answers = [make_chat_answer(call, prompt, sequence, text, skip) for sequence in response.sequences]
        written = _CHAT.write(call, answers, head["id"], head["created"])
        return json_response(written | {"system_fingerprint": find_fingerprint(row, response)})

    return await caller.compute(answer)


def _read_chat(body: OpenChatRequest) -> ChatRequest:
    """The conversation, as the dialect reads it; options are those of all open endpoints."""
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    given = {"model": body.model, "messages": messages, "tools": body.tools, "tool_choice": body.tool_choice}
    try:
        call = _CHAT.read(given)
    except DialectError as error:
        fault = UserError(str(error))
        fault.param = (error.param or "").partition("[")[0] or None
        raise fault from error
    named = [
        {**read, "name": one.name} if one.name else read for read, one in zip(call.messages, body.messages, strict=True)
    ]
    return replace(
        call,
        messages=named,
        stop=tuple(body.stop_strings),
        with_token_ids=body.return_token_ids,
        with_logprobs=bool(body.logprobs),
    )


async def _answer(dialect: ApiDialect, body: DialectRequest, caller: Caller) -> Response:
    try:
        call = await caller.compute(dialect.read, {**(body.model_extra or {}), "model": body.model})
        _refuse_ignored(call)
        row = await caller.call(caller.backend.sampling.find_model, call.model)
        text = await caller.compute(served_text, caller, row)
        prompt = await caller.compute(text.render, call.messages, call.tools)
        response = await sample_call(caller, row, call, prompt, text.template)
    except (DialectError, TinkerServerError, ValueError) as error:
        return write_error(dialect, error)

    def answer() -> Response:
        answers = [make_chat_answer(call, prompt, sequence, text) for sequence in response.sequences]
        return write_answer(dialect, call, answers, secrets.token_hex(12))

    return await caller.compute(answer)


def _refuse_ignored(call: ChatRequest) -> None:
    if call.schema is not None:
        raise DialectError(
            "this server does not enforce a format of answers: describe the format in a message, and leave this field "
            "out"
        )
    if call.required_tool:
        raise DialectError("tool_choice: this server cannot force a call; use auto or none", "tool_choice")
    if call.previous is not None:
        raise DialectError(
            "previous_response_id: answers are not kept here; send the whole input, or open a rollout (/rollouts)",
            "previous_response_id",
        )


async def sample_call(
    caller: Caller, row: Row, call: ChatRequest, prompt: list[int], template: ChatTemplate
) -> SampleResponse:
    """Sample what a call asks for; without a limit of its own an answer ends with the context."""
    sampling = OpenSampling(caller, row, [prompt])
    if call.max_tokens is not None:
        sampling.check_room(("max_tokens", call.max_tokens))
    if (room := sampling.context - len(prompt)) < 1:
        raise UserError(f"messages: they leave no room in the model's context ({room} tokens); shorten them")
    params = template.sampling_params(call)
    stops = [*call.stop, *sorted(sampling.end_tokens)]
    await sampling.start(call.count, replace(params, max_tokens=params.max_tokens or room, stop=stops), {})
    [response] = await sampling.results()
    return response


def _add_dialect(dialect: ApiDialect) -> None:
    @router.post(dialect.path, name=dialect.name)
    async def handle(body: DialectRequest, caller: CallerDep) -> Response:
        return await _answer(dialect, body, caller)


for _dialect in (OpenaiResponses(), AnthropicMessages()):
    _add_dialect(_dialect)
