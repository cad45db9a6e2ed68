"""Reductions and learning-rate schedules of a user's, by name, by path and as functions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.algorithms.advantages import Advantage, RunningBaseline
from rlvr.algorithms.optimizers import AdamW, register_decay
from rlvr.algorithms.reductions import REDUCTIONS, find_reduction, register_reduction
from rlvr.cli.main import run as run_command
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.types import Trajectory
from rlvr.runs.run_folder import hash_custom_functions

HERE = "tests.algorithms.test_own_functions"


def by_token(lengths: list[int], max_tokens: int) -> list[float]:
    return [1 / sum(lengths)] * len(lengths)


def by_budget(lengths: list[int], max_tokens: int) -> list[float]:
    return [1 / (len(lengths) * max_tokens) for _ in lengths]


def too_few(lengths: list[int], max_tokens: int) -> list[float]:
    return [1.0]


def halve(progress: float) -> float:
    return 1.0 if progress < 0.5 else 0.5


def falls_linearly(progress: float) -> float:
    return 1 - progress


def says_nothing(progress: float) -> Any:
    return "fast"


def rollouts() -> list[Trajectory]:
    """Three completions of 2, 3 and 1 tokens; the last two are branches of one rollout."""
    made = [Trajectory("p", [1], "r", [1] * n, [0.0] * n) for n in (2, 3, 1)]
    made[1].rollout_id = made[2].rollout_id = "one"
    return made


@pytest.mark.parametrize(("own", "like"), [("by_token", "token_mean"), ("by_budget", "constant")])
def test_a_reduction_of_one_s_own_weighs_as_the_built_in_one_of_the_same_formula(own: str, like: str) -> None:
    assert find_reduction(f"{HERE}:{own}")(rollouts(), 7) == pytest.approx(REDUCTIONS[like](rollouts(), 7), abs=1e-15)


def test_branches_of_one_rollout_are_one_completion() -> None:
    seen: list[list[int]] = []

    @register_reduction("test_seen")
    def keep(lengths: list[int], max_tokens: int) -> list[float]:
        seen.append(lengths)
        return [float(length) for length in lengths]

    assert find_reduction("test_seen")(rollouts(), 7) == [2.0, 4.0, 4.0] and seen == [[2, 4]]
    with pytest.raises(ValueError, match=r"algorithm.reduction 'test_seen' is already registered"):
        register_reduction("test_seen")(by_token)


def test_wrong_weights_and_shares_are_named() -> None:
    with pytest.raises(ValueError, match=rf"algorithm.reduction={HERE}:too_few: expected 2 weights"):
        find_reduction(f"{HERE}:too_few")(rollouts(), 7)
    with pytest.raises(ValueError, match=r"unknown decay 'cosin' \(did you mean 'cosine'\?\)"):
        AdamW(decay="cosin")
    for wrong in (5, None, ["linear"]):
        with pytest.raises(ValueError, match=r"decay=.* expected a name"):
            AdamW(decay=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"algorithm.reduction=.* expected a name"):
            replace(rlvr.resolve_algorithm("dapo"), reduction=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"decay={HERE}:says_nothing: the function returned 'fast' at progress 0"):
        AdamW(decay=f"{HERE}:says_nothing")


def test_a_decay_of_one_s_own_follows_the_warm_up_and_keeps_the_final_rate() -> None:
    own = AdamW(learning_rate=0.1, decay=f"{HERE}:halve", warmup_steps=2)
    assert [own.at(step, 6).learning_rate for step in range(6)] == pytest.approx(
        [0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.05, 0.05]
    )
    kept = AdamW(learning_rate=0.1, decay=f"{HERE}:halve", final_rate=0.2)
    assert kept.at(3, 4).learning_rate == pytest.approx(0.1 * (0.2 + 0.8 * 0.5))
    register_decay("test_linear")(falls_linearly)
    assert [AdamW(decay="test_linear").at(i, 5) for i in range(5)] == [AdamW(decay="linear").at(i, 5) for i in range(5)]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., rlvr.Run]]:
    def run(name: str | None, **given: Any) -> rlvr.Run:
        given = {"reward": f"{HERE}:is_long", **given, **({"name": name} if name else {})}
        return rlvr.train(
            data="toy", client="mock", steps=4, max_tokens=5,
            group_size=4, prompts_per_step=2, evaluation={"tasks": 2, "samples": 2}, root=tmp_path,
            quiet=True, **given,
        )  # fmt: skip

    yield run


def is_long(prompt: str, response: str, meta: Any) -> float:
    return math.tanh(len(response) / 20)


def test_a_run_takes_both_as_functions_and_has_the_bits_of_the_built_in_ones(train: Callable[..., rlvr.Run]) -> None:
    built_in = train("a", algorithm={"reduction": "token_mean"}, optimizer=AdamW(learning_rate=0.1, decay="linear"))
    own = train(
        "b",
        algorithm={"reduction": lambda lengths, max_tokens: [1 / sum(lengths)] * len(lengths)},
        optimizer=AdamW(learning_rate=0.1, decay=lambda progress: 1 - progress),  # type: ignore[arg-type]
    )
    assert own.summary["weights_sha256"] == built_in.summary["weights_sha256"]
    other = train("c", algorithm={"reduction": "token_mean"}, optimizer=AdamW(learning_rate=0.1))
    assert other.summary["weights_sha256"] != built_in.summary["weights_sha256"]


CHANGING = """
from dataclasses import dataclass

from rlvr.algorithms.advantages import Advantage


@dataclass(frozen=True)
class Scaled(Advantage):
    name = "scaled"

    def estimate(self, trajectories, baseline):
        for trajectory in trajectories:
            trajectory.advantage = trajectory.reward or 0.0 - 1 / 2


def weigh(lengths, max_tokens):
    return [1 / sum(lengths)] * len(lengths)


def fall(progress):
    return 1 - progress
"""


def test_a_run_does_not_go_on_with_a_changed_function(
    train: Callable[..., rlvr.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "changing_functions.py"
    source.write_text(CHANGING)
    for given, key in (
        ({"algorithm": {"reduction": "changing_functions:weigh"}}, "algorithm.reduction"),
        ({"optimizer": {"decay": "changing_functions:fall"}}, "training.optimizer.decay"),
        ({"advantage": "changing_functions:Scaled"}, "algorithm.advantage"),
    ):
        source.write_text(CHANGING)
        done = train(key, **given)
        source.write_text(CHANGING.replace("1 ", "2 "))
        with pytest.raises(ValueError, match=rf"the source of {key} \(changing_functions.py\)"):
            train(key, **given)
        source.write_text(CHANGING)
        assert train(key, **given).summary["weights_sha256"] == done.summary["weights_sha256"]
    words = ["training.critic.optimizer.decay=changing_functions:fall", "algorithm=ppo_critic"]
    hashed = hash_custom_functions(build_config(load("arithmetic", None, words)))
    assert list(hashed) == ["the source of training.critic.optimizer.decay (changing_functions.py)"]


SCALE = 1.0


def test_a_changed_constant_of_an_advantage_or_of_a_reward_object_makes_another_run(
    train: Callable[..., rlvr.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Scaled(Advantage):
        name = "own_scaled"

        def estimate(self, trajectories: Sequence[Trajectory], baseline: RunningBaseline) -> None:
            for trajectory in trajectories:
                trajectory.advantage = SCALE * ((trajectory.reward or 0.0) - 0.5)

    class Long:
        def __call__(self, prompt: str, response: str, meta: Any) -> float:
            return SCALE * is_long(prompt, response, meta)

    for given in ({"advantage": Scaled()}, {"reward": Long()}):
        first = train(None, **given)
        assert train(None, **given).folder == first.folder
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
        assert train(None, **given).folder != first.folder
        monkeypatch.undo()


def break_off(*arguments: Any) -> Any:
    raise KeyError("rate")


@pytest.mark.parametrize("given", [{"optimizer": {"decay": break_off}}, {"algorithm": {"reduction": break_off}}])
def test_a_function_that_raises_is_named_with_its_line(train: Callable[..., rlvr.Run], given: dict[str, Any]) -> None:
    line = break_off.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"break_off raised KeyError: 'rate', in break_off at .*\.py:{line}"):
        train("a", **given)


def test_rlvr_config_names_a_decay_that_raises(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["client=mock", "env.name=toy", "reward.type=length", f"training.optimizer.decay={__name__}:break_off"]
    assert run_command(["config", "--config-name=arithmetic", *words]) == 2
    said = capsys.readouterr().err
    assert "break_off raised KeyError: 'rate', in break_off at" in said and "Traceback" not in said
