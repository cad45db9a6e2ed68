"""Which options of an algorithm a training client supports.

Most options change rewards or advantages before they are sent, and every client takes them. The others need a feature
that the client declares in its `ClientCapabilities` (`rlvr.core.protocols`). An unsupported option is an error when the
run is built. docs/train/algorithms.md shows `support_table`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.registry import resolve_algorithm
from rlvr.algorithms.specs import Algorithm
from rlvr.core.protocols import ClientCapabilities, Feature


@dataclass(frozen=True)
class UsedOption:
    """One option that an algorithm uses: as a user sets it, the features it needs, and what to use instead."""

    key: str
    needs: tuple[Feature, ...] = ()
    remedy: str = ""

    loss: str = ""
    """The named loss that it is of a client, if it is one."""

    def is_supported(self, client: ClientCapabilities) -> bool:
        return (not self.loss or self.loss in client.losses) and client.features.issuperset(self.needs)


def list_options(algorithm: Algorithm) -> list[UsedOption]:
    """The options that an algorithm uses, its loss first."""
    loss, advantage = algorithm.loss, algorithm.advantage
    named = "" if loss.needs_whole_step else loss.name
    used = [UsedOption(f"loss={loss.name}", loss.needs, "use another loss", named)]
    if advantage.takes_critic:
        used.append(UsedOption(f"advantage={advantage.name}", (Feature.CRITIC,), "use an advantage without a critic"))
    used += [UsedOption(key) for key in loss.used_keys()]
    used += [UsedOption(term.used_key()[0], term.needs, term.used_key()[1]) for term in algorithm.terms]
    return used + ([UsedOption("mask_truncated")] if algorithm.mask_truncated else [])


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
    base = resolve_algorithm("importance_sampling")
    losses = [_with_loss(name) for name in (*LOSSES, "package.module:function")]
    variants: list[dict[str, Any]] = [
        {"advantage": "gae"},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_in": "loss"},
        {"entropy_coef": 0.1},
        {"entropy_coef": 0.1, "entropy": "exact"},
        {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        {"teacher_coef": 1.0},
        {"self_distillation_coef": 1.0},
        {"importance_cap": 2.0},
        {"clip_cov_ratio": 0.0002},
        {"observation_coef": 0.05},
        {"overlong_buffer": 1},
        {"mask_truncated": True},
    ]
    options = [list_options(algorithm)[-1] for algorithm in (*losses, *(base.with_flat(v) for v in variants))]
    rows = [["option", "needs", *(client.name for client in clients)]]
    for option in options:
        support = ["yes" if option.is_supported(client) else "no" for client in clients]
        rows.append([option.key, " and ".join(need.value for need in option.needs) or "nothing more", *support])
    return rows


def _with_loss(name: str) -> Algorithm:
    loss = LOSSES.find(name)
    clip = {"clip_low": 0.2, "clip_high": 0.2} if "clip_low" in loss.flat_names() else {}
    is_preference = loss.compares_completions
    more = {"advantage": "verdict", "reduction": "sequence_sum", "drop_equal_groups": False} if is_preference else {}
    return resolve_algorithm("importance_sampling", loss=name, **clip, **more)
