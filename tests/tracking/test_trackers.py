"""Trackers hold what a run said, each step once, through kills, retries and missing libraries."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlvr.tracking.mlflow_store import metric_name
from rlvr.tracking.tracker import mask_settings
from rlvr.tracking.trackers import Trackers, TrackingOptions

MLFLOW, TENSORBOARD = TrackingOptions(mlflow=True), TrackingOptions(tensorboard=True)
CONFIG: dict[str, Any] = {
    "seed": 3,
    "model": {"name": "${oc.env:MY_MODEL}", "config": {}, "lora": None},
    "curriculum": {"schedule": [[0, {"1": 4}]]},
    "env": {"kwargs": {"a/b": "two\nlines", "long": "x" * 9000}},
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Place:
    """A run folder, the warnings it gave, and the steps of its metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs" / "mine"
        self.folder.mkdir(parents=True)
        self.warnings: list[str] = []
        self.clock = Clock()

    def trackers(self, options: TrackingOptions, config: Mapping[str, Any] = CONFIG) -> Trackers:
        return Trackers(options, self.folder, "mine", config, self.warnings.append, self.clock)

    def attempt(self, options: TrackingOptions, steps: Sequence[int], kept: Sequence[dict[str, Any]] = ()) -> None:
        with self.trackers(options).running(kept) as trackers:
            for step in steps:
                trackers.log("rl", step, row(step))


def row(step: int) -> dict[str, Any]:
    return {"reward": step / 10, "reward/min": -1.0, "time/step": 0.5}


def logged_rows(*steps: int) -> list[dict[str, Any]]:
    return [{"phase": "rl", "step": step, **row(step)} for step in steps]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def mlflow_client(place: Place) -> Any:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # as a reader of the folder does: `mlflow ui` asks for it too
    return MlflowClient(tracking_uri=(place.folder.parent / "mlruns").absolute().as_uri())


def mlflow_runs(place: Place, experiment: str = "rlvr") -> list[Any]:
    client = mlflow_client(place)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def mlflow_steps(place: Place, name: str, run: Any = None) -> list[tuple[int, float]]:
    found = run or mlflow_runs(place)[0]
    return [(m.step, m.value) for m in mlflow_client(place).get_metric_history(found.info.run_id, name)]


def tensorboard_scalars(place: Place, phase: str, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place.folder / "tensorboard" / phase), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)]


# --- what is written ---------------------------------------------------------------------------------------------


def test_mlflow_has_every_step_the_settings_and_the_summary(place: Place):
    with place.trackers(MLFLOW).running([]) as trackers:
        trackers.log("sft", 0, {"loss": 2.0, "time/step": 0.1})
        trackers.log("rl", 0, {"reward": math.nan, "reward/min": -1, "rewards/os:path/ü%/mean": 1, "note": "text"})
        trackers.log("rl", 1, {"reward": 0.5})
        estimate = {"value": 0.25, "low": 0.2, "high": 0.3}
        trackers.finish(
            {"final": {"pass@1": estimate}, "by_level": {"2": {"final": {"pass@1": estimate}}}, "mode": "x"}
        )
    [run] = mlflow_runs(place)
    assert run.info.status == "FINISHED" and run.info.run_name == "mine"
    assert mlflow_steps(place, "sft/loss") == [(0, 2.0)]
    (first, second) = mlflow_steps(place, "rl/reward")
    assert math.isnan(first[1]) and second == (1, 0.5)
    assert set(run.data.metrics) == {
        *("sft/loss", "sft/time.step", "rl/reward", "rl/reward.min", "rl/rewards.os:path.__.mean"),
        *("summary/final.pass_at_1", "summary/by_level.2.final.pass_at_1"),
    }
    assert run.data.metrics["summary/final.pass_at_1"] == 0.25
    params = run.data.params
    assert params["seed"] == "3" and params["model.config"] == "{}" and params["model.lora"] == "null"
    assert params["model.name"] == "${oc.env:MY_MODEL}" and params["curriculum.schedule"] == '[[0, {"1": 4}]]'
    assert params["env.kwargs.a_b"] == r'"two\nlines"' and len(params["env.kwargs.long"]) == 500
    assert place.warnings == []


def test_mlflow_gets_settings_without_secrets_and_folders(place: Place):
    kwargs = {"path": "/home/someone/rows.jsonl", "hf_token": "hunter2"}
    with place.trackers(MLFLOW, {"env": {"kwargs": kwargs}}).running([]):
        pass
    params = mlflow_runs(place)[0].data.params
    assert params == {"env.kwargs.path": ".../rows.jsonl", "env.kwargs.hf_token": "***"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://host/v1?api_key=sk-SECRET", "https://host/v1?***"),
        ("https://host/v1#sk-SECRET", "https://host/v1?***"),
        ("https://host:1/v1?mail=a@b&api_key=sk-SECRET", "https://***"),
        ("postgresql://me:pa/ss@host/db", "postgresql://***@host/db"),
        ("postgresql://me:SEC?RET@host/db", "postgresql://***"),
        ("file:///home/someone/rows.jsonl", ".../rows.jsonl"),
        ("sqlite:////home/someone/rlvr.db?mode=ro", ".../rlvr.db?***"),
        ("./../home/someone/x", ".../x"),
        ("~/x", ".../x"),
        # what stays as it is
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("hf://datasets/owner/name@main/rows.jsonl", "hf://datasets/owner/name@main/rows.jsonl"),
        ("data/rows.jsonl", "data/rows.jsonl"),
        ("Wait... what? Mail a@b.", "Wait... what? Mail a@b."),
    ],
)
def test_addresses_and_paths_lose_what_is_private(value: str, shown: str):
    assert mask_settings({"a": [value]}) == {"a": [shown]}


SECRET_KEYS = "key api_key apiKey OPENAI_API_KEY api_key_2 x-api-key token hf_token HF-Token auth_tokens client_secret"
OTHER_SECRETS = "secret_name password db_password Authorization credentials"
PLAIN_KEYS = "max_tokens micro_tokens stop_tokens tokenizer key_points token_level num_key_value_heads monkey keyword"
METRIC_KEYS = "pass@1 compass bypass tokens_per_second rewards/key_points/mean secretary"


def test_a_value_is_hidden_by_whole_words_of_its_key():
    secret, plain = f"{SECRET_KEYS} {OTHER_SECRETS}".split(), f"{PLAIN_KEYS} {METRIC_KEYS}".split()
    assert mask_settings(dict.fromkeys(secret, "x")) == dict.fromkeys(secret, "***")
    assert mask_settings(dict.fromkeys(plain, "x")) == dict.fromkeys(plain, "x")
    assert mask_settings({"password": 1234, "keys": ["a"]}) == {"password": "***", "keys": "***"}


def test_the_name_of_a_variable_is_shown_and_its_default_is_not():
    given = {"api_key": "${oc.env:MY_KEY}", "token": "${oc.env:MY_TOKEN,hunter2}", "secret": None}
    assert mask_settings(given) == {"api_key": "${oc.env:MY_KEY}", "token": "***", "secret": None}


def test_tensorboard_has_every_step_under_its_phase(place: Place):
    with place.trackers(TENSORBOARD).running([]) as trackers:
        trackers.log("sft", 7, {"loss": 2.0})
        trackers.log("rl", 0, {"reward": math.nan, "reward/min": -1})
        trackers.log("rl", 1, {"reward": 0.5})
        trackers.finish({"final": {"pass@1": {"value": 0.25}}, "p_value": 0.01})
    assert tensorboard_scalars(place, "sft", "sft/loss") == [(7, 2.0)]
    (_, second) = tensorboard_scalars(place, "rl", "rl/reward")
    assert second == (1, 0.5)
    assert tensorboard_scalars(place, "rl", "rl/reward/min") == [(0, -1.0)]
    assert tensorboard_scalars(place, "summary", "summary/final/pass@1") == [(0, 0.25)]


def test_a_step_is_readable_in_tensorboard_before_the_run_ends(place: Place):
    with place.trackers(TENSORBOARD).running([]) as trackers:
        trackers.log("rl", 0, {"reward": 0.5})
        assert tensorboard_scalars(place, "rl", "rl/reward") == [(0, 0.5)]


def test_mlflow_is_asked_every_few_seconds_and_gets_all(place: Place):
    with place.trackers(MLFLOW).running([]) as trackers:
        for step in range(12):
            trackers.log("rl", step, row(step))
            place.clock.now += 1
        assert [s for s, _ in mlflow_steps(place, "rl/reward")] == list(range(11)), "sent at 5 and 10 seconds"
    assert [s for s, _ in mlflow_steps(place, "rl/reward")] == list(range(12))


# --- kills and resumes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [MLFLOW, TENSORBOARD], ids=["mlflow", "tensorboard"])
def test_redone_steps_show_once(place: Place, options: TrackingOptions):
    """Killed after step 4, the checkpoint stood at 2: the second attempt redoes 3 and 4."""
    place.attempt(options, range(5))
    place.attempt(options, range(3, 7), logged_rows(0, 1, 2))
    want = [(step, pytest.approx(step / 10)) for step in range(7)]
    if options is MLFLOW:
        assert len(mlflow_runs(place)) == 1
        assert mlflow_steps(place, "rl/reward") == want
    else:
        assert tensorboard_scalars(place, "rl", "rl/reward") == want


def test_a_resumed_phase_takes_back_no_steps_of_another(place: Place):
    with place.trackers(TENSORBOARD).running([]) as trackers:
        for step in range(9):
            trackers.log("sft", step, {"loss": float(step)})
        trackers.log("rl", 0, row(0))
    place.attempt(TENSORBOARD, [0, 1], [])
    assert len(tensorboard_scalars(place, "sft", "sft/loss")) == 9
    assert [s for s, _ in tensorboard_scalars(place, "rl", "rl/reward")] == [0, 1]


def test_kept_rows_that_mlflow_never_got_are_sent_on_resume(place: Place):
    """A kill -9 loses what waited to be sent, and a user may have deleted the MLflow run."""
    place.attempt(MLFLOW, [0, 1])
    place.attempt(MLFLOW, [4], logged_rows(0, 1, 2, 3))
    assert [s for s, _ in mlflow_steps(place, "rl/reward")] == [0, 1, 2, 3, 4]
    mlflow_client(place).delete_run(mlflow_runs(place)[0].info.run_id)
    place.attempt(MLFLOW, [5], logged_rows(0, 1, 2, 3, 4))
    assert [s for s, _ in mlflow_steps(place, "rl/reward")] == [0, 1, 2, 3, 4, 5]
    assert place.warnings == []


def test_another_config_in_the_same_folder_is_another_mlflow_run(place: Place):
    place.attempt(MLFLOW, [0])
    with place.trackers(MLFLOW, {**CONFIG, "seed": 4}).running([]):
        pass
    assert sorted(run.data.params["seed"] for run in mlflow_runs(place)) == ["3", "4"]


@pytest.mark.parametrize(
    ("stop", "status"), [(KeyboardInterrupt, "KILLED"), (RuntimeError, "FAILED"), (LookupError, "KILLED")]
)
def test_mlflow_records_how_the_attempt_ended(place: Place, stop: type[BaseException], status: str):
    trackers = place.trackers(MLFLOW)
    with pytest.raises(stop), trackers.running([], stopped_by=(KeyboardInterrupt, LookupError)):
        assert mlflow_runs(place)[0].info.status == "RUNNING"
        raise stop
    assert mlflow_runs(place)[0].info.status == status
    with place.trackers(MLFLOW).running([]):
        assert mlflow_runs(place)[0].info.status == "RUNNING"
    assert [run.info.status for run in mlflow_runs(place)] == ["FINISHED"]


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_tracker_that_fails_is_warned_of_once_and_gets_its_rows_later(place: Place):
    """Something stands where the folder should be; when it is gone, no step is missing."""
    blocker = place.folder / "tensorboard"
    blocker.write_text("in the way")
    with place.trackers(TENSORBOARD).running([]) as trackers:
        for step in range(5):
            trackers.log("rl", step, row(step))
        assert len(place.warnings) == 1
        assert "TensorBoard failed" in place.warnings[0] and "training goes on" in place.warnings[0]
        blocker.unlink()
        trackers.log("rl", 5, row(5))
        assert not blocker.exists(), "asked again only after a while"
        place.clock.now += 31
        trackers.log("rl", 6, row(6))
    assert [s for s, _ in tensorboard_scalars(place, "rl", "rl/reward")] == list(range(7))
    assert len(place.warnings) == 1


def test_a_tracker_that_fails_for_hours_is_asked_every_ten_minutes(place: Place):
    """The pauses double up to ten minutes, so that a server that is back after a night gets its rows soon."""
    blocker = place.folder / "tensorboard"
    blocker.write_text("in the way")
    with place.trackers(TENSORBOARD).running([]) as trackers:
        for step in range(20):
            trackers.log("rl", step, row(step))
            place.clock.now += 601
        blocker.unlink()
        trackers.log("rl", 20, row(20))
        assert [s for s, _ in tensorboard_scalars(place, "rl", "rl/reward")] == list(range(21)), "while it runs"


def test_an_unreachable_server_gives_a_warning_and_lost_records_are_counted(place: Place):
    options = TrackingOptions(mlflow=True, mlflow_uri="http://127.0.0.1:9")
    place.attempt(options, range(3))
    first, last = place.warnings
    assert "MLflow failed" in first and len(first) < 500
    assert last == "MLflow did not get the last 3 steps; metrics.jsonl has them"


def test_a_full_disk_leaves_a_file_that_tensorboard_reads_to_its_last_whole_step(place: Place):
    script = f"""
import resource, signal
from pathlib import Path
from rlvr.tracking.trackers import Trackers, TrackingOptions
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
with Trackers(TrackingOptions(tensorboard=True), Path({str(place.folder)!r}), "mine", {{}}, print).running([]) as t:
    for step in range(100):
        t.log("rl", step, {{"reward": step, "time/step": 1}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TensorBoard failed") == 1 and done.stderr == ""
    steps = [s for s, _ in tensorboard_scalars(place, "rl", "rl/reward")]
    assert steps == list(range(len(steps))) and 5 < len(steps) < 100


@pytest.mark.parametrize(("library", "extra"), [("mlflow", "mlflow"), ("tensorboard", "tensorboard")])
def test_a_missing_library_is_a_mistake_that_names_the_extra(place: Place, library: str, extra: str):
    script = f"""
import sys
sys.modules[{library!r}] = None  # Python then raises ImportError
from pathlib import Path
from rlvr.tracking.trackers import Trackers, TrackingOptions
try:
    Trackers(TrackingOptions({library}=True), Path("."), "mine", {{}}, print)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert f"tracking.{library}=true" in done.stdout and f"pip install 'rlvr[{extra}]'" in done.stdout, done.stderr


def test_an_mlflow_address_of_no_known_kind_is_a_mistake(place: Place):
    with pytest.raises(ValueError, match=r"tracking\.mlflow_uri.*gopher"):
        place.trackers(TrackingOptions(mlflow=True, mlflow_uri="gopher://x"))


@pytest.mark.slow
def test_nothing_is_printed_and_no_heavy_library_comes_along(place: Place):
    script = f"""
import sys
from pathlib import Path
from rlvr.tracking.trackers import Trackers, TrackingOptions
options = TrackingOptions(mlflow=True, tensorboard=True)
with Trackers(options, Path({str(place.folder)!r}), "mine", {{"seed": 1}}, print).running([]) as trackers:
    trackers.log("rl", 0, {{"reward": 1.0, "time/step": 1.0}})
    trackers.finish({{"p_value": 0.5}})
assert not {{"torch", "tensorflow"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", script], capture_output=True, text=True, cwd=place.folder,
        env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert mlflow_runs(place)[0].data.metrics["rl/reward"] == 1.0
    assert {p.name for p in place.folder.iterdir()} == {"tensorboard", "mlflow.json"}


def test_without_trackers_nothing_is_made(place: Place):
    place.attempt(TrackingOptions(), range(3))
    assert list(place.folder.iterdir()) == [] and [p.name for p in place.folder.parent.iterdir()] == ["mine"]


def test_the_memory_of_the_mlflow_run_holds_no_setting(place: Place):
    place.attempt(MLFLOW, [0])
    memory = json.loads((place.folder / "mlflow.json").read_text())
    assert memory["run_id"] == mlflow_runs(place)[0].info.run_id and "MY_MODEL" not in str(memory)


def test_metric_names_that_mlflow_refuses_are_translated():
    assert metric_name("rl", "env/all/correct") == "rl/env.all.correct"
    assert metric_name("summary", "final/pass@8") == "summary/final.pass_at_8"
    assert len(metric_name("rl", "x" * 999)) == 250


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
