"""Losses of a user's, named in tests as `own_losses:NAME`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvr.algorithms.losses.clipped import Ppo
from rlvr.algorithms.losses.loss import Loss, LossSpec
from rlvr.core.variants import setting

SEEN: list[list[set[str]]] = []


def ppo_form(data: Any, logprobs: Any) -> Any:
    """The formula of the named loss `ppo` with the bounds of the spec `ppo`: -min(r A, clip(r, 0.8, 1.28) A)."""
    total = torch.zeros(())
    for datum, p in zip(data, logprobs, strict=True):
        q, a = (datum.loss_fn_inputs[name].to_torch() for name in ("logprobs", "advantages"))
        r = torch.exp(p - q)
        total = total - torch.minimum(r * a, r.clamp(0.8, 1.28) * a).sum()
    return total, {"rows": len(data), "first_term": logprobs[0][-1].detach()}


def count_words(prompt: str, response: str, meta: Any = None) -> float:
    """A reward that differs within a group from the first step on."""
    return len(response.split()) / 8 + 0.1 * response.count("1")


def look(data: Any, logprobs: Any) -> Any:
    """What it was given is in SEEN, a list of a call's data."""
    SEEN.append([set(datum.loss_fn_inputs) for datum in data])
    return torch.cat(logprobs).sum(), {}


def breaks_on_demand(data: Any, logprobs: Any) -> Any:
    if Path("break").exists() and len(data) > 3:  # not on the three rows that are tried before a run
        raise IndexError("no such row")
    return ppo_form(data, logprobs)


def pulls(data: Any, logprobs: Any) -> Any:
    """A quadratic pull to the policy that sampled, of no advantage: the reduction is in `weights`."""
    terms = [
        (0.5 * d.loss_fn_inputs["weights"].to_torch() * (p - d.loss_fn_inputs["logprobs"].to_torch()) ** 2).sum()
        for d, p in zip(data, logprobs, strict=True)
    ]
    return torch.stack(terms).sum(), {"pull": torch.stack(terms).sum()}


def no_tuple(data: Any, logprobs: Any) -> Any:
    return logprobs[0].sum()


def per_token(data: Any, logprobs: Any) -> Any:
    return torch.cat(logprobs), {}


def no_gradient(data: Any, logprobs: Any) -> Any:
    return torch.cat(logprobs).detach().sum(), {}


def not_a_number(data: Any, logprobs: Any) -> Any:
    return torch.cat(logprobs).sum() * float("nan"), {}


def infinite_slope(data: Any, logprobs: Any) -> Any:
    """A distance whose slope is nan where the policy is the one that sampled, as in every first step."""
    terms = [(p - d.loss_fn_inputs["logprobs"].to_torch()).square().sqrt() for d, p in zip(data, logprobs, strict=True)]
    return torch.cat(terms).sum(), {}


def raises(data: Any, logprobs: Any) -> Any:
    return data[0].loss_fn_inputs["advantage"], {}


def text_metric(data: Any, logprobs: Any) -> Any:
    return torch.cat(logprobs).sum(), {"mood": "good"}


def taken_name(data: Any, logprobs: Any) -> Any:
    return torch.cat(logprobs).sum(), {"loss:sum": 1.0}


@dataclass(frozen=True)
class Leash(Loss):
    """The gain (p - q) A with a quadratic pull to the sampler: a class with a setting of its own."""

    name = "leash_of_tests"
    spec = LossSpec("-A (p - q) + strength |A| (p - q)^2 / 2", config={"strength": 0.1})

    strength: float = setting(0.1, low=0, expected="at least 0")

    @staticmethod
    def torch_terms(p: Any, inputs: Any, config: Any, row_N: Any) -> Any:
        d, a = p - inputs["logprobs"], inputs["advantages"]
        return -a * d + config["strength"] * a.abs() * d.square() / 2

    @staticmethod
    def numpy_terms(p: Any, inputs: Any, config: Any, row_N: Any) -> tuple[Any, Any]:
        d, a = p - inputs["logprobs"], inputs["advantages"]
        return -a * d + config["strength"] * np.abs(a) * d**2 / 2, -a + config["strength"] * np.abs(a) * d

    def config(self) -> dict[str, float]:
        return {"strength": self.strength}


@dataclass(frozen=True)
class DoublePpo(Ppo):
    """Twice ppo: a subclass of a loss that servers know."""

    name = "double_ppo_of_tests"

    @staticmethod
    def torch_terms(p: Any, inputs: Any, config: Any, row_N: Any) -> Any:
        return 2 * Ppo.torch_terms(p, inputs, config, row_N)


@dataclass(frozen=True)
class InNumpyAlone(Loss):
    """Without its terms in torch."""

    name = "in_numpy_alone_of_tests"
    spec = LossSpec("-A (p - q)")

    @staticmethod
    def numpy_terms(p: Any, inputs: Any, config: Any, row_N: Any) -> tuple[Any, Any]:
        return -inputs["advantages"] * (p - inputs["logprobs"]), -inputs["advantages"]
