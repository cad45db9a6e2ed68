"""The pages of runs in a real browser: three questions from the first page, charts, files, keyboard, phone, themes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import pytest

from tests.kit.dashboard_fixtures import (
    Browser,
    add_evaluations,
    add_step,
    browser_context,  # noqa: F401 (a fixture)
    browser_page,  # noqa: F401 (a fixture)
    cut_elements,
    make_run,
    metric_row,
    running,
)
from tests.kit.study_runs import make_study

pytestmark = pytest.mark.slow
BEFORE = {f"{level}-{name}": 2 for level in (1, 2) for name in "abcdefghij"}
AFTER = {**BEFORE, "1-a": 0, "1-b": 1, **{f"2-{name}": 4 for name in "abcdefgh"}}
SIDES = f"a={quote('first@baseline')}&b={quote('first@final')}"
PATHS = [
    "/",
    "/ui/run/first",
    "/ui/run/first?smooth=5&log=y&from=2&to=20&metric=grad_norm",
    f"/ui/tasks?{SIDES}",
    f"/ui/task?{SIDES}&task=1-a",
    "/ui/compare",
    "/ui/study/sizes",
    "/ui/run/sizes%2Fgroup_size-2_seed-1",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two measured runs, one that trains, and a study."""
    folder = tmp_path_factory.mktemp("runs")
    make_study(folder, "sizes", "seeds=1..2", "training.group_size=2,4", "training.steps=3")
    for seed, name in enumerate(("second", "first"), 1):
        run = make_run(folder / name, steps=0)
        rows = [{**metric_row(step % 7), "step": step, "reward": 0.1 + step / 50} for step in range(30)]
        for step in (9, 19, 29):
            ends = {"/low": 0.3, "": 0.4, "/high": 0.5}
            rows[step] |= {f"test/env/all/correct{end}": value + step / 100 for end, value in ends.items()}
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "resolved.yaml").write_text(f"seed: {seed}\nenv: {{name: sums}}\ntraining: {{steps: 30}}\n")
        add_evaluations(run, BEFORE, AFTER if name == "first" else BEFORE)
    make_run(folder / "live")
    return folder


@pytest.fixture(scope="module")
def viewer(context: Any, runs: Path) -> Iterator[str]:
    with running("-m", "rlvr.cli.main", "view", str(runs), "--port", "0", cwd=runs) as base:
        yield base


def test_which_tasks_got_worst_in_two_clicks(viewer: str, browser: Browser):
    page = browser.open(viewer)
    page.click(".work a:text-is('first')")
    page.wait_for_selector("text=What was learned")
    assert "rose" in page.locator(".lead").inner_text()
    page.click("table[aria-label=Fell] a >> nth=0")
    page.wait_for_selector("article")
    assert "task=1-a" in page.url
    before, after = page.locator("section:has(> article)").all()
    assert "2 of 4 pass" in before.inner_text() and "0 of 4 pass" in after.inner_text()
    assert abs(before.bounding_box()["y"] - after.bounding_box()["y"]) < 2, "side by side"
    assert page.evaluate("window.hacked") is None
    page.click("a:text-is('Next task')")
    page.wait_for_url("**task=1-b")
    browser.wait_until_idle(viewer)


def test_why_two_seeds_differ_in_one_click(viewer: str, browser: Browser):
    page = browser.open(viewer)
    page.click("nav >> text=Compare")
    page.wait_for_selector("text=What differs")
    assert "Of the settings only the seed differs" in page.locator("#main").inner_text()
    page.select_option("select[name=a]", "second")
    page.select_option("select[name=b]", "first")
    page.click("button:text-is('Compare')")
    page.wait_for_url("**a=second&b=first")
    page.wait_for_selector("text=is higher under first")
    browser.open(page.url)  # the address has the choice
    assert page.locator("h1").inner_text() == "second and first"
    browser.wait_until_idle(viewer)


def test_a_drag_across_a_chart_opens_that_part(viewer: str, browser: Browser):
    page = browser.open(f"{viewer}/ui/run/first?smooth=5")
    page.locator(".chart svg").first.scroll_into_view_if_needed()
    box = page.locator(".chart svg").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.4, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile("from=.*&to="))
    assert "smooth=5" in page.url and page.url.endswith("#curves")
    page.wait_for_selector("a:text-is('All steps')")
    assert int(page.input_value("input[name=from]")) > 5 and int(page.input_value("input[name=to]")) < 28
    page.click("a:text-is('All steps')")
    page.wait_for_url("**/ui/run/first?smooth=5")
    browser.wait_until_idle(viewer)


def test_curves_are_chosen_and_read_by_keyboard_alone(viewer: str, browser: Browser):
    page = browser.open(f"{viewer}/ui/run/first")
    page.focus("input[name=from]")
    page.keyboard.type("10")
    page.keyboard.press("Tab")
    page.keyboard.type("20")
    page.keyboard.press("Enter")
    page.wait_for_url("**from=10&to=20")
    chart = page.locator("figure.chart", has_text="Pass rate").first
    chart.locator("svg").focus()
    page.keyboard.press("End")
    assert chart.locator(".place").inner_text() == "step 20"
    assert "49.0 % to 69.0 %" in chart.locator(".legend").inner_text().replace("\n", " ")
    label = chart.locator("svg").get_attribute("aria-label")
    assert "in % of completions" in label and "59.0 % (49.0 % to 69.0 %) at 20" in label
    assert chart.locator("text.unit").all_text_contents() == [
        "% of completions", "step of reinforcement learning",
    ]  # fmt: skip
    browser.wait_until_idle(viewer)


def test_a_smoothed_line_stands_before_the_raw_one(viewer: str, browser: Browser):
    page = browser.open(f"{viewer}/ui/run/first?smooth=5")
    chart = page.locator("figure.chart", has_text="Entropy").first
    assert chart.locator("path.raw").count() == 1 and chart.locator("path.line").count() == 1
    assert "means of 5 steps; pale: each step" in chart.inner_text()
    page = browser.open(f"{viewer}/ui/run/first?log=xy")
    assert "log scale" in page.locator("text.unit").first.text_content()
    browser.wait_until_idle(viewer)


def test_a_chart_is_saved_as_numbers_and_as_a_picture(viewer: str, browser: Browser):
    page = browser.open(f"{viewer}/ui/run/first?from=5")
    chart = page.locator("figure.chart", has_text="Reward").first
    with page.expect_download() as numbers:
        chart.locator("a:text-is('CSV')").click()
    assert numbers.value.suggested_filename == "reward.csv"
    lines = Path(numbers.value.path()).read_text().splitlines()
    assert lines[0].startswith("step,training") and lines[1].startswith("5,0.2")
    with page.expect_download() as picture:
        chart.locator("button:text-is('PNG')").click()
    content = Path(picture.value.path()).read_bytes()
    assert picture.value.suggested_filename == "reward.png"
    assert content.startswith(b"\x89PNG") and len(content) > 5_000
    with page.expect_download() as drawing:
        chart.locator("button:text-is('SVG')").click()
    root = ElementTree.fromstring(Path(drawing.value.path()).read_text())
    assert drawing.value.suggested_filename == "reward.svg"
    written = " ".join(text.strip() for text in root.itertext())
    assert "Reward" in written and "training" in written and "mean reward of a completion" in written
    assert all("class" not in one.attrib and "style" not in one.attrib for one in root.iter())
    browser.wait_until_idle(viewer)


def test_what_the_doctor_finds_appears_while_a_run_trains(viewer: str, runs: Path, browser: Browser):
    page = browser.open(f"{viewer}/ui/run/live")
    assert "half of" not in page.locator("#main").inner_text()
    with (runs / "live" / "metrics.jsonl").open("a") as file:
        for step in range(4, 16):
            file.write(json.dumps({**metric_row(0), "step": step, "completions/clipped_ratio": 0.9}) + "\n")
    add_step(runs / "live", 16)
    page.locator("section[aria-label=Findings]", has_text="ran out of tokens").wait_for(timeout=15_000)
    browser.wait_until_idle(viewer)


@pytest.mark.parametrize("path", PATHS)
def test_a_page_of_runs_fits_a_phone_and_has_its_landmarks(viewer: str, browser: Browser, path: str):
    """No element is cut at either width, in either theme; the first link skips the menu."""
    backgrounds = set[str]()
    for scheme in ("light", "dark"):
        browser.page.emulate_media(color_scheme=scheme)
        for width in (390, 1280):
            browser.page.set_viewport_size({"width": width, "height": 844})
            page = browser.open(viewer + path)
            page.wait_for_timeout(100)
            assert cut_elements(page) == []
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Skip to content"
    assert page.locator("main").count() == 1 and page.locator("header nav[aria-label=Main]").count() == 1
    assert page.locator("h1").count() == 1
    browser.wait_until_idle(viewer)
