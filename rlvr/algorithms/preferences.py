"""Preference losses: DPO, IPO and KTO over the verified completions of a step.

The advantage `verdict` is 1 for preferred completions and -1 for the others. `dpo` and `ipo` pair each preferred
completion of a group with each other one, unless both have the same tokens. A client computes the gradient of these
losses as that of a custom loss (`forward_backward_custom`), with all rows of an optimizer step in one call.

Legend: h = the sum, or with `reduction=sequence_mean` the mean, over the sampled tokens of a completion of log policy -
log reference; w a preferred completion, l the other one of a pair. torch is imported when a loss is computed.
Exercised by `python -m pytest tests/test_preferences.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.algorithms.specs import Algorithm
from rlvr.core.messages import Datum
from rlvr.core.protocols import CustomLoss
from rlvr.core.types import Trajectory

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


def keep_comparable(algorithm: Algorithm, rows: Rows) -> tuple[list[tuple[Trajectory, float]], int]:
    """The rows that a preference loss learns from, and how many pairs were left out because their tokens are equal.

    `kto` takes every completion, `dpo` and `ipo` those that have a pair.
    """
    pairing = Pairing.of([t for t, _ in rows])
    if not algorithm.is_paired:
        return list(rows), 0
    paired = {i for pair in pairing.pairs for c in pair[:2] for i in pairing.completions[c]}
    return [row for i, row in enumerate(rows) if i in paired], pairing.equal


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


def build_preference_loss(
    algorithm: Algorithm, trajectories: Sequence[Trajectory], divergence: float | None = None
) -> CustomLoss:
    """The algorithm's loss as a function of the log-probs of these rows, for `forward_backward_custom`.

    `divergence` is the z of `kto`; without it z is estimated from these completions.
    """
    assert algorithm.beta is not None
    pairing, beta, is_mean = Pairing.of(trajectories), algorithm.beta, algorithm.reduction == "sequence_mean"

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
        if algorithm.loss == "kto":
            return kto(h, torch.tensor(pairing.preferred), beta, divergence)
        left, right = (torch.tensor([pair[side] for pair in pairing.pairs]) for side in (0, 1))
        margin = h[left] - h[right]
        weights = torch.tensor([pair[2] for pair in pairing.pairs])
        terms = dpo(margin, beta) if algorithm.loss == "dpo" else ipo(margin, beta)
        correct = (weights * (margin.detach() > 0)).sum()
        mean = (weights * margin.detach()).sum()
        return (weights * terms).sum(), {"margin": mean, "accuracy": correct, "pairs": float(len(pairing.pairs))}

    return loss


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
