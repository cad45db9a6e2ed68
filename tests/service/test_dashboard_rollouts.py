"""Rollouts as a table that is sorted, filtered and searched, one by one and by group, and what looks like a hack."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")

from rlvr.core.types import Outcome, Score, Task, Trajectory
from rlvr.service.dashboard.dashboard_data import Conditions, Query
from rlvr.service.dashboard.page_templates import render_page
from rlvr.service.dashboard.pages.hacks_page import hacks_page
from rlvr.service.dashboard.pages.page_parts import Page
from rlvr.service.dashboard.pages.rollout_page import rollout_page
from rlvr.service.dashboard.pages.rollouts_page import highlight, rollouts_page
from rlvr.service.dashboard.rollout_signs import find_number
from rlvr.service.dashboard.run_rollouts import RolloutReader
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.session_source import StoreSource
from rlvr.training.rollout_rows import trajectory_row
from tests.kit.dashboard_fixtures import EVIL, add_step, answer, fill_store, make_run
from tests.kit.dashboard_html import elements, read_main, read_words, texts

PASSED, FAILED = Score(1.0, Outcome.PASSED), Score(0.0, Outcome.FAILED, "wrong_value")


def completion(place: int, text: str = "", score: Score = FAILED, **more: Any) -> Trajectory:
    """A completion of the group `place // 4`, whose expected answer is 1000 and the number of the group."""
    group = place // 4
    expected = str(1000 + group)
    task = more.pop("task", Task(f"sum-{group}", "", {"answer": expected}, level=str(group % 2)))
    given: dict[str, Any] = {
        "prompt": f"Problem {group}?", "response": text or f"it is {expected}", "scores": {"exact": score},
        "task": task,
        "reward": score.value, "advantage": place / 10, "group_id": f"g{group}", "rollout_id": f"r{place}",
        "response_tokens": [1] * (place % 7 + 1), "logprobs": [-0.1 * place] * (place % 7 + 1), "action_mask": [],
        "attention_mask": [],
    }  # fmt: skip
    return replace(answer(1, 1), **(given | more))


def store(folder: Path, step: int, trajectories: list[Trajectory]) -> None:
    (folder / "rollouts" / f"rl-{step:06d}.jsonl").write_text("".join(map(trajectory_row, trajectories)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of eight completions in two groups; in each group the last two pass."""
    folder = make_run(tmp_path / "run", steps=0)
    for step in range(3):
        store(folder, step, [completion(place, score=PASSED if place % 4 > 1 else FAILED) for place in range(8)])
    return folder


def keys(source: RunSource, **asked: Any) -> list[str]:
    more = {name: asked.pop(name) for name in list(asked) if name in Conditions.__dataclass_fields__}
    page = source.answers(Query(**{"limit": 100, **asked}, more=Conditions(**more)))
    assert page.total >= len(page.rows)
    return [row.key.removeprefix("run:") for row in page.rows]


def test_rollouts_are_sorted_by_every_column_and_the_newest_break_ties(run: Path):
    store(run, 3, [completion(0, reward=None, logprobs=[], score=Score(None, Outcome.ERROR))])
    source = RunSource(run)
    assert keys(source)[:3] == ["3:0", "2:0", "2:1"]
    assert keys(source, sort="reward")[:3] == ["2:2", "2:3", "2:6"]
    assert keys(source, sort="-reward")[:2] == ["2:0", "2:1"]
    for sort in ("reward", "-reward", "logprob", "-logprob"):
        assert keys(source, sort=sort)[-1] == "3:0", "without a number it comes last"
    assert keys(source, sort="advantage")[0] == "2:7" and keys(source, sort="-advantage")[0] == "3:0"
    assert keys(source, sort="tokens")[0] == "2:6" and keys(source, sort="-tokens")[:2] == ["3:0", "2:0"]
    assert keys(source, sort="logprob")[0] == "2:0" and keys(source, sort="-logprob")[0] == "2:7"
    assert keys(source, sort="-step")[0] == "0:0"
    row = source.answers(Query(sort="tokens", limit=1)).rows[0]
    assert (row.tokens, row.level, row.logprob) == (7, "1", pytest.approx(-0.6))


def test_rollouts_are_filtered_by_all_that_a_row_has(run: Path):
    source = RunSource(run)
    assert len(keys(source, reason="wrong_value")) == 12 and keys(source, reason="wrong") == []
    assert keys(source, level="1", step=1) == ["1:4", "1:5", "1:6", "1:7"]
    assert {key[0] for key in keys(source, steps=(1, None))} == {"1", "2"}
    assert {key[0] for key in keys(source, steps=(None, 0))} == {"0"}
    assert len(keys(source, rewards=(0.5, 1.0))) == 12 == len(keys(source, rewards=(None, 0.5)))
    assert len(keys(source, task="um-1")) == 12 and keys(source, task="um_1") == []
    assert len(keys(source, group="g1")) == 12
    choices = source.choices("")
    assert (choices.reasons, choices.levels, choices.steps) == (["wrong_value"], ["0", "1"], (0, 2))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("= 42", 1), ("价格", 1), ("🦊", 1), ("格 = 4", 1), ("LET ME", 1), ("100%", 1), ("1%0", 0), ("a_b", 1),
        ("aXb", 0),
        ("_", 1), ("\\frac", 1), ('"quoted"', 1), ("NEAR(", 1), ("*", 1), ("-", 1), ("' OR 1=1 --", 0), ("[a-z]+", 1),
        ("\\u202e", 1), ("\u202e", 1), ("\\ud800", 1), ("\\x1b[31m", 1), ("x\\x00y", 1), ("wrong_value", 1),
        ("assert 1 == 2", 1), ("Problem 9", 1), ("nowhere", 0),
    ],
)  # fmt: skip
def test_a_search_finds_every_substring_and_knows_no_syntax(run: Path, text: str, found: int):
    """In the prompt, the completion, the reason and the details of a verdict; what is escaped, by its escape."""
    said = 'Let me see 价格 = 42 🦊 100% a_b \\frac{1}{2} "quoted" NEAR( * - [a-z]+ \u202e \ud800 \x1b[31m x\0y'  # odd
    score = Score(0.0, Outcome.FAILED, "wrong_value", detail="assert 1 == 2")
    plain = completion(0, "Nothing", Score(0.0, Outcome.FAILED, "other"))
    store(run, 1, [plain, completion(36, said, score)])
    for step in (0, 2):
        store(run, step, [plain])
    source = RunSource(run)
    page = source.answers(Query(more=Conditions(text=text)))
    assert page.total == found
    groups = source.groups(Query(more=Conditions(text=text)))
    assert (groups.total, groups.answers) == (found, found)
    shown = rollouts_page(source, {"q": text, "show": "single"})
    assert shown.status == 200 and (f"{found} rollout{'' if found == 1 else 's'} match" in texts(read_main(shown)))


def test_a_search_shows_the_place_that_it_found(run: Path):
    store(run, 3, [completion(0, "word " * 300 + "the Needle is here " + "word " * 300)])
    row = RunSource(run).answers(Query(more=Conditions(text="needle"))).rows[0]
    assert row.found.startswith("… ") and "the Needle is here" in row.found and len(row.found) < 250
    assert highlight("a Needle", "needle") == [("a ", False), ("Needle", True), ("", False)]
    assert highlight("İ needle", "needle") == [("İ needle", False)], "the places of letters would be others"


def test_a_group_is_a_row_that_opens_to_its_completions(run: Path):
    source = RunSource(run)
    page = source.groups(Query())
    assert (page.total, page.answers, len(page.groups)) == (6, 24, 6)
    first = page.groups[0]
    assert (first.name, first.size, first.matching, first.passed, first.rewards) == ("g0", 4, 4, 2, (0.0, 0.5, 1.0))
    assert [row.key for row in first.rows] == [f"run:2:{place}" for place in range(4)]
    best = source.groups(Query(outcome="passed", sort="advantage", limit=2)).groups
    assert [(one.name, one.matching, one.size) for one in best] == [("g1", 2, 4)] * 2
    assert [row.key for row in best[0].rows] == ["run:2:7", "run:2:6"], "the same order inside"
    shown = rollouts_page(source, {"outcome": "passed"})
    assert "12 rollouts in 6 groups match" in texts(read_main(shown)) and "2 of 4" in texts(read_main(shown))
    store(run, 3, [completion(0, group_id="", rollout_id=f"x{i}") for i in range(3)])
    assert source.groups(Query(step=3)).total == 3, "without a group each stands alone"


def test_pages_have_every_rollout_once(run: Path):
    source = RunSource(run)
    pages = [source.groups(Query(sort="-reward", offset=at, limit=2)).groups for at in range(0, 6, 2)]
    assert len({row.key for page in pages for group in page for row in group.rows}) == 24
    assert source.groups(Query(offset=99)).total == 6 == len(source.groups(Query(offset=0)).groups)
    assert source.answers(Query(offset=99)).total == 24


@pytest.mark.parametrize("show", ["", "single"])
@pytest.mark.parametrize("sort", ["", "reward", "-tokens"])
def test_keys_lead_through_the_table_that_the_reader_came_from(run: Path, show: str, sort: str):
    source = RunSource(run)
    query = Query(outcome="passed", sort=sort, limit=100)
    ordered = (
        [row.key for row in source.answers(query).rows]
        if show
        else [row.key for group in source.groups(query).groups for row in group.rows]
    )
    at, way = ordered[0], [ordered[0]]
    while (near := source.neighbours(query, not show, at)) and near.after:
        at = near.after
        way.append(at)
        assert source.neighbours(query, not show, at).before == way[-2]  # type: ignore[union-attr]
    assert way == ordered and near is not None and (near.place, near.total) == (12, 12)
    page = rollout_page(source, {"key": ordered[1], "outcome": "passed", "sort": sort, "show": show})
    links = {given["aria-keyshortcuts"]: given["href"] for given in attributes(page) if "aria-keyshortcuts" in given}
    assert links["j ArrowRight"].startswith(f"/ui/trajectory/{ordered[2].replace(':', '%3A')}?outcome=passed")
    assert source.neighbours(query, not show, "run:0:0") is None, "that one failed"


def attributes(page: Page) -> list[dict[str, str]]:
    return [node[1] for node in elements(read_main(page))]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"from": "x"}, "from='x'"), ({"to": "-1"}, "whole number"), ({"step": "9" * 30}, "whole number"),
        ({"min": "nan"}, "min='nan'"), ({"max": "1e999"}, "number such as 0.5"), ({"max": "0,5"}, "max='0,5'"),
        ({"min": "2", "max": "1"}, "No reward is from 2 to 1"), ({"sort": "age"}, "expected one of reward"),
        ({"sign": "odd"}, "expected one of watched"), ({"q": "x" * 2000}, "only the first 300"),
        ({"page": "0"}, None), ({"page": "x" * 50}, None), ({"q": "%" * 300}, None), ({"work": "nothing"}, None),
        (dict.fromkeys(("outcome", "reason", "task", "level", "status", "group", "q"), EVIL), None),
    ],
)  # fmt: skip
def test_a_filter_that_makes_no_sense_is_named_and_the_page_is_shown(
    run: Path, given: dict[str, str], said: str | None
):
    source = RunSource(run)
    for show in ("", "single"):
        page = rollouts_page(source, {**given, "show": show})
        assert page.status == 200 and "Rollouts" in texts(read_main(page))
        problems = [one for one in attributes(page) if one.get("class") == "note problem"]
        assert len(problems) == (0 if said is None else 1)
        assert said is None or said in read_words(page)


def test_a_very_long_completion_is_found_and_its_pages_stay_small(run: Path):
    store(run, 3, [completion(0, "a" * 500_000 + " needle " + "ab" * 5_000_000)])
    source = RunSource(run)
    source.answers(Query())
    source._reader._thread.join()  # type: ignore[reportPrivateUsage]
    assert keys(source, text="needle") == ["3:0"]
    for page in (rollouts_page(source, {"step": "3"}), rollout_page(source, {"key": "run:3:0"})):
        assert page.status == 200 and len(render_page(page)) < 400_000


def test_hostile_texts_are_escaped_in_tables_and_forms(run: Path):
    row = completion(0, EVIL, prompt=EVIL, task=Task(EVIL, "", level=EVIL), group_id=EVIL, rollout_id=EVIL,
                     scores={EVIL: Score(0.0, Outcome.FAILED, EVIL, detail=EVIL)})  # fmt: skip
    store(run, 3, [row, row])
    source = RunSource(run)
    filtered = {"show": "single", "q": "evil"}
    for page in (rollouts_page(source, {}), rollouts_page(source, filtered), hacks_page(source, {}),
                 rollout_page(source, {"key": "run:3:0"})):  # fmt: skip
        shown = render_page(page)
        assert page.status == 200 and "\u202e" not in shown and "\x07" not in shown and "<script>window" not in shown
    [group] = source.groups(Query(step=3)).groups
    assert source.answers(Query(more=Conditions(group=group.name))).total == 2, "its link finds it"


def test_a_run_that_goes_on_is_followed_and_a_changed_file_is_read_again(run: Path):
    source = RunSource(run)
    assert len(keys(source)) == 24
    add_step(run, 3)
    assert keys(source)[0] == "3:0" and len(keys(source, text="+ 3 =")) == 4
    store(run, 3, [completion(0, "another text")])
    assert len(keys(source)) == 25 and keys(source, text="+ 3 =") == [] and keys(source, text="another") == ["3:0"]
    (run / "rollouts" / "rl-000003.jsonl").unlink()
    assert len(keys(source)) == 24 and keys(source, text="another") == []
    assert source.detail("run:3:0") is None and source.detail("run:2:0") is not None


def test_a_link_to_a_rollout_that_is_not_read_yet_is_served(run: Path):
    source = RunSource(run, budget=1)
    detail = source.detail("run:0:3")
    assert detail is not None and detail.row.task == "sum-0" and len(detail.siblings) == 4


def test_a_link_to_a_rollout_whose_file_is_being_read_waits_for_it(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlvr.service.dashboard.run_rollouts.BATCH", 1)
    monkeypatch.setattr("rlvr.service.dashboard.run_rollouts.PAUSE_S", 0.05)
    source = RunSource(run, budget=1)
    source.answers(Query())
    reader = source._reader  # type: ignore[reportPrivateUsage]
    while (file := reader._current) is None:  # type: ignore[reportPrivateUsage]
        assert reader._thread.is_alive()  # type: ignore[reportPrivateUsage]
    detail = source.detail(f"run:{file[1]}:7")
    assert detail is not None and detail.row.step == file[1]


def test_only_the_newest_rollouts_of_a_very_large_run_are_in_the_table(run: Path):
    source = RunSource(run)
    source._reader = RolloutReader(source._index, rows=9)  # type: ignore[reportPrivateUsage]
    assert {key[0] for key in keys(source)} == {"1", "2"} and source.answers(Query()).complete
    shown = read_words(rollouts_page(source, {}))
    assert "older ones are left out" in shown


def test_a_read_only_folder_is_shown_and_stays_as_it_is(run: Path):
    before = sorted(path.name for path in run.rglob("*"))
    for path in (run / "rollouts", run):
        path.chmod(0o555)
    try:
        assert len(keys(RunSource(run), text="it is 1000")) == 12
    finally:
        for path in (run, run / "rollouts"):
            path.chmod(0o755)
    assert sorted(path.name for path in run.rglob("*")) == before


def test_rollouts_of_several_runs_are_in_one_table(run: Path):
    shutil.copytree(run, run.parent / "second")
    source = RunSource(run.parent)
    assert source.answers(Query()).total == 48 and source.answers(Query(work="second")).total == 24
    assert source.groups(Query(more=Conditions(group="g0"))).total == 6, "a group is one of its run and step"
    assert source.groups(Query(work="nothing")).total == 0


def test_tokens_of_the_environment_and_advantages_of_tokens_are_told(run: Path):
    row = completion(0, response_tokens=[1, 2, 1], logprobs=[-1.0, 0.0, -2.0], action_mask=[1, 0, 1],
                     token_advantages=[0.5, 0.0, -0.25])  # fmt: skip
    store(run, 3, [row])
    detail = RunSource(run).detail("run:3:0")
    assert detail is not None
    pieces = [(piece.is_sampled, piece.advantage) for piece in detail.tokens.pieces]
    assert pieces == [(True, 0.5), (False, 0.0), (True, -0.25)]
    titles = [
        given["title"] for given in attributes(rollout_page(RunSource(run), {"key": "run:3:0"})) if "title" in given
    ]
    assert titles[0].endswith("advantage +0.500") and "written by the environment" in titles[1]


# What looks like a hack.


def suspicions(folder: Path) -> dict[str, int]:
    return {one.title: one.count for one in RunSource(folder).suspicions("") if one.count}


def test_a_run_that_learns_what_it_should_raises_no_suspicion(run: Path, tmp_path: Path):
    """A tiny real run, too."""
    from rlvr.cli.main import run as command
    from tests.kit.tiny_run import TINY

    assert suspicions(run) == {}
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    assert command(["train", f"--config={config}", f"run.root={tmp_path / 'runs'}", "run.name=tiny"]) == 0
    assert suspicions(tmp_path / "runs" / "tiny") == {}
    shown = read_words(hacks_page(RunSource(run), {}))
    assert "Nothing is suspicious in 24 rollouts" in shown and "Looked for, and not found" in shown


def test_a_planted_wrong_answer_with_a_reward_is_found_among_many(run: Path):
    many = [completion(place, score=PASSED if place % 3 else FAILED) for place in range(400)]
    many[123] = completion(123, "it is 77", PASSED)
    store(run, 4, many)
    source = RunSource(run)
    page = hacks_page(source, {})
    assert "Passes with another number" in texts(read_main(page))
    [link] = [given["href"] for given in attributes(page) if given.get("href", "").startswith("/ui/trajectories?")
              and given.get("class") == "end"]  # fmt: skip
    assert link == "/ui/trajectories?sign=number&sort=reward&show=single"
    assert keys(source, sign="number") == ["4:123"] == keys(source, text="it is 77", outcome="passed")


def watched(second: Score) -> dict[str, Score]:
    return {"exact": PASSED, "strict": second}


@pytest.mark.parametrize(
    ("title", "rows"),
    [
        ("Passes, and a watched verifier refuses", [completion(0, scores=watched(FAILED))]),
        ("Does not pass, and earns as much", [completion(0, score=PASSED), completion(1, reward=1.0)]),
        ("Passes with another number", [completion(0, "1,001", PASSED)]),
        ("Passes and ends with another number", [completion(n, "" if n else "1000 and 7", PASSED) for n in range(24)]),
        (None, [completion(n, "1000 and 7", PASSED) for n in range(4)]),
        ("The same completion passes different tasks", [completion(4 * n, "pass me", PASSED) for n in range(3)]),
        ("Earns a reward with form alone", [completion(0, "<answer>\\boxed{}</answer>", PASSED)]),
        ("Passes by repeating the prompt", [completion(0, "Problem 0?", PASSED, task=Task("t", "", {"answer": "x"}))]),
        (None, [completion(0, scores=watched(PASSED)), completion(1, scores=watched(Score(None, Outcome.ERROR)))]),
        (None, [completion(0, score=PASSED), completion(1, reward=0.5)]),
        (None, [completion(0, "the sum: $1{,}000$", PASSED), completion(4, "1 001 sheep", PASSED)]),
        (None, [completion(4 * n, "the same", PASSED, task=Task(f"t{n}", "", {"answer": "same"})) for n in range(9)]),
        (None, [completion(0, "][", PASSED, task=Task("t", "", {"answer": "]["}))]),
        (None, [completion(0, "Problem 0? One.", PASSED, task=Task("t", "", {"answer": "one"}))]),
    ],
)  # fmt: skip
def test_each_kind_of_suspicion_is_raised_by_what_it_names(tmp_path: Path, title: str | None, rows: list[Trajectory]):
    folder = make_run(tmp_path / "run", steps=0)
    store(folder, 0, rows)
    found = suspicions(folder)
    assert list(found) == ([] if title is None else [title])
    page = hacks_page(RunSource(folder), {})
    assert page.status == 200 and (title is None or title in texts(read_main(page)))


def test_suspicions_of_several_runs_are_counted_by_run_and_shown_of_each(tmp_path: Path):
    for name, wrong in (("many", 9), ("one", 1), ("none", 0)):
        folder = make_run(tmp_path / "runs" / name, steps=0)
        store(folder, 0, [completion(n, "it is 77" if n < wrong else "", PASSED) for n in range(40)])
    source = RunSource(tmp_path / "runs")
    [found] = [one for one in source.suspicions("") if one.title == "Passes with another number"]
    assert (found.count, found.by_work) == (10, [("one", 1), ("many", 9)])
    assert [(row.work, row.expected) for row in found.rows] == [("one", "1000"), ("many", "1000")]
    shown = read_words(hacks_page(source, {}))
    assert "one: 1" in shown and "many: 9" in shown and "Expected" in shown
    assert "many: 9" not in read_words(hacks_page(source, {"work": "many"}))


@pytest.mark.parametrize(("expected", "text", "place"), [
    ("7", "= 8", "nowhere"), ("7", "= 7", "last"), ("1234", "1,234", "last"), ("0.5", "3", ""), ("x", "3", ""),
    ("7", "seven", ""), ("12", "112", "nowhere"), ("-4", "4", "last"), ("3", "6/2", "last"),
    ("1", "= 11 3 =", "nowhere"), ("7", "= 7 3 - = 4", "within"), ("100", "of 7 100", "within"), ("7", "7.", "last"),
])  # fmt: skip
def test_an_expected_number_is_last_within_or_nowhere(expected: str, text: str, place: str):
    assert find_number(expected, text) == place


def trend(folder: Path, late: list[Trajectory]) -> Path:
    """Twelve steps: the early ones have long completions, of which half pass."""
    early = [completion(p, score=PASSED if p % 2 else FAILED, response_tokens=[1] * 60, logprobs=[-1.0] * 60)
             for p in range(40)]  # fmt: skip
    for step in range(12):
        store(folder, step, early if step < 6 else late)
    return folder


def test_a_reward_that_rises_while_completions_collapse_is_named(tmp_path: Path):
    short = [completion(p, score=PASSED, response_tokens=[1] * 5, logprobs=[-1.0] * 5) for p in range(40)]
    found = suspicions(trend(make_run(tmp_path / "run", steps=0), short))
    assert list(found) == ["The reward rises while completions collapse: run"]
    as_long = [replace(one, response_tokens=[1] * 40, logprobs=[-1.0] * 40, action_mask=[1] * 40,
                       attention_mask=[1] * 41) for one in short]  # fmt: skip
    assert suspicions(trend(make_run(tmp_path / "long", steps=0), as_long)) == {}


def test_a_reward_that_rises_while_fewer_pass_is_named(tmp_path: Path):
    late = [completion(p, response_tokens=[1] * 60, logprobs=[-1.0] * 60, reward=0.9) for p in range(40)]
    found = suspicions(trend(make_run(tmp_path / "run", steps=0), late))
    assert list(found) == ["The reward rises, and fewer rollouts pass: run"]


def test_what_is_known_of_a_reward_is_told(run: Path):
    (run / "resolved.yaml").write_text("reward: {type: boxed, kwargs: {}, watch: []}\n")
    [note] = RunSource(run).cautions("run")
    assert "'boxed' can be hacked" in note.text and "rlvr audit --reward boxed" in note.remedy
    for text in ("{type: correct}", "{type: 'os:system', kwargs: {a: 1}}", "{type: boxed, kwargs: {odd: 1}}", "5"):
        (run / "resolved.yaml").write_text(f"reward: {text}\n")
        assert RunSource(run).cautions("run") == []


# The service's sessions on the same pages.


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[StoreSource]:
    filled = fill_store(f"sqlite:///{tmp_path}/store.sqlite")
    yield StoreSource(filled)
    filled.close()


def test_a_source_offers_the_filters_and_orders_that_it_declares(sessions: StoreSource):
    page = rollouts_page(sessions, {})
    fields = {given["name"] for given in attributes(page) if "name" in given}
    assert fields == {"outcome", "min", "max", "sort", "task", "from", "to", "status", "strategy", "work"}
    refused = rollouts_page(sessions, {"q": "x", "level": "1", "sign": "number", "sort": "logprob"})
    said = read_words(refused)
    assert refused.status == 200 and "cannot be filtered by q, level" in said and "'logprob' is no order" in said
    assert hacks_page(sessions, {}).status == 404 and "Hacks" not in texts(read_main(page))


def test_sessions_are_sorted_and_narrowed_by_the_database(sessions: StoreSource):
    def keys(**asked: Any) -> list[str]:
        return [row.key for row in sessions.answers(Query(**asked)).rows]

    assert keys(sort="reward") == ["2", "4", "3", "1"] and keys(sort="-reward")[-1] == "2"
    assert keys(more=Conditions(rewards=(0.6, None))) == ["2"] == keys(more=Conditions(steps=(2, 9)))
    assert keys(task="ask_b") == ["3"]
    assert keys(more=Conditions(strategy="direct"), sort="-reward")[-1] == "2" and not keys(
        more=Conditions(strategy="fresh")
    )
    page = rollout_page(sessions, {"key": "1"})
    assert "Next (j) →" in texts(read_main(page)) and "1 of 2 in this group" in read_words(page)
