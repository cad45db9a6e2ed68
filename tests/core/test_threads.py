"""Who has the cores: how they are split, that what is asked for is given, and that torch's threads wait quietly."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlvr
import rlvr.core.cpu_budget
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.schema import RunConfig
from rlvr.core.cpu_budget import CoreShares, available_cores, cpu_quota, set_default_workers, split_cores
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from rlvr.sandbox import Sandbox
from tests.kit.tiny_run import TINY


@pytest.fixture
def given_back() -> Iterator[None]:
    """What a sandbox has by default is the process's: later tests get it as it was."""
    yield
    set_default_workers(0)


@pytest.mark.parametrize(
    ("asked", "threads", "workers"),
    [
        ({"cores": 1}, 1, 1),
        ({"cores": 2}, 1, 1),
        ({"cores": 5}, 3, 2),
        ({"cores": 64}, 32, 32),
        ({"cores": 8, "threads": 6}, 6, 2),
        ({"cores": 8, "threads": 8}, 8, 1),
        ({"cores": 8, "workers": 3}, 5, 3),
        ({"cores": 8, "workers": 12}, 1, 12),
        ({"cores": 8, "threads": 8, "workers": 8}, 8, 8),
        ({"cores": 16, "device": True}, 1, 15),
        ({"cores": 16, "device": True, "workers": 4}, 1, 4),
        ({"cores": 16, "device": True, "threads": 4}, 4, 12),
        ({"cores": 1, "device": True}, 1, 1),
    ],
)
def test_torch_and_the_workers_have_separate_cores(asked: dict[str, Any], threads: int, workers: int) -> None:
    assert split_cores(**asked, concurrent=True) == CoreShares(asked["cores"], threads, workers, concurrent=True)


def test_without_concurrent_verification_each_part_has_all_cores() -> None:
    assert split_cores(8, concurrent=False) == CoreShares(8, 8, 8)
    assert split_cores(8, 2, concurrent=False) == CoreShares(8, 2, 8)


def test_only_settings_above_the_number_of_cores_are_warned_of() -> None:
    """With all cores for torch one worker has to share: that is not worth a word, more workers are."""
    for fine in (
        split_cores(1, concurrent=True),
        split_cores(2, concurrent=True),
        split_cores(8, 8, concurrent=True),
        split_cores(8, 6, 3, concurrent=True),
    ):
        assert fine.warning == ""
    crowd = split_cores(8, 8, 4, concurrent=True).warning
    assert "engine.threads=8" in crowd and "4 sandbox workers (reward.kwargs.sandbox.workers)" in crowd
    assert "8 cores" in crowd
    alone = split_cores(8, 9, concurrent=False).warning
    assert "engine.threads=9" in alone and "sandbox" not in alone and split_cores(8, 8, concurrent=False).warning == ""


def config(*words: str, name: str = "mini_mbpp") -> RunConfig:
    return build_config(load(name, None, [*words, "model.device=cpu"]), lambda text: None)


def test_a_run_splits_the_cores_by_its_reward_and_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit `engine.threads` and sandbox workers are kept; without processes torch has all cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def split_of(*words: str, name: str = "mini_mbpp") -> tuple[int, int]:
        asked = config("engine.threads=0", *words, name=name)
        found = assemble(asked).divide_cores(8)
        return found.threads, found.workers

    assert split_of() == (4, 4)
    assert split_of("engine.threads=6") == (6, 2)
    assert split_of("reward.kwargs={sandbox: {workers: 3}}") == (5, 3)
    parts = "reward={type: composite, kwargs: {rewards: [{name: code, kwargs: {sandbox: {workers: 2}}}]}}"
    assert split_of(parts) == (6, 2)
    assert split_of(name="arithmetic") == (8, 8)
    assert split_of("reward.watch=[code]", name="arithmetic") == (4, 4)
    asked = config("engine.threads=2")
    left = max(1, available_cores() - 2)
    workers = f"{left} sandbox worker{'s' if left > 1 else ''} beside it"
    assert plan(assemble(asked))["cores"] == f"2 of {available_cores()} for torch, {workers}"
    plain = config(name="arithmetic")
    assert "cores" not in plan(assemble(plain))


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), ("2,1", 2), ("", 8), ("many", 8), ("0", 8)])
def test_a_run_without_a_setting_has_the_threads_of_the_environment(
    variable: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    shares = assemble(config("engine.threads=0", name="arithmetic")).divide_cores(8)
    assert (shares.threads, shares.workers) == (threads, 8)
    assert assemble(config("engine.threads=5", name="arithmetic")).divide_cores(8).threads == 5
    beside = assemble(config("engine.threads=0")).divide_cores(8)
    assert (beside.threads, beside.workers) == ((threads, 8 - threads) if threads < 8 else (4, 4))


def test_the_plan_and_a_warning_say_that_the_environment_gave_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("arithmetic", "mini_mbpp"):
        lines = plan(assemble(config("engine.threads=0", name=name)))
        assert lines["cores"].startswith(f"1 of {available_cores()} for torch (OMP_NUM_THREADS)")
        assert "OMP_NUM_THREADS" not in plan(assemble(config("engine.threads=1", name=name))).get("cores", "")
    assert "cores" not in plan(assemble(build_config(load("train_rlvr_test"))))  # client=mock computes without torch
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    crowded = assemble(config("engine.threads=0", name="arithmetic")).divide_cores(8)
    assert crowded.warning.startswith("OMP_NUM_THREADS=9")


@pytest.mark.slow
def test_a_run_computes_with_the_threads_of_the_environment(tmp_path: Path) -> None:
    """The journal of a run keeps what it computes with."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    program = "import sys; from rlvr.cli.main import run; sys.exit(run(sys.argv[1:]))"
    words = ["train", "--config=tiny.yaml", "engine.threads=0", "training.steps=1", "sft.steps=0", "run.name=own"]
    place = {**os.environ, "OMP_NUM_THREADS": "3", "PYTHONPATH": str(Path(rlvr.__file__).parents[1])}
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"threads": 3' in (tmp_path / "runs" / "own" / "journal.jsonl").read_text()
    assert "(OMP_NUM_THREADS)" in done.stdout + done.stderr


def test_a_sandbox_without_a_setting_uses_the_remaining_cores(given_back: None) -> None:
    asked = config(f"engine.threads={max(1, available_cores() - 1)}")
    assemble(asked).start_rewards()
    with Sandbox() as left, Sandbox(workers=3) as told:
        assert (left.workers, told.workers) == (1, 3)
    set_default_workers(0)
    with Sandbox() as alone:
        assert alone.workers == available_cores()


def test_a_containers_quota_of_time_counts_as_its_cores(tmp_path: Path) -> None:
    """64 threads on a quota of two cores would be stopped most of the time."""
    for folder, file, text, expected in (
        ("", "", "", math.inf),
        ("cpu", "cpu.cfs_quota_us", "-1\n", math.inf),
        ("cpu", "cpu.cfs_quota_us", "400000\n", 4.0),
        ("", "cpu.max", "max 100000\n", math.inf),
        ("", "cpu.max", "50000 100000\n", 0.5),
    ):
        (tmp_path / "cpu").mkdir(exist_ok=True)
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        if file:
            (tmp_path / folder / file).write_text(text)
        assert cpu_quota(tmp_path) == expected
    assert available_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) == (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )


# --- threads that wait -------------------------------------------------------------------------------------------

SEEN = """
import os, sys
{first}
import rlvr.core.cpu_budget
print(os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules, bool(rlvr.core.cpu_budget.spinning_warning()))
"""
COMMAND = """
import sys
import rlvr.cli.main
rlvr.cli.main.run(["--version"])
"""


def policy(first: str, **environment: str) -> list[str]:
    """[the policy in the environment, whether torch is loaded, whether there is something to tell] after `first`."""
    plain = {
        k: v for k, v in os.environ.items() if k not in (rlvr.core.cpu_budget.POLICY, *rlvr.core.cpu_budget.OTHERS)
    }
    done = subprocess.run(
        [sys.executable, "-c", SEEN.format(first=first)], env={**plain, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.slow
def test_the_thread_wait_policy_is_set_before_torch_is_loaded() -> None:
    """By the command line, and by the engine, which is the first of ours to load torch; not by `import rlvr`."""
    assert policy("import rlvr") == ["None", "False", "False"]
    assert policy(COMMAND) == ["PASSIVE", "False", "False"]
    assert policy("import rlvr.engine") == ["PASSIVE", "False", "False"]
    assert policy("from rlvr.clients import local") == ["PASSIVE", "True", "False"]


def test_threads_spin_a_little_before_they_sleep() -> None:
    """Enough for the next operation to come, which GNU's runtime reads by itself."""
    said = COMMAND + "import os\nprint(os.environ['GOMP_SPINCOUNT'])\n"
    plain = {
        k: v for k, v in os.environ.items() if k not in (rlvr.core.cpu_budget.POLICY, *rlvr.core.cpu_budget.OTHERS)
    }
    done = subprocess.run([sys.executable, "-c", said], env=plain, capture_output=True, text=True)
    assert done.stdout.split()[-1] == rlvr.core.cpu_budget.SPINS


def test_a_peer_has_torch_as_programs_without_us_have_it() -> None:
    """Whatever of ours is imported later; what the user said stays. 300,000 is what GNU's runtime does unasked."""
    ours = "import rlvr.engine\nimport os\nspins = os.environ.get('GOMP_SPINCOUNT')"
    first = f"from rlvr.core.cpu_budget import *\nlimit_spinning()\nrestore_spinning()\n{ours}\n"
    assert policy(first + "assert spins == '300000'") == ["None", "False", "False"]
    assert policy(first + "assert spins is None", OMP_WAIT_POLICY="PASSIVE") == ["PASSIVE", "False", "False"]


def test_the_users_own_wait_policy_is_kept() -> None:
    assert policy(COMMAND, OMP_WAIT_POLICY="ACTIVE") == ["ACTIVE", "False", "False"]
    for name in rlvr.core.cpu_budget.OTHERS:
        assert policy(COMMAND, **{name: "1000"}) == ["None", "False", "False"]


@pytest.mark.slow
def test_a_program_that_loads_torch_first_is_warned() -> None:
    """Then it is too late: the library has read its environment."""
    assert policy("import torch, rlvr.engine") == ["PASSIVE", "True", "True"]
    assert policy("import torch, rlvr.engine", OMP_WAIT_POLICY="PASSIVE") == ["PASSIVE", "True", "False"]
