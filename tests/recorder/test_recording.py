"""The file of a recording: durable, whole after a crash, and written by one process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlvr.recorder.recording import RecordedCall, RecordedChoice, RecordedRollout, RecordingFile, read_recording

MODEL = "acme/small"


def call(number: int = 0, rollout: str = "r", text: str = "ab") -> RecordedCall:
    message = {"role": "assistant", "content": text}
    choices = [RecordedChoice([3, 4], [-0.5, -0.25], "stop", message), RecordedChoice([5], [-1.0], "length", message)]
    request = {"messages": [{"role": "user", "content": text}], "temperature": 0.5}
    settings = {"temperature": 0.5}
    return RecordedCall(f"{number}", rollout, "g", "chat", "p@1", [1, 2], choices, request, settings, 1.5, 2.5)


def record(path: Path, *calls: RecordedCall) -> None:
    with RecordingFile(path, MODEL) as file:
        for one in calls:
            file.append(one)


def test_a_line_is_written_without_a_copy_of_the_prompt_and_the_request() -> None:
    made = call(0)
    line = made.to_json()
    assert line["prompt"] is made.prompt and line["request"] is made.request
    assert line["choices"][0]["tokens"] is made.choices[0].tokens and RecordedCall.of_json(line) == made


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calls.jsonl"
    first, second, other = call(0), call(1, text="\u2028 \ud800 é\n"), call(2, "s")
    with RecordingFile(path, MODEL) as file:
        file.append(first)
        assert read_recording(path).rollouts == [RecordedRollout("r", "g", [first])], "on disk when append returns"
        file.append_reward("r", 0.25)
        file.append(other)
        file.append_reward("r", 1.0, "tests")
        file.append(second)
    found = read_recording(path)
    assert found.model == MODEL and [(r.id, r.reward, len(r.calls)) for r in found.rollouts] == [
        ("r", 1.0, 2),
        ("s", None, 1),
    ]
    assert found.rollouts[0].calls[1].choices[0].message["content"] == "\u2028 ? é\n"


def test_a_torn_last_line_is_left_out_and_cut_off_when_the_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    record(path, call(0), call(1))
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for cut in (1, ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 1, ends[1] + 9, ends[2] - 1):
        path.write_bytes(whole[:cut])
        kept = max(0, sum(end <= cut for end in ends) - 1)
        assert sum(len(rollout.calls) for rollout in read_recording(path).rollouts) == kept
        record(path, call(7))
        (rollout,) = read_recording(path).rollouts
        assert [one.id for one in rollout.calls] == [*map(str, range(kept)), "7"]
        assert len(path.read_bytes().splitlines()) == kept + 2


def test_two_processes_never_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    program = (
        f"from pathlib import Path; from rlvr.recorder.recording import *; RecordingFile(Path({str(path)!r}), 'm')"
    )
    with RecordingFile(path, MODEL) as file:
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert other.returncode == 1 and "being written by another process" in other.stderr
        file.append(call())
    assert len(read_recording(path).rollouts) == 1
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert other.returncode == 1 and "recording of 'acme/small', not of 'm'" in other.stderr
    record(path, call(1))  # and a refused file is not held


def test_a_full_disk_tears_no_line_that_others_follow(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RecordingFile(path, MODEL) as file:
        file.append(call(0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                file.append(call(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        file.append(call(2))
    assert [one.id for one in read_recording(path).rollouts[0].calls] == ["0", "2"]


def test_any_thread_may_append(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with RecordingFile(path, MODEL) as file:
        threads = [
            threading.Thread(target=lambda n=n: [file.append(call(n * 10 + i)) for i in range(5)]) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (rollout,) = read_recording(path).rollouts
    assert sorted(int(one.id) for one in rollout.calls) == [n * 10 + i for n in range(4) for i in range(5)]


LINE = call().to_json()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "2 is no line"),
        ("[]", "no kind"),
        ('{"kind": "note"}', "no kind"),
        (json.dumps({**LINE, "version": 2}), "version 2"),
        (json.dumps({**LINE, "choices": [{"tokens": [1]}]}), "not a recorded call"),
        (json.dumps({**LINE, "choices": None}), "not a recorded call"),
        (json.dumps({**LINE, "prompt": ["a"]}), "call '0': the token ids of its prompt"),
        (json.dumps({**LINE, "choices": [{**LINE["choices"][0], "logprobs": [0]}]}), "2 tokens with 1 log-probs"),
        (json.dumps({**LINE, "choices": [{**LINE["choices"][0], "mask": [1]}]}), "mask"),
        ('{"version": 1, "kind": "reward", "rollout": "r", "reward": "high"}', "high"),
        ("[" * 100_000, "no line of a recording"),
    ],
)
def test_a_line_of_another_kind_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "calls.jsonl"
    record(path)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"calls\.jsonl:2") as refused:
        read_recording(path)
    assert words in str(refused.value)
    with pytest.raises(ValueError, match=r"calls\.jsonl:2"):
        RecordingFile(path, MODEL)


def test_a_file_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_recording(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="cannot be written"):
        RecordingFile(tmp_path, MODEL)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        RecordingFile(tmp_path / "file" / "calls.jsonl", MODEL)
