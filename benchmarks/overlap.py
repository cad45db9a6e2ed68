"""What shares the cores: verification beside sampling, and torch's threads beside another busy process.

`overlap` and `overlap-busy` collect a step's completions while sandbox processes verify them for as long as sampling
takes, by waiting or by computing; the other side verifies when all are sampled. `threads-beside-busy` makes whole steps
with one thread a core while another process keeps one core busy: with threads that sleep while they wait (ours), that
spin (torch's default), and with one thread. Left out on purpose: peers. Any trainer on torch has these choices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import ours
from benchmarks.measure import BenchmarkCase, BenchSettings, Turn, TurnResult
from benchmarks.step_shape import StepShape
from benchmarks.workloads import QWEN_3M, OrderedPrompts, build_folder, sums
from rlvr.core.cpu_budget import OTHERS, POLICY, available_cores, limit_spinning, restore_spinning

GROUPS, SIZE, ANSWER, ROWS = 48, 4, 128, 32  # rows at once: groups end all the time, as in long runs
WAITING_WORKERS = 8
PROGRAMS = {
    "waits": "import time\ntime.sleep({seconds})\nx = 1",
    "computes": "import time\nwhile time.process_time() < {seconds}:\n    pass\nx = 1",
}


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """Two kinds of verification, and two ways for threads to wait."""
    step = f"3 M parameters, {GROUPS} prompts x {SIZE} answers of up to {ANSWER} tokens"
    both = [
        BenchmarkCase(
            name=name,
            unit="answers",
            work=f"{step}; verification {kind} as long as sampling takes",
            ours=partial(collect_turn, setting, kind, "processes"),
            peers={"one after the other": partial(collect_turn, setting, kind, "")},
        )
        for name, kind in (("overlap", "waits"), ("overlap-busy", "computes"))
    ]
    beside = BenchmarkCase(
        name="threads-beside-busy",
        unit="samples",
        work=f"3 M parameters, a thread on each of {available_cores()} cores, one other process that never waits",
        ours=partial(steps_beside_busy, setting, True),
        peers={
            "threads that spin": partial(steps_beside_busy, setting, False),
            "one thread": partial(steps_beside_busy, setting, True, 1),
        },
    )
    return [*both, beside]


def collect_turn(setting: BenchSettings, kind: str, waits_for: Any) -> Turn:
    """The turn that samples and verifies a step's completions."""
    import torch

    from rlvr.algorithms.registry import resolve_algorithm
    from rlvr.clients.local import LocalTrainingClient
    from rlvr.core.messages import SamplingParams
    from rlvr.core.types import Outcome
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer
    from rlvr.reward import Reward, resolve_reward
    from rlvr.reward.registry import RewardSpec
    from rlvr.sandbox import Sandbox
    from rlvr.training.curriculum import Curriculum, CurriculumOptions
    from rlvr.training.monitor import Monitor
    from rlvr.training.parts import TrainerParts
    from rlvr.training.schedules.sync import Synchronous
    from rlvr.training.trainer import Trainer
    from rlvr.training.training_options import TrainingOptions

    folder = build_folder(setting.scratch / "qwen-3m-raw", QWEN_3M, "characters", "0123456789+-=")
    torch.set_num_threads(setting.threads)
    model = load_model(str(folder), load_tokenizer(str(folder)), device="cpu", dtype=setting.dtype)
    engine = Engine(model, EngineLimits(threads=setting.threads, max_rows=ROWS))
    client = LocalTrainingClient(engine, engine.create_policy("policy"), setting.scratch)
    workers = WAITING_WORKERS if kind == "waits" else max(1, available_cores() - setting.threads)
    sandbox = Sandbox(workers=workers)
    seconds = [0.0]

    def verified(prompts: Sequence[str], responses: Sequence[str], metas: Any = None) -> list[float]:
        job = {"solution": PROGRAMS[kind].format(seconds=seconds[0]), "tests": ["assert x == 1"], "timeout_s": 60.0}
        return [float(verdict.outcome is Outcome.PASSED) for verdict in sandbox.verify_many([job] * len(responses))]

    groups = GROUPS // 4 if setting.quick else GROUPS
    source = OrderedPrompts("sums", sums(groups), [], "")

    options = TrainingOptions(steps=1 << 20, prompts_per_step=groups, group_size=SIZE)

    def schedule(reward: Reward) -> Synchronous:
        parts = TrainerParts(
            client, source, reward, resolve_algorithm("ppo"), SamplingParams(max_tokens=ANSWER), options,
            Curriculum(source, CurriculumOptions(), seed=0), seed=0,
        )  # fmt: skip
        return Synchronous(Trainer(parts, Monitor(options, print)))

    alone = schedule(resolve_reward("length_penalty"))
    alone.collect(0)
    found = alone.collect(0).seconds_sampling * workers / (groups * SIZE)
    seconds[0] = shared_figure(setting.scratch / f"overlap-{kind}.json", found)
    step = schedule(Reward("verified", RewardSpec(verified, batched=True, waits_for=waits_for)))

    def turn() -> TurnResult:
        sampling = alone.collect(0).seconds_sampling  # each time: how busy the machine is changes
        began = time.perf_counter()
        collected = step.collect(0)
        whole = time.perf_counter() - began
        facts = {
            "a program (s)": seconds[0],
            "sampling alone (s)": sampling,
            "time/sampling": collected.seconds_sampling,
            "time/scoring": collected.seconds_scoring,
            "whole (s)": whole,
        }
        return TurnResult(groups * SIZE, whole, facts=facts)

    return turn


def shared_figure(file: Path, measured: float) -> float:
    """The figure that the first side measured, so that both do the same work."""
    if not file.exists():
        file.write_text(json.dumps(measured), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def steps_beside_busy(setting: BenchSettings, quiet: bool, threads: int = 0) -> Turn:
    """The turn that makes steps beside a busy process; the slowdown against running alone is a fact."""
    for name in (POLICY, *OTHERS):
        os.environ.pop(name, None)
    limit_spinning()  # before torch is loaded, below
    if not quiet:
        restore_spinning()
    shape = StepShape("beside-busy", 8 if setting.quick else 32, 8, 0, 8, steps=1)
    step = ours(replace(setting, threads=threads or available_cores()), shape)

    def turn() -> TurnResult:
        began = time.perf_counter()
        step()
        alone = time.perf_counter() - began
        with busy_process():
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
        return TurnResult(shape.samples, seconds, facts={"times as long as alone": seconds / alone})

    return turn


@contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
