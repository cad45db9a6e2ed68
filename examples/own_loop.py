"""GRPO as a loop of one's own: every line of a step can be replaced.

    python examples/own_loop.py                # a small model of random weights: half a minute of one core
    python examples/own_loop.py ./my-model     # an adapter for a model; Ctrl-C stops, the same command goes on

Sampling, verdicts, advantages, gradient and step are here; the folder, metrics, checkpoints, resume and the evaluations
with their intervals come from `Loop`. The task: sums of two digits.
"""

import argparse
import sys

import rlvr
from rlvr.core import rng
from rlvr.rollout import open_groups, rollout, score

PROMPTS, GROUP = 8, 8  # prompts a step, completions of each
SMALL = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 16,
}  # fmt: skip


class Sums(rlvr.TaskSource):
    """`3 + 4 =`: every seventh pair of digits is held out."""

    levels, reward = ("",), "exact_match"
    vocabulary = tuple("0123456789+=")  # of the small model
    pairs = tuple((a, b) for a in range(10) for b in range(10))

    def _task(self, a, b):
        return rlvr.Task(f"{a}+{b}", f"{a} + {b} =", {"answer": str(a + b)})

    def train(self, seed, index, level):
        known = [pair for i, pair in enumerate(self.pairs) if i % 7]
        return self._task(*known[rng.integer(len(known), rng.key("sums", seed, index))])

    def heldout(self, count):
        return [self._task(*pair) for pair in self.pairs[::7]][:count]

    def env(self, task, tokenizer):
        return rlvr.envs.PromptEnv(task, tokenizer)

    def demonstration(self, task, key):
        return None


def close(prompt, response, meta):
    """1 for the right sum, less for one that is further away."""
    digits = "".join(c for c in response.split(".")[0] if c.isdigit())
    return 1 / (1 + abs(int(digits[:4]) - int(meta["answer"]))) if digits else 0.0


def main(model: str | None, folder: str, steps: int, learning_rate: float) -> None:
    source, params = Sums(), rlvr.SamplingParams(max_tokens=4)
    lora, tokenizer = (rlvr.LoraConfig(rank=8), None) if model else (None, "words")
    with rlvr.Loop(
        folder, source, close, model=model or SMALL, lora=lora, tokenizer=tokenizer, params=params,
        settings={"rate": learning_rate},
    ) as loop:  # fmt: skip
        loop.evaluate("baseline", tasks=15, samples=8)
        for step in loop.steps(steps):
            sampler = loop.client.save_weights_and_get_sampling_client()
            tasks = [source.train(loop.seed, PROMPTS * step + i, "") for i in range(PROMPTS)]
            groups = open_groups(source, tasks, GROUP, loop.tokenizer, f"step-{step}")
            batch = rollout(groups, sampler, params, seed=rng.key(loop.seed, step))
            score(batch, loop.reward)
            result = rlvr.update(loop.client, "grpo", batch, learning_rate=learning_rate)
            loop.log(result.metrics(), reward=rlvr.TrajectoryBatch(batch).mean_reward)
            print(f"step {step + 1}/{steps}  reward {rlvr.TrajectoryBatch(batch).mean_reward:.3f}")
        loop.evaluate("final", tasks=15, samples=8)
    before, after = (rlvr.load_run(folder).summary[side]["mean_reward"]["value"] for side in ("baseline", "final"))
    print(f"mean reward of held-out sums: {before:.3f}, after {steps} steps {after:.3f}; everything is in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--folder", default="runs/own-loop")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--learning-rate", type=float, help="1e-3 with a model, 3e-3 without")
    given = parser.parse_args()
    try:
        main(given.model, given.folder, given.steps, given.learning_rate or (1e-3 if given.model else 3e-3))
    except KeyboardInterrupt as stop:  # Ctrl-C: the exit code of the commands
        print(stop, file=sys.stderr)
        sys.exit(130)
