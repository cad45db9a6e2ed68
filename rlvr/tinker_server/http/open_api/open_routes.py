"""`/v1/models`, `/v1/completions` and `/inference/v1/generate`, and what `chat_routes` shares with them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from rlvr.core.messages import SampledSequence, SampleResponse
from rlvr.core.types import StopReason
from rlvr.tinker_server.backend.storage.server_store import Row
from rlvr.tinker_server.http.dependencies import Caller, CallerDep, JsonRoute, json_response
from rlvr.tinker_server.http.open_api import open_replies as replies
from rlvr.tinker_server.http.open_api.open_replies import AnswerStream, CompletionStream
from rlvr.tinker_server.http.open_api.open_sampling import OpenSampling, error_fields
from rlvr.tinker_server.http.open_api.served_text import ServedText
from rlvr.tinker_server.http.tinker_middleware import internal_error
from rlvr.tinker_server.protocol.errors import TinkerServerError, UserError
from rlvr.tinker_server.protocol.open_requests import CompletionRequest, GenerateRequest, find_param

Json = dict[str, Any]


class OpenRoute(JsonRoute):
    """A route whose errors name the field at fault, as OpenAI's do."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_and_name(request: Request) -> Response:
            try:
                return await handle(request)
            except TinkerServerError as error:
                error.param = error.param or find_param(str(error))
                raise

        return handle_and_name


router = APIRouter(route_class=OpenRoute)


@router.get("/v1/models")
async def models(caller: CallerDep) -> Json:
    """The base models, then the caller's saved weights."""
    engines = caller.backend.engines
    cards = [_model_card(name, engine.model.context) for name, engine in engines.items()]
    saved = await caller.call(caller.backend.queries.adapters)
    cards += [_model_card(path, engines[base].model.context, base) for path, base in saved if base in engines]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}")
async def model(name: str, caller: CallerDep) -> Json:
    row = await caller.call(caller.backend.sampling.find_model, name)
    return _model_card(name, caller.backend.engines[row["base_model"]].model.context, row["base_model"])


def _model_card(name: str, context: int, base: str = "") -> Json:
    card = {"id": name, "object": "model", "created": 0, "owned_by": "rlvr", "max_model_len": context}
    return card | ({"root": base, "parent": base} if base not in ("", name) else {})


@router.post("/v1/completions")
async def completions(body: CompletionRequest, caller: CallerDep) -> Response:
    given = body.prompts
    caller.backend.sampling.check_prompts(len(given))  # before they are tokenized
    row = await caller.call(caller.backend.sampling.find_model, body.model)
    text = await caller.compute(served_text, caller, row)
    prompts = await caller.compute(lambda: [text.encode(one) if isinstance(one, str) else one for one in given])
    top = check_logprobs(caller, "logprobs", body.logprobs)
    scores_prompt = body.echo and body.logprobs is not None
    options = {"topk_sample": top, "prompt_logprobs": scores_prompt, "topk_prompt": top if scores_prompt else 0}
    sampling = OpenSampling(caller, row, prompts)
    sampling.check_room(body.explicit_limit)
    await sampling.start(body.n, body.params(body.limit, sampling.end_tokens), options, is_streamed=body.stream)
    head = make_head("cmpl", "text_completion", body.model, row)
    name: Callable[[int], str] = (lambda one: f"token_id:{one}") if body.return_tokens_as_token_ids else text.token_text

    def prompt_texts() -> list[str]:
        return [
            one if isinstance(one, str) else text.decode(prompt, skip_special=False)
            for one, prompt in zip(given, prompts, strict=True)
        ]

    if body.stream:
        return respond(caller, sampling, lambda: CompletionStream(body, sampling, prompt_texts(), text, head, name))
    responses = await sampling.results()

    def answer() -> Response:
        answers = zip(prompts, prompt_texts(), responses, strict=True)
        choices = [
            choice
            for number, (prompt, lead, response) in enumerate(answers)
            for choice in _completion_choices(body, number, prompt, lead, response, text, name)
        ]
        spent = 0 if body.max_tokens == 0 else sum(len(one.tokens) for each in responses for one in each.sequences)
        total = replies.usage(sum(map(len, prompts)), spent)
        return json_response(
            head | {"choices": choices, "usage": total, "system_fingerprint": find_fingerprint(row, responses[0])}
        )

    return await caller.compute(answer)


def _completion_choices(
    body: CompletionRequest,
    number: int,
    prompt: list[int],
    lead: str,
    response: SampleResponse,
    text: ServedText,
    name: Callable[[int], str],
) -> Iterator[Json]:
    """The choices of one prompt, whose text is `lead`."""
    for index, sampled in enumerate(response.sequences):
        sequence = sampled if body.max_tokens != 0 else _without_tokens(sampled)
        said = replies.answer_text(sequence, text, body.stop_strings, body.skip_special_tokens)
        choice: Json = {
            "index": number * body.n + index,
            "text": lead + said if body.echo else said,
            "finish_reason": _reason(sequence),
            "logprobs": None,
        }
        if body.logprobs is not None:
            tokens, logprobs = sequence.tokens, list[float | None](sequence.logprobs or ())
            tops: list[Any] = list(sequence.topk_logprobs or [None] * len(tokens))
            if body.echo:
                before = response.topk_prompt_logprobs or [None] * len(prompt)
                tokens, logprobs = [*prompt, *tokens], [*(response.prompt_logprobs or ()), *logprobs]
                tops = [*before, *tops]
            offset = 0 if body.echo else len(lead)
            choice["logprobs"] = replies.completion_logprobs(tokens, logprobs, tops, text, name, offset)
        if body.return_token_ids:
            choice |= {"token_ids": sequence.tokens, "prompt_token_ids": prompt}
        yield choice


@router.post("/inference/v1/generate")
async def generate(body: GenerateRequest, caller: CallerDep) -> Response:
    name = body.model or next(iter(caller.backend.engines))
    row = await caller.call(caller.backend.sampling.find_model, name)
    wanted = body.sampling_params
    sampling = OpenSampling(caller, row, [body.token_ids])
    params = wanted.params(wanted.max_tokens, sampling.end_tokens)
    top = check_logprobs(caller, "sampling_params.logprobs", wanted.logprobs)
    sampling.check_room(wanted.explicit_limit)
    await sampling.start(wanted.n, params, {"topk_sample": max(0, top - 1)})
    [response] = await sampling.results()

    def answer() -> Response:
        choices = [
            {
                "index": index,
                "token_ids": sequence.tokens,
                "logprobs": replies.generated_logprobs(sequence),
                "finish_reason": _reason(sequence),
            }
            for index, sequence in enumerate(response.sequences)
        ]
        total = replies.usage(len(body.token_ids), sum(len(sequence.tokens) for sequence in response.sequences))
        more: Json = {"prompt_token_ids": body.token_ids} if body.return_token_ids else {}
        more["system_fingerprint"] = find_fingerprint(row, response)
        return json_response(
            {"request_id": f"gen-{secrets.token_hex(12)}", "model": name, "choices": choices, "usage": total} | more
        )

    return await caller.compute(answer)


def check_logprobs(caller: Caller, name: str, given: int | None) -> int:
    """The number of likeliest tokens whose log-probs are asked for; UserError above the limit."""
    most = caller.backend.limits.max_topk
    if given is not None and not 0 <= given <= most:
        raise UserError(f"{name}={given}, expected 0 to {most}")
    return given or 0


def served_text(caller: Caller, row: Row) -> ServedText:
    """The text of a base model, made when it is first used, which takes long."""
    texts: dict[str, ServedText] = caller.request.app.state.texts
    base = row["base_model"]
    if base not in texts:
        model = caller.backend.engines[base].model
        texts[base] = ServedText(model.tokenizer, model.context)
    return texts[base]


def make_head(kind: str, form: str, model: str, row: Row) -> Json:
    """What every part of an answer begins with; of a served run, also which checkpoint answers."""
    head = {"id": f"{kind}-{secrets.token_hex(12)}", "object": form, "created": int(time.time()), "model": model}
    return head | ({"system_fingerprint": row["snapshot"].fingerprint} if "snapshot" in row else {})


def find_fingerprint(row: Row, response: SampleResponse) -> str:
    """Which weights answered: of a base model its name here, not the folder on this machine."""
    is_base = "snapshot" not in row and row["model"] is None and row["path"] is None
    return row["base_model"] if is_base else response.fingerprint


def _reason(sequence: SampledSequence) -> str:
    return "length" if sequence.stop_reason == StopReason.LENGTH else "stop"


def _without_tokens(sequence: SampledSequence) -> SampledSequence:
    """`max_tokens=0` asks for the prompt's log-probs only; the engine samples one token."""
    return SampledSequence(StopReason.LENGTH, [], [], 0, [] if sequence.topk_logprobs is not None else None)


def respond(caller: Caller, sampling: OpenSampling, make: Callable[[], AnswerStream]) -> StreamingResponse:
    """The chunks as server-sent events; an error after the first is a chunk too."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            stream = await caller.compute(make)
            if text := await caller.compute(_encode_events, stream.begin()):
                yield text
            async for batch in sampling.stream():
                if text := await caller.compute(_encode_events, stream.add(batch)):
                    yield text
            yield await caller.compute(_encode_events, stream.end())
        except TinkerServerError as error:
            yield _encode_events([error_fields(error)])
        except Exception as error:
            yield _encode_events([error_fields(internal_error(error))])
            raise
        finally:
            sampling.cancel()
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _encode_events(chunks: Iterable[Json]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in chunks)
