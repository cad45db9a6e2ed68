"""The gradient of any function of per-token log-probs, over any client that has the named losses: two passes.

The first pass asks for the log-probs p of the targets; automatic differentiation of the user's function gives
g = dL/dp; the second is a cross-entropy with the weights -g, whose gradient is sum g dp/d(weights): the chain rule.
`try_custom_loss` calls the function of `algorithm.loss=package.module:function` on a few tokens before a run begins.

`build_named_loss` is such a function for a named loss with inputs that the protocol has no place for: a KL to a
reference, dro's weights, gspo's mask. torch is imported when it is called.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvr.algorithms.loss_specs import CUSTOM_METRICS, LOSS_SPECS
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.losses.custom import FunctionLoss
from rlvr.algorithms.losses.loss import CROSS_ENTROPY_INPUT, ENTROPY_INPUT, KL_INPUTS
from rlvr.algorithms.specs import Algorithm
from rlvr.algorithms.update import make_datum
from rlvr.core.messages import Datum, ForwardBackwardOutput, NonFiniteError, TensorData
from rlvr.core.protocols import CustomLoss, TrainingClient
from rlvr.core.registry import load_path
from rlvr.core.types import Trajectory


def two_passes(
    client: TrainingClient, data: list[Datum], loss_fn: CustomLoss, loss_fn_config: dict[str, float] | None = None
) -> ForwardBackwardOutput:
    """Add the gradient of `loss_fn(data, [logprobs, ...]) -> (loss, metrics)` to the client's.

    `loss_fn` gets one float32 torch tensor [T] of log-probs per datum and returns a tensor of one number made of them.
    Settings: `temperature`, for clients that score at one; `kl_estimator` where the data have the inputs of a KL, which
    is added to the loss. Metrics: the user's own, `loss:sum` (the loss) and `surrogate_loss:sum` (the second pass's).
    ValueError naming the function for what it does wrong, NonFiniteError where loss or gradient is not finite; nothing
    is added then.
    """
    _import_torch()
    config = dict(loss_fn_config or {})
    known = ["temperature", *(["kl_estimator"] if any(KL_INPUTS[0] in datum.loss_fn_inputs for datum in data) else [])]
    if unknown := set(config) - set(known):
        raise ValueError(
            f"loss_fn_config: {', '.join(sorted(unknown))} has no effect on a custom loss; known: {', '.join(known)}"
        )
    scoring = {"temperature": config["temperature"]} if "temperature" in config else None
    zero = [cross_entropy_datum(d, [0.0] * d.model_input.length) for d in data]
    first = client.forward(zero, "cross_entropy", scoring).result()
    logprobs = [out["logprobs"].to_torch() for out in first.loss_fn_outputs]
    loss, metrics, slopes = _differentiate(loss_fn, data, logprobs, config.get("kl_estimator", 1.0))
    second = [cross_entropy_datum(d, -slope) for d, slope in zip(data, slopes, strict=True)]
    surrogate = client.forward_backward(second, "cross_entropy", scoring).result()
    own = dict(zip(CUSTOM_METRICS, (loss, surrogate.metrics["loss:sum"]), strict=True))
    return ForwardBackwardOutput(first.loss_fn_outputs, {**metrics, **own})


def _differentiate(
    loss_fn: CustomLoss, data: list[Datum], logprobs: Sequence[Any], kl_estimator: float
) -> tuple[float, dict[str, float], list[Any]]:
    """The loss, the user's metrics, and dL/dp [T] of every datum."""
    torch, name = _import_torch(), _name_of(loss_fn)
    leaves = [p.requires_grad_(True) for p in logprobs]
    loss, metrics = compute_custom_loss(loss_fn, data, leaves, kl_estimator)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    bad = [i for i, g in enumerate(grads) if g is not None and not bool(torch.isfinite(g).all())]
    if bad or not bool(torch.isfinite(loss)):
        raise NonFiniteError(f"the custom loss {name} or its gradient", bad)
    slopes = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)]
    return float(loss.detach()), metrics, slopes


def compute_custom_loss(
    loss_fn: CustomLoss, data: list[Datum], logprobs: list[Any], kl_estimator: float = 1.0
) -> tuple[Any, dict[str, float]]:
    """What the function returns, checked, with the KL and the cross-entropy of data that have their inputs added."""
    name = _name_of(loss_fn)
    try:
        returned = loss_fn(data, logprobs)
    except Exception as error:
        raise ValueError(
            f"the custom loss {name} raised {type(error).__name__}: {error} ({_place_of(error, loss_fn)})"
        ) from error
    loss, metrics = _check_returned(name, returned)
    if any(p.requires_grad for p in logprobs) and not loss.requires_grad:
        raise ValueError(
            f"the custom loss {name} does not depend on the log-probs it was given, so it has no gradient; compute it "
            "from them by torch functions, without .detach(), .item() or numpy"
        )
    extra = [key for key in (*KL_INPUTS, CROSS_ENTROPY_INPUT) if any(key in datum.loss_fn_inputs for datum in data)]
    if KL_INPUTS[0] in extra or CROSS_ENTROPY_INPUT in extra:
        from rlvr.engine.losses import add_extra_terms

        torch = _import_torch()
        inputs = {key: torch.cat([datum.loss_fn_inputs[key].to_torch() for datum in data]) for key in extra}
        p_N = torch.cat(logprobs)
        loss = loss + add_extra_terms(torch.zeros_like(p_N), p_N, inputs, kl_estimator).sum()
    return loss, metrics


def _check_returned(name: str, returned: Any) -> tuple[Any, dict[str, float]]:
    torch = _import_torch()
    fits = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)  # pyright: ignore[reportUnknownArgumentType]
    if not fits or not isinstance(returned[0], torch.Tensor) or returned[0].numel() != 1:
        raise ValueError(
            f"the custom loss {name} returned {_describe(returned)}, expected (loss, metrics): a torch tensor with one "
            "number and a dictionary of floats"
        )
    metrics: dict[str, float] = {}
    for key, value in returned[1].items():
        if not isinstance(key, str) or key in CUSTOM_METRICS:
            raise ValueError(
                f"the custom loss {name} returned a metric named {key!r}; expected text other than "
                f"{' and '.join(CUSTOM_METRICS)}, which are always reported"
            )
        try:
            metrics[key] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the custom loss {name} returned the metric {key!r} as {_describe(value)}, expected one number"
            ) from error
    return returned[0], metrics


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"  # pyright: ignore[reportUnknownVariableType]
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"a {type(value).__name__}{shape}"


def _name_of(loss_fn: CustomLoss) -> str:
    """`package.module:function`."""
    named: Any = loss_fn if hasattr(loss_fn, "__qualname__") else type(loss_fn)
    return f"{named.__module__}:{named.__qualname__}"


def _place_of(error: Exception, loss_fn: CustomLoss) -> str:
    """The file and line of the last call in the user's file, or of the last call of all."""
    frames = traceback.extract_tb(error.__traceback__)[1:] or traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(loss_fn, "__code__", None), "co_filename", None)
    own = [f for f in frames if f.filename == file != __file__]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def _import_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ValueError("a custom loss needs torch to differentiate it: pip install 'rlvr[train]'") from error
    return torch


def try_custom_loss(algorithm: Algorithm) -> None:
    """Call the algorithm's own loss on three short rows; ValueError for what it does wrong.

    It is a function, or the terms of a class in torch, which a client computes so if its server does not know the loss.
    The rows are what a run can give it: a completion sampled by the very policy, one of two turns with tokens of the
    environment, one of a single token and advantage 0.
    """
    torch = _import_torch()
    rows = [
        Trajectory("", [1, 2], "", [3, 4, 5], [-0.5, -1.0, -0.1], advantage=0.5),
        Trajectory("", [1, 2, 3], "", [4, 5, 6], [-2.0, 0.0, -0.7], advantage=-0.5, action_mask=[1, 0, 1]),
        Trajectory("", [1], "", [2], [-0.3]),
    ]
    for row in rows:
        row.reference_logprobs = [-0.4] * row.num_response_tokens
    data = [make_datum(algorithm, row, 1 / 6, row.logprobs) for row in rows]
    logprobs = [
        torch.tensor([-1.5] * (len(row.prompt_tokens) - 1) + [q + shift if q else -1.5 for q in row.logprobs])
        for row, shift in zip(rows, (0.0, 0.2, -0.2), strict=True)
    ]
    if isinstance(loss := algorithm.loss, FunctionLoss):
        loss_fn: CustomLoss = load_path("algorithm.loss", loss.name)
    else:
        loss_fn = build_named_loss(loss.name, loss.config())
    config = {key: value for term in algorithm.terms for key, value in term.config().items()}
    try:
        _differentiate(loss_fn, data, logprobs, config.get("kl_estimator", 1.0))
    except (ValueError, NonFiniteError) as error:
        raise ValueError(f"algorithm.loss={algorithm.loss.name}, tried on three short rows: {error}") from error


def needs_two_passes(data: Sequence[Datum]) -> bool:
    """Whether a batch has inputs that the protocol's losses do not take. ValueError for exact entropy."""
    given = set[str]().union(*(datum.loss_fn_inputs for datum in data))
    if ENTROPY_INPUT in given:
        raise ValueError(
            "entropy_weights: the exact entropy needs the whole distribution, which stays on the server; use the "
            "sampled one (algorithm.entropy=sampled)"
        )
    # What our engine takes and the Tinker protocol does not: inputs of a KL and of a cross-entropy beside the loss,
    # optional weights, and masks (gspo's).
    extra = {*KL_INPUTS, CROSS_ENTROPY_INPUT}.union(
        *((*spec.weight_inputs, *spec.masks) for spec in LOSS_SPECS.values())
    )
    return bool(given & extra)


def build_named_loss(name: str, config: Mapping[str, float] | None = None) -> CustomLoss:
    """One of the engine's losses as a function of per-token log-probs, with the inputs that are its own."""
    import torch

    from rlvr.engine.losses import TERMS

    if name not in LOSS_SPECS:
        raise ValueError(f"loss_fn {name!r} is unknown; known: {', '.join(LOSS_SPECS)}")
    settings = {**LOSS_SPECS[name].config, **(config or {})}

    def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        row_N, p_N = torch.repeat_interleave(torch.tensor([len(p) for p in logprobs])), torch.cat(logprobs)
        inputs = {
            key: torch.from_numpy(np.concatenate([datum.loss_fn_inputs[key].data for datum in data]))
            for key in data[0].loss_fn_inputs
        }
        return TERMS[name](p_N, inputs, settings, row_N).sum(), {}

    kind = LOSSES.get_known(name)
    loss.__module__, loss.__qualname__ = kind.__module__, kind.__qualname__  # messages name the loss's class
    return loss


def cross_entropy_datum(datum: Datum, weights: Any) -> Datum:
    """The datum as a row of cross-entropy."""
    return Datum(
        datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": TensorData.of(weights)}
    )
