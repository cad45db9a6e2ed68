"""Templates of a grader: `{{ item.reference_answer }}` and `{{ sample.output_text }}`, filled once.

    Template.of("The answer is {{ item.answer }}.", "input").fill({"item": {"answer": "7"}, "sample": {...}})

Nested values are reached by `.field`, `["field"]` or `[2]`. Inserted text is never read as a template again, so an
answer that holds braces stays as it is. Parsing takes linear time. Left out on purpose: filters, loops, conditions and
everything else of template languages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.core.registry import did_you_mean

MAX_TEMPLATE = 100_000  # characters of one template
NAMESPACES = ("item", "sample")
_STEP = re.compile(r"""\.([A-Za-z_][\w-]*)|\[(\d{1,9})\]|\[(?:"([^"\]]*)"|'([^'\]]*)')\]""")
_NAMESPACE = re.compile(r"[A-Za-z_]\w*")
_FIELD = re.compile(r"[A-Za-z_][\w-]*")

Values = Mapping[str, Any]  # {"item": {...}, "sample": {...}}


class MissingField(Exception):
    """A template names a field that the item or the sample does not have."""

    def __init__(self, place: Placeholder, found: str) -> None:
        super().__init__(f"{{{{ {place} }}}} is missing: {found}")
        self.place = place


class TemplateTooLong(Exception):
    """The filled template would have `size` characters, more than allowed."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size:,} characters")
        self.size = size


@dataclass(frozen=True)
class Placeholder:
    """The path of a value: a namespace and the steps from there."""

    namespace: str
    steps: tuple[str | int, ...]

    @classmethod
    def of(cls, text: str, where: str) -> Placeholder:
        """Parse a path such as `item.answer`. ValueError that begins with `where`, the field of the grader's config."""
        text = text.strip()
        shown = f"{where}: {{{{ {text[:80]} }}}}"
        namespace = _NAMESPACE.match(text)
        if namespace is None or namespace[0] not in NAMESPACES:
            name = namespace[0] if namespace else text
            hint = did_you_mean(name, NAMESPACES)
            raise ValueError(f"{shown} begins with {name[:40]!r}{hint}; expected item.<field> or sample.<field>")
        steps: list[str | int] = []
        at = namespace.end()
        while at < len(text):
            step = _STEP.match(text, at)
            if step is None:
                rest = text[at : at + 20]
                raise ValueError(f'{shown} cannot be read from {rest!r} on; expected .field, ["field"] or [2]')
            name, index, *quoted = step.groups()
            steps.append(int(index) if index else name or next((q for q in quoted if q is not None), ""))
            at = step.end()
        if not steps:
            raise ValueError(f"{shown} names no field; expected {text}.<field>")
        return cls(namespace[0], tuple(steps))

    @property
    def is_from_answer(self) -> bool:
        """Whether the value depends on what the policy wrote."""
        return self.namespace == "sample"

    def find(self, values: Values) -> Any:
        value: Any = values[self.namespace]
        for step in self.steps:
            is_index = isinstance(value, list) and isinstance(step, int) and step < len(value)
            if not is_index and not (isinstance(value, Mapping) and step in value):
                raise MissingField(self, _describe_lack(value, step))
            value = value[step]  # pyright: ignore[reportCallIssue, reportArgumentType]
        return value

    def __str__(self) -> str:
        steps = (f".{s}" if isinstance(s, str) and _FIELD.fullmatch(s) else f"[{json.dumps(s)}]" for s in self.steps)
        return self.namespace + "".join(steps)


@dataclass(frozen=True)
class Template:
    """A text with placeholders; `parts` are literal texts and placeholders in turn."""

    parts: tuple[str | Placeholder, ...]

    @classmethod
    def of(cls, text: Any, where: str) -> Template:
        """Read a template; ValueError that names the field of the configuration if it is wrong."""
        if not isinstance(text, str):
            raise ValueError(f"{where}={str(text)[:80]!r} ({type(text).__name__}), expected text")
        if len(text) > MAX_TEMPLATE:
            raise ValueError(f"{where} has {len(text):,} characters, expected at most {MAX_TEMPLATE:,}")
        parts: list[str | Placeholder] = []
        at = 0
        while (start := text.find("{{", at)) >= 0:
            end = text.find("}}", start)
            if end < 0:
                raise ValueError(f"{where}: '{{{{' at character {start} is never closed by '}}}}'")
            parts += [text[at:start], Placeholder.of(text[start + 2 : end], where)]
            at = end + 2
        return cls(tuple(part for part in (*parts, text[at:]) if part != ""))

    def __str__(self) -> str:
        return "".join(part if isinstance(part, str) else f"{{{{ {part} }}}}" for part in self.parts)

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """Every placeholder once, in order."""
        return tuple(dict.fromkeys(part for part in self.parts if isinstance(part, Placeholder)))

    @property
    def is_from_answer(self) -> bool:
        return any(place.is_from_answer for place in self.placeholders)

    def fill(self, values: Values, show: Callable[[Placeholder], str] | None = None, limit: int | None = None) -> str:
        """The text with `show(place)` for each placeholder, by default its value; MissingField where there is none.

        TemplateTooLong over `limit` characters, before anything is joined: a template of 9,000 placeholders and a value
        of a megabyte are 9 GB.
        """
        show = show or (lambda place: as_text(place.find(values)))
        shown = {place: show(place) for place in self.placeholders}
        parts = [part if isinstance(part, str) else shown[part] for part in self.parts]
        if limit is not None and (size := sum(map(len, parts))) > limit:
            raise TemplateTooLong(size)
        return "".join(parts)


def as_text(value: Any) -> str:
    """A text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _describe_lack(value: Any, step: str | int) -> str:
    if isinstance(value, Mapping):
        keys = [str(key) for key in list(value)[:20]]
        return f"no {step!r} among {', '.join(keys) or 'no fields'}"
    if isinstance(value, list):
        return f"no [{step}] in a list of {len(value)}"
    return f"a {type(value).__name__} has no fields"
