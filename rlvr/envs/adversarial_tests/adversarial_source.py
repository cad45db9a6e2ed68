"""Environment `adversarial_tests`: a programmer writes programs, and a tester the tests that break them.

env: {name: adversarial_tests, kwargs: {inner: mini_mbpp, inner_kwargs: {hidden_tests: 5}}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from rlvr.core import rng
from rlvr.core.futures import run_to_end
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.engine.tokenizer import PIECE
from rlvr.envs.adversarial_tests.adversarial_env import (
    JUDGED_BY,
    PROGRAMMER,
    ROLES,
    TESTER,
    AdversarialEnv,
    AdversarialGroup,
    Trial,
    TrialRules,
)
from rlvr.envs.adversarial_tests.planted_bugs import plant_bugs
from rlvr.envs.adversarial_tests.trial import Judge
from rlvr.envs.adversarial_tests.written_tests import AssertForm, WrittenTest, read_calls
from rlvr.envs.prompt import append_text
from rlvr.envs.registry import register_environment
from rlvr.envs.wrapped_source import NestedSource
from rlvr.reward.code import CodeProblem
from rlvr.reward.code.code_reward import CodeOptions, get_sandbox
from rlvr.reward.reward_options import check_choice, check_integer, check_number

PLANTED = "planted bugs"  # the further held-out set of testers alone
EXPECTED = (TESTER, "reference")
_PLAYS = "plays"  # the key of a task's meta: the roles of its episodes; without it the programmer alone
_BUGS = "planted"  # the key of a task's meta: programs for the tester to break


@register_environment("adversarial_tests")
class AdversarialSource(NestedSource):
    """The policy plays two roles on each task of `inner`: a programmer, and a tester who is to break wrong programs.

    The tester reads the task and `instruction`, and writes at most `tests` lines of at most `max_characters`: an assert
    statement each, or with `expected: reference` a call, whose result the task's reference computes. With b the share
    of the group's wrong programs that fail an accepted test of an episode, and e the share of its lines that are
    refused or break a right program, the tester gets `tester_weight` times b - `penalty` e. The programmer gets what
    the reward `code` gives, by the tests that its prompt shows (`judged_by: shown`), by these and the group's accepted
    tests (`adversary`), or by all of the row (`row`). Held-out tasks are those of `inner`, a program each, judged by
    the row. In the further held-out set `planted bugs` a tester is alone with `planted` programs that differ from the
    reference by one change each, and the reward is the share that it breaks. `training_bugs` such programs join those
    of each training group. Of the demonstrations the share `test_share` are tests of the row that the prompt does not
    show; of these the share `test_flaw` have the result of another test. Programs run in the `sandbox`, on all tests of
    a task for at most `timeout_s`.
    """

    reward = "environment"
    roles = ROLES
    owns_prompts = True
    max_turns = 2

    def __init__(
        self,
        inner: str | TaskSource = "mini_mbpp",
        inner_kwargs: Mapping[str, Any] | None = None,
        expected: str = TESTER,
        judged_by: str = "adversary",
        tests: int = 1,
        max_characters: int = 200,
        penalty: float = 0.5,
        tester_weight: float = 1.0,
        planted: int = 4,
        training_bugs: int = 0,
        instruction: str = "# test\n",
        test_share: float = 0.5,
        test_flaw: float = 0.0,
        timeout_s: float = 2.0,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        check_choice("adversarial_tests: expected", expected, EXPECTED)
        check_choice("adversarial_tests: judged_by", judged_by, JUDGED_BY)
        check_integer("adversarial_tests: tests", tests, 1, 20)
        check_integer("adversarial_tests: max_characters", max_characters, 10, 2000)
        check_number("adversarial_tests: penalty", penalty, 0, 100)
        check_number("adversarial_tests: tester_weight", tester_weight, 0, above=True)
        check_integer("adversarial_tests: planted", planted, 1, 100)
        check_integer("adversarial_tests: training_bugs", training_bugs, 0, 100)
        check_number("adversarial_tests: test_share", test_share, 0, 1)
        check_number("adversarial_tests: test_flaw", test_flaw, 0, 1)
        check_number("adversarial_tests: timeout_s", timeout_s, 0, 60, above=True)
        if not isinstance(instruction, str) or not instruction.strip():
            raise ValueError(f"adversarial_tests: instruction={instruction!r:.80}, expected a text, such as '# test'")
        if test_flaw and expected != TESTER:
            raise ValueError(
                f"adversarial_tests: test_flaw={test_flaw:g} has no effect with expected={expected}: a demonstrated "
                f"test is a call alone, without a result to get wrong; leave it out, or use expected={TESTER}"
            )
        CodeOptions(sandbox=sandbox)  # refuses wrong settings now
        super().__init__("adversarial_tests", inner, inner_kwargs)
        if self.inner.reward not in ("code", "code_strict") or self.inner.max_turns > 1:
            raise ValueError(
                f"adversarial_tests: the tasks of {inner!r:.80} are judged by {self.inner.reward!r} in up to "
                f"{self.inner.max_turns} turns; expected an environment whose programs the reward 'code' judges in one "
                "turn, such as mini_mbpp"
            )
        self._rules = TrialRules(judged_by, penalty, tester_weight)
        self._form = AssertForm((), (), expected == TESTER, tests, max_characters)
        self._planted, self._training_bugs = planted, training_bugs
        self._instruction, self._sandbox, self._timeout_s = instruction, sandbox, timeout_s
        self._test_share, self._test_flaw = test_share, test_flaw
        self.group_builder = self._open_group

    @cached_property
    def vocabulary(self) -> list[str] | None:
        """The words of the inner environment, and the pieces of the instruction."""
        words = self.inner.vocabulary
        return None if words is None else list(dict.fromkeys([*words, *re.findall(PIECE, self._instruction)]))

    def train(self, seed: int, index: int, level: str) -> Task:
        task = self.inner.train(seed, index, level)
        return replace(task, meta={**task.meta, _PLAYS: ROLES})

    def heldout(self, count: int | None) -> list[Task]:
        return self.inner.heldout(count)

    def extra_heldout(self, count: int) -> dict[str, list[Task]]:
        """The extra held-out sets of the inner environment, and held-out tasks with planted bugs that fail a test of
        the row."""
        tasks = [task for task in self.inner.heldout(None) if CodeProblem.of(task.meta).solution]
        return {**self.inner.extra_heldout(count), PLANTED: run_to_end(self._plant(tasks, count))}

    async def _plant(self, tasks: list[Task], count: int) -> list[Task]:
        found: list[Task] = []
        for task in tasks:
            if len(found) == count:
                break
            problem = CodeProblem.of(task.meta)
            drawn = plant_bugs(problem.solution, 2 * self._planted, rng.key("planted bugs", task.id))
            result = await self.make_judge(task, computes_results=False).judge(drawn, [])
            wrong = [text for text in drawn if (one := result.programs[text]).runs and not one.is_right]
            if wrong:
                meta = {**task.meta, _PLAYS: (TESTER,), _BUGS: wrong[: self._planted]}
                found.append(replace(task, id=f"{task.id} ({PLANTED})", meta=meta))
        return found

    def env(self, task: Task, tokenizer: Any) -> AdversarialEnv:  # type: ignore[override]
        return self._open(task, tokenizer, self._open_trial(task, 1))

    def _open_group(self, task: Task, tokenizer: Any, size: int) -> AdversarialGroup:
        return AdversarialGroup(
            lambda trial: self._open(task, tokenizer, trial), lambda: self._open_trial(task, size), size
        )

    def _open_trial(self, task: Task, size: int) -> Trial:
        judge = self.make_judge(task, computes_results=not self._form.has_result)
        shown = find_shown_tests(task, judge.problem)
        if not shown and self._rules.judged_by != "row" and _PLAYS in task.meta:
            raise ValueError(
                f"adversarial_tests: the prompt of the task {task.id!r:.80} shows no test, by which "
                f"judged_by={self._rules.judged_by} pays; let it show one (inner_kwargs: {{visible_tests: 1}}), or use "
                "judged_by=row"
            )
        planted = task.meta.get(_BUGS, ())
        if _PLAYS in task.meta and not planted:
            planted = plant_bugs(judge.problem.solution, self._training_bugs, rng.key("training bugs", task.id))
        return Trial(judge, size, shown, planted)

    def describe_tests(self, task: Task) -> AssertForm:
        """The form of a test of the task, in words for a prompt."""
        problem = CodeProblem.of(task.meta)
        shown = read_calls(find_shown_tests(task, problem), problem.names)
        return replace(self._form, names=problem.names, shown_calls=[test.call for test in shown])

    def make_judge(self, task: Task, *, computes_results: bool) -> Judge:
        """Runs programs for the task; with `computes_results` also calls whose results the reference computes."""
        problem = CodeProblem.of(task.meta)
        if not problem.solution or problem.is_program:
            raise ValueError(
                f"adversarial_tests: the task {task.id!r:.80} has no solution that a test can call; give each row a "
                "function as `solution`, by which tests are known to be right"
            )
        return Judge(problem, get_sandbox(self._sandbox), self._timeout_s, computes_results)

    def _open(self, task: Task, tokenizer: Any, trial: Trial) -> AdversarialEnv:
        plays = task.meta.get(_PLAYS, (PROGRAMMER,))
        rules = replace(self._rules, penalty=0.0, tester_weight=1.0) if _BUGS in task.meta else self._rules

        async def open_turn(role: str) -> Any:
            asked = self._ask_for_tests(task) if role == TESTER else task
            return await self.inner.env(asked, tokenizer).initial_observation()

        return AdversarialEnv(task, tokenizer, plays, trial, rules, self.describe_tests(task), open_turn)

    def _ask_for_tests(self, task: Task) -> Task:
        return append_text(task, self._instruction)

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        """A task to imitate: of the training tasks the share `test_share` become prompts of the tester."""
        if task.meta.get(_PLAYS) != ROLES or rng.uniform(rng.key("demonstrated role", task.id)) >= self._test_share:
            return self.inner.complete_prompt(task, tokenizer)
        return replace(self._ask_for_tests(task), meta={**task.meta, _PLAYS: (TESTER,)})

    def demonstration(self, task: Task, key: int) -> str | list[str] | None:
        if task.meta.get(_PLAYS) != (TESTER,):
            return self.inner.demonstration(task, key)
        problem = CodeProblem.of(task.meta)
        shown = find_shown_tests(task, problem)
        tests = read_calls([test for test in problem.tests if test not in shown], problem.names)
        draw = rng.key("demonstrated tests", key, task.id)
        chosen = sorted(tests, key=lambda test: rng.key(draw, test.call))[: self._form.max_tests]
        return "\n".join(self._write(test, tests, rng.key(draw, place)) for place, test in enumerate(chosen)) or None

    def _write(self, test: WrittenTest, others: list[WrittenTest], key: int) -> str:
        """A test as the tester writes it; with probability `test_flaw` it expects another test's result."""
        if not self._form.has_result:
            return test.call
        results = [one.expected for one in others if one.expected != test.expected]
        if results and rng.uniform(key) < self._test_flaw:
            test = replace(test, expected=results[rng.integer(len(results), key, 1)])
        return test.statement


def find_shown_tests(task: Task, problem: CodeProblem) -> list[str]:
    """The tests of the row that the task's prompt shows."""
    return [test for test in map(str, problem.tests) if test in task.prompt_text]
