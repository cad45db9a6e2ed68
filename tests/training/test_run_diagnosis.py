"""A run's folder is diagnosed: a tiny real run provokes each trouble, and files that cannot be read are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlvr.training.diagnosis import Finding, format_findings
from rlvr.training.evaluate import Evaluation, TaskResult
from rlvr.training.run_diagnosis import closing_remark, diagnose_run, format_groups, stored_groups
from tests.kit.tiny_run import attempt

LETTERS = """
seed: 1
env: {name: "tests.kit.letter_tasks:LetterTasks"}
model:
  tokenizer: words
  device: cpu
  config: {model_type: gpt2, n_embd: 32, n_inner: 64, n_layer: 1, n_head: 4, n_positions: 8, activation_function: relu,
           initializer_range: 0.1, tie_word_embeddings: false, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}
rollout: {max_tokens: 2}
sft: {steps: 150, batch_size: 128, optimizer: {learning_rate: 0.01}}
training: {steps: 20, prompts_per_step: 16, group_size: 8, optimizer: {learning_rate: 0.003}}
evaluation: {tasks: 60, samples: 4}
engine: {threads: 1}
run: {name: letters, rollouts_per_step: 128}
"""


# --- tiny real runs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "says", "remark"),
    [
        ([FLAWED := "env.kwargs.flaw=0.4", "training.steps=60"], "", "nothing stands in the way", ""),
        (
            [FLAWED, "training.optimizer.learning_rate=1.0e-06"],
            "no_gain",
            "the held-out pass rate did not clearly change",
            "too small",
        ),
        (
            ["env.kwargs.wrong=[last]", "env.kwargs.flaw=0.2"],
            "unsolved_kind",
            r"one kind of task is never solved: kind last passes [\d.]+% where the others pass \d+%",
            "one kind of task is never solved: kind last",
        ),
        ([], "too_easy", "the tasks are too easy: 100% of completions passed from the first steps on", "too easy"),
        (
            ["env.kwargs.flaw=1.0", "training.group_size=4", "training.optimizer.learning_rate=1.0e-06"],
            "too_hard",
            r"the tasks are too hard: [\d.]+% of completions pass",
            "too hard",
        ),
        (
            [FLAWED, "reward.type=tests.kit.letter_tasks:give_all_the_same"],
            "reference_refused",
            r"equal their reference, and the reward refuses them[\s\S]*the same reward, 0.3",
            "the reward refuses them",
        ),
        (
            ["reward.type=tests.kit.letter_tasks:refuse"],
            "reference_refused",
            "fine-tuning reproduces whole demonstrations .* the verifier may refuse right answers",
            "the reward refuses them",
        ),
        (
            [FLAWED, "reward.type=tests.kit.letter_tasks:refuse"],
            "reference_refused",
            "no completion ever passed",
            "the reward refuses them",
        ),
    ],
    ids=["healthy", "tiny steps", "one kind", "too easy", "too hard", "equal rewards", "refused", "nothing passes"],
)
def test_a_tiny_run_is_told_its_trouble(
    words: list[str], code: str, says: str, remark: str, tmp_path: Path, monkeypatch: Any
):
    """The main finding; a healthy run has neither a problem nor a hint. The end of the run names it and the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.yaml").write_text(LETTERS)
    summary = attempt("letters.yaml", *words)
    folder = Path("runs/letters")
    diagnosis = diagnose_run(folder)
    text = format_findings(diagnosis.findings)
    assert re.search(says, text), text
    assert [f.code for f in diagnosis.findings if f.severity != "note"][:1] == ([code] if code else []), text
    said = closing_remark(folder, summary)
    assert (remark in said and "`rlvr doctor runs/letters`" in said) if remark else said == ""
    has_gained = "no gain was measured" not in said and "the pass rate did not" not in said
    assert has_gained == (code in ("", "unsolved_kind"))
    assert "60 held-out tasks" in diagnosis.basis or "stored completions" in diagnosis.basis
    if code == "unsolved_kind":
        [group] = diagnosis.groups
        assert group.name == "kind last" and format_groups(diagnosis).startswith("  kind last: ")
        [stored] = stored_groups(folder, 19)
        assert stored.name == "kind last", "a run in progress is grouped by its stored completions alike"


# --- folders made by hand ----------------------------------------------------------------------------------------


def result(task: int, passed: int, **features: str) -> dict[str, Any]:
    return {"id": f"t{task}", "level": "1", "passed": passed, "judged": 4, "reward": 0.0, "features": features}


def write_final(folder: Path, results: list[dict[str, Any]]) -> None:
    (folder / "evaluations").mkdir(parents=True)
    (folder / "evaluations" / "final.json").write_text(json.dumps({"results": results, "k": 4}))


def rollout_row(task: str, outcome: str, prompt: str = "add 1", **more: Any) -> dict[str, Any]:
    scores = {"exact": {"outcome": outcome}, "watching": {"outcome": "passed"}}
    return {"task_id": task, "rollout_id": task, "level": "", "prompt": prompt, "scores": scores, **more}


def write_rollouts(folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    (folder / "rollouts" / f"rl-{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_final_evaluation_decides_and_one_without_properties_is_grouped_by_level(tmp_path: Path):
    write_rollouts(tmp_path, 0, [rollout_row(f"t{i}", "passed") for i in range(40)])
    rows = [result(i, 0 if i % 3 == 0 else 4, kind="abc"[i % 3]) for i in range(60)]
    write_final(tmp_path, rows)
    diagnosis = diagnose_run(tmp_path)
    assert [group.name for group in diagnosis.groups] == ["kind a"]
    assert diagnosis.basis == "the 60 held-out tasks of the final evaluation"
    old = [{**row, "level": str(i % 3)} for i, row in enumerate(rows)]
    for row in old:
        del row["features"]
    (tmp_path / "evaluations" / "final.json").write_text(json.dumps({"results": old, "k": 4}))
    assert [group.name for group in diagnose_run(tmp_path).groups] == ["level 0"]


def test_the_final_pass_rate_tells_a_sure_policy_from_one_that_collapsed(tmp_path: Path):
    """A curriculum draws the hard tasks: 80 % of them pass, and 95 % of the held-out ones."""
    rows = [{"phase": "rl", "step": i, "env/all/correct": 0.8, "entropy": 0.4 if i < 9 else 0.01} for i in range(30)]
    assert [f.code for f in diagnose_run(tmp_path, rows).findings] == ["entropy_gone"]
    write_final(tmp_path, [result(i, 4 if i % 20 else 0) for i in range(100)])
    assert diagnose_run(tmp_path, rows).findings == []


def test_stored_completions_are_counted_by_task_up_to_a_step(tmp_path: Path):
    """Two completions of each task; those that turn fail from step 2 on."""
    for step in range(3):
        rows = [
            rollout_row(
                f"{kind} {i}", "failed" if step == 2 and kind == "turn" else "passed", f"{kind} {i}", rollout_id=n
            )
            for i in range(10)
            for kind in ("add", "turn")
            for n in (f"{i}/0", f"{i}/1")
        ]
        write_rollouts(tmp_path, step, rows)
    assert stored_groups(tmp_path, 1) == []
    (tmp_path / "rollouts" / "rl-000000.jsonl").unlink()
    (tmp_path / "rollouts" / "rl-000001.jsonl").unlink()
    [found] = stored_groups(tmp_path, 2)
    assert (found.name, found.tasks, found.rate, found.rate_of_others) == ('"turn" in the prompt', 10, 0.0, 1.0)


def test_of_large_files_only_the_newest_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A page of the dashboard waits for them."""
    for step in range(3):
        write_rollouts(tmp_path, step, [rollout_row(f"{step}/{i}", "passed") for i in range(10 * (step + 1))])
    sizes = [(tmp_path / "rollouts" / f"rl-{step:06d}.jsonl").stat().st_size for step in range(3)]
    for limit, tasks in ((sum(sizes), 60), (sum(sizes) - 1, 50), (sizes[2], 30), (sizes[2] - 1, 0)):
        monkeypatch.setattr("rlvr.training.run_diagnosis.STORED_BYTES", limit)
        assert diagnose_run(tmp_path).basis == (f"{tasks} tasks with stored completions" if tasks else "")


def test_only_words_of_every_prompt_of_a_task_count(tmp_path: Path):
    """A rewritten history puts the feedback into the prompt of those that failed, which explains nothing."""
    rows: list[dict[str, Any]] = []
    for i in range(40):
        again = {"rollout_id": f"{i}"}
        rows.append(rollout_row(f"t{i}", "passed" if i % 2 else "failed", f"add {i}", **again))
        if i % 2 == 0:
            rows.append(rollout_row(f"t{i}", "failed", f"add {i} your answer was wrong", **again))
    write_rollouts(tmp_path, 0, rows)
    assert stored_groups(tmp_path, 0) == []


def test_completions_without_a_verdict_are_left_out(tmp_path: Path):
    rows = [rollout_row(f"t{i}", "error" if i % 2 else "passed", "odd" if i % 2 else "even") for i in range(40)]
    write_rollouts(tmp_path, 0, rows)
    assert diagnose_run(tmp_path).basis == "20 tasks with stored completions"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe", b"[1]\n", b'{"scores": 3, "features": [1], "prompt": null}\n' * 9, b"[" * 20_000 + b"\n",
        b'{"scores": {"a": {"outcome": ["passed"]}}, "task_id": {}, "features": {"a": {"b": 1}}, "level": [1]}\n' * 9,
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_left_out(content: bytes, tmp_path: Path):
    for name in ("evaluations/final.json", "rollouts/rl-000000.jsonl", "metrics.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "rollouts" / "rl-000001.jsonl").mkdir()
    assert diagnose_run(tmp_path).groups == []


# --- the end of a run --------------------------------------------------------------------------------------------


def make_summary(p: float, low: float, before: float = 0.4) -> dict[str, Any]:
    reward = {"mean_reward": {"value": 0.5, "low": 0.4, "high": 0.6}}
    rates = {
        "baseline": {"pass@1": {"value": before}, **reward},
        "final": {"pass@1": {"value": before + low + 0.1}, **reward},
    }
    return {"p_value": p, "change": {"value": low + 0.1, "low": low, "high": low + 0.2}, **rates}


@pytest.mark.parametrize(
    ("p", "low", "says"),
    [
        (0.01, 0.1, ""),
        (
            0.2,
            0.1,
            "no gain was measured (p = 0.2): the held-out pass rate did not clearly change (40%, then 60%; change",
        ),
        (0.01, -0.1, "no gain was measured (p = 0.01): the held-out pass rate did not clearly change (40%, then 40%"),
        (0.01, -0.3, "the pass rate fell (p = 0.01): held-out tasks pass less often (40%, then 20%)"),
    ],
)
def test_a_gain_needs_the_test_and_the_interval(p: float, low: float, says: str, tmp_path: Path):
    summary = make_summary(p, low)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    row = {"phase": "rl", "step": 0, "env/all/correct": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    said = closing_remark(tmp_path, summary)
    assert said.startswith(says) and (said == "") == (says == "") and "\n" not in said
    assert said == "" or f"`rlvr doctor {tmp_path}`" in said
    assert [f.severity for f in diagnose_run(tmp_path).findings] == (["hint"] if says else [])


def finding_of(summary: dict[str, Any], folder: Path) -> Finding:
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text(json.dumps({"phase": "rl", "step": 0, "env/all/correct": 0.5}) + "\n")
    [found] = diagnose_run(folder).findings
    return found


def test_the_remedies_of_the_end_name_the_rate_of_muon_too(tmp_path: Path):
    row = {"phase": "rl", "step": 0, "env/all/correct": 0.5, "matrix_learning_rate": 0.01}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps(make_summary(0.01, -0.3)))
    [found] = diagnose_run(tmp_path).findings
    assert found.code == "lost" and "training.optimizer.matrix_learning_rate (and learning_rate)" in found.remedy


def test_a_run_without_training_is_not_blamed_for_its_gain(tmp_path: Path):
    summary = make_summary(1.0, -0.1) | {"steps": 0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert closing_remark(tmp_path, summary) == ""
    assert [finding.code for finding in diagnose_run(tmp_path).findings] == ["no_steps"]


def test_a_change_that_may_be_large_asks_for_more_tasks_and_a_small_one_for_larger_steps(tmp_path: Path):
    wide, narrow = make_summary(0.2, -0.05), make_summary(0.2, -0.05)
    narrow["change"] = {"value": 0.0, "low": -0.01, "high": 0.01}
    unclear, still = finding_of(wide, tmp_path), finding_of(narrow, tmp_path)
    assert unclear.fact.endswith("change -5.0 to +15.0 points): too few tasks to tell")
    assert "evaluation.tasks" in unclear.remedy and "learning_rate" not in unclear.remedy
    assert "too small or too few" in still.fact and "learning_rate" in still.remedy


def test_no_more_tasks_are_asked_for_than_are_held_out(tmp_path: Path):
    """A run that evaluated every held-out task is told how there come to be more."""
    summary = make_summary(0.2, -0.05) | {"tasks": 90, "incomplete": 10}
    more, no_more = (finding_of(summary | {"max_tasks": asked}, tmp_path).remedy for asked in (100, 101))
    assert "(evaluation.tasks)" in more
    assert "all 100 there are" in no_more and "heldout_fraction" in no_more and "evaluation.tasks" not in no_more


def test_a_higher_reward_without_more_passes_is_no_case_for_a_higher_learning_rate(tmp_path: Path):
    """Without interim evaluations too: the two evaluations of the run show it."""
    summary = make_summary(0.9, -0.1)
    summary["final"]["mean_reward"] = {"value": 0.8, "low": 0.7, "high": 0.9}
    found = finding_of(summary, tmp_path)
    assert found.code == "reward_only" and "earn more (0.5, then 0.8)" in found.fact


def test_a_kind_that_rose_during_the_run_is_being_learned(tmp_path: Path):
    """Level 2 passes 20 % at the end: a problem if it did before too, none if it began at 0."""

    def write(name: str, rate: float) -> None:
        results = [TaskResult(f"{level}-{i}", level, 5, 5, 1.0) for level in "13" for i in range(20)]
        results += [TaskResult(f"2-{i}", "2", round(5 * rate), 5, rate) for i in range(20)]
        path = tmp_path / "evaluations" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(Evaluation(results, 5).to_json()))

    write("final", 0.2)
    for before, expected in ((0.2, True), (0.0, False)):
        write("baseline", before)
        [group] = diagnose_run(tmp_path).groups
        assert (group.name, group.rate_before, group.is_unsolved) == ("level 2", before, expected)


@pytest.mark.parametrize("content", ["{}", "[]", '{"p_value": "x", "change": {}}', '{"p_value": 1, "change": []}'])
def test_a_summary_that_no_run_writes_is_left_out(content: str, tmp_path: Path):
    (tmp_path / "summary.json").write_text(content)
    assert [f.code for f in diagnose_run(tmp_path).findings] == ["no_steps"]


def test_no_gain_where_all_passed_before_needs_no_larger_steps(tmp_path: Path):
    summary = make_summary(1.0, -0.1, before=0.99)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert closing_remark(tmp_path, summary).startswith("no gain was measured (p = 1); `rlvr doctor ")
