"""metrics.jsonl survives crashes, the view survives what models write, and the table and the curve show the numbers."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageColor

from rlvr.tracking import MetricsLog, RunConsole, evaluation_table, final_table, plot_curve, readable
from rlvr.tracking.picture_files import GREEN
from rlvr.tracking.run_report import duration, stored_summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# --- metrics.jsonl -----------------------------------------------------------------------------------------------


def row(step: int) -> dict[str, Any]:
    return {"phase": "rl", "step": step}


def test_rows_read_back_in_order_and_to_the_same_bits(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    rows = [{"phase": "rl", "step": i, "z": 0.1 + i / 3, "a": 1e-300} for i in range(3)]
    for row in rows:
        log.append(row)
    log.append({"phase": "rl", "step": 3, "numpy": np.float32(0.5), "nan": math.nan})
    log.sync()
    log.close()
    assert log.rows()[:3] == rows and list(log.rows()[0]) == ["phase", "step", "z", "a"]
    assert log.rows()[3]["numpy"] == 0.5 and math.isnan(log.rows()[3]["nan"])
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"phase": "rl", "step": 0, "z": 0.1, "a": 1e-300}\n')


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 60))
def test_a_file_cut_at_any_byte_loses_only_the_torn_row(tmp_path_factory: pytest.TempPathFactory, cut: int):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(5):
            log.append(row(step))
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole)
    kept = [row(step) for step in range(whole.count(b"\n"))]
    with MetricsLog(path) as log:
        assert log.rows() == kept
        log.append(row(99))
        assert log.rows() == [*kept, row(99)]


def test_keep_rewrites_atomically_and_appending_goes_on(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(4):
        log.append(row(step))
    with path.open("a") as file:
        file.write('{"phase": "rl", "step": 4, "rew')
    before = path.stat().st_ino
    log.keep(lambda kept: kept["step"] < 2)
    log.append(row(2))
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row(0), row(1), row(2)]
    assert path.stat().st_ino != before and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_keep_that_fails_leaves_the_file_as_it_was(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(row(0))
    log.close()
    with pytest.raises(KeyError):
        log.keep(lambda kept: kept["absent"])
    assert log.rows() == [row(0)]
    MetricsLog(tmp_path / "none.jsonl").keep(lambda row: True)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_broken_line_in_the_middle_is_named_and_a_last_line_of_zeros_is_dropped(tmp_path: Path):
    path, whole = tmp_path / "metrics.jsonl", json.dumps(row(1)).encode() + b"\n"
    path.write_bytes(whole + b"\0\0\0\n")
    assert MetricsLog(path).rows() == [row(1)]
    for broken in (b"broken", b"[" * 20_000):
        path.write_bytes(whole + broken + b"\n" + whole)
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON.*; delete the line"):
            MetricsLog(path).rows()


@pytest.mark.parametrize(
    "line",
    [
        *("[1]", "3", "null", '{"phase": "rl"}', '{"step": 1}', '{"phase": 1, "step": 1}'),
        *('{"phase": "rl", "step": 1e999}', '{"phase": "rl", "step": -1}', '{"phase": "rl", "step": true}'),
        *('{"phase": "rl", "step": 1.0}', '{"phase": "x", "step": 1}', '{"phase": "rl", "step": 1' + "0" * 400 + "}"),
    ],
)
def test_a_line_that_is_json_and_no_row_is_named_with_its_file(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(0)) + "\n" + line + "\n")
    log = MetricsLog(path, ("sft", "rl"))
    for read in (log.rows, lambda: log.keep(lambda kept: True)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .*; delete the line"):
            read()
    assert path.read_text().endswith(line + "\n")


# --- the view ----------------------------------------------------------------------------------------------------


def test_without_a_terminal_a_line_every_few_seconds_and_always_the_last_of_a_phase():
    out, clock = io.StringIO(), Clock()
    with RunConsole(out, clock=clock) as console:
        console.plan({"prompts": "4", "tokens per step": "1,024"})
        console.phase("rl", total=10, done=2)
        for done in range(3, 11):
            clock.now += 2
            console.step({"reward": done / 10, "frac_groups_with_signal": 0.75}, done)
    assert out.getvalue().splitlines() == [
        "plan",
        "  prompts          4",
        "  tokens per step  1,024",
        "rl: 10 steps, 2 done before",
        "rl 3/10  reward 0.300  groups with signal 75%  0:14 left",
        "rl 6/10  reward 0.600  groups with signal 75%  0:08 left",
        "rl 9/10  reward 0.900  groups with signal 75%  0:02 left",
        "rl 10/10  reward 1.000  groups with signal 75%  in 0:16",
    ]


def test_a_phase_that_ends_early_still_shows_its_last_step():
    out, clock = io.StringIO(), Clock()
    console = RunConsole(out, clock=clock)
    console.phase("warm-up", total=10)
    console.step({"loss": 2.0}, 1)
    console.step({"loss": 1.5}, 2)
    console.phase("rl", total=5)
    assert "warm-up 2/10  loss 1.5000" in out.getvalue()
    console.close()
    console.close()


def test_a_message_comes_after_the_step_before_it():
    """In plain lines a step may wait to be written; a warning or "stopped" must not overtake it."""
    out, clock = io.StringIO(), Clock()
    with RunConsole(out, clock=clock) as console:
        console.phase("rl", total=10)
        for done, say in ((1, console.note), (2, console.note), (3, console.warn)):
            console.step({"reward": done / 10}, done)
            say(f"after {done}")
    assert [line.partition("  ")[0] for line in out.getvalue().splitlines()] == [
        "rl: 10 steps", "rl 1/10", "after 1", "rl 2/10", "after 2", "rl 3/10", "warning: after 3"
    ]  # fmt: skip


def test_names_are_picked_trl_first_and_missing_ones_are_absent():
    out = io.StringIO()
    console = RunConsole(out)
    console.phase("rl", 1)
    console.step(
        {"reward": 0.5, "env/all/reward/total": 9.0, "env/all/correct": 0.453, "tokens_per_second": 8123.4, "x": 1}, 1
    )
    assert "reward 0.500  pass rate 45.3%  tokens/s 8,123  in" in out.getvalue()


def test_a_number_that_no_float_holds_is_left_out():
    out = io.StringIO()
    console = RunConsole(out)
    console.phase("rl", 1)
    console.step({"reward": 10**400, "env/all/correct": -(10**400), "loss": 1e308}, 1)
    assert "rl 1/1  loss 1" in out.getvalue() and "reward" not in out.getvalue()


HOSTILE = "\x1b]0;owned\x07[bold]x[/bold] [/] \r\n\u202eabc\u2028\x9b31m" + "A" * 5000 + "the end"


@pytest.mark.parametrize("live", [False, True])
def test_sampled_text_brings_no_control_codes_and_no_markup(live: bool):
    out = Terminal() if live else io.StringIO()
    with RunConsole(out, live=live) as console:
        console.phase("rl", 1)
        console.sample("3 5 + =", HOSTILE, "reward 1.0 [red]")
        console.step({"reward": 1.0}, 1)
        console.warn("[blink]careful[/blink]")
    text = out.getvalue()
    for code in ("\x1b]0", "\x07", "\r\n", "\u202e", "\u2028", "\x9b"):
        assert code not in text
    assert r"\x1b]0;owned\x07[bold]x[/bold]" in text and "[blink]careful[/blink]" in text
    assert "AAA ... AAA" in text.replace("\n", "") and text.count("A") < 2000
    assert live or ("\x1b" not in text and text.isprintable() is False and set(text) & {"\r", "\x08"} == set())


def test_a_long_plan_breaks_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    with RunConsole(out, live=True) as console:
        console.plan({"steps": "150 steps x 64 prompts x 16 completions = 153,600 completions", "seed": "1"})
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).splitlines()]
    assert [line for line in lines if line][:4] == [
        "plan",
        "  steps  150 steps x 64 prompts x 16",
        "         completions = 153,600",
        "         completions",
    ]


@pytest.mark.parametrize("live", [False, True])
def test_notes_and_warnings_are_shown_at_length_and_without_control_codes(live: bool):
    """They may quote a model: a reward's `raise ValueError(response)`. Line breaks stay line breaks."""
    out = Terminal() if live else io.StringIO()
    with RunConsole(out, live=live) as console:
        console.note(f"first\nsecond {HOSTILE}")
        console.warn(HOSTILE)
        console.plan({"reward": HOSTILE})
    text = out.getvalue()
    for code in ("\x1b]0", "\x07", "\r", "\u202e", "\u2028", "\x9b"):
        assert code not in text
    assert "first\nsecond " in text and "A" * 5000 + "the end" in text and r"\x1b]0;owned\x07" in text


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=400))
def test_readable_is_one_printable_line_of_bounded_length(text: str):
    shown = readable(text, limit=100)
    assert "\n" not in shown and "\x1b" not in shown and len(shown.splitlines()) <= 1
    assert len(shown) <= 10 * 106


def test_readable_keeps_letters_of_every_script_and_both_ends_of_a_long_text():
    assert readable("2 × 3 = ६, naïve नमस्ते 数") == "2 × 3 = ६, naïve नमस्ते 数"
    assert readable("a" * 200 + "b" * 200, limit=30) == "a" * 20 + " ... " + "b" * 10


def test_a_stream_of_a_small_encoding_gets_escapes_and_no_error():
    raw = io.BytesIO()
    with RunConsole(io.TextIOWrapper(raw, "ascii", write_through=True)) as console:
        console.note("π")
        console.phase("rl", 1)
        console.sample("π", "数", "1")
        console.step({}, 1)
        assert b"\\u03c0" in raw.getvalue() and b"\\u6570" in raw.getvalue()


def test_in_a_terminal_the_cursor_comes_back_after_ctrl_c():
    out = Terminal()
    with pytest.raises(KeyboardInterrupt), RunConsole(out, live=True) as console:
        console.phase("rl", 3)
        console.step({"reward": 0.5}, 1)
        raise KeyboardInterrupt
    text = out.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    assert "rl 1/3  reward 0.500" in text


def test_durations():
    assert [duration(s) for s in (0, 59.6, 3725, -1)] == ["0:00", "1:00", "1:02:05", "0:00"]


# --- the table and the curve -------------------------------------------------------------------------------------


def estimate(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


SUMMARY: dict[str, Any] = {
    "baseline": {
        "pass@1": estimate(0.08, 0.07, 0.09),
        "pass@8": estimate(0.3, 0.28, 0.32),
        "mean_reward": estimate(-0.15, -0.2, -0.1),
    },
    "final": {
        "pass@1": estimate(0.42, 0.4, 0.44),
        "pass@8": estimate(0.25, 0.2, 0.3),
        "mean_reward": estimate(0.55, 0.5, 0.6),
    },
    "p_value": 0.0312,
    "by_level": {"1": {"baseline": {"pass@1": estimate(0.1, 0, 0.2)}, "final": {"pass@1": estimate(1, 0.95, 1)}}},
    "tasks": 1024,
    "samples": 8,
    "seconds": 283.2,
}

TABLE = """\
==================================================================================
FINAL RESULTS
==================================================================================
Metric                Baseline                RLVR                    Improvement
----------------------------------------------------------------------------------
Pass Rate (pass@1)    8.0% [7.0, 9.0]         42.0% [40.0, 44.0]      +34.0pp
pass@8                30.0% [28.0, 32.0]      25.0% [20.0, 30.0]      -5.0pp
Mean Reward           -0.150 [-0.200, -0.100] 0.550 [0.500, 0.600]    +0.700
pass@1, level 1       10.0% [0.0, 20.0]       100.0% [95.0, 100.0]    +90.0pp
----------------------------------------------------------------------------------
paired test: p = 0.0312, [95% interval], 1,024 held-out tasks x 8 samples, 4:43
=================================================================================="""


def test_an_evaluation_by_itself_shows_every_interval_and_level():
    result: dict[str, Any] = {
        "checkpoint": "runs/a/checkpoints/final-000003",
        "pass@1": estimate(0.42, 0.4, 0.44),
        "mean_reward": estimate(-0.15, -0.2, -0.1),
        "by_level": {"2": {"pass@1": estimate(1, 0.95, 1)}},
        "tasks": 1024,
        "unjudged": 3,
    }
    assert evaluation_table(result).splitlines()[1:-1] == [
        "Metric                Value [95% interval]",
        "-" * 46,
        "pass@1                42.0% [40.0, 44.0]",
        "Mean Reward           -0.150 [-0.200, -0.100]",
        "pass@1, level 2       100.0% [95.0, 100.0]",
        "-" * 46,
        "1,024 held-out tasks, weights runs/a/checkpoints/final-000003",
        "3 completions could not be judged and are left out",
    ]


def test_a_part_has_its_number_of_tasks_and_what_is_not_known_is_no_number():
    """The mean reward of one task has no interval; tasks that the verifier could not judge whole are counted."""
    reward = {"value": 0.5, "low": None, "high": None, "n": 1}
    lone: dict[str, Any] = {"pass@1": {**estimate(1, 0.2, 1), "n": 1}, "mean_reward": reward}
    none: dict[str, Any] = {"value": None, "low": None, "high": None, "n": 0}
    result: dict[str, Any] = {
        "checkpoint": "runs/a", "pass@8": none, "by_level": {"2": lone}, "tasks": 1, "incomplete": 2,
    }  # fmt: skip
    assert evaluation_table(result).splitlines()[3:-1] == [
        "pass@8                        -",
        "pass@1, level 2 (n = 1)       100.0% [20.0, 100.0]",
        "Mean Reward, level 2 (n = 1)  0.500",
        "-" * 54,
        "1 held-out tasks, weights runs/a",
        "2 tasks with fewer than k judged completions are left out",
    ]
    both = {"baseline": {**lone, "pass@8": none}, "final": {**lone, "pass@8": none}, "p_value": 1.0, "incomplete": 2}
    lines = final_table({**both, "by_level": {"2": both}}).splitlines()
    assert lines[7].split() == ["pass@8", "-", "-", "-"]
    assert lines[6].split() == ["Mean", "Reward", "0.500", "0.500", "+0.000"]
    assert lines[8].startswith("pass@1, level 2 (n = 1)  100.0% [20.0, 100.0]")
    assert lines[-2] == "2 tasks with fewer than k judged completions are left out"


def test_an_evaluation_by_itself_shows_the_sets_beside():
    """With the k that was asked for, and a rate stays one whatever its verifier is called."""
    measured = {"pass@1": estimate(0.5, 0.4, 0.6), "pass@16": estimate(0.75, 0.7, 0.8)}
    result = {
        "checkpoint": "runs/a", "watched/my_reward": estimate(0.25, 0.2, 0.3), "tasks": 9,
        "beside": {"held-out families": {**measured, "tasks": 1200, "unjudged": 2}},
    }  # fmt: skip
    assert evaluation_table(result).splitlines()[3:-1] == [
        "watched/my_reward           25.0% [20.0, 30.0]",
        "pass@1, held-out families   50.0% [40.0, 60.0]",
        "pass@16, held-out families  75.0% [70.0, 80.0]",
        "-" * 52,
        "9 held-out tasks, weights runs/a",
        "1,200 tasks of held-out families, 2 completions left out unjudged",
    ]


def test_the_final_table_shows_rates_as_percentages_and_rewards_as_decimals():
    assert final_table(SUMMARY) == TABLE


def test_the_table_shows_training_metrics_and_the_number_of_unjudged_answers():
    text = final_table(SUMMARY | {"mode": "sft", "unjudged": 1234})
    assert "Baseline                SFT                     Improvement" in text and "RLVR" not in text
    assert "\n1,234 completions of both evaluations could not be judged and are left out\n" in text
    assert final_table(SUMMARY | {"mode": "rlvr", "unjudged": 0}) == TABLE


def test_the_table_of_a_run_without_training_has_one_column():
    lines = final_table(SUMMARY | {"steps": 0, "final": SUMMARY["baseline"], "unjudged": 3}).splitlines()
    assert lines == [
        "=" * 46,
        "FINAL RESULTS",
        "=" * 46,
        "Metric                Baseline",
        "-" * 46,
        "Pass Rate (pass@1)    8.0% [7.0, 9.0]",
        "pass@8                30.0% [28.0, 32.0]",
        "Mean Reward           -0.150 [-0.200, -0.100]",
        "pass@1, level 1       10.0% [0.0, 20.0]",
        "-" * 46,
        "[95% interval], 1,024 held-out tasks x 8 samples, 4:43",
        "3 completions could not be judged and are left out",
        "=" * 46,
    ]


def test_the_table_says_why_training_ended_and_which_policy_is_reported():
    ended = final_table(SUMMARY | {"steps": 40, "stopped": "plateau: no gain", "report": "last", "best": {"step": 30}})
    assert ended.splitlines()[-2] == "ended after 40 steps: plateau: no gain"
    best = final_table(SUMMARY | {"steps": 40, "stopped": "", "report": "best", "best": {"step": 30}})
    assert best.splitlines()[-2] == "RLVR: the policy after step 30, chosen by its interim evaluation on other tasks"


def test_the_table_needs_only_the_two_estimates_and_the_test():
    text = final_table({k: SUMMARY[k] for k in ("baseline", "final")} | {"p_value": 1e-9})
    assert "p < 0.0001, [95% interval]\n" in text and "level" not in text


def test_other_held_out_sets_have_a_row_each_and_a_long_name_widens_the_table():
    text = final_table(SUMMARY | {"beside": {"held-out families": SUMMARY}})
    lines, plain = text.splitlines(), TABLE.splitlines()
    assert lines[-4] == "pass@1, held-out families  8.0% [7.0, 9.0]         42.0% [40.0, 44.0]      +34.0pp"
    assert lines[5] == plain[5].replace("(pass@1)    ", "(pass@1)         ") and len(lines[0]) == len(plain[0]) + 5
    assert final_table(SUMMARY | {"beside": {}}) == TABLE


def test_the_table_is_the_last_thing_shown():
    out = io.StringIO()
    with RunConsole(out) as console:
        console.phase("rl", 9)
        console.step({"reward": 1.0}, 1)
        console.show_table(SUMMARY)
    assert out.getvalue().endswith(TABLE + "\n")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1]", "{}", "null", '"x"', '{"baseline": 1, "final": 2}', '{"baseline": {}, "final": {}, "p_value": 1}'),
        *(json.dumps(SUMMARY)[:-9], "[" * 20_000, json.dumps(SUMMARY | {"seconds": math.inf}), "\0" * 9),
        *(json.dumps(SUMMARY | {"p_value": "x"}), json.dumps(SUMMARY | {"by_level": {"1": 3}})),
        json.dumps(SUMMARY | {"final": SUMMARY["baseline"] | {"pass@1": estimate(10**400, 0, 1)}}),
    ],
)
def test_a_damaged_summary_is_named_with_what_to_do(tmp_path: Path, text: str):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=r"summary\.json.*delete it, and the same command writes it again"):
        stored_summary(tmp_path)


def test_a_whole_summary_is_read_as_it_was_written(tmp_path: Path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    assert stored_summary(tmp_path) == SUMMARY


ROWS: list[dict[str, Any]] = [
    *({"phase": "sft", "step": i, "loss": 1.0} for i in range(1, 30)),
    {"phase": "sft", "step": 30, "test/env/all/correct": 0.4},
    *({"phase": "rl", "step": i, "reward": i / 50, "env/all/correct": i / 60, "kl": None} for i in range(1, 50)),
    {"phase": "rl", "step": 50, "reward": math.nan, "test/env/all/correct": 0.9},
    {"note": "no step"},
]


# What a damaged file may hold: numbers beyond a float, near its end, and values that are no numbers.
ODD = [10**400, 1e308, -1e308, math.inf, "high", [1], {}, True, 0.5, 0.6]
ODD_ROWS: list[dict[str, Any]] = [{"phase": "rl", "step": i, "reward": value} for i, value in enumerate(ODD * 7)]


@pytest.mark.parametrize("rows", [ROWS, ROWS[30:], ROWS[:30], [], [{"step": 1, "reward": 1.0}], ODD_ROWS])
def test_the_curve_is_a_whole_image_whatever_rows_there_are(tmp_path: Path, rows: list[dict[str, Any]]):
    plot_curve(rows, tmp_path / "curve.png", "a title with $ and \\frac{")
    with Image.open(tmp_path / "curve.png") as image:
        image.load()
        assert image.format == "PNG" and image.size == (1200, 675)
        assert len({pixel for _, pixel in image.convert("RGB").getcolors(1 << 20) or []}) > 10
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


@pytest.mark.parametrize("rows", [ROWS[30:-2], ROWS[:-2], ROWS[:30]])
def test_without_interim_evaluations_the_curve_has_the_pass_rates_before_and_after(
    tmp_path: Path, rows: list[dict[str, Any]]
):
    """The held-out line is the only green; it is drawn where no row of the last phase has a held-out pass rate."""

    def green(*ends: float) -> int:
        plain = [{k: v for k, v in row.items() if not k.startswith("test/")} for row in rows]
        plot_curve(plain, tmp_path / "curve.png", "title", ends)
        with Image.open(tmp_path / "curve.png") as image:
            colours = {pixel: count for count, pixel in image.convert("RGB").getcolors(1 << 20) or []}
        return colours.get(ImageColor.getrgb(GREEN), 0)

    assert green(0.2, 0.8) > 500 and green() == 0


def test_what_is_under_way_is_shown_below_the_step() -> None:
    """In plain text with the next line, at most one every `interval` seconds; untrusted text is escaped."""
    out, clock = io.StringIO(), Clock()
    with RunConsole(out, clock=clock, interval=30) as console:
        console.phase("study", 3, unit="runs")
        console.show_activity({"seed-1": "rl 3/5", "seed-2": "start\x1b[2Jing"}, 0)
        console.show_activity({"seed-1": "rl 4/5"}, 0)
        clock.now = 40.0
        console.show_activity({"seed-3": "rl 1/5"}, 2)
    lines = out.getvalue().splitlines()
    assert lines == [
        "study: 3 runs",
        "study 0/3",
        "  seed-1  rl 3/5",
        r"  seed-2  start\x1b[2Jing",
        "study 2/3  0:20 left",
        "  seed-3  rl 1/5",
    ]


def test_a_terminal_shows_what_is_under_way_below_the_bar() -> None:
    out = Terminal()
    with RunConsole(out, live=True) as console:
        console.phase("study", 3, unit="runs")
        console.show_activity({"seed-1": "rl 3/5"}, 1)
        console.rich.print(console._render())
    assert re.search(r"study .*1/3", out.getvalue()) and "seed-1" in out.getvalue()
