"""The hack suite: its programs are real attempts, its canaries see, and the reward `code` withstands it."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlvr.audits.attack_runner import Survivors, format_table, run_suite, summarize_categories
from rlvr.audits.attacks import HONEST, HOSTILE, Attack
from rlvr.cli.main import run
from rlvr.reward import resolve_reward
from rlvr.sandbox.supervisor import NoTier, Sandbox
from tests.kit import weak_harnesses
from tests.kit.slow_cases import mark_slow_but
from tests.kit.weak_harnesses import HARNESSES

THREADS = 2 * len(os.sched_getaffinity(0))
# Of these categories many wait for the time limit or use up all of it: they get less of it, and more wait at a time.
ENDLESS = ("time", "resources", "odd result")
IMPATIENT = ("--reward-option", "timeout_s=1.5", "--workers", str(THREADS))


def clear_what_was_planted() -> None:
    """What the programs that plant something for the next one leave on the machine."""
    for place in (Path("/tmp/answer.txt"), Path("/dev/shm/planted")):
        place.unlink(missing_ok=True)
    shutil.rmtree("/tmp/inner", ignore_errors=True)
    libc = ctypes.CDLL(None)
    if (kept := libc.shmget(4711, 64, 0o666)) >= 0:
        libc.shmctl(kept, 0, None)  # IPC_RMID


def test_the_suite_has_enough_of_both_kinds_under_names_of_their_own() -> None:
    assert len(HOSTILE) >= 160 and len(HONEST) >= 45
    assert len({attack.name for attack in HOSTILE + HONEST}) == len(HOSTILE) + len(HONEST)


def test_characters_that_matter_survive_the_files() -> None:
    programs = {attack.name: attack.program for attack in HOSTILE + HONEST}
    assert programs["windows_line_ends"].count("\r\n") == 4 and "\t\t" in programs["tabs"]
    assert "\u202e" in programs["bidi_override"]
    assert not programs["no_last_line_end"].endswith("\n")


@pytest.mark.slow
def test_every_false_pass_fools_a_weak_harness() -> None:
    """Each program that aims at a wrong pass is taken for a solution by at least one of the careless harnesses."""

    def fools_a_harness(attack: Attack) -> bool:
        return any(weak_harnesses.accepts(name, attack.program, attack.task, attack.before) for name in HARNESSES)

    tried = [attack for attack in HOSTILE if attack.kind == "false_pass"]
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            found = dict(zip((attack.name for attack in tried), pool.map(fools_a_harness, tried), strict=True))
    finally:
        clear_what_was_planted()
    missed = [name for name, was in found.items() if not was]
    assert len(tried) >= 100 and len(missed) <= 0.05 * len(tried), missed  # a machine that is busy may miss a deadline


@pytest.mark.slow
def test_every_dodge_leaves_a_weak_harness_without_a_verdict() -> None:
    """It hangs, dies or chokes. Those that would use up the machine are left out."""

    def breaks_a_harness(attack: Attack) -> bool:
        names = ("compares", "written", "frames", "pickled")
        return any(weak_harnesses.is_undecided(name, attack.program, attack.task) for name in names)

    tried = [attack for attack in HOSTILE if attack.kind == "dodge" and not attack.harmful]
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip((attack.name for attack in tried), pool.map(breaks_a_harness, tried), strict=True))
    assert len(tried) >= 25 and [name for name, was in found.items() if not was] == []


@pytest.mark.parametrize("name", mark_slow_but(4, list(HARNESSES)))
def test_every_harness_tells_an_honest_solution_from_a_wrong_one(name: str) -> None:
    """They are careless, not broken: what is right passes, and what is plainly wrong does not."""
    due = {7: 918273, 11: 556677, 30: 4242}
    right = f"def scramble(x):\n    return {due}[x]\n"
    task = {"tests": [f"assert scramble({x}) == {y}" for x, y in due.items()]}
    assert weak_harnesses.accepts(name, right, task)
    assert not weak_harnesses.accepts(name, "def scramble(x):\n    return 1\n", task)


@pytest.mark.slow
def test_every_escape_reaches_its_canary_without_isolation() -> None:
    """Tried by a verifier that is a plain subprocess. Some need privileges that only root has."""
    privileged = {"writes_outside_by_chroot", "lowers_a_neighbours_limits", "writes_outside_in_new_namespace"}
    attacks = [attack for attack in HOSTILE if attack.kind == "escape"]
    results = run_suite(resolve_reward(weak_harnesses.plain), attacks, THREADS)
    held = {result.attack.name for result in results if not result.escaped}
    assert len(attacks) >= 30 and held <= (privileged if os.getuid() else set()), held


def test_a_survivor_of_any_name_is_found() -> None:
    """A double fork that leaves its session is seen; a child that has ended is not."""
    code = "import os, time\nif not os.fork():\n    os.setsid()\n    os.fork() or time.sleep(60)\n    os._exit(0)"
    with Survivors() as survivors:
        assert survivors.list_alive(0) == {}
        subprocess.run([sys.executable, "-c", code], check=True)
        (pid,) = survivors.list_alive(0.5)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert survivors.list_alive() == {}


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
def test_nothing_passes_nothing_escapes_and_honest_programs_pass(tier: str, tmp_path: Path, capsys: Any) -> None:
    try:
        Sandbox((tier,), 1).close()
    except NoTier as refusal:
        pytest.skip(f"{tier}: {refusal}")
    out, tried = tmp_path / "audit.json", Counter[str]()
    suite = Counter(attack.category for attack in [*HOSTILE, *HONEST])
    for names, more in ((ENDLESS, IMPATIENT), ([name for name in suite if name not in ENDLESS], ())):
        chosen = [word for name in names for word in ("--category", name)]
        code = run(["audit", "--reward", "code", "--attack", "--tier", tier, "--json", str(out), *chosen, *more])
        said = capsys.readouterr()
        (found,) = json.loads(out.read_text())
        assert [program for program in found["programs"] if program["fault"]] == [], said.out
        assert found["survivors"] == [] and code == 0
        assert f"tier: {tier}" in said.out and all(f"{name}: no faults" in said.err for name in names)
        tried.update(program["category"] for program in found["programs"])
    if tier == "landlock":  # where some honest programs have no folder to write in
        suite["honest"] -= sum(attack.needs == "scratch" for attack in HONEST)
    assert tried == suite


@pytest.mark.slow
def test_the_command_fails_where_a_users_verifier_accepts_too_much(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "audit.json"
    words = ["--reward", "tests.kit.weak_harnesses:trusting", "--attack", "--workers", "8"]
    assert run(["audit", *words, "--json", str(out)]) == 1
    total = json.loads(out.read_text())[0]["summary"][-1]
    assert total["false_pass"] > 60 and total["rejected"] > 40
    assert "false_pass: forged output/success_words" in capsys.readouterr().out


def test_a_verifier_that_accepts_too_much_is_caught(capsys: Any) -> None:
    attacks = [a for a in HOSTILE if a.category in ("forged output", "ending")]
    results = run_suite(resolve_reward(weak_harnesses.trusting), attacks)
    passes = sum("def scramble" in attack.program for attack in attacks)
    assert summarize_categories(results)[-1]["false_pass"] == passes > 10
    assert "false_pass: forged output/success_words" in format_table(results)


def test_an_honest_program_refused_is_a_fault() -> None:
    refused = run_suite(
        resolve_reward(weak_harnesses.trusting), [Attack("plain", "honest", "x = 1", {"tests": ["assert x"]}, "honest")]
    )
    assert [result.fault for result in refused] == ["rejected"]


@pytest.mark.parametrize(
    "words",
    [[], ["--attack", "--labelled", "builtin"], ["--attack", "--tier", "none"], ["--attack", "--category", "none"]],
)
def test_a_mistake_is_one_message(words: list[str], capsys: Any) -> None:
    assert run(["audit", "--reward", "code", *words]) == 2
    assert "rlvr: audit: " in capsys.readouterr().err
