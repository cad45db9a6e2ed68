"""Programming problems: `mbpp` with its published splits, `humaneval`, `code` for any rows that the reward reads.

    env: {name: mbpp, kwargs: {path: mbpp.jsonl, visible_tests: 1}}
    env: {name: humaneval, kwargs: {path: HumanEval.jsonl.gz}}      # a test set
    env: {name: code, kwargs: {path: my-problems.jsonl}}            # MBPP's, HumanEval's or APPS' fields, or our own

The text prompt is MBPP's own (Austin et al. 2021, https://arxiv.org/abs/2108.07732), with `[BEGIN]` and `[DONE]` around
the program. A chat model (`prompt.chat`, or always with `chat=true`) is asked for a Python code block instead. Only
`visible_tests` of the tests are in the prompt: a completion that writes their results out literally fails the hidden
ones. The reward counts all tests, so that a pass rate compares with published ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlvr.chat.special_tokens import special_token_texts
from rlvr.core.types import Task
from rlvr.envs.hub import load_from_hub
from rlvr.envs.refine import RefineEnv
from rlvr.envs.registry import register_environment
from rlvr.envs.reviewers import Attempt, TestsReviewer
from rlvr.envs.row_files import read_rows
from rlvr.envs.row_source import HELDOUT_FRACTION, RowSource, choose_heldout
from rlvr.reward.code import CodeProblem
from rlvr.reward.code.program_extraction import BEGIN, BODY_ENDS, DONE
from rlvr.reward.code.task_faults import refuse_test_faults
from rlvr.sandbox import Sandbox

HUB_NAME, HUMANEVAL_HUB_NAME = "google-research-datasets/mbpp", "openai/openai_humaneval"
HUMANEVAL_FILES = ("HumanEval.jsonl.gz", "HumanEval.jsonl")
FILES = {"full": "mbpp.jsonl", "sanitized": "sanitized-mbpp.json"}
SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}  # by task_id
SHOTS = (2, 3, 4, 1, 5, 6, 7, 8, 9, 10)  # the first three are the paper's
Row = tuple[str, dict[str, Any]]  # where it stands, and the row


class CodeSource(RowSource):
    """A task source of problems. The meta of a task is its problem; its level is the number of its tests."""

    def __init__(
        self,
        name: str,
        train: Iterable[Task],
        heldout: Sequence[Task],
        *,
        visible: int | None,
        max_turns: int,
        shots: Sequence[CodeProblem] = (),
    ) -> None:
        train, heldout = list(train), list(heldout)
        if max_turns > 1:
            hidden = [t.id for t in (*train, *heldout) if not CodeProblem.of(t.meta).visible_tests(visible)]
            if hidden:
                raise ValueError(
                    f"{name}: max_turns={max_turns}, but {hidden[0]!r} and {len(hidden) - 1} more have no visible test "
                    "(a check function is one hidden test), so attempts get no feedback; use max_turns=1"
                )
        super().__init__(name, train, heldout, "code", demonstrations="solution")
        self._visible, self.max_turns, self._shots = visible, max_turns, shots

    def chat_messages(self, task: Task) -> list[dict[str, str]]:
        """The problem as a chat asks for it, after the worked examples that were asked for (`shots`)."""
        return _chat_messages(CodeProblem.of(task.meta), self._visible, self._shots)

    def example_prompt(self, task: Task) -> str | list[dict[str, str]]:
        """The problem without the worked examples of `few_shot`."""
        problem = CodeProblem.of(task.meta)
        if isinstance(task.model_prompt, str):
            return problem.prefix or _text_prompt(problem, self._visible)
        return _chat_messages(problem, self._visible, [])

    def env(self, task: Task, tokenizer: Any) -> RefineEnv:
        return code_env(task, tokenizer, stop=_stop(task, tokenizer), visible=self._visible, max_turns=self.max_turns)

    def describe_task(self, task: Task) -> dict[str, str]:
        """The number of tests, and what the answer is: a program, a function, or the body of one."""
        problem = CodeProblem.of(task.meta)
        kind = "program" if problem.is_program else "function body" if problem.prefix else "function"
        return {"tests": str(len(problem.tests)), "answer": kind}

    def demonstration(self, task: Task, key: int) -> str | None:
        """The reference program in the form that the prompt asks for."""
        solution = task.meta.get("solution")
        return (
            None
            if not solution
            else _reference_completion(CodeProblem.of(task.meta), chat=not isinstance(task.model_prompt, str))
        )


@register_environment("mbpp")
def mbpp(
    path: str | None = None,
    subset: str = "full",
    split: str = "test",
    num_train_problems: int | None = None,
    visible_tests: int | str = 1,
    few_shot: int | None = None,
    chat: bool = False,
    max_turns: int = 1,
) -> CodeSource:
    """MBPP, basic programming problems in Python (Austin et al. 2021): `subset` full (974) or sanitized (427).

    Its file or folder is `path`; without one it comes from the hub. Training uses the tasks 601 to 974, or the first
    `num_train_problems` of them; `split` is held out: test (11 to 510) or validation (511 to 600). `few_shot` of the
    tasks 1 to 10 stand before each prompt, by default the paper's 2, 3 and 4, or none in a chat. `visible_tests` (a
    number, or all) of a problem's tests are in the prompt. With `max_turns` above 1 the policy gets the error of a
    visible test after a failed attempt and may try again.
    """
    if subset not in FILES:
        raise ValueError(f"mbpp: subset={subset!r}, expected full or sanitized")
    if split not in ("test", "validation"):
        raise ValueError(f"mbpp: split={split!r}, expected test (tasks 11 to 510) or validation (511 to 600)")
    if few_shot is not None and not (type(few_shot) is int and 0 <= few_shot <= len(SHOTS)):
        raise ValueError(
            f"mbpp: few_shot={few_shot!r}, expected 0 to {len(SHOTS)}: worked examples from the tasks 1 to 10"
        )
    visible = _check_visible("mbpp", visible_tests, max_turns)
    if path is None:
        rows = _hub_rows(subset)
    else:
        rows = _file_rows(Path(path) / FILES[subset] if Path(path).is_dir() else Path(path))
    problems = dict(_read_task_ids(rows, path or HUB_NAME))
    refuse_test_faults([(f"task_id={i}", problem) for i, problem in problems.items()], f"mbpp: {path or HUB_NAME}")
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
    examples = [problems[i] for i in SHOTS if i in problems]
    shots = few_shot if few_shot is not None else 0 if chat else min(3, len(examples))
    if shots > len(examples):
        raise ValueError(f"mbpp: few_shot={shots}, but {path} has {len(examples)} of the tasks 1 to 10")

    def tasks(numbered: list[tuple[int, CodeProblem]]) -> list[Task]:
        return [_task(f"mbpp-{i}", problem, visible, chat, examples[:shots]) for i, problem in numbered]

    asked = examples[: few_shot or 0]
    return CodeSource("mbpp", tasks(train), tasks(by_split[split]), visible=visible, max_turns=max_turns, shots=asked)


@register_environment("humaneval")
def humaneval(path: str | None = None, chat: bool = False) -> CodeSource:
    """HumanEval, 164 heads of Python functions to complete (Chen et al. 2021), to evaluate on: all rows are held out.

    Its file, or the folder with it, is `path`; without one it comes from the hub. The prompt is the head, or with
    `chat` a request for the whole program.
    """
    if path is None:
        found = load_from_hub("humaneval", HUMANEVAL_HUB_NAME, None, f"file, {HUMANEVAL_FILES[0]}", split="test")
        rows = ((f"{HUMANEVAL_HUB_NAME}:{i}", dict(row)) for i, row in enumerate(found, 1))
    else:
        given = Path(path).expanduser()
        files = [given / name for name in HUMANEVAL_FILES if (given / name).is_file()] if given.is_dir() else [given]
        rows = _file_rows(files[0] if files else given / HUMANEVAL_FILES[0])
    problems = [(str(row.get("task_id", where)), _problem(where, row)) for where, row in rows]
    refuse_test_faults(problems, f"humaneval: {path or HUMANEVAL_HUB_NAME}")
    tasks = [_task(name, problem, None, chat, []) for name, problem in problems]
    if without := next((task for task in tasks if not task.meta.get("prefix")), None):
        raise ValueError(
            f"humaneval: {path or HUMANEVAL_HUB_NAME}: the row {without.id!r} has no head of a function to complete "
            "(prompt, test, entry_point); for rows of another form use env.name=code"
        )
    return CodeSource("humaneval", [], tasks, visible=None, max_turns=1)


@register_environment("code")
def code(
    path: str,
    heldout_path: str | None = None,
    heldout_fraction: float | None = None,
    visible_tests: int | str = 1,
    chat: bool = False,
    max_turns: int = 1,
) -> CodeSource:
    """Problems from a file of JSON lines, or one JSON list: rows in MBPP's, HumanEval's or APPS' form, or in our own.

    Our own is `{"statement": ..., "tests": [...]}`; tests are assert statements or `{"input", "output"}` of a program.
    Tests that can judge no answer (no assert, a name that nothing defines) are refused, with their row. The held-out
    tasks are those of `heldout_path`, or `heldout_fraction` (0.1) of `path` by a hash of the prompt. The other options
    are those of `mbpp`.
    """
    if None not in (heldout_fraction, heldout_path):
        raise ValueError(
            f"code: heldout_fraction={heldout_fraction!r} and heldout_path={heldout_path!r}; leave one of them out"
        )
    visible = _check_visible("code", visible_tests, max_turns)

    def tasks(file: str, prefix: str) -> list[Task]:
        problems = [(where, _problem(where, row)) for where, row in _file_rows(Path(file))]
        refuse_test_faults(problems, "code")
        return [_task(prefix + where, problem, visible, chat, []) for where, problem in problems]

    train = tasks(path, "")
    if heldout_path:
        heldout = tasks(heldout_path, "heldout:")
    else:
        heldout = choose_heldout(train, HELDOUT_FRACTION if heldout_fraction is None else heldout_fraction, path)
        train = [] if heldout_fraction == 1 else train
    return CodeSource(f"code {path}", train, heldout, visible=visible, max_turns=max_turns)


def code_env(
    task: Task,
    tokenizer: Any,
    *,
    stop: list[Any] | None = None,
    visible: int | None = 1,
    max_turns: int = 1,
    sandbox: Sandbox | None = None,
) -> RefineEnv:
    """An episode of a programming problem. `stop` ends a completion; `visible` tests give the feedback."""
    reviewer = TestsReviewer(visible, sandbox, special_token_texts(tokenizer))
    return RefineEnv(task, tokenizer, reviewer, stop=stop, max_turns=max_turns, format_feedback=_format_feedback)


def _format_feedback(attempt: Attempt, feedback: str) -> str:
    if not isinstance(attempt.task.model_prompt, str):
        return feedback
    end = "" if DONE in attempt.answer else f"\n{DONE}"
    return f"{end}\n{feedback}\n{BEGIN}\n"


def _check_visible(name: str, given: int | str, max_turns: int) -> int | None:
    if type(max_turns) is not int or max_turns < 1:
        raise ValueError(f"{name}: max_turns={max_turns!r}, expected at least 1 attempt")
    if given != "all" and (type(given) is not int or given < 1):
        raise ValueError(
            f"{name}: visible_tests={given!r}, expected at least 1 or all: the prompt has to show how the function is "
            "called"
        )
    return None if given == "all" else int(given)


# --- rows ---------------------------------------------------------------------------------------------------------


def _file_rows(file: Path) -> Iterator[Row]:
    return ((row.id, row.values) for row in read_rows(file))


def _hub_rows(subset: str) -> Iterator[Row]:
    splits = load_from_hub("mbpp", HUB_NAME, subset, f"file, or folder with {FILES[subset]}")
    for name in splits:
        yield from ((f"{HUB_NAME} {name}:{i}", dict(row)) for i, row in enumerate(splits[name], 1))


def _problem(where: str, row: dict[str, Any]) -> CodeProblem:
    try:
        problem = CodeProblem.of(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not (problem.statement or problem.prefix):
        raise ValueError(f"{where}: the problem has no statement; give it one, for its prompt")
    return problem


def _read_task_ids(rows: Iterable[Row], path: str) -> Iterator[tuple[int, CodeProblem]]:
    """(MBPP's task_id, problem) of each row; ValueError for an id out of range or given twice."""
    seen: dict[int, str] = {}
    for where, row in rows:
        number = row.get("task_id")
        if type(number) is not int or not 1 <= number <= 974:
            raise ValueError(
                f"{path}, {where}: task_id={number!r}, expected 1 to 974, by which MBPP is split; for rows of your own "
                "use env.name=code"
            )
        if number in seen:
            raise ValueError(f"{path}, {where}: task_id={number} is also at {seen[number]}; keep one of them")
        seen[number] = where
        yield number, _problem(where, row)


# --- prompts and completions --------------------------------------------------------------------------------------


def _task(name: str, problem: CodeProblem, visible: int | None, chat: bool, shots: Sequence[CodeProblem]) -> Task:
    level, meta = str(len(problem.tests)), problem.row()
    if chat:
        return Task(name, _chat_messages(problem, visible, shots), meta, level)
    if problem.prefix:  # the completion continues it
        return Task(name, problem.prefix, meta, level)
    before = "".join(f"{_text_prompt(shot, visible)}{_reference_completion(shot, chat=False)}\n\n" for shot in shots)
    return Task(name, before + _text_prompt(problem, visible), meta, level)


def _chat_messages(problem: CodeProblem, visible: int | None, shots: Sequence[CodeProblem]) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for shot in shots:
        messages.append({"role": "user", "content": _chat_prompt(shot, visible)})
        messages.append({"role": "assistant", "content": _reference_completion(shot, chat=True)})
    return [*messages, {"role": "user", "content": _chat_prompt(problem, visible)}]


def _text_prompt(problem: CodeProblem, visible: int | None) -> str:
    kind = "Your program should read this input and write this output:" if problem.is_program else _TESTS
    task = f"You are an expert Python programmer, and here is your task: {problem.statement.strip()}"
    return f"{task} {kind}\n\n{_format_tests(problem, visible)}\n{BEGIN}\n"


_TESTS = "Your code should pass these tests:"


def _chat_prompt(problem: CodeProblem, visible: int | None) -> str:
    if problem.prefix:
        body = f"Complete this Python function:\n\n```python\n{problem.prefix.rstrip()}\n```"
    elif problem.is_program:
        body = (
            f"Write a Python program that reads standard input and writes standard output.\n\n"
            f"{problem.statement.strip()}\n\nFor example:\n\n{_format_tests(problem, visible)}"
        )
    else:
        tests = f"```python\n{_format_tests(problem, visible)}\n```"
        body = f"{problem.statement.strip()}\n\n{_TESTS}\n\n{tests}"
    return f"{body}\n\nAnswer with the whole program in one Python code block."


def _format_tests(problem: CodeProblem, visible: int | None) -> str:
    shown = problem.visible_tests(visible)
    return "\n".join(
        test.strip()
        if isinstance(test, str)
        else f"Input:\n{test['input'].rstrip()}\nOutput:\n{test['output'].rstrip()}"
        for test in shown
    )


def _reference_completion(problem: CodeProblem, *, chat: bool) -> str:
    solution = problem.solution.strip()
    if chat:
        return f"```python\n{solution}\n```"
    if problem.prefix:
        return problem.solution.removeprefix(problem.prefix)
    return f"{solution}\n{DONE}"


def _stop(task: Task, tokenizer: Any) -> list[Any] | None:
    """What ends a completion; None (the end-of-sequence token alone) in a chat."""
    if not isinstance(task.model_prompt, str):
        return None
    ends = [stop for stop in BODY_ENDS if stop != "\n#"] if task.meta.get("prefix") else [DONE]
    return ends + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
