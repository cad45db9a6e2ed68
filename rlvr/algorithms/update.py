"""One update: how a batch of scored trajectories becomes optimizer steps on a training client.

The training loop and hand-written loops (`REINFORCE`, `PPO`) go through this one function; the client may be the engine
in this process, a table of logits or a server. Exercised by `python -m pytest tests/test_update.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from rlvr import draws
from rlvr.algorithms.advantages import Memory
from rlvr.algorithms.measure import Measured, Tokens
from rlvr.algorithms.rows import KL_ESTIMATORS, Algorithm
from rlvr.algorithms.shaping import compare_with_reference, penalize
from rlvr.futures import Future
from rlvr.messages import AdamParams, Datum, ForwardBackwardOutput
from rlvr.protocols import TrainingClient
from rlvr.types import Trajectory

Rows = Sequence[tuple[Trajectory, float]]


@dataclass(frozen=True)
class Passes:
    """How often a batch is used: `epochs` times in `substeps` optimizer steps each.

    A step that would start further than `target_kl` (0: never) from the policy that sampled ends the update.
    """

    epochs: int = 1
    substeps: int = 1
    target_kl: float = 0.0


@dataclass(frozen=True)
class Stream:
    """How a batch is used that is learned from as it arrives: once, in `substeps` optimizer steps of `minibatches`
    forward-backward calls each. An optimizer step learns from `answers` answers, those without a gradient included:
    its denominator, which cannot wait for the last of them."""

    substeps: int
    minibatches: int
    answers: int


def update(
    client: TrainingClient,
    algorithm: Algorithm,
    batch: Sequence[Trajectory],
    adam: Callable[[int], AdamParams],
    passes: Passes,
    *,
    memory: Memory,
    max_tokens: int,
    temperature: float = 1.0,
    key: int = 0,
    reference: Any = None,
    check: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """Penalties, advantages, and every optimizer step the batch is good for; what was measured on the way.

    `adam(n)` gives the parameters of the batch's n-th optimizer step. `max_tokens` is the budget of an answer, `key`
    the randomness of the substeps, `reference` the sampling client that a KL compares with. `check` sees the first
    optimizer step before it is made, and may raise.
    """
    config = loss_config(algorithm, client, temperature)
    selected, before = _prepared(client, algorithm, batch, config, memory, max_tokens, temperature, reference)
    measured = Measured(algorithm)
    for epoch in range(passes.epochs):
        order = draws.permutation(len(selected), draws.key("minibatches", key, epoch))
        count = min(passes.substeps, len(selected))
        for index in range(count):
            rows = algorithm.weigh([selected[i] for i in sorted(order[index::count])], max_tokens)
            if not rows:
                continue
            data = [project(algorithm, t, weight, before.get(id(t))) for t, weight in rows]
            if passes.target_kl and measured.updates:
                output = client.forward(data, algorithm.loss, config).result()
                measured.looked(Tokens.of([t for t, _ in rows], data, output).approx_kl)
                if measured.approx_kl > passes.target_kl:
                    return measured
            output = client.forward_backward(data, algorithm.loss, config).result()
            measured.add(rows, data, output, again=epoch > 0)
            _step(client, measured, adam, check)
    return measured


def update_streamed(
    client: TrainingClient,
    algorithm: Algorithm,
    arriving: Iterable[Sequence[Trajectory]],
    adam: Callable[[int], AdamParams],
    stream: Stream,
    *,
    memory: Memory,
    max_tokens: int,
    temperature: float = 1.0,
    reference: Any = None,
    check: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """`update`, from minibatches of whole groups that are taken from `arriving` one at a time, and sent at once.

    Gradients are the same as those of one call over the substep's groups, since losses are sums and no weight depends
    on what has not arrived. An optimizer step without any row to learn from is not made.
    """
    config = loss_config(algorithm, client, temperature)
    measured, parts = Measured(algorithm), iter(arriving)
    for _ in range(stream.substeps):
        sent: list[tuple[Rows, list[Datum], Future[ForwardBackwardOutput]]] = []
        for batch in islice(parts, stream.minibatches):
            selected, before = _prepared(client, algorithm, batch, config, memory, max_tokens, temperature, reference)
            share = len({t.rollout_id or str(id(t)) for t in selected}) / stream.answers
            rows = [(t, weight * share) for t, weight in algorithm.weigh(selected, max_tokens)]
            if rows:
                data = [project(algorithm, t, weight, before.get(id(t))) for t, weight in rows]
                sent.append((rows, data, client.forward_backward(data, algorithm.loss, config)))
        for number, (rows, data, output) in enumerate(sent):
            measured.add(rows, data, output.result(), joined=number > 0)
        if sent:
            _step(client, measured, adam, check)
    return measured


def _prepared(
    client: TrainingClient,
    algorithm: Algorithm,
    batch: Sequence[Trajectory],
    config: dict[str, float],
    memory: Memory,
    max_tokens: int,
    temperature: float,
    reference: Any,
) -> tuple[list[Trajectory], dict[int, list[float]]]:
    """The trajectories to learn from, with their advantages, and the trainer's log-probs where an option needs them."""
    if algorithm.kl_coef:
        if reference is None:
            raise ValueError(
                f"algorithm.kl_coef={algorithm.kl_coef} without a reference: give update(reference=...) a sampling "
                "client at the weights to compare with"
            )
        compare_with_reference(batch, reference, temperature)
    before: dict[int, list[float]] = {}
    if algorithm.importance_cap is not None:
        known = [t for t in batch if t.reward is not None and not t.over_at_once]
        before = {id(t): now for t, now in zip(known, current_logprobs(client, known, config), strict=True)}
    penalize(batch, algorithm, max_tokens, before)
    selected = algorithm.select(batch, memory)
    for trajectory in selected:
        if not trajectory.over_at_once:
            trajectory.require_trainable()
    return selected, before


def _step(
    client: TrainingClient,
    measured: Measured,
    adam: Callable[[int], AdamParams],
    check: Callable[[Measured], None],
) -> None:
    """The optimizer step of the gradients that have been added up."""
    if measured.updates == 1:
        check(measured)
    parameters = adam(measured.updates - 1)
    stepped = client.optim_step(parameters).result()
    measured.learning_rate = parameters.learning_rate
    measured.grad_norm = stepped.metrics.get("grad_norm", math.nan)


def loss_config(algorithm: Algorithm, client: TrainingClient, temperature: float) -> dict[str, float]:
    """The settings of the named loss: thresholds, and what only clients that know it may be told."""
    config = dict(algorithm.thresholds)
    if getattr(client, "scores_at_temperature", False):
        config["temperature"] = temperature
    if algorithm.beta is not None:
        config["beta"] = algorithm.beta
    if algorithm.kl_coef and algorithm.kl_in == "loss":
        config["kl_estimator"] = float(1 + KL_ESTIMATORS.index(algorithm.kl_estimator))
    return config


def project(algorithm: Algorithm, trajectory: Trajectory, weight: float, old: Sequence[float] | None = None) -> Datum:
    """The trajectory as a row of training: every option of the algorithm on its road (`rlvr.algorithms.roads`).

    `weight` is the reduction; `old` [R] the trainer's own log-probs before the step, for the importance correction.
    """
    q = np.asarray(trajectory.logprobs)
    advantages = np.full(len(q), trajectory.advantage)
    if algorithm.entropy_coef and algorithm.entropy == "sampled":
        advantages = advantages - algorithm.entropy_coef * (q if old is None else np.asarray(old))
    if algorithm.importance_cap is not None:
        assert old is not None
        advantages = advantages * np.minimum(np.exp(np.asarray(old) - q), algorithm.importance_cap)
    ones = np.ones(len(q))
    inputs: dict[str, Any] = {}
    if algorithm.loss == "gspo":
        inputs["sequence_ratio_mask"] = ones
    if algorithm.loss == "dro":  # 0 where the policy did not act: no pull on what others wrote
        inputs["beta_weights"] = weight * ones
    if algorithm.kl_coef and algorithm.kl_in == "loss":
        inputs["kl_weights"] = algorithm.kl_coef * weight * ones
        inputs["reference_logprobs"] = trajectory.reference_logprobs
    if algorithm.entropy_coef and algorithm.entropy == "exact":
        inputs["entropy_weights"] = algorithm.entropy_coef * weight * ones
    return Datum.from_trajectory(trajectory, weight, advantages=advantages, logprobs=old, **inputs)


def current_logprobs(
    client: TrainingClient, trajectories: Sequence[Trajectory], config: dict[str, float]
) -> list[list[float]]:
    """The trainer's log-probs [R] of every answer now, by a forward pass at the temperature of the config."""
    if not trajectories:
        return []
    for trajectory in trajectories:
        trajectory.require_trainable()
    told = {"temperature": config["temperature"]} if "temperature" in config else None
    data = [Datum.supervised(t.prompt_tokens, t.response_tokens, weight=0.0) for t in trajectories]
    output: ForwardBackwardOutput = client.forward(data, "cross_entropy", told).result()
    pairs = zip(trajectories, output.loss_fn_outputs, strict=True)
    return [np.asarray(o["logprobs"].data)[-t.num_response_tokens :].tolist() for t, o in pairs]


def divergence(client: TrainingClient, trajectories: Sequence[Trajectory], config: dict[str, float]) -> float:
    """How far the policy is now from the one that sampled: mean of r - 1 - log r over the sampled tokens."""
    deltas = [
        now - q
        for t, after in zip(trajectories, current_logprobs(client, trajectories, config), strict=True)
        for now, q, acted in zip(after, t.logprobs, t.action_mask, strict=True)
        if acted
    ]
    d = np.asarray(deltas)
    return float(np.mean(np.exp(d) - 1 - d)) if len(d) else 0.0
