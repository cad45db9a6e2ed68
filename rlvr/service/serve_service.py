"""`rlvr serve`: build the service from its settings and serve it with uvicorn until a signal.

    rlvr serve --port 3035                      # LLM_ENDPOINT or RLVR_MODEL name the generator
    rlvr serve --demo --no-dashboard

Settings are checked before the port answers. A model is loaded after that; /health reports its progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from socket import socket
from typing import TYPE_CHECKING, Any

from rlvr.core.gc_pause import paused_collection
from rlvr.core.plugins import import_modules
from rlvr.engine import malloc
from rlvr.service.http.app import create_app
from rlvr.service.settings import Settings
from rlvr.web.auth import ApiKeys
from rlvr.web.logs import get_logger, start_logging, write_as_json
from rlvr.web.server import BackgroundServer, bind_socket, check_exposure, run_server, server_url

if TYPE_CHECKING:
    from rlvr.service.http.runtime import Service

REPORT_SECONDS = 2.5
PRUNE_SECONDS = 3_600.0


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM: sessions then finish the iteration they are at and are marked interrupted."""
    keys, listening = open_socket(settings)
    with listening:
        if start_logging(settings.log, settings.log_format):
            say = write_as_json
        with paused_collection():
            service = build(settings, keys, listening.getsockname()[1])

        def announce() -> None:
            for line in startup_lines(service, server_url(listening)):
                say(line)

        def begin_stop() -> None:  # in the signal handler: requests that wait for a session get their response
            if service.loop is not None:
                service.loop.call_soon_threadsafe(service.begin_stop)

        try:
            app, options = build_app(service, say)
            run_server(app, listening, on_ready=announce, on_stop=begin_stop, **options)
            say("stopped")
        finally:
            service.store.close()


@contextmanager
def open_service(
    settings: Settings, say: Callable[[str], None]
) -> Iterator[tuple[BackgroundServer, Callable[[], None], str]]:
    """Serve in the block: the server, what ends the requests that wait, and the address. The log is the caller's."""
    keys, listening = open_socket(settings)
    with listening:
        with paused_collection():
            service = build(settings, keys, listening.getsockname()[1])
        try:
            app, options = build_app(service, say)
            with BackgroundServer(app, listening, **options) as server:
                for line in startup_lines(service, server_url(listening)):
                    say(line)
                yield server, service.begin_stop, server_url(listening)
        finally:
            service.store.close()


def open_socket(settings: Settings) -> tuple[ApiKeys, socket]:
    """The keys, and the socket that listens; ValueError if other machines could reach it and there are no keys."""
    keys = ApiKeys.load(settings.keys_file)
    check_exposure(settings.host, keys)
    return keys, bind_socket(settings.host, settings.port)


def build_app(service: Service, say: Callable[[str], None]) -> tuple[Any, dict[str, Any]]:
    """The application, and the options of uvicorn for it."""
    options = {
        "server_header": False,
        "lifespan": "on",
        "ws": "none",
        "timeout_graceful_shutdown": int(service.settings.limits.grace_seconds) + 5,
    }
    return create_app(service, lambda app: lifespan(service, say)), options


def build(settings: Settings, keys: ApiKeys, port: int) -> Service:
    """Build the parts; none of them runs yet. ValueError if the database cannot be used, or an import fails."""
    from rlvr.service.generators.build_generator import build_generator, build_judge
    from rlvr.service.http.runtime import Service, claim_instance_name
    from rlvr.service.sessions.sessions import Sessions
    from rlvr.store import StoreDown, open_store

    import_modules(settings.imports)
    try:
        settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"state={settings.state}: this folder cannot be made ({error.strerror}); give another --state"
        ) from error
    try:
        store = open_store(settings.database_url, settings.training.experience_buffer_size)
    except StoreDown as error:
        raise ValueError(f"the database cannot be used: {error}; start it, or give another --database") from error
    instance, holds = claim_instance_name(settings.state, port)
    generator, judge = build_generator(settings, store, instance), build_judge(settings)
    sessions = Sessions(settings, store, generator, instance, judge=judge)
    return Service(settings, store, sessions, generator, keys, instance, judge, holds)


@asynccontextmanager
async def lifespan(service: Service, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Start and end what runs beside the requests."""
    service.loop = asyncio.get_running_loop()
    await service.sessions.open()
    if service.judge is not None:
        service.judge.start()
    beside = (prune_periodically(service), report_loading(service, say), return_memory_periodically())
    tasks = [asyncio.create_task(work) for work in beside]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await service.stop()


async def report_loading(service: Service, say: Callable[[str], None]) -> None:
    """Tell how far the generator is, every few seconds until it is loaded."""
    told = ""
    while (health := service.generator.health())["state"] == "loading":
        await asyncio.sleep(REPORT_SECONDS)
        if health["detail"] != told:
            told = health["detail"]
            say(f"generator: {told}")
    if told:
        say(f"generator: {health['state']}, {health['detail']}")


async def prune_periodically(service: Service) -> None:
    """Delete what is older than the retention settings allow, now and every hour."""
    from rlvr.store import StoreDown

    retention = service.settings.retention
    while retention.keep_days or retention.keep_experiences:
        try:
            experiences, sessions = await asyncio.to_thread(service.store.prune, retention)
            if experiences or sessions:
                get_logger("rlvr.service").info("pruned", experiences=experiences, sessions=sessions)
        except StoreDown as error:
            get_logger("rlvr.service").warning("nothing pruned", reason=str(error))
        await asyncio.sleep(PRUNE_SECONDS)


async def return_memory_periodically() -> None:
    """Give back the memory that large requests left free, which malloc would keep for the next ones."""
    while True:
        await asyncio.sleep(malloc.TRIM_SECONDS)
        await asyncio.to_thread(malloc.release_free_memory, malloc.KEPT_BYTES)


def startup_lines(service: Service, url: str) -> list[str]:
    """The address, the generator, and what to do next."""
    settings, health = service.settings, service.generator.health()
    lines = [f"listening at {url}"]
    if health["state"] == "absent":
        lines.append("no generator: /train answers 503 until LLM_ENDPOINT or RLVR_MODEL is set, or with --demo")
    else:
        name = health["name"] or settings.model or "demo"
        state = "" if health["state"] == "ready" else f" ({health['state']})"  # an endpoint was not called yet
        lines.append(f"generator: {health['kind']} {name}{state}, learns: {health['learns']}")
    if service.judge is not None:
        judge = service.judge.health()
        lines.append(f"judge: {judge['kind']} {judge['name']} ({judge['state']})")
    if not service.keys:
        lines.append("no API keys: every account of this machine can use it")
    from rlvr.store.connections import parse_url

    lines.append(f"database: {parse_url(settings.database_url).render_as_string(hide_password=True)}")
    if settings.dashboard:
        lines.append(f"dashboard: {url}/")
    return lines
