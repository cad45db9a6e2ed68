"""Algorithms by name. A new one is a new spec, here with a golden file or by `register_algorithm` in a user's code.

A config can override any field (`algorithm.name=dr_grpo algorithm.reduction=token_mean`).
Exercised by `python -m pytest tests/test_algorithms.py`.

The specs follow their papers, but for `grpo`, the default: the group's mean as the baseline and PPO's clip (GRPO,
arXiv:2402.03300), no division by the standard deviation (Dr. GRPO, arXiv:2503.20783); token mean over the batch, the
asymmetric clip 0.2 / 0.28, and groups with equal rewards left out (DAPO, arXiv:2503.14476). The first paper's own form
is `grpo_original`. `ppo` is `grpo` by another name, PPO's clip without a value model; with one it is `ppo_critic`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlvr.algorithms.advantages import BATCH_ESTIMATORS, WITH_THRESHOLD
from rlvr.algorithms.loss_specs import PAIR_LOSSES, RL_LOSSES, find_loss_spec
from rlvr.algorithms.specs import FIELDS, Algorithm
from rlvr.core.registry import did_you_mean, load_object

UNSUPPORTED = ("orpo", "simpo")  # not to be taken for a typing error

ALGORITHMS: dict[str, Algorithm] = {}


def register_algorithm(spec: Algorithm) -> Algorithm:
    """Add a spec under its name, for `resolve_algorithm` and `algorithm.name=...`; a name is registered once."""
    if ALGORITHMS.get(spec.name, spec) != spec:
        raise ValueError(f"algorithm {spec.name!r} is registered already; choose another name")
    ALGORITHMS[spec.name] = spec
    return spec


for _spec in (
    Algorithm(
        "reinforce", "batch_mean", "importance_sampling", "sequence_sum", drop_equal_groups=False,
        source="Williams 1992; on-policy the importance ratio is 1",
    ),
    Algorithm(
        "reinforce_ema", "ema", "importance_sampling", "token_mean", drop_equal_groups=False,
        source="Williams 1992 with a moving baseline",
    ),
    Algorithm(
        "reinforce_pp", "token_normalized", "ppo", "token_mean", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2501.03262; its KL penalty is kl_coef with k1 in the reward",
    ),
    Algorithm(
        "rloo", "leave_one_out", "importance_sampling", "sequence_sum", drop_equal_groups=False,
        source="arXiv:2402.14740",
    ),
    Algorithm(
        "grpo_original", "group_normalized", "ppo", "sequence_mean", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2402.03300; its KL is kl_coef with k3 in the loss",
    ),
    Algorithm(
        "dr_grpo", "group_mean", "ppo", "constant", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2503.20783",
    ),
    Algorithm(
        "dapo", "group_normalized", "ppo", "token_mean", 0.2, 0.28, equal_by="reward",
        source="arXiv:2503.14476; with training.dynamic_sampling and overlong_buffer",
    ),
    Algorithm(
        "grpo", "group_mean", "ppo", "token_mean", 0.2, 0.28,
        source="the default: arXiv:2402.03300, without std as in arXiv:2503.20783, mean and clip of arXiv:2503.14476",
    ),
    Algorithm(
        "ppo", "group_mean", "ppo", "token_mean", 0.2, 0.28,
        source="arXiv:1707.06347, its clip without a critic: the same as grpo",
    ),
    Algorithm(
        "ppo_critic", "gae", "ppo", "token_mean", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:1707.06347 with the advantages of arXiv:1506.02438; its critic's settings are training.critic",
    ),
    Algorithm(
        "gspo", "group_normalized", "gspo", "sequence_mean", 3e-4, 4e-4, drop_equal_groups=False,
        source="arXiv:2507.18071, section 5.1",
    ),
    Algorithm(
        "cispo", "group_normalized", "cispo", "token_mean", 1.0, 3.0, drop_equal_groups=False,
        source="arXiv:2506.13585; weights clipped to 0 ... 4, the Tinker protocol's default",
    ),
    Algorithm(
        "dro", "group_mean", "dro", "token_mean", drop_equal_groups=False, beta=0.05,
        source="arXiv:2405.19107, with the group's mean as the value",
    ),
    Algorithm(
        "importance_sampling", "group_mean", "importance_sampling", "token_mean",
        source="the Tinker cookbook's default: group mean, no clip",
    ),
    Algorithm(
        "pass_at_k", "pass_at_k", "ppo", "sequence_sum", 0.2, 0.28, drop_equal_groups=False, pass_k=4,
        source="PKPO, arXiv:2505.15201: the expected best of k completions instead of one",
    ),
    Algorithm(
        "grpo_process", "process_normalized", "ppo", "sequence_mean", 0.2, 0.2, drop_equal_groups=False,
        source="arXiv:2402.03300, section 4.1.3: a reward for each turn",
    ),
    Algorithm(
        "raft", "acceptance", "cross_entropy", "token_mean", drop_equal_groups=False, accept_above=0.5,
        source="rejection-sampling fine-tuning on what the verifier accepts: arXiv:2304.06767, arXiv:2308.08998",
    ),
    Algorithm(
        "distillation", "zero", "importance_sampling", "token_mean", drop_equal_groups=False, teacher_coef=1.0,
        source="on-policy distillation: arXiv:2306.13649, https://thinkingmachines.ai/blog/on-policy-distillation/",
    ),
    Algorithm(
        "dpo", "verdict", "dpo", "sequence_sum", accept_above=0.5, beta=0.1,
        source="arXiv:2305.18290, over the pairs of each group: accepted and refused",
    ),
    Algorithm(
        "ipo", "verdict", "ipo", "sequence_sum", accept_above=0.5, beta=0.1,
        source="arXiv:2310.12036, over the same pairs",
    ),
    Algorithm(
        "kto", "verdict", "kto", "sequence_sum", drop_equal_groups=False, accept_above=0.5, beta=0.1,
        source="arXiv:2402.01306, over single completions: accepted or refused",
    ),
):  # fmt: skip
    register_algorithm(_spec)


def find_algorithm(name: str) -> Algorithm:
    """The registered spec, or the one at `package.module:SPEC`; ValueError with the nearest name for an unknown one."""
    if ":" in name:
        spec = load_object("algorithm", name)
        if not isinstance(spec, Algorithm):
            raise ValueError(f"algorithm {name!r}: it is of type {type(spec).__name__}, expected an Algorithm(...)")
        return spec
    if name not in ALGORITHMS:
        known = sorted(ALGORITHMS)
        near = did_you_mean(name, known)
        if name.lower() in UNSUPPORTED:
            near = " here: of the losses of preferred completions there are dpo, ipo and kto"
        raise ValueError(f"algorithm {name!r} is unknown{near}; known: {', '.join(known)}")
    return ALGORITHMS[name]


def resolve_algorithm(name: str, **overrides: Any) -> Algorithm:
    """The spec `name` with some fields replaced; ValueError for a name or a field that does not exist."""
    spec = find_algorithm(name)
    if unknown := [field for field in overrides if field not in FIELDS]:
        raise ValueError(
            f"algorithm {name!r} has no field {unknown[0]!r}{did_you_mean(unknown[0], FIELDS)}; "
            f"fields: {', '.join(FIELDS)}"
        )
    if overrides.get("loss", spec.loss) != spec.loss:  # another loss leaves the spec's own settings behind
        # A bound fits the kind of ratio it was made for: only cispo may take over what ppo has.
        clip = {} if (spec.loss, overrides["loss"]) == ("ppo", "cispo") else {"clip_low": None, "clip_high": None}
        is_known = overrides["loss"] in RL_LOSSES
        beta = find_loss_spec(overrides["loss"]).config.get("beta") if is_known else None
        overrides = {**clip, "beta": beta, "dual_clip": None, **overrides}
    if overrides.get("advantage", spec.advantage) != spec.advantage:
        above = 0.5 if overrides["advantage"] in WITH_THRESHOLD else None
        overrides = {"accept_above": above, "pass_k": 4 if overrides["advantage"] == "pass_at_k" else None, **overrides}
    is_paired = overrides.get("loss", spec.loss) in PAIR_LOSSES
    has_gradient = any(overrides.get(option) for option in ("kl_coef", "entropy_coef", "teacher_coef"))
    if has_gradient or (
        overrides.get("advantage") in BATCH_ESTIMATORS and not is_paired
    ):  # groups of equal rewards have a gradient then
        overrides = {"drop_equal_groups": False, **overrides}
    return replace(spec, **overrides)
