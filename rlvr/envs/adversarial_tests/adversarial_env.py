"""The episodes of a programmer and a tester: each writes once, and a group is judged when all of it is written.

The programmer's turn is a branch of the episode with the role `programmer`, the tester's one with the role `tester`.
Both read the task; neither reads the other. What the episodes of a group wrote is run against each other in one trial,
which the last of them starts; the others wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.chat.turns import has_room
from rlvr.core.messages import ModelInput, SampledSequence
from rlvr.core.protocols import Env, ExternalEnv, InitialObservationOverflow, StepResult
from rlvr.core.types import Task, Trajectory
from rlvr.envs.adversarial_tests.trial import Judge, TrialError, TrialResult, write_statement
from rlvr.envs.adversarial_tests.written_tests import AssertForm, LineRefusal, WrittenTest, read_tests
from rlvr.reward.code.program_extraction import extract

PROGRAMMER, TESTER = ROLES = ("programmer", "tester")
JUDGED_BY = ("shown", "adversary", "row")
FAILURE = -0.5  # of a program that passes no test, as the reward `code` has it


@dataclass(frozen=True)
class TrialRules:
    """How both roles are paid. `judged_by` says which tests a program is paid for; `penalty` is what a tester loses
    whose tests all break right programs or are refused."""

    judged_by: str
    penalty: float
    tester_weight: float


@dataclass
class Entry:
    """What an episode wrote: the text of its program, and the lines of its tests; None if it had no such turn."""

    program: str | None = None
    tests: list[WrittenTest | LineRefusal] | None = None

    @property
    def statements(self) -> list[str]:
        return [write_statement(test) for test in self.tests or () if isinstance(test, WrittenTest)]


class Trial:
    """The entries of a group's episodes, and what comes of them. `shown` are the tests that the prompt shows, `planted`
    programs to break beside those of the group."""

    def __init__(self, judge: Judge, size: int, shown: Sequence[str], planted: Sequence[str]) -> None:
        self._judge, self._size, self.shown, self._planted = judge, size, shown, planted
        self.row = [str(test) for test in judge.problem.tests]
        self._entries: list[Entry] = []
        self._over = asyncio.Event()
        self._result: TrialResult | None = None
        self._failure = ""

    async def hand_in(self, entry: Entry) -> TrialResult:
        """Add an episode's texts, wait for those of the whole group, and return what came of them."""
        self._entries.append(entry)
        if len(self._entries) < self._size:
            await self._over.wait()
        else:
            programs = [one.program for one in self._entries if one.program]
            tests = [statement for one in self._entries for statement in one.statements]
            try:
                self._result = await self._judge.judge(programs, tests, self._planted)
            except TrialError as failure:
                self._failure = str(failure)
            finally:
                self._over.set()
        if self._result is None:
            raise TrialError(self._failure)
        return self._result


class AdversarialEnv(ExternalEnv):
    """One episode: the roles `plays` take a turn each, in that order. `open_turn` gives what a role reads and what ends
    its turn. The program is judged, or where there is none the tests."""

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        plays: Sequence[str],
        trial: Trial,
        rules: TrialRules,
        form: AssertForm,
        open_turn: Callable[[str], Any],
    ) -> None:
        self.task, self._tokenizer, self._plays, self._trial = task, tokenizer, plays, trial
        self._rules, self._form, self._open_turn = rules, form, open_turn
        self._entry = Entry()
        self._played: list[str] = []
        self._rewards: list[float] = []
        self.role = plays[0]

    async def initial_observation(self) -> tuple[ModelInput, Any] | InitialObservationOverflow:
        return await self._open_turn(self.role)

    async def take(self, answer: SampledSequence) -> StepResult:
        shown = answer.tokens[: len(answer.tokens) - (answer.end_tokens or 0)]
        text = self._tokenizer.decode(shown, skip_special_tokens=False)
        self._played.append(self.role)
        if self.role == PROGRAMMER:
            self._entry.program = extract(text, self._form.names).code
        else:
            self._entry.tests = read_tests(extract(text, self._form.names).code, self._form)
        if len(self._played) < len(self._plays):
            self.role = self._plays[len(self._played)]
            prompt, stop = await self._open_turn(self.role)
            if has_room(self._tokenizer, prompt.to_ints(), [0]):
                return StepResult(0.0, False, prompt, stop)
        try:
            result = await self._trial.hand_in(self._entry)
        except TrialError as failure:
            return StepResult(0.0, True, error=f"task {self.task.id!r:.80}: {failure}")
        return self._pay(result)

    def _pay(self, result: TrialResult) -> StepResult:
        metrics = {f"turns/{role}": float(role in self._played) for role in self._plays}
        earned: dict[str, float] = {}
        correct = 0.0
        if TESTER in self._played:
            earned[TESTER], broken, measured = self._pay_tests(result)
            metrics |= measured
            correct = float(broken == len(result.wrong) > 0)
        if PROGRAMMER in self._played:
            earned[PROGRAMMER], correct, measured = self._pay_program(result)
            metrics |= measured
        self._rewards = [earned[role] for role in self._played]
        metrics |= {f"reward/{role}": reward for role, reward in earned.items()}
        return StepResult(self._rewards[0], True, metrics={"correct": correct, **metrics})

    def _pay_program(self, result: TrialResult) -> tuple[float, float, dict[str, float]]:
        """The programmer's reward, whether the program is right, and what is counted of it."""
        mine = result.programs.get(self._entry.program or "")
        tests = self._choose_tests(result)
        passed = sum(test in mine.passed for test in tests) if mine else 0
        reward = 1.0 if passed == len(tests) else 0.5 * passed / len(tests) if passed else FAILURE
        is_right = bool(mine and mine.is_right)
        is_fooled = passed == len(tests) and not is_right
        counts = {
            "programs/right": is_right,
            "programs/runs": bool(mine and mine.runs),
            "programs/false_accept": is_fooled,
        }
        return reward, float(is_right), {name: float(value) for name, value in counts.items()}

    def _choose_tests(self, result: TrialResult) -> Sequence[str]:
        """The tests that a program is paid for."""
        if self._rules.judged_by == "row" or TESTER not in self._plays:
            return self._trial.row
        return [*self._trial.shown, *(sorted(result.accepted) if self._rules.judged_by == "adversary" else ())]

    def _pay_tests(self, result: TrialResult) -> tuple[float, int, dict[str, float]]:
        """The tester's reward, how many wrong programs its tests break, and what is counted of them."""
        written, statements = self._entry.tests or [], self._entry.statements
        broken = result.count_wrong_broken(statements)
        wrong = sum(statement not in result.accepted for statement in statements)
        disputed = sum(statement in result.reference.passed - result.accepted for statement in statements)
        refused = len(written) - len(statements)
        share = broken / len(result.wrong) if result.wrong else 0.0
        reward = self._rules.tester_weight * (share - self._rules.penalty * (refused + wrong) / len(written))
        counts = {
            "tests/written": float(len(written)),
            "tests/refused": refused / len(written),
            "tests/wrong": wrong / len(written),
            "tests/disputed": disputed / len(written),
            "broken/right": result.count_right_broken(statements) / len(result.right),
            "programs/to_break": float(len(result.wrong)),
            **{f"tests/refused/{reason.value}": written.count(reason) / len(written) for reason in LineRefusal},
            **({"broken/wrong": share} if result.wrong else {}),
        }
        return reward, broken, counts

    def final_turn(self) -> int | None:
        """The program, or where there is none the tests; None before the first turn."""
        return 0 if self._played else None

    def branch_rewards(self) -> Mapping[int, float]:
        return dict(enumerate(self._rewards))


class AdversarialGroup:
    """The episodes of one task, which share a trial."""

    def __init__(self, make: Callable[[Trial], AdversarialEnv], trial: Callable[[], Trial], size: int) -> None:
        self._make, self._trial, self._size = make, trial, size

    async def make_envs(self) -> Sequence[Env]:
        trial = self._trial()
        return [self._make(trial) for _ in range(self._size)]  # type: ignore[misc]

    async def compute_group_rewards(
        self, trajectories: list[Trajectory], envs: Sequence[Env]
    ) -> list[tuple[float, dict[str, float]]]:
        """Nothing: each episode gave its own rewards."""
        return [(0.0, {}) for _ in trajectories]

    async def cleanup(self) -> None:
        return
