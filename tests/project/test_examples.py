"""The examples run as printed and learn what they say."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.forked_process import run_forked
from tests.kit.vllm_server import FakeVllm, serve_vllm

ROOT = Path(__file__).parents[2]
FROM_TRL = ROOT / "examples" / "from_trl"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder with what the scripts beside TRL's read."""
    pytest.importorskip("trl", reason="the extra [dev] is not installed")
    done = run_forked([str(FROM_TRL / "prepare.py")], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "lora", "rewards", "tools"])
def test_the_scripts_of_trl_run(name: str, prepared: Path) -> None:
    """Ours run with their page (`test_docs.py`)."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = run_forked([str(FROM_TRL / f"{name}_trl.py")], cwd=prepared, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert "'rewards/close/mean'" in done.stdout and list((prepared / f"{name}-trl").glob("*.safetensors"))


@pytest.mark.slow
def test_the_script_with_vllm_runs_against_a_stand_in_for_the_server(prepared: Path) -> None:
    from rlvr.engine.engine import Engine
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    model = str(prepared / "tiny-model")

    def make_engine() -> Engine:
        return Engine(load_model(model, load_tokenizer(model), device="cpu", dtype="float32"))

    fake = FakeVllm(make_engine, max_model_len=2048)
    with serve_vllm(fake) as url:
        script = (FROM_TRL / "vllm_rlvr.py").read_text(encoding="utf-8")
        assert "http://127.0.0.1:8790" in script
        (prepared / "script.py").write_text(script.replace("http://127.0.0.1:8790", url), encoding="utf-8")
        done = run_forked(["script.py"], cwd=prepared, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FINAL RESULTS" in done.stdout
    assert sum(path == "/inference/v1/generate" for path, _ in fake.requests) >= 6, "it sampled there"


@pytest.mark.slow
def test_grpo_from_scratch_learns_from_verdicts_alone() -> None:
    """50 steps lift the reward of a random model well above guessing (1 in 5)."""
    done = run_forked(["examples/grpo_from_scratch.py", "--steps", "70", "--seed", "1"], cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"first step ([\d.]+), last ten ([\d.]+)", done.stdout)
    assert found, done.stdout
    first, last = map(float, found.groups())
    assert first < 0.15 and last > 0.45, done.stdout


@pytest.mark.slow
def test_ctrl_c_ends_the_own_loop_with_the_exit_code_of_the_commands(tmp_path: Path) -> None:
    words = [sys.executable, "-u", "examples/own_loop.py", "--folder", str(tmp_path / "run"), "--steps", "5000"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout and script.stderr
        while not script.stdout.readline().startswith("step 1/"):
            assert script.poll() is None, script.stderr.read()
        script.send_signal(signal.SIGINT)
        assert "the same program goes on" in script.stderr.read()
    assert script.returncode == 130
