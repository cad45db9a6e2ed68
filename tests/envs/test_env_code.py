"""Programming problems as tasks: MBPP's splits and prompt, what is shown and what is hidden, rows of other forms."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Task, Trajectory
from rlvr.envs import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.reward.code import extract
from rlvr.rollout import open_groups
from tests.kit.code_rows import REAL, chat_tokenizer, mbpp_file, problem


def mbpp(folder: Path, **options: Any) -> Any:
    return resolve_environment("mbpp", path=str(mbpp_file(folder)), **options)


def all_of(source: Any) -> list[Task]:
    return [source.train(0, i, level) for level in source.levels for i in range(source.size(level))]


def numbers(tasks: list[Task]) -> set[int]:
    return {int(task.id.rpartition("-")[2]) for task in tasks}


def test_the_splits_are_the_published_ones_by_task_id(tmp_path: Path) -> None:
    source = mbpp(tmp_path)
    assert numbers(all_of(source)) == set(range(601, 621)) and numbers(source.heldout(None)) == set(range(11, 31))
    assert numbers(mbpp(tmp_path, split="validation").heldout(None)) == set(range(511, 515))
    assert numbers(all_of(mbpp(tmp_path, num_train_problems=5))) == set(range(601, 606))
    assert (source.reward, source.levels) == ("code", ("3",))
    assert source.describe_task(source.heldout(1)[0]) == {"tests": "3", "answer": "function"}


def test_the_prompt_is_the_published_one_after_three_solved_examples(tmp_path: Path) -> None:
    """Ids 2, 3 and 4, in the convention of Austin et al.; of each problem's three tests the first is shown."""

    def part(n: int) -> str:
        name = f"add_{n}"
        return (
            "You are an expert Python programmer, and here is your task: Write a function to add "
            f"{n} to a number. Your code should pass these tests:\n\nassert {name}(1) == {1 + n}\n[BEGIN]\n"
        )

    def solved_example(n: int) -> str:
        return f"{part(n)}def add_{n}(x):\n    return x + {n}\n[DONE]\n\n"

    first = next(task for task in mbpp(tmp_path).heldout(None) if task.id == "mbpp-11")
    assert first.prompt == solved_example(2) + solved_example(3) + solved_example(4) + part(11)
    alone = next(task for task in mbpp(tmp_path, few_shot=0).heldout(None) if task.id == "mbpp-11")
    assert alone.prompt == part(11)


@pytest.mark.parametrize(("asked", "shown"), [(1, 1), (2, 2), ("all", 3), (9, 3)])
def test_hidden_tests_are_in_the_reward_and_not_in_the_prompt(tmp_path: Path, asked: Any, shown: int) -> None:
    task = mbpp(tmp_path, visible_tests=asked, few_shot=0).heldout(1)[0]
    tests = task.meta["tests"]
    assert [test in task.prompt for test in tests] == [True] * shown + [False] * (3 - shown)
    name = tests[0].split("(")[0].removeprefix("assert ")
    value = tests[0].rpartition("== ")[2]
    hard_coded = f"def {name}(x):\n    return {value}"  # the test that is shown, learnt by heart
    (score,) = resolve_reward("code").score([Trajectory("", [], hard_coded, [], task=task)])
    assert score.parts["num_tests"] == 3 and score.value == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("chat", [False, True])
def test_a_demonstration_is_the_reference_as_the_prompt_asks_for_it_and_earns_the_whole_reward(
    tmp_path: Path, chat: bool
) -> None:
    source = mbpp(tmp_path, chat=chat)
    task = all_of(source)[0]
    text = source.demonstration(task, 0)
    assert text.endswith("\n```" if chat else "\n[DONE]") and "\r" not in text
    assert extract(text).code == task.meta["solution"]
    assert resolve_reward("code")("", text, task.meta) == 1.0


def test_a_chat_shows_the_problem_in_one_message_and_examples_as_turns(tmp_path: Path) -> None:
    (message,) = mbpp(tmp_path, chat=True).heldout(1)[0].prompt
    assert message["role"] == "user" and message["content"].endswith("in one Python code block.")
    assert message["content"].count("assert add_") == 1 and "[BEGIN]" not in message["content"]
    turns = mbpp(tmp_path, chat=True, few_shot=2).heldout(1)[0].prompt
    assert [m["role"] for m in turns] == ["user", "assistant", "user", "assistant", "user"]
    assert turns[1]["content"] == "```python\ndef add_2(x):\n    return x + 2\n```"


def test_an_answer_ends_at_done_or_the_end_of_the_sequence(tmp_path: Path) -> None:
    import asyncio

    tokenizer = chat_tokenizer()
    for chat, stop in ((False, ["[DONE]", tokenizer.eos_token_id]), (True, None)):
        source = mbpp(tmp_path, chat=chat)
        (group,) = open_groups(source, source.heldout(1), 1, tokenizer, "g")
        assert asyncio.run(group.envs[0].initial_observation())[1] == stop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"visible_tests": 0}, "visible_tests=0, expected at least 1 or all"),
        ({"visible_tests": "some"}, "expected at least 1 or all"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"subset": "small"}, "expected full or sanitized"),
        ({"split": "train"}, "expected test"),
        ({"few_shot": 11}, "expected 0 to 10"),
        ({"few_shot": 4}, r"few_shot=4, but .* has 3 of the tasks 1 to 10"),
        ({"num_train_problems": 21}, "expected 1 to 20"),
        ({"num_train_problem": 2}, "did you mean 'num_train_problems'"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mbpp(tmp_path, **options)


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mbpp_file(tmp_path, range(601, 603))
    with pytest.raises(ValueError, match=r"no task of the split test \(task_id 11 to 510\).*env.name=code"):
        resolve_environment("mbpp", path=str(path))
    path.write_text(json.dumps({**problem(3), "task_id": "HumanEval/3"}) + "\n")
    with pytest.raises(ValueError, match=r"task_id='HumanEval/3', expected 1 to 974.*env.name=code"):
        resolve_environment("mbpp", path=str(path))
    path.write_text(json.dumps({"task_id": 3, "text": "q"}) + "\n")
    with pytest.raises(ValueError, match=r"mbpp.jsonl:1: a row with the fields task_id, text; expected"):
        resolve_environment("mbpp", path=str(path))
    path.write_text((json.dumps(problem(3)) + "\n") * 2)
    with pytest.raises(ValueError, match=r"mbpp.jsonl:2: task_id=3 is also at .*mbpp.jsonl:1; keep one"):
        resolve_environment("mbpp", path=str(path))
    path.write_text("[1]")
    with pytest.raises(ValueError, match="row 1: a JSON int, expected an object"):
        resolve_environment("mbpp", path=str(path))
    path.write_text(json.dumps({**problem(3), "test_list": ["assert is_ok(add_3(3))"]}) + "\n")
    with pytest.raises(ValueError, match=r"mbpp.jsonl: task_id=3: tests\[0\]: .*'is_ok'"):
        resolve_environment("mbpp", path=str(path))
    with pytest.raises(ValueError, match=r"sanitized-mbpp\.json does not exist"):
        resolve_environment("mbpp", path=str(tmp_path), subset="sanitized")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'rlvr\[data\]', or set env.kwargs.path=<file, or folder"):
        resolve_environment("mbpp")


@pytest.mark.skipif(not REAL.is_dir(), reason="the MBPP files are not beside the project")
def test_mbpp_on_the_real_files() -> None:
    full = resolve_environment("mbpp", path=str(REAL))
    assert (full.size("3"), len(full.heldout(None)), full.levels) == (374, 500, ("3",))
    sanitized = resolve_environment("mbpp", path=str(REAL), subset="sanitized")
    assert sum(map(sanitized.size, sanitized.levels)) == 120 and len(sanitized.heldout(None)) == 257
    assert set(sanitized.levels) <= {"3", "4", "5", "6", "7"}


# --- rows of other forms -----------------------------------------------------------------------------------------

HUMANEVAL = [
    {
        "task_id": f"Own/{n}",
        "prompt": f'def plus_{n}(x):\n    """Add {n}."""\n',
        "entry_point": f"plus_{n}",
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {1 + n}",
    }
    for n in range(6)
]
STDIO = [
    {"statement": f"Add {n} to the number you read.", "tests": [{"input": "1\n", "output": f"{1 + n}\n"}]}
    for n in range(6)
]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    lines = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(lines, encoding="utf-8")
    return str(folder / name)


def test_humaneval_goes_on_from_its_prompt_and_shows_no_test(tmp_path: Path) -> None:
    source = resolve_environment("code", path=write(tmp_path, HUMANEVAL))
    task = all_of(source)[0]
    assert task.prompt == task.meta["prefix"] and "check" not in task.prompt
    assert source.describe_task(task) == {"tests": "1", "answer": "function body"}
    text = source.demonstration(task, 0)
    assert text.startswith("    return x + ") and resolve_reward("code")(task.prompt, text, task.meta) == 1.0
    chat = all_of(resolve_environment("code", path=write(tmp_path, HUMANEVAL), chat=True))[0]
    assert "Complete this Python function" in chat.prompt[0]["content"] and "check" not in chat.prompt[0]["content"]
    with pytest.raises(ValueError, match=r"max_turns=2, but .* have no visible test .*use max_turns=1"):
        resolve_environment("code", path=write(tmp_path, HUMANEVAL), max_turns=2)


def test_a_program_is_asked_for_with_an_example_of_its_input(tmp_path: Path) -> None:
    source = resolve_environment("code", path=write(tmp_path, STDIO), heldout_fraction=0.3)
    task = all_of(source)[0]
    assert "read this input and write this output:\n\nInput:\n1\nOutput:\n" in task.prompt
    assert len(source.heldout(None)) + source.size("1") == 6 and source.heldout(None)
    assert source.demonstration(task, 0) is None
    assert source.describe_task(task) == {"tests": "1", "answer": "program"}


def test_a_list_of_rows_and_a_held_out_file_are_read(tmp_path: Path) -> None:
    rows = [problem(n) for n in range(8)]
    listed, heldout = write(tmp_path, rows, "rows.json"), write(tmp_path, rows[:3], "held.jsonl")
    source = resolve_environment("code", path=listed, heldout_path=heldout)
    assert source.size("3") == 5 and {t.id for t in source.heldout(None)} == {
        f"heldout:held.jsonl:{n}" for n in (1, 2, 3)
    }
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the problem has no statement"):
        resolve_environment("code", path=write(tmp_path, [{"tests": ["assert f()"]}]))
    bad = {"statement": "Add.", "tests": ["assert f(1) == 2", "assert (f(2) == 3, 'wrong')"]}
    for options in ({}, {"heldout_path": listed}):
        with pytest.raises(
            ValueError, match=r"code: rows.jsonl:2: tests\[1\] passes for every answer.*leave these rows"
        ):
            resolve_environment("code", path=write(tmp_path, [rows[0], bad]), **options)
    with pytest.raises(ValueError, match=r"heldout_fraction=0.2 and heldout_path=.*; leave one of them out"):
        resolve_environment("code", path=listed, heldout_fraction=0.2, heldout_path=listed)
    with pytest.raises(ValueError, match="heldout_fraction=2"):
        resolve_environment("code", path=listed, heldout_fraction=2)
