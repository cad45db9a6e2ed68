"""An engine generator over a table of logits that learns: groups, batches, steps, saved states, failures."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from rlvr.algorithms.registry import ALGORITHMS
from rlvr.algorithms.terms.overlong import Overlong
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.files import lock_file
from rlvr.core.types import Trajectory
from rlvr.service.generators.engine_generator import EngineGenerator, EngineOptions
from rlvr.service.learning import session_learner
from rlvr.service.learning.credit import DISCOUNT
from rlvr.service.learning.session_learner import POINTER, RATE, WARM_UP, WINDOW, LearnerOptions, SessionLearner
from rlvr.service.models.served_models import ServedModel
from rlvr.service.service_options import SessionRequest
from rlvr.service.sessions.session_rewards import assign_rewards, session_advantages
from rlvr.service.settings import ServiceLimits
from rlvr.store.records import Status
from tests.kit.session_fixtures import open_sessions, run_session, settings_of

WORDS = ["yes", "no", "perhaps", "never"]
ASK = SessionRequest("yes", "perhaps yes", answer="yes", verifiers=(("exact_match", 1.0, {}), ("draft", 0.0, {})))


@pytest.fixture(autouse=True)
def release_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unlock the folders of learners that a test does not close."""
    locks: list[IO[str] | None] = []

    def lock(path: Path) -> IO[str] | None:
        locks.append(lock_file(path))
        return locks[-1]

    monkeypatch.setattr(session_learner, "lock_file", lock)
    yield
    for file in locks:
        if file is not None:
            file.close()


def table(folder: Path, rate: float = 300.0) -> MockTrainingClient:
    return MockTrainingClient(TablePolicy(WORDS, seed=1, rate=rate), folder)


def engine(state: Path, *, samples: int = 4, batch_size: int = 8, client: Any = None, **learner: Any):
    return EngineGenerator(
        lambda folder, say: ServedModel(client or table(folder), "table", "local"),
        state / "policy",
        EngineOptions(samples=samples, max_tokens=1),
        LearnerOptions(batch_size=batch_size, **learner),
    )


async def ready(generator: EngineGenerator) -> EngineGenerator:
    while generator.health()["state"] == "loading":
        await asyncio.sleep(0.01)
    return generator


def group(id: str, rewards: list[float | None], tokens: tuple[int, ...] = (2,)) -> list[Trajectory]:
    return [
        Trajectory("p", [3], "yes", list(tokens), [-1.4] * len(tokens), reward=r, group_id=id, rollout_id=f"{id}/{i}")
        for i, r in enumerate(rewards)
    ]


def test_a_session_is_a_group_of_episodes_and_the_best_answer_is_the_solution(tmp_path: Path):
    async def run() -> None:
        async with open_sessions(settings_of(tmp_path), generator=engine(tmp_path, samples=6)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            session, answer = await run_session(sessions, ASK, max_iterations=2, seed=4)
            rows = sessions.store.experiences(session_id=session.id)
        assert session.status is Status.DONE
        assert {row.sample for row in rows} == set(range(6))
        assert answer["final_solution"] == "yes" and answer["confidence"] == 1.0
        assert len({row.confidence for row in rows}) == 2  # some said no
        chosen = next(row.sample for row in rows if row.confidence == 1.0)
        mine = [row.iteration for row in rows if row.sample == chosen]
        assert [e["iteration"] for e in answer["training_data"]] == mine
        assert all(len(row.tokens or []) == len(row.logprobs or []) == 1 for row in rows)
        # Each answer against the mean of the group: they cancel out.
        assert sum(row.advantage or 0.0 for row in rows) == pytest.approx(0.0) and any(row.advantage for row in rows)
        # ln 5 nats, nearly: four words and the end of a nearly uniform table.
        assert answer["metrics"]["policy_entropy"] == pytest.approx(1.6, abs=0.2)
        assert answer["metrics"]["verifier_accuracy"] is not None

    asyncio.run(run())


def test_sessions_are_learned_from_in_batches_and_a_restart_continues_bit_exactly(tmp_path: Path):
    async def life(number: int, client: MockTrainingClient) -> tuple[str, dict[str, Any]]:
        room = settings_of(tmp_path, limits=ServiceLimits(sessions=4, queue=8))
        async with open_sessions(room, generator=engine(tmp_path, client=client)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            begun = [await sessions.start(ASK, "me") for _ in range(8)] if number == 0 else []
            for one in begun:
                assert (await sessions.wait(one.id)).status is Status.DONE
        return client.policy.sha256(), sessions.generator.learning()

    fresh = table(tmp_path / "policy").policy.sha256()
    taught, learned = asyncio.run(life(0, table(tmp_path / "policy")))
    again, told_again = asyncio.run(life(1, table(tmp_path / "policy")))
    assert taught != fresh and learned["updates"] >= 1
    assert (again, told_again) == (taught, learned)


def test_the_same_seed_and_weights_give_the_same_answers(tmp_path: Path):
    async def read_log_lines(state: Path) -> list[str]:
        async with open_sessions(settings_of(state), generator=engine(state)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            session, _ = await run_session(sessions, ASK, max_iterations=1, seed=9, learn=False)
            return [e.generated_output for e in sessions.store.experiences(session_id=session.id)]

    assert asyncio.run(read_log_lines(tmp_path / "a")) == asyncio.run(read_log_lines(tmp_path / "b"))


@pytest.mark.parametrize("named", [False, True])
def test_unverified_sessions_change_no_weights_unless_the_rules_are_named(tmp_path: Path, named: bool):
    """Rules tell the words of the table apart, so a group of answers may have a signal; without a name it is none."""

    async def run() -> None:
        client = table(tmp_path / "policy")
        before = client.policy.sha256()
        rules = (("draft", 1.0, {}), ("required_words", 1.0, {"words": ["yes"]})) if named else ()
        request = SessionRequest("say", "perhaps yes", verifiers=rules)
        async with open_sessions(
            settings_of(tmp_path), generator=engine(tmp_path, samples=6, batch_size=1, client=client)
        ) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            for _ in range(4):
                session, _ = await run_session(sessions, request, max_iterations=1)
            rows = sessions.store.experiences(session_id=session.id)
        learned = sessions.generator.learning()
        assert session.status is Status.DONE
        if named:
            assert client.policy.sha256() != before and learned["updates"] > 0
        else:
            assert client.policy.sha256() == before and learned["updates"] == 0
            assert {(row.reward, row.advantage, row.outcome) for row in rows} == {(None, None, "unverified")}

    asyncio.run(run())


def test_evaluation_changes_no_weights(tmp_path: Path):
    async def run() -> None:
        client = table(tmp_path / "policy")
        before = client.policy.sha256()
        async with open_sessions(
            settings_of(tmp_path), generator=engine(tmp_path, batch_size=1, client=client)
        ) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            for _ in range(4):
                await run_session(sessions, ASK, learn=False)
        assert client.policy.sha256() == before and sessions.generator.learning()["updates"] == 0

    asyncio.run(run())


def test_a_session_that_cannot_be_played_fails_only_itself(tmp_path: Path):
    """An empty prompt has no tokens for a table; the other sessions of its batch are played."""

    async def run() -> None:
        async with open_sessions(settings_of(tmp_path), generator=engine(tmp_path)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            begun = [
                await sessions.start(SessionRequest("t", prompt, answer="yes"), "me")
                for prompt in ("perhaps yes", " ", "yes")
            ]
            ended = [await sessions.wait(one.id) for one in begun]
        assert [one.status for one in ended] == [Status.DONE, Status.FAILED, Status.DONE]
        assert ended[1].error is not None and ended[1].error["code"] == "generator_failed"
        assert "empty prompt" in ended[1].error["message"]

    asyncio.run(run())


def test_answers_that_are_played_again_after_a_failure_are_stored_once(tmp_path: Path):
    """The second turn of two sessions fails once. Each is then played alone from its first turn on, with the same
    draws, and its first answers were stored before."""

    class FailingOnce:
        def __init__(self, sampler: Any) -> None:
            self.sampler, self.fingerprint, self.calls = sampler, sampler.fingerprint, 0

        def get_tokenizer(self) -> Any:
            return self.sampler.get_tokenizer()

        def sample(self, *args: Any) -> Any:
            self.calls += 1
            if self.calls == 3:  # one call a session and turn
                raise RuntimeError("the server does not answer")
            return self.sampler.sample(*args)

    client = table(tmp_path / "policy")
    sampler = FailingOnce(client.save_weights_and_get_sampling_client())
    client.save_weights_and_get_sampling_client = lambda: sampler  # pyright: ignore[reportAttributeAccessIssue]
    both_wait = threading.Event()

    def opener(folder: Path, say: Any) -> ServedModel:
        both_wait.wait(10)
        return ServedModel(client, "table", "local")

    async def run() -> None:
        options = EngineOptions(samples=1, max_tokens=1)
        generator = EngineGenerator(opener, tmp_path / "policy", options)
        async with open_sessions(settings_of(tmp_path), generator=generator) as sessions:
            request = SessionRequest("yes", "perhaps yes", answer="absent", max_iterations=2, learn=False)
            begun = [await sessions.start(request, "me") for _ in range(2)]
            while generator._queue.qsize() < 2:
                await asyncio.sleep(0.01)
            both_wait.set()
            for one in begun:
                answer = await sessions.answer(await sessions.wait(one.id))
                assert answer["status"] == "done" and answer["iterations"] == 2
                assert [row["iteration"] for row in answer["training_data"]] == [1, 2]
                assert answer["metrics"]["verifier_checks"] == 2
        assert sampler.calls == 7, "two first turns, the failure, two turns of each session alone"

    asyncio.run(run())


def test_health_and_sessions_report_why_a_model_could_not_be_loaded(tmp_path: Path):
    def opener(folder: Path, say: Any) -> ServedModel:
        raise ValueError("no such folder: /there")

    async def run() -> None:
        async with open_sessions(settings_of(tmp_path), generator=EngineGenerator(opener, tmp_path)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            health = sessions.generator.health()
            session, _ = await run_session(sessions, ASK)
        assert (health["state"], health["detail"]) == ("down", "no such folder: /there")
        assert session.error == {"code": "generator_down", "message": "no such folder: /there"}

    asyncio.run(run())


# The learner


def test_a_step_moves_the_policy_towards_rewarded_answers_and_reports_numbers(tmp_path: Path):
    client = table(tmp_path)
    learner = SessionLearner(client, tmp_path, LearnerOptions(batch_size=4, learning_rate=0.01))
    assert learner.restore() is False
    yes, no = (client.policy.tokenizer.ids[w] for w in ("yes", "no"))
    before = client.policy.logprobs()
    batch = [t for t in group("s", [1.0, 1.0], (yes,)) + group("s", [0.0, 0.0], (no,))]
    for i, t in enumerate(batch):
        t.rollout_id, t.logprobs = f"s/{i}", [float(before[t.response_tokens[0]])]
    learned = learner.learn(batch)
    assert learned is not None and (learned.step, learned.groups) == (1, 1)
    assert learned.learning_rate == pytest.approx(0.01 * RATE / (WARM_UP + 1))
    assert sorted(learned.advantages.values()) == [-0.5, -0.5, 0.5, 0.5]  # the group's mean is the baseline
    assert learned.entropy == pytest.approx(-float(before[yes] + before[no]) / 2)
    assert client.policy.logprobs()[yes] > before[yes] and client.policy.logprobs()[no] < before[no]


def test_coefficients_weigh_rewards_and_entropy(tmp_path: Path):
    """By hand: half the advantages, and a bonus for improbable tokens moves the table towards them."""

    def step(name: str, **coefficients: Any) -> tuple[list[float], float]:
        client = table(tmp_path / name)
        learner = SessionLearner(client, tmp_path / name, LearnerOptions(batch_size=2, **coefficients))
        learner.restore()
        yes, no = (client.policy.tokenizer.ids[w] for w in ("yes", "no"))
        client.policy.logits[no] += 3.0  # said far more often than `yes`
        before = client.policy.logprobs()
        batch = [*group(name, [0.0, 0.02], (yes,)), *group(name, [0.01], (no,))]
        for i, t in enumerate(batch):
            t.rollout_id, t.logprobs = f"{name}/{i}", [float(before[t.response_tokens[0]])]
        learned = learner.learn(batch)
        assert learned is not None
        return sorted(learned.advantages.values()), float(client.policy.logprobs()[no] - before[no])

    whole, _ = step("whole", entropy_coefficient=0.0)
    half, _ = step("half", entropy_coefficient=0.0, policy_coefficient=0.5)
    assert whole == pytest.approx([-0.01, 0.0, 0.01]) and half == pytest.approx([-0.005, 0.0, 0.005])
    _, alone = step("alone", entropy_coefficient=0.0)
    _, open_ = step("open", entropy_coefficient=0.5)
    assert open_ < alone


@pytest.mark.parametrize(("coefficient", "expected"), [(1.0, 0.1), (0.5, 0.05)])
def test_a_coefficient_weighs_what_an_overlong_answer_costs_as_it_weighs_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coefficient: float, expected: float
):
    """Of 2 tokens both are in the buffer: one costs 0.2, two 0.4, so rewards of 1 become 0.8 and 0.6."""
    overlong = replace(ALGORITHMS["ppo"], name="overlong", terms=(Overlong(2, 0.4),))
    monkeypatch.setitem(ALGORITHMS, "overlong", overlong)
    options = LearnerOptions(2, policy_coefficient=coefficient, max_tokens=2, algorithm="overlong")
    learner = SessionLearner(table(tmp_path), tmp_path, options)
    learner.restore()
    (short,), (long,) = group("s", [1.0]), group("s", [1.0], (2, 3))
    long.rollout_id = "s/1"
    learned = learner.learn([short, long])
    assert learned is not None
    assert learned.advantages == {"s/0": pytest.approx(expected), "s/1": pytest.approx(-expected)}


def test_a_plateau_lowers_the_learning_rate_and_a_restart_keeps_it(tmp_path: Path):
    learner = SessionLearner(table(tmp_path), tmp_path, LearnerOptions(batch_size=2))
    learner.restore()
    for i in range(4 * WINDOW):  # the best window, and three that were no better
        learner.learn(group(f"{i}", [0.5, 0.5]))
    assert learner.plateau.scale == 0.5
    learner.learn(group("a", [0.0, 1.0]))
    learner.close()
    later = SessionLearner(table(tmp_path), tmp_path)
    assert later.restore() and later.plateau.scale == 0.5
    later.close()


def test_answers_are_learned_at_their_sampling_temperature(tmp_path: Path):
    async def run() -> None:
        client = table(tmp_path / "policy")
        expected = client.policy.logprobs(3.0)
        generator = EngineGenerator(
            lambda folder, say: ServedModel(client, "table", "local"),
            tmp_path / "policy",
            EngineOptions(samples=4, max_tokens=1, temperature=3.0),
        )
        async with open_sessions(settings_of(tmp_path), generator=generator) as sessions:
            await ready(generator)
            session, _ = await run_session(sessions, ASK, max_iterations=1)
            rows = sessions.store.experiences(session_id=session.id)
            assert generator.learner is not None and generator.learner.options.temperature == 3.0
        assert [row.logprobs for row in rows] == [[pytest.approx(expected[(row.tokens or [0])[0]])] for row in rows]

    asyncio.run(run())


def test_equal_rewards_make_no_step_and_few_episodes_are_gathered(tmp_path: Path):
    client = table(tmp_path)
    learner = SessionLearner(client, tmp_path, LearnerOptions(batch_size=4))
    learner.restore()
    before = client.policy.sha256()
    assert learner.learn(group("a", [1.0, 1.0, 1.0, 1.0])) is None
    assert learner.learn(group("b", [1.0, 0.0])) is None
    assert learner.learn(group("c", [None, 1.0])) is None  # one that is known alone is no group
    assert (client.policy.sha256(), learner.progress.silent) == (before, 2)
    learned = learner.learn(group("d", [0.0, 1.0]))
    assert learned is not None and learned.groups == 2 and client.policy.sha256() != before
    assert learner.learn(group("e", [0.0, 1.0])) is None
    assert learner.learn([], now=True) is not None


def test_a_non_finite_step_is_refused_and_the_last_good_weights_are_loaded(tmp_path: Path):
    client = table(tmp_path)
    warned: list[str] = []
    learner = SessionLearner(client, tmp_path, LearnerOptions(batch_size=2), warn=warned.append)
    learner.restore()
    learner.learn(group("a", [0.0, 1.0]))
    good = client.policy.sha256(), client.policy.moments.copy()
    client.policy.rate = float("inf")
    assert learner.learn(group("b", [0.0, 1.0])) is None
    assert client.policy.sha256() == good[0] and (client.policy.moments == good[1]).all()
    assert (learner.progress.refused, learner.progress.steps) == (1, 1) and "refused" in warned[0]
    client.policy.rate = 300.0
    assert learner.learn(group("c", [0.0, 1.0])) is not None


def test_learning_continues_on_a_full_disk_and_saves_later(tmp_path: Path):
    client, warned, folder = table(tmp_path / "policy"), list[str](), tmp_path / "policy"
    learner = SessionLearner(client, folder, LearnerOptions(batch_size=2), warn=warned.append)
    learner.restore()
    shutil.move(folder, tmp_path / "aside")
    folder.write_text("in the way: nothing can be saved below a file")
    assert learner.learn(group("a", [0.0, 1.0])) is not None and "could not be saved" in warned[0]
    folder.unlink()
    shutil.move(tmp_path / "aside", folder)
    learner.learn(group("b", [0.0, 1.0]))
    learner.close()
    later = table(folder)
    assert SessionLearner(later, folder).restore() and later.policy.sha256() == client.policy.sha256()


def test_a_damaged_state_is_replaced_by_the_previous_one(tmp_path: Path):
    client = table(tmp_path)
    learner = SessionLearner(client, tmp_path, LearnerOptions(batch_size=2))
    learner.restore()
    hashes = [client.policy.sha256()]
    for name in "abc":
        learner.learn(group(name, [0.0, 1.0]))
        hashes.append(client.policy.sha256())
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    (tmp_path / "step-00000003" / "table.json").write_text("{}")
    warned: list[str] = []
    later = table(tmp_path)
    learner.close()
    restored = SessionLearner(later, tmp_path, LearnerOptions(batch_size=2), warn=warned.append)
    assert restored.restore() and later.policy.sha256() == hashes[2] and "damaged" in warned[0]
    assert restored.progress.steps == 2
    restored.learn(group("d", [0.0, 1.0]))
    assert json.loads((tmp_path / POINTER).read_text())["steps"] == 3
    with pytest.raises(ValueError, match="another process learns"):
        SessionLearner(later, tmp_path).restore()
    restored.close()
    for folder in tmp_path.glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="missing or damaged"):
        SessionLearner(table(tmp_path), tmp_path).restore()


def test_an_episode_is_rewarded_by_its_improvements_and_repeated_prompts_by_each_answer():
    one = Trajectory("p", [3], "a", [2, 4], [-1.0, -1.0], rollout_id="g/0", group_id="g")
    first, second = (Trajectory("p", [3], "a", [2], [-1.0], rollout_id="g/1", group_id="g") for _ in range(2))
    rewards: dict[tuple[int, int], float | None] = {(0, 1): 0.5, (0, 2): 1.5, (1, 1): 0.0, (1, 2): 1.5}
    made = assign_rewards([one, first, second], rewards, "session")
    assert [(t.rollout_id, t.group_id) for t in made] == [
        ("session/0", "session"), ("session/1/1", "session"), ("session/1/2", "session"),
    ]  # fmt: skip
    assert made[0].reward == pytest.approx(0.5 + DISCOUNT * 1.0)
    assert [t.reward for t in made[1:]] == [0.0, 1.5]
    centre = (0.5 + DISCOUNT + 0.0 + 1.5) / 3
    assert session_advantages(made, rewards.keys()) == pytest.approx(
        {(0, 1): 0.5 + DISCOUNT - centre, (0, 2): 0.5 + DISCOUNT - centre, (1, 1): -centre, (1, 2): 1.5 - centre}
    )


def test_an_answer_without_a_verdict_counts_in_no_mean_of_its_session():
    answers = group("session", [1.0, None, 0.0])
    assert session_advantages(answers, [(0, 1), (1, 1), (2, 1)]) == {(0, 1): 0.5, (2, 1): -0.5}
