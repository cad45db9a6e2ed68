"""Variants: the members of a kind that have options of their own, such as losses, each declared by one class.

    @dataclass(frozen=True)
    class Cispo(Loss):
        name = "cispo"
        clip_high: float = setting(3.0, low=0, expected="at least 0")

    LOSSES = Variants("algorithm.loss", Loss, Cispo)

A variant is a frozen dataclass with a `name`; its fields are its options. What an option may be is declared with it and
nowhere else: the check, the key in a config, its help and the refusal of an option that another variant has all follow.
A `Section` is the part of a config that chooses a variant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Optional, TypeVar, get_type_hints

from rlvr.core.plugins import describe_plugins, load_plugins
from rlvr.core.registry import check_kwargs, did_you_mean, load_object, note_own_name


@dataclass(frozen=True)
class Setting:
    """What an option may be: a number from `low` to `high`, or one of `choices`; null too if that is the default.

    `expected` says in words what a number may be; it is finite unless `may_be_infinite`. Beside `choices` it says what
    else the option may be, which its class checks. `flat` is a second key of an option, in the section of its kind:
    `kl_coef` in `algorithm` for `algorithm.terms.kl.coef`. An option that `is_secret` is never written down.
    """

    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    expected: str = ""
    flat: str = ""
    is_secret: bool = False
    may_be_infinite: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a value that is not null is allowed."""
        if self.choices:
            return bool(self.expected) or value in self.choices
        if not self.expected:
            return True
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high and (self.may_be_infinite or math.isfinite(value))


def setting(
    default: Any = MISSING,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    expected: str = "",
    flat: str = "",
    is_secret: bool = False,
    may_be_infinite: bool = False,
) -> Any:
    """A field of a variant, an option: its default, and what it may be.

    That is a number from `low` to `high`, in words `expected`, or one of `choices`; None too if that is the default.
    `flat` is a second key of it in the section of its kind. What `is_secret` is never written down.
    """
    declared = Setting(low, high, choices, expected, flat, is_secret, may_be_infinite)
    return field(default=default, repr=not is_secret, metadata={"setting": declared})


def setting_of(option: Field[Any]) -> Setting:
    """The `Setting` of a variant's field: its range or choices."""
    declared = option.metadata.get("setting")
    return declared if isinstance(declared, Setting) else Setting()


@dataclass(frozen=True)
class Variant:
    """The base of all variants. `kind` is the word for what it is a variant of, `section` the part of a config that
    its kind belongs to.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """ValueError for the first option that has a value which is not allowed."""
        for option in fields(self):
            self.check_option(option.name, getattr(self, option.name))

    @classmethod
    def check_option(cls, name: str, value: Any) -> None:
        """ValueError unless an option may have this value."""
        option = cls.__dataclass_fields__[name]
        declared = setting_of(option)
        if value is None and option.default is None:
            return
        if declared.choices and not declared.allows(value):
            raise ValueError(
                f"{cls.key(name)}={value!r} is unknown{did_you_mean(str(value), declared.choices)}; "
                f"known: {', '.join(declared.choices)}"
            )
        if not declared.allows(value):
            raise ValueError(f"{cls.key(name)}={value!r}, expected {declared.expected}")

    @classmethod
    def place(cls) -> str:
        """Where the options are in the section: `loss`, or `terms.kl`."""
        return cls.kind

    @classmethod
    def key(cls, option: str) -> str:
        """The shortest key of an option in a config."""
        return cls.full_key(cls.flat_names()[option])

    @classmethod
    def full_key(cls, key: str) -> str:
        """A key of the section, from the top of a config."""
        return f"{cls.section}.{key}" if cls.section else key

    @classmethod
    def flat_names(cls) -> dict[str, str]:
        """Each option and its shortest key in the section."""
        prefix = f"{cls.place()}." if cls.place() else ""
        return {option.name: setting_of(option).flat or f"{prefix}{option.name}" for option in fields(cls)}

    @classmethod
    def read_flat(cls, flat: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
        """`earlier` options with those of the flat keys; None takes an option's default."""
        names = {key: option for option, key in cls.flat_names().items()}
        options = dict(earlier)
        for key, value in flat.items():
            if value is not None:
                cls.check_option(names[key], value)
                options[names[key]] = value
            elif key in names:
                options.pop(names[key], None)
        return options

    @classmethod
    def inherit(cls, earlier: Variant) -> dict[str, Any]:
        """What this variant takes over of the one that it replaces: nothing, unless both mean the same by it."""
        return {}

    @property
    def options(self) -> dict[str, Any]:
        return {option.name: getattr(self, option.name) for option in fields(self)}


T = TypeVar("T")
V = TypeVar("V", bound=Variant)


class Variants(Generic[V]):
    """The variants of a kind by name. One given as a path `package.module:Class` is loaded when it is asked for, and so
    are plug-ins (`rlvr.core.plugins`).

    A config has fields for the options of the built-in ones; those of others are in `kwargs`.
    """

    def __init__(self, key: str, base: type[V], *built_in: type[V], or_else: str = "") -> None:
        self.key, self.base, self.or_else = key, base, or_else
        self._known: dict[str, type[V]] = {variant.name: variant for variant in built_in}
        self._built_in = frozenset(self._known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def classes(self) -> list[type[V]]:
        return list(self._known.values())

    def is_built_in(self, name: object) -> bool:
        """Whether the options of that variant are fields of a config."""
        return name in self._built_in

    def add(self, variant: type[V]) -> None:
        """Register a variant under its name. The same class may come again (a reloaded module, a notebook cell)."""
        taken = self._known.get(variant.name, variant)
        if (taken.__module__, taken.__qualname__) != (variant.__module__, variant.__qualname__):
            raise ValueError(
                f"{self.key} {variant.name!r} is registered already, by {taken.__module__}:{taken.__qualname__}; give "
                f"{variant.__module__}:{variant.__qualname__} another name"
            )
        self._known[variant.name] = variant
        note_own_name(variant.name, variant.__module__)

    def find(self, name: str) -> type[V]:
        """The variant of that name, or the class at `package.module:Class`."""
        if name not in self._known and ":" not in name:
            load_plugins()
        if name in self._known:
            return self._known[name]
        if ":" not in name:
            raise ValueError(
                f"{self.key}={name!r} is unknown{did_you_mean(name, self)}; known: {', '.join(self)}{self.or_else}"
                f"{describe_plugins()}"
            )
        found = load_object(self.key, name)
        if not (isinstance(found, type) and issubclass(found, self.base)):
            raise ValueError(f"{self.key}={name!r}: expected a class that extends {self.base.__name__}")
        return found

    def flat_options(self) -> dict[str, set[str]]:
        """Every flat key of the variants, and the names of the variants that it belongs to."""
        keys: dict[str, set[str]] = {}
        for variant in self.classes():
            for flat in variant.flat_names().values():
                keys.setdefault(flat, set()).add(variant.name)
        return keys

    def list_takers(self, option: str) -> list[str]:
        """The names of the variants that have an option."""
        return sorted(one.name for one in self.classes() if option in {field.name for field in fields(one)})

    def vary(self, now: V, name: str | None, flat: Mapping[str, Any]) -> V:
        """`now`, or the variant `name`, with the options of the flat keys; null takes the default.

        The options of a variant that does not come with the package may be together in the key `kwargs` of its kind.
        ValueError for a key that belongs to another variant.
        """
        variant = type(now) if name in (None, now.name) else self.find(name or "")
        kept = now.options if variant is type(now) else variant.inherit(now)
        flat = dict(flat)
        kwargs = flat.pop(self.kwargs_key(), None)
        others = [key for key, value in flat.items() if value is not None and key not in variant.flat_names().values()]
        if others:
            raise ValueError(self.about_other(others[0], flat[others[0]], variant))
        options = variant.read_flat(flat, kept)
        if not kwargs:
            return variant(**options)
        what = f"{variant.kind} {variant.name!r}"
        if self.is_built_in(variant.name):
            raise ValueError(
                f"{variant.full_key(self.kwargs_key())}={kwargs} has no effect: the {what} has its options beside its "
                "name"
            )
        return make_variant(what, variant, {**options, **kwargs})

    def kwargs_key(self) -> str:
        """The flat key of the options of a variant that does not come with the package."""
        return f"{self.base.place()}.{_KWARGS[0]}"

    def about_other(self, key: str, value: Any, variant: type[V]) -> str:
        """The message for an option that belongs to another variant."""
        takers = ", ".join(sorted(self.flat_options().get(key, ())))
        return (
            f"{variant.full_key(key)}={value} has no effect: the {variant.kind} {variant.name!r} has no {key}; leave "
            f"it out, or use one that has: {takers}"
        )


def make_variant(what: str, variant: type[T], kwargs: Mapping[str, Any]) -> T:
    """A variant, or another record of options, from these as a config holds them, each of the type that is declared.

    ValueError that names the option; `what` says in messages what has the options.
    """
    from pydantic import TypeAdapter, ValidationError

    check_kwargs(what, variant, kwargs)
    try:
        return TypeAdapter(variant).validate_json(json.dumps(kwargs), strict=True)
    except ValidationError as error:
        item = error.errors()[0]
        if item["type"] == "value_error":
            raise ValueError(item["msg"].removeprefix("Value error, ")) from None
        option = ".".join(map(str, item["loc"]))
        first = next((one for one in fields(variant) if one.name == str(item["loc"][0])), None)  # type: ignore[arg-type]
        shown = "***" if first and setting_of(first).is_secret else repr(item["input"])
        raise ValueError(f"{what}: {option}={shown}: {item['msg'][:1].lower()}{item['msg'][1:]}") from None


# The field of a section for the options of a variant that does not come with the package, beside those that it shares.
_KWARGS = ("kwargs", dict[str, Any], field(default_factory=dict[str, Any]))


class Section:
    """The part of a config that chooses a variant: its name, and the options of all variants (`make_section`).

    `tag` is the field with the name. The options of variants that are not chosen have to be what they may be, too.
    """

    registry: ClassVar[Variants[Any]]
    variants: ClassVar[tuple[type[Variant], ...]]
    tag: ClassVar[str] = "name"

    if TYPE_CHECKING:  # the fields of each are made of its variants

        def __init__(self, *options: Any, **named: Any) -> None: ...
        def __getattr__(self, option: str) -> Any: ...

    @classmethod
    def of(cls, given: Any) -> Any:
        """The section itself, or the one that says what a name or a variant does."""
        if isinstance(given, Variant):
            return cls(**{cls.tag: given.name}, **given.options)
        return cls(**{cls.tag: given}) if given is None or isinstance(given, str) else given

    def __post_init__(self) -> None:
        for variant in self.variants:
            for option in fields(variant):
                variant.check_option(option.name, getattr(self, option.name))
        _ = self.variant

    def choose_name(self) -> str:
        """The name of the variant that is chosen."""
        return getattr(self, self.tag)

    @cached_property
    def variant(self) -> Any:
        """The variant that is chosen, with its options; ValueError for what it cannot be."""
        name = self.choose_name()
        variant = self.registry.find(name)
        shared = [option.name for option in fields(variant) if option.name in self.__dict__]
        if self.registry.is_built_in(name):
            return variant(**{option: getattr(self, option) for option in shared})
        given = self._list_given()
        kwargs = {option: given[option] for option in shared if option in given} | self.kwargs
        return make_variant(f"{variant.kind} {name!r}", variant, kwargs)

    def list_others(self) -> dict[str, Any]:
        """The options that are given, and that the variant which is chosen does not have."""
        own = {self.tag, *(option.name for option in fields(type(self.variant)))}
        if not self.registry.is_built_in(self.choose_name()):
            own.add(_KWARGS[0])
        return {name: value for name, value in self._list_given().items() if name not in own}

    def _list_given(self) -> dict[str, Any]:
        """The options that have another value than their default."""
        options: dict[str, Field[Any]] = self.__dataclass_fields__
        left_out = {
            name: one.default if one.default_factory is MISSING else one.default_factory()
            for name, one in options.items()
        }
        return {name: value for name in options if (value := getattr(self, name)) != left_out[name]}


def make_section(
    name: str,
    registry: Variants[Any],
    tag: tuple[str, Any, Any],
    *,
    base: type = Section,
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """A `Section` with every option of the variants, and the default that they give it unless `defaults` has another.

    `tag` is the field with the name: its name, its type, and the variant that is meant if none is named.
    """
    made: dict[str, Any] = {tag[0]: tag}
    for variant in registry.classes():
        hints = get_type_hints(variant)
        for option in fields(variant):
            default, factory = (defaults or {}).get(option.name, option.default), option.default_factory
            if (same := made.get(option.name)) and (same[1], same[2].default) != (hints[option.name], default):
                raise TypeError(f"{name}: {option.name} has another type or default in {variant.__name__}")
            stated: Any = field(default=default, default_factory=factory, repr=option.repr)  # type: ignore[call-overload]
            made[option.name] = (option.name, hints[option.name], stated)
    namespace = {"registry": registry, "variants": tuple(registry.classes()), "tag": tag[0]}
    return make_dataclass(name, [*made.values(), _KWARGS], frozen=True, bases=(base,), namespace=namespace)


def make_overrides(name: str, variants: Iterable[type[Variant]], *, named: bool = True) -> Any:
    """Make a dataclass with every option of the variants, null by default: an option that is given overrides that of a
    spec.

    A `named` choice may be of a variant that does not come with the package, whose options are in `kwargs`.
    """
    options: dict[str, Any] = {"name": str} if named else {}
    for variant in variants:
        hints = get_type_hints(variant)
        for option in fields(variant):
            options.setdefault(option.name, hints[option.name])
    if named:
        options[_KWARGS[0]] = _KWARGS[1]
    made = [(option, Optional[kind], None) for option, kind in options.items()]  # noqa: UP045
    return make_dataclass(name, made, frozen=True, namespace={"variants": tuple(variants)})
