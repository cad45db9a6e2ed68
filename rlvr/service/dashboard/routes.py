"""The pages as NiceGUI's: an address becomes a tree, the tree is sent to the browser, and again when it changes.

The only file that imports NiceGUI; the first page that somebody asks for imports it (`mount`).
Exercised by tests/test_dashboard_browser.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import Request
from nicegui import app, ui
from nicegui.element import Element

from rlvr.service.dashboard.data import Source
from rlvr.service.dashboard.mount import KEY, OWNER
from rlvr.service.dashboard.pages.compare import compare
from rlvr.service.dashboard.pages.overview import overview
from rlvr.service.dashboard.pages.parts import framed, missing
from rlvr.service.dashboard.pages.table import trajectories
from rlvr.service.dashboard.pages.trajectory import trajectory
from rlvr.service.dashboard.pages.work import work_page
from rlvr.service.dashboard.tree import Page, Tree, h

LOGGER = logging.getLogger("rlvr")
LIVE = 2.0  # seconds between two looks for something new
SLOWEST = 30.0  # seconds that a page may take
LONGEST = 2000  # characters of what an address says
View = Callable[[Source, Mapping[str, str]], Page]

app.add_static_files("/ui/assets", Path(__file__).parent / "assets")
ui.add_head_html('<link rel="stylesheet" href="/ui/assets/style.css">', shared=True)


class Drawn(Element, component="assets/tree.js", esm={"rlvr-dashboard": "assets"}):
    """A tree in the browser; `act` is called with what a button says."""

    def __init__(self, tree: Tree, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self._props["tree"] = tree
        self.on("act", act)

    def show(self, tree: Tree) -> None:
        if tree != self._props["tree"]:
            self._props["tree"] = tree
            self.update()


class Looking:
    """One page that somebody looks at: what it shows, and whether there is something new. Blocks; called in threads."""

    def __init__(self, source: Source, view: View, asked: dict[str, str]) -> None:
        self.source, self.view, self.asked = source, view, asked
        self._seen: object = None
        self._failed = False

    def page(self) -> Page:
        """Whatever its source raises is said on the page, and logged once: a page is not worth the service."""
        try:
            made = self.view(self.source, self.asked)
        except Exception as error:
            if not self._failed:
                LOGGER.exception("the dashboard cannot make a page")
            self._failed, self._seen = True, None
            told = (
                f"This page cannot be shown now ({type(error).__name__}); the log says why. It tries again by itself."
            )
            note = h("p", told, class_="note problem", role="alert")
            return framed(self.source, "Not available", "", note, status=503)
        self._failed = False
        return made

    def news(self) -> Page | None:
        """The page again, where something changed since it was last asked for; always while it cannot be shown."""
        try:
            now = self.source.revision()
        except Exception:  # the page itself says what is wrong
            return self.page()
        if now == self._seen:
            return None
        self._seen = now
        return self.page()


async def _shown(request: Request, view: View, **named: str) -> None:
    """Draw a page, and keep it true while somebody looks at it."""
    source: Source = request.scope[KEY].source
    asked = {name: value[:LONGEST] for name, value in (*request.query_params.items(), *named.items())}
    asked.pop("said", None)
    looking = Looking(source, view, asked)

    async def refresh() -> None:
        if (page := await asyncio.to_thread(looking.news)) is not None:
            drawn.show(page.main)

    async def act(event: Any) -> None:
        given = event.args if isinstance(event.args, dict) else {}
        if given.get("name") == "rate" and source.can_rate:
            asked["said"] = await asyncio.to_thread(rated, source, asked, request.scope[OWNER], given.get("value"))
            drawn.show((await asyncio.to_thread(looking.page)).main)

    page = await asyncio.to_thread(looking.page)
    if page.status != 200:
        ui.status_code(page.status)
    ui.page_title(page.title)
    drawn = Drawn(page.main, act)
    ui.timer(LIVE, refresh)


def rated(source: Source, asked: Mapping[str, str], owner: str, value: object) -> str:
    """Store a rating; what to tell the person."""
    try:
        rating = float(str(value))
        if not 0.0 <= rating <= 1.0:
            raise ValueError(f"a rating is from 0 to 1, not {rating}")
        source.rate(asked.get("key", ""), owner, rating)
    except ValueError as error:
        return f"Not saved: {str(error)[:200]}"
    except Exception:
        LOGGER.exception("the dashboard could not store a rating")
        return "Not saved: the log says why"
    return f"Saved: {rating:g}"


@ui.page("/", response_timeout=SLOWEST)
async def _overview(request: Request) -> None:
    await _shown(request, overview)


@ui.page("/ui/run/{work:path}", response_timeout=SLOWEST)
async def _run(request: Request, work: str) -> None:
    await _shown(request, work_page, work=work)


@ui.page("/ui/session/{work:path}", response_timeout=SLOWEST)
async def _session(request: Request, work: str) -> None:
    await _shown(request, work_page, work=work)


@ui.page("/ui/trajectories", response_timeout=SLOWEST)
async def _trajectories(request: Request) -> None:
    await _shown(request, trajectories)


@ui.page("/ui/trajectory/{key:path}", response_timeout=SLOWEST)
async def _trajectory(request: Request, key: str) -> None:
    await _shown(request, trajectory, key=key)


@ui.page("/ui/compare", response_timeout=SLOWEST)
async def _compare(request: Request) -> None:
    await _shown(request, compare)


@ui.page("/ui/{address:path}", response_timeout=SLOWEST)  # the last one: NiceGUI's own page of this needs eval
async def _unknown(request: Request, address: str) -> None:
    await _shown(request, lambda source, asked: missing(source, "page", f"/ui/{address}"))
