"""A small text model with tools in its chat template, behind the engine server, for tests of the open endpoints."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.tinker_model import CONFIG, tokenizer
from tests.kit.tinker_server import serving

NAME = "acme/Small-1B"
# The form of Qwen and Hermes, as far as tests need it.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.tool_calls %}"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ message.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}"
    "{% if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% endfor %}]<|im_end|>{% elif message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% else %} {{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)


def text_tokenizer(template: str | None = TOOLS_TEMPLATE) -> Any:
    made = tokenizer()
    made.chat_template = template
    return made


def text_engine(template: str | None = TOOLS_TEMPLATE, seed: int = 1) -> Any:
    from rlvr.engine.engine import Engine
    from rlvr.engine.model_loading import build_model

    words = text_tokenizer(template)
    config = {**CONFIG, "vocab_size": len(words)}
    return Engine(build_model(config, words, seed=seed, device="cpu", dtype="float32"))


@contextmanager
def open_endpoints(engines: dict[str, Any], state: Path, keys: list[str] | None = None) -> Iterator[tuple[Any, int]]:
    """(backend, port)."""
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
    from rlvr.tinker_server.http.app import create_app
    from rlvr.web.auth import ApiKeys

    backend = TinkerBackend(engines, state)
    try:
        with serving(create_app(backend, ApiKeys(keys or []))) as port:
            yield backend, port
    finally:
        backend.close()


def request(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """(status, JSON or text) of one request to the server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(
            "GET" if data is None else "POST", path, data, {"Content-Type": "application/json", **headers}
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in (answer.getheader("content-type") or "") else text
    finally:
        connection.close()


def events(text: str) -> list[Any]:
    """The chunks of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-2:]
    return [json.loads(line) for line in lines[:-1]]
