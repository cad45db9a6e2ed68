"""The real `tinker` SDK against a real server: training and sampling, held against the engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.rounding import close_logprobs

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

import tinker
from tinker import types

from rlvr.core import messages
from tests.kit.tinker_model import write_model
from tests.kit.tinker_rows import ADAM, RATIO, open_service, prompt, rows, select_inputs
from tests.kit.tinker_server import TinkerServer

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]
NAME = "Qwen/Qwen3-8B"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder in which the hub name of a model is a folder, as the SDK's tokenizer look-up likes it."""
    folder = tmp_path_factory.mktemp("sdk")
    write_model(folder / NAME)
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[TinkerServer]:
    with TinkerServer({NAME: place / NAME}, place / "state", keys="tml-alice-0001") as running:
        yield running


@pytest.fixture(scope="module")
def service(server: TinkerServer) -> Iterator[Any]:
    yield from open_service(server.url, "tml-alice-0001")


@pytest.fixture(scope="module")
def trainer(service: Any) -> Any:
    return service.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()


@pytest.fixture(scope="module")
def engine(place: Path) -> Any:
    from rlvr.engine.engine import Engine
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    folder = str(place / NAME)
    return Engine(load_model(folder, load_tokenizer(folder), device="cpu", dtype="float32"))


def ours(data: list[Any], *names: str) -> list[messages.Datum]:
    """The same rows as our own messages."""
    return [
        messages.Datum(
            messages.ModelInput(row.model_input.to_ints()),
            {name: messages.TensorData.of(row.loss_fn_inputs[name].to_numpy()) for name in names},
        )
        for row in data
    ]


LOSSES: list[tuple[str, tuple[str, ...], dict[str, float]]] = [
    ("cross_entropy", ("target_tokens", "weights"), {}),
    ("importance_sampling", RATIO, {}),
    ("ppo", RATIO, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("cispo", RATIO, {"clip_high_threshold": 1.05}),
    ("dro", RATIO, {"beta": 0.05}),
    ("gspo", (*RATIO, "sequence_ratio_mask"), {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
]


@pytest.mark.parametrize(("loss", "names", "config"), LOSSES, ids=[row[0] for row in LOSSES])
def test_a_loss_equals_the_engines(
    trainer: Any, engine: Any, loss: str, names: tuple[str, ...], config: dict[str, float]
) -> None:
    """Over the wire: the log-probs and the loss of the engine in this process (a new adapter changes nothing)."""
    from rlvr.engine.engine_options import LoraConfig

    data = select_inputs(rows(), *names)
    found = trainer.forward(data, loss, config or None).result()
    policy = engine.create_policy(f"here {loss}", lora=LoraConfig(rank=4, alpha=32.0), seed=0)
    expected = engine.forward_backward(policy, ours(data, *names), loss, config, backward=False)
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    for mine, theirs in zip(expected.loss_fn_outputs, found.loss_fn_outputs, strict=True):
        assert theirs["logprobs"].to_numpy() == close_logprobs(mine["logprobs"].data)


def test_two_dimensional_targets_come_back_in_their_shape_dense_and_sparse(trainer: Any) -> None:
    torch = pytest.importorskip("torch")
    tokens = prompt(5, 6, 7, 8, 9, 10)
    targets = torch.tensor([[6, 1], [7, 2], [8, 3], [9, 4], [10, 5], [11, 6]])
    weights = torch.zeros(6, 2)
    weights[2, 0], weights[5, 1] = 1.0, 0.5
    datum = types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, "weights": weights})
    found = trainer.forward([datum], "cross_entropy").result()
    logprobs = found.loss_fn_outputs[0]["logprobs"].to_torch()
    assert logprobs.shape == (6, 2)
    assert found.metrics["loss:sum"] == pytest.approx(float(-(weights * logprobs).sum()), rel=1e-5)
    flat = types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets[:, 0], "weights": weights[:, 0]})
    column = trainer.forward([flat], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    assert torch.allclose(column[2], logprobs[2, 0], atol=1e-6)


def test_steps_learn_and_report_the_gradient_norm(service: Any) -> None:
    client = service.create_lora_training_client(base_model=NAME, rank=8, seed=1).result()
    data = select_inputs(rows(2, seed=5), "target_tokens", "weights")
    losses: list[float] = []
    for _ in range(6):  # both are sent before either is waited for
        back, step = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        losses.append(back.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.7 * losses[0]


def test_gradients_of_several_calls_add_up_and_a_forward_leaves_none(service: Any) -> None:
    data = select_inputs(rows(4, seed=6), "target_tokens", "weights")
    norms: list[float] = []
    for parts in ([data], [data[:1], data[1:]]):
        client = service.create_lora_training_client(base_model=NAME, rank=4, seed=9).result()
        client.forward(data, "cross_entropy").result()
        for part in parts:
            client.forward_backward(part, "cross_entropy")
        norms.append(client.optim_step(ADAM).result().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_batch_of_three_chunks_runs_in_its_order(trainer: Any) -> None:
    """The SDK sends the first chunk last; the results are those of the rows, in the order of the rows."""
    data = select_inputs(rows(2_100, seed=7, length=2), "target_tokens", "weights")
    found = trainer.forward(data, "cross_entropy").result()
    assert len(found.loss_fn_outputs) == 2_100
    for i in (0, 1_023, 1_024, 2_099):
        alone = trainer.forward([data[i]], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert found.loss_fn_outputs[i]["logprobs"].to_numpy() == pytest.approx(alone, abs=1e-5)


def test_a_custom_loss_has_the_gradient_of_the_loss_it_equals(service: Any) -> None:
    data = select_inputs(rows(2, seed=8), "target_tokens", "weights")

    def negative_loglikelihood(data: Any, logprobs: Any) -> Any:
        loss = sum(-(row.loss_fn_inputs["weights"].to_torch() * p).sum() for row, p in zip(data, logprobs, strict=True))
        return loss, {"nll": float(loss.detach())}

    norms: list[float] = []
    for custom in (True, False):
        client = service.create_lora_training_client(base_model=NAME, rank=4, seed=9).result()
        if custom:
            found = client.forward_backward_custom(data, negative_loglikelihood).result()
            assert found.metrics["nll"] > 0
        else:
            client.forward_backward(data, "cross_entropy").result()
        norms.append(client.optim_step(ADAM).result().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_weights_are_saved_and_loaded_with_and_without_the_optimizer(service: Any) -> None:
    data = select_inputs(rows(2, seed=10), "target_tokens", "weights")
    client = service.create_lora_training_client(base_model=NAME, rank=4, seed=2).result()

    def step(some: Any) -> float:
        some.forward_backward(data, "cross_entropy").result()
        return some.optim_step(ADAM).result().metrics["grad_norm"]

    def loss(some: Any) -> float:
        return some.forward(data, "cross_entropy").result().metrics["loss:sum"]

    for _ in range(3):
        step(client)
    path = client.save_state("three", ttl_seconds=7_200, user_metadata={"note": "kept"}).result().path
    assert path == f"tinker://{client.model_id}/weights/three"
    saved = loss(client)
    step(client)
    after = loss(client)

    whole = service.create_training_client_from_state_with_optimizer(path).result()
    bare = service.create_training_client_from_state(path).result()
    assert loss(whole) == loss(bare) == saved
    step(whole), step(bare)
    assert loss(whole) == after
    assert loss(bare) != after  # Adam starts anew
    with pytest.warns(FutureWarning, match="DEPRECATED"):
        client.load_state_with_optimizer(path).result()
    assert loss(client) == saved
    with pytest.warns(FutureWarning, match="DEPRECATED"):
        client.load_state(path).result()
    assert loss(client) == saved


def test_a_name_is_used_once_unless_overwritten(service: Any) -> None:
    client = service.create_lora_training_client(base_model=NAME, rank=4).result()
    client.save_state("once").result()
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        client.save_state("once").result()
    assert client.save_state("once", overwrite=True).result().path.endswith("/once")
    for name in ("../up", "a/b", "", "-rf", "x" * 300):
        with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)):
            client.save_state(name).result()


def test_sampling_is_from_the_weights_that_were_saved(service: Any) -> None:
    """Named, unnamed, and in flight: the log-probs of the run at the moment of saving, and later ones elsewhere."""
    data = select_inputs(rows(2, seed=11), "target_tokens", "weights")
    client = service.create_lora_training_client(base_model=NAME, rank=4, seed=2).result()
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(ADAM).result()
    tokens = data[0].model_input
    here = client.forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    path = client.save_weights_for_sampler("named").result().path
    samplers = [
        service.create_sampling_client(model_path=path).result(),
        client.create_sampling_client(path).result(),
        client.save_weights_and_get_sampling_client().result(),
        client.save_weights_and_get_sampling_client(kind="inflight").result(),
    ]
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(ADAM).result()
    # Targets are the inputs moved by one, so the trainer's log-probs are the sampler's from its second token on.
    for sampler in samplers:
        found = sampler.compute_logprobs(tokens).result()
        assert found[0] is None
        assert np.array(found[1:]) == close_logprobs(here[: len(found) - 1])
        assert sampler.get_base_model() == NAME
    base = service.create_sampling_client(base_model=NAME).result().compute_logprobs(tokens).result()
    assert np.abs(np.array(base[1:]) - here[: len(base) - 1]).max() > 1e-3


def test_samples_have_logprobs_stops_and_seeds(service: Any, place: Path, engine: Any) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    how = types.SamplingParams(max_tokens=12, seed=4, temperature=1.0, stop=[])
    one, two = (sampler.sample(prompt(), num_samples=3, sampling_params=how).result() for _ in range(2))
    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
    assert len({tuple(s.tokens) for s in one.sequences}) == 3
    assert all(len(s.tokens) == 12 and s.stop_reason == "length" for s in one.sequences)
    for sequence in one.sequences:
        whole = sampler.compute_logprobs(prompt(5, 6, 7, 8, *sequence.tokens)).result()
        assert np.array(sequence.logprobs) == close_logprobs(np.array(whole[4:]))
    same = engine.base_snapshot()
    here = messages.SamplingParams(max_tokens=12, seed=4, stop=[])
    expected = engine.sample(same, messages.ModelInput([5, 6, 7, 8]), 3, here).result()
    assert [s.tokens for s in expected.sequences] == [s.tokens for s in one.sequences]
    stop = one.sequences[0].tokens[3]
    ended = sampler.sample(
        prompt(), num_samples=1, sampling_params=types.SamplingParams(max_tokens=12, seed=4, stop=[stop])
    ).result()
    assert ended.sequences[0].stop_reason == "stop"
    assert ended.sequences[0].tokens == one.sequences[0].tokens[: one.sequences[0].tokens.index(stop) + 1]


def test_prompts_can_be_scored_with_their_best_tokens(service: Any) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    found = sampler.sample(
        prompt(5, 6, 7), num_samples=1, sampling_params=types.SamplingParams(max_tokens=2, temperature=0.0, stop=[]),
        include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
    ).result()  # fmt: skip
    assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == 3
    table = found.topk_prompt_logprobs
    assert table is not None and len(table) == 3 and not table[0]
    assert [len(row) for row in table[1:]] == [3, 3]
    best = found.sequences[0].topk_logprobs
    assert best is not None and best[0][0][0] == found.sequences[0].tokens[0]  # greedy takes the best
    assert [best[0][0][1]] == close_logprobs(found.sequences[0].logprobs[:1])


def test_chosen_tokens_are_scored_in_a_prompt_dense_and_sparse(service: Any) -> None:
    """In the shape and layout that they were asked for in; the values are those of prompts that hold these tokens."""
    torch = pytest.importorskip("torch")
    sampler = service.create_sampling_client(base_model=NAME).result()
    tokens, once = [5, 6, 7, 8, 9, 10], types.SamplingParams(max_tokens=1)
    ids = torch.full((5, 3), -1, dtype=torch.int64)
    ids[4] = torch.tensor([11, 300, 12])
    ids[1, 2] = 9
    layouts = (types.TensorData.from_torch_sparse(ids, pad_value=-1), types.TensorData.from_torch(ids))
    for sparse, target in zip((True, False), layouts, strict=True):
        assert (target.sparse_crow_indices is not None) == sparse
        response = sampler.sample(prompt(*tokens), 1, once, target_prompt_logprobs=target).result()
        found = response.target_prompt_logprobs
        assert (found.shape, found.sparse_crow_indices) == ([5, 3], target.sparse_crow_indices)
        assert found.sparse_col_indices == target.sparse_col_indices and response.prompt_logprobs is None
        table = found.to_torch()
        assert (table != 0).tolist() == (ids != -1).tolist()
        for row, column in (ids != -1).nonzero().tolist():
            instead = [*tokens[: row + 1], int(ids[row, column])]
            expected = sampler.compute_logprobs(prompt(*instead)).result()[-1]
            assert [float(table[row, column])] == close_logprobs([expected])
    both = sampler.sample(
        prompt(*tokens), 1, once, include_prompt_logprobs=True, target_prompt_logprobs=types.TensorData.from_torch(ids)
    ).result()
    assert both.prompt_logprobs[1:] == close_logprobs(sampler.compute_logprobs(prompt(*tokens)).result()[1:])
    assert both.target_prompt_logprobs.to_torch().equal(table)


def test_the_end_of_a_prompt_is_scored_alone(service: Any) -> None:
    """The SDK fails where a server has scored what comes before."""
    sampler = service.create_sampling_client(base_model=NAME).result()
    tokens = prompt(5, 6, 7, 8, 9, 10)
    whole = sampler.compute_logprobs(tokens).result()
    for last in (1, 2, 5):
        found = sampler.compute_logprobs(tokens, prompt_logprobs_last_n=last).result()
        assert found[:-last] == [None] * (6 - last) and found[-last:] == close_logprobs(whole[-last:])
    both = sampler.sample(
        tokens, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=2,
        prompt_logprobs_last_n=2, prompt_alt_tokens_k=1,
    ).result()  # fmt: skip
    assert [row is None for row in both.topk_prompt_logprobs] == [True] * 4 + [False] * 2
    assert both.prompt_alt_tokens.tokens.shape == [5, 1]  # is about the whole prompt


def test_alternatives_are_drawn_for_every_token_of_a_prompt(service: Any) -> None:
    """The SDK's own example; a log-prob is that of the prompt which has the token there."""
    sampler = service.create_sampling_client(base_model=NAME).result()
    tokens = [5, 6, 7, 8]

    def draw(count: int, **how: Any) -> Any:
        params = types.SamplingParams(max_tokens=1, **how)
        found = sampler.sample(
            prompt=prompt(*tokens), num_samples=1, sampling_params=params, prompt_alt_tokens_k=count
        ).result()
        assert found.prompt_logprobs is None
        drawn = found.prompt_alt_tokens
        assert (drawn.tokens.dtype, drawn.logprobs.dtype) == ("int64", "float32")
        return drawn.tokens.to_torch(), drawn.logprobs.to_torch()

    ids, logprobs = draw(4, temperature=1.0, seed=3)
    assert ids.shape == logprobs.shape == (3, 4)
    for place in range(3):
        instead = [*tokens[: place + 1], int(ids[place, 1])]
        expected = sampler.compute_logprobs(prompt(*instead)).result()[-1]
        assert [float(logprobs[place, 1])] == close_logprobs([expected])
    again, _ = draw(9, temperature=1.0, seed=3)
    assert again[:, :4].equal(ids) and not draw(4, seed=4)[0].equal(ids)
    best, _ = draw(3, temperature=0.0)
    assert best.equal(best[:, :1].expand(3, 3))


def test_a_sampler_travels_as_a_handle_and_as_a_pickle(
    service: Any, server: TinkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-alice-0001")
    sampler = service.create_sampling_client(base_model=NAME).result()
    here = sampler.compute_logprobs(prompt()).result()
    other = type(sampler).from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-alice-0001")
    assert other.compute_logprobs(prompt()).result() == here
    assert pickle.loads(pickle.dumps(sampler)).compute_logprobs(prompt()).result() == here


def test_a_client_knows_its_model_and_its_tokenizer(
    service: Any, trainer: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = trainer.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (NAME, True, 4)
    text, words = "What is 1 + 2?", trainer.get_tokenizer()  # of the model's folder: the server is on this machine
    assert words.decode(words.encode(text)) == text
    monkeypatch.chdir(place)  # a sampling client goes by the name alone
    sampled = service.create_sampling_client(base_model=NAME).result().get_tokenizer()
    assert sampled.encode(text) == words.encode(text)
