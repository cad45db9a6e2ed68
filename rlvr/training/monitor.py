"""Warnings about a run, each given once: the trainer and the sampler differ, large policy changes, learning stalls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr.training.answer_form import AnswerForm
from rlvr.training.diagnosis import diagnose_steps, format_findings
from rlvr.training.failure_groups import FailureGroup
from rlvr.training.finding import Finding
from rlvr.training.metric_values import STALL_STEPS, Rows, is_given, select_rl_rows
from rlvr.training.stall import has_levelled_off, is_near_best
from rlvr.training.training_options import TrainingOptions

KL_SAMPLE_TRAIN = 0.01  # nats a token: the cookbook's rule of thumb for a stable run


ReadGroups = Callable[[int], Sequence[FailureGroup]]
"""The groups of failing tasks in the completions stored up to a step."""


class StallWatch:
    """Reports once in a run that learning stalls, or that all but one kind of task is learned.

    `rows` are those of earlier attempts that still stand. Groups, and the form of failed answers before training, are
    read from files, so only where they matter.
    """

    def __init__(
        self,
        rows: Rows = (),
        read_groups: ReadGroups = lambda step: (),
        read_form: Callable[[], AnswerForm | None] = lambda: None,
    ) -> None:
        self._rows, self._rl_rows = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
        self._read_groups, self._read_form, self._has_reported = read_groups, read_form, False
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> list[Finding]:
        """The findings if this is the first row with which learning stalls, else an empty list."""
        self._rows.append(row)
        self._rl_rows += select_rl_rows([row])
        if self._has_reported or not has_levelled_off(self._rl_rows):
            return []
        at_ceiling = is_near_best(self._rl_rows)
        if at_ceiling and len(self._rl_rows) % STALL_STEPS:
            return []
        groups = [] if is_given(self._rl_rows) else self._read_groups(int(row.get("step", 0)))
        results = diagnose_steps(self._rows, groups, self._read_form())
        if at_ceiling and not any(finding.code == "unsolved_kind" for finding in results):
            return []
        self._has_reported = True
        return results


class Monitor:
    """Watches the metrics of the steps of one run and warns through `warn`."""

    def __init__(self, options: TrainingOptions, warn: Callable[[str], None]) -> None:
        self.options, self.warn = options, warn
        self._warned = set[str]()
        self._stall = StallWatch()

    def restore(self, rows: Rows, read_groups: ReadGroups, read_form: Callable[[], AnswerForm | None]) -> None:
        """Take up the metric rows of earlier attempts that still stand: they may have stalled already."""
        self._stall = StallWatch(rows, read_groups, read_form)

    def watch_stall(self, step: int, row: Mapping[str, Any]) -> None:
        """Warn with the findings of `rlvr doctor` at the first row with which learning stalls."""
        if results := self._stall.add({**row, "step": step}):
            self.warn(f"step {step + 1}: learning has levelled off. Why:\n{format_findings(results)}")

    def watch_gap(self, step: int, gap: float) -> None:
        """Warn if sampler and trainer give different log-probs; `gap` is the mean difference in nats a token."""
        if gap > self.options.gap_warn:
            self._warn_once(
                "gap",
                f"step {step + 1}: sampler and trainer differ by {gap:.3g} nats a token on average, more than "
                f"training.gap_warn={self.options.gap_warn:g} (said once; sampling/sampling_logp_difference/mean has "
                "every step)",
            )

    def watch_policy_change(self, step: int, divergence: float) -> None:
        """Warn if a step took the policy far from the one that sampled, in nats a token."""
        if divergence > self.options.kl_warn:
            self._warn_once(
                "change",
                f"step {step + 1}: large policy change: it ended {divergence:.3g} nats a token from the policy that "
                f"sampled, more than training.kl_warn={self.options.kl_warn:g}. To reduce it, lower the learning rate "
                "or ppo_epochs, or set target_kl (said once; optim/kl_after has every step)",
            )

    def watch_drift(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn if the trained policy has moved away from the sampling one within a step.

        Earlier ones of several substeps move it on purpose (`kl_warn` watches that), and `watch_gap` already reports a
        difference in log-probs.
        """
        v1, v2 = (metrics.get(f"optim/kl_sample_train_{v}", 0.0) for v in ("v1", "v2"))
        stale, several = self.options.order.max_lag > 0, self.options.num_substeps > 1
        has_gap = not stale and metrics.get("sampling/sampling_logp_difference/mean", 0.0) > self.options.gap_warn
        if max(abs(v1), v2) <= KL_SAMPLE_TRAIN or (several and not stale) or has_gap:
            return
        remedy = "check that sampler and trainer run the same weights in the same dtype"
        if stale:
            remedy = "a lower learning rate, fewer num_substeps or a smaller max_steps_off_policy reduce it"
        self._warn_once(
            "drift",
            f"step {step + 1}: the trained policy is {v1:.3g} (v1) and {v2:.3g} (v2) nats a token from the one that "
            f"sampled; training is known to be stable up to {KL_SAMPLE_TRAIN:g}: {remedy} (said once; "
            "optim/kl_sample_train_v1 and _v2 have every step)",
        )

    def watch_critic(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn if the critic's returns were all the same: then there is nothing that it could tell apart."""
        if "critic/return" in metrics and "critic/explained_variance" not in metrics:
            self._warn_once(
                "critic",
                f"step {step + 1}: every return that the critic learns from is {metrics['critic/return']:.3g}, so no "
                "completion is better than another; check that the reward of some completion differs (said once)",
            )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self.warn(text)
