"""Prompts that tell the policy more than its task does: the policy that reads them is the teacher of self-distillation.

    prompts = InformedPrompts(tokenizer, reward="math")
    prompts.encode(task, None, "A correct answer: 4", room=64)      # token ids, or None if they do not fit the context

The information stands after the last message of a chat, and before a prompt of text, whose end is where the completion
begins. Texts of completions and verifiers never become special tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from rlvr.chat.special_tokens import special_token_texts, strip_special
from rlvr.chat.turns import decode_turn
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.envs.prompt import encode_prompt, has_one_prompt
from rlvr.reward.feedback import sanitize
from rlvr.reward.references import find_reference_text

CHAT = "{prompt}\n\n{information}\n\nNow solve the problem yourself."
TEXT = "{information}\n\n{prompt}"
_PLACES = re.compile(r"\{(prompt|information)\}")
_THOUGHT_ENDS = "</think>"


@dataclass(frozen=True)
class InformedPrompts:
    """Writes them with `tokenizer`. `reward` names the verifier whose words are feedback; "": all that judged."""

    tokenizer: Any
    reward: str = ""

    def read_completion(self, trajectory: Trajectory) -> str:
        """The text of a completion, without its thoughts."""
        text = trajectory.answer
        if text is None:
            text = decode_turn(trajectory.response_tokens, self.tokenizer)
        return self._clean(text.rpartition(_THOUGHT_ENDS)[2]).strip()

    def read_feedback(self, trajectory: Trajectory) -> str:
        """What verifiers said of a completion that did not pass, a line for each; "" for nothing."""
        scores = trajectory.scores
        judged = [scores[self.reward]] if self.reward in scores else list(scores.values())
        special, lines = special_token_texts(self.tokenizer), list[str]()
        for score in judged:
            if score.outcome in (Outcome.FAILED, Outcome.TIMEOUT):
                reason = score.reason.replace("_", " ").replace("+", ", ") or score.outcome.value
                lines.append(": ".join(filter(None, (sanitize(reason, special), sanitize(score.detail, special)))))
        return "\n".join(lines)

    def read_answer(self, task: Task) -> str:
        """The reference answer of a task, "" if it has none."""
        return (find_reference_text(task.meta) or "").strip()

    def encode(self, task: Task, template: str | None, information: str, room: int) -> list[int] | None:
        """The tokens of the task's prompt with the information; None if the context has no `room` behind them."""
        given = task.model_prompt

        def fill(text: str, default: str) -> str:
            values = {"prompt": text, "information": information}
            return _PLACES.sub(lambda match: values[match[1]], default if template is None else template)

        if isinstance(given, str):
            shown: Any = fill(given, TEXT)
        else:
            shown = [*given[:-1], {**given[-1], "content": fill(given[-1]["content"], CHAT)}]
        tokens = encode_prompt(replace(task, shown_prompt=shown), self.tokenizer)
        context = getattr(self.tokenizer, "model_max_length", None)
        return tokens if context is None or len(tokens) + room <= context else None

    def _clean(self, text: str) -> str:
        return strip_special(text, special_token_texts(self.tokenizer))


def make_informed_prompts(source: TaskSource, tokenizer: Any, reward: str, given: str) -> InformedPrompts:
    """Make the teacher's prompts; ValueError for an environment whose episodes are not one prompt and one completion;
    `given` is the setting."""
    if not has_one_prompt(source, tokenizer):
        raise ValueError(
            f"{given}: the episodes of this environment are not one prompt, read whole, and one completion, so there "
            "is no prompt to which the teacher's information could be added; leave it out"
        )
    return InformedPrompts(tokenizer, reward)
