"""A job of the guarded worker: whether a text is JSON that a schema allows. Runs in the child, offline.

The text is a model's and the checks are `jsonschema`'s, whose patterns, unique items and recursion have no bounds of
their own: the worker's limits are the bounds.
"""

from __future__ import annotations

import json
import math
import sys
from functools import lru_cache
from typing import Any

MAX_DEPTH = 100
MAX_DIGITS = 300  # of an integer; a larger one overflows where a schema asks for a multiple of 0.5
SAMPLES = (None, True, 0, 0.5, "", "a", [], [0], {}, {"a": 0})


def run(setup: dict[str, Any], item: str | None) -> dict[str, Any]:
    """`{}` where the text fits; else `{"problem": a reason code, "detail": ...}`. None asks about the schema itself.

    `setup` is `{"schema": as JSON, "paths": where Python finds jsonschema}`.
    """
    sys.path.extend(path for path in setup["paths"] if path not in sys.path)
    if item is None:
        return _check_schema(setup["schema"])
    try:
        value = json.loads(item, parse_constant=refuse_constant, parse_float=_finite, parse_int=_short)
        if json_depth(value) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
    except RecursionError:
        return {"problem": "wrong_format", "detail": f"nested more than {MAX_DEPTH} deep"}
    except ValueError as error:
        return {"problem": "wrong_format", "detail": str(error)[:300]}
    error = next(_validator(setup["schema"]).iter_errors(value), None)
    if error is None:
        return {}
    return {"problem": "wrong_schema", "detail": f"{error.json_path[:200]}: {_short_text(error.message)}"}


def _check_schema(schema: str) -> dict[str, Any]:
    import jsonschema.exceptions

    try:
        validator = _validator(schema)
        type(validator).check_schema(json.loads(schema))
        resolver = _resolver(json.loads(schema))
        for reference in _references(json.loads(schema)):
            resolver.lookup(reference)
        for sample in SAMPLES:
            next(validator.iter_errors(sample), None)
    except jsonschema.exceptions.SchemaError as error:
        return {"problem": "bad_schema", "detail": f"at {error.json_path[:200]}: {_short_text(error.message)}"}
    except RecursionError:
        return {"problem": "bad_schema", "detail": "it refers to itself without end"}
    except Exception as error:  # a reference to nothing, a pattern that does not compile
        return {"problem": "bad_schema", "detail": f"{type(error).__name__}: {_short_text(str(error))}"}
    return {}


@lru_cache(maxsize=4)
def _validator(schema: str) -> Any:
    """By the draft that `$schema` names, else 2020-12; `format` is checked; nothing is ever fetched."""
    import jsonschema.validators
    import jsonschema_specifications

    sys.setrecursionlimit(5000)  # a level of JSON takes about ten calls
    known = json.loads(schema)
    kind = jsonschema.validators.validator_for(known, default=jsonschema.Draft202012Validator)
    return kind(known, registry=jsonschema_specifications.REGISTRY, format_checker=kind.FORMAT_CHECKER)


def _resolver(schema: dict[str, Any]) -> Any:
    import jsonschema_specifications
    import referencing.jsonschema

    root = referencing.Resource.from_contents(schema, default_specification=referencing.jsonschema.DRAFT202012)
    address = root.id() or ""
    return jsonschema_specifications.REGISTRY.with_resource(address, root).resolver(address)


def _references(schema: Any) -> list[str]:
    """Every `$ref`; none where a subschema has an address (`$id`) of its own, from which references may count."""
    references: list[str] = []
    todo = [(schema, True)]
    while todo:
        node, top = todo.pop()
        if isinstance(node, dict):
            if "$id" in node and not top:
                return []
            if isinstance(node.get("$ref"), str):
                references.append(node["$ref"])
            todo.extend((child, False) for child in node.values())
        elif isinstance(node, list):
            todo.extend((child, False) for child in node)
    return references


def _short_text(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"


def json_depth(value: Any) -> int:
    """How deep arrays and objects stand in each other: 1 for `[3]`, 0 for `3`."""
    depth, level = 0, [value]
    while level := [node for node in level if isinstance(node, (dict, list))]:
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        depth += 1
    return depth


def refuse_constant(constant: str) -> None:
    """Refuse NaN and the infinities: the `parse_constant` of `json.loads`."""
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _short(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(text)
