"""The learner of a policy that replicas share: it takes the groups that all of them wrote, and publishes each step.

    learner = LeasedLearner(client, store, name, token, options)
    learner.restore(state)                             # what was published last, None: nothing yet
    learner.take(store.waiting_groups(name, MOST, learner.taken))

The weights are saved first. Then one transaction of the database names them and marks the groups that they have learned
from, if the lease is still this replica's (`rlvr.store.shared_states`). So a group is learned from once: a learner
that is killed, or replaced while it computes, has published nothing, and its groups still wait. Groups that no step can
learn from (equal rewards, a refused step, older than `MAX_LAG` steps) are marked too. A step that fails is made again
in halves, so one bad group does not keep the others, and all replicas, from learning.

Groups that older weights sampled are learned from with the importance ratio of the loss, whose clip bounds their
effect. A learner that is slower than the replicas takes the newest groups, and lets the others become too old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlvr.core.messages import NonFiniteError
from rlvr.core.protocols import TrainingClient
from rlvr.core.types import Trajectory, group_by
from rlvr.service.learning.credit import Plateau
from rlvr.service.learning.session_learner import GroupLearner, LearnerOptions, LearnerProgress, LearningStep
from rlvr.store import ExperienceStore
from rlvr.store.shared_states import NOT_LEARNED, WaitingGroup

MAX_LAG = 8  # steps between the weights that sampled a group and those that learn from it
MOST = 64  # groups of one step
FAILURES = 12  # of a step and its halves, before one works: then the fault is the server's
# What a step reads of a trajectory. Texts stay where they are: with the session's answers.
_FIELDS = ("prompt_tokens", "response_tokens", "logprobs", "action_mask", "reward", "rollout_id", "policy_version")


class LeaseLost(Exception):
    """Another replica learns now: what this one computed since its last publication is dropped."""


class _StepFailure(Exception):
    """Of data or of the server; the published weights are loaded again."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{cause}")
        self.cause = cause


class LeasedLearner(GroupLearner):
    """Publishes while the lease of `token` is this replica's; LeaseLost from any call once it is not."""

    refusals = (Exception,)

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
        self._put_off: set[str] = set()  # those of the steps that follow it
        self._sampler_path, self._dropped, self._replaced = "", 0, list[str]()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from what was published last, which the client has loaded. Without it publish the client's weights,
        so that replicas can sample."""
        if state is None:
            self._save()
            return
        self.progress, self._dropped = read_progress(state), int(state["dropped"])
        self.plateau, self._sampler_path = Plateau(**self.progress.plateau), str(state["sampler"])
        self._retire(state.get("replaced", []))  # the last learner may have been killed before it did

    def take(self, groups: Sequence[WaitingGroup]) -> LearningStep | None:
        """Gather groups; make and publish a step if there are enough."""
        fresh = [group for group in groups if self.progress.steps - group.version <= MAX_LAG]
        self._dropped += len(groups) - len(fresh)
        self.taken |= {group.session_id for group in groups}
        step = self.learn([t for group in fresh for t in self._read(group)])
        if self.taken - {t.group_id for t in self._gathered}:
            self._write_progress()
        return step

    def _read(self, group: WaitingGroup) -> list[Trajectory]:
        try:
            return read_group(group)
        except (TypeError, ValueError) as error:  # another version of rlvr wrote it
            self.progress.refused += 1
            self.warn(f"the group of session {group.session_id} cannot be read ({error}); it is not learned from")
            return []

    def _step(self, batch: list[Trajectory]) -> LearningStep | None:
        """Make a step, or several if one fails: each failed one again in halves. A group whose step fails alone is
        refused if the server refuses its data, or could make a step of another one."""
        step, failures, refused = None, list[Exception](), list[str]()
        parts = [list(group_by(batch, lambda t: t.group_id).values())]
        while parts:
            part = parts.pop()
            self._learning = {t.group_id for group in part for t in group}
            self._put_off = {t.group_id for later in parts for group in later for t in group}.union(refused)
            try:
                step = super()._step([t for group in part for t in group]) or step
            except _StepFailure as failed:
                failures.append(failed.cause)
                if len(part) == 1:
                    refused += self._learning
                else:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            finally:
                self._learning, self._put_off = set(), set()
            if step is None and (len(failures) == FAILURES or (refused and not parts)):
                raise failures[-1]
        if refused:
            self.progress.refused += len(refused)
            self.warn(f"{len(refused)} sessions are not learned from: steps of other sessions work, and theirs fail")
            self._write_progress()
        return step

    def _refuse(self, error: Exception) -> None:
        """Refuse what another try would refuse again; let `_step` try the others."""
        if isinstance(error, NonFiniteError) or (isinstance(error, ValueError) and len(self._learning) == 1):
            super()._refuse(error)
            return
        self._load_saved()
        raise _StepFailure(error)

    def _save(self) -> None:
        self._replaced = [path for path in (self.progress.path, self._sampler_path) if path]
        number = f"{self.progress.steps:08d}"
        path = self.client.save_state(f"step-{number}").result().path
        self._sampler_path = self.client.save_weights_for_sampler(f"sampler-{number}").result().path
        self.progress = replace(self.progress, path=path, before=self.progress.path)
        too_old = {*self._store.waiting_below(self._name, self.progress.steps - MAX_LAG)} - self.taken
        self._dropped += len(too_old)
        self.taken |= too_old
        try:
            self._publish(self.progress.steps)
        except LeaseLost:
            self._retire([path, self._sampler_path])
            raise
        self._retire(self._replaced)

    def _write_progress(self) -> None:
        self._publish(NOT_LEARNED)

    def _publish(self, step: int) -> None:
        """Publish the state; mark the groups of the current step as learned in `step`, and other settled ones as
        learned in none."""
        self.progress.plateau = asdict(self.plateau)
        gathered = {t.group_id for t in self._gathered} | self._put_off
        steps = {id: step if id in self._learning else NOT_LEARNED for id in self.taken - gathered}
        state = {
            **self._model,
            **asdict(self.progress),
            "sampler": self._sampler_path,
            "replaced": self._replaced,
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
