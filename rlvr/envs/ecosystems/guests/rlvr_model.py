"""The provider `rlvr` of Inspect: a run, a checkpoint or a model of rlvr as the model of an evaluation.

    inspect eval task.py --model rlvr/runs/mine                      # also runs/mine/checkpoints/best, ./my-model
    inspect eval task.py --model rlvr/mine --model-base-url http://127.0.0.1:8000/v1

Without an address it starts `rlvr serve engine` with the interpreter that has rlvr, once for each path, and ends it
with this process: models stay out of Inspect's interpreter, and a run samples as it does in training. Needs inspect-ai,
and this folder in PYTHONPATH, where its entry point is found; imports nothing of rlvr.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.model._call_tools import parse_tool_call
from inspect_ai.tool import ToolChoice, ToolFunction, ToolInfo

START_SECONDS = 600.0  # a large model is read from a disk
ANY_KEY = "none-needed"
_STOPS = {"length": "max_tokens", "tool_calls": "tool_calls", "content_filter": "content_filter"}
# Names of Inspect's settings, and of the endpoint's; what the server does not take it refuses by name.
_SETTINGS = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed",
    "stop_seqs": "stop", "num_choices": "n", "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty", "logit_bias": "logit_bias",
}  # fmt: skip
_servers: dict[tuple[str, ...], LocalServer] = {}
_lock = threading.Lock()


class PolicyServerError(RuntimeError):
    """The server refused or failed; `status` is that of its response, 0 without one."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class LocalServer:
    """A server: `rlvr serve engine` for one path, in a process of its own. Starting blocks."""

    def __init__(self, program: tuple[str, ...], path: str) -> None:
        self._state = tempfile.TemporaryDirectory(prefix="rlvr-inspect-")
        self._log = os.path.join(self._state.name, "output.txt")
        words = ["serve", "engine", "--model", f"policy={path}", "--port", "0", "--state", f"{self._state.name}/state"]
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "RLVR_API_KEYS")}
        paths = kept.get("PYTHONPATH", "").split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path and not _is_here(path))
        with open(self._log, "wb") as output:
            self._process = subprocess.Popen(
                [*program, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=kept
            )
        atexit.register(self.close)
        self.url = f"{self._wait()}/v1"

    def _wait(self) -> str:
        for _ in range(int(START_SECONDS / 0.2)):
            said = Path(self._log).read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"TINKER_BASE_URL=(http://\S+)", said):
                return found[1]
            if self._process.poll() is not None:
                self.close()
                raise PolicyServerError(
                    f"`rlvr serve engine` ended with exit code {self._process.returncode}: {said[-2000:]}"
                )
            time.sleep(0.2)
        self.close()
        raise PolicyServerError(f"`rlvr serve engine` did not start within {START_SECONDS:g} s: {said[-2000:]}")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._state.cleanup()


def _is_here(path: str) -> bool:
    return os.path.realpath(path) == os.path.dirname(os.path.realpath(__file__))


def find_program(python: str | None) -> tuple[str, ...]:
    """The command `rlvr`: of an interpreter, or the one on the PATH."""
    given = python or os.environ.get("RLVR_PYTHON")
    if given:
        found = shutil.which(os.path.expanduser(given))
        if found is None:
            raise PolicyServerError(f"python={given!r} is no program; give the path of the interpreter that has rlvr")
        return (found, "-m", "rlvr")
    if (program := shutil.which("rlvr")) is None:
        raise PolicyServerError(
            "the program rlvr is not on the PATH; give -M python=PATH of the interpreter that has it (or RLVR_PYTHON), "
            "or the address of `rlvr serve engine`: --model-base-url http://127.0.0.1:8000/v1"
        )
    return (program,)


def find_server(python: str | None, path: str) -> str:
    """The address of the server for a path, which is started if there is none yet."""
    key = (*find_program(python), path)
    with _lock:
        if key not in _servers:
            _servers[key] = LocalServer(key[:-1], path)
        return _servers[key].url


@modelapi(name="rlvr")
class RlvrModel(ModelAPI):
    """The model `rlvr/...` of Inspect. `python` is the interpreter that has rlvr; by default RLVR_PYTHON, or the
    program `rlvr` on the PATH."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),
        python: str | None = None,
        **model_args: Any,
    ) -> None:
        if model_args:
            raise ValueError(f"rlvr: unknown model arguments {', '.join(model_args)}; it takes python")
        super().__init__(model_name, base_url or os.environ.get("RLVR_BASE_URL"), api_key, ["RLVR_API_KEY"], config)
        self._python, self._is_text = python, False
        self._client: httpx.AsyncClient | None = None
        if self.base_url is None:
            find_program(python)  # a mistake is said before the evaluation begins

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        name = self.model_name
        url = self.base_url
        if url is None:
            place = Path(name).expanduser()
            path = str(place.resolve()) if place.exists() else name
            url, name = await asyncio.to_thread(find_server, self._python, path), "policy"
        settings = {theirs: value for ours, theirs in _SETTINGS.items() if (value := getattr(config, ours)) is not None}
        body = {"model": name, **settings}
        messages = [write_message(message) for message in input]
        if not self._is_text:
            chat = {**body, "messages": messages, **write_tools(tools, tool_choice)}
            try:
                return self._read(await self._post(f"{url}/chat/completions", chat), tools)
            except PolicyServerError as error:
                if "context_length_exceeded" in str(error):
                    return ModelOutput.from_content(self.model_name, "", "model_length", str(error))
                if "no chat template" not in str(error) or tools or [one["role"] for one in messages] != ["user"]:
                    raise
        answer = await self._post(f"{url}/completions", {**body, "prompt": messages[0]["content"]})
        self._is_text = True  # as in training: a prompt stays as it stands where there is no template
        return self._read(answer, tools)

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None, trust_env=False)
        key = self.api_key or os.environ.get("RLVR_API_KEY") or ANY_KEY
        try:
            answer = await self._client.post(url, json=body, headers={"authorization": f"Bearer {key}"})
        except httpx.HTTPError as error:
            raise PolicyServerError(
                f"{url} cannot be reached ({type(error).__name__}: {error}); start `rlvr serve engine`, or correct "
                "the address"
            ) from error
        if answer.is_error:
            raise PolicyServerError(f"{url} answered {answer.status_code}: {answer.text[:2000]}", answer.status_code)
        return answer.json()

    def _read(self, answer: dict[str, Any], tools: list[ToolInfo]) -> ModelOutput:
        choices = [self._read_choice(one, tools) for one in answer["choices"]]
        used = answer.get("usage") or {}
        usage = ModelUsage(
            input_tokens=used.get("prompt_tokens", 0), output_tokens=used.get("completion_tokens", 0),
            total_tokens=used.get("total_tokens", 0),
        )  # fmt: skip
        return ModelOutput(
            model=self.model_name, choices=choices, usage=usage,
            metadata={"system_fingerprint": answer.get("system_fingerprint")},
        )  # fmt: skip

    def _read_choice(self, choice: dict[str, Any], tools: list[ToolInfo]) -> ChatCompletionChoice:
        message = choice.get("message") or {"content": choice.get("text")}
        calls = [
            parse_tool_call(call["id"], call["function"]["name"], call["function"]["arguments"], tools)
            for call in message.get("tool_calls") or []
        ]
        said = ChatMessageAssistant(
            content=message.get("content") or "", tool_calls=calls or None, source="generate", model=self.model_name
        )
        return ChatCompletionChoice(message=said, stop_reason=_STOPS.get(choice["finish_reason"], "stop"))

    def should_retry(self, ex: BaseException) -> bool:
        return isinstance(ex, PolicyServerError) and ex.status in (429, 503)

    def connection_key(self) -> str:
        return self.base_url or self.model_name

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def write_message(message: ChatMessage) -> dict[str, Any]:
    if not isinstance(message.content, str) and (odd := [part.type for part in message.content if part.type != "text"]):
        raise ValueError(f"rlvr: a message has a part {odd[0]!r}, which is not supported; expected text")
    written: dict[str, Any] = {"role": message.role, "content": message.text}
    if isinstance(message, ChatMessageTool):
        text = message.error.message if message.error else message.text
        written |= {"tool_call_id": message.tool_call_id, "content": text}
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return written


def write_tools(tools: list[ToolInfo], choice: ToolChoice) -> dict[str, Any]:
    if not tools:
        return {}
    functions = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters.model_dump(exclude_none=True),
            },
        }
        for tool in tools
    ]
    if isinstance(choice, ToolFunction):
        wanted: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        wanted = "required" if choice == "any" else choice
    return {"tools": functions, "tool_choice": wanted}
