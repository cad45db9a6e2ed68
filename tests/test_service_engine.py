"""An engine generator over a table of logits, which truly learns: groups, batches, steps, saved states, failures."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock import MockTrainingClient, TablePolicy
from rlvr.service.loop.credit import DISCOUNT
from rlvr.service.loop.engine import EngineGenerator, EngineOptions
from rlvr.service.loop.group import advantages, worth
from rlvr.service.loop.learning import POINTER, RATE, WARM_UP, WINDOW, Learner, LearnerOptions
from rlvr.service.loop.models import Model
from rlvr.service.options import Request
from rlvr.store.records import Status
from rlvr.types import Trajectory
from tests.sessions_here import opened, settings_of, worked

WORDS = ["yes", "no", "perhaps", "never"]
ASK = Request("yes", "perhaps yes", answer="yes", verifiers=(("exact_match", 1.0, {}), ("draft", 0.0, {})))


def table(folder: Path, rate: float = 300.0) -> MockTrainingClient:
    return MockTrainingClient(TablePolicy(WORDS, seed=1, rate=rate), folder)


def engine(state: Path, *, samples: int = 4, batch_size: int = 8, client: Any = None, **learner: Any):
    return EngineGenerator(
        lambda folder, say: Model(client or table(folder), "table", "local"),
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
        async with opened(settings_of(tmp_path), generator=engine(tmp_path, samples=6)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            session, answer = await worked(sessions, ASK, max_iterations=2, seed=4)
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


def test_sessions_that_come_together_are_learned_from_and_a_later_life_goes_on_to_the_bit(tmp_path: Path):
    async def life(number: int, client: MockTrainingClient) -> tuple[str, dict[str, Any]]:
        async with opened(settings_of(tmp_path), generator=engine(tmp_path, client=client)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            begun = [await sessions.start(ASK, "me") for _ in range(8)] if number == 0 else []
            for one in begun:
                assert (await sessions.wait(one.id)).status is Status.DONE
        return client.policy.sha256(), sessions.generator.learning()

    fresh = table(tmp_path / "policy").policy.sha256()
    taught, told = asyncio.run(life(0, table(tmp_path / "policy")))
    again, told_again = asyncio.run(life(1, table(tmp_path / "policy")))
    assert taught != fresh and told["updates"] >= 1
    assert (again, told_again) == (taught, told)


def test_the_same_seed_gives_the_same_answers_from_the_same_weights(tmp_path: Path):
    async def said(state: Path) -> list[str]:
        async with opened(settings_of(state), generator=engine(state)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            session, _ = await worked(sessions, ASK, max_iterations=1, seed=9, learn=False)
            return [e.generated_output for e in sessions.store.experiences(session_id=session.id)]

    assert asyncio.run(said(tmp_path / "a")) == asyncio.run(said(tmp_path / "b"))


def test_what_is_evaluated_teaches_nothing(tmp_path: Path):
    async def run() -> None:
        client = table(tmp_path / "policy")
        before = client.policy.sha256()
        async with opened(settings_of(tmp_path), generator=engine(tmp_path, batch_size=1, client=client)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            for _ in range(4):
                await worked(sessions, ASK, learn=False)
        assert client.policy.sha256() == before and sessions.generator.learning()["updates"] == 0

    asyncio.run(run())


def test_a_session_that_cannot_be_played_fails_alone(tmp_path: Path):
    """An empty prompt has no tokens for a table; what came with it is worked on."""

    async def run() -> None:
        async with opened(settings_of(tmp_path), generator=engine(tmp_path)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            begun = [
                await sessions.start(Request("t", prompt, answer="yes"), "me") for prompt in ("perhaps yes", " ", "yes")
            ]
            ended = [await sessions.wait(one.id) for one in begun]
        assert [one.status for one in ended] == [Status.DONE, Status.FAILED, Status.DONE]
        assert ended[1].error is not None and ended[1].error["code"] == "generator_failed"
        assert "empty prompt" in ended[1].error["message"]

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_said_in_health_and_fails_sessions_with_its_reason(tmp_path: Path):
    def opener(folder: Path, say: Any) -> Model:
        raise ValueError("no such folder: /there")

    async def run() -> None:
        async with opened(settings_of(tmp_path), generator=EngineGenerator(opener, tmp_path)) as sessions:
            await ready(sessions.generator)  # pyright: ignore[reportArgumentType]
            health = sessions.generator.health()
            session, _ = await worked(sessions, ASK)
        assert (health["state"], health["detail"]) == ("down", "no such folder: /there")
        assert session.error == {"code": "generator_down", "message": "no such folder: /there"}

    asyncio.run(run())


# The learner


def test_a_step_moves_the_policy_towards_what_was_rewarded_and_says_what_it_did(tmp_path: Path):
    client = table(tmp_path)
    learner = Learner(client, tmp_path, LearnerOptions(batch_size=4, learning_rate=0.01))
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


def test_the_coefficients_weigh_what_was_rewarded_and_the_entropy_of_what_was_said(tmp_path: Path):
    """By hand: half the advantages; and a bonus for what was improbable moves the table towards it."""

    def step(name: str, **coefficients: Any) -> tuple[list[float], float]:
        client = table(tmp_path / name)
        learner = Learner(client, tmp_path / name, LearnerOptions(batch_size=2, **coefficients))
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


def test_results_that_stay_the_same_lower_the_rate_and_a_restart_keeps_it(tmp_path: Path):
    learner = Learner(table(tmp_path), tmp_path, LearnerOptions(batch_size=2))
    learner.restore()
    for i in range(4 * WINDOW):  # the best window, and three that were no better
        learner.learn(group(f"{i}", [0.5, 0.5]))
    assert learner.plateau.scale == 0.5
    learner.learn(group("a", [0.0, 1.0]))
    learner.close()
    later = Learner(table(tmp_path), tmp_path)
    assert later.restore() and later.plateau.scale == 0.5
    later.close()


def test_answers_are_sampled_at_the_temperature_that_they_are_learned_at(tmp_path: Path):
    async def run() -> None:
        client = table(tmp_path / "policy")
        expected = client.policy.logprobs(3.0)
        generator = EngineGenerator(
            lambda folder, say: Model(client, "table", "local"),
            tmp_path / "policy",
            EngineOptions(samples=4, max_tokens=1, temperature=3.0),
        )
        async with opened(settings_of(tmp_path), generator=generator) as sessions:
            await ready(generator)
            session, _ = await worked(sessions, ASK, max_iterations=1)
            rows = sessions.store.experiences(session_id=session.id)
            assert generator.learner is not None and generator.learner.options.temperature == 3.0
        assert [row.logprobs for row in rows] == [[pytest.approx(expected[(row.tokens or [0])[0]])] for row in rows]

    asyncio.run(run())


def test_equal_rewards_make_no_step_and_too_few_episodes_wait_for_more(tmp_path: Path):
    client = table(tmp_path)
    learner = Learner(client, tmp_path, LearnerOptions(batch_size=4))
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


def test_a_step_that_is_not_finite_is_refused_and_the_last_good_weights_stay(tmp_path: Path):
    client = table(tmp_path)
    warned: list[str] = []
    learner = Learner(client, tmp_path, LearnerOptions(batch_size=2), warn=warned.append)
    learner.restore()
    learner.learn(group("a", [0.0, 1.0]))
    good = client.policy.sha256(), client.policy.moments.copy()
    client.policy.rate = float("inf")
    assert learner.learn(group("b", [0.0, 1.0])) is None
    assert client.policy.sha256() == good[0] and (client.policy.moments == good[1]).all()
    assert (learner.progress.refused, learner.progress.steps) == (1, 1) and "refused" in warned[0]
    client.policy.rate = 300.0
    assert learner.learn(group("c", [0.0, 1.0])) is not None


def test_a_disk_that_takes_nothing_stops_no_learning_and_is_tried_again(tmp_path: Path):
    client, warned, folder = table(tmp_path / "policy"), list[str](), tmp_path / "policy"
    learner = Learner(client, folder, LearnerOptions(batch_size=2), warn=warned.append)
    learner.restore()
    shutil.move(folder, tmp_path / "aside")
    folder.write_text("in the way: nothing can be saved below a file")
    assert learner.learn(group("a", [0.0, 1.0])) is not None and "could not be saved" in warned[0]
    folder.unlink()
    shutil.move(tmp_path / "aside", folder)
    learner.learn(group("b", [0.0, 1.0]))
    learner.close()
    later = table(folder)
    assert Learner(later, folder).restore() and later.policy.sha256() == client.policy.sha256()


def test_two_states_are_kept_and_a_damaged_one_gives_way_to_the_one_before(tmp_path: Path):
    client = table(tmp_path)
    learner = Learner(client, tmp_path, LearnerOptions(batch_size=2))
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
    restored = Learner(later, tmp_path, LearnerOptions(batch_size=2), warn=warned.append)
    assert restored.restore() and later.policy.sha256() == hashes[2] and "damaged" in warned[0]
    assert restored.progress.steps == 2
    restored.learn(group("d", [0.0, 1.0]))
    assert json.loads((tmp_path / POINTER).read_text())["steps"] == 3
    with pytest.raises(ValueError, match="another process learns"):
        Learner(later, tmp_path).restore()
    restored.close()
    for folder in tmp_path.glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="none is whole"):
        Learner(table(tmp_path), tmp_path).restore()


def test_an_episode_is_worth_its_improvements_and_a_repeated_question_each_of_its_answers():
    one = Trajectory("p", [3], "a", [2, 4], [-1.0, -1.0], rollout_id="g/0", group_id="g")
    first, second = (Trajectory("p", [3], "a", [2], [-1.0], rollout_id="g/1", group_id="g") for _ in range(2))
    rewards: dict[tuple[int, int], float | None] = {(0, 1): 0.5, (0, 2): 1.5, (1, 1): 0.0, (1, 2): 1.5}
    made = worth([one, first, second], rewards, "session")
    assert [(t.rollout_id, t.group_id) for t in made] == [
        ("session/0", "session"), ("session/1/1", "session"), ("session/1/2", "session"),
    ]  # fmt: skip
    assert made[0].reward == pytest.approx(0.5 + DISCOUNT * 1.0)
    assert [t.reward for t in made[1:]] == [0.0, 1.5]
    centre = (0.5 + DISCOUNT + 0.0 + 1.5) / 3
    assert advantages(made, rewards.keys()) == pytest.approx(
        {(0, 1): 0.5 + DISCOUNT - centre, (0, 2): 0.5 + DISCOUNT - centre, (1, 1): -centre, (1, 2): 1.5 - centre}
    )
