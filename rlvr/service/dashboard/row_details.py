"""The page of an answer out of its stored row (`rlvr.training.rollout_rows`) and those around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.chat.token_texts import Decode
from rlvr.service.dashboard.answer_reference import reference_of_row
from rlvr.service.dashboard.conversation_view import read_conversation
from rlvr.service.dashboard.dashboard_data import AnswerDetail, TokenView, one_line, verdicts_of, visible_text
from rlvr.service.dashboard.run_files import answer_row, numbers
from rlvr.service.dashboard.token_pieces import MOST, token_pieces


def answer_detail(
    work: str, step: int | None, key: str, around: Mapping[str, dict[str, Any]], decode: Decode | None
) -> AnswerDetail:
    """The answer with this key; `around` has it and its neighbours by their keys, in the order of their file."""
    row = around[key]
    mine = answer_row(work, step, key, row)
    near = [answer_row(work, step, other, around[other]) for other in around if other != key]
    id = row.get("rollout_id")
    episode = {other: one for other, one in around.items() if other == key or (id and one.get("rollout_id") == id)}
    logprobs = numbers(row.get("logprobs"))
    return AnswerDetail(
        row=mine,
        prompt=visible_text(row.get("rendered_prompt") or row.get("prompt")),
        answer=visible_text(row.get("response")),
        verdicts=verdicts_of(row.get("scores")),
        reference=reference_of_row(row),
        tokens=_read_tokens(numbers(row.get("response_tokens")), logprobs, decode),
        conversation=read_conversation(key, episode),
        facts={
            "group": mine.group,
            "rollout": visible_text(id, 200),
            "level": one_line(row.get("level")),
            "sampled by": one_line(row.get("policy_fingerprint")),
            "sum of log-probs": f"{sum(logprobs):.3f}" if logprobs else "",
        },
        siblings=[one for one in near if one.group == mine.group and mine.group and one.key not in episode],
    )


def _read_tokens(ids: list[float], logprobs: list[float], decode: Decode | None) -> TokenView:
    if not ids:
        return TokenView(note="no tokens are stored with this answer")
    if len(ids) != len(logprobs):
        return TokenView(note="tokens and log-probs do not match, so they are not shown")
    if decode is None:
        return TokenView(note="no tokenizer.json lies beside the weights, so its tokens cannot be decoded")
    note = f"the first {MOST:,} of {len(ids):,} tokens" if len(ids) > MOST else ""
    return TokenView(token_pieces([int(id) for id in ids], logprobs, decode), note)
