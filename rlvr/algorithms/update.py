"""One update: how a batch of scored trajectories becomes optimizer steps on a training client.

The training loop and hand-written loops (`REINFORCE`, `PPO`) go through these functions, over any training client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.critic import ValueCritic
from rlvr.algorithms.penalties import penalize
from rlvr.algorithms.reductions import find_reduction
from rlvr.algorithms.sampler_logprobs import compute_sampler_logprobs, fill_reference_logprobs
from rlvr.algorithms.specs import Algorithm
from rlvr.algorithms.terms.term import Preparation, Row
from rlvr.algorithms.update_statistics import Tokens, UpdateStatistics
from rlvr.core import rng
from rlvr.core.futures import Future
from rlvr.core.messages import AdamParams, Datum, ForwardBackwardOutput
from rlvr.core.protocols import TrainingClient
from rlvr.core.types import Trajectory, group_by

Rows = Sequence[tuple[Trajectory, float]]


@dataclass(frozen=True)
class Passes:
    """How often a batch is used: `epochs` times in `substeps` optimizer steps each.

    The update ends before a step that would start further than `target_kl` from the policy that sampled (0: no limit).
    """

    epochs: int = 1
    substeps: int = 1
    target_kl: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.substeps < 1:
            raise ValueError(f"Passes: epochs={self.epochs}, substeps={self.substeps}; expected at least 1 of each")


@dataclass(frozen=True)
class StreamPlan:
    """How a batch is used while it arrives: once, in `substeps` optimizer steps of `minibatches` forward-backward
    calls.

    `completions` is how many an optimizer step counts, those without a gradient included. It is the denominator, which
    has to be known before the last of them arrives.
    """

    substeps: int
    minibatches: int
    completions: int


@dataclass(frozen=True)
class UpdateInputs:
    """What an update needs beside its batch.

    `max_tokens` is the budget of a completion, `key` the randomness of the substeps and of covariance clipping,
    `reference` the sampling client that a KL compares with, `teacher` that of a distillation, `critic` what an
    algorithm with one takes values from; it learns before the policy does. `is_given` says that the completions are not
    the policy's own. `prompts` are those of self-distillation (`rlvr.training.informed_prompts`).
    """

    baseline: RunningBaseline
    max_tokens: int
    temperature: float = 1.0
    key: int = 0
    reference: Any = None
    teacher: Any = None
    critic: ValueCritic | None = None
    is_given: bool = False
    prompts: Any = None


Check = Callable[[UpdateStatistics], None]


def _accept(statistics: UpdateStatistics) -> None:
    """Find nothing wrong."""


def update(
    client: TrainingClient,
    algorithm: Algorithm,
    batch: Sequence[Trajectory],
    adam: Callable[[int], AdamParams],
    passes: Passes,
    inputs: UpdateInputs,
    check: Check = _accept,
) -> UpdateStatistics:
    """Compute penalties and advantages and make every optimizer step of the batch; returns the statistics.

    `adam(n)` gives the parameters of the batch's n-th optimizer step. `check` is called with the statistics before the
    first optimizer step, and may raise.
    """
    parts = [_Part.of(client, one, own, inputs) for one, own in algorithm.split(batch)]
    selected = [t for part in parts for t in part.selected]
    statistics = UpdateStatistics(algorithm, {k: v for part in parts for k, v in part.prepared.measured.items()})
    substeps = list(_split(algorithm, selected, passes, inputs.key))
    if inputs.critic is not None:
        batches = [_weigh_for_critic(algorithm, step, inputs.max_tokens) for _, step in substeps]
        statistics.critic = inputs.critic.learn(rows for rows in batches if rows)
        if inputs.critic.alone:
            return statistics
    for epoch, step in substeps:
        calls: list[tuple[_Part, Rows, list[Datum]]] = []
        for part in parts:
            loss, own = part.algorithm.loss, [t for t in step if id(t) in part.ids]
            rows, equal = loss.keep_comparable(part.algorithm.weigh(own, inputs.max_tokens, step))
            statistics.equal_pairs += equal if epoch == 0 else 0
            if rows:
                calls.append((part, rows, [part.make_datum(t, weight) for t, weight in rows]))
        if not calls:
            continue
        if passes.target_kl and statistics.updates:
            statistics.record_divergence(_measure_kl(client, calls))
            if statistics.approx_kl > passes.target_kl:
                return statistics
        sent = [part.send(client, rows, data, inputs) for part, rows, data in calls]
        for number, ((part, rows, data), output) in enumerate(zip(calls, sent, strict=True)):
            statistics.add(rows, data, output.result(), joined=number > 0, again=epoch > 0, algorithm=part.algorithm)
        _step(client, statistics, adam, check)
    return statistics


@dataclass(frozen=True)
class _Part:
    """What one algorithm learns from in an update: with `Algorithm.for_tasks` there are several."""

    algorithm: Algorithm
    selected: list[Trajectory]
    prepared: Preparation
    config: dict[str, float]
    ids: frozenset[int]

    @classmethod
    def of(
        cls, client: TrainingClient, algorithm: Algorithm, batch: Sequence[Trajectory], inputs: UpdateInputs
    ) -> _Part:
        config = loss_config(algorithm, client, inputs.temperature)
        selected, prepared = _select(client, algorithm, batch, config, inputs)
        return cls(algorithm, selected, prepared, config, frozenset(map(id, selected)))

    def make_datum(self, trajectory: Trajectory, weight: float) -> Datum:
        return make_datum(self.algorithm, trajectory, weight, self.prepared.old_logprobs(trajectory))

    def send(
        self, client: TrainingClient, rows: Rows, data: list[Datum], inputs: UpdateInputs
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of its rows."""
        divergence = None
        if inputs.is_given:
            divergence = self.algorithm.loss.estimate_divergence(
                [t for t, _ in rows],
                is_mean=self.algorithm.reduction == "sequence_mean",
                context=getattr(client.get_tokenizer(), "model_max_length", None),
                before=lambda others: compute_sampler_logprobs(others, inputs.reference, inputs.temperature),
                now=lambda others: compute_current_logprobs(client, others, self.config),
            )
        return _forward_backward(client, self.algorithm, rows, data, self.config, divergence)


def _measure_kl(client: TrainingClient, calls: Sequence[tuple[_Part, Rows, list[Datum]]]) -> float:
    """The divergence of the policy now from the one that sampled, over the rows of an optimizer step."""
    tokens: list[Tokens] = []
    for part, rows, data in calls:
        trajectories = [t for t, _ in rows]
        if part.algorithm.loss.needs_whole_step:
            output = _score(client, trajectories, part.config)
        else:
            output = client.forward(data, part.algorithm.loss.name, part.config).result()
        tokens.append(Tokens.of(trajectories, data, output))
    return sum(one.approx_kl * len(one.now) for one in tokens) / sum(len(one.now) for one in tokens)


def _split(
    algorithm: Algorithm, selected: Sequence[Trajectory], passes: Passes, key: int
) -> Iterator[tuple[int, list[Trajectory]]]:
    """The epoch and the trajectories of each optimizer step."""

    # A completion may be several trajectories, and pairs of completions are within a group: neither is cut apart.
    def name_unit(t: Trajectory) -> str:
        return t.group_id if algorithm.loss.is_paired else t.rollout_id or str(id(t))

    units = list(group_by(selected, name_unit).values())
    count = min(passes.substeps, len(units))
    for epoch in range(passes.epochs):
        order = rng.permutation(len(units), rng.key("minibatches", key, epoch))
        for index in range(count):
            yield epoch, [t for i in sorted(order[index::count]) for t in units[i]]


def _weigh_for_critic(algorithm: Algorithm, part: Sequence[Trajectory], max_tokens: int) -> Rows:
    weights = find_reduction(algorithm.reduction)(part, max_tokens)
    return [(t, weight) for t, weight in zip(part, weights, strict=True) if t.num_action_tokens]


def update_streamed(
    client: TrainingClient,
    algorithm: Algorithm,
    arriving: Iterable[Sequence[Trajectory]],
    adam: Callable[[int], AdamParams],
    stream: StreamPlan,
    inputs: UpdateInputs,
    check: Check = _accept,
) -> UpdateStatistics:
    """Like `update`, but takes minibatches of whole groups from `arriving` one at a time and sends each at once.

    Losses are sums, and no weight depends on what has not arrived: the denominator is `stream.completions`. If
    `Algorithm.select` keeps n of these N, the gradient is n/N of that of `update` over the substep's groups, whose
    denominator is n; if it keeps all, they are equal. `token_mean` is neither, as a minibatch counts its own tokens
    alone: a run refuses it. An optimizer step without a row to learn from is not made.
    ValueError for a loss of preferences or of the user's: it need not be a sum over rows, so it gets those of an
    optimizer step at once (`update`).
    """
    if algorithm.loss.needs_whole_step:
        raise ValueError(
            f"algorithm.loss={algorithm.loss.name} needs all rows of an optimizer step at once; use update"
        )
    for term in algorithm.terms:
        if term.needs_whole_batch:
            raise ValueError(f"{term.key(term.switch)} needs the whole batch at once; use update")
    if algorithm.for_tasks:
        raise ValueError("algorithm.for_tasks needs the whole batch at once; use update")
    if inputs.critic is not None:
        raise ValueError(
            f"the critic of algorithm.advantage={algorithm.advantage.name} learns from the whole batch; use update"
        )
    config = loss_config(algorithm, client, inputs.temperature)
    statistics, parts = UpdateStatistics(algorithm), iter(arriving)
    for _ in range(stream.substeps):
        sent: list[tuple[Rows, list[Datum], Future[ForwardBackwardOutput]]] = []
        for batch in islice(parts, stream.minibatches):
            selected, prepared = _select(client, algorithm, batch, config, inputs)
            statistics.measured |= prepared.measured
            share = len({t.rollout_id or str(id(t)) for t in selected}) / stream.completions
            rows = [(t, weight * share) for t, weight in algorithm.weigh(selected, inputs.max_tokens)]
            if rows:
                data = [make_datum(algorithm, t, weight, prepared.old_logprobs(t)) for t, weight in rows]
                sent.append((rows, data, _forward_backward(client, algorithm, rows, data, config)))
        for number, (rows, data, output) in enumerate(sent):
            statistics.add(rows, data, output.result(), joined=number > 0)
        if sent:
            _step(client, statistics, adam, check)
    return statistics


def _select(
    client: TrainingClient,
    algorithm: Algorithm,
    batch: Sequence[Trajectory],
    config: dict[str, float],
    inputs: UpdateInputs,
) -> tuple[list[Trajectory], Preparation]:
    """The trajectories to learn from, with advantages set, and what the algorithm's terms found out."""
    critic = inputs.critic
    if algorithm.advantage.takes_critic != (critic is not None):
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage.name} "
            + ("needs a critic: give UpdateInputs(critic=...)" if critic is None else "takes no critic: leave it out")
        )
    if critic is not None:
        critic.fill_values(batch)
    prepared = Preparation(
        inputs.temperature,
        inputs.key,
        inputs.reference,
        inputs.teacher,
        lambda rows: compute_current_logprobs(client, rows, config),
        fingerprint=client.fingerprint,
        prompts=inputs.prompts,
    )
    if algorithm.loss.compares_completions:
        if inputs.reference is None:
            raise ValueError(
                f"algorithm.loss={algorithm.loss.name} without a reference: give UpdateInputs(reference=...) a "
                "sampling client at the weights to compare with"
            )
        fill_reference_logprobs(batch, inputs.reference, inputs.temperature)
    for term in algorithm.terms:
        term.prepare(batch, prepared)
    penalize(batch, algorithm, inputs.max_tokens, prepared.old_logprobs)
    selected = algorithm.select(batch, inputs.baseline)
    for trajectory in selected:
        if not trajectory.is_empty:
            trajectory.require_trainable()
    for term in algorithm.terms:
        term.adjust(selected, prepared)
    return selected, prepared


def _forward_backward(
    client: TrainingClient,
    algorithm: Algorithm,
    rows: Rows,
    data: list[Datum],
    config: dict[str, float],
    divergence: float | None = None,
) -> Future[ForwardBackwardOutput]:
    """Add the gradient of the loss: a named one, or a function that gets all of `data`, made of `rows`, in one call."""
    if algorithm.loss.needs_whole_step:
        is_mean = algorithm.reduction == "sequence_mean"
        loss = algorithm.loss.of_rows([t for t, _ in rows], is_mean=is_mean, divergence=divergence)
        return client.forward_backward_custom(data, loss, config)
    return client.forward_backward(data, algorithm.loss.name, config)


def _step(
    client: TrainingClient,
    statistics: UpdateStatistics,
    adam: Callable[[int], AdamParams],
    check: Check,
) -> None:
    """Make the optimizer step of the accumulated gradients."""
    if statistics.updates == 1:
        check(statistics)
    parameters = adam(statistics.updates - 1)
    stepped = client.optim_step(parameters).result()
    statistics.rates = parameters.rates
    statistics.grad_norm = stepped.metrics.get("grad_norm", math.nan)
    statistics.of_client = stepped.of_client


def loss_config(algorithm: Algorithm, client: TrainingClient, temperature: float) -> dict[str, float]:
    """The settings of the loss, with the temperature for clients that score at one."""
    config = dict(algorithm.loss.config())
    if client.capabilities.scores_at_temperature:
        config["temperature"] = temperature
    for term in algorithm.terms:
        config |= term.config()
    return config


def make_datum(
    algorithm: Algorithm, trajectory: Trajectory, weight: float, old: Sequence[float] | None = None
) -> Datum:
    """The trajectory as a row of training, with every option of the algorithm in its inputs.

    `weight` is the reduction; `old` [R] are the trainer's log-probs before the step, for the importance correction.
    """
    row = Row(
        trajectory,
        weight,
        np.asarray(trajectory.logprobs),
        np.asarray(trajectory.response_advantages),
        None if old is None else np.asarray(old),
        algorithm.loss.row_inputs(trajectory, weight),
    )
    for term in algorithm.terms:
        term.weigh(row)
    if "weights" in algorithm.loss.spec.inputs:
        row.inputs["weights"] = weight * row.advantages
    return Datum.from_trajectory(
        trajectory, weight, advantages=row.advantages, logprobs=old, observed=row.observed, **row.inputs
    )


def compute_current_logprobs(
    client: TrainingClient, trajectories: Sequence[Trajectory], config: dict[str, float]
) -> list[list[float]]:
    """The trainer's log-probs [R] of every completion, by a forward pass at the temperature of the config."""
    if not trajectories:
        return []
    for trajectory in trajectories:
        trajectory.require_trainable()
    pairs = zip(trajectories, _score(client, trajectories, config).loss_fn_outputs, strict=True)
    return [np.asarray(o["logprobs"].data)[-t.num_response_tokens :].tolist() for t, o in pairs]


def _score(
    client: TrainingClient, trajectories: Sequence[Trajectory], config: dict[str, float]
) -> ForwardBackwardOutput:
    """A forward pass without a loss."""
    settings = {"temperature": config["temperature"]} if "temperature" in config else None
    data = [Datum.from_completion(t.prompt_tokens, t.response_tokens, weight=0.0) for t in trajectories]
    return client.forward(data, "cross_entropy", settings).result()


def measure_divergence(client: TrainingClient, trajectories: Sequence[Trajectory], config: dict[str, float]) -> float:
    """Divergence of the policy now from the one that sampled: the mean of r - 1 - log r over the sampled tokens.

    An episode that ended before its first token has none.
    """
    trajectories = [t for t in trajectories if not t.is_empty]
    deltas = [
        now - q
        for t, after in zip(trajectories, compute_current_logprobs(client, trajectories, config), strict=True)
        for now, q, acted in zip(after, t.logprobs, t.action_mask, strict=True)
        if acted
    ]
    d = np.asarray(deltas)
    return float(np.mean(np.exp(d) - 1 - d)) if len(d) else 0.0
