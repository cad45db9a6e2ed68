"""`rlvr doctor` checks the installation; `rlvr doctor RUN` diagnoses a run from its own files.

Both only read, and download nothing; what is missing or broken is a line of the report. torch is imported only to check
the installation.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import rlvr
from rlvr.core.cpu_budget import available_cores, split_by_settings
from rlvr.core.types import Outcome
from rlvr.sandbox.supervisor import TIERS, NoTier, Sandbox
from rlvr.tracking import readable
from rlvr.tracking.console import format_metrics, readable_lines
from rlvr.training.diagnosis import format_findings
from rlvr.training.journal import read_stop_reason
from rlvr.training.metric_values import WINDOW, select_rl_rows
from rlvr.training.run_diagnosis import diagnose_run, format_groups, read_rows
from rlvr.training.stall import is_stalled
from rlvr.training.training_job import RunOptions

_COMBINED = ("all", "rlvr")
_FOR_DEVELOPMENT = ("dev", "docs", "bench")  # extras that say nothing where they are missing
NEEDED, ROOM = 0.1, 2.0  # GB free: less than the first stops a run at its first checkpoint, less than the second soon


@dataclass(frozen=True)
class Check:
    """One line about the installation. `state` is ok, note (something to know) or fails (training cannot run)."""

    state: str
    name: str
    detail: str


# --- the installation --------------------------------------------------------------------------------------------


def installation(root: Path | None = None) -> list[Check]:
    """Check this machine and this Python. `root` is the folder of runs; default: `run.root` of a config."""
    shares = split_by_settings(available_cores(), concurrent=True)
    return [
        Check("ok", "rlvr", f"{rlvr.__version__} in {Path(rlvr.__file__).parent}"),
        Check("ok", "python", f"{platform.python_version()} ({sys.executable})"),
        Check("ok", "cores", f"{available_cores()} for this process, {platform.machine()}, {platform.system()}"),
        Check("ok", "shared", f"{shares}, where programs are verified (engine.threads sets it)"),
        *_extras(),
        *_torch(),
        _sandbox(),
        _disk(Path(RunOptions().root) if root is None else root),
    ]


def verdict(checks: list[Check]) -> str:
    """One sentence, for the end of the report."""
    broken = [check.name for check in checks if check.state == "fails"]
    if broken:
        return f"No model can be trained here: see {', '.join(dict.fromkeys(broken))} above."
    device = next((check.detail for check in checks if check.name == "device"), "cpu")
    return f"Training can run here, on {device}."


def format_checks(checks: list[Check]) -> str:
    return "\n".join([format_lines(checks), "", verdict(checks)])


def format_lines(checks: list[Check]) -> str:
    width = max(len(check.name) for check in checks)
    marks = {"ok": "ok   ", "note": "note ", "fails": "FAILS"}
    return "\n".join(f"{marks[check.state]}  {check.name:<{width}}  {check.detail}" for check in checks)


def extras() -> dict[str, list[str]]:
    """The libraries of each extra, from the installed package or a clone's pyproject.toml; {} if there is neither."""
    try:
        needs = metadata.requires("rlvr") or []
    except metadata.PackageNotFoundError:
        return _cloned_extras()
    found: dict[str, list[str]] = {}
    for need in needs:
        if extra := re.search(r"extra\s*==\s*['\"]([^'\"]+)", need):
            found.setdefault(extra[1], []).append(_library(need))
    return _of_others(found)


def _cloned_extras() -> dict[str, list[str]]:
    try:
        project = tomllib.loads((Path(rlvr.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        listed: dict[str, list[str]] = project["project"]["optional-dependencies"]
    except (OSError, ValueError, KeyError):
        return {}
    return _of_others({name: [_library(need) for need in needs] for name, needs in listed.items()})


def _library(need: str) -> str:
    """`transformers` of `transformers>=5; extra == "train"`."""
    return re.split(r"[^A-Za-z0-9._-]", need.strip(), maxsplit=1)[0]


def _of_others(found: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Leave out the extras that only combine others; a wheel's metadata has their libraries in place of the names."""
    return {name: libraries for name, libraries in found.items() if name not in _COMBINED}


def _extras() -> Iterator[Check]:
    known = extras()
    if not known:
        yield Check("note", "extras", "unknown: this rlvr was not installed (pip install -e . in the clone)")
    for name, libraries in known.items():
        versions = {library: _version(library) for library in libraries if library != "rlvr"}
        missing = [library for library, version in versions.items() if version is None]
        if missing and name in _FOR_DEVELOPMENT:
            continue
        if missing:
            # Without torch nothing trains; other features report themselves what they miss.
            state = "fails" if name == "train" else "note"
            yield Check(state, f"[{name}]", f"{', '.join(missing)} not installed; pip install 'rlvr[{name}]'")
        else:
            yield Check("ok", f"[{name}]", ", ".join(f"{library} {version}" for library, version in versions.items()))


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a broken install raises anything: ImportError, OSError for a library, RuntimeError
        yield Check("fails", "torch", f"cannot be imported ({error}); pip install 'rlvr[train]'")
        return
    yield Check("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    try:
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # a driver that does not fit
        yield Check("note", "device", f"cpu (the GPU cannot be used: {error})")
        return
    if gpus:
        yield Check("ok", "device", ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus))
    elif shutil.which("nvidia-smi"):
        yield Check("note", "device", "cpu (there is an NVIDIA driver, but this build of torch sees no GPU)")
    else:
        yield Check("ok", "device", "cpu")


def _sandbox() -> Check:
    """Check which tiers of the sandbox work: start each, let it try to break out of itself, close it."""
    works: list[str] = []
    refused: list[str] = []
    for tier in TIERS:
        try:
            with Sandbox((tier,), workers=1):
                works.append(tier)
        except NoTier as error:
            refused.append(str(error).partition(". ")[0])
    if not works:
        return Check(
            "note", "isolation", f"none, so code of a model cannot be run here: {'; '.join(dict.fromkeys(refused))}"
        )
    others = [tier for tier in TIERS if tier != works[0]]
    beside = f"; {works[1]} works too" if works[1:] else f"; {', '.join(others)} is not needed" if others else ""
    return Check("ok", "isolation", f"{works[0]}: its self-test did not break out{beside}")


def _disk(root: Path) -> Check:
    """Check free space and permission in the folder of runs, which need not exist yet."""
    place = root.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free / 1e9
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check("fails", "runs", f"cannot write to {place}: {error.strerror}; use another folder")
    said = f"{free:.1f} GB free in {place}"
    if free < NEEDED:
        return Check("fails", "runs", f"{said}: make room")
    return Check("note" if free < ROOM else "ok", "runs", said + (": soon full" if free < ROOM else ""))


# --- a run -------------------------------------------------------------------------------------------------------


def report(folder: Path) -> str:
    """What the files of a run say: how far it is, what stands in its way, why answers failed. ValueError for no run."""
    folder = folder.expanduser()
    if not (folder / "resolved.yaml").is_file() and not (folder / "metrics.jsonl").is_file():
        raise ValueError(
            f"{folder} is not a run folder (it has no resolved.yaml and no metrics.jsonl){_suggestion(folder)}"
        )
    rows, broken = read_rows(folder / "metrics.jsonl")
    lines = [f"run {folder}: {_progress(folder, rows)}"]
    if broken:
        lines.append(f"  {broken} lines of metrics.jsonl cannot be read and are skipped")
    if reason := read_stop_reason(folder):
        lines.append(f"  the last attempt stopped: {readable_lines(reason)}")
    for left in sorted(folder.glob("failed-batch-*.jsonl")):
        lines.append(f"  numbers were not finite at step {left.stem.removeprefix('failed-batch-')}: {left.name} has it")
    recent = select_rl_rows(rows)
    if recent:
        now = "  ".join(f"{label} {text}" for label, text in format_metrics(_latest(recent)).items())
        lines += ["", "now" + (", and learning stalls" if is_stalled(recent) else ""), f"  {now}"]
    diagnosis = diagnose_run(folder, rows)
    lines += ["", f"findings (from the last {WINDOW} steps of reinforcement learning and the groups below)"]
    lines += [format_findings(diagnosis.findings)]
    if diagnosis.basis:
        lines += ["", f"what failing tasks have in common ({diagnosis.basis})"]
        lines += [format_groups(diagnosis) or "  nothing"]
    return "\n".join([*lines, *_describe_verdicts(folder)])


def _suggestion(folder: Path) -> str:
    other = Path(RunOptions().root) / folder
    return f"; did you mean {other}?" if (other / "resolved.yaml").is_file() else ""


def _progress(folder: Path, rows: list[dict[str, Any]]) -> str:
    steps = Counter(str(row.get("phase")) for row in rows)
    done = ", ".join(f"{phase} {count} steps" for phase, count in steps.items()) or "no step yet"
    return f"{'finished' if (folder / 'summary.json').exists() else 'not finished'}, {done}"


def _latest(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The last value of every metric."""
    return {name: value for row in rows for name, value in row.items()}


def _describe_verdicts(folder: Path) -> Iterator[str]:
    """Verdicts on the stored completions by frequency, and the newest completion for each reason of failure."""
    files = sorted((folder / "rollouts").glob("rl-*.jsonl"))[-WINDOW:]
    counts: Counter[tuple[str, str, str]] = Counter()
    newest: dict[tuple[str, str, str], str] = {}
    answers = judged = 0
    for row in (row for file in files for row in read_rows(file)[0]):
        scores = row.get("scores")
        answers, judged = answers + 1, judged + (isinstance(scores, dict) and bool(scores))
        for reward, score in scores.items() if isinstance(scores, dict) else ():
            score = score if isinstance(score, dict) else {}
            key = (str(reward), str(score.get("outcome")), str(score.get("reason") or ""))
            counts[key] += 1
            newest[key] = f"{readable(str(row.get('prompt')), 100)}  ->  {readable(str(row.get('response')), 160)}"
            if key[1] == Outcome.ERROR.value and (detail := str(score.get("detail") or "")):
                newest[key] += f"\n    {readable(detail, 600)}"
    if not counts:
        yield from ("", "no completions were stored (run.rollouts_per_step)")
        return
    which = f"the {answers}" if judged == answers else f"{judged} of the {answers}"  # of roles, one may be judged
    yield from ("", f"verdicts on {which} completions stored (steps: {len(files)})")
    for (reward, outcome, reason), count in counts.most_common(12):
        why = f" ({readable(reason, 60)})" if reason else ""
        yield f"  {100 * count / judged:5.1f}%  {readable(reward, 40)}: {readable(outcome, 20)}{why}"
    failed = [key for key, _ in counts.most_common() if key[1] != "passed"][:3]
    if failed:
        yield from ("", "the newest completion of each kind")
    for key in failed:
        yield f"  {readable(key[2] or key[1], 60)}: {newest[key]}"
