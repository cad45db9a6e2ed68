"""The page of one rollout: prompt, tokens shaded by log-prob, what it is compared with, verdicts, and its group.

The address has the filters of the table that the reader came from, so that keys lead through that table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import (
    AnswerDetail,
    AnswerRow,
    BranchRow,
    ConversationView,
    Message,
    Query,
    Source,
    TokenPiece,
    VerifierVerdict,
)
from rlvr.service.dashboard.element_tree import Page, Tree, h
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollout_filters import RolloutFilters, link, read_filters

DARKEST = 4.0  # nats: less likely tokens (2 %) have the full shade
SURE = math.log(0.9)  # more likely tokens are not listed as unlikely
RATINGS = ((0.0, "wrong"), (0.25, ""), (0.5, "half"), (0.75, ""), (1.0, "right"))
ROLES = ("system", "user", "assistant", "tool")


def rollout(source: Source, parameters: Mapping[str, str]) -> Page:
    detail = source.detail(parameters.get("key", ""))
    if detail is None:
        return parts.not_found_page(source, source.answer_noun, parameters.get("key", ""))
    row = detail.row
    filters = read_filters(source, {name: value for name, value in parameters.items() if name != "key"})
    step = "" if row.step is None else f"{source.step_noun} {row.step}"
    facts = {
        "reward": parts.format_number(row.reward),
        "advantage": parts.format_number(row.advantage),
        "tokens": f"{row.tokens:,}" if row.tokens else "–",
        "mean log-prob": parts.format_number(row.logprob),
        source.status_noun: row.status or "–",
    }
    step_address = parts.address("/ui/trajectories", work=row.work, **{"from": row.step, "to": row.step})
    group = detail.siblings if any(one.key == row.key for one in detail.siblings) else [row, *detail.siblings]
    has_messages = bool(detail.conversation.messages)
    prompt = _conversation(detail) if has_messages else h(
        "section", h("h2", "Prompt"), parts.block(detail.prompt), class_="panel"
    )  # fmt: skip
    beside: list[Tree | None] = [
        _reference(detail.reference) if detail.reference else None,
        _verdicts(detail.verdicts, row.outcome in parts.GOOD),
        _rating(source, detail, parameters),
        _feedback(detail),
        _group(source, group, row, filters),
    ]
    return parts.frame_page(
        source,
        f"{source.answer_noun.capitalize()} {row.key}",
        "",
        h("div",
          h("ol", h("li", h("a", row.work, href=parts.work_address(source, row.work))),
            h("li", h("a", step, href=step_address)) if step else None, h("li", row.key), class_="crumbs"),
          _steps_through(source, filters, group, row), class_="head"),
        h("div", h("h1", row.task or source.answer_noun.capitalize(), class_="mono"),
          parts.badge(row.outcome, text=row.outcome or "not judged"), h("span", row.reason, class_="dim"),
          class_="head"),
        h("section", parts.figures(facts | {k: v for k, v in detail.facts.items() if v}), class_="panel",
          aria_label="Numbers"),
        _branches(detail.conversation),
        h("div", prompt, h("div", _answer(detail), *beside, class_="stack"), class_="beside talk") if has_messages
        else h("div", prompt, _answer(detail), h("div", beside, class_="stack"), class_="beside"),
    )  # fmt: skip


def _steps_through(source: Source, filters: RolloutFilters, group: list[AnswerRow], row: AnswerRow) -> Tree | None:
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
        return None
    given = filters.given

    def to(key: str, text: str, keys: str, rel: str) -> Tree:
        if not key:
            return h("span", text, class_="button off")
        return h("a", text, href=parts.answer_address(key, **given), class_="button", aria_keyshortcuts=keys, rel=rel)

    return h(
        "nav", to(before, "← Previous (k)", "k ArrowLeft", "prev"), h("small", place, class_="dim"),
        to(after, "Next (j) →", "j ArrowRight", "next"),
        h("a", "Back to the list", href=link(filters)) if given else None,
        class_="pager end", aria_label=f"Other {source.answer_nouns}",
    )  # fmt: skip


def _branches(conversation: ConversationView) -> Tree | None:
    """The branches of an episode as a tree to choose from."""
    if not conversation.branches:
        return None
    return h(
        "section", h("h2", f"Branches: {len(conversation.branches)}"),
        h("ol", [_branch(branch) for branch in conversation.branches], class_="branches"), class_="panel",
    )  # fmt: skip


def _branch(branch: BranchRow) -> Tree:
    own = branch.turns - branch.shared
    facts = f"{own} turn{'' if own == 1 else 's'}"
    if branch.shared:
        facts += f" behind {branch.shared} shared"
    return h(
        "li",
        h("a", branch.text or "(empty)", href=parts.answer_address(branch.key),
          aria_current="page" if branch.is_shown else None, class_="mono"),
        h("small", facts, class_="dim"),
        h("small", f"reward {parts.format_number(branch.reward)}", class_="dim"),
        style=f"--depth: {min(branch.depth, 8)}",
    )  # fmt: skip


def _conversation(detail: AnswerDetail) -> Tree:
    """The messages, as the program that plays the episode has them."""
    return h(
        "section", h("h2", "Conversation"),
        h("ol", [_message(message) for message in detail.conversation.messages], class_="messages"),
        h("details", h("summary", "The prompt as the model read it"), parts.block(detail.prompt)), class_="panel",
    )  # fmt: skip


MARKS = {"trained": ("sampled", ""), "shared": ("trained in another branch", "warn")}


def _message(message: Message) -> Tree:
    if message.role == "note":
        return h("li", h("small", message.text, class_="dim"), class_="divider")
    mark, kind = MARKS.get(message.mark, ("", ""))
    has_text = message.text or not message.calls
    return h(
        "li",
        h("div", h("b", message.role), h("span", message.name, class_="mono") if message.name else None,
          h("span", mark, class_=f"badge {kind}".strip()) if mark else None,
          h("small", f"reward {parts.format_number(message.credit)}", class_="dim")
          if message.credit is not None else None, class_="line"),
        h("pre", message.text or "(empty)", class_="text-block", tabindex="0") if has_text else None,
        [h("div", h("div", h("small", "calls", class_="dim"), h("b", name, class_="mono"), class_="line"),
           h("pre", arguments, class_="text-block", tabindex="0") if arguments else None, class_="call")
         for name, arguments in message.calls],
        class_=f"message {message.role if message.role in ROLES else 'other'} {message.mark}".strip(),
    )  # fmt: skip


def _answer(detail: AnswerDetail) -> Tree:
    pieces, note = detail.tokens.pieces, detail.tokens.note
    title = "Completion"
    if detail.conversation.messages:
        title = "Tokens of this branch" if detail.conversation.branches else "Tokens"
    if not pieces:
        return h("section", h("h2", title), parts.block(detail.answer),
                 h("p", note, class_="dim") if note else None, class_="panel")  # fmt: skip
    unsure = sorted((piece for piece in pieces if piece.logprob < SURE), key=lambda piece: piece.logprob)
    names = ", ".join(f"{piece.text.strip() or 'blank'!r} {chance(piece.logprob)}" for piece in unsure[:5])
    return h(
        "section", h("h2", title),
        h("pre", [token_span(piece) for piece in pieces], class_="text-block tokens", tabindex="0"),
        h("div", h("span", "certain"), h("i", aria_hidden="true"), h("span", "unlikely (2 % or less)"),
          h("span", f"least likely: {names}") if names else None,
          h("span", "underlined: written by the environment, not trained") if not all(
              piece.is_sampled for piece in pieces) else None, class_="scale"),
        h("p", note, class_="dim") if note else None,
        h("details", h("summary", "As plain text"), parts.block(detail.answer)), class_="panel",
    )  # fmt: skip


def token_span(piece: TokenPiece) -> Tree:
    """A token, shaded darker the less likely it was. A line break is drawn as ⏎, so that it has a shade too."""
    shade = min(1.0, math.sqrt(max(0.0, -piece.logprob) / DARKEST)) * 0.75
    title = f"token {piece.token}: log-prob {piece.logprob:.3f}, {chance(piece.logprob)}"
    if piece.advantage is not None:
        title += f", advantage {piece.advantage:+.3f}"
    if not piece.is_sampled:
        return h("span", piece.text, title=f"token {piece.token}: written by the environment", class_="given")
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


def _reference(reference: list[tuple[str, str]]) -> Tree:
    """What the answer was compared with, beside it."""
    return h("section", h("h2", "Compared with"),
             [part for title, text in reference for part in (h("h3", title), parts.block(text))],
             class_="panel stack")  # fmt: skip


def _verdicts(verdicts: list[VerifierVerdict], passed: bool) -> Tree:
    items = [_verdict(one, passed) for one in verdicts] or [h("p", "No verifier judged this answer.", class_="dim")]
    return h("section", h("h2", "Verdicts"), items, class_="panel")


def _verdict(verdict: VerifierVerdict, passed: bool) -> Tree:
    """One verdict. A verifier that accepts an answer which did not pass is not shown in green."""
    word = verdict.outcome if passed or verdict.outcome not in parts.GOOD else ""
    shares = {name: parts.format_number(value) for name, value in verdict.parts.items()}
    return h(
        "div",
        h("div", h("b", verdict.verifier), parts.badge(word, text=verdict.outcome),
          h("span", parts.format_number(verdict.value)),
          h("span", verdict.reason, class_="mono") if verdict.reason else None, class_="line"),
        parts.figures(shares) if shares else None,
        h("pre", verdict.detail, class_="text-block dim") if verdict.detail else None, class_="verdict",
    )  # fmt: skip


def _feedback(detail: AnswerDetail) -> Tree | None:
    if not detail.feedback and not detail.suggestions:
        return None
    return h("section", h("h2", "Feedback"), parts.block(detail.feedback) if detail.feedback else None,
             h("ul", [h("li", text) for text in detail.suggestions], class_="bullets"), class_="panel")  # fmt: skip


def _rating(source: Source, detail: AnswerDetail, parameters: Mapping[str, str]) -> Tree | None:
    """Five buttons to rate the answer, and the rating so far."""
    if not source.can_rate:
        return None
    rating = detail.row.rating
    rated = (
        "Not rated yet."
        if rating is None
        else f"Rated {rating:.2f} (mean of {detail.ratings})" if detail.ratings != 1 else f"Rated {rating:.2f}"
    )  # fmt: skip
    buttons = [
        h("button", f"{value:g}{f' {word}' if word else ''}", h("kbd", str(key)), act="rate", value=f"{value:g}",
          type="button", aria_keyshortcuts=str(key), aria_label=f"Rate {value:g}{f', {word}' if word else ''}")
        for key, (value, word) in enumerate(RATINGS, 1)
    ]  # fmt: skip
    return h(
        "section", h("h2", "Your rating"),
        h("div", buttons, class_="rate", role="group", aria_label="Rate from 0 to 1"),
        h("p", parameters.get("notice") or rated, class_="dim", role="status"), class_="panel",
    )  # fmt: skip


def _group(source: Source, group: list[AnswerRow], row: AnswerRow, filters: RolloutFilters) -> Tree | None:
    """The others of the group, in a list beside the answer; a link keeps the filters."""
    if len(group) < 2:
        return None
    title = "The same session" if source.noun == "session" else "The same group"
    return h(
        "section", h("h2", f"{title}: {len(group) - 1} more"),
        h("ol", [_member(one, one.key == row.key, filters) for one in group], class_="members scrolls", tabindex="0",
          aria_label=title), class_="panel",
    )  # fmt: skip


def _member(one: AnswerRow, is_shown: bool, filters: RolloutFilters) -> Tree:
    words = f"{one.outcome or 'not judged'}, reward {parts.format_number(one.reward)}, {one.tokens} tokens"
    return h(
        "li",
        h("a", parts.badge(one.outcome, text=one.outcome or "not judged"),
          h("span", parts.format_number(one.reward), class_="num"),
          h("span", one.answer or "(empty)", class_="short mono"),
          href=parts.answer_address(one.key, **filters.given), aria_current="page" if is_shown else None,
          aria_label=f"{words}: {one.answer}"),
    )  # fmt: skip
