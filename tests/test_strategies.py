"""The strategies' policy: what a choice is credited with, the gradient, sharing, and that it finds what is best."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_endpoint import Asked, serving

from rlvr import draws
from rlvr.clients.endpoint import EndpointSamplingClient, text_endpoint
from rlvr.envs.refine import Attempt, Critique, RefineEnv
from rlvr.messages import SamplingParams
from rlvr.reward.blend import session_reward
from rlvr.reward.feedback import Feedback
from rlvr.rollout import Group, play
from rlvr.service.loop.credit import Baseline, Plateau, gains, regained
from rlvr.service.loop.strategies import FIRST, MAX_QUOTED, NEXT, Guide
from rlvr.service.loop.strategy_policy import (
    CUT,
    ENTROPY_FLOOR,
    RACES,
    RATE,
    STATE,
    StrategyLearner,
    StrategyPolicy,
    Table,
)
from rlvr.service.options import TrainingConfig
from rlvr.store import open_store
from rlvr.store.records import Experience, Session
from rlvr.store.store import Store
from rlvr.types import Task

CONFIG = TrainingConfig()
REWARDS = st.lists(st.floats(0, 2), min_size=1, max_size=12)
NAMES = [strategy.name for strategy in (*FIRST, *NEXT)]


def test_gains_by_hand() -> None:
    assert gains([0.5, 0.9, 0.7], 0.5) == pytest.approx([0.5 + 0.5 * 0.4 - 0.25 * 0.2, 0.4 - 0.5 * 0.2, -0.2])
    assert gains([1.5]) == [1.5] and gains([]) == [] and gains([None, None]) == [None, None]


def test_an_answer_nobody_judged_has_no_gain_and_the_next_is_compared_with_the_last_that_was() -> None:
    assert gains([0.5, None, 0.9], 0.5) == [pytest.approx(0.5 + 0.25 * 0.4), None, pytest.approx(0.4)]
    assert gains([None, 0.6], 0.5) == [None, 0.6]


@given(REWARDS)
def test_without_discount_a_gain_is_the_final_answer_less_what_was_there_before(rewards: list[float]) -> None:
    before = [0.0, *rewards]
    assert gains(rewards, 1.0) == pytest.approx([rewards[-1] - before[t] for t in range(len(rewards))])


@given(REWARDS, st.floats(0, 1))
def test_iterations_are_not_paid_for(rewards: list[float], discount: float) -> None:
    """The first gain, derived another way, is a mean of the rewards: it never exceeds what the best answer is worth."""
    last = len(rewards) - 1
    weights = [(1 - discount) * discount**k for k in range(last)] + [discount**last]
    first = gains(rewards, discount)[0]
    assert first == pytest.approx(sum(w * r for w, r in zip(weights, rewards, strict=True)), abs=1e-9)
    assert first is not None and first <= max(rewards) + 1e-9
    idle = gains([*rewards, rewards[-1], rewards[-1]], discount)
    assert idle[:-2] == pytest.approx(gains(rewards, discount)) and idle[-2:] == [0.0, 0.0]


def made(action: str, gain: float | None, logprob: float | None = None, **more: Any) -> Experience:
    options = FIRST if action in {s.name for s in FIRST} else NEXT
    known = -math.log(len(options)) if logprob is None else logprob
    given: dict[str, Any] = {"session_id": "s", "task_id": "t", "iteration": 1, "prompt": "", "generated_output": ""}
    return Experience(**{**given, "action": action, "action_logprob": known, "gain": gain, **more})


def tilted(strategies: Any = NEXT, seed: int = 0) -> Table:
    """A table that is not uniform any more."""
    table = Table(strategies)
    for i, name in enumerate(table.strategies):
        table.policy.logits[table.policy.tokenizer.ids[name]] = draws.uniform(draws.key("tilt", seed), i) * 2
    return table


def test_the_gradient_is_that_of_the_loss() -> None:
    """Against central differences of the formula in the module's docstring, with ratios below and above the cut."""
    config = TrainingConfig(policy_coefficient=0.7, entropy_coefficient=0.3)
    table = tilted()
    batch = [
        (made("revise", 0.0), 0.5),
        (made("fresh", 0.0, math.log(0.01)), 0.2),
        (made("checklist", 0.0, math.log(0.6)), 0.3),
    ]
    advantages = np.array([0.4, -0.9, 1.3])
    ids, names = table.policy.tokenizer.ids, list(table.strategies)
    start = table.policy.logits.copy()
    now = table.policy.logprobs()
    ratios = [min(CUT, math.exp(now[ids[e.action]] - (e.action_logprob or 0))) for e, _ in batch]
    assert ratios[1] == CUT > ratios[0]

    def loss(logits: np.ndarray) -> float:
        table.policy.logits = logits
        p = table.policy.logprobs()
        terms = zip(batch, advantages, ratios, strict=True)
        surrogate = sum(-0.7 * w * r * a * p[ids[e.action]] for (e, w), a, r in terms)
        own = p[[ids[name] for name in names]]
        return surrogate - 0.3 * float(-(np.exp(own) * own).sum())

    value, cut = table.gather(batch, advantages, config)
    value += table.encourage(0.3)
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


def test_the_coefficients_and_the_rate_do_what_they_say() -> None:
    """By hand: the loss is a sum, the value's step has its size, and without a coefficient nothing is learned."""
    policy = StrategyPolicy()
    replay = [(made("revise", 1.0), 0.5), (made("fresh", 3.0), 0.5)]
    learned = policy.update(replay, replace(CONFIG, policy_coefficient=0.0, entropy_coefficient=0.0))
    assert learned is not None and learned.policy_loss == 0
    assert policy.next.probabilities == pytest.approx(dict.fromkeys(policy.next.strategies, 1 / 6))
    assert learned.value_loss == pytest.approx(0.5 * (1.0 + 1.0) / 2 / 2)  # V begins at 2
    assert learned.loss == pytest.approx(learned.value_loss)
    again = policy.update([(made("revise", 3.0), 1.0)], CONFIG)
    assert again is not None and policy.next.baseline("t") == pytest.approx(2 + CONFIG.learning_rate * RATE * 0.5)
    assert policy.next.probabilities["revise"] > 1 / 6 > policy.next.probabilities["fresh"]
    assert policy.first.probabilities == {s.name: pytest.approx(0.25) for s in FIRST}
    assert again.learning_rate == CONFIG.learning_rate and again.updates == 2


def test_the_bonus_brings_entropy_back_and_is_part_of_the_loss() -> None:
    """Gains that equal the baseline teach nothing: what moves the table is the bonus, in its share of the batch."""
    policy = StrategyPolicy()
    policy.next.policy.logits = tilted().policy.logits
    before = policy.next.entropy
    replay = [(made("revise", 1.0), 0.5), (made("fresh", 1.0), 0.5)]
    learned = policy.update(replay, replace(CONFIG, entropy_coefficient=0.5))
    assert learned is not None and learned.policy_loss == learned.value_loss == 0
    assert learned.loss == pytest.approx(-0.5 * before) and policy.next.entropy > before
    mixed = [*replay, (made("direct", 1.0), 0.5), (made("stepwise", 1.0), 0.5)]
    now = (policy.next.entropy, policy.first.entropy)
    learned = policy.update(mixed, replace(CONFIG, entropy_coefficient=0.5, policy_coefficient=0, value_coefficient=0))
    assert learned is not None and learned.loss == pytest.approx(-0.5 * (now[0] + now[1]) / 2)


def test_flat_results_halve_the_rate_of_the_updates_that_follow() -> None:
    policy = StrategyPolicy()
    rates = [
        learned.learning_rate for _ in range(210) if (learned := policy.update([(made("revise", 1), 1)], CONFIG, 0.7))
    ]
    assert rates[198:201] == [CONFIG.learning_rate, CONFIG.learning_rate / 2, CONFIG.learning_rate / 2]


def test_what_was_drawn_more_often_for_its_priority_counts_less() -> None:
    one, other = StrategyPolicy(), StrategyPolicy()
    rare, common = made("revise", 1.0), made("fresh", 0.2)
    one.update([(rare, 0.1), (common, 0.2)], CONFIG)
    other.update([(rare, 0.1), (rare, 0.1), (common, 0.1)], CONFIG)
    assert one.next.policy.logits == pytest.approx(other.next.policy.logits, abs=1e-12)


def test_what_cannot_teach_is_left_out() -> None:
    policy = StrategyPolicy()
    before = json.dumps(policy.state())
    no_logprob = replace(made("revise", 1.0), action_logprob=None)
    assert policy.update([(made("revise", None), 0.5), (made("unknown", 1.0), 0.5), (no_logprob, 1.0)], CONFIG) is None
    assert json.dumps(policy.state()) == before


def test_nothing_is_given_up_for_good() -> None:
    policy = StrategyPolicy()
    for _ in range(300):
        policy.update([(made("revise", 2.0), 0.5), (made("fresh", 0.0), 0.5)], replace(CONFIG, entropy_coefficient=0.0))
    table = policy.next
    assert table.entropy == pytest.approx(ENTROPY_FLOOR * math.log(len(NEXT)), abs=1e-6)
    assert max(table.probabilities, key=lambda name: table.probabilities[name]) == "revise"
    assert min(table.probabilities.values()) > 1e-3


def test_on_a_plateau_the_rate_falls_to_its_least_and_not_while_results_rise() -> None:
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


def test_a_rate_that_fell_rises_again_where_harder_tasks_are_learned() -> None:
    plateau = Plateau(window=10, patience=2)
    for _ in range(10):
        plateau.observe(1.9)  # a week of easy tasks
    for _ in range(40):
        plateau.observe(0.5)
    assert plateau.scale == 0.25
    for i in range(20):
        plateau.observe(0.6 + i / 100)
    assert plateau.scale == 1.0


def test_draws_are_counted_and_as_frequent_as_they_are_probable() -> None:
    table = tilted(FIRST, seed=3)
    drawn = [table.choose(draws.key("test", i)) for i in range(4000)]
    assert [c.strategy.name for c in drawn[:50]] == [
        table.choose(draws.key("test", i)).strategy.name for i in range(50)
    ]
    for name, p in table.probabilities.items():
        own = [c for c in drawn if c.strategy.name == name]
        assert len(own) / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000))
        assert own[0].logprob == pytest.approx(math.log(p))


class Sampler:
    temperature: float | None = None


def test_a_guide_writes_the_prompts_of_an_episode_and_sets_the_temperature() -> None:
    task, sampler, alike = Task("t", "Sort a list."), Sampler(), 0
    for seed in range(40):
        guide = Guide(StrategyPolicy(), sampler, seed)
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
        same = Guide(StrategyPolicy(), Sampler(), seed)
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


def fill(store: Store, count: int, seed: int = 0) -> None:
    """Experiences in which `checklist` is best."""
    store.add_session(Session("s", "t", ""))
    for i in range(count):
        name = NAMES[i % len(NAMES)]
        gain = (name == "checklist") + 0.1 * draws.uniform(draws.key("gain", seed), i)
        store.add_experiences([made(name, gain, sample=i)])


def test_nothing_is_learned_before_there_is_enough_and_then_it_is_kept_to_the_bit(store: Store) -> None:
    learner = StrategyLearner(store, CONFIG)
    fill(store, 49)
    store.add_experiences([made("revise", None, sample=100 + i) for i in range(20)])  # evaluated: without a gain
    assert learner.learn(1.0) is None and store.state(STATE) is None
    assert learner.learning()["training_loss"] is None and learner.learning()["updates"] == 0
    store.add_experiences([made("checklist", 1.0, sample=49)])
    learned = learner.learn(1.0)
    assert learned is not None and learned.updates == 1 and learner.learning()["training_loss"] == learned.loss
    learner.learn(0.5)
    assert store.state(STATE) == (learner.policy.state(), 2)
    drawn = store.experiences(session_id="s", limit=100)
    assert any(e.advantage is not None and e.priority == pytest.approx(abs(e.advantage)) for e in drawn)


def test_a_restart_changes_no_bit(tmp_path: Path) -> None:
    """Two learners on equal stores; one is made anew from its store between any two updates."""
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


class Raced:
    """The store as one instance sees it when others save just before it does, `times` times."""

    def __init__(self, store: Store, times: int) -> None:
        self._store, self.left = store, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def save_state(self, name: str, value: dict[str, Any], version: int) -> bool:
        if self.left:
            self.left -= 1
            assert StrategyLearner(self._store, CONFIG).learn(1.0) is not None
        return self._store.save_state(name, value, version)


def test_of_two_updates_at_once_the_second_is_made_on_top_of_the_first(tmp_path: Path) -> None:
    """The raced learner ends where two updates one after the other end."""
    stores = [open_store(tmp_path / f"{i}.db") for i in range(2)]
    for store in stores:
        fill(store, 60)
    learned = StrategyLearner(Raced(stores[0], 1), CONFIG).learn(1.0)
    straight = StrategyLearner(stores[1], CONFIG)
    straight.learn(1.0)
    assert learned is not None and learned.updates == 2 and learned == straight.learn(1.0)
    assert stores[0].state(STATE) == stores[1].state(STATE)
    with pytest.raises(RuntimeError, match=f"other instances updated the strategies {RACES} times"):
        StrategyLearner(Raced(stores[0], 1000), CONFIG).learn(1.0)
    for store in stores:
        store.close()


def test_one_instance_learns_what_another_learned_and_threads_may_learn_at_once(store: Store) -> None:
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


def test_a_state_of_another_program_begins_anew(store: Store) -> None:
    """Other strategies in a table: that table. Another format: everything."""
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


def test_a_rating_changes_the_gains_of_an_answer_and_of_the_next(store: Store) -> None:
    store.add_session(Session("s", "t", ""))
    words = [Feedback(0.5, 0.5, 0.5, error_types=("wrong",)), Feedback(0.6, 0.5, 0.5), Feedback(0.9, 1.0, 1.0)]
    rows = [
        made(
            NAMES[i], None, iteration=i + 1, feedback=f.as_dict(), reward=session_reward(f, i + 1),
            confidence=f.confidence, correctness=f.correctness_score, quality=f.quality_score,
        )
        for i, f in enumerate(words)
    ]  # fmt: skip
    ids = store.add_experiences(rows)
    worth = [0.5 + 0.15 + 0.1 - 0.1, 0.6 + 0.15 + 0.1, 0.9 + 0.3 + 0.2]

    def regains() -> dict[int, float]:
        return regained(store.experiences(session_id="s", limit=10))

    assert regains() == pytest.approx(dict(zip(ids, gains(worth), strict=True)))
    store.rate(ids[1], "me", 1.0, weight=0.2)
    worth[1] += 0.2 * (2.0 - (worth[1] + 0.1))  # a fifth of the reward, bonus included, is the person's
    assert regains() == pytest.approx(dict(zip(ids, gains(worth), strict=True)))
    assert regained(store.experiences(session_id="s", limit=10)[1:]) == {}  # what came before was pruned


# --- against a scripted endpoint


BEST = {"checklist": "List what the task requires", "fresh": "Answer the task anew"}


class Right:
    """Content with an answer that says so; what it was worth is kept."""

    def __init__(self, worth: Callable[[str], float]) -> None:
        self._worth, self.rewards = worth, list[float]()

    async def criticise(self, attempt: Attempt) -> Critique:
        self.rewards.append(self._worth(attempt.answer))
        return Critique(None if self.rewards[-1] > 1.2 else "wrong: it is wrong")


async def session(learner: StrategyLearner, sampler: EndpointSamplingClient, seed: int, worth: Any) -> list[Experience]:
    view, critic, task = sampler.view(), Right(worth), Task(f"task {seed % 3}", "Sort a list.")
    guide = Guide(learner, view, seed)
    env = RefineEnv(task, view.get_tokenizer(), critic, compose=guide.compose, max_turns=5)
    played = await play(Group("g", task, [env]), view, SamplingParams(max_tokens=50), seed=seed, version=0)
    assert len(played) == len(guide.choices) == len(critic.rewards)
    made_of = zip(guide.choices, gains(critic.rewards), critic.rewards, strict=True)
    return [
        Experience(
            f"s{seed}", task.id, i, "", "", action=choice.strategy.name, action_logprob=choice.logprob, gain=g, reward=r
        )
        for i, (choice, g, r) in enumerate(made_of, 1)
    ]  # fmt: skip


def trained(store: Store, best: str, seed: int, sessions: int, worth: Callable[[str], float]) -> StrategyLearner:
    """Sessions against an endpoint whose answers are right six times in ten if asked by `best`, else one in ten."""

    def script(asked: Asked) -> str:
        chance = 0.6 if BEST[best] in asked.prompt else 0.1
        return "right" if draws.uniform(draws.key("script", seed), asked.number) < chance else "wrong"

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


@pytest.mark.parametrize(("best", "seed"), [("checklist", 0), ("fresh", 1), ("checklist", 2)])
def test_the_best_strategy_is_found(store: Store, best: str, seed: int) -> None:
    learner = trained(store, best, seed, 130, {"right": 1.5, "wrong": 0.3}.__getitem__)
    assert learner.policy.next.probabilities[best] > 0.8, learner.learning()


def test_where_rewards_are_chance_nothing_is_found(store: Store) -> None:
    """The same sessions, each answer worth a number drawn for it: no strategy comes near what a best one would get."""
    count = iter(range(10**6))
    learner = trained(store, "checklist", 0, 130, lambda answer: draws.uniform(draws.key("chance"), next(count)) * 1.4)
    assert max(learner.policy.next.probabilities.values()) < 0.7, learner.learning()
