"""Async rewards: run to their end from anywhere, all answers of a batch at once, on one loop that stays."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Outcome, Trajectory
from rlvr.reward import coroutines, register_reward, resolve_reward

WAIT = 0.2
PATIENCE = 20.0


def answers(*responses: str, answer: str = "4") -> list[Trajectory]:
    return [Trajectory("2+2?", [1], response, [2], metadata={"answer": answer}) for response in responses]


class Judge:
    """TRL's signature, as an object. It keeps a connection of sorts, which works only on the loop that opened it."""

    loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop() and self.loop.is_running()
        await asyncio.gather(*(asyncio.sleep(WAIT) for _ in completions))
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def test_an_async_trl_function_is_judged_inside_an_event_loop_and_outside():
    """The answers of a batch wait together, and the function finds its loop again at every call, from any thread."""
    reward = resolve_reward(Judge())

    def judge_answers() -> list[float | None]:
        return [score.value for score in reward.score(answers(*"4544444444"))]

    async def inside():
        return judge_answers(), *await asyncio.gather(
            asyncio.to_thread(judge_answers), asyncio.to_thread(judge_answers)
        )

    start = time.monotonic()
    assert [judge_answers(), judge_answers(), *asyncio.run(inside())] == [[1.0, 0.0] + [1.0] * 8] * 5
    assert time.monotonic() - start < 5 * 10 * WAIT / 2, "ten answers were judged one after the other"
    assert reward("p", "4", {"answer": "4"}) == 1.0


def test_an_async_batched_function_works_by_name_and_in_a_composite():
    @register_reward("async_lengths", batched=True)
    async def async_lengths(prompts, responses, metas=None, *, drop=0):
        await asyncio.sleep(0)
        return [len(r) for r in responses][drop:]

    assert [s.value for s in resolve_reward("async_lengths").score(answers("12", ""))] == [2.0, 0.0]
    assert resolve_reward("async_lengths", drop=1).score(answers("1"))[0].reason == "wrong_length"
    parts = [{"name": "async_lengths"}, {"name": async_lengths}]
    assert resolve_reward("composite", rewards=parts)("p", "123") == 3.0


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (KeyError("boom"), KeyError),
        (SystemExit("boom"), SystemExit),
        (asyncio.CancelledError("boom"), concurrent.futures.CancelledError),
    ],
)
def test_an_exception_of_an_async_function_is_an_error_and_the_next_call_works(error, seen):
    async def fragile(prompts, completions, **kwargs):
        await asyncio.sleep(0)
        if completions == ["bad"]:
            raise error
        return [1.0]

    reward = resolve_reward(fragile)
    assert [(s.outcome, s.reason) for s in reward.score(answers("bad"))] == [(Outcome.ERROR, "exception")]
    with pytest.raises(seen):
        reward("p", "bad")
    assert reward("p", "good") == 1.0


def run_within(seconds: float, call):
    """What the call returns; a failure of the test where it hangs."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert got, f"no answer within {seconds:g} s"
    return got[0]


async def exits():
    sys.exit("judge: no API key")


async def interrupts():
    raise KeyboardInterrupt("judge: no API key")


async def alone(one, completions):
    return [await one() for _ in completions]


async def gather_one(one, completions):
    return await asyncio.gather(*[one() for _ in completions])


async def task_group_one(one, completions):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one()) for _ in completions]
    return [task.result() for task in tasks]


async def time_limited_one(one, completions):
    return [await asyncio.wait_for(one(), 5) for _ in completions]


@pytest.mark.parametrize("one", [exits, interrupts])
@pytest.mark.parametrize("way", [alone, gather_one, task_group_one, time_limited_one])
def test_an_exit_in_any_task_of_a_reward_is_an_error_and_the_next_reward_works(one, way):
    """On the same loop: what an earlier call left open there is still good."""
    judge = resolve_reward(Judge())
    assert judge("p", "4", {"answer": "4"}) == 1.0

    async def fragile(prompts, completions, **kwargs):
        return await way(one, completions)

    scores = run_within(PATIENCE, lambda: resolve_reward(fragile).score(answers("1", "2", "3")))
    assert [(s.outcome, s.reason) for s in scores] == [(Outcome.ERROR, "exception")] * 3
    assert all("judge: no API key" in s.detail for s in scores)
    assert run_within(PATIENCE, lambda: judge("p", "4", {"answer": "4"})) == 1.0


def test_a_reward_that_stops_the_loop_or_exits_in_a_task_still_returns():
    async def stops(prompts, completions, **kwargs):
        loop = asyncio.get_running_loop()
        loop.stop()
        await asyncio.sleep(0.01)
        loop.call_soon(sys.exit)
        await asyncio.sleep(0.01)
        return [1.0 for _ in completions]

    assert run_within(PATIENCE, lambda: resolve_reward(stops)("p", "r")) == 1.0
    assert run_within(PATIENCE, lambda: resolve_reward(stops)("p", "r")) == 1.0


def test_a_call_fails_if_its_loop_ends_and_the_next_call_starts_another():
    begun = threading.Event()

    async def endless(prompts, completions, **kwargs):
        begun.set()
        await asyncio.sleep(3600)

    def ends():
        begun.wait(PATIENCE)
        coroutines._reward_loop().close()

    closer = threading.Thread(target=ends)
    closer.start()
    scores = run_within(PATIENCE, lambda: resolve_reward(endless).score(answers("4")))
    closer.join(PATIENCE)
    assert (scores[0].outcome, scores[0].reason) == (Outcome.ERROR, "exception")
    assert run_within(PATIENCE, lambda: resolve_reward(Judge())("p", "4", {"answer": "4"})) == 1.0


@pytest.mark.parametrize("waits", ["await asyncio.sleep(3600)", "await asyncio.Event().wait()"])
def test_ctrl_c_ends_the_wait_for_a_reward_that_never_ends(waits):
    """And the process: nothing is left that keeps it, and nothing is written of tasks that were lost."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS.replace("WAITS", waits)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (output, errors, process.returncode) == ("interrupted\n", "", 0)


ENDLESS = """
import asyncio
from rlvr.reward import resolve_reward
async def judge(prompts, completions, **kwargs):
    print("waiting", flush=True)
    WAITS
try:
    resolve_reward(judge)("p", "r")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_async_reward_that_calls_another_must_await_it():
    """It would wait for the loop that it occupies, for ever."""

    async def inner(prompts, completions, **kwargs):
        return [1.0 for _ in completions]

    async def outer(prompts, completions, **kwargs):
        return [resolve_reward(inner)(p, c) for p, c in zip(prompts, completions, strict=True)]

    (score,) = resolve_reward(outer).score(answers("4"))
    assert score.outcome is Outcome.ERROR and "await that function itself" in score.detail


def test_a_forked_copy_judges_on_a_loop_of_its_own():
    async def judge(prompts, completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    reward = resolve_reward(judge)
    assert reward("p", "r") == 1.0
    copy = os.fork()
    if copy == 0:
        os._exit(0 if reward("p", "r") == 1.0 else 1)
    for _ in range(500):
        done, status = os.waitpid(copy, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.kill(copy, 9)
        pytest.fail("the forked copy waits for a loop that it does not have")
    assert status == 0


def test_an_async_function_that_would_wait_for_each_answer_in_turn_is_refused():
    async def later(prompt, response):
        return 1.0

    for function in (later, functools.partial(later)):
        with pytest.raises(ValueError, match=r"is async and judges one answer at a time, .*completions"):
            resolve_reward(function)
