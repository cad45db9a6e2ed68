"""Reinforcement learning on mathematics: sums, GSM8K or any dataset builder, in any order of sampling and training.

    python -m rlvr.compat.recipes.math_rl env=arithmetic model_name=./my-model max_steps=50
    python -m rlvr.compat.recipes.math_rl env=gsm8k data=./gsm8k \
        stream_minibatch_config.num_minibatches=4
    python -m rlvr.compat.recipes.math_rl env=mine.problems:MyDatasetBuilder \
        async_config.max_steps_off_policy=2

A builder is named by its path and gets batch_size, group_size, renderer_name, model_name_for_tokenizer and seed, and
what is set as `env.kwargs.options.*`; the cookbook's own builders are such. Old answers need a loss that clips:
`loss_fn=ppo`.
"""

import sys

from rlvr.compat.recipes.arguments import Recipe
from rlvr.compat.recipes.rl_basic import WORDS as BASIC

ENVS = {
    "arithmetic": "rlvr.compat.problem_envs:ArithmeticDatasetBuilder",
    "gsm8k": "rlvr.compat.problem_envs:Gsm8kDatasetBuilder",
}
WORDS = {
    **BASIC,
    "env": ["env.kwargs.dataset={}"],
    "groups_per_batch": ["training.prompts_per_step={}"],  # the cookbook's word for it
    "temperature": ["rollout.temperature={}"],
    "stream_minibatch_config.groups_per_batch": ["training.prompts_per_step={}"],
    "stream_minibatch_config.num_minibatches": ["training.num_minibatches={}"],
    "async_config.groups_per_batch": ["training.prompts_per_step={}"],
    "async_config.max_steps_off_policy": ["training.max_steps_off_policy={}"],
    "max_steps_off_policy": ["training.max_steps_off_policy={}"],
}


def run(words: list[str]) -> int:
    given = dict(word.split("=", 1) for word in words if word.startswith("env="))
    chosen = ENVS.get(given.get("env", ""), given.get("env"))
    if chosen is not None and ":" not in chosen:
        print(f"math_rl: env={chosen!r}, expected {', '.join(ENVS)} or package.module:Builder", file=sys.stderr)
        return 2
    return Recipe("math_rl", WORDS, __doc__ or "").run(
        [f"env={chosen}" if word.startswith("env=") else word for word in words]
    )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
