"""Temporary."""

from rlvr.chat.dialects.chat_completions import ChatCompletions
from rlvr.chat.dialects.forms import Dialect

DIALECTS: dict[str, Dialect] = {d.path: d for d in (ChatCompletions(),)}
