"""The model that an engine generator serves and trains: the one of `RLVR_MODEL`, or the demo's.

- a run's folder: its newest weights, trained with the run's client and environment;
- a model's folder or its name on the hub: a pretrained model under a new LoRA adapter;
- `tinker://...`, `tinker:BASE_MODEL`: saved weights or a base model at the Tinker server of TINKER_BASE_URL.

The demo is the model of the arithmetic job after a short supervised fine-tuning. On the first start `rlvr train` makes
it in a process of its own (under a minute on a quiet core) in the service's folder. It solves fewer than half of its
problems, so that sessions have something to learn. torch is imported when a model is opened, never before.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlvr.core.protocols import SamplingClient, TaskSource, TrainingClient
from rlvr.core.weights_place import WeightsKind, WeightsPlace
from rlvr.envs.prompt import PromptOptions, PromptWriter
from rlvr.envs.prompted_source import make_writer

if TYPE_CHECKING:
    from rlvr.service.learning.shared_learner import SharedLearner

VARIABLE = "RLVR_MODEL"  # the setting that names the model, for messages
LORA_RANK = 16
DEMO = "demo"
DEMO_STEPS = 600
DEMO_RUN = (
    "training.mode=sft",
    'env.kwargs={p: 13, operators: ["+", "-", "*"], complexity: [1, 2], flaw: 0.28}',
    'sft.curriculum={by: schedule, schedule: [[0, {"1": 1, "2": 2}]]}',
    f"sft.steps={DEMO_STEPS}",
    "sft.until=0",
    "model.config.max_position_embeddings=64",
    "evaluation.tasks=200",
    "evaluation.samples=2",
    "evaluation.every=0",
)
POLL_S = 0.5
GATHER_S = 0.01  # how long the first item waits for others that arrive at the same moment
T = TypeVar("T")
Say = Callable[[str], None]


@dataclass
class ServedModel:
    """A training client and what is known of its model. `source` has the tasks of its run's environment, if it has a
    run; `max_tokens` is the answer's token budget in its run, `prompt` how its model reads text. `learner` trains a
    policy that replicas share; the client is then a sampler."""

    client: TrainingClient | SamplingClient
    name: str
    kind: str  # local | tinker
    source: TaskSource | None = None
    max_tokens: int | None = None
    prompt: PromptOptions = field(default_factory=PromptOptions)
    notes: list[str] = field(default_factory=list[str])
    learner: SharedLearner | None = None

    @property
    def trainer(self) -> TrainingClient:
        assert self.learner is None
        return cast("TrainingClient", self.client)

    @cached_property
    def prompt_writer(self) -> PromptWriter:
        """Writes a user's prompt as the model read those of its run."""
        return make_writer(self.source, self.client.get_tokenizer(), self.prompt)

    @cached_property
    def reads_text(self) -> bool:
        """Whether the tokenizer can encode feedback; one with a vocabulary of words cannot."""
        tokenizer, text = self.client.get_tokenizer(), "draft: too short. Write more; a test fails."
        try:
            tokens = tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # each library raises its own error
            return False
        return tokenizer.decode(tokens, skip_special_tokens=True).strip() == text


def check_name(given: str, variable: str = VARIABLE) -> None:
    """ValueError for a name that must be a path and does not exist; the hub is not asked."""
    place = WeightsPlace.of(given)
    if given.startswith("tinker:") or place.folder.exists():
        return
    depth = len(place.folder.parts)  # `name` and `owner/name` may be the hub's
    if place.is_written_as_path or depth > 2 or (depth == 2 and place.folder.parent.is_dir()):
        raise ValueError(
            f"{variable}={given}: this folder does not exist; give a run's or a model's folder, or a hub name"
        )


def open_model(given: str, folder: Path, *, seed: int = 0, variable: str = VARIABLE) -> ServedModel:
    """Load the model that `given` names; its training is saved in `folder`. ValueError, which names the setting
    `variable`, if it cannot be loaded."""
    place = WeightsPlace.of(given)
    if given.startswith("tinker:"):
        return _open_remote(given, seed)
    if place.kind is WeightsKind.RUN:
        return _open_run(place.folder, folder, variable)
    if place.folder.is_dir() and not (place.is_model or place.kind is WeightsKind.GGUF):
        raise ValueError(
            f"{variable}={given}: the folder holds neither a run (resolved.yaml) nor a model (config.json); give one "
            "of these, or a model's name on the hub"
        )
    return _open_pretrained(str(place.folder) if place.folder.is_dir() else given, folder, seed)


def _open_run(place: Path, folder: Path, variable: str) -> ServedModel:
    from rlvr.runs.assembly import assemble
    from rlvr.runs.run_folder import prompt_options
    from rlvr.runs.weights import open_to_train, read_run
    from rlvr.training import journal

    checkpoint = journal.newest_checkpoint(place)
    if checkpoint is None:
        raise ValueError(f"{variable}={place}: this run has no complete checkpoint; train it first")
    assembly, notes = assemble(config := read_run(place)), list[str]()
    client = open_to_train(assembly, checkpoint, folder, notes.append)
    kind = "tinker" if assembly.spec.capabilities.is_remote else "local"
    name, most, prompt = f"run {place.name}", config.rollout.max_tokens, prompt_options(config, place)
    return ServedModel(client, name, kind, assembly.source, most, prompt, notes)


def _open_pretrained(name: str, folder: Path, seed: int) -> ServedModel:
    try:
        from rlvr.clients.local import LocalTrainingClient
        from rlvr.engine.engine import Engine
        from rlvr.engine.engine_options import LoraConfig
        from rlvr.engine.model_loading import load_model
        from rlvr.engine.tokenizer import load_tokenizer, silence_transformers
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; a local model needs: pip install 'rlvr[train]'") from error
    silence_transformers()
    logging.getLogger("huggingface_hub").handlers.clear()  # its records reach the root logger anyway
    engine = Engine(load_model(name, load_tokenizer(name), device="auto", dtype="auto"))
    policy = engine.create_policy("policy", lora=LoraConfig(rank=LORA_RANK, alpha=2 * LORA_RANK), seed=seed)
    return ServedModel(LocalTrainingClient(engine, policy, folder), name, "local", notes=list(engine.model.notes))


def _open_remote(given: str, seed: int) -> ServedModel:
    from rlvr.clients.tinker import SCHEME, connect
    from rlvr.engine.engine_options import LoraConfig

    start = given if given.startswith(SCHEME) else None
    base = None if start else given.removeprefix("tinker:")
    client = connect(base, start_from=start, lora=LoraConfig(rank=LORA_RANK), seed=seed)
    return ServedModel(client, client.base_model, "tinker")


def train_demo(state: Path, progress: Say, run: Sequence[str] = DEMO_RUN) -> Path:
    """Return the demo's run folder; train it first if it is missing or incomplete.

    `progress` is told the percentage. If it raises, training stops, and the next call resumes from the last checkpoint.
    A training process that an earlier service left running is waited for.
    """
    from rlvr.training.journal import RunLockedError, lock_folder

    folder = state / DEMO
    while not (folder / "summary.json").exists():
        progress(f"training {_percent(folder / 'metrics.jsonl')}%")
        try:
            if folder.exists():
                lock_folder(folder).close()
        except RunLockedError:
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
            [sys.executable, "-m", "rlvr.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
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
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise ValueError(f"training the demo's model failed (exit code {child.returncode}): {last[0][:300]}; see {log}")


def _percent(metrics: Path) -> int:
    """The progress of the fine-tuning, from the last line of its metrics."""
    try:
        with open(metrics, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            last: Any = json.loads(file.read().splitlines()[-1])
        return min(99, 100 * (int(last.get("step", 0)) + 1) // DEMO_STEPS)
    except (OSError, ValueError, IndexError):
        return 0


def take_batch(waiting: queue.Queue[T | None], most: int) -> list[T] | None:
    """Wait for an item and take up to `most`. None marks the end: it is returned once no item is before it."""
    first = waiting.get()
    if first is None:
        return None
    time.sleep(GATHER_S)
    batch = [first]
    with suppress(queue.Empty):
        while len(batch) < most:
            if (item := waiting.get_nowait()) is None:
                waiting.put(None)
                break
            batch.append(item)
    return batch
