"""What happens to prompts that are too long for a run: left out by default, cut from the left, or an error.

`limit_prompts` measures every prompt of a source with a fixed number of tasks before the run starts, as the model will
read it. Generated tasks are measured when they are drawn, and a too long one is drawn again. Left out on purpose:
groups whose episodes write their own prompts (`TaskSource.group_builder`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rlvr.chat.chat_template import has_template, render_chat
from rlvr.chat.turns import join_turns
from rlvr.core import rng
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import ClosableEnv, Env, ExternalEnv, InitialObservationOverflow, StepResult, TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import encode_prompt, encode_texts
from rlvr.envs.wrapped_source import WrappedSource

_MANY = 20_000  # texts whose tokens take a while to count
_BATCH = 4096
_FIRST = 50  # tasks of a level that speak for a source of generated ones
_DRAWS = 1000  # of a generated task, until one fits


def limit_prompts(
    source: TaskSource,
    tokenizer: Any,
    limit: int,
    how: str,
    log: Callable[[str], None],
    key: str,
    is_strict: bool = True,
) -> TaskSource:
    """The source with no prompt of more than `limit` tokens; `key` is the setting that says so, for messages.

    A source of generated tasks stays as it is if the first of them fit, unless the limit `is_strict`: measuring each
    takes time. ValueError if no task is left, and under `error` for the first prompt that is too long.
    """
    if source.group_builder is not None:
        return source
    if source.owns_prompts:
        if how != "filter":
            raise ValueError(
                f"training.long_prompts={how} is not supported here: the episodes of this environment write their own "
                "prompts, and calls with longer ones are refused; leave it out"
            )
        source = cast(TaskSource, BoundedSource(source, limit)) if is_strict else source
    if how == "truncate_left":
        if source.size is not None:
            tasks = [*list_train(source), *source.heldout(None)]
            if count := len(find_long(tasks, tokenizer, limit, log)):
                log(f"the model reads the last {limit:,} tokens ({key}) of {count:,} of {len(tasks):,} prompts")
        return cast(TaskSource, TruncatedSource(source, limit))
    if source.size is None or source.leave_out is None:
        if not is_strict and not find_long(_first_tasks(source), tokenizer, limit):
            return source
        return cast(TaskSource, FittingSource(source, tokenizer, limit, how, log, key))
    train, heldout = list_train(source), source.heldout(None)
    long = find_long([*train, *heldout], tokenizer, limit, log)
    if how == "error" and long:
        raise ValueError(_about(*next(iter(long.items())), limit, key))
    for tasks, kind in ((train, "prompts"), (heldout, "held-out prompts")):
        _report(tasks, long, kind, f"longer than {limit:,} tokens ({key})", log)
    if long:
        source.leave_out(long.keys())
    return source


def leave_out_long_demonstrations(source: TaskSource, tokenizer: Any, context: int, log: Callable[[str], None]) -> None:
    """Leave out training tasks whose prompt and demonstration together do not fit the model's context.

    Supervised fine-tuning would stop at the first of them. Generated tasks are not looked at.
    """
    if source.group_builder is not None or source.size is None or source.leave_out is None:
        return
    train = list_train(source)
    prompts = {task.id: _render(task, tokenizer) for task in train}
    answers = {task.id: join_turns(source.demonstration(task, 0) or "", source.end_word) for task in train}
    unsure = [id for id in prompts if len(prompts[id].encode()) + len(answers[id].encode()) + 1 > context]
    read = _count_tokens({id: prompts[id] for id in unsure}, tokenizer, log)
    written = _count_tokens({id: answers[id] for id in unsure}, tokenizer, log)
    most = source.prompt_limit or context
    long = {id for id in unsure if min(read[id], most) + written[id] + 1 > context}
    what = f"longer, with their demonstration, than the model's context of {context:,} tokens"
    _report(train, long, "prompts", what, log)
    if long:
        source.leave_out(long)


def find_long(
    tasks: Sequence[Task], tokenizer: Any, limit: int, log: Callable[[str], None] = lambda text: None
) -> dict[str, int]:
    """The tokens of each prompt of more than `limit`, by the task's id.

    Texts of fewer bytes than `limit` are not tokenized: no token is less than a byte.
    """
    texts = {task.id: _render(task, tokenizer) for task in tasks}
    unsure = {id: text for id, text in texts.items() if len(text.encode()) >= limit}
    return {id: count for id, count in _count_tokens(unsure, tokenizer, log).items() if count > limit}


def _first_tasks(source: TaskSource) -> list[Task]:
    return [*source.heldout(_FIRST), *(source.train(0, i, level) for level in source.levels for i in range(_FIRST))]


def list_train(source: TaskSource) -> list[Task]:
    """Every training task once: an epoch has a task of a higher weight more often, and one of a lower perhaps not."""
    assert source.size is not None
    found: dict[str, Task] = {}
    for level in source.levels:
        epoch = 0
        while True:
            size = source.size(level)
            before = len(found)
            found |= {task.id: task for task in (source.train(0, epoch * size + i, level) for i in range(size))}
            epoch += 1
            if len(found) == before:
                break
    return list(found.values())


def _report(
    tasks: Sequence[Task], long: Mapping[str, int] | set[str], kind: str, what: str, log: Callable[[str], None]
) -> None:
    """Say how many of these tasks are left out, and why; ValueError if that is all of them."""
    count = sum(task.id in long for task in tasks)
    if tasks and count == len(tasks):
        raise ValueError(f"all {count:,} {kind} are {what}; raise the limit, or shorten them")
    if count:
        log(f"left out {count:,} of {len(tasks):,} {kind} {what}")


def _count_tokens(texts: Mapping[str, str], tokenizer: Any, log: Callable[[str], None]) -> dict[str, int]:
    """The number of tokens of each text, counted in batches."""
    if len(texts) > _MANY:
        log(f"counting the tokens of {len(texts):,} texts")
    ids, counts = list(texts), dict[str, int]()
    for start in range(0, len(ids), _BATCH):
        part = ids[start : start + _BATCH]
        encoded = encode_texts([texts[id] for id in part], tokenizer)
        counts |= {id: len(tokens) for id, tokens in zip(part, encoded, strict=True)}
    return counts


def _render(task: Task, tokenizer: Any) -> str:
    """The text whose tokens `encode_prompt` gives."""
    if isinstance(task.model_prompt, str):
        return task.model_prompt
    if not has_template(tokenizer):
        encode_prompt(task, tokenizer)  # says what to do
    return render_chat(task.model_prompt, tokenizer, task.template_arguments)


def _about(id: str, length: int, limit: int, key: str) -> str:
    return (
        f"task {id!r}: its prompt has {length:,} tokens, more than {limit:,} ({key}); raise the limit, or give "
        "training.long_prompts=filter or truncate_left"
    )


class FittingSource(WrappedSource):
    """A source of generated tasks that draws each again until its prompt fits."""

    def __init__(
        self, source: TaskSource, tokenizer: Any, limit: int, how: str, log: Callable[[str], None], key: str
    ) -> None:
        super().__init__(source)
        self._tokenizer, self._limit, self._how, self._key = tokenizer, limit, how, key
        self._log, self._counted = log, False

    def train(self, seed: int, index: int, level: str) -> Task:
        for draw in range(_DRAWS):
            task = self.inner.train(rng.key("fitting", seed, draw) if draw else seed, index, level)
            length = len(encode_prompt(task, self._tokenizer))  # kept there for the episode
            if length <= self._limit:
                return task
            if self._how == "error":
                raise ValueError(_about(task.id, length, self._limit, self._key))
        raise ValueError(
            f"{_DRAWS:,} tasks of level {level!r} in a row have prompts longer than {self._limit:,} tokens "
            f"({self._key}); raise the limit, or leave the level out"
        )

    def heldout(self, count: int | None) -> list[Task]:
        tasks = self.inner.heldout(count)
        fitting = self._fit(tasks)
        if not self._counted:
            self._counted, kept = True, {task.id for task in fitting}
            long = {task.id for task in tasks if task.id not in kept}
            _report(tasks, long, "held-out prompts", f"longer than {self._limit:,} tokens ({self._key})", self._log)
        return fitting

    def extra_heldout(self, count: int) -> dict[str, list[Task]]:
        return {name: self._fit(tasks) for name, tasks in self.inner.extra_heldout(count).items()}

    def _fit(self, tasks: list[Task]) -> list[Task]:
        long = find_long(tasks, self._tokenizer, self._limit)
        if long and self._how == "error":
            raise ValueError(_about(*next(iter(long.items())), self._limit, self._key))
        return [task for task in tasks if task.id not in long]


class TruncatedSource(WrappedSource):
    """A source whose episodes show the last `prompt_limit` tokens of a prompt."""

    def __init__(self, source: TaskSource, limit: int) -> None:
        super().__init__(source)
        self.prompt_limit = limit

    def env(self, task: Task, tokenizer: Any) -> Env:
        return TruncatedEnv(self.inner.env(task, tokenizer), self.prompt_limit)


class BoundedSource(WrappedSource):
    """A source whose episodes are played outside, where no turn may read more than `limit` tokens."""

    def __init__(self, source: TaskSource, limit: int) -> None:
        super().__init__(source)
        self._limit = limit

    def env(self, task: Task, tokenizer: Any) -> Env | ExternalEnv:
        made = self.inner.env(task, tokenizer)
        if isinstance(made, ExternalEnv):
            made.prompt_limit = self._limit
        return made


class TruncatedEnv:
    """An episode whose first observation loses its beginning; later ones that go on from it lose the same."""

    def __init__(self, env: Env, limit: int) -> None:
        self._env, self._limit = env, limit
        self._cut: list[int] = []

    async def initial_observation(self) -> tuple[ModelInput, Any] | InitialObservationOverflow:
        given = await self._env.initial_observation()
        if isinstance(given, InitialObservationOverflow):
            return given
        tokens = given[0].to_ints()
        self._cut = tokens[: -self._limit]
        return ModelInput(tokens[-self._limit :]), given[1]

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        result = await self._env.step(action, extra=extra)
        if result.next_observation is None:
            return result
        tokens = result.next_observation.to_ints()
        goes_on = tokens[: len(self._cut)] == self._cut
        return replace(
            result, next_observation=ModelInput(tokens[len(self._cut) :] if goes_on else tokens[-self._limit :])
        )

    async def close(self) -> None:
        if isinstance(self._env, ClosableEnv):
            await self._env.close()
