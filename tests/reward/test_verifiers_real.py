"""The library `verifiers` over the open endpoints, by the program of docs/tinker/openai-clients.md.

It needs an environment of its own: RLVR_VERIFIERS names the python there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from rlvr.engine.model_loading import build_model
from tests.kit.doc_pages import ROOT
from tests.kit.tinker_model import tokenizer
from tests.kit.tinker_server import TinkerServer
from tests.kit.tiny import LLAMA_LIKE, plain_logprobs

PYTHON = os.environ.get("RLVR_VERIFIERS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON, reason="RLVR_VERIFIERS names no python with verifiers: docs/tinker/openai-clients.md installs it"
    ),
]
MODEL = {**LLAMA_LIKE, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False, "initializer_range": 0.2}
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")  # of its renderer
SHOWN = "print(len(branch.token_ids), sum(branch.sampled_mask), trace.reward, branch.logprobs[-2:])"
ALL = "print(__import__('json').dumps([branch.token_ids, branch.sampled_mask, branch.logprobs, trace.reward]))"


def test_episodes_of_the_page_have_the_tokens_and_log_probs_of_the_model(tmp_path: Path) -> None:
    words = tokenizer()
    words.add_tokens(list(MARKS), special_tokens=True)
    config = {**MODEL, "vocab_size": len(words)}
    model = build_model(config, words, seed=0, device="cpu", dtype="float32")
    for part in (model.module, words):
        part.save_pretrained(tmp_path / "my-model")
    page = (ROOT / "docs" / "tinker" / "openai-clients.md").read_text(encoding="utf-8")
    (program,) = [block for block in page.split("```") if "load_environment" in block]
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
    assert shutil.which("uv", path=path), "verifiers runs its programs by uv: install it beside verifiers"
    with TinkerServer({"small": tmp_path / "my-model"}, tmp_path / "state", "--device", "cpu") as server:
        for old, new in ((SHOWN, ALL), ("http://127.0.0.1:8000", server.url)):
            assert program.count(old) == 1, "the page has another program now"
            program = program.replace(old, new)
        (tmp_path / "sums_taskset.py").write_text(program.removeprefix("text\n"))
        done = subprocess.run(
            [PYTHON, "sums_taskset.py"],
            cwd=tmp_path,
            env={
                **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                "PATH": path,
                "RLVR_API_KEY": "none-needed",
                "HF_HUB_OFFLINE": "1",
            },
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    episodes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(episodes) == 3, (done.stdout + done.stderr)[-3000:]
    for tokens, mask, logprobs, reward in episodes:
        assert 1 <= sum(mask) <= 12 and reward in (0.0, 1.0)
        first = mask.index(True)
        assert all(mask[first:]) and not any(mask[:first]), "one turn"
        expected = plain_logprobs(model.module, tokens[:first], tokens[first:])
        assert logprobs[first:] == pytest.approx(expected, abs=1e-4) and not any(logprobs[:first])
