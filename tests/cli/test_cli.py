"""The command line as a user meets it: real runs on tiny models, and every mistake answered in one clear message."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from tests.kit.forked_process import Program
from tests.kit.slow_cases import mark_slow_but
from tests.kit.tiny_run import TINY


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def command(*words: str) -> list[str]:
    return ["train", "--config=tiny.yaml", *words]


def in_process(*words: str, preexec: Any = None) -> subprocess.Popen[str]:
    """The command in a process of its own, in the current folder."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rlvr", *command(*words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, preexec_fn=preexec,
    )  # fmt: skip


def test_a_finished_run_is_reported_as_finished_the_second_time(tiny: Path, capsys: Any) -> None:
    """resolved.yaml, metrics, rollouts, checkpoints, evaluations, a curve, and a summary with intervals."""
    assert run(command()) == 0
    folder = tiny / "runs" / "tiny"
    summary = json.loads((folder / "summary.json").read_text())
    for side in ("baseline", "final"):
        for metric in ("pass@1", "pass@2", "mean_reward"):
            value = summary[side][metric]
            assert value["low"] <= value["value"] <= value["high"]
    assert 0 <= summary["p_value"] <= 1 and summary["seconds"] > 0 and len(summary["weights_sha256"]) == 64
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(r["phase"], r["step"]) for r in rows] == [("sft", 0), ("sft", 1), ("rl", 0), ("rl", 1), ("rl", 2)]
    rollouts = (folder / "rollouts" / "rl-000002.jsonl").read_text().splitlines()
    assert len(rollouts) == 8 and {"prompt", "response", "scores", "logprobs"} <= set(json.loads(rollouts[0]))
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "FINAL RESULTS" in capsys.readouterr().out
    written = (folder / "metrics.jsonl").read_bytes()
    assert run(command()) == 0
    assert "finished" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_bytes() == written
    # The saved policy can be evaluated by itself, with the same result as at the end of the run.
    assert run(["evaluate", str(folder)]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["pass@1"] == summary["final"]["pass@1"]
    rate = told["pass@1"]
    shown = f"{100 * rate['value']:.1f}% [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
    assert re.search(rf"^pass@1 +{re.escape(shown)}$", said.err, re.M) and "8 held-out tasks" in said.err


def test_doctor_tells_a_real_run_from_its_folder(tiny: Path, capsys: Any) -> None:
    """Phases done, the numbers of the last step, verdicts by frequency; also while the run is not finished."""
    assert run(command("sft.steps=1")) == 0
    (tiny / "runs" / "tiny" / "summary.json").unlink()
    capsys.readouterr()
    assert run(["doctor", "runs/tiny"]) == 0
    said = capsys.readouterr().out
    assert "not finished, sft 1 steps, rl 3 steps" in said and "pass rate" in said
    assert "verdicts on the 24 completions stored (steps: 3)" in said and "combined: failed" in said


def test_a_run_without_a_gain_ends_with_the_next_command(tiny: Path, capsys: Any) -> None:
    assert run(command("sft.steps=0", "training.optimizer.learning_rate=1.0e-09")) == 0
    assert "no gain was measured (p = 1): " in (said := capsys.readouterr().out)
    assert "`rlvr doctor runs/tiny` says more" in said


@pytest.mark.slow
def test_sft_alone_is_a_mode(tiny: Path) -> None:
    """`mode=sft` trains on demonstrations only, measured from the random model."""
    assert run(command("mode=sft", "sft.steps=20", "run.name=taught")) == 0
    rows = [json.loads(line) for line in (tiny / "runs" / "taught" / "metrics.jsonl").read_text().splitlines()]
    assert {r["phase"] for r in rows} == {"sft"} and len(rows) == 20
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.slow
def test_the_warm_up_does_not_end_while_a_kind_of_task_is_unknown(tiny: Path) -> None:
    """`sft.until` alone would end it before its 200 steps: no kind (the operator of a problem) reaches `until_each`."""
    words = ("sft.steps=200", "sft.batch_size=64", "sft.until=0.05", "sft.check_every=40", "sft.until_each=0.99")
    sizes = ("evaluation.interim_tasks=60", "evaluation.interim_samples=4", "training.steps=1")
    assert run(command(*words, *sizes, "sft.optimizer.learning_rate=0.01")) == 0
    rows = [json.loads(line) for line in (tiny / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    looks = [(r["test/env/all/correct"], r["test/kinds/lowest"]) for r in rows if "test/kinds/lowest" in r]
    assert len(looks) == 5 and max(mean for mean, _ in looks[:-1]) >= 0.05
    assert all(lowest <= mean for mean, lowest in looks)


@pytest.mark.slow
def test_the_warm_up_ends_at_its_goal(tiny: Path) -> None:
    """`sft.until` ends the phase at the first look that finds the pass rate, and RL goes on from there."""
    words = ("sft.steps=300", "sft.batch_size=64", "sft.until=0.05", "sft.check_every=10")
    assert run(command(*words, "sft.optimizer.learning_rate=0.01")) == 0
    rows = [json.loads(line) for line in (tiny / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    looks = [r["test/env/all/correct"] for r in rows if "test/env/all/correct" in r]
    assert looks[-1] >= 0.05 and all(look < 0.05 for look in looks[:-1])
    assert sum(r["phase"] == "sft" for r in rows) == 10 * len(looks) < 300
    assert rows[-1]["phase"] == "rl"


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(tiny: Path) -> None:
    """SIGINT ends the step under way with exit code 130; the rerun ends with what an undisturbed run has."""
    words = ("training.steps=30", "run.name=stopped")
    process = Program(["-m", "rlvr", *command(*words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    rows = tiny / "runs" / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (rows.exists() and rows.read_text().count('"rl"') >= 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    code = process.wait(60)
    assert process.stdout is not None
    with process.stdout as stream:
        output = stream.read()
    assert code == 130, output
    assert "same command" in output and "Traceback" not in output
    assert output.splitlines()[-1].startswith("stopped; "), "after the line of the last step"
    done = rows.read_text().count('"rl"')
    assert 2 <= done < 30
    assert run(command(*words)) == 0
    assert run(command("training.steps=30", "run.name=calm")) == 0
    stopped, calm = (json.loads((tiny / "runs" / n / "summary.json").read_text()) for n in ("stopped", "calm"))
    assert stopped["weights_sha256"] == calm["weights_sha256"]


def test_a_run_that_was_started_with_ctrl_c_ignored_ignores_it(tiny: Path) -> None:
    """As nohup and a shell's background jobs start it: Ctrl-C at their terminal is for another program."""
    before, ended = signal.signal(signal.SIGINT, signal.SIG_IGN), threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.02):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert run(command()) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_damaged_last_checkpoint_falls_back_and_still_ends_alike(tiny: Path, capsys: Any) -> None:
    """Bytes of the newest weights are overwritten after a stop: said, gone around, same final bits."""
    assert run(command("run.name=calm")) == 0
    assert run(command("run.name=hurt")) == 0
    hurt = tiny / "runs" / "hurt"
    (hurt / "summary.json").unlink()
    newest = max((hurt / "checkpoints").iterdir(), key=lambda p: p.stat().st_mtime)
    with open(newest / "model.safetensors", "r+b") as file:
        file.seek(200)
        file.write(b"damage")
    capsys.readouterr()
    assert run(command("run.name=hurt")) == 0
    said = capsys.readouterr().out
    assert newest.name in said and "falling back" in said
    stories = [json.loads((tiny / "runs" / n / "summary.json").read_text())["weights_sha256"] for n in ("calm", "hurt")]
    assert stories[0] == stories[1]


@pytest.mark.slow
def test_a_full_disk_says_what_to_do_and_loses_nothing(tiny: Path) -> None:
    """No file may grow past 20 kB (a real limit of the kernel): the save fails, the rerun without it finishes."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    grown = ("model.config.hidden_size=64",)
    process = in_process(*grown, preexec=limit)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "make room" in output and "Traceback" not in output, output
    assert not list((tiny / "runs").rglob("*.tmp")), "a half-written checkpoint was left behind"
    assert run(command(*grown)) == 0


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["train", "--config=nowhere.yaml"], ["nowhere.yaml", "does not exist"]),
    (["train", "--config-name=arithmetik"], ["arithmetik", "arithmetic", "--config=FILE"]),
    (["train", "--config-name=rows.yaml"], ["is a file, not a name", "--config=rows.yaml"]),
    (["train", "--config=arithmetic.yaml"], ["does not exist", "--config-name=arithmetic"]),
    (["train", "--config=row.yaml"], ["row.yaml does not exist", "did you mean 'rows.yaml'"]),
    (["train", "--config=rows.jsonl"], ["'.jsonl'", "expected .yaml or .yml"]),
    (["train", "--seed", "3"], ["--seed", "without dashes: seed=3"]),
    (["train", "--group-size=4"], ["without dashes: group_size=4"]),
    (["verify", "rows.jsonl", "--reward=math", "--profile", "lenient"], ["--reward-option profile=lenient"]),
    (["verify", "rows.jsonl", "--reward=math", "--ou=x"], ["Possible options: --out"]),
    (["deom"], ["No such command 'deom'", "rlvr --help"]),
    (["serve", "--demo", "word"], ["No such command 'word'", "rlvr serve --help"]),
    (["serve", "engine", "--model=a=./rows.jsonl"], ["./rows.jsonl is not a folder with a model (it is a file)"]),
    (["train"], ["no config given"]),
    (command("reward.type=combinde"), ["combinde", "combined"]),
    (command("algorithm.name=gprpo"), ["gprpo", "grpo"]),
    (command("algorithm.reduction=tokens_mean"), ["tokens_mean", "token_mean"]),
    (command("env.name=rpn_arithmetics"), ["rpn_arithmetics", "rpn_arithmetic"]),
    (command("env.kwargs.complexty=[1,2]"), ["complexty"]),
    (command("training.group_sise=4"), ["training.group_sise", "training.group_size"]),
    (command("training.steps=many"), ["training.steps", "many"]),
    (command("algorithm.name=importance_sampling", "algorithm.clip_high=0.3"), ["clip_high", "no effect"]),
    (command("curriculum.decay=0.5"), ["curriculum.decay", "no effect"]),
    (command("rollout.seed=4"), ["rollout.seed", "no effect"]),
    (command("sft.steps=0", "sft.batch_size=4"), ["sft.batch_size", "sft.steps is 0"]),
    (command("training.group_size=1"), ["group_size", "has no signal"]),
    (command("rollout.temperature=0"), ["temperature", "nothing"]),
    (command("rollout.top_p=1.5"), ["top_p", "(0, 1]"]),
    (["train", "--config=rows.yaml", "model.name=./no-such-folder"], ["no-such-folder"]),
    (command("model.config.model_type=qwen33"), ["qwen33"]),
    (command("model.config.hiden_size=3"), ["hiden_size"]),
    (command("model.device=cuda:7"), ["cuda:7", "cpu"]),
    (command("run.name=../escape"), ["../escape", "letters, digits"]),
    (["train", "--config=rows.yaml", "env.kwargs.path=missing.jsonl"], ["missing.jsonl"]),
    (["train", "--config=rows.yaml", "env.kwargs.path=bad.jsonl"], ["bad.jsonl", "line 2"]),
    (command("reward.type=os:no_such_function"), ["no_such_function"]),
    (["evaluate", "nowhere"], ["nowhere", "run folder"]),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[" ".join(w)[:60] for w, _ in MISTAKES])
def test_a_mistake_is_one_message_that_names_the_culprit(
    tiny: Path, capfd: Any, words: list[str], expected: list[str]
) -> None:
    """Exit code 2, no traceback, the wrong word and the remedy in the message, and no run folder touched twice."""
    (tiny / "rows.yaml").write_text(
        "env: {name: jsonl, kwargs: {path: rows.jsonl}}\nmodel: {name: ./model}\nrollout: {max_tokens: 8}\n"
    )
    (tiny / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(40)))
    (tiny / "bad.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "oops"\n')
    assert run(words) == 2
    said = capfd.readouterr().err
    assert said.startswith("rlvr: ") and "Traceback" not in said
    for word in expected:
        assert word in said, said


@pytest.mark.slow
def test_a_run_folder_of_another_config_is_not_touched(tiny: Path, capsys: Any) -> None:
    """The differing key and three ways on are named; resume=false keeps the old folder under another name."""
    assert run(command()) == 0
    before = (tiny / "runs" / "tiny" / "summary.json").read_bytes()
    assert run(command("seed=4")) == 2
    said = capsys.readouterr().err
    assert "seed" in said and "run.name" in said and "run.resume=false" in said
    assert (tiny / "runs" / "tiny" / "summary.json").read_bytes() == before
    assert run(command("seed=4", "run.resume=false")) == 0
    assert (tiny / "runs" / "tiny.old-1" / "summary.json").read_bytes() == before


def test_a_first_try_that_failed_holds_no_name_against_its_correction(tiny: Path, capsys: Any) -> None:
    """An error after the folder was made (a model that cannot be built) can be corrected under the same run name."""
    assert run(command("model.config.n_positions=7")) == 2  # not a field of this architecture
    assert run(command()) == 0
    assert run(["config", "--config=tiny.yaml", "reward.type=combinde"]) == 2, "config must refuse what train refuses"


def test_a_model_folder_without_tokenizer_says_so(tiny: Path, capfd: Any) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=1, num_key_value_heads=1)).save_pretrained(tiny / "bare")
    capfd.readouterr()
    (tiny / "bare.yaml").write_text("env: {name: rpn_arithmetic}\nmodel: {name: ./bare}\nrollout: {max_tokens: 4}\n")
    assert run(["train", "--config=bare.yaml"]) == 2
    said = capfd.readouterr().err
    assert "holds no tokenizer" in said and "model.tokenizer=" in said


def test_a_prompt_longer_than_the_context_is_named(tiny: Path, capfd: Any) -> None:
    """The lengths and the remedy, before anything is trained."""
    for context, message in (
        (4, "rollout.max_tokens=6 leaves no room for a prompt in the model's context of 4 tokens; lower it"),
        (9, "longer than 3 tokens (the model's context of 9 less rollout.max_tokens=6)"),
    ):
        assert run(command(f"model.config.max_position_embeddings={context}", f"run.name=of-{context}")) == 2
        said = capfd.readouterr()
        assert message in said.err and "baseline" not in said.out


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('gold column')", "gold column"),
        ("return float('nan')", "not_finite"),
        ("return 'good'", "wrong_type"),
    ],
)
def test_a_reward_that_breaks_stops_the_run_with_its_reason(tiny: Path, capfd: Any, body: str, reason: str) -> None:
    """Never a zero: the run stops at the baseline or first step, and says what the function did."""
    name = f"mine_{abs(hash(body)) % 10_000}"
    (tiny / f"{name}.py").write_text(f"def reward(prompt, response, meta=None):\n    {body}\n")
    code = run(command(f"reward.type={name}:reward"))
    said = capfd.readouterr().err
    assert code in (1, 2) and reason in said and said.startswith("rlvr: ")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["sft", "training"])
def test_numbers_that_explode_stop_the_run_and_keep_what_was_good(tiny: Path, capfd: Any, phase: str) -> None:
    """A rate of 1e30 gives nan in the next pass: exit code 1, one message, checkpoints kept, the batch on disk."""
    words = ["sft.batch_size=32", "run.name=wild", f"{phase}.optimizer.learning_rate=1e30", f"{phase}.steps=4"]
    if phase == "training":  # a policy that is sometimes right, so that there is a gradient to follow
        words += ["sft.steps=60", "sft.optimizer.learning_rate=0.01", "training.prompts_per_step=16"]
    assert run(command(*words)) == 1
    said = capfd.readouterr().err
    assert "not finite" in said and "learning rate" in said and "Traceback" not in said
    folder = tiny / "runs" / "wild"
    assert list((folder / "checkpoints").iterdir())
    newest = sorted(checkpoint.name for checkpoint in (folder / "checkpoints").iterdir())[-1]
    assert f"Checkpoints: {newest.split('-')[0]} step {int(newest.split('-')[1])}" in said, (newest, said)
    if phase == "training":
        assert list(folder.glob("failed-batch-*.jsonl"))


def test_config_prints_every_setting_and_the_plan(tiny: Path, capsys: Any) -> None:
    assert run(["config", "--config=tiny.yaml", "training.steps=7"]) == 0
    said = capsys.readouterr().out
    assert "gap_stop: 0.1" in said and "steps: 7" in said
    assert "7 steps x 2 prompts x 4 completions = 56 completions" in said


@pytest.mark.parametrize(("word", "has_others"), [("sft.steps=2", True), ("sft.steps=0", False)])
def test_the_plan_names_tasks_of_interim_evaluations_where_there_are_some(
    tiny: Path, capsys: Any, word: str, has_others: bool
) -> None:
    (tiny / "tiny.yaml").write_text(TINY.replace("sft: {", "sft: {until: 0.5, "))
    assert run(["config", "--config=tiny.yaml", word]) == 0
    assert ("others for interim evaluations" in capsys.readouterr().out) == has_others


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--config=tiny.yaml", "training.completions=given"], "algorithm.name=grpo learns from completions of the"),
        (["--config-name=jsonl", "model.name=x/y", "env.kwargs.path=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--config-name=jsonl", "model.name=./nowhere"], "model.name=./nowhere: no such folder; give a folder that"),
        (["--config-name=gsm8k", "model.name=empty"], "model.name=empty: no config.json"),  # before a hub is asked
        (
            ["--config-name=gsm8k", "model.name=begun"],
            "model.name=begun is a run; give model.start_from=begun to start",
        ),
    ],
)
def test_config_prints_the_settings_before_it_tries_model_and_data(
    tiny: Path, capsys: Any, words: list[str], told: str
) -> None:
    (tiny / "empty").mkdir()
    (tiny / "begun").mkdir()
    (tiny / "begun" / "resolved.yaml").write_text(TINY)
    assert run(["config", *words]) == 2
    said = capsys.readouterr()
    assert "gap_stop: 0.1" in said.out and told in " ".join(said.err.split())


@pytest.mark.parametrize("device", ["cuda:0,cuda:1", "gpu", "cuda:x", "cpu:0", ""])
def test_a_mistyped_device_is_refused_at_once(tiny: Path, capsys: Any, device: str) -> None:
    assert run(["config", "--config=tiny.yaml", f"model.device={device!r}"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"model.device={device!r}, expected one device: auto, cpu, cuda or cuda:N" in told


def test_secrets_from_the_environment_are_not_written(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret-value")
    text = TINY.replace("run: {", "run: {name: '${oc.env:MY_TOKEN}', ")
    (tiny / "tiny.yaml").write_text(text)
    assert run(command()) == 0
    stored = next((tiny / "runs").rglob("resolved.yaml")).read_text()
    assert "s3cret-value" not in stored and "${oc.env:MY_TOKEN}" in stored


@pytest.mark.parametrize("words", [["view", "."], ["serve", "--demo"]])
@pytest.mark.parametrize("package", mark_slow_but(1, ["sqlalchemy", "uvicorn", "fastapi"]))
def test_a_server_without_its_packages_names_the_extra(words: list[str], package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from rlvr.cli.main import run; sys.exit(run({words}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{package} is not installed" in done.stderr and "pip install 'rlvr[serve]'" in done.stderr
