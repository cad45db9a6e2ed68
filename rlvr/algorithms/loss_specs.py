"""The losses that a client takes by name, and the check of a batch against their inputs and settings. No torch here."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rlvr.algorithms.losses import LOSSES, TokenLossAttribute
from rlvr.algorithms.losses.loss import CROSS_ENTROPY_INPUT, DUAL_CLIP, KL_INPUTS, LossSpec
from rlvr.algorithms.losses.sapo import TEMPERATURES
from rlvr.core.messages import Datum

LOSS_SPECS: Mapping[str, LossSpec] = TokenLossAttribute("spec")
# Those that servers of the Tinker protocol know: never what a user registered, be it a subclass of one.
PROTOCOL_LOSSES = frozenset(name for name in LOSSES if LOSSES.is_built_in(name) and LOSSES.find(name).is_in_protocol)
# The loss of a critic, whose client has values instead of log-probs: V the critic's value, R `returns`, w `weights`.
VALUE_LOSS = "value"
VALUE_SPEC = LossSpec(
    "w max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2, V_old = `values` from before the "
    "step; without a value_clip w (V - R)^2 / 2. The clip of OpenAI's PPO baseline, as in verl and TRL.",
    inputs=("values", "returns", "weights"),
    config={"value_clip": math.inf},
)

CUSTOM_METRICS = ("loss:sum", "surrogate_loss:sum")  # what `forward_backward_custom` reports beside a loss's own


def find_loss_spec(name: str) -> LossSpec:
    """The spec of a named loss of a client, a critic's included."""
    return VALUE_SPEC if name == VALUE_LOSS else LOSS_SPECS[name]


def _list_known_inputs(spec: LossSpec) -> set[str]:
    specs = (*LOSS_SPECS.values(), VALUE_SPEC, spec)
    return {"target_tokens"}.union(*((*spec.required, *spec.optional) for spec in specs))


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
    if loss_fn not in LOSS_SPECS and loss_fn != VALUE_LOSS:
        raise ValueError(f"loss_fn {loss_fn!r} is unknown; known: {', '.join(LOSS_SPECS)}, or forward_backward_custom")
    spec = find_loss_spec(loss_fn)
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
    known = _list_known_inputs(spec)
    for i, datum in enumerate(data):
        _check_shapes(i, datum, loss_fn, names, many, known)
        targets = datum.loss_fn_inputs["target_tokens"].data
        if targets.ndim == 2 and (has_kl or CROSS_ENTROPY_INPUT in names):
            what = "a KL needs" if has_kl else f"{CROSS_ENTROPY_INPUT} need"
            raise ValueError(f"datum {i}: {what} one target per token, got {targets.shape[1]}: give 1-D targets")
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
    for name in ("positive_temperature", "negative_temperature"):
        least, most = TEMPERATURES
        if not least <= settings.get(name, 1) <= most:
            raise ValueError(f"{given}: {name} {settings[name]}, expected {least:g} to {most:g} (1 is usual)")
    if not settings.get("value_clip", 1) > 0:
        raise ValueError(f"{given}: value_clip {settings['value_clip']}, expected above 0, or none for no clip")
    if "clip_low_threshold" in settings:
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


def _check_shapes(i: int, datum: Datum, loss_fn: str, names: Sequence[str], many: bool, known: Collection[str]) -> None:
    spec, length = find_loss_spec(loss_fn), datum.model_input.length
    if unknown := datum.loss_fn_inputs.keys() - known:
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
