"""The policy over prompting strategies, by evidence: how probable it is that some are better than the others.

    learner = StrategyLearner(store, config)          # continues from the store's state
    choice = learner.choose(first=True, key=7)
    update = learner.learn(answers)                   # counts a session's answers, which have gains and ids

One table is for first prompts, one for later ones. A table compares hypotheses by their Bayes factors. One says that
all strategies are equally good. Each of the others says that the strategies of a set S have gains higher by some
difference than those outside S, which is the two-sample problem with a half-normal prior on the difference
(`_compute_posterior`; the mean of all gains is unknown):

    z = (mean of S - mean of the rest) sqrt(I) / sigma,   I = n_S n_rest / n,   w = I TAU^2 / (1 + I TAU^2)
    BF(S) = 2 (1 + I TAU^2)^(-1/2) exp(w z^2 / 2) Phi(z sqrt(w))

    p(action) = P(equal) / K + sum over S that hold it of P(S) / |S|      then mixed with the uniform distribution

A gain (`compute_gains`) is counted as its advantage G - V(task), so a strategy that was drawn for easy tasks gains
nothing by it. V follows what an average strategy would gain, not what the current ones do, so that old and new
advantages can be compared. If the strategies do not differ, a Bayes factor is a martingale with mean 1 (random draws,
whatever their probabilities), and with more answers it falls towards 0: noise moves the policy less the longer it
lasts. A difference makes it grow exponentially. Counts fade, so that a policy can follow a changed endpoint.

Several instances share one policy through the store: of two simultaneous updates the second is computed again on top of
the first. Left out on purpose: choosing by the task's text, which needs a model; a table per task, because few services
see a task often enough; steps of the weights for a rating, since they learn on policy when a session ends.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from rlvr.clients.endpoint import EndpointSamplingClient
from rlvr.core import rng
from rlvr.core.types import Task
from rlvr.service.learning.credit import Baseline, recompute_gains
from rlvr.service.learning.strategies import FIRST, NEXT, Strategy, StrategyChoice
from rlvr.service.service_options import TrainingConfig
from rlvr.store import ExperienceStore
from rlvr.store.records import Experience

TAU = 0.5  # the scale of a difference in standard deviations of a gain: 20 points of a pass rate are 0.4
ODDS = 0.15  # a priori, of one given strategy being better than the others to all being equally good
EXPLORATION = 0.08  # the share of uniform draws: every strategy keeps being tried
FADE = 1 - 1 / 5_000  # of the counts with each answer, so that a policy follows an endpoint that changes
SAME = 1e-12  # a variance of gains that is none
BASELINE_RATE = 0.1  # times `value_coefficient`: the step of a baseline towards a gain
STATE, FORMAT = "strategy_evidence", 1  # the name and format version of the state in the store
RACES = 20  # updates of other instances that may come first
MOST_ANSWERS = 5_000  # experiences of one session that are read when an answer is rated


@dataclass(frozen=True)
class StrategyUpdate:
    """One update. `advantages` (G - V) by experience; `loss` is the mean squared error of the gains that V and the
    strategies' effects predicted; `entropy` in nats, the mean of both tables."""

    loss: float
    entropy: float
    updates: int
    advantages: dict[int, float] = field(repr=False, default_factory=dict[int, float])


class StrategyTable:
    """What is known of some strategies: the number of answers of each and their sum of advantages, and the sum of
    squares of all. `probabilities` and `effects`, the expected difference of a strategy's gain from that of an average
    strategy, follow from them."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.strategies = {s.name: s for s in strategies}
        self._index = {name: k for k, name in enumerate(self.strategies)}
        K = len(strategies)
        self.counts_K, self.sums_K, self.squares = np.zeros(K), np.zeros(K), 0.0
        self.baseline = Baseline()
        sets = [members for size in range(1, K) for members in itertools.combinations(range(K), size)]
        self._sets_SK = np.array([[k in members for k in range(K)] for members in sets], dtype=float)
        self._sizes_S = self._sets_SK.sum(1)
        # A size of a set is the less probable the larger it is; relative to the hypothesis of equal strategies.
        self._log_prior_S = np.log([ODDS * K / len(members) / math.comb(K, len(members)) for members in sets])
        self._compute_posterior()

    def choose(self, probabilities: Mapping[str, float], key: int) -> StrategyChoice:
        """Draw a strategy with `key`."""
        names, ends_K = list(probabilities), np.cumsum(list(probabilities.values()))
        name = names[int(np.searchsorted(ends_K[:-1], rng.uniform(key, 0) * ends_K[-1], side="right"))]
        return StrategyChoice(self.strategies[name], math.log(probabilities[name]))

    @property
    def uniform(self) -> dict[str, float]:
        return dict.fromkeys(self.strategies, 1 / len(self.strategies))

    def count(self, answers: Sequence[Experience], step: float) -> tuple[dict[int, float], list[float]]:
        """Count answers that have gains, and move the baselines by `step`. Returns the advantages by id, and the errors
        of the predicted gains."""
        advantages: dict[int, float] = {}
        errors: list[float] = []
        for e in answers:
            assert e.gain is not None
            k, value = self._index[e.action], self.baseline(e.task_id, first=e.gain)
            advantage = e.gain - value
            error = advantage - self.effects[e.action]
            self.counts_K, self.sums_K, self.squares = self.counts_K * FADE, self.sums_K * FADE, self.squares * FADE
            self.counts_K[k] += 1
            self._add(k, 0.0, advantage)
            self.baseline.learn(e.task_id, value + error, step)
            errors.append(error)
            if e.id is not None:
                advantages[e.id] = advantage
        if answers:
            self._compute_posterior()
        return advantages, errors

    def revise(self, action: str, before: float, after: float) -> None:
        """Replace the advantage of a counted answer."""
        self._add(self._index[action], before, after)
        self._compute_posterior()

    def _add(self, k: int, before: float, after: float) -> None:
        self.sums_K[k] += after - before
        self.squares += after**2 - before**2

    def _compute_posterior(self) -> None:
        sets_SK, K, n, total = self._sets_SK, len(self.strategies), self.counts_K.sum(), self.sums_K.sum()
        own_S, rest_S, sum_S = sets_SK @ self.counts_K, (1 - sets_SK) @ self.counts_K, sets_SK @ self.sums_K
        variance = self.squares / n - (total / n) ** 2 if n else 0.0
        has_both_S = (own_S > 0) & (rest_S > 0) & (variance > SAME)
        own_S, rest_S = np.where(has_both_S, own_S, 1.0), np.where(has_both_S, rest_S, 1.0)
        information_S = np.where(has_both_S, own_S * rest_S / (own_S + rest_S), 0.0)
        difference_S = np.where(has_both_S, sum_S / own_S - (total - sum_S) / rest_S, 0.0)
        w_S = information_S * TAU**2 / (1 + information_S * TAU**2)
        x_S = difference_S * np.sqrt(information_S * w_S / max(variance, SAME))
        x_S = np.maximum(x_S, -30.0)  # below, Phi leaves a float; the factor is 0.03 there, and falls slowly
        log_phi_S = np.array([math.log(math.erfc(-x / math.sqrt(2))) for x in x_S])  # of 2 Phi(x)
        log_S = self._log_prior_S + x_S**2 / 2 + log_phi_S - np.log1p(information_S * TAU**2) / 2
        top = max(float(log_S.max()), 0.0)
        weights_S = np.exp(log_S - top)
        posterior_S = weights_S / (weights_S.sum() + math.exp(-top))
        p_K = posterior_S / self._sizes_S @ sets_SK + (1 - posterior_S.sum()) / K
        p_K = (1 - EXPLORATION) * p_K + EXPLORATION / K
        effects_K = posterior_S * w_S * np.maximum(difference_S, 0.0) @ (sets_SK - self._sizes_S[:, None] / K)
        self.probabilities = dict(zip(self.strategies, p_K.tolist(), strict=True))
        self.effects = dict(zip(self.strategies, effects_K.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        numbers = {"counts": self.counts_K.tolist(), "sums": self.sums_K.tolist(), "squares": self.squares}
        return {"strategies": list(self.strategies), **numbers, "baseline": asdict(self.baseline)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.counts_K, self.sums_K = np.array(state["counts"], dtype=float), np.array(state["sums"], dtype=float)
        self.squares, self.baseline = state["squares"], Baseline(**state["baseline"])
        self._compute_posterior()


class StrategyPolicy:
    """Both tables and the counters, without a store. `state` is all of it as JSON, exact to the bit.

    `is_new`: there was no state, or one in another format or of other strategies, which is not read. The draws are
    uniform until `least` answers are counted.
    """

    def __init__(self, state: Mapping[str, Any] | None = None, least: int = 0) -> None:
        self.first, self.next = StrategyTable(FIRST), StrategyTable(NEXT)
        self.updates, self.answers, self.loss, self._least = 0, 0, None, least
        self.loss: float | None
        self.is_new = not (
            state
            and state.get("format") == FORMAT
            and all(state[name]["strategies"] == list(table.strategies) for name, table in self._tables.items())
        )
        if state and not self.is_new:
            for name, table in self._tables.items():
                table.load(state[name])
            self.updates, self.answers, self.loss = state["updates"], state["answers"], state["loss"]

    @property
    def _tables(self) -> dict[str, StrategyTable]:
        return {"first": self.first, "next": self.next}

    def state(self) -> dict[str, Any]:
        tables = {name: table.state() for name, table in self._tables.items()}
        return {"format": FORMAT, "updates": self.updates, "answers": self.answers, "loss": self.loss, **tables}

    @property
    def has_learned(self) -> bool:
        return self.answers > 0 and self.answers >= self._least

    @property
    def probabilities(self) -> dict[str, dict[str, float]]:
        """By table, those of its strategies."""
        return {name: t.probabilities if self.has_learned else t.uniform for name, t in self._tables.items()}

    @property
    def entropy(self) -> float:
        """In nats, the mean of both tables."""
        return -math.fsum(p * math.log(p) for table in self.probabilities.values() for p in table.values()) / 2

    def choose(self, *, first: bool, key: int) -> StrategyChoice:
        name = "first" if first else "next"
        return self._tables[name].choose(self.probabilities[name], key)

    def update(self, answers: Sequence[Experience], config: TrainingConfig) -> StrategyUpdate | None:
        """Learn from answers with a gain and a known strategy; returns the update, None if there is no such answer."""
        advantages: dict[int, float] = {}
        errors: list[float] = []
        for table in (self.first, self.next):
            own = [e for e in answers if e.gain is not None and e.action in table.strategies]
            known, missed = table.count(own, BASELINE_RATE * config.value_coefficient)
            advantages, errors = advantages | known, errors + missed
        if not errors:
            return None
        self.updates, self.answers = self.updates + 1, self.answers + len(errors)
        self.loss = math.fsum(error**2 for error in errors) / len(errors)
        return StrategyUpdate(self.loss, self.entropy, self.updates, advantages)

    def revise(self, e: Experience, gain: float) -> float:
        """Give a counted answer another gain; returns its advantage then."""
        assert e.advantage is not None and e.gain is not None
        advantage = e.advantage + gain - e.gain
        for table in (self.first, self.next):
            if e.action in table.strategies:
                table.revise(e.action, e.advantage, advantage)
        return advantage


class EvidenceStore(Protocol):
    """The part of `rlvr.store.ExperienceStore` that learning needs; tests have one in memory."""

    def read_buffer(self) -> list[Experience]: ...

    def set_advantages(self, values: Mapping[int, float]) -> None: ...

    def state(self, name: str) -> tuple[dict[str, Any], int] | None: ...

    def save_state(self, name: str, value: dict[str, Any], version: int) -> bool: ...


class StrategyLearner:
    """The policy in the store, shared by all sessions of this instance and usable from any thread."""

    def __init__(self, store: EvidenceStore, config: TrainingConfig) -> None:
        self._store, self._config, self._lock = store, config, threading.Lock()
        self._version = 0
        self.policy = self._build_policy(None)
        self.refresh()

    def refresh(self) -> None:
        """Load the updates of other instances."""
        value, version = self._store.state(STATE) or (None, 0)
        if version > self._version:  # not if another thread learned meanwhile
            self.policy, self._version = self._build_policy(value), version

    def _build_policy(self, value: Mapping[str, Any] | None) -> StrategyPolicy:
        return StrategyPolicy(value, self._config.min_experiences_for_training)

    def choose(self, *, first: bool, key: int) -> StrategyChoice:
        return self.policy.choose(first=first, key=key)

    def learn(self, answers: Sequence[Experience]) -> StrategyUpdate | None:
        """Count the answers of a session, whose gains are stored, and save the policy. The first update of a store, or
        one after a state that this program does not read, counts the answers of the buffer, these among them."""
        with self._lock:
            for _ in range(RACES):
                value, version = self._store.state(STATE) or (None, 0)
                policy = self._build_policy(value)
                update = policy.update(self._store.read_buffer() if policy.is_new else answers, self._config)
                if update is None:
                    return None
                if self._store.save_state(STATE, policy.state(), version):
                    self.policy, self._version = policy, version + 1
                    self._store.set_advantages(update.advantages)
                    return update
        raise RuntimeError(f"other instances updated the strategies {RACES} times during one update of this instance")

    def learning(self) -> dict[str, Any]:
        """The numbers for /stats and a session's metrics. The loss is None until the policy follows its counts."""
        policy = self.policy
        return {
            "policy_entropy": policy.entropy,
            "training_loss": policy.loss if policy.has_learned else None,
            "updates": policy.updates if policy.has_learned else 0,
            "learning_rate": None,
            "strategies": policy.probabilities,
        }


def revise_advantages(store: EvidenceStore, answers: Sequence[Experience], gains: Mapping[int, float]) -> None:
    """Bring the counts up to date with gains that a rating changed, by id. An answer that is not counted is skipped."""
    for _ in range(RACES):
        value, version = store.state(STATE) or (None, 0)
        policy = StrategyPolicy(value)
        counted = [e for e in answers if e.id in gains and e.advantage is not None and e.gain is not None]
        if policy.is_new or not counted:
            return
        advantages = {e.id: policy.revise(e, gains[e.id]) for e in counted if e.id is not None}
        if store.save_state(STATE, policy.state(), version):
            return store.set_advantages(advantages)
    raise RuntimeError(
        f"the rating is stored, but the strategies did not learn from it: other instances updated the strategies "
        f"{RACES} times meanwhile"
    )


class StrategyPrompter:
    """Writes the prompts of one episode; `choices[i]` made iteration i + 1. The random draws depend on `seed` and the
    iteration only. `sampler` gets each strategy's temperature."""

    def __init__(self, policy: StrategyPolicy | StrategyLearner, sampler: EndpointSamplingClient, seed: int) -> None:
        self._policy, self._sampler, self._seed = policy, sampler, seed
        self.choices: list[StrategyChoice] = []

    def compose(self, task: Task, answers: Sequence[str], feedback: str) -> str | list[dict[str, str]]:
        """`rlvr.envs.refine.Compose`: draw a strategy and write the next prompt."""
        key = rng.key("strategy", self._seed, len(answers))
        choice = self._policy.choose(first=not answers, key=key)
        self.choices.append(choice)
        self._sampler.temperature = choice.strategy.temperature
        return choice.strategy.prompt(task, answers, feedback)


def rate(store: ExperienceStore, id: int, owner: str, rating: float, comment: str = "") -> Experience | None:
    """Store a rating and return the rated experience, None for an unknown id. Blocks.

    If the answer has a gain, its gain and its neighbours' are recomputed. During a session gains are not known yet, and
    a rating changes the reward only.
    """
    experience = store.rate(id, owner, rating, comment)
    if experience is not None and experience.gain is not None:
        rows = store.experiences(session_id=experience.session_id, limit=MOST_ANSWERS, tokens=False)
        gains = recompute_gains(rows)
        store.set_gains(gains)
        revise_advantages(store, rows, gains)
    return experience
