"""The turns of a policy as a tree: a turn goes on from the one whose prompt and completion its own prompt begins with.

Each end of the tree is a branch. A turn that several branches share belongs to the first of them, and is part of the
prompt in the others, so that it is trained once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.core.protocols import ChatTurn
from rlvr.core.types import mean


def find_parent(prompt: Sequence[int], turns: Iterable[tuple[int, Sequence[int], Sequence[int]]]) -> int | None:
    """Of turns (number, prompt, tokens) the one that `prompt` goes on from: the longest, of equal ones the last; None
    where it begins anew."""
    longest_first = sorted(
        ((len(before) + len(tokens), number, before, tokens) for number, before, tokens in turns), reverse=True
    )
    for length, number, before, tokens in longest_first:  # of a history that only grows the first one fits
        read = len(before)
        if prompt[read:length] == tokens and prompt[:read] == before:
            return number
    return None


def split_branches(parents: Sequence[int | None], dropped: Collection[int] = ()) -> list[list[int]]:
    """The turns of each branch, in the order of their last turns, each turn in the first branch that it is in.

    `parents[i]` is the turn that turn i goes on from. Turns in `dropped` are left out unless a turn that is kept goes
    on from them.
    """
    kept: set[int] = set()
    for turn in range(len(parents) - 1, -1, -1):
        if turn in kept or turn not in dropped:
            kept.add(turn)
            if (parent := parents[turn]) is not None:
                kept.add(parent)
    continued = {parents[turn] for turn in kept}
    branches: list[list[int]] = []
    written: set[int] = set()
    for end in sorted(kept - continued):
        branch: list[int] = []
        turn: int | None = end
        while turn is not None and turn not in written:
            branch.insert(0, turn)
            turn = parents[turn]
        written.update(branch)
        branches.append(branch)
    return branches


def list_path(turn: int, parents: Sequence[int | None]) -> list[int]:
    """The turns from the beginning of a history to a turn."""
    path = [turn]
    while (parent := parents[path[0]]) is not None:
        path.insert(0, parent)
    return path


def find_reward(path: Sequence[int], given: Mapping[int, float]) -> float | None:
    """The reward of a branch with the turns `path`, of rewards that were given to turns: that of its latest turn."""
    return next((given[turn] for turn in reversed(path) if turn in given), None)


def share_credit(turns: Sequence[int], paths: Sequence[Sequence[int]], rewards: Sequence[float]) -> list[float]:
    """What each turn is trained with: the mean of the rewards of the branches, with the turns `paths`, that have it."""
    return [mean([reward for path, reward in zip(paths, rewards, strict=True) if turn in path]) for turn in turns]


@dataclass(frozen=True)
class JoinedTurns:
    """Turns of one branch in one row: `prompt` is what the first of them read, `tokens` all that came after it.

    `tokens`, `logprobs` and `mask` are [R]; the mask is 1 where the policy sampled, log-probs are 0 elsewhere.
    `starts[i]` is where turn i begins to speak.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    mask: list[int]
    starts: list[int]


def join_turns(turns: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]]) -> JoinedTurns:
    """Turns (prompt, tokens, log-probs) of which each goes on from the one before, as one row."""
    prompt = list(turns[0][0]) if turns else []
    tokens, logprobs, mask, starts = list[int](), list[float](), list[int](), list[int]()
    for read, sampled, scores in turns:
        observed = read[len(prompt) + len(tokens) :]
        starts.append(len(tokens) + len(observed))
        tokens += [*observed, *sampled]
        logprobs += [*([0.0] * len(observed)), *scores]
        mask += [*([0] * len(observed)), *([1] * len(sampled))]
    return JoinedTurns(prompt, tokens, logprobs, mask, starts)


def join_chat(turns: Sequence[tuple[int, ChatTurn]]) -> list[dict[str, Any]]:
    """The messages of turns (number, chat) of which each goes on from the one before; `turn` is in what was said."""
    if not turns:
        return []
    numbers = {len(chat.read): number for number, chat in turns}
    messages = [*turns[-1][1].read, turns[-1][1].said]
    return [
        {**message, "turn": numbers[place]} if place in numbers else dict(message)
        for place, message in enumerate(messages)
    ]


def find_unused(calls: Sequence[int], prompts: Sequence[Sequence[int]], parents: Sequence[int | None]) -> set[int]:
    """The turns that a program asked for and did not use: of turns with equal prompts (choices of one call, or a call
    that was made again) those that no later turn goes on from; if none does, all but the first choice of the last call.

    `calls[i]` is the number of the call that turn i answered.
    """
    continued, unused, lengths = set(parents), set[int](), Counter(map(len, prompts))
    equal: dict[tuple[int, ...] | int, list[int]] = {}
    for turn, prompt in enumerate(prompts):
        key = tuple(prompt) if lengths[len(prompt)] > 1 else ~turn  # a length of its own is no other's prompt
        equal.setdefault(key, []).append(turn)
    for turns in equal.values():
        used = continued.intersection(turns)
        last_call = calls[turns[-1]]
        unused.update(set(turns) - (used or {next(turn for turn in turns if calls[turn] == last_call)}))
    return unused
