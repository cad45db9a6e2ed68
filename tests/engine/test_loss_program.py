"""Custom losses as graphs of known operations: values by hand, gradients, and what they may take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.algorithms.loss_graph import (
    FUNCTIONS,
    METHODS,
    MODULES,
    NUMBER_FUNCTIONS,
    OPERATORS,
    TENSOR_OPERATIONS,
    is_function_known,
    read_loss_graph,
)
from rlvr.core.messages import Datum, ModelInput, NonFiniteError
from rlvr.core.tensors import TensorData
from rlvr.engine import loss_program
from rlvr.engine.loss_program import LossProgram, find_function

P = np.log(np.array([0.5, 0.25, 0.125], np.float32))


def node(target: str, *args: Any, name: str = "x", op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def method(target: str, *args: Any, name: str = "x", **kwargs: Any) -> dict[str, Any]:
    return node(target, *args, name=name, op="call_method", **kwargs)


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def program(
    *calls: dict[str, Any], inputs: dict[str, int] | None = None, loss: str = "x", **metrics: str
) -> LossProgram:
    ranks = {"logprobs": 1, **(inputs or {})}
    named = {f"custom/{name.replace('_', ':')}": ref(value) for name, value in metrics.items()}
    nodes = [
        *({"op": "placeholder", "name": name, "target": name} for name in ranks),
        *calls,
        node("output", {"tuple": [ref(loss), {"dict": named}]}, name="output", op="output"),
    ]
    given = [{"name": name, "rank": rank} for name, rank in ranks.items()]
    return LossProgram(read_loss_graph("mine", given, {"format": 1, "nodes": nodes}))


def row(**inputs: Any) -> Datum:
    return Datum(ModelInput([1, 2, 3]), {name: TensorData(np.asarray(value)) for name, value in inputs.items()})


A = np.array([1.0, -2.0, 0.0], np.float32)
R = (ref("logprobs"), ref("a"))
# The nodes of a loss of P and A with its value and slopes, by hand: exp(P) is 1/2, 1/4, 1/8.
BY_HAND: dict[str, tuple[list[dict[str, Any]], float, list[float]]] = {
    "a sum of products": (
        [node("operator.mul", *R, name="y"), method("sum", ref("y"))],
        math.log(0.5) - 2 * math.log(0.25),
        [1, -2, 0],
    ),
    "a mean of exponentials": (
        [node("torch.exp", ref("logprobs"), name="y"), method("mean", ref("y"))],
        0.875 / 3,
        [0.5 / 3, 0.25 / 3, 0.125 / 3],
    ),
    "a clip": (
        [
            method("exp", ref("logprobs"), name="r"),
            node("torch.clamp", ref("r"), 0.2, {"float": "inf"}, name="c"),
            method("sum", ref("c")),
        ],
        0.5 + 0.25 + 0.2,
        [0.5, 0.25, 0],
    ),
    "a mask": (
        [
            node("operator.gt", ref("a"), 0, name="m"),
            node("operator.getitem", ref("logprobs"), ref("m"), name="y"),
            method("sum", ref("y")),
        ],
        math.log(0.5),
        [1, 0, 0],
    ),
    "a slice and a shape": (
        [
            node("getattr", ref("logprobs"), "shape", name="s"),
            node("operator.getitem", ref("s"), 0, name="n"),
            node("math.sqrt", ref("n"), name="q"),
            node("operator.getitem", ref("logprobs"), {"slice": [1, None, None]}, name="y"),
            method("sum", ref("y"), name="z"),
            node("operator.truediv", ref("z"), ref("q")),
        ],
        (math.log(0.25) + math.log(0.125)) / math.sqrt(3),
        [0, 1 / math.sqrt(3), 1 / math.sqrt(3)],
    ),
    "log-sigmoid, as fx names it": (
        [node("torch._C._nn.log_sigmoid", ref("logprobs"), name="y"), node("torch.sum", ref("y"))],
        sum(math.log(p / (1 + p)) for p in (0.5, 0.25, 0.125)),  # sigmoid(log p) = p / (1 + p)
        [1 / 1.5, 1 / 1.25, 1 / 1.125],
    ),
    "a product in einsum": (
        [node("torch.functional.einsum", "i,i->", *R)],
        math.log(0.5) - 2 * math.log(0.25),
        [1, -2, 0],
    ),
    "a new tensor of a dtype": (
        [
            node("torch.ones", 3, dtype={"dtype": "float64"}, name="o"),
            node("operator.matmul", ref("o"), ref("d")),
        ],
        -math.log(2) * 6,
        [1, 1, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BY_HAND)
def test_a_graph_is_its_formula(what: str) -> None:
    calls, value, slopes = BY_HAND[what]
    if "dtype" in what:
        calls = [method("to", ref("logprobs"), {"dtype": "float64"}, name="d"), *calls]
    found = program(*calls, inputs={"a": 1}).evaluate([row(a=A)], [P])
    assert found.metrics["loss:sum"] == pytest.approx(value, rel=1e-6)
    assert found.gradients[0] == pytest.approx(np.array(slopes), rel=1e-6)


def test_losses_and_metrics_add_up_over_datums() -> None:
    """Sums add up, means are of the datums."""
    made = program(
        method("sum", ref("logprobs"), name="s"),
        node("operator.mul", ref("s"), ref("k")),
        inputs={"k": 0}, n_sum="k", n_mean="k",
    )  # fmt: skip
    found = made.evaluate([row(k=[2.0]), row(k=[4.0])], [P, P])  # on the wire a number has one axis
    assert found.metrics["custom/n:sum"] == 6 and found.metrics["custom/n:mean"] == 3
    assert found.metrics["loss:sum"] == pytest.approx(6 * -6 * math.log(2))
    assert [gradient.tolist() for gradient in found.gradients] == [[2.0] * 3, [4.0] * 3]


def test_every_name_that_is_allowed_exists() -> None:
    for name in FUNCTIONS:
        for module, prefix in MODULES.items():
            assert is_function_known(f"{module}.{prefix}{name}") and callable(
                find_function("call_function", f"{module}.{prefix}{name}")
            )
    for module, names in (("operator", OPERATORS), ("math", NUMBER_FUNCTIONS)):
        assert all(callable(find_function("call_function", f"{module}.{name}")) for name in names)
    for name in METHODS:
        assert callable(find_function("call_method", name)), name
    assert TENSOR_OPERATIONS <= FUNCTIONS & METHODS


def test_no_allowed_name_changes_a_tensor_draws_or_leaves_torch() -> None:
    """In-place methods end in an underscore; the rest is by name."""
    dangerous = ("load", "save", "rand", "bernoulli", "dropout", "multinomial", "normal", "item", "tolist", "numpy",
                 "as_strided", "set", "apply", "map", "compile", "cuda", "data_ptr", "storage", "backward", "empty",
                 "open", "import", "eval", "exec", "getattr")  # fmt: skip
    for name in FUNCTIONS | METHODS | OPERATORS | NUMBER_FUNCTIONS:
        assert name not in dangerous and not name.startswith("_")
        assert not name.endswith("_") or name in ("and_", "or_")


TOO_MUCH: dict[str, list[dict[str, Any]]] = {
    "repeat": [method("repeat", ref("logprobs"), 1 << 40)],
    "expand": [method("expand", ref("logprobs"), 1 << 30, 3)],
    "outer": [method("repeat", ref("logprobs"), 9_999, name="y"), node("torch.outer", ref("y"), ref("y"))],
    "einsum": [
        method("repeat", ref("logprobs"), 9_999, name="y"),
        node("torch.functional.einsum", "i,j->", ref("y"), ref("y")),
    ],
    "matmul": [
        node("torch.ones", 1_000, 1_000, name="y"),
        node("operator.matmul", ref("y"), ref("y")),
    ],
    "a constant": [node("torch.zeros", 1 << 62)],
    "a range": [node("torch.arange", 1 << 50)],
    "a split": [
        method("repeat", ref("logprobs"), 1_000_000, name="y"),
        node("torch.unbind", ref("y")),
    ],
    "a split of a keyword": [
        method("repeat", ref("logprobs"), 1_000_000, name="y"),
        node("torch.functional.split", tensor=ref("y"), split_size_or_sections=1),
    ],
    "a split of empty rows": [node("torch.zeros", 10**9, 0, name="y"), node("torch.unbind", ref("y"))],
    "empty chunks": [node("torch.zeros", 0, name="y"), node("torch.chunk", ref("y"), 1 << 31)],
    "a product with an empty side": [
        node("torch.ones", 60_000, 1, 1, 1, name="y"),
        node("torch.ones", 1, 60_000, 1, 0, name="z"),
        node("operator.matmul", ref("y"), ref("z")),
    ],
    "an einsum with an empty side": [
        node("torch.ones", 60_000, name="y"),
        node("torch.ones", 0, name="z"),
        node("torch.functional.einsum", "a,b,c->abc", ref("y"), ref("y"), ref("z")),
    ],
    "an einsum with a side of 1": [
        node("torch.ones", 60_000, name="y"),
        node("torch.ones", 1, name="z"),
        node("torch.functional.einsum", "a,b,a,b->", ref("y"), ref("y"), ref("z"), ref("z")),
    ],
    "a product by keywords": [
        node("torch.ones", 3_000, 1_000, name="y"),
        node("torch.ones", 1_000, 10, name="z"),
        node("torch.mm", mat2=ref("z"), input=ref("y")),
    ],
    "what cross-entropies keep": [
        node("torch.ones", 2_000, 2_000, name="y"),
        node("torch.zeros", 2_000, dtype={"dtype": "int64"}, name="t"),
        *(node("torch.nn.functional.cross_entropy", ref("y"), ref("t"), name=name) for name in "abcx"),
    ],
    "what elements of a tensor read": [
        node("torch.ones", 1 << 22, name="y"),
        node("torch.zeros", 3, dtype={"dtype": "int64"}, name="i"),
        *(node("torch.gather", ref("y"), 0, ref("i"), name=name) for name in "abx"),
    ],
    "singular values": [
        node("torch.ones", 1_000, 1_000, name="y"),
        node("torch.functional.norm", ref("y"), "nuc"),
    ],
    "shifts without end": [  # a recursion for each
        node("torch.roll", ref("logprobs"), [0] * 30_000, [0] * 30_000),
    ],
    "axes without end": [method("repeat", ref("logprobs"), *[1] * 30_000)],
    "axes by an index": [node("operator.getitem", ref("logprobs"), {"tuple": [None] * 30_000})],
    "axes by and by": [
        method("reshape", ref("logprobs"), [3] + [1] * 15, name="y"),
        method("unsqueeze", ref("y"), 0),
    ],
    "a change in place": [
        method("detach", ref("logprobs"), name="y"),
        node("torch.nn.functional.elu", ref("y"), 1.0, True),
    ],
    "the least integer by -1": [  # SIGFPE
        node("torch.full", {"tuple": [64]}, -(2**63), name="y"),
        node("torch.div", ref("y"), -1, rounding_mode="trunc"),
    ],
    "many tensors": [
        method("repeat", ref("logprobs"), 20_000, name="y"),
        node("torch.unbind", ref("y"), name="z"),
        node("torch.unbind", ref("y")),
    ],
    "a power": [node("operator.pow", 10, 10_000_000)],
    "a shift by powers": [node("operator.mul", 1 << 62, 1 << 62)],
    "a text": [node("operator.mod", "sum", 5)],
    "a tuple": [
        node("operator.add", {"tuple": [1] * 60}, {"tuple": [1] * 60}),
    ],
    "a tuple many times": [node("operator.mul", {"tuple": [1]}, 1 << 40)],
    "a device by number": [method("to", ref("logprobs"), 0)],
    "a device of zeros": [node("torch.zeros", 3, device=0)],
    "a number of a tensor": [node("math.exp", ref("logprobs"))],
    "a mean over pairs": [
        method("repeat", ref("logprobs"), 9_999, name="y"),
        method("unsqueeze", ref("y"), 0, name="r"),
        method("unsqueeze", ref("y"), 1, name="c"),
        node("torch.nn.functional.kl_div", ref("r"), ref("c"), reduction="sum"),
    ],
    "a size by a mask": [  # 1e12 for what the mask leaves out
        node("operator.lt", ref("logprobs"), -1.0, name="m"),
        node("operator.getitem", ref("logprobs"), ref("m"), name="y"),
        method("numel", ref("y"), name="n"),
        node("operator.sub", 3, ref("n"), name="left"),
        node("operator.mul", ref("left"), 10**12, name="size"),
        node("torch.zeros", ref("size")),
    ],
    "two masks": [
        node("operator.lt", ref("logprobs"), 0, name="m"),
        node("operator.getitem", ref("logprobs"), {"tuple": [ref("m"), ref("m")]}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_takes_too_much_or_leaves_the_cpu_is_refused_before_it_runs(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the device without values ever sees it."""
    devices: list[str] = []
    real: Callable[..., Any] = loss_program._call

    def note(node: Any, *args: Any) -> Any:
        if node.name == "x":
            devices.append(torch.get_default_device().type)
        return real(node, *args)

    monkeypatch.setattr(loss_program, "_call", note)
    with pytest.raises(ValueError, match=r"custom loss 'mine': .*node 'x'"):
        program(*TOO_MUCH[what]).evaluate([row()], [P])
    assert set(devices) <= {"meta"}


def test_evaluations_of_a_request_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_program, "MAX_EVALUATIONS", 5)
    made = program(node("torch.exp", ref("logprobs"), name="y"), method("sum", ref("y")))
    made.evaluate([row()] * 2, [P] * 2)
    with pytest.raises(ValueError, match=r"6 evaluations.*fewer datums"):
        made.evaluate([row()] * 3, [P] * 3)


def test_many_arguments_count_as_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_program, "MAX_EVALUATIONS", 20)
    made = program(node("torch.cat", [ref("logprobs")] * 200, name="y"), method("sum", ref("y")))
    made.evaluate([row()], [P])
    with pytest.raises(ValueError, match=r"26 evaluations.*fewer datums"):
        made.evaluate([row()] * 2, [P] * 2)


def test_what_may_be_long_is_computed() -> None:
    calls = [node("torch.cat", [ref("logprobs")] * 100, name="y"),
             node("operator.getitem", ref("y"), [0] * 200, name="z"),
             node("torch.functional.split", ref("z"), [2] * 100, name="p"),
             node("operator.getitem", ref("p"), 99, name="q"), method("sum", ref("q"))]  # fmt: skip
    assert program(*calls).evaluate([row()], [P]).gradients[0] == pytest.approx(np.array([2.0, 0.0, 0.0]))


def test_arguments_of_a_graph_are_limited() -> None:
    with pytest.raises(ValueError, match=r"65,5\d\d parts up to node 'x', expected 65,536"):
        program(node("torch.cat", [ref("logprobs")] * (1 << 16)))


def test_what_is_known_of_shapes_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_program, "MAX_CACHED", 3_000)
    made = program(node("torch.cat", [ref("logprobs")] * 200, name="y"), method("sum", ref("y")))
    for length in range(1, 9):
        made.evaluate([row()], [np.zeros(length, np.float32)])
        assert made.cached <= 3_000 and len(made.elements) <= 8


def test_an_output_size_that_torch_does_not_check_is_refused() -> None:
    """The third repetition would be refused after the first had written a billion integers behind three."""
    with pytest.raises(ValueError, match="output_size"):
        program(node("torch.repeat_interleave", ref("logprobs"), ref("i"), output_size=3), inputs={"i": 1})


@pytest.mark.parametrize(
    ("target", "args", "value"),
    [
        ("torch._C._linalg.linalg_norm", (2,), 10.0),  # the singular values of [[6, 0], [0, 10]]
        ("torch.functional.norm", (2,), math.sqrt(136.0)),
    ],
)
def test_a_norm_is_that_of_its_module(target: str, args: tuple[Any, ...], value: float) -> None:
    calls = [
        node("operator.mul", ref("logprobs"), ref("a"), name="y"),
        node(target, ref("y"), *args),
    ]
    given = [{"name": "logprobs", "rank": 2}, {"name": "a", "rank": 2}]
    nodes = [*({"op": "placeholder", "name": one["name"], "target": one["name"]} for one in given), *calls,
             node("output", {"tuple": [ref("x"), {"dict": {}}]}, name="output", op="output")]  # fmt: skip
    made = LossProgram(read_loss_graph("mine", given, {"format": 1, "nodes": nodes}))
    logprobs = np.array([[-3.0, -4.0], [-7.0, -5.0]], np.float32)
    found = made.evaluate([row(a=np.array([[-2.0, 0.0], [0.0, -2.0]], np.float32))], [logprobs])
    assert found.metrics["loss:sum"] == pytest.approx(value, rel=1e-6)


def test_equal_shapes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    real: Callable[..., Any] = loss_program._call

    def count(*args: Any) -> Any:
        devices.append(torch.get_default_device().type)
        return real(*args)

    monkeypatch.setattr(loss_program, "_call", count)
    program(method("sum", ref("logprobs"))).evaluate([row()] * 3, [P, P[:2], P])
    assert devices == ["meta", "cpu", "meta", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("calls", "inputs", "given", "said"),
    [
        ([method("sum", ref("a"))], {"a": 1}, {"a": A}, "datum 0 does not depend on logprobs"),
        ([method("sum", ref("logprobs"))], {"a": 1}, {}, "datum 0 lacks 'a'"),
        ([method("sum", ref("logprobs"))], {"a": 2}, {"a": A}, "'a' of rank 1, expected 2"),
        ([method("sum", ref("logprobs"))], {"a": 0}, {"a": A}, "'a' of rank 1, expected 0"),
        ([method("exp", ref("logprobs"))], {}, {}, r"the loss is \(3,\), expected a tensor without axes"),
        ([node("operator.add", 1, 2)], {}, {}, "the loss is int"),
        ([method("sum", 5)], {}, {}, "a method is called on a value that is no tensor"),
        ([node("torch.nn.functional.nll_loss", ref("a"), ref("a"))], {"a": 2}, {"a": A[None]}, "node 'x'"),
    ],
)
def test_a_wrong_loss_or_datum_is_named(
    calls: list[Any], inputs: dict[str, int], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        program(*calls, inputs=inputs).evaluate([row(**given)], [P])


def test_a_gradient_that_is_not_finite_names_its_datum() -> None:
    made = program(node("torch.sqrt", ref("a"), name="y"), node("operator.mul", ref("y"), ref("logprobs"), name="z"),
                   method("sum", ref("z")), inputs={"a": 1})  # fmt: skip
    with pytest.raises(NonFiniteError, match="custom loss 'mine'") as refused:
        made.evaluate([row(a=np.abs(A)), row(a=A)], [P, P])
    assert refused.value.rows == [1]
