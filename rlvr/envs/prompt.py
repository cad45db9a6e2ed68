"""The single-turn episode: show a prompt, take one answer, done. Scoring happens outside, by rewards.

Text is tokenized as it stands: no special token is added. Chat messages go through the tokenizer's own template.
`python -m pytest tests/test_env_prompt.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rlvr.messages import ModelInput
from rlvr.protocols import StepResult
from rlvr.types import Task


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of texts as they stand, all in one call: a tokenizer's cost is per call, not per word."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def encode_prompt(task: Task, tokenizer: Any) -> list[int]:
    """The token ids of a task's prompt."""
    tokens: Any
    if isinstance(task.prompt, str):
        tokens = _encode_text(tokenizer, task.prompt)
    elif getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"task {task.id!r} has chat messages, but the tokenizer has no chat template; "
            "use an instruction-tuned model's tokenizer, set `tokenizer.chat_template`, or give the prompt as text"
        )
    else:
        tokens = tokenizer.apply_chat_template(task.prompt, add_generation_prompt=True, tokenize=True)
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
    """One episode of one task. The contract is `rlvr.protocols.Env`; a second `step` is a mistake of the caller."""

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
