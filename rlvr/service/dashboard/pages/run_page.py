"""The first page of a training run: what was learned, which held-out tasks fell and rose, findings, curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.curve_view import CurveView
from rlvr.service.dashboard.dashboard_data import Cell, Note, Table, one_line
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, HeldoutChanges
from rlvr.service.dashboard.pages import heldout_pages as heldout
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.curve_parts import curve_section
from rlvr.service.dashboard.pages.rollouts_page import latest_rollouts
from rlvr.service.dashboard.run_charts import draw_charts, estimate, failing_groups, run_summary
from rlvr.service.dashboard.run_differences import describe, flatten
from rlvr.service.dashboard.run_reader import RunReader
from rlvr.service.dashboard.run_source import RunSource
from rlvr.tracking.tracker import mask_settings
from rlvr.training.interim import read_interim_results

# The metric that shows a finding of `rlvr doctor` (`rlvr.training.diagnosis`), by the code of the finding.
EVIDENCE = {
    **dict.fromkeys(("too_hard", "too_easy", "equal_groups", "solved", "no_update"), "frac_groups_with_signal"),
    **dict.fromkeys(("one_reward", "flat", "ceiling", "reward_only", "nothing_passes"), "reward"),
    **dict.fromkeys(("entropy_gone", "entropy_up"), "entropy"),
    **dict.fromkeys(("answer_form", "no_answer", "reference_refused"), "verifier/no_answer_rate"),
    "truncated": "completions/clipped_ratio", "errors": "verifier/error_rate",
    "invalid_tasks": "verifier/invalid_rate", "large_update": "optim/kl_after",
    "gap": "optim/kl_sample_train_v2", "clipped": "clip_ratio/region_mean", "no_calls": "env/all/calls",
    "critic_blind": "critic/explained_variance", "demonstrations_refused": "env/all/correct",
}  # fmt: skip
ABOUT_TASKS = ("unsolved_kind", "lost", "no_gain")  # findings that held-out tasks show


def run_page(source: RunSource, parameters: Mapping[str, str], here: str = "") -> parts.Page:
    name, metric = parameters.get("work", ""), parameters.get("metric", "")
    run = source.run(name)
    if run is None:
        return parts.not_found_page(source, source.noun, name)
    work, view = run.work(), CurveView.of(parameters)
    path = parts.work_path(source, name)
    sides: heldout.Sides = ((name, BEFORE), (name, AFTER))
    changes = source.changes(*sides)
    charts = draw_charts(run.chart_series(metric), view)
    data = {
        "work": work, "has_others": len(source.names()) > 1, **_result(run, changes, sides),
        "tasks": heldout.list_changed(changes, sides, _prompts(run, changes) if changes else {}),
        "findings": [(one, _find_evidence(run, one, path, sides if changes else None)) for one in run.notes()],
        "failing": failing_groups(run.diagnosis()),
        "curves": curve_section(path, {}, charts, view, metric, run.metric_names()),
        "settings": _settings(run), "latest": latest_rollouts(source, name),
    }  # fmt: skip
    return parts.Page(source, work.name, "run.html", data, here)


def _result(run: RunReader, changes: HeldoutChanges | None, sides: heldout.Sides) -> dict[str, Any]:
    """The result in one look: the sentence, what is behind it, the tables by level and kind, and further tables."""
    if changes is None:
        said, tables = _result_so_far(run)
        return {"verdict": None, "said": said, "tables": None, "measures": tables}
    more = [one for one in run_summary({**changes.whole}) if len(one.rows) > 1]
    fell, rose, same = changes.count()
    said = f"Of {len(changes.tasks):,} tasks {rose:,} rose, {fell:,} fell and {same:,} stayed the same."
    said += f" {changes.apart:,} were judged on one side only and are left out." if changes.apart else ""
    tables = heldout.tabulate_parts(changes, sides) if changes.tasks else None
    verdict = heldout.describe_change(changes.whole, sides)
    return {"verdict": verdict, "said": [said], "tables": tables, "measures": more}


def _result_so_far(run: RunReader) -> tuple[list[str], list[Table]]:
    """What is known of the held-out tasks before the evaluation at the end: sentences, or else the stored summary."""
    said: list[str] = []
    baseline = run.evaluation(BEFORE)
    if baseline is not None:
        rates = {"all": baseline.intervals(), **{f"level {one}": baseline.intervals(one) for one in baseline.levels}}
        texts = [f"{name} {estimate(rate['pass@1'], 'pass@1')}" for name, rate in rates.items()]
        said.append(f"Before training, held-out tasks pass: {'; '.join(texts)}.")
    interim = read_interim_results(run.metrics().rows)
    if interim:
        last = interim[-1]
        rate = estimate(last.pass_rate.to_json(), "pass@1")
        said.append(f"After step {last.step:,}, other held-out tasks pass: {rate} (interim evaluation).")
    if (stored := run_summary(run.summary())) and not said:
        return [], stored
    live = run.status() in ("running", "writing")
    said.append(
        "The evaluation at the end says what was learned; this page shows it by itself." if live
        else "This run has no evaluation at its end: it has not finished, or evaluations/ was not copied."
    )  # fmt: skip
    return said, []


def _prompts(run: RunReader, changes: HeldoutChanges) -> dict[str, str]:
    """The beginnings of the prompts of the tasks that the page names, where they are stored."""
    shown = [task.id for order in ("fell", "rose") for task in changes.select(order)[: heldout.FEW]]
    found = {task: run.heldout_answers(AFTER, task) for task in shown}
    return {task: one_line(rows[0].get("prompt"), 80) for task, rows in found.items() if rows}


def _find_evidence(run: RunReader, one: Note, path: str, sides: heldout.Sides | None) -> Cell | None:
    """A link to what shows a finding of `rlvr doctor`."""
    metric = EVIDENCE.get(one.code, "")
    if one.code in ABOUT_TASKS and sides is not None:
        return Cell("See these tasks", heldout.tasks_address(sides, order="worst"))
    points = run.series(metric) if metric else None
    if points is None:
        return None
    value = float(points.y[-1])
    return Cell(f"See {metric}: last {value:.4g}", f"{parts.address(path, metric=metric)}#curves")


def _settings(run: RunReader) -> Table | None:
    settings = dict(flatten(mask_settings(run.config())))
    machine = dict(flatten(mask_settings(dict(run.machine()))))
    if not settings:
        return None
    rows = [[one_line(key, 120), describe(value)] for key, value in {**settings, **machine}.items()]
    return Table([("Value", "mono")], rows[:1000], "Settings", "Setting")
