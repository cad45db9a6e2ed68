"""The folder of a run: found or made from its settings, and refused to a run of other settings.

folder, finished = open_run(loaded, config, source)
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from rlvr.clients.registry import CLIENTS
from rlvr.clients.samplers import SAMPLERS
from rlvr.config import LoadedConfig, difference, dump, load, read
from rlvr.config.build_config import add_defaults, build_config, resolved_values
from rlvr.config.choices import FLAT, SHORTHANDS, client_key, full_key, get_at
from rlvr.config.schema import RunConfig
from rlvr.core.files import sha256, write_atomic
from rlvr.core.protocols import TaskSource
from rlvr.core.registry import GIVEN, load_path
from rlvr.core.weights_place import SETTINGS
from rlvr.envs.prompt import PromptOptions
from rlvr.runs.run_tasks import hash_tasks
from rlvr.tracking.metrics_log import MetricsLog
from rlvr.tracking.run_report import stored_summary
from rlvr.training import journal
from rlvr.training.loop import PHASES

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
    name with another config is a ValueError, or one whose `source` had other tasks; `run.resume=false` renames it. More
    steps are no other config: the run goes on.
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
    sources = hash_custom_functions(config)
    if source is not None and (tasks := hash_tasks(source)):
        sources[f"the rows of env.name={config.env.name}"] = [tasks]
    # Trackers and callbacks change nothing that is computed: they may be turned on for the rest of a run.
    ignore = [
        "run.resume",
        "tracking",
        "callbacks",
        "imports",
        *CONNECTION_KEYS,
        *(key for key in loaded.timed if key == "run.name"),
    ]
    ignore += [client_key(config.client.name, option) for option in config.client_options.list_uncompared()]

    def changes(folder: Path) -> list[str]:
        flat = FLAT | {key: full_key(key) for key in SHORTHANDS}
        older = {old: environment[key] for old, key in flat.items() if key in environment}
        hidden = journal.changed_environment(folder, environment | older | sources)
        begun = read(folder / SETTINGS)
        is_older = "prompt" not in begun and config.prompt in (PromptOptions(), READ_AS_TEXT)  # `prompt_options`
        changed = difference(wanted, add_defaults(begun), ignore=[*ignore, "prompt"] if is_older else ignore)
        return changed + [key if key in sources else f"{key} (its value from the environment)" for key in hidden]

    name = config.run.name or loaded.name or "run"
    folder = journal.run_folder(config.run.root, name)
    if config.run.resume and "run.name" in loaded.timed:
        for stored in sorted(folder.parent.glob(f"*/{SETTINGS}"), reverse=True):
            if not (stored.parent / "summary.json").exists() and not changes(stored.parent):
                return stored.parent, False
    stored = folder / SETTINGS
    if stored.exists() and not config.run.resume:
        journal.move_aside(folder)
    elif stored.exists() and journal.has_no_progress(folder):
        # A run that failed before its first step may be corrected under the same name. Its config is replaced in one
        # move: a kill in between must not leave a folder without a run.
        with journal.lock_folder(folder):
            journal.store_environment(folder, environment | sources)
            write_atomic(stored, dump(wanted))
    elif stored.exists() and (changed := changes(folder)) == [_steps_key(config)] and _has_more_steps(config, folder):
        _extend(folder, config, dump(wanted))
    elif stored.exists() and changed:
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


def _steps_key(config: RunConfig) -> str:
    """The key of the number of steps of the phase that a run is for."""
    return "training.steps" if config.training.mode == "rlvr" else "sft.steps"


def _has_more_steps(config: RunConfig, folder: Path) -> bool:
    key = _steps_key(config)
    return get_at(config, key) > get_at(build_config(load(None, str(folder / SETTINGS))), key)


def _extend(folder: Path, config: RunConfig, settings: str) -> None:
    """Give a run more steps: the same run as if it had been begun with them. ValueError where it would be another.

    A kill in between leaves a run that has ended, or one that its old settings end again.
    """
    phase, options = PHASES[config.training.mode].index("rl" if config.training.mode == "rlvr" else "sft"), config.sft
    if config.training.mode == "rlvr":
        options = config.training
        if config.training.order.samples_ahead:
            raise ValueError(
                f"{folder}: training.steps={options.steps} is more than this run had, and schedule="
                f"{config.training.order.name} has sampled nothing for them; choose another run.name"
            )
    if (summary := folder / "summary.json").exists() and (why := stored_summary(folder).get("stopped")):
        raise ValueError(
            f"{folder}: {_steps_key(config)}={options.steps} is more than this run had, but it ended before its last "
            f"step ({why}); choose another run.name"
        )
    optimizers = [options.optimizer] + ([config.training.critic.optimizer] if phase == 2 else [])
    if any(one.decay != "constant" or 0 < one.warmup_steps < 1 for one in optimizers):
        raise ValueError(
            f"{folder}: {_steps_key(config)}={options.steps} is more than this run had, and its learning rate depends "
            "on the number of steps (decay, or a share as warmup_steps); choose another run.name"
        )
    with journal.Journal(folder) as opened:
        done = sum(row["phase"] == PHASES[config.training.mode][phase] for row in _rows(folder))
        if [position for position in opened.resumable_positions[:1] if position.phase > phase]:
            name = f"{PHASES[config.training.mode][phase]}-{done:06d}"
            opened.reopen(journal.Position(phase, done), name)
        if summary.exists():
            summary.replace(folder / f"summary-{done}-steps.json")
        write_atomic(folder / SETTINGS, settings)


def _rows(folder: Path) -> list[dict[str, Any]]:
    return MetricsLog(folder / "metrics.jsonl").rows()


def prompt_options(config: RunConfig, folder: Path) -> PromptOptions:
    """The options of a run: `chat=off` for one that began before there was `prompt`, as its model read text."""
    return config.prompt if "prompt" in read(folder / SETTINGS) else READ_AS_TEXT


def hash_custom_functions(config: RunConfig) -> dict[str, list[str]]:
    """The SHA-256 of each file in which an advantage, a loss, a reduction or a decay of the user's is written.

    A resumed run must compute the same. A program's own are told apart by their names, but not what a loss of it is
    made of.
    """
    if config.training.mode != "rlvr":
        return {}
    algorithm, hashes = config.algorithm.resolve(), dict[str, list[str]]()
    paths = {"algorithm.loss": algorithm.loss.name, "algorithm.reduction": algorithm.reduction}
    paths["algorithm.advantage"] = config.algorithm.advantage.name or ""
    optimizers = {
        "training.optimizer": config.training.optimizer,
        "training.critic.optimizer": config.training.critic.optimizer,
        "sft.optimizer": config.sft.optimizer,
    }
    paths |= {f"{key}.decay": getattr(one.variant, "decay", "") for key, one in optimizers.items()}
    for key, path in paths.items():
        if ":" not in path or (key != "algorithm.loss" and path.startswith(f"{GIVEN}:")):
            continue
        function = inspect.unwrap(load_path(key, path))
        module = getattr(sys.modules.get(path.partition(":")[0]), "__file__", None)
        files = {module, getattr(getattr(function, "__code__", None), "co_filename", None)}
        present = sorted(file for file in files if file and Path(file).is_file())
        names = ", ".join(Path(file).name for file in present)
        hashes[f"the source of {key} ({names})"] = [sha256(Path(file)) for file in present]
    return hashes
