"""The gradient of any function of per-token log-probs, over any client that has the named losses: two passes.

The first pass asks for the log-probs p of the targets; automatic differentiation of the user's function gives
g = dL/dp; the second is a cross-entropy with the weights -g, whose gradient is sum g dp/d(weights): the chain rule.

`build_named_loss` is such a function for a named loss with inputs that the protocol has no place for: a KL to a
reference, dro's weights, gspo's mask. Exercised by `tests/test_clients_local.py`, `tests/test_clients_mock.py` and
`tests/test_clients_tinker.py`. torch is imported when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvr.algorithms.loss_specs import ENTROPY_INPUT, KL_INPUTS, LOSS_SPECS
from rlvr.core.messages import Datum, ForwardBackwardOutput, NonFiniteError, TensorData
from rlvr.core.protocols import CustomLoss, TrainingClient

# Inputs that our engine takes and the Tinker protocol does not: those of a KL, optional weights, and masks (gspo's).
EXTRA_INPUTS = frozenset(KL_INPUTS).union(*((*spec.weight_inputs, *spec.masks) for spec in LOSS_SPECS.values()))


def two_passes(
    client: TrainingClient, data: list[Datum], loss_fn: CustomLoss, loss_fn_config: dict[str, float] | None = None
) -> ForwardBackwardOutput:
    """Add the gradient of `loss_fn(data, [logprobs, ...]) -> (loss, metrics)` to the client's.

    `loss_fn` gets one float32 torch tensor [T] of log-probs per datum and returns a tensor of one number made of them.
    The only setting is `temperature`, for clients that score at one. Metrics: the user's own, `loss:sum` (the user's
    loss) and `surrogate_loss:sum` (the second pass's). NonFiniteError where loss or gradient is not finite; nothing is
    added then.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ValueError(
            "forward_backward_custom needs torch to differentiate the loss: pip install 'rlvr[train]'"
        ) from error
    if unknown := set(loss_fn_config or {}) - {"temperature"}:
        raise ValueError(
            f"loss_fn_config: {', '.join(sorted(unknown))} has no effect on a custom loss; known: temperature"
        )
    zero = [cross_entropy_datum(d, [0.0] * d.model_input.length) for d in data]
    first = client.forward(zero, "cross_entropy", loss_fn_config).result()
    leaves = [out["logprobs"].to_torch().requires_grad_(True) for out in first.loss_fn_outputs]
    loss, metrics = _result(loss_fn(data, leaves))
    if not loss.requires_grad:
        raise ValueError(
            "the custom loss does not depend on the log-probs it was given, so it has no gradient; compute it from "
            "them by torch functions, without .detach(), .item() or numpy"
        )
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    bad = [i for i, g in enumerate(grads) if g is not None and not bool(torch.isfinite(g).all())]
    if bad or not bool(torch.isfinite(loss)):
        raise NonFiniteError("the custom loss or its gradient", bad)
    second = [
        cross_entropy_datum(d, torch.zeros_like(leaf) if g is None else -g)
        for d, leaf, g in zip(data, leaves, grads, strict=True)
    ]
    surrogate = client.forward_backward(second, "cross_entropy", loss_fn_config).result()
    values = {"loss:sum": float(loss.detach()), "surrogate_loss:sum": surrogate.metrics["loss:sum"]}
    return ForwardBackwardOutput(first.loss_fn_outputs, {**metrics, **values})


def _result(returned: Any) -> tuple[Any, dict[str, float]]:
    import torch

    fits = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)  # pyright: ignore[reportUnknownArgumentType]
    if not fits or not isinstance(returned[0], torch.Tensor) or returned[0].numel() != 1:
        raise ValueError(
            f"the custom loss returned {_describe(returned)}, expected (loss, metrics): a torch tensor with one number "
            "and a dictionary of floats"
        )
    return returned[0], returned[1]


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"  # pyright: ignore[reportUnknownVariableType]
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"a {type(value).__name__}{shape}"


def needs_two_passes(data: Sequence[Datum]) -> bool:
    """Whether a batch has inputs that the protocol's losses do not take. ValueError for exact entropy."""
    given = set[str]().union(*(datum.loss_fn_inputs for datum in data))
    if ENTROPY_INPUT in given:
        raise ValueError(
            "entropy_weights: the exact entropy needs the whole distribution, which stays on the server; use the "
            "sampled one (algorithm.entropy=sampled)"
        )
    return bool(given & EXTRA_INPUTS)


def build_named_loss(name: str, config: Mapping[str, float] | None = None) -> CustomLoss:
    """One of the engine's losses as a function of per-token log-probs, with every input that the engine takes."""
    import torch

    from rlvr.engine.losses import TERMS, kl_penalty

    if name not in LOSS_SPECS:
        raise ValueError(f"loss_fn {name!r} is unknown; known: {', '.join(LOSS_SPECS)}")
    settings = {**LOSS_SPECS[name].config, "kl_estimator": 1.0, **(config or {})}

    def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        row_N, p_N = torch.repeat_interleave(torch.tensor([len(p) for p in logprobs])), torch.cat(logprobs)
        inputs = {
            key: torch.from_numpy(np.concatenate([datum.loss_fn_inputs[key].data for datum in data]))
            for key in data[0].loss_fn_inputs
        }
        terms_N = TERMS[name](p_N, inputs, settings, row_N)
        if "kl_weights" in inputs:
            terms_N = terms_N + kl_penalty(p_N, inputs, settings["kl_estimator"])
        return terms_N.sum(), {}

    return loss


def cross_entropy_datum(datum: Datum, weights: Any) -> Datum:
    """The datum as a row of cross-entropy."""
    return Datum(
        datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": TensorData.of(weights)}
    )
