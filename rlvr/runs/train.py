"""Trains what a config describes: what `rlvr train` and `rlvr.train` do, with what they say meanwhile.

folder, summary = train_config(loaded, settings, RunConsole())      # again with an equal config: it resumes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.clients.registry import close_client
from rlvr.config import LoadedConfig
from rlvr.config.schema import RunConfig
from rlvr.config.trl_defaults import list_differences
from rlvr.core.ray_cluster import LOCAL
from rlvr.core.weights_place import CHECKPOINTS
from rlvr.runs.assembly import Assembly, assemble
from rlvr.runs.build_job import build_job
from rlvr.runs.run_folder import open_run
from rlvr.runs.run_plan import plan
from rlvr.runs.run_tasks import check_reward, resolve_epochs
from rlvr.runs.user_messages import announce_if_slow, mask_secrets, print_message
from rlvr.runs.weights import check_model_folder
from rlvr.tracking import RunConsole
from rlvr.tracking.picture_files import EXTRA, can_draw
from rlvr.tracking.run_report import stored_summary
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.journal import Journal, newest_checkpoint, weights_path
from rlvr.training.loop import TrainingInterruptedError, TrainingLoop
from rlvr.training.run_diagnosis import closing_remark

_MOST = 4_000  # characters of the reason why a run stopped


class RunInterruptedError(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a run; its last step is saved, and its console has said so."""


def train_config(loaded: LoadedConfig, settings: RunConfig, console: RunConsole) -> tuple[Path, dict[str, Any]]:
    """Train, or go on with an unfinished run of this config: the run's folder and its summary.

    RunInterruptedError once the step is saved that was running when it was stopped, TrainingStoppedError where the run
    stopped itself, ValueError for what cannot be trained.
    """
    with announce_if_slow(f"reading the tasks of {settings.env.name}"):
        assembly = assemble(settings)
    loaded, settings = resolve_epochs(loaded, settings, assembly.source)
    assembly = replace(assembly, config=settings)
    check_model_folder(settings, print_message)
    with announce_if_slow("starting the verifiers"):
        assembly.start_rewards()
    if settings.training.mode == "rlvr":
        check_reward(assembly.reward, assembly.source, settings.seed)
    lines = {**masked_plan(assembly), **list_differences(loaded, settings)}  # what is refused here leaves no folder
    folder, finished = open_run(loaded, settings, assembly.source)
    with console:
        if finished:
            console.note(f"this run is finished ({folder}); run.resume=false starts it anew")
            summary = stored_summary(folder)
            console.show_table(summary)
            return folder, summary
        console.plan({"run": str(folder), **lines})
        summary = _train(assembly, folder, console)
        console.show_table(summary)
        _say_where(folder, summary, console)
    return folder, summary


def masked_plan(assembly: Assembly) -> dict[str, str]:
    return {name: mask_secrets(text) for name, text in plan(assembly).items()}


def _train(assembly: Assembly, folder: Path, console: RunConsole) -> dict[str, Any]:
    def warn(text: str) -> None:
        console.warn(mask_secrets(text))

    with Journal(folder) as journal:
        try:
            with announce_if_slow(_describe_loading(assembly.config)):
                job = build_job(assembly, folder, console.note, warn)
        except Exception:
            journal.delete_unstarted()
            raise
        journal.attempt(job.describe_environment(), warn)
        try:
            return TrainingLoop(job, journal, console).run()
        except (TrainingInterruptedError, KeyboardInterrupt):
            console.close()  # shows the last step first
            console.note(f"stopped; the same command goes on from here ({folder})")
            raise RunInterruptedError(f"the run is stopped; the same call goes on from here ({folder})") from None
        except TrainingStoppedError as error:
            journal.write("stopped", reason=str(error)[:_MOST])
            raise
        finally:
            close_client(job.parts.client)


def _describe_loading(settings: RunConfig) -> str:
    place = settings.client_options.cluster
    if place in (None, LOCAL):
        return "loading the libraries and the model"
    return "loading the model and starting ranks on Ray, which gives them niceness 15 without RAY_worker_niceness=0"


def _say_where(folder: Path, summary: Mapping[str, Any], console: RunConsole) -> None:
    """Say which checkpoint was the best, what the run shows, and where everything is."""
    if (best := summary.get("best")) and best["step"] < summary["steps"] and summary["report"] == "last":
        rate, place = best["pass_rate"]["value"], folder / CHECKPOINTS / best["checkpoint"]
        console.note(
            f"best interim evaluation: {100 * rate:.1f}% of {best['tasks']} tasks after step {best['step']}, "
            f"weights in {place}"
        )
    newest = newest_checkpoint(folder)
    weights = str(folder) if newest is None else weights_path(newest)
    if remark := closing_remark(folder, dict(summary)):
        console.note(remark)
    written = "curve and metrics" if can_draw() else f"metrics (no curve: {EXTRA})"
    at_server = f"{written} are in {folder}, the weights at the server: {weights}"
    console.note(at_server if "://" in weights else f"{written.replace(' and', ',')} and weights are in {folder}")
