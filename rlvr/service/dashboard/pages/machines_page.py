"""What works: runs or a service by their parts, how busy each is, and what it waits for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import MachineGroup, MachinePart, Source
from rlvr.service.dashboard.element_tree import Child, Page, Tree, h
from rlvr.service.dashboard.pages import page_parts as parts

PATH = "/ui/machines"


def machines(source: Source, parameters: Mapping[str, str]) -> Page:
    if not source.has_machines:
        return parts.not_found_page(source, "page", PATH)
    groups = source.machines()
    return parts.frame_page(
        source, "Machines", "Machines",
        h("div", h("h1", "Machines"), h("p", "What is busy, and what waits for what.", class_="dim"), class_="head"),
        [_group(source, one) for one in groups]
        or [h("p", f"No {source.noun} has measured a step yet.", class_="panel empty")],
        h("section", h("h2", "The machine of this dashboard"), parts.figures(_load()), class_="panel"),
    )  # fmt: skip


def _group(source: Source, group: MachineGroup) -> Tree:
    name = h("a", group.name, href=parts.work_address(source, group.work)) if group.work else group.name
    columns = [("Busy", "wide"), ("", "num"), ("What it did", ""), ("Waits for", "")]
    table = parts.data_table(columns, [_part(one) for one in group.parts], group.name, head="Part")
    return h(
        "section",
        h("div", h("h2", name), parts.badge(group.status, group.status in ("running", "writing")), class_="head"),
        h("p", group.about, class_="lead"), table if group.parts else None, class_="panel stack tight",
    )  # fmt: skip


def _part(part: MachinePart) -> list[Child]:
    share = "not measured" if part.busy is None else f"{100 * part.busy:.0f} %"
    bar = None if part.busy is None else parts.span(0.0, part.busy)
    return [part.name, bar, share, part.did, part.waits or "–"]


def _load() -> dict[str, str]:
    load = " / ".join(f"{one:.1f}" for one in os.getloadavg()) if hasattr(os, "getloadavg") else "not known"
    return {"cores": str(os.cpu_count() or "not known"), "processes that run or wait, 1 / 5 / 15 min": load}
