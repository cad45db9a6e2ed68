"""Rollouts: plays episodes of environments against a sampler and makes trajectories.

All episodes of a call move in lockstep, one turn at a time: every observation of a turn is submitted before the first
completion is read. So the engine sees the same batches whatever the environments' timing, and a resumed step repeats to
the bit. The first turn of a group whose observations are equal is one `sample` call: the prompt is computed once.
`play_group` is the same for groups that need not wait for each other: it awaits answers, so many share a thread.

Also exports `Trajectory` and `TrajectoryBatch`, which users import from here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlvr.core import rng
from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.futures import Future, as_completed, read_async, read_blocking, run_to_end
from rlvr.core.messages import ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.protocols import (
    ChatTurn,
    ClosableEnv,
    Env,
    ExternalEnv,
    InitialObservationOverflow,
    SamplingClient,
    SlottedEnv,
    TaskSource,
)
from rlvr.core.turn_tree import find_parent, find_reward, join_chat, join_turns, list_path, split_branches
from rlvr.core.types import Branch, Outcome, Score, StopReason, Task, Trajectory, TrajectoryBatch
from rlvr.core.verdict_reasons import EPISODE_FAILED
from rlvr.reward.environment import NAME as ENVIRONMENT
from rlvr.rollout.scoring import score

__all__ = ["Group", "Trajectory", "TrajectoryBatch", "open_groups", "play_group", "rollout", "score"]


class GroupBuilder(Protocol):
    """What makes the episodes of a task that share something, and may reward them as a group.

    A task source that has `group_builder(task, tokenizer, size)` is asked for one a group. `compute_group_rewards`
    gets one trajectory an episode, its last, and gives (reward, metrics) for each. `cleanup` is always called.
    """

    async def make_envs(self) -> Sequence[Env]: ...

    async def compute_group_rewards(
        self, trajectories: list[Trajectory], envs: Sequence[Env]
    ) -> list[tuple[float, dict[str, float]]]: ...

    async def cleanup(self) -> None: ...


@dataclass
class Group:
    """The episodes of one task. `envs` are fresh episodes of one task, or `builder` makes them; their rollouts are
    compared with each other."""

    id: str
    task: Task
    envs: list[Env]
    builder: GroupBuilder | None = None


@dataclass
class _Turn:
    """One completion of the policy, and the tokens that it read: the turns of an episode are a tree.

    `parent` is the turn whose prompt and completion its prompt goes on from; None at the beginning of a history.
    """

    prompt: list[int]
    answer: SampledSequence
    end_tokens: int  # how many of its last tokens only end the completion
    parent: int | None
    reward: float = 0.0
    report: dict[str, float] = field(default_factory=dict[str, float])
    reward_so_far: float = 0.0  # of the episode, with this turn
    metrics_so_far: dict[str, float] = field(default_factory=dict[str, float])
    chat: ChatTurn | None = None
    role: str = ""


@dataclass
class _Episode:
    """One running episode: what the policy sees now, and the turns that it has taken."""

    group: Group
    index: int
    env: Env
    stop: Any
    observation: list[int]
    turns: list[_Turn] = field(default_factory=list[_Turn])
    fingerprints: list[str] = field(default_factory=list[str])
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    answer: str | None = None
    error: str = ""
    done: bool = False
    reads: Counter[str] = field(default_factory=Counter[str])  # how often each call came, if they are parallel
    written: list[Trajectory] | None = None

    @property
    def is_parallel(self) -> bool:
        return isinstance(self.env, ExternalEnv) and self.env.is_parallel

    @property
    def role(self) -> str:
        return self.env.role if isinstance(self.env, ExternalEnv) else ""

    @property
    def player(self) -> SamplingClient | None:
        """Who takes the next turn; None: the policy."""
        return self.env.player if isinstance(self.env, ExternalEnv) else None

    def make_turn_key(self, turn: int) -> tuple[int | str, ...]:
        """The next turn's own part of its random key: its number, or for parallel calls a hash of what it reads and how
        often that was read before."""
        if not self.is_parallel:
            return (turn,)
        call = repr((self.observation, self.stop, _turn_limit(self))).encode()
        content = hashlib.blake2b(call, digest_size=16).hexdigest()
        self.reads[content] += 1
        return content, self.reads[content]

    @property
    def trajectories(self) -> list[Trajectory]:
        assert self.written is not None
        return self.written

    def find_parent(self) -> int | None:
        """The turn that the observation goes on from, by its tokens: the last one, or in an external episode any of
        those of the same role, of which the longest counts."""
        first = 0 if isinstance(self.env, ExternalEnv) else max(0, len(self.turns) - 1)
        known = [(place, turn) for place, turn in enumerate(self.turns[first:], first) if turn.role == self.role]
        return find_parent(self.observation, ((place, turn.prompt, turn.answer.tokens) for place, turn in known))


def open_groups(source: TaskSource, tasks: Sequence[Task], group_size: int, tokenizer: Any, prefix: str) -> list[Group]:
    """One group of `group_size` fresh episodes per task, with ids `prefix/0`, `prefix/1`, ..."""
    return [open_group(source, task, group_size, tokenizer, f"{prefix}/{i}") for i, task in enumerate(tasks)]


def open_group(source: TaskSource, task: Task, size: int, tokenizer: Any, id: str) -> Group:
    if source.group_builder:
        return Group(id, task, [], source.group_builder(task, tokenizer, size))
    return Group(id, task, [source.env(task, tokenizer) for _ in range(size)])


def rollout(
    groups: Sequence[Group],
    sampler: SamplingClient,
    params: SamplingParams,
    *,
    seed: int,
    version: int = 0,
    max_prompt_tokens: int | None = None,
    on_group_end: Callable[[list[Trajectory]], None] | None = None,
) -> list[Trajectory]:
    """Play every episode to its end; trajectories in the order of groups and samples.

    `seed` names the purpose (run, phase, step): the draws of a completion depend on it, the group's id, the sample's
    index and the turn (its number, or of parallel calls what it reads), on nothing else. `version` is recorded as
    `policy_version`. A first observation of more than `max_prompt_tokens` is a ValueError that names the task.
    `on_group_end` gets the trajectories of a group as soon as its last episode ends, while those of other groups go on;
    groups whose builder rewards them come only with the rest.
    """
    return run_to_end(_rollout(groups, sampler, params, seed, version, max_prompt_tokens, read_blocking, on_group_end))


async def play_group(
    group: Group,
    sampler: SamplingClient,
    params: SamplingParams,
    *,
    seed: int,
    version: int,
    max_prompt_tokens: int | None = None,
) -> list[Trajectory]:
    """One group of episodes, as `rollout` plays it, for an event loop that plays others meanwhile."""
    return await _rollout([group], sampler, params, seed, version, max_prompt_tokens, read_async)


async def _rollout(
    groups: Sequence[Group],
    sampler: SamplingClient,
    params: SamplingParams,
    seed: int,
    version: int,
    max_prompt_tokens: int | None,
    read: Callable[[Future[SampleResponse]], Awaitable[SampleResponse]],
    on_group_end: Callable[[list[Trajectory]], None] | None = None,
) -> list[Trajectory]:
    tokenizer = sampler.get_tokenizer()

    def close(episode: _Episode) -> None:
        if episode.written is None:
            episode.written = [
                replace(t, policy_version=version) for t in write_trajectories(episode, tokenizer, params)
            ]

    def finish_group(played: list[_Episode]) -> None:
        """Hand on a group whose last episodes were played, perhaps after others of an earlier wave."""
        group = played[0].group
        played = [e for e in episodes if e.group is group] + played
        if on_group_end is None or group.builder is not None or len(played) < len(group.envs):
            return
        if all(e.done and e.written is None for e in played):
            for episode in played:
                close(episode)
            on_group_end([t for episode in played for t in episode.trajectories])

    episodes: list[_Episode] = []
    try:
        for group in groups:
            if group.builder is not None:
                group.envs = list(await group.builder.make_envs())
        for slots, wave in _split_waves(groups):
            count = sum(len(places) for _, places in wave)
            if slots is not None:
                await slots.take(count)
            try:
                episodes += await _episodes(
                    wave, sampler, params, seed, max_prompt_tokens, read, on_group_end and finish_group
                )
            finally:
                if slots is not None:
                    slots.give_back(count)
        for episode in episodes:
            close(episode)
        played = [(e, e.trajectories[-1]) for e in episodes]
        for group in groups:
            if group.builder is not None:
                await _reward_group(group.builder, group, [(e, last) for e, last in played if e.group is group])
    finally:
        for group in groups:
            if group.builder is not None:
                await group.builder.cleanup()
            for env in group.envs:
                if isinstance(env, ClosableEnv):
                    await env.close()
    return [t for episode in episodes for t in episode.trajectories]


_Wave = list[tuple[Group, range]]  # which episodes of which groups are played at the same time


def _split_waves(groups: Sequence[Group]) -> list[tuple[EpisodeSlots | None, _Wave]]:
    """All episodes in one wave, unless they need slots: then as many as there are."""
    waves: list[tuple[EpisodeSlots | None, _Wave]] = []
    room = 0
    for group in groups:
        slots = next((env.slots for env in group.envs if isinstance(env, SlottedEnv)), None)
        most = len(group.envs) if slots is None else slots.most
        for first in range(0, len(group.envs), most or 1):
            places = range(first, min(first + most, len(group.envs)))
            if not waves or waves[-1][0] is not slots or (slots is not None and len(places) > room):
                waves.append((slots, []))
                room = most
            waves[-1][1].append((group, places))
            room -= len(places)
    return waves


async def _reward_group(builder: GroupBuilder, group: Group, played: list[tuple[_Episode, Trajectory]]) -> None:
    lasts = [last for _, last in played]
    given = await builder.compute_group_rewards(lasts, group.envs)
    for last, (reward, metrics) in zip(lasts, given, strict=True):
        last.reward = (last.reward or 0.0) + reward
        last.metadata.update(metrics)
        last.reports.append(dict(metrics))


async def _episodes(
    wave: _Wave,
    sampler: SamplingClient,
    params: SamplingParams,
    seed: int,
    max_prompt_tokens: int | None,
    read: Callable[[Future[SampleResponse]], Awaitable[SampleResponse]],
    on_step: Callable[[list[_Episode]], None] | None = None,
) -> list[_Episode]:
    """Play all episodes to their ends, a turn of all at a time. `on_step` looks at groups of which one may be over."""
    tokenizer = sampler.get_tokenizer()
    episodes = await _open_episodes(wave, max_prompt_tokens)
    turn = 0
    while running := [e for e in episodes if not e.done]:
        pending = [(batch, _submit(batch, sampler, params, seed, turn)) for batch in _calls(running)]
        if on_step is None:
            answers = [answer for batch, future in pending for answer in _record_response(batch, await read(future))]
            await asyncio.gather(*(_step(e, answer, tokenizer) for e, answer in answers))
        else:
            await _play_turn_unordered(pending, lambda e, answer: _step(e, answer, tokenizer), episodes, on_step)
        turn += 1
    return episodes


async def _open_episodes(wave: _Wave, max_prompt_tokens: int | None) -> list[_Episode]:
    """Every episode with its first observation; they begin at the same time."""
    places = [(group, i, group.envs[i]) for group, numbers in wave for i in numbers]
    begun = await asyncio.gather(*(env.initial_observation() for _, _, env in places))
    episodes: list[_Episode] = []
    for (group, i, env), given in zip(places, begun, strict=True):
        if isinstance(given, InitialObservationOverflow):
            episodes.append(_over_at_once(group, i, env, given))
            continue
        observation, stop = given
        length = observation.length - len(group.task.hint)
        if max_prompt_tokens is not None and length > max_prompt_tokens and not isinstance(env, ExternalEnv):
            raise ValueError(
                f"task {group.task.id!r}: its prompt has {length} tokens, more than "
                f"training.max_prompt_tokens={max_prompt_tokens}; raise the limit or leave the task out"
            )
        episodes.append(_Episode(group, i, env, stop, observation.to_ints()))
    return episodes


async def _play_turn_unordered(
    pending: list[tuple[list[_Episode], Future[SampleResponse]]],
    step: Callable[[_Episode, SampledSequence], Coroutine[Any, Any, None]],
    episodes: list[_Episode],
    on_step: Callable[[list[_Episode]], None],
) -> None:
    """A turn in which no episode waits for another: each takes its step when its answer is there."""
    groups: dict[str, list[_Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group.id, []).append(episode)
    steps: list[asyncio.Task[None]] = []
    at_work: dict[str, list[asyncio.Task[None]]] = {}  # by group; those of environments that wait take a while
    async for batch, response in as_completed(pending):
        for episode, answer in _record_response(batch, response):
            steps.append(asyncio.create_task(step(episode, answer)))
            at_work.setdefault(episode.group.id, []).append(steps[-1])
        await asyncio.sleep(0)
        for id in [id for id, tasks in at_work.items() if all(task.done() for task in tasks)]:
            del at_work[id]
            on_step(groups[id])
    await asyncio.gather(*steps)
    for id in at_work:
        on_step(groups[id])


def _record_response(batch: list[_Episode], response: SampleResponse) -> list[tuple[_Episode, SampledSequence]]:
    for episode in batch:
        if episode.player is None and response.fingerprint not in episode.fingerprints:
            episode.fingerprints.append(response.fingerprint)
    return list(zip(batch, response.sequences, strict=True))


def _over_at_once(group: Group, index: int, env: Env, given: InitialObservationOverflow) -> _Episode:
    metrics = dict(given.metrics)
    return _Episode(
        group, index, env, None, [], reward=given.reward, metrics=metrics, answer=given.answer, error=given.error,
        done=True,
    )  # fmt: skip


def _calls(running: list[_Episode]) -> list[list[_Episode]]:
    """Episodes that one `sample` call can serve: a whole group that sees the same tokens, else one each."""
    calls: list[list[_Episode]] = []
    for episode in running:
        last = calls[-1] if calls else None
        if (
            last
            and last[0].group is episode.group
            and len(last) == episode.index
            and not (episode.turns or episode.is_parallel)
            and last[0].observation == episode.observation
            and last[0].stop == episode.stop
            and _turn_limit(last[0]) == _turn_limit(episode)
            and last[0].player is episode.player
        ):
            last.append(episode)
        else:
            calls.append([episode])
    return calls


def _turn_limit(episode: _Episode) -> int | None:
    return episode.env.turn_limit if isinstance(episode.env, ExternalEnv) else None


def _submit(batch: list[_Episode], sampler: SamplingClient, params: SamplingParams, seed: int, turn: int):
    first = batch[0]
    # A call that starts at sample 0 numbers its completions itself; any other call is one completion.
    key = rng.key(seed, first.group.id, *first.make_turn_key(turn), first.index)
    stop = params.stop if params.stop is not None else first.stop
    if params.stop is not None and first.stop is not None and isinstance(first.env, ExternalEnv):
        own = [params.stop] if isinstance(params.stop, str) else list(params.stop)
        stop = [*own, *first.stop]  # those of the run, and those of the call
    params = replace(params, seed=key, stop=stop)
    if limit := _turn_limit(first):
        params = replace(params, max_tokens=min(limit, params.max_tokens or limit))
    try:
        return (first.player or sampler).sample(ModelInput.from_ints(first.observation), len(batch), params)
    except ValueError as mistake:  # a prompt beyond the context, say: name the task it came from
        raise ValueError(f"task {first.group.task.id!r}: {mistake}") from mistake


async def _step(episode: _Episode, answer: SampledSequence, tokenizer: Any) -> None:
    end_tokens = answer.end_tokens
    if end_tokens is None:
        at_end = answer.stop_reason is StopReason.STOP and answer.tokens[-1:] == [tokenizer.eos_token_id]
        end_tokens = int(at_end)
    turn = _Turn(episode.observation, answer, end_tokens, episode.find_parent(), role=episode.role)
    if episode.player is None:
        episode.turns.append(turn)
    env = episode.env
    if isinstance(env, ExternalEnv):
        result = await env.take(replace(answer, end_tokens=end_tokens))
    else:
        result = await env.step(answer.tokens, extra={"stop_reason": answer.stop_reason.value})
    turn.reward, turn.report, turn.chat = result.reward, dict(result.metrics), result.chat
    episode.reward += result.reward
    episode.metrics.update(result.metrics)
    turn.reward_so_far, turn.metrics_so_far = episode.reward, dict(episode.metrics)
    if result.episode_done or result.next_observation is None:
        episode.done, episode.answer, episode.error = True, result.answer, result.error
        return
    episode.observation = result.next_observation.to_ints()
    if isinstance(env, ExternalEnv):
        episode.stop = result.next_stop_condition  # each call has its own, or none
    else:
        episode.stop = result.next_stop_condition or episode.stop


def write_trajectories(episode: _Episode, tokenizer: Any, params: SamplingParams) -> list[Trajectory]:
    """The trajectories of an episode that is over, one for each branch of its turns."""
    env = episode.env
    dropped, final = (env.dropped_turns(), env.final_turn()) if isinstance(env, ExternalEnv) else ((), None)
    branches = _split_branches(episode, dropped) or [[]]
    branches.sort(key=lambda branch: final is not None and final in branch)  # the judged one last
    if final is not None:  # what the last turn gave is the episode's
        episode.turns[-1].reward, episode.turns[-1].report = 0.0, {}
    *others, judged = (_write(episode, branch, tokenizer, params) for branch in branches)
    if isinstance(env, ExternalEnv) or others:
        judged = replace(judged, branches=[_describe(episode, branch[-1], tokenizer) for branch in branches if branch])
    if episode.answer is not None:
        judged = replace(judged, answer=episode.answer)
    if final is not None:  # what the episode gave, also if turns that are left out came later
        turns = len(judged.turn_starts)
        given = [*([0.0] * (turns - 1)), episode.reward] if turns else []
        judged = replace(judged, reward=episode.reward, metadata=dict(episode.metrics), turn_rewards=given)
        judged.reports[-1:] = [dict(episode.metrics)]
    return [*others, judged]


def _split_branches(episode: _Episode, dropped: Collection[int]) -> list[list[int]]:
    """The turns of each branch. Of calls that are parallel in an order that does not depend on their arrival."""
    turns = episode.turns
    if not episode.is_parallel:
        return split_branches([turn.parent for turn in turns], dropped)
    order = sorted(range(len(turns)), key=lambda i: (len(turns[i].prompt), turns[i].prompt, turns[i].answer.tokens))
    place = {number: at for at, number in enumerate(order)}  # a turn is behind its parent: it reads more
    parents = [None if (parent := turns[number].parent) is None else place[parent] for number in order]
    branches = split_branches(parents, {place[number] for number in dropped})
    return [[order[at] for at in branch] for branch in branches]


def _describe(episode: _Episode, end: int, tokenizer: Any) -> Branch:
    """The branch whose last turn is `end`, as rewards are shown it."""
    env, last = episode.env, episode.turns[end]
    path = list_path(end, [turn.parent for turn in episode.turns])
    ids, rewards = (env.turn_ids(), env.branch_rewards()) if isinstance(env, ExternalEnv) else ((), {})
    tokens = last.answer.tokens
    return Branch(
        path,
        tokenizer.decode(last.prompt, skip_special_tokens=False),
        tokenizer.decode(tokens[: len(tokens) - last.end_tokens], skip_special_tokens=False),
        ids[end] if ids else "",
        find_reward(path, rewards),
        last.role,
    )


def _write(episode: _Episode, path: list[int], tokenizer: Any, params: SamplingParams) -> Trajectory:
    """The trajectory of turns of which each goes on from the one before."""
    turns, task = [episode.turns[place] for place in path], episode.group.task
    row = join_turns(
        [(turn.prompt, turn.answer.tokens, turn.answer.logprobs or [0.0] * len(turn.answer.tokens)) for turn in turns]
    )
    prompt, tokens, starts = row.prompt, row.tokens, row.starts
    shown = tokens[: len(tokens) - turns[-1].end_tokens] if turns else tokens
    # The task of a builder is an index into a dataset: only the tokens tell the prompt. Elsewhere they do where a chat
    # template, a hint or the episode itself wrote it; text as it stands is not decoded again, which would take time.
    is_plain = episode.group.builder is None and task.model_prompt == task.prompt_text
    is_plain = is_plain and path[:1] in ([], [0]) and not task.hint and not isinstance(episode.env, ExternalEnv)
    last = starts[-1] if starts else 0
    judged = shown[last:] if last else [*task.hint, *shown] if task.hint else None
    answer = None if judged is None else tokenizer.decode(judged, skip_special_tokens=False)
    rendered = "" if is_plain else tokenizer.decode(prompt, skip_special_tokens=False)
    text = task.prompt_text if episode.group.builder is None else rendered
    # What has no log-probs can be judged and cannot train.
    is_scored = all(turn.answer.logprobs is not None for turn in turns)
    failed = {ENVIRONMENT: Score(None, Outcome.ERROR, EPISODE_FAILED, detail=episode.error)} if episode.error else {}
    return Trajectory(
        prompt=text,
        rendered_prompt="" if rendered == text else rendered,
        prompt_tokens=prompt,
        # Only the end token is hidden: a special token inside the completion stays visible to verifiers.
        response=tokenizer.decode(shown, skip_special_tokens=False),
        answer=answer,
        response_tokens=tokens,
        logprobs=row.logprobs if is_scored else [],
        action_mask=row.mask,
        reward=turns[-1].reward_so_far if turns else episode.reward,
        metadata=dict(turns[-1].metrics_so_far if turns else episode.metrics),
        scores=failed,
        group_id=episode.group.id,
        rollout_id=f"{episode.group.id}/{episode.index}",
        task=task,
        stop_reason=turns[-1].answer.stop_reason if turns else None,
        temperature=params.temperature,
        policy_fingerprint="+".join(episode.fingerprints),
        turn_starts=starts,
        reports=[turn.report for turn in turns] if turns else [dict(episode.metrics)],
        turn_rewards=[turn.reward for turn in turns],
        messages=_write_messages(episode, path),
        role=turns[-1].role if turns else "",
    )


def _write_messages(episode: _Episode, branch: list[int]) -> list[dict[str, Any]]:
    """The conversation of a branch up to its last turn, with the numbers of the policy's turns; [] if it has none."""
    path = list_path(branch[-1], [turn.parent for turn in episode.turns]) if branch else []
    return join_chat([(turn, chat) for turn in path if (chat := episode.turns[turn].chat)])
