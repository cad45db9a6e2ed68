"""The command line: `rlvr demo`, `train`, `evaluate`, `study`, `export`, `push`, `verify`, `audit`, `serve` and others.

    rlvr demo
    rlvr train --config-name=arithmetic seed=1
    rlvr train --config=mine.yaml training.steps=50
    rlvr study --config-name=arithmetic seeds=1..5
    rlvr evaluate runs/arithmetic
    rlvr export runs/arithmetic --to ./my-trained-model
    rlvr push runs/arithmetic OWNER/REPO --private
    rlvr verify completions.jsonl --reward code --out verdicts.jsonl
    rlvr audit --reward code --attack
    rlvr env check sorting
    rlvr record --model ./my-model --out traffic.jsonl
    rlvr rows traffic.jsonl
    rlvr serve engine --model ./my-model --port 8000
    rlvr view runs/arithmetic
    rlvr doctor runs/arithmetic
    rlvr bench end-to-end --quick
    rlvr config --config-name=gsm8k model.name=./my-model
    rlvr plan model.name=Qwen2.5-7B rollout.max_tokens=2048 cluster.trainers=8

A user's mistake is one message without a traceback and exit code 2; a run that had to stop is 1; Ctrl-C is 130. The
commands are in the other files of this folder.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import cache
from typing import Annotated, Any

import typer
import typer.main

from rlvr import __version__
from rlvr.cli.demo_command import demo
from rlvr.cli.env_commands import env_app
from rlvr.cli.export_command import export
from rlvr.cli.grading_commands import audit, verify
from rlvr.cli.inspect_commands import doctor, view
from rlvr.cli.measure_commands import bench, evaluate_service
from rlvr.cli.push_command import push
from rlvr.cli.record_commands import record, rows
from rlvr.cli.serve_commands import serve_app
from rlvr.cli.train_commands import evaluate, plan, show_config, study, train
from rlvr.core.cpu_budget import limit_spinning
from rlvr.runs.user_messages import print_message

app = typer.Typer(
    help="Train language models on anything that can be verified.",
    epilog="Exit codes: 0 done, 1 stopped before its end, 2 a mistake of the user, 130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# What typer raises for an unknown command or option; it exports no name for it.
UsageError: type[Exception] = typer.BadParameter.mro()[1]

# In the order of the help, under the heading of each group.
_COMMANDS = {
    "Begin": {"demo": demo},
    "Train and evaluate": {
        "train": train,
        "evaluate": evaluate,
        "study": study,
        "export": export,
        "push": push,
        "config": show_config,
        "plan": plan,
    },
    "Look at runs": {"view": view, "doctor": doctor},
    "Agents": {"record": record, "rows": rows},
    "Verifiers": {"verify": verify, "audit": audit},
    "Measure": {"bench": bench, "evaluate-service": evaluate_service},
}
for _group, _members in _COMMANDS.items():
    for _name, _command in _members.items():
        app.command(_name, rich_help_panel=_group)(_command)
app.add_typer(env_app, name="env", rich_help_panel="Environments")
app.add_typer(serve_app, name="serve", rich_help_panel="Servers")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if sys.platform == "win32":
        raise ValueError(
            "Windows is not supported: run folders, worker processes and the sandbox need a POSIX system. Install "
            "WSL 2 (`wsl --install`) and use rlvr in it"
        )


def main() -> None:
    """The `rlvr` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str], commands: typer.Typer = app, program: str = "rlvr") -> int:
    """Run one of the commands and return its exit code. Errors become messages here, and only here."""
    limit_spinning()
    try:
        code = _get_command(commands)(arguments, prog_name=program, standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except UsageError as mistake:
        message = mistake.format_message()  # pyright: ignore[reportAttributeAccessIssue] - it names the option
        return _fail(message + _remedy(mistake, arguments), 2) if message else 2  # the help was printed already
    except ValueError as mistake:
        return _fail(mistake, 2)
    except RuntimeError as stop:
        from rlvr.clients.sharded.sharding_options import RankError
        from rlvr.clients.vllm.vllm_options import SamplerError
        from rlvr.core.messages import NonFiniteError
        from rlvr.core.ray_cluster import RayError
        from rlvr.training.trainer import TrainingStoppedError

        if isinstance(stop, NonFiniteError):
            remedy = "The last checkpoint stands; use a lower learning rate (see the optimizer options)"
            return _fail(f"{stop}. {remedy}", 1)
        if not isinstance(stop, (TrainingStoppedError, SamplerError, RankError, RayError)):
            raise
        return _fail(stop, 1)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = os.fspath(error.filename or "a name")
            shown = repr(f"{name[:60]}..." if len(name) > 60 else name)
            return _fail(f"{shown} ({len(name)} characters) is too long for a file name; give a shorter one", 2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS):
            raise
        where = f" ({error.filename})" if error.filename else ""
        remedy = "What was saved before stands: make room, then run the same command"
        return _fail(f"cannot write{where}: {error.strerror}. {remedy}", 1)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    return code or 0


@cache
def _get_command(commands: typer.Typer) -> Any:
    """The parser of the commands, which takes as long to make as many a command to run."""
    return typer.main.get_command(commands)


def _remedy(mistake: Any, arguments: list[str]) -> str:
    """What to write instead of an option that the command does not have, or of a command that does not exist."""
    name, context = getattr(mistake, "option_name", ""), mistake.ctx
    if str(mistake.message).startswith("No such command"):
        return f" `{context.command_path} --help` lists the commands and options"
    if not name or mistake.possibilities:
        return ""
    given = next((i for i, argument in enumerate(arguments) if argument.split("=")[0] == name), -1)
    _, has_value, value = arguments[given].partition("=") if given >= 0 else ("", "", "")
    if not has_value:
        value = next((word for word in arguments[given + 1 :][:1] if not word.startswith("-")), "VALUE")
    setting = f"{name.lstrip('-').replace('-', '_')}={value}"
    takes = {parameter.name for parameter in context.command.params}
    if "reward_option" in takes:
        return f". An option of the reward is given by --reward-option {setting}"
    return f". Settings are words without dashes: {setting}" if takes & {"overrides", "words"} else ""


def _fail(message: object, code: int) -> int:
    print_message(str(message))
    return code


if __name__ == "__main__":
    main()
