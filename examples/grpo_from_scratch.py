"""All of GRPO in one readable loop over the four primitives: sample, verify, forward_backward, optim_step.

    python examples/grpo_from_scratch.py            # about a minute on two cores, no GPU

A two-layer transformer with random weights learns to answer `1 + 2 =` mod 5 from the verdict alone: it never sees a
solution. What a real run adds (supervised fine-tuning, curriculum, evaluation, resume, curves) is `rlvr train`. This is
the whole algorithm:

    1. put each problem to the policy G times                         sample
    2. reward each answer by checking it                              verify
    3. advantage = reward - mean reward of its group                  (a group of equal rewards has no signal)
    4. loss = -sum of min(ratio A, clip(ratio) A) over answer tokens  forward_backward, a summed loss
    5. one AdamW step                                                 optim_step

The token weight 1/T makes the sum a mean over the T answer tokens of the step; it is folded into the advantage.
"""

import argparse
import tempfile
from pathlib import Path

from rlvr import (
    AdamParams,
    Datum,
    Engine,
    LocalTrainingClient,
    ModelInput,
    SamplingParams,
    Trajectory,
    build_model,
    build_tokenizer,
)
from rlvr.core import rng
from rlvr.core.types import mean

P = 5  # arithmetic is modulo P
GROUP = 8  # answers per problem


def make_client(seed: int) -> LocalTrainingClient:
    """A small qwen3-shaped model with random weights, trained whole."""
    words = [*map(str, range(P)), "+", "=", "<end>", "<pad>"]
    tokenizer = build_tokenizer("words", words, end="<end>", pad="<pad>")
    shape = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 16,
    }
    model = build_model(shape, tokenizer, seed=seed, device="cpu", dtype="float32")
    engine = Engine(model)
    return LocalTrainingClient(engine, engine.create_policy("policy"), Path(tempfile.mkdtemp()))


def verify(answer: str, a: int, b: int) -> float:
    """1 for the right number and nothing else."""
    return 1.0 if answer == str((a + b) % P) else 0.0


def train(steps: int, seed: int) -> list[float]:
    """The mean reward of every step."""
    client = make_client(seed)
    tokenizer = client.get_tokenizer()
    problems = [(a, b) for a in range(P) for b in range(P)]
    curve: list[float] = []
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client()
        prompts = {(a, b): tokenizer.encode(f"{a} + {b} =", add_special_tokens=False) for a, b in problems}
        # Submit everything before reading anything: what is queued runs as one batch.
        pending = {
            ab: sampler.sample(
                ModelInput.from_ints(tokens), GROUP, SamplingParams(max_tokens=2, seed=rng.key(seed, step, *ab))
            )
            for ab, tokens in prompts.items()
        }

        batch: list[Trajectory] = []
        rewards: list[float] = []
        for (a, b), future in pending.items():
            group = []
            for answer in future.result().sequences:
                text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
                reward = verify(text, a, b)
                group.append(Trajectory("", prompts[a, b], text, answer.tokens, answer.logprobs or [], reward=reward))
            baseline = mean([t.reward or 0.0 for t in group])
            rewards.append(baseline)
            for t in group:
                t.advantage = (t.reward or 0.0) - baseline
            batch += [t for t in group if t.advantage != 0.0]
        curve.append(mean(rewards))
        if step % 20 == 0 or step + 1 == steps:
            print(f"step {step:3d}  reward {curve[-1]:.3f}  answers with signal {len(batch)}/{len(problems) * GROUP}")
        if not batch:
            continue
        tokens = sum(t.num_action_tokens for t in batch)
        data = [Datum.from_trajectory(t, weight=1.0 / tokens) for t in batch]
        client.forward_backward(data, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}).result()
        client.optim_step(AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result()
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    curve = train(arguments.steps, arguments.seed)
    print(f"reward: first step {curve[0]:.3f}, last ten {mean(curve[-10:]):.3f}")
