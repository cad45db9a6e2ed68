"""Reads the words of `rlvr evaluate MODEL ...`: benchmarks, where their data is, and settings.

The words:

    gsm8k                     a benchmark by its name, with rows from the hub
    math500=./math500.jsonl   the same with rows of this file or folder
    ./mine.yaml               a config file of the user's as a benchmark, of any environment
    evaluation.tasks=50       a setting for all of them
    gsm8k.rollout.top_p=0.9   a setting for one of them
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlvr.config import LoadedConfig, load
from rlvr.config.aliases import is_ours
from rlvr.config.build_config import build_config
from rlvr.config.compose import PACKAGED
from rlvr.config.schema import RunConfig
from rlvr.core.files import check_name
from rlvr.core.registry import did_you_mean

GROUP = "benchmarks"
_DATA = "env.kwargs.path="
_ONE_ENGINE = ("model", "engine", "client")  # the sections that all benchmarks of a command share


@dataclass(frozen=True)
class Benchmark:
    """One benchmark with its composed config, and that config checked."""

    name: str
    loaded: LoadedConfig
    config: RunConfig


@dataclass
class _Request:
    """What the words ask of one benchmark: its config file, None for one by name, and its settings."""

    file: str | None = None
    overrides: list[str] = field(default_factory=list[str])


def known_benchmarks() -> list[str]:
    """The benchmarks by name: those of `./configs/benchmarks` and of the package."""
    folders = (Path("configs", GROUP), PACKAGED / GROUP)
    return sorted({file.stem for folder in folders for file in folder.glob("*.y*ml")})


def has_benchmarks(words: Sequence[str]) -> bool:
    """Whether the words name a benchmark, and are not settings alone."""
    known = known_benchmarks()
    return any("=" not in word or word.partition("=")[0] in known or _near_benchmark(word, known) for word in words)


def read_benchmarks(words: Sequence[str], set_model: Callable[[LoadedConfig], LoadedConfig]) -> list[Benchmark]:
    """The benchmarks that the words ask for, in their order; `set_model` gives a config the model that is evaluated."""
    requests, shared = _parse_arguments(words)
    benchmarks: list[Benchmark] = []
    for name, request in requests.items():
        with name_benchmark(name):
            overrides = [*shared, *request.overrides]  # the later one wins
            config_name = None if request.file else f"{GROUP}/{name}"
            loaded = set_model(load(config_name, request.file, overrides))
            config = build_config(loaded)
            _check_samples(config)
        benchmarks.append(Benchmark(name, loaded, config))
    first = benchmarks[0]
    for other in benchmarks[1:]:
        if (other.config.model, other.config.engine) != (first.config.model, first.config.engine):
            raise ValueError(
                f"benchmarks {first.name} and {other.name} differ in model or engine, and one engine runs both; give "
                "the same settings, or evaluate one after the other"
            )
    return benchmarks


@contextmanager
def name_benchmark(name: str) -> Iterator[None]:
    """Put the benchmark's name in front of a ValueError, and name the option for its data as the user gives it."""
    try:
        yield
    except ValueError as error:
        text = str(error).removeprefix(f"{name}: ").replace(_DATA, f"{name}=")
        raise ValueError(f"benchmark {name}: {text}") from error


def find_text_forms(benchmark: Benchmark) -> list[str]:
    """The other benchmarks of the same tasks whose prompts are plain text."""
    found: list[str] = []
    for name in known_benchmarks():
        values = load(f"{GROUP}/{name}").values
        is_same = values["env"]["name"] == benchmark.config.env.name
        if is_same and (values.get("prompt") or {}).get("chat") in (False, "off"):
            found.append(name)
    return found


def _parse_arguments(words: Sequence[str]) -> tuple[dict[str, _Request], list[str]]:
    """Parse the words of the command into a request for each benchmark and the settings that all share."""
    known = known_benchmarks()
    requests: dict[str, _Request] = {}
    settings: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key not in known:
            if near := _near_benchmark(word, known):
                raise ValueError(f"unknown benchmark {key!r}{near}; there are: {', '.join(known)}")
            settings.append(word)
            continue
        name, request = _read_name(key, known)
        if name in requests:
            raise ValueError(f"benchmark {name} is named twice; leave one out")
        if equals:
            _check_data(word, name, Path(value).expanduser())
            request.overrides.append(f"{_DATA}{value}")
        requests[name] = request
    shared: list[str] = []
    for word in settings:
        name, _, rest = word.removeprefix("+").partition(".")
        if "=" in name or name not in {*requests, *known}:
            shared.append(word)
            continue
        if name not in requests:
            raise ValueError(
                f"{word}: the benchmark {name} is not among the benchmarks to run; name {name} too, or leave {word} out"
            )
        if (section := rest.partition("=")[0].partition(".")[0]) in _ONE_ENGINE:
            raise ValueError(f"{word}: one engine runs all benchmarks of a command; give {section}. without {name}.")
        requests[name].overrides.append(rest)
    return requests, shared


def _read_name(word: str, known: Sequence[str]) -> tuple[str, _Request]:
    """Parse a benchmark's name or config file: (its name, a request without settings)."""
    if word in known:
        return word, _Request()
    if word.endswith((".yaml", ".yml")):
        if not Path(word).is_file():
            raise ValueError(
                f"benchmark {word}: there is no such file; give another config file, or one of {', '.join(known)}"
            )
        return check_name(Path(word).stem, "benchmark"), _Request(word)
    raise ValueError(
        f"unknown benchmark {word!r}{did_you_mean(word, known)}; there are: {', '.join(known)}; for tasks of any other "
        "environment give a config file (mine.yaml), and settings as key=value"
    )


def _check_data(word: str, name: str, data: Path) -> None:
    if not data.exists():
        near = did_you_mean(data.name, [p.name for p in data.parent.iterdir()] if data.parent.is_dir() else [])
        raise ValueError(
            f"{word}: there is no such file or folder{near}; give the data set's own files (docs/verify/benchmarks.md "
            f"says where they are), or {name} alone for those of the hub"
        )


def _near_benchmark(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'gsm8k'?)` where a key of no config is nearly the name of a benchmark."""
    key = word.partition("=")[0]
    is_near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.75)
    return did_you_mean(key, known) if is_near and "." not in key and not is_ours(key) else ""


def _check_samples(config: RunConfig) -> None:
    """ValueError for several samples that would all be the same one."""
    options = config.evaluation
    if options.samples > 1 and options.temperature == 0:
        raise ValueError(
            f"evaluation.samples={options.samples} at evaluation.temperature=0 are the same completion each time; give "
            "evaluation.temperature=0.8, say, or evaluation.samples=1"
        )
