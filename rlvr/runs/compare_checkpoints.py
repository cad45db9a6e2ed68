"""What changed between two checkpoints of a run: both complete the same prompts with the same random draws.

    compare_checkpoints(Path("runs/arithmetic"), "start", "last", {}, console, tasks=20)

Nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.config.schema import RunConfig
from rlvr.core.files import find_damage
from rlvr.core.protocols import TaskSource, TrainingClient
from rlvr.core.types import Task
from rlvr.core.weights_place import CHECKPOINTS, find_run
from rlvr.runs.assembly import Assembly, assemble, has_interim
from rlvr.runs.evaluate_weights import check_overrides, list_interim_ids, show_prompts
from rlvr.runs.run_folder import prompt_options
from rlvr.runs.weights import read_run
from rlvr.tracking import RunConsole
from rlvr.tracking.completion_comparison import CompletionComparison, compare_completions
from rlvr.training.best_checkpoint import BEST, resolve_best
from rlvr.training.evaluate import evaluation_params, heldout_split
from rlvr.training.journal import list_checkpoints, newest_checkpoint, weights_path
from rlvr.training.judged_tasks import JudgedTask, sample_and_judge

START, LAST = "start", "last"
TASKS = 20  # of which a table can be read
_ALL = 1_000_000
# Options of `env.name=dataset` that say where its rows are, and not how they are read.
_PLACES = (
    "path", "name", "config", "split", "sources", "heldout_path", "heldout_split", "heldout_fraction", "streaming",
    "max_rows",
)  # fmt: skip


def compare_checkpoints(
    run: Path,
    first: str | Path,
    second: str | Path,
    overrides: Mapping[str, Any],
    console: RunConsole,
    *,
    rows: Mapping[str, Any] | None = None,
    tasks: int | None = None,
) -> CompletionComparison:
    """Compare two checkpoints of `run` on its held-out tasks, or on the `rows` of an environment (`env.name`, ...).

    A checkpoint is `start` (the policy before any training), `last`, `best`, the name of a folder in `checkpoints/`, or
    its path. The first `tasks` tasks are taken, by default 20 held-out ones or all rows. `overrides` may change what an
    evaluation's may. ValueError for a checkpoint that is not there or damaged.
    """
    if tasks is not None and tasks < 1:
        raise ValueError(f"compare: tasks={tasks}, expected at least 1")
    check_overrides(overrides)
    places = [_find_checkpoint(run, given) for given in (first, second)]
    names = [place.name if place else START for place in places]
    if names[0] == names[1]:
        raise ValueError(f"compare: both checkpoints are {names[0]}; give two, of {', '.join(_list_names(run))}")
    begun, asked = read_run(run), read_run(run, overrides)
    config = replace(asked, seed=begun.seed)  # the run's seed made its first weights; the given one is for the draws
    if other := config.client_options.evaluates_as:
        config = replace(config, client=replace(config.client, name=other))
    assembly = assemble(config, _open_rows(config.env.name, config.env.kwargs, rows) if rows else None)
    assembly.start_rewards()
    client = assembly.build_client(run / CHECKPOINTS, console.note, console.warn, fresh=None in places)
    source = show_prompts(
        config, assembly.source, client.create_sampling_client(), prompt_options(config, run), console
    )
    chosen = _choose_tasks(config, source, tasks, None if rows else list_interim_ids(source, begun))
    console.phase("evaluation", 2 * len(chosen), unit="tasks")
    judged: dict[str, list[JudgedTask]] = {}
    for place, name in sorted(zip(places, names, strict=True), key=lambda pair: pair[0] is not None):
        judged[name] = _judge(assembly, source, chosen, client, place, asked.seed)
        console.step({}, len(chosen) * len(judged))
    pairs = zip(*(judged[name] for name in names), strict=True)
    return CompletionComparison(
        f"{run.name}: {names[0]} and {names[1]}",
        names[0],
        names[1],
        [
            compare_completions(*both, assembly.reward.name, sample)
            for one, other in pairs
            for sample, both in enumerate(zip(one.completions, other.completions, strict=True))
        ],
    )


def _judge(
    assembly: Assembly, source: TaskSource, tasks: list[Task], client: TrainingClient, place: Path | None, seed: int
) -> list[JudgedTask]:
    """Sample and judge with the weights of a checkpoint, or with those that the client began with."""
    if place is not None:
        client.load_state(weights_path(place)).result()
    config = assembly.config
    params = evaluation_params(config.rollout, config.evaluation)
    sampler = client.create_sampling_client()
    return sample_and_judge(
        source, tasks, sampler, assembly.reward, params, samples=config.evaluation.samples, seed=seed
    )


def _choose_tasks(config: RunConfig, source: TaskSource, tasks: int | None, left_out: set[str] | None) -> list[Task]:
    """The first tasks of the held-out ones that the run reports on, or of rows (`left_out` None)."""
    if left_out is None:
        found = sorted(source.heldout(_ALL), key=_find_row)[:tasks]
    else:
        reported, _ = heldout_split(source, config.evaluation, has_interim=has_interim(config))
        found = [task for task in reported if task.id not in left_out][: tasks or TASKS]
    if not found:
        raise ValueError("compare: there are no held-out tasks to complete; give prompts=[...]")
    return found


def _find_row(task: Task) -> int:
    """The number of the row that a task was read from; 0 where its id has none."""
    number = task.id.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _open_rows(name: str, options: Mapping[str, Any], rows: Mapping[str, Any]) -> TaskSource:
    """The environment of rows, all held out, with the columns that the run reads."""
    from rlvr.envs import resolve_environment

    given = {key.removeprefix("env.kwargs."): value for key, value in rows.items() if key.startswith("env.kwargs.")}
    if rows["env.name"] != "dataset":
        return resolve_environment(rows["env.name"], **given)
    columns = {key: value for key, value in options.items() if key not in _PLACES} if name == "dataset" else {}
    return resolve_environment("dataset", **{**columns, **given, "heldout_fraction": 1})


def _list_names(run: Path) -> list[str]:
    """The words and names that a checkpoint of a run may be asked for by."""
    best = [BEST] if (run / CHECKPOINTS / f"{BEST}.json").exists() else []
    return [START, LAST, *best, *(place.name for place in list_checkpoints(run) if place.is_dir())]


def _find_checkpoint(run: Path, given: str | Path) -> Path | None:
    """The folder of a checkpoint; None for the policy before training."""
    if str(given) == START:
        return None
    place = run / CHECKPOINTS / given if isinstance(given, str) and Path(given).name == given else Path(given)
    place = resolve_best(place.expanduser())
    if str(given) == LAST:
        place = newest_checkpoint(run) or place
    owner = find_run(place)
    if not place.is_dir() or owner is None or owner.resolve() != run.resolve():
        raise ValueError(
            f"compare: {str(given)!r} is no checkpoint of {run}; expected {', '.join(_list_names(run))}, or the path "
            "of one of them"
        )
    if damage := find_damage(place):
        raise ValueError(f"compare: the checkpoint {place} is damaged: {damage}; give another one")
    return place
