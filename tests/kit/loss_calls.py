"""One call of every named loss, and of those with a KL to a reference, for the tests of clients of servers."""

from __future__ import annotations

import numpy as np

from rlvr.core.messages import Datum, TensorData
from tests.kit.tiny import data


def rows_with_kl(rows: list[Datum]) -> list[Datum]:
    """The rows with a KL to a reference, which the protocol has no place for."""
    rng = np.random.default_rng(5)
    return [
        Datum(
            row.model_input,
            {
                **{k: v for k, v in row.loss_fn_inputs.items() if k in ("target_tokens", "logprobs", "advantages")},
                "kl_weights": TensorData.of(rng.random(row.model_input.length)),
                "reference_logprobs": TensorData.of(-3 * rng.random(row.model_input.length)),
            },
        )
        for row in rows
    ]


def select(rows: list[Datum], *names: str) -> list[Datum]:
    return [Datum(r.model_input, {name: r.loss_fn_inputs[name] for name in ("target_tokens", *names)}) for r in rows]


POLICY = ("logprobs", "advantages")
CALLS: list[tuple[str, dict[str, float], list[Datum]]] = [
    ("cross_entropy", {}, select(data(), "weights")),
    ("importance_sampling", {}, select(data(), *POLICY)),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, select(data(), *POLICY)),
    ("ppo", {"dual_clip_threshold": 1.2}, select(data(), *POLICY)),
    ("cispo", {}, select(data(), *POLICY)),
    ("dro", {"beta": 0.3}, select(data(), *POLICY)),
    ("gspo", {}, select(data(), *POLICY, "sequence_ratio_mask")),
    ("ppo", {"kl_estimator": 3.0}, rows_with_kl(data())),
    ("importance_sampling", {"kl_estimator": 2.0}, rows_with_kl(data())),
]
