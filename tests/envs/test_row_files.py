"""Rows of local files: each format, folders with splits, globs, dotted columns, and every way a file can be wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlvr.envs.row_files import FileRow, field_of, find_value, list_columns, read_rows

ROWS: list[dict[str, Any]] = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "2, or 3?\nSay.", "answer": 'the "3"'}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "3 pens?"}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 0},
}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=3)
    return str(path)


def write_json(path: Path, rows: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return str(path)


def read_values(*where: Any) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(*where)]


def test_the_same_rows_come_from_every_format(tmp_path: Path) -> None:
    lines = tmp_path / "d.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    table = tmp_path / "d.csv"
    table.write_text('prompt,answer\n1 + 1 =,2\n"2, or 3?\nSay.","the ""3"""\n')
    tabs = tmp_path / "d.tsv"
    tabs.write_text('prompt\tanswer\n1 + 1 =\t2\n"2, or 3?\nSay."\t"the ""3"""\n')
    files = [lines, table, tabs, write_json(tmp_path / "d.json", ROWS), write_parquet(tmp_path / "d.parquet", ROWS)]
    assert [read_values(file) for file in files] == [ROWS] * 5


def test_a_row_says_where_it_stands(tmp_path: Path) -> None:
    """By line where the file has lines, else by number; the id of a task has the name of its file."""
    (tmp_path / "d.jsonl").write_text('\n{"a": 1}\n')
    assert list(read_rows(tmp_path / "d.jsonl")) == [FileRow("d.jsonl:2", f"{tmp_path}/d.jsonl, line 2", {"a": 1})]
    (tmp_path / "d.csv").write_text('a,b\n"x\ny",2\n\n3,\n')
    assert [(row.id, row.values) for row in read_rows(tmp_path / "d.csv")] == [
        ("d.csv:3", {"a": "x\ny", "b": "2"}),
        ("d.csv:5", {"a": "3", "b": None}),
    ]
    path = write_parquet(tmp_path / "d.parquet", [{"a": i} for i in range(7)])
    assert [row.place for row in read_rows(path)][4] == f"{path}, row 5"
    assert next(read_rows(write_json(tmp_path / "d.json", [{"a": 1}]))).id == "d.json:1"


def test_a_glob_a_list_and_a_folder_are_all_their_files_in_order(tmp_path: Path) -> None:
    for name, i in (("b/part.jsonl", 2), ("a/part.jsonl", 1)):
        write_json(tmp_path / name, {"a": i})
    found = list(read_rows(str(tmp_path / "*/part.jsonl")))
    assert [(row.id, row.values["a"]) for row in found] == [("a/part.jsonl:1", 1), ("b/part.jsonl:1", 2)]
    assert found == list(read_rows(str(tmp_path))) == list(read_rows([str(tmp_path / "a"), str(tmp_path / "b")]))


def test_the_files_of_a_folder_belong_to_the_split_that_their_names_say(tmp_path: Path) -> None:
    """As the hub lays them out: `train-00000-of-00002.parquet`, `data/test.parquet`, `dev/rows.jsonl`."""
    for number in (0, 1):
        write_parquet(tmp_path / f"train-0000{number}-of-00002.parquet", [{"a": number}])
    write_parquet(tmp_path / "data" / "test.parquet", [{"a": 9}])
    write_json(tmp_path / "dev" / "rows.jsonl", {"a": 5})
    write_json(tmp_path / ".cache" / "train.jsonl", {"a": 7})
    assert read_values(tmp_path) == read_values(tmp_path, "train") == [{"a": 0}, {"a": 1}]
    assert (read_values(tmp_path, "test"), read_values(tmp_path, "validation")) == ([{"a": 9}], [{"a": 5}])
    write_json(tmp_path / "test_sft-00000-of-00001.jsonl", {"a": 3})
    assert (read_values(tmp_path, "test_sft"), read_values(tmp_path, "test")) == ([{"a": 3}], [{"a": 9}])
    write_json(tmp_path / "final" / "rows.jsonl", {"a": 4})
    assert read_values(tmp_path, "final") == [{"a": 4}]
    with pytest.raises(
        ValueError, match=r"no split 'tests' \(did you mean 'test'\?\); .*test, test_sft, train, validation; set"
    ):
        read_values(tmp_path, "tests")


def test_a_file_belongs_to_one_split(tmp_path: Path) -> None:
    """Its name decides before its folders, the innermost of these before the others."""
    for number, name in enumerate(("test/train.jsonl", "train/dev/rows.jsonl", "train/my-test/rows.jsonl"), 1):
        write_json(tmp_path / name, {"a": number})
    assert [read_values(tmp_path, split) for split in ("train", "validation", "test")] == [
        [{"a": 1}],
        [{"a": 2}],
        [{"a": 3}],
    ]
    write_json(tmp_path / "train_test.jsonl", {"a": 4})
    for split in ("train", "test", "validation"):
        with pytest.raises(ValueError, match=r"'train_test' names two splits, train and test; rename it"):
            read_values(tmp_path, split)


def test_relative_and_absolute_paths_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "a.jsonl", {"a": 1})
    path = write_json(tmp_path / "b" / "b.jsonl", {"a": 2})
    assert [row.id for row in read_rows(["a.jsonl", path])] == ["a.jsonl:1", "b/b.jsonl:1"]
    assert [row.id for row in read_rows("b/b.jsonl")] == ["b.jsonl:1"]


def test_a_folder_without_splits_is_for_training(tmp_path: Path) -> None:
    write_json(tmp_path / "rows.jsonl", {"a": 1})
    assert read_values(tmp_path) == [{"a": 1}]
    with pytest.raises(ValueError, match=r"has no split 'test'.*it has none; set env.kwargs.split"):
        read_values(tmp_path, "test")


def test_reading_stops_where_the_caller_stops(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"a": 1}\nbroken\n')
    rows = read_rows(tmp_path / "d.jsonl")
    assert next(rows).values == {"a": 1}
    with pytest.raises(ValueError, match="line 2: not JSON"):
        next(rows)


def test_dotted_names_lead_into_nested_columns(tmp_path: Path) -> None:
    (row,) = read_values(write_parquet(tmp_path / "train.parquet", [VERL]))
    assert row == VERL
    assert find_value(row, "reward_model.ground_truth") == "3" and find_value(row, "extra_info.index") == 0
    assert find_value(row, "reward_model.truth") is None and find_value(row, "data_source.x") is None
    assert find_value({"a.b": 1, "a": {"b": 2}}, "a.b") == 1  # a column of that very name
    assert list_columns(row) == [
        "data_source", "prompt", "reward_model.style", "reward_model.ground_truth", "extra_info.split",
        "extra_info.index",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"here: the field 'ground_truth' is missing \(did you mean 'reward_model.gro"):
        field_of(row, "ground_truth", "here", "answer_field")


WRONG = {
    "empty.csv": ("", "has no rows"),
    "head.csv": ("prompt,answer\n", "has no rows"),
    "twice.csv": ("a,b,a\n1,2,3\n", "names the column 'a' more than once; give each column its own name"),
    "wide.csv": ("a,b\n1,2\n1,2,3\n", "wide.csv, line 3: 3 cells where the header has 2 .*in quotes"),
    "open.csv": ('a,b\n"1,2\n', "open.csv, line 2: not CSV .*quotes closed"),
    "latin.csv": (b"a\n\xe9\n", "latin.csv: not UTF-8 .*save the file as UTF-8"),
    "mixed.jsonl": ('{"a": 1}\n["b"]\n', "mixed.jsonl, line 2: a JSON list, expected an object"),
    "mixed.json": ('[{"a": 1}, "b"]', "mixed.json, row 2: a JSON str, expected an object"),
    "cut.json": ('[{"a": 1},', "cut.json: not JSON .*expected one JSON object a line, or one list"),
    "none.json": ("[]", "none.json has no rows"),
    "text.parquet": ("prompt,answer\n1,2\n", "text.parquet: not a whole parquet file .*fetch or write it again"),
    "empty.parquet": ("", "empty.parquet: not a whole parquet file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named_with_its_row_and_a_remedy(tmp_path: Path, name: str) -> None:
    content, message = WRONG[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=message):
        read_values(tmp_path / name)


def test_a_parquet_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = Path(write_parquet(tmp_path / "d.parquet", ROWS * 50))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"d\.parquet: not a whole parquet file"):
        read_values(path)


def test_a_parquet_table_without_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"d\.parquet has no rows"):
        read_values(write_parquet(tmp_path / "d.parquet", []))


def test_a_path_that_names_no_file_says_what_is_expected(tmp_path: Path) -> None:
    for path, message in (
        ("nothing.csv", "nothing.csv does not exist; give a file, folder or glob of JSON lines, JSON, CSV or parquet"),
        ("*.parquet", "no file matches; give"),
        (".", "holds no file of a known kind"),
    ):
        with pytest.raises(ValueError, match=message):
            read_values(tmp_path / path)


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"'pyarrow': pip install 'rlvr\[data\]', or save the rows as JSON lines"):
        read_values(path)
