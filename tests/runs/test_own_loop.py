"""A loop that a program writes itself: `rlvr.Loop` and `rlvr.update`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rlvr
from rlvr.algorithms.optimizers import AdamW
from rlvr.algorithms.update import Passes
from rlvr.core import rng
from rlvr.rollout import open_groups, rollout, score
from tests.kit.chat_rows import qwen_folder
from tests.kit.paths import ROOT
from tests.kit.tiny import LLAMA_LIKE

STEPS = 4


def digits(prompt: str, response: str, meta: dict[str, Any]) -> float:
    return sum(character.isdigit() for character in response) / 4


class Stopped(Exception):
    """A program that ends in the middle, as a kill does."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rlvr.resolve_environment("dataset", path=str(file), reward="exact_match", heldout_fraction=0.3)


def run_loop(folder: Path, model: Path, source: Any, stop_after: int = STEPS, **settings: Any) -> None:
    options: dict[str, Any] = {"lora": rlvr.LoraConfig(rank=2), "threads": 1, "checkpoint_every": 2, **settings}
    with rlvr.Loop(folder, source, digits, model=model, params=rlvr.SamplingParams(max_tokens=4), **options) as loop:
        loop.evaluate("baseline", tasks=4, samples=2)
        for step in loop.steps(STEPS):
            sampler = loop.client.save_weights_and_get_sampling_client()
            tasks = [source.train(loop.seed, 2 * step + i, source.levels[0]) for i in range(2)]
            groups = open_groups(source, tasks, 4, loop.tokenizer, f"step-{step}")
            batch = rollout(groups, sampler, loop.params, seed=rng.key(loop.seed, step))
            score(batch, loop.reward)
            result = rlvr.update(loop.client, "grpo", batch, learning_rate=1e-3)
            loop.log(result.metrics(), reward=rlvr.TrajectoryBatch(batch).mean_reward)
            loop.state["seen"] = loop.state.get("seen", 0) + len(batch)
            if step + 1 == stop_after:
                raise Stopped
        loop.evaluate("final", tasks=4, samples=2)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "time/step"} for row in rlvr.load_run(folder).metrics]


@pytest.fixture(scope="module")
def whole(model: Path, source: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops") / "whole"
    run_loop(folder, model, source, stop_after=0)
    return folder


def test_the_folder_is_read_like_that_of_a_run(whole: Path, tmp_path: Path) -> None:
    run = rlvr.load_run(whole)
    assert run.is_finished and [row["step"] for row in run.metrics] == list(range(STEPS))
    assert run.summary["final"]["pass@1"]["n"] == 4 and 0 <= run.summary["p_value"] <= 1
    assert [place.name for place in run.checkpoints] == ["rl-000004", "rl-000002"]
    assert run.settings["lora"]["rank"] == 2
    assert run.plot(tmp_path / "curve.png").stat().st_size > 5_000
    with pytest.raises(ValueError, match=r"loop of your own, which has no evaluate; use rlvr\.evaluate"):
        run.evaluate()
    with pytest.raises(ValueError, match="no resume; use the program"):
        run.resume()


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_loop_that_was_stopped_goes_on_with_the_same_bits(
    whole: Path, model: Path, source: Any, tmp_path: Path, stop_after: int
) -> None:
    folder = tmp_path / "stopped"
    with pytest.raises(Stopped):
        run_loop(folder, model, source, stop_after)
    run_loop(folder, model, source, stop_after=0)
    assert rlvr.load_run(folder).summary["weights_sha256"] == rlvr.load_run(whole).summary["weights_sha256"]
    assert rows_of(folder) == rows_of(whole)
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert [e["state"]["seen"] for e in events if e["event"] == "checkpoint"] == [16, 32]


def test_evaluations_are_made_once_a_step(whole: Path, model: Path, source: Any) -> None:
    before = (whole / "evaluations" / "final.json").stat().st_mtime_ns
    run_loop(whole, model, source, stop_after=0)
    assert (whole / "evaluations" / "final.json").stat().st_mtime_ns == before


def test_other_settings_and_other_folders_are_refused(whole: Path, model: Path, source: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds a loop with seed=42, not 7, rate=None, not 0\.001; give the same"):
        run_loop(whole, model, source, seed=7, settings={"rate": 1e-3})
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty, and no folder of an rlvr\.Loop"):
        run_loop(tmp_path, model, source)
    nothing = rlvr.Loop(tmp_path / "new", source, digits, params=rlvr.SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match="model: neither name nor config is given"), nothing:
        pass


def test_the_baseline_is_that_before_the_first_step(whole: Path, model: Path, source: Any, tmp_path: Path) -> None:
    expected = (whole / "evaluations" / "baseline.json").read_text()
    with pytest.raises(Stopped):
        run_loop(tmp_path / "kept", model, source, stop_after=3)
    run_loop(tmp_path / "kept", model, source, stop_after=0)
    assert (tmp_path / "kept" / "evaluations" / "baseline.json").read_text() == expected
    run = rlvr.load_run(tmp_path / "kept")
    assert run.summary["baseline"] == rlvr.load_run(whole).summary["baseline"]


def open_loop(folder: Path, source: Any, **settings: Any) -> rlvr.Loop:
    """A loop over the table of logits, which needs no model."""
    params = rlvr.SamplingParams(max_tokens=4)
    return rlvr.Loop(folder, source, digits, client="mock", params=params, **settings)


@pytest.fixture
def toy() -> Any:
    return rlvr.resolve_environment("toy")


def make_step(loop: rlvr.Loop, toy: Any, step: int) -> None:
    sampler = loop.client.save_weights_and_get_sampling_client()
    groups = open_groups(toy, [toy.train(1, step, toy.levels[0])], 8, loop.tokenizer, f"step-{step}")
    batch = rollout(groups, sampler, loop.params, seed=rng.key(step))
    for i, trajectory in enumerate(batch):
        trajectory.reward = float(i % 2)
    rlvr.update(loop.client, "reinforce", batch, learning_rate=0.1)


def test_a_step_that_is_left_by_break_is_the_last_one_and_is_saved(tmp_path: Path, toy: Any) -> None:
    for _ in range(2):
        with open_loop(tmp_path / "left", toy) as loop:
            loop.evaluate("baseline", tasks=4, samples=2)
            for step in loop.steps(3):
                make_step(loop, toy, step)
                loop.log(mine=step)
                if step == 1:
                    break
            trained = loop.client.weights_sha256()
            loop.evaluate("final", tasks=4, samples=2)
        run = rlvr.load_run(tmp_path / "left")
        assert [row["mine"] for row in run.metrics] == ([0, 1] if _ == 0 else [0, 1, 2])
        assert run.summary["weights_sha256"] == trained and run.summary["steps"] == len(run.metrics)
        assert run.checkpoints[0].name == f"rl-{len(run.metrics):06d}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_loop_after_its_step_and_the_loop_goes_on(tmp_path: Path, toy: Any, number: int) -> None:
    """The handlers of the program are back after it; in the same block, too, the loop goes on."""
    before, made = signal.getsignal(number), list[int]()

    def make_steps(loop: rlvr.Loop, stop_at: int) -> None:
        for step in loop.steps(6):
            if step == stop_at:
                os.kill(os.getpid(), number)
            made.append(step)
            loop.log(reward=1.0)

    with open_loop(tmp_path / "own", toy) as loop:
        for stop_at in (1, 3):
            with pytest.raises(KeyboardInterrupt, match=r"stopped after step \d+ of .* goes on"):
                make_steps(loop, stop_at)
            assert signal.getsignal(number) is before
    with open_loop(tmp_path / "own", toy) as loop:
        make_steps(loop, -1)
    assert made == [0, 1, 2, 3, 4, 5]


def test_rows_are_tasks_as_in_a_run(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}."} for n in range(30)]
    params = rlvr.SamplingParams(max_tokens=4)
    with rlvr.Loop(tmp_path / "rows", rows, digits, model=model, params=params, threads=1) as loop:
        assert loop.source.size(loop.source.levels[0]) + len(loop.source.heldout(None)) == 30
        loop.evaluate("baseline", tasks=2, samples=2)
    with pytest.raises(ValueError, match="holds a loop with other tasks"):
        rlvr.Loop(tmp_path / "rows", rows[:20], digits, model=model, params=params, threads=1).__enter__()
    with pytest.raises(ValueError, match=r"'nowhere\.jsonl' is no file or folder here and no environment"):
        rlvr.Loop(tmp_path / "rows", "nowhere.jsonl", digits, model=model, params=params)


def test_a_loop_that_goes_on_is_not_finished(tmp_path: Path, toy: Any) -> None:
    def go(steps: int, stop: bool = False) -> None:
        with open_loop(tmp_path / "more", toy) as loop:
            loop.evaluate("baseline", tasks=4, samples=2)
            for step in loop.steps(steps):
                make_step(loop, toy, step)
                if stop:
                    raise Stopped
            loop.evaluate("final", tasks=4, samples=2)

    go(2)
    with pytest.raises(Stopped):
        go(4, stop=True)
    assert not rlvr.load_run(tmp_path / "more").is_finished
    go(4)
    assert rlvr.load_run(tmp_path / "more").summary["steps"] == 4


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ({"step": 9}, "given 'step', a name of the run's own"),
        ({"phase": 1}, "given 'phase', a name of the run's own"),
        ({"time/step": 1}, "given 'time/step', a name of the run's own"),
        ({"mine": "text"}, "given 'mine': 'text', expected a number under a name"),
        ({"mine": {1}}, "expected a number under a name"),
    ],
)
def test_what_is_no_metric_is_not_logged(tmp_path: Path, toy: Any, logged: dict[str, Any], said: str) -> None:
    with open_loop(tmp_path / "logged", toy) as loop:
        with pytest.raises(ValueError, match="there is no step in progress"):
            loop.log(mine=1.0)
        for _ in loop.steps(1):
            with pytest.raises(ValueError, match=said):
                loop.log(logged)
            loop.log(mine=torch.tensor(2.0))
    assert rlvr.load_run(tmp_path / "logged").metrics[0]["mine"] == 2.0


def test_mistakes_are_one_message_each(tmp_path: Path, toy: Any) -> None:
    for settings in ({"x": float("nan")}, {"o": object()}, {1: 2}):
        with pytest.raises(ValueError, match="settings has to be a dictionary that JSON can store"):
            open_loop(tmp_path / "wrong", toy, settings=settings)
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(ValueError, match="checkpoint_every=0, expected at least 1"):
        open_loop(tmp_path / "wrong", toy, checkpoint_every=0)
    with open_loop(tmp_path / "named", toy) as loop:
        for name in ("../escape", "a/b", "", "x" * 300):
            with pytest.raises(ValueError, match=r"Loop\.evaluate: name"):
                loop.evaluate(name)
        loop.evaluate("baseline", tasks=4, samples=2)
        with pytest.raises(ValueError, match=r"the stored baseline has .*, None], asked for"):
            loop.evaluate("baseline", tasks=8, samples=2)
    with (
        open_loop(tmp_path / "state", toy) as loop,
        pytest.raises(ValueError, match="state has to be a dictionary that JSON can store"),
    ):
        for _ in loop.steps(1):
            loop.state["seen"] = {1, 2}
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / ".lock").touch()
    with open_loop(tmp_path / "begun", toy) as loop:
        assert loop.step == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_tokens": -1}, "max_tokens=-1, expected at least 1"),
        ({"learning_rate": 0.1, "optimizer": AdamW(learning_rate=0.1)}, "learning_rate and optimizer are given"),
        ({"optimizer": AdamW(learning_rate=0.1, decay="linear")}, "changes from step to step: give step and steps"),
        ({"optimizer": AdamW(learning_rate=0.1, warmup_steps=5)}, "changes from step to step: give step and steps"),
        ({"step": 5, "steps": 5}, "step=5 of steps=5, expected 0 to 4"),
        ({"algorithm": "ppo_critic"}, "has a critic, which rlvr.update does not train"),
        ({"algorithm": "dpo"}, "compares with a reference: give reference="),
    ],
)
def test_a_wrong_argument_of_update_is_one_message(tmp_path: Path, toy: Any, given: Any, said: str) -> None:
    with open_loop(tmp_path / "update", toy) as loop, pytest.raises(ValueError, match=said):
        rlvr.update(loop.client, given.pop("algorithm", "reinforce"), [], **given)
    with pytest.raises(ValueError, match="epochs=0, substeps=1; expected at least 1 of each"):
        Passes(epochs=0)


def test_all_weights_are_trained_as_easily(model: Path, source: Any, tmp_path: Path) -> None:
    run_loop(tmp_path / "all", model, source, stop_after=0, lora=None)
    assert (rlvr.load_run(tmp_path / "all").checkpoints[0] / "model.safetensors").exists()


def test_what_an_algorithm_needs_is_asked_for(model: Path, source: Any, tmp_path: Path) -> None:
    params = rlvr.SamplingParams(max_tokens=4)
    with rlvr.Loop(tmp_path / "needs", source, digits, model=model, params=params, threads=1) as loop:
        sampler = loop.client.save_weights_and_get_sampling_client()
        tasks = [source.train(1, 0, source.levels[0])]
        batch = rollout(open_groups(source, tasks, 4, loop.tokenizer, "a"), sampler, params, seed=1)
        for t, reward in zip(batch, (0.0, 1.0, 0.0, 1.0), strict=True):
            t.reward = reward
        with pytest.raises(ValueError, match="'dr_grpo' needs max_tokens, the most tokens of a completion"):
            rlvr.update(loop.client, "dr_grpo", batch)
        assert rlvr.update(loop.client, "dr_grpo", batch, max_tokens=4).updates == 1
        with pytest.raises(ValueError, match="'ema' has a baseline that moves from step to step"):
            rlvr.update(loop.client, "reinforce_ema", batch)
        spec = rlvr.resolve_algorithm("reinforce_ema")
        assert rlvr.update(loop.client, spec, batch, baseline=spec.advantage.start_baseline()).updates == 1
        batch[0].temperature = 0.5
        with pytest.raises(ValueError, match=r"sampled at the temperatures \[0.5, 1.0\]; expected one"):
            rlvr.update(loop.client, "grpo", batch)


def test_weights_that_an_optimizer_of_torch_stepped_have_another_fingerprint(
    model: Path, source: Any, tmp_path: Path
) -> None:
    params = rlvr.SamplingParams(max_tokens=4)
    with rlvr.Loop(tmp_path / "own", source, digits, model=model, params=params, threads=1) as loop:
        client: Any = loop.client
        weight = next(iter(client.policy.parameters.values()))
        optimizer, seen = torch.optim.SGD([weight], lr=0.1), list[str]()
        for _ in range(3):
            seen.append(client.save_weights_and_get_sampling_client().fingerprint)
            seen.append(client.save_weights_and_get_sampling_client().fingerprint)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert seen[0] == seen[1] == "policy@0" and seen[2] == seen[3] and seen[4] == seen[5]
        assert len(set(seen)) == 3 and all(name.startswith("policy@0.") for name in seen[2:])
        state = client.save_state("edited").result().path
        edited = client.fingerprint
        client.policy.mark_changed()
        assert client.fingerprint not in (*seen, edited)
        client.load_state_with_optimizer(state).result()
        assert client.fingerprint == edited, "restored weights keep their name"


def test_a_model_of_random_weights_is_a_configuration(tmp_path: Path) -> None:
    source, config = rlvr.resolve_environment("sorting", digits=2), {"model_type": "qwen3", **LLAMA_LIKE}
    params = rlvr.SamplingParams(max_tokens=3)
    with rlvr.Loop(tmp_path / "own", source, digits, model=config, tokenizer="words", params=params) as loop:
        assert loop.evaluate("baseline", tasks=2, samples=2).results
    assert rlvr.load_run(tmp_path / "own").settings["model"] == config
    other = rlvr.Loop(tmp_path / "own", source, digits, model="./mine", tokenizer="words", params=params)
    with pytest.raises(ValueError, match="holds a loop with model="), other:
        pass


@pytest.mark.slow
def test_the_example_needs_no_argument_and_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_loop.py")], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = rlvr.load_run(tmp_path / "runs" / "own-loop").summary
    assert summary["final"]["mean_reward"]["value"] > summary["baseline"]["mean_reward"]["value"] + 0.1
    assert f"{summary['final']['mean_reward']['value']:.3f}" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_example_is_killed_and_goes_on_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    def start(folder: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, str(ROOT / "examples" / "own_loop.py"), str(model), "--folder", folder, "--steps=22"]
        return subprocess.Popen(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})

    assert start("whole").wait(300) == 0
    killed = start("killed")
    log = tmp_path / "killed" / "metrics.jsonl"
    while killed.poll() is None and (not log.exists() or len(log.read_bytes().splitlines()) < 21):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert start("killed").wait(300) == 0
    found = [rlvr.load_run(tmp_path / name).summary["weights_sha256"] for name in ("whole", "killed")]
    assert found[0] == found[1] and rows_of(tmp_path / "whole") == rows_of(tmp_path / "killed")
