"""What else runs on the cores: verification beside sampling, and torch's threads beside another busy process.

`overlap` and `overlap-busy` collect a step's answers with verification in sandbox processes that takes as long as the
sampling does: by waiting, and by computing. The other side is the same step with a verifier that is asked when all is
sampled. `threads-beside-busy` makes whole steps with a thread a core while another process keeps one core busy: with
threads that sleep while they wait (ours), that spin (what torch does when nobody tells it), and with one thread.
Exercised by `tests/test_bench.py`. Left out on purpose: peers. These are choices that any trainer on torch has.
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

from rlvr.bench.end_to_end import Shape, ours
from rlvr.bench.measure import Case, Done, Setting, Turn
from rlvr.bench.workloads import QWEN_3M, Prompts, built_folder, sums
from rlvr.cores import OTHERS, POLICY, cores, loud_threads, quiet_threads

GROUPS, SIZE, ANSWER, ROWS = 48, 4, 128, 32  # rows at once: groups end all the time, as in long runs
WAITING_WORKERS = 8
PROGRAMS = {
    "waits": "import time\ntime.sleep({seconds})\nx = 1",
    "computes": "import time\nwhile time.process_time() < {seconds}:\n    pass\nx = 1",
}


def cases(setting: Setting) -> list[Case]:
    """Two kinds of verification, and two ways for threads to wait."""
    step = f"3 M parameters, {GROUPS} prompts x {SIZE} answers of up to {ANSWER} tokens"
    both = [
        Case(
            name=name,
            unit="answers",
            work=f"{step}; verification {kind} as long as sampling takes",
            ours=partial(collecting, setting, kind, "processes"),
            peers={"one after the other": partial(collecting, setting, kind, "")},
        )
        for name, kind in (("overlap", "waits"), ("overlap-busy", "computes"))
    ]
    beside = Case(
        name="threads-beside-busy",
        unit="samples",
        work=f"3 M parameters, a thread on each of {cores()} cores, one other process that never waits",
        ours=partial(beside_busy, setting, True),
        peers={
            "threads that spin": partial(beside_busy, setting, False),
            "one thread": partial(beside_busy, setting, True, 1),
        },
    )
    return [*both, beside]


def collecting(setting: Setting, kind: str, waits: Any) -> Turn:
    """The turn that samples and verifies a step's answers."""
    import torch

    from rlvr.algorithms.rows import resolve_algorithm
    from rlvr.clients.local import LocalTrainingClient
    from rlvr.engine.engine import Engine
    from rlvr.engine.model import load_model
    from rlvr.engine.options import EngineLimits
    from rlvr.engine.tokenizer import load_tokenizer
    from rlvr.messages import SamplingParams
    from rlvr.reward import Reward, resolve_reward
    from rlvr.reward.registry import Entry
    from rlvr.sandbox import Sandbox
    from rlvr.training.curriculum import Curriculum, CurriculumOptions
    from rlvr.training.options import TrainingOptions
    from rlvr.training.step import Trainer
    from rlvr.types import Outcome

    folder = built_folder(setting.scratch / "qwen-3m-raw", QWEN_3M, "characters", "0123456789+-=")
    torch.set_num_threads(setting.threads)
    model = load_model(str(folder), load_tokenizer(str(folder)), device="cpu", dtype=setting.dtype)
    engine = Engine(model, EngineLimits(threads=setting.threads, max_rows=ROWS))
    client = LocalTrainingClient(engine, engine.create_policy("policy"), setting.scratch)
    workers = WAITING_WORKERS if kind == "waits" else max(1, cores() - setting.threads)
    sandbox = Sandbox(workers=workers)
    seconds = [0.0]

    def verified(prompts: Sequence[str], responses: Sequence[str], metas: Any = None) -> list[float]:
        job = {"solution": PROGRAMS[kind].format(seconds=seconds[0]), "tests": ["assert x == 1"], "timeout_s": 60.0}
        return [float(verdict.outcome is Outcome.PASSED) for verdict in sandbox.verify_many([job] * len(responses))]

    groups = GROUPS // 4 if setting.quick else GROUPS
    source = Prompts("sums", sums(groups), [], "")

    def trainer(reward: Reward) -> Trainer:
        return Trainer(
            client, source, reward, resolve_algorithm("ppo"), SamplingParams(max_tokens=ANSWER),
            TrainingOptions(steps=1 << 20, prompts_per_step=groups, group_size=SIZE),
            Curriculum(source, CurriculumOptions(), seed=0), seed=0, warn=print,
        )  # fmt: skip

    alone = trainer(resolve_reward("length_penalty"))
    alone.collect(0)
    found = alone.collect(0).seconds_sampling * workers / (groups * SIZE)
    seconds[0] = agreed(setting.scratch / f"overlap-{kind}.json", found)
    step = trainer(Reward("verified", Entry(verified, batched=True, waits=waits)))

    def turn() -> Done:
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
        return Done(groups * SIZE, whole, facts=facts)

    return turn


def agreed(file: Path, found: float) -> float:
    """The figure that the first side found: both do the same work."""
    if not file.exists():
        file.write_text(json.dumps(found), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def beside_busy(setting: Setting, quiet: bool, threads: int = 0) -> Turn:
    """The turn that makes steps beside a process that never waits; how many times as long as alone is a fact."""
    for name in (POLICY, *OTHERS):
        os.environ.pop(name, None)
    quiet_threads()  # before torch is loaded, below
    if not quiet:
        loud_threads()
    shape = Shape("beside-busy", 8 if setting.quick else 32, 8, 0, 8, steps=1)
    step = ours(replace(setting, threads=threads or cores()), shape)

    def turn() -> Done:
        began = time.perf_counter()
        step()
        alone = time.perf_counter() - began
        with busy():
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
        return Done(shape.samples, seconds, facts={"times as long as alone": seconds / alone})

    return turn


@contextmanager
def busy() -> Iterator[None]:
    """A process that takes all of a core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
