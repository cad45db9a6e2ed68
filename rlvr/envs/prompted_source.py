"""A task source as the model reads it: every task of a run goes through here, by the config's section `prompt`.

    source = apply_prompt_options(source, tokenizer, PromptOptions(thinking="off", examples=2))
    source.train(0, 0, "").model_prompt        # what `encode_prompt` encodes

An option that the tokenizer's template or the environment's episodes cannot meet is a ValueError, on the first task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from rlvr.chat.chat_template import has_template, list_variables, render_chat, thinking_arguments
from rlvr.chat.turns import join_turns
from rlvr.core import rng
from rlvr.core.futures import run_to_end
from rlvr.core.protocols import ClosableEnv, Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptExample, PromptOptions, PromptWriter, build_turns, encode_prompt
from rlvr.envs.wrapped_source import WrappedSource

_FAR = 1_000_003  # a prime: also a source that takes its tasks in a circle has another one so far on
_TRIES = 100


class PromptedSource(WrappedSource):
    """A task source whose tasks have a `Task.shown_prompt`; everything else is that of `inner`."""

    def __init__(self, source: TaskSource, writer: PromptWriter) -> None:
        super().__init__(source)
        self.writer = writer

    def train(self, seed: int, index: int, level: str) -> Task:
        """The source's task; if that is one of the examples, a task far on: its answer would be in its own prompt."""
        for attempt in range(_TRIES):
            task = self.inner.train(seed, index + attempt * _FAR, level)
            if not self._is_example(task):
                return write_prompt(self.inner, self.writer, task)
        raise ValueError(f"prompt.examples: all training tasks of level {level!r} are examples; give fewer")

    def heldout(self, count: int | None) -> list[Task]:
        return self._write(self.inner.heldout(count))

    def extra_heldout(self, count: int) -> dict[str, list[Task]]:
        return {name: self._write(tasks) for name, tasks in self.inner.extra_heldout(count).items()}

    def _write(self, heldout: list[Task]) -> list[Task]:
        for task in heldout:
            if self._is_example(task):
                raise ValueError(
                    f"prompt.examples: an example is the held-out task {task.id!r}, whose answer would be in its own "
                    "prompt; give another example"
                )
        return [write_prompt(self.inner, self.writer, task) for task in heldout]

    def _is_example(self, task: Task) -> bool:
        if not self.writer.examples:
            return False
        shown = write_prompt(self.inner, PromptWriter(self.writer.is_chat), task)
        asked = build_turns(self.inner.example_prompt(shown))
        return any(asked == build_turns(example.prompt) for example in self.writer.examples)


def write_prompt(source: TaskSource, writer: PromptWriter, task: Task) -> Task:
    """The task as the model reads it, asked for in a chat in the words of its source."""
    is_asked = writer.is_chat and isinstance(task.prompt, str)
    return writer.write(task, source.chat_messages(task) if is_asked else None)


def apply_prompt_options(
    source: TaskSource, tokenizer: Any, options: PromptOptions, warn: Callable[[str], None] = lambda text: None
) -> TaskSource:
    """The source as the model will read it, tried on its first task; ValueError where the options cannot be met, or
    where such prompts have no episodes (a template without tools, say).

    Where episodes encode prompts of their own, `chat=auto` leaves the source as it is, and `warn` says so.
    """
    made = _apply(source, tokenizer, options, warn)
    if not made.group_builder:
        made.env(_first_task(made), tokenizer)
    return made


def _apply(source: TaskSource, tokenizer: Any, options: PromptOptions, warn: Callable[[str], None]) -> TaskSource:
    keys = [*options.needs_template, *(["prompt.examples"] if options.examples else [])]
    if options.needs_template and not has_template(tokenizer):
        raise ValueError(
            f"{keys[0]} needs a chat template, and the tokenizer has none; name an instruction-tuned model's tokenizer "
            f"(model.tokenizer), or leave {keys[0].partition('=')[0]} out"
        )
    if source.group_builder or source.owns_prompts:
        if keys:
            raise ValueError(
                f"{keys[0]} has no effect: the episodes of this environment write their own prompts; leave it out"
            )
        return source
    if not keys and (options.chat == "off" or not has_template(tokenizer)):
        return source
    task = _first_task(source)
    if has_template(tokenizer) and (options.chat != "off" or not isinstance(task.prompt, str)):
        _try_template(source, task, tokenizer, options)
    for key in keys:
        _check_effect(source, task, tokenizer, options, key)
    if not keys and (said := _describe_own_prompts(source, task, tokenizer, options)):
        warn(said)
        return source
    return cast(TaskSource, PromptedSource(source, make_writer(source, tokenizer, options)))


def _first_task(source: TaskSource) -> Task:
    """A task to try options on; of a test set, which has no levels, a held-out one."""
    return source.train(0, 0, source.levels[0]) if source.levels else source.heldout(1)[0]


def make_writer(source: TaskSource | None, tokenizer: Any, options: PromptOptions) -> PromptWriter:
    """The writer of these options. Without a source, its examples have to be given as a list."""
    is_chat = options.chat != "off" and has_template(tokenizer)
    examples = options.examples
    if isinstance(examples, int):
        assert source or not examples
        examples = _first_demonstrations(source, examples, PromptWriter(is_chat)) if source else []
    return PromptWriter(is_chat, options.system, _choose_arguments(tokenizer, options), examples)


def _choose_arguments(tokenizer: Any, options: PromptOptions) -> dict[str, Any]:
    """The arguments of the template; ValueError for one that it does not read, or that is given twice."""
    given = options.template_arguments
    if options.thinking is None and not given:
        return {}
    variables = list_variables(tokenizer)
    if unknown := [name for name in given if name not in variables]:
        raise ValueError(
            f"prompt.template_arguments.{unknown[0]}: the tokenizer's chat template reads no such variable; it reads "
            f"{', '.join(sorted(variables)) or 'none'}"
        )
    if options.thinking is None:
        return dict(given)
    switch = thinking_arguments(options.thinking, variables)
    if twice := [name for name in switch if name in given]:
        raise ValueError(
            f"prompt.thinking={options.thinking} and prompt.template_arguments.{twice[0]} set the same variable of the "
            "tokenizer's chat template; give one of the two"
        )
    return {**given, **switch}


def _first_demonstrations(source: TaskSource, count: int, writer: PromptWriter) -> list[PromptExample]:
    """The demonstrations of the first training tasks, of each level in turn; each level keeps a task to train on.

    They are the tasks of seed 0: the prompts of all seeds of a run have the same examples.
    """
    tasks: list[Task] = []
    for index in range(10 * count):
        for level in source.levels:
            if len(tasks) == count or (source.size and index + 1 >= source.size(level)):
                continue
            task = source.train(0, index, level)
            if all(task.prompt != other.prompt for other in tasks):
                tasks.append(task)
    if len(tasks) < count:
        raise ValueError(
            f"prompt.examples={count}: this environment has {len(tasks)} training tasks to spare for examples; give "
            "fewer, or a list of {prompt, completion}"
        )
    return [_make_example(source, write_prompt(source, writer, task)) for task in tasks]


def _make_example(source: TaskSource, task: Task) -> PromptExample:
    demonstration = source.demonstration(task, rng.key("prompt-example", task.id))
    if demonstration is None:
        raise ValueError(
            "prompt.examples: this environment has no demonstrations; give a list of {prompt, completion}, or leave "
            "prompt.examples out"
        )
    prompt, completion = source.example_prompt(task), join_turns(demonstration, source.end_word)
    # The words of a small vocabulary are told apart by spaces, which its prompts and demonstrations do not end with.
    has_gap = not isinstance(prompt, str) or prompt[-1:].isspace() or completion[:1].isspace()
    return PromptExample(prompt, completion if has_gap or source.vocabulary is None else f" {completion}")


def _try_template(source: TaskSource, task: Task, tokenizer: Any, options: PromptOptions) -> None:
    """Render a task by the template, with one option after the other; ValueError with the template's own error.

    Also where the template leaves out the system message or an example, or an argument changes nothing.
    """

    def render(writer: PromptWriter, said: str, remedy: str) -> str:
        shown = write_prompt(source, writer, task)
        assert not isinstance(shown.model_prompt, str)
        try:
            return render_chat(shown.model_prompt, tokenizer, shown.template_arguments)
        except Exception as error:  # each template raises its own
            raise ValueError(f"{said} ({error}); {remedy}") from error

    def try_value(name: str, value: Any) -> str:
        """The text with another value of an argument, or the template's error."""
        try:
            return render(replace(writer, arguments={**writer.arguments, name: value}), name, "")
        except ValueError as error:
            return repr(error)

    other = "another tokenizer (model.tokenizer)"
    writer = replace(make_writer(source, tokenizer, options), is_chat=True)
    given = "".join(f", {name}={value!r}" for name, value in writer.arguments.items())
    said = f"the tokenizer's chat template cannot render the prompt of task {task.id!r}{given}"
    remedy = f"use prompt.chat=off or {other}" if isinstance(task.prompt, str) else f"use {other}"
    remedy = f"give other values in prompt.template_arguments, or {remedy}" if given else remedy
    render(PromptWriter(is_chat=True, arguments=writer.arguments), said, remedy)
    said = "prompt.system: the tokenizer's chat template takes no system message"
    remedy = f"leave it out and put its words into the prompts, or use {other}"
    bare = render(replace(writer, examples=()), said, remedy)
    if options.system is not None and options.system.strip() not in bare:
        raise ValueError(f"prompt.system: the tokenizer's chat template leaves system messages out; {remedy}")
    if writer.examples:
        remedy = f"leave them out, or use {other}"
        text = render(writer, "prompt.examples: the tokenizer's chat template takes no earlier turns", remedy)
        completions = [example.completion.strip() for example in writer.examples]
        if missing := [completion for completion in completions if text.count(completion) <= bare.count(completion)]:
            raise ValueError(
                f"prompt.examples: the tokenizer's chat template does not write the completion {missing[0][:80]!r} as "
                f"it is; {remedy}"
            )
    for name, value in options.template_arguments.items():
        if len({try_value(name, other) for other in (value, True, False, "\u2063")}) == 1:
            raise ValueError(
                f"prompt.template_arguments.{name} has no effect: the tokenizer's chat template writes the same prompt "
                "with any value; leave it out"
            )


def _check_effect(source: TaskSource, task: Task, tokenizer: Any, options: PromptOptions, key: str) -> None:
    """ValueError if the option `key` changes the prompt of a task, and yet not what an episode shows the model."""
    match name := key.partition("=")[0].removeprefix("prompt."):
        case "chat":
            other = PromptOptions(chat="off")
        case "thinking":
            other = replace(options, thinking="on" if options.thinking == "off" else "off")
        case _:
            other = replace(options, **{name: getattr(PromptOptions(), name)})
    shown = [write_prompt(source, make_writer(source, tokenizer, each), task) for each in (options, other)]
    if encode_prompt(shown[0], tokenizer) != encode_prompt(shown[1], tokenizer):
        if _observe(source, shown[0], tokenizer) == _observe(source, shown[1], tokenizer):
            raise ValueError(
                f"{key} has no effect: the episodes of this environment encode their own prompts; leave it out"
            )
    elif name == "thinking":
        raise ValueError(
            f"{key} has no effect: the tokenizer's chat template writes the same prompt with thinking on and off; "
            "leave it out"
        )


def _describe_own_prompts(source: TaskSource, task: Task, tokenizer: Any, options: PromptOptions) -> str:
    """What to say where `chat=auto` changes the prompt of a task, and yet not what an episode shows; else ""."""
    plain = write_prompt(source, make_writer(source, tokenizer, PromptOptions(chat="off")), task)
    shown = write_prompt(source, make_writer(source, tokenizer, options), task)
    try:
        encoded = encode_prompt(shown, tokenizer)
        if encode_prompt(plain, tokenizer) == encoded:
            return ""
        seen = _observe(source, shown, tokenizer)
        if seen in (None, encoded) or seen != _observe(source, plain, tokenizer):
            return ""
    except Exception:  # of a trial beside the run, whose own episodes raise it with their task
        return ""
    is_plain = seen == encode_prompt(plain, tokenizer)
    how = ", as text without the tokenizer's chat template" if is_plain else ""
    return (
        f"prompt.chat=auto has no effect: the episodes of this environment encode their own prompts{how}; use "
        "rlvr.envs.encode_prompt(task, tokenizer) in them for a chat model, or give prompt.chat=off if it is meant so"
    )


def _observe(source: TaskSource, task: Task, tokenizer: Any) -> list[int] | None:
    """The tokens that an episode of the task shows the model first."""
    return run_to_end(_begin(source.env(task, tokenizer)))


async def _begin(env: Env) -> list[int] | None:
    try:
        given = await env.initial_observation()
    finally:
        if isinstance(env, ClosableEnv):
            await env.close()
    return given[0].to_ints() if isinstance(given, tuple) else None
