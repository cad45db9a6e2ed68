"""What several words of other systems mean together: epochs of samples as steps, batch sizes as prompts, a baseline's
two switches as an estimator, and the section `rlvr` as one of the two classic algorithms.

    steps = num_epochs x samples_per_epoch / answers of a step
    prompts_per_step = batch_size / group_size           num_substeps = answers of a step / mini_batch_size

Everything here has to divide; where it does not, the error says which numbers. The defaults of the classic algorithms
are those of `REINFORCEConfig` and `PPOConfig`. Exercised by `python -m pytest tests/test_spellings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any

from rlvr.algorithms.classic import PPOConfig, REINFORCEConfig
from rlvr.config.pool import DEFAULT, TYPED, Given, Pool
from rlvr.config.spellings import WORDS
from rlvr.training.options import TrainingOptions

Ours = Callable[[str], Given | None]
CLASSIC: dict[str, tuple[str, type]] = {
    "reinforce": ("reinforce_ema", REINFORCEConfig),
    "ppo": ("ppo", PPOConfig),
}
_SIZES = {f.name: f.default for f in fields(TrainingOptions) if f.default is not MISSING}


def derive(pool: Pool, ours: Ours, rlvr_section: bool) -> None:
    """Turn the pool's `~words` into values of our keys. `ours` gives what the config already says of a key of ours;
    `rlvr_section` says whether it has a section `rlvr`, whose author names no model and no prompts.
    """
    highest = pool.given.get("algorithm.clip_high", [])
    if any(given.key.rpartition(".")[2] == "epsilon_high" for given in highest):  # TRL's: epsilon is then the lower one
        highest[:] = [given for given in highest if given.key.rpartition(".")[2] != "epsilon"]
    _algorithm(pool, ours)
    _estimator(pool)
    _sizes(pool, ours)
    if rlvr_section:
        has_model = any(target.startswith("model.") for target in pool.given) or ours("model") is not None
        if not has_model and ours("client") is None:
            pool.add("client", _default("mock"))
        if ours("env.name") is None and not pool.given.get("env.name"):
            pool.add("env.name", _default("toy"))


def _default(value: Any) -> Given:
    return Given("", value, value, value, "", DEFAULT)


def _pick(pool: Pool, ours: Ours, key: str) -> Given | None:
    """The value of one of our keys that counts, whoever gave it."""
    own = ours(key)
    if own is not None and own not in pool.given.get(key, []):
        pool.add(key, own)
    return pool.pick(key)


def _algorithm(pool: Pool, ours: Ours) -> None:
    """`rlvr.algorithm: reinforce` is the row `reinforce_ema` with the class's defaults, `ppo` a row of its own kind."""
    chosen = pool.pick("~algorithm")
    if chosen is None:
        return
    if not isinstance(chosen.value, str):
        raise ValueError(f"{chosen.words}: expected {', '.join(CLASSIC)}, or a row of the algorithm table")
    name, config = CLASSIC.get(chosen.value, (chosen.value, None))
    row = Given(chosen.key, chosen.said, name, name, chosen.origin, chosen.rank)
    pool.add("algorithm.name", row)
    counts = _pick(pool, ours, "algorithm.name")
    own = {f.name for f in fields(config)} if config and counts in (row, None) else set[str]()
    switches = ("use_baseline", "normalize_advantages")
    others = [f.name for _, c in CLASSIC.values() for f in fields(c) if f.name not in own] if own else switches
    belongs = dict.fromkeys(target for word in others for target in WORDS[word].targets)
    for given in [g for target in belongs for g in pool.given.get(target, [])]:
        if given.key.startswith("rlvr.algorithm_config."):
            pool.leave_out(given, f"{chosen.value if own else counts.value if counts else name} has no such setting")
    if not own or config is None:
        return
    for setting in fields(config):
        spelling = WORDS[setting.name]
        for target in spelling.targets:
            if setting.name != "baseline_decay":  # only where the moving average is what is subtracted
                pool.add(target, _default(setting.default))
    if chosen.value == "ppo":
        pool.add("algorithm.advantage", _default("batch_normalized"))
        pool.add("algorithm.drop_equal_groups", _default(False))


def _estimator(pool: Pool) -> None:
    subtract, scale = pool.pick("~use_baseline"), pool.pick("~normalize_advantages")
    told = [given for given in (scale, subtract) if given is not None]
    for given in told:
        if not isinstance(given.value, bool):
            raise ValueError(f"{given.words}: expected true or false")
    if not told:
        return
    normal = scale is not None and scale.value
    if normal and subtract is not None and subtract.rank == TYPED:
        pool.leave_out(subtract, "normalize_advantages centres the batch, which takes any baseline out again")
    value = "batch_normalized" if normal else "ema" if subtract is None or subtract.value else "raw"
    deciding = [scale] if normal and scale is not None else told
    pool.add("algorithm.advantage", _made(value, deciding, " with "))
    if value == "ema" and pool.pick("~algorithm") is not None and not pool.given.get("algorithm.baseline_decay"):
        decay = next(f.default for f in fields(REINFORCEConfig) if f.name == "baseline_decay")
        pool.add("algorithm.baseline_decay", _default(decay))


def _made(value: Any, of: list[Given], between: str) -> Given:
    """A value worked out from others; it ranks with the highest of them."""
    best = max(of, key=lambda given: given.rank)
    key = between.join(given.key for given in of if given.key)
    return Given(key, value, value, value, best.origin, best.rank)


def _whole(given: Given) -> int:
    value = int(given.value) if isinstance(given.value, str) and given.value.isdecimal() else given.value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{given.words}: expected an integer of at least 1")
    return value


def _divided(total: int, by: int, what: str, remedy: str) -> int:
    if total % by:
        raise ValueError(f"{what}: {total} is not a multiple of {by}; {remedy}")
    return total // by


def _sizes(pool: Pool, ours: Ours) -> None:
    batch, mini = pool.pick("~batch_size"), pool.pick("~mini_batch_size")
    epochs, samples = pool.pick("~num_epochs"), pool.pick("~samples_per_epoch")
    if not any((batch, mini, epochs, samples)):
        return
    asked = {key: _pick(pool, ours, f"training.{key}") for key in ("group_size", "prompts_per_step")}
    group = _whole(asked["group_size"]) if asked["group_size"] else _SIZES["group_size"]
    prompts = _whole(asked["prompts_per_step"]) if asked["prompts_per_step"] else _SIZES["prompts_per_step"]
    groups = asked["group_size"].words if asked["group_size"] else f"training.group_size={group}, its default"
    answers, sized = prompts * group, f"{prompts} prompts x {group} answers a step"
    named = asked["prompts_per_step"]
    if batch is not None and (named is None or named.rank <= batch.rank):
        remedy = "give a batch_size that is, or another group_size"
        prompts = _divided(_whole(batch), group, f"{batch.words} answers a step in groups of {groups}", remedy)
        pool.add("training.prompts_per_step", _made(prompts, [batch], ""))
        pool.pick("training.prompts_per_step")
        answers, sized = prompts * group, batch.words
    if (epochs is None) != (samples is None):
        alone, missing = (epochs, "samples_per_epoch") if epochs else (samples, "num_epochs")
        assert alone is not None
        raise ValueError(f"{alone.words} needs {missing} beside it; or give training.steps alone")
    steps = _pick(pool, ours, "training.steps")
    if epochs and samples and (steps is None or steps.rank <= max(epochs.rank, samples.rank)):
        what = f"{epochs.words} x {samples.words} over {sized}"
        made = _divided(_whole(epochs) * _whole(samples), answers, what, "change one of them, or give training.steps")
        pool.add("training.steps", _made(made, [epochs, samples], " x "))
    cut = _pick(pool, ours, "training.num_substeps")
    if mini is not None and (cut is None or cut.rank <= mini.rank):
        overridden = any(given and given.rank > mini.rank for given in (batch, *asked.values()))
        if overridden and answers < _whole(mini):  # a batch made smaller than its parts were meant to be is one part
            mini = replace(mini, value=answers)
        what = f"{sized} in updates of {mini.words}"
        made = _divided(answers, _whole(mini), what, "change one of them, or give training.num_substeps")
        pool.add("training.num_substeps", _made(made, [mini], ""))
