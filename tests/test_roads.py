"""What works where: every option of the table is tried on every client, and works or is refused as the table says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlvr.algorithms import ALGORITHMS, Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import Memory
from rlvr.algorithms.roads import ROADS, check_roads, options, table
from rlvr.algorithms.rows import LOSSES
from rlvr.algorithms.update import Passes, update
from rlvr.clients.local import LocalTrainingClient
from rlvr.clients.mock import MockTrainingClient, TablePolicy
from rlvr.messages import AdamParams
from rlvr.types import Trajectory

CLIENTS = {"local": LocalTrainingClient, "mock": MockTrainingClient}
# The table's first column, and a row of the algorithm table that uses just this option.
OPTIONS: dict[str, Algorithm] = {
    "loss=importance_sampling": resolve_algorithm("reinforce"),
    "loss=ppo": resolve_algorithm("reinforce_pp"),
    "loss=cispo": resolve_algorithm("cispo"),
    "loss=dro": resolve_algorithm("dro"),
    "loss=gspo": resolve_algorithm("gspo"),
    "kl_in=reward": resolve_algorithm("reinforce", kl_coef=0.1),
    "kl_in=loss": resolve_algorithm("reinforce", kl_coef=0.1, kl_in="loss"),
    "entropy=sampled": resolve_algorithm("reinforce", entropy_coef=0.1),
    "entropy=exact": resolve_algorithm("reinforce", entropy_coef=0.1, entropy="exact"),
    "importance_cap": resolve_algorithm("reinforce", importance_cap=2.0),
    "mask_truncated": resolve_algorithm("reinforce", mask_truncated=True),
    "overlong_buffer": resolve_algorithm("reinforce", overlong_buffer=1),
}
ROWS = {line[0]: dict(zip(("road", *CLIENTS), line[1:], strict=True)) for line in table(CLIENTS)[1:]}


def made(kind: str, client: Callable[..., Any]) -> Any:
    return client("qwen3") if kind == "local" else MockTrainingClient(TablePolicy(["a", "b", "c"], spread=2.0))


def train(trainer: Any, row: Algorithm) -> Any:
    """A real update of three answers; the reference is the policy itself as it is now."""
    batch = [
        Trajectory("p", [2], "r", tokens, [-1.0] * len(tokens), reward=reward, group_id="g", rollout_id=str(i))
        for i, (tokens, reward) in enumerate((([2], 1.0), ([3, 4], 0.0), ([4], 0.0)))
    ]
    reference = trainer.save_weights_and_get_sampling_client()
    return update(
        trainer, row, batch, lambda n: AdamParams(0.01), Passes(), memory=Memory(), max_tokens=2, reference=reference
    )


@pytest.mark.parametrize("kind", sorted(CLIENTS))
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_every_option_works_or_is_refused_as_the_table_says(option: str, kind: str, client: Callable[..., Any]) -> None:
    """yes: an update steps the weights. no: `check_roads` names the option and the client, and the client refuses."""
    trainer, row = made(kind, client), OPTIONS[option]
    if ROWS[option][kind] == "yes":
        check_roads(row, trainer)
        assert train(trainer, row).updates == 1
        assert trainer.policy.version == 1
        return
    with pytest.raises(ValueError) as refused:
        check_roads(row, trainer)
    assert f"algorithm.{option}" in str(refused.value) and type(trainer).__name__ in str(refused.value)
    with pytest.raises(ValueError):
        train(trainer, row)
    assert trainer.policy.version == 0


def test_the_table_has_every_option_once() -> None:
    """The losses, and whatever `options` can say of a row; the roads are those that the module explains."""
    assert set(ROWS) == set(OPTIONS)
    assert {f"loss={loss}" for loss in LOSSES} <= set(ROWS)
    for option, row in OPTIONS.items():
        assert option in {o.key for o in options(row)}
        assert set(ROWS[option]["road"].split(" + ")) <= set(ROADS)
    assert table(CLIENTS)[0] == ["option", "road", "local", "mock"]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_row_has_a_road_on_both_clients(name: str) -> None:
    for client in CLIENTS.values():
        check_roads(ALGORITHMS[name], client)


def test_a_refusal_says_what_lacks_and_what_to_do() -> None:
    """Exact entropy on the table policy: the option, the road it needs, the client, and the remedy."""
    client = MockTrainingClient(TablePolicy(["a"]))
    with pytest.raises(ValueError) as refused:
        check_roads(OPTIONS["entropy=exact"], client)
    assert str(refused.value) == (
        "no road to the gradient: algorithm.entropy=exact: needs the road 'logits', which MockTrainingClient does not "
        "offer; use entropy=sampled"
    )


class Plain:
    """A client that says nothing of itself: the four primitives, and no more."""


class Narrow:
    losses, roads = frozenset({"ppo"}), frozenset({"advantage", "inputs"})


def test_a_client_that_says_nothing_is_taken_to_have_the_named_losses_alone() -> None:
    check_roads(resolve_algorithm("ppo", entropy_coef=0.1, importance_cap=2.0), Plain())
    for cells, remedy in (
        ({"kl_coef": 0.1, "kl_in": "loss"}, "use kl_in=reward"),
        ({"entropy_coef": 0.1, "entropy": "exact"}, "use entropy=sampled"),
        ({"kl_coef": 0.1}, "set kl_coef=0"),
    ):
        with pytest.raises(ValueError, match=f"Plain does not offer; {remedy}"):
            check_roads(resolve_algorithm("ppo", **cells), Plain())
    # The protocol's dro has no mask: it would pull on the prompt too.
    with pytest.raises(ValueError, match="loss=dro: needs the road 'custom', which Plain does not offer"):
        check_roads(resolve_algorithm("dro"), Plain())


def test_every_missing_road_is_named_at_once_and_a_missing_loss_with_those_there_are() -> None:
    row = resolve_algorithm("gspo", kl_coef=0.1, kl_in="loss", entropy_coef=0.1, entropy="exact")
    with pytest.raises(ValueError) as refused:
        check_roads(row, Narrow())
    said = str(refused.value)
    assert "algorithm.loss=gspo: Narrow has ppo" in said
    assert "algorithm.kl_in=loss" in said and "algorithm.entropy=exact" in said


def test_the_table_says_no_where_a_loss_or_its_road_is_missing() -> None:
    narrow = {line[0]: line[2] for line in table({"narrow": Narrow, "plain": Plain})[1:]}
    assert narrow["loss=ppo"] == "yes" and narrow["loss=gspo"] == "no"
    plain = {line[0]: line[3] for line in table({"narrow": Narrow, "plain": Plain})[1:]}
    assert plain["loss=gspo"] == "yes" and plain["loss=dro"] == "no"
