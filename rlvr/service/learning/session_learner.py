"""How an engine learns from sessions: an optimizer step per batch of episodes, saved after each.

    learner = SessionLearner(client, Path("state/policy"), LearnerOptions(learning_rate=1e-3))
    learner.restore()
    step = learner.learn(trajectories)         # None if no step was made
    learner.sampler                            # samples from the current weights

A session is a group of episodes of one task. The baseline is the group's mean (Dr. GRPO, arXiv:2503.20783), the token
loss PPO's with the clip of DAPO, the entropy bonus is on sampled tokens: the spec `ppo` of `rlvr.algorithms`, with the
same update as a training run. A group with equal rewards has no signal. The others are gathered until there are
`batch_size` episodes. Weights change only by steps, so gathered episodes were sampled from the policy that learns from
them. When the service stops, it learns from what it has gathered. Each step saves weights and optimizer beside the
previous ones and then names them in `learner.json`, so a start after a kill has the exact bits of the last complete
step. A step that is not finite is refused, and the saved state is loaded again.

`GroupLearner` makes the steps and `SessionLearner` saves them in a folder; `leased_learner` publishes them to replicas.
Left out on purpose: deleting checkpoints at a Tinker
server (they have a lifetime of their own).
"""

from __future__ import annotations

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.capabilities import check_supported
from rlvr.algorithms.penalties import penalize_length
from rlvr.algorithms.terms.overlong import Overlong
from rlvr.algorithms.update import Passes, UpdateInputs, compute_current_logprobs, loss_config, update
from rlvr.core.files import find_damage, lock_file, read_json, write_atomic
from rlvr.core.messages import AdamParams, NonFiniteError
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.core.types import Trajectory, group_by
from rlvr.service.learning.credit import Plateau

# AdamW moves a weight by about the learning rate per step for any batch size, so small, noisy batches need a lower
# rate. At 0.001 x this a transformer of 160,000 weights learned arithmetic from 32 episodes a step; at three times as
# much it lost to noise what it learned.
RATE = 0.3
# Steps in which the learning rate rises: the first steps of AdamW move every weight by about the rate.
WARM_UP = 5
# Sessions of one window of the plateau: a result depends on its task more than on what was learned.
WINDOW = 500
POINTER = "learner.json"


@dataclass(frozen=True)
class LearnerOptions:
    """The options of learning from sessions. `learning_rate` is the service's setting: AdamW's is `RATE` of it, lower
    on a plateau. `batch_size` is the least number of episodes of a step; `policy_coefficient` scales rewards, and what
    overlong answers cost, against the entropy bonus."""

    batch_size: int = 32
    learning_rate: float = 1e-3
    entropy_coefficient: float = 0.01
    policy_coefficient: float = 1.0
    temperature: float = 1.0
    max_tokens: int = 512
    grad_clip: float = 1.0
    algorithm: str = "ppo"


@dataclass(frozen=True)
class LearningStep:
    """One optimizer step. `advantages` are by rollout id; `entropy` is in nats per token, from the samples."""

    step: int
    loss: float
    entropy: float
    grad_norm: float
    learning_rate: float
    groups: int
    advantages: dict[str, float]


@dataclass
class LearnerProgress:
    """The counters that are saved and restored with the weights; `learner.json` holds them."""

    steps: int = 0
    sessions: int = 0  # learned from
    silent: int = 0  # sessions without signal: equal rewards
    refused: int = 0  # steps that were not finite
    loss: float | None = None
    entropy: float | None = None
    path: str = ""
    before: str = ""  # the saved state before `path`
    plateau: dict[str, Any] = field(default_factory=dict[str, Any])


class GroupLearner(ABC):
    """Gathers groups and makes steps; a subclass saves them. Called by the thread that owns the client only; any thread
    may read `progress`."""

    refusals: tuple[type[Exception], ...] = (NonFiniteError,)
    """The errors of a step that repeating it would repeat: its groups are not learned from."""

    def __init__(
        self, client: TrainingClient, options: LearnerOptions, *, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.client, self.options, self.warn = client, options, warn
        algorithm = resolve_algorithm(
            options.algorithm, entropy_coef=options.entropy_coefficient, drop_equal_groups=True
        )
        if overlong := algorithm.term(Overlong):
            algorithm = algorithm.with_flat({"overlong_penalty": options.policy_coefficient * overlong.penalty})
        self.algorithm = algorithm
        check_supported(self.algorithm, client.capabilities)
        self.progress = LearnerProgress()
        self.plateau = Plateau(window=WINDOW)
        self._baseline = self.algorithm.advantage.start_baseline()
        self._sampler: SamplingClient | None = None
        self._gathered: list[Trajectory] = []

    @property
    def learning_rate(self) -> float:
        warm_up = min(1.0, (self.progress.steps + 1) / (WARM_UP + 1))
        return self.options.learning_rate * RATE * self.plateau.scale * warm_up

    def learn(self, trajectories: Sequence[Trajectory], *, now: bool = False) -> LearningStep | None:
        """Gather complete groups, and make a step if there are enough episodes, or any if `now`."""
        for group in group_by(trajectories, lambda t: t.group_id).values():
            if rewards := [t.reward for t in group if t.reward is not None]:
                self.plateau.observe(math.fsum(rewards) / len(rewards))
        scale = self.options.policy_coefficient
        trajectories = [replace(t, reward=None if t.reward is None else scale * t.reward) for t in trajectories]
        groups = group_by(trajectories, lambda t: t.group_id)
        penalize_length(trajectories, self.algorithm, self.options.max_tokens)
        can_learn = self.algorithm.has_signal
        with_signal = [group for group in groups.values() if can_learn(group) and all(t.logprobs for t in group)]
        self.progress.silent += len(groups) - len(with_signal)
        self._gathered += [t for group in with_signal for t in group]
        if len({t.rollout_id for t in self._gathered}) < (1 if now else self.options.batch_size):
            return None
        batch, self._gathered = self._gathered, []
        return self._step(batch)

    def _step(self, batch: list[Trajectory]) -> LearningStep | None:
        groups = len(group_by(batch, lambda t: t.group_id))
        adam = AdamParams(self.learning_rate, grad_clip_norm=self.options.grad_clip)
        self._sampler = None
        try:
            measured = update(
                self.client,
                self.algorithm,
                batch,
                lambda number: adam,
                Passes(),
                UpdateInputs(
                    self._baseline, self.options.max_tokens, self.options.temperature, key=self.progress.steps
                ),
            )
            self._require_finite(batch)
        except self.refusals as error:
            self._refuse(error)
            return None
        if not measured.updates:
            return None
        self.progress.steps += 1
        self.progress.sessions += groups
        self.progress.loss, self.progress.entropy = measured.loss, _entropy(batch)
        try:
            self._save()
        except OSError as error:  # e.g. a full disk: the weights in memory are good
            self.warn(f"what was learned could not be saved ({error}); the next step saves again")
        return LearningStep(
            self.progress.steps,
            measured.loss,
            self.progress.entropy,
            measured.grad_norm,
            adam.learning_rate,
            groups,
            {t.rollout_id: t.advantage for t in batch},
        )

    def _require_finite(self, batch: Sequence[Trajectory]) -> None:
        """NonFiniteError if a weight is not finite. A client without `policy.has_finite_weights` is tested by the
        log-probs of one answer."""
        policy = getattr(self.client, "policy", None)
        if hasattr(policy, "has_finite_weights"):
            is_finite = policy.has_finite_weights()  # pyright: ignore[reportOptionalMemberAccess]
        else:
            config = loss_config(self.algorithm, self.client, self.options.temperature)
            [logprobs] = compute_current_logprobs(self.client, batch[:1], config)
            is_finite = all(map(math.isfinite, logprobs))
        if not is_finite:
            raise NonFiniteError("a weight after the step", [])

    def _refuse(self, error: Exception) -> None:
        """Load the last good weights and optimizer state, which drops the accumulated gradients."""
        self._load_saved()
        self.progress.refused += 1
        self._write_progress()
        self.warn(f"a step was refused ({error}); the weights are those of step {self.progress.steps}")

    def _load_saved(self) -> None:
        self.client.load_state_with_optimizer(self._absolute(self.progress.path)).result()

    @abstractmethod
    def _save(self) -> None:
        """Save weights and optimizer, then `progress` with their path."""

    @abstractmethod
    def _write_progress(self) -> None:
        """Write `progress` alone: the weights are those saved last."""

    def _absolute(self, path: str) -> str:
        return path


class SessionLearner(GroupLearner):
    """Saves in a folder of this instance, which it locks."""

    def __init__(
        self,
        client: TrainingClient,
        folder: Path,
        options: LearnerOptions = LearnerOptions(),
        *,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(client, options, warn=warn)
        self.folder = folder
        self._lock: IO[str] | None = None

    @property
    def version(self) -> int:
        """The step whose weights `sampler` samples from."""
        return self.progress.steps

    @property
    def detail(self) -> str:
        return f"{self.progress.steps} steps learned"

    @property
    def sampler(self) -> SamplingClient:
        """Samples from the current weights. Dropped before a step, which then needs no copy of them."""
        if self._sampler is None:
            self._sampler = self.client.save_weights_and_get_sampling_client()
        return self._sampler

    def forget_sampler(self) -> None:
        """Nothing: the client of this sampler is this learner's."""

    def describe(self) -> dict[str, Any]:
        """The numbers for /stats and the metrics."""
        return describe_progress(self.progress, self.learning_rate)

    def refresh(self) -> None:
        """Nothing: the weights belong to this instance."""

    def restore(self) -> bool:
        """Load the last saved state; False if there is none. If it is damaged, the one before is loaded."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_file(self.folder / ".lock")
        if self._lock is None:
            raise ValueError(f"another process learns in {self.folder}; give this service another --state")
        pointer = self.folder / POINTER
        if not pointer.exists():
            self._save()  # so that a refused step always has a state to go back to
            return False
        saved = read_json(pointer, "what was learned", "remove the folder to begin with the original model")
        self.progress = LearnerProgress(**{k: v for k, v in saved.items() if k in LearnerProgress.__dataclass_fields__})
        for path in filter(None, (self.progress.path, self.progress.before)):
            if "://" not in path and (damage := find_damage(self.folder / path)):
                self.warn(f"saved weights {path} are damaged ({damage}); loading the ones before")
                continue
            self.client.load_state_with_optimizer(self._absolute(path)).result()
            if path != self.progress.path:
                self.progress = replace(self.progress, path=path, before="", steps=int(path.rpartition("-")[2]))
            self.plateau = Plateau(**self.progress.plateau)
            self._sampler = None
            return True
        raise ValueError(
            f"{pointer}: its saved weights are missing or damaged; put them back, or remove {self.folder} "
            "to begin with the original model"
        )

    def close(self) -> None:
        """Learn from the gathered episodes and unlock the folder."""
        self.learn([], now=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _save(self) -> None:
        """Save a state in `folder`, under a name relative to it: the folder may be moved."""
        name = f"step-{self.progress.steps:08d}"
        path = self.client.save_state(name).result().path
        self.progress = replace(self.progress, path=path if "://" in path else name, before=self.progress.path)
        self.progress.plateau = asdict(self.plateau)
        self._write_progress()
        for old in sorted(self.folder.glob("step-*")):
            if old.name not in (self.progress.path, self.progress.before):
                shutil.rmtree(old, ignore_errors=True)

    def _absolute(self, path: str) -> str:
        return path if "://" in path else str(self.folder / path)

    def _write_progress(self) -> None:
        write_atomic(self.folder / POINTER, json.dumps(asdict(self.progress), indent=2))


def describe_progress(progress: LearnerProgress, learning_rate: float | None) -> dict[str, Any]:
    return {
        "policy_entropy": progress.entropy,
        "training_loss": progress.loss,
        "updates": progress.steps,
        "learning_rate": learning_rate,
        "sessions_learned": progress.sessions,
        "sessions_without_signal": progress.silent,
        "steps_refused": progress.refused,
    }


def _entropy(batch: Sequence[Trajectory]) -> float:
    """Nats per sampled token: the mean of -log-prob, whose expectation is the policy's entropy."""
    tokens = sum(t.num_action_tokens for t in batch)
    return -math.fsum(t.total_logprob for t in batch) / max(1, tokens)
