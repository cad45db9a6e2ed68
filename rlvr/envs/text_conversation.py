"""What a policy reads in an episode of text: its prompt, and after each of its turns what the environment answers.

History is never written anew: the policy's own tokens stay, and an answer is appended to them.
"""

from __future__ import annotations

from typing import Any

from rlvr.chat.special_tokens import special_token_texts, strip_special
from rlvr.chat.turns import decode_turn, encode_between, has_room, render_between
from rlvr.core.protocols import ChatTurn
from rlvr.core.types import Task
from rlvr.envs.prompt import append_text, build_messages, encode_prompt


class TextConversation:
    """The conversation of one episode, or of one role in it. `tokens` is all that was read and said so far."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.task, self.tokens = task, list[int]()
        self._tokenizer, self._special = tokenizer, special_token_texts(tokenizer)
        self._messages: list[dict[str, Any]] = []
        self._action: list[int] = []  # the last turn, which the next answer follows

    def begin(self, text: str) -> list[int]:
        """The first prompt: that of the task, and a text behind it. Empty if there is nothing to read."""
        self.task = append_text(self.task, self._clean(text))
        self._messages = build_messages(self.task.model_prompt)
        self.tokens = encode_prompt(self.task, self._tokenizer)
        return self.tokens

    def say(self, action: list[int]) -> str:
        """The text of a turn of the policy, which is part of the conversation from now on."""
        said = decode_turn(action, self._tokenizer)
        self._messages = [*self._messages, {"role": "assistant", "content": said}]
        self._action = list(action)
        return said

    def answer(self, text: str) -> list[int] | None:
        """The next prompt, after what the environment answers to the last turn; None if the context has no room for
        another turn as long as that one. An environment's text is data: none of it becomes a special token."""
        text = self._clean(text).encode("utf-8", "replace").decode()
        message = {"role": "user", "content": text}
        self._messages = [*self._messages, message]
        if not isinstance(self.task.model_prompt, str):
            text = render_between(self.task, self._tokenizer, self._action, [message])
        self.tokens = [*self.tokens, *self._action, *encode_between(self.task, self._tokenizer, text)]
        return self.tokens if has_room(self._tokenizer, self.tokens, self._action) else None

    @property
    def last_turn(self) -> ChatTurn:
        """The policy's last turn, as people read it."""
        return ChatTurn(self._messages[:-1], self._messages[-1])

    def _clean(self, text: str) -> str:
        return strip_special(text, self._special)
