"""Conversations as tokens and answers as messages: what the cookbook's loops call a renderer.

    renderer = get_renderer(get_recommended_renderer_name(model), tokenizer)  # `rlvr.compat.model_info`
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "2 + 2?"}])
    message, ended = renderer.parse_response(tokens)      # {"role": "assistant", "content": "4"}, how it ended

Two of our own: `chat_template` renders with the tokenizer's template, `role_colon` is the plain `User: ... Assistant:`
of base models. `cookbook:<name>` is one of `tinker_cookbook`, where it is installed. Left out on purpose: tools,
images, and a split of an answer into thoughts and text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from rlvr.core.messages import ModelInput

Message = dict[str, Any]
NAMES = ("chat_template", "role_colon")
_ROLE_STOP = "\n\nUser:"
_MARK = "The answer goes here."


class Termination(str, Enum):
    """How an answer ended; true in a condition if the answer ended by itself."""

    STOP_SEQUENCE = "stop_sequence"  # the turn was ended as the renderer ends one
    EOS = "eos"  # the text was ended, not the turn
    MALFORMED = "malformed"  # it was cut off, or went on after its end

    @property
    def is_stop_sequence(self) -> bool:
        return self is Termination.STOP_SEQUENCE

    @property
    def is_clean(self) -> bool:
        return self is not Termination.MALFORMED

    def __bool__(self) -> bool:
        return self.is_clean


def get_renderer(name: str, tokenizer: Any) -> Any:
    """A renderer by name, over a tokenizer of `transformers`."""
    if name.startswith("cookbook:"):
        try:
            from tinker_cookbook.renderers import get_renderer as theirs
        except ModuleNotFoundError as error:
            raise ValueError(
                f"renderer {name!r}: {error.name} is not installed: pip install tinker-cookbook"
            ) from error
        return theirs(name.removeprefix("cookbook:"), tokenizer)
    if name not in NAMES:
        raise ValueError(
            f"renderer {name!r}: expected {' or '.join(NAMES)}, or cookbook:<name> for one of the installed cookbook"
        )
    if name == "chat_template" and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("renderer 'chat_template': this tokenizer has no chat template; use role_colon, or set one")
    return Renderer(name, tokenizer)


def get_text_content(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content is text or a list of parts; thoughts are no part of it."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p.get("type") == "text")


@dataclass(frozen=True)
class Renderer:
    """Renders conversations as tokens. `name` is one of `NAMES`. An answer is rendered as it would be sampled: prompt,
    content, end of turn."""

    name: str
    tokenizer: Any

    def build_generation_prompt(
        self, messages: Sequence[Message], role: str = "assistant", prefill: str | None = None
    ) -> ModelInput:
        """The conversation up to the turn of `role`, with `prefill` as the beginning of that turn."""
        if self.name == "role_colon":
            tokens = self._bos + [t for m in messages for t in self._encode_message(m)] + self._encode(_header(role))
        elif role != "assistant":
            raise ValueError(f"renderer 'chat_template': role={role!r}; a chat template asks for an assistant's turn")
        else:
            given: Any = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True)
            tokens = list(given["input_ids"] if isinstance(given, Mapping) else given)
        return ModelInput(tokens + (self._encode(prefill) if prefill else []))

    def text(self, messages: Sequence[Message]) -> str:
        """The prompt as text, without a begin token: what `build_generation_prompt` encodes."""
        if self.name == "role_colon":
            turns = [f"{_header(m['role'])} {get_text_content(m)}\n\n" for m in messages]
            return "".join(turns) + _header("assistant")
        return str(self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))

    def get_stop_sequences(self) -> list[str] | list[int]:
        """What ends a turn or the whole text: strings, or token ids."""
        eos = self.tokenizer.eos_token_id
        if self.name == "role_colon":  # strings all, because a list of both kinds has no place in the protocol
            return [_ROLE_STOP] if eos is None else [_ROLE_STOP, str(self.tokenizer.eos_token)]
        ends = [self._end_token, eos]
        return [end for i, end in enumerate(ends) if end is not None and end not in ends[:i]]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        """The answer as a message, without what ended it, and how it ended."""
        tokens, eos = list(response), self.tokenizer.eos_token_id
        if self.name == "role_colon":
            ended = Termination.EOS if eos is not None and tokens[-1:] == [eos] else Termination.MALFORMED
            text = self._decode(tokens[:-1] if ended else tokens)
            text, *rest = text.split(_ROLE_STOP)
            if rest:  # once, at the very end
                ended = Termination.STOP_SEQUENCE if len(rest) == 1 and not ended else Termination.MALFORMED
            return _answer(text.removeprefix(" ").removesuffix("\n\n")), ended
        ends = [i for i, token in enumerate(tokens) if token in self.get_stop_sequences()]
        if not ends:
            return _answer(self._decode(tokens)), Termination.MALFORMED
        turn = self._end_token is None or tokens[ends[0]] == self._end_token
        ended = Termination.STOP_SEQUENCE if turn else Termination.EOS
        return _answer(self._decode(tokens[: ends[0]])), ended if ends[0] == len(tokens) - 1 else Termination.MALFORMED

    def build_supervised_example(self, messages: Sequence[Message]) -> tuple[ModelInput, np.ndarray]:
        """The tokens [T] of a conversation that ends with an assistant's message, and weights [T]: 1 on that message.

        `T` counts the end of turn too. A row of training is `tokens[:-1]`, with `tokens[1:]` and `weights[1:]`.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError("build_supervised_example: the last message must be the assistant's, the one to imitate")
        prompt = self.build_generation_prompt(messages[:-1]).to_ints()
        text = get_text_content(messages[-1])
        if self.name == "role_colon":
            completion = self._encode(f" {text}\n\n") + self._encode(_ROLE_STOP.strip())
        else:
            end = self._end_token if self._end_token is not None else self.tokenizer.eos_token_id
            completion = self._encode(text) + ([] if end is None else [end])
        weights_T = np.array([0.0] * len(prompt) + [1.0] * len(completion), dtype=np.float32)
        return ModelInput(prompt + completion), weights_T

    @cached_property
    def _end_token(self) -> int | None:
        """The special token that a chat template puts behind an assistant's message, if it does."""
        turn = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _MARK}]
        text = str(self.tokenizer.apply_chat_template(turn, tokenize=False))
        after = self._encode(text.rpartition(_MARK)[2].lstrip())
        special = {*self.tokenizer.all_special_ids, *getattr(self.tokenizer, "added_tokens_decoder", {})}
        return after[0] if after and after[0] in special else None

    @property
    def _bos(self) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def _encode_message(self, message: Message) -> list[int]:
        return self._encode(_header(message["role"])) + self._encode(f" {get_text_content(message)}\n\n")

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


def _header(role: str) -> str:
    return f"{role.capitalize()}:"


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}
