"""The table of all answers with its filters, and the page of one answer: prompt, tokens shaded by log-prob, verdicts.

The address has the filters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import (
    PAGE,
    AnswerDetail,
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

DARKEST = 4.0  # nats: less likely tokens (2 %) have the full shade
SURE = math.log(0.9)  # more likely tokens are not listed as unlikely
RATINGS = ((0.0, "wrong"), (0.25, ""), (0.5, "half"), (0.75, ""), (1.0, "right"))
PATH = "/ui/trajectories"
ROLES = ("system", "user", "assistant", "tool")


def query_of(parameters: Mapping[str, str]) -> Query:
    """The filter of an address. A step that is not a number is ignored."""
    step = parameters.get("step", "").strip()
    return Query(
        work=parameters.get("work", ""),
        task=parameters.get("task", "").strip(),
        outcome=parameters.get("outcome", ""),
        status=parameters.get("status", ""),
        step=int(step) if step.isdecimal() and len(step) < 10 else None,
        offset=(parts.page_number(parameters) - 1) * PAGE,
    )


def trajectories(source: Source, parameters: Mapping[str, str]) -> Page:
    query = query_of(parameters)
    page = source.answers(query)
    conditions = {"work": query.work, "task": query.task, "outcome": query.outcome, "status": query.status,
            "step": query.step}  # fmt: skip
    so_far = "" if page.complete else " so far (older ones are still being read)"
    is_filtered = any(value not in ("", None) for value in conditions.values())
    return parts.frame_page(
        source,
        "Trajectories",
        "Trajectories",
        h("div", h("h1", "Trajectories"), h("p", f"{page.total:,}{' match' if is_filtered else ''}{so_far}",
                                            class_="dim", role="status"), class_="head"),
        _filters(source, query, is_filtered),
        h("section",
          parts.answers_table(source, page.rows, not query.work, "Trajectories, newest first") if page.rows
          else h("p", "No trajectory matches." if is_filtered else "No trajectory yet.", class_="empty"),
          parts.pager(PATH, conditions, query.offset, len(page.rows), page.total), class_="panel"),
    )  # fmt: skip


def _filters(source: Source, query: Query, is_filtered: bool) -> Tree:
    choices = source.choices(query.work)
    works = parts.work_choices(source)
    first, last = choices.steps or (0, 0)
    step = "" if query.step is None else str(query.step)
    hint = f"{first} to {last}" if choices.steps else ""
    return h(
        "form",
        parts.select_field("outcome", "Outcome", query.outcome, choices.outcomes),
        parts.text_field("task", "Task", query.task, choices.tasks, placeholder="any"),
        parts.text_field("step", source.step_noun.capitalize(), step, inputmode="numeric", placeholder=hint or "any")
        if source.can_compare or step else None,
        parts.select_field("status", source.status_noun.capitalize(), query.status, choices.statuses),
        parts.select_field("work", source.noun.capitalize(), query.work, works)
        if len(works) > 1 or query.work else None,
        h("div", h("button", "Filter", class_="main"),
          h("a", "Clear", href=PATH, class_="button") if is_filtered else None, class_="rate"),
        method="get", action=PATH, class_="filters panel", role="search", aria_label="Filter trajectories",
    )  # fmt: skip


def trajectory(source: Source, parameters: Mapping[str, str]) -> Page:
    detail = source.detail(parameters.get("key", ""))
    if detail is None:
        return parts.not_found_page(source, "trajectory", parameters.get("key", ""))
    row = detail.row
    step = "" if row.step is None else f"{source.step_noun} {row.step}"
    facts = {
        "reward": parts.format_number(row.reward),
        "advantage": parts.format_number(row.advantage),
        "tokens": str(row.tokens) if row.tokens else "–",
        source.status_noun: row.status or "–",
    }
    verdicts = _verdicts(detail.verdicts, row.outcome in parts.GOOD)
    side = [one for one in (_feedback(detail), _rating(source, detail, parameters)) if one is not None]
    step_address = parts.address("/ui/trajectories", work=row.work, step=row.step)
    return parts.frame_page(
        source,
        f"Trajectory {row.key}",
        "",
        h("ol", h("li", h("a", row.work, href=parts.work_address(source, row.work))),
          h("li", h("a", step, href=step_address)) if step else None, h("li", row.key), class_="crumbs"),
        h("div", h("h1", row.task or "Trajectory", class_="mono"),
          parts.badge(row.outcome, text=row.outcome or "not judged"), h("span", row.reason, class_="dim"),
          class_="head"),
        h("section", parts.figures(facts | {k: v for k, v in detail.facts.items() if v}), class_="panel",
          aria_label="Numbers"),
        _branches(detail.conversation),
        _conversation(detail) if detail.conversation.messages
        else h("section", h("h2", "Prompt"), parts.block(detail.prompt), class_="panel"),
        h("div", _answer(detail), _reference(detail.reference), class_="grid2") if detail.reference
        else _answer(detail),
        h("div", verdicts, h("div", side, class_="stack"), class_="grid2") if side else verdicts,
        _siblings(source, detail),
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
    title = "Answer"
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
          h("span", f"least likely: {names}") if names else None, class_="scale"),
        h("p", note, class_="dim") if note else None,
        h("details", h("summary", "As plain text"), parts.block(detail.answer)), class_="panel",
    )  # fmt: skip


def token_span(piece: TokenPiece) -> Tree:
    """A token, shaded darker the less likely it was. A line break is drawn as ⏎, so that it has a shade too."""
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
        h("button", f"{value:g}{f' {word}' if word else ''}", act="rate", value=f"{value:g}", type="button",
          aria_label=f"Rate {value:g}{f', {word}' if word else ''}")
        for value, word in RATINGS
    ]  # fmt: skip
    return h(
        "section", h("h2", "Your rating"),
        h("div", buttons, class_="rate", role="group", aria_label="Rate from 0 to 1"),
        h("p", parameters.get("notice") or rated, class_="dim", role="status"), class_="panel",
    )  # fmt: skip


def _siblings(source: Source, detail: AnswerDetail) -> Tree | None:
    if not detail.siblings:
        return None
    title = "The same session" if source.noun == "session" else "The same group"
    return h(
        "section", h("h2", f"{title}: {len(detail.siblings)} more"),
        parts.answers_table(source, detail.siblings, False, title), class_="panel",
    )  # fmt: skip
