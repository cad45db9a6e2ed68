"""One place says what is at a path or an address; what opens it refuses in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.weights_place import (
    ADAPTER_CONFIG,
    CHECKPOINTS,
    MODEL_CONFIG,
    SETTINGS,
    WeightsKind,
    WeightsPlace,
    find_run,
    list_expected,
)
from rlvr.runs.weights import check_model_folder, check_to_sample, name_model, with_model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in with a run, its checkpoints, a model, an adapter on it, and a GGUF file."""
    monkeypatch.chdir(tmp_path)
    files = {
        f"runs/mine/{SETTINGS}": "seed: 1\n",
        f"runs/mine/{CHECKPOINTS}/final-000001/{MODEL_CONFIG}": "{}",
        f"model/{MODEL_CONFIG}": json.dumps({"architectures": ["Qwen3ForCausalLM"]}),
        f"judge/{MODEL_CONFIG}": json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}),
        f"adapter/{ADAPTER_CONFIG}": json.dumps({"base_model_name_or_path": "model"}),
        "adapter/tokenizer_config.json": "{}",
        "lost/" + ADAPTER_CONFIG: json.dumps({"base_model_name_or_path": "gone"}),
        "file.gguf": "GGUF",
        "packed/one.gguf": "GGUF",
        "empty/notes.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "kind", "run"),
    [
        ("runs/mine", WeightsKind.RUN, "runs/mine"),
        ("./runs/mine", WeightsKind.RUN, "runs/mine"),
        ("runs/mine/checkpoints/final-000001", WeightsKind.CHECKPOINT, "runs/mine"),
        ("runs/mine/checkpoints/best", WeightsKind.CHECKPOINT, "runs/mine"),
        ("model", WeightsKind.MODEL, None),
        ("adapter", WeightsKind.ADAPTER, None),
        ("file.gguf", WeightsKind.GGUF, None),
        ("packed", WeightsKind.GGUF, None),
        ("Qwen/Qwen3-8B", WeightsKind.HUB, None),
        ("runs/other", WeightsKind.UNKNOWN, None),  # a folder `runs` is here, so it is a path, not a name of the hub
        ("empty", WeightsKind.UNKNOWN, None),
        ("tinker://run/weights/1", WeightsKind.SERVER, None),
        ("tinker:Qwen/Qwen3-8B", WeightsKind.SERVER, None),
    ],
)
def test_a_text_names_one_kind_of_weights(here: Path, given: str, kind: WeightsKind, run: str | None) -> None:
    place = WeightsPlace.of(given)
    assert (place.kind, place.run) == (kind, run and Path(run))


def test_a_checkpoint_belongs_to_a_run_only_in_its_folder_of_checkpoints(here: Path) -> None:
    assert find_run(here / "runs/mine/checkpoints/any") == here / "runs/mine"
    assert find_run(here / "runs/mine/evaluations/any") is None
    assert find_run(here / "elsewhere/checkpoints/any") is None


def test_a_checkpoint_holds_a_model_too(here: Path) -> None:
    place = WeightsPlace.of("runs/mine/checkpoints/final-000001")
    assert place.is_model and not place.is_adapter


def test_what_is_loaded_to_sample(here: Path) -> None:
    """A model by its folder, an adapter by its base and its own tokenizer, a name as it is."""
    for given, expected in (
        ("./model", ("model", None)),
        ("adapter", ("model", "adapter")),
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", None)),
        ("./not-there", ("./not-there", None)),
    ):
        assert name_model(WeightsPlace.of(given)) == expected
    assert name_model(WeightsPlace.of("lost"), base="model") == ("model", None)
    with pytest.raises(ValueError, match=r"'gone'.*give model.name="):
        name_model(WeightsPlace.of("lost"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("empty", r"empty: it holds no weights that are known here; expected a run folder, .* or a hub name"),
        ("./modle", r"there is no such folder \(did you mean 'model'\?\)"),
        ("tinker://run/weights/1", r"there is no such folder"),
        ("judge", r"a Qwen3ForSequenceClassification, which writes no text.*reward.type=classifier"),
    ],
)
def test_what_cannot_be_sampled_says_why(here: Path, given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_to_sample(WeightsPlace.of(given), pytest.fail)


def test_a_name_of_the_hub_that_looks_like_a_folder_is_noted(here: Path) -> None:
    said: list[str] = []
    check_to_sample(WeightsPlace.of("rums/mine"), said.append)
    assert "did you mean 'runs'" in said[0] and "OWNER/NAME" in said[0]
    check_to_sample(WeightsPlace.of("file.gguf"), pytest.fail)
    check_to_sample(WeightsPlace.of("adapter"), pytest.fail)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/mine", "is a run; give model.start_from=runs/mine"),
        ("./modle", r"no such folder \(did you mean 'model'\?\); give a folder"),
        ("empty", "no config.json; give a folder"),
    ],
)
def test_a_name_of_a_model_that_is_no_model_says_what_to_give(here: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model_folder(build_config(load(None, None, ["env.name=toy", f"model.name={name}"])))


@pytest.mark.parametrize("key", ["model.name", "model.tokenizer", "teacher.model"])
def test_a_missing_folder_is_named_before_a_hub_is_asked(here: Path, key: str) -> None:
    """A path is refused; what may be a name of the hub is noted."""
    words, notes = ["env.name=toy", "algorithm.name=distillation"], list[str]()
    if key != "model.name":
        words += ["model.config={model_type: llama}", "model.tokenizer=words"]
    for path in ("./none", "none/of/these", "runs/none"):
        with pytest.raises(ValueError, match=f"{key}={path}: no such folder"):
            check_model_folder(build_config(load(None, None, [*words, f"{key}={path}"])))
    check_model_folder(build_config(load(None, None, [*words, f"{key}=no-such-model"])), notes.append)
    assert len(notes) == 1 and f"{key}=no-such-model: there is no such folder" in notes[0]


def test_the_weights_of_another_model_replace_the_section_of_the_model(here: Path) -> None:
    loaded = load(None, None, ["env.name=toy", "model.dtype=float32", "client=mock"])
    replaced = with_model(loaded, WeightsPlace.of("adapter"))
    assert replaced.values["model"] == {"dtype": "float32", "name": "model", "tokenizer": "adapter"}
    assert replaced.values["client"]["name"] == "local"
    with pytest.raises(ValueError, match=r"model.lora.rank has no effect.*model.dtype"):
        with_model(load(None, None, ["env.name=toy", "model.lora.rank=4"]), WeightsPlace.of("model"))


def test_the_expected_kinds_are_one_sentence() -> None:
    assert list_expected(WeightsKind.RUN, WeightsKind.ADAPTER) == "a run folder or an adapter (adapter_config.json)"
