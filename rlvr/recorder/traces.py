"""Recordings in the forms of other projects: OpenEnv's training traces, and Agent Lightning's events as triplets.

    recording = load_recording(path)                # ours, or one of theirs: the content says which
    write_recording(recording, "openenv", path)

A file of theirs is one JSON document, a list of them, or JSON lines. A trace or the events of an attempt are one
rollout. What is trained stands in the file: a trace's masks are followed, triplets train all that was sampled. A call
without token ids or log-probs is refused by name, and nothing is ever made of text.

    OpenEnv          https://github.com/meta-pytorch/OpenEnv, openenv/core/harness/training.py (0.10)
    Agent Lightning  https://github.com/microsoft/agent-lightning, GET /rollouts/ID/events?format=triplet (1.0)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.core.files import write_atomic
from rlvr.recorder.recording import (
    SETTINGS,
    RecordedCall,
    RecordedChoice,
    RecordedRollout,
    Recording,
    read_recording,
)
from rlvr.recorder.rows import RecordedTurn, list_branches, list_turns

Json = dict[str, Any]
FORMS = ("openenv", "triplets")
_KINDS = ("recording", "call", "reward")


def load_recording(path: Path) -> Recording:
    """A recording of `rlvr record`, of OpenEnv or of Agent Lightning. ValueError for another file."""
    documents = _read_documents(path)
    if not documents or documents[0].get("kind") in _KINDS:
        return read_recording(path)
    if all("turns" in one and "schema_version" in one for one in documents):
        return _recording_of([_read_trace(one, f"trace-{number:06d}") for number, one in enumerate(documents)], path)
    if all("event_type" in one for one in documents):
        return _recording_of(_read_events(documents), path)
    raise ValueError(
        f"{path} is neither a recording of `rlvr record`, nor training traces of OpenEnv (schema_version, turns), nor "
        "events of Agent Lightning (event_type)"
    )


def write_recording(recording: Recording, form: str, path: Path, *, keep_retried: bool = False) -> None:
    """Write what is trained of a recording, one JSON line for each trace or event."""
    if form not in FORMS:
        raise ValueError(f"form={form!r}, expected one of {', '.join(FORMS)}")
    if path.exists():
        raise ValueError(f"{path} is there already; give the name of a new file")
    write = make_trace if form == "openenv" else make_events
    lines: list[Json] = []
    for rollout in recording.rollouts:
        made = write(rollout, recording.model, keep_retried=keep_retried)
        lines += made if isinstance(made, list) else [made]
    write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def make_trace(rollout: RecordedRollout, model: str = "", *, keep_retried: bool = False) -> Json:
    """A rollout as OpenEnv's TrainingTrace. Answers that are not trained have a mask of zeros.

    The contract has no reward and no name of a rollout: they stand in the metadata of each turn.
    """
    turns: list[Json] = []
    for turn, mask, node in _list_masked(rollout, keep_retried):
        call, choice = turn.call, turn.choice
        turns.append(
            {
                "node_id": node,
                "prompt_token_ids": call.prompt,
                "completion_token_ids": choice.tokens,
                "per_token_logps": [min(float(value), 0.0) for value in choice.logprobs],
                "loss_mask": [0] * len(call.prompt) + mask,
                "request": call.request,
                "response": {"choices": [{"message": choice.message, "finish_reason": choice.finish}]},
                "metadata": {
                    "model": model,
                    "policy": call.policy,
                    "dialect": call.dialect,
                    "sampling_params": call.settings,
                    "rollout_id": rollout.id,
                    "group_id": rollout.group,
                    "reward": rollout.reward,
                    "branch_reward": rollout.call_rewards.get(call.id),
                    "began": call.began,
                    "ended": call.ended,
                },
            }
        )
    return {"schema_version": 1, "turns": turns}


def make_events(rollout: RecordedRollout, model: str = "", *, keep_retried: bool = False) -> list[Json]:
    """A rollout as Agent Lightning's events. They have no masks: an answer that is not trained is left out, and
    ValueError for one of which a part is trained."""
    base = {"rollout_id": rollout.id, "attempt_id": "0"}
    events: list[Json] = []
    for turn, mask, node in _list_masked(rollout, keep_retried):
        call, choice = turn.call, turn.choice
        if not any(mask):
            continue
        if not all(mask):
            raise ValueError(
                f"call {node}: only a part of its answer is trained, which triplets cannot say (they have no mask); "
                "use openenv"
            )
        data = {
            "prompt_token_ids": call.prompt,
            "response_token_ids": choice.tokens,
            "response_log_probs": choice.logprobs,
            "server": {"model": model, "version": None},
            "http_status": 200,
            "status": "ok",
            "call_id": node,
            "policy": call.policy,
            "group_id": rollout.group,
            "dialect": call.dialect,
            "request": call.request,
            "sampling_params": call.settings,
            "message": choice.message,
            "finish_reason": choice.finish,
        }
        events.append({"event_type": "model_request", **base, "timestamp": call.ended, "data": data})
    ended = rollout.calls[-1].ended if rollout.calls else 0.0
    rewards: list[Json] = [{"value": value, "call_id": call} for call, value in rollout.call_rewards.items()]
    rewards += [] if rollout.reward is None else [{"value": rollout.reward}]
    for given in rewards:
        data = {**given, "source": "rlvr"}
        events.append({"event_type": "reward", **base, "timestamp": ended, "data": data})
    return events


def _list_masked(rollout: RecordedRollout, keep_retried: bool) -> Iterator[tuple[RecordedTurn, list[int], str]]:
    """Each answer with tokens, its mask, and an id that no other has."""
    turns = list_turns(rollout)
    trained = {number for branch in list_branches(turns, keep_retried=keep_retried) for number in branch}
    seen: dict[str, int] = {}
    for number, turn in enumerate(turns):
        call, tokens = turn.call, turn.choice.tokens
        place = seen[call.id] = seen.get(call.id, -1) + 1
        if tokens:
            mask = (turn.choice.mask or [1] * len(tokens)) if number in trained else [0] * len(tokens)
            yield turn, list(mask), call.id if len(call.choices) == 1 else f"{call.id}-{place}"


def _read_documents(path: Path) -> list[Json]:
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a file with a recording") from error
    end = text.find("\n")
    first = _parse(text if end < 0 else text[:end])
    if isinstance(first, dict) and first.get("kind") in _KINDS:
        return [first]
    whole = _parse(text)
    found = [whole] if whole is not None else [_parse(line) for line in text.split("\n") if line.strip()]
    documents = [part for one in found for part in (one if isinstance(one, list) else [one])]
    if not all(isinstance(one, dict) for one in documents):
        raise ValueError(f"{path} is neither JSON nor JSON lines of objects; give a file with a recording")
    return documents


def _parse(text: str) -> Any:
    """The JSON value, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _recording_of(rollouts: Sequence[tuple[str, RecordedRollout]], path: Path) -> Recording:
    """Rollouts with the models that they name. ValueError if two have one id."""
    ids: set[str] = set()
    for _, rollout in rollouts:
        if rollout.id in ids:
            raise ValueError(f"{path}: two rollouts have the id {rollout.id!r:.80}; ids must be unique")
        ids.add(rollout.id)
    models = list(dict.fromkeys(model for model, _ in rollouts if model))
    return Recording(models[0] if len(models) == 1 else "", [rollout for _, rollout in rollouts])


def _read_trace(trace: Json, unnamed: str) -> tuple[str, RecordedRollout]:
    """The model and the rollout of a trace. What Harbor's export has around a trace is read too: session and reward."""
    turns = trace["turns"]
    if trace["schema_version"] != 1 or not isinstance(turns, list):
        raise ValueError(f"a trace has schema_version {trace['schema_version']!r:.40}, expected 1 and a list of turns")
    rollout = RecordedRollout(
        _text(trace.get("session_id")) or unnamed, _text(trace.get("task_id")), reward=_read_reward(trace, "reward")
    )
    models, nodes = dict[str, None](), set[str]()
    for turn in turns:
        node = turn.get("node_id") if isinstance(turn, dict) else None
        if not isinstance(node, str) or not node or node in nodes:
            raise ValueError(
                f"{rollout.id}: a turn has node_id={node!r:.80}; expected a text that no other turn of the trace has"
            )
        nodes.add(node)
        about = _object(turn, "metadata")
        if len(nodes) == 1 and "rollout_id" in about:
            rollout.id, rollout.group = _text(about["rollout_id"]), _text(about.get("group_id"))
            rollout.reward = _read_reward(about, "reward")
        if (branch_reward := _read_reward(about, "branch_reward")) is not None:
            rollout.call_rewards[node] = branch_reward
        models[_text(about.get("model"))] = None
        choices = _object(turn, "response").get("choices") or [{}]
        choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
        call = RecordedCall(
            node,
            rollout.id,
            rollout.group,
            _text(about.get("dialect")),
            _text(about.get("policy")) or _text(about.get("model")),
            _need(turn, "prompt_token_ids", node),
            [
                RecordedChoice(
                    _need(turn, "completion_token_ids", node),
                    _need(turn, "per_token_logps", node),
                    _text(choice.get("finish_reason") or turn.get("finish_reason")) or "stop",
                    _object(choice, "message"),
                )
            ],
            _object(turn, "request"),
            _read_settings(about.get("sampling_params") or turn.get("sampling_params")),
            _time(about.get("began")),
            _time(about.get("ended")),
        )
        call.check()
        mask, read = _need(turn, "loss_mask", node), len(call.prompt)
        if len(mask) != read + len(call.choices[0].tokens) or any(value != 0 for value in mask[:read]):
            raise ValueError(f"{node}: its loss_mask is not 0 for each token of the prompt, then one for each sampled")
        call.choices[0].mask.extend(mask[read:])
        call.check()
        if call.choices[0].tokens:
            rollout.calls.append(call)
    names = [name for name in models if name]
    return names[0] if len(names) == 1 else "", rollout


def _read_events(events: Sequence[Json]) -> list[tuple[str, RecordedRollout]]:
    """The model and the rollout of each attempt. Calls that failed have trained nothing and are left out."""
    found: dict[tuple[str, str], tuple[dict[str, None], RecordedRollout]] = {}
    ids: set[tuple[str, str]] = set()
    for number, event in enumerate(events):
        name, attempt = _text(event.get("rollout_id")), _text(event.get("attempt_id")) or "0"
        if not name:
            raise ValueError(f"event {number} has no rollout_id")
        known = found.setdefault(
            (name, attempt), ({}, RecordedRollout(name if attempt == "0" else f"{name}/{attempt}"))
        )
        models, rollout = known
        data = _object(event, "data")
        if event["event_type"] == "reward":
            value = _read_reward(data, "value")
            if (call_id := _text(data.get("call_id"))) and value is not None:
                rollout.call_rewards[call_id] = value
            else:
                rollout.reward = value
        elif event["event_type"] == "model_request":
            status = data.get("http_status")
            if data.get("status") == "error" or (isinstance(status, int) and status >= 400):
                continue
            rollout.group = _text(data.get("group_id")) or rollout.group
            models[_text(_object(data, "server").get("model") or data.get("model"))] = None
            call = _read_request(event, data, rollout, len(rollout.calls))
            if (rollout.id, call.id) in ids:
                raise ValueError(f"two calls of rollout {rollout.id} have the id {call.id!r:.80}; ids must be unique")
            ids.add((rollout.id, call.id))
            rollout.calls.append(call)
    named = [([name for name in models if name], rollout) for models, rollout in found.values()]
    return [(names[0] if len(names) == 1 else "", rollout) for names, rollout in named]


def _read_request(event: Json, data: Json, rollout: RecordedRollout, number: int) -> RecordedCall:
    """A call as a triplet has it, or with the whole answer of the engine. Of equal triplets all are trained: the server
    has left out those that were asked for again."""
    name = _text(data.get("call_id")) or f"{rollout.id}-{number:05d}"
    is_triplet = "response_token_ids" in data
    if not is_triplet:
        data = {**data, **_trim(_object(data, "response"))}
    if not data.get("response_token_ids"):
        raise ValueError(f"{name}: the event has no response_token_ids; the engine must return token ids")
    if data.get("response_log_probs") is None:
        raise ValueError(f"{name}: the event has no response_log_probs; the engine must return log-probs")
    request, server = _object(data, "request"), _object(data, "server")
    tokens = _need(data, "response_token_ids", name)
    policy = _text(data.get("policy")) or "@".join(
        str(part) for part in (server.get("model"), server.get("version")) if part is not None
    )
    ended = _time(event.get("timestamp"))
    call = RecordedCall(
        name,
        rollout.id,
        rollout.group,
        _text(data.get("dialect")),
        policy,
        _need(data, "prompt_token_ids", name),
        [
            RecordedChoice(
                tokens,
                _need(data, "response_log_probs", name),
                _text(data.get("finish_reason")) or "stop",
                _object(data, "message"),
                [1] * len(tokens) if is_triplet else [],
            )
        ],
        request,
        _read_settings(data.get("sampling_params") or request),
        ended,
        ended,
    )
    call.check()
    return call


def _trim(answer: Json) -> Json:
    """What a triplet has of an engine's answer."""
    choices = answer.get("choices")
    first: Json = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    scores = _object(first, "logprobs")
    content = scores.get("content")
    return {
        "prompt_token_ids": answer.get("prompt_token_ids") or first.get("prompt_token_ids"),
        "response_token_ids": first.get("token_ids"),
        "response_log_probs": [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
        if isinstance(content, list)
        else scores.get("token_logprobs"),
        "message": first.get("message") or {"role": "assistant", "content": first.get("text", "")},
        "finish_reason": first.get("finish_reason"),
    }


def _need(fields: Mapping[str, Any], name: str, call: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{call}: {name} is missing or no list; what has no token ids cannot be trained")
    return value


def _object(fields: Mapping[str, Any], name: str) -> Json:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _read_reward(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is not None and not _is_number(value):
        raise ValueError(f"{name}={value!r:.80} of a rollout, expected a finite number or none")
    return None if value is None else float(value)


def _time(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _read_settings(given: Any) -> Json:
    """The sampling settings that a program gave; without a temperature it counts as 1."""
    return {name: given[name] for name in SETTINGS if given.get(name) is not None} if isinstance(given, dict) else {}
