"""`rlvr serve`: settings become a service, and uvicorn answers for it until it is told to stop.

    rlvr serve --port 3035                      # LLM_ENDPOINT or RLVR_MODEL say who generates
    rlvr serve --demo --no-dashboard

What can be wrong with the settings is found before the port answers; a model is loaded after that, and /health says how
far it is. Exercised by tests/test_service_starts.py and, through tests/rlvr_service.py, by every test that talks to a
real service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from rlvr.service.settings import Settings

if TYPE_CHECKING:
    from rlvr.service.http.runtime import Service

EXTRA = 'pip install "rlvr[serve]"'
WAITING = 2_048  # connections that wait to be taken
PRUNE_SECONDS = 3_600.0


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM: sessions then finish the iteration they are at and are marked interrupted."""
    try:
        import uvicorn

        from rlvr.service.http.app import create_app
        from rlvr.service.listening import bound, check_exposure, most_connections, protocol_class, server_class, url_of
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; the service needs: {EXTRA}") from error
    from rlvr.service.keys import Keys
    from rlvr.service.logs import start_logging

    keys = Keys.load(settings.keys_file)
    check_exposure(settings.host, keys)
    with bound(settings.host, settings.port) as listening:
        try:
            listening.listen(WAITING)  # of two that start at once the second is told now
        except OSError as error:
            raise ValueError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
        start_logging(settings.log, settings.log_format)
        service = build(settings, keys, listening.getsockname()[1])
        try:
            config = uvicorn.Config(
                create_app(service, lambda app: living(service)),
                http=protocol_class(),
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                lifespan="on",
                ws="auto" if settings.dashboard else "none",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(settings.limits.grace_seconds) + 5,
                limit_concurrency=most_connections(),
            )

            def begun() -> None:
                for line in welcome(service, url_of(listening)):
                    say(line)

            server_class(uvicorn)(config, begun, stopper(service)).run(sockets=[listening])
            say("stopped")
        finally:
            service.store.close()


def build(settings: Settings, keys: Any, port: int) -> Service:
    """The parts, none of them running yet. ValueError where the database cannot be used."""
    from rlvr.service.http.runtime import Service, instance_name
    from rlvr.service.loop.generators import build_generator, build_judge
    from rlvr.service.loop.sessions import Sessions
    from rlvr.store import StoreDown, open_store

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
    instance, holds = instance_name(settings.state, port)
    generator, judge = build_generator(settings, store), build_judge(settings)
    sessions = Sessions(settings, store, generator, instance, judge=judge)
    return Service(settings, store, sessions, generator, keys, instance, judge, holds)


@asynccontextmanager
async def living(service: Service) -> AsyncIterator[None]:
    """What runs beside the requests, and in which order it ends."""
    service.loop = asyncio.get_running_loop()
    # A verifier keeps its thread while a judge takes its time: Python's own handful would be one queue for all.
    judging = ThreadPoolExecutor(max(32, 4 * service.settings.limits.sessions), thread_name_prefix="work")
    service.loop.set_default_executor(judging)
    await service.sessions.open()
    if service.judge is not None:
        service.judge.start()
    tidying = asyncio.create_task(tidy(service))
    try:
        yield
    finally:
        tidying.cancel()
        with suppress(asyncio.CancelledError):
            await tidying
        await service.stop()


async def tidy(service: Service) -> None:
    """Deletes what is older than it is to be kept, now and every hour."""
    from rlvr.service.logs import logger
    from rlvr.store import StoreDown

    retention = service.settings.retention
    while retention.keep_days or retention.keep_experiences:
        try:
            experiences, sessions = await asyncio.to_thread(service.store.prune, retention)
            if experiences or sessions:
                logger("rlvr.service").info("pruned", experiences=experiences, sessions=sessions)
        except StoreDown as error:
            logger("rlvr.service").warning("nothing pruned", reason=str(error))
        await asyncio.sleep(PRUNE_SECONDS)


def stopper(service: Service) -> Callable[[], None]:
    """To be called from a signal handler: requests that wait for a session are answered before the server ends."""

    def stop() -> None:
        if service.loop is not None:
            service.loop.call_soon_threadsafe(service.begin_stop)

    return stop


def welcome(service: Service, url: str) -> list[str]:
    """Where it is, who generates, and what to do next."""
    settings, health = service.settings, service.generator.health()
    lines = [f"listening at {url}"]
    if health["state"] == "absent":
        lines.append("no generator: /train answers 503 until LLM_ENDPOINT or RLVR_MODEL is set, or with --demo")
    else:
        name = health["name"] or settings.model or "demo"
        state = "" if health["state"] == "ready" else f" ({health['state']})"  # an endpoint has not been asked yet
        lines.append(f"generator: {health['kind']} {name}{state}, learns: {health['learns']}")
    if service.judge is not None:
        judge = service.judge.health()
        lines.append(f"judge: {judge['kind']} {judge['name']} ({judge['state']})")
    if not service.keys:
        lines.append("no API keys: whoever has an account on this machine can use it")
    from rlvr.store.connections import address

    lines.append(f"database: {address(settings.database_url).render_as_string(hide_password=True)}")
    if settings.dashboard:
        lines.append(f"dashboard: {url}/")
    return lines
