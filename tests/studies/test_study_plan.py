"""What is typed after `rlvr study` becomes seeds, variants and commands, or one clear error before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.core.cpu_budget import available_cores
from rlvr.core.files import lock_file
from rlvr.studies.study_folder import open_study
from rlvr.studies.study_plan import build_plan, parse_seeds, read_variants, split_values
from tests.kit.study_runs import MOCK, planned, studied


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with mock.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROUNDING", raising=False)
    (tmp_path / "mock.yaml").write_text(MOCK)
    return tmp_path


def test_seeds_are_integers_and_ranges_that_include_both_ends() -> None:
    assert parse_seeds("1..5,7") == (1, 2, 3, 4, 5, 7)
    assert parse_seeds("9, 3") == (3, 9)
    assert parse_seeds("4..4") == (4,)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8,16", ["8", "16"]),
        ("8", ["8"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ("'a,b','c'", ["'a,b'", "'c'"]),
        ("it's, so", ["it's", "so"]),
        ("f(a,b)", ["f(a,b)"]),
        ("a, ", ["a", ""]),
    ],
)
def test_a_comma_in_brackets_or_quotes_belongs_to_the_value(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_every_combination_of_the_axes_is_a_variant_and_every_seed_a_run(folder: Path) -> None:
    """Two axes of two values and two seeds: eight runs, seed by seed, with the words of `rlvr train`."""
    plan = planned(
        "seeds=1..2",
        "training.group_size=4,8",
        "training.steps=3",
        environment=("ROUNDING=default,avx2", "QUIET='0,1'"),
    )
    assert plan.folder == Path("runs/mock-study") and plan.seeds == (1, 2)
    assert [variant.name for variant in plan.variants] == [
        "training.group_size=4, ROUNDING=default",
        "training.group_size=4, ROUNDING=avx2",
        "training.group_size=8, ROUNDING=default",
        "training.group_size=8, ROUNDING=avx2",
    ]
    assert plan.variants[1].environment == {"QUIET": "0,1", "ROUNDING": "avx2"}
    assert plan.variants[3].config["training"]["group_size"] == 8
    assert [(run.seed, run.variant.name) for run in plan.runs[3:5]] == [
        (1, "training.group_size=8, ROUNDING=avx2"),
        (2, "training.group_size=4, ROUNDING=default"),
    ]
    assert plan.command(plan.runs[3]) == [
        "train", "--config=mock.yaml", "training.steps=3", "training.group_size=8", "seed=1",
        "run.root=runs/mock-study", "run.name=group_size-8_ROUNDING-avx2_seed-1",
    ]  # fmt: skip


def test_without_axes_there_is_one_variant_under_the_name_of_the_config(folder: Path) -> None:
    plan = planned("seeds=3", "run.root=elsewhere", name="mine")
    assert plan.folder == Path("elsewhere/mine")
    assert [run.name for run in plan.runs] == ["seed-3"] and plan.variants[0].name == "mock"


def test_values_that_make_no_folder_name_are_numbered(folder: Path) -> None:
    plan = planned("seeds=1", 'reward.kwargs.keywords=["a/b"],["a b"]')
    assert [run.name for run in plan.runs] == ["variant-1_seed-1", "variant-2_seed-1"]


def test_a_variable_is_there_while_the_config_of_its_variant_is_read(folder: Path, monkeypatch: Any) -> None:
    """`${oc.env:...}` sees it; afterwards the environment is as it was."""
    words = ("seeds=1", "reward.kwargs.keywords=['${oc.env:ROUNDING}']")
    with pytest.raises(ValueError, match="ROUNDING"):
        planned(*words)
    assert len(planned(*words, environment=("ROUNDING=one,two",)).variants) == 2
    with pytest.raises(ValueError, match="ROUNDING"):
        planned(*words)


def test_runs_at_a_time_are_the_cores_over_the_threads_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    by_variable = build_plan(*read_variants(["seeds=1", "engine.threads=0"]), config_name="arithmetic")
    assert (by_variable.threads, by_variable.jobs) == (1, available_cores())  # OMP_NUM_THREADS=1 in all tests
    monkeypatch.delenv("OMP_NUM_THREADS")
    one = build_plan(*read_variants(["seeds=1"]), config_name="arithmetic")
    assert (one.threads, one.jobs) == (1, available_cores())
    all_cores = build_plan(*read_variants(["seeds=1", "engine.threads=0"]), config_name="arithmetic")
    assert (all_cores.threads, all_cores.jobs) == (available_cores(), 1)


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["study", "seeds=1"], ["no config given", "--config-name"]),
    (studied(), ["seeds", "seeds=1..5"]),
    (studied("seeds=1", "seeds=2"), ["seeds", "twice"]),
    (studied("seeds=one"), ["'one'", "integer", "seeds=1..5"]),
    (studied("seeds=1.5"), ["1.5", "integer"]),
    (studied("seeds=-1"), ["-1", "integer"]),
    (studied("seeds="), ["seeds=", "integer"]),
    (studied("seeds=1,,2"), ["seeds=1,,2", "integer"]),
    (studied("seeds=5..1"), ["5..1", "empty", "1..5"]),
    (studied("seeds=1..5,3"), ["seed 3", "twice"]),
    (studied("seeds=1..99999999"), ["99,999,999", "10,000"]),
    (studied("seeds=9223372036854775808"), ["9223372036854775808", "2**63"]),
    (studied("seeds=1", "training.group_sise=4"), ["training.group_sise", "training.group_size"]),
    (studied("seeds=1", "training.group_sise=4,8"), ["training.group_sise", "training.group_size"]),
    (studied("seeds=1", "training.group_size=4,1"), ["group_size=1", "variant training.group_size=1"]),
    (studied("seeds=1", "training.steps=2,many"), ["many", "training.steps"]),
    (studied("seeds=1", "reward.type=keyword_contains,nonsense"), ["nonsense"]),
    (studied("seeds=1", "training.group_size=4,8,4"), ["training.group_size", "4 is given twice"]),
    (studied("seeds=1", "training.optimizer.learning_rate=0.01,1e-2"), ["0.01", "1e-2", "same run"]),
    (studied("seeds=1", "training.group_size=4,"), ["training.group_size", "empty", "quote"]),
    (studied("seeds=1", "training.steps=3", "training.steps=4,5"), ["training.steps", "given twice"]),
    (studied("seeds=1", "--environment", "A=1,1"), ["A=1,1", "twice"]),
    (studied("seeds=1", "--environment", "A=1", "--environment", "A=2"), ["--environment A", "twice"]),
    (studied("seeds=1", "--environment", "A"), ["--environment A", "NAME=value"]),
    (studied("seeds=1", "--environment", "1A=2"), ["1A=2", "NAME=value"]),
    (studied("seeds=1", "seed=3"), ["seed", "seeds=1..5"]),
    (studied("seeds=1", "training.seed=3"), ["training.seed", "seeds=1..5"]),
    (studied("seeds=1", "run.name=x"), ["run.name", "--name"]),
    (studied("seeds=1", "run_name=x"), ["run_name", "--name"]),
    (studied("seeds=1", "run.resume=false"), ["run.resume", "--name"]),
    (studied("seeds=1", "run={resume: false}"), ["run.resume=false", "leave it out"]),
    (studied("seeds=1..3,x"), ["expected integers from 0 and ranges", "'x'"]),
    (studied("seeds=1", "run.root=a,b"), ["run.root=a,b", "one folder"]),
    (studied("seeds=1", "run.root=${now:%H}"), ["run.root", "now"]),
    (studied("seeds=1", "--name", "../out"), ["../out", "letters, digits"]),
    (studied("seeds=1", "--jobs", "0"), ["--jobs"]),
    (studied("seeds=1", "group_size"), ["group_size", "key=value"]),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[" ".join(w[1:])[:60] for w, _ in MISTAKES])
def test_a_mistake_is_one_message_before_anything_starts(
    folder: Path, capfd: Any, words: list[str], expected: list[str]
) -> None:
    assert run(words) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said and all(word in said for word in expected), said
    assert [path.name for path in folder.iterdir()] == ["mock.yaml"]


def test_a_folder_takes_the_same_study_again_with_more_seeds_and_no_other(folder: Path) -> None:
    """Refused: fewer seeds, another setting, other variants or their order, another variable; the rest is the same."""
    axis = "training.group_size=4,8"
    for seeds in ("seeds=1..2", "seeds=1..2", "seeds=0..3"):
        with open_study(planned(seeds, axis, environment=("A=1",))):
            pass
    refused = {
        "more seeds (0, 1)": planned("seeds=2..5", axis, environment=("A=1",)),
        "differs in training.steps": planned("seeds=0..3", axis, "training.steps=7", environment=("A=1",)),
        "in this order: training.group_size=4; training.group_size=8": planned(
            "seeds=0..3", "training.group_size=8,4", environment=("A=1",)
        ),
        "other variants too (training.group_size=8)": planned(
            "seeds=0..3", "training.group_size=2,4", environment=("A=1",)
        ),
        "it differs in training.steps": planned(
            "seeds=0..3", "training.group_size=2,4", "training.steps=7", environment=("A=1",)
        ),
        "other variants too (training.group_size=4; training.group_size=8)": planned(
            "seeds=0..3", environment=("A=1",)
        ),
        "--environment A": planned("seeds=0..3", axis, environment=("A=2",)),
    }
    for words, plan in refused.items():
        with pytest.raises(ValueError) as caught, open_study(plan):
            pass
        assert words in str(caught.value) and "--name" in str(caught.value)
    with open_study(planned("seeds=0..3", axis, "tracking.mlflow=true", environment=("A=1",))):
        pass


def test_a_study_takes_more_variants_that_leave_the_run_folders_of_the_others(folder: Path) -> None:
    for values in ("4,8", "4,2,8"):
        with open_study(planned("seeds=1", f"training.group_size={values}")):
            pass
    keys = "reward.kwargs.keywords="
    with open_study(planned("seeds=1", f'{keys}["a/b"],["a b"]', name="numbered")):
        pass
    moved = planned("seeds=1", f'{keys}["c"],["a/b"],["a b"]', name="numbered")
    with pytest.raises(ValueError, match=r"in this order: .* new ones behind them"), open_study(moved):
        pass
    with open_study(planned("seeds=1", f'{keys}["a/b"],["a b"],["c"]', name="numbered")):
        pass


def test_a_study_that_is_running_is_not_started_again(folder: Path, capfd: Any) -> None:
    with open_study(planned("seeds=1")):
        assert run(studied("seeds=1")) == 2
    said = capfd.readouterr().err
    assert "mock-study" in said and "running" in said
    lock = lock_file(folder / "runs" / "mock-study" / ".lock")
    assert lock is not None, "the lock is free once the study has ended"
    lock.close()


def test_a_folder_with_other_files_is_refused(folder: Path) -> None:
    """A run's folder, say; what a study that was killed at once left is none."""
    place = folder / "runs" / "mock-study"
    (place / "logs").mkdir(parents=True)
    (place / ".lock").touch()
    with open_study(planned("seeds=1")):
        pass
    (place / "study.json").unlink()
    (place / "resolved.yaml").touch()
    with pytest.raises(ValueError, match="other files"), open_study(planned("seeds=1")):
        pass


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"seeds": [1], "variants": [{"name": 1}]}', '{"seeds": "x"}'])
def test_a_damaged_specification_is_named(folder: Path, content: str) -> None:
    place = folder / "runs" / "mock-study"
    place.mkdir(parents=True)
    (place / "study.json").write_text(content)
    with pytest.raises(ValueError, match=r"study\.json.*--name"), open_study(planned("seeds=1")):
        pass
