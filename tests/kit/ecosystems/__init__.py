"""Environments of other projects for the tests; each runs in an interpreter that has its project."""

from __future__ import annotations

import pytest


def find_interpreter(kind: str) -> str:
    """The interpreter of `rlvr env install KIND`; without it, the test is skipped."""
    from rlvr.envs.ecosystems.installs import is_complete, locate

    if not is_complete(kind):
        pytest.skip(f"{kind} is not installed (rlvr env install {kind}, or RLVR_ENVIRONMENTS)")
    return str(locate(kind) / "bin/python")
