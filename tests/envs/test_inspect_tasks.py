"""Unmodified tasks of Inspect, by the real package: what they ask, their scores, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Trajectory
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.ecosystems import find_interpreter
from tests.kit.open_server import TOOLS_TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # its imports take seconds
FILE = Path(__file__).parents[1] / "kit/ecosystems/inspect_tasks/sums.py"
TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    find_interpreter("inspect")
    monkeypatch.chdir(FILE.parent)  # one process for all tests


def open_task(name: str = "addition", **options: Any) -> Any:
    return resolve_environment(f"inspect:sums.py@{name}", **options)


def special(kind: str, **options: Any) -> Any:
    return open_task("special", options={"kind": kind}, **options)


def play(source: Any, said: str, task: Any = None) -> Trajectory:
    sampler = ScriptedSamplingClient(TEXT, lambda _: [*TEXT.encode(said, add_special_tokens=False), TEXT.eos_token_id])
    groups = open_groups(source, [task or source.heldout(1)[0]], 1, TEXT, "g")
    (played,) = rollout(groups, sampler, SamplingParams(200), seed=1)
    score([played], resolve_reward(source.reward))
    return played


def test_the_policy_reads_what_the_solver_asks_and_the_scorer_pays() -> None:
    source = open_task()
    task = source.heldout(1)[0]
    number = int(task.id[1:])
    assert task.prompt == [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{number} + 1 = ?"}]
    right, wrong = play(source, f"It is {number + 1}", task), play(source, f"It is {number + 2}", task)
    assert (right.reward, wrong.reward) == (1.0, 0.0) and right.metadata["match"] == 1.0
    assert "Add." in TEXT.decode(right.prompt_tokens)


def test_samples_are_split_by_their_prompts_or_by_options() -> None:
    source = open_task()
    trained, held = {source.train(0, n, "").id for n in range(source.size(""))}, {t.id for t in source.heldout(None)}
    assert len(trained) + len(held) == 20 and not trained & held and held
    own = open_task(options={"count": 6}, heldout={"first": 50, "count": 2})
    assert own.size("") == 6 and sorted(task.id for task in own.heldout(None)) == ["heldout-s50", "heldout-s51"]
    task = next(task for task in own.heldout(None) if task.id == "heldout-s50")
    assert play(own, "51", task).reward == 1.0


def test_multiple_choice_is_asked_and_read_by_inspect() -> None:
    source = open_task("capitals", heldout=1.0)
    italy = next(task for task in source.heldout(None) if "Italy" in task.prompt_text)
    assert "A) Paris\nB) Rome\nC) Oslo" in italy.prompt_text and "ANSWER: $LETTER" in italy.prompt_text
    assert [play(source, said, italy).reward for said in ("ANSWER: B", "ANSWER: A", "Rome")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("said", "reward"), [("abcdef", 6.0), ("yes", 1.0), ("part", 0.5)])
def test_values_are_rewards(said: str, reward: float) -> None:
    assert play(special("length"), said).reward == reward


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("nan", "the answer was not scored"),
        ("failed", "grader_failed: no grade"),
        ("odd", "gave 'maybe', expected a number"),
        ("list", r"gave \[1\.0\], expected a number"),
        ("none", "gave no score"),
        ("raise", r"sums\.py:\d+: KeyError: 'lost'"),
        ("wait", "took longer than 3 seconds"),
    ],
)
def test_what_gives_no_verdict_is_an_error_and_no_zero(said: str, words: str) -> None:
    source = special("length", seconds=3.0 if said == "wait" else 60.0)
    played = play(source, said)
    verdict = played.scores["environment"]
    assert played.reward is None and verdict.outcome is Outcome.ERROR and re.search(words, verdict.detail or "")
    assert play(special("length"), "ab").reward == 2.0, "the next episode is scored"


def test_one_of_several_scores_is_the_reward() -> None:
    source = special("two", scorer="parts/long", heldout=1.0)
    played = play(source, "long enough")
    assert played.reward == 1.0 and played.metadata["match"] == 0.0 and played.metadata["parts/right"] == 0.0


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("two", {}, "the scores are match, parts/long, parts/right; give the one to train on"),
        ("judged", {}, "scorer model_graded_qa: a model of its own is needed"),
        ("judged_by_name", {}, "scorer model_graded_qa: a model of its own is needed"),
        ("hidden", {}, "scorer hides_failure: a model of its own is needed"),
        ("critique", {}, "the solver: a model of its own is needed"),
        ("another", {}, "the solver: a model of its own is needed"),
        ("twice", {}, "the solver: the model is asked more than once"),
        ("tools", {}, "the solver: the model is given tools"),
        ("in_box", {}, "scorer in_box: a sandbox is needed"),
        ("box", {}, "needs a sandbox, which is not supported"),
        ("silent", {}, "never asks the model"),
        ("no_scorer", {}, "has no scorer"),
        ("length", {"options": ["kind"]}, "expected a mapping"),
        ("length", {"python": "/no/such"}, "is no program"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_task("special", **{"options": {"kind": kind}, **options})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_file.py@addition", "there is no file"),
        ("sums.py", "has 3 tasks|kind"),
        ("sums.py@additon", "sums.py has .*addition"),
    ],
)
def test_mistakes_are_named(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_environment(f"inspect:{name}")


def test_a_task_that_shuffles_choices_is_refused() -> None:
    """Every run of its solver asks otherwise, so an answer cannot be scored by another run."""
    source = open_task("capitals", options={"shuffled": True}, heldout=1.0)
    task = source.heldout(1)[0]
    details = [play(source, "ANSWER: A", task).scores["environment"].detail or "" for _ in range(12)]
    assert any("messages for this sample have changed" in detail for detail in details)
