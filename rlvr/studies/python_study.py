"""`rlvr.study`: several seeds and values of one training from a program, as `rlvr study` makes them.

found = rlvr.study("./my-model", rows, close, seeds=range(1, 6), compare={"group_size": [4, 8]}, steps=100)
print(found); found.plot(); found.runs["group_size=8"][0].metrics

A study whose functions other processes can import makes its runs as the command does, each in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.config.compose import to_word
from rlvr.core.cpu_budget import limit_spinning
from rlvr.core.files import read_json, write_atomic
from rlvr.core.registry import find_own
from rlvr.runs.library import QuietConsole, Run, find_config, name_caller
from rlvr.runs.program_settings import ARGUMENTS, INPUTS, argument_error, settings_of
from rlvr.runs.user_messages import be_quiet, mask_secrets, print_message
from rlvr.studies import SPECIFICATION
from rlvr.studies.seed_curves import plot_seeds, read_study
from rlvr.studies.study_plan import (
    StudyPlan,
    StudyVariant,
    add_variant_to_errors,
    build_plan,
    check_own_keys,
    folder_names,
    parse_seeds,
)
from rlvr.studies.study_report import plot_study, study_table
from rlvr.studies.study_runner import run_study
from rlvr.tracking import RunConsole
from rlvr.tracking.notebook_views import run_to_html
from rlvr.tracking.picture_files import can_draw, to_picture_path

if TYPE_CHECKING:
    from typing import Unpack

    from rlvr.runs.train_arguments import TrainArguments

OPTIONS = {"config-name": "config", "config-path": "config"}
_NOT_COMPARED = ("name", "config", "root", "quiet", "jobs", "compare", "environment", "resume", "callbacks")
_LABEL = 60  # characters of a value in a variant's name


class Study:
    """A study on disk: its runs, its table, its pictures. Printed, it is the table."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / SPECIFICATION).exists():
            raise ValueError(f"Study: {self.folder} is no folder of a study (no {SPECIFICATION}); give one")

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`: `variants` with their statistics, `comparisons`, and all `runs`."""
        return read_json(self.folder / "summary.json", "the summary of a study")

    @property
    def runs(self) -> dict[str, list[Run]]:
        """The runs that have made a step, by the name of their variant, in the order of their seeds."""
        return read_study(self.folder)[1]

    @property
    def failed(self) -> dict[str, str]:
        """Why runs failed, by the name of the run."""
        return {run["run"]: run["reason"] for run in self.summary["runs"] if run["state"] == "failed"}

    @property
    def is_finished(self) -> bool:
        """Whether every run is finished."""
        return all(run["state"] == "finished" for run in self.summary["runs"])

    @property
    def table(self) -> str:
        """The statistics over the seeds, the comparisons of the variants, and every run, as text."""
        return mask_secrets(study_table(self.summary))

    def plot(self, file: str | Path | None = None) -> Path:
        """Draw the pass rate of each seed before and after training, by default `study.png`; the file."""
        place = to_picture_path(file if file is not None else self.folder / "study.png")
        if not any(variant["finished"] for variant in self.summary["variants"]):
            raise ValueError(f"{self.folder}: no run is finished, so there is nothing to draw; call rlvr.study again")
        plot_study(self.summary, place)
        return place

    def plot_metric(self, metric: str = "reward", file: str | Path | None = None) -> Path:
        """Draw a metric over the steps with a band for each variant, as `rlvr.plot_seeds` does; the file."""
        return plot_seeds(self.folder, metric, file)

    def __str__(self) -> str:
        return self.table

    def __repr__(self) -> str:
        runs = self.summary["runs"]
        return f"<Study {self.folder}: {sum(run['state'] == 'finished' for run in runs)} of {len(runs)} runs finished>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the state, the table, and the picture."""
        cells = {"runs": repr(self).rpartition(": ")[2].rstrip(">"), "folder": str(self.folder)}
        picture = None
        if can_draw() and any(variant["finished"] for variant in self.summary["variants"]):
            picture = self.plot().read_bytes()
        return run_to_html(self.folder.name, cells, picture)


def study(
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    *,
    seeds: Iterable[int] | str,
    compare: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    heldout: Any = None,
    config: str | Path | None = None,
    environment: Mapping[str, str | Sequence[str]] | None = None,
    jobs: int | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    **settings: Unpack[TrainArguments],
) -> Study:
    """Train with several seeds, and with several values of some arguments, and compare them over the seeds.

    - `model`, `data`, `reward`, `heldout`, `config`, `settings`: as for `rlvr.train`, without `seed` and `resume`.
    - `seeds`: integers (`[1, 2, 3]`, `range(1, 6)`), or text as on the command line (`"1..5,7"`).
    - `compare`: the values to compare, by the argument: `{"group_size": [4, 8]}`. Any argument of `rlvr.train` may be
      one, `reward` and `model` too. Each combination is a variant, which a mapping may name: `{"reward": {"strict":
      strict, "lenient": lenient}}`.
    - `environment`: variables of the environment of the runs; a list of values is compared, too.
    - `jobs`: runs at a time, by default as many as the cores have room for. Each is a process of its own. Where
      something is of this program alone (a lambda, a function of a script or a notebook, a name that it registered),
      the runs are made in this process, one after another; an object with a state is then one for all runs.
    - `name`: the study's folder in `root`; by default made of a hash of everything but the seeds and the values.

    The same call goes on with a study that was stopped and tries failed runs again; more seeds and more values extend
    it. Every variant is checked before the first run. KeyboardInterrupt at Ctrl-C: every run has saved its last step.
    ValueError for what cannot be trained. Runs that failed raise nothing: `failed` has them.
    """
    limit_spinning()
    name = settings.pop("name", None)
    given = {"model": model, "data": _keep_rows(data), "reward": reward, "heldout": _keep_rows(heldout), **settings}
    with name_caller("rlvr.study", ARGUMENTS, OPTIONS), be_quiet(quiet):
        axes = _read_axes(compare, given)
        variables = _read_environment(environment)
        if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
            raise argument_error(f"jobs={jobs!r}, expected a whole number of at least 1; leave it out for the default")
        plan = _plan(Path(root), given, axes, variables, _read_seeds(seeds), name, config)
        own = find_own([variant.config for variant in plan.variants])
        if own and (jobs or 1) > 1:
            raise argument_error(
                f"jobs={jobs}, but {own} is of this program alone, and the processes of other runs cannot import it; "
                "put it into a module, or leave jobs out"
            )
        if own and variables:
            raise argument_error(
                f"environment is read when a process begins, and {own}, which is of this program alone, keeps the runs "
                "in this process; put it into a module, or set the variables before you start Python"
            )
        console = QuietConsole() if quiet else RunConsole(interval=30)
        run_study(plan, jobs, console, own, "call")
    return Study(plan.folder)


def _keep_rows(data: Any) -> Any:
    """Rows that a generator gives once, for every variant."""
    return list(data) if hasattr(data, "__next__") else data


def _read_seeds(seeds: Any) -> tuple[int, ...]:
    if isinstance(seeds, str):
        return parse_seeds(seeds)
    is_list = isinstance(seeds, Iterable) and not isinstance(seeds, Mapping)
    found: list[Any] = [seed.item() if hasattr(seed, "item") else seed for seed in seeds] if is_list else []
    if not found or not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in found):
        raise argument_error(
            f"seeds={seeds!r:.80}, expected integers: seeds=[1, 2, 3], seeds=range(1, 6), or text: seeds='1..5,7'"
        )
    return parse_seeds(",".join(map(str, found)))


def _read_axes(compare: Any, given: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The arguments to compare, each with its values by their labels."""
    if compare is not None and not isinstance(compare, Mapping):
        raise argument_error(
            f"compare is of type {type(compare).__name__}; expected values by argument: {{'group_size': [4, 8]}}"
        )
    axes: list[tuple[str, dict[str, Any]]] = []
    for key, values in (compare or {}).items():
        if given.get(key) is not None:
            raise argument_error(f"{key} is given, and in compare too; leave one of the two out")
        if key in ("seed", "seeds", *_NOT_COMPARED):
            remedy = "give seeds" if key.startswith("seed") else "give it once, for all runs"
            raise argument_error(f"compare: {key} is nothing to compare; {remedy}")
        if isinstance(values, Mapping):
            labelled = {str(label): value for label, value in values.items()}
        elif isinstance(values, Iterable) and not isinstance(values, str):
            labelled = _label_values(key, [_keep_rows(value) for value in values])
        else:
            raise argument_error(f"compare: {key}={values!r:.80}, expected a list of values: {{{key!r}: [...]}}")
        if not labelled:
            raise argument_error(f"compare: {key} has no values; give at least one, or leave it out")
        axes.append((str(key), labelled))
    return axes


def _label_values(key: str, values: Sequence[Any]) -> dict[str, Any]:
    labelled: dict[str, Any] = {}
    for value in values:
        label = first = _describe(value)
        number = 1
        while label in labelled:
            if labelled[label] is value or (isinstance(value, (str, int, float)) and labelled[label] == value):
                raise argument_error(f"compare: {key} has the value {first} twice; leave one out")
            number += 1
            label = f"{first} ({number})"
        labelled[label] = value
    return labelled


def _describe(value: Any) -> str:
    """A value as the name of a variant has it."""
    if isinstance(value, Run):
        return str(value.folder)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"[:_LABEL]
    if callable(value) or hasattr(value, "save_pretrained"):
        return str(getattr(value, "__name__", type(value).__name__))
    return re.sub(r"\s+", " ", value if isinstance(value, str) else repr(value))[:_LABEL]


def _read_environment(environment: Any) -> list[tuple[str, list[str]]]:
    if environment is not None and not isinstance(environment, Mapping):
        raise argument_error(
            f"environment is of type {type(environment).__name__}; expected values: {{'OMP_NUM_THREADS': '1'}}"
        )
    variables: list[tuple[str, list[str]]] = []
    for variable, value in (environment or {}).items():
        values = [value] if isinstance(value, (str, int)) else list(value)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(variable)) or not values:
            raise argument_error(f"environment: {variable!r}: {value!r}, expected a variable and its value or values")
        variables.append((str(variable), [str(one) for one in values]))
    return variables


def _plan(
    root: Path,
    given: Mapping[str, Any],
    axes: Sequence[tuple[str, Mapping[str, Any]]],
    variables: Sequence[tuple[str, Sequence[str]]],
    seeds: tuple[int, ...],
    name: str | None,
    config: str | Path | None,
) -> StudyPlan:
    """The plan of all combinations. Settings that all of them have are words of all runs."""
    varied = [(key, list(labelled)) for key, labelled in axes]
    varied += [(key, list(values)) for key, values in variables if len(values) > 1]
    fixed = {key: values[0] for key, values in variables if len(values) == 1}
    combined = list(product(*([(key, label) for label in labels] for key, labels in varied)))
    settings: list[dict[str, Any]] = []
    for pairs in combined:
        values = {key: labelled[label] for (key, labelled), (_, label) in zip(axes, pairs, strict=False)}
        with add_variant_to_errors(_name(pairs)):
            settings.append(_settings(root, {**given, **values}))
            for key in settings[-1]:
                check_own_keys(key)
    config_name, file = find_config(config, settings[0])
    if config_name is None and file is None:  # the command of a run needs one
        file = str(root / INPUTS / "run.yaml")
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(file), "{}\n")
    if name is None:
        name = f"{config_name or Path(str(file)).stem}-study-{_hash(root, given, axes, fixed, config)}"
    shared = {key: value for key, value in settings[0].items() if all(_has(one, key, value) for one in settings)}
    drafts = [
        StudyVariant(
            _name(pairs),
            start,
            tuple(to_word(key, value) for key, value in one.items() if key not in shared),
            {**fixed, **dict(pairs[len(axes) :])},
            {},
        )
        for pairs, start, one in zip(combined, folder_names(combined), settings, strict=True)
    ]
    warnings = dict[str, None]()  # each variant gives the same ones
    words = [to_word(key, value) for key, value in shared.items()]
    plan = build_plan(
        seeds, words, drafts, name, config_name=config_name, config=file,
        warn=lambda text: warnings.update({text: None}),
    )  # fmt: skip
    for text in warnings:
        print_message(f"warning: {text}")
    return plan


def _settings(root: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    return settings_of(root, function="study", **arguments)


def _name(pairs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{key}={label}" for key, label in pairs)


def _has(settings: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in settings and repr(settings[key]) == repr(value)


def _hash(
    root: Path,
    given: Mapping[str, Any],
    axes: Sequence[tuple[str, Any]],
    fixed: Mapping[str, str],
    config: str | Path | None,
) -> str:
    """A hash of what all runs share, and of what is compared, but not of its values, which may be added to."""
    compared = [key for key, _ in axes]
    left_out = {*compared, *(("heldout", "agent") if "data" in compared else ()), "callbacks"}  # those change nothing
    shared = _settings(root, {key: value for key, value in given.items() if key not in left_out})
    parts = [str(config), shared, compared, fixed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]
