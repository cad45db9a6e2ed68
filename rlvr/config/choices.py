"""Choices of a config that have options of their own: sections whose `name` says which variant, beside its options.

    algorithm:
      loss: {name: ppo, clip_low: 0.2, clip_high: 0.28}     # or `loss: ppo`, with the options that the spec gives it
      terms: {kl: {coef: 0.001, where: loss}}                  # a term is there if its switch is

The sections follow from the variants (`rlvr.core.variants`). Flat keys (`algorithm.kl_coef`) are aliases of their
options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from typing import Any

from rlvr.algorithms.advantages import ADVANTAGES
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.registry import ALGORITHMS
from rlvr.algorithms.terms import TERMS
from rlvr.clients.client_options import ClientOptions
from rlvr.clients.registry import CLIENTS, make_options, resolve_client
from rlvr.clients.samplers import SAMPLERS
from rlvr.config.compose import move_keys
from rlvr.core.variants import Section, Variant, Variants, make_overrides, make_section, setting_of
from rlvr.training.schedules import SCHEDULES

# Sections that a bare word may stand for, and the key in them that it gives: `algorithm=dapo`, `reward=exact_match`.
SHORTHANDS = {
    **dict.fromkeys(
        ("algorithm", "algorithm.advantage", "algorithm.loss", "client", "env", "model", "sampler"), "name"
    ),
    **dict.fromkeys(("training.schedule", "training.optimizer", "training.critic.optimizer", "sft.optimizer"), "name"),
    "reward": "type",
    "curriculum": "by",
}

FORMER_SECTIONS = ("sharding",)  # what they held is elsewhere now


def make_client_section(name: str) -> Any:
    """The section of a client with its defaults."""
    return ClientSection(name=name)


class _ChosenLater(Section):
    """A section that is checked with the rest of a run's config."""

    def __post_init__(self) -> None:
        pass


def choose_client(section: Any) -> ClientOptions:
    """The options of the client that a section names."""
    taken = (
        {option.name for option in fields(CLIENTS.find(section.name))}
        if CLIENTS.is_built_in(section.name)
        else set[str]()
    )
    return make_options(section.name, {name: getattr(section, name) for name in taken}, section.kwargs)


AdvantageOptions = make_overrides("AdvantageOptions", ADVANTAGES.classes())
LossOptions = make_overrides("LossOptions", LOSSES.classes())
ClientSection = make_section("ClientSection", CLIENTS, ("name", str, "local"), base=_ChosenLater)
SamplerSection = make_section("SamplerSection", SAMPLERS, ("name", str, "trainer"), base=_ChosenLater)
_OF_TERMS = {term.name: make_overrides(f"{term.__name__}Options", [term], named=False) for term in TERMS.classes()}
TermOptions = make_dataclass(
    "TermOptions",
    [(name, section, field(default_factory=section)) for name, section in _OF_TERMS.items()],
    frozen=True,
)


def client_key(name: str, option: str) -> str:
    """The key of a client's option: in `kwargs` for a client that does not come with the package."""
    return f"client.{option}" if CLIENTS.is_built_in(name) else f"client.kwargs.{option}"


def list_secret_keys(name: str) -> list[str]:
    """The keys of a client's options that are never written down."""
    known = [option.name for client in CLIENTS.classes() for option in fields(client) if setting_of(option).is_secret]
    own = () if CLIENTS.is_built_in(name) else fields(resolve_client(name).options)
    return [f"client.{option}" for option in known] + [
        client_key(name, option.name) for option in own if setting_of(option).is_secret
    ]


def _list_flat() -> dict[str, str]:
    """Each flat key, and the key that it stands for."""
    keys: dict[str, str] = {}
    variants: list[type[Variant]] = [*LOSSES.classes(), *ADVANTAGES.classes(), *TERMS.classes(), *CLIENTS.classes()]
    variants += SCHEDULES.classes()
    for variant in variants:
        for option in fields(variant):
            if flat := setting_of(option).flat:
                keys[variant.full_key(flat)] = variant.full_key(f"{variant.place()}.{option.name}")
    return keys


FLAT = _list_flat()


def full_key(key: str) -> str:
    """The key that a flat key stands for, or a choice without a name; "" for a former section; other keys stay."""
    if key in FORMER_SECTIONS:
        return ""
    return f"{key}.{SHORTHANDS[key]}" if key in SHORTHANDS else FLAT.get(key, key)


def move_flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file with each option at its full key."""
    return move_keys(content, full_key)[0]


def drop_options_of_others(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The content of an older `resolved.yaml` without options of another advantage or loss than its own.

    Some were kept, though they had no effect.
    """
    held = stored.get("algorithm")
    if not isinstance(held, Mapping):
        return dict(stored)
    algorithm = dict(held)
    for part, variants in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        section = algorithm.get(part)
        if isinstance(section, Mapping) and (own := _list_own_options(algorithm, part, variants)) is not None:
            algorithm[part] = {key: value if key in ("name", *own) else None for key, value in section.items()}
    return {**stored, "algorithm": algorithm}


def _list_own_options(algorithm: Mapping[str, Any], part: str, variants: Variants[Any]) -> list[str] | None:
    """The options of the variant that a stored algorithm has; None if it does not come with the package, or is written
    as `${...}`."""
    named, name = algorithm[part].get("name"), algorithm.get("name") or "grpo"
    if named is None and name in ALGORITHMS:
        chosen = type(getattr(ALGORITHMS[name], part))
    elif isinstance(named, str) and variants.is_built_in(named):
        chosen = variants.find(named)
    else:
        return None
    return [option.name for option in fields(chosen)]


def get_at(config: Any, key: str) -> Any:
    """The value of a dotted key of a checked config."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def set_at(config: Any, key: str, value: Any) -> Any:
    """A checked config with another value of a dotted key."""
    first, _, rest = key.partition(".")
    return replace(config, **{first: set_at(getattr(config, first), rest, value) if rest else value})


def list_given(section: Any, prefix: str = "") -> dict[str, Any]:
    """The options of a choice that are given, by their dotted keys within it."""
    given: dict[str, Any] = {}
    for one in fields(section):
        value = getattr(section, one.name)
        if is_dataclass(value):
            given |= list_given(value, f"{prefix}{one.name}.")
        elif value is not None:
            given[f"{prefix}{one.name}"] = value
    return given
