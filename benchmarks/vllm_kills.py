"""Whether a run with `sampler.name=vllm` loses a step or trains one twice when the run and the server are killed.

    RLVR_VLLM=.venv-vllm/bin/python python benchmarks/vllm_kills.py                     # 10 kills of each, adapters
    RLVR_VLLM=.venv-vllm/bin/python python benchmarks/vllm_kills.py --all-weights --run-kills 15 --server-kills 5

A small run trains against vLLM for CPUs. In turns the run and the server are killed by SIGKILL, at a random moment
after a step was recorded, and started again: the run by the same command, the server with the weights of its first
start. Then the journal, the metrics, the stored completions and the last checkpoint are compared with each other and
with an undisturbed run. Exits with 1 if a step is missing, was trained twice or was sampled by other weights than those
that it trained. Needs vLLM in an environment of its own (`make vllm-env`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import rlvr.cli.main  # noqa: E402
import rlvr.clients.local  # noqa: E402 - what a run imports
import rlvr.runs.build_job  # noqa: E402
import rlvr.training.loop  # noqa: E402
from benchmarks.vllm_process import ADAPTERS, MISSING, PYTHON, VllmProcess  # noqa: E402
from rlvr.training.journal import list_checkpoints  # noqa: E402

TASKS = "{p: 5, complexity: [1, 2], flaw: 0.3}"
WARM_UP = """
env: {{name: rpn_arithmetic, kwargs: {tasks}}}
model:
  tokenizer: words
  device: cpu
  config: {{model_type: qwen3, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 64, tie_word_embeddings: false}}
sft: {{steps: 300, batch_size: 32, optimizer: {{learning_rate: 0.01}}}}
training: {{mode: sft}}
evaluation: {{tasks: 50, samples: 1}}
run: {{root: {root}}}
engine: {{threads: 1}}
"""
CONFIG = """
seed: 3
env: {{name: rpn_arithmetic, kwargs: {tasks}}}
model: {{name: {model}, device: cpu{lora}}}
sampler: {{name: vllm, urls: [{url}], wait_s: 900}}
rollout: {{max_tokens: 10}}
training: {{steps: {steps}, prompts_per_step: 8, group_size: 8, optimizer: {{learning_rate: 0.001}}}}
evaluation: {{tasks: 100, samples: 4}}
run: {{root: {root}, checkpoint_every: 2, rollouts_per_step: 64}}
engine: {{threads: 1}}
"""


class KillableRun:
    """The run and its command, which starts it and continues it.

    Its process is forked from this one, which has imported torch, so that imports are not what is killed.
    """

    def __init__(self, config: Path) -> None:
        self.folder = config.parent / "runs" / config.stem
        self._command = ["train", f"--config={config}"]
        self._log = config.parent / "log"
        self._process, self._status = 0, None

    def start(self) -> None:
        self._status = None
        self._process = os.fork()
        if self._process == 0:
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os._exit(rlvr.cli.main.run(self._command))

    def kill(self) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def is_over(self) -> bool:
        """Whether it ended; RuntimeError if it failed."""
        if self._status is None:
            ended, status = os.waitpid(self._process, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        if self._status:
            raise RuntimeError(f"the run failed ({self._status}):\n{self._log.read_text()[-3000:]}")
        return self._status is not None

    def count_events(self) -> int:
        """Lines of the journal and of the metrics: grows with every step and checkpoint."""
        files = (self.folder / name for name in ("journal.jsonl", "metrics.jsonl"))
        return sum(file.read_bytes().count(b"\n") for file in files if file.exists())

    def finish(self) -> None:
        while not self.is_over():
            time.sleep(0.2)


def prepare(file: Path, config: str) -> KillableRun:
    file.write_text(config)
    return KillableRun(file)


def kill_in_turns(
    run: KillableRun, server: VllmProcess, kinds: list[str], dice: random.Random, say: Callable[[str], None]
) -> Counter[str]:
    """Kill what `kinds` lists, each after the run got further by an event; how often each was killed."""
    done = Counter[str]()
    for kind in kinds:
        before = run.count_events()
        while run.count_events() <= before and not run.is_over():
            time.sleep(0.02)
        time.sleep(dice.uniform(0.0, 1.0))
        if run.is_over():
            break
        began = time.monotonic()
        if kind == "run":
            run.kill()
            run.start()
        else:
            server.stop(signal.SIGKILL)
            server.launch()
            server.wait_until_ready()
        done[kind] += 1
        say(f"kill {done.total()}: the {kind}, after {before} events; {time.monotonic() - began:.0f} s")
    return done


def find_differences(folder: Path, steps: int) -> list[str]:
    """Where the run's own records contradict each other or the number of steps."""
    found: list[str] = []
    rows = _read_lines(folder / "metrics.jsonl")
    numbers, version = [row["step"] for row in rows], 0
    if numbers != list(range(steps)):
        found.append(f"steps in the metrics: {numbers}")
    for row in rows:
        names = {c["policy_fingerprint"] for c in _read_lines(folder / "rollouts" / f"rl-{row['step']:06d}.jsonl")}
        if len(names) != 1 or not next(iter(names)).startswith(f"policy-{version}-"):
            found.append(f"step {row['step']} was sampled by {sorted(names)}, expected version {version}")
        version += int(row["updates"])
    policy = json.loads((list_checkpoints(folder)[0] / "policy.json").read_text())
    if policy["version"] != version or set(policy["optimizer_steps"].values()) != {version}:
        found.append(f"the last checkpoint has version {policy['version']}, the metrics count {version} updates")
    events = [event["event"] for event in _read_lines(folder / "journal.jsonl")]
    if events.count("finished") != 1 or events[-1] != "finished":
        found.append("the journal does not end with one `finished`")
    if version < steps / 2:
        found.append(f"{version} updates in {steps} steps: too few to see one that was lost or made twice")
    if left := [place.name for place in (folder / "checkpoints").glob("*published-*")]:
        found.append(f"published weights were left: {left}")
    return found


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def describe(folder: Path) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    rates = [summary[when]["pass@1"] for when in ("baseline", "final")]
    before, after = (f"{100 * r['value']:.1f}% [{100 * r['low']:.1f}, {100 * r['high']:.1f}]" for r in rates)
    return f"{before}, then {after}; weights {summary['weights_sha256'][:12]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-kills", type=int, default=10)
    parser.add_argument("--server-kills", type=int, default=10)
    parser.add_argument("--all-weights", action="store_true", help="train all weights instead of an adapter")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if not PYTHON:
        raise SystemExit(MISSING)
    dice = random.Random(asked.seed)
    kinds = ["run"] * asked.run_kills + ["server"] * asked.server_kills
    dice.shuffle(kinds)
    scratch = Path(tempfile.mkdtemp(prefix="rlvr-kills-"))
    try:
        warm_up = prepare(scratch / "warm-up.yaml", WARM_UP.format(tasks=TASKS, root=scratch / "runs"))
        warm_up.start()
        warm_up.finish()
        trained, model = list_checkpoints(warm_up.folder)[0], scratch / "model"
        shutil.copytree(trained, model, ignore=shutil.ignore_patterns("optimizer.*"))  # vLLM loads every safetensors
        flags = () if asked.all_weights else ADAPTERS
        with VllmProcess(model, scratch / "server", *flags, max_model_len=64) as server:
            lora = "" if asked.all_weights else ", lora: {rank: 8}"
            settings = {"tasks": TASKS, "model": model, "lora": lora, "url": server.url, "steps": asked.steps}
            config = CONFIG.format(**settings, root=scratch / "runs")
            runs = [prepare(scratch / f"{name}.yaml", config) for name in ("calm", "killed")]
            runs[0].start()
            runs[0].finish()
            runs[1].start()
            done = kill_in_turns(runs[1], server, kinds, dice, lambda text: print(text, flush=True))
            runs[1].finish()
        differ = find_differences(runs[0].folder, asked.steps) + find_differences(runs[1].folder, asked.steps)
        print(f"{dict(done)} kills in {asked.steps} steps of {'all weights' if asked.all_weights else 'an adapter'}")
        print(f"undisturbed: {describe(runs[0].folder)}")
        print(f"killed:      {describe(runs[1].folder)}")
        print(f"differences: {len(differ)}", *differ, sep="\n  ")
        if done.total() < len(kinds):
            print(f"the run ended before {len(kinds) - done.total()} more kills: give a larger --steps")
    finally:
        shutil.rmtree(scratch)
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
