"""Variants: what their declarations alone bring, and the parts of an algorithm as objects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from rlvr.algorithms import Algorithm, register_advantage, resolve_algorithm
from rlvr.algorithms.advantages import ADVANTAGES, GroupMeanAdvantage, MovingAverageAdvantage, RunningBaseline
from rlvr.algorithms.capabilities import check_supported
from rlvr.algorithms.critic import ValueCritic
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.losses.clipped import Cispo, Ppo
from rlvr.algorithms.losses.dro import Dro
from rlvr.algorithms.losses.policy_gradient import ImportanceSampling
from rlvr.algorithms.optimizers import OPTIMIZERS
from rlvr.algorithms.registry import ALGORITHMS
from rlvr.algorithms.terms import TERMS
from rlvr.algorithms.terms.distillation import Teacher
from rlvr.algorithms.terms.kl import Kl
from rlvr.algorithms.terms.overlong import Overlong
from rlvr.algorithms.update import StreamPlan, UpdateInputs, make_datum, update_streamed
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.messages import AdamParams
from rlvr.core.types import Trajectory
from rlvr.core.variants import Variant, Variants, make_variant, setting
from rlvr.tracking.trackers import TRACKERS
from rlvr.training.curriculum import CURRICULA
from rlvr.training.schedules import SCHEDULES


@dataclass(frozen=True)
class Fruit(Variant):
    kind = "fruit"
    section = "bowl"


@dataclass(frozen=True)
class Apple(Fruit):
    name = "apple"
    weight: float = setting(0.1, low=0, expected="at least 0 kg")
    colour: str = setting("red", choices=("red", "green"), flat="apple_colour")
    worms: int | None = setting(None, low=1, expected="at least 1, or null")
    is_ripe: bool = True


@dataclass(frozen=True)
class Pear(Fruit):
    name = "pear"
    weight: float = setting(0.2, low=0, expected="at least 0 kg", may_be_infinite=True)


FRUITS: Variants[Fruit] = Variants("bowl.fruit", Fruit, Apple, Pear)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weight": -1}, "bowl.fruit.weight=-1, expected at least 0 kg"),
        ({"weight": math.nan}, "bowl.fruit.weight=nan, expected"),
        ({"weight": math.inf}, "bowl.fruit.weight=inf, expected"),
        ({"weight": True}, "bowl.fruit.weight=True, expected"),
        ({"weight": "heavy"}, "bowl.fruit.weight='heavy', expected"),
        ({"weight": None}, "bowl.fruit.weight=None, expected"),
        ({"worms": 0}, "bowl.fruit.worms=0, expected at least 1, or null"),
        ({"colour": "gren"}, r"bowl.apple_colour='gren' is unknown \(did you mean 'green'\?\); known: red, green"),
    ],
)
def test_an_option_is_what_its_declaration_allows(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Apple(**options)
    assert Apple(worms=3).worms == 3 and Pear(math.inf).weight == math.inf


def test_another_variant_and_its_options() -> None:
    assert FRUITS.vary(Apple(0.3), None, {"apple_colour": "green"}) == Apple(0.3, "green")
    assert (
        FRUITS.vary(Apple(0.3), "pear", {}) == Pear()
        and FRUITS.vary(Apple(0.3), None, {"fruit.weight": None}) == Apple()
    )
    with pytest.raises(ValueError, match=r"bowl.apple_colour=red has no effect: the fruit 'pear' has no apple_colour"):
        FRUITS.vary(Apple(), "pear", {"apple_colour": "red"})
    with pytest.raises(ValueError, match=r"bowl.fruit='plum' is unknown; known: apple, pear"):
        FRUITS.find("plum")
    with pytest.raises(ValueError, match="expected a class that extends Fruit"):
        FRUITS.find("math:pi")
    with pytest.raises(ValueError, match="'pear' is registered already"):
        FRUITS.add(type("Other", (Pear,), {}))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_flat_keys_say_all_of_a_spec(name: str) -> None:
    """From another spec: the flat keys of one make it, but for its terms that the other has besides."""
    spec = ALGORITHMS[name]
    other = resolve_algorithm("distillation" if spec.needs_teacher else "reinforce")
    made = other.with_flat(spec.flat)
    assert (made.advantage, made.loss, made.terms) == (spec.advantage, spec.loss, spec.terms)
    assert made.flat == spec.flat


def test_an_algorithm_takes_parts_by_name_and_as_objects() -> None:
    assert Algorithm("mine", "group_mean", Ppo(0.1, 0.2), "token_mean").advantage == GroupMeanAdvantage()
    for wrong in (3, Ppo, Kl(0.1)):
        with pytest.raises(ValueError, match=r"algorithm.loss=.*expected a name, or a Loss"):
            Algorithm("mine", "group_mean", wrong, "token_mean")  # type: ignore[arg-type]
    terms = (Overlong(2), Kl(0.1), Teacher(0.0))
    spec = Algorithm("mine", "group_mean", "importance_sampling", "token_mean", terms)  # type: ignore[arg-type]
    assert spec.terms == (Kl(0.1), Overlong(2)), "in the order of an update, and without one of weight 0"
    with pytest.raises(ValueError, match="the term kl is given twice"):
        Algorithm("mine", GroupMeanAdvantage(), Ppo(0.1, 0.1), "token_mean", (Kl(0.1), Overlong(2), Kl(0.2)))


def test_only_cispo_inherits_the_bounds_of_ppo() -> None:
    assert resolve_algorithm("ppo", loss="cispo").loss == Cispo(0.2, 0.28)
    assert resolve_algorithm("ppo", loss="dro").loss == Dro()
    with pytest.raises(ValueError, match=r"algorithm.loss=gspo clips: give algorithm.clip_low and algorithm.clip_high"):
        resolve_algorithm("ppo", loss="gspo")
    assert resolve_algorithm("ppo", clip_high=math.inf).loss == Ppo(0.2, math.inf)


def test_a_moving_average_begins_with_its_decay() -> None:
    assert MovingAverageAdvantage(0.5).start_baseline() == RunningBaseline(0.5)
    assert GroupMeanAdvantage().start_baseline() == RunningBaseline(0.99)


def test_any_callable_is_an_advantage() -> None:
    register_advantage("test_partial")(partial(lambda shift, returns: [r - shift for r in returns], 1.0))
    assert "test_partial" in ADVANTAGES and not ADVANTAGES.find("test_partial")().is_groupwise


def test_a_critic_does_not_learn_from_what_is_still_arriving() -> None:
    client = MockTrainingClient(TablePolicy(["a"]))
    critic = ValueCritic(client, lambda n: AdamParams(0.1))
    with pytest.raises(ValueError, match=r"the critic of algorithm.advantage=gae learns from the whole batch"):
        update_streamed(
            client, resolve_algorithm("ppo_critic"), [], lambda n: AdamParams(0.1), StreamPlan(1, 1, 1),
            UpdateInputs(RunningBaseline(), 1, critic=critic),
        )  # fmt: skip


def test_every_part_says_what_it_does() -> None:
    for variants in (LOSSES, ADVANTAGES, TERMS, SCHEDULES, OPTIMIZERS, CURRICULA, TRACKERS):
        for variant in variants.classes():
            if variant.__module__.startswith("rlvr."):
                assert variant.__doc__ and not variant.__doc__.startswith(variant.__name__), variant


def test_a_loss_that_is_registered_later_is_computed_by_name() -> None:
    """Half of the importance-sampling term: r A / 2, with r = exp(p - q)."""

    @dataclass(frozen=True)
    class Half(ImportanceSampling):
        name = "test_half"

        @staticmethod
        def numpy_terms(p: Any, inputs: Any, config: Any, row_N: Any) -> tuple[Any, Any]:
            terms, slopes = ImportanceSampling.numpy_terms(p, inputs, config, row_N)
            return terms / 2, slopes / 2

    LOSSES.add(Half)
    client = MockTrainingClient(TablePolicy(["a", "b"]))
    algorithm = resolve_algorithm("reinforce", loss="test_half")
    check_supported(algorithm, client.capabilities)
    data = [make_datum(algorithm, Trajectory("a", [0], "b", [1], [-0.5], advantage=3.0), 1.0)]
    half = client.forward_backward(data, "test_half").result().metrics["loss:sum"]
    whole = client.forward_backward(data, "importance_sampling").result().metrics["loss:sum"]
    assert half == pytest.approx(whole / 2) and whole != 0


def test_options_of_a_config_have_the_types_that_are_declared() -> None:
    made = make_variant("fruit 'm:Basket'", Basket, {"size": 3, "names": ["a"]})
    assert made == Basket(3.0, ("a",)) and isinstance(made.size, float) and isinstance(made.names, tuple)
    for kwargs, said in (
        ({"size": "3"}, r"fruit 'm:Basket': size='3': input should be a valid number"),
        ({"sise": 3}, r"fruit 'm:Basket' does not take 'sise' \(did you mean 'size'\?\)"),
        ({"size": -1}, "bowl.fruit.size=-1.0, expected at least 0"),
    ):
        with pytest.raises(ValueError, match=said):
            make_variant("fruit 'm:Basket'", Basket, kwargs)


@dataclass(frozen=True)
class Basket(Fruit):
    size: float = setting(1.0, low=0, expected="at least 0")
    names: tuple[str, ...] = ()
