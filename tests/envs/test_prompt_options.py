"""Text prompts as chat messages: who gets them, what the model reads, what verifiers are given, and every refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.config import load
from rlvr.config.build_config import build_config, resolved_values
from rlvr.core.types import Task
from rlvr.envs import PromptEnv, resolve_environment
from rlvr.envs.code_tasks import CodeSource
from rlvr.envs.prompt import PromptOptions, encode_prompt
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.row_source import RowSource
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case
from rlvr.rollout import score
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.rollout_rows import trajectory_row
from rlvr.training.sft import SftOptions, sft_step
from tests.kit.chat_rows import write_rows
from tests.kit.code_rows import chat_tokenizer, mbpp_file, problem
from tests.kit.prompt_cases import CHAT, PLAIN, Grouped, OwnWords, Recorder, first, play, read_text, rows, with_template

BRIEF = "Be brief."


# --- who gets a chat ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chat", "tokenizer"), [("auto", PLAIN), ("off", PLAIN), ("off", CHAT)])
def test_without_a_template_and_with_off_the_source_is_left_as_it_is(chat: str, tokenizer: Any) -> None:
    source = rows()
    assert apply_prompt_options(source, tokenizer, PromptOptions(chat)) is source
    assert read_text(source, tokenizer) == "2 + 2?"


@pytest.mark.parametrize("chat", ["auto", "on", True])
def test_a_text_prompt_becomes_one_message_of_the_user(chat: Any) -> None:
    source = apply_prompt_options(rows(), CHAT, PromptOptions(chat))
    assert read_text(source, CHAT) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert first(source).prompt == "2 + 2?"
    (held,) = source.heldout(None)
    assert read_text(source, CHAT, held) == "<|im_start|>user\n1 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert (source.levels, source.reward, source.size and source.size("")) == (("",), "exact_match", 1)


def test_a_system_message_comes_before_text_and_before_messages() -> None:
    messages = [{"role": "user", "content": "2 + 2?"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    for prompt in ("2 + 2?", messages):
        assert read_text(apply_prompt_options(rows(prompt), CHAT, PromptOptions(system=BRIEF)), CHAT) == expected


def test_further_held_out_sets_are_shown_as_a_chat_too() -> None:
    class Offers(RowSource):
        def extra_heldout(self, count: int) -> dict[str, list[Task]]:
            return {"far": [Task("far", "9 + 9?")] * count}

    source = apply_prompt_options(Offers("own", [Task("t", "2 + 2?")], [], "exact_match"), CHAT, PromptOptions())
    assert [task.shown_prompt for task in source.extra_heldout(1)["far"]] == [[{"role": "user", "content": "9 + 9?"}]]


def test_the_begin_token_is_there_once() -> None:
    """A tokenizer that puts its begin token before every text, and a template that writes it too, as Llama's."""
    from tokenizers import processors

    tokenizer = with_template(f"{{{{ bos_token }}}}{chat_tokenizer().chat_template}")
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    core = tokenizer.backend_tokenizer
    core.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", tokenizer.bos_token_id)])
    assert tokenizer.encode("a").count(tokenizer.bos_token_id) == 1
    task = first(apply_prompt_options(rows(), tokenizer, PromptOptions()))
    assert encode_prompt(task, tokenizer).count(tokenizer.bos_token_id) == 1
    assert encode_prompt(task, tokenizer)[0] == tokenizer.bos_token_id


# --- what others see of it ------------------------------------------------------------------------------------------


def test_verifiers_get_the_task_s_own_prompt_and_rollouts_keep_what_the_model_read() -> None:
    source = apply_prompt_options(rows(), CHAT, PromptOptions(system=BRIEF))
    t = play(source, CHAT, "4")
    score([t], resolve_reward("exact_match"))
    case = Case.of(t)
    assert (case.prompt, case.messages, case.response, t.reward) == ("2 + 2?", None, "4", 1.0)
    row = json.loads(trajectory_row(t))
    assert row["prompt"] == "2 + 2?"
    assert row["rendered_prompt"] == t.read_prompt == CHAT.decode(t.prompt_tokens, skip_special_tokens=False)
    assert row["rendered_prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    as_text = play(rows(), CHAT, "4")
    assert "rendered_prompt" not in json.loads(trajectory_row(as_text)) and as_text.read_prompt == "2 + 2?"


def test_a_demonstration_has_no_space_before_it_in_a_chat(tmp_path: Path) -> None:
    plain = resolve_environment("gsm8k", path=str(write_rows(tmp_path)))
    chat = apply_prompt_options(plain, CHAT, PromptOptions())
    one, other = (source.demonstration(first(source), 0) for source in (plain, chat))
    assert one is not None and one.startswith(" ") and other == one[1:]


def test_supervised_fine_tuning_imitates_in_the_chat() -> None:
    source = apply_prompt_options(rows(), CHAT, PromptOptions(system=BRIEF))
    client: Any = Recorder(CHAT)
    sft_step(client, source, Curriculum(source, CurriculumOptions(), 0), SftOptions(steps=1, batch_size=1), 0, 0)
    (datum,) = client.data
    text = CHAT.decode([*datum.model_input.tokens, CHAT.eos_token_id], skip_special_tokens=False)
    asked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{asked}4<|im_end|>"


def test_refinement_goes_on_in_the_chat(tmp_path: Path) -> None:
    """The critic's words are a turn of the user, after the attempt and before the next one."""
    kwargs = {"path": str(write_rows(tmp_path))}
    source = resolve_environment("refine", inner="gsm8k", inner_kwargs=kwargs, feedback="No. {prompt}")
    t = play(apply_prompt_options(source, CHAT, PromptOptions(system=BRIEF)), CHAT, "#### 1", "#### 2")
    question = first(source).prompt
    assert t.rendered_prompt.startswith("<|im_start|>system\nBe brief.") and question in t.rendered_prompt
    said = f"#### 1<|im_end|>\n<|im_start|>user\nNo. {question}<|im_end|>\n<|im_start|>assistant\n#### 2"
    assert t.response == said and t.answer == "#### 2"


def test_refinement_that_writes_its_prompt_anew_keeps_the_system_message(tmp_path: Path) -> None:
    kwargs = {"path": str(write_rows(tmp_path))}
    source = resolve_environment(
        "refine", inner="gsm8k", inner_kwargs=kwargs, history="rewrite", feedback="No. {answer}"
    )
    t = play(apply_prompt_options(source, CHAT, PromptOptions(system=BRIEF)), CHAT, "#### 1", "#### 2")
    assert t.rendered_prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nNo. #### 1<|im_end|>\n<|im_start|>assistant\n"
    )


def test_programs_are_asked_for_in_the_words_of_a_chat(tmp_path: Path) -> None:
    """A code block instead of [BEGIN] and [DONE], in prompt and demonstration; worked examples only where asked for."""
    file = str(mbpp_file(tmp_path))
    text = resolve_environment("mbpp", path=file)
    source, wanted = (
        apply_prompt_options(text, CHAT, PromptOptions()),
        resolve_environment("mbpp", path=file, chat=True),
    )
    for task, theirs in zip(source.heldout(3), wanted.heldout(3), strict=True):
        assert task.shown_prompt == theirs.prompt and "[BEGIN]" in task.prompt
        assert source.demonstration(task, 0) == wanted.demonstration(theirs, 0)
        assert source.env(task, CHAT)._stop is None  # type: ignore[attr-defined]
    shot = apply_prompt_options(resolve_environment("mbpp", path=file, few_shot=1), CHAT, PromptOptions()).heldout(1)[0]
    assert [m["role"] for m in shot.shown_prompt or ()] == ["user", "assistant", "user"]
    assert shot.shown_prompt == resolve_environment("mbpp", path=file, few_shot=1, chat=True).heldout(1)[0].prompt


def test_what_an_environment_says_of_a_task_reaches_its_chat() -> None:
    class Polite(RowSource):
        def chat_messages(self, task: Task) -> list[dict[str, str]]:
            return [{"role": "user", "content": f"Please: {task.prompt}"}]

    source = apply_prompt_options(Polite("own", [Task("t", "2 + 2?")], [], "exact_match"), CHAT, PromptOptions())
    assert "user\nPlease: 2 + 2?<|im_end|>" in read_text(source, CHAT)


# --- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "chat"), [("off", "off"), ("on", "on"), ("false", "off"), ("auto", "auto")])
def test_the_words_of_the_command_line_are_kept_as_words(word: str, chat: str) -> None:
    """YAML takes `on` and `off` for truth values; resolved.yaml has the word."""
    loaded = load("gsm8k", None, [f"prompt.chat={word}"])
    config = build_config(loaded)
    assert config.prompt == PromptOptions(chat)
    assert resolved_values(config, loaded)["prompt"]["chat"] == chat


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prompt.chat=maybe"], "prompt.chat='maybe', expected auto, on or off"),
        (["prompt.chat=off", "prompt.system=Be brief."], "prompt.system needs a chat"),
        (["prompt.sytem=x"], "did you mean prompt.system?"),
        (["evaluation.interim_tasks=null", "training.until=0.5"], "evaluation.interim_tasks=null"),
    ],
)
def test_a_config_that_contradicts_itself_names_the_key(words: list[str], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_config(load("gsm8k", None, ["evaluation.every=5", *words]))
    assert said in str(caught.value)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chat": "maybe"}, "prompt.chat='maybe', expected auto, on or off"),
        ({"chat": "off", "system": BRIEF}, "prompt.system needs a chat template, and prompt.chat=off leaves it out"),
        ({"chat": False, "system": BRIEF}, "prompt.system needs a chat template, and prompt.chat=off leaves it out"),
        ({"system": " "}, "prompt.system=' ' has no words"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        PromptOptions(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize(("options", "key"), [({"chat": "on"}, "prompt.chat=on"), ({"system": BRIEF}, "prompt.system")])
def test_a_chat_that_was_asked_for_needs_a_template(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key} needs a chat template, and the tokenizer has none"):
        apply_prompt_options(rows(), PLAIN, PromptOptions(**options))


RAISES = "{{ raise_exception('only for tools') }}"
NO_SYSTEM = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
NO_SYSTEM += "{% endif %}{{ m['content'] }}{% endfor %}"
DROPS_SYSTEM = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"
BROKEN = "{% for m in messages %}{{ m['content'] }}"


@pytest.mark.parametrize(("template", "its_error"), [(RAISES, "only for tools"), (BROKEN, "endfor")])
@pytest.mark.parametrize("chat", ["auto", "on"])
def test_a_template_that_raises_is_refused_with_its_own_error(template: str, its_error: str, chat: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot render the prompt of task 't0'.*{its_error}.*prompt\.chat=off"):
        apply_prompt_options(rows(), with_template(template), PromptOptions(chat))


def test_a_template_that_takes_no_system_message_is_refused_with_its_own_error() -> None:
    tokenizer = with_template(NO_SYSTEM)
    with pytest.raises(ValueError, match=r"^prompt\.system: .*takes no system message \(System role not supported\)"):
        apply_prompt_options(rows(), tokenizer, PromptOptions(system=BRIEF))
    assert read_text(apply_prompt_options(rows(), tokenizer, PromptOptions()), tokenizer) == "2 + 2?"


def test_a_template_that_leaves_the_system_message_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^prompt\.system: .*leaves system messages out"):
        apply_prompt_options(rows(), with_template(DROPS_SYSTEM), PromptOptions(system=BRIEF))


def test_a_second_system_message_is_refused() -> None:
    own = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "2 + 2?"}]
    with pytest.raises(ValueError, match=r"prompt\.system: task 't0' has a system message of its own"):
        apply_prompt_options(rows(own), CHAT, PromptOptions(system=BRIEF))
    assert read_text(apply_prompt_options(rows(own), CHAT, PromptOptions("on")), CHAT).startswith(
        "<|im_start|>system\nHi."
    )


@pytest.mark.parametrize("kind", [OwnWords, Grouped])
def test_an_option_without_effect_on_the_episodes_is_refused(kind: type[RowSource]) -> None:
    source = kind("own", [Task("t", "2 + 2?")], [], "exact_match")
    for options, key in (({"chat": "on"}, r"prompt\.chat=on"), ({"system": BRIEF}, r"prompt\.system")):
        with pytest.raises(ValueError, match=f"^{key} has no effect"):
            apply_prompt_options(source, CHAT, PromptOptions(**options))
    assert apply_prompt_options(source, CHAT, PromptOptions()) is source  # and `auto` leaves them alone


class Framed(RowSource):
    """Its episodes write a template of their own."""

    def env(self, task: Task, tokenizer: Any) -> Any:
        return PromptEnv(replace(task, shown_prompt=f"[user] {task.prompt} [model]"), tokenizer)


class Unready(RowSource):
    """Its episodes need what is not there yet."""

    def env(self, task: Task, tokenizer: Any) -> Any:
        class Later(PromptEnv):
            async def initial_observation(self) -> Any:
                raise OSError("no server yet")

        return Later(task, tokenizer)


def test_auto_says_where_episodes_encode_their_own_prompts() -> None:
    """A message, no refusal: the prompts stay what the episodes make of them, also for supervised fine-tuning."""
    said: list[str] = []
    for kind, is_plain in ((OwnWords, True), (Framed, False)):
        source = kind("own", [Task("t", "2 + 2?")], [], "exact_match")
        assert apply_prompt_options(source, CHAT, PromptOptions(), said.append) is source
        text = said.pop()
        assert text.startswith("prompt.chat=auto has no effect") and "encode_prompt" in text and said == []
        assert ("without the tokenizer's chat template" in text) == is_plain
        for options, tokenizer in ((PromptOptions("off"), CHAT), (PromptOptions(), PLAIN)):
            apply_prompt_options(source, tokenizer, options, said.append)
        assert said == []


def test_auto_says_nothing_of_episodes_that_read_it_or_cannot_be_tried() -> None:
    unready = Unready("own", [Task("t", "2 + 2?")], [], "exact_match")
    messages = rows([{"role": "user", "content": "2 + 2?"}])
    for source in (rows(), messages, unready, Grouped("own", [Task("t", "2 + 2?")], [], "exact_match")):
        apply_prompt_options(source, CHAT, PromptOptions(), pytest.fail)


def test_code_tasks_without_text_keep_their_messages() -> None:
    messages = [{"role": "user", "content": "Add 3."}]
    held = Task("held", "other", problem(4), "3")
    source = CodeSource("own", [Task("t", messages, problem(3), "3")], [held], visible=1, max_turns=1)
    assert first(apply_prompt_options(source, CHAT, PromptOptions())).shown_prompt == messages
