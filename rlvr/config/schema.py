"""What can be configured: the sections of a run's config, checked as dataclasses of the parts they configure.

Defaults stand with the parts (the dataclasses of lower floors); this file restates none. `configured` turns composed
values into a `Config`, `written` says what `resolved.yaml` holds. Which keys cannot change a run is in
`rlvr.config.idle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.config.compose import Loaded
from rlvr.config.idle import report, settle, without_divergence_limit, without_effect
from rlvr.config.validate import validate
from rlvr.engine.options import EngineLimits, LoraConfig
from rlvr.messages import SamplingParams
from rlvr.tracking import TrackingOptions
from rlvr.training.curriculum import CurriculumOptions
from rlvr.training.evaluate import EvaluationOptions
from rlvr.training.job import RunOptions
from rlvr.training.options import TrainingOptions
from rlvr.training.sft import SftOptions


@dataclass(frozen=True)
class ModelOptions:
    """`name` is a local folder or hub name; without it `config` builds a model from random weights.

    `start_from` is where the weights start instead: a run or checkpoint of ours, a model folder or a peft adapter.
    `tokenizer` is a folder or hub name, or `words`, `characters` or `pieces` for one built from the
    environment's vocabulary.
    `lora` trains an adapter instead of all weights. `device` and `dtype`: auto, or cpu, cuda, float32, bfloat16.
    With client=tinker `name` and `start_from` (tinker://...) are the server's, at `base_url`; the `api_key` is never
    written down. Without them the `tinker` SDK looks where it always does (TINKER_BASE_URL, TINKER_API_KEY).
    """

    name: str | None = None
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    lora: LoraConfig | None = None
    start_from: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class EnvOptions:
    """A registered environment or `package.module:factory`, and its arguments."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class RewardOptions:
    """A registered reward or `package.module:function`, and its arguments; None takes the environment's own.

    `watch` names verifiers that judge every answer too and reward none: their means show whether a reward that rises is
    being earned or hacked.
    """

    type: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    watch: list[str] = field(default_factory=list[str])


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
    mask_truncated: bool | None = None
    beta: float | None = None
    baseline_decay: float | None = None
    kl_coef: float | None = None
    kl_estimator: str | None = None
    kl_in: str | None = None
    entropy_coef: float | None = None
    entropy: str | None = None
    importance_cap: float | None = None
    overlong_buffer: int | None = None
    overlong_penalty: float | None = None

    def resolve(self) -> Algorithm:
        cells = {key: value for key, value in asdict(self).items() if key != "name" and value is not None}
        return resolve_algorithm(self.name, **cells)


@dataclass(frozen=True)
class Config:
    """Everything that can be set. Defaults are those of the parts themselves.

    `client` is who samples and learns: `local`, the engine in this process; `tinker`, a server that speaks the Tinker
    protocol; or `mock`, a table of logits that needs no model.
    """

    env: EnvOptions
    model: ModelOptions = field(default_factory=ModelOptions)
    client: str = "local"
    seed: int = 42
    reward: RewardOptions = field(default_factory=RewardOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    rollout: SamplingParams = field(default_factory=SamplingParams)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    sft: SftOptions = field(default_factory=SftOptions)
    curriculum: CurriculumOptions = field(default_factory=CurriculumOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    engine: EngineLimits = field(default_factory=EngineLimits)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            said = str(self.seed) if abs(self.seed) < 10**30 else "a number of more than 30 digits"
            raise ValueError(f"seed={said}; expected a whole number from 0 to 2**63 - 1")
        if self.client not in ("local", "mock", "tinker"):
            raise ValueError(f"client={self.client!r}; expected local, tinker or mock")
        if self.client == "tinker" and not (self.model.name or self.model.start_from):
            raise ValueError(
                "client=tinker: model.name is missing, the model's name at the server (or model.start_from=tinker://...)"
            )
        if self.client == "local" and self.model.name and self.model.config:
            raise ValueError(
                "model: both of name and config given; name a folder or hub model, or describe one to build"
            )
        if self.client == "local" and not (self.model.name or self.model.config or self.model.start_from):
            raise ValueError(
                "model: neither of name and config given; name a folder or hub model, or describe one to build"
            )


def configured(loaded: Loaded, warn: Callable[[str], None] = lambda text: None) -> Config:
    """The composed values as checked dataclasses; ValueError naming every key that does not fit.

    A key that was set and has no effect in this run is an error where it was typed and a warning where it came from a
    file, which other runs may share.
    """
    values, unlooked = without_divergence_limit(loaded.values)
    config = validate(values, Config, loaded.origin, loaded.typed)
    if config.training.mode == "sft" and config.sft.steps == 0:
        raise ValueError("training.mode=sft with sft.steps=0: nothing to train; give sft.steps=1000, say")
    config, unused = settle(config)
    left_out, now = asdict(Config(config.env, client="mock")), asdict(config)
    taken_out = {key for key, _ in (*unused, *unlooked)}

    def same(key: str) -> bool:
        """Whether a key has the value it would have if nobody had set it."""
        value, default = now, left_out
        if key in taken_out:
            return False
        for part in key.split("."):
            if not (isinstance(value, dict) and isinstance(default, dict) and part in value and part in default):
                return False
            value, default = value[part], default[part]
        return not isinstance(value, dict) and value == default

    report([*without_effect(config), *unused, *unlooked], loaded, same, warn)
    return config


def written(config: Config, loaded: Loaded) -> dict[str, Any]:
    """What `resolved.yaml` holds: every key with its value, but what comes from the environment stays `${...}`."""

    def merged(full: Any, raw: Any, key: str) -> Any:
        if isinstance(raw, str) and "${" in raw:
            return raw
        if key == ".model.api_key":
            return None  # never written; who goes on with the run gives it again
        held: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        if is_dataclass(full) and not isinstance(full, type):  # a field that is not in `raw` has its default
            alike(raw is None or isinstance(raw, Mapping), key)
            return {f.name: merged(getattr(full, f.name), held.get(f.name), f"{key}.{f.name}") for f in fields(full)}
        if isinstance(full, Mapping):
            alike(raw is None or (isinstance(raw, Mapping) and (not raw or full.keys() <= raw.keys())), key)
            return {k: merged(value, held.get(k), f"{key}.{k}") for k, value in full.items()}
        if isinstance(full, (list, tuple)):
            alike(raw is None or (isinstance(raw, list) and len(raw) == len(full)), key)
            raws = [None] * len(full) if raw is None else raw
            return [merged(value, text, f"{key}[{i}]") for i, (value, text) in enumerate(zip(full, raws, strict=True))]
        alike(not isinstance(raw, (Mapping, list)), key)
        return full

    def alike(same: bool, key: str) -> None:
        if not same:  # never write a value of which it is not known where it came from
            raise ValueError(f"{key[1:]}: what was checked has not the shape of what was given; write its keys as text")

    return merged(config, loaded.raw, "")
