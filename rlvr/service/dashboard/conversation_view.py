"""A stored answer as a conversation, and the answers of one episode as a tree of branches.

The rows are those of `rlvr.training.rollout_rows`. Nothing in them is trusted to have a type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.service.dashboard.dashboard_data import (
    BranchRow,
    ConversationView,
    Message,
    as_list,
    as_mapping,
    finite_number,
    one_line,
    visible_text,
)

MOST = 400  # messages shown
Row = Mapping[str, Any]


def read_conversation(key: str, episode: Mapping[str, Row]) -> ConversationView:
    """The conversation of an answer, and the branches of its episode, whose answers are given by their keys."""
    row = episode[key]
    messages = [as_mapping(one) for one in as_list(row.get("messages"))]
    own = _own_turns(row)
    credits = dict(zip(own, map(finite_number, as_list(row.get("turn_credits"))), strict=False))
    names = _name_calls(messages)
    shown = [_read_message(one, own, credits, names) for one in messages]
    others = [as_list(one.get("messages")) for other, one in episode.items() if other != key]
    shared = max((_count_common(messages, one) for one in others), default=0)
    if 0 < shared < len(shown):
        shown.insert(shared, Message("note", "All above is in other branches, too."))
    if len(shown) > MOST:
        left_out = Message("note", f"{len(shown) - MOST:,} messages are not shown")
        shown = [*shown[: MOST // 2], left_out, *shown[len(shown) - MOST // 2 :]]
    return ConversationView(shown, list_branches(key, episode) if len(episode) > 1 else [])


def list_branches(shown: str, episode: Mapping[str, Row]) -> list[BranchRow]:
    """The branches of an episode, each behind the one that it left; `shown` is the key of one of them."""
    found: list[tuple[list[int], BranchRow]] = []
    for key, row in episode.items():
        path, messages = _list_turns(row), as_list(row.get("messages"))
        parent, shared = None, 0
        for at, (other, _) in enumerate(found):
            if (common := _count_common(path, other)) > shared:
                parent, shared = at, common
        said = as_mapping(messages[-1]) if messages else {}
        text = one_line(said.get("content")) or ", ".join(name for name, _ in _read_calls(said))
        credits = [finite_number(one) for one in as_list(row.get("turn_credits"))]
        reward = credits[-1] if credits else finite_number(row.get("reward"))
        depth = 0 if parent is None else found[parent][1].depth + 1
        branch = BranchRow(key, text or one_line(row.get("response")), len(path), depth, shared, reward, key == shown)
        place = len(found)
        if parent is not None:  # behind those that left the same branch, and theirs
            place = next((n for n in range(parent + 1, len(found)) if found[n][1].depth < depth), len(found))
        found.insert(place, (path, branch))
    return [branch for _, branch in found]


def _count_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _list_turns(row: Row) -> list[int]:
    """The numbers of the policy's turns in a conversation."""
    numbers = [as_mapping(one).get("turn") for one in as_list(row.get("messages"))]
    return [number for number in numbers if isinstance(number, int)]


def _own_turns(row: Row) -> list[int]:
    """Those that this answer trains: the last ones."""
    path, count = _list_turns(row), row.get("turns")
    return path[len(path) - count :] if isinstance(count, int) and 0 < count <= len(path) else []


def _name_calls(messages: Sequence[Row]) -> dict[str, Any]:
    """The tools that were called, by the ids of the calls."""
    calls = [as_mapping(call) for one in messages for call in as_list(one.get("tool_calls"))]
    return {str(call["id"]): as_mapping(call.get("function")).get("name") for call in calls if call.get("id")}


def _read_message(
    given: Row, own: Sequence[int], credits: Mapping[int, float | None], names: Mapping[str, Any]
) -> Message:
    turn = given.get("turn")
    mark = "" if not isinstance(turn, int) else "trained" if turn in own else "shared"
    return Message(
        visible_text(given.get("role"), 40) or "unknown",
        _read_text(given.get("content")),
        visible_text(given.get("name") or names.get(str(given.get("tool_call_id"))), 100),
        _read_calls(given),
        mark,
        credits.get(turn) if isinstance(turn, int) else None,
    )


def _read_text(content: Any) -> str:
    """Text, or the texts of a list of parts."""
    if isinstance(content, list):
        content = "\n".join(str(as_mapping(part).get("text", "")) for part in content)
    return visible_text(content)


def _read_calls(given: Row) -> list[tuple[str, str]]:
    calls = [as_mapping(as_mapping(call).get("function")) for call in as_list(given.get("tool_calls"))]
    return [(visible_text(call.get("name"), 100), _write_arguments(call.get("arguments"))) for call in calls[:100]]


def _write_arguments(arguments: Any) -> str:
    """A line for each argument; words as they are."""
    if isinstance(arguments, dict):
        lines = [f"{k}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items()]
        return visible_text("\n".join(lines))
    if isinstance(arguments, list):
        return visible_text(" ".join(map(str, arguments)))
    return visible_text(arguments if isinstance(arguments, str) else "")
