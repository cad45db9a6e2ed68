"""What the study of all algorithms says of its runs: by hand, and no conclusion beyond the intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.algorithm_report import compare_variants, conclude, format_results, write_results
from benchmarks.algorithm_results import describe_task, dump_results, load_results, make_results
from rlvr.core.machine import describe_code
from rlvr.studies.run_log import begin_attempt, record_failure
from rlvr.studies.study_folder import log_file
from tests.kit.study_runs import MOCK, make_runs, planned


def a_run(variant: str, seed: int, before: float, after: float, **other: Any) -> dict[str, Any]:
    return {
        "variant": variant,
        "seed": seed,
        "state": "finished",
        "pass@1": [before, after],
        "pass@k": [0.75, 0.9],
        "entropy": 0.25,
        "seconds": 20.0,
        "has_moved": True,
        "is_diverged": False,
        "alarms": [],
        **other,
    }


def a_study(*runs: dict[str, Any]) -> dict[str, Any]:
    names = list(dict.fromkeys(run["variant"] for run in runs))
    task = {
        "overrides": {name: [] for name in names},
        "k": 8,
        "completions": 7680,
        "tasks": 200,
        "samples": 8,
        "start_seconds": [40.0, 50.0],
        "runs": list(runs),
    }
    return make_results("algorithms-study", (1, 2, 3), {"arithmetic": task})


STARTS = (0.2, 0.3, 0.4)
STUDY = a_study(
    *(a_run("grpo", seed, STARTS[seed - 1], after) for seed, after in ((1, 0.6), (2, 0.7), (3, 0.9))),
    *(a_run("raft", seed, STARTS[seed - 1], after) for seed, after in ((1, 0.5), (2, 0.5), (3, 0.6))),
    *(a_run("dpo", seed, STARTS[seed - 1], after) for seed, after in ((1, 0.5), (2, 0.6), (3, 0.8))),
    *(a_run("ppo", seed, STARTS[seed - 1], after) for seed, after in ((1, 0.6), (2, 0.7), (3, 0.9))),
    *(a_run("equal_rewards", seed, STARTS[seed - 1], STARTS[seed - 1], has_moved=False) for seed in (1, 2)),
)


def rows(results: dict[str, Any]) -> dict[str, list[str]]:
    """The cells of each row of the table, by variant."""
    lines = [line.strip("| ").split(" | ") for line in format_results(results).splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


def test_the_table_has_means_and_intervals_over_seeds_paired_with_the_reference() -> None:
    """t(2) = 4.302653. grpo ends at .6 .7 .9 (sd .152753) and gains .4 .4 .5 (sd .057735); raft less grpo is -.1 -.2
    -.3 (sd .1, t = 3.4641): p = 1 - t / sqrt(t^2 + 2) = .0741799, the smallest of four, times four."""
    table = rows(STUDY)
    assert table["grpo"] == ["3", "73.3 % [35.4, 100.0]", "+43.3 [+29.0, +57.7]", "", "", "90.0 % [90.0, 90.0]",
                             "0.250", "20", "0 of 3"]  # fmt: skip
    assert table["raft"][2:5] == ["+23.3 [+9.0, +37.7]", "-20.0 [-44.8, +4.8]", "0.297"]
    assert table["equal_rewards"][0] == "2" and table["equal_rewards"][-1] == "0 of 2"
    assert format_results(STUDY).startswith("14 runs, which took 6.2 minutes")  # 14 x 20 s + 40 s + 50 s = 370 s
    slow = {**STUDY, "tasks": {name: {**task, "start_seconds": [7000.0]} for name, task in STUDY["tasks"].items()}}
    assert format_results(slow).startswith("14 runs, which took 2.0 hours")  # 7,280 s
    assert "3 seeds; every run learns from 7,680 completions. Start: pass@1 30.0 % [5.2, 54.8]" in format_results(STUDY)


def test_differences_that_are_equal_but_for_rounding_have_no_tiny_p() -> None:
    """.5 - .6, .6 - .7 and .8 - .9 differ in their last bits; sign flips give 1/4, times three tests."""
    dpo = next(result for result in compare_variants(STUDY["tasks"])["arithmetic"] if result.name == "dpo")
    assert dpo.compared["pass@1"].p_value == pytest.approx(0.75)


def test_conclusions_say_what_the_intervals_allow() -> None:
    assert conclude(compare_variants(STUDY["tasks"])["arithmetic"], 8) == [
        "The pass rate rose (the interval of the gain is above 0): `grpo`, `raft`, `dpo`, `ppo`.",
        "No clear change of the pass rate (the interval holds 0): `equal_rewards`.",
        "Equal to `grpo` in pass@1 for every seed: `ppo`.",
        "Not told apart from `grpo` in pass@1 with 3 seeds: `raft`, `dpo`, `equal_rewards`.",
        "Made no step, the weights at the end are those of the start: `equal_rewards`.",
    ]


def test_a_clear_difference_and_a_failure_are_named() -> None:
    """Over four seeds -.30 -.31 -.29 -.30: t = 73, p = 5e-6, twice that with two tests."""
    after = ((1, 0.4), (2, 0.39), (3, 0.41), (4, 0.4))
    study = a_study(
        *(a_run("grpo", seed, 0.3, 0.7) for seed in (1, 2, 3, 4)),
        *(a_run("raft", seed, 0.6, rate, is_diverged=True) for seed, rate in after),
        a_run("dpo", 1, 0.3, 0.6),
        {"variant": "dpo", "seed": 2, "state": "failed", "reason": "not finite", "is_diverged": True},
    )
    said = conclude(compare_variants(study["tasks"])["arithmetic"], 8)
    assert "Below `grpo` in pass@1 (corrected p below 0.05): `raft`." in said
    assert "The pass rate fell (the interval is below 0): `raft`." in said
    assert "`dpo`, seed 2, failed: not finite" in said
    table = rows(study)
    assert table["raft"][4] == "< 0.001" and table["raft"][-1] == "4 of 4"
    assert table["dpo"][:5] == ["1", "60.0 %", "+30.0", "-10.0", ""] and table["dpo"][-1] == "1 of 2"


def test_a_pair_is_compared_beside_the_reference() -> None:
    """.6 .5 .5 less .7 .7 .8: the differences of `raft` above, without a correction for several tests."""
    study = a_study(
        *(a_run("grpo", seed, 0.3, 0.7) for seed in (1, 2, 3)),
        *(a_run("dr_grpo", seed, 0.3, after) for seed, after in ((1, 0.7), (2, 0.7), (3, 0.8))),
        *(a_run("noise_20", seed, 0.3, after) for seed, after in ((1, 0.6), (2, 0.5), (3, 0.5))),
    )
    said = conclude(compare_variants(study["tasks"])["arithmetic"], 8)
    assert "`noise_20` minus `dr_grpo`: -20.0 [-44.8, +4.8], p 0.074 (of this pair alone)." in said
    assert not any("noise_20_corrected" in sentence for sentence in said)


def test_variety_is_compared_as_the_pass_rate_is() -> None:
    study = a_study(
        *(a_run("grpo", seed, 0.3, 0.7, entropy=0.2) for seed in (1, 2, 3)),
        *(
            a_run("clip_cov", seed, 0.3, 0.7, entropy=entropy, **{"pass@k": [0.75, 0.8]})
            for seed, entropy in ((1, 0.3), (2, 0.301), (3, 0.299))
        ),
    )
    said = conclude(compare_variants(study["tasks"])["arithmetic"], 8)
    assert "Above `grpo` in entropy (corrected p below 0.05): `clip_cov`." in said
    assert "Equal to `grpo` in pass@1 for every seed: `clip_cov`." in said
    assert not any("in pass@8" in sentence for sentence in said)  # equal differences of three seeds: p = 1/4


def test_the_entropy_of_another_temperature_is_not_compared() -> None:
    study = a_study(
        *(a_run("grpo", seed, 0.3, 0.7, entropy=0.2) for seed in (1, 2, 3)),
        *(a_run(name, seed, 0.3, 0.7, entropy=0.1 + seed / 1000) for name in ("a", "b") for seed in (1, 2, 3)),
    )
    task = study["tasks"]["arithmetic"]
    task["overrides"]["a"] = ["training.temperature_end=0.7"]
    assert "Below `grpo` in entropy (corrected p below 0.05): `b`." in conclude(
        compare_variants(study["tasks"])["arithmetic"], 8
    )


def test_runs_that_are_no_fair_comparison_are_named() -> None:
    """Other code, unknown if a run is older; a seed whose fine-tuning was made anew between two of its runs."""
    study = a_study(
        a_run("grpo", 1, 0.3, 0.7, code="0.2 (a)"),
        a_run("raft", 1, 0.3, 0.7),
        a_run("dpo", 1, 0.25, 0.7, code="0.2 (b)"),
        a_run("grpo", 2, 0.2, 0.7, code="0.2 (a)"),
    )
    said = " ".join(conclude(compare_variants(study["tasks"])["arithmetic"], 8))
    assert "several versions of rlvr (0.2 (a), 0.2 (b), unknown)" in said
    assert "Seed 1 began at several pass rates (25.0 %: `dpo`; 30.0 %: `grpo`, `raft`)" in said
    assert "Seed 2 began" not in said


def test_one_seed_concludes_nothing() -> None:
    said = conclude(compare_variants(a_study(a_run("grpo", 1, 0.3, 0.7))["tasks"])["arithmetic"], 8)
    assert said == ["One seed has no interval, so nothing can be concluded yet."]


def test_what_a_run_left_says_whether_it_moved_and_whether_it_fell_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run like its start has not moved; an interval below 0, an alarm of a broken policy and numbers that are not
    finite are divergence, and neither an interval that holds 0 nor a run that levels off is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mock.yaml").write_text(MOCK)
    start, plan = (planned("seeds=1", "training.steps=2", name=name) for name in ("begun", "compared"))
    make_runs(start)
    make_runs(plan)
    summary = plan.folder / "seed-1" / "summary.json"
    written = json.loads(summary.read_text())

    def describe(alarm: str = "stall", **changed: Any) -> dict[str, Any]:
        summary.write_text(json.dumps({**written, **changed}))
        monkeypatch.setattr("rlvr.studies.study_summary.find_alarms", lambda folder, rows: [{"code": alarm}])
        [found] = describe_task(start, plan)["runs"]
        return found

    holds, below = ({**written["change"], "low": -0.2, "high": high} for high in (0.1, -0.1))
    assert not describe(change=holds)["has_moved"] and describe(weights_sha256="other")["has_moved"]
    assert not describe(change=holds)["is_diverged"] and describe(change=below)["is_diverged"]
    for alarm in ("entropy_up", "entropy_gone", "gap", "large_update"):
        assert describe(alarm, change=holds)["is_diverged"]
    assert describe()["code"] == describe_code()["rlvr"]
    summary.unlink()
    log = log_file(plan.folder, "seed-1")
    begin_attempt(log, "seed-1")
    record_failure(log, "not finite")
    named = {"variant": "mock", "seed": 1, "state": "failed", "reason": "not finite"}
    assert describe_task(start, plan)["runs"] == [{**named, "is_diverged": False}]
    (plan.folder / "seed-1" / "failed-batch-000001.jsonl").touch()
    assert describe_task(start, plan)["runs"] == [{**named, "is_diverged": True}]


def test_the_files_of_a_study_are_read_back_and_those_of_another_version_refused(tmp_path: Path) -> None:
    write_results(tmp_path, STUDY)
    assert load_results(tmp_path / "results.json") == STUDY
    assert (tmp_path / "results.json").read_text().count('\n{"variant"') == 14
    assert "| `grpo` | 3 |" in (tmp_path / "table.md").read_text()
    with Image.open(tmp_path / "study.png") as picture:
        assert min(picture.size) > 200
    (tmp_path / "results.json").write_text(dump_results({**STUDY, "format": 0}))
    with pytest.raises(ValueError, match=r"format 0, expected 1.*same command"):
        load_results(tmp_path / "results.json")
