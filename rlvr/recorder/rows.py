"""Rows out of recorded calls: a trajectory for each branch of a rollout, with the tokens that were sampled.

for rollout in read_recording(path).rollouts:
    for trajectory in make_rows(rollout):
        ...                               # train on it: `rlvr.update`, or a client's forward_backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.core.turn_tree import find_parent, find_unused, join_turns, split_branches
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


def list_branches(turns: Sequence[RecordedTurn], *, keep_retried: bool = False) -> list[list[int]]:
    """The turns of each branch, by number. Left out are an answer that the program did not use (`find_unused`), if it
    has no mask that says otherwise and not `keep_retried`, and one with a mask of zeros; unless a turn goes on from
    them."""
    parents = [
        find_parent(turn.call.prompt, ((i, turns[i].call.prompt, turns[i].choice.tokens) for i in range(number)))
        for number, turn in enumerate(turns)
    ]
    calls = [id(turn.call) for turn in turns]
    unused = set[int]() if keep_retried else find_unused(calls, [turn.call.prompt for turn in turns], parents)
    masks = [turn.choice.mask for turn in turns]
    dropped = {number for number, mask in enumerate(masks) if (not any(mask) if mask else number in unused)}
    return split_branches(parents, dropped)


def make_rows(rollout: RecordedRollout, tokenizer: Any = None, *, keep_retried: bool = False) -> list[Trajectory]:
    """The trajectories of a rollout, with its reward; None if none was reported. `tokenizer` gives their texts.

    A row has one temperature: a branch whose calls were sampled at several is a row for each, which trains the turns of
    that one. Rows of which nothing is trained are left out.
    """
    turns = list_turns(rollout)
    rows: list[Trajectory] = []
    for branch in list_branches(turns, keep_retried=keep_retried):
        read = [turns[number] for number in branch]
        temperatures = dict.fromkeys(turn.temperature for turn in read)
        rows += [_make_row(rollout, read, temperature, tokenizer) for temperature in temperatures]
    return [row for row in rows if row.num_action_tokens]


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
