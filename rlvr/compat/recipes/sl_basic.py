"""Supervised learning on conversations, by `rlvr train`: the mean negative log-likelihood of their last messages.

    python -m rlvr.compat.recipes.sl_basic model_name=./my-model data=./conversations.jsonl log_path=/tmp/sl_basic

`data` holds a JSON object a line, `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}`; a
tenth of them is held out. All settings of `rlvr train` are taken too.
"""

import sys

from rlvr.compat.recipes.arguments import Recipe

WORDS = {
    "model_name": ["model.name={}"],
    "lora_rank": ["model.lora.rank={}"],
    "data": ["env.kwargs.data={}"],
    "batch_size": ["sft.batch_size={}"],
    "learning_rate": ["sft.optimizer.learning_rate={}"],
    "max_steps": ["sft.steps={}"],
    "max_tokens": ["rollout.max_tokens={}"],
}

if __name__ == "__main__":
    sys.exit(Recipe("sl_basic", WORDS, __doc__ or "").run(sys.argv[1:]))
