"""GGUF files as models: written here with the format's own library, read as folders, refused with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")

import gguf

from rlvr.core.weights_place import find_gguf
from rlvr.engine import gguf_files
from rlvr.engine.gguf_files import open_gguf, read_origin
from rlvr.engine.model_loading import load_model
from rlvr.engine.tokenizer import load_tokenizer
from rlvr.runs.run_plan import find_config

WIDTH, HEADS, WORDS, INNER = 64, 4, 270, 96
Q8 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlvr" / "gguf"


def write_gguf(file: Path, architecture: str = "llama", kind: Any = Q8) -> dict[str, np.ndarray]:
    """A llama of one layer with random weights; the weights as they are after quantization, by their name there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 256))]
    letters += [chr(256 + n) for n in range(256 - len(letters))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab"]
    tokens += [f"<extra{n}>" for n in range(WORDS - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257 + [3] * (WORDS - 260))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}")
    shapes = {
        "token_embd.weight": (WORDS, WIDTH), "output_norm.weight": (WIDTH,), "output.weight": (WORDS, WIDTH),
        "blk.0.attn_norm.weight": (WIDTH,), "blk.0.ffn_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (INNER, WIDTH), "blk.0.ffn_up.weight": (INNER, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, INNER),
    }  # fmt: skip
    draw, kept = np.random.default_rng(0), dict[str, np.ndarray]()
    for name, shape in shapes.items():
        weights = (draw.normal(size=shape) / 8).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, weights)
            kept[name] = weights
        else:
            data = gguf.quantize(weights, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
            kept[name] = gguf.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_a_file_becomes_a_folder_once_with_the_weights_that_the_format_keeps(tmp_path: Path, cache: Path) -> None:
    kept = write_gguf(file := tmp_path / "models" / "small.Q8_0.gguf")
    folder = Path(open_gguf(str(file)))
    assert folder.parent == cache and folder.name.startswith("small.Q8_0-")
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.decode(tokenizer.encode("Hello, you 2!")) == "Hello, you 2!"
    assert tokenizer.eos_token == "<|im_end|>" and "<|im_start|>" in tokenizer.chat_template
    model = load_model(str(file), tokenizer, device="cpu", dtype="float32")
    weights = dict(model.module.named_parameters())
    pairs = [
        ("model.embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("model.layers.0.mlp.up_proj", "blk.0.ffn_up"),
    ]
    for ours, theirs in pairs:
        assert np.array_equal(weights[f"{ours}.weight"].detach().numpy(), kept[f"{theirs}.weight"])
    assert "small.Q8_0.gguf, quantized as Q8_0" in model.notes[0]
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config == find_config(str(file))
    assert read_origin(folder)["weights"]["Q8_0"] == sum(w.size for w in kept.values() if w.ndim == 2)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert open_gguf(str(file)) == str(folder) and (folder / "model.safetensors").stat().st_mtime_ns == made


def test_a_damaged_copy_is_made_again_and_another_file_has_a_folder_of_its_own(tmp_path: Path) -> None:
    write_gguf(file := tmp_path / "a.gguf")
    folder = Path(open_gguf(str(file)))
    (folder / "model.safetensors").write_bytes(b"cut short")
    assert open_gguf(str(file)) == str(folder) and (folder / "model.safetensors").stat().st_size > 10_000
    write_gguf(file, kind=gguf.GGMLQuantizationType.F16)
    other = Path(open_gguf(str(file)))
    assert other != folder and read_origin(other)["quantization"] == "F16"


def test_a_folder_or_an_installed_package_stands_for_the_file_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "site" / "tiny_model" / "m.gguf")
    (tmp_path / "site" / "tiny_model" / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("tiny-model", "tiny_model", str(tmp_path / "site" / "tiny_model")):
        assert find_gguf(name) == tmp_path / "site" / "tiny_model" / "m.gguf"
    for name in ("json", "no-such-package", "owner/name", "", str(tmp_path)):
        assert find_gguf(name) is None
    write_gguf(tmp_path / "site" / "tiny_model" / "n.gguf")
    with pytest.raises(ValueError, match=r"holds 2 GGUF files \(m.gguf, n.gguf\); name one"):
        find_gguf("tiny-model")


def test_a_file_is_known_by_how_it_begins(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    file = (tmp_path / "m.gguf").rename(tmp_path / "m.bin")
    assert find_gguf(str(file)) == file
    (tmp_path / "other.bin").write_bytes(b"PK")
    assert find_gguf(str(tmp_path / "other.bin")) is None


def spoil(file: Path, how: str) -> None:
    if how == "cut short":
        file.write_bytes(file.read_bytes()[:-20_000])
    elif how == "cut in its header":
        file.write_bytes(file.read_bytes()[:300])
    elif how == "renamed":
        file.write_bytes(b"PK\x03\x04 a zip file")
    elif how == "missing":
        file.unlink()
    else:
        write_gguf(file, architecture="a-new-kind")


@pytest.mark.parametrize(
    "how, said",
    [
        ("cut short", r"cannot read m.gguf: .*cut short"),
        ("cut in its header", r"cannot read m.gguf: .*cut short"),
        ("renamed", r"is not a GGUF file \(it begins with b'PK"),
        ("missing", r"cannot be read: No such file"),
        ("an unknown architecture", r"cannot read m.gguf: .*a-new-kind"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, cache: Path, how: str, said: str) -> None:
    write_gguf(file := tmp_path / "m.gguf")
    spoil(file, how)
    with pytest.raises(ValueError, match=said):
        open_gguf(str(file))
    assert not cache.exists() or not list(cache.iterdir())


def test_too_little_memory_is_said_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file := tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_files, "free_memory", lambda: 100_000)
    with pytest.raises(ValueError, match=r"reading 0 M weights takes .* GiB of memory"):
        open_gguf(str(file))


@pytest.mark.parametrize("package", ["accelerate", "gguf"])
def test_without_a_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    write_gguf(file := tmp_path / "m.gguf")
    find = gguf_files.find_spec
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(ValueError, match=rf"needs the package {package}: pip install 'rlvr\[gguf\]'"):
        open_gguf(str(file))


def test_a_package_that_is_missing_is_not_called_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ImportError("sentencepiece is required for this tokenizer")

    write_gguf(file := tmp_path / "m.gguf")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    with pytest.raises(ValueError, match="needs a package that is missing: sentencepiece is required") as raised:
        open_gguf(str(file))
    assert "cut short" not in str(raised.value)
