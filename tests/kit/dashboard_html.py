"""Pages of the dashboard as trees: each element is [tag, attributes, *children], a child being a tree or a text.

Outside `pre` white space is one blank, and texts of white space alone are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from rlvr.service.dashboard.page_templates import render_page
from rlvr.service.dashboard.pages.page_parts import Page

VOID = ("meta", "link", "input", "img", "br")
Tree = list[Any]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root: Tree = ["", {}]
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node: Tree = [tag, {name: value or "" for name, value in attrs}]
        if tag == "option" and "selected" in node[1]:
            self._open[-1][1]["value"] = node[1]["value"]
        self._open[-1].append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].append([tag, {name: value or "" for name, value in attrs}])

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1][0] == tag, f"</{tag}> closes <{self._open[-1][0]}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if not any(node[0] == "pre" for node in self._open):
            data = " ".join(data.split())
        elif len(self._open[-1]) == 2 and self._open[-1][0] == "pre":
            data = data.removeprefix("\n")  # as a browser does
        if data:
            self._open[-1].append(data)


def parse_html(text: str) -> Tree:
    """AssertionError if an element is not closed by its own tag."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert parser._open == [parser.root], "an element is open at the end"
    return parser.root


def read_main(page: Page) -> Tree:
    """What a page shows below its menu."""
    return next(find(parse_html(render_page(page)), "main"))


def read_words(page: Page) -> str:
    return " ".join(texts(read_main(page)))


def texts(tree: Any) -> list[str]:
    """All texts in a tree, in order."""
    return [tree] if isinstance(tree, str) else [text for child in tree[2:] for text in texts(child)]


def elements(tree: Any) -> Iterator[Tree]:
    if isinstance(tree, list):
        yield tree
        for child in tree[2:]:
            yield from elements(child)


def find(tree: Any, tag: str) -> Iterator[Tree]:
    return (node for node in elements(tree) if node[0] == tag)


def links(page: Page) -> list[str]:
    return [node[1]["href"] for node in elements(read_main(page)) if "href" in node[1]]


def read_charts(page: Page) -> list[dict[str, Any]]:
    """The data of the charts of a page."""
    return [json.loads(node[1]["data-chart"]) for node in find(read_main(page), "figure")]
