"""`training.epochs`: the steps that it comes to, what overrides it, and that a resumed run compares the same config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.config import load, read
from rlvr.config.build_config import build_config
from rlvr.runs.assembly import assemble
from rlvr.runs.run_tasks import count_tasks, resolve_epochs
from tests.kit.composing import compose_base, refusal_of

CONFIG = """
client: mock
env: {name: toy}
rollout: {max_tokens: 4}
reward: {kwargs: {keywords: [answer]}}
training: {epochs: 1.5, prompts_per_step: 8, group_size: 2}
evaluation: {tasks: 4, samples: 2}
"""

HUNDRED = f"env.kwargs.prompts=[{','.join(f'q{i}' for i in range(100))}]"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with toy.yaml: 24 tasks in epochs of three steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    return tmp_path


def steps_of(*words: str) -> int:
    loaded = load(None, "toy.yaml", words)
    config = build_config(loaded)
    resolved, config = resolve_epochs(loaded, config, assemble(config).source)
    assert config.training.epochs is None and "epochs" not in resolved.raw["training"]
    return config.training.steps


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ((), 5),  # 1.5 x 24 / 8 = 4.5, rounded up
        (("training.epochs=1",), 3),
        (("training.epochs=0.01",), 1),
        (("num_train_epochs=2", "training.prompts_per_step=7"), 7),  # 48 / 7
        (("trainer.total_epochs=4",), 12),
        (("training.steps=9",), 9),  # what is typed counts, the file's epochs do not
        (("max_steps=9",), 9),
        (("max_steps=-1",), 5),
        (("env.kwargs.prompts=[one,two]",), 1),
        ((HUNDRED, "training.epochs=1.1", "training.prompts_per_step=10"), 11),  # as floats a little over 11
        ((HUNDRED, "training.epochs=1.11", "training.prompts_per_step=10"), 12),
    ],
)
def test_steps_follow_from_the_tasks_and_the_prompts_of_a_step(words: tuple[str, ...], steps: int) -> None:
    assert steps_of(*words) == steps


def test_epochs_that_are_typed_override_the_steps_of_a_file() -> None:
    config = build_config(compose_base("training: {steps: 7}\n", "training.epochs=2"), warn=pytest.fail)
    assert config.training.epochs == 2


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("", ["training.steps=5", "training.epochs=2"], ["training.steps=5", "training.epochs=2"]),
        ("", ["max_steps=5", "num_train_epochs=2"], ["max_steps=5", "num_train_epochs=2"]),
        ("training: {steps: 5, epochs: 2}\n", [], ["training.steps=5 (from mine.yaml)", "training.epochs=2"]),
    ],
)
def test_steps_and_epochs_from_one_place_are_an_error_that_names_both(
    text: str, words: list[str], said: list[str]
) -> None:
    message = refusal_of(text, *words)
    assert all(part in message for part in [*said, "leave one of them out"]), message


@pytest.mark.parametrize("epochs", ["0", "-1", ".inf", ".nan"])
def test_epochs_have_to_be_above_0(epochs: str) -> None:
    assert "expected a number above 0" in refusal_of("", f"training.epochs={epochs}")


def test_an_environment_without_a_fixed_number_of_tasks_asks_for_steps() -> None:
    config = build_config(loaded := compose_base("", "training.epochs=2"))
    source = assemble(config).source
    assert count_tasks(source) is None
    with pytest.raises(ValueError, match=r"training.epochs=2: .*give training.steps"):
        resolve_epochs(loaded, config, source)


def test_a_run_by_epochs_stores_its_steps_and_is_resumed_by_the_same_command(here: Path, capsys: Any) -> None:
    """Other data under the same command are another config."""
    words = ["train", "--config=toy.yaml", "training.epochs=1"]
    assert run(words) == 0
    assert "1 over 24 training tasks" in capsys.readouterr().out
    stored = read(here / "runs" / "toy" / "resolved.yaml")["training"]
    assert (stored["steps"], stored["epochs"]) == (3, None)
    assert len((here / "runs" / "toy" / "metrics.jsonl").read_text().splitlines()) == 3
    assert run(words) == 0 and "is finished" in capsys.readouterr().out
    assert run(["evaluate", str(here / "runs" / "toy")]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 4
    assert run([*words, "env.kwargs.prompts=[one,two,three,four,five,six,seven,eight,nine]"]) == 2
    assert "training.steps" in capsys.readouterr().err


def test_the_plan_of_a_config_shows_the_steps_that_its_epochs_come_to(capsys: Any) -> None:
    assert run(["config", "--config=toy.yaml"]) == 0
    said = capsys.readouterr().out
    assert "steps: 5" in said and "5 steps x 8 prompts" in said and "1.67 over 24 training tasks" in said
