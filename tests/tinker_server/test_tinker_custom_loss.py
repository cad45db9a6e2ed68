"""`forward_backward_custom` of the real SDK, with losses that run in the client and on the server.

The gradient is checked without reading it: a loss and the cross-entropy with its slopes as weights have opposite
gradients, which add up to nothing.
"""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

import orjson
import tinker
import torch
import torch.nn.functional as F
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph

from tests.kit.tinker_model import write_model
from tests.kit.tinker_rows import ADAM, open_service
from tests.kit.tinker_server import TinkerServer

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]
NAME, ALICE, BOB = "tiny", "tml-alice-0001", "tml-bob-00002"
ROUNDING = 1e-5  # of a gradient in float32 against itself: sums of tens of terms
TOKENS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16, 17, 18]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    folder = tmp_path_factory.mktemp("custom")
    write_model(folder / "model")
    options = ("--device", "cpu")
    with TinkerServer({NAME: folder / "model"}, folder / "state", *options, keys=f"{ALICE},{BOB}") as running:
        yield running


@pytest.fixture(scope="module")
def service(server: TinkerServer) -> Iterator[Any]:
    yield from open_service(server.url, ALICE)


def make_trainer(service: Any) -> Any:
    return service.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()


def tensor(values: Any, dtype: Any = np.float32) -> Any:
    return types.TensorData.from_numpy(np.asarray(values, dtype))


def datum(tokens: list[int], **inputs: Any) -> Any:
    given = {"target_tokens": tensor(tokens[1:], np.int64), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def policy_rows() -> list[Any]:
    """Datums with advantages, log-probs of a sampler, a mask and a number."""
    rng = np.random.default_rng(1)
    return [
        datum(
            row,
            advantages=tensor(rng.normal(size=len(row) - 1)),
            old=tensor(-5.6 + rng.uniform(-1, 1, len(row) - 1)),
            mask=tensor(np.arange(len(row) - 1) > 0),
            scale=tensor(0.5 + i),
        )
        for i, row in enumerate(TOKENS)
    ]


def clipped(logprobs: Any, advantages: Any, old: Any, mask: Any, scale: Any) -> Any:
    """PPO's loss with a mean over the mask, a pull to the sampler and a number of the datum."""
    ratio = torch.exp(logprobs - old)
    bounded = torch.clamp(ratio, 0.8, 1.2)
    terms = -torch.minimum(ratio * advantages, bounded * advantages)
    pull = F.softplus(logprobs - old).mean() + (logprobs - old)[mask > 0].pow(2).sum() / math.sqrt(logprobs.shape[0])
    loss = scale * (terms * mask).sum() / mask.sum().clamp(min=1.0) + 0.1 * pull
    return loss, {"custom/ratio:mean": (ratio * mask).sum() / mask.sum(), "custom/tokens:sum": mask.sum()}


RANKS = {"logprobs": 1, "advantages": 1, "old": 1, "mask": 1, "scale": 0}


@pytest.fixture(scope="module")
def handle(service: Any) -> Any:
    """The SDK makes a loss once in a session."""
    return service.create_custom_loss(clipped, input_ranks=RANKS).result()


def run_in_client(trainer: Any, data: list[Any], handle: Any) -> Any:
    """What the SDK does with a handle that the server does not run."""
    import dataclasses

    return trainer.forward_backward_custom(data, dataclasses.replace(handle, loss_id=None)).result()


def opposite(data: list[Any], logprobs: list[Any], loss: Callable[..., Any], names: list[str]) -> list[Any]:
    """The cross-entropy whose gradient is that of the loss with the other sign; cross-entropy's slopes are -weights."""
    made: list[Any] = []
    for row, p in zip(data, logprobs, strict=True):
        leaf = torch.tensor(p, requires_grad=True)
        loss(leaf, *(row.loss_fn_inputs[name].to_torch() for name in names))[0].backward()
        inputs = {"target_tokens": row.loss_fn_inputs["target_tokens"], "weights": tensor(leaf.grad.numpy())}
        made.append(types.Datum(model_input=row.model_input, loss_fn_inputs=inputs))
    return made


def norm_of(trainer: Any) -> float:
    return trainer.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]


def test_the_example_of_the_sdk_runs_in_the_client(service: Any) -> None:
    """The two examples in the docstring of `TrainingClient.forward_backward_custom`, and the gradient of the first."""

    def custom_loss(data: Any, logprobs_list: Any) -> Any:
        loss = torch.mean(torch.stack([torch.mean(lp) for lp in logprobs_list]))
        metrics = {"custom_metric": loss.item()}
        return loss, metrics

    client, data = make_trainer(service), [datum(row) for row in TOKENS]
    found = client.forward_backward_custom(data, custom_loss).result()
    logprobs = [out["logprobs"].to_numpy() for out in found.loss_fn_outputs]
    mean = np.mean([p.mean() for p in logprobs])
    assert found.metrics["custom_metric"] == found.metrics["loss:sum"] == pytest.approx(mean, rel=1e-6)
    norm = norm_of(client)
    client.forward_backward_custom(data, custom_loss)
    weights = [np.full(len(p), 1 / (len(TOKENS) * len(p))) for p in logprobs]  # d mean / dp, as slopes to undo
    client.forward_backward(
        [datum(row, weights=tensor(weight)) for row, weight in zip(TOKENS, weights, strict=True)], "cross_entropy"
    )
    assert norm > 1e-3 and norm_of(client) < ROUNDING * norm

    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([1]),
            loss_fn_inputs={
                "target_tokens": [[2, 3]],
                "target_distribution": types.TensorData(data=[0.25, 0.75], dtype="float32", shape=[1, 2]),
            },
        )
    ]

    def distribution_loss(data: Any, logprobs_list: Any) -> Any:
        loss = sum(
            -(datum.loss_fn_inputs["target_distribution"].to_torch() * logprobs).sum()
            for datum, logprobs in zip(data, logprobs_list, strict=True)
        )
        return loss, {}

    found = client.forward_backward_custom(data, distribution_loss).result()
    (p,) = [out["logprobs"].to_numpy() for out in found.loss_fn_outputs]
    assert p.shape == (1, 2)
    assert found.metrics["loss:sum"] == pytest.approx(-(0.25 * p[0, 0] + 0.75 * p[0, 1]), rel=1e-6)


def test_the_example_of_create_custom_loss_runs_on_the_server(service: Any) -> None:
    """That of the docstring; -sum w p, by hand."""

    def neg_ll(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/neg_ll:sum": loss}

    handle = service.create_custom_loss(neg_ll, input_ranks={"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None
    client, weights = make_trainer(service), [np.linspace(0, 1, len(row) - 1) for row in TOKENS]
    data = [datum(row, weights=tensor(weight)) for row, weight in zip(TOKENS, weights, strict=True)]
    found = client.forward_backward_custom(data, handle).result()
    expected = -sum(
        (out["logprobs"].to_numpy() * w).sum() for out, w in zip(found.loss_fn_outputs, weights, strict=True)
    )
    assert found.metrics["loss:sum"] == found.metrics["custom/neg_ll:sum"] == pytest.approx(expected, rel=1e-6)
    norm = norm_of(client)
    named = client.forward_backward(data, "cross_entropy").result()
    assert norm_of(client) == pytest.approx(norm, rel=1e-6)
    for one, other in zip(named.loss_fn_outputs, found.loss_fn_outputs, strict=True):  # equal but for rounding
        assert one["logprobs"].data == pytest.approx(other["logprobs"].data, rel=1e-6)
    assert client.forward(data, "custom", {"loss_id": handle.loss_id}).result().metrics == found.metrics
    with pytest.raises(tinker.RequestFailedError, match="no gradients"):
        norm_of(client)  # `forward` left none


def test_a_loss_on_the_server_is_that_of_the_client(service: Any, handle: Any) -> None:
    """Value, metrics and gradient: of the server, of the SDK's own path in the client, and by torch here."""
    client, data = make_trainer(service), policy_rows()
    found = client.forward_backward_custom(data, handle).result()
    norm = norm_of(client)
    there = run_in_client(client, data, handle)
    assert norm_of(client) == pytest.approx(norm, rel=1e-6)
    there.metrics.pop("surrogate_loss:sum")
    assert found.metrics.keys() == there.metrics.keys() == {"loss:sum", "custom/ratio:mean", "custom/tokens:sum"}
    for name, value in found.metrics.items():
        assert value == pytest.approx(there.metrics[name], rel=1e-6), name
    assert found.metrics["custom/tokens:sum"] == 3 + 1 + 4
    logprobs = [out["logprobs"].to_numpy() for out in found.loss_fn_outputs]
    client.forward_backward_custom(data, handle)
    client.forward_backward(opposite(data, logprobs, clipped, ["advantages", "old", "mask", "scale"]), "cross_entropy")
    assert norm > 1e-2 and norm_of(client) < ROUNDING * norm


def test_a_distribution_of_targets_has_a_loss_of_rank_two(service: Any) -> None:
    def kl(logprobs: Any, teacher: Any) -> Any:
        loss = (teacher.exp() * (teacher - logprobs)).sum(dim=-1).mean()
        return loss, {"custom/kl:mean": loss}

    handle = service.create_custom_loss(kl, input_ranks={"logprobs": 2, "teacher": 2}).result()
    client = make_trainer(service)
    targets = np.array([[6, 7], [7, 8], [8, 9]])
    teacher = np.log(np.array([[0.5, 0.25], [0.9, 0.1], [0.2, 0.6]], np.float32))
    row = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": tensor(targets, np.int64), "teacher": tensor(teacher)},
    )
    found = client.forward_backward_custom([row], handle).result()
    p = found.loss_fn_outputs[0]["logprobs"].to_numpy()
    expected = (np.exp(teacher) * (teacher - p)).sum(-1).mean()
    assert found.metrics["loss:sum"] == found.metrics["custom/kl:mean"] == pytest.approx(expected, rel=1e-5)
    norm = norm_of(client)
    client.forward_backward_custom([row], handle)
    client.forward_backward(opposite([row], [p], kl, ["teacher"]), "cross_entropy")
    assert norm > 1e-3 and norm_of(client) < ROUNDING * norm


def test_a_loss_outlives_a_restart_with_the_requests_that_name_it(
    service: Any, server: TinkerServer, handle: Any
) -> None:
    client, data = make_trainer(service), policy_rows()
    first = client.forward_backward_custom(data, handle).result()
    server.kill()
    server.start()
    norm = norm_of(client)  # of the gradient that the log restored
    again = client.forward_backward_custom(data, handle).result()
    assert again.metrics == first.metrics and norm_of(client) == norm


def losses() -> dict[str, tuple[Any, dict[str, int], str]]:
    """Losses that fail on the server, with what the error says."""

    def nothing(logprobs: Any, old: Any) -> Any:
        return old.sum(), {}

    def detached(logprobs: Any) -> Any:
        return logprobs.detach().sum(), {}

    def endless(logprobs: Any) -> Any:
        return (logprobs.sum() * 1e38 * 1e38), {}

    def huge(logprobs: Any) -> Any:
        return logprobs.repeat(10_000_000).sum(), {}

    def tower(logprobs: Any) -> Any:
        return logprobs.sum() * (logprobs.shape[0] ** 100_000_000), {}

    def table(logprobs: Any) -> Any:
        return torch.zeros(logprobs.shape[0] * 1_000_000_000_000, device=logprobs.device).sum() + logprobs.sum(), {}

    def wide(logprobs: Any, old: Any) -> Any:
        return logprobs * old, {}

    def unequal(logprobs: Any, old: Any) -> Any:
        return (logprobs * old[1:]).sum(), {}

    return {
        "does not read the log-probs": (nothing, {"logprobs": 1, "old": 1}, "does not depend on logprobs"),
        "detaches them": (detached, {"logprobs": 1}, "does not depend on logprobs"),
        "is not finite": (endless, {"logprobs": 1}, "not finite"),
        "repeats too often": (huge, {"logprobs": 1}, "elements would be taken"),
        "makes a number too large": (tower, {"logprobs": 1}, "math range error|too large"),
        "makes a tensor too large": (table, {"logprobs": 1}, "elements would be taken"),
        "returns no number": (wide, {"logprobs": 1, "old": 1}, "without axes"),
        "adds unequal shapes": (unequal, {"logprobs": 1, "old": 1}, r"node 'mul' \(operator.mul\) for datum 0"),
    }


@pytest.mark.parametrize("what", losses())
def test_a_loss_that_fails_says_why_and_the_run_goes_on(service: Any, what: str) -> None:
    loss, ranks, said = losses()[what]
    handle = service.create_custom_loss(loss, input_ranks=ranks).result()
    client, data = make_trainer(service), policy_rows()
    begun = time.monotonic()
    with pytest.raises(tinker.RequestFailedError, match=said) as refused:
        client.forward_backward_custom(data, handle).result()
    assert refused.value.category is types.RequestErrorCategory.User and time.monotonic() - begun < 20
    client.forward_backward([datum(TOKENS[0], weights=tensor(np.ones(4)))], "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_operations_that_are_not_here_are_named_with_what_to_do(service: Any) -> None:
    def random(logprobs: Any) -> Any:
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    def strided(logprobs: Any) -> Any:
        return logprobs.as_strided((1_000_000, 1_000_000), (0, 0)).sum(), {}

    for loss, name in ((random, "torch.rand_like"), (strided, "as_strided")):
        with pytest.raises(tinker.BadRequestError, match=rf"{name}.*forward_backward_custom, which then runs it in"):
            service.create_custom_loss(loss, input_ranks={"logprobs": 1}).result()


def test_a_loss_belongs_to_its_session(service: Any, server: TinkerServer, handle: Any) -> None:
    """Its id means nothing to another session, be it the same client's or another's."""
    for key in (ALICE, BOB):
        for other in open_service(server.url, key):
            client = make_trainer(other)
            for loss_id in (handle.loss_id, f"{handle.loss_id}0"):
                with pytest.raises(tinker.RequestFailedError, match="is unknown in this session"):
                    client.forward_backward(policy_rows(), "custom", {"loss_id": loss_id}).result()
            for config in (None, {"loss_id": 1.0}, {"loss_id": handle.loss_id, "beta": 1.0}):
                with pytest.raises(tinker.RequestFailedError, match="expected its loss_id alone"):
                    client.forward_backward(policy_rows(), "custom", config).result()
            client.forward_backward([datum(TOKENS[0], weights=tensor(np.ones(4)))], "cross_entropy").result()


def post(server: TinkerServer, body: Any, key: str = ALICE) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{server.url}/api/v1/create_custom_loss",
        body if isinstance(body, bytes) else orjson.dumps(body),
        {"Content-Type": "application/json", "X-API-Key": key},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sum_graph(*between: dict[str, Any], loss: str = "sum") -> list[dict[str, Any]]:
    """The nodes of `logprobs.sum()`, with others before the output."""
    ref = {"ref": "logprobs"}
    return [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "sum", "target": "sum", "args": [ref]},
        *between,
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": loss}, {"dict": {}}]}]},
    ]


def call(target: str, *args: Any, op: str = "call_function", name: str = "x", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def nested(depth: int) -> Any:
    return {"tuple": [nested(depth - 1)]} if depth else 1


LOGPROBS = {"ref": "logprobs"}
HOSTILE: dict[str, tuple[list[Any], str]] = {
    "eval": (sum_graph(call("builtins.eval", "1")), "is not a function that this server computes"),
    "os.system": (sum_graph(call("os.system", "true")), "os.system"),
    "a module of torch": (sum_graph(call("torch.hub.load", "x")), "torch.hub.load"),
    "a private name": (sum_graph(call("torch.nn.functional.__dict__")), "__dict__"),
    "torch.save": (sum_graph(call("torch.save", LOGPROBS, "x")), "torch.save"),
    "an attribute": (sum_graph(call("getattr", LOGPROBS, "__class__")), "attributes"),
    "a captured tensor": (sum_graph(call("w", op="get_attr")), "a tensor from outside"),
    "a module": (sum_graph(call("linear", op="call_module")), "a module"),
    "a later node": (sum_graph(call("torch.exp", {"ref": "output"})), "no earlier node of the graph"),
    "itself": (sum_graph(call("torch.exp", {"ref": "x"})), "no earlier node of the graph"),
    "a name twice": (sum_graph(call("torch.exp", LOGPROBS, name="sum")), "occurs twice"),
    "a GPU": (sum_graph(call("torch.zeros", 1, device={"device": "cuda:0"})), "an object with device"),
    "a GPU as text": (sum_graph(call("to", LOGPROBS, "cuda:0", op="call_method")), "the text 'cuda:0'"),
    "out": (sum_graph(call("torch.exp", LOGPROBS, out=LOGPROBS)), "the keyword arguments out are not supported"),
    "in place": (sum_graph(call("torch.nn.functional.relu", LOGPROBS, inplace=True)), "inplace=True"),
    "too deep": (sum_graph(call("torch.sum", nested(40))), "levels deep"),
    "an unknown form": (sum_graph(call("torch.sum", {"code": "x"})), "an object with code"),
    "a huge integer": (sum_graph(call("torch.sum", 2**63 - 1)), ""),
    "no output": (sum_graph()[:-1], "no output"),
    "an unknown loss": (sum_graph(loss="y"), "no node of the graph"),
    "nothing": ([], "no output"),
    "a text as a node": (["x"], "node 0"),
    "too many nodes": (sum_graph(*(call("torch.exp", LOGPROBS, name=f"n{i}") for i in range(4_000))), "at most 4,000"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_graph_is_refused_at_once(service: Any, server: TinkerServer, what: str) -> None:
    nodes, said = HOSTILE[what]
    body = {
        "session_id": service.holder.get_session_id(), "custom_loss_seq_id": 1_000 + list(HOSTILE).index(what),
        "name": "hostile", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": nodes},
    }  # fmt: skip
    begun = time.monotonic()
    status, answer = post(server, body)
    assert (status, time.monotonic() - begun < 10) == (400 if said else 200, True), answer
    assert said in answer
    if said:
        assert "hostile" in answer and len(answer) < 2_000


def test_a_graph_of_a_million_nodes_leaves_the_server_responsive(service: Any, server: TinkerServer) -> None:
    """413 for 100 MB, 400 for what is short enough to be read, and others are answered meanwhile."""
    import threading

    head = {"session_id": service.holder.get_session_id(), "custom_loss_seq_id": 5_000, "name": "endless"}
    node = orjson.dumps(call("torch.exp", LOGPROBS))
    for count, expected, said in ((1_000_000, (413,), "bytes"), (40_000, (400,), "lists, objects and fields")):
        many = b",".join([node] * count)
        body = b'{"graph":{"format":1,"nodes":[%b]},"inputs":[{"name":"logprobs","rank":1}],%b' % (
            many, orjson.dumps(head)[1:],
        )  # fmt: skip
        found: list[tuple[int, str]] = []
        sending = threading.Thread(target=lambda body=body, found=found: found.append(post(server, body)))
        sending.start()
        waits: list[float] = []
        while sending.is_alive() or not waits:
            begun = time.monotonic()
            with urllib.request.urlopen(f"{server.url}/api/v1/healthz", timeout=10) as answer:
                assert answer.status == 200
            waits.append(time.monotonic() - begun)
        assert found[0][0] in expected and said in found[0][1]


def test_another_tenants_session_is_unknown(service: Any, server: TinkerServer, handle: Any) -> None:
    graph = encode_graph(handle).model_dump()
    inputs = [{"name": one.name, "rank": one.rank} for one in handle.inputs]
    body = {"session_id": handle.session_id, "custom_loss_seq_id": 0, "name": "x", "inputs": inputs, "graph": graph}
    assert post(server, body, BOB)[0] == 410
    status, answer = post(server, body)
    assert status == 400 and "names another loss" in answer  # 0 was the first loss of this session
    for field, value in (
        ("inputs", []),
        ("inputs", [{"name": "old", "rank": 1}]),
        ("inputs", [{"name": "logprobs", "rank": 7}]),
        ("graph", []),
        ("custom_loss_seq_id", -1),
        ("name", "x" * 10_000),
    ):
        assert post(server, {**body, "custom_loss_seq_id": 900, field: value})[0] == 400
