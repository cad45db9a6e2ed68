"""The pictures of a run, its completions token by token, and what a notebook shows of it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.tracking.notebook_views import CompletionView, run_to_html
from rlvr.tracking.pictures import _mean_by_length, plot_entropy, plot_groups, plot_lengths
from rlvr.tracking.run_report import plot_curve
from tests.kit.chat_rows import qwen_folder

ROWS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(6)]


def digits(prompt: str, response: str, meta: dict[str, Any]) -> float:
    return sum(character.isdigit() for character in response) / 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> rlvr.Run:
    home = tmp_path_factory.mktemp("pictures")
    return rlvr.train(
        qwen_folder(home / "model"), ROWS, digits, root=home, name="it", steps=2, group_size=4, prompts_per_step=2,
        max_tokens=6, learning_rate=1e-3, evaluation={"tasks": 3, "samples": 2}, threads=1, quiet=True,
    )  # fmt: skip


@pytest.fixture
def run(finished: rlvr.Run, tmp_path: Path) -> rlvr.Run:
    """A copy, to be changed."""
    return rlvr.load_run(shutil.copytree(finished.folder, tmp_path / "it"))


def is_picture(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5_000


def test_each_picture_is_a_file_in_the_run_folder_or_where_it_is_asked_for(run: rlvr.Run, tmp_path: Path) -> None:
    drawn = [run.plot_groups(1), run.plot_lengths(), run.plot_entropy()]
    assert [path.name for path in drawn] == ["groups-000001.png", "lengths.png", "entropy.png"]
    assert all(path.parent == run.folder and is_picture(path) for path in drawn)
    assert is_picture(run.plot_groups(0, tmp_path / "mine.png"))


def test_a_run_without_the_data_of_a_picture_is_refused_and_nothing_is_written(run: rlvr.Run) -> None:
    before = set(run.folder.iterdir())
    with pytest.raises(ValueError, match=r"no rollouts of step 9; train with run\.rollouts_per_step"):
        run.plot_groups(9)
    (run.folder / "metrics.jsonl").write_text(json.dumps({"phase": "sft", "step": 0, "loss": 1.0}) + "\n")
    with pytest.raises(ValueError, match="no step with an entropy"):
        run.plot_entropy()
    file = run.folder / "rollouts" / "rl-000000.jsonl"
    for path in run.folder.glob("rollouts/*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"no rollouts; train with run\.rollouts_per_step"):
        run.plot_lengths()
    row = {"group_id": "a", "prompt": "p", "response": "r", "reward": None, "response_tokens": [], "logprobs": []}
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="have no reward"):
        run.plot_groups(0)
    with pytest.raises(ValueError, match="no completion with tokens and a reward"):
        run.plot_lengths()
    with pytest.raises(ValueError, match="no log-probs"):
        run.show_tokens(0)
    assert set(run.folder.iterdir()) == before


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plot_groups([{"group_id": "a", "reward": 1.0}], path, "one"),
        lambda path: plot_groups([{"group_id": i % 60, "reward": i / 7} for i in range(240)], path, "$many"),
        lambda path: plot_lengths({3: [{"reward": 1.0, "response_tokens": [1], "stop_reason": None}]}, path, "one"),
        lambda path: plot_entropy([{"phase": "rl", "step": 0, "entropy": 1.0}], path, "one"),
        lambda path: plot_entropy(
            [{"phase": "rl", "step": i, "entropy": math.nan, "kl": 1e-9 * i, "optim/kl_after": 0.0} for i in range(99)],
            path,
            "no number",
        ),
    ],
)
def test_few_and_many_values_are_drawn_without_a_warning(draw: Callable[[Path], None], tmp_path: Path) -> None:
    draw(tmp_path / "it.png")
    assert is_picture(tmp_path / "it.png")


@pytest.mark.parametrize(("scale", "label"), [(1, "reward, pass rate"), (50, "pass rate")])
def test_rewards_that_would_flatten_pass_rates_have_a_panel_of_their_own(
    tmp_path: Path, scale: float, label: str
) -> None:
    rows = [{"phase": "rl", "step": i, "reward": scale * i / 9, "env/all/correct": i / 9} for i in range(9)]
    plot_curve(rows, tmp_path / "it.svg", "it", [0.1, 0.8])
    drawn = (tmp_path / "it.svg").read_text()  # its texts are comments beside their outlines
    assert f"<!-- {label} -->" in drawn and "<!-- pass rate, before and after -->" in drawn


def test_a_reward_that_is_the_pass_rate_is_one_line_with_both_names(tmp_path: Path) -> None:
    rows = [{"phase": "rl", "step": i, "reward": i / 9, "env/all/correct": i / 9} for i in range(9)]
    plot_curve(rows, tmp_path / "it.svg", "it", [0.1, 0.8])
    drawn = (tmp_path / "it.svg").read_text()
    assert "<!-- reward = pass rate, training -->" in drawn and "<!-- reward -->" not in drawn


def test_few_lengths_have_a_mean_each() -> None:
    points = [(n, float(n > 1), 0, False) for n in (1, 2, 2, 3, 3, 3)]
    assert _mean_by_length(points) == [(1, 0.0), (2, 1.0), (3, 1.0)]
    many = _mean_by_length([(n, 1.0, 0, False) for n in range(100)])
    assert len(many) <= 9 and sum(length for length, _ in many) / len(many) == pytest.approx(49.5, abs=3)


# ---- tokens


def test_tokens_are_shown_with_the_log_probs_they_were_sampled_with(finished: rlvr.Run) -> None:
    row = finished.rollouts(1)[3]
    view = finished.show_tokens(1, 3)
    assert list(view.logprobs) == row["logprobs"] and len(view.pieces) == len(row["response_tokens"])
    assert "".join(view.pieces).startswith(row["response"])  # a stop token may follow
    text = str(view)
    assert (
        re.search(rf"{row['logprobs'][0]:.3f} .*  {re.escape(repr(view.pieces[0]))}", text)
        and f"reward {row['reward']:g}" in text
    )
    assert list(view.advantages) == [row["advantage"]] * len(view.pieces) and f"{row['advantage']:+9.3f}  " in text
    assert view._repr_html_().count("nats, p = ") == len(view.pieces)
    with pytest.raises(ValueError, match=r"step 1 stored 8 rollouts; index=8, expected 0 to 7"):
        finished.show_tokens(1, 8)


def test_a_run_without_a_tokenizer_says_so(run: rlvr.Run) -> None:
    for file in run.folder.glob("checkpoints/*/tokenizer_config.json"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no checkpoint of .* has a tokenizer"):
        run.show_tokens(0)


def test_less_likely_tokens_have_more_colour() -> None:
    html = CompletionView("t", "p", ["a", "b", "c"], [0.0, -0.7, -20.0], [0.0] * 3, [True] * 3)._repr_html_()
    colours = [float(x) for x in re.findall(r'rgba\(213,94,0,([\d.]+)\);" title', html)]
    assert colours[0] == 0 < colours[1] < colours[2] <= 0.85


def test_advantages_are_lines_and_tokens_of_the_environment_have_neither_line_nor_probability(run: rlvr.Run) -> None:
    file = run.folder / "rollouts" / "rl-000001.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    many = len(row["response_tokens"])
    assert many > 2
    row |= {"action_mask": [1, 0] + [1] * (many - 2), "token_advantages": [0.5, 0.0, -0.25] + [0.0] * (many - 3)}
    file.write_text(json.dumps(row) + "\n")
    view = run.show_tokens(1, 0)
    assert list(view.advantages[:3]) == [0.5, 0.0, -0.25] and list(view.is_sampled[:3]) == [True, False, True]
    spans = re.findall(r"<span style=\"([^\"]*)\" title=\"([^\"]*)\"", view._repr_html_())
    assert len(spans) == many
    assert "solid" in spans[0][0] and "advantage +0.500" in spans[0][1]
    assert spans[1][1] == "written by the environment" and "background" not in spans[1][0]
    assert "dashed" in spans[2][0] and f"sum over {many - 1} sampled tokens" in str(view)
    del row["token_advantages"]
    file.write_text(json.dumps({**row, "advantage": 2.0}) + "\n")
    assert list(run.show_tokens(1, 0).advantages[:3]) == [2.0, 0.0, 2.0]


# ---- notebooks


def test_a_notebook_shows_the_results_and_the_curve(finished: rlvr.Run) -> None:
    html = finished._repr_html_()
    value = 100 * finished.summary["final"]["pass@1"]["value"]
    for part in ("finished", ">2<", f"{value:.1f}% [", f"p = {finished.summary['p_value']:.4f}", str(finished.folder)):
        assert part in html, part
    assert "data:image/png;base64,iVBOR" in html


def test_a_notebook_shows_what_there_is_of_a_run_that_is_not_finished_or_damaged(run: rlvr.Run) -> None:
    (run.folder / "summary.json").write_text("{")
    assert "damaged" in run._repr_html_()
    (run.folder / "summary.json").unlink()
    html = run._repr_html_()
    assert "not finished" in html and "data:image/png" in html and "pass@1" not in html
    (run.folder / "metrics.jsonl").unlink()
    assert "data:image/png" not in run._repr_html_()


def test_what_a_user_or_a_model_wrote_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    for html in (
        CompletionView(evil, evil, [evil], [-1.0], [1.0], [True])._repr_html_(),
        run_to_html(evil, {"folder": evil}, None),
    ):
        assert "<script" not in html and "&lt;script&gt;" in html


# ---- without the library that draws


def test_without_matplotlib_a_picture_names_its_extra_and_a_notebook_shows_the_results(
    run: rlvr.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (run.plot, run.plot_lengths, lambda: rlvr.plot_seeds([run])):
        with pytest.raises(ValueError, match=r"pip install 'rlvr\[plots\]'"):
            draw()
    assert "<img" not in run._repr_html_() and "pass@1" in run._repr_html_()


@pytest.mark.slow
def test_a_base_install_trains_compares_seeds_and_names_the_extra_of_pictures(tmp_path: Path) -> None:
    """A process without matplotlib, scipy and torch, which the base does not install."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'PIL', 'scipy', 'torch']))\n"
        "import rlvr\n"
        "from rlvr.studies.seed_statistics import compare_pairs\n"
        "def has_answer(prompt, response, meta): return float('answer' in response)\n"
        "run = rlvr.train(data='toy', reward=has_answer, client='mock', steps=2, max_tokens=8,\n"
        "                 evaluation={'tasks': 4, 'samples': 2}, name='toy')\n"
        "assert run.is_finished and 'img' not in run._repr_html_() and not (run.folder / 'curve.png').exists()\n"
        "assert compare_pairs({1: 0.0, 2: 0.5}, {1: 0.1, 2: 0.7})['p_value'] == 0.5\n"
        "for draw in (run.plot, run.plot_lengths, lambda: rlvr.plot_seeds([run])):\n"
        "    try: draw()\n"
        "    except ValueError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(rlvr.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("needs the package 'matplotlib': pip install 'rlvr[plots]'") == 3
    assert "metrics (no curve: pip install 'rlvr[plots]') and weights are in runs/toy" in done.stdout
