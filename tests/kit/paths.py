"""Where the repository and the modules of these tests are."""

from __future__ import annotations

import os
from pathlib import Path

KIT = Path(__file__).parent
ROOT = KIT.parents[1]


def python_path() -> str:
    """PYTHONPATH for a process that loads modules of `kit` by their bare names, as it would a user's own."""
    return os.pathsep.join([str(KIT), str(ROOT), os.environ.get("PYTHONPATH", "")])
