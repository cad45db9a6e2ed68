"""The shipped audit rows for mathematics: their form, so that a bad row cannot enter unseen.

Reads the files in `rlvr/audits/data` as they stand. Left out on purpose: whether a verifier agrees with the labels
(that is what `rlvr audit` measures), and the labels' mathematics, which each row's note gives for a reader.
"""

import json
from collections import Counter, defaultdict

import pytest

from rlvr.audits.verifier_errors import BUILTIN

FIELDS = {"id": str, "category": str, "answer": str, "response": str, "label": bool, "note": str}
SETS = {
    name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for name, path in BUILTIN.items()
}
every_set = pytest.mark.parametrize("rows", SETS.values(), ids=SETS)


@every_set
def test_every_row_has_exactly_the_documented_fields_and_types(rows):
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == FIELDS, row


@every_set
def test_there_are_enough_rows_and_negatives_are_the_larger_half(rows):
    positives = sum(row["label"] for row in rows)
    assert len(rows) >= (400 if rows is SETS["builtin"] else 60)
    assert 0.40 <= positives / len(rows) <= 0.50


@every_set
def test_ids_are_unique_and_name_their_category(rows):
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["id"].rsplit("-", 1)[0] == row["category"].replace(" ", "-")


@every_set
def test_no_pair_of_answer_and_response_is_repeated(rows):
    pairs = Counter((row["answer"], row["response"]) for row in rows)
    assert [pair for pair, count in pairs.items() if count > 1] == []


@every_set
def test_every_category_has_enough_rows_and_both_labels(rows):
    labels = defaultdict(list)
    for row in rows:
        labels[row["category"]].append(row["label"])
    for category, found in labels.items():
        assert len(found) >= 8, category
        assert set(found) == {True, False}, category


@every_set
def test_rows_are_sorted_by_category(rows):
    categories = [row["category"] for row in rows]
    assert categories == sorted(categories)


@every_set
def test_every_row_gives_its_gold_and_the_reason_for_its_label(rows):
    for row in rows:
        assert row["answer"].strip(), row["id"]
        assert row["note"].strip(), row["id"]


@every_set
def test_hostile_rows_stay_small_enough_to_read_and_ship(rows):
    for row in rows:
        assert len(json.dumps(row)) < 20_000, row["id"]


def test_the_table_of_the_data_counts_the_rows():
    """The last two numbers of each line: true rows, false rows."""
    table = (BUILTIN["builtin"].parent / "README.md").read_text(encoding="utf-8").partition("## Rows")[2]
    counts = Counter((row["category"], row["label"]) for row in SETS["builtin"])
    lines = [f"| {name} | {counts[name, True]} | {counts[name, False]} |" for name in sorted({c for c, _ in counts})]
    assert "\n".join(lines) in table and f"**all {len(SETS['builtin'])}**" in table
