"""Anthropic's SDK, unmodified, against its dialect over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("uvicorn", reason="the extra [service] is not installed")

from pydantic import BaseModel

from tests.kit.dialect_cases import ADD, ANTHROPIC, TOOLS, USER
from tests.kit.dialect_server import ScriptedModel, make_answer, say, serving_dialects, use_tools
from tests.kit.packages import need_package

if TYPE_CHECKING:
    import anthropic

need_package("anthropic", "the anthropic SDK is not installed")

TEXT = "  Grüße \u2028 an\n\nalle 🙂 "
SAID = [
    make_answer({"role": "assistant", "content": TEXT}),
    use_tools(("add", {"a": 1, "b": "é"}), ("add", {})),
    use_tools(("add", {"a": [None, 1.5]}), text=TEXT),
    make_answer({"role": "assistant", "content": "b", "reasoning_content": " Hm.\n"}),
    say(""),
]


class Sum(BaseModel):
    a: int
    note: str


def connect(model: ScriptedModel) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=model.anthropic_url, api_key="any", max_retries=0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_messages_with_tools_and_histories_that_come_back(is_streamed: bool) -> None:
    history: list[Any] = [USER]
    expected: list[Any] = [{"role": "system", "content": "Be short."}, USER]
    with serving_dialects(SAID) as model, connect(model) as client:
        for answer in SAID:
            options: Any = {"model": "m", "max_tokens": 9, "tools": TOOLS[ANTHROPIC], "messages": history}
            options["system"] = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
            if is_streamed:
                with client.messages.stream(**options) as stream:
                    texts = "".join(stream.text_stream)
                    made = stream.get_final_message()
                assert texts == answer.message["content"]
            else:
                made = client.messages.create(**options)
            assert "".join(block.text for block in made.content if block.type == "text") == answer.message["content"]
            assert made.stop_reason == ("tool_use" if "tool_calls" in answer.message else "end_turn")
            assert (made.usage.input_tokens, made.usage.output_tokens) == (4, 3)
            assert model.calls[-1].messages == expected and model.calls[-1].tools == [ADD]
            history.append({"role": "assistant", "content": made.content})
            expected.append(answer.message)
            results: list[Any] = []
            for block in made.content:
                if block.type == "tool_use":
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": "3"})
                    expected.append({"role": "tool", "content": "3", "tool_call_id": block.id})
            history.append({"role": "user", "content": [*results, {"type": "text", "text": "More."}]})
            expected.append({"role": "user", "content": "More."})


def test_the_address_is_all_that_a_program_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic

    with serving_dialects([say("a", stop="\n"), say("a", "length")]) as model:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", model.anthropic_url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", "key-of-the-run")
        options: Any = {"model": "m", "max_tokens": 9, "messages": [USER], "extra_body": {"seed": 3}}
        with anthropic.Anthropic() as client:
            made = client.messages.create(**options, stop_sequences=["\n"], tool_choice={"type": "none"})
            assert made.stop_reason == "stop_sequence" and made.stop_sequence == "\n"
            assert client.messages.create(**options).stop_reason == "max_tokens"
        headers = model.headers[0]  # older versions of the SDK send the first
        assert headers.get("x-api-key", headers.get("authorization", "")).removeprefix("Bearer ") == "key-of-the-run"
        assert model.calls[0].stop == ("\n",) and model.calls[0].seed == 3 and model.calls[0].tools == []


def test_structured_answers_and_tools_that_the_sdk_runs() -> None:
    import anthropic

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)

    answers = [say('{"a": 4, "note": "é"}'), use_tools(("add", {"a": 4, "b": 3})), say("7")]
    with serving_dialects(answers) as model, connect(model) as client:
        options: Any = {"model": "m", "max_tokens": 9, "messages": [USER]}
        assert client.messages.parse(**options, output_format=Sum).parsed_output == Sum(a=4, note="é")
        schema = model.calls[0].schema
        assert schema is not None and list(schema["properties"]) == ["a", "note"]
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        # The SDK asks the server to keep the conversation, and goes on without where it does not.
        last = client.beta.messages.tool_runner(**options, tools=[add], tool_choice=choice).until_done()
        assert [block.text for block in last.content if block.type == "text"] == ["7"]
        assert model.calls[1].required_tool is True and model.calls[1].one_call
        assert model.calls[2].messages[1:] == [answers[1].message, {**model.calls[2].messages[2], "content": "7"}]


def test_mistakes_are_the_sdk_s_errors_with_our_message() -> None:
    import anthropic

    with serving_dialects([]) as model, connect(model) as client:
        options: Any = {"model": "m", "max_tokens": 9, "messages": [USER]}
        with pytest.raises(anthropic.BadRequestError, match="bash_20250124"):
            client.messages.create(**options, tools=[{"type": "bash_20250124", "name": "bash"}])
        with pytest.raises(anthropic.BadRequestError, match="the last is the assistant's"):
            client.messages.create(model="m", max_tokens=9, messages=[{"role": "assistant", "content": "I"}])
        with pytest.raises(anthropic.InternalServerError, match="script has ended") as error:
            client.messages.create(**options)
        assert isinstance(error.value.body, dict) and error.value.body["error"]["type"] == "api_error"
