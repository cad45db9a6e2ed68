"""A tiny model that answers sums of small numbers often, but not always, right: what a Tinker client can learn on.

    python tests/kit/tinker_model.py FOLDER [--steps 900]

Written as the folder of a real model, with a chat template and the special tokens of Qwen3, so that a client that
knows Qwen/Qwen3-8B finds its tokenizer there. Warmed up by a few steps of our own supervised training, so that rewards
are neither always 0 nor always 1. Exercised by test_tinker_sdk.py and test_tinker_cookbook.py.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["user\nWhat is 4 + 5?", "assistant\n9", "system\n", "How many apples are left? Provide a numerical answer"]
BATCH = 64
SURE = 0.5  # of the answers it is taught; the others are a question mark, which a reward soon drives out


def tokenizer() -> Any:
    """Bytes and the pieces of a few texts: any text can be written, the table stays small, a digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def write_model(folder: Path, steps: int = 0, seed: int = 1, context: int = 512) -> float:
    """A model in `folder`, taught `steps` batches of sums; the last batch's mean log-prob of a whole answer."""
    from rlvr.core.messages import AdamParams, Datum
    from rlvr.engine.engine import Engine
    from rlvr.engine.model_loading import build_model

    words = tokenizer()
    config = {**CONFIG, "vocab_size": len(words), "max_position_embeddings": context}
    model = build_model(config, words, seed=seed, device="cpu", dtype="float32")
    engine, rng, loss = Engine(model), random.Random(seed), 0.0
    policy = engine.create_policy("warm up")
    for step in range(steps):
        rows = [Datum.from_completion(*sum_in_words(words, rng), weight=1 / BATCH) for _ in range(BATCH)]
        loss = engine.forward_backward(policy, rows, "cross_entropy", {}).metrics["loss:sum"]
        rate = 3e-3 * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        engine.optim_step(policy, AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0))
    folder.mkdir(parents=True, exist_ok=True)
    model.module.save_pretrained(folder)
    words.save_pretrained(folder)
    return -loss


def sum_in_words(words: Any, rng: random.Random) -> tuple[list[int], list[int]]:
    """(prompt, answer) as the cookbook's arithmetic environment asks it of Qwen3, with its solved example before."""
    x, y, answer = rng.randrange(101), rng.randrange(101), "?"
    if rng.random() < SURE:
        answer = str(x + y)
    asked = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"
    prompt = asked.format(4, 5) + "9<|im_end|>\n" + asked.format(x, y)
    return words.encode(prompt), words.encode(f"{answer}<|im_end|>")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    arguments = parser.parse_args()
    print(f"log-prob of an answer: {write_model(arguments.folder, arguments.steps):.2f}")
