"""The critic's part of an update: it predicts the values of a batch, and learns the returns.

    UpdateInputs(baseline, max_tokens, critic=ValueCritic(client.create_critic(), adam=lambda n: AdamParams(1e-4)))

Returns and advantages (`rlvr.algorithms.gae`) are computed from the values before the update. The critic has its own
client and optimizer; its batches, substeps and reduction are the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr.algorithms.loss_specs import VALUE_LOSS
from rlvr.core.messages import AdamParams, Datum, ModelInput, TensorData
from rlvr.core.protocols import TrainingClient
from rlvr.core.types import Trajectory, mean

Rows = Sequence[tuple[Trajectory, float]]


@dataclass(frozen=True)
class ValueCritic:
    """A critic: its `client`, and `adam`, which gives the parameters of the n-th optimizer step of an update.

    `value_clip` bounds how far a value may move from the one before the update; None: no clip. While the critic learns
    `alone` (warm-up), the policy makes no step.
    """

    client: TrainingClient
    adam: Callable[[int], AdamParams]
    value_clip: float | None = None
    alone: bool = False

    def fill_values(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the `values` [R + 1] of every trajectory that has a reward, by a forward pass."""
        known = [t for t in trajectories if t.reward is not None and not t.is_empty]
        for t in known:
            t.require_trainable()
        if not known:
            return
        output = self.client.forward([make_value_datum(t, 0.0) for t in known], VALUE_LOSS).result()
        for t, row in zip(known, output.loss_fn_outputs, strict=True):
            t.values = np.asarray(row["values"].data, dtype=float)[len(t.prompt_tokens) - 1 :].tolist()

    def learn(self, batches: Iterable[Rows]) -> dict[str, float]:
        """Make one optimizer step for each batch of rows with their reduction weights; the metrics of the update."""
        settings = {} if self.value_clip is None else {"value_clip": self.value_clip}
        losses: list[float] = []
        grad_norm, rates, seen = 0.0, dict[str, float](), list[Trajectory]()
        moved = tokens = 0
        for number, rows in enumerate(batches):
            data = [make_value_datum(t, weight) for t, weight in rows]
            output = self.client.forward_backward(data, VALUE_LOSS, settings or None).result()
            parameters = self.adam(number)
            grad_norm = self.client.optim_step(parameters).result().metrics.get("grad_norm", 0.0)
            losses.append(output.metrics["loss:sum"])
            rates = parameters.rates
            for datum, row in zip(data, output.loss_fn_outputs, strict=True):
                acted = datum.loss_fn_inputs["weights"].data != 0
                change = np.abs(np.asarray(row["values"].data) - datum.loss_fn_inputs["values"].data)[acted]
                tokens += len(change)
                moved += 0 if self.value_clip is None else int((change > self.value_clip).sum())
            seen += [t for t, _ in rows]
        if not losses:
            return {}
        return {
            "critic/loss": mean(losses),
            **describe_values(seen),
            "critic/clip_ratio": moved / max(1, tokens),
            "critic/grad_norm": grad_norm,
            **{f"critic/{name}": rate for name, rate in rates.items()},
        }


def make_value_datum(trajectory: Trajectory, weight: float) -> Datum:
    """The critic's datum of a trajectory, with inputs [T] over all its tokens; position t predicts from tokens 0 to t.

    A sampled token has its value, its return and the reduction `weight` at the position before it; all other
    positions of these three are 0.
    """
    t = trajectory
    tokens, lead = t.full_tokens, len(t.prompt_tokens) - 1
    mask_R = np.asarray(t.action_mask, dtype=np.float64)

    def align(given_R: Any) -> TensorData:
        known_R = np.asarray(given_R) if len(given_R) else np.zeros(len(mask_R))
        return TensorData.of(np.concatenate([np.zeros(lead), known_R * mask_R, np.zeros(1)]))

    return Datum(
        ModelInput(tokens),
        {
            "target_tokens": [*tokens[1:], tokens[-1]],  # the last place has none, and no target is read
            "values": align(t.values[:-1]),
            "returns": align(t.returns),
            "weights": align(np.full(len(mask_R), weight)),
        },
    )


def describe_values(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of the sampled tokens: mean value and return, and explained variance unless all returns are equal."""
    masks = [np.asarray(t.action_mask, dtype=bool) for t in trajectories]
    values = np.concatenate([np.asarray(t.values[:-1])[m] for t, m in zip(trajectories, masks, strict=True)])
    returns = np.concatenate([np.asarray(t.returns)[m] for t, m in zip(trajectories, masks, strict=True)])
    is_equal = returns.min() == returns.max()  # the variance of equal numbers may be above 0 by rounding
    explained = {} if is_equal else {"critic/explained_variance": 1.0 - float((returns - values).var() / returns.var())}
    return {"critic/value": float(values.mean()), "critic/return": float(returns.mean()), **explained}
