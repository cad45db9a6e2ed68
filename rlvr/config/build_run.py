"""Builds a run from its config: model, client, environment, reward, algorithm.

`plan` describes a run without building it; `open_run` finds or makes the run's folder; `build` makes the job that
`rlvr.training.loop` runs. torch is imported inside, when a model is really needed: `client=mock` runs without it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from rlvr.algorithms.capabilities import check_supported
from rlvr.algorithms.losses.custom import FunctionLoss
from rlvr.algorithms.optimizers import AdamW
from rlvr.algorithms.terms.importance import Importance
from rlvr.clients.custom_loss import try_custom_loss
from rlvr.clients.registry import CLIENTS, resolve_client
from rlvr.clients.samplers import SAMPLERS
from rlvr.config import LoadedConfig, difference, dump, read
from rlvr.config.build_client import build_client, check_cluster_use, client_request, core_shares
from rlvr.config.build_config import add_defaults, resolved_values
from rlvr.config.build_teacher import build_teacher, check_teacher, has_teacher
from rlvr.config.choices import FLAT, SHORTHANDS, client_key
from rlvr.config.plan_memory import describe_memory
from rlvr.config.run_tasks import check_completions, check_demonstrations, count_tasks, fit_prompts, hash_tasks
from rlvr.config.schema import RunConfig
from rlvr.core.cpu_budget import set_default_workers
from rlvr.core.files import sha256, write_atomic
from rlvr.core.protocols import TaskSource
from rlvr.core.registry import load_path
from rlvr.envs import resolve_environment
from rlvr.envs.chat_template import has_template
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import PromptedSource, apply_prompt_options
from rlvr.reward import Reward, resolve_reward
from rlvr.tracking.trackers import Trackers
from rlvr.training import journal
from rlvr.training.compatibility import check_compatibility, check_temperatures
from rlvr.training.curriculum import Curriculum
from rlvr.training.evaluate import heldout_split
from rlvr.training.hints import make_hint_writer
from rlvr.training.monitor import Monitor
from rlvr.training.parts import TrainerParts
from rlvr.training.trainer import Trainer
from rlvr.training.training_job import TrainingJob

# Servers and processes, their key and patience: they do not change what a run computes.
CONNECTION_KEYS = (
    "teacher.url", "teacher.timeout_s", "teacher.retries", "teacher.concurrency",
    *(f"client.{option}" for client in CLIENTS.classes() for option in client.uncompared),
    *(f"sampler.{option}" for sampler in SAMPLERS.classes() for option in sampler.uncompared),
)  # fmt: skip
READ_AS_TEXT = PromptOptions(chat="off")


def open_run(loaded: LoadedConfig, config: RunConfig, source: TaskSource | None = None) -> tuple[Path, bool]:
    """The folder of this run, and whether the run is finished.

    An unfinished run with the same config is resumed (if the name contains the time, it may differ). A folder of that
    name with another config is a ValueError, or one whose `source` had other tasks; `run.resume=false` renames it.
    """
    if timed := [key for key in loaded.timed if key not in ("run.name", "run.root")]:
        raise ValueError(
            f"{', '.join(timed)}: ${{now:...}} may stand in run.name and run.root only. Elsewhere a resumed run would "
            "go on with another value than it began with; give a fixed one"
        )
    wanted = resolved_values(config, loaded)
    own = [client_key(config.client.name, option) for option in config.client_options.uncompared]
    where = ("run.resume", "run.name", "run.root", *CONNECTION_KEYS, *own)
    environment = {
        key: value for key, value in journal.environment_values(loaded.values, loaded.raw) if key not in where
    }
    sources = _hash_custom_loss(config)
    if source is not None and (tasks := hash_tasks(source)):
        sources[f"the rows of env.name={config.env.name}"] = [tasks]
    # Trackers change nothing that is computed: they may be turned on for the rest of a run.
    ignore = ["run.resume", "tracking", *CONNECTION_KEYS, *(key for key in loaded.timed if key == "run.name")]
    ignore += [client_key(config.client.name, option) for option in config.client_options.list_uncompared()]

    def changes(folder: Path) -> list[str]:
        flat = FLAT | {key: f"{key}.name" for key in SHORTHANDS}
        older = {old: environment[key] for old, key in flat.items() if key in environment}
        hidden = journal.changed_environment(folder, environment | older | sources)
        begun = read(folder / "resolved.yaml")
        is_older = "prompt" not in begun and config.prompt in (PromptOptions(), READ_AS_TEXT)  # `prompt_options`
        changed = difference(wanted, add_defaults(begun), ignore=[*ignore, "prompt"] if is_older else ignore)
        return changed + [key if key in sources else f"{key} (its value from the environment)" for key in hidden]

    name = config.run.name or loaded.name or "run"
    folder = journal.run_folder(config.run.root, name)
    if config.run.resume and "run.name" in loaded.timed:
        for stored in sorted(folder.parent.glob("*/resolved.yaml"), reverse=True):
            if not (stored.parent / "summary.json").exists() and not changes(stored.parent):
                return stored.parent, False
    stored = folder / "resolved.yaml"
    if stored.exists() and not config.run.resume:
        journal.move_aside(folder)
    elif stored.exists() and journal.has_no_progress(folder):
        # A run that failed before its first step may be corrected under the same name. Its config is replaced in one
        # move: a kill in between must not leave a folder without a run.
        with journal.lock_folder(folder):
            journal.store_environment(folder, environment | sources)
            write_atomic(stored, dump(wanted))
    elif stored.exists() and (changed := changes(folder)):
        prefix = client_key(config.client.name, "")
        if why := config.client_options.explain_change([key.removeprefix(prefix) for key in changed], folder):
            raise ValueError(why)
        raise ValueError(
            f"run folder {folder} holds a run of another config; it differs in {', '.join(changed[:6])}"
            f"{f' and {len(changed) - 6} more' if len(changed) > 6 else ''}. Choose another name "
            f"(run.name={folder.name}-2, say), ask for the same config, or give run.resume=false to start anew (the "
            "old folder is kept, renamed)"
        )
    elif journal.holds_other_files(folder):
        raise ValueError(f"run folder {folder} exists and holds other files than a run; choose another run.name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"run.root={config.run.root}: {folder} cannot be made ({error.strerror}); give another run.root"
        ) from error
    if not stored.exists():
        journal.store_environment(folder, environment | sources)
        write_atomic(stored, dump(wanted))
    return folder, (folder / "summary.json").exists()


def _hash_custom_loss(config: RunConfig) -> dict[str, list[str]]:
    """The SHA-256 of each file in which a loss of the user's is written: a resumed run must compute the same loss."""
    loss = config.algorithm.resolve().loss
    if config.training.mode != "rlvr" or not isinstance(loss, FunctionLoss):
        return {}
    path = loss.name
    function = inspect.unwrap(load_path("algorithm.loss", path))
    module = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    files = {module, getattr(getattr(function, "__code__", None), "co_filename", None)}
    present = sorted(file for file in files if file and Path(file).is_file())
    names = ", ".join(Path(file).name for file in present)
    return {f"the source of algorithm.loss ({names})": [sha256(Path(file)) for file in present]}


def _check_optimizers(config: RunConfig) -> None:
    """ValueError if a phase of the run needs what the optimizer of its client does not have."""
    used = {"sft": config.sft} if config.sft.steps else {}
    if config.training.mode == "rlvr":
        used |= {"training": config.training}
        used |= {"training.critic": config.training.critic} if config.algorithm.resolve().advantage.takes_critic else {}
    client = resolve_client(config.client.name).capabilities
    optimizers = {f"{name}.optimizer.name": phase.optimizer.chosen for name, phase in used.items()}
    clipped = [f"{name}.optimizer.grad_clip=0" for name, phase in used.items() if phase.optimizer.grad_clip]
    if clipped and not client.clips_gradients:
        raise ValueError(
            f"client={config.client.name} does not bound the norm of a gradient; give {' and '.join(clipped)}"
        )
    if (minibatches := config.training.order.minibatches) > 1 and not client.accumulates:
        raise ValueError(
            f"training.num_minibatches={minibatches}: client={config.client.name} takes one "
            "forward-backward call for each optimizer step; leave it out"
        )
    of_client = {key: one for key, one in optimizers.items() if not client.features.issuperset(one.needs)}
    of_weights = {key: one for key, one in optimizers.items() if config.model.lora and one.needs_matrices}
    for wrong in filter(None, (of_client, of_weights)):
        (key, first), *_ = wrong.items()
        instead = " and ".join(f"{other}={AdamW.name}" for other in wrong)
        if wrong is of_client:
            raise ValueError(
                f"{key}={first.name} is not supported by client={config.client.name}, which has AdamW; use {instead}"
            )
        raise ValueError(
            f"{key}={first.name} with model.lora: {first.needs_matrices}; use {instead}, or train all weights (leave "
            "model.lora out)"
        )


def has_interim(config: RunConfig) -> bool:
    """Whether the run makes interim evaluations."""
    return bool(config.sft.until or config.evaluation.every)


def plan(config: RunConfig, source: TaskSource) -> dict[str, str]:
    """Describe the run in words and numbers, as printed before it starts; ValueError if it could not train."""
    if not source.levels:
        raise ValueError(f"env.name={config.env.name} is a test set without training tasks: use it with rlvr evaluate")
    t, e = config.training, config.evaluation
    algorithm = config.algorithm.resolve()
    _check_optimizers(config)
    check_demonstrations(config, source)
    if t.mode == "rlvr":
        check_compatibility(algorithm, config.rollout, t)
        check_supported(algorithm, resolve_client(config.client.name).capabilities)
        check_temperatures(t, resolve_client(config.client.name).capabilities)
        check_teacher(config)
        if isinstance(algorithm.loss, FunctionLoss):
            try_custom_loss(algorithm)
    check_completions(config, source)
    completions = t.prompts_per_step * t.group_size
    updates = t.ppo_epochs * t.num_substeps
    tokens = t.steps * completions * source.max_turns * (config.rollout.max_tokens or 0)
    until = f", or until {100 * t.until:g}% of held-out completions pass" if t.until and e.every else ""
    if t.patience and e.every:
        until += f", or until {t.patience} interim evaluations in a row are no new best"
    waves = f", up to {1 + t.dynamic_sampling} waves of prompts" if t.dynamic_sampling else ""
    lines = {
        "model": resolve_client(config.client.name).describe(client_request(config, source)),
        **({"memory": memory} if (memory := describe_memory(config)) else {}),
        "environment": config.env.name + (f", levels {', '.join(source.levels)}" if any(source.levels) else ""),
        **({"data": data} if (data := source.describe_data()) else {}),
        "reward": build_reward(config, source).formula,
    }
    if config.sft.steps:
        goal = f", or until {100 * config.sft.until:g}% of held-out completions pass" if config.sft.until else ""
        if config.sft.until and config.sft.until_each:
            goal += f" (of each kind of task {100 * config.sft.until_each:g}%)"
        lines["fine-tuning"] = (
            f"{config.sft.steps} steps x {config.sft.batch_size} demonstrations{goal}; {config.sft.optimizer.chosen}"
        )
    if servers := config.sampler_options.servers:
        importance = algorithm.term(Importance)
        correction = f"importance weights up to {importance.cap:g}" if importance else "no importance correction"
        lines["sampler"] = (
            f"{config.sampler_options.title} at {', '.join(servers)}; sampler against trainer: {correction}"
        )
    if (share := core_shares(config, source)).concurrent:
        lines["cores"] = str(share)
    if t.mode == "rlvr":
        lines |= {
            "algorithm": f"{algorithm.name}: {algorithm.advantage.name}, loss {algorithm.loss.name}"
            f"{algorithm.loss.remark(algorithm)}, {algorithm.reduction}"
            + "".join(f", {text}" for term in algorithm.terms if (text := term.describe())),
            **({"teacher": str(config.teacher)} if algorithm.has_teacher else {}),
            "training": f"{t.steps} steps x {t.prompts_per_step} prompts x {t.group_size} completions = "
            f"{t.steps * completions:,} completions, at most {tokens:,} tokens"
            f"{f' in {source.max_turns} turns' if source.max_turns > 1 else ''}{waves}{until}",
            "updates": f"{updates} a step, {t.steps * updates} in all; {t.optimizer.chosen}",
        }
        if algorithm.advantage.takes_critic:
            kind = (
                "a second adapter" if config.model.lora or config.client_options.trains_adapters else "a second model"
            )
            alone = f", alone for {t.critic.warmup_steps} steps" if t.critic.warmup_steps else ""
            lines["critic"] = f"{kind}{alone}; {t.critic.optimizer.chosen}"
        if tasks := count_tasks(source):
            lines["epochs"] = f"{t.steps * t.prompts_per_step / tasks:.3g} over {tasks:,} training tasks"
    heldout, interim = heldout_split(source, e, has_interim=has_interim(config))
    # Tasks are set aside even where `sft.steps=0` leaves no interim evaluation: runs with and without it compare.
    has_others = ((config.sft.steps and config.sft.until) or e.every) and interim and interim != heldout
    others = f"; {len(interim)} others for interim evaluations" if has_others else ""
    return lines | {"evaluation": f"{len(heldout)} held-out tasks x {e.samples} completions, before and after{others}"}


def build_source(config: RunConfig) -> TaskSource:
    """The environment; ValueError too where the config names a reward that does not exist, or the client cannot be."""
    source = resolve_environment(config.env.name, **config.env.kwargs)
    resolve_client(config.client.name).check(client_request(config, source))
    build_reward(config, source)
    build_watched(config)
    config.algorithm.resolve()
    return source


def prompt_options(config: RunConfig, folder: Path) -> PromptOptions:
    """The options of a run: `chat=off` for one that began before there was `prompt`, as its model read text."""
    return config.prompt if "prompt" in read(folder / "resolved.yaml") else READ_AS_TEXT


def build_reward(config: RunConfig, source: TaskSource) -> Reward:
    reward = resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)
    weight = config.reward.environment_weight
    if weight is None and reward.name == source.reward:
        weight = source.environment_weight
    return reward.plus_environment(weight)


def build_watched(config: RunConfig) -> list[Reward]:
    """Build the verifiers that only watch."""
    names = config.reward.watch
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"reward.watch: {twice[0]!r} is named twice; leave one out")
    return [resolve_reward(name) for name in names]


def start_rewards(config: RunConfig, source: TaskSource) -> None:
    """Start what the verifiers depend on, such as a sandbox; ValueError if this machine does not support it."""
    check_cluster_use(config)
    set_default_workers(core_shares(config, source).workers)
    for reward in (build_reward(config, source), *build_watched(config)):
        reward.start()


def build(config: RunConfig, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> TrainingJob:
    """Build the whole job for `rlvr.training.loop.TrainingLoop`. Epochs have become steps before (`resolve_epochs`)."""
    assert config.training.epochs is None, "rlvr.config.epochs.resolve_epochs comes first"
    source = build_source(config)
    start_rewards(config, source)
    reward = build_reward(config, source)
    algorithm = config.algorithm.resolve()
    watched = build_watched(config)
    if reward.caution and not {w.name for w in watched} - {reward.name} and config.training.mode == "rlvr":
        warn(f"the reward {reward.name!r} can be hacked: {reward.caution}")
    trackers = build_trackers(config, folder, say, warn)
    client = build_client(config, source, folder / "checkpoints", say, warn)
    options = prompt_options(config, folder)
    source = apply_prompt_options(source, client.get_tokenizer(), options)
    if isinstance(source, PromptedSource):
        say(f"the model reads each prompt {source.writer}")
    elif options != config.prompt and has_template(client.get_tokenizer()):
        say("this run began before there was prompt.chat: it goes on without the tokenizer's chat template")
    elif config.model.name and options.chat == "auto" and not has_template(client.get_tokenizer()):
        say(
            "the tokenizer has no chat template: the model reads each prompt as it stands and continues it, so prompts "
            "should end where an answer begins (`Answer:`)"
        )
    source = fit_prompts(config, source, client.get_tokenizer(), say)
    for text in source.advice():
        warn(text)
    if text := check_completions(config, source):
        warn(text)
    hints = None
    if config.curriculum.hint_step:
        hints = make_hint_writer(source, client.get_tokenizer(), (config.rollout.max_tokens or 0) - 1)
    curriculum = Curriculum(source, config.curriculum, config.seed, hints)
    for text in curriculum.advice() if config.training.mode == "rlvr" else ():
        warn(text)
    teacher = build_teacher(config, source, client.get_tokenizer(), say) if has_teacher(config) else None
    parts = TrainerParts(
        client, source, reward, algorithm, config.rollout, config.training, curriculum, config.seed, watched, teacher
    )
    return TrainingJob(
        trainer=Trainer(parts, Monitor(config.training, warn)),
        sft=config.sft,
        evaluation=config.evaluation,
        options=config.run,
        folder=folder,
        trackers=trackers,
        weights_sha256=client.weights_sha256,
    )


def build_trackers(
    config: RunConfig, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]
) -> Trackers:
    return Trackers(config.tracking, folder, folder.name, read(folder / "resolved.yaml"), warn, say=say)
