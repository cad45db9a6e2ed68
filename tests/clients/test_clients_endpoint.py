"""Sampling from a text endpoint, a real server on this machine: both dialects, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.clients import endpoint as module
from rlvr.clients.endpoint import (
    MARK,
    CodePointTokenizer,
    EndpointError,
    EndpointSamplingClient,
    parse_messages,
    text_endpoint,
)
from rlvr.core import chat_client
from rlvr.core.messages import ModelInput, SampleResponse, SamplingParams
from rlvr.core.protocols import SamplingClient
from rlvr.core.types import StopReason, Task
from rlvr.envs.prompt import PromptEnv
from rlvr.reward.coroutines import run_coroutine
from rlvr.rollout import Group, play_group, rollout
from tests.kit.text_endpoint import EndpointReply, EndpointRequest, TextEndpoint, serving, unused_port

KEY = "sk-a-very-secret-key"
TEXT = CodePointTokenizer()


OPEN: list[EndpointSamplingClient] = []


@pytest.fixture(autouse=True)
def close_open_clients() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def client(server: TextEndpoint, dialect: str = "plain", **options: Any) -> EndpointSamplingClient:
    options = {"retries": 0, **options}
    where = (server.plain_url,) if dialect == "plain" else (server.chat_url, "tiny")
    OPEN.append(EndpointSamplingClient(text_endpoint(*where, **options)))
    return OPEN[-1]


def prompt(text: str) -> ModelInput:
    return ModelInput(TEXT.encode(text))


def texts_of(response: SampleResponse) -> list[str]:
    return [TEXT.decode(sequence.tokens) for sequence in response.sequences]


def ask(sampler: EndpointSamplingClient, text: str = "2 + 2?", count: int = 1, **params: Any) -> SampleResponse:
    return sampler.sample(prompt(text), count, SamplingParams(**params)).result(30)


def fails(sampler: EndpointSamplingClient, text: str = "2 + 2?") -> EndpointError:
    with pytest.raises(EndpointError) as caught:
        ask(sampler, text)
    assert sampler.status is not None and sampler.status.error is caught.value
    return caught.value


def test_the_plain_dialect_sends_three_fields_and_reads_the_text() -> None:
    with serving(lambda asked: "four") as server:
        sampler = client(server)
        response = ask(sampler, temperature=0.5, max_tokens=7, seed=3)
    (sequence,) = response.sequences
    assert texts_of(response) == ["four"] and response.fingerprint == server.plain_url
    assert (sequence.logprobs, sequence.stop_reason, sequence.end_tokens) == (None, StopReason.STOP, 0)
    (asked,) = server.asked
    assert asked.path == "/generate" and asked.body == {"prompt": "2 + 2?", "max_tokens": 7, "temperature": 0.5}
    assert sampler.status is not None and sampler.status.error is None and isinstance(sampler, SamplingClient)


@pytest.mark.parametrize("name", ["text", "response", "generated_text", "content"])
def test_the_plain_text_may_stand_in_any_of_four_fields(name: str) -> None:
    with serving(lambda asked: EndpointReply("four", field=name)) as server:
        assert texts_of(ask(client(server))) == ["four"]


def test_the_chat_dialect_sends_model_key_seed_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_KEY", KEY)
    with serving(lambda asked: "four") as server:
        sampler = client(server, "chat", key_variable="LLM_KEY", body={"user": "me", "max_tokens": None})
        response = ask(sampler, count=2, seed=3, top_p=0.9, stop=["END", 10])
        ask(sampler, seed=3)
    assert texts_of(response) == ["four"] * 2 and response.fingerprint == "tiny"
    first, second, again = server.asked
    assert first.path == "/v1/chat/completions" and first.headers["authorization"] == f"Bearer {KEY}"
    assert {k: v for k, v in first.body.items() if k != "seed"} == {
        "model": "tiny", "messages": [{"role": "user", "content": "2 + 2?"}], "temperature": 1.0, "top_p": 0.9,
        "stop": ["END", "\n"], "user": "me",
    }  # fmt: skip
    # A seed for each sample, the same one when asked again, and one that 32 bits can hold.
    seeds = {first.body["seed"], second.body["seed"]}
    assert len(seeds) == 2 and again.body["seed"] in seeds and max(seeds) < 2**31


def test_a_full_url_of_a_chat_endpoint_is_taken_as_its_base() -> None:
    assert text_endpoint("http://h/v1/chat/completions", "m").url == "http://h/v1/chat/completions"


def test_why_an_answer_ended_is_the_endpoints_word() -> None:
    with serving(lambda asked: EndpointReply("four and", finish="length")) as server:
        for dialect in ("plain", "chat"):
            assert ask(client(server, dialect)).sequences[0].stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("dialect", ["plain", "chat"])
def test_an_answer_ends_after_the_first_stop_string_in_it(dialect: str) -> None:
    with serving(lambda asked: EndpointReply("a[DONE] b[END]", finish="length")) as server:
        (sequence,) = ask(client(server, dialect), stop=["[END]", "[DONE]"]).sequences
    assert (TEXT.decode(sequence.tokens), sequence.stop_reason) == ("a[DONE]", StopReason.STOP)


def test_tokens_are_counted_by_the_endpoint_or_estimated_and_said_to_be() -> None:
    with serving(lambda asked: EndpointReply("x" * 10, usage=None if asked.number else (10, 5))) as server:
        sampler = client(server)
        ask(sampler)
        usage = sampler.usage
        assert (usage.requests, usage.answers, usage.prompt_tokens, usage.completion_tokens) == (1, 1, 10, 5)
        assert usage.estimated == 0 and usage.seconds > 0
        ask(sampler)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.estimated) == (10 + 2, 5 + 3, 3)


def test_a_view_counts_alone_and_may_be_of_another_temperature() -> None:
    with serving(lambda asked: "four") as server:
        sampler = client(server)
        view = sampler.view()
        view.temperature = 0.1
        ask(view, temperature=0.9)
        ask(sampler, temperature=0.9)
    assert [asked.body["temperature"] for asked in server.asked] == [0.1, 0.9]
    assert view.usage.requests == sampler.usage.requests == 1 and view.status is sampler.status


FAILURES = {
    "unreachable: 500": (EndpointReply("broken", status=500), "endpoint_unreachable", "answered 500"),
    "unreachable: closed": (EndpointReply(close="before"), "endpoint_unreachable", "cannot be reached"),
    "unreachable: cut short": (EndpointReply("four", close="within"), "endpoint_unreachable", "cannot be reached"),
    "rate limited": (EndpointReply("slow down", status=429), "endpoint_rate_limited", "answered 429"),
    "refused: key": (EndpointReply(raw="no such key", status=401), "endpoint_refused", "answered 401: no such key"),
    "refused: text": (EndpointReply(raw="I will not", status=400), "endpoint_refused", "answered 400: I will not"),
    "refused: redirect": (EndpointReply(status=307, headers={"location": "/other"}), "endpoint_refused", "a redirect"),
    "bad reply: HTML": (EndpointReply(raw="<html>"), "endpoint_bad_reply", "<html>"),
    "bad reply: a list": (EndpointReply(raw="[]"), "endpoint_bad_reply", "sent no"),
    "bad reply: no text": (EndpointReply(raw='{"answer": "4"}'), "endpoint_bad_reply", "sent no"),
    "bad reply: a number": (
        EndpointReply(raw='{"text": 4, "choices": [{"message": {"content": 4}}]}'),
        "endpoint_bad_reply", "content is of type int",
    ),
    "bad reply: nested": (EndpointReply(raw="[" * 100_000), "endpoint_bad_reply", "sent no"),
    "bad reply: endless usage": (
        EndpointReply(
            raw='{"text": "4", "choices": [{"message": {"content": "4"}}], "usage": {"completion_tokens": 1e999}}'
        ),
        "endpoint_bad_reply", "sent no",
    ),
    "empty": (EndpointReply(""), "empty_answer", "sent an empty message"),
    "nothing but thoughts": (EndpointReply("", finish="length"), "empty_answer", "max_tokens ran out before any text"),
    "timeout: slow": (EndpointReply("four", delay=5), "endpoint_timeout", "within 0.3 s (timeout_s)"),
    "timeout: drips": (EndpointReply("four", drip=0.1), "endpoint_timeout", "within 0.3 s (timeout_s)"),
}  # fmt: skip


@pytest.mark.parametrize("dialect", ["plain", "chat"])
@pytest.mark.parametrize(("answer", "code", "message"), FAILURES.values(), ids=FAILURES)
def test_every_failure_has_its_code_and_names_the_endpoint(
    answer: EndpointReply, code: str, message: str, dialect: str
) -> None:
    with serving(lambda asked: answer) as server:
        sampler = client(server, dialect, timeout_s=0.3 if "timeout" in code else 20)
        error = fails(sampler)
        assert error.code == code and message in str(error) and sampler.endpoint.url in str(error)
        server.script = lambda asked: "four"  # and it is asked again, as if nothing had been
        assert texts_of(ask(sampler)) == ["four"] and sampler.status is not None and sampler.status.error is None


def test_a_refused_connection_is_unreachable() -> None:
    sampler = EndpointSamplingClient(text_endpoint(f"http://127.0.0.1:{unused_port()}/generate", retries=1))
    assert fails(sampler).code == "endpoint_unreachable" and sampler.usage.requests == 2


@pytest.mark.parametrize(
    "kind", ["unreachable: 500", "unreachable: closed", "rate limited", "bad reply: HTML", "empty"]
)
def test_a_temporary_failure_is_retried(kind: str) -> None:
    """An empty answer too: the model may say something the next time."""
    with serving(lambda asked: "four" if asked.number else FAILURES[kind][0]) as server:
        sampler = client(server, retries=1)
        assert texts_of(ask(sampler)) == ["four"] and sampler.usage.requests == len(server.asked) == 2


@pytest.mark.parametrize("kind", ["refused: key", "refused: text", "refused: redirect", "nothing but thoughts"])
def test_a_permanent_failure_is_not_retried(kind: str) -> None:
    with serving(lambda asked: FAILURES[kind][0]) as server:
        fails(client(server, retries=4))
        assert len(server.asked) == 1


def test_retry_after_is_obeyed_and_too_long_a_wait_is_an_error() -> None:
    def busy(asked: EndpointRequest) -> EndpointReply | str:
        return "four" if asked.number else EndpointReply(status=429, headers={"retry-after": "1.2"})

    with serving(busy) as server:
        ask(client(server, retries=1))
        assert server.asked[1].at - server.asked[0].at >= 1.2
    with serving(lambda asked: EndpointReply(status=429, headers={"retry-after": "3600"})) as server:
        error = fails(client(server, retries=4))
        assert (error.code, error.retry_after, len(server.asked)) == ("endpoint_rate_limited", 3600.0, 1)


def test_the_key_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_KEY", KEY)
    for raw, status in ((f"wrong key {KEY}", 401), (f"hello {KEY}", 200)):
        with serving(lambda asked, raw=raw, status=status: EndpointReply(raw=raw, status=status)) as server:
            error = fails(client(server, "chat", key_variable="LLM_KEY"))
            assert KEY not in str(error) and ("[key]" in str(error) or status == 401)


def test_futures_can_be_read_from_threads_and_awaited_on_any_loop_without_a_thread_each() -> None:
    """Twenty requests are with the server at once, and this process has one thread more than before."""
    together = threading.Barrier(20, timeout=20)
    before = set(threading.enumerate())  # other tests' may be there, the one of requests among them

    def wait(asked: EndpointRequest) -> str:
        together.wait()
        return asked.prompt

    with serving(wait) as server:
        sampler = client(server, concurrency=20)

        async def inside() -> list[SampleResponse]:
            futures = [sampler.sample(prompt(str(i)), 1, SamplingParams()) for i in range(20)]
            new = {t.name for t in set(threading.enumerate()) - before if t.name.startswith(("rlvr", "asyncio"))}
            assert new <= {"rlvr-rewards"}
            return list(await asyncio.gather(*futures))

        assert [texts_of(r)[0] for r in asyncio.run(inside())] == [str(i) for i in range(20)]
        with ThreadPoolExecutor(20) as pool:
            got = list(pool.map(lambda i: texts_of(ask(sampler, str(i)))[0], range(20)))
        assert got == [str(i) for i in range(20)]


def test_a_blocking_call_on_the_clients_own_loop_is_refused() -> None:
    async def asks(sampler: EndpointSamplingClient) -> SampleResponse:
        future = sampler.sample(prompt("2 + 2?"), 1, SamplingParams())
        with pytest.raises(RuntimeError, match="await it instead"):
            future.result()
        return await future

    with serving(lambda asked: "four") as server:
        assert texts_of(run_coroutine(asks(client(server)))) == ["four"]


def test_a_cancelled_await_cancels_its_request_and_a_failed_sample_its_siblings() -> None:
    with serving(lambda asked: EndpointReply("late", delay=20)) as server:
        sampler = client(server, concurrency=1)

        async def impatient() -> None:
            async with asyncio.timeout(0.3):
                await sampler.sample(prompt("2 + 2?"), 3, SamplingParams())

        with pytest.raises(TimeoutError):
            asyncio.run(impatient())
        server.script = lambda asked: EndpointReply("", status=401)
        assert fails(sampler).code == "endpoint_refused"  # the gate of one is free again
        assert len(server.asked) == 2
        with pytest.raises(EndpointError):
            ask(sampler, count=3)
        time.sleep(0.2)
        assert len(server.asked) <= 4  # the one that failed, and at most one that was let in before it was known


def test_no_more_requests_run_at_once_than_allowed_across_views() -> None:
    with serving(lambda asked: EndpointReply("four", delay=0.05)) as server:
        sampler = client(server, concurrency=3)
        futures = [s.sample(prompt("2"), 4, SamplingParams()) for s in (sampler, sampler.view(), sampler.view())]
        assert [len(future.result(20).sequences) for future in futures] == [4, 4, 4]
        assert 1 < server.max_concurrent <= 3


@pytest.mark.slow
@given(st.text())
def test_the_tokenizer_is_exact_both_ways(text: str) -> None:
    assert TEXT.decode(TEXT.encode(text)) == text and TEXT([text])["input_ids"] == [TEXT.encode(text)]


TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(min_size=1).filter(lambda t: MARK not in t))
)


@given(TURNS)
def test_a_conversation_survives_its_rendering(turns: list[tuple[str, str]]) -> None:
    conversation = [{"role": role, "content": content} for role, content in turns]
    rendered = TEXT.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert parse_messages(rendered) == conversation
    assert TEXT.apply_chat_template(conversation, add_generation_prompt=True) == TEXT.encode(rendered)


def test_a_conversation_reaches_each_dialect_in_its_form() -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    tokens = TEXT.apply_chat_template(talk, add_generation_prompt=True)
    with serving(lambda asked: "four") as server:
        for dialect in ("plain", "chat"):
            client(server, dialect).sample(ModelInput(tokens), 1, SamplingParams()).result(20)
    plain, chat = server.asked
    assert plain.body["prompt"] == "System: Be brief.\n\nUser: 2 + 2?\n\nAssistant:"
    assert chat.body["messages"] == talk


def test_unstorable_characters_are_replaced_in_answers_and_prompts() -> None:
    with serving(
        lambda asked: EndpointReply(raw=r'{"text": "a\u0000b\ud800c' + MARK + r'system\nd\ud83d\ude00"}')
    ) as server:
        assert texts_of(ask(client(server), "x\ud800y\x00z")) == ["a\ufffdb\ufffdc\ufffdsystem\nd\U0001f600"]
        assert server.asked[0].body["prompt"] == "x\ufffdy\ufffdz"


def test_a_rollout_plays_over_it_and_its_trajectories_say_that_they_cannot_train() -> None:
    with serving(lambda asked: f"{asked.prompt}!") as server:
        sampler = client(server)
        tasks = [Task("plain", "2 + 2?"), Task("chat", [{"role": "user", "content": "hello"}])]
        groups = [Group(t.id, t, [PromptEnv(t, TEXT) for _ in range(2)]) for t in tasks]
        played = rollout(groups, sampler, SamplingParams(), seed=1)
        envs = [PromptEnv(tasks[0], TEXT)]
        played += asyncio.run(play_group(Group("g", tasks[0], envs), sampler, SamplingParams(), seed=1, version=0))
    assert [t.response for t in played] == ["2 + 2?!"] * 2 + ["hello!"] * 2 + ["2 + 2?!"]
    assert played[0].policy_fingerprint == server.plain_url and not played[0].logprobs
    with pytest.raises(ValueError, match="carries no sampling log-probs"):
        played[0].require_trainable()


def test_looking_asks_for_no_answer() -> None:
    with serving(lambda asked: "four") as server:
        sampler = client(server)
        assert sampler.status is None
        assert sampler.ping().result(20).error is None and not server.asked
    gone = sampler.ping().result(20).error
    assert gone is not None and gone.code == "endpoint_unreachable" and sampler.status is not None


def test_closing_drops_the_connections_and_asking_again_opens_new_ones() -> None:
    with serving(lambda asked: "four") as server:
        sampler = client(server)
        ask(sampler)
        sampler.close()
        sampler.close()
        assert texts_of(ask(sampler)) == ["four"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_k": 5}, "top_k=5 is not supported"),
        ({"min_p": 0.1}, "min_p=0.1 is not supported"),
        ({"top_p": 0.5}, "top_p=0.5 is not supported by plain requests"),
    ],
)
def test_sampling_options_without_a_request_field_are_refused(params: dict[str, Any], message: str) -> None:
    sampler = EndpointSamplingClient(text_endpoint("http://127.0.0.1:9/generate"))
    with pytest.raises(ValueError, match=message):
        sampler.sample(prompt("2"), 1, SamplingParams(**params))


def test_log_probs_and_empty_requests_are_mistakes() -> None:
    sampler = EndpointSamplingClient(text_endpoint("http://127.0.0.1:9/generate"))
    with pytest.raises(ValueError, match="gives none"):
        sampler.compute_logprobs(prompt("2"))
    with pytest.raises(ValueError, match="gives no log-probs"):
        sampler.sample(prompt("2"), 1, SamplingParams(), True)
    with pytest.raises(ValueError, match="0 samples of 0 tokens"):
        sampler.sample(ModelInput([]), 0, SamplingParams())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "localhost:3031/generate"}, "expected one like 'http://127.0.0.1:8000/generate'"),
        ({"url": "localhost:3031", "model": "m"}, "expected one like 'http://127.0.0.1:8000/v1'"),
        ({"url": f"http://me:{KEY}@h/generate"}, "base_url holds a password"),
        ({"url": "http://h/generate", "key_variable": "NOT_SET_HERE"}, "no such environment variable"),
        ({"url": "http://h/generate", "concurrency": 0}, "concurrency=0"),
    ],
)
def test_settings_are_checked_and_nothing_is_sent(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_endpoint(**arguments)


def test_every_reason_of_the_line_has_a_code() -> None:
    named = set(re.findall(r"`(\w+)`", chat_client.ChatError.__doc__ or ""))
    assert named - {"reason", "text_at_fault", "retry_after"} == set(module._CODES) >= set(chat_client.DOWN)
