"""The policy over strategies: credit, gradients, sharing, and that it learns the best strategy."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_endpoint import EndpointRequest, serving

from rlvr.clients.endpoint import EndpointSamplingClient, text_endpoint
from rlvr.core import rng
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Task
from rlvr.envs.critics import Attempt, Critique
from rlvr.envs.refine import RefineEnv
from rlvr.reward.blend import session_reward
from rlvr.reward.feedback import Feedback
from rlvr.rollout import Group, play
from rlvr.service.learning.credit import Baseline, Plateau, compute_gains, recompute_gains
from rlvr.service.learning.strategies import FIRST, MAX_QUOTED, NEXT
from rlvr.service.learning.strategy_policy import (
    ENTROPY_FLOOR,
    MAX_RATIO,
    RACES,
    RATE,
    STATE,
    StrategyLearner,
    StrategyPolicy,
    StrategyPrompter,
    StrategyTable,
)
from rlvr.service.service_options import TrainingConfig
from rlvr.store import open_store
from rlvr.store.experience_store import ExperienceStore
from rlvr.store.records import Experience, Session

CONFIG = TrainingConfig()
REWARDS = st.lists(st.floats(0, 2), min_size=1, max_size=12)
NAMES = [strategy.name for strategy in (*FIRST, *NEXT)]


def test_gains_by_hand() -> None:
    assert compute_gains([0.5, 0.9, 0.7], 0.5) == pytest.approx([0.5 + 0.5 * 0.4 - 0.25 * 0.2, 0.4 - 0.5 * 0.2, -0.2])
    assert compute_gains([1.5]) == [1.5] and compute_gains([]) == [] and compute_gains([None, None]) == [None, None]


def test_an_unjudged_answer_has_no_gain_and_the_next_is_compared_with_the_last_judged() -> None:
    assert compute_gains([0.5, None, 0.9], 0.5) == [pytest.approx(0.5 + 0.25 * 0.4), None, pytest.approx(0.4)]
    assert compute_gains([None, 0.6], 0.5) == [None, 0.6]


@given(REWARDS)
def test_without_discount_a_gain_is_the_final_reward_minus_the_previous(rewards: list[float]) -> None:
    before = [0.0, *rewards]
    assert compute_gains(rewards, 1.0) == pytest.approx([rewards[-1] - before[t] for t in range(len(rewards))])


@given(REWARDS, st.floats(0, 1))
def test_iterations_earn_nothing(rewards: list[float], discount: float) -> None:
    """The first gain, derived another way, is a mean of the rewards, so it never exceeds the best reward."""
    last = len(rewards) - 1
    weights = [(1 - discount) * discount**k for k in range(last)] + [discount**last]
    first = compute_gains(rewards, discount)[0]
    assert first == pytest.approx(sum(w * r for w, r in zip(weights, rewards, strict=True)), abs=1e-9)
    assert first is not None and first <= max(rewards) + 1e-9
    idle = compute_gains([*rewards, rewards[-1], rewards[-1]], discount)
    assert idle[:-2] == pytest.approx(compute_gains(rewards, discount)) and idle[-2:] == [0.0, 0.0]


def make_experience(action: str, gain: float | None, logprob: float | None = None, **more: Any) -> Experience:
    options = FIRST if action in {s.name for s in FIRST} else NEXT
    known = -math.log(len(options)) if logprob is None else logprob
    given: dict[str, Any] = {"session_id": "s", "task_id": "t", "iteration": 1, "prompt": "", "generated_output": ""}
    return Experience(**{**given, "action": action, "action_logprob": known, "gain": gain, **more})


def make_tilted_table(strategies: Any = NEXT, seed: int = 0) -> StrategyTable:
    """A table that is not uniform."""
    table = StrategyTable(strategies)
    for i, name in enumerate(table.strategies):
        table.policy.logits[table.policy.tokenizer.ids[name]] = rng.uniform(rng.key("tilt", seed), i) * 2
    return table


def test_the_gradient_is_that_of_the_loss() -> None:
    """Against central differences of the formula in the module's docstring, with ratios below and above the cut."""
    config = TrainingConfig(policy_coefficient=0.7, entropy_coefficient=0.3)
    table = make_tilted_table()
    batch = [
        (make_experience("revise", 0.0), 0.5),
        (make_experience("fresh", 0.0, math.log(0.01)), 0.2),
        (make_experience("checklist", 0.0, math.log(0.6)), 0.3),
    ]
    advantages = np.array([0.4, -0.9, 1.3])
    ids, names = table.policy.tokenizer.ids, list(table.strategies)
    start = table.policy.logits.copy()
    now = table.policy.logprobs()
    ratios = [min(MAX_RATIO, math.exp(now[ids[e.action]] - (e.action_logprob or 0))) for e, _ in batch]
    assert ratios[1] == MAX_RATIO > ratios[0]

    def loss(logits: np.ndarray) -> float:
        table.policy.logits = logits
        p = table.policy.logprobs()
        terms = zip(batch, advantages, ratios, strict=True)
        surrogate = sum(-0.7 * w * r * a * p[ids[e.action]] for (e, w), a, r in terms)
        own = p[[ids[name] for name in names]]
        return surrogate - 0.3 * float(-(np.exp(own) * own).sum())

    value, cut = table.accumulate_policy_gradient(batch, advantages, config)
    value += table.accumulate_entropy_gradient(0.3)
    gradient = table.policy.gradient
    assert gradient is not None and cut == 1 and value == pytest.approx(loss(start.copy()))
    for i in range(len(start)):
        step = np.eye(len(start))[i] * 1e-5
        slope = (loss(start + step) - loss(start - step)) / 2e-5
        assert gradient[i] == pytest.approx(slope, abs=1e-8)


def test_the_baseline_takes_a_gradient_step_on_half_the_squared_error_and_a_new_task_begins_at_the_shared_one() -> None:
    value = Baseline()
    assert value("a") == 0.0
    value.learn(["a", "a", "b"], np.array([1.0, 2.0, 5.0]), np.array([1.0, 1.0, 2.0]), 0.5)
    mean = (1 + 2 + 2 * 5) / 4
    assert value("a") == pytest.approx(mean + 0.5 * (1.5 - mean)) and value("b") == pytest.approx(
        mean + 0.5 * (5 - mean)
    )
    assert value("never seen") == value.shared == pytest.approx(mean)
    value.learn(["a"], np.array([mean + 2]), np.array([1.0]), 0.25)
    assert value("never seen") == pytest.approx(mean + 0.5)
    for i in range(1200):
        value.learn([f"task {i}"], np.array([0.0]), np.array([1.0]), 0.1)
    assert len(value.tasks) == 1000 and "a" not in value.tasks


def test_coefficients_and_learning_rate_have_their_documented_effect() -> None:
    """By hand: the loss is a sum, the baseline's step has its size, and a coefficient of 0 turns its part off."""
    policy = StrategyPolicy()
    replay = [(make_experience("revise", 1.0), 0.5), (make_experience("fresh", 3.0), 0.5)]
    learned = policy.update(replay, replace(CONFIG, policy_coefficient=0.0, entropy_coefficient=0.0))
    assert learned is not None and learned.policy_loss == 0
    assert policy.next.probabilities == pytest.approx(dict.fromkeys(policy.next.strategies, 1 / 6))
    assert learned.value_loss == pytest.approx(0.5 * (1.0 + 1.0) / 2 / 2)  # V begins at 2
    assert learned.loss == pytest.approx(learned.value_loss)
    again = policy.update([(make_experience("revise", 3.0), 1.0)], CONFIG)
    assert again is not None and policy.next.baseline("t") == pytest.approx(2 + CONFIG.learning_rate * RATE * 0.5)
    assert policy.next.probabilities["revise"] > 1 / 6 > policy.next.probabilities["fresh"]
    assert policy.first.probabilities == {s.name: pytest.approx(0.25) for s in FIRST}
    assert again.learning_rate == CONFIG.learning_rate and again.updates == 2


def test_the_bonus_brings_entropy_back_and_is_part_of_the_loss() -> None:
    """Gains equal to the baseline have no signal: only the bonus moves the table, by its share of the batch."""
    policy = StrategyPolicy()
    policy.next.policy.logits = make_tilted_table().policy.logits
    before = policy.next.entropy
    replay = [(make_experience("revise", 1.0), 0.5), (make_experience("fresh", 1.0), 0.5)]
    learned = policy.update(replay, replace(CONFIG, entropy_coefficient=0.5))
    assert learned is not None and learned.policy_loss == learned.value_loss == 0
    assert learned.loss == pytest.approx(-0.5 * before) and policy.next.entropy > before
    mixed = [*replay, (make_experience("direct", 1.0), 0.5), (make_experience("stepwise", 1.0), 0.5)]
    now = (policy.next.entropy, policy.first.entropy)
    learned = policy.update(mixed, replace(CONFIG, entropy_coefficient=0.5, policy_coefficient=0, value_coefficient=0))
    assert learned is not None and learned.loss == pytest.approx(-0.5 * (now[0] + now[1]) / 2)


def test_a_plateau_halves_the_learning_rate() -> None:
    policy = StrategyPolicy()
    rates = [
        learned.learning_rate
        for _ in range(210)
        if (learned := policy.update([(make_experience("revise", 1), 1)], CONFIG, 0.7))
    ]
    assert rates[198:201] == [CONFIG.learning_rate, CONFIG.learning_rate / 2, CONFIG.learning_rate / 2]


def test_priorities_are_undone_by_weights() -> None:
    one, other = StrategyPolicy(), StrategyPolicy()
    rare, common = make_experience("revise", 1.0), make_experience("fresh", 0.2)
    one.update([(rare, 0.1), (common, 0.2)], CONFIG)
    other.update([(rare, 0.1), (rare, 0.1), (common, 0.1)], CONFIG)
    assert one.next.policy.logits == pytest.approx(other.next.policy.logits, abs=1e-12)


def test_experiences_without_gain_are_left_out() -> None:
    policy = StrategyPolicy()
    before = json.dumps(policy.state())
    no_logprob = replace(make_experience("revise", 1.0), action_logprob=None)
    assert (
        policy.update(
            [(make_experience("revise", None), 0.5), (make_experience("unknown", 1.0), 0.5), (no_logprob, 1.0)], CONFIG
        )
        is None
    )
    assert json.dumps(policy.state()) == before


def test_entropy_stays_above_its_floor() -> None:
    policy = StrategyPolicy()
    for _ in range(300):
        policy.update(
            [(make_experience("revise", 2.0), 0.5), (make_experience("fresh", 0.0), 0.5)],
            replace(CONFIG, entropy_coefficient=0.0),
        )
    table = policy.next
    assert table.entropy == pytest.approx(ENTROPY_FLOOR * math.log(len(NEXT)), abs=1e-6)
    assert max(table.probabilities, key=lambda name: table.probabilities[name]) == "revise"
    assert min(table.probabilities.values()) > 1e-3


def test_the_learning_rate_falls_on_a_plateau_to_its_least_and_not_while_results_rise() -> None:
    plateau = Plateau(window=10, patience=2)
    for i in range(100):
        plateau.observe(i / 50)
    assert (plateau.scale, plateau.stale) == (1.0, 0)
    for _ in range(20):
        plateau.observe(1.0)
    assert plateau.scale == 0.5
    for _ in range(1000):
        plateau.observe(1.0)
    assert plateau.scale == 0.1


def test_a_lowered_learning_rate_rises_again_with_progress() -> None:
    plateau = Plateau(window=10, patience=2)
    for _ in range(10):
        plateau.observe(1.9)  # a week of easy tasks
    for _ in range(40):
        plateau.observe(0.5)
    assert plateau.scale == 0.25
    for i in range(20):
        plateau.observe(0.6 + i / 100)
    assert plateau.scale == 1.0


def test_draws_follow_the_probabilities() -> None:
    table = make_tilted_table(FIRST, seed=3)
    drawn = [table.choose(rng.key("test", i)) for i in range(4000)]
    assert [c.strategy.name for c in drawn[:50]] == [table.choose(rng.key("test", i)).strategy.name for i in range(50)]
    for name, p in table.probabilities.items():
        own = [c for c in drawn if c.strategy.name == name]
        assert len(own) / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000))
        assert own[0].logprob == pytest.approx(math.log(p))


class Sampler:
    temperature: float | None = None


def test_a_prompter_writes_the_prompts_of_an_episode_and_sets_the_temperature() -> None:
    task, alike = Task("t", "Sort a list."), 0
    sampler: Any = Sampler()
    for seed in range(40):
        guide = StrategyPrompter(StrategyPolicy(), sampler, seed)
        first = guide.compose(task, [], "")
        second = guide.compose(task, ["answer one"], "too_short: too short")
        third = guide.compose(task, ["answer one", "answer two"], "still too short")
        assert first.startswith("Sort a list.") and second.startswith("Sort a list.\n\n")
        assert "too_short" in second and "still too short" in third and "too_short:" not in third
        own = guide.choices[1].strategy
        assert own in NEXT and guide.choices[0].strategy in FIRST
        assert ("answer one" in second) == (own.name != "fresh")
        assert sampler.temperature == guide.choices[2].strategy.temperature
        alike += own.name == guide.choices[2].strategy.name
        same = StrategyPrompter(StrategyPolicy(), cast(Any, Sampler()), seed)
        assert [same.compose(task, [], ""), same.compose(task, ["answer one"], "too_short: too short")] == [
            first,
            second,
        ]


@pytest.mark.parametrize("strategy", NEXT, ids=lambda strategy: strategy.name)
def test_a_long_answer_is_quoted_without_its_middle_and_a_conversation_gets_a_message(strategy: Any) -> None:
    prompt = strategy.prompt(Task("t", "task"), ["a" * 50_000, "b" * 50_000], "review")
    assert len(prompt) < 2 * MAX_QUOTED + 1000
    talk = [{"role": "user", "content": "task"}]
    assert strategy.prompt(Task("t", talk), ["a"], "review")[:-1] == talk
    assert len(talk) == 1


def test_strategies_have_names_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES) and len({s.words(["a", "b"], "f") for s in NEXT}) == len(NEXT)


# --- with the store


@pytest.fixture
def store(tmp_path: Path) -> Any:
    opened = open_store(tmp_path / "store.db")
    yield opened
    opened.close()


def fill(store: ExperienceStore, count: int, seed: int = 0) -> None:
    """Experiences in which `checklist` is best."""
    store.add_session(Session("s", "t", ""))
    for i in range(count):
        name = NAMES[i % len(NAMES)]
        gain = (name == "checklist") + 0.1 * rng.uniform(rng.key("gain", seed), i)
        store.add_experiences([make_experience(name, gain, sample=i)])


def test_learning_starts_with_enough_experiences_and_is_saved_bit_exactly(store: ExperienceStore) -> None:
    learner = StrategyLearner(store, CONFIG)
    fill(store, 49)
    store.add_experiences(
        [make_experience("revise", None, sample=100 + i) for i in range(20)]
    )  # evaluated: without a gain
    assert learner.learn(1.0) is None and store.state(STATE) is None
    assert learner.learning()["training_loss"] is None and learner.learning()["updates"] == 0
    store.add_experiences([make_experience("checklist", 1.0, sample=49)])
    learned = learner.learn(1.0)
    assert learned is not None and learned.updates == 1 and learner.learning()["training_loss"] == learned.loss
    learner.learn(0.5)
    assert store.state(STATE) == (learner.policy.state(), 2)
    drawn = store.experiences(session_id="s", limit=100)
    assert any(e.advantage is not None and e.priority == pytest.approx(abs(e.advantage)) for e in drawn)


def test_a_restart_changes_no_bit(tmp_path: Path) -> None:
    """Two learners on equal stores; one is rebuilt from its store between updates."""
    states: list[Any] = []
    for restarts in (False, True):
        store = open_store(tmp_path / f"{restarts}.db")
        fill(store, 80)
        learner = StrategyLearner(store, CONFIG)
        for i in range(60):  # past the end of a window of the schedule
            learner = StrategyLearner(store, CONFIG) if restarts else learner
            assert learner.learn(i % 3) is not None
        states.append((learner.policy.state(), store.state(STATE), learner.choose(first=False, key=9)))
        store.close()
    assert json.dumps(states[0][0]) == json.dumps(states[1][0]) and states[0] == states[1]


class RacingStore:
    """A store in which other instances save just before this one, `times` times."""

    def __init__(self, store: ExperienceStore, times: int) -> None:
        self._store, self.left = store, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def save_state(self, name: str, value: dict[str, Any], version: int) -> bool:
        if self.left:
            self.left -= 1
            assert StrategyLearner(self._store, CONFIG).learn(1.0) is not None
        return self._store.save_state(name, value, version)


def test_of_two_simultaneous_updates_the_second_builds_on_the_first(tmp_path: Path) -> None:
    """The learner that lost the race ends like two updates in a row."""
    stores = [open_store(tmp_path / f"{i}.db") for i in range(2)]
    for store in stores:
        fill(store, 60)
    learned = StrategyLearner(RacingStore(stores[0], 1), CONFIG).learn(1.0)
    straight = StrategyLearner(stores[1], CONFIG)
    straight.learn(1.0)
    assert learned is not None and learned.updates == 2 and learned == straight.learn(1.0)
    assert stores[0].state(STATE) == stores[1].state(STATE)
    with pytest.raises(RuntimeError, match=f"other instances updated the strategies {RACES} times"):
        StrategyLearner(RacingStore(stores[0], 1000), CONFIG).learn(1.0)
    for store in stores:
        store.close()


def test_instances_share_updates_and_threads_may_learn_at_once(store: ExperienceStore) -> None:
    fill(store, 60)
    one, other = StrategyLearner(store, CONFIG), StrategyLearner(store, CONFIG)
    threads = [threading.Thread(target=one.learn, args=(1.0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.learning()["updates"] == 0
    other.refresh()
    assert other.learning() == one.learning() and other.learning()["updates"] == 4


def test_a_state_in_another_format_is_ignored(store: ExperienceStore) -> None:
    """Other strategies in a table reset that table; another format resets everything."""
    fill(store, 60)
    learner = StrategyLearner(store, CONFIG)
    learner.learn(1.0)
    value, version = store.state(STATE) or ({}, 0)
    value["next"]["words"][0] = "another"
    assert store.save_state(STATE, value, version)
    policy = StrategyLearner(store, CONFIG).policy
    assert policy.next.entropy == pytest.approx(math.log(len(NEXT))) and policy.first.state() == value["first"]
    assert store.save_state(STATE, {"format": 99}, version + 1)
    assert StrategyLearner(store, CONFIG).policy.state() == StrategyPolicy().state()


def test_a_rating_changes_the_gains_of_an_answer_and_of_the_next(store: ExperienceStore) -> None:
    store.add_session(Session("s", "t", ""))
    words = [Feedback(0.5, 0.5, 0.5, error_types=("wrong",)), Feedback(0.6, 0.5, 0.5), Feedback(0.9, 1.0, 1.0)]
    rows = [
        make_experience(
            NAMES[i], None, iteration=i + 1, feedback=f.as_dict(), reward=session_reward(f, i + 1),
            confidence=f.confidence, correctness=f.correctness_score, quality=f.quality_score,
        )
        for i, f in enumerate(words)
    ]  # fmt: skip
    ids = store.add_experiences(rows)
    worth = [0.5 + 0.15 + 0.1 - 0.1, 0.6 + 0.15 + 0.1, 0.9 + 0.3 + 0.2]

    def regains() -> dict[int, float]:
        return recompute_gains(store.experiences(session_id="s", limit=10))

    assert regains() == pytest.approx(dict(zip(ids, compute_gains(worth), strict=True)))
    store.rate(ids[1], "me", 1.0, weight=0.2)
    worth[1] += 0.2 * (2.0 - (worth[1] + 0.1))  # a fifth of the reward, bonus included, is the person's
    assert regains() == pytest.approx(dict(zip(ids, compute_gains(worth), strict=True)))
    assert recompute_gains(store.experiences(session_id="s", limit=10)[1:]) == {}  # what came before was pruned


# --- against a scripted endpoint


BEST = {"checklist": "List what the task requires", "fresh": "Answer the task anew"}


class Right:
    """A critic that accepts answers by `worth` and records their rewards."""

    def __init__(self, worth: Callable[[str], float]) -> None:
        self._worth, self.rewards = worth, list[float]()

    async def criticise(self, attempt: Attempt) -> Critique:
        self.rewards.append(self._worth(attempt.answer))
        return Critique(None if self.rewards[-1] > 1.2 else "wrong: it is wrong")


async def session(learner: StrategyLearner, sampler: EndpointSamplingClient, seed: int, worth: Any) -> list[Experience]:
    view, critic, task = sampler.view(), Right(worth), Task(f"task {seed % 3}", "Sort a list.")
    guide = StrategyPrompter(learner, view, seed)
    env = RefineEnv(task, view.get_tokenizer(), critic, compose=guide.compose, max_turns=5)
    played = await play(Group("g", task, [env]), view, SamplingParams(max_tokens=50), seed=seed, version=0)
    assert len(played) == len(guide.choices) == len(critic.rewards)
    made_of = zip(guide.choices, compute_gains(critic.rewards), critic.rewards, strict=True)
    return [
        Experience(
            f"s{seed}", task.id, i, "", "", action=choice.strategy.name, action_logprob=choice.logprob, gain=g, reward=r
        )
        for i, (choice, g, r) in enumerate(made_of, 1)
    ]  # fmt: skip


def train_strategies(
    store: ExperienceStore, best: str, seed: int, sessions: int, worth: Callable[[str], float]
) -> StrategyLearner:
    """Run sessions with an endpoint that is right six times in ten with strategy `best`, else once in ten."""

    def script(asked: EndpointRequest) -> str:
        chance = 0.6 if BEST[best] in asked.prompt else 0.1
        return "right" if rng.uniform(rng.key("script", seed), asked.number) < chance else "wrong"

    learner = StrategyLearner(store, CONFIG)
    with serving(script) as server:
        sampler = EndpointSamplingClient(text_endpoint(server.plain_url))
        for number in range(sessions):
            store.add_session(Session(f"s{number}", f"task {number % 3}", ""))
            done = asyncio.run(session(learner, sampler, number, worth))
            store.add_experiences(done)
            learner.learn(done[-1].reward)
        sampler.close()
    return learner


@pytest.mark.slow
@pytest.mark.parametrize(("best", "seed"), [("checklist", 0), ("fresh", 1), ("checklist", 2)])
def test_the_best_strategy_is_learned(store: ExperienceStore, best: str, seed: int) -> None:
    learner = train_strategies(store, best, seed, 130, {"right": 1.5, "wrong": 0.3}.__getitem__)
    assert learner.policy.next.probabilities[best] > 0.8, learner.learning()


@pytest.mark.slow
def test_random_rewards_teach_no_strategy(store: ExperienceStore) -> None:
    """The same sessions with random rewards: no strategy gets near the probability of a best one."""
    count = iter(range(10**6))
    learner = train_strategies(
        store, "checklist", 0, 130, lambda answer: rng.uniform(rng.key("chance"), next(count)) * 1.4
    )
    assert max(learner.policy.next.probabilities.values()) < 0.7, learner.learning()
