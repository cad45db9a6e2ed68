"""TRL's `GRPOTrainer` as the peer of `rlvr.bench.end_to_end`, with nothing on that costs time.

One generation a step, the whole batch in one forward and backward, no gradient checkpointing, no logging, saving or
progress. `continuous` samples by `transformers`' continuous batching instead of `generate`; `settings` gives its
process what ours has: threads that sleep, memory that stays, libraries that the collector leaves alone. The trainer
runs in a thread of its own and waits at the end of a turn, so that its loop is TRL's own from beginning to end. Nothing
of TRL is changed. Exercised by `rlvr bench end-to-end` and, where TRL is installed, `tests/test_bench.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rlvr.bench.measure import Done, Setting, Turn
from rlvr.cores import loud_threads

if TYPE_CHECKING:
    from rlvr.bench.end_to_end import Shape
    from rlvr.types import Task


def peer(setting: Setting, shape: Shape, continuous: bool = False, settings: bool = False) -> Turn:
    if not settings:
        loud_threads()  # before torch is loaded
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from rlvr.bench.end_to_end import BETA1, BETA2, LEARNING_RATE, start_folder, tasks_and_reward

    torch.set_num_threads(setting.threads)
    datasets.disable_progress_bars()
    folder = str(start_folder(setting, shape))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tasks, reward = tasks_and_reward(shape, tokenizer)
    steps = Steps(shape, continuous)
    config = GRPOConfig(
        output_dir=str(setting.scratch / "trl"),
        per_device_train_batch_size=shape.samples,
        num_generations=shape.size,
        steps_per_generation=1,
        max_completion_length=shape.answer,
        max_steps=1 << 20,
        shuffle_dataset=False,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        scale_rewards="none",
        temperature=1.0,
        learning_rate=LEARNING_RATE,
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
    )
    if settings:
        from rlvr.engine import heap
        from rlvr.training.job import settled

        heap.keep()
        steps.held.enter_context(settled())
    return steps.start(trainer.train, tokenizer)


def room(shape: Shape, tasks: list[Task], tokenizer: Any) -> dict[str, int]:
    """A cache for exactly the rows of a step: by default it takes half of the machine's memory, and fills it."""
    longest = max(len(tokenizer.encode(str(task.prompt))) for task in tasks) + shape.answer
    page = 16
    return {
        "page_size": page,
        "num_blocks": shape.samples * (-(-longest // page) + 1),
        "max_batch_tokens": min(8192, shape.samples * longest),
    }


class Steps:
    """The peer's turn: lets the trainer go on for so many steps, and waits."""

    def __init__(self, shape: Shape, continuous: bool) -> None:
        self.shape, self.continuous = shape, continuous
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.rollouts: list[tuple[list[str], list[list[int]], list[float]]] = []
        self.ends: list[float] = []
        self.error: BaseException | None = None
        self.held = ExitStack()

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
                if len(steps.ends) == steps.shape.steps:
                    steps.stopped.release()
                    steps.go.acquire()

        return Gate()

    def start(self, train: Callable[[], Any], tokenizer: Any) -> Turn:
        def work() -> None:
            try:
                train()
            except BaseException as error:  # whatever it is, the one who waits must hear of it
                self.error = error
                self.stopped.release()

        self.tokenizer = tokenizer
        threading.Thread(target=work, daemon=True).start()
        self._wait()
        return self

    def _wait(self) -> None:
        self.stopped.acquire()
        if self.error is not None:
            raise self.error

    def __call__(self) -> Done:
        self.rollouts.clear()
        self.ends.clear()
        began = time.perf_counter()
        self.go.release()
        self._wait()
        cost, points, teaching = 0.0, [], 0.0
        for end, (prompts, answers, rewards) in zip(self.ends, self.rollouts, strict=True):
            points.append((end - began, sum(rewards) / len(rewards)))
            cost += self._computed(
                [len(ids) for ids in self.tokenizer(prompts)["input_ids"]], [len(a) for a in answers]
            )
            size = self.shape.size
            groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
            teaching += sum(len(set(group)) > 1 for group in groups) / len(groups) / len(self.ends)
        facts = {"groups that teach": teaching, "mean reward": sum(value for _, value in points) / len(points)}
        return Done(self.shape.samples * self.shape.steps, self.ends[-1] - began, cost, facts, tuple(points))

    def _computed(self, prompts: list[int], answers: list[int]) -> float:
        """Token passes: every prompt for each of its samples, padded to the longest, as is every answer."""
        padded = len(prompts) * (max(prompts) + max(answers))
        sampled = sum(prompts) + sum(n - 1 for n in answers) if self.continuous else padded - len(prompts)
        return float(sampled + 3 * padded)
