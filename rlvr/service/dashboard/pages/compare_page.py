"""Two steps of a run, or two iterations of a session, side by side: their numbers, and answers to the same tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.dashboard_data import AnswerRow, Query, Source
from rlvr.service.dashboard.heldout_changes import AFTER, BEFORE
from rlvr.service.dashboard.pages import heldout_parts
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.page_parts import Page
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
        said = f"No {source.noun} yet, so there is nothing to compare."
        return Page(source, "Compare", "message.html", {"text": said, "class_": "panel empty"}, "Compare")
    if (one := source.work(work)) is None:
        return parts.not_found_page(source, source.noun, work)
    bounds = source.choices(work).steps or (0, 0)
    a, b = _step(parameters.get("a", ""), bounds[0]), _step(parameters.get("b", ""), bounds[1])
    noun = source.step_noun
    pairs, note, heldout = _answers(source, work, a, b)
    data = {
        "noun": noun, "a": a, "b": b, "work": work, "works": works, "name": one.name, "pairs": pairs, "note": note,
        "heldout": heldout, "numbers_": _numbers(source, work, a, b),
    }  # fmt: skip
    return Page(source, f"{noun} {a} and {b}", "compare_steps.html", data, "Compare")


def _step(text: str, otherwise: int) -> int:
    return int(text) if text.strip().isdecimal() and len(text) < 10 else otherwise


def _numbers(source: Source, work: str, a: int, b: int) -> list[list[tuple[str, ...]]]:
    """The rows of a table of the `FIRST` metrics and of one of the others; without any of the first, of all."""
    before, after = source.at_step(work, a), source.at_step(work, b)
    names = [name for name in FIRST if name in before or name in after]
    others = sorted((before.keys() | after.keys()) - {*FIRST})
    return [
        [_number_row(name, before.get(name), after.get(name)) for name in chosen]
        for chosen in ((names, others) if names else (others, []))
    ]


def _number_row(name: str, before: float | None, after: float | None) -> tuple[str, ...]:
    change = None if before is None or after is None else after - before
    cells = ["–" if value is None else f"{value:.4g}" for value in (before, after)]
    return name, *cells, "–" if change is None else f"{change:+.4g}"


Pair = tuple[AnswerRow | None, AnswerRow | None]


def _answers(source: Source, work: str, a: int, b: int) -> tuple[list[Pair], str, dict[str, Any] | None]:
    """One answer per task and side; those that can be compared come first, and a note says if some cannot. Of a run,
    which draws new tasks at each step, the held-out tasks instead, if there are any."""
    left = source.answers(Query(work=work, step=a, limit=MOST)).rows
    right = source.answers(Query(work=work, step=b, limit=MOST)).rows
    pairs = pair_answers(left, right)
    noun, alone = source.step_noun, sum(None in pair for pair in pairs)
    if alone == len(pairs) and isinstance(source, RunSource):
        sides = ((work, BEFORE), (work, AFTER))
        if heldout := heldout_parts.list_changed(source.changes(*sides), sides, {}):
            return [], "", heldout
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
    return pairs[:PAIRS], note, None


def pair_answers(left: list[AnswerRow], right: list[AnswerRow]) -> list[Pair]:
    """Pair the first answers to the same task that the same verifiers judged; then each other task's, alone."""
    first, second = _by_task(left), _by_task(right)
    pairs: list[Pair] = [(row, second[task]) for task, row in first.items() if task in second]
    pairs += [(row, None) for task, row in first.items() if task not in second]
    return pairs + [(None, row) for task, row in second.items() if task not in first]


def _by_task(rows: list[AnswerRow]) -> dict[tuple[str, ...], AnswerRow]:
    """The first answer to each task by the same verifiers, in order. One without a task is like no other."""
    first: dict[tuple[str, ...], AnswerRow] = {}
    for row in rows:
        first.setdefault((row.task or f"answer {row.key}", *row.verifiers), row)
    return first
