"""`rlvr plan`. Exercised by `python -m pytest tests/test_capacity.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlvr.cli.train_commands import ConfigFile, ConfigName, ConfigPath
from rlvr.cli.user_messages import print_message


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]", help="Settings as for `rlvr train`, and of the cluster, e.g. cluster.trainers=8."
        ),
    ] = None,
    config_name: ConfigName = None,
    config: ConfigFile = None,
    config_path: ConfigPath = None,
) -> None:
    """Compute memory, time and bottleneck of a run on a cluster, with the formulas. Nothing is run.

    rlvr plan model.name=Qwen2.5-7B rollout.max_tokens=2048 cluster.trainers=8 cluster.samplers=8
    """
    from rlvr.runs.run_plan import describe_capacity, read_words

    run, cluster = read_words(
        words or [], config_name, config or config_path, lambda text: print_message(f"warning: {text}")
    )
    typer.echo(describe_capacity(run, cluster))
