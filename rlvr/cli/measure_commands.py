"""`rlvr evaluate-service` and `rlvr bench`.

`rlvr bench` runs the benchmarks of a clone, which are no part of the installed package. For `rlvr evaluate-service`,
scripts/test_rlvr_evaluation.py is the same as a script of the clone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table


def evaluate_service(
    url: Annotated[str, typer.Option("--url", help="The address of the service.")] = "http://127.0.0.1:3035",
    quick: Annotated[bool, typer.Option("--quick", help="Only one task of each category.")] = False,
    tasks: Annotated[
        list[str] | None, typer.Option("--tasks", help="Only these: --tasks code_fibonacci math_problem.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[TASKS]...", hidden=True)] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="How many sessions of each task.")] = 1,
    target: Annotated[float, typer.Option("--target", help="The confidence from which a session is a success.")] = 0.85,
    max_iterations: Annotated[
        int | None, typer.Option("--max-iterations", help="Iterations of a session; default: the service's setting.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="The most seconds for a session.")] = 600.0,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Sessions at once.")] = 4,
    judge: Annotated[bool, typer.Option("--judge/--no-judge", help="Let the service's judge grade designs.")] = True,
    out: Annotated[Path | None, typer.Option("--out", help="Write the report to this JSON file.")] = None,
    min_success: Annotated[float, typer.Option("--min-success", help="The least success rate.")] = 0.5,
    min_solved: Annotated[float | None, typer.Option("--min-solved", help="The least solved rate.")] = None,
    min_convergence: Annotated[
        float | None, typer.Option("--min-convergence", help="The least convergence rate.")
    ] = None,
    min_improvement: Annotated[
        float | None, typer.Option("--min-improvement", help="The least improvement per iteration.")
    ] = None,
    max_errors: Annotated[float, typer.Option("--max-errors", help="The largest share of errors.")] = 0.1,
) -> None:
    """Run the suite of checked tasks against a running service; exit code 0 if the thresholds are met.

    rlvr evaluate-service --quick --out report.json

    1: they are not met. 2: a mistake in the command. 3: no service that can run sessions. RLVR_API_KEY is the API key.
    """
    from rlvr.cli.serve_commands import log_line
    from rlvr.service.evaluation.evaluation_report import Thresholds
    from rlvr.service.evaluation.evaluation_run import SuiteOptions, run

    if more and not tasks:
        raise ValueError(f"evaluate-service: {more[0]!r} is not an option; name tasks after --tasks")
    options = SuiteOptions(
        url, quick, [*(tasks or []), *(more or [])], repeats, target, max_iterations, timeout, concurrency, judge, out,
        Thresholds(min_success, min_solved, min_convergence, min_improvement, max_errors),
    )  # fmt: skip
    code = run(options, log_line, show, os.environ.get("RLVR_API_KEY", ""))
    if code:
        raise typer.Exit(code)


def show(report: Mapping[str, Any]) -> None:
    """Print the report as a table."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(_table(report))
    for line in lines(report):
        console.print(line, markup=False)


def _table(report: Mapping[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("task", no_wrap=True)
    for head in ("n", "success", "solved", "converged", "gain", "confid.", "iter.", "s/iter.", "tokens", "errors"):
        table.add_column(head, justify="right")
    for name, rates in report["tasks"].items():
        table.add_row(name, *_cells(rates))
    table.add_section()
    for name, rates in report["categories"].items():
        table.add_row(name, *_cells(rates))
    table.add_section()
    table.add_row("all", *_cells(report["overall"]), style="bold")
    return table


def _cells(rates: Mapping[str, Any]) -> list[str]:
    shares = [_number(rates[name]["value"], "{:.2f}") for name in ("success_rate", "solved_rate", "convergence_rate")]
    return [
        str(rates["sessions"]),
        *shares,
        _number(rates["improvement_rate"]["value"], "{:+.3f}"),
        _number(rates["confidence"]["value"], "{:.2f}"),
        _number(rates["iterations"]["value"], "{:.1f}"),
        _number(rates["time_per_iteration"], "{:.2f}"),
        f"{rates['tokens']:,}",
        str(sum(rates["errors"].values())),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def lines(report: Mapping[str, Any]) -> list[str]:
    """The lines below the table: intervals, errors, judges, and the thresholds that are not met."""
    rates = report["overall"]
    intervals: list[str] = []
    for name in ("success_rate", "solved_rate", "convergence_rate", "improvement_rate", "error_rate"):
        r = rates[name]
        bounds = "" if r["low"] is None else f" [{r['low']:.3f}, {r['high']:.3f}]"
        intervals.append(f"{name.replace('_', ' ')} {_number(r['value'], '{:.3f}')}{bounds}")
    text = [f"{'; '.join(intervals)} (95 %, tasks as the unit; success is confidence {report['target']:g})"]
    if rates["error_types"]:
        named = ", ".join(f"{code} {count}" for code, count in list(rates["error_types"].items())[:8])
        text.append(f"what verifiers objected to: {named}")
    if rates["errors"]:
        text.append("sessions in error: " + ", ".join(f"{code} {count}" for code, count in rates["errors"].items()))
    if report["judged_by_model"]:
        text.append("judged by a model too: " + ", ".join(report["judged_by_model"]))
    if not report["complete"]:
        text.append(f"incomplete: {rates['sessions']} of {report['planned']} sessions")
    text += [f"not held: {broken}" for broken in report["broken"]]
    return [*text, "all thresholds held"] if report["held"] else text


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME ...]", help="All without; see --list.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, fewer rounds: minutes, rougher.")] = False,
    rounds: Annotated[int | None, typer.Option("--rounds", help="3, or 2 with --quick.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Of each side; one per core by default.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="A folder to measure on your own model.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16, on both sides.")] = "float32",
    data: Annotated[Path | None, typer.Option("--data", help="Rows of MBPP, MATH-500 or GSM8K to measure on.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Where tables, JSON and curves go.")] = Path("bench-results"),
    list_them: Annotated[bool, typer.Option("--list", help="List benchmarks and cases; run nothing.")] = False,
) -> None:
    """Benchmark rlvr and its peers on this machine, in turns, with the same weights, work, dtype and threads.

    rlvr bench end-to-end/short --quick

    Needs a clone of the repository. A peer that is not installed is skipped by name. Ctrl-C and SIGTERM keep what was
    measured.
    """
    run = import_benchmarks(Path(__file__).parents[2], Path.cwd())
    setting = run.parse_settings(quick, rounds, threads, model, dtype, data)
    if list_them:
        run.list_benchmarks(names or [], setting)
    elif code := run.run_benchmarks(names or [], setting, out):
        raise typer.Exit(code)


def import_benchmarks(*folders: Path) -> Any:
    """Import `benchmarks.run` from the first of the folders that is a clone of the repository."""
    for folder in folders:
        if (folder / "benchmarks" / "run.py").exists() and (folder / "rlvr").is_dir():
            if str(folder) not in sys.path:
                sys.path.append(str(folder))  # the sides' processes get this path too
            return importlib.import_module("benchmarks.run")
    looked = " or ".join(str(folder / "benchmarks") for folder in dict.fromkeys(folders))
    raise ValueError(
        f"`rlvr bench` needs a clone of the repository: there is no {looked}. Get one (git clone REPOSITORY rlvr), run "
        "`make setup` in it and then `.venv/bin/rlvr bench`"
    )
