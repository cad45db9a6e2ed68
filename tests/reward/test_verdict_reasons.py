"""Reasons of verdicts become few names: in a run's metrics, in `rlvr verify` and in `rlvr audit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvr.cli.main import run
from rlvr.core.types import Outcome, Score
from rlvr.core.verdict_reasons import MAX_CHARS, MAX_NAMES, ReasonNames
from tests.kit.tiny_run import TINY

REWARDS = '''
"""Rewards that fail in several ways."""
from rlvr.core.types import Outcome, Score


def worded(prompt, response, meta):
    if len(response) % 3 == 0:
        raise RuntimeError("boom")
    return Score(0.0, Outcome.FAILED, "short") if len(response) % 3 == 1 else 1.0


def fragile(prompt, response, meta):
    if "1" in response:
        raise RuntimeError("boom")
    if "2" in response:
        return float("nan")
    if "3" in response:
        return Score(None, Outcome.INVALID, "no gold/here")
    return Score(0.5, Outcome.FAILED, f"odd {response}")
'''


def verdicts(outcome: Outcome, *reasons: str) -> list[Score]:
    value = None if outcome in (Outcome.ERROR, Outcome.INVALID) else 0.0
    return [Score(value, outcome, reason) for reason in reasons]


def test_counts_are_by_outcome_and_reason() -> None:
    rows = verdicts(Outcome.ERROR, "sandbox", "sandbox", "exception") + verdicts(Outcome.INVALID, "no_gold")
    rows += verdicts(Outcome.FAILED, "exception", "") + verdicts(Outcome.TIMEOUT, "timeout")
    rows += [Score(1.0, Outcome.PASSED, "fine")]
    assert ReasonNames().count(rows) == {
        "error/exception": 1.0,
        "error/sandbox": 2.0,
        "failed/exception": 1.0,
        "invalid/no_gold": 1.0,
        "timeout/timeout": 1.0,
    }


def test_names_are_bounded_for_each_outcome_and_none_is_lost() -> None:
    names = ReasonNames()
    first = names.count(verdicts(Outcome.FAILED, *(f"r{i}" for i in range(MAX_NAMES + 5))))
    assert len(first) == MAX_NAMES + 1 and first["failed/other"] == 5.0
    again = names.count(verdicts(Outcome.FAILED, "r0", "new", "r24") + verdicts(Outcome.ERROR, "new"))
    assert again == {"error/new": 1.0, "failed/other": 2.0, "failed/r0": 1.0}


def test_a_text_becomes_a_short_name() -> None:
    names = ReasonNames()
    assert names.name_of(Outcome.ERROR, "no gold/here\n") == "no_gold_here_"
    assert names.name_of(Outcome.ERROR, "x" * 10**7) == "x" * MAX_CHARS
    assert names.name_of("error", "äö") == "_" and names.name_of("error", "") == ""


def test_verify_and_audit_show_few_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reasons.py").write_text(REWARDS)
    rows = [
        {"answer": "7", "response": text, "label": False} for text in ["1", "1", "2", "3", *map(chr, range(65, 90))]
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = ["--reward", "own_reasons:fragile"]
    assert run(["verify", "rows.jsonl", *reward, "--out", "verdicts.jsonl", "--max-errors", "0.2"]) == 0
    said = "".join(capsys.readouterr())
    assert "exception 2, not_finite 1" in said and "no_gold_here 1" in said
    assert "other 5" in said and "odd_X" not in said
    assert run(["audit", *reward, "--labelled", "rows.jsonl", "--json", "audit.json"]) == 1
    said = capsys.readouterr().out
    assert "error: exception 2, not_finite 1" in said and "invalid: no_gold_here 1" in said
    (report,) = json.loads((tmp_path / "audit.json").read_text())
    reasons = report["reasons"]
    assert reasons["error/exception"] == 2.0 and reasons["failed/other"] == 5.0 and len(reasons) == 3 + MAX_NAMES + 1


def test_a_run_counts_by_reason_and_learns_nothing_from_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reasons.py").write_text(REWARDS)
    (tmp_path / "tiny.yaml").write_text(TINY)
    own = ["reward.type=own_reasons:worded", "training.error_budget=1", "training.prompts_per_step=4"]
    assert run(["train", "--config=tiny.yaml", *own, "run.rollouts_per_step=100"]) == 0
    folder = tmp_path / "runs" / "tiny"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = 0
    for step, row in enumerate(row for row in rows if row["phase"] == "rl"):
        kept = [json.loads(line) for line in (folder / "rollouts" / f"rl-{step:06d}.jsonl").read_text().splitlines()]
        broken = [r for r in kept if len(r["response"]) % 3 == 0]
        assert row.get("verifier/error/exception", 0) == len(broken)
        assert row.get("verifier/failed/short", 0) == sum(len(r["response"]) % 3 == 1 for r in kept)
        assert all(r["reward"] is None and r["advantage"] == 0.0 for r in broken)
        assert row["reward"] == pytest.approx(sum(len(r["response"]) % 3 == 2 for r in kept) / (16 - len(broken)))
        seen += len(broken)
    assert seen
