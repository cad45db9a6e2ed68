"""Every packaged config is complete, and nothing in it is without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlvr
from rlvr.build import build_source, plan
from rlvr.config import load
from rlvr.config.schema import configured

CONFIGS = sorted(p.stem for p in (Path(rlvr.__file__).parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packaged_config_validates_without_a_warning(name: str) -> None:
    """Unknown keys, wrong types and idle options would all show here."""
    config = configured(load(name), warn=pytest.fail)
    assert config.algorithm.resolve().loss == "ppo"


def test_the_main_job_holds_out_what_it_says() -> None:
    """At least 1,000 held-out problems, none of which training or demonstrations can draw."""
    config = configured(load("arithmetic"))
    source = build_source(config)
    heldout = {task.id for task in source.heldout(config.evaluation.tasks)}
    assert len(heldout) == config.evaluation.tasks >= 1000
    drawn = {source.train(config.seed, i, level).id for level in source.levels for i in range(3000)}
    assert not heldout & drawn
    assert "100 steps x 64 prompts x 16 answers = 102,400 answers" in plan(config, source)["training"]
