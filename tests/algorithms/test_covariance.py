"""Covariance clipping: which tokens by hand, their gradient, that cutting a batch changes nothing, and the entropy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.terms.covariance import ClipCovariance, clip_covariance, compute_covariances
from rlvr.algorithms.update import Passes, StreamPlan, UpdateInputs, make_datum, update, update_streamed
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.messages import AdamParams, Datum
from rlvr.core.types import Trajectory
from tests.kit.table_trainer import make_trainer
from tests.kit.tiny_run import TINY, attempt, stored_steps


def answers() -> list[Trajectory]:
    """Sampled tokens of log-prob -0.5, -2.5 with advantage 1, and -1, -4 with -1; one between was written."""
    return [
        Trajectory("p", [9], "r", [1, 2], [-0.5, -2.5], advantage=1.0),
        Trajectory("p", [9], "r", [3, 7, 4], [-1.0, 0.0, -4.0], advantage=-1.0, action_mask=[1, 0, 1]),
    ]


def test_covariances_by_hand() -> None:
    """Means -2 and 0: 1.5 x 1, -0.5 x 1, 1 x -1, -2 x -1."""
    found = compute_covariances(np.array([-0.5, -2.5, -1.0, -4.0]), np.array([1.0, 1.0, -1.0, -1.0]))
    assert found.tolist() == [1.5, -0.5, -1.0, 2.0]


def term_of(algorithm: Algorithm) -> ClipCovariance:
    term = algorithm.term(ClipCovariance)
    assert term is not None
    return term


@pytest.mark.parametrize(
    ("fields", "share", "first", "second"),
    [
        ({"clip_cov_ratio": 0.5}, 0.5, [0.0, 1.0], [-1.0, -1.0, 0.0]),
        ({"clip_cov_ratio": 1.0, "clip_cov_ub": 1.8}, 0.25, [0.0, 1.0], [-1.0, -1.0, -1.0]),
        ({"clip_cov_ratio": 1.0, "clip_cov_lb": 1.5}, 0.25, [1.0, 1.0], [-1.0, -1.0, 0.0]),
        ({"clip_cov_ratio": 1.0, "clip_cov_lb": 2.0}, 0.0, [1.0, 1.0], [-1.0, -1.0, -1.0]),
        ({"clip_cov_ratio": 1.0, "clip_cov_lb": -9.0}, 1.0, [0.0, 0.0], [0.0, -1.0, 0.0]),
    ],
)
def test_the_drawn_tokens_have_advantage_zero(
    fields: dict[str, float], share: float, first: list[float], second: list[float]
) -> None:
    """The bounds are excluded; a token that the policy did not sample is never drawn and in no mean."""
    items = answers()
    assert clip_covariance(items, term_of(resolve_algorithm("grpo", **fields)), key=1) == share
    assert [t.response_advantages for t in items] == [first, second]


def test_at_least_one_token_is_drawn_and_each_candidate_alike() -> None:
    row, counts = resolve_algorithm("grpo", clip_cov_ratio=0.0002), [0, 0]
    for key in range(400):
        items = answers()
        assert clip_covariance(items, term_of(row), key) == 0.25
        counts[items[0].response_advantages[0] == 0.0] += 1
    assert abs(counts[1] - 200) < 4 * math.sqrt(400 * 0.25)


def test_the_trainers_log_probs_take_the_samplers_place() -> None:
    """-4 of the last token is -1 for the trainer: the mean is -1.25, only the first covariance, 0.75 x 1, above 0."""
    items = answers()
    old = {id(items[0]): [-0.5, -2.5], id(items[1]): [-1.0, 0.0, -1.0]}
    row = resolve_algorithm("grpo", clip_cov_ratio=1.0, clip_cov_lb=0.7)
    assert clip_covariance(items, term_of(row), 1, lambda t: old[id(t)]) == 0.25
    assert items[0].response_advantages == [0.0, 1.0] and items[1].response_advantages == [-1.0] * 3


def test_nothing_to_draw_from() -> None:
    row = resolve_algorithm("grpo", clip_cov_ratio=0.5)
    empty = Trajectory("p", [], "", [], reward=1.0)
    assert clip_covariance([], term_of(row), 1) == clip_covariance([empty], term_of(row), 1) == 0.0


class RecordingClient(MockTrainingClient):
    """Keeps what it is sent for a gradient."""

    def __init__(self) -> None:
        super().__init__(TablePolicy(["a", "b", "c", "d"], seed=2, spread=2.0))
        self.sent: list[Datum] = []

    def _run(self, data: list[Datum], *args: Any, backward: bool, **how: Any) -> Any:
        self.sent += data if backward else []
        return super()._run(data, *args, backward=backward, **how)


def sample_answers(client: MockTrainingClient) -> list[Trajectory]:
    """Twelve answers of one to three tokens in three groups; each answer has a prompt of its own."""
    table_V = client.policy.logprobs()
    tokens = [[2 + (i * 3 + j) % 4 for j in range(1 + i % 3)] for i in range(12)]
    return [
        Trajectory(
            "p", [2] * (1 + i), "r", ids, table_V[ids].tolist(), reward=float(ids[0] == 2), group_id=str(i // 4),
            rollout_id=str(i),
        )
        for i, ids in enumerate(tokens)
    ]  # fmt: skip


FIELDS = {"advantage": "batch_normalized", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}


def drawn_tokens(passes: Passes, key: int = 5) -> list[tuple[int, int]]:
    """(answer, place) of the tokens that were drawn; all others were sent with an advantage, once an epoch."""
    client = RecordingClient()
    inputs = UpdateInputs(RunningBaseline(), 4, key=key)
    items, row = sample_answers(client), resolve_algorithm("ppo", **FIELDS)
    found = update(client, row, items, lambda n: AdamParams(0.01), passes, inputs)
    assert found.metrics()["clip_ratio/cov_mean"] == pytest.approx(4 / 24), "floor(0.2 x 24) of 24 tokens"
    assert sum(np.count_nonzero(d.loss_fn_inputs["advantages"].data) for d in client.sent) == 20 * passes.epochs
    return [(i, place) for i, t in enumerate(items) for place, a in enumerate(t.response_advantages) if a == 0]


def test_optimizer_steps_and_epochs_of_a_batch_have_the_same_draw() -> None:
    """Cut into any number of optimizer steps, used twice: the same four tokens. Another step has others."""
    once = drawn_tokens(Passes())
    assert len(once) == 4 and once == drawn_tokens(Passes(1, 6)) == drawn_tokens(Passes(2, 3))
    assert once != drawn_tokens(Passes(), key=6)


def test_with_an_importance_cap_an_update_draws_by_the_trainers_log_probs() -> None:
    """However the sampler's differ: then the draw is the same, and without the cap it is another one."""

    def draw(shift: float, **fields: Any) -> list[list[float]]:
        client = RecordingClient()
        items, row = sample_answers(client), resolve_algorithm("ppo", **FIELDS, **fields)
        for i, t in enumerate(items):
            t.logprobs = [q - shift * (i % 3) for q in t.logprobs]
        update(client, row, items, lambda n: AdamParams(0.01), Passes(), UpdateInputs(RunningBaseline(), 4))
        return [t.response_advantages for t in items]

    assert draw(0.5, importance_cap=2.0) == draw(0.0, importance_cap=2.0) == draw(0.0) != draw(0.5)


def test_the_gradient_is_that_of_the_tokens_that_were_not_drawn() -> None:
    """Against central differences of PPO's loss, written out over these tokens alone."""
    client = RecordingClient()
    items, row = sample_answers(client), resolve_algorithm("ppo", **FIELDS)
    selected = row.select(items)
    plain = [t.advantage for t in items]
    clip_covariance(selected, term_of(row), key=5)
    rows = row.weigh(selected, 4)
    client.forward_backward([make_datum(row, t, w) for t, w in rows], "ppo", row.loss.config()).result()
    found = client.policy.gradient
    logits = client.policy.logits.astype(np.float64)

    def loss(at: np.ndarray) -> float:
        log_p = at - np.log(np.exp(at).sum())
        kept = [
            (np.exp(log_p[token] - q), advantage)
            for t, advantage in zip(items, plain, strict=True)
            for token, q, a in zip(t.response_tokens, t.logprobs, t.response_advantages, strict=True)
            if a
        ]
        return -sum(min(r * a, min(max(r, 0.8), 1.28) * a) for r, a in kept) / 24

    expected = [(loss(logits + step) - loss(logits - step)) / 2e-5 for step in 1e-5 * np.eye(len(logits))]
    assert np.asarray(found) == pytest.approx(np.array(expected), abs=1e-4)


def test_a_step_lowers_the_entropy_less() -> None:
    """The answers of the table's likeliest words are right, so a plain step makes them likelier still."""

    def entropy_after(**fields: float) -> float:
        client = RecordingClient()
        best = set(np.argsort(client.policy.logprobs())[-2:].tolist())
        items = sample_answers(client)
        for t in items:
            t.reward = float(t.response_tokens[0] in best)
        row = resolve_algorithm("ppo", advantage="batch_normalized", **fields)
        update(client, row, items, lambda n: AdamParams(0.3), Passes(), UpdateInputs(RunningBaseline(), 4))
        log_p = client.policy.logprobs()
        return float(-(np.exp(log_p) * log_p).sum())

    assert entropy_after(clip_cov_ratio=1.0, clip_cov_lb=0.5) > entropy_after() + 0.01


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("grpo", {"clip_cov_ratio": 1.5}, "algorithm.clip_cov_ratio=1.5, expected a share of the tokens"),
        ("grpo", {"clip_cov_ratio": 0.1, "clip_cov_lb": 5.0}, "clip_cov_lb=5, clip_cov_ub=5; expected lb < ub"),
        ("grpo", {"clip_cov_ratio": 0.1, "clip_cov_ub": math.nan}, "algorithm.clip_cov_ub=nan"),
        ("raft", {"clip_cov_ratio": 0.1}, "no effect with the advantage 'acceptance'"),
        ("dpo", {"clip_cov_ratio": 0.1}, "algorithm.clip_cov_ratio=0.1 has no effect on the loss 'dpo'"),
    ],
)
def test_what_clips_nothing_is_refused(name: str, fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_algorithm(name, **fields)


def test_parts_of_a_batch_are_refused() -> None:
    cells = {"reduction": "constant", "clip_cov_ratio": 0.1}
    with pytest.raises(ValueError, match="clip_cov_ratio draws tokens of the whole batch"):
        make_trainer(cells=cells, num_minibatches=2, schedule="fixed_lag")
    row = resolve_algorithm("grpo", **cells)
    with pytest.raises(ValueError, match="use update"):
        update_streamed(
            RecordingClient(), row, [], lambda n: AdamParams(0.1), StreamPlan(1, 1, 4),
            UpdateInputs(RunningBaseline(), 4),
        )  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_draws_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    fields = ["algorithm.name=reinforce_pp", "algorithm.clip_cov_ratio=0.1", "algorithm.clip_cov_lb=0"]
    words = [*fields, "training.control=random_reward"]
    attempt("tiny.yaml", *words, "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("tiny.yaml", *words, "run.name=killed", killed_at=2)
    attempt("tiny.yaml", *words, "run.name=killed")
    rows = stored_steps(tmp_path / "runs" / "whole")
    assert stored_steps(tmp_path / "runs" / "killed") == rows
    assert any(row.get("clip_ratio/cov_mean") for row in rows)
