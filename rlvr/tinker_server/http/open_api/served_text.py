"""Text of the open endpoints: a model's tokenizer for many threads, and completions as text while they are sampled."""

from __future__ import annotations

import copy
import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlvr.chat.call_parts import TemplateCallFormat
from rlvr.chat.conversation import ChatTemplate, TemplateError
from rlvr.chat.dialects.forms import ChatRequest, Json
from rlvr.tinker_server.protocol.errors import UserError

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for the first bytes of a character


class ServedText:
    """Copies of a tokenizer, one call at a time: the engine's thread uses the original, and encoding changes it.

    Decoding has a copy of its own, so that an answer never waits for a long text to be encoded. With `context`, the
    tokens of the model's, a text that must be longer by its characters is refused before it is encoded.
    """

    def __init__(self, tokenizer: Any, context: int | None = None) -> None:
        self._tokenizer, self.lock = copy.deepcopy(tokenizer), threading.Lock()
        self.template = ChatTemplate(self._tokenizer)
        self._decoder, self._decoder_lock = copy.deepcopy(tokenizer), threading.Lock()
        self._context = context
        self._texts: dict[int, str] = {}  # of single tokens: at most the vocabulary

    @cached_property
    def max_chars(self) -> float:
        """The characters of the longest text that fits the context: of its longest token, with a blank, in each
        place."""
        longest = max(map(len, self._tokenizer.get_vocab()))
        return math.inf if self._context is None else self._context * (longest + 1)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text prompt, with the tokenizer's own begin token; UserError for a text it cannot encode."""
        self._check_length("prompt", text)
        with self.lock:
            try:
                return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=True)]
            except Exception as error:  # each library raises its own error for a word outside a fixed vocabulary
                raise UserError(f"prompt: this model's tokenizer cannot encode it ({error!s:.200})") from error

    def _check_length(self, field: str, text: str) -> None:
        if len(text) > self.max_chars:
            raise UserError(
                f"{field}: {len(text):,} characters are more than the model's context of {self._context:,} tokens can "
                f"hold (at most {self.max_chars:,}); shorten the text"
            )

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        with self._decoder_lock:
            return str(self._decoder.decode(list(tokens), skip_special_tokens=skip_special))

    def token_text(self, token: int) -> str:
        """One token as text, decoded once. A part of a character reads as the replacement character."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token], skip_special=False)
        return text

    def render(
        self, messages: Sequence[Json], tools: Sequence[Json], arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens of a conversation, up to where the assistant speaks. UserError for what the template refuses."""
        if not self.template.has_own:
            raise UserError("messages: this model's tokenizer has no chat template; send a prompt to /v1/completions")
        if tools:
            _ = self.tool_calls
        try:
            template = self.template.with_arguments(arguments) if arguments else self.template
            with self.lock:
                cleaned = [template.clean(message) for message in messages]
                written = template.render(cleaned, template.clean_tools(tools))
            self._check_length("messages", written)
            with self.lock:
                return template.encode_text(written)
        except TemplateError as error:
            raise UserError(str(error)) from error

    def read_message(self, said: str, call: ChatRequest, skip_special: bool) -> Json:
        """The assistant's message that a decoded answer is. With tools it has its special tokens, since many forms of
        calls are made of them; then those of the rest are left out if `skip_special`."""
        if call.tools:
            _ = self.tool_calls
        keeps_special = not (call.tools and skip_special)
        return self.template.read_text(said, call, lambda number: f"c{secrets.token_hex(4)}", keeps_special)

    @property
    def tool_calls(self) -> TemplateCallFormat:
        """How the chat template writes calls of tools; UserError if it has no tools, or a form that is not known."""
        try:
            with self.lock:
                return self.template.tool_calls
        except TemplateError as error:
            raise UserError(str(error)) from error


@dataclass
class TextStream:
    """Turns tokens into text as they come. A piece is given out once no later token can change it.

    Concatenated, the pieces are `cut_stops` of the decoded completion. Text that may be the beginning of a stop waits;
    after one nothing follows.
    """

    text: ServedText
    stops: Sequence[str] = ()
    skip_special: bool = True
    is_stopped: bool = False
    _tokens: list[int] = field(default_factory=list[int])
    _decoded: int = 0  # tokens whose text is in `_waiting` or was given out
    _context: int = 0  # the first token that is decoded with the next ones: some tokenizers join pieces by context
    _waiting: str = ""

    def add(self, token: int) -> str:
        self._tokens.append(token)
        before = self.text.decode(self._tokens[self._context : self._decoded], skip_special=self.skip_special)
        after = self.text.decode(self._tokens[self._context :], skip_special=self.skip_special)
        if after.endswith(_UNFINISHED) or not after.startswith(before):
            return ""
        self._waiting += after[len(before) :]
        self._context, self._decoded = self._decoded, len(self._tokens)
        return self._release(keep=self._held_back())

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        before = self.text.decode(self._tokens[self._context : self._decoded], skip_special=self.skip_special)
        after = self.text.decode(self._tokens[self._context :], skip_special=self.skip_special)
        self._waiting += after.removeprefix(before)
        return self._release(keep=0)

    def _held_back(self) -> int:
        """The characters at the end of what waits that may begin a stop."""
        return max(
            (
                size
                for stop in self.stops
                for size in range(1, min(len(stop), len(self._waiting) + 1))
                if self._waiting.endswith(stop[:size])
            ),
            default=0,
        )

    def _release(self, keep: int) -> str:
        if self.is_stopped:
            return ""
        cut = cut_stops(self._waiting, self.stops)
        self.is_stopped = len(cut) < len(self._waiting)
        piece = cut if self.is_stopped else cut[: len(cut) - keep]
        self._waiting = self._waiting[len(piece) :]
        return piece


def cut_stops(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings that it holds."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
