"""Environments in groups: the cookbook's contract, its environments in our loops, ours in its own."""

from __future__ import annotations

import asyncio
import json
import pickle
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paid_letters import PaidLetters

from rlvr.compat.problem_envs import Gsm8kDatasetBuilder, Gsm8kEnv, ProblemDataset, ProblemEnv
from rlvr.compat.renderers import get_renderer
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.protocols import InitialObservationOverflow, StepResult, TaskSource
from rlvr.core.rng import uniform
from rlvr.core.types import Outcome, StopReason
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs import resolve_environment
from rlvr.envs.groups import EnvGroupBuilder, GroupSource, RLDataset
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score

STOP = "\n\nUser:"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer("pieces", string.printable, end="<eos>", pad="<pad>")


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Any:
    return get_renderer("role_colon", tokenizer)


class Script:
    """A sampler that answers with given texts, in turn."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts, self.asked = tokenizer, list(texts), list[str]()

    def sample(
        self, prompt: Any, num_samples: int, sampling_params: SamplingParams, include_prompt_logprobs: bool = False
    ) -> LazyFuture[SampleResponse]:
        self.asked.append(self.tokenizer.decode(prompt.to_ints()))
        said = [self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False) for _ in range(num_samples)]
        sequences = [SampledSequence(StopReason.STOP, tokens, [-uniform(1, i) for i in tokens]) for tokens in said]
        return LazyFuture.from_value(SampleResponse(sequences))

    def compute_logprobs(self, prompt: Any) -> Any:
        raise NotImplementedError

    def get_tokenizer(self) -> Any:
        return self.tokenizer


class Sum(ProblemEnv):
    def __init__(self, x: int, y: int, renderer: Any) -> None:
        super().__init__(renderer)
        self.x, self.y = x, y

    def get_question(self) -> str:
        return f"{self.x}+{self.y}?"

    def check_answer(self, sample_str: str) -> bool:
        return sample_str.strip() == str(self.x + self.y)

    def check_format(self, sample_str: str) -> bool:
        return sample_str.strip().isdigit()

    def get_reference_answer(self) -> str:
        return str(self.x + self.y)


@pytest.mark.parametrize(
    ("text", "reward", "format", "correct"),
    [
        (f" 5{STOP}", 1.0, 1.0, 1.0),
        (f" 6{STOP}", 0.0, 1.0, 0.0),
        (f" six{STOP}", -0.1, 0.0, 0.0),
        (" 5", 0.9, 0.0, 1.0),  # right, and never ended
        (" 5<eos>", 0.9, 0.0, 1.0),  # the text ended, not the turn
        (" 6", -0.1, 0.0, 0.0),
    ],
)
def test_a_problem_rewards_the_answer_and_its_form(
    tokenizer: Any, renderer: Any, text: str, reward: float, format: float, correct: float
) -> None:
    """1[correct] + 0.1 (1[format] - 1), and the form needs the stop sequence."""
    result = asyncio.run(Sum(2, 3, renderer).step(tokenizer.encode(text, add_special_tokens=False)))
    assert result.reward == pytest.approx(reward)
    assert result.metrics == {"format": format, "correct": correct}
    assert result.episode_done


def test_the_problem_reward_is_the_cookbooks(tokenizer: Any, renderer: Any) -> None:
    """The same answers earn the same in the cookbook's ArithmeticEnv, whose format is always right."""
    theirs = pytest.importorskip(
        "tinker_cookbook.recipes.math_rl.arithmetic_env", reason="the cookbook is the other side of this comparison"
    )
    their_renderer = get_renderer("cookbook:role_colon", tokenizer)

    class Any_(Sum):
        def check_format(self, sample_str: str) -> bool:
            return True

    for text in (f" 5{STOP}", f" 6{STOP}", " 5", " 5<eos>", " 6", f"5{STOP} 6{STOP}"):
        action = tokenizer.encode(text, add_special_tokens=False)
        expected = asyncio.run(theirs.ArithmeticEnv(2, 3, their_renderer).step(action))
        found = asyncio.run(Any_(2, 3, renderer).step(action))
        assert (found.reward, found.metrics) == (expected.reward, expected.metrics), text


def play(source: TaskSource, sampler: Script, size: int, count: int = 1) -> list[Any]:
    tasks = [source.train(0, i, "") for i in range(count)]
    groups = open_groups(source, tasks, size, sampler.get_tokenizer(), "step/0")
    trajectories = rollout(groups, sampler, SamplingParams(max_tokens=20), seed=1)
    score(trajectories, resolve_reward(source.reward))
    return trajectories


def test_a_dataset_of_groups_is_a_task_source(tokenizer: Any, renderer: Any) -> None:
    """Prompts, stops, rewards, metrics and verdicts are the environments' own; the order is the dataset's."""
    dataset = ProblemDataset([partial(Sum, i, 1, renderer) for i in range(5)], 2, 2, "sums")
    source = GroupSource(dataset, ProblemDataset([partial(Sum, 9, 9, renderer)], 2, 1, "sums"))
    sampler = Script(tokenizer, [f" 1{STOP}", f" 2{STOP}", " 2", f" no{STOP}"])
    trajectories = play(source, sampler, 2, count=2)
    assert sampler.asked == ["User: 0+1?\n\nAssistant:", "User: 1+1?\n\nAssistant:"]
    assert [t.reward for t in trajectories] == pytest.approx([1.0, 0.0, 0.9, -0.1])
    outcomes = [t.scores["environment"].outcome for t in trajectories]
    assert outcomes == [Outcome.PASSED, Outcome.FAILED, Outcome.PASSED, Outcome.FAILED]
    assert [t.metadata["format"] for t in trajectories] == [1, 1, 0, 0]
    ids = [source.train(7, i, "").id for i in range(7)]
    assert ids == [f"train-0-{b}-{p}" for b, p in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))] + [
        "train-1-0-0",
        "train-1-0-1",
    ]
    assert [task.id for task in source.heldout(None)] == ["test-0-0-0"]
    assert source.heldout(0) == []
    assert source.describe_task(source.heldout(1)[0]) == {"tags": "sums"}


class Guess:
    """Two turns: a letter, then whether it was said again. The second observation extends the first."""

    def __init__(self, tokenizer: Any, group: Pair) -> None:
        self.tokenizer, self.group = tokenizer, group
        self.seen = tokenizer.encode("say:", add_special_tokens=False)
        self.turn = 0

    async def initial_observation(self) -> tuple[ModelInput, Any]:
        return ModelInput(self.seen), [";"]

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        self.turn += 1
        self.seen = [*self.seen, *action, *self.tokenizer.encode(" again:", add_special_tokens=False)]
        done = self.turn == 2
        return StepResult(0.25, done, None if done else ModelInput(self.seen), [";"], {"turn": float(self.turn)})


class Pair(EnvGroupBuilder):
    """The longer of two answers wins: a reward that only the group can give."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.cleaned, self.seen = tokenizer, 0, list[Any]()

    async def make_envs(self) -> Sequence[Any]:
        return [Guess(self.tokenizer, self), Guess(self.tokenizer, self)]

    async def compute_group_rewards(self, trajectory_group: list[Any], env_group: Sequence[Any]) -> list[Any]:
        self.seen.append(trajectory_group)
        lengths = [sum(len(t.ac.tokens) for t in e.transitions) for e in trajectory_group]
        assert [env.turn for env in env_group] == [2, 2]
        return [(1.0 if n == max(lengths) else -1.0, {"length": float(n)}) for n in lengths]

    async def cleanup(self) -> None:
        self.cleaned += 1


class Pairs(RLDataset):
    def __init__(self, tokenizer: Any) -> None:
        self.pair = Pair(tokenizer)

    def get_batch(self, index: int) -> Sequence[Pair]:
        return [self.pair]

    def __len__(self) -> int:
        return 1


def test_group_rewards_are_added_to_the_rewards_of_the_turns(tokenizer: Any) -> None:
    """After the last turn, with all turns' log-probs; then cleanup. A size is made of whole groups."""
    dataset = Pairs(tokenizer)
    sampler = Script(tokenizer, ["a;", "bbb;", "a;", "bb;", "c;", "c;", "d;", "dddd;"])
    trajectories = play(GroupSource(dataset), sampler, 2)
    assert [t.reward for t in trajectories] == [0.5 - 1.0, 0.5 + 1.0]
    assert [t.metadata["length"] for t in trajectories] == [4.0, 7.0]
    assert dataset.pair.cleaned == 1
    turns = [turn for episode in dataset.pair.seen[0] for turn in episode.transitions]
    assert [tokenizer.decode(turn.ac.tokens) for turn in turns] == ["a;", "a;", "bbb;", "bb;"]
    assert tokenizer.decode(turns[1].ob.to_ints()) == "say:a; again:"
    assert all(turn.ac.maybe_logprobs == [-uniform(1, i) for i in turn.ac.tokens] for turn in turns)
    with pytest.raises(ValueError, match="makes groups of 2, and 3 episodes"):
        play(GroupSource(dataset), sampler, 3)
    four = play(GroupSource(dataset), Script(tokenizer, [f"{c};" for c in "aabcaabc"]), 4)
    assert len(four) == 4 and len(dataset.pair.seen) == 3


def test_an_environments_reward_needs_its_episode() -> None:
    """A text alone is no episode, and a reward that is no number is an error, not a zero."""
    reward = resolve_reward("environment")
    assert reward("2+2?", "4") is None


def rows(folder: Path, count: int = 6) -> Path:
    for split, first in (("train", 0), ("test", 100)):
        text = "".join(
            json.dumps(
                {"question": f"Tom has {first + i} pens and buys 1. How many?", "answer": f"#### {first + i + 1}"}
            )
            + "\n"
            for i in range(count)
        )
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def test_gsm8k_comes_in_batches_of_groups(tmp_path: Path, tokenizer: Any) -> None:
    """Named as in the cookbook; batches cover every question once, in an order of the seed; builders pickle."""
    tokenizer.save_pretrained(tmp_path / "model")
    sizes: dict[str, Any] = {"batch_size": 4, "group_size": 3, "renderer_name": "role_colon"}
    where: dict[str, Any] = {"model_name_for_tokenizer": str(tmp_path / "model"), "data": str(rows(tmp_path))}
    train, test = asyncio.run(Gsm8kDatasetBuilder(**sizes, **where)())
    assert (len(train), len(test)) == (2, 2)
    made = [builder for i in range(len(train)) for builder in train.get_batch(i)]
    envs: list[Any] = [asyncio.run(pickle.loads(pickle.dumps(builder)).make_envs()) for builder in made]
    assert [len(group) for group in envs] == [3] * 6
    assert sorted(group[0].answer for group in envs) == [1, 2, 3, 4, 5, 6]
    assert [len(asyncio.run(b.make_envs())) for b in test.get_batch(0)] == [1] * 4
    other, _ = asyncio.run(Gsm8kDatasetBuilder(**sizes, **where, seed=1)())
    orders = [[b.env_thunk().get_question() for i in range(2) for b in d.get_batch(i)] for d in (train, other)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    observation, stop = asyncio.run(envs[0][0].initial_observation())
    text = tokenizer.decode(observation.to_ints())
    assert text.count("User:") == 2 and text.endswith("written inside \\boxed{}.\n\nAssistant:") and STOP in stop
    plain, _ = asyncio.run(Gsm8kDatasetBuilder(**sizes, **where, convo_prefix=None)())
    observation, _ = asyncio.run(plain.get_batch(0)[0].env_thunk().initial_observation())
    assert tokenizer.decode(observation.to_ints()).count("User:") == 1
    with pytest.raises(ValueError, match="batch 2, expected 0 to 1"):
        train.get_batch(2)
    with pytest.raises(ValueError, match="expected 'standard', a list"):
        asyncio.run(Gsm8kDatasetBuilder(**sizes, **where, convo_prefix="two")())


@pytest.mark.parametrize(
    ("answer", "right", "formed"),
    [
        ("so \\boxed{18}", True, True),
        ("so \\boxed{18.0}", True, True),
        ("so \\boxed{1,8}", False, True),
        ("first \\boxed{18}, no: \\boxed{17}", False, True),
        ("so 18", False, False),
        ("so \\boxed{18", False, False),
    ],
)
def test_gsm8k_judges_the_last_box(renderer: Any, answer: str, right: bool, formed: bool) -> None:
    env = Gsm8kEnv("q", "16 + 2 = 18\n#### 18", renderer)
    assert (env.check_answer(answer), env.check_format(answer)) == (right, formed)


# The real cookbook, where it is installed.


def test_a_dataset_builder_of_the_cookbook_runs_in_our_loops(tokenizer: Any, tmp_path: Path) -> None:
    """`env.name=groups` with the path of its own ArithmeticDatasetBuilder: the cookbook's rewards, our trajectories."""
    theirs = pytest.importorskip("tinker_cookbook.recipes.math_rl.arithmetic_env", reason="it is what is run here")
    tokenizer.save_pretrained(tmp_path)
    options = {"batch_size": 2, "n_batches": 3, "group_size": 2, "include_fewshot": False}
    source = resolve_environment(
        "groups",
        dataset="tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder",
        options={**options, "model_name_for_tokenizer": str(tmp_path), "renderer_name": "role_colon"},
    )
    dataset = source._datasets["train"]  # pyright: ignore
    assert isinstance(dataset, theirs.ArithmeticDataset)
    envs = [asyncio.run(builder.make_envs())[0] for builder in dataset.get_batch(0)]
    sums = [env.x + env.y for env in envs]
    sampler = Script(tokenizer, [f" {sums[0]}{STOP}", " oh", f" {sums[1]}", f" {sums[1]}{STOP}"])
    trajectories = play(source, sampler, 2, count=2)
    assert [t.reward for t in trajectories] == pytest.approx([1.0, -0.1, 0.9, 1.0])
    assert [f"What is {env.x} + {env.y}?" in asked for env, asked in zip(envs, sampler.asked, strict=True)] == [
        True
    ] * 2


class TooLong:
    """A conversation that fits no budget, as the cookbook's environments say it, or ours."""

    def __init__(self, overflow: Any) -> None:
        self.overflow = overflow

    async def initial_observation(self) -> Any:
        return self.overflow(-0.5, {"stop/max_tokens": 1.0}, {"why": "too long"})

    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        raise AssertionError("nothing was asked, so nothing was said")


class Half(EnvGroupBuilder):
    """One episode is over at once; the group's reward counts turns that said something."""

    def __init__(self, tokenizer: Any, overflow: Any) -> None:
        self.tokenizer, self.overflow = tokenizer, overflow

    async def make_envs(self) -> Sequence[Any]:
        return [TooLong(self.overflow), Guess(self.tokenizer, Pair(self.tokenizer))]

    async def compute_group_rewards(self, trajectory_group: list[Any], env_group: Sequence[Any]) -> list[Any]:
        return [(float(sum(bool(t.ac.tokens) for t in e.transitions)), {}) for e in trajectory_group]


class Halves(Pairs):
    def __init__(self, tokenizer: Any, overflow: Any) -> None:
        self.pair = Half(tokenizer, overflow)


def test_a_first_observation_that_fits_no_budget_ends_its_episode_alone(tokenizer: Any) -> None:
    """The cookbook's word for it and ours, in our loops; and ours in the cookbook's rollout."""
    rl = pytest.importorskip("tinker_cookbook.rl.types")
    for overflow in (rl.InitialObservationOverflow, InitialObservationOverflow):
        sampler = Script(tokenizer, ["a;", "b;"])
        over, played = play(GroupSource(Halves(tokenizer, overflow)), sampler, 2)
        assert over.is_empty and not played.is_empty
        assert (over.reward, over.response_tokens, over.reports[0]) == (-0.5, [], {"stop/max_tokens": 1.0})
        assert (played.reward, len(sampler.asked)) == (0.5 + 2.0, 2)
    from rlvr.compat.cookbook_envs import for_cookbook

    [there] = for_cookbook(Halves(tokenizer, InitialObservationOverflow)).get_batch(0)
    given = asyncio.run(asyncio.run(there.make_envs())[0].initial_observation())
    assert given == rl.InitialObservationOverflow(-0.5, {"stop/max_tokens": 1.0}, {"why": "too long"})


class Policy:
    """The cookbook's token completer over a scripted sampler."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def __call__(self, model_input: Any, stop: Any, **_: Any) -> Any:
        from tinker_cookbook.completers import TokensWithLogprobs

        answer = self.script.sample(model_input, 1, SamplingParams(stop=stop)).result().sequences[0]
        return TokensWithLogprobs(tokens=answer.tokens, maybe_logprobs=answer.logprobs, stop_reason="stop")


def test_our_groups_run_in_the_cookbooks_rollout(tokenizer: Any, renderer: Any) -> None:
    """Its own do_group_rollout plays them, turn by turn, and adds up the same rewards as ours."""
    rollouts = pytest.importorskip("tinker_cookbook.rl.rollouts", reason="it is what plays here")
    from rlvr.compat.cookbook_envs import for_cookbook

    said = ["a;", "a;", "bbb;", "bb;"]
    dataset = Pairs(tokenizer)
    [builder] = for_cookbook(dataset).get_batch(0)
    group = asyncio.run(rollouts.do_group_rollout(builder, Policy(Script(tokenizer, said))))
    turnwise = Script(tokenizer, [said[0], said[2], said[1], said[3]])
    assert group.get_total_rewards() == [t.reward for t in play(GroupSource(Pairs(tokenizer)), turnwise, 2)]
    assert dataset.pair.cleaned == 1
    problems = ProblemDataset([partial(Sum, 2, 3, renderer)], 1, 2, "sums")
    [builder] = for_cookbook(problems).get_batch(0)
    group = asyncio.run(rollouts.do_group_rollout(builder, Policy(Script(tokenizer, [f" 5{STOP}", " 6"]))))
    assert group.get_total_rewards() == pytest.approx([1.0, -0.1])
    assert builder.logging_tags() == ["sums"]


def test_a_task_source_of_ours_runs_in_the_cookbooks_rollout(tokenizer: Any, tmp_path: Path) -> None:
    """The verifier judges each answer as in our loops; one that cannot be judged is an error there."""
    rollouts = pytest.importorskip("tinker_cookbook.rl.rollouts", reason="it is what plays here")
    from rlvr.compat.cookbook_envs import SourceDataset, for_cookbook

    source = resolve_environment("gsm8k", path=str(rows(tmp_path)), template="{question}\n")
    dataset = SourceDataset(source, tokenizer, batch_size=4, group_size=2)
    assert len(dataset) == 2 and len(SourceDataset(source, tokenizer, 3, 1, heldout=True)) == 2
    task = dataset.get_batch(0)[0].task
    right = task.meta["answer"]
    script = Script(tokenizer, [f"{right}<eos>", "#### 9999<eos>"])
    group = asyncio.run(rollouts.do_group_rollout(for_cookbook(dataset).get_batch(0)[0], Policy(script)))
    assert group.get_total_rewards() == [1.0, 0.0]
    assert [metrics["correct"] for metrics in group.metrics_G] == [1.0, 0.0]
    assert script.asked == [f"{task.prompt}"] * 2


def test_rewards_of_a_sources_own_episodes_are_declared_in_the_cookbooks_loops_too(tokenizer: Any) -> None:
    """What an episode gives is in the cookbook's sum whatever happens; the group's reward corrects it to the weight."""
    rollouts = pytest.importorskip("tinker_cookbook.rl.rollouts", reason="it is what plays here")
    from rlvr.compat.cookbook_envs import SourceDataset, for_cookbook

    def total(**options: Any) -> float:
        dataset = SourceDataset(PaidLetters(), tokenizer, batch_size=1, group_size=1, batches=1, **options)
        script = Script(tokenizer, ["b<eos>", "a<eos>"])
        [builder] = for_cookbook(dataset).get_batch(0)
        return asyncio.run(rollouts.do_group_rollout(builder, Policy(script))).get_total_rewards()[0]

    assert [total(environment_weight=weight) for weight in (0.0, 0.5, 1.0)] == [1.0, 1.25, 1.5]
    with pytest.raises(ValueError, match="environment_weight"):
        total()
