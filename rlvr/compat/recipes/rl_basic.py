"""Reinforcement learning on GSM8K with the reward 1[correct] + 0.1 (1[format] - 1), by `rlvr train`.

    python -m rlvr.compat.recipes.rl_basic model_name=./my-model data=./gsm8k log_path=/tmp/rl_basic
    python -m rlvr.compat.recipes.rl_basic model_name=./my-model training.steps=10 evaluation.tasks=20

The words below are short for settings of `rlvr train`; all of those are taken too. Without `data`, a folder with
train.jsonl and test.jsonl, the rows come from the hub.
"""

import sys

from rlvr.compat.recipes.arguments import Recipe

WORDS = {
    "model_name": ["model.name={}"],
    "lora_rank": ["model.lora.rank={}"],
    "batch_size": ["training.prompts_per_step={}"],
    "group_size": ["training.group_size={}"],
    "learning_rate": ["training.optimizer.learning_rate={}"],
    "max_tokens": ["rollout.max_tokens={}"],
    "max_steps": ["training.steps={}"],
    "loss_fn": ["algorithm.loss={}"],
    # with the default bounds of the SDK's losses: ratios of 0.8 to 1.2, and of 0 to 4
    "loss_fn=ppo": ["algorithm.loss=ppo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.2"],
    "loss_fn=gspo": ["algorithm.loss=gspo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.2"],
    "loss_fn=cispo": ["algorithm.loss=cispo", "algorithm.clip_low=1.0", "algorithm.clip_high=3.0"],
    "num_substeps": ["training.num_substeps={}"],
    "renderer_name": ["env.kwargs.options.renderer_name={}"],
    "data": ["env.kwargs.options.data={}"],
}

if __name__ == "__main__":
    sys.exit(Recipe("rl_basic", WORDS, __doc__ or "").run(sys.argv[1:]))
