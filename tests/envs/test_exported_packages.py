"""Exported packages in the real projects: verifiers (its `vf-eval` and our adapter), and a server of OpenEnv."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")
pytest.importorskip("websockets", reason="websockets is not installed")

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.envs.ecosystems.export.environment_export import export_environment
from rlvr.envs.ecosystems.export.exportable import ExportRequest
from rlvr.envs.ecosystems.guest_process import GUESTS
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.ecosystems import find_interpreter
from tests.kit.open_server import NAME, TOOLS_TEMPLATE, open_endpoints, text_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
TEXT.model_max_length = 4_000
GAME = """
class Game:
    max_turns = 2
    reward_range = (-0.25, 1)

    def reset(self, seed):
        self.hidden = 1 + seed % 3
        return f"guess {self.hidden}"

    def step(self, action):
        if action.strip() == str(self.hidden):
            return "", 1.0, True
        return "again", -0.25, False
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exported_game.py").write_text(GAME)


def export(target: str) -> tuple[Path, Path]:
    """Sums in one turn, and a game."""
    sums = ExportRequest("small_tasks", {"families": ["sums"]}, tasks=9)
    return (
        export_environment(sums, target, f"sums_{target}"),
        export_environment(ExportRequest("exported_game:Game", tasks=9), target, f"game_{target}"),
    )


def play(source: Any, task: Any, *turns: str) -> Any:
    made = apply_prompt_options(source, TEXT, PromptOptions())
    task = next(one for one in made.heldout(None) if one.id == task.id)
    said = [list(TEXT.encode(turn, add_special_tokens=False)) for turn in turns]
    groups = open_groups(made, [task], 1, TEXT, "g")
    sampler = ScriptedSamplingClient(TEXT, lambda i: [*said[i % len(said)], TEXT.eos_token_id])
    (played,) = rollout(groups, sampler, SamplingParams(100), seed=1)
    score([played], resolve_reward("environment"))
    return played


def check_round_trip(sums: Any, game: Any) -> None:
    """Right and wrong answers, and tasks of both sides, as they are in the original."""
    original = resolve_environment("small_tasks", families=["sums"])
    assert sums.size("") == 9 and len(sums.heldout(None)) == 9
    asked = {task.prompt: task.meta["answer"] for task in original.heldout(None)}
    for task in sums.heldout(2):
        first = TEXT.decode(play(sums, task, "zz").prompt_tokens)
        (prompt,) = [one for one in asked if one in first]
        rewards = [play(sums, task, said).reward for said in (f"It is {asked[prompt]}", "It is 1000", "")]
        assert rewards == [1.0, 0.0, 0.0]
    assert game.size("") == 9
    task = game.heldout(1)[0]
    lost = play(game, task, "0", "0")
    prompt = TEXT.decode(lost.prompt_tokens)
    right = prompt[prompt.index("guess ") + 6]
    assert lost.reward == -0.5 and "again" in lost.response
    assert [play(game, task, *said).reward for said in ([right], ["0", right])] == [1.0, 0.75]


def make_interpreter(folder: Path, *paths: Path) -> str:
    """One that has verifiers, rlvr and these folders."""
    python = find_interpreter("verifiers")
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    theirs = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "all.pth").write_text("\n".join([theirs, str(ROOT), *map(str, paths)]) + "\n")
    return str(folder / "bin/python")


def test_packages_of_verifiers_are_played_as_the_original(tmp_path: Path) -> None:
    find_interpreter("verifiers")
    roots = export("verifiers")
    options = {
        "taskset": {"side": "train"},
        "heldout": {"side": "heldout"},
        "python": make_interpreter(tmp_path / "python", *roots),
    }
    check_round_trip(*(resolve_environment(f"verifiers:{root.name}", **options) for root in roots))


def test_vf_eval_runs_on_a_served_policy(tmp_path: Path) -> None:
    """The unmodified `vf-eval`, with a policy behind the engine server."""
    program = Path(find_interpreter("verifiers")).with_name("vf-eval")
    roots = export("verifiers")
    with open_endpoints({NAME: text_engine()}, tmp_path / "state") as (_, port):
        for root in roots:
            words = [
                root.name, "--env.agent.harness.id", "rlvr_chat", "--env.agent.runtime.type", "subprocess",
                "-n", "2", "-m", NAME, "--client.base-url", f"http://127.0.0.1:{port}/v1",
                "--no-push", "--no-rich", "-o", f"out_{root.name}", "--sampling.max-tokens", "8",
            ]  # fmt: skip
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, ROOT, GUESTS)))}
            done = subprocess.run([program, *words], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
    for root, worst in zip(roots, (0.0, -0.5), strict=True):
        (path,) = Path(f"out_{root.name}").glob("*/traces.jsonl")
        episodes = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(episodes) == 2 and all(episode["ok"] for episode in episodes)
        rewards = [episode["traces"][0]["rewards"]["reward"]["score"] for episode in episodes]
        assert all(worst <= reward <= 1.0 for reward in rewards)


def check_validation(python: str, root: str, url: str) -> None:
    """OpenEnv's own validator: of the folder, of the server, and its graders of an episode that it played there."""
    program = str(Path(python).with_name("openenv"))
    for words in ([root, "--level", "static"], ["--url", url]):
        done = subprocess.run([program, "validate", *words], capture_output=True, text=True)
        assert done.returncode == 0 and "Verdict: PASS" in done.stdout, done.stdout + done.stderr
    script = str(ROOT / "tests/kit/ecosystems/openenv_validation.py")
    done = subprocess.run([python, script, root, url, "1"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert len(found) == 4 and {status for status, _ in found.values()} == {"pass"}, found


def test_servers_of_openenv_are_played_as_the_original() -> None:
    python = find_interpreter("openenv")
    started: list[tuple[subprocess.Popen[bytes], str]] = []
    try:
        for root in export("openenv"):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            words = [python, "-m", "server.app", "--port", str(port)]
            started.append((subprocess.Popen(words, cwd=root, env=env), f"http://127.0.0.1:{port}"))
        for process, url in started:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).read()
                    break
                except OSError:
                    assert process.poll() is None, "the server has ended"
                    time.sleep(0.2)
        sums, game = (resolve_environment(f"openenv:{url}") for _, url in started)
        assert [task.id for task in sums.heldout(2)] == ["test-0", "test-1"]
        check_round_trip(sums, game)
        for root, (_, url) in zip(("sums_openenv", "game_openenv"), started, strict=True):
            check_validation(python, root, url)
    finally:
        for process, _ in started:
            process.terminate()
            process.wait()
