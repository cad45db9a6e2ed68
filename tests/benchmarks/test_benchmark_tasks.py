"""The test sets `math500` and `humaneval`, and GSM8K's test file alone: what the model reads, and that gold passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.core.types import Trajectory
from rlvr.envs import resolve_environment
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.reward import resolve_reward
from tests.kit.benchmark_rows import PROBLEMS, function, write
from tests.kit.code_rows import chat_tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"
HUMANEVAL = DATA / "humaneval"


def test_math500_asks_for_a_box(tmp_path: Path) -> None:
    source = resolve_environment("math500", path=write(tmp_path / "math500.jsonl", PROBLEMS))
    tasks = source.heldout(None)
    assert len(tasks) == 6 and source.levels == () and source.reward == "math"
    first = next(task for task in tasks if task.id == "math500-1")
    assert first.prompt == "What is half of 0?\n\nReason step by step and put the final answer in \\boxed{}."
    assert (first.level, first.meta) == ("1", {"answer": "0", "subject": "Algebra"})
    assert source.describe_task(first) == {"subject": "Algebra"}


def test_humaneval_is_a_head_to_complete_or_a_chat(tmp_path: Path) -> None:
    rows = [function("add_two", "2"), function("add_three", "3")]
    for path in (write(tmp_path / "HumanEval.jsonl.gz", rows), str(tmp_path)):
        source = resolve_environment("humaneval", path=path)
        tasks = {task.id: task for task in source.heldout(None)}
        assert set(tasks) == {"Test/2", "Test/3"} and tasks["Test/2"].prompt == rows[0]["prompt"]
    shown = apply_prompt_options(source, chat_tokenizer(), PromptOptions(chat="on")).heldout(None)
    asked = {task.id: task.model_prompt for task in shown}["Test/3"]
    assert isinstance(asked, list) and asked[0]["content"].startswith("Complete this Python function:")
    assert "def add_three" in asked[0]["content"]


def test_the_test_file_of_gsm8k_alone_is_a_test_set(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    source = resolve_environment("gsm8k", path=write(tmp_path / "test.jsonl", rows))
    assert len(source.heldout(None)) == 4 and source.levels == ()


def test_a_test_set_is_not_trained_on(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "math500.jsonl", PROBLEMS)
    (tmp_path / "mine.yaml").write_text(
        "env: {name: math500, kwargs: {path: math500.jsonl}}\nmodel: {name: some/model}\nevaluation: {tasks: 2}\n"
    )
    for word in ("training.steps=2", "training.epochs=1"):
        assert run(["train", "--config=mine.yaml", word]) == 2
        assert "rlvr evaluate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("math500", [{"question": "?", "answer": "1"}], "'problem' is missing; the row has 'question', 'answer'"),
        ("math500", [{"problem": "?", "answer": "1"}], "'level' is missing"),
        ("humaneval", [{"tests": ["assert f() == 1"], "statement": "Return 1."}], "no head of a function"),
        ("humaneval", [{"question": "?", "answer": "1"}], "expected MBPP's"),
        ("gsm8k", [{"problem": "?", "answer": "1"}], "'question' is missing"),
    ],
)
def test_rows_of_another_form_are_refused(tmp_path: Path, name: str, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve_environment(name, path=write(tmp_path / "rows.jsonl", rows))


def test_a_torn_gzip_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    write(path, [function("add_two", "2")] * 50)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="whole gzip file"):
        resolve_environment("humaneval", path=str(path))
    path.write_bytes(b"no gzip at all")
    with pytest.raises(ValueError, match="cannot be read"):
        resolve_environment("humaneval", path=str(path))


def judge_humaneval(source: Any, write_completion: Any) -> list[bool]:
    """Whether the strict and the lenient reward pass a completion of each task; they must agree."""
    played = []
    for task in source.heldout(None):
        body = task.meta["solution"].removeprefix(task.meta["prefix"])
        played.append(Trajectory(task.prompt, [1], write_completion(task, body), [], task=task))
    verdicts = [
        [score.outcome.value == "passed" for score in resolve_reward(name).score(played)]
        for name in ("code_strict", "code")
    ]
    assert verdicts[0] == verdicts[1]
    return verdicts[0]


def test_a_completed_head_passes_and_its_mutant_fails(tmp_path: Path) -> None:
    rows = [function("add_two", "2"), function("add_three", "3")]
    source = resolve_environment("humaneval", path=write(tmp_path / "HumanEval.jsonl", rows))
    assert judge_humaneval(source, lambda task, body: body) == [True, True]
    assert judge_humaneval(source, lambda task, body: body.replace("+", "-")) == [False, False]


@pytest.mark.slow
@pytest.mark.skipif(not HUMANEVAL.is_dir(), reason="HumanEval's file is not beside the project")
def test_every_canonical_solution_of_humaneval_passes_and_every_mutant_fails() -> None:
    """As a continuation and in a code block; the mutants return nothing, or have the body of another task."""
    source = resolve_environment("humaneval", path=str(HUMANEVAL))
    assert len(source.heldout(None)) == 164
    assert all(judge_humaneval(source, lambda task, body: body))
    assert not any(judge_humaneval(source, lambda task, body: "    return None\n"))
    tasks = source.heldout(None)
    others = {task.id: other.meta for task, other in zip(tasks, [*tasks[1:], tasks[0]], strict=True)}
    bodies = {id: meta["solution"].removeprefix(meta["prefix"]) for id, meta in others.items()}
    assert not any(judge_humaneval(source, lambda task, body: bodies[task.id]))
    shown = apply_prompt_options(source, chat_tokenizer(), PromptOptions(chat="on"))
    assert all(judge_humaneval(shown, lambda task, body: f"```python\n{task.meta['solution']}\n```"))


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside the project")
def test_the_published_rows_pass_with_their_own_answers() -> None:
    math = resolve_environment("math500", path=str(DATA / "math" / "math500_test.jsonl"))
    played = [Trajectory("", [1], f"so \\boxed{{{t.meta['answer']}}}", [], task=t) for t in math.heldout(None)]
    for reward in (resolve_reward("math", extract="boxed"), resolve_reward("math_flexible")):
        assert [score.value for score in reward.score(played)] == [1.0] * 500
    assert [t.level for t in math.heldout(None)].count("5") == 134
    gsm8k = resolve_environment("gsm8k", path=str(DATA / "gsm8k" / "test.jsonl"))
    played = [Trajectory("", [1], t.meta["answer"], [], task=t) for t in gsm8k.heldout(None)]
    for name in ("gsm8k_strict", "gsm8k_flexible"):
        assert [score.value for score in resolve_reward(name).score(played)] == [1.0] * 1319
