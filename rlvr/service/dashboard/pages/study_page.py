"""A study: its statistics over seeds, each seed before and after, its curves with bands over seeds, and its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from rlvr.service.dashboard.curve_view import CurveView, Series
from rlvr.service.dashboard.dashboard_data import Cell, Chart, Source, Table, as_list, as_mapping, one_line
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.curve_parts import curve_section, link_files
from rlvr.service.dashboard.run_charts import COMPARED, draw_charts, estimate, metric_chart
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.study_reader import StudyReader, seed_bands, seed_dots
from rlvr.training.interim import PASS_RATE

SHOWN = (PASS_RATE, *(metric for metric in COMPARED if metric != PASS_RATE))


def study_path(name: str) -> str:
    return f"/ui/study/{quote(name, safe='')}"


def list_studies(source: RunSource) -> list[tuple[str, str, str]]:
    """The studies in the folder: names, addresses, descriptions."""
    return [(one.name, parts.address(study_path(one.name)), _describe(source, one)) for one in source.studies()]


def study_page(source: Source, parameters: Mapping[str, str], here: str = "") -> parts.Page:
    if not isinstance(source, RunSource) or (study := source.study(parameters.get("study", ""))) is None:
        return parts.not_found_page(source, "study", parameters.get("study", ""))
    metric, view, path = parameters.get("metric", ""), CurveView.of(parameters), study_path(study.name)
    runs = [name for variant in study.variants() for name in variant.runs.values()]
    charts = draw_charts(study_series(source, study, metric, view.window), view)
    metrics = sorted({one for name in runs[:4] if (run := source.run(name)) for one in run.metric_names()})
    data = {
        "name": study.name, "about": _describe(source, study), "statistics": _statistics(study),
        "seeds": link_files(draw_charts(seed_series(study), CurveView()), path),
        "curves": curve_section(path, {}, charts, view, metric, metrics), "runs": _runs(source, study),
    }  # fmt: skip
    return parts.Page(source, study.name, "study.html", data, here)


def study_series(
    source: RunSource, study: StudyReader, metric: str, window: int = 1
) -> list[tuple[Chart, list[Series]]]:
    """Bands over the seeds of each variant, a chart a metric."""
    found: list[tuple[Chart, list[Series]]] = []
    for name in dict.fromkeys((metric, *SHOWN) if metric else SHOWN):
        named = [(variant.label or study.name, source.run_series(name, list(variant.runs.values())))
                 for variant in study.variants()]  # fmt: skip
        hint = f"each seed is a mean of {window} steps" if window > 1 else "pale: each seed; band: 95 % over seeds"
        chart = replace(metric_chart(name), hint=hint)
        found.append((chart, seed_bands(named, name, window, chart.share)))
    return found


def _describe(source: RunSource, study: StudyReader) -> str:
    variants = study.variants()
    if not variants:
        return "its study.json cannot be read"
    runs, known = [name for variant in variants for name in variant.runs.values()], source.runs()
    finished = sum(run.status() == "finished" for name in runs if (run := known.get(name)))
    seeds = len(variants[0].runs)
    kinds = f"{len(variants):,} variant{'s' if len(variants) > 1 else ''} x {seeds:,} seed{'s' if seeds != 1 else ''}"
    return f"{kinds}, {finished:,} of {len(runs):,} runs finished"


def _statistics(study: StudyReader) -> list[tuple[str, Table]]:
    """A table for each variant and comparison, with its title."""
    statistics = study.statistics()
    if not statistics:
        return []
    [head], *rest = statistics
    columns = [(name, "") for name in (*head[1:], "p")]
    return [
        (one_line(rows[0][0], 300), Table(columns, [_statistics_row(row) for row in rows[1:]], rows[0][0], head[0]))
        for rows in _split(rest)
    ]


def _split(groups: list[list[tuple[str, ...]]] | list) -> list[list[tuple[str, ...]]]:
    """The rows of each variant and comparison, which begin with a title that is not indented."""
    found: list[list[tuple[str, ...]]] = []
    for row in (row for group in groups for row in group):
        if (len(row) == 1 and not row[0].startswith(" ")) or not found:
            found.append([row])
        else:
            found[-1].append(row)
    return found


def _statistics_row(row: tuple[str, ...]) -> list[Cell | str]:
    cells: list[Cell | str] = [one_line(cell, 300).removeprefix("p = ") for cell in row]
    if row[0].startswith("    "):
        cells[0] = Cell(one_line(row[0], 300), class_="sub")
    if len(cells) > 1 and not any(cells[1:]):
        cells = [cells[0]]
    return [*cells, *[""] * (5 - len(cells))] if len(cells) > 1 else [*cells]


def seed_series(study: StudyReader) -> list[tuple[Chart, list[Series]]]:
    """The picture: each seed's pass rate before and after."""
    hint, unit = "held-out pass@1; bars: 95 % over tasks", "% of completions"
    return [
        (Chart(f"Each seed {side} training", [], True, "seed", hint, unit), seed_dots(study, side))
        for side in ("before", "after")
    ]


def _runs(source: RunSource, study: StudyReader) -> Table | None:
    """Every run as a link, with its result."""
    results, known = study.results(), source.runs()
    rows: list[list[Cell | str]] = []
    for variant in study.variants():
        start, first = next(iter(variant.runs.items()), (0, ""))
        for seed, name in variant.runs.items():
            result, run = results.get(name, {}), known.get(name)
            work = run.work() if run else None
            link = Cell(f"seed {seed}", parts.work_address(source, name)) if run else f"seed {seed}"
            state = Cell(badge=work.status, is_live=work.live) if work else Cell("not begun", badge="")
            alarms = ", ".join(one_line(as_mapping(one).get("code"), 40) for one in as_list(result.get("alarms")))
            reason = one_line(result.get("reason"), 160)
            beside = Cell(f"compare with seed {start}", parts.address("/ui/compare", a=first, b=name))
            rows.append([link, variant.label or "–", state, estimate(result.get("before"), "pass@1"),
                         estimate(result.get("after"), "pass@1"), alarms or reason or "–",
                         beside if run and name != first else ""])  # fmt: skip
    columns = [(name, "") for name in ("Variant", "State", "Before", "After", "Alarms", "")]
    return Table(columns, rows, "Runs of the study", "Run") if rows else None
