"""Folders that the engine cannot train are refused at load with the reason; before, some of them gave wrong numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rlvr.clients.local import LocalTrainingClient
from rlvr.engine.engine import Engine
from rlvr.engine.model_loading import build_model, load_model
from tests.kit.families import HYBRID
from tests.kit.rounding import close_logprobs
from tests.kit.tiny import LLAMA_LIKE, plain_logprobs

WORDS = {"vocab_size": 17, "pad_token_id": 16, "bos_token_id": 14, "eos_token_id": 15}
TEXT = {**LLAMA_LIKE, **WORDS, "initializer_range": 0.2}
SPEECH = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 14,
}  # fmt: skip
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
IMAGES = {**VISION, "image_size": 28, "patch_size": 14}
TOWER = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
GEMMA = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def make_t5() -> Any:
    config = transformers.T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, **WORDS)
    return transformers.T5ForConditionalGeneration(config)


def make_whisper() -> Any:
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SPEECH, **WORDS))


def make_bart() -> Any:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SPEECH, **WORDS))


def make_bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**VISION, **WORDS))


def make_reward_model() -> Any:
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TEXT))


def make_qwen2_vl() -> Any:
    text = {**TEXT, "rope_parameters": ROTARY}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=TOWER)
    return transformers.Qwen2VLForConditionalGeneration(config)


def make_gemma3() -> Any:
    ids = {"image_token_index": 13, "boi_token_index": 12, "eoi_token_index": 11}
    config = transformers.Gemma3Config(text_config={**TEXT, **GEMMA}, vision_config=IMAGES, **ids)
    return transformers.Gemma3ForConditionalGeneration(config)


def make_qwen3_5() -> Any:
    config = transformers.Qwen3_5Config(text_config={**TEXT, **HYBRID}, vision_config=QWEN_TOWER)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def make_llama4() -> Any:
    text = {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 32}
    widths = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    config = transformers.Llama4Config(text_config=text, vision_config={**IMAGES, **widths})
    return transformers.Llama4ForConditionalGeneration(config)


def save(module: Any, tokenizer: Any, folder: Path) -> str:
    transformers.utils.logging.disable_progress_bar()
    try:
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        transformers.utils.logging.enable_progress_bar()
    return str(folder)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_t5, "t5 is an encoder-decoder model"),
        (make_whisper, "whisper is an encoder-decoder model"),  # transformers would load its decoder alone
        (make_bart, "bart is an encoder-decoder model"),  # and of this one random weights
        (make_bert, "not causal: a token's logits change with the tokens after it"),
        (make_reward_model, r"1 weights .* would be random \(lm_head.weight\); a reward model"),
        (make_qwen2_vl, "qwen2_vl is a model of text and images; .* docs/start/models.md"),
        (make_gemma3, "gemma3 is a model of text and images; .* docs/start/models.md"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    make: Callable[[], Any], message: str, tokenizer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)  # whether a change is seen depends on the weights
    folder = save(make(), tokenizer, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(folder, tokenizer, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "d_model": 32}, "model.config: t5 is an encoder-decoder model"),
        ({"model_type": "qwen2_vl"}, "model.config: qwen2_vl is a model of text and images"),
        ({"model_type": "vit"}, "model.config: vit is not a causal language model"),
        ({"model_type": "bert", **VISION}, "is not causal"),
    ],
)
def test_a_config_of_another_kind_is_refused(config: dict[str, Any], message: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")


@pytest.mark.slow
def test_code_of_a_models_folder_is_not_run_by_a_process_whose_terminal_says_yes(
    tokenizer: Any, tmp_path: Path
) -> None:
    """transformers would ask on the terminal."""
    folder = save_with_code(tokenizer, tmp_path)
    code = (
        "from rlvr.engine.model_loading import load_model\nfrom rlvr.engine.tokenizer import load_tokenizer\n"
        f"load_model({str(folder)!r}, load_tokenizer({str(folder)!r}), device='cpu', dtype='float32')"
    )
    done = subprocess.run([sys.executable, "-c", code], input="y\ny\n", capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and not (tmp_path / "ran").exists() and "[y/N]" not in done.stdout + done.stderr


def test_code_of_a_models_folder_is_never_run_nor_asked_for(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    folder = save_with_code(tokenizer, tmp_path)
    with pytest.raises(ValueError, match="config"):
        load_model(str(folder), tokenizer, device="cpu", dtype="float32")
    assert asked == [] and not (tmp_path / "ran").exists()


def save_with_code(tokenizer: Any, folder: Path) -> Path:
    """A model's folder whose own class of configuration leaves the file `ran` when it is imported."""
    save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), tokenizer, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}})
    )
    (folder / "configuration_own.py").write_text(
        "from pathlib import Path\nfrom transformers import PretrainedConfig\n"
        f"Path({str(folder / 'ran')!r}).touch()\nclass OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    return folder


def test_quantized_weights_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    folder = save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weights are quantized, .* `dequantize\(\)`"):
        load_model(folder, tokenizer, device="cpu", dtype="float32")


@pytest.mark.parametrize("make", [make_qwen3_5, make_llama4])
def test_a_language_model_with_a_class_of_its_own_is_loaded_without_the_rest(
    make: Callable[[], Any], tokenizer: Any, tmp_path: Path
) -> None:
    """The log-probs are those of the whole model on text; a note says what is left out; a checkpoint loads again."""
    whole = make().eval()
    model = load_model(save(whole, tokenizer, tmp_path / "whole"), tokenizer, device="cpu", dtype="float32")
    assert model.notes[0] == "of this model of text and images only the language model is loaded, trained and saved"
    prompt, answer = [1, 2, 3, 4, 5], [6, 7, 8]
    expected = close_logprobs(plain_logprobs(whole, prompt, answer))
    assert plain_logprobs(model.module, prompt, answer) == expected
    engine = Engine(model)
    client = LocalTrainingClient(engine, engine.create_policy("policy"), tmp_path)
    path = client.save_weights_for_sampler("text").result().path
    again = load_model(path, tokenizer, device="cpu", dtype="float32")
    assert plain_logprobs(again.module, prompt, answer) == expected
    client.load_state(path).result()


def test_the_language_model_of_a_vision_language_folder_can_be_saved_alone(tokenizer: Any, tmp_path: Path) -> None:
    """The program of docs/start/models.md, on a Gemma 3 with a vision tower: the same log-probs, and it loads here."""
    page = (Path(__file__).parents[2] / "docs" / "start" / "models.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    whole = make_gemma3().eval()
    source, target = save(whole, tokenizer, tmp_path / "whole"), str(tmp_path / "text")
    for shown, real in (("my-model", source), ("my-text-model", target)):
        assert f'"{shown}"' in program
        program = program.replace(f'"{shown}"', repr(real))
    transformers.utils.logging.disable_progress_bar()
    try:
        exec(program, {})
    finally:
        transformers.utils.logging.enable_progress_bar()
    model = load_model(target, tokenizer, device="cpu", dtype="float32")
    assert model.can_cache and model.can_pack and type(model.module).__name__ == "Gemma3ForCausalLM"
    prompt, answer = [t % 13 for t in range(20)], [6, 7, 8]
    with torch.no_grad():
        assert plain_logprobs(model.module, prompt, answer) == close_logprobs(plain_logprobs(whole, prompt, answer))
