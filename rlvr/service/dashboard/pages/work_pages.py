"""The overview of all runs or sessions, and the page of one: its state, numbers and curves."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import PAGE, Source
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.curve_parts import link_files
from rlvr.service.dashboard.pages.rollouts_page import latest_rollouts
from rlvr.service.dashboard.pages.run_page import run_page
from rlvr.service.dashboard.pages.sessions_page import DEFAULT, session_table
from rlvr.service.dashboard.pages.study_page import list_studies, study_page
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.session_source import StoreSource

NEWEST = 10  # sessions on the first page; the page Sessions has all


def overview(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    offset = (parts.page_number(parameters) - 1) * PAGE
    works, total = source.works(offset)
    if isinstance(source, RunSource):
        if total == 1 and works and not source.studies():  # `rlvr view` of one run
            return run_page(source, {**parameters, "work": works[0].id}, "Overview")
        if len(source.studies()) == 1 and not source.studies()[0].prefix:  # of the folder of a study
            return study_page(source, {**parameters, "study": source.studies()[0].name}, "Overview")
    table = None
    if works and isinstance(source, StoreSource):
        table = session_table(source, source.sessions("", "", "", 0, NEWEST)[0], DEFAULT)
    count = f"{total:,} {source.noun}{'' if total == 1 else 's'}"
    if isinstance(source, RunSource) and (number := len(source.studies())):
        count += f" and {number:,} stud{'y' if number == 1 else 'ies'}"
    data = {
        "works": works, "count": count, "table": table,
        "health": source.health(), "charts": link_files(source.charts(), "/"),
        "studies": list_studies(source) if isinstance(source, RunSource) else [],
        "has_list": bool(works) or not isinstance(source, RunSource),
        "pager": None if table else parts.make_pager("/", {}, offset, len(works), total, parts.NEWEST_FIRST),
        "total": total,
    }  # fmt: skip
    return parts.Page(source, "Overview", "overview.html", data, "Overview")


def work_page(source: Source, parameters: Mapping[str, str], here: str = "") -> parts.Page:
    if isinstance(source, RunSource):
        return run_page(source, parameters, here)
    name = parameters.get("work", "")
    work = source.work(name)
    if work is None:
        return parts.not_found_page(source, source.noun, name)
    data = {
        "work": work, "notes": source.notes(name), "texts": source.texts(name), "latest": latest_rollouts(source, name),
        "charts": link_files(source.charts(name), parts.work_path(source, name)),
    }  # fmt: skip
    return parts.Page(source, work.name, "work.html", data, here)
