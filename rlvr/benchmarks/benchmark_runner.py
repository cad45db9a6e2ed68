"""Runs benchmarks on a model: one engine, one benchmark after the other, each continued where it stopped.

For example:

    run_benchmarks("./my-model", ["gsm8k=./gsm8k", "evaluation.tasks=50"], Path("evaluations/my-model"), console)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr.benchmarks.benchmark_folder import BenchmarkFolder, list_results, make_record, open_benchmarks, read_count
from rlvr.benchmarks.benchmark_plan import Benchmark, find_text_forms, name_benchmark, read_benchmarks
from rlvr.chat.chat_template import has_template
from rlvr.config.build_config import resolved_values
from rlvr.config.schema import RunConfig
from rlvr.core.files import write_atomic
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import SamplingClient
from rlvr.core.types import Task, Trajectory
from rlvr.core.weights_place import CHECKPOINTS, WeightsPlace
from rlvr.runs.assembly import Assembly, assemble
from rlvr.runs.evaluate_weights import show_prompts, warn_of_tasks
from rlvr.runs.weights import check_to_sample, with_model
from rlvr.tracking import RunConsole
from rlvr.tracking.run_report import format_rate
from rlvr.training.errors import check_error_budget
from rlvr.training.evaluate import Evaluation, evaluation_params, heldout_split
from rlvr.training.initial_weights import newest_weights
from rlvr.training.judged_tasks import judge_in_chunks

SETTINGS = ("env", "prompt", "reward", "rollout", "evaluation", "seed")  # the sections that decide about a number
_PARTS, _LEAST = 20, 32  # a kill loses at most a twentieth of a benchmark, or this many completions
HEAD = (
    *("benchmark", "prompt", "tasks", "samples", "pass@1 strict", "pass@1 lenient", "pass@k strict"),
    *("unjudged", "truncated"),
)


def default_folder(place: str) -> Path:
    """Where the benchmarks of a model go: `evaluations/` and its name; of a checkpoint also that of its run."""
    path = Path(place).expanduser().absolute()
    name = f"{path.parents[1].name}-{path.name}" if path.parent.name == CHECKPOINTS else path.name
    return Path("evaluations") / name


def run_benchmarks(place: str, words: Sequence[str], folder: Path, console: RunConsole) -> dict[str, Any]:
    """Run the benchmarks that the words name on the model, adapter, run or checkpoint at `place`; their results.

    Everything is written to `folder`; what is finished there is not sampled again.
    """
    newest = newest_weights(place, "MODEL")  # of a run
    weights = WeightsPlace.of(place if newest == Path(place).expanduser() else newest)
    check_to_sample(weights, console.note)
    benchmarks = read_benchmarks(words, lambda loaded: with_model(loaded, weights))
    assemblies: list[Assembly] = []
    for benchmark in benchmarks:
        with name_benchmark(benchmark.name):
            assemblies.append(assemble(benchmark.config))
            assemblies[-1].start_rewards()
    shares = [assembly.core_shares for assembly in assemblies]
    cores = next((share for share in shares if share.concurrent), shares[0])
    sampler = assemblies[0].build_sampler(weights.adapter, console.warn, cores)
    for benchmark in benchmarks:
        _check_chat(benchmark, place, sampler.get_tokenizer())
    sha256 = sampler.weights_sha256()
    with open_benchmarks(folder, {"model": place, "weights_sha256": sha256}):
        for benchmark, assembly in zip(benchmarks, assemblies, strict=True):
            with name_benchmark(benchmark.name):
                shown = show_prompts(benchmark.config, assembly.source, sampler, benchmark.config.prompt, console)
                run_benchmark(benchmark, replace(assembly, source=shown), sampler, folder, console)
        stored = list_results(folder)
        names = [benchmark.name for benchmark in benchmarks]
        results = {name: stored[name] for name in (*names, *(other for other in stored if other not in names))}
        summary = {"model": place, "weights_sha256": sha256, "benchmarks": results}
        write_atomic(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        write_atomic(folder / "table.md", write_table(results) + "\n")
    return summary


def _check_chat(benchmark: Benchmark, place: str, tokenizer: Any) -> None:
    """ValueError if a benchmark asks in a chat and the model has no chat template."""
    if benchmark.config.prompt.chat != "on" or has_template(tokenizer):
        return
    name = benchmark.name
    forms = " or ".join(find_text_forms(benchmark)) or f"{name}.prompt.chat=off"
    raise ValueError(
        f"benchmark {name} asks in a chat, and the tokenizer of {place} has no chat template; for a base model use "
        f"{forms}, or name an instruct model's tokenizer (model.tokenizer)"
    )


@dataclass(frozen=True)
class _Work:
    """The tasks of a benchmark, and what each is sampled and judged with."""

    tasks: list[Task]
    config: RunConfig

    @property
    def chunk(self) -> int:
        """How many tasks are sampled at once."""
        samples = self.config.evaluation.samples
        completions = min(max(_LEAST, len(self.tasks) * samples // _PARTS), self.config.engine.max_rows)
        return max(1, completions // samples)

    def sha256(self) -> str:
        """A hash over the tasks, as the model reads them and as they are judged."""
        digest = hashlib.sha256()
        for task in self.tasks:
            digest.update(json.dumps([task.id, task.model_prompt, task.meta], sort_keys=True, default=str).encode())
        return digest.hexdigest()


def run_benchmark(
    benchmark: Benchmark, assembly: Assembly, sampler: SamplingClient, out: Path, console: RunConsole
) -> None:
    """Sample and judge what `out` does not hold yet, and store the numbers. The tasks are as the model reads them."""
    config, options = benchmark.config, benchmark.config.evaluation
    source, reward, watched = assembly.source, assembly.reward, assembly.watched
    work = _Work(heldout_split(source, options, has_interim=False)[0], config)
    warn_of_tasks(len(work.tasks), benchmark.loaded, config, console)
    settings = {key: resolved_values(config, benchmark.loaded)[key] for key in SETTINGS}
    settings |= {"tasks_sha256": work.sha256(), "reward_name": reward.formula}
    folder = BenchmarkFolder(out / benchmark.name, settings, [task.id for task in work.tasks], work.chunk)
    params = _with_end_token(evaluation_params(config.rollout, options), sampler.get_tokenizer())
    console.phase(benchmark.name, len(work.tasks), len(folder.records), unit="tasks")
    failures: list[Trajectory] = []
    chunks = judge_in_chunks(
        source,
        work.tasks,
        sampler,
        reward,
        params,
        samples=options.samples,
        seed=config.seed,
        watched=watched,
        chunk=work.chunk,
        first=len(folder.records),
    )
    for judged in chunks:
        failures += [failure for task in judged for failure in task.failures]
        completions = len(work.tasks) * options.samples
        check_error_budget(benchmark.name, reward.name, failures, completions, config.training.error_budget)
        verifiers = [reward, *(other for other in watched if other.name != reward.name)]
        folder.append([make_record(task, task.count(source, reward, watched), verifiers) for task in judged])
        console.step({}, len(folder.records))
    folder.finish(
        {
            **_count(folder.records, options.k or options.samples),
            "prompt": _describe_prompt(config, work.tasks[0]),
            "samples": options.samples,
            "temperature": options.temperature,
            "strict": reward.name,
            "lenient": watched[0].name if watched else None,
            "seed": config.seed,
        }
    )


def _count(records: Sequence[dict[str, Any]], k: int) -> dict[str, Any]:
    """The numbers of the stored tasks."""
    found = Evaluation.of([read_count(record) for record in records], k)
    return {
        "tasks": len(records),
        "k": k,
        "rates": found.intervals(),
        "by_level": {level: found.intervals(level) for level in found.levels},
        "unjudged": found.unjudged,
        "truncated": found.truncated,
        "tokens": found.tokens,
    }


def _describe_prompt(config: RunConfig, task: Task) -> str:
    """`chat, 0-shot`: how the model is asked, and after how many worked examples."""
    examples = config.prompt.examples
    shots = examples if isinstance(examples, int) else len(examples)
    shots += int(config.env.kwargs.get("few_shot") or 0)
    return f"{'text' if isinstance(task.model_prompt, str) else 'chat'}, {shots}-shot"


def _with_end_token(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """The sampling parameters whose stop strings end a completion beside the end token, not instead of it."""
    if not params.stop or tokenizer.eos_token_id is None:
        return params
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop)
    return replace(params, stop=[*stops, tokenizer.eos_token_id])


def write_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table in Markdown, its columns aligned."""
    rows = [HEAD, *(_write_row(name, result) for name, result in results.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    head, *body = (f"| {' | '.join(row)} |" for row in padded)
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([head, rule, *body])


def _write_row(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    rates, k = result["rates"], result["k"]
    at_k = _write_rate(rates.get(f"pass@{k}")) + f" (k={k})" if k > 1 else "-"
    completions = result["tasks"] * result["samples"]
    tasks, judged = result["tasks"], rates["pass@1"].get("n", result["tasks"])
    return (
        *(
            name,
            result["prompt"],
            f"{tasks:,}" if judged == tasks else f"{judged:,} of {tasks:,}",
            f"{result['samples']:,}",
        ),
        *(_write_rate(rates["pass@1"]), _write_rate(rates.get(f"watched/{result['lenient']}")), at_k),
        *(f"{result['unjudged']:,}", f"{100 * result['truncated'] / completions:.1f}%"),
    )


def _write_rate(estimate: Mapping[str, float | None] | None) -> str:
    return "-" if estimate is None else format_rate(estimate)
