"""Held-out tasks between two evaluations on a page: sentence, tables by part, and the tasks that changed most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.service.dashboard.dashboard_data import Cell, Table, as_mapping, finite_number
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE, STAGES, HeldoutChanges, PartChange, TaskChange
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.run_charts import estimate
from rlvr.service.dashboard.run_source import Side
from rlvr.training.run_diagnosis import has_gained, has_lost

FEW = 6  # tasks that fell and that rose most; the list has all
Sides = tuple[Side, Side]


def read_side(text: str) -> Side:
    run, _, stage = text.rpartition("@")
    return run, stage


def side_query(sides: Sides) -> dict[str, str]:
    return {name: f"{run}@{stage}" for name, (run, stage) in zip("ab", sides, strict=True)}


def tasks_address(sides: Sides, **query: object) -> str:
    return parts.address("/ui/tasks", **side_query(sides), **query)


def task_address(sides: Sides, task: str) -> str:
    return parts.address("/ui/task", **side_query(sides), task=task)


def name_sides(sides: Sides) -> tuple[str, str]:
    """What the columns of both sides are called."""
    (one, first), (other, second) = sides
    if one == other:
        return "Before", "After"
    labels = {AFTER: "", BEFORE: " before"}
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
    if one != other:
        words = {"up": f"is higher under {other}", "down": f"is lower under {other}"}
        verdict = words.get(kind, "does not clearly differ")
    p = format_p(compared.get("p_value"))
    first, second = (label.lower() if one == other else f"under {label}" for label in name_sides(sides))
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
        title, words = "Held-out tasks that differ", (f"Worse under {other}", f"Better under {other}")
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
