"""Other systems than Linux: what is said there, and that it is said before anything runs.

A process that names another system and lacks what that system lacks stands for it. That shows which modules are
imported and what is refused; it does not show that training works there.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlvr.cli.doctor import installation
from rlvr.cli.main import run
from rlvr.reward import resolve_reward
from rlvr.sandbox import NoTier, Sandbox

# Imported before the system is renamed: the libraries themselves decide by its name.
WINDOWS = """
import asyncio, ctypes, logging.handlers, multiprocessing.context, os, platform, select, signal, socket, subprocess, sys
import tempfile, concurrent.futures.process
import sysconfig, numpy, omegaconf, pydantic, rich.console, rich.live, rich.progress, typer, yaml
sysconfig.get_config_vars()
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules[name] = None
for name in ("fork", "register_at_fork", "sched_getaffinity", "killpg", "setsid", "geteuid", "getuid", "sysconf"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP"):
    delattr(signal, name)
del select.poll
sys.platform = "win32"
"""


def as_windows(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WINDOWS + code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.system", lambda: "Darwin")


def test_on_windows_the_library_and_the_help_can_be_loaded() -> None:
    done = as_windows(
        "import rlvr.reward, rlvr.envs, rlvr.algorithms\n"
        "print(rlvr.resolve_reward('keyword_contains', keywords=['four'])('2+2?', 'four'))\n"
        "from rlvr.cli.main import run\n"
        "assert run(['--help']) == 0 and run(['--version']) == 0\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.0\n") and "train" in done.stdout


@pytest.mark.parametrize("command", ["train --config-name=arithmetic", "doctor", "config --config-name=arithmetic"])
def test_on_windows_every_command_is_refused_with_the_way_out(command: str) -> None:
    done = as_windows(f"from rlvr.cli.main import run; sys.exit(run({command.split()}))")
    assert done.returncode == 2 and "Windows is not supported" in done.stderr and "WSL 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("on_a_mac")
@pytest.mark.parametrize("options", [{}, {"tiers": ("landlock",)}, {"allow_unsafe": True}])
def test_on_a_mac_no_sandbox_is_started(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # a process that was started would be a TypeError
    with pytest.raises(NoTier, match=r"on Darwin.*Use Linux"):
        Sandbox(workers=1, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("on_a_mac")
def test_on_a_mac_a_run_that_needs_the_sandbox_is_refused_before_it_begins(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert run(["train", "--config-name=mini_mbpp", "reward.kwargs.sandbox={limits: {threads: 9}}"]) == 2
    said = capsys.readouterr().err
    assert "no sandbox works on Darwin" in said and "rlvr doctor" in said


@pytest.mark.usefixtures("on_a_mac")
def test_on_a_mac_doctor_says_that_programs_cannot_be_run() -> None:
    [check] = [check for check in installation() if check.name == "isolation"]
    assert check.state == "note" and check.detail.count("no sandbox works on Darwin") == 1


@pytest.mark.usefixtures("on_a_mac")
def test_on_a_mac_rewards_without_code_work() -> None:
    assert resolve_reward("math")("1/2?", r"\boxed{0.5}", {"answer": "1/2"}) == 1.0
