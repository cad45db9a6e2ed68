"""`python -m benchmarks.algorithm_study`: its plan, its mistakes, and a small one that really runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlvr
from benchmarks.algorithm_study import TASKS, list_variants, main, open_studies, read_algorithm_plans
from rlvr.algorithms.registry import ALGORITHMS
from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.studies.study_folder import SPECIFICATION
from tests.kit.slow_cases import mark_slow_but


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; runs use this code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(rlvr.__file__).parents[1]))
    return tmp_path


def test_every_algorithm_but_distillation_is_a_variant() -> None:
    names = list(list_variants())
    assert names[0] == "grpo"
    assert set(ALGORITHMS) - set(names) == {"distillation", "sdpo"}
    assert set(names) - set(ALGORITHMS) == {
        "entropy_bonus", "clip_symmetric", "clip_higher", "clip_cov", "temperature_end",
        "false_positives", "false_positives_30", "false_negatives", "false_negatives_30", "noise_20",
        "noise_20_corrected", "random_reward", "equal_rewards",
    }  # fmt: skip


def test_a_run_is_rlvr_train_from_the_fine_tuning_of_its_seed() -> None:
    [plan] = read_algorithm_plans(["arithmetic", "seeds=1..2", "variants=reinforce", "sft.batch_size=8"], [], None)
    assert plan.start.command(plan.start.runs[0]) == [
        "train", "--config-name=algorithms_study/arithmetic", "sft.batch_size=8", "run.root=runs/algorithms-study",
        "training.mode=sft", "seed=1", "run.root=runs/algorithms-study/arithmetic-start", "run.name=seed-1",
    ]  # fmt: skip
    assert [run.name for run in plan.variants.runs] == [
        "grpo_seed-1", "reinforce_seed-1", "grpo_seed-2", "reinforce_seed-2",
    ]  # fmt: skip
    assert plan.variants.command(plan.variants.runs[2]) == [
        "train", "--config-name=algorithms_study/arithmetic", "run.root=runs/algorithms-study", "sft.steps=0",
        "algorithm.name=grpo", "seed=2", "run.root=runs/algorithms-study/arithmetic", "run.name=grpo_seed-2",
        "model.start_from=runs/algorithms-study/arithmetic-start/seed-2",
    ]  # fmt: skip


@pytest.mark.parametrize("task", mark_slow_but(1, TASKS))
def test_all_variants_have_equally_many_completions_and_updates(task: str) -> None:
    [plan] = read_algorithm_plans([task, "seeds=1"], [], None)
    sizes = [variant.config["training"] for variant in plan.variants.variants]
    assert len({t["steps"] * t["prompts_per_step"] * t["group_size"] for t in sizes}) == 1
    assert len({t["steps"] * t["num_substeps"] for t in sizes}) == 1
    assert ("grpo_process" in {variant.name for variant in plan.variants.variants}) == (task == "tools")
    assert all(variant.config["sft"]["steps"] == 0 for variant in plan.variants.variants)


def test_an_algorithm_for_turns_is_left_out_where_another_task_has_turns() -> None:
    plans = read_algorithm_plans(["arithmetic", "tools", "seeds=1", "variants=grpo_process"], [], None)
    names = [[variant.name for variant in plan.variants.variants] for plan in plans]
    assert names == [["grpo"], ["grpo", "grpo_process"]]


@pytest.mark.parametrize("task", TASKS)
def test_the_config_of_a_task_is_a_whole_run(task: str) -> None:
    config = build_config(load(f"algorithms_study/{task}"), warn=pytest.fail)
    assert config.sft.steps and config.training.steps and config.algorithm.resolve().name == "grpo"
    assert config.evaluation.samples == 8


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["arithmetik", "seeds=1"], ["task 'arithmetik'", "did you mean 'arithmetic'", "programs"]),
        (["seeds=1", "variants=grpo,rlo"], ["variant 'rlo'", "did you mean 'rloo'"]),
        (["seeds=1", "variants="], ["variants=: a name is empty", "grpo, "]),
        (["seeds=1", "variants=grpo,distillation"], ["variants=distillation", "learns from a teacher"]),
        (
            ["arithmetic", "programs", "seeds=1", "variants=grpo_process"],
            ["variants=grpo_process", "arithmetic, programs"],
        ),
        (["arithmetic"], ["seeds is missing", "seeds=1..5"]),
        (["seeds=1", "training.group_size=8,16"], ["training.group_size has several values", "variants="]),
        (["seeds=1", "--environment", "A=1,2"], ["--environment has several values"]),
        (["seeds=1", "training.group_sise=8"], ["training.group_sise", "training.group_size"]),
        (["seeds=1", "--config-name=arithmetic"], ["No such option", "--config-name"]),
        (["seeds=1", "algorithm.name=dapo"], ["algorithm.name=dapo", "variants=grpo,"]),
        (["seeds=1", "training.steps=0"], ["training.steps=0", "at least 1"]),
        (["seeds=1", "run.name=x"], ["run.name", "--name"]),
        (["seeds=1", "--name", "../out"], ["../out", "letters, digits"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_a_mistake_is_one_message_before_anything_starts(
    folder: Path, capfd: Any, words: list[str], expected: list[str]
) -> None:
    assert main(words) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said and all(word in said for word in expected), said
    assert not list(folder.iterdir())


def test_a_study_gets_more_variants_and_loses_none(folder: Path) -> None:
    """Those of a newer version are added; a study with a variant that this version lacks is refused by its name."""
    words = ["arithmetic", "seeds=1"]
    with open_studies(read_algorithm_plans([*words, "variants=grpo,raft"], [], None)):
        pass
    with open_studies(read_algorithm_plans([*words, "variants=grpo,rloo,raft"], [], None)):
        pass
    specification = folder / "runs" / "algorithms-study" / "arithmetic" / SPECIFICATION
    assert [v["name"] for v in json.loads(specification.read_text())["variants"]] == ["grpo", "rloo", "raft"]
    specification.write_text(specification.read_text().replace("rloo", "orpo"))
    plans = read_algorithm_plans([*words, "variants=grpo,rloo,raft"], [], None)
    with pytest.raises(ValueError, match=r"other variants too \(orpo\).*--name"), open_studies(plans):
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_study_from_the_command_to_its_files(folder: Path, capfd: Any) -> None:
    """Both variants start from one fine-tuning; equal rewards make no step; a variant more makes one run more."""
    words = ["arithmetic", "seeds=1", "--jobs=1", "sft.steps=40", "training.steps=2",
             "evaluation.tasks=16"]  # fmt: skip
    assert main([*words, "variants=grpo,equal_rewards"]) == 0
    place = folder / "runs" / "algorithms-study"
    task = json.loads((place / "results.json").read_text())["tasks"]["arithmetic"]
    runs = {found["variant"]: found for found in task["runs"]}
    assert runs["grpo"]["has_moved"] and not runs["equal_rewards"]["has_moved"]
    assert runs["grpo"]["pass@1"][0] == runs["equal_rewards"]["pass@1"][0] == runs["equal_rewards"]["pass@1"][1]
    said = capfd.readouterr().out
    assert "| `equal_rewards` | 1 |" in said and "Made no step" in said
    assert (place / "study.png").stat().st_size > 10_000 and said.count("| `grpo` | 1 |") == 1
    first = (place / "arithmetic-start/seed-1/journal.jsonl").read_bytes()
    begun = (place / "arithmetic/grpo_seed-1/journal.jsonl").read_bytes()
    assert main([*words, "variants=grpo,random_reward,equal_rewards"]) == 0
    task = json.loads((place / "results.json").read_text())["tasks"]["arithmetic"]
    assert [found["variant"] for found in task["runs"] if found["has_moved"]] == ["grpo", "random_reward"]
    assert (place / "arithmetic-start/seed-1/journal.jsonl").read_bytes() == first
    assert (place / "arithmetic/grpo_seed-1/journal.jsonl").read_bytes() == begun


def test_the_old_command_says_the_new_one(capfd: Any) -> None:
    assert run(["study", "algorithms", "seeds=1"]) == 2
    assert "python -m benchmarks.algorithm_study" in capfd.readouterr().err
