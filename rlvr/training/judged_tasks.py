"""Tasks with their sampled and judged completions, and what is counted of each task.

Every evaluation of a model goes through `judge_in_chunks`: of a run's held-out tasks (`rlvr.training.evaluate`) and of
published benchmarks (`rlvr.benchmarks.benchmark_runner`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlvr.core import rng
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.core.types import Outcome, Task, Trajectory, group_by, mean
from rlvr.reward import Reward
from rlvr.rollout import open_groups, rollout
from rlvr.rollout.scoring import Scoring
from rlvr.training.failure_groups import task_features


@dataclass(frozen=True)
class TaskResult:
    """One task: completions that passed, completions judged, and their mean reward.

    `watched` has the pass rate under each verifier that only watches, `features` what is known of the task without a
    completion.
    """

    id: str
    level: str
    passed: int
    judged: int
    reward: float
    watched: dict[str, float] = field(default_factory=dict[str, float])
    features: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class TaskCount:
    """What an evaluation counts of a task: its result, None if no completion has a verdict; completions without one,
    truncated completions, and sampled tokens."""

    result: TaskResult | None
    unjudged: int
    truncated: int
    tokens: int


@dataclass(frozen=True)
class JudgedTask:
    """A task with its judged completions, the last trajectory of each, and the number of tokens sampled for them."""

    task: Task
    completions: list[Trajectory]
    tokens: int

    @property
    def failures(self) -> list[Trajectory]:
        """The completions without a verdict."""
        return [t for t in self.completions if t.reward is None]

    def count(self, source: TaskSource, reward: Reward, watched: Sequence[Reward]) -> TaskCount:
        """The counts of the task for an evaluation."""
        truncated = sum(t.truncated for t in self.completions)
        return TaskCount(self.summarize(source, reward, watched), len(self.failures), truncated, self.tokens)

    def summarize(self, source: TaskSource, reward: Reward, watched: Sequence[Reward]) -> TaskResult | None:
        """The result of the task; None if no completion has a verdict."""
        known = [t for t in self.completions if t.reward is not None]
        if not known:
            return None
        passed = sum(t.scores[reward.name].outcome is Outcome.PASSED for t in known)
        earned = mean([t.reward for t in known if t.reward is not None])
        shares, features = _shares(known, watched), task_features(source, self.task)
        return TaskResult(self.task.id, self.task.level, passed, len(known), earned, shares, features)


def judge_in_chunks(
    source: TaskSource,
    tasks: Sequence[Task],
    sampler: SamplingClient,
    reward: Reward,
    params: SamplingParams,
    *,
    samples: int,
    seed: int,
    watched: Sequence[Reward] = (),
    chunk: int = 512,
    first: int = 0,
) -> Iterator[list[JudgedTask]]:
    """Sample and judge the tasks from number `first` on, `chunk` at a time: an evaluation that goes on at the beginning
    of a chunk has the same batches."""
    for start in range(first, len(tasks), chunk):
        part = tasks[start : start + chunk]
        yield sample_and_judge(source, part, sampler, reward, params, samples=samples, seed=seed, watched=watched)


def sample_and_judge(
    source: TaskSource,
    tasks: Sequence[Task],
    sampler: SamplingClient,
    reward: Reward,
    params: SamplingParams,
    *,
    samples: int,
    seed: int,
    watched: Sequence[Reward] = (),
) -> list[JudgedTask]:
    """Sample `samples` completions of every task, all at once, and judge them; in the order of the tasks."""
    groups = open_groups(source, tasks, samples, sampler.get_tokenizer(), "evaluation")
    for group in groups:
        group.id = f"evaluation/{group.task.id}"
    with Scoring(reward, watched) as scoring:
        over = scoring.begin if scoring.can_overlap else None
        trajectories = rollout(groups, sampler, params, seed=rng.key("evaluation", seed), on_group_end=over)
        scoring.finish(trajectories)
    by_group = group_by(trajectories, lambda t: t.group_id)
    judged: list[JudgedTask] = []
    for group in groups:
        played = by_group.get(group.id, [])
        completions = list({t.rollout_id: t for t in played}.values())
        judged.append(JudgedTask(group.task, completions, sum(t.num_action_tokens for t in played)))
    return judged


def _shares(answers: Sequence[Trajectory], watched: Sequence[Reward]) -> dict[str, float]:
    """The pass rate under each watching verifier, of the completions that it could judge."""
    shares: dict[str, float] = {}
    for reward in watched:
        verdicts = [t.scores[reward.name] for t in answers]
        known = [float(v.outcome is Outcome.PASSED) for v in verdicts if v.value is not None]
        if known:
            shares[reward.name] = mean(known)
    return shares
