"""Two steps of a run, or two iterations of a session, side by side: their numbers, and answers to the same tasks.

Exercised by tests/test_dashboard_pages.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.data import Entry, Query, Source
from rlvr.service.dashboard.pages.parts import (
    badge,
    entry_address,
    framed,
    missing,
    select_field,
    text_field,
    told,
    work_address,
    work_choices,
)
from rlvr.service.dashboard.tree import Child, Page, Tree, h

MOST = 64  # answers of a step that are looked at
PAIRS = 12  # of answers that are shown
FIRST = (
    "confidence", "correctness", "quality", "gain", "num_tokens", "seconds",
    "reward", "reward_std", "env/all/correct", "test/env/all/correct", "env/all/by_group/frac_mixed", "entropy",
    "completions/mean_length", "completions/clipped_ratio", "verifier/no_answer_rate", "grad_norm", "optim/kl_after",
    "learning_rate", "tokens_per_second",
)  # fmt: skip


def compare(source: Source, asked: Mapping[str, str]) -> Page:
    works = work_choices(source)
    work = asked.get("work", "") or next(iter(works), "")
    if not work:
        empty = h("p", f"No {source.noun} yet, so there is nothing to compare.", class_="panel empty")
        return framed(source, "Compare", "Compare", h("h1", "Compare"), empty)
    if (one := source.work(work)) is None:
        return missing(source, source.noun, work)
    bounds = source.choices(work).steps or (0, 0)
    a, b = _step(asked.get("a", ""), bounds[0]), _step(asked.get("b", ""), bounds[1])
    noun = source.step_noun
    form = h(
        "form",
        select_field("work", source.noun.capitalize(), work, works, "latest"),
        text_field("a", f"First {noun}", str(a), inputmode="numeric"),
        text_field("b", f"Second {noun}", str(b), inputmode="numeric"),
        h("button", "Compare", class_="main"), method="get", action="/ui/compare", class_="filters panel",
    )  # fmt: skip
    return framed(
        source,
        f"{noun} {a} and {b}",
        "Compare",
        h("div", h("h1", f"{noun.capitalize()} {a} and {noun} {b}"),
          h("a", one.name, href=work_address(source, work)), class_="head"),
        form, _numbers(source, work, a, b), _answers(source, work, a, b),
    )  # fmt: skip


def _step(text: str, otherwise: int) -> int:
    return int(text) if text.strip().isdecimal() and len(text) < 10 else otherwise


def _numbers(source: Source, work: str, a: int, b: int) -> Tree:
    before, after = source.at_step(work, a), source.at_step(work, b)
    names = [name for name in FIRST if name in before or name in after]
    others = sorted((before.keys() | after.keys()) - {*FIRST})
    if not names and not others:
        return h("p", f"Nothing was measured at {source.step_noun} {a} or {b}.", class_="panel empty")
    # where none of the names is one that we know, all of them are worth showing
    shown, rest = (names, others) if names else (others, [])
    head = [source.step_noun.capitalize(), str(a), str(b), "Change"]

    def table(names: list[str]) -> Tree:
        rows = [_number_row(name, before.get(name), after.get(name)) for name in names]
        return h("table", h("thead", h("tr", [h("th", one, scope="col", class_="num" if one != head[0] else None)
                                              for one in head])), h("tbody", rows))  # fmt: skip

    more = h("details", h("summary", f"{len(rest)} more"), table(rest)) if rest else None
    return h("section", h("h2", "Numbers"), h("div", table(shown), more, style="overflow-x: auto"), class_="panel")


def _number_row(name: str, before: float | None, after: float | None) -> Tree:
    change = None if before is None or after is None else after - before
    sign = "" if change is None else f"{change:+.4g}"
    cells = ["–" if value is None else f"{value:.4g}" for value in (before, after)]
    return h("tr", h("th", name, scope="row"), [h("td", cell, class_="num") for cell in cells],
             h("td", sign or "–", class_="num"))  # fmt: skip


def _answers(source: Source, work: str, a: int, b: int) -> Tree:
    """Tasks that both have come first, each with one answer of either; then what is left, in order."""
    left = source.entries(Query(work=work, step=a, limit=MOST)).entries
    right = source.entries(Query(work=work, step=b, limit=MOST)).entries
    pairs = paired(left, right)[:PAIRS]
    rows = [
        h("div", h("div", _answer(source, one)), h("div", _answer(source, other)), class_="grid2 pair")
        for one, other in pairs
    ]
    return h("section", h("h2", "Answers"), rows or [h("p", "No answers are kept of these.", class_="empty")],
             class_="panel")  # fmt: skip


def paired(left: list[Entry], right: list[Entry]) -> list[tuple[Entry | None, Entry | None]]:
    """One answer of a task to each side: the same tasks beside each other first, then the others in their order."""
    first, second = _by_task(left), _by_task(right)
    both = [task for task in first if task in second]
    found: list[tuple[Entry | None, Entry | None]] = [(first[task], second[task]) for task in both]
    alone = [entry for task, entry in first.items() if task not in second]
    others = [entry for task, entry in second.items() if task not in first]
    for i in range(max(len(alone), len(others))):
        found.append((alone[i] if i < len(alone) else None, others[i] if i < len(others) else None))
    return found


def _by_task(entries: list[Entry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(entry.task or entry.key, entry)
    return found


def _answer(source: Source, entry: Entry | None) -> list[Child]:
    if entry is None:
        return [h("p", "–", class_="dim")]
    return [
        h("div", h("a", f"{source.step_noun} {entry.step}", href=entry_address(entry.key)),
          badge(entry.outcome, text=entry.outcome or "not judged"), h("span", f"reward {told(entry.reward)}"),
          class_="head"),
        h("p", entry.task, class_="mono dim"),
        h("pre", entry.answer or "(empty)", class_="text-block"),
    ]  # fmt: skip
