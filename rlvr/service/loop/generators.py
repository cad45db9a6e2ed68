"""From the settings to the generator that they ask for: an endpoint, an engine, or none.

Exercised by tests/test_sessions.py and tests/test_service_http.py.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvr.clients.endpoint import text_endpoint
from rlvr.service.loop.endpoint import EndpointGenerator
from rlvr.service.loop.jobs import Generator, NoGenerator
from rlvr.service.loop.local_judge import LocalJudge, open_judge
from rlvr.service.settings import Settings
from rlvr.store import Store

POLICIES = "policies"
JUDGE = "judge"


def build_generator(settings: Settings, store: Store) -> Generator:
    """The one that the settings ask for. Nothing is loaded or asked before its `start`."""
    config, limits = settings.training, settings.limits
    if settings.llm:
        llm = settings.llm
        endpoint = text_endpoint(
            llm.endpoint, llm.model, key_variable=key_variable(llm.api_key_env), concurrency=2 * limits.sessions
        )
        return EndpointGenerator(endpoint, store, config, max_tokens=limits.max_tokens, seed=settings.seed)
    if not (settings.model or settings.demo):
        return NoGenerator()
    from rlvr.service.logs import logger
    from rlvr.service.loop.engine import EngineGenerator, EngineOptions
    from rlvr.service.loop.learning import LearnerOptions
    from rlvr.service.loop.models import DEMO, check_name, open_model, train_demo

    check_name(settings.model)

    def opener(folder: Path, say: Callable[[str], None]) -> Any:
        given = str(train_demo(settings.state, say)) if settings.demo else settings.model
        say(f"loading {given}")
        return open_model(given, folder, seed=settings.seed)

    return EngineGenerator(
        opener,
        settings.state / POLICIES / place_of(DEMO if settings.demo else settings.model),
        EngineOptions(max_tokens=limits.max_tokens, seed=settings.seed),
        LearnerOptions(
            learning_rate=config.learning_rate,
            entropy_coefficient=config.entropy_coefficient,
            policy_coefficient=config.policy_coefficient,
            batch_size=config.batch_size,
        ),
        warn=lambda text: logger("rlvr.service.loop.engine").warning(text),
    )


def build_judge(settings: Settings) -> LocalJudge | None:
    """The judge of this process, where the settings ask for one. Nothing is loaded before its `start`."""
    model = settings.judge.model
    if settings.judge or not model:
        return None
    from rlvr.service.logs import logger
    from rlvr.service.loop.models import check_name

    check_name(model, "JUDGE_MODEL")
    return LocalJudge(
        model,
        lambda: open_judge(model, settings.state / JUDGE),
        warn=lambda text: logger("rlvr.service.judge").warning(text),
    )


def place_of(model: str) -> str:
    """Where what a model learned is kept: each has a folder of its own, whose name tells them apart."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[-60:].strip("-.")
    return f"{words}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def key_variable(name: str) -> str:
    """The variable that holds a key; '' where it is not set: most endpoints on one's own machine need none."""
    return name if name and os.environ.get(name) else ""
