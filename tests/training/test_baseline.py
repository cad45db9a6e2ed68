"""What the evaluation before training says: groups with signal to come, and what stands in the way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.training.baseline import describe_signal, estimate_signal, find_obstacles
from rlvr.training.evaluate import Evaluation
from rlvr.training.judged_tasks import TaskResult
from rlvr.training.run_diagnosis import diagnose_run
from rlvr.training.training_options import TrainingOptions
from tests.kit.tiny_run import attempt

GRPO = resolve_algorithm("grpo")
OPTIONS = TrainingOptions(group_size=8)


def baseline(*passed: int, judged: int = 4, **fields: Any) -> Evaluation:
    return Evaluation([TaskResult(f"t{i}", "", c, judged, c / judged) for i, c in enumerate(passed)], k=1, **fields)


def test_the_share_is_said_with_what_it_comes_from():
    result = baseline(*[0, 1, 2, 3] * 5)
    share = estimate_signal(result, GRPO, OPTIONS)
    assert 0.8 < share < 1 and not find_obstacles(result, share)
    line = describe_signal(share, result, 8)
    assert "groups of 8" in line and "20 held-out tasks, 80 completions" in line


@pytest.mark.parametrize(
    ("passed", "code", "remedies"),
    [
        ([0] * 20, "one_reward", ("reward.type", "easier tasks", "training.group_size")),
        ([4] * 20, "one_reward", ("ignore what a completion says", "harder tasks", "rlvr verify")),
        ([0] * 50 + [4], "too_hard", ("reward.type", "easier tasks", "training.group_size")),
        ([4] * 50 + [0], "too_easy", ("harder tasks", "rlvr verify")),
    ],
)
def test_near_zero_asks_for_a_remedy(passed: list[int], code: str, remedies: tuple[str, ...]):
    result = baseline(*passed)
    share = estimate_signal(result, GRPO, OPTIONS)
    assert share < 0.1
    [found] = find_obstacles(result, share)
    assert (found.severity, found.code) == ("problem", code)
    assert all(remedy in found.remedy for remedy in remedies), found.remedy


def test_a_reward_that_pays_the_same_for_all_is_named_whatever_it_pays():
    """0.3 for every completion is no pass; the share of groups cannot be told from pass rates."""
    constant = Evaluation([TaskResult(f"t{i}", "", 0, 4, 0.3) for i in range(5)], k=1)
    share = estimate_signal(constant, GRPO, OPTIONS)
    assert math.isnan(share)
    cut = replace(constant, truncated=20)
    for first in (find_obstacles(constant, share)[0], find_obstacles(cut, share)[0]):
        assert first.code == "one_reward" and "the same reward, 0.3" in first.fact


def test_pass_rates_tell_nothing_where_signal_comes_from_elsewhere():
    graded = Evaluation([TaskResult(f"t{i}", "", 0, 4, 0.1 * i) for i in range(5)], k=1)
    assert math.isnan(estimate_signal(graded, GRPO, OPTIONS)) and not find_obstacles(graded, math.nan)
    none = baseline(*[0] * 20)
    for algorithm, options in (
        (resolve_algorithm("reinforce"), OPTIONS),
        (GRPO, replace(OPTIONS, control="random_reward")),
    ):
        assert math.isnan(estimate_signal(none, algorithm, options)), (algorithm.advantage, options.control)
    assert math.isnan(estimate_signal(Evaluation([], 1), GRPO, OPTIONS)) and not find_obstacles(Evaluation([], 1), 0)


def test_completions_that_are_cut_off_are_named_first():
    found = find_obstacles(baseline(*[0] * 20, truncated=60), 0.0)
    assert [f.code for f in found] == ["truncated", "one_reward"] and "75%" in found[0].fact
    assert find_obstacles(baseline(*[1] * 20, truncated=60), 0.6) == [], "short answers may be meant: there is signal"
    of_one_token = replace(baseline(*[0] * 20, truncated=80), tokens=80)
    assert [f.code for f in find_obstacles(of_one_token, 0.0)] == ["one_reward"], "rollout.max_tokens=1 has no end"
    graded = Evaluation([TaskResult(f"t{i}", "", 0, 4, 0.1 * i) for i in range(5)], k=1, truncated=20)
    assert find_obstacles(graded, math.nan) == [], "and here, by rewards between 0 and 1"


TALKATIVE = """
seed: 1
client: mock
env: {name: "tests.kit.letter_tasks:LetterTasks"}
reward: {type: "tests.training.test_baseline:never_right"}
rollout: {max_tokens: 3}
training: {steps: 2, prompts_per_step: 2, group_size: 4}
evaluation: {tasks: 4, samples: 4}
run: {name: talk}
"""


def never_right(prompt: str, response: str) -> float:
    return 0.0


def test_a_run_says_it_before_its_first_step_and_the_doctor_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A reward that pays nothing: the warning stands between the baseline and the first step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.yaml").write_text(TALKATIVE)
    attempt("talk.yaml")
    said = capsys.readouterr().out
    assert said.index("baseline 4/4") < said.index("of groups will have signal at first") < said.index("rl: 2 steps")
    assert said.index("the same reward, 0;") < said.index("rl: 2 steps")
    assert "one_reward" in {f.code for f in diagnose_run(tmp_path / "runs" / "talk").findings}
