"""Reads what the user typed into the variants and runs of a study, and checks every variant's config.

    seeds=1..5,7                       the seeds: integers and ranges that include both ends
    training.group_size=8,16           an axis: every combination of the axes' values is a variant
    --environment NAME=default,avx2    an axis of an environment variable; one value is set for all runs

A comma inside brackets or quotes belongs to the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from rlvr.config import LoadedConfig, difference, load
from rlvr.config.aliases import find_alias
from rlvr.config.build_config import build_config, resolved_values
from rlvr.config.schema import RunConfig
from rlvr.core.cpu_budget import available_cores
from rlvr.core.files import check_name
from rlvr.runs.assembly import assemble, uses_device
from rlvr.runs.run_plan import plan
from rlvr.runs.run_tasks import resolve_epochs

EXAMPLE = "seeds=1..5 (integers and ranges: seeds=1..5,7)"
MOST_RUNS = 10_000  # more is a typing mistake
CHECKED_SEED = 0  # that variants are checked with and stored with: the same when the seeds grow
# Keys that the study sets itself, and what the user gives instead.
_OWN_KEYS = {
    "seed": f"give {EXAMPLE}",
    "run.name": "the study names its runs; --name names the study",
    "run.resume": "the same command continues a study; another --name begins a new one",
}
_RANGE = re.compile(r"(\d{1,30})(?:\.\.(\d{1,30}))?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

Axis = tuple[str, list[str]]  # a key and its values, as typed


@dataclass(frozen=True)
class StudyVariant:
    """One combination of the axes: the overrides and the environment of its runs, and the config they give.

    `folder` is the beginning of the names of its run folders.
    """

    name: str
    folder: str
    overrides: tuple[str, ...]
    environment: dict[str, str]
    config: dict[str, Any]


@dataclass(frozen=True)
class StudyRun:
    """One run: a variant with a seed."""

    variant: StudyVariant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.folder}seed-{self.seed}"


@dataclass(frozen=True)
class StudyPlan:
    """What a study consists of. `words` are those of `rlvr train` that all runs share; a run has `threads` at most.

    `start` is the folder of a study without variants from whose runs, seed by seed, all runs of this one start.
    """

    folder: Path
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    variants: tuple[StudyVariant, ...]
    threads: int
    on_device: bool
    start: Path | None = None

    @property
    def runs(self) -> list[StudyRun]:
        """All runs, seed by seed, so that a study that is stopped early compares its variants over the same seeds."""
        return [StudyRun(variant, seed) for seed in self.seeds for variant in self.variants]

    @property
    def jobs(self) -> int:
        """How many runs fit this machine at a time; one on an accelerator."""
        return 1 if self.on_device else max(1, available_cores() // self.threads)

    def find_start(self, seed: int) -> str | None:
        """The run folder that the runs of a seed start from."""
        return str(self.start / f"seed-{seed}") if self.start else None

    def command(self, run: StudyRun) -> list[str]:
        """The words of `rlvr` for one run."""
        place = [f"run.root={self.folder}", f"run.name={run.name}"]
        if start := self.find_start(run.seed):
            place.append(f"model.start_from={start}")
        return ["train", *self.words, *run.variant.overrides, f"seed={run.seed}", *place]

    def load(self, run: StudyRun) -> LoadedConfig:
        """The config that `command` gives one run."""
        words = self.command(run)[1:]
        options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
        config = options.get("config", options.get("config-path"))
        return load(options.get("config-name"), config, [word for word in words if not word.startswith("--")])


def read_variants(
    overrides: Sequence[str], environment: Sequence[str] = ()
) -> tuple[tuple[int, ...], list[str], list[StudyVariant]]:
    """(seeds, words of all runs, variants without their configs) of a command's words, as `build_plan` takes them."""
    seeds, shared, axes = read_overrides(overrides)
    variables = read_variables(environment)
    common = {key: values[0] for key, values in variables if len(values) == 1}
    varied = [*axes, *(variable for variable in variables if len(variable[1]) > 1)]
    for key, values in varied:
        _check_values(key, values)
    combined = list(product(*([(key, value) for value in values] for key, values in varied)))
    drafts = [
        StudyVariant(
            ", ".join(f"{key}={value}" for key, value in pairs),
            start,
            tuple(f"{key}={value}" for key, value in pairs[: len(axes)]),
            {**common, **dict(pairs[len(axes) :])},
            {},
        )
        for pairs, start in zip(combined, folder_names(combined), strict=True)
    ]
    return seeds, shared, drafts


def build_plan(
    seeds: tuple[int, ...],
    shared: Sequence[str],
    drafts: Sequence[StudyVariant],
    name: str | None = None,
    *,
    config_name: str | None = None,
    config: str | None = None,
    config_path: str | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> StudyPlan:
    """The plan of these variants, whose configs are made and checked here; `shared` are words of all runs.

    ValueError for what a run would refuse. Nothing is written.
    """
    if config_name is None and config is None:
        raise ValueError("no config given; give --config-name=NAME (arithmetic, for example) or --config=FILE")
    if len(drafts) * len(seeds) > MOST_RUNS:
        raise ValueError(
            f"{len(drafts)} variants x {len(seeds)} seeds are more than {MOST_RUNS:,} runs; give fewer of either"
        )

    def compose(more: Sequence[str]) -> tuple[RunConfig, LoadedConfig]:
        loaded = load(config_name, config or config_path, [*shared, *more])
        if timed := [key for key in loaded.timed if key != "run.name"]:
            raise ValueError(
                f"{', '.join(timed)}: ${{now:...}} changes before a study is continued; give a fixed value"
            )
        settings = build_config(loaded, warn)
        if not settings.run.resume:
            raise ValueError("run.resume=false cannot be given to a study, which continues its runs; leave it out")
        return settings, loaded

    folder: Path | None = None
    label, threads, on_device = "", 1, False
    variants: list[StudyVariant] = []
    for draft in drafts:
        with add_variant_to_errors(draft.name), _set_environment(draft.environment):
            if folder is None:
                settings, loaded = compose(draft.overrides)
                label = loaded.name or "run"
                folder = Path(settings.run.root).expanduser() / check_name(name or f"{label}-study", "study name")
            settings, loaded = compose([*draft.overrides, f"seed={CHECKED_SEED}", f"run.root={folder}", "run.name=run"])
            assembly = assemble(settings)
            loaded, settings = resolve_epochs(loaded, settings, assembly.source)
            assembly = replace(assembly, config=settings)
            plan(assembly)
            if assembly.spec.capabilities.runs_in_process:
                shares = assembly.core_shares
                threads = max(threads, shares.threads + (shares.workers if shares.concurrent else 0))
                on_device = on_device or uses_device(settings)
            resolved = resolved_values(settings, loaded)
        variants.append(replace(draft, name=draft.name or label, config=resolved))
    for one, other in combinations(variants, 2):
        if one.environment == other.environment and not difference(one.config, other.config):
            raise ValueError(f"{one.name} and {other.name} are the same run; leave one of the two out")
    assert folder is not None, "a study has at least one variant"
    options = {"--config-name": config_name, "--config": config, "--config-path": config_path}
    words = [f"{option}={value}" for option, value in options.items() if value]
    return StudyPlan(folder, (*words, *shared), seeds, tuple(variants), threads, on_device)


def read_overrides(overrides: Sequence[str]) -> tuple[tuple[int, ...], list[str], list[Axis]]:
    """(seeds, overrides of all runs, axes) of the `key=value` words."""
    seeds: tuple[int, ...] | None = None
    shared: list[str] = []
    axes: list[Axis] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key == "seeds":
            if seeds is not None:
                raise ValueError(f"seeds is given twice; write one list, e.g. {EXAMPLE}")
            seeds = parse_seeds(value)
            continue
        check_own_keys(key.removeprefix("+"))
        values = split_values(value)
        if len(values) == 1:
            shared.append(text)
            continue
        if key in ("run.root", "+run.root"):
            raise ValueError(f"{text}: all runs of a study are in one folder; give one run.root")
        axes.append((key, values))
    if seeds is None:
        raise ValueError(f"seeds is missing; give {EXAMPLE}")
    keys = [text.partition("=")[0].removeprefix("+") for text in overrides]
    if twice := [key for key, _ in axes if keys.count(key.removeprefix("+")) > 1]:
        raise ValueError(f"{twice[0]} is given twice, once with several values; give its values in one list")
    return seeds, shared, axes


def parse_seeds(text: str) -> tuple[int, ...]:
    """The sorted seeds of `1..5,7`; ValueError for other text, an empty range or a seed given twice."""
    seeds: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise ValueError(
                f"seeds={text}: expected integers from 0 and ranges a..b, not {part.strip()!r}; give {EXAMPLE}"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise ValueError(f"seeds={text}: the range {part.strip()} is empty; write {last}..{first}")
        if last - first >= MOST_RUNS:
            raise ValueError(f"seeds={text}: {last - first + 1:,} seeds, expected at most {MOST_RUNS:,}; give fewer")
        if last >= 2**63:
            raise ValueError(f"seeds={text}: {last} is too large; expected seeds from 0 to 2**63 - 1")
        if twice := seeds.intersection(range(first, last + 1)):
            raise ValueError(f"seeds={text}: seed {min(twice)} is given twice; leave one out")
        seeds.update(range(first, last + 1))
    return tuple(sorted(seeds))


def split_values(text: str) -> list[str]:
    """The parts of `text` between its commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and (depth or not parts[-1].strip()):  # elsewhere it is an apostrophe
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in ")}]":
            depth = max(0, depth - 1)
        elif character == "," and not depth:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts] if len(parts) > 1 else [text]


def read_variables(texts: Sequence[str]) -> list[Axis]:
    """The variables of `NAME=value` and `NAME=one,other`."""
    variables = [_read_variable(text) for text in texts]
    names = [name for name, _ in variables]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--environment {min(twice)} is given twice; give its values once, separated by commas")
    return variables


def _read_variable(text: str) -> Axis:
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name):
        raise ValueError(f"--environment {text}: expected NAME=value or NAME=one,other, e.g. OMP_NUM_THREADS=1")
    return name, [_unquote(part) for part in split_values(value)]


def _unquote(text: str) -> str:
    """The text without the quotes around it, which kept its commas."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def check_own_keys(key: str) -> None:
    """Raise ValueError for a key, or another system's word for it, that the study sets for each run."""
    try:
        alias = find_alias(key)
    except ValueError:  # a word that is not known: composing the config says so
        return
    for target in alias.targets if alias else (key,):
        if target in _OWN_KEYS:
            raise ValueError(f"{key} cannot be given to a study: {_OWN_KEYS[target]}")


def _check_values(key: str, values: Sequence[str]) -> None:
    """Raise ValueError for an empty value of an axis, or one that is there twice."""
    if not all(values):
        raise ValueError(
            f"{key}={','.join(values)}: a value is empty. A comma separates values; where it belongs to the value, "
            f"quote it: \"{key}='a,b'\""
        )
    if twice := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"{key}={','.join(values)}: {twice[0]} is given twice; leave one out")


def folder_names(combined: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """How the run folders of each variant begin: its values where they make short, distinct names, else a number."""
    texts = ["_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in pairs) for pairs in combined]
    names = [re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") for text in texts]
    if len({name.lower() for name in names}) < len(names) or max(map(len, names)) > 80:
        names = [f"variant-{number}" for number in range(1, len(names) + 1)]
    return [f"{name}_" if name else "" for name in names]


@contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def add_variant_to_errors(variant: str) -> Iterator[None]:
    """Name the variant in the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} (variant {variant})" if variant else str(error)) from error
