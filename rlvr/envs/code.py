"""Programming problems: `mbpp` with its published splits, `code` for any rows that the reward `code` understands.

    env: {name: mbpp, kwargs: {path: mbpp.jsonl, visible_tests: 1}}
    env: {name: code, kwargs: {path: my-problems.jsonl}}            # MBPP's, HumanEval's or APPS' fields, or our own

The text prompt is MBPP's own (Austin et al. 2021, https://arxiv.org/abs/2108.07732), `[BEGIN]` and `[DONE]` around the
program; `chat=true` asks through the tokenizer's template instead. Of the tests only `visible_tests` are shown: an
answer that writes their results out literally then fails the hidden ones. The reward counts all of them, so that a pass
rate compares with published ones. `python -m pytest tests/test_env_code.py` exercises it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlvr.envs.code_critic import code_env
from rlvr.envs.jsonl import held_share
from rlvr.envs.refine import RefineEnv
from rlvr.envs.registry import register_environment
from rlvr.envs.rows import RowSource, read_jsonl
from rlvr.reward.code import Problem
from rlvr.reward.code.extract import BEGIN, BODY_ENDS, DONE
from rlvr.types import Task

HUB_NAME = "google-research-datasets/mbpp"
FILES = {"full": "mbpp.jsonl", "sanitized": "sanitized-mbpp.json"}
SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}  # by task_id
SHOTS = (2, 3, 4, 1, 5, 6, 7, 8, 9, 10)  # the first three are the paper's
Visible = int | str


class CodeSource(RowSource):
    """A task source of problems. A task's meta is its problem, the level the number of its tests."""

    def __init__(
        self, name: str, train: Iterable[Task], heldout: Sequence[Task], *, visible: int | None, max_turns: int
    ) -> None:
        train, heldout = list(train), list(heldout)
        if max_turns > 1 and (silent := [t.id for t in (*train, *heldout) if not Problem.of(t.meta).shown(visible)]):
            raise ValueError(
                f"{name}: max_turns={max_turns}, but {silent[0]!r} and {len(silent) - 1} more have no test that may be "
                "shown (a check function is one hidden test), so nothing could be said of an attempt; use max_turns=1"
            )
        super().__init__(name, train, heldout, "code", demonstrations="solution")
        self._visible, self.max_turns = visible, max_turns

    def env(self, task: Task, tokenizer: Any) -> RefineEnv:  # pyright: ignore[reportIncompatibleMethodOverride]
        return code_env(task, tokenizer, stop=_stop(task, tokenizer), visible=self._visible, max_turns=self.max_turns)

    def demonstration(self, task: Task, key: int) -> str | None:
        """The reference program in the form that the prompt asks for."""
        solution = task.meta.get("solution")
        return None if not solution else _answered(Problem.of(task.meta), chat=not isinstance(task.prompt, str))


@register_environment("mbpp")
def mbpp(
    path: str | None = None,
    subset: str = "full",
    split: str = "test",
    num_train_problems: int | None = None,
    visible_tests: Visible = 1,
    few_shot: int | None = None,
    chat: bool = False,
    max_turns: int = 1,
) -> CodeSource:
    """MBPP, basic programming problems in Python (Austin et al. 2021): `subset` full (974) or sanitized (427).

    From its file or the folder that holds it, or from the hub by `datasets`. Training uses the tasks 601 to 974, the
    first `num_train_problems` of them; held out is `split`, test (11 to 510) or validation (511 to 600). `few_shot`
    tasks of 1 to 10 stand before each text prompt, by default the paper's 2, 3 and 4 and none in a chat.
    `visible_tests` (a number, or all) of a problem's tests are in the prompt. With `max_turns` above 1 a failed attempt
    is told the error of a visible test and may try again.
    """
    if subset not in FILES:
        raise ValueError(f"mbpp: subset={subset!r}, expected full or sanitized")
    if split not in ("test", "validation"):
        raise ValueError(f"mbpp: split={split!r}, expected test (tasks 11 to 510) or validation (511 to 600)")
    if few_shot is not None and not (type(few_shot) is int and 0 <= few_shot <= len(SHOTS)):
        raise ValueError(f"mbpp: few_shot={few_shot!r}, expected 0 to {len(SHOTS)} of the tasks 1 to 10")
    visible = _visible("mbpp", visible_tests, max_turns)
    problems = dict(_numbered(_hub(subset) if path is None else _rows(_file(path, subset)), path or HUB_NAME))
    by_split = {
        name: [(i, problems[i]) for i in sorted(problems) if first <= i <= last]
        for name, (first, last) in SPLITS.items()
    }
    for name in ("train", split):
        if not by_split[name]:
            raise ValueError(
                f"mbpp: {path or HUB_NAME} has no task of the split {name} (task_id {SPLITS[name][0]} to "
                f"{SPLITS[name][1]}); for rows of your own use env.name=code"
            )
    train = by_split["train"]
    if num_train_problems is not None:
        if type(num_train_problems) is not int or not 1 <= num_train_problems <= len(train):
            raise ValueError(f"mbpp: num_train_problems={num_train_problems!r}, expected 1 to {len(train)}")
        train = train[:num_train_problems]
    there = [problems[i] for i in SHOTS if i in problems]
    asked = few_shot if few_shot is not None else 0 if chat else min(3, len(there))
    if asked > len(there):
        raise ValueError(f"mbpp: few_shot={asked}, but {path} has {len(there)} of the tasks 1 to 10")
    made = {
        name: [_task(f"mbpp-{i}", problem, visible, chat, there[:asked]) for i, problem in rows]
        for name, rows in (("train", train), (split, by_split[split]))
    }
    return CodeSource("mbpp", made["train"], made[split], visible=visible, max_turns=max_turns)


@register_environment("code")
def code(
    path: str,
    heldout_path: str | None = None,
    heldout_fraction: float = 0.1,
    visible_tests: Visible = 1,
    chat: bool = False,
    max_turns: int = 1,
) -> CodeSource:
    """Problems from a file of JSON lines, or one JSON list: rows in MBPP's, HumanEval's or APPS' form, or in our own.

    Our own is `{"statement": ..., "tests": [...]}`; tests are assert statements or `{"input", "output"}` of a program.
    Held out is `heldout_path`, or a share of `path` by a hash of the prompt. The other options are those of `mbpp`.
    """
    visible = _visible("code", visible_tests, max_turns)

    def tasks(file: str, prefix: str) -> list[Task]:
        return [_task(prefix + where, problem, visible, chat, []) for where, problem in _problems(_rows(file))]

    made = tasks(path, "")
    heldout = tasks(heldout_path, "heldout:") if heldout_path else held_share(made, heldout_fraction, path)
    return CodeSource(f"code {path}", made, heldout, visible=visible, max_turns=max_turns)


def _visible(name: str, given: Visible, max_turns: int) -> int | None:
    if type(max_turns) is not int or max_turns < 1:
        raise ValueError(f"{name}: max_turns={max_turns!r}, expected at least 1 attempt")
    if given != "all" and (type(given) is not int or given < 1):
        raise ValueError(
            f"{name}: visible_tests={given!r}, expected at least 1 or all: the prompt has to show how the function is "
            "called"
        )
    return None if given == "all" else int(given)


# --- rows ---------------------------------------------------------------------------------------------------------


def _file(path: str, subset: str) -> str:
    return str(Path(path) / FILES[subset]) if Path(path).is_dir() else path


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of JSON lines, or of one JSON list."""
    file = Path(path)
    try:
        with file.open("rb") as opened:
            listed = opened.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
    except OSError:
        listed = False  # the reader of lines says what is wrong
    if not listed:
        yield from read_jsonl(file)
        return
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); expected a list of objects, or one object a line") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: a JSON {type(row).__name__}, expected an object")
        yield f"{file.name}:{number}", row


def _hub(subset: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "mbpp from the hub needs the package 'datasets': pip install 'rlvr[train]', or set path=<file or folder>"
        ) from error
    try:
        splits: Any = load_dataset(HUB_NAME, subset)
    except Exception as error:
        raise ValueError(
            f"mbpp: {HUB_NAME!r} could not be loaded from the hub ({type(error).__name__}: {error}); set "
            f"path=<file, or folder with {FILES[subset]}>"
        ) from error
    for name in splits:
        yield from ((f"{HUB_NAME} {name}:{i}", dict(row)) for i, row in enumerate(splits[name], 1))


def _problems(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Problem]]:
    for where, row in rows:
        yield where, _problem(where, row)


def _problem(where: str, row: dict[str, Any]) -> Problem:
    try:
        problem = Problem.of(row)
    except ValueError as wrong:
        raise ValueError(f"{where}: {wrong}") from None
    if not (problem.statement or problem.prefix):
        raise ValueError(f"{where}: the problem has no statement; give it one, for its prompt")
    return problem


def _numbered(rows: Iterable[tuple[str, dict[str, Any]]], path: str) -> Iterator[tuple[int, Problem]]:
    seen: dict[int, str] = {}
    for where, row in rows:
        number = row.get("task_id")
        if type(number) is not int or not 1 <= number <= 974:
            raise ValueError(
                f"{path}, {where}: task_id={number!r}, expected 1 to 974, by which MBPP is split; for rows of your own "
                "use env.name=code"
            )
        if number in seen:
            raise ValueError(f"{path}, {where}: task_id={number} stands at {seen[number]} already; keep one of them")
        seen[number] = where
        yield number, _problem(where, row)


# --- prompts and answers ------------------------------------------------------------------------------------------


def _task(name: str, problem: Problem, visible: int | None, chat: bool, shots: Sequence[Problem]) -> Task:
    level, meta = str(len(problem.tests)), problem.row()
    if chat:
        messages: list[dict[str, str]] = []
        for shot in shots:
            messages.append({"role": "user", "content": _asked_in_chat(shot, visible)})
            messages.append({"role": "assistant", "content": _answered(shot, chat=True)})
        return Task(name, [*messages, {"role": "user", "content": _asked_in_chat(problem, visible)}], meta, level)
    if problem.prefix:  # the answer goes on from it
        return Task(name, problem.prefix, meta, level)
    before = "".join(f"{_asked(shot, visible)}{_answered(shot, chat=False)}\n\n" for shot in shots)
    return Task(name, before + _asked(problem, visible), meta, level)


def _asked(problem: Problem, visible: int | None) -> str:
    kind = "Your program should read this input and write this output:" if problem.is_program else _TESTS
    task = f"You are an expert Python programmer, and here is your task: {problem.statement.strip()}"
    return f"{task} {kind}\n\n{_listed(problem, visible)}\n{BEGIN}\n"


_TESTS = "Your code should pass these tests:"


def _asked_in_chat(problem: Problem, visible: int | None) -> str:
    if problem.prefix:
        body = f"Complete this Python function:\n\n```python\n{problem.prefix.rstrip()}\n```"
    elif problem.is_program:
        body = (
            f"Write a Python program that reads standard input and writes standard output.\n\n"
            f"{problem.statement.strip()}\n\nFor example:\n\n{_listed(problem, visible)}"
        )
    else:
        tests = f"```python\n{_listed(problem, visible)}\n```"
        body = f"{problem.statement.strip()}\n\n{_TESTS}\n\n{tests}"
    return f"{body}\n\nAnswer with the whole program in one Python code block."


def _listed(problem: Problem, visible: int | None) -> str:
    shown = problem.shown(visible)
    return "\n".join(
        test.strip()
        if isinstance(test, str)
        else f"Input:\n{test['input'].rstrip()}\nOutput:\n{test['output'].rstrip()}"
        for test in shown
    )


def _answered(problem: Problem, *, chat: bool) -> str:
    """The reference program as an answer."""
    solution = problem.solution.strip()
    if chat:
        return f"```python\n{solution}\n```"
    if problem.prefix:
        return problem.solution.removeprefix(problem.prefix)
    return f"{solution}\n{DONE}"


def _stop(task: Task, tokenizer: Any) -> list[Any] | None:
    """What ends an answer: in a chat, and where no text can say it, the end-of-sequence token alone."""
    if not isinstance(task.prompt, str):
        return None
    ends = [stop for stop in BODY_ENDS if stop != "\n#"] if task.meta.get("prefix") else [DONE]
    return ends + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
