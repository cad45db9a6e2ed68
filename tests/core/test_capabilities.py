"""What works where: every option of the table is tried on every client, and works or is refused as the table says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlvr.algorithms import ALGORITHMS, Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.capabilities import check_supported, list_options, support_table
from rlvr.algorithms.critic import ValueCritic
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.update import Passes, UpdateInputs, update
from rlvr.clients.local import LocalTrainingClient
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.clients.registry import known_clients, resolve_client
from rlvr.core.messages import AdamParams
from rlvr.core.protocols import ClientCapabilities, Feature
from rlvr.core.types import Trajectory
from rlvr.training.informed_prompts import InformedPrompts

CLIENTS = {"local": LocalTrainingClient.capabilities, "mock": MockTrainingClient.capabilities}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def clip_of(loss: Any) -> dict[str, float]:
    return CLIP if "clip_low" in loss.flat_names() else {}


# The table's first column, and a row of the algorithm table that uses just this option.
OPTIONS: dict[str, Algorithm] = {
    **{
        f"loss={name}": resolve_algorithm(
            name if loss.compares_completions else "reinforce", loss=name, **clip_of(loss)
        )
        for name, loss in ((one.name, one) for one in LOSSES.classes())
    },
    "loss=package.module:function": resolve_algorithm("reinforce", loss="own_losses:ppo_form"),
    "kl_in=reward": resolve_algorithm("reinforce", kl_coef=0.1),
    "kl_in=loss": resolve_algorithm("reinforce", kl_coef=0.1, kl_in="loss"),
    "entropy=sampled": resolve_algorithm("reinforce", entropy_coef=0.1),
    "entropy=exact": resolve_algorithm("reinforce", entropy_coef=0.1, entropy="exact"),
    "teacher_coef": resolve_algorithm("reinforce", teacher_coef=0.1),
    "self_distillation_coef": resolve_algorithm("reinforce", self_distillation_coef=0.1),
    "importance_cap": resolve_algorithm("reinforce", importance_cap=2.0),
    "dual_clip": resolve_algorithm("reinforce", loss="ppo", dual_clip=3.0, **CLIP),
    "clip_cov_ratio": resolve_algorithm("reinforce", clip_cov_ratio=0.5, clip_cov_lb=-1.0),
    "observation_coef": resolve_algorithm("reinforce", observation_coef=0.1),
    "mask_truncated": resolve_algorithm("reinforce", mask_truncated=True),
    "overlong_buffer": resolve_algorithm("reinforce", overlong_buffer=1),
    "advantage=gae": resolve_algorithm("reinforce", advantage="gae"),
}
TABLE = support_table(CLIENTS.values())
ROWS = {line[0]: dict(zip(("needs", *CLIENTS), line[1:], strict=True)) for line in TABLE[1:]}


def make_client(kind: str, client: Callable[..., Any]) -> Any:
    return client("qwen3") if kind == "local" else MockTrainingClient(TablePolicy(["a", "b", "c"], spread=2.0))


def train(trainer: Any, row: Algorithm) -> Any:
    """A real update of three answers; the reference is the policy itself as it is now."""
    batch = [
        Trajectory("p", [2], "r", tokens, [-1.0] * len(tokens), reward=reward, group_id="g", rollout_id=str(i))
        for i, (tokens, reward) in enumerate((([2], 1.0), ([3, 4], 0.0), ([4], 0.0)))
    ]
    reference = trainer.save_weights_and_get_sampling_client()
    critic = ValueCritic(trainer.create_critic(), lambda n: AdamParams(0.01)) if row.advantage.takes_critic else None
    return update(
        trainer,
        row,
        batch,
        lambda n: AdamParams(0.01),
        Passes(),
        UpdateInputs(
            RunningBaseline(),
            2,
            reference=reference,
            teacher=reference,
            critic=critic,
            prompts=InformedPrompts(trainer.get_tokenizer()),
        ),
    )


@pytest.mark.parametrize("kind", sorted(CLIENTS))
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_every_option_works_or_is_refused_as_the_table_says(option: str, kind: str, client: Callable[..., Any]) -> None:
    """yes: an update steps the weights. no: `check_supported` names option and client, and the client refuses."""
    trainer, row = make_client(kind, client), OPTIONS[option]
    if ROWS[option][kind] == "yes":
        check_supported(row, trainer.capabilities)
        assert train(trainer, row).updates == 1
        assert trainer.policy.version == 1
        return
    with pytest.raises(ValueError) as refused:
        check_supported(row, trainer.capabilities)
    assert f"algorithm.{option}" in str(refused.value) and f"client={kind}" in str(refused.value)
    with pytest.raises(ValueError):
        train(trainer, row)
    assert trainer.policy.version == 0


def test_the_table_has_every_option_once() -> None:
    """The losses, and whatever `list_options` can say of an algorithm."""
    assert set(ROWS) == set(OPTIONS)
    assert {f"loss={loss}" for loss in LOSSES} <= set(ROWS)
    for option, row in OPTIONS.items():
        key = f"loss={row.loss.name}" if option == "loss=package.module:function" else option
        assert key in {o.key for o in list_options(row)}
    assert TABLE[0] == ["option", "needs", "local", "mock"]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_is_supported_by_every_client(name: str) -> None:
    """But for a critic, which a client has only if it says so."""
    for client in set(known_clients()):
        capabilities = resolve_client(client).capabilities
        if ALGORITHMS[name].advantage.takes_critic and Feature.CRITIC not in capabilities.features:
            with pytest.raises(ValueError, match=f"gae is not supported by client={client} .*without a critic"):
                check_supported(ALGORITHMS[name], capabilities)
        else:
            check_supported(ALGORITHMS[name], capabilities)


def test_a_refusal_names_the_option_the_client_the_missing_capability_and_the_remedy() -> None:
    with pytest.raises(ValueError) as refused:
        check_supported(OPTIONS["entropy=exact"], MockTrainingClient.capabilities)
    assert str(refused.value) == (
        "algorithm.entropy=exact is not supported by client=mock (it needs full logits); use entropy=sampled"
    )


PLAIN = ClientCapabilities("plain", frozenset(LOSSES))
NARROW = ClientCapabilities("narrow", frozenset({"ppo"}))


def test_a_client_without_features_accepts_options_that_change_only_advantages() -> None:
    check_supported(resolve_algorithm("ppo", entropy_coef=0.1, importance_cap=2.0), PLAIN)
    for overrides, remedy in (
        ({"kl_coef": 0.1, "kl_in": "loss"}, "use kl_in=reward"),
        ({"entropy_coef": 0.1, "entropy": "exact"}, "use entropy=sampled"),
        ({"kl_coef": 0.1}, "set kl_coef=0"),
    ):
        with pytest.raises(ValueError, match=f"client=plain .*; {remedy}"):
            check_supported(resolve_algorithm("ppo", **overrides), PLAIN)
    # The protocol's dro has no mask: it would pull on the prompt too.
    with pytest.raises(ValueError, match=r"loss=dro is not supported by client=plain .*inputs beside"):
        check_supported(resolve_algorithm("dro"), PLAIN)


def test_every_unsupported_option_is_named_at_once_and_a_missing_loss_with_those_there_are() -> None:
    row = resolve_algorithm("gspo", kl_coef=0.1, kl_in="loss", entropy_coef=0.1, entropy="exact")
    with pytest.raises(ValueError) as refused:
        check_supported(row, NARROW)
    message = str(refused.value)
    assert "algorithm.loss=gspo is not supported by client=narrow (its losses: ppo)" in message
    assert "algorithm.kl_in=loss" in message and "algorithm.entropy=exact" in message


def test_the_table_says_no_where_a_loss_or_a_feature_is_missing() -> None:
    rows = {line[0]: line[2:] for line in support_table([NARROW, PLAIN])[1:]}
    assert rows["loss=ppo"] == ["yes", "yes"] and rows["loss=gspo"] == ["no", "yes"]
    assert rows["loss=dro"] == ["no", "no"]
