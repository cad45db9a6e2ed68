"""The named losses: formula, inputs and settings of each, and the check of a batch against them.

One spec for every client. The formulas in code have the same names: `rlvr.engine.losses.TERMS` in torch,
`rlvr.clients.mock.numpy_losses.FORMULAS` in numpy with derivatives. A new loss is a spec here and a formula there;
`tests/test_losses.py` and `tests/test_clients_mock.py` hold the three tables together. No torch here.

Legend: p = log-prob of the target under the trained policy, q = `logprobs` (the sampler's), A = `advantages`,
r = exp(min(p - q, 20)) the importance ratio with dr/dp = r (`MAX_LOG_RATIO`), sg = stop-gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvr.core.messages import Datum

# Inputs that any loss takes beside its own: a KL to a reference and an exact entropy bonus.
KL_INPUTS = ("kl_weights", "reference_logprobs")
ENTROPY_INPUT = "entropy_weights"
# No exp of a difference of log-probs is above exp(20) = 4.9e8: fp32 ends at exp(88), and inf x 0 is nan. Beyond it a
# ratio and a k3 keep the slope that they have there.
MAX_LOG_RATIO = 20.0
KL_ESTIMATORS = ("k1", "k2", "k3")  # `loss_fn_config={"kl_estimator": 1.0}` and so on


@dataclass(frozen=True)
class LossSpec:
    """One named loss. Every loss is a sum over tokens; the reduction is a weight folded into `advantages` or `weights`.

    - `inputs` [T] are required in every datum besides `target_tokens`, and so are `masks`, 1 where the policy acted.
    - `weight_inputs` [T] are optional: weights of terms that do not carry A, so that a reduction reaches them too.
    - `config` holds the settings (`loss_fn_config`) with their defaults; thresholds are absolute ratios.
    - `allows_many_targets`: `target_tokens` and the inputs may also be [T, K].
    """

    formula: str
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    masks: tuple[str, ...] = ()
    weight_inputs: tuple[str, ...] = ()
    allows_many_targets: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        return (*self.inputs, *self.masks)

    @property
    def optional(self) -> tuple[str, ...]:
        return () if self.predicts_values else (*KL_INPUTS, ENTROPY_INPUT, *self.weight_inputs)

    @property
    def predicts_values(self) -> bool:
        """Whether it is the loss of a critic, whose outputs are values instead of log-probs."""
        return "returns" in self.inputs

    @property
    def uses_advantages(self) -> bool:
        return "advantages" in self.inputs

    @property
    def has_clip(self) -> bool:
        return "clip_low_threshold" in self.config

    @property
    def has_dual_clip(self) -> bool:
        return DUAL_CLIP in self.config


DUAL_CLIP = "dual_clip_threshold"
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, DUAL_CLIP: math.inf}
LOSS_SPECS: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(
        "-w p; with K targets per token (a teacher's distribution, for example) -sum_k w_k p_k.",
        inputs=("weights",),
        allows_many_targets=True,
    ),
    "importance_sampling": LossSpec(
        "-r A: the policy gradient corrected for the sampler's weights, unclipped. On-policy it is REINFORCE."
    ),
    "ppo": LossSpec(
        "-min(min(r, c) A, clip(r, lo, hi) A). Schulman et al. 2017, arXiv:1707.06347, eq. 7, with c = "
        "`dual_clip_threshold`, by default none: where A is negative, the term is at most c |A| and has no gradient "
        "beyond. Dual clip, Ye et al. 2020, arXiv:1912.09729.",
        config=_CLIP,
    ),
    "cispo": LossSpec(
        "-sg(clip(r, lo, hi)) p A: the weight is clipped, no token loses its gradient. MiniMax-M1, arXiv:2506.13585.",
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": LossSpec(
        "-(p A - b beta (p - q)^2 / 2), b = `beta_weights`; if absent, b is 0 where q and A are both exactly 0, as "
        "clients send them on a prompt, and 1 elsewhere. Direct reward optimisation, arXiv:2405.19107, with A as the "
        "centred reward. The quadratic term is by token, as in the Tinker protocol; the paper's is that of the whole "
        "answer.",
        config={"beta": 0.05},
        weight_inputs=("beta_weights",),
    ),
    "gspo": LossSpec(
        "PPO's clip, with its c, on the sequence ratio s = exp(mean over `sequence_ratio_mask` of (sg(p) - q)), "
        "with s_t = s exp(p - sg(p)). GSPO, arXiv:2507.18071, eq. 5 and 14.",
        config=_CLIP,
        masks=("sequence_ratio_mask",),
    ),
}
# The loss of a critic, whose client has values instead of log-probs: V the critic's value, R `returns`, w `weights`.
VALUE_LOSS = "value"
VALUE_SPEC = LossSpec(
    "w max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2, V_old = `values` from before the "
    "step; without a value_clip w (V - R)^2 / 2. The clip of OpenAI's PPO baseline, as in verl and TRL.",
    inputs=("values", "returns", "weights"),
    config={"value_clip": math.inf},
)
_TOKEN_SPECS = {**LOSS_SPECS, VALUE_LOSS: VALUE_SPEC}  # a client takes these by name
_KNOWN_INPUTS = {"target_tokens"}.union(*((*spec.required, *spec.optional) for spec in _TOKEN_SPECS.values()))

# Losses of all rows of an optimizer step at once, not sums over tokens: `rlvr.algorithms.preferences` computes them,
# and a client takes them by `forward_backward_custom`.
_PREFERENCE: dict[str, Any] = {"inputs": ("reference_logprobs",), "masks": ("mask",), "config": {"beta": 0.1}}
PREFERENCE_SPECS: dict[str, LossSpec] = {
    "dpo": LossSpec("-log sigmoid(beta (h_w - h_l)). Rafailov et al. 2023, arXiv:2305.18290, eq. 7.", **_PREFERENCE),
    "ipo": LossSpec("(h_w - h_l - 1 / (2 beta))^2. Azar et al. 2023, arXiv:2310.12036, eq. 17.", **_PREFERENCE),
    "kto": LossSpec(
        "1 - sigmoid(beta (h - z)) of a preferred completion, 1 - sigmoid(beta (z - h)) of another one; "
        "z = max(0, mean of h), without a gradient. Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8, with "
        "lambda_D = lambda_U = 1. The paper estimates z from completions of other prompts. So does this for given "
        "completions; otherwise it takes the policy's own.",
        **_PREFERENCE,
    ),
}
PAIR_LOSSES = ("dpo", "ipo")  # of two completions of a group; kto takes single ones
# Those of an algorithm: its cross-entropy has the advantages as weights.
RL_LOSSES = (*LOSS_SPECS, *PREFERENCE_SPECS)

# A function of the user's, `algorithm.loss=package.module:function`, that a client takes by `forward_backward_custom`.
# It may have terms without A: `weights` [T] carry the reduction for them.
CUSTOM_METRICS = ("loss:sum", "surrogate_loss:sum")  # what such a call reports beside the function's own metrics
OWN_LOSS = LossSpec("a function (data, log-probs) -> (loss, metrics)", masks=("mask",), weight_inputs=("weights",))


def is_custom_loss(name: str) -> bool:
    """Whether the name is a path `package.module:function`."""
    return ":" in name


def find_pull_weights(inputs: Mapping[str, Any]) -> Any:
    """The weights b [N] of the quadratic term of `dro`, the same for numpy arrays and torch tensors.

    Without `beta_weights` a token that has neither a log-prob nor an advantage is not pulled: clients send both as 0 on
    a prompt, where a pull towards log-prob 0 would un-learn everything else.
    """
    if "beta_weights" in inputs:
        return inputs["beta_weights"]
    return (inputs["logprobs"] != 0) | (inputs["advantages"] != 0)


def find_loss_spec(name: str) -> LossSpec:
    """The spec of a named loss, a critic's included, or that of all functions of the user's."""
    return OWN_LOSS if is_custom_loss(name) else {**_TOKEN_SPECS, **PREFERENCE_SPECS}[name]


def list_inputs(data: Sequence[Datum], spec: LossSpec) -> tuple[str, ...]:
    """The inputs that a call reads: the required ones, and the optional ones that any datum has."""
    given = {name for datum in data for name in datum.loss_fn_inputs}
    extra = [name for name in spec.optional if name in given]
    if given & set(KL_INPUTS).intersection(spec.optional):
        extra = list(dict.fromkeys([*extra, *KL_INPUTS]))
    return (*spec.required, *extra)


def check_batch(
    data: Sequence[Datum], loss_fn: str, config: Mapping[str, float] | None, *, allow_many_targets: bool = True
) -> dict[str, float]:
    """Return the loss's settings with defaults filled in; ValueError naming the first wrong setting or datum."""
    if loss_fn not in _TOKEN_SPECS:
        raise ValueError(f"loss_fn {loss_fn!r} is unknown; known: {', '.join(LOSS_SPECS)}, or forward_backward_custom")
    spec = _TOKEN_SPECS[loss_fn]
    names = list_inputs(data, spec)
    has_kl = KL_INPUTS[0] in names
    temperature = {} if spec.predicts_values else {"temperature": 1.0}
    defaults = {**temperature, **spec.config, **({"kl_estimator": 1.0} if has_kl else {})}
    settings = {**defaults, **(config or {})}
    if unknown := settings.keys() - defaults.keys():
        known = ", ".join(defaults)
        raise ValueError(f"loss_fn_config: {', '.join(sorted(unknown))} has no effect on {loss_fn}; known: {known}")
    _check_settings(loss_fn, settings)
    if not data:
        raise ValueError("data is empty: there is nothing to compute (were all groups filtered out?)")
    many = allow_many_targets and spec.allows_many_targets
    for i, datum in enumerate(data):
        _check_shapes(i, datum, loss_fn, names, many)
        targets = datum.loss_fn_inputs["target_tokens"].data
        if has_kl and targets.ndim == 2:
            raise ValueError(f"datum {i}: a KL needs one target per token, got {targets.shape[1]}: give 1-D targets")
    for name in names:  # all values at once: a call may hold thousands of short rows
        arrays = [datum.loss_fn_inputs[name].data.reshape(-1) for datum in data]
        if (bad := ~np.isfinite(np.concatenate(arrays))).any():
            raise ValueError(f"datum {find_row(bad, arrays)}: {name} holds nan or infinity")
    return settings


def _check_settings(loss_fn: str, settings: Mapping[str, float]) -> None:
    given = f"loss_fn_config of {loss_fn}"
    if "temperature" in settings and not (math.isfinite(settings["temperature"]) and settings["temperature"] > 0):
        raise ValueError(f"{given}: temperature {settings['temperature']} must be finite and above 0 to train")
    if settings.get("kl_estimator", 1) not in (1, 2, 3):
        raise ValueError(f"{given}: kl_estimator {settings['kl_estimator']}, expected 1, 2 or 3 (k1, k2, k3)")
    if not 0 <= settings.get("beta", 0) < math.inf:
        raise ValueError(f"{given}: beta {settings['beta']}, expected a finite number, at least 0")
    if not settings.get("value_clip", 1) > 0:
        raise ValueError(f"{given}: value_clip {settings['value_clip']}, expected above 0, or none for no clip")
    if _TOKEN_SPECS[loss_fn].has_clip:
        low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
        if not 0 <= low <= 1 <= high:
            raise ValueError(
                f"{given}: clip_low_threshold {low} and clip_high_threshold {high}, expected 0 <= low <= 1 <= high. "
                "They bound the ratio itself: a clip of 0.2 is 0.8 and 1.2"
            )
        if not settings.get(DUAL_CLIP, math.inf) >= high:
            raise ValueError(
                f"{given}: {DUAL_CLIP} {settings[DUAL_CLIP]}, expected a ratio of at least clip_high_threshold {high} "
                "(3 is usual), or none for no second bound"
            )


def _check_shapes(i: int, datum: Datum, loss_fn: str, names: Sequence[str], many: bool) -> None:
    spec, length = _TOKEN_SPECS[loss_fn], datum.model_input.length
    if unknown := datum.loss_fn_inputs.keys() - _KNOWN_INPUTS:
        raise ValueError(
            f"datum {i}: loss_fn_inputs holds {', '.join(sorted(unknown))}, which no loss reads; leave it out. "
            f"{loss_fn} reads {', '.join(('target_tokens', *spec.required))}. A mask is 0 in advantages or weights, a "
            "clip threshold a setting (loss_fn_config)"
        )
    for name in ("target_tokens", *names):
        if name not in datum.loss_fn_inputs:
            raise ValueError(f"datum {i} lacks {name!r}, which {loss_fn} needs")
        array = datum.loss_fn_inputs[name].data
        shape = datum.loss_fn_inputs["target_tokens"].data.shape
        wide = many and len(shape) == 2 and shape[1] > 0 and name in ("target_tokens", *spec.required)
        expected = (length, shape[1]) if wide else (length,)
        if array.shape != expected:
            per = "as the target_tokens" if wide else "one per token"
            raise ValueError(f"datum {i}: {name} has shape {list(array.shape)}, expected {list(expected)}, {per}")
        if name == "target_tokens" and array.dtype.kind != "i":
            raise ValueError(f"datum {i}: target_tokens are {array.dtype}, expected integers")


def find_row(bad: np.ndarray, arrays: Sequence[np.ndarray]) -> int:
    """The index of the array that holds the first true place of `bad`, which is as long as all of them end to end."""
    return int(np.searchsorted(np.cumsum([array.size for array in arrays]), bad.argmax(), side="right"))
