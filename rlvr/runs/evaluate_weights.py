"""`rlvr evaluate`: the held-out tasks of a run for its saved weights, or of any config for a model from elsewhere.

    evaluate_weights("runs/arithmetic", ["evaluation.samples=16"], console)
    evaluate_weights("./my-model", ["env.kwargs.path=./gsm8k"], console, config_name="gsm8k")
    evaluate_weights("./my-model", [], console, like=Path("runs/arithmetic"))

A model is a plain folder of transformers, an adapter of peft, or a hub name; it is sampled from as it is. With the
config and seed of a run it is asked the same tasks with the same random draws as that run's baseline. Nothing is
written here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.config import CLI, LoadedConfig, load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig
from rlvr.core.files import find_damage
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.core.weights_place import CHECKPOINTS, SETTINGS, WeightsPlace, find_near_folder, find_run
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.runs.assembly import Assembly, assemble, has_interim
from rlvr.runs.run_folder import prompt_options
from rlvr.runs.run_tasks import fit_prompts
from rlvr.runs.weights import check_to_sample, open_to_train, read_run, with_model
from rlvr.tracking import RunConsole
from rlvr.training import journal
from rlvr.training.best_checkpoint import resolve_best
from rlvr.training.evaluate import Evaluation, heldout_split
from rlvr.training.heldout import HeldoutEvaluator

# What may differ between a run and a later evaluation of its weights.
EVALUATION_KEYS = ("evaluation.", "engine.", "seed", "model.device", "model.dtype")


def evaluate_weights(
    place: str,
    overrides: Sequence[str] | Mapping[str, Any],
    console: RunConsole,
    *,
    config_name: str | None = None,
    config_path: str | None = None,
    like: Path | None = None,
) -> dict[str, Any]:
    """Metrics with intervals of what is at `place`, a path or a hub name. A config, or the run `like`, names the tasks
    of a model; a run has its own."""
    found = WeightsPlace.of(place)
    if found.run:
        if config_name or config_path or like:
            raise ValueError(
                f"{place} is a run, which is evaluated on the tasks of its own config; leave the "
                f"{'option --like' if like else 'config'} out"
            )
        return evaluate_saved(found.folder, overrides, console)
    if like and (config_name or config_path):
        raise ValueError(f"--like {like} and a config both name the tasks; give one of the two")
    check_to_sample(found, console.note)
    if like is None:
        return evaluate_model(found, load(config_name, config_path, overrides), console)
    if (run := find_run(like.expanduser())) is None:
        near = find_near_folder(like.expanduser())
        raise ValueError(f"--like {like}: no run is there (no {SETTINGS}){near}; give a run folder")
    check_overrides(overrides, (*EVALUATION_KEYS, "model.tokenizer", "model.name"))
    return evaluate_model(found, load(None, str(run / SETTINGS), overrides), console, like=run)


def evaluate_model(
    place: WeightsPlace, loaded: LoadedConfig, console: RunConsole, like: Path | None = None
) -> dict[str, Any]:
    """Evaluate a model or an adapter on the held-out tasks of a config, whose own model does not count.

    If it is the config of the run `like`, the tasks are those that an evaluation of the run reports on.
    """
    if not (loaded.values.get("env") or {}).get("name"):
        raise ValueError(
            f"{place.given} is a model, so the tasks must be named: give benchmarks (gsm8k math500, for example), "
            "--config-name=NAME, --config=FILE, env.name=NAME, or --like RUN for the tasks and the reward of a run"
        )
    config = build_config(with_model(loaded, place))
    assembly = assemble(config)
    assembly.start_rewards()
    sampler = assembly.build_sampler(place.adapter, console.warn)
    options = config.prompt if like is None else prompt_options(config, like)
    source = show_prompts(config, assembly.source, sampler, options, console)
    left_out = set() if like is None else list_interim_ids(source, read_run(like))
    result = _evaluate(assembly, source, sampler, config.seed, console, left_out)
    warn_of_tasks(result["tasks"], loaded, config, console)
    return {"checkpoint": place.given, **({} if like is None else {"like": str(like)}), **result}


def evaluate_saved(place: Path, overrides: Sequence[str] | Mapping[str, Any], console: RunConsole) -> dict[str, Any]:
    """Evaluate the weights of a run folder (its last whole checkpoint) or of one checkpoint folder inside a run, where
    `checkpoints/best` is the best one.

    `overrides` may change how that is done (EVALUATION_KEYS), e.g. `evaluation.samples=64`. Tasks by whose interim
    evaluations the run stopped or chose are never among those evaluated. Nothing is written.
    """
    check_overrides(overrides)
    given, place = place, resolve_best(place)
    folder = find_run(place) or place
    stored = folder / SETTINGS
    # The run's seed made the base model of an adapter; a given one is only for the random draws of this evaluation.
    begun = read_run(folder)
    if isinstance(overrides, Mapping):
        others: Sequence[str] | Mapping[str, Any] = {key: value for key, value in overrides.items() if key != "seed"}
    else:
        others = [text for text in overrides if text.lstrip("+")[:5] != "seed="]
    loaded = load(None, str(stored), others)
    config = build_config(loaded)
    if other := config.client_options.evaluates_as:
        config = replace(config, client=replace(config.client, name=other))
    seed = read_run(folder, overrides).seed
    if folder == place:
        checkpoint = journal.newest_checkpoint(folder, lambda text: console.warn(f"{text}; looking for an older one"))
        if checkpoint is None:
            raise ValueError(f"{folder} has no checkpoint yet; train it first, or give one of its checkpoints")
        place = checkpoint
    elif wrong := find_damage(place):
        raise ValueError(f"checkpoint {place} is damaged or missing: {wrong}; give another one")
    assembly = assemble(config)
    assembly.start_rewards()
    sampler = open_to_train(assembly, place, folder / CHECKPOINTS).create_sampling_client()
    source = show_prompts(config, assembly.source, sampler, prompt_options(config, folder), console)
    if begun.evaluation.interim_tasks is None and (place != given or place.name.startswith("best-")):
        console.warn(
            "the run chose its best checkpoint by the tasks that are evaluated here "
            "(evaluation.interim_tasks=null): the pass rate is overstated"
        )
    result = _evaluate(assembly, source, sampler, seed, console, list_interim_ids(source, begun))
    warn_of_tasks(result["tasks"], loaded, config, console)
    return {"checkpoint": str(place), **result}


def check_overrides(overrides: Sequence[str] | Mapping[str, Any], usable: Sequence[str] = EVALUATION_KEYS) -> None:
    """ValueError for a setting that would make the result another one than the run's own."""
    for key in (text.partition("=")[0].removeprefix("+") for text in overrides):
        if not (key in usable or key.startswith(tuple(k for k in usable if k.endswith(".")))):
            raise ValueError(
                f"{key} cannot be changed here: weights are evaluated with the settings of the run. Only "
                f"{', '.join(f'{name}*' if name.endswith('.') else name for name in usable)} may differ"
            )


def list_interim_ids(source: TaskSource, begun: RunConfig) -> set[str]:
    """The ids of the tasks by whose interim evaluations a run stopped or chose, none if it reports on them too."""
    if begun.evaluation.interim_tasks is None:  # with other sizes the split is another one
        return set()
    return {task.id for task in heldout_split(source, begun.evaluation, has_interim=has_interim(begun))[1]}


def show_prompts(
    config: RunConfig, source: TaskSource, sampler: SamplingClient, options: PromptOptions, console: RunConsole
) -> TaskSource:
    """The source as the model reads it, without prompts that are too long."""
    tokenizer = sampler.get_tokenizer()
    shown = apply_prompt_options(source, tokenizer, options, console.warn)
    return fit_prompts(config, shown, tokenizer, console.note)


def _evaluate(
    assembly: Assembly,
    source: TaskSource,
    sampler: SamplingClient,
    seed: int,
    console: RunConsole,
    left_out: Collection[str] = (),
) -> dict[str, Any]:
    """The metrics of the held-out tasks, without those whose ids are `left_out`."""
    config, options = assembly.config, assembly.config.evaluation
    heldout = HeldoutEvaluator(
        source,
        assembly.reward,
        assembly.watched,
        config.rollout,
        options,
        config.training.error_budget,
        has_interim=has_interim(config),
    )
    heldout.tasks = [task for task in heldout.tasks if task.id not in left_out]
    tasks = len(heldout.tasks)
    console.phase("evaluation", tasks, unit="tasks")
    result = heldout.evaluate(sampler, seed, lambda done: console.step({}, done))
    return {
        **result.intervals(),
        "by_level": {level: result.intervals(level) for level in result.levels},
        "by_family": {name: one.intervals() for name, one in result.by_family().items()},
        "beside": {
            name: {**extra.intervals(), **_count_tasks(extra, len(heldout.extra[name]))}
            for name, extra in result.extra_heldout.items()
        },
        **_count_tasks(result, tasks),
        "samples": options.samples,
        "seed": seed,
        "environment": config.env.name,
    }


def _count_tasks(result: Evaluation, asked: int) -> dict[str, int]:
    """The tasks that the metrics are over, the others, and the completions without a verdict."""
    complete = len(result.complete)
    return {"tasks": complete, "incomplete": asked - complete, "unjudged": result.unjudged}


def warn_of_tasks(tasks: int, loaded: LoadedConfig, config: RunConfig, console: RunConsole) -> None:
    """Warn if the command line asked for more than the `tasks` that are held out."""
    asked = config.evaluation.tasks
    if loaded.origin.get("evaluation.tasks") == CLI and tasks < asked:
        console.warn(f"evaluation.tasks={asked}, but {config.env.name} holds out {tasks} tasks to report on")
