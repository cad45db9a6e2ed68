"""A proposer and a solver: which proposals count, who is paid for what, what is judged, and every wrong option."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.clients.mock.tabular_policy import WordTokenizer
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Trajectory
from rlvr.envs import resolve_environment
from rlvr.envs.propose.proposals import MOST_CHARACTERS, PAYS, ProposalRefusal, Proposals
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score

SMALL = {"p": 7, "complexity": [1, 2], "flaw": 0.0}


def make(**options: Any) -> Any:
    return resolve_environment("propose", inner_kwargs=SMALL, answers=options.pop("answers", 2), **options)


def trained_on(source: Any, count: int) -> list[str]:
    """Different expressions that may be proposed, none an example of the first task's prompt."""
    drawn = (source.inner.train(9, i, "1").id for i in range(1000))
    shown = source.train(0, 0, "").meta["examples"]
    return list(dict.fromkeys(id for id in drawn if id not in shown))[:count]


def play(source: Any, tasks: list[Any], said: list[str], size: int = 1, limit: int = 12) -> list[Trajectory]:
    """Episodes in which the policy says these texts: first all proposals of a group, then answers in turn."""
    tokenizer = WordTokenizer([*source.vocabulary, "noise"], end=source.end_word)
    turns = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
    sampler = ScriptedSamplingClient(tokenizer, lambda index: turns[index % len(turns)])
    played = rollout(open_groups(source, tasks, size, tokenizer, "g"), sampler, SamplingParams(limit), seed=1)
    score(played, resolve_reward(source.reward))
    return played


def right(source: Any, expression: str) -> str:
    return source.inner.chain(expression)


def test_the_solver_is_paid_for_right_answers_and_the_proposer_for_tasks_that_are_solved_sometimes() -> None:
    source = make(answers=4, proposer_weight=2.0)
    [expression] = trained_on(source, 1)
    good, bad = right(source, expression), "= 9"
    rows = play(source, [source.train(0, 0, "")], [f"<boe> {expression}", good, bad, good, good])
    proposal, *answers = rows
    assert [t.role for t in rows] == ["proposer"] + ["solver"] * 4
    assert [t.reward for t in answers] == [1.0, 0.0, 1.0, 1.0]
    assert proposal.reward == 2 * (1 - 0.75)
    tokenizer = WordTokenizer([*source.vocabulary, "noise"], end=source.end_word)
    assert {tokenizer.decode(t.prompt_tokens) for t in answers} == {f"<boe> {expression}"}, "each answers anew"
    assert tokenizer.decode(answers[0].response_tokens) == f"{good} <eoe>"
    judged = answers[-1]
    assert judged.scores["environment"].outcome is Outcome.PASSED and not proposal.scores
    assert judged.metadata["solve_rate"] == 0.75 and judged.metadata["turns/solver"] == 4.0
    assert judged.metadata["proposals/level/1"] == 1.0 and judged.metadata["proposals/refused"] == 0.0


@pytest.mark.parametrize(
    ("name", "paid"),
    [
        ("learnability", {0.0: 0.0, 0.25: 0.75, 0.5: 0.5, 1.0: 0.0}),
        ("uncertainty", {0.0: 0.0, 0.25: 0.5, 0.5: 1.0, 1.0: 0.0}),
    ],
)
def test_what_a_proposal_earns_at_a_rate_by_hand(name: str, paid: dict[float, float]) -> None:
    assert {rate: PAYS[name](rate, 1) for rate in paid} == paid


def test_a_random_reward_of_the_proposer_does_not_depend_on_the_solver() -> None:
    coins = [PAYS["random"](0.5, key) for key in range(400)]
    assert coins == [PAYS["random"](0.0, key) for key in range(400)] and set(coins) == {0.0, 1.0}
    assert 140 < sum(coins) < 260  # six standard deviations of 400 fair coins
    source = make(proposer_reward="random")
    one, two = trained_on(source, 2)
    said = [f"<boe> {one}", f"<boe> {two}", "= 9", "= 9", "= 9", "= 9"]
    tasks = [source.train(0, index, "") for index in range(20)]
    paid = [t.reward for task in tasks for t in play(source, [task], said, 2) if t.role == "proposer"]
    assert 0.0 in paid and 1.0 in paid, "although no answer is right"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("noise", ProposalRefusal.UNREADABLE),
        ("", ProposalRefusal.UNREADABLE),
        ("<boe>", ProposalRefusal.UNREADABLE),
        ("<boe> 3", ProposalRefusal.UNREADABLE),
        ("<boe> 3 4", ProposalRefusal.UNREADABLE),
        ("<boe> 3 + 4", ProposalRefusal.UNREADABLE),
        ("<boe> 3 4 + +", ProposalRefusal.UNREADABLE),
        ("<boe> 3 7 +", ProposalRefusal.UNREADABLE),  # an operand that is none modulo 7
        ("<boe> 3 4 + = 0", ProposalRefusal.UNREADABLE),  # a task with its answer
        ("__import__('os').system('x')", ProposalRefusal.UNREADABLE),
        ("<boe> 1 2 + 3 + 4 +", ProposalRefusal.SIZE),
        ("<boe> " + "1 " * 900_000 + "+ " * 899_999, ProposalRefusal.SIZE),
        ("1" * (MOST_CHARACTERS + 1), ProposalRefusal.SIZE),
    ],
)
def test_what_is_no_task_of_the_environment_is_refused(text: str, reason: ProposalRefusal) -> None:
    assert Proposals(make().inner, ()).check(text) is reason


def test_a_proposal_is_neither_held_out_nor_an_example_nor_a_repetition() -> None:
    source = make()
    heldout = [task.id for task in source.heldout(None) if task.level == "1"]
    one, two, shown = trained_on(source, 3)
    proposals = Proposals(source.inner, [shown])
    assert all(proposals.check(f"<boe> {id}") is ProposalRefusal.HELDOUT for id in heldout)
    assert proposals.check(f"<boe> {shown}") is ProposalRefusal.COPIED
    accepted = proposals.check(f"<boe> {one}")
    assert not isinstance(accepted, ProposalRefusal) and accepted.prompt == f"<boe> {one}"
    assert proposals.check(one) is ProposalRefusal.REPEATED, "the same task in other words"
    assert not isinstance(proposals.check(two), ProposalRefusal)
    every = [f"{a} {b} {o}" for a in range(7) for b in range(7) for o in "+-*"]
    verdicts = [Proposals(source.inner, ()).check(id) for id in every]
    assert {id for id, v in zip(every, verdicts, strict=True) if v is ProposalRefusal.HELDOUT} == set(heldout)


def test_a_group_shares_its_proposals_and_another_does_not() -> None:
    source = make()
    one, two = trained_on(source, 2)
    answers = ["= 9"] * 4
    rows = play(source, [source.train(0, 0, "")], [f"<boe> {one}", f"<boe> {one}", f"<boe> {two}", *answers], 3)
    by_rollout = {t.rollout_id: t for t in rows}  # the last trajectory of each
    refused = [t.metadata["proposals/refused/repeated"] for t in by_rollout.values()]
    assert refused == [0.0, 1.0, 0.0]
    tasks = [source.train(0, 0, ""), source.train(0, 0, "")]
    rows = play(source, tasks, [f"<boe> {one}", f"<boe> {one}", *answers])
    assert not any(t.metadata.get("proposals/refused") for t in rows)


def test_a_refused_proposal_is_judged_itself_and_paid_the_refused_reward() -> None:
    source = make(refused_reward=-0.25, proposer_weight=4.0)
    [row] = play(source, [source.train(0, 0, "")], ["noise"])
    assert (row.role, row.reward) == ("proposer", -1.0) and row.scores["environment"].outcome is Outcome.FAILED
    assert row.metadata["turns/solver"] == 0.0 and "solve_rate" not in row.metadata


def test_a_held_out_task_is_asked_once_in_the_prompt_of_the_inner_environment() -> None:
    source = make()
    tasks = source.heldout(6)
    assert tasks == source.inner.heldout(6)
    for task in tasks:
        [row] = play(source, [task], [right(source, task.id)])
        [plain] = play(source.inner, [task], [right(source, task.id)])
        assert (row.prompt_tokens, row.response_tokens) == (plain.prompt_tokens, plain.response_tokens)
        assert row.role == "solver" and row.reward == plain.reward == 1.0
        assert row.scores["environment"].outcome is Outcome.PASSED
        [wrong] = play(source, [task], ["= noise"])
        assert wrong.reward == 0.0 and wrong.scores["environment"].outcome is Outcome.FAILED


def test_an_answer_that_is_cut_off_is_wrong_as_in_the_inner_environment() -> None:
    source = make()
    [task] = source.heldout(1)
    length = len(right(source, task.id).split())
    [row] = play(source, [task], [right(source, task.id)], limit=length)
    assert row.truncated and row.reward == 0.0


def test_demonstrations_are_of_both_roles_and_never_held_out_or_copied() -> None:
    source = make(proposal_share=0.3)
    tokenizer = WordTokenizer(source.vocabulary, end=source.end_word)
    proposed = 0
    for index in range(400):
        task = source.complete_prompt(source.train(0, index, ""), tokenizer)
        shown = source.demonstration(task, 5)
        if str(task.prompt).startswith("<propose>"):
            proposed += 1
            assert not isinstance(Proposals(source.inner, task.meta["examples"]).check(shown), ProposalRefusal)
        else:
            assert source.inner.parse_task(task.prompt).meta["answer"] == shown.split()[-1]
    assert 65 < proposed < 175  # 120 expected; six standard deviations
    [heldout] = source.heldout(1)
    assert source.complete_prompt(heldout, tokenizer) == heldout
    assert source.demonstration(heldout, 1) == source.inner.demonstration(heldout, 1)


def test_the_prompt_shows_as_many_examples_as_the_instruction_asks_for() -> None:
    source = make(instruction="<propose> {example} <or> {example}")
    task = source.train(3, 4, "")
    first, second = task.meta["examples"]
    assert task.prompt == f"<propose> <boe> {first} <or> <boe> {second}" and task == source.train(3, 4, "")
    assert {"<propose>", "<or>"} < set(source.vocabulary)
    assert make(instruction="<propose>").train(0, 0, "").prompt == "<propose>"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"answers": 1}, r"answers=1, expected a whole number from 2"),
        ({"proposer_reward": "learnable"}, r"proposer_reward='learnable'.*learnability"),
        ({"proposer_weight": 0}, r"proposer_weight=0, expected a finite number above 0"),
        ({"refused_reward": 0.5}, r"refused_reward=0.5, expected .*at most 0"),
        ({"instruction": " "}, r"instruction=' ', expected a text"),
        ({"proposal_share": 2}, r"proposal_share=2, expected"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**options)


def test_an_environment_that_cannot_check_a_proposal_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'sorting' cannot be proposed.*is_heldout"):
        resolve_environment("propose", inner="sorting")
