"""What the tests of chat prompts share: grade-school rows of our own, and a model folder like Qwen2.5-Instruct's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.code_rows import chat_tokenizer

REAL = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
ROWS = [
    {"question": f"Ann has {a} pens and buys {b} more. How many pens has she?", "answer": f"{a} + {b}\n#### {a + b}"}
    for a in range(2, 22)
    for b in (3, 5)
]
SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# As Qwen2.5's: a system message of its own where none is given.
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_rows(folder: Path, rows: Any = ROWS) -> Path:
    """A folder with train.jsonl (all but ten rows) and test.jsonl."""
    folder.mkdir(exist_ok=True)
    for split, part in (("train", rows[:-10]), ("test", rows[-10:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def qwen_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """Qwen2.5's architecture and template with two layers, a small byte-level vocabulary and random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"pad_token": "<|endoftext|>"})
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(1)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
