"""`client=sharded` with real ranks: samples, checkpoints and whole runs are those of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.cli.main import run
from rlvr.clients.local_engine import ModelBuild
from rlvr.clients.sharded.rank_processes import RankProcesses
from rlvr.clients.sharded.sharded_client import ShardedPolicy, ShardedTrainingClient, start_ranks
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.clients.sharded.split_call import split_data
from rlvr.core.messages import AdamParams, Datum, ModelInput
from rlvr.engine.capacity import count_exchanged
from rlvr.engine.engine_options import EngineLimits
from rlvr.engine.memory import read_shape
from rlvr.engine.tokenizer import load_tokenizer
from tests.kit.paths import python_path
from tests.kit.rounding import FORWARD, close_logprobs, tolerance
from tests.kit.sharded_ranks import LORA, ForkedRanks, group_rows, move_adapter, start, start_alone, tiny_policy
from tests.kit.tinker_model import write_model
from tests.kit.tiny import params
from tests.kit.tiny_run import TINY, RunKilled, attempt, stored_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROWS = group_rows([12, 9, 12, 7])
ADAM = AdamParams(0.01)
TIMES = {"ranks/transfer_s", "ranks/publish_s"}


@pytest.fixture(scope="module", params=[None, LORA], ids=["all-weights", "adapter"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedTrainingClient]:
    folder = tmp_path_factory.mktemp("ranks")
    policy = tiny_policy("qwen3", request.param)
    made = start(policy, folder)
    if request.param:
        alone = start_alone(policy, folder)
        move_adapter(alone)
        made.load_state(alone.save_state("moved").result().path).result()
    yield made
    made.close()


def score(client: Any, sampler: Any) -> list[tuple[float, float]]:
    """Pairs of log-probs of some tokens: those of the trainer, and of a sampler."""
    tokens = [3, 1, 4, 1, 5, 9, 2]
    row = Datum.from_completion(tokens[:1], tokens[1:], weight=0.0)
    ours = client.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    theirs = sampler.compute_logprobs(ModelInput(tokens)).result()[1:]
    return list(zip(ours.tolist(), theirs, strict=True))


def test_samplers_have_the_weights_of_their_moment(client: ShardedTrainingClient) -> None:
    before = client.create_sampling_client()
    assert before.fingerprint == client.fingerprint
    for ours, theirs in score(client, before):
        assert [theirs] == close_logprobs([ours])
    sampled = before.sample(ModelInput([1, 2]), 3, params()).result()
    old = before.compute_logprobs(ModelInput([1, 2, 3])).result()
    client.forward_backward(ROWS, "ppo").result()
    client.optim_step(ADAM).result()
    after = client.save_weights_and_get_sampling_client()
    assert after.fingerprint == client.fingerprint != before.fingerprint
    for ours, theirs in score(client, after):
        assert [theirs] == close_logprobs([ours])
    assert before.compute_logprobs(ModelInput([1, 2, 3])).result() == old
    assert before.sample(ModelInput([1, 2]), 3, params()).result().sequences == sampled.sequences
    assert max(abs(ours - theirs) for ours, theirs in score(client, before)) > 1e-3


def test_the_step_says_how_busy_the_ranks_were(client: ShardedTrainingClient) -> None:
    client.create_sampling_client()
    client.forward_backward(ROWS, "ppo").result()
    metrics = client.optim_step(ADAM).result().of_client
    assert metrics.keys() == {*(f"ranks/{k}/{r}" for k in ("busy", "idle") for r in (0, 1)), *TIMES}
    for rank in (0, 1):
        assert 0 < metrics[f"ranks/busy/{rank}"] < 1 and metrics[f"ranks/idle/{rank}"] >= 0
    assert min(metrics["ranks/idle/0"], metrics["ranks/idle/1"]) == 0
    assert metrics["ranks/transfer_s"] > 0


def test_checkpoints_load_in_transformers_or_peft(client: ShardedTrainingClient) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = client.save_weights_for_sampler("portable").result().path
    if client._policy.lora:
        base: Any = client._policy.model.load().module
        module: Any = PeftModel.from_pretrained(base, path)
    else:
        module = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        table = module(input_ids=torch.tensor([[3, 1, 4]])).logits[0].log_softmax(-1)
    sampler = client.create_sampling_client()
    found = sampler.compute_logprobs(ModelInput([3, 1, 4])).result()
    assert np.array(found[1:]) == close_logprobs([float(table[0, 1]), float(table[1, 4])])
    saved = client.create_sampling_client(path).compute_logprobs(ModelInput([3, 1, 4])).result()
    assert saved == found


def test_an_adapter_is_never_sampled_on_another_base_than_it_is_trained_on(tmp_path: Path) -> None:
    """As where the driver's machine has another revision of the model than those of the ranks."""
    folder = tmp_path / "model"
    write_model(folder, seed=1)
    build = ModelBuild(str(folder), {}, load_tokenizer(str(folder)), 0, "cpu", "float32")
    client = start(ShardedPolicy(build, LORA, 0, EngineLimits()), tmp_path)
    write_model(folder, seed=2)
    with pytest.raises(ValueError, match=r"model\.name=.*other weights than the ranks"):
        client.create_sampling_client()
    client.close()


@pytest.mark.parametrize("lora", [None, LORA], ids=["all-weights", "adapter"])
def test_ranks_exchange_as_much_as_the_plan_of_a_run_counts(
    lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    policy = tiny_policy("qwen3", lora, micro_tokens=24)
    options = ShardingOptions(2, 120.0)
    client = start_ranks(policy, options, tmp_path, start=lambda _: ForkedRanks(2, "counting_rank"))
    learner = start_alone(policy, tmp_path)._engine._learner
    batches = [learner._batches([ROWS[i] for i in share]) for share in split_data(ROWS, 2)]
    client.forward_backward(ROWS, "ppo").result()
    moved = client.group.call("count_moved")
    client.close()
    shape = read_shape(learner.model.module.config.to_dict())
    assert shape is not None
    expected = max(map(len, batches)) * count_exchanged(shape, 4, trains_base=lora is None)
    assert moved == pytest.approx([expected] * 2, rel=0.02)  # parts are of one size: the last is padded


def test_a_run_resumes_with_as_many_ranks_and_with_others_only_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    learns = ["engine.threads=2", "sft.steps=30", "sft.batch_size=32", "sft.optimizer.learning_rate=0.01"]
    sharded = ["client=sharded", "sharding.ranks=2", *learns]
    whole = attempt("tiny.yaml", *sharded, "run.name=whole")
    with pytest.raises(RunKilled):
        attempt("tiny.yaml", *sharded, "run.name=resumed", killed_at=2)
    with pytest.raises(ValueError, match=r"sharding.ranks=1: the run .* began with another number.*allow_other_ranks"):
        attempt("tiny.yaml", "client=sharded", "sharding.ranks=1", *learns, "run.name=resumed")
    resumed = attempt("tiny.yaml", *sharded, "run.name=resumed")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert whole["machine"]["ranks"] == 2

    with pytest.raises(RunKilled):
        attempt("tiny.yaml", *sharded, "run.name=other", killed_at=2)
    other = ["client=sharded", "sharding.ranks=1", *learns, "sharding.allow_other_ranks=true"]
    attempt("tiny.yaml", *other, "run.name=other")
    attempt("tiny.yaml", *learns, "run.name=alone")
    losses = [
        [row["loss"] for row in stored_steps(tmp_path / "runs" / name) if row["phase"] == "sft"]
        for name in ("whole", "other", "alone")
    ]
    assert all(len(each) == 30 and each[-1] < 0.9 * each[0] for each in losses)
    whole_losses, other_losses, alone_losses = losses
    assert other_losses == whole_losses, "two ranks trained both up to here"
    assert alone_losses[0] == pytest.approx(whole_losses[0], rel=tolerance(FORWARD))  # later weights are apart
    assert run(["evaluate", "runs/whole", "evaluation.tasks=4"]) == 0


def test_a_rank_that_dies_in_a_run_is_a_message_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = ["train", "--config=tiny.yaml", "client=sharded", "sharding.ranks=2", "engine.threads=2"]
    monkeypatch.setattr("rlvr.clients.sharded.rank_group.GRACE_S", 1.0)
    from rlvr.clients.sharded.rank_processes import RankProcesses

    send, calls = RankProcesses.send, {"steps": 0}

    def kill_later(processes: RankProcesses, rank: int, message: Any) -> None:
        calls["steps"] += message.name == "optim_step" and rank == 1
        if calls["steps"] == 2:
            calls["steps"] += 1
            processes._processes[1].kill()
        send(processes, rank, message)

    monkeypatch.setattr(RankProcesses, "send", kill_later)
    assert run(command) == 1
    assert "rank 1 was killed by SIGKILL" in (said := capfd.readouterr().err) and "same command" in said
    assert run(command) == 0
    assert json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["steps"] == 3
