"""Mistakes, made with the real `tinker` SDK: each is answered within seconds, and the client that made it can go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

import tinker
from tinker import types

from tests.kit.tinker_model import write_model
from tests.kit.tinker_rows import ADAM, RATIO, open_service, prompt, rows, select_inputs
from tests.kit.tinker_server import TinkerServer

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]
NAME = "tiny"
SOON = 20.0  # seconds in which a refusal has to be there; the SDK repeats what it takes for an outage for 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    folder = tmp_path_factory.mktemp("mistakes")
    write_model(folder / "model")
    keys = "tml-alice-0001,tml-bob-00002"
    with TinkerServer({NAME: folder / "model"}, folder / "state", "--device", "cpu", keys=keys) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: TinkerServer) -> Iterator[Any]:
    yield from open_service(server.url, "tml-alice-0001")


@pytest.fixture(scope="module")
def trainer(service: Any) -> Any:
    return service.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("a token outside the vocabulary", {"target_tokens": np.full(4, 9_999)}, "9999"),
    ("not a number", {"weights": np.array([1, np.nan, 1, 1], np.float32)}, "finite|nan"),
    ("another length", {"weights": np.ones(3, np.float32)}, "weights"),
    ("a missing input", {"weights": None, "target_tokens": None}, "target_tokens"),
    ("an unknown input", {"mask": np.ones(4, np.float32)}, "mask, which no loss reads"),
    ("a setting as an input", {"clip_low_threshold": np.ones(4, np.float32)}, "loss_fn_config"),
]


@pytest.mark.parametrize(("what", "change", "said"), BAD, ids=[row[0] for row in BAD])
def test_a_bad_row_fails_at_once_and_the_run_goes_on(
    service: Any, what: str, change: dict[str, Any], said: str
) -> None:
    client = service.create_lora_training_client(base_model=NAME, rank=4).result()
    inputs = {"target_tokens": np.array([6, 7, 8, 9]), "weights": np.ones(4, np.float32), **change}
    given = {name: types.TensorData.from_numpy(value) for name, value in inputs.items() if value is not None}
    datum = types.Datum(model_input=prompt(), loss_fn_inputs=given)
    begun = time.monotonic()
    with pytest.raises(tinker.RequestFailedError, match=said) as refused:
        client.forward_backward([datum], "cross_entropy").result()
    assert refused.value.category is types.RequestErrorCategory.User
    assert time.monotonic() - begun < SOON
    good = select_inputs(rows(1), "target_tokens", "weights")
    assert client.forward_backward(good, "cross_entropy").result().metrics["loss:sum"] > 0
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


NONSENSE: list[tuple[str, dict[str, float], str]] = [
    ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "a clip of 0.2 is 0.8 and 1.2"),
    ("ppo", {"clip_low_threshold": 1.2, "clip_high_threshold": 0.8}, "0 <= low <= 1 <= high"),
    ("ppo", {"clip_low_threshold": -0.1}, "clip_low_threshold -0.1"),
    ("cispo", {"clip_high_threshold": 0.5}, "clip_high_threshold 0.5"),
    ("cispo", {"clip_high_threshold": float("nan")}, "clip_high_threshold nan"),
    ("dro", {"beta": -0.05}, "beta -0.05"),
    ("dro", {"beta": float("inf")}, "beta inf"),
    ("importance_sampling", {"beta": 0.1}, "beta has no effect on importance_sampling"),
]


@pytest.mark.parametrize(("loss", "config", "said"), NONSENSE, ids=[f"{row[0]} {row[2]}" for row in NONSENSE])
def test_settings_that_make_no_sense_are_refused(trainer: Any, loss: str, config: dict[str, float], said: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=said):
        trainer.forward_backward(select_inputs(rows(1), *RATIO), loss, config).result()


def test_a_checkpoint_lives_an_hour_or_longer(trainer: Any) -> None:
    """As the SDK says: 1 hour (3600) to 10 years."""
    for save in (trainer.save_state, trainer.save_weights_for_sampler, trainer.save_weights_external):
        with pytest.raises(tinker.RequestFailedError, match=r"ttl_seconds 600: expected 3600 \(1 hour\)"):
            save("short", ttl_seconds=600).result()


def test_unknown_losses_are_refused_and_the_unpublished_one_names_alternatives(trainer: Any) -> None:
    """With the words to add to the command of the recipe, and to that of the server."""
    data = select_inputs(rows(1), *RATIO)
    refusal = r"not published.*`loss_fn=cispo`.*`rlvr serve engine .* --alias stable_reinforce=cispo`"
    with pytest.raises(tinker.RequestFailedError, match=refusal):
        trainer.forward_backward(data, "stable_reinforce").result()
    with pytest.raises(tinker.RequestFailedError, match="no_such_loss"):
        trainer.forward_backward(data, "no_such_loss").result()


def test_mistakes_are_reported_within_seconds(service: Any, trainer: Any) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    short = types.SamplingParams(max_tokens=4)
    asked: list[tuple[str, Any]] = [
        ("not served here", lambda: service.create_lora_training_client(base_model="no/model").result()),
        ("not served here", lambda: service.create_sampling_client(base_model="no/model").result()),
        ("no checkpoint", lambda: service.create_training_client_from_state("tinker://a:train:0/weights/x").result()),
        ("no checkpoint", lambda: service.create_sampling_client(model_path="tinker://a:train:0/weights/x").result()),
        ("rank", lambda: service.create_lora_training_client(base_model=NAME, rank=100_000).result()),
        ("context|512", lambda: sampler.sample(prompt(*[5] * 600), 1, short).result()),
        ("vocabulary|9999", lambda: sampler.sample(prompt(9_999), 1, short).result()),
        ("empty|at least", lambda: sampler.sample(types.ModelInput.empty(), 1, short).result()),
        ("num_samples", lambda: sampler.sample(prompt(), 0, short).result()),
        ("temperature", lambda: sampler.sample(prompt(), 1, types.SamplingParams(temperature=-1)).result()),
        ("prompt_logprobs_last_n", lambda: sampler.compute_logprobs(prompt(), prompt_logprobs_last_n=4).result()),
        ("prompt_alt_tokens_k", lambda: sampler.sample(prompt(), 1, short, prompt_alt_tokens_k=2_000_000).result()),
        ("AdamW", lambda: trainer.optim_step(types.DimuonParams(learning_rate=0.1)).result()),
        ("learning_rate", lambda: trainer.optim_step(types.AdamParams(learning_rate=-1.0)).result()),
    ]
    for said, call in asked:
        begun = time.monotonic()
        with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=said):
            call()
        assert time.monotonic() - begun < SOON, said


def test_objects_of_another_key_read_as_not_found(server: TinkerServer, service: Any, trainer: Any) -> None:
    path = trainer.save_state("mine", overwrite=True).result().path
    bob = tinker.ServiceClient(base_url=server.url, api_key="tml-bob-00002")
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        bob.create_training_client_from_state(path).result()
    tinker.RestClient(base_url=server.url, api_key="tml-alice-0001").publish_checkpoint_from_tinker_path(path).result()
    assert bob.create_training_client_from_state(path).result().get_info().lora_rank == 4
    with pytest.raises(tinker.AuthenticationError, match="API key"):
        tinker.RestClient(base_url=server.url, api_key="tml-mallory").whoami().result()
    bob.close("success").result()
