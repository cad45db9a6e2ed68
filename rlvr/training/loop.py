"""A run from beginning to end: supervised fine-tuning, baseline, reinforcement learning, the same evaluation again.

The journal makes every phase resumable: running the same job again goes on where it stopped. A schedule
(`rlvr.training.schedules`) makes the steps of reinforcement learning. Nothing here knows how the parts were made
(`rlvr.runs.assembly` does).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rlvr.core import rng
from rlvr.core.files import write_atomic
from rlvr.core.messages import NonFiniteError
from rlvr.tracking import MetricsLog, RunConsole, plot_curve
from rlvr.tracking.picture_files import can_draw
from rlvr.training import rollout_rows
from rlvr.training.baseline import describe_signal, estimate_signal, find_obstacles
from rlvr.training.best_checkpoint import BestCheckpoint
from rlvr.training.curriculum import Curriculum
from rlvr.training.diagnosis import format_findings
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.evaluate import Evaluation, compare_evaluations, stored_evaluation
from rlvr.training.heldout import HeldoutEvaluator
from rlvr.training.interim import PASS_RATE, describe_plateau
from rlvr.training.journal import Journal, Position, weights_path
from rlvr.training.metric_values import get_value
from rlvr.training.parts import StepBatch
from rlvr.training.run_checkpoints import RunCheckpoints
from rlvr.training.run_diagnosis import read_form, stored_groups
from rlvr.training.schedules import SyncOptions
from rlvr.training.sft import sft_step
from rlvr.training.stop_request import StopRequest
from rlvr.training.training_job import TrainingJob, freeze_collector

# The baseline of reinforcement learning is the policy after fine-tuning; of supervised learning, that before it.
PHASES = {"rlvr": ("sft", "baseline", "rl", "final"), "sft": ("baseline", "sft", "final")}

EVALUATIONS = ("baseline", "final")  # the phases that leave a file in evaluations/, before and after training


class TrainingInterruptedError(Exception):
    """The user asked to stop; everything done so far is safe."""


class TrainingLoop:
    """One attempt at a job. All state that outlives it is in the journal."""

    def __init__(self, job: TrainingJob, journal: Journal, console: RunConsole) -> None:
        self.job, self.journal, self.console = job, journal, console
        parts = job.parts
        self.sft_curriculum = Curriculum(parts.source, job.sft.curriculum, rng.key("sft", parts.seed))
        self.heldout = HeldoutEvaluator(
            parts.source,
            parts.reward,
            parts.watched,
            parts.params,
            job.evaluation,
            parts.options.error_budget,
            has_interim=bool(job.sft.until or job.evaluation.every),
        )
        self.phases = PHASES[parts.options.mode]
        schedule = parts.options.order if parts.options.mode == "rlvr" else SyncOptions()  # which samples nothing ahead
        self.schedule = schedule.make(job.trainer, journal)
        steps = {phase: {"sft": job.sft.steps, "rl": parts.options.steps}.get(phase, 0) for phase in self.phases}
        self.trained = self.phases[-2]  # the phase between the two evaluations
        self.steps_to_train = steps[self.trained]
        self.checkpoints = RunCheckpoints(job, journal, steps, self.sft_curriculum, self.schedule)
        keeps_best = job.options.keep_best and job.evaluation.every > 0
        save_best = self.checkpoints.save_weights if keeps_best else None
        self.best = BestCheckpoint(job.folder, len(self.heldout.validation), save_best)
        self.log = MetricsLog(job.folder / "metrics.jsonl", self.phases)
        self.callbacks = job.callbacks
        self.stop_request = StopRequest(console.note)

    def run(self) -> dict[str, Any]:
        """Do what is left of the job; its summary. Raises TrainingInterruptedError or TrainingStoppedError."""
        position = self.checkpoints.restore(self.console.note, self.console.warn)
        self._discard_later_results(position)
        rows = self.log.rows()
        self.best.restore(rows, self.checkpoints.final, self.console.warn)
        self.best.publish(self.checkpoints.kept_steps())
        folder = self.job.folder
        self.job.trainer.monitor.restore(rows, lambda step: stored_groups(folder, step), lambda: read_form(folder))
        teacher = self.job.parts.teacher
        with (
            freeze_collector(),
            self.log,
            closing(self.schedule),
            closing(teacher) if hasattr(teacher, "close") else nullcontext(),  # one behind an endpoint
            self.stop_request.handle_signals(),
            self.job.trackers.running(rows, (TrainingInterruptedError, KeyboardInterrupt)),
            self._tell_callbacks(),
        ):
            for number, phase in enumerate(self.phases):
                if number < position.phase:
                    continue
                if self.stop_request.is_set:
                    raise TrainingInterruptedError
                first = position.step if number == position.phase else 0
                match phase:
                    case "sft":
                        self._steps(number, first, self.job.sft.steps, self._sft_step)
                    case "rl":
                        self.checkpoints.save_reference(first)
                        self.checkpoints.prepare_critic(first)
                        self._steps(number, first, self.job.parts.options.steps, self._rl_step)
                        self.schedule.finish()
                    case _:
                        self._evaluate(number)
            return self._finish()

    def _discard_later_results(self, position: Position) -> None:
        """Delete metric rows and evaluations of what will be done again; check those that stand."""
        self.log.keep(lambda row: Position(self.phases.index(row["phase"]), int(row["step"])) < position)
        for number, phase in enumerate(self.phases):
            if number >= position.phase:
                for file in (self._evaluation_file(phase), self._completions_file(phase)):
                    file.unlink(missing_ok=True)
            elif phase in EVALUATIONS:  # a damaged one is reported before hours of work, not after them
                stored_evaluation(self._evaluation_file(phase))

    def _steps(self, phase: int, first: int, steps: int, do: Callable[[int], dict[str, float]]) -> None:
        """Do steps `first` to `steps` of a phase, saving now and then, at the end, and when asked to stop.

        A step after which `_end_reason` has one is the last.
        """
        name = self.phases[phase]
        if first < steps and self.callbacks.end_reason:  # said at the evaluation before
            self.console.note(f"{name} is left out: {self.callbacks.end_reason}")
            return self._save(Position(phase + 1, 0), first)
        if first < steps:
            self.console.phase(name, steps, first)
        for step in range(first, steps):
            began = time.perf_counter()
            metrics = do(step)
            metrics["time/step"] = time.perf_counter() - began
            metrics["time/total"] = self.checkpoints.seconds
            if "rollout/tokens" in metrics:
                metrics["tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/step"]
            metrics |= self.callbacks.add_step(name, step, metrics)
            row = {"phase": name, "step": step, **metrics}
            if self.callbacks.end_reason:
                row["stopped"] = self.callbacks.end_reason
            self.log.append(row)
            self.job.trackers.log(name, step, metrics)
            self.console.step(metrics, step + 1)
            self.job.trainer.monitor.watch_stall(step, row)
            self.best.collect(row)
            reason = self._end_reason(row)
            last = step + 1 == steps or bool(reason)
            self.best.save(row, is_last=last)
            saves = last or self.stop_request.is_set or self.callbacks.failure is not None
            if saves or (step + 1) % self.job.options.checkpoint_every == 0:
                self._save(Position(phase + 1, 0) if last else Position(phase, step + 1), step + 1)
            self.callbacks.raise_failure()
            if last:
                if name == "sft":
                    self._note_fine_tuning(metrics, step + 1)
                elif step + 1 < steps:
                    self.console.note(f"reinforcement learning ended after {step + 1} of {steps} steps: {reason}")
                return
            if self.stop_request.is_set:
                raise TrainingInterruptedError

    def _end_reason(self, row: Mapping[str, Any]) -> str:
        """Why the phase of a new row ends with it before its last step, '' if it goes on."""
        if "stopped" in row:  # by a callback
            return row["stopped"]
        sft, options = self.job.sft, self.job.parts.options
        rate = get_value(row, PASS_RATE)  # nan without an evaluation
        passing = f"{100 * rate:.1f}% of held-out completions pass"
        if row["phase"] == "sft":
            reached = 0 < sft.until <= rate and row["test/kinds/lowest"] >= sft.until_each
            return f"{passing} (sft.until={sft.until:g})" if reached else ""
        if options.is_control:  # it must not stop by the verifier's verdicts
            return ""
        if 0 < options.until <= rate:
            return f"{passing} (training.until={options.until:g})"
        return describe_plateau(self.best.results, options.patience)

    def _why_ended(self, made: list[dict[str, Any]]) -> str:
        return self._end_reason(made[-1]) if made else self.callbacks.end_reason

    def _note_fine_tuning(self, metrics: Mapping[str, float], steps: int) -> None:
        """Say with what pass rates fine-tuning ended, and warn of a kind of task that it has not learned."""
        options = self.job.sft
        if not options.until or PASS_RATE not in metrics:
            return
        rate, lowest = metrics[PASS_RATE], metrics["test/kinds/lowest"]
        text = f"fine-tuning ended after {steps} steps: {100 * rate:.1f}% of held-out completions pass"
        if options.until_each and lowest < options.until_each:
            self.console.warn(
                f"{text}, of one kind of task {100 * lowest:.1f}% (sft.until_each={options.until_each:g}): "
                "reinforcement learning may not learn that kind; give more sft.steps"
            )
        elif rate < options.until:
            self.console.note(f"{text} (sft.until={options.until:g} was not reached)")

    def _save(self, position: Position, made: int = 0) -> None:
        self.log.sync()
        self.checkpoints.save(position, made)
        self.best.publish(self.checkpoints.kept_steps())

    def _sft_step(self, step: int) -> dict[str, float]:
        job, parts = self.job, self.job.parts
        try:
            metrics = sft_step(parts.client, parts.source, self.sft_curriculum, job.sft, step, parts.seed)
        except NonFiniteError as error:
            raise TrainingStoppedError(f"sft step {step + 1}: {error}. {self._advise('sft.optimizer')}") from error
        if job.sft.until and (step + 1) % job.sft.check_every == 0:
            metrics |= self._evaluate_interim(step)
        return metrics

    def _rl_step(self, step: int) -> dict[str, float]:
        job = self.job
        try:
            metrics, collected = self.schedule.learn(step)
        except NonFiniteError as error:
            file = job.folder / f"failed-batch-{step:06d}.jsonl"
            write_atomic(file, "".join(rollout_rows.trajectory_row(t) for t in job.trainer.current_batch))
            raise TrainingStoppedError(
                f"step {step + 1}: {error}. The batch is in {file}. {self._advise('training.optimizer')}"
            ) from error
        self._store_rollouts(step, collected)
        metrics |= self.callbacks.add_rollouts(step, collected.all.trajectories, metrics)
        every, is_last = job.evaluation.every, step + 1 == job.parts.options.steps
        if every and (job.options.keep_best if is_last else (step + 1) % every == 0):  # the last may be the best
            metrics |= self._evaluate_interim(step)
        return metrics

    def _advise(self, optimizer: str) -> str:
        """What to do after numbers that are not finite, and which checkpoints there are."""
        at = [f"{self.phases[position.phase]} step {position.step}" for position in self.journal.resumable_positions]
        return (
            "That update was not made. The step before may have thrown the weights far out: use a lower learning rate "
            f"or tighter clipping ({optimizer}), under another run.name. "
            + (f"Checkpoints: {' and '.join(at)}" if at else "There is no checkpoint yet (run.checkpoint_every)")
        )

    def _evaluate_interim(self, step: int) -> dict[str, float]:
        sampler = self.job.parts.client.save_weights_and_get_sampling_client()
        metrics = self.heldout.evaluate_interim(sampler, self.job.parts.seed)
        return metrics | self.callbacks.add_evaluation("interim", step + 1, metrics)

    def _store_rollouts(self, step: int, collected: StepBatch) -> None:
        """Show one completion of the step, and store the first few."""
        trajectories = collected.all.trajectories
        self.job.trackers.keep(step, trajectories)
        example = trajectories[step % len(trajectories)]
        self.console.sample(example.read_prompt, example.response, rollout_rows.format_scores(example))
        if count := self.job.options.rollouts_per_step:
            rows = "".join(rollout_rows.trajectory_row(t, self.job.parts.source) for t in trajectories[:count])
            write_atomic(self.job.folder / "rollouts" / f"rl-{step:06d}.jsonl", rows)

    def _evaluation_file(self, phase: str) -> Path:
        return self.job.folder / "evaluations" / f"{phase}.json"

    def _completions_file(self, phase: str) -> Path:
        return self._evaluation_file(phase).with_suffix(".jsonl")

    def _evaluate(self, phase: int) -> None:
        """Evaluate all held-out sets; the checkpoint after it says that the result is on disk.

        If nothing was trained since the first evaluation, the last one is the same.
        """
        name = self.phases[phase]
        if name == "final" and not self.steps_to_train:
            text = self._evaluation_file("baseline").read_text()
        elif name == "final" and (best := self._policy_to_report()):
            self.job.parts.client.load_state(weights_path(best)).result()
            text = self._evaluate_policy(name)
            self.checkpoints.reload()
        else:
            text = self._evaluate_policy(name)
        write_atomic(self._evaluation_file(name), text)
        self._save(Position(phase + 1, 0))
        rates = stored_evaluation(self._evaluation_file(name)).metrics()
        steps = sum(row["phase"] == self.trained for row in self.log.rows())
        self.callbacks.add_evaluation(name, steps, {rate: estimate.value for rate, estimate in rates.items()})
        self.callbacks.raise_failure()

    def _evaluate_policy(self, name: str) -> str:
        """Evaluate the client's weights; the content of the file of an evaluation."""
        parts = self.job.parts
        self.console.phase(name, len(self.heldout.tasks), unit="tasks")
        sampler = parts.client.save_weights_and_get_sampling_client()
        is_baseline = name == "baseline" and self.steps_to_train > 0
        size = parts.options.group_size if is_baseline else 0
        most, kept = self.job.options.rollouts_per_task, list[str]()
        evaluation = self.heldout.evaluate(
            sampler,
            parts.seed,
            self._progress,
            size,
            lambda judged: kept.extend(rollout_rows.heldout_rows(judged, parts.reward.name, most)),
        )
        if most:
            write_atomic(self._completions_file(name), "".join(kept))
        if is_baseline and self.trained == "rl":
            self._report_baseline(evaluation)
        return json.dumps(evaluation.to_json())

    def _report_baseline(self, baseline: Evaluation) -> None:
        """Say how many groups will have signal, and warn of what will keep the policy from learning."""
        parts = self.job.parts
        share = estimate_signal(baseline, parts.algorithm, parts.options)
        if not math.isnan(share):
            self.console.note(describe_signal(share, baseline, parts.options.group_size))
        if obstacles := find_obstacles(baseline, share):
            self.console.warn(f"before training:\n{format_findings(obstacles)}")

    def _policy_to_report(self) -> Path | None:
        """The checkpoint that the last evaluation is to report, None for the last policy."""
        best = self.best.describe() if self.job.evaluation.report == "best" else None
        return self.job.folder / "checkpoints" / best["checkpoint"] if best else None

    def _progress(self, done: int) -> None:
        """Show the progress of an evaluation. An interrupted one is done again from its start."""
        self.console.step({}, done)
        if self.stop_request.is_set and done < len(self.heldout.tasks):
            raise TrainingInterruptedError

    def _finish(self) -> dict[str, Any]:
        before, after = (stored_evaluation(self._evaluation_file(phase)) for phase in EVALUATIONS)
        options, rows = self.job.parts.options, self.log.rows()
        made = [row for row in rows if row["phase"] == self.trained]
        best = self.best.describe()
        summary = {
            **compare_evaluations(before, after),
            **({} if self.steps_to_train else {"unjudged": before.unjudged}),  # one evaluation
            "max_tasks": self.job.evaluation.tasks,
            "seconds": self.checkpoints.seconds,
            "weights_sha256": self.job.weights_sha256(),
            "mode": options.mode,
            "control": options.control,
            "seed": self.job.parts.seed,
            "steps": len(made),
            "stopped": self._why_ended(made) if len(made) < self.steps_to_train else "",
            "report": "best" if self._policy_to_report() else "last",
            **({"best": best} if best else {}),
            "machine": self.job.describe_environment(),
        }
        ends = [e.metrics()["pass@1"].value for e in (before, after)] if self.steps_to_train else []
        if can_draw():
            plot_curve(rows, self.job.folder / "curve.png", self.job.folder.name, ends)
        self.job.trackers.finish(summary)
        self.best.publish([])  # no resume follows
        write_atomic(self.job.folder / "summary.json", json.dumps(summary, indent=2))
        self.journal.finish()
        return summary

    @contextmanager
    def _tell_callbacks(self) -> Iterator[None]:
        """Tell callbacks that an attempt begins, and how it ends."""
        reason = "interrupted"
        self.callbacks.start(self.job.folder)
        try:
            self.callbacks.raise_failure()
            yield
            reason = "finished"
        except (TrainingInterruptedError, KeyboardInterrupt):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.callbacks.stop(reason, self.console.warn)
