"""A programmer and a tester: which lines are tests, who breaks what, who is paid for what, and every wrong option."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.clients.mock.tabular_policy import WordTokenizer
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Trajectory
from rlvr.envs import resolve_environment
from rlvr.envs.adversarial_tests.adversarial_env import Entry, Trial
from rlvr.envs.adversarial_tests.planted_bugs import plant_bugs
from rlvr.envs.adversarial_tests.trial import Judge, TrialError, rename_functions
from rlvr.envs.adversarial_tests.written_tests import AssertForm, LineRefusal, WrittenTest, read_calls, read_tests
from rlvr.reward import resolve_reward
from rlvr.reward.code import CodeProblem
from rlvr.rollout import open_groups, rollout, score
from rlvr.sandbox import Sandbox, Verdict
from tests.kit.doubling import HIDDEN, PLUS, RIGHT, SHOWN, SQUARE, Doubling


def make(inner: Any = None, **options: Any) -> Any:
    return resolve_environment("adversarial_tests", inner=inner or Doubling(), **options)


def play(source: Any, tasks: list[Any], said: list[str], size: int = 1) -> dict[str, list[Trajectory]]:
    """The trajectories of each role in episodes in which the policy says these texts: all programs, then all tests."""
    tokenizer = WordTokenizer([word for text in said for word in text.split()])
    turns = [[*tokenizer.encode(text), 0] for text in said]
    sampler = ScriptedSamplingClient(tokenizer, lambda index: turns[index % len(turns)])
    played = rollout(open_groups(source, tasks, size, tokenizer, "g"), sampler, SamplingParams(99), seed=1)
    score(played, resolve_reward(source.reward))
    return {role: [t for t in played if t.role == role] for role in ("programmer", "tester")}


def play_one(tests: str, program: str = RIGHT, **options: Any) -> tuple[Trajectory, Trajectory]:
    """The trajectories of one episode: the program's, which is the judged one, and that of the tests."""
    source = make(**options)
    played = play(source, [source.train(0, 0, "1")], [program, tests])
    [[judged], [tester]] = played["programmer"], played["tester"]
    return judged, tester


GROUP = [RIGHT, PLUS, SQUARE, "double = lambda x x"]
WRITTEN = ["assert double(0) == 0", SHOWN, "assert double(4) == 9", "assert double(7) == 14"]


def test_tests_are_paid_for_wrong_programs_that_they_break_and_punished_for_right_ones() -> None:
    source = make(penalty=0.5, tester_weight=2.0)
    played = play(source, [source.train(0, 0, "1")], [*GROUP, *WRITTEN], 4)
    # 0 tells 2 * x from x + 2 and not from x ** 2; the shown test is copied; 4 * 2 is not 9; 7 breaks both.
    assert [t.reward for t in played["tester"]] == [2 * 0.5, 2 * -0.5, 2 * -0.5, 2 * 1.0]
    # Tests of the programmer: the shown one and the two that are accepted.
    assert [t.reward for t in played["programmer"]] == [1.0, 0.5 * 1 / 3, 0.5 * 2 / 3, -0.5]
    judged = [t.scores["environment"].outcome for t in played["programmer"]]
    assert judged == [Outcome.PASSED] + [Outcome.FAILED] * 3
    counted = [t.metadata for t in played["programmer"]]
    assert [c["broken/wrong"] for c in counted] == [0.5, 0.0, 0.0, 1.0]
    assert [c["broken/right"] for c in counted] == [0.0, 0.0, 1.0, 0.0]
    assert [c["tests/wrong"] for c in counted] == [0.0, 0.0, 1.0, 0.0]
    assert [c["tests/refused/copied"] for c in counted] == [0.0, 1.0, 0.0, 0.0]
    assert {c["programs/to_break"] for c in counted} == {2.0}, "a program that does not compile is none"
    assert [c["programs/runs"] for c in counted] == [1.0, 1.0, 1.0, 0.0]
    assert not any(c["programs/false_accept"] or c["tests/disputed"] for c in counted)


@pytest.mark.parametrize(
    ("judged_by", "paid", "fooled"),
    [("shown", [1.0, 1.0, 1.0, -0.5], [0, 1, 1, 0]), ("row", [1.0, 0.5 / 3, 0.5 / 3, -0.5], [0, 0, 0, 0])],
)
def test_programs_are_paid_by_the_tests_that_the_config_names(judged_by: str, paid: Any, fooled: Any) -> None:
    source = make(judged_by=judged_by)
    played = play(source, [source.train(0, 0, "1")], [*GROUP, *WRITTEN], 4)["programmer"]
    assert [t.reward for t in played] == paid
    assert [t.metadata["programs/false_accept"] for t in played] == fooled
    assert [t.metadata["correct"] for t in played] == [1.0, 0.0, 0.0, 0.0], "the row says what is right"


def test_the_reference_computes_what_a_call_returns_and_a_call_that_it_fails_is_punished() -> None:
    source = make(expected="reference", penalty=0.5)
    said = [*GROUP, "double(0)", "double(2)", "double(None)", "double(7)"]
    played = play(source, [source.train(0, 0, "1")], said, 4)
    assert [t.reward for t in played["tester"]] == [0.5, -0.5, -0.5, 1.0]
    assert [t.reward for t in played["programmer"]] == [1.0, 0.5 * 1 / 3, 0.5 * 2 / 3, -0.5]


def test_a_program_that_reads_the_reference_finds_none() -> None:
    cheat = "double = lambda x: reference_double(x)"
    judged, _ = play_one("double(7)", cheat, expected="reference")
    assert judged.reward == -0.5 and judged.metadata["programs/runs"] == 0.0


@pytest.mark.parametrize(
    "line",
    [
        "while True: pass",
        "import sys; sys.exit(0)",
        "assert double([0] * 10**12) == 4",
        "assert double(2 ** 2) == 8",
        "double = lambda x: 0",
        "assert (double := abs)(2) == 2",
        "assert reference_double(3) == 6",
        "assert double(reference_double(3)) == 12",
        "assert True",
        "assert 4 == 4",
        "assert double(4)",
        "assert double(4) == double(4)",
        "assert double(4) != 9",
        "assert 7 < double(4) == 8",
        "assert double(4) == 8, print('x')",
        "assert double(4) == 8; import os",
        "assert double(4) == __import__('os').getpid()",
        "assert double(*[4]) == 8",
        "assert double(**{'x': 4}) == 8",
        "assert triple(4) == 12",
        "assert double.__call__(4) == 8",
        "double(4)",
        "assert double(4) == " + "(" * 300 + "8" + ")" * 300,
        "assert double(4) == 8\x00",
        "",
    ],
)
def test_what_is_no_call_with_literals_and_its_literal_is_refused_and_never_runs(line: str) -> None:
    assert read_tests(line, AssertForm({"double"}, max_characters=1000)) == [LineRefusal.UNREADABLE]


def test_an_integer_of_more_digits_than_python_writes_is_no_test() -> None:
    assert read_calls(["assert double(1) == 0x" + "f" * 9_000, "assert double(2) == 4"], {"double"}) == [
        WrittenTest("double(2)", "4")
    ]


def test_literals_of_all_kinds_are_read_and_written_anew() -> None:
    form = AssertForm({"f"}, max_tests=9)
    read = read_tests("assert f( -1,'a', k=[1, (2,)]) == {'b': None}\n\n  assert f() == True\nassert f(1.5)==-2", form)
    assert read == [
        WrittenTest("f(-1, 'a', k=[1, (2,)])", "{'b': None}"),
        WrittenTest("f()", "True"),
        WrittenTest("f(1.5)", "-2"),
    ]
    assert read_tests("f(7)", AssertForm({"f"}, has_result=False)) == [WrittenTest("f(7)")]
    assert read_tests("assert f(7) == 1", AssertForm({"f"}, has_result=False)) == [LineRefusal.UNREADABLE]


def test_copies_repetitions_and_what_is_too_long_or_too_many_are_refused() -> None:
    form = AssertForm({"f"}, ["f(1)"], max_tests=2, max_characters=40)
    lines = ["assert f(1) == 5", "assert f( 2 ) == 4", "assert f(2) == 5", "assert f(3) == 1", "assert f(4) == 1"]
    read = read_tests("\n".join([*lines, f"assert f({'9' * 40}) == 1", *["assert f(5) == 1"] * 100]), form)
    assert read[1:2] + read[3:4] == [WrittenTest("f(2)", "4"), WrittenTest("f(3)", "1")]
    reasons = [LineRefusal.COPIED, LineRefusal.REPEATED, LineRefusal.MANY, LineRefusal.SIZE]
    assert [read[i] for i in (0, 2, 4, 5)] == reasons and read[6:] == [LineRefusal.MANY] * 100


def test_a_shown_call_is_copied_in_every_spelling() -> None:
    form = AssertForm({"f"}, ["f(1, [2])"], max_tests=9)
    for call in ("f(1,[2])", "f(+1, [2])", "f(1, [+2])", "f(0x1, [2,])"):
        assert read_tests(f"assert {call} == 3", form) == [LineRefusal.COPIED]
    assert read_tests("assert f(1, b=[2]) == 3", form) == [LineRefusal.UNREADABLE]
    assert read_tests("assert f(-1, [2]) == 3", form) == [WrittenTest("f(-1, [2])", "3")]
    named = AssertForm({"f"}, ["f(a=1)"])
    assert read_tests("assert f(a=1) == 3", named) == [LineRefusal.COPIED]
    assert read_tests("assert f(a=2) == 3", named) == [WrittenTest("f(a=2)", "3")]


def test_a_program_that_never_ends_on_one_test_is_broken_by_that_test_alone() -> None:
    slow = "double = lambda x: 2 * x if x < 50 else next(i for i in iter(int, 1) if i)"
    source = make(Doubling(tests=[SHOWN, *HIDDEN, "assert double(60) == 120"]), timeout_s=0.3, tests=1)
    said = [slow, slow, slow, "assert double(70) == 140", "assert double(80) == 160", "assert double(7) == 14"]
    played = play(source, [source.train(0, 0, "1")], said, 3)
    assert [t.reward for t in played["tester"]] == [1.0, 1.0, 0.0]
    assert played["programmer"][0].reward == 0.5 * 2 / 4  # the shown test and double(7), of four
    assert played["programmer"][0].metadata["correct"] == 0.0


def test_a_program_that_never_ends_on_a_test_of_the_row_is_broken_only_by_tests_that_it_fails() -> None:
    slow = "double = lambda x: 2 * x if x != 5 else next(i for i in iter(int, 1) if i)"
    _, tester = play_one("assert double(7) == 14", slow, timeout_s=0.3)
    assert tester.reward == 0.0


def test_a_call_that_the_reference_never_ends_breaks_right_programs() -> None:
    slow = "double = lambda x: 2 * x if x < 50 else next(i for i in iter(int, 1) if i)"
    source = make(Doubling(solution=slow), expected="reference", timeout_s=0.3)
    played = play(source, [source.train(0, 0, "1")], [RIGHT, PLUS, "double(60)", "double(7)"], 2)
    assert [t.reward for t in played["tester"]] == [-0.5, 1.0]
    assert played["programmer"][0].reward == 1.0, "a test that is not accepted costs the programmer nothing"


@pytest.mark.parametrize(
    "program",
    [
        "double = lambda x: __import__('os')._exit(0)",
        "double = lambda x: [0] * 10**11",
        "import builtins; builtins.AssertionError = ValueError; double = lambda x: 0",
        "import sys; sys.exit(0)",
    ],
)
def test_hostile_programs_are_wrong_and_the_episode_has_a_reward(program: str) -> None:
    judged, tester = play_one("assert double(7) == 14", program)
    assert judged.reward == -0.5 and judged.metadata["correct"] == 0.0
    assert tester.reward == (1.0 if judged.metadata["programs/runs"] else 0.0)


def test_a_test_that_finds_what_the_row_misses_is_disputed_and_not_accepted() -> None:
    """The row says which programs are right: one that differs from the reference elsewhere passes all its tests."""
    odd = "double = lambda x: 2 * x if x < 9 else 0"
    judged, tester = play_one("assert double(9) == 18", odd)
    assert (judged.reward, tester.reward, judged.metadata["tests/disputed"]) == (1.0, -0.5, 1.0)
    assert judged.metadata["broken/right"] == 0.5, "of the reference and the program"


class BrokenSandbox(Sandbox):
    """Runs nothing."""

    def __init__(self) -> None:
        return

    async def averify(self, *args: Any, **keywords: Any) -> Verdict:
        return Verdict(Outcome.ERROR, "sandbox", (), "", "", 0.0, "the solver process was lost")


def test_a_sandbox_that_breaks_is_an_error_for_every_episode_and_never_a_zero() -> None:
    judge = Judge(CodeProblem.of(Doubling().train(0, 0, "1").meta), BrokenSandbox(), 1.0, False)
    trial = Trial(judge, 2, [SHOWN], [])

    async def hand_in() -> Any:
        return await asyncio.gather(trial.hand_in(Entry(RIGHT)), trial.hand_in(Entry(PLUS)), return_exceptions=True)

    failures = asyncio.run(hand_in())
    assert [type(one) for one in failures] == [TrialError] * 2
    assert {str(one) for one in failures} == {"the sandbox failed: sandbox the solver process was lost"}


def test_a_reference_that_fails_its_row_is_an_error_that_names_it() -> None:
    judged, _ = play_one("assert double(7) == 14", inner=Doubling(solution=PLUS))
    assert judged.reward is None and "own solution fails" in judged.scores["environment"].detail


def test_a_tester_whose_prompt_does_not_fit_has_no_turn_and_the_program_is_judged() -> None:
    source = make(instruction="test " * 50)
    tokenizer = WordTokenizer(RIGHT.split())
    tokenizer.model_max_length = 40  # type: ignore[attr-defined]
    sampler = ScriptedSamplingClient(tokenizer, lambda index: [*tokenizer.encode(RIGHT), 0])
    groups = open_groups(source, [source.train(0, 0, "1")], 2, tokenizer, "g")
    played = rollout(groups, sampler, SamplingParams(9), seed=1)
    score(played, resolve_reward("environment"))
    assert [(t.role, t.reward, t.metadata["turns/tester"]) for t in played] == [("programmer", 1.0, 0.0)] * 2


def test_held_out_tasks_are_those_of_the_inner_environment_judged_by_the_row() -> None:
    source = make(judged_by="shown")
    assert source.heldout(1) == source.inner.heldout(1)
    played = play(source, source.heldout(1), [PLUS, RIGHT], 2)
    assert [t.reward for t in played["programmer"]] == [0.5 / 3, 1.0] and not played["tester"]
    assert [t.metadata["correct"] for t in played["programmer"]] == [0.0, 1.0]


def test_planted_bugs_are_for_the_tester_alone_and_the_reward_is_the_share_that_is_broken() -> None:
    source = make(planted=9)
    [task] = source.extra_heldout(5)["planted bugs"]
    bugs = ["lambda x: 2 // x", "lambda x: 2 + x", "lambda x: 3 * x", "lambda x: 1 * x"]
    assert sorted(task.meta["planted"]) == sorted(f"double = {bug}" for bug in bugs)
    said = ["assert double(0) == 0", "assert double(1) == 2", "assert double(1) == 3"]
    played = play(source, [task], said, 3)["tester"]
    # 2 // 0 raises; 2 + 0 is not 0; 3 * 0 and 1 * 0 are. For 1: 2 // 1 is 2, the others are 3, 3 and 1.
    assert [t.reward for t in played] == [2 / 4, 3 / 4, 0.0]
    assert [t.metadata["broken/wrong"] for t in played] == [2 / 4, 3 / 4, 0.0]
    [all_broken] = play(source, [task], ["assert double(7) == 14"])["tester"]
    assert all_broken.reward == 1.0 and all_broken.scores["environment"].outcome is Outcome.PASSED


def test_planted_bugs_join_the_programs_to_break_and_one_that_passes_the_row_counts_as_neither() -> None:
    """Of the bugs `2 + x`, `2 // x`, `3 * x` and `1 * x` the first passes a row that tests 2 alone."""
    source = make(Doubling(tests=[SHOWN]), training_bugs=9)
    played = play(source, [source.train(0, 0, "1")], [RIGHT, "double = lambda x: 0", "assert double(0) == 0", SHOWN], 2)
    assert {t.metadata["programs/to_break"] for t in played["programmer"]} == {4.0}
    # 0 tells none of `lambda x: 0`, `3 * x` and `1 * x`; 2 // 0 raises, and x + 2 would be broken too.
    assert [t.metadata["broken/wrong"] for t in played["programmer"]] == [1 / 4, 0.0]
    assert [t.metadata["broken/right"] for t in played["programmer"]] == [0.0, 0.0]


def test_planted_bugs_by_hand() -> None:
    program = "def f(x):\n    return sorted(x)[:2] if x[0] >= 1 and 'b' else min(x)"
    found = plant_bugs(program, 100, 1)
    changes = [("sorted", "list"), (":2", ":3"), (":2", ":1"), ("[0]", "[1]"), ("[0]", "[-1]"), (">=", ">")]
    changes += [(">=", "<"), ("1 and", "2 and"), ("1 and", "0 and"), ("and", "or"), ("'b'", "'c'"), ("min", "max")]
    assert sorted(found) == sorted(program.replace(a, b) for a, b in changes)
    assert plant_bugs(program, 3, 1) == found[:3] and plant_bugs(program, 100, 2) != found
    assert plant_bugs("f = lambda x: x", 5, 1) == []


def test_the_renamed_reference_calls_itself_by_its_new_name() -> None:
    text = rename_functions("def f(n):\n    return 1 if n < 2 else n * f(n - 1)", {"f"})
    assert text == "def reference_f(n):\n    return 1 if n < 2 else n * reference_f(n - 1)"
    with pytest.raises(ValueError, match=r"defines the class 'Node'.*expected: tester"):
        rename_functions("class Node:\n    pass\ndef f(n):\n    return Node()", {"f"})


def test_demonstrations_are_programs_and_hidden_tests_of_which_some_are_wrong() -> None:
    source = make(test_share=0.4, test_flaw=0.25)
    programs = wrong = 0
    for index in range(400):
        task = source.complete_prompt(source.train(0, index, "1"), None)
        shown = source.demonstration(task, 5)
        if task.model_prompt.endswith("# test\n"):
            assert shown.split(" == ")[0] in {test.split(" == ")[0] for test in HIDDEN}
            wrong += shown not in HIDDEN
        else:
            programs += 1
            assert shown == RIGHT
    assert 181 < programs < 299  # 240 expected; six standard deviations
    assert 8 < wrong < 72  # 40 expected of 160 tests, likewise
    calls = make(test_share=1.0, expected="reference")
    assert calls.demonstration(calls.complete_prompt(calls.train(0, 0, "1"), None), 5) in ("double(3)", "double(5)")
    assert source.demonstration(source.heldout(1)[0], 1) == RIGHT


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expected": "policy"}, r"expected='policy'.*reference"),
        ({"judged_by": "all"}, r"judged_by='all'.*adversary"),
        ({"tests": 0}, r"tests=0, expected a whole number from 1"),
        ({"max_characters": 5}, r"max_characters=5, expected a whole number from 10"),
        ({"penalty": -1}, r"penalty=-1, expected"),
        ({"tester_weight": 0}, r"tester_weight=0, expected a finite number above 0"),
        ({"planted": 0}, r"planted=0, expected"),
        ({"training_bugs": -1}, r"training_bugs=-1, expected"),
        ({"instruction": ""}, r"instruction='', expected a text"),
        ({"test_share": 2}, r"test_share=2, expected"),
        ({"test_flaw": 0.5, "expected": "reference"}, r"test_flaw=0.5 has no effect with expected=reference"),
        ({"test_flaw": -1}, r"test_flaw=-1, expected"),
        ({"timeout_s": 0}, r"timeout_s=0, expected"),
        ({"sandbox": {"workers": 0}}, r"sandbox.workers=0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**options)


def test_tasks_without_programs_solutions_or_shown_tests_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'sorting' are judged by .*the reward 'code' judges"):
        resolve_environment("adversarial_tests", inner="sorting")
    for inner, said in (
        (Doubling(solution=""), r"has no solution that a test can call"),
        (Doubling(solution="print(input())", tests=[{"input": "1", "output": "2"}]), r"has no solution that a test"),
        (Doubling(shown="no test"), r"shows no test.*judged_by=row"),
    ):
        source = make(inner)
        with pytest.raises(ValueError, match=said):
            source.env(source.train(0, 0, "1"), WordTokenizer([]))
