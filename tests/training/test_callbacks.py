"""Callbacks of a run: they see copies, add metrics, end it, and change no bit of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.core.types import Trajectory
from rlvr.training.callbacks import Callback, CallbackOptions, StopRun, resolve_callback
from rlvr.training.errors import TrainingStoppedError
from tests.kit.forked_process import run_forked
from tests.kit.paths import ROOT
from tests.kit.tiny_run import TINY, RunKilled, attempt, stored_steps

OWN = "callbacks_of_tests"
MODULE = '''
from rlvr import Callback, StopRun

seen = []


class Vandal(Callback):
    """Changes all that it is given."""

    def on_rollouts(self, step, trajectories):
        for trajectory in trajectories:
            trajectory.reward = 99.0
            trajectory.response_tokens.clear()
            trajectory.task.meta.clear()
            trajectory.advantage = 5.0
        trajectories.clear()

    def on_step(self, phase, step, metrics):
        metrics.clear()

    def on_evaluate(self, phase, step, metrics):
        metrics.clear()


class Count(Callback):
    """Counts the steps over all attempts."""

    def __init__(self):
        self.steps = 0

    def on_step(self, phase, step, metrics):
        self.steps += 1
        return {"count/steps": self.steps}

    def on_rollouts(self, step, trajectories):
        return {"count/completions": len(trajectories)}

    def on_evaluate(self, phase, step, metrics):
        seen.append((phase, step, sorted(metrics)[:1]))

    def state(self):
        return {"steps": self.steps}

    def restore(self, state):
        self.steps = state["steps"]
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, OWN, raising=False)
    (tmp_path / f"{OWN}.py").write_text(MODULE)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


def test_a_callback_that_changes_all_it_is_given_changes_no_bit(file: str) -> None:
    plain = attempt(file, "run.name=plain")
    watched = attempt(file, "run.name=watched", f"callbacks=['{OWN}:Vandal']")
    assert watched["weights_sha256"] == plain["weights_sha256"]
    assert stored_steps(Path("runs/watched")) == stored_steps(Path("runs/plain"))


def test_metrics_and_state_go_on_after_a_kill(file: str) -> None:
    words = ("run.name=killed", "run.checkpoint_every=2", "training.steps=4", f"callbacks=['{OWN}:Count']")
    with pytest.raises(RunKilled):
        attempt(file, *words, killed_at=3)
    attempt(file, *words)
    rows = stored_steps(Path("runs/killed"))
    assert [row["count/steps"] for row in rows] == [1, 2, 3, 4, 5, 6]  # two of fine-tuning, step 3 of RL made twice
    assert [row.get("count/completions") for row in rows] == [None, None, 8, 8, 8, 8]


def test_callbacks_may_change_between_attempts(file: str) -> None:
    with pytest.raises(RunKilled):
        attempt(file, "run.name=changed", f"callbacks=['{OWN}:Count']", killed_at=1)
    summary = attempt(file, "run.name=changed")
    assert summary["weights_sha256"] == attempt(file, "run.name=plain")["weights_sha256"]


def test_the_evaluations_of_a_run_are_told(file: str) -> None:
    attempt(file, "run.name=told", "evaluation.every=2", f"callbacks=['{OWN}:Count']")
    from callbacks_of_tests import seen  # pyright: ignore[reportMissingImports]

    assert [(phase, step) for phase, step, _ in seen] == [("baseline", 0), ("interim", 2), ("interim", 3), ("final", 3)]
    assert all(metrics for _, _, metrics in seen)


# The rest needs no model: a table of logits learns in a tenth of a second.


class Own(Callback):
    """What a test gives it to do at each point; `seen` are the points that it came to."""

    def __init__(self, **points: Any) -> None:
        self.points, self.seen = points, list[tuple[Any, ...]]()

    def _do(self, point: str, *arguments: Any) -> Any:
        self.seen.append((point, *arguments))
        found = self.points.get(point)
        return found(*arguments) if found else None

    def on_start(self, folder: Path) -> None:
        self._do("start", folder.name)

    def on_rollouts(self, step: int, trajectories: Sequence[Trajectory]) -> Any:
        return self._do("rollouts", step)

    def on_step(self, phase: str, step: int, metrics: Mapping[str, Any]) -> Any:
        return self._do("step", step)

    def on_evaluate(self, phase: str, step: int, metrics: Mapping[str, Any]) -> Any:
        return self._do("evaluate", phase, step)

    def on_stop(self, reason: str) -> None:
        self._do("stop", reason)


def digits(prompt: str, response: str, meta: Mapping[str, Any]) -> float:
    return len(response) % 3 / 2


def train(root: Path, *callbacks: Any, **settings: Any) -> rlvr.Run:
    options: dict[str, Any] = {
        "steps": 3, "prompts_per_step": 2, "group_size": 4, "max_tokens": 4,
        "evaluation": {"tasks": 4, "samples": 2}, "name": "run", "callbacks": callbacks, **settings,
    }  # fmt: skip
    return rlvr.train(data="toy", reward=digits, client="mock", root=root, quiet=True, **options)


def stop_at(step: int, text: str = "enough") -> Any:
    def stop(now: int) -> None:
        if now == step:
            raise StopRun(text)

    return stop


def test_every_point_is_told_in_order(tmp_path: Path) -> None:
    own = Own()
    train(tmp_path, own)
    steps = [point for step in range(3) for point in (("rollouts", step), ("step", step))]
    assert own.seen == [
        ("start", "run"), ("evaluate", "baseline", 0), *steps, ("evaluate", "final", 3), ("stop", "finished")
    ]  # fmt: skip


@pytest.mark.parametrize("point", ["step", "rollouts"])
def test_a_callback_ends_training_and_the_run_is_finished(tmp_path: Path, point: str) -> None:
    run = train(tmp_path, Own(**{point: stop_at(1)}))
    assert run.is_finished and [row["step"] for row in run.metrics] == [0, 1]
    assert run.summary["steps"] == 2 and run.summary["stopped"].startswith("enough (callback Own")
    assert run.summary["final"]["pass@1"]["n"] == 4


def test_a_callback_may_end_a_run_before_its_first_step(tmp_path: Path) -> None:
    def stop(phase: str, step: int) -> None:
        raise StopRun("nothing to learn")

    run = train(tmp_path, Own(evaluate=stop))
    assert run.metrics == [] and run.summary["stopped"].startswith("nothing to learn")


def test_a_callback_that_raises_ends_the_run_after_its_step_and_loses_nothing(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "whole")
    wrong = Own(step=lambda step: 1 // (1 - step) and None)
    with pytest.raises(
        TrainingStoppedError, match=r"(?s)callback Own: on_step raised ZeroDivisionError.*test_call.*py"
    ):
        train(tmp_path, wrong)
    assert [row["step"] for row in rlvr.load_run(tmp_path / "run").metrics] == [0, 1]
    assert wrong.seen[-1][0] == "stop" and "ZeroDivisionError" in wrong.seen[-1][1]
    mended = Own()
    run = train(tmp_path, mended)
    assert [step for point, *rest in mended.seen if point == "step" for step in rest] == [2]
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


@pytest.mark.parametrize("point", ["start", "evaluate"])
def test_a_callback_that_raises_elsewhere_ends_the_run_too(tmp_path: Path, point: str) -> None:
    with pytest.raises(TrainingStoppedError, match=f"on_{point} raised RuntimeError: no"):
        train(tmp_path, Own(**{point: raise_no}))
    assert train(tmp_path).is_finished


def raise_no(*_: Any) -> None:
    raise RuntimeError("no")


def test_one_that_raises_at_the_end_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, Own(stop=raise_no)).is_finished
    assert "on_stop raised RuntimeError: no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"reward": 1.0}, "given 'reward', which the step has already"),
        ({"phase": 1.0}, "given 'phase', a name of the run's own"),
        ({"mine": "text"}, "given 'mine': 'text', expected a number under a name"),
        ({3: 1.0}, "given 3: 1.0, expected a number under a name"),
        (5, "the method returned a int, expected None or metrics"),
    ],
)
def test_what_is_no_metric_is_refused(tmp_path: Path, returned: Any, said: str) -> None:
    with pytest.raises(TrainingStoppedError, match=said):
        train(tmp_path, Own(step=lambda step: returned))


def test_two_callbacks_may_not_return_one_metric(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError, match="given 'mine', which the step has already"):
        train(tmp_path, Own(step=lambda step: {"mine": 1}), Own(step=lambda step: {"mine": 2}))


def test_metrics_that_are_not_finite_are_kept_as_others_are(tmp_path: Path) -> None:
    run = train(tmp_path, Own(step=lambda step: {"mine/nan": float("nan"), "mine/count": step}))
    assert [row["mine/count"] for row in run.metrics] == [0, 1, 2]
    assert all(row["mine/nan"] != row["mine/nan"] for row in run.metrics)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["mine/count"] == 0


class Misnamed:
    def on_step_end(self) -> None: ...


class Empty:
    pass


class Needs(Callback):
    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_stop(self, reason: str) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nothing_known", "unknown callback 'nothing_known'"),
        (f"{__name__}:Misnamed", r"has a method on_step_end, which nothing calls \(did you mean 'on_step'"),
        (f"{__name__}:Empty", "is of type Empty without any of on_start"),
        (f"{__name__}:Needs", "needs 'limit'"),
        (CallbackOptions(f"{__name__}:Needs", {"limt": 1}), r"does not take 'limt' \(did you mean 'limit'"),
        (CallbackOptions(f"{__name__}:MADE", {"limit": 1}), "is an object, which takes no kwargs"),
    ],
)
def test_a_wrong_callback_is_one_message(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve_callback(given)


MADE = Needs(2.0)


def test_a_class_takes_its_options_and_an_object_is_itself() -> None:
    assert resolve_callback(CallbackOptions(f"{__name__}:Needs", {"limit": 3.0})).limit == 3.0
    assert resolve_callback(f"{__name__}:MADE") is MADE


class Count(Callback):
    def __init__(self) -> None:
        self.calls = 0

    def on_step(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None:
        self.calls += 1


def test_equal_callbacks_are_two_and_each_is_called(tmp_path: Path) -> None:
    first, second = Count(), Count()
    train(tmp_path / "both", first, second)
    assert (first.calls, second.calls) == (3, 3)
    train(tmp_path / "first", first)
    assert (first.calls, second.calls) == (6, 3)


def test_one_callback_needs_no_list(tmp_path: Path) -> None:
    own = Count()
    train(tmp_path, callbacks=own)
    assert own.calls == 3


@pytest.mark.parametrize("returned", [{"reward": 3.0}, {"time/step": 1.0}, {"test/pass_rate": 1.0}])
def test_rollouts_take_no_name_of_the_run_either(tmp_path: Path, returned: dict[str, float]) -> None:
    with pytest.raises(
        TrainingStoppedError, match=r"on_rollouts raised .*: given .*(the step has already|the run's own)"
    ):
        train(tmp_path, Own(rollouts=lambda step: returned))


def test_stop_run_in_fine_tuning_outlives_a_kill(file: str, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(
        "import os\n"
        "import rlvr\n"
        "class Stop(rlvr.Callback):\n"
        "    def on_step(self, phase, step, metrics):\n"
        "        if phase == 'sft':\n"
        "            raise rlvr.StopRun('enough')\n"
        "    def on_evaluate(self, phase, step, metrics):\n"
        "        if phase == 'baseline' and os.environ.get('KILL'):\n"
        "            os.kill(os.getpid(), 9)\n"
    )
    words = ["train", f"--config={file}", "callbacks=['stops:Stop']"]

    def run(name: str, **environment: str) -> int:
        path = os.pathsep.join([str(ROOT), str(tmp_path)])
        environment = {**os.environ, "PYTHONPATH": path, **environment}
        return run_forked(
            ["-m", "rlvr", *words, f"run.name={name}"], cwd=tmp_path, env=environment, timeout=300
        ).returncode

    assert run("whole") == 0
    assert run("killed", KILL="1") == -9
    assert run("killed") == 0
    whole, killed = (rlvr.load_run(tmp_path / "runs" / name) for name in ("whole", "killed"))
    assert killed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert [row["phase"] for row in killed.metrics] == ["sft"]
    assert killed.summary["stopped"] == whole.summary["stopped"] == "enough (callback Stop)"


class Keeps(Callback):
    """Has a state that a test gives it."""

    def __init__(self, held: Any = None, refuses: bool = False) -> None:
        self.held, self.refuses = held, refuses
        self.restored: Any = None

    def on_step(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None: ...

    def state(self) -> Any:
        return self.held

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.refuses:
            raise KeyError("missing")
        self.restored = state


@pytest.mark.parametrize("held", [{"a": {1, 2}}, [1], {1: 2}, {"a": float("nan")}])
def test_a_state_that_is_no_json_names_its_callback(tmp_path: Path, held: Any) -> None:
    with pytest.raises(TrainingStoppedError, match="callback Keeps: state raised"):
        train(tmp_path, Keeps(held))


def test_a_state_finds_its_class_whatever_stands_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(step: int) -> None:
        if step == 1:
            raise RuntimeError("stop here")

    with pytest.raises(TrainingStoppedError):
        train(tmp_path, Keeps({"n": 1}), Own(step=stop))
    with pytest.raises(TrainingStoppedError, match="callback Keeps: restore raised KeyError: 'missing'"):
        train(tmp_path, Keeps({"n": 1}, refuses=True))
    other, kept = Count(), Keeps({"n": 2, "more": 3})
    train(tmp_path, other, kept)
    assert kept.restored == {"n": 1}
    with pytest.raises(TrainingStoppedError):
        train(tmp_path / "lost", Keeps({"n": 1}), Own(step=stop))
    train(tmp_path / "lost")
    assert "has a state of the callback Keeps, which this attempt does not have" in capsys.readouterr().err


def test_what_a_callback_changes_of_torch_is_put_back(file: str, tmp_path: Path) -> None:
    (tmp_path / "globals_of_torch.py").write_text(
        "import torch\n"
        "import rlvr\n"
        "class Change(rlvr.Callback):\n"
        "    def on_step(self, phase, step, metrics):\n"
        "        torch.set_default_dtype(torch.float64)\n"
        "        torch.set_float32_matmul_precision('medium')\n"
        "        torch.manual_seed(5)\n"
    )
    plain = attempt(file, "run.name=plain")
    changed = attempt(file, "run.name=changed", "callbacks=['globals_of_torch:Change']")
    assert changed["weights_sha256"] == plain["weights_sha256"]
