"""`tinker://run/kind/name`: the path by which clients name saved weights.

The parts become folder names, so they are checked here. Left out on
purpose: who may read them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlvr.core.files import check_name

KINDS = ("weights", "sampler_weights", "external_weights")
_SCHEME = "tinker://"
_RUN = re.compile(r"[A-Za-z0-9._:-]{1,200}")


@dataclass(frozen=True)
class CheckpointPath:
    """The parts of a `tinker://` path; `str()` gives the path; `run` is the model id of the training run that saved
    it."""

    run: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run) or self.run in (".", ".."):
            raise ValueError(f"run {self.run[:80]!r}: expected 1 to 200 letters, digits, '.', '_', ':' or '-'")
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind[:80]!r}: expected {', '.join(KINDS[:-1])} or {KINDS[-1]}")
        check_name(self.name, "checkpoint name")

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        parts = text.removeprefix(_SCHEME).split("/")
        if not text.startswith(_SCHEME) or len(parts) != 3:
            raise ValueError(f"path {text[:200]!r}: expected {_SCHEME}<run>/<{'|'.join(KINDS)}>/<name>")
        try:
            return cls(*parts)
        except ValueError as error:
            raise ValueError(f"path {text[:200]!r}: {error}") from None

    def __str__(self) -> str:
        return f"{_SCHEME}{self.run}/{self.kind}/{self.name}"


def run_folder(root: Path, run: str) -> Path:
    """The folder of a run. Its id holds colons, which some file systems do not allow."""
    return root / "runs" / run.replace(":", ".")
