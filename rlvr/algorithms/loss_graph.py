"""A custom loss as plain data: the graph that `ServiceClient.create_custom_loss` of the tinker SDK sends.

The SDK traces a client's function by torch.fx and sends its nodes as JSON. Nothing of it is code: a node names an
operation, and only those of the tables below exist here (`rlvr.engine.loss_program` computes them). So a graph can
neither import, nor open, nor loop. Its size is limited here, the size of what it computes there.

Left out on purpose: operations that draw random numbers (a replay of the log must give the same bits), that change a
tensor in place, and that turn a tensor into a number of Python (the gradient would be lost).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

MAX_NODES, MAX_INPUTS, MAX_METRICS = 4_000, 16, 64
MAX_NAME = 200  # characters of the name of a loss or of a node
MAX_DEPTH = 16  # of lists and tuples in an argument
INSTEAD = "or pass the function itself to forward_backward_custom, which then runs it in the client"
_INPUT_NAME, _METRIC = re.compile(r"[a-z_][a-z0-9_]{0,63}"), re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_EQUATION = re.compile(r"[A-Za-z, ]+->[A-Za-z ]*")  # of einsum, without an ellipsis


def _is_list(given: Any) -> TypeGuard[list[Any]]:
    return isinstance(given, list)


def _is_tuple(given: Any) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(given, tuple)


def _is_object(given: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(given, dict)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPERATORS = _names(
    "abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor"
)
NUMBER_FUNCTIONS = _names("ceil cos exp expm1 fabs floor log log10 log1p log2 pow sin sqrt tanh")
ATTRIBUTES = _names("device dtype mT ndim shape T")
# Functions of torch and methods of its tensors, by the same names.
TENSOR_OPERATIONS = _names(
    """
    abs absolute acos acosh add addcdiv addcmul all amax amin aminmax any argmax argmin argsort asin asinh atan atan2
    atanh bmm broadcast_to ceil chunk clamp clamp_max clamp_min clip clone copysign cos cosh count_nonzero cummax
    cummin cumprod cumsum detach diag diagonal digamma div divide dot eq erf erfc erfinv exp exp2 expm1 fix flatten
    flip floor floor_divide fmax fmin fmod frac gather ge greater greater_equal gt heaviside hypot index_fill
    index_select isclose isfinite isinf isnan kthvalue ldexp le lerp less less_equal lgamma log log10 log1p log2
    log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lt
    masked_fill matmul max maximum mean median min minimum mm moveaxis movedim mul multiply mv nan_to_num nanmean
    nanmedian nansum narrow ne neg negative norm not_equal numel outer permute positive pow prod quantile ravel
    reciprocal relu remainder repeat_interleave reshape roll round rsqrt scatter scatter_add select sgn sigmoid sign sin
    sinc sinh softmax sort split sqrt square squeeze std sub subtract sum swapaxes t take_along_dim tan tanh tile topk
    transpose tril triu true_divide trunc unbind unflatten unsqueeze var vdot where xlogy
    """
)
FUNCTIONS = TENSOR_OPERATIONS | _names(
    """
    arange binary_cross_entropy binary_cross_entropy_with_logits cat cosine_similarity cross_entropy einsum elu entr eye
    full full_like gelu hardtanh huber_loss kl_div l1_loss leaky_relu linspace log_sigmoid logsigmoid mse_loss nll_loss
    normalize one_hot ones ones_like pad relu6 scalar_tensor selu silu smooth_l1_loss softmin softplus softsign stack
    concat std_mean threshold var_mean vector_norm xlog1py zeros zeros_like
    """
)
METHODS = TENSOR_OPERATIONS | _names(
    """
    bfloat16 bool contiguous dim double expand expand_as float half int long ndimension new_full new_ones new_zeros
    repeat reshape_as size to type_as view view_as
    """
)
# Of torch.linalg, where functions have meanings of their own. Its `norm` may be a spectral or nuclear one, whose time
# grows with the cube of a size; so texts name no nuclear norm either.
LINALG = _names("diagonal matmul vector_norm")
# Where torch.fx finds a function, and how its name begins there.
MODULES = {
    "torch": "", "torch.functional": "", "torch.nn.functional": "", "torch._C._nn": "", "torch.special": "",
    "torch._C._special": "special_", "torch.linalg": "", "torch._C._linalg": "linalg_",
}  # fmt: skip
KEYWORDS_REFUSED = frozenset({"out", "generator", "requires_grad", "pin_memory", "names"})
WORDS = _names(  # texts that an operation may get: reductions, rounding and so on; never the name of a device
    """
    batchmean constant floor fro higher linear lower mean midpoint nearest none replicate reflect sum tanh trunc
    """
)
DTYPES = _names("bfloat16 bool double float float16 float32 float64 half int int32 int64 long uint8")


@dataclass(frozen=True)
class Ref:
    """The value of an earlier node."""

    name: str


@dataclass(frozen=True)
class TorchConstant:
    """A dtype, the device of the computation, a layout or a memory format."""

    kind: str
    name: str


@dataclass(frozen=True)
class LossNode:
    """One operation of a `LossGraph`. `op` is call_function or call_method; `target` the function as `operator.add`,
    `math.sqrt`, `getattr` or `torch.exp`, or the method's name."""

    name: str
    op: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class LossGraph:
    """A custom loss as a graph of operations. `inputs`: names and ranks, `logprobs` first, which the nodes read as
    `placeholders`; `loss` and `metrics` name the nodes of the result."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    placeholders: tuple[str, ...]
    nodes: tuple[LossNode, ...]
    loss: str
    metrics: Mapping[str, str]

    @cached_property
    def size(self) -> int:
        """The nodes, and the entries of lists in their arguments: a list of thousands takes as long as many nodes."""
        return sum(1 + sum(map(_count_entries, (*node.args, *node.kwargs.values()))) for node in self.nodes)


def read_loss_graph(name: str, inputs: Any, graph: Any) -> LossGraph:
    """Check and read what a client sent; ValueError naming the first node or argument that is wrong."""
    try:
        return _read_graph(name, _read_inputs(inputs), graph)
    except ValueError as error:
        raise ValueError(f"custom loss {name[:80]!r}: {error}") from None


def _read_inputs(given: Any) -> tuple[tuple[str, int], ...]:
    if not _is_list(given) or not 1 <= len(given) <= MAX_INPUTS:
        raise ValueError(f"expected 1 to {MAX_INPUTS} inputs, each with a name and a rank")
    found: list[tuple[str, int]] = []
    for one in given:
        name, rank = (one.get("name"), one.get("rank")) if _is_object(one) else (None, None)
        if not isinstance(name, str) or not _INPUT_NAME.fullmatch(name):
            raise ValueError(f"input {_describe(name)}: expected a name of lowercase letters, digits and underscores")
        if type(rank) is not int or not 0 <= rank <= 2:
            raise ValueError(f"input {name!r}: rank {_describe(rank)}, expected 0 (a number), 1 ([T]) or 2 ([T, K])")
        found.append((name, rank))
    if found[0][0] != "logprobs" or found[0][1] == 0:
        raise ValueError(f"the first input is {found[0][0]!r} of rank {found[0][1]}, expected logprobs of rank 1 or 2")
    if len({name for name, _ in found}) < len(found):
        raise ValueError("two inputs have the same name; give each input its own")
    return tuple(found)


def _read_graph(name: str, inputs: tuple[tuple[str, int], ...], graph: Any) -> LossGraph:
    nodes = graph.get("nodes") if _is_object(graph) else None
    if not _is_object(graph) or not _is_list(nodes) or graph.get("format", 1) != 1:
        raise ValueError('expected a graph of {"format": 1, "nodes": [...]}')
    if len(nodes) > MAX_NODES:
        raise ValueError(f"the graph has {len(nodes):,} nodes, expected at most {MAX_NODES:,}; write fewer operations")
    known: dict[str, int] = {}
    placeholders: list[str] = []
    calls: list[LossNode] = []
    for place, node in enumerate(nodes):
        label, op, target = _read_head(node, place, known)
        if op == "output":
            if place != len(nodes) - 1:
                raise ValueError(f"node {label!r}: expected one output, as the last node")
            if [found for found, _ in inputs] != placeholders:
                raise ValueError(
                    f"the graph reads the inputs {placeholders}, expected {[found for found, _ in inputs]}"
                )
            loss, metrics = _read_output(node.get("args"), known)
            labels = tuple(list(known)[: len(placeholders)])
            return LossGraph(name, inputs, labels, tuple(calls), loss, metrics)
        if op == "placeholder":
            if calls or node.get("args") or node.get("kwargs"):
                raise ValueError(f"node {label!r}: expected the inputs before all other nodes, and without defaults")
            placeholders.append(target)
        else:
            calls.append(_read_call(node, label, op, target, known))
        known[label] = place
    raise ValueError("the graph has no output node")


def _read_head(node: Any, place: int, known: Mapping[str, int]) -> tuple[str, str, str]:
    parts = [node.get(key) if _is_object(node) else None for key in ("name", "op", "target")]
    if not all(isinstance(part, str) and 0 < len(part) <= MAX_NAME for part in parts):
        raise ValueError(f"node {place}: expected a name, an op and a target, of at most {MAX_NAME} characters each")
    label, op, target = map(str, parts)
    if label in known:
        raise ValueError(f"node {label!r} occurs twice")
    if op in ("get_attr", "call_module"):
        what = "a tensor from outside" if op == "get_attr" else "a module"
        raise ValueError(f"node {label!r} uses {what} ({target!r}); a loss reads its inputs only")
    if op not in ("placeholder", "call_function", "call_method", "output"):
        raise ValueError(f"node {label!r}: op {op!r} is unknown")
    return label, op, target


def _read_call(node: dict[str, Any], label: str, op: str, target: str, known: Mapping[str, int]) -> LossNode:
    where = f"node {label!r} ({target})"
    is_known = target in METHODS if op == "call_method" else is_function_known(target)
    if not is_known:
        kind = "a method" if op == "call_method" else "a function"
        raise ValueError(f"{where}: {target!r} is not {kind} that this server computes; use another, {INSTEAD}")
    args, kwargs = node.get("args", []), node.get("kwargs", {})
    if not _is_list(args) or not _is_object(kwargs):
        raise ValueError(f"{where}: expected args as a list, and kwargs as an object")
    if refused := KEYWORDS_REFUSED & kwargs.keys():
        raise ValueError(
            f"{where}: the keyword arguments {', '.join(sorted(refused))} are not supported; leave them out"
        )
    if kwargs.get("inplace"):
        raise ValueError(f"{where}: inplace=True changes a tensor that others read; leave it out")
    if target == "getattr":
        if len(args) != 2 or args[1] not in ATTRIBUTES:
            raise ValueError(f"{where}: expected one of the attributes {', '.join(sorted(ATTRIBUTES))}")
        return LossNode(label, op, target, (_read_argument(args[0], where, known), args[1]), {})
    texts = _EQUATION if target.endswith("einsum") else None
    found = tuple(_read_argument(arg, where, known, texts) for arg in args)
    named = {key[:MAX_NAME]: _read_argument(arg, where, known, texts) for key, arg in kwargs.items()}
    return LossNode(label, op, target, found, named)


def is_function_known(target: str) -> bool:
    module, _, name = target.rpartition(".")
    if target == "getattr":
        return True
    if module in ("operator", "math"):
        return name in (OPERATORS if module == "operator" else NUMBER_FUNCTIONS)
    known = LINALG if module.endswith("linalg") else FUNCTIONS
    return module in MODULES and name.removeprefix(MODULES[module]) in known


def _read_argument(
    given: Any, where: str, known: Mapping[str, int], texts: re.Pattern[str] | None = None, depth: int = 0
) -> Any:
    """An argument with its references and constants as objects; what stands for itself stays as it is."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where}: an argument is nested more than {MAX_DEPTH} levels deep")

    def inner(parts: Any) -> list[Any]:
        if not _is_list(parts):
            raise ValueError(f"{where}: expected a list, got {_describe(parts)}")
        return [_read_argument(part, where, known, texts, depth + 1) for part in parts]

    match given:
        case None | bool() | float():
            return given
        case int():
            if not -(2**63) <= given < 2**63:
                raise ValueError(f"{where}: an integer does not fit into 64 bits; use a smaller one")
            return given
        case str():
            if given not in WORDS and not (texts and texts.fullmatch(given) and len(given) <= 100):
                raise ValueError(
                    f"{where}: the text {given[:80]!r} is no argument of an operation; use numbers and tensors"
                )
            return given
        case list():
            return inner(given)
        case {"ref": str(name), **rest} if not rest:
            if name not in known:
                raise ValueError(f"{where} reads {name[:80]!r}, which is no earlier node of the graph")
            return Ref(name)
        case {"tuple": parts, **rest} if not rest:
            return tuple(inner(parts))
        case {"slice": parts, **rest} if not rest and _is_list(parts) and len(parts) == 3:
            return slice(*inner(parts))
        case {"ellipsis": True, **rest} if not rest:
            return ...
        case {"float": "inf" | "-inf" | "nan" as number, **rest} if not rest:
            return math.inf if number == "inf" else -math.inf if number == "-inf" else math.nan
        case {"dtype": str(name), **rest} if not rest and name in DTYPES:
            return TorchConstant("dtype", name)
        case {"device": "cpu", **rest} if not rest:
            return TorchConstant("device", "cpu")
        case {"layout": "strided", **rest} if not rest:
            return TorchConstant("layout", "strided")
        case {"memory_format": "contiguous_format" | "preserve_format" as name, **rest} if not rest:
            return TorchConstant("memory_format", name)
        case _:
            raise ValueError(
                f"{where}: the argument is {_describe(given)}, which is not supported; use another, {INSTEAD}"
            )


def _read_output(args: Any, known: Mapping[str, int]) -> tuple[str, Mapping[str, str]]:
    """The nodes of the loss and of each metric."""
    expected = 'expected to return (loss, {"custom/<name>:sum" or "custom/<name>:mean": tensor})'
    pair: Any = args[0] if _is_list(args) and len(args) == 1 else None
    pair = pair if _is_list(pair) else _take_field(pair, "tuple")
    parts: list[Any] = pair if _is_list(pair) and len(pair) == 2 else [None, None]
    loss, metrics = _take_field(parts[0], "ref"), _take_field(parts[1], "dict")
    if not isinstance(loss, str) or not _is_object(metrics):
        raise ValueError(f"the output is {_describe(args)}; {expected}")
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"the loss returns {len(metrics):,} metrics, expected at most {MAX_METRICS}")
    found: dict[str, str] = {}
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name):
            raise ValueError(f"the metric {name[:100]!r} has a wrong name; {expected}")
        node = _take_field(value, "ref")
        if not isinstance(node, str) or node not in known:
            raise ValueError(f"the metric {name!r} is {_describe(value)}, expected a tensor")
        found[name] = node
    if loss not in known:
        raise ValueError(f"the loss is {loss[:80]!r}, which is no node of the graph")
    return loss, found


def _count_entries(argument: Any) -> int:
    return sum(1 + _count_entries(part) for part in argument) if _is_list(argument) or _is_tuple(argument) else 0


def _take_field(given: Any, name: str) -> Any:
    return given.get(name) if _is_object(given) and len(given) == 1 else None


def _describe(given: Any) -> str:
    """What was given, in a few words: it may be nested deeper than `repr` can follow."""
    if _is_object(given):
        return f"an object with {', '.join(list(given)[:3])[:80] or 'no fields'}"
    return "a list" if _is_list(given) else f"{given!r:.80}"
