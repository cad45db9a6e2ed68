"""The first hour on a GPU, tried on the processor: each measurement runs, and rows are kept, limited and explained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_first_hour import main
from benchmarks.gpu_measurements import EDGES, MEASUREMENTS, HourSettings
from tests.kit.forked_process import run_forked
from tests.kit.paths import ROOT
from tests.kit.vllm_server import FakeVllm, serve_vllm

QUICK = "checkpoint"
FIGURES = {  # one that each row has
    "resume": lambda facts: facts["bfloat16"]["equal"] and facts["float32"]["largest difference"] == 0,
    "tests": lambda facts: facts["passed"] == 2,
    "probe": lambda facts: all(one["tree"] and one["cache"] and not one["notes"] for one in facts.values()),
    "gap": lambda facts: facts["max"] < 0.1 and sum(facts["histogram"].values()) == facts["tokens"] == 4 * 4 * 16,
    "decode": lambda facts: facts["4 rows"]["ms"] > 0 and facts["profile"]["operations a step"] > 100,
    "vllm": lambda facts: facts["4 rows"]["tokens/s"] > 0 and facts["4 rows, no seeds"]["tokens/s"] > 0,
    "training": lambda facts: len(facts) == 2 + 8 and facts["plain, logits 2^29, micro 256"]["tokens/s"] > 0,
    "memory": lambda facts: facts["second training"] >= facts["model"] and facts["plan"]["total"] > 0,
    "checkpoint": lambda facts: facts["bytes"] > 1e6 and facts["load_s"] > 0,
    "colocated": lambda facts: all(facts[name]["publish_s"] > 0 for name in ("adapter", "all weights")),
}


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The words of a dry run, whose vLLM server is a stand-in."""
    from rlvr.engine.engine import Engine
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    out = tmp_path_factory.mktemp("hour")
    folder = HourSettings(str(out), is_dry=True).main_model()

    def make_engine() -> Engine:
        return Engine(load_model(folder, load_tokenizer(folder), device="cpu", dtype="bfloat16"))

    with serve_vllm(FakeVllm(make_engine)) as url:
        yield ["--out", str(out), "--dry-run", "--vllm-url", url, "--limit", "3"]


def read(out: str, name: str) -> dict[str, Any]:
    return json.loads((Path(out) / f"{name}.json").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != QUICK)) for name in MEASUREMENTS]
)
@pytest.mark.timeout(600)
def test_a_measurement_runs_on_the_processor(name: str, hour: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """And its row is in its file; the command keeps and prints it."""
    done = run_forked(["-m", "benchmarks.gpu_first_hour", *hour, "--in-process", name], timeout=580, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    row = read(hour[1], name)
    assert row["state"] == "done" and FIGURES[name](row["facts"]), row
    assert main([*hour, "--only", name]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name:12} done") and printed.count("\n") == 1 and read(hour[1], name) == row


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_measures_in_a_process_of_its_own_and_prints_the_row(
    hour: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*hour, "--only", QUICK]
    assert main([*words, "--again", QUICK]) == 0, read(hour[1], QUICK)
    row, printed = read(hour[1], QUICK), capsys.readouterr().out
    assert row["state"] == "done" and FIGURES[QUICK](row["facts"]), row
    assert printed.startswith(f"{QUICK:12} done") and printed.count("\n") == 1
    assert main(words) == 0
    assert capsys.readouterr().out == printed and read(hour[1], QUICK) == row


def test_all_ten_end_within_the_hour() -> None:
    assert list(MEASUREMENTS) == list(FIGURES) and len(MEASUREMENTS) == 10
    assert 40 * 60 <= sum(one.limit_s for one in MEASUREMENTS.values()) <= 46 * 60
    assert list(EDGES) == sorted(EDGES)


def test_a_measurement_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """It is not kept: the next command tries again."""
    for _ in range(2):
        assert main(["--out", str(tmp_path), "--dry-run", "--only", "decode", "--limit", "0.00001"]) == 1
        late = read(str(tmp_path), "decode")
        assert late["state"] == "late" and "limit of 0 s" in late["why"] and late["seconds"] < 20


@pytest.mark.slow
def test_a_measurement_without_vllm_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLVR_VLLM", raising=False)
    words = ["--out", str(tmp_path), "--dry-run"]
    assert main([*words, "--only", "vllm"]) == 0
    assert read(str(tmp_path), "vllm")["state"] == "skipped"
    assert "--vllm-url" in capsys.readouterr().out


def test_without_a_gpu_only_a_dry_run_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert "--dry-run" in capsys.readouterr().err
