"""`rlvr.serve`: the engine server, or the service of sessions, beside a program that goes on.

with rlvr.serve(run) as server:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none-needed")

It is what `rlvr serve engine` and `rlvr serve` serve, on a thread of this process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from rlvr.config.compose import to_word
from rlvr.core.registry import did_you_mean
from rlvr.engine.engine_options import EngineLimits
from rlvr.runs.library import Run, name_caller
from rlvr.runs.program_settings import argument_error, flatten, read_model, read_path
from rlvr.runs.user_messages import name_missing_extra, print_message
from rlvr.web.logs import log_to_file

Keys = Mapping[str, Any]
OPTIONS = {"trainers": "trainers", "samplers-folder": "sampler={'folder': ...}", "alias": "aliases"}
_SECTIONS = ("engine", "limits", "wire", "sampler", "sharding")  # of the engine server's settings


class ServeArguments(TypedDict, total=False):
    """The settings of both servers; each refuses those of the other."""

    keys: str | Path
    log: str
    limits: Keys
    # Of the engine server.
    device: str
    dtype: str
    trainers: int
    aliases: Mapping[str, str]
    engine: EngineLimits | Keys
    wire: Keys
    sampler: Keys
    sharding: Keys
    # Of the service.
    config: str | Path
    database: str
    demo: bool
    dashboard: bool
    seed: int
    imports: Sequence[str]
    llm: Keys
    judge: Keys
    training: Keys
    retention: Keys
    cors_origins: Sequence[str]


_OF_ENGINE = ("keys", "log", "device", "dtype", "trainers", "aliases", *_SECTIONS)
_OF_SERVICE = (
    "keys", "log", "limits", "config", "database", "demo", "dashboard", "seed", "imports", "llm", "judge", "training",
    "retention", "cors_origins",
)  # fmt: skip


class RunningServer:
    """A server of this process: its `url`, and what it serves. A context manager; leaving it closes the server."""

    def __init__(self, opened: ExitStack, url: str, what: str) -> None:
        self.url, self.what = url, what
        self._opened: ExitStack | None = opened
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    def close(self) -> None:
        """Finish the current requests, write every training run to disk, and end. May be called again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            atexit.unregister(self.close)
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RunningServer of {self.what} at {self.url}{'' if self.is_open else ', closed'}>"


def serve(
    model: Any = None,
    *,
    service: bool = False,
    port: int = 0,
    host: str = "127.0.0.1",
    state: str | Path | None = None,
    quiet: bool = False,
    **settings: Unpack[ServeArguments],
) -> RunningServer:
    """Start the engine server, or with `service=True` the service of sessions, and return once it answers.

    - `model`: a folder, a name of the hub, a GGUF file, a `Run` (its newest weights, also while it trains), a
      checkpoint, or a model of transformers; for the engine server also several of these by the names for clients:
      `{"base": "./my-model", "mine": run}`. The service takes one, or none with `demo=True` or `llm={"endpoint": ...}`.
    - `port`: 0 is any free one; `url` of the result has it. `host`: other than local addresses need `keys`, a file.
    - `state`: the folder of what survives a restart, by default `runs/server`, of the service `runs/service`.
    - `settings`: those of `rlvr serve engine` (`device`, `trainers`, `engine={"threads": 2}`, `limits`, ...), or of
      `rlvr serve` (`database`, `dashboard`, `training={"max_iterations": 4}`, ...). `log` is a log level.

    The service answers while its model is loaded: `/health/ready` is 200 when it is there, and sessions get 503 until
    then.

    The server works on a thread of this process until `close()`, the end of the `with` block, or of the program. Its
    log is `server.log` in `state`. ValueError for what cannot be served, or a port that is taken.
    """
    with name_caller("rlvr.serve", options=OPTIONS):
        known = _OF_SERVICE if service else _OF_ENGINE
        if unknown := [name for name in settings if name not in known]:
            other = _OF_ENGINE if service else _OF_SERVICE
            here = "the service" if service else "the engine server"
            belongs = f" it is one of {'the engine server' if service else 'the service (service=True)'};"
            raise argument_error(
                f"{unknown[0]!r} is no setting of {here}{did_you_mean(unknown[0], known)};"
                f"{belongs if unknown[0] in other else ''} expected one of {', '.join(known)}"
            )
        if isinstance(port, bool) or not isinstance(port, int):
            raise argument_error(f"port={port!r}, expected a whole number; 0 takes any free port")
        say = _ignore if quiet else print_message
        for name, kind, expected in (("log", str, "a log level, as text"), ("trainers", int, "a whole number")):
            if not isinstance(settings.get(name, kind()), kind):
                raise argument_error(f"{name}={settings[name]!r}, expected {expected}")
        if (keys := settings.get("keys")) is not None:
            read_path("keys", keys)
        place = read_path("state", state) if state is not None else Path("runs") / ("service" if service else "server")
        open_it = _open_service if service else _open_engine
        opened = ExitStack()
        try:
            url, what = opened.enter_context(open_it(model, place, host, port, dict(settings), say))
        except BaseException:
            opened.close()
            raise
    return RunningServer(opened, url, what)


def _ignore(text: str) -> None:
    pass


@contextmanager
def _open_engine(
    model: Any, state: Path, host: str, port: int, settings: dict[str, Any], say: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    with name_missing_extra("serving", "train,serve"):
        from rlvr.tinker_server.serve_engine import ServeOptions, log_file, open_server
        from rlvr.tinker_server.server_settings import load_settings
    words = [
        to_word(key, value)
        for section in _SECTIONS
        if section in settings
        for key, value, is_default in flatten(section, settings.pop(section))
        if not is_default
    ]
    aliases = settings.pop("aliases", None) or {}
    if not isinstance(aliases, Mapping):
        raise argument_error(f"aliases={aliases!r:.80}, expected losses by name: {{'stable_reinforce': 'cispo'}}")
    options = ServeOptions(
        _name_models(model, state),
        host,
        port,
        state,
        dict(aliases),
        keys=Path(settings["keys"]) if settings.get("keys") else None,
        settings=load_settings(words),
        log_level=settings.get("log", "info"),
        **{name: settings[name] for name in ("device", "dtype", "trainers") if name in settings},
    )
    with ExitStack() as log:
        begin_log = lambda: log.enter_context(log_to_file(options.log_level, log_file(options)))  # noqa: E731
        with open_server(options, say, begin_log) as (server, begin_stop, url):
            yield url, ", ".join(text.partition("=")[0] for text in options.models)
            server.call_soon(begin_stop)


def _name_models(model: Any, state: Path) -> list[str]:
    """The models as `--model` takes them."""
    if model is None:
        raise argument_error("model is missing; give a folder, a name of the hub, or a run")
    if isinstance(model, Mapping) and "model_type" in model:
        raise argument_error("model is a configuration, which has no weights; give a folder, or a model")
    if isinstance(model, Mapping):
        if wrong := next((name for name in model if not name or "=" in str(name)), None):
            raise argument_error(f"model has the name {wrong!r}, expected one for clients, without =")
        return [f"{name}={_find_place(one, state)}" for name, one in model.items()]
    given = model if isinstance(model, (list, tuple)) else [model]
    return [_find_place(one, state) for one in given]


def _find_place(model: Any, state: Path) -> str:
    return str(model.folder) if isinstance(model, Run) else str(read_model(model, {}, state)["model.name"])


@contextmanager
def _open_service(
    model: Any, state: Path, host: str, port: int, settings: dict[str, Any], say: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    with name_missing_extra("the service", "serve"):
        from rlvr.service.serve_service import open_service
        from rlvr.service.settings import load_settings
    if isinstance(model, (list, tuple, dict)):
        raise argument_error("the service has one model; give one, or leave service=True out to serve several")
    place = None if model is None else _find_place(model, state)
    file, keys = (Path(settings.pop(name)) if settings.get(name) else None for name in ("config", "keys"))
    sections = ("limits", "llm", "judge", "training", "retention")
    flags = {
        key: plain
        for name, value in settings.items()
        for key, plain, _ in (flatten(name, value) if name in sections else [(name, value, False)])
    }
    flags = {**flags, "port": port, "host": host, "state": state, "model": place, "keys_file": keys}
    read = load_settings(file, os.environ, flags, lambda text: print_message(f"warning: {text}"))
    with log_to_file(read.log, read.state / "server.log"), open_service(read, say) as (server, begin_stop, url):
        yield url, "the service"
        server.call_soon(begin_stop)
