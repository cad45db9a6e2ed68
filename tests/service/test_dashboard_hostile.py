"""A folder or a recording from anywhere breaks no page, and none waits for what never ends."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rlvr.recorder.recording import VERSION, RecordedCall, RecordedChoice
from rlvr.service.dashboard.dashboard_data import Source
from rlvr.service.dashboard.dashboard_routes import PAGES, read_parameters
from rlvr.service.dashboard.page_templates import render_page
from rlvr.service.dashboard.pages.compare_page import compare_page
from rlvr.service.dashboard.pages.run_page import run_page
from rlvr.service.dashboard.pages.study_page import study_page
from rlvr.service.dashboard.recording_source import RecordingSource
from rlvr.service.dashboard.run_source import RunSource
from rlvr.service.dashboard.study_reader import MOST_RUNS
from tests.kit.dashboard_fixtures import EVIL, add_evaluations, make_run, metric_row

HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
NAME = "<b onclick=a>\u202e\"'&\x1b[31m"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "first", steps=2)


def show_all(source: Source, **parameters: str) -> str:
    """All pages of a source, which can be shown; nothing in them is invisible or turns the writing direction."""
    made = [view(source, parameters) for view in PAGES.values()]
    pages = [render_page(page) for page in made if page.status == 200]
    shown = "".join(pages)
    assert len(pages) >= 4 and not HIDDEN.search(shown) and shown.count("<script") == len(pages)
    return shown


def test_a_run_of_a_hostile_name_is_reached_by_its_links(tmp_path: Path):
    run = make_run(tmp_path / "runs" / NAME, steps=2)
    add_evaluations(run, {EVIL: 0, "1-b": 4}, {EVIL: 4, "1-b": 0})
    (run / "resolved.yaml").write_text(json.dumps({EVIL: EVIL, "reward": {"type": EVIL, "watch": [EVIL]}}))
    (run / "summary.json").write_text(json.dumps({"baseline": {EVIL: {"value": 1}}, "final": {EVIL: {"value": 2}}}))
    for folder in (run, run.parent):
        source = RunSource(folder)
        [(name, _)] = source.names().items()
        sides = {"a": f"{name}@baseline", "b": f"{name}@final", "task": "1-b"}
        assert "\\u202e" in name and show_all(source, work=name, key=f"{name}:1:1", **sides)
        assert run_page(source, {"work": name}).status == 200


def test_metrics_of_hostile_names_and_values_are_left_out(run: Path):
    values = {EVIL: 1.0, "nan": float("nan"), "inf": float("inf"), "large": 10**400, "plain": 1.0}
    cut = json.dumps({**metric_row(3), "cut": 1.0})
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**metric_row(2), **values}) + "\n" + cut[: len(cut) // 2])
    source = RunSource(run)
    assert {*source.at_step("first", 2)} == {"plain", *metric_row(2)} - {"phase", "step"}
    assert "NaN" not in show_all(source, work="first", metric="nan")


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}' if n else 'x'] * 9)}]\n" for n in range(12)),
        "".join(
            f"k{n}: &k{n} {{{', '.join(f'm{place}: ' + (f'*k{n - 1}' if n else 'x') for place in range(9))}}}\n"
            for n in range(12)
        ),
        "a: &a [*a]\nb: &b {c: *b}\n",
        "a: " + "[" * 900 + "]" * 900,
        "a: !!python/object/apply:os.getcwd []\n",
    ],
)
def test_settings_that_expand_without_end_are_left_out(run: Path, text: str):
    make_run(run.parent / "second", steps=1)
    (run / "resolved.yaml").write_text(text)
    source = RunSource(run.parent)
    reader = source.run("first")
    assert reader is not None and reader.config() == {}
    assert compare_page(source, {"a": "first", "b": "second"}).status == run_page(source, {"work": "first"}).status


@pytest.mark.parametrize("levels", [60, 600, 960])
def test_values_of_many_levels_break_no_page(run: Path, levels: int):
    deep = '{"a":' * levels + "1" + "}" * levels
    (run / "summary.json").write_text(f'{{"machine": {deep}, "final": {{"pass@1": {deep}}}}}')
    (run / "journal.jsonl").write_text(f'{{"event": "run", "a": {deep}}}\n')
    rollout = json.loads((run / "rollouts" / "rl-000001.jsonl").read_text().splitlines()[1])
    with open(run / "rollouts" / "rl-000001.jsonl", "w") as file:
        for key in rollout:
            file.write(json.dumps({**rollout, key: "@"}).replace('"@"', deep) + "\n")
    for place in range(len(rollout)):
        show_all(RunSource(run), work="first", key=f"first:1:{place}")


def test_pipes_and_devices_are_not_read(run: Path):
    """A page that reads one never comes."""
    stages = [f"evaluations/{stage}.json{lines}" for stage in ("baseline", "final") for lines in ("", "l")]
    files = ["metrics.jsonl", "resolved.yaml", "journal.jsonl", "summary.json", "rollouts/rl-000001.jsonl", *stages]
    for number, file in enumerate(files):
        other = make_run(run.parent / f"pipe-{number}", steps=2)
        (other / "evaluations").mkdir()
        (other / file).unlink(missing_ok=True)
        os.mkfifo(other / file)
    endless = run / "rollouts" / "rl-000001.jsonl"
    endless.unlink()
    endless.symlink_to("/dev/zero")
    shown = list[str]()
    names = ["first", *(f"pipe-{number}" for number in range(len(files)))]
    thread = threading.Thread(
        target=lambda: shown.extend(show_all(RunSource(run.parent), work=name) for name in names), daemon=True
    )
    thread.start()
    thread.join(60)
    assert len(shown) == len(names)


def test_a_study_of_very_many_runs_is_cut(run: Path):
    study = run.parent / "study"
    study.mkdir()
    variants = [{"name": EVIL + str(number), "folder": f"../{number}-"} for number in range(500)]
    (study / "study.json").write_text(json.dumps({"seeds": list(range(10_000)), "variants": variants}))
    page = study_page(RunSource(run.parent), {"study": "study"})
    assert page.status == 200 and not HIDDEN.search(render_page(page)) and len(page.data["runs"].rows) == MOST_RUNS


def test_what_an_address_says_is_shown_with_its_invisible_characters():
    given = read_parameters({"metric": "a\u202eb\x00", "q": "%_' OR 1=1 --" + "x" * 3000})
    assert given["metric"] == "a\\u202eb\\x00" and given["q"].startswith("%_' OR 1=1 --x") and len(given["q"]) == 2000


def test_a_hostile_recording_is_shown(tmp_path: Path):
    call = RecordedCall(
        "c", EVIL, EVIL, EVIL, EVIL, [1, 2], [RecordedChoice([3], [-0.5], "stop", {"role": EVIL, "content": EVIL})],
        {"messages": [{"role": "user", "content": EVIL}]}, {}, 1.0, 2.0,
    )  # fmt: skip
    calls = [call, *(replace(call, id=rollout, rollout=rollout, ended=at) for rollout, at in
                     (("late", 1e20), ("early", -1e20), ("/../../etc", 0.0)))]  # fmt: skip
    lines = [{"kind": "recording", "version": VERSION, "model": EVIL}, *(one.to_json() for one in calls)]
    (tmp_path / "traffic.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = RecordingSource(tmp_path / "traffic.jsonl")
    works = source.works()[0]
    assert len(works) == 4 and [source.work(one.id) for one in works] == works
    for one in works:
        assert PAGES["/ui/rollout/{work:path}"](source, {"work": one.id}).status == 200
        show_all(source, work=one.id, key=f"{one.id}:0")
