"""What a message says of another error: one line, bounded, without a secret, and never nothing."""

from __future__ import annotations

import pytest

from rlvr.core.error_text import MOST, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one  \ntwo"), "one  "),
        (ValueError(), "ValueError"),
        (OSError(" \n"), "OSError"),
        (KeyError("name"), "'name'"),
        (ValueError("x" * 1000), "x" * MOST),
    ],
)
def test_it_is_the_first_line_or_the_type(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_a_secret_is_hidden_before_the_line_is_cut() -> None:
    """Else its first half would stand at the end."""
    assert first_line(ValueError("x" * (MOST - 4) + "hf_secret"), "hf_secret") == "x" * (MOST - 4) + "***"
    assert first_line(ValueError("of hf_secret"), "") == "of hf_secret"
