"""Which options of an algorithm a training client supports.

Most options change rewards or advantages before they are sent, and every client takes them. The others need a feature
that the client declares in its `ClientCapabilities` (`rlvr.core.protocols`). An unsupported option is an error when the
run is built. docs/algorithms.md shows `support_table`. Exercised by `python -m pytest tests/test_capabilities.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rlvr.algorithms.loss_specs import PREFERENCE_SPECS, RL_LOSSES, find_loss_spec, is_custom_loss
from rlvr.algorithms.specs import Algorithm
from rlvr.core.protocols import ClientCapabilities, Feature


@dataclass(frozen=True)
class UsedOption:
    """One option that an algorithm uses: as a user sets it, the features it needs, and what to use instead."""

    key: str
    needs: tuple[Feature, ...] = ()
    remedy: str = ""

    def is_supported(self, client: ClientCapabilities) -> bool:
        loss = self.key.removeprefix("loss=")
        has_loss = loss == self.key or is_custom_loss(loss) or loss in PREFERENCE_SPECS or loss in client.losses
        return has_loss and client.features.issuperset(self.needs)


def list_options(algorithm: Algorithm) -> list[UsedOption]:
    """The options that an algorithm uses, its loss first."""
    a = algorithm
    # Terms beside the advantage (dro's pull) would reach the prompt's tokens too, if no weights held them off.
    needs = (Feature.EXTRA_INPUTS,) if a.loss_spec.weight_inputs else ()
    if a.has_custom_loss:
        needs = (Feature.OWN_LOSS,)
    if a.is_preference:
        needs = (Feature.OWN_LOSS, Feature.REFERENCE)
    used = [UsedOption(f"loss={a.loss}", needs, "use another loss")]
    if a.has_critic:
        used.append(UsedOption(f"advantage={a.advantage}", (Feature.CRITIC,), "use an advantage without a critic"))
    if a.kl_coef and a.kl_in == "reward":
        used.append(UsedOption("kl_in=reward", (Feature.REFERENCE,), "set kl_coef=0"))
    if a.kl_coef and a.kl_in == "loss":
        used.append(UsedOption("kl_in=loss", (Feature.EXTRA_INPUTS, Feature.REFERENCE), "use kl_in=reward"))
    if a.entropy_coef:
        needs = (Feature.FULL_LOGITS,) if a.entropy == "exact" else ()
        used.append(UsedOption(f"entropy={a.entropy}", needs, "use entropy=sampled"))
    used += [
        UsedOption(name)
        for name in (
            "dual_clip",
            "teacher_coef",
            "importance_cap",
            "clip_cov_ratio",
            "mask_truncated",
            "overlong_buffer",
        )
        if getattr(a, name)
    ]
    return used


def check_supported(algorithm: Algorithm, client: ClientCapabilities) -> None:
    """ValueError naming every option of the algorithm that the client does not support, and what to use instead."""
    problems: list[str] = []
    for option in list_options(algorithm):
        if option.is_supported(client):
            continue
        missing = " and ".join(need.value for need in option.needs if need not in client.features)
        reason = f"it needs {missing}" if missing else f"its losses: {', '.join(sorted(client.losses)) or 'none'}"
        problems.append(f"algorithm.{option.key} is not supported by client={client.name} ({reason}); {option.remedy}")
    if problems:
        raise ValueError(". ".join(problems))


def support_table(clients: Iterable[ClientCapabilities]) -> list[list[str]]:
    """A header, then a row per loss and option: what it needs of a client, and yes or no for each client."""
    clients = list(clients)
    base = Algorithm("any", "group_mean", "importance_sampling", "token_mean")
    losses = [_with_loss(base, name) for name in (*RL_LOSSES, "package.module:function")]
    variants: list[dict[str, Any]] = [
        {"advantage": "gae", "drop_equal_groups": False},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_in": "loss"},
        {"entropy_coef": 0.1},
        {"entropy_coef": 0.1, "entropy": "exact"},
        {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        {"teacher_coef": 1.0},
        {"importance_cap": 2.0},
        {"clip_cov_ratio": 0.0002},
        {"mask_truncated": True},
        {"overlong_buffer": 1},
    ]
    options = [list_options(algorithm)[-1] for algorithm in (*losses, *(replace(base, **v) for v in variants))]
    rows = [["option", "needs", *(client.name for client in clients)]]
    for option in options:
        support = ["yes" if option.is_supported(client) else "no" for client in clients]
        rows.append([option.key, " and ".join(need.value for need in option.needs) or "nothing more", *support])
    return rows


def _with_loss(base: Algorithm, name: str) -> Algorithm:
    clip = 0.2 if find_loss_spec(name).has_clip else None
    changed: dict[str, Any] = {"clip_low": clip, "clip_high": clip, "beta": find_loss_spec(name).config.get("beta")}
    if name in PREFERENCE_SPECS:
        changed |= {
            "advantage": "verdict",
            "reduction": "sequence_sum",
            "accept_above": 0.5,
            "drop_equal_groups": False,
        }
    return replace(base, loss=name, **changed)
