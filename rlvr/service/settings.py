"""The settings of `rlvr serve`: a flag goes before the environment, that before the file, and the file before defaults.

    settings = load_settings(Path("service.yaml"), os.environ, {"port": 0}, warn=print)

Every key can be set by file and by environment; `environment_names()` lists the variables. An unknown key and a value
of the wrong kind are one message with where it came from and what was expected. Secrets are in no file: `api_key_env`
names the variable that holds one. Exercised by tests/test_service_settings.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from rlvr.registry import nearest
from rlvr.service.options import TrainingConfig
from rlvr.store.retention import Retention

CONFIG = "RLVR_CONFIG"  # a settings file, where --config names none
LOG_VARIABLES = ("RLVR_LOG", "LOG_LEVEL", "RUST_LOG")  # the first that is set

# Variables that other programs set too, and so have names of their own; every other key is RLVR_ and its last word.
NAMES = {
    "PORT": "port",
    "HOST": "host",
    "DATABASE_URL": "database",
    "LLM_ENDPOINT": "llm.endpoint",
    "LLM_MODEL": "llm.model",
    "LLM_API_KEY_ENV": "llm.api_key_env",
    "JUDGE_ENDPOINT": "judge.endpoint",
    "JUDGE_MODEL": "judge.model",
    "JUDGE_API_KEY_ENV": "judge.api_key_env",
}
# The least and the most of each key of TrainingConfig; `inf` itself is not allowed.
RANGES: dict[str, tuple[float, float]] = {
    "max_iterations": (1, 100),
    "min_confidence": (0, 1),
    "batch_size": (1, 100_000),
    "learning_rate": (0, 1),
    "entropy_coefficient": (0, math.inf),
    "value_coefficient": (0, math.inf),
    "policy_coefficient": (0, math.inf),
    "experience_buffer_size": (1, 10_000_000),
    "min_experiences_for_training": (1, 10_000_000),
    "convergence_threshold": (0, 2),
}


@dataclass(frozen=True)
class TextEndpoint:
    """A model behind a URL: plain JSON `/generate`, or any OpenAI-compatible one. '' for none; a judge's `model` then
    is one for this process, by its folder, its run's or its name on the hub.

    `api_key_env` names the environment variable that holds its key.
    """

    endpoint: str = ""
    model: str = ""
    api_key_env: str = ""

    def __bool__(self) -> bool:
        return bool(self.endpoint)

    @property
    def key_variable(self) -> str:
        """The variable that holds a key; '' where it is not set: most endpoints on one's own machine need none."""
        return self.api_key_env if os.environ.get(self.api_key_env) else ""

    def __post_init__(self) -> None:
        if self.endpoint:
            parts = urlsplit(self.endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"endpoint={self.endpoint!r}, expected a URL such as http://localhost:3031/generate")
            if not self.model and parts.path.rstrip("/").endswith(("/v1", "/chat/completions")):
                raise ValueError(
                    f"endpoint={self.endpoint!r} is an OpenAI-compatible one and needs its model's name: LLM_MODEL, "
                    "JUDGE_MODEL, or `model` beside it"
                )
            if parts.password:
                raise ValueError(
                    "endpoint holds a password; put the key into an environment variable and name it in api_key_env"
                )


@dataclass(frozen=True)
class Limits:
    """What the service allows. `requests_per_minute` are those of one key that make work (every POST),
    `reads_per_minute` the others; 0 is no limit. `sessions` run at once, `queue` more wait.
    """

    max_body: int = 4 << 20
    max_prompt_chars: int = 100_000
    most_iterations: int = 50
    max_samples: int = 32
    max_tokens: int = 2_048
    requests_per_minute: int = 600
    reads_per_minute: int = 60_000
    sessions: int = 20
    queue: int = 200
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name.endswith("per_minute") or name in ("queue", "grace_seconds") else 1
            if not least <= value < math.inf:
                raise ValueError(f"{name}={value!r}, expected at least {least}")


@dataclass(frozen=True)
class Settings:
    """All of the service. `database` '' is a SQLite file in `state`; `log` is as in `rlvr.service.logs`."""

    host: str = "127.0.0.1"
    port: int = 3035
    state: Path = Path("runs/service")
    database: str = ""
    llm: TextEndpoint = TextEndpoint(api_key_env="LLM_API_KEY")
    judge: TextEndpoint = TextEndpoint(api_key_env="JUDGE_API_KEY")
    model: str = ""
    demo: bool = False
    seed: int = 0
    keys_file: Path | None = None
    dashboard: bool = True
    cors_origins: tuple[str, ...] = ()
    log: str = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    training: TrainingConfig = field(default_factory=TrainingConfig)
    limits: Limits = field(default_factory=Limits)
    retention: Retention = field(default_factory=Retention)

    @property
    def generator(self) -> TextEndpoint | str:
        """Who answers: an endpoint, or what names the model in this process."""
        return self.llm or self.model

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.state.absolute() / 'service.sqlite'}"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port={self.port}, expected 0 (any free one) to 65535")
        for name, (least, most) in RANGES.items():
            value = getattr(self.training, name)
            if not (least <= value <= most and math.isfinite(value)):
                raise ValueError(f"training.{name}={value!r}, expected {least:g} to {most:g}")
        if self.training.max_iterations > self.limits.most_iterations:
            raise ValueError(
                f"training.max_iterations={self.training.max_iterations} is above limits.most_iterations="
                f"{self.limits.most_iterations}; raise that or lower this"
            )
        if self.training.min_experiences_for_training > self.training.experience_buffer_size:
            raise ValueError(
                f"training.min_experiences_for_training={self.training.min_experiences_for_training}: the buffer holds "
                f"{self.training.experience_buffer_size} (training.experience_buffer_size), so nothing would be learned"
            )
        kept = self.retention.keep_experiences
        if kept is not None and kept < self.training.experience_buffer_size:
            raise ValueError(
                f"retention.keep_experiences={kept}: the buffer holds {self.training.experience_buffer_size} "
                "(training.experience_buffer_size); keep at least as many"
            )
        chosen = [
            word
            for word, set_ in (("LLM_ENDPOINT", self.llm), ("RLVR_MODEL", self.model), ("--demo", self.demo))
            if set_
        ]
        if self.judge and not self.judge.model:
            raise ValueError("JUDGE_ENDPOINT is given without JUDGE_MODEL, and nobody would be asked; give both")
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are given; one generator serves, so give only one of them")
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
                raise ValueError(
                    f"cors_origins={origin!r}, expected an origin such as https://example.org, without a path"
                )


def load_settings(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any], warn: Callable[[str], None]
) -> Settings:
    """The settings of a start. `flags` are dotted keys; those that are None were not given."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    file = file or (Path(environment[CONFIG]) if environment.get(CONFIG) else None)
    if file is not None:
        values = _read(file)
        origin |= {key: str(file) for key in _leaves(values)}
    for variable, key in environment_names().items():
        if (text := environment.get(variable, "")) != "":
            _put(values, key, _typed(text, key), origin, variable)
    for variable in reversed(LOG_VARIABLES):
        if environment.get(variable):
            _put(values, "log", environment[variable], origin, variable)
    for key, value in flags.items():
        if value is not None:
            _put(values, key, str(value) if isinstance(value, Path) else value, origin, f"--{key.rpartition('.')[2]}")
    if flags.get("model") or flags.get("demo"):  # a generator by flag takes the place of one that is set elsewhere
        values.pop("llm", None)
        values |= {"model": flags.get("model") or "", "demo": bool(flags.get("demo"))}
    for name, default in (("llm", "LLM_API_KEY"), ("judge", "JUDGE_API_KEY")):
        if isinstance(values.get(name), dict):  # what a file or the environment sets of it replaces the default whole
            values[name].setdefault("api_key_env", default)
    for text in _misspelled(environment):
        warn(text)
    return _validated(values, origin)


def _validated(values: dict[str, Any], origin: Mapping[str, str]) -> Settings:
    """`rlvr.config` would do it too, and take 7 MB for what it can beyond this."""
    known = _keys(Settings, "")
    sections = {key.partition(".")[0] for key in known if "." in key}
    wrong: list[str] = []
    for key in _leaves(values):
        section = key.partition(".")[0]
        if "." in key and section not in sections:
            wrong.append(f"{section}{_from(origin, key)} is no section of settings{nearest(section, sections)}")
        elif key not in known and key not in sections:
            wrong.append(f"{key}{_from(origin, key)} is no setting{nearest(key, known)}")
    if wrong:
        raise ValueError("\n".join(wrong))
    for key in known:  # YAML 1.1 takes 1e-3 for text
        *folder, leaf = key.split(".")
        there = values.get(folder[0], {}) if folder else values
        if isinstance(there, dict) and isinstance(there.get(leaf), str) and isinstance(_default(key), float):
            with suppress(ValueError):
                there[leaf] = float(there[leaf])
    try:
        return TypeAdapter(Settings).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ValueError("\n".join(_about(one, values, origin) for one in error.errors())) from None


def _about(error: Any, values: dict[str, Any], origin: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    told = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}.{told}{_from(origin, key)}" if key else told
    return f"{key}={error['input']!r}{_from(origin, key)}: {told[0].lower()}{told[1:]}"


def _from(origin: Mapping[str, str], key: str) -> str:
    found = origin.get(key) or next((source for other, source in origin.items() if other.startswith(f"{key}.")), "")
    return f" (from {found})" if found else ""


def environment_names() -> dict[str, str]:
    """{variable: key} of everything that can be set, but for the log's level (`LOG_VARIABLES`)."""
    own = set(NAMES.values())
    rest = [key for key in _keys(Settings, "") if key not in own and key != "log"]
    return NAMES | {f"RLVR_{key.rpartition('.')[2].upper()}": key for key in rest}


def _keys(schema: Any, prefix: str) -> list[str]:
    default = schema()
    found: list[str] = []
    for one in dataclasses.fields(schema):
        value = getattr(default, one.name)
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        found += _keys(type(value), f"{prefix}{one.name}.") if nested else [f"{prefix}{one.name}"]
    return found


def _default(key: str) -> Any:
    value: Any = Settings()
    for word in key.split("."):
        value = getattr(value, word)
    return value


def _typed(text: str, key: str) -> Any:
    """What a variable says, as the file would have it: a number where a number is meant, text where text is."""
    import yaml

    kind = _default(key)
    if isinstance(kind, tuple):
        return [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(kind, (str, Path)) or key == "keys_file":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # and then it is refused, with the variable's name


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"settings file {file} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"settings file {file} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"settings file {file}: expected keys and values, e.g. `port: 3035`")
    return found


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in values.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


def _put(values: dict[str, Any], key: str, value: Any, origin: dict[str, str], source: str) -> None:
    *folders, leaf = key.split(".")
    for folder in folders:
        inner = values.get(folder)
        if not isinstance(inner, dict):  # a file that says `llm: text` is told so where it is validated
            inner = values[folder] = {} if inner is None else inner
        if not isinstance(inner, dict):
            return
        values = inner
    values[leaf] = value
    origin[key] = source


def _misspelled(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like ours and are not: a typing error in one would otherwise go unnoticed."""
    import difflib

    known = {*environment_names(), *LOG_VARIABLES, CONFIG, "RLVR_API_KEYS", "RLVR_API_KEY"}
    found: list[str] = []
    for name in environment:
        if name.startswith("RLVR_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            found += [f"{name} is no setting of the service (did you mean {near[0]}?)"] if near else []
    return found
