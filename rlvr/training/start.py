"""Where a run's weights come from, if not from the model alone: `model.start_from`.

A run folder of ours (its newest whole checkpoint), one of its checkpoints, a model folder as `transformers` writes it,
or an adapter in peft's format. A whole model takes the place of the base model, under an adapter too; an adapter is
where the policy's own adapter starts. With client=tinker it is a path at the server (`remote_start`). Exercised by
`python -m pytest tests/seeds/test_seed_001.py tests/test_clients_tinker.py`.
"""

from __future__ import annotations

from pathlib import Path

from rlvr.files import verified
from rlvr.training.journal import stored_checkpoint, weights_at

_KEY = "model.start_from"
_EXPECTED = (
    "a run folder, one of its checkpoints, a model folder (config.json and its weights) or an adapter "
    "(adapter_config.json)"
)


def start_folder(given: str) -> Path:
    """The folder that holds the weights; ValueError where there are none to be had."""
    if "://" in given:
        raise ValueError(
            f"model.start_from={given!r}: weights that a server keeps, which no engine in this process reads: give "
            f"client=tinker with the server's model.base_url, or download them and give {_EXPECTED}"
        )
    place = newest_weights(given, _KEY)
    if not (is_model(place) or (place / "adapter_config.json").exists()):
        found = "there is no such folder" if not place.is_dir() else "it holds no weights that are known here"
        raise ValueError(f"model.start_from={given!r}: {found}; expected {_EXPECTED}")
    if (place / "policy.json").exists() and (wrong := verified(place)):
        raise ValueError(f"model.start_from={given!r}: the checkpoint is damaged: {wrong}")
    return place


def remote_start(given: str) -> str:
    """The path at a server of the weights; of a run or a checkpoint, what it says about where it keeps them."""
    path = given if "://" in given else weights_at(newest_weights(given, _KEY))
    if not path.startswith("tinker://"):
        raise ValueError(
            f"model.start_from={given!r}: client=tinker starts from tinker:// paths, or from a run that kept its "
            "weights at the same server; to go on from a folder use client=local"
        )
    return path


def newest_weights(given: str, key: str) -> Path:
    """The newest whole checkpoint where a run's folder is given as `key`, else the folder itself."""
    place = Path(given).expanduser()
    if not (place / "resolved.yaml").exists():
        return place
    newest = stored_checkpoint(place)
    if newest is None:
        raise ValueError(f"{key}={given!r}: this run has no whole checkpoint yet")
    return newest


def is_model(place: Path) -> bool:
    """Whether a folder holds a whole model, and not an adapter alone."""
    return (place / "config.json").exists()


def model_and_tokenizer(name: str | None, tokenizer: str | None, start_from: str | None) -> tuple[str | None, str]:
    """What to load both from: a whole model to start from brings its own, where no other tokenizer is named."""
    place = start_folder(start_from) if start_from else None
    if place is None or not is_model(place):
        return name, tokenizer or name or ""
    own = str(place) if (place / "tokenizer_config.json").exists() else name or str(place)
    return str(place), own if tokenizer in (None, "words", "characters", "pieces") else tokenizer
