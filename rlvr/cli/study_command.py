"""`rlvr study`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlvr.cli.train_commands import ConfigFile, ConfigName, ConfigPath
from rlvr.cli.user_messages import mask_secrets, print_message


def study(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="seeds=1..5 [key=value ...]",
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

    The same command continues a stopped study and tries failed runs again; more seeds extend it.
    """
    if overrides and overrides[0] == "algorithms":
        raise ValueError(
            "`rlvr study algorithms` is no part of the package any more; in a clone of the repository, run "
            "`python -m benchmarks.algorithm_study` with the same words"
        )
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
