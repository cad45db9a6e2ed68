"""Algorithms by name. A new one is a new spec, here with a golden file or by `register_algorithm` in a user's code.

A config can override any field (`algorithm.name=dr_grpo algorithm.reduction=token_mean`).

The specs follow their papers, but for `grpo`, the default: the group's mean as the baseline and PPO's clip (GRPO,
arXiv:2402.03300), no division by the standard deviation (Dr. GRPO, arXiv:2503.20783); token mean over the batch, the
asymmetric clip 0.2 / 0.28, and groups with equal rewards left out (DAPO, arXiv:2503.14476). The first paper's own form
is `grpo_original`. `ppo` is `grpo` by another name, PPO's clip without a value model; with one it is `ppo_critic`.
"""

from __future__ import annotations

import inspect
from typing import Any

from rlvr.algorithms.advantages import (
    AcceptanceAdvantage,
    BatchMeanAdvantage,
    GaeAdvantage,
    GroupMeanAdvantage,
    GroupNormalizedAdvantage,
    LeaveOneOutAdvantage,
    MovingAverageAdvantage,
    PassAtKAdvantage,
    ProcessNormalizedAdvantage,
    RewardNormalizedAdvantage,
    RoleBaselineAdvantage,
    TokenNormalizedAdvantage,
    VerdictAdvantage,
    ZeroAdvantage,
)
from rlvr.algorithms.losses.clipped import Cispo, Gspo, Ppo
from rlvr.algorithms.losses.dro import Dro
from rlvr.algorithms.losses.policy_gradient import CrossEntropy, ImportanceSampling
from rlvr.algorithms.losses.preferences import Dpo, Ipo, Kto
from rlvr.algorithms.losses.sapo import Sapo
from rlvr.algorithms.specs import Algorithm
from rlvr.algorithms.terms.distillation import Teacher
from rlvr.algorithms.terms.observation import ObservationLoss
from rlvr.algorithms.terms.self_distillation import SelfDistillation
from rlvr.core.plugins import describe_plugins, load_plugins
from rlvr.core.registry import did_you_mean, load_object, note_own_name

UNSUPPORTED = ("orpo", "simpo")  # not to be taken for a typing error

ALGORITHMS: dict[str, Algorithm] = {}


def register_algorithm(spec: Algorithm) -> Algorithm:
    """Add a spec under its name, for `resolve_algorithm` and `algorithm.name=...`; a name is registered once."""
    if ALGORITHMS.get(spec.name, spec) != spec:
        raise ValueError(f"algorithm {spec.name!r} is registered already; choose another name")
    ALGORITHMS[spec.name] = spec
    frame = inspect.currentframe()
    note_own_name(spec.name, frame.f_back.f_globals.get("__name__") if frame and frame.f_back else None)
    return spec


_TIGHT, _WIDE = Ppo(0.2, 0.2), Ppo(0.2, 0.28)

for _spec in (
    Algorithm(
        "reinforce", BatchMeanAdvantage(), ImportanceSampling(), "sequence_sum", drop_equal_groups=False,
        source="Williams 1992; on-policy the importance ratio is 1",
    ),
    Algorithm(
        "reinforce_ema", MovingAverageAdvantage(), ImportanceSampling(), "token_mean", drop_equal_groups=False,
        source="Williams 1992 with a moving baseline",
    ),
    Algorithm(
        "reinforce_pp", TokenNormalizedAdvantage(), _TIGHT, "token_mean", drop_equal_groups=False,
        source="arXiv:2501.03262; its KL penalty is kl_coef with k1 in the reward",
    ),
    Algorithm(
        "rloo", LeaveOneOutAdvantage(), ImportanceSampling(), "sequence_sum", drop_equal_groups=False,
        source="arXiv:2402.14740",
    ),
    Algorithm(
        "grpo_original", GroupNormalizedAdvantage(), _TIGHT, "sequence_mean", drop_equal_groups=False,
        source="arXiv:2402.03300; its KL is kl_coef with k3 in the loss",
    ),
    Algorithm(
        "gdpo", RewardNormalizedAdvantage(), _TIGHT, "sequence_mean", drop_equal_groups=False,
        source="GDPO, arXiv:2601.05242: several rewards, each normalized by itself; the rest is grpo_original",
    ),
    Algorithm(
        "echo", GroupNormalizedAdvantage(), _TIGHT, "sequence_mean", (ObservationLoss(0.05),), drop_equal_groups=False,
        source="ECHO, arXiv:2605.24517: what the environment writes is predicted; the rest is grpo_original",
    ),
    Algorithm(
        "dr_grpo", GroupMeanAdvantage(), _TIGHT, "constant", drop_equal_groups=False,
        source="arXiv:2503.20783",
    ),
    Algorithm(
        "dapo", GroupNormalizedAdvantage(), _WIDE, "token_mean", equal_by="reward",
        source="arXiv:2503.14476; with training.dynamic_sampling and overlong_buffer",
    ),
    Algorithm(
        "grpo", GroupMeanAdvantage(), _WIDE, "token_mean",
        source="the default: arXiv:2402.03300, without std as in arXiv:2503.20783, mean and clip of arXiv:2503.14476",
    ),
    Algorithm(
        "ppo", GroupMeanAdvantage(), _WIDE, "token_mean",
        source="arXiv:1707.06347, its clip without a critic: the same as grpo",
    ),
    Algorithm(
        "ppo_critic", GaeAdvantage(), _TIGHT, "token_mean", drop_equal_groups=False,
        source="arXiv:1707.06347 with the advantages of arXiv:1506.02438; its critic's settings are training.critic",
    ),
    Algorithm(
        "gspo", GroupNormalizedAdvantage(), Gspo(3e-4, 4e-4), "sequence_mean", drop_equal_groups=False,
        source="arXiv:2507.18071, section 5.1",
    ),
    Algorithm(
        "cispo", GroupNormalizedAdvantage(), Cispo(1.0, 3.0), "token_mean", drop_equal_groups=False,
        source="arXiv:2506.13585; weights clipped to 0 ... 4, the Tinker protocol's default",
    ),
    Algorithm(
        "sapo", GroupNormalizedAdvantage(), Sapo(), "sequence_mean", drop_equal_groups=False,
        source="Soft Adaptive Policy Optimization, arXiv:2511.20347",
    ),
    Algorithm(
        "dro", GroupMeanAdvantage(), Dro(), "token_mean", drop_equal_groups=False,
        source="arXiv:2405.19107, with the group's mean as the value",
    ),
    Algorithm(
        "importance_sampling", GroupMeanAdvantage(), ImportanceSampling(), "token_mean",
        source="the Tinker cookbook's default: group mean, no clip",
    ),
    Algorithm(
        "pass_at_k", PassAtKAdvantage(), _WIDE, "sequence_sum", drop_equal_groups=False,
        source="PKPO, arXiv:2505.15201: the expected best of k completions instead of one",
    ),
    Algorithm(
        "grpo_process", ProcessNormalizedAdvantage(), _TIGHT, "sequence_mean", drop_equal_groups=False,
        source="arXiv:2402.03300, section 4.1.3: a reward for each turn",
    ),
    Algorithm(
        "spiral", RoleBaselineAdvantage(), ImportanceSampling(), "sequence_sum", drop_equal_groups=False,
        source="SPIRAL, arXiv:2506.24119: self-play, a running baseline for each role of a game",
    ),
    Algorithm(
        "raft", AcceptanceAdvantage(), CrossEntropy(), "token_mean", drop_equal_groups=False,
        source="rejection-sampling fine-tuning on what the verifier accepts: arXiv:2304.06767, arXiv:2308.08998",
    ),
    Algorithm(
        "distillation", ZeroAdvantage(), ImportanceSampling(), "token_mean", (Teacher(1.0),), drop_equal_groups=False,
        source="on-policy distillation: arXiv:2306.13649, https://thinkingmachines.ai/blog/on-policy-distillation/",
    ),
    Algorithm(
        "sdpo", ZeroAdvantage(), Cispo(1.0, 1.0), "sequence_mean", (SelfDistillation(1.0),), drop_equal_groups=False,
        source="self-distillation: SDPO, arXiv:2601.20802, on sampled tokens; ratios up to 2 as in its code",
    ),
    Algorithm(
        "dpo", VerdictAdvantage(), Dpo(), "sequence_sum",
        source="arXiv:2305.18290, over the pairs of each group: accepted and refused",
    ),
    Algorithm(
        "ipo", VerdictAdvantage(), Ipo(), "sequence_sum",
        source="arXiv:2310.12036, over the same pairs",
    ),
    Algorithm(
        "kto", VerdictAdvantage(), Kto(), "sequence_sum", drop_equal_groups=False,
        source="arXiv:2402.01306, over single completions: accepted or refused",
    ),
):  # fmt: skip
    register_algorithm(_spec)


def find_algorithm(name: str) -> Algorithm:
    """The registered spec, or the one at `package.module:SPEC`; ValueError with the nearest name for an unknown one."""
    if ":" in name:
        spec = load_object("algorithm", name)
        if not isinstance(spec, Algorithm):
            raise ValueError(
                f"algorithm {name!r}: the object is of type {type(spec).__name__}, expected an Algorithm(...)"
            )
        return spec
    if name not in ALGORITHMS:
        load_plugins()
    if name not in ALGORITHMS:
        known = sorted(ALGORITHMS)
        near = did_you_mean(name, known)
        if name.lower() in UNSUPPORTED:
            near = " here: of the losses of preferred completions there are dpo, ipo and kto"
        raise ValueError(f"algorithm {name!r} is unknown{near}; known: {', '.join(known)}{describe_plugins()}")
    return ALGORITHMS[name]


def resolve_algorithm(name: str, **overrides: Any) -> Algorithm:
    """The spec `name` with some options set by their flat keys (`Algorithm.with_flat`)."""
    return find_algorithm(name).with_flat(overrides) if overrides else find_algorithm(name)
