"""The pages as HTML: their content, and that nothing in them can act in a browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from rlvr.service.dashboard.dashboard_data import AnswerRow, Source, TokenPiece, TokenView
from rlvr.service.dashboard.pages.compare_page import compare_page, pair_answers
from rlvr.service.dashboard.pages.curve_file import curve_file
from rlvr.service.dashboard.pages.machines_page import machines_page
from rlvr.service.dashboard.pages.page_parts import address
from rlvr.service.dashboard.pages.rollout_page import format_probability, rollout_page, shade
from rlvr.service.dashboard.pages.rollouts_page import rollouts_page
from rlvr.service.dashboard.pages.sessions_page import sessions_page
from rlvr.service.dashboard.pages.strategies_page import strategies_page
from rlvr.service.dashboard.pages.work_pages import overview, work_page
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.session_source import StoreSource
from rlvr.store import Session, Status
from rlvr.training.rollout_rows import trajectory_row
from tests.kit.dashboard_fixtures import answer, experience, fill_store, make_run
from tests.kit.dashboard_html import elements, find, links, read_main, read_words, texts

SERVED = {"sessions": sessions_page, "strategies": strategies_page}  # pages of a service alone
VIEWS = {
    "overview": overview, "work": work_page, "table": rollouts_page, "one": rollout_page, "compare": compare_page,
    "machines": machines_page, **SERVED,
}  # fmt: skip


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


def parameters_of(source: Source, view: str) -> dict[str, str]:
    if source.noun == "run":
        return {"one": {"key": "first:1:3"}, "work": {"work": "first", "metric": "grad_norm"}}.get(view, {})
    return {"one": {"key": "4"}, "work": {"work": "b"}, "compare": {"work": "a"}}.get(view, {})


# What a page is made of. None of it loads anything, and none has a handler or a style of its own.
TAGS = {
    "a", "article", "b", "button", "datalist", "dd", "details", "div", "dl", "dt", "figcaption", "figure", "form", "h1",
    "h2", "h3", "i", "input", "kbd", "label", "li", "main", "mark", "nav", "ol", "option", "p", "pre", "progress",
    "section", "select", "small", "span", "summary", "table", "tbody", "td", "th", "thead", "time", "tr", "ul",
    "svg", "line", "rect", "circle",
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_in_a_page_loads_or_runs_anything(source: Source, view: str):
    page = VIEWS[view](source, parameters_of(source, view))
    assert page.status == (404 if view in SERVED and source.noun == "run" else 200)
    for tag, given, *_ in elements(read_main(page)):
        assert tag in TAGS, tag
        assert not {name for name in given if name == "style" or name.startswith("on")}, given
        assert given.get("href", "/").startswith(("/", "#")) and given.get("action", "/").startswith("/")
        assert "src" not in given


def test_every_chart_has_its_numbers_as_a_file(runs: RunSource, sessions: StoreSource):
    """On a page of runs and of a service; of what is drawn from points alone, these."""
    for source, view, work in ((runs, overview, ""), (runs, work_page, "first"), (sessions, work_page, "a")):
        charts = [*find(read_main(view(source, {"work": work})), "figure")]
        assert len(charts) >= 2
        for chart in charts:
            [address] = [node[1]["href"] for node in find(chart, "a")]
            found = curve_file(source, dict(parse_qsl(urlsplit(address).query)))
            assert found is not None and found[1].count("\n") > 2
    reward = curve_file(sessions, {"page": "/ui/session/a", "title": "Reward"})
    assert reward == ("reward.csv", "iteration,answer\n1,0.5\n2,1.0\n")
    assert curve_file(sessions, {"page": "/ui/run/a", "title": "Reward"}) is None


@pytest.mark.parametrize("view", ["one", "table"])
def test_model_output_is_text_with_invisible_characters_escaped(source: Source, view: str):
    page = VIEWS[view](source, parameters_of(source, view))
    shown = read_words(page)
    assert "<script>window.hacked" in shown and "\\u202eevil\\x07" in shown
    assert "\u202e" not in str(read_main(page)) and "\x07" not in shown


def test_a_page_describes_its_work(runs: RunSource, sessions: StoreSource):
    run = read_words(work_page(runs, {"work": "first"}))
    assert (
        "first writing training step 4 of 10" in run
        and "pass rate, training 50.0 %" in run
        and "All 16 rollouts" in run
    )
    session = read_words(work_page(sessions, {"work": "b"}))
    assert "endpoint_unreachable no answer after 5 tries" in session
    assert "Context Python Best answer def f(): return 1" in read_words(work_page(sessions, {"work": "a"}))


def test_tokens_are_a_table_too(runs: RunSource):
    shown = read_words(rollout_page(runs, {"key": "first:1:2"}))
    assert "Place Text Token Log-prob, nats Probability 1 '=' 0 -0.100 90 % 2 '1' 1 -2.000 14 %" in shown


def test_the_trajectory_has_verdicts_numbers_and_its_group(runs: RunSource):
    shown = read_words(rollout_page(runs, {"key": "first:1:2"}))
    for part in ("exact failed 0.000 wrong_value boxed 1.000", "advantage -0.500", "group 1/1", "sampled by policy@1",
                 "The same group: 1 more"):  # fmt: skip
        assert part in shown


@pytest.mark.parametrize(
    ("view", "given"),
    [("work", {"work": "nope"}), ("one", {"key": "nope"}), ("compare", {"work": "nope"}), ("work", {}), ("one", {})],
)
def test_an_unknown_address_is_a_404_page(source: Source, view: str, given: Mapping[str, str]):
    page = VIEWS[view](source, given)
    assert page.status == 404 and "Not found" in texts(read_main(page))


def test_the_address_has_the_filters_and_pages_keep_them(runs: RunSource):
    page = rollouts_page(runs, {"outcome": "failed", "step": "1", "task": "sum-0", "work": "first"})
    fields = {given["name"]: given.get("value") for _, given, *_ in elements(read_main(page)) if given.get("name")}
    set_ones = {name: value for name, value in fields.items() if value}
    assert set_ones == {"outcome": "failed", "task": "sum-0", "from": "1", "to": "1", "work": "first"}
    assert "1 rollout in 1 group match" in texts(read_main(page))
    first = links(rollouts_page(runs, {"page": "1", "status": ""}))
    assert not any("page=" in link for link in first)  # 12 groups fit on one


def test_pages_link_to_the_next_and_the_previous(tmp_path: Path):
    source = RunSource(make_run(tmp_path / "long", steps=20))
    second = links(rollouts_page(source, {"outcome": "passed", "page": "2"}))
    assert "/ui/trajectories?outcome=passed" in second
    first = links(rollouts_page(source, {"outcome": "passed"}))
    assert "/ui/trajectories?outcome=passed&page=2" in first
    beyond = read_words(rollouts_page(source, {"page": "999"}))
    assert "page 999 is beyond the end" in beyond


def test_one_run_is_its_own_overview(tmp_path: Path):
    page = overview(RunSource(make_run(tmp_path / "only")), {})
    assert page.title == "only" and "Latest rollouts" in texts(read_main(page))


def test_two_steps_are_compared_by_numbers_and_by_the_same_tasks(runs: RunSource):
    page = compare_page(runs, {"work": "first", "a": "0", "b": "3"})
    rows = [texts(node) for node in find(read_main(page), "tr")]
    assert ["reward", "0.3", "0.6", "+0.3"] in rows
    assert ["grad_norm", "0.5", "0.5", "+0"] in rows


def test_only_answers_to_the_same_task_by_the_same_verifiers_are_paired():
    def entry(key: str, task: str, *verifiers: str) -> AnswerRow:
        return AnswerRow(key, "run", task, 0, "passed", "stop", 1.0, 0.0, 1, "", "", verifiers=verifiers)

    left = [entry("1", "a"), entry("2", "a"), entry("3", "b", "code"), entry("4", "c", "code"), entry("5", "")]
    right = [entry("6", "d"), entry("7", "b", "code"), entry("8", "c", "draft"), entry("9", "")]
    found = [(a and a.key, b and b.key) for a, b in pair_answers(left, right)]
    alone = [("1", None), ("4", None), ("5", None), (None, "6"), (None, "8"), (None, "9")]
    assert found == [("3", "7"), *alone]


def test_compare_says_which_answers_it_cannot_compare(tmp_path: Path):
    store = fill_store(f"sqlite:///{tmp_path}/store.sqlite")
    store.add_session(Session("r", "", "", kind="run", name="mine", status=Status.DONE, iterations=3))
    judged = {"exact": {"value": 1.0, "outcome": "passed"}}
    places = [(1, 0, "x"), (1, 1, "y"), (2, 0, "x"), (2, 1, "z"), (3, 0, "w")]
    store.add_experiences(
        [experience("r", at, sample=i, task_id=task, step=at - 1, scores=judged) for at, i, task in places]
    )

    def shown(a: int, b: int) -> str:
        return read_words(compare_page(StoreSource(store), {"work": "r", "a": str(a), "b": str(b)}))

    assert "2 of 3 cannot be compared and stand alone" in shown(1, 2)
    assert "Nothing can be compared" in shown(1, 3) and "numbers above are of different tasks" in shown(1, 3)
    assert "compared" not in shown(1, 1)
    store.close()


def test_a_session_that_nothing_verified_or_that_failed_its_tests_is_not_green(tmp_path: Path):
    store = fill_store(f"sqlite:///{tmp_path}/store.sqlite")
    warned = {"warnings": ["unverified: why"], "derived_tests": ["assert f(2) == 3"], "expected_answer": "7"}
    for name, confidence, metrics in (("null", None, warned), ("zero", 0.0, {}), ("solved", 1.0, {})):
        given: dict[str, Any] = {"final_confidence": confidence, "metrics": metrics, "created": 500}
        store.add_session(Session(name, f"task_{name}", "Write f.", status=Status.DONE, **given))
    draft = {"draft": {"value": 1.0, "outcome": "passed"}}
    outcomes = (("null", None, "unverified"), ("zero", 0.0, "passed"), ("solved", 1.0, "passed"))
    ids = store.add_experiences(
        [experience(name, 1, confidence=c, outcome=outcome, scores=draft) for name, c, outcome in outcomes]
    )
    source = StoreSource(store)

    def badges(view: Any, **parameters: str) -> list[tuple[str, str]]:
        page = view(source, parameters)
        found = [node for node in elements(read_main(page)) if "badge" in node[1].get("class", "")]
        return [(node[1]["class"].removeprefix("badge "), texts(node)[0]) for node in found]

    for name, id, word in (("null", ids[0], "unverified"), ("zero", ids[1], "not solved")):
        on_pages = badges(work_page, work=name) + badges(rollout_page, key=str(id))
        assert on_pages[0][1] == word and "good" not in {kind for kind, _ in on_pages}, on_pages
    assert badges(work_page, work="solved") == [("good", "solved"), ("good", "passed")]
    assert "good" in {kind for kind, _ in badges(rollout_page, key=str(ids[2]))}
    listed = dict((word, kind) for kind, word in badges(overview))
    assert (listed["unverified"], listed["not solved"], listed["solved"]) == ("warn", "bad", "good")
    session = read_words(work_page(source, {"work": "null"}))
    assert "unverified: why" in session and "Tests from examples in the prompt assert f(2) == 3" in session
    answer = rollout_page(source, {"key": str(ids[0])})
    beside = next(node for node in elements(read_main(answer)) if node[1].get("class") == "beside")
    assert [texts(node)[0] for node in beside[2:]] == ["Prompt", "Completion", "Compared with"]
    assert "Expected answer 7" in " ".join(texts(beside))
    store.close()


def test_less_likely_tokens_are_shaded_darker():
    """None where the policy was certain, full from 4 nats on; never more."""

    assert [shade(x) for x in (0.0, -1.0, -4.0, -400.0, 0.5)] == [0, 8, 15, 15, 0]
    assert [format_probability(x) for x in (0.0, -0.6931, -4.6052, -20)] == ["100 %", "50 %", "1 %", "2.1e-07 %"]


def test_line_breaks_stay_line_breaks_between_shaded_tokens(runs: RunSource):
    """Those at the beginning, too, of which a browser drops one in the source of a page."""
    page = rollout_page(runs, {"key": "first:1:3"})
    pieces = [TokenPiece("\n\na\n", -1.0, "1"), TokenPiece("<b>&", 0.0, "2"), TokenPiece("\nc", -1.0, "3", 0, False)]
    detail = replace(page.data["detail"], tokens=TokenView(pieces), answer="\n\ttext\n")
    main = read_main(replace(page, data={**page.data, "detail": detail}))
    tokens, plain = [node for node in find(main, "pre") if node[1]["class"].startswith("text-block")][1:3]
    assert "".join(texts(tokens)) == "⏎\n⏎\na⏎\n<b>&\nc" and "".join(texts(plain)) == "\n\ttext\n"
    assert [node[1]["class"] for node in tokens[2:]] == ["a8", "a0", "given"]


def test_a_long_line_and_odd_characters_stay_text(runs: RunSource, tmp_path: Path):
    """A megabyte of one line, closing tags, NUL, and marks that turn the writing direction."""
    odd = "</pre></section></main><!-- \x00 \u202e --><svg onload=alert(1)>&lt;{{ 7 * 7 }}{% raw %}" + "a" * 1_000_000
    made = replace(answer(9, 1), response=odd, prompt=odd, rollout_id=odd)
    (tmp_path / "runs" / "first" / "rollouts" / "rl-000009.jsonl").write_text(trajectory_row(made))
    for page in (
        rollout_page(runs, {"key": "first:9:0"}),
        rollouts_page(runs, {"step": "9"}),
        rollouts_page(runs, {"q": "svg onload"}),
    ):
        main = read_main(page)
        shown = str(main)
        assert page.status == 200 and "svg onload=alert(1)>&lt;{{ 7 * 7 }}" in shown and "49" not in texts(main)
        assert {"\x00", "\u202e"}.isdisjoint(shown) and len(shown) < 200_000
        assert not any("onload" in given for _, given, *_ in elements(main))


def test_an_address_omits_empty_parameters():
    assert address("/x", a="", b=None, c=0, d="ä &") == "/x?c=0&d=%C3%A4+%26"
