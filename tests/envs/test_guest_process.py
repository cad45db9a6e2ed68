"""Processes of other interpreters that answer calls, and where such interpreters are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.envs.ecosystems import guest_process
from rlvr.envs.ecosystems.guest_process import GuestError, GuestProcess
from rlvr.envs.ecosystems.installs import INSTALLS, find_conflicts, find_python, list_commands, locate

SCRIPT = str(Path(__file__).parents[1] / "kit/ecosystems/small_guest.py")


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[GuestProcess]:
    made = GuestProcess(sys.executable, SCRIPT, str(tmp_path))
    yield made
    made.close()


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and ") Z " not in state.read_text()


def test_calls_share_one_process_which_ends_with_its_input(guest: GuestProcess, tmp_path: Path) -> None:
    assert guest.call("add", {"a": 2, "b": 3}, 60) == 5
    pid = guest.call("tell", {"path": str(tmp_path / "told")}, 60)
    assert guest.call("tell", {"path": str(tmp_path / "told")}, 60) == pid and is_running(pid)
    guest.close()
    assert (tmp_path / "closed").exists() and not is_running(pid)
    assert guest.call("add", {"a": 1, "b": 1}, 60) == 2, "the next call starts another"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refuse", "^expected another word$"),
        ("raise", r"small_guest\.py:\d+: KeyError: 'lost'"),
        ("nan", "no JSON"),
        ("exit", "ended with exit code 3; the end of its output: .*last words"),
    ],
)
def test_failures_are_errors_and_the_next_call_is_answered(guest: GuestProcess, how: str, words: str) -> None:
    with pytest.raises(GuestError, match=words):
        guest.call("fail", {"how": how}, 60)
    assert guest.call("add", {"a": 1, "b": 1}, 60) == 2


def test_a_call_is_cancelled_and_others_go_on(guest: GuestProcess) -> None:
    errors: list[str] = []
    ended = threading.Event()

    def take(result: Any, error: str) -> None:
        errors.append(error)
        ended.set()

    number = guest.send("wait", {}, take)
    assert guest.call("add", {"a": 1, "b": 1}, 60) == 2
    guest.cancel(number)
    assert ended.wait(60) and errors == ["cancelled"]
    guest.cancel(number)


def test_a_call_that_blocks_is_ended_with_its_process(
    guest: GuestProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_process, "CANCEL_SECONDS", 0.3)
    assert guest.call("add", {"a": 1, "b": 1}, 60) == 2
    errors: list[str] = []
    other = threading.Event()
    number = guest.send("block", {"path": str(tmp_path / "blocks")}, lambda result, error: errors.append(error))
    while not (tmp_path / "blocks").exists():
        time.sleep(0.01)
    guest.send("add", {"a": 1, "b": 1}, lambda result, error: (errors.append(error), other.set()))
    guest.cancel(number)
    assert other.wait(60) and len(errors) == 2 and all("ended by signal 9" in error for error in errors)
    with pytest.raises(GuestError, match=r"wait took longer than 0\.2 seconds"):
        guest.call("wait", {}, 0.2)
    assert guest.call("add", {"a": 1, "b": 1}, 60) == 2


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    program = (
        "import os, sys; from rlvr.envs.ecosystems.guest_process import GuestProcess\n"
        f"guest = GuestProcess(sys.executable, {SCRIPT!r}, {str(tmp_path)!r})\n"
        f"print(guest.call('tell', {{'path': {str(tmp_path / 'told')!r}}}, 60), flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    until = time.monotonic() + 60
    while is_running(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(int(done.stdout))


def test_a_missing_interpreter_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLVR_ENVIRONMENTS", str(tmp_path))
    for kind, install in INSTALLS.items():
        assert locate(kind) == tmp_path / f"{kind}-{install.version}" and install.version in install.packages[0]
        with pytest.raises(ValueError, match=f"`rlvr env install {kind}`"):
            find_python(kind)
    with pytest.raises(ValueError, match="python='/no/such' is no program"):
        find_python("verifiers", "/no/such")
    assert os.path.samefile(find_python("verifiers", sys.executable), sys.executable)


def test_packages_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    """An interpreter whose packages were installed one after the other, the second with what the first cannot have."""
    folder = tmp_path / "verifiers-0.4.0"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    for name, needs in (("taskset-a", "Requires-Dist: taskset-b<2"), ("taskset-b", "")):
        place = packages / f"{name.replace('-', '_')}-2.0.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n{needs}\n")
        (place / "INSTALLER").write_text("pip")
    said = find_conflicts(folder)
    assert "taskset-a" in said and "taskset-b" in said, said


def test_the_commands_of_an_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RLVR_ENVIRONMENTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    *_, fill = list_commands("verifiers", ["some/wordle@0.2", "./mine"], "http://127.0.0.1:9/simple")
    assert fill[fill.index("verifiers[ta]==0.4.0") :] == [
        *("verifiers[ta]==0.4.0", "uv", "wordle==0.2", str(tmp_path / "mine")),
        *("--extra-index-url", "http://127.0.0.1:9/simple"),
        *("--extra-index-url", "https://hub.primeintellect.ai/some/simple/"),
    ]
    with pytest.raises(ValueError, match="gem has no index of owners"):
        list_commands("gem", ["some/game"])
    assert run(["env", "install", "verifiers", "--dry-run"]) == 0
    assert "about 660 MB" in capsys.readouterr().out and not list(tmp_path.glob("verifiers*"))
    assert run(["env", "install", "verifier"]) == 2 and "did you mean 'verifiers'" in capsys.readouterr().err
    assert run(["env", "list"]) == 0 and capsys.readouterr().out.count("not installed") == len(INSTALLS)
