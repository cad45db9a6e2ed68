"""Unmodified environments of verifiers, by the real package: their tasks, episodes, rewards and failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.cli.main import run
from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Trajectory
from rlvr.envs.ecosystems.guest_process import GUESTS
from rlvr.envs.ecosystems.installs import find_python, is_complete, locate
from rlvr.envs.ecosystems.task_server import TaskServer
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from rlvr.web.server import BackgroundServer, bind_socket, server_url
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE

pytestmark = [
    pytest.mark.slow,  # its imports take seconds
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not is_complete("verifiers"), reason=f"verifiers is not in {locate('verifiers')} (rlvr env install verifiers)"
    ),
]
TASKSETS = Path(__file__).parents[1] / "kit/ecosystems/verifiers_tasksets"
TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
TEXT.model_max_length = 4_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, and so one process of verifiers, for all tests."""
    return Path(shutil.copytree(TASKSETS, tmp_path_factory.mktemp("verifiers") / "tasksets"))


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def play(source: Any, said: Sequence[str], tasks: Any = None) -> list[Trajectory]:
    """The trajectories of an episode of each task (the first held-out one), in which the policy says these turns."""
    turns = iter(said)
    sampler = ScriptedSamplingClient(
        TEXT, lambda _: [*TEXT.encode(next(turns), add_special_tokens=False), TEXT.eos_token_id]
    )
    groups = open_groups(source, tasks or source.heldout(1), 1, TEXT, "g")
    played = rollout(groups, sampler, SamplingParams(200), seed=1)
    score(played, resolve_reward("environment"))
    return played


def fail(source: Any, *said: str) -> str:
    """Why an episode has no reward."""
    *_, played = play(source, said)
    verdict = played.scores["environment"]
    assert played.reward is None and verdict.outcome is Outcome.ERROR
    return verdict.detail or ""


def letters(**options: Any) -> Any:
    return resolve_environment("verifiers:give-letter", **options)


def test_tasks_are_split_by_their_prompts_or_by_the_taskset() -> None:
    made = letters()
    trained, held = {made.train(0, n, "").id for n in range(made.size(""))}, {task.id for task in made.heldout(None)}
    assert len(trained) + len(held) == 40 and not trained & held and 1 <= len(held) <= 12
    assert [task.id for task in letters().heldout(None)] == [task.id for task in made.heldout(None)]
    own = letters(taskset={"letters": "a"}, heldout={"first": 100, "count": 3})
    assert own.size("") == 20
    assert sorted(task.prompt for task in own.heldout(None)) == ["100 a", "101 a", "102 a"]
    (played,) = play(own, ["a"])
    assert played.reward == 1.25


def test_the_reward_and_metrics_are_those_of_verifiers() -> None:
    source = letters()
    first, second = source.heldout(2)
    right = first.prompt.split()[1]
    for said, task, expected in ((right, first, 1.25), ("xyz", second, 0.0)):
        (played,) = play(source, [said], [task])
        assert played.reward == pytest.approx(expected)
        assert played.metadata["agent/length"] == len(said) and played.metadata["stop/finished"] == 1
        assert played.metadata["agent/reward/right"] == float(expected > 1) and played.metadata["agent/turns"] == 1
        sampled = [t for t, mask in zip(played.response_tokens, played.action_mask, strict=True) if mask]
        assert TEXT.decode(sampled, skip_special_tokens=True) == said
        assert TEXT.decode(played.prompt_tokens).count(task.prompt) == 1


SERVE = """
import sys
from verifiers.v1.serve import serve_env
from verifiers.v1.utils.loaders import resolve_env_config
role = {"harness": {"id": "rlvr_chat"}, "runtime": {"type": "subprocess"}}
config = resolve_env_config({"taskset": {"id": "give-letter"}, "agent": role})
serve_env(max_workers=1, address=sys.argv[1], config=config)
"""


def test_the_environment_server_of_verifiers_plays_the_episodes(folder: Path) -> None:
    """Rows, rewards and errors are those of episodes in our process; a server that ends is an error of its episodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(GUESTS)])}
    process = subprocess.Popen([find_python("verifiers"), "-c", SERVE, address], env=env)
    try:
        for _ in range(20):  # its imports take seconds
            try:
                source = letters(server=address, budget={"seconds": 20.0})
                break
            except ValueError as error:
                assert "no environment server of verifiers answers" in str(error) and process.poll() is None
        task = source.heldout(1)[0]
        right = task.prompt.split()[1]
        for said, expected in ((right, 1.25), ("xyz", 0.0)):
            (played,), (own,) = play(source, [said], [task]), play(letters(), [said], [task])
            assert played.reward == own.reward == pytest.approx(expected)
            assert played.response_tokens == own.response_tokens and played.metadata.keys() == own.metadata.keys()
            assert played.metadata["agent/length"] == len(said) and played.metadata["agent/turns"] == 1
    finally:
        process.terminate()
        process.wait()
    assert "no environment server of verifiers answers" in fail(source, "a")


def test_a_game_of_several_turns_with_tasks_without_end() -> None:
    source = resolve_environment("verifiers:count-down", tasks=6, heldout=3)
    assert source.size("") == 6 and sorted(task.meta["idx"] for task in source.heldout(None)) == [6, 7, 8]
    task = next(task for task in source.heldout(None) if task.meta["idx"] == 7)  # it begins at 2
    (played,) = play(source, ["ready", "1", "7"], [task])
    assert played.reward == 0.5 and played.metadata["agent/turns"] == 3 and played.metadata["branches"] == 1
    assert TEXT.decode(played.response_tokens).count("<|im_start|>user") == 2
    assert not source.advice(), "games begin alike"


def test_roles_are_trained_with_their_own_rewards() -> None:
    source = resolve_environment("verifiers:two-roles")
    first, second = play(source, ["a", "b"])
    assert (first.turn_credits, second.turn_credits) == ([1.0], [0.0]) and first.reward == second.reward == 0.5
    assert second.metadata["agent/left/right"] == 1.0 and second.metadata["agent/right/right"] == 0.0
    (alike, _) = play(source, ["b", "b"])
    assert alike.turn_credits == [] and alike.reward == 0.0
    frozen = resolve_environment("verifiers:two-roles", options={"trains_right": False})
    assert "right is not trained, and its model is the policy; give it another by options.right.model" in fail(
        frozen, "a", "b"
    )


def test_tools_of_a_taskset() -> None:
    source = resolve_environment("verifiers:add-by-tool")
    task = source.heldout(1)[0]
    number = int(task.prompt_text.split()[-3])
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}, "b": 5}}}}\n</tool_call>'
    (played,) = play(source, [call, str(number + 5)])
    text = TEXT.decode([*played.prompt_tokens, *played.response_tokens])
    assert played.reward == 1.0 and played.metadata["agent/tool_results"] == 1, text
    assert "Use the tool." in text and '"add"' in text
    (wrong,) = play(source, [call.replace("add", "subtract"), "0"])
    assert wrong.reward == 0.0 and "there is no tool" in TEXT.decode(wrong.response_tokens)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", r"TaskError: .*KeyError.*answer.*faulty_tasks\.py"),
        ("nan", "the reward judge is nan, expected a finite number"),
        ("wait", r"verifiers gave no reward: the budget of the episode was used up \(seconds\)"),
    ],
)
def test_failures_are_errors_and_no_zeros(fault: str, words: str) -> None:
    source = resolve_environment(
        "verifiers:faulty-tasks", taskset={"task": {"fault": fault}}, budget={"seconds": 5.0 if fault == "wait" else 60}
    )
    assert re.search(words, fail(source, "hm"), re.DOTALL)
    assert play(resolve_environment("verifiers:faulty-tasks"), ["hm"])[0].reward == 0.5, "the process goes on"


def test_an_episode_leaves_no_memory_behind() -> None:
    """A client of verifiers with its own certificates, for each episode's address, left 0.9 MB of each."""
    source = letters()

    def play_episodes(count: int) -> float:
        for _ in range(count):
            play(source, ["a"])
        status = Path(f"/proc/{source._guest._process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024

    before = play_episodes(10)
    assert play_episodes(60) - before < 15, "MB for 60 episodes"


def test_a_time_limit_of_verifiers_is_an_error() -> None:
    options = {"agent": {"timeout": {"scoring": 1.0}}}
    source = resolve_environment("verifiers:faulty-tasks", taskset={"task": {"fault": "wait"}}, options=options)
    assert "scoring_timeout" in fail(source, "hm")


def test_an_environment_that_blocks_its_process_is_ended_and_begins_anew() -> None:
    source = resolve_environment(
        "verifiers:faulty-tasks", taskset={"task": {"fault": "block"}}, budget={"seconds": 5.0}
    )
    process = source._guest._process
    assert "the budget of the episode was used up (seconds)" in fail(source, "hm")
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    assert process.poll() == -9
    assert play(resolve_environment("verifiers:faulty-tasks"), ["hm"])[0].reward == 0.5


def test_a_limit_of_turns_is_verifiers_own() -> None:
    source = resolve_environment("verifiers:count-down", tasks=6, heldout=3, budget={"calls": 2})
    task = next(task for task in source.heldout(None) if task.meta["idx"] == 8)  # it begins at 3
    (played,) = play(source, ["ready", "2"], [task])
    assert played.reward == pytest.approx(1 / 3) and played.metadata["stop/finished"] == 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("give-leter", {}, r"no taskset 'give-leter'.*textarena.*`rlvr env install verifiers OWNER/give-leter`"),
        ("textarna", {"taskset": {"game": "Wordle-v0"}}, r"did you mean 'textarena'"),
        ("someone/give-leter@1.2", {}, r"`rlvr env install verifiers someone/give-leter@1.2`"),
        ("give-letter", {"taskset": {"leters": "ab"}}, r"taskset\.leters"),
        ("give-letter", {"options": {"agent": {"harness": {"id": "bash"}}}}, r"options\.agent\.runtime\.type"),
        ("give-letter", {"options": {"retries": {"max_retries": 2}}}, r"options\.retries is not supported"),
        ("give-letter", {"taskset": {"count": 0}}, "has no tasks"),
        ("count-down", {"heldout": 0.5}, "tasks without end; heldout=0.5, expected a number"),
        ("give-letter", {"rules": {"fields": ["a"]}}, r"rules\.fields is not supported"),
        ("give-letter", {"python": "/no/such/python"}, r"python='/no/such/python' is no program"),
        ("give-letter", {"max_turns": 3}, "max_turns"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_environment(f"verifiers:{name}", **options)


def test_a_game_of_textarena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers' own taskset `textarena`, with lists of words that need no download."""
    words, tagger = tmp_path / "corpora/words", tmp_path / "taggers/averaged_perceptron_tagger_eng"
    words.mkdir(parents=True)
    tagger.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("apple\n")
    (words / "README").write_text("One word.\n")
    for part, content in (("weights", "{}"), ("tagdict", '{"apple": "NN", "test": "NN"}'), ("classes", '["NN"]')):
        (tagger / f"{tagger.name}.{part}.json").write_text(content)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # another process
    source = resolve_environment("verifiers:textarena", taskset={"game": "Wordle-v0"}, tasks=4, heldout=2)
    assert source.size("") == 4 and source.heldout(1)[0].prompt_text.startswith("[Wordle-v0#")
    (won,) = play(source, ["I say [grape].", "[apple]"])
    assert won.reward == 1.0 and won.metadata["agent/turns"] == 2 and won.metadata["branches"] == 1
    assert "Enter your guess to begin" in TEXT.decode(won.prompt_tokens)
    source._guest.close()


RUN = """
env: {name: "verifiers:give-letter", kwargs: {taskset: {letters: ab}, rules: {max_concurrent: 32}}}
model:
  tokenizer: characters
  device: cpu
  config: {model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 32}
rollout: {max_tokens: 2}
training: {steps: 2, prompts_per_step: 4, group_size: 4}
evaluation: {tasks: 3, samples: 2}
engine: {threads: 1}
run: {name: letters}
"""


def test_a_run_trains_and_evaluates(folder: Path) -> None:
    (folder / "letters.yaml").write_text(RUN)
    assert run(["train", "--config=letters.yaml"]) == 0
    metrics = [json.loads(line) for line in (folder / "runs/letters/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if row["phase"] == "rl"]
    assert [row["env/all/stop/finished"] for row in steps] == [1.0, 1.0]
    assert all(0 <= row["env/all/agent/reward/right"] <= 1 for row in steps)
    assert "final" in json.loads((folder / "runs/letters/summary.json").read_text())


def test_the_eval_of_verifiers_plays_tasks_of_ours(tmp_path: Path) -> None:
    """The unmodified `vf-eval`, with `rlvr env serve` behind its taskset and an endpoint that always says 7."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}: seven?", "answer": "7" if n % 2 else "8"}) + "\n" for n in range(30))
    )
    source = resolve_environment("dataset", path=str(tmp_path / "rows.jsonl"), reward="exact_match")
    listening, port = bind_socket("127.0.0.1", 0), start_endpoint("7")
    with BackgroundServer(TaskServer("dataset", source, resolve_reward("exact_match")).app, listening):
        words = [
            "rlvr-tasks", "--env.taskset.url", server_url(listening), "--env.agent.harness.id", "rlvr_chat",
            "--env.agent.runtime.type", "subprocess", "-n", "3", "-m", "policy", "--client.base-url",
            f"http://127.0.0.1:{port}/v1", "--no-push", "--no-rich", "-o", "outputs",
        ]  # fmt: skip
        program = Path(find_python("verifiers")).with_name("vf-eval")
        env = {**os.environ, "PYTHONPATH": str(GUESTS)}
        done = subprocess.run([program, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "outputs").glob("*/traces.jsonl")
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(episodes) == 3 and all(episode["ok"] for episode in episodes)
    for episode in episodes:
        (trace,) = episode["traces"]
        right = int(episode["task"]["data"]["prompt"].split(":")[0]) % 2
        assert trace["rewards"]["reward"]["score"] == right
        assert trace["info"]["judgement"]["outcome"] == ("passed" if right else "failed")


def start_endpoint(says: str) -> int:
    """The port of an endpoint of chat completions with one answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": says}}
            body = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
            raw = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *words: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]
