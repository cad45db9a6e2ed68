"""Writes what the scripts beside it read: ./tiny-model, a Qwen3 of random weights with its template, and ./sums.jsonl.

python examples/from_trl/prepare.py
"""

import json
from pathlib import Path

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

core = Tokenizer(models.BPE())
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
core.train_from_iterator(
    [], trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
tokenizer.save_pretrained("tiny-model")
torch.manual_seed(0)
Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=special.index("<|im_end|>"),
    )
).save_pretrained("tiny-model")
rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(8) for b in range(8)]
Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
