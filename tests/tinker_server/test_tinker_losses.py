"""Every loss through the real SDK, off the policy that sampled, held against its formula in float64.

The formulas are derived again here, term by term, from the published ones. The gradient is checked without reading it:
a loss and the cross-entropy with its slopes as weights have opposite gradients, which add up to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from tinker import types

from tests.kit.tinker_model import write_model
from tests.kit.tinker_rows import ADAM, open_service
from tests.kit.tinker_server import TinkerServer

# The SDK leaves its connections to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]
NAME = "tiny"
PROMPT, ANSWERS = [5, 6, 7, 8], [[11, 12, 13], [14, 15, 16, 17, 18], [19], [20, 21, 22, 23]]
ROUNDING = 1e-5  # of a gradient in float32 against itself: sums of tens of terms


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("losses")
    write_model(folder / "model")
    with TinkerServer({NAME: folder / "model"}, folder / "state", "--device", "cpu") as server:
        yield from open_service(server.url, server.key)


def datum(tokens: list[int], **inputs: np.ndarray) -> Any:
    given = {"target_tokens": np.array(tokens[1:]), **{k: v.astype(np.float32) for k, v in inputs.items()}}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in given.items()},
    )


def clipped(ratio: np.ndarray, A: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """-min(ratio A, clip(ratio) A) by cases, and its slope: 0 where the bound is the smaller."""
    bound = np.where(A > 0, high, low)
    binds = np.where(A > 0, ratio > high, ratio < low)
    return -np.where(binds, bound, ratio) * A, np.where(binds, 0.0, -ratio * A)


def derive(loss: str, p: np.ndarray, x: dict[str, np.ndarray], c: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Terms and slopes dterm/dp of one row, in float64."""
    if loss == "cross_entropy":
        return -x["weights"] * p, -x["weights"]
    q, A = x["logprobs"], x["advantages"]
    r = np.exp(p - q)
    match loss:
        case "importance_sampling":
            return -r * A, -r * A
        case "ppo":
            return clipped(r, A, c["clip_low_threshold"], c["clip_high_threshold"])
        case "cispo":
            weight = np.minimum(np.maximum(r, c["clip_low_threshold"]), c["clip_high_threshold"])
            return -weight * p * A, -weight * A
        case "dro":
            pulled = ~((q == 0) & (A == 0))
            return -(p * A - pulled * c["beta"] / 2 * (p - q) ** 2), -(A - pulled * c["beta"] * (p - q))
        case _:
            acted = x["sequence_ratio_mask"] != 0
            s = np.exp((p - q)[acted].mean())
            return clipped(np.full_like(p, s), A, c["clip_low_threshold"], c["clip_high_threshold"])


SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
}
INPUTS = {"cross_entropy": ["weights"], "gspo": ["logprobs", "advantages", "sequence_ratio_mask"]}


@pytest.mark.parametrize("loss", SETTINGS)
def test_a_loss_off_policy_is_its_formula(service: Any, loss: str) -> None:
    """Value and gradient, with ratios from 0.2 to 5, both signs of A, and 0 for everything on the prompt."""
    client = service.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()
    rng = np.random.default_rng(4)
    rows = [PROMPT + answer for answer in ANSWERS]
    plain = [datum(row, weights=np.zeros(len(row) - 1)) for row in rows]
    first = client.forward(plain, "cross_entropy").result()
    expected, data, opposite, ratios = 0.0, [], [], []
    for row, out in zip(rows, first.loss_fn_outputs, strict=True):
        p = out["logprobs"].to_numpy().astype(np.float64)
        on_answer = np.arange(len(p)) >= len(PROMPT) - 1
        gap = rng.uniform(-1.6, 1.6, len(p))
        inputs = {
            "logprobs": (np.where(on_answer, p - gap, 0.0)).astype(np.float32).astype(np.float64),
            "advantages": (rng.normal(size=len(p)) * on_answer).astype(np.float32).astype(np.float64),
            "weights": (rng.random(len(p)) * on_answer).astype(np.float32).astype(np.float64),
            "sequence_ratio_mask": on_answer.astype(np.float64),
        }
        terms, slopes = derive(loss, p, inputs, SETTINGS[loss])
        expected += terms.sum()
        data.append(datum(row, **{name: inputs[name] for name in INPUTS.get(loss, ["logprobs", "advantages"])}))
        opposite.append(datum(row, weights=slopes))  # cross-entropy has the slopes -weights
        ratios += gap[on_answer].tolist()
    assert min(ratios) < np.log(0.5) and max(ratios) > np.log(1.5), "the bounds bind on both sides"

    found = client.forward_backward(data, loss, SETTINGS[loss] or None).result()
    assert found.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    norm = client.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    client.forward_backward(data, loss, SETTINGS[loss] or None)
    client.forward_backward(opposite, "cross_entropy")
    left = client.optim_step(ADAM).result().metrics["grad_norm"]
    assert norm > 1e-2 and left < ROUNDING * norm, f"{left} of {norm} is left"
