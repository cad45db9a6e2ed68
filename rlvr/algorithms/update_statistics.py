"""Statistics of an update: losses, clipping, divergences. Formulas are in docs/run/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.algorithms.loss_specs import CUSTOM_METRICS
from rlvr.algorithms.losses.loss import CROSS_ENTROPY_INPUT, DUAL_CLIP
from rlvr.algorithms.specs import Algorithm
from rlvr.algorithms.terms.term import TrainedTokens
from rlvr.core.messages import Datum, ForwardBackwardOutput
from rlvr.core.types import Trajectory, mean

Array = np.ndarray


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of some rows end to end: log-probs now and when sampled, advantages as they were sent
    (weighted, options included), and log-probs under the reference, if any."""

    now: Array
    sampled: Array
    advantage: Array
    reference: Array | None

    @classmethod
    def of(cls, rows: Sequence[Trajectory], data: Sequence[Datum], output: ForwardBackwardOutput) -> Tokens:
        masks = [np.asarray(t.action_mask, dtype=bool) for t in rows]
        outputs = output.loss_fn_outputs
        now = [np.asarray(o["logprobs"].data)[-len(m) :][m] for o, m in zip(outputs, masks, strict=True)]
        pairs = list(zip(rows, masks, strict=True))
        compared = bool(rows) and all(t.reference_logprobs for t in rows)
        return cls(
            np.concatenate(now).astype(np.float64),
            np.concatenate([np.asarray(t.logprobs)[m] for t, m in pairs]),
            np.concatenate(
                [d.loss_fn_inputs["advantages"].data[-len(m) :][m] for d, m in zip(data, masks, strict=True)]
            ),
            np.concatenate([np.asarray(t.reference_logprobs)[m] for t, m in pairs]) if compared else None,
        )

    @property
    def approx_kl(self) -> float:
        """Mean of r - 1 - log r, r the ratio of the policy now to the one that sampled."""
        delta = self.now - self.sampled
        return float(np.mean(np.exp(delta) - 1 - delta))


def _gather_input(rows: Sequence[tuple[Trajectory, float]], data: Sequence[Datum], name: str) -> Array:
    """One input of the loss at the sampled tokens, end to end."""
    masks = [np.asarray(t.action_mask, dtype=bool) for t, _ in rows]
    parts = [d.loss_fn_inputs[name].data[-len(m) :][m] for d, m in zip(data, masks, strict=True)]
    return np.concatenate(parts).astype(np.float64)


def _gather_observed(data: Sequence[Datum], output: ForwardBackwardOutput) -> tuple[Array, Array]:
    """The log-probs now and the weights of the environment's tokens that are learned from, end to end."""
    found = [
        (np.asarray(out["logprobs"].data)[weights != 0], weights[weights != 0])
        for datum, out in zip(data, output.loss_fn_outputs, strict=True)
        if (given := datum.loss_fn_inputs.get(CROSS_ENTROPY_INPUT)) is not None
        for weights in (given.data,)
    ]
    logprobs, weights = zip(*found, strict=True) if found else ([np.zeros(0)], [np.zeros(0)])
    return np.concatenate(logprobs).astype(np.float64), np.concatenate(weights).astype(np.float64)


def _find_ratios(
    algorithm: Algorithm,
    rows: Sequence[tuple[Trajectory, float]],
    data: Sequence[Datum],
    tokens: Tokens,
    output: ForwardBackwardOutput,
) -> Array:
    """The ratio that the loss clips, of each sampled token: its own, or that of the whole completion."""
    ratios: list[Array] = []
    for (trajectory, _), datum, out in zip(rows, data, output.loss_fn_outputs, strict=True):
        ratio = algorithm.loss.sequence_ratio(out, datum.loss_fn_inputs)
        if ratio is None:
            return np.exp(tokens.now - _gather_input(rows, data, "logprobs"))
        ratios.append(np.full(trajectory.num_action_tokens, ratio))
    return np.concatenate(ratios)


class DifferenceSums:
    """Running sums over tokens: of d = p - q, |d|, d^2, exp(d) - 1 - d, and of q if given."""

    def __init__(self) -> None:
        self.count = 0
        self.largest = 0.0
        self._d = self._abs = self._squared = self._k3 = self._q = 0.0

    def add(self, d: Array, q: Array | None = None) -> None:
        self.count += len(d)
        self.largest = max(self.largest, float(np.abs(d).max()))
        self._d += float(d.sum())
        self._abs += float(np.abs(d).sum())
        self._squared += float((d**2).sum())
        self._k3 += float((np.exp(d) - 1 - d).sum())
        self._q += 0.0 if q is None else float(q.sum())

    @property
    def mean(self) -> float:
        return self._d / max(1, self.count)

    @property
    def mean_abs(self) -> float:
        return self._abs / max(1, self.count)

    @property
    def mean_square(self) -> float:
        return self._squared / max(1, self.count)

    @property
    def mean_k3(self) -> float:
        return self._k3 / max(1, self.count)

    @property
    def mean_q(self) -> float:
        return self._q / max(1, self.count)


class UpdateStatistics:
    """Running sums over the optimizer steps of one update; a step is one forward-backward pass or several joined."""

    def __init__(self, algorithm: Algorithm, measured: Mapping[str, float] | None = None) -> None:
        self.algorithm = algorithm
        self.updates = self.trajectories = self.tokens = 0
        self.loss = 0.0  # a mean over the optimizer steps, as is what each term adds to it
        self.term_losses = {term.name: 0.0 for one in algorithm.every for term in one.terms}
        self.clipped = {"low": 0, "high": 0}
        self.ratio_max = 1.0
        self.grad_norm = 0.0
        self.of_client: dict[str, float] = {}  # what it reports of the last optimizer step beside the norm
        self.rates: dict[str, float] = {}  # of the last optimizer step
        self.critic: dict[str, float] = {}  # the metrics of the critic's update
        self._first = DifferenceSums()  # p - q of the first optimizer step: rounding, where the batch is on-policy
        self._epoch = DifferenceSums()  # of every token when it was first trained on
        self._last = DifferenceSums()  # of the optimizer step under way
        self._of_terms: dict[str, DifferenceSums] = {}  # what terms measure, of the same step
        self._target_divergence: float | None = None  # measured without a step
        self.equal_pairs = 0  # left out of a preference loss: the same tokens, preferred and not
        self.measured = dict(measured or {})  # what terms found out before the first optimizer step
        self._own: dict[str, list[float]] = {}  # what a loss of the user's reported, a value an optimizer step

    @property
    def clipped_share(self) -> float:
        return (self.clipped["low"] + self.clipped["high"]) / max(1, self.tokens)

    @property
    def gap(self) -> float:
        """Mean absolute difference between sampler and trainer over the first optimizer step, before it."""
        return self._first.mean_abs

    @property
    def approx_kl(self) -> float:
        return self._last.mean_k3 if self._target_divergence is None else self._target_divergence

    def record_divergence(self, approx_kl: float) -> None:
        """Record the divergence that ended the update."""
        self._target_divergence = approx_kl

    def add(
        self,
        rows: Sequence[tuple[Trajectory, float]],
        data: Sequence[Datum],
        output: ForwardBackwardOutput,
        *,
        joined: bool = False,
        again: bool = False,
        algorithm: Algorithm | None = None,
    ) -> None:
        """Add a forward-backward pass, before its optimizer step.

        `joined`: it belongs to the same optimizer step as the pass before; `again`: an earlier epoch trained on the
        same tokens; `algorithm`: the spec for these tasks, if there are several.
        """
        algorithm = algorithm or self.algorithm
        bounds = algorithm.loss.config()
        lowest, highest = bounds.get("clip_low_threshold", 0.0), bounds.get("clip_high_threshold", math.inf)
        tokens = Tokens.of([t for t, _ in rows], data, output)
        delta = tokens.now - tokens.sampled
        advantage, ratio = tokens.advantage, _find_ratios(algorithm, rows, data, tokens, output)
        if not joined:
            self.updates += 1
            self._last, self._of_terms, self._target_divergence = DifferenceSums(), {}, None
        self.tokens += len(delta)
        self._last.add(delta)
        if self.updates == 1:
            self.trajectories += len(rows)
            self._first.add(delta)
        if not again:
            self._epoch.add(delta, tokens.sampled)
        each = np.full(len(delta), True)
        down, up = (each, each) if algorithm.loss.clips_at_any_advantage else (advantage < 0, advantage > 0)
        self.clipped["low"] += int(((ratio < lowest) & down).sum())
        beyond = ratio > bounds.get(DUAL_CLIP, math.inf)
        self.clipped["high"] += int(((ratio > highest) & up | beyond & down).sum())
        self.ratio_max = max(self.ratio_max, float(np.exp(delta).max()))
        self._losses(algorithm, rows, data, tokens, output, joined)
        for name in output.metrics.keys() - CUSTOM_METRICS if self.algorithm.loss.needs_whole_step else ():
            self._own.setdefault(name, []).append(output.metrics[name])

    def _losses(
        self,
        algorithm: Algorithm,
        rows: Sequence[tuple[Trajectory, float]],
        data: Sequence[Datum],
        tokens: Tokens,
        output: ForwardBackwardOutput,
        joined: bool,
    ) -> None:
        weight = np.concatenate([np.full(t.num_action_tokens, w) for t, w in rows])
        trained = TrainedTokens(
            tokens.now, tokens.sampled, tokens.reference, weight, output.metrics, *_gather_observed(data, output)
        )

        def join(before: float, value: float) -> float:
            return before + (value - (0.0 if joined else before)) / self.updates

        self.loss = join(self.loss, output.metrics["loss:sum"])
        for term in algorithm.terms:
            added, values = term.measure(trained)
            self.term_losses[term.name] = join(self.term_losses[term.name], added)
            if values is not None:
                self._of_terms.setdefault(term.name, DifferenceSums()).add(values)

    def metrics(self) -> dict[str, float]:
        """The metrics of the update; without a step: counts of work, the critic's, what terms measured before."""
        done = {"updates": float(self.updates), "tokens_trained": float(self.tokens), **self.critic}
        if self.algorithm.loss.is_paired:
            done["equal_pairs"] = float(self.equal_pairs)
        done |= self.measured
        if not self.updates:
            return done  # a zero divergence would look like a perfect score
        low, high = self.clipped["low"] / max(1, self.tokens), self.clipped["high"] / max(1, self.tokens)
        return {
            **self.of_client,
            **done,
            **self.rates,
            "optim/lr": self.rates["learning_rate"],
            "grad_norm": self.grad_norm,
            "loss": self.loss,
            **{name: values.mean for name, values in self._of_terms.items()},
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "optim/kl_sample_train_v1": -self._epoch.mean,
            "optim/kl_sample_train_v2": 0.5 * self._epoch.mean_square,
            "sampling/sampling_logp_difference/mean": self.gap,
            "sampling/sampling_logp_difference/max": self._first.largest,
            "sampling/importance_sampling_ratio/max": self.ratio_max,
            "optim/approx_kl": self.approx_kl,
            "optim/entropy": -self._epoch.mean_q,
            **{f"loss/{name}": mean(values) for name, values in sorted(self._own.items())},
        }
