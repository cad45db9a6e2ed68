"""Record what this tree does with every command of `commands.jsonl`, and compare the records of two trees.

    python -m tests.behaviour record AFTER.jsonl
    PYTHONPATH=../before python -m tests.behaviour record BEFORE.jsonl  # the package of another tree
    python -m tests.behaviour compare BEFORE.jsonl AFTER.jsonl

A command runs in an empty folder with its `files`. Its record has the exit code, what it printed, and of a run that it
made the settings, the metrics of each step and the hash of the weights; seconds, speeds, memory and paths are left out.
The record of a server is its OpenAPI document. `compare` prints every difference and exits with 1 if there is one. Two
records of one tree must be equal.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlvr.cli.main import run
from tests.kit.forked_process import run_forked

COMMANDS = Path(__file__).with_name("commands.jsonl")
MEASURED = re.compile(r"seconds|_per_s|/s$|_s$|memory|time|bytes|usage|busy|idle")
NUMBERS = re.compile(r"\b[0-9a-f]{7,40}\b|\b\d+(?:\.\d+)?(?: ?(?:s|ms|min|GB|MB|GiB|MiB|tokens/s|%))\b")
Record = dict[str, Any]


def record(command: Record) -> Record:
    """Run one command, {"args": [...], "files": {name: text}}, or describe a server, {"openapi": "engine"}."""
    if server := command.get("openapi"):
        return {"command": command, "out": json.dumps(describe_server(server), indent=1).splitlines()}
    with tempfile.TemporaryDirectory(prefix="behaviour-") as name:
        folder = Path(name)
        for file, text in command.get("files", {}).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
        is_run = command["args"][0] == "train"
        if is_run:
            done = run_forked(["-m", "rlvr.cli.main", *command["args"]], cwd=folder, timeout=300)
            code, printed = done.returncode, [done.stdout, done.stderr]
        else:
            code, printed = run_here(command["args"], folder)
        made = {str(path.parent.relative_to(folder)): read_run(path.parent) for path in folder.rglob("resolved.yaml")}
    out, err = (strip(text.replace(name, "FOLDER"), is_run) for text in printed)
    return {"command": command, "code": code, "out": out, "err": err, "runs": made}


def run_here(arguments: list[str], folder: Path) -> tuple[int, list[str]]:
    """A command that ends within a second, in this process: a new one would spend most of its time on imports."""
    printed = [io.StringIO(), io.StringIO()]
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed[0]), contextlib.redirect_stderr(printed[1]):
        try:
            code = run(arguments)
        except Exception as fault:  # a traceback is a result too
            code, _ = -1, printed[1].write(repr(fault))
    return code, [text.getvalue() for text in printed]


def describe_server(name: str) -> Any:
    """What a server answers at /openapi.json."""
    if name == "engine":
        from rlvr.tinker_server.http.app import create_routes

        return create_routes(SimpleNamespace(), SimpleNamespace()).openapi()  # type: ignore[arg-type]
    from rlvr.service.http.app import create_app
    from rlvr.service.serve_service import build
    from rlvr.service.settings import Settings
    from rlvr.web.auth import ApiKeys

    with tempfile.TemporaryDirectory(prefix="behaviour-") as folder:
        service = build(Settings(state=Path(folder), dashboard=False), ApiKeys([]), 0)
        try:
            return create_app(service)._app.openapi()  # type: ignore[attr-defined]
        finally:
            service.store.close()


def strip(text: str, is_run: bool) -> list[str]:
    """The lines of what was printed. Those of a run hold seconds and speeds, so only its messages count."""
    lines = [line.rstrip() for line in text.splitlines()]
    if is_run:
        lines = [line for line in lines if line.startswith(("rlvr:", "warning:", "Error"))]
    return [NUMBERS.sub("#", line) for line in lines] if is_run else lines


def read_run(folder: Path) -> Record:
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    weights = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }
    return {
        "settings": (folder / "resolved.yaml").read_text().splitlines(),
        "measured": sorted({key for row in rows for key in row if MEASURED.search(key)}),
        "metrics": [{key: value for key, value in row.items() if not MEASURED.search(key)} for row in rows],
        "weights": weights,
    }


def compare(before: Path, after: Path) -> Iterator[str]:
    """Every difference, as lines of text."""
    kept, now = (read_records(path) for path in (before, after))
    for name in sorted(kept.keys() ^ now.keys()):
        yield f"only in {before if name in kept else after}: {name}"
    for name in sorted(kept.keys() & now.keys()):
        if kept[name] != now[name]:
            yield name
            one, two = (json.dumps(records[name], indent=1, sort_keys=True).splitlines() for records in (kept, now))
            yield from (f"    {line}" for line in list(difflib.unified_diff(one, two, lineterm="", n=1))[2:])


def read_records(path: Path) -> dict[str, Record]:
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return {json.dumps(one["command"], sort_keys=True): one for one in records}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.behaviour", description=__doc__.splitlines()[0])  # pyright: ignore
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", default="", help="commands whose words or files have this text")
    comparing = actions.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.action == "compare":
        differences = list(compare(options.before, options.after))
        print("\n".join(differences) or "no difference")
        return 1 if differences else 0
    lines = [line for line in COMMANDS.read_text(encoding="utf-8").splitlines() if options.only in line]
    with ProcessPoolExecutor(2) as pool, options.out.open("w", encoding="utf-8") as out:
        for number, result in enumerate(pool.map(record, map(json.loads, lines), chunksize=4), start=1):
            out.write(json.dumps(result, sort_keys=True) + "\n")
            print(f"\r{number} of {len(lines)}", end="", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
