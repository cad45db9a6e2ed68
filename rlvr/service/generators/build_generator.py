"""Build the generator and the judge that the settings name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvr.clients.endpoint import text_endpoint
from rlvr.service.generators.endpoint_generator import EndpointGenerator
from rlvr.service.models.local_judge import LocalJudge, open_judge
from rlvr.service.sessions.jobs import Generator, NoGenerator
from rlvr.service.settings import Settings
from rlvr.store import ExperienceStore

POLICIES = "policies"
JUDGE = "judge"


def build_generator(settings: Settings, store: ExperienceStore, instance: str = "") -> Generator:
    """The generator of the settings. It loads nothing and sends no request before `start`. `instance` is this process's
    name among those that share the store."""
    config, limits = settings.training, settings.limits
    if settings.llm:
        llm = settings.llm
        endpoint = text_endpoint(
            llm.endpoint, llm.model, key_variable=llm.key_variable, concurrency=2 * limits.sessions
        )
        return EndpointGenerator(endpoint, store, config, max_tokens=limits.max_tokens, seed=settings.seed)
    if not (settings.model or settings.demo):
        return NoGenerator()
    from rlvr.service.generators.engine_generator import EngineGenerator, EngineOptions
    from rlvr.service.learning.session_learner import LearnerOptions
    from rlvr.service.models.served_models import DEMO, check_name, open_model, train_demo
    from rlvr.web.logs import get_logger

    check_name(settings.model)
    options = EngineOptions(max_tokens=limits.max_tokens, seed=settings.seed)
    learner = LearnerOptions(
        learning_rate=config.learning_rate,
        entropy_coefficient=config.entropy_coefficient,
        policy_coefficient=config.policy_coefficient,
        batch_size=config.batch_size,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
    )

    def warn(text: str) -> None:
        get_logger("rlvr.service.generators.engine_generator").warning(text)

    def opener(folder: Path, say: Callable[[str], None]) -> Any:
        given = str(train_demo(settings.state, say)) if settings.demo else settings.model
        say(f"loading {given}")
        if given.startswith("tinker:") and not store.is_sqlite:  # all replicas reach the weights and the database
            from rlvr.service.models.shared_model import open_shared

            return open_shared(given, folder, store, instance, learner, seed=settings.seed, say=say, warn=warn)
        return open_model(given, folder, seed=settings.seed)

    return EngineGenerator(
        opener,
        settings.state / POLICIES / policy_folder_name(DEMO if settings.demo else settings.model),
        options,
        learner,
        warn=warn,
    )


def build_judge(settings: Settings) -> LocalJudge | None:
    """The judge in this process, None if the settings name none. It loads nothing before `start`."""
    model = settings.judge.model
    if settings.judge or not model:
        return None
    from rlvr.service.models.served_models import check_name
    from rlvr.web.logs import get_logger

    check_name(model, "JUDGE_MODEL")
    return LocalJudge(
        model,
        lambda: open_judge(model, settings.state / JUDGE),
        warn=lambda text: get_logger("rlvr.service.judge").warning(text),
    )


def policy_folder_name(model: str) -> str:
    """The name of the folder with a model's learned weights; every model has its own."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[-60:].strip("-.")
    return f"{words}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
