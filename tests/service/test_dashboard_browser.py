"""The dashboard in a real browser: pages, filters, keyboard, a rating, both themes, a phone, and a hostile answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from rlvr.store import Session, Status, open_store
from tests.kit.dashboard_fixtures import (
    EVIL,
    Browser,
    add_conversations,
    add_step,
    browser_context,  # noqa: F401 (a fixture)
    browser_page,  # noqa: F401 (a fixture)
    cut_elements,
    experience,
    fill_store,
    make_run,
    running,
)

pytestmark = pytest.mark.slow
PHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1366, "height": 768}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs; a test may add steps to `live`."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", steps=8)
    make_run(folder / "live")
    make_run(folder / "agent", steps=1)
    add_conversations(folder / "agent", 0)
    return folder


@pytest.fixture(scope="module")
def viewer(context: Any, run: Path) -> Iterator[str]:
    with running("-m", "rlvr.cli.main", "view", str(run), "--port", "0", cwd=run) as base:
        yield base


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "store.sqlite"
    store = fill_store(f"sqlite:///{path}")
    store.add_session(Session("d", "task_d", "A prompt. " * 30, status=Status.DONE, created=50))
    store.add_experiences([experience("d", number, action="explain_first") for number in range(1, 8)])
    store.close()
    return path


@pytest.fixture(scope="module")
def service(context: Any, database: Path) -> Iterator[str]:
    """An application with routes of its own, a store's dashboard and API keys, like the service."""
    with running(__file__, str(database), cwd=database.parent) as base:
        yield base


def test_from_the_overview_to_a_filtered_table_to_one_answer(viewer: str, browser: Browser):
    page = browser.open(viewer)
    assert page.locator(".work").count() == 3 and page.locator("svg").count() == 2
    page.click("nav >> text=Rollouts")
    page.wait_for_selector(".groups > li")
    assert page.locator(".groups > li").count() == 25
    page.click("summary:has-text('More filters')")
    page.select_option("select[name=outcome]", "failed")
    page.fill("input[name=from]", "3")
    page.fill("input[name=to]", "3")
    page.select_option("select[name=show]", "single")
    page.click("button:has-text('Show')")
    page.wait_for_selector("tbody tr:nth-child(4):last-child")
    assert "outcome=failed" in page.url and "from=3" in page.url
    browser.open(page.url)  # the address holds the whole state: another user sees the same
    assert page.locator("tbody tr").count() == 4 and page.input_value("select[name=outcome]") == "failed"
    page.locator("tbody tr").first.click()
    page.wait_for_selector(".tokens")
    assert "/ui/trajectory/" in page.url and page.locator(".verdict").inner_text().startswith("exact")
    shades = page.eval_on_selector_all(".tokens > span", "all => all.map(e => getComputedStyle(e).backgroundColor)")
    assert len(set(shades)) > 2
    browser.wait_until_idle(viewer)


def test_a_search_is_read_through_by_keys(viewer: str, browser: Browser):
    """From the search over an opened group to its completions, one after the other, and back; in a field keys write."""
    page = browser.open(f"{viewer}/ui/trajectories?work=first")
    page.fill("input[name=q]", "WINDOW.hacked = 1'>`${")
    page.keyboard.press("Enter")
    page.wait_for_selector("mark")
    assert page.locator(".groups > li").count() == 8 == page.locator("details[open] tbody tr").count()
    assert page.locator("mark").first.inner_text() == "window.hacked = 1'>`${"
    page.locator("input[name=q]").press("j")
    assert "/ui/trajectories" in page.url and "j" in page.input_value("input[name=q]")
    page.locator(".row-link").first.click()
    page.wait_for_selector("text=1 of 8 in this list")
    for key, place in (("j", 2), ("ArrowRight", 3), ("k", 2), ("ArrowLeft", 1)):
        page.wait_for_load_state()  # its script listens for keys from then on
        page.keyboard.press(key)
        page.wait_for_selector(f"text={place} of 8 in this list")
    page.focus(".text-block")
    page.keyboard.press("ArrowRight")  # which scrolls the text
    page.wait_for_timeout(200)
    assert page.locator("text=1 of 8 in this list").count() == 1
    page.click("text=Back to the list")
    page.wait_for_selector("mark")
    browser.wait_until_idle(viewer)


def test_a_group_opens_in_place_and_a_column_sorts(viewer: str, browser: Browser):
    page = browser.open(f"{viewer}/ui/trajectories?work=first")
    assert not page.locator(".groups table").first.is_visible()
    page.focus(".groups summary")
    page.keyboard.press("Enter")
    page.locator(".groups table").first.wait_for()
    assert page.locator(".groups li:first-child tbody tr").count() == 2
    page = browser.open(f"{viewer}/ui/trajectories?work=first&show=single")
    page.click("th >> text=Reward")
    page.wait_for_selector("th[aria-sort=descending]")
    assert "sort=reward" in page.url and page.locator("tbody td.num").first.inner_text() == "1.000"
    page.click("th >> text=Reward")
    page.wait_for_selector("th[aria-sort=ascending]")
    assert page.locator("tbody td.num").first.inner_text() == "0.000"
    browser.wait_until_idle(viewer)


def test_a_rollout_has_its_parts_side_by_side_or_stacked(viewer: str, browser: Browser):
    def places() -> list[dict[str, float]]:
        page = browser.open(f"{viewer}/ui/trajectory/first:1:3")
        return [page.locator(".beside > *").nth(part).bounding_box() for part in range(3)]

    browser.page.set_viewport_size({"width": 1280, "height": 800})
    prompt, completion, verdicts = places()
    assert prompt["y"] == completion["y"] == verdicts["y"]
    assert prompt["x"] + prompt["width"] < completion["x"] and completion["x"] + completion["width"] < verdicts["x"]
    assert verdicts["x"] + verdicts["width"] <= 1280
    browser.page.set_viewport_size(PHONE)
    prompt, completion, verdicts = places()
    assert prompt["x"] == completion["x"] == verdicts["x"]
    assert prompt["y"] + prompt["height"] <= completion["y"] < verdicts["y"]
    browser.wait_until_idle(viewer)


def test_model_output_does_nothing(viewer: str, browser: Browser):
    page = browser.open(f"{viewer}/ui/trajectory/first:1:3")
    page.get_by_text("As plain text").click()
    assert EVIL.split("\u202e")[0] in page.locator("details .text-block").inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('#main img, #main script').length") == 0
    browser.wait_until_idle(viewer)


def test_the_page_refuses_added_scripts(viewer: str, browser: Browser):
    """The policy holds even where an element could be injected: no inline script, no handler, no other site."""
    page = browser.open(viewer)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 1\">')")
    page.evaluate("""const s = document.createElement('script'); s.textContent = 'window.hacked = 2';
        document.body.append(s); fetch('http://127.0.0.1:9/').catch(() => {})""")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    said = " ".join(browser.problems)
    assert "script-src" in said and "connect-src" in said


def test_a_run_is_live_and_focus_stays_where_it_is(viewer: str, run: Path, browser: Browser):
    page = browser.open(f"{viewer}/ui/run/live")
    assert "step 4 of 10" in page.locator(".head").first.inner_text()
    page.focus("#main a")
    before = page.evaluate("document.activeElement.outerHTML")
    add_step(run / "live", 4)
    page.locator(".head", has_text="step 5 of 10").wait_for(timeout=15_000)
    assert page.evaluate("document.activeElement.outerHTML") == before
    browser.wait_until_idle(viewer)


def test_what_is_open_and_typed_stays_when_more_arrives(viewer: str, run: Path, browser: Browser):
    """An opened group goes down the list with what is in it, below the new one; a field keeps what it has."""
    page = browser.open(f"{viewer}/ui/trajectories?work=live")
    page.locator(".groups summary").first.click()
    opened = page.locator(".groups details[open] .group-line").inner_text()
    page.fill("input[name=q]", "half a w")
    steps = len(list((run / "live" / "rollouts").iterdir()))
    before = page.locator(".groups > li").count()
    add_step(run / "live", steps)
    page.locator(f".groups > li >> nth={before}").wait_for(timeout=15_000)
    assert page.locator(".groups details[open] .group-line").inner_text() == opened
    assert page.locator(".groups > li").first.locator("details[open]").count() == 0
    assert page.input_value("input[name=q]") == "half a w"
    assert page.evaluate("document.activeElement.name") == "q"
    browser.wait_until_idle(viewer)


def test_a_server_stops_at_once_though_pages_are_open(run: Path):
    """A stream that is open would keep it waiting until it is cut off, which is logged."""
    with running("-m", "rlvr.cli.main", "view", str(run), "--port", "0", cwd=run) as base:
        streams = [urlopen(f"{base}/ui/events?seen=older", timeout=20) for _ in range(3)]
        for stream in streams:
            assert [stream.readline().split(b":")[0] for _ in range(3)] == [b"retry", b"\n", b"data"]
    for stream in streams:
        assert stream.read() == b"\n"


def test_everything_is_reachable_by_keyboard(viewer: str, browser: Browser):
    """Tab shows where it is; the first link skips the menu, Enter on a row opens it, arrows read a chart."""
    page = browser.open(f"{viewer}/ui/trajectories?outcome=passed")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Skip to content"
    page.keyboard.press("Enter")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('row-link')"):
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_selector(".tokens")
    page = browser.open(f"{viewer}/ui/run/first")
    page.locator("svg").first.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator(".legend .place").first.inner_text() == "step 1"
    assert "30.0 %" in page.locator(".legend").first.inner_text()
    browser.wait_until_idle(viewer)


def test_a_branch_is_chosen_and_its_conversation_shown(viewer: str, browser: Browser):
    page = browser.open(f"{viewer}/ui/trajectory/agent:0:4")
    assert page.locator(".branches a[aria-current]").inner_text() == "Yes, it rains."
    assert "weather" in page.locator(".message .call").inner_text()
    first, second = (page.locator(".branches li").nth(place).bounding_box()["x"] for place in (0, 1))
    assert second > first + 10, "a branch is indented behind the one that it left"
    page.click(".branches a:has-text('No rain.')")
    page.wait_for_selector(".message.shared")
    assert "agent%3A0%3A6" in page.url or "agent:0:6" in page.url
    assert page.locator(".message.trained").inner_text().endswith("No rain.")
    assert page.evaluate("window.hacked") is None
    browser.wait_until_idle(viewer)


PATHS = [
    "/",
    "/ui/run/first",
    "/ui/trajectories",
    "/ui/trajectory/first:1:3",
    "/ui/trajectory/agent:0:6",
    "/ui/trajectories?q=hacked",
    "/ui/trajectories?show=single&sort=reward&group=1%2F1",
    "/ui/hacks",
    "/ui/compare",
    "/ui/machines",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_page_fits_a_phone_and_follows_the_theme(viewer: str, browser: Browser, path: str):
    backgrounds = set()
    for scheme in ("light", "dark"):
        browser.page.emulate_media(color_scheme=scheme)
        for size in (PHONE, LAPTOP):
            browser.page.set_viewport_size(size)
            page = browser.open(viewer + path)
            page.wait_for_timeout(100)
            assert cut_elements(page) == []
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    browser.wait_until_idle(viewer)


def test_a_loaded_page_does_not_shift(viewer: str, browser: Browser):
    page = browser.page
    page.add_init_script("""window.moved = 0; new PerformanceObserver(list => list.getEntries().forEach(
        entry => { if (!entry.hadRecentInput) window.moved += entry.value; }
    )).observe({type: 'layout-shift', buffered: true})""")
    browser.open(f"{viewer}/ui/run/first").wait_for_timeout(3000)
    assert page.evaluate("window.moved") < 0.1  # "good" by the web vitals


def test_a_rating_is_stored(service: str, database: Path, browser: Browser):
    """The dashboard asks for the key once, and then shows the requested page."""
    page = browser.page
    page.goto(f"{service}/ui/trajectory/2")
    page.fill("#key", "tml-wrong-key")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert]")
    page.fill("#key", "tml-right-key")
    page.keyboard.press("Enter")
    page.wait_for_selector(".verdict")
    assert page.url == f"{service}/ui/trajectory/2"
    page.click("button:has-text('0.75')")
    page.wait_for_selector("text=Saved: 0.75")
    store = open_store(f"sqlite:///{database}")
    found = store.experience(2)
    store.close()
    assert found is not None and (found.rating, found.ratings) == (0.75, 1)
    browser.open(f"{service}/ui/trajectory/2")
    assert "Rated 0.75" in page.locator("#main").inner_text()
    page.keyboard.press("1")
    page.wait_for_selector("text=Saved: 0")
    assert page.evaluate("document.cookie") == ""  # no script reads it
    assert page.goto(f"{service}/health").text() == '"fine"'
    assert page.goto(f"{service}/unknown").status == 404
    browser.problems = [said for said in browser.problems if "401" not in said and "404" not in said]
    browser.wait_until_idle(service)


def test_sessions_are_filtered_by_status_and_compared(service: str, browser: Browser):
    page = browser.page
    sign_in(page, service)
    page.wait_for_selector(".rows")
    assert page.locator(".badge.live").inner_text() == "running"
    page = browser.open(f"{service}/ui/trajectories?status=failed&sort=reward")
    assert page.locator("tbody tr").count() == 1 and page.locator("input[name=q]").count() == 0
    page = browser.open(f"{service}/ui/compare?work=a&a=1&b=2")
    assert "iteration 1" in page.locator("#main").inner_text()
    for nowhere in ("session/nothing", "studies", "run"):
        page = browser.open(f"{service}/ui/{nowhere}")
        assert "Not found" in page.locator("h1").inner_text()


def test_columns_of_sessions_are_chosen_by_keyboard_and_a_row_opens(service: str, browser: Browser):
    page = browser.page
    sign_in(page, f"{service}/ui/sessions")
    page.focus("summary:has-text('Columns')")
    page.keyboard.press("Enter")
    page.focus("input[name=c-prompt]")
    page.keyboard.press("Space")
    page.focus("input[name=c-tokens]")
    page.keyboard.press("Space")
    page.keyboard.press("Enter")
    page.wait_for_url("**c-tokens=on**")
    heads = page.locator(".rows thead th").all_inner_texts()
    assert "Tokens" in heads and "Prompt" not in heads
    assert page.locator("input[name=c-tokens]").is_checked() and not page.locator("input[name=c-prompt]").is_checked()
    page.focus(".row-link >> nth=2")
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/session/a")
    browser.problems = [said for said in browser.problems if "401" not in said]
    browser.wait_until_idle(service)


@pytest.mark.parametrize(
    "path", ["/", "/ui/sessions", "/ui/strategies", "/ui/machines", "/ui/session/a", "/ui/trajectory/2"]
)
def test_a_page_of_the_service_fits_a_phone(service: str, browser: Browser, path: str):
    page = browser.page
    sign_in(page, service + path)
    for size in (PHONE, LAPTOP):
        page.set_viewport_size(size)
        page.wait_for_timeout(100)
        assert cut_elements(page) == []
    assert page.locator("h1").count() == 1 and page.locator("main").count() == 1


def sign_in(page: Any, address: str) -> None:
    page.goto(address)
    if page.locator("#key").count():
        page.fill("#key", "tml-right-key")
        page.keyboard.press("Enter")
    page.wait_for_selector("#main")


def serve_store(database: str) -> None:
    from fastapi import FastAPI

    from rlvr.service.dashboard.dashboard_app import attach
    from rlvr.service.dashboard.session_source import StoreSource
    from rlvr.web.server import bind_socket, run_server, server_url

    app = FastAPI(docs_url=None)

    @app.get("/health")
    def health() -> str:
        return "fine"

    keys = {"tml-right-key": "owner-1"}
    source = StoreSource(open_store(f"sqlite:///{database}"))
    dashboard = attach(app, source, owner_of=keys.get, loopback_only=False)
    with bind_socket("127.0.0.1", 0) as listening:
        begun = partial(print, f"listening at {server_url(listening)}", flush=True)
        run_server(app, listening, on_ready=begun, on_stop=dashboard.stop, timeout_graceful_shutdown=2)


if __name__ == "__main__":
    serve_store(sys.argv[1])
