"""Verification beside sampling: begun while others are sampled, and nothing else about a step is different."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.futures import LazyFuture, as_completed
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.envs import PromptEnv
from rlvr.reward import Reward, resolve_reward
from rlvr.reward.registry import RewardSpec
from rlvr.rollout import Group, rollout
from rlvr.rollout.scoring import Scoring
from rlvr.sandbox import Sandbox, Verdict
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.trainer import Trainer
from tests.kit.table_trainer import collect, fixed_lag_trainer, make_trainer, run_fixed_lag, without_times


class RecordingVerifier:
    """A verifier that pays for the letter `a`; it notes who asked it about how many answers, and on which thread."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.calls: list[tuple[int, str]] = []
        self._wait = wait

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], metas: Any = None) -> list[float]:
        self.calls.append((len(responses), threading.current_thread().name))
        self._wait()
        return [float(response == "a") for response in responses]

    def reward(self, waits_for: Any = "network") -> Reward:
        return Reward("asked", RewardSpec(self, batched=True, waits_for=waits_for))


class InPieces(MockTrainingClient):
    """Its sampler answers in pieces: request k of n after n - k of them, so the last one asked for is there first."""

    def __init__(self, policy: TablePolicy, before_the_last: Callable[[], None] = lambda: None) -> None:
        super().__init__(policy)
        self.before_the_last = before_the_last
        self.claimed = ""  # the weights that its sampler says are asked

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
        sampler, owner = super().save_weights_and_get_sampling_client(name), self
        asked: list[int] = []
        done = [0]

        class Sampler:
            fingerprint = owner.claimed or sampler.fingerprint

            def sample(self, prompt: Any, count: int, params: SamplingParams) -> Any:
                number = len(asked)
                asked.append(number)

                def ready() -> bool:
                    return done[0] >= len(asked) - number

                def piece() -> bool:
                    done[0] += 1
                    if done[0] == len(asked):
                        owner.before_the_last()
                    return ready()

                return LazyFuture(lambda: sampler.sample(prompt, count, params).result(), piece, ready)

            def get_tokenizer(self) -> Any:
                return sampler.get_tokenizer()

        return Sampler()


def pieces(before_the_last: Callable[[], None] = lambda: None) -> InPieces:
    return InPieces(TablePolicy(["say", "a", "b"]), before_the_last)


def fields_of(trajectories: Sequence[Trajectory]) -> list[Any]:
    return [(t.rollout_id, t.response_tokens, t.reward, t.scores, t.policy_version) for t in trajectories]


# --- it overlaps -------------------------------------------------------------------------------------------------


def test_a_group_is_verified_while_another_one_is_still_sampled() -> None:
    """The sampler's last piece comes only once a verdict was asked for: without overlap this would never end."""
    begun = threading.Event()

    def wait_for_a_verdict() -> None:
        assert begun.wait(60), "no verification had begun when only one group was left to sample"

    asked = RecordingVerifier(begun.set)
    collected = collect(make_trainer(pieces(wait_for_a_verdict), reward=asked.reward()), 0)
    assert len(collected.batch) == 24 and {t.reward for t in collected.batch} == {0.0, 1.0}


def test_verifiers_that_wait_are_asked_a_group_a_call_off_this_thread_and_others_once_about_all() -> None:
    for waits_for in ("processes", "network"):
        asked = RecordingVerifier()
        collect(make_trainer(pieces(), reward=asked.reward(waits_for)), 0)
        assert [size for size, _ in asked.calls] == [4] * 6
        assert all(thread.startswith("rlvr-scoring") for _, thread in asked.calls)
    plain = RecordingVerifier()
    collect(make_trainer(pieces(), reward=plain.reward("")), 0)
    assert plain.calls == [(24, threading.current_thread().name)]


def test_several_groups_are_verified_at_once() -> None:
    """One slow answer delays no other: all six calls run together before any of them ends."""
    together = threading.Barrier(6, timeout=60)
    collect(make_trainer(pieces(), reward=RecordingVerifier(together.wait).reward()), 0)


def test_a_verifier_that_only_watches_overlaps_too() -> None:
    reward, watching = RecordingVerifier(), RecordingVerifier()
    watched = Reward("watching", RewardSpec(watching, batched=True, waits_for="network"))
    t = make_trainer(pieces(), reward=reward.reward(""), watched=[watched])
    collected = collect(t, 0)
    assert [size for size, _ in watching.calls] == [4] * 6 and [size for size, _ in reward.calls] == [24]
    assert all(list(one.scores) == ["asked", "watching"] for one in collected.batch)


# --- nothing else changes ----------------------------------------------------------------------------------------


def test_a_step_is_the_same_to_the_bit_whether_its_verifier_waits_or_not() -> None:
    """Trajectories in the order of groups and samples, although the last group is over first; equal metrics after."""
    found: list[Any] = []
    for waits_for, client in (("", MockTrainingClient(TablePolicy(["say", "a", "b"]))), ("network", pieces())):
        t = make_trainer(client, reward=RecordingVerifier().reward(waits_for), dynamic_sampling=2)
        rows = [(fields_of((c := collect(t, step)).all.trajectories), t.update(step, c)) for step in range(3)]
        found.append((rows, client.policy.logits.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_fixed_lag_is_the_same_to_the_bit_too(tmp_path: Path, lag: int) -> None:
    found: list[Any] = []
    for waits_for in ("", "processes"):
        client = pieces()
        t = fixed_lag_trainer(client, reward=RecordingVerifier().reward(waits_for), max_steps_off_policy=lag)
        found.append(
            (without_times(run_fixed_lag(t, tmp_path / (waits_for or "plain"))), client.policy.logits.tolist())
        )
    assert found[0] == found[1]


def test_the_engine_gives_groups_up_as_they_end_and_the_same_tokens(client: Callable[..., Any]) -> None:
    """A real model: what ends early comes early, and asking for it changes no token, log-prob or place."""
    sampler = client().save_weights_and_get_sampling_client()

    def groups() -> list[Group]:
        tasks = [Task(str(i), text) for i, text in enumerate(("1 + 2 =", "3 * 4 =", "5 - 1 =", "7 ="))]
        tokenizer = sampler.get_tokenizer()
        return [Group(t.id, t, [PromptEnv(t, tokenizer) for _ in range(2)]) for t in tasks]

    params = SamplingParams(max_tokens=24)
    plain = rollout(groups(), sampler, params, seed=2)
    ended: list[tuple[str, bool]] = []
    engine = sampler._engine

    def note_end(group: list[Trajectory]) -> None:
        ended.append((group[0].group_id, engine.idle))

    early = rollout(groups(), sampler, params, seed=2, on_group_end=note_end)
    assert fields_of(plain) == fields_of(early) and [t.logprobs for t in plain] == [t.logprobs for t in early]
    assert sorted(id for id, _ in ended) == ["0", "1", "2", "3"]
    assert not ended[0][1], "the first group came only when nothing was sampled any more"


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_verifier_that_fails_is_an_error_of_that_group_alone_and_counts_against_the_budget() -> None:
    asked = RecordingVerifier()
    fails = threading.Lock()

    def once() -> None:
        if fails.acquire(blocking=False):
            raise OSError("the judge hung up")

    asked._wait = once
    collected = collect(make_trainer(pieces(), reward=asked.reward(), error_budget=0.2), 0)
    broken = [t for t in collected.batch if t.scores["asked"].outcome is Outcome.ERROR]
    assert len(broken) == 4 and len({t.group_id for t in broken}) == 1 and all(t.reward is None for t in broken)

    def always() -> None:
        raise OSError("the judge hung up")

    with pytest.raises(TrainingStoppedError, match="gave no verdict on 24 of 24"):
        collect(make_trainer(pieces(), reward=RecordingVerifier(always).reward()), 0)


def test_answers_of_other_weights_stop_the_step_before_they_are_judged() -> None:
    asked, client = RecordingVerifier(), pieces()
    client.claimed = "another"
    t = make_trainer(client, reward=asked.reward())
    with pytest.raises(TrainingStoppedError, match="sampled by the weights"):
        collect(t, 0)
    assert not asked.calls


def interrupt_step(reward: Reward, begun: Callable[[], bool]) -> Trainer:
    """A step is stopped by Ctrl-C while its last group is sampled and others are verified."""
    stop = threading.Event()

    def press() -> None:
        for _ in range(600):
            if begun():
                raise KeyboardInterrupt
            stop.wait(0.1)
        stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
        raise AssertionError("no verification ever began; the threads are at\n" + "\n".join(stacks))

    t = make_trainer(pieces(press), reward=reward)
    with pytest.raises(KeyboardInterrupt):
        collect(t, 0)
    assert not [one for one in threading.enumerate() if one.name.startswith("rlvr-scoring")]
    return t


@pytest.mark.timeout(120)
def test_ctrl_c_while_sampling_ends_programs_under_verification() -> None:
    """Each of them would go on for ten minutes."""
    with Sandbox(workers=2) as sandbox:
        ended: list[Verdict | str] = []

        def run(prompts: Sequence[str], responses: Sequence[str], metas: Any = None) -> list[float]:
            endless = {
                "solution": "import time\ntime.sleep(600)\nx = 1",
                "tests": ["assert x == 1"],
                "timeout_s": 900.0,
            }
            try:
                ended.extend(sandbox.verify_many([endless] * len(responses)))
            except BaseException as error:
                ended.append(repr(error))
                raise
            return [0.0] * len(responses)

        def has_begun() -> bool:
            assert not ended, ended
            return sandbox.running > 0

        interrupt_step(Reward("run", RewardSpec(run, batched=True, waits_for="processes")), has_begun)
        assert sandbox.running == 0
        assert sandbox.verify("x = 1", ["assert x == 1"]).outcome is Outcome.PASSED


@pytest.mark.timeout(120)
def test_ctrl_c_while_sampling_ends_requests_that_are_waited_for() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def ask(prompts: Sequence[str], responses: Sequence[str], metas: Any = None) -> list[float]:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return []

    interrupt_step(Reward("ask", RewardSpec(ask, batched=True, waits_for="network")), begun.is_set)
    assert cancelled.wait(60)


# --- who waits ---------------------------------------------------------------------------------------------------


def test_rewards_declare_their_wait_kind() -> None:
    judge = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    code, cheap = {"name": "code"}, {"name": "exact_match"}
    program = {"type": "python", "name": "p", "source": "def grade(sample, item):\n    return 1.0"}
    check = {
        "type": "string_check", "name": "c", "operation": "eq", "input": "{{ sample.output_text }}", "reference": "a",
    }  # fmt: skip
    expected = {
        "processes": [
            resolve_reward("code"),
            resolve_reward("composite", rewards=[cheap, code]),
            resolve_reward("grader", config=program),
        ],
        "network": [
            resolve_reward("judge", **judge),
            resolve_reward("composite", rewards=[cheap, {"name": "judge", "kwargs": judge}]),
        ],
        "": [
            resolve_reward("exact_match"),
            resolve_reward("math"),
            resolve_reward("composite", rewards=[cheap, {"name": "composite", "kwargs": {"rewards": [cheap]}}]),
            resolve_reward("grader", config=check),
            resolve_reward(lambda prompt, response, meta=None: 1.0),
        ],
    }
    for waits_for, rewards in expected.items():
        assert [reward.waits_for for reward in rewards] == [waits_for] * len(rewards)


def test_parts_of_a_composite_that_do_not_wait_are_asked_by_one_thread_at_a_time() -> None:
    """They were never written for several."""
    inside, most = [0], [0]
    lock = threading.Lock()

    def plain(prompt: str, response: str, meta: Any = None) -> float:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        threading.Event().wait(0.002)
        with lock:
            inside[0] -= 1
        return 1.0

    slow = RecordingVerifier(threading.Barrier(6, timeout=60).wait).reward()
    parts = [{"name": slow}, {"name": plain}]
    collect(make_trainer(pieces(), reward=resolve_reward("composite", rewards=parts)), 0)
    assert most == [1]


# --- the parts ---------------------------------------------------------------------------------------------------


def test_results_that_come_from_elsewhere_are_taken_as_they_come() -> None:
    class Elsewhere:
        def __init__(self, running: concurrent.futures.Future[int]) -> None:
            self.running = running

        def __await__(self) -> Any:
            return asyncio.wrap_future(self.running).__await__()

    running = [concurrent.futures.Future[int]() for _ in range(3)]

    async def take_all() -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        running[2].set_result(20)
        async for what, result in as_completed([(i, Elsewhere(f)) for i, f in enumerate(running)]):  # type: ignore[misc]
            found.append((what, result))
            if result == 20:
                running[0].set_result(0)
            if result == 0:
                running[1].set_result(10)
        return found

    assert asyncio.run(take_all()) == [(2, 20), (0, 0), (1, 10)]


def test_scoring_without_beginning_early_gives_what_score_gives() -> None:
    """Groups that are over only with all others (those of builders) are asked for at the end."""
    client = pieces()
    t = make_trainer(client, reward=RecordingVerifier().reward())
    sampler = client.save_weights_and_get_sampling_client()
    groups = t.collector.open_groups(t.parts.curriculum.tasks(3, 0, 0), "x")
    answers = rollout(groups, sampler, t.parts.params, seed=1)
    with Scoring(t.parts.reward) as scoring:
        scoring.finish(answers)
    assert [a.reward for a in answers] == [float(a.response == "a") for a in answers]
