"""`rlvr serve engine`: listen, load models, build a `TinkerBackend` on them, and serve it until a signal.

The options are checked before anything is loaded. The server listens from then on and holds requests until the models
are loaded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.clients.local_engine import ModelBuild
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.core.gc_pause import paused_collection
from rlvr.core.model_files import find_broken_file, find_broken_tokenizer
from rlvr.core.weights_place import MODEL_CONFIG, WeightsPlace
from rlvr.engine.gguf_files import open_gguf
from rlvr.tinker_server.backend.quotas import ANY_KEY, KEY_PREFIX
from rlvr.tinker_server.backend.sampling.served_runs import BaseOfRun, RunWeights, base_of_run, is_followed
from rlvr.tinker_server.protocol.errors import TinkerServerError
from rlvr.tinker_server.server_settings import ServerSamplers, ServerSettings
from rlvr.training.initial_weights import newest_weights
from rlvr.web.auth import ApiKeys
from rlvr.web.logs import parse_filter, start_logging
from rlvr.web.server import BackgroundServer, bind_socket, check_exposure, is_loopback, server_url

if TYPE_CHECKING:
    from rlvr.engine.engine import GradientSource
    from rlvr.engine.engine_options import EngineLimits
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend

SETTINGS_OF_RUNS = ("sharding.ranks", "sharding.allow_other_ranks")  # of the section that a server has too
EXTRA = 'pip install "rlvr[train,serve]"'


@dataclass(frozen=True)
class ServeOptions:
    """The options of `rlvr serve engine`. `models` are `folder`, `hub/name` or `name=folder`; each model's adapters are
    trained by `trainers` processes of its own, or in this one if that is 0."""

    models: list[str]
    host: str = "127.0.0.1"
    port: int = 8000
    state: Path = Path("runs/server")
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    keys: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    settings: ServerSettings = field(default_factory=ServerSettings)
    trainers: int = 0
    log: Path | None = None
    log_level: str = "info"


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; when this returns every training run is on disk."""

    def log() -> None:
        start_logging(options.log_level, "json", file=log_file(options))

    with open_server(options, say, log) as (server, begin_stop, _):
        server.wait(begin_stop)
        say("stopping: the current request is finished, then every training run is written to disk")


def log_file(options: ServeOptions) -> Path:
    return options.log or options.state / "server.log"


@contextmanager
def open_server(
    options: ServeOptions, say: Callable[[str], None], log: Callable[[], object]
) -> Iterator[tuple[BackgroundServer, Callable[[], None], str]]:
    """Load the models and serve in the block: the server, what ends the requests that wait, and the address.

    `log` begins the log, once the options are found to be right. At the end every training run is written to disk.
    """
    try:
        import uvicorn  # noqa: F401 - report a missing package before anything is loaded

        from rlvr.tinker_server.backend.tinker_backend import validate_aliases
        from rlvr.tinker_server.http.tinker_middleware import TinkerMiddleware
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    named, limits = named_models(options.models), options.settings.limits
    validate_aliases(options.aliases)
    check_samplers(named, options.settings.sampler)
    check_trainers(options)
    parse_filter(options.log_level)
    keys = ApiKeys.load(options.keys, KEY_PREFIX)
    check_exposure(options.host, keys, KEY_PREFIX)
    listening = bind_socket(options.host, options.port)
    with listening:
        url = server_url(listening)
        try:
            options.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--state {options.state}: this folder cannot be made ({error.strerror}); give another one"
            ) from error
        log()
        middleware = TinkerMiddleware(keys, limits, options.settings.wire)

        def report(progress: str) -> None:
            middleware.progress = progress

        say(f"loading {', '.join(named)}; requests to {url} wait until that is done")
        with BackgroundServer(middleware, listening, timeout_graceful_shutdown=limits.stop_seconds) as server:
            with paused_collection():
                backend, app = load_backend(named, options, middleware, report)
            try:
                server.call_soon(middleware.open, app)
                for line in startup_lines(options, backend, keys, url):
                    say(line)
                yield server, middleware.polls.close, url
            finally:
                server.stop()
                backend.close()
                for engine in dict.fromkeys(backend.engines.values()):
                    if engine.trainers is not None:
                        engine.trainers.close()


def load_backend(
    named: dict[str, str], options: ServeOptions, middleware: Any, report: Callable[[str], None]
) -> tuple[TinkerBackend, Any]:
    """Load the models, and build the backend on them and its routes."""
    try:
        from rlvr.clients.vllm.vllm_clients import connect_servers
        from rlvr.tinker_server.backend.sampling.vllm_sampling import PublishedAdapters
        from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
        from rlvr.tinker_server.http.app import create_routes
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    servers = options.settings.sampler
    publisher = connect_servers(servers.options(), keep=sys.maxsize) if servers.urls else None
    engines = load_engines(named, options, report)
    served_runs: dict[str, RunWeights] = {}
    for name, folder in named.items():
        if is_followed(place := Path(folder).expanduser()):
            served_runs[name] = RunWeights(place, engines[name])
            try:
                served_runs[name].newest()
            except TinkerServerError as error:
                raise ValueError(f"--model {name}: {error}") from error
    bases = {name: folder for name, folder in named.items() if name not in served_runs}
    tokenizers = local_tokenizers(bases) if is_loopback(options.host) else {}
    samplers: dict[str, PublishedAdapters] = {}
    if publisher is not None:
        report("the vLLM servers are tried")
        folder = Path(servers.folder or options.state / "published").expanduser()
        adapters = PublishedAdapters(engines[next(iter(bases))], publisher, folder, servers.adapters)
        adapters.check(options.settings.limits.max_rank)
        samplers = dict.fromkeys(bases, adapters)
    limits = options.settings.limits
    if limits.live_bytes is None:
        from rlvr.engine.kv_cache import free_bytes

        free = min(free_bytes(engine.model.device) for engine in engines.values())
        limits = replace(limits, live_bytes=max(1, int(limits.live_share * free / len(set(engines.values())))))
    backend = TinkerBackend(
        engines,
        options.state,
        aliases=options.aliases,
        tokenizers=tokenizers,
        served_runs=served_runs,
        samplers=samplers,
        limits=limits,
    )
    return backend, create_routes(backend, middleware)


def _missing(error: ModuleNotFoundError) -> ValueError:
    return ValueError(f"{error.name} is not installed; serving needs two extras: {EXTRA}")


def named_models(given: list[str]) -> dict[str, str]:
    """Parse --model texts into {name for clients: folder or hub name}."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).exists():
            name, folder = text, text
        if not name or not folder:
            raise ValueError(f"--model {text!r}: expected a folder, a hub name, or name=folder")
        if name in found:
            raise ValueError(
                f"--model {name!r} is given twice; write name=folder to serve a second one by another name"
            )
        folder = open_gguf(folder)
        newest, is_run = WeightsPlace.of(newest_weights(folder, "--model")), is_followed(Path(folder).expanduser())
        # `runs/mine` next to a folder runs/ is a missing folder: it is not looked up on the hub.
        looks_local = folder.startswith((".", "/", "~")) or folder.count("/") != 1 or newest.folder.parent.is_dir()
        if looks_local and not newest.is_model and not is_run:
            if newest.folder.is_dir():
                wrong = f"no {MODEL_CONFIG} there"
            else:
                wrong = "it is a file" if newest.folder.exists() else newest.problem
            raise ValueError(
                f"--model {text!r}: {folder} is not a folder with a model ({wrong}); expected one written "
                "by save_pretrained or a download, a run of `rlvr train` or one of its checkpoints, or the name of a "
                "model on the hub (owner/name)"
            )
        if newest.is_model and (wrong := find_broken_file(newest.folder) or find_broken_tokenizer(newest.folder)):
            raise ValueError(f"--model {text!r}: {wrong}")
        found[name] = folder if not looks_local or is_run else str(newest.folder)
    if not found:
        raise ValueError("no model is given; expected --model with a folder, a hub name, or name=folder")
    return found


def check_samplers(named: dict[str, str], servers: ServerSamplers) -> None:
    """ValueError unless vLLM servers have one base model to sample from."""
    folders = [Path(folder).expanduser() for folder in named.values()]
    bases = {resolve_folder(str(folder)) for folder in folders if not is_followed(folder)}
    if servers.urls and len(bases) != 1:
        raise ValueError(
            f"--samplers: {len(bases)} base models are given; vLLM servers sample from one: give one --model that is "
            "no training run, and start another server for each other model"
        )


def parse_aliases(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if bad := [text for text, (name, _, loss) in zip(given, pairs, strict=True) if not (name and loss)]:
        raise ValueError(f"--alias {bad[0]!r}: expected name=loss, e.g. stable_reinforce=cispo")
    return {name: loss for name, _, loss in pairs}


def local_tokenizers(named: dict[str, str]) -> dict[str, str]:
    """{model: its folder} with tokenizer files, so that clients on this machine need no hub.

    A folder with a colon is left out: the SDK cuts an id at its first colon.
    """
    folders = {name: str(Path(folder).expanduser().absolute()) for name, folder in named.items()}
    return {
        name: folder
        for name, folder in folders.items()
        if (Path(folder) / "tokenizer_config.json").exists() and ":" not in folder
    }


def load_engines(named: dict[str, str], options: ServeOptions, report: Callable[[str], None]) -> dict[str, Any]:
    """{name: engine}. Names of one folder, however it is written, share an engine, which is loaded once."""
    try:
        import torch

        from rlvr.engine.engine import Engine
        from rlvr.engine.kv_cache import count_cache_tokens
        from rlvr.engine.tokenizer import load_tokenizer, silence_transformers
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    silence_transformers()
    limits, share = options.settings.engine, options.settings.limits.cache_share
    if limits.threads:
        torch.set_num_threads(limits.threads)
    where = {"device": options.device, "dtype": options.dtype}

    builds: dict[str, Callable[[], ModelBuild]] = {}  # of the models that are trained here, by key

    def base_of(folder: str) -> BaseOfRun:
        if is_followed(place := Path(folder).expanduser()):
            return base_of_run(place, **where)
        if wrong := WeightsPlace.of(folder).damage:
            raise ValueError(f"--model {folder}: the checkpoint is damaged: {wrong}; give another one")

        def build() -> ModelBuild:
            return ModelBuild(folder, {}, load_tokenizer(folder), 0, **where)

        builds[key := resolve_folder(folder)] = build
        return BaseOfRun(key, lambda: build().load())

    bases = {name: base_of(folder) for name, folder in named.items()}
    loads = {base.key: base.load for base in bases.values()}
    models: dict[str, Any] = {}
    for number, (place, load) in enumerate(loads.items(), 1):
        report(f"model {number} of {len(loads)} is being loaded")
        models[place] = load()
    engines: dict[str, Any] = {}
    for place, model in models.items():
        room = limits.cache_tokens or count_cache_tokens(model, share / len(models))
        engine_limits = replace(limits, cache_tokens=room)
        trainers = start_trainers(builds[place](), model, engine_limits, options) if place in builds else None
        engines[place] = Engine(model, engine_limits, trainers)
    return {name: engines[base.key] for name, base in bases.items()}


def check_trainers(options: ServeOptions) -> None:
    """ValueError for trainers, or settings of them, that cannot be."""
    if options.trainers < 0:
        raise ValueError(f"--trainers {options.trainers}, expected at least 0 (0: train in the server's own process)")
    sharding, default = options.settings.sharding, ShardingOptions()
    for key in SETTINGS_OF_RUNS:
        name = key.removeprefix("sharding.")
        if getattr(sharding, name) != getattr(default, name):
            raise ValueError(f"{key} is a setting of runs, without effect here; give --trainers")
    if not options.trainers and sharding != default:
        raise ValueError("the section sharding has no effect without --trainers; leave it out, or give --trainers 2")


def start_trainers(build: ModelBuild, model: Any, limits: EngineLimits, options: ServeOptions) -> GradientSource | None:
    """The ranks that train adapters of one model; None without `--trainers`."""
    if not options.trainers:
        return None
    import torch

    from rlvr.clients.sharded.adapter_trainers import AdapterTrainers
    from rlvr.engine.policy import tensors_sha256

    sharding = replace(options.settings.sharding, ranks=options.trainers)
    threads = max(1, torch.get_num_threads() // options.trainers) if sharding.ray is None else sharding.cpus_per_rank
    if build.name and Path(build.name).exists():
        build = replace(build, name=str(Path(build.name).absolute()))  # ranks elsewhere have folders of their own
    return AdapterTrainers(build, tensors_sha256(model.parameters()), limits, sharding, threads)


def resolve_folder(folder: str) -> str:
    """One text for all ways to write a folder: relative, through a link, with a slash. A hub name stays as it is."""
    place = Path(folder).expanduser()
    return str(place.resolve()) if place.exists() else folder


def startup_lines(options: ServeOptions, backend: TinkerBackend, keys: ApiKeys, url: str) -> list[str]:
    """The models, the address, and how to use it."""
    from rlvr.tinker_server.backend.tinker_backend import group_names

    lines: list[str] = []
    for names in group_names(backend.engines):
        engine = backend.engines[names[0]]
        size = sum(parameter.numel() for parameter in engine.model.parameters().values())
        kind = f"{size / 1e6:,.1f} M parameters, context {engine.model.context}, {engine.model.dtype}".replace(
            "torch.", ""
        )
        lines.append(f"serving {' and '.join(names)} ({kind}, {engine.model.device})")
        if engine.trainers is not None:
            lines.append(f"its adapters are trained by {options.trainers} processes, each with a part of the model")
    for name, run in backend.served_runs.items():
        lines.append(f"{name} is the policy of {run.place}, now {run.newest().fingerprint}")
    if not keys:
        lines.append("no API keys: every account of this machine can use it")
    if servers := options.settings.sampler.urls:
        lines.append(f"vLLM samples at {', '.join(servers)}")
    for name, loss in options.aliases.items():
        lines.append(f"alias: loss_fn {name} is computed as {loss}, which is another loss")
    lines.append(f"listening at {url}, state in {options.state}")
    key = "<one of the server's keys>" if keys else ANY_KEY
    lines.append(f"use it: export TINKER_BASE_URL={url} TINKER_API_KEY={key}")
    logging.getLogger("rlvr").info("serving %s at %s", ", ".join(backend.engines), url)
    return lines
