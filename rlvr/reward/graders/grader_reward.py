"""Reward `grader`: a file, or a mapping, in the OpenAI graders' schema says how good an answer is.

    rlvr verify completions.jsonl --reward grader --reward-option config=grader.json

The item is the task's meta (a row of the file), with its `prompt` where it has none; the sample is the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.core.chat_client import Endpoint
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Score
from rlvr.reward.graders.grader import Grader
from rlvr.reward.graders.grading_context import SHARED_SECONDS
from rlvr.reward.graders.model_graders import LabelModel, ScoreModel
from rlvr.reward.graders.python_grader import PythonGrader
from rlvr.reward.judge.judge_reward import CAUTION as OPINION
from rlvr.reward.registry import WaitsFor, register_reward
from rlvr.reward.reward_options import check_number
from rlvr.reward.signatures import Case

_ENDPOINT = ("base_url", "model", "api_key_env", "timeout_s", "retries", "concurrency", "body")


def parse_endpoints(models: Any) -> dict[str, Endpoint]:
    """Settings by name as endpoints: `{"judge": {"base_url": ..., "model": ..., "api_key_env": ...}}`, checked."""
    if not isinstance(models, Mapping):
        raise ValueError(f"models={models!r:.80}, expected endpoints by the names that graders use")
    endpoints: dict[str, Endpoint] = {}
    for name, settings in models.items():
        where = f"models.{name}"
        if not isinstance(settings, Mapping) or "base_url" not in settings:
            raise ValueError(f"{where}={settings!r:.80}, expected a mapping with base_url")
        for key in settings:
            if key not in _ENDPOINT:
                hint = did_you_mean(str(key), _ENDPOINT)
                raise ValueError(f"{where}.{key} is not known{hint}; known: {', '.join(_ENDPOINT)}")
        fields = {("key_variable" if key == "api_key_env" else key): value for key, value in settings.items()}
        if not isinstance(fields.get("body", {}), Mapping):
            raise ValueError(f"{where}.body={fields['body']!r:.80}, expected a dictionary of request fields")
        endpoints[str(name)] = Endpoint(**{"model": str(name), **fields})
        endpoints[str(name)].check(where)
    return endpoints


def _grader(
    config: str | Mapping[str, Any],
    models: Mapping[str, Any] | None = None,
    timeout_s: float = SHARED_SECONDS,
    sandbox: Mapping[str, Any] | None = None,
) -> Grader:
    check_number("timeout_s", timeout_s, 0, 600, above=True)
    endpoints = parse_endpoints(models or {})
    try:
        return Grader.of(_read(config), endpoints, sandbox=sandbox, timeout_s=timeout_s)
    except ValueError as error:
        raise ValueError(f"config: {error}") from None


def _read(config: str | Mapping[str, Any]) -> Any:
    if not isinstance(config, str):
        return config
    try:
        text = Path(config).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{config!r} cannot be read ({error}); expected a JSON file with a grader") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config!r} is not JSON: {error}") from None


def _waits_for(grader: Grader) -> WaitsFor:
    if any(isinstance(one, PythonGrader) for one in grader.members):
        return "processes"
    return "network" if _caution(grader) else ""


def _caution(grader: Grader) -> str:
    if any(isinstance(one, (LabelModel, ScoreModel)) for one in grader.members):
        return OPINION
    return ""


@register_reward("grader", batched=True, options=_grader, caution=_caution, waits_for=_waits_for)
async def grader(cases: Sequence[Case], grader: Grader) -> list[Score]:
    """What a grader in the OpenAI graders' schema says: `config` is a JSON file, or the configuration itself.

    Templates read the task's meta as `item` (and its prompt as `item.prompt`), the answer as `sample.output_text`.
    `models` are the endpoints that model graders may name: `base_url`, and where needed `model`, `api_key_env`, `body`,
    `timeout_s`, `retries`, `concurrency`. `timeout_s` is what a python grader has for one answer, `sandbox` as for the
    reward `code`. Parts: the value of each grader of a multi, and what asking models took.
    """
    return await grader.agrade_many(
        [({"prompt": case.prompt, **(case.meta or {})}, {"output_text": case.response}) for case in cases]
    )
