"""`prompt.thinking` and `prompt.template_arguments`: which switch of a template they set, and every refusal."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlvr.chat.chat_template import list_variables
from rlvr.config import load
from rlvr.config.build_config import build_config, resolved_values
from rlvr.core.types import Task
from rlvr.envs import resolve_environment
from rlvr.envs.prompt import PromptExample, PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.service.models.local_judge import ChatFormatter
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.rollout_rows import trajectory_row
from rlvr.training.sft import SftOptions, sft_step
from tests.kit.chat_rows import write_rows
from tests.kit.prompt_cases import (
    BUDGET,
    CHAT,
    EFFORT,
    ENABLE_THINKING,
    PLAIN,
    THINKING,
    Grouped,
    OwnWords,
    Recorder,
    play,
    read_text,
    rows,
    with_template,
)  # fmt: skip

ASKED = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
EXAMPLES = [PromptExample("1 + 1?", "2")]
BOTH = ENABLE_THINKING + "{% if thinking_budget %}[{{ thinking_budget }}]{% endif %}"


def read_with(template: str, **options: Any) -> str:
    tokenizer = with_template(template)
    return read_text(apply_prompt_options(rows(), tokenizer, PromptOptions(**options)), tokenizer)


# --- the switches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "thinking", "expected"),
    [
        (ENABLE_THINKING, None, ASKED),
        (ENABLE_THINKING, "on", ASKED),
        (ENABLE_THINKING, "off", ASKED + NO_THOUGHT),
        (ENABLE_THINKING, False, ASKED + NO_THOUGHT),
        (THINKING, None, "[user]2 + 2?[assistant]</think>"),
        (THINKING, True, "[user]2 + 2?[assistant]<think>"),
        (THINKING, "off", "[user]2 + 2?[assistant]</think>"),
        (BUDGET, None, "[user]2 + 2?[assistant]"),
        (BUDGET, "on", "[user]2 + 2?[assistant]"),
        (BUDGET, "off", "[user]2 + 2?[budget]0[assistant]"),
        (BUDGET, 512, "[user]2 + 2?[budget]512[assistant]"),
        (BOTH, 512, f"{ASKED}[512]"),
        (BOTH, "off", ASKED + NO_THOUGHT),
    ],
)
def test_the_templates_switch_is_set(template: str, thinking: Any, expected: str) -> None:
    assert read_with(template, thinking=thinking) == expected


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (ENABLE_THINKING, {"enable_thinking"}),
        (THINKING, {"thinking"}),
        (BUDGET, {"thinking_budget"}),
        (EFFORT, {"reasoning_effort"}),
        (
            "{% set thinking = true %}{% if thinking %}{{ messages[0].thinking }}{{ bos_token }}{% endif %}",
            {"bos_token"},
        ),
    ],
)
def test_the_variables_of_a_template_are_those_that_its_caller_can_give(template: str, variables: set[str]) -> None:
    """Not what it sets itself, the fields of its messages, the helpers of transformers."""
    assert list_variables(with_template(template)) == variables


def test_of_several_templates_the_default_one_is_read() -> None:
    tokenizer = with_template({"default": BUDGET, "tool_use": THINKING})  # type: ignore[arg-type]
    assert list_variables(tokenizer) == {"thinking_budget"}


def test_template_arguments_set_any_variable_that_the_template_reads() -> None:
    assert read_with(EFFORT).startswith("[effort]medium[user]")
    assert read_with(EFFORT, template_arguments={"reasoning_effort": "low"}).startswith("[effort]low[user]")
    assert read_with(EFFORT, template_arguments={"reasoning_effort": "medium"}).startswith("[effort]medium[user]")
    assert read_with(BOTH, thinking="off", template_arguments={"thinking_budget": 7}) == f"{ASKED}{NO_THOUGHT}[7]"


def published(name: str) -> str:
    """A template as a model brings it, of those that come with TRL."""
    trl = find_spec("trl")
    file = Path(trl.origin).parent / "chat_templates" / f"{name}.jinja" if trl and trl.origin else None
    if file is None or not file.is_file():
        pytest.skip("TRL's chat templates are not installed")
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gemma4", "nemotron_3_nano"])
def test_the_switch_of_a_published_template_is_found(name: str) -> None:
    template = published(name)
    on, off = (read_with(template, thinking=thinking, examples=EXAMPLES) for thinking in ("on", "off"))
    assert on != off and read_with(template, examples=EXAMPLES) in (on, off)
    if name.startswith("qwen3"):
        assert off == on.removesuffix("<think>\n") + NO_THOUGHT


@pytest.mark.parametrize(
    ("name", "argument", "value", "text"),
    [
        ("gptoss", "reasoning_effort", "low", "Reasoning: low"),
        ("gptoss", "reasoning_effort", "medium", "Reasoning: medium"),
        ("llama3_2", "date_string", "26 Jul 2024", "Today Date: 26 Jul 2024"),
    ],
)
def test_a_variable_of_a_published_template_is_set(name: str, argument: str, value: str, text: str) -> None:
    assert text in read_with(published(name), template_arguments={argument: value})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lfm2_2_5_v2", {"thinking": "on"}),
        ("llama3_1", {"template_arguments": {"system_message": "x"}}),
        ("qwen3", {"template_arguments": {"content": "x"}}),
    ],
)
def test_a_variable_that_a_published_template_sets_itself_is_no_switch(name: str, options: dict[str, Any]) -> None:
    assert {"thinking", "system_message", "content"} & list_variables(with_template(published(name)))
    with pytest.raises(ValueError, match=r"has no effect: the tokenizer's chat template writes the same prompt"):
        read_with(published(name), **options)


# --- the same way everywhere ----------------------------------------------------------------------------------------


def test_rollouts_keep_what_the_model_read_and_its_tokens() -> None:
    tokenizer = with_template(ENABLE_THINKING)
    t = play(apply_prompt_options(rows(), tokenizer, PromptOptions(thinking="off")), tokenizer, "4")
    row = json.loads(trajectory_row(t))
    assert (row["prompt"], row["rendered_prompt"]) == ("2 + 2?", ASKED + NO_THOUGHT)
    assert row["prompt_tokens"] == t.prompt_tokens == tokenizer.encode(ASKED + NO_THOUGHT, add_special_tokens=False)


def test_demonstrations_are_imitated_after_the_empty_thought() -> None:
    tokenizer = with_template(ENABLE_THINKING)
    source = apply_prompt_options(rows(), tokenizer, PromptOptions(thinking="off"))
    client: Any = Recorder(tokenizer)
    sft_step(client, source, Curriculum(source, CurriculumOptions(), 0), SftOptions(steps=1, batch_size=1), 0, 0)
    text = tokenizer.decode(client.data[0].model_input.tokens, skip_special_tokens=False)
    assert text == f"{ASKED}{NO_THOUGHT}4"


@pytest.mark.parametrize("history", ["append", "rewrite"])
def test_every_attempt_of_a_refinement_begins_with_the_empty_thought(history: str, tmp_path: Path) -> None:
    tokenizer, kwargs = with_template(ENABLE_THINKING), {"path": str(write_rows(tmp_path))}
    source = resolve_environment("refine", inner="gsm8k", inner_kwargs=kwargs, history=history, feedback="No.")
    t = play(apply_prompt_options(source, tokenizer, PromptOptions(thinking="off")), tokenizer, "#### 1", "#### 2")
    asked = f"<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHT}"
    if history == "append":
        assert t.rendered_prompt.endswith(f"<|im_start|>assistant\n{NO_THOUGHT}")
        assert t.response == f"#### 1<|im_end|>\n{asked}#### 2"
    else:
        assert (t.rendered_prompt, t.response) == (asked, "#### 2")


@pytest.mark.parametrize(
    ("template", "end"),
    [(ENABLE_THINKING, NO_THOUGHT), (BUDGET, "[budget]0[assistant]"), (CHAT.chat_template, "assistant\n")],
)
def test_a_local_judge_does_not_think(template: str, end: str) -> None:
    tokenizer = with_template(template)
    prompt = ChatFormatter(tokenizer).prompt([{"role": "user", "content": "2 + 2?"}])
    assert tokenizer.decode(prompt.to_ints()).endswith(end)


# --- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "value"), [("off", "off"), ("on", "on"), ("null", None), ("512", 512)])
def test_the_words_of_the_command_line_are_kept(word: str, value: Any) -> None:
    loaded = load("gsm8k", None, [f"prompt.thinking={word}", "prompt.template_arguments.reasoning_effort=low"])
    config = build_config(loaded)
    assert config.prompt == PromptOptions(thinking=value, template_arguments={"reasoning_effort": "low"})
    stored = resolved_values(config, loaded)["prompt"]
    assert (stored["thinking"], stored["template_arguments"]) == (value, {"reasoning_effort": "low"})


@pytest.mark.parametrize("word", ["maybe", "0", "-1"])
def test_another_word_for_thinking_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"prompt\.thinking=.*expected on, off, or a number of tokens above 0"):
        build_config(load("gsm8k", None, [f"prompt.thinking={word}"]))


@pytest.mark.parametrize("word", ["prompt.thinking=on", "prompt.template_arguments.a=1"])
def test_text_without_a_template_has_no_arguments_of_one(word: str) -> None:
    with pytest.raises(ValueError, match=r"needs a chat template, and prompt\.chat=off leaves it out"):
        build_config(load("gsm8k", None, ["prompt.chat=off", word]))


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (None, {"thinking": "off"}, r"^prompt\.thinking=off needs a chat template, and the tokenizer has none"),
        (None, {"template_arguments": {"a": 1}}, r"^prompt\.template_arguments needs a chat template"),
        (CHAT.chat_template, {"thinking": "on"}, r"^prompt\.thinking=on: .*no switch for thinking.*leave .* out"),
        (EFFORT, {"thinking": "on"}, r"\(reasoning_effort\) by prompt\.template_arguments"),
        (ENABLE_THINKING, {"thinking": 64}, r"^prompt\.thinking=64: .*takes no budget.*prompt\.thinking=on"),
        ("{% if enable_thinking %}{% endif %}hello", {"thinking": "off"}, r"has no effect: .*same prompt.*on and off"),
        (EFFORT, {"template_arguments": {"effort": 1}}, r"\.effort: .*no such variable; it reads reasoning_effort"),
        (EFFORT, {"template_arguments": {"messages": []}}, r"\.messages: .*reads no such variable"),
        (EFFORT, {"template_arguments": {"reasoning_effort": "none"}}, r"reasoning_effort='none' \(no such effort\)"),
        ("{% for m in messages %}", {"thinking": "on"}, r"not valid Jinja.*another tokenizer"),
        (
            ENABLE_THINKING,
            {"thinking": "on", "template_arguments": {"enable_thinking": False}},
            r"prompt\.thinking=on and prompt\.template_arguments\.enable_thinking .*give one of the two",
        ),
    ],
)
def test_what_a_template_cannot_do_is_refused(template: str | None, options: dict[str, Any], said: str) -> None:
    tokenizer = PLAIN if template is None else with_template(template)
    with pytest.raises(ValueError, match=said):
        apply_prompt_options(rows(), tokenizer, PromptOptions(**options))


@pytest.mark.parametrize("kind", [OwnWords, Grouped])
@pytest.mark.parametrize(
    ("template", "options"),
    [(ENABLE_THINKING, {"thinking": "off"}), (EFFORT, {"template_arguments": {"reasoning_effort": "low"}})],
)
def test_an_environment_that_writes_its_own_prompts_refuses_them(kind: Any, template: str, options: Any) -> None:
    source = kind("own", [Task("t", "2 + 2?")], [], "exact_match")
    with pytest.raises(ValueError, match=r"^prompt\.(thinking=off|template_arguments) has no effect"):
        apply_prompt_options(source, with_template(template), PromptOptions(**options))
