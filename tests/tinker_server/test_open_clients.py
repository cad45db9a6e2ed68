"""OpenAI's and Anthropic's SDKs, unmodified, against the open endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from rlvr.core.messages import ModelInput
from tests.kit.open_server import NAME, open_endpoints, text_engine
from tests.kit.packages import need_package

if TYPE_CHECKING:
    import openai

need_package("openai", "the openai SDK is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # connections of the Tinker SDK
USER: list[Any] = [{"role": "user", "content": "What is 4 + 5?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Add numbers.", "parameters": {"type": "object", "properties": {}}},
}
RESPONSE_TOOL: Any = {"type": "function", **TOOL["function"]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    import openai

    with (
        open_endpoints({NAME: text_engine()}, tmp_path_factory.mktemp("state"), ["tml-alice-0001"]) as (_, port),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="tml-alice-0001", max_retries=0) as made,
    ):
        yield made


def test_models_completions_and_log_likelihoods(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
    made = client.completions.create(model=NAME, prompt="apples", max_tokens=8, n=2, seed=1)
    parts = client.completions.create(model=NAME, prompt="apples", max_tokens=8, n=2, seed=1, stream=True)
    texts = ["", ""]
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [choice.text for choice in made.choices] and made.usage is not None
    reference = text_engine()
    tokens = reference.model.tokenizer.encode("How many apples?")
    scored = client.completions.create(model=NAME, prompt=tokens, max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].logprobs is not None
    expected = reference.logprobs(reference.base_snapshot(), ModelInput(tokens)).result()
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-5)


def test_a_seed_gives_the_tokens_and_logprobs_of_the_tinker_sdk(client: openai.OpenAI) -> None:
    tinker = pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
    tokens = text_engine().model.tokenizer.encode("How many apples?")
    service = tinker.ServiceClient(base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key)
    sampler = service.create_sampling_client(base_model=NAME).result()
    params = tinker.SamplingParams(max_tokens=8, seed=11, temperature=0.7)
    sampled = sampler.sample(tinker.ModelInput.from_ints(tokens), num_samples=2, sampling_params=params).result()
    made = client.completions.create(
        model=NAME,
        prompt=tokens,
        max_tokens=8,
        n=2,
        seed=11,
        temperature=0.7,
        logprobs=0,
        extra_body={"return_token_ids": True},
    )
    for choice, sequence in zip(made.choices, sampled.sequences, strict=True):
        assert choice.model_extra is not None and choice.model_extra["token_ids"] == sequence.tokens
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(sequence.logprobs, abs=1e-5)


def test_chat_with_tools_plain_and_streamed(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=NAME, messages=USER, tools=[TOOL], max_completion_tokens=8, seed=1, logprobs=True, top_logprobs=2
    )
    [choice] = made.choices
    assert choice.finish_reason in ("length", "stop") and choice.logprobs is not None
    assert choice.logprobs.content is not None and len(choice.logprobs.content) <= 8
    text = ""
    for part in client.chat.completions.create(
        model=NAME, messages=USER, tools=[TOOL], max_completion_tokens=8, seed=1, stream=True
    ):
        text += part.choices[0].delta.content or ""
    assert text == (choice.message.content or "")


def test_mistakes_are_the_sdk_s_errors_with_our_message(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' is not served here; served: acme/Small-1B"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="n=0, expected 1 to"):
        client.completions.create(model=NAME, prompt="a", n=0)
    with pytest.raises(openai.AuthenticationError, match="unknown API key"):
        client.with_options(api_key="tml-wrong-0001").models.list()


def test_responses_and_chat_completions_sample_the_same(client: openai.OpenAI) -> None:
    """One conversation by two dialects is one prompt."""
    options: dict[str, Any] = {"model": NAME, "extra_body": {"seed": 3}}
    chat = client.chat.completions.create(messages=USER, max_tokens=8, **options)
    made = client.responses.create(input=USER, max_output_tokens=8, **options)
    events: list[Any] = list(
        client.responses.create(input=USER, max_output_tokens=8, tools=[RESPONSE_TOOL], stream=True, **options)
    )
    assert made.output_text == chat.choices[0].message.content
    assert chat.usage is not None and made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    tools = client.chat.completions.create(messages=USER, max_tokens=8, tools=[TOOL], **options)
    assert events[-1].response.output_text == (tools.choices[0].message.content or "")
    history = [*USER, *made.output, {"role": "user", "content": "Sure?"}]
    assert client.responses.create(input=history, max_output_tokens=4, **options).status in ("completed", "incomplete")


def test_what_the_server_would_ignore_is_refused_in_responses_too(client: openai.OpenAI) -> None:
    import openai

    for more, words in (
        ({"previous_response_id": "resp_1"}, "answers are not kept here"),
        ({"tool_choice": "required", "tools": [RESPONSE_TOOL]}, "cannot force a call"),
        ({"text": {"format": {"type": "json_object"}}}, "does not enforce"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"max_output_tokens": 10_000}, "max_tokens=10000 is too large"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.responses.create(model=NAME, input="Hi", extra_body=more)
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' is not served here"):
        client.responses.create(model="gpt-4", input="Hi")
    with pytest.raises(openai.AuthenticationError, match="unknown API key"):
        client.with_options(api_key="tml-wrong-0001").responses.create(model=NAME, input="Hi")


def test_anthropic_s_sdk_samples_the_same(client: openai.OpenAI) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    chat = client.chat.completions.create(model=NAME, messages=USER, max_tokens=8, seed=3)
    options: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 8, "extra_body": {"seed": 3}}
    base = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=base, api_key=client.api_key, max_retries=0) as other:
        made = other.messages.create(**options)
        with other.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == made.content[0].text == chat.choices[0].message.content
        tool = {"name": "add", "description": "Add numbers.", "input_schema": {"type": "object", "properties": {}}}
        assert other.messages.create(**options, tools=[tool]).usage.input_tokens > made.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="cannot force a call"):
            other.messages.create(**options, tools=[tool], tool_choice={"type": "any"})
        with pytest.raises(anthropic.NotFoundError, match="is not served here"):
            other.messages.create(**{**options, "model": "claude"})
