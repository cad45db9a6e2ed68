"""OpenAI's SDK, unmodified, against the dialects over HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("uvicorn", reason="the extra [service] is not installed")

from pydantic import BaseModel

from rlvr.chat.dialects.forms import ChatAnswer
from tests.kit.dialect_cases import ADD, CHAT, RESPONSES, TOOLS, USER
from tests.kit.dialect_server import ScriptedModel, make_answer, say, serving_dialects, use_tools
from tests.kit.packages import need_package

if TYPE_CHECKING:
    import openai

need_package("openai", "the openai SDK is not installed")

Kwargs = dict[str, Any]
TEXT = "  Grüße \u2028 an\n\nalle 🙂 "


class Sum(BaseModel):
    a: int
    note: str


def connect(model: ScriptedModel) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=model.openai_url, api_key="any", max_retries=0)


def test_the_address_is_all_that_a_program_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    with serving_dialects([say("Hello.")]) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.openai_url)
        monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-run")
        with openai.OpenAI() as client:
            made = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        assert made.choices[0].message.content == "Hello." and made.choices[0].finish_reason == "stop"
        assert model.headers[0]["authorization"] == "Bearer key-of-the-run"
        assert made.usage is not None and made.usage.total_tokens == 7 and model.calls[0].messages == [USER]


SAID = [
    make_answer({"role": "assistant", "content": TEXT}),
    use_tools(("add", {"a": 1, "b": "é"}), ("add", {})),
    use_tools(("add", {"a": [None, 1.5]}), text=TEXT),
]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chat_with_tools_and_histories_that_come_back(is_streamed: bool) -> None:
    history: list[Any] = [{"role": "developer", "content": "Be short."}, USER]
    expected: list[Any] = [{"role": "system", "content": "Be short."}, USER]
    with serving_dialects([*SAID, say("")]) as model, connect(model) as client:
        options: Kwargs = {"model": "m", "tools": TOOLS[CHAT], "temperature": 0.5, "max_completion_tokens": 9}
        for answer in [*SAID, say("")]:
            if is_streamed:
                with client.chat.completions.stream(messages=history, **options) as stream:
                    kinds = [event.type for event in stream]
                    choice = stream.get_final_completion().choices[0]
                assert ("content.done" in kinds) == bool(answer.message["content"])
                assert ("tool_calls.function.arguments.done" in kinds) == ("tool_calls" in answer.message)
            else:
                choice = client.chat.completions.create(messages=history, **options).choices[0]
            assert (choice.message.content or "") == answer.message["content"] and choice.finish_reason == answer.finish
            assert model.calls[-1].messages == expected and model.calls[-1].tools == [ADD]
            history.append(choice.message)
            expected.append(answer.message)
            for call in choice.message.tool_calls or ():
                history.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
                expected.append({"role": "tool", "content": "3", "tool_call_id": call.id})
            history.append(USER)
            expected.append(USER)


def test_several_choices_logprobs_and_token_ids_plain_and_streamed() -> None:
    options: Kwargs = {"model": "m", "messages": [USER], "n": 2, "logprobs": True}
    more = {"return_token_ids": True, "top_k": 5}
    answers = [say("a"), use_tools(("add", {"a": 1}))]
    with serving_dialects([*answers, *answers, *answers]) as model, connect(model) as client:
        made = client.chat.completions.create(**options, extra_body=more)
        with client.chat.completions.stream(
            **options, extra_body=more, stream_options={"include_usage": True}
        ) as stream:
            streamed = stream.get_final_completion()
        for one in (made, streamed):
            assert [choice.message.content for choice in one.choices] == ["a", None]
            assert [choice.model_extra["token_ids"] for choice in one.choices if choice.model_extra] == [[5, 6, 7]] * 2
            tokens = [choice.logprobs.content for choice in one.choices if choice.logprobs]
            assert [[token.logprob for token in each or ()] for each in tokens] == [[-0.5, -1.0, 0.0]] * 2
            assert one.model_extra is not None and one.model_extra["prompt_token_ids"] == [1, 2, 3, 4]
            assert one.usage is not None and one.usage.completion_tokens == 6
        chunks = list(client.chat.completions.create(**options, stream=True))
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)
        assert model.calls[0].with_token_ids and model.calls[0].top_k == 5 and model.calls[0].count == 2


@pytest.mark.parametrize("is_streamed", [False, True])
def test_structured_answers_of_chat(is_streamed: bool) -> None:
    with serving_dialects([say('{"a": 4, "note": "é"}')]) as model, connect(model) as client:
        options: Kwargs = {"model": "m", "messages": [USER], "response_format": Sum}
        if is_streamed:
            with client.chat.completions.stream(**options) as stream:
                made = stream.get_final_completion()
        else:
            made = client.chat.completions.parse(**options)
        assert made.choices[0].message.parsed == Sum(a=4, note="é")
        schema = model.calls[0].schema
        assert schema is not None and list(schema["properties"]) == ["a", "note"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("keeps_items", [False, True])
def test_responses_with_tools_and_histories_that_come_back(is_streamed: bool, keeps_items: bool) -> None:
    """A program sends its items again, or names the answer that it goes on from."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    expected: list[Any] = [{"role": "system", "content": "Be short."}, USER]
    previous: str | None = None
    with serving_dialects([*SAID, say("")]) as model, connect(model) as client:
        for answer in [*SAID, say("")]:
            options: Kwargs = {"model": "m", "instructions": "Be short.", "tools": TOOLS[RESPONSES], "input": items}
            if previous is not None and not keeps_items:
                options["previous_response_id"] = previous
            if is_streamed:
                with client.responses.stream(**options) as stream:
                    texts = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
                    made = stream.get_final_response()
                assert texts == made.output_text
            else:
                made = client.responses.create(**options)
            assert made.output_text == answer.message["content"] and made.status == "completed"
            assert model.calls[-1].messages == expected and model.calls[-1].tools == [ADD]
            items = [*items, *made.output] if keeps_items else []
            expected.append(answer.message)
            for item in made.output:
                if item.type == "function_call":
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "3"})
                    expected.append({"role": "tool", "content": "3", "tool_call_id": item.call_id})
            items.append({"role": "user", "content": "More."})
            expected.append({"role": "user", "content": "More."})
            previous = made.id


@pytest.mark.parametrize("is_streamed", [False, True])
def test_structured_answers_and_parsed_calls_of_responses(is_streamed: bool) -> None:
    import openai

    answers = [make_answer({"role": "assistant", "content": '{"a": 4, "note": ""}', "reasoning_content": "Hm."})]
    answers.append(use_tools(("Sum", {"a": 1, "note": "x"})))
    with serving_dialects(answers) as model, connect(model) as client:
        tools = [openai.pydantic_function_tool(Sum)["function"]]
        tools = [{"type": "function", **tool} for tool in tools]
        made: list[Any] = []
        for options in (
            {"text_format": Sum},
            {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False},
        ):
            options = {"model": "m", "input": "Hi", **options}
            if is_streamed:
                with client.responses.stream(**options) as stream:
                    made.append(stream.get_final_response())
            else:
                made.append(client.responses.parse(**options))
        assert made[0].output_parsed == Sum(a=4, note="") and made[0].output[0].content[0].text == "Hm."
        assert made[1].output[0].parsed_arguments == {"a": 1, "note": "x"}
        assert model.calls[0].schema is not None and model.calls[1].required_tool is True and model.calls[1].one_call
        assert made[1].tool_choice == "required" and not made[1].parallel_tool_calls


def test_an_answer_that_was_cut_is_incomplete() -> None:
    import openai

    cut = say("a", "length")
    with serving_dialects([cut, cut, cut]) as model, connect(model) as client:
        made = client.responses.create(model="m", input="Hi", max_output_tokens=3)
        assert made.status == "incomplete" and made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens" and made.output_text == "a"
        last = list(client.responses.create(model="m", input="Hi", stream=True))[-1]
        assert last.type == "response.incomplete" and last.response.output_text == "a"
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model="m", messages=[{"role": "user", "content": "Hi"}], response_format=Sum)


def test_an_asynchronous_client_streams_too() -> None:
    import openai

    async def talk(model: ScriptedModel) -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=model.openai_url, api_key="any", max_retries=0) as client:
            async with client.chat.completions.stream(
                model="m", messages=[{"role": "user", "content": "Hi"}]
            ) as stream:
                chat = (await stream.get_final_completion()).choices[0].message.content or ""
            async with client.responses.stream(model="m", input="Hi") as stream:
                return chat, (await stream.get_final_response()).output_text

    with serving_dialects([say(TEXT), say(TEXT)]) as model:
        assert asyncio.run(talk(model)) == (TEXT, TEXT)


def test_mistakes_are_the_sdk_s_errors_with_our_message() -> None:
    import openai

    with serving_dialects(list[ChatAnswer]()) as model, connect(model) as client:
        with pytest.raises(openai.BadRequestError, match="logit_bias") as error:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}], logit_bias={"5": 1})
        assert error.value.param == "logit_bias" and error.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError, match="web_search"):
            client.responses.create(model="m", input="Hi", tools=[{"type": "web_search"}])
        with pytest.raises(openai.NotFoundError, match="no answer has the id"):
            client.responses.create(model="m", input="Hi", previous_response_id="resp_9")
        with pytest.raises(openai.InternalServerError, match="script has ended"):
            client.responses.create(model="m", input="Hi")
