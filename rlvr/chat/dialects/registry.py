"""The dialects by their paths."""

from __future__ import annotations

from rlvr.chat.dialects.anthropic_messages import AnthropicMessages
from rlvr.chat.dialects.chat_completions import ChatCompletions
from rlvr.chat.dialects.forms import ApiDialect
from rlvr.chat.dialects.openai_responses import OpenaiResponses

_ALL: tuple[ApiDialect, ...] = (ChatCompletions(), OpenaiResponses(), AnthropicMessages())
DIALECTS: dict[str, ApiDialect] = {dialect.path: dialect for dialect in _ALL}
