"""`rlvr study`. Exercised by `python -m pytest tests/test_study.py tests/test_study_plan.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlvr.cli.train_commands import ConfigFile, ConfigName, ConfigPath
from rlvr.cli.user_messages import mask_secrets, print_message


def study(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[algorithms] seeds=1..5 [key=value ...]",
            help="The seeds, and settings as for `rlvr train`; key=one,other makes a variant of each value.",
        ),
    ] = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
    environment: Annotated[
        list[str] | None,
        typer.Option("--environment", metavar="NAME=VALUE[,VALUE...]", help="An environment variable of the runs."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the folder in run.root; default CONFIG-study.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs at a time; by default as many as the cores have room for.")
    ] = None,
) -> None:
    """Train one config with several seeds and in variants, and compare them over the seeds.

    rlvr study --config-name=arithmetic seeds=1..5

    rlvr study algorithms seeds=1..5

    The latter compares all algorithms on small tasks (docs/run/studies.md).

    The same command continues a stopped study and tries failed runs again; more seeds extend it.
    """
    if overrides and overrides[0] == "algorithms":
        if config_name or config or config_path:
            raise ValueError("rlvr study algorithms has configs of its own; leave --config-name and --config out")
        _study_algorithms(overrides[1:], environment or [], name, jobs)
        return
    from rlvr.core.cpu_budget import available_cores
    from rlvr.study.study_folder import open_study
    from rlvr.study.study_plan import read_plan
    from rlvr.study.study_report import study_table, write_report
    from rlvr.study.study_runner import StudyRunner
    from rlvr.study.study_summary import summarize
    from rlvr.tracking import RunConsole

    warnings = dict[str, None]()  # each variant gives the same ones
    plan = read_plan(
        overrides or [],
        environment or [],
        name,
        config_name=config_name,
        config=config,
        config_path=config_path,
        warn=lambda text: warnings.update({text: None}),
    )
    for text in warnings:
        print_message(f"warning: {text}")
    jobs = jobs or plan.jobs
    with open_study(plan), RunConsole(interval=30) as console:
        console.plan(
            {
                "study": str(plan.folder),
                "variants": "; ".join(variant.name for variant in plan.variants),
                "runs": f"{len(plan.seeds)} seeds x {len(plan.variants)} variants, {jobs} at a time",
            }
        )
        if jobs > 1 and jobs * plan.threads > available_cores():
            console.warn(
                f"--jobs {jobs} with {plan.threads} threads each share {available_cores()} cores; give a lower --jobs "
                "or engine.threads"
            )

        def write() -> None:
            write_report(plan.folder, summarize(plan))

        runner = StudyRunner(plan, jobs, console, write)
        runner.run()
        summary = summarize(plan)
        write_report(plan.folder, summary)
        console.close()
        console.note(mask_secrets(study_table(summary)))
        console.note(f"table.md, summary.json, study.png, run folders and logs are in {plan.folder}")
        if runner.stop_requests:
            console.note("stopped; the same command goes on from here")
            raise typer.Exit(130)
    if any(run["state"] != "finished" for run in summary["runs"]):
        raise typer.Exit(1)


def _study_algorithms(words: list[str], environment: list[str], name: str | None, jobs: int | None) -> None:
    """Compare all algorithms, exploration options and controls on small tasks."""
    from rlvr.study.algorithm_report import format_results, write_results
    from rlvr.study.algorithm_study import collect_results, open_studies, read_algorithm_plans, run_studies
    from rlvr.tracking import RunConsole

    plans = read_algorithm_plans(words, environment, name)
    jobs = jobs or min(plan.variants.jobs for plan in plans)
    folder, seeds = plans[0].variants.folder.parent, plans[0].variants.seeds
    with open_studies(plans), RunConsole(interval=30) as console:
        variants = sum(len(plan.variants.variants) for plan in plans)
        console.plan(
            {
                "study": str(folder),
                "tasks": ", ".join(plan.task for plan in plans),
                "runs": f"{len(seeds)} seeds x {variants} variants of the tasks, {jobs} at a time",
            }
        )
        is_done = run_studies(plans, jobs, console)
        results = collect_results(plans)
        write_results(folder, results)
        console.close()
        console.note(mask_secrets(format_results(results)))
        console.note(f"table.md, results.json, study.png, and a folder for each task are in {folder}")
        if not is_done:
            console.note("stopped; the same command goes on from here")
            raise typer.Exit(130)
    finished = sum(run["state"] == "finished" for task in results["tasks"].values() for run in task["runs"])
    if finished < sum(len(plan.variants.runs) for plan in plans):
        raise typer.Exit(1)
