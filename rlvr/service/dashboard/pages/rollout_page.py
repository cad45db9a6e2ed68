"""The page of one rollout: prompt, tokens shaded by log-prob, what it is compared with, verdicts, and its group.

The address has the filters of the table that the reader came from, so that keys lead through that table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.dashboard_data import (
    AnswerDetail,
    AnswerRow,
    Cell,
    Query,
    Source,
    Table,
    TokenPiece,
    TokenView,
)
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollouts_page import RolloutFilters, read_filters

DARKEST = 4.0  # nats: less likely tokens (2 %) have the full shade
SHADES = 15  # and so many are told apart; the style sheet has them
LISTED = 500  # tokens in a table
SURE = math.log(0.9)  # more likely tokens are not listed as unlikely
RATINGS = (("0", " wrong"), ("0.25", ""), ("0.5", " half"), ("0.75", ""), ("1", " right"))


def rollout_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    detail = source.detail(parameters.get("key", ""))
    if detail is None:
        return parts.not_found_page(source, source.answer_noun, parameters.get("key", ""))
    row = detail.row
    filters = read_filters(source, {name: value for name, value in parameters.items() if name != "key"})
    facts = {
        "reward": parts.format_number(row.reward),
        "advantage": parts.format_number(row.advantage),
        "tokens": f"{row.tokens:,}" if row.tokens else "–",
        "mean log-prob": parts.format_number(row.logprob),
        source.status_noun: row.status or "–",
        **{name: fact for name, fact in detail.facts.items() if fact},
    }
    steps = parts.address("/ui/trajectories", work=row.work, **{"from": row.step, "to": row.step})
    step = [] if row.step is None else [Cell(f"{source.step_noun} {row.step}", steps)]
    group = detail.siblings if any(one.key == row.key for one in detail.siblings) else [row, *detail.siblings]
    title = "Completion"
    if detail.conversation.messages:
        title = "Tokens of this branch" if detail.conversation.branches else "Tokens"
    data = {
        "detail": detail, "row": row, "facts": facts, "group": group, "given": filters.given,
        "crumbs": [Cell(row.work, parts.work_address(source, row.work)), *step, Cell(row.key)],
        "nearby": _list_nearby(source, filters, group, row), "list": filters.link() if filters.given else "",
        "tokens": _list_tokens(detail.tokens), "answer_title": title, "unsure": _name_unsure(detail.tokens),
        "ratings": RATINGS if source.can_rate else (),
        "rated": parameters.get("notice") or _describe_rating(detail),
        "group_title": "The same session" if source.noun == "session" else "The same group",
    }  # fmt: skip
    return parts.Page(source, f"{source.answer_noun.capitalize()} {row.key}", "rollout.html", data)


def _list_nearby(source: Source, filters: RolloutFilters, group: list[AnswerRow], row: AnswerRow) -> dict[str, Any]:
    """Links to the one before and the one after, in the table that the reader came from, or else in the group."""
    query = filters.query if filters.given else Query(work=row.work)
    in_list = bool(filters.given) or source.can_group
    near = source.neighbours(query, filters.is_grouped, row.key) if in_list else None
    if near is not None:
        before, after, place = near.before, near.after, f"{near.place:,} of {near.total:,} in this list"
    else:
        at = next(place for place, one in enumerate(group) if one.key == row.key)
        before = group[at - 1].key if at else ""
        after = group[at + 1].key if at + 1 < len(group) else ""
        place = f"{at + 1:,} of {len(group):,} in this group"
    if not before and not after and not filters.given:
        return {}
    previous, following = (parts.answer_address(key, **filters.given) if key else "" for key in (before, after))
    return {"previous": previous, "next": following, "place": place}


def _name_unsure(tokens: TokenView) -> str:
    """The least likely tokens."""
    unsure = sorted((piece for piece in tokens.pieces if piece.logprob < SURE), key=lambda piece: piece.logprob)
    return ", ".join(f"{piece.text.strip() or 'blank'!r} {format_probability(piece.logprob)}" for piece in unsure[:5])


def _list_tokens(tokens: TokenView) -> Table:
    """The first tokens as rows, for a finger, a keyboard or a copy: the shaded text says the same under the pointer."""
    rows: list[list[Cell | str]] = []
    for piece in tokens.pieces[:LISTED]:
        numbers = ["not sampled", "–"]
        if piece.is_sampled:
            numbers = [f"{piece.logprob:.3f}", format_probability(piece.logprob)]
        rows.append([f"{piece.place + 1:,}", Cell(repr(piece.text), class_="mono"), piece.token, *numbers])
    if len(tokens.pieces) > LISTED:
        rows.append([f"{len(tokens.pieces) - LISTED:,} more have their shade above."])
    columns = [("Text", ""), ("Token", "num"), ("Log-prob, nats", "num"), ("Probability", "num")]
    return Table(columns, rows, "Tokens", "Place", "data short")


def shade(logprob: float) -> int:
    """How dark a token is drawn, from 0 to `SHADES`: the darker the less likely it was."""
    return round(SHADES * min(1.0, math.sqrt(max(0.0, -logprob) / DARKEST)))


def describe_token(piece: TokenPiece) -> str:
    if not piece.is_sampled:
        return f"token {piece.token}: written by the environment"
    advantage = "" if piece.advantage is None else f", advantage {piece.advantage:+.3f}"
    return f"token {piece.token}: log-prob {piece.logprob:.3f}, {format_probability(piece.logprob)}{advantage}"


def format_probability(logprob: float) -> str:
    share = math.exp(min(0.0, logprob))
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _describe_rating(detail: AnswerDetail) -> str:
    rating = detail.row.rating
    if rating is None:
        return "Not rated yet."
    return f"Rated {rating:.2f}" + (f" (mean of {detail.ratings})" if detail.ratings != 1 else "")
