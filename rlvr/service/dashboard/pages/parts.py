"""What several pages have: the frame around them, badges, figures, tables of answers. Addresses are made here alone.

Exercised by tests/test_dashboard_pages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from rlvr.service.dashboard.data import Chart, Comparison, Entry, Source, Work
from rlvr.service.dashboard.tree import Child, Page, Tree, h

GOOD = ("passed", "finished", "done", "ready", "ok")
BAD = ("failed", "error", "timeout", "down", "problem")
WARN = ("invalid", "interrupted", "cancelled", "loading", "absent", "length", "stopped")


def address(path: str, **query: object) -> str:
    """An address of the dashboard; conditions that say nothing are left out, so that it stays short enough to share."""
    given = {name: str(value) for name, value in query.items() if value not in ("", None)}
    return path + (f"?{urlencode(given)}" if given else "")


def work_address(source: Source, work: str) -> str:
    return f"/ui/{source.noun}/{quote(work, safe='')}"


def entry_address(key: str) -> str:
    return f"/ui/trajectory/{quote(key, safe='')}"


def framed(source: Source, title: str, here: str, *main: Child, status: int = 200) -> Page:
    """A whole page. `here` is the entry of the menu that it belongs to."""
    menu = [("Overview", "/"), ("Trajectories", "/ui/trajectories"), ("Compare", "/ui/compare")]
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


def missing(source: Source, what: str, name: str) -> Page:
    said = f"There is no {what} {name[:200]!r} here. It may have been deleted, or the address is mistyped."
    return framed(
        source, "Not found", "", h("h1", "Not found"), h("p", said, class_="panel"),
        h("p", h("a", "Back to the overview", href="/")), status=404,
    )  # fmt: skip


def badge(word: str, live: bool = False, text: str = "") -> Tree:
    kind = "good" if word in GOOD else "bad" if word in BAD else "warn" if word in WARN else "plain"
    return h("span", text or word or "none", class_=f"badge {'live' if live else kind}")


def block(text: str) -> Tree:
    """A text with its line breaks; a long one scrolls, by keys too."""
    return h("pre", text or "(empty)", class_="text-block", tabindex="0")


def figures(given: Mapping[str, str]) -> Tree:
    return h("dl", [h("div", h("dt", name), h("dd", value)) for name, value in given.items()], class_="figures")


def told(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def chart(one: Chart) -> Tree:
    lines = [{"name": line.name, "points": [list(point) for point in line.points]} for line in one.lines]
    return ["x-chart", {"key": one.title, "name": one.title, "lines": lines, "share": one.share, "x": one.x,
                        "hint": one.hint}]  # fmt: skip


def charts(given: list[Chart]) -> Tree | None:
    return h("section", [chart(one) for one in given], class_="charts", aria_label="Curves") if given else None


def ago(at: float | None) -> Tree | None:
    return ["x-ago", {"at": at}] if at else None


def work_card(source: Source, work: Work) -> Tree:
    """A run or a session with its numbers; all of it leads to its page."""
    return h(
        "li",
        h("div", h("a", work.name, href=work_address(source, work.id)), badge(work.status, work.live),
          h("span", ago(work.changed), class_="dim end"), class_="line"),
        h("p", work.about, class_="dim short") if work.about else None,
        h("progress", value=str(work.done), max="1", aria_label=f"{work.name}: progress") if work.done else None,
        figures(work.figures) if work.figures else None,
        class_="panel work", key=work.id,
    )  # fmt: skip


def comparison(one: Comparison) -> Tree:
    return h(
        "section",
        h("h2", one.title),
        h("div", h(
            "table",
            h("thead", h("tr", [h("th", name, scope="col") for name in one.columns])),
            h("tbody", [
                h("tr", h("th", row[0], scope="row"), [h("td", cell) for cell in row[1:]]) for row in one.rows
            ]),
        ), style="overflow-x: auto"),
        class_="panel",
    )  # fmt: skip


def answers_table(source: Source, entries: list[Entry], several: bool, label: str) -> Tree:
    """Answers as rows. The first cell is a link over the whole row, so Enter opens it, and so does a click anywhere."""
    names = [("Outcome", ""), ("Reward", "num"), ("Advantage", "num"), ("Task", ""), ("Answer", ""),
             (source.step_noun.capitalize(), "num"), ("Tokens", "num"),
             (source.status_noun.capitalize(), "")] + ([(source.noun.capitalize(), "")] if several else [])  # fmt: skip
    return h(
        "div",
        h(
            "table",
            h("caption", label, hidden=""),
            h("thead", h("tr", [h("th", name, scope="col", class_=kind or None) for name, kind in names])),
            h("tbody", [_row(source, entry, several) for entry in entries]),
            class_="answers", aria_label=label,
        ),
        style="overflow-x: auto",
    )  # fmt: skip


def _row(source: Source, entry: Entry, several: bool) -> Tree:
    told_ = f"{entry.outcome or 'not judged'}, task {entry.task}, {source.step_noun} {entry.step}"
    return h(
        "tr",
        h("td", h("a", badge(entry.outcome, text=entry.outcome or "not judged"), class_="row-link",
                  href=entry_address(entry.key), aria_label=f"Open: {told_}"),
          h("small", f" {entry.reason}") if entry.reason else None),
        h("td", told(entry.reward), class_="num", data_label="reward"),
        h("td", told(entry.advantage), class_="num", data_label="advantage"),
        h("td", entry.task or "–", class_="mono wide"),
        h("td", h("span", entry.answer or "(empty)"), class_="text mono wide"),
        h("td", "–" if entry.step is None else str(entry.step), class_="num", data_label=source.step_noun),
        h("td", str(entry.tokens) if entry.tokens else "–", class_="num", data_label="tokens"),
        h("td", entry.status or "–", class_="dim"),
        h("td", entry.work if source.noun == "run" else entry.work[:8], class_="wide dim") if several else None,
        key=entry.key,
    )  # fmt: skip


def field(name: str, label: str, control: Tree) -> Tree:
    return h("label", h("span", label), control, for_=f"f-{name}")


def text_field(name: str, label: str, value: str, choices: list[str] | None = None, **more: object) -> list[Tree]:
    """An input, with what there is to choose from where it is known."""
    offered = f"{name}-known" if choices else None
    control = h("input", id=f"f-{name}", name=name, value=value, autocomplete="off", list=offered, **more)
    listed = [h("datalist", [h("option", value=one) for one in choices], id=offered)] if choices else []
    return [field(name, label, control), *listed]


def work_choices(source: Source) -> dict[str, str]:
    """{id: what to call it} of the newest: a session by its task and the beginning of its id, a run by its name."""
    return {w.id: w.id if w.name == w.id else f"{w.name}, {w.id[:8]}" for w in source.works(0, 200)[0]}


def select_field(name: str, label: str, value: str, choices: list[str] | dict[str, str], every: str = "any") -> Tree:
    """A choice, of values or of {value: what it is called}. What the address asks for is offered in any case."""
    named = choices if isinstance(choices, dict) else {one: one for one in choices}
    known = {"": every, **named}
    options = [h("option", called, value=one) for one, called in (known | {value: known.get(value, value)}).items()]
    return field(name, label, h("select", options, id=f"f-{name}", name=name, value=value))
