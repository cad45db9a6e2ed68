"""Conversations to imitate as a task source: JSON lines of `{"messages": [{"role": ..., "content": ...}, ...]}`.

The last message of each is the assistant's, and is what is learned; the others are its prompt, rendered as the model
would be asked. Left out on purpose: a loss on earlier turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlvr.compat.model_info import get_recommended_renderer_name, get_tokenizer
from rlvr.compat.renderers import get_renderer
from rlvr.core.types import Task
from rlvr.envs.row_files import field_of, read_rows
from rlvr.envs.row_source import RowSource, choose_heldout


def conversations(data: str | None = None, model_name: str = "", heldout_fraction: float = 0.1) -> RowSource:
    """The task source; a share of the prompts, chosen by their hash, is held out."""
    if data is None:
        raise ValueError('sl_basic: give data=<file>, JSON lines of {"messages": [{"role": ..., "content": ...}]}')
    templated = get_recommended_renderer_name(model_name) == "chat_template"
    renderer = None if templated else get_renderer("role_colon", get_tokenizer(model_name))
    tasks = list(_tasks(data, renderer))
    lead = "" if templated else " "
    return RowSource(data, tasks, choose_heldout(tasks, heldout_fraction, data), "exact_match", "answer", lead)


def _tasks(data: str, renderer: Any) -> Iterator[Task]:
    for where, _, row in read_rows(data):
        messages = field_of(row, "messages", where, "data=<a file of conversations>")
        fine = isinstance(messages, list) and all(
            isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
        )
        if not fine or len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise ValueError(f"{where}: 'messages' must be a question, at least, and end with the assistant's answer")
        # As text where the model has no template: it is then tokenized as it stands.
        prompt = messages[:-1] if renderer is None else renderer.text(messages[:-1])
        yield Task(where, prompt, {"answer": str(messages[-1]["content"])})
