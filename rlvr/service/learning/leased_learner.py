"""The learner of a policy that replicas share: it takes the groups that all of them wrote, and publishes each step.

    learner = LeasedLearner(client, store, name, token, options)
    learner.restore(state)                             # what was published last, None: nothing yet
    learner.take(store.waiting_groups(name, MOST, learner.taken))

The weights are saved first. Then one transaction of the database names them and marks the groups that they have learned
from, if the lease is still this replica's (`rlvr.store.shared_policies`). So a group is learned from once: a learner
that is killed, or replaced while it computes, has published nothing, and its groups still wait. Groups that no step can
learn from (equal rewards, a refused step, older than `MAX_LAG` steps) are marked too.

Groups that older weights sampled are learned from with the importance ratio of the loss, whose clip bounds their
effect. `python -m pytest tests/test_service_shared_learner.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlvr.core.messages import NonFiniteError
from rlvr.core.protocols import TrainingClient
from rlvr.core.types import Trajectory
from rlvr.service.learning.credit import Plateau
from rlvr.service.learning.session_learner import GroupLearner, LearnerOptions, LearnerProgress, LearningStep
from rlvr.store import ExperienceStore
from rlvr.store.shared_policies import NOT_LEARNED, WaitingGroup

MAX_LAG = 8  # steps between the weights that sampled a group and those that learn from it
MOST = 64  # groups of one step
# What a step reads of a trajectory. Texts stay where they are: with the session's answers.
_FIELDS = ("prompt_tokens", "response_tokens", "logprobs", "action_mask", "reward", "rollout_id", "policy_version")


class LeaseLost(Exception):
    """Another replica learns now: what this one computed since its last publication is dropped."""


class LeasedLearner(GroupLearner):
    """Publishes while the lease of `token` is this replica's; LeaseLost from any call once it is not."""

    refusals = (NonFiniteError, ValueError)  # ValueError: the server refuses the data

    def __init__(
        self,
        client: TrainingClient,
        store: ExperienceStore,
        name: str,
        token: int,
        options: LearnerOptions,
        *,
        model: dict[str, Any] | None = None,
        retire: Callable[[Sequence[str]], None] = lambda paths: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`model` is published with every state; `retire` is called with the paths that a publication replaced."""
        super().__init__(client, options, warn=warn)
        self._store, self._name, self._token = store, name, token
        self._model, self._retire = dict(model or {}), retire
        self.taken: set[str] = set()  # the sessions whose groups no publication has marked yet
        self._learning: set[str] = set()  # those of the step that is made
        self._sampler_path, self._dropped = "", 0

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from what was published last, which the client has loaded. Without it publish the client's weights,
        so that replicas can sample."""
        if state is None:
            self._save()
            return
        self.progress, self._dropped = read_progress(state), int(state["dropped"])
        self.plateau, self._sampler_path = Plateau(**self.progress.plateau), str(state["sampler"])

    def take(self, groups: Sequence[WaitingGroup]) -> LearningStep | None:
        """Gather groups; make and publish a step if there are enough."""
        fresh = [group for group in groups if self.progress.steps - group.version <= MAX_LAG]
        self._dropped += len(groups) - len(fresh)
        self.taken |= {group.session_id for group in groups}
        step = self.learn([t for group in fresh for t in read_group(group)])
        if self.taken - {t.group_id for t in self._gathered}:
            self._write_progress()
        return step

    def _step(self, batch: list[Trajectory]) -> LearningStep | None:
        self._learning = {t.group_id for t in batch}
        try:
            return super()._step(batch)
        finally:
            self._learning = set()

    def _save(self) -> None:
        replaced = [path for path in (self.progress.path, self._sampler_path) if path]
        number = f"{self.progress.steps:08d}"
        path = self.client.save_state(f"step-{number}").result().path
        self._sampler_path = self.client.save_weights_for_sampler(f"sampler-{number}").result().path
        self.progress = replace(self.progress, path=path, before=self.progress.path)
        self._publish(self.progress.steps)
        self._retire(replaced)

    def _write_progress(self) -> None:
        self._publish(NOT_LEARNED)

    def _publish(self, step: int) -> None:
        """Publish the state; mark the groups of the current step as learned in `step`, and other settled ones as
        learned in none."""
        self.progress.plateau = asdict(self.plateau)
        gathered = {t.group_id for t in self._gathered}
        steps = {id: step if id in self._learning else NOT_LEARNED for id in self.taken - gathered}
        state = {
            **self._model,
            **asdict(self.progress),
            "sampler": self._sampler_path,
            "dropped": self._dropped,
            "learning_rate": self.learning_rate,
        }
        if not self._store.publish_policy(self._name, self._token, state, steps):
            raise LeaseLost(f"another replica learns {self._name} now")
        self.taken &= gathered


def read_progress(state: dict[str, Any]) -> LearnerProgress:
    """The counters of a published state."""
    return LearnerProgress(**{name: state[name] for name in LearnerProgress.__dataclass_fields__ if name in state})


def write_group(session_id: str, trajectories: Sequence[Trajectory]) -> WaitingGroup:
    """A session's episodes for the learner; every number is read back as it was."""
    rows = [{name: getattr(t, name) for name in _FIELDS} for t in trajectories]
    return WaitingGroup(session_id, min(t.policy_version for t in trajectories), rows)


def read_group(group: WaitingGroup) -> list[Trajectory]:
    return [Trajectory(prompt="", response="", group_id=group.session_id, **row) for row in group.trajectories]
