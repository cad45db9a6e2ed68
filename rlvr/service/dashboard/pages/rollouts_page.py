"""The table of all rollouts, by group or one by one, with its filters. The address has all of them."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import AnswerRow, GroupRow, Query, Source
from rlvr.service.dashboard.element_tree import Child, Page, Tree, h
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollout_filters import (
    PATH,
    SINGLE,
    RolloutFilters,
    draw_form,
    filters_of,
    link,
    read_filters,
)

OPEN_ROWS = 60  # completions of a page whose groups are opened, where a filter chose them
FEW = 8  # rollouts on the page of a run or session; the table has all
PAGER = ("Previous", "Next")


def rollouts(source: Source, parameters: Mapping[str, str]) -> Page:
    filters = read_filters(source, parameters)
    nouns = source.answer_nouns
    if filters.is_grouped:
        groups = source.groups(filters.query)
        content: list[Child] = [_group(source, filters, one, groups.answers) for one in groups.groups]
        content = [h("ol", content, class_="groups", aria_label="Groups")] if content else []
        shown, total, note = len(groups.groups), groups.total, groups.note
        in_groups = f"in {total:,} group{'' if total == 1 else 's'}"
        said = f"{groups.answers:,} {nouns if groups.answers != 1 else source.answer_noun} {in_groups}"
        share = groups.share
    else:
        page = source.answers(filters.query)
        content = [rollout_table(source, page.rows, filters)] if page.rows else []
        shown, total, share, note = len(page.rows), page.total, page.share, page.note
        said = f"{total:,} {nouns if total != 1 else source.answer_noun}"
    narrowed = (" match" if filters.narrowing else "") + ("" if share >= 1 else " so far")
    empty = f"No {source.answer_noun} matches." if filters.narrowing else f"No {source.answer_noun} yet."
    return parts.frame_page(
        source,
        nouns.capitalize(),
        nouns.capitalize(),
        h("div", h("h1", nouns.capitalize()), h("p", f"{said}{narrowed}", class_="dim", role="status"), class_="head"),
        [h("p", text, class_="note problem", role="alert") for text in filters.problems],
        draw_reading(share),
        h("p", note, class_="note hint") if note else None,
        draw_form(source, filters),
        h("section", *(content or [h("p", empty, class_="empty")]),
          parts.pager(PATH, filters.given, filters.query.offset, shown, total, PAGER if filters.query.sort else
                      ("Newer", "Older")), class_="panel", aria_label=nouns.capitalize()),
    )  # fmt: skip


def draw_reading(share: float) -> Tree | None:
    """How much of the rollouts is read, while they are."""
    if share >= 1:
        return None
    said = f"{100 * share:.0f} % of the rollouts are read, the newest first. This page follows."
    return h("div", h("p", said), h("progress", value=f"{share:.3f}", max="1", aria_label="rollouts read"),
             class_="note hint", role="status")  # fmt: skip


def latest_rollouts(source: Source, work: str) -> Tree:
    """The newest rollouts of a run or session, one of each group, whose rollouts are alike, and a link to all."""
    filters = filters_of(Query(work=work, limit=FEW * 8))
    page = source.answers(filters.query)
    first = {row.group or row.key: row for row in reversed(page.rows)}
    latest = [row for row in page.rows if first[row.group or row.key] is row][:FEW]
    more = h("a", f"All {page.total:,} {source.answer_nouns}", href=parts.address(PATH, work=work))
    return h(
        "section", h("h2", f"Latest {source.answer_nouns}"),
        rollout_table(source, latest, filters) if latest
        else h("p", f"No {source.answer_noun} is stored.", class_="empty"),
        h("p", "Open one to rate it, by the keys 1 to 5.", class_="dim") if source.can_rate and latest else None,
        h("p", more) if page.total > len(latest) else None, class_="panel",
    )  # fmt: skip


def _group(source: Source, filters: RolloutFilters, group: GroupRow, answers: int) -> Tree:
    """A group as a row that opens to its completions."""
    first = group.rows[0]
    count = f"{group.matching:,} of {group.size:,}" if group.matching < group.size else f"{group.size:,}"
    is_open = bool(filters.narrowing) and answers <= OPEN_ROWS
    rest = group.matching - len(group.rows)
    more = link(filters, group=group.name, work=first.work, show=SINGLE, **{"from": first.step, "to": first.step})
    whole = parts.address(
        PATH, group=group.name, work=first.work, show=SINGLE, **{"from": first.step, "to": first.step}
    )
    return h(
        "li",
        h("details",
          h("summary", h(
            "span",
            h("span", first.prompt or first.task or "(no prompt)", class_="short mono"),
            h("span", [h("i", class_=parts.kind_of(row.outcome)) for row in group.rows], class_="cells",
              aria_hidden="true"),
            h("span", h("small", "passed "), f"{group.passed:,} of {group.matching:,}"),
            h("span", h("small", "reward "), _write_rewards(group)),
            h("span", h("small", f"{source.step_noun} "), str(first.step)) if first.step is not None else None,
            h("span", h("small", f"{source.answer_nouns} "), count), class_="group-line")),
          h("p", h("span", first.task or "no task", class_="mono"), h("span", f"level {first.level}")
            if first.level else None, h("span", f"{source.noun} {first.work}") if not filters.query.work else None,
            class_="dim rate"),
          rollout_table(source, group.rows, filters, in_group=True),
          h("p", h("a", f"{rest:,} more that match", href=more) if rest > 0 and group.name else None,
            h("a", "The whole group", href=whole) if group.matching < group.size and group.name else None,
            class_="rate"),
          open="" if is_open else None),
        key=f"{first.work} {first.step} {group.name or first.key}",
    )  # fmt: skip


def _write_rewards(group: GroupRow) -> str:
    if group.rewards is None:
        return "–"
    low, mean, high = group.rewards
    return f"{mean:.3f}" + (f" ({low:.3g} to {high:.3g})" if low < high else "")


def rollout_table(source: Source, rows: list[AnswerRow], filters: RolloutFilters, in_group: bool = False) -> Tree:
    """Rollouts as rows; their links take the filters along, so that keys lead through the same list."""
    several = not filters.query.work and not in_group and len({row.work for row in rows}) > 1
    has_logprobs = any(row.logprob is not None for row in rows)
    columns = [("Outcome", "", ""), ("Reward", "num", "reward"), ("Advantage", "num", "advantage"),
               ("Length", "num", "tokens")] + ([("Log-prob", "num", "logprob")] if has_logprobs else [])  # fmt: skip
    if not in_group:
        columns += [(source.step_noun.capitalize(), "num", "step"), ("Task", "", "")]
    columns += [("Completion", "", ""), (source.status_noun.capitalize(), "", "")]
    columns += [(source.noun.capitalize(), "", "")] if several else []
    heads = [
        _sorting_head(source, filters, name, kind, sort) if sort and not in_group
        else h("th", name, scope="col", class_=kind or None) for name, kind, sort in columns
    ]  # fmt: skip
    label = f"{source.answer_nouns.capitalize()}{' of the group' if in_group else ''}"
    return h(
        "div",
        h("table", h("thead", h("tr", heads)),
          h("tbody", [_row(source, row, filters, columns) for row in rows]),
          class_="answers rollouts", aria_label=label),
        style="overflow-x: auto",
    )  # fmt: skip


def _sorting_head(source: Source, filters: RolloutFilters, name: str, kind: str, sort: str) -> Tree:
    """A column's head, which sorts by it; once more the other way round."""
    if sort not in source.sorts:
        return h("th", name, scope="col", class_=kind)
    now = filters.query.sort
    mark, way = {sort: (" ↓", "descending"), f"-{sort}": (" ↑", "ascending")}.get(now, ("", None))
    to = link(filters, sort=f"-{sort}" if now == sort else sort)
    return h("th", h("a", f"{name}{mark}", href=to), scope="col", class_=kind, aria_sort=way)


def _row(source: Source, row: AnswerRow, filters: RolloutFilters, columns: list[tuple[str, str, str]]) -> Tree:
    label = f"{row.outcome or 'not judged'}, task {row.task}, {source.step_noun} {row.step}"
    text = highlight(row.found, filters.query.more.text) if row.found else [row.answer or "(empty)"]
    opens = h("a", parts.badge(row.outcome, text=row.outcome or "not judged"), class_="row-link",
              href=parts.answer_address(row.key, **filters.given), aria_label=f"Open: {label}")  # fmt: skip
    cells = {
        "Outcome": h("td", opens, h("small", f" {row.reason}") if row.reason else None),
        "Reward": h("td", parts.format_number(row.reward), class_="num", data_label="reward"),
        "Advantage": h("td", parts.format_number(row.advantage), class_="num", data_label="advantage"),
        "Length": h("td", f"{row.tokens:,}" if row.tokens else "–", class_="num", data_label="tokens"),
        "Log-prob": h("td", parts.format_number(row.logprob, 2), class_="num", data_label="log-prob"),
        source.step_noun.capitalize(): h("td", "–" if row.step is None else str(row.step), class_="num",
                                         data_label=source.step_noun),
        "Task": h("td", row.task or "–", class_="mono wide"),
        "Completion": h("td", h("span", *text), class_="text mono wide"),
        source.status_noun.capitalize(): h("td", row.status or "–", class_="dim", data_label=source.status_noun),
        source.noun.capitalize(): h("td", row.work[:8] if source.noun == "session" else row.work, class_="dim",
                                    data_label=source.noun),
    }  # fmt: skip
    return h("tr", [cells[name] for name, _, _ in columns], key=row.key)


def highlight(text: str, searched: str) -> list[Child]:
    """A text in which the places of a search are marked; large and small letters of the Latin alphabet are alike."""
    wanted, places = searched.lower(), text.lower()
    if not wanted or len(places) != len(text):  # a letter that is two when small: its places would be others
        return [text]
    found: list[Child] = []
    begin = 0
    while (place := places.find(wanted, begin)) >= 0 and len(found) < 40:
        found += [text[begin:place], h("mark", text[place : place + len(wanted)])]
        begin = place + len(wanted)
    return [*found, text[begin:]]
