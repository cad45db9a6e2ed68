"""What works: runs or a service by their parts, how busy each is, and what it waits for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import Cell, MachineGroup, MachinePart, Source, Table
from rlvr.service.dashboard.pages import page_parts as parts

PATH = "/ui/machines"


def machines_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    if not source.has_machines:
        return parts.not_found_page(source, "page", PATH)
    groups = [(group, _table(group) if group.parts else None) for group in source.machines()]
    return parts.Page(source, "Machines", "machines.html", {"groups": groups, "load": _load()}, "Machines")


def _table(group: MachineGroup) -> Table:
    columns = [("Busy", "wide"), ("", "num"), ("What it did", ""), ("Waits for", "")]
    return Table(columns, [_part(one) for one in group.parts], group.name, "Part")


def _part(part: MachinePart) -> list[Cell | str]:
    share = "not measured" if part.busy is None else f"{100 * part.busy:.0f} %"
    bar = "" if part.busy is None else Cell(span=(0.0, part.busy))
    return [part.name, bar, share, part.did, part.waits or "–"]


def _load() -> dict[str, str]:
    load = " / ".join(f"{one:.1f}" for one in os.getloadavg()) if hasattr(os, "getloadavg") else "not known"
    return {"cores": str(os.cpu_count() or "not known"), "processes that run or wait, 1 / 5 / 15 min": load}
