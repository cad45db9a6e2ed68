"""What a study says of its runs: the numbers are those of the runs' own summaries, and no doubt is hidden."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlvr.cli.main import run
from rlvr.core.machine import describe_code
from rlvr.studies.run_log import begin_attempt, read_failure, record_failure
from rlvr.studies.seed_statistics import compare_pairs
from rlvr.studies.study_folder import log_file
from rlvr.studies.study_report import AFTER, BEFORE, judge_comparison, study_table, write_report
from rlvr.studies.study_summary import find_alarms, summarize
from tests.kit.study_runs import MOCK, make_runs, planned

T2 = 4.302652729911275  # 0.975 quantile of Student's t with 2 degrees of freedom


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mock.yaml").write_text(MOCK)
    return tmp_path


def lines_of(table: str) -> list[str]:
    return [re.sub(r" +", " ", line.strip()) for line in table.splitlines()]


def stored(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / "mock-study" / name / "summary.json").read_text())


def test_the_table_shows_mean_interval_range_and_deviation_of_the_runs(folder: Path, capsys: Any) -> None:
    """By hand from the runs' own summary.json: mean +- 4.3027 s / sqrt(3), cut at 0 and 1."""
    plan = planned("seeds=1..3", "training.steps=2")
    make_runs(plan)
    capsys.readouterr()
    assert run(["study", "--config=mock.yaml", "seeds=1..3", "training.steps=2"]) == 0
    said = capsys.readouterr().out
    assert list((folder / "runs" / "mock-study" / "logs").iterdir()) == [], "finished runs are not repeated"
    for side, key in (("before", "baseline"), ("after", "final")):
        rates = [stored(folder, f"seed-{seed}")[key]["pass@1"]["value"] for seed in (1, 2, 3)]
        assert len(set(rates)) > 1, "equal rates would test nothing"
        centre, sd = mean(rates), stdev(rates)
        low, high = (centre + sign * T2 * sd / math.sqrt(3) for sign in (-1, 1))
        expected = (
            f"{side} {100 * centre:.1f}% [{100 * max(0, low):.1f}, {100 * min(1, high):.1f}] "
            f"{100 * min(rates):.1f}% to {100 * max(rates):.1f}% {100 * sd:.1f}pp"
        )
        assert expected in lines_of(said)
    both = [stored(folder, f"seed-{seed}") for seed in (1, 2, 3)]
    gains = [one["final"]["pass@1"]["value"] - one["baseline"]["pass@1"]["value"] for one in both]
    centre, sd = mean(gains), stdev(gains)
    low, high = (centre + sign * T2 * sd / math.sqrt(3) for sign in (-1, 1))
    assert any(
        line.startswith(f"after minus before {100 * centre:+.1f}pp [{100 * low:+.1f}, {100 * high:+.1f}] ")
        and " p = " in line
        for line in lines_of(said)
    )
    one = stored(folder, "seed-2")
    own = [f"{100 * v['value']:.1f}% [{100 * v['low']:.1f}, {100 * v['high']:.1f}]" for v in
           (one["baseline"]["pass@1"], one["final"]["pass@1"])]  # fmt: skip
    assert any(line.startswith(f"seed 2 {own[0]} {own[1]} 0:0") for line in lines_of(said))
    assert "3 of 3 runs finished" in said and "4 held-out tasks x 4 samples" in said


def test_the_files_hold_what_the_table_says(folder: Path) -> None:
    plan = planned("seeds=1..2", "training.group_size=4,8")
    make_runs(plan)
    summary = summarize(plan)
    write_report(plan.folder, summary)
    place = folder / "runs" / "mock-study"
    kept = json.loads((place / "summary.json").read_text())
    runs = {found["run"]: found for found in kept["runs"]}
    assert set(runs) == {"group_size-4_seed-1", "group_size-8_seed-1", "group_size-4_seed-2", "group_size-8_seed-2"}
    for name, found in runs.items():
        own = stored(folder, name)
        assert found["weights_sha256"] == own["weights_sha256"] and found["state"] == "finished"
        assert found["after"]["value"] == pytest.approx(own["final"]["pass@1"]["value"], rel=1e-5)
        assert found["seconds"] == pytest.approx(own["seconds"], rel=1e-5)
        assert found["pass@k"]["after"] == pytest.approx(own["final"]["pass@4"]["value"], rel=1e-5)
        rows = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
        assert found["entropy"] == pytest.approx(mean(row["entropy"] for row in rows[-5:]), rel=1e-5)
    rates = {name: found["after"]["value"] for name, found in runs.items()}
    difference = [rates[f"group_size-8_seed-{seed}"] - rates[f"group_size-4_seed-{seed}"] for seed in (1, 2)]
    assert kept["comparisons"][0]["after"]["mean"] == pytest.approx(mean(difference), abs=1e-5)
    assert kept["machine"]["cores"] >= 1 and kept["machine"]["packages"]["numpy"]
    assert study_table(summary) in (place / "table.md").read_text()
    with Image.open(place / "study.png") as picture:
        seen = {color for _, color in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in (BEFORE, AFTER)} <= seen


def test_levels_and_watched_verifiers_have_their_own_statistics(folder: Path) -> None:
    """A run's `by_level` as a run of arithmetic writes it, and a watched verifier, put into two finished runs."""
    plan = planned("seeds=1..2")
    make_runs(plan)
    for seed, rate in ((1, 0.25), (2, 0.75)):
        path = folder / "runs" / "mock-study" / f"seed-{seed}" / "summary.json"
        summary = json.loads(path.read_text())
        side = {"pass@1": {"value": rate, "low": 0.0, "high": 1.0}}
        summary["by_level"] = {"hard": {"tasks": 4, "baseline": side, "final": side}}
        summary["baseline"]["watched/lenient"] = {"value": rate + 0.25, "low": 0.0, "high": 1.0}
        summary["final"]["watched/lenient"] = {"value": rate, "low": 0.0, "high": 1.0}
        path.write_text(json.dumps(summary))
    summary = summarize(plan)
    assert summary["variants"][0]["watched"]["lenient"]["before"]["mean"] == 0.75
    assert summary["runs"][1]["watched"] == {"lenient": {"before": 1.0, "after": 0.75}}
    assert "watched lenient 75.0% [0.0, 100.0] 50.0% to 100.0% 35.4pp" in lines_of(study_table(summary))
    assert summary["variants"][0]["by_level"]["hard"]["after"]["mean"] == 0.5
    assert summary["runs"][0]["by_level"] == {"hard": {"before": 0.25, "after": 0.25}}
    assert "level hard 50.0% [0.0, 100.0] 25.0% to 75.0% 35.4pp" in lines_of(study_table(summary))


def test_a_run_of_a_config_file_that_changed_meanwhile_is_in_no_statistic(folder: Path) -> None:
    """Each run composes the config anew: an edit while a study runs must not go unseen."""
    plan = planned("seeds=1..2")
    make_runs(plan, "seed-2")
    (folder / "mock.yaml").write_text(MOCK.replace("group_size: 4", "group_size: 8"))
    make_runs(plan, "seed-1")
    summary = summarize(plan)
    first, second = summary["runs"]
    assert first["state"] == "finished" and second["state"] == "failed" and summary["variants"][0]["finished"] == 1
    assert "another config than the study's (training.group_size)" in second["reason"]


def test_a_run_that_is_missing_is_named_and_no_number_is_made_of_it(folder: Path) -> None:
    """One failed, one was not reached: the statistics say over how many they are, one seed has no interval."""
    plan = planned("seeds=1..4", "training.group_size=4,8")
    names = [planned_run.name for planned_run in plan.runs]
    make_runs(plan, *names[3:7])  # left: seed 1 of both, seed 2 of the first, seed 4 of the second
    log = log_file(plan.folder, names[3])
    begin_attempt(log, names[3])
    record_failure(log, "no room on the disk")
    summary = summarize(plan)
    table = study_table(summary)
    lines = lines_of(table)
    assert "training.group_size=4 (2 of 4 runs finished)" in lines and "4 of 8 runs finished" in table
    assert "the statistics are over the 2 finished runs" in lines
    assert "seed 2 failed: no room on the disk" in lines and lines.count("seed 3 not finished") == 2
    assert any("1 seed finished in both: no interval, no test" in line for line in lines)
    assert summary["comparisons"][0]["after"]["n"] == 1


def test_one_seed_has_no_interval_and_no_run_no_statistics(folder: Path) -> None:
    plan = planned("seeds=1")
    assert "no run is finished: no statistics" in lines_of(study_table(summarize(plan)))
    make_runs(plan)
    summary = summarize(plan)
    rate = 100 * stored(folder, "seed-1")["final"]["pass@1"]["value"]
    lines = lines_of(study_table(summary))
    assert f"after {rate:.1f}% (no interval)" in lines and any("one seed" in line for line in lines)
    write_report(plan.folder, summary)


def judge(*differences: float) -> str:
    pairs = dict(enumerate(differences))
    return " ".join(judge_comparison(compare_pairs(dict.fromkeys(pairs, 0.0), pairs)))


def test_a_spread_that_is_too_wide_is_said_with_the_seeds_it_would_take() -> None:
    """10 differences of mean 0.5 sd and 1 sd: power tables name 34 and 10 seeds."""
    spread = [math.sqrt(0.9) * sign / 100 for sign in (1, -1)] * 5  # sd 0.01, mean 0
    said = judge(*(value + 0.005 for value in spread))
    assert "contains 0" in said and "About 34 seeds" in said and "10 seeds show one of 1.0pp or more" in said
    assert "contains 0" not in judge(*(value + 0.01 for value in spread))
    assert "More than 1,000 seeds" in judge(*(value + 0.0001 for value in spread))


def test_too_few_seeds_for_a_small_p_and_equal_results_are_said() -> None:
    assert "With 5 seeds p cannot be below 0.0625" in judge(0.1, 0.11, 0.1, 0.11, 0.1)
    assert "cannot be below" not in judge(0.1, 0.11, 0.1, 0.11, 0.1, 0.11)
    assert judge(0.0, 0.0, 0.0) == "equal for every seed"


def rows(step: int, count: int, **metrics: float) -> list[dict[str, Any]]:
    learning = {"updates": 1.0, "reward": 0.5, "reward/min": 0.0, "reward/max": 1.0, "env/all/correct": 0.5}
    named = {key.replace("__", "/"): value for key, value in metrics.items()}
    return [{"phase": "rl", "step": n, **learning, **named} for n in range(step, step + count)]


def test_alarms_are_the_stall_of_the_run_and_the_problems_of_its_end(tmp_path: Path) -> None:
    """Ten steps without an update stall at the tenth; later steps that learn leave no other alarm."""
    idle = rows(0, 10, updates=0.0)
    assert [(alarm["code"], alarm["step"]) for alarm in find_alarms(tmp_path, [*idle, *rows(10, 30)])] == [("stall", 9)]
    assert find_alarms(tmp_path, rows(0, 30)) == []
    truncated = find_alarms(tmp_path, rows(0, 30, completions__clipped_ratio=0.9))
    assert [alarm["code"] for alarm in truncated] == ["truncated"] and "90%" in truncated[0]["fact"]


def test_a_run_with_damaged_metrics_is_not_counted(folder: Path) -> None:
    plan = planned("seeds=1")
    make_runs(plan)
    rows = folder / "runs" / "mock-study" / "seed-1" / "metrics.jsonl"
    rows.write_text("nonsense\n" + rows.read_text())
    found = summarize(plan)["runs"][0]
    assert found["state"] == "failed" and "metrics.jsonl" in found["reason"]


def test_the_reason_of_a_failure_is_read_from_the_log_of_the_last_attempt(tmp_path: Path) -> None:
    """It is there for a later study too; a new attempt has none, and an error that a killed study never saw counts."""
    log = tmp_path / "seed-1.log"
    assert read_failure(log) == ""
    begin_attempt(log, "seed-1")
    assert read_failure(log) == ""
    record_failure(log, "killed by SIGKILL")
    assert read_failure(log) == "killed by SIGKILL"
    begin_attempt(log, "seed-1")
    log.write_text(log.read_text() + "rlvr: loading the model ...\nrl: 5 steps\nrlvr: warning: a long step\n")
    assert read_failure(log) == ""
    log.write_text(log.read_text() + "rlvr: the verifier failed\nmore about it\nOSError: no room\n")
    assert read_failure(log) == "the verifier failed ... OSError: no room"
    begin_attempt(log, "seed-1")
    log.write_text(log.read_text() + "x" * (32 << 10) + "\nstopped; the same command goes on from here\n")
    assert read_failure(log) == ""


def test_each_run_has_the_machine_that_it_was_made_with(folder: Path) -> None:
    plan = planned("seeds=1", "training.steps=2")
    make_runs(plan)
    [found] = summarize(plan)["runs"]
    assert found["machine"] == stored(folder, "seed-1")["machine"] and found["steps"] == 2 and found["stopped"] == ""
    assert found["machine"]["numpy"] == np.__version__ and found["machine"]["cpu"]
    assert found["machine"]["rlvr"] == describe_code()["rlvr"]


def test_runs_of_several_versions_of_the_code_are_named(folder: Path) -> None:
    plan = planned("seeds=1..2", "training.steps=2")
    make_runs(plan)
    assert "several versions" not in study_table(summarize(plan))
    path = folder / "runs" / "mock-study" / "seed-2" / "summary.json"
    path.write_text(path.read_text().replace(describe_code()["rlvr"], "0.0.9 (abc)"))
    assert f"several versions of rlvr (0.0.9 (abc), {describe_code()['rlvr']})" in study_table(summarize(plan))
