"""`rlvr evaluate`: the held-out tasks of a run for its saved weights, or of any config for a model from elsewhere.

    evaluate_weights("runs/arithmetic", ["evaluation.samples=16"], console)
    evaluate_weights("./my-model", ["env.kwargs.path=./gsm8k"], console, config_name="gsm8k")
    evaluate_weights("./my-model", [], console, like=Path("runs/arithmetic"))

A model is a plain folder of transformers, an adapter of peft, or a hub name; it is sampled from as it is. With the
config and seed of a run it is asked the same tasks with the same random draws as that run's baseline. Nothing is
written here. Exercised by `python -m pytest tests/test_evaluate_model.py tests/test_run_folder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.clients.local_engine import is_hub_name, is_model
from rlvr.config import CLI, LoadedConfig, load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig
from rlvr.core.files import find_damage, read_json
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.engine.gguf_files import find_gguf
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.runs.assembly import Assembly, assemble, find_base, find_near_folder, has_interim
from rlvr.runs.run_folder import prompt_options
from rlvr.runs.run_tasks import fit_prompts
from rlvr.tracking import RunConsole
from rlvr.training import journal
from rlvr.training.best_checkpoint import resolve_best
from rlvr.training.evaluate import Evaluation, heldout_split
from rlvr.training.heldout import HeldoutEvaluator

# What may differ between a run and a later evaluation of its weights.
EVALUATION_KEYS = ("evaluation.", "engine.", "seed", "model.device", "model.dtype")
# What of the section `model` counts for a model from elsewhere, beside its name.
MODEL_KEYS = ("tokenizer", "device", "dtype")
EXPECTED = (
    "a run folder, one of its checkpoints, a model folder (config.json and its weights), an adapter "
    "(adapter_config.json) or a hub name (OWNER/NAME)"
)


def evaluate_weights(
    place: str,
    overrides: Sequence[str],
    console: RunConsole,
    *,
    config_name: str | None = None,
    config_path: str | None = None,
    like: Path | None = None,
) -> dict[str, Any]:
    """Metrics with intervals of what is at `place`, a path or a hub name. A config, or the run `like`, names the tasks
    of a model; a run has its own."""
    folder = Path(place).expanduser()
    if (folder / "resolved.yaml").exists() or (_run_of(folder) / "resolved.yaml").exists():
        if config_name or config_path or like:
            raise ValueError(
                f"{place} is a run, which is evaluated on the tasks of its own config; leave the "
                f"{'option --like' if like else 'config'} out"
            )
        return evaluate_saved(folder, overrides, console)
    if like and (config_name or config_path):
        raise ValueError(f"--like {like} and a config both name the tasks; give one of the two")
    check_weights(place, console.note)
    if like is None:
        return evaluate_model(place, load(config_name, config_path, overrides), console)
    run = _run_of(like.expanduser())
    if not (run / "resolved.yaml").exists():
        raise ValueError(f"--like {like}: no run is there (no resolved.yaml){find_near_folder(run)}; give a run folder")
    _check_overrides(overrides, (*EVALUATION_KEYS, "model.tokenizer", "model.name"))
    return evaluate_model(place, load(None, str(run / "resolved.yaml"), overrides), console, like=run)


def _run_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint lies in; the checkpoint itself if it lies in none."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def check_weights(place: str, note: Callable[[str], None]) -> None:
    """ValueError if no model is at `place`. A hub is not asked; a name of it that looks like a folder here is noted."""
    folder = Path(place).expanduser()
    if find_gguf(place):
        return
    if is_hub_name(place) and not Path(folder.parts[0]).is_dir():
        if near := find_near_folder(folder):
            note(f"{place}: there is no such folder{near}; it is looked for on the hub, as OWNER/NAME")
        return
    if not (is_model(folder) or (folder / "adapter_config.json").exists()):
        no_folder = f"there is no such folder{find_near_folder(folder)}"
        found = "it holds no weights that are known here" if folder.is_dir() else no_folder
        raise ValueError(f"{place}: {found}; expected {EXPECTED}")
    config = read_json(folder / "config.json", "the config of a model") if is_model(folder) else {}
    for kind in config.get("architectures") or ():
        if "Classification" in str(kind):
            raise ValueError(
                f"{place} is a {kind}, which writes no text; expected a language model. As a reward it is "
                f"reward.type=classifier reward.kwargs.model={place}"
            )


def evaluate_model(place: str, loaded: LoadedConfig, console: RunConsole, like: Path | None = None) -> dict[str, Any]:
    """Evaluate a model or an adapter on the held-out tasks of a config, whose own model does not count.

    If it is the config of the run `like`, the tasks are those that an evaluation of the run reports on.
    """
    if not (loaded.values.get("env") or {}).get("name"):
        raise ValueError(
            f"{place} is a model, so the tasks must be named: give benchmarks (gsm8k math500, for example), "
            "--config-name=NAME, --config=FILE, env.name=NAME, or --like RUN for the tasks and the reward of a run"
        )
    adapter = find_adapter(place)
    config = build_config(with_model(loaded, place, adapter))
    assembly = assemble(config)
    assembly.start_rewards()
    sampler = assembly.build_sampler(adapter, console.warn)
    options = config.prompt if like is None else prompt_options(config, like)
    source = show_prompts(config, assembly.source, sampler, options, console)
    left_out = set() if like is None else _interim_ids(source, _read_run(like))
    result = _evaluate(assembly, source, sampler, config.seed, console, left_out)
    warn_of_tasks(result["tasks"], loaded, config, console)
    return {"checkpoint": place, **({} if like is None else {"like": str(like)}), **result}


def find_adapter(place: str) -> Path | None:
    """The folder, if it holds an adapter and no whole model."""
    folder = Path(place).expanduser()
    return folder if (folder / "adapter_config.json").exists() and not is_model(folder) else None


def with_model(loaded: LoadedConfig, place: str, adapter: Path | None) -> LoadedConfig:
    """The config with the section `model` of weights that no run made."""
    given: dict[str, Any] = loaded.values.get("model") or {}
    typed = [key for key, origin in loaded.origin.items() if key.startswith("model.") and origin == CLI]
    usable = [f"model.{key}" for key in (*MODEL_KEYS, *(["name"] if adapter else []))]
    if wrong := [key for key in typed if key not in usable]:
        raise ValueError(
            f"{wrong[0]} has no effect here: {place} is evaluated as it is; {', '.join(usable)} may be given"
        )
    model = {key: given[key] for key in ("device", "dtype") if key in given}
    model["name"] = (
        str(Path(place).expanduser())
        if adapter is None
        else find_base(adapter, given["name"] if "model.name" in typed else None)
    )
    if "model.tokenizer" in typed:
        model["tokenizer"] = given["tokenizer"]
    elif adapter and (adapter / "tokenizer_config.json").exists():
        model["tokenizer"] = str(adapter)
    origin = {key: source for key, source in loaded.origin.items() if not key.startswith("model.") or key in typed}
    client = {**(loaded.values.get("client") or {}), "name": "local"}
    return replace(loaded, values={**loaded.values, "model": model, "client": client}, origin=origin)


def evaluate_saved(place: Path, overrides: Sequence[str], console: RunConsole) -> dict[str, Any]:
    """Evaluate the weights of a run folder (its last whole checkpoint) or of one checkpoint folder inside a run, where
    `checkpoints/best` is the best one.

    `overrides` may change how that is done (EVALUATION_KEYS), e.g. `evaluation.samples=64`. Tasks by whose interim
    evaluations the run stopped or chose are never among those evaluated. Nothing is written.
    """
    _check_overrides(overrides, EVALUATION_KEYS)
    given, place = place, resolve_best(place)
    folder = _run_of(place)
    stored = folder / "resolved.yaml"
    # The run's seed made the base model of an adapter; a given one is only for the random draws of this evaluation.
    begun = _read_run(folder)
    loaded = load(None, str(stored), [text for text in overrides if text.lstrip("+")[:5] != "seed="])
    config = build_config(loaded)
    if other := config.client_options.evaluates_as:
        config = replace(config, client=replace(config.client, name=other))
    seed = build_config(load(None, str(stored), overrides)).seed
    if folder == place:
        checkpoint = journal.newest_checkpoint(folder, lambda text: console.warn(f"{text}; looking for an older one"))
        if checkpoint is None:
            raise ValueError(f"{folder} has no checkpoint yet; train it first, or give one of its checkpoints")
        place = checkpoint
    elif wrong := find_damage(place):
        raise ValueError(f"checkpoint {place} is damaged or missing: {wrong}")
    assembly = assemble(config)
    assembly.start_rewards()
    client = assembly.build_client(folder / "checkpoints", lambda text: None, lambda text: None, fresh=False)
    client.load_state(journal.weights_path(place)).result()
    sampler = client.create_sampling_client()
    source = show_prompts(config, assembly.source, sampler, prompt_options(config, folder), console)
    if begun.evaluation.interim_tasks is None and (place != given or place.name.startswith("best-")):
        console.warn(
            "the run chose its best checkpoint by the tasks that are evaluated here "
            "(evaluation.interim_tasks=null): the pass rate is overstated"
        )
    result = _evaluate(assembly, source, sampler, seed, console, _interim_ids(source, begun))
    warn_of_tasks(result["tasks"], loaded, config, console)
    return {"checkpoint": str(place), **result}


def _read_run(folder: Path) -> RunConfig:
    return build_config(load(None, str(folder / "resolved.yaml"), []))


def _check_overrides(overrides: Sequence[str], usable: Sequence[str]) -> None:
    """ValueError for a setting that would make the result another one than the run's own."""
    for key in (text.partition("=")[0].removeprefix("+") for text in overrides):
        if not (key in usable or key.startswith(tuple(k for k in usable if k.endswith(".")))):
            raise ValueError(
                f"{key} cannot be changed here: weights are evaluated with the settings of the run. Only "
                f"{', '.join(f'{name}*' if name.endswith('.') else name for name in usable)} may differ"
            )


def _interim_ids(source: TaskSource, begun: RunConfig) -> set[str]:
    """The ids of the tasks by whose interim evaluations a run stopped or chose, none if it reports on them too."""
    if begun.evaluation.interim_tasks is None:  # with other sizes the split is another one
        return set()
    return {task.id for task in heldout_split(source, begun.evaluation, has_interim=has_interim(begun))[1]}


def show_prompts(
    config: RunConfig, source: TaskSource, sampler: SamplingClient, options: PromptOptions, console: RunConsole
) -> TaskSource:
    """The source as the model reads it, without prompts that are too long."""
    tokenizer = sampler.get_tokenizer()
    return fit_prompts(config, apply_prompt_options(source, tokenizer, options), tokenizer, console.note)


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
