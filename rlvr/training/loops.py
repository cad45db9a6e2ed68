"""A run from beginning to end: warm-up, baseline, reinforcement learning, the same evaluation again, the table.

`sync` is the oracle: sample a batch, learn from it, repeat. The journal makes every phase resumable; running the same
job again goes on where it stopped. Nothing here knows how the parts were made (`rlvr.build` does).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rlvr import draws
from rlvr.files import verified, write_atomic
from rlvr.messages import NonFiniteError
from rlvr.tracking import Console, MetricsLog, plot_curve
from rlvr.training import samples
from rlvr.training.completion import Completion
from rlvr.training.curriculum import Curriculum
from rlvr.training.errors import TrainingStopped
from rlvr.training.evaluate import (
    Evaluation,
    beside,
    compare,
    evaluate,
    evaluation_params,
    heldout_split,
    stored_evaluation,
)
from rlvr.training.job import Job, settled
from rlvr.training.journal import Checkpoint, Journal, Position, keep_remote, unlike, weights_at
from rlvr.training.pipelined import FixedLag
from rlvr.training.sft import sft_step
from rlvr.training.signal import StallWatch, told
from rlvr.training.step import Collected
from rlvr.types import Task

# Reinforcement learning is measured from where the warm-up left the policy; supervised learning from its start.
PHASES = {"rlvr": ("sft", "baseline", "rl", "final"), "sft": ("baseline", "sft", "final")}

EVALUATIONS = ("baseline", "final")  # the phases that leave a file in evaluations/
REFERENCE = "reference"  # the checkpoint that a KL compares with

CURE = (
    "That update was not made. The step before may have thrown the weights far out: the last two checkpoints stand, "
    "and a lower learning rate or tighter clipping, under another run.name, is the usual cure"
)


def pipeline(job: Job, journal: Journal) -> FixedLag | Completion | None:
    """What makes the steps of RL where sampling runs ahead of them; None where the trainer makes them one by one."""
    if job.training.mode != "rlvr" or job.training.order == "sync":
        return None
    return Completion(job.trainer, journal) if job.training.order == "completion" else FixedLag(job.trainer, journal)


class Interrupted(Exception):
    """The user asked to stop; everything done so far is safe."""


class Loop:
    """One attempt at a job. All state that outlives it is in the journal."""

    def __init__(self, job: Job, journal: Journal, console: Console) -> None:
        self.job, self.journal, self.console = job, journal, console
        self.sft_curriculum = Curriculum(job.source, job.sft.curriculum, draws.key("sft", job.seed))
        looks = bool(job.sft.until or job.evaluation.every)
        self.heldout, self.validation = heldout_split(job.source, job.evaluation, looks=looks)
        self.beside = beside(job.source, job.evaluation)
        self.phases = PHASES[job.training.mode]
        self.pipeline = pipeline(job, journal)
        self.log = MetricsLog(job.folder / "metrics.jsonl", self.phases)
        self.watch = StallWatch()
        self.started = time.perf_counter()
        self.seconds_before = 0.0
        self.stop_asked = False

    def run(self) -> dict[str, Any]:
        """Do what is left of the job; its summary. Raises Interrupted or TrainingStopped."""
        position = self._restore()
        rows = self.log.rows()
        self.watch = StallWatch(rows)
        with (
            settled(),
            self.log,
            closing(self.pipeline or self.job.trainer),
            self._listening(),
            self.job.trackers.running(rows, (Interrupted, KeyboardInterrupt)),
        ):
            for number, phase in enumerate(self.phases):
                if number < position.phase:
                    continue
                if self.stop_asked:
                    raise Interrupted
                first = position.step if number == position.phase else 0
                match phase:
                    case "sft":
                        self._steps(number, first, self.job.sft.steps, self._sft_step)
                    case "rl":
                        self._compare_from_here(first)
                        self._steps(number, first, self.job.training.steps, self._rl_step)
                        if self.pipeline is not None:
                            self.pipeline.finish()
                    case _:
                        self._evaluate(number)
            return self._finish()

    @property
    def seconds(self) -> float:
        """Working time of the run: this attempt, and earlier ones up to the checkpoint they left."""
        return self.seconds_before + time.perf_counter() - self.started

    def _restore(self) -> Position:
        checkpoint = self.journal.last_good(self.console.warn)
        position = checkpoint.position if checkpoint else Position()
        if checkpoint:
            self._check(checkpoint)
            self.job.client.load_state_with_optimizer(weights_at(self.journal.resolve(checkpoint.path))).result()
            self.sft_curriculum.restore(checkpoint.state["sft"])
            self.job.trainer.restore(checkpoint.state["rl"])
            self.seconds_before = checkpoint.state["seconds"]
            self.console.note(f"resuming: {(*self.phases, 'done')[position.phase]}, {position.step} steps done")
        if self.pipeline is not None:
            self.pipeline.restore(checkpoint, self._rl_steps(position))
        self.log.keep(lambda row: Position(self.phases.index(row["phase"]), int(row["step"])) < position)
        for number, phase in enumerate(self.phases):
            if number >= position.phase:
                self._evaluation_file(phase).unlink(missing_ok=True)
            elif phase in EVALUATIONS:  # said before hours of work, not after them
                stored_evaluation(self._evaluation_file(phase))
        return position

    def _check(self, checkpoint: Checkpoint) -> None:
        """ValueError for a journalled checkpoint that no run of this job can have written."""
        at, name = checkpoint.position, Path(checkpoint.path).name
        lengths = {"sft": self.job.sft.steps, "rl": self.job.training.steps}
        most = [*(lengths.get(phase, 0) for phase in self.phases), 0]
        problem = unlike(checkpoint.state, self._state())
        if at.phase >= len(most) or at.step > most[at.phase] or name != self._name(at):
            problem = f"phase {at.phase}, step {at.step} is not where this run saved {name[:80]}"
        if problem:
            raise ValueError(
                f"{self.journal.folder / 'journal.jsonl'}, line {checkpoint.line}: {problem}; restore the line, or "
                "delete it to go on from the checkpoint before"
            )

    def _name(self, position: Position) -> str:
        return f"{(*self.phases, 'done')[position.phase]}-{position.step:06d}"

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights."""
        state = {"sft": self.sft_curriculum.state(), "rl": self.job.trainer.state(), "seconds": self.seconds}
        return state if self.pipeline is None else {**state, "pipeline": self.pipeline.state()}

    def _steps(self, phase: int, first: int, steps: int, do: Callable[[int], dict[str, float]]) -> None:
        """Steps `first` to `steps` of a phase, made safe every now and then, at the end, and when asked to stop.

        A step whose quick look reaches the phase's `until` is its last one.
        """
        name = self.phases[phase]
        control = self.job.training.control != "none"  # which must not stop by the verifier's verdicts
        goal = self.job.sft.until if name == "sft" else 0.0 if control else self.job.training.until
        if first < steps:
            self.console.phase(name, steps, first)
        for step in range(first, steps):
            began = time.perf_counter()
            metrics = do(step)
            metrics["time/step"] = time.perf_counter() - began
            metrics["time/total"] = self.seconds
            if "rollout/tokens" in metrics:
                metrics["tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/step"]
            self.log.append({"phase": name, "step": step, **metrics})
            self.job.trackers.log(name, step, metrics)
            self.console.step(metrics, step + 1)
            if findings := self.watch.add({"phase": name, **metrics}):
                self.console.warn(f"step {step}: learning stalls. What the last steps say:\n{told(findings)}")
            last = step + 1 == steps or (goal > 0 and metrics.get("test/env/all/correct", 0.0) >= goal)
            if last or self.stop_asked or (step + 1) % self.job.options.checkpoint_every == 0:
                self._save(Position(phase + 1, 0) if last else Position(phase, step + 1))
            if last:
                return
            if self.stop_asked:
                raise Interrupted

    def _compare_from_here(self, first: int) -> None:
        """Keep the policy as RL finds it, where a KL compares with it; a resumed run reads it back."""
        job = self.job
        if not job.trainer.algorithm.kl_coef:
            return
        kept = job.folder / "checkpoints" / REFERENCE
        if first and (wrong := verified(kept)):
            raise TrainingStopped(
                f"{kept}, the policy that algorithm.kl_coef compares with, is damaged or missing ({wrong}); put it "
                "back: it cannot be made again from later weights. Or start anew under another run.name"
            )
        if not kept.exists():
            saved = job.client.save_weights_for_sampler(REFERENCE).result()
            if "://" in saved.path:
                keep_remote(kept, saved.path)
        job.trainer.reference = job.client.create_sampling_client(weights_at(kept))

    def _save(self, position: Position) -> None:
        self.log.sync()
        name = self._name(position)
        inflight = self.pipeline.keep(name) if self.pipeline is not None and position.step else ""
        saved = self.job.client.save_state(name).result()
        path = Path(saved.path)
        if "://" in saved.path:
            path = self.job.folder / "checkpoints" / name
            keep_remote(path, saved.path)
        relative = str(path.relative_to(self.job.folder)) if path.is_relative_to(self.job.folder) else saved.path
        checkpoint = Checkpoint(position, relative, self._state(), inflight)
        self.journal.checkpoint(checkpoint, self.job.options.keep_checkpoints)
        if self.pipeline is not None:
            self.pipeline.forget(self._rl_steps(self.journal.oldest_kept))

    def _rl_steps(self, at: Position) -> int:
        """Steps of RL that are done at a position of the run."""
        rl = self.phases.index("rl")
        return at.step if at.phase == rl else 0 if at.phase < rl else self.job.training.steps

    def _sft_step(self, step: int) -> dict[str, float]:
        job = self.job
        try:
            metrics = sft_step(job.client, job.source, self.sft_curriculum, job.sft, step, job.seed)
        except NonFiniteError as error:
            raise TrainingStopped(f"warm-up step {step}: {error}. {CURE} (sft.optimizer)") from error
        if job.sft.until and (step + 1) % job.sft.check_every == 0:
            metrics |= self._quick_look()
        return metrics

    def _rl_step(self, step: int) -> dict[str, float]:
        job = self.job
        try:
            metrics, collected = (self.pipeline or job.trainer).learn(step)
        except NonFiniteError as error:
            kept = job.folder / f"failed-batch-{step:06d}.jsonl"
            write_atomic(kept, "".join(samples.row(t) for t in job.trainer.under_way))
            raise TrainingStopped(
                f"step {step}: {error}. The batch is in {kept}. {CURE} (training.optimizer)"
            ) from error
        self._keep_rollouts(step, collected)
        every = job.evaluation.every
        if every and (step + 1) % every == 0 and step + 1 < job.training.steps:
            metrics |= self._quick_look()
        return metrics

    def _quick_look(self) -> dict[str, float]:
        """Pass rate and reward on held-out tasks that are never reported: a run may decide by them when to stop."""
        samples = self.job.evaluation.quick_samples
        found = self._evaluated(self.validation, samples, draws.key("look", self.job.seed)).metrics()
        return {
            "test/env/all/correct": found["pass@1"].value,
            "test/env/all/reward/total": found["mean_reward"].value,
            **{f"test/{name}": rate.value for name, rate in found.items() if name.startswith("watched/")},
        }

    def _keep_rollouts(self, step: int, collected: Collected) -> None:
        self.job.trackers.keep(step, collected.all.trajectories)
        shown = collected.all[step % len(collected.all)]
        self.console.sample(shown.prompt, shown.response, samples.told(shown))
        if self.job.options.rollouts_per_step:
            kept = collected.all.trajectories[: self.job.options.rollouts_per_step]
            write_atomic(self.job.folder / "rollouts" / f"rl-{step:06d}.jsonl", "".join(samples.row(t) for t in kept))

    def _evaluation_file(self, phase: str) -> Path:
        return self.job.folder / "evaluations" / f"{phase}.json"

    def _evaluate(self, phase: int) -> None:
        """The whole held-out set and those beside it; the checkpoint after it says that its result is on disk."""
        name, samples = self.phases[phase], self.job.evaluation.samples
        self.console.phase(name, len(self.heldout), unit="tasks")
        done = self._evaluated(self.heldout, samples, self.job.seed, self._progress)
        others = {name: self._evaluated(tasks, samples, self.job.seed) for name, tasks in self.beside.items()}
        done = replace(done, beside=others)
        write_atomic(self._evaluation_file(name), json.dumps(done.to_json()))
        self._save(Position(phase + 1, 0))

    def _evaluated(
        self, tasks: list[Task], samples: int, seed: int, progress: Callable[[int], None] = lambda done: None
    ) -> Evaluation:
        job, asked = self.job, self.job.evaluation
        return evaluate(
            job.source,
            tasks,
            job.client.save_weights_and_get_sampling_client(),
            job.reward,
            evaluation_params(job.params, asked),
            samples=samples,
            k=min(asked.k or asked.samples, samples),
            seed=seed,
            error_budget=job.training.error_budget,
            watched=job.trainer.watched,
            progress=progress,
        )

    def _progress(self, done: int) -> None:
        """Part of an evaluation is over. An interrupted one is done again from its start."""
        self.console.step({}, done)
        if self.stop_asked and done < len(self.heldout):
            raise Interrupted

    def _finish(self) -> dict[str, Any]:
        before, after = (stored_evaluation(self._evaluation_file(phase)) for phase in EVALUATIONS)
        summary = {
            **compare(before, after),
            "seconds": self.seconds,
            "weights_sha256": self.job.weights_sha256(),
            "mode": self.job.training.mode,
            "control": self.job.training.control,
            "seed": self.job.seed,
        }
        plot_curve(self.log.rows(), self.job.folder / "curve.png", self.job.folder.name)
        self.job.trackers.finish(summary)
        write_atomic(self.job.folder / "summary.json", json.dumps(summary, indent=2))
        self.journal.write("finished")
        return summary

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """The first Ctrl-C stops after the step under way; a second one at once (nothing is lost either way)."""

        def asked(number: int, frame: FrameType | None) -> None:
            if self.stop_asked:
                raise KeyboardInterrupt
            self.stop_asked = True
            self.console.note("stopping after this step (press Ctrl-C again to stop at once)")

        try:
            before = signal.signal(signal.SIGINT, asked)
        except ValueError:  # not the main thread: whoever runs us there stops us their way
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
