"""Says what is at a path or an address: a run, a checkpoint, a model, an adapter, a GGUF file, a name, a server's path.

    place = WeightsPlace.of("runs/arithmetic/checkpoints/best")
    place.kind, place.run                      # WeightsKind.CHECKPOINT, Path("runs/arithmetic")

Only names and the presence of files are read: nothing is loaded, and no hub or server is asked. `rlvr.runs.weights`
opens what is there; `rlvr.training.initial_weights` finds the newest and the best checkpoint of a run.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from rlvr.core.files import find_damage, read_json
from rlvr.core.registry import did_you_mean

SETTINGS = "resolved.yaml"  # the settings of a run, which make a folder a run's
CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints
MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
GGUF_MAGIC = b"GGUF"  # with which such a file begins, whatever its name


class WeightsKind(str, Enum):
    """The kinds of weights that a text can name: a run, a checkpoint, a model, ..."""

    RUN = "a run"
    CHECKPOINT = "a checkpoint of a run"
    GGUF = "a GGUF file"
    MODEL = "a model folder"
    ADAPTER = "an adapter"
    HUB = "a name of the hub"
    SERVER = "weights at a server"
    UNKNOWN = "nothing that is known here"


EXPECTED = {
    WeightsKind.RUN: "a run folder",
    WeightsKind.CHECKPOINT: "one of its checkpoints",
    WeightsKind.MODEL: f"a model folder ({MODEL_CONFIG} and its weights)",
    WeightsKind.ADAPTER: f"an adapter ({ADAPTER_CONFIG})",
    WeightsKind.HUB: "a hub name (OWNER/NAME)",
}


@dataclass(frozen=True)
class WeightsPlace:
    """What `given` names. `folder` is the path as it is written, whether it exists or not; `run` the folder of the run
    that it is, or that it is a checkpoint of. A checkpoint holds a model or an adapter too."""

    given: str
    kind: WeightsKind
    folder: Path
    run: Path | None = None

    @classmethod
    def of(cls, given: str | Path) -> WeightsPlace:
        """Find out what `given` names; ValueError for a folder or a package with several GGUF files."""
        text = str(given)
        if "://" in text or text.startswith("tinker:"):
            return cls(text, WeightsKind.SERVER, Path(text))
        folder = Path(text).expanduser()
        if run := find_run(folder):
            return cls(text, WeightsKind.RUN if run == folder else WeightsKind.CHECKPOINT, folder, run)
        if find_gguf(text):
            return cls(text, WeightsKind.GGUF, folder)
        if is_model(folder) or has_adapter(folder):
            return cls(text, WeightsKind.MODEL if is_model(folder) else WeightsKind.ADAPTER, folder)
        is_of_hub = is_hub_name(text) and not Path(folder.parts[0]).is_dir()
        return cls(text, WeightsKind.HUB if is_of_hub else WeightsKind.UNKNOWN, folder)

    @property
    def is_model(self) -> bool:
        """Whether the folder holds a whole model, and not an adapter alone."""
        return is_model(self.folder)

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds an adapter, and no whole model."""
        return has_adapter(self.folder) and not self.is_model

    @property
    def adapter(self) -> Path | None:
        """The folder, if it holds an adapter, and no whole model."""
        return self.folder if self.is_adapter else None

    @property
    def is_written_as_path(self) -> bool:
        """Whether the text can only be a path, whether or not something is there."""
        return self.given.startswith((".", "/", "~"))

    @property
    def problem(self) -> str:
        """Why a folder with weights is not there, in words."""
        if self.folder.is_dir():
            return "it holds no weights that are known here"
        return f"there is no such folder{find_near_folder(self.folder)}"

    @property
    def damage(self) -> str:
        """What is wrong with weights that a run saved; '' for others, which have no checksums."""
        return find_damage(self.folder) if (self.folder / "policy.json").exists() else ""

    def find_tokenizer(self) -> str | None:
        """The folder, if it has a tokenizer of its own."""
        return str(self.folder) if (self.folder / "tokenizer_config.json").exists() else None

    def find_base(self, given: str | None, option: str = "model.name=<its base model>") -> str:
        """The model that an adapter belongs to: the one that is given, else the one that it names itself. `option` is
        how to give one, for messages."""
        named = read_json(self.folder / ADAPTER_CONFIG, "the config of an adapter").get("base_model_name_or_path")
        base = given or named
        if not isinstance(base, str) or not (is_hub_name(base) or is_model(Path(base).expanduser())):
            raise ValueError(f"{self.folder} names the base model {base!r}, which was not found; give {option}")
        return base


def list_expected(*kinds: WeightsKind) -> str:
    """What a message expects: `a run folder, one of its checkpoints or an adapter (adapter_config.json)`."""
    *first, last = (EXPECTED[kind] for kind in kinds)
    return f"{', '.join(first)} or {last}"


def find_run(folder: Path) -> Path | None:
    """The run folder that a folder is, or that it is a checkpoint of; None for other folders."""
    if (folder / SETTINGS).exists():
        return folder
    run = folder.parent.parent
    return run if folder.parent.name == CHECKPOINTS and (run / SETTINGS).exists() else None


def is_model(folder: Path) -> bool:
    """Whether a folder holds a whole model, and not an adapter alone."""
    return (folder / MODEL_CONFIG).exists()


def has_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).exists()


def is_hub_name(name: str) -> bool:
    """Whether the text has the form OWNER/NAME of a hub name and no file here has that path."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def find_near_folder(missing: Path) -> str:
    """` (did you mean 'my-model'?)`: the folder that is there with a name near that of the first missing part."""
    place = missing.absolute()
    while not place.parent.is_dir():
        place = place.parent
    near = did_you_mean(place.name, [entry.name for entry in place.parent.iterdir() if entry.is_dir()])
    return near if place == missing.absolute() or not near else f" {place.name}{near}"


def find_gguf(name: str) -> Path | None:
    """The GGUF file that a model's name stands for; None if it is the name of another kind of model.

    ValueError if a folder or a package holds several.
    """
    place = Path(name).expanduser()
    is_readable = place.is_file() and os.access(place, os.R_OK)
    if place.suffix.lower() == ".gguf" or (is_readable and read_magic(place) == GGUF_MAGIC):
        return place
    folders = [place] if place.is_dir() else _package_folders(name)
    files = sorted(file for folder in folders for file in folder.glob("*.[gG][gG][uU][fF]"))
    if not files or (place.is_dir() and is_model(place)):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ValueError(f"model.name={name!r}: {files[0].parent} holds {len(files)} GGUF files ({names}); name one")
    return files[0]


def read_magic(file: Path) -> bytes:
    """The first bytes of a file."""
    with open(file, "rb") as opened:
        return opened.read(len(GGUF_MAGIC))


def _package_folders(name: str) -> list[Path]:
    """The folders of an installed package, which is not imported."""
    module = name.replace("-", "_")
    if not module.isidentifier():
        return []
    found = find_spec(module)
    return [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
