"""Sessions over a scripted endpoint and a real store: the loop, its records, events, limits and learning."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlvr.service.loop.credit import DISCOUNT
from rlvr.service.loop.jobs import NoGenerator
from rlvr.service.loop.ratings import rate
from rlvr.service.loop.strategy_policy import STATE
from rlvr.service.options import Request, TrainingConfig
from rlvr.service.problems import Problem
from rlvr.service.settings import Limits, TextEndpoint
from rlvr.store import open_store
from rlvr.store.records import Session, Status
from tests.sessions_here import CODE, RIGHT, opened, settings_of, worked
from tests.text_endpoint import Asked, Said, serving


def second_time_right(asked: Asked) -> str:
    """Wrong at first; right once a review is in the prompt."""
    return RIGHT if "eview" in asked.prompt else "def double(x):\n    return x\n"


def test_a_wrong_answer_is_reviewed_and_put_right_and_both_are_in_the_store(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with opened(settings_of(tmp_path, server.plain_url)) as sessions:
                session, answer = await worked(sessions)
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


def test_the_verifiers_without_knowledge_are_measured_where_the_task_says_what_is_right(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with opened(settings_of(tmp_path, server.plain_url)) as sessions:
                _, code = await worked(sessions)
                _, prose = await worked(sessions, Request("say", "Say something kind."))
                measured = await asyncio.to_thread(sessions.verifier_accuracy)
        # `draft` finds nothing wrong with either program: right about one of two.
        assert code["metrics"]["verifier_accuracy"] == 0.5 == measured
        assert prose["metrics"]["verifier_accuracy"] is None

    asyncio.run(run())


def test_an_answer_passed_where_it_is_right_however_sure_the_verifiers_are_of_it(tmp_path: Path):
    """Rules on form weigh nine tenths: they are content with the wrong answer, and the truth is not."""

    async def run() -> None:
        with serving(lambda asked: "The answer is 100.") as server:
            async with opened(settings_of(tmp_path, server.plain_url)) as sessions:
                verifiers = (("draft", 0.9, {}), ("math", 0.1, {}))
                request = Request("squares", "What is 12 * 12?", answer="144", verifiers=verifiers)
                session, answer = await worked(sessions, request)
                [row] = sessions.store.experiences(session_id=session.id)
        assert answer["confidence"] == 0.9 and session.converged
        assert row.outcome == "failed" and answer["metrics"]["verifier_accuracy"] == 0.0

    asyncio.run(run())


def test_several_episodes_of_a_session_are_played_and_drawn_apart(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: Said(RIGHT if asked.number == 2 else "Wrong", delay=0.05)) as server:
            settings = settings_of(tmp_path, llm=TextEndpoint(server.chat_url, "m"))
            async with opened(settings) as sessions:
                session, answer = await worked(sessions, samples=3, max_iterations=1)
                rows = sessions.store.experiences(session_id=session.id)
        assert {(row.sample, row.iteration) for row in rows} == {(0, 1), (1, 1), (2, 1)}
        assert all(row.gain is not None for row in rows)
        assert (answer["final_solution"], len(answer["training_data"])) == (RIGHT, 1)
        assert len({asked.body["seed"] for asked in server.asked}) == 3

    asyncio.run(run())


def test_what_does_not_change_has_converged_only_where_nobody_knows_better(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: "Too short") as server:
            async with opened(settings_of(tmp_path, server.plain_url)) as sessions:
                prose, _ = await worked(sessions, Request("say", "Say something kind."))
                code, _ = await worked(sessions)
        assert (prose.iterations, prose.converged, prose.convergence_iteration) == (2, True, 2)
        assert (code.iterations, code.converged, code.convergence_iteration) == (4, False, None)
        # What is told is the threshold that held.
        assert [one.metrics["convergence_threshold"] for one in (prose, code)] == [0.01, 0.0]

    asyncio.run(run())


def test_evaluate_measures_and_teaches_nothing(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with opened(settings_of(tmp_path, server.plain_url)) as sessions:
                session, _ = await worked(sessions, learn=False)
                told = await sessions.evaluation(session)
                rows = sessions.store.experiences(session_id=session.id)
        assert [row.gain for row in rows] == [None, None] and session.metrics["training_loss"] is None
        found = told["detailed_metrics"]
        assert found["total_iterations"] == 2 and found["error_frequency"] == {"assertion": 1}
        assert (found["error_reduction_rate"], found["reward_trend"], found["tokens_generated"]) == (1.0, 1.6, 10)
        assert found["confidence_improvement"] == 1.0 and found["duration_seconds"] > 0
        assert told["summary"].startswith("solved: confidence 1.00 after 2 iterations, converged at iteration 2")

    asyncio.run(run())


def test_events_are_the_same_as_they_happen_and_afterwards(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with opened(settings_of(tmp_path, server.plain_url)) as sessions:
                begun = await sessions.start(CODE, "me")
                heard = [event async for event in sessions.watch(begun.id)]
                read = [event async for event in sessions.watch(begun.id)]
        assert [event["event"] for event in heard] == ["status", "status", "iteration", "iteration", "end"]
        assert heard == read
        assert heard[2]["verifier_feedback"]["error_types"] == ["assertion"]
        assert datetime.fromisoformat(heard[2]["timestamp"]).tzinfo is not None  # as everywhere else, no bare number
        assert heard[-1]["final_solution"] == RIGHT

    asyncio.run(run())


def test_more_sessions_than_may_run_wait_and_more_than_may_wait_are_refused(tmp_path: Path):
    async def run() -> None:
        slow = Said(RIGHT, delay=0.3)
        with serving(lambda asked: slow) as server:
            limits = Limits(sessions=2, queue=1)
            async with opened(settings_of(tmp_path, server.plain_url, limits=limits)) as sessions:
                begun = [await sessions.start(CODE, "me") for _ in range(3)]
                with pytest.raises(Problem) as refused:
                    await sessions.start(CODE, "me")
                ended = [await sessions.wait(one.id) for one in begun]
        assert (refused.value.status, refused.value.code, refused.value.retry_after) == (429, "busy", 5)
        assert {one.status for one in ended} == {Status.DONE}
        assert server.most_at_once == 2

    asyncio.run(run())


def test_many_that_come_at_once_get_no_more_room_than_there_is(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: Said(RIGHT, delay=0.3)) as server:
            limits = Limits(sessions=2, queue=1)
            async with opened(settings_of(tmp_path, server.plain_url, limits=limits)) as sessions:
                came = await asyncio.gather(*(sessions.start(CODE, "me") for _ in range(12)), return_exceptions=True)
                begun = [one for one in came if isinstance(one, Session)]
                ended = [await sessions.wait(one.id) for one in begun]
        assert len(ended) == 3 and {one.status for one in ended} == {Status.DONE}
        assert {one.code for one in came if isinstance(one, Problem)} == {"busy"}

    asyncio.run(run())


def test_an_answer_is_not_worth_more_to_the_schedule_for_being_late(tmp_path: Path):
    """1.5 for a session whose second answer is right, although that one's reward is 1.6."""

    async def run() -> None:
        training = TrainingConfig(max_iterations=4, min_experiences_for_training=1)
        with serving(second_time_right) as server:
            async with opened(settings_of(tmp_path, server.plain_url, training=training)) as sessions:
                _, answer = await worked(sessions)
                state = sessions.store.state(STATE)
        assert answer["training_data"][-1]["reward"] == 1.6
        assert state is not None and state[0]["plateau"]["total"] == 1.5

    asyncio.run(run())


def test_a_rating_reaches_what_the_strategies_learn_from(tmp_path: Path):
    async def run() -> None:
        with serving(second_time_right) as server:
            async with opened(settings_of(tmp_path, server.plain_url)) as sessions:
                session, _ = await worked(sessions)
                evaluated, _ = await worked(sessions, learn=False)
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


@pytest.mark.parametrize("queued", [False, True])
def test_a_session_is_cancelled_within_its_slow_iteration_or_in_the_queue(tmp_path: Path, queued: bool):
    async def run() -> None:
        with serving(lambda asked: Said(RIGHT, delay=30)) as server:
            limits = Limits(sessions=1, queue=2)
            async with opened(settings_of(tmp_path, server.plain_url, limits=limits)) as sessions:
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


def test_another_instance_cancels_a_session_after_the_iteration_that_it_is_at(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: Said("Wrong", delay=0.1)) as server:
            settings = settings_of(tmp_path, server.plain_url, training=TrainingConfig(max_iterations=50))
            async with (
                opened(settings) as sessions,
                opened(settings, store=sessions.store, generator=NoGenerator(), instance="there") as other,
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
        ({"verifiers": (("judge", 1.0, {"base_url": "http://169.254.169.254/v1"}),)}, "'base_url' cannot be set"),
        ({"verifiers": (("judge", 1.0, {}),)}, "no judge is set up"),
        ({"verifiers": (("code", 1.0, {"sandbox": {"allow_unsafe": True}}),)}, "'sandbox' cannot be set"),
        ({"tests": ("",)}, "empty test"),
    ],
)
def test_what_a_request_may_not_ask_for_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], words: str
):
    async def run() -> None:
        async with opened(settings_of(tmp_path), generator=NoGenerator()) as sessions:
            with pytest.raises(Problem, match=words) as refused:
                await worked(sessions, **changes)
            assert (refused.value.status, sessions.store.sessions()) == (422, [])

    asyncio.run(run())


def test_a_judge_on_the_generators_endpoint_is_flagged_and_its_words_reach_the_next_prompt(tmp_path: Path):
    def script(asked: Asked) -> Said | str:
        if "careful examiner" not in asked.prompt:
            return f"Answer number {asked.number}."
        word = asked.prompt.split('"id": "')[1].split('"')[0]
        return f'{{"id": "{word}", "reason": "It names no reason.", "score": 4}}'

    async def run() -> None:
        with serving(script) as server:
            one = TextEndpoint(server.chat_url, "same")
            async with opened(settings_of(tmp_path, llm=one, judge=one)) as sessions:
                _, answer = await worked(sessions, Request("why", "Why is the sky blue?", max_iterations=2))
        # .3 x 1 by the rules and .7 x .4 by the judge.
        assert answer["confidence"] == pytest.approx(0.58)
        assert answer["metrics"]["self_judging"] is True
        assert answer["metrics"]["verified_by"] == ["draft", "judge"]
        assert any("It names no reason." in asked.prompt for asked in server.asked if "examiner" not in asked.prompt)

    asyncio.run(run())


def test_the_strategy_that_works_is_found(tmp_path: Path):
    """The endpoint answers right where it is asked to think step by step first, and only there."""

    def script(asked: Asked) -> str:
        return "The answer is 144." if "step by step first" in asked.prompt else "The answer is 100."

    async def run() -> None:
        training = TrainingConfig(max_iterations=1, min_experiences_for_training=20, learning_rate=0.003)
        with serving(script) as server:
            settings = settings_of(tmp_path, server.plain_url, training=training, limits=Limits(sessions=4, queue=400))
            async with opened(settings) as sessions:
                request = Request("squares", "What is 12 * 12?", answer="144")
                before = sessions.generator.learning()["strategies"]["first"]["stepwise"]
                begun = [await sessions.start(request, "me") for _ in range(200)]
                ended = [await sessions.wait(one.id) for one in begun]
                after = sessions.generator.learning()
            # A later life goes on from there, to the bit.
            async with opened(settings) as sessions:
                again = sessions.generator.learning()
        assert before == pytest.approx(0.25)
        assert after["strategies"]["first"]["stepwise"] > 0.8
        assert again == after
        assert sum(s.final_confidence == 1.0 for s in ended[-50:]) > 30
        assert ended[-1].metrics["training_loss"] is not None

    asyncio.run(run())


def test_two_lives_share_what_is_in_the_store_and_the_seed_fixes_the_draws(tmp_path: Path):
    async def run() -> list[str]:
        with serving(second_time_right) as server:
            async with opened(settings_of(tmp_path, server.plain_url)) as sessions:
                session, _ = await worked(sessions, seed=3, max_iterations=3)
                return [row.action for row in sessions.store.experiences(session_id=session.id)]

    first, second = asyncio.run(run()), asyncio.run(run())
    assert first == second
    store = open_store(f"sqlite:///{tmp_path / 'service.sqlite'}")
    assert store.count(task_id="double") == 4
    store.close()
