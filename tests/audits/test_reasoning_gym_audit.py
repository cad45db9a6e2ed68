"""`rlvr audit --env reasoning_gym`: what it counts, against families whose scorers are known, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvr.audits.gym_audit import (
    HOSTILE,
    FamilyAudit,
    JudgedProbe,
    audit_families,
    change_answer,
    make_probes,
    make_report,
    summarize,
)
from rlvr.cli.main import run
from rlvr.core.types import Outcome, Score
from rlvr.reward import resolve_reward
from rlvr.reward.reasoning_gym.library_workers import describe_families
from tests.kit.packages import need_package

need_package("reasoning_gym", "needs the extra reasoning-gym")


@pytest.mark.parametrize(
    ("gold", "changed"),
    [
        ("42", "92"),
        ("-0.5", "-0.1"),
        ("yes", "no"),
        ("False", "True"),
        ("1", "0"),
        ("abc", "nbc"),
        ("0", "1"),
        ("", None),
    ],
)
def test_a_changed_answer_is_another_one(gold: str, changed: str | None) -> None:
    assert change_answer(gold) == changed


def test_a_task_is_answered_in_every_way() -> None:
    kinds = [probe.kind for probe in make_probes("42", "7")]
    assert set(kinds) == {"gold", "changed", "superstring", "other", "fixed", "empty", "long"}
    assert set(probe.kind for probe in make_probes(None, None)) == {"fixed", "empty", "long"}


def judged(kind: str, score: Score, text: str = "x", task: int = 0) -> JudgedProbe:
    return JudgedProbe(task, kind, text, score, 0.1)


PASSED = Score(1.0, Outcome.PASSED, "", {"library_score": 1.0})
FAILED = Score(0.0, Outcome.FAILED, "wrong_value", {"library_score": 0.25})
ERROR = Score(None, Outcome.ERROR, "scorer_raised")


def test_counts_are_those_counted_by_hand() -> None:
    fixed = [judged("fixed", PASSED, "yes"), judged("fixed", FAILED, "yes", 1), judged("fixed", FAILED, "no")]
    audit = FamilyAudit("mine", [judged("gold", PASSED), judged("changed", FAILED), judged("other", PASSED), *fixed])
    row = audit.as_json()
    assert (row["gold"], row["changed"], row["other"]) == ([1, 1], [0, 1], [1, 1])
    assert (row["best_fixed"], row["floor"]) == (["yes", [1, 2], [1, 2]], 0.25)
    assert row["other_library"] == [1, 1]
    assert summarize([audit])["wrong answers"]["library"]["value"] == 0.5
    assert not audit.is_broken


@pytest.mark.parametrize(
    ("more", "damage", "said"),
    [
        ([judged("hostile", ERROR, "bomb")], "", "not contained: mine: 'bomb'"),
        ([judged("hostile", FAILED)], "changed files outside", "escape: mine: changed files outside"),
        ([judged("again", FAILED)], "", "changed verdict: mine"),
    ],
)
def test_what_is_not_contained_breaks_the_audit(more: list[JudgedProbe], damage: str, said: str) -> None:
    audit = FamilyAudit("mine", [judged("gold", PASSED), judged("fixed", FAILED, "no"), *more], damage)
    assert audit.is_broken and said in make_report([audit], 10)


def test_an_audit_keeps_the_beginning_of_an_answer() -> None:
    """An audit has thousands of over-long answers: kept whole they took gigabytes."""
    for gold in ("42", "right " * 200):
        lengths = [len(probe.text) for probe in make_probes(gold, "7") if probe.kind == "long"]
        assert 200_000 <= min(lengths) <= max(lengths) < 202_000
    (audit,) = audit_families(["leg_counting"], resolve_reward("reasoning_gym"), 2, None, lambda audit: None)
    assert [len(one.text) for one in audit.of("long")] == [120] * 4
    assert {one.score.reason for one in audit.of("long")} == {"too_long"}  # the reward was given the whole answer


def test_three_families_are_audited_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """leg_counting pays for superstrings, puzzle24's scorer does not look at the numbers, countdown evaluates."""
    target = tmp_path / "audit.json"
    families = [word for name in ("leg_counting", "puzzle24", "countdown") for word in ("--family", name)]
    code = run(["audit", "--env", "reasoning_gym", *families, "--samples", "2", "--json", str(target)])
    assert code == 0
    report = json.loads(target.read_text())
    legs, puzzle, countdown = report["families"]
    assert [one["gold"] for one in (legs, puzzle, countdown)] == [[2, 2]] * 3
    assert legs["superstring_credit"] > 0 and legs["changed"] == legs["other"] == [0, 2]
    assert puzzle["other"] == [0, 2] and puzzle["other_library"] == [2, 2]
    assert countdown["other"] == countdown["other_library"] == [0, 2]
    assert all(one["hostile"] == [0, len(HOSTILE)] and not one["uncontained"] for one in report["families"])
    assert "by the library's scorers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env", "gsm8k"], "expected reasoning_gym"),
        (["--env", "reasoning_gym", "--family", "count_down"], "did you mean 'countdown'"),
        (["--env", "reasoning_gym", "--samples", "1"], "at least 2"),
        (["--env", "reasoning_gym", "--reward", "math"], "no effect with --env"),
        (["--env", "reasoning_gym", "--attack"], "give one of"),
        (["--attack", "--reward", "code", "--family", "ab"], "go with --env"),
        (["--attack"], "--reward is missing"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", *arguments]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_every_family_is_contained_and_takes_its_own_answers() -> None:
    audits = audit_families(
        list(describe_families()), resolve_reward("reasoning_gym", timeout_s=1), 2, None, lambda a: None
    )
    assert [audit.family for audit in audits if audit.is_broken] == []
    assert {audit.family for audit in audits for one in audit.of("gold") if not one.passed} <= {
        "intermediate_integration"
    }
