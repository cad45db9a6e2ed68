"""Whether tinker-cookbook's own arithmetic run learns against `rlvr serve engine`. Takes minutes on two cores.

    python benchmarks/tinker_cookbook.py [--steps 40] [--seed 0] [--model FOLDER] [--keep FOLDER]

A tiny model is fine-tuned on sums, and to answer with a question mark half of the time. The unmodified recipe
`math_rl.train env=arithmetic` then trains it, and the mean reward of the last five batches is tested against that of
the first five (one-sided Welch t-test). Needs tinker-cookbook and pylatexenc beside the extras [train,serve,tinker].
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit")]  # the servers that the tests start
NAME = "Qwen/Qwen3-8B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=int, default=900)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--model", type=Path, help="A model that tests/kit/tinker_model.py wrote.")
    parser.add_argument("--keep", type=Path, help="A folder that keeps the recipe's log and the server's state.")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from scipy.stats import ttest_ind

    from tests.kit.tinker_model import write_model
    from tests.kit.tinker_server import TinkerServer

    with tempfile.TemporaryDirectory() as scratch:
        place = asked.keep or Path(scratch)
        (place / NAME).parent.mkdir(parents=True, exist_ok=True)
        if asked.model:
            (place / NAME).symlink_to(asked.model.absolute())
        else:
            write_model(place / NAME, steps=asked.warm_up)
        with TinkerServer({NAME: place / NAME}, place / "state") as server:
            environment = {
                "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
            }  # fmt: skip
            options = {
                "env": "arithmetic", "model_name": NAME, "loss_fn": "importance_sampling", "group_size": 16,
                "groups_per_batch": 16, "lora_rank": 16, "learning_rate": asked.learning_rate,
                "max_steps": asked.steps, "seed": asked.seed, "log_path": "log",
            }  # fmt: skip
            command = [sys.executable, "-m", "tinker_cookbook.recipes.math_rl.train"]
            command += [f"{name}={value}" for name, value in options.items()]
            with (place / "recipe.log").open("w") as log:
                subprocess.run(
                    command, cwd=place, env={**os.environ, **environment}, stdout=log, stderr=log, check=True
                )
        lines = (place / "log" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [row["env/all/reward/total"] for row in map(json.loads, lines) if "env/all/reward/total" in row]
    first, last = rewards[:5], rewards[-5:]
    test: Any = ttest_ind(last, first, equal_var=False, alternative="greater")
    print("reward per batch:", " ".join(f"{reward:.3f}" for reward in rewards))
    print(f"first five {sum(first) / 5:.3f}, last five {sum(last) / 5:.3f}, p = {test.pvalue:.2g}")


if __name__ == "__main__":
    main()
