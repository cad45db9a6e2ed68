"""`Run.compare`: two checkpoints complete the same prompts with the same random draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.tracking.completion_comparison import CompletionComparison, describe_change
from tests.kit.chat_rows import qwen_folder

pytest.importorskip("torch")

ROWS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(6)]


def digits(prompt: str, response: str, meta: dict[str, Any]) -> float:
    return float(sum(character.isdigit() for character in response) >= 1)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., rlvr.Run]:
    home = tmp_path_factory.mktemp("compared")
    model = qwen_folder(home / "model")

    def make(name: str, **more: Any) -> rlvr.Run:
        return rlvr.train(
            model, ROWS, digits, root=home, name=name, quiet=True, threads=1,
            **{"steps": 3, "group_size": 4, "prompts_per_step": 2, "max_tokens": 6, "learning_rate": 0.05,
               "checkpoint_every": 1, "lora": {"rank": 4}, "evaluation": {"tasks": 3, "samples": 4}, **more},
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def learned(train: Callable[..., rlvr.Run]) -> rlvr.Run:
    return train("learned")


def rate(rows: Any, side: str) -> float:
    return sum(row[f"{side}_verdict"] == "passed" for row in rows) / len(rows)


def test_start_and_last_are_those_of_the_runs_own_evaluations(learned: rlvr.Run) -> None:
    """The same held-out tasks with the same draws: the pass rates are those that the run reported."""
    compared = learned.compare(samples=4, quiet=True)
    assert len(compared.rows) == 12 and {row["sample"] for row in compared.rows} == {0, 1, 2, 3}
    for side, phase in (("first", "baseline"), ("second", "final")):
        assert rate(compared.rows, side) == pytest.approx(learned.summary[phase]["pass@1"]["value"])
    assert any(row["first"] != row["second"] for row in compared.rows), "equal completions would test nothing"
    assert sum(compared.changes.values()) == 12 and (compared.first, compared.second) == ("start", "final-000003")
    assert len(learned.compare(tasks=2, quiet=True).rows) == 2


def test_equal_weights_complete_with_the_same_draws(train: Callable[..., rlvr.Run]) -> None:
    still = train("still", learning_rate=1e-30)
    compared = still.compare(samples=2, quiet=True)
    assert [row["first"] for row in compared.rows] == [row["second"] for row in compared.rows]
    assert len({row["first"] for row in compared.rows}) > 1, "one text for all would test nothing"
    other = still.compare(samples=2, seed=7, quiet=True)
    assert [row["first"] for row in other.rows] != [row["first"] for row in compared.rows]


def test_prompts_of_ones_own_and_checkpoints_by_name_and_path(learned: rlvr.Run) -> None:
    prompts = ["Say a number.", "Say 7.", "Say 8."]
    earlier = learned.checkpoints[-1]
    assert earlier != learned.checkpoints[0], "the run keeps two"
    compared = learned.compare(earlier.name, learned.checkpoints[0], prompts=prompts, quiet=True)
    assert [row["prompt"] for row in compared.rows] == prompts
    assert compared.first == earlier.name
    by_path = learned.compare(earlier, "last", prompts=[{"prompt": prompt} for prompt in prompts], quiet=True)
    assert by_path.rows == compared.rows


def test_a_mistake_is_named_with_the_remedy(learned: rlvr.Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'rl-9' is no checkpoint of .*expected start, last, final-000003"):
        learned.compare("rl-9")
    with pytest.raises(ValueError, match="is no checkpoint of"):
        learned.compare(tmp_path)
    with pytest.raises(ValueError, match=r"both checkpoints are final-000003; give two"):
        learned.compare("last", learned.checkpoints[0])
    with pytest.raises(ValueError, match="no best checkpoint"):
        learned.compare("best")
    with pytest.raises(ValueError, match="tasks=0, expected at least 1"):
        learned.compare(tasks=0)
    with pytest.raises(ValueError, match=r"rollout\.max_tokens cannot be changed here"):
        learned.compare(max_tokens=3)
    with pytest.raises(ValueError, match="compare: data is of type int"):
        learned.compare(prompts=7)


def test_rows_whose_verdict_changed_come_first() -> None:
    assert describe_change("passed", "timeout") == "lost" and describe_change("failed", "error") == "not judged"
    rows = [make_row("a", "failed", "failed"), make_row("b", "passed", "failed"), make_row("c", "failed", "passed")]
    compared = CompletionComparison("it", "start", "last", rows)
    assert [row["task"] for row in compared.ordered] == ["c", "b", "a"]
    assert compared.changes == {"gained": 1, "lost": 1, "both passed": 0, "neither passed": 1, "not judged": 0}
    text = str(compared)
    assert "1 gained, 1 lost, 0 both passed, 1 neither passed" in text and "not judged" not in text
    assert "gained: 'prompt c'" in text and "prompt a" not in text


def make_row(task: str, first: str, second: str) -> dict[str, Any]:
    return {
        "task": task, "sample": 0, "prompt": f"prompt {task}",
        "first": f"same {task} <b>1", "second": f"same {task} 22",
        "first_reward": None if first == "error" else 0.5, "second_reward": 1.0,
        "first_verdict": first, "second_verdict": second, "change": describe_change(first, second),
    }  # fmt: skip


def test_the_table_is_escaped_and_a_page_for_a_browser(tmp_path: Path) -> None:
    compared = CompletionComparison("<script>", "start", "last", [make_row("a", "error", "passed")])
    page = compared.write(tmp_path / "it.html").read_text()
    assert page.startswith("<!doctype html>") and compared._repr_html_() in page
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;b&gt;1" in page
    assert '<span style="color:#999999">same a </span>' in page, "what both begin with"
    assert "no reward" in page and "passed</span> 1" in page
    with pytest.raises(ValueError, match=r"ends in \.html"):
        compared.write(tmp_path / "it.png")
