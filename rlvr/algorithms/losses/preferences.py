"""Preference losses: DPO, IPO and KTO over the verified completions of a step.

The advantage `verdict` is 1 for preferred completions and -1 for the others. `dpo` and `ipo` pair each preferred
completion of a group with each other one, unless both have the same tokens. A client computes the gradient of these
losses as that of a custom loss (`forward_backward_custom`), with all rows of an optimizer step in one call.

Legend: h = the sum, or with `reduction=sequence_mean` the mean, over the sampled tokens of a completion of log policy -
log reference; w a preferred completion, l the other one of a pair. torch is imported when a loss is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.algorithms.losses.loss import Inputs, Loss, LossSpec
from rlvr.algorithms.part import SpecView
from rlvr.core.messages import Datum
from rlvr.core.protocols import CustomLoss, Feature
from rlvr.core.types import Trajectory, mean
from rlvr.core.variants import setting

Rows = Sequence[tuple[Trajectory, float]]


@dataclass(frozen=True)
class Pairing:
    """Which rows belong to which completion, and which completions are pairs.

    `completions` has the rows of each completion (several if its history was rewritten), `preferred` its verdict.
    `pairs` are (preferred, other, weight), with indices into `completions`; the weights of a group add up to 1 / number
    of groups with pairs. `equal` counts the pairs left out because both have the same tokens.
    """

    completions: list[list[int]]
    preferred: list[bool]
    pairs: list[tuple[int, int, float]]
    equal: int

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Pairing:
        rows: dict[str, list[int]] = {}
        groups: dict[str, dict[str, None]] = {}
        for i, t in enumerate(trajectories):
            name = t.rollout_id or f"#{i}"
            rows.setdefault(name, []).append(i)
            groups.setdefault(t.group_id, {})[name] = None
        names = list(rows)
        place = {name: i for i, name in enumerate(names)}
        tokens = {name: [trajectories[i].response_tokens for i in rows[name]] for name in names}
        preferred = [trajectories[rows[name][0]].advantage > 0 for name in names]
        found: list[list[tuple[int, int]]] = []
        equal = 0
        for members in groups.values():
            pairs: list[tuple[int, int]] = []
            for w in members:
                for other in members:
                    if preferred[place[w]] and not preferred[place[other]]:
                        equal += tokens[w] == tokens[other]
                        if tokens[w] != tokens[other]:
                            pairs.append((place[w], place[other]))
            if pairs:
                found.append(pairs)
        weighed = [(*pair, 1.0 / (len(found) * len(pairs))) for pairs in found for pair in pairs]
        return cls([rows[name] for name in names], preferred, weighed, equal)


def mismatch_completions(trajectories: Sequence[Trajectory], context: int | None = None) -> list[Trajectory]:
    """Each prompt with the completion of the next trajectory, the last with that of the first; log-probs are 0.

    A completion is cut so that prompt and completion have at most `context` tokens. ValueError for fewer than two
    trajectories: the only other completion would be the prompt's own.
    """
    if len(trajectories) < 2:
        raise ValueError(
            f"kto with given completions: an optimizer step has {len(trajectories)} completions and needs at least 2; "
            "give it more, or fewer substeps"
        )
    pairs = list[Trajectory]()
    for t, other in zip(trajectories, [*trajectories[1:], trajectories[0]], strict=True):
        tokens = other.response_tokens[: None if context is None else context - len(t.prompt_tokens)]
        pairs.append(Trajectory(t.prompt, t.prompt_tokens, other.response, tokens, [0.0] * len(tokens)))
    return pairs


def _spec(formula: str) -> LossSpec:
    return LossSpec(formula, inputs=("reference_logprobs",), masks=("mask",), config={"beta": 0.1})


@dataclass(frozen=True)
class PreferenceLoss(Loss):
    """A loss that compares completions; `beta` is the strength of the pull to the reference."""

    needs_whole_step = True
    compares_completions = True
    needs = (Feature.OWN_LOSS, Feature.REFERENCE)

    beta: float = setting(0.1, low=math.ulp(0.0), expected="a number above 0 (0.1 is usual)", flat="beta")

    def check(self, algorithm: SpecView) -> None:
        """Refuse what a preference loss does not read."""
        if not algorithm.advantage.is_verdict:
            raise ValueError(
                f"algorithm.advantage={algorithm.advantage.name} with the loss {self.name!r}, which compares "
                "completions above algorithm.accept_above with those below; use advantage=verdict"
            )
        if algorithm.reduction not in ("sequence_sum", "sequence_mean"):
            raise ValueError(
                f"algorithm.reduction={algorithm.reduction} with the loss {self.name!r}, which takes a whole "
                "completion's log-probs: their sum (sequence_sum, as in the paper) or their mean (sequence_mean)"
            )
        for term in algorithm.terms:
            if term.changes_gradient:
                raise ValueError(
                    f"{term.key(term.switch)}={term.strength} has no effect on the loss {self.name!r}, which has no "
                    "advantages and its own pull to the reference (algorithm.beta); leave it out"
                )

    def row_inputs(self, trajectory: Trajectory, weight: float) -> Inputs:
        inputs = super().row_inputs(trajectory, weight)
        return inputs | {"reference_logprobs": trajectory.reference_logprobs}

    def combine(self, h: Any, pairing: Pairing, divergence: float | None) -> tuple[Any, dict[str, Any]]:
        """The loss and its metrics from the h of every completion."""
        raise NotImplementedError

    def of_rows(self, trajectories: Sequence[Trajectory], *, is_mean: bool, divergence: float | None) -> CustomLoss:
        """The loss as a function of the log-probs of these rows, for `forward_backward_custom`.

        `is_mean`: h is a mean over tokens. `divergence` is the z of `kto`; without it z is estimated from these
        completions.
        """
        pairing = Pairing.of(trajectories)

        def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, Any]]:
            import torch

            gaps, counts = list[Any](), list[float]()
            for datum, p in zip(data, logprobs, strict=True):
                mask, reference = (datum.loss_fn_inputs[name].to_torch() for name in ("mask", "reference_logprobs"))
                gaps.append(((p - reference) * mask).sum())
                counts.append(float(mask.sum()))
            lengths = [sum(counts[i] for i in rows) if is_mean else 1.0 for rows in pairing.completions]
            h = torch.stack(
                [
                    torch.stack([gaps[i] for i in rows]).sum() / n
                    for rows, n in zip(pairing.completions, lengths, strict=True)
                ]
            )
            return self.combine(h, pairing, divergence)

        return loss


@dataclass(frozen=True)
class PairedLoss(PreferenceLoss):
    """A loss of pairs: a preferred completion and another one of its group."""

    is_paired = True

    def keep_comparable(self, rows: Rows) -> tuple[list[tuple[Trajectory, float]], int]:
        """The trajectories that have a partner to be compared with."""
        pairing = Pairing.of([t for t, _ in rows])
        paired = {i for pair in pairing.pairs for c in pair[:2] for i in pairing.completions[c]}
        return [row for i, row in enumerate(rows) if i in paired], pairing.equal

    def of_pairs(self, margin: Any) -> Any:
        """The loss of each pair, from its margin h_w - h_l."""
        raise NotImplementedError

    def combine(self, h: Any, pairing: Pairing, divergence: float | None) -> tuple[Any, dict[str, Any]]:
        import torch

        left, right = (torch.tensor([pair[side] for pair in pairing.pairs]) for side in (0, 1))
        margin = h[left] - h[right]
        weights = torch.tensor([pair[2] for pair in pairing.pairs])
        terms = self.of_pairs(margin)
        correct = (weights * (margin.detach() > 0)).sum()
        mean = (weights * margin.detach()).sum()
        return (weights * terms).sum(), {"margin": mean, "accuracy": correct, "pairs": float(len(pairing.pairs))}


@dataclass(frozen=True)
class Dpo(PairedLoss):
    """Direct preference optimisation."""

    name = "dpo"
    spec = _spec("-log sigmoid(beta (h_w - h_l)). Rafailov et al. 2023, arXiv:2305.18290, eq. 7.")

    def of_pairs(self, margin: Any) -> Any:
        return dpo(margin, self.beta)


@dataclass(frozen=True)
class Ipo(PairedLoss):
    """Identity preference optimisation."""

    name = "ipo"
    spec = _spec("(h_w - h_l - 1 / (2 beta))^2. Azar et al. 2023, arXiv:2310.12036, eq. 17.")

    def of_pairs(self, margin: Any) -> Any:
        return ipo(margin, self.beta)


@dataclass(frozen=True)
class Kto(PreferenceLoss):
    """A loss of single completions, each preferred or not."""

    name = "kto"
    spec = _spec(
        "1 - sigmoid(beta (h - z)) of a preferred completion, 1 - sigmoid(beta (z - h)) of another one; "
        "z = max(0, mean of h), without a gradient. Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8, with "
        "lambda_D = lambda_U = 1. The paper estimates z from completions of other prompts. So does this for given "
        "completions; otherwise it takes the policy's own."
    )
    takes_divergence = True

    def combine(self, h: Any, pairing: Pairing, divergence: float | None) -> tuple[Any, dict[str, Any]]:
        import torch

        return kto(h, torch.tensor(pairing.preferred), self.beta, divergence)

    def estimate_divergence(
        self,
        trajectories: Sequence[Trajectory],
        *,
        is_mean: bool,
        context: int | None,
        before: Callable[[Sequence[Trajectory]], Sequence[Sequence[float]]],
        now: Callable[[Sequence[Trajectory]], Sequence[Sequence[float]]],
    ) -> float | None:
        """max(0, mean of h) of mismatched completions, as in arXiv:2402.01306, eq. 8, cut to the model's context."""
        others = mismatch_completions(trajectories, context)
        reference = before(others)
        pairs = zip(now(others), reference, strict=True)
        return max(0.0, mean([(math.fsum(p) - math.fsum(q)) / (len(q) if is_mean else 1) for p, q in pairs]))


def dpo(margin: Any, beta: float) -> Any:
    """-log sigmoid(beta (h_w - h_l)) of every pair."""
    import torch

    return -torch.nn.functional.logsigmoid(beta * margin)


def ipo(margin: Any, beta: float) -> Any:
    """(h_w - h_l - 1 / (2 beta))^2 of every pair."""
    return (margin - 1 / (2 * beta)) ** 2


def kto(h: Any, preferred: Any, beta: float, divergence: float | None = None) -> tuple[Any, dict[str, Any]]:
    """The mean over completions of 1 - sigmoid(beta (h - z)), or of 1 - sigmoid(beta (z - h)) if not preferred.

    z is `divergence`, or without it max(0, mean h), without a gradient: an estimate of the KL divergence from the
    reference by the step's completions, which the policy sampled.
    """
    import torch

    z = h.detach().mean().clamp(min=0) if divergence is None else h.new_tensor(divergence)
    return (1 - torch.sigmoid(beta * torch.where(preferred, h - z, z - h))).mean(), {"divergence": z}
