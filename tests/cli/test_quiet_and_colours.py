"""What commands print where: --quiet, NO_COLOR, output that is no terminal, and the shell's completion."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.runs import user_messages
from rlvr.runs.user_messages import announce_if_slow, be_quiet
from tests.kit.tiny_run import TINY

COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")
TOY = ["train", "--config-name=train_rlvr", "max_steps=2"]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def in_terminal(words: list[str], **variables: str) -> str:
    """What the command writes on a terminal."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm-256color", **variables}
    mine, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rlvr", *words], stdout=its, stderr=its, stdin=its, env=environment
    )
    os.close(its)
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(mine, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(mine)
    assert process.wait(120) == 0, b"".join(parts).decode()
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    "words", [pytest.param(["--help"], id="help"), pytest.param(TOY, id="train", marks=pytest.mark.slow)]
)
def test_a_terminal_gets_colours_unless_no_color_is_set(tiny: Path, words: list[str]) -> None:
    assert COLOUR.search(in_terminal([*words, *(["run.name=one"] if words is TOY else [])]))
    plain = in_terminal([*words, *(["run.name=two"] if words is TOY else [])], NO_COLOR="1")
    assert not COLOUR.search(plain) and len(plain) > 500


def test_quiet_training_prints_nothing_and_trains_the_same(tiny: Path, capfd: Any) -> None:
    assert run(["train", "--config=tiny.yaml"]) == 0
    assert "FINAL RESULTS" in capfd.readouterr().out
    assert run(["train", "--config=tiny.yaml", "--quiet", "run.name=silent"]) == 0
    said = capfd.readouterr()
    assert said.out == "" and all("warning" in line for line in said.err.splitlines() if line.startswith("rlvr: "))
    one, two = (json.loads((tiny / "runs" / name / "summary.json").read_text()) for name in ("tiny", "silent"))
    assert one["weights_sha256"] == two["weights_sha256"]


def test_quiet_keeps_warnings_and_errors(tiny: Path, capfd: Any) -> None:
    words = ["train", "--config=tiny.yaml", "-q", "run.name=warned"]
    assert run([*words, "training.gap_warn=1e-12", "training.gap_stop=1"]) == 0
    assert "rlvr: warning: " in (said := capfd.readouterr()).err and said.out == ""
    assert run([*words, "training.group_sise=2"]) == 2
    assert "training.group_sise" in capfd.readouterr().err


def test_a_quiet_evaluation_prints_its_report_alone(tiny: Path, capfd: Any) -> None:
    assert run(["train", "--config=tiny.yaml", "--quiet"]) == 0
    capfd.readouterr()
    assert run(["evaluate", "runs/tiny", "--quiet"]) == 0
    said = capfd.readouterr()
    assert "pass@1" in json.loads(said.out) and "held-out tasks" not in said.err
    assert run(["evaluate", "runs/tiny", "--quiet", "--out=report.json"]) == 0
    assert capfd.readouterr().out == "" and "pass@1" in json.loads((tiny / "report.json").read_text())


@pytest.mark.slow
def test_a_quiet_study_prints_nothing_and_writes_its_table(tiny: Path, capfd: Any) -> None:
    assert run(["study", "--config-name=train_rlvr", "max_steps=2", "seeds=1..2", "--name=few", "--quiet"]) == 0
    said = capfd.readouterr()
    assert said.out == "" and (tiny / "runs" / "few" / "table.md").exists()


def test_announcements_are_silent_inside_be_quiet(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_messages, "SLOW_SECONDS", 0.0)
    for quiet, expected in ((True, ""), (False, "rlvr: reading ...\n"), (True, "")):
        with be_quiet(quiet), announce_if_slow("reading"):
            time.sleep(0.2)  # the thread begins
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("typed", "offered", "absent"),
    [("rlvr ev", ["evaluate", "evaluate-service"], "train"), ("rlvr train --q", ["--quiet"], "--config")],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: list[str], absent: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "_RLVR_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    code = "from rlvr.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stderr == "" and set(offered) <= set(done.stdout.split()) and absent not in done.stdout.split()


def test_the_help_names_exit_codes_and_how_to_install_completion(capsys: Any) -> None:
    assert run(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--install-completion" in said
    for part in ("0 done", "1 stopped", "2 a mistake", "130 Ctrl-C"):
        assert part in said, said
