"""Reinforcement learning on GSM8K in one readable loop over the SDK's calls: sample, reward, forward_backward, step.

    python -m rlvr.compat.recipes.rl_loop model_name=./my-model data=./gsm8k log_path=/tmp/rl-loop
    python -m rlvr.compat.recipes.rl_loop model_name=Qwen/Qwen3-8B base_url=http://127.0.0.1:8000      # any such server

In this process `rlvr.clients.local` computes; with `base_url` the public `tinker` SDK asks a server (its key is in
TINKER_API_KEY). Left out on purpose: evaluation, resume, curves (`rl_basic`).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Config:
    """The settings of the recipe. `data` is a folder with GSM8K's train.jsonl; without it the rows come from the hub.
    `max_steps` ends earlier."""

    model_name: str = "meta-llama/Llama-3.1-8B"
    data: str | None = None
    base_url: str | None = None
    log_path: str = "/tmp/rl-loop"
    batch_size: int = 128
    group_size: int = 16
    learning_rate: float = 4e-5
    lora_rank: int = 32
    max_tokens: int = 256
    loss_fn: str = "importance_sampling"
    renderer_name: str | None = None
    seed: int = 0
    max_steps: int | None = None


def main(config: Config) -> None:
    from rlvr.compat import model_info, renderers
    from rlvr.compat.problem_envs import Gsm8kEnv
    from rlvr.core import rng
    from rlvr.envs.gsm8k import gsm8k

    if config.base_url is None:
        from rlvr.clients import local as tinker

        service_client = tinker.ServiceClient(folder=Path(config.log_path) / "weights")
    else:
        import tinker

        service_client = tinker.ServiceClient(base_url=config.base_url)
    types: Any = tinker.types
    training_client: Any = service_client.create_lora_training_client(
        base_model=config.model_name, rank=config.lora_rank, seed=config.seed
    ).result()
    tokenizer = training_client.get_tokenizer()
    name = config.renderer_name or model_info.get_recommended_renderer_name(config.model_name)
    renderer = renderers.get_renderer(name, tokenizer)
    adam_params = types.AdamParams(learning_rate=config.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)

    source = gsm8k(config.data, template="{question}")
    tasks = (source.train(config.seed, i, "") for i in range(source.size("")))
    problems = [Gsm8kEnv(task.prompt_text, task.meta["answer"], renderer) for task in tasks]
    batches = len(problems) // config.batch_size
    if batches < 1:
        raise ValueError(f"batch_size={config.batch_size}, but there are only {len(problems)} questions to train on")
    steps = batches if config.max_steps is None else min(batches, config.max_steps)
    Path(config.log_path).mkdir(parents=True, exist_ok=True)

    with open(Path(config.log_path) / "metrics.jsonl", "w", encoding="utf-8") as log:
        for step in range(steps):
            started = time.perf_counter()
            sampling_client: Any = training_client.save_weights_and_get_sampling_client().result()

            # Ask for all groups before reading one: what is asked for at once is computed together.
            asked: list[tuple[Gsm8kEnv, list[int], Any]] = []
            for i in range(step * config.batch_size, (step + 1) * config.batch_size):
                question = {"role": "user", "content": problems[i].get_question()}
                prompt = renderer.build_generation_prompt([question]).to_ints()
                params = types.SamplingParams(
                    max_tokens=config.max_tokens,
                    stop=renderer.get_stop_sequences(),
                    seed=rng.key(config.seed, step, i) % 2**31,
                )
                future = sampling_client.sample(types.ModelInput.from_ints(prompt), config.group_size, params)
                asked.append((problems[i], prompt, future))

            datums: list[Any] = []
            rewards: list[float] = []
            for problem, prompt, future in asked:
                sequences = future.result().sequences
                answers = [renderers.get_text_content(renderer.parse_response(s.tokens)[0]) for s in sequences]
                group = [float(problem.check_answer(answer)) for answer in answers]
                rewards += group
                advantages = [reward - sum(group) / len(group) for reward in group]
                if all(advantage == 0 for advantage in advantages):
                    continue  # a group of equal rewards has no signal
                for sequence, advantage in zip(sequences, advantages, strict=True):
                    before, tokens = len(prompt) - 1, [*prompt, *sequence.tokens]
                    inputs: dict[str, Any] = {
                        "target_tokens": tokens[1:],
                        "logprobs": [0.0] * before + list(sequence.logprobs),
                        "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
                    }
                    if config.loss_fn == "gspo":
                        inputs["sequence_ratio_mask"] = [0.0] * before + [1.0] * len(sequence.tokens)
                    datums.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))

            metrics: dict[str, float] = {}
            if datums:
                fwd_bwd = training_client.forward_backward(datums, loss_fn=config.loss_fn)
                optim = training_client.optim_step(adam_params)
                fwd_bwd.result()
                metrics.update(optim.result().metrics or {})
            metrics |= {
                "progress/batch": step,
                "progress/done_frac": (step + 1) / steps,
                "optim/lr": config.learning_rate,
                "reward/total": sum(rewards) / len(rewards),
                "env/all/reward/total": sum(rewards) / len(rewards),  # as every other loop says it
                "trained/answers": len(datums),
                "time/total": time.perf_counter() - started,
            }
            log.write(json.dumps({"step": step, **metrics}) + "\n")
            log.flush()
            print(f"step {step}: reward/total {metrics['reward/total']:.3f}, {len(datums)} answers with signal")
    print(f"saved {training_client.save_state('final').result().path}")
    if config.base_url is not None:
        from rlvr.clients.tinker_sdk import end_session

        end_session(service_client)


if __name__ == "__main__":
    from rlvr.compat.recipes.arguments import HELP, dataclass_help, parse

    try:
        if set(HELP) & set(sys.argv):
            print(dataclass_help(Config, __doc__ or ""))
            sys.exit(0)
        main(parse(Config, sys.argv[1:]))
    except ValueError as mistake:
        print(f"rl_loop: {mistake}", file=sys.stderr)
        sys.exit(2)
