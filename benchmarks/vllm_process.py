"""A vLLM server as a process of this machine: for the benchmarks and for the tests that run against vLLM itself.

RLVR_VLLM names the python of vLLM's environment (`make vllm-env`). The address stays the same over restarts. Exercised
by `make test-vllm`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from rlvr.clients.vllm.vllm_server import WHOLE_PROMPTS

PYTHON = os.environ.get("RLVR_VLLM", "")
MISSING = "RLVR_VLLM names no python with vLLM: `make vllm-env` installs one (3.4 GB)"
START_SECONDS = 900.0
ADAPTERS = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "4")
PROCESSED, RAW = "processed_logprobs", "raw_logprobs"


class VllmProcess:
    """Serves the folder `model` in float32 while the block runs; `flags` go to vLLM's command, its output to `log`."""

    def __init__(
        self, model: Path, log: Path, *flags: str, mode: str = PROCESSED, max_model_len: int = 128, **settings: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self._log, self._process = f"http://127.0.0.1:{self.port}", log, None
        options = {
            "--model": str(model), "--served-model-name": "base", "--host": "127.0.0.1", "--port": str(self.port),
            "--dtype": "float32", "--max-model-len": str(max_model_len), "--logprobs-mode": mode,
        }  # fmt: skip
        words = [word for option in options.items() for word in option]
        module = [
            PYTHON,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--enforce-eager",
            "--enable-scale-out",
            WHOLE_PROMPTS,
        ]
        self._command = [*module, *words, *flags]
        self._environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **settings,
        }  # fmt: skip

    def launch(self) -> None:
        """Start the processes, without waiting for them."""
        with open(self._log, "a") as out:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=out, stderr=subprocess.STDOUT, cwd=self._log.parent,
                start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"vLLM did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.5)

    def is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
        except OSError:
            return False
        return True

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signal the server and its engine, a process of its own, and wait for the server."""
        if self._process is None:
            return
        os.killpg(self._process.pid, number)
        try:
            self._process.wait(60)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process = None

    def __enter__(self) -> Self:
        self.launch()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
