"""Rollouts: plays episodes of environments against a sampler and makes trajectories.

All episodes of a call move in lockstep, one turn at a time: every observation of a turn is submitted before the first
completion is read. So the engine sees the same batches whatever the environments' timing, and a resumed step repeats to
the bit. The first turn of a group whose observations are equal is one `sample` call: the prompt is computed once.
`play` is the same for groups that need not wait for each other: it awaits answers, so many of them share a thread.

Also exports `Trajectory` and `TrajectoryBatch`, which users import from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlvr.core import rng
from rlvr.core.futures import Future, as_completed, read_async, read_blocking, run_to_end
from rlvr.core.messages import ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.protocols import Env, InitialObservationOverflow, SamplingClient, TaskSource
from rlvr.core.types import StopReason, Task, Trajectory, TrajectoryBatch
from rlvr.rollout.scoring import score

__all__ = ["Group", "Trajectory", "TrajectoryBatch", "open_groups", "play", "rollout", "score"]


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
    """`envs` are fresh episodes of one task, or `builder` makes them; their rollouts are compared with each other."""

    id: str
    task: Task
    envs: list[Env]
    builder: GroupBuilder | None = None


@dataclass
class _Episode:
    """One running episode: the tokens of the trajectory being built, and the trajectories already closed."""

    group: Group
    index: int
    env: Env
    stop: Any
    prompt: list[int]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    mask: list[int] = field(default_factory=list[int])
    stop_reason: StopReason | None = None
    turn: int = 0  # where in `tokens` the policy's last turn begins
    end_tokens: int = 0  # how many of the last tokens only end the completion
    fingerprints: list[str] = field(default_factory=list[str])
    unscored: bool = False
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    turn_starts: list[int] = field(default_factory=list[int])
    reports: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    turn_rewards: list[float] = field(default_factory=list[float])
    closed: list[Trajectory] = field(default_factory=list[Trajectory])
    done: bool = False
    last: Trajectory | None = None  # the trajectory that was open when the episode ended

    @property
    def trajectories(self) -> list[Trajectory]:
        assert self.last is not None
        return [*self.closed, self.last]

    @property
    def observation(self) -> list[int]:
        return self.prompt + self.tokens


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
    index and the turn, on nothing else. `version` is recorded as `policy_version`. A first observation of more than
    `max_prompt_tokens` is a ValueError that names the task. `on_group_end` gets the trajectories of a group as soon
    as its last episode ends, while those of other groups go on; groups whose builder rewards them come only with the
    rest.
    """
    return run_to_end(_rollout(groups, sampler, params, seed, version, max_prompt_tokens, read_blocking, on_group_end))


async def play(
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
        if episode.last is None:
            episode.closed = [replace(t, policy_version=version) for t in episode.closed]
            episode.last = replace(_close(episode, tokenizer, params), policy_version=version)

    def finish_group(group: list[_Episode]) -> None:
        if on_group_end is not None and all(e.done and e.last is None and e.group.builder is None for e in group):
            for episode in group:
                close(episode)
            on_group_end([t for episode in group for t in episode.trajectories])

    try:
        for group in groups:
            if group.builder is not None:
                group.envs = list(await group.builder.make_envs())
        episodes = await _episodes(
            groups, sampler, params, seed, max_prompt_tokens, read, on_group_end and finish_group
        )
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
    return [t for episode in episodes for t in episode.trajectories]


async def _reward_group(builder: GroupBuilder, group: Group, played: list[tuple[_Episode, Trajectory]]) -> None:
    lasts = [last for _, last in played]
    given = await builder.compute_group_rewards(lasts, group.envs)
    for last, (reward, metrics) in zip(lasts, given, strict=True):
        last.reward = (last.reward or 0.0) + reward
        last.metadata.update(metrics)
        last.reports.append(dict(metrics))


async def _episodes(
    groups: Sequence[Group],
    sampler: SamplingClient,
    params: SamplingParams,
    seed: int,
    max_prompt_tokens: int | None,
    read: Callable[[Future[SampleResponse]], Awaitable[SampleResponse]],
    on_step: Callable[[list[_Episode]], None] | None = None,
) -> list[_Episode]:
    """Play all episodes to their ends, a turn of all at a time. `on_step` looks at groups of which one may be over."""
    tokenizer = sampler.get_tokenizer()
    episodes: list[_Episode] = []
    for group in groups:
        for i, env in enumerate(group.envs):
            given = await env.initial_observation()
            if isinstance(given, InitialObservationOverflow):
                episodes.append(_over_at_once(group, i, env, given))
                continue
            observation, stop = given
            length = observation.length - len(group.task.hint)
            if max_prompt_tokens is not None and length > max_prompt_tokens:
                raise ValueError(
                    f"task {group.task.id!r}: its prompt has {length} tokens, more than "
                    f"training.max_prompt_tokens={max_prompt_tokens}; raise the limit or leave the task out"
                )
            episodes.append(_Episode(group, i, env, stop, observation.to_ints()))
    turn = 0
    while running := [e for e in episodes if not e.done]:
        pending = [(batch, _submit(batch, sampler, params, seed, turn)) for batch in _calls(running)]
        if on_step is None:
            answers = [answer for batch, future in pending for answer in _record_response(batch, await read(future))]
            await asyncio.gather(*(_step(e, answer, tokenizer, params) for e, answer in answers))
        else:
            await _play_turn_unordered(
                pending, lambda e, answer: _step(e, answer, tokenizer, params), episodes, on_step
            )
        turn += 1
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
        if response.fingerprint not in episode.fingerprints:
            episode.fingerprints.append(response.fingerprint)
    return list(zip(batch, response.sequences, strict=True))


def _over_at_once(group: Group, index: int, env: Env, given: InitialObservationOverflow) -> _Episode:
    metrics = dict(given.metrics)
    return _Episode(group, index, env, None, [], reward=given.reward, metrics=metrics, reports=[metrics], done=True)


def _calls(running: list[_Episode]) -> list[list[_Episode]]:
    """Episodes that one `sample` call can serve: a whole group that sees the same tokens, else one each."""
    calls: list[list[_Episode]] = []
    for episode in running:
        last = calls[-1] if calls else None
        if (
            last
            and last[0].group is episode.group
            and len(last) == episode.index
            and not episode.tokens
            and not episode.closed
            and last[0].prompt == episode.prompt
            and last[0].stop == episode.stop
        ):
            last.append(episode)
        else:
            calls.append([episode])
    return calls


def _submit(batch: list[_Episode], sampler: SamplingClient, params: SamplingParams, seed: int, turn: int):
    first = batch[0]
    # A call that starts at sample 0 numbers its completions itself; any other call is one completion.
    key = rng.key(seed, first.group.id, turn, first.index)
    stop = params.stop if params.stop is not None else first.stop
    prompt = ModelInput.from_ints(first.observation)
    try:
        return sampler.sample(prompt, len(batch), replace(params, seed=key, stop=stop))
    except ValueError as mistake:  # a prompt beyond the context, say: name the task it came from
        raise ValueError(f"task {first.group.task.id!r}: {mistake}") from mistake


async def _step(episode: _Episode, answer: SampledSequence, tokenizer: Any, params: SamplingParams) -> None:
    episode.turn = len(episode.tokens)
    episode.turn_starts.append(episode.turn)
    episode.tokens += answer.tokens
    if answer.logprobs is None:
        episode.unscored = True  # such a trajectory can be judged and cannot train
    episode.logprobs += answer.logprobs or [0.0] * len(answer.tokens)
    episode.mask += [1] * len(answer.tokens)
    episode.stop_reason = answer.stop_reason
    if answer.end_tokens is None:
        at_end = answer.stop_reason is StopReason.STOP and answer.tokens[-1:] == [tokenizer.eos_token_id]
        episode.end_tokens = int(at_end)
    else:
        episode.end_tokens = answer.end_tokens
    result = await episode.env.step(answer.tokens, extra={"stop_reason": answer.stop_reason.value})
    episode.reward += result.reward
    episode.turn_rewards.append(result.reward)
    episode.metrics.update(result.metrics)
    episode.reports.append(dict(result.metrics))
    if result.episode_done or result.next_observation is None:
        episode.done = True
        return
    seen, now = episode.observation, result.next_observation.to_ints()
    if now[: len(seen)] == seen:
        written = now[len(seen) :]
        episode.tokens += written
        episode.logprobs += [0.0] * len(written)
        episode.mask += [0] * len(written)
    else:  # history was rewritten: what came before is a trajectory of its own
        episode.closed.append(_close(episode, tokenizer, params))
        episode.prompt, episode.tokens, episode.logprobs, episode.mask = now, [], [], []
        episode.turn_starts, episode.reports, episode.turn_rewards = [], [], []
    episode.stop = result.next_stop_condition or episode.stop


def _close(episode: _Episode, tokenizer: Any, params: SamplingParams) -> Trajectory:
    tokens, task = episode.tokens, episode.group.task
    shown = tokens[: len(tokens) - episode.end_tokens] if episode.mask[-1:] == [1] else tokens
    # The task of a builder is an index into a dataset: only the tokens tell the prompt. Elsewhere they do where a chat
    # template, a hint or the episode itself wrote it; text as it stands is not decoded again, which would take time.
    is_plain = episode.group.builder is None and task.model_prompt == task.prompt_text
    is_plain = is_plain and not (episode.closed or task.hint)
    judged = shown[episode.turn :] if episode.turn else [*task.hint, *shown] if task.hint else None
    rendered = "" if is_plain else tokenizer.decode(episode.prompt, skip_special_tokens=False)
    prompt = task.prompt_text if episode.group.builder is None else rendered
    return Trajectory(
        prompt=prompt,
        rendered_prompt="" if rendered == prompt else rendered,
        prompt_tokens=episode.prompt,
        # Only the end token is hidden: a special token inside the completion stays visible to verifiers.
        response=tokenizer.decode(shown, skip_special_tokens=False),
        answer=None if judged is None else tokenizer.decode(judged, skip_special_tokens=False),
        response_tokens=tokens,
        logprobs=[] if episode.unscored else episode.logprobs,
        action_mask=episode.mask,
        reward=episode.reward,
        metadata=dict(episode.metrics),
        group_id=episode.group.id,
        rollout_id=f"{episode.group.id}/{episode.index}",
        task=task,
        stop_reason=episode.stop_reason,
        temperature=params.temperature,
        policy_fingerprint="+".join(episode.fingerprints),
        turn_starts=episode.turn_starts,
        reports=episode.reports,
        turn_rewards=episode.turn_rewards,
    )
