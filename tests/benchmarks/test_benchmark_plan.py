"""The words of `rlvr evaluate MODEL ...`: benchmarks, their data, settings, and what is wrong with them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.benchmarks.benchmark_plan import find_text_forms, has_benchmarks, known_benchmarks, read_benchmarks
from rlvr.benchmarks.benchmark_runner import write_table
from rlvr.config import LoadedConfig
from rlvr.config.build_config import build_config

NAMES = ["gsm8k", "gsm8k_8shot", "humaneval", "humaneval_chat", "math500", "mbpp", "mbpp_chat"]


def set_model(loaded: LoadedConfig) -> LoadedConfig:
    return replace(loaded, values={**loaded.values, "model": {"name": "any"}})


def read(*words: str) -> Any:
    return read_benchmarks(words, set_model)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "math500.jsonl").touch()
    return tmp_path


def test_the_package_has_these_benchmarks(data: Path) -> None:
    assert known_benchmarks() == NAMES
    assert [benchmark.name for benchmark in read(*NAMES)] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_is_greedy_with_a_strict_and_a_lenient_reward(name: str, data: Path) -> None:
    [benchmark] = read(name)
    config = build_config(benchmark.loaded, warn=pytest.fail)
    assert (config.evaluation.samples, config.evaluation.temperature) == (1, 0)
    strict, [lenient] = config.reward.type, config.reward.watch
    assert (strict, lenient) in (
        ("gsm8k_strict", "gsm8k_flexible"),
        ("math", "math_flexible"),
        ("code_strict", "code"),
    )
    assert config.prompt.chat == ("on" if name in ("gsm8k", "math500", "humaneval_chat", "mbpp_chat") else "off")
    rows = {"gsm8k": 1319, "gsm8k_8shot": 1319, "math500": 500, "humaneval": 164, "humaneval_chat": 164}
    assert config.evaluation.tasks == rows.get(name, 500)


def test_data_and_settings_go_where_they_belong(data: Path) -> None:
    gsm8k, math = read(
        "gsm8k=gsm8k",
        "math500=math500.jsonl",
        "evaluation.tasks=5",
        "math500.rollout.max_tokens=7",
        "rollout.max_tokens=9",
        "seed=3",
    )
    assert (gsm8k.config.env.kwargs["path"], math.config.env.kwargs["path"]) == ("gsm8k", "math500.jsonl")
    assert (gsm8k.config.rollout.max_tokens, math.config.rollout.max_tokens) == (9, 7)
    assert {(b.config.evaluation.tasks, b.config.seed) for b in (gsm8k, math)} == {(5, 3)}


def test_the_text_forms_of_a_chat_benchmark() -> None:
    assert [find_text_forms(read(name)[0]) for name in ("gsm8k", "humaneval_chat", "mbpp_chat", "math500")] == [
        ["gsm8k_8shot"],
        ["humaneval"],
        ["mbpp"],
        [],
    ]


def test_settings_alone_are_no_benchmarks() -> None:
    assert not has_benchmarks([])
    assert not has_benchmarks(["evaluation.samples=16", "seed=7", "lora_r=4", "env.name=gsm8k", "model.device=cpu"])
    assert has_benchmarks(["seed=7", "gsm8k"]) and has_benchmarks(["gsm8k=./x"]) and has_benchmarks(["gsmk8=./x"])


def test_a_users_own_config_is_a_benchmark_by_its_name(data: Path) -> None:
    (data / "configs" / "benchmarks").mkdir(parents=True)
    (data / "configs" / "benchmarks" / "sums.yaml").write_text("env: {name: rpn_arithmetic}\n")
    (data / "mine.yaml").write_text("defaults: [benchmarks/gsm8k, _self_]\nevaluation: {tasks: 9}\n")
    sums, mine = read("sums", "mine.yaml", "mine.seed=1")
    assert (sums.config.env.name, sums.config.seed) == ("rpn_arithmetic", 42)
    assert (mine.name, mine.config.env.name, mine.config.evaluation.tasks, mine.config.seed) == ("mine", "gsm8k", 9, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsm8kk"], "unknown benchmark 'gsm8kk' (did you mean 'gsm8k'?)"),
        (["gsmk8=gsm8k"], "unknown benchmark 'gsmk8' (did you mean 'gsm8k'?)"),
        (["gsm8k=gsm8"], "there is no such file or folder (did you mean 'gsm8k'?)"),
        (["nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["gsm8k", "gsm8k=gsm8k"], "gsm8k is named twice"),
        (["gsm8k", "mbpp.seed=1"], "mbpp is not among the benchmarks to run"),
        (["gsm8k", "gsm8k.model.device=cpu"], "one engine runs all benchmarks"),
        (["gsm8k", "gsm8k.engine.threads=1"], "one engine runs all benchmarks"),
        (["gsm8k", "evaluation={samples: 2, k: 4, temperature: 1}"], "evaluation.k=4, expected 1 to samples=2"),
        (["gsm8k", "evaluation.samples=4"], "evaluation.samples=4 at evaluation.temperature=0"),
        (["gsm8k", "evaluation.task=4"], "evaluation.task"),
        (["gsm8k", "gsm8k.evaluation.task=4"], "benchmark gsm8k: "),
    ],
)  # fmt: skip
def test_a_mistake_is_said_with_its_remedy(data: Path, words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read(*words)


def test_the_table_shows_what_was_measured() -> None:
    rate = {"value": 0.5, "low": 0.25, "high": 0.75}
    none = {"value": float("nan"), "low": float("nan"), "high": float("nan")}
    result: dict[str, Any] = {
        **{"prompt": "chat, 0-shot", "tasks": 1319, "samples": 4, "k": 4, "lenient": "loose"},
        **{"rates": {"pass@1": rate, "watched/loose": rate, "pass@4": none}, "unjudged": 2, "truncated": 1319},
    }
    fewer = {"k": 1, "samples": 1, "lenient": None, "rates": {"pass@1": {**rate, "n": 1317}}}
    head, _, first, second = write_table({"one": result, "two": {**result, **fewer}}).splitlines()
    assert [cell.strip() for cell in head.split("|")[5:8]] == ["pass@1 strict", "pass@1 lenient", "pass@k strict"]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (first, second)]
    assert cells[0] == [
        *("one", "chat, 0-shot", "1,319", "4", "50.0% [25.0, 75.0]", "50.0% [25.0, 75.0]", "- (k=4)", "2", "25.0%")
    ]
    assert cells[1][2] == "1,317 of 1,319"
    assert cells[1][3:] == ["1", "50.0% [25.0, 75.0]", "-", "-", "2", "100.0%"]
