"""`rlvr bench` measures in turns, each side in its own process, and reports what it could not measure."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import accuracy, report
from benchmarks.catalog import BENCHMARKS, select_cases
from benchmarks.end_to_end import case, token_passes
from benchmarks.measure import BenchmarkCase, BenchSettings, CaseResult, SideResult, TurnResult, measure
from benchmarks.sandbox import read_programs
from benchmarks.step_shape import SHORT
from benchmarks.trl_peer import TrlTurn
from benchmarks.workloads import OrderedPrompts, even_words, last_word, near_sum, sums
from rlvr.cli.main import run
from rlvr.cli.measure_commands import import_benchmarks
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from tests.kit import bench_sides
from tests.kit.bench_sides import breaks, counting

RESULT = CaseResult(
    BenchmarkCase(
        "c",
        "samples",
        "work",
        bench_sides.fixed_turn,
        {"slow": bench_sides.fixed_turn, "gone": bench_sides.fixed_turn},
        aim=3.0,
    ),
    {
        "rlvr": SideResult(
            [TurnResult(12, 2.0, 30.0), TurnResult(12, 3.0, 30.0), TurnResult(12, 4.0, 36.0)], peak_bytes=3 << 20
        ),
        "slow": SideResult(
            [TurnResult(6, 3.0, 60.0), TurnResult(6, 3.0, 60.0), TurnResult(6, 2.0, 60.0)], peak_bytes=5 << 20
        ),
        "gone": SideResult(absent="gone: not installed; pip install 'rlvr[bench]'"),
    },
)


def ignore(text: str) -> None:
    """Drop the progress."""


def test_sides_take_turns_in_processes_of_their_own_with_the_pinned_threads():
    progress: list[str] = []
    result = measure(bench_sides.case(other=partial(counting, 6, 3.0, 60.0)), 2, 1, progress.append)
    ours, other = result.sides["rlvr"], result.sides["other"]
    assert (len(ours.turns), len(other.turns)) == (2, 2)
    assert [done.facts["turn"] for done in ours.turns] == [2, 3]  # the warm-up was the first
    assert ours.warm is not None and ours.warm.facts["turn"] == 1
    processes = {done.facts["process"] for side in (ours, other) for done in side.turns}
    assert len(processes) == 2 and os.getpid() not in processes
    assert {done.facts["threads"] for done in ours.turns} == {1.0}
    assert {done.facts["usual start"] for done in ours.turns} == {1.0}  # of processes that a peer starts
    assert result.ratios("other") == [3.0, 3.0]  # 6 a second over 2
    assert result.bound("other") == 4.0  # 10 a unit over 2.5
    assert 0 < ours.ready_bytes <= ours.peak_bytes
    assert progress == ["sums: round 1/2: rlvr 6, other 2 sums/s", "sums: round 2/2: rlvr 6, other 2 sums/s"]
    assert os.environ.get("OMP_NUM_THREADS") == THREADS


THREADS = os.environ.get("OMP_NUM_THREADS")


def test_a_case_whose_turns_are_long_has_fewer_rounds():
    case = replace(bench_sides.case(), most_rounds=2)
    assert [len(measure(case, rounds, 1, ignore).sides["rlvr"].turns) for rounds in (1, 5)] == [1, 2]


def test_a_turn_that_does_not_time_itself_is_timed():
    result = measure(BenchmarkCase("c", "units", "", bench_sides.fixed_turn, {}), 1, 1, ignore)
    assert result.sides["rlvr"].turns[0].seconds is not None and result.sides["rlvr"].turns[0].seconds > 0


def test_a_missing_peer_is_skipped_by_name_and_the_others_go_on():
    progress: list[str] = []
    result = measure(bench_sides.case(peer=bench_sides.missing, beast=bench_sides.absent), 1, 1, progress.append)
    peer, beast = result.sides["peer"], result.sides["beast"]
    assert peer.absent == "a_package_that_nobody_has: not installed; pip install 'rlvr[bench]'"
    assert beast.absent == "this machine has no unicorn"
    assert (peer.failed, beast.failed) == (False, False)
    assert len(result.sides["rlvr"].turns) == 1
    assert f"peer is left out: {peer.absent}" in progress


@pytest.mark.parametrize(
    ("side", "turns", "reason"),
    [
        (partial(breaks, 1), 0, "RuntimeError: no more"),
        (partial(breaks, 3), 1, "RuntimeError: no more"),
        (partial(breaks, 2, "dies"), 0, "its process ended with exit code 3; its last words: something dreadful"),
    ],
    ids=["warming up", "later", "dead"],
)
def test_a_failing_side_is_reported_with_its_reason_and_keeps_its_turns(side: partial, turns: int, reason: str):
    result = measure(bench_sides.case(peer=side), 2, 1, ignore)
    peer = result.sides["peer"]
    assert (len(peer.turns), peer.absent, peer.failed) == (turns, reason, True)
    assert len(result.sides["rlvr"].turns) == 2


def test_no_peer_is_tried_where_ours_fails():
    result = measure(
        replace(bench_sides.case(peer=partial(counting, 6, 3.0, 60.0)), ours=partial(breaks, 1)), 2, 1, ignore
    )
    assert result.sides["rlvr"].absent == "RuntimeError: no more"
    assert (result.sides["peer"].absent, result.sides["peer"].warm) == ("not tried: rlvr failed", None)


def test_the_table_has_medians_ratios_bounds_and_the_verdict_on_the_aim():
    """Rates 6, 4, 3 and 2, 2, 3 a second: ratios 3, 2, 1. Costs a unit 2.5, 2.5, 3 and 10."""
    lines = report.table([RESULT]).splitlines()
    assert lines[2] == "| c | rlvr | 4 samples/s |  |  | 3 | 3 MiB |"
    assert lines[3] == "|  | slow | 2 samples/s | 2 (1 to 3) | 4 | 3 | 5 MiB |"
    assert lines[4] == "|  | gone | gone: not installed; pip install 'rlvr[bench]' |  |  |  |  |"
    assert lines[-1] == "- **c**: work. Against the faster peer, slow: 2 x; aim 3 x: missed (1 of 3 rounds reach it)."
    near = replace(RESULT, case=replace(RESULT.case, aim=2.5))  # ratios 3, 2, 1
    assert report.table([near]).splitlines()[-1].endswith("slow: 2 x; aim 2.5 x: missed (1 of 3 rounds reach it).")
    share = replace(RESULT, case=replace(RESULT.case, aim=0.5, of_bound=True))
    verdict = "slow: 2 x; aim 0.5 of the bound, 2 x: met (2 of 3 rounds reach it)."
    assert report.table([share]).splitlines()[-1].endswith(verdict)
    growth = BenchmarkCase(
        "g", "tokens", "work", bench_sides.fixed_turn, {"4x": bench_sides.fixed_turn}, ours_name="1x", growth=True
    )
    grown = CaseResult(growth, {"1x": SideResult([TurnResult(4, 2.0)]), "4x": SideResult([TurnResult(16, 12.0)])})
    assert "A unit takes 1.5 times as long at worst as at 1x (aim: at most 1)" in report.table([grown])


def test_everything_measured_is_in_the_json_and_the_curve_is_drawn(tmp_path: Path):
    result = measure(replace(bench_sides.case(peer=bench_sides.missing), curve="turns"), 2, 1, ignore)
    files = report.write("sums", [result], BenchSettings(quick=True), report.machine(), tmp_path)
    assert [path.name for path in files] == ["sums.md", "sums.json", "sums-sums.png"]
    stored = json.loads((tmp_path / "sums.json").read_text())
    assert (stored["schema"], stored["name"], stored["machine"]["quick"]) == (1, "sums", True)
    assert {"cpu", "cores", "memory_gib", "packages", "load", "load_after", "threads", "dtype"} <= set(
        stored["machine"]
    )
    (kept,) = stored["cases"]
    assert kept["sides"]["peer"]["absent"].startswith("a_package_that_nobody_has")
    ours = kept["sides"]["rlvr"]
    assert (ours["rate"], [turn["points"] for turn in ours["turns"]]) == (6.0, [[[2.0, 2.0]], [[2.0, 3.0]]])
    text = (tmp_path / "sums.md").read_text()
    assert "load average" in text and "![sums-sums](sums-sums.png)" in text
    assert (tmp_path / "sums-sums.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["end-to-edn"], "no benchmark 'end-to-edn' (did you mean 'end-to-end'?)"),
        (["end-to-end/shrot"], "end-to-end has no case 'shrot' (did you mean 'short'?)"),
        (["--threads", "0"], "--threads 0: expected 1 to "),
        (["--threads", "9999"], "--threads 9999: expected 1 to "),
        (["--rounds", "0"], "--rounds 0: expected at least 1"),
        (["--dtype", "float16"], "--dtype float16: expected float32 or bfloat16"),
        (["--model", "/nowhere"], "--model /nowhere: expected a folder with a model and its tokenizer"),
        (["sandbox", "--dtype", "bfloat16"], "--dtype has no effect on sandbox"),
        (["sandbox", "--out", __file__], "is a file; give a folder"),
        (["sandbox", "--data", "/nowhere"], "--data /nowhere: expected a file"),
        (["sandbox", "--data", __file__, "--list"], "expected rows of MBPP"),
        (["growth", "--data", __file__], "--data has no effect on growth"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
):
    assert run(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture):
    arguments = ["mathematics/numbers", "--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    assert run(["bench", *arguments]) == 0
    assert "| numbers | rlvr |" in capsys.readouterr().out
    (case,) = json.loads((tmp_path / "mathematics-numbers.json").read_text())["cases"]
    assert [case["name"], case["sides"]["rlvr"]["turns"][0]["facts"]] == ["numbers", {"share called right": 1.0}]


def test_without_a_clone_the_command_says_where_it_looked_and_how_to_get_one(tmp_path: Path):
    """An installed wheel has no `benchmarks` beside `rlvr`, and the current folder has none either."""
    site, here = tmp_path / "site-packages", tmp_path / "here"
    (site / "rlvr").mkdir(parents=True)
    with pytest.raises(ValueError) as caught:
        import_benchmarks(site, here)
    assert all(part in str(caught.value) for part in (f"{site}/benchmarks", f"{here}/benchmarks", "git clone"))


@pytest.mark.slow
def test_mathematics_is_measured_on_rows_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Two rows of MATH-500 and two of GSM8K; with the next row's gold a solution is wrong."""
    rows = [{"solution": f"so \\boxed{{{n}}}", "answer": str(n)} for n in (3, 4)]
    rows += [{"question": "?", "answer": f"2 + 3\n#### {n}"} for n in (5, 6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["mathematics", "--data", str(tmp_path / "rows.jsonl"), "--quick", "--rounds", "1", "--out", str(tmp_path)]
    assert run(["bench", *words]) == 0
    own, shifted = json.loads((tmp_path / "mathematics.json").read_text())["cases"]
    shares = [case["sides"]["rlvr"]["turns"][0]["facts"]["share called right"] for case in (own, shifted)]
    assert shares == [1.0, 0.0]


def test_programs_of_mbpp_are_those_that_every_harness_can_judge(tmp_path: Path):
    plain = {"code": "def f(x):\n    return x\n", "test_list": [f"assert f({n}) == {n}" for n in (1, 2, 3)]}
    rows = [
        plain,
        {**plain, "test_setup_code": "import os"},
        {**plain, "test_list": plain["test_list"][:2]},
        {**plain, "test_list": ["assert f(1) < 2", *plain["test_list"][1:]]},
        {**plain, "code": "def f(x):\n    return 0\n"},
    ]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (program,) = read_programs(tmp_path / "mbpp.jsonl", slow_s=10.0)  # whatever else the machine does
    assert (program.name, program.inputs, program.expected) == ("f", ((1,), (2,), (3,)), (1, 2, 3))


@pytest.mark.slow
def test_ctrl_c_keeps_finished_measurements_and_leaves_no_process(tmp_path: Path):
    arguments = [
        "bench",
        "mathematics/numbers",
        "--quick",
        "--rounds",
        "100000",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "rlvr", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "round 2/" in line:
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (case,) = json.loads((tmp_path / "mathematics-numbers.json").read_text())["cases"]
    assert case["interrupted"] and len(case["sides"]["rlvr"]["turns"]) >= 2
    assert re.search(r"Stopped after \d+ rounds: rough\.", (tmp_path / "mathematics-numbers.md").read_text())
    assert wait_until_ended(process.pid)


def wait_until_ended(group: int) -> bool:
    """Whether all processes of a group end within seconds; multiprocessing's resource tracker ends last."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("quick", [True, False])
def test_every_benchmark_has_cases_whose_sides_can_cross_into_a_process(quick: bool):
    for name, cases in select_cases(BENCHMARKS, BenchSettings(quick=quick)):
        assert cases, name
        assert len({one.name for one in cases}) == len(cases)
        for one in cases:
            assert pickle.loads(pickle.dumps(list(one.sides.values())))


def test_the_work_bound_counts_prompts_once_for_us_and_padding_for_the_peer():
    """A prompt of 5 with answers of 3 and 2, one of 4 with answers of 1 and 4."""
    assert token_passes([(5, [3, 2]), (4, [1, 4])], 1) == 5 + 2 + 1 + 4 + 0 + 3
    assert token_passes([(5, [3, 2])], 3) == 3 * (5 + 2 + 1)
    prompts, answers = [5, 5, 4, 4], [3, 2, 1, 4]
    assert TrlTurn(SHORT, continuous=False)._computed(prompts, answers) == 4 * (5 + 3) + 3 * 4 * (5 + 4)
    assert TrlTurn(SHORT, continuous=True)._computed(prompts, answers) == 18 + 6 + 3 * 4 * (5 + 4)


def test_both_sides_get_the_prompts_in_the_order_of_the_list():
    tasks = sums(5)
    curriculum = Curriculum(OrderedPrompts("sums", tasks, [], ""), CurriculumOptions(), seed=3)
    drawn = [*curriculum.tasks(3, step=0), *curriculum.tasks(3, step=1)]
    assert [task.id for task in drawn] == [f"sum-{i}" for i in (0, 1, 2, 3, 4, 0)]


def test_the_rewards_of_the_workloads():
    judged = near_sum(["a"] * 5, ["905", "-5", "", "1000", "12345"], ["1000", "90", "0", "1100", "12345"])
    assert judged == [1, 1, 0, 0, 0]
    assert even_words(["a"] * 3, ["baba ban bobo", "baba ban", ""]) == [1, 0, 0]
    assert last_word(["a"] * 3, ["= 8 7 + = 2", "= 8 7 + = 12", "2"], ["2", "2", "2"]) == [1, 0, 0]


def test_the_report_says_when_a_curve_first_reaches_each_target():
    """The second turn's seconds count from the end of the first."""
    side = SideResult(
        [TurnResult(1, 10.0, points=((10.0, 0.8),))], TurnResult(1, 20.0, points=((0.0, 0.4), (20.0, 0.7)))
    )
    assert side.curve == [(0.0, 0.4), (20.0, 0.7), (30.0, 0.8)]
    assert report._milestones(side.curve, (0.4, 0.75, 0.9)) == [
        *("0.4 at first", "0.4 after 0 s", "0.75 after 30 s", "0.9 not reached", "0.8 after 30 s")
    ]


@pytest.mark.slow
def test_whole_steps_beside_trl(tmp_path: Path):
    setting = BenchSettings(quick=True, scratch=tmp_path)
    shape = replace(SHORT, groups=4, size=2, steps=2, fine_tuning_steps=2)
    result = measure(case(setting, shape), 1, 1, ignore)
    ours, theirs = result.sides["rlvr"], result.sides["trl"]
    assert not ours.absent, ours.absent
    for side in (ours, *([] if "not installed" in theirs.absent else [theirs])):
        assert not side.failed, side.absent
        (done,) = side.turns
        assert done.units == 16 and len(done.points) == 2 and done.cost > 0
        seconds = [at for at, _ in done.points]
        assert 0 < seconds[0] < seconds[1] <= (done.seconds or 0)
    assert (tmp_path / "qwen-3m-2" / "model.safetensors").exists()  # made once, by the first side that asked


@pytest.mark.slow
def test_accuracy_over_time_beside_trl(tmp_path: Path):
    """Both sides start from the same weights, so that the first measurements are equal, and train for equal times."""
    setting = BenchSettings(quick=True, scratch=tmp_path)
    result = measure(accuracy.case(setting, seed=1, fine_tuning=3, parts=1, seconds=0.01), 1, 1, ignore)
    curves = [side.curve for side in result.sides.values() if "not installed" not in side.absent]
    assert not any(side.failed for side in result.sides.values()), [side.absent for side in result.sides.values()]
    for curve in curves:
        assert [len(curve), curve[0]] == [3, curves[0][0]] and 0 == curve[0][0] < curve[1][0] < curve[2][0]
