"""What can be configured: the sections of a run's config, checked as dataclasses of the parts they configure.

Defaults stand with the parts (the dataclasses of lower floors); this file restates none. `configured` turns composed
values into a `Config`, `without_effect` says which keys cannot change it, `written` what `resolved.yaml` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.config.compose import CLI, Loaded
from rlvr.config.validate import validate
from rlvr.engine.options import EngineLimits, LoraConfig
from rlvr.protocols import SamplingParams
from rlvr.training.curriculum import CurriculumOptions
from rlvr.training.evaluate import EvaluationOptions
from rlvr.training.loops import RunOptions
from rlvr.training.sft import SftOptions
from rlvr.training.step import TrainingOptions

# Words of the command line that stand for a key of the schema.
SPELLINGS = {"mode": "training.mode"}


@dataclass(frozen=True)
class ModelOptions:
    """`name` is a local folder or hub name; without it `config` builds a model from random weights.

    `tokenizer` is a folder or hub name, or `words` / `characters` for one built from the environment's vocabulary.
    `lora` trains an adapter instead of all weights. `device` and `dtype`: auto, or cpu, cuda, float32, bfloat16.
    """

    name: str | None = None
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        if bool(self.name) == bool(self.config):
            given = "both" if self.name else "neither"
            raise ValueError(
                f"model: {given} of name and config given; name a folder or hub model, or describe one to build"
            )


@dataclass(frozen=True)
class EnvOptions:
    """A registered environment or `package.module:factory`, and its arguments."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class RewardOptions:
    """A registered reward or `package.module:function`, and its arguments; None takes the environment's own."""

    type: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class AlgorithmOptions:
    """A row of the algorithm table by name; any other field replaces that cell of the row."""

    name: str = "ppo"
    advantage: str | None = None
    loss: str | None = None
    reduction: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    drop_equal_groups: bool | None = None

    def resolve(self) -> Algorithm:
        cells = {key: value for key, value in asdict(self).items() if key != "name" and value is not None}
        return resolve_algorithm(self.name, **cells)


@dataclass(frozen=True)
class Config:
    """Everything that can be set. Defaults are those of the parts themselves."""

    env: EnvOptions
    model: ModelOptions
    seed: int = 42
    reward: RewardOptions = field(default_factory=RewardOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    rollout: SamplingParams = field(default_factory=SamplingParams)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    sft: SftOptions = field(default_factory=SftOptions)
    curriculum: CurriculumOptions = field(default_factory=CurriculumOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    engine: EngineLimits = field(default_factory=EngineLimits)
    run: RunOptions = field(default_factory=RunOptions)


def configured(loaded: Loaded, warn: Callable[[str], None] = lambda text: None) -> Config:
    """The composed values as checked dataclasses; ValueError naming every key that does not fit.

    A key that was set and has no effect in this run is an error where it was typed and a warning where it came from a
    file, which other runs may share.
    """
    config = validate(loaded.values, Config, loaded.origin)
    if config.training.mode == "sft" and config.sft.steps == 0:
        raise ValueError("training.mode=sft with sft.steps=0: nothing to train; give sft.steps=1000, say")
    idle = [(key, why) for key, why in without_effect(config) for given in loaded.origin if _covers(key, given)]
    typed = [
        f"{key} ({why})" for key, why in idle if any(o == CLI for k, o in loaded.origin.items() if _covers(key, k))
    ]
    if typed:
        raise ValueError(f"no effect in this run: {'; '.join(dict.fromkeys(typed))}. Leave it out")
    for text in dict.fromkeys(f"{key} has no effect in this run: {why}" for key, why in idle):
        warn(text)
    return config


def _covers(key: str, given: str) -> bool:
    return given == key or given.startswith(f"{key}.")


def without_effect(config: Config) -> list[tuple[str, str]]:
    """Keys that cannot change what this config does, with the reason."""
    idle = [("rollout.seed", "every draw of a run follows from seed")]
    if config.sft.steps == 0:
        idle += [(f"sft.{key}", "sft.steps is 0") for key in ("batch_size", "until", "optimizer", "curriculum")]
    if config.curriculum.by != "pass_rate":
        idle += [(f"curriculum.{key}", "curriculum.by is not pass_rate") for key in ("floor", "decay")]
    if config.evaluation.every == 0:
        idle.append(("training.until", "evaluation.every is 0: nothing looks at held-out tasks"))
    if config.sft.until == 0:
        idle.append(("sft.check_every", "sft.until is 0"))
        if config.evaluation.every == 0:
            idle += [
                (f"evaluation.{key}", "neither evaluation.every nor sft.until asks for quick looks")
                for key in ("quick_tasks", "quick_samples")
            ]
    if config.training.mode == "sft":
        learned = [f"training.{f.name}" for f in fields(TrainingOptions) if f.name != "mode"]
        idle += [(key, "training.mode is sft") for key in (*learned, "algorithm", "evaluation.every")]
    return idle


def spelled(overrides: list[str]) -> list[str]:
    """Command-line words with their short spellings replaced by the schema's keys."""
    return [
        f"{SPELLINGS[key]}={rest}" if eq and (key := word) in SPELLINGS else f"{word}{eq}{rest}"
        for word, eq, rest in (text.partition("=") for text in overrides)
    ]


def written(config: Config, loaded: Loaded) -> dict[str, Any]:
    """What `resolved.yaml` holds: every key with its value, but what comes from the environment stays `${...}`."""

    def merged(full: Any, raw: Any) -> Any:
        if isinstance(raw, str) and "${" in raw:
            return raw
        if isinstance(full, Mapping) and isinstance(raw, Mapping):
            return {key: merged(value, raw.get(key)) for key, value in full.items()}
        if isinstance(full, (list, tuple)):
            raws = raw if isinstance(raw, list) and len(raw) == len(full) else [None] * len(full)
            return [merged(value, text) for value, text in zip(full, raws, strict=True)]
        return full

    return merged(asdict(config), loaded.raw)
