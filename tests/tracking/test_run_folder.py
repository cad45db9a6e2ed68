"""Which folder a run works in: what is written there, when it is taken up again, and when it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.config import LoadedConfig, dump, load, read
from rlvr.config.build_config import build_config, resolved_values
from rlvr.core.cpu_budget import available_cores
from rlvr.core.files import write_atomic
from rlvr.envs import resolve_environment
from rlvr.envs.prompt import PromptOptions
from rlvr.runs.assembly import assemble
from rlvr.runs.evaluate_weights import evaluate_saved
from rlvr.runs.run_folder import open_run, prompt_options
from rlvr.runs.run_plan import plan
from rlvr.tracking import RunConsole
from rlvr.training.journal import Journal, RunLockedError
from tests.kit.tiny_run import TINY


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def load_base(*words: str) -> LoadedConfig:
    return load(None, "tiny.yaml", words)


def open_folder(*words: str) -> tuple[Path, bool]:
    composed = load_base(*words)
    return open_run(composed, build_config(composed))


def refusal_of(*words: str) -> str:
    with pytest.raises(ValueError) as caught:
        open_folder(*words)
    return str(caught.value)


def test_values_from_the_environment_are_never_written_not_even_in_lists(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Neither into the run folder nor by `rlvr config`; what is written composes to the same config again."""
    monkeypatch.setenv("TOK", "s3cret-value")
    words = (
        "rollout.stop=['${oc.env:TOK}', plain]",
        "reward.type=composite",
        "reward.kwargs.rewards=[{name: keyword_contains, weight: 1.0, kwargs: {keywords: [a, '${oc.env:TOK}']}}]",
    )
    folder, _ = open_folder(*words)
    for file in folder.iterdir():
        assert "s3cret-value" not in file.read_text()
    again = load(None, str(folder / "resolved.yaml"))
    assert build_config(again) == build_config(load_base(*words))
    assert run(["config", "--config=tiny.yaml", *words]) == 0
    assert "s3cret-value" not in "".join(capsys.readouterr())
    assert "s3cret-value" not in dump(resolved_values(build_config(again), again))


def test_a_value_from_the_environment_that_changed_is_another_config(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is named and the value is not, wherever it stands; the same value resumes."""
    words = ("training.optimizer.learning_rate=${oc.env:LR}", "rollout.stop=['${oc.env:STOP}']")
    monkeypatch.setenv("LR", "1e-4")
    monkeypatch.setenv("STOP", "alpha")
    folder, _ = open_folder(*words)
    (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 0}\n')  # something was done
    assert open_folder(*words) == (folder, False)
    monkeypatch.setenv("LR", "0.512")
    said = refusal_of(*words)
    assert "training.optimizer.learning_rate (its value from the environment)" in said and "rollout.stop" not in said
    assert "0.512" not in said and "1e-4" not in said
    monkeypatch.setenv("LR", "1e-4")
    monkeypatch.setenv("STOP", "beta")
    assert "rollout.stop[0] (its value from the environment)" in refusal_of(*words)
    hashes = json.loads((folder / "environment.json").read_text())
    assert sorted(hashes["hashes"]) == ["rollout.stop[0]", "training.optimizer.learning_rate"] and hashes["salt"]


def test_a_folder_from_before_there_was_a_prompt_section_counts_as_prompt_chat_off(tiny: Path) -> None:
    """It is resumed by the config it began with, and refused to one that asks for a chat."""
    folder, _ = open_folder("prompt.chat=off")
    stored = read(folder / "resolved.yaml")
    assert stored["prompt"]["chat"] == "off"
    del stored["prompt"]
    stored["algorithm"]["name"] = "ppo"  # the default's name then
    (folder / "resolved.yaml").write_text(dump(stored))
    (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 0}\n')  # something was done
    assert open_folder() == open_folder("prompt.chat=off") == open_folder("prompt.chat=auto") == (folder, False)
    assert "prompt.chat" in refusal_of("prompt.chat=on")
    assert "prompt.system" in refusal_of("prompt.system=Be brief.")
    assert prompt_options(build_config(load_base()), folder) == PromptOptions("off")
    assert "prompt" not in read(folder / "resolved.yaml")


def test_a_folder_from_before_there_were_examples_is_resumed_without(tiny: Path) -> None:
    folder, _ = open_folder()
    stored = read(folder / "resolved.yaml")
    stored["prompt"] = {"chat": "auto", "system": None}
    stored["algorithm"]["name"] = "ppo"
    (folder / "resolved.yaml").write_text(dump(stored))
    (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 0}\n')
    assert open_folder() == (folder, False)
    assert prompt_options(build_config(load_base()), folder) == PromptOptions()
    for word in ("prompt.examples=1", "prompt.thinking=off", "prompt.template_arguments.a=1"):
        assert word.partition("=")[0] in refusal_of(word)


def test_a_run_whose_rows_changed_is_not_resumed(tiny: Path) -> None:
    """Before and after would be of other tasks under the same ids."""
    rows, held = Path("rows.jsonl"), Path("held.jsonl")
    rows.write_text("".join(f'{{"prompt": "{i}?", "answer": "{i}"}}\n' for i in range(9)))
    held.write_text('{"prompt": "a?", "answer": "1"}\n{"prompt": "b?", "answer": "2"}\n')
    kwargs = {"path": "rows.jsonl", "heldout_path": "held.jsonl"}
    Path("own.yaml").write_text(dump({**read(Path("tiny.yaml")), "env": {"name": "dataset", "kwargs": kwargs}}))
    composed = load(None, "own.yaml", ())

    def open_rows() -> tuple[Path, bool]:
        return open_run(composed, build_config(composed), resolve_environment("dataset", **kwargs))

    folder, _ = open_rows()
    (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 0}\n')  # something was done
    assert open_rows() == (folder, False)
    for file in (held, rows):
        before = file.read_text()
        file.write_text("".join(reversed(before.splitlines(keepends=True))))
        with pytest.raises(ValueError, match=r"differs in the rows of env\.name=dataset"):
            open_rows()
        file.write_text(before)
    assert open_rows() == (folder, False)


def test_an_algorithm_of_an_older_folder_is_compared_by_its_present_name(tiny: Path) -> None:
    """`grpo` was the first paper's form, and `ppo` the name of the default."""
    folder, _ = open_folder("algorithm.name=grpo_original")
    stored = read(folder / "resolved.yaml")
    stored["prompt"] = {"chat": "auto", "system": None}
    stored["algorithm"]["name"] = "grpo"
    (folder / "resolved.yaml").write_text(dump(stored))
    (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 0}\n')
    assert open_folder("algorithm.name=grpo_original") == (folder, False)
    assert "algorithm.name" in refusal_of()


def test_a_key_that_the_stored_config_lacks_counts_as_its_default(tiny: Path) -> None:
    """A run from before there was `sft.until_each` goes on; one that asks for another value is another run."""
    folder, _ = open_folder()
    stored = read(folder / "resolved.yaml")
    del stored["sft"]["until_each"], stored["training"]["optimizer"]["beta2"]
    (folder / "resolved.yaml").write_text(dump(stored))
    (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 0}\n')
    assert open_folder() == (folder, False)
    assert "sft.until_each" in refusal_of("sft.steps=3", "sft.until=0.5", "sft.until_each=0.2")
    assert "training.optimizer.beta2" in refusal_of("training.optimizer.beta2=0.5")


def test_a_prompt_section_is_compared_as_any_other(tiny: Path) -> None:
    folder, _ = open_folder()
    (folder / "metrics.jsonl").write_text('{"phase": "sft", "step": 0}\n')
    assert open_folder("prompt.chat=auto") == (folder, False)
    assert "prompt.chat" in refusal_of("prompt.chat=off")
    assert prompt_options(build_config(load_base()), folder) == PromptOptions()


@pytest.mark.parametrize("word", ["prompt.chat=on", "prompt.system=Be brief."])
def test_a_run_with_a_tokenizer_of_its_own_has_no_chat(tiny: Path, word: str, capfd: Any) -> None:
    assert run(["train", "--config=tiny.yaml", word]) == 2
    assert "needs a chat template, and the tokenizer has none" in " ".join(capfd.readouterr().err.split())


def test_only_a_runs_name_and_root_may_hold_the_time(tiny: Path) -> None:
    """A run named by the time is found again; a time elsewhere would make it go on with another value."""
    folder, _ = open_folder("run.name=${now:%Y-%m-%d_%H-%M-%S-%f}")
    assert open_folder("run.name=${now:%Y-%m-%d_%H-%M-%S-%f}") == (folder, False)
    for words in (["seed=${now:%f}"], ["run.name=${now:%f}", "env.kwargs.tag=${now:%f}"]):
        composed = load_base(*words)
        with pytest.raises(ValueError, match=r"(seed|env\.kwargs\.tag): .*run\.name and run\.root only"):
            open_run(composed, build_config(load_base()))


@pytest.mark.parametrize("left", [".resolved.yaml.0a1b2c3d.tmp", ".environment.json.0a1b2c3d.tmp", "environment.json"])
def test_a_kill_while_the_folder_is_made_does_not_spoil_it(tiny: Path, left: str) -> None:
    folder = tiny / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / left).write_text("seed")
    assert open_folder() == (Path("runs/tiny"), False)
    assert open_folder() == (Path("runs/tiny"), False)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_kill_while_a_run_that_had_done_nothing_begins_again_does_not_spoil_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Killed before its first step, begun again and killed just there, before or after its config is written."""
    folder, _ = open_folder()
    Journal(folder).close()

    def write_and_interrupt(path: Path, content: str) -> None:
        if place == "after":
            write_atomic(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rlvr.runs.run_folder.write_atomic", write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_folder()
    assert open_folder() == (folder, False)


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tiny: Path) -> None:
    folder = tiny / "runs" / "tiny"
    folder.mkdir(parents=True)
    for name in ("thesis.tex", ".resolved.yaml.0a1b2c3d.tmp", ".swap.tmp"):
        (folder / name).write_text("words")
    assert "other files than a run" in refusal_of()
    assert sorted(p.name for p in folder.iterdir()) == [".resolved.yaml.0a1b2c3d.tmp", ".swap.tmp", "thesis.tex"]


def test_starting_anew_leaves_a_folder_that_another_process_works_in(tiny: Path) -> None:
    folder, _ = open_folder()
    with Journal(folder), pytest.raises(RunLockedError, match="in use by another process"):
        open_folder("seed=4", "run.resume=false")
    assert [p.name for p in (tiny / "runs").iterdir()] == ["tiny"]
    assert open_folder("seed=4", "run.resume=false") == (folder, False)
    assert sorted(p.name for p in (tiny / "runs").iterdir()) == ["tiny", "tiny.old-1"]


def test_supervised_learning_of_no_steps_is_a_mistake(tiny: Path) -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        build_config(load_base("training.mode=sft", "sft.steps=0"))


def test_the_plan_says_when_training_ends_early(tiny: Path) -> None:
    words = ("training.until=0.985", "training.patience=4", "evaluation.every=1", "sft.until=0.07")
    config = build_config(load_base(*words))
    printed = plan(assemble(config))
    assert "or until 98.5% of held-out completions pass" in printed["training"]
    assert "or until 4 interim evaluations in a row are no new best" in printed["training"]
    assert "or until 7% of held-out completions pass" in printed["fine-tuning"]
    assert "until" not in plan(assemble(build_config(load_base())))["training"]


@pytest.mark.parametrize(
    "word",
    ["rollout.temperature=0", "env.kwargs.p=7", "model.name=x", "model={}", "sft.steps=3", "mode=sft", "seeds=1"],
)
def test_saved_weights_are_evaluated_as_their_run_was_set_up(tiny: Path, word: str) -> None:
    folder, _ = open_folder()
    with pytest.raises(ValueError, match="cannot be changed here"):
        evaluate_saved(folder, ["seed=1", word], RunConsole())
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        allowed = ["seed=1", "evaluation.samples=3", "engine.threads=1", "model.device=cpu", "model.dtype=float32"]
        evaluate_saved(folder, allowed, RunConsole())


@pytest.mark.slow
def test_another_seed_evaluates_the_same_adapter_on_the_same_base(tiny: Path, capsys: Any) -> None:
    """The run's seed made the base model; the one given draws the answers. Greedy ones are thus the same."""
    words = ["model.lora={rank: 8}", "sft.steps=150", "sft.batch_size=32", "sft.optimizer.learning_rate=0.02"]
    words += ["evaluation.temperature=0", "evaluation.tasks=60", "training.steps=1"]
    assert run(["train", "--config=tiny.yaml", *words]) == 0
    capsys.readouterr()
    printed = []
    for seed in (3, 4):
        assert run(["evaluate", "runs/tiny", f"seed={seed}"]) == 0
        printed.append({k: v["value"] for k, v in json.loads(capsys.readouterr().out).items() if k == "mean_reward"})
    assert printed[0] == printed[1] and printed[0]["mean_reward"] > 0, "an adapter that learned nothing tests nothing"
    events = [json.loads(line) for line in (tiny / "runs" / "tiny" / "journal.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "run" and events[0]["threads"] == 1 and events[0]["device"] == "cpu"
    assert events[0]["torch"]


def test_numbers_that_are_not_finite_end_a_run_with_a_message(tiny: Path, capfd: Any) -> None:
    """Also where they come from a part that the training loop does not watch."""
    (tiny / "broken_env.py").write_text(
        "from rlvr.core.messages import NonFiniteError\n\ndef make():\n    raise NonFiniteError('a logit', [3])\n"
    )
    text = TINY.replace("{name: rpn_arithmetic, kwargs: {complexity: [1, 1], flaw: 0.0}}", "{name: 'broken_env:make'}")
    (tiny / "broken.yaml").write_text(text)
    for words in (["--config=tiny.yaml", "sft.optimizer.learning_rate=1e36", "sft.steps=9"], ["--config=broken.yaml"]):
        assert run(["train", *words]) == 1
        said = capfd.readouterr().err
        assert said.startswith("rlvr: ") and "not finite" in said and "Traceback" not in said
        assert "learning rate" in said


def test_a_message_carries_no_terminal_codes(tiny: Path, capfd: Any) -> None:
    assert run(["train", "--config=\x1b]0;owned\x07\nx"]) == 2
    said = capfd.readouterr().err
    assert "\x1b" not in said and "\x07" not in said and "\\x1b]0;owned\\x07\nx" in said


@pytest.mark.parametrize("words", [["trian"], ["train", "--nope"]])
def test_an_unknown_command_or_option_is_one_message(words: list[str], capfd: Any) -> None:
    assert run(words) == 2
    said = capfd.readouterr().err
    assert said.startswith("rlvr: No such ") and "Traceback" not in said


def test_cores_are_counted_where_the_system_knows_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_cores() >= 1
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert available_cores() == (os.cpu_count() or 1)
