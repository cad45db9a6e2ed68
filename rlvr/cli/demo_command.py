"""`rlvr demo`: a small transformer with random weights learns to sort digits, drawn as it learns.

It is an ordinary run of the config `demo`, in `runs/demo`: every other command takes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlvr.runs.user_messages import name_missing_extra

if TYPE_CHECKING:
    from rlvr.runs.library import Run
    from rlvr.tracking.curve_console import CurveConsole

_SHOWN = 3  # prompts before and after
_FIRST_STEPS = 3  # in which the weights are still nearly random

_INTRODUCTION = """\
A small transformer with random weights learns to sort three digits. It is never shown an answer: it samples
completions, code checks them, and the share of digits in their place is the reward. It takes 40 to 50 seconds of one
core.
"""


def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings that override the demo's config, e.g. seed=1."),
    ] = None,
) -> None:
    """Watch a small transformer learn from nothing, from 0 to over 90 % of unseen tasks in 50 seconds of one core.

    rlvr demo

    It needs no model, data or network. It is an ordinary run, kept in runs/demo; once it is finished, the next demo
    renames it and starts anew.
    """
    with name_missing_extra("the demo", "train"):
        import torch  # noqa: F401 - before anything is printed
        import transformers  # noqa: F401

    from rlvr.config import load
    from rlvr.config.build_config import build_config
    from rlvr.config.compose import PACKAGED
    from rlvr.runs.library import Run
    from rlvr.runs.train import RunInterruptedError, train_config
    from rlvr.tracking.curve_console import CurveConsole

    class DemoConsole(CurveConsole):
        def warn(self, text: str) -> None:
            """Leave out that random weights seldom end a completion: the demo begins there."""
            if not text.startswith("before training:"):
                super().warn(text)

    loaded = load(None, str(PACKAGED / "demo.yaml"), overrides or [])
    settings = build_config(loaded)
    run = Run(Path(settings.run.root) / (settings.run.name or loaded.name))
    if run.is_finished:
        loaded = load(None, str(PACKAGED / "demo.yaml"), [*(overrides or []), "run.resume=false"])
        settings = build_config(loaded)
    console = DemoConsole([] if run.is_finished else run.metrics)
    console.note(_INTRODUCTION)
    try:
        folder, _ = train_config(loaded, settings, console)
    except RunInterruptedError:
        raise typer.Exit(130) from None
    run = Run(folder)
    _show_completions(run, console)
    _say_what_next(folder, console)


def _show_completions(run: Run, console: CurveConsole) -> None:
    """Print what the policy wrote for the same prompts at the beginning and at the end."""
    pairs = pair_completions([run.rollouts(row["step"]) for row in run.metrics if row["phase"] == "rl"])
    lines = [
        f"  {before['prompt']:<14}{before['response'] or '(nothing)':<12}{_mark(before):<7}->  "
        f"{after['response'] or '(nothing)':<12}{_mark(after)}"
        for before, after in pairs
    ]
    if lines:
        console.note("\n".join(["", "completions of the same prompts, in the first steps and in the last", *lines]))


def pair_completions(
    steps: Sequence[Sequence[dict[str, Any]]], count: int = _SHOWN
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The first completion of a prompt in the first steps with that in the latest step that had the prompt again.

    `steps` are the stored rollouts of each step. Prompts that came again last come first.
    """
    first: dict[str, dict[str, Any]] = {}
    for rows in steps[:_FIRST_STEPS]:
        for row in rows:
            first.setdefault(row["prompt"], row)
    last: dict[str, dict[str, Any]] = {}
    for rows in reversed(steps[_FIRST_STEPS:]):
        for row in rows:
            if row["prompt"] in first:
                last.setdefault(row["prompt"], row)
        if len(last) >= count:
            break
    return [(first[prompt], row) for prompt, row in list(last.items())[:count]]


def _mark(row: dict[str, Any]) -> str:
    outcomes = {score["outcome"] for score in row["scores"].values()}
    return "right" if outcomes == {"passed"} else "not judged" if outcomes & {"error", "invalid"} else "wrong"


def _say_what_next(folder: Path, console: CurveConsole) -> None:
    place = shlex.quote(str(folder))
    commands = {
        f"rlvr view {place}": "this run in a browser: curves, completions, verdicts",
        f"rlvr evaluate {place} evaluation.samples=16": "its weights on its held-out tasks again",
        "rlvr train --config-name=arithmetic": "the next one: arithmetic, in a few minutes",
    }
    width = max(map(len, commands))
    lines = [f"  {command:<{width}}  {what}" for command, what in commands.items()]
    console.note("\n".join(["", "next", *lines]))
