"""The policy over prompting strategies and how it learns: softmax tables, a value baseline, replayed experiences.

    learner = StrategyLearner(store, config)          # continues from the store's state
    choice = learner.choose(first=True, key=7)
    update = learner.learn(result=1.3)                # one update after a session; None while there is too little data

The tables are the mock client's (`rlvr.clients.mock.mock_client`): one token is one strategy, and the four primitives
that train every policy of this project sample from them and train them. One table is for first prompts, one for later
ones. An update takes a replayed batch and makes one step on

    loss = policy_coefficient x mean w -clip(ratio) (G - V) log p(action)     truncated importance sampling (cispo)
         - entropy_coefficient x H(p)                                          exact: a sum over the table
         + value_coefficient x mean w (G - V)^2 / 2                            moves V only

G is the choice's gain (`compute_gains`), V(task) its baseline, ratio the probability now over the one at the draw, so
that old experiences remain useful; w undoes the prioritized replay. As in V-trace (https://arxiv.org/abs/1802.01561) a
large ratio is truncated, not dropped.

Several instances share one policy through the store: of two simultaneous updates the second is computed again on top of
the first. `python -m pytest tests/test_strategies.py` exercises it. Left out on purpose: choosing by the task's text,
which needs a model; a table per task, because few services see a task often enough.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from rlvr.clients.endpoint import EndpointSamplingClient
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core import rng
from rlvr.core.messages import AdamParams, Datum, ModelInput, SamplingParams
from rlvr.core.types import Task
from rlvr.service.learning.credit import Baseline, Plateau
from rlvr.service.learning.strategies import FIRST, NEXT, Strategy, StrategyChoice
from rlvr.service.service_options import TrainingConfig
from rlvr.store.records import Experience

# A learning rate of 0.001 suits networks, where many weights move a logit together. In a table a logit is one weight,
# and AdamW moves it by about the rate per step: one nat would take a thousand sessions. With this factor it takes about
# ten.
RATE = 100.0
# AdamW divides by the gradient's size, so noise would move a logit as fast as signal. Gradients far below EPS (a batch
# of 32 rewards that differ by chance has about 0.02) move it less.
EPS = 0.1
MAX_RATIO = 4.0  # larger ones are truncated
ENTROPY_FLOOR = 0.2  # as a share of a uniform policy's entropy: every strategy keeps being tried
STATE, FORMAT = "strategies", 1  # the name and format version of the state in the store
RACES = 20  # updates of other instances that may come first


@dataclass(frozen=True)
class StrategyUpdate:
    """One update. `advantages` (G - V) by experience; `entropy` in nats, the mean of both tables."""

    loss: float
    policy_loss: float
    value_loss: float
    entropy: float
    learning_rate: float
    updates: int
    truncated: float  # the share of the batch whose ratio was truncated
    advantages: dict[int, float] = field(repr=False, default_factory=dict[int, float])


class StrategyTable:
    """A softmax over strategies with its optimizer and its baseline."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.strategies = {s.name: s for s in strategies}
        names = list(self.strategies)
        # The end token is a strategy too, so an action is always exactly one token.
        self.policy = TablePolicy(names, spread=0.0, end=names[0], rate=RATE)
        self.client = MockTrainingClient(self.policy)
        self.baseline = Baseline()

    def choose(self, key: int) -> StrategyChoice:
        sampler = self.client.create_sampling_client()
        params = SamplingParams(max_tokens=1, seed=key, stop=[])
        (sample,) = sampler.sample(ModelInput([0]), 1, params).result().sequences
        assert sample.logprobs is not None
        return StrategyChoice(self.strategies[self.policy.tokenizer.decode(sample.tokens)], sample.logprobs[0])

    @property
    def probabilities(self) -> dict[str, float]:
        p = np.exp(self.policy.logprobs())
        return {name: float(p[self.policy.tokenizer.ids[name]]) for name in self.strategies}

    @property
    def entropy(self) -> float:
        return -math.fsum(p * math.log(p) for p in self.probabilities.values() if p > 0)

    def accumulate_policy_gradient(
        self, batch: Sequence[tuple[Experience, float]], advantages_N: np.ndarray, config: TrainingConfig
    ) -> tuple[float, int]:
        """Accumulate the gradient of the policy loss; return (its value, the number of truncated ratios).

        `batch` has each experience's weight in the loss, which is a mean over the experiences of both tables.
        """
        ids, now = self.policy.tokenizer.ids, self.policy.logprobs()
        rows: list[Datum] = []
        for (e, weight), advantage in zip(batch, advantages_N, strict=True):
            inputs = {"logprobs": [e.action_logprob], "advantages": [config.policy_coefficient * advantage * weight]}
            rows.append(Datum(ModelInput([0]), {"target_tokens": [ids[e.action]], **inputs}))
        bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": MAX_RATIO}
        loss = self.client.forward_backward(rows, "cispo", bounds).result().metrics["loss:sum"]
        ratios = [math.exp(now[ids[e.action]] - (e.action_logprob or 0.0)) for e, _ in batch]
        return loss, sum(ratio > MAX_RATIO for ratio in ratios)

    def accumulate_entropy_gradient(self, coefficient: float) -> float:
        """Accumulate the exact gradient of -coefficient x entropy; return the term's value.

        The gradient of sum p log p in log p(a), with the factor p held fixed, is that of a cross-entropy with weights
        -p log p.
        """
        p = self.probabilities
        ids = self.policy.tokenizer.ids
        rows = [
            Datum(ModelInput([0]), {"target_tokens": [ids[name]], "weights": [-coefficient * q * math.log(q)]})
            for name, q in p.items()
            if q > 0
        ]
        self.client.forward_backward(rows, "cross_entropy").result()
        return -coefficient * self.entropy

    def step(self, learning_rate: float) -> None:
        self.client.optim_step(AdamParams(learning_rate=learning_rate, beta2=0.99, eps=EPS)).result()
        self._raise_entropy()

    def _raise_entropy(self) -> None:
        """If the entropy is below the floor, shrink the logits towards their mean until it reaches the floor."""
        floor = ENTROPY_FLOOR * math.log(len(self.strategies))
        if self.entropy >= floor:
            return
        own = [self.policy.tokenizer.ids[name] for name in self.strategies]
        logits = self.policy.logits.copy()
        middle, low, high = logits[own].mean(), 0.0, 1.0
        for _ in range(50):
            scale = (low + high) / 2
            self.policy.logits = logits.copy()
            self.policy.logits[own] = middle + scale * (logits[own] - middle)
            low, high = (scale, high) if self.entropy >= floor else (low, scale)

    def state(self) -> dict[str, Any]:
        policy = self.policy
        optimizer = {"moments": policy.moments.tolist(), "steps": policy.adam_steps}
        weights = {"words": policy.tokenizer.words, "logits": policy.logits.tolist(), "version": policy.version}
        return {**weights, "adam": optimizer, "baseline": asdict(self.baseline)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. If its strategies are not exactly this program's, all of them start anew, for fairness."""
        policy = self.policy
        if state["words"] != policy.tokenizer.words:
            return
        policy.logits, policy.version = np.array(state["logits"], dtype=float), int(state["version"])
        policy.moments, policy.adam_steps = np.array(state["adam"]["moments"], dtype=float), int(state["adam"]["steps"])
        self.baseline = Baseline(**state["baseline"])


class StrategyPolicy:
    """Both tables, the schedule and the counters, without a store. `state` is all of it as JSON, exact to the bit.

    A state in another format (e.g. of a newer program) is not read.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.first, self.next = StrategyTable(FIRST), StrategyTable(NEXT)
        self.plateau, self.updates, self.loss = Plateau(), 0, None
        self.loss: float | None
        if state and state.get("format") == FORMAT:
            self.first.load(state["first"])
            self.next.load(state["next"])
            self.plateau, self.updates, self.loss = Plateau(**state["plateau"]), state["updates"], state["loss"]

    def state(self) -> dict[str, Any]:
        rest = {"format": FORMAT, "plateau": asdict(self.plateau), "updates": self.updates, "loss": self.loss}
        return {"first": self.first.state(), "next": self.next.state(), **rest}

    @property
    def entropy(self) -> float:
        return (self.first.entropy + self.next.entropy) / 2

    def choose(self, *, first: bool, key: int) -> StrategyChoice:
        return (self.first if first else self.next).choose(key)

    def update(
        self, replay: Sequence[tuple[Experience, float]], config: TrainingConfig, result: float | None = None
    ) -> StrategyUpdate | None:
        """Make one step on a replayed batch of (experience, its sampling probability relative to uniform); None if no
        experience is usable. `result` is the result of the session that just ended, for the schedule."""
        usable = [(e, p) for e, p in replay if e.gain is not None and e.action_logprob is not None and p > 0]
        usable = [(e, p) for e, p in usable if e.action in self.first.strategies or e.action in self.next.strategies]
        if not usable:
            return None
        if result is not None:
            self.plateau.observe(result)
        rate = config.learning_rate * self.plateau.scale
        # (1 / (N P))^beta of Schaul et al. (arXiv:1511.05952) at beta 1, normalized.
        weights = np.array([1 / p for _, p in usable])
        weights /= weights.sum()
        policy_loss = value_loss = bonus = truncated = 0.0
        advantages: dict[int, float] = {}
        for table in (self.first, self.next):
            batch = [(e, float(w)) for (e, _), w in zip(usable, weights, strict=True) if e.action in table.strategies]
            if not batch:
                continue
            weights_N = np.array([w for _, w in batch])
            gains_N = np.array([e.gain for e, _ in batch], dtype=float)
            table.baseline.begin(gains_N, weights_N)
            errors_N = gains_N - np.array([table.baseline(e.task_id) for e, _ in batch])
            advantages |= {e.id: float(a) for (e, _), a in zip(batch, errors_N, strict=True) if e.id is not None}
            loss, count = table.accumulate_policy_gradient(batch, errors_N, config)
            policy_loss, truncated = policy_loss + loss, truncated + count
            bonus += table.accumulate_entropy_gradient(config.entropy_coefficient * float(weights_N.sum()))
            value_loss += config.value_coefficient * float(weights_N @ errors_N**2) / 2
            table.step(rate)
            step = rate * RATE * config.value_coefficient
            table.baseline.learn([e.task_id for e, _ in batch], gains_N, weights_N, step)
        self.updates, self.loss = self.updates + 1, policy_loss + bonus + value_loss
        return StrategyUpdate(
            loss=self.loss,
            policy_loss=policy_loss,
            value_loss=value_loss,
            entropy=self.entropy,
            learning_rate=rate,
            updates=self.updates,
            truncated=truncated / len(usable),
            advantages=advantages,
        )


class ReplayStore(Protocol):
    """The part of `rlvr.store.ExperienceStore` that learning needs; tests have one in memory."""

    def buffer(self) -> Any: ...

    def sample(self, n: int, seed: int) -> list[tuple[Experience, float]]: ...

    def set_learned(self, advantages: Mapping[int, float]) -> None: ...

    def state(self, name: str) -> tuple[dict[str, Any], int] | None: ...

    def save_state(self, name: str, value: dict[str, Any], version: int) -> bool: ...


class StrategyLearner:
    """The policy in the store, shared by all sessions of this instance and usable from any thread."""

    def __init__(self, store: ReplayStore, config: TrainingConfig) -> None:
        self._store, self._config, self._lock = store, config, threading.Lock()
        self.policy, self._version = StrategyPolicy(), 0
        self.refresh()

    def refresh(self) -> None:
        """Load the updates of other instances."""
        value, version = self._store.state(STATE) or (None, 0)
        if version > self._version:  # not if another thread learned meanwhile
            self.policy, self._version = StrategyPolicy(value), version

    def choose(self, *, first: bool, key: int) -> StrategyChoice:
        return self.policy.choose(first=first, key=key)

    def learn(self, result: float | None = None) -> StrategyUpdate | None:
        """Make and save one update; None while the buffer has too few experiences. An unsaved update is dropped."""
        config, store = self._config, self._store
        with self._lock:
            if store.buffer().ready < config.min_experiences_for_training:
                return None
            for _ in range(RACES):
                value, version = store.state(STATE) or (None, 0)
                policy = StrategyPolicy(value)
                replay = store.sample(config.batch_size, rng.key("strategies", policy.updates))
                step = policy.update(replay, config, result)
                if step is None:
                    return None
                if store.save_state(STATE, policy.state(), version):
                    self.policy, self._version = policy, version + 1
                    store.set_learned(step.advantages)
                    return step
        raise RuntimeError(f"other instances updated the strategies {RACES} times during one update of this instance")

    def learning(self) -> dict[str, Any]:
        """The numbers for /stats and a session's metrics. The loss is None before the first update."""
        policy = self.policy
        return {
            "policy_entropy": policy.entropy,
            "training_loss": policy.loss,
            "updates": policy.updates,
            "learning_rate": self._config.learning_rate * policy.plateau.scale,
            "strategies": {"first": policy.first.probabilities, "next": policy.next.probabilities},
        }


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
