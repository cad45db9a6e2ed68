"""A solver and a verifier: who is paid for what, whose truth is known, what is measured, and every wrong option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.clients.mock.tabular_policy import WordTokenizer
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.envs import resolve_environment
from rlvr.envs.learned_verifier.verdict_env import read_verdict
from rlvr.envs.rpn_arithmetic import RPNArithmetic
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score

SMALL = {"p": 7, "complexity": [1, 2], "flaw": 0.0}


def make(**options: Any) -> Any:
    return resolve_environment("learned_verifier", **{"inner_kwargs": SMALL, "verdicts": 2, **options})


def draw(source: Any, is_known: bool) -> Task:
    """A training task of level 1 whose truth is known or not."""
    drawn = (source.train(0, index, "1") for index in range(1000))
    return next(task for task in drawn if task.meta["truth_known"] is is_known)


def script(source: Any, said: list[str]) -> ScriptedSamplingClient:
    tokenizer = WordTokenizer([*source.vocabulary, "noise"], end=source.end_word)
    turns = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
    return ScriptedSamplingClient(tokenizer, lambda index: turns[index % len(turns)])


def play(source: Any, task: Task, said: list[str], limit: int = 12) -> list[Trajectory]:
    """One episode in which the policy says these texts: the answer, then verdicts."""
    sampler = script(source, said)
    played = rollout(
        open_groups(source, [task], 1, sampler.get_tokenizer(), "g"), sampler, SamplingParams(limit), seed=1
    )
    score(played, resolve_reward(source.reward))
    return played


def right(source: Any, task: Task) -> str:
    return source.inner.chain(task.meta["expression"])


def wrong(task: Task) -> str:
    return f"= {(int(task.meta['answer']) + 1) % 7}"


def test_verdicts_are_paid_for_the_truth_where_it_is_known_and_the_solver_by_it() -> None:
    source = make(verdicts=4)
    task = draw(source, True)
    *verdicts, answer = play(source, task, [right(source, task), "right", "wrong", "right", "noise"])
    assert [t.role for t in (*verdicts, answer)] == ["verifier"] * 4 + ["solver"]
    assert [t.reward for t in verdicts] == [1.0, 0.0, 1.0, 0.0] and answer.reward == 1.0
    *verdicts, answer = play(source, task, [wrong(task), "right", "wrong", "right", "noise"])
    assert [t.reward for t in verdicts] == [0.0, 1.0, 0.0, 0.0] and answer.reward == 0.0
    assert answer.scores["environment"].outcome is Outcome.FAILED and not verdicts[0].scores


def test_the_solver_is_paid_by_the_share_of_accepting_verdicts_where_the_truth_is_unknown() -> None:
    source = make(verdicts=4)
    task = draw(source, False)
    for said in (right(source, task), wrong(task)):
        [answer] = play(source, task, [said, "right", "wrong", "right", "right"])
        assert (answer.role, answer.reward) == ("solver", 0.75), "no verdict is trained: nothing says what it is worth"
        assert answer.scores["environment"].outcome is Outcome.PASSED, "what the run is told, whatever code says"
    [answer] = play(source, task, [right(source, task), "wrong", "wrong", "right", "noise"])
    assert answer.reward == 0.25 and answer.scores["environment"].outcome is Outcome.FAILED


def test_the_truth_of_an_unknown_task_changes_nothing_but_metrics_of_truth() -> None:
    """The same words on a task with another reference: the same rows and rewards."""
    source = make()
    task = draw(source, False)
    other = replace(task, meta={**task.meta, "answer": str((int(task.meta["answer"]) + 1) % 7)})
    [one], [two] = (play(source, given, [right(source, task), "right", "wrong"]) for given in (task, other))
    assert (one.metadata["truth/correct"], two.metadata["truth/correct"]) == (1.0, 0.0)
    assert one.prompt_tokens == two.prompt_tokens and one.response_tokens == two.response_tokens
    assert (one.reward, one.turn_credits) == (two.reward, two.turn_credits)
    assert one.scores["environment"] == two.scores["environment"]


def test_with_known_reward_verifier_the_solver_is_paid_by_verdicts_everywhere() -> None:
    source = make(known_reward="verifier")
    task = draw(source, True)
    *verdicts, answer = play(source, task, [wrong(task), "right", "wrong"])
    assert answer.reward == 0.5 and [t.reward for t in verdicts] == [0.0, 1.0]


def test_pay_by_the_share_of_right_answers_by_hand() -> None:
    """With a fifth of the answers right, right verdicts earn 2 / (2 x 0.2) = 5 on them and 2 / (2 x 0.8) = 1.25."""
    source = make(right_share=0.2, verifier_weight=2.0)
    task = draw(source, True)
    *verdicts, _ = play(source, task, [right(source, task), "right", "wrong"])
    assert [t.reward for t in verdicts] == pytest.approx([5.0, 0.0])
    *verdicts, _ = play(source, task, [wrong(task), "right", "wrong"])
    assert [t.reward for t in verdicts] == pytest.approx([0.0, 1.25])


@pytest.mark.parametrize(
    ("is_known", "is_right", "rates"),
    [
        (True, True, {"false_refusal": 0.5}),
        (True, False, {"false_accept": 0.5}),
        (False, True, {"false_refusal": 0.5, "false_refusal/unknown": 0.5}),
        (False, False, {"false_accept": 0.5, "false_accept/unknown": 0.5}),
    ],
)
def test_rates_of_errors_are_measured_on_the_answers_that_have_them(
    is_known: bool, is_right: bool, rates: dict[str, float]
) -> None:
    source = make()
    task = draw(source, is_known)
    judged = play(source, task, [right(source, task) if is_right else wrong(task), "right", "noise"])[-1]
    measured = {name: value for name, value in judged.metadata.items() if name.startswith(("verdicts/", "truth/"))}
    expected = {"verdicts/accepted": 0.5, "verdicts/unreadable": 0.5, "verdicts/unasked": 0.0}
    expected |= {"truth/known": float(is_known), "truth/correct": float(is_right)}
    assert measured == expected | {f"verdicts/{name}": rate for name, rate in rates.items()}
    assert judged.metadata["turns/verifier"] == 2.0 and ("reward/verifier" in judged.metadata) is is_known


def test_the_verifier_reads_the_task_and_the_answer_alone() -> None:
    source = make(instruction="<verify> {prompt} <or> {answer} <verdict>")
    task = draw(source, True)
    tokenizer = WordTokenizer([*source.vocabulary, "noise"], end=source.end_word)
    verdict, *_ = play(source, task, ["= 3", "right", "wrong"])
    assert tokenizer.decode(verdict.prompt_tokens) == f"<verify> {task.prompt} <or> = 3 <verdict>"
    assert {"<verify>", "<or>", "<verdict>", "right", "wrong"} < set(source.vocabulary)
    assert not {"{prompt}", "{answer}"} & set(source.vocabulary)


@pytest.mark.parametrize("is_known", [True, False])
def test_an_answer_that_is_cut_off_is_refused_unasked(is_known: bool) -> None:
    source = make(known_reward="verifier")
    task = draw(source, is_known)
    words = right(source, task)
    [row] = play(source, task, [words, "right"], limit=len(words.split()))
    assert row.truncated and row.reward == 0.0
    assert row.metadata["verdicts/unasked"] == 1.0 and row.metadata["turns/verifier"] == 0.0


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("right", True),
        ("wrong", False),
        ("2 + 2 is not 5, so it is Wrong.", False),
        ("It is not wrong: **right**", True),
        ("right or wrong?", None),
        ("", None),
        ("   ", None),
        ("wright", None),
        ("the answer is right here", None),
        ("The answer is not right.", None),
        ("It isn't *wrong*", None),
        ("It isn’t right", None),
        ("not 4: right", True),
    ],
)
def test_the_last_word_is_the_verdict(text: str, verdict: bool | None) -> None:
    assert read_verdict(text) is verdict


def test_whose_truth_is_known_follows_from_the_task_alone() -> None:
    source, same, more = make(truth_share=0.3), make(truth_share=0.3, verdicts=5), make(truth_share=0.6)
    ids = {source.train(seed, index, "2").id for seed in (0, 1) for index in range(500)}
    known = {id for id in ids if source.is_truth_known(id)}
    assert known == {id for id in ids if same.is_truth_known(id)}
    assert known < {id for id in ids if more.is_truth_known(id)}, "a larger share knows what a smaller one does"
    assert abs(len(known) / len(ids) - 0.3) < 6 * (0.3 * 0.7 / len(ids)) ** 0.5
    for index in range(20):
        task = source.train(0, index, "1")
        assert task.meta["truth_known"] is source.is_truth_known(task.id)
    assert all(make(truth_share=1).is_truth_known(id) for id in ids)


def test_a_verifier_that_stands_still_takes_no_turn_of_the_policy(tmp_path: Path) -> None:
    source = make(opponent=str(tmp_path))
    assert source.opponent == str(tmp_path)
    source.seat(script(source, ["right"]))
    for is_known, paid in ((True, 0.0), (False, 1.0)):
        task = draw(source, is_known)
        [row] = play(source, task, [wrong(task), "wrong"])
        assert (row.role, row.reward) == ("solver", paid) and row.metadata["verdicts/false_accept"] == 1.0
        assert "turns/verifier" not in row.metadata, "a role that others play is not idle"


def test_without_weights_a_verifier_that_stands_still_is_an_error_and_not_a_refusal(tmp_path: Path) -> None:
    source = make(opponent=str(tmp_path))
    [row] = play(source, draw(source, False), ["= 3"])
    assert row.reward is None and "env.kwargs.opponent" in row.scores["environment"].detail


def test_a_held_out_task_is_answered_once_and_judged_by_code() -> None:
    source = make()
    tasks = source.heldout(6)
    assert tasks == source.inner.heldout(6)
    for task in tasks:
        [row] = play(source, task, [right(source, task)])
        [plain] = play(source.inner, task, [right(source, task)])
        assert (row.prompt_tokens, row.response_tokens, row.reward) == (plain.prompt_tokens, plain.response_tokens, 1.0)
        assert row.scores["environment"].outcome is Outcome.PASSED and not any("/" in name for name in row.metadata)
        [row] = play(source, task, [wrong(task)])
        assert row.reward == 0.0 and row.scores["environment"].outcome is Outcome.FAILED


class _WithoutReferences(RPNArithmetic):
    """Tasks of which the reward can say nothing."""

    def train(self, seed: int, index: int, level: str) -> Task:
        task = super().train(seed, index, level)
        return replace(task, meta={"modulus": 7, "expression": task.id})


def test_a_task_that_code_cannot_judge_is_paid_by_verdicts_and_an_error_where_its_truth_is_said_to_be_known() -> None:
    source = make(inner=_WithoutReferences(**SMALL), inner_kwargs=None)
    [row] = play(source, draw(source, False), ["= 3", "right", "wrong"])
    assert row.reward == 0.5 and "truth/correct" not in row.metadata and "verdicts/false_accept" not in row.metadata
    [row] = play(source, draw(source, True), ["= 3", "right", "wrong"])
    assert row.reward is None and "no_gold" in row.scores["environment"].detail


def test_demonstrations_are_of_both_roles_and_tell_no_truth_that_is_unknown() -> None:
    source = make(verdict_share=0.4, truth_share=0.5, inner_kwargs={**SMALL, "flaw": 0.3})
    tokenizer = WordTokenizer(source.vocabulary, end=source.end_word)
    said: list[str] = []
    for index in range(400):
        task = source.complete_prompt(source.train(0, index, "2"), tokenizer)
        shown = source.demonstration(task, 5)
        if not str(task.prompt).startswith("<verify>"):
            assert shown.startswith("=") and task.id == source.train(0, index, "2").id
            continue
        expression, _, chain = task.prompt.removeprefix("<verify> <boe> ").removesuffix(" <verdict>").partition(" = ")
        assert source.is_truth_known(expression) and not source.inner.is_heldout(expression)
        truth = source.inner.parse_task(expression).meta["answer"] == chain.split()[-1]
        assert shown == ("right" if truth else "wrong")
        said.append(shown)
    assert 100 < len(said) < 220  # 160 expected; six standard deviations
    assert 20 < said.count("right") < len(said) - 20
    flawless = make(verdict_share=1.0)
    shown = [
        flawless.complete_prompt(flawless.train(0, index, "2"), tokenizer).meta["true_verdict"] for index in range(100)
    ]
    assert 5 < shown.count("wrong") < 50, "also where no demonstration errs: some answer another task"


def test_where_no_truth_is_known_no_verdict_is_demonstrated(tmp_path: Path) -> None:
    source = make(truth_share=0, opponent=str(tmp_path), verdict_share=1.0)
    task = source.train(0, 0, "1")
    assert source.complete_prompt(task, None) == task and source.demonstration(task, 1) == right(source, task)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"truth_share": 1.5}, r"truth_share=1.5, expected .*at most 1"),
        ({"truth_share": 0}, r"truth_share=0 with opponent=self.*give a truth_share above 0"),
        ({"verdicts": 0}, r"verdicts=0, expected a whole number from 1"),
        ({"known_reward": "gold"}, r"known_reward='gold'.*truth"),
        ({"verifier_weight": 0}, r"verifier_weight=0, expected a finite number above 0"),
        ({"right_share": 0}, r"right_share=0, expected"),
        ({"verdict_share": 2}, r"verdict_share=2, expected"),
        ({"opponent": ".", "truth_share": 0, "known_reward": "verifier"}, r"known_reward='verifier' has no effect"),
        ({"opponent": ".", "right_share": 0.4}, r"right_share=0.4 has no effect with opponent='\.'.*leave right_share"),
        ({"opponent": ".", "verifier_weight": 2}, r"verifier_weight=2 has no effect with opponent='\.'"),
        ({"opponent": "no/such/run"}, r"opponent='no/such/run', expected self, or the path"),
        ({"instruction": "<verify> {answer}"}, r"lacks \{prompt\}"),
        ({"instruction": "<verify> {prompt}"}, r"lacks \{answer\}"),
        ({"inner": "mini_mbpp", "inner_kwargs": None}, r"waits for|cannot be wrapped"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**options)
