"""Benchmarks of a model: counts by hand, what is stored, and what a kill leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.benchmarks.benchmark_plan import read_benchmarks
from rlvr.benchmarks.benchmark_runner import default_folder, run_benchmark
from rlvr.cli.main import run
from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.weights_place import WeightsPlace
from rlvr.runs.assembly import assemble
from rlvr.runs.evaluate_weights import show_prompts
from rlvr.runs.weights import with_model
from rlvr.tracking import RunConsole
from tests.kit.chat_rows import qwen_folder, write_rows
from tests.kit.code_rows import chat_tokenizer, mbpp_file, model_folder

DATA = Path(__file__).parents[3] / "shared" / "data"
SMALL = ["rollout.max_tokens=8", "engine.threads=1", "model.device=cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("qwen") / "my-model")


@pytest.fixture
def home(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(model)
    write_rows(tmp_path / "gsm8k")
    mbpp_file(tmp_path)
    return tmp_path


class _KillingConsole(RunConsole):
    """Ends the process' work, as Ctrl-C does, when so many tasks are stored."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def step(self, metrics: Any, done: int) -> None:
        if done >= self._at:
            raise KeyboardInterrupt


def run_script(out: Path, words: Sequence[str], completions: Any, console: RunConsole | None = None) -> Any:
    """Run one benchmark with the model's words given: `completions(task, sample)`; the sampler."""
    [benchmark] = read_benchmarks(words, lambda loaded: with_model(loaded, WeightsPlace.of("./my-model")))
    assembly, samples = assemble(benchmark.config), benchmark.config.evaluation.samples
    tokenizer = chat_tokenizer()
    tasks = assembly.source.heldout(benchmark.config.evaluation.tasks)
    sampler: Any = ScriptedSamplingClient(
        tokenizer,
        lambda i: tokenizer.encode(completions(tasks[i // samples], i % samples)) + [tokenizer.eos_token_id],
    )
    console = console or RunConsole()
    shown = show_prompts(benchmark.config, assembly.source, sampler, benchmark.config.prompt, console)
    out.mkdir(exist_ok=True)
    run_benchmark(benchmark, replace(assembly, source=shown), sampler, out, console)
    return sampler


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_strict_and_lenient_are_counted_over_the_same_completions(home: Path) -> None:
    """Ten tasks, two completions each. By hand, strict 2, 1, 0, 1 of 2; lenient 2, 1, 2, 0 of 2."""
    gold: list[str] = []

    def write(task: Any, sample: int) -> str:
        if task.meta["answer"] not in gold:
            gold.append(task.meta["answer"])
        number = task.meta["answer"].rpartition(" ")[2]
        pairs = [
            (f"#### {number}", f"so it is\n#### {number}"),
            (f"#### {number}", "I do not know."),
            (f"The answer is {number}.", f"\\boxed{{{number}}}"),
            (f"#### {number} pens, 7 more than before", "#### 10000"),
        ]
        return [*pairs, *[("", "no number")] * 6][gold.index(task.meta["answer"])][sample]

    words = ["gsm8k=gsm8k", "evaluation.samples=2", "evaluation.temperature=1"]
    run_script(home / "out", words, write)
    found = result_of(home / "out" / "gsm8k")
    rates = {name: estimate["value"] for name, estimate in found["rates"].items()}
    assert rates["pass@1"] == pytest.approx((1 + 0.5 + 0 + 0.5) / 10)
    assert rates["watched/gsm8k_flexible"] == pytest.approx((1 + 0.5 + 1 + 0) / 10)
    assert rates["pass@2"] == pytest.approx((1 + 1 + 0 + 1) / 10)
    assert (found["tasks"], found["samples"], found["k"], found["unjudged"], found["truncated"]) == (10, 2, 2, 0, 0)
    assert (found["strict"], found["lenient"], found["prompt"]) == ("gsm8k_strict", "gsm8k_flexible", "chat, 0-shot")
    first = json.loads((home / "out/gsm8k/completions.jsonl").read_text().splitlines()[0])
    assert [c["verdicts"]["gsm8k_strict"]["outcome"] for c in first["completions"]] == ["passed", "passed"]
    assert (
        first["prompt"].startswith("<|im_start|>user\nAnn has") and first["completions"][0]["response"][:5] == "#### "
    )


def test_pass_at_k_is_the_unbiased_estimate(home: Path) -> None:
    """Every task has 3 right completions of 5: 1 - C(2, 2) / C(5, 2) = 0.9 for k = 2."""
    words = ["gsm8k=gsm8k", "evaluation.samples=5", "evaluation.k=2", "evaluation.temperature=1"]
    run_script(home / "out", words, lambda task, i: task.meta["answer"] if i < 3 else "#### -1")
    assert result_of(home / "out" / "gsm8k")["rates"]["pass@2"]["value"] == pytest.approx(0.9)


def test_tasks_that_are_stored_are_not_sampled_again(home: Path) -> None:
    words = ["gsm8k=gsm8k", "engine.max_rows=4"]
    with pytest.raises(KeyboardInterrupt):
        run_script(home / "out", words, lambda task, i: task.meta["answer"], _KillingConsole(4))
    path = home / "out/gsm8k/completions.jsonl"
    begun = path.read_bytes()
    assert begun.count(b"\n") == 4 and not (home / "out/gsm8k/result.json").exists()
    path.write_bytes(begun + begun.split(b"\n")[0] + b"\n" + b'{"id": "gsm8k')  # a part of a chunk, the last line torn
    sampler = run_script(home / "out", words, lambda task, i: "#### -1")
    assert len(sampler.prompts) == 6
    assert path.read_bytes().startswith(begun) and path.read_bytes().count(b"\n") == 10
    assert result_of(home / "out" / "gsm8k")["rates"]["pass@1"]["value"] == pytest.approx(0.4)


def test_a_continued_benchmark_equals_one_that_never_stopped(home: Path, capsys: Any) -> None:
    words = ["gsm8k=gsm8k", "gsm8k_8shot=gsm8k", "mbpp_chat=mbpp.jsonl", "evaluation.tasks=8", "engine.max_rows=4"]
    words += ["evaluation.samples=2", "evaluation.temperature=1", *SMALL]
    assert run(["evaluate", "./my-model", *words, "--out", "whole"]) == 0
    printed = capsys.readouterr()
    assert "gsm8k_8shot 8/8" in printed.err and printed.out.strip() == Path("whole/table.md").read_text().strip()
    assert [line.split("|")[1:4] for line in printed.out.splitlines()[2:]] == [
        [f" {name:<11} ", f" {form} ", " 8     "]
        for name, form in (("gsm8k", "chat, 0-shot"), ("gsm8k_8shot", "text, 8-shot"), ("mbpp_chat", "chat, 0-shot"))
    ]
    Path("again/gsm8k_8shot").mkdir(parents=True)
    Path("again/gsm8k").mkdir()
    for file in ("model.json", "gsm8k/benchmark.json", "gsm8k_8shot/benchmark.json", "gsm8k/completions.jsonl"):
        Path("again", file).write_bytes(Path("whole", file).read_bytes())
    half = Path("whole/gsm8k_8shot/completions.jsonl").read_bytes().split(b"\n")[:4]
    Path("again/gsm8k_8shot/completions.jsonl").write_bytes(b"\n".join(half) + b"\n" + half[0][:100])
    assert run(["evaluate", "./my-model", *words, "--out", "again"]) == 0
    assert "gsm8k_8shot: 8 tasks, 4 done before" in capsys.readouterr().err
    for file in sorted(file.relative_to("whole") for file in Path("whole").rglob("*") if file.is_file()):
        assert Path("again", file).read_bytes() == Path("whole", file).read_bytes(), file


def test_stop_strings_stand_beside_the_end_token(home: Path) -> None:
    """The random model never writes `Question:`, so a completion that is not cut off ended with the end token."""
    words = ["gsm8k_8shot=gsm8k", "rollout.max_tokens=1000", "evaluation.tasks=4", "evaluation.temperature=1"]
    assert run(["evaluate", "./my-model", *words, *SMALL[1:], "--out", "out"]) == 0
    records = [json.loads(line) for line in (home / "out/gsm8k_8shot/completions.jsonl").read_text().splitlines()]
    completions = [completion for record in records for completion in record["completions"]]
    assert not all(completion["truncated"] for completion in completions)
    assert not any("Question:" in completion["response"] for completion in completions)
    assert all(record["prompt"].count("Question:") == 9 and record["prompt"][-7:] == "Answer:" for record in records)


def test_a_run_is_benchmarked_by_its_last_checkpoint_or_its_best(home: Path, capsys: Any) -> None:
    words = ["--config-name=gsm8k", "model.name=./my-model", "env.kwargs.path=gsm8k", "training.steps=1", *SMALL]
    words += ["training.prompts_per_step=2", "training.group_size=2", "evaluation={tasks: 2, samples: 1}"]
    assert run(["train", *words, "run.name=tuned", "model.lora={rank: 2}"]) == 0
    assert run(["evaluate", "runs/tuned", "gsm8k=gsm8k", *SMALL]) == 0
    stored = json.loads(Path("evaluations/tuned/summary.json").read_text())
    assert run(["evaluate", "./my-model", "gsm8k=gsm8k", *SMALL]) == 0
    assert stored["weights_sha256"] != json.loads(Path("evaluations/my-model/model.json").read_text())["weights_sha256"]
    assert default_folder("runs/tuned/checkpoints/best") == Path("evaluations/tuned-best")


def refusal(capsys: Any, *words: str) -> str:
    assert run(["evaluate", *words, *SMALL]) == 2
    return capsys.readouterr().err


def test_other_settings_or_weights_do_not_mix_with_what_is_stored(home: Path, capsys: Any) -> None:
    assert run(["evaluate", "./my-model", "gsm8k=gsm8k", "evaluation.tasks=2", *SMALL, "--out", "out"]) == 0
    said = refusal(capsys, "./my-model", "gsm8k=gsm8k", "evaluation.tasks=3", "--out", "out")
    assert "other settings: evaluation.tasks, tasks_sha256" in said and "--out" in said
    write_rows(home / "other", [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(20)])
    assert "tasks_sha256" in refusal(capsys, "./my-model", "gsm8k=other", "evaluation.tasks=2", "--out", "out")
    (home / "moved").mkdir()
    write_rows(home / "moved" / "gsm8k")  # the same rows elsewhere
    assert run(["evaluate", "./my-model", "gsm8k=moved/gsm8k", "evaluation.tasks=2", *SMALL, "--out", "out"]) == 0
    model_folder(home / "another")
    assert "weights_sha256" in refusal(capsys, "./another", "gsm8k_8shot=gsm8k", "--out", "out")
    (home / "full").mkdir()
    (home / "full" / "notes.txt").write_text("mine")
    assert "other files" in refusal(capsys, "./my-model", "gsm8k=gsm8k", "--out", "full")
    lines = Path("out/gsm8k/completions.jsonl").read_text().splitlines()
    Path("out/gsm8k/completions.jsonl").write_text(f"{lines[1]}\n{lines[0]}\n")
    assert "line 1 is damaged" in refusal(capsys, "./my-model", "gsm8k=gsm8k", "evaluation.tasks=2", "--out", "out")


def test_a_chat_form_needs_a_chat_template(home: Path, capsys: Any) -> None:
    """The error names the text form of the same tasks."""
    base = model_folder(home / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    assert "use gsm8k_8shot, or" in refusal(capsys, "./base", "gsm8k=gsm8k")
    assert "use mbpp, or" in refusal(capsys, "./base", "mbpp_chat=mbpp.jsonl")
    assert run(["evaluate", "./base", "gsm8k=gsm8k", "gsm8k.prompt.chat=off", "evaluation.tasks=2", *SMALL]) == 0
    assert "text, 0-shot" in capsys.readouterr().out


def test_any_environment_is_a_benchmark_by_a_config_file(home: Path, capsys: Any) -> None:
    (home / "counts.yaml").write_text(
        "env: {name: dataset, kwargs: {path: counts.jsonl, heldout_fraction: 0.5}}\n"
        "reward: {type: exact_match, watch: [math]}\nprompt: {chat: off}\nevaluation: {tasks: 4, samples: 1}\n"
    )
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(12)]
    (home / "counts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["evaluate", "./my-model", "counts.yaml", *SMALL, "--out", "out"]) == 0
    found = result_of(home / "out" / "counts")
    assert (found["strict"], found["lenient"], found["tasks"]) == ("exact_match", "math", 4)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside the project")
def test_the_published_files_are_read_as_they_are(home: Path, capsys: Any) -> None:
    data = [f"gsm8k={DATA}/gsm8k/test.jsonl", f"math500={DATA}/math/math500_test.jsonl", f"mbpp={DATA}/mbpp"]
    assert run(["evaluate", "./my-model", *data, f"mbpp_chat={DATA}/mbpp", "evaluation.tasks=4", *SMALL]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[1] for row in rows] == ["gsm8k", "math500", "mbpp", "mbpp_chat"]
