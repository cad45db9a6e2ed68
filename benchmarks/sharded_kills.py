"""A run of `client=sharded` whose processes are killed at random instants ends with the bits of one left alone.

    python -m benchmarks.sharded_kills --kills 20 --seed 1

Every life is the same command. Each kill takes a rank or the driver, by turns drawn from the seed, with SIGKILL while
the run trains. Then no process of that life may be left, and the command is given again. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = """
seed: 3
client: sharded
sharding: {ranks: 2, timeout_s: 300}
env: {name: rpn_arithmetic, kwargs: {complexity: [1, 2], flaw: 0.3}}
model:
  tokenizer: words
  device: cpu
  config: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 32}
rollout: {max_tokens: 10}
sft: {steps: 30, batch_size: 16, optimizer: {name: muon, matrix_learning_rate: 0.02, learning_rate: 0.01}}
training: {steps: 20, prompts_per_step: 6, group_size: 4, num_substeps: 2, optimizer: {learning_rate: 0.001}}
evaluation: {tasks: 30, samples: 2}
run: {checkpoint_every: 1}
engine: {threads: 2}
"""


def list_ranks(driver: int) -> list[int]:
    """The ranks of a driver: its children that run one."""
    found: list[int] = []
    for child in Path(f"/proc/{driver}/task").glob("*/children"):
        for pid in child.read_text().split():
            if b"rank_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def live(folder: Path, name: str, kill_after: float | None, victim: int) -> tuple[bool, float]:
    """One life of the run, killed so many seconds after its ranks train; whether it ended by itself, and how long it
    trained. `victim` 0 is the driver, else the rank of that number."""
    command = [sys.executable, "-m", "rlvr", "train", f"--config={folder / 'run.yaml'}"]
    command += [f"run.root={folder}", f"run.name={name}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    rows = folder / name / "metrics.jsonl"
    before = rows.stat().st_size if rows.exists() else 0
    with open(folder / f"{name}.log", "w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        ranks: list[int] = []
        began = 0.0
        while driver.poll() is None:
            ranks = ranks or list_ranks(driver.pid)
            if not began and rows.exists() and rows.stat().st_size != before:
                began = time.monotonic()  # the first step of this life is done
                ranks = list_ranks(driver.pid)
            if began and kill_after is not None and time.monotonic() > began + kill_after:
                os.kill(ranks[victim - 1] if victim else driver.pid, signal.SIGKILL)
                break
            time.sleep(0.005)
        code = driver.wait()
    trained = time.monotonic() - began
    deadline = time.monotonic() + 30
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, ranks)), "ranks are left after their driver"
    text = (folder / f"{name}.log").read_text()
    assert code in (0, 1, -signal.SIGKILL), text
    assert code != 1 or "same command" in text, text
    return code == 0, trained


def run_killed(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    (folder / "run.yaml").write_text(CONFIG)
    draws = random.Random(seed)
    is_done, length = live(folder, "calm", None, 0)
    assert is_done
    made = {"driver": 0, "rank": 0}
    is_done = False
    while not is_done:
        may_kill = sum(made.values()) < kills
        victim = draws.choice([0, 1, 2])
        instant = draws.uniform(0, 2 * length / max(1, kills)) if may_kill else None
        is_done, _ = live(folder, "killed", instant, victim)
        made["rank" if victim else "driver"] += may_kill and not is_done
    outcomes = [summarize(folder / name) for name in ("calm", "killed")]
    return {"seed": seed, "kills": made, "seconds_of_training": round(length, 1), "equal": outcomes[0] == outcomes[1]}


def summarize(run: Path) -> tuple[str, Any, list[dict[str, Any]]]:
    """The hash of the last weights, the evaluation, and the rows of metrics without what a clock gave."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "tokens_per_second", "ranks/")
    kept = [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]
    return summary["weights_sha256"], summary["final"], kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_killed(Path(folder), given.kills, given.seed)
    print(json.dumps(found))
    sys.exit(not found["equal"])


if __name__ == "__main__":
    main()
