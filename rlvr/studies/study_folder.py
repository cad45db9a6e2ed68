"""The folder of a study: its specification, its lock, and where the files of a run are.

The files:

    <run.root>/<study>/study.json     the seeds, and each variant with its config; another study is refused
    <run.root>/<study>/<run>/         one ordinary run folder for each variant and seed
    <run.root>/<study>/logs/<run>.log what `rlvr train` printed, attempt after attempt
    <run.root>/<study>/summary.json   the results, small enough to commit; table.md and study.png show them
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rlvr.config import difference
from rlvr.config.build_config import add_defaults
from rlvr.core.files import lock_file, read_json, remove_leftovers, write_atomic
from rlvr.runs.run_folder import CONNECTION_KEYS
from rlvr.studies import SPECIFICATION
from rlvr.studies.study_plan import StudyPlan
from rlvr.training.journal import RunLockedError

LOGS = "logs"
_REMEDY = "restore it, or choose another --name"


def log_file(folder: Path, run: str) -> Path:
    """What `rlvr train` printed of a run, by the run's name."""
    return folder / LOGS / f"{run}.log"


@contextmanager
def open_study(plan: StudyPlan) -> Iterator[None]:
    """Lock the study's folder and store its specification; ValueError if it holds another study or other files.

    The same study continues, and may have got more seeds and variants.
    """
    folder = plan.folder
    if blocking := next((place for place in (folder, folder.parent) if place.is_file()), None):
        remedy = "--name" if blocking == folder else "run.root"
        raise ValueError(f"{blocking} is a file, and a study needs a folder there; choose another {remedy}")
    if not (folder / SPECIFICATION).exists() and folder.is_dir() and not _is_begun(folder):
        raise ValueError(f"{folder} exists and holds other files than a study; choose another --name")
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}); choose another run.root or --name") from error
    lock = lock_file(folder / ".lock")
    if lock is None:
        raise RunLockedError(f"a study is running in {folder}; wait for it, or choose another --name")
    with lock:
        remove_leftovers(folder)
        _check_stored(plan)
        content = {"seeds": plan.seeds, "variants": [asdict(variant) for variant in plan.variants]}
        write_atomic(folder / SPECIFICATION, json.dumps(content, indent=1) + "\n")
        yield


def _is_begun(folder: Path) -> bool:
    """Whether a folder without a specification holds only what a study that was killed at its beginning left."""
    return all(entry.name == LOGS or entry.name.startswith(".") for entry in folder.iterdir())


def _check_stored(plan: StudyPlan) -> None:
    """Raise ValueError if the stored study has variants or seeds that the plan lacks, or other configs."""
    path = plan.folder / SPECIFICATION
    if not path.exists():
        return
    stored = read_json(path, "the specification of a study", _REMEDY)
    try:
        seeds = [int(seed) for seed in stored["seeds"]]
        variants = {
            held["name"]: (dict(held["environment"]), dict(held["config"]), str(held["folder"]))
            for held in stored["variants"]
        }
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged: not the specification of a study; {_REMEDY}") from None
    for variant in plan.variants:
        if variant.name not in variants:
            continue
        environment, config, _ = variants[variant.name]
        changed = difference(variant.config, add_defaults(config), ignore=["tracking", "callbacks", *CONNECTION_KEYS])
        changed += [f"--environment {key}" for key in difference(variant.environment, environment)]
        if changed:
            raise ValueError(
                f"{plan.folder} holds a study of another config; it differs in {', '.join(changed[:6])}"
                f"{f' and {len(changed) - 6} more' if len(changed) > 6 else ''}. Give the same, or choose another "
                "--name"
            )
    folders = {variant.name: variant.folder for variant in plan.variants}
    if left_out := [name for name in variants if name not in folders]:
        raise ValueError(
            f"{plan.folder} holds a study that has other variants too ({'; '.join(left_out[:6])}"
            f"{'; ...' if len(left_out) > 6 else ''}): variants are added, never left out. Give them too, or choose "
            "another --name"
        )
    if list(variants) != [name for name in folders if name in variants] or any(
        folders[name] != folder for name, (_, _, folder) in variants.items()
    ):
        raise ValueError(
            f"{plan.folder} holds a study with the variants in this order: {'; '.join(variants)}. Give them in that "
            "order, and new ones behind them, or choose another --name"
        )
    if missing := sorted(set(seeds) - set(plan.seeds)):
        raise ValueError(
            f"{plan.folder} holds a study that has more seeds ({', '.join(map(str, missing[:6]))}"
            f"{', ...' if len(missing) > 6 else ''}): seeds are added, never left out. Give them too, or choose "
            "another --name"
        )
