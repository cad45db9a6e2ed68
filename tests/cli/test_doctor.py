"""`rlvr doctor` tells the truth about an installation and about a run, however broken either is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.doctor import Check, extras, installation, report, verdict
from rlvr.cli.main import run
from rlvr.sandbox.supervisor import NoTier, Sandbox

ROOT = Path(__file__).parents[2]


def make_run(folder: Path, steps: int = 30, **changed: Any) -> Path:
    """A run folder as a killed run leaves it: settings, metric rows, kept answers, no summary."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "resolved.yaml").write_text("seed: 1\n")
    row = {"reward": 0.1, "reward/min": 0.0, "reward/max": 1.0, "env/all/correct": 0.1, "updates": 1.0, **changed}
    rows = [{"phase": "sft", "step": 0, "loss": 2.0}, *({"phase": "rl", "step": i, **row} for i in range(steps))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for step in range(steps):
        answers = [answer("passed", "", "= 7"), answer("failed", "no_answer", f"hmm {step} \x1b]0;owned\x07 [bold]")]
        answers.append(answer("failed", "wrong_value", "= 8"))
        text = "".join(json.dumps(a) + "\n" for a in [*answers, answers[1]])
        (folder / "rollouts" / f"rl-{step:06d}.jsonl").write_text(text)
    return folder


def answer(outcome: str, reason: str, response: str) -> dict[str, Any]:
    score = {"value": float(outcome == "passed"), "outcome": outcome, "reason": reason, "parts": {}}
    return {"prompt": "3 4 +", "response": response, "scores": {"combined": score}}


def doctor(*words: str, code: str = "", **how: Any) -> subprocess.CompletedProcess[str]:
    script = f"import sys\n{code}\nfrom rlvr.cli.main import run\nsys.exit(run({['doctor', *words]!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, **how)


# --- a run -------------------------------------------------------------------------------------------------------


def test_a_report_has_findings_reasons_and_examples(tmp_path: Path, capsys: Any):
    folder = make_run(tmp_path / "mine", **{"completions/clipped_ratio": 0.7, "completions/mean_length": 15.0})
    assert run(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "not finished, sft 1 steps, rl 30 steps" in said
    assert (
        "problem: 70% of completions ran out of tokens (mean length 15)" in said and "raise rollout.max_tokens" in said
    )
    assert "verdicts on the 80 completions stored (steps: 20)" in said
    shares = [line.split() for line in said.splitlines() if "combined:" in line]
    assert shares == [
        ["50.0%", "combined:", "failed", "(no_answer)"],
        ["25.0%", "combined:", "passed"],
        ["25.0%", "combined:", "failed", "(wrong_value)"],
    ]
    assert "no_answer: 3 4 +  ->  hmm 29 " in said and "wrong_value: 3 4 +  ->  = 8" in said


def test_shares_are_of_the_completions_that_have_a_verdict(tmp_path: Path, capsys: Any) -> None:
    """Of an episode of several roles one completion may be judged: 1 of 2 passed, and 2 of 6 are judged."""
    folder = make_run(tmp_path / "mine")
    for file in (folder / "rollouts").glob("*.jsonl"):
        file.unlink()
    rows = [answer("passed", "", "= 7"), answer("failed", "", "= 8")] + 4 * [{"prompt": "propose", "response": "3 4 +"}]
    (folder / "rollouts" / "rl-000030.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "verdicts on 2 of the 6 completions stored (steps: 1)" in said
    assert said.count(" 50.0%  combined:") == 2


def test_answers_are_shown_without_control_codes_and_markup(tmp_path: Path, capsys: Any):
    assert run(["doctor", str(make_run(tmp_path / "mine"))]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\x07" not in said and r"\x1b]0;owned\x07 [bold]" in said


def test_a_run_that_learns_nothing_is_called_stalled(tmp_path: Path):
    said = report(make_run(tmp_path / "mine", **{"updates": 0.0, "frac_groups_with_signal": 0.0}))
    assert "learning stalls" in said and "100% of groups have no signal" in said
    assert "learning stalls" not in report(make_run(tmp_path / "other"))


def test_a_kind_of_task_that_is_never_solved_is_named_with_its_rates(tmp_path: Path, capsys: Any):
    """Names of groups are text of the run: control codes in them are escaped."""
    folder = make_run(tmp_path / "mine", **{"env/all/correct": 0.91})
    rows = [
        {
            "id": str(i),
            "level": "",
            "passed": 8 * (i % 8 > 0),
            "judged": 8,
            "reward": 0.0,
            "features": {"kind": str(i % 8)},
        }
        for i in range(160)
    ]
    for row in rows[::8]:
        row["features"] = {"kind": "\x1b[31mred"}
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "final.json").write_text(json.dumps({"results": rows, "k": 8}))
    assert run(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert r"one kind of task is never solved: kind \x1b[31mred passes 0% where the others pass 100%" in said
    assert "what failing tasks have in common (the 160 held-out tasks of the final evaluation)" in said
    assert r"  kind \x1b[31mred: 0% of 20 tasks pass, 100% of the others (p < 0.0001)" in said
    assert "\x1b" not in said


def test_a_finished_run_and_one_that_stopped_on_bad_numbers_say_so(tmp_path: Path):
    folder = make_run(tmp_path / "mine")
    (folder / "summary.json").write_text("{}")
    (folder / "failed-batch-000012.jsonl").write_text("")
    said = report(folder)
    assert "mine: finished" in said and "not finite at step 000012" in said


def test_a_damaged_folder_is_reported_from_the_remaining_files(tmp_path: Path):
    folder = make_run(tmp_path / "mine", steps=12)
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(
            b'\0\0\0\n[1, 2]\n{"phase": "rl", "step": 12, "reward": "high", "updates": null}\n{"phase": "rl", "st'
        )
    (folder / "rollouts" / "rl-000011.jsonl").write_bytes(b'\xff\xfe\n{"scores": [1]}\n{"scores": {"a": 3}, "prompt"')
    (folder / "rollouts" / "rl-000010.jsonl").unlink()
    (folder / "rollouts" / "rl-000010.jsonl").mkdir()
    said = report(folder)
    assert "rl 13 steps" in said and "2 lines of metrics.jsonl cannot be read" in said
    assert "verdicts on 40 of the 41 completions" in said


@pytest.mark.parametrize("value", ["1e308", "1" + "0" * 400, "1e999", "-1e308"])
def test_numbers_beyond_float_range_are_shown_or_left_out(tmp_path: Path, value: str):
    folder = make_run(tmp_path / "mine", steps=70, reward=7.5)
    text = (folder / "metrics.jsonl").read_text().replace('"reward": 7.5', f'"reward": {value}')
    (folder / "metrics.jsonl").write_text(text + "[" * 20_000 + "\n")
    said = report(folder)
    assert "rl 70 steps" in said and "1 lines of metrics.jsonl cannot be read" in said


def test_a_run_of_which_only_the_settings_are_there(tmp_path: Path):
    (tmp_path / "resolved.yaml").write_text("seed: 1\n")
    said = report(tmp_path)
    assert "no step yet" in said and "no completions were stored" in said


def test_a_wrong_run_folder_is_refused_with_a_suggestion(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "mine")
    for wrong in ("mine", "nowhere", "runs"):
        assert run(["doctor", wrong]) == 2
        said = capsys.readouterr().err
        assert f"rlvr: {wrong} is not a run folder" in said
        assert ("did you mean runs/mine?" in said) == (wrong == "mine")


def test_a_report_needs_no_torch_and_writes_nothing(tmp_path: Path):
    folder = make_run(tmp_path / "mine", steps=3)
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    done = doctor(str(folder), code="sys.modules['torch'] = None")
    assert done.returncode == 0 and "rl 3 steps" in done.stdout and done.stderr == ""
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


# --- the installation --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_this_installation_can_train_and_says_so_quickly(tmp_path: Path):
    began = time.monotonic()
    done = doctor(cwd=tmp_path)
    assert time.monotonic() - began < 30, "seconds on a quiet machine"
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    told = {line.split()[1]: line for line in lines if line.startswith(("ok", "note"))}
    assert {"rlvr", "python", "cores", "torch", "device", "isolation", "runs"} <= set(told)
    assert f"torch {metadata.version('torch')}" in told["[train]"]
    assert lines[-1].startswith("Training can run here, on ") and "GB free" in told["runs"]
    assert list(tmp_path.iterdir()) == [], "looking makes no folder"


def test_without_torch_the_report_is_whole_and_the_code_is_1(tmp_path: Path):
    done = doctor(code="sys.modules['torch'] = None", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "FAILS  torch" in done.stdout and "pip install 'rlvr[train]'" in done.stdout and "isolation" in done.stdout
    assert done.stdout.splitlines()[-1] == "No model can be trained here: see torch above."


def test_a_folder_that_cannot_be_written_to_fails(tmp_path: Path):
    place = Path("/proc/self") if os.path.isdir("/proc/self") else Path("/dev/null")
    [check] = [c for c in installation(place / "runs") if c.name == "runs"]
    assert check.state == "fails" and "cannot write" in check.detail


def test_the_isolation_check_reports_the_sandbox_self_test():
    """The tier that is named first is the one that a Sandbox takes; where none is, a Sandbox refuses to be made."""
    [check] = [c for c in installation() if c.name == "isolation"]
    if check.state == "ok":
        with Sandbox(workers=1) as sandbox:
            assert check.detail.startswith(sandbox.tier) and "did not break out" in check.detail
            assert "no sandbox works" not in check.detail, "one tier is enough"
    else:
        with pytest.raises(NoTier):
            Sandbox(workers=1)


@pytest.mark.slow
def test_extras_are_read_from_the_package_and_not_restated(tmp_path: Path):
    """A stand-in distribution, found on the path like any other, is what the report follows."""
    info = tmp_path / "somewhere" / "rlvr-9.dist-info"
    info.mkdir(parents=True)
    needs = ['numpy; extra == "train"', 'absent-thing>=2; extra == "shiny"', 'absent-thing>=2; extra == "all"']
    text = "".join(f"Requires-Dist: {need}\n" for need in needs)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlvr\nVersion: 9\n{text}")
    done = doctor(code=f"sys.path.insert(0, {str(tmp_path / 'somewhere')!r})", cwd=tmp_path)
    assert "ok     [train]" in done.stdout and "numpy" in done.stdout
    assert "note   [shiny]" in done.stdout and "absent-thing not installed; pip install 'rlvr[shiny]'" in done.stdout
    assert "[all]" not in done.stdout, "it combines others"
    assert done.returncode == 0, "an extra that training does not need is a note"


def test_a_clone_that_was_not_installed_reads_its_own_pyproject(tmp_path: Path):
    """Without site-packages there is no metadata; the file beside the package says the same."""
    site = [p for p in sys.path if "packages" in p]
    code = (
        "import importlib.metadata as m\n"
        "import rlvr, numpy, yaml, omegaconf, typer, rich\n"
        "from rlvr.cli import doctor\n"
        f"sys.path[:] = [p for p in sys.path if p not in {site!r}]\n"
        "print(doctor.extras()); sys.exit()"
    )
    done = doctor(code=code)
    assert "'train'" in done.stdout and "torch" in done.stdout and "'all'" not in done.stdout, done.stderr
    assert "train" in extras()


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (["ok", "note"], "Training can run here, on cpu."),
        (["fails", "fails"], "No model can be trained here: see a, b above."),
    ],
)
def test_the_verdict_is_one_sentence(states: list[str], said: str):
    assert verdict([Check(s, n, "") for s, n in zip(states, "ab", strict=True)]) == said
