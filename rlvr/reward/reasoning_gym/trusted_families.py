"""Families of `reasoning_gym` whose own scorer gives 1 to answers that are wrong, found by `rlvr audit`.

`docs/reasoning-gym.md` has the audit. `python -m pytest tests/test_reasoning_gym_audit.py` tries each again.
"""

from __future__ import annotations

UNSOUND: dict[str, str] = {}
"""What the scorer of a family accepts beside right answers, as the end of "its scorer ..."."""
