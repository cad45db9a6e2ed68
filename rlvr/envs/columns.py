"""Which columns of a row are the prompt and the answer: those the config names, or the usual ones of TRL and verl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlvr.core.types import Task
from rlvr.envs.row_files import FileRow, field_of, find_value

# Where the default names are absent, the first of these that a row has.
PROMPTS = ("prompt", "question", "problem", "messages")
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "completion")
CHAT = "messages"  # a chat whose last message, if the assistant's, is the answer


@dataclass(frozen=True)
class Columns:
    """The columns, dotted where they are nested, of a prompt, its answer (None: no reward needs one) and its level.

    The completion that supervised fine-tuning imitates is in `demonstration`; None: the answer.
    """

    prompt: str = PROMPTS[0]
    answer: str | None = ANSWERS[0]
    level: str | None = None
    demonstration: str | None = None

    def recognise(self, row: Mapping[str, Any]) -> Columns:
        """These columns with each default name that `row` lacks replaced by the usual one that it has."""
        found = self
        if self.prompt == PROMPTS[0]:
            found = replace(found, prompt=next((n for n in PROMPTS if find_value(row, n) is not None), self.prompt))
        if self.answer == ANSWERS[0]:
            usual = next((n for n in ANSWERS if find_value(row, n) is not None), None)
            if usual is None and _is_chat_column(found.prompt) and _split_chat(find_value(row, found.prompt))[1]:
                usual = found.prompt
            found = replace(found, answer=usual or self.answer)
        return found

    def make_task(self, row: FileRow, prefix: str) -> Task:
        """The task of a row. Its meta has the answer as "answer" and every other column under its own name."""
        given = field_of(row.values, self.prompt, row.place, "prompt_field")
        meta = {name: value for name, value in row.values.items() if name != self.prompt}
        if _is_chat_column(self.prompt):
            given, answer = _split_chat(given)
        prompt = _check_prompt(given, row.place, self.prompt)
        if self.answer is not None:
            if self.answer != self.prompt:
                answer = field_of(row.values, self.answer, row.place, "answer_field (null for none)")
            elif not answer:
                raise ValueError(
                    f"{row.place}: {self.prompt!r} does not end with the assistant's message, but the first row's "
                    "does; add the answer, or set env.kwargs.answer_field (null for none)"
                )
            meta["answer"] = _text_of(answer, row.place, self.answer)
        if self.demonstration is not None:
            field_of(row.values, self.demonstration, row.place, "demonstration_field")
        level = "" if self.level is None else str(field_of(row.values, self.level, row.place, "level_field"))
        return Task(prefix + row.id, prompt, meta, level)

    def __str__(self) -> str:
        answer = "no answer" if self.answer is None else f"answer from {self.answer!r}"
        if self.answer == self.prompt:
            answer = "answer from its last message"
        return f"prompt from {self.prompt!r}, {answer}"


def _is_chat_column(name: str) -> bool:
    return name.rpartition(".")[2] == CHAT


def _is_chat(value: Any) -> bool:
    """Whether a value is a list of messages in which every role and content is text."""
    return _has_messages(value) and all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in value)


def _has_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def _split_chat(given: Any) -> tuple[Any, Any]:
    """A chat without the assistant's message at its end, and that message's text; None if it ends otherwise."""
    if _is_chat(given) and len(given) > 1 and given[-1]["role"] == "assistant":
        return given[:-1], given[-1]["content"]
    return given, None


def _text_of(answer: Any, place: str, name: str) -> Any:
    """An answer that is a chat, as TRL's `completion` may be, is the text of its last message."""
    if not _has_messages(answer):
        return answer
    if not isinstance(text := answer[-1]["content"], str):
        raise ValueError(
            f"{place}: the last message of {name!r} has the content {str(text)[:60]!r}, expected text; correct the row"
        )
    return text


def _check_prompt(given: Any, place: str, name: str) -> str | list[dict[str, str]]:
    if (isinstance(given, str) and given) or _is_chat(given):
        return given
    expected = 'expected text or a list of {"role": text, "content": text}'
    if isinstance(given, Mapping) and given:
        inner = ", ".join(f"{name}.{part}" for part in given)
        raise ValueError(
            f"{place}: {name!r} has columns of its own, {expected}; set env.kwargs.prompt_field to one of {inner}"
        )
    raise ValueError(f"{place}: {name!r} is {str(given)[:60]!r}, {expected}")
