"""The table of all held-out tasks between two evaluations, and one task with its completions on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.answer_reference import reference_of_row
from rlvr.service.dashboard.dashboard_data import PAGE, Cell, Source, one_line, visible_text
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, ORDERS, STAGES, HeldoutChanges, TaskChange
from rlvr.service.dashboard.pages import heldout_parts
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.heldout_parts import Sides
from rlvr.service.dashboard.pages.page_parts import Page
from rlvr.service.dashboard.run_files import answer_row
from rlvr.service.dashboard.run_source import RunSource

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
    query = heldout_parts.side_query(sides)
    run = runs.run(sides[1][0])
    rows = {task.id: run.heldout_answers(sides[1][1], task.id) for task in shown} if run else {}
    prompts = {task: one_line(found[0].get("prompt"), 80) for task, found in rows.items() if found}
    kinds = {part.key: part.key.replace("=", " ", 1) for part in changes.parts if part.key}
    part = next((one for one in changes.parts if one.key == kind), None)
    first, second = heldout_parts.name_sides(sides)
    data = {
        "crumbs": _crumbs(source, sides, "held-out tasks"), "query": query, "kind": kind, "kinds": kinds,
        "title": f"Held-out tasks: {first} and {second}" if sides[0][0] != sides[1][0] else "Held-out tasks",
        "count": len(tasks), "verdict": heldout_parts.describe_change(part.compared, sides) if part else None,
        "order": order, "orders": ORDERS,
        "table": heldout_parts.task_table(shown, sides, "Held-out tasks", prompts, bool(kinds)) if shown else None,
        "pager": parts.make_pager(TASKS, {**query, "order": order, "kind": kind}, offset, len(shown), len(tasks),
                                  ("Previous", "Next")),
    }  # fmt: skip
    return Page(source, "Held-out tasks", "tasks.html", data)


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
    links = [(label, heldout_parts.task_address(sides, ordered[at].id), rel)
             for label, at, rel in near if 0 <= at < len(ordered)]  # fmt: skip
    labels = heldout_parts.name_sides(sides)
    counts = (task.before, task.after)
    data = {
        "id": id, "crumbs": _crumbs(source, sides, id), "links": links, "place": place + 1, "total": len(ordered),
        "kinds": ", ".join(kind.replace("=", " ", 1) for kind in sorted(task.kinds)), "said": _verdict(task, labels),
        "prompt": visible_text(example.get("rendered_prompt") or example.get("prompt")) if example else None,
        "reference": reference_of_row(example),
        "sides": [_side(*given) for given in zip(labels, counts, stored, strict=True)],
        "others": _other_sides(runs, sides, id),
    }  # fmt: skip
    return Page(source, f"Task {id}", "task.html", data)


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
    crumbs = _crumbs(source, (a, b), "held-out tasks")
    return Page(source, "Held-out tasks", "message.html", {"text": text, "class_": "panel", "crumbs": crumbs})


def _crumbs(source: Source, sides: Sides, last: str) -> list[Cell]:
    """The way to a page, whose own name is the last."""
    (one, _), (other, _) = sides
    first = Cell(one, parts.work_address(source, one))
    if one != other:
        first = Cell("Compare", parts.address("/ui/compare", a=one, b=other))
    middle = [Cell("held-out tasks", heldout_parts.tasks_address(sides))]
    return [first, *(middle if last != "held-out tasks" else []), Cell(last)]


def _verdict(task: TaskChange, labels: tuple[str, str]) -> str:
    counts = zip(labels, (task.before, task.after), strict=True)
    said = ", ".join(f"{label}: {passed} of {judged} pass" for label, (passed, judged) in counts)
    return f"{said}; {100 * task.change:+.0f} points"


def _side(label: str, count: tuple[int, int], rows: list[dict[str, Any]] | None) -> dict[str, Any]:
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
    said = f"{count[0]} of {count[1]} pass" + (f"; {stored} stored" if 0 < stored < count[1] else "")
    completions = [_completion(row, place) for place, row in enumerate(rows or [])]
    return {"label": label, "said": said, "why": why, "completions": completions}


def _completion(row: dict[str, Any], place: int) -> dict[str, Any]:
    sample = row.get("sample")
    number = (sample if isinstance(sample, int) and not isinstance(sample, bool) else place) + 1
    return {"row": answer_row("", None, "", row), "sample": number, "text": visible_text(row.get("response"))}


def _other_sides(runs: RunSource, sides: Sides, id: str) -> list[Cell]:
    """Links to the same task on other sides: before and after of each run, and both runs after training."""
    (one, _), (other, _) = sides
    pairs: list[Sides] = [((run, BEFORE), (run, AFTER)) for run in (one, other)]
    pairs.append(((one, AFTER), (other, AFTER)))
    links: list[Cell] = []
    for pair in dict.fromkeys(pairs):
        if pair == sides or pair[0] == pair[1] or runs.changes(*pair) is None:
            continue
        first, second = pair
        label = f"{first[0]} before and after" if first[0] == second[0] else f"{first[0]} and {second[0]}"
        links.append(Cell(label, heldout_parts.task_address(pair, id)))
    return links
