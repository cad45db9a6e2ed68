"""Critics on the Tinker server: made by role, trained by `ppo` with values and returns, restored to the bit."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from rlvr.core.messages import AdamParams
from rlvr.engine.engine_options import LoraConfig
from rlvr.tinker_server.backend.request_futures import JsonResult, Outcome, ProtoResult
from rlvr.tinker_server.backend.runs.run_operations import LoadWeights, OptimStep, SaveForSampler, SaveWeights
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.errors import UserError
from tests.kit.tinker_backend import (
    ADAM,
    MODEL,
    BackendClient,
    ServerFactory,
    assert_failed,
    counters,
    forward_backward,
)
from tests.kit.tiny import data
from tests.kit.value_rows import value_rows

CRITIC = {"model_role": "critic"}
LORA = LoraConfig(rank=4)
# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]


def make_critic(client: BackendClient, number: int = 0, **how: Any) -> Outcome:
    """New weights, or those at `path`; by the metadata, as the SDK sends it."""
    client.run, how = f"{client.session}:train:{number}", {"user_metadata": CRITIC, **how}
    if "path" in how:
        made = client.backend.runs.load_weights(
            client.owner, optimizer=False, session_id=client.session, model_seq_id=number, **how
        )
    else:
        lora = {"rank": 4, "seed": 1}
        made = client.backend.runs.create_model(client.owner, client.session, number, MODEL, lora, **how)
    return client.wait(made)


def train(client: BackendClient, first: int, steps: range) -> int:
    """Two requests a step; the next seq_id."""
    for seed in steps:
        client.do(first, forward_backward(client.run, first, value_rows(seed=seed), "ppo", value_clip=0.5))
        client.do(first + 1, OptimStep(ADAM))
        first += 2
    return first


def read_values(outcome: Outcome) -> list[list[float]]:
    assert isinstance(outcome, ProtoResult), outcome
    message = proto.ForwardBackwardOutput.FromString(outcome.body)
    assert [set(record.fields) for record in message.loss_fn_outputs] == [{"values"}]
    field = message.loss_fn_outputs[0].fields["values"]
    ends = np.frombuffer(field.offsets, "<i8")
    return [np.frombuffer(field.data[a:b], "<f4").tolist() for a, b in itertools.pairwise(ends)]


def test_a_critic_goes_on_to_the_bit_after_a_restart(new_server: ServerFactory, tmp_path: Path) -> None:
    """Replayed from the log, and restored from a snapshot with its head and moments: the same hash as undisturbed."""
    hashes: list[str] = []
    for number, (restart, limits) in enumerate([(False, {}), (True, {}), (True, {"snapshot_steps": 1})]):
        client = BackendClient(new_server(**limits))
        assert isinstance(make_critic(client), JsonResult)
        seq = train(client, 1, range(3))
        if restart:
            client.backend = new_server(**limits)
        seq = train(client, seq, range(3, 5))
        client.save_weights(seq, f"end{number}")
        hashes.append(counters(tmp_path, client.run, f"end{number}")["weights_sha256"])
    assert len(set(hashes)) == 1


def test_a_critic_of_a_policys_checkpoint_begins_with_its_weights_and_values_of_zero(new_server: ServerFactory) -> None:
    """And one of a critic's checkpoint is a critic with that head, whether it is asked for as one or not."""
    client = BackendClient(new_server())
    client.make()
    client.wait(client.gradients(1)), client.wait(client.step(2))
    policy = client.save_weights(3, "policy")
    make_critic(client, 1, path=policy)
    forward = forward_backward(client.run, 1, value_rows(), "ppo", forward_only=True)
    assert not np.any(np.concatenate(read_values(client.do(1, forward))))
    train(client, 2, range(2))
    expected = read_values(client.do(6, forward_backward(client.run, 6, value_rows(), "ppo", forward_only=True)))
    assert np.any(np.concatenate(expected))
    critic = client.save_weights(7, "critic")
    for number, metadata in ((2, CRITIC), (3, None)):
        make_critic(client, number, path=critic, user_metadata=metadata)
        forward = forward_backward(client.run, 1, value_rows(), "ppo", forward_only=True)
        assert read_values(client.do(1, forward)) == expected
    assert_failed(client.do(2, LoadWeights(policy, False)), "holds no value head", "load a critic's")
    client.run = f"{client.session}:train:0"
    assert_failed(client.do(4, LoadWeights(critic, False)), "holds a value head", "load a policy's")


def test_what_a_critic_at_the_server_refuses(new_server: ServerFactory) -> None:
    client = BackendClient(new_server())
    assert isinstance(make_critic(client, model_role="critic", user_metadata=None), JsonResult)  # as SkyRL names it
    assert_failed(client.wait(client.gradients(1)), "'cross_entropy' for a critic", "send its loss as ppo")
    other = forward_backward(client.run, 2, data(), "ppo")
    assert_failed(client.do(2, other), "datum 0 lacks 'values'")
    clipped = forward_backward(client.run, 3, value_rows(), "ppo", clip_low_threshold=0.8)
    assert_failed(client.do(3, clipped), "clip_low_threshold has no effect on value; known: value_clip")
    assert_failed(client.do(4, SaveForSampler("sampler")), "values and no tokens to sample; save its state")
    assert_failed(client.do(5, SaveForSampler(None, 1)), "values and no tokens to sample; save its state")
    assert isinstance(client.do(6, SaveWeights("state")), JsonResult)
    with pytest.raises(UserError, match="model_role 'reward': expected policy or critic"):
        make_critic(client, 1, user_metadata={"model_role": "reward"})


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, pristine: Callable[[str], Any], tokenizer: Any) -> Iterator[Any]:
    pytest.importorskip("tinker")
    pytest.importorskip("fastapi")
    from tests.kit.tinker_server import TinkerServer
    from tests.kit.tinker_toy import ALONE, save, toy_model

    root = tmp_path_factory.mktemp("served")
    save(pristine("qwen3"), tokenizer, root / "tiny")
    toy_model(root / "toy")
    models = {"tiny": root / "tiny", "toy": root / "toy"}
    with TinkerServer(models, root / "state", ALONE, keys="tml-mine-alone") as started:
        yield started


@pytest.fixture
def policy(process: Any, tokenizer: Any) -> Iterator[Any]:
    from rlvr.clients.tinker import connect

    made = connect("tiny", base_url=process.url, api_key=process.key, lora=LORA, tokenizer=tokenizer, seed=3)
    yield made
    made.close()
    del made
    gc.collect()  # here, where its warnings are expected


def test_a_critic_there_is_the_one_here(policy: Any, process: Any, client: Callable[..., Any]) -> None:
    """Values, losses and norms of gradients over steps with a clip, and after its state was loaded.

    Each call begins at the weights that the server saved: every step widens the gap that rounding left.
    """
    there, here = policy.create_critic(), client(lora=LORA, seed=3).create_critic()
    for seed in range(4):
        rows, config = value_rows(seed=seed), {"value_clip": 0.2}
        if seed == 2:
            there.load_state_with_optimizer(there.save_state("half").result().path).result()
        here.load_state_with_optimizer(process.saved(there.save_state(f"before-{seed}").result().path)).result()
        ours, theirs = (c.forward_backward(rows, "value", config).result() for c in (here, there))
        assert theirs.metrics["loss:sum"] == pytest.approx(ours.metrics["loss:sum"], rel=1e-4, abs=1e-5)
        for one, other in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(other["values"].data, one["values"].data, atol=1e-5)
        norms = [c.optim_step(AdamParams(0.01, eps=1e-8)).result().metrics["grad_norm"] for c in (here, there)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_a_server_that_makes_a_policy_of_it_is_refused(policy: Any) -> None:
    """A run of this server without the role answers as another server's would that does not know it."""
    from rlvr.clients.tinker import TinkerCriticClient

    other = TinkerCriticClient(policy._service, policy._client)
    with pytest.raises(ValueError, match=r"this server made no critic .*use a server that knows the role"):
        other.check_role()
    with pytest.raises(ValueError, match="'cross_entropy' for a critic is not supported; give loss_fn=value"):
        other.forward(data(), "cross_entropy")


@pytest.mark.slow
def test_a_run_with_a_critic_goes_on_after_a_kill(
    process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.kit.tinker_toy import RUN, attempt
    from tests.kit.tiny_run import RunKilled, stored_steps

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", process.key)
    (tmp_path / "run.yaml").write_text(RUN)
    words = (f"model.base_url={process.url}", "algorithm.name=ppo_critic", "training.steps=4")
    words = (*words, "training.critic.optimizer.learning_rate=0.01", "run.checkpoint_every=1")
    attempt(*words, "run.name=calm")
    with pytest.raises(RunKilled):
        attempt(*words, "run.name=torn", killed_at=3)
    attempt(*words, "run.name=torn")
    calm, torn = (stored_steps(tmp_path / "runs" / name) for name in ("calm", "torn"))
    assert torn == calm
    assert all("critic/explained_variance" in row for row in calm if row["phase"] == "rl")
