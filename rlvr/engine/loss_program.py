"""Computes custom losses: the graphs of `rlvr.algorithms.loss_graph`, by torch on the CPU, with their gradients.

As the SDK does it in the client, the loss is a function of the log-probs of each datum, and its gradient goes through
the model as a cross-entropy whose weights are -dL/dp. Before a node is computed for arguments of new shapes, it is
called on torch's `meta` device, which has shapes and no values: what it takes is known before it is allocated.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional
from torch import Tensor

from rlvr.algorithms.loss_graph import MODULES, LossGraph, LossNode, Ref, TorchConstant, count_parts
from rlvr.core.messages import Datum, ForwardBackwardOutput, NonFiniteError
from rlvr.core.tensors import TensorData
from rlvr.engine.engine import Engine
from rlvr.engine.policy import Policy

MAX_ELEMENTS = 16 << 20  # of all values of one datum, kept for the gradient: 64 MiB in float32
TENSOR_ELEMENTS = 256  # that a tensor counts at least: its object takes time and memory too
MAX_EVALUATIONS = 4 << 20  # of nodes in one request: about a minute
MAX_TUPLE, MAX_AXES, MAX_SPLIT = 64, 16, 1 << 16
MAX_CACHED = 1 << 18  # of shapes and numbers in the keys of `LossProgram.elements`
NODE_PARTS = 16  # that a node's arguments may have before it counts as several evaluations
PAUSE_SECONDS = 0.05  # of computing, after which others get their turns
META, CPU = torch.device("meta"), torch.device("cpu")
PLACES: tuple[Any, ...] = (torch, torch.nn.functional, torch.special, torch.linalg)
PLACE_OF_MODULE: dict[str, Any] = {  # where a name is looked for first: torch.linalg.norm is not torch.norm
    "torch.nn.functional": torch.nn.functional, "torch._C._nn": torch.nn.functional,
    "torch.special": torch.special, "torch._C._special": torch.special,
    "torch.linalg": torch.linalg, "torch._C._linalg": torch.linalg,
}  # fmt: skip
SPLITS = frozenset(("chunk", "split", "unbind"))
JOINS = frozenset(("cat", "concat", "stack", "einsum"))
PRODUCTS = frozenset(("matmul", "mm", "bmm", "mv", "dot", "vdot", "outer"))
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)


@dataclass(frozen=True)
class CustomLossResult:
    """The result of a custom loss: `gradients`, dL/dp of each datum, and `metrics` with `loss:sum`."""

    gradients: list[np.ndarray]
    metrics: dict[str, float]


@dataclass
class LossProgram:
    """A graph. `elements`: what each node takes for arguments of the shapes that it had before, with `cached` parts of
    arguments in all keys."""

    graph: LossGraph
    elements: dict[Any, int] = field(default_factory=dict[Any, int])
    cached: int = 0

    @functools.cached_property
    def evaluations(self) -> int:
        """How many a datum costs: one for each node, and more for one that has many arguments."""
        parts = (count_parts((node.args, tuple(node.kwargs.values()))) for node in self.graph.nodes)
        return max(1, sum(max(1, count // NODE_PARTS) for count in parts))

    def evaluate(
        self,
        data: Sequence[Datum],
        logprobs: Sequence[np.ndarray],
        after_datum: Callable[[], None] | None = None,
    ) -> CustomLossResult:
        """The loss summed over the datums, its gradients and its metrics; ValueError naming the datum at fault."""
        graph = self.graph
        if (count := len(data) * self.evaluations) > MAX_EVALUATIONS:
            raise ValueError(
                f"custom loss {graph.name!r}: {len(graph.nodes):,} nodes for {len(data):,} datums are {count:,} "
                f"evaluations, expected at most {MAX_EVALUATIONS:,}; send fewer datums at a time"
            )
        paused_at = time.monotonic()
        total, sums, gradients = 0.0, dict.fromkeys(graph.metrics, 0.0), list[np.ndarray]()
        for i, (datum, own) in enumerate(zip(data, logprobs, strict=True)):
            values = [torch.tensor(own, requires_grad=True), *self._read_inputs(i, datum, own)]
            with torch.enable_grad():
                loss, metrics = self._run(i, values)
                gradients.append(self._differentiate(i, loss, values[0]))
            total += float(loss.detach())
            for name, value in metrics.items():
                sums[name] += float(value.detach())
            if after_datum is not None and time.monotonic() - paused_at > PAUSE_SECONDS:
                after_datum()
                paused_at = time.monotonic()
        means = {name: value / len(data) if name.endswith(":mean") else value for name, value in sums.items()}
        return CustomLossResult(gradients, {**means, "loss:sum": total})

    def _read_inputs(self, i: int, datum: Datum, logprobs: np.ndarray) -> list[Tensor]:
        name = self.graph.name
        if (rank := self.graph.inputs[0][1]) != logprobs.ndim:
            raise ValueError(
                f"custom loss {name!r}: datum {i} has target_tokens of rank {logprobs.ndim}, expected {rank}"
            )
        found: list[Tensor] = []
        for key, rank in self.graph.inputs[1:]:
            if key not in datum.loss_fn_inputs:
                raise ValueError(f"custom loss {name!r}: datum {i} lacks {key!r}, which the loss reads")
            array = datum.loss_fn_inputs[key].data
            if rank == 0 and array.size == 1:  # on the wire a number has one axis
                array = array.reshape(())
            if array.ndim != rank:
                raise ValueError(
                    f"custom loss {name!r}: datum {i} has {key!r} of rank {array.ndim}, expected {rank} as declared"
                )
            found.append(torch.tensor(array))
        return found

    def _run(self, i: int, values: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the metrics of datum `i`."""
        graph, taken = self.graph, 0
        env: dict[str, Any] = dict(zip(graph.placeholders, values, strict=True))
        for node in graph.nodes:
            try:
                args = [_fill(arg, env) for arg in node.args]
                kwargs = {key: _fill(arg, env) for key, arg in node.kwargs.items()}
                taken += self._measure(node, args, kwargs)
                if taken > MAX_ELEMENTS:
                    raise ValueError(f"{taken:,} elements would be taken up to here, expected at most {MAX_ELEMENTS:,}")
                env[node.name] = _call(node, args, kwargs)
            except NotImplementedError as error:
                reason = "not implemented for such values, or its size is not known before they are"
                raise self._error(i, node, f"{reason} ({error!s:.200})") from None
            except FAILURES as error:
                raise self._error(i, node, f"{error!s:.400}") from None
        loss, metrics = env[graph.loss], {name: env[node] for name, node in graph.metrics.items()}
        for what, value in (("loss", loss), *metrics.items()):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if not isinstance(value, Tensor) or (value.ndim and (what == "loss" or value.numel() != 1)):
                raise ValueError(f"custom loss {graph.name!r}: the {what} is {shape}, expected a tensor without axes")
        return loss, metrics

    def _measure(self, node: LossNode, args: list[Any], kwargs: dict[str, Any]) -> int:
        """The elements that a call will take, by a call on tensors that have shapes and no values."""
        key = (node.name, _describe_shapes(args), _describe_shapes(list(kwargs.items())))
        if (known := self.elements.get(key)) is not None:
            return known
        _check_call(node, args, kwargs)
        if (masked := _find_masked(node, args)) is not None:  # how much it takes depends on the mask's values
            return max(TENSOR_ELEMENTS, masked.numel())
        with torch.no_grad(), META:
            trial_args: list[Any] = _to_meta(args)
            result = _call(node, trial_args, dict(_to_meta(list(kwargs.items()))))
        if (axes := max((part.ndim for part in _list_tensors(result)), default=0)) > MAX_AXES:
            raise ValueError(f"a tensor of {axes} axes, expected at most {MAX_AXES}")
        taken = _count_elements(node, args, kwargs, result)
        self.cached += count_parts(key)
        if self.cached > MAX_CACHED:
            self.elements.clear()
            self.cached = count_parts(key)
        self.elements[key] = taken
        return taken

    def _differentiate(self, i: int, loss: Tensor, logprobs: Tensor) -> np.ndarray:
        if not loss.requires_grad:
            raise ValueError(f"custom loss {self.graph.name!r}: the loss of datum {i} does not depend on logprobs")
        try:
            (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
        except RuntimeError as error:
            raise ValueError(f"custom loss {self.graph.name!r}: no gradient of datum {i} ({error!s:.400})") from None
        if gradient is None:
            raise ValueError(f"custom loss {self.graph.name!r}: the loss of datum {i} does not depend on logprobs")
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(gradient).all()):
            raise NonFiniteError(f"custom loss {self.graph.name!r} or its gradient", [i])
        return gradient.numpy()

    def _error(self, i: int, node: LossNode, reason: str) -> ValueError:
        return ValueError(
            f"custom loss {self.graph.name!r}: node {node.name!r} ({node.target}) for datum {i}: {reason}"
        )


def compute_custom_loss(
    engine: Engine,
    policy: Policy,
    program: LossProgram,
    data: Sequence[Datum],
    *,
    backward: bool,
    after_batch: Callable[[], None] | None,
) -> ForwardBackwardOutput:
    """The log-probs, the loss and its metrics; with `backward` the gradient is added to the policy's.

    Two passes, as `forward_backward_custom` does it in a client. The first changes nothing, so neither does a loss that
    fails.
    """
    for i, datum in enumerate(data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise ValueError(f"datum {i} lacks 'target_tokens', which a custom loss needs")
    targets = [datum.loss_fn_inputs["target_tokens"].data for datum in data]
    zeros = _weigh(data, [np.zeros(target.shape, np.float32) for target in targets])
    output = engine.forward_backward(policy, zeros, "cross_entropy", {}, backward=False, after_batch=after_batch)
    result = program.evaluate(data, [row["logprobs"].data for row in output.loss_fn_outputs], after_batch)
    if backward:
        weighted = _weigh(data, [-gradient for gradient in result.gradients])
        engine.forward_backward(policy, weighted, "cross_entropy", {}, after_batch=after_batch)
    return ForwardBackwardOutput(output.loss_fn_outputs, result.metrics)


def _weigh(data: Sequence[Datum], weights: Sequence[np.ndarray]) -> list[Datum]:
    """The datums with the inputs of a cross-entropy."""
    return [
        Datum(
            datum.model_input,
            {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": TensorData(weight)},
        )
        for datum, weight in zip(data, weights, strict=True)
    ]


def _fill(argument: Any, env: Mapping[str, Any]) -> Any:
    match argument:
        case Ref(name):
            return env[name]
        case TorchConstant("device"):
            return CPU
        case TorchConstant(_, name):
            return getattr(torch, name)
        case list() | tuple() | slice():
            return _map_parts(lambda part: _fill(part, env), argument)
        case _:
            return argument


def _map_parts(function: Callable[[Any], Any], argument: Any) -> Any:
    if isinstance(argument, slice):
        return slice(*map(function, (argument.start, argument.stop, argument.step)))
    return [*map(function, argument)] if isinstance(argument, list) else tuple(map(function, argument))


def _to_meta(argument: Any) -> Any:
    """An argument without values, on the device that computes none."""
    if isinstance(argument, Tensor):
        return argument.to(META)
    if isinstance(argument, (list, tuple, slice)):
        return _map_parts(_to_meta, argument)
    return META if argument == CPU else argument


def _describe_shapes(argument: Any) -> Any:
    """Equal for arguments that take as much."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype
    if isinstance(argument, (list, tuple, slice)):
        return type(argument), _map_parts(_describe_shapes, _as_tuple(argument))
    return type(argument), argument


def _as_tuple(argument: Any) -> tuple[Any, ...]:
    if isinstance(argument, slice):
        return argument.start, argument.stop, argument.step
    return tuple(argument) if isinstance(argument, (list, tuple)) else ()


def _list_tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for part in _as_tuple(argument) for tensor in _list_tensors(part)]


def _check_call(node: LossNode, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what would compute elsewhere (a number is a device too: a GPU), make a million tensors, or end the
    process: the least integer divided by -1 is a fault of the processor."""
    _check_lengths(node, args, kwargs)
    if any(args[place] for place in _find_inplace(node.op, node.target) if place < len(args)):
        raise ValueError("the argument `inplace` changes a tensor that others read; leave it out")
    tensors = _list_tensors([*args, *kwargs.values()])
    if node.target.rpartition(".")[2] in SPLITS:  # an empty side does not make the parts fewer
        sizes = [math.prod(max(1, side) for side in tensor.shape) for tensor in tensors]
        chunks = [one for one in (*args, *kwargs.values()) if isinstance(one, int) and "chunk" in node.target]
        if (size := max([*sizes, *chunks], default=0)) > MAX_SPLIT:
            raise ValueError(f"a split of {size:,} elements, or into as many, expected at most {MAX_SPLIT:,}")
    if kwargs.get("rounding_mode") == "trunc" and not any(tensor.is_floating_point() for tensor in tensors):
        raise TypeError("integers are not divided with rounding_mode='trunc'; convert them to float first")
    if kwargs.get("device", CPU) not in (CPU, None):
        raise TypeError("the argument `device` names another device than that of the log-probs; leave it out")
    if node.target == "to" and not all(
        one == CPU or isinstance(one, (torch.dtype, Tensor, bool)) for one in (*args[1:], *kwargs.values())
    ):
        raise TypeError("expected a dtype or a tensor")


@functools.cache
def _find_inplace(op: str, target: str) -> list[int]:
    """At which place a function takes `inplace`, if it does."""
    try:
        names = inspect.signature(find_function(op, target)).parameters
    except ValueError:  # a function of C has no signature, and its in-place form another name
        return []
    return [place for place, name in enumerate(names) if name == "inplace"]


def _check_lengths(node: LossNode, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse many axes, shifts or repetitions: torch takes time with the square of their number, or recurses for each
    until the process ends. A list of tensors to join, of sizes to split into, or of places to index may be long."""
    name = node.target.rpartition(".")[2]
    for part in (args, *args, *kwargs.values()):
        long = isinstance(part, (list, tuple)) and len(part) > MAX_TUPLE
        is_read = name == "getitem" and (part is args[0] or isinstance(part, list))
        if long and (part is args or not (name in JOINS or name in SPLITS or is_read)):
            raise ValueError(f"{len(part):,} numbers or axes in one argument, expected at most {MAX_TUPLE}")


def _call(node: LossNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    function = find_function(node.op, node.target)
    if node.target == "getattr":
        if not isinstance(args[0], Tensor):
            raise TypeError(f"{args[1]} of a {type(args[0]).__name__}, expected a tensor")
        return getattr(args[0], args[1])
    if node.op == "call_method" and not (args and isinstance(args[0], Tensor)):
        raise TypeError("a method is called on a value that is no tensor")
    if function is operator.getitem:
        if not isinstance(args[0], (Tensor, tuple, list)):
            raise TypeError(f"a {type(args[0]).__name__} cannot be indexed")
        return args[0][args[1]]
    if node.target.startswith(("operator.", "math.")) and not any(isinstance(arg, Tensor) for arg in args):
        return _compute_number(function, args)
    if node.target.startswith("math."):
        raise TypeError(f"a tensor would become a number without a gradient; use torch.{function.__name__}")
    return function(*args, **kwargs)


@functools.cache
def find_function(op: str, target: str) -> Callable[..., Any]:
    """The torch function of an allowed name; ValueError if this version of torch lacks the function."""
    if target == "getattr":
        return getattr
    module, _, name = target.rpartition(".")
    found: Any = None
    if op == "call_method":
        found = getattr(Tensor, target, None)
    elif module in ("operator", "math"):
        found = getattr(operator if module == "operator" else math, name, None)
    else:
        name = name.removeprefix(MODULES[module])
        name = {"log_sigmoid": "logsigmoid"}.get(name, name)
        places = sorted(PLACES, key=lambda place: place is not PLACE_OF_MODULE.get(module, torch))
        found = next((function for place in places if (function := getattr(place, name, None)) is not None), None)
    if found is None:
        raise ValueError(f"{target} does not exist in this server's torch {torch.__version__}")
    return found


def _find_masked(node: LossNode, args: list[Any]) -> Tensor | None:
    """The tensor of `tensor[mask]`; a mask among other indices is refused."""
    if node.target != "operator.getitem" or not isinstance(args[0], Tensor):
        return None
    if not any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _list_tensors(args[1:])):
        return None
    if not isinstance(args[1], Tensor):
        raise IndexError("a mask is used alone, without other indices")
    return args[0]


def _compute_number(function: Callable[..., Any], args: list[Any]) -> Any:
    """An operation on numbers, or on shapes, which cannot become large."""
    if any(isinstance(arg, (tuple, list)) for arg in args):
        if function not in (operator.add, operator.eq, operator.ne) or not all(
            isinstance(arg, (tuple, list)) and len(arg) <= MAX_TUPLE for arg in args
        ):
            raise TypeError("expected numbers or tensors")
        result = function(*args)
        if isinstance(result, (tuple, list)) and len(result) > MAX_TUPLE:
            raise ValueError(f"a tuple of more than {MAX_TUPLE} entries")
        return result
    if not all(isinstance(arg, (int, float)) for arg in args):
        raise TypeError("expected numbers or tensors")
    if function in (operator.pow, math.pow):
        power = math.pow(*args)
        is_whole = all(isinstance(arg, int) for arg in args) and args[1] >= 0 and abs(power) < 2**53
        return round(power) if is_whole and function is operator.pow else power
    result = function(*args)
    if isinstance(result, int) and not -(2**63) <= result < 2**63:
        raise ValueError("an integer does not fit into 64 bits")
    return result


def _count_elements(node: LossNode, args: list[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """The elements that a call takes: of its result, of each argument, which its gradient may read, and of what it
    computes on the way there. A loss with a mean takes those of its arguments together; products of matrices take time
    for each factor, and singular values for each side of the matrix."""
    taken = sum(max(TENSOR_ELEMENTS, part.numel()) for part in _list_tensors(result)) or 1
    tensors = _list_tensors([*args, *(kwargs[key] for key in sorted(kwargs))])  # `input` is before `mat2` and `other`
    taken = max(taken, *(tensor.numel() for tensor in tensors), 0)
    name = node.target.rpartition(".")[2]
    if name == "einsum":
        return max(taken, _count_einsum(args))
    if name in PRODUCTS and len(tensors) == 2:
        return max(taken, _count_product(name, *(tensor.shape for tensor in tensors)))
    if name in ("norm", "linalg_norm") and tensors and tensors[0].ndim > 1:
        return taken * sorted(tensors[0].shape)[-2]
    try:
        return max(taken, math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors))))
    except RuntimeError:  # they are not the arguments of one elementwise computation
        return taken


def _count_product(name: str, first: torch.Size, second: torch.Size) -> int:
    """Multiplications. An empty side counts as one: the other factor is copied for it all the same."""
    if name == "outer":
        return math.prod(first) * math.prod(second)
    batch = torch.broadcast_shapes(first[:-2], second[:-2])
    return math.prod(max(1, side) for side in (*batch, *first[-2:], *(second[-1:] if len(second) > 1 else ())))


def _count_einsum(args: list[Any]) -> int:
    """The product of all sides. One of 1 is repeated to fit its letter, and one of 0 counts as 1: pairs of operands
    are multiplied in turn, and the others may come before it."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    sizes: dict[str, int] = {}
    for letters, operand in zip(str(args[0]).replace(" ", "").partition("->")[0].split(","), operands, strict=True):
        for letter, side in zip(letters, operand.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), side)
    return math.prod(sizes.values())
