"""The pages as trees of elements: what is on them, and that nothing in them can act in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from dashboard_parts import EVIL, fill_store, make_run

import rlvr.service.dashboard
from rlvr.service.dashboard.data import Entry, Piece, Source, visible
from rlvr.service.dashboard.pages.compare import compare, paired
from rlvr.service.dashboard.pages.overview import overview
from rlvr.service.dashboard.pages.parts import address
from rlvr.service.dashboard.pages.table import query_of, trajectories
from rlvr.service.dashboard.pages.trajectory import chance, shaded, trajectory
from rlvr.service.dashboard.pages.work import work_page
from rlvr.service.dashboard.runs import RunSource
from rlvr.service.dashboard.sessions import StoreSource
from rlvr.service.dashboard.tree import h, texts

ASSETS = Path(rlvr.service.dashboard.__file__).parent / "assets"
VIEWS = {"overview": overview, "work": work_page, "table": trajectories, "one": trajectory, "compare": compare}


@pytest.fixture
def runs(tmp_path: Path) -> RunSource:
    make_run(tmp_path / "runs" / "first")
    make_run(tmp_path / "runs" / "second", steps=2)
    return RunSource(tmp_path / "runs")


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[StoreSource]:
    store = fill_store(f"sqlite:///{tmp_path}/store.sqlite")
    yield StoreSource(store, health=lambda: {"state": "ready", "name": "model", "detail": ""})
    store.close()


@pytest.fixture(params=["runs", "sessions"])
def source(request: pytest.FixtureRequest) -> Source:
    return request.getfixturevalue(request.param)


def asked(source: Source, view: str) -> dict[str, str]:
    if source.noun == "run":
        return {"one": {"key": "first:1:3"}, "work": {"work": "first", "metric": "grad_norm"}}.get(view, {})
    return {"one": {"key": "4"}, "work": {"work": "b"}, "compare": {"work": "a"}}.get(view, {})


def elements(tree: Any) -> Iterator[list[Any]]:
    if isinstance(tree, list):
        yield tree
        for child in tree[2:]:
            yield from elements(child)


@pytest.mark.parametrize("view", VIEWS)
def test_every_element_of_a_page_is_one_that_the_browser_draws(source: Source, view: str):
    """`tree.js` leaves out tags and attributes that it does not know: a page that uses one would lack something."""
    script = (ASSETS / "tree.js").read_text(encoding="utf-8")
    lists = re.findall(r"const (TAGS|ATTRIBUTES) = new Set\(\s*\((.*?)\)\.split", script, re.S)
    known = {name: set(" ".join(re.findall(r'"([^"]*)"', words)).split()) for name, words in lists}
    page = VIEWS[view](source, asked(source, view))
    assert page.status == 200 and page.title.endswith(" - rlvr")
    for tag, given, *_ in elements(page.main):
        if tag.startswith("x-"):
            continue
        assert tag in known["TAGS"], tag
        free = {name for name in given if name.startswith(("aria-", "data-")) or name in ("href", "act")}
        assert given.keys() - free <= known["ATTRIBUTES"], (tag, given)
        assert all(isinstance(value, str) for value in given.values()), (tag, given)
        assert given.get("href", "/").startswith(("/", "#"))


@pytest.mark.parametrize("view", ["one", "table"])
def test_what_a_model_wrote_is_text_and_nothing_in_it_is_invisible(source: Source, view: str):
    page = VIEWS[view](source, asked(source, view))
    shown = " ".join(texts(page.main))
    assert "<script>window.hacked" in shown and "\\u202eevil\\x07" in shown
    assert "\u202e" not in repr(page.main) and "\x07" not in shown


def test_a_page_says_what_its_work_is_about(runs: RunSource, sessions: StoreSource):
    run = " ".join(texts(work_page(runs, {"work": "first"}).main))
    assert "first writing training step 4 of 10" in run and "pass rate 50.0%" in run and "All 16 trajectories" in run
    session = " ".join(texts(work_page(sessions, {"work": "b"}).main))
    assert "endpoint_unreachable no answer after 5 tries" in session
    assert "Context Python Best answer def f(): return 1" in " ".join(texts(work_page(sessions, {"work": "a"}).main))


def test_the_trajectory_has_verdicts_numbers_and_its_group(runs: RunSource):
    shown = " ".join(texts(trajectory(runs, {"key": "first:1:2"}).main))
    for part in ("exact failed 0.000 wrong_value boxed 1.000", "advantage -0.500", "group 1/1", "sampled by policy@1",
                 "The same group : 1 more".replace(" :", ":")):  # fmt: skip
        assert part in shown


@pytest.mark.parametrize(
    ("view", "given"),
    [("work", {"work": "nope"}), ("one", {"key": "nope"}), ("compare", {"work": "nope"}), ("work", {}), ("one", {})],
)
def test_an_address_that_names_nothing_is_a_404_that_says_so(source: Source, view: str, given: Mapping[str, str]):
    page = VIEWS[view](source, given)
    assert page.status == 404 and "Not found" in texts(page.main)


def test_an_address_carries_the_filters_and_the_pages_keep_them(runs: RunSource):
    page = trajectories(runs, {"outcome": "failed", "step": "1", "task": "sum-0", "work": "first"})
    fields = {given["name"]: given.get("value") for _, given, *_ in elements(page.main) if given.get("name")}
    assert fields == {"outcome": "failed", "task": "sum-0", "step": "1", "status": "", "work": "first"}
    assert "1 match" in texts(page.main)
    first = make_links(trajectories(runs, {"page": "1", "status": ""}))
    assert not any("page=" in link for link in first)  # 24 answers fit on one


def make_links(page: Any) -> list[str]:
    return [given["href"] for _, given, *_ in elements(page.main) if "href" in given]


def test_pages_lead_on_and_back(tmp_path: Path):
    source = RunSource(make_run(tmp_path / "long", steps=20))
    second = make_links(trajectories(source, {"outcome": "passed", "page": "2"}))
    assert "/ui/trajectories?outcome=passed" in second
    first = make_links(trajectories(source, {"outcome": "passed"}))
    assert "/ui/trajectories?outcome=passed&page=2" in first
    beyond = " ".join(texts(trajectories(source, {"page": "999"}).main))
    assert "page 999 is beyond the end" in beyond


@pytest.mark.parametrize("step", ["x", "-1", "1.5", "9" * 30])
def test_a_step_that_is_no_number_is_no_condition(step: str):
    query = query_of({"step": step, "page": step})
    assert (query.step, query.offset) == (None, 0)


def test_one_run_is_its_own_overview(tmp_path: Path):
    page = overview(RunSource(make_run(tmp_path / "only")), {})
    assert page.title == "only - rlvr" and "Latest trajectories" in texts(page.main)


def test_two_steps_are_compared_by_numbers_and_by_the_same_tasks(runs: RunSource):
    page = compare(runs, {"work": "first", "a": "0", "b": "3"})
    rows = [texts(node) for node in elements(page.main) if node[0] == "tr"]
    assert ["reward", "0.3", "0.6", "+0.3"] in rows
    assert ["grad_norm", "0.5", "0.5", "+0"] in rows


def test_pairs_put_the_same_task_side_by_side_first():
    def entry(key: str, task: str) -> Entry:
        return Entry(key, "run", task, 0, "passed", "stop", 1.0, 0.0, 1, "", "")

    left = [entry("1", "a"), entry("2", "a"), entry("3", "b")]
    right = [entry("4", "c"), entry("5", "b"), entry("6", "d")]
    found = [(a and a.key, b and b.key) for a, b in paired(left, right)]
    assert found == [("3", "5"), ("1", "4"), (None, "6")]


def test_the_shade_of_a_token_grows_as_it_gets_less_likely():
    """None where the policy was certain, full from 4 nats on; never more."""

    def shade(logprob: float) -> float:
        style = shaded(Piece("a", logprob, "1"))[1].get("style", "--a: 0")
        return float(style.split()[1])

    assert [shade(x) for x in (0.0, -1.0, -4.0, -400.0, 0.5)] == [0, 0.38, 0.75, 0.75, 0]
    assert [chance(x) for x in (0.0, -0.6931, -4.6052, -20)] == ["100 %", "50 %", "1 %", "2.1e-07 %"]


def test_line_breaks_stay_line_breaks_between_shaded_tokens():
    assert "".join(texts(shaded(Piece("a\n\nb", -1.0, "1")))) == "a⏎\n⏎\nb"


def test_an_address_leaves_out_what_says_nothing():
    assert address("/x", a="", b=None, c=0, d="ä &") == "/x?c=0&d=%C3%A4+%26"


def test_children_are_spliced_and_nothing_is_left_out():
    assert h("p", "a", None, [h("b", "c"), None, "d"], class_="e", aria_label=None) == [
        "p", {"class": "e"}, "a", ["b", {}, "c"], "d",
    ]  # fmt: skip
    assert visible(EVIL).count("<") == EVIL.count("<")
