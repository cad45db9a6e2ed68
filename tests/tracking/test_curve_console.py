"""The curve drawn with characters: where it is high, where it ends, and in which encodings."""

from __future__ import annotations

import io
import re

from rlvr.tracking.curve_console import CurveConsole, draw_curve

RATE = {"value": 0.5, "low": 0.4, "high": 0.6}
SUMMARY = {"baseline": {"pass@1": RATE}, "final": {"pass@1": RATE}, "p_value": 1.0}


def columns(lines: list[str]) -> list[str]:
    """The picture's columns, each from bottom to top."""
    rows = [line.split("|", 1)[1] for line in lines if "|" in line]
    width = max(map(len, rows))
    return ["".join(row.ljust(width)[i] for row in reversed(rows)) for i in range(width)]


def test_a_column_is_as_high_as_its_pass_rate_and_has_a_dot_at_its_reward() -> None:
    picture = draw_curve([0.0, 0.25, 0.5, 1.0], [0.9, 0.5, 0.6, 1.0], steps=4)
    assert columns(picture) == ["       •", "██  •   ", "████•   ", "████████"]
    assert picture[0].startswith("100% |") and picture[7].startswith("  0% |")


def test_steps_that_are_not_made_yet_are_left_empty() -> None:
    picture = draw_curve([1.0] * 30, [1.0] * 30, steps=120, width=40)
    assert columns(picture) == ["█" * 8] * 10
    assert "-" * 40 in picture[8] and picture[9].endswith("step 120")


def test_a_column_of_several_steps_is_their_mean() -> None:
    assert columns(draw_curve([0.0, 1.0, 1.0, 1.0], [0.0] * 4, steps=4, width=2)) == ["████    ", "████████"]


def test_an_encoding_without_blocks_gets_ascii() -> None:
    picture = "\n".join(draw_curve([0.5, 1.0], [0.9, 1.0], steps=2, encoding="ascii"))
    assert picture.isascii() and "#" in picture and "o mean reward" in picture


def test_plain_output_has_the_steps_and_at_the_end_the_curve_without_control_codes() -> None:
    out = io.StringIO()
    with CurveConsole(stream=out) as console:
        console.plan({"model": "small"})
        console.phase("rl", 2)
        console.step({"env/all/correct": 0.5, "reward": 0.6}, 1)
        console.step({"env/all/correct": 1.0, "reward": 1.0}, 2)
        console.show_table(SUMMARY)
    text = out.getvalue()
    assert "\x1b" not in text and "\r" not in text and "model" not in text
    assert "rl 2/2  reward 1.000  pass rate 100.0%" in text
    assert text.index("100% | █") < text.index("FINAL RESULTS")


def test_a_terminal_shows_the_curve_above_the_numbers_and_rows_from_before_a_restart() -> None:
    out = io.StringIO()
    before = [{"phase": "rl", "env/all/correct": 1.0, "reward": 1.0}] * 3
    console = CurveConsole(before, stream=out, live=True)
    with console:
        console.phase("rl", 4, done=2)
        console.step({"env/all/correct": 0.0, "reward": 0.0}, 3)
        picture = columns(console.draw(4))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert picture == ["████████", "████████", "•       "]
    assert text.index("100% |██") < text.index("pass rate   • mean reward") < text.rindex("3/4")
