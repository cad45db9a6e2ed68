"""Do algorithms still differ when each has its own learning rate? Several rates and two lengths, on one task.

    python -m benchmarks.algorithm_rates seeds=1..5 choice=6..7 variants=grpo,raft rates=0.0005,0.001,0.002
    python -m benchmarks.algorithm_rates tools seeds=1..5 choice=6..7 variants=raft rates=0.0003,0.001 --name tools

The tasks and the variants are those of `benchmarks.algorithm_study`. First each variant is trained at each rate from
the seeds of `choice`; then from `seeds`, at the rate that was best there over both lengths. So the seeds that are
compared have no part in the choice. A run is as long as the longer length and is evaluated at both, on the same
held-out tasks; the learning rate is constant after its warm-up, so the first part of a long run is a short run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.algorithm_results import dump_results
from benchmarks.algorithm_study import CONFIGS, REFERENCE, TASKS, list_sizes, list_variants, plan_start
from benchmarks.rates_report import choose_rates, format_rates
from rlvr.cli import main as cli
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.files import check_name, write_atomic
from rlvr.core.machine import describe_machine
from rlvr.core.registry import did_you_mean
from rlvr.runs.user_messages import mask_secrets
from rlvr.studies.study_folder import open_study
from rlvr.studies.study_plan import StudyPlan, StudyVariant, build_plan, parse_seeds, read_overrides, split_values
from rlvr.studies.study_runner import StudyRunner
from rlvr.studies.study_summary import PACKAGES, is_finished, read_run
from rlvr.tracking import MetricsLog, RunConsole
from rlvr.training.interim import read_interim_results

NAME = "algorithm-rates"
OPTIONS = {"variants": "", "rates": "0.0005,0.001,0.002", "choice": "6..7", "times": "3"}
RATE_KEY = "training.optimizer.learning_rate"


@dataclass(frozen=True)
class RatesPlan:
    """`start` makes the weights that the runs of `runs` start from. Both have the seeds of the choice and of the
    comparison. `steps` are the optimizer batches of the two lengths of each variant of `runs`."""

    task: str
    start: StudyPlan
    runs: StudyPlan
    seeds: tuple[int, ...]
    choice: tuple[int, ...]
    steps: Mapping[str, tuple[int, int]]
    completions: tuple[int, int]


def name_run(variant: str, rate: str) -> str:
    """The name of a variant at a rate in `RatesPlan.runs`."""
    return f"{variant} {rate}"


def read_rates_plan(words: Sequence[str], name: str | None) -> RatesPlan:
    """The plan of `[TASK] seeds=... [choice=...] [variants=...] [rates=...] [times=3] [key=value ...]`."""
    tasks = [word for word in words if "=" not in word] or [TASKS[0]]
    if len(tasks) > 1 or tasks[0] not in TASKS:
        raise ValueError(f"{' '.join(tasks)}: expected one task of {', '.join(TASKS)}")
    task = tasks[0]
    pairs = [(key, value) for key, _, value in (word.partition("=") for word in words if "=" in word)]
    options = OPTIONS | {key: value for key, value in pairs if key in OPTIONS}
    rest = [f"{key}={value}" for key, value in pairs if key not in OPTIONS]
    seeds, shared, axes = read_overrides(rest)
    if axes:
        raise ValueError(f"{axes[0][0]} has several values; give one (the rates are given by rates=)")
    choice = parse_seeds(options["choice"])
    if both := sorted(set(seeds) & set(choice)):
        raise ValueError(
            f"choice={options['choice']}: seed {both[0]} is one of seeds= too, which must have no part in the choice; "
            "give other seeds"
        )
    known = list_variants()
    names = [REFERENCE, *(one for one in split_values(options["variants"]) if one and one != REFERENCE)]
    for one in names:
        if one not in known:
            raise ValueError(f"unknown variant {one!r}{did_you_mean(one, list(known))}; there are: {', '.join(known)}")
    rates, times = split_values(options["rates"]), int(options["times"])
    if times < 2 or len(rates) < 2:
        raise ValueError(f"times={times}, rates={','.join(rates)}: expected times of at least 2 and two rates or more")
    sizes = build_config(load(f"{CONFIGS}/{task}", None, shared)).training
    if sizes.optimizer.variant.decay != "constant":
        raise ValueError(
            f"training.optimizer.decay={sizes.optimizer.variant.decay}: the rate of a long run would differ from that "
            "of a short one from its first step; give constant"
        )
    root = next((word.partition("=")[2] for word in shared if word.startswith("run.root=")), "runs")
    shared = [word for word in shared if not word.startswith("run.root=")]
    shared.append(f"run.root={Path(root) / check_name(name or NAME, 'study name')}")
    drafts: list[StudyVariant] = []
    steps: dict[str, tuple[int, int]] = {}
    for rate in rates:  # outside, so that a rate more makes variants behind the others
        for one in names:
            more = dict(word.split("=") for word in list_sizes(one, sizes))
            short = int(more.pop("training.steps", sizes.steps))
            length = (f"training.steps={short * times}", f"evaluation.every={short}", f"{RATE_KEY}={rate}")
            overrides = (*known[one], *(f"{key}={value}" for key, value in more.items()), *length)
            steps[name_run(one, rate)] = short, short * times
            drafts.append(StudyVariant(name_run(one, rate), f"{one}_{rate}_", overrides, {}, {}))
    everything = tuple(sorted({*seeds, *choice}))
    of_start = [word for word in shared if not word.startswith(("training.", "algorithm.", "evaluation.interim_"))]
    start = plan_start(task, everything, of_start, {})
    of_runs = [word for word in shared if not word.startswith("sft.")]
    if not any(word.startswith("evaluation.interim_samples=") for word in of_runs):
        of_runs.append("evaluation.interim_samples=8")
    runs = build_plan(everything, [*of_runs, "sft.steps=0"], drafts, task, config_name=f"{CONFIGS}/{task}")
    batch = sizes.prompts_per_step * sizes.group_size * sizes.steps
    return RatesPlan(task, start, replace(runs, start=start.folder), seeds, choice, steps, (batch, batch * times))


def collect_results(plan: RatesPlan) -> dict[str, Any]:
    """The content of `results.json`: a line for each run that is finished, and what it was made from."""
    evaluation = plan.runs.variants[0].config["evaluation"]
    starts = {run.seed: read_run(plan.start, run) for run in plan.start.runs if is_finished(plan.start, run)}
    lines: list[dict[str, Any]] = []
    for run in plan.runs.runs:
        if not is_finished(plan.runs, run) or (found := read_run(plan.runs, run))["state"] != "finished":
            continue
        results = read_interim_results(MetricsLog(plan.runs.folder / run.name / "metrics.jsonl").rows())
        rates = {result.step: result.pass_rate.value for result in results}
        variant, _, rate = run.variant.name.partition(" ")
        lines.append(
            {
                "variant": variant,
                "rate": rate,
                "seed": run.seed,
                "pass@1": [float(f"{rates[step]:.6g}") for step in plan.steps[run.variant.name]],
                "seconds": float(f"{found['seconds']:.6g}"),
                "weights_sha256": found["weights_sha256"],
                "start_sha256": starts[run.seed]["weights_sha256"],
                "code": (found["machine"] or {}).get("rlvr"),
            }
        )
    return {
        "study": plan.runs.folder.parent.name,
        "task": plan.task,
        "machine": describe_machine(PACKAGES),
        "seeds": list(plan.seeds),
        "choice": list(plan.choice),
        "completions": list(plan.completions),
        "tasks": evaluation["interim_tasks"],
        "samples": evaluation["interim_samples"],
        "variants": {variant.name: list(variant.overrides) for variant in plan.runs.variants},
        "runs": lines,
    }


def list_chosen(results: Mapping[str, Any]) -> set[str]:
    """The names of the variants at the rates that were chosen."""
    return {name_run(variant, rate) for variant, rate in choose_rates(results).items()}


def count_runs(plan: RatesPlan, results: Mapping[str, Any]) -> int:
    return len(plan.choice) * len(plan.runs.variants) + len(plan.seeds) * len(list_chosen(results))


def run_rates(plan: RatesPlan, jobs: int, console: RunConsole) -> bool:
    """Make all missing runs: those of the choice, then those that it asks for; False if the user stopped the study."""
    for of_choice in (True, False):
        wanted = list_chosen(collect_results(plan))
        for seed in plan.choice if of_choice else plan.seeds:
            variants = tuple(v for v in plan.runs.variants if of_choice or v.name in wanted)
            start = replace(plan.start, seeds=(seed,))
            for study in (start, replace(plan.runs, seeds=(seed,), variants=variants)):
                if study is not start and not is_finished(start, start.runs[0]):
                    break
                runner = StudyRunner(study, jobs, console, lambda: None)
                runner.run()
                if runner.stop_requests:
                    return False
            write_rates(plan)
    return True


def write_rates(plan: RatesPlan) -> dict[str, Any]:
    """Write `results.json` and `table.md`; the results."""
    folder, results = plan.runs.folder.parent, collect_results(plan)
    write_atomic(folder / "results.json", dump_results(results))
    write_atomic(folder / "table.md", f"# {results['study']}\n\n{format_rates(results)}\n")
    return results


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def compare_rates(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK] seeds=1..5 [choice=6..7] [variants=NAME,...] [rates=R,...] [times=3] [key=value ...]",
            help="The task (arithmetic by default), the seeds compared and those of the choice, variants beside grpo, "
            "the rates to try, how many times the shorter length the longer one is, and settings of all runs.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help=f"Name of the folder in run.root; default {NAME}.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time; by default as many as the cores have room for.")
    ] = None,
) -> None:
    """Compare algorithms, each at its own best rate, at two lengths (docs/run/studies.md).

    The same command continues a stopped study and tries failed runs again.
    """
    plan = read_rates_plan(words or [], name)
    with ExitStack() as stack, RunConsole(interval=30) as console:
        stack.enter_context(open_study(plan.start))
        stack.enter_context(open_study(plan.runs))
        is_done = run_rates(plan, jobs or plan.runs.jobs, console)
        results = write_rates(plan)
        console.close()
        console.note(mask_secrets(format_rates(results)))
        if not is_done:
            console.note("stopped; the same command goes on from here")
            raise typer.Exit(130)
    if len(results["runs"]) < count_runs(plan, results):
        raise typer.Exit(1)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code; a user's mistake is one message and exit code 2."""
    return cli.run(arguments, app, "python -m benchmarks.algorithm_rates")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
