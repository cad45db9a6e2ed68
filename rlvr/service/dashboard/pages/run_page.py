"""The first page of a training run: what was learned, which held-out tasks fell and rose, findings, curves."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.curve_view import CurveView
from rlvr.service.dashboard.dashboard_data import Note, one_line
from rlvr.service.dashboard.element_tree import Page, Tree, h
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, HeldoutChanges
from rlvr.service.dashboard.pages import heldout_parts
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.curve_parts import curve_section
from rlvr.service.dashboard.pages.heldout_parts import Sides
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


def run_page(source: RunSource, parameters: Mapping[str, str], here: str = "") -> Page:
    name, metric = parameters.get("work", ""), parameters.get("metric", "")
    run = source.run(name)
    if run is None:
        return parts.not_found_page(source, source.noun, name)
    work, view = run.work(), CurveView.of(parameters)
    path = parts.work_address(source, name)
    sides: Sides = ((name, BEFORE), (name, AFTER))
    changes = source.changes(*sides)
    others = len(source.names()) > 1
    return parts.frame_page(
        source,
        work.name,
        here,
        h("div", h("h1", work.name), parts.badge(work.status, work.live), h("span", work.about, class_="dim"),
          h("span", parts.ago(work.changed), class_="dim"),
          h("span", h("a", "Compare with another run", href=parts.address("/ui/compare", b=name)) if others else None,
            h("a", "Compare two steps", href=parts.address("/ui/compare", work=name)), class_="end head"),
          class_="head"),
        h("section", h("progress", value=str(work.done), max="1", aria_label="progress") if work.done else None,
          parts.figures(work.figures), class_="panel", aria_label="Latest numbers") if work.figures else None,
        _result(run, changes, sides),
        heldout_parts.task_tables(changes, sides, _prompts(run, changes)) if changes else None,
        _findings(run, path, sides if changes else None),
        [parts.comparison(one) for one in failing_groups(run.diagnosis())],
        curve_section(path, {}, draw_charts(run.chart_series(metric), view), view, metric, run.metric_names()),
        _settings(run),
        latest_rollouts(source, name),
    )  # fmt: skip


def _result(run: RunReader, changes: HeldoutChanges | None, sides: Sides) -> Tree:
    """The result in one look: the sentence, and the table by level and kind."""
    title = h("h2", "What was learned")
    if changes is None:
        return h("section", title, _result_so_far(run), class_="panel stack tight")
    more = [one for one in run_summary({**changes.whole}) if len(one.rows) > 1]
    fell, rose, same = changes.count()
    return h(
        "section", title,
        h("p", heldout_parts.describe_change(changes.whole, sides), class_="lead"),
        h("p", f"Of {len(changes.tasks):,} tasks {rose:,} rose, {fell:,} fell and {same:,} stayed the same."
          + (f" {changes.apart:,} were judged on one side only and are left out." if changes.apart else ""),
          class_="dim"),
        heldout_parts.parts_table(changes, sides) if changes.tasks else None,
        h("details", h("summary", "More measures: pass@k, reward, watched verifiers"),
          [parts.data_table([(c, "") for c in one.columns[1:]], [list(row) for row in one.rows], one.title)
           for one in more]) if more else None,
        class_="panel stack tight",
    )  # fmt: skip


def _result_so_far(run: RunReader) -> list[Tree]:
    """What is known of the held-out tasks before the evaluation at the end."""
    said: list[Tree] = []
    baseline = run.evaluation(BEFORE)
    if baseline is not None:
        rates = {"all": baseline.intervals(), **{f"level {one}": baseline.intervals(one) for one in baseline.levels}}
        texts = [f"{name} {estimate(rate['pass@1'], 'pass@1')}" for name, rate in rates.items()]
        said.append(h("p", f"Before training, held-out tasks pass: {'; '.join(texts)}."))
    interim = read_interim_results(run.metrics().rows)
    if interim:
        last = interim[-1]
        rate = estimate(last.pass_rate.to_json(), "pass@1")
        said.append(h("p", f"After step {last.step:,}, other held-out tasks pass: {rate} (interim evaluation)."))
    if (stored := run_summary(run.summary())) and not said:
        return [parts.data_table([(c, "") for c in one.columns[1:]], [list(row) for row in one.rows], one.title)
                for one in stored]  # fmt: skip
    live = run.status() in ("running", "writing")
    why = (
        "The evaluation at the end says what was learned; this page shows it by itself." if live
        else "This run has no evaluation at its end: it has not finished, or evaluations/ was not copied."
    )  # fmt: skip
    return [*said, h("p", why, class_="dim", role="status")]


def _prompts(run: RunReader, changes: HeldoutChanges) -> dict[str, str]:
    """The beginnings of the prompts of the tasks that the page names, where they are stored."""
    shown = [task.id for order in ("fell", "rose") for task in changes.select(order)[: heldout_parts.FEW]]
    found = {task: run.heldout_answers(AFTER, task) for task in shown}
    return {task: one_line(rows[0].get("prompt"), 80) for task, rows in found.items() if rows}


def _findings(run: RunReader, path: str, sides: Sides | None) -> Tree:
    """What `rlvr doctor` finds, problems first, each with a link to what shows it."""
    notes = run.notes()
    return h(
        "section", h("h2", "What the doctor finds"),
        [parts.note(one, _evidence(run, one, path, sides)) for one in notes]
        or [h("p", "Nothing stands in the way.", class_="dim")],
        class_="stack tight", aria_label="Findings",
    )  # fmt: skip


def _evidence(run: RunReader, one: Note, path: str, sides: Sides | None) -> Tree | None:
    metric = EVIDENCE.get(one.code, "")
    if one.code in ABOUT_TASKS and sides is not None:
        return h("a", "See these tasks", href=heldout_parts.tasks_address(sides, order="worst"))
    points = run.series(metric) if metric else None
    if points is None:
        return None
    value = float(points.y[-1])
    return h("a", f"See {metric}: last {value:.4g}", href=f"{parts.address(path, metric=metric)}#curves")


def _settings(run: RunReader) -> Tree | None:
    settings = dict(flatten(mask_settings(run.config())))
    machine = dict(flatten(mask_settings(dict(run.machine()))))
    if not settings:
        return None
    rows = [[one_line(key, 120), describe(value)] for key, value in {**settings, **machine}.items()]
    table = parts.data_table([("Value", "mono")], rows[:1000], "Settings", head="Setting")
    return h("details", h("summary", "Settings, code and machine"), table, class_="panel")
