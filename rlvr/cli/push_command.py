"""`rlvr push`: a run's weights with a model card, to the Hugging Face hub or into a folder.

The hub is asked by `huggingface_hub`, with the token of `hf auth login` or HF_TOKEN, at HF_ENDPOINT if that is set. The
optimizer's state stays here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlvr.core.error_text import first_line
from rlvr.core.weights_place import SETTINGS, find_run, is_hub_name

if TYPE_CHECKING:
    from rlvr.cli.model_card import CardSource

PATIENCE = 5.0  # seconds for the first answer of the hub


class PushedCheckpoint(str, Enum):
    last = "last"
    best = "best"


def push(
    run: Annotated[Path, typer.Argument(metavar="RUNDIR", help="A run folder.")],
    target: Annotated[str, typer.Argument(metavar="OWNER/REPO|FOLDER", help="A hub repository, or a path like ./out.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    checkpoint: Annotated[
        PushedCheckpoint, typer.Option("--checkpoint", help="The last weights, or the best that the run kept.")
    ] = PushedCheckpoint.last,
) -> None:
    """Upload a run's weights with a model card: what was trained, the result with intervals, and every setting.

    rlvr push runs/arithmetic OWNER/REPO --private

    rlvr push runs/arithmetic ./out
    """
    from rlvr.cli.model_card import CardSource, model_card, read_reward
    from rlvr.runs.export_weights import find_checkpoint, list_public_files
    from rlvr.tracking.run_report import stored_summary

    is_folder = target.startswith((".", "/", "~"))
    if not is_folder and not is_hub_name(target):
        raise ValueError(f"{target!r}: expected OWNER/REPO, or a folder as a path that begins with ./ or /")
    if is_folder and private:
        raise ValueError(f"--private is for a repository of the hub, and {target} is a folder; leave it out")
    if find_run(run) != run:
        raise ValueError(f"{run} is not a run folder (no {SETTINGS})")
    folder = find_checkpoint(
        run, is_best=checkpoint is PushedCheckpoint.best, options=("--checkpoint best", "--checkpoint last")
    )
    settings = _read_settings(run)
    summary = stored_summary(run) if (run / "summary.json").exists() else None
    source = CardSource(run.resolve().name, settings, summary, folder, read_reward(run, settings))
    files: dict[str, Path | bytes] = {path.name: path for path in list_public_files(folder)}
    if source.adapter:
        files["adapter_config.json"] = json.dumps(source.public_adapter, indent=2).encode()
    place = Path(target).expanduser()
    card = model_card(source, place.resolve().name if is_folder else target)
    where = _write(place, files, card) if is_folder else _upload(target, files, card, private, source)
    typer.echo(f"{folder.name} of {run} and its model card are at {where}")
    if source.adapter and not source.hub_base:
        typer.echo(
            f"its base model, {source.adapter.get('base_model_name_or_path')}, is not one of the hub: share that too"
        )


def _read_settings(run: Path) -> dict[str, Any]:
    """The settings of a run, which may be older than some of them."""
    from rlvr.config import read
    from rlvr.config.build_config import add_defaults
    from rlvr.runs.run_folder import READ_AS_TEXT

    stored = read(run / SETTINGS)
    return add_defaults(stored) | ({} if "prompt" in stored else {"prompt": asdict(READ_AS_TEXT)})


def _write(place: Path, files: Mapping[str, Path | bytes], card: str) -> str:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place} exists and is not an empty folder; give another one")
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, place / name)
        else:
            (place / name).write_bytes(content)
    (place / "README.md").write_text(card, encoding="utf-8")
    return str(place)


def _upload(repo: str, files: Mapping[str, Path | bytes], card: str, private: bool, source: CardSource) -> str:
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, get_token
    except ModuleNotFoundError as error:
        raise ValueError(f"pushing to the hub needs {error.name}: pip install 'rlvr[train]'") from error
    token = get_token()
    if token is None:
        raise ValueError(
            "the hub needs a token with the right to write: log in with `hf auth login`, or set HF_TOKEN "
            "(https://huggingface.co/settings/tokens)"
        )
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        call_within(PATIENCE, api.whoami, api.endpoint)
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise ValueError(
                f"{repo} exists and is public; make it private on its settings page, or leave --private out"
            )
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        operations.append(CommitOperationAdd("README.md", card.encode()))
        message = f"rlvr push: {source.checkpoint.name} of {source.run}"
        api.create_commit(repo, operations, commit_message=message)
    except ValueError:
        raise
    except Exception as error:  # the hub's client and its HTTP library have classes of their own
        status = getattr(getattr(error, "response", None), "status_code", None)
        refused = f"the hub answered {status}" if status else "the hub cannot be reached"
        why = re.sub(r"\s*\(Request ID.*", "", first_line(error, token))
        raise ValueError(f"{repo}: {refused} ({why})") from error
    return str(url)


def call_within(seconds: float, call: Callable[[], Any], address: str) -> None:
    """Make the first call to a server. It runs in a thread, because looking up a name has no time limit of its own."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise ValueError(f"{address} did not answer within {seconds:g} seconds; check the network, or HF_ENDPOINT")
    for error in failures:
        raise error
