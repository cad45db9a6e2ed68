"""`client=skyrl`: on a server whose losses are means, the gradients, losses and log-probs of the engine in process.

The server is played at the seam of the SDK by the engine itself, with SkyRL's losses: each row's sum divided by the
row's length, and a step's gradient by the rows of all its calls. docs/tinker/other-servers.md has what a real one did.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker")

import tinker

from rlvr.algorithms.capabilities import check_supported
from rlvr.algorithms.registry import ALGORITHMS
from rlvr.clients.custom_loss import build_named_loss
from rlvr.clients.skyrl import SEEDS, SKYRL, SkyrlTrainingClient
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.messages import AdamParams, Datum, ModelInput, SamplingParams, TensorData
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.engine.engine_options import LoraConfig
from rlvr.envs import resolve_environment
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from tests.kit.loss_calls import CALLS, POLICY, select
from tests.kit.rounding import assert_gradients_close, close_logprobs, close_norm
from tests.kit.tinker_toy import RUN
from tests.kit.tiny import PROMPTS, data, gradients

LORA = LoraConfig(rank=4)
ADAM = AdamParams(learning_rate=0.05, eps=1e-8)


def finished(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


class SkyrlRun:
    """A training run as the SDK gives it, at a server with SkyRL's losses. `engine` computes sums."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.model_id, self.calls = engine, "model_1", list[tuple[list[Datum], str, Any]]()
        self.sampled: list[Any] = []
        self.gradients: dict[str, Any] = {}  # of the last step

    def forward(self, rows: list[Any], loss_fn: str, config: Any) -> Future[Any]:
        data = [self._read(row) for row in rows]
        known = [out["logprobs"].data for out in self.engine.forward(data, loss_fn, config).result().loss_fn_outputs]
        losses = [_compute_losses(loss_fn, p, row, config or {}) for p, row in zip(known, data, strict=True)]
        tensors = [
            {"logprobs": TensorData.of(p), "elementwise_loss": TensorData.of(loss)}
            for p, loss in zip(known, losses, strict=True)
        ]
        outputs = [{key: _to_sdk(tensor) for key, tensor in row.items()} for row in tensors]
        return finished(SimpleNamespace(loss_fn_outputs=outputs, metrics={}, loss_fn_output_type="scalar"))

    def forward_backward(self, rows: list[Any], loss_fn: str, config: Any) -> Future[Any]:
        self.calls.append(([self._read(row) for row in rows], loss_fn, config))
        return self.forward(rows, loss_fn, config)

    def optim_step(self, params: Any) -> Future[Any]:
        count = sum(len(batch) for batch, _, _ in self.calls)
        for batch, loss_fn, config in self.calls:
            rows = [_divide(row, row.model_input.length * count) for row in batch]
            self.engine.forward_backward(rows, loss_fn, config).result()
        self.calls.clear()
        self.gradients = gradients(self.engine)
        metrics = self.engine.optim_step(ADAM).result().metrics
        return finished(SimpleNamespace(metrics={"skyrl.ai/grad_norm": metrics["grad_norm"]}))

    def save_weights_and_get_sampling_client(self) -> Any:
        return SimpleNamespace(
            sample=self._sample, compute_logprobs=lambda prompt: finished([-0.5] * (prompt.length - 1))
        )

    def save_state(self, name: str, overwrite: bool) -> Future[Any]:
        return finished(SimpleNamespace(path=f"tinker://{self.model_id}/weights/{name}"))

    def _sample(self, prompt: Any, count: int, params: Any, scored: bool) -> Future[Any]:
        self.sampled.append(params)
        sequence = SimpleNamespace(stop_reason="stop", tokens=[5], logprobs=[-1.0])
        known = [-0.5] * (prompt.length - 1) if scored else None
        return finished(SimpleNamespace(sequences=[sequence] * count, prompt_logprobs=known))

    @staticmethod
    def _read(row: Any) -> Datum:
        inputs = {key: TensorData(tensor.to_numpy()) for key, tensor in row.loss_fn_inputs.items()}
        return Datum(ModelInput(row.model_input.to_ints()), inputs)


def _to_sdk(tensor: TensorData) -> Any:
    return tinker.TensorData.from_numpy(np.asarray(tensor.data, np.float32))


def _divide(row: Datum, by: float) -> Datum:
    inputs = row.loss_fn_inputs
    return Datum(row.model_input, {**inputs, "advantages": TensorData.of(inputs["advantages"].data / by)})


def _compute_losses(loss_fn: str, p: Any, row: Datum, config: Any) -> Any:
    """The losses of the tokens, by the formulas of SkyRL's documentation."""
    q, A = (row.loss_fn_inputs[key].data for key in POLICY)
    ratio = np.exp(p - q)
    clipped = np.clip(ratio, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    if loss_fn == "importance_sampling":
        return -ratio * A
    return -clipped * p * A if loss_fn == "cispo" else -np.minimum(ratio * A, clipped * A)


@pytest.fixture
def there(client: Callable[..., Any], tokenizer: Any) -> SkyrlTrainingClient:
    return SkyrlTrainingClient(None, SkyrlRun(client(lora=LORA, seed=3, name="there")), tokenizer=tokenizer)


def test_means_at_the_server_are_sums_here(there: SkyrlTrainingClient, client: Callable[..., Any]):
    """Every named loss and a KL: loss, log-probs, gradients and their norm, all after the steps of the calls before.

    Each call begins at the same weights: every step widens the gap that rounding left (`tests/kit/rounding.py`).
    """
    here, run = client(lora=LORA, seed=3), there._client
    assert isinstance(there, TrainingClient)
    for i, (loss_fn, config, rows) in enumerate(CALLS):
        run.engine.load_state_with_optimizer(here.save_state(str(i)).result().path).result()
        only = there.forward(rows, loss_fn, config).result()
        ours, theirs = (c.forward_backward(rows, loss_fn, config).result() for c in (here, there))
        for output in (only, theirs):
            assert output.metrics["loss:sum"] == pytest.approx(ours.metrics["loss:sum"], rel=1e-3, abs=1e-3)
            for one, other in zip(ours.loss_fn_outputs, output.loss_fn_outputs, strict=True):
                assert other["logprobs"].data == close_logprobs(one["logprobs"].data)
        known = gradients(here)
        norms = [c.optim_step(ADAM).result().metrics["grad_norm"] for c in (here, there)]
        assert_gradients_close(run.gradients, known)
        assert norms[1] == close_norm(known)


def test_a_function_of_the_users_takes_two_passes(there: SkyrlTrainingClient, client: Callable[..., Any]):
    here, rows = client(lora=LORA, seed=3), select(data(), *POLICY)
    ours = here.forward_backward(rows, "ppo").result()
    theirs = there.forward_backward_custom(rows, build_named_loss("ppo")).result()
    assert theirs.metrics["loss:sum"] == pytest.approx(ours.metrics["loss:sum"], rel=1e-4)
    known = gradients(here)
    assert there.optim_step(ADAM).result().metrics["grad_norm"] == close_norm(known)
    assert_gradients_close(there._client.gradients, known)


def test_what_skyrl_would_compute_otherwise_is_refused(there: SkyrlTrainingClient):
    rows = select(data(), *POLICY)
    with pytest.raises(ValueError, match="datum 0 lacks 'advantages'"):  # the server would take 0
        there.forward_backward(select(data(), "logprobs"), "ppo")
    with pytest.raises(ValueError, match="loss_fn 'nope' is unknown"):
        there.forward_backward(rows, "nope")
    with pytest.raises(ValueError, match="no gradients"):
        there.optim_step(ADAM)
    there.forward_backward(rows, "ppo").result()
    with pytest.raises(ValueError, match=r"second forward-backward call.*all rows in one"):
        there.forward_backward(rows, "ppo")
    with pytest.raises(ValueError, match=r"grad_clip_norm=1, .*give 0"):
        there.optim_step(AdamParams(grad_clip_norm=1.0))
    there.optim_step(ADAM).result()
    assert there.save_state("one").result().path == "tinker://model_1/weights/one"
    with pytest.raises(ValueError, match=r"'one'.*another name"):
        there.save_weights_for_sampler("one")


def test_there_is_no_critic(there: SkyrlTrainingClient):
    with pytest.raises(ValueError, match=r"client=skyrl has no critic.*an algorithm without one"):
        there.create_critic()


def test_a_server_that_is_not_skyrl_is_refused(there: SkyrlTrainingClient, monkeypatch: pytest.MonkeyPatch):
    output = SimpleNamespace(loss_fn_outputs=[{}], metrics={"loss:sum": 1.0}, loss_fn_output_type="scalar")
    there._client.forward = lambda *given: finished(output)
    with pytest.raises(ValueError, match=r"no elementwise_loss.*client=tinker"):
        there.forward(select(data(), *POLICY)[:1], "ppo").result()


def test_samplers_are_for_the_weights_as_they_are(there: SkyrlTrainingClient, tokenizer: Any):
    """After an optimizer step the server would sample other weights under the old name."""
    sampler = there.save_weights_and_get_sampling_client()
    assert isinstance(sampler, SamplingClient)
    prompt, params = ModelInput(PROMPTS[0]), SamplingParams(max_tokens=2, seed=2**62 + 1)
    answer = sampler.sample(prompt, 1, params, True).result()
    assert answer.prompt_logprobs == [None, -0.5, -0.5], "SkyRL leaves out the first token's"
    assert sampler.compute_logprobs(prompt).result() == [None, -0.5, -0.5]
    sent = there._client.sampled[0]
    assert sent.stop == [tokenizer.eos_token_id], "without a list SkyRL never stops"
    assert sent.seed == (2**62 + 1) % SEEDS < 2**31
    sampler.sample(prompt, 1, SamplingParams(max_tokens=2, stop=[]))
    assert there._client.sampled[1].stop == []
    with pytest.raises(ValueError, match=r"stop=\['x'\].*token ids"):
        sampler.sample(prompt, 1, SamplingParams(max_tokens=2, stop=["x"]))
    there.forward_backward(select(data(), *POLICY), "ppo").result()
    there.optim_step(ADAM).result()
    for ask in (lambda: sampler.sample(prompt, 1, params), lambda: sampler.compute_logprobs(prompt)):
        with pytest.raises(RuntimeError, match=r"trained since.*make a new sampler"):
            ask()
    assert there.save_weights_and_get_sampling_client().sample(prompt, 1, params).result()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_without_a_critic_is_supported(name: str):
    if ALGORITHMS[name].advantage.takes_critic:
        with pytest.raises(ValueError, match=r"advantage=gae is not supported by client=skyrl"):
            check_supported(ALGORITHMS[name], SKYRL.capabilities)
    else:
        check_supported(ALGORITHMS[name], SKYRL.capabilities)


def test_a_run_with_what_skyrl_lacks_is_refused_before_it_starts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "run.yaml").write_text(RUN.replace("client: tinker", "client: skyrl"))
    monkeypatch.chdir(tmp_path)
    source = resolve_environment("toy")

    def check(*words: str) -> dict[str, str]:
        return plan(assemble(build_config(load(None, "run.yaml", words)), source))

    clip = "training.optimizer.grad_clip=0"
    with pytest.raises(ValueError, match=r"client=skyrl does not bound.*give training\.optimizer\.grad_clip=0"):
        check()
    assert "client=skyrl" in check(clip)["model"]
    with pytest.raises(ValueError, match=r"num_minibatches=2.*leave it out"):
        check(clip, "training.num_minibatches=2", "algorithm.name=dr_grpo")
    with pytest.raises(ValueError, match=r"start_from.*leave it out"):
        SKYRL.check(SimpleNamespace(model=SimpleNamespace(start_from="tinker://a/weights/b")))  # type: ignore[arg-type]
    assert math.isclose(build_config(load(None, "run.yaml", [clip, "model.timeout_s=7"])).client.answer_timeout_s, 7)
