"""How a task's prompt becomes tokens, and the single-turn episode: show a prompt, take one answer, done.

Text is tokenized as it stands: no special token is added. Chat messages go through the tokenizer's own template.
`apply_chat` decides by `PromptOptions` whether the tasks of a source, whose prompts are text, are shown as chat
messages; everything that encodes a prompt reads `Task.model_prompt`. Verifiers are given the task's own prompt.
`python -m pytest tests/test_env_prompt.py tests/test_prompt_options.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from rlvr.core.futures import run_to_end
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import Env, StepResult, TaskSource
from rlvr.core.types import Task


@dataclass(frozen=True)
class PromptOptions:
    """How the model reads text prompts. `chat`: auto, on or off.

    With `auto` a text prompt becomes one message of the user where the tokenizer has a chat template, and stays as it
    stands elsewhere; `on` needs a template; `off` never uses one for text. Prompts that are chat messages always need
    it. `system` is a system message before every prompt.
    """

    chat: str | bool = "auto"
    system: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.chat, bool):  # YAML reads `on` and `off` as truth values
            object.__setattr__(self, "chat", "on" if self.chat else "off")
        if self.chat not in ("auto", "on", "off"):
            raise ValueError(f"prompt.chat={self.chat!r}, expected auto, on or off")
        if self.system is not None and not self.system.strip():
            raise ValueError(f"prompt.system={self.system!r} has no words; leave it out for no system message")
        if self.system is not None and self.chat == "off":
            raise ValueError(
                "prompt.system needs a chat template, and prompt.chat=off leaves it out; give one of the two"
            )


class ChatSource:
    """A task source whose tasks have `Task.chat`; everything else is that of `source`."""

    def __init__(self, source: TaskSource, system: str | None) -> None:
        self._source, self._system = source, system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def train(self, seed: int, index: int, level: str) -> Task:
        return self._add_chat(self._source.train(seed, index, level))

    def heldout(self, count: int | None) -> list[Task]:
        return [self._add_chat(task) for task in self._source.heldout(count)]

    def extra_heldout(self, count: int) -> dict[str, list[Task]]:
        return {name: [self._add_chat(t) for t in tasks] for name, tasks in self._source.extra_heldout(count).items()}

    def _add_chat(self, task: Task) -> Task:
        messages = self._source.chat_messages(task) if isinstance(task.prompt, str) else task.prompt
        return add_chat(task, messages, self._system)


def add_chat(task: Task, messages: Sequence[dict[str, str]], system: str | None) -> Task:
    """The task, shown as these chat messages after a `system` message (None: without one)."""
    if system is None:
        return replace(task, chat=list(messages))
    if messages[0].get("role") == "system":
        raise ValueError(f"prompt.system: task {task.id!r} has a system message of its own; leave prompt.system out")
    return replace(task, chat=[{"role": "system", "content": system}, *messages])


def has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def apply_chat(source: TaskSource, tokenizer: Any, options: PromptOptions) -> TaskSource:
    """The source as the model will read it, tried on its first task; ValueError where the options cannot be met."""
    is_asked = options.chat == "on" or options.system is not None
    key = "prompt.chat=on" if options.system is None else "prompt.system"
    if not is_asked and (options.chat == "off" or not has_template(tokenizer) or source.group_builder):
        return source
    if not has_template(tokenizer):
        raise ValueError(
            f"{key} needs a chat template, and the tokenizer has none; name an instruction-tuned model's tokenizer "
            f"(model.tokenizer), or leave {key.partition('=')[0]} out"
        )
    if source.group_builder:
        raise ValueError(f"{key} has no effect: the episodes of this environment write their own prompts; leave it out")
    shown, first = ChatSource(source, options.system), (0, 0, source.levels[0])
    text, task = source.train(*first), shown.train(*first)
    _try_template(ChatSource(source, None).train(*first), task, tokenizer, options.system)
    if is_asked and task.model_prompt != text.model_prompt:
        seen = [run_to_end(_observe(source.env(one, tokenizer))) for one in (text, task)]
        if seen[0] == seen[1]:
            raise ValueError(
                f"{key} has no effect: the episodes of this environment encode their own prompts; leave it out"
            )
    return cast(TaskSource, shown)


def _try_template(plain: Task, task: Task, tokenizer: Any, system: str | None) -> None:
    """Render a task without and with the system message; ValueError with the template's own error."""

    def render(one: Task) -> str:
        return str(tokenizer.apply_chat_template(one.chat, add_generation_prompt=True, tokenize=False))

    other = "another tokenizer (model.tokenizer)"
    try:
        render(plain)
    except Exception as error:  # each template raises its own
        remedy = f"use prompt.chat=off or {other}" if isinstance(plain.prompt, str) else f"use {other}"
        raise ValueError(
            f"the tokenizer's chat template cannot render the prompt of task {plain.id!r} ({error}); {remedy}"
        ) from error
    if system is None:
        return
    remedy = f"leave it out and put its words into the prompts, or use {other}"
    try:
        text = render(task)
    except Exception as error:
        raise ValueError(
            f"prompt.system: the tokenizer's chat template takes no system message ({error}); {remedy}"
        ) from error
    if system.strip() not in text:
        raise ValueError(f"prompt.system: the tokenizer's chat template leaves system messages out; {remedy}")


async def _observe(env: Env) -> list[int] | None:
    given = await env.initial_observation()
    return given[0].to_ints() if isinstance(given, tuple) else None


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of texts as they stand, all in one call: a tokenizer's cost is per call, not per word."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def encode_prompt(task: Task, tokenizer: Any) -> list[int]:
    """The token ids of what the model reads: a task's `model_prompt`."""
    tokens: Any
    if isinstance(task.model_prompt, str):
        tokens = _encode_text(tokenizer, task.model_prompt)
    elif not has_template(tokenizer):
        raise ValueError(
            f"task {task.id!r} has chat messages, but the tokenizer has no chat template; "
            "use an instruction-tuned model's tokenizer, set `tokenizer.chat_template`, or give the prompt as text"
        )
    else:
        tokens = tokenizer.apply_chat_template(task.model_prompt, add_generation_prompt=True, tokenize=True)
        tokens = tokens["input_ids"] if isinstance(tokens, Mapping) else tokens
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if tokens and isinstance(tokens[0], list):  # a batch of one
        tokens = tokens[0]
    if not tokens:
        raise ValueError(f"task {task.id!r} has an empty prompt; a model needs at least one token to go on from")
    return [int(token) for token in tokens]


@lru_cache(maxsize=4096)
def _encode_text(tokenizer: Any, text: str) -> list[int]:
    """Every sample of a group opens its own episode: the prompt is tokenized once for all of them."""
    return tokenizer.encode(text, add_special_tokens=False)


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


@lru_cache(maxsize=16)
def special_token_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of a tokenizer's special and added tokens."""
    added = getattr(tokenizer, "get_added_vocab", None)
    return tuple(dict.fromkeys([*getattr(tokenizer, "all_special_tokens", []), *(added() if added else [])]))
