"""Code generation on MBPP from one dictionary: `python examples/rlvr_train.py [key=value ...]`.

    python examples/rlvr_train.py base_model=./my-model env.kwargs.path=mbpp.jsonl

Every answer is run against its problem's tests in a sandbox; the results table comes at the end, and the same command
goes on where a stopped run was. What is typed replaces the dictionary's value of the same name, and any other key of a
config may be typed too. The names in it are other systems' words, which a config takes as well
(docs/reference/configuration.md).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvr.cli.main import run

config = {
    "base_model": "meta-llama/Llama-3.2-1B",
    "lora_rank": 32,
    "num_train_problems": 100,
    "num_iterations": 20,
    "problems_per_iteration": 10,
    "samples_per_problem": 4,
    "learning_rate": 5e-5,
    "temperature": 0.8,
    "max_tokens": 400,
    "ppo_epochs": 1,
    "ppo_clip_low": 0.8,
    "ppo_clip_high": 1.2,
    # "start_from_checkpoint": "runs/my-warm-up",  # a run, a checkpoint, a model folder or an adapter
}

if __name__ == "__main__":
    typed = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    words = [f"{key}={value}" for key, value in {**config, "run.name": "rlvr_train", **typed}.items()]
    others = [word for word in sys.argv[1:] if "=" not in word]  # --help; what is none is refused
    sys.exit(run(["train", "--config-name=mbpp", *words, *others]))
