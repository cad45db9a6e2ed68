"""mini_mbpp: what is said, what is written and what is tested agree; what is held out stays out; the teacher errs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.cli.main import run
from rlvr.core.types import Outcome, Task
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs import resolve_environment
from rlvr.envs.mini_mbpp import MiniMBPP
from rlvr.envs.mini_mbpp.programs import (
    LETTERS,
    LIST,
    NUMBER,
    OPERATIONS,
    Step,
    Steps,
    family_of,
    fits,
    result_of,
    specification_of,
    write_flawed_program,
    write_program,
    write_statement,
)
from rlvr.reward import resolve_reward
from rlvr.sandbox import shared_sandbox

SOURCE = MiniMBPP(levels=["1", "2", "3"])
INPUTS: dict[str, list[Any]] = {
    NUMBER: [0, 7, 10, 99, 1234],
    LIST: [[], [5], [3, 0, 9, 9, 2, 8], [-4, 11, 6], list(range(12))],
}
WORDS = ["", "a", "abcab", "jihgf", "baab"]


def draw_tasks(level: str, count: int, seed: int = 5) -> Iterator[Task]:
    return (SOURCE.train(seed, index, level) for index in range(count))


def steps_of(task: Task) -> Steps:
    return tuple(Step(name, tuple(parameters)) for name, *parameters in task.meta["steps"])


def call_program(source: str, name: str, value: Any) -> Any:
    """What a program of ours returns, or that it has no answer (the largest of nothing)."""
    space: dict[str, Any] = {}
    exec(source, space)
    try:
        return space[name](value)
    except (ValueError, IndexError):
        return None


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_way_of_writing_an_operation_does_what_its_reference_does(name: str) -> None:
    """Alone, and with its operand an expression that needs parentheses or none, in every style."""
    operation = OPERATIONS[name]
    before = [o for o in OPERATIONS.values() if o.gives == operation.takes][:12]
    parameters = tuple(values[min(1 + i, len(values) - 1)] for i, values in enumerate(operation.parameters))
    chains = [(Step(name, parameters),)]
    chains += [(Step(o.name, tuple(v[0] for v in o.parameters)), Step(name, parameters)) for o in before]
    for steps in chains:
        for source in {write_program(steps, "f", key) for key in range(12)}:
            for value in INPUTS.get(steps[0].operation.takes, WORDS):
                assert call_program(source, "f", value) == result_of(steps, value), (source, value)


def test_problems_of_different_meaning_are_said_differently() -> None:
    """The statement determines the program: no sentence asks for two things."""
    meanings: dict[str, str] = {}
    for level in SOURCE.levels:
        for task in draw_tasks(level, 1500):
            meaning = specification_of(steps_of(task))
            assert meanings.setdefault(task.meta["statement"], meaning) == meaning
    assert len(set(meanings.values())) > 2000


def test_a_problem_reads_like_mbpp() -> None:
    task = SOURCE.train(0, 3, "2")
    lines = task.prompt_text.split("\n")
    assert re.fullmatch(r"Write a function to .*, then .*\.", lines[0]) and lines[2:] == [""]
    assert lines[1] == task.meta["tests"][0] and len(task.meta["tests"]) == 5
    assert all(re.fullmatch(rf"assert {task.meta['name']}\(.*\) == .*", test) for test in task.meta["tests"])
    everything = MiniMBPP(visible_tests="all", hidden_tests=0).train(0, 3, "2")
    assert everything.prompt_text.count("assert") == len(everything.meta["tests"]) == 3


def test_references_pass_in_the_sandbox_and_a_program_without_one_of_its_steps_does_not() -> None:
    """So each operation of a problem is tested for."""
    reward, responses, metas, wanted = resolve_reward("code"), list[str](), list[Any](), list[bool]()
    for level in ("1", "2", "3"):
        for task in draw_tasks(level, 40):
            steps, name = steps_of(task), task.meta["name"]
            shorter = [steps[:i] + steps[i + 1 :] for i in range(len(steps))] if len(steps) > 1 else []
            programs = [write_program(rest, name, 0) for rest in shorter if fits(rest, steps)]
            for source in [task.meta["solution"], *programs]:
                responses.append(source)
                metas.append(task.meta)
                wanted.append(source == task.meta["solution"])
    verdicts = shared_sandbox().verify_many(
        [{"solution": r, "tests": m["tests"]} for r, m in zip(responses, metas, strict=True)]
    )
    assert [verdict.passed for verdict in verdicts] == wanted and wanted.count(False) > 60
    assert reward("", responses[0], metas[0]) == 1.0


@pytest.mark.slow
def test_nothing_held_out_is_ever_trained_on() -> None:
    """Neither a problem, whatever it is called and however it is said, nor a family."""
    problems = {specification_of(steps_of(task)) for task in SOURCE.heldout(600)}
    families = {task.meta["family"] for task in SOURCE.extra_heldout(200)["held-out families"]}
    assert len(problems) == 600 and len(families) > 100
    trained = [task for level in SOURCE.levels for task in draw_tasks(level, 1500, seed=11)]
    assert not problems & {specification_of(steps_of(task)) for task in trained}
    assert not families & {task.meta["family"] for task in trained}
    assert {task.meta["family"] for task in SOURCE.heldout(600)}.isdisjoint(families)


def test_a_task_is_described_by_its_family_and_operations() -> None:
    task = next(draw_tasks("3", 1))
    first, *_, last = (step.name for step in steps_of(task))
    described = {"family": family_of(steps_of(task)), "first operation": first, "last operation": last}
    assert SOURCE.describe_task(task) == described and len(set(described.values())) == 3


def test_draws_are_counted_and_the_first_held_out_tasks_do_not_depend_on_how_many() -> None:
    again = MiniMBPP(levels=["3", "1", "2"])
    assert again.levels == ("1", "2", "3")
    assert [again.train(1, i, "2") for i in (7, 3)] == [SOURCE.train(1, i, "2") for i in (7, 3)]
    assert again.heldout(50) == SOURCE.heldout(120)[:50]
    assert SOURCE.train(1, 0, "2") != SOURCE.train(2, 0, "2")
    task = SOURCE.train(1, 0, "3")
    assert len({SOURCE.demonstration(task, key) for key in range(20)}) > 5
    assert SOURCE.demonstration(task, 4) == again.demonstration(task, 4)


def test_there_are_more_than_ten_thousand_different_problems_of_two_operations() -> None:
    problems = 0
    for name in SOURCE.families["2"]:
        count = 1
        for operation in name.split(", "):
            for values in OPERATIONS[operation].parameters:
                count *= len(values)
        problems += count
    assert problems > 10_000


@pytest.mark.parametrize(("flaw", "slip"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.6), (0.22, 0.7)])
def test_the_teacher_errs_at_about_the_configured_rate(flaw: float, slip: float) -> None:
    """Right with probability (1 - flaw)^choices x (1 - slip); a wrong choice may be right by luck."""
    right, likely, tasks = 0, 0.0, list(draw_tasks("2", 500))
    for i, task in enumerate(tasks):
        steps = steps_of(task)
        source = write_flawed_program(steps, task.meta["name"], i, flaw, slip)
        choices = sum(1 + len(step.parameters) for step in steps)
        likely += (1 - flaw) ** choices * (1 - slip)
        space: dict[str, Any] = {}
        try:
            exec(compile(source, "answer", "exec"), space)
            for test in task.meta["tests"]:
                exec(test, space)
            right += 1
        except Exception:
            pass
    assert right == len(tasks) if flaw == slip == 0 else abs(right - likely) < 0.09 * len(tasks)


def test_programs_and_prompts_survive_the_tokenizer_and_so_does_any_other_text() -> None:
    tokenizer = build_tokenizer("pieces", SOURCE.vocabulary, end=SOURCE.end_word, pad=SOURCE.pad_word)
    for level in SOURCE.levels:
        for i, task in enumerate(draw_tasks(level, 60)):
            for text in (task.prompt_text, SOURCE.demonstration(task, i)):
                assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("def solve(x):\n    return x + 3")) == 10

    @settings(deadline=None, max_examples=200)
    @given(st.text(alphabet=st.characters(max_codepoint=126, min_codepoint=32, include_characters="\n\t")))
    def any_text(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    any_text()
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("é")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": ["4"]}, r"levels=\['4'\], expected a list of different ones of '1', '2', '3'"),
        ({"levels": "12"}, "levels='12'"),
        ({"levels": []}, "levels="),
        ({"visible_tests": 4}, "visible_tests=4, expected 0 to 3, or all"),
        ({"visible_tests": True}, "visible_tests=True"),
        ({"hidden_tests": -1}, "hidden_tests=-1, expected 0 to 20"),
        ({"heldout_fraction": 0}, "heldout_fraction=0, expected a number above 0 and below 1"),
        ({"heldout_families": 1.0}, "heldout_families=1.0"),
        ({"flaw": 2}, "flaw=2, expected a number from 0 to 1"),
        ({"slip": "much"}, "slip='much'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_environment("mini_mbpp", **options)
    with pytest.raises(ValueError, match="level '3'; the levels are 1, 2"):
        MiniMBPP().train(0, 0, "3")


@pytest.mark.slow
def test_a_run_reports_the_families_held_out_beside_the_problems(tmp_path: Path, capsys: Any) -> None:
    """The shipped recipe in small, through the real sandbox: every answer is judged. `rlvr evaluate` says the same."""
    small = ["sft.steps=2", "sft.batch_size=8", "sft.until=0", "training.steps=1", "training.prompts_per_step=2"]
    small += [
        "training.group_size=2",
        "training.num_substeps=1",
        "evaluation.tasks=8",
        "evaluation.samples=2",
        f"run.root={tmp_path}",
    ]
    assert run(["train", "--config-name=mini_mbpp", "run.name=small", *small]) == 0
    summary = json.loads((tmp_path / "small" / "summary.json").read_text())
    assert summary["tasks"] == 8 and summary["unjudged"] == 0
    assert summary["beside"]["held-out families"]["tasks"] == 2
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "small")]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)["beside"]["held-out families"]
    assert {name: told[name] for name in ("pass@1", "pass@2", "mean_reward")} == {
        name: summary["beside"]["held-out families"]["final"][name] for name in ("pass@1", "pass@2", "mean_reward")
    }
    assert "pass@2, held-out families" in said.err and told["tasks"] == 2


def test_a_wrong_letter_is_distinguished_from_a_right_one() -> None:
    """Inputs hold the letters that a problem is about, so that its tests tell."""
    for task in draw_tasks("1", 300):
        if task.meta["family"] == "count letter":
            others = [letter for letter in LETTERS if letter != task.meta["steps"][0][1]]
            wrong = write_program((Step("count letter", (others[0],)),), task.meta["name"], 0)
            assert shared_sandbox().verify(wrong, task.meta["tests"]).outcome is Outcome.FAILED
            return
    raise AssertionError("no such problem in 300 draws")


def test_a_family_is_its_operations_without_their_parameters() -> None:
    steps = (Step("add", ("3",)), Step("multiply", ("4",)))
    assert family_of(steps) == "add, multiply" and specification_of(steps) == "add 3, multiply 4"
    assert re.fullmatch(r"Write a function to .*3.*, then .*4.*\.", write_statement(steps, 0))
    assert write_program(steps, "f", 1) != write_program(steps, "f", 2) or write_program(
        steps, "f", 1
    ) != write_program(steps, "f", 3)
