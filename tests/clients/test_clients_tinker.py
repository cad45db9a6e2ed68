"""Our clients and loops on a real server of the Tinker protocol, by the public SDK, beside the engine in process."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import own_losses
import pytest
from own_losses import DoublePpo, Leash

import rlvr
from tests.kit.rounding import close_logprobs, close_norm

pytest.importorskip("tinker")
pytest.importorskip("fastapi")

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.capabilities import check_supported
from rlvr.algorithms.losses.loss import Loss
from rlvr.cli.main import run
from rlvr.clients.custom_loss import build_named_loss
from rlvr.clients.tinker import TinkerTrainingClient, connect
from rlvr.clients.tinker_sdk import RemoteFuture, translate_errors
from rlvr.config import load
from rlvr.config.build_config import build_config, resolved_values
from rlvr.core.messages import AdamParams, Datum, ModelInput, NonFiniteError, SamplingParams, TensorData
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.engine.engine_options import LoraConfig
from rlvr.envs import resolve_environment
from rlvr.runs.assembly import assemble
from rlvr.runs.build_job import build_job
from rlvr.runs.run_folder import open_run
from rlvr.runs.run_plan import plan
from tests.kit.loss_calls import CALLS, POLICY, rows_with_kl, select
from tests.kit.tinker_server import TinkerServer
from tests.kit.tinker_toy import ALONE, RUN, attempt, save, toy_model
from tests.kit.tiny import LENGTHS, PROMPTS, data, gradients, params
from tests.kit.tiny_run import RunKilled
from tests.kit.tiny_run import stored_steps as steps

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]
LORA = LoraConfig(rank=4)
ADAM = AdamParams(learning_rate=0.05, eps=1e-8)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, pristine: Callable[[str], Any], tokenizer: Any
) -> Iterator[TinkerServer]:
    """Serves the tiny qwen3 of the other tests as `tiny`, and a model for the environment `toy`."""
    root = tmp_path_factory.mktemp("served")
    save(pristine("qwen3"), tokenizer, root / "tiny")
    toy_model(root / "toy")
    with TinkerServer(
        {"tiny": root / "tiny", "toy": root / "toy"}, root / "state", keys="tml-mine-alone,tml-another-one"
    ) as started:
        yield started


@pytest.fixture(scope="module")
def server_without_batches(server: TinkerServer) -> Iterator[TinkerServer]:
    root = server.state.parent
    with TinkerServer({"toy": root / "toy"}, root / "state-alone", ALONE) as started:
        yield started


@pytest.fixture
def remote(server: TinkerServer, tokenizer: Any) -> Iterator[Callable[..., TinkerTrainingClient]]:
    made: list[TinkerTrainingClient] = []

    def make(base_model: str | None = "tiny", **how: Any) -> TinkerTrainingClient:
        how = {"lora": LORA, "tokenizer": tokenizer, "api_key": server.key, **how}
        made.append(connect(base_model, base_url=server.url, **how))
        return made[-1]

    yield make
    for client in made:
        client.close()
    made.clear()
    gc.collect()  # here, where its warnings are expected


def test_a_server_gives_the_results_of_the_in_process_engine(
    remote: Callable[..., Any], client: Callable[..., Any], server: TinkerServer
):
    """Every named loss, and those with a KL in two passes: losses, log-probs, gradient norms, and the policy after.

    Each call begins at the weights that the server saved: every step widens the gap that rounding left.
    """
    there, here = remote(seed=3), client(lora=LORA, seed=3)
    assert isinstance(there, TrainingClient) and there.base_model == "tiny"
    for i, (loss_fn, config, rows) in enumerate(CALLS):
        here.load_state_with_optimizer(server.saved(there.save_state(f"before-{i}").result().path)).result()
        ours, theirs = (c.forward_backward(rows, loss_fn, config).result() for c in (here, there))
        assert theirs.metrics["loss:sum"] == pytest.approx(ours.metrics["loss:sum"], rel=1e-4, abs=1e-4)
        for one, other in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
            assert other["logprobs"].data == close_logprobs(one["logprobs"].data)
        only = there.forward(rows, loss_fn, config).result()
        assert only.metrics["loss:sum"] == pytest.approx(ours.metrics["loss:sum"], rel=1e-4, abs=1e-4)
        known = gradients(here)
        norms = [c.optim_step(ADAM).result().metrics["grad_norm"] for c in (here, there)]
        assert norms[1] == close_norm(known)


@pytest.mark.parametrize(("loss", "config"), [(Leash, {"strength": 0.3}), (DoublePpo, {"clip_low_threshold": 0.9})])
def test_a_loss_that_was_registered_is_computed_here(
    remote: Callable[..., Any], client: Callable[..., Any], loss: type[Loss], config: dict[str, float]
):
    """The server does not know its name, also where it is a subclass of one that it knows: two passes."""
    rlvr.register(loss)
    rows, here, there = select(data(), *POLICY), client(lora=LORA, seed=3), remote(seed=3)
    ours, theirs = (c.forward_backward(rows, loss.name, config).result() for c in (here, there))
    assert theirs.metrics["loss:sum"] == pytest.approx(ours.metrics["loss:sum"], rel=1e-4, abs=1e-4)
    norms = [c.optim_step(ADAM).result().metrics["grad_norm"] for c in (here, there)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_losses_registered_before_the_client_is_loaded_are_none_of_the_protocols():
    code = (
        "import rlvr, own_losses\n"
        "for loss in (own_losses.Leash, own_losses.DoublePpo): rlvr.register(loss)\n"
        "from rlvr.clients.tinker import TinkerTrainingClient\n"
        "print(*sorted(TinkerTrainingClient.named_losses))"
    )
    places = os.pathsep.join(str(Path(own_losses.__file__).parents[depth]) for depth in (0, 2))
    environment = {**os.environ, "PYTHONPATH": places}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cispo", "cross_entropy", "dro", "gspo", "importance_sampling", "ppo"]


def test_a_custom_loss_gives_the_gradient_of_the_named_one(remote: Callable[..., Any]):
    """`forward_backward_custom` of ppo's own formula, and ppo; the metrics of the user's function come back."""
    rows = select(data(), *POLICY)
    named, custom = remote(seed=1), remote(seed=1)

    def loss(batch: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        value, _ = build_named_loss("ppo")(batch, logprobs)
        return value, {"rows": float(len(batch))}

    first, second = named.forward_backward(rows, "ppo").result(), custom.forward_backward_custom(rows, loss).result()
    assert second.metrics["loss:sum"] == pytest.approx(first.metrics["loss:sum"], rel=1e-5)
    assert second.metrics["rows"] == len(LENGTHS)
    norms = [c.optim_step(ADAM).result().metrics["grad_norm"] for c in (named, custom)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_custom_loss_takes_the_kl_of_its_data(remote: Callable[..., Any], client: Callable[..., Any]):
    """As `algorithm.kl_in=loss` has it: at the server and in this process the gradient is that of ppo with a KL."""
    rows, config = rows_with_kl(data()), {"kl_estimator": 3.0}
    named, here, there = client(lora=LORA, seed=3), client(lora=LORA, seed=3), remote(seed=3)
    outputs = [named.forward_backward(rows, "ppo", config).result()]
    outputs += [c.forward_backward_custom(rows, build_named_loss("ppo"), config).result() for c in (here, there)]
    for output in outputs[1:]:
        assert output.metrics["loss:sum"] == pytest.approx(outputs[0].metrics["loss:sum"], rel=1e-4)
    norms = [c.optim_step(ADAM).result().metrics["grad_norm"] for c in (named, here, there)]
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-3)


def test_samples_are_those_of_the_engine_in_process(remote: Callable[..., Any], client: Callable[..., Any]):
    """The same seeds draw the same tokens; log-probs of answers and prompts agree."""
    there, here = remote().save_weights_and_get_sampling_client(), client(lora=LORA).create_sampling_client()
    assert isinstance(there, SamplingClient)
    for prompt in PROMPTS:
        how = params(seed=2**62 + 7, tokens=6, temperature=0.8, top_p=0.9)
        ours, theirs = (s.sample(ModelInput(prompt), 3, how, True).result() for s in (here, there))
        assert [s.tokens for s in theirs.sequences] == [s.tokens for s in ours.sequences]
        assert [s.stop_reason for s in theirs.sequences] == [s.stop_reason for s in ours.sequences]
        for one, other in zip(ours.sequences, theirs.sequences, strict=True):
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-5)
        assert theirs.prompt_logprobs[0] is None
        known = there.compute_logprobs(ModelInput(prompt)).result()
        assert known[1:] == theirs.prompt_logprobs[1:] == close_logprobs(ours.prompt_logprobs[1:])


def test_results_can_be_awaited_together(remote: Callable[..., Any]):
    sampler = remote().save_weights_and_get_sampling_client()

    async def all_of_them() -> list[Any]:
        futures = [sampler.sample(ModelInput(prompt), 2, params()) for prompt in PROMPTS]
        return await asyncio.gather(*(asyncio.wait_for(f.result_async(), 60) for f in futures[1:]), _of(futures[0]))

    async def _of(future: Any) -> Any:
        return await future

    assert [len(response.sequences) for response in asyncio.run(all_of_them())] == [2] * len(PROMPTS)


def test_weights_are_named_by_run_and_step_and_sampled_as_they_were(remote: Callable[..., Any]):
    """A sampler stays what it was; the next one differs; without a step in between it is the same one."""
    trainer, prompt = remote(), ModelInput([1, 2, 3])
    before = trainer.save_weights_and_get_sampling_client()
    assert trainer.save_weights_and_get_sampling_client() is before
    known = before.compute_logprobs(prompt).result()
    trainer.forward_backward(CALLS[0][2], "cross_entropy").result()
    trainer.optim_step(ADAM).result()
    after = trainer.save_weights_and_get_sampling_client()
    assert after.fingerprint != before.fingerprint == before.sample(prompt, 1, params()).result().fingerprint
    assert before.compute_logprobs(prompt).result() == known != after.compute_logprobs(prompt).result()


def test_a_saved_state_goes_on_with_the_same_bits(remote: Callable[..., Any]):
    """With the optimizer the next step is that of the run that never stopped; without it another."""
    rows, ends = CALLS[0][2], []

    def step(client: TinkerTrainingClient) -> None:
        client.forward_backward(rows, "cross_entropy").result()
        client.optim_step(ADAM).result()

    trainer = remote(seed=2)
    step(trainer)
    saved = trainer.save_state("half").result().path
    assert saved.startswith("tinker://") and trainer.save_state("half").result().path == saved
    sampled = trainer.save_weights_for_sampler("kept").result().path
    step(trainer)
    other = remote()
    for loaded in (None, other.load_state_with_optimizer, other.load_state):
        if loaded is not None:
            loaded(saved).result()
            step(other)
        ends.append((trainer if loaded is None else other).forward(rows).result().metrics["loss:sum"])
    assert ends[0] == ends[1] != ends[2]
    known = trainer.create_sampling_client(sampled).compute_logprobs(ModelInput([1, 2, 3])).result()
    assert len(known) == 3
    assert remote(None, start_from=saved).forward(rows).result().metrics["loss:sum"] != ends[0]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda c: c.forward_backward(select(data(), "weights"), "ppo"), r"datum 0 lacks 'logprobs', which ppo needs$"),
        (lambda c: c.forward_backward(select(data(), "weights"), "nope"), "loss_fn 'nope' is unknown"),
        (lambda c: c.forward_backward([], "ppo"), "data is empty"),
        (lambda c: c.forward_backward(data(), "ppo", {"temperature": 0.5}), "scores at temperature 1"),
        (
            lambda c: c.forward_backward([Datum(ModelInput([1]), {"entropy_weights": TensorData.of([1.0])})], "ppo"),
            "entropy_weights: the exact entropy needs the whole distribution",
        ),
        (lambda c: c.load_state("runs/x"), "expected|keeps its weights at tinker:// paths"),
        (lambda c: c.load_state("tinker://run/weights/none"), "refused .404.*no checkpoint tinker://run/weights/none"),
        (lambda c: c.save_state("a/b"), "checkpoint name 'a/b'"),
        (lambda c: c.create_sampling_client("tinker://run/sampler_weights/none"), "no checkpoint"),
    ],
)  # fmt: skip
def test_impossible_arguments_are_refused_at_once(remote: Callable[..., Any], call: Any, told: str):
    """As a ValueError, and the client can go on."""
    client = remote()
    with pytest.raises(ValueError, match=told):
        call(client).result()
    assert client.forward(CALLS[0][2]).result().metrics["loss:sum"] > 0


def test_mistakes_of_a_sampler_are_said_too(remote: Callable[..., Any]):
    sampler = remote().save_weights_and_get_sampling_client()
    with pytest.raises(ValueError, match=r"min_p=0\.1 is not supported"):
        sampler.sample(ModelInput([1]), 1, SamplingParams(min_p=0.1))
    with pytest.raises(ValueError, match=r"temperature 1, not 0\.7"):
        sampler.compute_logprobs(ModelInput([1]), temperature=0.7)
    with pytest.raises(ValueError, match="the prompt has 600 tokens and the model's context is 256"):
        sampler.sample(ModelInput([1] * 600), 1, params()).result()


def test_a_rejected_api_key_is_explained(remote: Callable[..., Any]):
    with pytest.raises(ValueError, match="'nobody' is not served here; served: tiny, toy"):
        remote("nobody")
    with pytest.raises(ValueError, match="must start with the 'tml-' prefix"):
        remote(api_key="mine")
    with pytest.raises(ValueError, match="unknown API key"):
        remote(api_key="tml-wrong")
    saved = remote().save_state("mine").result().path
    with pytest.raises(ValueError, match="no checkpoint"):
        remote(None, start_from=saved, api_key="tml-another-one")
    with pytest.raises(ValueError, match=r"model.lora.targets=\['lm_head'\]"):
        remote(lora=LoraConfig(targets=("lm_head",)))


def test_a_server_that_says_nan_stops_the_step():
    """Also a server that is not ours, which may answer a loss that is no number."""
    import tinker
    from tinker import types

    class FinishedFuture:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def result(self, timeout: float | None = None) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    from rlvr.clients.tinker_sdk import from_output

    rows = [{"logprobs": types.TensorData.from_numpy(np.array([-1.0, value], np.float32))} for value in (0, np.nan)]
    output = types.ForwardBackwardOutput("x", rows, {"loss:sum": 1.0})  # pyright: ignore
    with pytest.raises(NonFiniteError, match="rows") as error:
        RemoteFuture(FinishedFuture(output), from_output, 60).result()
    assert error.value.rows == [1]
    said = "Request failed: a gradient is not finite for self.request_id='1' and"
    with pytest.raises(NonFiniteError, match=r"^a gradient is not finite$"), translate_errors():
        raise tinker.RequestFailedError(said, "1", "user")  # pyright: ignore
    with pytest.raises(RuntimeError, match=r"^the Tinker server: the disk is full$"), translate_errors():
        raise tinker.RequestFailedError("Request failed: the disk is full for self.request_id='1'", "1", "server")  # pyright: ignore


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: TinkerServer) -> Path:
    """A folder to work in, with run.yaml; the server is where the SDK looks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    tokenizer = server.state.parent / "toy"
    (tmp_path / "run.yaml").write_text(RUN.replace("name: toy, lora", f"name: toy, tokenizer: {tokenizer}, lora"))
    return tmp_path


@pytest.mark.slow
def test_our_loop_learns_at_a_server_and_its_weights_evaluate_alike(here: Path, capsys: Any):
    """`rlvr train` with client=tinker: held-out completions get better (p < 0.01), `rlvr evaluate` finds the same, and
    another run starts from what it saved."""
    assert run(["train", "--config=run.yaml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"the weights at the server: {last_state(here / 'runs' / 'run')}" in said
    summary = json.loads((here / "runs" / "run" / "summary.json").read_text())
    assert summary["final"]["pass@1"]["value"] > summary["baseline"]["pass@1"]["value"] + 0.15
    assert summary["p_value"] < 0.01 and summary["weights_sha256"] == ""
    capsys.readouterr()
    assert run(["evaluate", "runs/run"]) == 0
    assert json.loads(capsys.readouterr().out)["pass@1"] == summary["final"]["pass@1"]
    for name, start in (("folder", "runs/run"), ("path", last_state(here / "runs" / "run"))):
        words = [f"start_from_checkpoint={start}", f"run.name={name}", "training.steps=1", "model.lora=null"]
        again = attempt(*words)
        assert again["baseline"]["pass@1"] == summary["final"]["pass@1"]


def last_state(folder: Path) -> str:
    (last,) = (folder / "checkpoints").glob("final-*")
    return json.loads((last / "remote.json").read_text())["path"]


def test_a_run_learns_by_a_loss_of_ones_own_at_a_server(here: Path):
    """By its name and by its path, each with its setting: one step, in which it used to break."""
    rlvr.register(Leash)
    sizes = ("training.steps=1", "evaluation.tasks=2", "evaluation.samples=1")
    for number, name in enumerate(("leash_of_tests", "own_losses:Leash", "own_losses:DoublePpo")):
        clip = ("algorithm.clip_low=0.2", "algorithm.clip_high=0.28")
        own = ("algorithm.loss.kwargs.strength=0.3",) if "eash" in name else clip
        attempt(*sizes, "algorithm.name=ppo", f"algorithm.loss.name={name}", *own, f"run.name=own-{number}")
        (row,) = [row for row in steps(here / "runs" / f"own-{number}") if row["phase"] == "rl"]
        assert row["updates"] == 1 and row["grad_norm"] > 0


def test_a_loss_without_terms_in_torch_is_refused_before_anything_is_loaded(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """No server is asked: none is there."""
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    assert run(["train", "--config=run.yaml", "algorithm.loss=own_losses:InNumpyAlone"]) == 2
    said = capsys.readouterr().err
    assert "algorithm.loss=own_losses:InNumpyAlone" in said and "torch_terms" in said
    assert not (here / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), ("algorithm.name=ppo", "algorithm.kl_coef=0.01", "algorithm.kl_in=loss")],
    ids=["reinforce", "ppo, KL in the loss"],
)
def test_a_killed_run_goes_on_where_it_was(
    here: Path, server_without_batches: TinkerServer, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
):
    """Stopped between checkpoints: the same steps as undisturbed, though the server has a new training run for them."""
    monkeypatch.setenv("TINKER_BASE_URL", server_without_batches.url)
    words = (*words, "training.steps=4", "evaluation.tasks=2", "run.checkpoint_every=2")
    calm = attempt(*words, "run.name=calm")
    with pytest.raises(RunKilled):
        attempt(*words, "run.name=torn", killed_at=3)
    torn = attempt(*words, "run.name=torn")
    assert {**torn, "seconds": 0} == {**calm, "seconds": 0}
    assert steps(here / "runs" / "torn") == steps(here / "runs" / "calm")


@pytest.mark.slow
def test_the_best_checkpoint_is_a_state_at_the_server(here: Path, capsys: Any):
    """It can be evaluated and started from, and is what `report=best` evaluates."""
    words = ("training.steps=6", "evaluation.every=1", "evaluation.interim_tasks=4", "evaluation.interim_samples=8")
    summary = attempt(*words, "evaluation.report=best", "training.control=random_reward")
    place = here / "runs" / "run" / "checkpoints" / summary["best"]["checkpoint"]
    assert json.loads((place / "remote.json").read_text())["path"].startswith("tinker://")
    assert summary["report"] == "best" and summary["best"]["step"] < 6, "the last step as the best tests less"
    capsys.readouterr()
    assert run(["evaluate", "runs/run/checkpoints/best"]) == 0
    assert json.loads(capsys.readouterr().out)["pass@1"] == summary["final"]["pass@1"]
    again = attempt(*words, "start_from_checkpoint=runs/run/checkpoints/best", "run.name=next", "model.lora=null")
    assert again["baseline"]["pass@1"] == summary["final"]["pass@1"]


def config_of(*words: str) -> Any:
    return build_config(load(None, "run.yaml", words), pytest.fail)


def test_settings_of_the_server_cannot_be_set_by_the_client(here: Path):
    with pytest.raises(ValueError, match=r"model\.device \(client=tinker: the model is at a server"):
        config_of("model.device=cpu")
    with pytest.raises(ValueError, match=r"model\.lora\.alpha"):
        config_of("model.lora.alpha=7")
    with pytest.raises(ValueError, match=r"model\.lora\.rank \(the weights of model.start_from bring"):
        config_of("model.start_from=tinker://a/weights/b", "model.lora.rank=4")
    with pytest.raises(ValueError, match=r"base_url \(client=local has no base_url, an option of skyrl, tinker"):
        config_of("client=local", "base_url=http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"client=tinker: model.name is missing"):
        config_of("model.name=null")
    assert config_of("model.client=tinker").client.name == "tinker"
    with pytest.raises(ValueError, match=r"not supported by client=tinker .it needs full logits"):
        check_supported(resolve_algorithm("ppo", entropy_coef=0.1, entropy="exact"), TinkerTrainingClient.capabilities)
    with pytest.raises(ValueError, match="client=tinker starts from tinker:// paths"):
        plan(assemble(config_of("model.start_from=.", "model.lora=null"), resolve_environment("toy")))


def test_another_temperature_is_warned_of(here: Path):
    warned: list[str] = []
    composed = load(None, "run.yaml", ["rollout.temperature=0.7"])
    folder, _ = open_run(composed, build_config(composed))
    build_job(assemble(build_config(composed)), folder, lambda text: None, warned.append)
    assert any("rollout.temperature=0.7, but client=tinker scores answers at temperature 1" in w for w in warned)


def test_the_key_is_never_written(here: Path, server: TinkerServer, monkeypatch: pytest.MonkeyPatch):
    """Typed or from the environment; and a run goes on with another key, at another address."""
    monkeypatch.setenv("MY_KEY", "tml-another-one")
    typed = load(None, "run.yaml", [f"api_key={server.key}", f"base_url={server.url}"])
    assert build_config(typed).client.api_key == server.key and server.key not in repr(build_config(typed))
    folder, _ = open_run(typed, build_config(typed))
    assert server.key not in (folder / "resolved.yaml").read_text()
    kept = load(None, "run.yaml", ["api_key=${oc.env:MY_KEY}"])
    assert build_config(kept).client.api_key == "tml-another-one"
    assert resolved_values(build_config(kept), kept)["client"]["api_key"] == "${oc.env:MY_KEY}"
    assert open_run(kept, build_config(kept)) == (folder, False)
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert server.key not in text and "tml-another-one" not in text


def test_an_unreachable_address_is_an_error_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        asked = ["client=tinker", f"base_url={address}", "model.name=x", f"run.root={tmp_path}"]
        assert run(["train", "--config-name=arithmetic", *asked]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "client=tinker, which has AdamW; use sft.optimizer.name=adamw and training.optimizer.name=adamw" in told
        asked += ["sft.optimizer.name=adamw", "training.optimizer.name=adamw"]
        assert run(["train", "--config-name=arithmetic", *asked]) == 2
    assert f"{address}: no server answers there" in " ".join(capsys.readouterr().err.split())
