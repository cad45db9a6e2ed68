"""A small stand-in for a vLLM server on this machine: real HTTP, the answers of vLLM 0.32, and faults that a test sets.

It samples with an engine of ours from the folders that it is given, so that a client is tested against real log-probs.
`make test-vllm` runs the same client against vLLM itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.core.types import StopReason
from rlvr.engine.checkpoint import load_policy
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.policy import Snapshot

BASE = "base"
_one_at_a_time = threading.Lock()  # building a model seeds the generator of the whole process


class FakeVllm:
    """Serves `engine`. `fault(path, body, answer)` may change an answer; `requests` are (path, body) in order."""

    def __init__(self, make_engine: Callable[[], Engine], max_model_len: int = 64, rank: int = 16) -> None:
        self.make_engine, self.max_model_len, self.rank = make_engine, max_model_len, rank
        self.fault: Callable[[str, dict[str, Any], Any], Any] = lambda path, body, answer: answer
        self.missing = set[str]()  # paths that the server does not have
        self.settings: dict[str, Any] = {}  # of /server_info, with paths that a server in development mode lists
        self.delay = 0.0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._lock = _one_at_a_time
        self.restart()

    def restart(self) -> None:
        """Forget all weights that were given."""
        self.engine = self.make_engine()
        self.policy = self.engine.create_policy("full")  # all weights, which `reload_weights` replaces
        self.adapters: dict[str, Snapshot] = {}
        self.roots: dict[str, str] = {}  # their folders
        self.version, self.paused = "default", False

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        with self._lock:
            self.requests.append((path, body))
            code, answer = self._answer(path, body)
            if code == 200:
                answer = self.fault(path, body, answer)
        return code, answer

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/v1/models":
                own = {"id": BASE, "parent": None, "max_model_len": self.max_model_len}
                return 200, {"data": [own, *({"id": n, "parent": BASE, "root": r} for n, r in self.roots.items())]}
            case "/server_info" if self.settings:
                return 200, {"vllm_config": self.settings}
            case "/openapi.json" if self.settings:
                return 200, {"paths": {"/v1/load_lora_adapter": {}}}
            case "/detokenize":
                return 200, {"prompt": self.engine.model.tokenizer.decode(body["tokens"], skip_special_tokens=False)}
            case "/v1/load_lora_adapter":
                return self._load(body["lora_name"], Path(body["lora_path"]))
            case "/v1/unload_lora_adapter":
                found, _ = self.adapters.pop(body["lora_name"], None), self.roots.pop(body["lora_name"], None)
                return (404, "cannot be found") if found is None else (200, "Success")
            case "/pause" | "/resume":
                self.paused = path == "/pause"
                return 200, {}
            case "/update_weight_version":
                self.version = body["new_version"]
                return 200, {}
            case "/collective_rpc":
                load_policy(Path(body["kwargs"]["weights_path"]), self.policy, self.engine.model, optimizer=False)
                return 200, {"results": [None]}
            case "/inference/v1/generate":
                return self._generate(body)
        return 404, {"detail": "Not Found"}

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.adapters:
            return 400, f"The lora adapter '{name}' has already been loaded."
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.rank:
            return 500, f"LoRA rank {rank} is greater than max_lora_rank {self.rank}."
        adapters = self.make_engine()
        adapters.create_policy("adapter", lora=LoraConfig(rank))
        self.adapters[name] = adapters.load_snapshot(folder)
        self._engines = {**getattr(self, "_engines", {}), name: adapters}
        self.roots[name] = str(folder)
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        model, asked, tokens = body["model"], body["sampling_params"], body["token_ids"]
        if model == BASE:
            engine, snapshot = self.engine, self.engine.snapshot(self.policy)
        elif model in self.adapters:
            engine, snapshot = self._engines[model], self.adapters[model]
        else:
            return 404, {"error": {"message": f"The model `{model}` does not exist. Valid aliases: {BASE}."}}
        if asked.get("ignore_eos"):
            stop: Any = asked.get("stop_token_ids") or asked.get("stop") or []
        else:
            stop = None
        params = SamplingParams(
            max_tokens=asked["max_tokens"], seed=asked.get("seed", 0), stop=stop,
            temperature=asked.get("temperature", 1.0),
        )  # fmt: skip
        scored, chosen = asked.get("prompt_logprobs") is not None, asked.get("logprob_token_ids")
        response = engine.sample(
            snapshot, ModelInput(tokens), asked.get("n", 1), params,
            prompt_logprobs=scored, topk_sample=0 if chosen else asked.get("logprobs") or 0,
        ).result()  # fmt: skip
        choices = [self._choice(i, s, asked.get("stop") or []) for i, s in enumerate(response.sequences)]
        if chosen:  # as vLLM does: the sampled token first, which takes the place of the last
            found = [engine.logprobs(snapshot, ModelInput([*tokens, token])).result()[-1] for token in chosen[:-1]]
            content = choices[0]["logprobs"]["content"][0]
            content["top_logprobs"] += as_entries(list(zip(chosen[:-1], found, strict=True)))
        rows = None
        if scored:
            assert response.prompt_logprobs is not None
            pairs = zip(tokens[1:], response.prompt_logprobs[1:], strict=True)
            rows = [None, *({str(token): {"logprob": value}} for token, value in pairs)]
        return 200, {"model": model, "choices": choices, "prompt_logprobs": rows}

    def _choice(self, index: int, sequence: Any, strings: list[str]) -> dict[str, Any]:
        likeliest = sequence.topk_logprobs or [[] for _ in sequence.tokens]
        stopped = sequence.stop_reason is StopReason.STOP
        content = [
            {"token_id": t, "logprob": v, "top_logprobs": [{"token_id": t, "logprob": v}, *as_entries(top)]}
            for t, v, top in zip(sequence.tokens, sequence.logprobs, likeliest, strict=True)
        ]
        return {
            "index": index,
            "finish_reason": sequence.stop_reason.value,
            "stop_reason": strings[0] if stopped and strings else None,
            "token_ids": sequence.tokens,
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(sequence.tokens)}],
        }


def as_entries(top: Sequence[tuple[int, Any]]) -> list[dict[str, Any]]:
    return [{"token_id": token, "logprob": value} for token, value in top]


@contextlib.contextmanager
def serve_vllm(fake: FakeVllm, port: int = 0) -> Iterator[str]:
    """The address of the server while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            time.sleep(fake.delay)
            code, answer = fake.answer(urlsplit(self.path).path, body)
            content = json.dumps(answer).encode()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = False  # `server_close` waits for them
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
