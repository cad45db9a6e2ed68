"""The settings of `rlvr serve`. A flag overrides the environment, that overrides the file, and the file the defaults.

    settings = load_settings(Path("service.yaml"), os.environ, {"port": 0}, warn=print)

Every key can be set in the file and by an environment variable; `environment_names()` lists the variables. The message
for an unknown key or a wrong value names the source and what was expected. Secrets are in no file: `api_key_env` names
the variable that holds one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from rlvr.core.registry import did_you_mean
from rlvr.service.service_options import TrainingConfig
from rlvr.store.retention import Retention

CONFIG = "RLVR_CONFIG"  # a settings file, where --config names none
LOG_VARIABLES = ("RLVR_LOG", "LOG_LEVEL", "RUST_LOG")  # the first that is set

DEFAULT_ENDPOINT = "http://localhost:3031/generate"  # the generator's, if there is no other one
NO_ENDPOINT = "none"  # a value of LLM_ENDPOINT: no generator

# Variables with names that other programs use too; every other key is RLVR_ and its last word.
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
AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class TextEndpoint:
    """A model behind a URL: plain JSON `/generate`, or OpenAI-compatible. An `endpoint` of '' or `none` means none; the
    `model` of a judge is then loaded in this process, from a folder, a run or the hub.

    `api_key_env` names the environment variable that holds the key.
    """

    endpoint: str = ""
    model: str = ""
    api_key_env: str = ""

    def __bool__(self) -> bool:
        return self.endpoint not in ("", NO_ENDPOINT)

    @property
    def key_variable(self) -> str:
        """The variable that holds a key; '' if it is not set, since most local endpoints need no key."""
        return self.api_key_env if os.environ.get(self.api_key_env) else ""

    @property
    def base_url(self) -> str:
        """The URL of an OpenAI-compatible endpoint, without the path of its operation."""
        return self.endpoint.removesuffix("/").removesuffix("/chat/completions")

    def __post_init__(self) -> None:
        if self:
            parts = urlsplit(self.endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"endpoint={self.endpoint!r}, expected a URL such as http://localhost:3031/generate")
            if not self.model and parts.path.rstrip("/").endswith(("/v1", "/chat/completions")):
                raise ValueError(
                    f"endpoint={self.endpoint!r} is OpenAI-compatible and needs its model's name: set LLM_MODEL, "
                    "JUDGE_MODEL, or `model` beside the endpoint"
                )
            if parts.password:
                raise ValueError(
                    "endpoint holds a password; put the key into an environment variable and name it in api_key_env"
                )


@dataclass(frozen=True)
class ServiceLimits:
    """What the service accepts. `requests_per_minute` counts the requests of one key that make work (every POST),
    `reads_per_minute` the others; 0 is no limit. `sessions` run at once, and `queue` more may wait."""

    max_body: AtLeast1 = 4 << 20
    max_prompt_chars: AtLeast1 = 100_000
    most_iterations: AtLeast1 = 50
    max_samples: AtLeast1 = 32
    max_tokens: AtLeast1 = 2_048
    requests_per_minute: AtLeast0 = 600
    reads_per_minute: AtLeast0 = 60_000
    sessions: AtLeast1 = 20
    queue: AtLeast0 = 200
    grace_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0


@dataclass(frozen=True)
class Settings:
    """All settings. `llm.endpoint` is `DEFAULT_ENDPOINT` unless there is another generator; `none` means no generator.
    A `database` of '' is a SQLite file in `state`; `port` 0 is any free one; `rlvr.web.logs` reads `log`. `imports` are
    modules that register verifiers of the operator's, which requests may then name."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 3035
    state: Path = Path("runs/service")
    database: str = ""
    llm: TextEndpoint = TextEndpoint(api_key_env="LLM_API_KEY")
    judge: TextEndpoint = TextEndpoint(api_key_env="JUDGE_API_KEY")
    model: str = ""
    demo: bool = False
    imports: tuple[str, ...] = ()
    seed: int = 0
    keys_file: Path | None = None
    dashboard: bool = True
    cors_origins: tuple[str, ...] = ()
    log: str = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    training: TrainingConfig = field(default_factory=TrainingConfig)
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    retention: Retention = field(default_factory=Retention)

    @property
    def generator(self) -> TextEndpoint | str:
        """The generator of answers: an endpoint, or the name of the model in this process."""
        return self.llm or self.model

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.state.absolute() / 'service.sqlite'}"

    def __post_init__(self) -> None:
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
        keep = self.retention.keep_experiences
        if keep is not None and keep < self.training.experience_buffer_size:
            raise ValueError(
                f"retention.keep_experiences={keep}: the buffer holds {self.training.experience_buffer_size} "
                "(training.experience_buffer_size); keep at least as many"
            )
        if not (self.llm.endpoint or self.model or self.demo):
            object.__setattr__(self, "llm", replace(self.llm, endpoint=DEFAULT_ENDPOINT))
        if self.judge and not self.judge.model:
            raise ValueError("JUDGE_ENDPOINT is given without JUDGE_MODEL; give both")
        sources = {"LLM_ENDPOINT": self.llm, "RLVR_MODEL": self.model, "--demo": self.demo}
        generators = [name for name, value in sources.items() if value]
        if len(generators) > 1:
            raise ValueError(f"{' and '.join(generators)} are given; a service has one generator, so give one of them")
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
                raise ValueError(
                    f"cors_origins={origin!r}, expected an origin such as https://example.org, without a path"
                )


def load_settings(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any], warn: Callable[[str], None]
) -> Settings:
    """Load and check the settings. `flags` has dotted keys; a value of None means that the flag was not given."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    file = file or (Path(environment[CONFIG]) if environment.get(CONFIG) else None)
    if file is not None:
        values = _read_file(file)
        origin |= {key: str(file) for key in _leaf_keys(values)}
    for variable, key in environment_names().items():
        if (text := environment.get(variable, "")) != "":
            _set_key(values, key, _parse_variable(text, key), origin, variable)
    for variable in reversed(LOG_VARIABLES):
        if environment.get(variable):
            _set_key(values, "log", environment[variable], origin, variable)
    for key, value in flags.items():
        if value is not None:
            _set_key(
                values, key, str(value) if isinstance(value, Path) else value, origin, f"--{key.rpartition('.')[2]}"
            )
    if flags.get("model") or flags.get("demo"):  # a generator by flag replaces one that is set elsewhere
        values.pop("llm", None)
        values |= {"model": flags.get("model") or "", "demo": bool(flags.get("demo"))}
    for name, default in (("llm", "LLM_API_KEY"), ("judge", "JUDGE_API_KEY")):
        if isinstance(values.get(name), dict):  # a section that is set replaces its default completely
            values[name].setdefault("api_key_env", default)
    for text in _misspelled_variables(environment):
        warn(text)
    return _validate(values, origin)


def _validate(values: dict[str, Any], origin: Mapping[str, str]) -> Settings:
    """Check keys and values. (`rlvr.config` could do it too, and takes 7 MB.)"""
    known = _setting_keys(Settings, "")
    sections = {key.partition(".")[0] for key in known if "." in key}
    mistakes: list[str] = []
    for key in _leaf_keys(values):
        section, source = key.partition(".")[0], _source_text(origin, key)
        if "." in key and section not in sections:
            mistakes.append(f"{section}{source} is no section of settings{did_you_mean(section, sections)}")
        elif key not in known and key not in sections:
            mistakes.append(f"{key}{source} is no setting{did_you_mean(key, known)}")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    for key in known:  # YAML 1.1 reads 1e-3 as text
        *folder, leaf = key.split(".")
        section = values.get(folder[0], {}) if folder else values
        if isinstance(section, dict) and isinstance(section.get(leaf), str) and isinstance(_default_value(key), float):
            with suppress(ValueError):
                section[leaf] = float(section[leaf])
    try:
        return TypeAdapter(Settings).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ValueError("\n".join(_describe_error(one, origin) for one in error.errors())) from None


def _describe_error(error: Any, origin: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}.{message}{_source_text(origin, key)}" if key else message
    return f"{key}={error['input']!r}{_source_text(origin, key)}: {message[0].lower()}{message[1:]}"


def _source_text(origin: Mapping[str, str], key: str) -> str:
    source = origin.get(key) or next((source for other, source in origin.items() if other.startswith(f"{key}.")), "")
    return f" (from {source})" if source else ""


def environment_names() -> dict[str, str]:
    """{variable: key} for all settings except the log level (`LOG_VARIABLES`)."""
    own = set(NAMES.values())
    rest = [key for key in _setting_keys(Settings, "") if key not in own and key != "log"]
    return NAMES | {f"RLVR_{key.rpartition('.')[2].upper()}": key for key in rest}


def _setting_keys(schema: Any, prefix: str) -> list[str]:
    default = schema()
    keys: list[str] = []
    for one in dataclasses.fields(schema):
        value = getattr(default, one.name)
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        keys += _setting_keys(type(value), f"{prefix}{one.name}.") if nested else [f"{prefix}{one.name}"]
    return keys


def _default_value(key: str) -> Any:
    value: Any = Settings()
    for word in key.split("."):
        value = getattr(value, word)
    return value


def _parse_variable(text: str, key: str) -> Any:
    """The value of a variable with the type that the key has in a file."""
    import yaml

    kind = _default_value(key)
    if isinstance(kind, tuple):
        return [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(kind, (str, Path)) or key == "keys_file":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # refused later, with the name of the variable


def _read_file(file: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"settings file {file} cannot be read ({error}); give a readable YAML file") from error
    except yaml.YAMLError as error:
        raise ValueError(f"settings file {file} is not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"settings file {file}: expected keys and values, e.g. `port: 3035`")
    return values


def _leaf_keys(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in values.items():
        keys += _leaf_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return keys


def _set_key(values: dict[str, Any], key: str, value: Any, origin: dict[str, str], source: str) -> None:
    *folders, leaf = key.split(".")
    for folder in folders:
        inner = values.get(folder)
        if not isinstance(inner, dict):  # `llm: text` in a file is refused later
            inner = values[folder] = {} if inner is None else inner
        if not isinstance(inner, dict):
            return
        values = inner
    values[leaf] = value
    origin[key] = source


def _misspelled_variables(environment: Mapping[str, str]) -> list[str]:
    """Warnings for variables that look like a misspelled one of ours."""
    import difflib

    known = {*environment_names(), *LOG_VARIABLES, CONFIG, "RLVR_API_KEYS", "RLVR_API_KEY"}
    warnings: list[str] = []
    for name in environment:
        if name.startswith("RLVR_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            warnings += [f"{name} is no setting of the service (did you mean {near[0]}?)"] if near else []
    return warnings
