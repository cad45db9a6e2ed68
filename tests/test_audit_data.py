"""The shipped audit rows for mathematics: their form, so that a bad row cannot enter unseen.

Reads `rlvr/audit/data/math_pairs.jsonl` as it stands. Left out on purpose: whether a verifier agrees with the labels
(that is what `rlvr audit` measures), and the labels' mathematics, which each row's note gives for a reader.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path

PAIRS = Path(__file__).parents[1] / "rlvr" / "audit" / "data" / "math_pairs.jsonl"
FIELDS = {"id": str, "category": str, "answer": str, "response": str, "label": bool, "note": str}
LINES = PAIRS.read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]


def test_every_row_has_exactly_the_documented_fields_and_types():
    for row in ROWS:
        assert {name: type(value) for name, value in row.items()} == FIELDS, row


def test_there_are_enough_rows_and_negatives_are_the_larger_half():
    positives = sum(row["label"] for row in ROWS)
    assert len(ROWS) >= 400
    assert 0.40 <= positives / len(ROWS) <= 0.50


def test_ids_are_unique_and_name_their_category():
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["id"].rsplit("-", 1)[0] == row["category"].replace(" ", "-")


def test_no_pair_of_answer_and_response_is_repeated():
    pairs = Counter((row["answer"], row["response"]) for row in ROWS)
    assert [pair for pair, count in pairs.items() if count > 1] == []


def test_every_category_has_enough_rows_and_both_labels():
    labels = defaultdict(list)
    for row in ROWS:
        labels[row["category"]].append(row["label"])
    for category, found in labels.items():
        assert len(found) >= 8, category
        assert set(found) == {True, False}, category


def test_rows_are_sorted_by_category():
    categories = [row["category"] for row in ROWS]
    assert categories == sorted(categories)


def test_every_row_gives_its_gold_and_the_reason_for_its_label():
    for row in ROWS:
        assert row["answer"].strip(), row["id"]
        assert row["note"].strip(), row["id"]


def test_hostile_rows_stay_small_enough_to_read_and_ship():
    for line, row in zip(LINES, ROWS, strict=True):
        assert len(line.encode("utf-8")) < 20_000, row["id"]
