"""A critic in the update and in a run: values, returns, warm-up, metrics, resume, refusals, and what it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.critic import ValueCritic, describe_values, make_value_datum
from rlvr.algorithms.update import Passes, UpdateInputs, update
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse, TensorData
from rlvr.core.types import StopReason, Trajectory
from rlvr.engine.engine_options import LoraConfig
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from rlvr.training.compatibility import check_compatibility
from rlvr.training.monitor import Monitor
from rlvr.training.training_options import TrainingOptions
from tests.kit.tiny_run import RunKilled, attempt, stored_steps

TURNS = """
seed: 1
env: {name: "turn_letters:TurnLetters", kwargs: {turns: 4}}
model:
  tokenizer: words
  device: cpu
  config: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64}
rollout: {max_tokens: 2}
algorithm: {name: ppo_critic, gae_lambda: 0.5}
training: {steps: 4, prompts_per_step: 4, group_size: 4, ppo_epochs: 2, num_substeps: 2,
           optimizer: {learning_rate: 0.003}, critic: {warmup_steps: 1, optimizer: {learning_rate: 0.003}}}
evaluation: {tasks: 2, samples: 1}
run: {checkpoint_every: 1}
engine: {threads: 1}
"""


def batch(reward: Callable[[int], float | None] = lambda prompt: float(prompt == 5)) -> list[Trajectory]:
    """Two completions after each of three prompts; the prompt alone decides the reward."""
    return [
        Trajectory(
            "p", [prompt], "r", [2, 3, 4 + number], [-1.0, -1.2, -0.9], reward=reward(prompt), group_id=f"{prompt}",
            rollout_id=f"{prompt}/{number}", stop_reason=StopReason.STOP,
        )
        for prompt in (5, 6, 7)
        for number in range(2)
    ]  # fmt: skip


def step(policy: Any, critic: Any, trajectories: list[Trajectory], passes: Passes = Passes(), **how: Any) -> Any:
    spec = resolve_algorithm("ppo_critic", **how.pop("cells", {}))
    adam = how.pop("adam", lambda number: AdamParams(0.01))
    own = ValueCritic(critic, adam, how.pop("value_clip", None), **how)
    return update(
        policy, spec, trajectories, lambda number: AdamParams(0.001), passes,
        UpdateInputs(RunningBaseline(), 3, critic=own),
    )  # fmt: skip


def test_a_datum_of_the_critic_by_hand() -> None:
    """Prompt 7 8, response 1 2 3 with the middle token written: each value and return stands at the place before its
    token, and the last place, whose value a truncated episode takes, has no weight."""
    t = Trajectory("p", [7, 8], "r", [1, 2, 3], [-1.0, 0.0, -1.0], action_mask=[1, 0, 1])
    t.values, t.returns = [0.5, 9.0, 0.25, 9.0], [0.6, 0.0, 0.2]
    datum = make_value_datum(t, 0.5)
    assert datum.model_input.tokens == [7, 8, 1, 2, 3]
    inputs = {name: tensor.data.tolist() for name, tensor in datum.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [8, 1, 2, 3, 3]
    assert inputs["weights"] == [0.0, 0.5, 0.0, 0.5, 0.0]
    assert inputs["values"] == pytest.approx([0.0, 0.5, 0.0, 0.25, 0.0])
    assert inputs["returns"] == pytest.approx([0.0, 0.6, 0.0, 0.2, 0.0])


def test_the_share_of_explained_variance_by_hand() -> None:
    """Values 0 and 1, returns 0.5 and 1.5: they differ by 0.5 each, so all of the variance is explained. Returns 1 and
    0 instead: differences of variance 1, returns of variance 1/4: 1 - 4 = -3. Equal returns have none."""
    t = Trajectory("p", [7], "r", [1, 2], [-1.0, -1.0], values=[0.0, 1.0, 9.0], returns=[0.5, 1.5])
    assert describe_values([t]) == {"critic/value": 0.5, "critic/return": 1.0, "critic/explained_variance": 1.0}
    t.returns = [1.0, 0.0]
    assert describe_values([t])["critic/explained_variance"] == pytest.approx(-3.0)
    t.returns = [1.0, 1.0]
    assert describe_values([t]) == {"critic/value": 0.5, "critic/return": 1.0}


class ScriptedCritic:
    """Answers every pass with the values of a row, or zeros; its losses are 1 and 3. Keeps what it was sent."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values, self.settings, self.sent = values, list[Any](), list[Datum]()

    def forward(self, data: list[Datum], loss_fn: str) -> Any:
        rows = [{"values": TensorData.of(np.array(self.values or [0.0] * d.model_input.length))} for d in data]
        return LazyFuture.from_value(ForwardBackwardOutput(rows, {"loss:sum": 2.0 * len(self.settings) - 1.0}))

    def forward_backward(self, data: list[Datum], loss_fn: str, settings: Any = None) -> Any:
        self.settings.append(settings)
        self.sent += data
        return self.forward(data, loss_fn)

    def optim_step(self, adam: AdamParams) -> Any:
        return LazyFuture.from_value(OptimStepResponse({"grad_norm": 0.25}))


@pytest.mark.parametrize(("clip", "settings", "ratio"), [(0.2, {"value_clip": 0.2}, 1 / 3), (None, None, 0.0)])
def test_the_metrics_of_a_critics_update_by_hand(clip: float | None, settings: Any, ratio: float) -> None:
    """Values of 0, 0.5 and 0.3 before: the second has moved by 0.3. The loss is the mean of both steps'."""
    t = Trajectory("p", [7], "r", [1, 2, 3], [-1.0] * 3, values=[0.0, 0.5, 0.3, 9.0], returns=[1.0, 0.0, 0.0])
    client: Any = ScriptedCritic([0.1, 0.8, 0.3, 9.0])
    found = ValueCritic(client, lambda number: AdamParams(0.01), clip).learn([[(t, 0.5)], [(t, 0.5)]])
    assert client.settings == [settings] * 2
    assert found["critic/loss"] == 2.0 and found["critic/grad_norm"] == 0.25
    assert found["critic/clip_ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [("token_mean", (1 / 5, 1 / 5)), ("sequence_mean", (1 / 6, 1 / 4)), ("constant", (1 / 8,) * 2)],
)
def test_the_critic_has_the_reduction_of_the_policy(reduction: str, weights: tuple[float, ...]) -> None:
    """Completions of three and two tokens, a budget of four; one without a reward is in no denominator."""
    lengths = ((3, 1.0), (2, 1.0), (9, None))
    items = [Trajectory("p", [0], "r", [1] * n, [-1.0] * n, reward=r, rollout_id=str(n)) for n, r in lengths]
    critic: Any = ScriptedCritic()
    spec = resolve_algorithm("ppo_critic", reduction=reduction)
    update(
        MockTrainingClient(TablePolicy(["a"])), spec, items, lambda n: AdamParams(), Passes(),
        UpdateInputs(RunningBaseline(), 4, critic=ValueCritic(critic, lambda n: AdamParams(), alone=True)),
    )  # fmt: skip
    sent = [datum.loss_fn_inputs["weights"].tolist()[:-1] for datum in critic.sent]
    assert sent == [pytest.approx([weight] * n) for weight, (n, _) in zip(weights, lengths[:2], strict=True)]


def test_returns_that_are_equal_have_no_explained_variance_by_rounding() -> None:
    """Seven times 0.1 has a variance of 1.9e-34 in floats; the values differ, and explain nothing of it."""
    t = Trajectory("p", [7], "r", [1] * 7, [-1.0] * 7, values=[0.5, *[0.25] * 7], returns=[0.1] * 7)
    assert np.var(t.returns) > 0
    assert "critic/explained_variance" not in describe_values([t])


def test_values_are_those_of_before_the_update_and_an_unknown_reward_has_none(client: Callable[..., Any]) -> None:
    policy = client("qwen3", lora=LoraConfig(rank=4))
    critic = policy.create_critic()
    step(policy, critic, batch())
    trajectories = batch(lambda prompt: 1.0 if prompt == 5 else None)
    known = [t for t in trajectories if t.reward is not None]
    data = [make_value_datum(t, 0.0) for t in known]
    before = [row["values"].data for row in critic.forward(data, "value").result().loss_fn_outputs]
    step(policy, critic, trajectories)
    assert [t.values for t in trajectories if t.reward is None] == [[]] * 4
    assert np.array([t.values for t in known]) == pytest.approx(np.array(before), abs=1e-6)
    assert all(len(t.values) == 4 for t in known)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "adapter"])
def test_the_critic_learns_the_returns_and_the_policy_follows(lora: Any, client: Callable[..., Any]) -> None:
    """Explained variance from 0 to most of it on a batch that is seen again and again."""
    policy = client("qwen3", lora=lora)
    critic = policy.create_critic()
    before = policy.weights_sha256()
    rows = [step(policy, critic, batch(), Passes(epochs=2), alone=True).metrics() for _ in range(25)]
    assert policy.weights_sha256() == before, "the critic learned alone"
    assert all(row["updates"] == 0 for row in rows)
    assert rows[0]["critic/explained_variance"] == 0.0
    assert rows[-1]["critic/explained_variance"] > 0.8 and rows[-1]["critic/loss"] < rows[0]["critic/loss"] / 2
    row = step(policy, critic, batch(), Passes(epochs=2, substeps=2), value_clip=0.2).metrics()
    assert row["updates"] == 4 and policy.policy.version == 4 and policy.weights_sha256() != before
    assert {"critic/value", "critic/return", "critic/clip_ratio", "critic/grad_norm", "critic/learning_rate"} < set(row)


def test_each_optimizer_step_of_the_critic_has_its_own_parameters(client: Callable[..., Any]) -> None:
    """Three epochs of two steps: the last one has the number 5, as the schedule of a learning rate asks for."""
    policy, numbers = client("qwen3", lora=LoraConfig(rank=4)), list[int]()

    def adam(number: int) -> AdamParams:
        numbers.append(number)
        return AdamParams(0.01 * (1 + number))

    row = step(policy, policy.create_critic(), batch(), Passes(epochs=3, substeps=2), adam=adam).metrics()
    assert numbers == [0, 1, 2, 3, 4, 5] and row["critic/learning_rate"] == pytest.approx(0.06)


def test_a_reward_that_is_zero_everywhere_moves_nothing(client: Callable[..., Any]) -> None:
    """The returns are all 0, so there is no explained variance, and neither policy nor critic changes."""
    policy = client("qwen3", lora=LoraConfig(rank=4))
    critic = policy.create_critic()
    before = policy.weights_sha256(), critic.weights_sha256()
    row = step(policy, critic, batch(lambda prompt: 0.0)).metrics()
    assert (policy.weights_sha256(), critic.weights_sha256()) == before
    assert row["critic/return"] == row["critic/loss"] == 0.0 and "critic/explained_variance" not in row


def test_returns_that_are_all_equal_are_warned_of_once() -> None:
    warnings: list[str] = []
    monitor = Monitor(TrainingOptions(), warnings.append)
    monitor.watch_critic(0, {"critic/return": 0.5, "critic/explained_variance": 0.0})
    monitor.watch_critic(1, {})
    assert warnings == []
    monitor.watch_critic(2, {"critic/return": 0.0})
    monitor.watch_critic(3, {"critic/return": 0.0})
    [warning] = warnings
    assert warning.startswith("step 3: every return that the critic learns from is 0") and "check" in warning


def test_an_algorithm_with_a_critic_and_an_update_without_one_do_not_go_together(client: Callable[..., Any]) -> None:
    policy = client("qwen3", lora=LoraConfig(rank=4))
    with pytest.raises(ValueError, match=r"advantage=gae needs a critic: give UpdateInputs\(critic="):
        update(policy, resolve_algorithm("ppo_critic"), batch(), lambda n: AdamParams(), Passes(),
               UpdateInputs(RunningBaseline(), 3))  # fmt: skip
    with pytest.raises(ValueError, match="advantage=group_mean takes no critic: leave it out"):
        step(policy, policy.create_critic(), batch(), cells={"advantage": "group_mean"})


def compose(tmp_path: Path, *words: str) -> Any:
    (tmp_path / "turns.yaml").write_text(TURNS)
    return build_config(load(None, str(tmp_path / "turns.yaml"), [f"run.root={tmp_path / 'runs'}", *words]))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("algorithm.gamma=1.5", "algorithm.gamma=1.5, expected 0 to 1"),
        ("algorithm.gae_lambda=-1", "algorithm.gae_lambda=-1.0, expected 0 to 1"),
        ("training.critic.warmup_steps=-1", "training.critic.warmup_steps=-1, expected at least 0"),
        ("training.critic.warmup_steps=4", "warmup_steps=4 of training.steps=4: the critic would learn alone"),
        ("training.critic.value_clip=0", "training.critic.value_clip=0.0, expected above 0, or null"),
        ("training.critic.optimizer.learning_rate=0", "learning_rate=0.0, expected a number above 0"),
        ("client=mock", r"advantage=gae is not supported by client=mock \(it needs a critic"),
        ("training.num_minibatches=2", "the critic of algorithm.advantage=gae learns from the whole batch"),
        ("training.dynamic_sampling=1", "keeps every group"),
        ("model.lora.rank=4 training.critic.optimizer.name=muon training.critic.optimizer.matrix_learning_rate=0.1",
         "training.critic.optimizer.name=muon with model.lora"),
    ],
)  # fmt: skip
def test_what_a_run_with_a_critic_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "kit"))
    with pytest.raises(ValueError, match=message):
        config = compose(tmp_path, *word.split())
        plan(assemble(config))


def test_the_plan_of_a_run_names_its_critic(tmp_path: Path) -> None:
    config = compose(tmp_path)
    lines = plan(assemble(config))
    assert lines["critic"] == "a second model, alone for 1 steps; AdamW at 0.003"
    assert lines["algorithm"] == "ppo_critic: gae, loss ppo, token_mean"
    config = compose(tmp_path, "model.lora.rank=4", "training.critic.warmup_steps=0")
    assert plan(assemble(config))["critic"] == "a second adapter; AdamW at 0.003"


def test_a_group_of_one_has_a_signal(tmp_path: Path) -> None:
    config = compose(tmp_path)
    options = dataclasses.replace(config.training, group_size=1, num_substeps=1)
    check_compatibility(config.algorithm.resolve(), config.rollout, options)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param((), id="all weights"),
        pytest.param(("model.lora.rank=4",), id="adapter", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_ends_with_the_same_policy_and_critic(tmp_path: Path, lora: tuple[str, ...]) -> None:
    """In the middle of step 3, after the critic's warm-up: same hash, same metrics, same files of the critic."""
    for name in ("calm", "killed"):
        compose(tmp_path / name if (tmp_path / name).mkdir() is None else tmp_path)
        words = (str(tmp_path / name / "turns.yaml"), f"run.root={tmp_path / name}", "run.name=run", *lora)
        words = (*words, "training.critic.value_clip=0.001", "training.critic.optimizer.warmup_steps=7")
        if name == "killed":
            with pytest.raises(RunKilled):
                attempt(*words, killed_at=3)
        attempt(*words)
    calm, killed = tmp_path / "calm" / "run", tmp_path / "killed" / "run"
    rows = stored_steps(calm)
    assert stored_steps(killed) == rows
    steps = [row for row in rows if row["phase"] == "rl"]
    assert [row["updates"] for row in steps] == [0.0, 4.0, 4.0, 4.0]
    assert all("critic/explained_variance" in row for row in steps)
    assert [row["critic/learning_rate"] for row in steps] == pytest.approx([0.0015, 0.003, 0.003, 0.003])
    assert steps[-1]["critic/clip_ratio"] > 0, "the clip of the config, beyond which values moved"
    folders = sorted(place.name for place in (calm / "checkpoints").iterdir())
    assert len(folders) == 4 and sum(name.endswith("-critic") for name in folders) == 2
    for place in folders:
        for file in (calm / "checkpoints" / place).glob("*.safetensors"):
            assert (killed / "checkpoints" / place / file.name).read_bytes() == file.read_bytes()


def test_a_checkpoint_with_a_damaged_critic_is_not_resumed_from(tmp_path: Path, capsys: Any) -> None:
    """The one before is; without a head the critic's folder is damaged, so nothing goes on with a new head."""
    compose(tmp_path)
    words = (str(tmp_path / "turns.yaml"), f"run.root={tmp_path}", "run.name=run")
    with pytest.raises(RunKilled):
        attempt(*words, killed_at=3)
    (tmp_path / "run" / "checkpoints" / "rl-000002-critic" / "value_head.safetensors").unlink()
    attempt(*words)
    shown = capsys.readouterr()
    assert "checkpoint checkpoints/rl-000002 is damaged (value_head.safetensors is missing" in shown.out + shown.err
    assert "resuming: rl, 1 steps done" in shown.out + shown.err


@pytest.mark.slow
def test_credit_for_each_turn_learns_faster_than_credit_for_the_episode(tmp_path: Path) -> None:
    """Sixteen turns, each with a reward of its own: at equal samples the critic is ahead, and explains its returns."""
    changed = ["env.kwargs.turns=16", "training.steps=40", "training.prompts_per_step=8", "run.checkpoint_every=99"]
    changed += ["training.ppo_epochs=1", "training.num_substeps=1"]
    results: dict[str, list[dict[str, Any]]] = {}
    for name, words in {
        "grpo": ["algorithm.name=grpo", "algorithm.gae_lambda=null"],
        "ppo_critic": ["training.critic.warmup_steps=0"],
    }.items():
        compose(tmp_path)
        attempt(str(tmp_path / "turns.yaml"), f"run.root={tmp_path}", f"run.name={name}", *changed, *words)
        results[name] = [row for row in stored_steps(tmp_path / name) if row["phase"] == "rl"]
    late = {name: sum(row["reward"] for row in rows[-5:]) / 5 for name, rows in results.items()}
    print(late)
    assert late["ppo_critic"] > late["grpo"] + 0.05
    explained = [row["critic/explained_variance"] for row in results["ppo_critic"]]
    assert explained[0] == 0 and np.mean(explained[-5:]) > 0.1
