"""Rows out of recorded calls: a trajectory for each branch of a rollout, with the tokens that were sampled.

for rollout in read_recording(path).rollouts:
    for trajectory in make_rows(rollout):
        ...                               # train on it: `rlvr.update`, or a client's forward_backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.chat.dialects.forms import ChatRequest
from rlvr.chat.dialects.registry import DIALECTS
from rlvr.core.protocols import ChatTurn
from rlvr.core.turn_tree import (
    find_parent,
    find_reward,
    find_unused,
    join_chat,
    join_turns,
    list_path,
    share_credit,
    split_branches,
)
from rlvr.core.types import StopReason, Trajectory
from rlvr.recorder.recording import RecordedCall, RecordedChoice, RecordedRollout


@dataclass(frozen=True)
class RecordedTurn:
    """One sampled completion of a call."""

    call: RecordedCall
    choice: RecordedChoice

    @property
    def temperature(self) -> float:
        return self.call.settings.get("temperature", 1.0)


def list_turns(rollout: RecordedRollout) -> list[RecordedTurn]:
    return [RecordedTurn(call, choice) for call in rollout.calls for choice in call.choices]


def find_parents(turns: Sequence[RecordedTurn]) -> list[int | None]:
    """The turn that each turn goes on from."""
    return [
        find_parent(turn.call.prompt, ((i, turns[i].call.prompt, turns[i].choice.tokens) for i in range(number)))
        for number, turn in enumerate(turns)
    ]


def list_branches(turns: Sequence[RecordedTurn], *, keep_retried: bool = False) -> list[list[int]]:
    """The turns of each branch, by number. Left out are an answer that the program did not use (`find_unused`), if it
    has no mask that says otherwise and not `keep_retried`, and one with a mask of zeros; unless a turn goes on from
    them."""
    parents = find_parents(turns)
    calls = [id(turn.call) for turn in turns]
    unused = set[int]() if keep_retried else find_unused(calls, [turn.call.prompt for turn in turns], parents)
    masks = [turn.choice.mask for turn in turns]
    dropped = {number for number, mask in enumerate(masks) if (not any(mask) if mask else number in unused)}
    return split_branches(parents, dropped)


def make_rows(rollout: RecordedRollout, tokenizer: Any = None, *, keep_retried: bool = False) -> list[Trajectory]:
    """The trajectories of a rollout, with its reward; None if none was reported. `tokenizer` gives their texts.

    A row has one temperature: a branch whose calls were sampled at several is a row for each, which trains the turns of
    that one. Rows of which nothing is trained are left out. Where branches have rewards of their own, the others have
    that of the rollout; where it has none, they train nothing, the turns that they share with a later branch included.
    """
    turns = list_turns(rollout)
    branches = list_branches(turns, keep_retried=keep_retried)
    rows: list[tuple[Sequence[int], Trajectory]] = []
    for branch in branches:
        of_branch = [turns[number] for number in branch]
        for temperature in dict.fromkeys(turn.temperature for turn in of_branch):
            rows.append((branch, _make_row(rollout, of_branch, temperature, tokenizer)))
    if rollout.call_rewards:
        _add_credits(rollout, turns, branches, rows)
    read, parents = read_messages(rollout), find_parents(turns)
    for branch, row in rows:
        path = [number for number in list_path(branch[-1], parents) if turns[number].call.id in read]
        row.messages = join_chat(
            [(number, ChatTurn(read[turns[number].call.id], turns[number].choice.message)) for number in path]
        )
    return [row for _, row in rows if row.num_action_tokens]


def read_messages(rollout: RecordedRollout) -> dict[str, list[dict[str, Any]]]:
    """The messages that each call gave the policy, by its id, where its request is of a dialect that is known."""
    read: dict[str, ChatRequest] = {}
    for call in rollout.calls:
        dialect = next((one for one in DIALECTS.values() if one.name == call.dialect), None)
        try:
            request = dialect.read(call.request) if dialect else None
        except ValueError:
            continue
        before = read.get(request.previous or "") if request else None
        if request and request.previous and before:
            message = next(one for one in rollout.calls if one.id == request.previous).choices[0].message
            request = request.continue_from(before, message)
        if request:
            read[call.id] = request
    return {id: request.messages for id, request in read.items()}


def _add_credits(
    rollout: RecordedRollout,
    turns: Sequence[RecordedTurn],
    branches: Sequence[Sequence[int]],
    rows: Sequence[tuple[Sequence[int], Trajectory]],
) -> None:
    """Give each row, of a branch, what was reported for the branches that its turns are in."""
    parents, by_call = find_parents(turns), rollout.call_rewards
    given = {number: by_call[turn.call.id] for number, turn in enumerate(turns) if turn.call.id in by_call}
    paths = [list_path(branch[-1], parents) for branch in branches]
    rewards = [rollout.reward if (own := find_reward(path, given)) is None else own for path in paths]
    known = [(path, reward) for path, reward in zip(paths, rewards, strict=True) if reward is not None]
    by_end = {branch[-1]: reward for branch, reward in zip(branches, rewards, strict=True)}
    for branch, row in rows:
        if (reward := by_end[branch[-1]]) is not None:
            row.reward = reward if rollout.reward is None else rollout.reward
            row.turn_credits = share_credit(branch, *map(list, zip(*known, strict=True)))


def _make_row(
    rollout: RecordedRollout, turns: Sequence[RecordedTurn], temperature: float, tokenizer: Any
) -> Trajectory:
    row = join_turns([(turn.call.prompt, turn.choice.tokens, turn.choice.logprobs) for turn in turns])
    last = turns[-1]
    for turn, start in zip(turns, row.starts, strict=True):
        is_other = turn.temperature != temperature
        for place, is_trained in enumerate(turn.choice.mask or [1] * len(turn.choice.tokens), start):
            if is_other or not is_trained:
                row.mask[place], row.logprobs[place] = 0, 0.0
    return Trajectory(
        prompt="" if tokenizer is None else tokenizer.decode(row.prompt, skip_special_tokens=False),
        prompt_tokens=row.prompt,
        response="" if tokenizer is None else tokenizer.decode(row.tokens, skip_special_tokens=False),
        answer=str(last.choice.message.get("content") or ""),
        response_tokens=row.tokens,
        logprobs=row.logprobs,
        action_mask=row.mask,
        reward=rollout.reward,
        group_id=rollout.group or rollout.id,
        rollout_id=rollout.id,
        stop_reason=StopReason.LENGTH if last.choice.finish == "length" else StopReason.STOP,
        temperature=temperature,
        policy_fingerprint="+".join(dict.fromkeys(turn.call.policy for turn in turns)),
        turn_starts=row.starts,
    )
