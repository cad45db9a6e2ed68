"""`rlvr serve engine --trainers N`: tenants' adapters trained on one base that is cut over ranks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.paths import python_path

pytest.importorskip("google.protobuf")

from benchmarks.sharded_kills import is_running, list_ranks
from rlvr.clients.sharded.adapter_trainers import AdapterTrainers
from rlvr.clients.sharded.sharding_options import RankError, ShardingOptions
from rlvr.core.messages import AdamParams, Datum, ModelInput, NonFiniteError
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits
from rlvr.engine.policy import VALUE_HEAD, Policy, tensors_sha256
from rlvr.engine.value_head import add_value_head
from rlvr.tinker_server.backend.runs.executor import classify_error
from rlvr.tinker_server.serve_engine import ServeOptions, check_trainers
from rlvr.tinker_server.server_settings import load_settings
from tests.kit.rounding import close_logprobs
from tests.kit.server_process import FRESH
from tests.kit.sharded_ranks import LORA, ForkedRanks, fork_ranks, group_rows, measure_difference, tiny_policy
from tests.kit.tinker_backend import BackendClient, ServerFactory, counters, tiny_engine
from tests.kit.tinker_server import TinkerServer
from tests.kit.tiny import params
from tests.kit.value_rows import value_rows
from tests.kit.vllm_server import BASE, FakeVllm, serve_vllm

ROWS = group_rows([12, 9, 12, 20, 7, 3])


@pytest.mark.parametrize(
    ("trainers", "words", "message"),
    [
        (-1, [], "--trainers -1, expected at least 0"),
        (0, ["sharding.timeout_s=60"], "no effect without --trainers"),
        (2, ["sharding.ranks=3"], "give --trainers"),
        (2, ["sharding.allow_other_ranks=true"], "give --trainers"),
    ],
)
def test_wrong_trainers_are_refused(trainers: int, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_trainers(ServeOptions([], trainers=trainers, settings=load_settings(words)))
    check_trainers(ServeOptions([], trainers=2, settings=load_settings(["sharding.timeout_s=60"])))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The engine of `tiny_engine`, whose adapters two ranks train."""
    build = tiny_policy().model
    model = build.load()
    weights = tensors_sha256(model.parameters())
    trainers = AdapterTrainers(build, weights, EngineLimits(), ShardingOptions(2, 120.0), start=fork_ranks)
    yield Engine(model, EngineLimits(), trainers)
    trainers.close()


def make_policy(engine: Engine, name: str) -> Policy:
    """An adapter, none of whose weights is zero."""
    policy = engine.create_policy(name, lora=LORA, seed=len(name))
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for p in policy.parameters.values():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return policy


def read_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: m.grad.clone() for name, m in policy.masters.items() if m.grad is not None}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gradients_add_up_and_are_those_of_one_process(engine: Engine) -> None:
    """For two adapters in turn, over steps of the ranks' gradients: the ranks have each one's weights of the moment."""
    engines = (engine, tiny_engine())
    pairs = [[make_policy(one, name) for one in engines] for name in ("a", "bb")]
    for _ in range(2):
        for pair in pairs:
            for one, policy in zip(engines, pair, strict=True):
                one.forward_backward(policy, ROWS, "ppo", {})
                one.forward_backward(policy, ROWS[:1], "cross_entropy", {})  # of which one rank has nothing
            assert measure_difference(*map(read_gradients, pair)) < 1e-5
        for name, gradient in read_gradients(pairs[0][0]).items():
            pairs[0][1].masters[name].grad = gradient
        for one, policy in zip(engines, pairs[0], strict=True):
            one.optim_step(policy, AdamParams(0.01, eps=1e-4))
            one.forward_backward(policy, ROWS, "ppo", {})
        assert len({policy.sha256() for policy in pairs[0]}) == 1
        assert measure_difference(*map(read_gradients, pairs[0])) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mistakes_name_the_row_and_change_nothing(engine: Engine) -> None:
    policy = make_policy(engine, "ccc")
    engine.forward_backward(policy, ROWS, "ppo", {})
    before = read_gradients(policy)
    wrong = Datum(ROWS[3].model_input, {k: v for k, v in ROWS[3].loss_fn_inputs.items() if k != "advantages"})
    with pytest.raises(ValueError, match="datum 3 lacks 'advantages'"):
        engine.forward_backward(policy, [*ROWS[:3], wrong], "ppo", {})
    with pytest.raises(NonFiniteError) as caught:
        with torch.no_grad():
            kept = policy.parameters[next(iter(policy.parameters))]
            value = kept.view(-1)[0].clone()
            kept.view(-1)[0] = float("nan")
        engine.forward_backward(policy, ROWS, "ppo", {})
    assert caught.value.rows
    with torch.no_grad():
        kept.view(-1)[0] = value
    after = read_gradients(policy)
    assert all(torch.equal(after[name], before[name]) for name in before)
    engine.forward_backward(policy, ROWS, "ppo", {}, backward=False)
    assert all(torch.equal(read_gradients(policy)[name], before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_ranks_are_started_again_and_the_bits_are_the_same(engine: Engine) -> None:
    trainers: Any = engine.trainers
    policy = make_policy(engine, "dddd")
    engine.forward_backward(policy, ROWS, "ppo", {})
    expected = read_gradients(policy)
    policy.clear_gradients()
    before = trainers.group.processes.ids
    os.kill(before[1], signal.SIGKILL)
    engine.forward_backward(policy, ROWS, "ppo", {})
    assert set(before).isdisjoint(trainers.group.processes.ids)
    found = read_gradients(policy)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_engine_samples_while_the_ranks_compute(engine: Engine) -> None:
    """And where that fails the ranks are ended, so that no reply is taken for one of the next call."""
    policy, prompt = make_policy(engine, "eeeee"), ModelInput([1, 2])
    snapshot = engine.snapshot(policy)
    expected = engine.sample(snapshot, prompt, 2, params()).result().sequences
    meanwhile: list[Any] = []
    rows = ROWS * 40
    engine.forward_backward(
        policy, rows, "ppo", {},
        after_batch=lambda: meanwhile.append(engine.sample(snapshot, prompt, 2, params()).result().sequences),
    )  # fmt: skip
    assert meanwhile and all(sequences == expected for sequences in meanwhile)
    gradients = read_gradients(policy)

    def fail() -> None:
        raise KeyError("a mistake outside the ranks")

    with pytest.raises(KeyError):
        engine.forward_backward(policy, rows, "ppo", {}, after_batch=fail)
    policy.clear_gradients()
    engine.forward_backward(policy, rows, "ppo", {})
    assert all(torch.equal(found, gradients[name]) for name, found in read_gradients(policy).items())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_critic_is_trained_by_the_engine_itself(engine: Engine) -> None:
    trainers: Any = engine.trainers
    policy = make_policy(engine, "critic")
    add_value_head(policy, engine.model)
    before = trainers.group.seconds
    engine.forward_backward(policy, value_rows(), "value", {})
    assert trainers.group.seconds == before
    assert float(read_gradients(policy)[VALUE_HEAD].abs().sum()) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_that_changed_since_the_engine_loaded_it_is_refused() -> None:
    with pytest.raises(ValueError, match="other weights"):
        AdapterTrainers(
            tiny_policy().model, "another hash", EngineLimits(), ShardingOptions(1, 120.0), start=fork_ranks
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("module", "message"),
    [("no_such_module", "rank 0 ended with exit code 1"), ("faulty_rank", r"rank 0 has torch 1\.9, this process 2")],
)
def test_a_tenant_is_not_blamed_for_ranks_that_do_not_come_back(
    module: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is shown the server's stacks and folders. The faulty rank has another torch, as after an upgrade."""
    monkeypatch.setenv("RLVR_TEST_FAULT", "0 torch 1.9")
    monkeypatch.setenv("PYTHONPATH", python_path())
    policy = tiny_policy()
    model = policy.model.load()
    modules = ["rlvr.clients.sharded.rank_worker", module]
    options = ShardingOptions(1, 120.0)
    trainers = AdapterTrainers(
        policy.model, tensors_sha256(model.parameters()), EngineLimits(), options,
        start=lambda options: ForkedRanks(options.ranks, modules.pop(0)),
    )  # fmt: skip
    engine = Engine(model, EngineLimits(), trainers)
    adapter = make_policy(engine, "a")
    os.kill(trainers.group.processes.ids[0], signal.SIGKILL)
    with pytest.raises(RankError, match=f"could not be started again: .*{message}") as caught:
        engine.forward_backward(adapter, ROWS, "ppo", {})
    failure, is_damaged = classify_error(caught.value)
    assert failure.category == "server" and is_damaged
    assert "Traceback" not in failure.error and os.sep not in failure.error
    trainers.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_tenants_trained_at_once_have_the_bits_of_each_alone(engine: Engine, tmp_path: Path) -> None:
    """With room for one adapter in memory: each turn of a tenant brings its own back from disk."""

    def serve(folder: Path, owners: list[str]) -> list[str]:
        folder.mkdir()
        start = ServerFactory(folder)
        backend = start(engine=engine, live_policies=1)
        clients = [BackendClient(backend, owner) for owner in owners]
        for client in clients:
            client.make(rank=4, seed=len(client.owner))
        ids: list[tuple[BackendClient, str]] = []
        for i in range(2):
            for client in clients:
                ids.append((client, client.gradients(2 * i + 1, seed=i + len(client.owner), loss_fn="ppo")))
                ids.append((client, client.step(2 * i + 2)))
        for client, request in ids:
            outcome = client.wait(request, timeout=120)
            assert "error" not in vars(outcome), outcome
        for client in clients:
            client.save_weights(5, "end")
        hashes = [counters(folder, client.run, "end")["weights_sha256"] for client in clients]
        start.close()
        return hashes

    together = serve(tmp_path / "both", ["anna", "robert"])
    alone = [serve(tmp_path / owner, [owner])[0] for owner in ("anna", "robert")]
    assert together == alone and together[0] != together[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_two_tenants_are_trained_by_ranks_and_sampled_by_servers_over_a_killed_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--trainers 2 --samplers URL`: what the ranks score is what the server sampled with, after every step.

    tests/clients/test_vllm_real_servers.py does it with vLLM itself.
    """
    tinker = pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
    save_tiny_model(tmp_path / "model")
    monkeypatch.setattr("tests.kit.tinker_server.PATIENCE", 300.0)
    prompt, keys = [1, 10, 2, 13], ("tml-anna-0001", "tml-robert-0002")

    def to_row(tokens: list[int], weight: float) -> Any:
        row = Datum.from_completion(prompt, tokens, weight)
        inputs = {name: tinker.TensorData.from_numpy(value.to_numpy()) for name, value in row.loss_fn_inputs.items()}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(row.model_input.to_ints()), loss_fn_inputs=inputs)

    fake = FakeVllm(tiny_engine)
    with serve_vllm(fake) as url:
        options = ("--trainers", "2", "--samplers", url, "limits.max_rank=8")
        server: Any = TinkerServer({"tiny": tmp_path / "model"}, tmp_path / "state", *options, keys=",".join(keys))
        server.command = FRESH
        with server:
            assert "trained by 2 processes" in server.said and f"vLLM samples at {url}" in server.said
            services = [tinker.ServiceClient(base_url=server.url, api_key=key) for key in keys]
            trainers = [
                service.create_lora_training_client(base_model="tiny", rank=4, seed=tenant).result()
                for tenant, service in enumerate(services)
            ]
            losses: list[list[float]] = []
            begun = list_ranks(server._process.pid)
            for step in range(3):
                passes: list[Any] = []
                steps: list[Any] = []
                for tenant, trainer in enumerate(trainers):
                    passes.append(trainer.forward_backward([to_row([1 + tenant, 2, 3], 1.0)], "cross_entropy"))
                    steps.append(trainer.optim_step(tinker.AdamParams(learning_rate=2e-2)))
                if step == 1:
                    os.kill(begun[1], signal.SIGKILL)
                losses.append([future.result().metrics["loss:sum"] for future in passes])
                for future in steps:
                    future.result()
                for trainer in trainers:
                    sampler = trainer.save_weights_and_get_sampling_client().result()
                    asked = tinker.SamplingParams(max_tokens=8, seed=5, stop=[])
                    given = tinker.ModelInput.from_ints(prompt)
                    sequences = sampler.sample(given, num_samples=2, sampling_params=asked).result().sequences
                    rows = [to_row(list(sequence.tokens), 0.0) for sequence in sequences]
                    scored = trainer.forward(rows, "cross_entropy").result().loss_fn_outputs
                    for sequence, row in zip(sequences, scored, strict=True):
                        assert list(sequence.logprobs) == close_logprobs(row["logprobs"].to_numpy()[len(prompt) - 1 :])
            models = [body["model"] for _, body in fake.requests if "n" in body.get("sampling_params", {})]
            assert len(set(models)) == len(models) == 6 and BASE not in models
            assert all(first > second > third for first, second, third in zip(*losses, strict=True))
            assert "The ranks are started again" in server.log()
            for service in services:
                service.close("success").result()
            ranks = list_ranks(server._process.pid)
            assert len(ranks) == 2 and set(ranks).isdisjoint(begun)
            assert server.stop() == 0 and not any(map(is_running, ranks)) and not fake.adapters
    del services, trainers, trainer, sampler
    gc.collect()  # here, where its warnings are expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sampling_server_that_is_refused_leaves_no_rank(tmp_path: Path) -> None:
    """It is tried when the ranks are there: they train the trial adapter."""
    save_tiny_model(tmp_path / "model")
    words = ["--model", f"tiny={tmp_path / 'model'}", "--state", str(tmp_path / "state"), "--port", "0"]
    with serve_vllm(FakeVllm(tiny_engine, rank=4)) as url:
        done = subprocess.run(
            [*FRESH, "engine", *words, "--trainers", "2", "--samplers", url, "limits.max_rank=8"],
            capture_output=True, text=True, timeout=250, env={**os.environ, "RLVR_TEST_MARK": str(tmp_path)},
        )  # fmt: skip
    assert done.returncode == 1 and "--max-lora-rank" in done.stderr and "Traceback" not in done.stderr, done.stderr
    until = time.monotonic() + 20
    while (left := list_marked(str(tmp_path))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def save_tiny_model(folder: Path) -> None:
    """The model of `tiny_engine`."""
    model = tiny_engine().model
    model.module.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


def list_marked(mark: str) -> list[Path]:
    """Processes with this text in their environment."""
    found: list[Path] = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"RLVR_TEST_MARK={mark}".encode() in place.read_bytes():
                found.append(place)
    return found
