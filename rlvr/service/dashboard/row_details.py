"""The page of an answer out of its stored row (`rlvr.training.rollout_rows`) and those around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvr.chat.token_texts import Decode
from rlvr.service.dashboard.answer_reference import reference_of_row
from rlvr.service.dashboard.conversation_view import read_conversation
from rlvr.service.dashboard.dashboard_data import (
    AnswerDetail,
    AnswerRow,
    TokenView,
    one_line,
    verdicts_of,
    visible_text,
)
from rlvr.service.dashboard.run_files import numbers
from rlvr.service.dashboard.token_pieces import MOST, token_pieces


def answer_detail(
    key: str, shown: AnswerRow, episode: Mapping[str, dict[str, Any]], decode: Decode | None, group: Sequence[AnswerRow]
) -> AnswerDetail:
    """The answer with this key, which is `shown` in tables; `episode` has it and the others of its episode by their
    keys, in the order of their file, and `group` the rows of its group."""
    row = episode[key]
    logprobs = numbers(row.get("logprobs"))
    return AnswerDetail(
        row=shown,
        prompt=visible_text(row.get("rendered_prompt") or row.get("prompt")),
        answer=visible_text(row.get("response")),
        verdicts=verdicts_of(row.get("scores")),
        reference=reference_of_row(row),
        tokens=_read_tokens(row, logprobs, decode),
        conversation=read_conversation(key, episode),
        facts={
            "group": shown.group,
            "rollout": visible_text(row.get("rollout_id"), 200),
            "level": one_line(row.get("level")),
            "sampled by": one_line(row.get("policy_fingerprint")),
            "sum of log-probs": f"{sum(logprobs):.3f}" if logprobs else "",
        },
        siblings=[one for one in group if one.key == key or one.key not in episode],
    )


def _read_tokens(row: Mapping[str, Any], logprobs: list[float], decode: Decode | None) -> TokenView:
    ids = numbers(row.get("response_tokens"))
    if not ids:
        return TokenView(note="no tokens are stored with this answer")
    if len(ids) != len(logprobs):
        return TokenView(note="tokens and log-probs do not match, so they are not shown")
    if decode is None:
        return TokenView(note="no tokenizer.json lies beside the weights, so its tokens cannot be decoded")
    note = f"the first {MOST:,} of {len(ids):,} tokens" if len(ids) > MOST else ""
    mask, advantages = numbers(row.get("action_mask")), numbers(row.get("token_advantages"))
    pieces = token_pieces([int(id) for id in ids], logprobs, decode)
    if len(mask) == len(ids):
        pieces = [replace(one, is_sampled=mask[one.place] != 0) for one in pieces]
    if len(advantages) == len(ids):
        pieces = [replace(one, advantage=advantages[one.place]) for one in pieces]
    return TokenView(pieces, note)
