"""What the tests of code tasks share: problems of our own in MBPP's form, and a model folder made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REAL = Path(__file__).parents[3] / "shared" / "data" / "mbpp"


def problem(number: int) -> dict[str, Any]:
    """A row of MBPP's full file: add a constant. CRLF line ends, as there."""
    name = f"add_{number}"
    return {
        "text": f"Write a function to add {number} to a number.",
        "code": f"def {name}(x):\r\n    return x + {number}",
        "task_id": number,
        "test_setup_code": "",
        "test_list": [f"assert {name}({x}) == {x + number}" for x in (1, 5, -number)],
        "challenge_test_list": [],
    }


def mbpp_file(folder: Path, numbers: Any = (2, 3, 4, *range(11, 31), *range(511, 515), *range(601, 621))) -> Path:
    path = folder / "mbpp.jsonl"
    path.write_text("".join(json.dumps(problem(n)) + "\n" for n in numbers), encoding="utf-8")
    return path


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> Any:
    """Bytes, `<|im_start|>` and `<|im_end|>` (the end-of-sequence token), and a template that uses them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([json.dumps(problem(n)) for n in range(40)], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = CHAT
    return made


def model_folder(folder: Path, context: int = 2048) -> Path:
    """A model folder as a hub model would look: a 2-layer qwen3 with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=context, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
