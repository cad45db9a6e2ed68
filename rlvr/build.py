"""The only place where a config becomes objects: model, client, environment, reward, algorithm, run.

`plan` says what a run would do without building it; `open_run` finds or makes the run's folder; `build` makes the
job that `rlvr.training.loops` carries out. torch is imported inside, when a model is really needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.config import CLI, Loaded, difference, dump, load, read, validate
from rlvr.engine.options import EngineLimits, LoraConfig
from rlvr.envs import resolve_environment
from rlvr.files import verified, write_atomic
from rlvr.protocols import SamplingParams, TaskSource
from rlvr.reward import resolve_reward
from rlvr.tracking import Console
from rlvr.training import journal
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.evaluate import EvaluationOptions, evaluate, evaluation_params, heldout_split
from rlvr.training.loops import Job, RunOptions
from rlvr.training.sft import SftOptions
from rlvr.training.step import Trainer, TrainingOptions

EXTRA = "pip install 'rlvr[train]'"
# Words of the command line that stand for a key of the schema.
SPELLINGS = {"mode": "training.mode"}
# What another evaluation of saved weights may ask for otherwise than their run did.
EVALUATION_KEYS = ("evaluation.", "engine.", "seed", "model.device", "model.dtype")


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


def open_run(loaded: Loaded, config: Config) -> tuple[Path, bool]:
    """The folder this run works in, and whether it is finished already.

    An unfinished run whose config agrees (its name apart, where that holds the time) is taken up again. A folder of
    that name with another config is a ValueError; `run.resume=false` renames it out of the way.
    """
    if timed := [key for key in loaded.timed if key not in ("run.name", "run.root")]:
        raise ValueError(
            f"{', '.join(timed)}: ${{now:...}} may stand in run.name and run.root only. Elsewhere a resumed run would "
            "go on with another value than it began with; give a fixed one"
        )
    wanted = written(config, loaded)
    where = ("run.resume", "run.name", "run.root")
    environment = {key: value for key, value in journal.from_environment(loaded.values, loaded.raw) if key not in where}
    ignore = ["run.resume", *(key for key in loaded.timed if key == "run.name")]

    def changes(folder: Path) -> list[str]:
        hidden = journal.changed_environment(folder, environment)
        return difference(wanted, read(folder / "resolved.yaml"), ignore=ignore) + [
            f"{key} (its value from the environment)" for key in hidden
        ]

    name = config.run.name or loaded.name or "run"
    folder = journal.run_folder(config.run.root, name)
    if config.run.resume and "run.name" in loaded.timed:
        for stored in sorted(folder.parent.glob("*/resolved.yaml"), reverse=True):
            if not (stored.parent / "summary.json").exists() and not changes(stored.parent):
                return stored.parent, False
    stored = folder / "resolved.yaml"
    if stored.exists() and not config.run.resume:
        journal.set_aside(folder)
    elif stored.exists() and (changed := changes(folder)):
        raise ValueError(
            f"run folder {folder} holds a run of another config; it differs in {', '.join(changed[:6])}"
            f"{f' and {len(changed) - 6} more' if len(changed) > 6 else ''}. Choose another run.name, ask for the same "
            "config, or give run.resume=false to start anew (the old folder is kept, renamed)"
        )
    elif journal.holds_no_run(folder):
        raise ValueError(f"run folder {folder} exists and holds no run; choose another run.name")
    folder.mkdir(parents=True, exist_ok=True)
    if not stored.exists():
        journal.keep_environment(folder, environment)
        write_atomic(stored, dump(wanted))
    return folder, (folder / "summary.json").exists()


def plan(config: Config, source: TaskSource) -> dict[str, str]:
    """The run in words and numbers, as printed before it starts."""
    t, e = config.training, config.evaluation
    algorithm = config.algorithm.resolve()
    model = config.model.name or f"{config.model.config.get('model_type', '?')} from random weights"
    answers = t.prompts_per_step * t.group_size
    tokens, updates = t.steps * answers * (config.rollout.max_tokens or 0), t.ppo_epochs * t.num_minibatches
    until = f", or until {100 * t.until:g}% of held-out answers pass" if t.until and e.every else ""
    waves = f", up to {1 + t.refill} waves of prompts" if t.refill else ""
    lines = {
        "model": model + (f", LoRA rank {config.model.lora.rank}" if config.model.lora else ", all weights"),
        "environment": config.env.name + (f", levels {', '.join(source.levels)}" if any(source.levels) else ""),
        "reward": config.reward.type or source.reward,
        "warm-up": f"{config.sft.steps} steps x {config.sft.batch_size} demonstrations"
        + (f", or until {100 * config.sft.until:g}% of held-out answers pass" if config.sft.until else ""),
    }
    if t.mode == "rlvr":
        lines |= {
            "algorithm": f"{algorithm.name}: {algorithm.advantage}, loss {algorithm.loss}, {algorithm.reduction}",
            "training": f"{t.steps} steps x {t.prompts_per_step} prompts x {t.group_size} answers = "
            f"{t.steps * answers:,} answers, at most {tokens:,} tokens{waves}{until}",
            "updates": f"{updates} a step, {t.steps * updates} in all",
        }
    return lines | {"evaluation": f"{e.tasks} held-out tasks x {e.samples} answers, before and after"}


def build_source(config: Config) -> TaskSource:
    return resolve_environment(config.env.name, **config.env.kwargs)


def cores() -> int:
    """The cores that this process may use, where the system says which (Linux), else all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_engine(config: Config, source: TaskSource) -> Any:
    """The engine with its model."""
    try:
        import torch

        from rlvr.engine.engine import Engine
        from rlvr.engine.model import build_model, load_model
        from rlvr.engine.tokenizer import build_tokenizer, load_tokenizer
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; training needs the extra: {EXTRA}") from error
    torch.set_num_threads(config.engine.threads or cores())
    options = config.model
    where = {"device": options.device, "dtype": options.dtype}
    if options.name:
        model = load_model(options.name, load_tokenizer(options.tokenizer or options.name), **where)
    else:
        if options.tokenizer in ("words", "characters"):
            words = getattr(source, "vocabulary", None)
            if not words:
                raise ValueError(
                    f"model.tokenizer={options.tokenizer}: the environment {config.env.name!r} has no `vocabulary` to "
                    "build it from; name a tokenizer's folder or hub name instead"
                )
            ends = {"end": getattr(source, "end_word", "<end>"), "pad": getattr(source, "pad_word", "<pad>")}
            tokenizer = build_tokenizer(options.tokenizer, words, **ends)
        elif options.tokenizer:
            tokenizer = load_tokenizer(options.tokenizer)
        else:
            raise ValueError("model.tokenizer is missing: words, characters, or a tokenizer's folder or hub name")
        model = build_model(options.config, tokenizer, seed=config.seed, **where)
    return Engine(model, config.engine)


def build_client(config: Config, engine: Any, folder: Path) -> Any:
    from rlvr.clients.local import LocalTrainingClient

    policy = engine.create_policy("policy", lora=config.model.lora, seed=config.seed)
    return LocalTrainingClient(engine, policy, folder)


def circumstances(client: Any) -> dict[str, str | int]:
    """What the bits of a run depend on beside its config."""
    import torch

    device = next(iter(client.policy.parameters.values())).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"torch": str(torch.__version__), "threads": torch.get_num_threads(), "device": name}


def build(config: Config, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> Job:
    """The whole job, ready for `rlvr.training.loops.Loop`."""
    source = build_source(config)
    reward = resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)
    algorithm = config.algorithm.resolve()
    engine = build_engine(config, source)
    client = build_client(config, engine, folder / "checkpoints")
    for note in engine.model.notes:
        warn(note)
    policy = client.policy
    say(
        f"{sum(p.numel() for p in policy.parameters.values()):,} trainable parameters, {engine.model.dtype} on "
        f"{engine.model.device}".replace("torch.", "")
    )
    curriculum = Curriculum(source, config.curriculum, config.seed)
    trainer = Trainer(client, source, reward, algorithm, config.rollout, config.training, curriculum, config.seed, warn)
    return Job(
        client=client,
        source=source,
        reward=reward,
        params=config.rollout,
        trainer=trainer,
        sft=config.sft,
        training=config.training,
        evaluation=config.evaluation,
        options=config.run,
        seed=config.seed,
        folder=folder,
        weights_sha256=policy.sha256,
    )


def evaluate_saved(place: Path, overrides: list[str], console: Console) -> dict[str, Any]:
    """Evaluate the weights of a run folder (its last whole checkpoint) or of one checkpoint folder inside a run.

    `overrides` may change how that is done (EVALUATION_KEYS), e.g. `evaluation.samples=64`. Nothing is written.
    """
    for key in (text.partition("=")[0].removeprefix("+") for text in overrides):
        if not (key in EVALUATION_KEYS or key.startswith(tuple(k for k in EVALUATION_KEYS if k.endswith(".")))):
            raise ValueError(
                f"{key} cannot be changed here: saved weights are evaluated as their run was set up. Only "
                "evaluation.*, engine.*, seed, model.device and model.dtype may differ"
            )
    place = place.expanduser()
    inside = place.parent.name == "checkpoints"
    folder = place.parent.parent if inside else place
    stored = folder / "resolved.yaml"
    if not stored.exists():
        raise ValueError(f"{place} is neither a run folder nor a checkpoint inside one (no resolved.yaml)")
    # Its seed made the base model of an adapter; another one is for the draws of this evaluation alone.
    config = configured(load(None, str(stored), [text for text in overrides if text.lstrip("+")[:5] != "seed="]))
    seed = configured(load(None, str(stored), overrides)).seed
    if not inside:
        checkpoint = journal.stored_checkpoint(folder)
        if checkpoint is None:
            raise ValueError(f"{folder} has no whole checkpoint yet; train it first, or name one of its checkpoints")
        place = checkpoint
    elif wrong := verified(place):
        raise ValueError(f"checkpoint {place} is damaged or missing: {wrong}")
    source = build_source(config)
    client = build_client(config, build_engine(config, source), folder / "checkpoints")
    client.load_state(str(place)).result()
    asked = config.evaluation
    tasks, _ = heldout_split(source, asked, looks=bool(config.sft.until or asked.every))
    console.phase("evaluation", len(tasks), unit="tasks")
    result = evaluate(
        source,
        tasks,
        client.create_sampling_client(),
        resolve_reward(config.reward.type or source.reward, **config.reward.kwargs),
        evaluation_params(config.rollout, asked),
        samples=asked.samples,
        k=asked.k or asked.samples,
        seed=seed,
        error_budget=config.training.error_budget,
        progress=lambda done: console.step({}, done),
    )
    told = {name: asdict(value) for name, value in result.metrics().items()}
    levels = {level: {name: asdict(v) for name, v in result.metrics(level).items()} for level in result.levels}
    return {"checkpoint": str(place), **told, "by_level": levels, "tasks": len(tasks), "unjudged": result.unjudged}
