"""What a config in TRL's words means beyond these words, so that no difference to TRL is silent.

`read_num_iterations` and `choose_weights` do as TRL does while words are translated. `list_differences` names what a
run still does otherwise, for its plan. A config is in TRL's words if the user's file or command line has one of them
at its top. Defaults are those of `GRPOConfig` 1.16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvr.clients.registry import CLIENTS
from rlvr.config.alias_values import FILE, Candidate, Candidates, rank
from rlvr.config.compose import LoadedConfig
from rlvr.config.interpolate import describe_origin
from rlvr.config.schema import RunConfig
from rlvr.config.trl_words import SCALES, TRL
from rlvr.config.word_tables import OFF

# Words of TRL's that `rlvr.config.aliases` has: those that are other systems' too, such as temperature, say nothing.
_SHARED = ("num_generations", "max_completion_length", "epsilon", "epsilon_high", "mask_truncated_completions")
WORDS = frozenset((*(alias.word for alias in TRL), *_SHARED))
_LORA, _RATE = "model.lora", "training.optimizer.learning_rate"
_TRL_RATE, _TRL_ADAPTER = 1e-6, {"rank": 16, "alpha": 32.0}
_LOSS_TYPES = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
_SCALES = {ours: theirs for theirs, ours in SCALES.items()}
_COUNTS_UPDATES = (
    ("training.steps", "max_steps"),
    ("evaluation.every", "eval_steps"),
    ("run.checkpoint_every", "save_steps"),
)


def read_num_iterations(candidates: Candidates, words: Sequence[Candidate]) -> list[str]:
    """Let `num_iterations` beside other words of TRL mean what it does there: how often a batch is used.

    TRL counts updates where we count steps, so `max_steps`, `eval_steps` and `save_steps` are divided by it. Returns
    what to say of that. ValueError where it may be either, and for numbers that it does not divide.
    """
    steps, _ = _COUNTS_UPDATES[0]
    given = next((one for one in candidates.of(steps) if one.key == "num_iterations" and one.rank >= FILE), None)
    if given is None or not words:
        return []
    beside = next((word for word in words if word.origin == given.origin), None)
    if beside is None:
        raise ValueError(
            f"{given.words} beside {words[0].words}, which is TRL's: there it is updates with the same completions, "
            "here steps; give training.ppo_epochs or training.steps"
        )
    candidates.of(steps).remove(given)
    candidates.add("training.ppo_epochs", given)
    times, divided = given.value, list[str]()
    for key, word in _COUNTS_UPDATES if isinstance(times, int) and times > 1 else ():
        for place, one in enumerate(counted := candidates.of(key)):
            if one.key != word or not isinstance(one.value, int):
                continue
            if one.value % times:
                raise ValueError(
                    f"{one.words} counts updates in TRL, {times} with each batch ({given.words}), and is not a "
                    f"multiple of {times}; change it, or give {key}"
                )
            counted[place] = replace(one, value=one.value // times, raw=one.value // times)
            divided.append(f"{word}={one.value} updates are {key}={one.value // times}")
    said = f"num_iterations beside {beside.key} is TRL's: updates with the same completions (training.ppo_epochs)"
    return ["; ".join([said, *divided])]


def choose_weights(
    values: dict[str, Any], raw: dict[str, Any], origin: dict[str, str], words: Sequence[Candidate]
) -> list[str]:
    """Train all weights where a config in TRL's words has none about LoRA: leave out the adapter of a shipped config.

    Returns what to say of that. `use_peft` without an adapter makes TRL's. ValueError for LoRA's words beside
    `use_peft=false`.
    """
    use = next((word for word in words if word.key == "use_peft"), None)
    named = [word for word in words if word.key.startswith("lora_") and word.value not in OFF]
    own = [key for key, where in origin.items() if f"{key}.".startswith(f"{_LORA}.") and rank(where) >= FILE]
    adapter = _at(values, _LORA)
    if use is not None and not use.value and adapter and (named or own):
        other = named[0].words if named else own[-1]
        raise ValueError(f"{use.words} and {other} disagree; leave one of them out")
    if named or own or (use is not None and use.value):
        if not adapter and not own:
            for tree in (values, raw):
                _set(tree, _LORA, dict(_TRL_ADAPTER))
        return []
    if not adapter or not words or _trains_adapters(values):
        return []
    file, rate = origin.get(_LORA, ""), _at(values, _RATE)
    for tree in (values, raw):
        _set(tree, _LORA, None)
    said = (
        f"{words[0].key} is a word of TRL's, and neither lora_r nor use_peft stands beside it: all weights are "
        f"trained, as TRL does, and not the adapter{describe_origin(file)}"
    )
    if rank(origin.get(_RATE, "")) < FILE or origin.get(_RATE) is None:
        for tree in (values, raw):
            _set(tree, _RATE, _TRL_RATE)
        origin.pop(_RATE, None)
        was = f" and not its {rate:g}" if isinstance(rate, (int, float)) else ""
        said += f", at TRL's learning_rate={_TRL_RATE:g}{was}"
    return [f"{said}; give lora_r for an adapter"]


def _trains_adapters(values: Mapping[str, Any]) -> bool:
    name = _at(values, "client.name")
    try:
        return isinstance(name, str) and CLIENTS.find(name).trains_adapters
    except ValueError:  # the schema reports it
        return False


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None  # pyright: ignore[reportUnknownMemberType]
    return tree


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def list_differences(loaded: LoadedConfig, config: RunConfig) -> dict[str, str]:
    """Lines for the plan of a run in TRL's words: what it does otherwise than TRL would. Empty for other runs."""
    if not loaded.trl_words or config.training.mode != "rlvr":
        return {}
    lines = dict[str, str]()
    differing = [
        f"{word}={_format(ours)} ({_format(theirs)})"
        for word, ours, theirs, *keys in (*_defaults(config), *_of_algorithm(loaded, config), *_of_adapter(config))
        if ours != theirs and not any(_is_given(loaded, key) for key in keys)
    ]
    lines["unlike TRL"] = f"with TRL's default in brackets: {', '.join(differing)}" if differing else "no other default"
    has_adapter = config.model.lora is not None or config.client_options.trains_adapters
    if config.client_options.trains_adapters and not any(word.startswith("lora_") for word in loaded.trl_words):
        lines["  weights"] = f"client={config.client.name} trains an adapter; TRL all weights without use_peft"
    if config.training.optimizer.variant.weight_decay and not has_adapter:
        lines["  weight decay"] = "of all weights; TRL's leaves out biases and the weights of norms"
    sampling, temperature = config.rollout, config.evaluation.temperature
    cut = [name for name, off in (("top_p", 1), ("top_k", -1), ("min_p", 0)) if getattr(sampling, name) != off]
    if temperature != sampling.temperature or cut:
        without = f", without {' and '.join(cut)}" if cut else ""
        lines["  sampling"] = (
            f"evaluations sample at evaluation.temperature={temperature:g}{without}; TRL's as in training, at "
            f"{sampling.temperature:g}"
        )
    algorithm = config.algorithm.resolve()
    if algorithm.drop_equal_groups:
        lines["  equal rewards"] = (
            "groups of equal rewards leave the batch; TRL's count their tokens in the mean "
            "(algorithm.drop_equal_groups=false)"
        )
    if _SCALES.get(algorithm.advantage.name, "none") != "none":
        lines["  scale_rewards"] = "the standard deviation is the population's; TRL's the sample's"
    return lines


def _is_given(loaded: LoadedConfig, key: str) -> bool:
    return key in loaded.origin and rank(loaded.origin[key]) >= FILE


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


Difference = tuple[Any, ...]  # TRL's word, our value in its terms, TRL's default, and our keys


def _defaults(config: RunConfig) -> Iterator[Difference]:
    t, r, adam = config.training, config.rollout, config.training.optimizer.variant
    of_adam = {
        "learning_rate": ("learning_rate", _TRL_RATE),
        "lr_scheduler_type": ("decay", "linear"),
        "warmup_steps": ("warmup_steps", 0),
        "adam_beta1": ("beta1", 0.9),
        "adam_beta2": ("beta2", 0.999),
        "adam_epsilon": ("eps", 1e-8),
        "weight_decay": ("weight_decay", 0.0),
        "max_grad_norm": ("grad_clip", 1.0),
    }
    for word, (name, theirs) in of_adam.items():
        yield word, getattr(adam, name), theirs, f"training.optimizer.{name}"
    if t.epochs is None:
        yield "max_steps", t.steps, "num_train_epochs=3", "training.steps"
    yield "num_generations", t.group_size, 8, "training.group_size"
    yield "generation_batch_size", t.prompts_per_step * t.group_size, 8, "training.prompts_per_step"
    yield "num_iterations", t.ppo_epochs, 1, "training.ppo_epochs"
    yield "max_completion_length", r.max_tokens, 512, "rollout.max_tokens"
    yield "temperature", r.temperature, 1.0, "rollout.temperature"
    yield "top_p", r.top_p, 1.0, "rollout.top_p"
    yield "top_k", max(r.top_k, 0), 0, "rollout.top_k"
    yield "min_p", r.min_p, 0.0, "rollout.min_p"


def _of_algorithm(loaded: LoadedConfig, config: RunConfig) -> Iterator[Difference]:
    """The parts of the default algorithm; one that is named says itself what it does."""
    if _is_given(loaded, "algorithm.name"):
        return
    algorithm = config.algorithm.resolve()
    scale = _SCALES.get(algorithm.advantage.name, algorithm.advantage.name)
    yield "scale_rewards", scale, "group", "algorithm.advantage.name"
    reduction = algorithm.reduction
    yield "loss_type", _LOSS_TYPES.get(reduction, reduction), "dapo", "algorithm.reduction"
    low, high = (getattr(algorithm.loss, name, None) for name in ("clip_low", "clip_high"))
    if low is not None:
        yield "epsilon", low, 0.2, "algorithm.loss.clip_low"
        yield "epsilon_high", high, low, "algorithm.loss.clip_high"


def _of_adapter(config: RunConfig) -> Iterator[Difference]:
    if (lora := config.model.lora) is not None:
        yield "lora_r", lora.rank, _TRL_ADAPTER["rank"], "model.lora.rank"
        yield "lora_alpha", lora.alpha, _TRL_ADAPTER["alpha"], "model.lora.alpha"
        if not lora.targets:
            yield "lora_target_modules", "all-linear", "peft's for the model", "model.lora.targets"
