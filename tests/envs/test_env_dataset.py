"""The environment `dataset`: columns that are named or recognised, several sources, held-out rows, demonstrations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.envs import resolve_environment
from rlvr.envs.near_duplicates import find_near_duplicates
from rlvr.envs.registry import _environments
from rlvr.training.curriculum import Curriculum, CurriculumOptions

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
USER, ASSISTANT = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def open_rows(folder: Path, rows: list[Any], **options: Any) -> TaskSource:
    return resolve_environment("dataset", path=write(folder / "d.jsonl", rows), **{"heldout_fraction": 0, **options})


def list_tasks(source: TaskSource, seed: int = 0) -> list[Task]:
    """The tasks of the first epoch of every level."""
    assert source.size is not None
    return [source.train(seed, i, level) for level in source.levels for i in range(source.size(level))]


def test_jsonl_is_the_same_environment_by_its_older_name() -> None:
    assert _environments.get("jsonl") is _environments.get("dataset")


# --- columns --------------------------------------------------------------------------------------------------------

VERL = {
    "data_source": "gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"answer": "2 + 2 is 4", "index": 7},
}


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "data"),
    [
        ({"prompt": "2 + 2?", "answer": "4"}, "2 + 2?", "4", "prompt from 'prompt', answer from 'answer'"),
        ({"question": "2 + 2?", "answer": "4"}, "2 + 2?", "4", "prompt from 'question', answer from 'answer'"),
        ({"problem": "2 + 2?", "solution": "4"}, "2 + 2?", "4", "prompt from 'problem', answer from 'solution'"),
        (
            {"problem": "2 + 2?", "solution": "so 4", "answer": "4", "messages": [USER, ASSISTANT]},
            "2 + 2?",
            "4",
            "prompt from 'problem', answer from 'answer'",
        ),
        ({"prompt": [USER], "ground_truth": 4}, [USER], 4, "prompt from 'prompt', answer from 'ground_truth'"),
        (VERL, [USER], "4", "prompt from 'prompt', answer from 'reward_model.ground_truth'"),
        ({"prompt": "2 + 2?", "completion": "4"}, "2 + 2?", "4", "prompt from 'prompt', answer from 'completion'"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER], "4", "prompt from 'prompt', answer from 'completion'"),
        ({"messages": [USER, ASSISTANT]}, [USER], "4", "prompt from 'messages', answer from its last message"),
        ({"messages": [USER], "solution": "4"}, [USER], "4", "prompt from 'messages', answer from 'solution'"),
    ],
)
def test_the_columns_of_trl_and_verl_are_recognised(
    tmp_path: Path, row: dict[str, Any], prompt: Any, answer: Any, data: str
) -> None:
    source = open_rows(tmp_path, [row, row])
    task = source.train(0, 0, "")
    assert (task.prompt, task.meta["answer"]) == (prompt, answer)
    assert source.describe_data() == f"2 rows, {data}"
    column = data.split("'")[1]
    assert task.meta == {**{name: value for name, value in row.items() if name != column}, "answer": answer}


def test_a_named_column_is_taken_and_a_missing_one_is_an_error_even_where_a_usual_one_is_there(tmp_path: Path) -> None:
    rows = [{"prompt": "no", "answer": "no", "item": {"q": "2 + 2?", "a": "4"}}]
    task = open_rows(tmp_path, rows, prompt_field="item.q", answer_field="item.a").train(0, 0, "")
    assert (task.prompt, task.meta["answer"]) == ("2 + 2?", "4")
    for field, message in (
        (
            "item.qq",
            r"d\.jsonl, line 1: .*'item.qq' is missing \(did you mean 'item.q'\?\).*set env.kwargs.prompt_field",
        ),
        ("item", r"'item' has columns of its own.*set env.kwargs.prompt_field to one of item.q, item.a"),
    ):
        with pytest.raises(ValueError, match=message):
            open_rows(tmp_path, rows, prompt_field=field)


def test_nested_columns_without_a_usual_name_are_listed(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"line 1: the field 'prompt' is missing.*'item.q', 'item.a'; set env.kwargs.prompt_field"
    ):
        open_rows(tmp_path, [{"item": {"q": "2 + 2?", "a": "4"}}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [{"role": "user", "content": None}], "answer": "4"}, r"line 1: 'prompt' is .*\"content\": text"),
        ({"prompt": [{"role": 1, "content": "2 + 2?"}], "answer": "4"}, r"line 1: 'prompt' is .*\"role\": text"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "line 1: 'messages' is .*expected text or a list",
        ),
        (
            {"prompt": [USER], "completion": [{"role": "assistant", "content": None}]},
            "line 1: the last message of 'completion' has the content 'None', expected text; correct the row",
        ),
    ],
)
def test_a_message_without_text_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_rows(tmp_path, [row])


def test_a_later_row_without_the_recognised_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2: the field 'question' is missing"):
        open_rows(tmp_path, [{"question": "2 + 2?", "answer": "4"}, {"problem": "2 + 2?", "answer": "4"}])
    with pytest.raises(ValueError, match=r"line 2: 'messages' does not end with the assistant's message"):
        open_rows(tmp_path, [{"messages": [USER, ASSISTANT]}, {"messages": [USER]}])


def test_no_answer_is_needed_if_the_config_says_so(tmp_path: Path) -> None:
    source = open_rows(tmp_path, [{"question": "2 + 2?"}], answer_field=None)
    assert source.describe_data() == "1 rows, prompt from 'question', no answer"
    assert "answer" not in source.train(0, 0, "").meta


# --- several sources ------------------------------------------------------------------------------------------------


def mixed(folder: Path, *weights: float, **options: Any) -> TaskSource:
    """A source of four rows, then one of ten rows, with these weights."""
    sources = [
        {
            "path": write(
                folder / name / "d.jsonl", [{"prompt": f"{name}{i}", "answer": i, "l": i % 2} for i in range(n)]
            )
        }
        for name, n in (("a", 4), ("b", 10))
    ]
    given = [{**source, "weight": weight} for source, weight in zip(sources, weights, strict=True)]
    return resolve_environment("dataset", sources=given, heldout_fraction=0, **options)


def test_a_weight_is_how_often_an_epoch_has_a_row(tmp_path: Path) -> None:
    source = mixed(tmp_path, 2, 0.5)
    assert source.size and source.size("") == 4 * 2 + 10 // 2
    epochs = [[source.train(7, 13 * epoch + i, "").prompt for i in range(13)] for epoch in range(4)]
    for epoch in epochs:
        counts = Counter(epoch)
        assert {counts[f"a{i}"] for i in range(4)} == {2} and sum(counts[f"b{i}"] for i in range(10)) == 5
    for two in (epochs[:2], epochs[2:]):  # every second epoch
        assert all(Counter(two[0] + two[1])[f"b{i}"] == 1 for i in range(10))
    assert epochs[0] != epochs[2] and set(epochs[0]) == set(epochs[2])
    assert [mixed(tmp_path, 2, 0.5).train(7, i, "").prompt for i in range(13)] == epochs[0]
    assert source.describe_data() == (
        f"{tmp_path}/a/d.jsonl: 4 rows, prompt from 'prompt', answer from 'answer', weight 2; "
        f"{tmp_path}/b/d.jsonl: 10 rows, prompt from 'prompt', answer from 'answer', weight 0.5"
    )


def test_equal_weights_are_the_rows_of_one_file(tmp_path: Path) -> None:
    """The order of an epoch depends on the number of rows alone, so a run on one file is what it always was."""
    two = [task.prompt for task in list_tasks(mixed(tmp_path, 1, 1))]
    rows = [{"prompt": f"{name}{i}", "answer": i} for name, n in (("a", 4), ("b", 10)) for i in range(n)]
    assert [task.prompt for task in list_tasks(open_rows(tmp_path, rows))] == two


def test_weights_keep_levels_and_a_resumed_curriculum_draws_the_same_tasks(tmp_path: Path) -> None:
    source = mixed(tmp_path, 3, 1, level_field="l")
    assert source.levels == ("0", "1") and source.size and (source.size("0"), source.size("1")) == (11, 11)
    ids = [task.id for task in list_tasks(source)]
    assert len(set(ids)) == 14 and {id.partition("/")[0] for id in ids} == {"1", "2"}
    curriculum = Curriculum(source, CurriculumOptions("pass_rate"), seed=3)
    steps = [curriculum.tasks(5, step) for step in range(8)]
    resumed = Curriculum(mixed(tmp_path, 3, 1, level_field="l"), CurriculumOptions("pass_rate"), seed=3)
    state = Curriculum(source, CurriculumOptions("pass_rate"), seed=3)
    for step in range(4):
        state.tasks(5, step)
    resumed.restore(state.state())
    assert [resumed.tasks(5, step) for step in range(4, 8)] == steps[4:]


def test_tasks_that_are_left_out_are_gone_from_epochs_and_from_evaluation(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "answer": i, "level": i % 3} for i in range(30)]
    source = open_rows(tmp_path, rows, level_field="level", heldout_fraction=0.3)
    gone = {task.id for task in (*list_tasks(source), *source.heldout(None)) if task.meta["answer"] % 3 == 0}
    gone.add(source.heldout(1)[0].id)
    kept = {task.id for task in (*list_tasks(source), *source.heldout(None))} - gone
    assert source.leave_out is not None
    source.leave_out(gone)
    assert source.levels == ("1", "2") and source.heldout(None)
    assert {task.id for task in (*list_tasks(source), *source.heldout(None))} == kept


def test_max_rows_is_stated_and_streaming_needs_it(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "answer": i} for i in range(9)]
    source = open_rows(tmp_path, rows, max_rows=5)
    assert source.describe_data().startswith("the first 5 rows, ") and source.size and source.size("") == 5
    with pytest.raises(ValueError, match=r"streaming=true needs max_rows.*give max_rows="):
        resolve_environment("dataset", name="a/b", streaming=True)


def test_held_out_rows_come_from_another_file_or_split(tmp_path: Path) -> None:
    for split, n in (("train", 6), ("test", 3)):
        write(tmp_path / "rows" / f"{split}.jsonl", [{"question": f"{split} {i}", "answer": i} for i in range(n)])
    for options in ({"heldout_split": "test"}, {"heldout_path": str(tmp_path / "rows" / "test.jsonl")}):
        source = resolve_environment("dataset", path=str(tmp_path / "rows"), **options)
        assert [task.prompt[:5] for task in list_tasks(source)] == ["train"] * 6
        assert sorted(task.id for task in source.heldout(None)) == [f"heldout:test.jsonl:{n}" for n in (1, 2, 3)]


def test_of_a_held_out_folder_the_test_split_is_read(tmp_path: Path) -> None:
    """Its training files would be trained on elsewhere; a folder whose names tell no split is read whole."""
    path = write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(4)])
    for split in ("train", "test", "dev"):
        write(tmp_path / "rows" / f"{split}.jsonl", [{"prompt": split, "answer": 1}])
    write(tmp_path / "plain" / "rows.jsonl", [{"prompt": "plain", "answer": 1}])
    for folder, split, prompt in (("rows", None, "test"), ("rows", "validation", "dev"), ("plain", None, "plain")):
        source = resolve_environment("dataset", path=path, heldout_path=str(tmp_path / folder), heldout_split=split)
        assert [task.prompt for task in source.heldout(None)] == [prompt]
    (tmp_path / "rows" / "test.jsonl").unlink()
    with pytest.raises(
        ValueError, match=r"has no split 'test'.*it has train, validation; set env.kwargs.split or heldout_split"
    ):
        resolve_environment("dataset", path=path, heldout_path=str(tmp_path / "rows"))


def test_a_prompt_is_held_out_as_text_and_as_one_message_of_the_user(tmp_path: Path) -> None:
    """Other keys of a message do not matter, other roles and messages do."""
    texts = [f"{i} + {i}?" for i in range(40)]
    chats = [[{"role": "user", "content": text, "name": "Eva"}] for text in texts]
    mixed = [{"prompt": prompt, "answer": 1} for prompt in (*texts, *chats)]
    source = open_rows(tmp_path, mixed, heldout_fraction=0.3)
    held = {task.prompt for task in source.heldout(None) if isinstance(task.prompt, str)}
    assert len(source.heldout(None)) == 2 * len(held) and 0 < len(held) < 40
    assert not held & {
        task.prompt if isinstance(task.prompt, str) else task.prompt[0]["content"] for task in list_tasks(source)
    }
    chat = [{"role": "system", "content": "Add."}, USER]
    test = write(tmp_path / "h.jsonl", [{"prompt": [{**message, "id": 7} for message in chat], "answer": 4}])
    rows = [{"prompt": prompt, "answer": 4} for prompt in (chat, chat[1:], [ASSISTANT], "2 + 2?")]
    path = write(tmp_path / "d.jsonl", rows)
    left = [task.id for task in list_tasks(resolve_environment("dataset", path=path, heldout_path=test))]
    assert sorted(left) == ["d.jsonl:2", "d.jsonl:3", "d.jsonl:4"]


def test_the_prompts_of_text_that_are_held_out_stay_the_same(tmp_path: Path) -> None:
    source = open_rows(tmp_path, [{"prompt": f"question {i}", "answer": i} for i in range(40)], heldout_fraction=0.1)
    assert sorted(task.meta["answer"] for task in source.heldout(None)) == [33, 35]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "path=None and name=None; give one of them"),
        ({"path": "d.jsonl", "name": "a/b"}, "path='d.jsonl' and name='a/b'; give one of them"),
        ({"name": "d.jsonl"}, "name='d.jsonl' is a file here, not a data set of the hub; give it as path"),
        ({"path": "d.jsonl", "config": "main"}, "config='main' is for a data set of the hub"),
        ({"path": "d.jsonl", "sources": [{"path": "e.jsonl"}]}, "sources cannot be combined with path or name"),
        ({"path": "d.jsonl", "max_rows": 0}, "max_rows=0, expected at least 1"),
        ({"path": "d.jsonl", "split": "test"}, "split='test' has no effect on the file d.jsonl"),
        ({"path": "d.jsonl", "heldout_split": "test"}, "split='test' has no effect on the file d.jsonl"),
        ({"path": "d.jsonl", "heldout_split": "train"}, "is the split that d.jsonl trains on"),
        (
            {"path": "d.jsonl", "heldout_split": "a", "heldout_path": "b"},
            "heldout_split='a' has no effect on heldout_path='b'",
        ),
        (
            {"path": "d.jsonl", "heldout_path": "b", "heldout_fraction": 0.1},
            "heldout_fraction=0.1 and heldout_path='b'",
        ),
        ({"path": "d.jsonl", "heldout_split": "a", "heldout_fraction": 0}, "heldout_fraction=0 and heldout_split='a'"),
        ({"path": "d.jsonl", "heldout_fraction": -0.1}, "heldout_fraction=-0.1, expected from 0 to 1"),
        ({"path": "d.jsonl", "heldout_fraction": "0.1"}, "heldout_fraction='0.1', expected from 0 to 1"),
        ({"path": "d.jsonl", "streaming": True, "max_rows": 3}, "streaming=true is for a data set of the hub"),
        ({"sources": []}, "sources is an empty list"),
        ({"sources": [{"file": "d.jsonl"}]}, "sources: unknown key 'file'.*a source has path, name"),
        ({"sources": [{"path": "d.jsonl", "weight": 0}]}, "weight=0, expected a number from 0.01"),
    ],
)
def test_a_mistake_in_the_options_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(4)])
    with pytest.raises(ValueError, match=message):
        resolve_environment("dataset", **options)


# --- demonstrations -------------------------------------------------------------------------------------------------


def test_the_answer_is_the_demonstration_if_it_is_text(tmp_path: Path) -> None:
    source = open_rows(tmp_path, [{"prompt": "2 + 2 =", "answer": 4}, {"prompt": "Capital?\n", "answer": "Rome"}])
    shown = {source.demonstration(task, 0) for task in list_tasks(source)}
    assert shown == {" 4", "Rome"}  # a space, unless the prompt ends in white space
    chat = open_rows(tmp_path, [{"messages": [USER, ASSISTANT]}])
    assert chat.demonstration(chat.train(0, 0, ""), 0) == "4"
    listed = open_rows(tmp_path, [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "primes?", "answer": [2, 3]}])
    assert {listed.demonstration(task, 0) for task in list_tasks(listed)} == {None}
    nested = open_rows(
        tmp_path, [{"prompt": "2 + 2 =", "answer": [4], "how": {"steps": "It is 4."}}], demonstration_field="how.steps"
    )
    assert nested.demonstration(nested.train(0, 0, ""), 0) == "It is 4."


def test_fine_tuning_without_demonstrations_is_refused_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d.jsonl", [{"prompt": f"{i}?", "answer": [i], "text": str(i)} for i in range(20)])
    words = ["config", "--config-name=dataset", "env.kwargs.path=d.jsonl", "sft.steps=5"]
    assert run(words) == 2
    assert "sft.steps=5" in (said := capsys.readouterr().err) and "env.kwargs.demonstration_field" in said
    assert run([*words, "env.kwargs.demonstration_field=text"]) == 0


# --- near duplicates ------------------------------------------------------------------------------------------------

LONG = "Ann has {} red pens and buys {} more at the shop near her school. How many pens does she have now?"


def test_a_run_warns_of_near_duplicates_with_their_number_and_an_example(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": LONG.format(i, i + 1), "answer": 0} for i in range(4)])
    test = write(tmp_path / "test.jsonl", [{"prompt": LONG.format(i, i + 1) + "!", "answer": 0} for i in range(2, 9)])
    source = resolve_environment("dataset", path=train, heldout_path=test)
    (text,) = source.advice()
    assert text.startswith("2 of 7 held-out prompts nearly repeat a training prompt: 'heldout:test.jsonl:")
    assert open_rows(tmp_path, [{"prompt": "a", "answer": 1}]).advice() == []


@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside the project")
def test_gsm8k_and_mbpp_by_their_own_files() -> None:
    """GSM8K's two splits share no question; its columns are recognised."""
    folder = DATA / "gsm8k"
    source = resolve_environment("dataset", path=str(folder / "train.jsonl"), heldout_path=str(folder / "test.jsonl"))
    assert source.describe_data() == "7,473 rows, prompt from 'question', answer from 'answer'"
    assert source.size and source.size("") == 7473 and len(source.heldout(None)) == 1319
    near = find_near_duplicates(source.heldout(None), list_tasks(source))
    assert near == [] and source.demonstration(source.train(0, 0, ""), 0)
    code = resolve_environment(
        "dataset", path=str(DATA / "mbpp" / "sanitized-mbpp.json"), answer_field="code", heldout_fraction=0.2
    )
    assert code.describe_data() == "427 rows, prompt from 'prompt', answer from 'code'"


def test_a_function_makes_the_prompt_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"first": n, "second": 2, "answer": str(n + 2)}) + "\n" for n in range(20)))
    source = resolve_environment("dataset", path=str(path), prompt_field="environments_of_tests:ask")
    tasks = source.heldout(None) + [source.train(0, index, "") for index in range(source.size(""))]
    assert sorted(str(task.prompt) for task in tasks) == sorted(f"{n} + 2 =" for n in range(20))
    assert all(task.meta["first"] + 2 == int(task.meta["answer"]) for task in tasks), "the row is a copy"
    path.write_text(json.dumps({"second": 2, "answer": "4"}) + "\n")
    with pytest.raises(ValueError, match=r"sums.jsonl.*environments_of_tests:ask failed: KeyError: 'first'"):
        resolve_environment("dataset", path=str(path), prompt_field="environments_of_tests:ask")
