"""A run whose files were damaged after it was stopped or finished: each is named, and nothing goes on from it.

One run of the toy policy is made once; every case damages a copy of its folder and types the same command again.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.files import new_folder
from rlvr.core.messages import AdamParams, Datum, ModelInput, TensorData
from rlvr.training.evaluate import stored_evaluation

TOY = """
seed: 3
client: mock
env: {name: toy}
reward: {kwargs: {keywords: [world]}}
rollout: {max_tokens: 6}
training: {steps: 4, prompts_per_step: 2, group_size: 4}
evaluation: {tasks: 8, samples: 2}
run: {checkpoint_every: 2, keep_checkpoints: 9}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, in a folder with its config."""
    place = tmp_path_factory.mktemp("whole")
    (place / "toy.yaml").write_text(TOY)
    assert run(["train", f"--config={place / 'toy.yaml'}", f"run.root={place / 'runs'}"]) == 0
    return place / "runs" / "toy"


@pytest.fixture
def again(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, str]]:
    """Type the command again for the copy in `tmp_path/runs/toy`: its exit status and what it said."""
    shutil.copytree(whole.parents[1], tmp_path, dirs_exist_ok=True)
    resolved = tmp_path / "runs" / "toy" / "resolved.yaml"
    resolved.write_text(resolved.read_text().replace(str(whole.parents[1]), str(tmp_path)))
    (tmp_path / "runs" / "toy" / "summary.json").unlink()

    def type_it() -> tuple[int, str]:
        capfd.readouterr()
        code = run(["train", f"--config={tmp_path / 'toy.yaml'}", f"run.root={tmp_path / 'runs'}"])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, err if code else out

    return type_it


def cut_after(folder: Path, name: str) -> dict[str, Any]:
    """Take the run back to the checkpoint `name`, the last line of its journal then; that line."""
    path = folder / "journal.jsonl"
    lines = path.read_text().splitlines()
    last = next(i for i, line in enumerate(lines) if json.loads(line).get("path") == f"checkpoints/{name}")
    path.write_text("".join(line + "\n" for line in lines[: last + 1]))
    return json.loads(lines[last])


def change_last(folder: Path, **changed: Any) -> None:
    path = folder / "journal.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps({**json.loads(last), **changed})]) + "\n")


def test_an_undamaged_run_continues(again: Any, tmp_path: Path, whole: Path) -> None:
    """The cases below fail by their damage alone: taken back to a checkpoint, the run ends with the same weights."""
    folder = tmp_path / "runs" / "toy"
    cut_after(folder, "rl-000002")
    code, said = again()
    assert code == 0 and "resuming: rl, 2 steps done" in said
    ends = [json.loads((place / "summary.json").read_text()) for place in (folder, whole)]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]


@pytest.mark.parametrize(
    "changed",
    [
        *({"phase": value} for value in (-1, 0, 1, 3, 99, 10**9, "a", None)),
        *({"step": value} for value in (-3, 0, 1, 3, 10**9, "a", None)),
        {"phase": 3, "step": 1},
        {"phase": 4, "step": 0},
        *({"state": value} for value in (None, {}, [], "x")),
    ],
)
def test_a_checkpoint_at_another_position_or_without_state_is_refused(
    again: Any, tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = tmp_path / "runs" / "toy"
    cut_after(folder, "rl-000002")
    change_last(folder, **changed)
    before = (folder / "metrics.jsonl").read_bytes()
    code, said = again()
    assert code == 2 and "journal.jsonl, line " in said and "delete" in said
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("rl", value) for value in ({"a": 1}, None, 5, {})),
        *(("sft", value) for value in (5, None, {}, {"drawn": {}, "pass_rate": {}})),
        *(("seconds", value) for value in ("x", None, -1.0, float("nan"), float("inf"))),
    ],
)
def test_a_state_of_something_else_is_refused(again: Any, tmp_path: Path, part: str, value: Any) -> None:
    folder = tmp_path / "runs" / "toy"
    line = cut_after(folder, "rl-000002")
    change_last(folder, state={**line["state"], part: value})
    number = len((folder / "journal.jsonl").read_text().splitlines())
    code, said = again()
    assert code == 2 and f"journal.jsonl, line {number}: state.{part}" in said and "delete it to go on" in said


def test_a_deleted_line_goes_on_from_the_checkpoint_before(again: Any, tmp_path: Path) -> None:
    """As the message says."""
    folder = tmp_path / "runs" / "toy"
    cut_after(folder, "rl-000002")
    change_last(folder, step=3)
    assert again()[0] == 2
    lines = (folder / "journal.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("path") != "checkpoints/rl-000002"]
    (folder / "journal.jsonl").write_text("\n".join(kept) + "\n")
    code, said = again()
    assert code == 0 and "FINAL RESULTS" in said


def test_weights_that_are_no_numbers_are_refused(again: Any, tmp_path: Path) -> None:
    """A checkpoint with checksums that agree, whose table holds nothing to go on from."""
    folder = tmp_path / "runs" / "toy"
    place = folder / cut_after(folder, "rl-000002")["path"]
    table = json.loads((place / "table.json").read_text())
    with new_folder(place) as written:
        (written / "table.json").write_text(json.dumps({**table, "logits": [float("nan")] * len(table["logits"])}))
    code, said = again()
    assert code == 2 and "table.json: logits are not" in said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sums", ['{"/dev/zero": "00"}', "{}", "[" * 20_000])
def test_a_checkpoint_whose_list_says_nothing_counts_as_damaged(again: Any, tmp_path: Path, sums: str) -> None:
    """The run goes on from the one before, and evaluating the damaged one is refused."""
    folder = tmp_path / "runs" / "toy"
    place = folder / cut_after(folder, "rl-000002")["path"]
    (place / "checksums.json").write_text(sums)
    assert run(["evaluate", str(place)]) == 2
    code, said = again()
    assert code == 0 and "rl-000002 is damaged" in said and "falling back to the one before" in said


@pytest.mark.parametrize("line", ["[1]", "3", '{"phase": "rl"}', '{"phase": "rl", "step": 1e999}', '{"phase": "x"}'])
def test_a_line_that_is_no_row_ends_a_resumed_run_with_its_number(again: Any, tmp_path: Path, line: str) -> None:
    folder = tmp_path / "runs" / "toy"
    cut_after(folder, "rl-000002")
    path = folder / "metrics.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest]) + "\n")
    code, said = again()
    assert code == 2 and "metrics.jsonl, line 2: " in said and "delete the line" in said


@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e308", "-1e308", '"high"', "null"])
def test_a_row_of_odd_numbers_does_not_end_a_run(again: Any, tmp_path: Path, value: str) -> None:
    folder = tmp_path / "runs" / "toy"
    cut_after(folder, "rl-000002")
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "reward": 7.5}).replace(": 7.5", f": {value}") + "\n" for row in rows))
    code, said = again()
    assert code == 0 and "FINAL RESULTS" in said


@pytest.mark.parametrize("name", ["baseline", "final"])
@pytest.mark.parametrize(
    "text",
    [
        *("", "[1]", "{}", "null", '"x"', '{"results": [1], "k": 2}', '{"results": 3, "k": 2}', "[" * 20_000, "torn"),
        *('{"results": [], "k": 0}', '{"results": [], "k": 2, "more": 1}', '{"results": [], "k": 2, "tokens": "x"}'),
    ],
)
def test_a_damaged_evaluation_is_named_before_any_work(again: Any, tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "runs" / "toy"
    path = folder / "evaluations" / f"{name}.json"
    path.write_text(path.read_text()[:-40] if text == "torn" else text)
    code, said = again()
    assert code == 2 and f"{name}.json" in said and "run.resume=false" in said
    if name == "baseline":  # the part that follows is not done in vain
        cut_after(folder, "rl-000002")
        code, said = again()
        assert code == 2 and "baseline.json" in said


@pytest.mark.parametrize(
    "changed",
    [
        {"passed": 3}, {"passed": -1}, {"judged": 0}, {"passed": True}, {"reward": "x"}, {"reward": float("nan")},
        {"id": 3}, {"level": None}, {"watched": []}, {"watched": {"a": "x"}}, {"more": 1},
    ],
)  # fmt: skip
def test_a_result_that_no_evaluation_gives_is_refused(whole: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    """A task with more passes than answers would be a wrong number in the table."""
    data = json.loads((whole / "evaluations" / "final.json").read_text())
    assert stored_evaluation(whole / "evaluations" / "final.json").to_json() == data
    data["results"][1].update({"judged": 2, "passed": 1} | changed)
    (tmp_path / "final.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"final\.json is damaged: .*run\.resume=false"):
        stored_evaluation(tmp_path / "final.json")


def learn(client: MockTrainingClient) -> None:
    """One optimizer step on one row."""
    inputs = {"target_tokens": TensorData.of([2, 3]), "weights": TensorData.of([1.0, 1.0])}
    client.forward_backward([Datum(ModelInput([2, 2]), inputs)], "cross_entropy").result()
    client.optim_step(AdamParams(0.1)).result()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(({"logits": value}, "logits are not 7 finite numbers") for value in ([math.nan] * 7, [1.0] * 6, 3, None)),
        *(
            ({"logits": [*[1.0] * 6, value]}, "logits are not 7")
            for value in ("x", "1.0", True, 10**400, math.inf, [1])
        ),
        *(({"version": value}, "version is not a whole number") for value in ("x", -1, 1.5, True, None, 10**400)),
        *(({"adam": value}, "adam.moments are not 2 rows of 7") for value in ({}, "x", 3, [], {"moments": [[1]]})),
        ({"adam": {"moments": [[0.0] * 7, [0.0] * 6], "steps": 1}}, "adam.moments are not 2 rows of 7"),
        ({"adam": {"moments": [[0.0] * 7, [math.nan] * 7], "steps": 1}}, "adam.moments are not 2 rows of 7"),
        ({"adam": {"moments": [[0.0] * 7, [-1.0] * 7], "steps": 1}}, "below 0"),
        ({"adam": {"moments": [[0.0] * 7] * 2, "steps": "x"}}, "adam.steps is not a whole number"),
        ({"adam": {"moments": [[0.0] * 7] * 2}}, "adam.steps is not a whole number"),
        ({"words": 3}, "words are not a list"),
        ({"words": ["a"]}, "another vocabulary"),
        ("[1]", "table.json holds a list"),
        ("[" * 20_000, "table.json is damaged: not JSON"),
    ],
)
def test_a_state_that_holds_no_weights_is_refused_and_changes_nothing(tmp_path: Path, change: Any, says: str) -> None:
    """Its checksums agree: it was written so."""
    client = MockTrainingClient(TablePolicy(list("abcde")), tmp_path)
    learn(client)
    path = Path(client.save_state("one").result().path)
    state = json.loads((path / "table.json").read_text())
    with new_folder(path) as folder:
        (folder / "table.json").write_text(change if isinstance(change, str) else json.dumps({**state, **change}))
    other = MockTrainingClient(TablePolicy(list("abcde"), seed=5))
    learn(other)
    before = other.policy.sha256(), other.policy.moments.tobytes(), other.policy.adam_steps, other.policy.version
    for load in (other.load_state, other.load_state_with_optimizer, other.create_sampling_client):
        with pytest.raises(ValueError, match=re.escape(says)):
            load(str(path))
    assert before == (
        other.policy.sha256(), other.policy.moments.tobytes(), other.policy.adam_steps, other.policy.version
    )  # fmt: skip
