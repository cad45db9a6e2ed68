"""Elements as plain data: what a page is made of, before any browser or NiceGUI is there.

    h("p", "reward ", h("b", "0.8"), class_="dim")  ->  ["p", {"class": "dim"}, "reward ", ["b", {}, "0.8"]]

`assets/tree.js` draws it; it knows which tags and attributes there may be, and makes every text a text node.
Exercised by tests/test_dashboard_pages.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Tree = list[Any]  # [tag, attributes, *children]
Child = Tree | str | None


@dataclass(frozen=True)
class Page:
    """A page: its title, what is in it, and the status it is answered with."""

    title: str
    main: Tree
    status: int = 200


def h(tag: str, *children: Child | Iterable[Child], **attributes: Any) -> Tree:
    """An element. A list of elements among the children is spliced in; None is nothing, as a child and as a value.

    `class_` and `for_` are `class` and `for`, other underlines become hyphens.
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    found: Tree = [tag, given]
    for child in children:
        if child is None:
            continue
        if isinstance(child, str) or is_tree(child):
            found.append(child)
        else:
            found += [one for one in child if one is not None]
    return found


def is_tree(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and isinstance(value[0], str) and isinstance(value[1], dict)


def texts(tree: Any) -> list[str]:
    """All texts in a tree, in order: what somebody reads."""
    if isinstance(tree, str):
        return [tree]
    return [text for child in tree[2:] for text in texts(child)]
