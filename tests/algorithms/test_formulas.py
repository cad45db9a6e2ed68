"""`update()` on the engine against the papers' formulas, written out here over a plain transformers pass.

Legend: p log-probs of an answer's sampled tokens under the policy, q those it was sampled with, ref the reference's, r
reward, A advantage, n sampled tokens of an answer, N answers, H the entropy of the distribution a token was drawn from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.terms.importance import Importance
from rlvr.algorithms.update import Passes, UpdateInputs, update
from rlvr.algorithms.update_statistics import UpdateStatistics
from rlvr.core.messages import AdamParams
from rlvr.core.types import Trajectory
from tests.kit.rounding import assert_gradients_close
from tests.kit.tiny import data, gradients

T = 0.8  # temperature
M = 10  # budget of an answer
# (group, reward, action mask): equal rewards in group c; a token the environment wrote in two answers; one unknown.
ANSWERS: list[tuple[str, float | None, list[int]]] = [
    ("a", 1.0, [1, 1, 1]), ("a", 0.0, [1, 1, 0, 1, 1, 1]), ("a", 0.0, [1]), ("b", 0.5, [1, 1, 1, 1]),
    ("b", 1.0, [1] * 10), ("b", 0.5, [1, 0, 1]), ("b", None, [1, 1]), ("c", 0.25, [1, 1]), ("c", 0.25, [1] * 9),
]  # fmt: skip


@dataclass
class Answer:
    """One answer with a known reward, seen by a plain pass of the model."""

    p: Tensor
    q: Tensor
    ref: Tensor
    H: Tensor
    r: float
    group: str

    @property
    def n(self) -> int:
        return len(self.p)


def plain(module: Any, t: Trajectory) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the sampled tokens by one pass of the transformers model."""
    logits = module(input_ids=torch.tensor([t.full_tokens]), use_cache=False).logits[0].double() / T
    table = logits.log_softmax(-1)[len(t.prompt_tokens) - 1 : -1]
    mask = torch.tensor(t.action_mask, dtype=torch.bool)
    chosen = table[torch.arange(len(table)), torch.tensor(t.response_tokens)]
    return chosen[mask], -(table.exp() * table).sum(-1)[mask]


def make_batch(module: Any, noise: float) -> list[Trajectory]:
    """The batch of ANSWERS: random tokens, q the policy's own log-probs moved by `noise`."""
    rng = np.random.default_rng(7)
    items: list[Trajectory] = []
    for i, (group, reward, mask) in enumerate(ANSWERS):
        prompt, response = (rng.integers(0, 15, n).tolist() for n in (2 + i % 3, len(mask)))
        t = Trajectory(
            "p", prompt, "r", response, reward=reward, action_mask=mask, group_id=group, rollout_id=str(i),
            temperature=T,
        )  # fmt: skip
        with torch.no_grad():
            own = iter((plain(module, t)[0].numpy() + noise * rng.normal(size=sum(mask))).tolist())
        t.logprobs = [next(own) if m else 0.0 for m in mask]
        items.append(t)
    return items


@dataclass
class FirstUpdate:
    """What update() did before its first optimizer step, and the same batch as a plain pass sees it."""

    gradient: dict[str, Tensor]
    measured: UpdateStatistics
    answers: list[Answer]
    module: Any
    batch: list[Trajectory]

    def agrees_with(self, loss: Tensor, *, value: bool = True) -> None:
        """Gradient and, where the two mean the same number, the loss, up to rounding."""
        loss.backward()
        expected = {k: p.grad for k, p in self.module.named_parameters() if p.grad is not None}
        assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
        assert_gradients_close(self.gradient, expected)
        if value:
            assert self.measured.loss == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-5)


def first_pass(
    client: Callable[..., Any], row: Algorithm, noise: float = 0.25, order: Sequence[int] = ()
) -> FirstUpdate:
    """One update on an engine whose policy has moved from the reference; `check` takes the gradient."""
    trainer = client("qwen3", name=f"policy{len(order)}", micro_tokens=64)
    old = copy.deepcopy(trainer._engine.model.module)
    reference = trainer.create_sampling_client()
    trainer.forward_backward(data(), "cross_entropy")
    trainer.optim_step(AdamParams(3e-2))
    module = copy.deepcopy(trainer._engine.model.module)
    batch = make_batch(module, noise)
    taken: list[dict[str, Tensor]] = []
    measured = update(
        trainer, row, [batch[i] for i in order] if order else batch, lambda n: AdamParams(0.0), Passes(),
        UpdateInputs(RunningBaseline(), M, T, reference=reference if row.needs_reference else None),
        check=lambda _: taken.append(gradients(trainer)),
    )  # fmt: skip
    answers: list[Answer] = []
    for t in batch:
        if t.reward is not None:
            (p, H), (ref, _) = plain(module, t), plain(old, t)
            q = torch.tensor([x for x, m in zip(t.logprobs, t.action_mask, strict=True) if m], dtype=torch.float64)
            answers.append(Answer(p, q, ref.detach(), H, t.reward, t.group_id))
    return FirstUpdate(taken[0], measured, answers, module, batch)


# Advantages once more, in numpy, from lists of what each answer earned.


def of_groups(answers: list[Answer], earned: Sequence[float], f: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    groups, values = np.array([a.group for a in answers]), np.array(earned)
    out = np.zeros(len(values))
    for g in set(groups.tolist()):
        out[groups == g] = f(values[groups == g])
    return out.tolist()


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / (x.std() + 1e-6)


def center(x: np.ndarray) -> np.ndarray:
    return x - x.mean()


def rewards(answers: list[Answer]) -> list[float]:
    return [a.r for a in answers]


def clipped_objective(answer: Answer, A: float, low: float, high: float) -> Tensor:
    """The PPO objective of each token, by cases rather than by a minimum."""
    r = (answer.p - answer.q).exp()
    bound = torch.full_like(r, high if A > 0 else low)
    binds = r > high if A > 0 else r < low
    return torch.where(binds, bound, r) * A


def part(answer: Answer, t: int) -> Answer:
    """The answer's token t alone."""
    one = slice(t, t + 1)
    return Answer(answer.p[one], answer.q[one], answer.ref[one], answer.H[one], answer.r, answer.group)


def mean_of_means(terms: list[Tensor]) -> Tensor:
    return torch.stack([t.mean() for t in terms]).mean()


def k3(answer: Answer) -> Tensor:
    return (answer.ref - answer.p).exp() - (answer.ref - answer.p) - 1


K = {
    "k1": lambda a: a.p - a.ref,
    "k2": lambda a: (a.p - a.ref) ** 2 / 2,
    "k3": k3,
}


def test_grpo_with_k3_in_the_loss(client: Callable[..., Any]) -> None:
    """1/N sum 1/n sum [min(ratio A, clip A) - beta k3], arXiv:2402.03300, eq. 3 and 4; TRL's loss_type grpo."""
    found = first_pass(
        client, resolve_algorithm("grpo_original", kl_coef=0.3, kl_in="loss", kl_estimator="k3"), noise=0.5
    )
    A = of_groups(found.answers, rewards(found.answers), standard)
    terms = [clipped_objective(x, a, 0.8, 1.2) - 0.3 * k3(x) for x, a in zip(found.answers, A, strict=True)]
    found.agrees_with(-mean_of_means(terms))
    pairs = [((x.p - x.q).exp(), a) for x, a in zip(found.answers, A, strict=True)]
    expected = {
        "low": sum(int((r < 0.8).sum()) for r, a in pairs if a < 0),
        "high": sum(int((r > 1.2).sum()) for r, a in pairs if a > 0),
    }
    assert found.measured.clipped == expected and min(expected.values()) > 0
    kl = [k3(x).detach() for x in found.answers]
    assert found.measured.metrics()["kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)
    assert found.measured.term_losses["kl"] == pytest.approx(0.3 * float(mean_of_means(kl)), rel=1e-4)


def test_dapo_with_its_overlong_penalty(client: Callable[..., Any]) -> None:
    """Equal groups out, A of rewards less the soft penalty, 1 / all tokens, 0.2 / 0.28: arXiv:2503.14476, eq. 8, 13."""
    found = first_pass(client, resolve_algorithm("dapo", overlong_buffer=5, overlong_penalty=0.5))
    kept = [x for x in found.answers if x.group != "c"]
    earned = [x.r - 0.5 * (0.0 if x.n <= 5 else (x.n - 5) / 5) for x in kept]
    A = of_groups(kept, earned, standard)
    found.agrees_with(-torch.cat([clipped_objective(x, a, 0.8, 1.28) for x, a in zip(kept, A, strict=True)]).mean())


def test_an_overlong_penalty_alone_keeps_a_group_by_its_returns(client: Callable[..., Any]) -> None:
    """Group c has equal rewards and an answer of nine tokens: with equal_by=return it is learned from."""
    found = first_pass(client, resolve_algorithm("grpo", overlong_buffer=5, overlong_penalty=0.25))
    earned = [x.r - 0.25 * (0.0 if x.n <= 5 else (x.n - 5) / 5) for x in found.answers]
    A = of_groups(found.answers, earned, center)
    assert [a for x, a in zip(found.answers, A, strict=True) if x.group == "c"] == pytest.approx([0.1, -0.1])
    terms = [clipped_objective(x, a, 0.8, 1.28) for x, a in zip(found.answers, A, strict=True)]
    found.agrees_with(-torch.cat(terms).mean())


def test_dr_grpo(client: Callable[..., Any]) -> None:
    """Centred rewards and the constant 1 / (N M), arXiv:2503.20783; TRL's loss_type dr_grpo."""
    found = first_pass(client, resolve_algorithm("dr_grpo"))
    A = of_groups(found.answers, rewards(found.answers), center)
    total = torch.cat([clipped_objective(x, a, 0.8, 1.2) for x, a in zip(found.answers, A, strict=True)]).sum()
    found.agrees_with(-total / (len(found.answers) * M))


def test_ppo_the_default(client: Callable[..., Any]) -> None:
    """Centred rewards of the groups that differ, the mean over their tokens, 0.2 / 0.28; TRL's loss_type bnpo."""
    found = first_pass(client, resolve_algorithm("ppo"))
    kept = [x for x in found.answers if x.group != "c"]
    A = of_groups(kept, rewards(kept), center)
    found.agrees_with(-torch.cat([clipped_objective(x, a, 0.8, 1.28) for x, a in zip(kept, A, strict=True)]).mean())


def test_gspo(client: Callable[..., Any]) -> None:
    """min(s A, clip(s) A) with s = exp(mean(p - q)) differentiated as it stands, arXiv:2507.18071, eq. 5 and 7."""
    found = first_pass(client, resolve_algorithm("gspo", clip_low=0.05, clip_high=0.1))
    A = of_groups(found.answers, rewards(found.answers), standard)
    each: list[Tensor] = []
    clip = 0
    for x, a in zip(found.answers, A, strict=True):
        s = (x.p - x.q).mean().exp()
        each.append(torch.minimum(s * a, s.clamp(0.95, 1.1) * a))
        clip += x.n * ((float(s.detach()) > 1.1 and a > 0) or (float(s.detach()) < 0.95 and a < 0))
    found.agrees_with(-torch.stack(each).mean())
    assert sum(found.measured.clipped.values()) == clip > 0


def test_cispo(client: Callable[..., Any]) -> None:
    """sg(clip(ratio, 0, 1.2)) A p over all tokens, arXiv:2506.13585, eq. 4 and 5; TRL's loss_type cispo."""
    found = first_pass(client, resolve_algorithm("cispo", clip_high=0.2))
    A = of_groups(found.answers, rewards(found.answers), standard)
    terms = [
        (x.p - x.q).exp().clamp(max=1.2).detach() * a * x.p for x, a in zip(found.answers, A, strict=True)
    ]  # fmt: skip
    found.agrees_with(-torch.cat(terms).mean())


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_dro_pulls_sampled_tokens_alone(reduction: str, client: Callable[..., Any]) -> None:
    """p A - beta / 2 (p - q)^2 at every sampled token, weighted: nothing at prompts or what the environment wrote."""
    found = first_pass(client, resolve_algorithm("dro", reduction=reduction, beta=0.4))
    A = of_groups(found.answers, rewards(found.answers), center)
    terms = [x.p * a - 0.2 * (x.p - x.q) ** 2 for x, a in zip(found.answers, A, strict=True)]
    whole = {
        "token_mean": torch.cat(terms).mean(),
        "sequence_mean": mean_of_means(terms),
        "constant": torch.cat(terms).sum() / (len(terms) * M),
    }
    found.agrees_with(-whole[reduction])


def test_rloo_on_policy_is_the_score_of_whole_answers(client: Callable[..., Any]) -> None:
    """1/N sum (r_i - mean of the others) grad log p(answer), arXiv:2402.14740, eq. 8."""
    found = first_pass(client, resolve_algorithm("rloo"), noise=0.0)
    A = of_groups(found.answers, rewards(found.answers), lambda x: x - (x.sum() - x) / (len(x) - 1))
    total = torch.stack([a * x.p.sum() for x, a in zip(found.answers, A, strict=True)])
    found.agrees_with(-total.mean(), value=False)


def test_reinforce_with_a_sampled_entropy_bonus(client: Callable[..., Any]) -> None:
    """On the policy's own samples: grad log p weighed by A - coefficient x log p, whatever the reward says."""
    found = first_pass(client, resolve_algorithm("reinforce", entropy_coef=0.1), noise=0.0)
    A = center(np.array(rewards(found.answers)))
    total = [((a - 0.1 * x.p.detach()) * x.p).sum() for x, a in zip(found.answers, A, strict=True)]
    found.agrees_with(-torch.stack(total).mean(), value=False)
    weighted = torch.stack([x.p.detach().sum() for x in found.answers]).mean()
    assert found.measured.term_losses["entropy"] == pytest.approx(0.1 * float(weighted), rel=1e-4)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_an_exact_entropy_bonus(reduction: str, client: Callable[..., Any]) -> None:
    """The loss less coefficient x the entropy of every distribution that a token was drawn from, at temperature T."""
    row = resolve_algorithm("dr_grpo", reduction=reduction, entropy_coef=0.2, entropy="exact")
    found = first_pass(client, row)
    A = of_groups(found.answers, rewards(found.answers), center)
    terms = [clipped_objective(x, a, 0.8, 1.2) + 0.2 * x.H for x, a in zip(found.answers, A, strict=True)]
    bonus = [0.2 * x.H.detach() for x in found.answers]
    token = reduction == "token_mean"
    found.agrees_with(-(torch.cat(terms).mean() if token else mean_of_means(terms)))
    expected = -float(torch.cat(bonus).mean() if token else mean_of_means(bonus))
    assert found.measured.term_losses["entropy"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("cap", [1.0, 1.3, 50.0])
def test_importance_cap_weighs_by_the_trainers_own_log_probs(cap: float, client: Callable[..., Any]) -> None:
    """First pass: sg(min(p_trainer / p_sampler, cap)) A grad p; no token is clipped, all ratios being 1."""
    found = first_pass(client, resolve_algorithm("dr_grpo", importance_cap=cap), noise=0.6)
    A = of_groups(found.answers, rewards(found.answers), center)
    terms = [(x.p - x.q).exp().clamp(max=cap).detach() * a * x.p for x, a in zip(found.answers, A, strict=True)]
    found.agrees_with(-torch.cat(terms).sum() / (len(terms) * M), value=False)
    assert found.measured.clipped_share == 0, "the loss clipped nothing: its ratios are to the trainer's log-probs"


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("floor", [0.0, 0.9])
def test_importance_weights_of_tokens_or_completions_are_truncated_or_masked(
    mode: str, floor: float, client: Callable[..., Any]
) -> None:
    """First pass: sg(w) A grad p, w of the ratio of a token or of the product over the answer's sampled tokens."""
    row = resolve_algorithm("dr_grpo", importance_cap=1.5, importance_floor=floor, importance_mode=mode)
    found = first_pass(client, row, noise=0.4)
    A, terms, weights = of_groups(found.answers, rewards(found.answers), center), list[Tensor](), list[Tensor]()
    for x, a in zip(found.answers, A, strict=True):
        gap = (x.p - x.q).detach()
        ratio = (gap.sum().expand(x.n) if "sequence" in mode else gap).exp()
        kept = ratio.clamp(floor, 1.5) if "truncate" in mode else ratio * (ratio >= floor) * (ratio <= 1.5)
        terms.append(kept * a * x.p)
        weights.append(kept)
    found.agrees_with(-torch.cat(terms).sum() / (len(terms) * M), value=False)
    every = torch.cat(weights)
    if "truncate" in mode:
        assert (every == 1.5).any() and (every < 1.5).any() and (not floor or (every == floor).any())
        assert "importance/masked" not in found.measured.metrics()
    else:
        assert 0 < (every == 0).double().mean() < 1
        assert found.measured.metrics()["importance/masked"] == pytest.approx(float((every == 0).double().mean()))


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        # Ratios 2, 1/4 and 1, and one token of the environment's; of the completion 1/2.
        ("token_truncate", [1.5, 0.4, 1.0]),
        ("token_mask", [0.0, 0.0, 1.0]),
        ("sequence_truncate", [0.5, 0.5, 0.5]),
        ("sequence_mask", [0.5, 0.5, 0.5]),
    ],
)
def test_importance_weights_by_hand(mode: str, weights: list[float]) -> None:
    gap, mask = np.log([2.0, 0.25, 9.0, 1.0]), np.array([True, True, False, True])
    term = Importance(cap=1.5, floor=0.4, mode=mode)
    assert term.compute_weights(gap, mask)[mask] == pytest.approx(weights)
    if mode == "sequence_mask":
        assert not Importance(cap=1.5, floor=0.6, mode=mode).compute_weights(gap, mask).any()
    at_the_bounds = Importance(cap=1.0, floor=1.0, mode=mode).compute_weights(np.zeros(4), mask)
    assert at_the_bounds[mask].tolist() == [1.0, 1.0, 1.0], "both bounds are kept"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward(estimator: str, client: Callable[..., Any]) -> None:
    """r - coefficient x sum of k over the answer's sampled tokens, k between the sampler's log-probs and ref's."""
    found = first_pass(client, resolve_algorithm("dr_grpo", kl_coef=0.2, kl_estimator=estimator))
    earned: list[float] = []
    for x in found.answers:
        sampled = Answer(x.q, x.q, x.ref, x.H, x.r, x.group)
        earned.append(x.r - 0.2 * float(K[estimator](sampled).sum()))
    A = of_groups(found.answers, earned, center)
    total = torch.cat([clipped_objective(x, a, 0.8, 1.2) for x, a in zip(found.answers, A, strict=True)]).sum()
    found.agrees_with(-total / (len(found.answers) * M))
    assert found.measured.term_losses["kl"] == 0.0


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_reinforce_plus_plus(kl_coef: float, client: Callable[..., Any]) -> None:
    """A_t = r - beta sum_(i >= t) KL_i, standardized over all tokens; PPO's clip and token mean: arXiv:2501.03262."""
    found = first_pass(client, resolve_algorithm("reinforce_pp", kl_coef=kl_coef))
    to_go = [np.array([float((x.q - x.ref)[t:].sum()) for t in range(x.n)]) for x in found.answers]
    earned = [x.r - kl_coef * kl for x, kl in zip(found.answers, to_go, strict=True)]
    A = iter(standard(np.concatenate(earned)).tolist())
    objectives = [clipped_objective(part(x, t), next(A), 0.8, 1.2) for x in found.answers for t in range(x.n)]
    found.agrees_with(-torch.cat(objectives).mean())


REDUCED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sequence_mean": lambda parts: torch.stack([p.mean() if len(p) else p.sum() for p in parts]).mean(),
    "token_mean": lambda parts: torch.cat(parts).mean(),
    "sequence_sum": lambda parts: torch.cat(parts).sum() / len(parts),
    "constant": lambda parts: torch.cat(parts).sum() / (len(parts) * M),
}


@pytest.mark.parametrize("reduction", sorted(REDUCED))
def test_echo_learns_what_the_environment_wrote(reduction: str, client: Callable[..., Any]) -> None:
    """-coefficient x log p of every token that the environment wrote, reduced over those alone, beside GRPO's loss.

    Answers without any count in the denominators: ECHO, arXiv:2605.24517.
    """
    found = first_pass(client, resolve_algorithm("echo", reduction=reduction, observation_coef=0.5))
    A = of_groups(found.answers, rewards(found.answers), standard)
    terms = [clipped_objective(x, a, 0.8, 1.2) for x, a in zip(found.answers, A, strict=True)]
    written: list[Tensor] = []
    for t in found.batch:
        if t.reward is not None:
            turned = replace(t, action_mask=[1 - acted for acted in t.action_mask])
            written.append(plain(found.module, turned)[0])
    predicted = REDUCED[reduction](written)
    expected = float(-0.5 * predicted.detach())
    nll = -float(torch.cat(written).detach().mean())
    found.agrees_with(-REDUCED[reduction](terms) - 0.5 * predicted)
    assert found.measured.term_losses["observation"] == pytest.approx(expected, rel=1e-4)
    assert found.measured.metrics()["observation"] == pytest.approx(nll, rel=1e-4)
    assert sum(map(len, written)) == 2


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_loss(estimator: str, client: Callable[..., Any]) -> None:
    """coefficient x k at every sampled token, in the weights of the reduction; also where the advantage is 0."""
    row = resolve_algorithm("dr_grpo", reduction="sequence_mean", kl_coef=0.5, kl_in="loss", kl_estimator=estimator)
    found = first_pass(client, row)
    A = of_groups(found.answers, rewards(found.answers), center)
    terms = [clipped_objective(x, a, 0.8, 1.2) - 0.5 * K[estimator](x) for x, a in zip(found.answers, A, strict=True)]
    found.agrees_with(-mean_of_means(terms))


EVERYTHING = {"kl_coef": 0.3, "kl_in": "loss", "kl_estimator": "k3", "entropy_coef": 0.2, "entropy": "exact"}


@pytest.mark.parametrize(
    "row",
    [
        resolve_algorithm("grpo_original", **EVERYTHING),
        resolve_algorithm("dro", reduction="sequence_mean", importance_cap=1.5, **EVERYTHING),
        resolve_algorithm("gspo", clip_low=0.1, clip_high=0.1, kl_coef=0.2, entropy_coef=0.1),
    ],
    ids=lambda row: row.name,
)
def test_the_order_of_a_batch_changes_no_gradient(row: Algorithm, client: Callable[..., Any]) -> None:
    """Every option at once, the batch as it is and shuffled: one gradient up to rounding."""
    one = first_pass(client, row)
    other = first_pass(client, row, order=[4, 8, 0, 2, 7, 1, 6, 3, 5])
    assert_gradients_close(one.gradient, other.gradient)


def test_leaving_out_rows_without_advantage_changes_no_gradient(client: Callable[..., Any]) -> None:
    """Group c sent along with its zero advantages, by hand: the same gradient as without it."""
    from rlvr.algorithms.update import make_datum

    row = resolve_algorithm("grpo_original")
    found = first_pass(client, row)
    trainer = client("qwen3", name="all")
    trainer._engine.model.module.load_state_dict(found.module.state_dict())
    known = [t for t in found.batch if t.reward is not None]
    count = len(known)
    rows = [make_datum(row, t, 1 / (count * t.num_action_tokens)) for t in known]
    trainer.forward_backward(rows, "ppo", {**row.loss.config(), "temperature": T})
    assert found.measured.trajectories == count - 2
    assert_gradients_close(gradients(trainer), found.gradient)
