"""Tasks from rows of your own: local files, or a data set of the hub.

    {"prompt": "Capital of France?", "answer": "Paris"}             or chat messages under "prompt"

`rlvr.envs.row_files` and `rlvr.envs.hub` read the rows. `Columns` finds the prompt and the answer in them: in the
columns that the config names, or in the usual ones of TRL and verl.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlvr.core.registry import did_you_mean, load_path
from rlvr.core.types import Task
from rlvr.envs.hub import is_saved_dataset, read_hub, read_saved
from rlvr.envs.registry import register_environment
from rlvr.envs.row_files import FileRow, field_of, find_value, has_splits, read_rows
from rlvr.envs.row_source import HELDOUT_FRACTION, RowSource, choose_heldout

# Where the default names are absent, the first of these that a row has.
PROMPTS = ("prompt", "question", "problem", "messages")
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "completion")
CHAT = "messages"  # a chat whose last message, if the assistant's, is the answer
_COLUMNS, _SHORT = 8, 40  # columns that describe a task, and the characters of a value that others can share


@dataclass(frozen=True)
class Columns:
    """The columns, dotted where they are nested, of a prompt, its answer (None: no reward needs one) and its level.

    The completion that supervised fine-tuning imitates is in `demonstration`; None: the answer.
    """

    prompt: str = PROMPTS[0]
    answer: str | None = ANSWERS[0]
    level: str | None = None
    demonstration: str | None = None

    def recognise(self, row: Mapping[str, Any]) -> Columns:
        """These columns with each default name that `row` lacks replaced by the usual one that it has."""
        found = self
        if self.prompt == PROMPTS[0]:
            found = replace(found, prompt=next((n for n in PROMPTS if find_value(row, n) is not None), self.prompt))
        if self.answer == ANSWERS[0]:
            usual = next((n for n in ANSWERS if find_value(row, n) is not None), None)
            if usual is None and _is_chat_column(found.prompt) and _split_chat(find_value(row, found.prompt))[1]:
                usual = found.prompt
            found = replace(found, answer=usual or self.answer)
        return found

    def _find_prompt(self, row: FileRow) -> Any:
        """The column of the prompt, or what a function `package.module:name` makes of the row."""
        if ":" not in self.prompt or find_value(row.values, self.prompt) is not None:
            return field_of(row.values, self.prompt, row.place, "prompt_field")
        write = load_path("prompt_field", self.prompt)
        try:
            return write(deepcopy(dict(row.values)))
        except Exception as error:  # of the user's code
            raise ValueError(f"{row.place}: {self.prompt} failed: {type(error).__name__}: {error}") from error

    def make_task(self, row: FileRow, prefix: str) -> Task:
        """The task of a row. Its meta has the answer as "answer" and every other column under its own name."""
        given = self._find_prompt(row)
        meta = {name: value for name, value in row.values.items() if name != self.prompt}
        if _is_chat_column(self.prompt):
            given, answer = _split_chat(given)
        prompt = _check_prompt(given, row.place, self.prompt)
        if self.answer is not None:
            if self.answer != self.prompt:
                answer = field_of(row.values, self.answer, row.place, "answer_field (null for none)")
            elif not answer:
                raise ValueError(
                    f"{row.place}: {self.prompt!r} does not end with the assistant's message, but the first row's "
                    "does; add the answer, or set env.kwargs.answer_field (null for none)"
                )
            meta["answer"] = _text_of(answer, row.place, self.answer)
        if self.demonstration is not None:
            field_of(row.values, self.demonstration, row.place, "demonstration_field")
        level = "" if self.level is None else str(field_of(row.values, self.level, row.place, "level_field"))
        return Task(prefix + row.id, prompt, meta, level)

    def __str__(self) -> str:
        answer = "no answer" if self.answer is None else f"answer from {self.answer!r}"
        if self.answer == self.prompt:
            answer = "answer from its last message"
        return f"prompt from {self.prompt!r}, {answer}"


def _is_chat_column(name: str) -> bool:
    return name.rpartition(".")[2] == CHAT


def _is_chat(value: Any) -> bool:
    """Whether a value is a list of messages in which every role and content is text."""
    return _has_messages(value) and all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in value)


def _has_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def _split_chat(given: Any) -> tuple[Any, Any]:
    """A chat without the assistant's message at its end, and that message's text; None if it ends otherwise."""
    if _is_chat(given) and len(given) > 1 and given[-1]["role"] == "assistant":
        return given[:-1], given[-1]["content"]
    return given, None


def _text_of(answer: Any, place: str, name: str) -> Any:
    """An answer that is a chat, as TRL's `completion` may be, is the text of its last message."""
    if not _has_messages(answer):
        return answer
    if not isinstance(text := answer[-1]["content"], str):
        raise ValueError(
            f"{place}: the last message of {name!r} has the content {str(text)[:60]!r}, expected text; correct the row"
        )
    return text


def _check_prompt(given: Any, place: str, name: str) -> str | list[dict[str, str]]:
    if (isinstance(given, str) and given) or _is_chat(given):
        return given
    expected = 'expected text or a list of {"role": text, "content": text}'
    if isinstance(given, Mapping) and given:
        inner = ", ".join(f"{name}.{part}" for part in given)
        raise ValueError(
            f"{place}: {name!r} has columns of its own, {expected}; set env.kwargs.prompt_field to one of {inner}"
        )
    raise ValueError(f"{place}: {name!r} is {str(given)[:60]!r}, {expected}")


@dataclass(frozen=True)
class RowOrigin:
    """Where rows come from, and how often each is drawn in comparison with rows of other origins."""

    path: str | Sequence[str] | None = None
    name: str | None = None
    config: str | None = None
    split: str = "train"
    streaming: bool = False
    max_rows: int | None = None
    prompt_field: str = Columns.prompt
    answer_field: str | None = Columns.answer
    weight: float = 1.0

    def __post_init__(self) -> None:
        if (self.path is None) == (self.name is None):
            raise ValueError(
                f"dataset: path={self.path!r} and name={self.name!r}; give one of them: env.kwargs.path, a file, "
                "folder or glob, or env.kwargs.name, a data set of the hub"
            )
        if self.name is not None and Path(self.name).expanduser().is_file():
            raise ValueError(f"dataset: name={self.name!r} is a file here, not a data set of the hub; give it as path")
        if self.path is not None and self.config is not None:
            raise ValueError(
                f"dataset: config={self.config!r} is for a data set of the hub; leave it out, or give name"
            )
        if self.path is not None and self.streaming:
            raise ValueError("dataset: streaming=true is for a data set of the hub; leave it out, or give name")
        if self.max_rows is not None and (type(self.max_rows) is not int or self.max_rows < 1):
            raise ValueError(f"dataset: max_rows={self.max_rows!r}, expected at least 1, or null for all")
        if self.streaming and self.max_rows is None:
            raise ValueError(
                "dataset: streaming=true needs max_rows: the tasks are kept in memory; give max_rows=10000"
            )
        if type(self.weight) not in (int, float) or not 0.01 <= self.weight <= 100:
            raise ValueError(f"dataset: weight={self.weight!r}, expected a number from 0.01 to 100")
        if self.split != "train" and (file := next((p for p in _paths(self.path) if Path(p).is_file()), None)):
            raise ValueError(
                f"dataset: split={self.split!r} has no effect on the file {file}; give the file of that split as path "
                "or heldout_path, or a folder of files"
            )

    def __str__(self) -> str:
        return f"{self.name} {self.split}" if self.name else str(self.path)

    def rows(self) -> Iterator[FileRow]:
        if self.name is not None:
            rows = read_hub(self.name, self.config, self.split, self.streaming)
        elif is_saved_dataset(self.path):
            rows = read_saved(str(self.path), self.split)
        else:
            assert self.path is not None
            rows = read_rows(self.path, self.split)
        return islice(rows, self.max_rows)

    def read(self, columns: Columns, prefix: str) -> tuple[list[Task], str]:
        """The tasks of its rows, and what a plan says of them. The first row decides about the columns."""
        rows = self.rows()
        first = next(rows)
        own = replace(columns, prompt=self.prompt_field, answer=self.answer_field).recognise(first.values)
        tasks = [own.make_task(row, prefix) for row in chain([first], rows)]
        count = f"{'the first ' if len(tasks) == self.max_rows else ''}{len(tasks):,} rows"
        return tasks, f"{count}, {own}" + ("" if self.weight == 1 else f", weight {self.weight:g}")


@register_environment("jsonl")
@register_environment("dataset")
def dataset(
    path: str | Sequence[str] | None = None,
    name: str | None = None,
    config: str | None = None,
    split: str = "train",
    sources: Sequence[Mapping[str, Any]] | None = None,
    heldout_path: str | Sequence[str] | None = None,
    heldout_split: str | None = None,
    heldout_fraction: float | None = None,
    prompt_field: str = Columns.prompt,
    answer_field: str | None = Columns.answer,
    level_field: str | None = None,
    demonstration_field: str | None = None,
    reward: str = "exact_match",
    streaming: bool = False,
    max_rows: int | None = None,
) -> RowSource:
    """Rows of JSON lines, JSON, CSV or parquet (`path`: a file, a folder, a glob or a list), or a data set of the hub.

    A data set of the hub has a `name`, perhaps a `config`, and a `split`; of a folder, file names tell the `split`.
    `sources` is a list of several, each with keys of its own for these, for the two fields and `weight`: in an epoch a
    row of weight 2 comes twice, one of weight 0.5 every second time. At most `max_rows` are read of each; `streaming`
    fetches no more of the hub than these.

    The answer becomes `meta["answer"]`; every other column goes into `meta` under its own name. A dotted name leads to
    a nested column; a `prompt_field` with a colon, `package.module:function`, is a function that makes the prompt of a
    row. Where the default `prompt_field` or `answer_field` is absent, the usual ones are taken: `question`, `problem`
    or `messages`; `ground_truth`, `reward_model.ground_truth`, `solution` or `completion`, or the assistant's last
    message. `answer_field=None` is for rewards that need no answer. Supervised fine-tuning imitates
    `demonstration_field`, or else the answer if it is text. Short columns describe a task to `rlvr doctor`, which
    groups failing tasks by them: a source, a topic, the answer.

    The held-out tasks are those of `heldout_path`, of `heldout_split`, or else about `heldout_fraction` (0.1) of the
    rows, chosen by a hash of the prompt; 0 holds out nothing, and 1 all: a test set to evaluate on. Of a folder as
    `heldout_path`, `heldout_split` (test) is read.
    """
    other = heldout_path if heldout_split is None else heldout_split
    if None not in (heldout_fraction, other):
        key = "heldout_path" if heldout_split is None else "heldout_split"
        raise ValueError(f"dataset: heldout_fraction={heldout_fraction!r} and {key}={other!r}; leave one of them out")
    columns = Columns(level=level_field, demonstration=demonstration_field)
    given = {
        **{"path": path, "name": name, "config": config, "split": split, "streaming": streaming, "max_rows": max_rows},
        **{"prompt_field": prompt_field, "answer_field": answer_field},
    }
    origins = _list_origins(sources, given)
    read = [origin.read(columns, f"{number}/" if len(origins) > 1 else "") for number, origin in enumerate(origins, 1)]
    tasks = [task for part, _ in read for task in part]
    weights = {task.id: origin.weight for origin, (part, _) in zip(origins, read, strict=True) for task in part}
    heldout = _read_heldout(origins, columns, heldout_path, heldout_split)
    if heldout is None:
        fraction = HELDOUT_FRACTION if heldout_fraction is None else heldout_fraction
        heldout = choose_heldout(tasks, fraction, " and ".join(map(str, origins)))
        tasks = [] if fraction == 1 else tasks
    imitated = demonstration_field or ("answer" if all(map(_has_text, (*tasks, *heldout))) else None)
    return RowSource(
        "dataset " + ", ".join(map(str, origins)),
        tasks,
        heldout,
        reward,
        imitated,
        lead="" if demonstration_field else " ",
        describe=_describe,
        weight=lambda task: weights[task.id],
        data="; ".join(
            f"{origin}: {text}" if len(origins) > 1 else text for origin, (_, text) in zip(origins, read, strict=True)
        ),
    )


def _paths(path: str | Sequence[str] | None) -> Sequence[str]:
    return [] if path is None else [path] if isinstance(path, str) else path


def _list_origins(sources: Sequence[Mapping[str, Any]] | None, given: dict[str, Any]) -> list[RowOrigin]:
    if sources is None:
        return [RowOrigin(**given)]
    if given["path"] is not None or given["name"] is not None:
        raise ValueError("dataset: sources cannot be combined with path or name; move them into sources")
    known = [field.name for field in fields(RowOrigin)]
    for entry in sources:
        if wrong := next((key for key in entry if key not in known), None):
            raise ValueError(
                f"dataset: sources: unknown key {wrong!r}{did_you_mean(wrong, known)}; a source has {', '.join(known)}"
            )
    if not sources:
        raise ValueError("dataset: sources is an empty list; give at least one, such as {path: tasks.jsonl}")
    return [RowOrigin(**{**given, **entry}) for entry in sources]


def _read_heldout(
    origins: Sequence[RowOrigin], columns: Columns, path: str | Sequence[str] | None, split: str | None
) -> list[Task] | None:
    """The tasks of a held-out file or split; None if the config names none."""
    if path is None and split is None:
        return None
    if path is not None:
        folders = [one for one in _paths(path) if Path(one).expanduser().is_dir()]
        if split is not None and not folders:
            raise ValueError(
                f"dataset: heldout_split={split!r} has no effect on heldout_path={path!r}, which is not a folder; give "
                "one of them"
            )
        if split is None:  # a folder whose file names tell no split is held out whole
            split = "test" if any(is_saved_dataset(one) or has_splits(one) for one in folders) else "train"
        first = origins[0]
        chosen = [RowOrigin(path, split=split, prompt_field=first.prompt_field, answer_field=first.answer_field)]
    else:
        if same := next((origin for origin in origins if origin.split == split), None):
            raise ValueError(f"dataset: heldout_split={split!r} is the split that {same} trains on; name another one")
        chosen = [replace(origin, split=split) for origin in origins]
    prefixes = [f"{number}/" if len(chosen) > 1 else "" for number in range(1, len(chosen) + 1)]
    return [
        task
        for origin, prefix in zip(chosen, prefixes, strict=True)
        for task in origin.read(columns, f"heldout:{prefix}")[0]
    ]


def _has_text(task: Task) -> bool:
    answer = task.meta.get("answer")
    return isinstance(answer, (str, int, float)) and not isinstance(answer, bool)


def _describe(task: Task) -> dict[str, str]:
    """The columns of one short value, the first `_COLUMNS` of them."""
    short = {
        name: str(value)
        for name, value in task.meta.items()
        if isinstance(value, (str, int)) and 0 < len(str(value)) <= _SHORT
    }
    return dict(list(short.items())[:_COLUMNS])
