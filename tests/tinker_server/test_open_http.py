"""The open endpoints over HTTP: the same tokens and log-probs as the engine gives, streams, mistakes, tenants."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.core.messages import ModelInput, SamplingParams
from tests.kit.open_server import NAME, events, open_endpoints, request, text_engine

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USER = [{"role": "user", "content": "What is 4 + 5?"}]
# Ends in the text of special tokens, which a completion does not show.
SPECIAL = {"stop": ["<|im_"], "n": 4, "ignore_eos": True, "max_tokens": 120}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same weights in this process."""
    return text_engine()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, int]]:
    with open_endpoints({NAME: text_engine()}, tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(scope="module")
def port(server: tuple[Any, int]) -> int:
    return server[1]


def sample(reference: Any, tokens: list[int], count: int, **params: Any) -> Any:
    options = {key: params.pop(key) for key in ("prompt_logprobs", "topk_prompt", "topk_sample") if key in params}
    wanted = SamplingParams(**params)
    return reference.sample(reference.base_snapshot(), ModelInput(tokens), count, wanted, **options).result()


def test_the_models_are_listed_with_their_context(port: int, reference: Any) -> None:
    status, listed = request(port, "/v1/models")
    assert status == 200 and listed["object"] == "list"
    [card] = listed["data"]
    assert card["id"] == NAME and card["max_model_len"] == reference.model.context == 512
    assert request(port, f"/v1/models/{NAME}") == (200, card)


def test_sampled_tokens_and_logprobs_are_those_of_the_engine(port: int, reference: Any) -> None:
    tokens = reference.model.tokenizer.encode("What is 4 + 5?")
    expected = sample(reference, tokens, 3, max_tokens=9, seed=11, temperature=0.7)
    body = {"model": NAME, "max_tokens": 9, "seed": 11, "temperature": 0.7, "n": 3}
    _, by_ids = request(port, COMPLETIONS, {**body, "prompt": tokens, "return_token_ids": True, "logprobs": 0})
    _, by_text = request(port, COMPLETIONS, {**body, "prompt": "What is 4 + 5?"})
    sampling = {key: body[key] for key in ("max_tokens", "seed", "temperature", "n")}
    _, raw = request(
        port, GENERATE, {"model": NAME, "token_ids": tokens, "sampling_params": {**sampling, "logprobs": 1}}
    )
    for i, sequence in enumerate(expected.sequences):
        assert by_ids["choices"][i]["token_ids"] == raw["choices"][i]["token_ids"] == sequence.tokens
        text = reference.model.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert by_text["choices"][i]["text"] == by_ids["choices"][i]["text"] == text
        logprobs = by_ids["choices"][i]["logprobs"]["token_logprobs"]
        assert logprobs == pytest.approx(sequence.logprobs, abs=1e-5)
        content = raw["choices"][i]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in sequence.tokens]
        assert [entry["logprob"] for entry in content] == pytest.approx(sequence.logprobs, abs=1e-5)
    spent = sum(len(sequence.tokens) for sequence in expected.sequences)
    assert by_ids["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": spent,
        "total_tokens": len(tokens) + spent,
    }


@pytest.mark.parametrize("most", [0, 1])
def test_log_likelihoods_of_a_prompt_are_the_engine_s(port: int, reference: Any, most: int) -> None:
    """echo with logprobs, as lm-eval asks: the log-prob of each token given those before it, and the likeliest one."""
    texts = ["What is 4 + 5? 9", "How many apples are left?"]
    rows = [reference.model.tokenizer.encode(text) for text in texts]
    body = {"model": NAME, "prompt": rows, "max_tokens": most, "logprobs": 2, "echo": True, "temperature": 0, "seed": 1}
    status, answer = request(port, COMPLETIONS, body)
    assert status == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1]
    for text, row, choice in zip(texts, rows, answer["choices"], strict=True):
        scores = choice["logprobs"]
        expected = reference.logprobs(reference.base_snapshot(), ModelInput(row)).result()
        assert len(scores["tokens"]) == len(row) + most and choice["text"].startswith(text)
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        assert scores["token_logprobs"][1 : len(row)] == pytest.approx(expected[1:], abs=1e-5)
        for value, top in list(zip(scores["token_logprobs"], scores["top_logprobs"], strict=True))[1:]:
            assert len(top) in (1, 2, 3) and max(top.values()) >= value and value in top.values()
        assert [text[at:][: len(word)] for at, word in zip(scores["text_offset"], scores["tokens"], strict=True)][
            : len(row)
        ] == scores["tokens"][: len(row)]
    assert answer["usage"]["completion_tokens"] == 2 * most


def test_stop_strings_are_cut_off_and_end_tokens_stay_in_the_ids(port: int, reference: Any) -> None:
    tokens = reference.model.tokenizer.encode("What is")
    body = {"model": NAME, "prompt": tokens, "max_tokens": 60, "seed": 3, "return_token_ids": True}
    _, free = request(port, COMPLETIONS, body)
    text = free["choices"][0]["text"]
    stop = text[10:12]
    _, stopped = request(port, COMPLETIONS, {**body, "stop": [stop, "never"]})
    choice = stopped["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    assert choice["token_ids"] == free["choices"][0]["token_ids"][: len(choice["token_ids"])]
    ended = free["choices"][0]["token_ids"][4]
    _, by_id = request(port, COMPLETIONS, {**body, "stop_token_ids": [ended]})
    assert by_id["choices"][0]["token_ids"][-1] == ended and by_id["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["e", "9"]}, {"logprobs": 2, "n": 2}, {"echo": True}, SPECIAL])
def test_a_stream_is_the_whole_answer_in_pieces(port: int, more: dict[str, Any]) -> None:
    body = {"model": NAME, "prompt": ["What is 4 + 5?", "apples"], "max_tokens": 24, "seed": 5, **more}
    _, whole = request(port, COMPLETIONS, body)
    chunks = events(request(port, COMPLETIONS, {**body, "stream": True, "stream_options": {"include_usage": True}})[1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    for expected in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        if "logprobs" in more:
            parts = [choice["logprobs"] for choice in mine]
            for key in ("tokens", "text_offset"):
                assert [one for part in parts for one in part[key]] == expected["logprobs"][key]
            values = [one for part in parts for one in part["token_logprobs"]]
            assert values == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-5)
    assert len(chunks) > len(whole["choices"]) + 1


def test_a_conversation_is_rendered_and_answered(port: int, reference: Any) -> None:
    tokenizer = reference.model.tokenizer
    tokens = tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    expected = sample(reference, tokens, 2, max_tokens=8, seed=2, topk_sample=3)
    body = {"model": NAME, "messages": USER, "max_tokens": 8, "seed": 2, "n": 2}
    _, answer = request(port, CHAT, {**body, "logprobs": True, "top_logprobs": 3, "return_token_ids": True})
    assert answer["object"] == "chat.completion" and answer["prompt_token_ids"] == tokens
    for choice, sequence in zip(answer["choices"], expected.sequences, strict=True):
        text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["token_ids"] == sequence.tokens
        content = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == pytest.approx(sequence.logprobs, abs=1e-5)
        assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    chunks = events(request(port, CHAT, {**body, "stream": True})[1])
    for i, choice in enumerate(answer["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == i]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "4 + 5?"}]
    _, again = request(port, CHAT, {**body, "messages": [{"role": "user", "content": parts}]})
    assert [c["message"] for c in again["choices"]] == [c["message"] for c in answer["choices"]]


def test_calls_of_tools_go_in_and_come_out(port: int, server: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The random model calls no tool, so its decoder is replaced by one that says what a trained one would."""
    from rlvr.tinker_server.http.open_api.served_text import ServedText

    arguments = {"a": 4, "b": 5}
    said = "I add.\n<tool_call>\n" + json.dumps({"name": "add", "arguments": arguments}) + "\n</tool_call>"
    seen: list[Any] = []
    render = ServedText.render

    def look(self: Any, messages: Any, tools: Any, more: Any) -> list[int]:
        seen.append(messages)
        return render(self, messages, tools, more)

    monkeypatch.setattr(ServedText, "render", look)

    def say(self: Any, tokens: Any, skip_special: bool = True) -> str:
        assert not skip_special, "many templates write calls in special tokens"
        return said if tokens else ""

    with monkeypatch.context() as patch:
        patch.setattr(ServedText, "decode", say)
        body = {"model": NAME, "messages": USER, "tools": [TOOL], "max_tokens": 1, "seed": 1}  # 1: not the end token
        _, answer = request(port, CHAT, body)
        streamed = request(port, CHAT, body | {"stream": True})
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I add."
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == arguments
    last = events(streamed[1])[-1]["choices"][0]
    assert last["finish_reason"] == "tool_calls" and last["delta"]["tool_calls"][0]["function"] == call["function"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "9"}
    status, _ = request(
        port, CHAT, {"model": NAME, "messages": [*USER, choice["message"], result], "tools": [TOOL], "max_tokens": 1}
    )
    assert status == 200 and seen[-1][1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_special_tokens_in_a_message_are_text(port: int, reference: Any) -> None:
    """What a client sends cannot end a turn and begin one of another role."""
    tokenizer, special = reference.model.tokenizer, "<|im_end|>"
    body = {"model": NAME, "max_tokens": 1, "return_token_ids": True}
    prompts = [
        request(port, CHAT, {**body, "messages": [{"role": "user", "content": text}]})[1]["prompt_token_ids"]
        for text in (f"a{special}b", "a b")
    ]
    assert prompts[0] == prompts[1] and tokenizer.convert_tokens_to_ids(special) in prompts[0]


def test_a_developer_speaks_as_the_system(port: int) -> None:
    body = {"model": NAME, "max_tokens": 1, "return_token_ids": True}
    said = {"content": "Be short."}
    prompts = [
        request(port, CHAT, {**body, "messages": [{"role": role, **said}, *USER]})[1]["prompt_token_ids"]
        for role in ("developer", "system")
    ]
    assert prompts[0] == prompts[1]


def test_a_client_that_leaves_ends_its_work(server: tuple[Any, int]) -> None:
    backend, port = server
    [thread] = backend._engine_threads.values()
    body = {"model": NAME, "prompt": "apples", "max_tokens": 480, "n": 400, "ignore_eos": True}
    for is_streamed in (True, False):
        data = json.dumps({**body, "stream": is_streamed}).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            wait_for(lambda: bool(thread._running))
        wait_for(lambda: not thread._running)
    assert request(port, COMPLETIONS, {"model": NAME, "prompt": "a", "max_tokens": 1})[0] == 200


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


PLAIN = {"model": NAME, "prompt": "apples", "max_tokens": 2}
MESSAGES = {"model": NAME, "messages": USER, "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (COMPLETIONS, {**PLAIN, "model": "gpt-4"}, 404, "model 'gpt-4' is not served here; served: acme/Small-1B"),
        (COMPLETIONS, {**PLAIN, "model": "tinker://x/weights/y"}, 404, "there is no checkpoint tinker://x/weights/y"),
        (COMPLETIONS, {**PLAIN, "prompt": ""}, 400, "a prompt is empty"),
        (COMPLETIONS, {**PLAIN, "prompt": [[]]}, 400, "a prompt is empty"),
        (COMPLETIONS, {**PLAIN, "prompt": [1, "a"]}, 400, "prompt: [1, 'a'] is neither text nor token ids"),
        (COMPLETIONS, {**PLAIN, "prompt": [5, 100_000]}, 400, "token 100000, outside 0.."),
        (COMPLETIONS, {**PLAIN, "prompt": [5] * 512}, 400, "512 tokens and the model's context is 512"),
        (COMPLETIONS, {**PLAIN, "n": 0}, 400, "n=0, expected 1 to 1024"),
        (COMPLETIONS, {**PLAIN, "n": 10**6}, 400, "expected 1 to 1024"),
        (COMPLETIONS, {**PLAIN, "max_tokens": -1}, 400, "max_tokens=-1, expected at least 0"),
        (COMPLETIONS, {**PLAIN, "logprobs": 10**9}, 400, "logprobs=1000000000, expected 0 to 128"),
        (COMPLETIONS, {**PLAIN, "logprobs": -1}, 400, "logprobs=-1, expected 0 to 128"),
        (COMPLETIONS, {**PLAIN, "temperature": -1}, 400, "temperature=-1.0, expected a finite number, at least 0"),
        (COMPLETIONS, {**PLAIN, "temperature": True}, 400, "temperature"),
        (COMPLETIONS, {**PLAIN, "best_of": 4}, 400, "best_of=4 is not supported"),
        (COMPLETIONS, {**PLAIN, "logit_bias": {"5": 3}}, 400, "'logit_bias' is not supported"),
        (COMPLETIONS, {**PLAIN, "frequency_penalty": 0.5}, 400, "'frequency_penalty' is not supported"),
        (COMPLETIONS, {**PLAIN, "repetition_penalty": 1.1}, 400, "'repetition_penalty' is not supported"),
        (COMPLETIONS, {**PLAIN, "repetition_penalty": True}, 400, "'repetition_penalty' is not supported"),
        (COMPLETIONS, {**PLAIN, "stop": ""}, 400, "empty stop string"),
        (CHAT, {**MESSAGES, "messages": []}, 400, "messages"),
        (CHAT, {**MESSAGES, "messages": [{"role": "robot", "content": ""}]}, 400, "role"),
        (CHAT, {**MESSAGES, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text only"),
        (CHAT, {**MESSAGES, "tool_choice": "required", "tools": [TOOL]}, 400, "cannot force a call"),
        (CHAT, {**MESSAGES, "tools": [{"type": "retrieval"}]}, 400, 'expected {"type": "function"'),
        (CHAT, {**MESSAGES, "top_logprobs": 3}, 400, "top_logprobs needs logprobs=true"),
        (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 10**9}, 400, "top_logprobs=1000000000, expected 0 to"),
        (CHAT, {**MESSAGES, "response_format": {"type": "json_object"}}, 400, "'response_format' is not supported"),
        (GENERATE, {"model": NAME, "token_ids": "apples"}, 400, "token_ids"),
        (GENERATE, {"model": NAME, "token_ids": [5, 100_000]}, 400, "token 100000, outside 0.."),
        (GENERATE, {"model": NAME, "token_ids": []}, 400, "token_ids"),
        (GENERATE, {"model": NAME, "token_ids": [-1]}, 400, "token_ids"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message(port: int, path: str, body: Any, status: int, message: str) -> None:
    got, answer = request(port, path, body)
    assert got == status and message in answer["error"]["message"], answer
    assert answer["error"]["type"] == "invalid_request_error" and answer["detail"] == answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {**PLAIN, "max_token": 2}, "max_token", "(did you mean 'max_tokens'?); leave it out"),
        (COMPLETIONS, {**PLAIN, "max_new_tokens": 2}, "max_new_tokens", "(did you mean 'max_tokens'?)"),
        (COMPLETIONS, {**PLAIN, "min_tokens": 2}, "min_tokens", "'min_tokens' is not supported by this server; leave"),
        (COMPLETIONS, {**PLAIN, "model": "acme/small-1b"}, "model", f"(did you mean '{NAME}'?)"),
        (COMPLETIONS, {**PLAIN, "temperature": "hot"}, "temperature", "temperature"),
        (COMPLETIONS, {**PLAIN, "top_p": 3}, "top_p", "top_p=3.0"),
        (COMPLETIONS, {**PLAIN, "n": 0}, "n", "n=0"),
        (COMPLETIONS, {**PLAIN, "add_special_tokens": False}, "add_special_tokens", "is not supported"),
        (CHAT, {**MESSAGES, "add_generation_prompt": False}, "add_generation_prompt", "is not supported"),
        (CHAT, {**MESSAGES, "parallel_tool_calls": False}, "parallel_tool_calls", "is not supported"),
        (CHAT, {**MESSAGES, "messages": [{"role": "robot", "content": ""}]}, "messages", "messages.0.role"),
        (CHAT, {**MESSAGES, "tool_choice": "required", "tools": [TOOL]}, "tool_choice", "cannot force a call"),
        (CHAT, {**MESSAGES, "chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs", "is not read by"),
        (GENERATE, {"model": NAME, "token_ids": [-1]}, "token_ids", "token_ids"),
    ],
)  # fmt: skip
def test_an_error_names_its_field_and_the_nearest_name(
    port: int, path: str, body: Any, param: str, message: str
) -> None:
    error = request(port, path, body)[1]["error"]
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_has_left_are_refused_with_numbers(port: int, field: str) -> None:
    """As vLLM does. Without a limit of the client's own, a completion ends with the context."""
    tokens = [5] * 500
    if field == "max_tokens":
        body: Any = {"model": NAME, "prompt": tokens, "return_token_ids": True, "ignore_eos": True}
        path, room = COMPLETIONS, 12
        assert len(request(port, path, body)[1]["choices"][0]["token_ids"]) == 12, "the default of 16 is cut"
        assert len(request(port, path, body | {"max_tokens": None})[1]["choices"][0]["token_ids"]) == 12
    else:
        path, body = CHAT, {"model": NAME, "messages": USER, "ignore_eos": True, "return_token_ids": True}
        answer = request(port, path, body)[1]
        room = 512 - len(answer["prompt_token_ids"])
        assert len(answer["choices"][0]["token_ids"]) == room
    assert request(port, path, body | {field: room})[0] == 200
    status, answer = request(port, path, body | {field: room + 1})
    assert status == 400 and answer["error"]["param"] == field
    assert f"{field}={room + 1} is too large: the prompt has {512 - room} tokens" in answer["error"]["message"]
    assert f"context is 512, which leaves {room}" in answer["error"]["message"]


def test_a_base_url_with_a_part_too_little_or_too_much_is_named(port: int) -> None:
    for path in ("/chat/completions", "/v1/v1/chat/completions"):
        status, answer = request(port, path, MESSAGES)
        assert status == 404 and "did you mean /v1/chat/completions?" in answer["error"]["message"]
        assert "ends in /v1" in answer["error"]["message"]
    assert "did you mean" not in request(port, "/v1/embeddings", {})[1]["error"]["message"]


def test_harmless_fields_of_clients_are_taken(port: int) -> None:
    more = {"user": "me", "metadata": {"a": "b"}, "frequency_penalty": 0, "logit_bias": {}, "store": False}
    assert request(port, COMPLETIONS, {**PLAIN, **more, "suffix": None, "best_of": 1})[0] == 200
    assert (
        request(port, CHAT, {**MESSAGES, **more, "response_format": {"type": "text"}, "tool_choice": "auto"})[0] == 200
    )
    # What verifiers and prime-rl add to a turn after the first.
    sampling = {"max_tokens": 2, "routed_experts_prompt_start": 9, "repetition_penalty": 1.0, "min_tokens": 0}
    body = {"model": NAME, "token_ids": [5, 6], "sampling_params": sampling, "cache_salt": "a", "priority": 1}
    assert request(port, GENERATE, body)[0] == 200


def test_keys_come_as_bearer_tokens_and_adapters_are_their_owner_s(tmp_path: Path) -> None:
    """A saved checkpoint and a training run are names of models to their owner, and unknown to others."""
    from rlvr.web.auth import owner_of

    alice, bob = "tml-alice-0001", "tml-bobby-0001"
    with open_endpoints({NAME: text_engine()}, tmp_path, [alice, bob]) as (backend, port):
        as_alice, as_bob = {"Authorization": f"Bearer {alice}"}, {"Authorization": f"Bearer {bob}"}
        assert request(port, "/v1/models")[0] == 401
        assert request(port, "/v1/models", **{"Authorization": "Bearer tml-wrong-0001"})[0] == 401
        run, path = train_and_save(backend, owner_of(alice))
        body = {"prompt": "apples", "max_tokens": 6, "seed": 1, "return_token_ids": True, "logprobs": 0}
        answers = {
            name: request(port, COMPLETIONS, {**body, "model": name}, **as_alice)[1]["choices"][0]
            for name in (NAME, path, run)
        }
        assert answers[path] == answers[run] and answers[path]["logprobs"] != answers[NAME]["logprobs"]
        listed = [card["id"] for card in request(port, "/v1/models", **as_alice)[1]["data"]]
        assert listed == [NAME, path]
        assert [card["id"] for card in request(port, "/v1/models", **as_bob)[1]["data"]] == [NAME]
        for name in (path, run):
            assert request(port, COMPLETIONS, {**body, "model": name}, **as_bob)[0] == 404


def train_and_save(backend: Any, owner: str) -> tuple[str, str]:
    """(the id of a training run after a step, the path of its saved weights)."""
    import asyncio

    from rlvr.core.messages import Datum
    from rlvr.tinker_server.backend.runs.run_operations import OptimStep, SaveForSampler
    from tests.kit.tinker_backend import ADAM, forward_backward

    def wait(request_id: str) -> Any:
        return asyncio.run(backend.result(owner, request_id, 30.0))

    session = backend.sessions.create(owner)
    made = backend.runs.create_model(owner, session, 0, NAME, {"rank": 4})
    model = made.rpartition(":")[0]
    wait(made)
    row = Datum.from_completion([5, 6, 7], [8, 9, 10], weight=1.0)
    backend.runs.submit(owner, model, 1, forward_backward(model, 1, [row] * 4))
    backend.runs.submit(owner, model, 2, OptimStep(ADAM))
    saved = wait(backend.runs.submit(owner, model, 3, SaveForSampler("mine")))
    return model, saved.value["path"]


@pytest.mark.slow
def test_fuzzed_requests_never_fail_by_our_fault(port: int) -> None:
    draw = random.Random(8)
    values: list[Any] = [
        None, True, 0, 1, -1, 3, 2**70, 1.5, -0.5, 1e308, "", "a", "tinker://", NAME, [], [1], ["a"], [[1, 2]], [None],
        {}, {"a": 1}, USER, [{"role": "user"}], [TOOL], "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ]  # fmt: skip
    names = {
        COMPLETIONS: (PLAIN, ["prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop",
                              "stop_token_ids", "logprobs", "echo", "stream", "stream_options", "return_token_ids"]),
        CHAT: (MESSAGES, ["messages", "max_tokens", "tools", "tool_choice", "logprobs", "top_logprobs", "stop", "n",
                          "stream", "chat_template_kwargs", "seed", "temperature"]),
        GENERATE: ({"model": NAME, "token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
                   ["token_ids", "sampling_params", "model", "stream"]),
    }  # fmt: skip
    seen: dict[int, int] = {}
    for _ in range(500):
        path = draw.choice(list(names))
        body, fields = names[path]
        mutated = {
            **body,
            **{draw.choice([*fields, "model", "other"]): draw.choice(values) for _ in range(draw.choice([1, 1, 2]))},
        }
        if draw.random() < 0.05:
            data: Any = json.dumps(mutated).encode()[: draw.randrange(20)] or b"{"
        else:
            data = mutated
        status, answer = request(port, path, data)
        seen[status] = seen.get(status, 0) + 1
        assert status in (200, 400, 404), (status, path, data, answer)
    assert seen[200] > 20 and seen[400] > 100
