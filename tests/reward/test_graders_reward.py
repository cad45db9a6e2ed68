"""The reward `grader`: a file in the OpenAI graders' schema grades answers of `rlvr verify` and of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.core.types import Task, Trajectory
from rlvr.reward import resolve_reward
from tests.kit.text_endpoint import unused_port

CHECK = {
    "type": "string_check",
    "name": "c",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.gold }}",
    "operation": "eq",
}


def test_rows_of_a_file_are_graded_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grader.json").write_text(json.dumps(CHECK))
    rows = [{"response": "7", "gold": "7"}, {"response": "8", "gold": "7"}, {"response": "8"}]
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--reward", "grader", "--reward-option", "config=grader.json", "--out", "v.jsonl"]
    assert run(["verify", "answers.jsonl", *options]) == 1
    found = [json.loads(line) for line in Path("v.jsonl").read_text().splitlines()]
    assert [(row["outcome"], row["reason"]) for row in found] == [
        ("passed", ""), ("failed", "not_equal"), ("invalid", "missing_field"),
    ]  # fmt: skip


def test_a_file_that_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("answers.jsonl").write_text(json.dumps({"response": "7", "gold": "7"}) + "\n")
    outcomes: list[str] = []
    for operation in ("eq", "ne"):
        Path("grader.json").write_text(json.dumps({**CHECK, "operation": operation}))
        options = ["--reward", "grader", "--reward-option", "config=grader.json", "--out", f"{operation}.jsonl"]
        assert run(["verify", "answers.jsonl", *options]) == 0
        outcomes.append(json.loads(Path(f"{operation}.jsonl").read_text())["outcome"])
    assert outcomes == ["passed", "failed"]


def test_the_item_is_the_tasks_meta_and_prompt() -> None:
    config = {**CHECK, "reference": "{{ item.prompt }} {{ item.gold }}"}
    reward = resolve_reward("grader", config=config)
    task = Task("t", "say", {"gold": "7"})
    made = [Trajectory("say", [1], text, [2], task=task) for text in ("say 7", "7")]
    assert [score.value for score in reward.score(made)] == [1.0, 0.0]
    assert reward("say", "say 7", {"gold": "7"}) == 1.0


def test_inside_a_composite_it_is_a_part() -> None:
    parts = [
        {"name": "grader", "weight": 1, "kwargs": {"config": CHECK}},
        {"name": "length_penalty", "weight": 1, "kwargs": {"target_length": 1}},
    ]
    assert resolve_reward("composite", rewards=parts)("", "7", {"gold": "7"}) == 1.0


def test_a_grader_that_asks_a_model_has_a_caution() -> None:
    models = {"judge": {"base_url": f"http://127.0.0.1:{unused_port()}/v1", "retries": 0}}
    content = [{"role": "user", "content": "{{ sample.output_text }}"}]
    model = {"type": "score_model", "model": "judge", "input": content}
    multi = {"type": "multi", "graders": {"a": CHECK, "b": model}, "calculate_output": "a * b"}
    assert "another model's opinion" in resolve_reward("grader", config=multi, models=models).caution
    assert resolve_reward("grader", config=CHECK).caution == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": "nowhere.json"}, "'nowhere.json' cannot be read"),
        ({"config": {**CHECK, "operation": "is"}}, "config: operation='is'"),
        ({"config": CHECK, "timeout_s": 0}, "timeout_s=0, expected a finite number above 0, at most 600"),
        ({"config": CHECK, "models": ["judge"]}, r"models=\['judge'\], expected endpoints by the names"),
        ({"config": CHECK, "models": {"judge": {"model": "m"}}}, "models.judge=.*expected a mapping with base_url"),
        ({"config": CHECK, "models": {"judge": {"base_url": "ftp://x"}}}, "models.judge: base_url='ftp://x'"),
        ({"config": CHECK, "models": {"judge": {"base_url": "http://x", "key": "k"}}}, "models.judge.key is not known"),
        ({"config": CHECK, "votes": 3}, "votes"),
    ],
)
def test_impossible_options_are_refused_when_resolved(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("grader", **options)


@pytest.mark.parametrize("text", ["{", '["x"]', "\udcff"])
def test_a_file_that_is_no_grader_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "grader.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"reward 'grader': config: .*(not JSON|cannot be read|expected an object)"):
        resolve_reward("grader", config=str(tmp_path / "grader.json"))
