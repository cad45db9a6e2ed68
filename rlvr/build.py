"""The only place where a config becomes objects: model, client, environment, reward, algorithm, run.

`plan` says what a run would do without building it; `open_run` finds or makes the run's folder; `build` makes the
job that `rlvr.training.loops` carries out. torch is imported inside, when a model is really needed: `client=mock` runs
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlvr.algorithms.roads import check_roads
from rlvr.build_client import OFFERS, build_client, shares, vocabulary, weights_hash
from rlvr.config import Loaded, difference, dump, load, read
from rlvr.config.schema import Config, configured, written
from rlvr.cores import give_workers
from rlvr.envs import resolve_environment
from rlvr.envs.prompt import encode_prompt
from rlvr.files import verified, write_atomic
from rlvr.protocols import TaskSource
from rlvr.reward import Reward, resolve_reward
from rlvr.tracking import Console
from rlvr.tracking.trackers import Trackers
from rlvr.training import journal
from rlvr.training.curriculum import Curriculum
from rlvr.training.evaluate import Evaluation, beside, evaluate, evaluation_params, heldout_split
from rlvr.training.job import Job
from rlvr.training.start import is_model, remote_start, start_folder
from rlvr.training.step import Trainer, check_recipe
from rlvr.types import Task

ELSEWHERE = ("model.base_url", "model.api_key")  # where a server is and how to get in: no part of what a run computes
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
    where = ("run.resume", "run.name", "run.root", *ELSEWHERE)
    environment = {key: value for key, value in journal.from_environment(loaded.values, loaded.raw) if key not in where}
    # Trackers change nothing that is computed: they may be turned on for the rest of a run.
    ignore = ["run.resume", "tracking", *ELSEWHERE, *(key for key in loaded.timed if key == "run.name")]

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
        # A run that failed before its first step holds no name against its correction. Its config is replaced in one
        # move: a kill in between must not leave a folder that belongs to no run.
        with journal.locked(folder):
            journal.keep_environment(folder, environment)
            write_atomic(stored, dump(wanted))
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
        if offers := OFFERS.get(config.client):
            check_roads(algorithm, offers)
    answers = t.prompts_per_step * t.group_size
    updates = t.ppo_epochs * t.num_substeps
    turns: int = getattr(source, "max_turns", 1)  # max_tokens counts for each
    tokens = t.steps * answers * turns * (config.rollout.max_tokens or 0)
    until = f", or until {100 * t.until:g}% of held-out answers pass" if t.until and e.every else ""
    waves = f", up to {1 + t.refill} waves of prompts" if t.refill else ""
    lines = {
        "model": _model(config, source),
        "environment": config.env.name + (f", levels {', '.join(source.levels)}" if any(source.levels) else ""),
        "reward": config.reward.type or source.reward,
        "warm-up": f"{config.sft.steps} steps x {config.sft.batch_size} demonstrations"
        + (f", or until {100 * config.sft.until:g}% of held-out answers pass" if config.sft.until else ""),
    }
    if (share := shares(config, source)).beside:
        lines["cores"] = str(share)
    if t.mode == "rlvr":
        lines |= {
            "algorithm": f"{algorithm.name}: {algorithm.advantage}, loss {algorithm.loss}, {algorithm.reduction}",
            "training": f"{t.steps} steps x {t.prompts_per_step} prompts x {t.group_size} answers = "
            f"{t.steps * answers:,} answers, at most {tokens:,} tokens"
            f"{f' in {turns} turns' if turns > 1 else ''}{waves}{until}",
            "updates": f"{updates} a step, {t.steps * updates} in all",
        }
    tasks, _ = heldout_split(source, e, looks=bool(config.sft.until or e.every))
    return lines | {"evaluation": f"{len(tasks)} held-out tasks x {e.samples} answers, before and after"}


def _model(config: Config, source: TaskSource) -> str:
    if config.client == "mock":
        return f"a table of token logits over {len(vocabulary(config, source))} words, all weights (client=mock)"
    if config.client == "tinker":
        start = config.model.start_from
        model = remote_start(start) if start else config.model.name
        return f"{model}, an adapter that {config.model.base_url or 'a Tinker server'} trains (client=tinker)"
    model = config.model.name or f"{config.model.config.get('model_type', '?')} from random weights"
    if config.model.start_from:
        place = start_folder(config.model.start_from)
        model = str(place) if is_model(place) else f"{model} with the adapter {place}"
    return model + (f", LoRA rank {config.model.lora.rank}" if config.model.lora else ", all weights")


def build_source(config: Config) -> TaskSource:
    """The environment; ValueError too where the config names a reward that does not exist, or the client cannot be."""
    source = resolve_environment(config.env.name, **config.env.kwargs)
    if config.client == "mock":
        vocabulary(config, source)
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


def start_rewards(config: Config, source: TaskSource) -> None:
    """Start what the verifiers depend on, a sandbox say; ValueError where it is not to be had on this machine."""
    give_workers(shares(config, source).workers)
    for reward in (resolve_reward(config.reward.type or source.reward, **config.reward.kwargs), *build_watched(config)):
        reward.start()


def build(config: Config, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> Job:
    """The whole job, ready for `rlvr.training.loops.Loop`."""
    source = build_source(config)
    start_rewards(config, source)
    reward = resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)
    algorithm = config.algorithm.resolve()
    watched = build_watched(config)
    if reward.caution and not {w.name for w in watched} - {reward.name} and config.training.mode == "rlvr":
        warn(f"the reward {reward.name!r} can be hacked: {reward.caution}")
    trackers = build_trackers(config, folder, warn)
    client = build_client(config, source, folder / "checkpoints", say, warn)
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
        weights_sha256=weights_hash(client),
    )


def build_trackers(config: Config, folder: Path, warn: Callable[[str], None]) -> Trackers:
    settings, recorder = read(folder / "resolved.yaml"), None
    if config.tracking.store:
        try:
            from rlvr.store.runs import RunRecorder
        except ModuleNotFoundError as error:
            raise ValueError(f"tracking.store needs {error.name}: pip install 'rlvr[serve]'") from error
        try:
            recorder = RunRecorder(config.tracking.store, folder, folder.name, settings, warn)
        except ValueError as error:
            raise ValueError(f"tracking.store: {error}") from error
    return Trackers(config.tracking, folder, folder.name, settings, warn, recorder=recorder)


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
    start_rewards(config, source)
    client = build_client(config, source, folder / "checkpoints", lambda text: None, lambda text: None, fresh=False)
    client.load_state(journal.weights_at(place)).result()
    asked, reward = config.evaluation, resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)
    tasks, _ = heldout_split(source, asked, looks=bool(config.sft.until or asked.every))
    if len(tasks) < asked.tasks and any("evaluation.tasks=" in text for text in overrides):
        console.warn(f"evaluation.tasks={asked.tasks}, but {config.env.name} holds out {len(tasks)} tasks to report on")
    sampler, watched = client.create_sampling_client(), build_watched(config)

    def evaluated(chosen: list[Task], progress: Callable[[int], None] = lambda done: None) -> Evaluation:
        return evaluate(
            source,
            chosen,
            sampler,
            reward,
            evaluation_params(config.rollout, asked),
            samples=asked.samples,
            k=asked.k or asked.samples,
            seed=seed,
            error_budget=config.training.error_budget,
            watched=watched,
            progress=progress,
        )

    def told(result: Evaluation, level: str | None = None) -> dict[str, Any]:
        return {name: asdict(value) for name, value in result.metrics(level).items()}

    console.phase("evaluation", len(tasks), unit="tasks")
    result = evaluated(tasks, lambda done: console.step({}, done))
    others = {name: (len(chosen), evaluated(chosen)) for name, chosen in beside(source, asked).items()}
    return {
        "checkpoint": str(place),
        **told(result),
        "by_level": {level: told(result, level) for level in result.levels},
        "beside": {name: {**told(e), "tasks": n, "unjudged": e.unjudged} for name, (n, e) in others.items()},
        "tasks": len(tasks),
        "unjudged": result.unjudged,
    }
