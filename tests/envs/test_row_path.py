"""An algorithm's row from a user's module: `algorithm.name=module:ROW`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlvr.algorithms import ALGORITHMS, Algorithm, resolve_algorithm

MINE = (
    "from rlvr import Algorithm\nfrom rlvr.algorithms.losses.clipped import Ppo\n"
    "GENTLE = Algorithm('gentle', 'group_mean', Ppo(0.1, 0.1), 'token_mean')\nOTHER = 3\n"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows_of_mine.py").write_text(MINE)
    sys.modules.pop("rows_of_mine", None)
    return tmp_path


def test_a_row_of_a_module_is_taken_and_its_cells_can_be_replaced() -> None:
    row = resolve_algorithm("rows_of_mine:GENTLE", clip_high=0.3)
    assert isinstance(row, Algorithm) and (row.name, row.flat["clip_low"], row.flat["clip_high"]) == (
        "gentle",
        0.1,
        0.3,
    )
    assert "gentle" not in ALGORITHMS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows_of_mine:OTHER", "the object is of type int, expected an Algorithm"),
        ("rows_of_mine:GENTEL", r"has no 'GENTEL' \(did you mean 'GENTLE'\?\)"),
        ("nowhere:ROW", "importing 'nowhere' failed"),
        ("a b:c", "is not of the form"),
    ],
)
def test_an_invalid_row_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_algorithm(name)
