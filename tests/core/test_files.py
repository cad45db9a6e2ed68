"""Files are whole or absent, whenever the process dies; damage is noticed; names cannot leave their folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlvr.core import files
from rlvr.core.files import check_name, find_damage, new_folder, read_json, remove_leftovers, write_atomic

DYING = """
import os, sys
from pathlib import Path
from rlvr.core import files
path = Path(sys.argv[1])
"""


def dies(code: str, path: Path) -> None:
    """Run `code` in a process that ends itself in the middle, without any cleaning up."""
    done = subprocess.run([sys.executable, "-c", DYING + code, str(path)], timeout=60, check=False)
    assert done.returncode == 9


def content(folder: Path) -> dict[str, str]:
    return {f.name: f.read_text() for f in folder.iterdir() if f.name != "checksums.json"}


@pytest.mark.parametrize("name", ["a", "step-3", "A.b_c-9", "x" * 128, "...", ".hidden"])
def test_plain_names_pass(name: str) -> None:
    """Letters, digits, dot, underscore and dash, up to 128 of them."""
    assert check_name(name, "run") == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a b", "a\n", "ä", "x" * 129, "a\0"])
def test_names_that_could_leave_the_folder_are_refused(name: str) -> None:
    """Separators, the two dots, blanks, line ends and overlong names; the message says what the name is for."""
    with pytest.raises(ValueError, match="run name"):
        check_name(name, "run name")


def test_write_atomic_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    """Text or bytes, new or over an old file; no temporary file stays."""
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_write_atomic_keeps_the_old_file_when_writing_fails(tmp_path: Path) -> None:
    """Content that cannot be written raises, and the old content stays."""
    path = tmp_path / "a"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["a"])


def test_write_atomic_keeps_the_old_file_when_killed_before_the_rename(tmp_path: Path) -> None:
    """The process ends just before the rename: the old file is there, whole; the remains can be swept."""
    path = tmp_path / "a"
    write_atomic(path, "old")
    dies("os.replace = lambda *_: os._exit(9)\nfiles.write_atomic(path, 'new')", path)
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["a"]


def test_new_folder_appears_whole_with_checksums(tmp_path: Path) -> None:
    """Files and subfolders arrive together, and `verified` finds nothing wrong."""
    with new_folder(tmp_path / "c") as folder:
        (folder / "w").write_text("1")
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("2")
        assert not (tmp_path / "c").exists()
    assert os.listdir(tmp_path) == ["c"]
    assert find_damage(tmp_path / "c") == ""
    (tmp_path / "c" / "sub" / "x").write_text("3")
    assert "sub/x" in find_damage(tmp_path / "c")


def test_new_folder_replaces_an_old_one(tmp_path: Path) -> None:
    """No file of the old folder survives in the new one."""
    for name in ("old", "new"):
        with new_folder(tmp_path / "c") as folder:
            (folder / name).write_text(name)
    assert content(tmp_path / "c") == {"new": "new"}
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_new_folder_keeps_the_old_one_when_the_block_raises(tmp_path: Path, error: type[BaseException]) -> None:
    """An error or an interrupt inside leaves the old folder and no remains."""
    with new_folder(tmp_path / "c") as folder:
        (folder / "f").write_text("old")
    with pytest.raises(error), new_folder(tmp_path / "c") as folder:
        (folder / "f").write_text("half")
        raise error
    assert content(tmp_path / "c") == {"f": "old"}
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(
    "moment",
    [
        "with files.new_folder(path) as f:\n    (f / 'f').write_text('half')\n    os._exit(9)",
        "files.sha256 = lambda _: os._exit(9)\nwith files.new_folder(path) as f:\n    (f / 'f').write_text('new')",
        "os.rename = lambda *_: os._exit(9)\nwith files.new_folder(path) as f:\n    (f / 'f').write_text('new')",
    ],
    ids=["in the block", "while summing", "before the rename"],
)
def test_new_folder_keeps_the_old_one_when_killed(tmp_path: Path, moment: str) -> None:
    """The process ends in the middle: the old folder is intact, the remains are swept later."""
    path = tmp_path / "c"
    with new_folder(path) as folder:
        (folder / "f").write_text("old")
    dies(moment, path)
    assert content(path) == {"f": "old"}
    assert find_damage(path) == ""
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["c"]


def test_the_replaced_folder_comes_back_after_a_kill_between_the_renames(tmp_path: Path) -> None:
    """Two renames swap the folders. Dead between them, nothing is at the path: sweeping puts the old one back."""
    path = tmp_path / "c"
    with new_folder(path) as folder:
        (folder / "f").write_text("old")
    dies(
        "real, done = os.rename, []\n"
        "def rename(a, b):\n    os._exit(9) if done else (done.append(1), real(a, b))\n"
        "os.rename = rename\n"
        "with files.new_folder(path) as f:\n    (f / 'f').write_text('new')",
        path,
    )
    assert not path.exists()
    remove_leftovers(tmp_path)
    assert content(path) == {"f": "old"}
    assert find_damage(path) == ""
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("at", [0, 5, -1])
def test_verified_sees_one_flipped_bit(tmp_path: Path, at: int) -> None:
    """Any byte of any file; the message names the file."""
    with new_folder(tmp_path / "c") as folder:
        (folder / "w.bin").write_bytes(bytes(range(200)))
    data = bytearray((tmp_path / "c" / "w.bin").read_bytes())
    data[at] ^= 1
    (tmp_path / "c" / "w.bin").write_bytes(data)
    assert "w.bin" in find_damage(tmp_path / "c")


def test_verified_sees_a_missing_file_and_missing_or_broken_sums(tmp_path: Path) -> None:
    """A lost file, a folder that is no checkpoint, a damaged list: each is reported, none raises."""
    with new_folder(tmp_path / "c") as folder:
        (folder / "w").write_text("1")
    (tmp_path / "c" / "w").unlink()
    assert "w" in find_damage(tmp_path / "c")
    (tmp_path / "c" / "checksums.json").write_text("{")
    assert find_damage(tmp_path / "c")
    (tmp_path / "c" / "checksums.json").write_text("[1]")
    assert find_damage(tmp_path / "c")
    assert find_damage(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/dev/zero", "does not lie inside"),
        ("../outside", "does not lie inside"),
        ("sub/../../outside", "does not lie inside"),
        ("zeros", "ordinary file"),
        ("pipe", "ordinary file"),
        ("sub", "ordinary file"),
        ("n" * 5000, "n{80}"),
        ("w\0", "ordinary file"),
    ],
)
@pytest.mark.timeout(20)
def test_verified_reads_ordinary_files_of_the_folder_only(tmp_path: Path, name: str, says: str) -> None:
    """A list that names a device, a pipe or a file elsewhere is refused, and none of them is read."""
    (tmp_path / "outside").write_text("1")
    with new_folder(tmp_path / "c") as folder:
        (folder / "sub").mkdir()
        (folder / "w").write_text("1")
    (tmp_path / "c" / "zeros").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "c" / "pipe")
    sums = json.loads((tmp_path / "c" / "checksums.json").read_text())
    (tmp_path / "c" / "checksums.json").write_text(json.dumps({name: sums["w"], **sums}))
    assert re.search(says, find_damage(tmp_path / "c"))


def test_verified_wants_every_file_listed(tmp_path: Path) -> None:
    """A list of nothing, or of a part, says nothing about the rest; what a file manager leaves is no part."""
    with new_folder(tmp_path / "c") as folder:
        for name in ("v", "w"):
            (folder / name).write_text(name)
    (tmp_path / "c" / ".directory").write_text("")
    assert find_damage(tmp_path / "c") == ""
    sums = json.loads((tmp_path / "c" / "checksums.json").read_text())
    (tmp_path / "c" / "checksums.json").write_text("{}")
    assert "lists no file" in find_damage(tmp_path / "c")
    (tmp_path / "c" / "checksums.json").write_text(json.dumps({"v": sums["v"]}))
    assert "w is not listed" in find_damage(tmp_path / "c")
    (tmp_path / "c" / "checksums.json").write_text("[" * 20_000)
    assert "not JSON" in find_damage(tmp_path / "c")


@pytest.mark.timeout(20)
def test_a_json_file_that_holds_something_else_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, says in (
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 20_000, "not JSON"),
        ("[1]", "a list"),
        ("3", "an? int"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"a.json .*{says}.*, expected .*what was there; delete it"):
            read_json(path, "what was there", "delete it")
    path.write_text('{"a": 1}')
    assert read_json(path, "what was there") == {"a": 1}
    path.unlink()
    for make in (lambda: None, path.mkdir, lambda: (path.rmdir(), path.symlink_to("/dev/zero"))):
        make()
        with pytest.raises(ValueError, match=r"a.json is missing or not an ordinary file, expected what was there"):
            read_json(path, "what was there")


def test_sweeping_leaves_ordinary_files_alone(tmp_path: Path) -> None:
    """Only the names that atomic writing uses are touched."""
    for name in ("a", ".b", "c.tmp", ".d.old.txt"):
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".b", ".d.old.txt", "a", "c.tmp"]
    assert files.sha256(tmp_path / "a").startswith("2d711642b726b044")
