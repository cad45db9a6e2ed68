"""Rows, prompts and steps in the SDK's own types, for the tests that drive the real `tinker` SDK."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)
RATIO = ("target_tokens", "logprobs", "advantages")


def open_service(url: str, key: str) -> Iterator[Any]:
    """A `ServiceClient`, for a fixture to yield from; closed and collected where its warnings are expected."""
    made = tinker.ServiceClient(base_url=url, api_key=key)
    yield made
    made.close("success").result()
    del made
    gc.collect()


def rows(count: int = 3, seed: int = 0, *, length: int = 9) -> list[Any]:
    """Datums of the SDK with what any loss needs."""
    rng = np.random.default_rng(seed)
    made: list[Any] = []
    for i in range(count):
        tokens = rng.integers(0, 300, length + i % 3 + 1)
        n = len(tokens) - 1
        values = {
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": rng.random(n).astype(np.float32),
            "logprobs": (-5.5 - rng.random(n) * 0.5).astype(np.float32),
            "advantages": rng.normal(size=n).astype(np.float32),
            "sequence_ratio_mask": np.ones(n, np.float32),
        }
        made.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
                loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in values.items()},
            )
        )
    return made


def select_inputs(data: list[Any], *names: str) -> list[Any]:
    return [
        types.Datum(model_input=row.model_input, loss_fn_inputs={name: row.loss_fn_inputs[name] for name in names})
        for row in data
    ]


def prompt(*tokens: int) -> Any:
    return types.ModelInput.from_ints(list(tokens or (5, 6, 7, 8)))
