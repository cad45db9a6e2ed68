"""Templates of a grader: `{{ item.reference_answer }}` and `{{ sample.output_text }}`, filled once and never again.

    Template.of("The answer is {{ item.answer }}.", "input").fill({"item": {"answer": "7"}, "sample": {...}})

A name goes on by `.field`, `["field"]` or `[2]`. What is put in is text: an answer that holds braces stays as it is.
The parser walks over a text once. Left out on purpose: filters, loops, conditions and everything else of template
languages.
`python -m pytest tests/test_graders_templates.py` exercises it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.registry import nearest

MAX_TEMPLATE = 100_000  # characters of one template
NAMESPACES = ("item", "sample")
_STEP = re.compile(r"""\.([A-Za-z_][\w-]*)|\[(\d{1,9})\]|\[(?:"([^"\]]*)"|'([^'\]]*)')\]""")
_NAMESPACE = re.compile(r"[A-Za-z_]\w*")

Values = Mapping[str, Any]  # {"item": {...}, "sample": {...}}


class Missing(Exception):
    """A template names what an item or a sample does not have."""

    def __init__(self, place: Place, found: str) -> None:
        super().__init__(f"{{{{ {place} }}}} is missing: {found}")
        self.place = place


class TooLong(Exception):
    """A filled template would have `size` characters, more than there is room for."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size:,} characters")
        self.size = size


@dataclass(frozen=True)
class Place:
    """Where a value stands: a namespace and the steps from there."""

    namespace: str
    steps: tuple[str | int, ...]

    @classmethod
    def of(cls, text: str, where: str) -> Place:
        """ValueError, naming the field of the configuration, for what is no such place."""
        given = text.strip()
        namespace = _NAMESPACE.match(given)
        if namespace is None or namespace[0] not in NAMESPACES:
            name = namespace[0] if namespace else given
            raise ValueError(
                f"{where}: {{{{ {given[:80]} }}}} begins with {name[:40]!r}{nearest(name, NAMESPACES)}; expected "
                "item.<field> or sample.<field>"
            )
        steps: list[str | int] = []
        at = namespace.end()
        while at < len(given):
            step = _STEP.match(given, at)
            if step is None:
                raise ValueError(
                    f"{where}: {{{{ {given[:80]} }}}} cannot be read from {given[at : at + 20]!r} on; expected .field, "
                    '["field"] or [2]'
                )
            name, index, *quoted = step.groups()
            steps.append(int(index) if index else name or next((q for q in quoted if q is not None), ""))
            at = step.end()
        if not steps:
            raise ValueError(f"{where}: {{{{ {given} }}}} names no field; expected {given}.<field>")
        return cls(namespace[0], tuple(steps))

    @property
    def of_answer(self) -> bool:
        """Whether it depends on what the policy wrote."""
        return self.namespace == "sample"

    def find(self, values: Values) -> Any:
        value: Any = values[self.namespace]
        for step in self.steps:
            if isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
                continue
            if not isinstance(value, Mapping) or step not in value:
                raise Missing(self, _has(value, step))
            value = value[step]
        return value

    def __str__(self) -> str:
        plain = re.compile(r"[A-Za-z_][\w-]*")
        shown = (f".{s}" if isinstance(s, str) and plain.fullmatch(s) else f"[{json.dumps(s)}]" for s in self.steps)
        return self.namespace + "".join(shown)


@dataclass(frozen=True)
class Template:
    """A text with places to fill; `parts` are literal texts and places in turn."""

    parts: tuple[str | Place, ...]

    @classmethod
    def of(cls, text: Any, where: str) -> Template:
        """ValueError, naming the field of the configuration, for what is no template."""
        if not isinstance(text, str):
            raise ValueError(f"{where}={str(text)[:80]!r} ({type(text).__name__}), expected text")
        if len(text) > MAX_TEMPLATE:
            raise ValueError(f"{where} has {len(text):,} characters, expected at most {MAX_TEMPLATE:,}")
        parts: list[str | Place] = []
        at = 0
        while (start := text.find("{{", at)) >= 0:
            end = text.find("}}", start)
            if end < 0:
                raise ValueError(f"{where}: '{{{{' at character {start} is never closed by '}}}}'")
            parts += [text[at:start], Place.of(text[start + 2 : end], where)]
            at = end + 2
        return cls(tuple(part for part in (*parts, text[at:]) if part != ""))

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place once, in order."""
        return tuple(dict.fromkeys(part for part in self.parts if isinstance(part, Place)))

    @property
    def of_answer(self) -> bool:
        return any(place.of_answer for place in self.places)

    def fill(self, values: Values, shown: Callable[[Place], str] | None = None, room: int | None = None) -> str:
        """The text with what `shown` says of each place, by default its value; Missing where there is none.

        TooLong where it would have more than `room` characters: a template of 9,000 places and a value of a megabyte
        are 9 GB, which are never put together.
        """
        say = shown or (lambda place: as_text(place.find(values)))
        said = {place: say(place) for place in self.places}
        parts = [part if isinstance(part, str) else said[part] for part in self.parts]
        if room is not None and (size := sum(map(len, parts))) > room:
            raise TooLong(size)
        return "".join(parts)


def as_text(value: Any) -> str:
    """A text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _has(value: Any, step: str | int) -> str:
    if isinstance(value, Mapping):
        keys = [str(key) for key in list(value)[:20]]
        return f"no {step!r} among {', '.join(keys) or 'no fields'}"
    if isinstance(value, list):
        return f"no [{step}] in a list of {len(value)}"
    return f"a {type(value).__name__} has no fields"
