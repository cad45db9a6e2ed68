"""What the pages of runs answer: which held-out tasks got worst, why two seeds differ, what was learned; studies."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvr.cli.main import run as command
from rlvr.service.dashboard.curve_view import CurveView, Series, smooth
from rlvr.service.dashboard.dashboard_data import Chart
from rlvr.service.dashboard.pages.compare_page import compare_page
from rlvr.service.dashboard.pages.curve_file import curve_file, write_csv
from rlvr.service.dashboard.pages.heldout_pages import task_page, tasks_page
from rlvr.service.dashboard.pages.page_parts import short_names
from rlvr.service.dashboard.pages.study_page import study_page
from rlvr.service.dashboard.pages.work_pages import overview, work_page
from rlvr.service.dashboard.run_differences import list_differences
from rlvr.service.dashboard.run_files import FIRST_ROWS, LAST_ROWS
from rlvr.service.dashboard.run_source import RunSource
from rlvr.training.evaluate import compare_evaluations as compare_evaluations
from rlvr.training.evaluate import stored_evaluation
from tests.kit.dashboard_fixtures import add_evaluations, make_run, metric_row
from tests.kit.dashboard_html import find, links, read_charts, read_main, read_words, texts
from tests.kit.study_runs import make_study
from tests.kit.tiny_run import TINY

BEFORE = {"1-a": 4, "1-b": 3, "1-c": 0, "2-a": 0, "2-b": 2, "2-c": 1, "2-d": 4}
AFTER = {"1-a": 0, "1-b": 2, "1-c": 4, "2-a": 3, "2-b": 2, "2-c": 4, "2-d": 4}
SIDES = {"a": "first@baseline", "b": "first@final"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs with evaluations."""
    for name in ("first", "second"):
        add_evaluations(make_run(tmp_path / "runs" / name), BEFORE, AFTER if name == "first" else BEFORE)
        (tmp_path / "runs" / name / "resolved.yaml").write_text(
            f"seed: {1 if name == 'first' else 2}\nenv: {{name: sums}}\nrun: {{name: {name}}}\n"
        )
    return tmp_path / "runs"


def test_the_tasks_that_fell_most_come_first_and_link_to_their_answers(folder: Path):
    source = RunSource(folder)
    page = work_page(source, {"work": "first"})
    tasks = [link.partition("&task=")[2] for link in links(page) if "/ui/task?" in link]
    assert tasks == ["1-a", "1-b", "1-c", "2-a", "2-c"]  # two fell, three rose, the larger change first
    assert "Fell: 2 of 7 tasks" in read_words(page) and "Rose: 3 of 7 tasks" in read_words(page)
    worst = read_main(tasks_page(source, {**SIDES, "order": "worst"}))
    listed = [texts(node)[0] for node in find(worst, "th") if node[1]["scope"] == "row"]
    assert listed == ["1-a", "1-b", "2-b", "2-a", "1-c", "2-c", "2-d"]
    of_level = read_words(tasks_page(source, {**SIDES, "kind": "level=1"}))
    assert "3 tasks" in of_level and "2-a" not in of_level


def test_what_was_learned_is_said_with_the_test_of_the_evaluation(folder: Path):
    """By level and kind, each with the numbers of `evaluate.compare`."""
    sides = [stored_evaluation(folder / "first" / "evaluations" / f"{stage}.json") for stage in ("baseline", "final")]
    changes = RunSource(folder).changes(("first", "baseline"), ("first", "final"))
    assert changes is not None
    assert [part.key for part in changes.parts] == ["", "level=1", "level=2", "kind=a", "kind=b", "kind=c", "kind=d"]
    assert changes.whole == compare_evaluations(*sides)
    of_level = [replace(side, results=[r for r in side.results if r.level == "2"]) for side in sides]
    assert changes.parts[2].compared == compare_evaluations(*of_level)
    shown = read_words(work_page(RunSource(folder), {"work": "first"}))
    assert "did not clearly change" in shown and "level 2 4 tasks" in shown and "paired test: p = " in shown


@pytest.mark.parametrize(("sides", "verdict"), [(("low", "high"), "rose"), (("high", "low"), "fell")])
def test_a_clear_change_is_named(tmp_path: Path, sides: tuple[str, str], verdict: str):
    rates = {"low": {f"1-{n:02}": 0 for n in range(30)}, "high": {f"1-{n:02}": 3 for n in range(30)}}
    add_evaluations(make_run(tmp_path / "only"), rates[sides[0]], rates[sides[1]])
    shown = read_words(work_page(RunSource(tmp_path / "only"), {"work": "only"}))
    assert f"The held-out pass rate {verdict}" in shown and "p < 0.0001" in shown


def test_a_task_is_shown_with_its_completions_on_both_sides(folder: Path):
    source = RunSource(folder)
    page = task_page(source, {**SIDES, "task": "1-a"})
    shown = read_words(page)
    assert "Before: 4 of 4 pass, After: 0 of 4 pass; -100 points" in shown
    assert "prompt of 1-a" in shown and "Expected answer 42" in shown
    assert [texts(node)[0] for node in find(read_main(page), "article")] == ["passed"] * 4 + ["failed"] * 4
    assert "\u202e" not in shown and "<script>window.hacked" in shown  # text
    two = read_words(task_page(source, {"a": "first@final", "b": "second@final", "task": "2-a"}))
    assert "first: 3 of 4 pass, second: 0 of 4 pass" in two and "first before and after" in two
    (folder / "first" / "evaluations" / "final.jsonl").unlink()
    assert "stores no completions of held-out tasks (run.rollouts_per_task=0" in read_words(
        task_page(source, {**SIDES, "task": "1-a"})
    )


def test_a_watched_verifier_that_refuses_a_held_out_completion_is_named(folder: Path):
    file = folder / "first" / "evaluations" / "final.jsonl"
    [first, *rest] = map(json.loads, file.read_text().splitlines())
    first["scores"]["strict"] = {"value": 0.0, "outcome": "failed", "reason": ""}
    file.write_text("".join(json.dumps(row) + "\n" for row in (first, *rest)))
    task = task_page(RunSource(folder), {**SIDES, "task": first["task_id"]})
    assert [words for words in texts(read_main(task)) if "refuses" in words] == ["strict refuses"]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"task_id": 7}', '{"task_id": "1-a", "response": 5}', "[" * 9999])
def test_damaged_completions_are_left_out(folder: Path, line: str):
    file = folder / "first" / "evaluations" / "final.jsonl"
    file.write_text(f"{line}\n{file.read_text()}{line}")
    page = task_page(RunSource(folder), {**SIDES, "task": "1-b"})
    assert len(list(find(read_main(page), "article"))) == 8


@pytest.mark.parametrize(
    "parameters",
    [{}, {"a": "first@baseline"}, {**SIDES, "b": "nope@final"}, {**SIDES, "task": "nope"}, {**SIDES, "task": ""}],
)
def test_a_task_that_is_not_there_is_a_404_page(folder: Path, parameters: dict[str, str]):
    assert task_page(RunSource(folder), parameters).status == 404


def test_runs_without_a_whole_evaluation_say_so(folder: Path):
    """Half written, of no task, of strange values, or none: every page is still there."""
    source, file = RunSource(folder), folder / "first" / "evaluations" / "final.json"
    whole = file.read_text()
    nan = whole.replace('"reward": 0.0', '"reward": NaN')
    assert nan != whole
    for content in (whole[: len(whole) // 2], "", "[]", nan, '{"results": 5, "k": 1}'):
        file.write_text(content)
        page = read_words(work_page(source, {"work": "first"}))
        assert "evaluations/final.json is half written or damaged" in page, content[:40]
        assert "Before training, held-out tasks pass: all 50.0 %" in page
        assert "no evaluation of first after training yet" in read_words(tasks_page(source, SIDES))
        assert "one of the runs has no evaluation at its end yet" in read_words(
            compare_page(source, {"a": "first", "b": "second"})
        )
    file.write_text(json.dumps({"results": [], "k": 4}))
    assert "No held-out task was judged on both sides" in read_words(work_page(source, {"work": "first"}))
    shutil.rmtree(folder / "first" / "evaluations")
    assert "no evaluation at its end" in read_words(work_page(source, {"work": "first"})) or "by itself" in read_words(
        work_page(source, {"work": "first"})
    )
    assert source.changes(("first", "baseline"), ("first", "nothing")) is None


def test_tasks_that_one_run_alone_has_are_counted_and_left_out(folder: Path):
    add_evaluations(folder / "second", BEFORE, {"1-a": 4, "3-z": 1})
    source = RunSource(folder)
    changes = source.changes(("first", "final"), ("second", "final"))
    assert changes is not None
    assert (changes.apart, [task.id for task in changes.tasks], changes.whole["tasks"]) == (7, ["1-a"], 1)
    assert "7 tasks are in one of the evaluations only" in read_words(
        compare_page(source, {"a": "first", "b": "second"})
    )
    add_evaluations(folder / "second", BEFORE, {"3-z": 1})
    shown = read_words(compare_page(source, {"a": "first", "b": "second"}))
    assert "no task is held out in both" in shown and "What differs" in shown


def test_a_running_run_says_what_is_known_so_far(folder: Path):
    (folder / "first" / "evaluations" / "final.json").unlink()
    rows = [{**metric_row(9), "test/env/all/correct": 0.5, "test/env/all/correct/low": 0.4,
             "test/env/all/correct/high": 0.625}]  # fmt: skip
    with (folder / "first" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    source = RunSource(folder)
    shown = read_words(work_page(source, {"work": "first"}))
    assert "After step 10, other held-out tasks pass: 50.0 % (40.0 to 62.5)" in shown and "by itself" in shown
    charts = {chart.title: chart for chart in source.charts("first")}
    interim = next(line for line in charts["Pass rate"].lines if "interim" in line.name)
    assert interim.points == [(10.0, 0.5, 0.4, 0.625)] and interim.style == "dots"


def test_two_runs_are_compared_by_settings_code_and_tasks(folder: Path):
    source = RunSource(folder)
    shown = read_words(compare_page(source, {}))
    assert "Of the settings only the seed differs" in shown and "Worse under" in shown
    for name, code in (("first", "0.1 (aa)"), ("second", "0.1 (bb)")):
        (folder / name / "journal.jsonl").write_text(json.dumps({"event": "run", "rlvr": code, "torch": "2"}) + "\n")
    with (folder / "second" / "resolved.yaml").open("a") as file:
        file.write("client: {api_key: hunter2, base_url: 'http://me:secret@there/x'}\n")
    found = {one.key: one for one in list_differences(source.run("first"), source.run("second"))}  # type: ignore[arg-type]
    assert (found["rlvr"].first, found["rlvr"].second, found["rlvr"].group) == (
        "0.1 (aa)",
        "0.1 (bb)",
        "code and machine",
    )
    assert found["client.api_key"].second == "***" and "secret" not in found["client.base_url"].second
    assert found["client.api_key"].first == "not set" and "run.name" not in found
    assert "The code or the machine differs too (rlvr)" in read_words(compare_page(source, {}))


def test_compare_opens_on_runs_that_can_be_compared(folder: Path):
    """Of one environment and measured at their end, though a newer run is not."""
    make_run(folder / "newest")
    add_evaluations(make_run(folder / "other"), BEFORE, AFTER)
    (folder / "other" / "resolved.yaml").write_text("env: {name: something else}\n")
    source = RunSource(folder)
    assert {*source.choose_pair()} == {"first", "second"}
    assert "Nothing can be compared" not in read_words(compare_page(source, {}))
    assert "newest and other" in read_words(compare_page(source, {"a": "newest", "b": "other"}))
    shutil.rmtree(folder / "first")
    shutil.rmtree(folder / "second")
    assert "What differs" in read_words(compare_page(source, {}))


def test_two_steps_without_a_common_task_lead_to_the_held_out_ones(folder: Path):
    for step in (0, 3):
        file = folder / "first" / "rollouts" / f"rl-{step:06d}.jsonl"
        file.write_text(file.read_text().replace('"sum-', f'"step {step}-'))
    shown = read_words(compare_page(RunSource(folder), {"work": "first", "a": "0", "b": "3"}))
    assert "Nothing can be compared" not in shown and "Held-out tasks that changed" in shown


def test_a_finding_links_to_what_shows_it(tmp_path: Path):
    run = make_run(tmp_path / "flat", steps=0)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(12):
            file.write(json.dumps({**metric_row(0), "step": step, "completions/clipped_ratio": 0.75}) + "\n")
    page = work_page(RunSource(run), {"work": "flat"})
    assert "See completions/clipped_ratio: last 0.75" in read_words(page)
    assert "/ui/run/flat?metric=completions%2Fclipped_ratio#curves" in links(page)


def test_a_view_smooths_crops_and_takes_logarithms():
    """The raw line stays beside the smoothed one, which is said; what a log axis cannot show is counted."""
    line = Series("a", np.arange(100.0), np.tile([0.0, 2.0], 50))
    chart = CurveView(10, 59, window=5).draw(Chart("c", []), [line])
    assert chart is not None and [curve.style for curve in chart.lines] == ["raw", "line"]
    assert [curve.points[0][0] for curve in chart.lines] == [10, 10] and chart.lines[0].points[-1][0] == 59
    assert chart.lines[0].colour == chart.lines[1].colour and "means of 5 steps; pale: each step" in chart.hint
    log = CurveView(log="y").draw(Chart("c", []), [line])
    assert log is not None and len(log.lines[0].points) == 50 and "50 points at 0 or below" in log.hint
    assert CurveView(log="y").draw(Chart("c", []), [Series("a", np.arange(3.0), np.zeros(3))]) is None
    assert CurveView.of({"from": "x", "to": "1e400", "smooth": "7", "log": "z"}) == CurveView()
    assert CurveView.of({"from": "3", "to": "9.5", "smooth": "15", "log": "xy"}).query() == {
        "from": "3", "to": "9.5", "smooth": "15", "log": "xy",
    }  # fmt: skip


@pytest.mark.parametrize("window", [1, 3, 5, 151])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 40])
def test_a_smoothed_value_is_the_mean_of_its_neighbours(window: int, length: int):
    values = np.random.default_rng(length).normal(size=length)
    half = min(window, 2 * ((length - 1) // 2) + 1) // 2
    by_hand = [values[max(0, i - half) : i + half + 1].mean() for i in range(length)]
    assert smooth(values, window) == pytest.approx(by_hand)


def test_the_file_of_a_chart_has_every_step_of_the_part_that_is_shown(folder: Path):
    source, given = RunSource(folder), {"page": "/ui/run/first", "title": "Pass rate"}
    found = curve_file(source, given)
    assert found is not None and found[0] == "pass-rate.csv"
    rows = list(csv.DictReader(io.StringIO(found[1])))
    assert [row["training"] for row in rows if row["training"]] == ["0.2", "0.30000000000000004", "0.4", "0.5"]
    assert [row["step"] for row in rows if row["held-out, before and after"]] == ["0", "4"]
    assert rows[0]["held-out, before and after low"] < rows[0]["held-out, before and after"]
    cropped = curve_file(source, {**given, "from": "2"})
    assert cropped is not None and [row["step"] for row in csv.DictReader(io.StringIO(cropped[1]))] == ["2", "3", "4"]
    both = curve_file(source, {"page": "/ui/compare", "a": "first", "b": "second", "title": "Entropy"})
    assert both is not None and both[1].startswith("step,first,second\n")
    for nothing in ({}, {**given, "title": "x"}, {**given, "page": "/ui/run/nope"}, {"page": "/etc"}):
        assert curve_file(source, nothing) is None
    assert write_csv([Series("=cmd()", np.zeros(1), np.ones(1))]) == "step,'=cmd()\n0,1.0\n"


def test_many_rows_of_metrics_are_drawn_and_not_all_kept(tmp_path: Path):
    run = make_run(tmp_path / "long", steps=0)
    number = 3 * (FIRST_ROWS + LAST_ROWS)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(number):
            loss = math.nan if step % 2 else 0.5
            file.write(f'{{"phase": "rl", "step": {step}, "reward": {step / number}, "loss": {json.dumps(loss)}}}\n')
    source = RunSource(run)
    reader = source.run("long")
    assert reader is not None and len(reader.metrics().rows) == FIRST_ROWS + LAST_ROWS
    loss = reader.series("loss")
    assert loss is not None and len(loss.x) == number // 2
    reward = next(chart for chart in source.charts("long") if chart.title == "Reward").lines[0]
    assert len(reward.points) <= 401 and reward.points[-1][0] == number - 1
    assert reader.at_step(1234) == {"reward": 1234 / number, "loss": 0.5}
    file = curve_file(source, {"page": "/ui/run/long", "title": "Reward"})
    assert file is not None and file[1].count("\n") == number + 1
    assert work_page(source, {"work": "long", "smooth": "151"}).status == 200


def test_a_real_run_has_its_answers_before_and_after(tmp_path: Path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = [f"run.root={tmp_path / 'runs'}", "run.name=tiny"]
    assert command(["train", f"--config={tmp_path / 'tiny.yaml'}", *words]) == 0
    source = RunSource(tmp_path / "runs" / "tiny")
    page = overview(source, {})
    assert "What was learned" in read_words(page) and "level 1 8 tasks" not in read_words(
        page
    )  # one level: nothing to compare
    assert "The held-out pass rate" in read_words(page)
    changes = source.changes(("tiny", "baseline"), ("tiny", "final"))
    assert changes is not None and len(changes.tasks) == 8
    task = task_page(source, {"a": "tiny@baseline", "b": "tiny@final", "task": changes.tasks[0].id})
    assert len(list(find(read_main(task), "article"))) == 4 and "Expected answer" in read_words(task)


def test_a_study_is_listed_and_shown_with_its_runs(tmp_path: Path):
    """A study in a folder of runs, and its folder by itself."""
    make_study(tmp_path / "runs", "sizes", "seeds=1..2", "training.group_size=2,4", "training.steps=2")
    make_run(tmp_path / "runs" / "loose")
    source = RunSource(tmp_path / "runs")
    first = overview(source, {})
    assert "2 variants x 2 seeds, 4 of 4 runs finished" in read_words(first) and "/ui/study/sizes" in links(first)
    assert [work.name for work in source.works()[0]] == ["loose"]
    page = study_page(source, {"study": "sizes"})
    shown = read_words(page)
    assert page.status == 200 and "training.group_size=2 (2 of 2 runs finished)" in shown
    assert "after minus before" in shown and "seed by seed" in shown
    runs = [link for link in links(page) if link.startswith("/ui/run/")]
    assert len(runs) == 4 and runs[0] == "/ui/run/sizes%2Fgroup_size-2_seed-1"
    assert work_page(source, {"work": "sizes/group_size-2_seed-1"}).status == 200
    charts = {chart["name"]: chart for chart in read_charts(page)}
    bands = [line for line in charts["Reward: training"]["lines"] if line["kind"] == "band"]
    assert [line["name"] for line in bands] == ["group_size=2: mean of 2 seeds", "group_size=4: mean of 2 seeds"]
    assert len(charts["Each seed after training"]["lines"]) == 2
    seeds = curve_file(source, {"page": "/ui/study/sizes", "title": "Each seed after training"})
    assert seeds is not None and seeds[1].startswith(
        "seed,group_size=2,group_size=2 low,group_size=2 high,group_size=4,"
    )
    alone = overview(RunSource(tmp_path / "runs" / "sizes"), {})
    assert "4 of 4 runs finished" in read_words(alone) and "/ui/run/group_size-2_seed-1" in links(alone)
    for damage in ("{", "[]", '{"seeds": 5, "variants": [1]}'):
        (tmp_path / "runs" / "sizes" / "study.json").write_text(damage)
        assert "its study.json cannot be read" in read_words(study_page(source, {"study": "sizes"}))
        (tmp_path / "runs" / "sizes" / "summary.json").write_text(damage)
        assert "there are no statistics yet" in read_words(study_page(source, {"study": "sizes"}))
    assert study_page(source, {"study": "nope"}).status == 404


@pytest.mark.parametrize(("names", "short"), [
    (("s/size-4_seed-1", "s/size-4_seed-12"), ("seed-1", "seed-12")),
    (("s/size-4_seed-1", "s/size-8_seed-1"), ("size-4_seed-1", "size-8_seed-1")),
    (("s/a", "t/a"), ("s/a", "t/a")), (("a", "ab"), ("a", "ab")), (("seed-1", "seed-2"), ("seed-1", "seed-2")),
])  # fmt: skip
def test_two_runs_are_named_without_what_their_names_share(names: tuple[str, str], short: tuple[str, str]):
    assert short_names(*names) == short
