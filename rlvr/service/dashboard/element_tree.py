"""Elements as plain data: pages before any browser or NiceGUI is involved.

    h("p", "reward ", h("b", "0.8"), class_="dim")  ->  ["p", {"class": "dim"}, "reward ", ["b", {}, "0.8"]]

`assets/tree.js` draws them; it has the lists of allowed tags and attributes and makes every text a text node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Tree = list[Any]  # [tag, attributes, *children]
Child = Tree | str | None


@dataclass(frozen=True)
class Page:
    """A page: its title, its content, and its HTTP status."""

    title: str
    main: Tree
    status: int = 200


def h(tag: str, *children: Child | Iterable[Child], **attributes: Any) -> Tree:
    """An element. A list of elements among the children is spliced in; None children and attributes are dropped.

    `class_` and `for_` are `class` and `for`; other underscores become hyphens.
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    element: Tree = [tag, given]
    for child in children:
        if child is None:
            continue
        if isinstance(child, str) or is_tree(child):
            element.append(child)
        else:
            element += [one for one in child if one is not None]
    return element


def is_tree(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and isinstance(value[0], str) and isinstance(value[1], dict)


def texts(tree: Any) -> list[str]:
    """All texts in a tree, in order."""
    if isinstance(tree, str):
        return [tree]
    return [text for child in tree[2:] for text in texts(child)]
