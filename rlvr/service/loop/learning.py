"""What an engine learns from sessions: an optimizer step per batch of episodes, kept on disk after each.

    learner = Learner(client, Path("state/policy"), LearnerOptions(learning_rate=1e-3))
    learner.restore()
    learned = learner.learn(trajectories)      # None where nothing could be learned
    learner.sampler                            # at the weights as they are now

A session is a group of episodes of one task. The baseline is the group's mean (Dr. GRPO, arXiv:2503.20783), the token
loss PPO's with the clip of DAPO, the entropy bonus the sampled one: the row `ppo` of `rlvr.algorithms`, by the same
update as every training run. A group whose rewards are equal teaches nothing. The others are gathered until there are
`batch_size` episodes: weights change only by steps, so what waits was sampled from the policy that learns from it. What
still waits when the service stops is learned from then. After each step weights and optimizer are saved beside the ones
before, and only then named in `learner.json`, so that a start after a kill has the bits of the last whole step. A step
that is not finite is refused, and what it may have touched is loaded again.

`python -m pytest tests/test_service_learning.py` exercises it. Left out on purpose: deleting what a Tinker server
keeps (its checkpoints have a lifetime of their own).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.advantages import Memory, teaches
from rlvr.algorithms.roads import check_roads
from rlvr.algorithms.update import Passes, current_logprobs, loss_config, update
from rlvr.files import read_json, verified, write_atomic
from rlvr.messages import AdamParams, NonFiniteError
from rlvr.protocols import SamplingClient, TrainingClient
from rlvr.service.loop.credit import Plateau
from rlvr.types import Trajectory, group_by

# AdamW moves a weight by about one rate a step whatever the batch, so that its noise asks for less where batches are
# small. At 0.001 x this a transformer of 160,000 weights learned arithmetic from 32 episodes a step; at three times as
# much it lost in noise what it learned.
RATE = 0.3
# Steps in which the rate rises: the first ones of AdamW move every weight by about its rate, noise or not.
WARM_UP = 5
# Sessions whose means are compared on a plateau: what one comes to depends on its task more than on what was learned.
WINDOW = 500
POINTER = "learner.json"


@dataclass(frozen=True)
class LearnerOptions:
    """`learning_rate` is the service's: AdamW's is `RATE` of it, less on a plateau. `batch_size` is the least number
    of episodes of a step; `policy_coefficient` weighs the rewards' gradient against the entropy bonus's."""

    batch_size: int = 32
    learning_rate: float = 1e-3
    entropy_coefficient: float = 0.01
    policy_coefficient: float = 1.0
    temperature: float = 1.0
    max_tokens: int = 512
    grad_clip: float = 1.0
    algorithm: str = "ppo"


@dataclass(frozen=True)
class Learned:
    """One optimizer step. `advantages` by rollout id; `entropy` in nats a token, estimated from what was sampled."""

    step: int
    loss: float
    entropy: float
    grad_norm: float
    learning_rate: float
    groups: int
    advantages: dict[str, float]


@dataclass
class Progress:
    """What is saved beside the weights, and restored with them."""

    steps: int = 0
    sessions: int = 0  # that were learned from
    silent: int = 0  # sessions whose rewards were all equal
    refused: int = 0  # steps that were not finite
    loss: float | None = None
    entropy: float | None = None
    path: str = ""
    before: str = ""  # the saved state before `path`
    plateau: dict[str, Any] = field(default_factory=dict[str, Any])  # of the learning rate


class Learner:
    """Only the thread that computes calls it; `progress` may be read from any."""

    def __init__(
        self,
        client: TrainingClient,
        folder: Path,
        options: LearnerOptions = LearnerOptions(),
        *,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.client, self.folder, self.options, self.warn = client, folder, options, warn
        self.algorithm = resolve_algorithm(
            options.algorithm, entropy_coef=options.entropy_coefficient, drop_equal_groups=True
        )
        check_roads(self.algorithm, client)
        self.progress = Progress()
        self.plateau = Plateau(window=WINDOW)
        self._memory = Memory(self.algorithm.baseline_decay)
        self._sampler: SamplingClient | None = None
        self._gathered: list[Trajectory] = []
        self._hold: int | None = None

    @property
    def learning_rate(self) -> float:
        begun = min(1.0, (self.progress.steps + 1) / (WARM_UP + 1))
        return self.options.learning_rate * RATE * self.plateau.scale * begun

    @property
    def sampler(self) -> SamplingClient:
        """Samples from the weights as they are now. Dropped before a step, which then need not keep a copy of them."""
        if self._sampler is None:
            self._sampler = self.client.save_weights_and_get_sampling_client()
        return self._sampler

    def restore(self) -> bool:
        """Go on from what was saved last; whether there was something. A damaged state gives way to the one before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._hold = _held(self.folder)
        pointer = self.folder / POINTER
        if not pointer.exists():
            self._save()  # so that there always is something to go back to
            return False
        told = read_json(pointer, "what was learned", "remove the folder to begin with the model as it was")
        self.progress = Progress(**{k: v for k, v in told.items() if k in Progress.__dataclass_fields__})
        for path in filter(None, (self.progress.path, self.progress.before)):
            if "://" not in path and (wrong := verified(self.folder / path)):
                self.warn(f"saved weights {path} are damaged ({wrong}); trying those before")
                continue
            self.client.load_state_with_optimizer(self._place(path)).result()
            if path != self.progress.path:
                self.progress = replace(self.progress, path=path, before="", steps=int(path.rpartition("-")[2]))
            self.plateau = Plateau(**self.progress.plateau)
            self._sampler = None
            return True
        raise ValueError(
            f"{pointer} names saved weights of which none is whole; put them back, or remove {self.folder} to begin "
            "with the model as it was"
        )

    def close(self) -> None:
        """Learn from what was gathered, and let another process have the folder."""
        self.learn([], now=True)
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    def learn(self, trajectories: Sequence[Trajectory], *, now: bool = False) -> Learned | None:
        """Take in whole groups, and make a step where enough has been gathered; with `now` of whatever there is."""
        groups = group_by(trajectories, lambda t: t.group_id)
        teaching = [group for group in groups.values() if teaches(group) and all(t.logprobs for t in group)]
        self.progress.silent += len(groups) - len(teaching)
        for group in groups.values():
            if known := [t.reward for t in group if t.reward is not None]:
                self.plateau.observe(math.fsum(known) / len(known))
        scale = self.options.policy_coefficient
        for t in (t for group in teaching for t in group):
            self._gathered.append(replace(t, reward=None if t.reward is None else scale * t.reward))
        if len({t.rollout_id for t in self._gathered}) < (1 if now else self.options.batch_size):
            return None
        batch, self._gathered = self._gathered, []
        return self._step(batch)

    def _step(self, batch: list[Trajectory]) -> Learned | None:
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
                memory=self._memory,
                max_tokens=self.options.max_tokens,
                temperature=self.options.temperature,
                key=self.progress.steps,
            )
            self._require_finite(batch)
        except NonFiniteError as error:
            self._refuse(error)
            return None
        if not measured.updates:
            return None
        self.progress.steps += 1
        self.progress.sessions += groups
        self.progress.loss, self.progress.entropy = measured.loss, _entropy(batch)
        try:
            self._save()
        except OSError as error:  # a full disk, say: the weights are good, and saved with the next step
            self.warn(f"what was learned could not be saved ({error}); it is tried again with the next step")
        return Learned(
            self.progress.steps,
            measured.loss,
            self.progress.entropy,
            measured.grad_norm,
            adam.learning_rate,
            groups,
            {t.rollout_id: t.advantage for t in batch},
        )

    def _require_finite(self, batch: Sequence[Trajectory]) -> None:
        """NonFiniteError where a weight is none, as far as can be told: a client without `policy.finite` is asked for
        the log-probs of one answer."""
        policy = getattr(self.client, "policy", None)
        if hasattr(policy, "finite"):
            whole = policy.finite()  # pyright: ignore[reportOptionalMemberAccess]
        else:
            config = loss_config(self.algorithm, self.client, self.options.temperature)
            [logprobs] = current_logprobs(self.client, batch[:1], config)
            whole = all(map(math.isfinite, logprobs))
        if not whole:
            raise NonFiniteError("a weight after the step", [])

    def _refuse(self, error: NonFiniteError) -> None:
        """Back to the last good weights, with the optimizer's state: gradients that were added up are dropped."""
        self.client.load_state_with_optimizer(self._place(self.progress.path)).result()
        self.progress.refused += 1
        self._name()
        self.warn(f"a step was refused ({error}); the weights are those of step {self.progress.steps}")

    def _save(self) -> None:
        """`client` saves in `folder`, and is named by its name there: the service's folder may be moved."""
        name = f"step-{self.progress.steps:08d}"
        path = self.client.save_state(name).result().path
        self.progress = replace(self.progress, path=path if "://" in path else name, before=self.progress.path)
        self.progress.plateau = asdict(self.plateau)
        self._name()
        for old in sorted(self.folder.glob("step-*")):
            if old.name not in (self.progress.path, self.progress.before):
                shutil.rmtree(old, ignore_errors=True)

    def _place(self, path: str) -> str:
        return path if "://" in path else str(self.folder / path)

    def _name(self) -> None:
        write_atomic(self.folder / POINTER, json.dumps(asdict(self.progress), indent=2))


def _held(folder: Path) -> int:
    """The hold on the folder until it is closed, or this process ends; ValueError where another one learns there."""
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ValueError(f"another process learns in {folder}; give this service another --state") from error
    return lock


def _entropy(batch: Sequence[Trajectory]) -> float:
    """Nats a sampled token: the mean of -log-prob, whose expectation is the policy's entropy."""
    tokens = sum(t.num_action_tokens for t in batch)
    return -math.fsum(t.total_logprob for t in batch) / max(1, tokens)
