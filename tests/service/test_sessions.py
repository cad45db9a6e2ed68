"""Sessions over a scripted endpoint and a real store: the loop, its records, events, limits and learning."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlvr.service.learning.credit import DISCOUNT
from rlvr.service.learning.strategy_policy import rate
from rlvr.service.service_options import SessionRequest, TrainingConfig
from rlvr.service.sessions.jobs import NoGenerator
from rlvr.service.settings import ServiceLimits, TextEndpoint
from rlvr.store import open_store
from rlvr.store.records import Session, Status
from rlvr.web.errors import HttpProblem
from tests.kit.session_fixtures import CODE, RIGHT, open_sessions, run_session, settings_of
from tests.kit.text_endpoint import EndpointReply, EndpointRequest, serving


def second_time_right(asked: EndpointRequest) -> str:
    """A wrong answer first, and the right one when the prompt has a review."""
    return RIGHT if "eview" in asked.prompt else "def double(x):\n    return x\n"


def test_a_wrong_answer_is_reviewed_and_corrected_and_both_are_stored(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                session, answer = await run_session(sessions)
                rows = sessions.store.experiences(session_id=session.id)
                stored = sessions.store.session(session.id)
        assert session.status is Status.DONE and session.converged
        assert (answer["final_solution"], answer["confidence"], answer["iterations"]) == (RIGHT, 1.0, 2)
        first, second = answer["training_data"]
        assert first["verifier_feedback"]["error_types"] == ["assertion"]
        assert first["verifier_feedback"]["confidence"] == 0.0
        # 0 - .1 for its error, not below 0; then 1 + .3 + .2 + .1 for being a second iteration.
        assert [first["reward"], second["reward"]] == [0.0, 1.6]
        metrics = answer["metrics"]
        assert (metrics["total_reward"], metrics["average_reward"]) == (1.6, 0.8)
        assert (metrics["improvement_rate"], metrics["convergence_iteration"]) == (1.0, 2)
        assert metrics["policy_entropy"] > 1 and metrics["training_loss"] is None  # nothing learned from two answers
        assert "assert double" not in second["prompt"]  # a hidden test is never told
        assert [(row.iteration, row.outcome) for row in rows] == [(1, "failed"), (2, "passed")]
        assert rows[0].action and rows[0].action_logprob is not None
        # What the first choice led to, discounted, and what the second one brought.
        assert [row.gain for row in rows] == pytest.approx([DISCOUNT * 1.5, 1.5])
        assert stored is not None and stored.final_solution == RIGHT and stored.metrics == session.metrics

    asyncio.run(run())


def test_opinions_are_measured_against_the_tasks_answer(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                _, code = await run_session(sessions)
                _, prose = await run_session(sessions, SessionRequest("say", "Say something kind."))
                measured = await asyncio.to_thread(sessions.verifier_accuracy)
        # `draft` finds nothing wrong with either program: right about one of two.
        assert code["metrics"]["verifier_accuracy"] == 0.5 == measured
        assert prose["metrics"]["verifier_accuracy"] is None

    asyncio.run(run())


def test_rules_on_form_do_not_outvote_the_truth(tmp_path: Path):
    """They weigh nine tenths and accept the wrong answer; the truth does not."""

    async def run() -> None:
        with serving(lambda asked: "The answer is 100.") as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                verifiers = (("draft", 0.9, {}), ("math", 0.1, {}))
                request = SessionRequest("squares", "What is 12 * 12?", answer="144", verifiers=verifiers)
                session, answer = await run_session(sessions, request)
                rows = sessions.store.experiences(session_id=session.id)
        assert answer["confidence"] == 0.0 and not session.converged
        assert {row.outcome for row in rows} == {"failed"} and answer["metrics"]["verifier_accuracy"] == 0.0

    asyncio.run(run())


def test_episodes_of_a_session_have_different_draws(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: EndpointReply(RIGHT if asked.number == 2 else "Wrong", delay=0.05)) as server:
            settings = settings_of(tmp_path, llm=TextEndpoint(server.chat_url, "m"))
            async with open_sessions(settings) as sessions:
                session, answer = await run_session(sessions, samples=3, max_iterations=1)
                rows = sessions.store.experiences(session_id=session.id)
        assert {(row.sample, row.iteration) for row in rows} == {(0, 1), (1, 1), (2, 1)}
        assert all(row.gain is not None for row in rows)
        assert (answer["final_solution"], len(answer["training_data"])) == (RIGHT, 1)
        assert len({asked.body["seed"] for asked in server.asked}) == 3

    asyncio.run(run())


def test_an_unverified_session_ends_when_rules_on_form_have_no_new_objection(tmp_path: Path):
    """Further answers would be asked for without a word on how to improve. Nothing is learned from any."""

    def script(asked: EndpointRequest) -> str:
        return "Too short" if "eview" not in asked.prompt else "A longer answer that has nothing wrong in its form."

    async def run() -> None:
        training = TrainingConfig(max_iterations=4, min_experiences_for_training=1)
        with serving(script) as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url, training=training)) as sessions:
                mended, answer = await run_session(sessions, SessionRequest("say", "Say something kind."))
                server.script = lambda asked: "Too short"
                same, _ = await run_session(sessions, SessionRequest("say", "Say something kind."))
                rows = sessions.store.experiences(session_id=mended.id)
                updates, buffer = sessions.generator.learning()["updates"], sessions.store.buffer()
        assert (mended.iterations, mended.final_confidence, mended.converged) == (2, None, False)
        assert answer["final_solution"] == rows[1].generated_output  # the one with the better form
        assert same.iterations == 2 and same.status is Status.DONE
        assert [(row.outcome, row.reward, row.gain) for row in rows] == [("unverified", None, None)] * 2
        assert (updates, buffer.ready) == (0, 0)

    asyncio.run(run())


def test_unchanged_answers_converge_only_without_a_known_truth(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: "Too short") as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                request = SessionRequest("say", "Say something kind.", verifiers=(("draft", 1.0, {}),))
                prose, _ = await run_session(sessions, request)
                code, _ = await run_session(sessions)
        assert (prose.iterations, prose.converged, prose.convergence_iteration) == (2, True, 2)
        assert (code.iterations, code.converged, code.convergence_iteration) == (4, False, None)
        # What is told is the threshold that held.
        assert [one.metrics["convergence_threshold"] for one in (prose, code)] == [0.01, 0.0]

    asyncio.run(run())


def test_evaluate_measures_without_training(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                session, _ = await run_session(sessions, learn=False)
                told = await sessions.evaluation(session)
                rows = sessions.store.experiences(session_id=session.id)
        assert [row.gain for row in rows] == [None, None] and session.metrics["training_loss"] is None
        found = told["detailed_metrics"]
        assert found["total_iterations"] == 2 and found["error_frequency"] == {"assertion": 1}
        assert (found["error_reduction_rate"], found["reward_trend"], found["tokens_generated"]) == (1.0, 1.6, 10)
        assert found["confidence_improvement"] == 1.0 and found["duration_seconds"] > 0
        assert told["summary"].startswith("solved: confidence 1.00 after 2 iterations, converged at iteration 2")

    asyncio.run(run())


def test_live_and_stored_events_are_the_same(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                begun = await sessions.start(CODE, "me")
                heard = [event async for event in sessions.watch(begun.id)]
                read = [event async for event in sessions.watch(begun.id)]
        assert [event["event"] for event in heard] == ["status", "status", "iteration", "iteration", "end"]
        assert heard == read
        assert heard[2]["verifier_feedback"]["error_types"] == ["assertion"]
        assert datetime.fromisoformat(heard[2]["timestamp"]).tzinfo is not None  # as everywhere else, no bare number
        assert heard[-1]["final_solution"] == RIGHT

    asyncio.run(run())


def test_sessions_wait_for_a_slot_and_are_refused_when_the_queue_is_full(tmp_path: Path):
    async def run() -> None:
        slow = EndpointReply(RIGHT, delay=0.3)
        with serving(lambda asked: slow) as server:
            limits = ServiceLimits(sessions=2, queue=1)
            async with open_sessions(settings_of(tmp_path, server.plain_url, limits=limits)) as sessions:
                begun = [await sessions.start(CODE, "me") for _ in range(3)]
                with pytest.raises(HttpProblem) as refused:
                    await sessions.start(CODE, "me")
                ended = [await sessions.wait(one.id) for one in begun]
        assert (refused.value.status, refused.value.code, refused.value.retry_after) == (429, "busy", 5)
        assert {one.status for one in ended} == {Status.DONE}
        assert server.max_concurrent == 2

    asyncio.run(run())


def test_simultaneous_requests_do_not_exceed_the_limit(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: EndpointReply(RIGHT, delay=0.3)) as server:
            limits = ServiceLimits(sessions=2, queue=1)
            async with open_sessions(settings_of(tmp_path, server.plain_url, limits=limits)) as sessions:
                came = await asyncio.gather(*(sessions.start(CODE, "me") for _ in range(12)), return_exceptions=True)
                begun = [one for one in came if isinstance(one, Session)]
                ended = [await sessions.wait(one.id) for one in begun]
        assert len(ended) == 3 and {one.status for one in ended} == {Status.DONE}
        assert {one.code for one in came if isinstance(one, HttpProblem)} == {"busy"}

    asyncio.run(run())


@pytest.mark.parametrize("greedy", ["a key", ""])
def test_a_session_that_a_client_waits_for_passes_the_background_sessions_of_others(tmp_path: Path, greedy: str):
    """Those of another key, or where there are no keys: they leave it a slot, a request to the model and a place."""

    def script(asked: EndpointRequest) -> EndpointReply:
        return EndpointReply(RIGHT, delay=30.0 if "Dawdle" in asked.prompt else 0.0)

    async def run() -> None:
        with serving(script) as server:
            limits = ServiceLimits(sessions=4, queue=4)
            async with open_sessions(settings_of(tmp_path, server.plain_url, limits=limits), grace_s=0.0) as sessions:
                slow = replace(CODE, prompt="Dawdle: write double(x), which returns twice x.", samples=8)
                for _ in range(6):  # three quarters of the places
                    await sessions.start(slow, greedy, is_background=True)
                with pytest.raises(HttpProblem, match="6 of your sessions"):
                    await sessions.start(slow, greedy, is_background=True)
                while not server.asked:
                    await asyncio.sleep(0.01)
                session = await sessions.start(CODE, "another" if greedy else "")
                ended = await asyncio.wait_for(sessions.wait(session.id), 20)
        assert ended.status is Status.DONE

    asyncio.run(run())


def test_a_rating_reaches_the_statistics_of_the_strategies(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                session, _ = await run_session(sessions)
                evaluated, _ = await run_session(sessions, learn=False)
                store = sessions.store
                for one in (session, evaluated):
                    [first, _] = store.experiences(session_id=one.id)
                    assert rate(store, first.id or 0, "me", 1.0) is not None
                learned, not_learned = (
                    [e.gain for e in store.experiences(session_id=one.id)] for one in (session, evaluated)
                )
                assert rate(store, 999, "me", 1.0) is None
        # A fifth of 2 for the wrong answer, which was worth 0; so the second one brought 0.4 less.
        assert learned == pytest.approx([0.4 + DISCOUNT * 1.1, 1.1]) and not_learned == [None, None]

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("queued", [False, True])
def test_a_session_is_cancelled_in_a_slow_iteration_or_in_the_queue(tmp_path: Path, queued: bool):
    async def run() -> None:
        with serving(lambda asked: EndpointReply(RIGHT, delay=30)) as server:
            limits = ServiceLimits(sessions=1, queue=2)
            async with open_sessions(settings_of(tmp_path, server.plain_url, limits=limits)) as sessions:
                first = await sessions.start(CODE, "me")
                second = await sessions.start(CODE, "me")
                while not server.asked:
                    await asyncio.sleep(0.01)
                chosen = second if queued else first
                before = time.monotonic()
                await sessions.cancel(chosen.id)
                assert time.monotonic() - before < 10
                ended = await sessions.wait(chosen.id)
                stored = sessions.store.session(chosen.id)
                await sessions.cancel(first.id)
        assert ended.status is Status.CANCELLED and ended.error is not None and ended.error["code"] == "cancelled"
        assert stored is not None and stored.status is Status.CANCELLED

    asyncio.run(run())


def test_another_instance_cancels_a_session_after_its_current_iteration(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: EndpointReply("Wrong", delay=0.1)) as server:
            settings = settings_of(tmp_path, server.plain_url, training=TrainingConfig(max_iterations=50))
            async with (
                open_sessions(settings) as sessions,
                open_sessions(settings, store=sessions.store, generator=NoGenerator(), instance="there") as other,
            ):
                begun = await sessions.start(CODE, "me")
                while len(server.asked) < 2:  # the first answer is on its way into the store, or there
                    await asyncio.sleep(0.01)
                await other.cancel(begun.id)
                ended = await sessions.wait(begun.id)
                stored = sessions.store.session(begun.id)
        assert len(server.asked) < 50
        assert ended.status is Status.CANCELLED and stored is not None and stored.status is Status.CANCELLED
        assert stored.final_solution == "Wrong" and stored.error == ended.error

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verifiers": (("os:system", 1.0, {}),)}, "unknown here"),
        ({"verifiers": (("json:loads", 1.0, {}),)}, "unknown here"),
        ({"verifiers": (("composite", 1.0, {"rewards": []}),)}, "give its parts"),
        ({"verifiers": (("judge", 1.0, {"base_url": "http://169.254.169.254/v1"}),)}, "option 'base_url'; it takes"),
        ({"verifiers": (("judge", 1.0, {}),)}, "this service has no judge"),
        ({"verifiers": (("code", 1.0, {"sandbox": {"allow_unsafe": True}}),)}, "option 'sandbox'; it takes"),
        ({"tests": ("",)}, "empty test"),
    ],
)
def test_a_forbidden_request_is_refused_before_anything_is_written(tmp_path: Path, changes: dict[str, Any], words: str):
    async def run() -> None:
        async with open_sessions(settings_of(tmp_path), generator=NoGenerator()) as sessions:
            with pytest.raises(HttpProblem, match=words) as refused:
                await run_session(sessions, **changes)
            assert (refused.value.status, sessions.store.sessions()) == (422, [])

    asyncio.run(run())


def test_a_self_judging_judge_is_flagged_and_its_feedback_reaches_the_next_prompt(tmp_path: Path):
    def script(asked: EndpointRequest) -> EndpointReply | str:
        if "careful examiner" not in asked.prompt:
            return f"Answer number {asked.number}."
        word = asked.prompt.split('"id": "')[1].split('"')[0]
        return f'{{"id": "{word}", "reason": "It names no reason.", "score": 4}}'

    async def run() -> None:
        with serving(script) as server:
            one = TextEndpoint(server.chat_url, "same")
            async with open_sessions(settings_of(tmp_path, llm=one, judge=one)) as sessions:
                _, answer = await run_session(sessions, SessionRequest("why", "Why is the sky blue?", max_iterations=2))
                request = SessionRequest("why", "Why?", verifiers=(("draft", 0.3, {}), ("judge", 0.7, {})))
                _, named = await run_session(sessions, request, max_iterations=1)
        assert answer["confidence"] is None and answer["metrics"]["verified_by"] == []
        assert named["confidence"] == pytest.approx(0.58)  # .3 x 1 by the rules and .7 x .4 by the judge
        assert named["metrics"]["verified_by"] == ["draft", "judge"]
        for one in (answer, named):
            assert one["metrics"]["self_judging"] is True
            assert "the judge is the model that generates" in one["warnings"][-1]
        assert any("It names no reason." in asked.prompt for asked in server.asked if "examiner" not in asked.prompt)

    asyncio.run(run())


@pytest.mark.slow
def test_the_best_strategy_is_learned_from_sessions(tmp_path: Path):
    """The endpoint answers correctly only if the prompt asks to think step by step first."""

    def script(asked: EndpointRequest) -> str:
        return "The answer is 144." if "step by step first" in asked.prompt else "The answer is 100."

    async def run() -> None:
        training = TrainingConfig(max_iterations=1, min_experiences_for_training=20, learning_rate=0.003)
        with serving(script) as server:
            settings = settings_of(
                tmp_path, server.plain_url, training=training, limits=ServiceLimits(sessions=4, queue=400)
            )
            async with open_sessions(settings) as sessions:
                request = SessionRequest("squares", "What is 12 * 12?", answer="144")
                before = sessions.generator.learning()["strategies"]["first"]["stepwise"]
                begun = [await sessions.start(request, "me") for _ in range(200)]
                ended = [await sessions.wait(one.id) for one in begun]
                after = sessions.generator.learning()
            # A later life goes on from there, to the bit.
            async with open_sessions(settings) as sessions:
                again = sessions.generator.learning()
        assert before == pytest.approx(0.25)
        assert after["strategies"]["first"]["stepwise"] > 0.8
        assert again == after
        assert sum(s.final_confidence == 1.0 for s in ended[-50:]) > 30
        assert ended[-1].metrics["training_loss"] is not None

    asyncio.run(run())


def test_a_restart_uses_the_stored_policy_and_the_seed_fixes_the_draws(tmp_path: Path):
    async def run() -> list[str]:
        with serving(second_time_right) as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                session, _ = await run_session(sessions, seed=3, max_iterations=3)
                return [row.action for row in sessions.store.experiences(session_id=session.id)]

    first, second = asyncio.run(run()), asyncio.run(run())
    assert first == second
    store = open_store(f"sqlite:///{tmp_path / 'service.sqlite'}")
    assert store.count(task_id="double") == 4
    store.close()
