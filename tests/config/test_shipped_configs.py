"""Every packaged config is complete, and nothing in it is without effect."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import rlvr
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan

CONFIGS_FOLDER = Path(rlvr.__file__).parent / "configs"
CONFIGS = sorted(p.stem for p in CONFIGS_FOLDER.glob("*.yaml"))
TRAINING = sorted(p.stem for p in (CONFIGS_FOLDER / "training").glob("*.yaml"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packaged_config_validates_without_a_warning(name: str) -> None:
    """Unknown keys, wrong types and idle options would all show here."""
    config = build_config(load(name), warn=pytest.fail)
    assert config.algorithm.resolve().loss.name == (
        "importance_sampling" if name in ("train_rlvr", "self_play") else "ppo"
    )


@pytest.mark.parametrize("option", TRAINING)
def test_a_training_group_fits_every_config_that_chooses_one(option: str) -> None:
    """The large problems fit the one model there is, too."""
    config = build_config(load("train_rlvr_model", None, [f"training@rlvr_training={option}"]), warn=pytest.fail)
    source = assemble(config).source
    assert source.longest <= config.model.config["n_positions"]  # type: ignore[attr-defined]
    assert config.training.steps * config.training.prompts_per_step > 0 < config.sft.steps


def test_every_shipped_file_goes_into_the_wheel() -> None:
    """The build takes along what lies under rlvr/configs, groups included."""
    project = tomllib.loads((CONFIGS_FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["hatch"]["build"]["targets"]["wheel"]["artifacts"]
    files = {path for path in CONFIGS_FOLDER.rglob("*") if path.is_file()}
    assert files == {path for pattern in patterns for path in CONFIGS_FOLDER.parents[1].glob(pattern)}
    assert len(files) > len(CONFIGS)


def test_the_main_job_holds_out_the_configured_tasks() -> None:
    """At least 1,000 held-out problems, none of which training or demonstrations can draw."""
    config = build_config(load("arithmetic"))
    assembly = assemble(config)
    source = assembly.source
    heldout = {task.id for task in source.heldout(config.evaluation.tasks)}
    assert len(heldout) == config.evaluation.tasks >= 1000
    drawn = {source.train(config.seed, i, level).id for level in source.levels for i in range(3000)}
    assert not heldout & drawn
    assert "150 steps x 64 prompts x 16 completions = 153,600 completions" in plan(assembly)["training"]
