"""The gradient of any function of per-token log-probs, over any client that has the named losses: two passes.

The first pass asks for the log-probs p of the targets; automatic differentiation of the user's function gives
g = dL/dp; the second is a cross-entropy with the weights -g, whose gradient is sum g dp/d(weights): the chain rule.
Exercised by `tests/test_clients_local.py` and `tests/test_clients_mock.py`. torch is imported when it is called.
"""

from __future__ import annotations

from typing import Any

from rlvr.messages import Datum, ForwardBackwardOutput, NonFiniteError, TensorData
from rlvr.protocols import CustomLoss, TrainingClient


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
    zero = [_weighted(d, [0.0] * d.model_input.length) for d in data]
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
        _weighted(d, torch.zeros_like(leaf) if g is None else -g)
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
            f"the custom loss returned {_told(returned)}, expected (loss, metrics): a torch tensor with one number and "
            "a dictionary of floats"
        )
    return returned[0], returned[1]


def _told(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_told(part) for part in value)})"  # pyright: ignore[reportUnknownVariableType]
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"a {type(value).__name__}{shape}"


def _weighted(datum: Datum, weights: Any) -> Datum:
    return Datum(
        datum.model_input,
        {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": TensorData.of(weights)},
    )
