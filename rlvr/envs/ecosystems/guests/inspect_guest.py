"""Tasks of Inspect 0.3, in its own interpreter: lists samples as the solver asks them, and scores answers.

The task's own solver runs up to its call of `generate`, where the model's answer is put in; then its scorers judge.
Left out on purpose: models, tools and sandboxes, which are refused by name. Needs inspect-ai; imports nothing of rlvr.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import traceback
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pipe_server import Refusal, describe, serve

try:
    from inspect_ai import list_tasks
    from inspect_ai._eval.loader import load_tasks
    from inspect_ai._eval.task.util import sample_messages
    from inspect_ai._util.registry import registry_unqualified_name
    from inspect_ai.model import Model, ModelName, ModelOutput
    from inspect_ai.scorer import Target, value_to_float
    from inspect_ai.solver import TaskState
    from inspect_ai.solver._task_state import set_sample_state

    MISSING = ""
except ImportError as error:
    MISSING = f"{sys.executable} cannot load inspect_ai ({error})"

FAILED = ("grader_failed", "scoring_failed")  # reasons of a score that say nothing of the answer
MODEL = "rlvr/policy"  # what a task is told of its model
NEEDS_MODEL = "a model of its own is needed, which is not supported"
_NEEDS = (
    (NEEDS_MODEL, "inspect_ai/model/_model.py"),
    ("a sandbox is needed, which is not supported", "inspect_ai/util/_sandbox"),
)
_loaded: dict[str, Any] = {}
_model_calls: ContextVar[list[str]] = ContextVar("model_calls")  # of the scorer that runs


class SolverStop(BaseException):
    """Ends a solver where it asks the model; no code of a task should catch this."""


def find(config: dict[str, Any]) -> Any:
    """The task of {name, options}."""
    key = json.dumps(config, sort_keys=True)
    if key not in _loaded:
        _loaded[key] = load(config["name"], config["options"])
    return _loaded[key]


def load(name: str, options: dict[str, Any]) -> Any:
    if MISSING:
        raise Refusal(MISSING)
    path = name.rpartition("@")[0] or name
    if path.endswith(".py") and not Path(path).is_file():
        raise Refusal(f"there is no file {path!r} in {os.getcwd()}")
    try:
        tasks = load_tasks([name], options)
    except (Exception, SystemExit) as error:
        raise Refusal(f"{name!r} cannot be loaded: {describe(error)}{name_tasks(name, path)}") from error
    if len(tasks) != 1:
        names = ", ".join(f"{path}@{task.name}" for task in tasks)
        raise Refusal(f"{name!r} has {len(tasks)} tasks, expected one" + (f": {names}" if tasks else " (FILE.py@TASK)"))
    (task,) = tasks
    if task.dataset is None or not len(task.dataset):
        raise Refusal(f"{name!r} has no samples in its dataset; samples that are made while it runs are not supported")
    for sample in task.dataset:
        if task.sandbox or sample.sandbox or sample.files or sample.setup:
            raise Refusal(f"{name!r} needs a sandbox, which is not supported; train on it by `env.name=agent`")
    if not task.scorer:
        raise Refusal(f"{name!r} has no scorer, so no reward")
    return task


def name_tasks(name: str, path: str) -> str:
    """Which tasks a file has, where `name` asks for another one."""
    try:
        known = [task.name for task in list_tasks(Path(path).name, root_dir=Path(path).absolute().parent)]
    except (Exception, SystemExit):  # the file has a fault, which was said already
        known = []
    return f"; {path} has {', '.join(known)}" if known and name.rpartition("@")[2] not in known else ""


async def solve(task: Any, place: int, answer: str | None) -> tuple[Any, list[dict[str, str]]]:
    """The state after the solver, and the messages by which it asked. Without an answer it stops there."""
    sample = task.dataset[place]
    state = TaskState(
        model=ModelName(MODEL), sample_id=sample.id or place, epoch=1, input=sample.input,
        target=Target(sample.target), choices=sample.choices, messages=sample_messages(sample),
        metadata=dict(sample.metadata or {}),
    )  # fmt: skip
    set_sample_state(state)
    asked: list[list[dict[str, str]]] = []

    async def generate(state: Any, *_: Any, **__: Any) -> Any:
        if asked:
            raise Refusal("the model is asked more than once; expected one turn")
        if state.tools:
            raise Refusal("the model is given tools; expected one turn without tools")
        asked.append([read_message(message) for message in state.messages])
        if answer is None:
            raise SolverStop
        state.output = ModelOutput.from_content(MODEL, answer)
        state.messages.append(state.output.message)
        return state

    try:
        for solver in (task.setup, task.solver):
            if solver is not None:
                state = await solver(state, generate)
    except SolverStop:
        return state, asked[0]
    except Exception as error:
        raise explain("the solver", error) from error
    if not asked:
        raise Refusal("the solver never asks the model")
    return state, asked[0]


def read_message(message: Any) -> dict[str, str]:
    parts = [] if isinstance(message.content, str) else [part.type for part in message.content]
    if odd := [kind for kind in parts if kind != "text"] or ([message.role] if message.role == "tool" else []):
        raise Refusal(f"a message has a part {odd[0]!r}, which is not supported; expected text")
    return {"role": message.role, "content": message.text}


def explain(what: str, error: Exception) -> Exception:
    """A refusal by name where other code asked for what is not here, else the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Refusal):
            return Refusal(f"{what}: {cause}")
        files = [frame.filename for frame in traceback.extract_tb(cause.__traceback__)]
        for need, path in _NEEDS:
            if any(path in file for file in files):
                return Refusal(f"{what}: {need} ({error!s:.300})")
        cause = cause.__cause__ or cause.__context__
    return error


async def refuse_model(*_: Any, **__: Any) -> Any:
    """In place of the call of any model; noted, for code that goes on after the error."""
    _model_calls.get([]).append(NEEDS_MODEL)
    raise Refusal(NEEDS_MODEL)


async def judge(task: Any, state: Any) -> dict[str, float]:
    """The values of the scorers by name, or by NAME/KEY where a scorer gives several."""
    set_sample_state(state)
    found: dict[str, float] = {}
    for scorer in task.scorer:
        name, calls = registry_unqualified_name(scorer), list[str]()
        _model_calls.set(calls)
        try:
            score = await scorer(state, state.target)
        except Exception as error:
            raise explain(f"the scorer {name}", error) from error
        if calls:
            raise Refusal(f"the scorer {name}: {NEEDS_MODEL}")
        if score is None:
            raise Refusal(f"the scorer {name} gave no score")
        if score.reason in FAILED:
            raise Refusal(f"the scorer {name} could not judge: {score.reason}: {score.explanation or ''!s:.300}")
        if isinstance(score.value, dict):
            values = {f"{name}/{key}": value for key, value in score.value.items()}
        else:
            values = {name: score.value}
        for key, value in values.items():
            label, count = key, 1
            while label in found:
                label, count = f"{key}{count}", count + 1
            found[label] = read_value(key, value)
    return found


def read_value(name: str, value: Any) -> float:
    if isinstance(value, str):
        words = ("C", "I", "P", "N")
        if value not in words and value.lower() not in ("yes", "true", "no", "false"):
            try:
                value = float(value)
            except ValueError:
                raise Refusal(f"the scorer {name} gave {value!r:.80}, expected a number or C, I, P or N") from None
    elif not isinstance(value, (bool, int, float)):
        raise Refusal(f"the scorer {name} gave {value!r:.80}, expected a number or C, I, P or N")
    number = value_to_float()(value)
    if not math.isfinite(number):
        raise Refusal(f"the scorer {name} gave {number}: the answer was not scored")
    return number


def compute_hash(messages: list[dict[str, str]]) -> str:
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]


async def list_samples(config: dict[str, Any]) -> list[dict[str, Any]]:
    """What is asked of the model in each sample. An answer is scored, so that what is not supported shows here."""
    task = find(config)
    await try_scorers(config, task)
    rows: list[dict[str, Any]] = []
    for place, sample in enumerate(task.dataset):
        _, messages = await solve(task, place, None)
        rows.append({"id": str(sample.id or place), "messages": messages, "hash": compute_hash(messages)})
    return rows


async def try_scorers(config: dict[str, Any], task: Any) -> None:
    for answer in ("ANSWER: A", ""):  # one that has no verdict says nothing of others
        state, _ = await solve(task, 0, answer)
        try:
            values = await judge(task, state)
        except Refusal as refusal:
            if "is not supported" in str(refusal):
                raise
        except Exception as error:
            print(f"a scorer failed at a trial: {describe(error)}", file=sys.stderr)
        else:
            choose(config["scorer"], values)


def choose(wanted: str | None, values: dict[str, float]) -> float:
    if wanted is None and len(values) == 1:
        return next(iter(values.values()))
    if wanted not in values:
        raise Refusal(
            f"scorer={wanted!r} is not supported: the scores are {', '.join(values)}; give the one to train on"
        )
    return values[wanted]


async def score(config: dict[str, Any], place: int, hash: str, answer: str) -> dict[str, Any]:
    task = find(config)
    state, messages = await solve(task, place, answer)
    if compute_hash(messages) != hash:
        raise Refusal("the task's messages for this sample have changed; they must be the same every time (no shuffle)")
    values = await judge(task, state)
    return {"reward": choose(config["scorer"], values), "scores": values}


async def close() -> None:
    return


if __name__ == "__main__":
    sys.path.append("")  # modules beside a task in the current folder
    os.environ.pop("INSPECT_EVAL_MODEL", None)
    if not MISSING:
        Model.generate = refuse_model
    serve({"samples": list_samples, "score": score}, close)
