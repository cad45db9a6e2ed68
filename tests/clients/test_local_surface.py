"""A loop written for the `tinker` SDK runs in this process by its imports: types, service client, renderers."""

from __future__ import annotations

import asyncio
import string
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.clients import local as tinker
from rlvr.clients.local import types
from rlvr.clients.local.types.tensor_data import TensorData
from rlvr.compat import model_info, renderers
from rlvr.engine.model_loading import build_model
from rlvr.engine.tokenizer import build_tokenizer
from tests.kit.rounding import close_logprobs
from tests.kit.tiny import CONFIGS

LETTERS = string.digits + "+-? .:\nUserAitn" + "ab"  # what the prompts are written with, and two more
ROWS = [("2+3?", "5"), ("4+4?", "8"), ("1+6?", "7"), ("9-7?", "2")]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with a tiny base model, as the hub would give it."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = build_tokenizer("pieces", LETTERS, end="<eos>", pad="<pad>")
    config = {**CONFIGS["qwen3"], "initializer_range": 0.1}
    model = build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")
    model.module.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


@pytest.fixture
def service(tmp_path: Path) -> tinker.ServiceClient:
    return tinker.ServiceClient(folder=tmp_path / "weights", device="cpu")


def digits(content: str, answer: str) -> float:
    """A reward that no answer misses by much: the share of digits in it."""
    return sum(c.isdigit() for c in content) / max(1, len(content))


def loop(
    service_client: Any, model_name: str, batches: int = 2, group_size: int = 8, rate: float = 5e-3
) -> list[float]:
    """The custom RL loop of the SDK's guide, on two questions a batch; mean rewards by batch."""
    training_client = service_client.create_lora_training_client(base_model=model_name, rank=32)
    tokenizer = training_client.get_tokenizer()
    renderer = renderers.get_renderer(model_info.get_recommended_renderer_name(model_name), tokenizer)
    sampling_params = types.SamplingParams(max_tokens=12, stop=renderer.get_stop_sequences(), seed=1)
    adam_params = types.AdamParams(learning_rate=rate)
    means: list[float] = []
    for batch_idx in range(batches):
        sampling_path = training_client.save_weights_for_sampler(name=f"{batch_idx:06d}").result().path
        sampling_client = service_client.create_sampling_client(model_path=sampling_path)
        datums: list[types.Datum] = []
        every: list[float] = []
        for question, answer in ROWS[2 * (batch_idx % 2) :][:2]:
            model_input = renderer.build_generation_prompt([{"role": "user", "content": question}])
            prompt_tokens = model_input.to_ints()
            result = sampling_client.sample(
                prompt=model_input, num_samples=group_size, sampling_params=sampling_params
            ).result()
            rewards: list[float] = []
            for seq in result.sequences:
                parsed, _ = renderer.parse_response(seq.tokens)
                rewards.append(digits(parsed["content"], answer))
            every += rewards
            mean_reward = sum(rewards) / len(rewards)
            advantages = [r - mean_reward for r in rewards]
            if all(a == 0 for a in advantages):
                continue
            for seq, advantage in zip(result.sequences, advantages, strict=True):
                tokens = prompt_tokens + seq.tokens
                ob_len = len(prompt_tokens) - 1
                after = len(tokens) - 1 - ob_len
                datum = types.Datum(
                    model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": TensorData.from_torch(torch.tensor(tokens[1:])),
                        "logprobs": TensorData.from_torch(torch.tensor([0.0] * ob_len + list(seq.logprobs))),
                        "advantages": TensorData.from_torch(torch.tensor([0.0] * ob_len + [advantage] * after)),
                    },
                )
                datums.append(datum)
        fwd_bwd = training_client.forward_backward(datums, loss_fn="importance_sampling")
        optim = training_client.optim_step(adam_params)
        fwd_bwd.result()
        optim.result()
        means.append(sum(every) / len(every))
    return means


@pytest.mark.slow
def test_the_guides_custom_loop_runs_and_learns(service: tinker.ServiceClient, folder: str) -> None:
    """Answers gain digits, batch by batch, under the reward that counts them."""
    means = loop(service, folder, batches=10)
    assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.1, means


def steps(client: Any, count: int, first: int = 0) -> list[float]:
    """A few optimizer steps on fixed rows; their losses."""
    losses: list[float] = []
    for i in range(first, first + count):
        tokens = [1, 2, 3, 4 + i % 3, 5]
        row = types.Datum(
            model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens[:-1])]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0, 1, 1, 1]},
        )
        losses.append(client.forward_backward([row], "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return losses


def score_prompt(sampler: Any) -> list[float]:
    return sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, 4, 5])).result()[1:]


def test_a_saved_state_goes_on_as_if_it_had_never_stopped(
    service: tinker.ServiceClient, folder: str, tmp_path: Path
) -> None:
    """In another service too, adapter and optimizer; without the optimizer the next losses differ."""
    trained = service.create_lora_training_client(folder, rank=4, seed=3)
    steps(trained, 3)
    path = trained.save_state("mid").result().path
    rest = steps(trained, 3, 3)
    other = tinker.ServiceClient(folder=tmp_path / "other", device="cpu")
    assert steps(other.create_training_client_from_state_with_optimizer(path).result(), 3, 3) == rest
    assert steps(other.create_training_client_from_state(path).result(), 3, 3)[2] != rest[2]
    assert other.get_server_capabilities().supported_models == [types.SupportedModel(folder, 256)]


def test_state_and_sampler_weights_of_one_name_lie_side_by_side(service: tinker.ServiceClient, folder: str) -> None:
    """And a sampler made of either answers as the client does."""
    client = service.create_lora_training_client(folder, rank=4)
    steps(client, 2)
    now = score_prompt(client.save_weights_and_get_sampling_client().result())
    paths = [client.save_state("final").result().path, client.save_weights_for_sampler("final").result().path]
    assert paths[0] != paths[1]
    for path in paths:
        assert score_prompt(service.create_sampling_client(model_path=path)) == close_logprobs(now)
    base = score_prompt(service.create_sampling_client(base_model=folder))
    assert base == close_logprobs(score_prompt(service.create_lora_training_client(folder).create_sampling_client()))
    assert max(abs(a - b) for a, b in zip(base, now, strict=True)) > 0.01


def test_adapters_of_one_base_share_an_engine_and_learn_apart(service: tinker.ServiceClient, folder: str) -> None:
    """Two clients trained in turns lose what each loses alone."""
    alone = steps(service.create_lora_training_client(folder, rank=4, seed=1), 3)
    first = service.create_lora_training_client(folder, rank=4, seed=1)
    second = service.create_lora_training_client(folder, rank=8, seed=2)
    mixed = [steps(client, 1, i)[0] for i in range(3) for client in (first, second)]
    assert mixed[::2] == alone
    assert first.model_id != second.model_id


@pytest.mark.parametrize(
    ("how", "layers"),
    [
        ({}, {"q_proj", "gate_proj", "lm_head"}),
        ({"train_mlp": False, "train_unembed": False}, {"q_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj"}),
    ],
    ids=["all", "attention", "mlp"],
)
def test_the_parts_to_train_are_those_asked_for(
    service: tinker.ServiceClient, folder: str, how: dict[str, Any], layers: set[str]
) -> None:
    client = service.create_lora_training_client(folder, rank=2, **how)
    found = {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for name in client.policy.parameters}
    assert found & {"q_proj", "gate_proj", "lm_head"} == layers
    info = client.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 2, folder)


def test_the_async_methods_give_the_results_of_the_sync_ones(service: tinker.ServiceClient, folder: str) -> None:
    """Clients and futures are awaited; a training call and the step after it keep their order."""

    async def run() -> tuple[list[float], Any, Any]:
        client = await service.create_lora_training_client_async(folder, rank=4, seed=1)
        assert await client is client
        row = types.Datum(types.ModelInput([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1, 1, 1]})
        losses: list[float] = []
        for _ in range(2):
            fwd_bwd = await client.forward_backward_async([row], "cross_entropy")
            optim = await client.optim_step_async(types.AdamParams(1e-2))
            losses.append((await fwd_bwd.result_async()).metrics["loss:sum"])
            await optim
        sampler = await client.save_weights_and_get_sampling_client_async("now")
        params = types.SamplingParams(max_tokens=4, seed=2, stop=[])
        many = await asyncio.gather(*(sampler.sample_async(types.ModelInput([1, i]), 2, params) for i in range(4)))
        return losses, many, await sampler.compute_logprobs_async(types.ModelInput([1, 2]))

    losses, many, logprobs = asyncio.run(run())
    assert losses[1] < losses[0]
    assert [len(s.tokens) for answer in many for s in answer.sequences] == [4] * 8
    assert logprobs[0] is None and logprobs[1] < 0


def test_values_come_in_as_the_sdk_takes_them() -> None:
    """Chunks or ints; lists, numpy, torch of any float type, rows in CSR; known names decide between int and float."""
    given = types.ModelInput(chunks=[types.EncodedTextChunk([1, 2]), types.EncodedTextChunk(tokens=[3])])
    assert given == types.ModelInput.from_ints(tokens=[1, 2]).append(types.EncodedTextChunk([3]))
    assert given.append_int(4).to_ints() == [1, 2, 3, 4]
    assert (types.ModelInput.empty().length, given.length, given.chunks[0].length) == (0, 3, 3)
    square = types.TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])
    assert (square.tolist(), square.shape, square.dtype) == ([[1, 2], [3, 4]], [2, 2], "int64")
    sparse = types.TensorData([5.0, 7.0], "float32", [2, 3], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[2, 0])
    assert sparse.tolist() == [[0, 0, 5], [7, 0, 0]]
    inputs: dict[str, Any] = {
        "target_tokens": [1, 2, 3],
        "weights": [0, 1, 1],
        "advantages": torch.tensor([0.5, 1.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        "logprobs": np.zeros(3, dtype=np.float64),
        "mine": np.array([1, 2, 3], dtype=np.int32),
    }
    row = types.Datum(model_input=given, loss_fn_inputs=inputs)
    assert {name: tensor.dtype for name, tensor in row.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
        "advantages": "float32",
        "logprobs": "float32",
        "mine": "int64",
    }
    assert row.loss_fn_inputs["advantages"].tolist() == [0.5, 1.0, 2.0]


def test_the_sdks_own_objects_are_taken_too() -> None:
    """A row made with the real SDK's types, sparse targets included, is the same row here."""
    sdk = pytest.importorskip("tinker", reason="the SDK is the other side of this comparison")
    theirs = sdk.Datum(
        model_input=sdk.ModelInput.from_ints([1] * 8), loss_fn_inputs={"target_tokens": torch.eye(8, dtype=torch.int64)}
    )
    assert theirs.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    ours = types.Datum(types.ModelInput(chunks=theirs.model_input.chunks), theirs.loss_fn_inputs)
    assert ours.model_input.to_ints() == [1] * 8
    assert ours.loss_fn_inputs["target_tokens"].tolist() == np.eye(8).tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: types.ModelInput([1], chunks=[]), "either tokens or chunks"),
        (lambda: types.ModelInput(chunks=[b"image"]), "a chunk of kind bytes; only text"),
        (lambda: types.TensorData([1], "int8"), "dtype='int8', expected float32 or int64"),
        (lambda: types.TensorData([1, 2], "int64", [3]), r"2 values do not fill the shape \[3\]"),
        (lambda: types.TensorData(["a"]), "expected a rectangular array of numbers"),
        (lambda: types.TensorData([1.0], "float32", [1, 2], [0, 2], [0]), "are not a CSR matrix"),
        (lambda: types.Datum(types.ModelInput([1]), {"weights": [[1], [2, 3]]}), r"loss_fn_inputs\['weights'\]"),
    ],
)
def test_invalid_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_errors_name_the_expected_argument(service: tinker.ServiceClient, folder: str, tmp_path: Path) -> None:
    client = service.create_lora_training_client(folder, rank=2)
    for wrong, message in (
        (lambda: service.create_sampling_client(), "give either model_path"),
        (lambda: service.create_sampling_client(model_path=str(tmp_path)), "no complete checkpoint at"),
        (lambda: service.create_training_client_from_state("nowhere"), "no complete checkpoint at nowhere"),
        (lambda: service.create_lora_training_client(str(tmp_path / "none")), "no such folder"),
        (lambda: client.save_state("../up"), "checkpoint name"),
        (lambda: client.save_state("a", ttl_seconds=3600), "folders on this disk do not expire"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    path = client.save_weights_for_sampler("b").result().path
    with pytest.raises(ValueError, match="optimizer"):
        service.create_training_client_from_state_with_optimizer(path)
    with pytest.raises(ValueError, match="exists already"):
        client.save_weights_for_sampler("b", overwrite=False)


def test_the_cookbooks_completer_samples_in_process(service: tinker.ServiceClient, folder: str) -> None:
    """It reads a sequence's id and the tokens a service did not charge for, which nothing here has."""
    completers = pytest.importorskip("tinker_cookbook.completers", reason="tinker-cookbook is not installed")
    sampler = service.create_sampling_client(base_model=folder)
    prompt = types.ModelInput.from_ints(sampler.get_tokenizer().encode("2+3?"))
    said = asyncio.run(completers.TinkerTokenCompleter(sampler, max_tokens=3)(prompt, stop=["\n"]))
    assert 1 <= len(said.tokens) == len(said.logprobs) <= 3
    assert (said.sequence_id, said.prompt_cache_hit_tokens) == (None, 0)


def test_two_threads_that_ask_for_one_base_load_it_once(service: tinker.ServiceClient, folder: str) -> None:
    made: list[Any] = []
    threads = [
        threading.Thread(target=lambda: made.append(service.create_lora_training_client(folder, rank=2)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({id(client._engine) for client in made}) == 1
    assert len({client.model_id for client in made}) == 3
