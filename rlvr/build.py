"""The only place where a config becomes objects: model, client, environment, reward, algorithm, run.

`plan` says what a run would do without building it; `open_run` finds or makes the run's folder; `build` makes the
job that `rlvr.training.loops` carries out. torch is imported inside, when a model is really needed: `client=mock` runs
without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.algorithms.roads import check_roads
from rlvr.clients.mock import MockTrainingClient
from rlvr.config import Loaded, difference, dump, load, read
from rlvr.config.schema import Config, configured, written
from rlvr.envs import resolve_environment
from rlvr.envs.prompt import encode_prompt
from rlvr.files import verified, write_atomic
from rlvr.protocols import TaskSource
from rlvr.reward import Reward, resolve_reward
from rlvr.toy import toy_policy
from rlvr.tracking import Console
from rlvr.tracking.trackers import Trackers
from rlvr.training import journal
from rlvr.training.curriculum import Curriculum
from rlvr.training.evaluate import evaluate, evaluation_params, heldout_split
from rlvr.training.loops import Job
from rlvr.training.start import is_model, model_and_tokenizer, start_folder
from rlvr.training.step import Trainer, check_recipe

EXTRA = "pip install 'rlvr[train]'"
# What another evaluation of saved weights may ask for otherwise than their run did.
EVALUATION_KEYS = ("evaluation.", "engine.", "seed", "model.device", "model.dtype")


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
    # Trackers change nothing that is computed: they may be turned on for the rest of a run.
    ignore = ["run.resume", "tracking", *(key for key in loaded.timed if key == "run.name")]

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
    elif stored.exists() and journal.nothing_done(folder):
        with journal.locked(folder):  # a run that failed before its first step holds no name against its correction
            stored.unlink()
    elif stored.exists() and (changed := changes(folder)):
        raise ValueError(
            f"run folder {folder} holds a run of another config; it differs in {', '.join(changed[:6])}"
            f"{f' and {len(changed) - 6} more' if len(changed) > 6 else ''}. Choose another run.name, ask for the same "
            "config, or give run.resume=false to start anew (the old folder is kept, renamed)"
        )
    elif journal.holds_no_run(folder):
        raise ValueError(f"run folder {folder} exists and holds no run; choose another run.name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"run.root={config.run.root}: {folder} cannot be made ({error.strerror}); give another run.root"
        ) from error
    if not stored.exists():
        journal.keep_environment(folder, environment)
        write_atomic(stored, dump(wanted))
    return folder, (folder / "summary.json").exists()


def plan(config: Config, source: TaskSource) -> dict[str, str]:
    """The run in words and numbers, as printed before it starts; ValueError for one that could not train."""
    t, e = config.training, config.evaluation
    algorithm = config.algorithm.resolve()
    if t.mode == "rlvr":
        check_recipe(algorithm, config.rollout, t)
        if config.client == "mock":  # the local client offers every road
            check_roads(algorithm, MockTrainingClient)
    answers = t.prompts_per_step * t.group_size
    tokens, updates = t.steps * answers * (config.rollout.max_tokens or 0), t.ppo_epochs * t.num_minibatches
    until = f", or until {100 * t.until:g}% of held-out answers pass" if t.until and e.every else ""
    waves = f", up to {1 + t.refill} waves of prompts" if t.refill else ""
    lines = {
        "model": _model(config, source),
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
    tasks, _ = heldout_split(source, e, looks=bool(config.sft.until or e.every))
    return lines | {"evaluation": f"{len(tasks)} held-out tasks x {e.samples} answers, before and after"}


def _model(config: Config, source: TaskSource) -> str:
    if config.client == "mock":
        return f"a table of token logits over {len(_vocabulary(config, source))} words, all weights (client=mock)"
    model = config.model.name or f"{config.model.config.get('model_type', '?')} from random weights"
    if config.model.start_from:
        place = start_folder(config.model.start_from)
        model = str(place) if is_model(place) else f"{model} with the adapter {place}"
    return model + (f", LoRA rank {config.model.lora.rank}" if config.model.lora else ", all weights")


def build_source(config: Config) -> TaskSource:
    """The environment; ValueError too where the config names a reward that does not exist, or the client cannot be."""
    source = resolve_environment(config.env.name, **config.env.kwargs)
    if config.client == "mock":
        _vocabulary(config, source)
    resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)
    build_watched(config)
    config.algorithm.resolve()
    return source


def check_prompts(config: Config, source: TaskSource, tokenizer: Any) -> None:
    """ValueError if a prompt of the first tasks is too long: better now than after a warm-up."""
    most = config.training.max_prompt_tokens
    if most is None or config.training.mode != "rlvr":
        return
    first = [source.train(config.seed, index, level) for level in source.levels for index in range(8)]
    for task in [*source.heldout(8), *first]:
        if (length := len(encode_prompt(task, tokenizer))) > most:
            raise ValueError(
                f"task {task.id!r}: its prompt has {length} tokens, more than training.max_prompt_tokens={most}; raise "
                "the limit or leave such tasks out"
            )


def build_watched(config: Config) -> list[Reward]:
    """The verifiers that only watch."""
    names = config.reward.watch
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"reward.watch: {twice[0]!r} is named twice; leave one out")
    return [resolve_reward(name) for name in names]


def _vocabulary(config: Config, source: TaskSource) -> list[str]:
    """The words that the toy policy can say."""
    words = getattr(source, "vocabulary", None)
    if not words:
        raise ValueError(
            f"client=mock: the environment {config.env.name!r} has no `vocabulary` to make a table of logits "
            "over; use env.name=toy, give the environment a `vocabulary` (a list of words), or use client=local"
        )
    return list(words)


def cores() -> int:
    """The cores that this process may use, where the system says which (Linux), else all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_engine(config: Config, source: TaskSource) -> Any:
    """The engine with its model."""
    try:
        import torch

        from rlvr.engine.engine import Engine
        from rlvr.engine.model import build_model, load_model
        from rlvr.engine.tokenizer import build_tokenizer, load_tokenizer, quiet
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; training needs the extra: {EXTRA}") from error
    quiet()  # its advice is for people who call it, not for people who call us
    torch.set_num_threads(config.engine.threads or cores())
    options = config.model
    where = {"device": options.device, "dtype": options.dtype}
    name, tokenizer = model_and_tokenizer(options.name, options.tokenizer, options.start_from)
    if name:
        model = load_model(name, load_tokenizer(tokenizer), **where)
    else:
        if options.tokenizer in ("words", "characters", "pieces"):
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


def build_client(
    config: Config, source: TaskSource, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]
) -> Any:
    """The training client with its untrained policy; it saves in `folder`. `say` and `warn` hear about the model."""
    if config.client == "mock":
        policy = toy_policy(_vocabulary(config, source), config.seed, end=getattr(source, "end_word", "<end>"))
        say(f"{len(policy.logits):,} trainable parameters, float64 in numpy")
        return MockTrainingClient(policy, folder)
    engine = build_engine(config, source)
    from rlvr.clients.local import LocalTrainingClient

    policy = engine.create_policy("policy", lora=config.model.lora, seed=config.seed)
    for note in engine.model.notes:
        warn(note)
    say(
        f"{sum(p.numel() for p in policy.parameters.values()):,} trainable parameters, {engine.model.dtype} on "
        f"{engine.model.device}".replace("torch.", "")
    )
    return LocalTrainingClient(engine, policy, folder)


def circumstances(client: Any) -> dict[str, str | int]:
    """What the bits of a run depend on beside its config."""
    if isinstance(client, MockTrainingClient):
        return {"numpy": np.__version__}
    import torch

    device = next(iter(client.policy.parameters.values())).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"torch": str(torch.__version__), "threads": torch.get_num_threads(), "device": name}


def build(config: Config, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> Job:
    """The whole job, ready for `rlvr.training.loops.Loop`."""
    source = build_source(config)
    reward = resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)
    algorithm = config.algorithm.resolve()
    watched = build_watched(config)
    if reward.entry.caution and not {w.name for w in watched} - {reward.name} and config.training.mode == "rlvr":
        warn(f"the reward {reward.name!r} can be hacked: {reward.entry.caution}")
    trackers = Trackers(config.tracking, folder, folder.name, read(folder / "resolved.yaml"), warn)
    client = build_client(config, source, folder / "checkpoints", say, warn)
    if config.model.start_from and config.client == "local" and not is_model(start_folder(config.model.start_from)):
        from rlvr.engine.checkpoint import load_adapter

        load_adapter(start_folder(config.model.start_from), client.policy)
    check_prompts(config, source, client.get_tokenizer())
    curriculum = Curriculum(source, config.curriculum, config.seed)
    for text in curriculum.advice() if config.training.mode == "rlvr" else ():
        warn(text)
    trainer = Trainer(
        client,
        source,
        reward,
        algorithm,
        config.rollout,
        config.training,
        curriculum,
        config.seed,
        warn,
        watched,
    )
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
        trackers=trackers,
        weights_sha256=client.policy.sha256,
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
    client = build_client(config, source, folder / "checkpoints", lambda text: None, lambda text: None)
    client.load_state(str(place)).result()
    asked, reward = config.evaluation, resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)
    tasks, _ = heldout_split(source, asked, looks=bool(config.sft.until or asked.every))
    if len(tasks) < asked.tasks and any("evaluation.tasks=" in text for text in overrides):
        console.warn(f"evaluation.tasks={asked.tasks}, but {config.env.name} holds out {len(tasks)} tasks to report on")
    console.phase("evaluation", len(tasks), unit="tasks")
    result = evaluate(
        source,
        tasks,
        client.create_sampling_client(),
        reward,
        evaluation_params(config.rollout, asked),
        samples=asked.samples,
        k=asked.k or asked.samples,
        seed=seed,
        error_budget=config.training.error_budget,
        watched=build_watched(config),
        progress=lambda done: console.step({}, done),
    )
    told = {name: asdict(value) for name, value in result.metrics().items()}
    levels = {level: {name: asdict(v) for name, v in result.metrics(level).items()} for level in result.levels}
    return {"checkpoint": str(place), **told, "by_level": levels, "tasks": len(tasks), "unjudged": result.unjudged}
