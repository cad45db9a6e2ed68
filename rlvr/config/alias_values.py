"""Decides between the values that a config gives for one key under several names, and combines several words.

A value from the command line overrides one from a file, a user's file a shipped one, and a file a default; two of the
same rank that disagree are an error. Several words together give sizes, an estimator or a classic algorithm:

    steps = num_epochs x samples_per_epoch / completions of a step
    batch_size = per_device_train_batch_size x gradient_accumulation_steps
    prompts_per_step = batch_size / group_size           num_substeps = completions of a step / mini_batch_size

All divisions have to be exact; the error names the numbers. The defaults of the classic algorithms are those of
`REINFORCEConfig` and `PPOConfig`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from rlvr.algorithms.classic import PPOConfig, REINFORCEConfig
from rlvr.config.alias import to_number
from rlvr.config.aliases import ALIASES_BY_WORD
from rlvr.config.choices import full_key
from rlvr.config.compose import CLI, SHIPPED_FILES
from rlvr.config.interpolate import describe_origin
from rlvr.training.training_options import TrainingOptions

DEFAULT, SHIPPED, FILE, TYPED = range(4)  # each gives way to the next


@dataclass(frozen=True)
class Candidate:
    """One value for a key: as given (`key`, `text`), and in our terms (`value`; `raw` may be written to disk)."""

    key: str
    text: Any
    value: Any
    raw: Any
    origin: str
    rank: int

    @property
    def words(self) -> str:
        text = self.text if isinstance(self.text, str) else json.dumps(self.text)
        return f"{self.key}={text}{describe_origin(self.origin)}"


def rank(origin: str) -> int:
    return TYPED if origin == CLI else SHIPPED if origin.startswith(SHIPPED_FILES) else FILE


@dataclass
class Candidates:
    """The candidates for every key that an alias sets, and for the `~words` that are combined from several aliases."""

    by_key: dict[str, list[Candidate]] = field(default_factory=dict[str, list[Candidate]])
    unused: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])

    def add(self, target: str, candidate: Candidate) -> None:
        self.by_key.setdefault(full_key(target), []).append(candidate)

    def of(self, target: str) -> list[Candidate]:
        """The candidates for a key."""
        return self.by_key.get(full_key(target), [])

    def pick(self, target: str) -> Candidate | None:
        """The candidate of the highest rank; ValueError if several of it disagree."""
        candidates = self.of(target)
        if not candidates:
            return None
        highest = max(c.rank for c in candidates)
        best = [c for c in candidates if c.rank == highest]
        best = [c for c in best if c.value is not None] or best[:1]
        for other in best[1:]:
            if not _equal(best[0].value, other.value):
                what = "" if target.startswith("~") else f" of {target}"
                raise ValueError(f"{best[0].words} and {other.words} disagree{what}; leave one of them out")
        return best[0]

    def leave_out(self, word: Candidate, why: str) -> None:
        """Remove a candidate from all keys, and record that it has no effect."""
        for every in self.by_key.values():
            every[:] = [c for c in every if c.key != word.key]
        self.unused[word.key] = (word.origin, why)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, str) != isinstance(b, str):
        try:
            return float(a) == float(b)
        except (TypeError, ValueError):
            return False
    return a == b


OwnValue = Callable[[str], Candidate | None]
CLASSIC: dict[str, tuple[str, type]] = {"reinforce": ("reinforce_ema", REINFORCEConfig), "ppo": ("ppo", PPOConfig)}
_SIZES = {f.name: f.default for f in fields(TrainingOptions) if f.default is not MISSING}


def derive(candidates: Candidates, ours: OwnValue, rlvr_section: bool) -> None:
    """Turn the `~words` into candidates for our keys.

    `ours` gives the config's own value of a key of ours. A config with a section `rlvr` (`rlvr_section`) may name
    neither model nor environment: it gets the mock client and the toy environment.
    """
    highest = candidates.of("algorithm.clip_high")
    if any(given.key.rpartition(".")[2] == "epsilon_high" for given in highest):  # TRL's: epsilon is then the lower one
        highest[:] = [given for given in highest if given.key.rpartition(".")[2] != "epsilon"]
    _algorithm(candidates, ours)
    _estimator(candidates)
    _device_batch(candidates)
    _sizes(candidates, ours)
    _mini_batch_prompts(candidates, ours)
    _divergence(candidates)
    _covariance(candidates)
    _importance(candidates)
    _rollout_correction(candidates)
    _trackers(candidates)
    if (long_prompts := candidates.pick("~filter_long_prompts") or candidates.pick("~truncation")) is not None:
        candidates.add("training.long_prompts", long_prompts)  # verl filters first: then nothing is left to truncate
    _reward_model(candidates)
    if rlvr_section:
        has_model = (
            any(target.startswith(("model.", "client.")) for target in candidates.by_key) or ours("model") is not None
        )
        if not has_model and ours("client.name") is None:
            candidates.add("client", _default("mock"))
        if ours("env.name") is None and not candidates.of("env.name"):
            candidates.add("env.name", _default("toy"))


def _device_batch(candidates: Candidates) -> None:
    """TRL's: what one device computes at once, and how often before an update."""
    device, times = candidates.pick("~device_batch"), candidates.pick("~accumulation")
    if device is None and times is not None:
        raise ValueError(f"{times.words} needs per_device_train_batch_size beside it; or give batch_size")
    if device is not None:
        given = [device] if times is None else [device, times]
        candidates.add("~batch_size", _derive(math.prod(map(_whole, given)), given, " x "))


def _mini_batch_prompts(candidates: Candidates, ours: OwnValue) -> None:
    """verl's: an update in prompts, where ours are completions."""
    mini = candidates.pick("~mini_batch_prompts")
    if mini is None:
        return
    named = _pick(candidates, ours, "training.prompts_per_step")
    prompts = _whole(named) if named else _SIZES["prompts_per_step"]
    what = f"{prompts} prompts a step in updates of {mini.words}"
    made = _divide(prompts, _whole(mini), what, "change one of them, or give training.num_substeps")
    candidates.add("training.num_substeps", _derive(made, [mini], ""))


def _divergence(candidates: Candidates) -> None:
    """A KL in the loss, as TRL's `beta` and verl's `kl_loss_coef` mean it; k3 unless the config says otherwise."""
    weight, use = candidates.pick("~beta"), candidates.pick("~use_kl_loss")
    coefficient = candidates.pick("~kl_loss_coef")
    if use is not None and not isinstance(use.value, bool):
        raise ValueError(f"{use.words}: expected true or false")
    if coefficient is not None and (use is None or not use.value):
        if use is None:
            raise ValueError(
                f"{coefficient.words} counts with actor_rollout_ref.actor.use_kl_loss=true only; give both, or "
                "algorithm.kl_coef"
            )
        return
    if use is not None and use.value:
        weight = weight or coefficient or replace(use, value=0.001, raw=0.001)  # verl's default
    if weight is None:
        return
    try:
        value = to_number(weight.value)
    except ValueError:
        raise ValueError(f"{weight.words}: expected a number") from None
    candidates.add("algorithm.kl_coef", _derive(value, [weight], ""))
    if value:
        candidates.add("algorithm.kl_in", _default("loss"))
        candidates.add("algorithm.kl_estimator", _default("k3"))


def _covariance(candidates: Candidates) -> None:
    """verl's policy loss `clip_cov`; its ratio counts under that loss alone."""
    mode, ratio = candidates.pick("~loss_mode"), candidates.pick("~clip_cov_ratio")
    if mode is None and ratio is not None:
        raise ValueError(
            f"{ratio.words} counts with actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov only; give both, or "
            "algorithm.clip_cov_ratio"
        )
    if mode is not None and mode.value:
        candidates.add("algorithm.clip_cov_ratio", ratio or replace(mode, value=0.0002, raw=0.0002))  # verl's default


_IMPORTANCE = ("algorithm.importance_mode", "algorithm.importance_cap", "algorithm.importance_floor")


def _importance(candidates: Candidates) -> None:
    """TRL's correction of importance weights, with its defaults beside any of its words."""
    switch = candidates.pick("~importance")
    if switch is not None and not isinstance(switch.value, bool):
        raise ValueError(f"{switch.words}: expected true or false")
    theirs = [one for key in _IMPORTANCE for one in candidates.of(key) if one.key.startswith("vllm_importance_")]
    if switch is not None and not switch.value:
        for word in theirs:
            candidates.leave_out(word, f"{switch.words} takes the correction away")
    elif switch is not None or theirs:
        for key, default in zip(_IMPORTANCE, ("sequence_mask", 3.0, None), strict=True):
            candidates.add(key, _default(default))


def _rollout_correction(candidates: Candidates) -> None:
    """verl's: `rollout_is` says of what the weights are, `rollout_is_threshold` how they are bounded."""
    level, given = candidates.pick("~rollout_is"), candidates.pick("~rollout_is_threshold")
    if level is None or level.value is None:
        return
    given = given or replace(level, value=2.0)  # verl's default
    try:
        *low, cap = [float(bound) for bound in str(given.value).split("_")]
    except ValueError:
        low, cap = [0.0, 0.0], 0.0
    if len(low) > 1:
        raise ValueError(f"{given.words}: expected a number, or two as in 0.5_5.0")
    found = (f"{level.value}_{'mask' if low else 'truncate'}", cap, *low)
    for key, word, value in zip(_IMPORTANCE, (level, given, given), found, strict=False):
        candidates.add(key, replace(word, value=value, raw=value))


def _trackers(candidates: Candidates) -> None:
    given = candidates.pick("~report_to")
    if given is None:
        return
    for name in given.value if isinstance(given.value, list) else [given.value]:
        if name in ("wandb", "mlflow", "tensorboard"):
            candidates.add(f"tracking.{name}", _derive(True, [given], ""))
        elif name not in ("none", "console", None):
            raise ValueError(
                f"{given.words}: {name!r} is not supported; the trackers are wandb, mlflow and tensorboard, and "
                "metrics.jsonl has every number"
            )


def _reward_model(candidates: Candidates) -> None:
    given = candidates.pick("~reward_model")
    if given is not None and given.value is not None:
        candidates.add("reward.type", _derive("classifier", [given], ""))
        candidates.add("reward.kwargs.model", given)


def _default(value: Any) -> Candidate:
    return Candidate("", value, value, value, "", DEFAULT)


def _pick(candidates: Candidates, ours: OwnValue, key: str) -> Candidate | None:
    """Pick among the aliases of one of our keys and the config's own value."""
    own = ours(key)
    if own is not None and own not in candidates.of(key):
        candidates.add(key, own)
    return candidates.pick(key)


def _algorithm(candidates: Candidates, ours: OwnValue) -> None:
    """`rlvr.algorithm: reinforce` is the spec `reinforce_ema` with the class's defaults, `ppo` that spec with its
    own."""
    chosen = candidates.pick("~algorithm")
    if chosen is None:
        return
    if not isinstance(chosen.value, str):
        raise ValueError(f"{chosen.words}: expected {', '.join(CLASSIC)}, or the name of an algorithm spec")
    name, config = CLASSIC.get(chosen.value, (chosen.value, None))
    named = replace(chosen, value=name, raw=name)
    candidates.add("algorithm.name", named)
    counts = _pick(candidates, ours, "algorithm.name")
    own = {f.name for f in fields(config)} if config and counts in (named, None) else set[str]()
    switches = ("use_baseline", "normalize_advantages")
    others = [f.name for _, c in CLASSIC.values() for f in fields(c) if f.name not in own] if own else switches
    belongs = dict.fromkeys(target for word in others for target in ALIASES_BY_WORD[word].targets)
    for given in [g for target in belongs for g in candidates.of(target)]:
        if given.key.startswith("rlvr.algorithm_config."):
            candidates.leave_out(
                given, f"{chosen.value if own else counts.value if counts else name} has no such setting"
            )
    if not own or config is None:
        return
    for setting in fields(config):
        spelling = ALIASES_BY_WORD[setting.name]
        for target in spelling.targets:
            if setting.name != "baseline_decay":  # only where the moving average is what is subtracted
                candidates.add(target, _default(setting.default))
    if chosen.value == "ppo":
        candidates.add("algorithm.advantage", _default("batch_normalized"))
        candidates.add("algorithm.drop_equal_groups", _default(False))


def _estimator(candidates: Candidates) -> None:
    subtract, scale = candidates.pick("~use_baseline"), candidates.pick("~normalize_advantages")
    switches = [candidate for candidate in (scale, subtract) if candidate is not None]
    for given in switches:
        if not isinstance(given.value, bool):
            raise ValueError(f"{given.words}: expected true or false")
    if not switches:
        return
    normal = scale is not None and scale.value
    if normal and subtract is not None and subtract.rank == TYPED:
        candidates.leave_out(subtract, "normalize_advantages centres the batch, which removes any baseline again")
    value = "batch_normalized" if normal else "ema" if subtract is None or subtract.value else "raw"
    deciding = [scale] if normal and scale is not None else switches
    candidates.add("algorithm.advantage", _derive(value, deciding, " with "))
    if value == "ema" and candidates.pick("~algorithm") is not None and not candidates.of("algorithm.baseline_decay"):
        decay = next(f.default for f in fields(REINFORCEConfig) if f.name == "baseline_decay")
        candidates.add("algorithm.baseline_decay", _default(decay))


def _derive(value: Any, of: list[Candidate], between: str) -> Candidate:
    """A candidate derived from others; it has the highest rank of them."""
    best = max(of, key=lambda given: given.rank)
    key = between.join(given.key for given in of if given.key)
    return Candidate(key, value, value, value, best.origin, best.rank)


def _whole(given: Candidate) -> int:
    value = int(given.value) if isinstance(given.value, str) and given.value.isdecimal() else given.value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{given.words}: expected an integer of at least 1")
    return value


def _divide(total: int, by: int, what: str, remedy: str) -> int:
    if total % by:
        raise ValueError(f"{what}: {total} is not a multiple of {by}; {remedy}")
    return total // by


def _sizes(candidates: Candidates, ours: OwnValue) -> None:
    batch, mini = candidates.pick("~batch_size"), candidates.pick("~mini_batch_size")
    epochs, samples = candidates.pick("~num_epochs"), candidates.pick("~samples_per_epoch")
    if not any((batch, mini, epochs, samples)):
        return
    sizes = {key: _pick(candidates, ours, f"training.{key}") for key in ("group_size", "prompts_per_step")}
    group = _whole(sizes["group_size"]) if sizes["group_size"] else _SIZES["group_size"]
    prompts = _whole(sizes["prompts_per_step"]) if sizes["prompts_per_step"] else _SIZES["prompts_per_step"]
    groups = sizes["group_size"].words if sizes["group_size"] else f"training.group_size={group}, its default"
    answers, sized = prompts * group, f"{prompts} prompts x {group} answers a step"
    named = sizes["prompts_per_step"]
    if batch is not None and (named is None or named.rank <= batch.rank):
        remedy = "give a batch_size that is, or another group_size"
        prompts = _divide(_whole(batch), group, f"{batch.words} answers a step in groups of {groups}", remedy)
        candidates.add("training.prompts_per_step", _derive(prompts, [batch], ""))
        candidates.pick("training.prompts_per_step")
        answers, sized = prompts * group, batch.words
    if (epochs is None) != (samples is None):
        alone, missing = (epochs, "samples_per_epoch") if epochs else (samples, "num_epochs")
        assert alone is not None
        raise ValueError(f"{alone.words} needs {missing} beside it; or give training.steps alone")
    steps = _pick(candidates, ours, "training.steps")
    if epochs and samples and (steps is None or steps.rank <= max(epochs.rank, samples.rank)):
        what = f"{epochs.words} x {samples.words} over {sized}"
        made = _divide(_whole(epochs) * _whole(samples), answers, what, "change one of them, or give training.steps")
        candidates.add("training.steps", _derive(made, [epochs, samples], " x "))
    cut = _pick(candidates, ours, "training.num_substeps")
    if mini is not None and (cut is None or cut.rank <= mini.rank):
        overridden = any(given and given.rank > mini.rank for given in (batch, *sizes.values()))
        if overridden and answers < _whole(mini):  # a batch made smaller than its parts were meant to be is one part
            mini = replace(mini, value=answers)
        what = f"{sized} in updates of {mini.words}"
        made = _divide(answers, _whole(mini), what, "change one of them, or give training.num_substeps")
        candidates.add("training.num_substeps", _derive(made, [mini], ""))
