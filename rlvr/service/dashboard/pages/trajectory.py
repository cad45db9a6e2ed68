"""One answer in full: the prompt, the answer shaded by how likely each token was, what every verifier said of it.

Exercised by tests/test_dashboard_pages.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlvr.service.dashboard.data import Detail, Piece, Source, Verdict
from rlvr.service.dashboard.pages.parts import (
    address,
    answers_table,
    badge,
    block,
    figures,
    framed,
    missing,
    told,
    work_address,
)
from rlvr.service.dashboard.tree import Page, Tree, h

DARKEST = 4.0  # nats: a token at most this likely (2 %) has the full shade
SURE = math.log(0.9)  # a token above is none of the unlikely ones
RATINGS = ((0.0, "wrong"), (0.25, ""), (0.5, "half"), (0.75, ""), (1.0, "right"))


def trajectory(source: Source, asked: Mapping[str, str]) -> Page:
    detail = source.detail(asked.get("key", ""))
    if detail is None:
        return missing(source, "trajectory", asked.get("key", ""))
    entry = detail.entry
    step = "" if entry.step is None else f"{source.step_noun} {entry.step}"
    facts = {
        "reward": told(entry.reward),
        "advantage": told(entry.advantage),
        "tokens": str(entry.tokens) if entry.tokens else "–",
        source.status_noun: entry.status or "–",
    }
    verdicts = _verdicts(detail.verdicts)
    beside = [one for one in (_feedback(detail), _rating(source, detail, asked)) if one is not None]
    within = address("/ui/trajectories", work=entry.work, step=entry.step)
    return framed(
        source,
        f"Trajectory {entry.key}",
        "",
        h("ol", h("li", h("a", entry.work, href=work_address(source, entry.work))),
          h("li", h("a", step, href=within)) if step else None, h("li", entry.key), class_="crumbs"),
        h("div", h("h1", entry.task or "Trajectory", class_="mono"),
          badge(entry.outcome, text=entry.outcome or "not judged"), h("span", entry.reason, class_="dim"),
          class_="head"),
        h("section", figures(facts | {k: v for k, v in detail.facts.items() if v}), class_="panel",
          aria_label="Numbers"),
        h("section", h("h2", "Prompt"), block(detail.prompt), class_="panel"),
        _answer(detail),
        h("div", verdicts, h("div", beside, class_="stack"), class_="grid2") if beside else verdicts,
        _siblings(source, detail),
    )  # fmt: skip


def _answer(detail: Detail) -> Tree:
    if not detail.pieces:
        return h("section", h("h2", "Answer"), block(detail.answer),
                 h("p", detail.pieces_note, class_="dim") if detail.pieces_note else None, class_="panel")  # fmt: skip
    unsure = sorted((piece for piece in detail.pieces if piece.logprob < SURE), key=lambda piece: piece.logprob)
    names = ", ".join(f"{piece.text.strip() or 'blank'!r} {chance(piece.logprob)}" for piece in unsure[:5])
    return h(
        "section", h("h2", "Answer"),
        h("pre", [shaded(piece) for piece in detail.pieces], class_="text-block tokens", tabindex="0"),
        h("div", h("span", "certain"), h("i", aria_hidden="true"), h("span", "unlikely (2 % or less)"),
          h("span", f"least likely: {names}") if names else None, class_="scale"),
        h("p", detail.pieces_note, class_="dim") if detail.pieces_note else None,
        h("details", h("summary", "As plain text"), block(detail.answer)), class_="panel",
    )  # fmt: skip


def shaded(piece: Piece) -> Tree:
    """A token, the darker the less likely it was. A line break is also drawn, or its shade could not be seen."""
    shade = min(1.0, math.sqrt(max(0.0, -piece.logprob) / DARKEST)) * 0.75
    title = f"token {piece.token}: log-prob {piece.logprob:.3f}, {chance(piece.logprob)}"
    style = f"--a: {shade:.2f}" if shade >= 0.01 else None
    if "\n" not in piece.text:
        return h("span", piece.text, title=title, style=style)
    drawn: list[Tree | str] = []
    for part in piece.text.split("\n")[:-1]:
        drawn += [part, h("span", "⏎", class_="break", aria_hidden="true"), "\n"]
    return h("span", *drawn, piece.text.rpartition("\n")[2], title=title, style=style)


def chance(logprob: float) -> str:
    share = math.exp(min(0.0, logprob))
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _verdicts(verdicts: list[Verdict]) -> Tree:
    said = [_verdict(verdict) for verdict in verdicts] or [h("p", "No verifier judged this answer.", class_="dim")]
    return h("section", h("h2", "Verdicts"), said, class_="panel")


def _verdict(verdict: Verdict) -> Tree:
    parts = {name: told(value) for name, value in verdict.parts.items()}
    return h(
        "div",
        h("div", h("b", verdict.verifier), badge(verdict.outcome), h("span", told(verdict.value)),
          h("span", verdict.reason, class_="mono") if verdict.reason else None, class_="line"),
        figures(parts) if parts else None,
        h("pre", verdict.detail, class_="text-block dim") if verdict.detail else None, class_="verdict",
    )  # fmt: skip


def _feedback(detail: Detail) -> Tree | None:
    if not detail.feedback and not detail.suggestions:
        return None
    return h("section", h("h2", "Feedback"), block(detail.feedback) if detail.feedback else None,
             h("ul", [h("li", text) for text in detail.suggestions], class_="bullets"), class_="panel")  # fmt: skip


def _rating(source: Source, detail: Detail, asked: Mapping[str, str]) -> Tree | None:
    """A person's rating: five buttons, and what was given so far."""
    if not source.can_rate:
        return None
    rating = detail.entry.rating
    given = (
        "Nobody has rated this answer."
        if rating is None
        else f"Rated {rating:.2f} (mean of {detail.ratings})" if detail.ratings != 1 else f"Rated {rating:.2f}"
    )  # fmt: skip
    buttons = [
        h("button", f"{value:g}{f' {word}' if word else ''}", act="rate", value=f"{value:g}", type="button",
          aria_label=f"Rate {value:g}{f', {word}' if word else ''}")
        for value, word in RATINGS
    ]  # fmt: skip
    return h(
        "section", h("h2", "Your rating"),
        h("div", buttons, class_="rate", role="group", aria_label="Rate from 0 to 1"),
        h("p", asked.get("said") or given, class_="dim", role="status"), class_="panel",
    )  # fmt: skip


def _siblings(source: Source, detail: Detail) -> Tree | None:
    if not detail.siblings:
        return None
    title = "The same group" if source.noun == "run" else f"The same {source.noun}"
    return h(
        "section", h("h2", f"{title}: {len(detail.siblings)} more"),
        answers_table(source, detail.siblings, False, title), class_="panel",
    )  # fmt: skip
