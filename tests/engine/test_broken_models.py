"""A model folder with one broken file: each command and function says in one message which file, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.cli.main import run
from rlvr.core.model_files import find_broken_file
from rlvr.engine.model_loading import build_model, load_model
from rlvr.engine.tokenizer import load_tokenizer
from tests.kit.tiny import CONFIGS


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    """A whole model folder of three shards, besides the index."""
    model = build_model(CONFIGS["qwen3"], tokenizer, seed=1, device="cpu", dtype="float32")
    size = sum(weight.nbytes for weight in model.module.state_dict().values())
    model.module.save_pretrained(tmp_path / "model", max_shard_size=size // 2)
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def cut(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_bytes()
        (folder / name).write_bytes(text[: len(text) // 2])

    return change


def set_in_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    shard(folder).rename(folder / "pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard without its end": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-9]), "cut short.*again"),
    "a shard without most of its header": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:60]), "cut short"),
    "an empty shard": (lambda f: shard(f).write_bytes(b""), "cut short"),
    "a shard that is a web page": (lambda f: shard(f).write_bytes(b"<!doctype html>" * 9), "no file of safetensors"),
    "a pointer of Git LFS": (lambda f: shard(f).write_text("version https://git-lfs.github.com/"), "git lfs pull"),
    "a missing shard": (lambda f: shard(f).unlink(), r"index.json names \d files.*model-00002"),
    "an index that is cut": (cut("model.safetensors.index.json"), "index.json is damaged: not JSON"),
    "no weights but a pickle": (to_pickle, "pytorch_model.bin is a pickle.*save_pretrained"),
    "a config that is cut": (cut("config.json"), "config.json is damaged: not JSON"),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json holds a list"),
    "a config without a type": (lambda f: (f / "config.json").write_text("{}"), "config.json has no model_type"),
    "a type of text": (set_in_config(model_type=7), "model_type=7, expected text"),
    "an unknown type": (set_in_config(model_type="qwem3"), r"config.json has model_type='qwem3'.*did you mean 'qwen3'"),
    "a field of another kind": (set_in_config(num_hidden_layers="two"), "config.json is wrong.*num_hidden_layers"),
    "another width": (set_in_config(intermediate_size=10), r"do not belong together.*another shape.*10"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_model_folder_is_described(
    folder: Path, tokenizer: Any, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message names the file and the remedy, and no library adds lines of its own."""
    assert find_broken_file(folder) == ""
    change, message = BROKEN[what]
    change(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_model(str(folder), tokenizer, device="cpu", dtype="float32")
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_broken_tokenizer_is_described(folder: Path, file: str) -> None:
    cut(file)(folder)
    with pytest.raises(ValueError, match=f"cannot load a tokenizer.*{file} is damaged.*again"):
        load_tokenizer(str(folder))


def test_a_tokenizer_that_is_valid_json_and_no_tokenizer_is_described(folder: Path) -> None:
    """The library that reads it raises a plain `Exception`."""
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot load a tokenizer"):
        load_tokenizer(str(folder))


def test_a_folder_of_a_tokenizer_alone_needs_no_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    assert load_tokenizer(str(folder)).eos_token


def test_every_command_says_it_in_one_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`rlvr train` and `rlvr.train` say it before a run folder is made, and `serve engine` before it listens."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}", "answer": "2"}) + "\n" for i in range(20)))
    shard(folder).write_bytes(b"")
    tasks = ["--config-name=dataset", "env.kwargs.path=rows.jsonl", "rollout.max_tokens=4"]
    for words in (
        ["train", *tasks, "model.name=./model"],
        ["evaluate", "./model", *tasks],
        ["serve", "engine", "--model", "./model", "--port", "0"],
    ):
        capfd.readouterr()
        assert run(words) == 2
        said = capfd.readouterr()
        assert said.err.count("\n") == 1 and "cut short" in said.err, said.err
        assert said.out == ""
    with pytest.raises(ValueError, match="cut short"):
        rlvr.train("./model", "rows.jsonl", steps=1, max_tokens=4, quiet=True)
    assert not Path("runs").exists()
