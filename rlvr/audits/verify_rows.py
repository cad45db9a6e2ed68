"""`rlvr.verify`: grade completions from a program, rows in and verdicts out, as `rlvr verify` does with files.

verdicts = rlvr.verify([{"response": "The answer is 4", "answer": "4"}], "math")
verdicts[0]["outcome"], verdicts.counts.rate.interval()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlvr.audits import completion_rows
from rlvr.audits.grade_file import RewardPool, VerdictCounts, check_gold, grade_rows
from rlvr.core.registry import did_you_mean, find_own
from rlvr.reward import resolve_reward
from rlvr.runs.library import Run, name_caller
from rlvr.runs.program_settings import argument_error, list_rows, name_options, read_reward

MOST_NAME = 1_000  # characters of a path
OPTIONS = {"reward-option": "options"}  # of the command, and what they are called here


class Verdicts(list[dict[str, Any]]):
    """Verdicts in the order of the rows, and the `counts` of their outcomes. Printed, it is the table of these."""

    def __init__(self, verdicts: Iterable[dict[str, Any]], counts: VerdictCounts) -> None:
        super().__init__(verdicts)
        self.counts = counts

    def __str__(self) -> str:
        return name_options(self.counts.table(), OPTIONS)


class VerifyInterruptedError(KeyboardInterrupt):
    """Ctrl-C ended `rlvr.verify`; `verdicts` are those that there were already, of the first rows."""

    def __init__(self, verdicts: Verdicts) -> None:
        super().__init__(f"rlvr.verify was stopped after {len(verdicts):,} rows; `verdicts` of this error has these")
        self.verdicts = verdicts


def verify(
    completions: Any,
    reward: Any,
    *,
    response_field: str | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    limit: int | None = None,
) -> Verdicts:
    """Grade completions with a reward: one verdict a row, in their order. Nothing is written.

    - `completions`: rows (a list, a generator, a `datasets.Dataset`, a DataFrame), a file of them, or a `Run`, whose
      stored rollouts are graded. A row has a completion (a text, or a conversation, of which the last message counts),
      perhaps the `prompt`, and what the reward reads, usually an `answer`. A row may be a completion alone, as text.
    - `reward`: a function, the name of a reward, an object of `resolve_reward`, or a list, as for `rlvr.train`.
    - `response_field`: the field with the completion; by default the first of the usual names that the first row has
      (`response`, `completion`, `output`, ...).
    - `options`: options of the reward, by name.
    - `workers`: processes that grade; the reward must then be one that others can import. By default this process does.
    - `limit`: grade the first rows only.

    A verdict has `index`, `id` (the row's own, else the index), `task` if it has one, `value` (None without a verdict),
    `outcome`, `reason`, `detail` if there is more to say, and `seconds`. What the reward raises is the outcome `error`,
    a row that cannot be graded `invalid`; neither is in a rate.

    ValueError for what are no rows, or an unknown reward. VerifyInterruptedError, a KeyboardInterrupt, at Ctrl-C.
    """
    with name_caller("rlvr.verify", options=OPTIONS):
        grader = RewardPool(*name_reward(reward, options), workers=check_count("workers", workers) or 0)
        if workers and (own := find_own([grader.reward, dict(grader.options)])):
            raise argument_error(
                f"workers={workers}, but {own} is of this program alone, and other processes cannot import it; put it "
                "into a module, or leave workers out"
            )
        rows, source = _read_completions(completions)
        rows = rows[: check_count("limit", limit)]
        field = _find_field(rows, source, response_field)
        check_gold(resolve_reward(grader.reward, **grader.options), field)
        counts, done = VerdictCounts(), list[dict[str, Any]]()
        try:
            for verdicts in grade_rows(rows, grader, field, counts):
                done += verdicts
        except KeyboardInterrupt:
            raise VerifyInterruptedError(Verdicts(done, counts)) from None
    return Verdicts(done, counts)


def name_reward(reward: Any, options: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """(the name or path of a reward that a program gave, its options); ValueError for what is no reward."""
    if reward is None:
        raise argument_error('reward is missing; give a function, or the name of a reward: reward="math"')
    if isinstance(reward, Mapping):
        raise argument_error("reward is a mapping; give its name, and its options as options={...}")
    if options is not None and not isinstance(options, Mapping):
        raise argument_error(
            f"options={options!r:.80}, expected options of the reward by name: {{'ignore_case': True}}"
        )
    section = read_reward(reward)
    parts = {"rewards": section["reward.kwargs.rewards"]} if "reward.kwargs.rewards" in section else {}
    return section["reward.type"], {**section.get("reward.kwargs", {}), **parts, **(options or {})}


def check_count(name: str, count: Any) -> int | None:
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise argument_error(f"{name}={count!r}, expected a whole number of at least 1; leave it out for the default")
    return count


def _read_completions(given: Any) -> tuple[list[tuple[str, Any]], str]:
    """(the rows, each with where it is, and what they are called)."""
    if isinstance(given, Run):
        if not (rows := given.rollouts()):
            raise argument_error(f"{given.folder} stored no rollouts; train with run.rollouts_per_step above 0")
        return [(f"row {number}", _as_row(row)) for number, row in enumerate(rows, 1)], str(given.folder)
    if isinstance(given, Path) or (isinstance(given, str) and "\n" not in given and len(given) < MOST_NAME):
        return list(completion_rows.read_rows(Path(given).expanduser())), str(given)
    if isinstance(given, (str, Mapping)):
        kind = "text" if isinstance(given, str) else "mapping"
        raise argument_error(f"completions is one {kind}; give a list of rows, or the path of a file of them")
    rows = list_rows(given, "completions", "response")
    return [(f"row {number}", row) for number, row in enumerate(rows, 1)], "completions"


def _as_row(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """A stored rollout as a row of a file: its task with the reference, and the answer that was judged."""
    task = {name: rollout[name] for name in ("task_id", "level", "prompt") if name in rollout}
    return {**task, **rollout.get("reference", {}), "response": rollout.get("answer", rollout["response"])}


def _find_field(rows: list[tuple[str, Any]], source: str, given: str | None) -> str:
    """The field with the completions; ValueError if no row has it."""
    usable: list[Mapping[str, Any]] = [row for _, row in rows if isinstance(row, Mapping)]
    if given is None:
        return completion_rows.response_field(usable[0] if usable else {}, source)
    if not any(given in row for row in usable):
        known = list(dict.fromkeys(name for row in usable for name in row))
        raise argument_error(
            f"response_field={given!r}: no row has that field{did_you_mean(given, known)}; fields are "
            f"{', '.join(map(repr, known))}"
        )
    return given
