"""`rlvr serve engine`: load models, build a `TinkerBackend` on them, and serve it with uvicorn until a signal.

The options are checked before a model is loaded. Exercised by tests/test_tinker_serve.py
and, through tests/tinker_server.py, by every test that talks to a real server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.clients.local_engine import is_model
from rlvr.tinker_server.sampling.quotas import KEY_PREFIX
from rlvr.tinker_server.server_limits import ServerLimits
from rlvr.training.initial_weights import newest_weights
from rlvr.web.auth import ApiKeys
from rlvr.web.logs import parse_filter, start_logging
from rlvr.web.server import bind_socket, check_exposure, is_loopback, run_server, server_url

EXTRA = 'pip install "rlvr[train,serve]"'
ONE_REQUEST = 0.75  # the most of the rows; the rest is for other requests
CACHE_SHARE = 0.5  # of the memory that is free when the models are loaded, for the KV cache
ANY_KEY = "tml-no-key-needed"  # the SDK requires a key


@dataclass(frozen=True)
class ServeOptions:
    """The options of `rlvr serve engine`. `models` are `folder`, `hub/name` or `name=folder`."""

    models: list[str]
    host: str = "127.0.0.1"
    port: int = 8000
    state: Path = Path("runs/server")
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    keys: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    max_rows: int = 512
    cache_tokens: int | None = None  # None: as memory allows, 0: unbounded
    limits: ServerLimits = field(default_factory=ServerLimits)
    max_body: int = 64 << 20
    log: Path | None = None
    log_level: str = "info"


def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; when this returns every training run is on disk."""
    try:
        import fastapi  # noqa: F401 - report a missing package before anything is loaded
        import uvicorn  # noqa: F401

        from rlvr.tinker_server.backend import TinkerBackend, validate_aliases
        from rlvr.tinker_server.http.app import create_app
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; serving needs two extras: {EXTRA}") from error

    named = named_models(options.models)
    validate_aliases(options.aliases)
    if options.cache_tokens is not None and options.cache_tokens < 0:
        raise ValueError(f"--cache-tokens {options.cache_tokens}: expected a number of tokens, or 0 for no limit")
    parse_filter(options.log_level)
    keys = ApiKeys.load(options.keys, KEY_PREFIX)
    check_exposure(options.host, keys, KEY_PREFIX)
    listening = bind_socket(options.host, options.port)
    with listening:
        try:
            options.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--state {options.state}: this folder cannot be made ({error.strerror}); give another one"
            ) from error
        start_logging(options.log_level, "json", file=options.log or options.state / "server.log")
        models = {name: load(folder, options) for name, folder in named.items()}
        engines = {name: build_engine(model, options, len(models)) for name, model in models.items()}
        tokenizers = local_tokenizers(named) if is_loopback(options.host) else {}
        backend = TinkerBackend(
            engines, options.state, aliases=options.aliases, tokenizers=tokenizers, limits=options.limits
        )
        try:
            app = create_app(backend, keys, max_body=options.max_body)

            def announce() -> None:
                for line in startup_lines(options, engines, keys, server_url(listening)):
                    say(line)

            run_server(app, listening, on_ready=announce, on_stop=app.polls.close, timeout_graceful_shutdown=10)
            say("stopping: the current request is finished, then every training run is written to disk")
        finally:
            backend.close()


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
        place = newest_weights(folder, "--model")
        # `runs/mine` next to a folder runs/ is a missing folder: it is not looked up on the hub.
        looks_local = folder.startswith((".", "/", "~")) or folder.count("/") != 1 or place.parent.is_dir()
        if looks_local and not is_model(place):
            wrong = "no config.json there" if place.is_dir() else f"{place.parent} holds no {place.name}"
            raise ValueError(
                f"--model {text!r}: {folder} is not a folder with a model ({wrong}); expected one written "
                "by save_pretrained or a download, a run of `rlvr train` that trained a whole model, or the name of a "
                "model on the hub (owner/name)"
            )
        found[name] = str(place) if looks_local else folder
    if not found:
        raise ValueError("no model is given; expected --model with a folder, a hub name, or name=folder")
    return found


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


def load(folder: str, options: ServeOptions) -> Any:
    try:
        import torch

        from rlvr.engine.model_loading import load_model
        from rlvr.engine.tokenizer import load_tokenizer, silence_transformers
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; serving needs two extras: {EXTRA}") from error
    silence_transformers()
    if options.threads:
        torch.set_num_threads(options.threads)
    return load_model(folder, load_tokenizer(folder), device=options.device, dtype=options.dtype)


def build_engine(model: Any, options: ServeOptions, models: int) -> Any:
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits

    room = cache_tokens(model, models) if options.cache_tokens is None else options.cache_tokens
    return Engine(model, EngineLimits(max_rows=options.max_rows, one_request=ONE_REQUEST, cache_tokens=room))


def cache_tokens(model: Any, models: int) -> int:
    """The KV cache slots of one of `models` models; longer completions take turns.

    Without this limit a client with many long completions would use up all memory. 0, unlimited, if the model's config
    does not give the size of a slot.
    """
    import torch

    config = model.module.config.get_text_config()
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    except AttributeError:
        return 0
    free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else free_memory()
    return max(model.context, int(CACHE_SHARE * free / models / size))


def free_memory() -> int:
    """Free bytes of this machine, or of its control group."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(0, min(found))


def startup_lines(options: ServeOptions, engines: dict[str, Any], keys: ApiKeys, url: str) -> list[str]:
    """The models, the address, and how to use it."""
    lines: list[str] = []
    for name, engine in engines.items():
        size = sum(parameter.numel() for parameter in engine.model.parameters().values())
        kind = f"{size / 1e6:,.1f} M parameters, context {engine.model.context}, {engine.model.dtype}".replace(
            "torch.", ""
        )
        lines.append(f"serving {name} ({kind}, {engine.model.device})")
    if not keys:
        lines.append("no API keys: every account of this machine can use it")
    for name, loss in options.aliases.items():
        lines.append(f"alias: loss_fn {name} is computed as {loss}, which is another loss")
    lines.append(f"listening at {url}, state in {options.state}")
    key = "<one of the server's keys>" if keys else ANY_KEY
    lines.append(f"use it: export TINKER_BASE_URL={url} TINKER_API_KEY={key}")
    logging.getLogger("rlvr").info("serving %s at %s", ", ".join(engines), url)
    return lines
