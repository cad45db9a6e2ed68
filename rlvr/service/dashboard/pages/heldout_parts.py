"""Held-out tasks between two evaluations on a page: sentence, table by part, and the tasks that changed most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.service.dashboard.dashboard_data import as_mapping, finite_number
from rlvr.service.dashboard.element_tree import Child, Tree, h
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


def describe_change(compared: Mapping[str, Any], sides: Sides) -> list[Child]:
    """One sentence: whether the held-out pass rate changed, by how much, and how sure that is."""
    before, after = (as_mapping(compared[side]).get("pass@1") for side in STAGES)
    change = as_mapping(compared.get("change"))
    if finite_number(as_mapping(after).get("value")) is None:
        return ["No held-out task was judged on both sides."]
    is_known = finite_number(change.get("low")) is not None
    verdict, kind = "did not clearly change", None
    if is_known and has_gained(compared):
        verdict, kind = "rose", "up"
    elif is_known and has_lost(compared):
        verdict, kind = "fell", "down"
    (one, _), (other, _) = sides
    if one != other:
        words = {"up": f"is higher under {other}", "down": f"is lower under {other}"}
        verdict = words.get(kind or "", "does not clearly differ")
    p = format_p(compared.get("p_value"))
    first, second = (label.lower() if one == other else f"under {label}" for label in name_sides(sides))
    return [
        "The held-out pass rate ", h("b", verdict, class_=kind),
        f": {estimate(before, 'pass@1')} {first}, {estimate(after, 'pass@1')} {second}; {format_change(change)}; "
        f"paired test: p {p if p.startswith('<') else f'= {p}'}. {compared['tasks']:,} tasks x {compared['samples']} "
        "completions.",
    ]  # fmt: skip


def format_change(change: Mapping[str, Any]) -> str:
    """`+3.1 points (-0.2 to +6.4)`."""
    value, low, high = (finite_number(change.get(key)) for key in ("value", "low", "high"))
    if value is None:
        return "not known"
    return f"{100 * value:+.1f} points" + ("" if None in (low, high) else f" ({100 * low:+.1f} to {100 * high:+.1f})")  # type: ignore[operator]


def format_p(value: Any) -> str:
    p = finite_number(value)
    return "not known" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def parts_table(changes: HeldoutChanges, sides: Sides) -> Tree:
    """All tasks and each level, then what else sets tasks apart."""
    first, second = name_sides(sides)
    columns = [("", "wide"), (first, ""), (second, ""), ("Change", ""), ("p", "num")]

    def table(chosen: Sequence[PartChange], label: str) -> Tree:
        return parts.data_table(columns, [_part_row(part, sides) for part in chosen], label, head="Tasks")

    by_property: dict[str, list[PartChange]] = {}
    for part in changes.parts[1:]:
        by_property.setdefault(part.key.partition("=")[0], []).append(part)
    first_property, *others = [*by_property] or [""]
    number = len(changes.parts)
    note = f"p-values are not corrected for the number of rows ({number})."
    return h(
        "div",
        table([*changes.parts[:1], *by_property.get(first_property, [])], f"Held-out pass rate {first_property}"),
        [h("details", h("summary", f"By {name}: {len(by_property[name])}"), table(by_property[name], f"By {name}"))
         for name in others],
        h("p", note, class_="dim after") if number > 2 else None,
    )  # fmt: skip


def _part_row(part: PartChange, sides: Sides) -> list[Child]:
    compared = part.compared
    before, after = (as_mapping(compared[side]["pass@1"]) for side in STAGES)
    rates = [finite_number(side.get("value")) for side in (before, after)]
    drawn = parts.span(*rates, is_change=True) if None not in rates else None  # type: ignore[arg-type]
    link = h("a", part.key.replace("=", " ", 1), href=tasks_address(sides, kind=part.key)) if part.key else None
    name = h("span", link or h("b", "all"), h("small", f" {compared['tasks']:,} tasks"))
    return [name, drawn, estimate(before, "pass@1"),
            estimate(after, "pass@1"), format_change(compared["change"]), format_p(compared["p_value"])]  # fmt: skip


def task_tables(changes: HeldoutChanges, sides: Sides, prompts: Mapping[str, str]) -> Tree | None:
    """The tasks that fell most and those that rose most, beside each other."""
    fell, rose, same = changes.count()
    if not changes.tasks:
        return None
    (one, _), (other, _) = sides
    title, words = "Held-out tasks that changed", ("Fell", "Rose")
    if one != other:
        title, words = "Held-out tasks that differ", (f"Worse under {other}", f"Better under {other}")
    tables = [
        h("section", h("h3", f"{label}: {number:,} of {len(changes.tasks):,} tasks"),
          task_table(changes.select(order)[: min(FEW, number)], sides, label, prompts) if number
          else h("p", "none", class_="dim"),
          h("p", h("a", f"All {number:,}", href=tasks_address(sides, order=order))) if number > FEW else None,
          class_="stack tight")
        for order, label, number in (("fell", words[0], fell), ("rose", words[1], rose))
    ]  # fmt: skip
    note = f"{same:,} are equal. One task alone says little: completions are drawn at random."
    return h(
        "section", h("h2", title), h("div", tables, class_="grid2"),
        h("p", note, " ", h("a", "All tasks", href=tasks_address(sides)), class_="dim after"), class_="panel",
    )  # fmt: skip


def task_table(
    tasks: Sequence[TaskChange], sides: Sides, label: str, prompts: Mapping[str, str], has_kinds: bool = False
) -> Tree:
    first, second = name_sides(sides)
    rows: list[list[Child]] = []
    for task in tasks:
        rates = [passed / judged for passed, judged in (task.before, task.after)]
        counts = [f"{passed} of {judged}" for passed, judged in (task.before, task.after)]
        text = prompts.get(task.id, "")
        text = "" if task.id in text else text  # the name says it already
        name = h("span", h("a", task.id, href=task_address(sides, task.id), class_="mono"),
                 h("small", text, class_="clip") if text else None, class_="stack tight")  # fmt: skip
        kinds = [h("small", ", ".join(kind.replace("=", " ", 1) for kind in sorted(task.kinds)))] if has_kinds else []
        rows.append(
            [
                name,
                *kinds,
                parts.span(rates[0], rates[1], is_change=True),
                counts[0],
                counts[1],
                f"{100 * task.change:+.0f}",
            ]
        )
    columns = [("Kind", "wide")] if has_kinds else []
    columns += [("", "wide"), (first, "num"), (second, "num"), ("Points", "num")]
    return parts.data_table(columns, rows, label, head="Task", class_="data short")
