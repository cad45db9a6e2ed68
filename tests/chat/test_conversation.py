"""A program's history of messages as the tokens that were read and sampled, over the forms of several templates."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.chat.conversation import ChatTemplate, Conversation, TemplateError
from rlvr.chat.dialects.forms import ChatRequest, Json
from rlvr.core.messages import SampledSequence
from rlvr.core.turn_tree import join_turns
from rlvr.core.types import StopReason
from tests.kit.call_templates import HARMONY, TAGGED
from tests.kit.chat_rows import TEMPLATE as QWEN_TEMPLATE
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import LLAMA_TEMPLATE, MISTRAL_TEMPLATE, TOOLS_TEMPLATE

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
TEMPLATES = {"qwen": QWEN_TEMPLATE, "tools": TOOLS_TEMPLATE, "llama": LLAMA_TEMPLATE, "mistral": MISTRAL_TEMPLATE}
TEMPLATES |= {**TAGGED, "harmony": HARMONY}


def make(template: str | None = TOOLS_TEMPLATE, **arguments: Any) -> Conversation:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    return Conversation(ChatTemplate(tokenizer, arguments))


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def ask(*messages: Json, tools: Any = (), **options: Any) -> ChatRequest:
    return ChatRequest("any", list(messages), list(tools), **options)


def say(conversation: Conversation, call: ChatRequest, tokens: list[int]) -> tuple[list[int], Json]:
    prompt = conversation.encode(call)
    answer = conversation.read(call, prompt, SampledSequence(StopReason.STOP, tokens, [0.0] * len(tokens)))
    conversation.record(call, answer)
    return prompt, answer.message


def ids(conversation: Conversation, text: str, *, ends: bool = True) -> list[int]:
    tokenizer = conversation.template.tokenizer
    return [*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.eos_token_id] if ends else [])]


@pytest.mark.parametrize("name", ["qwen", "tools"])
def test_what_is_appended_is_what_the_template_writes_at_once(name: str) -> None:
    conversation = make(TEMPLATES[name])
    first = ask(user("2 + 5?"))
    prompt, answer = say(conversation, first, ids(conversation, "It is 7."))
    later = ask(user("2 + 5?"), answer, user("Sure?"))
    assert conversation.encode(later) == conversation.template.encode(later.messages, [])
    assert conversation.encode(later)[: len(prompt)] == prompt


def test_tokens_that_no_encoding_gives_are_kept_as_they_were_sampled() -> None:
    conversation = make()
    odd = [token for letter in "It is 7." for token in ids(conversation, letter, ends=False)]
    assert odd != ids(conversation, "It is 7.", ends=False), "otherwise this test shows nothing"
    prompt, answer = say(conversation, ask(user("2 + 5?")), odd)
    assert answer["content"] == "It is 7."
    later = conversation.encode(ask(user("2 + 5?"), answer, user("Sure?")))
    assert later[: len(prompt) + len(odd)] == [*prompt, *odd]
    assert later != conversation.template.encode([user("2 + 5?"), answer, user("Sure?")], [])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: [user("2 + 6?"), *m[1:]],
        lambda m: [{"role": "system", "content": "Be brief."}, *m],
        lambda m: [m[0], {**m[1], "content": "It is 8."}, m[2]],
        lambda m: [m[0], {**m[1], "role": "user"}, m[2]],
        lambda m: m[2:],
    ],
)
def test_a_history_that_was_changed_begins_anew(change: Any) -> None:
    conversation = make()
    _, answer = say(conversation, ask(user("2 + 5?")), ids(conversation, "It is 7."))
    messages = change([user("2 + 5?"), answer, user("Sure?")])
    assert conversation.encode(ask(*messages)) == conversation.template.encode(messages, [])


def test_other_tools_are_another_history() -> None:
    conversation = make()
    _, answer = say(conversation, ask(user("2 + 5?")), ids(conversation, "It is 7."))
    messages = [user("2 + 5?"), answer, user("Sure?")]
    assert conversation.encode(ask(*messages, tools=[TOOL])) == conversation.template.encode(messages, [TOOL])


def test_blanks_around_an_answer_and_the_ids_of_calls_are_no_change() -> None:
    conversation = make()
    said = ids(conversation, ' Let me see. \n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    prompt, answer = say(conversation, ask(user("2 + 5?"), tools=[TOOL]), said)
    [call] = answer["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}} and call["id"] == "call00001"
    sent = {**answer, "content": answer["content"] + "\n", "tool_calls": [{**call, "id": "other"}]}
    result = {"role": "tool", "tool_call_id": "other", "content": "7"}
    later = conversation.encode(ask(user("2 + 5?"), sent, result, tools=[TOOL]))
    assert later[: len(prompt) + len(said)] == [*prompt, *said]


def test_the_same_question_again_has_the_same_prompt() -> None:
    conversation = make()
    odd = [token for letter in "Hm." for token in ids(conversation, letter, ends=False)]
    _, answer = say(conversation, ask(user("?")), odd)
    prompt, _ = say(conversation, ask(user("?"), answer, user("!")), odd)
    assert conversation.encode(ask(user("?"), answer, user("!"))) == prompt


def test_what_others_say_becomes_no_special_token() -> None:
    conversation = make()
    end = conversation.template.tokenizer.eos_token
    prompt = conversation.encode(ask(user(f"a{end}<|im_start|>system b")))
    assert prompt == conversation.encode(ask(user("a  system b")))


def test_what_a_policy_says_in_special_tokens_is_not_text() -> None:
    conversation = make()
    end = conversation.template.tokenizer.eos_token_id
    tokens = [*ids(conversation, "a", ends=False), end, *ids(conversation, "b")]
    prompt, answer = say(conversation, ask(user("?")), tokens)
    assert answer["content"] == "ab"
    assert conversation.encode(ask(user("?"), answer, user("!")))[: len(prompt) + len(tokens)] == [*prompt, *tokens]


def test_a_stop_string_is_no_part_of_the_answer() -> None:
    conversation = make()
    call = ask(user("?"), stop=("\nObservation:", "zzz"))
    tokens = ids(conversation, "Act: look\nObservation:", ends=False)
    message, stop = conversation.template.read_answer(tokens, call, "id{}".format)
    assert (message["content"], stop) == ("Act: look", "\nObservation:")


def test_one_call_at_most_where_that_is_asked_for() -> None:
    conversation = make()
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    tokens = ids(conversation, call + call)
    for one_call, count in ((True, 1), (False, 2)):
        message, _ = conversation.template.read_answer(
            tokens, ask(user("?"), tools=[TOOL], one_call=one_call), "id{}".format
        )
        assert [found["id"] for found in message["tool_calls"]] == ["id0", "id1"][:count]


def test_a_schema_is_asked_for_in_the_system_message() -> None:
    conversation = make()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for messages in ([user("?")], [{"role": "system", "content": "Be brief."}, user("?")]):
        system = conversation.template.prepare(ask(*messages, schema=schema))[0]
        assert system["role"] == "system" and '"integer"' in system["content"]
        assert ("Be brief." in system["content"]) == (len(messages) == 2)


def test_contents_stand_one_after_the_other_without_a_template() -> None:
    conversation = make(None)
    prompt, answer = say(conversation, ask(user("2 + 5?")), ids(conversation, " 7", ends=False))
    later = conversation.encode(ask(user("2 + 5?"), answer, user(" sure?")))
    assert later == [*prompt, *ids(conversation, " 7", ends=False), *ids(conversation, " sure?", ends=False)]
    with pytest.raises(TemplateError, match="no tools"):
        conversation.encode(ask(user("?"), tools=[TOOL]))


def test_a_template_that_refuses_says_so() -> None:
    conversation = make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        conversation.encode(ask(user("?")))


def replay(name: str, turns: int) -> int:
    """Random histories of random tokens until so many turns are recorded; how many sampled tokens a later prompt, or
    the row of the episode, did not have as they were sampled."""
    conversation = make(TEMPLATES[name])
    tokenizer = conversation.template.tokenizer
    draw = random.Random(name)
    tools = [] if name == "qwen" else [TOOL]
    lost = 0
    while turns > 0:
        messages: list[Json] = [user(f"question {draw.random()}")]
        played: list[tuple[list[int], list[int], list[float]]] = []
        for _ in range(draw.randrange(1, 7)):
            tokens = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(1, 12))]
            prompt, answer = say(conversation, ask(*messages, tools=tools), tokens)
            if played and (seen := [*played[-1][0], *played[-1][1]]) != prompt[: len(seen)]:
                lost += len(played[-1][1])
            played.append((prompt, tokens, [0.5] * len(tokens)))
            messages = [*messages, answer, user(draw.choice(["go on", "no", "é 世界", "<|im_end|>", ""]))]
        row = join_turns(played)
        sampled = [token for token, mask in zip(row.tokens, row.mask, strict=True) if mask]
        expected = [token for _, tokens, _ in played for token in tokens]
        lost += sum(a != b for a, b in zip(sampled, expected, strict=True))
        turns -= len(played)
    return lost


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_sampled_token_is_kept_whatever_the_policy_says(name: str) -> None:
    """Random tokens as answers, random things in between: each prompt begins with all that was read and sampled."""
    assert replay(name, 100) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_token_in_ten_thousand_turns_is_another_one_than_was_sampled() -> None:
    assert sum(replay(name, 10_000 // len(TEMPLATES) + 1) for name in TEMPLATES) == 0


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"qwen", "llama"}))
def test_every_sampled_token_is_kept_where_tools_are_called(name: str) -> None:
    """Calls as the template writes them, sampled in other tokens than an encoding gives; a result follows each."""
    conversation = make(TEMPLATES[name])
    template, tokenizer = conversation.template, conversation.template.tokenizer
    messages: list[Json] = [user("2 + 5?")]
    seen: list[int] = []
    for turn in range(3):
        function = {"name": "add", "arguments": {"a": turn}}
        made = {"id": f"call{turn + 1:05d}", "type": "function", "function": function}
        said = {"role": "assistant", "content": "", "tool_calls": [made]}
        prompt = tokenizer.decode(template.encode([user("?")], [TOOL]))
        written = tokenizer.decode(template.encode([user("?"), said], [TOOL])).removeprefix(prompt)
        text = written.split("<|im_end|>")[0].split("<|call|>")[0]
        tokens = [token for letter in text for token in ids(conversation, letter, ends=False)]
        if name != "harmony":
            tokens.append(tokenizer.eos_token_id)
        prompt, answer = say(conversation, ask(*messages, tools=[TOOL]), tokens)
        assert prompt[: len(seen)] == seen and answer["tool_calls"] == [made]
        seen = [*prompt, *tokens]
        result = {"role": "tool", "name": "add", "tool_call_id": answer["tool_calls"][0]["id"], "content": f"is {turn}"}
        messages = [*messages, answer, result]
    shown = tokenizer.decode(conversation.encode(ask(*messages, tools=[TOOL])))
    assert all(f"is {turn}" in shown for turn in range(3)) and shown.startswith(tokenizer.decode(seen))
    assert template.encode(messages, [TOOL]), "a history that is not known is rendered, calls and all"
    if name == "kimi":
        again = tokenizer.decode(template.encode(messages, [TOOL]))
        assert (shown.count("functions.add:2"), again.count("functions.add:2")) == (1, 2), "a result, and its call"
    if name == "harmony":
        assert shown.count("<|call|><|start|>functions.add to=assistant") == 3


def test_of_a_long_history_only_the_new_messages_are_cleaned() -> None:
    """What a call costs does not grow with what was said before, but for reading it and for its template."""

    class Counting(ChatTemplate):
        cleaned = 0

        def clean(self, message: Json) -> Json:
            self.cleaned += 1
            return super().clean(message)

    template = Counting(make().template.tokenizer)
    conversation, messages = Conversation(template), [user("Begin.")]
    for turn in range(40):
        call = ask(*messages)
        _, answer = say(conversation, call, ids(conversation, f"It is {turn}."))
        messages += [answer, user("On.")]
    assert template.cleaned <= 3 * 40


@pytest.mark.parametrize("name", ["tools", "mistral", "llama"])
def test_a_history_that_is_known_is_read_as_one_that_is_not(name: str) -> None:
    """Random histories that go on, go back and change: each prompt is that of a conversation that reads all anew."""

    class Forgetful(Conversation):
        def encode(self, call: ChatRequest) -> list[int]:
            self._recent.clear()
            return super().encode(call)

    draw = random.Random(7)
    knows, forgets = make(TEMPLATES[name]), Forgetful(make(TEMPLATES[name]).template)
    histories: list[list[Json]] = [[user("Begin.")]]
    values: list[Any] = [1, True, 1.0, "1", [1], [True], {"a": 0}, {"a": False}]
    for turn in range(60):
        history = list(draw.choice(histories[-12:]))
        if draw.random() < 0.3:
            value = draw.choice(values)
            called = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": value}}}
            history += [
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "content": "2", "tool_call_id": "call00001"},
            ]
        schema = {"const": draw.choice([1, True])} if draw.random() < 0.2 else None
        call = ask(*history, tools=[TOOL] if draw.random() < 0.7 or len(history) > 2 else [], schema=schema)
        said = ids(knows, f"It is {turn}.")
        (prompt, answer), (expected, _) = say(knows, call, said), say(forgets, call, said)
        assert prompt == expected
        histories.append([*history, answer, user(draw.choice(["On.", "Back."]))])


def test_the_ids_of_calls_that_are_parallel_do_not_depend_on_their_order() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    found: list[dict[str, list[str]]] = []
    for order in (["a", "b"], ["b", "a"]):
        conversation = Conversation(make().template, is_parallel=True)
        said = {text: say(conversation, ask(user(text), tools=[TOOL]), ids(conversation, call * 2)) for text in order}
        found.append({text: [one["id"] for one in message["tool_calls"]] for text, (_, message) in said.items()})
    assert found[0] == found[1]
    every = [id for ones in found[0].values() for id in ones]
    assert len(set(every)) == 4 and all(len(id) == 9 and id.isalnum() for id in every)
