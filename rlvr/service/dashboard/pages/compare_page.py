"""Two steps of a run, or two iterations of a session, side by side: their numbers, and answers to the same tasks."""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.service.dashboard.dashboard_data import AnswerRow, Query, Source
from rlvr.service.dashboard.element_tree import Child, Page, Tree, h
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE
from rlvr.service.dashboard.pages import heldout_parts
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.run_comparison import compare_runs
from rlvr.service.dashboard.run_source import RunSource

MOST = 64  # answers read of a step
PAIRS = 12  # pairs of answers shown
FIRST = (
    "confidence", "correctness", "quality", "gain", "num_tokens", "seconds",
    "reward", "reward_std", "env/all/correct", "test/env/all/correct", "frac_groups_with_signal", "entropy",
    "completions/mean_length", "completions/clipped_ratio", "verifier/no_answer_rate", "grad_norm", "optim/kl_after",
    "learning_rate", "tokens_per_second",
)  # fmt: skip


def compare(source: Source, parameters: Mapping[str, str]) -> Page:
    """Two runs; with `work` in the address, or of a source with nothing else, two steps of one."""
    if isinstance(source, RunSource) and not parameters.get("work") and len(source.names()) > 1:
        return compare_runs(source, parameters)
    works = source.names()
    work = parameters.get("work", "") or next(iter(works), "")
    if not work:
        empty = h("p", f"No {source.noun} yet, so there is nothing to compare.", class_="panel empty")
        return parts.frame_page(source, "Compare", "Compare", h("h1", "Compare"), empty)
    if (one := source.work(work)) is None:
        return parts.not_found_page(source, source.noun, work)
    bounds = source.choices(work).steps or (0, 0)
    a, b = _step(parameters.get("a", ""), bounds[0]), _step(parameters.get("b", ""), bounds[1])
    noun = source.step_noun
    form = h(
        "form",
        parts.select_field("work", source.noun.capitalize(), work, works, "latest"),
        parts.text_field("a", f"First {noun}", str(a), inputmode="numeric"),
        parts.text_field("b", f"Second {noun}", str(b), inputmode="numeric"),
        h("button", "Compare", class_="main"), method="get", action="/ui/compare", class_="filters panel",
    )  # fmt: skip
    return parts.frame_page(
        source,
        f"{noun} {a} and {b}",
        "Compare",
        h("div", h("h1", f"{noun.capitalize()} {a} and {noun} {b}"),
          h("a", one.name, href=parts.work_address(source, work)), class_="head"),
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
    # without any of the FIRST metrics, show all
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
    """One answer per task and side; those that can be compared come first, and a note says if some cannot."""
    left = source.answers(Query(work=work, step=a, limit=MOST)).rows
    right = source.answers(Query(work=work, step=b, limit=MOST)).rows
    pairs = pair_answers(left, right)
    rows = [
        h("div", h("div", _answer(source, one)), h("div", _answer(source, other)), class_="grid2 pair")
        for one, other in pairs[:PAIRS]
    ]
    noun, alone = source.step_noun, sum(None in pair for pair in pairs)
    if alone == len(pairs) and (heldout := _heldout(source, work)) is not None:
        return heldout  # a run draws new tasks at each step
    note = ""
    if alone and alone == len(pairs):
        note = (
            f"Nothing can be compared: no task has answers at {noun} {a} and at {noun} {b} that the same verifiers "
            "judged. The numbers above are of different tasks."
        )
    elif alone:
        note = (
            f"{alone} of {len(pairs)} cannot be compared and stand alone: the other {noun} has no answer to the same "
            "task that the same verifiers judged."
        )
    return h("section", h("h2", "Answers"), h("p", note, class_="dim", role="status") if note else None,
             rows or [h("p", "No answers are stored for these steps.", class_="empty")], class_="panel")  # fmt: skip


def _heldout(source: Source, work: str) -> Tree | None:
    """The tasks that a run has before and after training."""
    sides = ((work, BEFORE), (work, AFTER))
    changes = source.changes(*sides) if isinstance(source, RunSource) else None
    return heldout_parts.task_tables(changes, sides, {}) if changes else None


def pair_answers(left: list[AnswerRow], right: list[AnswerRow]) -> list[tuple[AnswerRow | None, AnswerRow | None]]:
    """Pair the first answers to the same task that the same verifiers judged; then each other task's, alone."""
    first, second = _by_task(left), _by_task(right)
    pairs: list[tuple[AnswerRow | None, AnswerRow | None]] = [
        (row, second[task]) for task, row in first.items() if task in second
    ]
    pairs += [(row, None) for task, row in first.items() if task not in second]
    return pairs + [(None, row) for task, row in second.items() if task not in first]


def _by_task(rows: list[AnswerRow]) -> dict[tuple[str, ...], AnswerRow]:
    """The first answer to each task by the same verifiers, in order. One without a task is like no other."""
    first: dict[tuple[str, ...], AnswerRow] = {}
    for row in rows:
        first.setdefault((row.task or f"answer {row.key}", *row.verifiers), row)
    return first


def _answer(source: Source, row: AnswerRow | None) -> list[Child]:
    if row is None:
        return [h("p", "–", class_="dim")]
    return [
        h("div", h("a", f"{source.step_noun} {row.step}", href=parts.answer_address(row.key)),
          parts.badge(row.outcome, text=row.outcome or "not judged"),
          h("span", f"reward {parts.format_number(row.reward)}"), class_="head"),
        h("p", row.task, class_="mono dim"),
        h("pre", row.answer or "(empty)", class_="text-block"),
    ]  # fmt: skip
