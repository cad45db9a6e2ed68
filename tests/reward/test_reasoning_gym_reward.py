"""The reward `reasoning_gym`: the library's verdict on good answers, and containment of all others."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from rlvr.audits.attack_runner import Canaries
from rlvr.audits.gym_audit import HOSTILE
from rlvr.core.types import Outcome, Score, Task
from rlvr.envs import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.reward.reasoning_gym.answer_grammar import GRAMMARS
from rlvr.reward.reasoning_gym.gym_reward import extract_answer, is_superstring
from rlvr.reward.signatures import Case
from tests.kit.packages import need_package

need_package("reasoning_gym", "needs the extra reasoning-gym")


def first_task(family: str, **kwargs: Any) -> Task:
    return resolve_environment("reasoning_gym", family=family, **kwargs).train(0, 0, "")


def judge(task: Task, answer: str, **options: Any) -> Score:
    reward = resolve_reward("reasoning_gym", timeout_s=1, **options)
    return reward.judge_all([Case.of_task(task, f"I think so. <answer>{answer}</answer>")])[0]


@pytest.mark.parametrize("family", ["leg_counting", "countdown", "spiral_matrix", "word_sorting"])
def test_the_librarys_answer_passes_and_another_does_not(family: str) -> None:
    task = first_task(family)
    assert judge(task, task.meta["answer"]) == Score(1.0, Outcome.PASSED, "", {"library_score": 1.0})
    assert judge(task, "1").outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("", "empty"), ("7" * 5000, "too_long"), ("__import__('os')", "refused"), ("1 + 1", "wrong_value")],
)
def test_a_failed_answer_has_a_reason(answer: str, reason: str) -> None:
    score = judge(first_task("countdown"), answer)
    assert (score.value, score.outcome, score.reason) == (0.0, Outcome.FAILED, reason)


def test_an_answer_without_tags_is_none() -> None:
    task = first_task("countdown")
    (score,) = resolve_reward("reasoning_gym").judge_all([Case.of_task(task, task.meta["answer"])])
    assert (score.value, score.reason) == (0.0, "no_answer")


def test_partial_credit_is_the_librarys_own_and_passes_nothing_more() -> None:
    task = first_task("leg_counting")
    gold = task.meta["answer"]
    score = judge(task, f"{gold} or more", partial_credit=True)
    assert score.outcome is Outcome.FAILED and score.value == pytest.approx(len(gold) / len(f"{gold} or more"))
    assert judge(task, f"{gold} or more").value == 0.0
    assert "partial_credit" in resolve_reward("reasoning_gym", partial_credit=True).caution
    assert resolve_reward("reasoning_gym").caution == ""


def test_a_superstring_does_not_pass_where_the_library_takes_it() -> None:
    """gsm_symbolic reads the first number of an answer, whatever follows."""
    task = first_task("gsm_symbolic")
    score = judge(task, f"{task.meta['answer']} or 1000000")
    assert score.parts == {"library_score": 1.0} and (score.value, score.reason) == (0.0, "superstring")


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("42", "42", False),
        ("42.0", "42", False),
        ("+1,042", "1,042", False),
        ("42 or 43", "42", True),
        ("the answer is 42", "42", True),
        (" Yes. ", "yes", False),
        ("[[1, 2]]", "[[1,2]]", False),
        ("7", None, False),
    ],
)
def test_a_superstring_has_more_words_or_numbers(answer: str, gold: str | None, expected: bool) -> None:
    assert is_superstring("chain_sum", answer, gold) is expected


@pytest.mark.parametrize(
    "text",
    [
        "<answer>1</answer>",
        "<answer> 1 </answer> <answer>2</answer>",
        "<answer>1<answer>2</answer>",
        "</answer><answer>1</answer></answer>",
        "<answer>1</answer> <answer>2",
        "<answer>\n1\n2\n</answer>",
        "<answer></answer>",
        "1",
        "<think><answer>3</answer></think>",
    ],
)
def test_the_answer_is_extracted_as_the_library_does(text: str) -> None:
    from reasoning_gym.utils import extract_answer as library_extract

    assert extract_answer(text) == library_extract(text)


@pytest.mark.parametrize("family", GRAMMARS)
def test_hostile_answers_to_a_family_that_evaluates_are_contained(family: str) -> None:
    """None passes, none avoids a verdict, none reaches anything outside, and the right answer passes afterwards."""
    task = first_task(family)
    with Canaries() as outside:
        scores = [judge(task, outside.fill(text)) for text in HOSTILE]
        assert outside.describe_damage() == ""
    assert {score.value for score in scores} == {0.0}
    assert judge(task, task.meta["answer"]).value == 1.0


@pytest.mark.parametrize(
    ("family", "answer"), [("coin_flip", "1e999999999"), ("rush_hour", "A+" + "9" * 900), ("n_queens", "9" * 900)]
)
def test_a_scorer_that_an_answer_keeps_busy_is_ended(family: str, answer: str) -> None:
    score = judge(first_task(family), answer)
    assert score.value == 0.0 and score.outcome in (Outcome.TIMEOUT, Outcome.FAILED)


def run_guarded(folder: Path, code: str, *answers: str) -> list[dict[str, Any]]:
    """What the job says of answers, in one worker, to a family whose scorer is `code`."""
    import sys

    from rlvr.reward.reasoning_gym import library_job
    from rlvr.sandbox.worker import MIB, Worker

    (folder / "own_scorer_job.py").write_text(
        f"import sys; sys.path.append({os.path.dirname(library_job.__file__)!r})\n"
        "import library_job, types\nfrom rlvr.sandbox.item_forks import ItemForks\n"
        "entry = {'question': 'q', 'answer': 'gold', 'metadata': {}}\n"
        f"def score_answer(answer, entry):\n    {code}\n"
        "library_job.make = lambda item: entry\n"
        "library_job.make_dataset = lambda *rest: types.SimpleNamespace(score_answer=score_answer)\n"
        "forks = ItemForks(['/usr'])\n"
        "def run(setup, item):\n    return library_job.score(forks, item)\n"
    )
    sys.path.insert(0, str(folder))
    worker = Worker("own_scorer_job", memory=256 * MIB, may_fork=True)
    try:
        item = {"family": "own", "config": {}, "level": None, "number": 0, "question": library_job.hash_text("q")}
        replies = worker.map(None, [{**item, "answer": answer, "seconds": 0.2} for answer in answers], 60.0)
        assert [reply.failure for reply in replies] == [""] * len(answers), replies
        return [reply.value for reply in replies]
    finally:
        worker.close()
        sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("code", "failure", "blames_answer"),
    [
        ("return 1 / (answer == 'gold')", "raised", True),
        ("return 1 / 0", "raised", False),
        ("while answer != 'gold': pass\n    return 1", "timeout", True),
        ("while True: pass", "timeout", False),
        ("return 1 if answer == 'gold' else float('nan')", "raised", True),
        ("return 2", "raised", False),
        ("return None", "raised", False),
        ("import os; os._exit(0) if answer != 'gold' else None; return 1", "died", True),
        ("return len(bytearray(1 << 40)) if answer != 'gold' else 1", "memory", True),
    ],
)
def test_the_answer_is_to_blame_where_the_right_one_can_be_scored(
    tmp_path: Path, code: str, failure: str, blames_answer: bool
) -> None:
    (report,) = run_guarded(tmp_path, code, "wrong")
    assert (report["failure"], report["blames_answer"]) == (failure, blames_answer)


def test_a_scorer_cannot_be_changed_for_the_next_answer(tmp_path: Path) -> None:
    code = "right = answer == entry['answer']; entry['answer'] = answer; return right"
    reports = run_guarded(tmp_path, code, "wrong", "wrong", "gold")
    assert reports == [{"score": 0.0}, {"score": 0.0}, {"score": 1.0}]


@pytest.mark.parametrize("meta", [{}, {"answer": "1"}, {"reasoning_gym": {"family": "countdown"}}])
def test_a_task_from_elsewhere_is_invalid(meta: dict[str, Any]) -> None:
    (score,) = resolve_reward("reasoning_gym").judge_all([Case("2+2?", "<answer>4</answer>", meta)])
    assert score.outcome is Outcome.INVALID and "env=reasoning_gym" in score.detail


def test_a_task_of_another_version_is_invalid() -> None:
    task = first_task("chain_sum")
    made_from = {**task.meta["reasoning_gym"], "question": "0" * 16}
    case = Case("", "<answer>4</answer>", {**task.meta, "reasoning_gym": made_from})
    (score,) = resolve_reward("reasoning_gym").judge_all([case])
    assert (score.outcome, score.reason) == (Outcome.INVALID, "other_task")


@pytest.mark.parametrize("timeout_s", [0, -1, math.inf, "long"])
def test_a_time_limit_is_a_number_of_seconds(timeout_s: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        resolve_reward("reasoning_gym", timeout_s=timeout_s)
