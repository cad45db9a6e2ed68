"""Packages that a file of tests needs: looked for, and imported only by the tests that use them.

Every process of a suite that is shared among processes imports every file of tests, and runs a part of them.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need_package(name: str, reason: str) -> None:
    """Skip the module of the caller where the package is not installed. Unlike `pytest.importorskip` it imports
    nothing."""
    if find_spec(name) is None:
        pytest.skip(reason, allow_module_level=True)
