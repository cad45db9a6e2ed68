"""The policy over strategies, and how it learns: softmax tables, a value baseline, replayed experiences.

    learner = StrategyLearner(store, config)          # goes on from what the store has
    choice = learner.choose(first=True, key=7)
    learned = learner.learn(result=1.3)               # after a session: one update, or None while there is too little

The tables are the mock client's (`rlvr.clients.mock`): one token is one strategy, and sampling, losses and AdamW are
the four primitives that every other policy here is trained by. One table is for first prompts, one for later ones.

An update takes a replayed batch and makes one step on

    loss = policy_coefficient x mean w -clip(ratio) (G - V) log p(action)     truncated importance sampling (cispo)
         - entropy_coefficient x H(p)                                          exact: a table is summed over easily
         + value_coefficient x mean w (G - V)^2 / 2                            moves V alone

G is what came of the choice (`gains`), V(task) its baseline, ratio the probability now over the one it was drawn with,
so that old experiences still teach, w the weight that undoes prioritised replay. As in V-trace
(https://arxiv.org/abs/1802.01561) a large ratio is cut, not dropped.

Several instances share one policy through the store: of two updates at once the second is computed again on top of the
first. `python -m pytest tests/test_strategies.py` exercises it. Left out on purpose: choosing by the task's text, which
would need a model; a table per task, for which few services see a task often enough.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from rlvr import draws
from rlvr.clients.mock import MockTrainingClient, TablePolicy
from rlvr.messages import AdamParams, Datum, ModelInput, SamplingParams
from rlvr.service.loop.credit import Baseline, Plateau
from rlvr.service.loop.strategies import FIRST, NEXT, Choice, Strategy
from rlvr.service.options import TrainingConfig
from rlvr.store.records import Experience

# A learning rate of 0.001 is meant for networks, where many weights move a logit together. In a table a logit is one
# weight and AdamW moves it by about one rate a step: a nat would take a thousand sessions. This makes it ten and more.
RATE = 100.0
# AdamW divides by the gradient's own size, which lets noise walk as fast as knowledge. What is far below this (a batch
# of 32 rewards that differ by chance has gradients of about 0.02) moves a logit less.
EPS = 0.1
CUT = 4.0  # the largest ratio that counts
ENTROPY_FLOOR = 0.2  # of a uniform policy's entropy: nothing is ever given up for good
STATE, FORMAT = "strategies", 1  # its name in the store, and how it is written
RACES = 20  # updates that other instances may make before ours


@dataclass(frozen=True)
class Learned:
    """One update. `advantages` (G - V) by experience; `entropy` in nats, the mean of both tables."""

    loss: float
    policy_loss: float
    value_loss: float
    entropy: float
    learning_rate: float
    updates: int
    cut: float  # the share of the batch whose ratio was cut
    advantages: dict[int, float] = field(repr=False, default_factory=dict[int, float])


class Table:
    """A softmax over strategies with its optimizer and its baseline."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.strategies = {s.name: s for s in strategies}
        names = list(self.strategies)
        # The end token is a strategy too: an action is always one token, and nothing else can be said.
        self.policy = TablePolicy(names, spread=0.0, end=names[0], rate=RATE)
        self.client = MockTrainingClient(self.policy)
        self.baseline = Baseline()

    def choose(self, key: int) -> Choice:
        sampler = self.client.create_sampling_client()
        asked = SamplingParams(max_tokens=1, seed=key, stop=[])
        (drawn,) = sampler.sample(ModelInput([0]), 1, asked).result().sequences
        assert drawn.logprobs is not None
        return Choice(self.strategies[self.policy.tokenizer.decode(drawn.tokens)], drawn.logprobs[0])

    @property
    def probabilities(self) -> dict[str, float]:
        p = np.exp(self.policy.logprobs())
        return {name: float(p[self.policy.tokenizer.ids[name]]) for name in self.strategies}

    @property
    def entropy(self) -> float:
        return -math.fsum(p * math.log(p) for p in self.probabilities.values() if p > 0)

    def gather(
        self, batch: Sequence[tuple[Experience, float]], advantages_N: np.ndarray, config: TrainingConfig
    ) -> tuple[float, int]:
        """Accumulate the gradient of the policy's loss: (its value, how many ratios were cut).

        `batch` has the weight of each experience in the loss, a mean over the experiences of both tables.
        """
        ids, now = self.policy.tokenizer.ids, self.policy.logprobs()
        rows: list[Datum] = []
        for (e, weight), advantage in zip(batch, advantages_N, strict=True):
            said = {"logprobs": [e.action_logprob], "advantages": [config.policy_coefficient * advantage * weight]}
            rows.append(Datum(ModelInput([0]), {"target_tokens": [ids[e.action]], **said}))
        bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": CUT}
        loss = self.client.forward_backward(rows, "cispo", bounds).result().metrics["loss:sum"]
        ratios = [math.exp(now[ids[e.action]] - (e.action_logprob or 0.0)) for e, _ in batch]
        return loss, sum(ratio > CUT for ratio in ratios)

    def encourage(self, coefficient: float) -> float:
        """Accumulate the gradient of -coefficient x entropy, exactly: sum over actions of p log p, whose slope in
        log p(a), with the p in front held, is that of a cross-entropy with weights -p log p. The term's value."""
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
        self._keep_open()

    def _keep_open(self) -> None:
        """Where the entropy fell below the floor, bring the logits nearer to each other until it has it again."""
        floor = ENTROPY_FLOOR * math.log(len(self.strategies))
        if self.entropy >= floor:
            return
        own = [self.policy.tokenizer.ids[name] for name in self.strategies]
        given = self.policy.logits.copy()
        middle, low, high = given[own].mean(), 0.0, 1.0
        for _ in range(50):
            scale = (low + high) / 2
            self.policy.logits = given.copy()
            self.policy.logits[own] = middle + scale * (given[own] - middle)
            low, high = (scale, high) if self.entropy >= floor else (low, scale)

    def state(self) -> dict[str, Any]:
        policy = self.policy
        optimizer = {"moments": policy.moments.tolist(), "steps": policy.adam_steps}
        known = {"words": policy.tokenizer.words, "logits": policy.logits.tolist(), "version": policy.version}
        return {**known, "adam": optimizer, "baseline": asdict(self.baseline)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Strategies that this program does not have, or that are new to it, begin anew: all of them, to be fair."""
        policy = self.policy
        if state["words"] != policy.tokenizer.words:
            return
        policy.logits, policy.version = np.array(state["logits"], dtype=float), int(state["version"])
        policy.moments, policy.adam_steps = np.array(state["adam"]["moments"], dtype=float), int(state["adam"]["steps"])
        self.baseline = Baseline(**state["baseline"])


class StrategyPolicy:
    """Both tables, the schedule and the counters. Knows no store; `state` is all of it, in JSON, to the bit.

    A state in another format (of a newer program, say) is not read: what it learned is soon learned again.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.first, self.next = Table(FIRST), Table(NEXT)
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

    def choose(self, *, first: bool, key: int) -> Choice:
        return (self.first if first else self.next).choose(key)

    def update(
        self, replay: Sequence[tuple[Experience, float]], config: TrainingConfig, result: float | None = None
    ) -> Learned | None:
        """One step on a replayed batch of (experience, how much more often its priority has it drawn); None where none
        of it can teach. `result` is what the session that just ended came to, for the schedule."""
        usable = [(e, p) for e, p in replay if e.gain is not None and e.action_logprob is not None and p > 0]
        usable = [(e, p) for e, p in usable if e.action in self.first.strategies or e.action in self.next.strategies]
        if not usable:
            return None
        if result is not None:
            self.plateau.observe(result)
        rate = config.learning_rate * self.plateau.scale
        # (1 / (N P))^beta of Schaul et al. at beta 1, over its mean.
        weights = np.array([1 / p for _, p in usable])
        weights /= weights.sum()
        policy_loss = value_loss = bonus = cut = 0.0
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
            loss, many = table.gather(batch, errors_N, config)
            policy_loss, cut = policy_loss + loss, cut + many
            bonus += table.encourage(config.entropy_coefficient * float(weights_N.sum()))
            value_loss += config.value_coefficient * float(weights_N @ errors_N**2) / 2
            table.step(rate)
            step = rate * RATE * config.value_coefficient
            table.baseline.learn([e.task_id for e, _ in batch], gains_N, weights_N, step)
        self.updates, self.loss = self.updates + 1, policy_loss + bonus + value_loss
        told = {"entropy": self.entropy, "learning_rate": rate, "updates": self.updates, "cut": cut / len(usable)}
        return Learned(self.loss, policy_loss, value_loss, **told, advantages=advantages)


class ReplayStore(Protocol):
    """What is needed of `rlvr.store.Store`; a test may have a list behind it."""

    def buffer(self) -> Any: ...

    def sample(self, n: int, seed: int) -> list[tuple[Experience, float]]: ...

    def set_advantages(self, values: Mapping[int, float]) -> None: ...

    def set_priorities(self, values: Mapping[int, float]) -> None: ...

    def state(self, name: str) -> tuple[dict[str, Any], int] | None: ...

    def save_state(self, name: str, value: dict[str, Any], version: int) -> bool: ...


class StrategyLearner:
    """The policy as the store has it, for all sessions of this instance, from any thread."""

    def __init__(self, store: ReplayStore, config: TrainingConfig) -> None:
        self._store, self._config, self._lock = store, config, threading.Lock()
        self.policy, self._version = StrategyPolicy(), 0
        self.refresh()

    def refresh(self) -> None:
        """Take over what other instances learned meanwhile."""
        held = self._store.state(STATE)
        if held is not None and held[1] > self._version:  # another thread may have learned since we asked
            self.policy, self._version = StrategyPolicy(held[0]), held[1]

    def choose(self, *, first: bool, key: int) -> Choice:
        return self.policy.choose(first=first, key=key)

    def learn(self, result: float | None = None) -> Learned | None:
        """One update, saved; None while the buffer holds too little. What was not saved was not learned."""
        config, store = self._config, self._store
        with self._lock:
            if store.buffer().ready < config.min_experiences_for_training:
                return None
            for _ in range(RACES):
                value, version = store.state(STATE) or (None, 0)
                policy = StrategyPolicy(value)
                replay = store.sample(config.batch_size, draws.key("strategies", policy.updates))
                learned = policy.update(replay, config, result)
                if learned is None:
                    return None
                if store.save_state(STATE, policy.state(), version):
                    self.policy, self._version = policy, version + 1
                    store.set_advantages(learned.advantages)
                    store.set_priorities({id: abs(advantage) for id, advantage in learned.advantages.items()})
                    return learned
        raise RuntimeError(f"other instances updated the strategies {RACES} times while this one tried to")

    def learning(self) -> dict[str, Any]:
        """For /stats and a session's metrics. The loss is None before the first update."""
        policy = self.policy
        return {
            "policy_entropy": policy.entropy,
            "training_loss": policy.loss,
            "updates": policy.updates,
            "learning_rate": self._config.learning_rate * policy.plateau.scale,
            "strategies": {"first": policy.first.probabilities, "next": policy.next.probabilities},
        }
