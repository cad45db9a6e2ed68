"""Reward `grader`: a file, or a mapping, in the OpenAI graders' schema says how good an answer is.

    rlvr verify answers.jsonl --reward grader --reward-option config=grader.json

The item is the task's meta (a row of the file), with its `prompt` where it has none; the sample is the answer.
`python -m pytest tests/test_graders_reward.py` exercises it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.http_line import Endpoint
from rlvr.registry import nearest
from rlvr.reward.graders.desk import SHARED_SECONDS
from rlvr.reward.graders.grader import Grader
from rlvr.reward.options import is_number
from rlvr.reward.registry import Waits, register_reward
from rlvr.types import Score

WHAT = "reward 'grader'"
_ENDPOINT = ("base_url", "model", "api_key_env", "timeout_s", "retries", "concurrency", "body")


def endpoints(models: Any, what: str = WHAT) -> dict[str, Endpoint]:
    """Settings by name as endpoints: `{"judge": {"base_url": ..., "model": ..., "api_key_env": ...}}`, checked."""
    if not isinstance(models, Mapping):
        raise ValueError(f"{what}: models={models!r:.80}, expected endpoints by the names that graders use")
    made: dict[str, Endpoint] = {}
    for name, given in models.items():
        here = f"{what}: models.{name}"
        if not isinstance(given, Mapping) or "base_url" not in given:
            raise ValueError(f"{here}={given!r:.80}, expected a mapping with base_url")
        for key in given:
            if key not in _ENDPOINT:
                raise ValueError(
                    f"{here}.{key} is not known{nearest(str(key), _ENDPOINT)}; known: {', '.join(_ENDPOINT)}"
                )
        fields = {("key_variable" if key == "api_key_env" else key): value for key, value in given.items()}
        if not isinstance(fields.get("body", {}), Mapping):
            raise ValueError(f"{here}.body={fields['body']!r:.80}, expected a dictionary of request fields")
        made[str(name)] = Endpoint(**{"model": str(name), **fields})
        made[str(name)].check(here)
    return made


def _prepare(
    config: str | Mapping[str, Any],
    models: Mapping[str, Any] | None = None,
    timeout_s: float = SHARED_SECONDS,
    sandbox: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    if not is_number(timeout_s) or not 0 < timeout_s <= 600:
        raise ValueError(f"{WHAT}: timeout_s={timeout_s!r}, expected seconds above 0, at most 600")
    try:
        return {"config": Grader.of(_read(config), endpoints(models or {}), sandbox=sandbox, timeout_s=timeout_s)}
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(WHAT) else f"{WHAT}: config: {error}") from None


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
        raise ValueError(f"{config!r} is no JSON: {error}") from None


def _kinds(config: Grader) -> list[Any]:
    return [config.kind, *getattr(config.kind, "graders", {}).values()]


def _waits(config: Grader, **_: Any) -> Waits:
    from rlvr.reward.graders.models import LabelModel, ScoreModel
    from rlvr.reward.graders.program import Program

    kinds = _kinds(config)
    if any(isinstance(one, Program) for one in kinds):
        return "processes"
    return "network" if any(isinstance(one, (LabelModel, ScoreModel)) for one in kinds) else ""


def _caution(config: Grader, **_: Any) -> str:
    from rlvr.reward.graders.models import LabelModel, ScoreModel

    if any(isinstance(one, (LabelModel, ScoreModel)) for one in _kinds(config)):
        return (
            "it asks another model's opinion, which a policy learns to please; watch what you mean beside it, with a "
            "verifier that computes (reward.watch)"
        )
    return ""


@register_reward("grader", batched=True, prepare=_prepare, caution=_caution, waits=_waits)
async def grader(
    prompts: Sequence[str],
    responses: Sequence[str],
    metas: Sequence[Mapping[str, Any] | None] | None = None,
    *,
    config: Any,
    models: Mapping[str, Any] | None = None,
    timeout_s: float = SHARED_SECONDS,
    sandbox: Mapping[str, Any] | None = None,
) -> list[Score]:
    """What a grader in the OpenAI graders' schema says: `config` is a JSON file, or the configuration itself.

    Templates read the task's meta as `item` (and its prompt as `item.prompt`), the answer as `sample.output_text`.
    `models` are the endpoints that model graders may name: `base_url`, and where needed `model`, `api_key_env`, `body`,
    `timeout_s`, `retries`, `concurrency`. `timeout_s` is what a python grader has for one answer, `sandbox` as for the
    reward `code`. Parts: the value of each grader of a multi, and what asking models took.
    """
    rows = metas or [None] * len(responses)
    cases = [
        ({"prompt": prompt, **(meta or {})}, {"output_text": response})
        for prompt, response, meta in zip(prompts, responses, rows, strict=True)
    ]
    return await config.agrade_many(cases)
