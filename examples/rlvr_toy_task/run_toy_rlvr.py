"""A toy policy learns to use the words a reward looks for: the whole loop by hand, in seconds, without a model.

    python examples/rlvr_toy_task/run_toy_rlvr.py --steps 50
    python examples/rlvr_toy_task/run_toy_rlvr.py --steps 100 --algorithm ppo --checkpoint toy.json

The policy is a table of word logits that does not read its prompt; sampling, reward and update are the real ones. With
`--checkpoint` the run is saved as it goes, and the same command with more steps goes on where it stopped.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rlvr import (
    PPO,
    REINFORCE,
    MockRolloutSampler,
    PPOConfig,
    REINFORCEConfig,
    load_checkpoint,
    resolve_reward,
    save_checkpoint,
)
from rlvr.core.task_statistics import Interval, share_interval

KEYWORDS = ["solution", "answer"]
PROMPTS = ["Explain quantum computing", "What is machine learning?", "Why is the sky blue?", "How do plants make food?"]
ANSWERS = 4  # to each prompt, in each step
ALGORITHMS = {
    "reinforce": lambda: REINFORCE(REINFORCEConfig(learning_rate=5e-5)),
    "ppo": lambda: PPO(PPOConfig(learning_rate=2e-5)),
}


def keyword_rate(sampler: MockRolloutSampler) -> Interval:
    """The share of fresh answers with a keyword, with a 95 % interval: 1,024 answers, by draws that no step uses."""
    calls, sampler.calls = sampler.calls, 1_000_000
    batch = sampler.generate_trajectories([prompt for prompt in PROMPTS for _ in range(256)])
    sampler.calls = calls
    return share_interval([float(any(word in answer.response for word in KEYWORDS)) for answer in batch])


def sparkline(values: list[float]) -> str:
    levels, low, high = "_.-=+*#@", -0.5, 1.0
    return "".join(levels[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach a toy policy to use certain words.")
    parser.add_argument("--steps", type=int, default=50, help="steps in all")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), default="reinforce")
    parser.add_argument("--checkpoint", type=Path, help="a JSON file to save to and to go on from")
    asked = parser.parse_args()
    if asked.steps < 1:
        parser.error(f"--steps {asked.steps}: expected at least 1")

    sampler = MockRolloutSampler(max_new_tokens=64, seed=asked.seed)
    client = sampler.training_client(asked.checkpoint.parent if asked.checkpoint else None)
    reward_fn = resolve_reward("keyword_contains", keywords=KEYWORDS)
    algorithm = ALGORITHMS[asked.algorithm]()
    before = keyword_rate(sampler)
    rewards: list[float] = []
    weights: str | None = None
    if asked.checkpoint and asked.checkpoint.exists():
        state = load_checkpoint(asked.checkpoint)
        if not state.keys() >= {"seed", "calls", "rewards", "weights", "algorithm"}:
            parser.error(f"{asked.checkpoint} was not saved by this example; give another file")
        if state["seed"] != asked.seed:
            parser.error(f"{asked.checkpoint} is of a run with --seed {state['seed']}; give that one, or another file")
        algorithm.load_state(state["algorithm"])
        rewards, weights, sampler.calls = state["rewards"], state["weights"], state["calls"]
        client.load_state_with_optimizer(str(asked.checkpoint.parent / state["weights"])).result()
        print(f"going on from {asked.checkpoint} after {algorithm.step} steps")

    for step in range(algorithm.step, asked.steps):
        batch = sampler.generate_trajectories([prompt for prompt in PROMPTS for _ in range(ANSWERS)])
        for answer in batch:
            answer.reward = reward_fn(answer.prompt, answer.response)
        result = algorithm.update(batch, client)
        rewards.append(batch.mean_reward)
        if result.kl_div > 0.1:
            print(f"warning: large policy change in step {step + 1}: {result.kl_div:.3f} nats a token")
        last = step + 1 == asked.steps
        if step % 5 == 0 or last:
            rate = sum(answer.reward == 1.0 for answer in batch) / len(batch)
            loss = f"loss {result.total_loss:8.3f}"
            print(f"step {step + 1:4d}  reward {batch.mean_reward:6.3f}  keywords {rate:4.0%}  {loss}")
        if asked.checkpoint and (last or (step + 1) % 10 == 0):
            older, weights = weights, f"{asked.checkpoint.stem}-{step + 1:06d}"
            client.save_state(weights).result()
            state = {"seed": asked.seed, "calls": sampler.calls, "rewards": rewards, "weights": weights}
            save_checkpoint({**state, "algorithm": algorithm.get_state()}, asked.checkpoint)
            if older and older != weights:
                shutil.rmtree(asked.checkpoint.parent / older, ignore_errors=True)

    after = keyword_rate(sampler)
    print(f"reward, step by step: {sparkline(rewards)}")
    for name, rate in (("before", before), ("after", after)):
        print(f"answers with a keyword {name:6s}: {rate.value:6.1%}  (95 % interval {rate.low:.1%} to {rate.high:.1%})")
    print(f"weights {client.policy.sha256()[:16]}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as mistake:
        sys.exit(f"run_toy_rlvr: {mistake}")
