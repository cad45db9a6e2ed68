"""`rlvr env check` over every environment that installs here: ours, reasoning-gym, TextArena, GEM, and servers given.

    python -m benchmarks.environment_ranking run /tmp/ranking
    python -m benchmarks.environment_ranking run /tmp/ranking "echo_env@685de411 openenv:http://127.0.0.1:8000"
    python -m benchmarks.environment_ranking missing /tmp/ranking docs/audits/environments.json
    python -m benchmarks.environment_ranking collect /tmp/ranking docs/audits/environments.json

Each environment is checked in a process of its own, one after the other, and its report is a file in the folder: a run
that is begun again goes on with those that are missing. One that cannot be checked has its reason instead. `missing`
runs those that the file has not, and `collect` keeps what the file has of others. `docs/gen.py` writes the table in
docs/dev/log.md from that file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import rlvr

SECONDS = 420.0  # of a check
OURS = (
    "sorting", "rpn_arithmetic", "tool_arithmetic", "mini_mbpp", "refine inner=sorting", "hidden_rule", "take_away",
    "propose",
    *(f'small_tasks families=["{name}"]' for name in ("sums", "purchases", "records", "short_texts", "keywords",
                                                      "addresses")),
)  # fmt: skip
# Games of one player, and one of two, that need no list of words.
TEXTARENA = (
    "2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Cryptarithm-v0", "FifteenPuzzle-v0", "FrozenLake-v0",
    "GuessTheNumber-v0", "Klondike-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0",
    "PegJump-v0", "RushHour-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sokoban-v0", "Sudoku-v0",
    "ThreeCardMonte-v0", "TowerOfHanoi-v0", "UltimateTexasHoldem-v0",
    'TicTacToe-v0 opponent=["[0]","[1]","[2]","[3]","[4]","[5]","[6]","[7]","[8]"]',
)  # fmt: skip
GEM = tuple(
    f"game:{name}"
    for name in (
        "FifteenPuzzle-v0-easy", "Game2048-v0-easy", "GuessTheNumber-v0-easy", "Mastermind-v0-easy",
        "Minesweeper-v0-easy", "Sokoban-v0-easy", "Sudoku-v0-easy", "TowerofHanoi-v0-easy",
    )
)  # fmt: skip


class Checked(NamedTuple):
    """An environment: what `rlvr env check` is given, what the table calls it, and the version of its project."""

    words: list[str]
    name: str
    version: str


def list_environments() -> Iterator[Checked]:
    from rlvr.envs.ecosystems.installs import INSTALLS
    from rlvr.reward.reasoning_gym.library_workers import describe_families

    for line in OURS:
        yield Checked(line.split(), line, f"rlvr {rlvr.__version__}")
    for kind, games in (("textarena", TEXTARENA), ("gem", GEM)):
        for line in games:
            yield Checked(f"{kind}:{line}".split(), f"{kind}:{line.split()[0]}", f"{kind} {INSTALLS[kind].version}")
    library = f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"
    for family in sorted(describe_families()):
        yield Checked([f"reasoning_gym:{family}"], f"reasoning_gym:{family}", library)


def read_server(text: str) -> Checked:
    """`NAME@VERSION openenv:URL OPTION=VALUE ...`, a server that is running."""
    told, *words = text.split()
    name, _, version = told.partition("@")
    return Checked(words, f"{words[0].partition(':')[0]}:{name}", version)


def run(folder: Path, checked: list[Checked]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(checked):
        target = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', ' '.join(one.words))[:100]}.json"
        if target.exists():
            continue
        start, report = time.monotonic(), target.with_suffix(".report")
        command = [sys.executable, "-m", "rlvr", "env", "check", *one.words, "--json", str(report)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
            reason = "" if found else (done.stderr.strip().splitlines() or ["it said nothing"])[-1][-300:]
        except subprocess.TimeoutExpired:
            found, reason = {}, f"the check took longer than {SECONDS:g} s"
        report.unlink(missing_ok=True)
        took = time.monotonic() - start
        target.write_text(json.dumps({"name": one.name, "version": one.version, "reason": reason, "report": found}))
        said = f"faults: {', '.join(found['faults']) or 'none'}" if found else reason
        print(f"{number + 1}/{len(checked)} {one.name}: {said} ({took:.0f} s)", flush=True)


def collect(folder: Path) -> list[dict[str, Any]]:
    """What the table shows of each environment: faults and warnings with what was found, or why it was not checked."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        one = json.loads(path.read_text())
        report = one.pop("report")
        for state in ("fault", "warning"):
            one[f"{state}s"] = {
                check["check"]: " ".join(f"{check['text']}{_show(check['examples'])}".split())
                for check in report.get("checks", ())
                if check["state"] == state
            }
        one["trials"] = sum(check["tried"] for check in report.get("checks", ()))
        one["seconds"] = report.get("seconds", 0)
        found.append(one)
    return found


def read_collected(path: Path) -> dict[str, dict[str, Any]]:
    """What was collected before, by the environment's name."""
    return {one["name"]: one for one in json.loads(path.read_text())} if path.exists() else {}


def _show(examples: list[str]) -> str:
    return f", e.g. {examples[0][:80]}" if examples else ""


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if command == "run":
        run(Path(folder), [read_server(one) for one in rest] or list(list_environments()))
    elif command == "missing":
        known = read_collected(Path(rest[0]))
        run(Path(folder), [one for one in list_environments() if one.name not in known])
    else:
        merged = read_collected(Path(rest[0])) | {one["name"]: one for one in collect(Path(folder))}
        found = sorted(merged.values(), key=lambda one: (one["version"], one["name"]))
        Path(rest[0]).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
