"""A policy that several replicas of the service train together: one of them learns, all sample and write groups.

    learner = SharedLearner(store, "tinker:Qwen/Qwen3-8B", "replica-a", server, options)
    learner.restore(say)              # waits until weights are published: by this replica, if it gets the lease
    learner.sampler                   # samples from the newest published weights
    learner.learn(trajectories)       # written to the database, for the replica that learns

Every replica has two threads beside the one that samples. One renews the lease, or takes it when it has ended: the
replica that held it was killed, stopped, or lost the database. The other makes the steps while this replica has the
lease (`LeasedLearner`). A step that fails gives the lease back, and the next holder begins from what was published
last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from rlvr.core.error_text import first_line
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.core.types import Trajectory, group_by
from rlvr.service.learning.leased_learner import MOST, LeasedLearner, LeaseLost, read_progress, write_group
from rlvr.service.learning.session_learner import LearnerOptions, LearnerProgress, describe_progress
from rlvr.store import ExperienceStore, StoreDown
from rlvr.store.shared_states import SharedPolicy, WaitingGroup

LEASE_S = 15.0  # after so long without a renewal another replica learns
BEAT_S = 3.0  # between two renewals, or two looks at the lease of another replica
POLL_S = 0.5  # between two looks at the groups that wait
RETRY_S = 20.0  # before a replica whose step failed takes the lease again: longer than others need to take it


class PolicyServer(Protocol):
    """Where the weights are: a server that all replicas reach."""

    def open_trainer(self, path: str | None) -> TrainingClient:
        """A client that trains the weights and the optimizer saved at `path`; None: the original model."""
        ...

    def describe(self, trainer: TrainingClient) -> dict[str, Any]:
        """What is published with the weights: `base_model`, and what `check` compares."""
        ...

    def retire(self, paths: Sequence[str]) -> None:
        """Let weights go that newer ones have replaced, after a while: replicas may be sampling from them."""
        ...

    def check(self, state: dict[str, Any]) -> None:
        """ValueError if the published weights are not of the model that this replica is configured for."""
        ...

    def open_sampler(self, path: str) -> SamplingClient: ...

    def close(self) -> None:
        """End the session of the samplers. The next one begins another session."""
        ...


class SharedLearner:
    """A replica's part of a shared policy. `sampler` and `learn` are called by the thread that samples."""

    def __init__(
        self,
        store: ExperienceStore,
        name: str,
        instance: str,
        server: PolicyServer,
        options: LearnerOptions,
        *,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._store, self._name, self._instance, self._server = store, name, instance, server
        self.options, self._warn = options, warn
        self.version = 0
        self._policy: SharedPolicy | None = None
        self._waiting = 0
        self._sampler: tuple[str, SamplingClient] | None = None
        self._unwritten: list[WaitingGroup] = []
        self._writing = threading.Lock()
        self._token, self._failure, self._retry_at = 0, "", 0.0
        self._leads_until = 0.0  # by this process's clock: without a renewal until then another replica may learn
        self._lease_failure = ""
        self._lease = threading.Lock()  # held while the token changes
        self._closing, self._ended = threading.Event(), threading.Event()
        self._learner_thread = threading.Thread(target=self._lead, name="learner", daemon=True)
        self._lease_thread = threading.Thread(target=self._keep_lease, name="lease", daemon=True)

    # Called by the thread that samples

    def restore(self, say: Callable[[str], None]) -> None:
        """Wait for published weights. ValueError if this replica cannot take part; what `say` raises ends it."""
        try:
            self._refuse_other_policies()
            self._lease_thread.start()
            self._learner_thread.start()
            while not self._read_state():
                self._refuse_other_policies()
                if self._failure:
                    raise ValueError(self._failure)
                say(f"waiting for the first weights of {self._name}, which {self.holder or 'a replica'} makes")
                time.sleep(POLL_S)
            self._server.check(self._state)
            _ = self.sampler
        except BaseException:
            self.close()
            raise

    @property
    def sampler(self) -> SamplingClient:
        """Samples from the weights published last, as far as the database can be read."""
        with suppress(StoreDown):
            self.refresh()
        state = self._state
        path = str(state["sampler"])
        if self._sampler is None or self._sampler[0] != path:
            self._sampler = path, self._server.open_sampler(path)
            self.version = read_progress(state).steps
        return self._sampler[1]

    def forget_sampler(self) -> None:
        """Begin another session at the server for the next batch: it may have lost this one."""
        self._sampler = None
        self._close_server()

    def learn(self, trajectories: Sequence[Trajectory]) -> None:
        """Write groups for the replica that learns; while the database is away they wait here."""
        groups = group_by(trajectories, lambda t: t.group_id)
        try:
            self._write_groups([write_group(session_id, group) for session_id, group in groups.items()])
        except Exception as error:  # the answers are good, and the thread of the lease tries it again
            self._warn(f"{len(self._unwritten)} sessions wait for the database, to be learned from ({_explain(error)})")

    def close(self) -> None:
        """Let a step that is being made end, and leave the lease to another replica."""
        self._closing.set()
        if self._learner_thread.is_alive():
            self._learner_thread.join()
        self._ended.set()
        if self._lease_thread.is_alive():
            self._lease_thread.join()
        try:
            self._write_groups()
        except Exception as error:
            self._warn(f"{len(self._unwritten)} sessions are not learned from ({_explain(error)})")
        self._leave(self._token)
        self._close_server()

    def _close_server(self) -> None:
        with suppress(RuntimeError, ValueError):  # it is away: the session ends without heartbeats
            self._server.close()

    def _write_groups(self, new: Sequence[WaitingGroup] = ()) -> None:
        with self._writing:
            self._unwritten += new
            if self._unwritten:
                self._store.add_groups(self._name, self._unwritten)
                self._unwritten = []

    # Read by any thread

    def refresh(self) -> None:
        """Read what was published last, and how many sessions wait."""
        self._policy, self._waiting = self._store.policy(self._name), self._store.count_waiting(self._name)

    @property
    def progress(self) -> LearnerProgress:
        return read_progress(self._state)

    @property
    def holder(self) -> str:
        """The replica that learns; '' if none does at the moment."""
        return self._policy.holder if self._policy else ""

    @property
    def detail(self) -> str:
        learns = f"{self.holder or 'no replica'} learns"
        failed = f"; a step here failed: {self._failure}" if self._failure else ""
        return f"samples from step {self.version} of {self.progress.steps}; {learns}{failed}"

    def describe(self) -> dict[str, Any]:
        """The numbers for /stats and the metrics."""
        return {
            **describe_progress(self.progress, self._state.get("learning_rate")),
            "sampled_step": self.version,
            "is_learner": int(self._token > 0 and time.monotonic() < self._leads_until),
            "sessions_waiting": self._waiting,
            "sessions_dropped": self._state.get("dropped", 0),
            "learner": self.holder,
        }

    @property
    def model(self) -> str:
        """The base model's name."""
        return str(self._state["base_model"])

    @property
    def _state(self) -> dict[str, Any]:
        return (self._policy.state if self._policy else None) or {}

    def _read_state(self) -> bool:
        """Whether weights are published."""
        with suppress(StoreDown):
            self.refresh()
        return bool(self._state)

    def _refuse_other_policies(self) -> None:
        with suppress(StoreDown):
            for name, holder in self._store.led_policies().items():
                if name != self._name:
                    raise ValueError(
                        f"RLVR_MODEL={self._name}: {holder} trains {name} in this database; give every replica the "
                        "same RLVR_MODEL, stop the others first, or give this one another DATABASE_URL"
                    )

    # The thread of the lease

    def _keep_lease(self) -> None:
        """Renew the lease until the last step has ended; take it only before the end."""
        while True:
            try:
                self._renew_lease()
                self._write_groups()
                self.refresh()
                self._lease_failure = ""
            except StoreDown:  # nothing can be published meanwhile, and nothing is lost
                pass
            except Exception as error:  # e.g. of the database's rights: without this thread nothing is learned any more
                if self._lease_failure != (reason := _explain(error)):
                    self._warn(f"the lease of {self._name} could not be renewed ({reason}); it is tried again")
                self._lease_failure = reason
            if self._ended.wait(BEAT_S):
                return

    def _renew_lease(self) -> None:
        with self._lease:
            if self._token or not (self._closing.is_set() or time.monotonic() < self._retry_at):
                began = time.monotonic()
                self._token = self._store.lead_policy(self._name, self._instance, self._token, LEASE_S)
                self._leads_until = began + LEASE_S

    def _leave(self, token: int) -> None:
        with suppress(Exception), self._lease:  # it ends by itself
            if token and self._token == token:
                self._token = 0
                self._store.leave_policy(self._name, token)

    # The thread of the learner

    def _lead(self) -> None:
        while not self._closing.wait(POLL_S):
            if token := self._token:
                try:
                    self._learn_while_leading(token)
                except LeaseLost as error:
                    self._warn(f"a step was dropped: {error}")
                    self._leave(token)
                except Exception as error:  # of the server or the database
                    self._failure = _explain(error)
                    self._warn(f"this instance leaves the learning to others: {self._failure}")
                    self._retry_at = time.monotonic() + RETRY_S
                    self._leave(token)

    def _learn_while_leading(self, token: int) -> None:
        policy = self._store.policy(self._name)
        state = policy.state if policy else None
        client = self._server.open_trainer(state["path"] if state else None)
        try:
            learner = LeasedLearner(
                client,
                self._store,
                self._name,
                token,
                self.options,
                model=self._server.describe(client),
                retire=self._server.retire,
                warn=self._warn,
            )
            learner.restore(state)
            self._failure = ""
            while self._token == token and not self._closing.is_set():
                if not learner.take(self._store.waiting_groups(self._name, MOST, learner.taken)):
                    self._closing.wait(POLL_S)
        finally:
            with suppress(RuntimeError, ValueError):
                client.close()


def _explain(error: Exception) -> str:
    """Without the database's address: clients read it in /health."""
    if isinstance(error, StoreDown):
        return f"the database is {error.reason}"
    return first_line(error)
