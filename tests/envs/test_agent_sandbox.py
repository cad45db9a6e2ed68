"""Sandboxed agents: hostile ones get nothing, leave nothing, and the next honest one plays.

`tests/kit/hostile_agent.py` has the attacks. Each records what it attempted, as refused (None) or with what it got.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")
if sys.platform != "linux":
    pytest.skip("the sandbox is made of Linux namespaces", allow_module_level=True)

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Task, Trajectory
from rlvr.envs.agent.agent_sandbox import AgentSandbox, SandboxLauncher, list_readable, read_report, resolve_command
from rlvr.envs.agent.agent_source import AgentSource
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from rlvr.sandbox.command_filter import DENIED, LAST_KNOWN
from rlvr.sandbox.seccomp import CLONE, architecture
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE
from tests.kit.without_unshare import WITHOUT_UNSHARE

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "tests/kit/hostile_agent.py"
MARKER = f"rlvr-left-behind-{os.getpid()}"
MIB = 1 << 20
TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE


class Field:
    """A source with a sandbox, and around it what an agent must not reach."""

    def __init__(self, folder: Path) -> None:
        self.rows, self.reward, self.run = (
            folder / "rows.jsonl",
            folder / "reward.py",
            folder / "runs/one/journal.jsonl",
        )
        self.run.parent.mkdir(parents=True)
        for file in (self.reward, self.run):
            file.write_text("SECRET")
        self.rows.write_text("".join(json.dumps({"prompt": f"x{n}", "answer": "SECRET"}) + "\n" for n in range(20)))
        self.service = socket.create_server(("0.0.0.0", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0{MARKER}")
        self.abstract.listen()
        column, _ = architecture()
        self.facts = {
            "files": [str(file) for file in (self.rows, self.reward, self.run)],
            "driver": os.getpid(),
            "port": self.service.getsockname()[1],
            "address": _own_address(),
            "abstract": MARKER,
            "marker": MARKER,
            "calls": {name: row[column] for name, row in DENIED.items() if row[column] >= 0},
            "clone": CLONE[column],
            "newest": LAST_KNOWN,
            "guess": "A" * 24,
        }
        sandbox = {"memory": 512 * MIB, "processes": 64, "scratch": 64 * MIB}
        self.source = AgentSource(
            "dataset",
            {"path": str(self.rows), "reward": "exact_match"},
            command=[sys.executable, str(AGENT)],
            result="output",
            budget={"seconds": 60.0},
            sandbox=sandbox,
        )

    def play(self, *attacks: str, seconds: float = 60.0, **facts: Any) -> list[Trajectory]:
        """The trajectories of one episode of each attack, all at the same time."""
        source = self.source
        path = source._recorder.socket_path  # pyright: ignore[reportPrivateUsage]
        budget = source._rules.budget  # pyright: ignore[reportPrivateUsage]
        object.__setattr__(budget, "seconds", seconds)
        known = {**self.facts, "socket": path or "/nowhere", **facts}
        tasks = [Task(name, json.dumps({**known, "attack": name}), {"answer": "hi"}) for name in attacks]

        def say(number: int) -> list[int]:
            return [*TEXT.encode("hi", add_special_tokens=False), TEXT.eos_token_id]

        found = rollout(
            open_groups(source, tasks, 1, TEXT, "g"), ScriptedSamplingClient(TEXT, say), SamplingParams(60), seed=1
        )
        score(found, resolve_reward("exact_match").plus_environment(1.0))
        return found

    def check_honest(self) -> None:
        [one] = self.play("honest")
        assert one.metadata["stop/finished"] == 1.0 and record(one) == {"said": "hi"}, one

    def attack(self, name: str, seconds: float = 60.0, **facts: Any) -> Trajectory:
        one = self.play(name, seconds=seconds, **facts)[-1]
        assert left_behind() == []
        self.check_honest()
        return one


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        try:
            made.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.2"
        return made.getsockname()[0]


def left_behind() -> list[str]:
    """Processes of hostile agents that still run on this machine."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            is_hostile = MARKER.encode() in words or str(AGENT).encode() in words
            if is_hostile and b") Z " not in (entry / "stat").read_bytes():
                found.append(words.decode())
        except OSError:
            continue
    return found


def record(one: Trajectory) -> dict[str, Any]:
    assert one.answer is not None, one.scores
    return json.loads(one.answer)


def refused(one: Trajectory, at_least: int, *but: str) -> dict[str, Any]:
    """The record of an agent, all of whose attempts were refused."""
    got = record(one)
    tried = {name: value for name, value in got.items() if name not in ("errors", "said", *but)}
    assert len(tried) >= at_least
    assert {name: value for name, value in tried.items() if value is not None} == {}
    return got


def failure(one: Trajectory) -> str:
    assert one.reward is None
    return one.scores["exact_match"].detail


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    try:
        made = Field(tmp_path_factory.mktemp("field"))
    except ValueError as error:
        if "cannot be had" in str(error):
            pytest.skip(str(error))
        raise
    yield made
    made.service.close()
    made.abstract.close()


@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        ("read_files", 11), ("read_processes", 18), ("open_sockets", 14), ("other_rollouts", 12), ("write_prefix", 20),
        ("escape", 14), ("denied_calls", 60), ("become_root", 6), ("trace_sibling", 2),
    ],
)  # fmt: skip
def test_all_attempts_are_refused(field: Field, name: str, at_least: int) -> None:
    refused(field.attack(name), at_least)


def test_denied_calls_are_refused_by_the_filter(field: Field) -> None:
    errors = record(field.attack("denied_calls"))["errors"]
    assert {name for name, text in errors.items() if "Operation not permitted" not in text} == set()


def test_signals_reach_neither_the_driver_nor_pid_1(field: Field) -> None:
    got = record(field.attack("send_signals"))
    assert got["signal the driver"] is None and got["signal its group"] is None and got["limit pid 1"] is None
    assert got["said"] == "hi"


def test_processes_that_stay_are_ended_with_the_agent(field: Field) -> None:
    assert record(field.attack("stay_alive")) == {"started": True}


def test_a_fork_bomb_is_bounded_and_gone_at_the_end(field: Field) -> None:
    got = record(field.attack("fork_bomb"))
    assert got["stopped"] == "BlockingIOError" and 1 < got["made"] < 64


@pytest.mark.parametrize("name", ["memory_bomb", "socket_bomb"])
def test_memory_of_many_processes_is_counted_together(field: Field, name: str) -> None:
    one = field.attack(name)
    assert "sandbox.memory" in failure(one) and one.metadata["stop/failed"] == 1.0


def test_no_memory_can_be_had_past_the_limits(field: Field) -> None:
    got = record(field.attack("memory_alone"))
    refused_all = {name: got[name] for name in ("one large block", "shared block", "memory file", "System V")}
    assert set(refused_all.values()) == {None} and got["raise the limit"] is None


def test_the_folder_is_bounded_in_bytes_and_files(field: Field) -> None:
    refused(field.attack("fill_disk"), 4)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("result_symlink", "expected a regular file"), ("result_link_inside", "expected a regular file"),
        ("result_fifo", "expected a regular file"), ("result_folder", "expected a regular file"),
        ("result_device", "expected a regular file"), ("result_socket", "expected a regular file"),
        ("result_sparse", "larger than 1 MiB"), ("result_changes", ""),
    ],
)  # fmt: skip
def test_only_a_regular_file_is_a_result(field: Field, name: str, words: str) -> None:
    one = field.attack(name)
    assert one.answer is None or "SECRET" not in one.answer
    assert words in (failure(one) if words else "")


def test_no_file_from_outside_can_be_linked_as_a_result(field: Field) -> None:
    one = field.attack("result_hardlink")
    assert one.metadata["stop/finished"] == 1.0 and one.answer == ""


def test_a_folder_of_any_depth_is_gone_with_the_agent(field: Field) -> None:
    field.attack("deep_folder")


@pytest.mark.slow
def test_endless_output_ends_with_the_budget(field: Field) -> None:
    assert field.attack("endless_output", seconds=3.0).metadata["stop/seconds"] == 1.0


def test_output_that_is_no_text_is_read_all_the_same(field: Field) -> None:
    one = field.attack("odd_output")
    assert one.answer is not None and one.answer.endswith(" end") and "�" in one.answer


def test_codes_of_terminals_are_shown_escaped(field: Field) -> None:
    detail = failure(field.attack("escape_codes"))
    assert "\\x1b]0;owned\\x07" in detail and not re.search(r"[\x00-\x1f\x7f-\x9f]", detail)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ('{"metrics": {"\\u001b[2J": 1}}', "a metric named '\\x1b[2J'"),
        (json.dumps({"metrics": {f"m{n}": 1 for n in range(70)}}), "70 metrics"),
        ('{"reward": 1' + "0" * 400 + "}", "reward="),
        ('{"metrics": {"a": 1' + "0" * 400 + "}}", "expected a finite number"),
        ('{"\\u001b[2J": 1}', "\\x1b[2J"),
        ("[" * 100_000, "not JSON"),
        ("1" + "0" * 10_000, "not JSON"),
    ],
)
def test_results_that_would_harm_a_reader_are_errors(field: Field, result: str, words: str) -> None:
    detail = failure(field.attack("odd_result", result=result))
    assert words in detail.replace("\\\\", "\\") and "\x1b" not in detail


def test_halves_of_characters_do_not_reach_the_run(field: Field) -> None:
    one = field.attack("odd_result", result='{"answer": "a\\ud800b", "reward": 1}')
    assert one.answer == "a?b"


@pytest.mark.slow
def test_an_agent_that_ignores_signals_is_ended_by_its_budget(field: Field) -> None:
    assert field.attack("ignore_signals", seconds=2.0).metadata["stop/seconds"] == 1.0


def test_an_agent_without_descriptors_harms_itself(field: Field) -> None:
    got = record(field.attack("exhaust_descriptors"))
    assert 100 < got["descriptors"] < 1024 and got["said"] == "hi"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow_loris", "many_connections"])
def test_connections_that_are_held_open_hold_nobody_else_up(field: Field, name: str) -> None:
    """The honest agent plays at the same time."""
    both = field.play(name, "honest", seconds=8.0)
    honest = next(one for one in both if "honest" in one.prompt)
    assert record(honest) == {"said": "hi"}
    field.check_honest()


@pytest.mark.slow
def test_huge_bodies_are_refused_before_they_fill_memory(field: Field) -> None:
    answers = record(field.attack("huge_bodies"))["answers"]
    assert sum(" 413 " in answer for answer in answers) <= 1
    assert sum(" 429 " in answer for answer in answers) >= 7, answers


@pytest.mark.slow
def test_no_request_is_smuggled_past_the_recorder(field: Field) -> None:
    one = field.attack("smuggle")
    got = record(one)
    answers = [line for lines in got["lines"].values() for line in lines]
    assert answers and not [line for line in answers if " 200 " in line]
    assert got["said"] == "hi" and one.metadata["calls"] == 1.0


def test_calls_after_the_end_are_refused(field: Field) -> None:
    one = field.attack("reach_after_end", seconds=20.0)
    assert one.metadata["stop/finished"] + one.metadata["stop/calls"] == 1.0, "the child may use the calls up"
    rollouts = field.source._recorder.rollouts  # pyright: ignore[reportPrivateUsage]
    assert not rollouts._open  # pyright: ignore[reportPrivateUsage]


@pytest.mark.slow
def test_many_attacks_at_once_leave_the_honest_one_alone(field: Field) -> None:
    names = ("fork_bomb", "fill_disk", "stay_alive", "honest", "smuggle", "escape")
    honest = next(one for one in field.play(*names) if '"honest"' in one.prompt)
    assert record(honest) == {"said": "hi"} and left_behind() == []


DRIVER = """
import sys
from rlvr.envs.agent.agent_sandbox import AgentSandbox, SandboxLauncher
launcher = SandboxLauncher(["/bin/sleep"], AgentSandbox())
channel = launcher.launch("", {}, b"", b"", command=["/bin/sleep", sys.argv[1]])
print("started", flush=True)
sys.stdin.read()
"""


def sleepers(seconds: str) -> list[str]:
    wanted = f"/bin/sleep\0{seconds}\0".encode()
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes() == wanted:
                found.append(entry.name)
    return found


def test_all_of_it_ends_with_a_driver_that_is_killed(field: Field) -> None:
    seconds = str(70_000 + os.getpid())
    command = [sys.executable, "-c", DRIVER, seconds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == b"started\n"
        wait_until(lambda: len(sleepers(seconds)) == 1)
        driver.kill()
    wait_until(lambda: not sleepers(seconds))


def test_a_command_ends_when_its_channel_is_shut_down(field: Field) -> None:
    seconds = str(80_000 + os.getpid())
    launcher = SandboxLauncher(["/bin/sleep"], AgentSandbox())
    channel = launcher.launch("", {}, b"", b"", command=["/bin/sleep", seconds])
    wait_until(lambda: len(sleepers(seconds)) == 1)
    channel.shutdown(socket.SHUT_WR)
    assert read_report(channel) == ({}, b"", b"") and not sleepers(seconds)


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_command_that_does_not_exist_is_named_at_once(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    with pytest.raises(ValueError, match="no program 'no-such-program'"):
        AgentSource("dataset", rows, command=["no-such-program"], sandbox={})


def write_rows(folder: Path) -> dict[str, str]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"x{n}", "answer": "a"}) + "\n" for n in range(20)))
    return {"path": str(path), "reward": "exact_match"}


@pytest.mark.parametrize(
    ("sandbox", "words"),
    [
        ({"memory": 1}, "sandbox.memory"), ({"readable": "x"}, "a list of paths"), ({"reads": []}, "reads"),
        ({"readable": ["/no/such/path"]}, "does not exist"), ({"processes": 0}, "sandbox.processes"),
        ({"readable": ["/"]}, "name folders inside it"), ([], "expected a mapping"),
    ],
)  # fmt: skip
def test_options_of_the_sandbox_are_checked(tmp_path: Path, sandbox: Any, words: str) -> None:
    with pytest.raises(ValueError, match="agent: sandbox") as refused:
        AgentSource("dataset", write_rows(tmp_path), command=[sys.executable, str(AGENT)], sandbox=sandbox)
    assert words in str(refused.value)


def test_the_sandbox_is_for_commands(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sandbox is for a command"):
        AgentSource("dataset", write_rows(tmp_path), url="http://127.0.0.1:1", sandbox={})


def test_a_system_without_namespaces_refuses_the_sandbox_at_the_start() -> None:
    head, _, _ = WITHOUT_UNSHARE.format(no_landlock=False, unsafe=False).partition("from rlvr.sandbox import")
    code = head + (
        "from rlvr.envs.agent.agent_sandbox import AgentSandbox, SandboxLauncher\n"
        "try: SandboxLauncher(['/bin/true'], AgentSandbox()).check()\n"
        "except ValueError as error: print('refused:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("refused: agent: this system cannot build the sandbox: "), done.stderr
    assert "user namespaces" in done.stdout and "Operation not permitted" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs agents under another user id")
def test_a_script_that_agents_cannot_read_is_named(field: Field, tmp_path: Path) -> None:
    script = tmp_path / "private" / "agent.py"
    script.parent.mkdir(mode=0o700)
    script.write_text("")
    with pytest.raises(ValueError, match="cannot be read by the user id") as refused:
        SandboxLauncher([sys.executable, str(script)], AgentSandbox()).check()
    assert f"chmod -R o+rX {script.parent}" in str(refused.value)


def test_a_script_beside_the_training_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has data, rewards and runs."""
    script = tmp_path / "agent.py"
    script.write_text("")
    monkeypatch.chdir(tmp_path)
    _, own = list_readable(resolve_command([sys.executable, "agent.py"]), AgentSandbox())
    assert str(script) in own and str(tmp_path) not in own
    monkeypatch.chdir(ROOT)
    assert str(tmp_path) in list_readable([sys.executable, str(script)], AgentSandbox())[1]


def test_only_the_first_file_brings_its_folder(tmp_path: Path) -> None:
    script, data = tmp_path / "agents" / "agent.py", tmp_path / "data" / "rows.jsonl"
    for file in (script, data):
        file.parent.mkdir()
        file.write_text("")
    _, own = list_readable([sys.executable, str(script), str(data)], AgentSandbox())
    assert {str(script.parent), str(data)} <= set(own) and str(data.parent) not in own


def test_what_is_made_readable_can_be_read_and_not_written(field: Field, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "notes.txt").write_text("for agents")
    shared.chmod(0o777)
    launcher = SandboxLauncher([sys.executable], AgentSandbox(readable=[str(shared)]))
    launcher.check()
    code = f"print(open({str(shared / 'notes.txt')!r}).read()); open({str(shared / 'more')!r}, 'w')"
    report, _, output = read_report(launcher.launch("", {}, b"", b"", command=[sys.executable, "-c", code]))
    assert report["code"] == 1 and b"for agents" in output and b"Read-only file system" in output


def test_an_agent_gets_its_task_and_no_variable_of_the_driver(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE", "secret")
    code = "import os, sys; print(sys.stdin.read(), open(os.environ['RLVR_TASK']).read(), sorted(os.environ))"
    launcher = SandboxLauncher([sys.executable], AgentSandbox())
    variables = {"RLVR_TASK": "/tmp/task.json"}
    report, _, output = read_report(
        launcher.launch("", variables, b"the task", b"the prompt", command=[sys.executable, "-c", code])
    )
    assert report["code"] == 0, output
    names = re.findall(rb"'(\w+)'", output)
    assert output.startswith(b"the prompt the task [") and b"DATABASE" not in names and b"HOME" in names
    assert {*names} <= {b"HOME", b"LANG", b"LC_CTYPE", b"LD_LIBRARY_PATH", b"PATH", b"RLVR_TASK", b"TMPDIR"}
