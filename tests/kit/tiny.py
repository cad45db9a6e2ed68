"""What the engine's tests share: tiny models' configs, prompts, rows of training, a plain pass to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlvr.core.messages import Datum, ModelInput, SamplingParams, TensorData
from tests.kit.rounding import assert_gradients_close

WORDS = [*"0123456789", "+", "-", "*", "=", "<boe>"]  # with <eoe> and <pad>: 17 tokens
END, PAD = "<eoe>", "<pad>"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_LIKE = {**SMALL, "num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **LLAMA_LIKE, "head_dim": 16, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **LLAMA_LIKE, "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "mistral": {"model_type": "mistral", **LLAMA_LIKE, "sliding_window": 6},
    "gemma2": {
        "model_type": "gemma2", **LLAMA_LIKE, "head_dim": 16, "sliding_window": 6, "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
    },
}  # fmt: skip
END_ID = 15
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12], [1, 2], [13, 0, 13]]
LENGTHS = [4, 9, 2, 7, 7, 1]


def params(seed: int = 3, tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, stop=more.pop("stop", []), **more)


def plain_logprobs(module: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    """The log-probs of `tokens` after `prompt` by one pass of the transformers model, without anything of ours."""
    with torch.no_grad():
        row = torch.tensor([prompt + tokens], device=module.device)
        logits = module(input_ids=row, use_cache=False).logits[0].float()
    table = (logits / temperature).log_softmax(-1)
    return [float(table[len(prompt) + i - 1, t]) for i, t in enumerate(tokens)]


def texts(response: Any) -> list[list[int]]:
    return [s.tokens for s in response.sequences]


def data(lengths: list[int] = LENGTHS, seed: int = 0) -> list[Datum]:
    """Rows with everything any loss needs; zero advantage and weight on the first token of each but the shortest."""
    rng = np.random.default_rng(seed)
    rows: list[Datum] = []
    for n in lengths:
        tokens = rng.integers(0, 17, n + 1)
        mask = np.array([n == 1, *[True] * (n - 1)])
        rows.append(
            Datum(
                ModelInput(tokens[:-1].tolist()),
                {
                    "target_tokens": TensorData.of(tokens[1:]),
                    "logprobs": TensorData.of(-rng.random(n) * 4 * mask),
                    "advantages": TensorData.of(rng.normal(size=n) * mask),
                    "weights": TensorData.of(rng.random(n) * mask),
                    "sequence_ratio_mask": TensorData.of(mask.astype(np.float32)),
                },
            )
        )
    return rows


def with_inputs(row: Datum, **inputs: Any) -> Datum:
    """The row with other loss inputs."""
    return Datum(row.model_input, {**row.loss_fn_inputs, **inputs})


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    return {k: p.grad.clone() for k, p in trainer.policy.masters.items() if p.grad is not None}


def assert_gradients_of_peft(trainer: Any, module: Any, path: str) -> dict[str, torch.Tensor]:
    """The adapter's gradients of the cross-entropy of `data()`, after they were compared with those of peft's layers.

    `module` is a copy of the base model that may be changed, `path` the adapter as it was saved.
    """
    from peft import PeftModel

    theirs = PeftModel.from_pretrained(module, path, is_trainable=True, torch_device="cpu").eval()
    total = torch.zeros(())
    for row in data():
        logits = theirs(input_ids=torch.tensor([row.model_input.tokens])).logits[0].log_softmax(-1)
        inputs = {k: v.to_torch() for k, v in row.loss_fn_inputs.items()}
        total = total - (logits[torch.arange(len(logits)), inputs["target_tokens"]] * inputs["weights"]).sum()
    total.backward()
    trainer.forward_backward(data(), "cross_entropy")
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.grad is not None
    }
    found = {name: gradient.cpu() for name, gradient in gradients(trainer).items()}
    assert_gradients_close(found, expected)
    return found
