"""Comparable evaluations: the same held-out tasks, the same random draws, intervals, and a paired test.

Several samples of one task are not independent, so tasks are the unit throughout: an interval widens with the spread
between tasks, and the test pairs each task with itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlvr.core import rng
from rlvr.core.files import read_json
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.core.task_statistics import Interval, mean_interval, share_interval, signed_rank_p_value
from rlvr.core.types import Task, Trajectory
from rlvr.reward import Reward
from rlvr.training.answer_form import MOST_TASKS, AnswerForm, examine_form
from rlvr.training.errors import check_error_budget
from rlvr.training.judged_tasks import JudgedTask, TaskCount, TaskResult, judge_in_chunks

MOST_FAMILIES = 12  # that a table shows


@dataclass(frozen=True)
class EvaluationOptions:
    """`tasks` held-out tasks, `samples` completions of each at `temperature`; an interim evaluation `every` RL steps.

    `interim_tasks` and `interim_samples` are the sizes of that one. Its tasks are others than the reported ones, by
    which a run may stop; with `interim_tasks` None it takes the reported ones, and no run may stop by them. `k` is the
    k of pass@k; None means `samples`. The evaluation at the end reports the last policy, or with `report=best` the one
    that had the best interim evaluation.
    """

    tasks: int = 1000
    samples: int = 8
    k: int | None = None
    temperature: float = 1.0
    every: int = 0
    interim_tasks: int | None = 200
    interim_samples: int = 2
    report: str = "last"

    def __post_init__(self) -> None:
        for name, least in (("tasks", 1), ("samples", 1), ("interim_tasks", 1), ("interim_samples", 1), ("every", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"evaluation.{name}={value}, expected at least {least}")
        if self.k is not None and not 1 <= self.k <= self.samples:
            raise ValueError(f"evaluation.k={self.k}, expected 1 to samples={self.samples}: pass@k needs k samples")
        if self.report not in ("last", "best"):
            raise ValueError(f"evaluation.report={self.report!r}; expected last or best")


@dataclass(frozen=True)
class Evaluation:
    """Results per task; `unjudged` completions had an error or an invalid task.

    `extra_heldout` has the same for further held-out sets by name: they are reported, and no decision uses them.
    `form` says where the answers of failed completions stand, if they were examined.
    """

    results: list[TaskResult]
    k: int
    unjudged: int = 0
    truncated: int = 0
    tokens: int = 0
    extra_heldout: dict[str, Evaluation] = field(default_factory=dict[str, "Evaluation"])
    form: AnswerForm | None = None

    @classmethod
    def of(cls, counts: Sequence[TaskCount], k: int) -> Evaluation:
        """The evaluation of tasks that were counted."""
        results = [count.result for count in counts if count.result is not None]
        unjudged, truncated, tokens = (
            sum(getattr(count, name) for count in counts) for name in ("unjudged", "truncated", "tokens")
        )
        return cls(results, k, unjudged, truncated, tokens)

    @property
    def complete(self) -> list[TaskResult]:
        """The tasks that the metrics are over: those with k judged completions, all if there is none."""
        return [r for r in self.results if r.judged >= self.k] or self.results

    def metrics(self, level: str | None = None) -> dict[str, Interval]:
        """`pass@1`, `pass@k`, `mean_reward` and `watched/NAME`, over all tasks or those of one level.

        All are over the same tasks, those with k judged completions. A task whose completions a watched verifier could
        not judge is in no rate of that one.
        """
        chosen = [r for r in self.complete if level is None or r.level == level]
        at_k = [r for r in chosen if r.judged >= self.k]
        named = {
            "pass@1": share_interval([r.passed / r.judged for r in chosen], [r.judged for r in chosen]),
            f"pass@{self.k}": share_interval(
                [pass_at_k(r.judged, r.passed, self.k) for r in at_k],
                [r.judged / self.k for r in at_k],  # the variance is at most that of so many (Hoeffding 1948)
            ),
            "mean_reward": mean_interval([r.reward for r in chosen]),
        }
        for name in sorted({name for r in chosen for name in r.watched}):
            seen = [r for r in chosen if name in r.watched]
            named[f"watched/{name}"] = share_interval([r.watched[name] for r in seen], [r.judged for r in seen])
        return named

    def intervals(self, level: str | None = None) -> dict[str, Any]:
        """`metrics` as JSON values."""
        return {name: value.to_json() for name, value in self.metrics(level).items()}

    @property
    def levels(self) -> list[str]:
        return sorted({r.level for r in self.results if r.level}, key=lambda level: (len(level), level))

    def by_family(self) -> dict[str, Evaluation]:
        """The evaluation of each family that the tasks' source names, if there are 2 to `MOST_FAMILIES`."""
        families: dict[str, list[TaskResult]] = {}
        for result in self.results:
            families.setdefault(result.features.get("family", ""), []).append(result)
        families.pop("", None)
        if not 2 <= len(families) <= MOST_FAMILIES:
            return {}
        return {name: replace(self, results=found, extra_heldout={}) for name, found in sorted(families.items())}

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, extra_heldout={}))
        del data["extra_heldout"]
        return {**data, "beside": {name: other.to_json() for name, other in self.extra_heldout.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """Read what `to_json` wrote; ValueError for anything else."""
        try:
            others = {str(name): cls.from_json(other) for name, other in data.get("beside", {}).items()}
            plain = {key: value for key, value in data.items() if key not in ("results", "beside", "form")}
            form = AnswerForm.from_json(data["form"]) if data.get("form") else None
            result = cls([TaskResult(**r) for r in data["results"]], extra_heldout=others, form=form, **plain)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a stored evaluation ({error!r:.120})") from None
        if not all(_count(n) for n in (result.unjudged, result.truncated, result.tokens, result.k)) or result.k < 1:
            raise ValueError("k, unjudged, truncated and tokens are not all whole numbers from 0 (k from 1)")
        for number, r in enumerate(result.results):
            counted = _count(r.passed) and _count(r.judged) and r.judged >= 1 and r.passed <= r.judged
            named = isinstance(r.id, str) and isinstance(r.level, str)
            mapped = isinstance(r.watched, dict) and isinstance(r.features, dict)
            if not (counted and named and mapped and all(map(_finite, (r.reward, *r.watched.values())))):
                raise ValueError(f"results[{number}] is not a stored task result")
        return result


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def stored_evaluation(path: Path) -> Evaluation:
    """Read an evaluation of a run; ValueError if the file is damaged."""
    remedy = "put the file back, or start the run anew (run.resume=false keeps the old folder, renamed)"
    data = read_json(path, "an evaluation", remedy)
    try:
        return Evaluation.from_json(data)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; {remedy}") from None


def evaluate(
    source: TaskSource,
    tasks: Sequence[Task],
    sampler: SamplingClient,
    reward: Reward,
    params: SamplingParams,
    *,
    samples: int,
    k: int,
    seed: int,
    error_budget: float,
    watched: Sequence[Reward] = (),
    chunk: int = 512,
    progress: Callable[[int], None] = lambda done: None,
    group_size: int = 0,
    keep: Callable[[JudgedTask], None] = lambda judged: None,
) -> Evaluation:
    """Sample `samples` completions of every task and judge them. Random draws depend on (seed, task id, sample) alone.

    With a `group_size`, that of training, the form of failed answers is examined too (`rlvr.training.answer_form`).
    `keep` gets each task with its completions. TrainingStoppedError if more than a share `error_budget` of the
    completions gets no verdict.
    """
    counts: list[TaskCount] = []
    failures: list[Trajectory] = []
    examined: list[JudgedTask] = []
    stride = math.ceil(len(tasks) / MOST_TASKS)
    chunks = judge_in_chunks(
        source, tasks, sampler, reward, params, samples=samples, seed=seed, watched=watched, chunk=chunk
    )
    for groups in chunks:
        for index, group in enumerate(groups, len(counts)):
            failures += group.failures
            keep(group)
            if group_size and index % stride == 0:
                examined.append(group)
        counts += [group.count(source, reward, watched) for group in groups]
        progress(len(counts))
    check_error_budget("evaluation", reward.name, failures, samples * len(tasks), error_budget)
    form = examine_form(examined, reward, group_size) if examined else None
    return replace(Evaluation.of(counts, k), form=form)


def heldout_split(
    source: TaskSource, options: EvaluationOptions, *, has_interim: bool
) -> tuple[list[Task], list[Task]]:
    """Held-out tasks in two parts: those that are reported, and those of interim evaluations.

    A run that stops by an interim evaluation would overstate its result if the same tasks were reported, so the parts
    are disjoint unless `options.interim_tasks` is None. They depend on the environment and the sizes alone. If too few
    tasks are held out, interim evaluations get a quarter.
    """
    quick = (options.interim_tasks or 0) if has_interim else 0
    pool = source.heldout(options.tasks + quick)
    if not pool:
        raise ValueError(
            "no task is held out to evaluate on; of rows, set env.kwargs.heldout_path or a heldout_fraction above 0; "
            "in an environment of your own, let `heldout` return some"
        )
    if len(pool) < options.tasks + quick:
        quick = min(quick, len(pool) // 4)
    order = rng.permutation(len(pool), rng.key("looks"))
    chosen = set(order[:quick])
    reported = [t for i, t in enumerate(pool) if i not in chosen]
    return reported, reported if has_interim and options.interim_tasks is None else [pool[i] for i in order[:quick]]


def extra_heldout(source: TaskSource, options: EvaluationOptions) -> dict[str, list[Task]]:
    """Further held-out sets of the source, by name; each a quarter of the size of the main one."""
    extra = source.extra_heldout(max(1, options.tasks // 4))
    return {name: tasks for name, tasks in extra.items() if tasks}


def evaluation_params(params: SamplingParams, options: EvaluationOptions) -> SamplingParams:
    """The sampling parameters of training at the evaluation's temperature, without top_p, top_k and min_p."""
    return replace(params, temperature=options.temperature, top_p=1.0, top_k=-1, min_p=0.0)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k answers passes, from c of n that did.

    1 - C(n-c, k) / C(n, k). Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass_at_k: n={n}, c={c}, k={k}; expected 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def paired_p_value(before: Evaluation, after: Evaluation) -> float:
    """`signed_rank_p_value` of the tasks' changes in pass rate; tasks that only one evaluation judged are left out."""
    return signed_rank_p_value(_paired_changes(before, after))


def _paired_changes(before: Evaluation, after: Evaluation) -> list[float]:
    """The change in pass rate of each task, rounded so that equal changes tie whatever their last bit."""
    rate = {r.id: r.passed / r.judged for r in before.results}
    return [round(r.passed / r.judged - rate[r.id], 12) for r in after.results if r.id in rate]


def compare_evaluations(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """The part of `summary.json` about the gain: both evaluations, by level and family too, the change, its p-value.

    Tasks of which one evaluation could not judge k completions are left out of both (`incomplete` is their number).
    """
    common = {r.id for r in before.complete} & {r.id for r in after.complete}
    incomplete = len({r.id for r in (*before.results, *after.results)} - common)
    before, after = (replace(e, results=[r for r in e.results if r.id in common]) for e in (before, after))
    families = before.by_family()
    return {
        "baseline": before.intervals(),
        "final": after.intervals(),
        "change": mean_interval(_paired_changes(before, after)).to_json(),
        "p_value": paired_p_value(before, after),
        "by_level": {
            level: {
                "tasks": sum(r.level == level for r in after.results),
                "baseline": before.intervals(level),
                "final": after.intervals(level),
            }
            for level in after.levels
        },
        "by_family": {
            name: {"tasks": len(one.results), "baseline": families[name].intervals(), "final": one.intervals()}
            for name, one in after.by_family().items()
        },
        "tasks": len(after.results),
        "incomplete": incomplete,
        "samples": max((r.judged for r in after.results), default=0),
        "unjudged": before.unjudged + after.unjudged,
        "beside": {
            name: {key: compared[key] for key in ("tasks", "incomplete", "baseline", "final", "p_value", "unjudged")}
            for name, other in before.extra_heldout.items()
            for compared in [compare_evaluations(other, after.extra_heldout[name])]
        },
    }
