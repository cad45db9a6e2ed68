"""What several pages share: the frame, badges, figures, tables of answers, forms, and all addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlencode

from rlvr.service.dashboard.dashboard_data import PAGE, Chart, Comparison, Note, Source, Work
from rlvr.service.dashboard.element_tree import Child, Page, Tree, h

GOOD = ("passed", "solved", "finished", "done", "ready", "ok")
BAD = ("failed", "not solved", "error", "timeout", "down", "problem")
NEWEST_FIRST = ("Newer", "Older")
WARN = (
    "invalid", "unverified", "interrupted", "cancelled", "loading", "absent", "length", "stopped",
)  # fmt: skip


def address(path: str, **query: object) -> str:
    """An address of the dashboard, without empty parameters, so that it stays short."""
    given = {name: str(value) for name, value in query.items() if value not in ("", None)}
    return path + (f"?{urlencode(given)}" if given else "")


def work_address(source: Source, work: str) -> str:
    """The address of the page of a training run or session."""
    return f"/ui/{source.noun}/{quote(work, safe='')}"


def answer_address(key: str, **query: object) -> str:
    """The address of an answer; `query` are the filters of the table that it stands in."""
    return address(f"/ui/trajectory/{quote(key, safe='')}", **query)


def frame_page(source: Source, title: str, here: str, *main: Child, status: int = 200) -> Page:
    """A complete page. `here` is its entry in the menu."""
    menu = [("Overview", "/"), (source.answer_nouns.capitalize(), "/ui/trajectories")]
    menu += [("Hacks", "/ui/hacks")] if source.has_suspicions else []
    menu += [("Sessions", "/ui/sessions"), ("Strategies", "/ui/strategies")] if source.noun == "session" else []
    menu += [("Compare", "/ui/compare")] if source.can_compare else []
    menu += [("Machines", "/ui/machines")] if source.has_machines else []
    tree = h(
        "div",
        h("a", "Skip to content", href="#main", class_="skip"),
        h(
            "header",
            h(
                "div",
                h("a", "rlvr", h("small", source.title), href="/", class_="brand"),
                h("nav", [
                    h("a", name, href=to, aria_current="page" if name == here else None) for name, to in menu
                ], aria_label="Main"),
            ),
            class_="top",
        ),
        h("div", *main, id="main", tabindex="-1"),  # NiceGUI puts a <main> around all of it
    )  # fmt: skip
    return Page(f"{title} - rlvr", tree, status)


def not_found_page(source: Source, what: str, name: str) -> Page:
    text = f"There is no {what} {name[:200]!r}. It was deleted, or the address is wrong."
    return frame_page(
        source, "Not found", "", h("h1", "Not found"), h("p", text, class_="panel"),
        h("p", h("a", "Back to the overview", href="/")), status=404,
    )  # fmt: skip


def kind_of(word: str) -> str:
    """The kind of a word about an outcome or a state: its colour."""
    return "good" if word in GOOD else "bad" if word in BAD else "warn" if word in WARN else "plain"


def badge(word: str, live: bool = False, text: str = "") -> Tree:
    return h("span", text or word or "none", class_=f"badge {'live' if live else kind_of(word)}")


def block(text: str) -> Tree:
    """A text with its line breaks; a long one scrolls, also by keys."""
    return h("pre", text or "(empty)", class_="text-block", tabindex="0")


def figures(given: Mapping[str, str]) -> Tree:
    return h("dl", [h("div", h("dt", name), h("dd", value)) for name, value in given.items()], class_="figures")


def format_number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def chart(one: Chart) -> Tree:
    lines = [
        {"name": line.name, "points": [list(point) for point in line.points], "kind": line.style,
         "colour": number if line.colour is None else line.colour}
        for number, line in enumerate(one.lines)
    ]  # fmt: skip
    return ["x-chart", {"key": one.title, "name": one.title, "lines": lines, "share": one.share, "x": one.x,
                        "hint": one.hint, "unit": one.unit, "log": one.log, "csv": one.csv,
                        "zoom": one.zoom}]  # fmt: skip


def charts(given: list[Chart], label: str = "Curves") -> Tree | None:
    return h("section", [chart(one) for one in given], class_="charts", aria_label=label) if given else None


def ago(at: float | None) -> Tree | None:
    return ["x-ago", {"at": at}] if at else None


def work_card(source: Source, work: Work) -> Tree:
    """A run or a session with its numbers; all of it links to its page."""
    return h(
        "li",
        h("div", h("a", work.name, href=work_address(source, work.id)), badge(work.result or work.status, work.live),
          h("span", ago(work.changed), class_="dim end"), class_="line"),
        h("p", work.about, class_="dim short") if work.about else None,
        h("progress", value=str(work.done), max="1", aria_label=f"{work.name}: progress") if work.done else None,
        figures(work.figures) if work.figures else None,
        class_="panel work", key=work.id,
    )  # fmt: skip


def comparison(one: Comparison) -> Tree:
    columns = [(name, "") for name in one.columns[1:]]
    table = data_table(columns, [list(row) for row in one.rows], one.title, head=one.columns[0])
    return h("section", h("h2", one.title), table, class_="panel")


def data_table(
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[Child]],
    label: str,
    head: str = "",
    class_: str = "data",
    heads: Mapping[str, Child] | None = None,
) -> Tree:
    """A table whose rows become blocks on a phone, each cell with the name of its column.

    `columns` are names and classes of all but the first, whose cells name the rows; `heads` are elements of some.
    A row of one cell is a sentence.
    """
    shown = heads or {}
    width = str(len(columns) + 1)
    return h(
        "table",
        h("thead", h("tr", h("th", head, scope="col"), [
            h("th", shown.get(name, name), scope="col", class_="num" if "num" in kind else None)
            for name, kind in columns
        ])),
        h("tbody", [
            h("tr", h("th", row[0], scope="row"), [
                h("td", cell, class_=kind or None, data_label=name or None)
                for cell, (name, kind) in zip(row[1:], columns, strict=False)
            ]) if len(row) > 1 else h("tr", h("td", row[0], colspan=width, class_="dim"))
            for row in rows
        ]),
        class_=class_, aria_label=label,
    )  # fmt: skip


def span(before: float, after: float, is_change: bool = False) -> Tree:
    """From before to after on a line from 0 to 100 %; the numbers stand beside it. A change is coloured."""
    low, high = sorted((before, after))
    kind = "plain" if not is_change else "rise" if after > before else "fall" if after < before else "same"
    style = f"--low: {100 * low:.1f}; --high: {100 * high:.1f}; --end: {100 * after:.1f}"
    return h("div", h("i"), h("b"), class_=f"span {kind}", style=style, aria_hidden="true")


def note(one: Note, evidence: Tree | None = None) -> Tree:
    return h("div", h("b", one.text), h("span", one.remedy) if one.remedy else None, evidence,
             class_=f"note {one.kind}", role="status")  # fmt: skip


def field(name: str, label: str, control: Tree) -> Tree:
    return h("label", h("span", label), control, for_=f"f-{name}")


def text_field(name: str, label: str, value: str, choices: list[str] | None = None, **more: object) -> list[Tree]:
    """An input, with suggestions if there are any."""
    list_id = f"{name}-known" if choices else None
    control = h("input", id=f"f-{name}", name=name, value=value, autocomplete="off", list=list_id, **more)
    datalist = [h("datalist", [h("option", value=one) for one in choices], id=list_id)] if choices else []
    return [field(name, label, control), *datalist]


def select_field(
    name: str, label: str, value: str, choices: list[str] | dict[str, str], every: str | None = "any"
) -> Tree:
    """A choice of values or of {value: label}, or of none, called `every`. The value of the address is among them."""
    named = choices if isinstance(choices, dict) else {one: one for one in choices}
    labels = named if every is None else {"": every, **named}
    labels.setdefault(value, value)
    options = [h("option", label, value=one) for one, label in labels.items()]
    return field(name, label, h("select", options, id=f"f-{name}", name=name, value=value))


def page_number(parameters: Mapping[str, str]) -> int:
    text = parameters.get("page", "")
    return max(1, int(text)) if text.isdecimal() and len(text) < 7 else 1


def pager(
    path: str, query: Mapping[str, object], offset: int, shown: int, total: int, words: tuple[str, str] = NEWEST_FIRST
) -> Tree | None:
    """The place among `total`, with links to the previous and the next page, which are called by `words`."""
    page = offset // PAGE + 1
    if total <= PAGE and page == 1:
        return None
    previous = address(path, **query, page=page - 1 if page > 2 else "")
    newer = h("a", words[0], href=previous, class_="button", rel="prev")
    older = h("a", words[1], href=address(path, **query, page=page + 1), class_="button", rel="next")
    where = f"{offset + 1:,} to {offset + shown:,} of {total:,}" if shown else f"page {page:,} is beyond the end"
    return h(
        "nav", newer if page > 1 else None, h("span", where, class_="dim"),
        older if offset + shown < total and shown else None, class_="pager", aria_label="Pages",
    )  # fmt: skip
