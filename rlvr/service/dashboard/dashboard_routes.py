"""The pages in NiceGUI: a URL is rendered as an element tree, which goes to the browser, and again when it changes.

The only file that imports NiceGUI; `dashboard_app` imports it for the first page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from nicegui import app, ui
from nicegui.element import Element

from rlvr.service.dashboard.dashboard_data import OWNER, SOURCE, Source
from rlvr.service.dashboard.element_tree import Page, Tree, h
from rlvr.service.dashboard.pages.compare_page import compare
from rlvr.service.dashboard.pages.curve_file import curve_file
from rlvr.service.dashboard.pages.hacks_page import hacks
from rlvr.service.dashboard.pages.heldout_pages import task_page, tasks_page
from rlvr.service.dashboard.pages.machines_page import machines
from rlvr.service.dashboard.pages.page_parts import frame_page, not_found_page
from rlvr.service.dashboard.pages.rollout_page import rollout
from rlvr.service.dashboard.pages.rollouts_page import rollouts
from rlvr.service.dashboard.pages.sessions_page import sessions_page
from rlvr.service.dashboard.pages.strategies_page import strategies_page
from rlvr.service.dashboard.pages.study_page import study_page
from rlvr.service.dashboard.pages.work_pages import overview, work_page

LOGGER = logging.getLogger("rlvr")
REFRESH_S = 2.0  # between two checks for changes
SLOWEST_S = 30.0  # that a page may take: NiceGUI then answers 500
DATA_S = 20.0  # that the data of a page may take: a database that is locked or frozen takes longer
LONGEST = 2000  # characters of a parameter in an address
View = Callable[[Source, Mapping[str, str]], Page]

app.add_static_files("/ui/assets", Path(__file__).parent / "assets")
ui.add_head_html('<link rel="stylesheet" href="/ui/assets/style.css">', shared=True)


class TreeElement(Element, component="assets/tree.js", esm={"rlvr-dashboard": "assets"}):
    """A tree in the browser; a button calls `act` with its action."""

    def __init__(self, tree: Tree, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self._props["tree"] = tree
        self.on("act", act)

    def show(self, tree: Tree) -> None:
        if tree != self._props["tree"]:
            self._props["tree"] = tree
            self.update()


class OpenPage:
    """One open page: what it shows, and whether that changed. `page` and `refresh` block and are called in threads."""

    def __init__(self, source: Source, view: View, parameters: dict[str, str]) -> None:
        self.source, self.view, self.parameters = source, view, parameters
        self._seen: object = None
        self._failed = False

    def page(self) -> Page:
        """Make the page. An error of its source is shown on the page and logged once."""
        try:
            page = self.view(self.source, self.parameters)
        except Exception as error:
            if not self._failed:
                LOGGER.exception("the dashboard cannot make a page")
            self._failed, self._seen = True, None
            return self._not_available(f"({type(error).__name__}); the log says why")
        self._failed = False
        return page

    async def wait_for_page(self) -> Page:
        """The page; where its data does not come in time, one that says so. The thread that reads it goes on."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self.page), DATA_S)
        except TimeoutError:
            return self._not_available(f"(no data within {DATA_S:g} s); the database is locked, or does not answer")

    def _not_available(self, why: str) -> Page:
        note = h(
            "p", f"This page cannot be shown now {why}. It retries by itself.", class_="note problem", role="alert"
        )
        return frame_page(self.source, "Not available", "", note, status=503)

    def refresh(self) -> Page | None:
        """The page if something changed since the last call, or if it cannot be shown; else None."""
        try:
            now = self.source.revision()
        except Exception:  # the page itself says what is wrong
            return self.page()
        if now == self._seen:
            return None
        self._seen = now
        return self.page()


async def _serve_page(request: Request, view: View) -> None:
    """Draw a page, and keep it up to date while it is open."""
    source: Source = request.scope[SOURCE]
    parameters = {name: value[:LONGEST] for name, value in {**request.query_params, **request.path_params}.items()}
    parameters.pop("notice", None)
    current = OpenPage(source, view, parameters)

    async def refresh() -> None:
        if (page := await asyncio.to_thread(current.refresh)) is not None:
            element.show(page.main)

    async def act(event: Any) -> None:
        given = event.args if isinstance(event.args, dict) else {}
        if given.get("name") == "rate" and source.can_rate:
            parameters["notice"] = await asyncio.to_thread(
                store_rating, source, parameters, request.scope[OWNER], given.get("value")
            )
            element.show((await asyncio.to_thread(current.page)).main)

    page = await current.wait_for_page()
    if page.status != 200:
        ui.status_code(page.status)
    ui.page_title(page.title)
    element = TreeElement(page.main, act)
    ui.timer(REFRESH_S, refresh)


def store_rating(source: Source, parameters: Mapping[str, str], owner: str, value: object) -> str:
    """Store a rating; return the text to show."""
    try:
        rating = float(str(value))
        if not 0.0 <= rating <= 1.0:
            raise ValueError(f"a rating is from 0 to 1, not {rating}")
        source.rate(parameters.get("key", ""), owner, rating)
    except ValueError as error:
        return f"Not saved: {str(error)[:200]}"
    except Exception:
        LOGGER.exception("the dashboard could not store a rating")
        return "Not saved: the log says why"
    return f"Saved: {rating:g}"


def _unknown(source: Source, parameters: Mapping[str, str]) -> Page:
    return not_found_page(source, "page", f"/ui/{parameters['address']}")


@app.get("/ui/curves.csv")
async def serve_curves(request: Request) -> Response:
    """The numbers of a chart as a file."""
    source: Source = request.scope[SOURCE]
    parameters = {name: value[:LONGEST] for name, value in request.query_params.items()}
    try:
        found = await asyncio.wait_for(asyncio.to_thread(curve_file, source, parameters), DATA_S)
    except TimeoutError:
        return Response(f"no data within {DATA_S:g} s\n", 503, media_type="text/plain")
    if found is None:
        return Response("there is no such chart\n", 404, media_type="text/plain")
    name, text = found
    return Response(text, media_type="text/csv", headers={"content-disposition": f'attachment; filename="{name}"'})


PAGES: dict[str, View] = {
    "/": overview,
    "/ui/run/{work:path}": work_page,
    "/ui/session/{work:path}": work_page,
    "/ui/rollout/{work:path}": work_page,
    "/ui/trajectories": rollouts,
    "/ui/trajectory/{key:path}": rollout,
    "/ui/hacks": hacks,
    "/ui/compare": compare,
    "/ui/sessions": sessions_page,
    "/ui/strategies": strategies_page,
    "/ui/machines": machines,
    "/ui/tasks": tasks_page,
    "/ui/task": task_page,
    "/ui/study/{study:path}": study_page,
    "/ui/{address:path}": _unknown,  # the last: NiceGUI's own page for unknown addresses needs eval
}


def _register(path: str, view: View) -> None:
    @ui.page(path, response_timeout=SLOWEST_S)
    async def serve(request: Request) -> None:
        await _serve_page(request, view)


for _path, _view in PAGES.items():
    _register(_path, _view)
