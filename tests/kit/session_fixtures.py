"""Sessions in this process, over a real SQLite file and a scripted endpoint: what several test files need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.service.generators.build_generator import build_generator
from rlvr.service.service_options import SessionRequest, TrainingConfig
from rlvr.service.sessions.jobs import Generator
from rlvr.service.sessions.sessions import Sessions
from rlvr.service.settings import ServiceLimits, Settings, TextEndpoint
from rlvr.store import ExperienceStore, open_store
from rlvr.store.records import Session

CODE = SessionRequest("double", "Write double(x), which returns twice x.", tests=("assert double(2) == 4",))
RIGHT = "def double(x):\n    return 2 * x\n"


def settings_of(place: Path, url: str = "", **changes: Any) -> Settings:
    given: dict[str, Any] = {
        "state": place,
        "llm": TextEndpoint(url) if url else TextEndpoint(),
        "training": TrainingConfig(max_iterations=4),
        "limits": ServiceLimits(sessions=4, queue=4),
    }
    return Settings(**{**given, **changes})


@asynccontextmanager
async def open_sessions(
    settings: Settings,
    *,
    store: ExperienceStore | None = None,
    generator: Generator | None = None,
    instance: str = "here",
    patience_s: float = 5.0,
    grace_s: float = 5.0,
) -> AsyncIterator[Sessions]:
    """Open `Sessions`; closed, with their store and generator, at the end of the block."""
    settings.state.mkdir(parents=True, exist_ok=True)
    own = store or open_store(settings.database_url, settings.training.experience_buffer_size)
    sessions = Sessions(settings, own, generator or build_generator(settings, own), instance, patience_s=patience_s)
    await sessions.open()
    try:
        yield sessions
    finally:
        await sessions.close(grace_s)
        await sessions.generator.close()
        if store is None:
            own.close()


async def run_session(
    sessions: Sessions, request: SessionRequest = CODE, **changes: Any
) -> tuple[Session, dict[str, Any]]:
    """Run a session to its end; returns it and the response of /train."""
    begun = await sessions.start(replace(request, **changes), owner="me")
    session = await asyncio.wait_for(sessions.wait(begun.id), 60)
    return session, await sessions.answer(session)
