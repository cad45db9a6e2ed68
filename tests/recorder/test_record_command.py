"""`rlvr record` and `rlvr rows` on a small model: what was answered is in the file, also after a kill."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.cli.main import run
from rlvr.recorder.recording import RecordedCall, RecordedChoice, RecordingFile, read_recording
from rlvr.recorder.rows import make_rows
from tests.kit.chat_rows import qwen_folder
from tests.kit.open_server import TOOLS_TEMPLATE
from tests.kit.recorder import chat, post, read_message, recorder_process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("models") / "small", TOOLS_TEMPLATE)


def test_rows_are_shown_of_a_recording_and_of_what_it_is_written_as(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(model)
    first, path = words.encode("go:"), tmp_path / "calls.jsonl"
    answers = [words.encode("12"), words.encode("13"), words.encode("end")]
    again = [*first, *answers[1], *words.encode(" on:")]
    with RecordingFile(path, str(model)) as file:
        for number, (prompt, answer) in enumerate(zip([first, first, again], answers, strict=True)):
            choice = RecordedChoice(answer, [-0.5] * len(answer), "stop", {"role": "assistant", "content": "x"})
            file.append(RecordedCall(f"{number}", "r", "", "chat", "p", prompt, [choice], {}))
        file.append_reward("r", 0.5)

    def rows(*given: str) -> str:
        code = run(["rows", *given])
        out, error = capsys.readouterr()
        return out if code == 0 else f"{code}: {error}"

    expected = rows(str(path))
    assert "rollout r: 3 calls, 1 rows, reward 0.5" in expected and "SAMPLED '13'" in expected
    assert "read    ' on:'" in expected and "'12'" not in expected
    assert "SAMPLED '12'" in rows(str(path), "--keep-retried")
    for form, calls in (("openenv", 3), ("triplets", 2)):
        out = tmp_path / form
        assert "is written" in rows(str(path), "--to", form, "--out", str(out))
        assert rows(str(out)) == expected.replace("3 calls", f"{calls} calls")
        assert "there already" in rows(str(path), "--to", form, "--out", str(out))
    assert "2: " in rows(str(path), "--to", "openenv") and "openenv, triplets" in rows(
        str(path), "--to", "x", "--out", "y"
    )
    nameless = tmp_path / "nameless"
    nameless.write_text((tmp_path / "openenv").read_text().replace(str(model), ""))
    assert "give --tokenizer" in rows(str(nameless))
    assert rows(str(nameless), "--tokenizer", str(model)) == expected
    assert "cannot be read" in rows(str(tmp_path / "none"))


def test_a_model_is_recorded_and_the_file_is_continued(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    for count in (1, 2):
        with recorder_process(model, path) as (program, base):
            message = read_message(chat(base, "go", max_tokens=4, seed=1, temperature=0.5))
            read_message(chat(base, "go", message, "on", max_tokens=4, seed=2, temperature=0.5))
            assert post(base.removesuffix("/v1") + "/reward", {"reward": count})[0] == 200
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0
        found = read_recording(path)
        assert found.model == str(model) and [rollout.reward for rollout in found.rollouts] == [1.0, 2.0][:count]
    first, second = ([(row.full_tokens, row.logprobs) for row in make_rows(rollout)] for rollout in found.rollouts)
    assert first == second, "the same seeds"
    (row,) = make_rows(found.rollouts[0])
    assert row.num_action_tokens == 8 and row.temperature == 0.5 and all(value < 0 for value in row.logprobs if value)


@pytest.mark.slow
def test_every_call_that_was_answered_before_a_kill_is_in_the_file(model: Path, tmp_path: Path) -> None:
    path, answered = tmp_path / "calls.jsonl", list[tuple[str, str]]()

    def ask(base: str, name: str) -> None:
        for number in range(1000):
            try:
                status, answer = chat(base, f"{name} {number}", max_tokens=3)
            except OSError:
                return
            if status != 200:
                return
            answered.append((f"{name} {number}", answer["choices"][0]["message"]["content"]))

    for kill in range(3):
        with recorder_process(model, path) as (program, base):
            threads = [threading.Thread(target=ask, args=(base, f"{kill}/{n}")) for n in range(4)]
            for thread in threads:
                thread.start()
            before, deadline = len(answered), time.monotonic() + 60
            while len(answered) < before + 12 + kill:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            os.kill(program.pid, signal.SIGKILL)
            for thread in threads:
                thread.join()
    rollouts = read_recording(path).rollouts
    written: list[Any] = [
        (call.request["messages"][0]["content"], call.choices[0].message["content"])
        for rollout in rollouts
        for call in rollout.calls
    ]
    assert set(answered) <= set(written) and len(written) == len(set(written)) <= len(answered) + 3 * 4
    assert len(rollouts) == 3 and all(make_rows(rollout) for rollout in rollouts)


@pytest.mark.slow
def test_a_file_that_another_process_records_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    other = pytest.raises(AssertionError, match="being written by another process")
    with recorder_process(model, path), other, recorder_process(model, path):
        pass
    with pytest.raises(AssertionError, match="other machines"), recorder_process(model, path, "--host", "0.0.0.0"):
        pass
