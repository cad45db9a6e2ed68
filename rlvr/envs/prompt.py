"""What the model reads of a task, and its tokens; the single-turn episode: show a prompt, take one answer, done.

`PromptOptions` are the config's section `prompt`. A `PromptWriter` writes `Task.shown_prompt` by them, for every task
of a run (`rlvr.envs.prompted_source`) and of the service; everything that encodes a prompt reads `Task.model_prompt`.
Text is tokenized as it stands: no special token is added. Chat messages go through the tokenizer's own template
(`rlvr.chat.chat_template`). Verifiers are given the task's own prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from rlvr.chat.chat_template import has_template
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import StepResult, TaskSource
from rlvr.core.types import Task


class UnwritableText(ValueError):
    """A text with words or characters that the tokenizer has no tokens for."""


@dataclass(frozen=True)
class PromptExample:
    """A worked example: a prompt, text or chat messages, and its completion. Both are kept as they are, with spaces."""

    prompt: str | list[dict[str, str]]
    completion: str

    def __post_init__(self) -> None:
        if not (self.prompt and self.completion.strip()):
            raise ValueError(f"prompt.examples: {self.prompt!r} with {self.completion!r}; neither may be empty")

    @property
    def text(self) -> str:
        """The example before a text prompt; ValueError for one of chat messages."""
        if not isinstance(self.prompt, str):
            raise ValueError(
                "prompt.examples: this prompt is text, and an example is chat messages; give the example as text, or "
                "use a tokenizer with a chat template"
            )
        return f"{self.prompt}{self.completion}\n\n"

    @property
    def turns(self) -> list[dict[str, str]]:
        """The example in a chat."""
        return [*build_turns(self.prompt), {"role": "assistant", "content": self.completion}]


@dataclass(frozen=True)
class PromptOptions:
    """How a prompt becomes what the model reads.

    With `chat=auto` a text prompt becomes one message of the user where the tokenizer has a chat template, and stays as
    it stands elsewhere; `on` needs a template; `off` never uses one for text. Prompts that are chat messages always
    need it. `system` is a system message before every prompt. `thinking` is `on`, `off`, or a number of tokens to think
    in, for a template with a switch for it; null leaves it to the template. `template_arguments` are other variables of
    the template: `{reasoning_effort: low}`. `examples` stand before every prompt: a list of {prompt, completion}, or
    how many of the environment's training demonstrations, which are then no tasks of the run.
    """

    chat: str | bool = "auto"
    system: str | None = None
    thinking: str | bool | int | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    examples: int | list[PromptExample] = 0

    def __post_init__(self) -> None:
        for name in ("chat", "thinking"):
            if isinstance(value := getattr(self, name), bool):  # YAML reads `on` and `off` as truth values
                object.__setattr__(self, name, "on" if value else "off")
        if self.chat not in ("auto", "on", "off"):
            raise ValueError(f"prompt.chat={self.chat!r}, expected auto, on or off")
        if self.system is not None and not self.system.strip():
            raise ValueError(f"prompt.system={self.system!r} has no words; leave it out for no system message")
        if self.thinking not in (None, "on", "off") and not (isinstance(self.thinking, int) and self.thinking > 0):
            raise ValueError(f"prompt.thinking={self.thinking!r}, expected on, off, or a number of tokens above 0")
        if isinstance(self.examples, int) and self.examples < 0:
            raise ValueError(f"prompt.examples={self.examples}, expected a number from 0, or a list of examples")
        if self.chat == "off" and self.needs_template:
            raise ValueError(
                f"{self.needs_template[0]} needs a chat template, and prompt.chat=off leaves it out; "
                "give one of the two"
            )

    @property
    def needs_template(self) -> list[str]:
        """What was asked for that only a chat template can do, in the user's words."""
        asked = {
            "prompt.chat=on": self.chat == "on",
            "prompt.system": self.system is not None,
            f"prompt.thinking={self.thinking}": self.thinking is not None,
            "prompt.template_arguments": bool(self.template_arguments),
        }
        return [key for key, is_asked in asked.items() if is_asked]


@dataclass(frozen=True)
class PromptWriter:
    """Writes what the model reads instead of a task's prompt: a chat (`is_chat`), or text after examples.

    `arguments` go to the chat template. `rlvr.envs.prompted_source.make_writer` makes one from `PromptOptions`.
    """

    is_chat: bool = False
    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    examples: Sequence[PromptExample] = ()

    def write(self, task: Task, messages: Sequence[dict[str, str]] | None = None) -> Task:
        """The task with its `shown_prompt`. `messages` is a text prompt as a chat; by default one message of the user.

        In a chat the order is: the system message, the examples as turns of user and assistant, the prompt.
        """
        if isinstance(task.prompt, str) and not self.is_chat:
            before = "".join(example.text for example in self.examples)
            return replace(task, shown_prompt=before + task.prompt) if before else task
        asked = list(messages or build_messages(task.prompt))
        system = [message for message in asked[:1] if message.get("role") == "system"]
        if system and self.system is not None:
            raise ValueError(
                f"prompt.system: task {task.id!r} has a system message of its own; leave prompt.system out"
            )
        if self.system is not None:
            asked.insert(0, {"role": "system", "content": self.system})
            system = asked[:1]
        turns = [turn for example in self.examples for turn in example.turns]
        shown = [*system, *turns, *asked[len(system) :]]
        return replace(task, shown_prompt=shown, template_arguments=dict(self.arguments))

    def __str__(self) -> str:
        how = (
            "as a chat, by the tokenizer's template (prompt.chat=off: text as it stands)" if self.is_chat else "as text"
        )
        given = f", with {', '.join(f'{k}={v}' for k, v in self.arguments.items())}" if self.arguments else ""
        return f"{how}{given}{f', after {len(self.examples)} examples' if self.examples else ''}"


def append_text(task: Task, text: str) -> Task:
    """The task with a text behind its prompt; in a chat, behind the last message."""
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate has no token
    prompt = task.model_prompt
    if not text:
        return task
    if isinstance(prompt, str):
        return replace(task, shown_prompt=prompt + text)
    return replace(task, shown_prompt=[*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{text}"}])


def build_messages(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    """A prompt as chat messages: text is one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def build_turns(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    """A prompt as chat messages, without a system message of its own."""
    return [message for message in build_messages(prompt) if message.get("role") != "system"]


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of texts as they stand, all in one call: a tokenizer's cost is per call, not per word."""
    try:
        return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    except Exception:  # a built vocabulary without a word or character; each library has its own error
        return [list(_encode_text(tokenizer, text)) for text in texts]  # which names the text


def encode_prompt(task: Task, tokenizer: Any) -> list[int]:
    """The token ids of what the model reads: a task's `model_prompt`, and its hint."""
    tokens: Any
    if isinstance(task.model_prompt, str):
        tokens = _encode_text(tokenizer, task.model_prompt)
    elif not has_template(tokenizer):
        raise ValueError(
            f"task {task.id!r} has chat messages, but the tokenizer has no chat template; "
            "use an instruction-tuned model's tokenizer, set `tokenizer.chat_template`, or give the prompt as text"
        )
    else:
        tokens = tokenizer.apply_chat_template(
            task.model_prompt, add_generation_prompt=True, tokenize=True, **task.template_arguments
        )
        tokens = tokens["input_ids"] if isinstance(tokens, Mapping) else tokens
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if tokens and isinstance(tokens[0], list):  # a batch of one
        tokens = tokens[0]
    if not tokens:
        raise ValueError(f"task {task.id!r} has an empty prompt; a model needs at least one token to go on from")
    return [*map(int, tokens), *task.hint]


@lru_cache(maxsize=4096)
def _encode_text(tokenizer: Any, text: str) -> list[int]:
    """Every sample of a group opens its own episode: the prompt is tokenized once for all of them."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:
        raise UnwritableText(
            f"the tokenizer cannot write the text {text[:120]!r} ({error}); a tokenizer built from the environment's "
            "vocabulary has no other words or characters: use a model's tokenizer (model.tokenizer), or other tasks"
        ) from error


class PromptEnv:
    """One episode of one task. The contract is `rlvr.core.protocols.Env`; a second `step` is a mistake of the
    caller."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.task = task
        self._tokenizer = tokenizer
        self._done = False

    async def initial_observation(self) -> tuple[ModelInput, None]:
        """The prompt, and no stop condition of its own: the answer ends at the end-of-sequence token."""
        return ModelInput(encode_prompt(self.task, self._tokenizer)), None

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        assert not self._done, f"the episode of task {self.task.id!r} is over; open a new one"
        self._done = True
        return StepResult(reward=0.0, episode_done=True)


def has_one_prompt(source: TaskSource, tokenizer: Any) -> bool:
    """Whether the episodes of a source are one prompt, read whole, and one completion."""
    task = source.train(0, 0, source.levels[0])
    return not source.group_builder and isinstance(source.env(task, tokenizer), PromptEnv)


def encode_prompts(tasks: Sequence[Task], tokenizer: Any, most: int | None) -> list[list[int]]:
    """The tokens of each task's prompt, of which the model reads the last `most`."""
    plain = [task.model_prompt for task in tasks if isinstance(task.model_prompt, str)]
    prompts = (
        encode_texts(plain, tokenizer) if len(plain) == len(tasks) else [encode_prompt(t, tokenizer) for t in tasks]
    )
    return prompts if most is None else [prompt[-most:] for prompt in prompts]


def encode_examples(
    tasks: Sequence[Task], completions: Sequence[str], tokenizer: Any, most: int | None
) -> list[tuple[list[int], list[int]]]:
    """The tokens of each task's prompt and of its completion, end token included."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = encode_texts(completions, tokenizer)
    return [(p, [*c, *end]) for p, c in zip(encode_prompts(tasks, tokenizer, most), texts, strict=True)]
