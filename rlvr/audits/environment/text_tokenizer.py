"""A tokenizer that can write any text, without a model: one token a character, and a chat template with tools.

Episodes are played with it before a model is chosen. Calls of tools are written as Hermes and Qwen write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

CHAT_TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'tool' %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content }}{% endif %}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_END = 0x110000  # behind the last code point


class TextTokenizer:
    """Token ids are code points; `chat_template` None: prompts stay text."""

    eos_token_id: int | None = _END
    eos_token = "<|im_end|>"
    all_special_tokens = ("<|im_start|>", "<|im_end|>")

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        end = "" if skip_special_tokens else self.eos_token
        return "".join(end if int(token) == _END else chr(int(token)) for token in token_ids)

    @cached_property
    def _template(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        assert self.chat_template is not None
        return ImmutableSandboxedEnvironment(trim_blocks=False).from_string(self.chat_template)

    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: bool = True, tools: Any = None, **arguments: Any
    ) -> Any:
        text = self._template.render(messages=messages, tools=tools, **arguments)
        return self.encode(text) if tokenize else text
