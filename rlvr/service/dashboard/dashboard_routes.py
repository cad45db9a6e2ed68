"""The addresses of the dashboard: pages, ratings, the numbers behind charts, events of changes, and assets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rlvr.service.dashboard.dashboard_data import OWNER, Source, visible_text
from rlvr.service.dashboard.page_changes import PageChanges
from rlvr.service.dashboard.page_templates import render_page
from rlvr.service.dashboard.pages.compare_page import compare_page
from rlvr.service.dashboard.pages.curve_file import curve_file
from rlvr.service.dashboard.pages.curve_parts import CSV
from rlvr.service.dashboard.pages.hacks_page import hacks_page
from rlvr.service.dashboard.pages.heldout_pages import task_page, tasks_page
from rlvr.service.dashboard.pages.machines_page import machines_page
from rlvr.service.dashboard.pages.page_parts import Page, not_found_page
from rlvr.service.dashboard.pages.rollout_page import rollout_page
from rlvr.service.dashboard.pages.rollouts_page import rollouts_page
from rlvr.service.dashboard.pages.sessions_page import sessions_page
from rlvr.service.dashboard.pages.strategies_page import strategies_page
from rlvr.service.dashboard.pages.study_page import study_page
from rlvr.service.dashboard.pages.work_pages import overview, work_page
from rlvr.service.dashboard.sign_in import read_form

LOGGER = logging.getLogger("rlvr")
DATA_S = 20.0  # that the data of a page may take: a database that is locked or frozen takes longer
LONGEST = 2000  # characters of a parameter in an address
View = Callable[[Source, Mapping[str, str]], Page]
RATED = "/ui/trajectory/{key:path}"


def _unknown(source: Source, parameters: Mapping[str, str]) -> Page:
    return not_found_page(source, "page", f"/ui/{parameters.get('address', '')}")


PAGES: dict[str, View] = {
    "/": overview,
    "/ui/run/{work:path}": work_page,
    "/ui/session/{work:path}": work_page,
    "/ui/rollout/{work:path}": work_page,
    "/ui/trajectories": rollouts_page,
    RATED: rollout_page,
    "/ui/hacks": hacks_page,
    "/ui/compare": compare_page,
    "/ui/sessions": sessions_page,
    "/ui/strategies": strategies_page,
    "/ui/machines": machines_page,
    "/ui/tasks": tasks_page,
    "/ui/task": task_page,
    "/ui/study/{study:path}": study_page,
    "/ui": _unknown,
    "/ui/{address:path}": _unknown,
}


class PageMaker:
    """Makes the pages of a source as HTML. `make` blocks and is called in threads."""

    def __init__(self, source: Source, changes: PageChanges) -> None:
        self.source, self.changes = source, changes
        self._failing = set[View]()

    def make(self, view: View, parameters: Mapping[str, str]) -> tuple[str, int]:
        """A page and its status. An error of the source is shown on the page, and logged when it begins."""
        seen = self.changes.read()
        try:
            page = view(self.source, parameters)
            text = render_page(page, seen)
        except Exception as error:
            if view not in self._failing:
                LOGGER.exception("the dashboard cannot make a page")
            self._failing.add(view)
            return self._say_why(f"({type(error).__name__}); the log says why")
        self._failing.discard(view)
        return text, page.status

    async def wait(self, view: View, parameters: Mapping[str, str]) -> tuple[str, int]:
        """The page; where its data does not come in time, one that says so. The thread that reads it goes on."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self.make, view, parameters), DATA_S)
        except TimeoutError:
            return self._say_why(f"(no data within {DATA_S:g} s); the database or the disk does not answer")

    def _say_why(self, why: str) -> tuple[str, int]:
        text = f"This page cannot be shown now {why}. It retries by itself."
        page = Page(self.source, "Not available", "message.html", {"text": text, "class_": "note problem"}, status=503)
        return render_page(page), page.status


def create_pages(source: Source, changes: PageChanges) -> Starlette:
    maker = PageMaker(source, changes)

    def serve(view: View) -> Callable[[Request], object]:
        async def respond(request: Request) -> Response:
            parameters = read_parameters({**request.query_params, **request.path_params})
            parameters.pop("notice", None)
            if request.method == "POST":
                rating = (await read_form(request)).get("rating", "")
                owner = request.scope[OWNER]
                parameters["notice"] = await asyncio.to_thread(store_rating, source, parameters, owner, rating)
            return HTMLResponse(*await maker.wait(view, parameters))

        return respond

    async def send_curves(request: Request) -> Response:
        """The numbers of a chart as a file."""
        parameters = read_parameters(request.query_params)
        try:
            found = await asyncio.wait_for(asyncio.to_thread(curve_file, source, parameters), DATA_S)
        except TimeoutError:
            return PlainTextResponse(f"no data within {DATA_S:g} s\n", 503)
        if found is None:
            return PlainTextResponse("there is no such chart\n", 404)
        name, text = found
        return Response(text, media_type="text/csv", headers={"content-disposition": f'attachment; filename="{name}"'})

    async def send_events(request: Request) -> Response:
        stream = changes.stream(request.query_params.get("seen", ""))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # which a proxy reads
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    return Starlette(
        routes=[
            Mount("/ui/assets", StaticFiles(directory=Path(__file__).parent / "assets")),
            Route(CSV, send_curves),
            Route("/ui/events", send_events),
            *(Route(path, serve(view), methods=["GET", "POST"] if path == RATED and source.can_rate else ["GET"])
              for path, view in PAGES.items()),
        ]
    )  # fmt: skip


def read_parameters(given: Mapping[str, str]) -> dict[str, str]:
    """The parameters of an address, which pages show again."""
    return {name: visible_text(value[:LONGEST], LONGEST) for name, value in given.items()}


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
