"""Two runs or seeds beside each other: result, what was set differently, curves, held-out tasks, findings. Or two steps
of a run, or two iterations of a session: their numbers, and answers to the same tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlvr.service.dashboard.curve_view import CurveView, Series
from rlvr.service.dashboard.dashboard_data import AnswerRow, Cell, Chart, Query, Source, Table
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, HeldoutChanges
from rlvr.service.dashboard.pages import heldout_pages as heldout
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.curve_parts import curve_section
from rlvr.service.dashboard.run_charts import COMPARED, draw_charts, estimate, metric_chart
from rlvr.service.dashboard.run_differences import list_differences
from rlvr.service.dashboard.run_reader import RunReader
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.session_source import StoreSource
from rlvr.training.interim import PASS_RATE

PATH = "/ui/compare"
MOST = 64  # answers read of a step
PAIRS = 12  # pairs of answers shown
FIRST = (
    "confidence", "correctness", "quality", "gain", "num_tokens", "seconds",
    "reward", "reward_std", "env/all/correct", "test/env/all/correct", "frac_groups_with_signal", "entropy",
    "completions/mean_length", "completions/clipped_ratio", "verifier/no_answer_rate", "grad_norm", "optim/kl_after",
    "learning_rate", "tokens_per_second",
)  # fmt: skip


def compare_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    """Two runs; with `work` in the address, or of a source with nothing else, two steps of one."""
    if isinstance(source, RunSource) and not parameters.get("work") and len(source.names()) > 1:
        return compare_runs(source, parameters)
    works = source.names()
    work = parameters.get("work", "") or next(iter(works), "")
    if isinstance(source, StoreSource) and not parameters.get("work"):  # the newest with two iterations
        work = next((one.id for one in source.sessions("", "", "", 0)[0] if one.iterations > 1), work)
    if not work:
        said = f"No {source.noun} yet, so there is nothing to compare."
        return parts.Page(source, "Compare", "message.html", {"text": said, "class_": "panel empty"}, "Compare")
    if (one := source.work(work)) is None:
        return parts.not_found_page(source, source.noun, work)
    bounds = source.choices(work).steps or (0, 0)
    a, b = _step(parameters.get("a", ""), bounds[0]), _step(parameters.get("b", ""), bounds[1])
    noun = source.step_noun
    pairs, note, changed = _answers(source, work, a, b)
    data = {
        "noun": noun, "a": a, "b": b, "work": work, "works": works, "name": one.name, "pairs": pairs, "note": note,
        "changed": changed, "numbers": _numbers(source, work, a, b),
    }  # fmt: skip
    return parts.Page(source, f"{noun} {a} and {b}", "compare_steps.html", data, "Compare")


def _step(text: str, otherwise: int) -> int:
    return int(text) if text.strip().isdecimal() and len(text) < 10 else otherwise


def _numbers(source: Source, work: str, a: int, b: int) -> list[Table]:
    """A table of the `FIRST` metrics and one of the others; without any of the first, one of all."""
    before, after = source.at_step(work, a), source.at_step(work, b)
    names = [name for name in FIRST if name in before or name in after]
    others = sorted((before.keys() | after.keys()) - {*FIRST})
    columns = [(name, "num") for name in (str(a), str(b), "Change")]
    return [
        Table(columns, [_number_row(name, before.get(name), after.get(name)) for name in chosen], "Numbers",
              source.step_noun.capitalize(), "data short")
        for chosen in (names, others) if chosen
    ]  # fmt: skip


def _number_row(name: str, before: float | None, after: float | None) -> tuple[str, ...]:
    change = None if before is None or after is None else after - before
    cells = ["–" if value is None else f"{value:.4g}" for value in (before, after)]
    return name, *cells, "–" if change is None else f"{change:+.4g}"


Pair = tuple[AnswerRow | None, AnswerRow | None]


def _answers(source: Source, work: str, a: int, b: int) -> tuple[list[Pair], str, dict[str, Any] | None]:
    """One answer per task and side; those that can be compared come first, and a note says if some cannot. Of a run,
    which draws new tasks at each step, the held-out tasks instead, if there are any."""
    left = source.answers(Query(work=work, step=a, limit=MOST)).rows
    right = source.answers(Query(work=work, step=b, limit=MOST)).rows
    pairs = pair_answers(left, right)
    noun, alone = source.step_noun, sum(None in pair for pair in pairs)
    if alone == len(pairs) and isinstance(source, RunSource):
        sides = ((work, BEFORE), (work, AFTER))
        if changed := heldout.list_changed(source.changes(*sides), sides, {}):
            return [], "", changed
    note = ""
    if alone and alone == len(pairs):
        note = (
            f"Nothing can be compared: no task has answers at {noun} {a} and at {noun} {b} that the same verifiers "
            "judged. The numbers above are of different tasks."
        )
    elif alone:
        note = (
            f"{alone} of {len(pairs)} cannot be compared and stand alone: the other {noun} has no answer to the same "
            "task that the same verifiers judged."
        )
    return pairs[:PAIRS], note, None


def pair_answers(left: list[AnswerRow], right: list[AnswerRow]) -> list[Pair]:
    """Pair the first answers to the same task that the same verifiers judged; then each other task's, alone."""
    first, second = _by_task(left), _by_task(right)
    pairs: list[Pair] = [(row, second[task]) for task, row in first.items() if task in second]
    pairs += [(row, None) for task, row in first.items() if task not in second]
    return pairs + [(None, row) for task, row in second.items() if task not in first]


def _by_task(rows: list[AnswerRow]) -> dict[tuple[str, ...], AnswerRow]:
    """The first answer to each task by the same verifiers, in order. One without a task is like no other."""
    first: dict[tuple[str, ...], AnswerRow] = {}
    for row in rows:
        first.setdefault((row.task or f"answer {row.key}", *row.verifiers), row)
    return first


def compare_runs(source: RunSource, parameters: Mapping[str, str]) -> parts.Page:
    chosen = dict(zip("ab", source.choose_pair(), strict=True))
    a, b = (parameters.get(name, "") or chosen[name] for name in "ab")
    if a == b and len(names := list(source.names())) > 1:  # one run was named, or none
        a = next(name for name in (chosen["a"], chosen["b"], *names) if name != b)
    runs = [source.run(name) for name in (a, b)]
    for name, run in zip((a, b), runs, strict=True):
        if run is None:
            return parts.not_found_page(source, source.noun, name)
    first, second = (run for run in runs if run is not None)
    metric, view = parameters.get("metric", ""), CurveView.of(parameters)
    sides: heldout.Sides = ((a, AFTER), (b, AFTER))
    changes = source.changes(*sides)
    query = {"a": a, "b": b}
    metrics = sorted({*first.metric_names(), *second.metric_names()})
    charts = draw_charts(comparison_series(source, a, b, metric), view)
    data = {
        "a": a, "b": b, "names": source.names(), "exchanged": parts.address(PATH, a=b, b=a),
        **_result(source, first, second, changes, sides), **_differences(first, second),
        "tasks": heldout.list_changed(changes, sides, {}),
        "curves": curve_section(PATH, query, charts, view, metric, metrics),
        "findings": [(run.name, [one for one in run.notes() if one.kind != "note"]) for run in (first, second)],
    }  # fmt: skip
    return parts.Page(source, f"{a} and {b}", "compare_runs.html", data, "Compare")


def comparison_series(source: RunSource, a: str, b: str, metric: str) -> list[tuple[Chart, list[Series]]]:
    """A chart a metric, both runs in each."""
    names = dict.fromkeys((metric, *COMPARED) if metric else COMPARED)
    labels = dict(zip((a, b), parts.short_names(a, b), strict=True))
    return [(metric_chart(name), [replace(one, name=labels[one.name]) for one in source.run_series(name, (a, b))])
            for name in names]  # fmt: skip


def _result(
    source: RunSource, first: RunReader, second: RunReader, changes: HeldoutChanges | None, sides: heldout.Sides
) -> dict[str, Any]:
    """Both runs before and after, then the paired difference over the tasks of both."""
    rows: list[list[Cell | str]] = []
    for run in (first, second):
        rates = [evaluation.intervals()["pass@1"] if (evaluation := run.evaluation(stage)) else None
                 for stage in (BEFORE, AFTER)]  # fmt: skip
        work = run.work()
        rows.append([Cell(run.name, parts.work_address(source, run.name)), Cell(badge=work.status, is_live=work.live),
                     work.about, *(estimate(rate, "pass@1") for rate in rates)])  # fmt: skip
    columns = [("State", ""), ("Steps", ""), ("Held-out before", ""), ("Held-out after", "")]
    data: dict[str, Any] = {
        "runs": Table(columns, rows, "Both runs", "Run"),
        "why": "",
        "verdict": None,
        "tables": None,
    }
    if changes is None or not changes.tasks:
        why = "no task is held out in both" if changes else "one of the runs has no evaluation at its end yet"
        data["why"] = f"There is no paired difference: {why}. Their settings and curves are below."
    else:
        data |= {
            "verdict": heldout.describe_change(changes.whole, sides), "apart": changes.apart,
            "solved": _count_solved(changes, *parts.short_names(first.name, second.name)),
            "tables": heldout.tabulate_parts(changes, sides),
        }  # fmt: skip
    return {**data, "parting": _find_parting(first, second)}


def _count_solved(changes: HeldoutChanges, first: str, second: str) -> str:
    """How many tasks each run passes more often than not."""
    solved = [tuple(2 * passed >= judged for passed, judged in (task.before, task.after)) for task in changes.tasks]
    both, one, other = (solved.count(pair) for pair in ((True, True), (True, False), (False, True)))
    neither = len(solved) - both - one - other
    return (
        f"Tasks that pass at least every second time: {both:,} under both, {one:,} under {first} alone, {other:,} "
        f"under {second} alone, {neither:,} under neither."
    )


def _find_parting(first: RunReader, second: RunReader) -> str | None:
    """From which step on the held-out intervals of both runs are apart."""
    lines = [run.series(PASS_RATE) for run in (first, second)]
    ends = [
        {float(x): (low, high) for x, low, high in zip(line.x, line.low, line.high, strict=True)}
        for line in lines if line is not None and line.low is not None and line.high is not None
    ]  # fmt: skip
    if len(ends) < 2 or not (common := sorted(ends[0].keys() & ends[1].keys())):
        return None
    apart = [ends[0][x][1] < ends[1][x][0] or ends[1][x][1] < ends[0][x][0] for x in common]
    if not any(apart):
        return "In no interim evaluation are their held-out intervals apart."
    begin = next(place for place in range(len(apart)) if apart[place])
    text = f"Their held-out intervals first lie apart after step {common[begin]:,.0f}"
    return f"{text} and stay so." if all(apart[begin:]) else f"{text}, and touch again later."


def _differences(first: RunReader, second: RunReader) -> dict[str, Any]:
    """What was set differently, by group."""
    if not first.config() or not second.config():
        said = "One of the runs has no resolved.yaml, so settings cannot be compared."
        return {"differ": said, "differences": None}
    found = list_differences(first, second)
    keys = [one.key for one in found if one.group != "code and machine"]
    others = [one.key for one in found if one.group == "code and machine"]
    if not keys:
        said = "Every setting is equal, the seed too."
    elif keys == ["seed"]:
        said = "Of the settings only the seed differs."
    else:
        number = "One setting differs" if len(keys) == 1 else f"{len(keys):,} settings differ"
        said = f"{number}{'' if 'seed' in keys else '; the seed is the same'}."
    if others:
        said += f" The code or the machine differs too ({', '.join(others[:4])}), and may be a cause."
    elif first.machine() and second.machine():
        said += " Code, libraries and machine are the same"
        said += ": what sets the runs apart is chance." if keys == ["seed"] else "."
    rows = [[one.key, one.group, one.first, one.second] for one in found[:300]]
    columns = [("Kind", ""), *((name, "mono") for name in parts.short_names(first.name, second.name))]
    return {"differ": said, "differences": Table(columns, rows, "Differences", "Key") if rows else None}
