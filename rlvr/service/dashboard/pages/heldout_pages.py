"""Held-out tasks between two evaluations: sentence, tables by part, the tasks that changed most; a page of all of them,
and one of a task with its completions on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.service.dashboard.answer_reference import reference_of_row
from rlvr.service.dashboard.dashboard_data import (
    PAGE,
    Cell,
    Source,
    Table,
    as_mapping,
    finite_number,
    one_line,
    verdicts_of,
    visible_text,
)
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, ORDERS, STAGES, HeldoutChanges, PartChange, TaskChange
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.run_charts import estimate
from rlvr.service.dashboard.run_files import answer_row
from rlvr.service.dashboard.run_source import RunSource, Side
from rlvr.training.run_diagnosis import has_gained, has_lost

TASKS = "/ui/tasks"
FEW = 6  # tasks that fell and that rose most; the list has all
Sides = tuple[Side, Side]


def tasks_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    found = _read_sides(source, parameters)
    if isinstance(found, parts.Page):
        return found
    runs, sides, changes = found
    order, kind = parameters.get("order", "fell"), parameters.get("kind", "")
    order = order if order in ORDERS else "fell"
    tasks = changes.select(order, kind)
    offset = (parts.page_number(parameters) - 1) * PAGE
    shown = tasks[offset : offset + PAGE]
    query = side_query(sides)
    run = runs.run(sides[1][0])
    rows = {task.id: run.heldout_answers(sides[1][1], task.id) for task in shown} if run else {}
    prompts = {task: one_line(found[0].get("prompt"), 80) for task, found in rows.items() if found}
    kinds = {part.key: part.key.replace("=", " ", 1) for part in changes.parts if part.key}
    part = next((one for one in changes.parts if one.key == kind), None)
    first, second = name_sides(sides)
    data = {
        "crumbs": _crumbs(source, sides, "held-out tasks"), "query": query, "kind": kind, "kinds": kinds,
        "title": f"Held-out tasks: {first} and {second}" if sides[0][0] != sides[1][0] else "Held-out tasks",
        "count": len(tasks), "verdict": describe_change(part.compared, sides) if part else None,
        "order": order, "orders": ORDERS,
        "table": task_table(shown, sides, "Held-out tasks", prompts, bool(kinds)) if shown else None,
        "pager": parts.make_pager(TASKS, {**query, "order": order, "kind": kind}, offset, len(shown), len(tasks),
                                  ("Previous", "Next")),
    }  # fmt: skip
    return parts.Page(source, "Held-out tasks", "tasks.html", data)


def task_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    found = _read_sides(source, parameters)
    if isinstance(found, parts.Page):
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
    links = [(label, task_address(sides, ordered[at].id), rel)
             for label, at, rel in near if 0 <= at < len(ordered)]  # fmt: skip
    labels = name_sides(sides)
    counts = (task.before, task.after)
    data = {
        "id": id, "crumbs": _crumbs(source, sides, id), "links": links, "place": place + 1, "total": len(ordered),
        "kinds": ", ".join(kind.replace("=", " ", 1) for kind in sorted(task.kinds)), "said": _verdict(task, labels),
        "prompt": visible_text(example.get("rendered_prompt") or example.get("prompt")) if example else None,
        "reference": reference_of_row(example),
        "sides": [_side(*given) for given in zip(labels, counts, stored, strict=True)],
        "others": _other_sides(runs, sides, id),
    }  # fmt: skip
    return parts.Page(source, f"Task {id}", "task.html", data)


def _read_sides(source: Source, parameters: Mapping[str, str]) -> parts.Page | tuple[RunSource, Sides, HeldoutChanges]:
    """The two evaluations of an address, or the page that says why they cannot be shown."""
    if not isinstance(source, RunSource):
        return parts.not_found_page(source, "page", "of held-out tasks")
    a, b = (read_side(parameters.get(name, "")) for name in "ab")
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
    return parts.Page(source, "Held-out tasks", "message.html", {"text": text, "class_": "panel", "crumbs": crumbs})


def _crumbs(source: Source, sides: Sides, last: str) -> list[Cell]:
    """The way to a page, whose own name is the last."""
    (one, _), (other, _) = sides
    first = Cell(one, parts.work_address(source, one))
    if one != other:
        first = Cell("Compare", parts.address("/ui/compare", a=one, b=other))
    middle = [Cell("held-out tasks", tasks_address(sides))]
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
    refused = [one.verifier for one in verdicts_of(row.get("scores"))[1:] if one.outcome in ("failed", "timeout")]
    shown = answer_row("", None, "", row)
    return {"row": shown, "sample": number, "text": visible_text(row.get("response")), "refused": refused}


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
        names = dict(zip((one, other), parts.short_names(one, other), strict=True))
        label = " and ".join(names[name] for name, _ in pair)
        label = f"{names[first[0]]} before and after" if first[0] == second[0] else label
        links.append(Cell(label, task_address(pair, id)))
    return links


def read_side(text: str) -> Side:
    run, _, stage = text.rpartition("@")
    return run, stage


def side_query(sides: Sides) -> dict[str, str]:
    return {name: f"{run}@{stage}" for name, (run, stage) in zip("ab", sides, strict=True)}


def tasks_address(sides: Sides, **query: object) -> str:
    return parts.address(TASKS, **side_query(sides), **query)


def task_address(sides: Sides, task: str) -> str:
    return parts.address("/ui/task", **side_query(sides), task=task)


def name_sides(sides: Sides) -> tuple[str, str]:
    """What the columns of both sides are called."""
    (one, first), (other, second) = sides
    if one == other:
        return "Before", "After"
    labels, (one, other) = {AFTER: "", BEFORE: " before"}, parts.short_names(one, other)
    return f"{one}{labels.get(first, '')}", f"{other}{labels.get(second, '')}"


def describe_change(compared: Mapping[str, Any], sides: Sides) -> dict[str, str]:
    """One sentence: whether the held-out pass rate changed (`word`, of the colour `kind`), by how much, and how sure
    that is (`rest`). Without a word `rest` is all."""
    before, after = (as_mapping(compared[side]).get("pass@1") for side in STAGES)
    change = as_mapping(compared.get("change"))
    if finite_number(as_mapping(after).get("value")) is None:
        return {"word": "", "kind": "", "rest": "No held-out task was judged on both sides."}
    is_known = finite_number(change.get("low")) is not None
    verdict, kind = "did not clearly change", ""
    if is_known and has_gained(compared):
        verdict, kind = "rose", "up"
    elif is_known and has_lost(compared):
        verdict, kind = "fell", "down"
    (one, _), (other, _) = sides
    labels = name_sides(sides)
    if one != other:
        words = {"up": f"is higher under {labels[1]}", "down": f"is lower under {labels[1]}"}
        verdict = words.get(kind, "does not clearly differ")
    p = format_p(compared.get("p_value"))
    first, second = (label.lower() if one == other else f"under {label}" for label in labels)
    rest = (
        f": {estimate(before, 'pass@1')} {first}, {estimate(after, 'pass@1')} {second}; {format_change(change)}; "
        f"paired test: p {p if p.startswith('<') else f'= {p}'}. {compared['tasks']:,} tasks x {compared['samples']} "
        "completions."
    )
    return {"word": verdict, "kind": kind, "rest": rest}


def format_change(change: Mapping[str, Any]) -> str:
    """`+3.1 points (-0.2 to +6.4)`."""
    value, low, high = (finite_number(change.get(key)) for key in ("value", "low", "high"))
    if value is None:
        return "not known"
    return f"{100 * value:+.1f} points" + ("" if None in (low, high) else f" ({100 * low:+.1f} to {100 * high:+.1f})")  # type: ignore[operator]


def format_p(value: Any) -> str:
    p = finite_number(value)
    return "not known" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def tabulate_parts(changes: HeldoutChanges, sides: Sides) -> dict[str, Any]:
    """A table of all tasks and each level, then tables of what `others` set tasks apart. `rows` counts all."""
    first, second = name_sides(sides)
    columns = [("", "wide"), (first, ""), (second, ""), ("Change", ""), ("p", "num")]

    def table(chosen: Sequence[PartChange], label: str) -> Table:
        return Table(columns, [_part_row(part, sides) for part in chosen], label, "Tasks")

    by_property: dict[str, list[PartChange]] = {}
    for part in changes.parts[1:]:
        by_property.setdefault(part.key.partition("=")[0], []).append(part)
    tables = {name: table(chosen, f"By {name}") for name, chosen in by_property.items()}
    main = next(iter(by_property), "")  # the level, where there are several
    tables.pop(main, None)
    whole = table([*changes.parts[:1], *by_property.get(main, [])], f"Held-out pass rate {main}")
    return {"first": whole, "others": tables, "rows": len(changes.parts)}


def _part_row(part: PartChange, sides: Sides) -> list[Cell | str]:
    compared = part.compared
    before, after = (as_mapping(compared[side]["pass@1"]) for side in STAGES)
    rates = [rate for side in (before, after) if (rate := finite_number(side.get("value"))) is not None]
    drawn = Cell(span=(rates[0], rates[1]), is_change=True) if len(rates) == 2 else ""
    name, tasks = part.key.replace("=", " ", 1), f"{compared['tasks']:,} tasks"
    link = Cell(name or "all", tasks_address(sides, kind=part.key) if part.key else "", note=tasks)
    return [link, drawn, estimate(before, "pass@1"), estimate(after, "pass@1"), format_change(compared["change"]),
            format_p(compared["p_value"])]  # fmt: skip


def list_changed(changes: HeldoutChanges | None, sides: Sides, prompts: Mapping[str, str]) -> dict[str, Any] | None:
    """The tasks that fell most and those that rose most: for each a title, a table, and a link to all of them."""
    if changes is None or not changes.tasks:
        return None
    fell, rose, same = changes.count()
    (one, _), (other, _) = sides
    title, words = "Held-out tasks that changed", ("Fell", "Rose")
    if one != other:
        label = name_sides(sides)[1]
        title, words = "Held-out tasks that differ", (f"Worse under {label}", f"Better under {label}")
    tables = [
        (f"{label}: {number:,} of {len(changes.tasks):,} tasks",
         task_table(changes.select(order)[: min(FEW, number)], sides, label, prompts) if number else None,
         Cell(f"All {number:,}", tasks_address(sides, order=order)) if number > FEW else None)
        for order, label, number in (("fell", words[0], fell), ("rose", words[1], rose))
    ]  # fmt: skip
    note = f"{same:,} are equal. One task alone says little: completions are drawn at random."
    return {"title": title, "tables": tables, "note": note, "all_tasks": tasks_address(sides)}


def task_table(
    tasks: Sequence[TaskChange], sides: Sides, label: str, prompts: Mapping[str, str], has_kinds: bool = False
) -> Table:
    first, second = name_sides(sides)
    rows: list[list[Cell | str]] = []
    for task in tasks:
        rates = [passed / judged for passed, judged in (task.before, task.after)]
        counts = [f"{passed} of {judged}" for passed, judged in (task.before, task.after)]
        text = prompts.get(task.id, "")
        text = "" if task.id in text else text  # the name says it already
        name = Cell(task.id, task_address(sides, task.id), "mono", clip=text)
        kinds = [Cell(note=", ".join(kind.replace("=", " ", 1) for kind in sorted(task.kinds)))] if has_kinds else []
        span = Cell(span=(rates[0], rates[1]), is_change=True)
        rows.append([name, *kinds, span, *counts, f"{100 * task.change:+.0f}"])
    columns = [("Kind", "wide")] if has_kinds else []
    columns += [("", "wide"), (first, "num"), (second, "num"), ("Points", "num")]
    return Table(columns, rows, label, "Task", "data short")
