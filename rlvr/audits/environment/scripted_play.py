"""Play episodes of an environment with given turns, and read what they gave: observations, rewards, verdicts.

    under_check = CheckedEnvironment.open("sorting", {})
    under_check.play([(task, ("2 5 8",))])[0].value      # 1.0, by the same rollout and verifier as in a run

An episode that raises, never ends or takes too long is a `PlayedEpisode` with an `error`, or `EpisodeHangs`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from rlvr.audits.environment.text_tokenizer import CHAT_TEMPLATE, TextTokenizer
from rlvr.core import rng
from rlvr.core.futures import Future, LazyFuture
from rlvr.core.messages import ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.core.verdict_reasons import EPISODE_FAILED
from rlvr.envs import resolve_environment
from rlvr.envs.prompt import PromptEnv, PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.reward.environment import NAME as ENVIRONMENT
from rlvr.reward.references import find_reference_text
from rlvr.reward.registry import Reward, RewardSpec, resolve_reward
from rlvr.reward.signatures import Case
from rlvr.rollout.episodes import open_group, rollout
from rlvr.rollout.scoring import score

T = TypeVar("T")
Turns = tuple[str, ...]
SCANNED, SCANNED_HELDOUT, SCAN_S = 400, 200, 2.0  # tasks that are compared with each other, seconds to draw them
QUICK_S = 0.005  # of a verdict: where it takes longer, fewer are asked for
HELDOUT = 16  # tasks whose references are tried
GROUP = 8  # episodes of a group, at most
RANDOM_EPISODES = 64  # of one word a turn, where no word alone earns anything
DEMONSTRATIONS = 32  # of a task that are tried: a teacher may err
TASK = "checked_task"  # the key of a row for the task that it was made of
# What a right answer may look like where the environment has no demonstrations.
FORMS = ("{}", "<answer>{}</answer>", "#### {}", "\\boxed{{{}}}", "The answer is {}.", "```python\n{}\n```")


class EpisodeHangs(Exception):
    """Episodes or their verdicts take longer than the limit; they go on in a thread of their own."""


class EndlessEpisode(Exception):
    """An episode asks for more turns than its environment says it has."""


class ScriptedSampler:
    """Says in each episode of a rollout the turns of its group; the last one again where more are asked for."""

    fingerprint = "script"

    def __init__(self, tokenizer: Any, scripts: Mapping[str, Turns], most_turns: int) -> None:
        self._tokenizer = tokenizer
        self._turns = {
            rng.key(0, group, turn, index): turns[min(turn, len(turns) - 1)]
            for group, turns in scripts.items()
            for turn in range(most_turns)
            for index in range(GROUP)
        }
        self._most_turns = most_turns

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        text = self._turns.get(sampling_params.seed or 0)
        if text is None:
            raise EndlessEpisode(f"an episode asks for more than {self._most_turns} turns")
        tokens = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        said = SampledSequence(StopReason.STOP, tokens, [0.0] * len(tokens), 1)
        return LazyFuture.from_value(SampleResponse([said] * num_samples, fingerprint=self.fingerprint))

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        return LazyFuture.from_value([None] + [0.0] * (prompt.length - 1))

    def get_tokenizer(self) -> Any:
        return self._tokenizer


@dataclass(frozen=True)
class PlayedEpisode:
    """What an episode gave. `value` is the reward in a run, None without one; `observations` are what was read, turn by
    turn, and `rewards` what the environment gave for each turn."""

    task: Task
    turns: Turns
    score: Score
    value: float | None
    observations: tuple[str, ...] = ()
    rewards: tuple[float, ...] = ()
    seconds: float = 0.0
    turn_count: int = 0  # turns that the episode took; 0: not known
    raised: str = ""  # an exception of the environment or of the loop, which would end a run
    verified: float | None = None  # what the verifier gave, where the environment gives a reward too

    @property
    def passed(self) -> bool:
        return self.score.outcome is Outcome.PASSED and not self.raised

    @property
    def text(self) -> str:
        return " | ".join(self.turns)

    @property
    def trace(self) -> tuple[Any, ...]:
        """The part of the result that must be the same each time, also beside other episodes."""
        return (self.observations, self.rewards, self.value, self.score.outcome.value, self.raised)


def run_with_limit(work: Callable[[], T], seconds: float, what: str) -> T:
    """The result of a call on a daemon thread; EpisodeHangs if it takes longer."""
    result: list[T] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=call, name="environment check", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise EpisodeHangs(f"{what} took longer than {seconds:g} s")
    return result[0]


@dataclass
class CheckedEnvironment:
    """An environment with its reward, a tokenizer and tasks, as a run would have them. Make one with `open`."""

    name: str
    kwargs: dict[str, Any]
    source: TaskSource
    reward: Reward
    tokenizer: Any
    train: list[Task]
    heldout: list[Task]
    hang_s: float = 20.0
    folder: str = field(default_factory=os.getcwd)  # the working directory before anything was loaded
    played_episodes: list[PlayedEpisode] = field(default_factory=list[PlayedEpisode])
    search: dict[str, PlayedEpisode] = field(default_factory=dict[str, PlayedEpisode])  # by the task's id
    requested_tasks: int = 24  # tasks
    heldout_s: float = 0.0  # that a held-out task takes to make
    _judged_s: float = 0.0

    @classmethod
    def open(
        cls,
        name: str,
        kwargs: Mapping[str, Any],
        reward: str | None = None,
        tasks: int = 24,
        tokenizer: Any = None,
        hang_s: float = 20.0,
        reward_kwargs: Mapping[str, Any] | None = None,
    ) -> CheckedEnvironment:
        """Load it as a run does; ValueError with what is wrong. Without a tokenizer, prompts of text become a chat
        unless the environment has a vocabulary of its own, and no prompt is a chat already."""
        folder = os.getcwd()
        source = resolve_environment(name, **kwargs)
        if tokenizer is None:
            some = [*source.heldout(tasks), *(source.train(0, 0, level) for level in source.levels[:1])]
            is_text = source.vocabulary is not None and all(isinstance(one.prompt, str) for one in some)
            tokenizer = TextTokenizer(None if is_text else CHAT_TEMPLATE)
        made = apply_prompt_options(source, tokenizer, PromptOptions())
        bound = resolve_reward(reward or source.reward, **(reward_kwargs or {}))
        if bound.name == source.reward:
            bound = bound.plus_environment(source.environment_weight)
        bound.start()
        start = time.perf_counter()
        environment = cls(
            name, dict(kwargs), made, bound, tokenizer, [], list(made.heldout(tasks)), hang_s, folder,
            requested_tasks=tasks,
        )  # fmt: skip
        environment.heldout_s = (time.perf_counter() - start) / max(1, len(environment.heldout))
        drawn = [environment.draw(place) for place in range(tasks)] if source.levels else []
        environment.train = list({(task.id, task.prompt_text): task for task in drawn}.values())
        return environment

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks that are tried: of training; of a test set those held out, and where there are several roles, since
        one is played there (against an opponent, or on tasks that the policy did not write) and turns are scripted for
        one."""
        return self.heldout if self.source.roles else self.train or self.heldout

    @cached_property
    def scanned(self) -> list[Task]:
        """Many training tasks, the levels in turn; fewer where drawing them takes long."""
        levels, end = list(self.source.levels), time.monotonic() + SCAN_S
        size = sum(self.source.size(level) for level in levels) if self.source.size else SCANNED
        found: list[Task] = []
        for number in range(min(SCANNED, size) if levels else 0):
            found.append(self.draw(number))
            if time.monotonic() > end:
                break
        return found

    def draw(self, number: int) -> Task:
        """A training task by its place among `scanned`."""
        levels = self.source.levels
        return self.source.train(0, number // len(levels), levels[number % len(levels)])

    @cached_property
    def heldout_count(self) -> int:
        """How many held-out tasks are compared: as many as are made in a short time."""
        most = int(SCAN_S / max(self.heldout_s, 1e-9))
        return min(SCANNED_HELDOUT, max(len(self.heldout), most))

    @cached_property
    def scanned_heldout(self) -> list[Task]:
        return list(self.source.heldout(self.heldout_count))

    @cached_property
    def is_plain(self) -> bool:
        """Whether an episode is one answer to a prompt, which a verifier judges by its text."""
        if self.source.group_builder or self.reward.name == ENVIRONMENT or self.reward.environment_weight:
            return False
        return type(self.source.env(self.tasks[0], self.tokenizer)) is PromptEnv

    def take_few(self, tasks: int, least: int = 3) -> int:
        """The number of tasks to try out of `tasks`: fewer where a verdict takes long."""
        usual = self._judged_s / len(self.played_episodes) if self.played_episodes else 0.0
        return tasks if usual <= QUICK_S else max(least, int(tasks * QUICK_S / usual))

    @property
    def most_turns(self) -> int:
        return max(1, int(self.source.max_turns)) + 2

    def play(self, answers: Sequence[tuple[Task, Turns]]) -> list[PlayedEpisode]:
        """Play the episodes at the same time, a turn of all after the other."""
        if not answers:
            return []
        limit = self.hang_s * max(1.0, len(answers) / 8)
        start = time.perf_counter()
        played = run_with_limit(lambda: self._play_all(answers), limit, f"{len(answers)} episodes")
        self._judged_s += time.perf_counter() - start
        self.played_episodes += played
        return played

    def play_alone(self, answers: Sequence[tuple[Task, Turns]]) -> list[PlayedEpisode]:
        """Play one episode after the other."""
        return [self.play([answer])[0] for answer in answers]

    def judge(self, answers: Sequence[tuple[Task, Turns]]) -> list[PlayedEpisode]:
        """The verdicts on answers, without playing an episode where a task has one prompt and one answer."""
        if not self.is_plain:
            return self.play(answers)
        cases = [Case.of_task(task, turns[-1], stop_reason=StopReason.STOP) for task, turns in answers]
        limit, start = self.hang_s * max(1.0, len(answers) / 8), time.perf_counter()
        scores = run_with_limit(lambda: self.reward.judge_all(cases), limit, f"{len(cases)} verdicts")
        self._judged_s += time.perf_counter() - start
        judged = [
            PlayedEpisode(task, turns, one, one.value) for (task, turns), one in zip(answers, scores, strict=True)
        ]
        self.played_episodes += judged
        return judged

    def _play_all(self, answers: Sequence[tuple[Task, Turns]]) -> list[PlayedEpisode]:
        try:
            return self._roll_out(answers)
        except (Exception, SystemExit) as error:
            if len(answers) > 1:  # of which episode it is
                return [self._play_all([answer])[0] for answer in answers]
            (task, turns), raised = answers[0], f"{type(error).__name__}: {error}"
            failed = Score(None, Outcome.ERROR, "raised", detail=raised)
            return [PlayedEpisode(task, turns, failed, None, raised=raised)]

    def _roll_out(self, answers: Sequence[tuple[Task, Turns]]) -> list[PlayedEpisode]:
        start, size = time.perf_counter(), 2 if self.source.group_builder else 1
        groups = [
            open_group(self.source, task, size, self.tokenizer, f"check/{place}")
            for place, (task, _) in enumerate(answers)
        ]
        scripts = {group.id: turns for group, (_, turns) in zip(groups, answers, strict=True)}
        sampler = ScriptedSampler(self.tokenizer, scripts, self.most_turns)
        trajectories = rollout(groups, sampler, SamplingParams(), seed=0)
        seconds = (time.perf_counter() - start) / len(answers)
        score(trajectories, self.reward)
        found: list[PlayedEpisode] = []
        for group, (task, turns) in zip(groups, answers, strict=True):
            own = [t for t in trajectories if t.rollout_id == f"{group.id}/0"]
            found.append(self._read(task, turns, own, seconds))
        return found

    def _read(self, task: Task, turns: Turns, own: list[Trajectory], seconds: float) -> PlayedEpisode:
        last = own[-1]
        verdict = last.scores[self.reward.name]
        given = sum(last.turn_rewards)
        observations = [self.tokenizer.decode(t.prompt_tokens) for t in own]
        observations += [self._read_environment(t) for t in own]
        return PlayedEpisode(
            task, turns, verdict, last.reward, tuple(observations), tuple(last.turn_rewards), seconds,
            sum(map(_count_turns, own)),
            verified=verdict.value if given and self.reward.name != ENVIRONMENT else None,
        )  # fmt: skip

    def _read_environment(self, trajectory: Trajectory) -> str:
        """What the environment said between the turns."""
        tokens = zip(trajectory.response_tokens, trajectory.action_mask, strict=True)
        return self.tokenizer.decode([token for token, is_sampled in tokens if not is_sampled])

    # Right answers -------------------------------------------------------------------------------------------------

    def find_answer(self, task: Task) -> str | None:
        """The answer that the task itself calls right, without a worked solution before it."""
        text = find_reference_text(task.meta)
        return None if text is None or not text.strip() else text.rpartition("####")[2].strip() or None

    def list_references(self, task: Task) -> list[Turns]:
        """The turns of the model in demonstrations of a task; without any, forms of the answer that the task states."""
        found: dict[Turns, None] = {}
        for key in range(DEMONSTRATIONS):
            shown = self.source.demonstration(task, key)
            if shown is None:
                break
            found[(shown,) if isinstance(shown, str) else tuple(shown[::2])] = None
        if not found and (answer := self.find_answer(task)) is not None:
            found = {(form.format(answer),): None for form in FORMS}
        return list(found)

    @cached_property
    def references(self) -> dict[str, PlayedEpisode]:
        """The first accepted reference of each task, by the task's id; where none is accepted, the first one."""
        return self._find_references(self.tasks)

    @cached_property
    def heldout_references(self) -> dict[str, PlayedEpisode]:
        """The same of held-out tasks, where `references` are those of training."""
        return {} if self.tasks is self.heldout else self._find_references(self.heldout[: self.take_few(HELDOUT)])

    def _find_references(self, tasks: Sequence[Task]) -> dict[str, PlayedEpisode]:
        best: dict[str, PlayedEpisode] = {}
        waiting = {task.id: (task, self.list_references(task)) for task in tasks}
        for place in range(max(DEMONSTRATIONS, len(FORMS))):
            asked = [(task, listed[place]) for task, listed in waiting.values() if place < len(listed)]
            together = bool(self.reward.waits_for)  # elsewhere alone: a verdict may depend on the company
            for one in self.judge(asked) if together else (self.judge([each])[0] for each in asked):
                if one.task.id not in best or (one.value or 0.0) > (best[one.task.id].value or 0.0):
                    best[one.task.id] = one
            waiting = {id: held for id, held in waiting.items() if id in best and not best[id].passed}
        return self._shorten(best)

    def _shorten(self, best: dict[str, PlayedEpisode]) -> dict[str, PlayedEpisode]:
        """The references without turns that their episodes never ask for, as they end before: such a last turn could be
        anything."""
        longer = [one for one in best.values() if one.passed and 0 < one.turn_count < len(one.turns)]
        for one, cut in zip(
            longer, self.play([(one.task, one.turns[: one.turn_count]) for one in longer]), strict=True
        ):
            if cut.trace == one.trace:
                best[one.task.id] = cut
        return best

    def search_turns(self, words: Sequence[str], tasks: int = 6) -> None:
        """Without references: look for turns that earn something, word by word, and keep the best in `search`."""
        for task in self.tasks[:tasks]:
            best: PlayedEpisode | None = None
            for _ in range(min(max(1, self.source.max_turns), 12)):
                lead = best.turns if best else ()
                played = self.play([(task, (*lead, word)) for word in words])
                most = max(played, key=lambda one: (one.value or 0.0, len(one.rewards)))
                if best is not None and (most.value or 0.0) <= (best.value or 0.0):
                    break
                best = most
            if best is not None and not best.value:  # more than one turn may be needed before one earns anything
                turns = range(min(max(1, self.source.max_turns), 12))
                keys = [rng.key("search-turns", task.id, k) for k in range(RANDOM_EPISODES)]
                drawn = [tuple(words[rng.integer(len(words), key, turn)] for turn in turns) for key in keys]
                best = max([best, *self.play([(task, one) for one in drawn])], key=lambda one: one.value or 0.0)
            if best is not None:
                self.search[task.id] = best

    @cached_property
    def accepted(self) -> list[PlayedEpisode]:
        """The references that are accepted."""
        return [one for one in self.references.values() if one.passed]

    @cached_property
    def top(self) -> float | None:
        """The reward of a right answer: the most that a reference earns, else that a search found; None where nothing
        earns anything."""
        found = self.accepted or list(self.search.values())
        return max((one.value for one in found if one.value is not None and one.value > 0), default=None)

    @property
    def top_name(self) -> str:
        """What `top` is. What a search found may be far below the reward of a right answer."""
        return "a right answer's reward" if self.accepted else "the most that a search found"

    # Verifiers -----------------------------------------------------------------------------------------------------

    def make_rows(self, most: int) -> list[dict[str, Any]]:
        """Labelled rows of accepted references, as the audit of verifiers takes them. The last turn is the answer."""
        rows: list[dict[str, Any]] = []
        for one in self.accepted[:most]:
            row = {**one.task.meta, "prompt": one.task.prompt_text, "response": one.turns[-1], "label": True}
            rows.append(row if self.is_plain else {**row, TASK: one.task.id})
        return rows

    def as_reward(self) -> Reward:
        """The verifier as a reward of text; that of an episode judges its last turn, after a reference's others."""
        judge = _AnswerJudge(self.reward) if self.is_plain else _EpisodeJudge(self)
        return Reward(self.reward.name, RewardSpec(judge))


def _count_turns(trajectory: Trajectory) -> int:
    """How often what was sampled begins."""
    mask = trajectory.action_mask
    return sum(bool(now) and not before for before, now in pairwise([0, *mask]))


class _AnswerJudge:
    """The reward for answers that the policy ended itself."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def __call__(self, cases: Sequence[Case]) -> list[Score]:
        return self._reward.judge_all([replace(case, stop_reason=StopReason.STOP) for case in cases])


class _EpisodeJudge:
    """The reward of an episode that takes the earlier turns of its reference, and then the answer."""

    def __init__(self, environment: CheckedEnvironment) -> None:
        self._environment = environment

    def __call__(self, cases: Sequence[Case]) -> list[Score]:
        references = self._environment.references
        shown = [references[(case.meta or {})[TASK]] for case in cases]
        answers = [(one.task, (*one.turns[:-1], case.response)) for one, case in zip(shown, cases, strict=True)]
        return [as_score(one) for one in self._environment.play(answers)]


def as_score(one: PlayedEpisode) -> Score:
    """The verdict with the reward of a run as its value."""
    if one.value is None or one.score.value is None:
        reason = one.score.reason or EPISODE_FAILED
        return Score(None, Outcome.ERROR, reason, detail=one.score.detail)
    return Score(one.value, one.score.outcome, one.score.reason, detail=one.score.detail)
