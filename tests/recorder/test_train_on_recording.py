"""What was recorded of a model trains it: an update by rewards, and imitation of the rollouts that went well."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

import rlvr
from rlvr.recorder.rows import make_rows
from rlvr.recorder.traces import load_recording, write_recording
from tests.kit.chat_rows import qwen_folder
from tests.kit.open_server import TOOLS_TEMPLATE
from tests.kit.recorder import write_traffic


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("recorded")
    model = qwen_folder(folder / "small", TOOLS_TEMPLATE)
    write_traffic(model, folder / "traffic.jsonl")
    return str(model), folder / "traffic.jsonl"


def start(model: str, tmp_path: Path) -> Any:
    return rlvr.ServiceClient(folder=tmp_path / "runs").create_lora_training_client(model, rank=8, seed=3)


def logprobs(client: Any, row: rlvr.Trajectory) -> list[float]:
    """Of the sampled tokens of a row, under the weights as they are."""
    found = client.create_sampling_client().compute_logprobs(rlvr.ModelInput(row.full_tokens)).result()
    pairs = zip(found[len(row.prompt_tokens) :], row.action_mask, strict=True)
    return [float(value) for value, is_sampled in pairs if is_sampled]


def test_recorded_logprobs_are_those_of_the_model(recorded: tuple[str, Path], tmp_path: Path) -> None:
    model, path = recorded
    client = start(model, tmp_path)
    for rollout in load_recording(path).rollouts[:3]:
        (row,) = make_rows(rollout, client.get_tokenizer())
        sampled = [value for value, is_sampled in zip(row.logprobs, row.action_mask, strict=True) if is_sampled]
        assert logprobs(client, row) == pytest.approx(sampled, abs=1e-4) and row.num_action_tokens > 2
        assert row.prompt + row.response == client.get_tokenizer().decode(row.full_tokens)


@pytest.mark.parametrize("form", [None, "openenv", "triplets"])
def test_an_update_makes_what_was_rewarded_likelier(
    recorded: tuple[str, Path], tmp_path: Path, form: str | None
) -> None:
    model, path = recorded
    recording = load_recording(path)
    if form is not None:
        write_recording(recording, form, tmp_path / "other")
        recording = load_recording(tmp_path / "other")
    client = start(model, tmp_path)
    rows = [row for rollout in recording.rollouts for row in make_rows(rollout, client.get_tokenizer())]
    before = [math.fsum(logprobs(client, row)) for row in rows]
    result = rlvr.update(client, "grpo", rows, learning_rate=1e-3)
    assert result.updates == 1 and result.metrics()
    gained = [math.fsum(logprobs(client, row)) - score for row, score in zip(rows, before, strict=True)]
    good = math.fsum(gain for row, gain in zip(rows, gained, strict=True) if row.reward == 1)
    bad = math.fsum(gain for row, gain in zip(rows, gained, strict=True) if row.reward == 0)
    assert good > bad and len({row.group_id for row in rows}) == 2


def test_what_has_no_reward_trains_nothing(recorded: tuple[str, Path], tmp_path: Path) -> None:
    model, path = recorded
    client = start(model, tmp_path)
    rollouts = [replace(rollout, reward=None) for rollout in load_recording(path).rollouts]
    rows = [row for rollout in rollouts for row in make_rows(rollout, client.get_tokenizer())]
    assert rlvr.update(client, "grpo", rows, learning_rate=1e-3).updates == 0


def test_what_went_well_is_imitated_by_its_sampled_tokens_alone(recorded: tuple[str, Path], tmp_path: Path) -> None:
    model, path = recorded
    client = start(model, tmp_path)
    rows = [row for rollout in load_recording(path).rollouts for row in make_rows(rollout, client.get_tokenizer())]
    good = [row for row in rows if row.reward == 1]
    count = sum(row.num_action_tokens for row in good)
    data = [
        rlvr.Datum.from_completion(row.prompt_tokens, row.response_tokens, [m / count for m in row.action_mask])
        for row in good
    ]
    before = math.fsum(value for row in good for value in logprobs(client, row))
    loss = client.forward_backward(data, "cross_entropy").result()
    assert loss.metrics["loss:sum"] == pytest.approx(-before / count, abs=1e-3)
    client.optim_step(rlvr.AdamParams(learning_rate=1e-3)).result()
    assert math.fsum(value for row in good for value in logprobs(client, row)) > before
