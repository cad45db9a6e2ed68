"""litellm and OpenAI's agents, unmodified, against the dialects over HTTP. Neither is a requirement of this project:

python -m venv agents && agents/bin/pip install -e . anthropic litellm openai-agents pytest hypothesis starlette uvicorn
agents/bin/python -m pytest tests/chat/test_dialect_agents.py
"""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra [service] is not installed")

from pydantic import BaseModel

from tests.kit.dialect_cases import ADD, CHAT, TOOLS, USER
from tests.kit.dialect_server import ScriptedModel, make_answer, say, serving_dialects, use_tools

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the warnings of these libraries are theirs
TEXT = "  Grüße \u2028 an\n\nalle 🙂 "
SYSTEM = {"role": "system", "content": "Be short."}


class Sum(BaseModel):
    a: int
    note: str


@pytest.fixture(autouse=True)
def collect_garbage() -> Iterator[None]:
    """What these libraries leave open is found while their warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it is fetched
    try:
        found = importlib.import_module("litellm")
    except ImportError:
        pytest.skip("litellm is not installed")
    monkeypatch.setattr(found, "suppress_debug_info", True)
    return found


@pytest.fixture
def agents() -> Any:
    try:
        found = importlib.import_module("agents")
        found.set_tracing_disabled(True)
    except (ImportError, AttributeError):
        pytest.skip("openai-agents is not installed")
    return found


def address(model: ScriptedModel, provider: str) -> dict[str, Any]:
    url = model.anthropic_url if provider == "anthropic" else model.openai_url
    return {"model": f"{provider}/m", "api_base": url, "api_key": "any", "num_retries": 0}


SAID = [
    make_answer({"role": "assistant", "content": TEXT}),
    use_tools(("add", {"a": 1, "b": "é"}), ("add", {})),
    use_tools(("add", {"a": [None, 1.5]}), text=TEXT),
    say(""),
]


@pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_litellm_with_tools_and_histories_that_come_back(litellm: Any, provider: str, is_streamed: bool) -> None:
    history: list[Any] = [SYSTEM, USER]
    expected: list[Any] = [SYSTEM, USER]
    with serving_dialects(SAID) as model:
        for answer in SAID:
            options: Any = {"tools": TOOLS[CHAT], "tool_choice": "auto", "temperature": 0.5, "max_tokens": 9}
            made = litellm.completion(messages=history, stream=is_streamed, **options, **address(model, provider))
            made = litellm.stream_chunk_builder(list(made), messages=history) if is_streamed else made
            said = made.choices[0].message
            assert (said.content or "") == answer.message["content"]
            assert made.choices[0].finish_reason == answer.finish
            assert model.calls[-1].messages == expected and model.calls[-1].tools == [ADD]
            assert model.calls[-1].temperature == 0.5 and model.calls[-1].max_tokens == 9
            history.append(said)
            expected.append(answer.message)
            for call in said.tool_calls or ():
                history.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
                expected.append({"role": "tool", "content": "3", "tool_call_id": call.id})
            history.append(USER)
            expected.append(USER)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_with_schemas_and_forced_calls(litellm: Any, provider: str) -> None:
    with serving_dialects([say('{"a": 4, "note": "é"}'), use_tools(("add", {"a": 1}))]) as model:
        made = litellm.completion(messages=[USER], response_format=Sum, **address(model, provider))
        assert Sum.model_validate_json(made.choices[0].message.content) == Sum(a=4, note="é")
        forced: Any = {"tools": TOOLS[CHAT], "tool_choice": "required", "parallel_tool_calls": False}
        made = litellm.completion(messages=[USER], **forced, **address(model, provider))
        assert made.choices[0].message.tool_calls[0].function.name == "add"
        assert model.calls[1].required_tool is True and model.calls[1].one_call


@pytest.mark.parametrize("form", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_with_a_tool_and_an_output_type(agents: Any, form: str, is_streamed: bool) -> None:
    openai = importlib.import_module("openai")

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def play(model: ScriptedModel) -> Any:
        async with openai.AsyncOpenAI(base_url=model.openai_url, api_key="any", max_retries=0) as client:
            agent = agents.Agent(
                name="adder",
                instructions="Be short.",
                tools=[add],
                output_type=Sum,
                model=getattr(agents, form)(model="m", openai_client=client),
                model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0.5),
            )
            if not is_streamed:
                return (await agents.Runner.run(agent, "Hi")).final_output
            running = agents.Runner.run_streamed(agent, "Hi")
            async for _ in running.stream_events():
                pass
            return running.final_output

    answers = [
        use_tools(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}), text=TEXT),
        use_tools(("add", {"a": 5, "b": 2})),
        say('{"a": 4, "note": "é"}'),
    ]
    with serving_dialects(answers) as model:
        assert asyncio.run(play(model)).model_dump() == {"a": 4, "note": "é"}
    assert [call.required_tool for call in model.calls] == [True, False, False]  # the SDK asks once
    assert all(call.one_call and call.schema and call.temperature == 0.5 for call in model.calls)
    ids = [call["id"] for answer in answers[:2] for call in answer.message["tool_calls"]]
    results = [{"role": "tool", "content": text, "tool_call_id": id} for text, id in zip("377", ids, strict=True)]
    first, second = answers[0].message, answers[1].message
    assert model.calls[-1].messages == [SYSTEM, USER, first, *results[:2], second, results[2]]


def test_an_agent_by_its_default_model_that_names_the_answer_before(
    agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @agents.function_tool
    def add(a: int, b: int) -> int:
        return a + b

    async def play() -> str:
        agent = agents.Agent(name="adder", instructions="Be short.", tools=[add])
        first = await agents.Runner.run(agent, "Hi", auto_previous_response_id=True)
        return (await agents.Runner.run(agent, "More.", previous_response_id=first.last_response_id)).final_output

    answers = [use_tools(("add", {"a": 1, "b": 2})), say("3"), say("Yes.")]
    with serving_dialects(answers) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.openai_url)
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        assert asyncio.run(play()) == "Yes."
    assert [call.previous for call in model.calls] == [None, "resp_0", "resp_1"]
    result = {"role": "tool", "content": "3", "tool_call_id": answers[0].message["tool_calls"][0]["id"]}
    more = {"role": "user", "content": "More."}
    assert model.calls[-1].messages == [SYSTEM, USER, answers[0].message, result, answers[1].message, more]
