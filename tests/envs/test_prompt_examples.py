"""`prompt.examples`: which tasks they are, where they stand, in every environment, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.config import dump, load
from rlvr.config.build_config import build_config, resolved_values
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs import resolve_environment
from rlvr.envs.prompt import PromptExample, PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.row_source import RowSource
from rlvr.reward.signatures import Case
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.rollout_rows import trajectory_row
from rlvr.training.sft import SftOptions, sft_step
from tests.kit.chat_rows import write_rows
from tests.kit.code_rows import mbpp_file
from tests.kit.prompt_cases import CHAT, PLAIN, Grouped, OwnWords, Recorder, first, play, read_text, rows, with_template

GIVEN = PromptExample("1 + 1?", " 2")


def sums(count: int, level: str = "", **options: Any) -> RowSource:
    """`0 + 1?` and so on, with a space before the answer; `9 + 1?` is held out."""
    train = [Task(f"{level}t{n}", f"{level}{n} + 1?", {"answer": str(n + 1)}, level) for n in range(count)]
    return RowSource("sums", train, [Task("held", "9 + 1?", {"answer": "10"})], "exact_match", "answer", " ")


def draw_prompts(source: TaskSource, count: int, seed: int = 0) -> list[Any]:
    return [source.train(seed, index, level).prompt for index in range(count) for level in source.levels]


# --- which tasks they are -------------------------------------------------------------------------------------------


def test_examples_of_the_source_are_its_first_training_tasks_whatever_the_seed_and_the_task() -> None:
    plain = sums(6)
    chosen = [plain.train(0, index, "") for index in (0, 1)]
    expected = "".join(f"{task.prompt} {task.meta['answer']}\n\n" for task in chosen)
    source = apply_prompt_options(plain, PLAIN, PromptOptions(examples=2))
    for task in [*(source.train(seed, index, "") for seed in (0, 7) for index in range(20)), *source.heldout(None)]:
        assert task.model_prompt == f"{expected}{task.prompt}"


def test_an_example_is_no_training_task_and_another_task_stands_in_for_it() -> None:
    """Its answer would be in its own prompt. Which task stands in depends on seed and index alone."""
    plain = sums(6)
    source = apply_prompt_options(plain, PLAIN, PromptOptions(examples=2))
    examples = set(draw_prompts(plain, 2))
    for seed in (0, 7):
        drawn, as_before = draw_prompts(source, 60, seed), draw_prompts(plain, 60, seed)
        assert set(drawn) == {f"{n} + 1?" for n in range(6)} - examples
        assert all(now == before for now, before in zip(drawn, as_before, strict=True) if before not in examples)
        assert drawn == draw_prompts(apply_prompt_options(plain, PLAIN, PromptOptions(examples=2)), 60, seed)


def test_a_source_that_takes_its_tasks_in_a_circle_has_another_one_too() -> None:
    class Circle(RowSource):
        def train(self, seed: int, index: int, level: str) -> Task:
            return super().train(0, index % 5, level)

    circle = Circle("own", [Task(f"{n}", f"{n}?", {"answer": "1"}) for n in range(5)], [], "exact_match", "answer")
    source = apply_prompt_options(circle, PLAIN, PromptOptions(examples=3))
    assert set(draw_prompts(source, 10)) == {circle.train(0, index, "").prompt for index in (3, 4)}


def test_levels_take_turns_and_each_keeps_a_task_to_train_on() -> None:
    tasks = [Task(f"{level}{n}", f"{level}{n}?", {"answer": "1"}, level) for level in "ab" for n in range(3)]
    tasks += [Task("c0", "c0?", {"answer": "1"}, "c")]
    plain = RowSource("own", tasks, [], "exact_match", "answer")
    source: Any = apply_prompt_options(plain, PLAIN, PromptOptions(examples=4))
    assert [str(example.prompt)[0] for example in source.writer.examples] == ["a", "b", "a", "b"]
    assert len(set(draw_prompts(source, 6))) == 3
    with pytest.raises(ValueError, match=r"prompt\.examples=5: .* 4 training tasks to spare"):
        apply_prompt_options(plain, PLAIN, PromptOptions(examples=5))


def test_an_example_of_the_users_own_is_neither_trained_on_nor_evaluated() -> None:
    source = apply_prompt_options(sums(3), PLAIN, PromptOptions(examples=[GIVEN]))
    assert set(draw_prompts(source, 10)) == {"0 + 1?", "2 + 1?"}
    for tokenizer in (PLAIN, CHAT):
        source = apply_prompt_options(sums(3), tokenizer, PromptOptions(examples=[PromptExample("9 + 1?", " 10")]))
        with pytest.raises(ValueError, match=r"prompt\.examples: an example is the held-out task 'held'"):
            source.heldout(None)


# --- where they stand -----------------------------------------------------------------------------------------------


def test_in_text_they_stand_before_the_prompt_after_blank_lines(tmp_path: Path) -> None:
    plain = resolve_environment("gsm8k", path=str(write_rows(tmp_path)))
    example = first(plain)
    source = apply_prompt_options(plain, CHAT, PromptOptions("off", examples=1))
    (task,) = source.heldout(1)
    assert example.prompt.startswith("Question: Ann has") and example.prompt.endswith("?\nAnswer:")
    assert read_text(source, CHAT, task) == f"{example.prompt} {example.meta['answer']}\n\n{task.prompt}"


def test_in_a_chat_they_are_turns_after_the_system_message() -> None:
    options = PromptOptions(system="Be brief.", examples=[GIVEN, PromptExample("1 + 2?", "3")])
    assert read_text(apply_prompt_options(rows(), CHAT, options), CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n 2<|im_end|>\n"
        "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_conversations_keep_their_own_system_message_first_and_lend_none(tmp_path: Path) -> None:
    """Also with `prompt.chat=off`, which is for text prompts."""
    talks = [
        [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n} and {n}"}] for n in range(3)
    ]  # fmt: skip
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"prompt": talk, "answer": "x"}) + "\n" for talk in talks))
    plain = resolve_environment("jsonl", path=str(file), heldout_fraction=0, demonstration_field="answer")
    before, prompt = (plain.train(0, index, "").prompt[1]["content"] for index in (0, 1))
    for chat in ("auto", "off"):
        source = apply_prompt_options(plain, CHAT, PromptOptions(chat, examples=1))
        assert source.train(0, 1, "").shown_prompt == [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": before},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": prompt},
        ]


def test_verifiers_get_the_task_s_own_prompt_and_rollouts_keep_what_the_model_read() -> None:
    t = play(apply_prompt_options(rows(), PLAIN, PromptOptions(examples=[GIVEN])), PLAIN, "4")
    assert Case.of(t).prompt == "2 + 2?"
    row = json.loads(trajectory_row(t))
    assert (row["prompt"], row["rendered_prompt"]) == ("2 + 2?", "1 + 1? 2\n\n2 + 2?")
    assert row["prompt_tokens"] == PLAIN.encode("1 + 1? 2\n\n2 + 2?", add_special_tokens=False)


def test_demonstrations_are_imitated_after_the_examples() -> None:
    source = apply_prompt_options(rows(), PLAIN, PromptOptions(examples=[GIVEN]))
    client: Any = Recorder(PLAIN)
    sft_step(client, source, Curriculum(source, CurriculumOptions(), 0), SftOptions(steps=1, batch_size=1), 0, 0)
    assert PLAIN.decode(client.data[0].model_input.tokens) == "1 + 1? 2\n\n2 + 2? 4"


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT])
@pytest.mark.parametrize("few_shot", [None, 0, 1])
def test_problems_are_shown_as_the_model_is_asked_for_them(
    tokenizer: Any, few_shot: int | None, tmp_path: Path
) -> None:
    """With the program in the form of the completion; the worked examples of `few_shot` stay once, after them."""
    plain = resolve_environment("mbpp", path=str(mbpp_file(tmp_path)), few_shot=few_shot)
    alone = resolve_environment("mbpp", path=str(tmp_path / "mbpp.jsonl"), few_shot=0)
    source = apply_prompt_options(plain, tokenizer, PromptOptions(examples=1))
    (task,) = source.heldout(1)
    (without,) = apply_prompt_options(plain, tokenizer, PromptOptions()).heldout(1)
    text, without_text = read_text(source, tokenizer, task), read_text(source, tokenizer, without)
    example = apply_prompt_options(alone, tokenizer, PromptOptions()).train(0, 0, "3")
    asked, solved = read_text(source, tokenizer, example), source.demonstration(example, 0)
    if tokenizer is CHAT:
        assert "```python\ndef add_" in solved and text == f"{asked}{solved}<|im_end|>\n{without_text}"
    else:
        assert solved.endswith("\n[DONE]") and text == f"{asked}{solved}\n\n{without_text}"


@pytest.mark.parametrize("history", ["append", "rewrite"])
def test_every_attempt_of_a_refinement_reads_the_examples(history: str, tmp_path: Path) -> None:
    kwargs = {"path": str(write_rows(tmp_path))}
    source = resolve_environment("refine", inner="gsm8k", inner_kwargs=kwargs, history=history, feedback="No.")
    shown = apply_prompt_options(source, PLAIN, PromptOptions(examples=1))
    example = first(source)
    before = f"{example.prompt} {example.meta['answer']}\n\n"
    t = play(shown, PLAIN, "#### 1", "#### 2")
    if history == "append":
        assert t.rendered_prompt == before + first(shown).prompt and t.response == "#### 1<|im_end|>\nNo.\n#### 2"
    else:
        assert (t.rendered_prompt, t.response) == (before + "No.", "#### 2")


def test_the_words_of_a_small_vocabulary_keep_apart() -> None:
    plain = resolve_environment("rpn_arithmetic", complexity=[1, 1], flaw=0.0)
    assert plain.vocabulary is not None
    tokenizer = build_tokenizer("words", plain.vocabulary, end="<end>", pad="<pad>")
    source = apply_prompt_options(plain, tokenizer, PromptOptions(examples=1))
    example, task = first(plain), source.train(0, 1, "1")
    solved = plain.demonstration(example, 0)
    assert read_text(source, tokenizer, task).split() == f"{example.prompt} {solved} {task.prompt}".split()


# --- the config -----------------------------------------------------------------------------------------------------


def test_examples_come_from_a_config_and_go_to_the_stored_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "prompt: {examples: [{prompt: '1 + 1?', completion: ' 2'}]}\nenv: {name: gsm8k}\n"
    )
    loaded = load(None, str(tmp_path / "mine.yaml"), ["client=mock", "rollout.max_tokens=4"])
    config = build_config(loaded)
    assert config.prompt == PromptOptions(examples=[GIVEN])
    stored = resolved_values(config, loaded)
    assert stored["prompt"]["examples"] == [{"prompt": "1 + 1?", "completion": " 2"}]
    (tmp_path / "stored.yaml").write_text(dump(stored))
    assert build_config(load(None, str(tmp_path / "stored.yaml"), [])) == config
    assert build_config(load("gsm8k", None, ["prompt.examples=3"])).prompt == PromptOptions(examples=3)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("prompt.examples=-1", r"prompt\.examples=-1, expected a number from 0"),
        ("prompt.examples=[{prompt: a, completion: ' '}]", r"prompt\.examples: 'a' with ' '; neither may be empty"),
        ("prompt.examples=[{prompt: a, answer: b}]", r"unknown key prompt\.examples\[0\]\.answer"),
        ("prompt.examples=[{prompt: a}]", r"prompt\.examples\[0\]\.completion: has to be given"),
        ("prompt.examples=true", r"prompt\.examples: true .* expected an integer or a list"),
    ],
)
def test_examples_that_are_none_are_refused(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_config(load("gsm8k", None, [word]))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_source_without_demonstrations_has_no_examples_to_give(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "c"}\n' * 2)
    rows = {"path": str(tmp_path / "rows.jsonl"), "answer_field": None, "heldout_fraction": 0}
    for name, kwargs in (("dataset", rows), ("toy", {})):
        with pytest.raises(ValueError, match=r"^prompt\.examples: .*no demonstrations; give a list"):
            apply_prompt_options(resolve_environment(name, **kwargs), PLAIN, PromptOptions(examples=1))


@pytest.mark.parametrize("kind", [OwnWords, Grouped])
@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT])
def test_an_environment_that_writes_its_own_prompts_refuses_examples(kind: Any, tokenizer: Any) -> None:
    source = kind("own", [Task("t", "2 + 2?")], [], "exact_match")
    with pytest.raises(ValueError, match=r"^prompt\.examples has no effect: the episodes"):
        apply_prompt_options(source, tokenizer, PromptOptions(examples=[GIVEN]))


@pytest.mark.parametrize(
    ("template", "completion", "said"),
    [
        (
            "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0]['content'] }}",
            "2",
            r"takes no earlier turns \(one turn only\)",
        ),
        ("{{ messages[-1]['content'] }}", "2", r"does not write the completion '2' as it is"),
        (
            "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}{% endfor %}",
            "<think>one</think>2",
            r"does not write the completion '<think>one</think>2' as it is",
        ),
    ],
)
def test_a_template_without_room_for_examples_is_refused(template: str, completion: str, said: str) -> None:
    options = PromptOptions(examples=[PromptExample("1 + 1?", completion)])
    with pytest.raises(ValueError, match=rf"^prompt\.examples: .*{said}.*leave them out"):
        apply_prompt_options(rows(), with_template(template), options)


def test_text_after_an_example_of_messages_is_refused() -> None:
    example = PromptExample([{"role": "user", "content": "1 + 1?"}], "2")
    with pytest.raises(ValueError, match=r"prompt\.examples: this prompt is text, and an example is chat messages"):
        apply_prompt_options(rows(), PLAIN, PromptOptions(examples=[example]))
