"""A recorder on a port of this machine with a policy that says what a test wrote, and programs that call it."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.chat.conversation import ChatTemplate
from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.recorder.recording import RecordedRollout, RecordingFile, read_recording
from rlvr.recorder.recording_server import RecordingPolicy, RecordingServer
from rlvr.web.server import BackgroundServer, bind_socket, server_url
from tests.kit.code_rows import chat_tokenizer
from tests.kit.forked_process import Program
from tests.kit.open_server import TOOLS_TEMPLATE

MODEL = "acme/small"


def text_tokenizer() -> Any:
    made = chat_tokenizer()
    made.chat_template = TOOLS_TEMPLATE
    made.model_max_length = 2_000
    return made


def post(url: str, body: Any = None, seconds: float = 60.0) -> tuple[int, Any]:
    """(status, JSON or text) of one POST; of a GET without a body."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", "authorization": "Bearer any"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            text, status = response.read().decode(), response.status
    except urllib.error.HTTPError as error:
        text, status = error.read().decode(), error.code
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def chat(base: str, *messages: Any, **more: Any) -> tuple[int, Any]:
    """One call of chat completions; a text is a message of the user."""
    read = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    return post(f"{base}/chat/completions", {"model": "any", "messages": read, **more})


def read_message(answer: tuple[int, Any]) -> Any:
    """The assistant's message of an answer."""
    assert answer[0] == 200, answer
    return answer[1]["choices"][0]["message"]


@dataclass
class Recorder:
    """`turns` are what the policy says, one after the other, each after `wait` seconds."""

    url: str
    path: Path
    server: RecordingServer
    sampler: ScriptedSamplingClient
    turns: list[str]
    wait: float = 0.0

    def open(self, group: str = "") -> dict[str, str]:
        status, rollout = post(f"{self.url}/rollouts", {"group": group} if group else {})
        assert status == 200, rollout
        return rollout

    @property
    def recorded(self) -> list[RecordedRollout]:
        return read_recording(self.path).rollouts


@contextmanager
def recorder(path: Path, *turns: str) -> Iterator[Recorder]:
    tokenizer = text_tokenizer()
    template = ChatTemplate(tokenizer)

    def say(number: int) -> list[int]:
        time.sleep(made.wait)
        text = made.turns[number % len(made.turns)]
        if text == "FAIL":
            raise RuntimeError("the engine is out of memory")
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    sampler = ScriptedSamplingClient(tokenizer, say)
    with bind_socket("127.0.0.1", 0) as listening, RecordingFile(path, MODEL) as file:
        policy = RecordingPolicy(sampler, file, template)
        server = RecordingServer(policy, file, template, MODEL)
        made = Recorder(server_url(listening), path, server, sampler, list(turns))
        with BackgroundServer(server.app, listening):
            yield made
        policy.stop()


def write_traffic(model: Path, path: Path) -> None:
    """Record two tasks of four rollouts each of a model in a folder, with a reward of 1 for every other rollout."""
    import rlvr

    sampler = rlvr.ServiceClient(folder=path.parent / "runs").create_sampling_client(base_model=str(model))
    template = ChatTemplate(sampler.get_tokenizer())
    with bind_socket("127.0.0.1", 0) as listening, RecordingFile(path, str(model)) as file:
        policy = RecordingPolicy(sampler, file, template)
        server = RecordingServer(policy, file, template, str(model))
        with BackgroundServer(server.app, listening):
            for number in range(8):
                _, rollout = post(f"{server_url(listening)}/rollouts", {"group": f"task-{number // 4}"})
                more = {"max_tokens": 6, "seed": number}
                message = read_message(chat(rollout["openai_base_url"], f"task {number // 4}", **more))
                read_message(chat(rollout["openai_base_url"], f"task {number // 4}", message, "go on", **more))
                assert post(f"{rollout['url']}/reward", {"reward": number % 2})[0] == 200
        policy.stop()


@contextmanager
def recorder_process(model: Path, out: Path, *settings: str) -> Iterator[tuple[Program, str]]:
    """`rlvr record` in a process of its own, and the base URL of its first rollout."""
    words = ["-m", "rlvr.cli.main", "record", "--model", str(model), "--out", str(out), "--port", "0", *settings]
    program = Program(words, stderr=subprocess.PIPE)
    try:
        lines: list[str] = []
        assert program.stderr is not None
        for line in program.stderr:
            lines.append(line)
            if found := re.search(r"OPENAI_BASE_URL=(\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=program.stderr.read, daemon=True)
        reader.start()
        yield program, found[1]
        program.kill()
        reader.join()
    finally:
        program.kill()
        program.wait(60)
        assert program.stderr is not None
        program.stderr.close()
