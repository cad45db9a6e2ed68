"""The picture of a metric over seeds: the band is the interval over the runs, and runs that do not belong together are
refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

import rlvr
from rlvr.studies.seed_curves import _draw  # pyright: ignore[reportPrivateUsage]
from rlvr.studies.seed_statistics import summarize_steps
from tests.kit.study_runs import MOCK, make_runs, planned

T2 = 4.302652729911275  # 0.975 quantile of Student's t with 2 degrees of freedom


def answers(prompt: str, response: str, meta: Any = None) -> float:
    return float("answer" in response)


def train(root: Path, seed: int, **more: Any) -> rlvr.Run:
    return rlvr.train(
        data="toy", reward=answers, client="mock", seed=seed, name=f"seed-{seed}", root=root, quiet=True,
        **{"steps": 4, "max_tokens": 8, "group_size": 4, "prompts_per_step": 2,
           "evaluation": {"tasks": 2, "samples": 2}, **more},
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[rlvr.Run]:
    home = tmp_path_factory.mktemp("seeds")
    return [train(home, seed) for seed in (1, 2, 3)]


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5_000


def test_the_band_is_the_interval_over_the_runs_at_each_step(runs: list[rlvr.Run]) -> None:
    curves = [{row["step"]: row["reward"] for row in run.metrics} for run in runs]
    found = summarize_steps(curves)
    assert list(found) == [0, 1, 2, 3]
    for step, band in found.items():
        values = [curve[step] for curve in curves]
        half = T2 * stdev(values) / math.sqrt(3)
        assert band["mean"] == pytest.approx(mean(values)) and band["low"] == pytest.approx(mean(values) - half)
    assert len({round(band["high"] - band["low"], 9) for band in found.values()}) > 1, "equal bands would test nothing"


def test_mean_and_band_are_over_the_steps_that_all_runs_have() -> None:
    found = summarize_steps([{0: 1.0, 1: 0.0, 2: 1.0}, {0: 0.0, 1: 0.0}], "env/all/correct")
    assert list(found) == [0, 1] and (found[0]["low"], found[0]["high"]) == (0.0, 1.0), "a share stays within 0 and 1"


def test_runs_and_folders_are_drawn_as_png_or_svg(runs: list[rlvr.Run], tmp_path: Path) -> None:
    drawn = rlvr.plot_seeds(runs)
    assert drawn == runs[0].folder.parent / "seeds-reward.png" and is_png(drawn)
    drawn.unlink()
    vector = rlvr.plot_seeds([run.folder for run in runs], "env/all/correct", tmp_path / "it.svg")
    text = vector.read_text()
    assert text.startswith("<?xml") and "</svg>" in text
    again = rlvr.plot_seeds(runs, "env/all/correct", tmp_path / "again.svg").read_text()
    assert again == text, "equal pictures have equal bytes"


@pytest.mark.parametrize(
    ("seeds", "says", "bounds"),
    [
        (1, "1 seed, no band", None),
        (2, "2 seeds, band: from one to the other", (0.0, 1.0)),
        (3, "3 seeds, band: 95 % interval of the mean", (1 / 2 - T2 / 2 / math.sqrt(3), 1 / 2 + T2 / 2 / math.sqrt(3))),
    ],
)
def test_the_legend_says_what_the_band_of_so_many_seeds_is(
    seeds: int, says: str, bounds: tuple[float, float] | None
) -> None:
    curves = [{0: value, 1: value} for value in (0.0, 1.0, 0.5)[:seeds]]
    [axes] = _draw({"": curves}, "reward", "title").axes
    assert says in axes.get_legend().get_texts()[0].get_text()
    bands = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    assert [(pytest.approx(min(band)), pytest.approx(max(band))) for band in bands] == ([bounds] if bounds else [])


def test_a_notebook_shows_the_picture_of_the_path(runs: list[rlvr.Run], tmp_path: Path) -> None:
    drawn: Any = rlvr.plot_seeds(runs, file=tmp_path / "a.png")
    assert 'src="data:image/png;base64,iVBOR' in drawn._repr_html_()
    assert 'src="data:image/svg+xml;base64,' in runs[0].plot(tmp_path / "b.svg")._repr_html_()  # type: ignore[attr-defined]
    drawn.unlink()
    assert drawn._repr_html_() is None


def test_lists_by_name_stand_side_by_side(runs: list[rlvr.Run], tmp_path: Path) -> None:
    both = {"all": runs, "the $first": runs[:1]}
    assert is_png(rlvr.plot_seeds(both, "entropy", tmp_path / "it.png"))


def test_a_study_is_drawn_by_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mock.yaml").write_text(MOCK)
    plan = planned("seeds=1..2", "training.group_size=2,4")
    make_runs(plan, plan.runs[-1].name)  # one of the four has not begun
    drawn = rlvr.plot_seeds("runs/mock-study")
    assert drawn == Path("runs/mock-study/seeds-reward.png") and is_png(drawn)


def test_runs_that_do_not_belong_together_are_refused(runs: list[rlvr.Run], tmp_path: Path) -> None:
    other = train(tmp_path, 4, group_size=2)
    with pytest.raises(ValueError, match=r"differ in training\.group_size.*give a list for each"):
        rlvr.plot_seeds([*runs, other])
    with pytest.raises(ValueError, match="given twice"):
        rlvr.plot_seeds([runs[0], runs[0].folder])
    with pytest.raises(ValueError, match=r"did you mean 'reward'\?.*entropy"):
        rlvr.plot_seeds(runs, "rewrd")
    with pytest.raises(ValueError, match="is empty; give runs"):
        rlvr.plot_seeds({})
    with pytest.raises(ValueError, match=r"no study\.json"):
        rlvr.plot_seeds(tmp_path)
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg"):
        rlvr.plot_seeds(runs, file=tmp_path / "it.jpg")
    assert not list(tmp_path.glob("*.*g"))


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run = train(tmp_path, 1)
    rows = [{**row, "entropy": math.nan if row["step"] else 1.0} for row in run.metrics]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert is_png(rlvr.plot_seeds([run], "entropy", tmp_path / "it.png"))
