"""The road of each option to the gradient, and what a client must offer for it.

A named loss has no slot for every option, so each has one declared road:

- *advantage*: it changes rewards or advantages before they are sent; any client takes that;
- *inputs*: it is an input or setting of a named loss; the client has to have the loss;
- *custom*: a function of per-token log-probs beside the loss. A client that offers it takes the inputs that the engine
  takes (`kl_weights`, `beta_weights`, ...), and is free to compute them in two passes (`rlvr.clients.custom`);
- *logits*: it needs the whole distribution, so the model has to be in this process;
- *reference*: it needs log-probs under frozen weights.

A training client says what it offers: `losses`, the named losses, and `roads`. An option without a road is an error
when the run is built. `table` is what docs/algorithms.md shows. Exercised by `python -m pytest tests/test_roads.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.algorithms.rows import LOSSES, Algorithm

ROADS = ("advantage", "inputs", "custom", "logits", "reference")


@dataclass(frozen=True)
class Option:
    """One option in use: what a user set, and the roads it takes (a client needs all of them)."""

    key: str
    roads: tuple[str, ...]
    remedy: str = ""


def options(algorithm: Algorithm) -> list[Option]:
    """The options that a row uses, with their roads."""
    # The protocol's dro pulls on every token of a row, the prompt's too; `beta_weights` are what holds it off them.
    dro = Option("loss=dro", ("custom",), "use another loss") if algorithm.loss == "dro" else None
    a, used = algorithm, [dro or Option(f"loss={algorithm.loss}", ("inputs",))]
    if a.kl_coef and a.kl_in == "reward":
        used.append(Option("kl_in=reward", ("advantage", "reference"), "set kl_coef=0"))
    if a.kl_coef and a.kl_in == "loss":
        used.append(Option("kl_in=loss", ("custom", "reference"), "use kl_in=reward"))
    if a.entropy_coef:
        exact = a.entropy == "exact"
        used.append(Option(f"entropy={a.entropy}", ("logits" if exact else "advantage",), "use entropy=sampled"))
    if a.importance_cap is not None:
        used.append(Option("importance_cap", ("advantage",)))
    if a.mask_truncated:
        used.append(Option("mask_truncated", ("advantage",)))
    if a.overlong_buffer is not None:
        used.append(Option("overlong_buffer", ("advantage",)))
    return used


def check_roads(algorithm: Algorithm, client: Any) -> None:
    """ValueError naming every option of the row that has no road on this client."""
    losses, roads = offered(client)
    name = client.__name__ if isinstance(client, type) else type(client).__name__
    wrong: list[str] = []
    if algorithm.loss not in losses:
        wrong.append(f"algorithm.loss={algorithm.loss}: {name} has {', '.join(sorted(losses)) or 'no named losses'}")
    for option in options(algorithm):
        if missing := [road for road in option.roads if road not in roads]:
            remedy = f"; {option.remedy}" if option.remedy else ""
            wrong.append(f"algorithm.{option.key}: needs the road {missing[0]!r}, which {name} does not offer{remedy}")
    if wrong:
        raise ValueError("no road to the gradient: " + "; ".join(wrong))


def offered(client: Any) -> tuple[frozenset[str], frozenset[str]]:
    """(losses, roads) of a client or client class. One that says nothing speaks the four primitives and no more."""
    losses: frozenset[str] = getattr(client, "losses", frozenset(LOSSES))
    roads: frozenset[str] = getattr(client, "roads", frozenset({"advantage", "inputs"}))
    return losses, roads


def table(clients: Mapping[str, Any]) -> list[list[str]]:
    """What works where: a header, then a row per loss and option with its road, and yes or no for each client."""
    base = Algorithm("any", "group_mean", "importance_sampling", "token_mean")
    shown: list[tuple[str, str, list[bool]]] = []
    for loss in LOSSES:
        road = "custom" if loss == "dro" else "inputs"
        works = [loss in offered(c)[0] and road in offered(c)[1] for c in clients.values()]
        shown.append((f"loss={loss}", road, works))
    variants: list[dict[str, Any]] = [
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_in": "loss"},
        {"entropy_coef": 0.1},
        {"entropy_coef": 0.1, "entropy": "exact"},
        {"importance_cap": 2.0},
        {"mask_truncated": True},
        {"overlong_buffer": 1},
    ]
    for cells in variants:
        option = options(Algorithm(**{**_cells(base), **cells}))[-1]
        works = [set(option.roads) <= offered(c)[1] for c in clients.values()]
        shown.append((option.key, " + ".join(option.roads), works))
    head = ["option", "road", *clients]
    return [head, *([key, road, *("yes" if w else "no" for w in works)] for key, road, works in shown)]


def _cells(row: Algorithm) -> dict[str, Any]:
    return dict(vars(row))
