"""Where a run's weights come from, if not from the model alone: `model.start_from`.

A run folder of ours (its newest whole checkpoint), one of its checkpoints, a model folder as `transformers` writes it,
or an adapter in peft's format. A whole model takes the place of the base model, under an adapter too; an adapter is
where the policy's own adapter starts. Exercised by `python -m pytest tests/seeds/test_seed_001.py`.
"""

from __future__ import annotations

from pathlib import Path

from rlvr.files import verified
from rlvr.training.journal import stored_checkpoint

_EXPECTED = (
    "a run folder, one of its checkpoints, a model folder (config.json and its weights) or an adapter "
    "(adapter_config.json)"
)


def start_folder(given: str) -> Path:
    """The folder that holds the weights; ValueError where there are none to be had."""
    if "://" in given:
        raise ValueError(
            f"model.start_from={given!r}: weights that a service keeps cannot be started from, as no client here reads "
            f"{given.partition('://')[0]}:// paths; download them and give {_EXPECTED}"
        )
    place = Path(given).expanduser()
    if (place / "resolved.yaml").exists():
        newest = stored_checkpoint(place)
        if newest is None:
            raise ValueError(f"model.start_from={given!r}: this run has no whole checkpoint yet")
        place = newest
    if not (is_model(place) or (place / "adapter_config.json").exists()):
        found = "there is no such folder" if not place.is_dir() else "it holds no weights that are known here"
        raise ValueError(f"model.start_from={given!r}: {found}; expected {_EXPECTED}")
    if (place / "policy.json").exists() and (wrong := verified(place)):
        raise ValueError(f"model.start_from={given!r}: the checkpoint is damaged: {wrong}")
    return place


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
