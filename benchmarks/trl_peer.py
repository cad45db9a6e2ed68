"""TRL's `GRPOTrainer` as the peer of `benchmarks.end_to_end`, with every option off that only costs time.

One generation a step, the whole batch in one forward and backward pass unless the shape says otherwise, no gradient
checkpointing, logging, saving or progress bar. `continuous` samples by `transformers`' continuous batching instead of
`generate`; `settings` gives the process our settings: threads that sleep, memory that is kept, libraries that the
collector skips. The trainer runs in its own thread, which waits at the end of a turn, so that the loop is TRL's own
throughout. TRL is not modified. Run by `rlvr bench end-to-end` and, if TRL is installed,
`tests/benchmarks/test_bench.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, Any

from benchmarks.measure import BenchSettings, TurnResult
from benchmarks.step_shape import BETA1, BETA2, StepShape, start_folder, tasks_and_reward
from rlvr.core.cpu_budget import restore_spinning

if TYPE_CHECKING:
    from rlvr.core.types import Task


def peer(setting: BenchSettings, shape: StepShape, continuous: bool = False, settings: bool = False) -> TrlTurn:
    """The started trainer, waiting before its first step."""
    if not settings:
        restore_spinning()  # before torch is loaded
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(setting.threads)
    datasets.disable_progress_bars()
    folder = str(start_folder(setting, shape))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tasks, reward = tasks_and_reward(shape, tokenizer)
    steps = TrlTurn(shape, continuous)
    rows = shape.rows_a_pass or shape.samples
    config = GRPOConfig(
        output_dir=str(setting.scratch / "trl"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=shape.samples // rows,
        num_generations=shape.size,
        steps_per_generation=shape.samples // rows,
        max_completion_length=shape.answer,
        max_steps=1 << 20,
        seed=shape.seed or 42,
        shuffle_dataset=False,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        scale_rewards="none",
        temperature=1.0,
        learning_rate=shape.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=BETA1,
        adam_beta2=BETA2,
        weight_decay=0.0,
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        bf16=setting.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        use_transformers_continuous_batching=continuous,
        transformers_continuous_batching_config=room(shape, tasks, tokenizer) if continuous else None,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=steps.watch(reward),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": str(t.prompt), **t.meta} for t in tasks]),
        processing_class=tokenizer,
        callbacks=[steps.callback()],
        peft_config=adapter(shape.lora) if shape.lora else None,
    )
    if settings:
        from rlvr.engine import malloc
        from rlvr.training.training_job import freeze_collector

        malloc.keep_freed_memory()
        steps.settings.enter_context(freeze_collector())
    return steps.start(trainer, tokenizer)


def adapter(rank: int) -> Any:
    """Ours: on all linear layers but the head, scaled by 1."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def room(shape: StepShape, tasks: list[Task], tokenizer: Any) -> dict[str, int]:
    """A cache sized for the rows of a step: the default takes half of the machine's memory and fills it."""
    longest = max(len(tokenizer.encode(str(task.prompt))) for task in tasks) + shape.answer
    page = 16
    return {
        "page_size": page,
        "num_blocks": shape.samples * (-(-longest // page) + 1),
        "max_batch_tokens": min(8192, shape.samples * longest),
    }


class TrlTurn:
    """The peer's turn: let the trainer run for `shape.steps` steps, and wait."""

    def __init__(self, shape: StepShape, continuous: bool) -> None:
        self.shape, self.continuous = shape, continuous
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.rollouts: list[tuple[list[str], list[list[int]], list[float]]] = []
        self.ends: list[float] = []
        self.until = inf
        self.error: BaseException | None = None
        self.settings = ExitStack()

    def watch(self, reward: Callable[..., list[float]]) -> Any:
        def watched(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any):
            values = reward(prompts=prompts, completions=completions, **columns)
            self.rollouts.append((prompts, completion_ids, values))
            return values

        return watched

    def callback(self) -> Any:
        from transformers import TrainerCallback

        steps = self

        class Gate(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                steps.stopped.release()
                steps.go.acquire()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                steps.ends.append(time.perf_counter())
                if len(steps.ends) == steps.shape.steps or steps.ends[-1] >= steps.until:
                    steps.stopped.release()
                    steps.go.acquire()

        return Gate()

    def start(self, trainer: Any, tokenizer: Any) -> TrlTurn:
        def work() -> None:
            try:
                trainer.train()
            except BaseException as error:  # any error must reach the waiting turn
                self.error = error
                self.stopped.release()

        self.model, self.tokenizer = trainer.model, tokenizer
        threading.Thread(target=work, daemon=True).start()
        self._wait()
        return self

    def _wait(self) -> None:
        self.stopped.acquire()
        if self.error is not None:
            raise self.error

    def train(self, seconds: float = inf) -> tuple[float, int]:
        """Let the trainer run for `shape.steps` steps, or to the end of the step in which `seconds` are over.

        Returns the seconds this took, and the steps.
        """
        self.rollouts.clear()
        self.ends.clear()
        began = time.perf_counter()
        self.until = began + seconds
        self.go.release()
        self._wait()
        return self.ends[-1] - began, len(self.ends)

    def __call__(self) -> TurnResult:
        seconds, _ = self.train()
        began = self.ends[-1] - seconds
        cost, points, with_signal = 0.0, [], 0.0
        for end, (prompts, answers, rewards) in zip(self.ends, self.rollouts, strict=True):
            points.append((end - began, sum(rewards) / len(rewards)))
            cost += self._computed(
                [len(ids) for ids in self.tokenizer(prompts)["input_ids"]], [len(a) for a in answers]
            )
            size = self.shape.size
            groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
            with_signal += sum(len(set(group)) > 1 for group in groups) / len(groups) / len(self.ends)
        facts = {"groups with signal": with_signal, "mean reward": sum(value for _, value in points) / len(points)}
        return TurnResult(self.shape.samples * self.shape.steps, seconds, cost, facts, tuple(points))

    def _computed(self, prompts: list[int], answers: list[int]) -> float:
        """Token passes: each prompt once for each completion, both padded to the longest."""
        padded = len(prompts) * (max(prompts) + max(answers))
        sampled = sum(prompts) + sum(n - 1 for n in answers) if self.continuous else padded - len(prompts)
        return float(sampled + 3 * padded)
