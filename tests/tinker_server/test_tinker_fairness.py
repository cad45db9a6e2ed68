"""Owners of the engine server take turns by the seconds that they used, and never change each other's bits."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.tinker_server.backend.request_futures import JsonResult, Pending, RequestFailure
from rlvr.tinker_server.backend.runs.adapter_cache import RunQueue
from rlvr.tinker_server.backend.runs.executor import RunExecutor
from rlvr.tinker_server.backend.runs.owner_clock import OwnerClock, StepTimes
from rlvr.tinker_server.backend.runs.run_operations import OptimStep
from tests.kit.tinker_backend import ADAM, MODEL, BackendClient, ServerFactory, counters, forward_backward, tiny_engine
from tests.kit.tiny import data


class Time:
    """A clock that goes on when work is done."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def train(clock: OwnerClock, time: Time, owner: str, seconds: float) -> None:
    clock.start()
    time.now += seconds
    clock.charge_training(owner)


def test_turns_are_shared_by_seconds_and_not_by_requests() -> None:
    """Ten seconds a request against a quarter: each gets half of the time."""
    time = Time()
    clock, costs, spent = OwnerClock(1.0, clock=time), {"greedy": 10.0, "polite": 0.25}, Counter[str]()
    for _ in range(410):
        clock.see(costs)
        owner = clock.first(costs)
        assert owner is not None
        train(clock, time, owner, costs[owner])
        spent[owner] += costs[owner]
    assert spent == {"greedy": 100.0, "polite": 100.0}


def test_a_pause_earns_a_second_at_most() -> None:
    time = Time()
    clock = OwnerClock(1.0, credit=1.0, clock=time)
    for _ in range(3_600):
        clock.see({"a"})
        train(clock, time, "a", 1.0)
    clock.see({"a", "b"})
    assert clock.seconds_of("b") == 3_599.0 and clock.first({"a", "b"}) == "b"
    train(clock, time, "b", 0.5)
    clock.see({"a"})
    train(clock, time, "a", 0.25)
    clock.see({"a", "b"})  # it keeps what it has left of it
    assert clock.seconds_of("b") == 3_599.5
    for _ in range(30):
        train(clock, time, "b", 1.0)
        clock.see({"a"})
    clock.see({"a", "b"})  # and what it used too much
    assert clock.seconds_of("b") == 3_629.5
    clock.see(set())
    assert clock.seconds_of("b") == 3_629.5  # it was there a moment ago
    time.now += 1.0
    clock.see(set())
    clock.see(set())
    assert clock.seconds_of("a") == clock.seconds_of("b") == 0.0


def test_who_comes_in_a_long_turn_is_owed_that_turn() -> None:
    time = Time()
    clock = OwnerClock(1.0, credit=1.0, clock=time)
    for seconds in (2.0, 5.0):
        clock.see({"a"})
        train(clock, time, "a", seconds)
    clock.see({"a", "b"})
    assert (clock.seconds_of("a"), clock.seconds_of("b")) == (7.0, 2.0)


@pytest.mark.parametrize("pause", [0.05, 0.3])
def test_an_owner_who_used_less_is_waited_for_at_its_own_cost(pause: float) -> None:
    """One owner's requests take 5 s and cannot be interrupted, the other's take 0.2 s and come `pause` after its last
    result. Without waiting the second would get one of them after each of the first: 4 % of its speed alone."""
    time = Time()
    clock, done, returns = OwnerClock(1.0, clock=time), Counter[str](), 0.0
    while time.now < 1_000.0:
        present = {"long"} | ({"short"} if time.now >= returns else set())
        clock.see(present)
        owner = clock.first(present)
        assert owner is not None
        if awaited := clock.find_awaited(owner, present):
            assert awaited[0] == "short" and 0 < awaited[1] <= 0.5 + 1e-9  # a tenth of the long one
            clock.start()
            time.now = min(time.now + awaited[1], max(returns, time.now))
            clock.charge_waiting("short")
            continue
        train(clock, time, owner, {"long": 5.0, "short": 0.2}[owner])
        done[owner] += 1
        if owner == "short":
            returns = time.now + pause
    assert 0.45 < done["short"] * (0.2 + pause) / 1_000 < 0.55 and 0.45 < done["long"] * 5 / 1_000 < 0.55


def test_an_owner_who_does_not_come_back_is_not_waited_for_again() -> None:
    time = Time()
    clock = OwnerClock(1.0, clock=time)
    clock.see({"a", "b"})
    train(clock, time, "a", 5.0)
    train(clock, time, "b", 0.2)
    clock.see({"a"})
    assert clock.find_awaited("a", {"a"}) == ("b", pytest.approx(0.5))
    assert clock.find_awaited("b", {"b"}) is None
    time.now += 0.5
    clock.see({"a"})
    assert clock.find_awaited("a", {"a"}) is None


def test_a_step_of_sampling_is_charged_by_rows() -> None:
    time = Time()
    clock = OwnerClock(1.0, clock=time)
    clock.see({"a", "b"})
    clock.start()
    time.now += 4.0
    assert clock.charge_sampling({"a": 3, "b": 1}) == 4.0
    assert (clock.seconds_of("a"), clock.seconds_of("b")) == (3.0, 1.0)


def test_of_two_owners_the_one_who_used_less_samples_or_trains_first() -> None:
    time = Time()
    clock = OwnerClock(1.0, clock=time)
    clock.see({"a", "b"})
    train(clock, time, "a", 2.0)
    assert clock.is_sampling_next("a", "b") and not clock.is_sampling_next("b", "a")


def test_training_and_sampling_of_one_owner_get_equal_time() -> None:
    """With leads of at most the `stretch`: what was left unused for an hour is not made up for."""
    time = Time()
    clock, spent = OwnerClock(1.0, clock=time), Counter[str]()
    clock.see({"a"})
    train(clock, time, "a", 3_600.0)
    for _ in range(1_000):
        if clock.is_sampling_next("a", "a"):
            clock.start()
            time.now += 0.125
            clock.charge_sampling({"a": 1})
            spent["sampling"] += 1
        else:
            train(clock, time, "a", 0.125)
            spent["training"] += 1
    assert abs(spent["sampling"] - spent["training"]) <= 8  # the second that sampling had to make up for
    assert clock.is_sampling_next(None, "a") and not clock.is_sampling_next("a", None)


def test_another_owner_trains_between_the_micro_batches_of_a_long_request(
    new_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole iteration of one owner fits into one request of the other, and both end with the bits of a run alone."""
    finished: list[tuple[str, int]] = []
    finish = RunExecutor.finish

    def note(self: RunExecutor, run: RunQueue, seq: int, *rest: Any) -> None:
        finished.append((run.owner, seq))
        finish(self, run, seq, *rest)

    monkeypatch.setattr(RunExecutor, "finish", note)
    monkeypatch.setattr(OwnerClock, "seconds_of", lambda _, owner: {"anna": 1.0}.get(owner, 0.0))

    def run(*, is_greedy: bool, is_polite: bool) -> dict[str, str]:
        backend = new_server(engine=tiny_engine(micro_tokens=18))
        [thread] = set(backend._engine_threads.values())
        between, has_come = thread._between, Event()

        def wait_and_go_on() -> None:
            if is_greedy and is_polite and thread._training[-1].owner == "anna":
                assert has_come.wait(30)
            between()

        thread._executor.worker.between_micro_batches = wait_and_go_on
        anna, bob = BackendClient(backend), BackendClient(backend, "bob")
        for client in (anna, bob):
            client.make()
        if is_greedy:
            long = anna.send(1, forward_backward(anna.run, 1, data(lengths=[9] * 40)))
        if is_polite:
            bob.gradients(1, seed=1)
            step = bob.step(2)
            has_come.set()
            assert isinstance(bob.wait(step), JsonResult)
            bob.save_weights(3, "after")
        if is_greedy:
            assert not isinstance(anna.wait(long, 120), (Pending, RequestFailure))
            assert isinstance(anna.do(2, OptimStep(ADAM)), JsonResult)
            anna.save_weights(3, "after")
        clients = [client for client, is_there in ((anna, is_greedy), (bob, is_polite)) if is_there]
        hashes = {one.owner: counters(tmp_path, one.run, "after")["weights_sha256"] for one in clients}
        backend.close()
        return hashes

    together = run(is_greedy=True, is_polite=True)
    assert finished.index(("bob", 2)) < finished.index(("anna", 1))
    assert together == run(is_greedy=True, is_polite=False) | run(is_greedy=False, is_polite=True)


def test_an_adapter_in_use_is_not_evicted_by_what_runs_in_between(new_server: ServerFactory) -> None:
    backend = new_server(engine=tiny_engine(micro_tokens=18), live_policies=1)
    anna, bob = BackendClient(backend), BackendClient(backend, "bob")
    anna.make()
    long = anna.send(1, forward_backward(anna.run, 1, data(lengths=[9] * 400)))
    bob.make()
    bob.gradients(1)
    assert isinstance(bob.wait(bob.step(2)), JsonResult)
    assert not isinstance(anna.wait(long, 120), (Pending, RequestFailure))
    assert isinstance(anna.do(2, OptimStep(ADAM)), JsonResult)


def test_sampling_goes_on_beside_a_long_request_of_the_same_owner(new_server: ServerFactory) -> None:
    backend = new_server(engine=tiny_engine(micro_tokens=18))
    anna = BackendClient(backend)
    anna.make()
    long = anna.send(1, forward_backward(anna.run, 1, data(lengths=[9] * 600)))
    sampler = backend.sampling.create_sampler("anna", anna.session, 1, "tiny/model")
    params = SamplingParams(max_tokens=8, stop=[])
    request, _ = backend.sampling.sample("anna", sampler, 1, ModelInput([1, 2]), 4, params)
    assert not isinstance(anna.wait(request), (Pending, RequestFailure))
    assert isinstance(asyncio.run(backend.result("anna", long, 0)), Pending)
    anna.wait(long, 120)


def test_owners_share_a_step_where_it_takes_little_longer_with_their_rows() -> None:
    on_cpu, on_gpu = StepTimes(), StepTimes()
    for rows in (8, 16, 400):
        for times, seconds in ((on_cpu, rows * 0.001), (on_gpu, 0.02)):
            times.add(rows, seconds)
            times.add(rows, 9.0)  # computed a long prompt too
            times.add(rows, seconds)
    rows = {"polite": 8, "greedy": 390, "small": 1}
    assert on_gpu.choose_owners(rows) == {"polite", "greedy", "small"}
    assert on_cpu.choose_owners(rows) == {"polite", "small"}
    assert on_cpu.choose_owners({"greedy": 390, "polite": 8}) == {"greedy", "polite"}
    nothing_measured = StepTimes()
    assert nothing_measured.choose_owners(rows) == {"polite"}
    nothing_measured.add(8, 0.008)
    assert nothing_measured.choose_owners(rows) == {"polite", "greedy", "small"}


@pytest.mark.parametrize("slower", [1.0, 20.0])
def test_a_few_rows_do_not_wait_for_the_steps_of_many(new_server: ServerFactory, slower: float) -> None:
    """Where 60 rows take 20 times as long as 2, the owner of 2 gets steps without them, and joins theirs."""
    backend = new_server(engine=tiny_engine())
    [thread] = set(backend._engine_threads.values())
    thread._step_times.add = lambda rows, seconds: None  # what was measured stays
    for rows, seconds in ((2, 0.001), (60, 0.001 * slower), (64, 0.001 * slower)):
        thread._step_times._seconds[rows.bit_length()].append(seconds)
    steps: list[set[str]] = []
    advance, both_there = thread._engine.advance, Event()

    def note(chosen: Any) -> Any:
        assert both_there.wait(60)
        rows = thread._engine._sampler.scheduler.rows
        before = {row: len(row.tokens) for row in rows}
        ended = advance(chosen)
        owners = {request: sampling.owner for request, sampling in thread._running.items()}
        steps.append({owners[row.request] for row, length in before.items() if len(row.tokens) > length})
        return ended

    thread._engine.advance = note  # type: ignore[method-assign]
    clients = {owner: BackendClient(backend, owner) for owner in ("anna", "bob")}
    for client in clients.values():
        client.make()
    requests: list[tuple[BackendClient, str]] = []
    for owner, count, length in (("anna", 60, 60), ("bob", 2, 50)):
        sampler = backend.sampling.create_sampler(owner, clients[owner].session, 1, "tiny/model")
        params = SamplingParams(max_tokens=length, stop=[], seed=1)
        request, _ = backend.sampling.sample(owner, sampler, 1, ModelInput([1, 2]), count, params)
        requests.append((clients[owner], request))
    both_there.set()
    for client, request in requests:
        assert not isinstance(client.wait(request, 120), (Pending, RequestFailure))
    assert ({"bob"} in steps) == (slower > 1) and {"anna", "bob"} in steps


@pytest.mark.parametrize("seconds", [0.01, 1.0])
def test_only_a_short_step_of_sampling_goes_on_while_an_owner_is_waited_for(
    new_server: ServerFactory, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = new_server(engine=tiny_engine())
    [thread] = set(backend._engine_threads.values())
    thread._step_times.add(4, seconds)
    thread._step_times.add = lambda rows, seconds: None  # what was measured stays
    found, waited = iter([("bob", 0.001)] * 3), list[str]()
    monkeypatch.setattr(OwnerClock, "find_awaited", lambda *_: next(found, None))
    monkeypatch.setattr(thread, "_wait_for", lambda owner, seconds: waited.append(owner))
    anna = BackendClient(backend)
    sampler = backend.sampling.create_sampler("anna", anna.session, 1, MODEL)
    params = SamplingParams(max_tokens=8, stop=[], seed=1)
    request, _ = backend.sampling.sample("anna", sampler, 1, ModelInput([1, 2]), 4, params)
    assert not isinstance(anna.wait(request), (Pending, RequestFailure))
    assert waited == ([] if seconds < 0.1 else ["bob"] * 3)
