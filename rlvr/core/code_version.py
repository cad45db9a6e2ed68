"""The versions of the code of this process, to compare with those of other processes and of earlier runs."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

import rlvr


def describe_code(*packages: str) -> dict[str, str]:
    """The versions of Python, of this package with a hash of its files, and of other `packages` by name."""
    versions = {"python": platform.python_version(), "rlvr": f"{rlvr.__version__} ({hash_package()})"}
    return versions | {name: _find_version(name) for name in packages}


def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


@cache
def hash_package() -> str:
    """A short hash of the package's Python files, names and contents."""
    root, digest = Path(rlvr.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
