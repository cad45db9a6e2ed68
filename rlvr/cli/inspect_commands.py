"""`rlvr doctor` and `rlvr view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlvr.cli.train_commands import ConfigFile, ConfigName, ConfigPath, load_run_config
from rlvr.runs.user_messages import name_missing_extra, print_message


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | key=value ...]", help="A run folder, or settings of a run that is to sample with vLLM."
        ),
    ] = None,
    vllm: Annotated[
        list[str] | None, typer.Option("--vllm", help="The address of a vLLM server to check; may be repeated.")
    ] = None,
    tinker: Annotated[str | None, typer.Option("--tinker", help="The address of a Tinker server to try.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="With --tinker: the model's name there.")] = None,
    rank: Annotated[int, typer.Option("--rank", help="With --tinker: the adapter's rank (model.lora.rank).")] = 32,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
) -> None:
    """Diagnose why a run learns nothing; without a run, check this installation, or the servers of a run.

    rlvr doctor runs/arithmetic

    rlvr doctor --vllm http://127.0.0.1:8790

    rlvr doctor --vllm http://127.0.0.1:8790 --config-name=dataset model.name=./my-model env.kwargs.path=tasks.jsonl

    rlvr doctor --tinker http://127.0.0.1:8000 --model my-model --rank 8
    """
    from rlvr.cli.doctor import Check, format_checks, format_lines, installation, report
    from rlvr.tracking import RunConsole

    with RunConsole(live=False) as console:
        if words and not (config_name or config):
            if len(words) > 1 or "=" in words[0] or vllm or tinker:
                raise ValueError("doctor: settings need a config: --config-name=NAME or --config=FILE")
            console.note(report(Path(words[0])))
            return
        checks: list[Check] = []
        if config_name or config:
            from rlvr.cli.doctor_vllm import check_run

            _, settings = load_run_config(config_name, config, config_path, words)
            checks += check_run(settings, vllm or [])
        elif vllm:
            from rlvr.cli.doctor_vllm import check_vllm

            checks += [check for url in vllm for check in check_vllm(url)]
        if tinker:
            from rlvr.cli.doctor_tinker import check_tinker

            checks += check_tinker(tinker, model, rank)
        if checks:
            console.note(format_lines(checks))
        else:
            checks = installation()
            console.note(format_checks(checks))
    if any(check.state == "fails" for check in checks):
        raise typer.Exit(1)


def view(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A run folder, a folder of runs, a recording of `rlvr record`, or a Tinker server's state folder.",
        ),
    ],
    port: Annotated[int, typer.Option("--port", help="The port; 0 takes any free one.")] = 3036,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; only addresses of this machine.")
    ] = "127.0.0.1",
) -> None:
    """Show a run in the browser: curves, stored completions with their verdicts, steps side by side; or the
    conversations of a recording; or the runs of a Tinker server. Read-only.

    rlvr view runs/arithmetic
    rlvr view traffic.jsonl
    rlvr view runs/server
    """
    with name_missing_extra("the dashboard", "serve"):
        import jinja2  # noqa: F401 - the first page imports it
        import uvicorn  # noqa: F401 - the server imports it after it has taken the port

        from rlvr.service.dashboard.view_command import view

    view(path, host, port, print_message)
