"""The sessions of a service as a table with columns to choose. The address has the columns, filters and order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlvr.service.dashboard.dashboard_data import PAGE, Cell, Source, Table, as_list, finite_number, one_line
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.session_rows import RESULTS, SESSION_SORTS, Rows
from rlvr.service.dashboard.session_source import StoreSource, as_work
from rlvr.store import Session

PATH = "/ui/sessions"
Write = Callable[[Session, Rows], Cell | str]


@dataclass(frozen=True)
class Column:
    """A column of the table. `sort` is its key in `SESSION_SORTS`."""

    label: str
    cell: Write
    kind: str = ""
    sort: str = ""


def _span(first: float | None, last: float | None) -> str:
    return "–" if first is None or last is None else f"{max(0.0, last - first):.1f}"


def _metric(name: str) -> Write:
    return lambda session, steps: parts.format_number(finite_number(session.metrics.get(name)))


def _strategies(session: Session, steps: Rows) -> Cell | str:
    return " → ".join(one_line(step["action"], 40) or "–" for step in steps) or "–"


def _describe_learning(session: Session, steps: Rows) -> Cell | str:
    """The advantages that were counted, each with the strategy that wrote the prompt."""
    counted = [
        f"{one_line(step['action'], 40) or 'answer'} {step['advantage']:+.2f}"
        for step in steps
        if step["advantage"] is not None
    ]
    return ", ".join(counted) or Cell("nothing", class_="dim")


def _result(session: Session, steps: Rows) -> Cell | str:
    work = as_work(session)
    return Cell(badge=work.result or work.status, is_live=work.live)


COLUMNS = {
    "result": Column("Result", _result),
    "prompt": Column("Prompt", lambda session, steps: Cell(one_line(session.prompt), class_="clip"), "wide"),
    "iterations": Column("Iterations", lambda session, steps: f"{session.iterations:,}", "num", "iterations"),
    "confidence": Column("Confidence", lambda session, steps: parts.format_number(session.final_confidence, 2), "num",
                         "confidence"),
    "reward": Column("Mean reward", _metric("average_reward"), "num"),
    "seconds": Column("Seconds", lambda session, steps: _span(session.started, session.finished), "num", "seconds"),
    "waited": Column("Waited, s", lambda session, steps: _span(session.created, session.started), "num", "waited"),
    "strategies": Column("Strategies", _strategies, "mono wide"),
    "learned": Column("Learned: advantage", _describe_learning, "mono wide"),
    "tokens": Column("Tokens", lambda session, steps: f"{sum(step['num_tokens'] or 0 for step in steps):,}", "num"),
    "loss": Column("Loss", _metric("training_loss"), "num"),
    "verifiers": Column("Verified by", lambda session, steps: ", ".join(
        one_line(name, 40) for name in as_list(session.metrics.get("verified_by"))) or "–"),
    "kind": Column("Kind", lambda session, steps: one_line(session.kind, 20)),
    "instance": Column("Process", lambda session, steps: one_line(session.instance, 40) or "–"),
    "created": Column("Asked", lambda session, steps: Cell(at=session.created), "num", "created"),
}  # fmt: skip
DEFAULT = ("result", "prompt", "iterations", "confidence", "seconds", "strategies", "created")


def sessions_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    if not isinstance(source, StoreSource):
        return parts.not_found_page(source, "page", PATH)
    given = {name: value for name in ("result", "task", "sort") if (value := parameters.get(name, "").strip())}
    chosen = [name for name in COLUMNS if parameters.get(f"c-{name}")]
    columns = {f"c-{name}": "on" for name in chosen}
    offset = (parts.page_number(parameters) - 1) * PAGE
    sort = given.get("sort", "")
    found, total = source.sessions(given.get("result", ""), given.get("task", ""), sort, offset)

    def sort_link(name: str, key: str) -> Cell:
        mark = {key: " ↓", f"-{key}": " ↑"}.get(sort, "")
        query = {**given, **columns, "sort": f"-{key}" if sort == key else key}
        return Cell(f"{name}{mark}", parts.address(PATH, **query))

    links = {one.label: sort_link(one.label, one.sort) for one in COLUMNS.values() if one.sort}
    orders = {key: label for name in SESSION_SORTS for key, label in (
        (name, f"{name}, most first"), (f"-{name}", f"{name}, least first"))}  # fmt: skip
    data = {
        "said": f"{total:,} match" if given.keys() - {"sort"} else f"{total:,}", "given": given, "orders": orders,
        "results": [*RESULTS], "columns": COLUMNS, "chosen": chosen or DEFAULT,
        "table": session_table(source, found, chosen or DEFAULT, links) if found else None,
        "pager": parts.make_pager(PATH, {**given, **columns}, offset, len(found), total, ("Previous", "Next")),
    }  # fmt: skip
    return parts.Page(source, "Sessions", "sessions.html", data, "Sessions")


def session_table(
    source: StoreSource, found: Sequence[Session], chosen: Sequence[str], links: Mapping[str, Cell] | None = None
) -> Table:
    """Sessions as rows; the link of the first cell covers the row."""
    steps = source.steps_of(found)
    columns = [COLUMNS[name] for name in chosen]
    rows: list[list[Cell | str]] = [
        [Cell(one_line(session.name or session.task_id, 60) or session.id[:8], parts.work_address(source, session.id),
              "row-link"),
         *(column.cell(session, steps.get(session.id, ())) for column in columns)]
        for session in found
    ]  # fmt: skip
    return Table([(one.label, one.kind) for one in columns], rows, "Sessions", "Task", "data short rows", links or {})
