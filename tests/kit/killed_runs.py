"""Runs that are killed with SIGKILL at random instants until they are done.

The processes are forked from one that has imported torch, so that imports are not what is killed; each executes the
command that a user would type again. Instants are drawn in seconds of a core, which do not depend on other load, plus a
short wait, which reaches what waits for a disk.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.kit.forked_process import run_forked

CONFIG = """
seed: 3
env: ENVIRONMENT
model:
  tokenizer: words
  device: cpu
  config: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 32}
  LORA
rollout: {max_tokens: 10}
curriculum: {by: pass_rate}
sft: {steps: 12, batch_size: 16, until: 0.9, check_every: 5, optimizer: {MUON learning_rate: 0.01}}
training: {steps: 14, patience: 9, prompts_per_step: 6, group_size: 4, dynamic_sampling: 1, num_substeps: 2,
           optimizer: {learning_rate: 0.001}}
evaluation: {tasks: 30, samples: 2, every: 3, report: best, interim_tasks: 10, interim_samples: 2}
run: {checkpoint_every: 4, rollouts_per_step: 4}
engine: {threads: 1}
"""
ARITHMETIC = "{name: rpn_arithmetic, kwargs: {complexity: [1, 2], flaw: 0.3}}"
MUON = "name: muon, matrix_learning_rate: 0.02,"  # not for an adapter; the RL steps after it are AdamW's


DRIVER = """
import os, random, signal, sys, time
sys.path.insert(0, os.getcwd())
import torch, transformers  # noqa: F401
import rlvr.runs.build_job, rlvr.clients.local, rlvr.training.loop, rlvr.cli.main  # noqa: F401
command, seed, most, longest = sys.argv[1].split("|"), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
rng, kills, tick = random.Random(seed), 0, os.sysconf("SC_CLK_TCK")

def used(child):
    with open(f"/proc/{child}/stat") as stat:
        return sum(map(int, stat.read().rpartition(")")[2].split()[11:13])) / tick

def start():
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as quiet:
            os.dup2(quiet.fileno(), 1)
        os._exit(rlvr.cli.main.run(command))
    return child

while True:
    child, enough, later = start(), rng.uniform(0.02, longest), rng.uniform(0, 0.05)
    status = None
    while status is None:
        done, code, usage = os.wait4(child, os.WNOHANG)
        if done:
            status = code
        elif kills < most and used(child) > enough:
            time.sleep(later)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
            break
        else:
            time.sleep(0.002)
    if status is not None:
        seconds = usage.ru_utime + usage.ru_stime
        print(f"kills {kills} exit {os.waitstatus_to_exitcode(status)} after {seconds} of a core")
        break
"""


CALM: dict[tuple[str, ...], float] = {}  # core seconds of a run that was not killed


def run_until_done(
    folder: Path, seed: int, kills: int, lora: str, *words: str, environment: str = ARITHMETIC
) -> tuple[int, dict[str, object], list[dict[str, object]]]:
    folder.mkdir()
    text = CONFIG.replace("LORA", lora).replace("MUON", "" if lora else MUON).replace("ENVIRONMENT", environment)
    (folder / "tiny.yaml").write_text(text)
    command = ["train", f"--config={folder / 'tiny.yaml'}", f"run.root={folder / 'runs'}", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    longest = 0.4 * CALM.get((lora, *words), 1.0)  # what one life may have: too little for the whole run
    driver = ["-c", DRIVER, "|".join(command), str(seed), str(kills), str(longest)]
    done = run_forked(driver, timeout=500, env=env, cwd=Path(__file__).parents[2])
    assert "exit 0" in done.stdout, done.stdout + done.stderr[-3000:]
    if not kills:
        CALM[(lora, *words)] = float(done.stdout.split()[-4])
    run = folder / "runs" / "tiny"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("tokens_per_second", "env/all/agent_seconds")
    kept = [{k: v for k, v in row.items() if not k.startswith("time/") and k not in timed} for row in rows]
    summary = json.loads((run / "summary.json").read_text())
    del summary["seconds"]
    return int(done.stdout.split()[1]), summary, kept
