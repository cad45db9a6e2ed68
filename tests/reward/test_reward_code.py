"""The reward `code`: its values, invalid tasks and errors; a broken sandbox is never a wrong answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.core.types import Outcome, Score, Task, Trajectory
from rlvr.reward import register_reward, resolve_reward
from rlvr.reward.code.code_reward import CodeOptions, code
from rlvr.reward.signatures import Case
from rlvr.sandbox import Sandbox, Verdict
from rlvr.sandbox import TestResult as Ran  # pytest takes what is called Test... for a test
from tests.kit.code_rows import REAL, mbpp_file, model_folder, problem
from tests.kit.without_unshare import WITHOUT_UNSHARE

FOUR = {"tests": [f"assert f({x}) == {x * x}" for x in range(2, 6)]}
RIGHT = "def f(x):\n    return x * x"
LONG = f"{RIGHT}\n# {'x' * 100}"


def judge(response: str, meta: Any = FOUR, **options: Any) -> Score:
    (score,) = resolve_reward("code", **options).score([answer(response, meta)])
    return score


def answer(response: str, meta: Any) -> Trajectory:
    return Trajectory("p", [], response, [], task=Task("t", "p", meta))


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "value", "reason"),
    [
        (RIGHT, 1.0, ""),
        ("def f(x):\n    return 4 if x == 2 else 9", 0.25, "assertion"),  # 0.5 x 2/4
        ("def f(x):\n    return x * x if x < 5 else 0", 0.375, "assertion"),  # 0.5 x 3/4
        ("def f(x):\n    return 16", 0.125, "assertion"),
        ("def f(x):\n    return 0", -0.5, "assertion"),
        ("def f(x):\n    raise KeyError(x)", -0.5, "exception"),
        ("def g(x):\n    return x * x", -0.5, "wrong_name"),
        ("def f(x) return", -0.5, "syntax_error"),
        ("", -0.5, "no_answer"),
        ("x" * (2 << 20), -0.5, "too_large"),
    ],
)
def test_the_reward_is_one_half_the_share_or_minus_one_half(response: str, value: float, reason: str) -> None:
    score = judge(response)
    assert (score.value, score.reason) == (value, reason)
    assert score.outcome is (Outcome.PASSED if value == 1 else Outcome.FAILED)


def test_the_parts_say_how_far_an_answer_came() -> None:
    assert judge("def f(x):\n    return 16").parts == {"tests_passed": 0.25, "num_tests": 4, "compiles": 1}
    assert judge("def f(x) return").parts == {"tests_passed": 0, "num_tests": 4, "compiles": 0}


def test_an_answer_that_hangs_gets_the_value_of_a_failure() -> None:
    score = judge("def f(x):\n    while True: pass", timeout_s=1.0)
    assert (score.outcome, score.reason, score.value) == (Outcome.TIMEOUT, "timeout", -0.5)


def test_options_change_one_value_each() -> None:
    half = "def f(x):\n    return 4 if x == 2 else 9"
    assert judge(half, partial=False).value == -0.5 and judge(RIGHT, partial=False).value == 1.0
    assert judge("def f(x) return", syntax_error_reward=-1).value == -1.0
    assert judge("def f(x): return 0", syntax_error_reward=-1).value == -0.5


def test_self_reports_are_invalid_unless_they_are_accepted_and_then_the_detail_says_so() -> None:
    meta = {"tests": ["assert callable(f(1))", "assert isinstance(f(2), A)"]}
    program = "class A:\n    def __call__(self): return 1\ndef f(x): return A()"
    refused = judge(program, meta)
    assert (refused.outcome, refused.value, refused.reason) == (Outcome.INVALID, None, "bad_test")
    assert "self_reports" in refused.detail
    accepted = judge(program, meta, self_reports=True)
    assert (accepted.outcome, accepted.value) == (Outcome.PASSED, 1.0)
    assert "only ask the answer about itself (callable(f(1))), which was accepted" in accepted.detail
    wrong = judge("class A: pass\ndef f(x): return A()", meta, self_reports=True)
    assert (wrong.outcome, wrong.value, wrong.parts["tests_passed"]) == (Outcome.FAILED, 0.25, 0.5)
    assert "which was accepted" in wrong.detail
    decided = judge(RIGHT, {"tests": ["assert f(2) == 4", "assert not callable(f(3))"]}, self_reports=True)
    assert (decided.outcome, decided.detail) == (Outcome.PASSED, "")  # plain data decides, too
    assert judge("def f(x): return x", {"tests": ["assert f(1) or True"]}, self_reports=True).outcome is Outcome.INVALID


def test_the_efficiency_bonus_is_off_by_default_and_has_a_caution() -> None:
    """Seed 001's: 0.2 for passed code of fewer than 100 characters."""
    bonus = resolve_reward("code", efficiency_bonus=0.2)
    assert "learns to golf" in bonus.caution and not resolve_reward("code").caution
    assert "lies passes them" in resolve_reward("code", self_reports=True).caution
    short, long, wrong = bonus.score([answer(text, FOUR) for text in (RIGHT, LONG, "def f(x): return 0")])
    assert (short.value, long.value, wrong.value) == (1.2, 1.0, -0.5)
    assert (short.parts["short"], long.parts["short"]) == (1, 0) and short.outcome is Outcome.PASSED
    assert "short" not in judge(RIGHT).parts
    tight = resolve_reward("code", efficiency_bonus=0.2, efficiency_max_chars=len(RIGHT))
    assert tight("", RIGHT, FOUR) == 1.0  # fewer than, not as many as
    long_prompt = f'def f(x):\n    """{"Square. " * 20}"""\n'
    row = {"prompt": long_prompt, "entry_point": "f", "test": "def check(candidate):\n    assert candidate(3) == 9"}
    assert bonus("", "    return x * x", row) == 1.2  # what was given to the policy is not counted as its own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial": 1}, "partial=1, expected true or false"),
        ({"syntax_error_reward": 0.5}, "at most 0"),
        ({"efficiency_bonus": -1}, "at least 0"),
        ({"efficiency_max_chars": 50}, "no effect without efficiency_bonus"),
        ({"efficiency_bonus": 0.2, "efficiency_max_chars": 0}, "at least 1"),
        ({"timeout_s": 0}, "timeout_s=0, expected a finite number above 0, at most 600"),
        ({"sandbox": {"teirs": []}}, "did you mean 'tiers'"),
        ({"sandbox": {"tiers": ["docker"]}}, "tiers='docker'.*known: namespaces, landlock"),
        ({"sandbox": {"tiers": []}}, r"tiers=\[\], expected a list with some of"),
        ({"sandbox": {"workers": 0}}, "workers=0, expected a whole number of at least 1"),
        ({"sandbox": {"limits": {"memroy": 1}}}, "did you mean 'memory'"),
        ({"sandbox": {"limits": {"memory": 1.5}}}, "limits.memory=1.5, expected a whole number"),
        ({"sandbox": {"limits": {"timeout_s": 0}}}, "limits.timeout_s=0, expected a finite number above 0"),
        ({"sandbox": "landlock"}, "expected a rlvr.sandbox.Sandbox or a mapping"),
        ({"timeout": 3}, "does not take 'timeout'"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_when_the_reward_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("code", **options)


# --- formats -----------------------------------------------------------------------------------------------------


def test_rows_are_judged_as_they_were_published() -> None:
    """Raw rows as meta: MBPP's, with imports before and setup after the answer, HumanEval's, APPS', and our own."""
    mbpp = problem(7)
    classes = {
        "text": "a tree",
        "test_setup_code": "root = Node(math.floor(1.5))",
        "test_imports": ["import math"],
        "test_list": ["assert depth(root) == 1"],
    }
    node = "class Node:\n    def __init__(self, x): self.x = x\ndef depth(n):\n    return n.x"
    prompt = 'def total(xs):\n    """Sum of a list."""\n'
    humaneval = {"test": "def check(candidate):\n    assert candidate([1, 2]) == 3", "entry_point": "total"}
    stdio = {"question": "double", "input_output": {"inputs": ["2", "5"], "outputs": ["4", "10"]}}
    leetcode = {
        "starter_code": "class Solution:\n    def pair(self, a, b):",
        "input_output": {"fn_name": "pair", "inputs": [[1, 2]], "outputs": [[1, 2]]},
    }
    rows = [
        (mbpp["code"], mbpp),
        (node, classes),
        ("    return sum(xs)", {**humaneval, "prompt": prompt}),
        ("print(2 * int(input()))", stdio),
        (f"```python\n{RIGHT}\n```", FOUR),
        ("class Solution:\n    def pair(self, a, b):\n        return (a, b)", leetcode),
    ]
    scores = resolve_reward("code").score([answer(response, meta) for response, meta in rows])
    assert [(s.value, s.reason) for s in scores] == [(1.0, "")] * 6
    taken_out = Trajectory(prompt, [], "    return sum(xs)", [], task=Task("t", prompt, humaneval))
    assert resolve_reward("code").score([taken_out])[0].value == 1.0  # TRL keeps that column to itself


def test_a_bad_row_is_invalid_and_does_not_affect_others() -> None:
    bad, good = resolve_reward("code").score([answer(RIGHT, {"question": "?"}), answer(RIGHT, FOUR)])
    assert (bad.outcome, bad.reason, bad.value) == (
        Outcome.INVALID,
        "bad_problem",
        None,
    ) and "expected MBPP" in bad.detail
    assert good.value == 1.0


def test_an_environments_text_is_not_judged_as_the_policys() -> None:
    """A solution that stands in the response, and not in the policy's last turn, earns nothing."""
    told = answer(f"nonsense\n[BEGIN]\n{RIGHT}\n[DONE]", FOUR)
    told.answer = "nonsense"
    (score,) = resolve_reward("code").score([told])
    assert score.value == -0.5


@pytest.mark.skipif(not REAL.is_dir(), reason="the MBPP files are not beside the project")
def test_published_reference_solutions_pass() -> None:
    """Some of each file, with both rows that need setup code after the solution."""
    full = [json.loads(line) for line in (REAL / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in full if row["task_id"] in (367, 927)] + full[::60]
    rows += json.loads((REAL / "sanitized-mbpp.json").read_text(encoding="utf-8"))[::40]
    scores = resolve_reward("code", timeout_s=20).score([answer(row["code"], row) for row in rows])
    assert [s.reason for s in scores] == [""] * len(rows)


# --- a sandbox that breaks ---------------------------------------------------------------------------------------


class BrokenSandbox(Sandbox):
    """Says of every job what a sandbox says whose zygote cannot be started."""

    def verify_many(self, jobs: Any) -> list[Verdict]:
        tests = (Ran(False, "sandbox"),)
        return [Verdict(Outcome.ERROR, "no_tier", tests, "", "", 0.0, "unshare is refused here")] * len(jobs)


def test_a_broken_sandbox_is_an_error_and_never_a_wrong_answer() -> None:
    with BrokenSandbox(allow_unsafe=True) as broken:
        score = judge(RIGHT, sandbox=broken)
    assert (score.value, score.outcome, score.reason) == (None, Outcome.ERROR, "no_tier")
    assert "unshare is refused" in score.detail


def train_words(folder: Path, *words: str) -> list[str]:
    rows, model = mbpp_file(folder), model_folder(folder / "model")
    sizes = ["num_train_problems=9", "rollout.max_tokens=4", "evaluation.tasks=3", "engine.threads=1"]
    return ["train", "--config-name=mbpp", f"model.name={model}", f"env.kwargs.path={rows}", *sizes, *words]


@pytest.mark.slow
def test_a_run_that_pays_for_short_programs_is_warned_unless_it_watches_others(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = train_words(tmp_path, "reward.kwargs.efficiency_bonus=0.2", "training.steps=1")
    assert run([*words, "run.name=golf"]) == 0
    assert "can be hacked: efficiency_bonus pays for short programs" in " ".join(capsys.readouterr().out.split())
    assert run([*words, "run.name=watched", "reward.watch=[exact_match]"]) == 0
    assert "can be hacked" not in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("reward.kwargs.sandbox={limits: {memory: 1000}}", "limits.memory=1000: at least"),
        ("reward.kwargs.sandbox={tiers: [docker]}", "tiers='docker'"),
        (
            "reward={type: composite, kwargs: {rewards: [{name: code, kwargs: {sandbox: {limits: {files: 0}}}}]}}",
            "limits.files=0: at least 1",
        ),
    ],
)
def test_an_impossible_sandbox_is_refused_before_a_run_begins(
    settings: str, said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(train_words(tmp_path, settings)) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_without_any_tier_training_and_grading_are_refused_before_they_begin(tmp_path: Path) -> None:
    """In a process that may neither make namespaces nor use Landlock."""
    (tmp_path / "completions.jsonl").write_text(json.dumps({"response": RIGHT, **FOUR}) + "\n")
    commands = [train_words(tmp_path), ["verify", "completions.jsonl", "--reward", "code", "--out", "v.jsonl"]]
    confined = WITHOUT_UNSHARE.format(no_landlock=True, unsafe=False).partition("from rlvr.sandbox")[0]
    code = f"{confined}\nfrom rlvr.cli.main import run\nprint([run(words) for words in {commands!r}])"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env
    )
    assert done.stdout.strip() == "[2, 2]", done.stderr
    assert done.stderr.count("rlvr: reward 'code': no sandbox works here (namespaces: ") == 2
    assert not (tmp_path / "runs").exists() and not (tmp_path / "v.jsonl").exists()


def test_a_broken_sandbox_stops_a_run_by_its_error_budget(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The baseline already: no answer is judged, so there is nothing to report, and nothing is trained on."""
    monkeypatch.chdir(tmp_path)

    @register_reward("code in a sandbox that breaks")
    def judge_in_broken_sandbox(cases: Sequence[Case]) -> list[Score]:
        with BrokenSandbox(allow_unsafe=True) as sandbox:
            return code(cases, CodeOptions(sandbox=sandbox))

    assert run(train_words(tmp_path, "reward.type=code in a sandbox that breaks")) == 1
    said = capsys.readouterr().err
    assert "of 12" in said and "unshare is refused" in said, said
    assert not (tmp_path / "runs/mbpp/evaluations/baseline.json").exists()


def test_an_answer_that_fails_does_not_affect_its_batch() -> None:
    meta = {"tests": ["expected = [1]\nassert f(1) == 1", "assert f(2) == expected"]}
    texts = ["def f(x): return 1 if x == 1 else [1]", "import os\ndef f(x): os._exit(0)", "def f(x): return 0"]
    scores = resolve_reward("code").score([answer(text, meta) for text in texts])
    assert [score.value for score in scores] == [1.0, -0.5, -0.5]


def test_an_answer_cannot_redefine_a_helper_of_the_prompt() -> None:
    prompt = 'def widen(x):\n    return 2 * x\n\ndef narrow(x):\n    """Undo widen."""\n'
    test = "def check(candidate):\n    for x in range(3): assert candidate(widen(x)) == x"
    meta = {"prompt": prompt, "entry_point": "narrow", "test": test}
    assert judge("    return x // 2", meta).value == 1.0
    assert judge("    return x\n\ndef widen(x):\n    return x\n", meta).value == -0.5
    assert judge("    return x\n\nwiden = lambda x: x\n", meta).value == -0.5
