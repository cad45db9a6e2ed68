"""Recordings in the forms of OpenEnv and Agent Lightning train what ours trains, and theirs train here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.core.types import Trajectory
from rlvr.recorder.recording import RecordedCall, RecordedChoice, RecordedRollout, Recording, RecordingFile
from rlvr.recorder.rows import make_rows
from rlvr.recorder.traces import FORMS, load_recording, make_events, make_trace, write_recording

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
TURN: dict[str, Any] = {
    "node_id": "n0",
    "prompt_token_ids": [1, 2],
    "completion_token_ids": [3, 4],
    "per_token_logps": [-0.5, -0.25],
    "loss_mask": [0, 0, 1, 1],
}
EVENT: dict[str, Any] = {
    "event_type": "model_request",
    "rollout_id": "a",
    "attempt_id": "0",
    "timestamp": 1.0,
    "data": {
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3, 4],
        "response_log_probs": [-0.5, -0.25],
        "server": {"model": "acme/small", "version": 7},
        "http_status": 200,
        "status": "ok",
    },
}


@st.composite
def rollouts(draw: Any, number: int = 0) -> RecordedRollout:
    """Calls that begin anew, go on from an earlier answer, or are asked again; some have several choices."""
    calls: list[RecordedCall] = []
    settings: dict[str, Any] = draw(st.sampled_from([{}, {"temperature": 0.5, "max_tokens": 9}]))
    for place in range(draw(st.integers(1, 6))):
        before = [(call.prompt, choice.tokens) for call in calls for choice in call.choices]
        prompt = draw(TOKENS)
        if before and draw(st.booleans()):
            read, sampled = draw(st.sampled_from(before))
            prompt = [*read, *draw(st.sampled_from([[], [*sampled, *prompt], sampled]))]
        choices: list[RecordedChoice] = []
        for _ in range(draw(st.integers(1, 2))):
            tokens = draw(TOKENS)
            scores = draw(st.lists(st.floats(-9, 0), min_size=len(tokens), max_size=len(tokens)))
            message = {"role": "assistant", "content": draw(st.text(max_size=3))}
            choices.append(RecordedChoice(tokens, scores, draw(st.sampled_from(["stop", "length"])), message))
        calls.append(
            RecordedCall(f"{number}-{place}", f"r{number}", "g", "chat", f"p{place}", prompt, choices, {}, settings)
        )
    return RecordedRollout(f"r{number}", "g", calls, draw(st.none() | st.floats(-2, 2)))


def rows_of(recording: Recording, **options: Any) -> list[Trajectory]:
    return [row for rollout in recording.rollouts for row in make_rows(rollout, **options)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep_retried", [False, True])
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_what_was_written_trains_the_same(
    tmp_path_factory: pytest.TempPathFactory, form: str, keep_retried: bool, data: Any
) -> None:
    recording = Recording("acme/small", [data.draw(rollouts(0)), data.draw(rollouts(1))])
    path = tmp_path_factory.mktemp("traces") / "out.jsonl"
    write_recording(recording, form, path, keep_retried=keep_retried)
    again = load_recording(path)
    assert again.model == "acme/small" and [r.reward for r in again.rollouts] == [r.reward for r in recording.rollouts]
    expected = rows_of(recording, keep_retried=keep_retried)
    assert rows_of(again) == rows_of(again, keep_retried=True) == expected
    other = path.with_name("other.jsonl")
    for step in FORMS:  # from theirs to theirs
        write_recording(again, step, other)
        assert rows_of(load_recording(other)) == expected
        other.unlink()


def trace(**changes: Any) -> dict[str, Any]:
    return {"schema_version": 1, "turns": [{**TURN, **changes}]}


def load(tmp_path: Path, *documents: Any) -> Recording:
    path = tmp_path / "given.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    return load_recording(path)


def test_a_trace_of_another_program_is_read(tmp_path: Path) -> None:
    """Its mask says what is trained: also of an answer that was asked for again, and of a part of one."""
    again = {**TURN, "node_id": "n1", "loss_mask": [0, 0, 0, 1], "metadata": {"model": "acme/small"}}
    recording = load(tmp_path, {"schema_version": 1, "turns": [TURN, again]}, trace())
    assert [rollout.id for rollout in recording.rollouts] == ["trace-000000", "trace-000001"]
    assert recording.model == "acme/small" and recording.rollouts[0].reward is None
    first, second = make_rows(recording.rollouts[0])
    assert (first.action_mask, first.logprobs) == ([1, 1], [-0.5, -0.25])
    assert (second.action_mask, second.logprobs) == ([0, 1], [0.0, -0.25])
    first.require_trainable()


def test_a_turn_with_a_mask_of_zeros_is_context(tmp_path: Path) -> None:
    said = {**TURN, "loss_mask": [0, 0, 0, 0]}
    aside = {**said, "node_id": "n1", "completion_token_ids": [8, 8]}
    goes_on = {
        "node_id": "n2",
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "completion_token_ids": [6],
        "per_token_logps": [-1],
        "loss_mask": [0, 0, 0, 0, 0, 1],
    }
    recording = load(tmp_path, {"schema_version": 1, "turns": [said, aside, goes_on]})
    (row,) = make_rows(recording.rollouts[0])
    assert row.full_tokens == [1, 2, 3, 4, 5, 6] and row.action_mask == [0, 0, 0, 1]
    assert [len(e["data"]["prompt_token_ids"]) for e in make_events(recording.rollouts[0])] == [5]


def test_the_export_of_a_harbor_rollout_is_read_with_its_reward(tmp_path: Path) -> None:
    cut = {
        "node_id": "n1",
        "prompt_token_ids": [1],
        "completion_token_ids": [],
        "per_token_logps": [],
        "loss_mask": [0],
    }
    export = {**trace(sampling_params={"temperature": 0.5}), "session_id": "s", "task_id": "t", "reward": 0.5}
    export["turns"].append(cut)
    recording = load(tmp_path, export)
    (row,) = make_rows(recording.rollouts[0])
    assert (row.rollout_id, row.group_id, row.reward, row.temperature) == ("s", "t", 0.5, 0.5)


def event(**data: Any) -> dict[str, Any]:
    return {**EVENT, "data": {**EVENT["data"], **data}}


def test_events_of_another_program_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    answer = {
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "token_ids": [3, 4],
                "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
                "message": {"role": "assistant", "content": "ab"},
                "finish_reason": "length",
            }
        ],
    }
    raw = {
        **EVENT,
        "rollout_id": "b",
        "data": {"request": {"temperature": 0.5}, "response": answer, "model": "acme/small"},
    }
    failed = {**EVENT, "data": {"status": "error", "http_status": 503}}
    rewards = [{**EVENT, "event_type": "reward", "data": {"value": value}} for value in (0.25, 1)]
    other = {**EVENT, "event_type": "note", "data": {"text": "x"}}
    retry = {**EVENT, "attempt_id": "1"}
    path.write_text(json.dumps([EVENT, failed, *rewards, raw, raw, other, retry], indent=1))
    recording = load_recording(path)
    assert [(r.id, r.reward, len(r.calls)) for r in recording.rollouts] == [
        ("a", 1.0, 1),
        ("b", None, 2),
        ("a/1", None, 1),
    ]
    assert recording.model == "acme/small"
    first, raw_row, _ = rows_of(recording)  # of two raw calls with one prompt, the second counts
    assert (first.prompt_tokens, first.response_tokens, first.logprobs) == ([1, 2], [3, 4], [-0.5, -0.25])
    assert first.policy_fingerprint == "acme/small@7"
    assert (raw_row.temperature, raw_row.answer, raw_row.truncated) == (0.5, "ab", True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (trace(node_id=""), "node_id"),
        ({"schema_version": 1, "turns": [TURN, TURN]}, "'n0'; expected a text that no other turn"),
        ({"schema_version": 2, "turns": []}, "schema_version 2"),
        (trace(prompt_token_ids=None), "n0: prompt_token_ids is missing"),
        (trace(prompt_token_ids=[]), "token ids of its prompt"),
        (trace(completion_token_ids=["3", "4"]), "token ids of its answer"),
        (trace(completion_token_ids=[True, 4]), "token ids of its answer"),
        (trace(per_token_logps=None), "n0: per_token_logps is missing"),
        (trace(per_token_logps=[-1.0]), "2 tokens with 1 log-probs"),
        (trace(per_token_logps=[-1.0, float("nan")]), "nan is no log-prob"),
        (trace(per_token_logps=[-1.0, 0.5]), "0.5 is no log-prob"),
        (trace(loss_mask=None), "n0: loss_mask is missing"),
        (trace(loss_mask=[0, 0, 1]), "loss_mask"),
        (trace(loss_mask=[1, 0, 1, 1]), "loss_mask"),
        (trace(loss_mask=[0, 0, 1, 2]), "mask"),
        (event(response_token_ids=[]), "a-00000: the event has no response_token_ids"),
        (event(response_log_probs=None), "a-00000: the event has no response_log_probs"),
        (event(prompt_token_ids=None), "a-00000: prompt_token_ids is missing"),
        ({**EVENT, "event_type": "reward", "data": {"value": "high"}}, "'high'"),
        ({**EVENT, "rollout_id": None}, "rollout_id"),
        ({"messages": []}, "neither a recording"),
        ([1], "neither JSON"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        load(tmp_path, given)


def test_ids_are_unique(tmp_path: Path) -> None:
    named = trace(metadata={"rollout_id": "a"})
    with pytest.raises(ValueError, match="two rollouts have the id 'a'"):
        load(tmp_path, named, named)
    with pytest.raises(ValueError, match="two calls of rollout a have the id 'x'"):
        load(tmp_path, event(call_id="x"), event(), event(call_id="x"))
    choices = [RecordedChoice([1], [-1.0], "stop", {})] * 2
    calls = [RecordedCall("a", "r", "", "chat", "p", [1], choices, {})]
    assert [turn["node_id"] for turn in make_trace(RecordedRollout("r", "", calls))["turns"]] == ["a-0", "a-1"]


def test_a_part_of_an_answer_is_no_triplet_and_no_file_is_overwritten(tmp_path: Path) -> None:
    recording = load(tmp_path, trace(loss_mask=[0, 0, 0, 1]))
    with pytest.raises(ValueError, match=r"n0.*they have no mask.; use openenv"):
        write_recording(recording, "triplets", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="expected one of openenv, triplets"):
        write_recording(recording, "verl", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="there already"):
        write_recording(recording, "openenv", tmp_path / "given.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_our_own_recording_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    call = RecordedCall("a", "r", "", "chat", "p", [1], [RecordedChoice([2], [-1.0], "stop", {})], {})
    with RecordingFile(path, "acme/small") as file:
        file.append(call)
    assert load_recording(path) == Recording("acme/small", [RecordedRollout("r", "", [call])])


def run_python(variable: str, package: str, program: str, *words: str) -> Any:
    """What a program of another project's environment prints, as JSON."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"set {variable} to the Python of an environment with {package}")
    done = subprocess.run([python, "-c", program, *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def mixed(tmp_path: Path, form: str) -> tuple[Recording, Path]:
    """A rollout with an answer that was asked for again, two turns and two choices; and one without a reward."""

    def call(rollout: str, number: int, prompt: list[int], *answers: list[int]) -> RecordedCall:
        made = [RecordedChoice(a, [-0.5] * len(a), "stop", {"role": "assistant", "content": "x"}) for a in answers]
        request = {"messages": [{"role": "user", "content": "hi"}]}
        return RecordedCall(
            f"{rollout}-{number}", rollout, "g", "chat", "p", prompt, made, request, {"temperature": 0.5}
        )

    first = [call("r", 0, [1, 2], [3]), call("r", 1, [1, 2], [4]), call("r", 2, [1, 2, 4, 5], [6], [7, 8])]
    rollouts = [RecordedRollout("r", "g", first, 1.0), RecordedRollout("q", "g", [call("q", 0, [1], [2])])]
    path = tmp_path / "written.jsonl"
    write_recording(Recording("acme/small", rollouts), form, path)
    return Recording("acme/small", rollouts), path


OPENENV = """
import json, sys
from openenv.core.harness.training import TrainingTrace
traces = [TrainingTrace.model_validate_json(line) for line in open(sys.argv[1])]
with open(sys.argv[2], "w") as out:
    for trace in traces:
        print(TrainingTrace.from_entries(trace.to_trace_entries()).model_dump_json(), file=out)
print(json.dumps([[t.node_id, sum(t.loss_mask)] for trace in traces for t in trace.turns]))
"""
LIGHTNING = """
import asyncio, json, sys
from agentlightning.schemas import Event
from agentlightning.server.routes import events as routes
from agentlightning.server.store import _events, _rollouts
lines = [Event.model_validate_json(line) for line in open(sys.argv[1])]
for event in lines:  # as its gateway stores a call: with the whole answer of the engine
    data = event.data
    _rollouts.setdefault(event.rollout_id, None), _events.setdefault(event.rollout_id, {})
    if event.event_type == "model_request":
        content = [{"logprob": value} for value in data["response_log_probs"]]
        choice = {"token_ids": data["response_token_ids"], "logprobs": {"content": content}}
        data = {"request": {}, "response": {"prompt_token_ids": data["prompt_token_ids"], "choices": [choice]}}
    routes.record_event(event.rollout_id, event.attempt_id, event.event_type, data)
class Rollout:
    class status:
        last_attempt_id = "0"
for name in _rollouts:
    _rollouts[name] = Rollout
out = [e.model_dump() for name in _rollouts for e in asyncio.run(routes.query_events(name, format="triplet"))]
raw = [e.model_dump() for name in _rollouts for e in asyncio.run(routes.query_events(name, format=None))]
json.dump(out, open(sys.argv[2], "w"))
json.dump(raw, open(sys.argv[2] + ".raw", "w"))
print(json.dumps([[e.event_type, e.data.get("response_token_ids") or e.data.get("value")] for e in lines]))
"""


@pytest.mark.slow
def test_openenv_itself_reads_our_traces_and_we_read_what_it_writes(tmp_path: Path) -> None:
    recording, path = mixed(tmp_path, "openenv")
    theirs = tmp_path / "theirs.jsonl"
    counts = run_python("RLVR_OPENENV_PYTHON", "openenv==0.10.0", OPENENV, str(path), str(theirs))
    assert counts == [["r-0", 0], ["r-1", 1], ["r-2-0", 0], ["r-2-1", 2], ["q-0", 1]]
    assert rows_of(load_recording(theirs)) == rows_of(recording)


@pytest.mark.slow
def test_agent_lightning_itself_reads_our_triplets_and_we_read_its_events(tmp_path: Path) -> None:
    recording, path = mixed(tmp_path, "triplets")
    theirs = tmp_path / "theirs.json"
    given = run_python("RLVR_AGENTLIGHTNING_PYTHON", "agentlightning==1.0.2", LIGHTNING, str(path), str(theirs))
    kind = "model_request"
    assert given == [[kind, [4]], [kind, [7, 8]], ["reward", 1.0], [kind, [2]]]
    expected = [(row.full_tokens, row.logprobs, row.action_mask, row.reward) for row in rows_of(recording)]
    for file in (theirs, theirs.with_name("theirs.json.raw")):
        found = [(row.full_tokens, row.logprobs, row.action_mask, row.reward) for row in rows_of(load_recording(file))]
        assert found == expected
