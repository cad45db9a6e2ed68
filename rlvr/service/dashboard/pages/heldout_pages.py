"""The table of all held-out tasks between two evaluations, and one task with its completions on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.answer_reference import reference_of_row
from rlvr.service.dashboard.dashboard_data import PAGE, Source, one_line, visible_text
from rlvr.service.dashboard.element_tree import Child, Page, Tree, h
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, ORDERS, STAGES, HeldoutChanges, TaskChange
from rlvr.service.dashboard.pages import heldout_parts
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.heldout_parts import Sides
from rlvr.service.dashboard.run_files import answer_row
from rlvr.service.dashboard.run_source import RunSource, Side

TASKS = "/ui/tasks"


def tasks_page(source: Source, parameters: Mapping[str, str]) -> Page:
    found = _read_sides(source, parameters)
    if isinstance(found, Page):
        return found
    runs, sides, changes = found
    order, kind = parameters.get("order", "fell"), parameters.get("kind", "")
    order = order if order in ORDERS else "fell"
    tasks = changes.select(order, kind)
    offset = (parts.page_number(parameters) - 1) * PAGE
    shown = tasks[offset : offset + PAGE]
    query = {**heldout_parts.side_query(sides), "order": order, "kind": kind}
    run = runs.run(sides[1][0])
    rows = {task.id: run.heldout_answers(sides[1][1], task.id) for task in shown} if run else {}
    prompts = {task: one_line(found[0].get("prompt"), 80) for task, found in rows.items() if found}
    kinds = {part.key: part.key.replace("=", " ", 1) for part in changes.parts if part.key}
    part = next((one for one in changes.parts if one.key == kind), None)
    first, second = heldout_parts.name_sides(sides)
    return parts.frame_page(
        source, "Held-out tasks", "",
        _crumbs(source, sides, "held-out tasks"),
        h("div", h("h1", f"Held-out tasks: {first} and {second}" if sides[0][0] != sides[1][0] else "Held-out tasks"),
          h("p", f"{len(tasks):,} tasks", class_="dim", role="status"), class_="head"),
        h("p", heldout_parts.describe_change(part.compared, sides), class_="panel lead") if part else None,
        h("form", [h("input", type="hidden", name=name, value=value)
                   for name, value in heldout_parts.side_query(sides).items()],
          parts.select_field("kind", "Kind", kind, kinds, "all") if kinds or kind else None,
          parts.select_field("order", "Order", order, {**ORDERS}, None),
          h("button", "Show", class_="main"), method="get", action=TASKS, class_="filters panel"),
        h("section", heldout_parts.task_table(shown, sides, "Held-out tasks", prompts, has_kinds=bool(kinds)) if shown
          else h("p", "No task is of this kind on both sides.", class_="empty"),
          parts.pager(TASKS, query, offset, len(shown), len(tasks), ("Previous", "Next")), class_="panel"),
    )  # fmt: skip


def task_page(source: Source, parameters: Mapping[str, str]) -> Page:
    found = _read_sides(source, parameters)
    if isinstance(found, Page):
        return found
    runs, sides, changes = found
    id = parameters.get("task", "")
    ordered = changes.select("fell")
    place = next((number for number, one in enumerate(ordered) if one.id == id), None)
    if place is None:
        return parts.not_found_page(source, "held-out task", id)
    task = ordered[place]
    stored = [run.heldout_answers(stage, id) if (run := runs.run(name)) else None for name, stage in sides]
    example = next((rows[0] for rows in stored if rows), {})
    near = [("Previous task", place - 1, "prev"), ("Next task", place + 1, "next")]
    links = [h("a", label, href=heldout_parts.task_address(sides, ordered[at].id), rel=rel, class_="button")
             for label, at, rel in near if 0 <= at < len(ordered)]  # fmt: skip
    labels = heldout_parts.name_sides(sides)
    counts = (task.before, task.after)
    return parts.frame_page(
        source, f"Task {id}", "",
        _crumbs(source, sides, id),
        h("div", h("h1", h("span", id, class_="mono")),
          h("span", ", ".join(kind.replace("=", " ", 1) for kind in sorted(task.kinds)), class_="dim"),
          h("span", _verdict(task, labels)), class_="head"),
        h("nav", links, h("span", f"{place + 1:,} of {len(ordered):,}, the one that fell most first", class_="dim"),
          class_="pager", aria_label="Tasks"),
        h("div", h("section", h("h2", "Prompt"),
                   parts.block(visible_text(example.get("rendered_prompt") or example.get("prompt"))), class_="panel"),
          h("section", [h("div", h("h2", title), parts.block(text)) for title, text in reference_of_row(example)],
            class_="panel stack") if reference_of_row(example) else None,
          class_="grid2") if example else None,
        h("div", [_side(*given) for given in zip(sides, labels, counts, stored, strict=True)], class_="grid2"),
        _other_sides(runs, sides, id),
    )  # fmt: skip


def _read_sides(source: Source, parameters: Mapping[str, str]) -> Page | tuple[RunSource, Sides, HeldoutChanges]:
    """The two evaluations of an address, or the page that says why they cannot be shown."""
    if not isinstance(source, RunSource):
        return parts.not_found_page(source, "page", "of held-out tasks")
    a, b = (heldout_parts.read_side(parameters.get(name, "")) for name in "ab")
    for name, _ in (a, b):
        if source.run(name) is None:
            return parts.not_found_page(source, source.noun, name)
    if (changes := source.changes(a, b)) is not None:
        return source, (a, b), changes
    missing = [
        f"{name} {STAGES.get(stage, stage[:40])}"
        for name, stage in (a, b)
        if (run := source.run(name)) is None or stage not in STAGES or run.evaluation(stage) is None
    ]
    text = f"There is no evaluation of {' and '.join(missing)} yet, or its file is damaged."
    return parts.frame_page(source, "Held-out tasks", "", _crumbs(source, (a, b), "held-out tasks"),
                            h("h1", "Held-out tasks"), h("p", text, class_="panel", role="status"))  # fmt: skip


def _crumbs(source: Source, sides: Sides, last: str) -> Tree:
    (one, _), (other, _) = sides
    first = [h("li", h("a", one, href=parts.work_address(source, one)))]
    if one != other:
        first = [h("li", h("a", "Compare", href=parts.address("/ui/compare", a=one, b=other)))]
    middle = [h("li", h("a", "held-out tasks", href=heldout_parts.tasks_address(sides)))]
    return h("ol", first, middle if last != "held-out tasks" else None, h("li", last), class_="crumbs")


def _verdict(task: TaskChange, labels: tuple[str, str]) -> str:
    counts = zip(labels, (task.before, task.after), strict=True)
    said = ", ".join(f"{label}: {passed} of {judged} pass" for label, (passed, judged) in counts)
    return f"{said}; {100 * task.change:+.0f} points"


def _side(side: Side, label: str, count: tuple[int, int], rows: list[dict[str, Any]] | None) -> Tree:
    """The completions of one side."""
    why = ""
    if rows is None:
        why = (
            "This run stores no completions of held-out tasks (run.rollouts_per_task=0, or an older version made it): "
            "only how many passed is known."
        )
    elif not rows:
        why = "No completion of this task is stored."
    stored = len(rows or ())
    return h(
        "section",
        h("div", h("h2", label),
          h("span", f"{count[0]} of {count[1]} pass" + (f"; {stored} stored" if 0 < stored < count[1] else ""),
            class_="dim"), class_="head"),
        h("p", why, class_="dim") if why else None,
        [_completion(row, place) for place, row in enumerate(rows or [])],
        class_="panel stack",
    )  # fmt: skip


def _completion(row: dict[str, Any], place: int) -> Tree:
    shown = answer_row("", None, "", row)
    sample = row.get("sample")
    number = (sample if isinstance(sample, int) and not isinstance(sample, bool) else place) + 1
    text = visible_text(row.get("response"))
    return h("article", h("div", parts.badge(shown.outcome, text=shown.outcome or "not judged"),
                          h("span", f"reward {parts.format_number(shown.reward)}"),
                          h("small", shown.reason) if shown.reason else None,
                          h("small", f"sample {number}", class_="end"), class_="head"),
             parts.block(text), class_="stack tight")  # fmt: skip


def _other_sides(runs: RunSource, sides: Sides, id: str) -> Tree | None:
    """The same task on other sides: before and after of each run, and both runs after training."""
    (one, _), (other, _) = sides
    pairs: list[Sides] = [((run, BEFORE), (run, AFTER)) for run in (one, other)]
    pairs.append(((one, AFTER), (other, AFTER)))
    links: list[Child] = []
    for pair in dict.fromkeys(pairs):
        if pair == sides or pair[0] == pair[1] or runs.changes(*pair) is None:
            continue
        first, second = pair
        label = f"{first[0]} before and after" if first[0] == second[0] else f"{first[0]} and {second[0]}"
        links.append(h("li", h("a", label, href=heldout_parts.task_address(pair, id))))
    return h("section", h("h2", "The same task"), h("ul", links), class_="panel") if links else None
