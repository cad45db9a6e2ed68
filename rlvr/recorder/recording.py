"""A recording: the calls of rollouts, one JSON line each, in the order in which they were answered.

    with RecordingFile(path, model="./my-model") as file:
        file.append(call)              # on disk when this returns
    read_recording(path).rollouts      # [RecordedRollout(...), ...]

A line has the prompt as the policy read it, each completion as it was sampled, its log-probs, which weights sampled it
with which settings, and the request in the words of the program. Keys and headers are never written. A last line that
is not whole, after a crash, is left out when it is read, and cut off when the file is continued.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlvr.chat.dialects.forms import ChatAnswer
from rlvr.core.files import lock_file, sync_folder
from rlvr.recorder.open_rollouts import PendingCall

VERSION = 1
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")  # of sampling, that a program may give


@dataclass(frozen=True)
class RecordedChoice:
    """One completion: its tokens as they were sampled, and the message that the program got. `mask` is 1 where a token
    is trained; empty: all are."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    message: dict[str, Any]
    mask: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class RecordedCall:
    """One call that was answered. Rollouts of one `group` are of the same task. `settings` are the sampling settings
    that the program gave, of which the temperature changes the log-probs; `began` and `ended` are in Unix seconds."""

    id: str
    rollout: str
    group: str
    dialect: str
    policy: str
    prompt: list[int]
    choices: list[RecordedChoice]
    request: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    began: float = 0.0
    ended: float = 0.0

    def to_json(self) -> dict[str, Any]:
        fields = {**vars(self), "choices": [vars(choice) for choice in self.choices]}
        return {"version": VERSION, "kind": "call", **fields}

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> RecordedCall:
        """Read a call from a line of JSON; ValueError for a line that is no call."""
        given = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        try:
            given["choices"] = [RecordedChoice(**choice) for choice in given["choices"]]
            call = cls(**given)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a recorded call ({error})") from error
        call.check()
        return call

    def check(self) -> None:
        """ValueError for a call that cannot be trained on: without token ids, or with other log-probs than tokens."""
        if not _are_ids(self.prompt) or not self.prompt:
            raise ValueError(f"call {self.id!r:.80}: the token ids of its prompt are missing or no numbers from 0 on")
        for choice in self.choices:
            if not _are_ids(choice.tokens):
                raise ValueError(f"call {self.id!r:.80}: the token ids of its answer are no numbers from 0 on")
            if not isinstance(choice.logprobs, list) or len(choice.logprobs) != len(choice.tokens):
                given = len(choice.logprobs) if isinstance(choice.logprobs, list) else "no"
                raise ValueError(f"call {self.id!r:.80}: {len(choice.tokens)} tokens with {given} log-probs")
            if wrong := [x for x in choice.logprobs if not _is_logprob(x)]:
                raise ValueError(f"call {self.id!r:.80}: {wrong[0]!r:.40} is no log-prob; expected at most 0")
            if choice.mask and (len(choice.mask) != len(choice.tokens) or not {0, 1}.issuperset(choice.mask)):
                raise ValueError(f"call {self.id!r:.80}: its mask is not a 0 or 1 for each of its tokens")


def _are_ids(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value <= 1e-3  # engines round above 0


def make_call(
    pending: PendingCall, rollout: str, group: str, policy: str, answers: Sequence[ChatAnswer], began: float
) -> RecordedCall:
    """The record of a call that was answered now; `policy` names the weights that answered."""
    choices = [RecordedChoice(list(a.tokens), list(a.logprobs), a.finish, a.message) for a in answers]
    settings = {name: value for name in SETTINGS if (value := getattr(pending.call, name)) is not None}
    prompt = list(answers[0].prompt_tokens)
    return RecordedCall(
        pending.id, rollout, group, pending.dialect, policy, prompt, choices, pending.request, settings, began,
        time.time(),
    )  # fmt: skip


@dataclass
class RecordedRollout:
    """The calls of one rollout, and the reward that was reported for it, if one was.

    `call_rewards` are rewards of branches, by the id of a call. If several calls of a branch have a reward, that of
    the latest call counts.
    """

    id: str
    group: str = ""
    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    reward: float | None = None
    call_rewards: dict[str, float] = field(default_factory=dict[str, float])


@dataclass
class Recording:
    """What a file holds: the model whose policy was recorded, and the rollouts."""

    model: str = ""
    rollouts: list[RecordedRollout] = field(default_factory=list[RecordedRollout])


class RecordingFile:
    """A recording of the policy of `model` that is being written, by any thread of one process."""

    def __init__(self, path: Path, model: str) -> None:
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held = lock_file(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}); give another file") from error
        if held is None:
            raise ValueError(f"{path} is being written by another process; give another file, or end that process")
        self._held = held
        try:
            lines = _read_whole_lines(path)
            if lines and (before := read_recording(path).model) != model:
                raise ValueError(f"{path} is a recording of {before!r}, not of {model!r}; give another file")
            self._file = path.open("ab", buffering=0)
        except BaseException:
            held.close()
            raise
        self._size = path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(self._size)
        if not lines:
            self._write(make_head(model))
            sync_folder(path.parent)

    def append(self, call: RecordedCall) -> None:
        """Write a call. It is on disk when this returns."""
        self._write(call.to_json())

    def append_reward(self, rollout: str, reward: float, source: str = "", call: str = "") -> None:
        """Write the reward of a rollout, or of the branch of a call; of several the last counts."""
        self._write(make_reward(rollout, reward, source, call))

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._size = _append(self._file, line, self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._held.close()


def make_head(model: str) -> dict[str, Any]:
    """The first line of a recording."""
    return {"version": VERSION, "kind": "recording", "model": model}


def make_reward(rollout: str, reward: float, source: str, call: str = "") -> dict[str, Any]:
    """The line of a reward."""
    line = {"version": VERSION, "kind": "reward", "rollout": rollout, "reward": reward, "source": source}
    return line | ({"call": call} if call else {})


def append_line(path: Path, line: dict[str, Any]) -> int:
    """Append a line to a file that nothing else writes; how many bytes. It is on disk when this returns."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        return _append(file, line, before) - before


def _append(file: FileIO, line: dict[str, Any], size: int) -> int:
    """Write a line at the end of a file of `size` bytes, durably; its size then."""
    text = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    try:
        rest = memoryview(text)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError:  # a full disk: no line that others follow may be torn
        file.truncate(size)
        raise
    return size + len(text)


def read_recording(path: Path) -> Recording:
    """A recording; its rollouts are in the order of their first calls. ValueError for another line."""
    model, rollouts = "", dict[str, RecordedRollout]()
    for number, line in enumerate(_read_whole_lines(path), 1):
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict) or fields.get("kind") not in ("recording", "call", "reward"):
                raise ValueError("the line has no kind `recording`, `call` or `reward`")
            if fields.get("version") != VERSION:
                raise ValueError(f"the recording has version {fields.get('version')!r:.40}, expected {VERSION}")
            if fields["kind"] == "recording":
                model = str(fields["model"])
            elif fields["kind"] == "call":
                call = RecordedCall.of_json(fields)
                rollout = rollouts.setdefault(call.rollout, RecordedRollout(call.rollout))
                rollout.group = call.group
                rollout.calls.append(call)
            else:
                rollout = rollouts.setdefault(fields["rollout"], RecordedRollout(fields["rollout"]))
                if fields.get("call"):
                    rollout.call_rewards[str(fields["call"])] = float(fields["reward"])
                else:
                    rollout.reward = float(fields["reward"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}:{number} is no line of a recording: {error!s:.200}") from error
    return Recording(model, list(rollouts.values()))


def _read_whole_lines(path: Path) -> list[bytes]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a file that `rlvr record` wrote") from error
    return [line for line in raw[: raw.rfind(b"\n") + 1].split(b"\n") if line.strip()]
