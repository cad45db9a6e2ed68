"""The model that an engine generator serves and trains: what `RLVR_MODEL` names, or the demo's.

- a run's folder: the newest weights of a training run, trained as the run did, with the environment of the run;
- a model's folder or its name on the hub: a pretrained model under a fresh LoRA adapter;
- `tinker://...`, `tinker:BASE_MODEL`: saved weights or a base model at the Tinker server that TINKER_BASE_URL names.

The demo is the arithmetic job's model after a short warm-up, made by `rlvr train` in a process of its own on first
start (under a minute on a quiet core) and kept in the service's folder: it passes under half of its problems, so that
sessions have something to teach. torch is imported when a model is opened, never before. Exercised by
`python -m pytest tests/test_service_models.py`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlvr.protocols import TrainingClient
from rlvr.types import Task

VARIABLE = "RLVR_MODEL"  # what messages call the setting that names the model
LORA_RANK = 16
DEMO = "demo"
DEMO_STEPS = 600
DEMO_RUN = (
    "training.mode=sft",
    'env.kwargs={p: 13, operators: ["+", "-", "*"], complexity: [1, 2], flaw: 0.28}',
    'sft.curriculum={by: schedule, schedule: [[0, {"1": 3, "2": 1}], [250, {"1": 1, "2": 2}]]}',
    f"sft.steps={DEMO_STEPS}",
    "sft.until=0",
    "model.config.n_positions=64",
    "evaluation.tasks=200",
    "evaluation.samples=2",
    "evaluation.every=0",
)
POLL_S = 0.5
Say = Callable[[str], None]


@runtime_checkable
class Poses(Protocol):
    """An environment that can make a task of what a person typed: the prompt in its own form, and the answer."""

    reward: str

    def posed(self, text: str) -> Task | None: ...


@dataclass
class Model:
    """A client that can be trained, and what is known of the model. `poses` is its run's environment, where that can
    make tasks of a person's words. `max_tokens` is the budget of an answer that its run had."""

    client: TrainingClient
    name: str
    kind: str  # local | tinker
    poses: Poses | None = None
    max_tokens: int | None = None
    notes: list[str] = field(default_factory=list[str])

    @property
    def chat(self) -> bool:
        return getattr(self.client.get_tokenizer(), "chat_template", None) is not None

    @cached_property
    def reads(self) -> bool:
        """Whether the tokenizer can say what a critic says: one with a vocabulary of words cannot."""
        tokenizer, text = self.client.get_tokenizer(), "draft: too short. Write more; a test fails."
        try:
            tokens = tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # each library has its own error for it
            return False
        return tokenizer.decode(tokens, skip_special_tokens=True).strip() == text


def check_name(given: str, variable: str = VARIABLE) -> None:
    """ValueError where a path of this machine must be meant, and nothing is there; before anything asks the hub."""
    place = Path(given).expanduser()
    if given.startswith("tinker:") or place.exists():
        return
    depth = len(place.parts)  # `name` and `owner/name` may be the hub's
    if given.startswith((".", "/", "~")) or depth > 2 or (depth == 2 and place.parent.is_dir()):
        raise ValueError(f"{variable}={given}: there is no such folder; give a run's, a model's, or a hub name")


def open_model(given: str, folder: Path, *, seed: int = 0, variable: str = VARIABLE) -> Model:
    """Load what `given` names; what is saved of its training goes to `folder`. ValueError where it is not to be had,
    which calls the setting `variable`."""
    if given.startswith("tinker:"):
        return _remote(given, seed)
    place = Path(given).expanduser()
    if (place / "resolved.yaml").exists():
        return _run(place, folder, variable)
    if place.is_dir() and not (place / "config.json").exists():
        raise ValueError(
            f"{variable}={given}: the folder holds neither a run (resolved.yaml) nor a model (config.json); give one "
            "of these, or a model's name on the hub"
        )
    return _pretrained(str(place) if place.is_dir() else given, folder, seed)


def _run(place: Path, folder: Path, variable: str) -> Model:
    from rlvr.build import build_source
    from rlvr.build_client import build_client
    from rlvr.config import load
    from rlvr.config.schema import configured
    from rlvr.training import journal

    checkpoint = journal.stored_checkpoint(place)
    if checkpoint is None:
        raise ValueError(f"{variable}={place}: this run has no whole checkpoint yet; train it first")
    config = configured(load(None, str(place / "resolved.yaml"), []))
    source, notes = build_source(config), list[str]()
    client = build_client(config, source, folder, lambda text: None, notes.append, fresh=False)
    client.load_state(journal.weights_at(checkpoint)).result()
    kind = "tinker" if config.client == "tinker" else "local"
    poses = source if isinstance(source, Poses) else None
    return Model(client, f"run {place.name}", kind, poses, config.rollout.max_tokens, notes)


def _pretrained(name: str, folder: Path, seed: int) -> Model:
    try:
        from rlvr.clients.local import LocalTrainingClient
        from rlvr.engine.engine import Engine
        from rlvr.engine.model import load_model
        from rlvr.engine.options import LoraConfig
        from rlvr.engine.tokenizer import load_tokenizer, quiet
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; a local model needs: pip install 'rlvr[train]'") from error
    quiet()
    logging.getLogger("huggingface_hub").handlers.clear()  # its lines come out once, in the form of the log
    engine = Engine(load_model(name, load_tokenizer(name), device="auto", dtype="auto"))
    policy = engine.create_policy("policy", lora=LoraConfig(rank=LORA_RANK, alpha=2 * LORA_RANK), seed=seed)
    return Model(LocalTrainingClient(engine, policy, folder), name, "local", notes=list(engine.model.notes))


def _remote(given: str, seed: int) -> Model:
    from rlvr.clients.tinker import SCHEME, connect
    from rlvr.engine.options import LoraConfig

    start = given if given.startswith(SCHEME) else None
    base = None if start else given.removeprefix("tinker:")
    client = connect(base, start_from=start, lora=LoraConfig(rank=LORA_RANK), seed=seed)
    return Model(client, client.base_model, "tinker")


def train_demo(state: Path, progress: Say, run: Sequence[str] = DEMO_RUN) -> Path:
    """The demo's run folder; trained first where it is not there, or was not finished.

    `progress` hears how far it is; where it raises, training ends there, and the next call goes on from its last
    checkpoint. What an earlier life of the service left training is waited for.
    """
    from rlvr.training.journal import RunLocked, locked

    folder = state / DEMO
    while not (folder / "summary.json").exists():
        progress(f"training {_percent(folder / 'metrics.jsonl')}%")
        try:
            if folder.exists():
                locked(folder).close()
        except RunLocked:
            time.sleep(POLL_S)
            continue
        _train(state, folder, progress, run)
    return folder


def _train(state: Path, folder: Path, progress: Say, run: Sequence[str]) -> None:
    state.mkdir(parents=True, exist_ok=True)
    log = state / "demo.log"
    words = ["train", "--config-name=arithmetic", f"run.root={state}", f"run.name={DEMO}", *run]
    with open(log, "wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "rlvr.cli", *words], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        while child.poll() is None:
            progress(f"training {_percent(folder / 'metrics.jsonl')}%")
            time.sleep(POLL_S)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if child.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(
            f"the demo's model could not be trained (exit code {child.returncode}): {last[0][:300]}; see {log}"
        )


def _percent(metrics: Path) -> int:
    """How far the warm-up is, by the last line of its metrics."""
    try:
        with open(metrics, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            last: Any = json.loads(file.read().splitlines()[-1])
        return min(99, 100 * (int(last.get("step", 0)) + 1) // DEMO_STEPS)
    except (OSError, ValueError, IndexError):
        return 0
